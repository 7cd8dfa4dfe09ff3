"""Likelihood of a target given a prompt: the bound that masked diffusion trains on, exact or estimated.

With L target tokens, S a set of them that is masked and p the model's probabilities given the rest, the bound is the
mean over x = 1..L of the mean over the sets S of x tokens of ::

    (L / x) * sum of log p(token) over S

It is the mean over all orders of the chain rule in that order (Uria et al., arXiv 1310.1757; Ou et al., arXiv
2406.03736), and the continuous-time bound of MDLM (arXiv 2406.07524) and LLaDA (arXiv 2502.09992), which draw each mask
with a probability t and weigh by 1/t, without that weight's variance. Probabilities are over the whole vocabulary, the
mask token included, as in LLaDA.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from .caches import FullCanvas
from .decode import family_on, spec_of
from .errors import DiffusionError
from .spec import DiffusionSpec, mask_token_id_of

METHODS = ("estimate", "exact", "batches", "reference")
LONGEST_EXACT = 12  # tokens: 4095 canvases
GROUPS = 8  # of samples that share nothing, so that their spread is the error
BATCH = 16
HEAD_VALUES = 2**24  # logits at a time: 64 MB in float32


@dataclass(frozen=True)
class Subsets:
    """
    Every way to mask a target of L tokens, fewest masks first, and what the model says of the masked tokens.

    Args:
        masks: which tokens are masked [2**L - 1, L].
        logprobs: their log-probabilities in nats [2**L - 1, L]; not a number where a token is not masked.
    """

    masks: np.ndarray
    logprobs: np.ndarray

    @property
    def by_mask_count(self) -> tuple[float, ...]:
        """The bound with 1, 2, .. L masks, in nats: the mean over the sets of that size. Their mean is the bound."""
        counts, values = self.masks.sum(axis=1), _weighted(self.masks, self.logprobs)
        return tuple(float(values[counts == x].mean()) for x in range(1, self.masks.shape[1] + 1))

    @property
    def left_to_right(self) -> float:
        """Log-likelihood of the chain rule from the first token to the last, in nats."""
        length = self.masks.shape[1]
        place = {mask.tobytes(): i for i, mask in enumerate(self.masks)}
        return float(sum(self.logprobs[place[(np.arange(length) >= i).tobytes()], i] for i in range(length)))

    @property
    def order_mixture(self) -> float:
        """Log of the mean over all L! orders of the chain rule's product, in nats; the bound is the mean of the logs,
        so never more."""
        bits = (self.masks @ (1 << np.arange(self.masks.shape[1]))).tolist()
        total = {0: 0.0}  # of a set: the same mean over the orders of its tokens
        for own, mask, row in zip(bits, self.masks, self.logprobs, strict=True):
            first = [row[i] + total[own ^ (1 << i)] for i in np.flatnonzero(mask).tolist()]
            total[own] = float(np.logaddexp.reduce(first)) - math.log(len(first))
        return total[bits[-1]]


@dataclass(frozen=True)
class Score:
    """
    Args:
        log_likelihood: the bound on log p(target | prompt) in nats, for the whole target.
        standard_error: of ``log_likelihood`` in nats: 0 when it is exact, None when a single estimate shows none.
        method: how it was computed; ``exact`` also when an estimate was asked for that needs every subset.
        target_tokens: L.
        samples: masked canvases that the value is a mean of.
        forwards: calls of the model.
        rows: rows in them: two per canvas with guidance, and one for canvases that were drawn more than once.
        estimates: independent ones, whose mean is the value. With one seed two models see the same canvases, so their
            difference has the standard error of the differences of these.
        subsets: of the method ``exact``: what each mask subset gave.
    """

    log_likelihood: float
    standard_error: float | None
    method: str
    target_tokens: int
    samples: int
    forwards: int
    rows: int
    estimates: tuple[float, ...] = field(repr=False)
    subsets: Subsets | None = field(repr=False, default=None)


def score(
    model: Any,
    prompt: Sequence[int] | mx.array,
    target: Sequence[int] | mx.array,
    *,
    method: Literal["estimate", "exact", "batches", "reference"] = "estimate",
    samples: int = 128,
    batch_size: int | None = None,
    seed: int | np.random.Generator = 0,
    cfg_scale: float = 0.0,
    mask_token_id: int | None = None,
    batches: Any = None,
) -> Score:
    """
    How likely the target is after the prompt: the bound of this module, in nats.

    Args:
        model: a loaded model with a ``diffusion_spec``, bidirectional.
        prompt: token ids [P], never masked; may be empty if the logits are not shifted.
        target: token ids [L].
        method: ``estimate`` is unbiased: samples with exact mask counts, spread evenly over 1..L, masking all tokens
            equally often as far as possible; at least 2**L - 1 samples give the exact value instead. ``exact``
            evaluates all 2**L - 1 mask subsets, of at most 12 tokens. ``reference`` is LLaDA's own estimator
            (get_log_likelihood.py): per batch of b a first count k, row j masks
            (round(k + j L / b) - 1) mod L + 1 tokens; rounding half to even biases it for b > 1. ``batches``
            evaluates the canvases in ``batches`` as LLaDA does.
        samples: masked canvases of ``estimate`` and ``reference``.
        batch_size: canvases per forward, by default 16; in ``reference`` also b.
        seed: of the masks: a number, which gives every model the same ones (in ``estimate`` whatever the batch size),
            or a numpy Generator, which is advanced.
        cfg_scale: classifier-free guidance: the logits become Lu + (cfg_scale + 1) (L - Lu), where Lu are those with
            the prompt's tokens masked; two rows per canvas.
        mask_token_id: for a checkpoint that does not say.
        batches: token ids [n, b, P + L], the target partly replaced by the mask token.

    Returns:
        Score: its ``log_likelihood``, when exact, is at most the log-likelihood under a random order.

    Raises:
        DiffusionError: a model without a spec or with block-causal attention; an empty target, ids outside the
            vocabulary, more tokens than the context holds; no mask id; an argument out of range; logits that are not
            finite.
    """
    if method not in METHODS:
        raise DiffusionError(f"method must be {', '.join(METHODS[:-1])} or {METHODS[-1]}, got {method!r}.")
    if (batches is None) == (method == "batches"):
        raise DiffusionError(
            "method 'batches' needs batches, the masked canvases [n, b, prompt + target]."
            if batches is None
            else f"batches are for method 'batches'; method {method!r} makes its own."
        )
    samples = _positive("samples", samples)
    batch = None if batch_size is None else _positive("batch_size", batch_size)
    task = _Task(model, prompt, target, cfg_scale, mask_token_id)
    length = len(task.target)
    if method == "exact" and length > LONGEST_EXACT:
        raise DiffusionError(
            f"method 'exact' evaluates all 2**L - 1 mask subsets of a target of at most {LONGEST_EXACT} tokens, got "
            f"{length}: use method 'estimate'."
        )
    if method == "exact" or (method == "estimate" and samples >= 2**length - 1):
        return _exact(task, batch or BATCH)
    if method == "batches":
        masks = _recorded(task, batches)
        values = _weighted(masks, task.logprobs(masks, batch or len(masks) // len(batches)))
        return _result(task, method, values, [len(values) // len(batches)] * len(batches))
    random = _generator(seed)
    if method == "reference":
        batch = batch or min(BATCH, samples)
        if samples % batch:
            raise DiffusionError(
                f"samples must be a multiple of batch_size in method 'reference', got {samples} and {batch}."
            )
        sizes = [batch] * (samples // batch)
        masks = np.concatenate([_reference(random, length, size) for size in sizes])
        return _result(task, method, _weighted(masks, task.logprobs(masks, batch)), sizes)
    sizes = [len(part) for part in np.array_split(np.arange(samples), min(GROUPS, samples))]
    masks = np.concatenate([_balanced(random, length, size) for size in sizes])
    different, which = np.unique(masks, axis=0, return_inverse=True)
    values = _weighted(different, task.logprobs(different, batch or BATCH))[which.reshape(-1)]
    return _result(task, method, values, sizes)


class _Task:
    """A prompt and a target, checked, and what the evaluation of masked targets has cost so far."""

    def __init__(self, model: Any, prompt: Any, target: Any, cfg_scale: Any, mask_token_id: Any):
        spec = spec_of(model)
        if spec.attention != "bidirectional":
            raise DiffusionError(
                f"The family {spec.family} is block-causal and cannot be scored: its bound is a sum over blocks, each "
                "given the clean blocks before it, and masking the whole target at once computes another number."
            )
        self.model, self.family, self.shifted = model, family_on(model), spec.logits == "shifted"
        self.vocab_size = spec.vocab_size
        self.prompt, self.target = _ids("prompt", prompt, spec), _ids("target", target, spec)
        if not len(self.target):
            raise DiffusionError("The target is empty: give at least one token.")
        if self.shifted and not len(self.prompt):
            raise DiffusionError("A model with shifted logits needs a prompt: nothing predicts position 0.")
        total = len(self.prompt) + len(self.target)
        if spec.context_length is not None and total > spec.context_length:
            raise DiffusionError(
                f"A prompt of {len(self.prompt)} and a target of {len(self.target)} tokens exceed the model's context "
                f"of {spec.context_length}: shorten them."
            )
        if not isinstance(cfg_scale, (int, float)) or isinstance(cfg_scale, bool) or not 0 <= cfg_scale < math.inf:
            raise DiffusionError(f"cfg_scale must be a number of 0 or more, got {cfg_scale!r}.")
        self.cfg_scale = float(cfg_scale)
        self.mask_token_id = mask_token_id_of(spec, mask_token_id, "the caller")
        self.forwards = self.rows = 0

    def logprobs(self, masks: np.ndarray, batch: int) -> np.ndarray:
        """Log-probabilities of the masked tokens of targets [N, L], in float64; not a number elsewhere."""
        values = np.full(masks.shape, np.nan)
        for start in range(0, len(masks), batch):
            part = masks[start : start + batch]
            values[start : start + batch][part] = self._forward(part)
        return values

    def _forward(self, masks: np.ndarray) -> np.ndarray:
        """Those of one forward, row by row [number of masks]."""
        first = len(self.prompt)
        canvas = np.tile(np.concatenate([self.prompt, self.target]).astype(np.int32), (len(masks), 1))
        canvas[:, first:][masks] = self.mask_token_id
        if self.cfg_scale:
            unguided = canvas.copy()
            unguided[:, :first] = self.mask_token_id
            canvas = np.concatenate([canvas, unguided])
        self.forwards += 1
        self.rows += len(canvas)
        cache = [FullCanvas()] * len(getattr(self.model, "layers", ()))
        states = self.family.hidden(self.model, mx.array(canvas), cache)
        row, column = np.nonzero(masks)
        tokens = mx.array(self.target[column].astype(np.int32))
        read = mx.array(first + column - self.shifted)  # shifted logits of position i - 1 predict token i
        parts = [states[mx.array(row), read]]
        if self.cfg_scale:
            parts.append(states[mx.array(row + len(masks)), read])
        values = []
        # The head makes the largest array of all: it sees a bounded number of positions at a time.
        step = max(1, HEAD_VALUES // self.vocab_size)
        for start in range(0, len(row), step):
            logits, *others = (self._head(part[start : start + step]) for part in parts)
            for other in others:
                logits = other + (self.cfg_scale + 1) * (logits - other)
            norm = mx.logsumexp(logits, axis=-1)
            own = mx.take_along_axis(logits, tokens[start : start + step, None], axis=-1)[:, 0] - norm
            mx.eval(own, norm)
            if not np.isfinite(np.array(norm)).all():
                raise DiffusionError(
                    "The model computed logits that are not finite numbers (NaN): its weights are damaged, or they "
                    "overflow."
                )
            values.append(np.array(own))
        return np.concatenate(values)

    def _head(self, states: mx.array) -> mx.array:
        return self.family.head(self.model, states[None])[0].astype(mx.float32)


def _weighted(masks: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """What each masked target [N, L] says of the bound, in nats [N]."""
    return masks.shape[1] / masks.sum(axis=1) * np.nansum(logprobs, axis=1)


def _exact(task: _Task, batch: int) -> Score:
    length = len(task.target)
    masks = np.zeros((2**length - 1, length), dtype=bool)
    sets = (chosen for count in range(1, length + 1) for chosen in combinations(range(length), count))
    for mask, chosen in zip(masks, sets, strict=True):
        mask[list(chosen)] = True
    subsets = Subsets(masks, task.logprobs(masks, batch))
    value = float(np.mean(subsets.by_mask_count))
    return Score(value, 0.0, "exact", length, len(masks), task.forwards, task.rows, (value,), subsets)


def _result(task: _Task, method: str, values: np.ndarray, sizes: Sequence[int]) -> Score:
    """The score of values that come in groups of these sizes. Groups that differ in size by one count alike: each is an
    estimate of the whole bound."""
    estimates = np.array([part.mean() for part in np.split(values, np.cumsum(sizes)[:-1])])
    error = None
    if len(estimates) > 1 and np.isfinite(estimates).all():
        error = float(estimates.std(ddof=1) / math.sqrt(len(estimates)))
    return Score(
        log_likelihood=float(estimates.mean()),
        standard_error=error,
        method=method,
        target_tokens=len(task.target),
        samples=len(values),
        forwards=task.forwards,
        rows=task.rows,
        estimates=tuple(estimates.tolist()),
    )


def _balanced(random: np.random.Generator, length: int, samples: int) -> np.ndarray:
    """
    Masks [samples, length], each uniform over the sets of its size, the sizes uniform over 1..length on average.

    The sizes are evenly spaced from a random start (systematic sampling). Targets of neighbouring sizes take the next
    tokens of one permutation until it is used up, so that none is masked twice before all are masked once.
    """
    counts = np.floor((np.arange(samples) + random.random()) * (length / samples)).astype(int) + 1
    return _filled(random, length, np.minimum(counts, length), share=True)


def _reference(random: np.random.Generator, length: int, batch: int) -> np.ndarray:
    """Masks [batch, length] of LLaDA's estimator; its rounding is half to even."""
    counts = _reference_counts(int(random.integers(1, length + 1)), length, batch)
    return _filled(random, length, counts, share=False)


