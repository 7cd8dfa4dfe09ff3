"""Families: what claims a checkpoint, how it decodes, and the few places where its weights or numbers need a hand.

A family is one file in this folder with one ``FAMILY``: the folder is the list. A package outside adds one with an
entry point in the group ``mlx_dllm.families`` whose object is a :class:`Family` of the entry point's name, and a script
with :func:`register`. All that a conversion of one more mlx-lm model needs::

    from mlx_dllm_plugin.families import register
    from mlx_dllm_plugin.families.a2d import family

    register(
        family(
            "phi3",
            hidden=lambda model, ids, cache: model.model(ids, cache),
            head=lambda model, states: model.lm_head(states),
        )
    )

``FamilyAdapter``, ``register`` and ``get_adapter`` also are what mlx-dllm has under these names.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..registry import Registry

if TYPE_CHECKING:
    import mlx.core as mx

    from ..checkpoint import Checkpoint

Weights = dict[str, Any]


def _unchanged(value: Any) -> Any:
    return value


def _four(_: Any) -> int:
    return 4


def _nothing(*_: Any) -> None:
    return None


def _as_declared(_: Any) -> dict[str, tuple[Any, str]]:
    return {}


@dataclass(frozen=True)
class Family:
    """
    Args:
        name: what ``--family`` takes.
        model_types: values of ``model_type`` in config.json it can decode.
        claims: whether a checkpoint is one of this family. A tokenizer with a mask token proves nothing.
        hidden: ``(model, ids [B, T], cache) -> [B, T, D]``, the model's last hidden states, final norm included.
        head: ``(model, hidden [B, N, D]) -> logits [B, N, V]``; head(hidden(ids)) equals the model's own call.
        defaults: the family's own values of decoding options for a checkpoint, each with where it comes from.
        logits, attention, canvas, unmasking, block_origin: see DiffusionSpec.
        variants: of ``attention`` and ``logits``, those that a caller may choose otherwise, because checkpoints of both
            kinds declare the same.
        architecture: ``(config) -> name of a module`` with ``Model`` and ``ModelArgs`` in mlx-lm's shape; None takes
            what mlx-lm has for the ``model_type``.
        shape: ``(checkpoint) -> {name: (value, source)}``: what this checkpoint has otherwise of ``logits``,
            ``attention``, ``canvas``, ``unmasking``, ``block_origin`` and ``profiles``, and what no family has:
            ``routing_block`` and ``edit_token_ids``.
        hint: ``(checkpoint) -> sentence or None``, said when it is loaded: what had to be assumed.
        stop_tokens: texts of tokens that end a turn, beside the declared end of sequence: looked up in the vocabulary.
        thinks: False where its makers chat without the thinking that its chat template offers.
        float32_on_cpu: cast 16-bit weights on MLX's CPU backend, which cannot gather experts in 16 bits.
        a2d: checkpoints are a2d conversions, whose copies are marked by an ``a2d`` block.
        about: repositories, for the documentation.
        verified: where the numbers were checked, for the documentation.
        mask_token: text of the mask token, looked up in the vocabulary when no file names the id.
        mask_token_id: its id when the vocabulary does not have the text either.
        score_rank: ``(model) -> 4 or 5``, the rank of the attention scores and so of a key mask; None when nobody
            knows it, and then rows of unequal length are not decoded together.
        local_attention: some layers see a neighbourhood only, so that keys must stand in the order of the canvas.
        profiles: what the profiles ``balanced`` and ``fast`` set, where that is not what ``profiles.py`` has for the
            attention; ``exact`` sets nothing.
        prepare_config: ``(config) -> None``, in place, before the model is made; raises DiffusionError for settings
            that mlx-lm's model would silently ignore.
        sanitize: ``(weights) -> weights``, before the model's own sanitize.
        wrap_class: ``(model class) -> subclass``, or None: mlx-dllm's way to change ``sanitize``.
        repair: ``(model, config) -> None``, numeric repairs on the loaded instance.
    """

    name: str
    model_types: tuple[str, ...]
    claims: Callable[[Checkpoint], bool]
    hidden: Callable[[Any, mx.array, list[Any]], mx.array]
    head: Callable[[Any, mx.array], mx.array]
    defaults: Callable[[Checkpoint], Mapping[str, tuple[Any, str]]]
    logits: Literal["in_place", "shifted"] = "in_place"
    attention: Literal["bidirectional", "block_causal"] = "bidirectional"
    canvas: Literal["fixed", "growing"] = "fixed"
    unmasking: str = "low_confidence"
    block_origin: Literal["start", "prompt_end"] = "start"
    variants: frozenset[str] = frozenset()
    architecture: Callable[[dict[str, Any]], str] | None = None
    shape: Callable[[Checkpoint], Mapping[str, tuple[Any, str]]] = _as_declared
    hint: Callable[[Checkpoint], str | None] = _nothing
    stop_tokens: tuple[str, ...] = ()
    thinks: bool = True
    float32_on_cpu: bool = False
    a2d: bool = False
    about: str = ""
    verified: str = ""
    mask_token: str | None = None
    mask_token_id: int | None = None
    score_rank: Callable[[Any], int] | None = _four
    local_attention: bool = False
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prepare_config: Callable[[dict[str, Any]], None] = _nothing
    sanitize: Callable[[Weights], Weights] = _unchanged
    wrap_class: Callable[[type], type] | None = None
    repair: Callable[[Any, dict[str, Any]], None] = _nothing


_SHARED = {"a2d", "common", "profiles", "refused"}  # files here that are no family

FAMILIES: Registry[Family] = Registry(
    "mlx_dllm.families",
    "family",
    Family,
    {
        file.name: f"{__name__}.{file.name}:FAMILY"
        for file in pkgutil.iter_modules(__path__)
        if file.name not in _SHARED
    },
)


@dataclass(frozen=True)
class FamilyAdapter:
    """mlx-dllm's contract for a family: its ``model_type``, and optionally a factory ``(model class) -> subclass`` that
    overrides ``sanitize``."""

    model_type: str
    sanitize_wrapper: Callable[[type], type] | None = None


_ADAPTERS: dict[str, FamilyAdapter] = {}


def register(entry: Family | FamilyAdapter) -> None:
    """Add a family. A ``Family`` must have a free name; of adapters for one model_type the last wins."""
    if isinstance(entry, FamilyAdapter):
        _ADAPTERS[entry.model_type] = entry
    else:
        FAMILIES.register(entry)


def get_adapter(model_type: str | None) -> FamilyAdapter | None:
    """The adapter of a model_type: a registered one, else one made of the family here, else None."""
    if model_type in _ADAPTERS:
        return _ADAPTERS[model_type]
    family = family_of(model_type)
    if family is None:
        return None
    return FamilyAdapter(family.name, None if family.sanitize is _unchanged else _wrapper(family))


def family_of(model_type: str | None) -> Family | None:
    """The family of a model_type, its registered adapter applied; None when there is neither."""
    from . import a2d

    sources = (FAMILIES.builtin, FAMILIES.others)
    claimants = [f for source in sources for f in source() if model_type in f.model_types]
    known = next((f for f in claimants if f.name == model_type), claimants[0] if len(claimants) == 1 else None)
    if known is None and model_type in _ADAPTERS:
        known = a2d.whole(model_type)
    return known and adapted(known)


def adapted(family: Family) -> Family:
    """The family with what a registered adapter changes."""
    adapter = next((_ADAPTERS[name] for name in family.model_types if name in _ADAPTERS), None)
    if adapter is None or adapter.sanitize_wrapper is None:
        return family
    return dataclasses.replace(family, sanitize=_unchanged, wrap_class=adapter.sanitize_wrapper)


def _wrapper(family: Family) -> Callable[[type], type]:
    def wrap(model_class: type) -> type:
        class Model(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: Weights) -> Weights:
                return super().sanitize(family.sanitize(weights))

        return Model

    return wrap
