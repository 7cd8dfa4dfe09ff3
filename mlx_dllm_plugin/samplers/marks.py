"""Rules that decide which positions to commit, and not only how many: what is to be committed is marked, and ranks
above everything else."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

MARK = 2.0  # more than any probability


def marked(mark: mx.array, confidence: mx.array) -> mx.array:
    """Probabilities [B, W], those of marked positions raised above all others."""
    return mx.where(mark, confidence + MARK, confidence)


def count_marked(confidence: mx.array, least: mx.array, values: Mapping[str, mx.array]) -> mx.array:
    """How many are marked, or the step's number if that is more: [B, 1]."""
    return mx.maximum((confidence >= MARK).sum(axis=1, keepdims=True), least)


def ranks(values: mx.array) -> mx.array:
    """Per row the place of each value in ascending order, from 0: [B, W]."""
    return mx.argsort(mx.argsort(values, axis=1), axis=1)
