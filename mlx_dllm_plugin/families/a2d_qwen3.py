"""dllm's conversions of Qwen3, trained with MDLM (bidirectional) or BD3LM (block-causal). Their configurations do not
tell the two apart."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..spec import ATTENTION
from . import Family, a2d, common

SOURCE = "dllm's samplers"


def shape(checkpoint: Checkpoint) -> dict[str, tuple[Any, str]]:
    """A copy that was made here says which it is. Of others, a name with bd3lm in it is all there is to go by."""
    recorded = checkpoint.config.get(ATTENTION)
    if recorded is not None:
        if recorded not in ("bidirectional", "block_causal"):
            where = checkpoint.path / "config.json"
            raise CheckpointError(f"{where}: {ATTENTION} must be bidirectional or block_causal, got {recorded!r}.")
        source = f"config.json ({ATTENTION})"
        return _block_causal(source) if recorded == "block_causal" else {"attention": (recorded, source)}
    said = common.named(checkpoint, "bd3lm")
    return {} if said is None else _block_causal(said[1])


def _block_causal(source: str) -> dict[str, tuple[Any, str]]:
    return {"attention": ("block_causal", source), "canvas": ("growing", source)}


def hint(checkpoint: Checkpoint) -> str | None:
    if checkpoint.config.get(ATTENTION) is not None:
        return None
    said = common.named(checkpoint, "bd3lm")
    which = "BD3LM (block_causal)" if said else "MDLM (bidirectional)"
    why = f"because of {said[1]}" if said else "because no name of it has 'bd3lm' in it"
    return (
        f"{checkpoint.path.name}: dllm's MDLM and BD3LM checkpoints declare the same; this one is taken for {which} "
        f"{why}; --attention block_causal|bidirectional decides."
    )


def defaults(checkpoint: Checkpoint) -> dict[str, tuple[Any, str]]:
    return {"max_tokens": (128, SOURCE), "block_length": (32, SOURCE)}


def family(kind: str, **own: Any) -> Family:
    """A family of conversions of one of mlx-lm's models."""
    model_type = f"a2d-{kind}"
    return Family(
        name=f"a2d_{kind}",
        model_types=(model_type,),
        claims=lambda checkpoint: checkpoint.config.get("model_type") == model_type,
        defaults=defaults,
        unmasking="mdlm",
        block_origin="prompt_end",
        variants=frozenset({"attention", "logits"}),
        shape=shape,
        hint=hint,
        thinks=False,
        architecture=lambda config: f"mlx_lm.models.{kind}",
        mask_token="<|mask|>",
        stop_tokens=("<|im_end|>",),
        sanitize=common.plain,
        hidden=a2d.decoder,
        head=a2d.either_head,
        **own,
    )


FAMILY = family(
    "qwen3",
    prepare_config=common.prepare_qwen3,
    about="dllm-hub/Qwen3-0.6B-diffusion-{mdlm,bd3lm}-v0.1",
    verified="tiny checkpoints in their layout against dllm's samplers: logits, ids, every step",
)
