"""Block-causal decoding: kept keys and values, windows and ragged rows change nothing but the cost."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_dllm_plugin.decode  # noqa: F401  (the module; the name in the package is the function)
from mlx_dllm_plugin import DecodingOptions, DecodingResult, DiffusionError, DiffusionSpec, decode, stream_decode
from mlx_dllm_plugin.batch import Blocks
from mlx_dllm_plugin.caches import AttentionPolicy, BlockCache, BlockWindow
from mlx_dllm_plugin.decode import BlockDone, Finished, Released
from mlx_dllm_plugin.families import FAMILIES, Family, a2d
from tests.models import CONTEXT, EOS, MASK, VOCAB, stock_model

TOLERANCE = 2e-4
FAMILY = a2d.family("blocks", hidden=a2d.decoder, head=a2d.either_head)
TEXT = [(7 * i + 3 * (i // 5)) % 45 for i in range(64)]  # neither the mask nor the end of sequence


@cache
def loaded(model_type: str, **config: Any) -> Any:
    mx.random.seed(0)  # mlx-lm's own initial values are part of it
    return stock_model(model_type, **config)


def block_model(
    model_type: str = "qwen3",
    block: int = 4,
    origin: Any = "start",
    logits: Any = "in_place",
    sub: int | None = None,
    context: int | None = CONTEXT,
    family: Family = FAMILY,
    **config: Any,
) -> Any:
    """One of mlx-lm's own models as a block-causal one."""
    model = loaded(model_type, **config)
    defaults = {"max_tokens": 8, "block_length": block, **({} if sub is None else {"sub_block_length": sub})}
    model.diffusion_family = family
    model.diffusion_spec = DiffusionSpec(
        family=family.name,
        logits=logits,
        attention="block_causal",
        canvas="growing",
        unmasking="threshold",
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        context_length=context,
        defaults=defaults,
        block_origin=origin,
    )
    return model


def gemma2(kv_heads: int, **spec: Any) -> Any:
    """Its attention has scores of five dimensions."""
    family = FAMILIES.get("gemma2")
    return block_model("gemma2", family=family, num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=4, **spec)


# The plain loop: no cache, the whole canvas in every step, one mask of its length squared.


class Explicit(AttentionPolicy):
    def __init__(self, mask: np.ndarray):
        self.mask = mx.array(mask)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return self.mask


def block_of(columns: Any, block: int, first: int) -> Any:
    return (columns - first) // block


