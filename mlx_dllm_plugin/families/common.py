"""What families share that compute like one of mlx-lm's own models: names and weights as the tools that convert them
write them, and how transformers' configurations are brought to what mlx-lm's models read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import CheckpointError, DiffusionError
from . import Weights, a2d

VLM_PREFIX = "language_model."  # of mlx-vlm's copies


def plain(weights: Weights) -> Weights:
    """Weights without mlx-vlm's prefix and without rope's stored frequencies. Raises DiffusionError for names that are
    there with and without the prefix."""
    kept = {name: value for name, value in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    stripped = {name.removeprefix(VLM_PREFIX): value for name, value in kept.items()}
    if len(stripped) < len(kept):
        raise DiffusionError(f"The weights are there twice, with and without the prefix {VLM_PREFIX!r}: keep one.")
    return stripped


def plain_quantization(config: dict[str, Any]) -> None:
    """The same for the names of modules in the quantization of config.json."""
    rename_quantization(config, lambda name: name.removeprefix(VLM_PREFIX))


def rename_quantization(config: dict[str, Any], rename: Callable[[str], str]) -> None:
    """Give modules with a quantization of their own the names that the weights get."""
    for key in ("quantization", "quantization_config"):
        if isinstance(config.get(key), dict):
            config[key] = {rename(name): value for name, value in config[key].items()}


def plain_experts(weights: Weights) -> Weights:
    """As :func:`plain`; experts that transformers 5 has stacked get the names mlx-lm gives stacked ones. Those it lists
    one by one are stacked by mlx-lm."""
    split: Weights = {}
    for name, value in plain(weights).items():
        if name.endswith(".mlp.experts.gate_up_proj"):
            layer, half = name.removesuffix("experts.gate_up_proj"), value.shape[1] // 2
            split[f"{layer}switch_mlp.gate_proj.weight"] = value[:, :half]
            split[f"{layer}switch_mlp.up_proj.weight"] = value[:, half:]
        elif name.endswith(".mlp.experts.down_proj"):
            split[name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = value
        else:
            split[name] = value
    return split


def _shared(config: dict[str, Any]) -> None:
    """An absent ``tie_word_embeddings`` means false to transformers and true to mlx-lm; an absent ``rope_theta`` means
    10000. Windows have no meaning where attention is not causal, and mlx-lm would ignore them or mask by them."""
    plain_quantization(config)
    config.setdefault("tie_word_embeddings", False)
    a2d.lift_rope(config)
    if config.get("rope_theta") is None:
        config["rope_theta"] = 10000.0
    a2d.only(config, "hidden_act", "silu")
    a2d.only(config, "use_sliding_window", False)
    types = config.get("layer_types") or ()
    other = sorted({str(kind) for kind in ([types] if isinstance(types, str) else types)} - {"full_attention"})
    if other:
        raise DiffusionError(
            f"{config.get('model_type')} with layer_types {', '.join(map(repr, other))} cannot be decoded: only layers "
            "of 'full_attention' can."
        )


def prepare_qwen2(config: dict[str, Any]) -> None:
    """For mlx-lm's Qwen2, whose heads always share the hidden size."""
    _shared(config)
    heads = config.get("num_attention_heads") or 1
    a2d.only(config, "head_dim", config.get("hidden_size", 0) // heads)


def prepare_qwen3(config: dict[str, Any]) -> None:
    """For mlx-lm's Qwen3, which has no biases; an absent ``head_dim`` is 128 in transformers."""
    _shared(config)
    config.setdefault("head_dim", 128)
    a2d.only(config, "attention_bias", False)


def prepare_qwen3_moe(config: dict[str, Any]) -> None:
    """For mlx-lm's Qwen3-MoE, which asks for what transformers leaves out at its default, and for the number of experts
    under its old name."""
    _shared(config)
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    a2d.only(config, "attention_bias", False)
    heads = config.get("num_attention_heads") or 1
    config.setdefault("head_dim", config.get("hidden_size", 0) // heads)
    for key, default in (("decoder_sparse_step", 1), ("mlp_only_layers", []), ("norm_topk_prob", False)):
        if config.get(key) is None:
            config[key] = default


def prepare_llama(config: dict[str, Any]) -> None:
    """For mlx-lm's Llama, which has biases and heads of any size."""
    _shared(config)
    a2d.only(config, "pretraining_tp", 1)


def declares(config: dict[str, Any], *patterns: str) -> str | None:
    """The first name among ``architectures`` and the values of ``auto_map`` in which one of the patterns is found, or
    None. Case does not matter."""
    architectures = config.get("architectures") or ()
    found = [architectures] if isinstance(architectures, str) else []
    found += architectures if isinstance(architectures, list) else []
    auto_map = config.get("auto_map")
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        found += value if isinstance(value, list) else [value]
    names = (name for name in found if isinstance(name, str))
    return next((name for name in names if any(re.search(p, name, re.IGNORECASE) for p in patterns)), None)


def named(checkpoint: Checkpoint, pattern: str) -> tuple[re.Match[str], str] | None:
    """The first name of a checkpoint in which a pattern is found, with where that name is from."""
    for name, source in _names(checkpoint):
        match = re.search(pattern, name, re.IGNORECASE)
        if match:
            return match, f"the {source} {name}"
    return None


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Names by which a checkpoint may be known: of its directory, of its repository in the hub's cache, and of what
    mlx-lm says in the README.md of a copy that it was made from."""
    for path in dict.fromkeys((checkpoint.path.absolute(), checkpoint.path.resolve())):
        repository = path.parent.parent.name
        if path.parent.name == "snapshots" and repository.startswith("models--"):
            yield repository.rpartition("--")[2], "repository's name"
        else:
            yield path.name, "directory's name"
    base = re.search(r"^base_model:\s*(?:\n\s*-\s*)?(\S+)", _card(checkpoint.path), re.MULTILINE)
    if base:
        yield base[1].rpartition("/")[2], "base_model in README.md,"


def _card(path: Path) -> str:
    try:
        return (path / "README.md").read_text(encoding="utf-8", errors="replace")[:10_000]
    except OSError:
        return ""


def block_length(checkpoint: Checkpoint, *keys: str) -> tuple[int, str] | None:
    """The first of these keys of config.json that is set, with its source. Raises CheckpointError when it is no
    length."""
    for key in keys:
        value = checkpoint.config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            where = checkpoint.path / "config.json"
            raise CheckpointError(f"{where}: {key} must be a positive integer, the block length, got {value!r}.")
        return value, f"config.json ({key})"
    return None
