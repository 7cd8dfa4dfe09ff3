"""LocalLeap (arXiv 2510.07081): near sure positions, less sure ones are right too."""

from __future__ import annotations

import mlx.core as mx

from . import Ranking, Rule
from .low_confidence import GUIDED, token_probability
from .marks import count_marked, marked


def near_sure_ones(ranking: Ranking) -> mx.array:
    """Marks what reaches the threshold, and within ``radius`` of that what reaches relaxed_threshold."""
    (confidence,) = ranking.measures
    sure = ranking.free & (confidence >= ranking.values["threshold"])
    column = mx.arange(confidence.shape[1], dtype=mx.float32)[None]
    left = column - mx.cummax(mx.where(sure, column, -mx.inf), axis=1)
    right = mx.cummin(mx.where(sure, column, mx.inf), axis=1, reverse=True) - column
    near = mx.minimum(left, right) <= ranking.values["radius"]
    return marked(ranking.free & near & (confidence >= ranking.values["relaxed_threshold"]) | sure, confidence)


LOCAL_LEAP = Rule(
    name="local_leap",
    about="LocalLeap: every position that reaches the threshold, those near it that reach relaxed_threshold, at least "
    "the best one",
    confidence=token_probability,
    rank=near_sure_ones,
    select=count_marked,
    uses=GUIDED | {"threshold", "relaxed_threshold", "radius", "block_length", "sub_block_length"},
    defaults={"threshold": 0.9, "relaxed_threshold": 0.75, "radius": 4},
)
