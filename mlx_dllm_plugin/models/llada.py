"""LLaDA and iLLaDA: Llama's layers without a causal mask. Weights and settings have Llama's names here, which mlx-lm's
tools look for; :meth:`Model.sanitize` and :meth:`ModelArgs.from_dict` also take LLaDA's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import BaseModelArgs, create_attention_mask, scaled_dot_product_attention

_TOP = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
_TOP |= {"embed_tokens": "model.embed_tokens", "norm": "model.norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


def rename(name: str) -> str:
    """A weight's or module's name here, from LLaDA's, with or without mlx-vlm's prefix, or from one of these."""
    inner = name = name.removeprefix("language_model.")
    while inner.startswith(("model.", "transformer.")):
        inner = inner.partition(".")[2]
    head, separator, rest = inner.partition(".")
    if head in ("blocks", "layers"):
        number, _, inside = rest.partition(".")
        part, dot, tail = inside.partition(".")
        return f"model.layers.{number}.{_LAYER.get(part, part)}{dot}{tail}"
    if head == "lm_head":
        return inner
    return f"{_TOP[head]}{separator}{rest}" if head in _TOP else name


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> ModelArgs:
        """From a config.json with LLaDA's keys (``d_model``) or Llama's."""
        if "d_model" not in params:
            return super().from_dict(params)
        heads = params["n_heads"]
        return cls(
            model_type=params["model_type"],
            hidden_size=params["d_model"],
            num_hidden_layers=params["n_layers"],
            intermediate_size=params.get("mlp_hidden_size") or params.get("mlp_ratio", 4) * params["d_model"],
            num_attention_heads=heads,
            # The embedding may have more rows than the vocabulary has tokens.
            vocab_size=params.get("embedding_size") or params["vocab_size"],
            num_key_value_heads=params.get("n_kv_heads") or (1 if params.get("multi_query_attention") else heads),
            rms_norm_eps=params.get("rms_norm_eps", cls.rms_norm_eps),
            rope_theta=params.get("rope_theta", cls.rope_theta),
            tie_word_embeddings=params.get("weight_tying", True),
        )

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads


class Attention(nn.Module):
    """
    Args:
        head_dim: default: the hidden size shared among the heads.
        rotary: dimensions of a head that are turned; default: all.
        qk_norm: norms of queries and keys, per head.
    """

    def __init__(self, args: Any, head_dim: int | None = None, rotary: int | None = None, qk_norm: bool = False):
        super().__init__()
        self.n_heads = args.num_attention_heads
        self.n_kv_heads = args.num_key_value_heads or args.num_attention_heads
        head_dim = head_dim or args.hidden_size // self.n_heads
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(args.hidden_size, self.n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(args.hidden_size, self.n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(args.hidden_size, self.n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.n_heads * head_dim, args.hidden_size, bias=False)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = nn.RMSNorm(head_dim, eps=args.rms_norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, eps=args.rms_norm_eps)
        self.rope = nn.RoPE(head_dim if rotary is None else rotary, traditional=False, base=args.rope_theta)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x [B, L, D] -> [B, L, D]."""
        B, L, _ = x.shape
        queries = self.q_proj(x).reshape(B, L, self.n_heads, -1)
        keys = self.k_proj(x).reshape(B, L, self.n_kv_heads, -1)
        values = self.v_proj(x).reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        if self.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = queries.transpose(0, 2, 1, 3), keys.transpose(0, 2, 1, 3)
        if cache is not None:
            queries = self.rope(queries, offset=cache.offset)
            keys = self.rope(keys, offset=cache.offset)
            keys, values = cache.update_and_fetch(keys, values)
        else:
            queries, keys = self.rope(queries), self.rope(keys)
        out = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, L, -1))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class TransformerBlock(nn.Module):
    def __init__(self, args: Any, attention: Attention, mlp: nn.Module):
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class LLaDAModel(nn.Module):
    def __init__(self, args: Any, layers: list[TransformerBlock]):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = layers
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        """Ids [B, T] -> last hidden states [B, T, D]; without a cache every position sees every position."""
        h = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        cache = cache or [None] * len(self.layers)
        mask = create_attention_mask(h, cache[0]) if cache[0] is not None else None
        for layer, c in zip(self.layers, cache, strict=True):
            h = layer(h, mask, c)
        return self.norm(h)


class Model(nn.Module):
    def __init__(self, args: Any):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = LLaDAModel(args, [self.block(args, i) for i in range(args.num_hidden_layers)])
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def block(self, args: Any, number: int) -> TransformerBlock:
        """One of the layers."""
        return TransformerBlock(args, Attention(args), MLP(args.hidden_size, args.intermediate_size))

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        """Ids [B, T] -> logits [B, T, V] of the tokens at the same positions."""
        return self.head(self.model(inputs, cache, input_embeddings))

    def head(self, states: mx.array) -> mx.array:
        """Last hidden states [B, N, D] -> logits [B, N, V]."""
        return self.model.embed_tokens.as_linear(states) if self.args.tie_word_embeddings else self.lm_head(states)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Weights under the names here, without a stored copy of a tied head."""
        dropped = ("lm_head.",) if self.args.tie_word_embeddings else ()
        plain = {rename(name): value for name, value in weights.items()}
        if len(plain) < len(weights):
            raise ValueError("weights are there twice, under LLaDA's names and others: keep one of them")
        return {name: value for name, value in plain.items() if not name.startswith(dropped)}

    @property
    def layers(self) -> list[Any]:
        return self.model.layers
