"""`python -m tests.goldens DIR... [--kind decode|likelihood|vector|forward]`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import a2d, cases, llada2

KINDS = ("decode", "likelihood", "vector", "forward")


def folders(path: Path) -> list[Path]:
    """A golden folder itself, or those in a folder of them."""
    if (path / "golden.json").is_file():
        return [path]
    return sorted(child for child in path.iterdir() if (child / "golden.json").is_file()) if path.is_dir() else []


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.goldens", description="Replay golden folders.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--kind", choices=KINDS)
    args = parser.parse_args(argv)
    rows = []
    for path in args.paths:
        found = folders(path)
        if not found:
            rows.append(a2d.Row(path.name, "-", "-", f"no golden.json in {path} or its folders"))
        for folder in found:
            if a2d.is_run(folder):
                rows += [row for row in a2d.replay(folder) if args.kind in (None, row.kind)]
            elif cases.is_checkpoint(folder):
                rows += cases.replay(folder, (args.kind,) if args.kind else KINDS)
            elif llada2.is_scripted(folder):
                rows += llada2.replay(folder, (args.kind,) if args.kind else KINDS)
            else:
                rows.append(a2d.Row(folder.name, "-", "-", "this version cannot express goldens of this family"))
    for row in rows:
        print(
            f"{'ok  ' if not row.problem else 'FAIL'} {row.folder:14} {row.kind:8} {row.case}  {row.problem}".rstrip()
        )
    matched = sum(not row.problem for row in rows)
    print(f"matched {matched} of {len(rows)}")
    return 0 if rows and matched == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