@dataclass
class Plain:
    """What the plain loop finds; ``logprobs`` by position."""

    canvas: list[int]
    tokens: list[int] = field(default_factory=list)
    reason: str = "length"
    commits: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    seen: int = 0


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def plain_loop(
    model: Any,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    threshold: float | None = 0.9,
    steps: int = 1,
    eos: Sequence[int] = (EOS,),
    cfg: float = 0.0,
    keep: Sequence[int] = (),
) -> Plain:
    """Greedy decoding by the rule ``threshold``, or without one by ``low_confidence`` in these steps per block."""
    spec = model.diffusion_spec
    block, sub, shift = spec.defaults["block_length"], spec.defaults.get("sub_block_length"), spec.logits == "shifted"
    cap = spec.context_length - len(prompt) if max_tokens == -1 else max_tokens
    length, first = len(prompt) + cap, 0
    if spec.block_origin == "prompt_end":
        first = len(prompt) % block
    else:
        length = min(-(-length // block) * block, spec.context_length)
    at = block_of(np.arange(length), block, first)
    mask = at[None] <= at[:, None]
    plain = Plain([*prompt, *[MASK] * (length - len(prompt))])
    masked = np.arange(length) >= len(prompt)

    def logits_of(canvas: list[int]) -> np.ndarray:
        caches = [Explicit(mask)] * len(model.layers)
        states = model.diffusion_family.hidden(model, mx.array([canvas]), caches)
        return np.array(model.diffusion_family.head(model, states)[0]).astype(np.float64)

    for group, visible, count in groups(masked, block, first, sub, shift):
        number = 0
        while masked[group].any():
            logits = logits_of(plain.canvas)
            if cfg:
                hidden = [token if token in keep else MASK for token in prompt]
                without = logits_of([*hidden, *plain.canvas[len(prompt) :]])
                logits = without + (cfg + 1) * (logits - without)
            found = []
            for position in (p for p in group if masked[p]):
                logprobs = log_softmax(logits[position - shift])
                token = int(np.delete(logprobs, MASK).argmax())  # the mask is the last id
                found.append((-float(np.exp(logprobs.max())), position, token, logprobs))
            found.sort(key=lambda entry: entry[:2])
            if count:
                n = count
            elif threshold is not None:
                n = max(sum(-entry[0] > threshold for entry in found), 1)
            else:
                n = len(group) // steps + (number < len(group) % steps)
            number += 1
            chosen = sorted(found[:n], key=lambda entry: entry[1])
            for _, position, token, logprobs in chosen:
                plain.canvas[position], masked[position], plain.logprobs[position] = token, False, logprobs
            plain.commits.append((tuple(e[1] for e in chosen), tuple(e[2] for e in chosen)))
            plain.seen = visible
            while len(plain.tokens) < cap and not masked[len(prompt) + len(plain.tokens)]:
                token = plain.canvas[len(prompt) + len(plain.tokens)]
                if token in eos:
                    plain.reason = "stop"
                    return plain
                plain.tokens.append(token)
            if len(plain.tokens) == cap:
                return plain
    raise AssertionError("the output is not complete")


def groups(
    masked: np.ndarray, block: int, first: int, sub: int | None, shift: bool
) -> Iterator[tuple[list[int], int, int]]:
    """Positions that are filled before the next ones, the columns the model sees, and how many a step commits if the
    rule has no say: the first token of a block comes from the block before, where there are sub-blocks."""
    for start in range(first - block, len(masked), block):
        end = min(start + block, len(masked))
        holes = [p for p in range(max(start, 0), end) if masked[p]]
        if holes and sub and shift and holes[0] == start:
            yield [start], start, 1
            holes = holes[1:]
        for part in range(start, end, sub or block):
            group = [p for p in holes if part <= p < part + (sub or block)]
            if group:
                yield group, end, 0


def same_as_plain(model: Any, prompt: list[int], max_tokens: int = 8, **values: Any) -> DecodingResult:
    """Decode both ways, compare everything, return the result."""
    threshold, steps, eos = values.pop("threshold", 0.3), values.pop("steps", None), values.pop("eos", (EOS,))
    cfg, keep = values.pop("cfg", 0.0), values.pop("keep", ())
    how: dict[str, Any] = (
        {"threshold": threshold} if steps is None else {"unmasking": "low_confidence", "max_denoising_steps": steps}
    )
    if cfg:
        how |= {"cfg_scale": cfg, "cfg_keep_tokens": tuple(keep)}
    options = DecodingOptions(max_tokens=max_tokens, full_logprobs=True, eos_token_ids=tuple(eos), **how, **values)
    result = decode(model, prompt, options)
    chosen = {"threshold": None, "steps": steps} if steps else {"threshold": threshold}
    plain = plain_loop(model, prompt, max_tokens, eos=eos, cfg=cfg, keep=keep, **chosen)
    assert [(commit.positions, commit.tokens) for commit in result.commits] == plain.commits
    assert (result.tokens, result.finish_reason) == (plain.tokens, plain.reason)
    assert (result.nfe, result.empty_steps) == (len(plain.commits), 0)
    assert result.canvas == plain.canvas[: max(plain.seen, len(prompt) + result.generated_tokens)]
    for commit in result.commits:
        for position, entry in zip(commit.positions, commit.logprobs, strict=True):
            np.testing.assert_allclose(entry.vector(VOCAB), plain.logprobs[position], rtol=0, atol=TOLERANCE)
    return result


def as_row(result: DecodingResult, row: int = 0) -> DecodingResult:
    """The result as if it had been this row of a batch."""
    return replace(result, commits=[replace(commit, row=row) for commit in result.commits])


def same_as_alone(model: Any, prompts: Sequence[list[int]], options: Sequence[DecodingOptions]) -> list[DecodingResult]:
    """Each row of a batch equals the row alone, bit for bit: commits, log-probabilities, forwards, prefills."""
    together = decode(model, prompts, options)
    for i, result in enumerate(together):
        assert result == as_row(decode(model, prompts[i], options[i]), i)
    return together


# One row.


@pytest.mark.parametrize("shape", [(4, None), (4, 2), (6, 3), (8, None), (1, None)], ids=str)
@pytest.mark.parametrize("logits", ["in_place", "shifted"])
@pytest.mark.parametrize("origin", ["start", "prompt_end"])
def test_decoding_equals_a_plain_loop_over_the_whole_canvas(
    origin: str, logits: str, shape: tuple[int, int | None]
) -> None:
    """Prompts shorter than, equal to and longer than a block, aligned or not; outputs that are no multiple of it."""
    block, sub = shape
    for model_type in ("qwen3", "qwen2") if shape == (4, 2) else ("qwen3",):
        model = block_model(model_type, block, origin, logits, sub)
        for prompt, max_tokens in ((1, 7), (block, 5), (block + 1, 9), (2 * block, 1), (3 * block - 1, 2 * block)):
            result = same_as_plain(model, TEXT[:prompt], max_tokens)
            assert len(result.tokens) == max_tokens or result.finish_reason == "stop"


@pytest.mark.parametrize("logits", ["in_place", "shifted"])
@pytest.mark.parametrize("origin", ["start", "prompt_end"])
def test_a_schedule_counts_the_steps_of_each_block(origin: str, logits: str) -> None:
    model = block_model("qwen3", 8, origin, logits)
    for steps, prompt in ((1, 8), (3, 8), (3, 13), (5, 3)):
        result = same_as_plain(model, TEXT[:prompt], 16, steps=steps, stop_at_eos=False, eos=())
        blocks = Counter(commit.positions[0] // 8 for commit in result.commits)
        if prompt == 8:
            assert set(blocks.values()) == {steps}


@pytest.mark.parametrize("logits", ["in_place", "shifted"])
def test_one_token_a_step_is_the_plain_loop_too(logits: str) -> None:
    """Many forwards over the same block: what the first of them stored must not be seen twice."""
    model = block_model("qwen3", 8, logits=logits)
    result = same_as_plain(model, TEXT[:8], 16, threshold=2.0, stop_at_eos=False, eos=())
    assert result.nfe == 16


@pytest.mark.parametrize("prompt", [1, 4, 6, 8])
@pytest.mark.parametrize("origin", ["start", "prompt_end"])
def test_the_first_token_of_a_block_comes_from_the_block_before(origin: str, prompt: int) -> None:
    """Fast-dLLM v2: a forward that sees no mask hands it over, when there are sub-blocks and shifted logits."""
    model = block_model("qwen3", 4, origin, "shifted", 2)
    result = same_as_plain(model, TEXT[:prompt], 11, eos=())
    first = prompt % 4 if origin == "prompt_end" else 0
    firsts = [p for p in range(prompt, prompt + 11) if (p - first) % 4 == 0]
    assert firsts and all(((p,) in [commit.positions for commit in result.commits]) for p in firsts)
    again = block_model("qwen3", 4, origin, "in_place", 2)
    same_as_plain(again, TEXT[:prompt], 11, eos=())


def test_sub_blocks_are_filled_from_left_to_right() -> None:
    model = block_model("qwen3", 8, sub=2)
    result = same_as_plain(model, TEXT[:8], 16, eos=())
    order = [commit.positions[0] // 2 for commit in result.commits]
    assert order == sorted(order) and len(set(order)) == 8
    assert decode(model, TEXT[:8], DecodingOptions(max_tokens=16, sub_block_length=8)).commits != result.commits


@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize("context", [21, 24, 25])
@pytest.mark.parametrize("origin", ["start", "prompt_end"])
def test_the_output_may_grow_up_to_the_context(origin: str, context: int, block: int) -> None:
    model, forever = block_model("qwen2", block, origin, context=context), {"stop_at_eos": False}
    for prompt in (5, 8, context - 1):
        result = same_as_plain(model, TEXT[:prompt], -1, eos=(), **forever)
        assert len(result.canvas) == context == prompt + len(result.tokens)
        exact = decode(model, TEXT[:prompt], DecodingOptions(max_tokens=context - prompt, threshold=0.3, **forever))
        assert exact.tokens == result.tokens


def test_a_canvas_over_the_context_is_refused() -> None:
    model = block_model(context=20)
    for prompt, max_tokens, words in (
        (5, 16, ("21", "20", "15")),
        (20, -1, ("20 tokens", "shorten")),
        (25, 1, ("25", "20")),
    ):
        with pytest.raises(DiffusionError) as error:
            stream_decode(model, TEXT[:prompt], DecodingOptions(max_tokens=max_tokens))
        assert all(word in str(error.value) for word in words)
    assert len(decode(model, TEXT[:5], DecodingOptions(max_tokens=15, stop_at_eos=False)).canvas) == 20


def test_a_block_length_must_be_known() -> None:
    model = block_model()
    model.diffusion_spec = replace(model.diffusion_spec, defaults={"max_tokens": 8})
    with pytest.raises(DiffusionError, match="--block-length"):
        stream_decode(model, TEXT[:5])
    result = decode(model, TEXT[:5], DecodingOptions(block_length=4, threshold=0.3))
    assert result == decode(block_model(), TEXT[:5], DecodingOptions(threshold=0.3))
    with pytest.raises(DiffusionError, match="sub_block_length 3 does not divide the block of 4"):
        stream_decode(model, TEXT[:5], DecodingOptions(block_length=4, sub_block_length=3))


@pytest.mark.parametrize("logits", ["in_place", "shifted"])
@pytest.mark.parametrize("sub", [None, 2])
def test_an_end_of_sequence_in_the_middle_of_a_block_stops(logits: str, sub: int | None) -> None:
    """Everything up to it is committed, nothing after it is waited for, and later blocks are not begun."""
    model = block_model("qwen3", 8, logits=logits, sub=sub)
    prompt, whole = TEXT[:10], {"threshold": 2.0, "stop_at_eos": False}
    tokens = decode(model, prompt, DecodingOptions(max_tokens=30, **whole)).tokens
    ends = [i for i, token in enumerate(tokens) if token not in tokens[:i] and (10 + i) % 8 not in (0, 7)]
    assert len(ends) > 2
    for end in ends:
        result = same_as_plain(model, prompt, 30, threshold=2.0, eos=(tokens[end],))
        assert (result.tokens, result.finish_reason) == (tokens[:end], "stop")
        assert len(result.canvas) == -(-(10 + end) // 8) * 8 and tokens[end] == result.canvas[10 + end]


def test_an_end_of_sequence_in_the_prompt_ends_nothing() -> None:
    model = block_model()
    for prompt in ([EOS], [*TEXT[:3], EOS], [*TEXT[:5], EOS, EOS, *TEXT[:4]]):
        tokens = decode(model, prompt, DecodingOptions(max_tokens=9, threshold=0.3, stop_at_eos=False)).tokens
        result = same_as_plain(model, prompt, 9)
        assert result.canvas[: len(prompt)] == prompt and result.generated_tokens > 1
        assert result.tokens == tokens[: len(result.tokens)]


def test_a_mask_in_the_prompt_is_text() -> None:
    model = block_model()
    prompt = [*TEXT[:5], MASK, *TEXT[:3]]
    assert same_as_plain(model, prompt, 6).canvas[:9] == prompt


@pytest.mark.parametrize("origin", ["start", "prompt_end"])
def test_guidance_masks_the_prompt_in_what_is_kept_too(origin: str) -> None:
    model = block_model("qwen3", 4, origin)
    found = []
    for guidance in ({}, {"cfg": 1.5}, {"cfg": 1.5, "keep": TEXT[1:3]}):
        found.append([same_as_plain(model, TEXT[:n], 9, eos=(), stop_at_eos=False, **guidance) for n in (3, 9, 16)])
    assert all(a.tokens != b.tokens for a, b in zip(found[0], found[1], strict=True))
    assert any(a.tokens != b.tokens for a, b in zip(found[1], found[2], strict=True))


def test_gemma2_is_the_plain_loop_too() -> None:
    """Scores of five dimensions, guided as well: then one prompt makes a batch of two."""
    for kv_heads in (1, 2, 4, 8):
        model = gemma2(kv_heads)
        for prompt in (3, 8, 11):
            same_as_plain(model, TEXT[:prompt], 9, eos=())
            same_as_plain(model, TEXT[:prompt], 9, eos=(), cfg=1.0)


@pytest.mark.parametrize("origin", ["start", "prompt_end"])
@pytest.mark.parametrize("sub", [None, 2])
def test_events_tell_one_consistent_story(origin: str, sub: int | None) -> None:
    model = block_model("qwen3", 4, origin, sub=sub)
    prompts, new = [TEXT[:6], TEXT[:13]], 11
    options = DecodingOptions(max_tokens=new, threshold=0.3, stop_at_eos=False)
    events = list(stream_decode(model, prompts, options))
    for row, prompt in enumerate(prompts):
        own = [event for event in events if event.row == row]
        done = [(event.start, event.end) for event in own if isinstance(event, BlockDone)]
        assert done[0][0] == len(prompt) and all(a[1] == b[0] for a, b in zip(done[:-1], done[1:], strict=True))
        last = own[-1]
        assert isinstance(last, Finished) and sum(isinstance(event, Finished) for event in own) == 1
        released = [event for event in own if isinstance(event, Released)]
        tokens = [token for event in released for token in event.tokens]
        assert list(last.canvas[: len(prompt) + new]) == [*prompt, *tokens] and len(tokens) == new
        assert released[-1].reason == last.reason == "length" and len(released) > 2


# Batches.


def test_rows_stand_at_blocks_of_their_own() -> None:
    model = block_model("qwen3", 4)
    prompts = [TEXT[:1], TEXT[2:15], TEXT[5:13], TEXT[1:30]]
    options = [
        DecodingOptions(max_tokens=n, threshold=threshold, stop_at_eos=False)
        for n, threshold in ((17, 2.0), (3, 0.3), (12, 0.0), (9, 0.5))
    ]
    results = same_as_alone(model, prompts, options)
    assert len({result.nfe for result in results}) > 2


rows_of_a_batch = st.lists(
    st.tuples(
        st.integers(1, 22),
        st.integers(1, 14),
        st.sampled_from([0.0, 0.0, 0.9]),
        st.sampled_from([{}, {"stop_at_eos": False}, {"top_k": 3}, {"suppress_tokens": [5, 9]}]),
    ),
    min_size=2,
    max_size=5,
)
RULES = {
    "threshold": [{"threshold": value} for value in (0.0, 0.3, 2.0)],
    "low_confidence": [{"max_denoising_steps": value} for value in (1, 3, 9)],
    "random": [{"max_denoising_steps": value} for value in (1, 3, 9)],
    "sequential": [{"max_denoising_steps": value} for value in (1, 3, 9)],
    "low_confidence_dynamic": [{"threshold": 0.3}, {"max_denoising_steps": 2}],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("logits", ["in_place", "shifted"])
@pytest.mark.parametrize("origin", ["start", "prompt_end"])
@given(rows=rows_of_a_batch, model_type=st.sampled_from(["qwen3", "qwen2"]), block=st.sampled_from([1, 3, 4]))
@settings(max_examples=5, deadline=None, derandomize=True)
def test_a_row_of_a_batch_equals_the_row_alone(
    origin: str, logits: str, rule: str, rows: Any, model_type: str, block: int
) -> None:
    model = block_model(model_type, block, origin, logits)
    prompts = [TEXT[i : i + prompt] for i, (prompt, *_) in enumerate(rows)]
    options = [
        DecodingOptions(
            unmasking=rule, max_tokens=n, temp=temp, seed=i, **extra, **RULES[rule][(i + n) % len(RULES[rule])]
        )
        for i, (_, n, temp, extra) in enumerate(rows)
    ]
    same_as_alone(model, prompts, options)


@pytest.mark.parametrize("logits", ["in_place", "shifted"])
@pytest.mark.parametrize("origin", ["start", "prompt_end"])
def test_rows_with_sub_blocks_and_hand_overs_do_not_meet(origin: str, logits: str) -> None:
    model = block_model("qwen3", 6, origin, logits, 3)
    prompts = [TEXT[i : i + n] for i, n in enumerate((6, 1, 12, 17, 5))]
    options = [DecodingOptions(max_tokens=n, threshold=t) for n, t in ((9, 2.0), (14, 0.3), (1, 0.3), (8, 0.0), (7, 1))]
    same_as_alone(model, prompts, options)


def test_a_short_last_block_at_the_end_of_the_widest_row() -> None:
    """Its columns are fewer than those of the other row's block, and there is no canvas to the right of them."""
    for model in (block_model("qwen3", 8, "prompt_end"), block_model("qwen3", 8, context=19)):
        options = [DecodingOptions(max_tokens=n, threshold=2.0, stop_at_eos=False) for n in (3, 8)]
        first, second = same_as_alone(model, [TEXT[:16], TEXT[:4]], options)
        assert first.nfe == 3 and second.nfe >= 8


def test_rows_leave_early_and_what_they_kept_goes() -> None:
    """The row that has kept most leaves first; one that had not begun to keep stays."""
    model = block_model("qwen3", 4)
    prompts = [TEXT[:30], TEXT[:2], TEXT[:9]]
    options = [DecodingOptions(max_tokens=n, threshold=2.0, stop_at_eos=False) for n in (2, 20, 7)]
    assert [result.nfe for result in same_as_alone(model, prompts, options)] == [2, 20, 7]


@pytest.mark.parametrize("scales", [(0.0, 1.5, 0.0), (1.5, 0.5, 3.0), (0.7, 0.0, 0.0)])
@pytest.mark.parametrize("origin", ["start", "prompt_end"])
def test_guided_rows_beside_others(origin: str, scales: tuple[float, ...]) -> None:
    """Also after the guided ones have left, and with tokens that guidance does not mask."""
    model = block_model("qwen3", 4, origin)
    for lengths in ((12, 3, 8), (3, 12, 8)):
        options = [
            DecodingOptions(max_tokens=n, threshold=0.5, cfg_scale=scale, cfg_keep_tokens=keep, stop_at_eos=False)
            for n, scale, keep in zip(lengths, scales, (None, TEXT[3:5], TEXT[:1]), strict=True)
        ]
        same_as_alone(model, [TEXT[:9], TEXT[:3], TEXT[:16]], options)


FIVE = [TEXT[:3], TEXT[2:14], TEXT[4:12], TEXT[1:22]]


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_as_many_rows_as_key_value_heads(model_type: str, kv_heads: int) -> None:
    """Where a mask of the wrong rank would broadcast without an error; with guidance there are twice as many."""
    model = (
        gemma2(kv_heads)
        if model_type == "gemma2"
        else block_model("qwen3", num_attention_heads=4, num_key_value_heads=kv_heads)
    )
    for batch in (2, 4):
        options = [DecodingOptions(max_tokens=9 - 2 * i, threshold=0.4, stop_at_eos=False) for i in range(batch)]
        same_as_alone(model, FIVE[:batch], options)
        guided = [replace(own, cfg_scale=1.0 * (i % 2)) for i, own in enumerate(options)]
        same_as_alone(model, FIVE[:batch], guided)


def test_a_mask_of_the_wrong_rank_would_show() -> None:
    """The control of the test above."""
    model, options = gemma2(2), DecodingOptions(max_tokens=9, threshold=0.4, stop_at_eos=False)
    right = decode(model, FIVE[:2], options)
    model.diffusion_family = replace(model.diffusion_family, score_rank=lambda model: 4)
    assert decode(model, FIVE[:2], options) != right


def test_unlike_rows_need_a_known_rank() -> None:
    model = block_model(family=replace(FAMILY, score_rank=None))
    with pytest.raises(DiffusionError, match="one by one"):
        decode(model, FIVE[:2], DecodingOptions(max_tokens=4))
    guided = DecodingOptions(max_tokens=4, cfg_scale=1.0)
    assert decode(model, FIVE[1], guided) == decode(block_model(), FIVE[1], guided)


def test_rows_must_agree_on_the_block_length() -> None:
    model = block_model()
    with pytest.raises(DiffusionError, match="same block length, got 2, 4"):
        stream_decode(model, [TEXT[:3], TEXT[:4]], [DecodingOptions(block_length=n) for n in (2, 4)])


# What it costs.


@dataclass
class Calls:
    """Shapes of the ids of every forward, and of every mask that was built."""

    ids: list[tuple[int, ...]] = field(default_factory=list)
    masks: list[tuple[int, ...]] = field(default_factory=list)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Calls]:
    def watch(model: Any) -> Calls:
        seen, family = Calls(), model.diffusion_family
        made = BlockWindow._mask

        def hidden(model: Any, ids: mx.array, caches: list[Any]) -> mx.array:
            seen.ids.append(ids.shape)
            return family.hidden(model, ids, caches)

        def mask(*args: Any) -> mx.array | None:
            array = made(*args)
            if array is not None:
                seen.masks.append(array.shape)
            return array

        model.diffusion_family = replace(family, hidden=hidden)
        monkeypatch.setattr(BlockWindow, "_mask", mask)
        return seen

    return watch


@pytest.mark.parametrize("prompt", [5, 8, 16, 31])
@pytest.mark.parametrize("prefill", [8, 512])
def test_a_block_costs_its_denoising_forwards_and_no_more(
    calls: Callable[[Any], Calls], monkeypatch: pytest.MonkeyPatch, prompt: int, prefill: int
) -> None:
    """No forward only stores a block: the first forward of the next one does. Prefills are counted apart."""
    monkeypatch.setattr(Blocks, "PREFILL", prefill)
    model = block_model("qwen3", 8)
    seen = calls(model)
    options = DecodingOptions(unmasking="low_confidence", max_tokens=24, max_denoising_steps=4, stop_at_eos=False)
    result = decode(model, TEXT[:prompt], options)
    whole = prompt // 8 * 8
    assert result.prefills == -(-max(whole - 8, 0) // prefill)
    assert len(seen.ids) == result.nfe + result.prefills
    widths = [shape[1] for shape in seen.ids[result.prefills :]]
    per_block = Counter(commit.positions[0] // 8 for commit in result.commits)
    first = [0, *np.cumsum([per_block[block] for block in sorted(per_block)])[:-1].tolist()]
    wide = {i for i, block in zip(first, sorted(per_block), strict=True) if block > 0}
    assert widths == [16 if i in wide else 8 for i in range(result.nfe)]
    if prompt == 16:
        assert result.nfe == 3 * 4


def test_a_hand_over_costs_one_forward_per_block(calls: Callable[[Any], Calls]) -> None:
    model = block_model("qwen3", 8, logits="shifted", sub=4)
    seen = calls(model)
    result = decode(model, TEXT[:24], DecodingOptions(max_tokens=24, threshold=0.0, stop_at_eos=False))
    assert (result.nfe, result.prefills) == (3 * (1 + 2), 1)
    assert [shape[1] for shape in seen.ids] == [16, *[8] * 9]


def test_a_batch_makes_as_many_forwards_as_its_longest_row(calls: Callable[[Any], Calls]) -> None:
    model = block_model("qwen3", 4)
    seen = calls(model)
    options = [DecodingOptions(max_tokens=n, threshold=2.0, stop_at_eos=False) for n in (4, 9, 3)]
    results = decode(model, [TEXT[:4], TEXT[:23], TEXT[:9]], options)
    assert [(result.nfe, result.prefills) for result in results] == [(4, 0), (9, 1), (3, 1)]
    assert len(seen.ids) == 9 + 1 and [shape[0] for shape in seen.ids] == [3, 3, 3, 3, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("logits", ["in_place", "shifted"])
@pytest.mark.parametrize("origin", ["start", "prompt_end"])
@pytest.mark.parametrize("prefill", [1, 6, 10, 16])
def test_a_prefill_in_chunks_equals_one(
    monkeypatch: pytest.MonkeyPatch, origin: str, logits: str, prefill: int
) -> None:
    model = block_model("qwen3", 4, origin, logits)
    prompts = [TEXT[:n] for n in (40, 3, 23, 29)]
    options = DecodingOptions(max_tokens=6, threshold=0.3, stop_at_eos=False, full_logprobs=True)
    once = decode(model, prompts, options)
    monkeypatch.setattr(Blocks, "PREFILL", prefill)
    chunked = same_as_alone(model, prompts, [options] * 4)
    for row, (one, many) in enumerate(zip(once, chunked, strict=True)):
        assert [(c.positions, c.tokens) for c in many.commits] == [(c.positions, c.tokens) for c in one.commits]
        assert many.nfe == one.nfe
        for a, b in zip(many.logprobs, one.logprobs, strict=True):
            np.testing.assert_allclose(a.vector(VOCAB), b.vector(VOCAB), rtol=0, atol=TOLERANCE)
        first = len(prompts[row]) % 4 if origin == "prompt_end" else 0
        kept = max((len(prompts[row]) - first) // 4 * 4 + first - 4, 0)
        chunk = max(prefill // 4, 1) * 4
        short = first if kept else 0  # a chunk ends where a block does: the first one before it
        expected = 1 + -(-(kept - min(kept, chunk - (chunk - short) % 4)) // chunk) if kept else 0
        assert (one.prefills, many.prefills) == (kept > 0, expected)


def test_no_mask_is_as_long_and_as_wide_as_the_prompt(
    calls: Callable[[Any], Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Blocks, "PREFILL", 32)
    model, prompt = block_model("qwen3", 8, context=400), [TEXT[i % 64] for i in range(301)]
    options = DecodingOptions(max_tokens=8, threshold=0.3)
    seen = calls(model)
    decode(model, prompt, options)
    assert max(shape[-2] for shape in seen.masks) == 32
    assert 32 * 288 <= max(np.prod(shape) for shape in seen.masks) <= 32 * 304
    seen.masks.clear()
    monkeypatch.setattr(Blocks, "PREFILL", 10**6)
    decode(model, prompt, options)
    assert max(shape[-2] for shape in seen.masks) == 288  # the control: one prefill has it


LENGTHS = (512, 1024, 2048, 4096)


def quadratic_share(model: Any) -> float:
    """Of the peak memory of a decode of the longest prompt, the part that grows with the prompt's square. MLX frees
    behind the computation, so that a single peak may be too low."""
    options = DecodingOptions(max_tokens=32, threshold=0.0, stop_at_eos=False)
    peaks = []
    for length in LENGTHS:
        found = []
        for _ in range(3):
            gc.collect()
            mx.synchronize()
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            decode(model, [TEXT[i % 64] for i in range(length)], options)
            found.append(mx.get_peak_memory() - before)
        peaks.append(max(found))
    square = np.polyfit(LENGTHS, peaks, 2)[0]
    return float(square * LENGTHS[-1] ** 2 / peaks[-1])


def test_memory_grows_linearly_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is a prefill in one piece, whose mask is as long as it is wide."""
    monkeypatch.setattr(Blocks, "PREFILL", 128)  # shorter than the shortest prompt
    model = block_model(
        "qwen3", 32, context=5000, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8
    )
    assert quadratic_share(model) < 0.25
    monkeypatch.setattr(Blocks, "PREFILL", 10**6)
    assert quadratic_share(model) > 0.6


# Windows and caches.


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    length, rows = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    origins = [draw(st.integers(0, length - 1)) for _ in range(rows)]
    blocks = [draw(st.integers(0, 4)) for _ in range(rows)]
    stored = [blocks[i] * length + origins[i] if blocks[i] else 0 for i in range(rows)]
    visible = [max(n + draw(st.integers(0, 2 * length + 1)), 1) for n in stored]
    width = max(max(v - s for v, s in zip(visible, stored, strict=True)), 1) + draw(st.integers(0, 3))
    return dict(stored=stored, visible=visible, width=width, block_length=length, origins=origins)


@given(given_=windows(), rank=st.sampled_from([4, 5]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_query_sees_every_column_up_to_its_blocks_end_once(given_: dict[str, Any], rank: int) -> None:
    """Whether stored or in the window. Columns that only fill the window up see something, and nobody sees them."""
    window = BlockWindow(**given_, rank=rank)
    stored, visible, width = given_["stored"], given_["visible"], given_["width"]
    kept, rows = max(stored), len(stored)
    offsets = [end - width for end in visible]
    assert (window.offset if isinstance(window.offset, int) else window.offset.tolist()) == (
        offsets[0] if len(set(offsets)) == 1 else offsets
    )
    if window.mask is None:
        mask = np.ones((rows, width, kept + width), dtype=bool)
    else:
        assert window.mask.dtype == mx.bool_ and window.mask.ndim == rank
        assert window.mask.shape[0] in (1, rows) and window.mask.shape[1:-2] == (1,) * (rank - 3)
        mask = np.broadcast_to(np.array(window.mask).reshape(-1, width, kept + width), (rows, width, kept + width))
        assert not mask.all()
    for row in range(rows):
        length, origin, start = given_["block_length"], given_["origins"][row], visible[row] - width
        stored_block = block_of(stored[row] - 1, length, origin) if stored[row] else -1
        columns = [*range(kept), *range(start, visible[row])]
        for query in range(start, visible[row]):
            seen = [columns[key] for key in np.flatnonzero(mask[row, query - start])]
            own = block_of(query, length, origin)
            if query >= 0 and own >= stored_block:
                assert seen == [c for c in range(visible[row]) if block_of(c, length, origin) <= own]
            else:
                assert seen
            ghosts = set(np.flatnonzero(mask[row, query - start])) & set(range(stored[row], kept))
            assert not ghosts


def test_rows_that_stand_alike_share_one_mask_of_any_rank() -> None:
    """Such as the two copies of a guided row."""
    one = BlockWindow([4], [12], 8, 4, [0]).mask
    two = BlockWindow([4, 4], [12, 12], 8, 4, [0, 0]).mask
    assert one is not None and two is not None and one.shape == two.shape == (1, 1, 8, 12)
    assert mx.array_equal(one, two)


def test_a_window_that_hides_nothing_needs_no_mask() -> None:
    assert BlockWindow([8], [12], 4, 4, [0]).mask is None
    assert BlockWindow([8, 8], [12, 12], 4, 4, [0, 0]).mask is None
    assert BlockWindow([0], [3], 3, 4, [0]).mask is None
    assert BlockWindow([8], [13], 5, 4, [0]).mask is not None
    assert BlockWindow([8, 4], [12, 8], 4, 4, [0, 0]).mask is not None


@given(data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_cache_keeps_each_column_once_and_in_order(data: st.DataObject) -> None:
    """Whatever rows advance how far, and whichever of them go on."""
    names = list(range(data.draw(st.integers(1, 4))))
    stored = [0] * len(names)
    cache = BlockCache()
    assert bool(cache) and cache.offset == 0 and cache.make_mask(3) is None
    for _ in range(data.draw(st.integers(1, 5))):
        ends = [n + data.draw(st.sampled_from([0, 0, 2, 4])) for n in stored]
        visible = [max(end + data.draw(st.integers(0, 3)), 1) for end in ends]
        width = max(v - n for v, n in zip(visible, stored, strict=True)) or 1
        cache.window = BlockWindow(stored, visible, width, 2, [0] * len(names))
        new = np.stack([100 * name + np.arange(end - width, end) for name, end in zip(names, visible, strict=True)])
        keys = mx.array(new.astype(np.float32))[:, None, :, None]
        found, negative = cache.update_and_fetch(keys, -keys)
        mask = cache.make_mask(width)
        assert found.shape == (len(names), 1, max(stored) + width, 1) and mx.array_equal(found, -negative)
        assert mask is None or mask.shape[-1] == found.shape[2]
        assert mx.array_equal(found[:, :, max(stored) :], keys)
        cache.keep(ends)
        stored = ends
        check_kept(cache, names, stored)
        if data.draw(st.booleans()):
            rows = data.draw(st.lists(st.sampled_from(range(len(names))), min_size=1, unique=True).map(sorted))
            names, stored = [names[i] for i in rows], [stored[i] for i in rows]
            cache.select(rows, max(stored))
            check_kept(cache, names, stored)


def check_kept(cache: BlockCache, names: list[int], stored: list[int]) -> None:
    if not max(stored):
        assert cache.keys is None and cache.values is None
        return
    assert cache.keys is not None and cache.values is not None
    assert cache.keys.shape == cache.values.shape == (len(names), 1, max(stored), 1)
    for row, (name, count) in enumerate(zip(names, stored, strict=True)):
        own = [100 * name + column for column in range(count)]
        assert cache.keys[row, 0, :count, 0].tolist() == own
        assert cache.values[row, 0, :count, 0].tolist() == [-value for value in own]


def test_a_cache_keeps_nothing_before_it_is_told() -> None:
    cache = BlockCache()
    cache.window = BlockWindow([0], [4], 4, 4, [0])
    ones = mx.ones((1, 2, 4, 3))
    for _ in range(2):
        assert cache.update_and_fetch(ones, ones)[0].shape == (1, 2, 4, 3)
    assert cache.keys is None and not hasattr(cache, "bits") and not hasattr(cache, "__len__")
    cache.keep([4])
    cache.window = BlockWindow([4], [8], 4, 4, [0])
    assert cache.update_and_fetch(ones, ones)[0].shape == (1, 2, 8, 3) and cache.offset == 4
