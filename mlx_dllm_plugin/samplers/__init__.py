"""Commit rules: which masked positions a denoising step commits.

A rule is data: a confidence (a pure function over arrays), and how many of the most confident positions are committed:
a schedule (plain numbers, made before decoding starts) or a selection (another pure function).
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
    Select = Callable[[mx.array, mx.array], mx.array]

Schedule = Callable[[int, int], list[int]]


@dataclass(frozen=True)
class Rule:
    """
    Args:
        name: what ``--unmasking`` takes.
        about: one sentence for the documentation.
        schedule: ``(masks, steps) -> commits per step``; the sum is ``masks``. Zeros are steps without a forward.
            None when ``select`` decides.
        confidence: ``(logits [B, W, V] float32, tokens [B, W], temperature [B, 1], noise [B, W]) -> [B, W]``; the
            highest are committed. ``tokens`` are those whose probability counts, ``noise`` is uniform in [0, 1).
        select: ``(confidences [B, W], best first, minus infinity where nothing can be committed; threshold [B, 1])
            -> how many to commit [B, 1]``, at least one. None when ``schedule`` decides.
        uses: options of ``DecodingOptions`` that only some rules take and this one does.
        draws: the confidence reads ``noise``; it is zero otherwise.
        drop_mask: remove the mask id from the logits before the confidences, instead of only never choosing it.
    """

    name: str
    about: str
    schedule: Schedule | None
    confidence: Confidence
    select: Select | None = None
    uses: frozenset[str] = field(default_factory=frozenset)
    draws: bool = False
    drop_mask: bool = False


RULES: Registry[Rule] = Registry(
    "mlx_dllm.unmasking",
    "unmasking rule",
    Rule,
    {
        "low_confidence": "mlx_dllm_plugin.samplers.low_confidence:LOW_CONFIDENCE",
        "threshold": "mlx_dllm_plugin.samplers.threshold:THRESHOLD",
        "random": "mlx_dllm_plugin.samplers.low_confidence:RANDOM",
        "a2d": "mlx_dllm_plugin.samplers.a2d:A2D",
        "mlx_dllm": "mlx_dllm_plugin.samplers.a2d:MLX_DLLM",
    },
)


def users(option: str) -> list[str]:
    """The rules that take an option which not all take."""
    return [name for name in RULES.names() if option in RULES.get(name).uses]
