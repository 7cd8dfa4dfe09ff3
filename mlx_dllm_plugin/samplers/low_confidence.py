"""LLaDA's rules: keep the most confident positions (the others stay masked), or random ones."""

from __future__ import annotations

import mlx.core as mx

from . import Rule


def even_schedule(masks: int, steps: int) -> list[int]:
    """masks // steps per step, one more in the first masks % steps (LLaDA's get_num_transfer_tokens)."""
    return [masks // steps + (step < masks % steps) for step in range(steps)]


def token_probability(logits: mx.array, tokens: mx.array, temperature: mx.array, noise: mx.array) -> mx.array:
    """softmax(logits / temperature) of the given tokens: [B, W]."""
    scaled = logits / mx.maximum(temperature, 1e-6)[..., None]
    chosen = mx.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    return mx.exp(chosen - mx.logsumexp(scaled, axis=-1))


def random_order(logits: mx.array, tokens: mx.array, temperature: mx.array, noise: mx.array) -> mx.array:
    """Uniform numbers, whatever the model says: [B, W]."""
    return noise


LOW_CONFIDENCE = Rule(
    name="low_confidence",
    about="LLaDA: the most confident positions, an even number per step, optionally block by block",
    schedule=even_schedule,
    confidence=token_probability,
    uses=frozenset({"max_denoising_steps", "block_length"}),
)
RANDOM = Rule(
    name="random",
    about="LLaDA: random positions, an even number per step, optionally block by block",
    schedule=even_schedule,
    confidence=random_order,
    uses=frozenset({"max_denoising_steps", "block_length"}),
    draws=True,
)
