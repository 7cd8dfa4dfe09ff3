"""Python, the platform, MLX and the versions of what the plugin works with."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
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

from ... import __version__
from . import Check, describe, problem, size, warning

PLUGIN = "mlx-dllm-plugin"
PACKAGE = Path(__file__).parents[2]
_OLDEST_PYTHON = (3, 11)
# What the hosts need, themselves last: one may need what stands before it.
_NEEDED = {
    "packaging": "packaging.version",
    "numpy": "numpy",
    "transformers": "transformers",
    "MLX": "mlx.core",
    "mlx-lm": "mlx_lm",
    "mlx-vlm": "mlx_vlm",
}


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


def fault_of(module: str) -> str:
    """Why a module cannot be imported, or ""."""
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        return describe(error)
    is_empty = getattr(getattr(found, "__spec__", None), "origin", "") is None
    return f"{next(iter(found.__path__), module)} is a directory without its code" if is_empty else ""


def cause(what: str) -> str:
    """The first of what something of `_NEEDED` needs that cannot be imported, or ""."""
    return first_fault(*itertools.takewhile(lambda name: name != what, _NEEDED))


def first_fault(*names: str) -> str:
    """The first of these that cannot be imported, or ""."""
    return next((name for name in names if fault_of(_NEEDED[name])), "")


def left_out(name: str, why: str) -> Check:
    """The line of what was not looked at because of a fault that is told already."""
    return warning(name, f"not looked at, as {why} cannot be imported", f"see {why} above")


def mlx() -> Iterator[Check]:
    if fault := fault_of("mlx.core"):
        build = "mlx[cpu]" if sys.platform == "linux" else "mlx"
        yield problem("MLX", f"cannot be imported ({fault})", pip("install", "--force-reinstall", build))
        return
    core = importlib.import_module("mlx.core")
    memory, whose = memory_of(core)
    yield Check("MLX", f"{core.__version__}, {_backend(core)}, {size(memory)} {whose}")
    builds = sorted({_name(one) for one in importlib.metadata.distributions() if re.match("mlx-c(pu|uda)", _name(one))})
    if len(builds) > 1:
        yield warning(
            "MLX builds",
            f"{', '.join(builds)} bring the same library files",
            f"{pip('uninstall', '-y', builds[0])} && {pip('install', '--force-reinstall', '--no-deps', builds[1])}",
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


def pip(*words: str, python: str = sys.executable) -> str:
    """A command of the pip of this environment, for a shell."""
    return shlex.join([python, "-m", "pip", *words])


def install(*flags: str, python: str = sys.executable) -> str:
    """How to install this package, which is in no registry: from where it came."""
    checkout = PACKAGE.parent
    source, is_editable = _came_from()
    if source != checkout and (checkout / "pyproject.toml").is_file():
        source, is_editable = checkout, False
    if source is None:
        return f"in the checkout {pip('install', *flags, '.', python=python)}"
    return pip("install", *flags, *(["-e"] * is_editable), str(source), python=python)


def reinstall() -> str:
    return install("--force-reinstall", "--no-deps")


def _came_from() -> tuple[Path | None, bool]:
    """The directory or file that this package was installed from, if it is there, and whether it is used there."""
    for distribution in importlib.metadata.distributions():
        if _name(distribution) == PLUGIN:
            source, is_editable = _source(distribution)
            if source is not None and source.exists():
                return source, is_editable
    return None, False


def plugin() -> Iterator[Check]:
    found = f"{__version__}, {PACKAGE}"
    copies = [one for one in importlib.metadata.distributions() if _name(one) == PLUGIN]
    places = [str(one.locate_file("")) for one in copies]
    if not copies:
        yield warning(PLUGIN, f"{found}, which is not installed", install())
    elif len(copies) > 1:
        listed = ", ".join(f"{one.version} in {place}" for one, place in zip(copies, places, strict=True))
        yield problem(
            PLUGIN,
            f"{found}, but {len(copies)} are installed: {listed}",
            f"{pip('uninstall', PLUGIN)} until none is left, delete what is left of them, then {install()}",
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
    places = [Path(str(distribution.locate_file("")))]
    source, is_editable = _source(distribution)
    if source is not None and is_editable:
        places.append(source)
    return [place / PACKAGE.name for place in places]


def _source(distribution: importlib.metadata.Distribution) -> tuple[Path | None, bool]:
    """The directory or file that a distribution was installed from, if pip noted one, and whether it is used there."""
    try:
        direct = json.loads(distribution.read_text("direct_url.json") or "{}")
        url = urlparse(direct["url"])
        is_editable = bool(direct.get("dir_info", {}).get("editable"))
        return Path(unquote(url.path)) if url.scheme == "file" else None, is_editable
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        return None, False


def _name(distribution: importlib.metadata.Distribution) -> str:
    return re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()


def host(name: str) -> Iterator[Check]:
    """mlx-lm or mlx-vlm, which is installed or not, and known or not."""
    from ...compat import TESTED, describe_host

    distribution = name.replace("_", "-")
    first, last = TESTED[distribution]
    if not installed(name):
        if name == "mlx_lm":
            yield problem(distribution, "not installed", pip("install", f"{distribution}>={first}"))
        else:
            yield Check(distribution, "not installed")
        return
    if why := cause(distribution):
        yield left_out(distribution, why)
        return
    if fault := fault_of(name):
        again = pip("install", "--force-reinstall", f"{distribution}>={first},<={last}")
        yield problem(distribution, f"cannot be imported ({fault})", again)
        return
    found = describe_host(name).removeprefix(distribution).strip()
    where = _compare(found, first, last)
    if where is None:
        text = f"{found or 'no version'}, which cannot be compared with {first} to {last}"
        yield warning(distribution, text, f"check results, or {pip('install', f'{distribution}<={last}')}")
    elif where < 0:
        advice = pip("install", f"{distribution}>={first},<={last}")
        yield problem(distribution, f"{found} is older than what is tested ({first} to {last})", advice)
    elif where > 0:
        advice = f"check results, or {pip('install', f'{distribution}<={last}')}"
        yield warning(distribution, f"{found} is newer than what is tested ({first} to {last})", advice)
    else:
        yield Check(distribution, f"{found}, tested with {first} to {last}")


def _compare(found: str, first: str, last: str) -> int | None:
    """Whether a version is before (-1), within (0) or after (1) the tested ones; None: it cannot be told."""
    try:
        from packaging.version import InvalidVersion, Version
    except ImportError:  # told by a check of its own
        return None
    try:
        version = Version(found)
    except InvalidVersion:
        return None
    return -1 if version < Version(first) else int(version > Version(last))


def tested(name: str) -> str:
    """How to install a tested release of a host, also where another of that version is there already."""
    from ...compat import TESTED, describe_host

    distribution = name.replace("_", "-")
    first, last = TESTED[distribution]
    is_there = _compare(describe_host(name).removeprefix(distribution).strip(), first, last) == 0
    again = ("--force-reinstall", "--no-deps") if is_there else ()
    return pip("install", *again, f"{distribution}>={first},<={last}")


def installed(name: str) -> bool:
    """Whether a package can be found, without importing it."""
    return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None


def transformers() -> Iterator[Check]:
    if why := cause("transformers"):
        yield left_out("transformers", why)
    elif fault := fault_of("transformers"):
        yield problem(
            "transformers", f"cannot be imported ({fault})", pip("install", "--force-reinstall", "transformers")
        )
    else:
        yield Check("transformers", importlib.import_module("transformers").__version__)


def dependencies() -> Iterator[Check]:
    """The small packages that this one needs, where they are not in order."""
    for name in ("packaging", "numpy", "importlib-metadata"):
        if fault := fault_of(_NEEDED.get(name, name.replace("-", "_"))):
            yield problem(name, f"cannot be imported ({fault})", pip("install", "--force-reinstall", name))


CHECKS = {
    "Python": python,
    "platform": system,
    "MLX": mlx,
    PLUGIN: plugin,
    "dependencies": dependencies,
    "transformers": transformers,
    "mlx-lm": lambda: host("mlx_lm"),
    "mlx-vlm": lambda: host("mlx_vlm"),
}
