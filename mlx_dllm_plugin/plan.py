"""What a row will do, settled and checked before anything is computed: its canvas, stages and schedule."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .errors import DiffusionError
from .families.profiles import STANDARD
from .options import DecodingOptions, approximations
from .samplers import RULES, Rule, users
from .samplers.low_confidence import share
from .spec import DiffusionSpec, mask_token_id_of

FROZEN = ("prefix", "dual")  # caches that freeze what would change
# Options of all rules that say how a canvas is filled.
_STEERING = ("unmasking", "cache", "refresh_interval", "vicinity", "first_token", "after_eos")
LONGEST_CANVAS = 2**20  # when the checkpoint names no context


class Stage(NamedTuple):
    """
    A group of slots that are filled before the next ones.

    Args:
        start, end: the slots.
        counts: per step a number for the rule's selection (how many to commit, without one); empty: as many steps as
            it takes.
        fixed: columns of the canvas before it never change again, nor do their keys and values.
        visible: columns of the canvas that the model sees.
        block: columns (first, last + 1) of the block that is complete after this stage, or None.
        window: columns (first, last + 1) that a forward computes; None: all that can change.
        refresh: with a window, the stage's first forward computes all columns nevertheless.
    """

    start: int
    end: int
    counts: tuple[float, ...]
    fixed: int
    visible: int
    block: tuple[int, int] | None
    window: tuple[int, int] | None = None
    refresh: bool = True


@dataclass(frozen=True)
class Plan:
    """
    What a row will do.

    Args:
        rule: what picks positions.
        canvas: its ids, masks included.
        slots: the masked positions, ascending. Stages and output are counted in slots.
        cap: slots of the output at most.
        empty_steps: steps of the schedule that commit nothing; they cost no forward.
        block_length: of block-causal attention, else None.
        origin: the column where a block of block-causal attention begins.
        shifted: the logits of column i - 1 predict column i.
        eos: ids that end the output.
        never: ids never to emit.
        suppressed: of those, the ids that no confidence counts.
        late: ids that count in the choice of tokens, and not in confidences.
        values: numeric options of the rule.
        cfg_scale: of classifier-free guidance; 0 is off.
        keep: ids of the prompt that guidance does not mask.
        cache: none, prefix, dual or block.
        refresh_interval: forwards after which all columns are computed again, or None.
        after_eos: what becomes of positions after a committed end of sequence: fill, skip or eos.
        approximate: settings that trade exactness for speed, as ``name value``.
        edit_token_ids: DELETE and INSERT of a rule that moves tokens.
    """

    rule: Rule
    canvas: tuple[int, ...]
    slots: tuple[int, ...]
    cap: int
    stages: tuple[Stage, ...]
    empty_steps: int
    block_length: int | None
    origin: int
    shifted: bool
    mask_token_id: int
    eos: frozenset[int]
    never: tuple[int, ...]
    suppressed: tuple[int, ...]
    late: tuple[int, ...]
    values: Mapping[str, Any]
    cfg_scale: float = 0.0
    keep: frozenset[int] = frozenset()
    cache: str = "none"
    refresh_interval: int | None = None
    after_eos: str = "fill"
    approximate: tuple[str, ...] = ()
    edit_token_ids: tuple[int, int] | None = None


def plan(spec: DiffusionSpec, prompt: Sequence[int], options: DecodingOptions) -> Plan:
    """
    Check a prompt and its options against a spec, and lay out the row's canvas and schedule.

    Raises:
        DiffusionError: anything that cannot be decoded as asked, in one sentence.
    """
    spec = _chosen(spec, options)
    options = profiled(spec, options)
    mask = mask_token_id_of(spec, options.mask_token_id)
    if not prompt:
        raise DiffusionError("The prompt is empty: give at least one token.")
    _check_ids(prompt, spec)
    length = _canvas_length(spec, len(prompt), options)
    cap = options.max_tokens if options.max_tokens and options.max_tokens > 0 else length
    if spec.attention == "block_causal":
        cap = min(cap, length - len(prompt))
        length = _whole_blocks(spec, len(prompt), length, options)
    canvas = (*prompt, *[mask] * (length - len(prompt)))
    return plan_slots(spec, canvas, range(len(prompt), length), options, cap=cap)


def plan_slots(
    spec: DiffusionSpec,
    canvas: Sequence[int],
    slots: Sequence[int],
    options: DecodingOptions,
    cap: int | None = None,
    origin: int | None = None,
) -> Plan:
    """
    The plan of a canvas whose masked positions are known.

    Args:
        cap: slots of the output at most; default: all.
        origin: the column where blocks are counted from in a bidirectional canvas; default: the first slot.

    Raises:
        DiffusionError: as :func:`plan`.
    """
    spec = _chosen(spec, options)
    options = profiled(spec, options)
    rule = RULES.get(options.unmasking or spec.unmasking)
    block_causal = spec.attention == "block_causal"
    _refuse_unused(rule, spec, options)
    if options.temp and options.sampler is not None:
        raise DiffusionError("Give temp or a sampler, not both: a sampler brings its own temperature.")
    mask = mask_token_id_of(spec, options.mask_token_id)
    _check_ids(canvas, spec)
    shifted = spec.logits == "shifted"
    if shifted and slots and slots[0] == 0:
        raise DiffusionError("A model with shifted logits needs an unmasked first token: nothing predicts position 0.")
    values = {name: _value(name, spec, rule, options) for name in rule.uses | rule.defaults.keys()}
    eos = frozenset(options.eos_token_ids if options.eos_token_ids is not None else spec.eos_token_ids)
    suppressed, late = _suppressed(spec, mask, options)
    length = _block_length(spec, options) if block_causal else None
    sub_block = options.sub_block_length or (values.get("sub_block_length") if block_causal else None)
    cache = _cache(spec, rule, options, sub_block)
    if block_causal:
        assert length is not None
        start = slots[0] % length if slots and spec.block_origin == "prompt_end" else 0
        stages, empty = _causal_stages(rule, canvas, slots, length, start, values, sub_block, shifted, cache)
    else:
        start = (slots[0] if slots else 0) if origin is None else origin
        stages, empty = _stages(spec, rule, len(canvas), slots, start, values, options, cache)
    # A checkpoint whose mask is its end of sequence (a2d's mask token "reuse") may emit it; a caller's list counts not.
    reused = mask in spec.eos_token_ids and not rule.drop_mask
    never = {*suppressed, *(() if reused else (mask,)), *(() if rule.moves else spec.edit_token_ids or ())}
    if len({*never, *(spec.edit_token_ids or ())}) >= spec.vocab_size:
        raise DiffusionError("suppress_tokens leaves no token to emit.")
    if len({*suppressed, *late}) >= spec.vocab_size:
        raise DiffusionError("begin_suppress_tokens leaves no token that a confidence could count.")
    return Plan(
        rule=rule,
        canvas=tuple(canvas),
        slots=tuple(slots),
        cap=len(slots) if cap is None else min(cap, len(slots)),
        stages=stages,
        empty_steps=empty,
        block_length=length,
        origin=start if block_causal else 0,
        shifted=shifted,
        mask_token_id=mask,
        eos=frozenset() if options.stop_at_eos is False else eos,
        never=tuple(sorted(never)),
        suppressed=suppressed,
        late=late,
        values={name: value for name, value in values.items() if isinstance(value, (int, float))},
        cfg_scale=options.cfg_scale or 0.0,
        keep=frozenset(options.cfg_keep_tokens or ()),
        cache=cache,
        refresh_interval=options.refresh_interval,
        after_eos=options.after_eos or "fill",
        approximate=tuple(approximations(dataclasses.asdict(options))),
        edit_token_ids=spec.edit_token_ids if rule.moves else None,
    )


def profiled(spec: DiffusionSpec, options: DecodingOptions) -> DecodingOptions:
    """The options with what a profile adds where they say nothing, as far as the rule in force uses it."""
    if options.profile in (None, "exact"):
        return options
    added = {
        name: value for name, value in spec.profiles.get(options.profile, {}).items() if getattr(options, name) is None
    }
    rule = RULES.get(options.unmasking or added.get("unmasking") or spec.unmasking)
    if spec.attention == "block_causal" and not (options.sub_block_length or "sub_block_length" in rule.uses):
        added.pop("cache", None)  # only what is filled in parts is kept in parts
    if (options.cache or added.get("cache")) not in FROZEN:
        added = {name: value for name, value in added.items() if name not in ("vicinity", "refresh_interval")}
    uses = rule.uses | {
        name for name, field in DecodingOptions.__dataclass_fields__.items() if field.metadata["common"]
    }
    return replace(options, **{name: value for name, value in added.items() if name in uses})


class InForce(NamedTuple):
    """
    What options and profile come to.

    Args:
        options: with what the profile adds.
        by_block: whether the canvas is filled block by block.
        profile: its name.
        changes: settings that were given beside it, as ``name value``.
        approximate: those in force that trade exactness for speed, as ``name value``.
    """

    options: DecodingOptions
    by_block: bool
    profile: str
    changes: tuple[str, ...]
    approximate: tuple[str, ...]

    def __str__(self) -> str:
        changes = f", but with {', '.join(self.changes)}" if self.changes else ""
        return self.profile + changes + (f" (approximate: {', '.join(self.approximate)})" if self.approximate else "")


def in_force(spec: DiffusionSpec, options: DecodingOptions) -> InForce:
    """What the options come to with a checkpoint."""
    spec = _chosen(spec, options)
    settled = profiled(spec, options)
    rule = RULES.get(settled.unmasking or spec.unmasking)
    by_block = "block_length" in rule.uses and _value("block_length", spec, rule, settled) is not None
    given = [
        f"{name} {getattr(options, name)}"
        for name, option in DecodingOptions.__dataclass_fields__.items()
        if getattr(options, name) is not None
        and (name in _STEERING or not option.metadata["common"])
        and not (name == "unmasking" and options.unmasking == spec.unmasking)
    ]
    return InForce(
        settled,
        by_block or spec.attention == "block_causal",
        options.profile or "exact",
        tuple(given),
        tuple(approximations(dataclasses.asdict(settled))),
    )


def _cache(spec: DiffusionSpec, rule: Rule, options: DecodingOptions, sub_block: int | None) -> str:
    """The cache in force. Raises DiffusionError for one that means nothing here, and for options of another."""
    causal = spec.attention == "block_causal"
    cache = options.cache or "auto"
    if cache == "auto":
        cache = "block" if causal else "none"
    if cache == "block" and not causal:
        raise DiffusionError(
            f"cache block keeps final blocks of block-causal attention, and the family {spec.family} sees the whole "
            "canvas: leave it out, or choose prefix or dual, which are approximate."
        )
    if causal and (cache == "prefix" or (cache == "dual" and not sub_block)):
        raise DiffusionError(
            f"cache {cache} means nothing with block-causal attention"
            + (", where block keeps the prefix exactly" if cache == "prefix" else " without sub_block_length")
            + ": leave it out."
        )
    if cache == "dual" and spec.routing_block is not None:
        raise DiffusionError(
            f"cache dual computes part of a block, and the checkpoint chooses experts by whole blocks of "
            f"{spec.routing_block} tokens: leave it out."
        )
    for name in ("refresh_interval", "vicinity"):
        if getattr(options, name) is not None and (causal or cache not in FROZEN):
            way = "leave it out" if causal else "add cache prefix or dual, or leave it out"
            raise DiffusionError(
                f"{name} belongs to the caches prefix and dual of bidirectional attention, and the cache here is "
                f"{cache}: {way}."
            )
    if options.first_token == "stale" and (spec.logits != "shifted" or causal):
        raise DiffusionError(
            f"first_token stale is for shifted logits and bidirectional attention, and the family {spec.family} has "
            f"logits {spec.logits} and attention {spec.attention}: leave it out."
        )
    if options.after_eos not in (None, "fill") and options.stop_at_eos is False:
        raise DiffusionError(
            f"after_eos {options.after_eos} means nothing without stop_at_eos: give that too, or leave it out."
        )
    if options.after_eos not in (None, "fill") and rule.edit is not None:
        raise DiffusionError(
            f"after_eos {options.after_eos} means nothing to the unmasking rule {rule.name!r}, which may edit an end "
            "of sequence away until its block is final: leave it out."
        )
    if rule.edit is not None and (not causal or spec.logits == "shifted"):
        raise DiffusionError(
            f"The unmasking rule {rule.name!r} edits the blocks of block-causal attention with logits in place; the "
            f"family {spec.family} has attention {spec.attention} and logits {spec.logits}: choose another rule."
        )
    if rule.moves and spec.edit_token_ids is None:
        raise DiffusionError(
            f"The unmasking rule {rule.name!r} needs the ids of DELETE and INSERT, and the checkpoint names none "
            "(delete_token_id, split_token_id in config.json): choose joint_threshold, or another rule."
        )
    if options.after_eos == "eos" and rule.revise is not None:
        raise DiffusionError(
            f"after_eos eos writes over what follows an end of sequence, and the unmasking rule {rule.name!r} may take "
            "that back: choose skip, or another rule."
        )
    if rule.revise is not None and (causal or spec.logits == "shifted"):
        raise DiffusionError(
            f"The unmasking rule {rule.name!r} puts masks in the place of committed tokens, which needs attention to "
            f"both sides and logits in place; the family {spec.family} has attention {spec.attention} and logits "
            f"{spec.logits}: choose another rule."
        )
    return cache


def _chosen(spec: DiffusionSpec, options: DecodingOptions) -> DiffusionSpec:
    """The spec with the attention and logits an option chooses, where the family leaves the choice."""
    changes: dict[str, Any] = {}
    for name in ("attention", "logits"):
        value = getattr(options, name)
        if value is None or value == getattr(spec, name):
            continue
        if name not in spec.variants:
            raise DiffusionError(
                f"{name} {value!r} would give a wrong answer: checkpoints of the family {spec.family} are "
                f"{getattr(spec, name)!r}; leave it out."
            )
        changes[name] = value
    if "attention" in changes:
        changes["canvas"] = "growing" if changes["attention"] == "block_causal" else "fixed"
        changes["profiles"] = STANDARD[changes["attention"]]
    return replace(spec, **changes) if changes else spec


def _check_ids(ids: Sequence[int], spec: DiffusionSpec) -> None:
    outside = next((token for token in ids if not 0 <= token < spec.vocab_size), None)
    if outside is not None:
        raise DiffusionError(
            f"The prompt has token id {outside}, outside the vocabulary of {spec.vocab_size}: "
            "the tokenizer does not belong to this checkpoint."
        )


def _suppressed(spec: DiffusionSpec, mask: int, options: DecodingOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids removed before tokens are chosen, and ids removed between that and the confidences (``Plan.late``)."""
    lists = ("suppress_tokens", "begin_suppress_tokens", "cfg_keep_tokens")
    named = {name: getattr(options, name) or () for name in lists}
    for name, ids in named.items():
        outside = next((token for token in ids if token >= spec.vocab_size), None)
        if outside is not None:
            raise DiffusionError(f"{name} has id {outside}, outside the vocabulary of {spec.vocab_size}.")
    first, late = set(named["suppress_tokens"]), set(named["begin_suppress_tokens"])
    flags = options.eos_flags or "none"
    known = [token for token in spec.eos_token_ids if token < spec.vocab_size]
    if flags != "none" and not known:
        raise DiffusionError(f"eos_flags {flags!r} needs an end of sequence, and this checkpoint names none.")
    if flags in ("logits", "both"):
        first |= set(known) - set(spec.stop_token_ids)
    if flags in ("confidence", "both"):
        late |= set(known)
    return tuple(sorted(first)), tuple(sorted(late - first))


