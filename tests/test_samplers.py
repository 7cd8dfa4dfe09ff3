"""Commit rules: schedules against tiny oracles, and the engine against plain loops written here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dllm_plugin import DecodingOptions, DecodingResult, DiffusionError, bidirectional_forward, decode
from mlx_dllm_plugin.decode import Finished, run
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.plan import plan_slots
from mlx_dllm_plugin.samplers import RULES, Candidates
from mlx_dllm_plugin.samplers.a2d import a2d_schedule, mlx_dllm_schedule, tempered_probability
from mlx_dllm_plugin.samplers.low_confidence import even_schedule, random_order
from tests.models import EOS, MASK, count_forwards, tiny_model

SCHEDULES: dict[str, Callable[..., list[Any]]] = {
    "a2d": a2d_schedule,
    "mlx_dllm": mlx_dllm_schedule,
    "low_confidence": even_schedule,
}


def a2d_oracle(masks: int, steps: int) -> list[int]:
    """a2d's sampler, counted one mask at a time."""
    left, commits = masks, []
    for i in range(steps):
        target = masks if i == steps - 1 else round((i + 1) / steps * masks)
        commits.append(min(max(target - (masks - left), 0), left))
        left -= commits[-1]
    return commits


def mlx_dllm_oracle(masks: int, steps: int) -> list[int]:
    """mlx-dllm's denoise, likewise."""
    left, commits = masks, []
    for i in range(steps):
        target = masks if i == steps - 1 else round((i + 1) * masks / steps)
        commits.append(min(max(target - (masks - left), 0), left))
        left -= commits[-1]
    return commits


def llada_oracle(masks: int, steps: int) -> list[int]:
    """LLaDA's get_num_transfer_tokens: deal the masks out one by one."""
    commits = [0] * steps
    for number in range(masks):
        commits[number % steps] += 1
    return commits


ORACLES = {"a2d": a2d_oracle, "mlx_dllm": mlx_dllm_oracle, "low_confidence": llada_oracle}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_equal_their_oracles_up_to_64(name: str) -> None:
    for masks in range(1, 65):
        for steps in range(1, 65):
            assert SCHEDULES[name](masks, steps, {}) == ORACLES[name](masks, steps), (masks, steps)


@pytest.mark.parametrize("name", SCHEDULES)
@given(masks=st.integers(1, 3000), steps=st.integers(1, 3000))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_schedules_commit_every_mask_once(name: str, masks: int, steps: int) -> None:
    commits = SCHEDULES[name](masks, steps, {})
    assert len(commits) == steps and sum(commits) == masks and min(commits) >= 0
    assert max(commits) - min(commits) <= (1 if name == "low_confidence" else 2)
    assert commits == ORACLES[name](masks, steps)


def test_the_two_roundings_differ_in_exactly_21_places_up_to_64() -> None:
    differ = []
    for masks in range(1, 65):
        for steps in range(1, 65):
            first, second = (np.cumsum(schedule(masks, steps, {})) for schedule in (a2d_schedule, mlx_dllm_schedule))
            differ += [(masks, steps, int(i)) for i in np.flatnonzero(first != second)]
    assert differ == [
        *((11, 22, 14), (11, 44, 29), (13, 26, 14), (13, 52, 29), (19, 38, 20), (22, 44, 14), (22, 44, 24)),
        *((26, 52, 14), (27, 54, 28), (28, 56, 28), (29, 58, 30), (42, 28, 16), (42, 56, 33), (45, 10, 6)),
        *((45, 20, 13), (45, 30, 20), (45, 40, 27), (45, 50, 34), (45, 60, 41), (55, 22, 2), (55, 44, 5)),
    ]


def test_the_rules_have_the_schedules_of_their_names() -> None:
    assert {name: RULES.get(name).schedule for name in SCHEDULES} == SCHEDULES
    assert RULES.get("random").schedule is even_schedule
    assert set(RULES.names()) >= {"a2d", "mlx_dllm", "low_confidence", "random"}
    assert {name for name in SCHEDULES if RULES.get(name).drop_mask} == {"mlx_dllm"}
    assert RULES.get("random").draws({}) and not RULES.get("low_confidence").draws({})


