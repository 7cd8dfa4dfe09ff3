"""Fast-dLLM v2: Qwen2.5 with shifted logits and block-causal attention. The first token of each block comes from the
last logits of the one before, the others sub-block by sub-block."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from . import Family, a2d, common

README = "Fast-dLLM v2's README"


def claims(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == "Fast_dLLM_Qwen"


def defaults(checkpoint: Checkpoint) -> dict[str, tuple[Any, str]]:
    """The threshold is the README's; the code's default of 1 is one token a step."""
    length, source = common.block_length(checkpoint, "bd_size") or (32, "the family fast_dllm_v2")
    return {
        "max_tokens": (512, README),
        "block_length": (length, source),
        "sub_block_length": (8, README) if length % 8 == 0 else (length, "8 does not divide the block"),
        "threshold": (0.9, README),
    }


FAMILY = Family(
    name="fast_dllm_v2",
    model_types=("Fast_dLLM_Qwen",),
    claims=claims,
    defaults=defaults,
    logits="shifted",
    attention="block_causal",
    canvas="growing",
    unmasking="threshold",
    block_origin="start",
    architecture=lambda config: "mlx_lm.models.qwen2",
    mask_token="|<MASK>|",
    mask_token_id=151665,
    stop_tokens=("<|im_end|>",),
    profiles={"balanced": {"cache": "dual"}, "fast": {"cache": "dual", "threshold": 0.8}},
    prepare_config=common.prepare_qwen2,
    sanitize=common.plain,
    hidden=a2d.decoder,
    head=a2d.either_head,
    about="Efficient-Large-Model/Fast_dLLM_v2_{1.5B,7B}",
    verified="a tiny checkpoint in its layout against its authors' code: logits, ids, every step",
)
