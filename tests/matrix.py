"""Run tests/smoke.py with pairs of mlx-lm and mlx-vlm, each in a new environment: `python -m tests.matrix`.

The wheel of the checkout is installed, and a copy of the tests runs in a folder of its own, where the checkout cannot
shadow it. Everything else is what pip picks: nothing had to be pinned, and nothing asks for torch. `--write` keeps the
results in benchmarks/results/matrix.json and makes the README's table of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from mlx_dllm_plugin.compat import TESTED
from tests.conftest import ROOT, goldens_root

REPORT = ROOT / "benchmarks" / "results" / "matrix.json"
README = ROOT / "README.md"

# mlx-vlm does not ask for an mlx-lm: any two fit. Releases between the first and the last of compat.TESTED:
BETWEEN = (("0.32.0", "0.7.6"), ("0.32.1", "0.7.6"))

# Column of the README's table: first words of its tests in smoke.py.
COLUMNS = {
    "start-up": "startup",
    "generate": "generate",
    "stream": "stream",
    "LLaDA2.2 in mlx-lm": "llada22_lm",
    "LLaDA2.2 in mlx-vlm": "llada22_vlm",
    "mlx-vlm's server": "server",
    "convert": "convert",
    "refusals": "refusals",
    "autoregressive": "autoregressive",
}
# Settings of the environment that the smoke tests must not see.
INSIDE = ("MLX_", "PYTHON", "PYTEST", "HF_", "XDG_")
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")

Pair = tuple[str, str]
Row = dict[str, Any]


def ends() -> list[Pair]:
    """The oldest pair and the newest."""
    return list(zip(TESTED["mlx-lm"], TESTED["mlx-vlm"], strict=True))


def pairs() -> list[Pair]:
    """All pairs: the ends, what is between, and the oldest of each host with the newest of the other."""
    (oldest, first), (newest, last) = ends()
    return [(oldest, first), (oldest, last), *BETWEEN, (newest, first), (newest, last)]


def call(*command: object, **options: Any) -> tuple[int, str]:
    """A command's status and all it printed."""
    text = [str(part) for part in command]
    done = subprocess.run(text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    return done.returncode, done.stdout


def need(*command: object) -> None:
    """A command without which there is nothing to try.

    Raises:
        OSError: it failed; the message holds what it printed.
    """
    status, output = call(*command)
    if status:
        raise OSError(f"{' '.join(map(str, command))} failed:\n{output}")


def prepare(scratch: Path) -> Path:
    """Build the wheel, once, and copy what the smoke tests need. Returns the wheel."""
    need(*PIP, "wheel", "--no-deps", "--wheel-dir", scratch / "dist", ROOT)
    (wheel,) = (scratch / "dist").glob("*.whl")
    tests = scratch / "suite" / "tests"
    shutil.copytree(ROOT / "tests" / "data", tests / "data")
    for name in ("smoke.py", "tools.py", "conftest.py"):
        shutil.copy(ROOT / "tests" / name, tests)
    (scratch / "home").mkdir()
    return wheel


def attempt(pair: Pair | None, scratch: Path, wheel: Path) -> tuple[Row, str]:
    """Install a pair, or with None the newest releases there are, and run the smoke tests.

    Returns the row, and what went wrong ("" if nothing did).
    """
    wanted = dict(zip(TESTED, pair or ("newest", "newest"), strict=True))
    environment = scratch / "-".join(wanted.values())
    python = environment / "bin" / "python"
    packages = [f"{package}=={version}" if pair else package for package, version in wanted.items()]
    try:
        need(sys.executable, "-m", "venv", "--without-pip", environment)
        need(*PIP, "--python", python, "install", "--no-compile", *packages, wheel, "pytest")
        row, problem = smoke(environment, scratch)
    except OSError as error:
        row, problem = {"columns": dict.fromkeys(COLUMNS, "no")}, str(error)
    if pair and not problem and {package: row[package] for package in wanted} != wanted:
        problem = f"pip installed other releases: {row}"
    shutil.rmtree(environment, ignore_errors=True)
    return {**wanted, **row}, problem


def smoke(environment: Path, scratch: Path) -> tuple[Row, str]:
    """The row of an environment, and what went wrong ("" if nothing did)."""
    report = environment / "smoke.xml"
    outside = {name: value for name, value in os.environ.items() if not name.startswith(INSIDE)}
    outside |= {"HOME": str(scratch / "home"), "MLX_DLLM_GOLDENS": str(goldens_root())}
    command = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--junitxml", report, "tests/smoke.py")
    status, output = call(environment / "bin" / "python", *command, cwd=scratch / "suite", env=outside)
    try:
        suite = ElementTree.parse(report).getroot()[0]
    except (OSError, ElementTree.ParseError):  # Python itself died
        return {"columns": dict.fromkeys(COLUMNS, "no")}, output
    row: Row = {item.attrib["name"]: item.attrib["value"] for item in suite.iter("property")}
    row["columns"] = columns(suite)
    plugin = row.pop("plugin", "")
    if not plugin.startswith(f"{environment}{os.sep}"):
        return row, f"the plugin that was tested is not the installed one but {plugin or 'none'}\n{output}"
    if "skipped" in row["columns"].values():
        print(output.rpartition("short test summary info")[2], flush=True)
    return row, output if status or "no" in row["columns"].values() else ""


def columns(suite: ElementTree.Element) -> dict[str, str]:
    """Column -> "yes", "no" or "skipped", from pytest's report."""
    found: dict[str, set[str]] = {name: set() for name in COLUMNS}
    for case in suite.iter("testcase"):
        marks = {child.tag for child in case} & {"failure", "error", "skipped"}
        for column, words in COLUMNS.items():
            if case.attrib["name"].startswith(f"test_{words}_"):
                found[column].add("yes" if not marks else "skipped" if marks == {"skipped"} else "no")
    return {
        name: "no" if "no" in kinds or not kinds else "skipped" if "skipped" in kinds else "yes"
        for name, kinds in found.items()
    }


def describe(row: Row) -> str:
    """A row on one line."""
    names = {kind: [name for name, value in row["columns"].items() if value == kind] for kind in ("no", "skipped")}
    told = [f"{kind}: {', '.join(found)}" for kind, found in names.items() if found]
    return f"{', '.join(f'{package} {row[package]}' for package in TESTED)}: {'; '.join(told) or 'all columns yes'}"


def table(rows: list[Row]) -> str:
    """The README's table, and the line above it."""
    used = [f"{name} {' and '.join(sorted({row[name] for row in rows}))}" for name in ("mlx", "transformers", "Python")]
    head = [*TESTED, *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join([*(row[name] for name in TESTED), *row['columns'].values()])} |" for row in rows]
    machines = " and ".join(sorted({row["machine"] for row in rows}))
    return "\n".join([f"With {', '.join(used)} on {machines}:", "", *lines, ""])


def write(rows: list[Row]) -> None:
    """Keep the results, and make the README's table of them."""
    REPORT.write_text(json.dumps(rows, indent=1) + "\n")
    start, end = r"(<!-- matrix:[^\n]*-->\n)", "(<!-- end of matrix -->)"
    readme = README.read_text()
    assert re.search(f"{start}.*?{end}", readme, re.DOTALL), "README.md has no place for the table"
    made = re.sub(f"{start}.*?{end}", lambda found: found[1] + table(rows) + found[2], readme, flags=re.DOTALL)
    README.write_text(made)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", choices=("all", "ends"), help="all (the default), or the oldest and the newest pair")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("LM", "VLM"), help="one pair; repeat")
    parser.add_argument("--newest", action="store_true", help="the newest releases there are, tested or not")
    parser.add_argument("--jobs", type=int, default=1, help="pairs at the same time (default: 1)")
    parser.add_argument("--write", action="store_true", help="of all pairs: keep the results, make the README's table")
    given = parser.parse_args(arguments)
    asked = given.pairs or ("" if given.pair or given.newest else "all")
    if given.write and (asked != "all" or given.pair or given.newest):
        parser.error("--write needs all pairs, and no others")
    wanted: list[Pair | None] = [*{"all": pairs, "ends": ends, "": list}[asked](), *map(tuple, given.pair)]
    wanted += [None] * given.newest

    rows, failed, started = [], False, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        scratch = Path(folder).resolve()
        wheel = prepare(scratch)
        for row, problem in pool.map(partial(attempt, scratch=scratch, wheel=wheel), wanted):
            rows.append(row)
            failed |= bool(problem)
            print(problem and f"{problem}\n", describe(row), sep="", flush=True)
    skipped = any("skipped" in row["columns"].values() for row in rows)
    state = "something failed" if failed else "something was skipped" if skipped else "all right"
    print(f"pairs: {len(rows)}, {time.monotonic() - started:.0f} seconds, {state}")
    if given.write and (failed or skipped):
        print("nothing is written")
    elif given.write:
        write(rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
