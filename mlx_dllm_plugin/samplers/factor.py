"""Fast-dLLM's factor rule: the surer the n-th position is, the more may be committed with it."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from . import Rule
from .low_confidence import GUIDED, token_probability


def within_factor(confidence: mx.array, least: mx.array, values: Mapping[str, mx.array]) -> mx.array:
    """The largest n with (n + 1)(1 - confidence of the n-th) < factor, at least one: [B, 1]. The left side never falls
    with n."""
    n = mx.arange(1, confidence.shape[1] + 1)
    return mx.maximum(((n + 1) * (1 - confidence) < values["factor"]).sum(axis=1, keepdims=True), 1)


def within_factor_or_all(confidence: mx.array, least: mx.array, values: Mapping[str, mx.array]) -> mx.array:
    """How many of the surest reach 1 - factor / (n + 1), at least one; when that is all but the last, that one is
    committed too: [B, 1]."""
    n = mx.arange(1, confidence.shape[1] + 1)
    reach = confidence >= 1 - values["factor"] / (n + 1)
    count = mx.maximum(reach.sum(axis=1, keepdims=True), 1)
    masks = (confidence > -mx.inf).sum(axis=1, keepdims=True)
    return mx.where(count == masks - 1, masks, count)


_USES = GUIDED | {"factor", "block_length", "sub_block_length"}

FACTOR = Rule(
    name="factor",
    about="Fast-dLLM's factor as its paper has it: the n surest positions, as long as (n + 1)(1 - confidence of the "
    "n-th) is less than the factor",
    confidence=token_probability,
    select=within_factor,
    uses=_USES,
    defaults={"factor": 1.0},
)
FAST_DLLM_FACTOR = Rule(
    name="fast_dllm_factor",
    about="Fast-dLLM's factor as its code has it: when all but the last position qualify, that one is committed too",
    confidence=token_probability,
    select=within_factor_or_all,
    uses=_USES,
    defaults={"factor": 1.0},
)
