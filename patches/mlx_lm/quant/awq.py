"""See the package."""

from . import refusal

PATCH = refusal("awq", "awq_quantize")
