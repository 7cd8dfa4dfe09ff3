"""LLaDA2's model: states, experts and logits of the goldens, routing against plain numpy, every spelling of its
configuration and every layout of its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_vlm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_dllm_plugin import DecodingOptions, DiffusionError, bidirectional_forward, decode
from mlx_dllm_plugin.caches import BlockCache, BlockWindow
from mlx_dllm_plugin.checkpoint import open_checkpoint
from mlx_dllm_plugin.conversion import mixed
from mlx_dllm_plugin.errors import CheckpointError
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.families.llada2_moe import version
from mlx_dllm_plugin.models import llada2_moe
from mlx_dllm_plugin.models.llada2_moe import block_routing, group_routing
from mlx_dllm_plugin.patches.mlx_vlm import served
from mlx_dllm_plugin.plan import plan, profiled
from mlx_dllm_plugin.spec import detect, resolve
from tests.tools import copy_run, edit_json

TOLERANCE = 1e-3  # of hidden states and logits, measured: at most 1.5e-4
SIGNAL = 0.5  # what a wrong routing must change at least, measured: 2.7 to 24
FOLDERS = ["llada2_moe-v20", "llada2_moe-v21", "llada2_moe-v22", "llada2_moe-v22-b8"]
V20, _, V22, V22_B8 = FOLDERS
EOS, MASK, VOCAB = 317, 320, 352

Weights = dict[str, mx.array]


def model_of(goldens: Path, name: str) -> Any:
    return utils.load_model(goldens / "block" / name)[0]


def copied(goldens: Path, name: str, to: Path, **changes: Any) -> Path:
    path = copy_run(goldens / "block" / name, to)
    edit_json(path / "config.json", **changes)
    return path


def numpy(value: mx.array) -> np.ndarray:
    return np.array(value.astype(mx.float32))


def distance(a: mx.array | np.ndarray, b: mx.array | np.ndarray) -> float:
    return float(np.abs(np.array(a) - np.array(b)).max())


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and weights that the routers choose, in the order of the calls."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    original = llada2_moe.Gate.__call__

    def recorded(self: Any, *args: Any) -> Any:
        ids, weights = original(self, *args)
        seen.append((np.array(ids), np.array(weights)))
        return ids, weights

    monkeypatch.setattr(llada2_moe.Gate, "__call__", recorded)
    return seen


def blocks(model: Any, ends: list[int], width: int, stored: list[int] | None = None) -> list[BlockCache]:
    """Caches for a forward of the columns that end at ``ends``."""
    caches = [BlockCache() for _ in model.layers]
    window = BlockWindow(stored or [0] * len(ends), ends, width, model.args.block_size, [0] * len(ends))
    for cache in caches:
        cache.window = window
    return caches


# The goldens


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("cached", [False, True], ids=["alone", "with our cache"])
@pytest.mark.parametrize("host", ["mlx-lm", "mlx-vlm"])
def test_states_experts_and_logits_are_the_goldens(
    host: str, name: str, cached: bool, goldens: Path, experts: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    if host == "mlx-lm":
        model = model_of(goldens, name)
    else:
        model = served.decoder_of(mlx_vlm.utils.load_model(goldens / "block" / name))
    arrays = np.load(goldens / "block" / name / "golden.npz")
    golden = json.loads((goldens / "block" / name / "golden.json").read_text())
    for number in "01":
        ids, hidden = mx.array(arrays[f"ids{number}"])[None], arrays[f"hidden{number}"]
        length = ids.shape[1]
        caches = blocks(model, [length], length) if cached else [None] * len(model.layers)
        if name == V22_B8 or not cached:
            assert model.args.block_size == golden["forward"]["block_length"]
        h, mask = model.model.word_embeddings(ids), model.model.attention_mask(length, caches[0])
        experts.clear()
        states = [h]
        for layer, cache in zip(model.layers, caches, strict=True):
            h = layer(h, mask, cache, model.model.place(cache))
            states.append(h)
        states.append(model.model.norm(h))
        assert len(states) == len(hidden)
        for got, expected in zip(states, hidden, strict=True):
            assert distance(got[0], expected) < TOLERANCE
        assert len(experts) == len(arrays[f"expert_ids{number}"]) == len(model.layers) - 1
        for i, (chosen, weights) in enumerate(experts):
            assert chosen[0].tolist() == arrays[f"expert_ids{number}"][i].tolist()
            assert distance(weights[0], arrays[f"expert_weights{number}"][i]) < 1e-4
        logits = model(ids, blocks(model, [length], length) if cached else None)
        assert distance(logits[0], arrays[f"logits{number}"]) < TOLERANCE
        assert distance(model.head(states[-1]), logits) == 0


@pytest.mark.parametrize("name", [V22, V22_B8])
def test_a_tail_that_is_no_whole_block_leaves_the_blocks_before_alone(name: str, goldens: Path) -> None:
    model, arrays = model_of(goldens, name), np.load(goldens / "block" / name / "golden.npz")
    ids, block = arrays["ids0"][None], model.args.block_size
    whole = numpy(model(mx.array(ids)))
    part = numpy(model(mx.array(ids[:, : block + 3])))
    assert distance(part[:, :block], whole[:, :block]) < 1e-4
    assert distance(part[:, block:], whole[:, block : block + 3]) > SIGNAL
    assert distance(numpy(model(mx.array(ids[:, :3]))), whole[:, :3]) > SIGNAL


CONTROLS = {
    "groups instead of blocks": lambda self, scores, bias: group_routing(scores, bias, 4, 2, 2, 2.5),
    "the bias in the weights": lambda self, scores, bias: _biased(scores, bias),
    "blocks that begin elsewhere": lambda self, scores, bias: block_routing(
        scores, bias, 32, 6, 2, 2.5, first=mx.array([16])
    ),
    "the choice without the bias": lambda self, scores, bias: block_routing(scores, 0 * bias, 32, 6, 2, 2.5),
    "scaled twice": lambda self, scores, bias: block_routing(scores, bias, 32, 6, 2, 6.25),
    "weights that are no shares": lambda self, scores, bias: block_routing(scores, bias, 32, 6, 2, 2.5, False),
    "no blocks": lambda self, scores, bias: block_routing(scores, bias, 1, 6, 2, 2.5),
}


def _biased(scores: mx.array, bias: mx.array) -> tuple[mx.array, mx.array]:
    ids, _ = block_routing(scores, bias, 32, 6, 2)
    weights = mx.take_along_axis(scores + bias, ids, axis=-1)
    return ids, weights / weights.sum(axis=-1, keepdims=True) * 2.5


@pytest.mark.parametrize("control", CONTROLS)
def test_another_routing_is_far_from_the_golden(control: str, goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, arrays = model_of(goldens, V22), np.load(goldens / "block" / V22 / "golden.npz")

    def gate(self: Any, x: mx.array, first: mx.array | None = None) -> tuple[mx.array, mx.array]:
        return CONTROLS[control](self, mx.sigmoid(x @ self.weight.T), self.expert_bias)

    ids = mx.array(arrays["ids0"])[None]
    assert distance(model(ids)[0], arrays["logits0"]) < TOLERANCE
    monkeypatch.setattr(llada2_moe.Gate, "__call__", gate)
    assert distance(model(ids)[0], arrays["logits0"]) > SIGNAL


def test_what_a_config_means_is_told_by_expert_capacity_alone(goldens: Path, tmp_path: Path) -> None:
    """2.2's n_group and topk_group are left over: other ones change nothing, and impossible ones neither."""
    arrays = np.load(goldens / "block" / V22 / "golden.npz")
    for number, groups in enumerate(({"n_group": 7}, {"n_group": None, "topk_group": None}, {"topk_group": ...})):
        model = utils.load_model(copied(goldens, V22, tmp_path / str(number), **groups))[0]
        assert distance(model(mx.array(arrays["ids0"])[None])[0], arrays["logits0"]) < TOLERANCE
    zero = utils.load_model(copied(goldens, V20, tmp_path / "zero", expert_capacity=0, block_size=32))[0]
    arrays = np.load(goldens / "block" / V20 / "golden.npz")
    assert zero.diffusion_spec.routing_block is None and zero.diffusion_spec.unmasking == "low_confidence_dynamic"
    assert distance(zero(mx.array(arrays["ids0"])[None])[0], arrays["logits0"]) < TOLERANCE


