"""LLaDA-MoE: LLaDA with experts. Its checkpoints say ``llada`` like the dense ones, so the architecture decides."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from ..errors import DiffusionError
from . import Family, a2d, common, llada


def claims(checkpoint: Checkpoint) -> bool:
    config, kind = checkpoint.config, checkpoint.config.get("model_type")
    has_experts = common.declares(config, r"(^|\.)LLaDAMoEModelLM$") is not None
    return kind == "lladamoe" or (kind == "llada" and has_experts)


def prepare_config(config: dict[str, Any]) -> None:
    """``norm_topk_prob`` is not looked at: the model's own code sets it to false whatever config.json says."""
    a2d.lift_rope(config)
    llada.default_rope(config, config.get("rope_scaling"))
    llada.only(config, "hidden_act", "silu")
    llada.only(config, "moe_router_score_function", "softmax")
    llada.only(config, "routed_scaling_factor", 1)
    for key in ("router_num_group", "router_topk_group"):
        llada.only(config, key, None, 1)
    for key in ("attention_bias", "clip_qkv", "moe_router_enable_expert_bias", "shared_expert_intermediate_size"):
        llada.only(config, key, False)
    kinds, layers = config.get("moe_layer_freq"), config.get("num_hidden_layers")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == layers):
        raise DiffusionError(
            f"{config.get('model_type')} with moe_layer_freq = {kinds!r} cannot be decoded: it must list a 0 (dense) "
            f"or 1 (experts) for each of the {layers} layers."
        )
    common.plain_quantization(config)


def architecture(config: dict[str, Any]) -> str:
    return "mlx_dllm_plugin.models.llada_moe"


FAMILY = Family(
    name="llada_moe",
    model_types=("llada", "lladamoe"),
    claims=claims,
    hidden=llada.hidden,
    head=llada.head,
    defaults=llada.chat_defaults("LLaDA-MoE's model card"),
    unmasking="low_confidence",
    architecture=architecture,
    stop_tokens=("<|role_end|>",),
    float32_on_cpu=True,
    mask_token="<|mask|>",
    mask_token_id=156895,
    prepare_config=prepare_config,
    sanitize=common.plain,
    about=(
        "inclusionAI/LLaDA-MoE-7B-A1B-Base, inclusionAI/LLaDA-MoE-7B-A1B-Instruct, "
        "inclusionAI/LLaDA-MoE-7B-A1B-Instruct-TD"
    ),
    verified="a tiny checkpoint in LLaDA-MoE's layout against its PyTorch code",
)
