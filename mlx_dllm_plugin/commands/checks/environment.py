"""Python, the platform, MLX and the versions of what the plugin works with."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.version import InvalidVersion, Version

from ... import __version__
from . import Check, describe, problem, size, warning

PLUGIN = "mlx-dllm-plugin"
PACKAGE = Path(__file__).parents[2]
_OLDEST_PYTHON = (3, 11)


def python() -> Iterator[Check]:
    where = sys.executable if Path(sys.prefix) in Path(sys.executable).parents else f"{sys.executable} ({sys.prefix})"
    found = f"{platform.python_version()}, {where}"
    if sys.version_info < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        yield problem("Python", f"{found}: {PLUGIN} needs {oldest} or newer", f"python{oldest} -m venv .venv")
    else:
        yield Check("Python", found)


def system() -> Iterator[Check]:
    is_mac = sys.platform == "darwin"
    release = platform.mac_ver()[0] if is_mac else platform.release().partition("-")[0]
    found = f"{'macOS' if is_mac else platform.system()} {release}, {platform.machine()}"
    if is_mac and platform.machine() == "x86_64":
        yield problem("platform", f"{found}: MLX needs a Python for arm64", "install one and make the environment anew")
    else:
        yield Check("platform", found)


def mlx_fault() -> str:
    """Why MLX cannot be imported, or ""."""
    try:
        importlib.import_module("mlx.core")
    except Exception as error:
        return describe(error)
    return ""


def mlx() -> Iterator[Check]:
    if fault := mlx_fault():
        build = '"mlx[cpu]"' if sys.platform == "linux" else "mlx"
        yield problem("MLX", f"cannot be imported ({fault})", f"pip install --force-reinstall {build}")
        return
    core = importlib.import_module("mlx.core")
    memory, whose = memory_of(core)
    yield Check("MLX", f"{core.__version__}, {_backend(core)}, {size(memory)} {whose}")
    builds = sorted({_name(one) for one in importlib.metadata.distributions() if re.match("mlx-c(pu|uda)", _name(one))})
    if len(builds) > 1:
        yield warning(
            "MLX builds",
            f"{', '.join(builds)} bring the same library files",
            f"pip uninstall -y {builds[0]} && pip install --force-reinstall --no-deps {builds[1]}",
        )


def _backend(core: Any) -> str:
    cpu = core.default_device() == core.Device(core.cpu)
    cuda = getattr(core, "cuda", None)
    kind = "CPU" if cpu else "CUDA" if cuda is not None and cuda.is_available() else "Metal"
    return f"{kind} ({name})" if (name := _device_info(core).get("device_name")) else kind


def _device_info(core: Any) -> dict[str, Any]:
    if hasattr(core, "device_info"):
        return core.device_info()
    return core.metal.device_info() if core.metal.is_available() else {}  # MLX before 0.30


def memory_of(core: Any) -> tuple[int, str]:
    """How many bytes MLX can use well, and what that number is."""
    info = _device_info(core)
    if "max_recommended_working_set_size" in info:
        return int(info["max_recommended_working_set_size"]), "recommended for Metal"
    if "total_memory" in info:
        return int(info["total_memory"]), "on the device"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "of memory"


def reinstall() -> str:
    """How to install this very package again: from its checkout if it is one."""
    checkout = PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(str(checkout))}"
    return f"pip install --force-reinstall --no-deps {PLUGIN}"


def plugin() -> Iterator[Check]:
    found = f"{__version__}, {PACKAGE}"
    copies = [one for one in importlib.metadata.distributions() if _name(one) == PLUGIN]
    places = [str(one.locate_file("")) for one in copies]
    if not copies:
        yield warning(PLUGIN, f"{found}, which is not installed", reinstall())
    elif len(copies) > 1:
        listed = ", ".join(f"{one.version} in {place}" for one, place in zip(copies, places, strict=True))
        yield problem(
            PLUGIN,
            f"{found}, but {len(copies)} are installed: {listed}",
            f"pip uninstall {PLUGIN} until none is left, delete what is left of them, and install it again",
        )
    elif not any(place.exists() and place.samefile(PACKAGE) for place in _packages(copies[0])):
        yield warning(
            PLUGIN,
            f"{found}, but the installed one is {copies[0].version} in {places[0]}",
            "leave that directory, or take it off PYTHONPATH",
        )
    elif copies[0].version != __version__:
        yield warning(PLUGIN, f"{found}, but it was installed as {copies[0].version}", reinstall())
    else:
        yield Check(PLUGIN, found)


def _packages(distribution: importlib.metadata.Distribution) -> list[Path]:
    """Where the package of a distribution may be: beside its metadata, or in the checkout it was installed from."""
    places = [Path(str(distribution.locate_file("")))] + ([source] if (source := _source(distribution)) else [])
    return [place / PACKAGE.name for place in places]


def _source(distribution: importlib.metadata.Distribution) -> Path | None:
    """The checkout of an editable install."""
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    editable = direct.get("dir_info", {}).get("editable")
    return Path(unquote(urlparse(direct["url"]).path)) if editable else None


def _name(distribution: importlib.metadata.Distribution) -> str:
    return re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()


def host(name: str) -> Iterator[Check]:
    """mlx-lm or mlx-vlm, which is installed or not, and known or not."""
    from ...compat import TESTED, describe_host

    distribution = name.replace("_", "-")
    first, last = TESTED[distribution]
    if not installed(name):
        if name == "mlx_lm":
            yield problem(distribution, "not installed", f"pip install '{distribution}>={first}'")
        else:
            yield Check(distribution, "not installed")
        return
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if mlx_fault():
            yield warning(distribution, "not looked at, as MLX cannot be imported", "see MLX above")
            return
        again = f"pip install --force-reinstall '{distribution}>={first},<={last}'"
        yield problem(distribution, f"cannot be imported ({describe(error)})", again)
        return
    found = describe_host(name).removeprefix(distribution).strip()
    try:
        version = Version(found)
    except InvalidVersion:
        text = f"{found or 'no version'}, which cannot be compared with {first} to {last}"
        yield warning(distribution, text, f"check results, or pip install '{distribution}<={last}'")
        return
    if version < Version(first):
        advice = f"pip install '{distribution}>={first},<={last}'"
        yield problem(distribution, f"{found} is older than what is tested ({first} to {last})", advice)
    elif version > Version(last):
        advice = f"check results, or pip install '{distribution}<={last}'"
        yield warning(distribution, f"{found} is newer than what is tested ({first} to {last})", advice)
    else:
        yield Check(distribution, f"{found}, tested with {first} to {last}")


def installed(name: str) -> bool:
    """Whether a package can be found, without importing it."""
    return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None


def transformers() -> Iterator[Check]:
    try:
        yield Check("transformers", importlib.import_module("transformers").__version__)
    except (Exception, SystemExit) as error:
        yield problem(
            "transformers", f"cannot be imported ({describe(error)})", "pip install --force-reinstall transformers"
        )


CHECKS = {
    "Python": python,
    "platform": system,
    "MLX": mlx,
    PLUGIN: plugin,
    "mlx-lm": lambda: host("mlx_lm"),
    "mlx-vlm": lambda: host("mlx_vlm"),
    "transformers": transformers,
}
