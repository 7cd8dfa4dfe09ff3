"""The command `mlx-dllm`: one file per subcommand, each with `add(subparsers)` and a function that runs it."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from ..errors import PREFIX, DiffusionError, note, printable


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlx-dllm`. Returns the exit status: 0, or 1 with one sentence on stderr."""
    from . import doctor, infill, info, verify

    parser = argparse.ArgumentParser(prog="mlx-dllm", description="Diffusion language models in mlx-lm and mlx-vlm.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    doctor.add(subparsers)
    infill.add(subparsers)
    info.add(subparsers)
    verify.add(subparsers)
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names in a script that the terminal's encoding lacks
    try:
        status = args.run(args)
        if sys.stdout is not None:  # closed
            sys.stdout.flush()
        return status
    except DiffusionError as error:
        print(f"{PREFIX} error: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        note("interrupted")
        return 130
    except ImportError as error:  # MLX or a host, half installed or for another machine
        if os.environ.get("MLX_DLLM_DEBUG") == "1":
            raise
        print(f"{PREFIX} error: {printable(str(error))}: `mlx-dllm doctor` says what to do.", file=sys.stderr)
        return 1
    except OSError as error:  # the reader has gone, as in `| head`, or the device is full
        if os.environ.get("MLX_DLLM_DEBUG") == "1":
            raise
        if not isinstance(error, BrokenPipeError):
            what = printable(str(error.filename or "standard output"))
            why = f"cannot be read or written ({error.strerror or error})"
            print(f"{PREFIX} error: {what} {why}: MLX_DLLM_DEBUG=1 shows where.", file=sys.stderr)
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