# Routing against numpy


def oracle(
    ranked: np.ndarray, top_k: int, *, block: int = 0, capacity: int = 0, groups: int = 0, kept: int = 0
) -> np.ndarray:
    """Experts [T, top_k] of scores with bias [T, E], in plain loops over stable sorts."""
    chosen = []
    for t, row in enumerate(ranked):
        allowed = np.zeros(len(row), dtype=bool)
        if block:
            first = t // block * block
            best = ranked[first : first + block].max(axis=0)
            allowed[np.argsort(-best, kind="stable")[:capacity]] = True
        else:
            parts = row.reshape(groups, -1)
            pairs = np.sort(parts, axis=1)[:, -2:].sum(axis=1, dtype=np.float32)
            for group in np.argsort(-pairs, kind="stable")[:kept]:
                allowed[group * parts.shape[1] : (group + 1) * parts.shape[1]] = True
        chosen.append(np.argsort(-np.where(allowed, row, -np.inf), kind="stable")[:top_k])
    return np.array(chosen)


def shares(scores: np.ndarray, ids: np.ndarray, scale: float = 1.0) -> np.ndarray:
    own = np.take_along_axis(scores, ids, axis=-1)
    return own / (own.sum(axis=-1, keepdims=True) + np.float32(1e-20)) * np.float32(scale)


def scores_of(random: np.random.Generator, shape: tuple[int, ...], digits: int | None) -> np.ndarray:
    logits = random.normal(size=shape).astype(np.float32)
    return np.array(mx.sigmoid(mx.array(logits if digits is None else logits.round(digits))))


def vectors(goldens: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads((goldens / "block" / "llada2_moe-v22-vectors" / "golden.json").read_text())["vectors"]
    return [vector for vector in found if vector["kind"] == kind and vector["target"] != "none"]


@pytest.mark.parametrize("digits", [None, 1, 0], ids=["apart", "some ties", "many ties"])
def test_shapes_of_the_published_vectors(digits: int | None, goldens: Path) -> None:
    cases = vectors(goldens, "router_shape_case")
    assert len(cases) == 8
    for number, case in enumerate(cases):
        shape, random = case["shape"], np.random.default_rng(number)
        scores = scores_of(random, (shape["tokens"], shape["experts"]), digits)
        bias = (random.normal(size=shape["experts"]) / 2 - 2).astype(np.float32)  # below what is left out, if that is 0
        bias = bias if digits is None else bias.round(digits)
        how = shape["block_size"], shape["expert_capacity"], shape["top_k"]
        ids, weights = block_routing(mx.array(scores)[None], mx.array(bias), *how, scale=2.5)
        expected = oracle(scores + bias, how[2], block=how[0], capacity=how[1])
        assert np.array(ids[0]).tolist() == expected.tolist()
        assert distance(weights[0], shares(scores, expected, 2.5)) < 2e-6


def test_published_router_vectors(goldens: Path) -> None:
    cases = vectors(goldens, "router")
    assert len(cases) == 3
    for case in cases:
        logits, bias = (np.full(case[name]["shape"], case[name]["fill"], np.float32) for name in ("logits", "bias"))
        for column, value in case["logits"].get("columns", {}).items():
            logits[:, int(column)] = value
        for expert, value in case["bias"].get("set", {}).items():
            bias[int(expert)] = value
        top_k = case["top_k"]
        ids, weights = block_routing(
            mx.sigmoid(mx.array(logits))[None], mx.array(bias), case["block_size"], case["expert_capacity"], top_k
        )
        expected = case["expected"]
        if "ids_every_row" in expected:
            assert (np.array(ids) == expected["ids_every_row"]).all()
        if "weights_every_entry" in expected:
            assert distance(weights, np.full(weights.shape, expected["weights_every_entry"])) < 1e-6
        if "weights_below" in expected:
            assert (np.array(weights) < expected["weights_below"]).all() and (np.array(weights) >= 0).all()


@pytest.mark.parametrize("digits", [None, 1, 0], ids=["apart", "some ties", "many ties"])
@pytest.mark.parametrize(("groups", "kept", "top_k"), [(8, 4, 8), (4, 1, 3), (1, 1, 8), (16, 3, 6)])
def test_groups(groups: int, kept: int, top_k: int, digits: int | None) -> None:
    random = np.random.default_rng(groups)
    scores = scores_of(random, (3, 40, 64), digits)
    bias = random.normal(size=64).astype(np.float32) - np.float32(4)  # below what is left out, if that is 0
    bias = bias if digits is None else bias.round(digits)
    ids, weights = group_routing(mx.array(scores), mx.array(bias), groups, kept, top_k, 2.5)
    for row in range(3):
        expected = oracle(scores[row] + bias, top_k, groups=groups, kept=kept)
        assert np.array(ids[row]).tolist() == expected.tolist()
        assert distance(weights[row], shares(scores[row], expected, 2.5)) < 2e-6


@pytest.mark.parametrize("length", [1, 7, 8, 21, 64])
def test_rows_that_begin_inside_a_block(length: int) -> None:
    """Their first block has the columns that are there, as a last one has."""
    random = np.random.default_rng(length)
    scores, bias = scores_of(random, (4, length, 16), 1), random.normal(size=16).astype(np.float32).round(1) - 4
    first = [0, 3, 7, 5]
    ids, _ = block_routing(mx.array(scores), mx.array(bias), 8, 5, 3, first=mx.array(first))
    for row, start in enumerate(first):
        before = np.full((start, 16), -np.inf, np.float32)
        expected = oracle(np.concatenate([before, scores[row] + bias]), 3, block=8, capacity=5)[start:]
        assert np.array(ids[row]).tolist() == expected.tolist()


def test_order_of_equals_and_of_extreme_values() -> None:
    values = mx.array([[0.5, -1.0, 0.5, -mx.inf, 3e38, 1e-45, 0.0, -1.0, -1e-45, -mx.inf]])
    order = np.array(llada2_moe._first(values, 10))[0].tolist()
    assert order == np.argsort(-np.array(values)[0], kind="stable").tolist() == [4, 0, 2, 5, 6, 8, 1, 7, 3, 9]
    best = [np.flatnonzero(np.array(llada2_moe._best(values, count))[0]).tolist() for count in (1, 2, 3, 7)]
    assert best == [[4], [0, 4], [0, 2, 4], [0, 1, 2, 4, 5, 6, 8]]


def test_the_router_computes_in_float32(goldens: Path) -> None:
    """Weights that only differ beyond 16 bits choose different experts, whatever type the states have."""
    gate = model_of(goldens, V22).layers[1].mlp.gate
    gate.weight = mx.ones_like(gate.weight) + mx.arange(16)[:, None] * 1e-5
    gate.expert_bias = mx.zeros_like(gate.expert_bias)
    ids, weights = gate(mx.full((1, 4, 64), 1e-2, dtype=mx.bfloat16))
    assert ids[0].tolist() == [[15, 14]] * 4 and weights.dtype == mx.float32


@pytest.mark.parametrize("name", [V20, V22])
def test_one_expert_a_token_keeps_its_score(name: str, goldens: Path, tmp_path: Path) -> None:
    """Divided by its own sum every weight would be 1."""
    gate = utils.load_model(copied(goldens, name, tmp_path / "c", num_experts_per_tok=1))[0].layers[1].mlp.gate
    x = mx.random.normal((1, 8, 64), key=mx.random.key(0))
    ids, weights = gate(x)
    scores = np.array(mx.sigmoid(x @ gate.weight.T))
    assert distance(weights, 2.5 * np.take_along_axis(scores, np.array(ids), axis=-1)) < 1e-6
    assert np.array(weights).std() > 0.01


def test_norms_round_before_they_weigh(goldens: Path) -> None:
    """As the reference does, in 16 bits: fp32 inside, cast, then times the weight."""
    norm = model_of(goldens, V20).layers[0].input_layernorm
    random = np.random.default_rng(0)
    norm.weight = mx.array(random.normal(size=64)).astype(mx.bfloat16)
    x = mx.array(random.normal(size=(50, 64))).astype(mx.bfloat16)
    wide = x.astype(mx.float32)
    scaled = wide * mx.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + 1e-6)
    assert distance(numpy(norm(x)), numpy(norm.weight * scaled.astype(mx.bfloat16))) == 0
    assert distance(numpy(norm(x)), numpy((norm.weight.astype(mx.float32) * scaled).astype(mx.bfloat16))) > 0


