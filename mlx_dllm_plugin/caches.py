"""Attention policy as cache objects.

Every mlx-lm model takes its mask from ``cache.make_mask``, its position offset from ``cache.offset`` and its keys and
values from ``cache.update_and_fetch``. A cache whose ``make_mask`` returns None therefore makes any of them
bidirectional, without touching the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np


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


class BlockWindow:
    """
    Where a forward of block-causal rows stands: its columns, and what they see. One object for all layers.

    A row's window is the ``width`` columns that end at its ``visible``; columns that are stored already, or that lie
    before the row, only fill it up. Rows keep their own number of stored columns.

    Args:
        stored: columns per row whose keys and values are kept.
        visible: columns per row that the model sees.
        width: columns of the window.
        block_length: of the attention.
        origins: a column per row where a block begins.
        rank: rank of the attention's scores.
    """

    def __init__(
        self,
        stored: Sequence[int],
        visible: Sequence[int],
        width: int,
        block_length: int,
        origins: Sequence[int],
        rank: int = 4,
    ):
        self.stored, self.visible, self.width = list(stored), list(visible), width
        first = np.array(visible) - width
        self.offset = int(first[0]) if len(set(first.tolist())) == 1 else mx.array(first.astype(np.int32))
        rows = list(zip(self.stored, first.tolist(), origins, strict=True))
        # Rows that stand alike share one mask, which fits scores of any rank.
        rows = rows[:1] if len(set(rows)) == 1 else rows
        own, starts, begins = np.array(rows).T
        self.mask = self._mask(own, starts, begins, block_length, rank)

    def _mask(
        self, stored: np.ndarray, first: np.ndarray, origins: np.ndarray, length: int, rank: int
    ) -> mx.array | None:
        kept = int(stored.max(initial=0))
        column = first[:, None] + np.arange(self.width)[None]  # [R, W]
        block = (column - origins[:, None]) // length
        new = column >= stored[:, None]
        inside = new[:, None, :] & (block[:, None, :] <= block[:, :, None])
        before = np.broadcast_to((np.arange(kept)[None] < stored[:, None])[:, None], (len(stored), self.width, kept))
        if inside.all() and before.all():
            return None
        # Columns that only fill the window up and see nothing see themselves, so that no softmax is empty.
        inside |= np.eye(self.width, dtype=bool)[None] & ~(new | (stored > 0)[:, None])[:, :, None]
        visible = np.concatenate([before, inside], axis=2)
        return mx.array(visible.reshape(len(stored), *([1] * (rank - 3)), self.width, kept + self.width))


class BlockCache(AttentionPolicy):
    """
    Keys and values of the blocks that are final, for block-causal attention: a forward sees them and its own window,
    and keeps nothing until :meth:`keep`. One object per layer.
    """

    def __init__(self) -> None:
        self.window: BlockWindow | None = None
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._new: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> int | mx.array:  # type: ignore[override]
        return self.window.offset if self.window is not None else 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._new = keys, values
        if self.keys is None or self.values is None:
            return keys, values
        return mx.concatenate([self.keys, keys], axis=2), mx.concatenate([self.values, values], axis=2)

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return self.window.mask if self.window is not None else None

    def keep(self, upto: Sequence[int]) -> None:
        """Store the last forward's keys and values of the columns before ``upto`` [per row]."""
        assert self.window is not None and self._new is not None
        keys, values = self._new
        self._new = None
        self.keys = self._joined(self.keys, keys, upto)
        self.values = self._joined(self.values, values, upto)

    def _joined(self, kept: mx.array | None, new: mx.array, upto: Sequence[int]) -> mx.array | None:
        window = self.window
        assert window is not None
        spans = []
        for stored, visible, end in zip(window.stored, window.visible, upto, strict=True):
            first = visible - window.width
            spans.append((stored, stored - first, max(end, stored) - first))
        if all(a == b for _, a, b in spans):
            return kept
        if len(set(spans)) == 1:
            part = new[:, :, spans[0][1] : spans[0][2]]
            return part if kept is None else mx.concatenate([kept, part], axis=2)
        longest = max(stored + b - a for stored, a, b in spans)
        rows = []
        for i, (stored, a, b) in enumerate(spans):
            parts = [] if kept is None else [kept[i : i + 1, :, :stored]]
            row = mx.concatenate([*parts, new[i : i + 1, :, a:b]], axis=2)
            rows.append(mx.pad(row, [(0, 0), (0, 0), (0, longest - row.shape[2]), (0, 0)]))
        return mx.concatenate(rows, axis=0)

    def select(self, rows: Sequence[int], longest: int) -> None:
        """Leave only these rows, which have at most ``longest`` stored columns."""
        at = mx.array(list(rows))
        self.keys = None if self.keys is None or not longest else self.keys[at, :, :longest]
        self.values = None if self.values is None or not longest else self.values[at, :, :longest]
