"""Filling holes: `mlx_dllm_plugin.infill` and `mlx-dllm infill`."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_dllm_plugin
from mlx_dllm_plugin import (
    DecodingOptions,
    DecodingResult,
    DiffusionError,
    bidirectional_forward,
    decode,
    demo_path,
    infill,
)
from mlx_dllm_plugin.commands import main
from mlx_dllm_plugin.commands.infill import LARGEST_HOLE, encode, split
from mlx_dllm_plugin.errors import PREFIX
from mlx_dllm_plugin.samplers import RULES
from tests.models import CONTEXT, EOS, MASK, VOCAB, prefer, tiny_model
from tests.tools import Outcome, assert_one_sentence, copy_run, edit_json, make_ar_model, process

CANVAS = [4, 8, 15, 16, 23, 42, 3, 1, 9, 30, 12, 5, 7, 19, 21, 33]
HOLES = {1, 2, 6, 7, 8, 13}
MARKS = [i in HOLES for i in range(len(CANVAS))]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: tiny_model(name) for name in ("gpt2", "qwen2")}


@pytest.fixture(scope="module", params=["gpt2", "qwen2"])
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    return models[request.param]


@pytest.fixture
def spec(models: dict[str, Any]) -> Any:
    """`spec(**changes)`: the GPT-2 with another spec, for this test."""
    model = models["gpt2"]
    original = model.diffusion_spec

    def change(**changes: Any) -> Any:
        model.diffusion_spec = replace(original, **changes)
        return model

    yield change
    model.diffusion_spec = original


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def same_as_plain(
    model: Any,
    canvas: list[int],
    marks: list[bool],
    threshold: float,
    block: int | None = None,
    shift: int = 0,
    cfg: float | None = None,
) -> DecodingResult:
    """Fill by the rule ``threshold`` and by a plain loop over blocks that count from position 0, and compare."""
    options = DecodingOptions(
        unmasking="threshold", threshold=threshold, block_length=block, cfg_scale=cfg, full_logprobs=True
    )
    result = infill(model, canvas, marks, options)

    def logits_of(ids: list[int]) -> np.ndarray:
        return np.array(bidirectional_forward(model, mx.array([ids]))[0]).astype(np.float64)

    filled = [MASK if hole else token for token, hole in zip(canvas, marks, strict=True)]
    masked, commits = list(marks), []
    length = block or len(canvas)
    for start in range(0, len(canvas), length):
        while left := [p for p in range(start, min(start + length, len(canvas))) if masked[p]]:
            logits = logits_of(filled)
            if cfg:
                without = logits_of([token if hole else MASK for token, hole in zip(filled, marks, strict=True)])
                logits = without + (cfg + 1) * (logits - without)
            logprobs = {p: log_softmax(logits[p - shift]) for p in left}
            left.sort(key=lambda p: -logprobs[p].max())
            sure = sum(float(np.exp(logprobs[p].max())) > threshold for p in left)
            chosen = sorted(left[: max(sure, 1)])
            for p in chosen:
                filled[p], masked[p] = int(np.delete(logprobs[p], MASK).argmax()), False  # the mask is the last id
            commits.append((tuple(chosen), tuple(filled[p] for p in chosen)))
            entries = result.commits[len(commits) - 1].logprobs
            for p, entry in zip(chosen, entries, strict=True):
                np.testing.assert_allclose(entry.vector(VOCAB), logprobs[p], rtol=0, atol=2e-4)
    assert [(commit.positions, commit.tokens) for commit in result.commits] == commits
    assert (result.canvas, result.nfe) == (filled, len(commits))
    return result


def as_row(result: DecodingResult, row: int) -> DecodingResult:
    return replace(result, commits=[replace(commit, row=row) for commit in result.commits])


def refused(model: Any, canvas: Any, marks: Any, *words: str, **options: Any) -> None:
    with pytest.raises(DiffusionError) as error:
        infill(model, canvas, marks, DecodingOptions(**options))
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text
    assert all(word in text for word in words), text


# The function.

texts = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.booleans()), min_size=1, max_size=20).filter(
    lambda text: any(hole for _, hole in text)
)


@pytest.mark.parametrize("rule", ["a2d", "low_confidence", "threshold", "random"])
@given(text=texts, temp=st.sampled_from([0.0, 0.9]))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_holes_are_filled_and_nothing_else_changes(
    models: dict[str, Any], rule: str, text: list[tuple[int, bool]], temp: float
) -> None:
    """Also a mask id among the given tokens: it is text."""
    canvas, marks = ([part[i] for part in text] for i in (0, 1))
    result = infill(models["gpt2"], canvas, marks, DecodingOptions(unmasking=rule, temp=temp, seed=1))
    holes = [i for i, hole in enumerate(marks) if hole]
    assert len(result.canvas) == len(canvas)
    assert [t for t, hole in zip(result.canvas, marks, strict=True) if not hole] == [t for t, hole in text if not hole]
    assert result.tokens == [result.canvas[i] for i in holes] and MASK not in result.tokens
    assert sorted(p for commit in result.commits for p in commit.positions) == holes
    assert (result.finish_reason, result.prompt_tokens, len(result.logprobs)) == ("length", 0, len(holes))


@pytest.mark.parametrize("block", [None, 1, 4, 5, 100])
@pytest.mark.parametrize("threshold", [0.2, 2.0])
def test_filling_equals_a_plain_loop(model: Any, block: int | None, threshold: float) -> None:
    result = same_as_plain(model, CANVAS, MARKS, threshold, block)
    assert threshold < 1 or result.nfe == len(HOLES)


def test_guidance_masks_what_was_given(model: Any) -> None:
    """On both sides of the holes, and not what has been filled in."""
    guided = same_as_plain(model, CANVAS, MARKS, 2.0, cfg=1.5)
    assert guided.tokens != same_as_plain(model, CANVAS, MARKS, 2.0).tokens


def test_all_of_a_text_may_be_one_hole(model: Any) -> None:
    same_as_plain(model, [0] * 7, [True] * 7, 0.2, 3)
    same_as_plain(model, [0], [True], 0.2)


def test_shifted_logits_come_from_the_position_before(spec: Any) -> None:
    model = spec(logits="shifted")
    for block in (None, 4):
        shifted = same_as_plain(model, CANVAS, MARKS, 0.2, block, shift=1)
    assert shifted.canvas != infill(spec(), CANVAS, MARKS, DecodingOptions(unmasking="threshold", threshold=0.2)).canvas
    refused(spec(logits="shifted"), CANVAS, [True, *MARKS[1:]], "position 0")


def test_what_stands_in_a_hole_does_not_matter(model: Any) -> None:
    expected = infill(model, CANVAS, MARKS)
    for token in (0, MASK, EOS, -1, VOCAB + 5):
        assert infill(model, [token if i in HOLES else t for i, t in enumerate(CANVAS)], MARKS) == expected


def test_a_mask_outside_a_hole_is_text(model: Any) -> None:
    canvas = [*CANVAS[:4], MASK, *CANVAS[5:]]
    result = same_as_plain(model, canvas, MARKS, 0.2)
    assert result.canvas[4] == MASK and len(result.tokens) == len(HOLES)
    both = infill(model, canvas, [i in HOLES | {4} for i in range(len(canvas))])
    assert both.canvas[4] != MASK and len(both.tokens) == len(HOLES) + 1


def test_holes_see_what_follows_them(model: Any) -> None:
    marks = [i == 0 for i in range(8)]
    options = DecodingOptions(full_logprobs=True)
    first, second = (infill(model, [*CANVAS[:7], last], marks, options).logprobs[0].full for last in (5, 30))
    assert np.abs(np.array(first) - np.array(second)).max() > 1e-3


@pytest.mark.parametrize("kind", [list, tuple, np.array, mx.array])
def test_texts_and_marks_may_be_arrays(model: Any, kind: Any) -> None:
    expected = infill(model, CANVAS, MARKS)
    assert infill(model, kind(CANVAS), kind(MARKS)) == expected
    assert infill(model, kind(CANVAS), kind([int(mark) for mark in MARKS])) == expected
    batch = infill(model, kind([CANVAS, CANVAS]), kind([MARKS, MARKS]))
    assert batch == [as_row(expected, 0), as_row(expected, 1)]


def test_a_row_of_a_batch_equals_the_row_alone(model: Any) -> None:
    """Rows of unequal length with options of their own, as many as there are heads, too."""
    canvases = [CANVAS, CANVAS[3:9], CANVAS[::-1] * 2, CANVAS[:1]]
    marks = [MARKS, [True, False, False, True, True, False], [i % 3 == 2 for i in range(32)], [True]]
    options = [
        DecodingOptions(unmasking="low_confidence", seed=i, **own)
        for i, own in enumerate(
            [
                {"block_length": 4, "max_denoising_steps": 8},
                {"temp": 0.8},
                {"block_length": 7, "max_denoising_steps": 5},
                {"cfg_scale": 1.0},
            ]
        )
    ]
    for count in (2, 4):
        together = infill(model, canvases[:count], marks[:count], options[:count])
        for i, result in enumerate(together):
            assert result == as_row(infill(model, canvases[i], marks[i], options[i]), i)
    assert len({result.nfe for result in together}) > 2
    shared = infill(model, canvases, marks, options[0])
    assert shared[1].tokens == infill(model, canvases[1], marks[1], options[0]).tokens
    assert infill(model, [CANVAS], [MARKS]) == [infill(model, CANVAS, MARKS)]


def test_blocks_count_from_position_0_and_those_without_holes_are_skipped(model: Any) -> None:
    """Of four blocks two have holes; each block has a quarter of the steps."""
    marks = [i in (5, 6, 13, 14, 15) for i in range(16)]
    options = DecodingOptions(unmasking="low_confidence", block_length=4, max_denoising_steps=8)
    result = infill(model, CANVAS, marks, options)
    assert [commit.positions[0] // 4 for commit in result.commits] == [1, 1, 3, 3] and result.nfe == 4
    assert [len(commit.positions) for commit in result.commits] == [1, 1, 2, 1]
    with pytest.raises(DiffusionError, match="max_denoising_steps 3 is less than the 4 blocks of 4 tokens"):
        infill(model, CANVAS, marks, replace(options, max_denoising_steps=3))


def test_the_familys_own_blocks_are_those_of_an_output(spec: Any) -> None:
    """A hole has none unless they are asked for."""
    plain = {"unmasking": "threshold", "threshold": 0.2}
    expected = infill(spec(), CANVAS, MARKS, DecodingOptions(**plain))
    model = spec(defaults={"canvas_length": 4, "block_length": 2})
    assert infill(model, CANVAS, MARKS, DecodingOptions(**plain)) == expected
    assert infill(model, CANVAS, MARKS, DecodingOptions(block_length=2, **plain)) != expected


def test_an_end_of_sequence_in_a_hole_is_a_token_unless_it_shall_stop(model: Any) -> None:
    wanted = prefer(tiny_model("gpt2"), EOS)
    result = infill(wanted, CANVAS, MARKS)
    assert result.tokens == [EOS] * len(HOLES) and result.finish_reason == "length"
    options = DecodingOptions(unmasking="threshold", threshold=2.0, block_length=1, stop_at_eos=True)
    stopped = infill(wanted, CANVAS, MARKS, options)
    assert (stopped.tokens, stopped.finish_reason, stopped.nfe) == ([], "stop", 1)
    assert stopped.canvas == [EOS if i == 1 else MASK if i in HOLES else t for i, t in enumerate(CANVAS)]
    given = infill(model, [EOS, *CANVAS[1:]], MARKS, replace(options, block_length=None))
    assert given.canvas[0] == EOS and given.nfe > 1


def test_a_seed_repeats(model: Any) -> None:
    first, again, other = (infill(model, CANVAS, MARKS, DecodingOptions(temp=1.5, seed=seed)) for seed in (3, 3, 4))
    assert first == again and first.tokens != other.tokens


def test_holes_at_the_end_are_an_output(model: Any) -> None:
    """With the same blocks, a text that ends in a hole is a prompt and its continuation."""
    options = DecodingOptions(unmasking="threshold", threshold=0.3, stop_at_eos=False)
    filled = infill(model, CANVAS, [i >= 10 for i in range(16)], options)
    continued = decode(model, CANVAS[:10], replace(options, max_tokens=6))
    assert (filled.canvas, filled.tokens, filled.commits) == (continued.canvas, continued.tokens, continued.commits)


def test_a_family_that_leaves_the_attention_open_fills_when_told_so(spec: Any) -> None:
    expected = infill(spec(), CANVAS, MARKS)
    model = spec(attention="block_causal", canvas="growing", variants=("attention",))
    assert infill(model, CANVAS, MARKS, DecodingOptions(attention="bidirectional")) == expected
    refused(model, CANVAS, MARKS, "both sides", f"family {model.diffusion_spec.family}")
    refused(spec(variants=("attention",)), CANVAS, MARKS, "both sides", attention="block_causal", block_length=4)


def test_no_hole_is_refused(model: Any) -> None:
    refused(model, CANVAS, [False] * 16, "The canvas has no hole")
    refused(model, [], [], "The canvas has no hole")
    refused(model, [CANVAS, CANVAS], [MARKS, [False] * 16], "Row 1 of the canvas has no hole")
    refused(model, [CANVAS, []], [MARKS, []], "Row 1 of the canvas has no hole")


@pytest.mark.parametrize(
    "canvas, marks, words",
    [
        (CANVAS, MARKS[1:], ("The canvas has 16 tokens and 15 marks",)),
        (CANVAS, [MARKS], ("The canvas has 16 tokens",)),
        ([4], [[False]], ("The canvas has 1 tokens",)),
        (CANVAS, None, ("The canvas has 16 tokens and None",)),
        (CANVAS, ["no"] * 16, ("The canvas has 16 tokens",)),
        (CANVAS, [0.5] * 16, ("The canvas has 16 tokens",)),
        ([CANVAS, CANVAS[:3]], [MARKS, MARKS], ("Row 1 of the canvas has 3 tokens and 16 marks",)),
        ([CANVAS, CANVAS], MARKS, ("masked", "shape")),
        ([CANVAS, CANVAS], [MARKS], ("masked", "shape")),
        ([CANVAS], [], ("masked", "shape")),
        ([CANVAS], None, ("masked", "shape")),
        ([CANVAS], [MARKS, MARKS], ("masked", "shape")),
        ([CANVAS, CANVAS], [True, False], ("Row 0 of the canvas has 16 tokens",)),
        (CANVAS, [MARKS[:3], MARKS], ("masked", "shape")),
    ],
)
def test_marks_of_another_shape_are_refused(model: Any, canvas: Any, marks: Any, words: tuple[str, ...]) -> None:
    refused(model, canvas, marks, *words)


def test_what_has_no_meaning_is_refused(model: Any) -> None:
    refused(model, CANVAS, MARKS, "max_tokens means nothing", max_tokens=4)
    refused(model, CANVAS, MARKS, "canvas_length means nothing", canvas_length=16)
    refused(model, CANVAS, MARKS, "sub_block_length", unmasking="threshold", sub_block_length=2)
    refused(model, [VOCAB, *CANVAS[1:]], MARKS, str(VOCAB))
    refused(model, "text", MARKS, "token ids")
    with pytest.raises(DiffusionError, match="2 for 1"):
        infill(model, CANVAS, MARKS, [DecodingOptions()] * 2)
    with pytest.raises(DiffusionError, match="no diffusion spec"):
        infill(tiny_model("gpt2", ar=True), CANVAS, MARKS)


def test_a_text_over_the_context_is_refused(model: Any) -> None:
    marks = [i == 3 for i in range(CONTEXT + 1)]
    refused(model, [5] * (CONTEXT + 1), marks, f"{CONTEXT + 1} tokens", f"context is {CONTEXT}")
    refused(model, [CANVAS, [5] * (CONTEXT + 1)], [MARKS, marks], "Row 1", str(CONTEXT + 1))
    assert len(infill(model, [5] * CONTEXT, marks[:CONTEXT]).tokens) == 1


# Holes in a text.


@pytest.mark.parametrize(
    "text, parts",
    [
        ("a [MASK:3] b", ["a ", 3, " b"]),
        ("[MASK]", [1]),
        ("[MASK][MASK:2]", [1, 2]),
        ("[MASK:007]x", [7, "x"]),
        (f"x[MASK:{LARGEST_HOLE}]", ["x", LARGEST_HOLE]),
        ("[mask] [ MASK ] MASK [MASK] [MASKS:2]", ["[mask] [ MASK ] MASK ", 1, " [MASKS:2]"]),
        ("日本[MASK:2]語 é😀[MASK]\n", ["日本", 2, "語 é😀", 1, "\n"]),
        ("[[MASK]]", ["[", 1, "]"]),
    ],
)
def test_a_text_splits_into_words_and_holes(text: str, parts: list[str | int]) -> None:
    assert split(text) == parts


BAD = ["0", "x", "-1", "", " 3", "3 ", "1.5", "+2", "٣", "³", str(LARGEST_HOLE + 1), "9" * 5000, "0" * 9, "[MASK"]


@pytest.mark.parametrize("length", BAD, ids=lambda length: length[:8] or "nothing")
def test_a_hole_of_no_length_is_refused(length: str) -> None:
    with pytest.raises(DiffusionError) as error:
        split(f"a [MASK:{length}] b [MASK]")
    text = str(error.value)
    assert text.startswith(f"[MASK:{length}] is not a hole") and str(LARGEST_HOLE) in text


# The command.

Fill = Callable[..., Outcome]


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Fill:
    """`mlx-dllm infill` with these arguments, in this process."""

    def run(*arguments: object, stdin: str | None = None) -> Outcome:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        try:
            status: Any = main(["infill", *map(str, arguments)])
        except SystemExit as end:
            status = end.code or 0
        captured = capfd.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def path(data: Path) -> Path:
    return data / "a2d" / "gpt2-grow" / "run"


@pytest.fixture(scope="module")
def run(path: Path) -> tuple[Any, Any]:
    return mlx_dllm_plugin.load(path)[:2]


def expected(run: tuple[Any, Any], text: str, **options: Any) -> tuple[str, list[str], DecodingResult]:
    """The text, its holes and the result, by the function."""
    model, tokenizer = run
    canvas: list[int] = []
    marks: list[bool] = []
    for part in split(text):
        ids = [0] * part if isinstance(part, int) else tokenizer.encode(part, add_special_tokens=False)
        canvas, marks = canvas + ids, marks + [isinstance(part, int)] * len(ids)
    result = infill(model, canvas, marks, DecodingOptions(**options))
    tokens, holes, whole = list(result.tokens), [], ""
    for part in split(text):
        if isinstance(part, int):
            holes.append(tokenizer.decode(tokens[:part]))
            tokens, part = tokens[part:], holes[-1]
        whole += part
    return whole, holes, result


TEXTS = [
    "The cat [MASK:3] to the mat.",
    "[MASK:2]",
    "[MASK] starts",
    "ends [MASK]",
    "two [MASK:2] holes [MASK] here",
    "side by side [MASK][MASK:3][MASK]!",
    "naïve 日本語 😀[MASK:2]é́ \u200b\t“quoted”[MASK]\nnext line",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_command_fills_as_the_function_does(fill: Fill, run: tuple[Any, Any], path: Path, text: str) -> None:
    whole, holes, result = expected(run, text)
    outcome = fill("--model", path, text)
    assert (outcome.status, outcome.out) == (0, whole + "\n")
    count = sum(part for part in split(text) if isinstance(part, int))
    counted = [f"{n} {what}{'s' * (n != 1)}" for n, what in ((count, "token"), (len(holes), "hole"))]
    assert outcome.err.startswith(f"{PREFIX} {' in '.join(counted)}, {result.nfe} forward")
    assert outcome.err.count("\n") == 1
    report = json.loads(fill("--model", path, "--json", text).out)
    assert (report["text"], report["holes"]) == (whole, holes)
    assert (report["canvas"], report["forwards"]) == (result.canvas, result.nfe)


def test_text_around_the_holes_comes_back_unchanged(fill: Fill, path: Path) -> None:
    for text in TEXTS:
        out = json.loads(fill("--model", path, "--json", text).out)
        rest, filled = out["text"], iter(out["holes"])
        for part in split(text):
            piece = next(filled) if isinstance(part, int) else part
            assert rest.startswith(piece)
            rest = rest[len(piece) :]
        assert rest == ""


def test_options_of_the_command_are_those_of_the_function(fill: Fill, run: tuple[Any, Any], path: Path) -> None:
    text = "two [MASK:5] holes [MASK:3] here"
    for options in (
        {"unmasking": "threshold", "threshold": 0.05, "block_length": 4},
        {"unmasking": "low_confidence", "max_denoising_steps": 2},
        {"temp": 1.5, "seed": 7, "top_k": 20},
        {"suppress_tokens": (5, 6, 7)},
    ):
        arguments: list[Any] = []
        for name, value in options.items():
            arguments += [
                "--" + name.replace("_", "-"),
                ",".join(map(str, value)) if isinstance(value, tuple) else value,
            ]
        whole, _, result = expected(run, text, **options)
        report = json.loads(fill("--model", path, "--json", text, *arguments).out)
        assert (report["text"], report["forwards"]) == (whole, result.nfe)


def test_the_text_may_come_from_standard_input(fill: Fill, run: tuple[Any, Any], path: Path) -> None:
    text = "first line\n  [MASK:2]日本\n[MASK]\n"
    outcome = fill("--model", path, "-", stdin=text)
    assert (outcome.status, outcome.out) == (0, expected(run, text)[0] + "\n")
    assert_one_sentence(fill("--model", path, "-", stdin=""), "no hole")


def test_without_a_model_the_demo_checkpoint_fills_and_says_so(fill: Fill) -> None:
    text = "user says [MASK:4] ok [MASK]"
    whole = expected(mlx_dllm_plugin.load(demo_path())[:2], text)[0]
    outcome = fill(text)
    assert (outcome.status, outcome.out) == (0, whole + "\n")
    first, second = outcome.err.splitlines()
    assert first == f"{PREFIX} no --model given: using the demo checkpoint that comes with the plugin"
    assert second.startswith(f"{PREFIX} 5 tokens in 2 holes, ")


def test_both_ways_to_start_it_work(path: Path, run: tuple[Any, Any]) -> None:
    text = "naïve 😀 [MASK:3] end"
    whole = expected(run, text)[0]
    script = "import sys; from mlx_dllm_plugin.commands import main; sys.exit(main())"
    for start in (["-m", "mlx_dllm_plugin"], ["-c", script]):
        outcome = process([*start, "infill", "--model", path, text])
        assert (outcome.status, outcome.out) == (0, whole + "\n") and "Traceback" not in outcome.err
    assert_one_sentence(process(["-m", "mlx_dllm_plugin", "infill", "--model", path, "nothing here"]), "no hole")


@pytest.mark.parametrize("text", ["[MASK:3] b", "a [MASK]", "[MASK:2]", "a [MASK] b [MASK] c"])
def test_what_the_tokenizer_puts_around_a_text_stands_around_all_of_it(path: Path, tmp_path: Path, text: str) -> None:
    """Also where it begins with a hole, as a beginning of sequence must come first; and nothing in between."""
    copy = copy_run(path, tmp_path / "run") / "model"
    around = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}]
    template = [*around, {"Sequence": {"id": "A", "type_id": 0}}, *around]
    processor = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [339], "tokens": ["<|endoftext|>"]}},
    }
    edit_json(copy / "tokenizer.json", post_processor=processor)
    edit_json(copy / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    plain, framed = (mlx_dllm_plugin.load(folder)[1] for folder in (path, copy))
    assert framed.encode("x") == [339, *plain.encode("x"), 339]
    inner, marks = encode(plain, split(text), 340)
    canvas, framed_marks = encode(framed, split(text), 340)
    assert (canvas, framed_marks) == ([339, *inner, 339], [False, *marks, False])
    assert sum(marks) == sum(part for part in split(text) if isinstance(part, int))


def test_help_shows_the_options_and_what_a_hole_is(fill: Fill) -> None:
    outcome = fill("--help")
    assert outcome.status == 0 and "[MASK:n]" in outcome.out and outcome.err == ""
    for option in dataclasses.fields(DecodingOptions):
        shown = option.metadata["cli"] and option.name not in ("max_tokens", "canvas_length")
        assert (f" --{option.name.replace('_', '-')} " in outcome.out.replace("\n", " ")) == shown, option.name
    for name in ("--model", "--tokenizer", "--json"):
        assert name in outcome.out


@pytest.mark.parametrize("length", ["0", "x", "-1", "", "9" * 5000], ids=lambda length: length[:4] or "nothing")
def test_a_bad_hole_is_one_sentence(fill: Fill, length: str) -> None:
    """Before a checkpoint is looked for."""
    assert_one_sentence(fill("--model", "missing", f"a [MASK:{length}]"), f"[MASK:{length}] is not a hole")


def test_a_text_without_a_hole_is_one_sentence(fill: Fill) -> None:
    for text in ("nothing here", "", "[mask:3]"):
        assert_one_sentence(fill(text), "no hole", "[MASK:n]")


def test_a_bad_request_is_one_sentence(fill: Fill, path: Path) -> None:
    text = "a [MASK:2] b"
    assert_one_sentence(fill("--model", path, "--unmasking", "best", text), "'best'", *RULES.names())
    assert_one_sentence(fill("--model", path, "--unmasking", "random", "--threshold", 0.5, text), "threshold")
    assert_one_sentence(fill("--model", path, "--suppress-tokens", "999", text), "999")
    assert_one_sentence(fill("--model", path, "--attention", "block_causal", text), "both sides")
    assert_one_sentence(fill("--model", path, "a [MASK:500]"), "context", "128")
    assert_one_sentence(fill("--model", path, "\udcff [MASK]"), "UTF-8")


def test_bytes_that_are_no_text_are_one_sentence(fill: Fill, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for errors in ("strict", "surrogateescape"):
        stdin = io.TextIOWrapper(io.BytesIO(b"a \xff [MASK]"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", stdin)
        assert_one_sentence(fill("--model", path, "-"), "UTF-8")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("a [MASK]", "b"),
        ("a [MASK]", "--threshold", "x"),
        ("a [MASK]", "--temp", "-1"),
        ("a [MASK]", "--eos-flags", "some"),
        ("a [MASK]", "--max-tokens", "3"),
        ("a [MASK]", "--canvas-length", "3"),
    ],
)
def test_an_impossible_command_is_a_usage_error(fill: Fill, arguments: tuple[str, ...]) -> None:
    outcome = fill(*arguments)
    assert outcome.status == 2 and outcome.out == ""
    assert "usage: mlx-dllm" in outcome.err and "error: " in outcome.err and "Traceback" not in outcome.err


@pytest.mark.parametrize("name", ["missing", "./missing", "a/b/missing", "nobody/nothing-of-this-name"])
def test_a_missing_model_is_one_sentence(
    fill: Fill, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_sentence(fill("--model", name, "a [MASK]"), name, "hub")


def test_a_broken_or_autoregressive_model_is_one_sentence(fill: Fill, path: Path, tmp_path: Path) -> None:
    text = "a [MASK]"
    copy = copy_run(path, tmp_path / "run")
    (copy / "model" / "model.safetensors").unlink()
    assert_one_sentence(fill("--model", copy, text), "safetensors")
    assert_one_sentence(fill("--model", tmp_path, text), str(tmp_path), "config.json")
    assert_one_sentence(fill("--model", path, "--tokenizer", tmp_path, text), "tokenizer")
    other = make_ar_model(tmp_path / "other", path / "model", model_type="olmo2")
    assert_one_sentence(fill("--model", other, text), "no diffusion spec")
    edit_json(other / "config.json", model_type="nobody_knows")
    assert_one_sentence(fill("--model", other, text), str(other), "nobody_knows", "cannot be loaded")
    stock = make_ar_model(tmp_path / "stock", path / "model", model_type="llama")
    ids = json.loads(fill("--model", stock, "--json", "--mask-token-id", 340, text).out)
    assert_one_sentence(fill("--model", stock, text), "no diffusion spec", "--mask-token-id")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (stock / name).write_text((stock / name).read_text().replace("<|mdlm_mask|>", "<|other|>"))
    edit_json(stock / "tokenizer_config.json", mask_token=...)
    assert_one_sentence(fill("--model", stock, text), "--mask-token-id")
    assert json.loads(fill("--model", stock, "--json", "--mask-token-id", 340, text).out)["canvas"] == ids["canvas"]
    other = json.loads(fill("--model", stock, "--json", "--mask-token-id", 12, text).out)
    assert other["canvas"] != ids["canvas"]
