"""LLaDA2.0, 2.1 and 2.2: block-causal attention, and experts chosen by sigmoids: in 2.0 and 2.1 from the best groups of
experts, in 2.2 from those that a token's whole block wants most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, scaled_dot_product_attention
from mlx_lm.models.switch_layers import SwitchGLU

from ..caches import AttentionPolicy
from . import llada, llada_moe


@dataclass
class ModelArgs(BaseModelArgs):
    """
    Args:
        expert_capacity: experts a block of tokens may choose from (2.2); 0: tokens choose groups of experts (2.0, 2.1).
        block_size: tokens of a block, of the attention and of ``expert_capacity``.
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rotary_dim: int | None = None
    partial_rotary_factor: float = 0.5
    rope_theta: float = 600000.0
    rms_norm_eps: float = 1e-6
    first_k_dense_replace: int = 1
    num_shared_experts: int = 1
    n_group: int = 8
    topk_group: int = 4
    expert_capacity: int = 0
    block_size: int = 32
    routed_scaling_factor: float = 2.5
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if self.rotary_dim is None:
            self.rotary_dim = int(self.head_dim * self.partial_rotary_factor)


# Routing


def group_routing(
    scores: mx.array, bias: mx.array, groups: int, kept: int, top_k: int, scale: float = 1.0, normalize: bool = True
) -> tuple[mx.array, mx.array]:
    """
    The experts of each token, from the groups whose two best experts score highest together.

    Args:
        scores: [..., E] float32, the sigmoids.
        bias: [E], added for the choice and not in the weights.
        groups: number of groups, of neighbours.
        kept: groups a token may choose from.
        top_k, scale, normalize: experts per token; a factor of the weights; whether they are shares of their sum.

    Returns:
        ids [..., top_k] by descending score and, of equals, ascending id; their weights [..., top_k].
    """
    ranked = scores + bias.astype(mx.float32)
    grouped = ranked.reshape(*ranked.shape[:-1], groups, -1)
    pairs = mx.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
    chosen = mx.where(_best(pairs, kept)[..., None], grouped, -mx.inf).reshape(ranked.shape)
    return _weighted(scores, _first(chosen, top_k), scale, normalize)


