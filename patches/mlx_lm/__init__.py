"""What is done with mlx_lm: one file per upstream module that is changed, at the same path, and a line per module that
is built upon as it is."""

from ...compat import Lean

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

_MODEL = "the models of this plugin cannot be made"
_STOCK = "diffusion checkpoints with this model cannot be decoded"
_MASK = Lean("create_attention_mask", ("h", "cache"), called=True)

# Module -> what is lost without it, and what is leaned on; of a model all of its file, since what its layers do with a
# mask and a cache decides what is decoded.
LEANS = {
    "cli": ("python -m mlx_dllm_plugin runs none of mlx-lm's commands", ("main",)),
    "tokenizer_utils": (
        "text cannot be shown token by token",
        ("TokenizerWrapper", "StreamingDetokenizer", "BPEStreamingDetokenizer", "SPMStreamingDetokenizer", "load"),
    ),
    "models.base": (
        _MODEL,
        (
            _MASK,
            Lean("scaled_dot_product_attention", ("queries", "keys", "values", "cache", "scale", "mask"), called=True),
            "BaseModelArgs",
        ),
    ),
    "models.activations": (_MODEL, (Lean("swiglu", ("gate", "x"), called=True),)),
    "models.switch_layers": (_MODEL, (Lean("SwitchGLU", called=True), "SwitchLinear", "QuantizedSwitchLinear")),
    "models.rope_utils": (_STOCK, ("*",)),
    "models.pipeline": (_STOCK, ("PipelineMixin",)),
    **{
        f"models.{name}": (_STOCK, ("Model", "*"))
        for name in ("gemma", "gemma2", "gemma3_text", "gpt2", "llama", "qwen2", "qwen3", "qwen3_moe")
    },
}
