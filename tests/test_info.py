"""`mlx-dllm info`: how a checkpoint is decoded and why, or what is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_dllm_plugin.commands import main
from mlx_dllm_plugin.families import FAMILIES
from tests.tools import Outcome, assert_one_sentence, copy_run, edit_json, process

Info = Callable[..., Outcome]


@pytest.fixture
def info(capfd: pytest.CaptureFixture[str]) -> Info:
    """`mlx-dllm info` with these arguments, in this process."""

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        try:
            status: Any = main(["info", *map(str, arguments)])
        except SystemExit as end:
            status = end.code
        out, err = capfd.readouterr()
        return Outcome(status, out, err)

    return run


def rows(outcome: Outcome) -> dict[str, tuple[str, str]]:
    """name -> (value, source) of the printed table."""
    table = {}
    for line in outcome.out.splitlines():
        if line.startswith("  "):
            name, value, *source = [part.strip() for part in line.split("  ") if part.strip()]
            table[name] = (value, source[0] if source else "")
    return table


def problems(outcome: Outcome) -> list[str]:
    return [line for line in outcome.out.splitlines() if line.startswith("problem: ")]


@pytest.mark.parametrize(
    ("name", "family", "mask", "eos", "vocabulary"),
    [("gpt2-grow", "gpt2", "340", "339", "341"), ("qwen2-reuse", "qwen2", None, None, "330")],
)
def test_a_good_run_shows_its_spec_and_sources(
    data: Path, info: Info, name: str, family: str, mask: str | None, eos: str | None, vocabulary: str
) -> None:
    run = data / "a2d" / name / "run"
    golden = json.loads((data / "a2d" / name / "golden.json").read_text())["run"]
    outcome = info(run)
    assert outcome.status == 0 and outcome.err == "" and problems(outcome) == []
    assert outcome.out.splitlines()[0] == str(run / "model")
    table = rows(outcome)
    assert table["family"] == (family, "the a2d block")
    assert table["mask_token_id"] == (mask or str(golden["mask"]["id"]), "the a2d block")
    assert table["eos_token_ids"][0] == (eos or str(golden["mask"]["eos_id"]))
    assert table["vocab_size"] == (vocabulary, "config.json")
    assert (table["logits"][0], table["attention"][0], table["canvas"][0]) == ("in_place", "bidirectional", "fixed")
    assert table["unmasking"][0] == "a2d"
    sampler = golden["mask"]["a2d_block"]["sampler"]
    assert table["canvas_length"] == (str(sampler["canvas_len"]), "the a2d block")
    assert table["max_denoising_steps"] == (str(sampler["num_steps"]), "the a2d block")
    assert all(source for _, source in table.values())


def test_the_model_folder_of_a_run_can_be_named_itself(path: Path, info: Info) -> None:
    assert info(path / "model") == info(path)


def test_a_checkpoint_only_run_says_what_is_missing(goldens: Path, info: Info) -> None:
    outcome = info(goldens / "a2d" / "gpt2-partial" / "run")
    assert outcome.status == 1 and outcome.err == ""
    lines = outcome.out.splitlines()
    assert lines[0].endswith("checkpoint-500")
    assert lines[1].startswith("warning: ") and "'failed'" in lines[1]
    table = rows(outcome)
    assert table["family"] == ("gpt2", "the run's manifest")
    assert table["mask_token_id"][0] == "-" and "--mask-token-id" in table["mask_token_id"][1]
    found = problems(outcome)
    assert len(found) == 2
    assert any("--tokenizer" in problem for problem in found)
    assert any("--mask-token-id" in problem for problem in found)


def test_an_autoregressive_checkpoint_has_no_spec(ar: Path, info: Info) -> None:
    outcome = info(ar)
    assert outcome.status == 1 and outcome.err == ""
    assert "No diffusion spec" in outcome.out and "'llama'" in outcome.out and "autoregressively" in outcome.out
    for family in FAMILIES.names():
        assert family in outcome.out


def test_json_holds_the_same(path: Path, ar: Path, info: Info) -> None:
    outcome = info(path, "--json")
    assert outcome.status == 0 and outcome.err == ""
    answer = json.loads(outcome.out)
    assert answer["path"] == str(path / "model") and answer["problems"] == []
    spec = answer["spec"]
    for name, (value, source) in rows(info(path)).items():
        if name == "approximate":
            assert value == ", ".join(spec["approximate"])
            continue
        if name.startswith("profile "):
            settings = spec["profiles"].get(name.removeprefix("profile "), {})
            assert value == (", ".join(f"{option} {setting}" for option, setting in settings.items()) or "-")
            continue
        held = spec.get(name, spec["defaults"].get(name))
        shown = (", ".join(map(str, held)) or "-") if isinstance(held, list) else str(held)
        assert shown == value and spec["sources"][name] == source

    outcome = info(ar, "--json")
    assert outcome.status == 1
    assert json.loads(outcome.out) == {"path": str(ar), "spec": None, "problems": []}


def test_json_lists_the_problems(copied: Path, info: Info) -> None:
    (copied / "model" / "model.safetensors").unlink()
    outcome = info(copied, "--json")
    assert outcome.status == 1
    answer = json.loads(outcome.out)
    assert answer["spec"]["family"] == "gpt2" and len(answer["problems"]) == 1
    assert "no weights" in answer["problems"][0]


def test_family_looks_at_a_checkpoint_as_one_of_it(copied: Path, ar: Path, info: Info) -> None:
    """A plain GPT-2 has no spec; forced, it has one whose mask token comes from the tokenizer."""
    (copied / "manifest.json").unlink()
    edit_json(copied / "model" / "config.json", a2d=...)
    assert info(copied).status == 1 and "No diffusion spec" in info(copied).out
    outcome = info(copied, "--family", "gpt2")
    assert outcome.status == 0
    assert rows(outcome)["family"] == ("gpt2", "forced by the family option")
    assert rows(outcome)["mask_token_id"][0] == "340" and "<|mdlm_mask|>" in rows(outcome)["mask_token_id"][1]
    assert_one_sentence(info(ar, "--family", "gpt2"), "'gpt2'", "'llama'")
    assert_one_sentence(info(copied, "--family", "oracle"), "'oracle'", "gpt2", "qwen2")


@pytest.mark.parametrize(
    ("status", "warns"), [("failed", True), ("running", True), ("completed", False), ("unheard of", False)]
)
def test_the_manifests_status_is_a_warning_not_a_problem(copied: Path, info: Info, status: str, warns: bool) -> None:
    edit_json(copied / "manifest.json", status=status)
    outcome = info(copied)
    assert outcome.status == 0
    assert ("warning: " in outcome.out) == warns and (repr(status) in outcome.out) == warns


def test_the_latest_checkpoint_is_the_numerically_highest(copied: Path, info: Info) -> None:
    (copied / "checkpoints").mkdir()
    for number in (9, 10, 100):
        copy_run(copied / "model", copied / "checkpoints" / f"checkpoint-{number}")
    copy_run(copied / "model", copied / "checkpoints" / "checkpoint-999-old")
    assert info(copied).out.splitlines()[0].endswith("model")
    shutil.rmtree(copied / "model")
    assert info(copied).out.splitlines()[0].endswith("checkpoint-100")


def _write(file: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / "model" / file).write_text(text) and None


def _set(**changes: Any) -> Callable[[Path], None]:
    return lambda run: edit_json(run / "model" / "config.json", **changes)


def _truncate(run: Path) -> None:
    weights = run / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])


def _forget_tokenizer(run: Path) -> None:
    for name in ("tokenizer.json", "vocab.json"):
        (run / "model" / name).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, ["truncated", "model.safetensors"]),
        (lambda run: (run / "model" / "model.safetensors").unlink(), ["no weights"]),
        (_forget_tokenizer, ["--tokenizer"]),
        (_set(activation_function="relu"), ["activation_function", "relu"]),
        (_set(a2d={"objective": "mdlm", "mask_token_id": 341}), ["mask_token_id", "341", "340"]),
        (_set(a2d={"objective": "mdlm", "mask_token_id": -1}), ["mask_token_id", "-1", "340"]),
    ],
    ids=["truncated", "no weights", "no tokenizer", "a model mlx-lm lacks", "mask too high", "mask negative"],
)
def test_what_keeps_a_checkpoint_from_decoding_is_a_problem(
    copied: Path, info: Info, damage: Callable[[Path], None], words: list[str]
) -> None:
    """The spec is shown all the same."""
    damage(copied)
    outcome = info(copied)
    assert outcome.status == 1 and outcome.err == ""
    (problem,) = problems(outcome)
    assert [word for word in words if word not in problem] == []
    assert rows(outcome)["family"][0] == "gpt2"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_write("config.json", "{"), ["config.json", "JSON"]),
        (_write("config.json", "7"), ["config.json", "object"]),
        (_write("tokenizer_config.json", "{"), ["tokenizer_config.json", "JSON"]),
        (_set(a2d="mdlm"), ["a2d", "object"]),
        (_set(a2d={"objective": "bd3lm", "mask_token_id": 340}), ["bd3lm"]),
        (_set(a2d={"objective": "mdlm", "mask_token_id": 340, "sampler": {"num_steps": 0}}), ["num_steps", "0"]),
        (_set(vocab_size="many"), ["vocab_size", "many"]),
        (_set(model_type="mamba"), ["'mamba'", "gpt2", "qwen2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_broken_checkpoint_is_one_sentence(
    copied: Path, info: Info, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(copied)
    assert_one_sentence(info(copied), *words)
    assert_one_sentence(info(copied, "--json"), *words)


def test_no_checkpoint_is_one_sentence(info: Info, tmp_path: Path, path: Path) -> None:
    assert_one_sentence(info(tmp_path / "missing"), "missing", "does not exist")
    assert_one_sentence(info(tmp_path), "config.json")
    assert_one_sentence(info(path / "manifest.json"), "is a file")
    assert_one_sentence(info("nobody/nothing-of-this-name"), "nobody/nothing-of-this-name", "hub")
    (tmp_path / "manifest.json").write_text("{}")
    assert_one_sentence(info(tmp_path), "nothing to load")


@pytest.mark.parametrize("arguments", [[], ["info"], ["info", "x", "--what"], ["dance"]])
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.startswith("usage: mlx-dllm") and "error:" in err


def test_the_module_runs_it_too_and_loads_no_model(path: Path, info: Info) -> None:
    outcome = process(["-X", "importtime", "-m", "mlx_dllm_plugin", "info", path])
    assert (outcome.status, outcome.out) == (0, info(path).out)
    imported = {line.rpartition("|")[2].strip() for line in outcome.err.splitlines()}
    assert "mlx_dllm_plugin.spec" in imported
    assert imported.isdisjoint({"mlx_lm", "transformers", "torch"})


def test_a_broken_checkpoint_gives_a_real_process_status_one(copied: Path) -> None:
    (copied / "model" / "config.json").write_text("{")
    command = "import sys; from mlx_dllm_plugin.commands import main; sys.exit(main(sys.argv[1:]))"
    assert_one_sentence(process(["-c", command, "info", copied]), "config.json")


@pytest.mark.parametrize("arguments", [["info", "{path}"], ["infill", "a [MASK]"]])
def test_without_a_working_mlx_doctor_is_named(arguments: list[str], path: Path, tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: cannot open')")
    command = ["-m", "mlx_dllm_plugin", *(argument.format(path=path) for argument in arguments)]
    outcome = process(command, PYTHONPATH=str(tmp_path))
    assert_one_sentence(
        Outcome(outcome.status, outcome.out, outcome.err.splitlines()[-1] + "\n"),
        "libmlx.so: cannot open: `mlx-dllm doctor` says what to do",
    )
    assert "Traceback" not in outcome.err


def test_a_model_type_that_is_no_text_is_one_sentence(copied: Path, info: Info) -> None:
    edit_json(copied / "model" / "config.json", model_type=["gpt2"])
    assert_one_sentence(info(copied), "model_type must be the name of an architecture", "['gpt2']")


def test_a_name_that_is_too_long_is_one_sentence(info: Info) -> None:
    assert_one_sentence(info("x" * 300), "cannot be looked at (File name too long)")


def test_an_unknown_mask_may_be_the_last_token(copied: Path, info: Info) -> None:
    edit_json(copied / "model" / "config.json", a2d=...)
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"):
        (copied / "model" / name).unlink()
    (told,) = problems(info(copied))
    assert "--mask-token-id" in told and told.endswith("that is the last, 340.")


def test_names_cannot_move_the_cursor(copied: Path, info: Info) -> None:
    copied.rename(copied.parent / "a\x1b[2J")
    out = info(copied.parent / "a\x1b[2J").out
    assert r"a\x1b[2J/model" in out and "\x1b" not in out
