"""Commit everything the model is sure of (Fast-dLLM, dInfer, LLaDA2.0 and others use it)."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from . import Rule
from .low_confidence import GUIDED, token_probability


def above_threshold(confidence: mx.array, least: mx.array, values: Mapping[str, mx.array]) -> mx.array:
    """How many confidences exceed the threshold, at least one: [B, 1]."""
    return mx.maximum((confidence > values["threshold"]).sum(axis=1, keepdims=True), 1)


THRESHOLD = Rule(
    name="threshold",
    about="every position whose confidence exceeds the threshold, at least the best one, optionally block by block",
    confidence=token_probability,
    select=above_threshold,
    uses=GUIDED | {"threshold", "block_length", "sub_block_length"},
    defaults={"threshold": 0.9},
)
