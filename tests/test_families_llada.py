"""LLaDA, iLLaDA, LLaDA-MoE and ModernBERT: architectures of our own, against the references' logits and transformers'
models of the same computation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils

from mlx_dllm_plugin import DiffusionError
from mlx_dllm_plugin.caches import AttentionPolicy, FullCanvas
from mlx_dllm_plugin.checkpoint import Checkpoint
from mlx_dllm_plugin.families import FAMILIES, Weights
from mlx_dllm_plugin.models.modernbert import window
from mlx_dllm_plugin.spec import detect, resolve
from tests.models import load, write_json
from tests.tools import copy_run, edit_json

TOLERANCE = 5e-4  # measured on CPU: 6e-6 to 2.1e-4, with logits of a standard deviation near 4
SIGNAL = 1.0  # what a mistake must change at least; measured: 1.6 to 12
GOLDENS = {
    "llada-8b-tiny": "llada",
    "llada-gqa-tiny": "llada",
    "llada-moe-tiny": "llada_moe",
    "modernbert-tiny": "modernbert",
}
VOCAB, MASK, EOS = 96, 90, 91


@pytest.fixture(scope="module")
def folder(goldens: Path) -> Path:
    return goldens / "llada_dream"


@pytest.fixture(autouse=True)
def on_the_cpu() -> Any:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def full(model: Any, padding: list[int] | None = None, width: int = 0) -> list[Any]:
    return [FullCanvas(padding, width)] * len(model.layers)


def numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def stored(path: Path) -> Weights:
    weights: Any = mx.load(str(path / "model.safetensors"))
    mx.eval(weights)
    return dict(weights)


def rewrite(source: Path, target: Path, change: Callable[[Weights], Weights], **config: Any) -> Path:
    """A copy of a checkpoint with other weights and other keys in config.json."""
    copy_run(source, target)
    edit_json(target / "config.json", **config)
    mx.save_safetensors(str(target / "model.safetensors"), change(stored(source)), metadata={"format": "pt"})
    return target


# What the references compute.


@pytest.mark.parametrize("name", GOLDENS)
def test_logits_equal_the_references(name: str, folder: Path) -> None:
    model = load(folder / name)
    golden = json.loads((folder / name / "golden.json").read_text())
    arrays = np.load(folder / name / "golden.npz")
    assert golden["forward"]
    for entry in golden["forward"]:
        ids, expected = mx.array(arrays[entry["ids"]]), arrays[entry["logits"]]
        real = arrays[entry["attention_mask"]] if entry["attention_mask"] else np.ones(ids.shape, int)
        padding = (real == 0).sum(axis=1).tolist()
        assert expected.std() > 3
        ours = numpy(model(ids, full(model, padding, ids.shape[1])))
        assert np.isfinite(ours).all()
        assert np.abs(ours - expected)[real == 1].max() < TOLERANCE
        if not any(padding):
            assert np.array_equal(ours, numpy(model(ids)))  # bidirectional without any cache, too


@pytest.mark.parametrize("name", GOLDENS)
def test_the_first_position_sees_the_last(name: str, folder: Path) -> None:
    model = load(folder / name)
    ids = np.random.default_rng(0).integers(0, 250, (1, 30))
    other = ids.copy()
    other[0, -1] += 1
    assert distance(numpy(model(mx.array(ids)))[:, 0], numpy(model(mx.array(other)))[:, 0]) > 1e-3


@pytest.mark.parametrize("name", GOLDENS)
def test_hidden_and_head_compose_to_the_models_call(name: str, folder: Path) -> None:
    model = load(folder / name)
    family = model.diffusion_family
    assert family is FAMILIES.get(GOLDENS[name])
    ids = mx.array(np.random.default_rng(1).integers(0, 250, (2, 20)))
    states = family.hidden(model, ids, full(model))
    assert states.shape[:2] == (2, 20)
    logits = numpy(model(ids))
    assert np.array_equal(numpy(family.head(model, states)), logits)
    assert distance(numpy(family.head(model, states[:, 3:7])), logits[:, 3:7]) < TOLERANCE


@pytest.mark.parametrize("name", GOLDENS)
def test_left_padded_rows_equal_the_row_alone(name: str, folder: Path) -> None:
    model = load(folder / name)
    random = np.random.default_rng(2)
    rows = [random.integers(0, 250, length) for length in (40, 27, 9)]
    canvas = np.stack([np.concatenate([random.integers(0, 250, 40 - len(row)), row]) for row in rows])
    together = numpy(model(mx.array(canvas), full(model, [0, 13, 31], 40)))
    assert np.isfinite(together).all()
    for row, logits in zip(rows, together, strict=True):
        assert distance(numpy(model(mx.array(row[None])))[0], logits[-len(row) :]) < TOLERANCE


class Kept(AttentionPolicy):
    """Keys and values of a whole canvas, in which a forward of some columns replaces its own."""

    def __init__(self, padding: list[int] | None, width: int):
        self.canvas = FullCanvas(padding, width)
        self.offset = self.canvas.offset
        self.start = 0
        self.kept: tuple[mx.array, mx.array] | None = None

    def at(self, start: int) -> None:
        self.start, self.offset = start, self.canvas.offset + start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        end = self.start + keys.shape[2]
        if self.kept is not None:
            keys, values = (
                mx.concatenate([old[:, :, : self.start], new, old[:, :, end:]], axis=2)
                for old, new in zip(self.kept, (keys, values), strict=True)
            )
        self.kept = keys, values
        return keys, values

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return self.canvas.make_mask(length)


@pytest.mark.parametrize("padding", [None, [0, 11]], ids=["equal", "padded"])
@pytest.mark.parametrize("name", GOLDENS)
def test_a_block_against_kept_keys_equals_the_whole_canvas(name: str, padding: list[int] | None, folder: Path) -> None:
    model = load(folder / name)
    ids = mx.array(np.random.default_rng(3).integers(0, 250, (2, 40)))
    cache = [Kept(padding, 40) for _ in model.layers]
    whole = numpy(model(ids, cache))
    for start, end in ((16, 24), (32, 40)):
        for policy in cache:
            policy.at(start)
        assert distance(numpy(model(ids[:, start:end], cache)), whole[:, start:end]) < TOLERANCE


# Weights in every layout.


def ours(path: Path) -> Weights:
    return dict(tree_flatten(load(path).parameters()))


def prefixed(weights: Weights) -> Weights:
    return {f"language_model.{name}": value for name, value in weights.items()}


def early(weights: Weights) -> Weights:
    """LLaDA's parts under Llama's outer names, as an early MLX conversion has them."""
    outer = {"wte": "embed_tokens", "ln_f": "norm", "ff_out": "lm_head"}
    named = {}
    for name, value in weights.items():
        inner = name.removeprefix("model.transformer.").replace("blocks.", "layers.")
        first, _, rest = inner.partition(".")
        named[f"model.{outer[first]}.{rest}" if first in outer else f"model.model.{inner}"] = value
    return named


@pytest.mark.parametrize("name", GOLDENS)
def test_every_layout_gives_the_same_model(name: str, folder: Path, tmp_path: Path) -> None:
    expected = ours(folder / name)
    layouts: dict[str, Callable[[Weights], Weights]] = {
        "original under mlx-vlm's prefix": prefixed,
        "converted": lambda _: expected,
        "converted under mlx-vlm's prefix": lambda _: prefixed(expected),
        "rope's frequencies": lambda weights: {**weights, "model.layers.0.rotary_emb.inv_freq": mx.ones(4)},
    }
    if name.startswith("llada-8b"):
        layouts["early conversion"] = early
    for about, change in layouts.items():
        found = ours(rewrite(folder / name, tmp_path / about, change))
        assert found.keys() == expected.keys(), about
        assert all(mx.array_equal(found[key], expected[key]) for key in expected), about


@pytest.mark.parametrize("name", GOLDENS)
def test_sanitize_is_idempotent(name: str, folder: Path) -> None:
    model = load(folder / name)
    once = model.sanitize(model.diffusion_family.sanitize(stored(folder / name)))
    twice = model.sanitize(model.diffusion_family.sanitize(dict(once)))
    assert once.keys() == twice.keys() == dict(tree_flatten(model.parameters())).keys()
    assert all(mx.array_equal(once[key], twice[key]) for key in once)


@pytest.mark.parametrize("name", GOLDENS)
def test_a_saved_copy_loads_again(name: str, folder: Path, tmp_path: Path) -> None:
    model, tokenizer, config = mlx_lm.load(str(folder / name), return_config=True)
    ids = mx.array(np.random.default_rng(4).integers(0, 250, (1, 20)))
    logits = numpy(model(ids))
    utils.save(tmp_path / "copy", folder / name, model, tokenizer, config, donate_model=False)
    again = load(tmp_path / "copy")
    assert np.array_equal(numpy(again(ids)), logits)
    before, after = model.diffusion_spec, again.diffusion_spec
    assert (before.family, before.mask_token_id) == (after.family, after.mask_token_id)
    assert set(before.eos_token_ids) <= set(after.eos_token_ids)


@pytest.mark.parametrize("name", GOLDENS)
def test_generate_without_any_option(name: str, folder: Path) -> None:
    model, tokenizer = mlx_lm.load(str(folder / name))
    assert isinstance(mlx_lm.generate(model, tokenizer, prompt="What is the sea?", max_tokens=8), str)


def test_names_of_layers_in_the_quantization(folder: Path, tmp_path: Path) -> None:
    """Layers with settings of their own are found under the names the weights get."""
    model = load(folder / "llada-8b-tiny")
    own = {"group_size": 32, "bits": 8, "mode": "affine"}

    def predicate(path: str, _: Any) -> Any:
        return own if path.endswith(("o_proj", "embed_tokens", "lm_head")) else path.endswith("q_proj")

    quantized, config = utils.quantize_model(
        model, {"model_type": "llada"}, group_size=64, bits=4, quant_predicate=predicate
    )
    logits = numpy(quantized(mx.arange(20)[None]))
    weights = prefixed(dict(tree_flatten(quantized.parameters())))
    settings = {}
    for name, value in config["quantization"].items():
        if name == "lm_head":
            name = "language_model.model.transformer.ff_out"
        name = name.replace("model.embed_tokens", "language_model.model.transformer.wte")
        name = name.replace("model.layers.", "language_model.model.transformer.blocks.")
        settings[name.replace("self_attn.o_proj", "attn_out")] = value
    assert sum("transformer" in name for name in settings) == 2 + len(model.layers)
    path = rewrite(folder / "llada-8b-tiny", tmp_path / "copy", lambda _: weights, quantization=settings)
    found, config = utils.load_model(path)
    assert np.array_equal(numpy(found(mx.arange(20)[None])), logits)
    assert {"model.embed_tokens", "lm_head", "model.layers.0.self_attn.o_proj"} <= config["quantization"].keys()


# Against transformers' models that compute the same.


LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    bos_token_id=None,
    pad_token_id=None,
    eos_token_id=EOS,
    initializer_range=0.3,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)
MOE = LLAMA | dict(
    num_hidden_layers=3,
    head_dim=16,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=3,
    norm_topk_prob=False,
    mlp_only_layers=[1],
    decoder_sparse_step=1,
)
LENGTH = 18
IDS = np.random.default_rng(0).integers(0, MASK, (3, LENGTH))


def built(kind: str, config: dict[str, Any], **more: Any) -> Any:
    """transformers' model, with norms and biases that are not 1 and 0."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}{'' if kind.startswith('ModernBert') else 'ForCausalLM'}")
    made = model._from_config(
        getattr(transformers, f"{kind.removesuffix('ForMaskedLM')}Config")(**config, **more),
        attn_implementation="eager",
    ).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn(weight.shape)
    return made


