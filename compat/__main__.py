"""`python -m mlx_dllm_plugin.compat record|check`: for maintainers, when a new upstream version has come out.

`record` writes the record of an installed version, or of wheels, and prints how it differs from the one before; `check`
judges an installation, or wheels, as the plugin does when a host is imported.
"""

import argparse
import json
import os
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import _active_boot
from ..errors import PREFIX, DiffusionError
from ..patches import leaned_on
from . import (
    TESTED,
    VERDICTS,
    Installed,
    Judgement,
    installed,
    is_version,
    judge,
    make_record,
    record_of,
    releases,
    releases_until,
)

HOSTS = tuple(package.replace("-", "_") for package in TESTED)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a host is incompatible, or with one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m mlx_dllm_plugin.compat", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    what = "wheels of mlx-lm or mlx-vlm; without any, what is installed"
    says = "Write the record of each version, and print how it differs from the one before."
    record_parser = commands.add_parser("record", help="add versions to the records", description=says)
    record_parser.add_argument("wheels", nargs="*", type=Path, help=what)
    record_parser.add_argument("--output", type=Path, help="directory of the records, outside of a checkout")
    record_parser.add_argument("--force", action="store_true", help="replace the record of a version by another")
    says = "Print what each version is to the plugin. The exit status is 1 when something is incompatible."
    check_parser = commands.add_parser("check", help="judge versions", description=says)
    check_parser.add_argument("wheels", nargs="*", type=Path, help=what)
    check_parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        hosts = [_open(wheel) for wheel in args.wheels] or [host for name in HOSTS if (host := installed(name))]
        if not hosts:
            raise DiffusionError(f"None of {', '.join(TESTED)} is installed: install one, or give its wheel.")
        status = 0
        if args.command == "check":
            status = check(hosts, as_json=args.json)
        else:
            for host in hosts:
                record(host, _directory(args.output), force=args.force)
        sys.stdout.flush()
        return status
    except DiffusionError as error:
        print(f"{PREFIX} error: {error}", file=sys.stderr)
    except BrokenPipeError:  # the reader has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, KeyError, TypeError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        print(f"{PREFIX} error: a file cannot be read or written ({_active_boot.describe(error)}).", file=sys.stderr)
    return 1


def check(hosts: Sequence[Installed], *, as_json: bool = False) -> int:
    """Print what hosts are to the plugin. Returns 1 if anything is incompatible."""
    judged = [(host, judge(host, leaned_on(host.package.replace("-", "_")))) for host in hosts]
    if as_json:
        found = [
            {"package": host.package, "version": host.version, "judgements": [vars(judgement) for judgement in all_]}
            for host, all_ in judged
        ]
        print(json.dumps(found, indent=1))
    else:
        for host, judgements in judged:
            _print(host, judgements)
    return int(any(judgement.verdict == "incompatible" for _, all_ in judged for judgement in all_))


def _print(host: Installed, judgements: Sequence[Judgement]) -> None:
    counts = {verdict: sum(judgement.verdict == verdict for judgement in judgements) for verdict in VERDICTS}
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    first, last = TESTED[host.package]
    print(f"{host.package} {host.version} (written for {first} to {last}): {found}")
    for judgement in judgements:
        if judgement.verdict in ("changed", "incompatible"):
            symbol = "" if judgement.symbol in ("", "*") else f".{judgement.symbol}"
            lost = f". Without it: {judgement.lost}" if judgement.lost else ""
            detail = f": {judgement.detail}" if judgement.detail else ""
            print(f"  {judgement.verdict:<12}  {judgement.target}{symbol}{detail}{lost}")


