"""THE decoding loop: canvas in, committed tokens out. One for all families, batch sizes and hosts.

A step is one forward and one commit, vectorised over rows, with one host synchronisation. Rows have their own canvas,
schedule, random key and options; they are left-padded to one width, and padding changes no bit of a row on the CPU.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .caches import FullCanvas
from .errors import DiffusionError
from .families import FAMILIES, Family
from .families.a2d import whole
from .options import DecodingOptions
from .samplers import RULES, Rule, users
from .spec import DiffusionSpec, check_mask_token_id

TOP_LOGPROBS = 20
LONGEST_CANVAS = 2**20  # when the checkpoint names no context


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
    the end of the output."""

    row: int
    reason: str
    canvas: tuple[int, ...]
    nfe: int
    empty_steps: int


Event = Commit | BlockDone | Released | Finished


@dataclass
class DecodingResult:
    """
    Args:
        tokens: the output, without the end-of-sequence token.
        finish_reason: ``stop`` or ``length``.
        nfe: forwards this row took part in.
        empty_steps: steps of the schedule that commit nothing; they cost no forward.
        prompt_tokens: length of the prompt.
        canvas: the whole canvas, prompt included.
        commits: what each forward committed, in order.
        logprobs: one entry per output token, and one for the end-of-sequence token when it stopped there.
    """

    tokens: list[int]
    finish_reason: str
    nfe: int
    empty_steps: int
    prompt_tokens: int
    canvas: list[int]
    commits: list[Commit]
    logprobs: list[Logprobs]

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
    results: list[DecodingResult | None] = [None] * len(rows)
    commits: list[list[Commit]] = [[] for _ in rows]
    released: list[list[Released]] = [[] for _ in rows]
    for event in stream_decode(model, rows, options, stream=stream):
        if isinstance(event, Commit):
            commits[event.row].append(event)
        elif isinstance(event, Released):
            released[event.row].append(event)
        elif isinstance(event, Finished):
            results[event.row] = _result(event, len(rows[event.row]), commits[event.row], released[event.row])
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
    if options is None or isinstance(options, DecodingOptions):
        per_row = [options or DecodingOptions()] * len(prompt_rows)
    else:
        per_row = list(options) if isinstance(options, Sequence) else [options]
        wrong = next((own for own in per_row if not isinstance(own, DecodingOptions)), None)
        if wrong is not None or None in per_row:
            raise DiffusionError(f"Options must be DecodingOptions, one or a list of them, got {wrong!r}.")
        if len(per_row) != len(prompt_rows):
            raise DiffusionError(
                f"Options must be one for all rows or one per row: {len(per_row)} for {len(prompt_rows)} prompts."
            )
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


class Plan(NamedTuple):
    """
    What a row will do.

    Args:
        canvas: its ids, masks included.
        slots: the masked positions, ascending. Blocks and output are counted in slots.
        cap: slots of the output at most.
        steps: per step (first slot, last slot + 1, commits); None commits means "as the rule finds", for as many
            steps as the block takes.
    """

    rule: Rule
    canvas: tuple[int, ...]
    slots: tuple[int, ...]
    cap: int
    steps: tuple[tuple[int, int, int | None], ...]
    empty_steps: int
    mask_token_id: int
    eos: frozenset[int]
    never: tuple[int, ...]
    confidence_temperature: float
    threshold: float


def plan(spec: DiffusionSpec, prompt: Sequence[int], options: DecodingOptions) -> Plan:
    """
    Check a prompt and its options against a spec, and lay out the row's canvas and schedule.

    Raises:
        DiffusionError: anything that cannot be decoded as asked, in one sentence.
    """
    mask = _mask_token_id(spec, options)
    if not prompt:
        raise DiffusionError("The prompt is empty: give at least one token.")
    _check_ids(prompt, spec)
    length = _canvas_length(spec, len(prompt), options)
    canvas = (*prompt, *[mask] * (length - len(prompt)))
    cap = options.max_tokens if options.max_tokens and options.max_tokens > 0 else length
    return plan_slots(spec, canvas, range(len(prompt), length), options, cap=cap)


