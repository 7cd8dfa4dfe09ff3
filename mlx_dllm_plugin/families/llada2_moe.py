"""LLaDA2.0, 2.1 and 2.2: one architecture with three samplers. 2.2 says ``expert_capacity``; the configurations of 2.0
and 2.1 are the same, so that the name tells."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..spec import UNMASKING
from . import Family, a2d, common, llada

BLOCK = 32
VOCABULARY, EDITS = 157184, (156930, 156931)  # of LLaDA2.2; DELETE and INSERT
THETA = "rope_theta"
# Keys that the model takes a default for: null counts as absent.
_OPTIONAL = (
    *("num_key_value_heads", "head_dim", "rotary_dim", "partial_rotary_factor", "rms_norm_eps", THETA),
    *("first_k_dense_replace", "num_shared_experts", "n_group", "topk_group", "expert_capacity", "block_size"),
    *("routed_scaling_factor", "tie_word_embeddings"),
)

Values = dict[str, tuple[Any, str]]


def version(checkpoint: Checkpoint) -> tuple[str, str | None]:
    """2.0, 2.1 or 2.2, and what says so; None: nothing does."""
    if checkpoint.config.get("expert_capacity"):
        return "2.2", "config.json (expert_capacity)"
    kept = checkpoint.config.get(UNMASKING)
    if kept in (_RULES["2.0"], _RULES["2.1"]):
        return "2.1" if kept == _RULES["2.1"] else "2.0", f"config.json ({UNMASKING})"
    found = common.named(checkpoint, r"llada[-_]?2[._]([01])(?!\d)")
    return (f"2.{found[0][1]}", found[1]) if found else ("2.0", None)


def defaults(checkpoint: Checkpoint) -> Values:
    number, _ = version(checkpoint)
    source = f"LLaDA{number}'s generate()"
    own: dict[str, Any] = {
        "2.0": {"threshold": 0.95, "max_denoising_steps": 32},
        "2.1": {"threshold": 0.95, "editing_threshold": 0.9, "max_post_steps": 16, "num_to_transfer": 1},
        "2.2": {"threshold": 0.5, "editing_threshold": 0.0, "max_post_steps": 16, "max_denoising_steps": 32},
    }[number]
    return {
        "max_tokens": (2048, source),
        "block_length": common.block_length(checkpoint, "block_size", "block_length") or (BLOCK, source),
        **{name: (value, source) for name, value in own.items()},
    }


_PROFILES: dict[str, dict[str, dict[str, Any]]] = {
    "2.0": {"balanced": {"threshold": 0.9}, "fast": {"threshold": 0.8}},
    # Quality and Speed of its model card.
    "2.1": {
        "balanced": {"unmasking": "joint_threshold", "threshold": 0.7, "editing_threshold": 0.5},
        "fast": {"unmasking": "joint_threshold", "threshold": 0.5, "editing_threshold": 0.0},
    },
    # Its makers name one setting only.
    "2.2": {"balanced": {}, "fast": {}},
}
_RULES = {"2.0": "low_confidence_dynamic", "2.1": "joint_threshold", "2.2": "joint_threshold_indel"}


def shape(checkpoint: Checkpoint) -> Values:
    """
    The version's rule and profiles; of 2.2 also its routing blocks and edit tokens.

    Raises:
        CheckpointError: numbers that do not make a router, or edit tokens of which one is missing.
    """
    config = checkpoint.config
    number, source = version(checkpoint)
    source = f"{source}: LLaDA{number}" if source else f"LLaDA{number}, assumed"
    _check_router(checkpoint)
    own: Values = {
        "unmasking": (_RULES[number], source),
        "profiles": (_PROFILES[number], source),
    }
    if config.get("expert_capacity"):
        own["routing_block"] = (config.get("block_size") or BLOCK, "config.json (expert_capacity, block_size)")
    ids = tuple(config.get(key) for key in ("delete_token_id", "split_token_id"))
    if number != "2.2" and ids != (None, None):
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'} names the edit tokens of LLaDA2.2 (delete_token_id, split_token_id) "
            "and no expert_capacity, without which its experts would be chosen wrong: copy config.json from the "
            "original."
        )
    if number == "2.2" and ids == (None, None) and config.get("vocab_size") == VOCABULARY:
        own["edit_token_ids"] = (EDITS, "LLaDA2.2's vocabulary")
    elif any(token is not None for token in ids):
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids) or ids[0] == ids[1]:
            raise CheckpointError(
                f"{checkpoint.path / 'config.json'}: delete_token_id and split_token_id must be two token ids, got "
                f"{ids[0]!r} and {ids[1]!r}."
            )
        own["edit_token_ids"] = (ids, "config.json (delete_token_id, split_token_id)")
    return own


def _check_router(checkpoint: Checkpoint) -> None:
    config, where = checkpoint.config, checkpoint.path / "config.json"

    def count(key: str, default: int, least: int = 1) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(f"{where}: {key} must be an integer of {least} or more, got {value!r}.")
        return value

    experts, top_k = count("num_experts", 0), count("num_experts_per_tok", 0)
    count("first_k_dense_replace", 1, 0), count("num_shared_experts", 1, 0), count("block_size", BLOCK)
    capacity = count("expert_capacity", 0, 0)
    scale = config.get("routed_scaling_factor")
    if scale is not None and (not isinstance(scale, (int, float)) or isinstance(scale, bool) or not scale > 0):
        raise CheckpointError(f"{where}: routed_scaling_factor must be a number above 0, got {scale!r}.")
    if capacity:
        if not top_k <= capacity <= experts:
            raise CheckpointError(
                f"{where}: expert_capacity must be from num_experts_per_tok {top_k} to num_experts {experts}, got "
                f"{capacity}."
            )
        return
    groups, kept = count("n_group", 8), count("topk_group", 4)
    if experts % groups or experts // groups < 2:
        raise CheckpointError(f"{where}: {experts} experts cannot be {groups} groups (n_group) of two or more.")
    if kept > groups:
        raise CheckpointError(f"{where}: topk_group {kept} is more than the {groups} groups there are.")
    if top_k > kept * (experts // groups):
        raise CheckpointError(
            f"{where}: num_experts_per_tok {top_k} is more than the {kept * (experts // groups)} experts of topk_group "
            f"{kept}."
        )


def hint(checkpoint: Checkpoint) -> str | None:
    if version(checkpoint)[1] is not None:
        return None
    return (
        f"{checkpoint.path.name}: LLaDA2.0 is assumed, because 2.0 and 2.1 have the same config.json and no name tells "
        "which it is; --unmasking joint_threshold is 2.1's sampler."
    )


def repair(model: Any, config: dict[str, Any]) -> None:
    """Nothing is changed. Raises CheckpointError for biases that are no numbers: they only rank experts, so that no
    logit would tell."""
    parameters: Any = tree_flatten(model.parameters())
    for name, value in parameters:
        if name.endswith(".expert_bias") and not np.isfinite(np.array(value.astype(mx.float32))).all():
            raise CheckpointError(f"The weights have numbers in {name} that are not finite: they are damaged.")


def prepare_config(config: dict[str, Any]) -> None:
    for key in _OPTIONAL:
        if config.get(key, 0) is None:
            del config[key]
    common.plain_quantization(config)
    for key in ("quantization", "quantization_config"):
        if isinstance(config.get(key), dict):  # the router is always computed in float32
            config[key] = {
                name: value
                for name, value in config[key].items()
                if not name.endswith((".mlp.gate", ".mlp.gate.gate_proj"))
            }
    rope = config.get("rope_parameters")
    inside = rope.get(THETA) if isinstance(rope, dict) else None
    if inside is not None and config.get(THETA, inside) != inside:
        raise CheckpointError(
            f"config.json says rope_theta {config[THETA]!r}, and {inside!r} inside rope_parameters: keep the right one."
        )
    a2d.lift_rope(config)
    if isinstance(rope, dict) and rope.get("partial_rotary_factor") is not None:
        config.setdefault("partial_rotary_factor", rope["partial_rotary_factor"])
    llada.default_rope(config, config.get("rope_scaling"))
    if config.get("expert_capacity") and THETA not in config:
        raise CheckpointError("config.json of a LLaDA2.2 must say rope_theta, beside or inside rope_parameters.")
    _check_rotary(config)
    llada.only(config, "hidden_act", "silu")
    llada.only(config, "score_function", "sigmoid")
    llada.only(config, "router_dtype", "fp32", "float32")
    for key in ("use_qk_norm", "use_rmsnorm", "moe_router_enable_expert_bias", "norm_topk_prob"):
        llada.only(config, key, True)
    for key in (
        *("use_bias", "use_qkv_bias", "norm_head", "norm_softmax", "use_sliding_window"),
        "using_split_qkv_in_self_attention",
    ):
        llada.only(config, key, False)


def _check_rotary(config: dict[str, Any]) -> None:
    """``rotary_dim`` and ``partial_rotary_factor`` say the same."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary, factor = config.get("rotary_dim"), config.get("partial_rotary_factor")
    if rotary is None:
        rotary = int(width * (0.5 if factor is None else factor))
    elif not isinstance(rotary, int) or (factor is not None and rotary != int(width * factor)):
        raise CheckpointError(
            f"config.json: rotary_dim {rotary!r} is not partial_rotary_factor {factor!r} of head_dim {width}."
        )
    if rotary < 2 or rotary % 2 or rotary > width:
        raise CheckpointError(f"config.json: {rotary} of {width} dimensions of a head (rotary_dim) cannot be turned.")


FAMILY = Family(
    name="llada2_moe",
    model_types=("llada2_moe",),
    claims=lambda checkpoint: checkpoint.config.get("model_type") == "llada2_moe",
    hidden=llada.hidden,
    head=llada.head,
    defaults=defaults,
    attention="block_causal",
    canvas="growing",
    unmasking="low_confidence_dynamic",
    block_origin="start",
    shape=shape,
    hint=hint,
    architecture=lambda config: "mlx_dllm_plugin.models.llada2_moe",
    stop_tokens=("<|role_end|>",),
    float32_on_cpu=True,
    mask_token="<|mask|>",
    mask_token_id=156895,
    prepare_config=prepare_config,
    repair=repair,
    sanitize=common.plain_experts,
    about="inclusionAI/LLaDA2.0-{mini,flash}, inclusionAI/LLaDA2.1-{mini,flash}, inclusionAI/LLaDA2.2-{mini,flash}",
    verified=(
        "tiny checkpoints in its layout, 2.0 and 2.1 against their PyTorch code, 2.2 against an independent one: "
        "logits, ids, every step"
    ),
)
