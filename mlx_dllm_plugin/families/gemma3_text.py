"""a2d conversions of Gemma 3 (text). mlx-lm rounds the embedding scale to bfloat16 whatever the weights' type, and
indexes its caches by the sliding-window pattern even when there are fewer layers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..errors import DiffusionError
from . import a2d
from .gemma import TANH


def prepare_config(config: dict[str, Any]) -> None:
    """Bring transformers 5's spellings (``rope_parameters`` and ``layer_types``) to mlx-lm's."""
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        full, sliding = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
        for key, part in (("rope_theta", full), ("rope_local_base_freq", sliding)):
            if "rope_theta" in part:
                config.setdefault(key, part["rope_theta"])
        if full.get("rope_type", "default") != "default":
            config["rope_scaling"] = config.get("rope_scaling") or full
        if sliding.get("rope_type", "default") != "default":
            raise DiffusionError(
                "gemma3_text with scaled rope_parameters for sliding_attention cannot be decoded: mlx-lm's model only "
                "scales those for full_attention."
            )
    types = config.get("layer_types")
    if types:  # to transformers they win over a pattern beside them
        pattern = types.index("full_attention") + 1 if "full_attention" in types else len(types) + 1
        expected = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(len(types))]
        if types != expected:
            raise DiffusionError(
                "gemma3_text with irregular layer_types cannot be decoded: mlx-lm has a fixed pattern."
            )
        config["sliding_window_pattern"] = pattern
    a2d.only(config, "hidden_activation", *TANH)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key) is not None:
            raise DiffusionError(f"gemma3_text with {key} = {config[key]} cannot be decoded: mlx-lm's model has none.")


def repair(model: Any, config: dict[str, Any]) -> None:
    """Make this instance's embedding scale what transformers computes: sqrt(hidden) rounded to the weights' type. Not
    in the embedding's class: nn.quantize replaces that."""
    exact = mx.array(model.args.hidden_size**0.5, mx.float32)
    used = exact.astype(mx.bfloat16)
    if exact.item() == used.item():
        return

    class ExactScale(type(model.model)):  # type: ignore[misc]
        def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
            if input_embeddings is None:
                states = self.embed_tokens(inputs)
                input_embeddings = states * (exact.astype(states.dtype) / used.astype(states.dtype))
            return super().__call__(inputs, cache, input_embeddings)

    model.model.__class__ = ExactScale


def hidden(model: Any, ids: mx.array, cache: list[Any]) -> mx.array:
    # The caches are indexed at pattern - 1, also when that many layers do not exist.
    return model.model(ids, [*cache, *cache[:1] * (model.args.sliding_window_pattern - len(cache))])


def head(model: Any, states: mx.array) -> mx.array:
    return a2d.tied_head(model, states) if model.tie_word_embeddings else model.lm_head(states)


FAMILY = a2d.family("gemma3_text", prepare_config=prepare_config, repair=repair, hidden=hidden, head=head)
