"""THE decoding loop: canvas in, committed tokens out. One for all families, batch sizes and hosts.

A step is one forward and one commit, vectorised over rows, with one host synchronisation. Rows have their own canvas,
schedule, random key and options; they are left-padded to one width, and padding changes no bit of a row on the CPU.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .batch import Batch, batches
from .caches import FullCanvas
from .errors import DiffusionError, note
from .families import FAMILIES, Family
from .families.a2d import whole
from .options import DecodingOptions
from .plan import Plan, plan, plan_slots
from .samplers import Candidates, Doubts, Ranking, Rule
from .samplers.editing import Draft
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
    ``step`` counts the row's forwards from 0. ``masked`` are positions committed before that a rule which revises or
    edits has masked again. A rule that edits commits positions again: those it writes, and those to which it moves a
    token."""

    row: int
    step: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = field(repr=False, default=())
    masked: tuple[int, ...] = ()


@dataclass(frozen=True)
class BlockDone:
    """All positions of a block [start, end) of the row's canvas are committed. ``reason`` is ``filled``, or of a rule
    that edits ``stable`` (nothing changes any more), ``budget`` (after max_post_steps) or ``cap`` (it did not settle
    within max_steps_per_block)."""

    row: int
    start: int
    end: int
    reason: str = "filled"


@dataclass(frozen=True)
class Released:
    """The next tokens of the row's output: in order, each once, never to change. ``reason`` is set when they are the
    last: after ``stop`` the last token is the end of sequence. ``columns`` are the columns computed so far."""

    row: int
    tokens: tuple[int, ...]
    nfe: int
    reason: str | None = None
    logprobs: tuple[Logprobs, ...] = field(repr=False, default=())
    columns: int = 0


@dataclass(frozen=True)
class Finished:
    """The last event of a row. ``reason`` is ``stop`` (end of sequence) or ``length``; ``canvas`` may hold masks after
    the end of the output; ``prefills`` counts forwards of the prompt alone, which ``nfe`` does not; ``columns`` the
    columns that the denoising forwards computed."""

    row: int
    reason: str
    canvas: tuple[int, ...]
    nfe: int
    empty_steps: int
    prefills: int = 0
    columns: int = 0


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
        columns: columns of the canvas that the denoising forwards computed, all together.
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
    columns: int = 0

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


@dataclass
class Block:
    """
    What a rule that edits knows of a row's block.

    Args:
        masks: how many it began with.
        original: which of its positions have a mask or token that is there since then.
        post: forwards that count for ``max_post_steps``.
        seen: how it was written before.
    """

    masks: int
    original: np.ndarray
    post: int = 0
    seen: set[bytes] = field(default_factory=set)


