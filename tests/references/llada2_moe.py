"""LLaDA2.0, 2.1 and 2.2 in PyTorch, in the shape of a modeling file and with the released names of weights, so that it
is loaded as one. Written from descriptions of the architecture; no code of its authors is in it.

2.2 says ``expert_capacity`` and chooses experts by block; 2.0 and 2.1 choose them by group.
"""

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Turns the first part of each head, its two halves against each other."""

    def __init__(self, config):
        super().__init__()
        self.size = int(config.head_dim * config.partial_rotary_factor)
        inverse = 1.0 / config.rope_theta ** (torch.arange(0, self.size, 2).float() / self.size)
        self.register_buffer("inv_freq", inverse, persistent=False)

    def forward(self, x, position_ids):
        """x [B, H, T, D], position_ids [B, T]"""
        angles = position_ids[:, None, :, None].float() * self.inv_freq.float()
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        half = self.size // 2
        first, second, rest = x[..., :half], x[..., half : self.size], x[..., self.size :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.size
        self.query_key_value = nn.Linear(config.hidden_size, width, bias=False)
        self.query_layernorm = RMSNorm(self.size, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.size, config.rms_norm_eps)
        self.dense = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)
        self.rotary = Rotary(config)

    def forward(self, x, attention_mask, position_ids):
        rows, length, _ = x.shape
        heads = self.query_key_value(x).view(rows, length, -1, self.size).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q = self.rotary(self.query_layernorm(q), position_ids)
        k = self.rotary(self.key_layernorm(k), position_ids)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.size)
        if attention_mask is not None:
            scores = scores + attention_mask
        shares = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        return self.dense((shares @ v).transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, config, size):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """x [B, T, D] -> expert ids [B, T, K] by descending score, their weights [B, T, K], logits [B, T, E]"""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.expert_bias = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, x):
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.sigmoid()
        biased = scores + self.expert_bias.float()
        pooled = self.of_blocks(biased) if self.config.expert_capacity else self.of_groups(biased)
        biased = biased.masked_fill(~pooled, -torch.inf)
        # Ties go to the lower id, which topk does not promise.
        ids = biased.sort(dim=-1, descending=True, stable=True).indices[..., : self.config.num_experts_per_tok]
        weights = scores.gather(-1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor
        return ids, weights, logits

    def of_groups(self, biased):
        """The experts of the best groups, each judged by its two best experts."""
        groups = biased.unflatten(-1, (self.config.n_group, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.config.topk_group, dim=-1).indices
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        return kept[..., None].expand(groups.shape).flatten(-2)

    def of_blocks(self, biased):
        """The experts that any token of a block wants most, for all of its tokens; blocks count from position 0."""
        parts = []
        for block in biased.split(self.config.block_size, dim=1):
            wanted = block.amax(dim=1, keepdim=True).sort(dim=-1, descending=True, stable=True).indices
            pool = torch.zeros(wanted.shape, dtype=torch.bool)
            pool = pool.scatter(-1, wanted[..., : self.config.expert_capacity], True)
            parts.append(pool.expand(block.shape))
        return torch.cat(parts, dim=1)


class SparseMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList([MLP(config, size) for _ in range(config.num_experts)])
        self.shared_experts = MLP(config, size * config.num_shared_experts)

    def forward(self, x):
        ids, weights, _ = self.gate(x)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            *where, place = torch.nonzero(ids == number, as_tuple=True)
            if len(place):
                chosen = expert(x[tuple(where)]).float() * weights[(*where, place)][:, None]
                total = total.index_put(tuple(where), chosen, accumulate=True)
        return total.to(x.dtype) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        dense = number < config.first_k_dense_replace
        self.attention = Attention(config)
        self.mlp = MLP(config, config.intermediate_size) if dense else SparseMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, attention_mask, position_ids):
        x = x + self.attention(self.input_layernorm(x), attention_mask, position_ids)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, number) for number in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, attention_mask, position_ids):
        x = self.word_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask, position_ids)
        return self.norm(x)


class LLaDA2MoeModelLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        defaults = {"expert_capacity": 0, "block_size": 32, "num_shared_experts": 1, "first_k_dense_replace": 1}
        self.config = SimpleNamespace(**{**defaults, **vars(config)})
        self.model = Decoder(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        """
        Args:
            input_ids: [B, T].
            attention_mask: [B or 1, 1, T, T], added to the scores; None: every position sees every position.
            position_ids: [B, T]; None: from 0.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        states = self.model(input_ids, attention_mask, position_ids.expand(input_ids.shape))
        return SimpleNamespace(logits=self.lm_head(states).float())

    @torch.no_grad()
    def generate(
        self,
        inputs,
        *,
        gen_length,
        mask_id,
        eos_id,
        block_length=32,
        steps=32,
        threshold=0.95,
        minimal_topk=1,
        eos_early_stop=False,
    ):
        """
        LLaDA2.0's greedy decoding, block by block and without any cache.

        A step writes the tokens whose probability is above the threshold, or as many of the most probable as the
        schedule of the steps asks for.

        Returns:
            ids [1, n] of the answer, up to and with the first end of sequence.
        """
        prompt = inputs.shape[1]
        steps = min(steps, max(gen_length // minimal_topk, 1))
        schedule = [block_length // steps + (step < block_length % steps) for step in range(steps)]
        blocks = -(-(prompt + gen_length) // block_length)
        x = torch.full((1, blocks * block_length), mask_id)
        x[:, :prompt] = inputs
        number = torch.arange(x.shape[1]) // block_length
        mask = torch.zeros(len(number), len(number)).masked_fill(number[None] > number[:, None], -torch.inf)[None, None]
        for block in range(prompt // block_length, blocks):
            end = (block + 1) * block_length
            active = x[0, end - block_length : end]
            for least in schedule:
                masked = active == mask_id
                if not masked.any():
                    break
                logits = self(x[:, :end], mask[..., :end, :end]).logits[0, -block_length:]
                confidence, tokens = logits.softmax(-1).max(-1)
                confidence = confidence.masked_fill(~masked, -torch.inf)
                chosen = confidence > threshold
                if chosen.sum() < least:
                    best = confidence.topk(min(least, int(masked.sum()))).indices
                    chosen = torch.zeros_like(masked).scatter(0, best, True)
                active[chosen] = tokens[chosen]
                ends = (x[0, prompt:end] == eos_id).nonzero()[:, 0]
                if eos_early_stop and (tokens[chosen] == eos_id).any() and len(ends):
                    answer = x[:, prompt : prompt + int(ends[0]) + 1]
                    if not (answer == mask_id).any():
                        return answer
        answer = x[:, prompt : prompt + gen_length]
        ends = (answer[0] == eos_id).nonzero()[:, 0]
        return answer[:, : int(ends[0]) + 1] if len(ends) else answer
