"""LLaDA-MoE: no causal mask, a norm of queries and keys per head, and experts weighted by their share of a softmax over
all of them, not renormalised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.switch_layers import SwitchGLU

from .llada import MLP


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_experts: int
    num_experts_per_tok: int
    expert_intermediate_size: int
    dense_intermediate_size: int | None = None
    moe_layer_freq: list[int] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    qk_layernorm: bool = False
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.moe_layer_freq = self.moe_layer_freq or [1] * self.num_hidden_layers


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        head_dim = args.head_dim or args.hidden_size // args.num_attention_heads
        self.n_heads = args.num_attention_heads
        self.n_kv_heads = args.num_key_value_heads or args.num_attention_heads
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(args.hidden_size, self.n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(args.hidden_size, self.n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(args.hidden_size, self.n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.n_heads * head_dim, args.hidden_size, bias=False)
        self.qk_layernorm = args.qk_layernorm
        if self.qk_layernorm:
            self.q_norm = nn.RMSNorm(head_dim, eps=args.rms_norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, eps=args.rms_norm_eps)
        self.rope = nn.RoPE(int(head_dim * args.partial_rotary_factor), traditional=False, base=args.rope_theta)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x [B, L, D] -> [B, L, D]."""
        B, L, _ = x.shape
        queries = self.q_proj(x).reshape(B, L, self.n_heads, -1)
        keys = self.k_proj(x).reshape(B, L, self.n_kv_heads, -1)
        values = self.v_proj(x).reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        if self.qk_layernorm:
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


class SparseMoeBlock(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.top_k = args.num_experts_per_tok
        self.gate = nn.Linear(args.hidden_size, args.num_experts, bias=False)
        self.switch_mlp = SwitchGLU(args.hidden_size, args.expert_intermediate_size, args.num_experts)

    def __call__(self, x: mx.array) -> mx.array:
        """x [B, L, D] -> [B, L, D]."""
        shares = mx.softmax(self.gate(x).astype(mx.float32), axis=-1)
        experts = mx.stop_gradient(mx.argpartition(-shares, kth=self.top_k - 1, axis=-1)[..., : self.top_k])
        weights = mx.take_along_axis(shares, experts, axis=-1).astype(x.dtype)
        return (self.switch_mlp(x, experts) * weights[..., None]).sum(axis=-2)


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs, sparse: bool):
        super().__init__()
        self.self_attn = Attention(args)
        if sparse:
            self.mlp: nn.Module = SparseMoeBlock(args)
        elif args.dense_intermediate_size:
            self.mlp = MLP(args.hidden_size, args.dense_intermediate_size)
        else:
            raise ValueError("moe_layer_freq has dense layers, but dense_intermediate_size is missing")
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class LLaDAMoEModel(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        kinds = args.moe_layer_freq or []
        self.layers = [TransformerBlock(args, bool(kinds[i])) for i in range(args.num_hidden_layers)]
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
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = LLaDAMoEModel(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        """Ids [B, T] -> logits [B, T, V] of the tokens at the same positions."""
        return self.head(self.model(inputs, cache, input_embeddings))

    def head(self, states: mx.array) -> mx.array:
        """Last hidden states [B, N, D] -> logits [B, N, V]."""
        return self.model.embed_tokens.as_linear(states) if self.args.tie_word_embeddings else self.lm_head(states)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Weights with the experts stacked [E, out, in], unless they are already, and without a copy of a tied head."""
        dropped = ("lm_head.",) if self.args.tie_word_embeddings else ()
        plain = {name: value for name, value in weights.items() if not name.startswith(dropped)}
        for i in range(self.args.num_hidden_layers):
            mlp = f"model.layers.{i}.mlp"
            for part in ("gate_proj", "up_proj", "down_proj"):
                for kind in ("weight", "scales", "biases"):
                    if f"{mlp}.experts.0.{part}.{kind}" in plain:
                        names = [f"{mlp}.experts.{e}.{part}.{kind}" for e in range(self.args.num_experts)]
                        plain[f"{mlp}.switch_mlp.{part}.{kind}"] = mx.stack([plain.pop(name) for name in names])
        return plain

    @property
    def quant_predicate(self) -> Callable[[str, Any], bool]:
        """The router stays in full precision: a rounded score picks another expert."""
        return lambda path, _: not path.endswith("mlp.gate")

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        return lambda path: "mlp.gate." not in path

    @property
    def layers(self) -> list[Any]:
        return self.model.layers