def reference(model: Any, ids: np.ndarray = IDS, attention_mask: np.ndarray | None = None) -> np.ndarray:
    """Logits of transformers' model, without its causal mask if it has one."""
    import torch

    module = sys.modules[type(model).__module__]
    extra = {} if attention_mask is None else {"attention_mask": torch.tensor(attention_mask)}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        if hasattr(module, "create_causal_mask"):
            patch.setattr(module, "create_causal_mask", lambda *args, **kwargs: None)
        return model(torch.tensor(ids), **extra).logits.float().numpy()


def converted(model: Any, path: Path, config: dict[str, Any], **names: str) -> Path:
    """The weights of transformers' model on disk with another config.json, with parts of their names replaced."""
    weights = {}
    for name, value in model.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name] = mx.array(value.numpy())
    write_json(path / "config.json", config)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})
    return path


def olmo(**changes: Any) -> dict[str, Any]:
    """LLAMA in LLaDA's keys."""
    return {
        "model_type": "llada",
        "architectures": ["LLaDAModelLM"],
        "d_model": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 2,
        "mlp_hidden_size": 96,
        "vocab_size": VOCAB - 3,
        "embedding_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "weight_tying": False,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        **changes,
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_llada_is_llama_without_the_causal_mask(tied: bool, tmp_path: Path) -> None:
    torch_model = built("Llama", LLAMA, tie_word_embeddings=tied)
    names = {"self_attn.o_proj": "attn_out", "self_attn.": "", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj"}
    names |= {"mlp.down_proj": "ff_out", "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm"}
    names |= {"model.layers": "model.transformer.blocks", "model.norm": "model.transformer.ln_f"}
    names |= {"model.embed_tokens": "model.transformer.wte", "lm_head": "model.transformer.ff_out"}
    model = load(converted(torch_model, tmp_path, olmo(weight_tying=tied), **names))
    assert model.diffusion_spec.vocab_size == model.args.vocab_size == VOCAB
    expected = reference(torch_model)
    assert expected.std() > 1
    assert distance(numpy(model(mx.array(IDS))), expected) < TOLERANCE


def illada(**changes: Any) -> dict[str, Any]:
    config = {key: value for key, value in LLAMA.items() if key not in ("rope_parameters", "pad_token_id")}
    names = {
        "model_type": "illada",
        "architectures": ["ILLaDAForCausalLM"],
        "rope_theta": 500.0,
        "layer_norm_eps": None,
    }
    return {**config, **names, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, **changes}


def test_illada_has_llamas_names_and_its_own_mask_token(tmp_path: Path) -> None:
    torch_model = built("Llama", LLAMA, tie_word_embeddings=True)
    path = converted(torch_model, tmp_path, illada())
    model = load(path)
    assert distance(numpy(model(mx.array(IDS))), reference(torch_model)) < TOLERANCE
    spec = model.diffusion_spec
    assert (spec.family, spec.mask_token_id, spec.sources["mask_token_id"]) == ("illada", 5, "the family illada")
    write_json(path / "tokenizer.json", {"added_tokens": [{"id": 7, "content": "<[MASK]>"}]})
    assert load(path).diffusion_spec.mask_token_id == 7


def moe(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "lladamoe",
        "architectures": ["LLaDAMoEModelLM"],
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,  # which the model's own code ignores
        "expert_intermediate_size": 32,
        "dense_intermediate_size": 96,
        "moe_layer_freq": [1, 0, 1],
        "qk_layernorm": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "partial_rotary_factor": 1,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        **changes,
    }


def moe_names(model: Any, path: Path, **changes: Any) -> Path:
    """transformers keeps the experts stacked in memory, with gate and up in one."""
    path = converted(model, path, moe(**changes))
    weights: Weights = {}
    for name, value in stored(path).items():
        if ".experts.gate_up_proj" in name:
            for e in range(len(value)):
                for part, half in zip(("gate_proj", "up_proj"), mx.split(value[e], 2), strict=True):
                    weights[name.replace("gate_up_proj", f"{e}.{part}.weight")] = half
        elif ".experts.down_proj" in name:
            weights |= {name.replace("down_proj", f"{e}.down_proj.weight"): value[e] for e in range(len(value))}
        else:
            weights[name] = value
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})
    return path


