"""Which of transformers' classes computes what a family's models compute, its settings, and where files hold its
weights. Written from the references, apart from the models and the tables of names here: those are compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import Checkpoint, check_files, indexed_files
from ..errors import CheckpointError, DiffusionError
from ..families import Family

if TYPE_CHECKING:
    import torch

Settings = dict[str, Any]

_NOT_SETTINGS = (
    "model_type",
    "architectures",
    "auto_map",
    "quantization",
    "quantization_config",
    "transformers_version",
)


def _same(config: Mapping[str, Any]) -> Settings:
    return dict(config)


def _llada(config: Mapping[str, Any]) -> Settings:
    """LLaDA's keys are OLMo's; its blocks are Llama's."""
    heads = config.get("n_heads")
    grouped = 1 if config.get("multi_query_attention") else heads
    return {
        "vocab_size": config.get("embedding_size") or config.get("vocab_size"),
        "hidden_size": config.get("d_model"),
        "intermediate_size": config.get("mlp_hidden_size") or config.get("mlp_ratio", 4) * config.get("d_model", 0),
        "num_hidden_layers": config.get("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("n_kv_heads") or grouped,
        "max_position_embeddings": config.get("max_sequence_length", 4096),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "rope_theta": config.get("rope_theta", 10000.0),
        "hidden_act": config.get("activation_type", "silu"),
        "attention_bias": bool(config.get("include_qkv_bias") or config.get("include_bias")),
        "mlp_bias": bool(config.get("include_bias")),
        "tie_word_embeddings": bool(config.get("weight_tying")),
    }


def _llada_moe(config: Mapping[str, Any]) -> Settings:
    """LLaDA-MoE's layers are Qwen3-MoE's, its shares of experts never renormalised, whatever config.json says."""
    for key, wanted in (("qk_layernorm", True), ("partial_rotary_factor", 1)):
        if config.get(key, wanted) != wanted:
            raise DiffusionError(
                f"transformers has no class of LLaDA-MoE with {key} = {config[key]!r}: give its authors' modeling file "
                "with --reference FILE."
            )
    layers = config.get("num_hidden_layers", 0)
    return {
        **config,
        "moe_intermediate_size": config.get("expert_intermediate_size"),
        "intermediate_size": config.get("dense_intermediate_size") or config.get("expert_intermediate_size"),
        "mlp_only_layers": [i for i, experts in enumerate(config.get("moe_layer_freq") or [1] * layers) if not experts],
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "head_dim": config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
    }


# Family -> transformers' model_type of the same computation, and how its settings are made from config.json.
_TWINS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Settings]]] = {
    "dream": ("qwen2", _same),
    "fast_dllm_v2": ("qwen2", _same),
    "open_dcoder": ("qwen2", _same),
    "a2d_qwen2": ("qwen2", _same),
    "a2d_qwen3": ("qwen3", _same),
    "sdar": ("qwen3", _same),
    "sdar_moe": ("qwen3_moe", _same),
    "a2d_llama": ("llama", _same),
    "stable_diffcoder": ("llama", _same),
    "llada": ("llama", _llada),
    "illada": ("llama", _same),
    "llada_moe": ("qwen3_moe", _llada_moe),
}


def twin(checkpoint: Checkpoint, family: Family) -> tuple[type, Any]:
    """
    transformers' class that computes what a checkpoint's model does, and its configuration.

    Raises:
        DiffusionError: there is none, or it does not take the settings.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kind, settings = _TWINS.get(family.name, (str(checkpoint.config.get("model_type")), _same))
    mapping: Any = MODEL_FOR_MASKED_LM_MAPPING if family.name == "modernbert" else MODEL_FOR_CAUSAL_LM_MAPPING
    config_class = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None
    if config_class is None or config_class not in mapping:
        raise DiffusionError(
            f"transformers has no class that computes what {family.name} does: take the checkpoint's own modeling file "
            "with --trust-remote-code, or another one with --reference FILE."
        )
    given = {key: value for key, value in checkpoint.config.items() if key not in _NOT_SETTINGS}
    try:
        config = config_class.from_dict(settings(given))
    except DiffusionError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'}: transformers' {config_class.__name__} does not take its settings "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]})."
        ) from None
    return mapping[config_class], config


_VLM = "language_model."  # before every name in copies made by mlx-vlm
# Names of one weight in different files, without what follows (.weight, .bias).
_LAYER = r"(?P<n>\d+)"
_SAME_WEIGHT: tuple[tuple[str, ...], ...] = (
    ("model.embed_tokens", "model.transformer.wte"),
    ("model.norm", "model.transformer.ln_f"),
    ("lm_head", "model.transformer.ff_out", "model.lm_head"),
    *(
        (f"model.layers.{{n}}.{llama}", f"model.transformer.blocks.{{n}}.{olmo}", f"model.model.layers.{{n}}.{olmo}")
        for llama, olmo in (
            ("input_layernorm", "attn_norm"),
            ("self_attn.q_proj", "q_proj"),
            ("self_attn.k_proj", "k_proj"),
            ("self_attn.v_proj", "v_proj"),
            ("self_attn.o_proj", "attn_out"),
            ("post_attention_layernorm", "ff_norm"),
            ("mlp.gate_proj", "ff_proj"),
            ("mlp.up_proj", "up_proj"),
            ("mlp.down_proj", "ff_out"),
        )
    ),
)
# GPT-2's matrices, which transformers keeps [in, out] and mlx-lm [out, in].
_TURNED = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
# Stored beside the weights by some versions, and computed by all.
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$")


def names_of(name: str) -> Iterator[tuple[str, bool]]:
    """The names under which files may hold a parameter, its own first, each with whether it lies transposed there."""
    yield name, False
    module, _, leaf = name.rpartition(".")
    for group in _SAME_WEIGHT:
        for template in group:
            match = re.fullmatch(re.escape(template).replace(r"\{n\}", _LAYER), module)
            if match is not None:
                for other in group:
                    if other != template:
                        yield f"{other.format(**match.groupdict())}.{leaf}", False
    plain = name.removeprefix("transformer.")
    if plain != name:
        yield plain, False
        yield f"model.{plain}", _TURNED.fullmatch(plain) is not None


def is_computed(name: str) -> bool:
    """Whether a stored tensor is none of a model's weights: the frequencies of its rope, a causal mask."""
    return _COMPUTED.search(name) is not None


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from: the stored tensors it is made of, and how, in a given dtype."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    load: Callable[[torch.dtype | None], torch.Tensor]


