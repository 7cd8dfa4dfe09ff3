"""WINO (arXiv 2507.18578): commit widely, and mask again what does not convince once the rest is there."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from . import Doubts, Rule
from .low_confidence import token_probability
from .marks import ranks


def wide_in(confidence: mx.array, least: mx.array, values: Mapping[str, mx.array]) -> mx.array:
    """How many confidences reach the threshold, at least one and at most 0.7 of the masks, which counts as 5 to 20:
    [B, 1]."""
    masks = (confidence > -mx.inf).sum(axis=1, keepdims=True)
    most = mx.clip((masks * 7) // 10, 5, 20)
    return mx.clip((confidence >= values["threshold"]).sum(axis=1, keepdims=True), 1, most)


def narrow_out(doubts: Doubts) -> mx.array:
    """The committed positions whose stand-in falls short of narrow_out_threshold, the worst first, fewer than the step
    commits: so that every step leaves fewer masks."""
    short = doubts.committed & (doubts.confidence < doubts.values["narrow_out_threshold"])
    return short & (ranks(mx.where(short, doubts.confidence, mx.inf)) < doubts.accepted - 1)


WINO = Rule(
    name="wino",
    about="WINO: every position that reaches the threshold, at least the best one; a committed token is masked again "
    "when a mask in its place, which sees all but it, would get it with less than narrow_out_threshold",
    confidence=token_probability,
    select=wide_in,
    revise=narrow_out,
    uses=frozenset({"threshold", "narrow_out_threshold", "block_length"}),
    defaults={"threshold": 0.6, "narrow_out_threshold": 0.9},
)
