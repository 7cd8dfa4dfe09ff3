"""Rules that edit: LLaDA2.1's and LLaDA2.2's samplers against plain loops written here, which look at one token at a
time and compute the whole text in every forward; batches, sampling, and models that never settle."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.utils import load_model

import mlx_dllm_plugin.decode  # noqa: F401  (the module; the name in the package is the function)
from mlx_dllm_plugin import DecodingOptions, DiffusionError, DiffusionSpec, decode, stream_decode
from mlx_dllm_plugin.batch import Batch, Blocks
from mlx_dllm_plugin.decode import BlockDone, Commit, Event, Finished, Released
from mlx_dllm_plugin.families import Family
from mlx_dllm_plugin.samplers import editing
from tests.goldens import llada2
from tests.models import tiny_model
from tests.test_blocks import Explicit, block_model

IN_PLACE, MOVES = "joint_threshold", "joint_threshold_indel"
RULES = (IN_PLACE, MOVES)
VOCAB = 12  # 0 to 7 are text
TEXT = [1, 4, 2, 7, 5]
EOS, MASK, DELETE, INSERT = 8, 9, 10, 11
SPECIAL = {MASK, DELETE, INSERT}
DEFAULTS: dict[str, dict[str, Any]] = {
    IN_PLACE: {"threshold": 0.95, "editing_threshold": 0.9, "max_post_steps": 16, "num_to_transfer": 1},
    MOVES: {
        "threshold": 0.5,
        "editing_threshold": 0.0,
        "max_post_steps": 16,
        "max_denoising_steps": 32,
        "max_steps_per_block": 1000,
    },
}
Tokens = Sequence[int]
Answer = Callable[[list[int]], np.ndarray]


# Models


class Reader:
    """
    A model whose keys and values are its tokens, so that what it says of the last block is a function of all tokens
    that it sees: of final blocks those that were stored.

    Args:
        answer: ``(tokens seen, the last block among them) -> logits [block length, V]``.
    """

    def __init__(self, answer: Answer, length: int = 4, rule: str = MOVES, **changes: Any):
        self.answer, self.length = answer, length
        self.layers: list[Any] = [None]
        self.calls = 0
        self.diffusion_family = Family(
            name="reader",
            model_types=("reader",),
            claims=lambda checkpoint: False,
            hidden=lambda model, ids, caches: model.hidden(ids, caches[0]),
            head=lambda model, states: states,
            defaults=lambda checkpoint: {},
            attention="block_causal",
            canvas="growing",
        )
        spec: dict[str, Any] = {
            "family": "reader",
            "logits": "in_place",
            "attention": "block_causal",
            "canvas": "growing",
            "unmasking": rule,
            "mask_token_id": MASK,
            "eos_token_ids": (EOS,),
            "vocab_size": VOCAB,
            "context_length": None,
            "defaults": {"block_length": length, "max_tokens": length},
            "edit_token_ids": (DELETE, INSERT),
        }
        self.diffusion_spec = DiffusionSpec(**{**spec, **changes})

    def hidden(self, ids: mx.array, cache: Any) -> mx.array:
        self.calls += 1
        assert self.calls < 3000, "decoding does not end"
        own = ids.astype(mx.float32)[:, None, :, None]
        keys, values = cache.update_and_fetch(own, own + 1)
        mask = cache.make_mask(ids.shape[1])
        text, more = (np.array(part)[:, 0, :, 0].astype(int) for part in (keys, values))
        seen = np.ones((1, *text.shape), dtype=bool) if mask is None else np.array(mask)[:, 0]
        states = np.zeros((*ids.shape, self.diffusion_spec.vocab_size), dtype=np.float32)
        for row in range(len(text)):
            visible = seen[row % len(seen), -1]
            assert (text[row] + 1 == more[row])[visible].all()
            table = self.look(text[row][visible].tolist())
            states[row, -self.length :] = table[-ids.shape[1] :]
        return mx.array(states)

    def look(self, text: list[int]) -> np.ndarray:
        """What a forward of the whole text says of its last block."""
        return self.answer(text).astype(np.float32)


def chance(salt: int, length: int) -> Answer:
    """Random logits for everything that can be seen: calm and restless, sure and unsure, with more or less of each
    special token, sometimes the same at two positions."""

    def answer(text: list[int]) -> np.ndarray:
        random = np.random.default_rng([salt, zlib.crc32(np.array(text, dtype=np.int32).tobytes())])
        table = 2 * random.normal(size=(length, VOCAB))
        if random.random() < 0.6:
            table[:, 2:8] -= 6  # two tokens, which come back to what was there before
        for token in (MASK, DELETE, INSERT):
            table[:, token] += random.choice([-9, -1, 2])
        table[:, EOS] += random.choice([-9, -2, 0])
        if random.random() < 0.5:
            table[np.arange(length), text[-length:]] += 9
        if random.random() < 0.2:
            table[random.integers(length)] = table[random.integers(length)]
        table *= random.choice([0.3, 1, 3], size=(length, 1))
        return table.astype(np.float32)

    return answer


def script(*steps: Sequence[Sequence[tuple[int, float]]]) -> Answer:
    """Per forward, and for ever the last one, a list of (token, probability) for each position."""
    calls = iter(range(10**6))

    def answer(text: list[int]) -> np.ndarray:
        step = steps[min(next(calls), len(steps) - 1)]
        table = np.zeros((len(step), VOCAB))
        for row, pairs in zip(table, step, strict=True):
            row[:] = max(1 - sum(p for _, p in pairs), 1e-9) / (VOCAB - len(pairs))
            for token, p in pairs:
                row[token] = p
        return np.log(table).astype(np.float32)

    return answer


def says(*tokens: int, p: float = 0.9) -> list[list[tuple[int, float]]]:
    """Of each position one token."""
    return [[(token, p)] for token in tokens]


@cache
def loaded(folder: Path) -> Any:
    return load_model(folder)[0]


def golden_of(folder: Path) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((folder / "golden.json").read_text())
    return golden


# What is compared


@dataclass
class Told:
    """
    What decoding a row did.

    Args:
        output: with the end of sequence.
        states: the canvas before every forward, and at the end.
        blocks: start, end and reason of each block that was decoded.
        logprobs: of each token of the output.
        columns: that the forwards computed.
    """

    output: list[int] = field(default_factory=list)
    reason: str = ""
    nfe: int = 0
    states: list[list[int]] = field(default_factory=list)
    blocks: list[tuple[int, int, str]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    columns: int = 0

    def equals(self, other: Told, tolerance: float = 1e-5) -> None:
        assert self.states == other.states
        assert (self.blocks, self.nfe) == (other.blocks, other.nfe)
        assert (self.output, self.reason) == (other.output, other.reason)
        np.testing.assert_allclose(self.logprobs, other.logprobs, rtol=0, atol=tolerance)


def told(events: Sequence[Event], prompt: Tokens, length: int, mask: int = MASK, context: int = 10**6) -> Told:
    """What a row's events say, and that they say it in order: tokens are released when their block is final, once, and
    do not change any more."""
    result, new = Told(), sum(len(event.tokens) for event in events if isinstance(event, Released))
    canvas, final, blocks = [*prompt], len(prompt), len(prompt) // length
    for event in events:
        assert not result.reason and event.row == 0
        if isinstance(event, Commit):
            canvas += [mask] * (min((blocks + 1) * length, context) - len(canvas))
            result.states.append(list(canvas))
            assert event.step == result.nfe and list(event.positions) == sorted({*event.positions})
            result.nfe += 1
            assert not {*event.positions} & {*event.masked}
            assert all(final <= at < len(canvas) for at in (*event.positions, *event.masked))
            assert len(event.logprobs) == len(event.tokens) == len(event.positions)
            assert [entry.id for entry in event.logprobs] == list(event.tokens)
            for at in event.masked:
                assert canvas[at] != mask
                canvas[at] = mask
            for at, token in zip(event.positions, event.tokens, strict=True):
                canvas[at] = token
        elif isinstance(event, BlockDone):
            blocks = blocks + 1
            assert event.start == final and event.end == min(blocks * length, context) == len(canvas)
            final = event.end
            result.blocks.append((event.start, event.end, event.reason))
        elif isinstance(event, Released):
            first = len(prompt) + len(result.output)
            assert list(event.tokens) == canvas[first : first + len(event.tokens)]
            assert first + len(event.tokens) <= final and first >= result.blocks[-1][0] and event.nfe == result.nfe
            assert [entry.id for entry in event.logprobs] == list(event.tokens)
            result.output += event.tokens
            result.logprobs += [entry.token for entry in event.logprobs]
            assert (event.reason is None) == (len(result.output) < new)
        else:
            assert isinstance(event, Finished) and list(event.canvas) == canvas and event.nfe == result.nfe
            result.reason, result.columns = event.reason, event.columns
            result.states.append(canvas)
    return result


def watched(model: Any, prompt: Tokens, options: DecodingOptions) -> Told:
    spec = model.diffusion_spec
    events = list(stream_decode(model, [list(prompt)], options))
    return told(events, prompt, spec.defaults["block_length"], spec.mask_token_id, spec.context_length or 10**6)


# The plain loops


class Dice:
    """A row's random numbers: of its seed, or of 0 when it is greedy and has none."""

    def __init__(self, seed: int | None):
        self.key = mx.random.key(seed or 0)

    def __call__(self, n: int) -> int:
        if n == 1:
            return 0
        self.key, key = mx.random.split(self.key)
        return int(mx.random.randint(0, n, key=key).item())


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


