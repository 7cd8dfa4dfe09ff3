"""dllm's samplers MDLM and BD3LM: one rule, whose block-causal form is BD3LM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import Rule
from .low_confidence import GUIDED, token_probability


def mdlm_schedule(masks: int, steps: int, values: Mapping[str, Any]) -> list[int]:
    """
    round(remaining * (1 - (1 - a(s)) / (1 - a(t)))) from time t to s, rounded half to even; all in the last step. The
    schedule a(t) is 1 - t (linear), then the share is 1 / (steps left), or 1 - cos(pi/2 (1 - t)) (cosine). The share is
    computed in float32 and in this order of operations, as in dllm: where the product is halfway, its error decides.
    """
    alpha = _linear if values["alpha_schedule"] == "linear" else _cosine
    times = np.array([(steps - step) / steps for step in range(steps)], dtype=np.float32)
    masked = np.float32(1) - alpha(times)
    counts, left = [], masks
    for now, then in zip(masked[:-1], masked[1:], strict=True):
        counts.append(round(left * (1 - float(then / now))))
        left -= counts[-1]
    return [*counts, left]


def _linear(times: np.ndarray) -> np.ndarray:
    return np.float32(1) - times


def _cosine(times: np.ndarray) -> np.ndarray:
    return np.float32(1) - np.cos(np.float32(math.pi / 2) * (np.float32(1) - times))


MDLM = Rule(
    name="mdlm",
    about="dllm's MDLM, and BD3LM where attention is block-causal: the most confident positions, a linear or cosine "
    "schedule of what remains",
    schedule=mdlm_schedule,
    confidence=token_probability,
    uses=GUIDED | {"max_denoising_steps", "block_length", "alpha_schedule", "begin_suppress_tokens"},
    defaults={"alpha_schedule": "linear"},
    steps_round_up=True,
)
