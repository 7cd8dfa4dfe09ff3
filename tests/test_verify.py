"""`mlx-dllm verify`: what differs from the reference is found, and found in the part that makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_dllm_plugin import DiffusionError, layerwise
from mlx_dllm_plugin.models import llada2_moe
from mlx_dllm_plugin.probes import canvases
from mlx_dllm_plugin.verify.compare import Comparison, compare
from mlx_dllm_plugin.verify.trace import Stage, Trace
from tests.test_layerwise import lazy

MOE = "block/llada2_moe-v22"


class Recorded(layerwise.Watch):
    """A trace of a model of this package: what it is compared with is itself, with or without a fault."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.experts: np.ndarray | None = None

    def add(self, states: mx.array) -> mx.array:
        self.stages.append(Stage(np.array(states[0].astype(mx.float32)), (1e-6, 1e-7), self.experts))
        self.experts = None
        return states

    def enters(self, number: int, states: mx.array) -> mx.array:
        return states if number else self.add(states)

    def leaves(self, number: int, states: mx.array) -> mx.array:
        return self.add(states)

    def chooses(self, number: int, experts: mx.array) -> None:
        self.experts = np.array(experts[0])

    def ends(self, states: mx.array) -> mx.array:
        return self.add(states)


def recorded(path: Path, ids: list[int]) -> Trace:
    watch = Recorded()
    logits = layerwise.forward(lazy(path), mx.array([ids]), watch)
    embedding, *layers, norm = watch.stages
    return Trace("itself", embedding, tuple(layers), norm, Stage(np.array(logits[0]), (1e-6, 1e-7)))


def compared(path: Path, spoil: Callable[[Any], None] = lambda model: None, **how: Any) -> Comparison:
    """A checkpoint's model, spoilt, against the trace of the sound one."""
    model = lazy(path)
    spec = model.diffusion_spec
    rows, masked = canvases(spec, spec.mask_token_id or 0, rows=1)
    trace = recorded(path, rows[0].tolist())
    spoil(model)
    return compare(model, rows[0].tolist(), masked[0].tolist(), trace, **how)


def wrong(result: Comparison) -> list[str]:
    return [part.name for part in result.parts if part.problem]


@pytest.mark.parametrize("name", ["a2d/gpt2-grow/run", "llada_dream/dream-tiny", "block/sdar-b4", MOE])
def test_a_model_equals_itself(name: str, goldens: Path) -> None:
    result = compared(goldens / name)
    layers = [f"layer {i}" for i in range(len(result.parts) - 3)]
    assert [part.name for part in result.parts] == ["embedding", *layers, "norm", "head"]
    assert result.problems == () and result.agreeing == result.masked == 32
    assert result.drift < 1e-4
    for part in result.parts:
        assert part.error[0] <= 1e-5 and part.allowed[0] > 2.9e-5
        assert part.experts == (1.0 if name == MOE and part.name in ("layer 1", "layer 2") else None)


def transposed(model: Any) -> None:
    layer = model.layers[1].self_attn.o_proj
    layer.weight = layer.weight.T


class Nothing(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        return x


def no_norm(model: Any) -> None:
    model.layers[2].self_attn.q_norm = Nothing()


def wrong_rope(model: Any) -> None:
    model.layers[0].self_attn.rope.base = 5000.0


def wrong_eps(model: Any) -> None:
    model.model.norm.eps = 1e-2


def wrong_head(model: Any) -> None:
    model.lm_head.weight = model.lm_head.weight + 1e-3


def wrong_embedding(model: Any) -> None:
    weight = model.model.embed_tokens.weight
    model.model.embed_tokens.weight = mx.concatenate([weight[1:], weight[:1]])


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (transposed, ["layer 1"]),
        (no_norm, ["layer 2"]),
        (wrong_rope, ["layer 0"]),
        (wrong_eps, ["norm"]),
        (wrong_head, ["head"]),
        (wrong_embedding, ["embedding"]),
    ],
)
def test_a_fault_is_found_where_it_is(spoil: Callable[[Any], None], where: list[str], goldens: Path) -> None:
    result = compared(goldens / "block/sdar-b4", spoil)
    assert wrong(result) == where
    assert len(result.problems) == 1 and result.problems[0].startswith(f"{where[0]}: it differs by ")
    assert "is allowed" in result.problems[0]
    assert result.drift > 1e-3  # the second row meets the fault too


