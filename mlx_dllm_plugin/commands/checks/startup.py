"""Whether every Python of this environment starts with the plugin, and if not, why."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import site
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ... import _active_boot
from . import Check, describe, problem, warning
from .environment import PACKAGE, install, installed, reinstall

BOOT = "_mlx_dllm_boot"
STEM = "zz-mlx-dllm-plugin"
_FALLBACK = "until then run python -m mlx_dllm_plugin generate ..."
_HOOK = "start-up hook"
_ASK = f"import sys; print({BOOT!r} in sys.modules); print(*sys.version_info[:2]); print(sys.prefix)"


_PYTHON = re.compile(r"(python|pypy)[\d.]*(w|t|d|-\w+)?")
_SECONDS = 10  # for all Pythons that are asked


def opted_out() -> str:
    """How the user turned the plugin off, or ""."""
    if os.environ.get("MLX_DLLM_PLUGIN") == "0":
        return "MLX_DLLM_PLUGIN=0"
    return "" if _active_boot.enabled() else "python -X mlx_dllm=0"


def way_back(off: str) -> str:
    """How to turn the plugin on again."""
    return "unset MLX_DLLM_PLUGIN" if off.startswith("MLX") else "leave out -X mlx_dllm=0"


def has_run() -> bool:
    """Whether the start-up file ran: what is left of another version is imported too, and does nothing."""
    return hasattr(sys.modules.get(BOOT), "enabled")


def hook() -> Iterator[Check]:
    value = os.environ.get("MLX_DLLM_PLUGIN", "")
    if off := opted_out():
        yield warning(_HOOK, f"turned off by {off}: the hosts decode autoregressively", way_back(off))
    elif has_run() and value.lower() in ("false", "off", "no"):
        yield warning(_HOOK, f"active, as MLX_DLLM_PLUGIN={value} does not turn it off", "set it to 0, or unset it")
    elif has_run():
        yield _ran(Path(str(sys.modules[BOOT].__file__)))
    elif BOOT in sys.modules:
        yield problem(_HOOK, *_left_over())
    elif sys.flags.no_site:
        yield problem(_HOOK, "not active: python -S reads no start-up files", f"leave out -S; {_FALLBACK}")
    else:
        yield problem(_HOOK, *_why_not())


def _ran(boot: Path) -> Check:
    if boot.read_bytes() != (PACKAGE / "_boot.py").read_bytes():
        return warning(_HOOK, f"active, but {boot} is of another version than {PACKAGE}", reinstall())
    return Check(_HOOK, f"active, from {boot.parent}")


def _left_over() -> tuple[str, str]:
    module = sys.modules[BOOT]
    where = module.__file__ or next(iter(module.__path__))
    return f"not active: {where} is no file of this package", f"delete it, then {reinstall()}; {_FALLBACK}"


def _why_not() -> tuple[str, str]:
    """Why the start-up file did not run, and what to do."""
    read = [Path(folder) for folder in _site_directories()]
    user = Path(site.getusersitepackages())
    for folder in dict.fromkeys([*read, user, *(Path(entry or ".") for entry in sys.path)]):
        if not (file := _start_up_file(folder)):
            continue
        if folder in read:
            return _why_not_run(file)
        if folder == user:
            return (
                f"not active: {file} is in the user's directory, which -s, -I, PYTHONNOUSERSITE or this environment "
                "turns off",
                f"{install()}; {_FALLBACK}",
            )
        return (
            f"not active: {file} is in a directory whose start-up files Python does not read, as after pip install "
            "--target",
            f"{install()}, or call site.addsitedir({str(folder)!r}) first; {_FALLBACK}",
        )
    return f"not active: no {STEM}.pth in {', '.join(map(str, read))}", f"{reinstall()}; {_FALLBACK}"


def _site_directories() -> list[str]:
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


def _start_up_file(folder: Path) -> Path | None:
    """The start-up file in a directory, as far as there is one: from Python 3.15 on a .start takes the .pth's place."""
    suffixes = (".start", ".pth") if sys.version_info >= (3, 15) else (".pth",)
    return next((file for suffix in suffixes if os.path.lexists(file := folder / (STEM + suffix))), None)


def _why_not_run(file: Path) -> tuple[str, str]:
    """The same for a file that Python should have read."""
    if _is_hidden(file):
        how = f"chflags -R nohidden {shlex.quote(sys.prefix)}"
        return f"not active: {file} is marked hidden, and Python skips hidden start-up files", f"{how}; {_FALLBACK}"
    if file.suffix == ".pth" and sys.version_info >= (3, 18):
        return f"not active: this Python runs no line of {file}, and {STEM}.start is gone", reinstall()
    try:
        wrong = _what_is_wrong(file.read_text())
    except (OSError, ValueError) as error:
        wrong = f"cannot be read ({describe(error)})"
    return (f"not active: {file} {wrong}", reinstall()) if wrong else _boot_is_broken(file)


def _what_is_wrong(text: str) -> str:
    """What keeps the text of a start-up file from starting us, or ""."""
    line = next((line for line in text.splitlines() if BOOT in line and not line.startswith("#")), None)
    if line is None:
        return f"does not run {BOOT}"
    if line == f"{BOOT}:startup":
        return ""
    try:
        compile(line, STEM, "exec")
    except SyntaxError as error:
        return f"is damaged ({describe(error)})"
    return "" if line.startswith(("import ", "import\t")) else "is damaged (its line does not begin with import)"