@dataclass
class Cell:
    """A position of a block: its token, or None where a mask is; whether that is there since the block began; and the
    log-probability of the token in the forward that wrote it."""

    token: int | None
    original: bool
    logprob: float = 0.0


class Plain:
    """
    The samplers of 2.1 and 2.2 over one row.

    Args:
        look: a text -> logits of its last block, in one forward of everything.
        ids: of the mask, DELETE and INSERT.
        sampler: what takes the place of the best token, if not that.
    """

    def __init__(
        self,
        look: Callable[[list[int]], np.ndarray],
        length: int,
        options: DecodingOptions,
        *,
        eos: Sequence[int] = (EOS,),
        ids: tuple[int, int | None, int | None] = (MASK, DELETE, INSERT),
    ):
        self.look, self.length, self.eos = look, length, eos
        self.mask, self.delete, self.insert = ids
        self.rule = options.unmasking
        assert self.rule is not None
        given = {name: getattr(options, name) for name in DEFAULTS[self.rule]}
        self.o = {name: DEFAULTS[self.rule][name] if value is None else value for name, value in given.items()}
        self.sampler, self.suppressed = options.sampler, list(options.suppress_tokens or ())
        self.never = [self.mask, *([t for t in ids[1:] if t is not None] if self.rule == IN_PLACE else [])]
        self.dice = Dice(options.seed)
        self.margin = np.inf  # how near any decision was to another
        self.escapes: list[int] = []  # among how many positions

    def run(self, prompt: Tokens, new: int, context: int = 10**6) -> Told:
        result, length = Told(), self.length
        whole = min(-(-(len(prompt) + new) // length) * length, context)
        text: list[int | None] = [*prompt, *[None] * (whole - len(prompt))]
        logprobs = [0.0] * len(text)
        block_of = self.block_in_place if self.rule == IN_PLACE else self.block_with_moves
        for start in range(len(prompt) // length * length, len(text), length):
            first, end = max(start, len(prompt)), min(start + length, whole)
            cells = [Cell(None, True) for _ in range(first, end)]
            before = self.filled(text[:first])

            def look(cells: list[Cell], before: list[int] = before) -> np.ndarray:
                result.states.append([*before, *self.filled([cell.token for cell in cells])])
                result.nfe += 1
                return self.look(result.states[-1])[-len(cells) :]

            cells, reason = block_of(cells, look)
            text[first:end] = [cell.token for cell in cells]
            logprobs[first:end] = [cell.logprob for cell in cells]
            result.blocks.append((first, end, reason))
            if any(token in self.eos for token in text[len(prompt) : end]):
                break
        written = self.filled(text[len(prompt) : end])
        result.states.append(self.filled(text[:end]))
        stop = next((at for at, token in enumerate(written) if token in self.eos), new)
        result.output = written[: min(stop + 1, new)]
        result.reason = "stop" if stop < new else "length"
        result.logprobs = logprobs[len(prompt) :][: len(result.output)]
        return result

    def filled(self, tokens: Sequence[int | None]) -> list[int]:
        return [self.mask if token is None else token for token in tokens]

    # What a row of logits says

    def best(self, row: np.ndarray, *banned: int | None) -> int:
        allowed = row.astype(np.float64)
        allowed[[*self.never, *self.suppressed, *(t for t in banned if t is not None)]] = -np.inf
        order = np.sort(allowed)
        self.margin = min(self.margin, order[-1] - order[-2])
        return int(allowed.argmax())

    def drawn(self, row: np.ndarray, *banned: int | None) -> int:
        if self.sampler is None:
            return self.best(row, *banned)
        allowed = row.astype(np.float32)
        allowed[[*self.never, *self.suppressed, *(t for t in banned if t is not None)]] = -np.inf
        return int(self.sampler(mx.array(allowed)[None])[0].item())

    def probability(self, row: np.ndarray, token: int) -> np.float32:
        counted = row.astype(np.float64)
        counted[self.suppressed] = -np.inf
        return np.float32(softmax(counted)[token])

    def exceeds(self, p: np.float32, name: str) -> bool:
        threshold = np.float32(self.o[name])
        self.margin = min(self.margin, abs(p - threshold) or np.inf)
        return bool(p > threshold)

    def surest(self, masks: list[int], p: dict[int, np.float32], least: int) -> list[int]:
        """Masks above the threshold, or ``least`` of them."""
        sure = [i for i in masks if self.exceeds(p[i], "threshold")]
        if len(sure) >= least:
            return sure
        order = sorted(masks, key=lambda i: -p[i])
        if least < len(order):
            self.margin = min(self.margin, abs(p[order[least - 1]] - p[order[least]]) or np.inf)
        return order[:least]

    def logprob(self, row: np.ndarray, token: int) -> float:
        return float(np.log(max(softmax(row)[token], 1e-300)))

    # 2.1

    def block_in_place(self, cells: list[Cell], look: Callable[[list[Cell]], np.ndarray]) -> tuple[list[Cell], str]:
        post = 0
        while True:
            masks = [i for i, cell in enumerate(cells) if cell.token is None]
            if not masks:
                post += 1
                if post > self.o["max_post_steps"]:
                    return cells, "budget"
            logits = look(cells)
            tokens = [self.drawn(row) for row in logits]
            p = {i: self.probability(row, token) for i, (row, token) in enumerate(zip(logits, tokens, strict=True))}
            fill = self.surest(masks, p, min(self.o["num_to_transfer"], len(masks)))
            edit = [
                i
                for i, cell in enumerate(cells)
                if cell.token is not None and self.exceeds(p[i], "editing_threshold") and tokens[i] != cell.token
            ]
            for i in fill + edit:
                cells[i] = Cell(tokens[i], True, self.logprob(logits[i], tokens[i]))
            if not masks and not edit:
                return cells, "stable"

    # 2.2

    def block_with_moves(self, cells: list[Cell], look: Callable[[list[Cell]], np.ndarray]) -> tuple[list[Cell], str]:
        steps, most, cap = (self.o[name] for name in ("max_denoising_steps", "max_post_steps", "max_steps_per_block"))
        count, seen, post = len(cells), set(), 0
        need = [count // steps + (1 if s < count % steps else 0) for s in range(steps)]
        for s in range(cap):
            masks = [i for i, cell in enumerate(cells) if cell.token is None]
            originals = [i for i in masks if cells[i].original]
            post = 0 if originals else post + 1
            if not masks and post > most:
                return cells, "budget"
            logits = look(cells)
            best = [self.best(row) for row in logits]
            drawn = [self.drawn(row) for row in logits]
            if not masks:
                fill = []
            elif s < steps:
                p = {i: self.probability(logits[i], drawn[i]) for i in masks}
                fill = self.surest(masks, p, min(need[s] + len(masks) - len(originals), len(masks)))
            else:
                fill = masks
            edit = [
                i
                for i, cell in enumerate(cells)
                if cell.token is not None
                and self.exceeds(self.probability(logits[i], best[i]), "editing_threshold")
                and best[i] != cell.token
            ]
            final = post >= most if most > 0 else bool(originals) and not set(originals) - set(fill)
            if final or s == cap - 1:
                final, fill = True, masks
                both = (self.delete, self.insert)
                drawn = [self.drawn(row, *both) if t in both else t for row, t in zip(logits, drawn, strict=True)]
                best = [self.best(row, *both) if t in both else t for row, t in zip(logits, best, strict=True)]
            new = [cell.token for cell in cells]
            for i in fill:
                new[i] = drawn[i]
            for i in edit:
                new[i] = best[i]
            if not final and (fill or edit):
                self.leave(new, cells, fill, seen, logits)
            seen.add(tuple(new))
            written = [
                Cell(token, cells[i].original, self.logprob(logits[i], token) if i in fill + edit else cells[i].logprob)
                for i, token in enumerate(new)
            ]
            before, cells = cells, scan(written, cells, self.delete, self.insert)
            tokens = [cell.token for cell in cells]
            if tokens == [cell.token for cell in before] and None not in tokens:
                return cells, "stable"
        masks = [i for i, cell in enumerate(cells) if cell.token is None]
        assert not masks
        return cells, "budget" if post + 1 > most else "cap"

    def leave(
        self, new: list[int | None], cells: list[Cell], fill: list[int], seen: set[Any], logits: np.ndarray
    ) -> None:
        for _ in range(5):
            if tuple(new) not in seen:
                return
            changed = [i for i, cell in enumerate(cells) if new[i] != cell.token]
            if not changed:
                return
            self.escapes.append(len(changed))
            i = changed[self.dice(len(changed))]
            new[i] = self.drawn(logits[i], new[i]) if i in fill else self.best(logits[i], new[i])


def scan(written: list[Cell], old: list[Cell], delete: int | None, insert: int | None) -> list[Cell]:
    """DELETE and INSERT act, from left to right."""
    out: list[Cell] = []
    for cell, before in zip(written, old, strict=True):
        if cell.token is not None and cell.token == delete:
            continue
        out += [Cell(None, False), before] if cell.token is not None and cell.token == insert else [cell]
    return [*out, *[Cell(None, False) for _ in old]][: len(old)]


def second(logprobs: mx.array) -> mx.array:
    """A host's sampler: the second most probable token, of those that may be emitted."""
    order = mx.argsort(-logprobs, axis=-1)
    some = mx.take_along_axis(logprobs, order[:, 1:2], axis=-1)[:, 0] > -mx.inf
    return mx.where(some, order[:, 1], order[:, 0])


def any_options(random: np.random.Generator, rule: str, **more: Any) -> DecodingOptions:
    values: dict[str, Any] = {
        "threshold": random.choice([0.0, 0.2, 0.5, 0.7, 1.0]),
        "editing_threshold": random.choice([0.0, 0.2, 0.5, 0.7, 1.0]),
        "max_post_steps": random.integers(5),
    }
    if rule == IN_PLACE:
        values["num_to_transfer"] = random.integers(1, 6)
    else:
        values["max_denoising_steps"] = random.choice([1, 2, 3, 5, 32])
        values["max_steps_per_block"] = random.choice([1, 2, 5, 9, 12])
        if random.random() < 0.5:
            values["max_post_steps"] = 16
    if random.random() < 0.25:
        values |= {"sampler": second, "seed": random.integers(100)}
    if random.random() < 0.2:
        values["suppress_tokens"] = tuple({0, EOS, INSERT, int(random.integers(8))})
    given = {name: value for name, value in values.items() if name in ("sampler", "seed") or random.random() < 0.9}
    for name, value in given.items():
        given[name] = value.item() if isinstance(value, np.generic) else value
    return DecodingOptions(unmasking=rule, **{**given, **more})


@dataclass
class Case:
    model: Reader
    prompt: list[int]
    options: DecodingOptions

    def plain(self) -> Plain:
        return Plain(self.model.look, self.model.length, self.options)

    def wanted(self) -> Told:
        return self.plain().run(self.prompt, self.options.max_tokens or 0)

    def found(self) -> Told:
        return watched(self.model, self.prompt, self.options)


def any_case(seed: int, rule: str, **more: Any) -> Case:
    random = np.random.default_rng([seed, RULES.index(rule)])
    length = int(random.choice([1, 2, 3, 4, 5, 8]))
    options = any_options(random, rule, max_tokens=int(random.integers(1, 3 * length + 1)), **more)
    prompt = random.integers(VOCAB, size=random.integers(1, 3 * length + 1)).tolist()
    return Case(Reader(chance(seed, length), length, rule), prompt, options)


def columns_of(found: Told, length: int) -> int:
    """What the forwards of a row compute: its block, and once what is final and not stored yet, which is the block
    before it unless a forward saw that as it stays."""
    total, before = 0, "prompt"
    for start, end, reason in found.blocks:
        forwards = sum(len(state) == end for state in found.states[:-1])
        total += forwards * length + length * (start >= length and before != "stable")
        before = reason
    return total


# Against the plain loops


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("part", range(5))
def test_decoding_equals_a_plain_loop(rule: str, part: int) -> None:
    """Every canvas, the tokens and their log-probabilities, what ended each block, and what was computed for it."""
    reasons = set()
    for seed in range(40 * part, 40 * part + 40):
        case = any_case(seed, rule)
        found = case.found()
        found.equals(case.wanted())
        assert not SPECIAL & {*found.output} and len(found.output) <= (case.options.max_tokens or 0)
        assert found.columns == columns_of(found, case.model.length)
        reasons |= {found.reason, *(reason for _, _, reason in found.blocks)}
    assert reasons == {"stop", "length", "stable", "budget"} | ({"cap"} if rule == MOVES else set())


@pytest.mark.parametrize("rule", RULES)
def test_a_context_that_is_no_multiple_of_the_block_ends_within_one(rule: str) -> None:
    for seed in range(500, 530):
        random = np.random.default_rng(seed)
        length, context, start = 4, int(random.integers(5, 14)), int(random.integers(1, 5))
        model = Reader(chance(seed, length), length, rule, context_length=context)
        own = any_options(random, rule, max_tokens=context - start, stop_at_eos=False)
        plain = Plain(model.look, length, own, eos=())
        found = watched(model, TEXT[:start], own)
        found.equals(plain.run(TEXT[:start], context - start, context))
        assert len(found.states[-1]) == context


CHECKPOINTS = {
    # how many runs, the rule, and the length of blocks
    "llada2_moe-v22": (5, MOVES, 32),
    "llada2_moe-v22-b8": (10, MOVES, 8),
    "llada2_moe-v21": (3, IN_PLACE, 32),
    "sdar-b4": (12, IN_PLACE, 4),
}


def plain_of(model: Any, options: DecodingOptions) -> Plain:
    """The plain loop over a checkpoint, whose attention is made here if the model has none of its own."""
    spec = model.diffusion_spec
    length = spec.defaults["block_length"]

    def look(text: list[int]) -> np.ndarray:
        ids = mx.array([text])
        if spec.family == "llada2_moe":
            return np.array(model(ids)[0, -length:])
        block = np.arange(len(text)) // length
        caches = [Explicit(block[None] <= block[:, None])] * len(model.layers)
        family = model.diffusion_family
        return np.array(family.head(model, family.hidden(model, ids, caches))[0, -length:])

    ids = (spec.mask_token_id, *(spec.edit_token_ids or (None, None)))
    return Plain(look, length, options, eos=spec.eos_token_ids, ids=ids)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_decoding_of_a_checkpoint_equals_a_plain_loop(name: str, goldens: Path) -> None:
    """Full forwards without anything kept. A decision that was nearly another one is not compared."""
    count, rule, length = CHECKPOINTS[name]
    model, golden = loaded(goldens / "block" / name), golden_of(goldens / "block" / name)
    prompts = [case["prompt_ids"] for case in golden["generations"]]
    compared, seed = 0, 0
    while compared < count:
        random = np.random.default_rng(seed)
        prompt = [*prompts[seed % len(prompts)], *prompts[0]][: random.integers(1, 2 * length + 2)]
        given = any_options(random, rule, max_tokens=int(random.integers(1, length * 3 // 2)))
        given = replace(given, suppress_tokens=None)
        if rule == MOVES:
            given = replace(given, max_steps_per_block=12)
        plain = plain_of(model, given)
        wanted = plain.run(prompt, given.max_tokens or 0)
        seed += 1
        assert seed < 3 * count
        if plain.margin > 1e-5:
            watched(model, prompt, given).equals(wanted, 1e-4)
            compared += 1


def settings_of(golden: dict[str, Any], case: dict[str, Any]) -> DecodingOptions:
    """The options of a golden run."""
    names = {"steps": "max_denoising_steps", "gen_length": "max_tokens"}
    values = {names.get(name, name): value for name, value in case["settings"].items()}
    rule = MOVES if golden["variant"] == "2.2" else IN_PLACE
    given = {name: value for name, value in values.items() if name in DEFAULTS[rule]}
    if rule == MOVES:
        given["max_denoising_steps"] = max(given["max_denoising_steps"], 1)
    return DecodingOptions(unmasking=rule, max_tokens=values["max_tokens"], eos_token_ids=(317,), **given)


@pytest.mark.parametrize("name", ["llada2_moe-v22-b8", "llada2_moe-v21"])
def test_the_plain_loops_make_what_the_goldens_say(name: str, goldens: Path) -> None:
    model, golden = loaded(goldens / "block" / name), golden_of(goldens / "block" / name)
    length = model.diffusion_spec.defaults["block_length"]
    cases = [case for case in golden["generations"] if case["settings"]["block_length"] == length]
    for case in cases if name.endswith("b8") else cases[2:8:2]:
        options = settings_of(golden, case)
        plain = plain_of(model, options)
        plain.eos = (317,)
        assert plain.run(case["prompt_ids"], options.max_tokens or 0).output == case["output_ids"], case["name"]


# Batches


def by_row(events: Iterator[Event], rows: int) -> list[list[Event]]:
    """The events of each row, as if it had been alone."""
    parts: list[list[Event]] = [[] for _ in range(rows)]
    for event in events:
        parts[event.row].append(replace(event, row=0))
    return parts


def as_alone(model: Any, prompts: list[list[int]], options: list[DecodingOptions]) -> list[Told]:
    """Each row of a batch tells what it tells alone, bit for bit."""
    length = model.diffusion_spec.defaults["block_length"]
    parts = by_row(stream_decode(model, prompts, options), len(prompts))
    for part, prompt, own in zip(parts, prompts, options, strict=True):
        alone = list(stream_decode(model, [prompt], own))
        assert part == alone
    mask = model.diffusion_spec.mask_token_id
    return [told(part, prompt, length, mask) for part, prompt in zip(parts, prompts, strict=True)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 3, 4])
def test_rows_of_a_batch_do_not_know_of_each_other(rule: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks settle, run out of their budget or are cut short at times of their own, and what each sees of final
    blocks are their final tokens. Logits that are made in chunks say the same."""
    reasons: set[tuple[str, ...]] = set()
    for seed in range(6):
        random = np.random.default_rng([seed, length])
        model = Reader(chance(seed, length), length, rule)
        rows = int(random.integers(2, 6))
        prompts = [random.integers(VOCAB, size=random.integers(1, 4 * length + 1)).tolist() for _ in range(rows)]
        options = [any_options(random, rule, max_tokens=int(random.integers(1, 4 * length + 1))) for _ in range(rows)]
        options[0] = replace(options[0], sampler=None, temp=1.0, seed=3)
        found = as_alone(model, prompts, options)
        reasons |= {tuple(reason for _, _, reason in row.blocks) for row in found}
        for row, prompt, own in list(zip(found, prompts, options, strict=True))[1:]:
            row.equals(Plain(model.look, length, own).run(prompt, own.max_tokens or 0))
            assert row.columns == columns_of(row, length)
        with monkeypatch.context() as patched:
            patched.setattr(Batch, "LOGITS", 2 * VOCAB)
            chunked = by_row(stream_decode(model, prompts, options), rows)
        whole = by_row(stream_decode(model, prompts, options), rows)
        assert chunked == whole
    assert {"stable", "budget"} <= {reason for row in reasons for reason in row}
    assert any(row[0] == "stable" and len(row) > 1 for row in reasons)
    assert any(row[0] == "budget" and len(row) > 1 for row in reasons)


@pytest.mark.parametrize(("name", "rows"), [("llada2_moe-v22-b8", 5), ("llada2_moe-v21", 3), ("sdar-b4", 5)])
def test_rows_of_a_checkpoint_equal_each_alone(name: str, rows: int, goldens: Path) -> None:
    _, rule, length = CHECKPOINTS[name]
    model, golden = loaded(goldens / "block" / name), golden_of(goldens / "block" / name)
    text, random = golden["generations"][0]["prompt_ids"], np.random.default_rng(0)
    prompts = [[*text, *text][: random.integers(1, 3 * length)] for _ in range(rows)]
    options = [any_options(random, rule, max_tokens=int(random.integers(9, 9 + length))) for _ in range(rows)]
    options = [replace(own, suppress_tokens=None, editing_threshold=0.2) for own in options]
    options[0] = replace(options[0], editing_threshold=1.0, max_post_steps=3)  # soon nothing changes any more
    options[1] = replace(options[1], sampler=None, temp=0.7, seed=5)
    found = as_alone(model, prompts, options)
    assert len({row.nfe for row in found}) > 1 and len({reason for row in found for _, _, reason in row.blocks}) > 1


@pytest.mark.parametrize("rule", RULES)
def test_without_a_cache_decoding_says_the_same(rule: str) -> None:
    for seed in range(300, 325):
        kept = any_case(seed, rule)
        calls = replace(kept, options=replace(kept.options, cache="none"))
        one, other = kept.found(), calls.found()
        other.equals(one, 0)
        assert other.columns == sum(len(state) for state in other.states[:-1])


@pytest.mark.parametrize("name", ["llada2_moe-v22-b8", "sdar-b4"])
def test_what_is_kept_of_a_block_is_made_from_its_final_tokens(
    name: str, goldens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that no forward saw as it stays: all logits of the next block are those of a clean forward. With what
    the block's last forward made of it, they are others."""
    _, rule, length = CHECKPOINTS[name]
    model, golden = loaded(goldens / "block" / name), golden_of(goldens / "block" / name)
    prompt = golden["generations"][0]["prompt_ids"][: length + 1]
    own = DecodingOptions(
        unmasking=rule, max_tokens=2 * length, threshold=0.5, editing_threshold=1.0, max_post_steps=0,
        full_logprobs=True, stop_at_eos=False,
    )  # fmt: skip
    look = plain_of(model, own).look

    def error() -> float:
        result = decode(model, prompt, own)
        blocks = [event for event in stream_decode(model, [prompt], own) if isinstance(event, BlockDone)]
        assert [block.reason for block in blocks] == ["budget"] * 3
        canvas, mask = [*prompt, *[model.diffusion_spec.mask_token_id] * (3 * length)], 0.0
        for commit in result.commits:
            first = commit.positions[0] // length * length
            clean = look(canvas[: first + length])
            for at, entry in zip(commit.positions, commit.logprobs, strict=True):
                logprobs = np.log(softmax(clean[at - first]))
                mask = max(mask, float(np.abs(np.array(entry.full) - logprobs).max()))
            for at, token in zip(commit.positions, commit.tokens, strict=True):
                canvas[at] = token
        return mask

    assert error() < 1e-4
    monkeypatch.setattr(Blocks, "_store", stale)
    assert error() > 1e-2


def stale(batch: Blocks) -> None:
    """Store what the last forward of a block made of it, whatever it saw."""
    if batch._ends is not None:
        ends, batch._ends = batch._ends, None
        done = [row.stages[0].fixed if row.stages else row.seen for row in batch.rows]
        batch._keep([max(a, b) for a, b in zip(ends, done, strict=True)], batch._inside)


# Sampling


def of(*pairs: tuple[int, float]) -> list[list[tuple[int, float]]]:
    """The same of two positions."""
    return [[*pairs]] * 2


@pytest.mark.parametrize(
    ("rule", "editing_threshold", "text"),
    [(IN_PLACE, 0.2, 3), (IN_PLACE, 0.4, 4), (MOVES, 0.4, 2), (MOVES, 0.7, 4)],
)
def test_what_changes_a_token_is_sampled_in_21_and_the_best_in_22(
    rule: str, editing_threshold: float, text: int
) -> None:
    """A host's sampler takes the second best: first 4, which has 0.3, then 3, which has that too, where 2 has 0.6."""
    model = Reader(script(of((1, 0.6), (4, 0.3)), of((2, 0.6), (3, 0.3))), 2)
    own = {"threshold": 0.0, "max_post_steps": 1, "editing_threshold": editing_threshold}
    found = watched(model, [1, 1], DecodingOptions(unmasking=rule, sampler=second, **own))
    assert found.states == [[1, 1, MASK, MASK], [1, 1, 4, 4], [1, 1, text, text]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("sampling", "p"),
    [
        ({"sampler": second}, 0.3),
        ({"temp": 1.0, "top_k": 1}, 0.6),
        ({"temp": 1.0, "top_p": 0.1}, 0.6),
        ({"temp": 1.0, "min_p": 0.9}, 0.6),
        ({"temp": 100.0, "top_k": 1}, 0.6),
        ({"temp": 0.01, "seed": 2}, 0.6),
    ],
    ids=str,
)
def test_masks_are_as_sure_as_the_drawn_token_is_probable(rule: str, sampling: dict[str, Any], p: float) -> None:
    """At temperature 1 and among all tokens: neither the temperature nor a filter makes a token surer."""
    for threshold, count in ((p - 0.01, 2), (p + 0.01, 1)):
        own = {"threshold": threshold, "editing_threshold": 1.0, **sampling}
        model = Reader(script(of((1, 0.6), (4, 0.3))), 2, rule)
        commits = decode(model, [1, 1], DecodingOptions(unmasking=rule, **own)).commits
        assert len(commits[0].positions) == count
        assert all(abs(entry.token - np.log(p)) < 1e-4 for commit in commits for entry in commit.logprobs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temp", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_from_the_distribution_at_the_temperature(rule: str, temp: float) -> None:
    """Also those that take the place of an edit token that may not be written."""
    share = np.array([0.2, 0.15, 0.1, 0.05])
    pairs = [*enumerate(share.tolist()), (DELETE, 0.25), (INSERT, 0.15), (MASK, 0.1)]
    model, rows = Reader(script([pairs] * 8), 8, rule), 100
    own = DecodingOptions(unmasking=rule, max_tokens=8, threshold=0.0, max_post_steps=0, temp=temp)
    results = decode(model, [[1] * 8] * rows, [replace(own, seed=seed) for seed in range(rows)])
    counts = np.bincount([token for result in results for token in result.tokens], minlength=4)
    wanted = share ** (1 / temp) / (share ** (1 / temp)).sum()
    assert counts.sum() == counts[:4].sum() == 8 * rows
    error = np.sqrt(wanted * (1 - wanted) / counts.sum())
    assert (np.abs(counts[:4] / counts.sum() - wanted) < 4 * error).all()


@pytest.mark.parametrize("rule", RULES)
def test_filters_leave_what_they_say(rule: str) -> None:
    pairs = [(1, 0.5), (2, 0.3), (3, 0.2)]
    for sampling, left in (({"top_k": 2}, {1, 2}), ({"top_p": 0.6}, {1, 2}), ({"min_p": 0.5}, {1, 2}), ({}, {1, 2, 3})):
        model = Reader(script([pairs] * 8), 8, rule)
        own = DecodingOptions(
            unmasking=rule, max_tokens=8, threshold=0.0, editing_threshold=1.0, temp=1.0, **sampling
        )  # fmt: skip
        results = decode(model, [[1]] * 8, [replace(own, seed=seed) for seed in range(8)])
        assert {token for result in results for token in result.tokens} == left


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_says_the_same_in_any_batch(rule: str) -> None:
    """Where edits and ways out of loops are drawn too."""
    texts, limits = set(), {"max_post_steps": 4, **({"max_steps_per_block": 9} if rule == MOVES else {})}
    for salt in range(10):
        model = Reader(chance(salt, 3), 3, rule)
        own = DecodingOptions(unmasking=rule, max_tokens=7, temp=1.0, seed=4, stop_at_eos=False, **limits)
        others = replace(own, seed=5), replace(own, seed=6, max_tokens=2), replace(own, temp=None, seed=None)
        prompt = [1, 2, 3, 4, 5]
        together = by_row(
            stream_decode(model, [[6], prompt, prompt, prompt], [others[1], others[0], own, others[2]]), 4
        )
        again = by_row(stream_decode(model, [prompt, prompt], [own, own]), 2)
        assert again[0] == again[1] == together[2] == by_row(stream_decode(model, [prompt], own), 1)[0]
        assert together[1] == by_row(stream_decode(model, [prompt], others[0]), 1)[0]
        tokens = [told(part, prompt, 3).output for part in together[1:]]
        texts.add(len({tuple(text) for text in tokens}))
    assert max(texts) == 3


def test_greedy_decoding_leaves_loops_the_same_way_every_time() -> None:
    """Without a seed; with others it may leave them otherwise."""
    differ = 0
    for seed in range(60):
        case = any_case(seed, MOVES)
        case.options = replace(case.options, sampler=None, seed=None)
        plain = case.plain()
        plain.run(case.prompt, case.options.max_tokens or 0)
        if max(plain.escapes, default=1) == 1:
            continue
        mx.random.seed(seed)
        one = case.found()
        mx.random.seed(seed + 1)
        two = case.found()
        assert one == two
        case.options = replace(case.options, seed=7)
        assert case.found() == case.found()
        differ += case.found().states != one.states
    assert differ > 3


@pytest.mark.parametrize("rule", RULES)
def test_a_sampler_is_called_on_rows_of_logprobs(rule: str) -> None:
    """One for each position of a block that is no prompt's, the tokens that may not be emitted at minus infinity."""
    calls: list[mx.array] = []

    def sampler(logprobs: mx.array) -> mx.array:
        calls.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    model = Reader(chance(5, 4), 4, rule)
    own = DecodingOptions(unmasking=rule, max_tokens=6, stop_at_eos=False, sampler=sampler, seed=0)
    found = watched(model, [1, 2], own)
    assert {call.shape for call in calls} - {(1, VOCAB)} == {(2, VOCAB), (4, VOCAB)}  # one row: a way out of a loop
    for call in calls:
        rows = np.array(call)
        assert np.allclose(np.exp(rows).sum(axis=1), 1, atol=1e-5) and (rows[:, MASK] == -np.inf).all()
        if rule == IN_PLACE:
            assert len(rows) > 1 and (rows[:, [DELETE, INSERT]] == -np.inf).all()
    assert found == watched(model, [1, 2], replace(own, sampler=None))


ADVICE = "it must take log-probabilities [n, vocabulary] and return n token ids."
NOT_EMITTED = (
    "The sampler returned token id {}, which must not be emitted: it must choose among the tokens below 12 whose "
    "log-probability is not minus infinity."
)


def failing(logprobs: mx.array) -> mx.array:
    raise IndexError("too many rows")


def constant(token: int) -> Callable[[mx.array], mx.array]:
    return lambda logprobs: mx.full((logprobs.shape[0],), token, dtype=mx.int32)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("sampler", "sentence"),
    [
        (failing, "The sampler cannot take the rows of diffusion decoding (IndexError: too many rows): " + ADVICE),
        (
            lambda rows: mx.zeros((1,), dtype=mx.int32),
            "The sampler returned an array of shape (1,) for 4 rows: " + ADVICE,
        ),
        (lambda rows: [1, 1, 1, 1], "The sampler returned list for 4 rows: " + ADVICE),
        (constant(MASK), NOT_EMITTED.format(MASK)),
        (constant(VOCAB), NOT_EMITTED.format(VOCAB)),
    ],
    ids=["fails", "one", "list", "mask", "outside"],
)
def test_a_sampler_that_cannot_be_used_is_refused(rule: str, sampler: Any, sentence: str) -> None:
    for more in ({"threshold": 0.0}, {"threshold": 1.0}, {"suppress_tokens": (1,)}):
        with pytest.raises(DiffusionError) as error:
            decode(Reader(chance(0, 4), 4, rule), [1] * 4, DecodingOptions(unmasking=rule, sampler=sampler, **more))
        assert str(error.value) == sentence


@pytest.mark.parametrize("token", [DELETE, INSERT])
@pytest.mark.parametrize("rule", [IN_PLACE, MOVES])
def test_a_sampler_may_not_go_on_editing_for_ever(rule: str, token: int) -> None:
    """The last forward of a block offers no edit token."""
    for more in ({"max_post_steps": 0}, {"max_post_steps": 1}, {"max_post_steps": 9}):
        if rule == MOVES:
            more["max_steps_per_block"] = 5
        with pytest.raises(DiffusionError) as error:
            decode(Reader(chance(0, 4), 4, rule), [1], DecodingOptions(unmasking=rule, sampler=constant(token), **more))
        assert str(error.value) == NOT_EMITTED.format(token)


def test_tokens_that_are_not_to_be_emitted_are_not() -> None:
    for rule in RULES:
        model = Reader(chance(3, 4), 4, rule)
        limits = {"max_post_steps": 2, **({"max_steps_per_block": 9} if rule == MOVES else {})}
        own = DecodingOptions(unmasking=rule, max_tokens=9, stop_at_eos=False, **limits)
        for suppressed in ((0, 1, 2), (DELETE, INSERT), (1, DELETE), (INSERT, 0)):
            for more in ({}, {"temp": 1.0, "seed": 1}, {"sampler": second, "seed": 1}):
                result = decode(model, [1, 2], replace(own, suppress_tokens=suppressed, **more))
                assert not {*suppressed, *SPECIAL} & {*result.tokens}


@pytest.mark.parametrize("rule", [IN_PLACE, MOVES])
def test_edit_tokens_are_no_tokens_to_emit(rule: str) -> None:
    own = DecodingOptions(unmasking=rule, suppress_tokens=tuple(range(MASK)))
    assert refusal(Reader(chance(3, 4), 4, rule), [1, 2], own) == "suppress_tokens leaves no token to emit."


# Models that do not come to rest


def one_hot(tokens: Sequence[int], p: float = 0.9) -> np.ndarray:
    return script(says(*tokens, p=p))([])


def churn(kind: str, length: int) -> Answer:
    calls = iter(range(10**6))

    def answer(text: list[int]) -> np.ndarray:
        block, number = text[-length:], next(calls)
        fill = [i % 8 for i in range(length)]
        filled = [fill[i] if token == MASK else token for i, token in enumerate(block)]
        tokens = {
            "insert everywhere": [INSERT] * length,
            "delete everywhere": [DELETE] * length,
            "insert before text": [fill[i] if token == MASK else INSERT for i, token in enumerate(block)],
            "delete text": [fill[i] if token == MASK else DELETE for i, token in enumerate(block)],
            "insert and delete in turns": [(INSERT, DELETE)[number % 2]] * length,
            "insert first": [INSERT, *filled[1:]],
            "delete last": [*filled[:-1], DELETE],
            "insert and delete": [INSERT if i % 2 else DELETE for i in range(length)],
            "two tokens in turns": [{3: 4, 4: 3}.get(token, 3) for token in filled],
            "another token every time": [(token + 1) % 8 for token in filled],
            "mask everywhere": [MASK] * length,
            "mask in place of text": [fill[i] if token == MASK else MASK for i, token in enumerate(block)],
        }[kind]
        table = one_hot(tokens)
        table[:, number % 7] += 0.1
        return table

    return answer


CHURNS = [
    *("insert everywhere", "delete everywhere", "insert before text", "delete text", "insert and delete in turns"),
    *("insert first", "delete last", "insert and delete", "two tokens in turns", "another token every time"),
    *("mask everywhere", "mask in place of text"),
]


@pytest.mark.parametrize("kind", CHURNS)
@pytest.mark.parametrize("rule", RULES)
def test_decoding_ends_whatever_the_model_says(rule: str, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Within the steps of each block, without a mask and without an edit token, and one line says that it did not
    settle."""
    for length, prompt, posts, cap in ((1, 2, 16, 7), (3, 1, 10**9, 9), (4, 6, 16, 1000), (4, 4, 0, 12), (4, 3, 3, 60)):
        own: dict[str, Any] = {"unmasking": rule, "max_tokens": 2 * length, "max_post_steps": posts}
        if rule == MOVES:
            own["max_steps_per_block"] = cap
        elif posts > 1000:
            own["max_post_steps"] = 30
        model = Reader(churn(kind, length), length, rule)
        found = watched(model, [1] * prompt, DecodingOptions(stop_at_eos=False, **own))
        blocks = len(found.blocks)
        most = cap if rule == MOVES else own["max_post_steps"] + length
        assert found.nfe <= blocks * most and len(found.output) == 2 * length
        assert not SPECIAL & {*found.output} and not SPECIAL & {*found.states[-1]}
        capped = sum(reason == "cap" for _, _, reason in found.blocks)
        line = f"{capped} of {blocks} blocks did not settle within max_steps_per_block {cap}: completed as they stood"
        assert capfd.readouterr().err == (f"\n[mlx-dllm-plugin] warning: {line}\n" if capped else "")


def test_a_mask_that_is_most_probable_takes_its_share_of_the_probability() -> None:
    """It is no candidate, and the others are no surer for that."""
    for rule in RULES:
        model = Reader(script(of((MASK, 0.7), (1, 0.2))), 2, rule)
        for threshold, count in ((0.19, 2), (0.21, 1)):
            own = DecodingOptions(unmasking=rule, threshold=threshold, editing_threshold=1.0)
            commits = decode(model, [1, 1], own).commits
            assert len(commits[0].positions) == count and {t for c in commits for t in c.tokens} == {1}
            assert all(abs(entry.token - np.log(0.2)) < 1e-4 for commit in commits for entry in commit.logprobs)


@pytest.mark.parametrize("rule", RULES)
def test_special_tokens_of_the_prompt_are_text(rule: str) -> None:
    """In blocks of the prompt, and in the block where it ends: nothing is deleted, inserted, filled or ended there."""
    prompt = [MASK, DELETE, 1, INSERT, EOS, DELETE, INSERT, MASK, 2, EOS, INSERT, DELETE, MASK]
    for end in range(1, len(prompt) + 1):
        for answer in (chance(end, 4), churn("delete text", 4), lambda text: one_hot([5, 6, 7, 5])):
            model = Reader(answer, 4, rule)
            own = DecodingOptions(unmasking=rule, max_tokens=5, max_post_steps=3, stop_at_eos=False)
            result = decode(model, prompt[:end], own)
            assert result.canvas[:end] == prompt[:end] and len(result.tokens) == 5
            assert not SPECIAL & {*result.tokens}
        stops = watched(
            Reader(lambda text: one_hot([5, 6, 7, 5]), 4, rule), prompt[:end], replace(own, stop_at_eos=None)
        )
        assert stops.reason == "length" and len(stops.output) == 5 and {*stops.output} <= {5, 6, 7}


def ended(
    *steps: Any, max_tokens: int = 3, rule: str = MOVES, prompt: Tokens = (1, 1, 1), **more: Any
) -> tuple[list[int], str]:
    own = {"threshold": 0.0, "max_tokens": max_tokens, "max_post_steps": 4, **more}
    found = watched(Reader(script(*steps), 3, rule), prompt, DecodingOptions(unmasking=rule, **own))
    return found.output, found.reason


def test_an_end_of_sequence_counts_when_its_block_is_final() -> None:
    text = says(1, 2, 3)
    for rule in RULES:
        assert ended(says(1, EOS, 3), rule=rule) == ([1, EOS], "stop")
        # Edited away, and written in the end.
        assert ended(says(1, EOS, 3), text, rule=rule) == ([1, 2, 3], "length")
        assert ended(text, text, says(EOS, 2, 3), rule=rule) == ([1, 2, 3], "length")
        assert ended(text, says(1, EOS, EOS), rule=rule) == ([1, EOS], "stop")
        # The output ends before it, at it, and after it.
        assert ended(says(1, 2, EOS), max_tokens=2, rule=rule) == ([1, 2], "length")
        assert ended(says(1, 2, EOS), max_tokens=3, rule=rule) == ([1, 2, EOS], "stop")
        assert ended(says(1, 2, EOS), max_tokens=9, rule=rule) == ([1, 2, EOS], "stop")
        assert ended(says(EOS, 2, 3), prompt=(EOS, 1, EOS, EOS), max_tokens=4, rule=rule) == ([2, 3, EOS], "stop")
        assert ended(says(1, EOS, 3), stop_at_eos=False, rule=rule) == ([1, EOS, 3], "length")
        assert ended(says(1, 2, 3), eos_token_ids=(2, 5), rule=rule) == ([1, 2], "stop")
    # Pushed out of the block by an insertion, and moved within it.
    assert ended(says(1, 2, EOS), says(INSERT, 2, EOS), says(5, 1, 2)) == ([5, 1, 2], "length")
    assert ended(says(1, EOS, 2), says(INSERT, EOS, 2), says(5, 1, EOS)) == ([5, 1, EOS], "stop")
    assert ended(says(1, 2, EOS), says(DELETE, 2, EOS), says(2, EOS, 6), max_tokens=2) == ([2, EOS], "stop")
    assert ended(says(1, 2, EOS), says(1, 2, DELETE), says(1, 2, 3)) == ([1, 2, 3], "length")


@pytest.mark.parametrize(
    "rule",
    [
        IN_PLACE,
        "threshold",
        "low_confidence_dynamic",
        "low_confidence_static",
        "low_confidence",
        "sequential",
        "factor",
    ],
)
def test_other_rules_never_write_an_edit_token(rule: str) -> None:
    """Of a checkpoint that has them, however probable they are; of one that has none, the ids are text."""
    for more in ({}, {"temp": 1.0, "seed": 1}):
        own = DecodingOptions(unmasking=rule, max_tokens=7, **more)
        pairs = [(DELETE, 0.5), (INSERT, 0.3), (3, 0.1), (4, 0.05)]
        result = decode(Reader(script([pairs] * 4), 4, rule), [1], own)
        assert len(result.tokens) == 7 and not SPECIAL & {*result.tokens}
        plain = decode(Reader(script([pairs] * 4), 4, rule, edit_token_ids=None), [1], own)
        assert {DELETE, INSERT} & {*plain.tokens}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(rule: str, bad: float) -> None:
    def broken(text: list[int]) -> np.ndarray:
        table = one_hot([1, 2, 3, 4])
        if MASK not in text:
            table[2, 5] = bad
        return table

    with pytest.raises(DiffusionError) as error:
        decode(Reader(broken, 4, rule), [1] * 4, DecodingOptions(unmasking=rule))
    assert str(error.value) == (
        "The model computed logits that are not finite numbers (NaN): its weights are damaged, or they overflow."
    )


# What cannot be decoded is refused


def refusal(model: Any, prompt: Any, options: Any) -> str:
    with pytest.raises(DiffusionError) as error:
        decode(model, prompt, options)
    return str(error.value)


@pytest.mark.parametrize("rule", RULES)
def test_rules_that_edit_need_blocks_and_logits_in_place(rule: str) -> None:
    sentence = (
        f"The unmasking rule {rule!r} edits the blocks of block-causal attention with logits in place; the family "
        "{} has attention {} and logits {}: choose another rule."
    )
    own = DecodingOptions(unmasking=rule, max_tokens=4)
    assert refusal(tiny_model("gpt2"), [1, 2], own) == sentence.format("gpt2", "bidirectional", "in_place")
    shifted = block_model(logits="shifted")
    assert refusal(shifted, [1, 2], own) == sentence.format("blocks", "block_causal", "shifted")
    for after in ("skip", "eos"):
        assert refusal(Reader(chance(0, 4)), [1], replace(own, after_eos=after)) == (
            f"after_eos {after} means nothing to the unmasking rule {rule!r}, which may edit an end of sequence away "
            "until its block is final: leave it out."
        )
    assert len(decode(Reader(chance(0, 4)), [1], replace(own, after_eos="fill", stop_at_eos=False)).tokens) == 4


def test_moves_need_the_ids_of_the_edit_tokens() -> None:
    own = DecodingOptions(unmasking=MOVES)
    sentence = (
        "The unmasking rule 'joint_threshold_indel' needs the ids of DELETE and INSERT, and the checkpoint names none "
        "(delete_token_id, split_token_id in config.json): choose joint_threshold, or another rule."
    )
    assert refusal(Reader(chance(0, 4), edit_token_ids=None), [1], own) == sentence
    assert refusal(block_model(), [1], own) == sentence
    assert decode(block_model(), [1], replace(own, unmasking=IN_PLACE)).tokens


def test_22_is_decoded_in_its_own_blocks(goldens: Path) -> None:
    model = loaded(goldens / "block" / "llada2_moe-v22-b8")
    for rule in RULES:
        for length in (4, 16, 32):
            assert refusal(model, [1], DecodingOptions(unmasking=rule, block_length=length)) == (
                f"block_length {length} would give a wrong answer: the checkpoint chooses experts by whole blocks of 8 "
                "tokens; leave it out."
            )
        own = DecodingOptions(unmasking=rule, block_length=8, max_tokens=8)
        assert decode(model, [1], own) == decode(model, [1], replace(own, block_length=None))


def test_rows_of_a_batch_share_their_rule() -> None:
    own = [DecodingOptions(unmasking=rule) for rule in RULES]
    assert refusal(Reader(chance(0, 4)), [[1], [1]], own) == (
        "All rows of a batch must use the same unmasking rule, got joint_threshold, joint_threshold_indel."
    )


@pytest.mark.parametrize(
    ("rule", "name", "value"),
    [
        *(
            (IN_PLACE, name, 4)
            for name in ("max_denoising_steps", "max_steps_per_block", "sub_block_length", "kl_history")
        ),
        *((MOVES, name, 4) for name in ("num_to_transfer", "sub_block_length", "low_threshold", "radius")),
        *((rule, "confidence_temperature", 1.0) for rule in RULES),
        *((rule, "cfg_scale", 1.0) for rule in RULES),
        *((rule, "begin_suppress_tokens", (1,)) for rule in RULES),
        *(("threshold", name, 1) for name in ("editing_threshold", "max_post_steps", "num_to_transfer")),
        ("low_confidence_dynamic", "max_steps_per_block", 5),
    ],
)
def test_an_option_that_the_rule_does_not_use_is_refused(rule: str, name: str, value: Any) -> None:
    sentence = refusal(Reader(chance(0, 4)), [1], DecodingOptions(unmasking=rule, **{name: value}))
    head = (
        f"The unmasking rule {rule!r} does not use {name}; leave it out, or choose a rule that does with unmasking (--"
    )
    assert sentence.startswith(head) and sentence.endswith(").")
    if name in ("editing_threshold", "max_post_steps"):
        assert sentence.endswith("(--unmasking joint_threshold|joint_threshold_indel).")


@pytest.mark.parametrize(
    ("name", "expected", "values"),
    [
        *((name, "0 or more", (-0.1, True, "1", float("nan"))) for name in ("threshold", "editing_threshold")),
        ("max_post_steps", "0 or more", (-1, 1.5, True)),
        ("num_to_transfer", "a positive integer", (0, -1, 0.5)),
        ("max_steps_per_block", "an integer from 1 to 100000", (0, 100_001, 2.5)),
        ("max_denoising_steps", "an integer from 1 to 100000", (0, -3)),
    ],
)
def test_values_out_of_range_are_refused(name: str, expected: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(DiffusionError) as error:
            DecodingOptions(**{name: value})
        assert str(error.value) == f"{name} must be {expected}, got {value!r}."


def test_without_options_a_rule_decodes_with_its_own_values() -> None:
    """And another rule than the family's knows nothing of the family's numbers."""
    family = {"block_length": 4, "max_tokens": 4, "threshold": 0.2, "editing_threshold": 0.3, "max_post_steps": 2}
    for rule in RULES:
        for salt in range(5):
            own = DecodingOptions(unmasking=rule, max_tokens=8)
            for unmasking, values in (("threshold", DEFAULTS[rule]), (rule, {**DEFAULTS[rule], **family})):
                model = Reader(chance(salt, 4), 4, unmasking, defaults=family)
                plain = Plain(model.look, 4, own)
                plain.o = values
                watched(model, [1, 2], own).equals(plain.run([1, 2], 8))


# Controls: another sampler says something else


def problem(folder: Path, name: str) -> str:
    golden = golden_of(folder)
    case = next(case for case in golden["generations"] if case["name"] == name)
    return llada2.generation(golden, case, loaded(folder))


V22, V22_B8 = "llada2_moe-v22", "llada2_moe-v22-b8"


def test_22_is_not_decoded_by_21(goldens: Path) -> None:
    """The same checkpoint, prompt and thresholds: another text from its first token."""
    folder = goldens / "block" / V22
    assert problem(folder, "default") == ""
    golden = golden_of(folder)
    case = golden["generations"][0]
    own = {name: case["settings"][name] for name in ("threshold", "editing_threshold", "max_post_steps")}
    given = DecodingOptions(unmasking=IN_PLACE, max_tokens=64, eos_token_ids=(317,), **own)
    tokens = decode(loaded(folder), case["prompt_ids"], given).tokens
    pairs = zip(tokens, case["output_ids"], strict=False)
    assert next(at for at, (a, b) in enumerate(pairs) if a != b) == 0


def not_acting(new: Any, still: Any, old: Any, masked: Any, original: Any, there: Any, ids: Any) -> Any:
    return new, still, original, np.broadcast_to(np.arange(new.shape[1]), new.shape)


def without_flags(*args: Any) -> Any:
    tokens, masked, original, source = SCAN(*args)
    return tokens, masked, np.ones_like(original), source


SCAN = editing.edit_scan
# What takes the place of which part, and the golden run that tells; none of them enters a loop.
CONTROLS: dict[str, tuple[str, Any, tuple[str, str] | None]] = {
    "edit tokens that do not act": ("edit_scan", not_acting, (V22, "default")),
    "no schedule": ("need", lambda masks, steps, step: np.zeros_like(masks), (V22, "thr_0.9")),
    "every mask is there since the beginning": ("edit_scan", without_flags, (V22_B8, "default")),
    "no way out of a loop": ("_leave", lambda *args: None, None),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_sampler_without_one_of_its_parts_is_another(
    name: str, goldens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, stand_in, golden = CONTROLS[name]
    assert golden is None or problem(goldens / "block" / golden[0], golden[1]) == ""
    monkeypatch.setattr(editing, part, stand_in)
    assert golden is None or problem(goldens / "block" / golden[0], golden[1]) != ""
    differ = 0
    for seed in range(40):
        one = any_case(seed, MOVES)
        try:
            differ += one.found() != one.wanted()
        except IndexError:  # a block that is not complete at its end
            differ += 1
    assert differ > 2


def test_a_block_that_was_written_before_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token changes: 3, 4, and 3 again, which was there: its second best takes its place."""
    three, four = [[(3, 0.6), (5, 0.3)]], [[(4, 0.6), (6, 0.3)]]
    own = DecodingOptions(unmasking=MOVES, max_tokens=1, max_post_steps=5)

    def found() -> list[int]:
        return [state[-1] for state in watched(Reader(script(three, four, three, four), 1), [1], own).states]

    assert found() == [MASK, 3, 4, 5, 6, 6]
    monkeypatch.setattr(editing, "_leave", lambda *args: None)
    assert found() == [MASK, 3, 4, 3, 4, 4]


def test_of_equally_sure_masks_the_leftmost_are_filled() -> None:
    for rule, more, count in ((IN_PLACE, {"num_to_transfer": 5}, 5), (MOVES, {"max_denoising_steps": 8}, 4)):
        model = Reader(script([[(1, 0.3)]] * 32), 32, rule)
        own = DecodingOptions(unmasking=rule, max_tokens=32, threshold=0.5, editing_threshold=1.0, **more)
        commits = decode(model, [1] * 32, own).commits
        wanted = [tuple(range(first, min(first + count, 64))) for first in range(32, 64, count)]
        assert [commit.positions for commit in commits if commit.positions] == wanted


def test_without_post_steps_edits_go_on_when_no_forward_filled_the_last_masks() -> None:
    """They went over the block's end; then what new masks get may delete. The loop ends with the masks."""
    steps = [
        [[(1, 0.4)], [(2, 0.3)], [(3, 0.3)]],
        [[(INSERT, 0.9)], [(2, 0.4)], [(3, 0.3)]],
        [[(DELETE, 0.9)], [(1, 0.9)], [(2, 0.9)]],
        says(1, 2, 5),
    ]
    model = Reader(script(*steps), 3)
    own = DecodingOptions(
        unmasking=MOVES, max_tokens=3, threshold=0.95, editing_threshold=0.5, max_post_steps=0, max_denoising_steps=5
    )
    found = watched(model, [1] * 3, own)
    states = [[1, MASK, MASK], [MASK, 1, 2], [1, 2, MASK], [1, 2, 5]]
    assert [state[3:] for state in found.states] == [[MASK] * 3, *states]
    found.equals(Plain(Reader(script(*steps), 3).look, 3, own).run([1] * 3, 3))


# DELETE and INSERT alone


def test_edit_tokens_act_as_in_a_list() -> None:
    """All blocks of up to four positions, each written with a token, DELETE, INSERT or nothing over a token or a mask,
    in one call with blocks of other lengths."""
    cases = [
        (written, masked, flags)
        for length in range(1, 5)
        for written in product((0, DELETE, INSERT, None), repeat=length)
        for masked, flags in [
            tuple(np.random.default_rng([length, *(w or 1 for w in written)]).random((2, length)) < 0.5)
        ]
    ]
    new, old = np.full((len(cases), 4), DELETE), np.full((len(cases), 4), 77)
    still, mask, original, there = (np.zeros((len(cases), 4), dtype=bool) for _ in range(4))
    for row, (written, masked, flags) in enumerate(cases):
        count = len(written)
        there[row, :count], original[row, :count], mask[row, :count] = True, flags, masked
        for i, token in enumerate(written):
            # A mask is left only where one was; a token that stays is the one that was there.
            still[row, i] = token is None and masked[i]
            new[row, i] = {None: 20 + i, 0: 10 + i}.get(token, token)
            old[row, i] = 20 + i
    tokens, masks, flags, source = editing.edit_scan(new, still, old, mask, original, there, (DELETE, INSERT))
    for row, (written, _, _) in enumerate(cases):
        count = len(written)
        before = [Cell(None if mask[row, i] else 20 + i, bool(original[row, i]), i) for i in range(count)]
        after = [Cell(None if still[row, i] else int(new[row, i]), bool(original[row, i]), i) for i in range(count)]
        wanted = scan(after, before, DELETE, INSERT)
        for i, cell in enumerate(wanted):
            assert masks[row, i] == (cell.token is None) and flags[row, i] == cell.original
            assert cell.token is None or (tokens[row, i] == cell.token and source[row, i] == cell.logprob)
    assert not masks[~there].any()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([1, DELETE, 3, 4], [1, 3, 4, MASK]),
        ([1, INSERT, 3, 4], [1, MASK, 2, 3]),
        ([DELETE, 2, INSERT, 4], [2, MASK, 3, 4]),
        ([1, DELETE, INSERT, 4], [1, MASK, 3, 4]),
        ([1, 2, 3, INSERT], [1, 2, 3, MASK]),
        ([INSERT, INSERT, INSERT, INSERT], [MASK, 1, MASK, 2]),
        ([DELETE] * 4, [MASK] * 4),
    ],
)
def test_edit_tokens_act_in_decoding(written: list[int], expected: list[int]) -> None:
    """What the forward after them sees, and whose log-probabilities the tokens keep."""
    model = Reader(script(says(1, 2, 3, 4, p=0.5), says(*written, p=0.6), says(6, 6, 6, 6, p=0.7)))
    own = DecodingOptions(unmasking=MOVES, max_tokens=4, threshold=0.0, editing_threshold=0.55, max_post_steps=4)
    commits = decode(model, [1] * 4, own).commits
    canvas = {at - 4: token for at, token in zip(commits[0].positions, commits[0].tokens, strict=True)}
    assert canvas == dict(enumerate([1, 2, 3, 4]))
    for at in commits[1].masked:
        canvas[at - 4] = MASK
    for at, token, entry in zip(commits[1].positions, commits[1].tokens, commits[1].logprobs, strict=True):
        canvas[at - 4] = token
        assert abs(entry.token - np.log(0.5)) < 1e-4  # moved, and written in the first forward
    assert [canvas[i] for i in range(4)] == expected


# Where one looks at it


@pytest.mark.parametrize("name", ["default", "default_straddle", "default_aligned_prompt", "eos_stop"])
def test_mlx_lm_streams_the_golden_text(name: str, goldens: Path) -> None:
    """Block by block: a response for each token, when its block is final."""
    folder = goldens / "block" / V22
    golden = golden_of(folder)
    case = next(case for case in golden["generations"] if case["name"] == name)
    model, tokenizer = mlx_lm.load(str(folder))
    settings = case["settings"]
    options = {name: settings[name] for name in ("threshold", "editing_threshold", "max_post_steps")}
    responses = list(
        mlx_lm.stream_generate(model, tokenizer, case["prompt_ids"], max_tokens=settings["gen_length"], **options)
    )
    assert [response.token for response in responses] == case["output_ids"]
    text = "".join(response.text for response in responses)
    assert text == case["output_text"].removesuffix("<|endoftext|>").removeprefix(" ")
    assert responses[-1].finish_reason == case["finish"] and responses[-1].forwards == case["nfe"]
    first, ends = len(case["prompt_ids"]), np.cumsum([block["forwards"] for block in case["blocks"]])
    for at, response in enumerate(responses):
        number = (first + at) // 32 - first // 32
        assert response.forwards == ends[number]
        assert response.logprobs.shape == (352,) and int(response.logprobs.argmax()) >= 0