def _value(name: str, spec: DiffusionSpec, rule: Rule, options: DecodingOptions) -> Any:
    """What the caller says, else the family, else the rule; of another rule's options than its own a family knows
    nothing."""
    value = getattr(options, name)
    if value is None and (rule.name == spec.unmasking or name not in rule.defaults):
        value = spec.defaults.get(name)
    return rule.defaults.get(name) if value is None else value


def _refuse_unused(rule: Rule, spec: DiffusionSpec, options: DecodingOptions) -> None:
    causal = {"block_length"} if spec.attention == "block_causal" else set()
    for name, option in DecodingOptions.__dataclass_fields__.items():
        if option.metadata["common"] or getattr(options, name) is None or name in rule.uses | causal:
            continue
        raise DiffusionError(
            f"The unmasking rule {rule.name!r} does not use {name}; leave it out, or choose a rule that does with "
            f"unmasking (--unmasking {'|'.join(users(name))})."
        )
    if options.sub_block_length is not None and not causal:
        raise DiffusionError(
            f"sub_block_length divides the blocks of block-causal attention, and the family {spec.family} has none: "
            "leave it out."
        )


def _canvas_length(spec: DiffusionSpec, prompt: int, options: DecodingOptions) -> int:
    """Tokens of prompt and output together."""
    context, growing = _context(spec), spec.canvas == "growing"
    if options.max_tokens == -1 and not growing:
        raise DiffusionError(
            f"max_tokens -1 (up to the context) needs a canvas that grows; the family {spec.family} has a fixed one: "
            "give the number of tokens."
        )
    if context is not None and prompt >= context and options.canvas_length != prompt:
        raise DiffusionError(
            f"The prompt has {prompt} tokens and the model's context is {_whole(spec, context)}: shorten the prompt."
        )
    if options.canvas_length is not None:
        canvas, named = options.canvas_length, "canvas_length"
        if canvas < prompt:
            raise DiffusionError(
                f"canvas_length {canvas} is shorter than the prompt of {prompt} tokens; it counts the prompt too: "
                f"give at least {prompt + 1}."
            )
    elif options.max_tokens == -1:
        canvas, named = context or LONGEST_CANVAS, "max_tokens -1"
    elif options.max_tokens is not None:
        canvas, named = prompt + options.max_tokens, f"prompt {prompt} + max_tokens {options.max_tokens}"
    elif "canvas_length" in spec.defaults:
        canvas, named = spec.defaults["canvas_length"], "the checkpoint's own canvas_length"
        if canvas <= prompt:
            raise DiffusionError(
                f"The prompt has {prompt} tokens, which leaves no room in the checkpoint's canvas of {canvas}: "
                "say how many tokens to write with max_tokens (--max-tokens)."
            )
    else:
        new = spec.defaults["max_tokens"]
        canvas, named = min(prompt + new, context or LONGEST_CANVAS), f"prompt {prompt} + the family's own {new}"
    if context is None and canvas > LONGEST_CANVAS:
        raise DiffusionError(
            f"A canvas of {canvas} tokens ({named}) is too long: the checkpoint names no context, and at most "
            f"{LONGEST_CANVAS} are decoded then."
        )
    if context is not None and canvas > context:
        raise DiffusionError(
            f"A canvas of {canvas} tokens ({named}) exceeds the model's context of {_whole(spec, context)}: "
            f"the prompt has {prompt}, so at most {max(context - prompt, 0)} new tokens fit."
        )
    return canvas


