"""What all a2d conversions share: the ``a2d`` block, its sampler settings, the grown mask token, and how transformers'
configurations and weights are brought to what mlx-lm's models read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..checkpoint import Checkpoint
from ..errors import CheckpointError, DiffusionError
from ..options import MOST_STEPS
from . import Family, Weights

MASK_TOKEN = "<|mdlm_mask|>"
PARITY = "random models against transformers without its causal mask"


def claims(model_type: str) -> Callable[[Checkpoint], bool]:
    """A checkpoint with an a2d block, or one inside an a2d run directory (raw trainer checkpoints have no block)."""

    def claim(checkpoint: Checkpoint) -> bool:
        is_run = checkpoint.manifest is not None and "a2d_version" in checkpoint.manifest
        return checkpoint.config.get("model_type") == model_type and (checkpoint.a2d is not None or is_run)

    return claim


def defaults(checkpoint: Checkpoint) -> dict[str, tuple[Any, str]]:
    """canvas_length (total), max_denoising_steps and confidence_temperature of the a2d block, each with its source.
    What the block does not say has the default of a2d's command line: a canvas of 64, 32 steps, temperature 1. Raises
    CheckpointError for impossible values."""
    block = checkpoint.a2d or {}
    where = checkpoint.path / "config.json"
    objective = block.get("objective", "mdlm")
    if objective != "mdlm":
        raise CheckpointError(f"{where}: a2d.objective must be 'mdlm', got {objective!r}: this version knows no other.")
    sampler = block.get("sampler") or {}
    if not isinstance(sampler, dict):
        raise CheckpointError(f"{where}: a2d.sampler must be an object, got {sampler!r}.")

    def setting(key: str, default: Any) -> tuple[Any, str]:
        return (sampler[key], "the a2d block") if key in sampler else (default, "a2d's command line")

    values = {
        "canvas_length": setting("canvas_len", 64),
        "max_denoising_steps": setting("num_steps", 32),
        "confidence_temperature": setting("temperature", 1.0),
    }
    for name, key in (("canvas_length", "canvas_len"), ("max_denoising_steps", "num_steps")):
        value = values[name][0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{where}: a2d.sampler.{key} must be a positive integer, got {value!r}.")
    if values["max_denoising_steps"][0] > MOST_STEPS:
        raise CheckpointError(
            f"{where}: a2d.sampler.num_steps must be at most {MOST_STEPS}, got {sampler['num_steps']}."
        )
    temperature = values["confidence_temperature"][0]
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
        a2d=True,
        about=f"a2d conversions of {model_type}",
        mask_token=MASK_TOKEN,
        **{"verified": f"a2d's own runs: logits, ids, every step; {PARITY}", **own},
    )


def whole(model_type: str) -> Family:
    """A family of any mlx-lm model: its own call gives the logits of the whole canvas."""
    return family(
        model_type,
        hidden=lambda model, ids, cache: model(ids, cache=cache),
        head=lambda model, logits: logits,
        score_rank=None,
    )


def decoder(model: Any, ids: mx.array, cache: list[Any]) -> mx.array:
    """``hidden`` of nearly all mlx-lm models."""
    return model.model(ids, cache)


def tied_head(model: Any, states: mx.array) -> mx.array:
    """``head`` of the models that only have a tied one."""
    return model.model.embed_tokens.as_linear(states)


def either_head(model: Any, states: mx.array) -> mx.array:
    """``head`` of the models whose configuration says whether it is tied."""
    return tied_head(model, states) if model.args.tie_word_embeddings else model.lm_head(states)


def drop_tied_head(weights: Weights, embedding: str) -> Weights:
    """Weights without the stored copy of a tied head. Raises DiffusionError when it is no copy."""
    head = weights.get("lm_head.weight")
    if head is None:
        return weights
    if embedding in weights and not mx.array_equal(head, weights[embedding]).item():
        raise DiffusionError(
            f"A model with a head of its own cannot be decoded: lm_head.weight differs from {embedding}, and mlx-lm's "
            "model only has a tied head."
        )
    return {name: value for name, value in weights.items() if name != "lm_head.weight"}


def only(config: dict[str, Any], key: str, *accepted: Any, why: str = "mlx-lm's model only computes {!r}") -> None:
    """Raises DiffusionError for a setting that the model would silently ignore. Absent or null counts as the first
    accepted value."""
    value = config.get(key)
    if value is not None and value not in accepted:
        raise DiffusionError(
            f"{config.get('model_type')} with {key} = {value!r} cannot be decoded: {why.format(accepted[0])}."
        )


def lift_rope(config: dict[str, Any]) -> None:
    """transformers 5 writes ``rope_theta`` and the scaling inside ``rope_parameters``; mlx-lm reads them beside."""
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        if "rope_theta" in rope:
            config.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = config.get("rope_scaling") or rope


def unscaled_rope(config: dict[str, Any]) -> None:
    """Raises DiffusionError for a scaled rope, in families whose mlx-lm model has none."""
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise DiffusionError(
            f"{config.get('model_type')} with a rope scaled by {kind!r} cannot be decoded: mlx-lm's model does not "
            "scale it."
        )
