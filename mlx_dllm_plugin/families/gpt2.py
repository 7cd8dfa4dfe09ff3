"""a2d conversions of GPT-2. Tied head; Hugging Face names carry a ``transformer.`` prefix that mlx-lm does not know."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..errors import DiffusionError
from . import Weights
from .a2d import family

# What mlx-lm's GPT-2 computes, whatever config.json says: (key, accepted values).
_FIXED = (
    ("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
    ("scale_attn_weights", (True,)),
    ("scale_attn_by_inverse_layer_idx", (False,)),
    ("tie_word_embeddings", (True,)),
)


def prepare_config(config: dict[str, Any]) -> None:
    """``n_ctx`` is required by mlx-lm and no longer written by transformers: it is ``n_positions``."""
    config.setdefault("n_ctx", config.get("n_positions"))
    for key, accepted in _FIXED:
        if config.get(key, accepted[0]) not in accepted:
            raise DiffusionError(
                f"GPT-2 with {key} = {config[key]!r} cannot be decoded: mlx-lm's model only computes {accepted[0]!r}."
            )
    inner = config.get("n_inner")
    if inner is not None and inner != 4 * config.get("n_embd", 0):
        raise DiffusionError(
            f"GPT-2 with n_inner = {inner} cannot be decoded: mlx-lm's model only has 4 * n_embd = "
            f"{4 * config.get('n_embd', 0)}."
        )


def sanitize(weights: Weights) -> Weights:
    """Strip the prefix, drop the stored causal masks and the copy of the tied head."""
    plain = {name.removeprefix("transformer."): value for name, value in weights.items()}
    head = plain.pop("lm_head.weight", None)
    if head is not None and "wte.weight" in plain and not mx.array_equal(head, plain["wte.weight"]).item():
        raise DiffusionError(
            "GPT-2 with a head of its own cannot be decoded: lm_head.weight differs from wte.weight, "
            "and mlx-lm's model only has a tied head."
        )
    return {name: value for name, value in plain.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}


def hidden(model: Any, ids: mx.array, cache: list[Any]) -> mx.array:
    return model.model(ids, cache)


def head(model: Any, states: mx.array) -> mx.array:
    return model.model.wte.as_linear(states)


FAMILY = family("gpt2", prepare_config=prepare_config, sanitize=sanitize, hidden=hidden, head=head)
