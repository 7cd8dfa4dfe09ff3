"""Tiny random checkpoints for tests: on disk in Hugging Face layout, loaded as users load them, or made in memory."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map_with_path

import mlx_dllm_plugin  # noqa: F401  (activates the patches, so that load_model knows diffusion checkpoints)

VOCAB = 48
EOS = 46
MASK = 47
CONTEXT = 64

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": dict(
        n_embd=32,
        n_head=4,
        n_layer=2,
        n_positions=CONTEXT,
        n_ctx=CONTEXT,
        layer_norm_epsilon=1e-5,
        activation_function="gelu_new",
    ),
    "qwen2": dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        hidden_act="silu",
    ),
}
CONFIGS["llama"] = {**CONFIGS["qwen2"]}
CONFIGS["qwen3"] = {**CONFIGS["qwen2"], "head_dim": 8}
CONFIGS["gemma2"] = {**CONFIGS["qwen3"]}
CONFIGS["gemma3_text"] = {
    **CONFIGS["qwen3"],
    "num_hidden_layers": 4,
    "sliding_window": 3,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 8,
}


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model; a change to None leaves the key out."""
    config = {"model_type": model_type, "vocab_size": VOCAB, "eos_token_id": EOS, **CONFIGS[model_type], **changes}
    return {key: value for key, value in config.items() if value is not None}


def a2d_block(**changes: Any) -> dict[str, Any]:
    """The ``a2d`` block of config.json."""
    sampler = {"canvas_len": 16, "num_steps": 8, "temperature": 1.0}
    return {"objective": "mdlm", "mask_token_id": MASK, "final_alpha": 1.0, "sampler": sampler, **changes}


def weights_of(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random weights in Hugging Face layout, large enough that every token and position matters."""
    random = np.random.default_rng(seed)
    weights: dict[str, mx.array] = {}

    def add(name: str, *shape: int, std: float = 0.1, mean: float = 0.0) -> None:
        weights[name] = mx.array((mean + std * random.standard_normal(shape)).astype(np.float32))

    def norm(name: str, width: int, bias: bool) -> None:
        add(f"{name}.weight", width, mean=1.0)
        if bias:
            add(f"{name}.bias", width)

    def dense(name: str, rows: int, columns: int, fan_in: int, bias: bool) -> None:
        add(f"{name}.weight", rows, columns, std=1.5 / fan_in**0.5)
        if bias:
            add(f"{name}.bias", columns if config["model_type"] == "gpt2" else rows)

    vocab = config["vocab_size"]
    if config["model_type"] == "gpt2":
        d = config["n_embd"]
        add("transformer.wte.weight", vocab, d, std=0.4)
        add("transformer.wpe.weight", config["n_positions"], d, std=0.4)
        for i in range(config["n_layer"]):
            layer = f"transformer.h.{i}"
            norm(f"{layer}.ln_1", d, True)
            dense(f"{layer}.attn.c_attn", d, 3 * d, d, True)
            dense(f"{layer}.attn.c_proj", d, d, d, True)
            norm(f"{layer}.ln_2", d, True)
            dense(f"{layer}.mlp.c_fc", d, 4 * d, d, True)
            dense(f"{layer}.mlp.c_proj", 4 * d, d, 4 * d, True)
        norm("transformer.ln_f", d, True)
        return weights
    d, inner = config["hidden_size"], config["intermediate_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    qkv_bias = config["model_type"] == "qwen2"
    add("model.embed_tokens.weight", vocab, d, std=0.4)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", d, False)
        for name, width in (("q", d), ("k", kv), ("v", kv)):
            dense(f"{layer}.self_attn.{name}_proj", width, d, d, qkv_bias)
        dense(f"{layer}.self_attn.o_proj", d, d, d, False)
        norm(f"{layer}.post_attention_layernorm", d, False)
        dense(f"{layer}.mlp.gate_proj", inner, d, d, False)
        dense(f"{layer}.mlp.up_proj", inner, d, d, False)
        dense(f"{layer}.mlp.down_proj", d, inner, inner, False)
    norm("model.norm", d, False)
    add("lm_head.weight", vocab, d, std=0.4)
    return weights


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def write_checkpoint(
    folder: Path, model_type: str = "gpt2", *, a2d: dict[str, Any] | None = None, seed: int = 0, **config: Any
) -> Path:
    """config.json and model.safetensors; without ``a2d`` it is the autoregressive twin (gpt2, qwen2 or llama)."""
    full = config_of(model_type, **config)
    weights = weights_of(full, seed)
    if a2d is None:  # mlx-lm's own GPT-2 does not know the prefix; the plugin takes both
        weights = {name.removeprefix("transformer."): value for name, value in weights.items()}
    write_json(folder / "config.json", full if a2d is None else {**full, "a2d": a2d})
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    return folder


def tiny_run(
    folder: Path,
    model_type: str = "gpt2",
    *,
    a2d: dict[str, Any] | None = None,
    manifest: dict[str, Any] | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """An a2d run directory: manifest.json and model/. ``a2d`` changes keys of its block."""
    write_json(folder / "manifest.json", {"a2d_version": "0.1.0", "status": "completed", **(manifest or {})})
    write_checkpoint(folder / "model", model_type, a2d=a2d_block(**(a2d or {})), seed=seed, **config)
    return folder


def load(path: Path) -> Any:
    """The model of a checkpoint or run directory, as mlx_lm.load loads it."""
    from mlx_lm.utils import load_model

    return load_model(path)[0]


def tiny_model(
    model_type: str = "gpt2", *, a2d: dict[str, Any] | None = None, ar: bool = False, seed: int = 0, **config: Any
) -> Any:
    """A loaded tiny a2d model; with ``ar`` its autoregressive twin, which has the same weights and no spec."""
    with tempfile.TemporaryDirectory() as folder:
        if ar:
            return load(write_checkpoint(Path(folder), model_type, seed=seed, **config))
        return load(tiny_run(Path(folder), model_type, a2d=a2d, seed=seed, **config))


def stock_model(model_type: str, seed: int = 0, **config: Any) -> Any:
    """mlx-lm's own model with random weights, no checkpoint and no spec."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    model = module.Model(module.ModelArgs.from_dict(config_of(model_type, **config)))
    random = np.random.default_rng(seed)

    def fill(path: str, value: mx.array) -> mx.array:
        std = 0.1 if value.ndim == 1 else 0.4 if "embed" in path or "wte" in path else 1.5 / value.shape[-1] ** 0.5
        centre = np.array(value) if value.ndim == 1 else 0.0
        return mx.array((centre + std * random.standard_normal(value.shape)).astype(np.float32))

    model.update(tree_map_with_path(fill, model.parameters()))
    mx.eval(model.parameters())
    return model


def prefer(model: Any, token: int, strength: float = 60.0, *, only: bool = False) -> Any:
    """Raise the logit of one token at every position of a GPT-2, by its final bias; with ``only``, nothing else
    matters any more. Returns the model."""
    row = model.model.wte.weight[token]
    norm = model.model.ln_f
    if only:
        norm.weight = mx.zeros_like(norm.weight)
        norm.bias = mx.zeros_like(norm.bias)
    norm.bias = norm.bias + strength * row / mx.sum(row * row)
    mx.eval(norm.parameters())
    return model


def count_forwards(monkeypatch: Any, model: Any) -> Callable[[], int]:
    """Count the calls of the model's transformer, whoever makes them."""
    calls = [0]
    kind = type(model.model)
    original = kind.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", counted)
    return lambda: calls[0]