def _boot_is_broken(file: Path) -> tuple[str, str]:
    try:
        found = importlib.util.find_spec(BOOT)
        if found is None or found.loader is None or found.origin is None:  # without: a directory of that name
            return f"not active: {BOOT}.py is gone from beside {file}", reinstall()
        found.loader.get_code(BOOT)  # type: ignore[attr-defined]
    except Exception as error:
        return f"not active: {BOOT}.py beside {file} is damaged ({describe(error)})", reinstall()
    return f"not active, though {file} is in order", f"python -v -c pass shows what ran; {_FALLBACK}"


def _is_hidden(file: Path) -> bool:
    return bool(getattr(os.lstat(file), "st_flags", 0) & stat.UF_HIDDEN)


@dataclass(frozen=True)
class _Other:
    """What another Python says: whether it starts with the plugin, whether it is of this environment, its prefix; or
    why it does not say that."""

    is_active: bool = False
    is_ours: bool = False
    prefix: str = ""
    fault: str = ""
    timed_out: bool = False


def command(name: str, ask: Callable[[str], _Other]) -> Iterator[Check]:
    """Whose command runs when a user types its name."""
    instead = f"run {_instead(name)}"
    found = shutil.which(name)
    if found is None:
        yield warning(name, "not on PATH", f"activate {sys.prefix}, or {instead}")
        return
    script = Path(found)
    python = _interpreter(script) if script.is_file() else None  # a pipe would be waited for
    if python is not None and _is_this(python):
        yield Check(name, found)
    elif python is None or not _PYTHON.fullmatch(os.path.basename(python)):
        way = f"run {_subcommand(name)} --help and look for 'diffusion options'; without them, {instead}"
        yield warning(name, f"{found} is a script or program that cannot be looked into", way)
    elif not os.path.exists(python) and os.path.realpath(script.parent) == os.path.realpath(_scripts()):
        way = f"{instead}, or make the environment anew"
        yield problem(name, f"{found} names {python}, which is gone: the environment was moved or renamed", way)
    else:
        yield _of_another(name, found, python, ask(python), instead)


def _of_another(name: str, found: str, python: str, other: _Other, instead: str) -> Check:
    if other.is_ours:
        return Check(name, found)
    if other.fault:
        status = "warning" if other.timed_out else "problem"
        return Check(name, f"{found} belongs to {python}, which {other.fault}", status, instead)
    whose = f"{found} belongs to another environment, {other.prefix}"
    theirs = Path(other.prefix) / "bin"
    if other.is_active:
        doctor = shlex.quote(str(theirs / "mlx-dllm"))
        return warning(name, f"{whose}, which has the plugin too", f"run {doctor} doctor, or {instead}")
    return problem(
        name,
        f'{whose}, where the plugin is not active: it reads --mode diffusion as a model called "diffusion"',
        f"{instead}, or {install(python=str(theirs / 'python'))}",
    )


def _scripts() -> Path:
    return Path(sysconfig.get_path("scripts"))


def _subcommand(name: str) -> str:
    """The command that has our options."""
    return "mlx_lm generate" if name == "mlx_lm" else name


def _instead(name: str) -> str:
    """The same command of this environment, for a shell: its script, unless that is broken."""
    script = _scripts() / name
    python = _interpreter(script) if script.is_file() else None
    if python is not None and _is_this(python):
        return shlex.quote(str(script))
    return f"{shlex.quote(sys.executable)} -m {_subcommand(name)}"


def _interpreter(script: Path) -> str | None:
    """The program that a script names in its first lines."""
    try:
        with script.open("rb") as stream:
            first, second = (stream.readline(4096).decode(errors="replace").strip() for _ in range(2))
    except OSError:
        return None
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    if words and os.path.basename(words[0]) == "sh" and second.startswith("'''exec'"):
        # Installers, where a path is long or has spaces.
        return next(iter(shlex.split(second.removeprefix("'''exec'").partition('"$0"')[0])), None)
    if words and os.path.basename(words[0]) == "env":
        program = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), "")
        return shutil.which(program) or program
    return words[0] if words else None


def _is_this(python: str) -> bool:
    """Whether it is the Python that runs here. All environments of one Python are links to it, so the directory counts
    too."""
    return (
        os.path.exists(python)
        and os.path.samefile(python, sys.executable)
        and os.path.samefile(os.path.dirname(python), os.path.dirname(sys.executable))
    )


def _ask(python: str, seconds: float) -> _Other:
    """What another Python says."""
    clean = {name: value for name, value in os.environ.items() if name != "MLX_DLLM_PLUGIN"}
    try:
        done = subprocess.run(
            [python, "-c", _ASK], env=clean, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
        active, version, prefix = done.stdout.splitlines()[-3:]
    except subprocess.TimeoutExpired:
        return _Other(fault=f"did not answer within {_SECONDS} seconds", timed_out=True)
    except (OSError, ValueError):
        return _Other(fault="does not run")
    same = version.split() == [str(number) for number in sys.version_info[:2]]
    return _Other(active == "True", same and os.path.realpath(prefix) == os.path.realpath(sys.prefix), prefix)


def _commands() -> dict[str, str]:
    return {"mlx_lm.generate": "mlx_lm", "mlx_lm": "mlx_lm", "mlx_vlm.generate": "mlx_vlm"}


def commands() -> Iterator[Check]:
    end = time.monotonic() + _SECONDS
    ask = functools.cache(lambda python: _ask(python, max(end - time.monotonic(), 0.1)))
    for name, package in _commands().items():
        if installed(package):
            yield from command(name, ask)


CHECKS = {_HOOK: hook, "commands": commands}
