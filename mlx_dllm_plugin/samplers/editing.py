"""Rules that edit: a step fills masks and changes tokens of a block that stand already, until nothing changes.

LLaDA2.1's rule changes tokens in place. LLaDA2.2's may also delete one, which moves the rest of the block to the left
and leaves a mask at its end, or insert a mask before one, which moves the rest to the right and drops the block's last
token. Positions are those of one block of each row: numpy arrays [B, N], since a step of the loop waits for its tokens
once anyhow and a block is short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import Candidates, Rule
from .low_confidence import share

TRIES = 5  # to leave a state that was there before


class Draft(NamedTuple):
    """
    The block of each row as a forward saw it, and what that says of it.

    Args:
        tokens: what stands there [B, N]; anything where a mask is.
        masked, original: where a mask is, and which masks and tokens are there since the block began [B, N].
        there: which positions the row's block has [B, N].
        chosen, confidence: the token a mask would get and its probability at temperature 1 [B, N].
        best, certainty: the most probable token and its probability [B, N].
        chosen_text, best_text: the same without the two edit tokens [B, N].
        masks: how many masks the block began with [B, 1].
        step, post: forwards of the block before this one, and those of them that count for ``max_post_steps`` [B, 1].
        values: the rule's own numeric options [B, 1], by name.
        edit_token_ids: DELETE and INSERT, or None.
        seen: per row the blocks that were written before; a rule adds to it.
        redraw: ``(row, position, banned, sampled) -> token``, another than ``banned``.
        pick: ``(row, n) -> number below n``, at random.
    """

    tokens: np.ndarray
    masked: np.ndarray
    original: np.ndarray
    there: np.ndarray
    chosen: np.ndarray
    confidence: np.ndarray
    best: np.ndarray
    certainty: np.ndarray
    chosen_text: np.ndarray
    best_text: np.ndarray
    masks: np.ndarray
    step: np.ndarray
    post: np.ndarray
    values: Mapping[str, np.ndarray]
    edit_token_ids: tuple[int, int] | None
    seen: list[set[bytes]]
    redraw: Callable[[int, int, int, bool], int]
    pick: Callable[[int, int], int]


class Edited(NamedTuple):
    """
    The block of each row after the step.

    Args:
        tokens, masked, original: as in ``Draft`` [B, N].
        source: from which position of the block each token came [B, N]; -1 of a mask that is new.
        written: which tokens this forward wrote [B, N].
        post: as in ``Draft``, with this forward [B, 1].
        done: "" while the block goes on [B]; else ``stable`` (this forward saw the final block), ``budget`` (after
            ``max_post_steps``) or ``cap`` (after ``max_steps_per_block``).
    """

    tokens: np.ndarray
    masked: np.ndarray
    original: np.ndarray
    source: np.ndarray
    written: np.ndarray
    post: np.ndarray
    done: list[str]


def probabilities(candidates: Candidates) -> tuple[mx.array, mx.array]:
    """softmax(logits) of the tokens masks would get and of the best tokens: [B, W] each."""
    logits = candidates.logits
    best = candidates.tokens if candidates.best is None else candidates.best
    total = mx.logsumexp(logits, axis=-1)
    own = mx.take_along_axis(logits, candidates.tokens[..., None], axis=-1)[..., 0]
    return mx.exp(own - total), mx.exp(mx.take_along_axis(logits, best[..., None], axis=-1)[..., 0] - total)


def surest(draft: Draft, least: np.ndarray) -> np.ndarray:
    """Which masks are filled [B, N]: those whose confidence exceeds the threshold, or the ``least`` [B, 1] most
    confident ones where these are more; of equal confidences the leftmost."""
    sure = draft.masked & (draft.confidence > draft.values["threshold"])
    order = np.argsort(np.where(draft.masked, -draft.confidence, np.inf), axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    return np.where(sure.sum(axis=1, keepdims=True) >= least, sure, draft.masked & (rank < least))


def need(masks: np.ndarray, steps: np.ndarray, step: np.ndarray) -> np.ndarray:
    """What an even schedule fills in this step of a block that began with ``masks``; all of them after its end."""
    return np.where(step < steps, share(masks, steps, step), masks)


def edit_in_place(draft: Draft) -> Edited:
    """
    LLaDA2.1: masks whose confidence exceeds ``threshold`` get their token, at least ``num_to_transfer`` of them; a
    token is changed where another one has more than ``editing_threshold``. Ends when nothing is masked or changed, or
    after ``max_post_steps`` forwards without a mask.
    """
    values, masked = draft.values, draft.masked
    post = draft.post + ~masked.any(axis=1, keepdims=True)
    fill = surest(draft, values["num_to_transfer"])
    standing = draft.there & ~masked
    change = standing & (draft.confidence > values["editing_threshold"]) & (draft.chosen != draft.tokens)
    written = fill | change
    left = masked & ~fill
    stable = ~masked.any(axis=1) & ~change.any(axis=1)
    spent = ~left.any(axis=1) & (post + 1 > values["max_post_steps"])[:, 0]
    return Edited(
        tokens=np.where(written, draft.chosen, draft.tokens),
        masked=left,
        original=draft.original,
        source=np.broadcast_to(np.arange(masked.shape[1]), masked.shape),
        written=written,
        post=post,
        done=["stable" if a else "budget" if b else "" for a, b in zip(stable, spent, strict=True)],
    )


def edit_with_moves(draft: Draft) -> Edited:
    """
    LLaDA2.2, a step of one block: masks are filled as an even schedule over ``max_denoising_steps`` asks for, counting
    masks that edits made on top, or more where more exceed ``threshold``; a token is changed where the best one is
    another with more than ``editing_threshold``, which may be DELETE or INSERT. A block that was written before is
    left by another token at one position. Ends when nothing is masked or changed; the ``max_post_steps``-th forward
    without an original mask, and the ``max_steps_per_block``-th of all, fill every mask and write no edit token.
    """
    values, masked, original = draft.values, draft.masked, draft.original
    ids = draft.edit_token_ids
    assert ids is not None  # see plan.py
    total = masked.sum(axis=1, keepdims=True)
    unresolved = (original & masked).sum(axis=1, keepdims=True)
    post = np.where(unresolved > 0, 0, draft.post + 1)
    steps = values["max_denoising_steps"].astype(int)
    least = np.where(draft.step < steps, need(draft.masks, steps, draft.step) + total - unresolved, total)
    fill = surest(draft, least) if total.any() else masked
    change = draft.there & ~masked & (draft.certainty > values["editing_threshold"]) & (draft.best != draft.tokens)

    most = values["max_post_steps"]
    covered = ~(original & masked & ~fill).any(axis=1, keepdims=True)
    capped = draft.step + 1 >= values["max_steps_per_block"]
    final = np.where(most > 0, post >= most, (unresolved > 0) & covered) | capped
    fill = np.where(final, masked, fill)
    chosen = np.where(final & np.isin(draft.chosen, ids), draft.chosen_text, draft.chosen)
    best = np.where(final & np.isin(draft.best, ids), draft.best_text, draft.best)
    new = np.where(fill, chosen, np.where(change, best, draft.tokens))
    for row in range(len(new)):
        if not final[row, 0] and (fill[row].any() or change[row].any()):
            _leave(draft, row, new, fill)
        draft.seen[row].add(_state(draft, row, new, fill))

    tokens, still, original, source = edit_scan(new, masked & ~fill, draft.tokens, masked, original, draft.there, ids)
    full = ~still.any(axis=1)
    stable = full & ~masked.any(axis=1) & ~((tokens != draft.tokens) & draft.there).any(axis=1)
    spent = full & (post + 1 > most)[:, 0]
    ends = zip(stable, spent, capped[:, 0], strict=True)
    from_ = np.maximum(source, 0)
    own = tokens == np.take_along_axis(new, from_, axis=1)  # what INSERT moves to the right is not
    return Edited(
        tokens=tokens,
        masked=still,
        original=original,
        source=source,
        written=own & np.take_along_axis(fill | change, from_, axis=1) & (source >= 0) & ~still,
        post=post,
        done=["stable" if a else "budget" if b else "cap" if c else "" for a, b, c in ends],
    )


def _state(draft: Draft, row: int, new: np.ndarray, fill: np.ndarray) -> bytes:
    """A block as it was written, before edit tokens act."""
    masked = draft.masked[row] & ~fill[row]
    return np.where(masked, -1, new[row])[draft.there[row]].tobytes()


def _leave(draft: Draft, row: int, new: np.ndarray, fill: np.ndarray) -> None:
    """Write another token at a changed position, chosen at random, while the block is one that was written before."""
    for _ in range(TRIES):
        if _state(draft, row, new, fill) not in draft.seen[row]:
            return
        changed = np.flatnonzero(fill[row] | (draft.there[row] & ~draft.masked[row] & (new[row] != draft.tokens[row])))
        if not len(changed):
            return
        at = int(changed[draft.pick(row, len(changed))])
        new[row, at] = draft.redraw(row, at, int(new[row, at]), bool(fill[row, at]))


def edit_scan(
    new: np.ndarray,
    still: np.ndarray,
    old: np.ndarray,
    masked: np.ndarray,
    original: np.ndarray,
    there: np.ndarray,
    edit_token_ids: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """
    Let DELETE and INSERT act, from left to right at a fixed length: DELETE leaves nothing; INSERT leaves a mask and
    what stood there before this step; what goes beyond the block's end is dropped, what is missing there is masked.

    Args:
        new, still: the block as written, and where it is masked [B, N].
        old, masked: the block before, and where it was masked [B, N].
        original: which masks and tokens are there since the block began [B, N].
        there: which positions the row's block has [B, N], from the left.

    Returns:
        tokens, masked, original, source: as in :class:`Edited` [B, N].
    """
    delete, insert = (there & ~still & (new == token) for token in edit_token_ids)
    length = there.sum(axis=1, keepdims=True)
    size = np.where(delete | ~there, 0, 1 + insert)
    at = np.cumsum(size, axis=1) - size + insert
    tokens, hole = np.zeros_like(new), there.copy()
    flags, source = np.zeros_like(original), np.full(new.shape, -1)
    kept_mask = np.zeros_like(masked)
    row, column = np.nonzero((size > 0) & (at < length))
    target = at[row, column]
    back = insert[row, column]
    tokens[row, target] = np.where(back, old[row, column], new[row, column])
    kept_mask[row, target] = np.where(back, masked[row, column], still[row, column])
    flags[row, target] = original[row, column]
    source[row, target] = column
    hole[row, target] = False
    return tokens, hole | kept_mask, flags, source


JOINT_THRESHOLD = Rule(
    name="joint_threshold",
    about="LLaDA2.1: in each block, every mask whose confidence exceeds threshold, at least num_to_transfer, and every "
    "token for which another one exceeds editing_threshold, until nothing changes",
    confidence=probabilities,
    edit=edit_in_place,
    uses=frozenset({"threshold", "editing_threshold", "max_post_steps", "num_to_transfer", "block_length"}),
    defaults={"threshold": 0.95, "editing_threshold": 0.9, "max_post_steps": 16, "num_to_transfer": 1},
)
JOINT_THRESHOLD_INDEL = Rule(
    name="joint_threshold_indel",
    about="LLaDA2.2: as joint_threshold, with at least an even schedule of max_denoising_steps, and with edits that "
    "delete a token or insert one",
    confidence=probabilities,
    edit=edit_with_moves,
    moves=True,
    uses=frozenset(
        {
            "threshold",
            "editing_threshold",
            "max_post_steps",
            "max_denoising_steps",
            "max_steps_per_block",
            "block_length",
        }
    ),
    defaults={
        "threshold": 0.5,
        "editing_threshold": 0.0,
        "max_post_steps": 16,
        "max_denoising_steps": 32,
        "max_steps_per_block": 1000,
    },
)
