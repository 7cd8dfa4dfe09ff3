"""What holds for every rule and every kind of decoding: rows do not depend on each other, what is committed stays, and
what is counted is what was done."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dllm_plugin import DecodingOptions, DecodingResult, decode, stream_decode
from mlx_dllm_plugin.batch import Blocks
from mlx_dllm_plugin.decode import BlockDone, Commit, Finished, Released
from mlx_dllm_plugin.samplers import RULES
from tests.models import MASK, VOCAB
from tests.test_decode import chi_square
from tests.test_rules import CAUSAL, KINDS, as_lists, diffusion_model, keep, scripted, softmax

RULE_NAMES = (
    *("low_confidence", "threshold", "random", "a2d", "mlx_dllm", "origin", "maskgit_plus", "topk_margin", "entropy"),
    *("sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded", "mdlm"),
)
SUB_BLOCKS = " in sub-blocks"
HOWS = [
    *((kind, rule) for kind in KINDS for rule in RULE_NAMES),
    *((kind + SUB_BLOCKS, "threshold") for kind in CAUSAL),
]
MODEL_OF = {kind: ("qwen2", "qwen3")[number % 2] for number, kind in enumerate(KINDS)}
DRAWS = 2000
TABLE = np.array([0.9, 1.4, 2.0, 0.7, 0.1, -0.4, -1.5, -3.0, 1.2])
LAST = len(TABLE) - 1  # the mask

Rows = list[tuple[list[int], DecodingOptions]]


def model_of(how: str, **changes: Any) -> Any:
    kind = how.removesuffix(SUB_BLOCKS)
    return diffusion_model(kind, MODEL_OF[kind], **changes)


def options_of(how: str, rule: str, row: dict[str, Any], block: int) -> DecodingOptions:
    """The values of a row, as far as the rule takes them."""
    uses = RULES.get(rule).uses
    values = {name: value for name, value in row.items() if name in uses or name in ("max_tokens", "temp", "seed")}
    if row.get("filter"):
        values |= row["filter"]
    if how.startswith("block_causal"):
        values["block_length"] = block
    if how.endswith(SUB_BLOCKS):
        values["sub_block_length"] = block // 2
    if "max_denoising_steps" in values and "block_length" in values and not how.startswith("block_causal"):
        values["max_denoising_steps"] += row["max_tokens"]
    return DecodingOptions(unmasking=rule, **values)


values_of_a_row = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 9),
        "max_denoising_steps": st.integers(1, 8),
        "block_length": st.integers(1, 9),
        "threshold": st.sampled_from([0.0, 0.15, 0.3, 1.5]),
        "entropy_bound": st.sampled_from([0.0, 2.5, 6.0]),
        "alg_temp": st.sampled_from([0.0, 0.3]),
        "cfg_scale": st.sampled_from([0.0, 0.0, 1.2]),
        "temp": st.sampled_from([0.0, 0.0, 0.8, 1.5]),
        "seed": st.integers(0, 2**31),
        "filter": st.sampled_from([{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {"stop_at_eos": False}]),
    }
)
rows_of_a_batch = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=11), values_of_a_row), min_size=2, max_size=3
)
blocks = st.sampled_from([2, 4, 6])


def as_rows(how: str, rule: str, rows: Any, block: int) -> Rows:
    return [(prompt, options_of(how, rule, row, block)) for prompt, row in rows]


def as_row(result: DecodingResult, row: int) -> DecodingResult:
    return replace(result, commits=[replace(commit, row=row) for commit in result.commits])


def decoded(model: Any, rows: Rows) -> list[DecodingResult]:
    return decode(model, [prompt for prompt, _ in rows], [options for _, options in rows])


@pytest.mark.parametrize(("how", "rule"), HOWS)
@given(rows=rows_of_a_batch, block=blocks)
@settings(max_examples=4, deadline=None, derandomize=True)
def test_a_row_of_a_batch_equals_the_row_alone(how: str, rule: str, rows: Any, block: int) -> None:
    model, jobs = model_of(how), as_rows(how, rule, rows, block)
    for i, result in enumerate(decoded(model, jobs)):
        alone = as_row(decode(model, *jobs[i]), i)
        assert as_lists(result) == as_lists(alone)
        assert result == alone


@pytest.mark.parametrize(("how", "rule"), HOWS)
@given(rows=rows_of_a_batch, block=blocks)
@settings(max_examples=4, deadline=None, derandomize=True)
def test_events_tell_what_happens(how: str, rule: str, rows: Any, block: int) -> None:
    """No position is committed twice, and none of the prompt; what is released is what was committed, in order; no
    mask is emitted, and none is left before the output's end; the steps are the forwards that were made."""
    model, jobs = model_of(how), as_rows(how, rule, rows, block)
    canvas = [dict(enumerate(prompt)) for prompt, _ in jobs]
    output: list[list[int]] = [[] for _ in jobs]
    steps, finished = [0] * len(jobs), {}
    for event in stream_decode(model, [prompt for prompt, _ in jobs], [options for _, options in jobs]):
        row = event.row
        assert row not in finished
        if isinstance(event, Commit):
            assert event.step == steps[row] and len(event.positions) == len(event.tokens)
            steps[row] += 1
            new = dict(zip(event.positions, event.tokens, strict=True))
            assert len(new) == len(event.tokens) and not new.keys() & canvas[row].keys()
            assert MASK not in event.tokens
            canvas[row] |= new
        elif isinstance(event, BlockDone):
            assert set(range(event.start, event.end)) <= canvas[row].keys()
        elif isinstance(event, Released):
            at = len(jobs[row][0]) + len(output[row])
            assert [canvas[row][at + i] for i in range(len(event.tokens))] == list(event.tokens)
            output[row] += event.tokens
        elif isinstance(event, Finished):
            finished[row] = event
    for row, (prompt, options) in enumerate(jobs):
        final, length = finished[row], len(prompt) + len(output[row])
        assert final.canvas[:length] == (*prompt, *output[row]) and MASK not in output[row]
        assert final.canvas == tuple(canvas[row].get(i, MASK) for i in range(len(final.canvas)))
        assert final.nfe == steps[row]
        assert final.reason == "stop" or len(output[row]) == options.max_tokens
    assert len(model.shapes) == max(f.nfe for f in finished.values()) + max(f.prefills for f in finished.values())


