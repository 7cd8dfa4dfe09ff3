"""See the package."""

from . import refusal

PATCH = refusal("gptq", "gptq_quantize")
