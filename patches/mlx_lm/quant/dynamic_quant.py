"""See the package."""

from . import refusal

PATCH = refusal("dynamic_quant", "eval_ppl", "estimate_sensitivities")
