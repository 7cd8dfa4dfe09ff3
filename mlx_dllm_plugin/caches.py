"""Attention policy as cache objects.

Every mlx-lm model takes its mask from ``cache.make_mask``, its position offset from ``cache.offset`` and its keys and
values from ``cache.update_and_fetch``. A cache whose ``make_mask`` returns None therefore makes any of them
bidirectional, without touching the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


class AttentionPolicy:
    """What mlx-lm's models expect of a cache, and the two traps: a falsy cache is silently causal, and one with
    ``bits`` switches the model to quantized attention."""

    offset: int | mx.array = 0

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "bits") or hasattr(cls, "__len__"):
            raise TypeError(f"{cls.__name__} must define neither `bits` nor `__len__`: both change the attention.")

    def __bool__(self) -> bool:
        return True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        raise TypeError(f"{type(self).__name__} must define update_and_fetch.")

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        raise TypeError(f"{type(self).__name__} must define make_mask.")


class FullCanvas(AttentionPolicy):
    """The reference path: the whole canvas is recomputed in every step and every position sees every position.

    Args:
        padding: columns of left padding per row, or None when no row has any. Padded columns are hidden as keys and
            each row's positions count from its own first token.
        width: columns of the canvas, padding included.
        rank: rank of the scores in the model's attention: 4, or 5 for gemma2 (a rank-4 mask broadcasts wrongly
            there when the batch equals the number of key-value heads).
    """

    def __init__(self, padding: Sequence[int] | None = None, width: int = 0, rank: int = 4):
        self._mask: mx.array | None = None
        if padding is not None and any(padding):
            pad = mx.array(list(padding), dtype=mx.int32)
            self.offset = -pad
            visible = mx.arange(width)[None] >= pad[:, None]
            self._mask = visible.reshape(len(padding), *([1] * (rank - 2)), width)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return self._mask
