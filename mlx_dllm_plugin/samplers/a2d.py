"""The two schedules of a2d checkpoints: a2d's own and mlx-dllm's. They differ in rounding (21 combinations of masks and
steps below 64), and in that mlx-dllm removes the mask id before the softmax, which raises the confidence of positions
that favoured it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from . import Candidates, Rule
from .low_confidence import token_probability


def _cumulative(masks: int, steps: int, total: Callable[[int], int]) -> list[int]:
    """Commits per step from running totals; the last step commits what is left."""
    totals = [masks if step == steps - 1 else min(max(total(step), 0), masks) for step in range(steps)]
    return [now - before for now, before in zip(totals, [0, *totals[:-1]], strict=True)]


def a2d_schedule(masks: int, steps: int, values: Mapping[str, Any]) -> list[int]:
    """round((i + 1) / K * M) committed after step i, in that order of operations (a2d's sampler)."""
    return _cumulative(masks, steps, lambda step: round((step + 1) / steps * masks))


def mlx_dllm_schedule(masks: int, steps: int, values: Mapping[str, Any]) -> list[int]:
    """round((i + 1) * M / K) committed after step i (mlx-dllm's denoise)."""
    return _cumulative(masks, steps, lambda step: round((step + 1) * masks / steps))


def tempered_probability(candidates: Candidates) -> mx.array:
    """softmax(logits / confidence_temperature) of the given tokens: [B, W]."""
    temperature = mx.maximum(candidates.values["confidence_temperature"], 1e-6)[..., None]
    return token_probability(candidates._replace(logits=candidates.logits / temperature))


A2D = Rule(
    name="a2d",
    about="a2d's own sampler: the most confident positions, round((i+1)/K*M) in all after step i",
    schedule=a2d_schedule,
    confidence=tempered_probability,
    uses=frozenset({"max_denoising_steps", "confidence_temperature"}),
    defaults={"confidence_temperature": 1.0},
)
MLX_DLLM = Rule(
    name="mlx_dllm",
    about="mlx-dllm's denoise: round((i+1)*M/K) in all after step i, the mask id removed before the softmax",
    schedule=mlx_dllm_schedule,
    confidence=token_probability,
    uses=frozenset({"max_denoising_steps"}),
    drop_mask=True,
)
