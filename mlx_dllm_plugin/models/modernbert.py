"""ModernBERT with its masked-language-model head. Every position sees every position in global layers, and those at
most half of ``local_attention`` away in local ones. Weights have Hugging Face's names."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask, scaled_dot_product_attention

GLOBAL, LOCAL = "full_attention", "sliding_attention"


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    decoder_bias: bool = True
    tie_word_embeddings: bool = True
    local_attention: int = 128
    global_attn_every_n_layers: int = 3
    layer_types: list[str] | None = None
    global_rope_theta: float = 160000.0
    local_rope_theta: float | None = 10000.0
    rope_parameters: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """transformers 5 writes ``layer_types`` and ``rope_parameters`` for what 4 has in keys of its own."""
        every = self.global_attn_every_n_layers
        self.layer_types = self.layer_types or [LOCAL if i % every else GLOBAL for i in range(self.num_hidden_layers)]
        rope = self.rope_parameters or {}
        self.global_rope_theta = (rope.get(GLOBAL) or {}).get("rope_theta", self.global_rope_theta)
        self.local_rope_theta = (rope.get(LOCAL) or {}).get("rope_theta", self.local_rope_theta)
        if self.local_rope_theta is None:
            self.local_rope_theta = self.global_rope_theta


def window(half: int, start: int, length: int, width: int, mask: mx.array | None) -> mx.array | None:
    """
    The mask of a local layer.

    Args:
        half: farthest distance seen.
        start: column of the first query.
        length: number of queries; their columns are consecutive.
        width: number of keys; their columns count from 0.
        mask: what is visible at all, True where it is, [B, 1, 1 or length, width]; None is everything.

    Returns:
        mx.array | None: [length, width], or [B, 1, length, width] with a mask; None if all is seen.
    """
    if max(start + length, width - start) - 1 <= half:
        return mask
    distance = mx.abs(mx.arange(start, start + length)[:, None] - mx.arange(width)[None])
    near = distance <= half
    # A padded position sees at least itself: a row of scores without any visible key is NaN.
    return near if mask is None else near & (mask | (distance == 0))


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, theta: float):
        super().__init__()
        self.n_heads = args.num_attention_heads
        head_dim = args.hidden_size // self.n_heads
        self.scale = head_dim**-0.5
        self.Wqkv = nn.Linear(args.hidden_size, 3 * args.hidden_size, bias=args.attention_bias)
        self.Wo = nn.Linear(args.hidden_size, args.hidden_size, bias=args.attention_bias)
        self.rope = nn.RoPE(head_dim, traditional=False, base=theta)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x [B, L, D] -> [B, L, D]. A mask that depends on the number of keys is a function of it."""
        B, L, D = x.shape
        queries, keys, values = self.Wqkv(x).reshape(B, L, 3, self.n_heads, -1).transpose(2, 0, 3, 1, 4)
        if cache is not None:
            queries = self.rope(queries, offset=cache.offset)
            keys = self.rope(keys, offset=cache.offset)
            keys, values = cache.update_and_fetch(keys, values)
        else:
            queries, keys = self.rope(queries), self.rope(keys)
        if callable(mask):
            mask = mask(keys.shape[2])
        out = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        return self.Wo(out.transpose(0, 2, 1, 3).reshape(B, L, D))


class MLP(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.Wi = nn.Linear(args.hidden_size, 2 * args.intermediate_size, bias=args.mlp_bias)
        self.Wo = nn.Linear(args.intermediate_size, args.hidden_size, bias=args.mlp_bias)

    def __call__(self, x: mx.array) -> mx.array:
        activated, factor = mx.split(self.Wi(x), 2, axis=-1)
        return self.Wo(nn.gelu(activated) * factor)


class EncoderLayer(nn.Module):
    def __init__(self, args: ModelArgs, index: int):
        super().__init__()
        self.is_local = (args.layer_types or [])[index] == LOCAL
        theta = args.local_rope_theta if self.is_local else args.global_rope_theta
        self.has_attn_norm = index > 0  # the embedding's norm is the first layer's
        if self.has_attn_norm:
            self.attn_norm = _norm(args)
        self.attn = Attention(args, theta or args.global_rope_theta)
        self.mlp_norm = _norm(args)
        self.mlp = MLP(args)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + self.attn(self.attn_norm(x) if self.has_attn_norm else x, mask, cache)
        return h + self.mlp(self.mlp_norm(h))


class Embeddings(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.hidden_size)
        self.norm = _norm(args)


class ModernBertModel(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.half = args.local_attention // 2
        self.embeddings = Embeddings(args)
        self.layers = [EncoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.final_norm = _norm(args)

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        """Ids [B, T] -> last hidden states [B, T, D]."""
        h = self.embeddings.tok_embeddings(inputs) if input_embeddings is None else input_embeddings
        h = self.embeddings.norm(h)
        cache = cache or [None] * len(self.layers)
        first, length = cache[0], h.shape[1]
        mask = create_attention_mask(h, first, return_array=True) if first is not None else None
        start = first_column(first)

        @functools.cache
        def local(width: int) -> mx.array | None:
            return window(self.half, start, length, width, mask)

        for layer, c in zip(self.layers, cache, strict=True):
            h = layer(h, local if layer.is_local else mask, c)
        return self.final_norm(h)


def first_column(cache: Any) -> int:
    """The column of the first query: the cache's ``start`` if it has one, else its offset. An offset per row counts a
    left-padded row's positions instead, and then the first query is the canvas's first column."""
    start = getattr(cache, "start", None)
    if start is None:
        start = getattr(cache, "offset", 0)
    return start if isinstance(start, int) else 0


class PredictionHead(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.dense = nn.Linear(args.hidden_size, args.hidden_size, bias=args.classifier_bias)
        self.norm = _norm(args)

    def __call__(self, states: mx.array) -> mx.array:
        return self.norm(nn.gelu(self.dense(states)))


class TiedDecoder(nn.Module):
    """The embedding as a linear layer, with a bias of its own."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        if args.decoder_bias:
            self.bias = mx.zeros(args.vocab_size)

    def __call__(self, states: mx.array, embedding: nn.Embedding) -> mx.array:
        logits = embedding.as_linear(states)
        return logits + self.bias if "bias" in self else logits


class Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = ModernBertModel(args)
        self.head = PredictionHead(args)
        if args.tie_word_embeddings:
            self.decoder: Any = TiedDecoder(args)
        else:
            self.decoder = nn.Linear(args.hidden_size, args.vocab_size, bias=args.decoder_bias)

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        """Ids [B, T] -> logits [B, T, V] of the tokens at the same positions."""
        return self.logits(self.model(inputs, cache, input_embeddings))

    def logits(self, states: mx.array) -> mx.array:
        """Last hidden states [B, N, D] -> logits [B, N, V]."""
        states = self.head(states)
        if self.args.tie_word_embeddings:
            return self.decoder(states, self.model.embeddings.tok_embeddings)
        return self.decoder(states)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Weights without a stored copy of the tied embedding."""
        copies = {f"decoder.{kind}" for kind in ("weight", "scales", "biases")} if self.args.tie_word_embeddings else ()
        return {name: value for name, value in weights.items() if name not in copies}

    @property
    def layers(self) -> list[Any]:
        return self.model.layers


def _norm(args: ModelArgs) -> nn.LayerNorm:
    return nn.LayerNorm(args.hidden_size, eps=args.norm_eps, bias=args.norm_bias)