class Row:
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
        self.columns = 0
        self.age = 0  # forwards since all columns were computed
        self.seen = 0
        self.ended = len(plan.slots)  # the first slot with an end of sequence, where that matters
        self.cut = False  # its canvas after that is to be overwritten
        self.block: Block | None = None
        self.settled = 0  # columns that the last forward saw as they stay
        self.blocks = 0  # finished ones
        self.capped = 0  # those of them that did not settle
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

    @property
    def span(self) -> tuple[int, int]:
        """The slots that may be committed in the next step."""
        stage = self.stages[0]
        return stage.start, min(stage.end, self.ended + 1) if self.plan.after_eos == "skip" else stage.end

    def draw(self) -> mx.array:
        """The row's next random key."""
        if self.key is None:
            seed = self.options.seed
            self.key = mx.random.key(int(np.array(mx.random.randint(0, 2**31 - 1))) if seed is None else seed)
        self.key, key = mx.random.split(self.key)
        return key

    def commit(self, picked: Picked) -> Iterator[Event]:
        """Take over what a forward committed, and say what follows from it."""
        stage = self.stages[0]
        slots = self.plan.slots
        self.nfe += 1
        self.step += 1
        self.seen = stage.visible
        for slot in picked.masked:
            self.tokens[slot] = self.logprobs[slot] = None
        for slot, token, entry in zip(picked.slots, picked.tokens, picked.logprobs, strict=True):
            self.tokens[slot], self.logprobs[slot] = token, entry
        if self.plan.after_eos != "fill":
            last = self.ended
            self.ended = next((n for n, token in enumerate(self.tokens) if token in self.plan.eos), len(slots))
            if self.plan.after_eos == "eos" and self.ended < last:
                self.tokens[self.ended + 1 :] = [self.tokens[self.ended]] * (len(slots) - self.ended - 1)
                self.cut = True
        yield Commit(
            self.index,
            self.nfe - 1,
            tuple(slots[slot] for slot in picked.slots),
            tuple(picked.tokens),
            picked.logprobs,
            tuple(slots[slot] for slot in picked.masked),
        )
        rule = self.plan.rule
        self.settled = stage.visible if picked.done == "stable" else 0
        if picked.done or (rule.edit is None and None not in self.tokens[slice(*self.span)]):
            self.stages.popleft()
            self.step, self.block = 0, None
            self.blocks += stage.block is not None
            self.capped += picked.done == "cap"
            if stage.block is not None and None not in self.tokens[stage.start : stage.end]:
                yield BlockDone(self.index, *stage.block, picked.done or "filled")
        first, final = self.released, len(slots)
        if (rule.revise is not None or rule.edit is not None) and self.stages:
            final = self.stages[0].start  # what stands in a stage that goes on may still change
        while self.reason is None and self.released < final and self.tokens[self.released] is not None:
            self.released += 1
            if self.tokens[self.released - 1] in self.plan.eos:
                self.reason = "stop"
            elif self.released == self.plan.cap:
                self.reason = "length"
        if self.reason is not None and self.capped:
            limit = self.plan.values["max_steps_per_block"]
            note(
                f"warning: {self.capped} of {self.blocks} blocks did not settle within max_steps_per_block {limit}: "
                "completed as they stood",
                apart=True,
            )
        if self.released > first:
            new = slice(first, self.released)
            tokens, kept = tuple(self.tokens[new]), tuple(self.logprobs[new])  # type: ignore[arg-type]
            yield Released(self.index, tokens, self.nfe, self.reason, kept, self.columns)  # type: ignore[arg-type]
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
        return Finished(self.index, reason, tuple(canvas), self.nfe, plan.empty_steps, self.prefills, self.columns)


def run(
    model: Any, family: Family, spec: DiffusionSpec, rows: Sequence[tuple[Plan, DecodingOptions]], stream: Any = None
) -> Iterator[Event]:
    """The loop itself, over rows of plans and options. What :func:`stream_decode` returns."""
    for what, values in (
        ("unmasking rule", {own.rule.name for own, _ in rows}),
        ("block length", {str(own.block_length) for own, _ in rows}),
        ("cache", {own.cache for own, _ in rows}),
        ("kind of logits", {"shifted" if own.shifted else "in_place" for own, _ in rows}),
    ):
        if len(values) > 1:
            raise DiffusionError(f"All rows of a batch must use the same {what}, got {', '.join(sorted(values))}.")
    rule = rows[0][0].rule if rows else None
    if rule is not None and rule.revise is not None and family.local_attention:
        raise DiffusionError(
            f"The unmasking rule {rule.name!r} puts masks beside the canvas, and layers of the family {family.name} "
            "see a neighbourhood of it only: choose another rule."
        )
    states = [Row(index, plan, options, spec.vocab_size) for index, (plan, options) in enumerate(rows)]
    return _loop(model, family, states, stream)


def _loop(model: Any, family: Family, rows: list[Row], stream: Any) -> Iterator[Event]:
    for row in rows:
        if row.reason is not None:
            yield row.finished()
    active = [row for row in rows if row.reason is None]
    if not active:
        return
    on_stream = (lambda: mx.stream(stream)) if stream is not None else contextlib.nullcontext
    with on_stream():
        running = deque((batch, *batch.canvas()) for batch in batches(active, family, model))
    while running:
        batch, canvas, masked = running.popleft()
        with on_stream():
            canvas, masked, found = _step(batch, canvas, masked)
        for picked in found:
            yield from picked.row.commit(picked)
        with on_stream():
            canvas, masked = _overwritten(batch, canvas, masked)
        keep = [i for i, row in enumerate(batch.rows) if row.reason is None]
        if not keep:
            continue
        if len(keep) < len(batch.rows):
            with on_stream():
                batch, canvas, masked = batch.select(keep, canvas, masked)
        running.append((batch, canvas, masked))


def _overwritten(batch: Batch, canvas: mx.array, masked: mx.array) -> tuple[mx.array, mx.array]:
    """The canvas and mask with an end of sequence in all slots after the first one, of the rows that ask for it."""
    for i, row in enumerate(batch.rows):
        if row.cut:
            row.cut = False
            at = mx.array(np.array(row.plan.slots[row.ended + 1 :], dtype=np.int32) + batch.first(row))
            eos = row.tokens[row.ended]
            if at.size and eos is not None:
                canvas[i, at] = eos
                masked[i, at] = False
    return canvas, masked


