"""LLaDA's rules: keep the most confident positions (the others stay masked), or random ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from . import Candidates, Rule

GUIDED = frozenset({"cfg_scale", "cfg_keep_tokens", "eos_flags"})


def share(total: Any, parts: Any, number: Any) -> Any:
    """What one of several parts gets of a total, of integers or arrays of them: the quotient, and one more in as many
    of the first parts as are left over (LLaDA's get_num_transfer_tokens)."""
    return total // parts + (number < total % parts)


def even_schedule(masks: int, steps: int, values: Mapping[str, Any]) -> list[int]:
    """The masks shared among the steps."""
    return [share(masks, steps, step) for step in range(steps)]


def token_probability(candidates: Candidates) -> mx.array:
    """softmax(logits) of the given tokens: [B, W]."""
    logits, tokens = candidates.logits, candidates.tokens
    chosen = mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return mx.exp(chosen - mx.logsumexp(logits, axis=-1))


def random_order(candidates: Candidates) -> mx.array:
    """Uniform numbers, whatever the model says: [B, W]."""
    return candidates.noise


LOW_CONFIDENCE = Rule(
    name="low_confidence",
    about="LLaDA: the most confident positions, an even number per step, optionally block by block",
    schedule=even_schedule,
    confidence=token_probability,
    uses=GUIDED | {"max_denoising_steps", "block_length"},
)
RANDOM = Rule(
    name="random",
    about="LLaDA: random positions, an even number per step, optionally block by block",
    schedule=even_schedule,
    confidence=random_order,
    uses=GUIDED | {"max_denoising_steps", "block_length"},
    draws=lambda values: True,
)
