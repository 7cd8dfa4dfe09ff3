"""The decoding loop: rows do not depend on each other, and every event says what happened."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import greedy_sampler, make_sampler

from mlx_dllm_plugin import (
    DecodingOptions,
    DecodingResult,
    DiffusionError,
    bidirectional_forward,
    decode,
    stream_decode,
)
from mlx_dllm_plugin.caches import FullCanvas
from mlx_dllm_plugin.decode import BlockDone, Commit, Finished, Released
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.samplers import RULES
from tests.models import CONTEXT, EOS, MASK, VOCAB, count_forwards, prefer, tiny_model

BUILTIN_RULES = ("a2d", "mlx_dllm", "low_confidence", "random")
PROMPT = [4, 8, 15, 16]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: tiny_model(name) for name in ("gpt2", "qwen2")}


@pytest.fixture(scope="module", params=["gpt2", "qwen2"])
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    return models[request.param]


def as_row(result: DecodingResult, row: int = 0) -> DecodingResult:
    """The result as if it had been this row of a batch."""
    return replace(result, commits=[replace(commit, row=row) for commit in result.commits])


def refused(model: Any, prompt: Any = PROMPT, options: Any = None, **values: Any) -> str:
    """The sentence with which a call is refused, before any event is asked for."""
    options = DecodingOptions(**{"max_tokens": 4, **values}) if options is None else options
    with pytest.raises(DiffusionError) as error:
        stream_decode(model, prompt, options)
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text
    return text


def replay(
    model: Any, prompt: list[int], result: DecodingResult, mask: int = MASK
) -> Iterator[tuple[Commit, np.ndarray]]:
    """Each commit with the logits [T, V] of the canvas it was made from, by the public forward."""
    canvas = [*prompt, *[mask] * (len(result.canvas) - len(prompt))]
    for commit in result.commits:
        yield commit, np.array(bidirectional_forward(model, mx.array([canvas]))[0]).astype(np.float64)
        for position, token in zip(commit.positions, commit.tokens, strict=True):
            canvas[position] = token
    assert canvas == result.canvas


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


# Rows and batches.

rows_of_a_batch = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        st.integers(1, 8),
        st.sampled_from([None, 1, 3, 8, 11]),
        st.sampled_from([0.0, 0.0, 0.7, 1.3]),
        st.integers(0, 2**31),
        st.sampled_from([{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}, {"stop_at_eos": False}]),
    ),
    min_size=2,
    max_size=5,
)


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
@pytest.mark.parametrize("rule", BUILTIN_RULES)
@given(rows=rows_of_a_batch)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_a_row_of_a_batch_equals_the_row_alone(models: dict[str, Any], name: str, rule: str, rows: Any) -> None:
    prompts = [prompt for prompt, *_ in rows]
    options = [
        DecodingOptions(
            unmasking=rule, max_tokens=n, max_denoising_steps=steps, temp=temp, seed=seed, full_logprobs=False, **extra
        )
        for _, n, steps, temp, seed, extra in rows
    ]
    together = decode(models[name], prompts, options)
    assert len(together) == len(rows)
    for i, (prompt, own, result) in enumerate(zip(prompts, options, together, strict=True)):
        assert result == as_row(decode(models[name], prompt, own), i)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_as_many_rows_as_key_value_heads(model: Any, rows: int, temp: float) -> None:
    prompts = [[(7 * i + j) % VOCAB for j in range(1 + 2 * i)] for i in range(rows)]
    options = [DecodingOptions(max_tokens=6 - i, temp=temp, seed=i, stop_at_eos=False) for i in range(rows)]
    for i, result in enumerate(decode(model, prompts, options)):
        assert result == as_row(decode(model, prompts[i], options[i]), i)


def test_rows_leave_when_they_are_done(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch makes as many forwards as its longest row, and the short ones stop counting."""
    forwards = count_forwards(monkeypatch, model)
    options = [DecodingOptions(max_tokens=8, max_denoising_steps=n, stop_at_eos=False) for n in (2, 8, 5)]
    results = decode(model, [[1], [1, 2, 3], [9, 9]], options)
    assert [result.nfe for result in results] == [2, 8, 5]
    assert forwards() == 8


def test_a_batch_of_one_is_a_list(model: Any) -> None:
    single, batch = (
        decode(model, PROMPT, DecodingOptions(max_tokens=3)),
        decode(model, [PROMPT], DecodingOptions(max_tokens=3)),
    )
    assert batch == [single]


@pytest.mark.parametrize("kind", [mx.array, np.array, tuple, list])
def test_prompts_may_be_arrays(model: Any, kind: Any) -> None:
    options = DecodingOptions(max_tokens=3)
    expected = decode(model, PROMPT, options)
    assert decode(model, kind(PROMPT), options) == expected
    assert decode(model, kind([PROMPT, PROMPT]), options) == [expected, as_row(expected, 1)]


def test_one_option_object_serves_all_rows(model: Any) -> None:
    options = DecodingOptions(max_tokens=4, temp=1.0, seed=5)
    first, second = decode(model, [PROMPT, PROMPT], options)
    assert as_row(second) == first


# Seeds.


@pytest.mark.parametrize("rule", BUILTIN_RULES)
def test_same_seed_same_text_and_another_seed_another_text(model: Any, rule: str) -> None:
    options = DecodingOptions(unmasking=rule, max_tokens=12, temp=1.5, seed=3)
    first = decode(model, PROMPT, options)
    mx.random.seed(99)
    assert decode(model, PROMPT, options) == first
    assert decode(model, PROMPT, replace(options, seed=4)).tokens != first.tokens