class Picked(NamedTuple):
    """What a forward committed to a row, as slots in ascending order, and which slots it masked again. ``done`` says of
    a rule that edits why the stage ends, if it does."""

    row: Row
    slots: list[int]
    tokens: list[int]
    logprobs: tuple[Logprobs, ...]
    masked: list[int]
    done: str = ""


def _step(batch: Batch, canvas: mx.array, masked: mx.array) -> tuple[mx.array, mx.array, list[Picked]]:
    """One forward and one commit. Returns the new canvas and mask, and per row what was committed to which slots."""
    rows, rule = batch.rows, batch.rule
    states = batch.forward(canvas)
    seen = _look(batch, states)
    if rule.edit is not None:
        return _edit(batch, canvas, masked, states, seen)

    spans = np.array([(*row.span, row.stages[0].end) for row in rows])
    stage = mx.array((batch.slot >= spans[:, :1]) & (batch.slot < spans[:, 1:2]))
    open_ = mx.take_along_axis(masked, batch.place, axis=1)
    free = stage & open_
    confidence = seen.measures[0]
    if rule.rank is not None:
        total = mx.array(spans[:, 2:] - spans[:, :1])
        confidence = rule.rank(Ranking(seen.measures, free, total, batch.values))
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
    again = _revised(batch, canvas, mx.array(batch.slot >= 0) & stage & ~open_, counts)

    chosen = mx.take_along_axis(seen.tokens, order, axis=1)
    wanted = mx.arange(order.shape[1])[None] < counts
    place = mx.take_along_axis(batch.place, order, axis=1)
    old = mx.take_along_axis(canvas, place, axis=1)
    still = mx.take_along_axis(masked, place, axis=1) & ~wanted
    canvas = mx.put_along_axis(canvas, place, mx.where(wanted, chosen, old), axis=1)
    masked = mx.put_along_axis(masked, place, still, axis=1)
    if again is not None:
        ids = mx.where(again, batch.mask_ids.astype(canvas.dtype), mx.take_along_axis(canvas, batch.place, axis=1))
        canvas = mx.put_along_axis(canvas, batch.place, ids, axis=1)
        masked = mx.put_along_axis(masked, batch.place, mx.take_along_axis(masked, batch.place, axis=1) | again, axis=1)
    broken = seen.broken | mx.isnan(confidence).any()
    mx.eval(canvas, masked, order, chosen, counts, broken, *([] if again is None else [again]))
    _check_finite(broken)
    return canvas, masked, _read(batch, states, seen, np.array(order), np.array(chosen), np.array(counts), again)


def _check_finite(broken: mx.array) -> None:
    if np.array(broken):
        raise DiffusionError(
            "The model computed logits that are not finite numbers (NaN): its weights are damaged, or they overflow."
        )


def _edit(
    batch: Batch, canvas: mx.array, masked: mx.array, states: mx.array, seen: _Seen
) -> tuple[mx.array, mx.array, list[Picked]]:
    """What a rule that edits makes of every row's block, as :func:`_step`."""
    rows, rule = batch.rows, batch.rule
    assert rule.edit is not None
    mx.eval(seen.tokens, *seen.measures, seen.broken)
    _check_finite(seen.broken)
    columns = [batch.columns(i) for i in range(len(rows))]
    shape = len(rows), max(len(own) for own in columns)
    draft = _draft(batch, states, seen, columns, shape)
    edited = rule.edit(draft)

    ids, holes = np.zeros(batch.slot.shape, dtype=np.int32), np.zeros(batch.slot.shape, dtype=bool)
    ours, found = np.zeros(batch.slot.shape, dtype=bool), []
    for i, (row, own) in enumerate(zip(rows, columns, strict=True)):
        part = slice(len(own))
        tokens, still, source = edited.tokens[i, part], edited.masked[i, part], edited.source[i, part]
        ids[i, own] = np.where(still, row.plan.mask_token_id, tokens)
        holes[i, own], ours[i, own] = still, True
        first, block = row.stages[0].start, row.block
        assert block is not None
        block.original, block.post = edited.original[i, part], int(edited.post[i, 0])
        written = edited.written[i, part]
        changed = ~still & (written | (source != np.arange(len(own))))
        fresh = np.flatnonzero(written)
        if row.samples:
            edits = row.plan.edit_token_ids or ()
            text = draft.chosen_text[i, part][draft.masked[i, part]]
            _check_sampled(row, tokens[fresh])
            _check_sampled(row, text[np.isin(text, edits)], edits)
        entries = dict(
            zip(fresh.tolist(), _entries(batch, states, seen, i, own[source[fresh]], tokens[fresh]), strict=True)
        )
        before = row.logprobs[first : first + len(own)]
        at = np.flatnonzero(changed).tolist()
        kept = tuple(entries[n] if n in entries else before[source[n]] for n in at)
        again = np.flatnonzero(still & ~draft.masked[i, part])
        found.append(
            Picked(
                row,
                [first + n for n in at],
                tokens[at].tolist(),
                kept,  # type: ignore[arg-type]
                (first + again).tolist(),
                edited.done[i],
            )
        )
    where = mx.array(ours)
    new = mx.where(where, mx.array(ids).astype(canvas.dtype), mx.take_along_axis(canvas, batch.place, axis=1))
    open_ = mx.where(where, mx.array(holes), mx.take_along_axis(masked, batch.place, axis=1))
    canvas = mx.put_along_axis(canvas, batch.place, new, axis=1)
    return canvas, mx.put_along_axis(masked, batch.place, open_, axis=1), found


