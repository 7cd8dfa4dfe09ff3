"""a2d conversions of Qwen2 and Qwen2.5. Sliding windows are never used: a2d decodes with all of them open."""

from __future__ import annotations

from typing import Any

from . import a2d


def prepare_config(config: dict[str, Any]) -> None:
    """An absent ``tie_word_embeddings`` means false to transformers and true to mlx-lm."""
    config.setdefault("tie_word_embeddings", False)
    a2d.lift_rope(config)
    a2d.only(config, "hidden_act", "silu")


FAMILY = a2d.family("qwen2", prepare_config=prepare_config, hidden=a2d.decoder, head=a2d.either_head)