def test_llada_moe_with_dense_layers_and_grouped_keys(tmp_path: Path) -> None:
    """Qwen3-MoE without its causal mask computes the same."""
    torch_model = built("Qwen3Moe", MOE)
    model = load(moe_names(torch_model, tmp_path))
    assert [hasattr(layer.mlp, "gate") for layer in model.layers] == [True, False, True]
    expected = reference(torch_model)
    assert expected.std() > 1
    assert distance(numpy(model(mx.array(IDS))), expected) < TOLERANCE
    renormalised = reference(built("Qwen3Moe", MOE | {"norm_topk_prob": True}))
    assert distance(renormalised, expected) > SIGNAL


def test_partial_rotary_turns_only_a_part_of_each_head(tmp_path: Path) -> None:
    path = moe_names(built("Qwen3Moe", MOE), tmp_path / "half", partial_rotary_factor=0.5)
    model = load(path)
    assert model.layers[0].self_attn.rope.dims == 8
    whole = load(moe_names(built("Qwen3Moe", MOE), tmp_path / "whole"))
    assert distance(numpy(model(mx.array(IDS))), numpy(whole(mx.array(IDS)))) > SIGNAL


MODERNBERT = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=5,
    num_attention_heads=4,
    max_position_embeddings=64,
    local_attention=6,
    initializer_range=0.3,
    pad_token_id=92,
    eos_token_id=93,
    bos_token_id=94,
    cls_token_id=94,
    sep_token_id=93,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
)


