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


class CanvasWindow:
    """
    Which columns of a canvas a forward computes, for which rows, and what they see. One object for all layers.

    A forward may carry shadows (WINO): its rows a second time, with masks in some columns. Nothing sees those but they
    each other; each sees all of the row but the column it stands in for.

    Args:
        padding: columns of left padding of each row of the batch.
        width: columns of the canvas, padding included.
        window: the columns (first, last + 1) that the forward computes.
        rows: which rows of the batch; None: all.
        shadows: per row the columns (first, last + 1) of its shadows, if it has any.
        rank: rank of the attention's scores.
    """

    def __init__(
        self,
        padding: Sequence[int],
        width: int,
        window: tuple[int, int],
        rows: Sequence[int] | None = None,
        shadows: Sequence[tuple[int, int]] | None = None,
        rank: int = 4,
    ):
        self.start, self.end = window
        self.rows = None if rows is None else mx.array(list(rows))
        self.shadow: tuple[int, int] | None = None  # from the first of all shadows to the last
        own = list(padding) if rows is None else [padding[i] for i in rows]
        seen = FullCanvas(own, width, rank).make_mask(width)
        self.mask = seen
        if shadows is not None:
            self.shadow = min(first for first, _ in shadows), max(last for _, last in shadows)
            self.mask = self._shadow_mask(seen, width, np.array(shadows), rank)
            own = [*own, *own]
        self.offset = self.start - mx.array(own, dtype=mx.int32) if any(own) else self.start

    def _shadow_mask(self, seen: mx.array | None, width: int, shadows: np.ndarray, rank: int) -> mx.array:
        """[2 * rows, 1, columns, width + shadow columns]: what rows and then their shadows see."""
        assert self.shadow is not None
        rows, between = len(shadows), [1] * (rank - 3)
        query, key = np.arange(self.start, self.end)[None, :, None], np.arange(width)[None, None]
        first, last = (shadows[:, i, None, None] for i in (0, 1))
        stands_in = (query >= first) & (query < last)
        column = np.arange(*self.shadow)[None, None]
        theirs = mx.array((stands_in & (column >= first) & (column < last)).reshape(rows, *between, query.size, -1))
        own = mx.array((stands_in & (query == key)).reshape(rows, *between, query.size, width))
        real = mx.ones(own.shape, dtype=mx.bool_) if seen is None else mx.broadcast_to(seen, own.shape)
        above = mx.concatenate([real, mx.zeros_like(theirs)], axis=-1)
        below = mx.concatenate([real & ~own, theirs], axis=-1)
        return mx.concatenate([above, below])


class WindowCache(AttentionPolicy):
    """
    Keys and values of a whole canvas, of which a forward recomputes a window and sees the rest as it was. A window that
    reaches to the canvas's end is Fast-dLLM's prefix cache, one over a block its dual cache. One object per layer.

    Args:
        rows, width: of the batch's canvas.
        keeps: store keys and values; otherwise every forward has to compute the whole canvas.
    """

    def __init__(self, rows: int, width: int, *, keeps: bool = True):
        self.count, self.width, self.keeps = rows, width, keeps
        self.window: CanvasWindow | None = None
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> int | mx.array:  # type: ignore[override]
        return self.window.offset if self.window is not None else 0

    @property
    def start(self) -> int:
        """The column of the first query, which left padding does not move."""
        return self.window.start if self.window is not None else 0

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return self.window.mask if self.window is not None else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        window = self.window
        if window is None or window.shadow is None:
            return self._fetch(keys, values)
        (keys, keys_below), (values, values_below) = mx.split(keys, 2), mx.split(values, 2)
        keys, values = self._fetch(keys, values)
        first, last = (column - window.start for column in window.shadow)
        return (
            mx.tile(mx.concatenate([keys, keys_below[:, :, first:last]], axis=2), (2, 1, 1, 1)),
            mx.tile(mx.concatenate([values, values_below[:, :, first:last]], axis=2), (2, 1, 1, 1)),
        )

    def _fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rows = self.window.rows if self.window is not None else None
        if keys.shape[2] == self.width:
            if self.keeps:
                self.keys, self.values = self._stored(self.keys, keys, rows), self._stored(self.values, values, rows)
            return keys, values
        assert self.keys is not None and self.values is not None  # a stage begins with the whole canvas
        # In place where all rows take part: what a window overwrites it computes anew until all is computed again.
        whole = (self.keys, self.values) if rows is None else (self.keys[rows], self.values[rows])
        for kept, new in zip(whole, (keys, values), strict=True):
            kept[:, :, self.start : self.start + new.shape[2]] = new
        return whole

    def _stored(self, kept: mx.array | None, new: mx.array, rows: mx.array | None) -> mx.array:
        if rows is None:
            return new
        if kept is None:
            kept = mx.zeros((self.count, *new.shape[1:]), dtype=new.dtype)
        kept[rows] = new
        return kept

    def take_over(self, other: WindowCache, rows: Sequence[int], dropped: int) -> None:
        """Take what another one stored of these rows, without its first ``dropped`` columns."""
        if other.keys is not None and other.values is not None:
            at = mx.array(list(rows))
            self.keys, self.values = other.keys[at, :, dropped:], other.values[at, :, dropped:]


