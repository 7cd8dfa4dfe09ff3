"""ModernBERT conversions of dllm, which decode with the masked-language-model head. A fill-mask ModernBERT declares the
same and is claimed too: mlx-lm has nothing else for it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..checkpoint import Checkpoint
from ..errors import DiffusionError
from . import Family, common, llada

MASK_TOKEN = "[MASK]"


def claims(checkpoint: Checkpoint) -> bool:
    """A masked-language model whose mask token is declared; classifiers and embedders have another architecture."""
    config = checkpoint.config
    if config.get("model_type") != "modernbert" or not common.declares(config, r"(^|\.)ModernBertForMaskedLM$"):
        return False
    declared = (config.get("mask_token_id"), checkpoint.tokenizer_config.get("mask_token"))
    return any(value is not None for value in declared) or MASK_TOKEN in checkpoint.added_tokens


def prepare_config(config: dict[str, Any]) -> None:
    from ..models.modernbert import GLOBAL, LOCAL

    llada.only(config, "hidden_activation", "gelu")
    llada.only(config, "classifier_activation", "gelu")
    rope = config.get("rope_parameters") or {}
    for scaling in (config.get("rope_scaling"), rope.get(GLOBAL), rope.get(LOCAL)):
        llada.default_rope(config, scaling)
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == layers and all(kind in (GLOBAL, LOCAL) for kind in kinds)
    ):
        raise DiffusionError(
            f"modernbert with layer_types = {kinds!r} cannot be decoded: it must list {GLOBAL!r} or {LOCAL!r} for each "
            f"of the {layers} layers."
        )
    common.plain_quantization(config)


def architecture(config: dict[str, Any]) -> str:
    return "mlx_dllm_plugin.models.modernbert"


def head(model: Any, states: mx.array) -> mx.array:
    return model.logits(states)


FAMILY = Family(
    name="modernbert",
    local_attention=True,
    model_types=("modernbert",),
    claims=claims,
    hidden=llada.hidden,
    head=head,
    defaults=llada.chat_defaults("dllm's chat defaults"),
    unmasking="mdlm",
    architecture=architecture,
    # dllm fills answers up with padding, which is its end of sequence; config.json declares [SEP].
    stop_tokens=("[PAD]",),
    mask_token=MASK_TOKEN,
    mask_token_id=50284,
    prepare_config=prepare_config,
    sanitize=common.plain,
    about="dllm-hub/ModernBERT-base-chat-v0.1, dllm-hub/ModernBERT-large-chat-v0.1",
    verified="a tiny checkpoint and random models against transformers' ModernBertForMaskedLM",
)
