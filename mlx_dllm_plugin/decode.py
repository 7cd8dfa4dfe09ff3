"""THE decoding loop: canvas in, committed tokens out. One for all families, batch sizes and hosts.

A step is one forward and one commit, vectorised over rows, with one host synchronisation. Rows have their own canvas,
schedule, random key and options; they are left-padded to one width, and padding changes no bit of a row on the CPU.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from .caches import BlockCache, BlockWindow, FullCanvas
from .errors import DiffusionError
from .families import FAMILIES, Family
from .families.a2d import whole
from .options import DecodingOptions
from .plan import Plan, Stage, plan, plan_slots
from .samplers import Candidates, Rule
from .spec import DiffusionSpec

TOP_LOGPROBS = 20
LARGE = 3e38  # ranks below every confidence, and above what is no candidate


class Logprobs:
    """
    Log-probabilities of one committed token: log-softmax at temperature 1, at its own position, in the forward that
    committed it. They stay on the device until they are read.

    Args:
        id: the committed token.
        values: of one commit of n tokens: their own log-probabilities [n], the ids [n, 20] and log-probabilities
            [n, 20] of the most likely tokens, and all of them [n, V] if ``full_logprobs`` was asked for, else None.
        index: which of the n this one is.
    """

    def __init__(self, id: int, values: tuple[mx.array, mx.array, mx.array, mx.array | None], index: int):
        self.id = id
        self._values = values
        self._index = index

    @property
    def token(self) -> float:
        """Log-probability of the committed token."""
        return float(np.array(self._values[0][self._index]))

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """(id, log-probability) of the most likely tokens, best first, at most 20."""
        ids, values = (np.array(part[self._index]).tolist() for part in self._values[1:3])
        return tuple(sorted(zip(ids, values, strict=True), key=lambda pair: -pair[1]))

    @property
    def full(self) -> mx.array | None:
        """All of them [V], or None."""
        return None if self._values[3] is None else self._values[3][self._index]

    def vector(self, vocab_size: int) -> mx.array:
        """All of them [V] in float32; minus infinity where they were not kept (outside the top 20)."""
        if self.full is not None:
            return self.full
        own, ids, values, _ = self._values
        vector = mx.full((vocab_size,), -mx.inf)
        vector[ids[self._index]] = values[self._index]
        vector[self.id] = own[self._index]
        return vector

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Logprobs) and (self.id, self.token, self.top) == (other.id, other.token, other.top)

    def __repr__(self) -> str:
        return f"Logprobs(id={self.id}, token={self.token:.4f})"


@dataclass(frozen=True)
class Commit:
    """Tokens that one forward committed to a row: ``positions`` count from the start of the row's canvas, ascending;
    ``step`` counts the row's forwards from 0."""

    row: int
    step: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = field(repr=False, default=())


@dataclass(frozen=True)
class BlockDone:
    """All positions of a block [start, end) of the row's canvas are committed."""

    row: int
    start: int
    end: int


@dataclass(frozen=True)
class Released:
    """The next tokens of the row's output: in order, each once, never to change. ``reason`` is set when they are the
    last: after ``stop`` the last token is the end of sequence."""

    row: int
    tokens: tuple[int, ...]
    nfe: int
    reason: str | None = None
    logprobs: tuple[Logprobs, ...] = field(repr=False, default=())


@dataclass(frozen=True)
class Finished:
    """The last event of a row. ``reason`` is ``stop`` (end of sequence) or ``length``; ``canvas`` may hold masks after
    the end of the output; ``prefills`` counts forwards of the prompt alone, which ``nfe`` does not."""

    row: int
    reason: str
    canvas: tuple[int, ...]
    nfe: int
    empty_steps: int
    prefills: int = 0


Event = Commit | BlockDone | Released | Finished


@dataclass
class DecodingResult:
    """
    Args:
        tokens: the output, without the end-of-sequence token.
        finish_reason: ``stop`` or ``length``.
        nfe: denoising forwards this row took part in.
        empty_steps: steps of the schedule that commit nothing; they cost no forward.
        prompt_tokens: length of the prompt.
        canvas: the whole canvas, prompt included.
        commits: what each forward committed, in order.
        logprobs: one entry per output token, and one for the end-of-sequence token when it stopped there.
        prefills: forwards of the prompt alone, of models with block-causal attention.
    """

    tokens: list[int]
    finish_reason: str
    nfe: int
    empty_steps: int
    prompt_tokens: int
    canvas: list[int]
    commits: list[Commit]
    logprobs: list[Logprobs]
    prefills: int = 0

    @property
    def generated_tokens(self) -> int:
        """Tokens up to and including the first end-of-sequence token."""
        return len(self.tokens) + (self.finish_reason == "stop")