def _draft(batch: Batch, states: mx.array, seen: _Seen, columns: list[np.ndarray], shape: tuple[int, int]) -> Draft:
    """Every row's block, and what this forward says of it."""
    rows = batch.rows
    tokens, masked = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    original, there = masked.copy(), masked.copy()
    for i, (row, own) in enumerate(zip(rows, columns, strict=True)):
        first, count = row.stages[0].start, len(own)
        stands = row.tokens[first : first + count]
        tokens[i, :count] = [0 if token is None else token for token in stands]
        masked[i, :count] = [token is None for token in stands]
        if row.block is None:
            row.block = Block(int(masked[i].sum()), masked[i, :count].copy())
        original[i, :count], there[i, :count] = row.block.original, True

    def blocks(values: mx.array) -> np.ndarray:
        whole = np.array(values)
        part = np.zeros(shape, dtype=whole.dtype)
        for i, own in enumerate(columns):
            part[i, : len(own)] = whole[i, own]
        return part

    def redraw(i: int, position: int, banned: int, sampled: bool) -> int:
        row = rows[i]
        logits = _logits_at(batch, states, seen, i, columns[i][position : position + 1])
        logits = logits if batch.never is None else logits + batch.never[i]
        logits = mx.where(mx.arange(logits.shape[-1]) == banned, -mx.inf, logits)
        if not (sampled and row.samples):
            return int(np.array(mx.argmax(logits, axis=-1))[0])
        keys = None if row.options.sampler is not None else row.draw()[None]
        return int(np.array(_sample(row, batch.rule, logits, keys))[0])

    def pick(i: int, n: int) -> int:
        row = rows[i]
        if row.key is None and row.options.seed is None and not row.samples:
            row.key = mx.random.key(0)  # greedy decoding says the same every time
        return int(np.array(mx.random.randint(0, n, key=row.draw()))) if n > 1 else 0

    states_of = [row.block for row in rows if row.block is not None]
    confidence, certainty, best, chosen_text, best_text = (blocks(values) for values in seen.measures)
    return Draft(
        tokens=tokens,
        masked=masked,
        original=original,
        there=there,
        chosen=blocks(seen.tokens).astype(np.int64),
        confidence=confidence,
        best=best.astype(np.int64),
        certainty=certainty,
        chosen_text=chosen_text.astype(np.int64),
        best_text=best_text.astype(np.int64),
        masks=np.array([[block.masks] for block in states_of]),
        step=np.array([[row.step] for row in rows]),
        post=np.array([[block.post] for block in states_of]),
        values={name: np.array([[row.plan.values[name]] for row in rows], dtype=np.float32) for name in batch.values},
        edit_token_ids=rows[0].plan.edit_token_ids,
        seen=[block.seen for block in states_of],
        redraw=redraw,
        pick=pick,
    )


class _Seen(NamedTuple):
    """What a forward says of its columns: the token each would get and the rule's measures [B, W], whether a logit is
    not finite, and the logits [B, W, V] if they were made at once. For a rule that edits, the measures go on with the
    best token, and with the token and the best token that are no edit."""

    tokens: mx.array
    measures: tuple[mx.array, ...]
    broken: mx.array
    logits: mx.array | None


