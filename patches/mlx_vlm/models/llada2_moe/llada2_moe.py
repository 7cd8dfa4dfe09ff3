from . import leaning

PATCH = leaning("llada2_moe")
