"""Diffusion language models that are recognised and cannot be decoded: why, in one sentence each."""

from __future__ import annotations

from ..checkpoint import Checkpoint


def refusal(checkpoint: Checkpoint) -> str | None:
    """The reason, or None for every other checkpoint."""
    return None