def test_every_draw_has_a_key_of_its_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[tuple[int, ...]] = []
    decode_module = sys.modules["mlx_dllm_plugin.decode"]  # the package's name `decode` is the function
    uniform, sample = mx.random.uniform, decode_module._sample

    def uniform_spy(*args: Any, key: mx.array, **kwargs: Any) -> mx.array:
        keys.append(tuple(key.tolist()))
        return uniform(*args, key=key, **kwargs)

    def sample_spy(row: Any, rule: Any, logits: mx.array, own: mx.array) -> mx.array:
        keys.extend(map(tuple, own.tolist()))
        return sample(row, rule, logits, own)

    monkeypatch.setattr(mx.random, "uniform", uniform_spy)
    monkeypatch.setattr(decode_module, "_sample", sample_spy)
    options = [
        DecodingOptions(unmasking="random", max_tokens=5, max_denoising_steps=5, temp=1.0, seed=seed, stop_at_eos=False)
        for seed in (1, 2)
    ]
    decode(model, [PROMPT, [1]], options)
    assert len(keys) == len(set(keys)) == 2 * 5 + 2 * 5 * 5


def test_without_a_seed_the_global_state_of_mlx_decides(model: Any) -> None:
    options = DecodingOptions(max_tokens=12, temp=1.5)
    mx.random.seed(1)
    first, second = decode(model, PROMPT, options), decode(model, PROMPT, options)
    mx.random.seed(1)
    assert decode(model, PROMPT, options) == first
    assert second != first


def test_a_seed_leaves_the_global_state_alone(model: Any) -> None:
    mx.random.seed(7)
    expected = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(7)
    decode(
        model,
        PROMPT,
        DecodingOptions(unmasking="random", max_tokens=6, temp=1.0, seed=1, top_p=0.9, top_k=5, min_p=0.1),
    )
    assert mx.random.uniform(shape=(3,)).tolist() == expected


def test_greedy_decoding_ignores_the_seed(model: Any) -> None:
    results = [decode(model, PROMPT, DecodingOptions(max_tokens=8, seed=seed)) for seed in (1, 2)]
    assert results[0] == results[1]


# Masks.


@pytest.mark.parametrize("rule", BUILTIN_RULES)
@pytest.mark.parametrize("temp", [0.0, 2.0])
def test_no_mask_survives_and_none_is_emitted(model: Any, rule: str, temp: float) -> None:
    for steps in (1, 4, 20):
        options = DecodingOptions(
            unmasking=rule, max_tokens=10, max_denoising_steps=steps, temp=temp, seed=steps, stop_at_eos=False
        )
        result = decode(model, PROMPT, options)
        assert len(result.tokens) == 10 and MASK not in result.tokens
        assert result.canvas == [*PROMPT, *result.tokens]


@pytest.mark.parametrize("rule", BUILTIN_RULES)
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_a_model_that_wants_the_mask_does_not_get_it(rule: str, temp: float) -> None:
    model = prefer(tiny_model("gpt2"), MASK)
    logits = np.array(bidirectional_forward(model, mx.array([[*PROMPT, *[MASK] * 8]]))[0])
    assert (logits.argmax(-1) == MASK).all()
    options = DecodingOptions(unmasking=rule, max_tokens=8, max_denoising_steps=3, temp=temp, seed=1, stop_at_eos=False)
    result = decode(model, PROMPT, options)
    assert len(result.tokens) == 8 and MASK not in result.tokens and MASK not in result.canvas
    second_best = [
        np.argsort(logits[p])[-2] for commit, logits in replay(model, PROMPT, result) for p in commit.positions
    ]
    if temp == 0:
        assert second_best == [token for commit in result.commits for token in commit.tokens]


@pytest.mark.parametrize("rule", ["a2d", "low_confidence", "random"])
def test_a_mask_that_is_the_end_of_sequence_may_be_emitted_as_such(rule: str) -> None:
    """mask_token "reuse": the mask id is the EOS id."""
    model = prefer(tiny_model("gpt2", a2d={"mask_token_id": EOS}), EOS)
    assert model.diffusion_spec.mask_token_id == EOS and model.diffusion_spec.eos_token_ids == (EOS,)
    options = DecodingOptions(unmasking=rule, max_tokens=6, max_denoising_steps=2, seed=1)
    result = decode(model, [*PROMPT, EOS], options)
    assert (result.tokens, result.finish_reason) == ([], "stop")
    assert result.commits[0].tokens == (EOS,) * 3
    filled = decode(model, [*PROMPT, EOS], replace(options, stop_at_eos=False))
    assert (filled.tokens, filled.finish_reason, filled.nfe) == ([EOS] * 6, "length", 2)


def test_the_rule_that_drops_the_mask_never_emits_a_reused_one() -> None:
    model = prefer(tiny_model("gpt2", a2d={"mask_token_id": EOS}), EOS)
    result = decode(model, PROMPT, DecodingOptions(unmasking="mlx_dllm", max_tokens=6))
    assert EOS not in result.canvas and result.finish_reason == "length" and len(result.tokens) == 6


@pytest.mark.parametrize("rule", BUILTIN_RULES)
def test_a_mask_in_the_prompt_is_text_and_stays(model: Any, rule: str) -> None:
    prompt = [MASK, 4, MASK, MASK]
    options = DecodingOptions(unmasking=rule, max_tokens=5, max_denoising_steps=5, stop_at_eos=False, seed=1)
    result = decode(model, prompt, options)
    assert result.canvas[:4] == prompt and MASK not in result.canvas[4:]
    assert sorted(p for commit in result.commits for p in commit.positions) == list(range(4, 9))


def test_another_mask_id_can_be_given(model: Any) -> None:
    options = DecodingOptions(max_tokens=5, mask_token_id=9, stop_at_eos=False)
    result = decode(model, PROMPT, options)
    assert result != decode(model, PROMPT, replace(options, mask_token_id=None)) and 9 not in result.tokens
    for commit, logits in replay(model, PROMPT, result, mask=9):
        logits[:, 9] = -np.inf
        assert commit.tokens == tuple(logits[list(commit.positions)].argmax(-1))


