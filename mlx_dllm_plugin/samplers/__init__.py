"""Commit rules: which masked positions a denoising step commits.

A rule is data: a schedule (plain numbers, made before decoding starts) and a confidence (a pure function over arrays).
The loop in ``decode.py`` does the rest. A package adds one with an entry point in the group ``mlx_dllm.unmasking``
whose object is a :class:`Rule` of the entry point's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..registry import Registry

if TYPE_CHECKING:
    import mlx.core as mx

    Confidence = Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]

Schedule = Callable[[int, int], list[int]]


@dataclass(frozen=True)
class Rule:
    """
    Args:
        name: what ``--unmasking`` takes.
        about: one sentence for the documentation.
        schedule: ``(masks, steps) -> commits per step``; the sum is ``masks``. Zeros are steps without a forward.
        confidence: ``(logits [B, W, V] float32, tokens [B, W], temperature [B, 1], noise [B, W]) -> [B, W]``; the
            highest are committed. ``tokens`` are those whose probability counts, ``noise`` is uniform in [0, 1).
        uses: options of ``DecodingOptions`` that only some rules take and this one does.
        draws: the confidence reads ``noise``; it is zero otherwise.
        drop_mask: remove the mask id from the logits before the confidences, instead of only never choosing it.
    """

    name: str
    about: str
    schedule: Schedule
    confidence: Confidence
    uses: frozenset[str] = field(default_factory=frozenset)
    draws: bool = False
    drop_mask: bool = False


RULES: Registry[Rule] = Registry(
    "mlx_dllm.unmasking",
    "unmasking rule",
    Rule,
    {
        "low_confidence": "mlx_dllm_plugin.samplers.low_confidence:LOW_CONFIDENCE",
        "random": "mlx_dllm_plugin.samplers.low_confidence:RANDOM",
        "a2d": "mlx_dllm_plugin.samplers.a2d:A2D",
        "mlx_dllm": "mlx_dllm_plugin.samplers.a2d:MLX_DLLM",
    },
)
