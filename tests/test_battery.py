"""Batteries: their format, what counts as exact, doubled and unknown, and the demo's own."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_dllm_plugin import DecodingOptions, DiffusionError, DiffusionSpec, battery, demo_path
from mlx_dllm_plugin.battery import Battery, Problem, garbled, repeated, words
from mlx_dllm_plugin.errors import CheckpointError
from mlx_dllm_plugin.families import Family
from tests.conftest import ROOT
from tests.tools import process

sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import bits  # noqa: E402
from demo_problems import TASKS, problems, split_of_value  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "bits.json"
EXPECTED = 'expected an object with the texts "prompt" and "answer", or "answers" as a list of texts.'
GOOD = '{"prompt": "1 + 1 = ?", "answer": "2"}'
EOS, MASK, VOCAB = 1, 127, 128


def made(*rows: tuple[str, str]) -> Battery:
    """A battery of prompts and right answers."""
    return Battery(Path("battery.jsonl"), tuple(Problem(prompt, (answer,)) for prompt, answer in rows))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" ?! — … ", []),
        ("The dog; THE cat.", ["the", "dog", "the", "cat"]),
        ('{"pet": "ovgi","age":7}', ["pet", "ovgi", "age", "7"]),
        ("3.14 + 1,000 = 1003.14, 5.", ["3.14", "1,000", "1003.14", "5"]),
        ("don't 'tis rock'n'roll dogs'", ["don't", "tis", "rock'n'roll", "dogs"]),
        ("don’t", ["don't"]),
        ("well-known snake_case", ["well", "known", "snake", "case"]),
        ("Straße STRASSE", ["strasse", "strasse"]),
        ("caf\u00e9 cafe\u0301 CAFÉ", ["caf\u00e9"] * 3),
        ("मामा हिन्दी", ["मामा", "हिन्दी"]),
        ("q\u0323\u0301x \u0301", ["q\u0323\u0301x"]),
        ("北京欢迎你，東京", ["北京欢迎你", "東京"]),
        ("a\u2028b\x00c ❤\ufe0f🙂", ["a", "b", "c"]),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("the dog and the cat", []),
        ("the the dog", ["the"]),
        ("The, the dog", ["the"]),
        ('"dog" (dog)', ["dog"]),
        ("dog\n\nDOG dog", ["dog", "dog"]),
        ("7 7 + 7", ["7"]),
        ("7 + 7 = 14", []),
        ("very — very", []),
        ("ha-ha 2.2 1/1 bye-bye", []),
        ("3.2 2.1", []),
        ("[0, 0, 1]", ["0"]),
        ("Straße strasse", ["strasse"]),
        ("cafe\u0301 CAFÉ", ["caf\u00e9"]),
        ("मामा", []),
        ("the\u00a0the", ["the"]),
    ],
)
def test_words_that_follow_themselves(text: str, expected: list[str]) -> None:
    assert repeated(text) == expected


def test_what_counts_as_garbled() -> None:
    asked = made(("Say that that is so.", "He had had it."), ("Which one?", "Bye bye, one."))
    assert asked.lexicon == {"say", "that", "is", "so", "he", "had", "it", "which", "one", "bye"}
    assert asked.repeats == {"that", "had", "bye"}
    assert garbled([], asked) == garbled(["", "…"], asked) == battery.Garbled(words=0, doubled=0, unknown=0)
    assert garbled(["It is so."], asked) == battery.Garbled(words=3, doubled=0, unknown=0)
    assert garbled(["that that had HAD bye bye"], asked) == battery.Garbled(words=6, doubled=0, unknown=0)
    assert garbled(["It it is", "is so so so"], asked) == battery.Garbled(words=7, doubled=3, unknown=0)
    assert garbled(["Xyz xyz it, 12"], asked) == battery.Garbled(words=4, doubled=1, unknown=3)


def test_all_right_answers_are_of_the_lexicon() -> None:
    asked = Battery(Path("x"), (Problem("Name a color.", ("red", "Blue blue")),))
    assert garbled(["blue blue", "RED"], asked) == battery.Garbled(words=3, doubled=0, unknown=0)


def test_the_format(tmp_path: Path) -> None:
    file = tmp_path / "battery.jsonl"
    lines = [
        '{"prompt": "Say it.", "answer": "it\u2028is", "task": "say", "source": 3}',
        "",
        '{"prompt": "Which?", "answers": ["a", "b"], "task": null}\r',
    ]
    file.write_text("\ufeff" + "\n".join(lines), encoding="utf-8", newline="")
    problems = (Problem("Say it.", ("it\u2028is",), "say"), Problem("Which?", ("a", "b")))
    assert battery.read(file) == Battery(file, problems)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("prompt: x", "is not JSON (Expecting value)"),
        ("[" * 100_000, "is not JSON (too deep or too large)"),
        ("9" * 5000, "is not JSON (too deep or too large)"),
        ("[1, 2]", "is [1, 2]"),
        ('"text"', "is 'text'"),
        ('{"prompt": "x"}', "has no answer"),
        ('{"prompt": "x", "answer": "y", "answers": ["y"]}', 'has both "answer" and "answers"'),
        ('{"prompt": "x", "answers": "y"}', "\"answers\" is 'y'"),
        ('{"prompt": "x", "answers": []}', '"answers" is []'),
        ('{"prompt": "x", "answers": ["y", 3]}', '"answers" has 3, no text'),
        ('{"prompt": "x", "answer": null}', '"answer" has None, no text'),
        ('{"prompt": "x", "answer": " "}', "\"answer\" has ' ', no text"),
        ('{"prompt": "x", "answer": "\\ud83d"}', "\"answer\" has '\\ud83d', no text"),
        ('{"answer": "y"}', '"prompt" has None, no text'),
        ('{"prompt": ["x"], "answer": "y"}', "\"prompt\" has ['x'], no text"),
        ('{"prompt": "", "answer": "y"}', "\"prompt\" has '', no text"),
        ('{"prompt": "x", "answer": "y", "task": 7}', '"task" has 7, no text'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "battery.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(CheckpointError) as caught:
        battery.read(file)
    text = str(caught.value)
    assert text.startswith(f"{file}, line 3") and message in text and text.endswith(f"; {EXPECTED}")
    assert "\n" not in text and text.isprintable() and len(text) < len(str(file)) + 200


def test_a_file_that_is_no_battery(tmp_path: Path) -> None:
    file = tmp_path / "battery.jsonl"
    file.write_text(" \n\n")
    with pytest.raises(
        CheckpointError, match=r"battery\.jsonl holds no problem; a line must be an object .*: add some"
    ):
        battery.read(file)
    file.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(CheckpointError, match=r"battery\.jsonl cannot be read as UTF-8 text \(.*\); copy or download"):
        battery.read(file)
    with pytest.raises(CheckpointError, match=r"cannot be read as UTF-8 text \(.*No such file"):
        battery.read(tmp_path / "nothing")


def test_where_it_lies(tmp_path: Path) -> None:
    run, plain = tmp_path / "run", tmp_path / "plain"
    for folder in (run / "model", run / "checkpoints" / "checkpoint-7", plain):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    places = (run, run / "model", run / "checkpoints" / "checkpoint-7", plain)
    assert [battery.find(path) for path in (*places, tmp_path / "nothing")] == [None] * 5
    (run / "battery.jsonl").write_text(GOOD)
    assert battery.find(run) == Battery(run / "battery.jsonl", (Problem("1 + 1 = ?", ("2",)),))
    assert battery.find(run / "model") is None  # nothing says that the folder above is its run
    (run / "manifest.json").write_text("{}")
    assert [getattr(battery.find(path), "path", None) for path in places] == [run / "battery.jsonl"] * 3 + [None]
    (run / "model" / "battery.jsonl").write_text(GOOD.replace("1 + 1", "3 + 3"))
    (plain / "battery.jsonl").mkdir()
    assert [getattr(battery.find(path), "path", None) for path in places] == [
        run / "model" / "battery.jsonl",
        run / "model" / "battery.jsonl",
        run / "battery.jsonl",
        None,
    ]
    (run / "model" / "battery.jsonl").write_text("{}")
    with pytest.raises(CheckpointError, match="line 1 has no answer"):
        battery.find(run)


def test_a_run_with_nothing_to_load(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "battery.jsonl").write_text(GOOD)
    with pytest.raises(CheckpointError, match="is a run directory with nothing to load"):
        battery.find(tmp_path)


class Characters:
    """A tokenizer of ASCII characters."""

    bos_token = None

    def __init__(self, template: Any = None):
        self.has_chat_template = template is not None
        self.template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("ascii"))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("ascii")

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt and [m["role"] for m in messages] == ["user"]
        return self.template(messages[0]["content"])


class Scripted:
    """A model that is sure of what it was told to answer; without an end where that ends in ``…``."""

    def __init__(self, script: dict[str, str], profiles: dict[str, Any] | None = None):
        self.script = {
            tuple(prompt.encode()): answer.rstrip("…").encode() + bytes([EOS] * (not answer.endswith("…")))
            for prompt, answer in script.items()
        }
        self.batches: list[list[int]] = []  # the lengths of the prompts of each forward
        self.diffusion_spec = DiffusionSpec(
            family="scripted",
            logits="in_place",
            attention="bidirectional",
            canvas="fixed",
            unmasking="threshold",
            mask_token_id=MASK,
            eos_token_ids=(EOS,),
            vocab_size=VOCAB,
            context_length=48,
            defaults={"canvas_length": 48},
            profiles=profiles or {},
        )
        self.diffusion_family = Family(
            name="scripted",
            model_types=("scripted",),
            claims=lambda _: False,
            hidden=self.hidden,
            head=lambda _, states: states,
            defaults=lambda _: {},
        )

    def hidden(self, model: Any, ids: mx.array, cache: list[Any]) -> mx.array:
        rows, lengths = [], []
        for row in ids.tolist():
            texts = {
                (start, prompt): answer
                for prompt, answer in self.script.items()
                for start in range(len(row))
                if tuple(row[start : start + len(prompt)]) == prompt
            }
            (start, prompt), answer = max(texts.items(), key=lambda pair: len(pair[0][1]))
            told = [0] * start + [*prompt, *answer]
            lengths.append(len(prompt))
            rows.append((told + [told[-1]] * len(row))[: len(row)])
        self.batches.append(lengths)
        return 50 * (mx.array(rows)[:, :, None] == mx.arange(VOCAB)).astype(mx.float32)


def test_exact_answers_are_counted() -> None:
    script = {
        "One? ": "the dog",
        "Two words? ": "the cat",
        "Three? ": " cat\n",
        "Four? ": "the the dog",
        "Five, five? ": "dgo dog",
        "Six? ": "a cat…",
    }
    right = ("the dog", "the dog", "cat", "the dog", "dog", "a cat" + 38 * "t")
    asked = made(*zip(script, right, strict=True))
    model = Scripted(script)
    outcome = battery.run(model, Characters(), asked)
    assert outcome.right == (True, False, True, False, False, False)
    assert (outcome.exact, outcome.of, outcome.unfinished) == (2, 6, 1)
    assert outcome.texts == (*list(script.values())[:5], right[5])
    assert (outcome.words, outcome.doubled, outcome.unknown) == (12, 1, 1)
    assert outcome.tokens == sum(len(text) + 1 for text in outcome.texts[:5]) + 48 - len("Six? ")
    assert outcome.forwards == 6 and len(model.batches) == 1
    assert (outcome.options, outcome.profile) == (DecodingOptions(), "exact")

    first = battery.run(model, Characters(), asked, batch=2, limit=3)
    assert first.right == outcome.right[:3] and first.texts == outcome.texts[:3]
    assert model.batches[1:] == [[5, 7], [11]]
    assert battery.run(model, Characters(), asked, batch=1) == outcome
    assert battery.run(model, Characters(), asked, limit=100) == outcome


def test_any_right_answer_will_do() -> None:
    asked = Battery(Path("x"), (Problem("Pet? ", ("dog", "cat")), Problem("Other? ", ("dog", "cat"))))
    outcome = battery.run(Scripted({"Pet? ": "cat", "Other? ": "cow"}), Characters(), asked)
    assert outcome.right == (True, False)


def test_the_profile_is_balanced_where_there_is_one() -> None:
    asked, model = made(("One? ", "x")), Scripted({"One? ": "x"}, {"balanced": {"threshold": 0.7}})
    outcome = battery.run(model, Characters(), asked)
    assert outcome.options == DecodingOptions(profile="balanced") and outcome.profile.startswith("balanced")
    mine = DecodingOptions(threshold=0.8)
    outcome = battery.run(model, Characters(), asked, mine)
    assert outcome.options == mine and outcome.profile.startswith("exact, but with threshold 0.8")


def test_prompts_go_through_the_chat_template() -> None:
    model = Scripted({"One? ": "no", "<One? >": "yes"})
    asked = made(("One? ", "yes"))
    assert battery.run(model, Characters(), asked).texts == ("no",)
    assert battery.run(model, Characters(lambda text: f"<{text}>"), asked).texts == ("yes",)
    with pytest.raises(
        DiffusionError, match=r"^Problem 1 of battery.jsonl cannot be written with the chat template \(KeyError: 'x'\);"
    ):
        battery.run(model, Characters({}.__getitem__), made(("x", "y")))


def test_what_cannot_be_asked_is_refused_before_anything_is_decoded() -> None:
    model = Scripted({"One? ": "x"})
    asked = made(("One? ", "x"), ("x" * 48, "y"))
    with pytest.raises(DiffusionError, match=r"^Problem 2 of battery.jsonl cannot be decoded: .*48"):
        battery.run(model, Characters(), asked, batch=1)
    assert model.batches == []
    for name, value in (("batch", 0), ("batch", 2.0), ("batch", None), ("limit", 0), ("limit", True), ("limit", "3")):
        with pytest.raises(DiffusionError, match=rf"^{name} must be a positive integer, got {value!r}\.$"):
            battery.run(model, Characters(), asked, **{name: value})
    with pytest.raises(DiffusionError, match=r"^Options must be DecodingOptions, got {'threshold': 1}\.$"):
        battery.run(model, Characters(), asked, {"threshold": 1})  # type: ignore[arg-type]
    with pytest.raises(DiffusionError, match="spec"):
        battery.run(object(), Characters(), asked)


def test_it_is_read_without_mlx() -> None:
    code = (
        "import sys; from mlx_dllm_plugin import battery, demo_path; print(len(battery.find(demo_path()).problems));"
        "print(*{'mlx', 'mlx_lm', 'torch', 'transformers'} & set(sys.modules))"
    )
    for switch in ("0", "1"):
        assert process(["-c", code], MLX_DLLM_PLUGIN=switch).out.splitlines() == ["100", ""]


def test_the_demo_answers_its_battery(demo: tuple[Any, Any]) -> None:
    asked = battery.find(demo_path())
    assert asked is not None and asked == battery.find(demo_path() / "model")
    outcome = battery.run(*demo, asked, limit=4)
    assert outcome.right == (True,) * 4 and outcome.texts[0] == "72 + 94 = 166"
    assert (outcome.doubled, outcome.unknown, outcome.unfinished) == (0, 0, 0)
    assert outcome.options.profile == "balanced" and "cache dual" in outcome.profile
    assert battery.run(*demo, asked, limit=4, batch=1) == outcome


def test_the_demos_battery_is_what_the_benchmark_writes() -> None:
    file = demo_path() / battery.NAME
    assert file.read_bytes() == bits.battery_text().encode()
    asked = battery.read(file)
    assert Counter(p.task for p in asked.problems) == dict.fromkeys(TASKS, 10)
    assert len({p.prompt for p in asked.problems}) == 100
    sources = problems("test", bits.COUNT, bits.SEED)
    assert all(split_of_value(p.task, p.value) == "test" for p in sources if p.task != "next")
    for problem, source in zip(asked.problems, sources, strict=True):
        assert problem.prompt == source.prompt and source.answer in problem.answers
        assert all(source.check(answer) for answer in problem.answers)
        several = {"sentence place": 8, "sentence adjective": 12}
        number = len(set(problem.answers))
        assert number == len(problem.answers) and (number in several.values() if source.words else number == 1)


def test_right_answers_are_not_garbled() -> None:
    asked = battery.find(demo_path())
    assert asked is not None
    found = garbled((answer for p in asked.problems for answer in p.answers), asked)
    assert found.words > 900 and found.doubled == found.unknown == 0
    assert garbled(["Teh farmer farmer runs"], asked) == battery.Garbled(words=4, doubled=1, unknown=1)


def test_the_result_file_is_of_this_demo_and_adds_up() -> None:
    result = json.loads(RESULT.read_text())
    weights = demo_path() / "model" / "model.safetensors"
    assert result["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert result["battery_sha256"] == hashlib.sha256((demo_path() / battery.NAME).read_bytes()).hexdigest()
    asked = battery.find(demo_path())
    assert asked is not None and bits.FLOAT in result["builds"] and set(result["builds"]) <= set(bits.BUILDS)
    for build in result["builds"].values():
        assert build["exact"] == build["of"] - len(build["wrong"]) and build["of"] == len(asked.problems)
        for number, text in zip(build["wrong"], build["answers"], strict=True):
            if build["without_end_of_sequence"] == 0:
                assert text.strip() not in asked.problems[number].answers
    lines = bits.table(result).splitlines()
    assert len(lines) == 2 + len(result["builds"]) and len({line.count("|") for line in lines}) == 1
    changed = replace(asked, problems=asked.problems[:1])
    assert changed.lexicon < asked.lexicon
