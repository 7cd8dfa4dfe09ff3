"""Diffusion language models that are recognised and cannot be decoded: why, in one sentence each."""

from __future__ import annotations

from typing import NamedTuple

from ..checkpoint import Checkpoint
from . import common

_SERVED = "mlx-vlm decodes it: use mlx_vlm.generate (pip install mlx-vlm)"
_AUTHORS = "use its authors' code"


class _Refused(NamedTuple):
    """
    Args:
        name: of the model, for people.
        model_types: values of ``model_type``.
        classes: patterns of the classes that ``architectures`` or ``auto_map`` name.
        why: the reason and the way out.
        mlx_vlm: mlx-vlm decodes it by diffusion.
    """

    name: str
    model_types: tuple[str, ...]
    classes: tuple[str, ...]
    why: str
    mlx_vlm: bool = False


_IMAGES = f"it takes images too, and only models of text alone can be decoded here; {_AUTHORS}."

REFUSED = (
    _Refused(
        "WeDLM",
        ("wedlm",),
        ("WeDLMForCausalLM",),
        "it decodes a reordered window under causal attention, which this version does not do; use Tencent's package "
        "wedlm.",
    ),
    _Refused(
        "Efficient-DLM",
        ("edlm",),
        ("EfficientDLM",),
        "there was no reference of its decoding to check against, and as the qwen3 it says it is it writes nonsense; "
        "use transformers with the code in its repository.",
    ),
    _Refused(
        "MDLM",
        ("mdlm",),
        (r"(^|\.)MDLM$",),
        "mlx-lm has no model of its architecture (DiT with adaptive norms); use transformers with the code in its "
        "repository.",
    ),
    _Refused(
        "DiffusionGemma",
        ("diffusion_gemma",),
        ("DiffusionGemma",),
        f"it replaces random tokens instead of masks, which this version does not do; {_SERVED}.",
        mlx_vlm=True,
    ),
    _Refused(
        "Nemotron-Labs-Diffusion",
        ("nemotron_labs_diffusion",),
        ("NemotronLabsDiffusion",),
        f"mlx-lm has no model of its architecture; {_SERVED}.",
        mlx_vlm=True,
    ),
    _Refused("LLaDA-V or LaViDa", ("llava_llada", "llava_dream"), ("LlavaLLaDA", "LlavaDream"), _IMAGES),
    _Refused("MMaDA", ("mmada",), ("MMaDA",), _IMAGES),
    _Refused("Dimple", ("dimple", "Dimple"), (r"(^|\.)Dimple",), _IMAGES),
)


def _entry(checkpoint: Checkpoint) -> _Refused | None:
    config = checkpoint.config
    for entry in REFUSED:
        if config.get("model_type") in entry.model_types or common.declares(config, *entry.classes) is not None:
            return entry
    return None


def refusal(checkpoint: Checkpoint) -> str | None:
    """The reason, or None for every other checkpoint."""
    entry = _entry(checkpoint)
    return None if entry is None else f"{entry.name} is recognised, but {entry.why}"


def is_mlx_vlms(checkpoint: Checkpoint) -> bool:
    """Whether it is refused here and decoded by mlx-vlm."""
    entry = _entry(checkpoint)
    return entry is not None and entry.mlx_vlm
