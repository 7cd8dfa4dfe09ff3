"""Commit rules: schedules against tiny oracles, and the engine against plain loops written here."""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dllm_plugin import DecodingOptions, DecodingResult, DiffusionError, bidirectional_forward, decode
from mlx_dllm_plugin.decode import Commit, Finished, run
from mlx_dllm_plugin.families import FAMILIES, a2d
from mlx_dllm_plugin.plan import plan_slots
from mlx_dllm_plugin.samplers import RULES, Candidates, Doubts, Memory, Ranking, Rule, marks
from mlx_dllm_plugin.samplers.a2d import a2d_schedule, mlx_dllm_schedule, tempered_probability
from mlx_dllm_plugin.samplers.low_confidence import even_schedule, random_order
from mlx_dllm_plugin.spec import DiffusionSpec
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


# The rules that pick by more than a number: each in plain Python, of the confidences of the stage's masks by position.

Numbers = dict[int, float]
Pick = Callable[[Numbers, Numbers], set[int]]


def in_order(sure: Numbers) -> list[int]:
    """The surest first, of equal ones the leftmost."""
    return sorted(sure, key=lambda i: (-sure[i], i))


def at_least_the_best(chosen: set[int], sure: Numbers) -> set[int]:
    return chosen or {in_order(sure)[0]}


def pick_threshold(values: dict[str, Any], numbers: list[int]) -> Pick:
    return lambda sure, _: at_least_the_best({i for i in sure if sure[i] > values["threshold"]}, sure)


def pick_confidence_threshold(values: dict[str, Any], numbers: list[int]) -> Pick:
    """Fast-dLLM's loop for Dream: those of the step's number that are not sure enough are left to the next step."""
    step, refused = 0, 0

    def pick(sure: Numbers, _: Numbers) -> set[int]:
        nonlocal step, refused
        tried = in_order(sure)[: (numbers[step] if step < len(numbers) else 0) + refused]
        chosen = {i for rank, i in enumerate(tried) if rank == 0 or sure[i] >= values["threshold"]}
        step, refused = step + 1, len(tried) - len(chosen)
        return at_least_the_best(chosen, sure)

    return pick


def pick_factor(values: dict[str, Any], numbers: list[int]) -> Pick:
    """The paper's: the largest n that qualifies."""

    def pick(sure: Numbers, _: Numbers) -> set[int]:
        order = in_order(sure)
        for n in range(len(order), 0, -1):
            if (n + 1) * (1 - sure[order[n - 1]]) < values["factor"]:
                return set(order[:n])
        return {order[0]}

    return pick


def pick_fast_dllm_factor(values: dict[str, Any], numbers: list[int]) -> Pick:
    """The code's: thresholds by rank, up to the first confidence that falls short, and the last one with the others."""

    def pick(sure: Numbers, _: Numbers) -> set[int]:
        order, rank = in_order(sure), 0
        for rank, i in enumerate(order):
            if rank and sure[i] < 1 - values["factor"] / (rank + 2):
                break
        if rank in (0, len(order) - 1):
            rank += 1
        return set(order[:rank])

    return pick


def pick_eb(values: dict[str, Any], numbers: list[int]) -> Pick:
    def pick(sure: Numbers, entropy: Numbers) -> set[int]:
        chosen, total, largest = set(), 0.0, 0.0
        for i in in_order(sure):
            total, largest = total + entropy[i], max(largest, entropy[i])
            if total - largest > values["entropy_bound"]:
                break
            chosen.add(i)
        return chosen

    return pick


def pick_klass(values: dict[str, Any], numbers: list[int]) -> Pick:
    """By confidence and for how many steps the distribution has been stable."""

    def pick(sure: Numbers, steps: Numbers) -> set[int]:
        still = {i for i in sure if steps[i] >= values["kl_history"]}
        return at_least_the_best({i for i in still if sure[i] >= values["threshold"]}, sure)

    return pick


def pick_dinfer(values: dict[str, Any], numbers: list[int]) -> Pick:
    """Where the model prefers the mask there is no candidate. dInfer commits nothing where there is none at all; here
    the best of the others is, so that decoding ends."""

    def pick(sure: Numbers, prefers_mask: Numbers) -> set[int]:
        able = {i: p for i, p in sure.items() if not prefers_mask[i]}
        if not able:
            return {in_order(sure)[0]}
        limit = min(values["threshold"], max(able.values()) - 1e-5)
        return {i for i, p in able.items() if p >= limit}

    return pick


def pick_hierarchy(values: dict[str, Any], numbers: list[int]) -> Pick:
    def pick(sure: Numbers, _: Numbers) -> set[int]:
        runs: list[list[int]] = []
        for i in sorted(sure):
            if runs and runs[-1][-1] == i - 1:
                runs[-1].append(i)
            else:
                runs.append([i])
        chosen = {in_order(sure)[0]} | {i for i in sure if sure[i] > values["threshold"]}
        for run_of_masks in runs:
            top = max(sure[i] for i in run_of_masks)
            if top > values["low_threshold"]:
                chosen |= {i for i in run_of_masks if sure[i] == top}
        return chosen

    return pick