def bert(path: Path, model: Any) -> Path:
    """As transformers saves it, with the tokenizer's declaration that the family looks for."""
    model.save_pretrained(path)
    edit_json(path / "config.json", mask_token_id=MASK)
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True},
        {"decoder_bias": False, "local_attention": 7},
        {"tie_word_embeddings": False, "global_attn_every_n_layers": 2},
        {"layer_types": ["sliding_attention", *["full_attention"] * 3, "sliding_attention"]},
    ],
    ids=["plain", "biases", "odd window", "untied", "layer types"],
)
def test_modernbert_equals_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    torch_model = built("ModernBertForMaskedLM", MODERNBERT | changes)
    path = bert(tmp_path, torch_model)
    model = load(path)
    expected = reference(torch_model)
    assert expected.std() > 0.5
    assert distance(numpy(model(mx.array(IDS))), expected) < TOLERANCE
    padding = [0, 5, 11]
    visible = (np.arange(LENGTH)[None] >= np.array(padding)[:, None]).astype(int)
    padded = reference(torch_model, attention_mask=visible)
    ours = numpy(model(mx.array(IDS), full(model, padding, LENGTH)))
    assert np.abs(ours - padded)[visible == 1].max() < TOLERANCE


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_types": ["full_attention"] * 5},
        {"layer_types": ["sliding_attention"] * 5},
        {"local_attention": 4},
        {"local_attention": 8},
        {"rope_parameters": None, "global_rope_theta": 5000.0, "local_rope_theta": 5000.0},
    ],
    ids=["all global", "all local", "narrower", "wider", "one theta"],
)
def test_another_modernbert_is_another_result(wrong: dict[str, Any], tmp_path: Path) -> None:
    """The comparison above can fail."""
    torch_model = built("ModernBertForMaskedLM", MODERNBERT)
    path = bert(tmp_path, torch_model)
    edit_json(path / "config.json", **wrong)
    assert distance(numpy(load(path)(mx.array(IDS))), reference(torch_model)) > SIGNAL


