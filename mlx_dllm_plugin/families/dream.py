"""Dream and what was trained from it: Qwen2.5 with bidirectional attention and the shifted logits it came with."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from . import Family, a2d, common


def claims(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == "Dream"


def defaults(checkpoint: Checkpoint) -> dict[str, tuple[Any, str]]:
    """Steps are left to the number of masks, as in the READMEs. generation_config.json holds a sampler's settings that
    its authors never use (random order, 512 steps)."""
    return {"max_tokens": (256, "DiffuCoder's README")}


FAMILY = Family(
    name="dream",
    model_types=("Dream",),
    claims=claims,
    defaults=defaults,
    logits="shifted",
    unmasking="entropy",
    architecture=lambda config: "mlx_lm.models.qwen2",
    mask_token="<|mask|>",
    mask_token_id=151666,
    stop_tokens=("<|im_end|>", "<|dlm_pad|>"),
    prepare_config=common.prepare_qwen2,
    sanitize=common.plain,
    hidden=a2d.decoder,
    head=a2d.either_head,
    about="Dream-org/Dream-v0-{Base,Instruct}-7B, Dream-org/Dream-Coder-v0-*-7B, apple/DiffuCoder-7B-*",
    verified="a tiny checkpoint in its layout against its PyTorch code: logits, ids, every step",
)
