"""What all a2d conversions share: the ``a2d`` block, its sampler settings, and the grown mask token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from . import Family

MASK_TOKEN = "<|mdlm_mask|>"


def claims(model_type: str) -> Callable[[Checkpoint], bool]:
    """A checkpoint with an a2d block, or one inside an a2d run directory (raw trainer checkpoints have no block)."""

    def claim(checkpoint: Checkpoint) -> bool:
        is_run = checkpoint.manifest is not None and "a2d_version" in checkpoint.manifest
        return checkpoint.config.get("model_type") == model_type and (checkpoint.a2d is not None or is_run)

    return claim


def defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """canvas_length (total), max_denoising_steps and confidence_temperature of the a2d block. Without a block: a2d's
    command-line defaults, a canvas of 64 and 32 steps. Raises CheckpointError for impossible values."""
    block = checkpoint.a2d or {}
    where = checkpoint.path / "config.json"
    objective = block.get("objective", "mdlm")
    if objective != "mdlm":
        raise CheckpointError(f"{where}: a2d.objective must be 'mdlm', got {objective!r}: this version knows no other.")
    sampler = block.get("sampler") or {}
    if not isinstance(sampler, dict):
        raise CheckpointError(f"{where}: a2d.sampler must be an object, got {sampler!r}.")
    values = {
        "canvas_length": sampler.get("canvas_len", 64),
        "max_denoising_steps": sampler.get("num_steps", 32),
        "confidence_temperature": sampler.get("temperature", 1.0),
    }
    for name, key in (("canvas_length", "canvas_len"), ("max_denoising_steps", "num_steps")):
        if not isinstance(values[name], int) or isinstance(values[name], bool) or values[name] < 1:
            raise CheckpointError(f"{where}: a2d.sampler.{key} must be a positive integer, got {values[name]!r}.")
    temperature = values["confidence_temperature"]
    if not isinstance(temperature, (int, float)) or isinstance(temperature, bool) or not 0 <= temperature < 1e6:
        raise CheckpointError(f"{where}: a2d.sampler.temperature must be 0 or more, got {temperature!r}.")
    return values


def family(model_type: str, **own: Any) -> Family:
    """A family of a2d conversions of one model_type."""
    return Family(
        name=model_type,
        model_types=(model_type,),
        claims=claims(model_type),
        defaults=defaults,
        unmasking="a2d",
        mask_token=MASK_TOKEN,
        **own,
    )