def test_modernberts_settings_as_transformers_4_wrote_them(tmp_path: Path) -> None:
    torch_model = built("ModernBertForMaskedLM", MODERNBERT)
    path = bert(tmp_path, torch_model)
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 5000.0, "local_rope_theta": 50.0}
    edit_json(path / "config.json", layer_types=..., rope_parameters=..., **old)
    assert distance(numpy(load(path)(mx.array(IDS))), reference(torch_model)) < TOLERANCE


def test_the_window_of_a_local_layer() -> None:
    seen = np.array(window(2, 0, 6, 6, None))
    assert seen[3].tolist() == [False, True, True, True, True, True]
    assert np.array_equal(np.array(window(2, 4, 2, 6, None)), seen[4:])
    assert window(5, 0, 6, 6, None) is None and window(5, 3, 2, 6, None) is None
    assert window(4, 0, 6, 6, None) is not None
    visible = mx.array([[False, False, False, True, True, True]])[:, None, None]
    both = np.array(window(2, 0, 6, 6, visible))[0, 0]
    assert both[3].tolist() == [False, False, False, True, True, True]
    assert both.any(axis=1).all() and both[0].tolist() == [True, *[False] * 5]


# Quantized, and in 16 bits.


@pytest.mark.parametrize("name", ["llada", "llada_moe", "modernbert"])
def test_a_quantized_copy_loads(name: str, tmp_path: Path) -> None:
    if name == "llada":
        path = converted(built("Llama", LLAMA), tmp_path / "full", illada(tie_word_embeddings=False))
    elif name == "llada_moe":
        path = moe_names(built("Qwen3Moe", MOE), tmp_path / "full")
    else:
        path = bert(tmp_path / "full", built("ModernBertForMaskedLM", MODERNBERT))
    model, config = utils.load_model(path)
    logits = numpy(model(mx.array(IDS)))
    model, config = utils.quantize_model(model, config, group_size=32, bits=4)
    utils.save_model(tmp_path / "quantized", model)
    utils.save_config(config, tmp_path / "quantized" / "config.json")
    again = load(tmp_path / "quantized")
    kinds = {type(module).__name__ for _, module in again.named_modules()}
    assert {"QuantizedLinear", "QuantizedEmbedding"} <= kinds
    if name == "llada_moe":
        assert "QuantizedSwitchLinear" in kinds
        assert type(again.layers[0].mlp.gate).__name__ == "Linear"
    quantized = numpy(again(mx.array(IDS)))
    assert np.isfinite(quantized).all()
    assert 0 < distance(quantized, logits) and np.corrcoef(quantized.ravel(), logits.ravel())[0, 1] > 0.5
    family = again.diffusion_family
    assert np.array_equal(numpy(family.head(again, family.hidden(again, mx.array(IDS), full(again)))), quantized)