@pytest.mark.parametrize("rule", RULE_NAMES)
@given(rows=rows_of_a_batch, others=rows_of_a_batch, data=st.data())
@settings(max_examples=4, deadline=None, derandomize=True)
def test_a_seed_decides_whatever_else_is_decoded(rule: str, rows: Any, others: Any, data: Any) -> None:
    """In any order, beside other rows, and whatever mlx's global state is."""
    how = data.draw(st.sampled_from(list(KINDS)))
    model = model_of(how)
    jobs, more = as_rows(how, rule, rows, 4), as_rows(how, rule, others, 4)
    order = data.draw(st.permutations(range(len(jobs))))
    mx.random.seed(1)
    first = decoded(model, jobs)
    mx.random.seed(2)
    again = decoded(model, [*more, *(jobs[i] for i in order)])[len(more) :]
    for i, result in zip(order, again, strict=True):
        assert (as_lists(result), result.tokens, result.nfe) == (as_lists(first[i]), first[i].tokens, first[i].nfe)


@pytest.mark.parametrize(("how", "rule"), HOWS)
def test_a_mask_in_the_prompt_is_text(how: str, rule: str) -> None:
    """It reads as another token with the same embedding does, stays, and is never filled."""
    row = {"max_tokens": 7, "max_denoising_steps": 3, "block_length": 4, "threshold": 0.2, "entropy_bound": 6.0}
    options = replace(options_of(how, rule, {**row, "seed": 5}, 4), stop_at_eos=False)
    model = model_of(how)
    embedding = model.own.model.embed_tokens.weight
    twin = mx.where(mx.arange(VOCAB)[:, None] == 11, embedding[MASK], embedding)
    results = []
    for prompt in ([MASK, 4, MASK, MASK, 30, MASK], [11, 4, 11, MASK, 30, 11]):
        model.own.model.embed_tokens.weight = twin
        try:
            results.append(decode(model, prompt, options))
        finally:
            model.own.model.embed_tokens.weight = embedding
        assert results[-1].canvas[:6] == prompt and MASK not in results[-1].tokens
    assert as_lists(results[0]) == as_lists(results[1]) and len(results[0].tokens) == 7


@pytest.mark.parametrize(("how", "rule"), HOWS)
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_a_model_that_wants_the_mask_does_not_get_it(how: str, rule: str, temp: float) -> None:
    table = np.where(np.arange(len(TABLE)) == LAST, 9.0, TABLE)
    row = {
        "max_tokens": 9,
        "max_denoising_steps": 3,
        "block_length": 4,
        "temp": temp,
        "seed": 1,
        "filter": {"top_p": 0.6},
    }
    result = decode(scripted(table, how.removesuffix(SUB_BLOCKS)), [LAST, 1], options_of(how, rule, row, 4))
    assert len(result.tokens) == 9 and LAST not in result.tokens
    if temp == 0 or RULES.get(rule).filters:
        assert result.tokens == [TABLE[:LAST].argmax()] * 9


