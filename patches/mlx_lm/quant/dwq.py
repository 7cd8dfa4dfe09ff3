"""See the package."""

from . import refusal

PATCH = refusal("quant.dwq")
