"""`mlx-dllm doctor [PATH]`: what is installed, active and known here, what will happen to a checkpoint, and what is
broken, each with the next step."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from ..checkpoint import open_checkpoint
from .checks import Check, Checks, checkpoint, environment, look, plugin, startup, warning
from .info import locate

_MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="find out why something does not work",
        description="Look at this environment and, with a PATH, at a checkpoint. The exit status is 1 when something "
        "is broken; a warning is about what works, but perhaps not as expected.",
    )
    parser.add_argument("path", nargs="?", help="directory of a checkpoint or an a2d run, or a hub id in the cache")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0, or 1 when something is broken. Raises DiffusionError when there is nothing at the path."""
    sections = _sections(args.path)
    found = [(section, check) for section, checks in sections.items() for check in look(checks)]
    count = sum(check.status == "problem" for _, check in found)
    if args.json:
        rows = [{"section": section, **dataclasses.asdict(check)} for section, check in found]
        print(json.dumps({"checks": rows, "problems": count}, indent=2))
    else:
        for section in sections:
            print("\n".join(_lines(section, [check for of, check in found if of == section])), end="\n\n")
        print(f"{count or 'No'} problem{'s' * (count != 1)}.")
    return 1 if count else 0


def _sections(path: str | None) -> dict[str, Checks]:
    sections: dict[str, Checks] = {
        "Environment": environment.CHECKS,
        "Start-up": startup.CHECKS,
        "Patches": plugin.PATCHES,
        "Families and rules": plugin.REGISTERED,
    }
    if path is not None:
        sections["Checkpoint"] = checkpoint.checks(open_checkpoint(locate(path)), path)
    if environment.mlx_fault():
        left_out = {"all": lambda: iter([warning("all", "not looked at, as MLX cannot be imported", "see MLX above")])}
        sections |= {name: left_out for name in [*sections][2:]}
    return sections


def _lines(section: str, checks: list[Check]) -> Iterator[str]:
    yield section
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        advice = f" -> {check.advice}" if check.advice else ""
        yield f"  {_MARKS[check.status]:<7}  {check.name:<{width}}  {check.value}{advice}"
