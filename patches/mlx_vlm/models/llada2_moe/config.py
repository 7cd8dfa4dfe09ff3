from . import leaning

PATCH = leaning("config")