class Files:
    """The tensors of a checkpoint's files, by name and without mlx-vlm's prefix. Only headers are read at first."""

    def __init__(self, checkpoint: Checkpoint):
        self.path = checkpoint.path
        indexed_files(self.path)
        self.entries: dict[str, tuple[Path, str, dict[str, Any]]] = {}
        for file, header in check_files(self.path).items():
            for name, entry in header.items():
                self.entries[name.removeprefix(_VLM)] = self.path / file, name, entry
        packed = ("U8", "U32", "I8", "F8")  # U8 also is an old causal mask
        quantized = next(
            (n for n, (_, _, e) in self.entries.items() if e["dtype"].startswith(packed) and not is_computed(n)), None
        )
        if quantized is not None or any(checkpoint.config.get(k) for k in ("quantization", "quantization_config")):
            raise CheckpointError(
                f"{self.path} is quantized, and no reference reads that: verify the checkpoint it was made from; what "
                "quantization changed is in the table that mlx_lm.convert prints."
            )
        self._open: dict[Path, Any] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name][2]["shape"])

    def read(self, name: str, *index: Any) -> torch.Tensor:
        """A tensor, or a part of it. It may lie in the file's memory: it must not be written to."""
        from safetensors import safe_open

        file, stored, _ = self.entries[name]
        if file not in self._open:
            self._open[file] = safe_open(str(file), framework="pt")
        if not index:
            return self._open[file].get_tensor(stored)
        return self._open[file].get_slice(stored)[index]

    def close(self) -> None:
        self._open.clear()

    def source(self, name: str) -> Source | None:
        """Where a parameter of the reference is, or None."""
        for stored, turned in names_of(name):
            if stored in self.entries:
                return self._whole(stored, turned)
        return self._stacked(name) or self._single(name)

    def _whole(self, name: str, turned: bool) -> Source:
        def load(dtype: torch.dtype | None) -> torch.Tensor:
            value = self.read(name)
            value = value.T if turned else value
            return (value.to(dtype) if dtype is not None and value.is_floating_point() else value).contiguous()

        shape = self.shape(name)
        return Source((name,), shape[::-1] if turned else shape, load)

    def _stacked(self, name: str) -> Source | None:
        """transformers 5 stacks the experts, with gate and up in one; files have them one by one, or stacked apart."""
        where, dot, leaf = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf)
        if not dot or parts is None:
            return None
        apart = tuple(f"{where}.switch_mlp.{part}.weight" for part in parts)
        count = 0
        while f"{where}.experts.{count}.{parts[0]}.weight" in self.entries:
            count += 1
        single = tuple(f"{where}.experts.{e}.{part}.weight" for part in parts for e in range(count))
        names = apart if apart[0] in self.entries else single
        if not names or any(n not in self.entries for n in names):
            return None
        experts = self.shape(names[0])[0] if names is apart else count
        rows, columns = self.shape(names[0])[-2:]

        def load(dtype: torch.dtype | None) -> torch.Tensor:
            import torch

            made = torch.empty(shape, dtype=dtype or self.read(names[0]).dtype)
            for i, stored in enumerate(names):
                start = (i if names is apart else i // count) * rows
                target = made[:, start : start + rows] if names is apart else made[i % count, start : start + rows]
                target.copy_(self.read(stored))
            return made

        shape = (experts, len(parts) * rows, columns)
        return Source(names, shape, load)

    def _single(self, name: str) -> Source | None:
        """One expert, in a file that has them stacked."""
        where, dot, leaf = name.rpartition(".experts.")
        number, _, part = leaf.removesuffix(".weight").partition(".")
        if not dot or not number.isdigit() or part not in ("gate_proj", "up_proj", "down_proj"):
            return None
        expert = int(number)
        for stored in (f"{where}.switch_mlp.{part}.weight", f"{where}.experts.{part}"):
            if stored in self.entries:
                shape = self.shape(stored)
                return self._rows(stored, expert, 0, shape[1], shape)
        stored = f"{where}.experts.gate_up_proj"
        if stored in self.entries:
            shape = self.shape(stored)
            half = shape[1] // 2
            return self._rows(stored, expert, half * (part == "up_proj"), half, shape)
        return None

    def _rows(self, name: str, expert: int, start: int, rows: int, shape: tuple[int, ...]) -> Source | None:
        if expert >= shape[0]:
            return None

        def load(dtype: torch.dtype | None) -> torch.Tensor:
            value = self.read(name, slice(expert, expert + 1), slice(start, start + rows), slice(None))[0]
            return value.to(dtype or value.dtype)

        return Source((name,), (rows, shape[2]), load)
