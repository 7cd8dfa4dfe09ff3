"""a2d conversions of Qwen2 and Qwen2.5. Sliding windows are never used: a2d decodes with all of them open."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..errors import DiffusionError
from .a2d import family


def prepare_config(config: dict[str, Any]) -> None:
    """transformers 5 writes ``rope_theta`` inside ``rope_parameters``; mlx-lm only reads it beside. An absent
    ``tie_word_embeddings`` means false to transformers and true to mlx-lm."""
    config.setdefault("tie_word_embeddings", False)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        if "rope_theta" in rope:
            config.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = config.get("rope_scaling") or rope
    if config.get("hidden_act", "silu") != "silu":
        raise DiffusionError(
            f"Qwen2 with hidden_act = {config['hidden_act']!r} cannot be decoded: mlx-lm's model only computes 'silu'."
        )


def hidden(model: Any, ids: mx.array, cache: list[Any]) -> mx.array:
    return model.model(ids, cache)


def head(model: Any, states: mx.array) -> mx.array:
    if model.args.tie_word_embeddings:
        return model.model.embed_tokens.as_linear(states)
    return model.lm_head(states)


FAMILY = family("qwen2", prepare_config=prepare_config, hidden=hidden, head=head)
