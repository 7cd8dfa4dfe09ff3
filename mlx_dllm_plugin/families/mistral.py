"""a2d conversions of Mistral, which mlx-lm runs as Llama. The sliding window is open in decode."""

from . import a2d
from .llama import prepare_config

FAMILY = a2d.family("mistral", prepare_config=prepare_config, hidden=a2d.decoder, head=a2d.either_head)
