"""See the package."""

from . import refusal

PATCH = refusal("dwq", "dwq_quantize")
