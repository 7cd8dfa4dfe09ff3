"""DiffusionSpec: all that decoding must know about a checkpoint, where each value came from, and how it is resolved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .checkpoint import Checkpoint, check_config, open_checkpoint, resolve_run_directory
from .errors import CheckpointError, DiffusionError, note
from .families.profiles import STANDARD

if TYPE_CHECKING:
    from pathlib import Path

    from .families import Family
    from .options import LoadOptions

_SHAPE = ("logits", "attention", "canvas", "unmasking", "block_origin")
_CHECKPOINTS = ("profiles", "routing_block", "edit_token_ids")  # that only a checkpoint has of its own
_FROM_FAMILY = (*_SHAPE, *_CHECKPOINTS, "stop_token_ids", "variants")
_BY_OPTION = "forced by the family option"
ATTENTION = "diffusion_attention"  # in the config.json of a copy whose other files do not tell
UNMASKING = "diffusion_unmasking"  # in that of a copy whose rule only the original's name told
FORCED = "diffusion_family"  # in the config.json of a copy whose family had to be forced


@dataclass(frozen=True)
class DiffusionSpec:
    """
    Args:
        family: name of the family that decodes the checkpoint.
        logits: the logits of position i predict token i (``in_place``) or token i + 1 (``shifted``).
        attention: every position sees every position (``bidirectional``), or all up to its block's end.
        canvas: length decided at the start (``fixed``) or growing by block.
        unmasking: name of the default rule.
        mask_token_id: id of the mask token; None when nothing says, then the option must.
        eos_token_ids: ids that end the output.
        vocab_size: rows of the embedding; every id must be below it.
        context_length: longest canvas in tokens, or None if unbounded.
        defaults: the family's own values of decoding options.
        sources: where each value came from, by name.
        block_origin: where blocks of block-causal attention count from: position 0 (``start``), or so that one
            begins at the prompt's end.
        stop_token_ids: of ``eos_token_ids``, those that end a turn and are not the declared end of sequence.
        variants: of ``attention`` and ``logits``, those a decoding option may choose otherwise.
        profiles: what the profiles but ``exact`` set, by name.
        routing_block: columns that choose their experts together, counted from position 0: the only block length.
        edit_token_ids: the tokens DELETE and INSERT, which the model writes to edit a block and never emits.
    """

    family: str
    logits: Literal["in_place", "shifted"]
    attention: Literal["bidirectional", "block_causal"]
    canvas: Literal["fixed", "growing"]
    unmasking: str
    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    context_length: int | None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    block_origin: Literal["start", "prompt_end"] = "start"
    stop_token_ids: tuple[int, ...] = ()
    variants: tuple[str, ...] = ()
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    routing_block: int | None = None
    edit_token_ids: tuple[int, int] | None = None

    @property
    def forced(self) -> bool:
        """Nothing in the checkpoint says that it is a diffusion model: a caller did."""
        return self.sources.get("family") == _BY_OPTION


def detect(checkpoint: Checkpoint, family: str | None = None) -> Family | None:
    """
    The family that decodes a checkpoint, or None when it is autoregressive.

    Args:
        family: force this family, whatever the checkpoint declares.

    Raises:
        DiffusionError: an unknown family name, or a checkpoint that declares itself diffusion of an unknown family.
    """
    from .families import FAMILIES, adapted, family_of
    from .families.refused import refusal

    forced_name = checkpoint.config.get(FORCED)
    if forced_name is not None and not isinstance(forced_name, str):
        raise CheckpointError(f"{checkpoint.path / 'config.json'}: {FORCED} must be text, got {forced_name!r}.")
    family = family or forced_name
    if family is not None:
        forced = FAMILIES.get(family)
        if checkpoint.config.get("model_type") not in forced.model_types:
            raise DiffusionError(
                f"Family {family!r} decodes checkpoints of model_type {' or '.join(forced.model_types)}, but "
                f"{checkpoint.path / 'config.json'} says {checkpoint.config.get('model_type')!r}."
            )
        return adapted(forced)
    reason = refusal(checkpoint)
    if reason is not None:
        raise DiffusionError(f"{checkpoint.path} cannot be decoded: {reason}")
    for source in (FAMILIES.builtin, FAMILIES.others):
        claims = {claim.name: claim for claim in source() if claim.claims(checkpoint)}
        if len(claims) > 1:
            raise DiffusionError(
                f"{checkpoint.path}: the families {', '.join(claims)} all claim it; choose one with family."
            )
        if claims:
            return adapted(next(iter(claims.values())))
    if checkpoint.a2d is not None:
        by_adapter = family_of(checkpoint.config.get("model_type"))
        if by_adapter is not None:
            return by_adapter
        raise DiffusionError(
            f"{checkpoint.path} is an a2d diffusion checkpoint of model_type "
            f"{checkpoint.config.get('model_type')!r}, which this version cannot decode; it decodes "
            f"{', '.join(FAMILIES.names())}."
        )
    return None


def detect_at(path: Path, family: str | None = None) -> Family | None:
    """:func:`detect` for a local checkpoint or run directory; None also where no config.json is."""
    path = resolve_run_directory(path)
    return detect(open_checkpoint(path), family) if (path / "config.json").is_file() else None


def resolve(checkpoint: Checkpoint, family: Family) -> DiffusionSpec:
    """
    The spec of a checkpoint. Each value comes from the ``a2d`` block, config.json, generation_config.json, the
    tokenizer's declared mask token, the family's token looked up in the vocabulary, or the family; in that order. The
    family's shape of this checkpoint beats its constants.

    Raises:
        CheckpointError: a value that is missing or impossible.
    """
    config, where = checkpoint.config, checkpoint.path / "config.json"
    check_config(config, where)
    # LLaDA's embedding has more rows than its vocabulary has tokens.
    rows = "embedding_size" if config.get("embedding_size") is not None else "vocab_size"
    vocab_size = config.get(rows)
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1:
        raise CheckpointError(f"{where}: {rows} must be a positive integer, got {vocab_size!r}.")
    sources = {name: f"the family {family.name}" for name in _FROM_FAMILY}
    stops = {checkpoint.added_tokens[text] for text in family.stop_tokens if text in checkpoint.added_tokens}
    if checkpoint.a2d is not None:
        sources["family"] = "the a2d block"
    elif not family.claims(checkpoint):
        sources["family"] = _BY_OPTION
    else:
        is_run = checkpoint.manifest is not None and config.get("model_type") == family.name
        sources["family"] = "the run's manifest" if is_run else "config.json"
    sources["vocab_size"] = f"config.json ({rows})" if rows != "vocab_size" else "config.json"

    mask, sources["mask_token_id"] = _mask_token_id(checkpoint, family)
    eos, sources["eos_token_ids"] = _eos_token_ids(checkpoint)
    context, sources["context_length"] = None, "nothing says: unbounded"
    for name in ("n_positions", "max_position_embeddings", "max_sequence_length"):
        if isinstance(config.get(name), int):
            context, sources["context_length"] = config[name], f"config.json ({name})"
            break
    sources["profiles"] = f"the family {family.name}" if family.profiles else "the attention"
    defaults, own = family.defaults(checkpoint), family.shape(checkpoint)
    sources |= {name: source for name, (_, source) in (*defaults.items(), *own.items())}
    shape: dict[str, Any] = {name: own[name][0] if name in own else getattr(family, name) for name in _SHAPE}
    profiles = family.profiles or STANDARD[shape["attention"]]
    only = {"profiles": profiles, **{name: own[name][0] for name in _CHECKPOINTS if name in own}}
    _check_edit_token_ids(only.get("edit_token_ids"), (mask, *eos), vocab_size, where)
    return DiffusionSpec(
        family=family.name,
        **shape,
        mask_token_id=mask,
        eos_token_ids=(*eos, *sorted(stops - set(eos))),
        stop_token_ids=tuple(sorted(stops - set(eos))),
        variants=tuple(sorted(family.variants)),
        **only,
        vocab_size=vocab_size,
        context_length=context,
        defaults={name: value for name, (value, _) in defaults.items()},
        sources=sources,
    )


def check_mask_token_id(mask: Any, vocab_size: int, source: str) -> None:
    """Raises CheckpointError unless it is None or an id inside the embedding."""
    if mask is None:
        return
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < vocab_size:
        raise CheckpointError(
            f"mask_token_id must be an id within the embedding of {vocab_size} rows (0 to {vocab_size - 1}), "
            f"got {mask!r} from {source}."
        )


def _check_edit_token_ids(ids: tuple[int, int] | None, others: tuple[Any, ...], vocab_size: int, where: Path) -> None:
    for token in ids or ():
        if not 0 <= token < vocab_size or token in others:
            raise CheckpointError(
                f"{where}: the tokens of edits must be ids below {vocab_size}, not the mask and no end of sequence "
                f"({', '.join(map(str, others))}), got {token}."
            )


def mask_token_id_of(spec: DiffusionSpec, given: int | None, source: str = "the option") -> int:
    """The mask a caller gave, else the checkpoint's. Raises DiffusionError when neither says, or it is no id."""
    if given is None:
        given, source = spec.mask_token_id, spec.sources.get("mask_token_id", "the checkpoint")
    if given is None:
        raise DiffusionError(
            "The checkpoint does not say which token is its mask: give mask_token_id (--mask-token-id)."
        )
    check_mask_token_id(given, spec.vocab_size, source)
    return given


