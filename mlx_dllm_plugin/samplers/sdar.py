"""SDAR's rules, block by block: ``max_denoising_steps`` counts the steps of one block, and their schedule is that of a
whole block also where a prompt fills part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from . import Candidates, Ranking, Rule
from .low_confidence import even_schedule, token_probability

# top_k before top_p, as in SDAR's sampling.
FILTERS = ("top_k", "top_p", "min_p")


def block_schedule(masks: int, steps: int, values: Mapping[str, Any]) -> list[int]:
    """An even schedule of a whole block, as far as there are masks."""
    counts, left = [], masks
    for count in even_schedule(max(values["block"], masks), steps, values):
        counts.append(min(count, left))
        left -= counts[-1]
    return counts


def leftmost(ranking: Ranking) -> mx.array:
    """The further left, the higher: [B, W]."""
    return mx.broadcast_to(-mx.arange(ranking.free.shape[1], dtype=mx.float32), ranking.free.shape)


def dynamic(confidence: mx.array, least: mx.array, values: Mapping[str, mx.array]) -> mx.array:
    """How many confidences exceed the threshold, or the step's number if that is more: [B, 1]."""
    return mx.maximum((confidence > values["threshold"]).sum(axis=1, keepdims=True), least)


def entropy(candidates: Candidates) -> mx.array:
    """Sum of p log p: [B, W], at most 0."""
    p = mx.softmax(candidates.logits, axis=-1)
    return (p * mx.log(mx.maximum(p, 1e-30))).sum(axis=-1)


def bounded(confidence: mx.array, least: mx.array, values: Mapping[str, mx.array]) -> mx.array:
    """How many of the least entropies together stay below the bound, at least one: [B, 1]."""
    total = mx.cumsum(-confidence, axis=1)
    return mx.maximum((total < values["entropy_bound"]).sum(axis=1, keepdims=True), 1)


_USES = frozenset({"max_denoising_steps", "block_length"})

SEQUENTIAL = Rule(
    name="sequential",
    about="SDAR: from left to right, an even number per step",
    schedule=block_schedule,
    confidence=token_probability,
    rank=leftmost,
    uses=_USES,
    filters=FILTERS,
)
LOW_CONFIDENCE_STATIC = Rule(
    name="low_confidence_static",
    about="SDAR: the positions whose token is the most probable, an even number per step",
    schedule=block_schedule,
    confidence=token_probability,
    uses=_USES,
    filters=FILTERS,
)
LOW_CONFIDENCE_DYNAMIC = Rule(
    name="low_confidence_dynamic",
    about="SDAR: every position whose confidence exceeds the threshold, at least as many as an even schedule has",
    schedule=block_schedule,
    confidence=token_probability,
    select=dynamic,
    uses=_USES | {"threshold"},
    defaults={"threshold": 0.85},
    filters=FILTERS,
)
ENTROPY_BOUNDED = Rule(
    name="entropy_bounded",
    about="SDAR: the positions of least entropy, as long as the sum of their entropies stays below entropy_bound",
    confidence=entropy,
    select=bounded,
    uses=frozenset({"block_length", "entropy_bound"}),
    defaults={"entropy_bound": 0.35},
    filters=FILTERS,
)