@pytest.mark.parametrize("how", [*KINDS, *(kind + SUB_BLOCKS for kind in CAUSAL)])
@given(prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), tokens=st.integers(1, 9), block=blocks)
@settings(max_examples=5, deadline=None, derandomize=True)
def test_a_threshold_above_one_is_one_token_a_step(how: str, prompt: list[int], tokens: int, block: int) -> None:
    """As an even schedule with a step for each token is."""
    model = model_of(how)
    steps = block if how in CAUSAL else tokens
    row = {"max_tokens": tokens, "threshold": 1.01, "max_denoising_steps": steps}
    one = decode(model, prompt, replace(options_of(how, "threshold", row, block), stop_at_eos=False))
    assert all(len(commit.positions) == 1 for commit in one.commits) and one.nfe >= tokens
    if how in KINDS:
        for rule in ("low_confidence", "low_confidence_static", "low_confidence_dynamic"):
            even = decode(model, prompt, replace(options_of(how, rule, row, block), stop_at_eos=False))
            assert as_lists(even) == as_lists(one)


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("sub_block", [None, 2])
def test_prefill_in_chunks_changes_nothing_but_its_count(
    kind: str, sub_block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[(7 * i + n) % VOCAB for i in range(n)] for n in (1, 30, 16, 13)]
    options = DecodingOptions(
        unmasking="threshold", threshold=0.15, max_tokens=9, sub_block_length=sub_block, stop_at_eos=False
    )
    model = model_of(kind)
    whole = decode(model, prompts, options)
    prefills = [result.prefills for result in whole]
    for chunk in (1, 4, 9):
        monkeypatch.setattr(Blocks, "PREFILL", chunk)
        chunked = model_of(kind)
        results = decode(chunked, prompts, options)
        assert [as_lists(result) for result in results] == [as_lists(result) for result in whole]
        assert [result.canvas for result in results] == [result.canvas for result in whole]
        assert len(chunked.shapes) == max(r.nfe for r in results) + max(r.prefills for r in results)
        for i, result in enumerate(results):
            alone = decode(chunked, prompts[i], options)
            assert as_lists(alone) == as_lists(result) and alone.prefills == result.prefills
    assert max(prefills) == 1 and max(result.prefills for result in results) > 2


# Draws.


def distribution(rule: str, temp: float, **filters: Any) -> np.ndarray:
    """What tokens are drawn from: never the mask, which filters of a rule of its own still see."""
    without = np.where(np.arange(len(TABLE)) == LAST, -np.inf, TABLE)
    order = RULES.get(rule).filters
    if not order:
        return softmax(keep(without, ("top_p", "min_p", "top_k"), **filters) / temp)
    kept = keep(TABLE, order, temp, **filters)
    return softmax(np.where(np.arange(len(TABLE)) == LAST, -np.inf, kept))


@pytest.mark.parametrize("kind", ["bidirectional in_place", "bidirectional shifted", "block_causal shifted"])
@pytest.mark.parametrize("rule", ["mdlm", "low_confidence", "maskgit_plus", "low_confidence_static", "entropy_bounded"])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 4}, {"top_k": 5, "top_p": 0.7}, {"min_p": 0.25}], ids=["none", "top_k", "both", "min_p"]
)
@pytest.mark.parametrize("temp", [1.0, 2.5])
def test_sampled_tokens_follow_the_softmax(kind: str, rule: str, filters: dict[str, Any], temp: float) -> None:
    """2000 tokens of one forward: chi-square, false alarm 1e-6."""
    values = {"temp": temp, "seed": 3, **filters}
    values |= {"entropy_bound": 1e9} if rule == "entropy_bounded" else {"max_denoising_steps": 1}
    values |= {"block_length": DRAWS} if kind in CAUSAL else {}
    result = decode(scripted(TABLE, kind), [1], DecodingOptions(unmasking=rule, max_tokens=DRAWS, **values))
    tokens = result.commits[0].tokens[: DRAWS - 1]
    expected = distribution(rule, temp, **filters)
    assert expected[list(tokens)].min() > 0
    statistic, critical = chi_square(list(tokens), expected)
    assert statistic < critical
    for wrong in ({}, {"temp": 2 * temp}) if filters else ({"temp": 2 * temp},):
        statistic, critical = chi_square(list(tokens), distribution(rule, **{"temp": temp, **wrong}))
        assert statistic > critical, "another distribution would pass as well"


# Threads.


def test_threads_on_one_model_equal_serial_decoding() -> None:
    model = model_of("block_causal in_place")
    both = replace(model.diffusion_spec, variants=("attention", "logits"))
    model.diffusion_spec = both
    jobs: list[tuple[list[list[int]], list[DecodingOptions]]] = []
    for i, rule in enumerate(
        ("threshold", "mdlm", "entropy", "low_confidence_dynamic", "origin", "random", "a2d", "entropy")
    ):
        causal = i % 2 == 0
        shared = {"attention": "block_causal" if causal else "bidirectional", "logits": ("in_place", "shifted")[i // 4]}
        own: dict[str, Any] = {"cfg_scale": 1.0} if rule in ("threshold", "mdlm") else {}
        if rule in ("entropy", "origin"):
            own = {"top_p": 0.9}
        rows = [
            DecodingOptions(unmasking=rule, max_tokens=6 + row, temp=row % 2, seed=10 * i + row, **shared, **own)
            for row in range(2)
        ]
        jobs.append(([[i + 1] * (1 + 5 * (i % 3)), [9, i, 3]], rows))
    serial = [decode(model, *job) for job in jobs]
    parallel: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def work(i: int) -> None:
        try:
            start.wait()
            parallel[i] = [decode(model, *jobs[i]) for _ in range(2)]
        except BaseException as error:
            parallel[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert parallel == [[results, results] for results in serial]