def _context(spec: DiffusionSpec) -> int | None:
    """Tokens of the longest canvas: a last routing block that is not whole would choose other experts."""
    context, block = spec.context_length, spec.routing_block or 1
    if context is not None and context < block:
        raise DiffusionError(f"The model's context of {context} tokens has no room for a routing block of {block}.")
    return context and context // block * block


def _whole(spec: DiffusionSpec, context: int) -> str:
    return str(context) if context == spec.context_length else f"{context} in whole blocks of {spec.routing_block}"


def _block_length(spec: DiffusionSpec, options: DecodingOptions) -> int:
    length = options.block_length or spec.defaults.get("block_length")
    if length is None:
        raise DiffusionError(
            "Block-causal attention needs a block length, and the checkpoint names none: give block_length "
            "(--block-length)."
        )
    if spec.routing_block not in (None, length):
        raise DiffusionError(
            f"block_length {length} would give a wrong answer: the checkpoint chooses experts by whole blocks of "
            f"{spec.routing_block} tokens; leave it out."
        )
    if spec.context_length is not None and length > spec.context_length:
        raise DiffusionError(f"block_length {length} exceeds the model's context of {spec.context_length} tokens.")
    sub = options.sub_block_length
    if sub is not None and length % sub:
        raise DiffusionError(f"sub_block_length {sub} does not divide the block of {length} tokens: choose a divisor.")
    return length


