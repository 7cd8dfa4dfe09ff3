"""Dream's rules (its ``diffusion_generate``). Confidences are of the distribution that tokens are drawn from: after the
temperature, top-p and top-k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from . import Candidates, Rule
from .low_confidence import token_probability

# top_p before top_k, as in Dream's sample_tokens.
FILTERS = ("top_p", "top_k", "min_p")


def _shares(steps: int, values: Mapping[str, Any]) -> list[float]:
    """Per step the share of the remaining masks that is committed: 1 - s/t on linspace(1, eps, steps + 1), in float32
    as in torch; all of them in the last step. ``taken`` steps have gone before."""
    taken = values.get("taken", 0)
    times = np.linspace(1, values["eps"], steps + taken + 1).astype(np.float32)
    return [*(np.float32(1) - times[1:-1] / times[:-2]).tolist(), 1.0][taken:]


def dream_schedule(masks: int, steps: int, values: Mapping[str, Any]) -> list[int]:
    """int(remaining * share): often nothing, when there are more steps than masks."""
    counts, left = [], masks
    for share in _shares(steps, values):
        counts.append(left if share == 1 else int(np.float32(left) * np.float32(share)))
        left -= counts[-1]
    return counts


def origin_schedule(masks: int, steps: int, values: Mapping[str, Any]) -> list[float]:
    """The probability with which each masked position is committed in a step."""
    return _shares(steps, values)


def probability(candidates: Candidates) -> mx.array:
    """Probability of the given tokens: [B, W]."""
    return _ranked(token_probability(candidates), candidates)


def margin(candidates: Candidates) -> mx.array:
    """Probability of the best token less that of the second best: [B, W]."""
    p = mx.softmax(candidates.logits, axis=-1)
    best = mx.argmax(p, axis=-1, keepdims=True)
    second = mx.where(mx.arange(p.shape[-1]) == best, 0.0, p).max(axis=-1)
    return _ranked(p.max(axis=-1) - second, candidates)


def negative_entropy(candidates: Candidates) -> mx.array:
    """Sum of p log(p + 1e-10): [B, W], at most 0."""
    p = mx.softmax(candidates.logits, axis=-1)
    return _ranked((p * mx.log(p + 1e-10)).sum(axis=-1), candidates)


def _ranked(confidence: mx.array, candidates: Candidates) -> mx.array:
    """With alg_temp, draws without replacement from softmax(confidence / alg_temp), by the Gumbel-max trick."""
    temperature = candidates.values["alg_temp"]
    noise = mx.clip(candidates.noise, 1e-20, 1 - 2**-24)
    drawn = confidence / mx.maximum(temperature, 1e-6) - mx.log(-mx.log(noise))
    return mx.where(temperature > 0, drawn, confidence)


def uniform(candidates: Candidates) -> mx.array:
    """1 less a uniform number: [B, W]."""
    return 1 - candidates.noise


def with_probability(confidence: mx.array, share: mx.array, values: Mapping[str, mx.array]) -> mx.array:
    """How many uniform numbers lie below the share: [B, 1], perhaps none."""
    return (confidence > 1 - share).sum(axis=1, keepdims=True)


def _with_alg_temp(values: Mapping[str, Any]) -> bool:
    return values["alg_temp"] > 0


_USES = frozenset({"max_denoising_steps", "eps", "block_length"})
_DEFAULTS = {"eps": 1e-3, "alg_temp": 0.0}

ORIGIN = Rule(
    name="origin",
    about="Dream: each masked position with the probability 1-s/t of the step, whatever the model says",
    schedule=origin_schedule,
    confidence=uniform,
    select=with_probability,
    uses=_USES,
    defaults=_DEFAULTS,
    draws=lambda values: True,
    filters=FILTERS,
)


def _dream(name: str, about: str, confidence: Any) -> Rule:
    return Rule(
        name=name,
        about=about,
        schedule=dream_schedule,
        confidence=confidence,
        uses=_USES | {"alg_temp"},
        defaults=_DEFAULTS,
        draws=_with_alg_temp,
        filters=FILTERS,
    )


MASKGIT_PLUS = _dream("maskgit_plus", "Dream: the positions whose token is the most probable", probability)
TOPK_MARGIN = _dream(
    "topk_margin", "Dream: the positions whose best token leads the second best by most probability", margin
)
ENTROPY = _dream("entropy", "Dream: the positions with the least entropy", negative_entropy)
