"""Prophet (arXiv 2508.19982): models often know the answer long before the last step."""

from __future__ import annotations

import mlx.core as mx

from . import Candidates, Ranking, Rule
from .low_confidence import LOW_CONFIDENCE, even_schedule, token_probability
from .marks import count_marked, marked


def probability_and_gap(candidates: Candidates) -> tuple[mx.array, mx.array]:
    """Probability of the given tokens, and how far the best logit leads the second best: [B, W] each."""
    best = mx.topk(candidates.logits, 2, axis=-1)
    return token_probability(candidates), mx.abs(best[..., 1] - best[..., 0])


def all_when_sure(ranking: Ranking) -> mx.array:
    """Marks every mask once their mean gap reaches the bound: ``gap`` before a third of the positions is committed,
    two thirds of it before two thirds are (Prophet's 7.5, 5.0 and 2.5), then a third."""
    confidence, gap = ranking.measures
    masks = ranking.free.sum(axis=1, keepdims=True)
    mean = mx.where(ranking.free, gap, 0.0).sum(axis=1, keepdims=True) / mx.maximum(masks, 1)
    done = 1 - masks / ranking.total
    share = mx.where(done < 0.33, 1.0, mx.where(done < 0.67, 2 / 3, 1 / 3))
    return marked(ranking.free & (mean >= ranking.values["gap"] * share), confidence)


PROPHET = Rule(
    name="prophet",
    about="Prophet: as low_confidence, and all masks of the canvas (or block) at once as soon as the best tokens lead "
    "the second best by enough on average",
    confidence=probability_and_gap,
    schedule=even_schedule,
    rank=all_when_sure,
    select=count_marked,
    uses=LOW_CONFIDENCE.uses | {"gap"},
    defaults={"gap": 7.5},
)
