"""SDAR with experts: Qwen3-MoE, decoded as SDAR."""

from __future__ import annotations

from . import common, sdar

FAMILY = sdar.family(
    "sdar_moe",
    architecture=lambda config: "mlx_lm.models.qwen3_moe",
    prepare_config=common.prepare_qwen3_moe,
    sanitize=common.plain_experts,
    float32_on_cpu=True,
    about="JetLM/SDAR-30B-A3B-{Chat,Sci}",
    verified="transformers' model of its shape; its decoding as sdar",
)