# Rows together and caches


@pytest.mark.parametrize("name", FOLDERS)
def test_rows_together_choose_what_each_chooses_alone(
    name: str, goldens: Path, experts: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Whole blocks, and rows whose last block is not whole, so that the others begin inside one."""
    model = model_of(goldens, name)
    random = np.random.default_rng(0)
    for lengths in ([32, 64, 96], [5, 37, 70]):
        rows = [random.integers(0, 300, length) for length in lengths]
        width = max(lengths)
        window = np.stack([np.concatenate([np.full(width - len(row), 7), row]) for row in rows])
        experts.clear()
        together = numpy(model(mx.array(window), blocks(model, lengths, width)))
        chosen = list(experts)
        for i, row in enumerate(rows):
            experts.clear()
            alone = numpy(model(mx.array(row)[None]))
            assert distance(together[i, -len(row) :], alone[0]) < TOLERANCE
            for layer, (ids, _) in enumerate(experts):
                assert chosen[layer][0][i, -len(row) :].tolist() == ids[0].tolist()


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("cache", ["auto", "none"])
def test_rows_decoded_together_are_the_rows_alone(name: str, cache: str, goldens: Path) -> None:
    model, random = model_of(goldens, name), np.random.default_rng(1)
    prompts = [random.integers(0, 300, length).tolist() for length in (5, 37, 70)]
    options = DecodingOptions(
        unmasking="low_confidence_dynamic",
        threshold=0.3,
        max_denoising_steps=4,
        max_tokens=40,
        stop_at_eos=False,
        full_logprobs=True,
        cache=cache,
    )
    together = decode(model, prompts, options)
    for prompt, many in zip(prompts, together, strict=True):
        alone = decode(model, prompt, options)
        assert (many.canvas, many.tokens, many.nfe) == (alone.canvas, alone.tokens, alone.nfe)
        assert [c.positions for c in many.commits] == [c.positions for c in alone.commits]
        for a, b in zip(many.logprobs, alone.logprobs, strict=True):
            kept = np.array(a.vector(VOCAB)) > -1e30
            assert distance(np.array(a.vector(VOCAB))[kept], np.array(b.vector(VOCAB))[kept]) < TOLERANCE


def test_a_long_prompt_is_stored_in_few_forwards(goldens: Path) -> None:
    model = model_of(goldens, V22)
    prompt = np.random.default_rng(2).integers(0, 300, 1024).tolist()
    options = DecodingOptions(unmasking="threshold", threshold=0.0, max_tokens=32, stop_at_eos=False)
    result = decode(model, prompt, options)
    assert result.prefills <= 1024 // 32 // 8
    whole = decode(model, prompt, DecodingOptions(**{**vars(options), "cache": "none"}))
    assert (result.tokens, whole.prefills) == (whole.tokens, 0)


@pytest.mark.parametrize("name", FOLDERS)
def test_mlx_lms_cache_sees_block_by_block_too(name: str, goldens: Path) -> None:
    model, arrays = model_of(goldens, name), np.load(goldens / "block" / name / "golden.npz")
    ids = mx.array(arrays["ids0"])[None]
    cache = [KVCache() for _ in model.layers]
    parts = [model(ids[:, a:b], cache) for a, b in ((0, 32), (32, 64))]
    assert distance(mx.concatenate(parts, axis=1)[0], arrays["logits0"]) < TOLERANCE
    cache = [KVCache() for _ in model.layers]
    assert distance(model(ids, cache)[0], arrays["logits0"]) < TOLERANCE


def test_a_cache_that_ends_inside_a_routing_block_is_refused(goldens: Path) -> None:
    model = model_of(goldens, V22)
    cache = [KVCache() for _ in model.layers]
    model(mx.arange(20)[None], cache)
    with pytest.raises(ValueError, match="whole blocks of 32 tokens: give it the tokens in multiples of 32, not after"):
        model(mx.arange(12)[None], cache)
    older = model_of(goldens, V20)
    cache = [KVCache() for _ in older.layers]
    older(mx.arange(20)[None], cache)
    assert older(mx.arange(12)[None], cache).shape == (1, 12, VOCAB)
    with pytest.raises(ValueError, match="decoded by mlx_dllm_plugin.decode only"):
        model(mx.zeros((2, 32), dtype=mx.int32), [BatchKVCache([0, 0]) for _ in model.layers])


@pytest.mark.parametrize("name", [V20, V22])
def test_bidirectional_forward_sees_the_whole_canvas(name: str, goldens: Path) -> None:
    model = model_of(goldens, name)
    ids = np.random.default_rng(3).integers(0, 300, (1, 64))
    logits = numpy(bidirectional_forward(model, mx.array(ids)))
    ids[0, 40] += 1
    assert distance(logits[0, :32], numpy(bidirectional_forward(model, mx.array(ids)))[0, :32]) > 1e-3
    assert distance(numpy(model(mx.array(ids)))[0, :32], logits[0, :32]) > 1e-3


def test_embeddings_may_be_given(goldens: Path) -> None:
    model, ids = model_of(goldens, V22), mx.arange(40)[None]
    assert distance(model(ids, input_embeddings=model.model.word_embeddings(ids)), model(ids)) == 0


# Plans


def test_a_plan_has_whole_routing_blocks(goldens: Path, tmp_path: Path) -> None:
    spec = model_of(goldens, V22).diffusion_spec
    options = {"unmasking": "low_confidence_dynamic"}
    with pytest.raises(DiffusionError) as error:
        plan(spec, [1] * 5, DecodingOptions(block_length=16, **options))
    assert str(error.value) == (
        "block_length 16 would give a wrong answer: the checkpoint chooses experts by whole blocks of 32 tokens; leave "
        "it out."
    )
    assert plan(spec, [1] * 5, DecodingOptions(block_length=32, max_tokens=3, **options)).block_length == 32
    with pytest.raises(DiffusionError, match="cache dual computes part of a block"):
        plan(spec, [1] * 5, DecodingOptions(unmasking="threshold", cache="dual", sub_block_length=8))
    plan(spec, [1] * 5, DecodingOptions(unmasking="threshold", sub_block_length=8))
    older = model_of(goldens, V20).diffusion_spec
    assert plan(older, [1] * 5, DecodingOptions(block_length=16, max_tokens=3)).block_length == 16


@pytest.mark.parametrize(("tokens", "columns"), [(-1, 64), (None, 64), (59, 64), (27, 32), (1, 32)])
def test_a_context_that_is_no_multiple_ends_with_a_whole_block(
    tokens: int | None, columns: int, goldens: Path, tmp_path: Path
) -> None:
    path = copied(goldens, V22, tmp_path / "c", max_position_embeddings=70)
    spec = utils.load_model(path)[0].diffusion_spec
    settled = plan(spec, [1] * 5, DecodingOptions(unmasking="low_confidence_dynamic", max_tokens=tokens))
    assert len(settled.canvas) == columns and settled.cap == (59 if tokens in (-1, None) else tokens)


def test_what_does_not_fit_into_whole_blocks_is_one_sentence(goldens: Path, tmp_path: Path) -> None:
    path = copied(goldens, V22, tmp_path / "c", max_position_embeddings=70)
    spec = utils.load_model(path)[0].diffusion_spec
    for prompt, tokens, words in (
        (5, 60, "exceeds the model's context of 64 in whole blocks of 32: the prompt has 5, so at most 59 new tokens"),
        (66, 1, "The prompt has 66 tokens and the model's context is 64 in whole blocks of 32: shorten the prompt."),
    ):
        with pytest.raises(DiffusionError) as error:
            plan(spec, [1] * prompt, DecodingOptions(unmasking="low_confidence_dynamic", max_tokens=tokens))
        assert words in str(error.value)
    edit_json(path / "config.json", max_position_embeddings=31)
    spec = utils.load_model(path)[0].diffusion_spec
    with pytest.raises(DiffusionError, match="context of 31 tokens has no room for a routing block of 32"):
        plan(spec, [1] * 5, DecodingOptions(unmasking="low_confidence_dynamic", max_tokens=1))


# Configurations

ROPE = {"rope_type": "default", "rope_theta": 3000000, "partial_rotary_factor": 0.5}
SPELLINGS: dict[str, dict[str, Any]] = {
    "rope_theta beside": {"rope_parameters": ...},
    "rope_theta inside rope_parameters": {"rope_theta": ..., "rope_parameters": ROPE},
    "rope_theta null": {"rope_theta": None, "rope_parameters": ROPE},
    "rotary_dim alone": {"partial_rotary_factor": ..., "rope_parameters": ...},
    "partial_rotary_factor alone": {"rotary_dim": ..., "rope_parameters": ...},
    "partial_rotary_factor inside rope_parameters": {"rotary_dim": None, "partial_rotary_factor": ...},
    "neither": {"rotary_dim": None, "partial_rotary_factor": None, "rope_parameters": ...},
    "rope_scaling null": {"rope_scaling": None},
    "rope_scaling default": {"rope_scaling": {"rope_type": "default"}},
    "head_dim left out": {"head_dim": ...},
    "use_qk_norm left out": {"use_qk_norm": ...},
    "defaults left out": {
        name: ...
        for name in ("rms_norm_eps", "block_size", "routed_scaling_factor", "tie_word_embeddings", "num_shared_experts")
        + ("first_k_dense_replace", "norm_topk_prob", "score_function", "router_dtype", "hidden_act")
    },
    "null counts as absent": dict.fromkeys(
        ("rms_norm_eps", "block_size", "routed_scaling_factor", "tie_word_embeddings", "num_shared_experts")
        + ("first_k_dense_replace", "norm_topk_prob", "score_function", "router_dtype", "hidden_act")
    ),
    "eos in config.json": {"eos_token_id": [317, 325]},
    "bfloat16": {"dtype": "bfloat16", "torch_dtype": "bfloat16"},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_one_configuration(spelling: str, goldens: Path, tmp_path: Path) -> None:
    arrays = np.load(goldens / "block" / V22 / "golden.npz")
    model = utils.load_model(copied(goldens, V22, tmp_path / "c", **SPELLINGS[spelling]))[0]
    assert distance(model(mx.array(arrays["ids0"])[None])[0], arrays["logits0"]) < TOLERANCE


def test_another_part_of_a_head_that_turns(goldens: Path, tmp_path: Path) -> None:
    without = {"rotary_dim": None, "partial_rotary_factor": ...}
    for number, change in enumerate(
        (
            {**without, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
            {**without, "partial_rotary_factor": 0.25},
            {**without, "rotary_dim": 4, "rope_parameters": ...},
        )
    ):
        model = utils.load_model(copied(goldens, V22, tmp_path / str(number), **change))[0]
        assert model.args.rotary_dim == 4 and model.layers[0].attention.rope.dims == 4


def test_defaults_of_older_versions(goldens: Path, tmp_path: Path) -> None:
    """A 2.0 without rope_theta has 600000, what the released ones say."""
    arrays = np.load(goldens / "block" / V20 / "golden.npz")
    model = utils.load_model(copied(goldens, V20, tmp_path / "c", rope_theta=...))[0]
    assert distance(model(mx.array(arrays["ids0"])[None])[0], arrays["logits0"]) < TOLERANCE
    assert (model.args.n_group, model.args.topk_group) == (4, 2)
    assert model.args.expert_capacity == 0 and model.args.block_size == 32


def rewritten(path: Path, change: Callable[[Weights], Weights]) -> Path:
    weights: Any = mx.load(str(path / "model.safetensors"))
    mx.save_safetensors(str(path / "model.safetensors"), change(dict(weights)), {"format": "mlx"})
    return path


def test_no_shared_experts_are_shared_experts_that_say_nothing(goldens: Path, tmp_path: Path) -> None:
    silent = rewritten(
        copied(goldens, V22, tmp_path / "silent"),
        lambda w: {n: v * 0 if "shared_experts.down" in n else v for n, v in w.items()},
    )
    none = rewritten(
        copied(goldens, V22, tmp_path / "none", num_shared_experts=0),
        lambda w: {n: v for n, v in w.items() if "shared_experts" not in n},
    )
    ids = mx.arange(64)[None]
    assert distance(*(utils.load_model(path)[0](ids) for path in (silent, none))) < 1e-4
    two = rewritten(
        copied(goldens, V22, tmp_path / "two", num_shared_experts=2),
        lambda w: {
            n: mx.concatenate([v, v], axis=1 if "down" in n else 0) if "shared_experts" in n else v
            for n, v in w.items()
        },
    )
    assert distance(utils.load_model(two)[0](ids), model_of(goldens, V22)(ids)) > SIGNAL


def test_layers_may_all_have_experts_or_none(goldens: Path, tmp_path: Path) -> None:
    def first_as_second(weights: Weights) -> Weights:
        kept = {n: v for n, v in weights.items() if ".layers.0.mlp." not in n}
        second = {n: v for n, v in weights.items() if ".layers.1.mlp." in n}
        return kept | {n.replace(".layers.1.", ".layers.0."): v for n, v in second.items()}

    path = rewritten(copied(goldens, V22, tmp_path / "all", first_k_dense_replace=0), first_as_second)
    model = utils.load_model(path)[0]
    assert [type(layer.mlp).__name__ for layer in model.layers] == ["SparseMoeBlock"] * 3
    assert distance(model(mx.arange(64)[None]), model_of(goldens, V22)(mx.arange(64)[None])) > SIGNAL

    def all_as_first(weights: Weights) -> Weights:
        kept = {n: v for n, v in weights.items() if ".mlp." not in n}
        first = {n: v for n, v in weights.items() if ".layers.0.mlp." in n}
        return kept | {n.replace(".layers.0.", f".layers.{i}."): v for n, v in first.items() for i in range(3)}

    path = rewritten(copied(goldens, V22, tmp_path / "none", first_k_dense_replace=3), all_as_first)
    model = utils.load_model(path)[0]
    assert [type(layer.mlp).__name__ for layer in model.layers] == ["MLP"] * 3
    assert np.isfinite(numpy(model(mx.arange(64)[None]))).all()


def test_a_tied_head_is_the_embedding(goldens: Path, tmp_path: Path) -> None:
    def same(weights: Weights) -> Weights:
        return {**weights, "lm_head.weight": weights["model.word_embeddings.weight"]}

    untied = rewritten(copied(goldens, V22, tmp_path / "untied"), same)
    tied = rewritten(copied(goldens, V22, tmp_path / "tied", tie_word_embeddings=True), same)
    bare = rewritten(
        copied(goldens, V22, tmp_path / "bare", tie_word_embeddings=True),
        lambda w: {n: v for n, v in w.items() if n != "lm_head.weight"},
    )
    a, b, c = (utils.load_model(path)[0](mx.arange(64)[None]) for path in (untied, tied, bare))
    assert distance(a, b) < 1e-4 and distance(b, c) == 0


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (V22, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    (V22, {"score_function": "softmax"}, "score_function = 'softmax'"),
    (V22, {"router_dtype": "bf16"}, "router_dtype = 'bf16'"),
    (V22, {"use_bias": True}, "use_bias = True"),
    (V22, {"use_qkv_bias": True}, "use_qkv_bias = True"),
    (V22, {"norm_head": True}, "norm_head = True"),
    (V22, {"norm_softmax": True}, "norm_softmax = True"),
    (V22, {"norm_topk_prob": False}, "norm_topk_prob = False"),
    (V22, {"use_qk_norm": False}, "use_qk_norm = False"),
    (V22, {"use_rmsnorm": False}, "use_rmsnorm = False"),
    (V22, {"use_sliding_window": True}, "use_sliding_window = True"),
    (V22, {"using_split_qkv_in_self_attention": True}, "using_split_qkv_in_self_attention = True"),
    (V22, {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias = False"),
    (V22, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type = 'linear'"),
    (V22, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
    (V22, {"rope_theta": ..., "rope_parameters": ...}, "must say rope_theta"),
    (V22, {"rotary_dim": 6}, "rotary_dim 6 is not partial_rotary_factor 0.5 of head_dim 16"),
    (V22, {"rotary_dim": 7, "partial_rotary_factor": ..., "rope_parameters": ...}, "7 of 16 dimensions"),
    (V22, {"rotary_dim": 18, "partial_rotary_factor": ..., "rope_parameters": ...}, "18 of 16 dimensions"),
    (V22, {"rotary_dim": "8"}, "rotary_dim '8' is not"),
    (V22, {"expert_capacity": 1}, "from num_experts_per_tok 2 to num_experts 16, got 1"),
    (V22, {"expert_capacity": 17}, "from num_experts_per_tok 2 to num_experts 16, got 17"),
    (V22, {"expert_capacity": -1}, "expert_capacity must be an integer of 0 or more, got -1"),
    (V22, {"expert_capacity": "6"}, "expert_capacity must be an integer of 0 or more, got '6'"),
    (V22, {"block_size": 0}, "block_size must be a positive integer"),
    (V22, {"block_size": "32"}, "block_size must be a positive integer"),
    (V22, {"num_experts": ...}, "num_experts must be an integer of 1 or more, got 0"),
    (V22, {"num_experts_per_tok": ...}, "num_experts_per_tok must be an integer of 1 or more, got 0"),
    (V22, {"num_shared_experts": -1}, "num_shared_experts must be an integer of 0 or more, got -1"),
    (V22, {"first_k_dense_replace": 1.5}, "first_k_dense_replace must be an integer of 0 or more, got 1.5"),
    (V22, {"routed_scaling_factor": "2"}, "routed_scaling_factor must be a number above 0, got '2'"),
    (V22, {"routed_scaling_factor": True}, "routed_scaling_factor must be a number above 0, got True"),
    (V22, {"delete_token_id": ...}, "must be two token ids, got None and 315"),
    (V22, {"split_token_id": None}, "must be two token ids, got 314 and None"),
    (V22, {"split_token_id": 314}, "must be two token ids, got 314 and 314"),
    (V22, {"delete_token_id": "314"}, "must be two token ids, got '314' and 315"),
    (
        V22,
        {"delete_token_id": 352},
        "no end of sequence (320, 317, 325), got 352",
    ),
    (V22, {"delete_token_id": -1}, "no end of sequence (320, 317, 325), got -1"),
    (
        V22,
        {"split_token_id": 320},
        "no end of sequence (320, 317, 325), got 320",
    ),
    (V20, {"n_group": 3}, "16 experts cannot be 3 groups (n_group) of two or more"),
    (V20, {"n_group": 16}, "16 experts cannot be 16 groups (n_group) of two or more"),
    (V20, {"n_group": 0}, "n_group must be an integer of 1 or more, got 0"),
    (V20, {"topk_group": 5}, "topk_group 5 is more than the 4 groups there are"),
    (
        V20,
        {"topk_group": 1, "num_experts_per_tok": 5},
        "num_experts_per_tok 5 is more than the 4 experts of topk_group",
    ),
    (V20, {"num_experts_per_tok": 17}, "num_experts_per_tok 17 is more than the 16 experts there are"),
]


@pytest.mark.parametrize(
    ("name", "change", "words"), REFUSED, ids=lambda value: ",".join(value) if isinstance(value, dict) else ""
)
def test_settings_that_cannot_be_are_one_sentence(
    name: str, change: dict[str, Any], words: str, goldens: Path, tmp_path: Path
) -> None:
    path = copied(goldens, name, tmp_path / "c", **change)
    with pytest.raises(DiffusionError) as error:
        utils.load_model(path)
    text = str(error.value)
    assert words in text and text.endswith(".") and ". " not in text and "\n" not in text


# Versions


def spec_at(path: Path) -> Any:
    checkpoint = open_checkpoint(path)
    family = detect(checkpoint)
    assert family is FAMILIES.get("llada2_moe")
    return resolve(checkpoint, family), family.hint(checkpoint)


@pytest.mark.parametrize(
    ("name", "expected", "known"),
    [
        ("LLaDA2.0-mini", "2.0", True),
        ("LLaDA2.0-flash-CAP", "2.0", True),
        ("LLaDA2.1-mini-4bit", "2.1", True),
        ("llada-2.1-flash", "2.1", True),
        ("llada_2_1_mlx", "2.1", True),
        ("LLaDA2.10", "2.0", False),
        ("model", "2.0", False),
    ],
)
def test_the_name_tells_2_0_from_2_1(name: str, expected: str, known: bool, goldens: Path, tmp_path: Path) -> None:
    path = copied(goldens, V20, tmp_path / name)
    spec, hint = spec_at(path)
    assert version(open_checkpoint(path))[0] == expected
    assert spec.unmasking == {"2.0": "low_confidence_dynamic", "2.1": "joint_threshold"}[expected]
    assert ((name in spec.sources["unmasking"]), hint is None) == (known, known)
    if not known:
        assert "assumed" in spec.sources["unmasking"] and hint is not None and "--unmasking joint_threshold" in hint
    spec, hint = spec_at(copied(goldens, V22, tmp_path / "v22" / name))
    assert spec.unmasking == "joint_threshold_indel" and hint is None


def test_a_repository_and_a_base_model_are_names_too(goldens: Path, tmp_path: Path) -> None:
    hub = tmp_path / "models--inclusionAI--LLaDA2.1-mini" / "snapshots" / "0123"
    hub.parent.mkdir(parents=True)
    assert spec_at(copied(goldens, V20, hub))[0].unmasking == "joint_threshold"
    path = copied(goldens, V20, tmp_path / "copy")
    (path / "README.md").write_text("---\nbase_model: inclusionAI/LLaDA2.1-flash\n---\n")
    spec, hint = spec_at(path)
    assert spec.unmasking == "joint_threshold" and hint is None and "base_model" in spec.sources["unmasking"]


def test_a_renamed_copy_knows_its_version(goldens: Path, tmp_path: Path) -> None:
    """What only the original's name told stands in the config.json that mlx-lm writes."""
    for name, rule in (("LLaDA2.1-mini", "joint_threshold"), ("LLaDA2.0-mini", "low_confidence_dynamic")):
        _, config = utils.load_model(copied(goldens, V20, tmp_path / name))
        copy = copied(goldens, V20, tmp_path / f"copy of {rule}")
        (copy / "config.json").write_text(json.dumps(config))
        spec, hint = spec_at(copy)
        assert spec.unmasking == rule and hint is None and "diffusion_unmasking" in spec.sources["unmasking"]
    _, config = utils.load_model(copied(goldens, V20, tmp_path / "model"))
    assert "diffusion_unmasking" not in config


def test_the_edit_tokens_of_the_published_vocabulary_are_known(goldens: Path, tmp_path: Path) -> None:
    path = copied(goldens, V22, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    del config["delete_token_id"], config["split_token_id"]
    (path / "config.json").write_text(json.dumps(config))
    assert spec_at(path)[0].edit_token_ids is None
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 157184}))
    assert spec_at(path)[0].edit_token_ids == (156930, 156931)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_capacity": ...}, ("names the edit tokens of LLaDA2.2", "no expert_capacity")),
        ({"expert_capacity": 0}, ("names the edit tokens of LLaDA2.2", "no expert_capacity")),
        ({"delete_token_id": EOS}, ("no end of sequence", f"got {EOS}")),
        ({"rope_theta": 10000}, ("rope_theta 10000, and 3000000 inside rope_parameters",)),
    ],
)
def test_contradictions_are_refused(
    changes: dict[str, Any], words: tuple[str, ...], goldens: Path, tmp_path: Path
) -> None:
    path = copied(goldens, V22, tmp_path / "model")
    edit_json(path / "config.json", **changes)
    with pytest.raises(CheckpointError) as error:
        utils.load_model(path)
    assert all(word in str(error.value) for word in words)


