"""dInfer's rules (arXiv 2510.08666)."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from . import Candidates, Memory, Ranking, Rule
from .low_confidence import GUIDED, token_probability
from .marks import count_marked, marked

NEAR = 1e-5


def probability_and_mask(candidates: Candidates) -> tuple[mx.array, mx.array]:
    """Probability of the given tokens, and where the model prefers the mask itself: [B, W] each."""
    assert candidates.mask_ids is not None
    return token_probability(candidates), candidates.tokens == candidates.mask_ids


def nearly_best(ranking: Ranking) -> mx.array:
    """Marks what reaches the threshold, or the best confidence less 1e-5 if that is lower, but for positions where the
    model prefers the mask: those are committed when there are no others."""
    confidence, prefers_mask = ranking.measures
    able = ranking.free & ~prefers_mask
    best = mx.where(able, confidence, -mx.inf).max(axis=1, keepdims=True)
    sure = able & (confidence >= mx.minimum(ranking.values["threshold"], best - NEAR))
    return marked(sure, confidence)


def best_of_runs(ranking: Ranking) -> mx.array:
    """Marks what exceeds the threshold, and of each run of neighbouring masks the best if it exceeds low_threshold."""
    (confidence,) = ranking.measures
    sure = (confidence > ranking.values["low_threshold"]) & (confidence == _best_of_run(confidence, ranking.free))
    return marked(ranking.free & (sure | (confidence > ranking.values["threshold"])), confidence)


def _best_of_run(confidence: mx.array, free: mx.array) -> mx.array:
    """The highest confidence of the run that each free position belongs to: [B, W]. Runs are numbered from left to
    right; a number above the bits of a confidence makes a running maximum begin anew with each run."""
    starts = free & ~mx.concatenate([mx.zeros_like(free[:, :1]), free[:, :-1]], axis=1)
    run = mx.cumsum(starts.astype(mx.int64), axis=1)
    bits = mx.where(free, confidence, 0.0).astype(mx.float32).view(mx.int32).astype(mx.int64)
    low = mx.array(2**32 - 1, dtype=mx.int64)
    before = mx.cummax((run << 32) | bits, axis=1) & low
    after = mx.cummax(((run.shape[1] - run) << 32) | bits, axis=1, reverse=True) & low
    return mx.maximum(before, after).astype(mx.int32).view(mx.float32)


def credits(logits: mx.array, past: Memory, values: Mapping[str, mx.array]) -> Memory:
    """The credit of every token [B, c, V]: what is left of it after the decay, and for the most likely token its
    probability to the power credit_power."""
    decay, power = values["credit_decay"][..., None], values["credit_power"][..., None]
    best = mx.argmax(logits, axis=-1, keepdims=True)
    p = mx.exp(mx.take_along_axis(logits, best, axis=-1) - mx.logsumexp(logits, axis=-1, keepdims=True))
    credit = past[0] * decay if past else mx.zeros_like(logits)
    added = mx.take_along_axis(credit, best, axis=-1) + p**power
    return (mx.put_along_axis(credit, best, added, axis=-1),)


def with_credit(logits: mx.array, memory: Memory, values: Mapping[str, mx.array]) -> mx.array:
    """logits + credit_weight ln(1 + credit): [B, c, V]."""
    return logits + values["credit_weight"][..., None] * mx.log1p(memory[0])


_USES = GUIDED | {"threshold", "block_length", "sub_block_length"}

DINFER_THRESHOLD = Rule(
    name="dinfer_threshold",
    about="dInfer: as threshold, and positions where the model prefers the mask itself come last",
    confidence=probability_and_mask,
    rank=nearly_best,
    select=count_marked,
    uses=_USES,
    defaults={"threshold": 0.9},
)
HIERARCHY = Rule(
    name="hierarchy",
    about="dInfer: as threshold, and of each run of neighbouring masks the best position if it exceeds low_threshold",
    confidence=token_probability,
    rank=best_of_runs,
    select=count_marked,
    uses=_USES | {"low_threshold"},
    defaults={"threshold": 0.9, "low_threshold": 0.4},
)
CREDIT = Rule(
    name="credit",
    about="dInfer: as dinfer_threshold, on logits to which tokens that keep being the best add credit",
    confidence=probability_and_mask,
    memory=credits,
    logits=with_credit,
    rank=nearly_best,
    select=count_marked,
    uses=_USES | {"credit_weight", "credit_power", "credit_decay"},
    defaults={"threshold": 0.9, "credit_weight": 0.7, "credit_power": 0.2, "credit_decay": 0.8},
)