def pick_local_leap(values: dict[str, Any], numbers: list[int]) -> Pick:
    def pick(sure: Numbers, _: Numbers) -> set[int]:
        anchors = {i for i in sure if sure[i] >= values["threshold"]}
        near = {i for i in sure if any(abs(i - anchor) <= values["radius"] for anchor in anchors)}
        relaxed = {i for i in near if sure[i] >= values["relaxed_threshold"]}
        return at_least_the_best(anchors | relaxed, sure)

    return pick


def pick_prophet(values: dict[str, Any], numbers: list[int]) -> Pick:
    """Unlike Prophet, which looks at five positions of the answer, and counts steps: the mean gap of all masks of the
    stage, and the share of it that is committed."""
    masks, due = sum(numbers), iter([number for number in numbers if number])

    def pick(sure: Numbers, gap: Numbers) -> set[int]:
        done = 1 - len(sure) / masks
        bound = values["gap"] * (1 if done < 0.33 else 2 / 3 if done < 0.67 else 1 / 3)
        number = next(due)
        return set(sure) if sum(gap[i] for i in sure) / len(sure) >= bound else set(in_order(sure)[:number])

    return pick


def pick_wino(values: dict[str, Any], numbers: list[int]) -> Pick:
    def pick(sure: Numbers, _: Numbers) -> set[int]:
        accepted = {i for i in sure if sure[i] >= values["threshold"]}
        most = min(max(int(0.7 * len(sure)), 5), 20)
        return at_least_the_best(set([i for i in in_order(sure) if i in accepted][:most]), sure)

    return pick


PICKS: dict[str, Callable[[dict[str, Any], list[int]], Pick]] = {
    "threshold": pick_threshold,
    "confidence_threshold": pick_confidence_threshold,
    "factor": pick_factor,
    "fast_dllm_factor": pick_fast_dllm_factor,
    "eb": pick_eb,
    "klass": pick_klass,
    "dinfer_threshold": pick_dinfer,
    "hierarchy": pick_hierarchy,
    "credit": pick_dinfer,
    "wino": pick_wino,
    "prophet": pick_prophet,
    "local_leap": pick_local_leap,
}
SCHEDULED = ("confidence_threshold", "prophet")


# The engine on tables: what the model says depends on the row, which the first token of a canvas names, and on how many
# masks its canvas has.