def block_routing(
    scores: mx.array,
    bias: mx.array,
    block: int,
    capacity: int,
    top_k: int,
    scale: float = 1.0,
    normalize: bool = True,
    first: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """
    The experts of each token, from those experts whose best score in the token's block is highest.

    Args:
        scores: [B, L, E] float32, the sigmoids; a last block may be incomplete.
        bias, top_k, scale, normalize: see :func:`group_routing`.
        block: tokens of a block.
        capacity: experts that a block may choose from.
        first: [B] the place of a row's first token in its block; None: 0.

    Returns:
        As :func:`group_routing`.
    """
    ranked = scores + bias.astype(mx.float32)
    rows, length, experts = ranked.shape
    shape = (rows, -1, block, experts)
    if first is None:
        tail = [(0, 0), (0, -length % block), (0, 0)]
        blocks = mx.pad(ranked, tail, constant_values=-mx.inf).reshape(shape)
        pool = _best(blocks.max(axis=2), capacity)
        pool = mx.repeat(pool, block, axis=1)[:, :length] if length > block else pool
    else:
        # One block more than needed, so that their number does not depend on where rows stand; what a row lacks of its
        # first and last one is filled with the token next to it, which the block has anyhow.
        column = mx.arange((-(-length // block) + 1) * block)[None] - first[:, None]
        blocks = mx.take_along_axis(ranked, mx.clip(column, 0, length - 1)[..., None], axis=1).reshape(shape)
        number = (first[:, None] + mx.arange(length)[None]) // block
        pool = mx.take_along_axis(_best(blocks.max(axis=2), capacity), number[..., None], axis=1)
    return _weighted(scores, _first(mx.where(pool, ranked, -mx.inf), top_k), scale, normalize)


def _keys(values: mx.array) -> mx.array:
    """Integers in the order of float32 values [..., N]; of equal values the one that stands first is the larger.
    Sorting has no order of equals that holds everywhere."""
    bits = mx.view(values, mx.int32)
    ordered = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    count = values.shape[-1]
    return ordered * count + mx.arange(count - 1, -1, -1)


def _best(values: mx.array, count: int) -> mx.array:
    """Which are the ``count`` largest [..., N]."""
    keys = _keys(values)
    return keys >= mx.sort(keys, axis=-1)[..., -count, None]


def _first(values: mx.array, count: int) -> mx.array:
    """Where the ``count`` largest are [..., count], in descending order."""
    last = values.shape[-1]
    keys = mx.sort(-_keys(values), axis=-1)[..., :count]
    return (last - 1 - -keys % last).astype(mx.int32)


def _weighted(scores: mx.array, ids: mx.array, scale: float, normalize: bool) -> tuple[mx.array, mx.array]:
    ids = mx.stop_gradient(ids)
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, weights * scale


class Gate(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.weight = mx.zeros((args.num_experts, args.hidden_size))
        self.expert_bias = mx.zeros((args.num_experts,))

    def __call__(self, x: mx.array, first: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """States [B, L, D] -> ids and weights [B, L, K] of the experts; the weights are float32."""
        args, top_k = self.args, self.args.num_experts_per_tok
        scores = mx.sigmoid(x.astype(mx.float32) @ self.weight.astype(mx.float32).T)
        scale, normalize = args.routed_scaling_factor, top_k > 1
        if args.expert_capacity:
            return block_routing(
                scores, self.expert_bias, args.block_size, args.expert_capacity, top_k, scale, normalize, first
            )
        return group_routing(scores, self.expert_bias, args.n_group, args.topk_group, top_k, scale, normalize)


# Layers


class Attention(nn.Module):
    def __init__(self, args: Any):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = args.num_attention_heads, args.num_key_value_heads, args.head_dim
        self.scale = self.head_dim**-0.5
        heads = self.n_heads + 2 * self.n_kv_heads
        self.query_key_value = nn.Linear(args.hidden_size, heads * self.head_dim, bias=False)
        self.query_layernorm = nn.RMSNorm(self.head_dim, eps=args.rms_norm_eps)
        self.key_layernorm = nn.RMSNorm(self.head_dim, eps=args.rms_norm_eps)
        self.dense = nn.Linear(self.n_heads * self.head_dim, args.hidden_size, bias=False)
        self.rope = nn.RoPE(args.rotary_dim, traditional=False, base=args.rope_theta)

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """x [B, L, D] -> [B, L, D]."""
        B, L, _ = x.shape
        heads = self.query_key_value(x).reshape(B, L, -1, self.head_dim)
        queries, keys, values = mx.split(heads, [self.n_heads, self.n_heads + self.n_kv_heads], axis=2)
        queries = self.query_layernorm(queries).transpose(0, 2, 1, 3)
        keys = self.key_layernorm(keys).transpose(0, 2, 1, 3)
        values = values.transpose(0, 2, 1, 3)
        offset = 0 if cache is None else cache.offset
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        out = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        return self.dense(out.transpose(0, 2, 1, 3).reshape(B, L, -1))


class SparseMoeBlock(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.gate = Gate(args)
        self.switch_mlp = SwitchGLU(args.hidden_size, args.moe_intermediate_size, args.num_experts)
        if args.num_shared_experts:
            self.shared_experts = llada.MLP(args.hidden_size, args.moe_intermediate_size * args.num_shared_experts)

    def __call__(self, x: mx.array, first: mx.array | None = None) -> mx.array:
        """x [B, L, D] -> [B, L, D]."""
        ids, weights = self.gate(x, first)
        chosen = self.switch_mlp(x, ids).astype(mx.float32) * weights[..., None]
        out = chosen.sum(axis=-2).astype(x.dtype)
        return out + self.shared_experts(x) if "shared_experts" in self else out


class DecoderLayer(nn.Module):
    def __init__(self, args: ModelArgs, number: int):
        super().__init__()
        self.attention = Attention(args)
        self.sparse = number >= args.first_k_dense_replace
        self.mlp: Any = SparseMoeBlock(args) if self.sparse else llada.MLP(args.hidden_size, args.intermediate_size)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any = None, first: mx.array | None = None
    ) -> mx.array:
        h = x + self.attention(self.input_layernorm(x), mask, cache)
        x = self.post_attention_layernorm(h)
        return h + (self.mlp(x, first) if self.sparse else self.mlp(x))


class LLaDA2MoeModel(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.word_embeddings = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, number) for number in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        """Ids [B, T] -> last hidden states [B, T, D]; without a cache every position sees all up to its block's end."""
        h = self.word_embeddings(inputs) if input_embeddings is None else input_embeddings
        cache = cache or [None] * len(self.layers)
        mask, first = self.attention_mask(h.shape[1], cache[0]), self.place(cache[0])
        for layer, c in zip(self.layers, cache, strict=True):
            h = layer(h, mask, c, first)
        return self.norm(h)

    def attention_mask(self, length: int, cache: Any) -> mx.array | None:
        """What a forward of ``length`` columns sees of what is stored and of itself."""
        if isinstance(cache, AttentionPolicy):
            return cache.make_mask(length)
        offset, block = 0 if cache is None else cache.offset, self.args.block_size
        if not isinstance(offset, int):
            raise ValueError("LLaDA2 with a cache of several rows is decoded by mlx_dllm_plugin.decode only")
        if offset % block + length <= block:
            return None
        key = mx.arange(offset + length) // block
        return key[None] <= key[offset:, None]

    def place(self, cache: Any) -> mx.array | None:
        """The places of the rows' first columns in their routing blocks [B]; None: all at the beginning of one."""
        offset, block = 0 if cache is None else cache.offset, self.args.block_size
        if not self.args.expert_capacity:
            return None
        if isinstance(offset, mx.array):
            return offset % block
        if offset % block:
            raise ValueError(
                f"LLaDA2.2 chooses experts by whole blocks of {block} tokens: give it the tokens in multiples of "
                f"{block}, not after {offset}"
            )
        return None


class Model(llada_moe.Model):
    def __init__(self, args: ModelArgs):
        nn.Module.__init__(self)
        self.args = args
        self.model_type = args.model_type
        self.model = LLaDA2MoeModel(args)  # type: ignore[assignment]
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def head(self, states: mx.array) -> mx.array:
        """Last hidden states [B, N, D] -> logits [B, N, V]."""
        return self.model.word_embeddings.as_linear(states) if self.args.tie_word_embeddings else self.lm_head(states)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Weights with the experts stacked [E, out, in], unless they are already, with the router in float32 also where
        it was quantized, and without a copy of a tied head."""
        plain = super().sanitize(weights)
        for i in range(self.args.num_hidden_layers):
            mlp = f"model.layers.{i}.mlp"
            for kind in ("weight", "scales", "biases"):  # mlx-lm's name of a router of this kind
                if f"{mlp}.gate.gate_proj.{kind}" in plain:
                    plain[f"{mlp}.gate.{kind}"] = plain.pop(f"{mlp}.gate.gate_proj.{kind}")
            if f"{mlp}.gate.scales" in plain:
                weight, scales, biases = (plain.pop(f"{mlp}.gate.{kind}") for kind in ("weight", "scales", "biases"))
                plain[f"{mlp}.gate.weight"] = _dequantized(weight, scales, biases, self.args.hidden_size)
            for name in (f"{mlp}.gate.weight", f"{mlp}.gate.expert_bias"):
                if name in plain:
                    plain[name] = plain[name].astype(mx.float32)
        return plain


def _dequantized(weight: mx.array, scales: mx.array, biases: mx.array, width: int) -> mx.array:
    """A quantized matrix [E, width], whose shapes say with how many bits and in groups of which size."""
    bits, group = weight.shape[-1] * 32 // width, width // scales.shape[-1]
    return mx.dequantize(weight, scales, biases, group_size=group, bits=bits)
