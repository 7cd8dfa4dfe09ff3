"""What a reference computed for one canvas, in numbers that need neither torch nor MLX."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Stage:
    """
    What one part of the reference made of what the part before it had made.

    Args:
        states: [T, D] float32, what comes out of it; of the head the logits [T, V], not shifted.
        rounding: the yardstick: max and mean difference of ``states`` to the same part, with the same input, computed
            in float64 (or on another device); None: not measured.
        experts: [T, K] ids of the experts that each token was given to, in any order; None: it has none.
    """

    states: np.ndarray
    rounding: tuple[float, float] | None = None
    experts: np.ndarray | None = None


@dataclass(frozen=True)
class Trace:
    """
    Args:
        reference: what computed it, such as ``Qwen2ForCausalLM of transformers 5.24.0, without its causal mask``.
        embedding: what goes into the first layer.
        layers: what comes out of each layer.
        norm: what goes into the head.
        head: the logits.
    """

    reference: str
    embedding: Stage
    layers: tuple[Stage, ...]
    norm: Stage
    head: Stage
