"""What `mlx-dllm doctor` looks at: one file per section, each a table of checks by name."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...errors import PREFIX, DiffusionError


@dataclass(frozen=True)
class Check:
    """One line: `status` is "ok", "warning" (it works, but) or "problem" (something is broken), and `advice` the next
    step, where `value` does not say it already."""

    name: str
    value: str
    status: str = "ok"
    advice: str = ""


Checks = dict[str, Callable[[], Iterator[Check]]]


def warning(name: str, value: str, advice: str = "") -> Check:
    return Check(name, value, "warning", advice)


def problem(name: str, value: str, advice: str = "") -> Check:
    return Check(name, value, "problem", advice)


def look(checks: Checks) -> Iterator[Check]:
    """What the checks of a section find. One that fails is a problem itself; what is printed meanwhile is not shown."""
    for name, check in checks.items():
        with listening() as heard:
            try:
                found = list(check())
            except (Exception, SystemExit) as error:  # a host or a stranger's package may end its import like that
                found = [problem(name, f"this check failed ({describe(error)})", _report())]
                traceback.print_exc(file=heard.text)
        if os.environ.get("MLX_DLLM_DEBUG") == "1":
            sys.stderr.write(heard.text.getvalue())
        yield from found


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nothing reaches standard output meanwhile, whoever writes to its descriptor. At the end of Python nothing does
    either, but for what was printed before: packages of strangers may have their say then."""
    try:
        _flush()
        kept = os.dup(1)
    except (OSError, ValueError):  # closed
        yield
        return
    try:
        _close_output()
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            _flush()
        os.dup2(kept, 1)
        os.close(kept)
        atexit.register(_close_output)  # the last one that is registered is the first that runs


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            stream.flush()


def _close_output() -> None:
    with contextlib.suppress(OSError, ValueError):
        _flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


class Heard:
    """What was printed."""

    def __init__(self) -> None:
        self.text = io.StringIO()

    def notes(self) -> list[str]:
        """The lines of this package."""
        lines = self.text.getvalue().splitlines()
        return [line.removeprefix(PREFIX).strip() for line in lines if line.startswith(PREFIX)]


@contextlib.contextmanager
def listening() -> Iterator[Heard]:
    """Keep what hosts, tokenizers and this package print away from the terminal."""
    heard = Heard()
    with contextlib.redirect_stdout(heard.text), contextlib.redirect_stderr(heard.text):
        yield heard


def describe(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, DiffusionError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def _report() -> str:
    return "MLX_DLLM_DEBUG=1 shows where"


def size(number: float) -> str:
    """Bytes for people."""
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 / 10 else f"{number / 2**20:.1f} MiB"


def some(names: list[str], most: int = 3) -> str:
    """A few of the names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