@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.25, 1.0, 3.0]))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_token_probability_is_the_softmax(seed: int, temperature: float) -> None:
    random = np.random.default_rng(seed)
    logits = (8 * random.standard_normal((2, 3, 11))).astype(np.float32)
    tokens = random.integers(0, 11, (2, 3))
    scaled = logits.astype(np.float64) / temperature
    softmax = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
    expected = np.take_along_axis(softmax, tokens[..., None], -1)[..., 0]
    noise = mx.array(random.random((2, 3)).astype(np.float32))
    values = {"confidence_temperature": mx.full((2, 1), temperature)}
    candidates = Candidates(mx.array(logits), mx.array(tokens), noise, values)
    np.testing.assert_allclose(np.array(tempered_probability(candidates)), expected, rtol=1e-4, atol=1e-30)
    assert random_order(candidates) is noise


def test_a_confidence_at_temperature_zero_is_a_number() -> None:
    logits = mx.array([[[3.0, 1.0, -2.0]]])
    values = {"confidence_temperature": mx.zeros((1, 1))}
    at_best, at_other = (
        tempered_probability(Candidates(logits, mx.array([[i]]), mx.zeros((1, 1)), values)).item() for i in (0, 1)
    )
    assert (at_best, at_other) == (1.0, 0.0)


# The engine against LLaDA's loop, in plain Python.


