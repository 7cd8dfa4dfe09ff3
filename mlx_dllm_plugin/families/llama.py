"""a2d conversions of Llama."""

from __future__ import annotations

from typing import Any

from . import a2d


def prepare_config(config: dict[str, Any]) -> None:
    """An absent ``tie_word_embeddings`` means false to transformers and true to mlx-lm."""
    config.setdefault("tie_word_embeddings", False)
    a2d.lift_rope(config)
    a2d.only(config, "hidden_act", "silu")


FAMILY = a2d.family("llama", prepare_config=prepare_config, hidden=a2d.decoder, head=a2d.either_head)