def half(weights: Weights) -> Weights:
    return {name: value.astype(mx.bfloat16) for name, value in weights.items()}


def test_experts_in_16_bits_are_cast_on_the_cpu_with_one_note(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = rewrite(folder / "llada-moe-tiny", tmp_path / "half", half)
    capfd.readouterr()
    model = load(path)
    notes = [line for line in capfd.readouterr().err.splitlines() if "mlx-dllm-plugin" in line]
    assert len(notes) == 1 and "float32" in notes[0]
    assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.float32}
    assert np.isfinite(numpy(model(mx.arange(40)[None]))).all()


def test_dense_weights_keep_their_16_bits(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load(rewrite(folder / "llada-8b-tiny", tmp_path / "half", half))
    assert "float32" not in capfd.readouterr().err
    assert model(mx.arange(40)[None]).dtype == mx.bfloat16


def test_the_router_is_neither_quantized_nor_cast(folder: Path) -> None:
    model = load(folder / "llada-moe-tiny")
    gate, expert = "model.layers.0.mlp.gate", "model.layers.0.mlp.switch_mlp.gate_proj"
    assert not model.quant_predicate(gate, None) and model.quant_predicate(expert, None)
    assert not model.cast_predicate(f"{gate}.weight") and model.cast_predicate(f"{expert}.weight")


# What is recognised, what is assumed, and what is refused.


def test_specs(folder: Path) -> None:
    found = {}
    for name, family in GOLDENS.items():
        checkpoint = Checkpoint(folder / name, json.loads((folder / name / "config.json").read_text()))
        assert detect(checkpoint) is FAMILIES.get(family)
        found[name] = resolve(checkpoint, FAMILIES.get(family))
        assert (found[name].logits, found[name].attention, found[name].canvas) == ("in_place", "bidirectional", "fixed")
        assert found[name].defaults["block_length"] == 32 and found[name].defaults["max_tokens"] == 128
    llada, moe, bert = found["llada-8b-tiny"], found["llada-moe-tiny"], found["modernbert-tiny"]
    assert (llada.mask_token_id, llada.eos_token_ids, llada.stop_token_ids) == (303, (297, 302), (302,))
    assert (moe.mask_token_id, moe.eos_token_ids) == (303, (297, 302))
    assert "mask token" in moe.sources["mask_token_id"]
    # dllm ends an answer with padding, which config.json does not say.
    assert (bert.mask_token_id, bert.eos_token_ids, bert.stop_token_ids) == (300, (298, 299), (299,))
    assert (llada.unmasking, moe.unmasking, bert.unmasking) == ("low_confidence", "low_confidence", "mdlm")


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "llada", "architectures": ["LLaDAModelLM"]}, "llada"),
        ({"model_type": "llada", "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"}}, "llada"),
        ({"model_type": "llada", "architectures": ["LLaDAMoEModelLM"]}, "llada_moe"),
        ({"model_type": "lladamoe", "architectures": ["LLaDAMoEModelLM"]}, "llada_moe"),
        ({"model_type": "lladamoe"}, "llada_moe"),
        ({"model_type": "illada", "architectures": ["ILLaDAForCausalLM"]}, "illada"),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "mask_token_id": 3}, "modernbert"),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, None),
        ({"model_type": "modernbert", "architectures": ["ModernBertModel"], "mask_token_id": 3}, None),
        ({"model_type": "llama", "architectures": ["LLaDAModelLM"]}, None),
    ],
)
def test_claims(config: dict[str, Any], family: str | None, tmp_path: Path) -> None:
    names = ("llada", "llada_moe", "illada", "modernbert")
    claimed = [name for name in names if FAMILIES.get(name).claims(Checkpoint(tmp_path, config))]
    assert claimed == ([] if family is None else [family])