def decode(
    model: Any,
    prompts: Sequence[int] | Sequence[Sequence[int]] | mx.array,
    options: DecodingOptions | Sequence[DecodingOptions] | None = None,
    *,
    stream: Any = None,
) -> Any:
    """
    Decode one prompt or a batch of them.

    Args:
        model: a loaded model with a ``diffusion_spec``.
        prompts: token ids of one prompt, or a list of such.
        options: for all rows, or one per row; all must use the same rule.
        stream: the MLX stream to compute on; default: the current one.

    Returns:
        DecodingResult: for one prompt; a list of them for a batch.

    Raises:
        DiffusionError: see :func:`stream_decode`.
    """
    rows, single = _as_rows(prompts)
    results = _collect(stream_decode(model, rows, options, stream=stream), [len(row) for row in rows])
    return results[0] if single else results


def infill(
    model: Any,
    canvas: Sequence[int] | Sequence[Sequence[int]],
    masked: Sequence[bool] | Sequence[Sequence[bool]],
    options: DecodingOptions | Sequence[DecodingOptions] | None = None,
    *,
    stream: Any = None,
) -> Any:
    """
    Fill holes anywhere in a text. Tokens that are not masked never change.

    Args:
        canvas: token ids of one text, or a list of such; what stands at masked positions does not matter.
        masked: which positions are holes, of the same shape. A mask id elsewhere is text.
        options: as in :func:`decode`, for all rows or one per row. Blocks of ``block_length`` count from position 0,
            and without ``stop_at_eos`` an end of sequence in a hole is a token like any other.

    Returns:
        DecodingResult: for one text, a list of them for a batch. ``canvas`` is the filled text, ``tokens`` are those
        of the holes from left to right.

    Raises:
        DiffusionError: as :func:`decode`; shapes that differ; no hole; a text longer than the context; block-causal
            attention.
    """
    spec = spec_of(model)
    rows, single = _as_rows(canvas)
    marks = _marks_of(masked, rows, single)
    own = _options_of(options, len(rows))
    plans = []
    for number, (row, mark, given) in enumerate(zip(rows, marks, own, strict=True)):
        what = "The canvas" if single else f"Row {number} of the canvas"
        if (given.attention or spec.attention) == "block_causal":
            whose = f"the family {spec.family}" if given.attention is None else f"attention {given.attention}"
            raise DiffusionError(
                f"Filling holes needs attention to both sides, and {whose} sees no further than the end of a block: "
                f"{'choose attention bidirectional' if 'attention' in spec.variants else 'use another checkpoint'}."
            )
        if spec.context_length is not None and len(row) > spec.context_length:
            raise DiffusionError(
                f"{what} has {len(row)} tokens and the model's context is {spec.context_length}: shorten it."
            )
        for name in ("max_tokens", "canvas_length"):
            if getattr(given, name) is not None:
                raise DiffusionError(f"{name} means nothing when holes are filled: leave it out.")
        pairs = list(zip(row, mark, strict=True))
        slots = [i for i, is_hole in enumerate(mark) if is_hole]
        if not slots:
            raise DiffusionError(f"{what} has no hole: mark at least one position.")
        given = replace(given, stop_at_eos=bool(given.stop_at_eos))
        filler = replace(spec, defaults={name: v for name, v in spec.defaults.items() if name != "block_length"})
        planned = plan_slots(filler, [0 if hole else token for token, hole in pairs], slots, given, origin=0)
        masks = tuple(planned.mask_token_id if hole else token for token, hole in pairs)
        plans.append((replace(planned, canvas=masks), given))
    results = _collect(run(model, family_on(model), spec, plans, stream), [0] * len(rows))
    return results[0] if single else results


def stream_decode(
    model: Any,
    prompts: Sequence[int] | Sequence[Sequence[int]] | mx.array,
    options: DecodingOptions | Sequence[DecodingOptions] | None = None,
    *,
    stream: Any = None,
) -> Iterator[Event]:
    """
    Decode a batch of prompts and yield what happens while it happens. Arguments as :func:`decode`. Everything is
    checked at the call, before the first event is asked for.

    Raises:
        DiffusionError: a model without a spec, an option the rule does not use, token ids outside the vocabulary, an
            empty prompt, a canvas longer than the context, no mask id.
    """
    spec = spec_of(model)
    prompt_rows, _ = _as_rows(prompts)
    per_row = _options_of(options, len(prompt_rows))
    rows = [(plan(spec, prompt, own), own) for prompt, own in zip(prompt_rows, per_row, strict=True)]
    return run(model, family_on(model), spec, rows, stream)


