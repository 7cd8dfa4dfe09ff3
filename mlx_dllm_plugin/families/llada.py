"""LLaDA-8B and LLaDA-1.5: bidirectional from the ground up, so that every position predicts its own token. The
architecture is ``models/llada.py``; a checkpoint's remote code is never run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..checkpoint import Checkpoint
from . import Family, a2d, common


def claims(checkpoint: Checkpoint) -> bool:
    """LLaDA-MoE says ``llada`` too, so the class decides."""
    config = checkpoint.config
    return config.get("model_type") == "llada" and common.declares(config, r"(^|\.)LLaDAModelLM$") is not None


def chat_defaults(source: str) -> Callable[[Checkpoint], dict[str, tuple[Any, str]]]:
    """The lengths of LLaDA's published examples, with their source."""
    return lambda _: {"max_tokens": (128, source), "block_length": (32, source)}


def only(config: dict[str, Any], key: str, *accepted: Any) -> None:
    """:func:`a2d.only`, for the architectures here."""
    a2d.only(config, key, *accepted, why=f"only {key} = {{!r}} is implemented")


def default_rope(config: dict[str, Any], rope: dict[str, Any] | None) -> None:
    """Raises DiffusionError for a rope that is scaled."""
    only({**config, **(rope or {})}, "rope_type", "default")
    only({**config, **(rope or {})}, "type", "default")


def rename_quantization(config: dict[str, Any]) -> None:
    """Layers with a quantization of their own, under the names that the weights get."""
    from ..models.llada import rename

    common.rename_quantization(config, rename)


def prepare_config(config: dict[str, Any]) -> None:
    """Refuse what LLaDA's configuration, inherited from OLMo, could also describe."""
    only(config, "block_type", "llama")
    only(config, "block_group_size", 1)
    only(config, "activation_type", "silu")
    only(config, "layer_norm_type", "rms")
    only(config, "layer_norm_with_affine", True)
    only(config, "rope", True)
    for key in (
        "alibi",
        "attention_layer_norm",
        "bias_for_layer_norm",
        "include_bias",
        "include_qkv_bias",
        "input_emb_norm",
        "scale_logits",
        "clip_qkv",
    ):
        only(config, key, False)
    rename_quantization(config)


def architecture(config: dict[str, Any]) -> str:
    return "mlx_dllm_plugin.models.llada"


def hidden(model: Any, ids: mx.array, cache: list[Any]) -> mx.array:
    return model.model(ids, cache)


def head(model: Any, states: mx.array) -> mx.array:
    return model.head(states)


FAMILY = Family(
    name="llada",
    model_types=("llada",),
    claims=claims,
    hidden=hidden,
    head=head,
    defaults=chat_defaults("LLaDA's chat.py"),
    unmasking="low_confidence",
    architecture=architecture,
    stop_tokens=("<|eot_id|>",),
    mask_token="<|mdm_mask|>",
    mask_token_id=126336,
    prepare_config=prepare_config,
    sanitize=common.plain,
    about="GSAI-ML/LLaDA-8B-Base, GSAI-ML/LLaDA-8B-Instruct, GSAI-ML/LLaDA-1.5",
    verified="tiny checkpoints in LLaDA-8B's layout, with and without grouped keys, against its PyTorch code",
)
