"""dllm's samplers MDLM and BD3LM: one rule, whose block-causal form is BD3LM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from . import Rule
from .low_confidence import GUIDED, token_probability


def mdlm_schedule(masks: int, steps: int, values: Mapping[str, Any]) -> list[int]:
    """
    round(remaining * (1 - (1 - a(s)) / (1 - a(t)))) from time t to s, rounded half to even; all in the last step. The
    schedule a(t) is 1 - t (linear), then the share is 1 / (steps left), or 1 - cos(pi/2 (1 - t)) (cosine).
    """
    counts, left = [], masks
    for step in range(steps):
        if step == steps - 1:
            count = left
        elif values["alpha_schedule"] == "linear":
            count = round(left / (steps - step))
        else:
            t, s = 1 - step / steps, 1 - (step + 1) / steps
            count = round(left * (1 - math.cos(math.pi / 2 * (1 - s)) / math.cos(math.pi / 2 * (1 - t))))
        counts.append(count)
        left -= count
    return counts


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
