"""What is faster says the same, or exactly what was agreed: kept keys and values, the head in chunks, WINO's shadows
and what becomes of positions after an end of sequence, against plain loops written here."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

import mlx_dllm_plugin.decode  # noqa: F401  (the module; the name in the package is the function)
from mlx_dllm_plugin import (
    DecodingOptions,
    DecodingResult,
    DiffusionError,
    DiffusionSpec,
    bidirectional_forward,
    decode,
    infill,
    stream_decode,
)
from mlx_dllm_plugin.batch import Batch
from mlx_dllm_plugin.caches import AttentionPolicy
from mlx_dllm_plugin.decode import BlockDone, Commit, Finished, Released
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.samplers import RULES
from tests.models import CONFIGS, CONTEXT, EOS, MASK, VOCAB
from tests.test_blocks import TEXT, as_row, log_softmax, same_as_alone

TOLERANCE = 1e-4
Shown = list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]

# Models: a family, and how its logits are decoded.

BIDIRECTIONAL = {
    **{f.name: (f.name, f.logits) for f in FAMILIES.builtin() if f.attention == "bidirectional"},
    "gpt2 shifted": ("gpt2", "shifted"),
}
KINDS = ["gpt2", "qwen2", "llada", "gemma2", "modernbert", "dream", "gpt2 shifted"]
SHIFTED = ["dream", "gpt2 shifted"]
BLOCK_CAUSAL = ["sdar", "sdar_moe", "llada2_moe", "fast_dllm_v2", "stable_diffcoder"]
BLOCK_CAUSAL += ["a2d_qwen3", "a2d_qwen2", "a2d_llama"]
MODULES = {
    **{name: f"mlx_lm.models.{name}" for name in ("gpt2", "qwen2", "llama", "gemma", "gemma2", "gemma3_text")},
    **{name: f"mlx_dllm_plugin.models.{name}" for name in ("llada", "llada_moe", "llada2_moe", "modernbert")},
    **{name: "mlx_lm.models.qwen2" for name in ("dream", "open_dcoder", "fast_dllm_v2", "a2d_qwen2")},
    **{name: "mlx_lm.models.qwen3" for name in ("sdar", "a2d_qwen3")},
    **{name: "mlx_lm.models.llama" for name in ("mistral", "stable_diffcoder", "a2d_llama")},
    "sdar_moe": "mlx_lm.models.qwen3_moe",
    "illada": "mlx_dllm_plugin.models.llada",
}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4},
    "modernbert": {"num_hidden_layers": 3, "local_attention": 12, "tie_word_embeddings": True},
    "llada_moe": {"num_experts": 4, "num_experts_per_tok": 2, "expert_intermediate_size": 16},
    "llada2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "expert_capacity": 4,
        "block_size": 8,
    },
    "sdar_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
SEEDS = {"a2d_qwen3": 2}  # of weights that do not say the same everywhere


@cache
def weights(name: str, **config: Any) -> Any:
    """A model of the family's architecture with random weights, large enough that every token and position matters."""
    mx.random.seed(0)  # initial biases come from it
    module = importlib.import_module(MODULES[name])
    kind = MODULES[name].rpartition(".")[2]
    base = {**CONFIGS.get(kind, CONFIGS["qwen3"]), **CHANGES.get(name, {}), **config}
    model = module.Model(module.ModelArgs.from_dict({"model_type": kind, "vocab_size": VOCAB, **base}))
    random = np.random.default_rng(SEEDS.get(name, 0))

    def fill(value: mx.array) -> mx.array:
        centre, std = (np.array(value), 0.1) if value.ndim == 1 else (0.0, 1.7 / value.shape[-1] ** 0.5)
        return mx.array((centre + std * random.standard_normal(value.shape)).astype(np.float32))

    model.update(tree_map(fill, model.parameters()))
    mx.eval(model.parameters())
    return model


def wrapped(name: str, **changes: Any) -> Any:
    """A model decoded as the family does; ``seen`` holds the ids of every forward."""
    config = changes.pop("config", {})
    own, family, seen = weights(name, **config), FAMILIES.get(name), []

    def hidden(_: Any, ids: mx.array, caches: list[Any]) -> mx.array:
        seen.append(ids)
        assert len(seen) < 999, "decoding does not end"
        return family.hidden(own, ids, caches)

    values: dict[str, Any] = {
        "family": name,
        "logits": family.logits,
        "attention": family.attention,
        "canvas": family.canvas,
        "unmasking": "threshold",
        "mask_token_id": MASK,
        "eos_token_ids": (EOS,),
        "vocab_size": VOCAB,
        "context_length": CONTEXT,
        "defaults": {"max_tokens": 8},
        "block_origin": family.block_origin,
    }
    rank = family.score_rank
    return SimpleNamespace(
        own=own,
        seen=seen,
        layers=own.layers,
        diffusion_spec=DiffusionSpec(**{**values, **changes}),
        diffusion_family=replace(
            family,
            hidden=hidden,
            head=lambda _, states: family.head(own, states),
            score_rank=None if rank is None else lambda _: rank(own),
        ),
    )


def model_of(kind: str, **changes: Any) -> Any:
    name, logits = BIDIRECTIONAL[kind]
    return wrapped(name, logits=logits, **changes)


def causal(name: str, block: int = 8, sub: int | None = None, **changes: Any) -> Any:
    """A block-causal model of the family, with its own rule."""
    defaults = {"max_tokens": 8, "block_length": block, **({} if sub is None else {"sub_block_length": sub})}
    values = {"attention": "block_causal", "canvas": "growing", "unmasking": FAMILIES.get(name).unmasking}
    return wrapped(name, **{**values, "defaults": defaults, **changes})


def shown(result: DecodingResult) -> Shown:
    return [(commit.positions, commit.tokens, commit.masked) for commit in result.commits]


def masks(prompt: Sequence[int], new: int) -> list[int]:
    return [*prompt, *[MASK] * new]


def replay(canvas: Sequence[int], result: DecodingResult) -> Iterator[tuple[Commit, list[int]]]:
    """Each commit and the canvas before it."""
    now = list(canvas)
    for commit in result.commits:
        yield commit, list(now)
        for position, token in zip(commit.positions, commit.tokens, strict=True):
            now[position] = token
        for position in commit.masked:
            now[position] = MASK


def close(a: DecodingResult, b: DecodingResult) -> None:
    """The same commits, and log-probabilities that differ by no more than rounding."""
    assert shown(a) == shown(b)
    assert (a.tokens, a.nfe, a.finish_reason, a.canvas) == (b.tokens, b.nfe, b.finish_reason, b.canvas)
    assert len(a.logprobs) == len(b.logprobs) > 0
    for one, other in zip(a.logprobs, b.logprobs, strict=True):
        assert one.id == other.id and abs(one.token - other.token) < TOLERANCE
        if one.full is not None:
            np.testing.assert_allclose(np.array(one.full), np.array(other.full), rtol=0, atol=TOLERANCE)


# The slow truth: a plain loop over one row, and forwards whose kept keys and values are frozen by hand.


class Frozen(AttentionPolicy):
    """Keys and values of the last whole forward; a window's own take their place for that forward alone."""

    def __init__(self) -> None:
        self.start = 0
        self.whole: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> int:  # type: ignore[override]
        return self.start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.whole is None:
            self.whole = keys, values
            return keys, values
        end = self.start + keys.shape[2]
        old_keys, old_values = self.whole
        return (
            mx.concatenate([old_keys[:, :, : self.start], keys, old_keys[:, :, end:]], axis=2),
            mx.concatenate([old_values[:, :, : self.start], values, old_values[:, :, end:]], axis=2),
        )

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return None


class TwoRows(AttentionPolicy):
    """The keys of both rows beside each other, and what each column of each row sees of them [2, T, 2T]."""

    def __init__(self, mask: np.ndarray, rank: int):
        self.mask = mx.array(mask.reshape(2, *[1] * (rank - 3), *mask.shape[1:]))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        both = [mx.concatenate([part[:1], part[1:]], axis=2) for part in (keys, values)]
        return mx.concatenate([both[0]] * 2), mx.concatenate([both[1]] * 2)

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return self.mask


