"""Commit rules: which masked positions a denoising step commits.

A rule is data: a confidence (a pure function over arrays), a schedule (plain numbers, made before decoding starts) and
a selection (another pure function). The loop in ``decode.py`` does the rest. A package adds one with an entry point in
the group ``mlx_dllm.unmasking`` whose object is a :class:`Rule` of the entry point's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..registry import Registry

if TYPE_CHECKING:
    import mlx.core as mx

    from .editing import Draft, Edited

    Confidence = Callable[["Candidates"], mx.array | tuple[mx.array, ...]]
    Select = Callable[[mx.array, mx.array, Mapping[str, mx.array]], mx.array]

Memory = tuple["mx.array", ...]
Schedule = Callable[[int, int, Mapping[str, Any]], list[Any]]


class Candidates(NamedTuple):
    """
    What a confidence is made of. The columns may be some of a step's: those of a long canvas come in chunks.

    Args:
        logits: [B, W, V] float32. Of a rule with ``filters`` those of the distribution that tokens are drawn from:
            divided by the temperature, minus infinity where top-k, top-p or min-p cut.
        tokens: those whose probability counts [B, W].
        noise: uniform in [0, 1) where the rule draws, else zero [B, W].
        values: the rule's own numeric options [B, 1], by name.
        mask_ids: the id of each row's mask [B, 1].
        memory: what the rule's ``memory`` made of these columns in this step.
        best: the most probable tokens that may be emitted [B, W], of rules that edit.
    """

    logits: mx.array
    tokens: mx.array
    noise: mx.array
    values: Mapping[str, mx.array]
    mask_ids: mx.array | None = None
    memory: tuple[mx.array, ...] = ()
    best: mx.array | None = None


class Ranking(NamedTuple):
    """
    What a ranking is made of; positions ascend from left to right.

    Args:
        measures: what ``confidence`` returned [B, W], of all columns.
        free: which columns may be committed [B, W].
        total: positions of the stage, committed ones too [B, 1].
        values: the rule's own numeric options [B, 1], by name.
    """

    measures: tuple[mx.array, ...]
    free: mx.array
    total: mx.array
    values: Mapping[str, mx.array]


class Doubts(NamedTuple):
    """
    What a revision is made of.

    Args:
        confidence: probability of the committed token where a mask stands in its place [B, W].
        committed: which columns were committed before this step [B, W].
        accepted: how many this step commits [B, 1].
        values: the rule's own numeric options [B, 1], by name.
    """

    confidence: mx.array
    committed: mx.array
    accepted: mx.array
    values: Mapping[str, mx.array]


def _never(_: Mapping[str, Any]) -> bool:
    return False


@dataclass(frozen=True)
class Rule:
    """
    Args:
        name: what ``--unmasking`` takes.
        about: one sentence for the documentation.
        confidence: ``(candidates) -> [B, c]``, or several measures of them, each column for itself; the highest are
            committed.
        rank: ``(ranking) -> [B, W]``, where that takes the neighbours too: what is ranked instead of the confidence.
        schedule: ``(masks, steps, values) -> one number per step``: how many to commit, or with ``select`` whatever
            that makes of it. Zeros are steps without a forward. ``values`` are the options the rule uses, and
            ``block``, the length of the block with its known tokens. None: as many steps as ``select`` takes.
        select: ``(confidences [B, W], best first, minus infinity where nothing can be committed; the step's number
            [B, 1], 1 without a schedule; values) -> how many to commit [B, 1]``. None commits the step's number.
        uses: options of ``DecodingOptions`` that only some rules take and this one does.
        defaults: values of those options where neither the caller nor the family says anything.
        steps_round_up: of ``steps`` for n blocks each block gets the quotient rounded up, instead of sharing them.
        draws: ``(values) -> bool``: whether the confidence reads ``noise``.
        drop_mask: remove the mask id from the logits before the confidences, instead of only never choosing it.
        memory: ``(logits [B, c, V], memory of the step before, values) -> arrays [B, c, ...]``, kept for the next step.
            The memory is empty before the first step, and zero of columns that are new.
        logits: ``(logits [B, c, V], memory, values) -> logits``, from which tokens and confidences are made instead.
        whole_canvas: without a cache, look at all masked positions and not only at those of the stage.
        revise: ``(doubts) -> [B, W]``, which committed positions to mask again; their probabilities come from masks in
            their stead (WINO), in the same forward. Tokens are released when their stage is complete.
        edit: ``(draft) -> Edited``: the whole step on a block instead of a selection of masks; ``confidence`` then is
            two measures, of the token a mask would get and of the best one. Tokens are released when their stage is
            done. See ``editing.py``.
        moves: its edits may be DELETE and INSERT, whose ids the checkpoint has to name.
        filters: the order in which ``top_p``, ``top_k`` and ``min_p`` act, after the temperature, also on the
            confidences; empty: they act in mlx-lm's way on the choice of tokens alone.
    """

    name: str
    about: str
    confidence: Confidence
    schedule: Schedule | None = None
    select: Select | None = None
    uses: frozenset[str] = field(default_factory=frozenset)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    steps_round_up: bool = False
    draws: Callable[[Mapping[str, Any]], bool] = _never
    drop_mask: bool = False
    filters: tuple[str, ...] = ()
    rank: Callable[[Ranking], mx.array] | None = None
    memory: Callable[[mx.array, Memory, Mapping[str, mx.array]], Memory] | None = None
    logits: Callable[[mx.array, Memory, Mapping[str, mx.array]], mx.array] | None = None
    whole_canvas: bool = False
    revise: Callable[[Doubts], mx.array] | None = None
    edit: Callable[[Draft], Edited] | None = None
    moves: bool = False


RULES: Registry[Rule] = Registry(
    "mlx_dllm.unmasking",
    "unmasking rule",
    Rule,
    {
        "low_confidence": "mlx_dllm_plugin.samplers.low_confidence:LOW_CONFIDENCE",
        "threshold": "mlx_dllm_plugin.samplers.threshold:THRESHOLD",
        "confidence_threshold": "mlx_dllm_plugin.samplers.threshold:CONFIDENCE_THRESHOLD",
        "factor": "mlx_dllm_plugin.samplers.factor:FACTOR",
        "fast_dllm_factor": "mlx_dllm_plugin.samplers.factor:FAST_DLLM_FACTOR",
        "eb": "mlx_dllm_plugin.samplers.entropy:EB",
        "klass": "mlx_dllm_plugin.samplers.klass:KLASS",
        "dinfer_threshold": "mlx_dllm_plugin.samplers.dinfer:DINFER_THRESHOLD",
        "hierarchy": "mlx_dllm_plugin.samplers.dinfer:HIERARCHY",
        "credit": "mlx_dllm_plugin.samplers.dinfer:CREDIT",
        "wino": "mlx_dllm_plugin.samplers.wino:WINO",
        "prophet": "mlx_dllm_plugin.samplers.prophet:PROPHET",
        "local_leap": "mlx_dllm_plugin.samplers.local_leap:LOCAL_LEAP",
        "joint_threshold": "mlx_dllm_plugin.samplers.editing:JOINT_THRESHOLD",
        "joint_threshold_indel": "mlx_dllm_plugin.samplers.editing:JOINT_THRESHOLD_INDEL",
        "random": "mlx_dllm_plugin.samplers.low_confidence:RANDOM",
        "a2d": "mlx_dllm_plugin.samplers.a2d:A2D",
        "mlx_dllm": "mlx_dllm_plugin.samplers.a2d:MLX_DLLM",
        "origin": "mlx_dllm_plugin.samplers.dream:ORIGIN",
        "maskgit_plus": "mlx_dllm_plugin.samplers.dream:MASKGIT_PLUS",
        "topk_margin": "mlx_dllm_plugin.samplers.dream:TOPK_MARGIN",
        "entropy": "mlx_dllm_plugin.samplers.dream:ENTROPY",
        "sequential": "mlx_dllm_plugin.samplers.sdar:SEQUENTIAL",
        "low_confidence_static": "mlx_dllm_plugin.samplers.sdar:LOW_CONFIDENCE_STATIC",
        "low_confidence_dynamic": "mlx_dllm_plugin.samplers.sdar:LOW_CONFIDENCE_DYNAMIC",
        "entropy_bounded": "mlx_dllm_plugin.samplers.sdar:ENTROPY_BOUNDED",
        "mdlm": "mlx_dllm_plugin.samplers.mdlm:MDLM",
    },
)


def users(option: str) -> list[str]:
    """The rules that take an option which not all take."""
    return [name for name in RULES.names() if option in RULES.get(name).uses]