def test_a_bias_that_is_no_number_is_refused(goldens: Path, tmp_path: Path) -> None:
    """It only ranks experts: no logit would tell."""
    path = copied(goldens, V22, tmp_path / "model")
    weights = mx.load(str(path / "model.safetensors"))
    weights["model.layers.1.mlp.gate.expert_bias"] = mx.full((16,), mx.nan)
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    with pytest.raises(CheckpointError, match="model.layers.1.mlp.gate.expert_bias that are not finite"):
        utils.load_model(path)


def test_specs_of_the_versions(goldens: Path, tmp_path: Path) -> None:
    shared = {"max_tokens": 2048, "block_length": 32}
    paths = {
        "2.0": copied(goldens, V20, tmp_path / "LLaDA2.0-mini"),
        "2.1": copied(goldens, V20, tmp_path / "LLaDA2.1-mini"),
        "2.2": copied(goldens, V22, tmp_path / "LLaDA2.2-mini"),
    }
    specs = {number: spec_at(path)[0] for number, path in paths.items()}
    assert {number: spec.defaults for number, spec in specs.items()} == {
        "2.0": {**shared, "threshold": 0.95, "max_denoising_steps": 32},
        "2.1": {**shared, "threshold": 0.95, "editing_threshold": 0.9, "max_post_steps": 16, "num_to_transfer": 1},
        "2.2": {
            **shared,
            **{"threshold": 0.5, "editing_threshold": 0.0, "max_post_steps": 16, "max_denoising_steps": 32},
        },
    }
    for number, spec in specs.items():
        assert (spec.logits, spec.attention, spec.canvas) == ("in_place", "block_causal", "growing")
        assert (spec.block_origin, spec.context_length, spec.mask_token_id) == ("start", 4096, MASK)
        assert spec.eos_token_ids == (EOS, 325)
        for name in spec.defaults:
            assert ("LLaDA" + number in spec.sources[name]) == (not (number == "2.2" and name == "block_length"))
    assert specs["2.2"].routing_block == 32 and specs["2.2"].edit_token_ids == (314, 315)
    assert specs["2.0"].routing_block is None and specs["2.0"].edit_token_ids is None
    joint = {"unmasking": "joint_threshold"}
    assert {number: dict(spec.profiles) for number, spec in specs.items()} == {
        "2.0": {"balanced": {"threshold": 0.9}, "fast": {"threshold": 0.8}},
        "2.1": {
            "balanced": {**joint, "threshold": 0.7, "editing_threshold": 0.5},
            "fast": {**joint, "threshold": 0.5, "editing_threshold": 0.0},
        },
        "2.2": {"balanced": {}, "fast": {}},
    }
    speed = profiled(specs["2.1"], DecodingOptions(profile="fast"))
    assert (speed.unmasking, speed.threshold, speed.editing_threshold) == ("joint_threshold", 0.5, 0.0)
    assert profiled(specs["2.2"], DecodingOptions(profile="fast")).threshold is None


