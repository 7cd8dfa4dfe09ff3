"""dllm's conversions of Llama."""

from __future__ import annotations

from . import a2d_qwen3, common

FAMILY = a2d_qwen3.family(
    "llama",
    prepare_config=common.prepare_llama,
    about="dllm's a2d-llama conversions",
    verified="transformers' model of its shape; its decoding as a2d_qwen3",
)
