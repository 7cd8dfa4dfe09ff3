"""SDAR, and TraDo which was trained from it: Qwen3 with block-causal attention, blocks counted from position 0."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from . import Family, a2d, common

SOURCE = "SDAR's generate.py"


def block_length(checkpoint: Checkpoint) -> tuple[int, str]:
    """Released configurations do not have it: a suffix of the name tells, as in SDAR-1.7B-Chat-b16, and 4 has none."""
    declared = common.block_length(checkpoint, "block_size", "block_length")
    if declared is not None:
        return declared
    suffix = common.named(checkpoint, r"-b([1-9]\d*)(?![a-z0-9])")
    return (int(suffix[0][1]), suffix[1]) if suffix else (4, SOURCE)


def defaults(checkpoint: Checkpoint) -> dict[str, tuple[Any, str]]:
    length, source = block_length(checkpoint)
    return {
        "max_tokens": (2048, SOURCE),
        "block_length": (length, source),
        "threshold": (0.85, SOURCE),
    }


def hint(checkpoint: Checkpoint) -> str | None:
    """A renamed copy no longer tells its block length."""
    length, source = block_length(checkpoint)
    if source != SOURCE or common.named(checkpoint, "sdar|trado") is not None:
        return None
    return (
        f"{checkpoint.path.name}: block length {length} is assumed, because neither config.json nor the directory's "
        "name (SDAR-…-bN) tells it; --block-length decides."
    )


def family(model_type: str, **own: Any) -> Family:
    """A family of one of SDAR's two model types."""
    return Family(
        name=model_type,
        model_types=(model_type,),
        claims=lambda checkpoint: checkpoint.config.get("model_type") == model_type,
        defaults=defaults,
        attention="block_causal",
        canvas="growing",
        unmasking="low_confidence_dynamic",
        block_origin="start",
        hint=hint,
        mask_token="<|MASK|>",
        mask_token_id=151669,
        stop_tokens=("<|im_end|>",),
        profiles={"balanced": {"threshold": 0.8}, "fast": {"threshold": 0.7}},
        hidden=a2d.decoder,
        head=a2d.either_head,
        **own,
    )


FAMILY = family(
    "sdar",
    architecture=lambda config: "mlx_lm.models.qwen3",
    prepare_config=common.prepare_qwen3,
    sanitize=common.plain,
    about="JetLM/SDAR-{1.7B,4B,8B}-Chat, with or without -b8, -b16, -b32, -b64; Gen-Verse/TraDo-8B-Instruct",
    verified="a tiny checkpoint in its layout against its authors' generate.py: logits, ids, every step",
)
