"""`mlx-dllm doctor [PATH]`: what is installed, active and known here, what will happen to a checkpoint, and what is
broken, each with the next step."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from ..checkpoint import open_checkpoint
from ..errors import DiffusionError, printable
from .checks import Check, Checks, checkpoint, environment, listening, look, plugin, problem, silence, startup
from .info import locate

_MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}
_NARROWEST = 30  # columns for what was found


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="find out why something does not work",
        description="Look at this environment and, with a PATH, at a checkpoint. The exit status is 1 when something "
        "is broken; a warning is about what works, but perhaps not as expected.",
    )
    parser.add_argument("path", nargs="?", help="directory of a checkpoint or an a2d run, or a hub id in the cache")
    group = parser.add_argument_group("as given to mlx_lm.generate")
    group.add_argument("--tokenizer", metavar="DIR", help="directory with the tokenizer files, where PATH has none")
    group.add_argument("--mask-token-id", type=int, metavar="N", help="id of the mask token, where PATH does not say")
    group.add_argument("--family", help="look at PATH as a checkpoint of this family")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0, or 1 when something is broken. Raises DiffusionError when there is nothing at the path, unless JSON is asked
    for, which says it itself."""
    if args.path is None and {args.tokenizer, args.mask_token_id, args.family} != {None}:
        raise DiffusionError(
            "--tokenizer, --mask-token-id and --family say how a checkpoint is read: give its PATH too."
        )
    with silence():
        with listening():
            sections = _sections(args)
        found = [(section, check) for section, checks in sections.items() for check in look(checks)]
    count = sum(check.status == "problem" for _, check in found)
    if args.json:
        rows = [{"section": section, **dataclasses.asdict(check)} for section, check in found]
        print(json.dumps({"checks": rows, "problems": count}, indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None
        for section in sections:
            print("\n".join(_lines(section, [check for of, check in found if of == section], width)), end="\n\n")
        print(f"{count or 'No'} problem{'s' * (count != 1)}.")
    return 1 if count else 0


def _sections(args: argparse.Namespace) -> dict[str, Checks]:
    sections: dict[str, Checks] = {
        "Environment": environment.CHECKS,
        "Start-up": startup.CHECKS,
        "Patches": plugin.PATCHES,
        "Families and rules": plugin.REGISTERED,
    }
    if args.path is not None:
        try:
            opened = open_checkpoint(locate(args.path))
        except DiffusionError as error:
            if not args.json:
                raise
            advice = "give the directory of a checkpoint or an a2d run"
            sections["Checkpoint"] = _saying(problem("path", *checkpoint.with_step(str(error), advice)))
        else:
            sections["Checkpoint"] = checkpoint.checks(opened, args)
            if why := environment.cause("mlx-vlm"):
                sections["Checkpoint"] = _saying(environment.left_out("all", why))
    if why := environment.first_fault("numpy", "MLX"):
        for name in ("Patches", "Families and rules"):
            sections[name] = _saying(environment.left_out("all", why))
    return sections


def _saying(check: Check) -> Checks:
    return {check.name: lambda: iter([check])}


def _lines(section: str, checks: list[Check], width: int | None) -> Iterator[str]:
    """The lines of a section, wrapped where there is a width."""
    yield section
    longest = max((len(check.name) for check in checks), default=0)
    for check in checks:
        advice = f" -> {check.advice}" if check.advice else ""
        start = f"  {_MARKS[check.status]:<7}  {check.name:<{longest}}  "
        text = printable(f"{check.value}{advice}")
        if width is not None:
            room = max(width - len(start), _NARROWEST)
            wrapped = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
            text = f"\n{' ' * len(start)}".join(wrapped)
        yield start + text