def _look(batch: Batch, states: mx.array) -> _Seen:
    """Head, tokens and measures, a chunk of columns after the other: a chunk's logits are gone before the next's."""
    rule = batch.rule
    draws = _draws(batch)
    past = batch.recall() if rule.memory is not None else ()
    parts: list[tuple[mx.array, tuple[mx.array, ...], mx.array]] = []
    kept: list[tuple[mx.array, ...]] = []
    logits = None
    chunks = list(batch.chunks(states))
    for columns in chunks:
        part = states[:, columns]
        if parts:
            part = mx.depends([part], [parts[-1][0], *parts[-1][1], parts[-1][2]])[0]
        logits = batch.logits(part)
        memory: tuple[mx.array, ...] = ()
        if rule.memory is not None:
            memory = rule.memory(logits, tuple(m[:, columns] for m in past), batch.values)
            kept.append(memory)
        adjusted = logits if rule.logits is None else rule.logits(logits, memory, batch.values)
        tokens, candidates, more = _choose(batch, adjusted, columns, draws)
        measured = rule.confidence(candidates._replace(memory=memory))
        measures = (*(measured if isinstance(measured, tuple) else (measured,)), *more)
        best = logits.max(axis=-1)
        broken = mx.isnan(logits).any() | ~((best < mx.inf) & (best > -mx.inf)).all()
        parts.append((tokens, measures, broken))
    if kept:
        batch.remember(tuple(mx.concatenate(list(m), axis=1) for m in zip(*kept, strict=True)))
    if len(parts) == 1:
        return _Seen(*parts[0], logits)
    return _Seen(
        mx.concatenate([tokens for tokens, _, _ in parts], axis=1),
        tuple(mx.concatenate(list(m), axis=1) for m in zip(*(measures for _, measures, _ in parts), strict=True)),
        mx.stack([broken for _, _, broken in parts]).any(),
        None,
    )


def _revised(batch: Batch, canvas: mx.array, committed: mx.array, counts: mx.array) -> mx.array | None:
    """Which committed columns are masked again [B, W], by what the masks in their stead say of them."""
    if batch.rule.revise is None or batch.shadows is None:
        return None
    there = mx.take_along_axis(canvas, batch.place, axis=1)
    parts: list[mx.array] = []
    for columns in batch.chunks(batch.shadows):
        part = batch.shadows[:, columns]
        if parts:
            part = mx.depends([part], parts[-1:])[0]
        logits = batch.logits(part)
        own = mx.take_along_axis(logits, there[:, columns, None], axis=-1)[..., 0]
        parts.append(mx.exp(own - mx.logsumexp(logits, axis=-1)))
    return batch.rule.revise(Doubts(mx.concatenate(parts, axis=1), committed, counts, batch.values)) & committed


def _read(
    batch: Batch,
    states: mx.array,
    seen: _Seen,
    order: np.ndarray,
    chosen: np.ndarray,
    counts: np.ndarray,
    again: mx.array | None,
) -> list[Picked]:
    """What was committed, and its log-probabilities: computed, but not waited for."""
    found = []
    for i, row in enumerate(batch.rows):
        masked = [] if again is None else batch.slot[i, np.array(again[i])].tolist()
        count = int(counts[i, 0])
        if not count:
            found.append(Picked(row, [], [], (), masked))
            continue
        by_column = np.argsort(order[i, :count])
        columns, tokens = order[i, by_column], chosen[i, by_column]
        if row.samples:
            _check_sampled(row, tokens)
        entries = _entries(batch, states, seen, i, columns, tokens)
        found.append(Picked(row, batch.slot[i, columns].tolist(), tokens.tolist(), entries, masked))
    return found


def _logits_at(batch: Batch, states: mx.array, seen: _Seen, i: int, columns: np.ndarray) -> mx.array:
    """Logits [n, V] of some of row i's columns, which are made again if they were made in chunks."""
    if seen.logits is not None:
        return seen.logits[i, mx.array(columns)]
    return batch.logits(states[mx.array(batch.doubled([i]))][:, mx.array(columns)], [i])[0]


