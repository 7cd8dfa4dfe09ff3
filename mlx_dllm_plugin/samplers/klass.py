"""KLASS (arXiv 2511.05664): commit what is sure and has stopped changing."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from . import Candidates, Memory, Ranking, Rule
from .low_confidence import token_probability
from .marks import count_marked, marked

TINY = 1e-12


def divergences(logits: mx.array, past: Memory, values: Mapping[str, mx.array]) -> Memory:
    """The distributions [B, c, V], and per position how many steps in a row moved it by less than kl_threshold
    [B, c]. KL(now || before) with 1e-12 added to both, as in d2Cache; before the first step all probabilities are 0, so
    that nothing is stable."""
    now = mx.softmax(logits, axis=-1)
    if not past:
        return now, mx.zeros(now.shape[:2])
    before, steps = past
    divergence = (now * (mx.log(now + TINY) - mx.log(before + TINY))).sum(axis=-1)
    divergence = mx.maximum(divergence, 0)  # rounding may leave it below
    return now, mx.where(divergence < values["kl_threshold"], steps + 1, 0.0)


def probability_and_steps(candidates: Candidates) -> tuple[mx.array, mx.array]:
    return token_probability(candidates), candidates.memory[1]


def stable(ranking: Ranking) -> mx.array:
    """Marks the positions that reach the threshold and have been stable for kl_history steps."""
    confidence, steps = ranking.measures
    still = steps >= ranking.values["kl_history"]
    return marked(ranking.free & still & (confidence >= ranking.values["threshold"]), confidence)


KLASS = Rule(
    name="klass",
    about="KLASS: every position that reaches the threshold and whose distribution has moved by less than kl_threshold "
    "in each of the last kl_history steps, at least the best one",
    confidence=probability_and_steps,
    memory=divergences,
    rank=stable,
    select=count_marked,
    whole_canvas=True,
    uses=frozenset({"threshold", "kl_threshold", "kl_history", "block_length", "eos_flags"}),
    defaults={"threshold": 0.9, "kl_threshold": 0.01, "kl_history": 2},
)