def bidirectional_forward(model: Any, input_ids: mx.array, *, stream: Any = None) -> mx.array:
    """
    Logits of one forward in which every position sees every position; works with any mlx-lm model.

    Args:
        input_ids: token ids [B, T], without padding.

    Returns:
        mx.array: logits [B, T, V], in the model's type; not shifted. The model itself stays causal.

    Raises:
        DiffusionError: ids of another shape.
    """
    if not isinstance(input_ids, mx.array) or input_ids.ndim != 2:
        got = f"shape {input_ids.shape}" if isinstance(input_ids, mx.array) else type(input_ids).__name__
        raise DiffusionError(f"input_ids must be an array [batch, length], such as mx.array([ids]), got {got}.")
    family = family_on(model)
    with mx.stream(stream) if stream is not None else contextlib.nullcontext():
        return family.head(model, family.hidden(model, input_ids, [FullCanvas()] * len(model.layers)))


def family_on(model: Any) -> Family:
    """The family a model was loaded with, else that of its spec, else one that works with any mlx-lm model."""
    family = getattr(model, "diffusion_family", None)
    if family is not None:
        return family
    spec = getattr(model, "diffusion_spec", None)
    return FAMILIES.get(spec.family) if spec is not None else whole("any")


def spec_of(model: Any) -> DiffusionSpec:
    """The model's spec. Raises DiffusionError when it has none."""
    spec = getattr(model, "diffusion_spec", None)
    if spec is None:
        raise DiffusionError(
            f"This {type(model).__module__} model has no diffusion spec: load it with mlx_lm.load or "
            "mlx_dllm_plugin.load from a diffusion checkpoint."
        )
    return spec


Row = tuple[Plan, DecodingOptions]