def _reference_counts(first: int, length: int, batch: int) -> np.ndarray:
    return (np.round(first + np.arange(batch) * (length / batch)).astype(int) - 1) % length + 1


def _filled(random: np.random.Generator, length: int, counts: np.ndarray, share: bool) -> np.ndarray:
    """Masks of these sizes, from one permutation as long as it lasts, or from one each."""
    masks, left = np.zeros((len(counts), length), dtype=bool), np.zeros(0, dtype=int)
    for mask, count in zip(masks, counts, strict=True):
        if not share or len(left) < count:
            left = random.permutation(length)
        mask[left[:count]] = True
        left = left[count:]
    return masks


def _recorded(task: _Task, batches: Any) -> np.ndarray:
    """Which target tokens are masked in recorded canvases [n, b, T]: [n * b, L]."""
    clean = np.concatenate([task.prompt, task.target])
    expected = f"batches must be token ids [n, b, {len(clean)}]"
    ids = _integers(batches)
    if ids is None or ids.ndim != 3 or not ids.size or ids.shape[2] != len(clean):
        got = reprlib.repr(batches) if ids is None else f"shape {list(ids.shape)}"
        raise DiffusionError(f"{expected} of prompt and target, got {got}.")
    if task.mask_token_id in task.target:
        raise DiffusionError(
            f"The target holds the mask token {task.mask_token_id}, so batches do not say which of it is masked."
        )
    masks = ids == task.mask_token_id
    masks[:, :, : len(task.prompt)] = False
    wrong = np.argwhere(~masks & (ids != clean))
    if len(wrong):
        i, j, at = wrong[0].tolist()
        raise DiffusionError(
            f"batches must be the prompt and target with target tokens masked: position {at} of [{i}][{j}] is "
            f"{ids[i, j, at]} instead of {clean[at]}."
        )
    empty = np.argwhere(~masks.any(axis=2))
    if len(empty):
        i, j = empty[0].tolist()
        raise DiffusionError(f"batches must mask at least one target token per canvas; [{i}][{j}] masks none.")
    return masks[:, :, len(task.prompt) :].reshape(-1, len(task.target))


def _ids(name: str, ids: Any, spec: DiffusionSpec) -> np.ndarray:
    """Token ids [n], inside the vocabulary."""
    array = _integers(ids)
    if array is None or array.ndim != 1:
        raise DiffusionError(f"The {name} must be a list of token ids, got {reprlib.repr(ids)}.")
    outside = array[(array < 0) | (array >= spec.vocab_size)]
    if len(outside):
        raise DiffusionError(
            f"The {name} has token id {outside[0]}, outside the vocabulary of {spec.vocab_size}: "
            "the tokenizer does not belong to this checkpoint."
        )
    return array


def _integers(values: Any) -> np.ndarray | None:
    """An array of integers, or None."""
    try:
        array = np.array(values)
    except (ValueError, TypeError):
        return None
    if array.shape == (0,):
        return array.astype(np.int64)
    return array if array.dtype.kind in "iu" else None


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise DiffusionError(f"{name} must be a positive integer, got {value!r}.")
    return int(value)


def _generator(seed: Any) -> np.random.Generator:
    if isinstance(seed, np.random.Generator):
        return seed
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or seed < 0:
        raise DiffusionError(f"seed must be an integer of 0 or more or a numpy Generator, got {seed!r}.")
    return np.random.default_rng(int(seed))
