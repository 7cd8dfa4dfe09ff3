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
from .options import DecodingOptions
from .samplers import RULES, Rule
from .spec import DiffusionSpec, check_mask_token_id

TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Logprobs:
    """
    Log-probabilities of one committed token: log-softmax at temperature 1, at its own position, in the forward that
    committed it.

    Args:
        id: the committed token.
        token: its log-probability.
        top: (id, log-probability) of the most likely tokens, best first, at most 20.
        full: all of them [V] when ``full_logprobs`` was asked for, else None.
    """

    id: int
    token: float
    top: tuple[tuple[int, float], ...]
    full: mx.array | None = None

    def vector(self, vocab_size: int) -> mx.array:
        """All of them [V] in float32; minus infinity where they were not kept (outside the top 20)."""
        if self.full is not None:
            return self.full
        values = np.full(vocab_size, -np.inf, dtype=np.float32)
        values[[i for i, _ in self.top]] = [value for _, value in self.top]
        values[self.id] = self.token
        return mx.array(values)


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
        per_row = list(options)
        if len(per_row) != len(prompt_rows):
            raise DiffusionError(
                f"Options must be one for all rows or one per row: {len(per_row)} for {len(prompt_rows)} prompts."
            )
    rows = [
        _Row(index, plan(spec, prompt, own), own, spec.vocab_size)
        for index, (prompt, own) in enumerate(zip(prompt_rows, per_row, strict=True))
    ]
    names = sorted({row.plan.rule.name for row in rows})
    if len(names) > 1:
        raise DiffusionError(f"All rows of a batch must use the same unmasking rule, got {', '.join(names)}.")
    return _loop(model, FAMILIES.get(spec.family), rows, stream)


def bidirectional_forward(model: Any, ids: mx.array, *, stream: Any = None) -> mx.array:
    """
    Logits of one forward in which every position sees every position.

    Args:
        ids: token ids [B, T], without padding.

    Returns:
        mx.array: logits [B, T, V], in the model's type; not shifted. The model itself stays causal.
    """
    family = FAMILIES.get(spec_of(model).family)
    with mx.stream(stream) if stream is not None else contextlib.nullcontext():
        return family.head(model, family.hidden(model, ids, [FullCanvas()] * len(model.layers)))


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
    """What a row will do: its rule, number of masks, and per step (first mask, last mask + 1, commits)."""

    rule: Rule
    prompt: tuple[int, ...]
    masks: int
    cap: int
    steps: tuple[tuple[int, int, int], ...]
    empty_steps: int
    mask_token_id: int
    eos: frozenset[int]
    never: tuple[int, ...]
    confidence_temperature: float


def plan(spec: DiffusionSpec, prompt: Sequence[int], options: DecodingOptions) -> Plan:
    """
    Check a prompt and its options against a spec, and lay out the row's canvas and schedule.

    Raises:
        DiffusionError: anything that cannot be decoded as asked, in one sentence.
    """
    rule = RULES.get(options.unmasking or spec.unmasking)
    _refuse_unused(rule, options)
    if options.temp and options.sampler is not None:
        raise DiffusionError("Give temp or a sampler, not both: a sampler brings its own temperature.")
    mask = options.mask_token_id if options.mask_token_id is not None else spec.mask_token_id
    if mask is None:
        raise DiffusionError(
            "The checkpoint does not say which token is its mask: give mask_token_id (--mask-token-id)."
        )
    check_mask_token_id(mask, spec.vocab_size, "the option mask_token_id")
    if not prompt:
        raise DiffusionError("The prompt is empty: give at least one token.")
    outside = next((t for t in prompt if not 0 <= t < spec.vocab_size), None)
    if outside is not None:
        raise DiffusionError(
            f"The prompt has token id {outside}, outside the vocabulary of {spec.vocab_size}: "
            "the tokenizer does not belong to this checkpoint."
        )
    suppressed = options.suppress_tokens or ()
    outside = next((t for t in suppressed if t >= spec.vocab_size), None)
    if outside is not None:
        raise DiffusionError(f"suppress_tokens has id {outside}, outside the vocabulary of {spec.vocab_size}.")

    canvas = _canvas_length(spec, len(prompt), options)
    masks = canvas - len(prompt)
    asked = options.max_tokens
    steps, empty = _steps(spec, rule, masks, options)
    eos = frozenset(options.eos_token_ids if options.eos_token_ids is not None else spec.eos_token_ids)
    never = {*suppressed, *(() if mask in eos and not rule.drop_mask else (mask,))}
    if len(never) >= spec.vocab_size:
        raise DiffusionError("suppress_tokens leaves no token to emit.")
    return Plan(
        rule=rule,
        prompt=tuple(prompt),
        masks=masks,
        cap=min(masks, asked) if asked and asked > 0 else masks,
        steps=steps,
        empty_steps=empty,
        mask_token_id=mask,
        eos=frozenset() if options.stop_at_eos is False else eos,
        never=tuple(sorted(never)),
        confidence_temperature=_or_default(options.confidence_temperature, spec, "confidence_temperature", rule),
    )