def _whole_blocks(spec: DiffusionSpec, prompt: int, length: int, options: DecodingOptions) -> int:
    """The canvas of a block-causal row: the model was trained on whole blocks, so the last one is decoded whole, unless
    blocks begin at the prompt's end (dllm cuts it there)."""
    block = _block_length(spec, options)
    if spec.block_origin == "prompt_end":
        return length
    whole = -(-length // block) * block
    return min(whole, max(spec.context_length, length)) if spec.context_length is not None else whole


def _stages(
    spec: DiffusionSpec,
    rule: Rule,
    width: int,
    slots: Sequence[int],
    origin: int,
    values: Mapping[str, Any],
    options: DecodingOptions,
    cache: str,
) -> tuple[tuple[Stage, ...], int]:
    """The stages of a bidirectional canvas, blocks from left to right, and the number of empty steps."""
    if not slots:
        return (), 0
    asked = values.get("block_length") if "block_length" in rule.uses else None
    length = min(asked or width - origin, width - origin)
    edges = [*range(origin, width, length), width]
    blocks = [(bisect_left(slots, a), bisect_left(slots, b)) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    shares: list[int | None] = [None] * len(blocks)
    if rule.schedule is not None:
        masks, total = len(slots), options.max_denoising_steps
        if total is None:
            total = max(spec.defaults.get("max_denoising_steps", masks), len(blocks))
        elif total < len(blocks):
            raise DiffusionError(
                f"max_denoising_steps {total} is less than the {len(blocks)} blocks of {length} tokens; each needs a "
                "step."
            )
        shares = [_share(rule, total, len(blocks), number) for number in range(len(blocks))]
    stages, empty = [], 0
    fresh = spec.logits == "shifted" and options.first_token != "stale"
    for number, (start, end) in enumerate(blocks):
        if start == end:
            continue
        block = slots[start], slots[end - 1] + 1
        window = _window(block, width, cache, fresh, options.vicinity or 0)
        taken = 0
        if options.first_token == "stale":
            # The first step of the block's schedule commits its first token.
            whole = start + 1 == end
            stages.append(Stage(start, start + 1, (), 0, width, block if whole else None, window))
            if whole:
                continue
            start, taken = start + 1, 1
        share = shares[number]
        if taken and share is not None and share <= taken:
            raise DiffusionError(
                f"max_denoising_steps leaves one step for a block of {length} tokens, and first_token stale takes it: "
                f"give at least {2 * len(blocks)}."
            )
        steps = None if share is None else share - taken
        counts, nothing = _counts(rule, end - start, steps, {**values, "block": length, "taken": taken})
        empty += nothing
        stages.append(Stage(start, end, counts, 0, width, block, window, refresh=not taken))
    return tuple(stages), empty


def _window(block: tuple[int, int], width: int, cache: str, fresh: bool, vicinity: int) -> tuple[int, int] | None:
    """The columns of a bidirectional canvas that the forwards of a block compute, but for its first."""
    if cache == "none":
        return None
    first = max(block[0] - fresh - vicinity, 0)
    return first, width if cache == "prefix" else min(block[1] + vicinity, width)


def _causal_stages(
    rule: Rule,
    canvas: Sequence[int],
    slots: Sequence[int],
    length: int,
    origin: int,
    values: Mapping[str, Any],
    sub_block: int | None,
    shifted: bool,
    cache: str,
) -> tuple[tuple[Stage, ...], int]:
    """The stages of a block-causal canvas. With sub-blocks (Fast-dLLM v2) and shifted logits the first token of a block
    comes from the last logits of the one before, in a forward of that block alone."""
    stages: list[Stage] = []
    if not slots:
        return (), 0
    empty, width = 0, len(canvas)
    block = slots[0] - (slots[0] - origin) % length
    while block < width:
        visible = min(block + length, width)
        part = sub_block or length
        for first in range(block, visible, part):
            start, end = bisect_left(slots, max(first, 0)), bisect_left(slots, min(first + part, visible))
            if start == end:
                continue
            done = (slots[start], slots[end - 1] + 1)
            if sub_block and shifted and slots[start] == block:
                whole = start + 1 == end
                stages.append(Stage(start, start + 1, (), block, block, done if whole else None))
                start += 1
                if whole:
                    continue
            steps = values.get("max_denoising_steps") or length
            counts, nothing = _counts(rule, end - start, steps, {**values, "block": length})
            empty += nothing
            window = (max(first, 0), min(first + part, visible)) if cache == "dual" else None
            stages.append(Stage(start, end, counts, max(block, 0), visible, done, window))
        block += length
    return tuple(stages), empty


def _share(rule: Rule, total: int, blocks: int, number: int) -> int:
    """The steps of one of several blocks."""
    if rule.steps_round_up:
        return -(-total // blocks)
    return share(total, blocks, number)


def _counts(rule: Rule, masks: int, steps: int | None, values: Mapping[str, Any]) -> tuple[tuple[float, ...], int]:
    """The numbers of a stage's steps that may commit something, and how many steps commit nothing."""
    if rule.schedule is None or steps is None:
        return (), 0
    counts = rule.schedule(masks, steps, values)
    kept = tuple(count for count in counts if count)
    return kept, len(counts) - len(kept)