def plan_slots(
    spec: DiffusionSpec, canvas: Sequence[int], slots: Sequence[int], options: DecodingOptions, cap: int | None = None
) -> Plan:
    """
    The plan of a canvas whose masked positions are known.

    Raises:
        DiffusionError: as :func:`plan`.
    """
    rule = RULES.get(options.unmasking or spec.unmasking)
    _refuse_unused(rule, options)
    if options.temp and options.sampler is not None:
        raise DiffusionError("Give temp or a sampler, not both: a sampler brings its own temperature.")
    mask = _mask_token_id(spec, options)
    _check_ids(canvas, spec)
    if spec.logits == "shifted" and slots and slots[0] == 0:
        raise DiffusionError("A model with shifted logits needs an unmasked first token: nothing predicts position 0.")
    suppressed = options.suppress_tokens or ()
    outside = next((token for token in suppressed if token >= spec.vocab_size), None)
    if outside is not None:
        raise DiffusionError(f"suppress_tokens has id {outside}, outside the vocabulary of {spec.vocab_size}.")
    steps, empty = _steps(spec, rule, len(slots), options)
    eos = frozenset(options.eos_token_ids if options.eos_token_ids is not None else spec.eos_token_ids)
    # A checkpoint whose mask is its end of sequence (a2d's mask token "reuse") may emit it; a caller's list counts not.
    reused = mask in spec.eos_token_ids and not rule.drop_mask
    never = {*suppressed, *(() if reused else (mask,))}
    if len(never) >= spec.vocab_size:
        raise DiffusionError("suppress_tokens leaves no token to emit.")
    return Plan(
        rule=rule,
        canvas=tuple(canvas),
        slots=tuple(slots),
        cap=len(slots) if cap is None else min(cap, len(slots)),
        steps=steps,
        empty_steps=empty,
        mask_token_id=mask,
        eos=frozenset() if options.stop_at_eos is False else eos,
        never=tuple(sorted(never)),
        confidence_temperature=_or_default("confidence_temperature", 1.0, spec, rule, options),
        threshold=_or_default("threshold", 0.9, spec, rule, options),
    )


def _mask_token_id(spec: DiffusionSpec, options: DecodingOptions) -> int:
    mask, source = options.mask_token_id, "the option"
    if mask is None:
        mask, source = spec.mask_token_id, spec.sources.get("mask_token_id", "the checkpoint")
    if mask is None:
        raise DiffusionError(
            "The checkpoint does not say which token is its mask: give mask_token_id (--mask-token-id)."
        )
    check_mask_token_id(mask, spec.vocab_size, source)
    return mask


def _check_ids(ids: Sequence[int], spec: DiffusionSpec) -> None:
    outside = next((token for token in ids if not 0 <= token < spec.vocab_size), None)
    if outside is not None:
        raise DiffusionError(
            f"The prompt has token id {outside}, outside the vocabulary of {spec.vocab_size}: "
            "the tokenizer does not belong to this checkpoint."
        )


def _or_default(name: str, default: float, spec: DiffusionSpec, rule: Rule, options: DecodingOptions) -> float:
    value = getattr(options, name)
    if value is not None:
        return value
    return spec.defaults.get(name, default) if name in rule.uses else default


def _refuse_unused(rule: Rule, options: DecodingOptions) -> None:
    for name, option in DecodingOptions.__dataclass_fields__.items():
        if option.metadata["common"] or getattr(options, name) is None or name in rule.uses:
            continue
        raise DiffusionError(
            f"The unmasking rule {rule.name!r} does not use {name}; leave it out, or choose a rule that does with "
            f"unmasking (--unmasking {'|'.join(users(name))})."
        )