# Ends.


@pytest.mark.parametrize("rule", BUILTIN_RULES)
def test_decoding_stops_at_the_first_end_of_sequence(rule: str) -> None:
    model = prefer(tiny_model("gpt2"), EOS)
    options = DecodingOptions(unmasking=rule, max_tokens=8, max_denoising_steps=8, seed=2)
    events = list(stream_decode(model, PROMPT, options))
    finished = events[-1]
    assert isinstance(finished, Finished) and finished.reason == "stop"
    committed = [p for event in events if isinstance(event, Commit) for p in event.positions]
    assert 4 in committed and finished.nfe == committed.index(4) + 1 == len(committed)
    left = [p for p in range(4, 12) if p not in committed]
    assert [i for i, token in enumerate(finished.canvas) if token == MASK] == left
    result = decode(model, PROMPT, options)
    assert (result.tokens, result.finish_reason, result.generated_tokens) == ([], "stop", 1)
    assert [entry.id for entry in result.logprobs] == [EOS]


def test_text_before_the_end_of_sequence_is_kept(model: Any) -> None:
    """Whatever token comes k-th in greedy decoding: called an end of sequence, it cuts there and nowhere else."""
    whole = decode(model, PROMPT, DecodingOptions(max_tokens=10, stop_at_eos=False))
    for token in sorted(set(whole.tokens)):
        cut = decode(model, PROMPT, DecodingOptions(max_tokens=10, eos_token_ids=(token,)))
        at = whole.tokens.index(token)
        assert (cut.tokens, cut.finish_reason, cut.generated_tokens) == (whole.tokens[:at], "stop", at + 1)
        assert [entry.id for entry in cut.logprobs] == whole.tokens[: at + 1]
        assert cut.commits == whole.commits[: cut.nfe] and cut.nfe <= whole.nfe
        assert not {*range(4, 5 + at)} - {p for commit in cut.commits for p in commit.positions}
        if cut.nfe > 1:
            earlier = {p for commit in cut.commits[:-1] for p in commit.positions}
            assert {*range(4, 5 + at)} - earlier, "it could have stopped a forward earlier"


def test_the_first_of_several_ends_counts(model: Any) -> None:
    whole = decode(model, PROMPT, DecodingOptions(max_tokens=10, stop_at_eos=False))
    distinct = list(dict.fromkeys(whole.tokens))
    result = decode(model, PROMPT, DecodingOptions(max_tokens=10, eos_token_ids=tuple(distinct[1:])))
    assert result.tokens == whole.tokens[: whole.tokens.index(distinct[1])] and len(distinct) > 2


def test_an_end_of_sequence_in_the_prompt_ends_nothing(model: Any) -> None:
    result = decode(model, [EOS, 3, EOS], DecodingOptions(max_tokens=3, suppress_tokens=(EOS,)))
    assert len(result.tokens) == 3 and result.finish_reason == "length"


def test_the_whole_canvas_is_filled_without_a_stop() -> None:
    model = prefer(tiny_model("gpt2"), EOS)
    result = decode(model, PROMPT, DecodingOptions(max_tokens=8, max_denoising_steps=3, stop_at_eos=False))
    assert (result.tokens, result.finish_reason, result.nfe, result.generated_tokens) == ([EOS] * 8, "length", 3, 8)


def test_max_tokens_caps_a_longer_canvas(model: Any) -> None:
    long = decode(model, PROMPT, DecodingOptions(canvas_length=20, max_denoising_steps=16, stop_at_eos=False))
    for cap in (1, 3, 15, 16, 40):
        options = DecodingOptions(canvas_length=20, max_denoising_steps=16, max_tokens=cap, stop_at_eos=False)
        result = decode(model, PROMPT, options)
        assert result.tokens == long.tokens[:cap] and result.finish_reason == "length"
        assert len(result.canvas) == 20 and result.commits == long.commits[: result.nfe]
        assert len(result.logprobs) == len(result.tokens)
        if result.nfe > 1:
            earlier = {p for commit in result.commits[:-1] for p in commit.positions}
            assert {*range(4, 4 + min(cap, 16))} - earlier, "it could have stopped a forward earlier"


def test_a_canvas_as_long_as_the_prompt_gives_nothing_and_costs_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = count_forwards(monkeypatch, model)
    result = decode(model, PROMPT, DecodingOptions(canvas_length=4))
    assert (result.tokens, result.finish_reason, result.nfe, result.canvas) == ([], "length", 0, PROMPT)
    assert (result.commits, result.logprobs, result.empty_steps) == ([], [], 0)
    assert forwards() == 0
    mixed = decode(model, [PROMPT, [1]], DecodingOptions(canvas_length=4))
    assert mixed[0] == result and mixed[1] == as_row(decode(model, [1], DecodingOptions(canvas_length=4)), 1)


def test_the_default_canvas_is_the_checkpoints(model: Any) -> None:
    result = decode(model, PROMPT, DecodingOptions(stop_at_eos=False))
    assert len(result.canvas) == 16 and result.nfe == 8
    assert decode(model, PROMPT, None).prompt_tokens == 4


def test_the_context_may_be_filled_to_the_last_token(model: Any) -> None:
    result = decode(model, [1] * 60, DecodingOptions(max_tokens=4, max_denoising_steps=1, stop_at_eos=False))
    assert len(result.canvas) == CONTEXT


# Counts and events.


