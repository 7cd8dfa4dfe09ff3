"""Open-dCoder, which says it is a Qwen2: shifted logits, bidirectional attention. Its authors' rule P2 revises tokens
that are committed; here the most confident position comes first and stays, which is P2 without the revision."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from . import Family, a2d, common

# Of the class that auto_map names; not the end of WizardCoder.
PATTERNS = (r"(^|[._-])(open[_-]?)?d[_-]?coder", "open[_-]?dllm", "Qwen2ForMaskedDiffusion")


def claims(checkpoint: Checkpoint) -> bool:
    config = checkpoint.config
    return config.get("model_type") == "qwen2" and common.declares(config, *PATTERNS) is not None


def defaults(checkpoint: Checkpoint) -> dict[str, tuple[Any, str]]:
    return {"max_tokens": (128, "Open-dLLM's sample.py")}


FAMILY = Family(
    name="open_dcoder",
    model_types=("qwen2",),
    claims=claims,
    defaults=defaults,
    logits="shifted",
    unmasking="maskgit_plus",
    architecture=lambda config: "mlx_lm.models.qwen2",
    stop_tokens=("<|im_end|>",),
    prepare_config=common.prepare_qwen2,
    sanitize=common.plain,
    hidden=a2d.decoder,
    head=a2d.either_head,
    about="fredzzp/open-dcoder-0.5B (with --family open_dcoder where auto_map does not name its class)",
    verified="transformers' model of its shape; its decoding only against Dream's rules",
)
