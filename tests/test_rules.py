"""The rules of Dream, SDAR and dllm, the threshold in sub-blocks, guidance and what else changes confidences: against
plain loops and tiny oracles in float64 written here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dllm_plugin import DecodingOptions, DecodingResult, DiffusionError, decode
from mlx_dllm_plugin.batch import Batch
from mlx_dllm_plugin.caches import AttentionPolicy
from mlx_dllm_plugin.families import a2d
from mlx_dllm_plugin.options import table
from mlx_dllm_plugin.plan import plan, profiled
from mlx_dllm_plugin.samplers import RULES, Candidates, Ranking, Rule
from mlx_dllm_plugin.spec import DiffusionSpec
from tests.models import CONTEXT, EOS, MASK, VOCAB, stock_model
from tests.test_decode import chi_square
from tests.test_samplers import PICKS

KINDS: dict[str, dict[str, Any]] = {
    "bidirectional in_place": {},
    "bidirectional shifted": {"logits": "shifted"},
    "block_causal in_place": {"attention": "block_causal"},
    "block_causal shifted": {"attention": "block_causal", "logits": "shifted"},
    "block_causal in_place prompt_end": {"attention": "block_causal", "block_origin": "prompt_end"},
    "block_causal shifted prompt_end": {"attention": "block_causal", "logits": "shifted", "block_origin": "prompt_end"},
}
ANY = "bidirectional in_place"
CAUSAL = [kind for kind in KINDS if kind.startswith("block_causal")]
BLOCK = 4
PROMPT = [9, 2, 33, 4, 17]
INF = math.inf
DREAM = ("top_p", "top_k", "min_p")
SDAR = ("top_k", "top_p", "min_p")


def spec_of_kind(kind: str, **changes: Any) -> DiffusionSpec:
    shape = {"logits": "in_place", "attention": "bidirectional", "block_origin": "start", **KINDS[kind]}
    causal = shape["attention"] == "block_causal"
    values: dict[str, Any] = dict(
        family="tiny",
        **shape,
        canvas="growing" if causal else "fixed",
        unmasking="low_confidence",
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        context_length=CONTEXT,
        defaults={"max_tokens": 8, **({"block_length": BLOCK} if causal else {})},
    )
    return DiffusionSpec(**{**values, **changes})


@lru_cache
def weights(model_type: str) -> Any:
    """mlx-lm's own model; its biases come from mlx's global state."""
    mx.random.seed(0)
    return stock_model(model_type)


def diffusion_model(kind: str, model_type: str = "qwen2", **changes: Any) -> Any:
    """A model decoded in this way; ``own`` is mlx-lm's, and ``shapes`` are those of the ids of every forward."""
    own, shapes = weights(model_type), []

    def hidden(_: Any, ids: mx.array, cache: list[Any]) -> mx.array:
        shapes.append(ids.shape)
        assert len(shapes) < 3000, "decoding does not end"
        return a2d.decoder(own, ids, cache)

    return SimpleNamespace(
        own=own,
        shapes=shapes,
        layers=own.layers,
        diffusion_spec=spec_of_kind(kind, **changes),
        diffusion_family=a2d.family("tiny", hidden=hidden, head=lambda _, states: a2d.either_head(own, states)),
    )


def scripted(logits: Any, kind: str = "bidirectional in_place", **changes: Any) -> Any:
    """A model whose logits are these [V] everywhere, or [T, V] by position, whatever it reads."""
    table = np.asarray(logits, dtype=np.float32)

    def hidden(_: Any, ids: mx.array, cache: list[Any]) -> mx.array:
        rows = table[: ids.shape[1]] if table.ndim == 2 else table
        return mx.broadcast_to(mx.array(rows), (*ids.shape, table.shape[-1]))

    changes = {"vocab_size": table.shape[-1], "context_length": None, "eos_token_ids": (), **changes}
    return SimpleNamespace(
        layers=[],
        diffusion_spec=spec_of_kind(kind, **{"mask_token_id": table.shape[-1] - 1, **changes}),
        diffusion_family=a2d.family("scripted", hidden=hidden, head=lambda model, states: states),
    )


def as_lists(result: DecodingResult) -> list[tuple[list[int], list[int]]]:
    return [(list(commit.positions), list(commit.tokens)) for commit in result.commits]


# Oracles.


def softmax(logits: np.ndarray) -> np.ndarray:
    exponent = np.exp(logits - logits.max(-1, keepdims=True))
    return exponent / exponent.sum(-1, keepdims=True)


def dream_oracle(masks: int, steps: int, block: int, taken: int = 0, eps: float = 1e-3) -> list[int]:
    """Dream's loop over its times, whose numbers are float32: int(n * (1 - s / t)), in the last step all. Of the steps
    the first ones may have gone before."""
    times = [np.float32(1 + (eps - 1) * i / steps) for i in range(steps + 1)]
    counts: list[int] = []
    for i in range(taken, steps):
        n = np.float32(masks - sum(counts))
        counts.append(int(n * (1 - times[i + 1] / times[i])) if i < steps - 1 else int(n))
    return counts


def dllm_oracle(masks: int, steps: int, block: int, cosine: bool = False) -> list[int]:
    """dllm's loop: round(n * (1 - (1 - alpha(s)) / (1 - alpha(t)))), half to even, of a share in float32."""

    def masked(step: int) -> np.float32:
        time = np.float32((steps - step) / steps)
        alpha = 1 - np.cos(np.float32(math.pi / 2) * (1 - time)) if cosine else 1 - time
        return np.float32(1 - alpha)

    left, counts = masks, []
    for step in range(steps):
        number = min(round(left * (1 - float(masked(step + 1) / masked(step)))), left)
        counts.append(number)
        left -= number
    return counts


def sdar_oracle(masks: int, steps: int, block: int) -> list[int]:
    """SDAR's schedule of a whole block, dealt out one by one, as long as there are masks."""
    counts = [0] * steps
    for number in range(max(block, masks)):
        counts[number % steps] += 1
    for step in range(steps):
        counts[step] = min(counts[step], masks)
        masks -= counts[step]
    return counts


def llada_oracle(masks: int, steps: int, block: int) -> list[int]:
    return [sum(number % steps == step for number in range(masks)) for step in range(steps)]


def probability(logits: np.ndarray, token: int, place: int) -> float:
    return softmax(logits)[token]


def margin(logits: np.ndarray, token: int, place: int) -> float:
    best, second = sorted(softmax(logits), reverse=True)[:2]
    return best - second


def dream_entropy(logits: np.ndarray, token: int, place: int) -> float:
    return sum(p * math.log(p + 1e-10) for p in softmax(logits))


def sdar_entropy(logits: np.ndarray, token: int, place: int) -> float:
    return sum(p * math.log(p) for p in softmax(logits) if p > 0)


def leftmost(logits: np.ndarray, token: int, place: int) -> float:
    return -place


def the_number(confidences: list[float], number: float) -> int:
    return int(number)


def above(threshold: float) -> Callable[[list[float], float], int]:
    return lambda confidences, number: max(sum(c > threshold for c in confidences), 1)


def dynamic(threshold: float) -> Callable[[list[float], float], int]:
    def select(confidences: list[float], number: float) -> int:
        sure = [c for c in confidences if c > threshold]
        return len(sure) if len(sure) >= number else int(number)

    return select


def bounded(bound: float) -> Callable[[list[float], float], int]:
    def select(confidences: list[float], number: float) -> int:
        for n in range(len(confidences), 1, -1):
            if -sum(confidences[:n]) < bound:
                return n
        return 1

    return select


def even_and_then_one(masks: int, steps: int, block: int) -> list[int]:
    """LLaDA's schedule, and more steps of one, for a rule that may stay behind it."""
    return [*[number for number in llada_oracle(masks, steps, block) if number], *[1] * masks]


def entropy_in_nats(logits: np.ndarray) -> float:
    return -sdar_entropy(logits, 0, 0)


def logit_gap(logits: np.ndarray) -> float:
    best, second = sorted(logits, reverse=True)[:2]
    return best - second


def prefers_the_mask(logits: np.ndarray) -> float:
    return float(logits.argmax() == MASK)


@dataclass(frozen=True)
class Oracle:
    """A rule in plain Python, and the options it is tested with. With ``pick`` that says which positions are committed,
    by their confidences and the ``second`` measure of their logits."""

    confidence: Callable[[np.ndarray, int, int], float]
    schedule: Callable[[int, int, int], list[int]] | None = None
    select: Callable[[list[float], float], int] = the_number
    filters: tuple[str, ...] = ()
    steps_round_up: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    pick: str | None = None
    second: Callable[[np.ndarray], float] | None = None

    def picker(self, masks: int, steps: int) -> Callable[..., set[int]] | None:
        """What decides in one stage."""
        if self.pick is None:
            return None
        values = {**RULES.get(self.pick).defaults, **self.options}
        return PICKS[self.pick](values, llada_oracle(masks, steps, 0))


