from . import leaning

PATCH = leaning("language")
