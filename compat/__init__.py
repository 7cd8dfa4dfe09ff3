"""Which upstream code the patches were written for, and one warning when the installed code is another.

`known.json` holds the sha256 of every patched upstream file per release
(`python -m mlx_dllm_plugin.compat WHEEL...` records them). Nothing is ever written beside the installed files.
"""

import functools
import hashlib
import json
import os
import sys
import warnings
from types import ModuleType
from typing import Any

# First and last release the patches are tested with; pyproject.toml says the same.
TESTED = {"mlx-lm": ("0.31.3", "0.32.2"), "mlx-vlm": ("0.7.1", "0.7.10")}

_warned = False


class UpstreamDriftWarning(UserWarning):
    """A patched upstream file is not one the patches were written for. They apply as far as signatures fit."""


@functools.cache
def known() -> dict[str, dict[str, str]]:
    """Upstream module -> release -> sha256 of its file."""
    return json.loads(_read(sys.modules[__name__], os.path.join(os.path.dirname(__file__), "known.json")))


def check(module: ModuleType) -> None:
    """Warn, once per process, if the file of a patched module is in no known release."""
    global _warned
    if _warned or module.__name__ not in known() or _is_known(module.__name__, module, module.__file__):
        return
    _warned = True
    host = module.__name__.partition(".")[0]
    folder = (module.__file__ or "").removesuffix(_relative(module.__name__))
    files = [_relative(name) for name in known() if name.partition(".")[0] == host]
    there = [file for file in files if _exists(module, folder + file)]  # not every release has every file
    unknown = [file for file in there if not _is_known(_name(file), module, folder + file)]
    first, last = TESTED[host.replace("_", "-")]
    warnings.warn(
        f"{describe_host(host)} is not a release mlx-dllm-plugin was written for ({first} to {last}): "
        f"{', '.join(unknown)} changed. The patches apply where signatures fit; check results, or install one of them.",
        UpstreamDriftWarning,
        stacklevel=2,
    )


def describe_host(target: str) -> str:
    """Distribution and version a module belongs to, as in "mlx-lm 0.32.2"."""
    host = target.partition(".")[0]
    distribution = host.replace("_", "-")
    version = getattr(sys.modules.get(host), "__version__", None)
    if version is None:  # mlx_vlm sets it last
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            version = installed(distribution)
        except PackageNotFoundError:
            return distribution
    return f"{distribution} {version}"


def _relative(name: str) -> str:
    return os.path.join(*name.split(".")) + ".py"


def _name(file: str) -> str:
    return file.removesuffix(".py").replace(os.sep, ".")


def _is_known(name: str, near: ModuleType, file: str | None) -> bool:
    try:
        return hashlib.sha256(_read(near, file)).hexdigest() in known()[name].values()
    except (OSError, TypeError):  # no such file, or no file at all
        return False


def _exists(near: ModuleType, file: str) -> bool:
    try:
        return _read(near, file) is not None
    except OSError:
        return False


def _read(module: ModuleType, file: str | None) -> bytes:
    """Through the module's loader, which also reads from a zip file."""
    loader: Any = module.__loader__
    return loader.get_data(file)
