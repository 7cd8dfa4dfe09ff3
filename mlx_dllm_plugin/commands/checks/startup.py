"""Whether every Python of this environment starts with the plugin, and if not, why."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import site
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ... import _active_boot
from . import Check, describe, problem, warning
from .environment import PACKAGE, PLUGIN, installed, reinstall

BOOT = "_mlx_dllm_boot"
STEM = "zz-mlx-dllm-plugin"
_FALLBACK = "until then run python -m mlx_dllm_plugin generate ..."
_HOOK = "start-up hook"
_ASK = f"import sys; print({BOOT!r} in sys.modules); print(*sys.version_info[:2]); print(sys.prefix)"


def opted_out() -> str:
    """How the user turned the plugin off, or ""."""
    if os.environ.get("MLX_DLLM_PLUGIN") == "0":
        return "MLX_DLLM_PLUGIN=0"
    return "" if _active_boot.enabled() else "python -X mlx_dllm=0"


def way_back(off: str) -> str:
    """How to turn the plugin on again."""
    return "unset MLX_DLLM_PLUGIN" if off.startswith("MLX") else "leave out -X mlx_dllm=0"


def hook() -> Iterator[Check]:
    if off := opted_out():
        yield warning(_HOOK, f"turned off by {off}: the hosts decode autoregressively", way_back(off))
    elif BOOT in sys.modules:
        yield _ran(Path(str(sys.modules[BOOT].__file__)))
    elif sys.flags.no_site:
        yield problem(_HOOK, "not active: python -S reads no start-up files", f"leave out -S; {_FALLBACK}")
    else:
        yield problem(_HOOK, *_why_not())


def _ran(boot: Path) -> Check:
    if boot.read_bytes() != (PACKAGE / "_boot.py").read_bytes():
        return warning(_HOOK, f"active, but {boot} is of another version than {PACKAGE}", reinstall())
    return Check(_HOOK, f"active, from {boot.parent}")


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
                f"pip install {PLUGIN} into {sys.prefix}; {_FALLBACK}",
            )
        return (
            f"not active: {file} is in a directory whose start-up files Python does not read, as after pip install "
            "--target",
            f"pip install {PLUGIN} into {sys.prefix}, or call site.addsitedir({str(folder)!r}) first; {_FALLBACK}",
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
        if found is None or found.loader is None:
            return f"not active: {BOOT}.py is gone from beside {file}", reinstall()
        found.loader.get_code(BOOT)  # type: ignore[attr-defined]
    except Exception as error:
        return f"not active: {BOOT}.py beside {file} is damaged ({describe(error)})", reinstall()
    return f"not active, though {file} is in order", f"python -v -c pass shows what ran; {_FALLBACK}"


def _is_hidden(file: Path) -> bool:
    return bool(getattr(os.lstat(file), "st_flags", 0) & stat.UF_HIDDEN)


def command(name: str) -> Iterator[Check]:
    """Whose command runs when a user types its name."""
    scripts = Path(sysconfig.get_path("scripts"))
    instead = scripts / name if (scripts / name).exists() else f"{sys.executable} -m {name}"
    found = shutil.which(name)
    if found is None:
        yield warning(name, "not on PATH", f"activate {sys.prefix}, or run {instead}")
        return
    python = _interpreter(Path(found))
    if python is not None and _is_this(python):
        yield Check(name, found)
        return
    active, is_ours, prefix = _ask(python)
    if is_ours:
        yield Check(name, found)
    elif active:
        yield warning(
            name,
            f"{found} belongs to another environment, {prefix}, which has the plugin too",
            f"run {prefix}/bin/mlx-dllm doctor, or {instead}",
        )
    else:
        yield problem(
            name,
            f"{found} belongs to another environment, {prefix or 'whose Python does not run'}, where the plugin is not "
            'active: it reads --mode diffusion as a model called "diffusion"',
            f"run {instead}" + (f", or {prefix}/bin/python -m pip install {PLUGIN}" if prefix else ""),
        )


def _interpreter(script: Path) -> str | None:
    """The Python that a script names in its first lines."""
    with script.open("rb") as stream:
        first, second = (stream.readline(4096).decode(errors="replace").strip() for _ in range(2))
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    if words and os.path.basename(words[0]) == "sh" and second.startswith("'''exec'"):
        return shlex.split(second.removeprefix("'''exec'"))[0]  # installers, where a path is long or has spaces
    if words and os.path.basename(words[0]) == "env":
        return shutil.which(words[-1])
    return words[0] if words else None


def _is_this(python: str) -> bool:
    """Whether it is the Python that runs here. All environments of one Python are links to it, so the directory counts
    too."""
    return (
        os.path.exists(python)
        and os.path.samefile(python, sys.executable)
        and os.path.samefile(os.path.dirname(python), os.path.dirname(sys.executable))
    )


def _ask(python: str | None) -> tuple[bool, bool, str]:
    """Whether another Python starts with the plugin and is of this environment, and its prefix ("" where it does not
    run)."""
    clean = {name: value for name, value in os.environ.items() if name != "MLX_DLLM_PLUGIN"}
    try:
        done = subprocess.run(
            [python or "", "-c", _ASK], env=clean, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
        active, version, prefix = done.stdout.splitlines()[-3:]
    except (OSError, ValueError, subprocess.SubprocessError):
        return False, False, ""
    same = version.split() == [str(number) for number in sys.version_info[:2]]
    return active == "True", same and os.path.realpath(prefix) == os.path.realpath(sys.prefix), prefix


def _commands() -> dict[str, str]:
    return {"mlx_lm.generate": "mlx_lm", "mlx_lm": "mlx_lm", "mlx_vlm.generate": "mlx_vlm"}


def commands() -> Iterator[Check]:
    for name, package in _commands().items():
        if installed(package):
            yield from command(name)


CHECKS = {_HOOK: hook, "commands": commands}