def test_a_small_fault_is_one(goldens: Path) -> None:
    """The gelu of tanh for the exact one: the smallest mistake that was ever made here."""

    def exact_gelu(model: Any) -> None:
        for layer in model.layers[1:2]:
            kind = type(layer.mlp)

            class Exact(kind):  # type: ignore[misc, valid-type]
                def __call__(self, x: mx.array) -> mx.array:
                    return self.down_proj(nn.gelu(self.gate_proj(x)) * self.up_proj(x))

            layer.mlp.__class__ = Exact

    assert wrong(compared(goldens / "a2d/gemma-grow/run", exact_gelu)) == ["layer 1"]


def test_a_small_fault_everywhere_is_seen_in_the_mean(goldens: Path) -> None:
    """An epsilon a little too large: no single number is far off."""

    def other_epsilon(model: Any) -> None:
        model.layers[0].input_layernorm.eps = model.layers[0].input_layernorm.eps + 5e-7

    result = compared(goldens / "llada_dream/llada-gqa-tiny", other_epsilon)
    assert wrong(result) == ["layer 0"] and result.parts[1].error[0] < result.parts[1].allowed[0]
    assert "in the mean" in result.problems[0]


def test_wrong_routing_is_found_in_its_layer(goldens: Path) -> None:
    def grouped(model: Any) -> None:
        args = dataclasses.replace(model.args, expert_capacity=0, n_group=1, topk_group=1)
        model.layers[2].mlp.gate.args = args

    result = compared(goldens / MOE, grouped)
    assert wrong(result) == ["layer 2"]
    part = result.parts[3]
    assert part.experts is not None and part.experts < 0.95
    assert f"layer 2: {part.experts:.1%} of the tokens have the reference's experts" in result.problems


def test_wrong_weights_of_the_right_experts_are_found(goldens: Path) -> None:
    """The bias in the weights and not only in the choice."""

    def scaled(model: Any) -> None:
        model.layers[1].mlp.gate.args = dataclasses.replace(model.args, routed_scaling_factor=2.4)

    result = compared(goldens / MOE, scaled)
    assert wrong(result) == ["layer 1"] and result.parts[2].experts == 1.0


