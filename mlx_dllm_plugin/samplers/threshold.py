"""Commit everything the model is sure of (Fast-dLLM, dInfer, LLaDA2.0 and others use it)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import mlx.core as mx

from . import Rule
from .dream import FILTERS
from .low_confidence import GUIDED, even_schedule, token_probability


def above_threshold(confidence: mx.array, least: mx.array, values: Mapping[str, mx.array]) -> mx.array:
    """How many confidences exceed the threshold, at least one: [B, 1]."""
    return mx.maximum((confidence > values["threshold"]).sum(axis=1, keepdims=True), 1)


def not_ahead(confidence: mx.array, least: mx.array, values: Mapping[str, mx.array]) -> mx.array:
    """How many confidences reach the threshold, at least one, and no more than leave the step's number of masks, which
    counts from 1: [B, 1]."""
    masks = (confidence > -mx.inf).sum(axis=1, keepdims=True)
    sure = (confidence >= values["threshold"]).sum(axis=1, keepdims=True)
    return mx.maximum(mx.minimum(sure, masks - least.astype(masks.dtype) + 1), 1)


def left_after(masks: int, steps: int, values: Mapping[str, Any]) -> list[int]:
    """One more than the masks that an even schedule leaves after each step, at least."""
    return [masks - done + 1 for done in accumulate(even_schedule(masks, steps, values))]


THRESHOLD = Rule(
    name="threshold",
    about="every position whose confidence exceeds the threshold, at least the best one, optionally block by block",
    confidence=token_probability,
    select=above_threshold,
    uses=GUIDED | {"threshold", "block_length", "sub_block_length"},
    defaults={"threshold": 0.9},
)
CONFIDENCE_THRESHOLD = Rule(
    name="confidence_threshold",
    about="Fast-dLLM for Dream, without blocks: every position that reaches the threshold, at least the best one, but "
    "never more than an even schedule of max_denoising_steps has committed by then",
    confidence=token_probability,
    schedule=left_after,
    select=not_ahead,
    uses=frozenset({"threshold", "max_denoising_steps", "block_length"}),
    defaults={"threshold": 0.9},
    filters=FILTERS,
)