def tabled(tables: np.ndarray, shadows: np.ndarray | None = None) -> Any:
    """
    Args:
        tables: logits [rows, n, T, V]: of row r with m masks those at [r, min(m, n - 1)].
        shadows: those of the masks that stand in for tokens (WINO).
    """
    vocab, steps = tables.shape[-1], tables.shape[1]
    assert tables.shape[0] < vocab
    said = [mx.array(table.astype(np.float32)) for table in (tables, shadows) if table is not None]

    def hidden(_: Any, ids: mx.array, cache: list[Any]) -> mx.array:
        real = ids[: len(ids) // len(said)]
        masks = mx.minimum((real == vocab - 1).sum(axis=1), steps - 1)
        return mx.concatenate([table[real[:, 0], masks] for table in said])

    spec = DiffusionSpec(
        family="tabled",
        logits="in_place",
        attention="bidirectional",
        canvas="fixed",
        unmasking="threshold",
        mask_token_id=vocab - 1,
        eos_token_ids=(),
        vocab_size=vocab,
        context_length=None,
    )
    own = a2d.family("tabled", hidden=hidden, head=lambda _, states: states)
    return SimpleNamespace(layers=[None], diffusion_spec=spec, diffusion_family=own)


@dataclass(frozen=True)
class Shape:
    """A row: where its masks are, and its options."""

    slots: list[int]
    options: DecodingOptions

    def blocks(self) -> list[list[int]]:
        length = self.options.block_length or len(self.slots) + self.slots[-1]
        numbers = [(i - self.slots[0]) // length for i in self.slots]
        return [[i for i, n in zip(self.slots, numbers, strict=True) if n == own] for own in sorted(set(numbers))]

    def numbers(self) -> list[int]:
        """The even schedule, of a row without blocks."""
        return llada_oracle(len(self.slots), self.options.max_denoising_steps or len(self.slots))


def run_rows(model: Any, rows: Sequence[Shape], width: int) -> list[list[Commit]]:
    """Decode all rows in one batch; the commits of each. Row r's canvas begins with r, and has ``width`` tokens."""
    spec, plans = model.diffusion_spec, []
    for number, row in enumerate(rows):
        canvas = [number, *[0] * (width - 1)]
        for slot in row.slots:
            canvas[slot] = spec.mask_token_id
        plans.append((plan_slots(spec, canvas, row.slots, row.options), row.options))
    commits: list[list[Commit]] = [[] for _ in rows]
    for event in run(model, model.diffusion_family, spec, plans):
        if isinstance(event, Commit):
            commits[event.row].append(event)
    return commits


def some_slots(random: Random, width: int, number: int) -> list[int]:
    """Masks of a canvas, of which the first is known: one, all, a run, or any."""
    kind = number % 5
    if kind == 0:
        return [random.randrange(1, width)]
    if kind == 1:
        return list(range(1, width))
    if kind == 2:
        first = random.randrange(1, width - 1)
        return list(range(first, random.randrange(first + 1, width)))
    share = random.random()
    return [i for i in range(1, width) if random.random() < share] or [width - 1]


def some_measures(random: Random, width: int, number: int) -> list[float]:
    """Confidences that are exact in float32: fine ones, many ties, hardly different ones, all low, all high."""
    kind = number % 7
    if kind in (0, 5):
        return [random.randrange(9) / 8 for _ in range(width)]
    if kind == 1:
        return [0.5 + random.randrange(8) * 2.0**-19 for _ in range(width)]
    if kind == 2:
        return [random.randrange(16) / 1024 for _ in range(width)]
    if kind == 3:
        return [1 - random.randrange(40) / 1024 for _ in range(width)]
    return [random.randrange(1025) / 1024 for _ in range(width)]


POOLS: dict[str, list[Any]] = {
    "threshold": [0.0, 0.25, 0.5, 0.7, 0.9, 1.0, 1.5],
    "low_threshold": [0.0, 0.25, 0.4, 0.5, 2.0],
    "relaxed_threshold": [0.0, 0.25, 0.5, 0.75, 1.5],
    "radius": [0, 1, 2, 4, 9],
    "factor": [0.01, 0.3, 0.9, 1.1, 2.3, 7.7, 99.0],
    "entropy_bound": [0.0, 0.125, 0.5, 1.0, 3.0, 99.0],
    "kl_history": [1, 2, 3],
    "kl_threshold": [1e-6, 1e-3, 0.01, 0.3],
    "credit_weight": [0.0, 0.7, 3.0],
    "credit_power": [0.0, 0.2, 1.0],
    "credit_decay": [0.0, 0.8, 1.0],
    "gap": [0.0, 0.3, 1.1, 2.9, 9.1],
    "narrow_out_threshold": [0.0, 0.3, 0.6, 0.9, 1.0],
}


def some_options(random: Random, name: str, unmasking: str, slots: list[int]) -> DecodingOptions:
    """Values of a rule's options: its defaults, or any; of a schedule any steps, else perhaps blocks."""
    rule = RULES.get(name)
    own: dict[str, Any] = {option: random.choice(POOLS[option]) for option in sorted(POOLS.keys() & rule.uses)}
    if random.random() < 0.2:
        own = {}
    if name in SCHEDULED:
        own["max_denoising_steps"] = random.choice([1, 2, *(random.randint(1, len(slots) + 2) for _ in range(3))])
    elif random.random() < 0.4:
        own["block_length"] = random.randint(1, 12)
    return DecodingOptions(unmasking=unmasking, **own)


def values_of(name: str, options: DecodingOptions) -> dict[str, Any]:
    rule = RULES.get(name)
    given = {option: getattr(options, option) for option in rule.defaults}
    return {option: rule.defaults[option] if value is None else value for option, value in given.items()}


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Iterator[str]:
    """A rule whose measures are the first numbers of the logits. Everything else is the rule of that name."""
    rule = RULES.get(request.param)

    def confidence(seen: Candidates) -> mx.array | tuple[mx.array, ...]:
        first, second = seen.logits[..., 0], seen.logits[..., 1]
        if request.param in ("dinfer_threshold", "credit"):
            return first, second > 0
        return (first, second) if request.param in ("eb", "klass", "prophet") else first

    plain_rule = replace(rule, name="measured", confidence=confidence, memory=None, logits=None, revise=None)
    RULES.register(plain_rule)
    yield request.param
    RULES.unregister("measured")


@pytest.mark.parametrize("measured", PICKS, indirect=True)
def test_which_positions_are_committed_equals_plain_python(measured: str) -> None:
    """Confidences that do not change, exact in float32, with ties: every step until no mask is left."""
    random, width, rows = Random(f"measures of {measured}"), 41, 70
    first = [some_measures(random, width, number) for number in range(rows)]
    second: list[list[float]] = [[random.randrange(9) / 8 for _ in range(width)] for _ in range(rows)]
    if measured in ("credit", "dinfer_threshold"):
        second = [[float(random.random() * 3 < number % 4) for _ in range(width)] for number in range(rows)]
    elif measured == "prophet":
        second = [[random.randrange(9) / 8 * (1 + number % 4) for _ in range(width)] for number in range(rows)]
    elif measured == "klass":
        second = [[random.randrange(number % 4, 5) for _ in range(width)] for number in range(rows)]
    elif measured == "fast_dllm_factor":  # what equals a threshold is tested by itself
        first = [[p - 2.0**-13 for p in own] for own in first]
    tables = np.zeros((rows, 1, width, rows + 2))
    tables[:, 0, :, 0], tables[:, 0, :, 1] = first, second
    slots = [some_slots(random, width, number) for number in range(rows)]
    shapes = [Shape(own, some_options(random, measured, "measured", own)) for own in slots]
    sizes = set()
    for row, shape, commits in zip(range(rows), shapes, run_rows(tabled(tables), shapes, width), strict=True):
        expected: list[list[int]] = []
        for block in shape.blocks():
            pick = PICKS[measured](values_of(measured, shape.options), shape.numbers())
            free = set(block)
            while free:
                chosen = pick({i: first[row][i] for i in free}, {i: second[row][i] for i in free})
                assert chosen and chosen <= free
                expected.append(sorted(chosen))
                free -= chosen
        assert [list(commit.positions) for commit in commits] == expected, (row, shape)
        sizes |= {(len(chosen), chosen == shape.slots) for chosen in expected}
    assert {(1, True), (1, False), (2, False)} <= sizes and any(n > 5 for n, _ in sizes), "the cases are one-sided"


# The same from logits: what is measured, and what is remembered from step to step.


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    total = top + math.log(sum(math.exp(x - top) for x in logits))
    return [x - total for x in logits]


def best_token(logits: list[float], banned: int | None = None) -> int:
    return max((t for t in range(len(logits)) if t != banned), key=lambda t: (logits[t], -t))


class Judge:
    """A rule in plain Python, from logits. One for each row: it remembers what the rule remembers."""

    def __init__(self, name: str, shape: Shape, mask: int):
        self.name, self.shape, self.mask = name, shape, mask
        self.values = values_of(name, shape.options)
        self.before = {i: [0.0] * (mask + 1) for i in shape.slots}
        self.moved = {i: [0.0] * self.values.get("kl_history", 0) for i in shape.slots}

    def begin(self) -> None:
        """A block begins."""
        self.pick = PICKS[self.name](self.values, self.shape.numbers())
        self.credit: dict[int, dict[int, float]] = {i: {} for i in self.shape.slots}

    def step(self, logits: list[list[float]], free: set[int]) -> dict[int, int]:
        """The tokens that are committed, by position."""
        if self.name == "credit":
            logits = self.with_credit(logits, free)
        logs = {i: log_softmax(logits[i]) for i in self.shape.slots}
        sure = {i: math.exp(max(logs[i])) for i in free}
        second = dict.fromkeys(free, 0.0)
        if self.name == "eb":
            second = {i: -sum(math.exp(x) * x for x in logs[i]) for i in free}
        elif self.name in ("dinfer_threshold", "credit"):
            second = {i: best_token(logits[i]) == self.mask for i in free}
        elif self.name == "prophet":
            second = {i: sorted(logits[i])[-1] - sorted(logits[i])[-2] for i in free}
        elif self.name == "klass":
            self.divergences(logs)
            still = {i: all(kl < self.values["kl_threshold"] for kl in self.moved[i]) for i in free}
            second = {i: self.values["kl_history"] * still[i] for i in free}
        return {i: best_token(logits[i], self.mask) for i in sorted(self.pick(sure, second))}

    def divergences(self, logs: dict[int, list[float]]) -> None:
        """d2Cache's, of all generated positions, committed ones and those of other blocks too."""
        for i, own in logs.items():
            now = [math.exp(x) for x in own]
            pairs = zip(now, self.before[i], strict=True)
            kl = sum(p * (math.log(p + 1e-12) - math.log(q + 1e-12)) for p, q in pairs)
            self.moved[i] = [*self.moved[i][1:], kl]
            self.before[i] = now

    def with_credit(self, logits: list[list[float]], free: set[int]) -> list[list[float]]:
        logits = list(logits)
        for i, credit in self.credit.items():
            for token in credit:
                credit[token] *= self.values["credit_decay"]
            if i in free:
                top = best_token(logits[i])
                p = math.exp(log_softmax(logits[i])[top])
                credit[top] = credit.get(top, 0.0) + p ** self.values["credit_power"]
            weight = self.values["credit_weight"]
            logits[i] = [x + weight * math.log(1 + credit.get(t, 0.0)) for t, x in enumerate(logits[i])]
        return logits


def some_tables(seed: int, rows: int, width: int) -> np.ndarray:
    """Logits [rows, width, width, rows + 2] that change more or less from one number of masks to the next, of more or
    less sure models, some of which like the mask."""
    random = np.random.default_rng(seed)
    vocab = rows + 2
    scale = random.choice([1.0, 2.0, 4.0], (rows, 1, 1, 1)) * random.choice([0.5, 1.0, 2.0], (rows, 1, width, 1))
    drift = random.choice([0.003, 0.03, 0.3, 1.0], (rows, 1, 1, 1))
    tables = scale * random.standard_normal((rows, 1, width, vocab))
    tables = tables + drift * random.standard_normal((rows, width, width, vocab)).cumsum(axis=1)
    tables[..., -1] += random.choice([-9.0, 0.0, 6.0], (rows, 1, width), p=[0.4, 0.4, 0.2])
    return tables.astype(np.float32)


def some_rows(name: str, seed: int, rows: int, width: int) -> tuple[np.ndarray, list[Shape]]:
    random = Random(f"logits of {name} {seed}")
    slots = [some_slots(random, width, number) for number in range(rows)]
    return some_tables(seed, rows, width), [Shape(own, some_options(random, name, name, own)) for own in slots]


def judged(name: str, tables: np.ndarray, shapes: Sequence[Shape], **other: float) -> list[list[dict[int, int]]]:
    """What plain Python commits in every step of every row. ``other`` are values in the place of the rows' own."""
    rows = []
    for row, shape in enumerate(shapes):
        judge, steps, left = Judge(name, shape, tables.shape[-1] - 1), [], len(shape.slots)
        judge.values.update(other)
        for block in shape.blocks():
            judge.begin()
            free = set(block)
            while free:
                steps.append(judge.step(tables[row, left].tolist(), free))
                free -= steps[-1].keys()
                left -= len(steps[-1])
        rows.append(steps)
    return rows


@pytest.mark.parametrize("name", [name for name in PICKS if name != "wino"])
def test_whole_runs_from_logits_equal_plain_python(name: str) -> None:
    tables, shapes = some_rows(name, 1, 40, 22)
    expected = judged(name, tables, shapes)
    for number, commits in enumerate(run_rows(tabled(tables), shapes, 22)):
        found = [dict(zip(commit.positions, commit.tokens, strict=True)) for commit in commits]
        assert found == expected[number], (number, shapes[number])
    sizes = {len(step) for steps in expected for step in steps}
    assert 1 in sizes and max(sizes) > 1, "the cases are one-sided"
    without = {"klass": {"kl_threshold": math.inf}, "credit": {"credit_weight": 0.0}}.get(name)
    if without is not None:
        others = judged(name, tables, shapes, **without)
        assert sum(a != b for a, b in zip(expected, others, strict=True)) > 8, "what is remembered matters too little"


def test_klass_keeps_its_history_when_the_block_changes_and_credit_starts_anew() -> None:
    """The same logits in every step: KLASS fills the second block in its first step, and credits of a position count
    from the step in which its block began."""
    tables = np.zeros((1, 1, 9, 3))
    tables[..., 0] = 6.0
    row = Shape(list(range(1, 9)), DecodingOptions(unmasking="klass", block_length=4, kl_history=3))
    (commits,) = run_rows(tabled(tables), [row], 9)
    assert [len(commit.positions) for commit in commits] == [1, 1, 1, 1, 4]
    (commits,) = run_rows(tabled(tables), [replace(row, options=replace(row.options, kl_history=2))], 9)
    assert [len(commit.positions) for commit in commits] == [1, 1, 2, 4]
    # Token 0 leads in the first block, and token 1 in the second, by less than kept credit would be; there its own
    # credit keeps it for a step when token 0 leads again. The filler 2 makes one position the surest.
    tables = np.full((1, 9, 9, 4), -9.0)
    tables[..., 2] = -0.1 * np.arange(9)
    tables[..., 0] = 1.0
    tables[0, 5:, :, 1], tables[0, 3:5, :, 1], tables[0, :3, :, 1] = 0.0, 1.3, 0.8
    options = DecodingOptions(unmasking="credit", block_length=4, threshold=2.0, credit_decay=1.0, credit_weight=1.0)
    for weight, tokens in ((1.0, [0, 0, 0, 0, 1, 1, 1, 0]), (0.0, [0, 0, 0, 0, 1, 1, 0, 0])):
        row = Shape(list(range(1, 9)), replace(options, credit_weight=weight))
        (commits,) = run_rows(tabled(tables), [row], 9)
        assert [commit.tokens for commit in commits] == [(token,) for token in tokens]


# WINO.


def narrowed(back: Numbers, accepted: int, limit: float) -> set[int]:
    """Which committed positions are masked again: what falls short, the worst first, fewer than were accepted."""
    short = sorted((i for i in back if back[i] < limit), key=lambda i: (back[i], i))
    return set(short[: max(accepted - 1, 0)])


def test_what_is_masked_again_equals_plain_python() -> None:
    random, rows, width = Random("narrow out"), 300, 12
    back = [[random.randrange(17) / 16 for _ in range(width)] for _ in range(rows)]
    committed = [[random.random() < number % 4 / 3 for _ in range(width)] for number in range(rows)]
    accepted = [[random.randrange(8)] for _ in range(rows)]
    limits = [[random.choice([0.0, 0.25, 0.5, 0.9, 1.0])] for _ in range(rows)]
    doubts = Doubts(mx.array(back), mx.array(committed), mx.array(accepted), {"narrow_out_threshold": mx.array(limits)})
    revise = RULES.get("wino").revise
    assert revise is not None
    found = np.array(revise(doubts))
    sizes = set()
    for own, said, there, (count,), (limit,) in zip(found, back, committed, accepted, limits, strict=True):
        expected = narrowed({i: said[i] for i in range(width) if there[i]}, count, limit)
        assert set(np.flatnonzero(own).tolist()) == expected
        sizes.add(len(expected))
    assert {0, 1, 2, 3} <= sizes


def test_wino_equals_plain_python_step_by_step() -> None:
    rows, width, seed = 24, 22, 3
    random = Random("wino")
    tables, shadows = some_tables(seed, rows, width), some_tables(seed + 1, rows, width)
    shadows = (shadows + tables).astype(np.float32)  # they agree now and then
    slots = [some_slots(random, width, number) for number in range(rows)]
    shapes = [Shape(own, some_options(random, "wino", "wino", own)) for own in slots]
    again = 0
    for row, commits in enumerate(run_rows(tabled(tables, shadows), shapes, width)):
        shape = shapes[row]
        values, masked, steps = values_of("wino", shape.options), set(shape.slots), []
        tokens: dict[int, int] = {}
        for block in shape.blocks():
            pick = PICKS["wino"](values, [])
            while masked & set(block):
                said = tables[row, len(masked)].tolist()
                doubted = shadows[row, len(masked)].tolist()
                sure = {i: math.exp(max(log_softmax(said[i]))) for i in masked & set(block)}
                chosen = pick(sure, {})
                back = {i: math.exp(log_softmax(doubted[i])[tokens[i]]) for i in set(block) - masked}
                short = narrowed(back, len(chosen), values["narrow_out_threshold"])
                tokens.update({i: best_token(said[i], rows + 1) for i in chosen})
                steps.append((sorted(chosen), [tokens[i] for i in sorted(chosen)], sorted(short)))
                masked = masked - chosen | short
                again += len(short)
        found = [(list(commit.positions), list(commit.tokens), list(commit.masked)) for commit in commits]
        assert found == steps, shape
        assert len(found) <= len(shape.slots)
    assert again > 20


# Bounds.


@pytest.mark.parametrize("measured", ["prophet"], indirect=True)
def test_prophet_commits_all_at_the_bounds_of_its_three_phases(measured: str) -> None:
    """7.5, 5 and 2.5, which are reached and not exceeded: of 12 masks one a step, until the phase whose bound is."""
    gaps = [7.5, 7.49, 5.0, 4.99, 2.5, 2.49]
    tables = np.zeros((6, 1, 13, 8))
    tables[..., 0] = 0.5
    tables[..., 1] = np.array(gaps)[:, None, None]
    row = Shape(list(range(1, 13)), DecodingOptions(unmasking="measured"))
    found = [[len(c.positions) for c in commits] for commits in run_rows(tabled(tables), [row] * 6, 13)]
    assert found == [[12], [*[1] * 4, 8], [*[1] * 4, 8], [*[1] * 9, 3], [*[1] * 9, 3], [1] * 12]


@pytest.mark.parametrize("measured", ["local_leap"], indirect=True)
def test_a_radius_beyond_the_canvas_needs_a_sure_position_too(measured: str) -> None:
    """Without one nothing is near, however far that reaches."""
    tables = np.zeros((2, 1, 9, 4))
    tables[..., 0] = 0.8
    tables[1, :, 4, 0] = 0.95
    for radius in (4, 8, 20, 1000):
        row = Shape(list(range(1, 9)), DecodingOptions(unmasking="measured", radius=radius))
        found = [[len(c.positions) for c in commits] for commits in run_rows(tabled(tables), [row] * 2, 9)]
        assert found[0] == [1] * 8 and found[1] == [8], radius


@pytest.mark.parametrize("measured", ["factor", "fast_dllm_factor"], indirect=True)
def test_what_equals_the_bound_of_the_factor(measured: str) -> None:
    """The paper asks for less than the factor; the code refuses what falls short of a threshold: here the third of five
    confidences equals 1 - 1/4."""
    tables = np.zeros((1, 1, 6, 4))
    tables[0, 0, 1:, 0] = [0.9, 0.8, 0.75, 0.3, 0.2]
    row = Shape([1, 2, 3, 4, 5], DecodingOptions(unmasking="measured", factor=1.0))
    (commits,) = run_rows(tabled(tables), [row], 6)
    assert commits[0].positions == ((1, 2) if measured == "factor" else (1, 2, 3))


@pytest.mark.parametrize("measured", ["dinfer_threshold", "credit"], indirect=True)
def test_where_the_model_prefers_the_mask_comes_last_and_the_surest_of_those_first(measured: str) -> None:
    tables = np.zeros((1, 1, 7, 3))
    tables[0, 0, 1:, 0] = [0.9, 0.1, 0.95, 0.2, 1.0, 0.3]
    tables[0, 0, 1:, 1] = [1, 0, 1, 0, 1, 0]
    row = Shape(list(range(1, 7)), DecodingOptions(unmasking="measured", threshold=0.5))
    (commits,) = run_rows(tabled(tables), [row], 7)
    assert [commit.positions for commit in commits] == [(6,), (4,), (2,), (5,), (3,), (1,)]


@pytest.mark.parametrize("case", range(60))
def test_fast_dllms_carry_over_equals_a_cap_on_the_running_total(case: int) -> None:
    """With new confidences in every step: what its loop leaves over is what an even schedule is behind."""
    random = Random(f"carry over {case}")
    masks = random.randint(1, 40)
    steps = random.choice([d for d in range(1, masks + 1) if masks % d == 0] + [random.randint(1, masks + 5)])
    threshold = random.choice([0.0, 0.25, 0.5, 0.9, 1.5])
    rule = RULES.get("confidence_threshold")
    assert rule.schedule is not None and rule.select is not None
    numbers = rule.schedule(masks, steps, {})
    assert len(numbers) == steps
    pick = PICKS["confidence_threshold"]({"threshold": threshold}, llada_oracle(masks, steps))
    left, step, done = set(range(masks)), 0, 0
    while left:
        sure = {i: random.randrange(17) / 16 for i in left}
        ordered = [*sorted(sure.values(), reverse=True), *[-np.inf] * (masks - len(left))]
        number = mx.array([[float(numbers[min(step, steps - 1)])]])
        count = rule.select(mx.array([ordered]), number, {"threshold": mx.array([[threshold]])})
        chosen = pick(sure, {})
        assert count.item() == len(chosen), (masks, steps, threshold, step)
        left, step, done = left - chosen, step + 1, done + len(chosen)
        if steps <= masks and step <= steps:
            assert done <= sum(llada_oracle(masks, steps)[:step])
    if threshold <= 0:
        assert step == min(steps, masks)


# What a rule may do with arrays: nothing that waits for them, and no loop.

ARRAY_FUNCTIONS = ("confidence", "rank", "select", "memory", "logits", "revise")
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
READERS = {"float", "int", "bool", "list", "tuple", "set", "sum", "min", "max", "any", "all", "sorted", "map", "filter"}
READERS |= {"zip", "enumerate", "range", "iter", "next", "print", "round"}
WAITS = {"item", "tolist", "eval", "async_eval", "synchronize"}


def array_functions(rule: Rule) -> list[Callable[..., Any]]:
    return [function for name in ARRAY_FUNCTIONS if (function := getattr(rule, name)) is not None]


def offences(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """What these functions, and those of the same package that they name, may not do with arrays."""
    found: list[str] = []
    waiting, known = list(functions), set()
    ours = {"mlx_dllm_plugin", *(function.__module__.partition(".")[0] for function in functions)}
    while waiting:
        function = waiting.pop()
        if function in known:
            continue
        known.add(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        assert isinstance(tree.body[0], ast.FunctionDef), f"{function.__qualname__} is no plain function"
        names = {**inspect.getclosurevars(function).nonlocals, **function.__globals__}
        memories = {arg.arg for arg in tree.body[0].args.args if getattr(arg.annotation, "id", None) == "Memory"}
        for node in ast.walk(tree):
            for what in _offences(node, names, memories):
                found.append(f"{function.__name__}: {what}")
            used = names.get(node.id) if isinstance(node, ast.Name) else None
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = getattr(names.get(node.value.id), node.attr, None)
            if inspect.isfunction(used) and used.__module__.partition(".")[0] in ours:
                waiting.append(used)
    return sorted(set(found))


def _offences(node: ast.AST, names: dict[str, Any], memories: set[str]) -> Iterator[str]:
    if isinstance(node, LOOPS):
        yield "loop"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READERS:
        yield node.func.id
    if isinstance(node, ast.Attribute) and node.attr in WAITS:
        yield node.attr
    if isinstance(node, ast.Name) and getattr(names.get(node.id), "__name__", "").partition(".")[0] == "numpy":
        yield "numpy"
    tests: list[ast.expr] = []
    if isinstance(node, (ast.If, ast.IfExp, ast.Assert)):
        tests = [node.test]
    elif isinstance(node, ast.BoolOp):
        tests = node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        tests = [node.operand]
    elif isinstance(node, ast.Compare) and len(node.ops) > 1:
        tests = [node]
    for test in tests:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            continue  # its operand is looked at by itself
        is_none = isinstance(test, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)
        if not is_none and not (isinstance(test, ast.Name) and test.id in memories):
            yield "truth of an array"


@pytest.mark.parametrize("rule", RULES.builtin(), ids=lambda rule: rule.name)
def test_a_rule_loops_over_no_array_and_waits_for_none(rule: Rule) -> None:
    assert offences(array_functions(rule)) == []


def _helper(values: mx.array) -> Any:
    return values.sum().item()


def _loops(values: mx.array) -> Any:
    return mx.stack([row * _helper(row) for row in values])


def _asks(values: mx.array, past: Memory) -> Any:
    if not past:
        return values
    return float(np.array(values)[0]) if values.sum() > 0 else 0 < values.sum() < 1


def _while(values: mx.array) -> Any:
    while not values.any():
        mx.eval(values)
    return values


def _fine(values: mx.array, past: Memory) -> Any:
    assert values is not None
    return values if past else marks.marked(values > 0, -values)


def test_the_check_of_array_functions_finds_what_it_looks_for() -> None:
    assert offences([_loops]) == ["_helper: item", "_loops: loop"]
    assert offences([_asks]) == ["_asks: float", "_asks: numpy", "_asks: truth of an array"]
    assert offences([_while]) == ["_while: eval", "_while: loop", "_while: truth of an array"]
    assert offences([_fine]) == []
    reached = offences([_reaches_a_schedule])
    assert "mdlm_schedule: numpy" not in reached and reached == ["even_schedule: loop", "even_schedule: range"]


def _reaches_a_schedule(values: mx.array) -> Any:
    return values * len(even_schedule(3, 2, {}))


@pytest.mark.parametrize("rule", RULES.builtin(), ids=lambda rule: rule.name)
def test_a_rule_can_be_traced(rule: Rule) -> None:
    """Inside mx.compile arrays have no values: whoever asks for one raises. All of a step, twice, with the memory."""

    def step(
        logits: mx.array, tokens: mx.array, noise: mx.array, free: mx.array, number: mx.array, values: Any, past: Any
    ) -> Any:
        past = rule.memory(logits, past, values) if rule.memory is not None else ()
        logits = rule.logits(logits, past, values) if rule.logits is not None else logits
        masks = mx.full((logits.shape[0], 1), 5, dtype=tokens.dtype)
        measured = rule.confidence(Candidates(logits, tokens, noise, values, masks, past))
        measures = measured if isinstance(measured, tuple) else (measured,)
        total = free.sum(axis=1, keepdims=True)
        ranking = measures[0] if rule.rank is None else rule.rank(Ranking(measures, free, total, values))
        ranked = mx.sort(mx.where(free, ranking, -mx.inf), axis=1)[:, ::-1]
        count = number if rule.select is None else rule.select(ranked, number, values)
        again = ~free if rule.revise is None else rule.revise(Doubts(noise, ~free, count, values))
        return ranked, count, again, past

    random = np.random.default_rng(0)
    logits = [mx.array(3 * random.standard_normal((2, 7, 6)).astype(np.float32)) for _ in range(2)]
    values = {name: mx.full((2, 1), value) for name, value in rule.defaults.items() if not isinstance(value, str)}
    noise, free = mx.array(random.random((2, 7)).astype(np.float32)), mx.array(random.random((2, 7)) < 0.7)
    traced, past = mx.compile(step), ()
    for now in logits:
        rest = (now.argmax(axis=-1), noise, free, mx.array([[1.0], [2.0]]), values)
        past = traced(now, *rest, past)[3]  # not evaluated, which would take a compiler


NEW = ("confidence_threshold", "factor", "eb", "klass", "hierarchy", "credit", "wino", "prophet", "local_leap")


@pytest.mark.parametrize("rule", ["low_confidence", "origin", "dinfer_threshold", "fast_dllm_factor", *NEW])
def test_a_step_waits_once(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is evaluated in one place, after everything of the step is asked for, and nothing is read before."""
    model = tiny_model("qwen2", eos_token_id=None)
    log: list[str] = []
    forward = type(model.model).__call__

    def note(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            log.append(what)
            return function(*args, **kwargs)

        return noted

    class Numpy:
        """numpy, which notes when an array is read."""

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def array(self, value: Any, *args: Any, **kwargs: Any) -> np.ndarray:
            if isinstance(value, mx.array):
                log.append("read")
            return np.array(value, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "__call__", note("forward", forward))
    monkeypatch.setattr(sys.modules["mlx_dllm_plugin.decode"], "np", Numpy())
    monkeypatch.setattr(mx, "eval", note("eval", mx.eval))
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(mx.array, name, note(name, getattr(mx.array, name)))
    result = decode(model, [1, 2, 3], DecodingOptions(unmasking=rule, max_tokens=7, seed=1))
    monkeypatch.undo()
    steps = "".join({"forward": "F", "eval": "E", "read": "R"}.get(what, what) for what in log).split("F")[1:]
    assert len(steps) == result.nfe
    assert all(re.fullmatch("ER+", step) for step in steps), steps
