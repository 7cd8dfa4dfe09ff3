"""iLLaDA-8B: LLaDA's successor with Llama's names, tied embeddings, and a mask token that only its vocabulary names."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..checkpoint import Checkpoint
from . import a2d, llada


def claims(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == "illada"


def prepare_config(config: dict[str, Any]) -> None:
    a2d.lift_rope(config)
    llada.default_rope(config, config.get("rope_scaling"))
    llada.only(config, "hidden_act", "silu")
    llada.only(config, "attention_bias", False)
    llada.only(config, "mlp_bias", False)
    llada.only(config, "layer_norm_eps", None)  # with it, the norms are layer norms
    llada.rename_quantization(config)


FAMILY = dataclasses.replace(
    llada.FAMILY,
    name="illada",
    model_types=("illada",),
    claims=claims,
    mask_token="<[MASK]>",
    mask_token_id=5,
    prepare_config=prepare_config,
    about="GSAI-ML/iLLaDA-8B-Base, GSAI-ML/iLLaDA-8B-Instruct",
    verified="a tiny random model against transformers' Llama without its causal mask, which iLLaDA's PyTorch code is",
)
