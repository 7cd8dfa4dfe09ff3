"""Diffusion language models for mlx-lm and mlx-vlm. Importing this package activates the plugin.

`MLX_DLLM_PLUGIN=0` keeps it off; `activate()` overrides that. Neither mlx nor a host is imported here.
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ._version import __version__

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "patches")):
    __path__.append(os.path.dirname(os.path.dirname(__file__)))  # a checkout: patches/ and compat/ stand at its top

# The copy beside the start-up line if that ran: a second import under the other name would be a second state. What is
# left of another version, such as an empty directory, is imported without an error and has nothing in it.
_started: Any = sys.modules.get("_mlx_dllm_boot")
_active_boot = _started if hasattr(_started, "enabled") else import_module("._boot", __name__)

from .compat import UpstreamDriftWarning  # noqa: E402
from .patches import activate, deactivate, is_active  # noqa: E402

if TYPE_CHECKING:
    from .decode import DecodingResult, bidirectional_forward, decode, infill, stream_decode
    from .demo import demo_path
    from .diffusion import denoise, generate
    from .errors import DiffusionError
    from .likelihood import score
    from .options import DecodingOptions
    from .runtime import A2DConfig, load
    from .spec import DiffusionSpec

__all__ = [
    "A2DConfig",
    "DecodingOptions",
    "DecodingResult",
    "DiffusionError",
    "DiffusionSpec",
    "UpstreamDriftWarning",
    "__version__",
    "activate",
    "bidirectional_forward",
    "deactivate",
    "decode",
    "demo_path",
    "denoise",
    "generate",
    "infill",
    "is_active",
    "load",
    "score",
    "stream_decode",
]

_LAZY = {
    "A2DConfig": "runtime",
    "DecodingOptions": "options",
    "DecodingResult": "decode",
    "DiffusionError": "errors",
    "DiffusionSpec": "spec",
    "bidirectional_forward": "decode",
    "decode": "decode",
    "infill": "decode",
    "demo_path": "demo",
    "denoise": "diffusion",
    "generate": "diffusion",
    "load": "runtime",
    "score": "likelihood",
    "stream_decode": "decode",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds the submodule `decode` here; the name belongs to the function.
        if name in _LAZY and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

if _active_boot.enabled():
    activate()
