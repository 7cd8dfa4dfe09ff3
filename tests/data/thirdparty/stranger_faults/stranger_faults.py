"""Objects that are not what their entry points promise."""

from dataclasses import replace

from mlx_dllm_plugin.families.a2d import family
from mlx_dllm_plugin.samplers.a2d import A2D as OURS

DICTIONARY = {"name": "dictionary"}
MISNAMED = family("another_name", hidden=lambda *_: None, head=lambda *_: None)
GPT2 = family("gpt2", hidden=lambda *_: None, head=lambda *_: None)
A2D = replace(OURS, about="not ours")
