"""The EB-sampler (arXiv 2505.24857): a bound on how much the committed positions can depend on each other."""

from __future__ import annotations

import mlx.core as mx

from . import Candidates, Ranking, Rule
from .low_confidence import GUIDED, token_probability
from .marks import count_marked, marked


def probability_and_entropy(candidates: Candidates) -> tuple[mx.array, mx.array]:
    """Probability of the given tokens, and the entropy of each position in nats: [B, W] each."""
    logits = candidates.logits
    p = mx.softmax(logits, axis=-1)
    inner = mx.where(p > 0, p * (logits - mx.logsumexp(logits, axis=-1, keepdims=True)), 0.0)
    return token_probability(candidates), -inner.sum(axis=-1)


def bounded_run(ranking: Ranking) -> mx.array:
    """Marks the surest positions, as many as keep the sum of their entropies less the largest of them within the bound
    (there is always one: a single entropy less itself is 0)."""
    confidence, entropy = ranking.measures
    order = mx.argsort(-mx.where(ranking.free, confidence, -mx.inf), axis=1)
    sorted_entropy = mx.take_along_axis(entropy, order, axis=1)
    spread = mx.cumsum(sorted_entropy, axis=1) - mx.cummax(sorted_entropy, axis=1)
    run = mx.put_along_axis(mx.zeros(spread.shape, dtype=mx.bool_), order, spread <= ranking.values["entropy_bound"], 1)
    return marked(run & ranking.free, confidence)


EB = Rule(
    name="eb",
    about="EB-sampler: the surest positions, as long as the sum of their entropies without the largest stays within "
    "entropy_bound",
    confidence=probability_and_entropy,
    rank=bounded_run,
    select=count_marked,
    uses=GUIDED | {"entropy_bound", "block_length", "sub_block_length"},
    defaults={"entropy_bound": 0.1},
)