@pytest.mark.parametrize(("tokens", "where"), [([5], []), ([5, 9], ["layer 1", "layer 2"])])
def test_tokens_with_other_experts_are_left_out_of_the_error(
    tokens: list[int], where: list[str], goldens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of 64 that rounds to another side of a tie is no fault; two are."""
    real = llada2_moe.block_routing

    def one_other(*args: Any, **kwargs: Any) -> Any:
        ids, weights = real(*args, **kwargs)
        changed = mx.array(np.isin(np.arange(ids.shape[1])[None, :, None], tokens))
        return mx.where(changed, (ids + 1) % 8, ids), weights

    model = lazy(goldens / MOE)
    spec = model.diffusion_spec
    rows, masked = canvases(spec, spec.mask_token_id, rows=1)
    trace = recorded(goldens / MOE, rows[0].tolist())
    monkeypatch.setattr(llada2_moe, "block_routing", one_other)
    result = compare(model, rows[0].tolist(), masked[0].tolist(), trace)
    assert wrong(result) == where and result.parts[2].experts == pytest.approx(1 - len(tokens) / 64)
    assert result.drift > 1e-3


@pytest.mark.parametrize(("by", "which"), [(1, "the position before"), (-1, "the next position")])
def test_logits_one_off_are_found_and_named(by: int, which: str, goldens: Path) -> None:
    def shifted(model: Any) -> None:
        head = model.diffusion_family.head
        roll = lambda model, states: mx.roll(head(model, states), by, axis=1)  # noqa: E731
        model.diffusion_family = dataclasses.replace(model.diffusion_family, head=roll)

    result = compared(goldens / "llada_dream/dream-tiny", shifted)
    assert wrong(result) == ["head"] and result.problems[0].endswith(f"; it is that of {which}")


def test_positions_one_off_are_found_in_the_embedding(goldens: Path) -> None:
    def off(model: Any) -> None:
        weight = model.model.wpe.weight
        model.model.wpe.weight = mx.concatenate([weight[1:], weight[:1]])

    assert wrong(compared(goldens / "a2d/gpt2-grow/run", off)) == ["embedding"]


def test_no_numbers_are_a_problem(goldens: Path) -> None:
    def broken(model: Any) -> None:
        model.layers[1].mlp.down_proj.weight = model.layers[1].mlp.down_proj.weight * mx.nan

    result = compared(goldens / "block/sdar-b4", broken)
    assert wrong(result) == ["layer 1"] and result.parts[2].error[0] == float("inf")


def test_another_shape_is_another_model(goldens: Path) -> None:
    model = lazy(goldens / "block/sdar-b4")
    spec = model.diffusion_spec
    rows, masked = canvases(spec, spec.mask_token_id, rows=1)
    trace = recorded(goldens / "block/sdar-b4", rows[0].tolist())
    cut = dataclasses.replace(trace, head=Stage(trace.head.states[:, :-1]))
    with pytest.raises(DiffusionError, match="another model: its head makes .64, 351. numbers, and .64, 352. here"):
        compare(model, rows[0].tolist(), masked[0].tolist(), cut)
    shallow = dataclasses.replace(trace, layers=trace.layers[:-1])
    with pytest.raises(DiffusionError, match="another model: it has 2 layers, and 3 here"):
        compare(lazy(goldens / "block/sdar-b4"), rows[0].tolist(), masked[0].tolist(), shallow)


def test_the_tolerance_is_a_multiple_of_the_references_rounding(goldens: Path) -> None:
    def little(model: Any) -> None:
        model.lm_head.weight = model.lm_head.weight * (1 + 2e-5)

    path = goldens / "block/sdar-b4"
    assert wrong(compared(path, little)) == ["head"]
    assert wrong(compared(path, little, tolerance=10000)) == []
    few, many = (compared(path, tolerance=n) for n in (10, 100))
    for part, other in zip(few.parts, many.parts, strict=True):
        assert other.allowed[0] >= part.allowed[0] >= 0.9e-5


def test_shifted_logits_are_read_where_they_predict(goldens: Path) -> None:
    """Only the position before a masked one matters for its token."""
    path = goldens / "llada_dream/dream-tiny"
    model = lazy(path)
    spec = model.diffusion_spec
    rows, masked = canvases(spec, spec.mask_token_id, rows=1)
    ids, marks = rows[0].tolist(), masked[0].tolist()
    trace = recorded(path, ids)
    at = next(i for i in range(2, 60) if marks[i] and not marks[i + 1])

    def agreeing(position: int) -> int:
        states = trace.head.states.copy()
        states[position, states[position].argmin()] = states[position].max() + 100
        return compare(lazy(path), ids, marks, dataclasses.replace(trace, head=Stage(states))).agreeing

    assert agreeing(at - 1) == 31 and agreeing(at) == 32


def test_canvases(goldens: Path) -> None:
    spec = lazy(goldens / MOE).diffusion_spec
    ids, masked = canvases(spec, 320, rows=3, columns=50)
    assert ids.shape == masked.shape == (3, 32)  # whole blocks
    assert (masked.sum(axis=1) == 16).all() and (ids[masked] == 320).all()
    assert not (masked[0] == masked[1]).all() and not masked[:, 0].any()
    again, _ = canvases(spec, 320, rows=3, columns=50)
    other, _ = canvases(spec, 320, rows=3, columns=50, seed=1)
    assert (ids == again).all() and not (ids == other).all()
    short = dataclasses.replace(spec, context_length=33)
    assert canvases(short, 320)[0].shape == (4, 32)
    with pytest.raises(ValueError, match="32 columns here or more, for one whole block: got 20"):
        canvases(spec, 320, columns=20)
    with pytest.raises(ValueError, match="at most the 33 columns of the context here, got 34"):
        canvases(short, 320, columns=34)


def test_canvases_are_whole_blocks_within_the_context() -> None:
    tokenizer = SimpleNamespace(encode=lambda text, **how: list(range(20, 50)))
    given: dict[str, Any] = dict(mask_token_id=3, vocab_size=40, logits="in_place", edit_token_ids=None, sources={})
    for attention, block, context, columns in (
        ("bidirectional", 32, 128, 64),
        ("bidirectional", 32, 20, 20),
        ("block_causal", 24, 128, 48),
        ("block_causal", 96, 128, 96),
    ):
        spec: Any = SimpleNamespace(
            **given,
            attention=attention,
            context_length=context,
            defaults={"block_length": block},
            routing_block=None,
        )
        ids, masked = canvases(spec, 3, tokenizer)
        assert ids.shape == (4, columns) and ids[~masked].max() < 40 and (masked.sum(1) == columns // 2).all()
    strange = SimpleNamespace(encode=lambda text, **how: [70])
    with pytest.raises(DiffusionError, match="makes no token of the text"):
        canvases(spec, 3, strange)