def record(host: Installed, directory: Path, *, force: bool = False) -> None:
    """
    Write the record of a version and print how it differs from the one before.

    Raises:
        DiffusionError: the version is recorded with other files, or nothing of it is leaned on.
    """
    if not is_version(host.version):
        raise DiffusionError(
            f"The version of {host.package} is {host.version!r}, which cannot be ordered: give a wheel."
        )
    new = make_record(host, leaned_on(host.package.replace("-", "_")))
    if not new["files"]:
        raise DiffusionError(f"{host.package} {host.version} has none of the files that the plugin leans on.")
    path = directory / f"{host.package}-{host.version}.json"
    if path.is_file() and not force:
        old = json.loads(path.read_text())["files"]
        hashes = {name: entry["sha256"] for name, entry in new["files"].items()}
        other = [name for name, entry in old.items() if entry["sha256"] != hashes.get(name)]
        if other:
            raise DiffusionError(
                f"{path.name} is there with another {other[0]}: the installed files were changed, or the record is "
                "wrong. Install that version anew, or replace the record with --force."
            )
    directory.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(_as_text(new))
    temporary.replace(path)
    for function in (releases, record_of):
        function.cache_clear()
    before = next((version for version in reversed(releases_until(host)) if version != host.version), None)
    print(f"{host.package} {host.version}: {path.name} written, {_count(new)}.")
    if before is not None:
        print(f"Against {before}:")
        lines = differences(record_of(host.package, before) or {}, new["files"])
        print("\n".join(f"  {line}" for line in lines or ["nothing that is leaned on differs"]))


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """How the files of two records differ, a line per symbol."""
    lines = []
    for name in sorted({*before, *after}):
        if name not in after or name not in before:
            lines.append(f"{name}: {'gone' if name not in after else 'new'}")
            continue
        old, new = before[name]["symbols"], after[name]["symbols"]
        for symbol in sorted({*old, *new}):
            if symbol not in new or symbol not in old:
                lines.append(f"{name}: {symbol} {'gone' if symbol not in new else 'new'}")
            elif old[symbol][1] != new[symbol][1]:
                lines.append(f"{name}: {symbol} changed from {old[symbol][1]} to {new[symbol][1]}")
            elif old[symbol][0] != new[symbol][0]:
                lines.append(f"{name}: changed" if symbol == "*" else f"{name}: {symbol} changed, the same signature")
    return lines


def _count(record: dict[str, Any]) -> str:
    symbols = sum(len(entry["symbols"]) for entry in record["files"].values())
    return f"{len(record['files'])} files, {symbols} symbols"


def _as_text(record: dict[str, Any]) -> str:
    """JSON with a line per symbol, for readable differences."""
    files = []
    for name, entry in record["files"].items():
        symbols = ",\n".join(f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in entry["symbols"].items())
        files.append(f'  {json.dumps(name)}: {{"sha256": "{entry["sha256"]}", "symbols": {{\n{symbols}}}}}')
    head = f' "package": {json.dumps(record["package"])},\n "version": {json.dumps(record["version"])},\n'
    return "{\n" + head + ' "files": {\n' + ",\n".join(files) + "}\n}\n"


def _open(wheel: Path) -> Installed:
    """Raises DiffusionError when it is not a wheel of a host."""
    host, version, *tags = [*wheel.stem.split("-"), ""]
    is_wheel = wheel.suffix == ".whl" and len(tags) in (4, 5) and wheel.is_file() and zipfile.is_zipfile(wheel)
    if host not in HOSTS or not is_version(version) or not is_wheel:
        raise DiffusionError(f"{wheel} is not a wheel of {' or '.join(TESTED)}, as pip download names them.")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name.startswith(f"{host}/")}
    return Installed(host.replace("_", "-"), version, files.get)


def _directory(given: Path | None) -> Path:
    here = Path(__file__).parent
    if given is None and not here.with_name("pyproject.toml").is_file():
        raise DiffusionError(
            "Records are kept in a checkout of mlx-dllm-plugin, not in an installed one: run this there (pip install "
            "-e .), or say where with --output."
        )
    return given or here / "upstream"


if __name__ == "__main__":
    sys.exit(main())
