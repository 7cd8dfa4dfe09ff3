"""a2d conversions of Gemma (v1). mlx-lm computes the exact gelu, whatever the configuration says."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import Weights, a2d

TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def prepare_config(config: dict[str, Any]) -> None:
    a2d.lift_rope(config)
    a2d.unscaled_rope(config)
    a2d.only(config, "hidden_activation", *TANH, "gelu")
    if config.get("hidden_activation") is None:  # transformers 5 only reads hidden_act, and takes gelu as the tanh gelu
        a2d.only(config, "hidden_act", *TANH, "gelu")
    a2d.only(config, "tie_word_embeddings", True)


def sanitize(weights: Weights) -> Weights:
    return a2d.drop_tied_head(weights, "model.embed_tokens.weight")


def repair(model: Any, config: dict[str, Any]) -> None:
    """Give this instance the tanh gelu. transformers reads ``hidden_activation``, takes the tanh gelu when it is
    absent, and ignores an older ``hidden_act`` beside it."""
    if config.get("hidden_activation") == "gelu":
        return

    class TanhMLP(type(model.layers[0].mlp)):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))

    for layer in model.layers:
        layer.mlp.__class__ = TanhMLP


FAMILY = a2d.family(
    "gemma",
    prepare_config=prepare_config,
    sanitize=sanitize,
    repair=repair,
    hidden=a2d.decoder,
    head=a2d.tied_head,
)