class _Row:
    """A row's state: what is committed, what is released, and its random key."""

    def __init__(self, index: int, plan: Plan, options: DecodingOptions, vocab_size: int):
        self.index = index
        self.plan = plan
        self.vocab_size = vocab_size
        self.options = options
        self.stages = deque(plan.stages)
        self.step = 0
        self.tokens: list[int | None] = [None] * len(plan.slots)
        self.logprobs: list[Logprobs | None] = [None] * len(plan.slots)
        self.released = 0
        self.nfe = 0
        self.prefills = 0
        self.seen = 0
        self.reason: str | None = None if plan.cap else "length"
        self.key: mx.array | None = None

    @property
    def samples(self) -> bool:
        return bool(self.options.temp) or self.options.sampler is not None

    @property
    def must(self) -> int:
        """How many positions a rule's selection has to commit at least: one, unless a schedule goes on."""
        return int(self.step + 1 >= len(self.stages[0].counts))

    @property
    def number(self) -> float:
        """The schedule's number for the next step."""
        counts = self.stages[0].counts
        return counts[min(self.step, len(counts) - 1)] if counts else 1

    def draw(self) -> mx.array:
        """The row's next random key."""
        if self.key is None:
            seed = self.options.seed
            self.key = mx.random.key(int(np.array(mx.random.randint(0, 2**31 - 1))) if seed is None else seed)
        self.key, key = mx.random.split(self.key)
        return key

    def commit(self, at: Sequence[int], tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> Iterator[Event]:
        """Take over what a forward committed to the slots ``at``, and say what follows from it."""
        stage = self.stages[0]
        slots = self.plan.slots
        self.nfe += 1
        self.step += 1
        self.seen = stage.visible
        for slot, token, entry in zip(at, tokens, logprobs, strict=True):
            self.tokens[slot], self.logprobs[slot] = token, entry
        yield Commit(self.index, self.nfe - 1, tuple(slots[slot] for slot in at), tuple(tokens), tuple(logprobs))
        if None not in self.tokens[stage.start : stage.end]:
            self.stages.popleft()
            self.step = 0
            if stage.block is not None:
                yield BlockDone(self.index, *stage.block)
        first = self.released
        while self.reason is None and self.tokens[self.released] is not None:
            self.released += 1
            if self.tokens[self.released - 1] in self.plan.eos:
                self.reason = "stop"
            elif self.released == self.plan.cap:
                self.reason = "length"
        if self.released > first:
            new = slice(first, self.released)
            tokens, kept = tuple(self.tokens[new]), tuple(self.logprobs[new])  # type: ignore[arg-type]
            yield Released(self.index, tokens, self.nfe, self.reason, kept)  # type: ignore[arg-type]
        if self.reason is not None:
            yield self.finished()

    def finished(self) -> Finished:
        plan = self.plan
        canvas = list(plan.canvas)
        for slot, token in zip(plan.slots, self.tokens, strict=True):
            canvas[slot] = plan.mask_token_id if token is None else token
        if plan.block_length is not None:
            canvas = canvas[: max(self.seen, plan.slots[self.released - 1] + 1 if self.released else 0)]
        reason = self.reason or "length"
        return Finished(self.index, reason, tuple(canvas), self.nfe, plan.empty_steps, self.prefills)


class _Batch(ABC):
    """
    The rows that are decoded together. A subclass arranges their columns and runs the model.

    Args of a step, which :meth:`forward` sets with the logits it returns:
        slot: [B, W], which slot of its row a column of those logits is, or -1.
        place: [B, W], which column of the canvas it is.
    """

    slot: np.ndarray
    place: mx.array

    def __init__(self, rows: list[_Row], family: Family, model: Any):
        self.rows = rows
        self.family = family
        self.model = model
        self.rule = rows[0].plan.rule
        self.shifted = rows[0].plan.shifted
        self.width = max(len(row.plan.canvas) for row in rows)
        self.guided = any(row.plan.cfg_scale for row in rows)
        self._given: mx.array | None = None
        shared = [name for name in rows[0].plan.values if all(name in row.plan.values for row in rows)]
        self.values = {name: mx.array([[row.plan.values[name]] for row in rows], dtype=mx.float32) for name in shared}
        self.never = self._banned([row.plan.never for row in rows])
        self.suppressed = self._banned([row.plan.suppressed for row in rows])
        self.late = self._banned([row.plan.late for row in rows])
        self.masks = self._banned([(row.plan.mask_token_id,) for row in rows]) if self.rule.drop_mask else None

    def _banned(self, ids: Sequence[tuple[int, ...]]) -> mx.array | None:
        """Added to logits [B, W, V]: minus infinity at each row's ids, or None when there are none."""
        if not any(ids):
            return None
        banned = np.zeros((len(ids), 1, self.rows[0].vocab_size), dtype=np.float32)
        for i, own in enumerate(ids):
            banned[i, 0, list(own)] = -np.inf
        return mx.array(banned)

    def spread(self, parts: list[mx.array]) -> mx.array:
        """Per row a value for each slot of its stage [n] -> per column [B, W]; anything in the other columns."""
        return mx.stack(
            [
                part[mx.array(np.clip(slot - row.stages[0].start, 0, len(part) - 1))]
                for row, part, slot in zip(self.rows, parts, self.slot, strict=True)
            ]
        )

    def columns(self, i: int) -> np.ndarray:
        """The columns of the slots of row i's stage in the logits of this step."""
        stage = self.rows[i].stages[0]
        return np.flatnonzero((self.slot[i] >= stage.start) & (self.slot[i] < stage.end))

    @abstractmethod
    def first(self, row: _Row) -> int:
        """The column of a row's first token in the canvas."""

    @abstractmethod
    def forward(self, canvas: mx.array) -> mx.array:
        """The logits [B, W, V] of the columns that hold every row's stage, as the model computes them."""

    @abstractmethod
    def select(self, keep: list[int], canvas: mx.array, masked: mx.array) -> tuple[_Batch, mx.array, mx.array]:
        """The batch of the rows that go on, and their canvas and mask."""

    def canvas(self) -> tuple[mx.array, mx.array]:
        """The first canvas [B, width] and which of it is masked."""
        canvas = np.zeros((len(self.rows), self.width), dtype=np.int32)
        masked = np.zeros((len(self.rows), self.width), dtype=bool)
        for i, row in enumerate(self.rows):
            first = self.first(row)
            canvas[i, first : first + len(row.plan.canvas)] = row.plan.canvas
            masked[i, first + np.array(row.plan.slots)] = True
        return mx.array(canvas), mx.array(masked)

    def guides(self, canvas: mx.array) -> mx.array:
        """The canvas twice, the second time with each row's given tokens masked."""
        if self._given is None:
            given = np.zeros(canvas.shape, dtype=bool)
            for i, row in enumerate(self.rows):
                known = ~np.isin(row.plan.canvas, sorted(row.plan.keep))
                known[list(row.plan.slots)] = False
                given[i, self.first(row) + np.flatnonzero(known)] = True
            self._given = mx.array(given)
        ids = mx.array([[row.plan.mask_token_id] for row in self.rows], dtype=canvas.dtype)
        return mx.concatenate([canvas, mx.where(self._given, ids, canvas)])

    def guide(self, logits: mx.array) -> mx.array:
        """Lu + (scale + 1) (L - Lu) of the two halves [2B, W, V] (classifier-free guidance)."""
        with_prompt, without = mx.split(logits, 2)
        scale = mx.array([[[row.plan.cfg_scale]] for row in self.rows], dtype=mx.float32)
        return mx.where(scale > 0, without + (scale + 1) * (with_prompt - without), with_prompt)

    def rank(self, what: str) -> int:
        """The rank of the attention's scores. Raises DiffusionError when nobody knows it."""
        if self.family.score_rank is None:
            raise DiffusionError(
                f"{what} by the family {self.family.name}, which does not say the rank of its attention scores: "
                "decode them one by one."
            )
        return self.family.score_rank(self.model)


class _Whole(_Batch):
    """Rows whose model sees the whole canvas, recomputed in every step. They are padded on the left to one width, and
    all slots lie in the last ``window`` columns."""

    def __init__(self, rows: list[_Row], family: Family, model: Any):
        super().__init__(rows, family, model)
        self.window = max(len(row.plan.canvas) - row.plan.slots[0] for row in rows)
        padding = [self.width - len(row.plan.canvas) for row in rows] * (2 if self.guided else 1)
        rank = self.rank("Rows of unequal length cannot be decoded together") if any(padding) else 4
        self.cache = FullCanvas(padding, self.width, rank)
        self.slot = np.full((len(rows), self.window), -1)
        for i, row in enumerate(rows):
            at = np.array(row.plan.slots) + (self.window - len(row.plan.canvas))
            self.slot[i, at] = np.arange(len(row.plan.slots))
        before = self.width - self.window
        self.place = mx.broadcast_to(mx.arange(before, self.width)[None], self.slot.shape)

    def first(self, row: _Row) -> int:
        return self.width - len(row.plan.canvas)

    def forward(self, canvas: mx.array) -> mx.array:
        if self.guided:
            canvas = self.guides(canvas)
        states = self.family.hidden(self.model, canvas, [self.cache] * len(getattr(self.model, "layers", ())))
        read = slice(self.width - self.window - self.shifted, self.width - self.shifted)
        return self.family.head(self.model, states[:, read])

    def select(self, keep: list[int], canvas: mx.array, masked: mx.array) -> tuple[_Batch, mx.array, mx.array]:
        batch = _Whole([self.rows[i] for i in keep], self.family, self.model)
        at = mx.array(keep)
        return batch, canvas[at][:, -batch.width :], masked[at][:, -batch.width :]


class _Blocks(_Batch):
    """Rows whose model sees all up to a block's end. Keys and values of final blocks are kept: a block's are stored by
    the first forward of the next one, so that they cost no forward of their own. Rows stand at blocks of their own."""

    PREFILL = 512  # columns of the prompt per forward, rounded to whole blocks

    def __init__(self, rows: list[_Row], family: Family, model: Any):
        super().__init__(rows, family, model)
        self.copies = 2 if self.guided else 1
        self.stored = [0] * len(rows)
        self.caches = [BlockCache() for _ in model.layers]

    def first(self, row: _Row) -> int:
        return 0

    def forward(self, canvas: mx.array) -> mx.array:
        stages = [row.stages[0] for row in self.rows]
        if self.guided:
            canvas = self.guides(canvas)
        self._prefill(canvas, stages)
        slots = [row.plan.slots[stage.start : stage.end] for row, stage in zip(self.rows, stages, strict=True)]
        # Shifted logits of a block's first column come from the column before, which may be stored already.
        first = [min(n, at[0] - self.shifted) for n, at in zip(self.stored, slots, strict=True)]
        visible = [stage.visible for stage in stages]
        width = max(end - start for start, end in zip(first, visible, strict=True))
        states = self._run(canvas, visible, width)
        self._keep([stage.fixed for stage in stages])

        window = max(at[-1] - at[0] + 1 for at in slots)
        self.slot = np.full((len(self.rows), window), -1)
        place = np.zeros((len(self.rows), window), dtype=np.int32)
        for i, (at, stage) in enumerate(zip(slots, stages, strict=True)):
            start = min(at[0], self.width - window)  # no column twice: what one of them commits the other would undo
            place[i] = start + np.arange(window)
            self.slot[i, np.array(at) - start] = np.arange(stage.start, stage.end)
        read = place - self.shifted - (np.array(visible) - width)[:, None]
        self.place = mx.array(place)
        columns = mx.array(np.tile(np.clip(read, 0, width - 1), (self.copies, 1)))
        return self.family.head(self.model, mx.take_along_axis(states, columns[..., None], axis=1))

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
        """Hidden states [B, width, D] of the columns that end at ``visible``."""
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

    def _keep(self, ends: list[int]) -> None:
        for cache in self.caches:
            cache.keep(ends * self.copies)
        self.stored = [max(end, stored) for end, stored in zip(ends, self.stored, strict=True)]

    def select(self, keep: list[int], canvas: mx.array, masked: mx.array) -> tuple[_Batch, mx.array, mx.array]:
        batch = _Blocks([self.rows[i] for i in keep], self.family, self.model)
        batch.stored = [self.stored[i] for i in keep]
        copies = [i + half * len(self.rows) for half in range(batch.copies) for i in keep]
        for cache in self.caches:
            cache.select(copies, max(batch.stored))
        batch.caches = self.caches
        at = mx.array(keep)
        return batch, canvas[at][:, : batch.width], masked[at][:, : batch.width]


def run(model: Any, family: Family, spec: DiffusionSpec, rows: Sequence[Row], stream: Any = None) -> Iterator[Event]:
    """The loop itself, over rows of plans and options. What :func:`stream_decode` returns."""
    for what, values in (
        ("unmasking rule", {own.rule.name for own, _ in rows}),
        ("block length", {str(own.block_length) for own, _ in rows}),
        ("kind of logits", {"shifted" if own.shifted else "in_place" for own, _ in rows}),
    ):
        if len(values) > 1:
            raise DiffusionError(f"All rows of a batch must use the same {what}, got {', '.join(sorted(values))}.")
    states = [_Row(index, plan, options, spec.vocab_size) for index, (plan, options) in enumerate(rows)]
    return _loop(model, family, states, stream)


def _loop(model: Any, family: Family, rows: list[_Row], stream: Any) -> Iterator[Event]:
    for row in rows:
        if row.reason is not None:
            yield row.finished()
    active = [row for row in rows if row.reason is None]
    if not active:
        return
    on_stream = (lambda: mx.stream(stream)) if stream is not None else contextlib.nullcontext
    with on_stream():
        kind = _Whole if active[0].plan.block_length is None else _Blocks
        batch: _Batch = kind(active, family, model)
        canvas, masked = batch.canvas()
    while True:
        with on_stream():
            canvas, masked, picked = _step(batch, canvas, masked)
        for row, slots, tokens, logprobs in picked:
            yield from row.commit(slots, tokens, logprobs)
        keep = [i for i, row in enumerate(batch.rows) if row.reason is None]
        if not keep:
            return
        if len(keep) < len(batch.rows):
            with on_stream():
                batch, canvas, masked = batch.select(keep, canvas, masked)


Picked = list[tuple[_Row, list[int], list[int], tuple[Logprobs, ...]]]


def _step(batch: _Batch, canvas: mx.array, masked: mx.array) -> tuple[mx.array, mx.array, Picked]:
    """One forward and one commit. Returns the new canvas and mask, and per row what was committed to which slots."""
    rows, rule = batch.rows, batch.rule
    logits = batch.forward(canvas).astype(mx.float32)
    if batch.guided:
        logits = batch.guide(logits)
    if batch.masks is not None:
        logits = logits + batch.masks
    tokens, candidates = _choose(batch, logits)
    confidence = rule.confidence(candidates)

    span = np.array([row.stages[0][:2] for row in rows])
    stage = mx.array((batch.slot >= span[:, :1]) & (batch.slot < span[:, 1:]))
    free = stage & mx.take_along_axis(masked, batch.place, axis=1)
    ranked = mx.where(free, mx.maximum(confidence, -LARGE), -mx.inf)
    order = mx.argsort(-ranked, axis=1)
    numbers = np.array([[row.number] for row in rows], dtype=np.float32)
    if rule.select is None:
        order = order[:, : int(numbers.max())]
        counts = mx.array(numbers.astype(np.int32))
    else:
        counts = rule.select(mx.take_along_axis(ranked, order, axis=1), mx.array(numbers), batch.values)
        counts = mx.maximum(counts.astype(mx.int32), mx.array([[row.must] for row in rows], dtype=mx.int32))
    counts = mx.minimum(counts, free.sum(axis=1, keepdims=True))
    chosen = mx.take_along_axis(tokens, order, axis=1)
    wanted = mx.arange(order.shape[1])[None] < counts
    place = mx.take_along_axis(batch.place, order, axis=1)
    old = mx.take_along_axis(canvas, place, axis=1)
    still = mx.take_along_axis(masked, place, axis=1) & ~wanted
    canvas = mx.put_along_axis(canvas, place, mx.where(wanted, chosen, old), axis=1)
    masked = mx.put_along_axis(masked, place, still, axis=1)
    broken = mx.isnan(confidence).any() | mx.isnan(logits).any() | ~(logits.max() < mx.inf)
    mx.eval(canvas, masked, order, chosen, counts, broken)
    if np.array(broken):
        raise DiffusionError(
            "The model computed logits that are not finite numbers (NaN): its weights are damaged, or they overflow."
        )
    return canvas, masked, _read(batch, np.array(order), np.array(chosen), np.array(counts), logits)


def _read(batch: _Batch, order: np.ndarray, chosen: np.ndarray, counts: np.ndarray, logits: mx.array) -> Picked:
    """What was committed, as slots in ascending order, and its log-probabilities: computed, but not waited for."""
    picked: Picked = []
    for i, row in enumerate(batch.rows):
        count = int(counts[i, 0])
        if not count:
            picked.append((row, [], [], ()))
            continue
        by_column = np.argsort(order[i, :count])
        columns, tokens = order[i, by_column], chosen[i, by_column]
        if row.samples:
            _check_sampled(row, tokens)
        at_commit = logits[i, mx.array(columns)]
        logprobs = at_commit - mx.logsumexp(at_commit, axis=-1, keepdims=True)
        top = min(TOP_LOGPROBS, logprobs.shape[-1])
        ids = mx.argpartition(-logprobs, kth=top - 1, axis=-1)[:, :top]
        values = mx.take_along_axis(logprobs, ids, axis=-1)
        own = mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1)[:, 0]
        full = logprobs if row.options.full_logprobs else None
        mx.async_eval(own, ids, values, *([] if full is None else [full]))
        entries = tuple(Logprobs(int(token), (own, ids, values, full), j) for j, token in enumerate(tokens))
        picked.append((row, batch.slot[i, columns].tolist(), tokens.tolist(), entries))
    return picked