ORACLES: dict[str, tuple[str, Oracle]] = {
    "maskgit_plus": ("maskgit_plus", Oracle(probability, dream_oracle, filters=DREAM)),
    "topk_margin": ("topk_margin", Oracle(margin, dream_oracle, filters=DREAM)),
    "entropy": ("entropy", Oracle(dream_entropy, dream_oracle, filters=DREAM)),
    "sequential": ("sequential", Oracle(leftmost, sdar_oracle, filters=SDAR)),
    "low_confidence_static": ("low_confidence_static", Oracle(probability, sdar_oracle, filters=SDAR)),
    "low_confidence_dynamic": (
        "low_confidence_dynamic",
        Oracle(probability, sdar_oracle, dynamic(0.2), SDAR, options={"threshold": 0.2}),
    ),
    "low_confidence_dynamic at its default": (
        "low_confidence_dynamic",
        Oracle(probability, sdar_oracle, dynamic(0.85), SDAR),
    ),
    "entropy_bounded": (
        "entropy_bounded",
        Oracle(sdar_entropy, None, bounded(5.5), SDAR, options={"entropy_bound": 5.5}),
    ),
    "entropy_bounded at its default": ("entropy_bounded", Oracle(sdar_entropy, None, bounded(0.35), SDAR)),
    "mdlm": ("mdlm", Oracle(probability, dllm_oracle, steps_round_up=True)),
    "mdlm cosine": (
        "mdlm",
        Oracle(
            probability,
            lambda masks, steps, block: dllm_oracle(masks, steps, block, cosine=True),
            steps_round_up=True,
            options={"alpha_schedule": "cosine"},
        ),
    ),
    "threshold": ("threshold", Oracle(probability, None, above(0.2), options={"threshold": 0.2})),
    "low_confidence": ("low_confidence", Oracle(probability, llada_oracle)),
}


def picked(rule: str, second: Callable[[np.ndarray], float] | None = None, **options: Any) -> tuple[str, Oracle]:
    """A rule that PICKS has, with options at which these models commit some positions together and some not."""
    scheduled = {"confidence_threshold": even_and_then_one, "prophet": llada_oracle}.get(rule)
    filters = DREAM if rule == "confidence_threshold" else ()
    return rule, Oracle(probability, scheduled, filters=filters, options=options, pick=rule, second=second)


ORACLES |= {
    "confidence_threshold": picked("confidence_threshold", threshold=0.2),
    "factor": picked("factor", factor=2.5),
    "fast_dllm_factor": picked("fast_dllm_factor", factor=2.5),
    "eb": picked("eb", entropy_in_nats, entropy_bound=5.5),
    "dinfer_threshold": picked("dinfer_threshold", prefers_the_mask, threshold=0.2),
    "hierarchy": picked("hierarchy", threshold=0.25, low_threshold=0.1),
    "prophet": picked("prophet", logit_gap, gap=1.2),
    "local_leap": picked("local_leap", threshold=0.25, relaxed_threshold=0.15, radius=1),
}


def keep(logits: np.ndarray, filters: Sequence[str], temp: float = 0, **values: float) -> np.ndarray:
    """Logits [V] over the temperature, each filter on what the one before left; of equal ones the first are best."""
    logits = logits / (temp or 1)
    for name in filters:
        value, p = values.get(name) or 0, softmax(logits)
        order = np.argsort(-p, kind="stable")
        drop = np.zeros(len(p), dtype=bool)
        if name == "top_p" and 0 < value < 1:
            drop[order[np.cumsum(p[order]) - p[order] >= value]] = True
        elif name == "top_k" and value:
            drop[order[int(value) :]] = True
        elif name == "min_p":
            drop = p < value * p.max()
        logits = np.where(drop, -INF, logits)
    return logits