def _or_default(value: float | None, spec: DiffusionSpec, name: str, rule: Rule) -> float:
    if value is not None:
        return value
    return spec.defaults.get(name, 1.0) if name in rule.uses else 1.0


def _refuse_unused(rule: Rule, options: DecodingOptions) -> None:
    for name, option in DecodingOptions.__dataclass_fields__.items():
        if option.metadata["common"] or getattr(options, name) is None or name in rule.uses:
            continue
        users = [other for other in RULES.names() if name in RULES.get(other).uses]
        raise DiffusionError(
            f"The unmasking rule {rule.name!r} does not use {name}; leave it out, or choose one that does: "
            f"{', '.join(users)}."
        )


def _canvas_length(spec: DiffusionSpec, prompt: int, options: DecodingOptions) -> int:
    if options.max_tokens == -1:
        raise DiffusionError(
            f"max_tokens -1 (up to the context) needs a canvas that grows; the family {spec.family} has a fixed one: "
            "give the number of tokens."
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
    if spec.context_length is not None and canvas > spec.context_length:
        raise DiffusionError(
            f"A canvas of {canvas} tokens ({named}) exceeds the model's context of {spec.context_length}: "
            f"the prompt has {prompt}, so at most {max(spec.context_length - prompt, 0)} new tokens fit."
        )
    return canvas


def _steps(
    spec: DiffusionSpec, rule: Rule, masks: int, options: DecodingOptions
) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """Per forward (first mask, last mask + 1, commits), blocks from left to right, and the number of empty steps."""
    if masks == 0:
        return (), 0
    length = min(options.block_length or masks, masks)
    blocks = [(start, min(start + length, masks)) for start in range(0, masks, length)]
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


class _Row:
    """A row's state: what is committed, what is released, and its random key."""

    def __init__(self, index: int, plan: Plan, options: DecodingOptions, vocab_size: int):
        self.index = index
        self.plan = plan
        self.vocab_size = vocab_size
        self.options = options
        self.steps = deque(plan.steps)
        self.tokens: list[int | None] = [None] * plan.masks
        self.logprobs: list[Logprobs | None] = [None] * plan.masks
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
            self.key = mx.random.key(int(mx.random.randint(0, 2**31 - 1).item()) if seed is None else seed)
        self.key, key = mx.random.split(self.key)
        return key

    def commit(self, at: Sequence[int], tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> Iterator[Event]:
        """Take over what a forward committed, and say what follows from it."""
        start, end, _ = self.steps.popleft()
        offset = len(self.plan.prompt)
        self.nfe += 1
        for i, token, entry in zip(at, tokens, logprobs, strict=True):
            self.tokens[i], self.logprobs[i] = token, entry
        yield Commit(self.index, self.nfe - 1, tuple(offset + i for i in at), tuple(tokens), tuple(logprobs))
        if None not in self.tokens[start:end]:
            yield BlockDone(self.index, offset + start, offset + end)
        first = self.released
        while self.reason is None and self.tokens[self.released] is not None:
            self.released += 1
            if self.tokens[self.released - 1] in self.plan.eos:
                self.reason = "stop"
            elif self.released == self.plan.cap:
                self.reason = "length"
        if self.released > first:
            new = slice(first, self.released)
            tokens, kept = tuple(self.tokens[new]), tuple(self.logprobs[new])
            yield Released(self.index, tokens, self.nfe, self.reason, kept)  # type: ignore[arg-type]
        if self.reason is not None:
            yield self.finished()

    def finished(self) -> Finished:
        plan = self.plan
        canvas = (plan.mask_token_id if token is None else token for token in self.tokens)
        return Finished(self.index, self.reason or "length", (*plan.prompt, *canvas), self.nfe, plan.empty_steps)


class _Batch:
    """The rows that are decoded together, and what stays the same while they are: built anew when one leaves.

    Rows are padded on the left to one width; the masks of a row are its last columns, so all masks lie in the last
    ``window`` columns.
    """

    def __init__(self, rows: list[_Row], family: Family):
        self.rows = rows
        self.width = max(len(row.plan.prompt) + row.plan.masks for row in rows)
        self.window = max(row.plan.masks for row in rows)
        padding = [self.width - len(row.plan.prompt) - row.plan.masks for row in rows]
        self.cache = FullCanvas(padding, self.width, family.score_rank)
        self.rule = rows[0].plan.rule
        self.lead = np.array([[self.window - row.plan.masks] for row in rows])
        self.temperature = mx.array([[row.plan.confidence_temperature] for row in rows])
        self.never = _banned([row.plan.never for row in rows], rows[0].vocab_size)
        masks = [(row.plan.mask_token_id,) if self.rule.drop_mask else () for row in rows]
        self.masks = _banned(masks, rows[0].vocab_size)

    def canvas(self) -> tuple[mx.array, mx.array]:
        """The first canvas [B, width] and which of it is masked."""
        canvas = np.zeros((len(self.rows), self.width), dtype=np.int32)
        masked = np.zeros((len(self.rows), self.width), dtype=bool)
        for i, row in enumerate(self.rows):
            own = (*row.plan.prompt, *[row.plan.mask_token_id] * row.plan.masks)
            canvas[i, self.width - len(own) :] = own
            masked[i, self.width - row.plan.masks :] = True
        return mx.array(canvas), mx.array(masked)


def _banned(ids: list[tuple[int, ...]], vocab_size: int) -> mx.array | None:
    """Added to logits [B, W, V]: minus infinity at each row's ids, or None when there are none."""
    if not any(ids):
        return None
    banned = np.zeros((len(ids), 1, vocab_size), dtype=np.float32)
    for i, own in enumerate(ids):
        banned[i, 0, list(own)] = -np.inf
    return mx.array(banned)


def _loop(model: Any, family: Family, rows: list[_Row], stream: Any) -> Iterator[Event]:
    for row in rows:
        if row.reason is not None:
            yield row.finished()
    active = [row for row in rows if row.reason is None]
    if not active:
        return
    on_stream = (lambda: mx.stream(stream)) if stream is not None else contextlib.nullcontext
    with on_stream():
        batch = _Batch(active, family)
        canvas, masked = batch.canvas()
    while True:
        with on_stream():
            canvas, masked, picked = _step(model, family, batch, canvas, masked)
        for row, at, tokens, logprobs in picked:
            yield from row.commit(at, tokens, logprobs)
        keep = [i for i, row in enumerate(batch.rows) if row.reason is None]
        if not keep:
            return
        if len(keep) < len(batch.rows):
            with on_stream():
                batch = _Batch([batch.rows[i] for i in keep], family)
                canvas = canvas[mx.array(keep)][:, -batch.width :]
                masked = masked[mx.array(keep)][:, -batch.width :]


Picked = list[tuple[_Row, list[int], list[int], tuple[Logprobs, ...]]]


def _step(
    model: Any, family: Family, batch: _Batch, canvas: mx.array, masked: mx.array
) -> tuple[mx.array, mx.array, Picked]:
    """One forward and one commit. Returns the new canvas and mask, and per row what was committed (as mask numbers)."""
    rows, rule, window = batch.rows, batch.rule, batch.window
    before = batch.width - window
    states = family.hidden(model, canvas, [batch.cache] * len(model.layers))
    logits = family.head(model, states[:, before:]).astype(mx.float32)

    allowed = logits if batch.never is None else logits + batch.never
    if batch.masks is not None:
        logits = logits + batch.masks
    tokens, scored = _choose(rows, logits, allowed)
    noise = mx.zeros(tokens.shape)
    if rule.draws:
        noise = _right([mx.random.uniform(shape=(row.plan.masks,), key=row.draw()) for row in rows], window)
    confidence = rule.confidence(logits, scored, batch.temperature, noise)

    span = np.array([row.steps[0] for row in rows])
    column = np.arange(window)[None] - batch.lead
    block = mx.array((column >= span[:, :1]) & (column < span[:, 1:2]))
    most = int(span[:, 2].max())
    order = mx.argsort(mx.where(block & masked[:, before:], -confidence, mx.inf), axis=1)[:, :most]
    wanted = mx.array(np.arange(most)[None] < span[:, 2:])
    chosen = mx.take_along_axis(tokens, order, axis=1)
    place = order + before
    old = mx.take_along_axis(canvas, place, axis=1)
    still = mx.take_along_axis(masked, place, axis=1) & ~wanted
    canvas = mx.put_along_axis(canvas, place, mx.where(wanted, chosen, old), axis=1)
    masked = mx.put_along_axis(masked, place, still, axis=1)

    at_commit = mx.take_along_axis(logits, order[..., None], axis=1)
    logprobs = at_commit - mx.logsumexp(at_commit, axis=-1, keepdims=True)
    count = min(TOP_LOGPROBS, logprobs.shape[-1])
    top = mx.argpartition(-logprobs, kth=count - 1, axis=-1)[..., :count]
    top_values = mx.take_along_axis(logprobs, top, axis=-1)
    own_values = mx.take_along_axis(logprobs, chosen[..., None], axis=-1)[..., 0]
    full = [logprobs] if any(row.options.full_logprobs for row in rows) else []
    mx.eval(canvas, masked, order, chosen, top, top_values, own_values, *full)
    return canvas, masked, _read(rows, batch.lead, span, order, chosen, logprobs, top, top_values, own_values)


def _read(
    rows: list[_Row],
    lead: np.ndarray,
    span: np.ndarray,
    order: mx.array,
    chosen: mx.array,
    logprobs: mx.array,
    top: mx.array,
    top_values: mx.array,
    own_values: mx.array,
) -> Picked:
    places, tokens, ids, values, own = (np.array(a) for a in (order, chosen, top, top_values, own_values))
    picked: Picked = []
    for i, row in enumerate(rows):
        count = int(span[i, 2])
        by_place = np.argsort(places[i, :count])
        entries = []
        for j in by_place:
            best = np.argsort(-values[i, j], kind="stable")
            entries.append(
                Logprobs(
                    id=int(tokens[i, j]),
                    token=float(own[i, j]),
                    top=tuple((int(ids[i, j, b]), float(values[i, j, b])) for b in best),
                    full=logprobs[i, int(j)] if row.options.full_logprobs else None,
                )
            )
        at = [int(places[i, j] - lead[i, 0]) for j in by_place]
        picked.append((row, at, [int(tokens[i, j]) for j in by_place], tuple(entries)))
    return picked


def _choose(rows: list[_Row], logits: mx.array, allowed: mx.array) -> tuple[mx.array, mx.array]:
    """The token each position would get, and the token whose probability is its confidence: [B, W] twice. They differ
    only where greedy decoding would have chosen an id that is never emitted."""
    tokens, scored = mx.argmax(allowed, axis=-1), mx.argmax(logits, axis=-1)
    if not any(row.samples for row in rows):
        return tokens, scored
    window = logits.shape[1]
    token_rows, scored_rows = [], []
    for i, row in enumerate(rows):
        own, counted = tokens[i], scored[i]
        if row.samples:
            own = counted = _right([_sample(row, allowed[i, window - row.plan.masks :])], window)[0]
        token_rows.append(own)
        scored_rows.append(counted)
    return mx.stack(token_rows), mx.stack(scored_rows)


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
    return mx.argmax(logprobs / options.temp + noise, axis=-1)


def _call_sampler(sampler: Any, logprobs: mx.array) -> mx.array:
    n = logprobs.shape[0]
    advice = "it must take log-probabilities [n, vocabulary] and return n token ids"
    try:
        tokens = sampler(logprobs)
    except Exception as error:
        raise DiffusionError(
            f"The sampler cannot take the rows of diffusion decoding ({type(error).__name__}: {error}): {advice}."
        ) from error
    if not isinstance(tokens, mx.array) or tokens.shape != (n,) or not mx.issubdtype(tokens.dtype, mx.integer):
        got = f"an array of shape {tokens.shape}" if isinstance(tokens, mx.array) else type(tokens).__name__
        raise DiffusionError(f"The sampler returned {got} for {n} rows: {advice}.")
    return tokens.astype(mx.uint32)


def _right(parts: list[mx.array], width: int) -> mx.array:
    """Rows of unequal length, aligned to the right: [B, width]."""
    return mx.stack([mx.pad(part, (width - part.shape[0], 0)) for part in parts])


def _as_rows(prompts: Any) -> tuple[list[list[int]], bool]:
    if isinstance(prompts, mx.array):
        prompts = prompts.tolist()
    prompts = list(prompts)
    single = not prompts or not isinstance(prompts[0], (list, tuple, mx.array, np.ndarray))
    rows = [prompts] if single else [p.tolist() if hasattr(p, "tolist") else list(p) for p in prompts]
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