def _choose(batch: _Batch, logits: mx.array) -> tuple[mx.array, Candidates]:
    """The token each position would get [B, W], and what confidences are made of: the tokens there differ only where
    greedy decoding would have chosen an id that is never emitted."""
    rows, rule = batch.rows, batch.rule
    whole = logits if batch.suppressed is None else logits + batch.suppressed
    counted = _filtered(batch, whole) if rule.filters else whole
    allowed = counted if batch.never is None else counted + batch.never
    if batch.never is not None and counted is not whole:
        # Filters may leave nothing but ids that are never emitted: then the best of the others stays.
        best = mx.argmax(whole + batch.never, axis=-1, keepdims=True)
        nothing = allowed.max(axis=-1, keepdims=True) == -mx.inf
        allowed = mx.where(nothing & (mx.arange(allowed.shape[-1]) == best), 0.0, allowed)
    tokens, scored = mx.argmax(allowed, axis=-1), mx.argmax(counted, axis=-1)
    if any(row.samples for row in rows):
        own, known = [], []
        for i, row in enumerate(rows):
            columns = mx.array(batch.columns(i))
            if row.samples:
                own.append(_sample(row, rule, allowed[i, columns]).astype(tokens.dtype))
                known.append(mx.minimum(own[-1], row.vocab_size - 1))  # a host's sampler may return anything
            else:
                own.append(tokens[i, columns])
                known.append(scored[i, columns])
        tokens, scored = batch.spread(own), batch.spread(known)
    noise = mx.zeros(tokens.shape)
    if any(rule.draws(row.plan.values) for row in rows):
        noise = batch.spread(
            [
                mx.random.uniform(shape=(len(batch.columns(i)),), key=row.draw())
                if rule.draws(row.plan.values)
                else mx.zeros((len(batch.columns(i)),))
                for i, row in enumerate(rows)
            ]
        )
    if batch.late is not None:
        counted = counted + batch.late
    return tokens, Candidates(counted, scored, noise, batch.values)


