"""dllm's conversions of Qwen2.5."""

from __future__ import annotations

from . import a2d_qwen3, common

FAMILY = a2d_qwen3.family(
    "qwen2",
    prepare_config=common.prepare_qwen2,
    about="dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-{mdlm,bd3lm}-v0.1",
    verified="transformers' model of its shape; its decoding as a2d_qwen3",
)