def prepare(
    path: Path, overrides: dict[str, Any] | None, options: LoadOptions, *, decided: Collection[str] = ()
) -> tuple[Family, DiffusionSpec] | None:
    """
    What loading needs to know before any weight is read: the family and spec, or None for an autoregressive model.

    Args:
        decided: options of decoding that were given: what they decide is not assumed.

    Raises:
        DiffusionError: the checkpoint cannot be decoded in the mode asked for, in one sentence with the way out.
    """
    if options.mode == "auto" and options.family is None and not (path / "config.json").is_file():
        return None
    checkpoint = open_checkpoint(path, overrides)
    family = detect(checkpoint, options.family)
    if family is None:
        if options.mode == "diffusion":
            raise DiffusionError(
                f"{path} has no diffusion spec (model_type {checkpoint.config.get('model_type')!r}, no family claims "
                "it): leave out --mode diffusion to decode it autoregressively, or force a family with --family."
            )
        return None
    if options.mode == "ar":
        raise DiffusionError(
            f"{path} is a diffusion checkpoint of the family {family.name}, which writes nonsense when "
            "decoded autoregressively: leave out --mode ar."
        )
    spec = resolve(checkpoint, family)
    check_mask_token_id(spec.mask_token_id, spec.vocab_size, spec.sources["mask_token_id"])
    announce(checkpoint, family, decided)
    return family, spec