def _canvas_length(spec: DiffusionSpec, prompt: int, options: DecodingOptions) -> int:
    if options.max_tokens == -1:
        raise DiffusionError(
            f"max_tokens -1 (up to the context) needs a canvas that grows; the family {spec.family} has a fixed one: "
            "give the number of tokens."
        )
    if spec.context_length is not None and prompt >= spec.context_length and options.canvas_length != prompt:
        raise DiffusionError(
            f"The prompt has {prompt} tokens and the model's context is {spec.context_length}: shorten the prompt."
        )
    if options.canvas_length is not None:
        canvas, named = options.canvas_length, "canvas_length"
        if canvas < prompt:
            raise DiffusionError(
                f"canvas_length {canvas} is shorter than the prompt of {prompt} tokens; it counts the prompt too: "
                f"give at least {prompt + 1}."
            )
    elif options.max_tokens is not None:
        canvas, named = prompt + options.max_tokens, f"prompt {prompt} + max_tokens {options.max_tokens}"
    else:
        canvas = spec.defaults["canvas_length"]
        named = "the checkpoint's own canvas_length"
        if canvas <= prompt:
            raise DiffusionError(
                f"The prompt has {prompt} tokens, which leaves no room in the checkpoint's canvas of {canvas}: "
                "say how many tokens to write with max_tokens (--max-tokens)."
            )
    if spec.context_length is None and canvas > LONGEST_CANVAS:
        raise DiffusionError(
            f"A canvas of {canvas} tokens ({named}) is too long: the checkpoint names no context, and at most "
            f"{LONGEST_CANVAS} are decoded then."
        )
    if spec.context_length is not None and canvas > spec.context_length:
        raise DiffusionError(
            f"A canvas of {canvas} tokens ({named}) exceeds the model's context of {spec.context_length}: "
            f"the prompt has {prompt}, so at most {max(spec.context_length - prompt, 0)} new tokens fit."
        )
    return canvas


def _steps(
    spec: DiffusionSpec, rule: Rule, masks: int, options: DecodingOptions
) -> tuple[tuple[tuple[int, int, int | None], ...], int]:
    """The steps of a plan, blocks from left to right, and the number of empty ones."""
    if masks == 0:
        return (), 0
    length = min(options.block_length or masks, masks)
    blocks = [(start, min(start + length, masks)) for start in range(0, masks, length)]
    if rule.schedule is None:
        return tuple((start, end, None) for start, end in blocks), 0
    total = options.max_denoising_steps
    if total is None:
        total = max(spec.defaults.get("max_denoising_steps", masks), len(blocks))
    elif total < len(blocks):
        raise DiffusionError(
            f"max_denoising_steps {total} is less than the {len(blocks)} blocks of {length} tokens; each needs a step."
        )
    steps, empty = [], 0
    for number, (start, end) in enumerate(blocks):
        own = total // len(blocks) + (number < total % len(blocks))
        for count in rule.schedule(end - start, own):
            if count:
                steps.append((start, end, count))
            else:
                empty += 1
    return tuple(steps), empty


Row = tuple[Plan, DecodingOptions]


