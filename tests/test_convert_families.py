"""mlx_lm.convert of every family: a copy is decoded as its source, in every width, and nothing but weights changes."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.convert import convert
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_dllm_plugin import DecodingOptions, decode
from mlx_dllm_plugin.checkpoint import open_checkpoint
from mlx_dllm_plugin.conversion.recipes import routers
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.spec import detect, resolve
from tests.models import a2d_block, write_json

VOCAB, MASK, EOS = 352, 340, 339
PROMPT = list(range(30, 42))

SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    eos_token_id=EOS,
    mask_token_id=MASK,
)
GEMMA = {**SHAPE, "tie_word_embeddings": True}
GPT2 = dict(
    vocab_size=VOCAB, n_embd=64, n_head=4, n_layer=2, n_positions=128, layer_norm_epsilon=1e-5, eos_token_id=EOS
)
LLADA = dict(
    d_model=64,
    n_heads=4,
    n_kv_heads=2,
    n_layers=2,
    mlp_hidden_size=96,
    max_sequence_length=128,
    embedding_size=VOCAB,
    vocab_size=VOCAB,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    weight_tying=False,
    include_qkv_bias=False,
    eos_token_id=EOS,
    mask_token_id=MASK,
)
LLADA_MOE = dict(
    num_experts=8, num_experts_per_tok=2, expert_intermediate_size=32, dense_intermediate_size=96, qk_layernorm=True
)
LLADA2 = dict(
    first_k_dense_replace=1,
    moe_intermediate_size=32,
    n_group=4,
    topk_group=2,
    num_experts=16,
    num_experts_per_tok=2,
    num_shared_experts=1,
    partial_rotary_factor=0.5,
    routed_scaling_factor=2.5,
)
QWEN3_MOE = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[]
)
BERT = {
    **{name: SHAPE[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
    **dict(num_hidden_layers=2, local_attention=8, global_attn_every_n_layers=2, max_position_embeddings=128),
    **dict(tie_word_embeddings=True, mask_token_id=MASK, eos_token_id=EOS, norm_eps=1e-5, decoder_bias=True),
    **dict(global_rope_theta=160000.0, local_rope_theta=10000.0),
}
EDITS = dict(expert_capacity=4, block_size=32, delete_token_id=341, split_token_id=342)


def named(model_type: str, architecture: str, shape: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **shape, **more}


# What is converted -> (family, config.json)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"model_type": "gpt2", **GPT2}),
    **{name: (name, {"model_type": name, **SHAPE}) for name in ("qwen2", "llama", "mistral")},
    "gemma": ("gemma", {"model_type": "gemma", **GEMMA}),
    "gemma2": ("gemma2", {"model_type": "gemma2", **GEMMA, "query_pre_attn_scalar": 16, "sliding_window": 16}),
    "gemma3_text": (
        "gemma3_text",
        {**GEMMA, "model_type": "gemma3_text", "query_pre_attn_scalar": 16, "sliding_window": 16}
        | {"sliding_window_pattern": 2},
    ),
    **{f"a2d_{name}": (f"a2d_{name}", {**SHAPE, "model_type": f"a2d-{name}"}) for name in ("llama", "qwen2", "qwen3")},
    "dream": ("dream", named("Dream", "DreamModel", SHAPE)),
    "illada": ("illada", named("illada", "ILLaDAForCausalLM", SHAPE)),
    "llada": ("llada", named("llada", "LLaDAModelLM", LLADA)),
    "llada_moe": ("llada_moe", named("llada", "LLaDAMoEModelLM", SHAPE, **LLADA_MOE)),
    "LLaDA2.0-x": ("llada2_moe", named("llada2_moe", "LLaDA2MoeModelLM", SHAPE, **LLADA2)),
    "LLaDA2.1-x": ("llada2_moe", named("llada2_moe", "LLaDA2MoeModelLM", SHAPE, **LLADA2)),
    "LLaDA2.2-x": ("llada2_moe", named("llada2_moe", "LLaDA2MoeModelLM", SHAPE, **LLADA2, **EDITS)),
    "modernbert": ("modernbert", named("modernbert", "ModernBertForMaskedLM", BERT)),
    "open_dcoder": ("open_dcoder", named("qwen2", "OpenDCoderForCausalLM", SHAPE)),
    "fast_dllm_v2": ("fast_dllm_v2", named("Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM", SHAPE, bd_size=8)),
    "SDAR-x-b8": ("sdar", named("sdar", "SDARForCausalLM", SHAPE)),
    "sdar_moe": ("sdar_moe", named("sdar_moe", "SDARMoeForCausalLM", SHAPE, **QWEN3_MOE)),
    "stable_diffcoder": ("stable_diffcoder", named("llama", "SeedDiffcoderForCausalLM", SHAPE)),
}
CODE = {"configuration_x.py": "raise SystemExit(7)\n", "inner/modeling_x.py": "raise SystemExit(7)\n"}


def test_every_family_is_converted_here() -> None:
    assert {family for family, _ in CHECKPOINTS.values()} == {family.name for family in FAMILIES.builtin()}


def write(folder: Path, name: str, data: Path) -> Path:
    """A tiny checkpoint with random weights, the tokenizer of another one and code that must not run."""
    from mlx_lm.utils import _get_classes

    family, config = FAMILIES.get(CHECKPOINTS[name][0]), copy.deepcopy(CHECKPOINTS[name][1])
    if family.a2d:
        config["a2d"] = a2d_block(mask_token_id=MASK)
    prepared = copy.deepcopy(config)
    family.prepare_config(prepared)
    if family.architecture is None:
        model_class, args_class = _get_classes(prepared)
    else:
        module = importlib.import_module(family.architecture(prepared))
        model_class, args_class = module.Model, module.ModelArgs
    model, random = model_class(args_class.from_dict(prepared)), np.random.default_rng(3)

    def fill(path: str, value: mx.array) -> mx.array:
        noise = random.standard_normal(value.shape).astype(np.float32)
        return mx.array(noise * (0.1 if value.ndim == 1 else value.shape[-1] ** -0.5) + (value.ndim == 1))

    model.update(tree_map_with_path(fill, model.parameters()))
    folder.mkdir(parents=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    for file in (data / "a2d" / "gpt2-grow" / "run" / "model").iterdir():
        if file.name not in ("config.json", "model.safetensors", "generation_config.json"):
            shutil.copyfile(file, folder / file.name)
    for inner, text in CODE.items():
        write_json(folder / inner, text)
    return folder


@pytest.fixture(scope="module")
def written(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoints, each made when it is first asked for."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write(tmp_path_factory.mktemp("families") / name, name, data)
        return made[name]

    return get


def spec_of(path: Path) -> Any:
    checkpoint = open_checkpoint(path)
    family = detect(checkpoint)
    assert family is not None
    return dataclasses.replace(resolve(checkpoint, family), sources={})


def kept_files(path: Path) -> dict[str, bytes]:
    """All files but weights, config.json and model card."""
    files = [file for file in path.rglob("*") if file.is_file() and "safetensors" not in file.name]
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in files
        if file.name not in ("config.json", "README.md")
    }


def tokens_of(path: Path) -> tuple[Any, list[int]]:
    model, _ = mlx_lm.load(str(path))
    return model, decode(model, PROMPT, DecodingOptions(max_tokens=8, stop_at_eos=False)).tokens


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_quantized_copy_is_decoded_as_its_source(
    name: str, bits: int, written: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = written(name), tmp_path / "some-b16-LLaDA2.2"  # a name that would say something else
    report = convert(str(source), str(target), quantize=True, q_bits=bits, q_group_size=32)
    assert spec_of(target) == spec_of(source)
    assert kept_files(target) == kept_files(source) and set(CODE) < set(kept_files(target))
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, target))
    assert {key: after.get(key) for key in before} == before
    model, tokens = tokens_of(target)
    assert model.diffusion_spec.family == CHECKPOINTS[name][0]
    assert len(tokens) == len(tokens_of(source)[1]) > 0
    quantized = {n: m.bits for n, m in model.named_modules() if hasattr(m, "bits")}
    assert quantized and set(quantized.values()) == {bits}
    blocks = [m for _, m in model.named_modules() if any(isinstance(c, SwitchGLU) for c in m.children().values())]
    assert len(blocks) == len(routers(model)) == ("moe" in CHECKPOINTS[name][0]) * (2 - name.startswith("LLaDA2"))
    for block in blocks:
        assert not hasattr(block.gate, "bits") and block.gate.weight.dtype == mx.float32
        assert isinstance(block.switch_mlp.up_proj, nn.Module) and block.switch_mlp.up_proj.bits == bits
    assert report.difference is not None and 0 < report.difference.mean < report.difference.largest
    assert bits <= report.copy.bits_per_weight < 2 * bits + 1 and report.source.bits_per_weight == pytest.approx(32)
    assert "changed argmax" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["mixed_8", "mixed_full"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_recipes_know_every_familys_modules(name: str, recipe: str, written: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(quantize=True, q_bits=4, q_group_size=32, report=False)
    convert(str(written(name)), str(tmp_path / name), quant_predicate=recipe, **settings)
    model, _ = mlx_lm.load(str(tmp_path / name), lazy=True)
    kept, reduced = set(), set()
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized") or hasattr(module, "bits"):
            inner = ("mlp" in path and "shared_experts" not in path) and not path.endswith("mlp.gate")
            (reduced if inner else kept).add(getattr(module, "bits", None))
    assert reduced == {4}
    assert kept - {None} == ({8} if recipe == "mixed_8" else set())


@pytest.mark.parametrize("name", ["LLaDA2.0-x", "LLaDA2.1-x", "LLaDA2.2-x"])
def test_a_copy_is_decoded_in_both_hosts(name: str, written: Any, tmp_path: Path) -> None:
    mlx_vlm = pytest.importorskip("mlx_vlm")
    source, target = written(name), tmp_path / "copy"
    module = importlib.import_module("mlx_vlm.convert")
    module.convert(str(source), str(target), quantize=True, q_bits=8, q_group_size=32, report=False)
    assert spec_of(target) == spec_of(source)
    wanted = [r.token for r in mlx_lm.stream_generate(*mlx_lm.load(str(target))[:2], PROMPT, max_tokens=32)]
    model, processor = mlx_vlm.load(str(target))
    found = list(mlx_vlm.stream_generate(model, processor, "", input_ids=mx.array([PROMPT]), max_tokens=32))
    assert wanted and found and found[-1].generation_tokens > 0