def announce(checkpoint: Checkpoint, family: Family | None, decided: Collection[str] = ()) -> None:
    """Say what the user should know of a checkpoint that is loaded: of its run, and what its family had to assume, but
    for what options have decided that this names."""
    if checkpoint.provenance:
        note(f"warning: {checkpoint.provenance}")
    hint = family.hint(checkpoint) if family is not None else None
    if hint is not None and not any(f"--{name.replace('_', '-')} " in hint for name in decided):
        note(hint)


def _mask_token_id(checkpoint: Checkpoint, family: Family) -> tuple[Any, str]:
    block = checkpoint.a2d or {}
    declared = _token_text(checkpoint, "mask_token")
    candidates = (
        (block.get("mask_token_id"), "the a2d block"),
        (checkpoint.config.get("mask_token_id"), "config.json"),
        (checkpoint.generation_config.get("mask_token_id"), "generation_config.json"),
        (checkpoint.added_tokens.get(declared or ""), f"the tokenizer's mask token {declared!r}"),
        (checkpoint.added_tokens.get(family.mask_token or ""), f"the token {family.mask_token!r} in the vocabulary"),
        (family.mask_token_id, f"the family {family.name}"),
    )
    for value, source in candidates:
        if value is not None:
            return value, source
    return None, "nothing says: give mask_token_id (--mask-token-id)"


def _token_text(checkpoint: Checkpoint, name: str) -> str | None:
    """The text of a token that tokenizer_config.json declares, as a string or as an object with a ``content``."""
    declared = checkpoint.tokenizer_config.get(name)
    declared = declared.get("content") if isinstance(declared, dict) else declared
    return declared if isinstance(declared, str) else None


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[tuple[int, ...], str]:
    declared = _token_text(checkpoint, "eos_token")
    candidates = (
        (checkpoint.generation_config.get("eos_token_id"), "generation_config.json"),
        (checkpoint.config.get("eos_token_id"), "config.json"),
        (checkpoint.added_tokens.get(declared or ""), f"the tokenizer's eos token {declared!r}"),
    )
    for value, source in candidates:
        if value is not None:
            ids = tuple(value) if isinstance(value, list) else (value,)
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise CheckpointError(
                    f"eos_token_id must be a token id or a list of them, got {value!r} from {source}."
                )
            return ids, source
    return (), "nothing says: the output is never cut"