def test_ids_that_no_file_names(goldens: Path, tmp_path: Path) -> None:
    """The mask is in the vocabulary, else the released one; the end of sequence is the tokenizer's."""
    path = copied(goldens, V22, tmp_path / "c", eos_token_id=...)
    (path / "generation_config.json").unlink()
    edit_json(path / "tokenizer_config.json", mask_token=...)
    spec = spec_at(path)[0]
    assert (spec.mask_token_id, spec.eos_token_ids, spec.stop_token_ids) == (MASK, (EOS, 325), (325,))
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    edit_json(path / "config.json", vocab_size=157184)
    spec = spec_at(path)[0]
    assert (spec.mask_token_id, spec.eos_token_ids) == (156895, ())


def test_a_block_size_in_the_config_wins(goldens: Path, tmp_path: Path) -> None:
    spec = spec_at(goldens / "block" / V22_B8)[0]
    assert (spec.defaults["block_length"], spec.routing_block) == (8, 8)
    spec = spec_at(copied(goldens, V20, tmp_path / "c", block_size=16))[0]
    assert (spec.defaults["block_length"], spec.routing_block) == (16, None)
    assert spec_at(copied(goldens, V22, tmp_path / "d", block_size=None))[0].routing_block == 32


# Layouts of weights

TINY: dict[str, Any] = {
    "model_type": "llada2_moe",
    "architectures": ["LLaDA2MoeModelLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "partial_rotary_factor": 0.5,
    "rope_theta": 3000000,
    "rms_norm_eps": 1e-6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "expert_capacity": 4,
    "block_size": 32,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MLP = ("gate_proj", "up_proj", "down_proj")
PROMPT = list(range(40, 45))
OPTIONS = DecodingOptions(unmasking="low_confidence_dynamic", threshold=0.9, max_denoising_steps=8, max_tokens=27)


def published(seed: int = 20) -> Weights:
    """Random weights under the names of the published checkpoints. Of this seed's, 8 bits commit the same tokens."""
    random, weights = np.random.default_rng(seed), {}
    c = TINY
    d, heads = c["hidden_size"], c["num_attention_heads"] + 2 * c["num_key_value_heads"]

    def add(name: str, *shape: int, mean: float = 0.0, std: float | None = None) -> None:
        std = std if std is not None else 0.1 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
        weights[name] = mx.array((mean + std * random.standard_normal(shape)).astype(np.float32))

    def mlp(name: str, inner: int) -> None:
        for part in MLP:
            add(f"{name}.{part}.weight", *((d, inner) if part == "down_proj" else (inner, d)))

    add("model.word_embeddings.weight", VOCAB, d, std=1.0)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for norm, width in (("input_layernorm", d), ("post_attention_layernorm", d)):
            add(f"{layer}.{norm}.weight", width, mean=1.0)
        add(f"{layer}.attention.query_key_value.weight", heads * c["head_dim"], d)
        for norm in ("query_layernorm", "key_layernorm"):
            add(f"{layer}.attention.{norm}.weight", c["head_dim"], mean=1.0)
        add(f"{layer}.attention.dense.weight", d, c["num_attention_heads"] * c["head_dim"])
        if i < c["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        add(f"{layer}.mlp.gate.weight", c["num_experts"], d)
        add(f"{layer}.mlp.gate.expert_bias", c["num_experts"])
        for expert in range(c["num_experts"]):
            mlp(f"{layer}.mlp.experts.{expert}", c["moe_intermediate_size"])
        mlp(f"{layer}.mlp.shared_experts", c["moe_intermediate_size"])
    add("model.norm.weight", d, mean=1.0)
    add("lm_head.weight", VOCAB, d, std=0.6)
    return weights


def stacked(weights: Weights) -> Weights:
    """As mlx-lm and mlx-vlm save them."""
    kept = {n: v for n, v in weights.items() if ".mlp.experts." not in n}
    for part in MLP:
        parts = [weights[f"model.layers.1.mlp.experts.{e}.{part}.weight"] for e in range(TINY["num_experts"])]
        kept[f"model.layers.1.mlp.switch_mlp.{part}.weight"] = mx.stack(parts)
    return kept


def fused(weights: Weights) -> Weights:
    """As transformers 5 saves experts."""
    whole, name = stacked(weights), "model.layers.1.mlp."
    gate, up, down = (whole.pop(f"{name}switch_mlp.{part}.weight") for part in MLP)
    return {
        **whole,
        f"{name}experts.gate_up_proj": mx.concatenate([gate, up], axis=1),
        f"{name}experts.down_proj": down,
    }


def prefixed(weights: Weights) -> Weights:
    return {f"language_model.{n}": v for n, v in stacked(weights).items()}


def gate_proj(weights: Weights) -> Weights:
    """As mlx-lm names the router of a model of this kind."""
    return {n.replace(".gate.weight", ".gate.gate_proj.weight"): v for n, v in stacked(weights).items()}


def frequencies(weights: Weights) -> Weights:
    return {**weights, "model.layers.0.attention.rotary_emb.inv_freq": mx.ones(8)}


LAYOUTS = {
    "published": dict,
    "stacked": stacked,
    "transformers 5": fused,
    "mlx-vlm": prefixed,
    "router as mlx-lm's": gate_proj,
    "with rope's frequencies": frequencies,
}


def written(
    to: Path, goldens: Path, weights: Weights | None = None, kind: mx.Dtype = mx.float32, **config: Any
) -> Path:
    to.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copyfile(goldens / "block" / V22 / name, to / name)
    (to / "config.json").write_text(json.dumps({**TINY, **config}))
    values = {n: v.astype(kind) for n, v in (weights or published()).items()}
    mx.save_safetensors(str(to / "model.safetensors"), values, {"format": "mlx"})
    return to


def tokens_of(path: Path) -> tuple[Any, list[int]]:
    model = mlx_lm.load(str(path))[0]
    return model, decode(model, PROMPT, OPTIONS).tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_weights(layout: str, goldens: Path, tmp_path: Path) -> None:
    expected = mlx_lm.load(str(written(tmp_path / "a", goldens)))[0](mx.arange(64)[None])
    model = mlx_lm.load(str(written(tmp_path / "b", goldens, LAYOUTS[layout](published()))))[0]
    assert distance(model(mx.arange(64)[None]), expected) == 0


def test_names_with_and_without_the_prefix_are_refused(goldens: Path, tmp_path: Path) -> None:
    weights = stacked(published())
    both = {**weights, **prefixed(published())}
    with pytest.raises(DiffusionError, match="The weights are there twice"):
        mlx_lm.load(str(written(tmp_path / "c", goldens, both)))


def test_an_expert_that_is_missing_is_one_sentence(goldens: Path, tmp_path: Path) -> None:
    weights = {n: v for n, v in published().items() if ".experts.5." not in n}
    with pytest.raises(CheckpointError, match="cannot be loaded as llada2_moe"):
        mlx_lm.load(str(written(tmp_path / "c", goldens, weights)))


def converted(source: Path, to: Path, bits: int, **how: Any) -> Path:
    mlx_lm.convert(str(source), str(to), quantize=True, q_bits=bits, q_group_size=32, **how)
    return to


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("by", ["mlx-lm", "mlx-vlm"])
def test_a_quantized_copy_decodes(bits: int, by: str, goldens: Path, tmp_path: Path) -> None:
    source = written(tmp_path / "float", goldens)
    model, expected = tokens_of(source)
    path = converted(source, tmp_path / "copy", bits, quant_predicate=None if by == "mlx-lm" else mixed(8, 32))
    if by == "mlx-vlm":  # its names, also of the modules that have bits of their own
        entries = json.loads((path / "config.json").read_text())["quantization"]
        entries = {f"language_model.{n}" if isinstance(own, dict) else n: own for n, own in entries.items()}
        assert len(entries) > 3
        edit_json(path / "config.json", quantization=entries, quantization_config=entries, vision_config={})
        rewritten(path, lambda w: {f"language_model.{n}": v for n, v in w.items()})
    copy, tokens = tokens_of(path)
    mlp = copy.layers[1].mlp
    assert type(mlp.switch_mlp.down_proj).__name__ == "QuantizedSwitchLinear" and mlp.switch_mlp.down_proj.bits == bits
    assert (type(mlp.gate).__name__, mlp.gate.weight.dtype, mlp.gate.expert_bias.dtype) == ("Gate", *[mx.float32] * 2)
    assert distance(mlp.gate.weight, model.layers[1].mlp.gate.weight) == 0
    a, b = (numpy(m(mx.arange(64)[None])).ravel() for m in (model, copy))
    assert 0 < distance(a, b) and np.corrcoef(a, b)[0, 1] > {4: 0.5, 5: 0.8, 6: 0.95, 8: 0.98}[bits]
    assert len(tokens) <= 27 and all(0 <= token < VOCAB for token in tokens)
    if bits == 8:
        assert tokens == expected


@pytest.mark.parametrize("name", ["gate", "gate.gate_proj"])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_router_that_was_quantized_is_not_any_more(name: str, bits: int, goldens: Path, tmp_path: Path) -> None:
    """Its numbers are what they are; it is computed in float32 and not quantized again."""
    path = converted(written(tmp_path / "float", goldens), tmp_path / "copy", 8)
    full = mlx_lm.load(str(path))[0].layers[1].mlp.gate.weight
    module = f"model.layers.1.mlp.{name}"

    def quantized(weights: Weights) -> Weights:
        parts = mx.quantize(weights.pop("model.layers.1.mlp.gate.weight"), group_size=32, bits=bits)
        return weights | {f"{module}.{k}": v for k, v in zip(("weight", "scales", "biases"), parts, strict=True)}

    rewritten(path, quantized)
    config = json.loads((path / "config.json").read_text())["quantization"]
    edit_json(path / "config.json", quantization={**config, module: {"group_size": 32, "bits": bits}})
    model, tokens = tokens_of(path)
    gate = model.layers[1].mlp.gate
    assert gate.weight.shape == full.shape and gate.weight.dtype == mx.float32
    assert 0 < distance(gate.weight, full) < 0.2 and tokens
    saved = tmp_path / "again"
    utils.save_model(saved, model)
    assert f"{module}.scales" not in mx.load(str(saved / "model.safetensors"))


def test_a_quantization_names_the_modules_here(goldens: Path) -> None:
    """Newer versions of mlx-lm find the bits out by themselves."""
    own = {"group_size": 32, "bits": 8}
    names = [
        f"{prefix}model.layers.1.{name}"
        for prefix in ("", "language_model.")
        for name in ("mlp.gate", "attention.dense")
    ]
    config = {**TINY, "quantization": {"bits": 4, **dict.fromkeys([*names, "model.layers.1.mlp.gate.gate_proj"], own)}}
    FAMILIES.get("llada2_moe").prepare_config(config)
    assert config["quantization"] == {"bits": 4, "model.layers.1.attention.dense": own}


@pytest.mark.parametrize("bits", [8, None])
def test_the_mixed_recipe(bits: int | None, goldens: Path, tmp_path: Path) -> None:
    path = converted(
        written(tmp_path / "float", goldens), tmp_path / "copy", 4, quant_predicate=mixed(bits, group_size=32)
    )
    model, tokens = tokens_of(path)
    found = {name: getattr(module, "bits", None) for name, module in model.named_modules()}
    layer = "model.layers.1."
    often = [f"{layer}attention.query_key_value", f"{layer}attention.dense", "model.word_embeddings", "lm_head"]
    often += [f"{layer}mlp.shared_experts.{part}" for part in MLP]
    assert {found[name] for name in often} == {bits} and found[f"{layer}mlp.gate"] is None
    assert {found[f"{layer}mlp.switch_mlp.{part}"] for part in MLP} == {4}
    assert {found[f"model.layers.0.mlp.{part}"] for part in MLP} == {4} and tokens


def test_the_router_is_neither_quantized_nor_cast(goldens: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "half", goldens, kind=mx.bfloat16, torch_dtype="bfloat16")
    model = mlx_lm.load(str(path))[0]
    gate, expert = "model.layers.1.mlp.gate", "model.layers.1.mlp.switch_mlp.gate_proj"
    half = {n: v.astype(mx.bfloat16) for n, v in published().items()}
    kept = {name: value.dtype for name, value in model.sanitize(half).items()}
    assert kept.pop(f"{gate}.weight") == kept.pop(f"{gate}.expert_bias") == mx.float32
    assert set(kept.values()) == {mx.bfloat16}
    assert not model.quant_predicate(gate, None) and model.quant_predicate(expert, None)
    assert model.quant_predicate("model.layers.0.mlp.gate_proj", None)
    for name in ("weight", "expert_bias"):
        assert not model.cast_predicate(f"{gate}.{name}") and model.cast_predicate(f"{expert}.{name}")
    mlx_lm.convert(str(path), str(tmp_path / "copy"), dtype="bfloat16")
    saved: Any = mx.load(str(tmp_path / "copy" / "model.safetensors"))
    types = {name: value.dtype for name, value in saved.items()}
    assert types.pop(f"{gate}.weight") == types.pop(f"{gate}.expert_bias") == mx.float32
    assert set(types.values()) == {mx.bfloat16}


def test_16_bits_are_cast_on_the_cpu(goldens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    half = {n: v.astype(mx.bfloat16) for n, v in published().items()}
    path = written(tmp_path / "half", goldens, half, mx.bfloat16, dtype="bfloat16")
    capfd.readouterr()
    model, tokens = tokens_of(path)
    assert "cast to float32" in capfd.readouterr().err
    assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.float32} and tokens
    same = mlx_lm.load(str(written(tmp_path / "same", goldens, half)))[0]
    assert distance(model(mx.arange(64)[None]), same(mx.arange(64)[None])) == 0


def test_in_16_bits_only_the_states_are(goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has no gather of experts in 16 bits: those alone are computed in 32 here."""
    model = mlx_lm.load(str(written(tmp_path / "float", goldens)))[0]
    expected = numpy(model(mx.arange(64)[None]))
    gate = model.layers[1].mlp.gate
    router = {"weight": gate.weight, "expert_bias": gate.expert_bias}
    model.set_dtype(mx.bfloat16)
    gate.update(router)
    seen = []
    original = llada2_moe.SwitchGLU.__call__

    def wide(self: Any, x: mx.array, ids: mx.array) -> mx.array:
        seen.append(x.dtype)
        self.set_dtype(mx.float32)
        return original(self, x.astype(mx.float32), ids).astype(x.dtype)

    monkeypatch.setattr(llada2_moe.SwitchGLU, "__call__", wide)
    logits = model(mx.arange(64)[None])
    assert logits.dtype == mx.bfloat16 and seen == [mx.bfloat16]
    assert np.corrcoef(numpy(logits).ravel(), expected.ravel())[0, 1] > 0.98
