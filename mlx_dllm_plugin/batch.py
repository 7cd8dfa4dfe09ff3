"""The rows that are decoded together: where their columns stand, and what the model is run on in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .caches import BlockCache, BlockWindow, CanvasWindow, FullCanvas, PartOfBlock, WindowCache
from .errors import DiffusionError

if TYPE_CHECKING:
    from .decode import Row
    from .families import Family
    from .plan import Stage

Memory = tuple[mx.array, ...]


class Batch(ABC):
    """
    Rows of one rule. A subclass arranges their columns and runs the model.

    Args of a step, which :meth:`forward` sets with the states it returns:
        slot: [B, W], which slot of its row a column of those states predicts, or -1.
        place: [B, W], which column of the canvas that is.
        shadows: of a rule that doubts, the states [B, W, D] of the masks that stand in for committed tokens.
    """

    LOGITS = 2**24  # numbers of logits per row at once: 64 MB in float32

    slot: np.ndarray
    place: mx.array
    _place: np.ndarray
    shadows: mx.array | None = None

    def __init__(self, rows: list[Row], family: Family, model: Any):
        self.rows = rows
        self.family = family
        self.model = model
        self.rule = rows[0].plan.rule
        self.shifted = rows[0].plan.shifted
        self.width = max(len(row.plan.canvas) for row in rows)
        self.guided = any(row.plan.cfg_scale for row in rows)
        self.copies = 2 if self.guided else 1
        self._whole_rows = False
        self._given: mx.array | None = None
        self._memory: tuple[np.ndarray, Memory] | None = None
        shared = [name for name in rows[0].plan.values if all(name in row.plan.values for row in rows)]
        self.values = {name: mx.array([[row.plan.values[name]] for row in rows], dtype=mx.float32) for name in shared}
        self.mask_ids = mx.array([[row.plan.mask_token_id] for row in rows])
        self.never = self._banned([row.plan.never for row in rows])
        self.suppressed = self._banned([row.plan.suppressed for row in rows])
        self.late = self._banned([row.plan.late for row in rows])
        self.masks = self._banned([(row.plan.mask_token_id,) for row in rows]) if self.rule.drop_mask else None
        self.edits = self._banned([row.plan.edit_token_ids or () for row in rows]) if self.rule.edit else None

    def _banned(self, ids: Sequence[tuple[int, ...]]) -> mx.array | None:
        """Added to logits [B, W, V]: minus infinity at each row's ids, or None when there are none."""
        if not any(ids):
            return None
        banned = np.zeros((len(ids), 1, self.rows[0].vocab_size), dtype=np.float32)
        for i, own in enumerate(ids):
            banned[i, 0, list(own)] = -np.inf
        return mx.array(banned)

    # Columns

    @abstractmethod
    def first(self, row: Row) -> int:
        """The column of a row's first token in the canvas."""

    def look(self, whole: bool) -> np.ndarray:
        """Set ``slot`` and ``place`` to the columns of every row's stage, or of all its slots; the columns, [B, W]."""
        self._whole_rows = whole
        spans = []
        for row in self.rows:
            stage = row.stages[0]
            start, end = (0, len(row.plan.slots)) if whole else (stage.start, stage.end)
            spans.append((start, np.array(row.plan.slots[start:end]) + self.first(row)))
        window = max(int(at[-1] - at[0]) + 1 for _, at in spans)
        self.slot = np.full((len(self.rows), window), -1)
        place = np.zeros((len(self.rows), window), dtype=np.int32)
        for i, (start, at) in enumerate(spans):
            first = min(int(at[0]), self.width - window)  # no column twice: one of them would undo the other's commit
            place[i] = first + np.arange(window)
            self.slot[i, at - first] = np.arange(start, start + len(at))
        self.place, self._place = mx.array(place), place
        return place

    def columns(self, i: int) -> np.ndarray:
        """Which of this step's columns are slots of row i's stage."""
        stage = self.rows[i].stages[0]
        return np.flatnonzero((self.slot[i] >= stage.start) & (self.slot[i] < stage.end))

    def spread(self, parts: list[mx.array]) -> mx.array:
        """Per row a value for each slot of its stage [n, ...] -> per column [B, W, ...]; anything in the others."""
        return mx.stack(
            [
                part[mx.array(np.clip(slot - row.stages[0].start, 0, len(part) - 1))]
                for row, part, slot in zip(self.rows, parts, self.slot, strict=True)
            ]
        )

    def canvas(self) -> tuple[mx.array, mx.array]:
        """The first canvas [B, width] and which of it is masked."""
        canvas = np.zeros((len(self.rows), self.width), dtype=np.int32)
        masked = np.zeros((len(self.rows), self.width), dtype=bool)
        for i, row in enumerate(self.rows):
            first = self.first(row)
            canvas[i, first : first + len(row.plan.canvas)] = row.plan.canvas
            masked[i, first + np.array(row.plan.slots)] = True
        return mx.array(canvas), mx.array(masked)

    # States and logits

    @abstractmethod
    def forward(self, canvas: mx.array) -> mx.array:
        """The model's last hidden states [copies * B, W, D] of the columns that hold every row's stage."""

    def logits(self, states: mx.array, rows: Sequence[int] | None = None) -> mx.array:
        """Logits [B, N, V] float32 of states [copies * B, N, D], guided; of some of the rows."""
        logits = self.family.head(self.model, states).astype(mx.float32)
        at = mx.array(list(rows)) if rows is not None else None
        if self.guided:
            scales = mx.array([[[row.plan.cfg_scale]] for row in self.rows], dtype=mx.float32)
            logits = _guided(logits, scales if at is None else scales[at])
        if self.masks is not None:
            logits = logits + (self.masks if at is None else self.masks[at])
        return logits

    def chunks(self, states: mx.array) -> Iterator[slice]:
        """Columns whose logits are made together, so that memory stays linear in the columns."""
        width = states.shape[1]
        most = max(self.LOGITS // self.rows[0].vocab_size, 2)
        edges = np.linspace(0, width, -(-width // most) + 1).astype(int).tolist()
        yield from (slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True))

    def guides(self, canvas: mx.array) -> mx.array:
        """The canvas, and with guidance below it the same with each row's given tokens masked."""
        if not self.guided:
            return canvas
        if self._given is None:
            given = np.zeros(canvas.shape, dtype=bool)
            for i, row in enumerate(self.rows):
                known = ~np.isin(row.plan.canvas, sorted(row.plan.keep))
                known[list(row.plan.slots)] = False
                given[i, self.first(row) + np.flatnonzero(known)] = True
            self._given = mx.array(given)
        return mx.concatenate([canvas, mx.where(self._given, self.mask_ids.astype(canvas.dtype), canvas)])

    def doubled(self, at: Sequence[int], copies: int | None = None) -> list[int]:
        """Rows of the arrays that have guidance's copies below; some of the copies."""
        return [i + half * len(self.rows) for half in range(copies or self.copies) for i in at]

    def rank(self, what: str) -> int:
        """The rank of the attention's scores. Raises DiffusionError when nobody knows it."""
        if self.family.score_rank is None:
            raise DiffusionError(
                f"{what} by the family {self.family.name}, which does not say the rank of its attention scores: "
                "decode them one by one."
            )
        return self.family.score_rank(self.model)

    # What a rule remembers from step to step

    def recall(self) -> Memory:
        """What the rule remembered of this step's columns in the step before [B, W, ...]; zero of columns that are new
        to a row's stage. Empty before the first step."""
        if self._memory is None:
            return ()
        places, memory = self._memory
        place = self._place
        back = place - places[:, :1]
        known = (back >= 0) & (back < places.shape[1])
        if not self._whole_rows:
            known &= np.array([[row.step > 0] for row in self.rows])
        if known.all() and not back[:, 0].any() and place.shape == places.shape:
            return memory
        index, keep = mx.array(np.clip(back, 0, places.shape[1] - 1)), mx.array(known)
        return tuple(mx.where(_wide(keep, m), mx.take_along_axis(m, _wide(index, m), axis=1), 0) for m in memory)

    def remember(self, memory: Memory) -> None:
        self._memory = self._place, memory

    # Rows that go on

    @abstractmethod
    def select(self, keep: list[int], canvas: mx.array, masked: mx.array) -> tuple[Batch, mx.array, mx.array]:
        """The batch of the rows that go on, and their canvas and mask."""

    def _hand_over(self, batch: Batch, keep: list[int], dropped: int) -> None:
        if self._memory is not None:
            places, memory = self._memory
            batch._memory = (places[keep] - dropped, tuple(m[mx.array(keep)] for m in memory))


class Whole(Batch):
    """
    Rows whose model sees the whole canvas. They are padded on the left to one width. Without a cache every forward
    computes all columns; with one, the first of a stage does, and the others only the stage's window, for which the
    keys and values of the rest are kept (approximate: those would change too). Rows that need different columns in a
    step are computed one group after the other, so that each row's result is its result alone.
    """

    def __init__(self, rows: list[Row], family: Family, model: Any):
        super().__init__(rows, family, model)
        self.doubts = self.rule.revise is not None
        cached = any(stage.window for row in rows for stage in row.stages)
        self.padding = [self.width - len(row.plan.canvas) for row in rows] * self.copies
        self.scores = 4
        if any(self.padding):
            self.scores = self.rank("Rows of unequal length cannot be decoded together")
        elif self.doubts:
            self.scores = self.rank("Tokens cannot be revised")
        layers = len(getattr(model, "layers", ()))
        self.caches: list[Any] = [FullCanvas(self.padding, self.width, self.scores)] * layers
        self.windows = cached or self.doubts
        if self.windows:
            self.caches = [WindowCache(len(self.padding), self.width, keeps=cached) for _ in range(layers)]

    def first(self, row: Row) -> int:
        return self.width - len(row.plan.canvas)

    def forward(self, canvas: mx.array) -> mx.array:
        groups: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(self.rows):
            window = self._window(row)
            groups.setdefault(window, []).append(i)
            row.columns += (window[1] - max(window[0], self.first(row))) * (2 if self.doubts else 1)
        place = self.look(self.rule.whole_canvas and not any(row.stages[0].window for row in self.rows))
        canvas = self.guides(canvas)
        parts = [self._part(canvas, at, window, place) for window, at in groups.items()]
        if len(parts) == 1:
            states, self.shadows = parts[0]
            return states
        order = mx.array(np.argsort(self.doubled([i for at in groups.values() for i in at])))
        # Each group's guided copies stand below its own rows: bring all copies below all rows.
        halves = [mx.split(states, self.copies) for states, _ in parts]
        states = mx.concatenate([half[copy] for copy in range(self.copies) for half in halves])[order]
        shadows = [shadow for _, shadow in parts if shadow is not None]
        self.shadows = mx.concatenate(shadows)[order] if shadows else None
        return states

    def _window(self, row: Row) -> tuple[int, int]:
        """The columns that this step computes of a row."""
        stage, interval = row.stages[0], row.plan.refresh_interval
        due = (stage.refresh and not row.step) or (interval is not None and row.age >= interval - 1)
        if stage.window is None or due:
            row.age = 0
            return 0, self.width
        row.age += 1
        first = self.first(row)
        return first + stage.window[0] if stage.window[0] else 0, first + stage.window[1]

    def _part(
        self, canvas: mx.array, at: list[int], window: tuple[int, int], place: np.ndarray
    ) -> tuple[mx.array, mx.array | None]:
        """States of the rows ``at`` in this step's columns, and those of their shadows."""
        a, b = window
        rows = self.doubled(at)
        everyone = len(at) == len(self.rows)
        ids = (canvas if everyone else canvas[mx.array(rows)])[:, a:b]
        shadows = None
        if self.doubts:
            shadows = [self._span(self.rows[i]) for i in at]
            column, (first, last) = np.arange(a, b)[None], np.array(shadows).T[:, :, None]
            masks = self.mask_ids[mx.array(at)].astype(ids.dtype)
            ids = mx.concatenate([ids, mx.where(mx.array((column >= first) & (column < last)), masks, ids)])
        if self.windows:
            seen = CanvasWindow(self.padding, self.width, window, None if everyone else rows, shadows, self.scores)
            for cache in self.caches:
                cache.window = seen
        states = self.family.hidden(self.model, ids, self.caches)
        read = np.tile(place[at] - self.shifted - a, (self.copies * (2 if self.doubts else 1), 1))
        states = _cut(states, read)
        if not self.doubts:
            return states, None
        real, below = mx.split(states, 2)
        return real, below

    def _span(self, row: Row) -> tuple[int, int]:
        """The columns from the first to the last slot of a row's stage."""
        stage, first = row.stages[0], self.first(row)
        return first + row.plan.slots[stage.start], first + row.plan.slots[stage.end - 1] + 1

    def select(self, keep: list[int], canvas: mx.array, masked: mx.array) -> tuple[Batch, mx.array, mx.array]:
        batch = Whole([self.rows[i] for i in keep], self.family, self.model)
        dropped = self.width - batch.width
        self._hand_over(batch, keep, dropped)
        for old, new in zip(self.caches, batch.caches, strict=True):
            if isinstance(old, WindowCache) and isinstance(new, WindowCache):
                new.take_over(old, self.doubled(keep, batch.copies), dropped)
        at = mx.array(keep)
        return batch, canvas[at][:, dropped:], masked[at][:, dropped:]


class Blocks(Batch):
    """
    Rows whose model sees all up to a block's end. Keys and values of final blocks are kept: a block's are stored by
    the first forward of the next one, so that they cost no forward of their own. Rows stand at blocks of their own.
    With the cache ``none`` nothing is kept, and every forward computes all that is visible. With ``dual`` a stage that
    is part of a block is computed alone while its first token is known (Fast-dLLM v2's block cache, approximate: the
    keys and values of the rest of the block would change too).
    """

    PREFILL = 512  # columns of the prompt per forward, rounded to whole blocks

    def __init__(self, rows: list[Row], family: Family, model: Any):
        super().__init__(rows, family, model)
        self.stored = [0] * len(rows)
        self.keeps = rows[0].plan.cache != "none"
        self.caches = [BlockCache() for _ in model.layers]
        self._ends: list[int] | None = None  # columns of the last forward that are to be stored
        self._inside = False

    def first(self, row: Row) -> int:
        return 0

    def forward(self, canvas: mx.array) -> mx.array:
        stages = [row.stages[0] for row in self.rows]
        canvas = self.guides(canvas)
        place = self.look(whole=False)
        self._store()
        part = self._part(stages)
        if part is not None:
            a, b = part
            for cache in self.caches:
                cache.window = PartOfBlock(a, b)
            self.rows[0].columns += b - a
            states = self.family.hidden(self.model, canvas[:, a:b], self.caches)
            return _cut(states, np.tile(place - self.shifted - a, (self.copies, 1)))
        if self.keeps:
            self._prefill(canvas, stages)
        # Shifted logits of a block's first column come from the column before, which may be stored already.
        starts = [row.plan.slots[stage.start] - self.shifted for row, stage in zip(self.rows, stages, strict=True)]
        first = [min(n, start) for n, start in zip(self.stored, starts, strict=True)]
        visible = [stage.visible for stage in stages]
        width = max(end - start for start, end in zip(first, visible, strict=True))
        for row, start, end in zip(self.rows, first, visible, strict=True):
            row.columns += end - start
        states = self._run(canvas, visible, width)
        if self.keeps:
            self._ends, self._inside = [stage.fixed for stage in stages], any(stage.window for stage in stages)
        read = place - self.shifted - (np.array(visible) - width)[:, None]
        return _cut(states, np.tile(read, (self.copies, 1)))

    def _part(self, stages: list[Stage]) -> tuple[int, int] | None:
        """The columns of a stage that is computed without the rest of its block. Such rows are alone (see run())."""
        window, row = stages[0].window, self.rows[0]
        if window is None or self.caches[0].inside is None or self.caches[0].inside_end != stages[0].visible:
            return None
        begins_masked = row.plan.slots[stages[0].start] == window[0] and row.tokens[stages[0].start] is None
        return None if begins_masked else window

    def _prefill(self, canvas: mx.array, stages: list[Stage]) -> None:
        """Store what is final, but for the last block of each row: that one is stored by the forward of this step."""
        length = max(row.plan.block_length or 1 for row in self.rows)
        chunk = max(self.PREFILL // length, 1) * length
        while True:
            ends = []
            for row, stored, stage in zip(self.rows, self.stored, stages, strict=True):
                own = row.plan.block_length or 1
                last = stage.fixed - own
                end = min(stored + chunk // own * own, last)
                end -= (end - row.plan.origin) % own
                ends.append(max(end, stored))
            width = max(end - stored for end, stored in zip(ends, self.stored, strict=True))
            if not width:
                return
            for row, end, stored in zip(self.rows, ends, self.stored, strict=True):
                row.prefills += end > stored
            self._run(canvas, ends, width)
            self._keep(ends)
            mx.eval([(cache.keys, cache.values) for cache in self.caches])

    def _run(self, canvas: mx.array, visible: list[int], width: int) -> mx.array:
        """Hidden states [copies * B, width, D] of the columns that end at ``visible``."""
        lengths = {row.plan.block_length for row in self.rows}
        assert len(lengths) == 1  # see run()
        window = BlockWindow(
            self.stored * self.copies,
            visible * self.copies,
            width,
            lengths.pop() or 1,
            [row.plan.origin for row in self.rows] * self.copies,
            self.rank("Block-causal rows cannot be decoded") if len(self.rows) > 1 else 4,
        )
        for cache in self.caches:
            cache.window = window
        columns = np.array(visible * self.copies)[:, None] - width + np.arange(width)[None]
        ids = mx.take_along_axis(canvas, mx.array(np.clip(columns, 0, self.width - 1)), axis=1)
        return self.family.hidden(self.model, ids, self.caches)

    def _store(self) -> None:
        """Store what the last forward computed of final blocks: those before its stage, and that of the stage itself
        if it saw that as it stays."""
        if self._ends is not None:
            ends, self._ends = self._ends, None
            self._keep([max(end, row.settled) for end, row in zip(ends, self.rows, strict=True)], self._inside)

    def _keep(self, ends: list[int], inside: bool = False) -> None:
        for cache in self.caches:
            cache.keep(ends * self.copies, inside)
        self.stored = [max(end, stored) for end, stored in zip(ends, self.stored, strict=True)]

    def select(self, keep: list[int], canvas: mx.array, masked: mx.array) -> tuple[Batch, mx.array, mx.array]:
        self._store()
        batch = Blocks([self.rows[i] for i in keep], self.family, self.model)
        batch.stored = [self.stored[i] for i in keep]
        for cache in self.caches:
            cache.select(self.doubled(keep, batch.copies), max(batch.stored))
        batch.caches = self.caches
        self._hand_over(batch, keep, 0)
        at = mx.array(keep)
        return batch, canvas[at][:, : batch.width], masked[at][:, : batch.width]


def batches(rows: list[Row], family: Family, model: Any) -> list[Batch]:
    """The rows in batches: all together, but those whose block is computed in parts one by one."""
    plan = rows[0].plan
    kind: Callable[..., Batch] = Whole if plan.block_length is None else Blocks
    alone = plan.block_length is not None and plan.cache == "dual"
    return [kind([row], family, model) for row in rows] if alone else [kind(rows, family, model)]


def _cut(states: mx.array, read: np.ndarray) -> mx.array:
    """The columns ``read`` [B, W] of states [B, L, D]; any column for one that was not computed."""
    start, length = int(read[0, 0]), read.shape[1]
    if (read == read[0]).all() and start >= 0 and start + length <= states.shape[1]:
        return states[:, start : start + length]
    columns = mx.array(np.clip(read, 0, states.shape[1] - 1))
    return mx.take_along_axis(states, columns[..., None], axis=1)


def _guided(logits: mx.array, scale: mx.array) -> mx.array:
    """Lu + (scale + 1) (L - Lu) of the two halves [2B, W, V] (classifier-free guidance)."""
    with_prompt, without = mx.split(logits, 2)
    return mx.where(scale > 0, without + (scale + 1) * (with_prompt - without), with_prompt)


def _wide(index: mx.array, like: mx.array) -> mx.array:
    """[B, W] -> [B, W, 1, ...], with as many axes as ``like``."""
    return index.reshape(*index.shape, *([1] * (like.ndim - 2)))
