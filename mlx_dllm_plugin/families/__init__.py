"""Families: what claims a checkpoint, how it decodes, and the few places where its weights or numbers need a hand.

A family is one file with one :class:`Family`. Ours are listed below; a package adds one with an entry point in the
group ``mlx_dllm.families`` whose object is a Family of the entry point's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..registry import Registry

if TYPE_CHECKING:
    import mlx.core as mx

    from ..checkpoint import Checkpoint

Weights = dict[str, Any]


def _unchanged(value: Any) -> Any:
    return value


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True)
class Family:
    """
    Args:
        name: what ``--family`` takes.
        model_types: values of ``model_type`` in config.json it can decode.
        claims: whether a checkpoint is one of this family. A tokenizer with a mask token proves nothing.
        hidden: ``(model, ids [B, T], cache) -> [B, T, D]``, the model's last hidden states, final norm included.
        head: ``(model, hidden [B, N, D]) -> logits [B, N, V]``; head(hidden(ids)) equals the model's own call.
        defaults: the family's own values of decoding options for a checkpoint.
        logits, attention, canvas, unmasking: see DiffusionSpec.
        mask_token: text of the mask token, looked up in the vocabulary when no file names the id.
        mask_token_id: its id when the vocabulary does not have the text either.
        score_rank: rank of the attention scores, 4 or 5: the rank a key mask must have.
        prepare_config: ``(config) -> None``, in place, before the model is made; raises DiffusionError for settings
            that mlx-lm's model would silently ignore.
        sanitize: ``(weights) -> weights``, before the model's own sanitize.
        repair: ``(model) -> None``, numeric repairs on the loaded instance.
    """

    name: str
    model_types: tuple[str, ...]
    claims: Callable[[Checkpoint], bool]
    hidden: Callable[[Any, mx.array, list[Any]], mx.array]
    head: Callable[[Any, mx.array], mx.array]
    defaults: Callable[[Checkpoint], Mapping[str, Any]]
    logits: Literal["in_place", "shifted"] = "in_place"
    attention: Literal["bidirectional", "block_causal"] = "bidirectional"
    canvas: Literal["fixed", "growing"] = "fixed"
    unmasking: str = "low_confidence"
    mask_token: str | None = None
    mask_token_id: int | None = None
    score_rank: int = 4
    prepare_config: Callable[[dict[str, Any]], None] = _nothing
    sanitize: Callable[[Weights], Weights] = _unchanged
    repair: Callable[[Any], None] = _nothing


FAMILIES: Registry[Family] = Registry(
    "mlx_dllm.families",
    "family",
    Family,
    {
        "gpt2": "mlx_dllm_plugin.families.gpt2:FAMILY",
        "qwen2": "mlx_dllm_plugin.families.qwen2:FAMILY",
    },
)
