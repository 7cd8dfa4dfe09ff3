"""What is changed in mlx_lm: one file per upstream module, at the same path."""

MODULES = (
    "utils",
    "sample_utils",
    "generate",
    "chat",
    "server",
    "cache_prompt",
    "benchmark",
    "perplexity",
    "evaluate",
    "convert",
    "lora",
    "tuner.trainer",
    "quant.awq",
    "quant.dwq",
    "quant.dynamic_quant",
    "quant.gptq",
)