class _Row:
    """A row's state: what is committed, what is released, and its random key."""

    def __init__(self, index: int, plan: Plan, options: DecodingOptions, vocab_size: int):
        self.index = index
        self.plan = plan
        self.vocab_size = vocab_size
        self.options = options
        self.steps = deque(plan.steps)
        self.tokens: list[int | None] = [None] * len(plan.slots)
        self.logprobs: list[Logprobs | None] = [None] * len(plan.slots)
        self.released = 0
        self.nfe = 0
        self.reason: str | None = None if plan.cap else "length"
        self.key: mx.array | None = None

    @property
    def samples(self) -> bool:
        return bool(self.options.temp) or self.options.sampler is not None

    def draw(self) -> mx.array:
        """A fresh key. The first comes from the option ``seed``, else from MLX's global random state."""
        if self.key is None:
            seed = self.options.seed
            self.key = mx.random.key(int(np.array(mx.random.randint(0, 2**31 - 1))) if seed is None else seed)
        self.key, key = mx.random.split(self.key)
        return key

    def commit(self, at: Sequence[int], tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> Iterator[Event]:
        """Take over what a forward committed to the slots ``at``, and say what follows from it."""
        start, end, count = self.steps[0]
        slots = self.plan.slots
        self.nfe += 1
        for slot, token, entry in zip(at, tokens, logprobs, strict=True):
            self.tokens[slot], self.logprobs[slot] = token, entry
        yield Commit(self.index, self.nfe - 1, tuple(slots[slot] for slot in at), tuple(tokens), tuple(logprobs))
        block_done = None not in self.tokens[start:end]
        if block_done or count is not None:
            self.steps.popleft()
        if block_done:
            yield BlockDone(self.index, slots[start], slots[end - 1] + 1)
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
        canvas = list(self.plan.canvas)
        for slot, token in zip(self.plan.slots, self.tokens, strict=True):
            canvas[slot] = self.plan.mask_token_id if token is None else token
        return Finished(self.index, self.reason or "length", tuple(canvas), self.nfe, self.plan.empty_steps)


class _Batch:
    """The rows that are decoded together, and what stays the same while they are: built anew when one leaves.

    Rows are padded on the left to one width. All slots lie in the last ``window`` columns; ``slot`` [B, window] says
    which slot a column is, or -1.
    """

    def __init__(self, rows: list[_Row], family: Family, model: Any):
        self.rows = rows
        self.rule = rows[0].plan.rule
        self.width = max(len(row.plan.canvas) for row in rows)
        self.window = max(len(row.plan.canvas) - row.plan.slots[0] for row in rows)
        padding = [self.width - len(row.plan.canvas) for row in rows]
        if family.score_rank is None and any(padding):
            raise DiffusionError(
                f"Rows of unequal length cannot be decoded together by the family {family.name}, which does not say "
                "the rank of its attention scores: decode them one by one."
            )
        rank = family.score_rank(model) if family.score_rank else 4
        self.cache = FullCanvas(padding, self.width, rank)
        self.slot = np.full((len(rows), self.window), -1)
        for i, row in enumerate(rows):
            self.slot[i, self.columns(row)] = np.arange(len(row.plan.slots))
        self.temperature = mx.array([[row.plan.confidence_temperature] for row in rows])
        self.threshold = mx.array([[row.plan.threshold] for row in rows])
        self.never = _banned([row.plan.never for row in rows], rows[0].vocab_size)
        masks = [(row.plan.mask_token_id,) for row in rows]
        self.masks = _banned(masks, rows[0].vocab_size) if self.rule.drop_mask else None

    def columns(self, row: _Row) -> np.ndarray:
        """The columns of a row's slots in the window."""
        return np.array(row.plan.slots) + (self.window - len(row.plan.canvas))

    def spread(self, parts: list[mx.array]) -> mx.array:
        """Per row a value for each slot [n] -> per column [B, window]; anything in the other columns."""
        return mx.stack([part[mx.array(np.maximum(slot, 0))] for part, slot in zip(parts, self.slot, strict=True)])

    def canvas(self) -> tuple[mx.array, mx.array]:
        """The first canvas [B, width] and which of it is masked."""
        canvas = np.zeros((len(self.rows), self.width), dtype=np.int32)
        masked = np.zeros((len(self.rows), self.width), dtype=bool)
        for i, row in enumerate(self.rows):
            canvas[i, self.width - len(row.plan.canvas) :] = row.plan.canvas
            masked[i, self.width - self.window + self.columns(row)] = True
        return mx.array(canvas), mx.array(masked)


def _banned(ids: Sequence[tuple[int, ...]], vocab_size: int) -> mx.array | None:
    """Added to logits [B, W, V]: minus infinity at each row's ids, or None when there are none."""
    if not any(ids):
        return None
    banned = np.zeros((len(ids), 1, vocab_size), dtype=np.float32)
    for i, own in enumerate(ids):
        banned[i, 0, list(own)] = -np.inf
    return mx.array(banned)


def run(model: Any, family: Family, spec: DiffusionSpec, rows: Sequence[Row], stream: Any = None) -> Iterator[Event]:
    """The loop itself, over rows of plans and options. What :func:`stream_decode` returns."""
    names = sorted({plan.rule.name for plan, _ in rows})
    if len(names) > 1:
        raise DiffusionError(f"All rows of a batch must use the same unmasking rule, got {', '.join(names)}.")
    states = [_Row(index, plan, options, spec.vocab_size) for index, (plan, options) in enumerate(rows)]
    return _loop(model, family, spec.logits == "shifted", states, stream)


def _loop(model: Any, family: Family, shifted: bool, rows: list[_Row], stream: Any) -> Iterator[Event]:
    for row in rows:
        if row.reason is not None:
            yield row.finished()
    active = [row for row in rows if row.reason is None]
    if not active:
        return
    on_stream = (lambda: mx.stream(stream)) if stream is not None else contextlib.nullcontext
    with on_stream():
        batch = _Batch(active, family, model)
        canvas, masked = batch.canvas()
    while True:
        with on_stream():
            canvas, masked, picked = _step(model, family, shifted, batch, canvas, masked)
        for row, slots, tokens, logprobs in picked:
            yield from row.commit(slots, tokens, logprobs)
        keep = [i for i, row in enumerate(batch.rows) if row.reason is None]
        if not keep:
            return
        if len(keep) < len(batch.rows):
            with on_stream():
                batch = _Batch([batch.rows[i] for i in keep], family, model)
                canvas = canvas[mx.array(keep)][:, -batch.width :]
                masked = masked[mx.array(keep)][:, -batch.width :]


Picked = list[tuple[_Row, list[int], list[int], tuple[Logprobs, ...]]]


def _step(
    model: Any, family: Family, shifted: bool, batch: _Batch, canvas: mx.array, masked: mx.array
) -> tuple[mx.array, mx.array, Picked]:
    """One forward and one commit. Returns the new canvas and mask, and per row what was committed to which slots."""
    rows, rule = batch.rows, batch.rule
    before = batch.width - batch.window
    states = family.hidden(model, canvas, [batch.cache] * len(getattr(model, "layers", ())))
    read = slice(before - shifted, batch.width - shifted)  # shifted logits of position i - 1 predict token i
    logits = family.head(model, states[:, read]).astype(mx.float32)

    allowed = logits if batch.never is None else logits + batch.never
    if batch.masks is not None:
        logits = logits + batch.masks
    tokens, scored = _choose(batch, logits, allowed)
    noise = mx.zeros(tokens.shape)
    if rule.draws:
        noise = batch.spread([mx.random.uniform(shape=(len(row.plan.slots),), key=row.draw()) for row in rows])
    confidence = rule.confidence(logits, scored, batch.temperature, noise)

    span = np.array([row.steps[0][:2] for row in rows])
    block = mx.array((batch.slot >= span[:, :1]) & (batch.slot < span[:, 1:]))
    ranked = mx.where(block & masked[:, before:], confidence, -mx.inf)
    order = mx.argsort(-ranked, axis=1)
    if rule.select is None:
        counts = mx.array([[row.steps[0][2]] for row in rows])
        order = order[:, : max(row.steps[0][2] or 0 for row in rows)]
    confidence = mx.take_along_axis(ranked, order, axis=1)
    if rule.select is not None:
        counts = rule.select(confidence, batch.threshold)
    chosen = mx.take_along_axis(tokens, order, axis=1)
    wanted = mx.arange(order.shape[1])[None] < counts
    place = order + before
    old = mx.take_along_axis(canvas, place, axis=1)
    still = mx.take_along_axis(masked, place, axis=1) & ~wanted
    canvas = mx.put_along_axis(canvas, place, mx.where(wanted, chosen, old), axis=1)
    masked = mx.put_along_axis(masked, place, still, axis=1)
    # Random confidences say nothing about the logits.
    broken = (~mx.isfinite(logits) if rule.draws else mx.isnan(confidence)).any()
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


def _choose(batch: _Batch, logits: mx.array, allowed: mx.array) -> tuple[mx.array, mx.array]:
    """The token each position would get, and the token whose probability is its confidence: [B, W] twice. They differ
    only where greedy decoding would have chosen an id that is never emitted."""
    tokens, scored = mx.argmax(allowed, axis=-1), mx.argmax(logits, axis=-1)
    if not any(row.samples for row in batch.rows):
        return tokens, scored
    own, counted = [], []
    for i, row in enumerate(batch.rows):
        columns = mx.array(batch.columns(row))
        if row.samples:
            own.append(_sample(row, allowed[i, columns]).astype(tokens.dtype))
            counted.append(mx.minimum(own[-1], row.vocab_size - 1))  # a host's sampler may return anything
        else:
            own.append(tokens[i, columns])
            counted.append(scored[i, columns])
    return batch.spread(own), batch.spread(counted)


def _sample(row: _Row, logits: mx.array) -> mx.array:
    """Tokens [n] drawn from logits [n, V]: mlx-lm's filters on the log-probabilities, then the temperature, by the
    Gumbel-max trick in float32 log space."""
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

    options = row.options
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if options.sampler is not None:
        return _call_sampler(options.sampler, logprobs)
    if options.top_p and options.top_p < 1:
        logprobs = apply_top_p(logprobs, options.top_p)
    if options.min_p:
        logprobs = apply_min_p(logprobs, options.min_p)
    if options.top_k and options.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, options.top_k)
    noise = mx.random.gumbel(logprobs.shape, dtype=mx.float32, key=row.draw())
    return mx.argmax(logprobs / (options.temp or 1.0) + noise, axis=-1)


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
    )
