"""An evaluation of models that read images."""

from .. import commands

PATCH = commands.evaluation("ocrbench")