class PartOfBlock:
    """The columns of a forward of part of one row's block: they see all that is stored and the whole block."""

    mask: mx.array | None = None

    def __init__(self, start: int, end: int):
        self.offset, self.end = start, end


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
    and keeps nothing until :meth:`keep`. Of a block that is computed in parts, ``inside`` are the keys and values of
    all its columns when it was last computed as a whole. One object per layer.

    They stand in arrays with room to spare, in which a window is written behind what is stored: a long prefix is not
    copied in every forward, and a window that stays is where it belongs already.
    """

    ROOM = 256  # columns by which the arrays grow

    def __init__(self) -> None:
        self.window: BlockWindow | PartOfBlock | None = None
        self.size = 0  # columns that are stored, of the row that has most
        self.inside: tuple[mx.array, mx.array] | None = None
        self.inside_end = 0  # the column where that block ends
        self._stored: list[mx.array] = []  # keys and values [B, H, room, D]
        self._new: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> int | mx.array:  # type: ignore[override]
        return self.window.offset if self.window is not None else 0

    @property
    def keys(self) -> mx.array | None:
        """Stored keys [B, H, size, D], or None."""
        return self._stored[0][:, :, : self.size] if self.size else None

    @property
    def values(self) -> mx.array | None:
        """Stored values, as the keys."""
        return self._stored[1][:, :, : self.size] if self.size else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if isinstance(self.window, PartOfBlock):
            assert self.inside is not None
            first = self.inside_end - self.inside[0].shape[2]
            a, b = self.window.offset - first, self.window.end - first
            keys, values = (
                mx.concatenate([old[:, :, :a], new, old[:, :, b:]], axis=2)
                for old, new in zip(self.inside, (keys, values), strict=True)
            )
        else:
            self._new = keys, values
        if not self.size:
            return keys, values
        end = self.size + keys.shape[2]
        self._make_room((keys, values), end)
        for stored, new in zip(self._stored, (keys, values), strict=True):
            stored[:, :, self.size : end] = new
        return self._stored[0][:, :, :end], self._stored[1][:, :, :end]

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return self.window.mask if self.window is not None else None

    def keep(self, upto: Sequence[int], inside: bool = False) -> None:
        """Store the last forward's keys and values of the columns before ``upto`` [per row]; with ``inside`` remember
        the others of its only row, until the next such forward."""
        window = self.window
        assert isinstance(window, BlockWindow) and self._new is not None
        new, self._new = self._new, None
        first = max(upto[0], window.stored[0]) - window.visible[0]
        self.inside = (new[0][:, :, first:], new[1][:, :, first:]) if inside and first < 0 else None
        self.inside_end = window.visible[0]
        # Per row: where its new columns are to stand, and from where to where they are in the window.
        spans = [
            (stored, stored - visible + window.width, max(end, stored) - visible + window.width)
            for stored, visible, end in zip(window.stored, window.visible, upto, strict=True)
        ]
        size = max(stored + b - a for stored, a, b in spans)
        in_place = self.size and all(stored == self.size and a == 0 for stored, a, _ in spans)
        if not in_place and any(b > a for _, a, b in spans):
            self._make_room(new, size)
            alike = len(set(spans)) == 1
            for rows, (at, a, b) in [(slice(None), spans[0])] if alike else _each(spans):
                for stored, values in zip(self._stored, new, strict=True):
                    stored[rows, :, at : at + b - a] = values[rows, :, a:b]
        self.size = size

    def _make_room(self, like: tuple[mx.array, mx.array], columns: int) -> None:
        """Arrays of at least so many columns, with what is stored in them."""
        if self._stored and self._stored[0].shape[2] >= columns:
            return
        room = -(-columns // self.ROOM) * self.ROOM
        arrays = [mx.zeros((*new.shape[:2], room, new.shape[3]), dtype=new.dtype) for new in like]
        if self.size:
            for array, stored in zip(arrays, self._stored, strict=True):
                array[:, :, : self.size] = stored[:, :, : self.size]
        self._stored = arrays

    def select(self, rows: Sequence[int], longest: int) -> None:
        """Leave only these rows, which have at most ``longest`` stored columns."""
        at = mx.array(list(rows))
        self._stored = [stored[at, :, :longest] for stored in self._stored] if longest else []
        self.size = longest if self._stored else 0


def _each(spans: list[tuple[int, int, int]]) -> list[tuple[slice, tuple[int, int, int]]]:
    return [(slice(i, i + 1), span) for i, span in enumerate(spans)]