def _entries(
    batch: Batch, states: mx.array, seen: _Seen, i: int, columns: np.ndarray, tokens: np.ndarray
) -> tuple[Logprobs, ...]:
    """The log-probabilities of tokens that this forward commits to some of row i's columns, not waited for."""
    if not len(columns):
        return ()
    at_commit = _logits_at(batch, states, seen, i, columns)
    logprobs = at_commit - mx.logsumexp(at_commit, axis=-1, keepdims=True)
    top = min(TOP_LOGPROBS, logprobs.shape[-1])
    ids = mx.argpartition(-logprobs, kth=top - 1, axis=-1)[:, :top]
    values = mx.take_along_axis(logprobs, ids, axis=-1)
    own = mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1)[:, 0]
    full = logprobs if batch.rows[i].options.full_logprobs else None
    mx.async_eval(own, ids, values, *([] if full is None else [full]))
    return tuple(Logprobs(int(token), (own, ids, values, full), j) for j, token in enumerate(tokens))


class _Draws(NamedTuple):
    """The random numbers of a step: per row a key for each slot of its stage [n, 2] where tokens are sampled, and
    uniform numbers [B, W] where the rule draws. They depend on the row alone."""

    keys: list[mx.array | None]
    noise: mx.array | None


def _draws(batch: Batch) -> _Draws:
    keys: list[mx.array | None] = []
    noise: list[mx.array] = []
    drawn = False
    for row in batch.rows:
        count = row.stages[0].end - row.stages[0].start
        keys.append(mx.random.split(row.draw(), count) if row.samples and row.options.sampler is None else None)
        draws = batch.rule.draws(row.plan.values)
        noise.append(mx.random.uniform(shape=(count,), key=row.draw()) if draws else mx.zeros((count,)))
        drawn |= draws
    return _Draws(keys, batch.spread(noise) if drawn else None)


def _choose(
    batch: Batch, logits: mx.array, columns: slice, draws: _Draws
) -> tuple[mx.array, Candidates, tuple[mx.array, ...]]:
    """The token each of these columns would get [B, c], and what confidences are made of: the tokens there differ only
    where greedy decoding would have chosen an id that is never emitted. For a rule that edits also the best token, and
    both without the edit tokens."""
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
    text = tokens
    if rule.edit is not None:
        best = best_text = mx.array(tokens)  # what is drawn below is written into tokens and text
    if batch.edits is not None:
        plain = allowed + batch.edits
        text = mx.argmax(plain, axis=-1)
        best_text = mx.array(text)
    for i, row in enumerate(rows):
        at = batch.columns(i)
        at = at[(at >= columns.start) & (at < columns.stop)]
        if not row.samples or not len(at):
            continue
        own = draws.keys[i]
        keys = None if own is None else own[mx.array(batch.slot[i, at] - row.stages[0].start)]
        here = mx.array(at - columns.start)
        drawn = _sample(row, rule, allowed[i, here], keys).astype(tokens.dtype)
        tokens[i, here] = drawn
        scored[i, here] = mx.minimum(drawn, row.vocab_size - 1)  # a host's sampler may return anything
        if batch.edits is not None:
            text[i, here] = _sample(row, rule, plain[i, here], keys).astype(text.dtype)
    noise = mx.zeros(tokens.shape) if draws.noise is None else draws.noise[:, columns]
    if batch.late is not None:
        counted = counted + batch.late
    if rule.edit is None:
        return tokens, Candidates(counted, scored, noise, batch.values, batch.mask_ids), ()
    within = mx.minimum(tokens, counted.shape[-1] - 1)
    return tokens, Candidates(counted, within, noise, batch.values, batch.mask_ids, best=best), (best, text, best_text)


def _filtered(batch: Batch, logits: mx.array) -> mx.array:
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


def _sample(row: Row, rule: Rule, logits: mx.array, keys: mx.array | None) -> mx.array:
    """Tokens [n] drawn from logits [n, V] with keys [n, 2], by the Gumbel-max trick in float32 log space: mlx-lm's
    filters on the log-probabilities, then the temperature, unless the rule has filtered them already."""
    options = row.options
    if keys is None:
        return _call_sampler(options.sampler, logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    if not rule.filters:
        logits = _cut(replace(options, temp=None), logits, ("top_p", "min_p", "top_k")) / (options.temp or 1.0)
    noise = mx.vmap(lambda key: mx.random.gumbel(logits.shape[1:], dtype=mx.float32, key=key))(keys)
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


def _check_sampled(row: Row, tokens: np.ndarray, never: Sequence[int] = ()) -> None:
    for token in tokens.tolist():
        if token >= row.vocab_size or token in row.plan.never or token in never:
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
        columns=event.columns,
    )
