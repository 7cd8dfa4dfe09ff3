"""What goes wrong, said in one sentence."""

from __future__ import annotations

import sys

PREFIX = "[mlx-dllm-plugin]"


class DiffusionError(ValueError):
    """A request that cannot be decoded as asked. The message is one sentence for the user: the thing, its value,
    what was expected, and the way out."""


class CheckpointError(DiffusionError, FileNotFoundError):
    """A checkpoint or run directory with something missing or broken in it."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def printable(text: str) -> str:
    """A text from a file or a stranger without what would move the cursor of a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def note(message: str, *, apart: bool = False) -> None:
    """Print one line for the user on stderr; ``apart`` from a text that may stand on the terminal's line."""
    print(f"{chr(10) * apart}{PREFIX} {message}", file=sys.stderr, flush=True)
