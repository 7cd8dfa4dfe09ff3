"""a2d conversions of GPT-2. Tied head; Hugging Face names carry a ``transformer.`` prefix that mlx-lm does not know."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..errors import DiffusionError
from . import Weights, a2d


def prepare_config(config: dict[str, Any]) -> None:
    """``n_ctx`` is required by mlx-lm and no longer written by transformers: it is ``n_positions``."""
    config.setdefault("n_ctx", config.get("n_positions"))
    a2d.only(config, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    a2d.only(config, "scale_attn_weights", True)
    a2d.only(config, "scale_attn_by_inverse_layer_idx", False)
    a2d.only(config, "tie_word_embeddings", True)
    inner, expected = config.get("n_inner"), 4 * config.get("n_embd", 0)
    if inner not in (None, expected):
        raise DiffusionError(f"gpt2 with n_inner = {inner} cannot be decoded: mlx-lm's model only has {expected}.")


def sanitize(weights: Weights) -> Weights:
    """Strip the prefix, drop the stored causal masks and the copy of the tied head."""
    plain = {name.removeprefix("transformer."): value for name, value in weights.items()}
    plain = {name: value for name, value in plain.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    if len(plain) < sum(not name.endswith((".attn.bias", ".attn.masked_bias")) for name in weights):
        raise DiffusionError("gpt2 has weights twice, with and without the prefix 'transformer.': keep one of them.")
    return a2d.drop_tied_head(plain, "wte.weight")


def head(model: Any, states: mx.array) -> mx.array:
    return model.model.wte.as_linear(states)


FAMILY = a2d.family("gpt2", prepare_config=prepare_config, sanitize=sanitize, hidden=a2d.decoder, head=head)