class Visible(AttentionPolicy):
    """Attention to exactly these pairs [T, T]; nothing is kept."""

    def __init__(self, pairs: np.ndarray):
        self.pairs = mx.array(pairs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self.pairs


def predictions(model: Any, canvas: list[int], block: int, origin: int) -> np.ndarray:
    """What the model says of each position [T, V], with shifted logits of one more; everything recomputed."""
    spec, at = model.diffusion_spec, np.arange(len(canvas))
    number = (at - origin) // block if spec.attention == "block_causal" else at * 0
    cache = [Visible(number[None] <= number[:, None])] * len(model.layers)
    logits = np.array(model.own(mx.array([canvas]), cache)[0]).astype(np.float64)
    return np.concatenate([logits[:1], logits]) if spec.logits == "shifted" else logits


@dataclass
class Plain:
    canvas: list[int]
    commits: list[tuple[list[int], list[int]]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    empty: int = 0


def plain(
    model: Any,
    prompt: list[int],
    masks: int,
    oracle: Oracle,
    *,
    steps: int | None = None,
    block: int | None = None,
    sub_block: int | None = None,
    cfg: float = 0,
    keep_tokens: Sequence[int] = (),
    suppressed: Sequence[int] = (),
    late: Sequence[int] = (),
    **filters: float,
) -> Plain:
    """
    Decode greedily in a plain loop, without a cache.

    Args:
        block: of a bidirectional canvas None for all; ``steps`` are shared among blocks there, else of each block.
    """
    spec, start = model.diffusion_spec, len(prompt)
    causal = spec.attention == "block_causal"
    length = block or (BLOCK if causal else masks)
    origin = 0 if spec.block_origin == "start" and causal else start
    width = start + masks
    if causal and origin == 0:
        width = -(-width // length) * length
    canvas, masked = [*prompt, *[MASK] * (width - start)], set(range(start, width))
    result = Plain(canvas)

    def commit(free: list[int], visible: int, number: float, pick: Callable[..., set[int]] | None) -> list[int]:
        logits = predictions(model, canvas[:visible], length, origin)
        if cfg:
            hidden = [MASK if i < start and t not in keep_tokens else t for i, t in enumerate(canvas[:visible])]
            without = predictions(model, hidden, length, origin)
            logits = without + (cfg + 1) * (logits - without)
        logprobs = np.log(softmax(logits))
        logits[:, list(suppressed)] = -INF
        allowed = logits.copy()
        allowed[:, MASK] = -INF
        if filters:
            logits = np.array([keep(row, oracle.filters, **filters) for row in logits])
        scored = logits.argmax(-1)
        logits[:, list(late)] = -INF
        confidence = {i: oracle.confidence(logits[i], scored[i], i) for i in free}
        order = sorted(free, key=lambda i: (-confidence[i], i))
        if pick is not None:
            chosen = sorted(pick(confidence, {i: oracle.second(logits[i]) if oracle.second else 0.0 for i in free}))
        else:
            chosen = sorted(order[: oracle.select([confidence[i] for i in order], number)])
        tokens = allowed.argmax(-1)[chosen].tolist()
        for i, token in zip(chosen, tokens, strict=True):
            canvas[i] = token
        masked.difference_update(chosen)
        result.commits.append((chosen, tokens))
        result.logprobs.append(logprobs[chosen, tokens].tolist())
        return chosen

    first = start if not causal else start - (start - origin) % length
    blocks = [(a, min(a + length, width)) for a in range(first, width, length)]
    for number, (a, b) in enumerate(blocks):
        own = steps or masks
        if causal:
            own = steps or length
        elif oracle.steps_round_up:
            own = -(-own // len(blocks))
        else:
            own = own // len(blocks) + (number < own % len(blocks))
        for c in range(a, b, sub_block or length):
            free = sorted(masked & set(range(c, min(c + (sub_block or length), b))))
            if sub_block and spec.logits == "shifted" and free[:1] == [a]:
                commit([a], a, 1, oracle.picker(1, 1))
                free = free[1:]
            if not free:
                continue
            numbers = oracle.schedule(len(free), own, length) if oracle.schedule else [1] * len(free)
            pick = oracle.picker(len(free), own)
            for n in numbers:
                if not n:
                    result.empty += 1
                elif free:
                    done = commit(free, b if causal else width, n, pick)
                    free = [i for i in free if i not in done]
    return result


def check(result: DecodingResult, expected: Plain, prompt: list[int], masks: int) -> None:
    """The output's commits are those of the plain loop, which goes on to the end of the last block."""
    assert as_lists(result) == expected.commits[: result.nfe]
    for commit, logprobs in zip(result.commits, expected.logprobs, strict=False):
        assert [entry.token for entry in commit.logprobs] == pytest.approx(logprobs, abs=1e-3)
    assert result.tokens == expected.canvas[len(prompt) : len(prompt) + masks]
    assert result.canvas == expected.canvas[: len(result.canvas)] or result.nfe < len(expected.commits)
    assert result.empty_steps == expected.empty


# Schedules.


def schedule_of(rule: str, masks: int, steps: int, **values: Any) -> list[Any]:
    schedule = RULES.get(rule).schedule
    assert schedule is not None
    return schedule(masks, steps, {"eps": 1e-3, "alpha_schedule": "linear", **values})


@pytest.mark.parametrize("rule", ["maskgit_plus", "topk_margin", "entropy"])
def test_dreams_schedule_equals_its_loop(rule: str) -> None:
    for masks in range(1, 49):
        for steps in range(1, 49):
            assert schedule_of(rule, masks, steps) == dream_oracle(masks, steps, masks), (masks, steps)


@pytest.mark.parametrize("rule", ["maskgit_plus", "origin"])
def test_steps_that_are_taken_leave_the_rest_of_the_schedule(rule: str) -> None:
    """The first step of a block may have committed one token already (first_token stale): the times are those of all
    steps, the masks those that are left."""
    for masks in (1, 2, 7, 20, 48):
        for steps in (1, 2, 3, 8, 21, 60):
            for taken, eps in ((1, 1e-3), (1, 0.4), (2, 1e-3)):
                found = schedule_of(rule, masks, steps, taken=taken, eps=eps)
                assert len(found) == steps
                if rule == "origin":
                    assert found == schedule_of(rule, masks, steps + taken, eps=eps)[taken:]
                else:
                    expected = dream_oracle(masks, steps + taken, masks, taken, eps)
                    assert found == expected, (masks, steps, taken)
    assert schedule_of("maskgit_plus", 20, 3, taken=1, eps=0.4) == [3, 3, 14]
    assert schedule_of("maskgit_plus", 20, 3, eps=0.4) == [3, 4, 13]


def test_dreams_schedule_has_the_steps_for_nothing_that_dream_has() -> None:
    """Seen in runs of Dream itself: 12 masks in 24 steps begin with 13 empty ones."""
    assert schedule_of("entropy", 12, 24)[:14] == [0] * 13 + [1]
    assert schedule_of("entropy", 16, 16) == [0] + [1] * 14 + [2]
    assert schedule_of("entropy", 5, 1) == [5]
    assert schedule_of("entropy", 9, 2, eps=0.0) == [4, 5] and schedule_of("entropy", 100, 2, eps=0.5) == [25, 75]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_dllms_schedule_equals_its_loop(schedule: str) -> None:
    for masks in range(1, 49):
        for steps in range(1, 49):
            found = schedule_of("mdlm", masks, steps, alpha_schedule=schedule)
            assert found == dllm_oracle(masks, steps, masks, schedule == "cosine"), (masks, steps)


def test_dllms_schedule_equals_its_runs() -> None:
    """Seen in runs of dllm itself. Of 6.5 masks 6 are taken, of 2.5 two, of 1.5 two."""
    assert schedule_of("mdlm", 32, 5) == [6, 6, 7, 6, 7]
    assert schedule_of("mdlm", 16, 7) == [2, 2, 2, 2, 3, 2, 3]
    assert schedule_of("mdlm", 10, 6) == [2, 2, 2, 1, 2, 1]
    assert schedule_of("mdlm", 8, 3) == [3, 2, 3]
    cosine = [n for n in schedule_of("mdlm", 32, 12, alpha_schedule="cosine") if n]
    assert cosine == [1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4]


def test_dllms_share_is_a_float32_that_decides_what_is_halfway() -> None:
    """3 of 4 masks are left with 2 of 3 steps to go: half of them is 1.5, and dllm takes 1."""
    assert schedule_of("mdlm", 4, 3) == [1, 1, 2]
    torch = pytest.importorskip("torch")
    for schedule, alpha in (("linear", lambda t: 1 - t), ("cosine", lambda t: 1 - torch.cos(math.pi / 2 * (1 - t)))):
        for masks, steps in ((4, 3), (5, 3), (10, 3), (3, 8), (20, 8), (37, 8), (31, 6), (64, 24), (63, 40)):
            left, counts = masks, []
            for step in range(steps):
                t, s = (torch.tensor((steps - step - i) / steps) for i in (0, 1))
                share = 1 - ((1 - alpha(s)) / (1 - alpha(t))).item()
                counts.append(min(int(torch.round(torch.tensor(left, dtype=torch.float64) * share)), left))
                left -= counts[-1]
            assert schedule_of("mdlm", masks, steps, alpha_schedule=schedule) == counts


@pytest.mark.parametrize("rule", ["sequential", "low_confidence_static", "low_confidence_dynamic"])
def test_sdars_schedule_is_that_of_a_whole_block_clipped_to_the_masks(rule: str) -> None:
    for block in (1, 2, 3, 4, 7, 8, 16):
        for masks in range(1, block + 1):
            for steps in range(1, 2 * block + 2):
                found = schedule_of(rule, masks, steps, block=block)
                assert found == sdar_oracle(masks, steps, block), (masks, steps, block)
    assert schedule_of(rule, 3, 2, block=4) == [2, 1] and schedule_of(rule, 2, 2, block=4) == [2, 0]


def counts_masks(rule: Rule) -> bool:
    """The numbers of its schedule are commits, and not whatever its selection makes of them."""
    return rule.schedule is not None and rule.name not in ("origin", "confidence_threshold")


@pytest.mark.parametrize("rule", [rule.name for rule in RULES.builtin() if counts_masks(rule)])
def test_every_schedule_commits_every_mask_once(rule: str) -> None:
    for masks, steps in ((1, 1), (1, 9), (7, 3), (64, 64), (100, 7), (7, 100), (513, 64), (64, 513)):
        for block in (masks, masks + 5):
            for alpha in ("linear", "cosine"):
                counts = schedule_of(rule, masks, steps, block=block, alpha_schedule=alpha)
                assert len(counts) == steps and sum(counts) == masks and min(counts) >= 0
                assert all(isinstance(count, int) for count in counts)


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.5])
def test_the_shares_of_origin_are_those_of_dreams_times(eps: float) -> None:
    for steps in (1, 2, 3, 16, 100):
        times = [1 + (eps - 1) * i / steps for i in range(steps)]
        expected = [*(1 - s / t for t, s in zip(times[:-1], times[1:], strict=True)), 1.0]
        assert schedule_of("origin", 10, steps, eps=eps) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["bidirectional in_place", "block_causal in_place"])
@pytest.mark.parametrize(
    ("rule", "steps", "empty"),
    [("entropy", 24, 17), ("maskgit_plus", 9, 2), ("sequential", 11, 3), ("mdlm", 20, 12), ("mdlm", 3, 0)],
)
def test_empty_steps_are_counted_and_cost_no_forward(kind: str, rule: str, steps: int, empty: int) -> None:
    model = diffusion_model(kind)
    options = DecodingOptions(unmasking=rule, max_tokens=8, max_denoising_steps=steps, stop_at_eos=False)
    options = replace(options, block_length=8 if kind in CAUSAL else None)
    result = decode(model, [5] * 8, options)
    assert (result.empty_steps, result.nfe) == (empty, steps - empty)
    assert ORACLES[rule][1].schedule(8, steps, 8).count(0) == empty
    assert len(model.shapes) == result.nfe + result.prefills


# Confidences and selections as functions.


def random_logits(shape: tuple[int, ...], seed: int, cut: float = 0.0) -> np.ndarray:
    """Random logits, a share of which is minus infinity."""
    random = np.random.default_rng(seed)
    logits = 3 * random.standard_normal(shape)
    logits[random.random(shape) < cut] = -INF
    logits[..., 0] = 1.0
    return logits.astype(np.float32)


def candidates(logits: np.ndarray, tokens: np.ndarray, mask: int = 0) -> Candidates:
    zeros = mx.zeros((logits.shape[0], 1))
    ids = mx.full(zeros.shape, mask, dtype=mx.int32)
    return Candidates(mx.array(logits), mx.array(tokens), mx.zeros(tokens.shape), {"alg_temp": zeros}, ids)


def measures(rule: str, seen: Candidates) -> list[np.ndarray]:
    measured = RULES.get(rule).confidence(seen)
    return [np.array(one) for one in (measured if isinstance(measured, tuple) else (measured,))]


@pytest.mark.parametrize("rule", sorted({rule for rule, _ in ORACLES.values()} - {"sequential"}))
@pytest.mark.parametrize("cut", [0.0, 0.6])
def test_confidences_equal_their_formulas(rule: str, cut: float) -> None:
    logits = random_logits((3, 5, 11), 1, cut)
    tokens = np.random.default_rng(2).integers(0, 11, (3, 5))
    found, *others = measures(rule, candidates(logits, tokens, mask=4))
    confidence, second = ORACLES[rule][1].confidence, ORACLES[rule][1].second
    assert len(others) == (second is not None)
    expected = [
        [confidence(row.astype(np.float64), token, i) for i, (row, token) in enumerate(zip(*pair, strict=True))]
        for pair in zip(logits, tokens, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    if second is prefers_the_mask:
        assert (others[0] == (tokens == 4)).all() and others[0].any()
    elif second is not None:
        sums = [[second(row.astype(np.float64)) for row in rows] for rows in logits]
        np.testing.assert_allclose(others[0], sums, rtol=1e-4, atol=1e-6)


def test_sequential_ranks_the_leftmost_highest() -> None:
    rank = RULES.get("sequential").rank
    assert rank is not None
    free = mx.array([[True] * 5, [False, True] * 2 + [False]])
    ranked = rank(Ranking((mx.zeros((2, 5)),), free, mx.full((2, 1), 5), {}))
    assert ranked.shape == (2, 5) and (np.diff(np.array(ranked), axis=1) < 0).all()


def test_one_token_left_is_certain() -> None:
    logits = np.full((1, 1, 6), -INF, dtype=np.float32)
    logits[..., 3] = -20
    tokens = np.array([[3]])
    certain = {"maskgit_plus": 1, "topk_margin": 1, "entropy": 0, "low_confidence_static": 1, "entropy_bounded": 0}
    for rule, value in certain.items():
        assert measures(rule, candidates(logits, tokens))[0].item() == pytest.approx(value, abs=1e-6)
    for rule, second in (("eb", 0.0), ("prophet", INF), ("dinfer_threshold", False)):
        assert [one.item() for one in measures(rule, candidates(logits, tokens))] == [1.0, second]


def test_equal_best_tokens_have_no_margin() -> None:
    logits = np.array([[[1.0, 3.0, 3.0, 0.0]]], dtype=np.float32)
    assert RULES.get("topk_margin").confidence(candidates(logits, np.array([[1]]))).item() == 0


@pytest.mark.parametrize("rule", ["threshold", "low_confidence_dynamic", "entropy_bounded"])
def test_selections_equal_their_loops(rule: str) -> None:
    random = np.random.default_rng(5)
    select = RULES.get(rule).select
    assert select is not None
    for case in range(40):
        free = int(random.integers(1, 8))
        confidence = -np.sort(-random.random((1, 8)).astype(np.float32))
        if rule == "entropy_bounded":
            confidence = confidence - 1
        confidence[:, free:] = -INF
        value = float(random.choice([0.0, 0.3, 0.6, 0.95, 2.0]))
        number = int(random.integers(1, 4))
        values = {name: mx.array([[value]]) for name in ("threshold", "entropy_bound")}
        found = select(mx.array(confidence), mx.array([[float(number)]]), values)
        assert found.shape == (1, 1)
        oracle = {"threshold": above, "low_confidence_dynamic": dynamic, "entropy_bounded": bounded}[rule]
        expected = oracle(float(np.float32(value)))([float(c) for c in confidence[0, :free]], number)
        assert min(found.item(), free) == min(expected, free), case


def test_a_confidence_equal_to_the_threshold_does_not_exceed_it() -> None:
    confidence, least = mx.array([[0.75, 0.5, 0.5, -INF]]), mx.array([[1.0]])
    for rule in ("threshold", "low_confidence_dynamic"):
        select = RULES.get(rule).select
        assert select is not None and select(confidence, least, {"threshold": mx.array([[0.5]])}).item() == 1


def test_the_bound_of_entropies_is_not_reached() -> None:
    select = RULES.get("entropy_bounded").select
    confidence = mx.array([[-0.25, -0.25, -0.5, -INF]])
    assert select is not None
    for bound, expected in ((0.0, 1), (0.25, 1), (0.5, 1), (0.625, 2), (1.0, 2), (1.125, 3), (100.0, 3)):
        assert select(confidence, mx.array([[1.0]]), {"entropy_bound": mx.array([[bound]])}).item() == expected


# Whole runs.

CASES = [(PROMPT, 11, 11, None), ([MASK, 7, MASK, 20], 11, 4, 5), (PROMPT[:2], 6, 1, 2), ([5] * 9, 9, 30, 6)]


SOME_KINDS = (ANY, "block_causal shifted", "block_causal in_place prompt_end")
RUNS = [(name, kind) for name in ORACLES for kind in (SOME_KINDS if ORACLES[name][1].pick or " at " in name else KINDS)]


@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_a_run_equals_a_plain_loop(name: str, kind: str) -> None:
    rule, oracle = ORACLES[name]
    model, scheduled = diffusion_model(kind), oracle.schedule is not None
    in_blocks = kind in CAUSAL or "block_length" in RULES.get(rule).uses
    for prompt, masks, steps, block in CASES:
        block = block if in_blocks else None
        if scheduled and kind not in CAUSAL and block is not None and steps < -(-masks // block):
            continue
        options = DecodingOptions(
            unmasking=rule,
            max_tokens=masks,
            max_denoising_steps=steps if scheduled else None,
            block_length=block,
            stop_at_eos=False,
            **oracle.options,
        )
        result = decode(model, prompt, options)
        check(result, plain(model, prompt, masks, oracle, steps=steps, block=block), prompt, masks)


FILTERING = ["maskgit_plus", "topk_margin", "low_confidence_static", "entropy_bounded", "confidence_threshold"]


@pytest.mark.parametrize("rule", FILTERING)
def test_filters_change_confidences_also_of_greedy_runs(rule: str) -> None:
    model, (_, oracle) = diffusion_model("bidirectional in_place"), ORACLES[rule]
    steps = 6 if oracle.schedule else None
    options = DecodingOptions(
        unmasking=rule, max_tokens=11, max_denoising_steps=steps, stop_at_eos=False, **oracle.options
    )
    orders = {str(as_lists(decode(model, PROMPT, options)))}
    for filters in ({"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.3}, {"top_k": 9, "top_p": 0.7}):
        result = decode(model, PROMPT, replace(options, **filters))
        check(result, plain(model, PROMPT, 11, oracle, steps=steps, **filters), PROMPT, 11)
        orders.add(str(as_lists(result)))
    assert len(orders) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_origin_gives_the_positions_it_draws_the_best_tokens(kind: str) -> None:
    model = diffusion_model(kind)
    options = DecodingOptions(unmasking="origin", max_tokens=11, max_denoising_steps=4, seed=3, stop_at_eos=False)
    result = decode(model, PROMPT, options)
    assert as_lists(result) == plain_of_given(model, PROMPT, 11, [commit.positions for commit in result.commits])
    assert result.empty_steps == 0 and len(result.tokens) == 11


def plain_of_given(model: Any, prompt: list[int], masks: int, given: list[tuple[int, ...]]) -> list[Any]:
    """What a plain loop commits at given positions, block by block where attention is block-causal."""
    spec, start = model.diffusion_spec, len(prompt)
    causal = spec.attention == "block_causal"
    origin = start if spec.block_origin == "prompt_end" else 0
    width = start + masks
    if causal and origin == 0:
        width = -(-width // BLOCK) * BLOCK
    canvas, commits = [*prompt, *[MASK] * (width - start)], []
    for positions in given:
        first = next((i for i in range(start, width) if canvas[i] == MASK), width)
        end = min(first - (first - origin) % BLOCK + BLOCK, width) if causal else width
        logits = predictions(model, canvas[:end], BLOCK, origin)
        logits[:, MASK] = -INF
        tokens = logits.argmax(-1)[list(positions)].tolist()
        for i, token in zip(positions, tokens, strict=True):
            canvas[i] = token
        commits.append((list(positions), tokens))
    return commits


@pytest.mark.parametrize("kind", CAUSAL[:2])
@pytest.mark.parametrize("name", ["factor", "eb", "dinfer_threshold", "hierarchy", "local_leap"])
def test_other_rules_in_sub_blocks_equal_a_plain_loop(name: str, kind: str) -> None:
    model, (rule, oracle) = diffusion_model(kind), ORACLES[name]
    options = DecodingOptions(unmasking=rule, max_tokens=11, stop_at_eos=False, **oracle.options)
    for block, sub_block in ((6, 3), (8, 4)):
        expected = plain(model, PROMPT, 11, oracle, block=block, sub_block=sub_block)
        result = decode(model, PROMPT, replace(options, block_length=block, sub_block_length=sub_block))
        check(result, expected, PROMPT, 11)


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize(
    ("block", "sub_block", "threshold"),
    [
        (4, 2, 0.2),
        (6, 3, 0.2),
        (6, 2, 0.2),
        (4, 1, 0.2),
        (4, 4, 0.2),
        (4, 2, 0.0),
        (6, 2, 0.0),
        (6, 3, 2.0),
        (4, 4, 2.0),
    ],
)
def test_a_threshold_in_sub_blocks_equals_a_plain_loop(kind: str, block: int, sub_block: int, threshold: float) -> None:
    model = diffusion_model(kind)
    oracle = Oracle(probability, None, above(threshold))
    options = DecodingOptions(
        unmasking="threshold",
        threshold=threshold,
        max_tokens=11,
        block_length=block,
        sub_block_length=sub_block,
        stop_at_eos=False,
    )
    for prompt in (PROMPT, [3] * 12):
        expected = plain(model, prompt, 11, oracle, block=block, sub_block=sub_block)
        check(decode(model, prompt, options), expected, prompt, 11)


# Filters.


@pytest.fixture
def seen() -> Iterator[Callable[[str], list[Candidates]]]:
    """Makes a rule "seen" of another one, and the list of what its confidence will be made of."""
    made: list[Candidates] = []

    def make(name: str) -> list[Candidates]:
        rule = RULES.get(name)

        def confidence(found: Candidates) -> mx.array:
            made.append(found)
            return rule.confidence(found)

        RULES.register(replace(rule, name="seen", confidence=confidence))
        return made

    yield make
    RULES.unregister("seen")


FILTERS: list[dict[str, float]] = [
    *({"temp": value} for value in (0.3, 1.0, 7.0)),
    *({"top_p": value} for value in (0.0, 0.05, 0.5, 0.9, 1.0)),
    *({"top_k": value} for value in (0, 1, 5, 19, 20, 21, 1000)),
    *({"min_p": value} for value in (0.0, 0.1, 0.6, 1.0)),
    {"temp": 0.5, "top_p": 0.7},
    {"temp": 2.5, "top_k": 4},
    {"temp": 3.0, "min_p": 0.5},
    {"top_k": 6, "top_p": 0.6},
    {"top_k": 6, "min_p": 0.2},
    {"top_p": 0.9, "min_p": 0.3},
    {"temp": 1.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temp": 0.4, "top_k": 3, "top_p": 0.95, "min_p": 0.4},
]


@pytest.mark.parametrize(
    ("rule", "order"),
    [("maskgit_plus", DREAM), ("confidence_threshold", DREAM), ("low_confidence_static", SDAR), ("mdlm", ())],
)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_equal_numpys(
    seen: Callable[[str], list[Candidates]], rule: str, order: tuple[str, ...], filters: dict[str, Any]
) -> None:
    """Twelve positions of 20 tokens: what confidences are made of, and what is drawn."""
    logits = random_logits((14, 20), 3).astype(np.float64)
    found = seen(rule)
    options = DecodingOptions(unmasking="seen", max_tokens=12, max_denoising_steps=1, seed=1, **filters)
    tokens = decode(scripted(logits), [1, 2], options).tokens
    counted = np.array(found[0].logits[0]).astype(np.float64)
    if order:
        expected = np.array([keep(row, order, **filters) for row in logits[2:]])
        np.testing.assert_array_equal(counted == -INF, expected == -INF)
        np.testing.assert_allclose(softmax(counted), softmax(expected), rtol=1e-4, atol=1e-9)
        allowed = expected
    else:
        np.testing.assert_allclose(counted, logits[2:], rtol=1e-6)
        without = np.where(np.arange(20) == 19, -INF, logits[2:])
        mlx_lm = {name: value for name, value in filters.items() if name != "temp"}
        allowed = np.array([keep(row, ("top_p", "min_p", "top_k"), **mlx_lm) for row in without])
    without = np.where(np.arange(20) == 19, -INF, logits[2:])
    allowed = np.where(np.arange(20) == 19, -INF, allowed)
    for row, all_but_the_mask, token in zip(allowed, without, tokens, strict=True):
        if filters.get("temp") and row.max() > -INF:
            assert row[token] > -INF
        else:
            assert token == all_but_the_mask.argmax()


@pytest.mark.parametrize(
    ("rule", "kept"), [("maskgit_plus", [0, 1]), ("confidence_threshold", [0, 1]), ("low_confidence_static", [0])]
)
def test_the_order_of_top_k_and_top_p_is_the_rules(
    seen: Callable[[str], list[Candidates]], rule: str, kept: list[int]
) -> None:
    """Of 0.4, 0.3, 0.2, 0.1 top_p 0.5 keeps two; of the best two alone, which are 0.57 and 0.43 then, one."""
    found = seen(rule)
    model = scripted(np.log([0.4, 0.3, 0.2, 0.0999, 0.0001]))
    decode(model, [1], DecodingOptions(unmasking="seen", max_tokens=1, max_denoising_steps=1, top_k=2, top_p=0.5))
    assert np.flatnonzero(np.array(found[0].logits[0, 0]) > -INF).tolist() == kept


@pytest.mark.parametrize(
    ("filters", "sure", "among", "counts"),
    [
        ({"top_k": 2}, {0}, {1, 2, 3}, {2}),
        ({"top_k": 3}, {0}, {1, 2, 3}, {3}),
        ({"top_p": 0.5}, {0}, {1, 2, 3}, {2, 3, 4}),
        ({"top_p": 0.3}, {0}, set(), {1}),
        ({"min_p": 0.4}, {0, 1, 2, 3}, set(), {4}),
        ({"min_p": 0.6}, {0}, set(), {1}),
    ],
)
def test_filters_choose_among_equal_tokens(
    seen: Callable[[str], list[Candidates]], filters: dict[str, Any], sure: set[int], among: set[int], counts: set[int]
) -> None:
    """Of 0.4, three times 0.19 and 0.03 a filter may keep any of the equal ones, as many as it has to."""
    found = seen("maskgit_plus")
    model = scripted(np.log([0.4, 0.19, 0.19, 0.19, 0.0299, 0.0001]))
    decode(model, [1], DecodingOptions(unmasking="seen", max_tokens=1, max_denoising_steps=1, **filters))
    kept = set(np.flatnonzero(np.array(found[0].logits[0, 0]) > -INF).tolist())
    assert sure <= kept <= sure | among and len(kept) in counts


@pytest.mark.parametrize("rule", ["maskgit_plus", "entropy", "origin", "low_confidence_static", "entropy_bounded"])
@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.9}], ids=str)
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_filters_that_keep_only_the_mask_leave_the_best_other_token(
    rule: str, filters: dict[str, Any], temp: float
) -> None:
    model = scripted([0.0, 1.0, 4.0, 2.0, 9.0])
    result = decode(model, [1, 2], DecodingOptions(unmasking=rule, max_tokens=4, temp=temp, seed=1, **filters))
    assert result.tokens == [2] * 4
    second = decode(
        model, [1, 2], DecodingOptions(unmasking=rule, max_tokens=4, temp=temp, seed=1, suppress_tokens=(2,), **filters)
    )
    assert second.tokens == [3] * 4


@pytest.mark.parametrize("rule", ["maskgit_plus", "low_confidence_static", "low_confidence", "mdlm"])
def test_suppressed_tokens_are_not_in_the_softmax_either(seen: Callable[[str], list[Candidates]], rule: str) -> None:
    logits = random_logits((8, 20), 4)
    banned = sorted({int(token) for token in logits.argmax(-1)} - {19})
    found = seen(rule)
    options = DecodingOptions(unmasking="seen", max_tokens=6, max_denoising_steps=1, suppress_tokens=banned)
    result = decode(scripted(logits), [1, 2], options)
    counted = np.array(found[0].logits[0])
    assert (counted[:, banned] == -INF).all() and np.isfinite(np.delete(counted, banned, axis=-1)).all()
    assert not set(result.tokens) & {*banned, 19}


# Draws.


def first_sets(model: Any, options: DecodingOptions, seeds: int, prompt: list[int]) -> list[tuple[int, ...]]:
    """The slots that the first forward commits, for each seed."""
    rows = [replace(options, seed=seed) for seed in range(seeds)]
    results = decode(model, [prompt] * seeds, rows)
    return [tuple(p - len(prompt) for p in result.commits[0].positions) for result in results]


@pytest.mark.parametrize("rule", ["maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize("alg_temp", [0.15, 0.6])
def test_alg_temp_draws_positions_without_replacement(rule: str, alg_temp: float) -> None:
    """Two of four positions in the first of two steps, over 500 seeds: chi-square, false alarm 1e-6."""
    logits = random_logits((5, 7), 8)
    options = DecodingOptions(unmasking=rule, max_tokens=4, max_denoising_steps=2, eps=0.0, alg_temp=alg_temp)
    found = first_sets(scripted(logits), options, 500, [1])
    oracle = ORACLES[rule][1].confidence
    confidence = [oracle(row, int(row.argmax()), i) for i, row in enumerate(logits[1:].astype(np.float64))]
    weight = softmax(np.array(confidence) / alg_temp)
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    expected = [weight[i] * weight[j] * (1 / (1 - weight[i]) + 1 / (1 - weight[j])) for i, j in pairs]
    assert sum(expected) == pytest.approx(1)
    statistic, critical = chi_square([pairs.index(pair) for pair in found], np.array(expected))
    assert statistic < critical
    flat, critical = chi_square([pairs.index(pair) for pair in found], np.full(6, 1 / 6))
    assert flat > critical, "a draw that ignores confidences would pass as well"


@pytest.mark.parametrize("rule", ["maskgit_plus", "topk_margin", "entropy"])
def test_a_small_alg_temp_takes_the_most_confident(rule: str) -> None:
    model = diffusion_model("bidirectional in_place")
    options = DecodingOptions(unmasking=rule, max_tokens=9, max_denoising_steps=5, stop_at_eos=False, seed=2)
    greedy = decode(model, PROMPT, options)
    for alg_temp in (0, 0.0):
        assert decode(model, PROMPT, replace(options, alg_temp=alg_temp)) == greedy
    assert as_lists(decode(model, PROMPT, replace(options, alg_temp=1e-4))) == as_lists(greedy)
    assert as_lists(decode(model, PROMPT, replace(options, alg_temp=5.0))) != as_lists(greedy)


def test_the_steps_of_origin_are_binomial() -> None:
    """Over 500 seeds: how many of 8 the first of three steps commits, the second of what is left, and which, by
    chi-square with a false alarm of 1e-6 each; the last step commits all that is left."""
    model = scripted(random_logits((9,), 2))
    options = [DecodingOptions(unmasking="origin", max_tokens=8, max_denoising_steps=3, seed=s) for s in range(500)]
    results = decode(model, [[1, 2]] * 500, options)
    assert all(len(result.tokens) == 8 and len(result.commits) <= 3 for result in results)
    first, second = schedule_of("origin", 8, 3)[:2]
    assert (first, second) == pytest.approx((0.333, 0.4993), abs=1e-3)

    def binomial(n: int, p: float) -> np.ndarray:
        return np.array([math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)])

    sizes = [[len(commit.positions) for commit in result.commits] for result in results]
    tests = [([own[0] for own in sizes], binomial(8, first))]
    by_left = [[own[1] for own in sizes if own[0] == taken and len(own) > 1] for taken in (2, 3)]
    tests += [(found, binomial(8 - taken, second)) for taken, found in zip((2, 3), by_left, strict=True)]
    tests.append(([p - 2 for result in results for p in result.commits[0].positions], np.full(8, 1 / 8)))
    for found, expected in tests:
        statistic, critical = chi_square(found, expected)
        assert len(found) > 100 and statistic < critical
    wrong, critical = chi_square(tests[0][0], binomial(8, 0.45))
    assert wrong > critical, "another probability would pass as well"


def test_a_step_of_origin_that_commits_nothing_is_a_forward() -> None:
    model = scripted(random_logits((9,), 2))
    options = DecodingOptions(unmasking="origin", max_tokens=2, max_denoising_steps=30, seed=1)
    result = decode(model, [1], options)
    assert result.nfe == len(result.commits) > 2 >= sum(bool(commit.positions) for commit in result.commits)
    assert result.empty_steps == 0 and sorted(p for c in result.commits for p in c.positions) == [1, 2]


# Guidance and what is removed between the choice of tokens and the confidences.

GUIDED = {name: ORACLES[name] for name in ("low_confidence", "threshold", "mdlm")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GUIDED)
def test_guidance_equals_two_forwards(name: str, kind: str) -> None:
    """Rows with and without guidance in one batch, each as the loop that makes two forwards."""
    rule, oracle = GUIDED[name]
    model, steps = diffusion_model(kind), 6 if oracle.schedule else None
    prompts = [PROMPT, [MASK, 7, 20], PROMPT, [7, 7, 20, 1, 9, 30, 31], PROMPT]
    guidance: list[dict[str, Any]] = [
        {"cfg_scale": 1.5},
        {"cfg_scale": 0.4, "cfg_keep_tokens": (7,)},
        {},
        {"cfg_scale": 4.0, "cfg_keep_tokens": (7, 30, MASK)},
        {"cfg_scale": 0.0, "cfg_keep_tokens": (9,)},
    ]
    options = [
        DecodingOptions(
            unmasking=rule, max_tokens=8, max_denoising_steps=steps, stop_at_eos=False, **oracle.options, **own
        )
        for own in guidance
    ]
    together = decode(model, prompts, options)
    for prompt, own, result in zip(prompts, options, together, strict=True):
        expected = plain(
            model, prompt, 8, oracle, steps=steps, cfg=own.cfg_scale or 0, keep_tokens=own.cfg_keep_tokens or ()
        )
        check(result, expected, prompt, 8)
        alone = decode(model, prompt, own)
        assert (as_lists(result), result.canvas, result.nfe) == (as_lists(alone), alone.canvas, alone.nfe)
    plain_rows = decode(model, prompts, replace(options[2], cfg_keep_tokens=None))
    differ = [a.tokens != b.tokens for a, b in zip(together, plain_rows, strict=True)]
    assert differ[0] and differ[3] and not differ[2] and not differ[4]


def test_tokens_that_guidance_keeps_change_what_it_does() -> None:
    model = diffusion_model("bidirectional in_place")
    options = DecodingOptions(unmasking="mdlm", max_tokens=8, cfg_scale=3.0, stop_at_eos=False)
    some, none = (decode(model, PROMPT, replace(options, cfg_keep_tokens=ids)) for ids in ((2, 33), None))
    every = decode(model, PROMPT, replace(options, cfg_keep_tokens=PROMPT))
    assert as_lists(some) != as_lists(none)
    assert as_lists(every) == as_lists(decode(model, PROMPT, replace(options, cfg_scale=None)))


def test_guidance_doubles_the_rows_of_a_forward_and_not_their_number() -> None:
    for kind in ("bidirectional in_place", "block_causal in_place"):
        model = diffusion_model(kind)
        options = [
            DecodingOptions(unmasking="mdlm", max_tokens=BLOCK, cfg_scale=scale, stop_at_eos=False)
            for scale in (1.0, 0.0)
        ]
        results = decode(model, [[5] * 2 * BLOCK, [6] * 2 * BLOCK], options)
        assert {shape[0] for shape in model.shapes} == {4}
        assert [result.nfe + result.prefills for result in results] == [len(model.shapes)] * 2


def test_a_row_without_guidance_goes_on_alone_with_one_forward_per_step() -> None:
    for kind in ("bidirectional in_place", "block_causal in_place"):
        model = diffusion_model(kind)
        options = [
            DecodingOptions(unmasking="mdlm", max_tokens=n, cfg_scale=scale, stop_at_eos=False)
            for n, scale in ((2, 1.0), (10, 0.0))
        ]
        results = decode(model, [PROMPT, PROMPT[:3]], options)
        assert results[1].nfe > results[0].nfe and model.shapes[0][0] == 4 and model.shapes[-1][0] == 1
        alone = decode(diffusion_model(kind), PROMPT[:3], options[1])
        assert as_lists(alone) == as_lists(results[1])


@pytest.mark.parametrize("kind", ["bidirectional in_place", "bidirectional shifted", "block_causal in_place"])
@pytest.mark.parametrize("name", GUIDED)
@pytest.mark.parametrize("flags", ["none", "logits", "confidence", "both"])
def test_eos_flags_equal_a_plain_loop(name: str, kind: str, flags: str) -> None:
    """The end of sequence and the end of turn are what the model writes most."""
    rule, oracle = GUIDED[name]
    steps = 6 if oracle.schedule else None
    options = DecodingOptions(
        unmasking=rule, max_tokens=12, max_denoising_steps=steps, stop_at_eos=False, **oracle.options
    )
    whole = decode(diffusion_model(kind), PROMPT, options)
    end, turn = sorted(set(whole.tokens), key=lambda token: -whole.tokens.count(token))[:2]
    model = diffusion_model(kind, eos_token_ids=(end, turn), stop_token_ids=(turn,))
    result = decode(model, PROMPT, replace(options, eos_flags=flags))
    first = [end] if flags in ("logits", "both") else []
    late = [end, turn] if flags in ("confidence", "both") else []
    check(result, plain(model, PROMPT, 12, oracle, steps=steps, suppressed=first, late=late), PROMPT, 12)
    assert (end in result.tokens) == (not first) or flags == "confidence"
    assert (as_lists(result) == as_lists(whole)) == (flags == "none")


@pytest.mark.parametrize("kind", ["bidirectional in_place", "block_causal shifted"])
def test_begin_suppressed_tokens_only_lose_confidence(kind: str) -> None:
    model, oracle = diffusion_model(kind), ORACLES["mdlm"][1]
    options = DecodingOptions(unmasking="mdlm", max_tokens=12, max_denoising_steps=6, stop_at_eos=False)
    whole = decode(model, PROMPT, options)
    late = sorted(set(whole.tokens), key=lambda token: -whole.tokens.count(token))[:2]
    result = decode(model, PROMPT, replace(options, begin_suppress_tokens=late, suppress_tokens=(20, 21)))
    expected = plain(model, PROMPT, 12, oracle, steps=6, suppressed=(20, 21), late=late)
    check(result, expected, PROMPT, 12)
    assert as_lists(result) != as_lists(whole) and set(late) & set(result.tokens)


def test_positions_of_begin_suppressed_tokens_come_last() -> None:
    logits = np.full((9, 6), 0.0)
    logits[[2, 4, 6], 1] = 9.0
    logits[[1, 3, 5, 7, 8], 2] = 3.0
    options = DecodingOptions(unmasking="mdlm", max_tokens=8, max_denoising_steps=8, begin_suppress_tokens=(1,))
    result = decode(scripted(logits), [3], options)
    order = [commit.positions[0] for commit in result.commits]
    assert set(order[-3:]) == {2, 4, 6} and [logits[p].argmax() for p in order] == [2] * 5 + [1] * 3


def test_rows_of_a_batch_may_give_different_options() -> None:
    """Also where a rule has no value of its own for what only one of them gives."""
    for kind in ("bidirectional in_place", "block_causal in_place"):
        model = diffusion_model(kind)
        options = [
            DecodingOptions(unmasking="low_confidence", max_tokens=6, stop_at_eos=False, **own)
            for own in (
                {"cfg_scale": 1.0},
                {},
                {"max_denoising_steps": 3},
                {"eos_flags": "logits", "cfg_scale": 0.5, "cfg_keep_tokens": (2,)},
                *([{"block_length": 2, "max_denoising_steps": 3}] if kind not in CAUSAL else []),
            )
        ]
        for i in range(len(options)):
            rows = [*options[i:], *options[:i]]
            for own, result in zip(rows, decode(model, [PROMPT] * len(rows), rows), strict=True):
                assert as_lists(result) == as_lists(decode(model, PROMPT, own))


# Bad input.


def unused(rule: str, option: str) -> str:
    users = "|".join(name for name in RULES.names() if option in RULES.get(name).uses)
    return (
        f"The unmasking rule {rule!r} does not use {option}; leave it out, or choose a rule that does with unmasking "
        f"(--unmasking {users})."
    )


def must(option: str, expected: str, *values: Any) -> list[tuple[str, dict[str, Any], str]]:
    return [("bidirectional in_place", {option: v}, f"{option} must be {expected}, got {v!r}.") for v in values]


def fixed(option: str, value: str, own: str) -> str:
    return f"{option} {value!r} would give a wrong answer: checkpoints of the family tiny are {own!r}; leave it out."


NAN = math.nan
REFUSED: list[tuple[str, dict[str, Any], str | tuple[str, str]]] = [
    *must("attention", "one of bidirectional, block_causal", 1, True, "causal", "", NAN, ["bidirectional"]),
    *must("logits", "one of in_place, shifted", 0, "shift", "", NAN, b"shifted"),
    *must("sub_block_length", "a positive integer", 0, -1, True, 2.0, "2", NAN),
    *must("entropy_bound", "0 or more", -0.1, True, "1", NAN, INF, [0.3]),
    *must("cfg_scale", "0 or more", -1, -1e-9, False, "2", NAN, INF, [1.0]),
    *must("cfg_keep_tokens", "token ids, 0 or more", (-1,), [1.0], "3", (True,), (NAN,), NAN),
    *must("eos_flags", "one of none, logits, confidence, both", "all", "", True, 1, NAN, ("logits",)),
    *must("alg_temp", "0 (the most confident) or from 0.0001 to 10000", -1, 1e-5, 1e5, True, "0.1", NAN, INF),
    *must("eps", "within [0, 1)", -1e-3, 1, 1.0, 2, True, "0", NAN, -INF),
    *must("alpha_schedule", "one of linear, cosine", "sqrt", "", 0, NAN, ["linear"]),
    *must("begin_suppress_tokens", "token ids, 0 or more", (-3,), [0.0], "1", (False,), (NAN,), NAN),
    *((ANY, {"unmasking": r, "entropy_bound": 1.0}, (r, "entropy_bound")) for r in ("threshold", "entropy")),
    *((ANY, {"unmasking": r, "cfg_scale": 0.0}, (r, "cfg_scale")) for r in ("a2d", "origin", "sequential")),
    *((ANY, {"unmasking": r, "cfg_keep_tokens": ()}, (r, "cfg_keep_tokens")) for r in ("mlx_dllm", "entropy")),
    *((ANY, {"unmasking": r, "eos_flags": "none"}, (r, "eos_flags")) for r in ("maskgit_plus", "sequential")),
    *((ANY, {"unmasking": r, "alg_temp": 0.0}, (r, "alg_temp")) for r in ("origin", "mdlm", "threshold")),
    *((ANY, {"unmasking": r, "eps": 0.1}, (r, "eps")) for r in ("low_confidence", "mdlm", "entropy_bounded")),
    *((ANY, {"unmasking": r, "alpha_schedule": "linear"}, (r, "alpha_schedule")) for r in ("random", "entropy")),
    (ANY, {"begin_suppress_tokens": (1,)}, ("low_confidence", "begin_suppress_tokens")),
    (ANY, {"sub_block_length": 2}, ("low_confidence", "sub_block_length")),
    ("block_causal in_place", {"unmasking": "mdlm", "sub_block_length": 2}, ("mdlm", "sub_block_length")),
    (
        ANY,
        {"unmasking": "threshold", "sub_block_length": 2},
        "sub_block_length divides the blocks of block-causal attention, and the family tiny has none: leave it out.",
    ),
    *(
        (
            "block_causal shifted",
            {"unmasking": "threshold", "sub_block_length": sub, "block_length": block},
            f"sub_block_length {sub} does not divide the block of {block or BLOCK} tokens: choose a divisor.",
        )
        for sub, block in ((3, None), (8, None), (4, 6), (5, 4))
    ),
    *(
        (
            ANY,
            {"unmasking": rule, "max_tokens": 9, "block_length": 2, "max_denoising_steps": 4},
            "max_denoising_steps 4 is less than the 5 blocks of 2 tokens; each needs a step.",
        )
        for rule in ("mdlm", "low_confidence", "sequential", "low_confidence_static")
    ),
    (ANY, {"attention": "block_causal"}, fixed("attention", "block_causal", "bidirectional")),
    ("block_causal shifted", {"attention": "bidirectional"}, fixed("attention", "bidirectional", "block_causal")),
    (ANY, {"logits": "shifted"}, fixed("logits", "shifted", "in_place")),
    ("bidirectional shifted", {"logits": "in_place"}, fixed("logits", "in_place", "shifted")),
    (
        ANY,
        {"unmasking": "mdlm", "begin_suppress_tokens": (1, 48)},
        "begin_suppress_tokens has id 48, outside the vocabulary of 48.",
    ),
    (ANY, {"cfg_keep_tokens": (99,), "cfg_scale": 1.0}, "cfg_keep_tokens has id 99, outside the vocabulary of 48."),
    (
        ANY,
        {"unmasking": "mdlm", "begin_suppress_tokens": tuple(range(VOCAB))},
        "begin_suppress_tokens leaves no token that a confidence could count.",
    ),
]


@pytest.mark.parametrize(("kind", "options", "sentence"), REFUSED, ids=str)
def test_what_cannot_be_done_is_refused_in_one_sentence(
    kind: str, options: dict[str, Any], sentence: str | tuple[str, str]
) -> None:
    """A pair is a rule and an option that it does not use."""
    with pytest.raises(DiffusionError) as error:
        decode(diffusion_model(kind), PROMPT, DecodingOptions(**{"max_tokens": 8, **options}))
    assert str(error.value) == (sentence if isinstance(sentence, str) else unused(*sentence))


@pytest.mark.parametrize("flags", ["logits", "confidence", "both"])
def test_eos_flags_need_an_end_of_sequence(flags: str) -> None:
    model = scripted(random_logits((9,), 0))
    with pytest.raises(DiffusionError) as error:
        decode(model, [1], DecodingOptions(max_tokens=2, eos_flags=flags))
    assert str(error.value) == f"eos_flags {flags!r} needs an end of sequence, and this checkpoint names none."
    assert len(decode(model, [1], DecodingOptions(max_tokens=2, eos_flags="none")).tokens) == 2


@pytest.mark.parametrize("name", ["attention", "logits"])
def test_a_choice_that_the_family_leaves_is_taken(name: str) -> None:
    """Also from one to the other and back: what the checkpoint is itself may always be said."""
    values = {"attention": ("bidirectional", "block_causal"), "logits": ("in_place", "shifted")}[name]
    specs = {value: replace(spec_of_kind(ANY), **{name: value}, defaults={"max_tokens": 8}) for value in values}
    for own in values:
        free = diffusion_model(ANY, variants=(name,), defaults={"max_tokens": 8}, **{name: own})
        for value in values:
            fixed_model = diffusion_model(ANY)
            fixed_model.diffusion_spec = specs[value]
            options = DecodingOptions(max_tokens=8, block_length=4, stop_at_eos=False)
            chosen = decode(free, PROMPT, replace(options, **{name: value}))
            said = decode(fixed_model, PROMPT, replace(options, **{name: value}))
            assert as_lists(chosen) == as_lists(said) == as_lists(decode(fixed_model, PROMPT, options))


def test_zero_of_an_option_is_a_value_and_not_its_absence() -> None:
    model = diffusion_model(ANY)

    def commits(**options: Any) -> list[int]:
        result = decode(model, PROMPT, DecodingOptions(max_tokens=8, stop_at_eos=False, **options))
        return [len(commit.positions) for commit in result.commits]

    assert commits(unmasking="threshold", threshold=0) == [8]
    assert commits(unmasking="entropy_bounded", entropy_bound=0) == [1] * 8
    assert commits(unmasking="maskgit_plus", eps=0, max_denoising_steps=2) == [4, 4]
    assert commits(unmasking="maskgit_plus", max_denoising_steps=2) == [3, 5]


# All rules: that they end, what they are given, and what they take by themselves.

EVERY = [rule.name for rule in RULES.builtin()]
EDITING = [rule.name for rule in RULES.builtin() if rule.edit is not None]  # see test_editing.py


@pytest.mark.parametrize("kind", ["bidirectional in_place", "block_causal shifted"])
@pytest.mark.parametrize("rule", [rule for rule in EVERY if rule not in EDITING])
def test_every_rule_ends_without_a_mask_after_at_most_as_many_forwards(rule: str, kind: str) -> None:
    if rule == "wino" and kind != ANY:
        return
    model = diffusion_model(kind)
    options = [
        DecodingOptions(unmasking=rule, max_tokens=masks, stop_at_eos=False, seed=1, temp=temp)
        for masks, temp in ((12, 0.0), (4, 0.0), (8, 1.0))
    ]
    for own, result in zip(options, decode(model, [PROMPT[:4], PROMPT[:4], [7] * 4], options), strict=True):
        assert MASK not in result.canvas and len(result.tokens) == own.max_tokens
        assert rule == "origin" or result.nfe <= len(result.canvas) - 4
        masked: set[int] = set(range(4, len(result.canvas)))
        for commit in result.commits:
            assert not masked & set(commit.masked) and set(commit.positions) <= masked
            masked = masked - set(commit.positions) | set(commit.masked)
        assert not masked


ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 1.5},
    "dinfer_threshold": {"threshold": 1.5},
    "credit": {"threshold": 1.5},
    "hierarchy": {"threshold": 1.5, "low_threshold": 1.5},
    "local_leap": {"threshold": 1.5, "relaxed_threshold": 1.5},
    "klass": {"threshold": 1.5},
    "wino": {"threshold": 1.5},
    "confidence_threshold": {"threshold": 1.5},
    "factor": {"factor": 0.0},
    "eb": {"entropy_bound": 0.0},
    "entropy_bounded": {"entropy_bound": 0.0},
}


@pytest.mark.parametrize("rule", ONE_BY_ONE)
@pytest.mark.parametrize("kind", ["bidirectional in_place", "block_causal in_place"])
def test_the_strictest_values_are_one_token_a_step(rule: str, kind: str) -> None:
    """The surest first, as low_confidence has it with as many steps as masks."""
    if rule == "wino" and kind != ANY:
        return
    model = diffusion_model(kind)
    options = DecodingOptions(unmasking=rule, max_tokens=11, stop_at_eos=False, **ONE_BY_ONE[rule])
    result = decode(model, PROMPT, options)
    assert [len(commit.positions) for commit in result.commits] == [1] * result.nfe
    if rule not in ("credit", "dinfer_threshold", "entropy_bounded"):  # which have an order of their own
        one = DecodingOptions(unmasking="low_confidence", max_tokens=11, stop_at_eos=False)
        assert as_lists(result) == as_lists(decode(model, PROMPT, one))


def test_the_factor_of_fast_dllms_code_commits_the_last_two_together() -> None:
    options = DecodingOptions(unmasking="fast_dllm_factor", max_tokens=11, stop_at_eos=False, factor=0.0)
    sizes = [len(commit.positions) for commit in decode(diffusion_model(ANY), PROMPT, options).commits]
    assert sizes == [1] * 9 + [2]


def test_without_a_divergence_nothing_is_stable() -> None:
    """Logits that never change diverge by nothing, which is not less than 0, and less than anything else."""
    for kl, sizes in ((0.0, [1] * 6), (1e-6, [1, 1, 4])):
        options = DecodingOptions(unmasking="klass", max_tokens=6, kl_threshold=kl, threshold=0.1)
        result = decode(scripted(random_logits((9,), 3)), [1, 2], options)
        assert [len(commit.positions) for commit in result.commits] == sizes


def test_a_divergence_of_0_is_one_token_a_step_whatever_the_rounding() -> None:
    """Logits that hardly change: a divergence is never negative, but a sum of roundings may be."""
    random = np.random.default_rng(0)
    base = 4 * random.standard_normal((1, 40, 64))
    tables = mx.array((base + 1e-6 * random.standard_normal((40, 40, 64))).astype(np.float32))

    def hidden(_: Any, ids: mx.array, cache: list[Any]) -> mx.array:
        return tables[(ids == 63).sum(axis=1)]

    model = scripted(np.zeros(64))
    model.diffusion_family = a2d.family("scripted", hidden=hidden, head=lambda model, states: states)
    options = DecodingOptions(unmasking="klass", max_tokens=38, kl_threshold=0.0, kl_history=1, threshold=0.0)
    result = decode(model, [1, 2], options)
    assert [len(commit.positions) for commit in result.commits] == [1] * 38


def test_a_bound_of_0_commits_together_what_has_no_entropy() -> None:
    """Entropies in float32: all of three positions is on one token, the others are unsure."""
    logits = np.zeros((9, 6))
    logits[[3, 5, 6], 2] = 200.0
    logits[[4, 7, 8], 1] = [3.0, 2.0, 1.0]
    options = DecodingOptions(unmasking="eb", max_tokens=6, entropy_bound=0.0)
    result = decode(scripted(logits), [1, 2, 3], options)
    assert [commit.positions for commit in result.commits] == [(3, 4, 5, 6), (7,), (8,)]


@pytest.mark.parametrize("rule", ["dinfer_threshold", "credit"])
def test_positions_where_the_model_prefers_the_mask_come_last(rule: str) -> None:
    """However sure of the mask it is; then the surest of it first, each with the best other token."""
    logits = np.zeros((9, 6))
    logits[[2, 4, 6], 5] = [9.0, 8.0, 7.0]
    logits[[2, 4, 6], 3] = 5.0
    logits[[3, 5, 7, 8], [0, 1, 2, 1]] = [0.5, 0.4, 0.3, 0.2]
    result = decode(scripted(logits), [1, 2], DecodingOptions(unmasking=rule, max_tokens=7, threshold=0.9))
    assert [commit.positions for commit in result.commits] == [(3,), (5,), (7,), (8,), (2,), (4,), (6,)]
    assert result.tokens == [3, 0, 3, 1, 3, 2, 1]
    threshold = decode(scripted(logits), [1, 2], DecodingOptions(unmasking="threshold", max_tokens=7, threshold=0.9))
    assert threshold.commits[0].positions == (2, 4), "what a rule that does not ask would commit first"


def test_a_model_may_keep_its_layers_to_itself() -> None:
    """Whoever makes no use of caches need not say how many there are."""
    model = scripted(random_logits((9,), 0))
    result = decode(model, [1, 2], DecodingOptions(max_tokens=4))
    for layers in ({}, {"layers": []}):
        own = {name: value for name, value in vars(model).items() if name != "layers"}
        assert decode(SimpleNamespace(**own, **layers), [1, 2], DecodingOptions(max_tokens=4)) == result


# Options.

EXAMPLES: dict[str, Any] = {
    "max_denoising_steps": 8,
    "block_length": 4,
    "sub_block_length": 2,
    "confidence_temperature": 1.0,
    "threshold": 0.5,
    "low_threshold": 0.5,
    "relaxed_threshold": 0.5,
    "radius": 2,
    "narrow_out_threshold": 0.5,
    "factor": 1.0,
    "kl_threshold": 0.1,
    "kl_history": 2,
    "credit_weight": 1.0,
    "credit_power": 1.0,
    "credit_decay": 1.0,
    "gap": 1.0,
    "entropy_bound": 1.0,
    "cfg_scale": 0.0,
    "cfg_keep_tokens": (1,),
    "eos_flags": "none",
    "alg_temp": 0.0,
    "eps": 0.1,
    "alpha_schedule": "linear",
    "begin_suppress_tokens": (1,),
    "editing_threshold": 0.5,
    "max_post_steps": 3,
    "num_to_transfer": 2,
    "max_steps_per_block": 40,
}


@pytest.mark.parametrize("rule", EVERY)
def test_a_rule_takes_the_options_it_uses_and_refuses_the_others(rule: str) -> None:
    assert EXAMPLES.keys() == {option.name for option in fields(DecodingOptions) if not option.metadata["common"]}
    for option, value in EXAMPLES.items():
        options = DecodingOptions(unmasking=rule, max_tokens=8, **{option: value})
        if option in RULES.get(rule).uses and option != "sub_block_length" and rule not in EDITING:
            plan(spec_of_kind(ANY), PROMPT, options)
        elif option in RULES.get(rule).uses:
            plan(spec_of_kind(CAUSAL[0], edit_token_ids=(30, 31)), PROMPT, options)
        else:
            with pytest.raises(DiffusionError) as error:
                plan(spec_of_kind(ANY), PROMPT, options)
            assert str(error.value) == unused(rule, option)


def test_rules_use_options_that_exist_and_have_defaults_of_what_they_use() -> None:
    for rule in RULES.builtin():
        assert rule.uses <= EXAMPLES.keys()
        assert rule.name == "origin" or rule.defaults.keys() <= rule.uses
        for option, value in rule.defaults.items():
            assert getattr(DecodingOptions(**{option: value}), option) == value


DEFAULTS: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.9},
    "confidence_threshold": {"threshold": 0.9},
    "factor": {"factor": 1.0},
    "fast_dllm_factor": {"factor": 1.0},
    "eb": {"entropy_bound": 0.1},
    "klass": {"threshold": 0.9, "kl_threshold": 0.01, "kl_history": 2},
    "dinfer_threshold": {"threshold": 0.9},
    "hierarchy": {"threshold": 0.9, "low_threshold": 0.4},
    "credit": {"threshold": 0.9, "credit_weight": 0.7, "credit_power": 0.2, "credit_decay": 0.8},
    "wino": {"threshold": 0.6, "narrow_out_threshold": 0.9},
    "prophet": {"gap": 7.5},
    "local_leap": {"threshold": 0.9, "relaxed_threshold": 0.75, "radius": 4},
}


@pytest.mark.parametrize("rule", DEFAULTS)
def test_defaults_are_those_of_the_papers(rule: str) -> None:
    """And of the code where that has others; also of a checkpoint whose family has values for its own rule."""
    assert dict(RULES.get(rule).defaults) == DEFAULTS[rule]
    other = {option: 0.123 for option in DEFAULTS[rule]}
    spec = spec_of_kind(ANY, defaults={"max_tokens": 8, **other})
    options = DecodingOptions(unmasking=rule)
    assert {name: plan(spec, PROMPT, options).values[name] for name in other} == DEFAULTS[rule]
    own = replace(spec, unmasking=rule)
    assert {name: plan(own, PROMPT, DecodingOptions()).values[name] for name in other} == other
    said = replace(options, **{name: EXAMPLES[name] for name in other})
    for spec_of_rule in (spec, own):
        assert {n: plan(spec_of_rule, PROMPT, said).values[n] for n in other} == {n: EXAMPLES[n] for n in other}


def test_defaults_of_what_the_rule_has_no_own_are_the_familys() -> None:
    spec = spec_of_kind(ANY, defaults={"max_tokens": 8, "block_length": 2, "threshold": 0.3})
    result = plan(spec, PROMPT, DecodingOptions(unmasking="hierarchy"))
    assert len(result.stages) == 4 and result.values["threshold"] == 0.9


def shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


OF_RULES = {option for rule in RULES.builtin() for option in rule.defaults}
NAMED = [option for option in table() if "(default: " in option.metadata["help"] and option.name in OF_RULES]


@pytest.mark.parametrize("option", NAMED, ids=lambda option: option.name)
def test_defaults_that_the_help_names_are_those_of_every_rule(option: Any) -> None:
    """``default: a; for some rule b`` names all exceptions."""
    general, *others = re.findall(r"\(default: ([^)]*)\)", option.metadata["help"])[0].split("; ")
    exceptions: dict[str, str] = {}
    for other in others:
        words = re.fullmatch(r"for (.+) ([^ ]+)", other)
        assert words is not None, other
        exceptions |= {rule: words[2] for rule in re.split(r", | and ", words[1])}
    users = {rule.name: shown(rule.defaults[option.name]) for rule in RULES.builtin() if option.name in rule.defaults}
    assert exceptions.keys() <= users.keys()
    assert {rule: exceptions.get(rule, general) for rule in users} == users


def test_a_profile_adds_what_the_rule_in_force_uses() -> None:
    fast = {"unmasking": "hierarchy", "low_threshold": 0.3, "threshold": 0.8, "cache": "dual", "gap": 1.0}
    spec = spec_of_kind(ANY, profiles={"fast": fast})
    taken = profiled(spec, DecodingOptions(profile="fast"))
    assert (taken.unmasking, taken.low_threshold, taken.threshold, taken.cache) == ("hierarchy", 0.3, 0.8, "dual")
    assert taken.gap is None
    said = profiled(spec, DecodingOptions(profile="fast", unmasking="threshold", cache="none"))
    assert (said.unmasking, said.low_threshold, said.threshold, said.cache) == ("threshold", None, 0.8, "none")
    for nothing in (DecodingOptions(), DecodingOptions(profile="exact"), DecodingOptions(threshold=0.5)):
        assert profiled(spec, nothing) == nothing


# Draws: of rules that remember, of one that revises, and of one that draws positions too.


@pytest.mark.parametrize(
    ("rule", "own"),
    [
        ("klass", {"threshold": 0.05, "kl_threshold": 2.0, "kl_history": 1}),
        ("credit", {"threshold": 0.1}),
        ("wino", {"threshold": 0.1}),
        ("maskgit_plus", {"alg_temp": 0.5, "max_denoising_steps": 5}),
    ],
)
def test_a_seed_draws_the_same_text_in_any_batch_and_any_chunks(
    rule: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 2 and 5 columns; rows that are longer, the longest done first, and with other values."""
    model = diffusion_model(ANY)
    options = DecodingOptions(unmasking=rule, max_tokens=9, temp=0.8, seed=5, stop_at_eos=False, **own)
    alone = decode(model, PROMPT, options)
    again = decode(model, PROMPT, replace(options, seed=6))
    assert alone.tokens != again.tokens and alone.nfe < 9
    rows = [([3] * 9, replace(options, seed=1)), (PROMPT, options), ([8] * 20, replace(options, max_tokens=1))]
    strict = next(iter(own))
    rows += [(PROMPT[:2], replace(options, seed=2, **{strict: 0.9}))]
    for columns in (None, 2, 5):
        if columns is not None:
            monkeypatch.setattr(Batch, "LOGITS", columns * VOCAB)
        assert as_lists(decode(model, PROMPT, options)) == as_lists(alone)
        for turn in (0, 2):
            turned = [*rows[turn:], *rows[:turn]]
            results = decode(model, [prompt for prompt, _ in turned], [given for _, given in turned])
            for (_, given), result in zip(turned, results, strict=True):
                if given is options:
                    assert as_lists(result) == as_lists(alone) and result.nfe == alone.nfe