class Slow:
    """Logits [T, V] of a canvas by the family's own model; NaN outside of the columns that are computed."""

    def __init__(self, name: str):
        self.own, self.family = weights(name), FAMILIES.get(name)
        self.kept = [Frozen() for _ in self.own.layers]

    def logits(self, canvas: list[int], window: tuple[int, int] | None = None) -> np.ndarray:
        """With a window the others' keys and values are those of the last call without one."""
        if window is None:
            self.kept = [Frozen() for _ in self.own.layers]
        a, b = window or (0, len(canvas))
        for layer in self.kept:
            layer.start = a
        found = np.full((len(canvas), VOCAB), np.nan)
        states = self.own.model(mx.array([canvas[a:b]]), self.kept)
        found[a:b] = np.array(self.family.head(self.own, states)[0])
        return found

    def shadows(
        self, canvas: list[int], block: tuple[int, int], window: tuple[int, int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits of the canvas, and of masks that stand in for the block's columns."""
        assert window is None
        a, b = block
        mask = np.zeros((2, len(canvas), 2 * len(canvas)), dtype=bool)
        mask[:, :, : len(canvas)] = True
        for column in range(a, b):
            mask[1, column, column] = False
            mask[1, column, len(canvas) + a : len(canvas) + b] = True
        assert self.family.score_rank is not None
        policy = TwoRows(mask, self.family.score_rank(self.own))
        ids = mx.array([canvas, [*canvas[:a], *[MASK] * (b - a), *canvas[b:]]])
        states = self.own.model(ids, [policy] * len(self.kept))
        real, shadow = np.array(self.family.head(self.own, states)).astype(np.float64)
        return real, shadow


class SlowLLaDA(Slow):
    """LLaDA in numpy and float64: every column with a position of its own, and a mask that says what each sees."""

    def __init__(self, name: str = "llada"):
        super().__init__(name)
        self.frozen: list[tuple[np.ndarray, np.ndarray]] = []

    def forward(
        self, ids: list[int], at: Sequence[int], seen: np.ndarray, frozen: list[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """
        Args:
            at: position of each token.
            seen: which of the frozen columns and then of the tokens each token sees [N, F + N].
            frozen: keys and values of columns that are not computed [F, heads, D], per layer.

        Returns:
            Logits [N, V], and the tokens' own keys and values.
        """
        args = self.own.args
        x = np.array(self.own.model.embed_tokens.weight).astype(np.float64)[ids]
        made = []
        for number, layer in enumerate(self.own.layers):
            attention, mlp = layer.self_attn, layer.mlp
            h = self.norm(x, layer.input_layernorm)
            q, k, v = (
                self.dense(h, part).reshape(len(ids), heads, -1)
                for part, heads in (
                    (attention.q_proj, args.num_attention_heads),
                    (attention.k_proj, args.num_key_value_heads),
                    (attention.v_proj, args.num_key_value_heads),
                )
            )
            q, k = self.turned(q, at), self.turned(k, at)
            made.append((k, v))
            if frozen:
                k, v = (np.concatenate([old, new]) for old, new in zip(frozen[number], (k, v), strict=True))
            groups = args.num_attention_heads // args.num_key_value_heads
            k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
            scores = np.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
            p = np.exp(log_softmax(np.where(seen, scores, -1e30)))
            x = x + self.dense(np.einsum("hqk,khd->qhd", p, v).reshape(len(ids), -1), attention.o_proj)
            h = self.norm(x, layer.post_attention_layernorm)
            gate = self.dense(h, mlp.gate_proj)
            x = x + self.dense(gate / (1 + np.exp(-gate)) * self.dense(h, mlp.up_proj), mlp.down_proj)
        return self.dense(self.norm(x, self.own.model.norm), self.own.lm_head), made

    @staticmethod
    def dense(x: np.ndarray, layer: Any) -> np.ndarray:
        return x @ np.array(layer.weight).astype(np.float64).T

    @staticmethod
    def norm(x: np.ndarray, layer: Any) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + layer.eps) * np.array(layer.weight).astype(np.float64)

    def turned(self, x: np.ndarray, at: Sequence[int]) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = np.array(at)[:, None] * self.own.args.rope_theta ** -(np.arange(half) / half)[None]
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def logits(self, canvas: list[int], window: tuple[int, int] | None = None) -> np.ndarray:
        return self.both(canvas, window, (0, 0))[0]

    def shadows(
        self, canvas: list[int], block: tuple[int, int], window: tuple[int, int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        return self.both(canvas, window, block)

    def both(
        self, canvas: list[int], window: tuple[int, int] | None, block: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Columns see all columns, kept or computed. A shadow sees all but its own place, and all shadows."""
        a, b = window or (0, len(canvas))
        real, stands_in = list(range(a, b)), list(range(*block))
        kept = [column for column in range(len(canvas)) if not a <= column < b]
        keys = [*kept, *real]
        seen = np.array(
            [[True] * len(keys) + [False] * len(stands_in) for _ in real]
            + [[key != column for key in keys] + [True] * len(stands_in) for column in stands_in]
        )
        frozen = [(k[kept], v[kept]) for k, v in self.frozen] if window else []
        ids = [canvas[column] for column in real] + [MASK] * len(stands_in)
        logits, made = self.forward(ids, [*real, *stands_in], seen, frozen)
        if window is None:
            self.frozen = [(k[: len(real)], v[: len(real)]) for k, v in made]
        found = np.full((2, len(canvas), VOCAB), np.nan)
        found[0, real], found[1, stands_in] = logits[: len(real)], logits[len(real) :]
        return found[0], found[1]


def slow_model(kind: str) -> Slow:
    name = BIDIRECTIONAL[kind][0]
    return SlowLLaDA() if name == "llada" else Slow(name)


@dataclass
class Found:
    """What the plain loop did; ``before`` are the canvases its forwards read."""

    canvas: list[int]
    commits: Shown = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    columns: int = 0


def best(logits: np.ndarray) -> tuple[float, int]:
    """The confidence of a position with these logits [V], and the token it would get."""
    assert not np.isnan(logits).any(), "a column that was not computed"
    return float(np.exp(log_softmax(logits).max())), int(np.delete(logits, MASK).argmax())  # the mask is the last id


def surest(logits: np.ndarray, free: Sequence[int], shift: int, threshold: float) -> dict[int, int]:
    """The rule ``threshold``: position and token of each commit."""
    order = sorted(free, key=lambda p: (-best(logits[p - shift])[0], p))
    sure = sum(best(logits[p - shift])[0] > threshold for p in free)
    return {p: best(logits[p - shift])[1] for p in sorted(order[: max(sure, 1)])}


def plain_loop(
    kind: str, canvas: Sequence[int], slots: Sequence[int], options: DecodingOptions, *, origin: int | None = None
) -> Found:
    """Fill the slots by the rules ``threshold`` and ``wino``, with all that caches, guidance and ``after_eos`` do."""
    slow, without = slow_model(kind), slow_model(kind)
    shift = int(BIDIRECTIONAL[kind][1] == "shifted")
    found, masked, width = Found(list(canvas)), set(slots), len(canvas)
    stale, wide = options.first_token == "stale", options.vicinity or 0
    first = slots[0] if origin is None else origin
    ends = () if options.stop_at_eos is False else options.eos_token_ids or (EOS,)
    length, wino = options.block_length or width, options.unmasking == "wino"
    threshold = 0.9 if options.threshold is None else options.threshold
    for start in range(first, width, length):
        block = [slot for slot in slots if start <= slot < start + length]
        if not block:
            continue
        low = max(block[0] - (shift and not stale) - wide, 0)
        high = width if options.cache == "prefix" else min(block[-1] + 1 + wide, width)
        step = 0
        while masked & set(block):
            whole = not step % (options.refresh_interval or 10**9) or options.cache in (None, "none")
            window = None if whole else (low, high)
            a, b = window or (0, width)
            found.before.append(list(found.canvas))
            found.columns += (b - a) * (1 + wino)
            here = (block[0], block[-1] + 1)
            doubt = np.zeros(0)
            if wino:
                logits, doubt = slow.shadows(found.canvas, here, window)
            else:
                logits = slow.logits(found.canvas, window)
            if options.cfg_scale:
                shown_too = {*slots, *(p for p, token in enumerate(canvas) if token in (options.cfg_keep_tokens or ()))}
                given = [token if p in shown_too else MASK for p, token in enumerate(found.canvas)]
                unguided = without.logits(given, window)
                logits = unguided + (options.cfg_scale + 1) * (logits - unguided)
            free = sorted(masked & set(block))
            ended = next((p for p in slots if found.canvas[p] in ends and p not in masked), None)
            if options.after_eos == "skip" and ended is not None:
                free = [p for p in free if p < ended]
            again: list[int] = []
            if stale and not step:
                new = {block[0]: best(logits[block[0] - shift])[1]}
            elif wino:
                new, again = widely(logits, doubt, found.canvas, block, free, options)
            else:
                new = surest(logits, free, shift, threshold)
            found.commits.append((tuple(new), tuple(new.values()), tuple(again)))
            step += 1
            for position, token in new.items():
                found.canvas[position] = token
            masked = masked - new.keys() | set(again)
            for position in again:
                found.canvas[position] = MASK
            ended = next((p for p in slots if found.canvas[p] in ends and p not in masked), None)
            if options.after_eos == "eos" and ended is not None:
                for position in (p for p in slots if p > ended):
                    found.canvas[position] = found.canvas[ended]
                    masked.discard(position)
            final = set(block) & masked if wino else set()
            if ended is not None and not final and not any(p < ended for p in masked):
                return found
    return found


def widely(
    logits: np.ndarray,
    shadow: np.ndarray,
    canvas: list[int],
    block: list[int],
    free: list[int],
    options: DecodingOptions,
) -> tuple[dict[int, int], list[int]]:
    """WINO: what a step commits, and which committed positions it masks again."""
    order = sorted(free, key=lambda p: (-best(logits[p])[0], p))
    threshold = 0.6 if options.threshold is None else options.threshold
    sure = sum(best(logits[p])[0] >= threshold for p in free)
    count = min(max(sure, 1), max(min(len(free) * 7 // 10, 20), 5), len(free))
    doubts = {p: float(np.exp(log_softmax(shadow[p])[canvas[p]])) for p in block if p not in free}
    narrow = 0.9 if options.narrow_out_threshold is None else options.narrow_out_threshold
    short = sorted((p for p, confidence in doubts.items() if confidence < narrow), key=lambda p: doubts[p])
    return {p: best(logits[p])[1] for p in sorted(order[:count])}, sorted(short[: count - 1])


def same_as_plain(kind: str, prompt: list[int], options: DecodingOptions) -> DecodingResult:
    """Decode both ways, compare everything that was done, return the engine's result."""
    result = decode(model_of(kind), prompt, options)
    new = options.max_tokens or 8
    found = plain_loop(kind, masks(prompt, new), range(len(prompt), len(prompt) + new), options)
    assert shown(result) == found.commits
    assert result.canvas == found.canvas
    assert (result.nfe, result.columns) == (len(found.commits), found.columns)
    return result


CACHES = ["prefix", "dual"]
PROMPT = TEXT[:9]
SOME = {"max_tokens": 20, "block_length": 6, "stop_at_eos": False}


# Thresholds that commit now one, now several; with guidance confidences are higher.
THRESHOLDS = {
    "gpt2": (0.18, 0.4),
    "qwen2": (0.26, 0.4),
    "llada": (0.2, 0.5),
    "gemma2": (0.7, 0.75),
    "modernbert": (0.28, 0.65),
    "dream": (0.26, 0.45),
    "gpt2 shifted": (0.2, 0.45),
}


def threshold_of(kind: str, scale: float | None = None) -> float:
    return THRESHOLDS[kind][bool(scale)]


# 1, 2: what must not change anything.

UNCHANGED: dict[str, dict[str, Any]] = {
    "threshold": {},
    "factor": {"factor": 2.2},
    "eb": {"entropy_bound": 2.5},
    "hierarchy": {"threshold": 0.5, "low_threshold": 0.2},
    "local_leap": {"threshold": 0.45, "relaxed_threshold": 0.25},
    "credit": {"threshold": 0.4},
    "prophet": {"max_denoising_steps": 16, "gap": 1.0},
    "low_confidence": {"max_denoising_steps": 11},
    "origin": {"max_denoising_steps": 11, "seed": 3},
}
JOBS = [
    *((kind, "threshold", kept) for kind in ("gpt2", "llada", "dream") for kept in CACHES),
    *((kind, "threshold", "dual") for kind in ("gemma2", "modernbert")),
    *((kind, "threshold", "prefix") for kind in ("qwen2", "gpt2 shifted")),
    *(("llada", rule, "prefix") for rule in ("factor", "hierarchy", "credit", "prophet")),
    *(("dream", rule, "dual") for rule in ("eb", "local_leap", "credit", "low_confidence", "origin")),
    *((kind, "wino", kept) for kind in ("gpt2", "gemma2") for kept in CACHES),
    *((kind, "guided", kept) for kind, kept in zip(("gpt2", "gpt2 shifted", "gemma2"), CACHES * 2, strict=False)),
]


def settings_of(kind: str, rule: str) -> dict[str, Any]:
    if rule == "wino":
        return {"unmasking": "wino", "threshold": 0.2, "narrow_out_threshold": 0.5}
    if rule in ("threshold", "guided"):
        scale = 1.2 if rule == "guided" else None
        return {"unmasking": "threshold", "threshold": threshold_of(kind, scale), "cfg_scale": scale}
    return {"unmasking": rule, **UNCHANGED[rule]}


@pytest.mark.parametrize(("kind", "rule", "kept"), JOBS)
def test_a_cache_that_computes_everything_changes_nothing(kind: str, rule: str, kept: str) -> None:
    """With a refresh in every forward bit by bit, and with a vicinity as wide as the canvas up to rounding."""
    model = model_of(kind)
    options = DecodingOptions(**SOME, **settings_of(kind, rule))
    plain = decode(model, PROMPT, options)
    assert plain.nfe > 4 and (rule == "origin" or len({len(commit.positions) for commit in plain.commits}) > 1)
    assert rule != "threshold" or decode(model, PROMPT, replace(options, cache="none")) == plain
    refreshed = decode(model, PROMPT, replace(options, cache=kept, refresh_interval=1))
    assert refreshed == plain
    wide = decode(model, PROMPT, replace(options, cache=kept, vicinity=29))
    close(wide, plain)
    assert wide.columns == plain.columns
    cheap = decode(model, PROMPT, replace(options, cache=kept))
    assert cheap.columns < plain.columns and cheap != plain  # the control: a cache is approximate


@pytest.mark.parametrize("kept", CACHES)
def test_klass_remembers_the_block_alone_when_a_cache_computes_no_more(kept: str) -> None:
    """Over one block that is all there is. Over several, nothing is stable in the first forward of a block, where
    without a cache every mask has been looked at before."""
    values = {"threshold": 0.3, "kl_threshold": 0.4, "kl_history": 1, "max_tokens": 20, "stop_at_eos": False}
    options = DecodingOptions(unmasking="klass", **values)
    for kind in ("llada", "modernbert"):
        model = model_of(kind)
        assert decode(model, PROMPT, replace(options, cache=kept, refresh_interval=1)) == decode(model, PROMPT, options)
        firsts = []
        for own in (replace(options, block_length=5), replace(options, block_length=5, cache=kept, refresh_interval=1)):
            commits = decode(model, PROMPT, own).commits
            blocks = {(commit.positions[0] - 9) // 5: commit for commit in reversed(commits)}
            firsts.append([len(blocks[number].positions) for number in range(4)])
        assert firsts[1] == [1, 1, 1, 1] and max(firsts[0]) > 1


GUIDED = [(kind, None) for kind in KINDS] + [(kind, 1.2) for kind in ("gpt2", "dream", "gemma2")]


@pytest.mark.parametrize("kept", CACHES)
@pytest.mark.parametrize(("kind", "scale"), GUIDED)
def test_the_first_commit_of_every_block_is_that_of_a_whole_forward(kind: str, kept: str, scale: float | None) -> None:
    """And later ones are not: that is what a cache gives up."""
    model = model_of(kind)
    options = DecodingOptions(cache=kept, cfg_scale=scale, threshold=threshold_of(kind, scale), **SOME)
    result = decode(model, PROMPT, options)
    shift, firsts, others, changed = kind in SHIFTED, set(), 0, 0
    for commit, canvas in replay(masks(PROMPT, 20), result):
        block = (commit.positions[0] - 9) // 6
        logits = np.array(bidirectional_forward(model, mx.array([canvas]))[0]).astype(np.float64)
        if scale:
            hidden = [MASK] * 9 + canvas[9:]
            without = np.array(bidirectional_forward(model, mx.array([hidden]))[0]).astype(np.float64)
            logits = without + (scale + 1) * (logits - without)
        free = [p for p in range(9 + 6 * block, min(15 + 6 * block, 29)) if canvas[p] == MASK]
        own = {p: log_softmax(logits[p - shift]) for p in free}
        wanted = surest(logits, free, shift, options.threshold or 0)
        if block not in firsts:
            firsts.add(block)
            assert dict(zip(commit.positions, commit.tokens, strict=True)) == wanted
            for position, entry in zip(commit.positions, commit.logprobs, strict=True):
                assert entry.token == pytest.approx(own[position][entry.id], abs=TOLERANCE)
        else:
            others += 1
            at_commit = [own[p][entry.id] for p, entry in zip(commit.positions, commit.logprobs, strict=True)]
            changed += max(abs(e.token - v) for e, v in zip(commit.logprobs, at_commit, strict=True)) > 1e-3
    assert firsts == {0, 1, 2, 3} and others > 3 and changed > others / 2


# 3: one row against the plain loop.


@pytest.mark.parametrize("kept", [*CACHES, None])
@pytest.mark.parametrize(("kind", "scale"), GUIDED)
def test_decoding_equals_a_plain_loop_with_frozen_keys_and_values(
    kind: str, kept: str | None, scale: float | None
) -> None:
    options = DecodingOptions(cache=kept, cfg_scale=scale, threshold=threshold_of(kind, scale), **SOME)
    if scale:
        options = replace(options, cfg_keep_tokens=tuple(PROMPT[2:4]))
    results = [same_as_plain(kind, PROMPT, options)]
    if kept is None:
        same_as_plain(kind, TEXT[3:8], replace(options, threshold=2.0))
        return
    each = ({"refresh_interval": 2}, {"refresh_interval": 4, "vicinity": 2}, {"vicinity": 3})
    for more in each if kind in ("gpt2", "dream") and not scale else each[1:2]:
        results.append(same_as_plain(kind, PROMPT, replace(options, **more)))
    assert len({(result.nfe, result.columns) for result in results}) == len(results)
    assert any(results[0].logprobs != other.logprobs for other in results[1:])


OTHERS = [name for name in BIDIRECTIONAL if name not in KINDS]


@pytest.mark.parametrize(("kind", "kept"), list(zip(OTHERS, CACHES * len(OTHERS), strict=False)))
def test_every_family_keeps_the_keys_and_values_of_its_layers_apart(kind: str, kept: str) -> None:
    """And its rows: whatever its model does with the caches it is given."""
    model, options = model_of(kind), DecodingOptions(cache=kept, threshold=0.4, **SOME)
    assert same_as_plain(kind, PROMPT, options).nfe > 5
    same_as_alone(model, [PROMPT, TEXT[3:8]], [options, replace(options, threshold=0.2, max_tokens=13)])


@pytest.mark.parametrize("kind", SHIFTED)
@pytest.mark.parametrize("kept", [*CACHES, None])
def test_a_stale_first_token_comes_from_the_blocks_first_forward(kind: str, kept: str | None) -> None:
    """However unsure it is, and no later forward of the block computes the column before it."""
    options = DecodingOptions(cache=kept, first_token="stale", threshold=threshold_of(kind), **SOME)
    stale = same_as_plain(kind, PROMPT, options)
    fresh = same_as_plain(kind, PROMPT, replace(options, first_token=None))
    assert decode(model_of(kind), PROMPT, replace(options, first_token="fresh")) == fresh
    edges = [9, 15, 21, 27]
    firsts = [commit.positions for commit in stale.commits if commit.positions[0] in edges]
    assert firsts == [(edge,) for edge in edges] and shown(stale) != shown(fresh)
    if kept is not None:
        for more in ({"refresh_interval": 2}, {"refresh_interval": 3, "vicinity": 2}, {"refresh_interval": 1}):
            same_as_plain(kind, PROMPT, replace(options, **more))


@pytest.mark.parametrize("kept", [*CACHES, None])
def test_a_block_of_one_token_is_its_first_token(kept: str | None) -> None:
    model = model_of("dream")
    options = DecodingOptions(cache=kept, first_token="stale", max_tokens=5, block_length=1, stop_at_eos=False)
    result = same_as_plain("dream", PROMPT, options)
    events = list(stream_decode(model, PROMPT, options))
    done = [(event.start, event.end) for event in events if isinstance(event, BlockDone)]
    assert done == [(p, p + 1) for p in range(9, 14)] and result.nfe == 5
    longer = list(stream_decode(model, PROMPT, replace(options, block_length=3)))
    assert [(e.start, e.end) for e in longer if isinstance(e, BlockDone)] == [(9, 12), (12, 14)]


@pytest.mark.parametrize("kept", CACHES)
def test_a_stale_first_token_is_the_first_step_of_the_blocks_schedule(kept: str) -> None:
    model = model_of("dream")
    values = {"unmasking": "low_confidence", "max_tokens": 12, "block_length": 6, "stop_at_eos": False, "cache": kept}
    result = decode(model, PROMPT, DecodingOptions(max_denoising_steps=6, first_token="stale", **values))
    assert [len(commit.positions) for commit in result.commits] == [1, 3, 2, 1, 3, 2]
    assert [result.commits[i].positions for i in (0, 3)] == [(9,), (15,)]
    with pytest.raises(DiffusionError) as error:
        stream_decode(model, PROMPT, DecodingOptions(max_denoising_steps=2, first_token="stale", **values))
    assert str(error.value) == (
        "max_denoising_steps leaves one step for a block of 6 tokens, and first_token stale takes it: give at least 4."
    )


# 4: batches.

PROMPTS = [TEXT[:5], TEXT[2:13], TEXT[7:10], TEXT[1:9]]
LENGTHS = (14, 9, 17, 11)
BATCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "prefix": {"cache": "prefix"},
    "dual": {"cache": "dual"},
    "prefix, refreshed": {"cache": "prefix", "refresh_interval": 2},
    "dual, refreshed": {"cache": "dual", "refresh_interval": 2},
    "prefix, vicinity": {"cache": "prefix", "vicinity": 3},
    "dual, vicinity": {"cache": "dual", "vicinity": 3},
    "dual, all of it": {"cache": "dual", "vicinity": 2, "refresh_interval": 3, "temp": 0.8},
    "dual, klass": {"cache": "dual", "unmasking": "klass", "kl_threshold": 0.4, "kl_history": 1},
    "none, klass": {"unmasking": "klass", "kl_threshold": 0.4, "kl_history": 1},
    "prefix, credit": {"cache": "prefix", "unmasking": "credit"},
    "none, credit": {"unmasking": "credit"},
}


def rows_of(kind: str, case: str, **changes: Any) -> list[DecodingOptions]:
    """Of one batch: thresholds, lengths and seeds of their own; some commit all at once and leave early."""
    values = {"unmasking": "threshold", "block_length": 6, "stop_at_eos": False, **BATCHES[case], **changes}
    return [
        DecodingOptions(max_tokens=n, threshold=threshold, seed=i, **values)
        for i, (n, threshold) in enumerate(zip(LENGTHS, (0.3, 2.0, 0.0, 0.45), strict=True))
    ]


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(("gpt2", case) for case in BATCHES),
        *(("dream", case) for case in ("prefix", "dual, refreshed", "dual, vicinity", "dual, klass", "none, credit")),
    ],
)
def test_a_row_of_a_cached_batch_equals_the_row_alone(kind: str, case: str) -> None:
    """Rows of unequal length stand at different blocks, need different columns and leave at different times."""
    model = model_of(kind)
    results = same_as_alone(model, PROMPTS, rows_of(kind, case))
    assert len({result.nfe for result in results}) >= 3 and [len(r.tokens) for r in results] == list(LENGTHS)


@pytest.mark.parametrize("case", ["prefix", "dual", "dual, all of it", "none"])
@pytest.mark.parametrize("kind", ["llada", "modernbert", "gemma2"])
def test_rows_of_other_families_do_not_meet_either(kind: str, case: str) -> None:
    same_as_alone(model_of(kind), PROMPTS, rows_of(kind, case))


@pytest.mark.parametrize("kept", CACHES)
def test_rows_may_have_caches_of_their_own_shape(kept: str) -> None:
    """Other blocks, other intervals, other vicinities, fresh and stale first tokens, ends of sequences."""
    model = model_of("dream")
    first = DecodingOptions(max_tokens=LENGTHS[0], threshold=0.3, block_length=4, cache=kept, stop_at_eos=False)
    tokens = decode(model, PROMPTS[0], first).tokens
    own: list[dict[str, Any]] = [
        {"block_length": 4, "eos_token_ids": (tokens[6],)},
        {"block_length": 3, "refresh_interval": 2, "first_token": "stale", "stop_at_eos": False},
        {"block_length": 20, "vicinity": 2, "stop_at_eos": False},
        {"block_length": 5, "first_token": "stale", "vicinity": 1, "refresh_interval": 4, "stop_at_eos": False},
    ]
    options = [
        DecodingOptions(cache=kept, max_tokens=n, threshold=threshold, **values)
        for n, threshold, values in zip(LENGTHS, (0.3, 0.5, 0.4, 0.35), own, strict=True)
    ]
    for order in ([0, 1, 2, 3], [3, 1, 0], [2, 0]):
        results = same_as_alone(model, [PROMPTS[i] for i in order], [options[i] for i in order])
        assert results[order.index(0)].finish_reason == "stop"


@pytest.mark.parametrize("case", ["none, klass", "dual, klass", "none, credit", "prefix, credit"])
def test_rows_with_blocks_of_unequal_length_remember_their_own(case: str) -> None:
    """A step looks at more columns of a row than its block has: what it remembers of those is not the next block's."""
    options = [
        replace(own, block_length=length) for own, length in zip(rows_of("llada", case), (4, 9, 3, 8), strict=True)
    ]
    for order in ([0, 1, 2, 3], [1, 3]):
        same_as_alone(model_of("llada"), [PROMPTS[i] for i in order], [options[i] for i in order])


@pytest.mark.parametrize("case", ["prefix", "dual, vicinity", "none"])
@pytest.mark.parametrize("kind", ["gpt2 shifted", "gemma2"])
@pytest.mark.parametrize("scales", [(1.2, 0.0, 0.5, 0.0), (0.0, 1.5, 0.0, 3.0)])
def test_guided_rows_of_a_cached_batch(kind: str, case: str, scales: tuple[float, ...]) -> None:
    """The copies that guidance needs go when its last row has left, with the keys and values of theirs."""
    options = [
        replace(own, cfg_scale=scale, cfg_keep_tokens=tuple(TEXT[2:4]) if scale == 0.5 else None)
        for own, scale in zip(rows_of(kind, case), scales, strict=True)
    ]
    same_as_alone(model_of(kind), PROMPTS, options)


@pytest.mark.parametrize("kept", [*CACHES, None])
@pytest.mark.parametrize("rows", [1, 2])
def test_gemma2_with_as_many_rows_as_key_value_heads(rows: int, kept: str | None) -> None:
    """There a mask of rank 4 would broadcast over the wrong axis without an error; guidance doubles the rows."""
    for guided in (False, True):
        case = "none" if kept is None else kept
        options = [replace(own, cfg_scale=0.7 if guided else None) for own in rows_of("gemma2", case)[:rows]]
        same_as_alone(model_of("gemma2"), PROMPTS[:rows], options)


@pytest.mark.parametrize("kept", CACHES)
def test_a_mask_of_the_wrong_rank_would_show(kept: str) -> None:
    """The control of the test above."""
    model, options = model_of("gemma2"), rows_of("gemma2", kept)[:2]
    right = decode(model, PROMPTS[:2], options)
    model.diffusion_family = replace(model.diffusion_family, score_rank=lambda model: 4)
    assert decode(model, PROMPTS[:2], options) != right


WINO = {"unmasking": "wino", "threshold": 0.2, "narrow_out_threshold": 0.5, "block_length": 8, "stop_at_eos": False}


@pytest.mark.parametrize("kept", [*CACHES, None])
@pytest.mark.parametrize("kind", ["gpt2", "llada", "gemma2"])
def test_wino_rows_at_blocks_of_their_own_do_not_meet(kind: str, kept: str | None) -> None:
    """Outputs of unequal length: a row's shadows must not see masks in columns that are no part of its own block."""
    options = [
        DecodingOptions(max_tokens=n, cache=kept, **{**WINO, "threshold": t})
        for n, t in ((16, 0.2), (11, 0.3), (20, 0.1), (12, 0.25))
    ]
    results = same_as_alone(model_of(kind), PROMPTS, options)
    assert sum(bool(commit.masked) for result in results for commit in result.commits) > 3


@pytest.mark.parametrize("kept", [*CACHES, None])
@pytest.mark.parametrize("lengths", [(4, 8), (8, 3)])
def test_wino_rows_with_blocks_of_unequal_length(kept: str | None, lengths: tuple[int, int]) -> None:
    """A block may be shorter than what a step looks at, and than the columns that a forward computes."""
    options = [
        DecodingOptions(max_tokens=16 - i, cache=kept, **{**WINO, "threshold": 0.3, "block_length": length})
        for i, length in enumerate(lengths)
    ]
    same_as_alone(model_of("gpt2"), PROMPTS[:2], options)


def test_rows_of_unlike_caches_are_refused() -> None:
    options = [DecodingOptions(max_tokens=4, cache=kept) for kept in ("prefix", "dual")]
    with pytest.raises(DiffusionError) as error:
        stream_decode(model_of("gpt2"), PROMPTS[:2], options)
    assert str(error.value) == "All rows of a batch must use the same cache, got dual, prefix."


def test_unlike_rows_need_a_known_rank() -> None:
    model = model_of("gpt2")
    model.diffusion_family = replace(model.diffusion_family, score_rank=None)
    sentences = {
        "threshold": "Rows of unequal length cannot be decoded together",
        "wino": "Tokens cannot be revised",
    }
    for rule, what in sentences.items():
        prompts = PROMPTS[:2] if rule == "threshold" else PROMPTS[:1]
        with pytest.raises(DiffusionError) as error:
            decode(model, prompts, DecodingOptions(max_tokens=4, unmasking=rule, cache="dual"))
        assert str(error.value) == (
            f"{what} by the family gpt2, which does not say the rank of its attention scores: decode them one by one."
        )
    alone = DecodingOptions(threshold=0.18, cache="dual", **SOME)
    assert decode(model, PROMPT, alone) == decode(model_of("gpt2"), PROMPT, alone)


# 5, 6: block-causal families.

OF_FAMILY: dict[str, dict[str, Any]] = {
    "sdar": {},
    "sdar_moe": {},
    "llada2_moe": {},
    "fast_dllm_v2": {"sub": 4},
    "stable_diffcoder": {},
    "a2d_qwen3": {},
    "a2d_qwen2": {"logits": "shifted"},
    "a2d_llama": {},
}


def test_every_block_causal_family_is_tested_here() -> None:
    names = {f.name for f in FAMILIES.builtin() if f.attention == "block_causal" or "attention" in f.variants}
    assert names == set(BLOCK_CAUSAL) == set(OF_FAMILY)


def causal_options(name: str, **changes: Any) -> DecodingOptions:
    rule = FAMILIES.get(name).unmasking
    own = {"max_denoising_steps": 4} if rule == "mdlm" else {"threshold": 0.25}
    return DecodingOptions(**{"max_tokens": 21, "stop_at_eos": False, "full_logprobs": True, **own, **changes})


SHAPES = [
    *((name, 8, None) for name in BLOCK_CAUSAL),
    ("sdar", 5, None),
    ("fast_dllm_v2", 8, 4),
    ("fast_dllm_v2", 6, 3),
]


@pytest.mark.parametrize(("name", "block", "sub"), SHAPES)
def test_keeping_final_blocks_changes_nothing(name: str, block: int, sub: int | None) -> None:
    model = causal(name, block, sub, logits=OF_FAMILY[name].get("logits", FAMILIES.get(name).logits))
    for prompt in (TEXT[:3], TEXT[2:23]):
        options = causal_options(name)
        every = decode(model, prompt, replace(options, cache="none"))
        kept = decode(model, prompt, replace(options, cache="block"))
        close(kept, every)
        assert decode(model, prompt, options) == kept  # auto
        assert kept.columns <= every.columns and (len(prompt) < block or kept.columns < every.columns)
        assert every.prefills == 0 and kept.prefills == (len(prompt) // block > 1)


@pytest.mark.parametrize("kept", ["none", "block"])
@pytest.mark.parametrize("name", ["sdar", "llada2_moe", "fast_dllm_v2", "a2d_qwen3"])
def test_block_causal_rows_do_not_meet(name: str, kept: str) -> None:
    model = causal(name, 8, OF_FAMILY[name].get("sub"))
    prompts = [TEXT[:3], TEXT[4:26], TEXT[:8], TEXT[3:20]]
    options = [causal_options(name, max_tokens=n, cache=kept, seed=i) for i, n in enumerate((21, 5, 12, 30))]
    same_as_alone(model, prompts, options)
    if name == "fast_dllm_v2":  # the copies of guided rows go with the last of them
        same_as_alone(
            model, prompts, [replace(own, cfg_scale=s) for own, s in zip(options, (0.0, 1.2, 0.4, 0.0), strict=True)]
        )


@pytest.mark.parametrize("prompt", [3, 8, 13, 24])
@pytest.mark.parametrize("name", BLOCK_CAUSAL)
def test_a_block_costs_no_forward_but_those_that_commit(name: str, prompt: int) -> None:
    """What a block leaves to the next one is stored by that one's first forward."""
    values = OF_FAMILY[name]
    model = causal(name, 8, values.get("sub"), logits=values.get("logits", FAMILIES.get(name).logits))
    result = decode(model, TEXT[:prompt], causal_options(name, max_tokens=24))
    assert result.nfe == len(result.commits) and all(commit.positions for commit in result.commits)
    assert len(model.seen) == result.nfe + result.prefills
    widths = [ids.shape[1] for ids in model.seen[result.prefills :]]
    assert result.columns == sum(widths)
    spec = model.diffusion_spec
    if name == "fast_dllm_v2":
        assert widths == [16 if prompt == 13 else 8, *[8] * (result.nfe - 1)]
        return
    first = prompt % 8 if spec.block_origin == "prompt_end" else 0
    wanted, last = [], None
    for commit in result.commits:
        start = (commit.positions[0] - first) // 8 * 8 + first
        end = min(start + 8, prompt + 24) if first else start + 8
        begin = max(start - 8, 0) if start != last else start
        before = spec.logits == "shifted" and start >= prompt  # the column that predicts the block's first
        wanted.append(end - min(begin, max(start - before, 0)))
        last = start
    assert widths == wanted


@pytest.mark.parametrize("kept", ["none", "block", "dual"])
@pytest.mark.parametrize("prompt", [13, 16])
def test_fast_dllm_v2_hands_over_once_per_further_block(prompt: int, kept: str) -> None:
    """With a threshold of 0 a sub-block is one forward, so that the rest are the hand-overs."""
    model = causal("fast_dllm_v2", 8, 4)
    result = decode(model, TEXT[:prompt], DecodingOptions(max_tokens=19, threshold=0.0, stop_at_eos=False, cache=kept))
    firsts = [p for p in range(prompt, prompt + 19) if p % 8 == 0]
    parts = {p // 4 for p in range(prompt, prompt + 19) if p % 8}
    assert [commit.positions for commit in result.commits if commit.positions[0] in firsts] == [(p,) for p in firsts]
    assert result.nfe == len(parts) + len(firsts) == len(result.commits)
    assert len(model.seen) == result.nfe + result.prefills


# 7: what is counted.


def counted(kind: str, **values: Any) -> int:
    """The columns of a decode of 5 + 16 tokens in blocks of 8, one token a step; as many as the forwards were given."""
    model = model_of(kind)
    options = DecodingOptions(**{"max_tokens": 16, "block_length": 8, "stop_at_eos": False, "threshold": 2.0, **values})
    result = decode(model, TEXT[:5], options)
    rows = 2 if options.cfg_scale or options.unmasking == "wino" else 1
    assert all(ids.shape[0] == rows for ids in model.seen) and len(model.seen) == result.nfe
    total = sum(ids.shape[1] for ids in model.seen)
    assert result.columns == total * (2 if options.unmasking == "wino" else 1)
    assert options.unmasking == "wino" or result.nfe == 16
    return result.columns


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_columns_are_those_that_are_computed(kind: str) -> None:
    shift = kind == "dream"
    assert counted(kind) == counted(kind, cache="none") == 16 * 21
    assert counted(kind, cache="dual") == 2 * (21 + 7 * (8 + shift))
    assert counted(kind, cache="prefix") == 2 * 21 + 7 * (16 + shift) + 7 * (8 + shift)
    assert counted(kind, cache="dual", vicinity=3) == 2 * 21 + 7 * (3 + 8 + 3 + shift) + 7 * (3 + 8 + shift)
    assert counted(kind, cache="prefix", vicinity=3) == 2 * 21 + 7 * (3 + 16 + shift) + 7 * (3 + 8 + shift)
    assert counted(kind, cache="dual", refresh_interval=1) == 16 * 21
    assert counted(kind, cache="dual", refresh_interval=2) == 2 * (4 * 21 + 4 * (8 + shift))
    assert counted(kind, cache="prefix", refresh_interval=3) == 6 * 21 + 5 * (16 + shift) + 5 * (8 + shift)
    assert counted(kind, cache="dual", cfg_scale=1.0) == 2 * (21 + 7 * (8 + shift))  # guided rows count once
    if shift:
        assert counted(kind, cache="dual", first_token="stale") == 2 * (21 + 7 * 8)
        assert counted(kind, cache="prefix", first_token="stale") == 2 * 21 + 7 * 16 + 7 * 8


def test_columns_of_shadows_count_too() -> None:
    values = {"unmasking": "wino", "threshold": 0.3, "narrow_out_threshold": 0.5}
    for kept in ("none", "prefix", "dual"):
        model = model_of("llada")
        options = DecodingOptions(max_tokens=16, block_length=8, stop_at_eos=False, cache=kept, **values)
        result = decode(model, TEXT[:5], options)
        assert counted("llada", cache=kept, **values) == result.columns
        wide = 2 if kept != "none" else result.nfe
        first = sum(commit.positions[0] < 13 for commit in result.commits) if kept != "none" else 0
        narrow = {"none": 0, "dual": 8 * (result.nfe - 2), "prefix": 16 * (first - 1) + 8 * (result.nfe - first - 1)}
        assert result.columns == 2 * (21 * wide + narrow[kept])


@pytest.mark.parametrize("kept", ["none", "dual"])
def test_what_is_released_says_what_was_computed_so_far(kept: str) -> None:
    model = model_of("llada")
    options = DecodingOptions(max_tokens=16, block_length=8, threshold=2.0, cache=kept, stop_at_eos=False)
    steps, released = 0, []
    for event in stream_decode(model, TEXT[:5], options):
        if isinstance(event, Commit):
            steps += 1
        elif isinstance(event, Released):
            released.append(event.columns)
            assert event.columns == sum(ids.shape[1] for ids in model.seen[:steps]) and event.nfe == steps
        elif isinstance(event, Finished):
            assert event.columns == released[-1]
    assert len(set(released)) > 2


def test_columns_of_block_causal_rows() -> None:
    """Prompt of two blocks, output of two: a block's first forward stores the block before."""
    options = DecodingOptions(max_tokens=16, threshold=2.0, stop_at_eos=False, unmasking="threshold")
    for name, logits in (("sdar", "in_place"), ("a2d_qwen3", "in_place"), ("a2d_qwen2", "shifted")):
        model = causal(name, 8, logits=logits)
        kept = decode(model, TEXT[:16], options)
        assert kept.columns == 2 * (16 + 7 * (8 + (logits == "shifted")))
        assert decode(model, TEXT[:16], replace(options, cache="none")).columns == 8 * 24 + 8 * 32


# 8: the head in chunks.

CHUNKED: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.3, "cfg_scale": 0.4},
    "klass": {"threshold": 0.2, "kl_threshold": 0.4, "kl_history": 1},
    "credit": {"threshold": 0.4},
    "wino": {"threshold": 0.2, "narrow_out_threshold": 0.5},
    "hierarchy": {"threshold": 0.4, "low_threshold": 0.2},
    "local_leap": {"threshold": 0.4, "relaxed_threshold": 0.25},
    "eb": {"entropy_bound": 2.5},
    "prophet": {"max_denoising_steps": 20, "gap": 1.0},
    "random": {"max_denoising_steps": 9},
    "maskgit_plus": {"max_denoising_steps": 9, "alg_temp": 0.4, "top_p": 0.9},
    "low_confidence": {"max_denoising_steps": 9, "eos_flags": "confidence", "suppress_tokens": (3, 38)},
}


def heads_of(model: Any) -> list[int]:
    """Columns of every call of the head, from now on."""
    widths: list[int] = []
    head = model.diffusion_family.head

    def count(own: Any, states: mx.array) -> mx.array:
        widths.append(states.shape[1])
        return head(own, states)

    model.diffusion_family = replace(model.diffusion_family, head=count)
    return widths


DRAWN = [*((rule, 0.0) for rule in CHUNKED), *((rule, 0.9) for rule in ("threshold", "credit", "wino", "maskgit_plus"))]


@pytest.mark.parametrize(("rule", "temp"), DRAWN)
def test_a_head_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch, rule: str, temp: float) -> None:
    """Neighbours, what is remembered, draws and shadows do not end where a chunk does."""
    for kept in (None, "dual") if rule in ("klass", "credit", "wino") else (None,):
        values = {"unmasking": rule, "temp": temp, "cache": kept, "stop_at_eos": False, **CHUNKED[rule]}
        options = [DecodingOptions(max_tokens=n, seed=n, full_logprobs=True, **values) for n in (16, 11)]
        if "cfg_scale" in values:
            options[1] = replace(options[1], cfg_scale=1.1)
        jobs = [TEXT[:5], TEXT[2:13]]
        monkeypatch.setattr(Batch, "LOGITS", 2**24)
        at_once = decode(model_of("gpt2"), jobs, options)
        for columns, most in ((0, 2), (7, 7)):
            monkeypatch.setattr(Batch, "LOGITS", max(columns * VOCAB, 1))
            model = model_of("gpt2")
            widths = heads_of(model)
            for one, other in zip(decode(model, jobs, options), at_once, strict=True):
                close(one, other)
            made = widths[: -(-16 // most)]
            assert sum(made) == 16 and max(made) <= most


@pytest.mark.parametrize("name", ["sdar", "fast_dllm_v2"])
def test_a_head_in_chunks_changes_nothing_in_blocks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, jobs = causal(name, 8, OF_FAMILY[name].get("sub")), [TEXT[:5], TEXT[2:24]]
    for values in ({}, {"temp": 0.8}, {"unmasking": "credit", "threshold": 0.5}):
        options = [causal_options(name, seed=seed, **values) for seed in (1, 2)]
        monkeypatch.setattr(Batch, "LOGITS", 2**24)
        at_once = decode(model, jobs, options)
        monkeypatch.setattr(Batch, "LOGITS", 3 * VOCAB)
        for one, other in zip(decode(model, jobs, options), at_once, strict=True):
            close(one, other)


@pytest.mark.parametrize("rule", ["threshold", "random"])
def test_a_logit_that_is_no_number_shows_in_any_chunk(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Also where no confidence is made of it."""
    monkeypatch.setattr(Batch, "LOGITS", 3 * VOCAB)
    for column in (0, 4, 13):
        model = model_of("gpt2")
        hidden = model.diffusion_family.hidden

        def broken(
            own: Any, ids: mx.array, caches: list[Any], column: int = column, hidden: Callable[..., mx.array] = hidden
        ) -> mx.array:
            at = mx.arange(ids.shape[1])[None, :, None]
            return mx.where(at == 9 + column, mx.nan, hidden(own, ids, caches))

        model.diffusion_family = replace(model.diffusion_family, hidden=broken)
        with pytest.raises(DiffusionError, match="not finite numbers"):
            decode(model, PROMPT, DecodingOptions(unmasking=rule, max_tokens=14))


def peak(model: Any, prompt: list[int], options: DecodingOptions) -> int:
    """Bytes that one forward and commit need. MLX frees behind the computation, so that a single peak may be low."""
    found = []
    for _ in range(2):
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        events = stream_decode(model, prompt, options)
        assert isinstance(next(events), Commit)
        mx.synchronize()
        found.append(mx.get_peak_memory() - before)
        del events
    return max(found)


@pytest.mark.parametrize("rule", ["threshold", "wino"])
def test_chunks_bound_the_memory_of_a_step(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """At once, the logits of 250 columns of 20,000 numbers; in chunks, those of 16."""
    size = {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 256, "n_ctx": 256, "vocab_size": 20_000}
    model = model_of("gpt2", config=size, vocab_size=20_000, context_length=256, mask_token_id=19_999)
    options = DecodingOptions(unmasking=rule, max_tokens=244, threshold=2.0 if rule == "threshold" else 1.0)
    logits = 4 * 244 * 20_000
    monkeypatch.setattr(Batch, "LOGITS", 2**40)
    at_once = peak(model, TEXT[:12], options)
    monkeypatch.setattr(Batch, "LOGITS", 16 * 20_000)
    in_chunks = peak(model, TEXT[:12], options)
    assert at_once > logits
    assert in_chunks < at_once / 2 and in_chunks < logits


# 9: WINO.

DOUBTING = [(0.05, 0.5), (0.2, 0.5), (0.1, 0.9), (0.3, 0.3), (0.0, 1.0), (0.6, 0.9)]


@pytest.mark.parametrize("kept", [*CACHES, None])
@pytest.mark.parametrize("kind", ["gpt2", "llada", "gemma2"])
def test_wino_releases_each_token_once_and_leaves_fewer_masks_each_time(kind: str, kept: str | None) -> None:
    again = 0
    for threshold, narrow in DOUBTING[:3] if kept else DOUBTING:
        values = {"threshold": threshold, "narrow_out_threshold": narrow, "block_length": 8, "stop_at_eos": False}
        options = DecodingOptions(unmasking="wino", max_tokens=20, cache=kept, **values)
        canvas, output, final = dict(enumerate(PROMPT)), list[int](), 9
        for event in stream_decode(model_of(kind), PROMPT, options):
            if isinstance(event, Commit):
                left = 29 - len(canvas)
                assert not set(event.positions) & canvas.keys() and set(event.masked) <= canvas.keys()
                assert min((*event.positions, *event.masked)) >= 9 + len(output), "released tokens do not change"
                assert len(event.positions) == len(event.tokens) > len(event.masked) and MASK not in event.tokens
                block = {(position - 9) // 8 for position in (*event.positions, *event.masked)}
                assert len(block) == 1
                canvas |= dict(zip(event.positions, event.tokens, strict=True))
                for position in event.masked:
                    del canvas[position]
                assert 29 - len(canvas) < left
                again += len(event.masked)
            elif isinstance(event, BlockDone):
                assert event.start == final and set(range(event.start, event.end)) <= canvas.keys()
                final = event.end
            elif isinstance(event, Released):
                output += event.tokens
                assert 9 + len(output) == final  # nothing before its block is complete, then all of it
                assert [canvas[9 + i] for i in range(len(output))] == output
                assert [entry.id for entry in event.logprobs] == list(event.tokens)
            elif isinstance(event, Finished):
                assert event.canvas == (*PROMPT, *output) and len(output) == 20 and event.reason == "length"
    assert again > 3


@pytest.mark.parametrize("kind", ["gpt2", "llada", "gemma2"])
def test_wino_doubts_what_masks_in_the_stead_of_tokens_would_not_say(kind: str) -> None:
    """Against forwards with explicit masks; LLaDA's in numpy, where shadows have positions of their own."""
    again = 0
    for (threshold, narrow), length in zip(DOUBTING, (8, None) * 3, strict=True):
        values = {"threshold": threshold, "narrow_out_threshold": narrow, "stop_at_eos": False, "max_tokens": 20}
        result = same_as_plain(kind, PROMPT, DecodingOptions(unmasking="wino", block_length=length, **values))
        again += sum(len(commit.masked) for commit in result.commits)
    assert again > 5


@pytest.mark.parametrize("more", [{}, {"vicinity": 2}, {"refresh_interval": 2}], ids=str)
@pytest.mark.parametrize("kept", CACHES)
def test_shadows_of_a_window_see_what_is_kept(kept: str, more: dict[str, int]) -> None:
    again = 0
    for threshold, narrow in DOUBTING[:3]:
        values = {"threshold": threshold, "narrow_out_threshold": narrow, "stop_at_eos": False, "max_tokens": 20}
        options = DecodingOptions(unmasking="wino", block_length=8, cache=kept, **values, **more)
        again += sum(len(commit.masked) for commit in same_as_plain("llada", PROMPT, options).commits)
    assert again > 2


def test_wino_masks_the_worst_doubts_and_fewer_than_it_commits() -> None:
    """With a bound of 1 every committed token is in doubt; the defaults are those of its authors."""
    options = DecodingOptions(unmasking="wino", max_tokens=20, threshold=0.0, narrow_out_threshold=1.0)
    result = decode(model_of("gpt2"), PROMPT, replace(options, stop_at_eos=False))
    seen: set[int] = set()
    for commit in result.commits:
        assert len(commit.masked) == min(len(commit.positions) - 1, len(seen))
        seen = seen - set(commit.masked) | set(commit.positions)
    rule = RULES.get("wino")
    assert dict(rule.defaults) == {"threshold": 0.6, "narrow_out_threshold": 0.9}
    assert [len(commit.positions) for commit in result.commits][0] == 14  # 0.7 of 20 masks


def test_wino_fills_holes_too() -> None:
    marks = [i % 3 != 1 for i in range(24)]
    options = DecodingOptions(unmasking="wino", threshold=0.1, narrow_out_threshold=0.5, block_length=9)
    for kept in (None, *CACHES):
        result = infill(model_of("llada"), TEXT[:24], marks, replace(options, cache=kept))
        slots = [i for i, hole in enumerate(marks) if hole]
        canvas = [MASK if hole else token for token, hole in zip(TEXT[:24], marks, strict=True)]
        plain = plain_loop("llada", canvas, slots, replace(options, cache=kept, stop_at_eos=False), origin=0)
        assert shown(result) == plain.commits and result.canvas == plain.canvas


# 10: what becomes of positions after an end of sequence.


def ends_of(model: Any, options: DecodingOptions, prompt: list[int]) -> list[int]:
    """Tokens that are committed before something that precedes them."""
    result, found = decode(model, prompt, replace(options, stop_at_eos=False, after_eos=None)), list[int]()
    for commit, canvas in replay(masks(prompt, len(result.canvas) - len(prompt)), result):
        for position, token in zip(commit.positions, commit.tokens, strict=True):
            if MASK in canvas[:position] and token not in (*found, *canvas[len(prompt) :]):
                found.append(token)
    return found


@pytest.mark.parametrize("kept", [None, *CACHES])
@pytest.mark.parametrize("how", ["fill", "skip", "eos"])
@pytest.mark.parametrize("kind", ["gpt2", "dream"])
def test_an_early_end_of_sequence_skips_or_overwrites_what_follows(kind: str, how: str, kept: str | None) -> None:
    options = DecodingOptions(max_tokens=20, block_length=10, threshold=threshold_of(kind), after_eos=how, cache=kept)
    ends, later = ends_of(model_of(kind), options, PROMPT), 0
    assert len(ends) > 2
    for end in ends[:4]:
        own, model = replace(options, eos_token_ids=(end,)), model_of(kind)
        result = decode(model, PROMPT, own)
        plain = plain_loop(kind, masks(PROMPT, 20), range(9, 29), own)
        assert shown(result) == plain.commits and result.canvas == plain.canvas
        assert (result.nfe, result.columns) == (len(plain.commits), plain.columns)
        stop = result.canvas[9:].index(end)
        assert (result.tokens, result.finish_reason) == (result.canvas[9 : 9 + stop], "stop")
        assert end not in result.tokens and MASK not in result.tokens
        assert [entry.id for entry in result.logprobs] == [*result.tokens, end]
        if kept is None:
            assert [ids[0].tolist() for ids in model.seen] == plain.before
        known = 29
        for commit, canvas in replay(masks(PROMPT, 20), result):
            if how != "fill":
                assert max(commit.positions) < known
            later += known < 29
            at = [p for p, token in zip(commit.positions, commit.tokens, strict=True) if token == end]
            known = min([known, *at])
            assert how != "fill" or canvas.count(MASK) > 0
        if how == "eos":
            assert result.canvas[9 + stop :] == [end] * (20 - stop)
    assert later > 1  # forwards after the first end of sequence


def test_what_follows_an_end_of_sequence_saves_forwards() -> None:
    options = DecodingOptions(max_tokens=20, block_length=20, threshold=0.18)
    cost = {"fill": 0, "skip": 0, "eos": 0}
    for end in ends_of(model_of("gpt2"), options, PROMPT):
        for how in cost:
            cost[how] += decode(model_of("gpt2"), PROMPT, replace(options, eos_token_ids=(end,), after_eos=how)).nfe
    assert cost["skip"] < cost["fill"] and cost["eos"] < cost["fill"]


@pytest.mark.parametrize("how", ["skip", "eos"])
@pytest.mark.parametrize("kept", [None, *CACHES])
def test_rows_end_early_beside_others(how: str, kept: str | None) -> None:
    """Padded on the left, with ends of their own, one without any."""
    options = DecodingOptions(block_length=10, threshold=0.18, after_eos=how, cache=kept)
    ends = ends_of(model_of("gpt2"), replace(options, max_tokens=20), PROMPT)
    own: list[dict[str, Any]] = [
        {"eos_token_ids": (end,), "max_tokens": n} for end, n in zip(ends[:3], (20, 14, 17), strict=True)
    ]
    own += [{"after_eos": None, "stop_at_eos": False, "max_tokens": 12}]
    results = same_as_alone(model_of("gpt2"), [PROMPT, *PROMPTS[:3]], [replace(options, **values) for values in own])
    assert results[0].finish_reason == "stop" and results[3].finish_reason == "length"


@pytest.mark.parametrize("how", ["skip", "eos"])
@pytest.mark.parametrize("name", ["sdar", "fast_dllm_v2"])
def test_an_early_end_of_sequence_in_a_block(name: str, how: str) -> None:
    """Forwards that recompute everything show the canvas that they read."""
    options = DecodingOptions(threshold=2.0, cache="none", after_eos=how, max_tokens=24, full_logprobs=True)
    prompt, ended = TEXT[:16], 0
    for end in ends_of(causal(name, 8, unmasking="threshold"), options, prompt)[:5]:
        model, own = causal(name, 8, unmasking="threshold"), replace(options, eos_token_ids=(end,))
        result = decode(model, prompt, own)
        at = 16 + result.canvas[16:].index(end)
        assert result.tokens == result.canvas[16:at][:24] and MASK not in result.tokens
        known = 99
        for commit, ids in zip(result.commits, model.seen, strict=True):
            read = ids[0].tolist()
            if known < len(read) - 1:
                ended += 1
                assert how == "skip" or set(read[known + 1 :]) == {end}
            assert max(commit.positions) <= known
            known = min([known, *(p for p, t in zip(commit.positions, commit.tokens, strict=True) if t == end)])
        close(decode(causal(name, 8, unmasking="threshold"), prompt, replace(own, cache=None)), result)
    assert ended > 3


def test_an_end_of_sequence_that_wino_commits_early() -> None:
    """What follows it may be left masked: the output is complete all the same, and the block is not said to be."""
    base = DecodingOptions(max_tokens=16, threshold=0.05, narrow_out_threshold=0.5, block_length=8, unmasking="wino")
    tokens = decode(model_of("gpt2"), TEXT[:5], replace(base, stop_at_eos=False)).tokens
    for end in dict.fromkeys(tokens):
        options = replace(base, eos_token_ids=(end,), after_eos="skip")
        result = decode(model_of("gpt2"), TEXT[:5], options)
        for done in stream_decode(model_of("gpt2"), TEXT[:5], options):
            assert not isinstance(done, BlockDone) or MASK not in result.canvas[done.start : done.end]
        stop = 5 + result.canvas[5:].index(end) if end in result.canvas[5:] else 21
        assert result.tokens == result.canvas[5:stop] and MASK not in result.tokens
        assert result.finish_reason == ("stop" if stop < 21 else "length")
        assert [entry.id for entry in result.logprobs] == result.canvas[5 : stop + 1]


def told(token: int, confidence: float) -> np.ndarray:
    """Logits of four tokens, one of which has this probability."""
    logits = np.full(4, np.log((1 - confidence) / 3))
    logits[token] = np.log(confidence)
    return logits


def test_an_end_of_sequence_that_wino_takes_back() -> None:
    """It was committed first, and what follows it skipped; then it goes. What the model did not choose must not end the
    output, and every token of it has a log-probability."""
    a, b, end, mask = range(4)
    unsure, sure = [told(a, 0.3)] * 3, [told(end, 0.95)] * 3
    script = [  # per forward what the canvas says of the prompt and of six slots, and what the shadows say
        ([told(a, 0.5), told(a, 0.5), told(a, 0.5), told(end, 0.9), *unsure], [told(a, 0.9)] * 7),
        ([told(a, 0.5), told(a, 0.9), told(a, 0.9), told(a, 0.3), *unsure], [*[told(a, 0.9)] * 4, *sure]),
        *[([told(b, 0.9)] * 7, [told(a, 0.95)] * 3 + [told(b, 0.9)] + sure)] * 9,
    ]
    forwards = iter(script)

    def hidden(_: Any, ids: mx.array, caches: list[Any]) -> mx.array:
        return mx.array(np.array(next(forwards), dtype=np.float32))

    model = model_of("gpt2", vocab_size=4, mask_token_id=mask, eos_token_ids=(end,))
    family = replace(model.diffusion_family, hidden=hidden, head=lambda _, states: states)
    model.diffusion_family = family
    result = decode(model, [a], DecodingOptions(unmasking="wino", max_tokens=6, after_eos="skip"))
    assert shown(result)[:2] == [((3,), (end,), ()), ((1, 2), (a, a), (3,))]
    chosen = {p for commit in result.commits for p, token in zip(commit.positions, commit.tokens, strict=True)}
    output = result.canvas[1 : 1 + result.generated_tokens]
    assert set(range(1, 1 + len(output))) <= chosen
    assert [entry.id for entry in result.logprobs] == output


# 11: holes.

MARKS = [False] + [i % 7 not in (0, 3) and not 11 <= i < 16 for i in range(1, 30)]
SLOTS = [i for i, hole in enumerate(MARKS) if hole]
HOLED = [MASK if hole else token for token, hole in zip(TEXT[:30], MARKS, strict=True)]


@pytest.mark.parametrize("block", [None, 6])
@pytest.mark.parametrize("kept", CACHES)
@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_holes_are_filled_with_a_cache(kind: str, kept: str, block: int | None) -> None:
    """A block's window reaches from its first hole to its last, or to the end."""
    model = model_of(kind)
    base = DecodingOptions(threshold=threshold_of(kind), block_length=block, full_logprobs=True)
    every = infill(model, TEXT[:30], MARKS, base)
    assert infill(model, TEXT[:30], MARKS, replace(base, cache=kept, refresh_interval=1)) == every
    close(infill(model, TEXT[:30], MARKS, replace(base, cache=kept, vicinity=30)), every)
    first_tokens = (None, "stale") if kind == "dream" else (None,)
    for first_token in first_tokens:
        for more in ({}, {"refresh_interval": 3, "vicinity": 2}):
            options = replace(base, cache=kept, first_token=first_token, stop_at_eos=False, **more)
            result = infill(model, TEXT[:30], MARKS, options)
            plain = plain_loop(kind, HOLED, SLOTS, options, origin=0)
            assert shown(result) == plain.commits and result.canvas == plain.canvas
            assert (result.nfe, result.columns) == (len(plain.commits), plain.columns)
            assert [t for t, hole in zip(result.canvas, MARKS, strict=True) if not hole] == [
                t for t, hole in zip(TEXT[:30], MARKS, strict=True) if not hole
            ]
            assert result.tokens == [result.canvas[p] for p in SLOTS] and MASK not in result.tokens


@pytest.mark.parametrize("kept", CACHES)
@pytest.mark.parametrize("kind", ["gpt2", "dream", "gemma2"])
def test_texts_with_holes_do_not_meet(kind: str, kept: str) -> None:
    texts = [TEXT[:30], TEXT[3:15], TEXT[8:31]]
    marks = [MARKS, [False, *[True] * 5, False, False, True, True, False, False], [i % 2 == 1 for i in range(23)]]
    own: list[dict[str, Any]] = [{"block_length": 6}, {"vicinity": 2}, {"block_length": 5, "refresh_interval": 2}]
    options = [DecodingOptions(cache=kept, threshold=t, **v) for t, v in zip((0.35, 0.5, 0.3), own, strict=True)]
    for i, result in enumerate(infill(model_of(kind), texts, marks, options)):
        assert result == as_row(infill(model_of(kind), texts[i], marks[i], options[i]), i)


# 12: Fast-dLLM v2's block cache.


class FrozenBlock(Frozen):
    """A whole forward with this mask, whose keys and values a part of the last block sees in place of its own."""

    def __init__(self, mask: np.ndarray):
        super().__init__()
        self.mask = mx.array(mask)

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return self.mask if length == self.mask.shape[0] else None


def plain_parts(name: str, shift: bool, prompt: list[int], new: int, threshold: float) -> tuple[Shown, list[int]]:
    """Blocks of 8 in parts of 4: what is committed, and how many columns each forward computes after the prefill."""
    own, family = weights(name), FAMILIES.get(name)
    width = -(-(len(prompt) + new) // 8) * 8
    canvas, commits, widths = masks(prompt, width - len(prompt)), [], []
    stored, layers = max(len(prompt) // 8 * 8 - 8, 0), list[Any]()
    begun = None

    def forward(start: int, end: int) -> np.ndarray:
        for layer in layers:
            layer.start = start
        states = own.model(mx.array([canvas[start:end]]), layers)
        found = np.full((end, VOCAB), np.nan)
        found[start:] = np.array(family.head(own, states)[0])
        return found

    def whole(visible: int, final: int) -> np.ndarray:
        nonlocal layers, stored
        block = np.arange(visible) // 8
        layers = [FrozenBlock(block[None] <= block[:, None]) for _ in own.layers]
        widths.append(visible - min(stored, visible - 8))
        stored = final
        return forward(0, visible)

    for start in range(len(prompt) // 8 * 8, width, 8):
        if shift and canvas[start] == MASK:
            canvas[start] = best(whole(start, start)[start - 1])[1]
            commits.append(((start,), (canvas[start],), ()))
            if MASK not in canvas[: len(prompt) + new]:
                return commits, widths
        for part in (start, start + 4):
            opens = canvas[part] == MASK
            while MASK in canvas[part : part + 4]:
                masked_first = opens and canvas[part] == MASK
                if begun != start or masked_first:
                    logits = whole(start + 8, start)
                else:
                    widths.append(4)
                    logits = forward(part, part + 4)
                begun = start
                free = [p for p in range(part, part + 4) if canvas[p] == MASK]
                chosen = surest(logits, free, shift, threshold)
                for position, token in chosen.items():
                    canvas[position] = token
                commits.append((tuple(chosen), tuple(chosen.values()), ()))
                if MASK not in canvas[: len(prompt) + new]:
                    return commits, widths
    raise AssertionError("the output is not complete")


@pytest.mark.parametrize("prompt", [3, 8, 13, 24])
@pytest.mark.parametrize("name", ["fast_dllm_v2", "sdar"])
def test_a_part_of_a_block_is_computed_alone(name: str, prompt: int) -> None:
    """While the rest of the block is as its last whole forward left it; that one is due at a block's begin, and as long
    as a part's first token is masked."""
    differs = 0
    for threshold in (2.0, 0.2):
        model = causal(name, 8, unmasking="threshold")
        options = DecodingOptions(max_tokens=21, threshold=threshold, stop_at_eos=False, sub_block_length=4)
        result = decode(model, TEXT[:prompt], replace(options, cache="dual"))
        commits, widths = plain_parts(name, name == "fast_dllm_v2", TEXT[:prompt], 21, threshold)
        assert shown(result) == commits
        assert [ids.shape[1] for ids in model.seen[result.prefills :]] == widths
        assert result.columns == sum(widths) and (4 in widths or threshold < 1)
        every = decode(causal(name, 8, unmasking="threshold"), TEXT[:prompt], options)
        differs += result.logprobs != every.logprobs
        assert result.columns < every.columns or threshold < 1
    assert differs


@pytest.mark.parametrize("name", ["fast_dllm_v2", "sdar"])
def test_rows_whose_blocks_are_computed_in_parts_do_not_meet(name: str) -> None:
    model = causal(name, 8, 4, unmasking="threshold")
    options = [
        DecodingOptions(max_tokens=n, threshold=t, cache="dual", stop_at_eos=False, sub_block_length=4)
        for n, t in ((21, 0.35), (5, 2.0), (12, 0.0), (30, 0.5))
    ]
    results = same_as_alone(model, [TEXT[:3], TEXT[4:26], TEXT[:8], TEXT[3:20]], options)
    assert len({result.nfe for result in results}) == 4
    credit = [replace(own, unmasking="credit", temp=0.7, seed=i) for i, own in enumerate(options)]
    same_as_alone(model, [TEXT[:3], TEXT[4:26], TEXT[:8], TEXT[3:20]], credit)


def test_guided_rows_whose_blocks_are_computed_in_parts() -> None:
    model = causal("fast_dllm_v2", 8, 4)
    options = [
        DecodingOptions(max_tokens=21, threshold=0.5, cache="dual", stop_at_eos=False, cfg_scale=scale)
        for scale in (1.2, 0.0)
    ]
    first, second = same_as_alone(model, [TEXT[:11], TEXT[:11]], options)
    assert first.tokens != second.tokens
    assert {ids.shape[0] for ids in model.seen} == {1, 2} and 4 in {ids.shape[1] for ids in model.seen}


# 13: what is refused.

REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "block, of a whole canvas": (
        "gpt2",
        {"cache": "block"},
        "cache block keeps final blocks of block-causal attention, and the family gpt2 sees the whole canvas: leave it "
        "out, or choose prefix or dual, which are approximate.",
    ),
    "prefix, of blocks": (
        "sdar",
        {"cache": "prefix"},
        "cache prefix means nothing with block-causal attention, where block keeps the prefix exactly: leave it out.",
    ),
    "dual, of blocks": (
        "sdar",
        {"cache": "dual"},
        "cache dual means nothing with block-causal attention without sub_block_length: leave it out.",
    ),
    "prefix, of sub-blocks": (
        "fast_dllm_v2",
        {"cache": "prefix"},
        "cache prefix means nothing with block-causal attention, where block keeps the prefix exactly: leave it out.",
    ),
    "refresh_interval, without a cache": (
        "gpt2",
        {"refresh_interval": 2},
        "refresh_interval belongs to the caches prefix and dual of bidirectional attention, and the cache here is none"
        ": add cache prefix or dual, or leave it out.",
    ),
    "vicinity, without a cache": (
        "gpt2",
        {"vicinity": 0, "cache": "auto"},
        "vicinity belongs to the caches prefix and dual of bidirectional attention, and the cache here is none"
        ": add cache prefix or dual, or leave it out.",
    ),
    "vicinity, of blocks": (
        "sdar",
        {"vicinity": 2},
        "vicinity belongs to the caches prefix and dual of bidirectional attention, and the cache here is block: leave "
        "it out.",
    ),
    "refresh_interval, of sub-blocks": (
        "fast_dllm_v2",
        {"refresh_interval": 2, "cache": "dual"},
        "refresh_interval belongs to the caches prefix and dual of bidirectional attention, and the cache here is dual"
        ": leave it out.",
    ),
    "stale, of logits in place": (
        "llada",
        {"first_token": "stale", "cache": "dual"},
        "first_token stale is for shifted logits and bidirectional attention, and the family llada has logits in_place "
        "and attention bidirectional: leave it out.",
    ),
    "stale, of blocks": (
        "fast_dllm_v2",
        {"first_token": "stale"},
        "first_token stale is for shifted logits and bidirectional attention, and the family fast_dllm_v2 has logits "
        "shifted and attention block_causal: leave it out.",
    ),
    "skip, without an end": (
        "gpt2",
        {"after_eos": "skip", "stop_at_eos": False},
        "after_eos skip means nothing without stop_at_eos: give that too, or leave it out.",
    ),
    "eos, without an end": (
        "sdar",
        {"after_eos": "eos", "stop_at_eos": False},
        "after_eos eos means nothing without stop_at_eos: give that too, or leave it out.",
    ),
    "eos, which wino may take back": (
        "gpt2",
        {"unmasking": "wino", "after_eos": "eos"},
        "after_eos eos writes over what follows an end of sequence, and the unmasking rule 'wino' may take that back: "
        "choose skip, or another rule.",
    ),
    "wino, of shifted logits": (
        "dream",
        {"unmasking": "wino"},
        "The unmasking rule 'wino' puts masks in the place of committed tokens, which needs attention to both sides "
        "and logits in place; the family dream has attention bidirectional and logits shifted: choose another rule.",
    ),
    "wino, of blocks": (
        "sdar",
        {"unmasking": "wino"},
        "The unmasking rule 'wino' puts masks in the place of committed tokens, which needs attention to both sides "
        "and logits in place; the family sdar has attention block_causal and logits in_place: choose another rule.",
    ),
    "wino, of blocks and shifted logits": (
        "fast_dllm_v2",
        {"unmasking": "wino"},
        "The unmasking rule 'wino' puts masks in the place of committed tokens, which needs attention to both sides "
        "and logits in place; the family fast_dllm_v2 has attention block_causal and logits shifted: choose another "
        "rule.",
    ),
    "wino, of layers that see a neighbourhood": (
        "modernbert",
        {"unmasking": "wino"},
        "The unmasking rule 'wino' puts masks beside the canvas, and layers of the family modernbert see a "
        "neighbourhood of it only: choose another rule.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_means_nothing_is_refused(case: str) -> None:
    """At the call, before anything is computed."""
    name, values, sentence = REFUSED[case]
    model = causal(name, 8, OF_FAMILY[name].get("sub")) if name in BLOCK_CAUSAL else model_of(name)
    with pytest.raises(DiffusionError) as error:
        stream_decode(model, PROMPT, DecodingOptions(max_tokens=4, **values))
    assert str(error.value) == sentence and not model.seen


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gpt2", {"first_token": "fresh"}),
        ("dream", {"first_token": "stale"}),
        ("sdar", {"first_token": "fresh", "cache": "auto"}),
        ("sdar", {"after_eos": "fill", "stop_at_eos": False}),
        ("fast_dllm_v2", {"cache": "dual"}),
        ("gpt2", {"cache": "dual", "vicinity": 0, "refresh_interval": 9}),
    ],
)
def test_what_means_something_is_not(name: str, values: dict[str, Any]) -> None:
    model = causal(name, 8, OF_FAMILY[name].get("sub")) if name in BLOCK_CAUSAL else model_of(name)
    options = DecodingOptions(max_tokens=4, **values)
    assert len(decode(model, PROMPT, options).canvas) >= 13


def test_impossible_values_are_refused() -> None:
    for name, value, expected in (
        ("refresh_interval", 0, "a positive integer"),
        ("vicinity", -1, "0 or more"),
        ("cache", "kv", "one of auto, none, prefix, dual, block"),
        ("first_token", "old", "one of fresh, stale"),
        ("after_eos", "stop", "one of fill, skip, eos"),
        ("narrow_out_threshold", 1.5, "within [0, 1]"),
    ):
        with pytest.raises(DiffusionError) as error:
            DecodingOptions(**{name: value})
        assert str(error.value) == f"{name} must be {expected}, got {value!r}."