def _filtered(batch: _Batch, logits: mx.array) -> mx.array:
    """The logits of the distribution that each row's tokens are drawn from: [B, W, V]."""
    if all(not (row.options.temp or row.options.top_p or row.options.top_k or row.options.min_p) for row in batch.rows):
        return logits
    return mx.stack([_cut(row.options, logits[i], batch.rule.filters) for i, row in enumerate(batch.rows)])


def _cut(options: DecodingOptions, logits: mx.array, filters: Sequence[str]) -> mx.array:
    """Logits [n, V] over the temperature, minus infinity where a filter cuts; each filter sees what the one before
    left, normalised."""
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

    apply = {"top_p": apply_top_p, "top_k": apply_top_k, "min_p": apply_min_p}
    logits = logits / (options.temp or 1.0)
    for name in filters:
        value = getattr(options, name)
        if not value or (name == "top_p" and value >= 1) or (name == "top_k" and value >= logits.shape[-1]):
            continue
        logits = apply[name](logits - mx.logsumexp(logits, axis=-1, keepdims=True), value)
    return logits


def _sample(row: _Row, rule: Rule, logits: mx.array) -> mx.array:
    """Tokens [n] drawn from logits [n, V], by the Gumbel-max trick in float32 log space: mlx-lm's filters on the
    log-probabilities, then the temperature, unless the rule has filtered them already."""
    options = row.options
    if options.sampler is not None:
        return _call_sampler(options.sampler, logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    if not rule.filters:
        logits = _cut(replace(options, temp=None), logits, ("top_p", "min_p", "top_k")) / (options.temp or 1.0)
    noise = mx.random.gumbel(logits.shape, dtype=mx.float32, key=row.draw())
    return mx.argmax(logits + noise, axis=-1)


def _call_sampler(sampler: Any, logprobs: mx.array) -> mx.array:
    n = logprobs.shape[0]
    advice = "it must take log-probabilities [n, vocabulary] and return n token ids"
    try:
        tokens = sampler(logprobs)
    except Exception as error:
        raise DiffusionError(
            "The sampler cannot take the rows of diffusion decoding "
            f"({type(error).__name__}: {' '.join(str(error).split())}): {advice}."
        ) from error
    if not isinstance(tokens, mx.array) or tokens.shape != (n,) or not mx.issubdtype(tokens.dtype, mx.integer):
        got = f"an array of shape {tokens.shape}" if isinstance(tokens, mx.array) else type(tokens).__name__
        raise DiffusionError(f"The sampler returned {got} for {n} rows: {advice}.")
    return tokens.astype(mx.uint32)


def _check_sampled(row: _Row, tokens: np.ndarray) -> None:
    for token in tokens.tolist():
        if token >= row.vocab_size or token in row.plan.never:
            who = "The sampler" if row.options.sampler is not None else "Sampling"
            raise DiffusionError(
                f"{who} returned token id {token}, which must not be emitted: it must choose among the tokens "
                f"below {row.vocab_size} whose log-probability is not minus infinity."
            )


def _as_rows(prompts: Any) -> tuple[list[list[int]], bool]:
    if isinstance(prompts, mx.array):
        prompts = prompts.tolist()
    try:
        prompts = list(prompts)
        single = not prompts or not isinstance(prompts[0], (list, tuple, mx.array, np.ndarray))
        rows = [prompts] if single else [p.tolist() if hasattr(p, "tolist") else list(p) for p in prompts]
    except TypeError:
        raise DiffusionError(f"A prompt must be a list of token ids, got {prompts!r}.") from None
    for row in rows:
        for token in row:
            if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
                raise DiffusionError(f"A prompt must be a list of token ids, got {token!r} in it.")
    return [[int(token) for token in row] for row in rows], single


def _marks_of(masked: Any, rows: list[list[int]], single: bool) -> list[list[bool]]:
    """Which positions of each row are holes. Raises DiffusionError where that has not the canvas's shape."""
    try:
        marks = [np.array(mark) for mark in ([masked] if single else masked)]
    except (TypeError, ValueError):
        marks = []
    if len(marks) != len(rows):
        raise DiffusionError("masked must have the canvas's shape: say of each token whether it is a hole.")
    for number, (row, mark) in enumerate(zip(rows, marks, strict=True)):
        what = "The canvas" if single else f"Row {number} of the canvas"
        if mark.shape != (len(row),) or (row and mark.dtype.kind not in "biu"):
            got = f"{len(mark)} marks" if mark.ndim == 1 and mark.dtype.kind in "biu" else f"{mark.tolist()!r:.60}"
            raise DiffusionError(f"{what} has {len(row)} tokens and {got}: say of each whether it is a hole.")
    return [mark.astype(bool).tolist() for mark in marks]


def _options_of(options: Any, rows: int) -> list[DecodingOptions]:
    """One of them per row."""
    if options is None or isinstance(options, DecodingOptions):
        return [options or DecodingOptions()] * rows
    per_row = list(options) if isinstance(options, Sequence) else [options]
    wrong = next((own for own in per_row if not isinstance(own, DecodingOptions)), None)
    if wrong is not None or None in per_row:
        raise DiffusionError(f"Options must be DecodingOptions, one or a list of them, got {wrong!r}.")
    if len(per_row) != rows:
        raise DiffusionError(f"Options must be one for all rows or one per row: {len(per_row)} for {rows} prompts.")
    return per_row


def _collect(events: Iterator[Event], prompts: Sequence[int]) -> list[Any]:
    """The results of rows with prompts of these lengths."""
    results: list[DecodingResult | None] = [None] * len(prompts)
    commits: list[list[Commit]] = [[] for _ in prompts]
    released: list[list[Released]] = [[] for _ in prompts]
    for event in events:
        if isinstance(event, Commit):
            commits[event.row].append(event)
        elif isinstance(event, Released):
            released[event.row].append(event)
        elif isinstance(event, Finished):
            results[event.row] = _result(event, prompts[event.row], commits[event.row], released[event.row])
    return results


def _result(event: Finished, prompt: int, commits: list[Commit], released: list[Released]) -> DecodingResult:
    tokens = [token for part in released for token in part.tokens]
    return DecodingResult(
        tokens=tokens[:-1] if event.reason == "stop" else tokens,
        finish_reason=event.reason,
        nfe=event.nfe,
        empty_steps=event.empty_steps,
        prompt_tokens=prompt,
        canvas=list(event.canvas),
        commits=commits,
        logprobs=[entry for part in released for entry in part.logprobs],
        prefills=event.prefills,
    )
