"""A model here against what a reference made of the same canvas, part by part.

The canvas is run in two rows. In the first every part gets the reference's input, so that an error shows in the part
that makes it and nowhere else; the second goes its own way, and shows what becomes of all errors together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..decode import spec_of
from ..errors import DiffusionError
from ..layerwise import Watch, forward
from .trace import Stage, Trace

TOLERANCE = 30.0  # measured: up to 4 times the reference's own rounding; a gelu for a tanh gelu 100 times and more
_MEAN = 1 / 3  # of it, for means: measured up to 4 times; a wrong epsilon of a norm 20 times
_FLOOR = 8  # roundings of the largest value, which are allowed to parts that round next to nothing

# What a value near 1 is rounded by at most, and the share of tokens whose experts may differ, beside one: a tie that
# rounds to another side is no fault.
_EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_TIES = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.05}


@dataclass(frozen=True)
class Part:
    """
    One part of the model with the reference's input.

    Args:
        name: ``embedding``, ``layer 0`` .., ``norm`` or ``head``.
        error: max and mean absolute difference of its output, over the tokens with the same experts.
        rounding: the yardstick of the reference, max and mean; None: not measured.
        allowed: the largest error that is no problem, and the largest mean error.
        experts: share of the tokens with the reference's experts; None: it has none.
        problem: what is wrong with it, or "".
    """

    name: str
    error: tuple[float, float]
    rounding: tuple[float, float] | None
    allowed: tuple[float, float]
    experts: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Comparison:
    """
    Args:
        reference: what it was compared with.
        parts: from the embedding to the head.
        masked: masked positions of the canvas.
        agreeing: those of them whose most likely token is the reference's, when no part gets the reference's input.
        drift: max absolute difference of all logits then.
        problems: what is over the tolerance; empty when all is well.
    """

    reference: str
    parts: tuple[Part, ...]
    masked: int
    agreeing: int
    drift: float
    problems: tuple[str, ...]


def compare(
    model: Any,
    ids: Sequence[int],
    masked: Sequence[bool],
    trace: Trace,
    *,
    tolerance: float = TOLERANCE,
    dtype: str = "float32",
    on_part: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """
    Compare a model with a trace, and drop its weights on the way.

    Args:
        model: with a spec, loaded lazily; it cannot be used afterwards.
        ids: the canvas [T].
        masked: which of it is masked [T]; with shifted logits not the first.
        trace: what the reference made of it.
        tolerance: how many times the reference's own rounding an error may be; a mean error a third of that.
        dtype: what both compute in.
        on_part: is told each part that is compared.

    Raises:
        DiffusionError: a reference of another shape.
    """
    if len(model.layers) != len(trace.layers):
        raise DiffusionError(
            f"The reference is another model: it has {len(trace.layers)} layers, and {len(model.layers)} here."
        )
    follow = _Follow(trace, tolerance, dtype, on_part)
    logits = forward(model, mx.array([list(ids)] * 2), follow, release=True)
    follow.look("head", trace.head, logits[0])
    own, wanted = np.array(logits[1]), trace.head.states
    drift = _largest(np.abs(own - wanted))
    at = np.flatnonzero(masked)
    if spec_of(model).logits == "shifted":
        at = at - 1
    ours, theirs = own[at].argmax(axis=-1), wanted[at].argmax(axis=-1)
    gaps = np.take_along_axis(wanted[at], theirs[:, None], -1) - np.take_along_axis(wanted[at], ours[:, None], -1)
    parts = tuple(follow.parts)
    problems = [f"{part.name}: {part.problem}" for part in parts if part.problem]
    # Errors of all parts add up; a token that is ahead by more than that must be the same.
    if not problems and len(at) and float(gaps.max()) > 2 * len(parts) * parts[-1].allowed[0]:
        problems.append(
            f"argmax: {int((ours != theirs).sum())} of {len(at)} masked positions have another most likely token, "
            f"which the reference puts up to {float(gaps.max()):.1e} below its own"
        )
    return Comparison(trace.reference, parts, len(at), int((ours == theirs).sum()), drift, tuple(problems))


class _Follow(Watch):
    def __init__(self, trace: Trace, tolerance: float, dtype: str, on_part: Callable[[str], None]):
        self.trace, self.tolerance, self.dtype, self.on_part = trace, tolerance, dtype, on_part
        self.parts: list[Part] = []
        self.experts: np.ndarray | None = None

    def enters(self, number: int, states: mx.array) -> mx.array:
        if number:
            return states
        return self.go_on("embedding", self.trace.embedding, states)

    def leaves(self, number: int, states: mx.array) -> mx.array:
        return self.go_on(f"layer {number}", self.trace.layers[number], states)

    def chooses(self, number: int, experts: mx.array) -> None:
        self.experts = np.sort(np.array(experts[0].reshape(-1, experts.shape[-1])), axis=-1)

    def ends(self, states: mx.array) -> mx.array:
        return self.go_on("norm", self.trace.norm, states)

    def go_on(self, name: str, stage: Stage, states: mx.array) -> mx.array:
        """The states with the reference's in the first row."""
        self.look(name, stage, states[0])
        return mx.stack([mx.array(stage.states).astype(states.dtype), states[1]])

    def allowed(self, stage: Stage) -> tuple[float, float]:
        """The largest error and the largest mean error of a part."""
        sizes = np.abs(stage.states)
        units = tuple(_EPSILON[self.dtype] * float(value) for value in (sizes.max(initial=0.0), sizes.mean()))
        if stage.rounding is None:
            largest, mean = (self.tolerance * unit for unit in units)
        else:
            largest, mean = (self.tolerance * rounding for rounding in stage.rounding)
        return max(largest, _FLOOR * units[0]), max(_MEAN * mean, _FLOOR * units[1])

    def look(self, name: str, stage: Stage, states: mx.array) -> None:
        """Compare what a part made of the reference's input [T, D]."""
        found, wanted = np.array(states.astype(mx.float32)), stage.states
        experts, self.experts = self.experts, None
        allowed = self.allowed(stage)
        share, same = None, np.ones(len(wanted), dtype=bool)
        problem = ""
        if found.shape != wanted.shape:
            raise DiffusionError(
                f"The reference is another model: its {name} makes {list(wanted.shape)} numbers, and "
                f"{list(found.shape)} here."
            )
        if (experts is None) != (stage.experts is None):
            problem = f"{'the reference' if experts is None else 'it alone'} chooses experts"
        elif experts is not None and stage.experts is not None:
            if experts.shape == stage.experts.shape:
                same = (experts == np.sort(stage.experts, axis=-1)).all(axis=-1)
            else:
                same = np.zeros(len(wanted), dtype=bool)
            share = float(same.mean())
            if (~same).sum() > max(1, _TIES[self.dtype] * len(same)):
                problem = f"{share:.1%} of the tokens have the reference's experts"
        errors = np.abs(found - wanted)[same] if same.any() else np.abs(found - wanted)
        error = (_largest(errors), float(errors.mean()))
        if not problem and not error[0] <= allowed[0]:
            problem = f"it differs by {error[0]:.1e}, {allowed[0]:.1e} is allowed" + _shift(found, wanted, allowed[0])
        elif not problem and not error[1] <= allowed[1]:
            problem = f"it differs by {error[1]:.1e} in the mean, {allowed[1]:.1e} is allowed"
        self.parts.append(Part(name, error, stage.rounding, allowed, share, problem))
        self.on_part(name)


def _shift(found: np.ndarray, wanted: np.ndarray, allowed: float) -> str:
    """That states stand one position away from the reference's."""
    if _largest(np.abs(found[1:] - wanted[:-1])) <= allowed:
        return "; it is that of the position before"
    if _largest(np.abs(found[:-1] - wanted[1:])) <= allowed:
        return "; it is that of the next position"
    return ""


def _largest(values: np.ndarray) -> float:
    """The largest of absolute values; infinite where one is no number, which no tolerance allows."""
    return float(np.nan_to_num(values, nan=np.inf).max(initial=0.0))
