"""LLaDA-MoE: no causal mask, a norm of queries and keys per head, and experts weighted by their share of a softmax over
all of them, not renormalised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.switch_layers import SwitchGLU

from . import llada


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


class Model(llada.Model):
    def block(self, args: Any, number: int) -> llada.TransformerBlock:
        rotary = int(args.head_dim * args.partial_rotary_factor)
        attention = llada.Attention(args, args.head_dim, rotary, args.qk_layernorm)
        if args.moe_layer_freq[number]:
            return llada.TransformerBlock(args, attention, SparseMoeBlock(args))
        if not args.dense_intermediate_size:
            raise ValueError("moe_layer_freq has dense layers, but dense_intermediate_size is missing")
        return llada.TransformerBlock(args, attention, llada.MLP(args.hidden_size, args.dense_intermediate_size))

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
