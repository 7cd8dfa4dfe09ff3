"""A family of Llama checkpoints that say ``"stranger": true``, and a rule that writes from left to right."""

from dataclasses import replace

import mlx.core as mx

from mlx_dllm_plugin.families.a2d import family
from mlx_dllm_plugin.samplers import Rule
from mlx_dllm_plugin.samplers.low_confidence import even_schedule

FAMILY = replace(
    family(
        "llama",
        hidden=lambda model, ids, cache: model.model(ids, cache),
        head=lambda model, states: model.lm_head(states),
    ),
    name="stranger",
    claims=lambda checkpoint: bool(checkpoint.config.get("stranger")),
    unmasking="left_to_right",
)
LEFT_TO_RIGHT = Rule(
    name="left_to_right",
    about="as an autoregressive model writes",
    schedule=even_schedule,
    confidence=lambda found: mx.zeros(found.tokens.shape) - mx.arange(found.tokens.shape[1]),
    uses=frozenset({"max_denoising_steps"}),
)