LAYERS = "llada-8b-tiny", "llada-moe-tiny", "modernbert-tiny"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (LAYERS[0], {"alibi": True}, "alibi = True"),
        (LAYERS[0], {"layer_norm_type": "default"}, "layer_norm_type = 'default'"),
        (LAYERS[0], {"layer_norm_with_affine": False}, "layer_norm_with_affine = False"),
        (LAYERS[0], {"bias_for_layer_norm": True}, "bias_for_layer_norm = True"),
        (LAYERS[0], {"attention_layer_norm": True}, "attention_layer_norm = True"),
        (LAYERS[0], {"include_bias": True}, "include_bias = True"),
        (LAYERS[0], {"include_qkv_bias": True}, "include_qkv_bias = True"),
        (LAYERS[0], {"activation_type": "gelu"}, "activation_type = 'gelu'"),
        (LAYERS[0], {"block_type": "sequential"}, "block_type = 'sequential'"),
        (LAYERS[0], {"block_group_size": 2}, "block_group_size = 2"),
        (LAYERS[0], {"rope": False}, "rope = False"),
        (LAYERS[0], {"input_emb_norm": True}, "input_emb_norm = True"),
        (LAYERS[0], {"scale_logits": True}, "scale_logits = True"),
        (LAYERS[1], {"shared_expert_intermediate_size": 24}, "shared_expert_intermediate_size = 24"),
        (LAYERS[1], {"moe_router_score_function": "sigmoid"}, "moe_router_score_function = 'sigmoid'"),
        (LAYERS[1], {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias = True"),
        (LAYERS[1], {"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        (LAYERS[1], {"router_num_group": 8}, "router_num_group = 8"),
        (LAYERS[1], {"attention_bias": True}, "attention_bias = True"),
        (LAYERS[1], {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        (LAYERS[1], {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (LAYERS[1], {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        (LAYERS[1], {"moe_layer_freq": 1}, "moe_layer_freq = 1"),
        (LAYERS[1], {"moe_layer_freq": [1]}, r"moe_layer_freq = \[1\]"),
        (LAYERS[2], {"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        (LAYERS[2], {"classifier_activation": "silu"}, "classifier_activation = 'silu'"),
        (LAYERS[2], {"layer_types": ["full_attention"]}, "layer_types"),
        (LAYERS[2], {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type = 'yarn'"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_are_not_computed_are_refused(
    name: str, change: dict[str, Any], words: str, folder: Path
) -> None:
    with pytest.raises(DiffusionError, match=words) as error:
        utils.load_model(folder / name, model_config=change)
    assert str(error.value).count(". ") == 0 and "cannot be decoded" in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ],
)
def test_illadas_settings_that_are_not_computed_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DiffusionError, match=words):
        FAMILIES.get("illada").prepare_config(illada(**change))
    FAMILIES.get("illada").prepare_config(illada())
