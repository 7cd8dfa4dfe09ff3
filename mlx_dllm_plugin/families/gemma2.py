"""a2d conversions of Gemma 2. Its attention scores have five dimensions when heads share keys: a key mask of rank 4
would broadcast over the wrong one whenever the batch equals the number of key-value heads."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..errors import DiffusionError
from . import a2d
from .gemma import TANH, sanitize


def prepare_config(config: dict[str, Any]) -> None:
    a2d.lift_rope(config)
    a2d.unscaled_rope(config)
    a2d.only(config, "hidden_activation", *TANH)
    a2d.only(config, "tie_word_embeddings", True)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config and config[key] is None:
            raise DiffusionError(f"gemma2 with {key} = null cannot be decoded: mlx-lm's model always caps its logits.")


def score_rank(model: Any) -> int:
    return 5 if model.args.num_attention_heads > model.args.num_key_value_heads else 4


def head(model: Any, states: mx.array) -> mx.array:
    cap = model.final_logit_softcapping
    return mx.tanh(a2d.tied_head(model, states) / cap) * cap


FAMILY = a2d.family(
    "gemma2",
    prepare_config=prepare_config,
    sanitize=sanitize,
    score_rank=score_rank,
    hidden=a2d.decoder,
    head=head,
    verified=a2d.PARITY,
)