def llada(
    model: Any,
    prompt: list[int],
    masks: int,
    steps: int,
    block: int | None = None,
    order: dict[int, float] | None = None,
) -> tuple[list[int], list[tuple[list[int], list[int]]], int]:
    """The canvas, (positions, tokens) of every forward that commits, and the number of steps that commit nothing.
    ``order`` replaces the confidence of a position."""
    canvas = np.array([*prompt, *[MASK] * masks])
    masked = np.array([False] * len(prompt) + [True] * masks)
    block = block or masks
    assert masks % block == 0 and steps % (masks // block) == 0
    commits, empty = [], 0
    for start in range(len(prompt), len(canvas), block):
        for count in llada_oracle(block, steps // (masks // block)):
            if count == 0:
                empty += 1
                continue
            logits = np.array(bidirectional_forward(model, mx.array(canvas[None]))[0]).astype(np.float64)
            allowed = logits.copy()
            allowed[:, MASK] = -np.inf
            tokens = allowed.argmax(-1)
            softmax = np.exp(logits - logits.max(-1, keepdims=True))
            confidence = softmax.max(-1) / softmax.sum(-1)
            if order is not None:
                confidence = np.array([order.get(i, 0.0) for i in range(len(canvas))])
            confidence[~masked] = -np.inf
            confidence[start + block :] = -np.inf
            chosen = np.sort(np.argsort(-confidence, kind="stable")[:count])
            canvas[chosen], masked[chosen] = tokens[chosen], False
            commits.append((chosen.tolist(), tokens[chosen].tolist()))
    return canvas.tolist(), commits, empty


def as_lists(result: DecodingResult) -> list[tuple[list[int], list[int]]]:
    return [(list(commit.positions), list(commit.tokens)) for commit in result.commits]


CASES = [(12, 12, None), (12, 5, None), (12, 1, None), (12, 30, None), (12, 12, 4), (12, 6, 4), (12, 4, 3), (12, 24, 6)]


@pytest.fixture(scope="module", params=["gpt2", "qwen2"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, eos_token_id=None)


@pytest.mark.parametrize(("masks", "steps", "block"), CASES)
def test_low_confidence_equals_lladas_loop(model: Any, masks: int, steps: int, block: int | None) -> None:
    for prompt in ([5], [9, 2, 33, 4, 17], [MASK, 1, MASK]):
        options = DecodingOptions(
            unmasking="low_confidence", max_tokens=masks, max_denoising_steps=steps, block_length=block
        )
        result = decode(model, prompt, options)
        canvas, commits, empty = llada(model, prompt, masks, steps, block)
        assert result.canvas == canvas
        assert as_lists(result) == commits
        assert (result.nfe, result.empty_steps) == (len(commits), empty)
        assert result.tokens == canvas[len(prompt) :]


@pytest.mark.parametrize(("masks", "steps", "block"), CASES)
def test_random_equals_lladas_loop_in_the_order_it_drew(model: Any, masks: int, steps: int, block: int | None) -> None:
    options = DecodingOptions(
        unmasking="random", max_tokens=masks, max_denoising_steps=steps, block_length=block, seed=11
    )
    result = decode(model, [9, 2, 33], options)
    order = {position: -commit.step for commit in result.commits for position in commit.positions}
    canvas, commits, empty = llada(model, [9, 2, 33], masks, steps, block, order)
    assert result.canvas == canvas and as_lists(result) == commits
    assert (result.nfe, result.empty_steps) == (len(commits), empty)


def test_random_draws_every_order_alike(model: Any) -> None:
    """First position of 4, over 400 seeds: chi-square with 3 degrees of freedom, false alarm 1e-6 (30.66)."""
    options = [
        DecodingOptions(unmasking="random", max_tokens=4, max_denoising_steps=4, seed=seed) for seed in range(400)
    ]
    results = decode(model, [[1, 2]] * len(options), options)
    counts = np.bincount([result.commits[0].positions[0] - 2 for result in results], minlength=4)
    assert ((counts - 100) ** 2 / 100).sum() < 30.66
    assert len({tuple(c.positions[0] for c in result.commits) for result in results}) == 24


def test_a_block_is_filled_before_the_next_begins(model: Any) -> None:
    for rule in ("low_confidence", "random"):
        options = DecodingOptions(
            unmasking=rule, max_tokens=10, block_length=4, max_denoising_steps=7, seed=3, stop_at_eos=False
        )
        result = decode(model, [1, 2], options)
        blocks = [{(position - 2) // 4 for position in commit.positions} for commit in result.commits]
        assert all(len(block) == 1 for block in blocks)
        order = [block.pop() for block in blocks]
        assert order == [0, 0, 0, 1, 1, 2, 2]
        assert [len(c.positions) for c in result.commits] == [2, 1, 1, 2, 2, 1, 1]


def test_a_block_longer_than_the_canvas_is_the_canvas(model: Any) -> None:
    options = DecodingOptions(unmasking="low_confidence", max_tokens=6, max_denoising_steps=3)
    whole = decode(model, [1, 2], options)
    wide = decode(
        model, [1, 2], DecodingOptions(unmasking="low_confidence", max_tokens=6, max_denoising_steps=3, block_length=99)
    )
    assert wide == whole


def test_fewer_steps_than_blocks_are_refused(model: Any) -> None:
    options = DecodingOptions(unmasking="low_confidence", max_tokens=9, block_length=2, max_denoising_steps=4)
    with pytest.raises(DiffusionError, match=r"^max_denoising_steps 4 is less than the 5 blocks of 2 tokens; .*\.$"):
        decode(model, [1, 2], options)


# The engine against a2d's and mlx-dllm's loops.


def reference(
    model: Any, prompt: list[int], masks: int, steps: int, *, drop_mask: bool, temperature: float = 1.0
) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    canvas = np.array([*prompt, *[MASK] * masks])
    masked = np.arange(len(canvas)) >= len(prompt)
    commits = []
    for count in (mlx_dllm_oracle if drop_mask else a2d_oracle)(masks, steps):
        if not count:
            continue
        logits = np.array(bidirectional_forward(model, mx.array(canvas[None]))[0]).astype(np.float64)
        allowed = logits.copy()
        allowed[:, MASK] = -np.inf
        scaled = (allowed if drop_mask else logits) / temperature
        softmax = np.exp(scaled - scaled.max(-1, keepdims=True))
        confidence = np.where(masked, softmax.max(-1) / softmax.sum(-1), -np.inf)
        chosen = np.sort(np.argsort(-confidence, kind="stable")[:count])
        canvas[chosen], masked[chosen] = allowed.argmax(-1)[chosen], False
        commits.append((chosen.tolist(), canvas[chosen].tolist()))
    return canvas.tolist(), commits


@pytest.mark.parametrize("rule", ["a2d", "mlx_dllm"])
@pytest.mark.parametrize(("masks", "steps"), [(7, 3), (45, 10), (11, 22), (6, 6), (5, 1)])
def test_a2d_rules_equal_their_loops(model: Any, rule: str, masks: int, steps: int) -> None:
    result = decode(model, [4, 8, 15], DecodingOptions(unmasking=rule, max_tokens=masks, max_denoising_steps=steps))
    canvas, commits = reference(model, [4, 8, 15], masks, steps, drop_mask=rule == "mlx_dllm")
    assert result.canvas == canvas and as_lists(result) == commits
    assert (result.nfe, result.empty_steps) == (len(commits), steps - len(commits))


def test_the_confidence_temperature_changes_the_order_but_no_first_choice(model: Any) -> None:
    orders = {}
    for temperature in (0.3, 1.0, 8.0):
        options = DecodingOptions(max_tokens=12, max_denoising_steps=4, confidence_temperature=temperature)
        result = decode(model, [4, 8, 15], options)
        canvas, commits = reference(model, [4, 8, 15], 12, 4, drop_mask=False, temperature=temperature)
        assert result.canvas == canvas and as_lists(result) == commits
        orders[temperature] = [commit.positions for commit in result.commits]
    assert len({str(order) for order in orders.values()}) > 1


def test_every_rule_makes_one_forward_per_step_that_commits(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = count_forwards(monkeypatch, model)
    for rule in ("a2d", "mlx_dllm", "low_confidence", "random"):
        for steps in (1, 3, 5, 9):
            before = forwards()
            result = decode(
                model, [1, EOS, 3], DecodingOptions(unmasking=rule, max_tokens=5, max_denoising_steps=steps)
            )
            assert forwards() - before == result.nfe == min(steps, 5)
            assert result.nfe + result.empty_steps == steps


# The threshold rule, whose number of steps nobody knows beforehand.


def threshold_oracle(model: Any, prompt: list[int], masks: int, threshold: float, block: int) -> list[list[int]]:
    """The positions of every commit: all above the threshold, else the best one, block by block."""
    canvas = np.array([*prompt, *[MASK] * masks])
    masked = np.array([False] * len(prompt) + [True] * masks)
    commits = []
    for start in range(len(prompt), len(canvas), block):
        inside = (np.arange(len(canvas)) >= start) & (np.arange(len(canvas)) < start + block)
        while (masked & inside).any():
            logits = np.array(bidirectional_forward(model, mx.array(canvas[None]))[0]).astype(np.float64)
            confidence = np.exp(logits.max(-1) - np.logaddexp.reduce(logits, axis=-1))
            logits[:, MASK] = -np.inf
            confidence[~(masked & inside)] = -np.inf
            chosen = np.flatnonzero(confidence > threshold)
            chosen = chosen if len(chosen) else confidence.argmax()[None]
            canvas[chosen], masked[chosen] = logits.argmax(-1)[chosen], False
            commits.append(chosen.tolist())
    return commits


@pytest.mark.parametrize("block", [12, 5, 4])
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.15, 0.4, 2.0])
def test_threshold_equals_its_loop(model: Any, threshold: float, block: int) -> None:
    options = DecodingOptions(
        unmasking="threshold", threshold=threshold, max_tokens=12, block_length=block, stop_at_eos=False
    )
    result = decode(model, [1, 2, 3], options)
    assert [list(commit.positions) for commit in result.commits] == threshold_oracle(
        model, [1, 2, 3], 12, threshold, block
    )
    assert result.nfe == len(result.commits) and result.empty_steps == 0


def test_a_threshold_above_one_is_one_token_a_step_and_zero_is_one_step(model: Any) -> None:
    def result(**options: Any) -> DecodingResult:
        return decode(model, [7, 8], DecodingOptions(max_tokens=9, **options))

    one = result(unmasking="low_confidence", max_denoising_steps=9)
    assert as_lists(result(unmasking="threshold", threshold=1.5)) == as_lists(one) and one.nfe == 9
    assert result(unmasking="threshold", threshold=0.0).nfe == 1


@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    threshold=st.floats(0.0, 1.2),
    temp=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_threshold_rows_of_a_batch_equal_the_rows_alone(
    lengths: list[int], threshold: float, temp: float, seed: int
) -> None:
    model = tiny_model("qwen2", eos_token_id=None)
    options = DecodingOptions(unmasking="threshold", threshold=threshold, max_tokens=7, temp=temp, seed=seed)
    prompts = [[(3 * i + seed) % MASK for i in range(length)] for length in lengths]
    for prompt, together in zip(prompts, decode(model, prompts, options), strict=True):
        alone = decode(model, prompt, options)
        assert (together.canvas, together.nfe, as_lists(together)) == (alone.canvas, alone.nfe, as_lists(alone))
        assert together.logprobs == alone.logprobs


def test_the_default_threshold_is_nine_tenths(model: Any) -> None:
    same = [
        as_lists(decode(model, [5, 6], DecodingOptions(unmasking="threshold", max_tokens=10, threshold=threshold)))
        for threshold in (None, 0.9)
    ]
    assert same[0] == same[1]


def test_steps_are_refused_with_a_threshold_and_a_threshold_without(model: Any) -> None:
    for options in (
        {"unmasking": "threshold", "max_denoising_steps": 4},
        {"unmasking": "low_confidence", "threshold": 0.9},
    ):
        with pytest.raises(DiffusionError, match="does not use"):
            decode(model, [1], DecodingOptions(max_tokens=4, **options))


# Canvases with masks anywhere, and shifted logits.


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("rule", ["mlx_dllm", "a2d", "low_confidence"])
def test_masks_anywhere_and_shifted_logits_equal_a_plain_loop(model: Any, rule: str, shifted: bool) -> None:
    rows = [[1, MASK, 3, MASK, MASK, 6, 7, MASK], [2, 2, 2, MASK, 9, MASK]]
    slots = [[i for i, token in enumerate(row) if token == MASK] for row in rows]
    spec = replace(model.diffusion_spec, logits="shifted" if shifted else "in_place", eos_token_ids=())
    options = DecodingOptions(unmasking=rule, max_denoising_steps=3)
    plans = [(plan_slots(spec, row, at, options), options) for row, at in zip(rows, slots, strict=True)]
    family = FAMILIES.get(model.diffusion_spec.family)
    found = {event.row: list(event.canvas) for event in run(model, family, spec, plans) if isinstance(event, Finished)}
    for number, (row, at) in enumerate(zip(rows, slots, strict=True)):
        canvas, left = np.array(row), list(at)
        for count in SCHEDULES[rule](len(at), 3, {}):
            logits = np.array(bidirectional_forward(model, mx.array(canvas[None]))[0]).astype(np.float64)
            logits = np.roll(logits, 1, axis=0) if shifted else logits
            scores = logits.copy()
            logits[:, MASK] = -np.inf
            scores = logits if rule == "mlx_dllm" else scores
            confidence = np.exp(scores.max(-1) - np.logaddexp.reduce(scores, axis=-1))
            for i in sorted(left, key=lambda i: -confidence[i])[:count]:
                canvas[i] = logits[i].argmax()
                left.remove(i)
        assert found[number] == canvas.tolist()


def test_shifted_logits_cannot_fill_the_first_position(model: Any) -> None:
    spec = replace(model.diffusion_spec, logits="shifted")
    with pytest.raises(DiffusionError, match="unmasked first token"):
        plan_slots(spec, [MASK, 1], [0], DecodingOptions())
