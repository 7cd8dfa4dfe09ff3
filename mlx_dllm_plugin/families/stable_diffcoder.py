"""Stable-DiffCoder, which says it is a Llama: block-causal attention in blocks of 4, counted from position 0."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from . import Family, a2d, common

README = "Stable-DiffCoder's README"
PATTERNS = ("SeedDiffcoder",)  # of the class that auto_map names


def claims(checkpoint: Checkpoint) -> bool:
    config = checkpoint.config
    return config.get("model_type") == "llama" and common.declares(config, *PATTERNS) is not None


def defaults(checkpoint: Checkpoint) -> dict[str, tuple[Any, str]]:
    """A threshold of 1 is none, as no confidence exceeds it: one token a step."""
    return {
        "max_tokens": (512, README),
        "block_length": common.block_length(checkpoint, "block_size", "block_length") or (4, README),
        "threshold": (1.0, f"{README} (threshold=None)"),
    }


FAMILY = Family(
    name="stable_diffcoder",
    model_types=("llama",),
    claims=claims,
    defaults=defaults,
    attention="block_causal",
    canvas="growing",
    unmasking="low_confidence_dynamic",
    block_origin="start",
    architecture=lambda config: "mlx_lm.models.llama",
    mask_token="<[MASK_TOKEN]>",
    mask_token_id=5,
    prepare_config=common.prepare_llama,
    sanitize=common.plain,
    hidden=a2d.decoder,
    head=a2d.either_head,
    about="ByteDance-Seed/Stable-DiffCoder-8B-{Base,Instruct}",
    verified="transformers' model of its shape; its decoding only against SDAR's rules",
)