@pytest.mark.parametrize("rule", BUILTIN_RULES)
def test_empty_steps_cost_no_forward_and_are_reported(model: Any, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = count_forwards(monkeypatch, model)
    options = DecodingOptions(unmasking=rule, max_tokens=5, max_denoising_steps=13, seed=1, stop_at_eos=False)
    result = decode(model, PROMPT, options)
    assert (result.nfe, result.empty_steps, forwards()) == (5, 8, 5)
    assert result.commits == decode(model, PROMPT, replace(options, max_denoising_steps=5)).commits


@pytest.mark.parametrize("rule", BUILTIN_RULES)
def test_events_tell_one_consistent_story(model: Any, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = count_forwards(monkeypatch, model)
    options = [
        DecodingOptions(unmasking=rule, max_tokens=n, max_denoising_steps=s, temp=t, seed=9, stop_at_eos=stop)
        for n, s, t, stop in ((9, 4, 0.0, True), (6, 6, 1.0, False), (11, 5, 1.5, True))
    ]
    prompts = [PROMPT, [1], [30, 31]]
    final: dict[int, Finished] = {}
    canvas = [dict(enumerate(prompt)) for prompt in prompts]
    output: list[list[int]] = [[], [], []]
    steps = [0, 0, 0]
    reasons: dict[int, str] = {}
    for event in stream_decode(model, prompts, options):
        row = event.row
        assert row not in final, "nothing comes after Finished"
        if isinstance(event, Commit):
            assert event.step == steps[row]
            steps[row] += 1
            assert forwards() >= steps[row]
            assert list(event.positions) == sorted(set(event.positions)) and event.positions
            assert not set(event.positions) & set(canvas[row]), "a token changed after it was committed"
            canvas[row] |= dict(zip(event.positions, event.tokens, strict=True))
            assert [entry.id for entry in event.logprobs] == list(event.tokens)
        elif isinstance(event, BlockDone):
            assert set(range(event.start, event.end)) <= set(canvas[row])
        elif isinstance(event, Released):
            assert row not in reasons and event.tokens and event.nfe == steps[row]
            at = len(prompts[row]) + len(output[row])
            assert [canvas[row].get(at + i) for i in range(len(event.tokens))] == list(event.tokens)
            output[row] += event.tokens
            assert [entry.id for entry in event.logprobs] == list(event.tokens)
            following = canvas[row].get(at + len(event.tokens))
            assert event.reason is not None or following is None, "a committed prefix is released at once"
            if event.reason:
                reasons[row] = event.reason
        else:
            final[row] = event
            assert event.reason == reasons[row] and event.nfe == steps[row]
            assert event.canvas == tuple(canvas[row].get(i, MASK) for i in range(len(event.canvas)))
    assert set(final) == {0, 1, 2}
    for row, result in enumerate(decode(model, prompts, options)):
        assert result.tokens == (output[row][:-1] if reasons[row] == "stop" else output[row])
        assert result.canvas == list(final[row].canvas)


def test_tokens_are_released_before_decoding_ends(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = count_forwards(monkeypatch, model)
    options = DecodingOptions(unmasking="low_confidence", max_tokens=8, block_length=2, stop_at_eos=False)
    seen = [
        (forwards(), len(event.tokens))
        for event in stream_decode(model, PROMPT, options)
        if isinstance(event, Released)
    ]
    assert seen[0][0] <= 2 and sum(n for _, n in seen) == 8 and len(seen) >= 4


def test_a_generator_that_is_not_read_makes_no_forward(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = count_forwards(monkeypatch, model)
    events = stream_decode(model, PROMPT, DecodingOptions(max_tokens=8, max_denoising_steps=8))
    assert forwards() == 0
    next(events)
    assert forwards() == 1


def test_closing_early_leaves_nothing_broken(model: Any) -> None:
    options = DecodingOptions(max_tokens=8, temp=1.0, seed=3)
    plain = np.array(model(mx.array([PROMPT])))
    expected = decode(model, [PROMPT, [1]], options)
    for events_read in range(4):
        events = stream_decode(model, [PROMPT, [1]], options)
        for _ in range(events_read):
            next(events)
        events.close()  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        for _ in stream_decode(model, PROMPT, options):
            raise KeyboardInterrupt
    assert decode(model, [PROMPT, [1]], options) == expected
    np.testing.assert_array_equal(np.array(model(mx.array([PROMPT]))), plain)


def test_another_stream_gives_the_same(model: Any) -> None:
    options = DecodingOptions(max_tokens=8, temp=1.0, seed=3)
    stream = mx.new_stream(mx.default_device())
    before = mx.default_stream(mx.default_device())
    assert decode(model, PROMPT, options, stream=stream) == decode(model, PROMPT, options)
    assert mx.default_stream(mx.default_device()) == before


def test_threads_on_one_model_equal_serial_decoding(model: Any) -> None:
    jobs = [
        ([[1 + i, 2, 3], [9 * i]], DecodingOptions(max_tokens=10, temp=1.0 if i % 2 else 0.0, seed=i, top_p=0.9))
        for i in range(4)
    ]
    serial = [decode(model, *job) for job in jobs]
    parallel: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def work(i: int) -> None:
        start.wait()
        try:
            for _ in range(3):
                parallel[i] = decode(model, *jobs[i])
        except BaseException as error:
            parallel[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert parallel == serial


def test_the_model_stays_the_hosts(model: Any) -> None:
    before = np.array(model(mx.array([PROMPT])))
    decode(model, PROMPT, DecodingOptions(max_tokens=4))
    assert type(model).__module__ == f"mlx_lm.models.{model.model_type}"
    np.testing.assert_array_equal(np.array(model(mx.array([PROMPT]))), before)


@pytest.mark.parametrize("padding", [None, [0, 3]])
@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}])
def test_head_of_hidden_is_the_models_own_call(name_and_ties: Any, padding: Any, config: Any) -> None:
    own = name_and_ties(config)
    family = FAMILIES.get(own.diffusion_spec.family)
    ids = mx.array([[4, 8, 15, 16, 23], [1, 2, 3, 42, 7]])
    cache = [FullCanvas(padding, 5, family.score_rank(own))] * len(own.layers)
    split = family.head(own, family.hidden(own, ids, cache))
    np.testing.assert_array_equal(np.array(split), np.array(own(ids, cache)))


@pytest.fixture(params=["gpt2", "qwen2"])
def name_and_ties(request: pytest.FixtureRequest) -> Any:
    def make(config: dict[str, Any]) -> Any:
        return tiny_model(request.param, **config)

    return make


# Log-probabilities.


@pytest.mark.parametrize("rule", BUILTIN_RULES)
@pytest.mark.parametrize("temp", [0.0, 1.2])
def test_logprobs_are_the_log_softmax_of_the_committing_forward(model: Any, rule: str, temp: float) -> None:
    options = DecodingOptions(
        unmasking=rule, max_tokens=9, max_denoising_steps=4, temp=temp, seed=6, full_logprobs=True, stop_at_eos=False
    )
    result = decode(model, PROMPT, options)
    for commit, logits in replay(model, PROMPT, result):
        if RULES.get(rule).drop_mask:
            logits[:, MASK] = -np.inf
        for position, token, entry in zip(commit.positions, commit.tokens, commit.logprobs, strict=True):
            expected = log_softmax(logits[position])
            assert entry.id == token and entry.token == pytest.approx(expected[token], abs=1e-4)
            best = np.argsort(-expected)[:20]
            assert len(entry.top) == 20
            assert [value for _, value in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-4)
            assert all(expected[i] == pytest.approx(value, abs=1e-4) for i, value in entry.top)
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True) and len({i for i, _ in entry.top}) == 20
            assert entry.full is not None and entry.full.shape == (VOCAB,)
            np.testing.assert_allclose(np.array(entry.full), expected, atol=1e-4)
            assert mx.array_equal(entry.vector(VOCAB), entry.full)
    by_position = {p: e for c in result.commits for p, e in zip(c.positions, c.logprobs, strict=True)}
    assert result.logprobs == [by_position[p] for p in range(4, 13)]


def test_the_vector_has_what_was_kept(model: Any) -> None:
    result = decode(model, PROMPT, DecodingOptions(max_tokens=12, temp=20.0, seed=2, stop_at_eos=False))
    outside = 0
    for entry in result.logprobs:
        assert entry.full is None
        vector = entry.vector(VOCAB)
        assert vector.shape == (VOCAB,) and vector.dtype == mx.float32
        kept = {i: value for i, value in enumerate(vector.tolist()) if value != -math.inf}
        assert kept == pytest.approx({**dict(entry.top), entry.id: entry.token})
        outside += entry.id not in dict(entry.top)
    assert outside > 0, "no sampled token was outside the top 20: the test shows less than it should"


def test_a_vocabulary_smaller_than_the_top_is_kept_whole() -> None:
    model = tiny_model("gpt2", vocab_size=9, eos_token_id=7, a2d={"mask_token_id": 8})
    result = decode(model, [1, 2], DecodingOptions(max_tokens=3, stop_at_eos=False))
    assert all(len(entry.top) == 9 for entry in result.logprobs)


def test_full_logprobs_are_kept_only_for_the_rows_that_ask(model: Any) -> None:
    options = [DecodingOptions(max_tokens=3, full_logprobs=flag, stop_at_eos=False) for flag in (True, False)]
    first, second = decode(model, [PROMPT, PROMPT], options)
    assert all(entry.full is not None for entry in first.logprobs)
    assert all(entry.full is None for entry in second.logprobs)


# Sampling.

DRAWS = 1500
FALSE_ALARM = 1e-6


def chi_square(tokens: list[int], expected: np.ndarray) -> tuple[float, float]:
    """Pearson's statistic with rare tokens pooled, and its critical value (Wilson and Hilferty) at FALSE_ALARM."""
    counts = np.bincount(tokens, minlength=len(expected)).astype(float)
    expected = expected * len(tokens)
    rare = expected < 5
    cells = [*zip(counts[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() >= 5:
        cells.append((counts[rare].sum(), expected[rare].sum()))
    free = len(cells) - 1
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    z = NormalDist().inv_cdf(1 - FALSE_ALARM)
    return statistic, free * (1 - 2 / (9 * free) + z * math.sqrt(2 / (9 * free))) ** 3


@pytest.fixture(scope="module")
def flat() -> tuple[Any, np.ndarray]:
    """A model that knows no positions, so that all masks after PROMPT have one distribution, and its log-softmax."""
    model = tiny_model("gpt2", seed=4, n_positions=DRAWS + 4)
    model.model.wpe.weight = mx.zeros_like(model.model.wpe.weight)
    model.model.ln_f.weight = model.model.ln_f.weight * 0.6
    logits = np.array(bidirectional_forward(model, mx.array([[*PROMPT, *[MASK] * DRAWS]]))[0, 4:]).astype(np.float64)
    assert np.abs(logits - logits[0]).max() < 1e-4
    logits[0, MASK] = -np.inf
    return model, log_softmax(logits[0])


def draw(model: Any, **values: Any) -> list[int]:
    """DRAWS tokens of one forward."""
    options = DecodingOptions(max_tokens=DRAWS, max_denoising_steps=1, seed=7, stop_at_eos=False, **values)
    return decode(model, PROMPT, options).tokens


def distribution(logprobs: np.ndarray, temp: float, keep: np.ndarray | None = None) -> np.ndarray:
    kept = np.where(keep, logprobs, -np.inf) if keep is not None else logprobs
    return np.exp(log_softmax(kept / temp))


def kept_by(logprobs: np.ndarray, name: str, value: float) -> np.ndarray:
    """Which tokens a filter keeps, at temperature 1 (mlx-lm filters before the temperature)."""
    order = np.argsort(-logprobs)
    probabilities = np.exp(logprobs)
    keep = np.zeros(len(logprobs), dtype=bool)
    if name == "top_k":
        keep[order[: int(value)]] = True
    elif name == "min_p":
        keep = probabilities >= value * probabilities.max()
    else:
        above = np.cumsum(probabilities[order]) - probabilities[order]
        keep[order[above < value]] = True
    return keep


@pytest.mark.parametrize(
    ("temp", "name", "value"),
    [(1.0, None, 0), (0.6, None, 0), (2.5, None, 0), (1.3, "top_p", 0.7), (1.3, "top_k", 6), (0.8, "min_p", 0.15)],
)
def test_sampled_tokens_follow_the_softmax(flat: Any, temp: float, name: str | None, value: float) -> None:
    model, logprobs = flat
    keep = kept_by(logprobs, name, value) if name else None
    expected = distribution(logprobs, temp, keep)
    assert (expected * DRAWS >= 5).sum() >= 4
    tokens = draw(model, temp=temp, **({name: value} if name else {}))
    assert expected[tokens].min() > 0, "a token that was filtered out was drawn"
    statistic, critical = chi_square(tokens, expected)
    assert statistic < critical
    if keep is not None:
        assert 1 < keep.sum() < VOCAB - 1
        wrong, critical = chi_square(tokens, distribution(logprobs, temp))
        assert wrong > critical, "the filter has no effect that this test could see"
    wrong, critical = chi_square(tokens, distribution(logprobs, temp * 3, keep))
    assert wrong > critical, "another temperature would pass as well"


def test_seeds_draw_independently(flat: Any) -> None:
    """One token from each of 400 seeds in a row follows the softmax too, and so do the pairs of neighbours."""
    model, logprobs = flat
    logits = np.array(bidirectional_forward(model, mx.array([[*PROMPT, MASK]]))[0, 4]).astype(np.float64)
    logits[MASK] = -np.inf
    expected = np.exp(log_softmax(logits))
    options = [DecodingOptions(max_tokens=1, temp=1.0, seed=seed, stop_at_eos=False) for seed in range(400)]
    tokens = [result.tokens[0] for result in decode(model, [PROMPT] * len(options), options)]
    statistic, critical = chi_square(tokens, expected)
    assert statistic < critical
    equal = sum(a == b for a, b in zip(tokens, tokens[1:], strict=False))
    chance = (expected**2).sum()
    assert abs(equal - 399 * chance) < 5 * math.sqrt(399 * chance * (1 - chance))


def test_filters_that_are_off_change_nothing(model: Any) -> None:
    options = DecodingOptions(max_tokens=10, temp=1.0, seed=8)
    expected = decode(model, PROMPT, options)
    for off in ({"top_p": 0.0}, {"top_p": 1.0}, {"top_k": 0}, {"top_k": VOCAB}, {"top_k": 10**6}, {"min_p": 0.0}):
        assert decode(model, PROMPT, replace(options, **off)) == expected


def test_the_narrowest_filters_are_greedy(model: Any) -> None:
    greedy = decode(model, PROMPT, DecodingOptions(unmasking="mlx_dllm", max_tokens=10))
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        options = DecodingOptions(unmasking="mlx_dllm", max_tokens=10, temp=1.7, seed=1, **narrow)
        assert decode(model, PROMPT, options) == greedy


def test_filters_without_a_temperature_change_nothing(model: Any) -> None:
    greedy = decode(model, PROMPT, DecodingOptions(max_tokens=10))
    assert decode(model, PROMPT, DecodingOptions(max_tokens=10, temp=0, top_p=0.5, top_k=2, min_p=0.3)) == greedy


def test_suppressed_tokens_are_never_emitted(model: Any) -> None:
    whole = decode(model, PROMPT, DecodingOptions(max_tokens=10, stop_at_eos=False))
    banned = tuple(sorted(set(whole.tokens)))
    for temp in (0.0, 3.0):
        options = DecodingOptions(max_tokens=10, stop_at_eos=False, suppress_tokens=banned, temp=temp, seed=1)
        result = decode(model, PROMPT, options)
        assert not set(result.tokens) & {*banned, MASK} and len(result.tokens) == 10
    for commit, logits in replay(model, PROMPT, decode(model, PROMPT, replace(options, temp=0.0))):
        logits[:, [*banned, MASK]] = -np.inf
        assert commit.tokens == tuple(logits[list(commit.positions)].argmax(-1))


def test_one_token_may_be_left(model: Any) -> None:
    banned = tuple(i for i in range(VOCAB) if i not in (20, MASK))
    for temp in (0.0, 1.0):
        options = DecodingOptions(
            max_tokens=4, suppress_tokens=banned, temp=temp, seed=1, top_p=0.9, min_p=0.1, top_k=2
        )
        assert decode(model, PROMPT, options).tokens == [20] * 4


def test_rows_may_have_their_own_options(model: Any) -> None:
    options = [
        DecodingOptions(max_tokens=3, temp=0.0),
        DecodingOptions(max_tokens=9, temp=1.4, seed=1, top_k=4),
        DecodingOptions(max_tokens=5, temp=0.2, seed=1, suppress_tokens=(3, 9), eos_token_ids=(1, 2, 4)),
        DecodingOptions(canvas_length=20, max_tokens=2, max_denoising_steps=7, mask_token_id=11),
        DecodingOptions(max_tokens=6, confidence_temperature=0.4, sampler=greedy_sampler),
    ]
    for i, result in enumerate(decode(model, [PROMPT] * len(options), options)):
        assert result == as_row(decode(model, PROMPT, options[i]), i)


# The hosts' samplers.


def test_a_host_sampler_is_called_on_rows_of_log_probabilities(model: Any) -> None:
    seen: list[mx.array] = []

    def sampler(logprobs: mx.array) -> mx.array:
        seen.append(logprobs)
        return mx.argmin(mx.where(logprobs == -mx.inf, mx.inf, logprobs), axis=-1)

    options = DecodingOptions(max_tokens=6, max_denoising_steps=3, sampler=sampler, stop_at_eos=False)
    result = decode(model, PROMPT, options)
    assert [rows.shape for rows in seen] == [(6, VOCAB)] * 3
    for rows in seen:
        np.testing.assert_allclose(np.exp(np.array(rows)).sum(-1), 1, rtol=1e-5)
        assert (np.array(rows)[:, MASK] == -np.inf).all()
    for commit, logits in replay(model, PROMPT, result):
        logits[:, MASK] = np.inf
        assert commit.tokens == tuple(logits[list(commit.positions)].argmin(-1))


def test_the_confidence_of_a_sampled_token_is_its_own(model: Any) -> None:
    """The least likely token everywhere: committed first is the position where it is likeliest."""
    options = DecodingOptions(
        max_tokens=6,
        stop_at_eos=False,
        sampler=lambda rows: mx.argmin(mx.where(rows == -mx.inf, mx.inf, rows), axis=-1),
    )
    result = decode(model, PROMPT, options)
    masked = set(range(4, 10))
    for commit, logits in replay(model, PROMPT, result):
        allowed = logits.copy()
        allowed[:, MASK] = np.inf
        confidence = {p: log_softmax(logits[p])[allowed[p].argmin()] for p in masked}
        assert commit.positions[0] == max(confidence, key=lambda p: confidence[p])
        masked -= set(commit.positions)


def test_the_hosts_greedy_sampler_is_greedy(model: Any) -> None:
    for rule in ("mlx_dllm", "random"):
        options = DecodingOptions(unmasking=rule, max_tokens=8, seed=1)
        assert decode(model, PROMPT, replace(options, sampler=greedy_sampler)) == decode(model, PROMPT, options)


def test_a_sampler_made_by_the_host_works(model: Any) -> None:
    sampler = make_sampler(temp=1.0, top_p=0.9, top_k=5, min_p=0.01)
    mx.random.seed(3)
    first = decode(model, PROMPT, DecodingOptions(max_tokens=8, sampler=sampler))
    mx.random.seed(3)
    assert decode(model, PROMPT, DecodingOptions(max_tokens=8, sampler=sampler)) == first


def one_row_only(logprobs: mx.array) -> int:
    return mx.argmax(logprobs).item()


@pytest.mark.parametrize(
    ("sampler", "got"),
    [
        (lambda rows: mx.argmax(rows, axis=-1, keepdims=True), "returned an array of shape (4, 1) for 4 rows"),
        (lambda rows: mx.argmax(rows), "returned an array of shape () for 4 rows"),
        (lambda rows: mx.argmax(rows[:2], axis=-1), "returned an array of shape (2,) for 4 rows"),
        (lambda rows: mx.max(rows, axis=-1), "returned an array of shape (4,) for 4 rows"),
        (lambda rows: mx.argmax(rows, axis=-1).tolist(), "returned list for 4 rows"),
        (lambda rows: None, "returned NoneType for 4 rows"),
        (one_row_only, "returned int for 4 rows"),
        (lambda rows: rows.argmax().nope, "cannot take the rows of diffusion decoding (AttributeError: "),
        (lambda: mx.zeros(4), "cannot take the rows of diffusion decoding (TypeError: "),
    ],
)
def test_a_sampler_that_cannot_take_rows_is_refused(model: Any, sampler: Any, got: str) -> None:
    with pytest.raises(DiffusionError) as error:
        decode(model, PROMPT, DecodingOptions(max_tokens=4, sampler=sampler))
    text = str(error.value)
    assert text.startswith("The sampler ") and got in text and "\n" not in text
    assert text.endswith("it must take log-probabilities [n, vocabulary] and return n token ids.")


@pytest.mark.parametrize("token", [MASK, 7, VOCAB, -1, 10**6])
@pytest.mark.parametrize("rule", BUILTIN_RULES)
def test_a_sampler_that_chooses_what_must_not_be_emitted_is_refused(model: Any, rule: str, token: int) -> None:
    options = DecodingOptions(
        unmasking=rule,
        max_tokens=4,
        suppress_tokens=(7,),
        sampler=lambda rows: mx.full(rows.shape[:1], token, mx.int32),
    )
    shown = token % 2**32
    with pytest.raises(DiffusionError, match=rf"^The sampler returned token id {shown}, .*\.$"):
        decode(model, PROMPT, options)


def test_a_temperature_beside_a_sampler_is_refused(model: Any) -> None:
    assert refused(model, temp=0.5, sampler=greedy_sampler) == (
        "Give temp or a sampler, not both: a sampler brings its own temperature."
    )
    decode(model, PROMPT, DecodingOptions(max_tokens=2, temp=0, sampler=greedy_sampler))


# Bad input.


def test_an_unknown_rule_lists_the_known(model: Any) -> None:
    text = refused(model, unmasking="topk")
    assert text == f"Unknown unmasking rule 'topk'; known are: {', '.join(RULES.names())}."
    assert {"a2d", "low_confidence", "mlx_dllm", "random"} <= set(RULES.names())


@pytest.mark.parametrize(
    ("rule", "option"),
    [
        ("a2d", "block_length"),
        ("mlx_dllm", "block_length"),
        ("mlx_dllm", "confidence_temperature"),
        ("low_confidence", "confidence_temperature"),
        ("random", "confidence_temperature"),
    ],
)
def test_an_option_the_rule_does_not_use_is_refused(model: Any, rule: str, option: str) -> None:
    users = ", ".join(name for name in RULES.names() if option in RULES.get(name).uses)
    assert {"low_confidence", "random"} <= set(users.split(", ")) or users == "a2d"
    assert refused(model, unmasking=rule, **{option: 2}) == (
        f"The unmasking rule {rule!r} does not use {option}; leave it out, or choose a rule that does with "
        f"unmasking (--unmasking {users.replace(', ', '|')})."
    )


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []], mx.array([], dtype=mx.int32), np.zeros((2, 0), dtype=int)])
def test_an_empty_prompt_is_refused(model: Any, prompt: Any) -> None:
    assert refused(model, prompt) == "The prompt is empty: give at least one token."


@pytest.mark.parametrize("token", [VOCAB, 10**9, -1])
def test_a_token_outside_the_vocabulary_is_refused_with_its_number(model: Any, token: int) -> None:
    for prompt in ([1, token], [[1], [2, token]]):
        assert refused(model, prompt) == (
            f"The prompt has token id {token}, outside the vocabulary of 48: the tokenizer does not belong to this "
            "checkpoint."
        )
    assert decode(model, [VOCAB - 1], DecodingOptions(max_tokens=1)).prompt_tokens == 1


@pytest.mark.parametrize("prompt", ["hello", ["a", "b"], [1.5], [True], [None], mx.array([1.0]), [[1], ["x"]]])
def test_a_prompt_that_is_no_ids_is_refused(model: Any, prompt: Any) -> None:
    assert refused(model, prompt).startswith("A prompt must be a list of token ids, got ")


@pytest.mark.parametrize("prompt", [5, None, [[1], 2], [1, [2]]])
def test_a_prompt_that_is_no_list_is_refused(model: Any, prompt: Any) -> None:
    assert refused(model, prompt).startswith("A prompt must be a list of token ids, got ")


def test_a_canvas_over_the_context_is_refused_with_the_numbers(model: Any) -> None:
    assert refused(model, max_tokens=61) == (
        "A canvas of 65 tokens (prompt 4 + max_tokens 61) exceeds the model's context of 64: the prompt has 4, so at "
        "most 60 new tokens fit."
    )
    assert refused(model, canvas_length=70).startswith("A canvas of 70 tokens (canvas_length) exceeds ")
    text = refused(model, [1] * 70, max_tokens=3)
    assert text == "The prompt has 70 tokens and the model's context is 64: shorten the prompt."


def test_a_canvas_shorter_than_the_prompt_is_refused(model: Any) -> None:
    assert refused(model, canvas_length=3) == (
        "canvas_length 3 is shorter than the prompt of 4 tokens; it counts the prompt too: give at least 5."
    )


def test_a_prompt_that_fills_the_checkpoints_canvas_is_refused(model: Any) -> None:
    for length in (16, 20):
        assert refused(model, [1] * length, DecodingOptions()) == (
            f"The prompt has {length} tokens, which leaves no room in the checkpoint's canvas of 16: say how many "
            "tokens to write with max_tokens (--max-tokens)."
        )
    assert len(decode(model, [1] * 16, DecodingOptions(max_tokens=3, stop_at_eos=False)).tokens) == 3


def test_as_many_tokens_as_fit_needs_a_growing_canvas(model: Any) -> None:
    text = refused(model, max_tokens=-1)
    assert text.startswith("max_tokens -1 ") and model.diffusion_spec.family in text and "growing" not in text


def test_suppressed_ids_must_exist_and_leave_one(model: Any) -> None:
    assert refused(model, suppress_tokens=(3, 48)) == "suppress_tokens has id 48, outside the vocabulary of 48."
    everything = tuple(range(VOCAB - 1))
    assert refused(model, suppress_tokens=everything) == "suppress_tokens leaves no token to emit."


def test_a_mask_id_must_be_known_and_inside() -> None:
    model = tiny_model("gpt2", a2d={"mask_token_id": None})
    assert refused(model) == (
        "The checkpoint does not say which token is its mask: give mask_token_id (--mask-token-id)."
    )
    assert "(0 to 47), got 48 from the option." in refused(model, mask_token_id=48)
    assert len(decode(model, PROMPT, DecodingOptions(max_tokens=3, mask_token_id=MASK, stop_at_eos=False)).tokens) == 3


def test_a_model_without_a_spec_is_refused() -> None:
    model = tiny_model("gpt2", ar=True)
    text = refused(model)
    assert text.startswith("This mlx_lm.models.gpt2 model has no diffusion spec")
    with pytest.raises(DiffusionError, match="has no diffusion spec"):
        decode(None, PROMPT)


def test_options_must_fit_the_rows(model: Any) -> None:
    assert refused(model, [PROMPT, PROMPT], [DecodingOptions()]) == (
        "Options must be one for all rows or one per row: 1 for 2 prompts."
    )
    mixed = [DecodingOptions(max_tokens=2, unmasking=rule) for rule in ("a2d", "random")]
    assert refused(model, [PROMPT, PROMPT], mixed) == (
        "All rows of a batch must use the same unmasking rule, got a2d, random."
    )
    named = [DecodingOptions(max_tokens=2, unmasking="a2d"), DecodingOptions(max_tokens=2)]
    assert len(decode(model, [PROMPT, PROMPT], named)) == 2


@pytest.mark.parametrize("rule", [*BUILTIN_RULES, "threshold"])
@pytest.mark.parametrize("where", ["everywhere", "one token"])
def test_logits_that_are_not_numbers_are_refused(rule: str, where: str) -> None:
    broken = tiny_model("gpt2")
    embedding = broken.model.wte.weight
    embedding[slice(None) if where == "everywhere" else 5] = mx.nan
    broken.model.wte.weight = embedding
    with pytest.raises(DiffusionError, match="NaN"):
        decode(broken, PROMPT, DecodingOptions(unmasking=rule, max_tokens=4))


@pytest.mark.parametrize("rule", ["random", "threshold", "eb", "klass"])
def test_logits_that_exclude_every_token_are_refused(model: Any, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 0 would be as good as any, whatever it is."""
    family = model.diffusion_family
    head = lambda own, states: mx.full((*family.head(own, states).shape,), -mx.inf)  # noqa: E731
    monkeypatch.setattr(model, "diffusion_family", replace(family, head=head))
    with pytest.raises(DiffusionError) as error:
        decode(model, PROMPT, DecodingOptions(unmasking=rule, max_tokens=4))
    assert str(error.value).startswith("The model computed logits that are not finite numbers")
