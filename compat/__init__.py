"""Which upstream code the plugin leans on, and what an installed version of it is to us.

`upstream/<package>-<version>.json` has a record per release: the sha256 of every file that is leaned on, and the hash
and signature of every symbol (`python -m mlx_dllm_plugin.compat record` adds one). An installed file is

- **known**: a file of a release that is recorded, to the byte;
- **same**: another file, but the symbol is one that is recorded, comments, docstrings and white space aside;
- **changed**: another symbol whose signature fits what is done with it: one warning per host and process;
- **incompatible**: gone, or its signature does not fit: what leans on it is off, with one line.

What this says of files that are not known is remembered in the user's cache directory. Nothing is ever written beside
the installed files.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

# First and last release the patches are tested with; pyproject.toml says the same.
TESTED = {"mlx-lm": ("0.31.3", "0.32.2"), "mlx-vlm": ("0.7.1", "0.7.10")}

VERDICTS = ("known", "same", "changed", "incompatible")
_REMEMBERED = 20  # judgements that stay on disk


class UpstreamDriftWarning(UserWarning):
    """Upstream code that the plugin leans on is not what it was written for. The patches apply, since signatures fit.
    Given once per host and process."""


@dataclass(frozen=True)
class Lean:
    """
    What is leaned on in an upstream module.

    Args:
        symbol: "name", "Class.name", or "*" for all of the file.
        parameters: of a function, those that must be there in this order.
        called: this package calls it, so a parameter without a default that it never had does not fit.
        lost: what is lost without it.
    """

    symbol: str
    parameters: tuple[str, ...] = ()
    called: bool = False
    lost: str = ""


Leans = Mapping[str, Sequence[Lean]]  # upstream module -> what is leaned on in it


@dataclass(frozen=True)
class Judgement:
    """What one symbol of an installed host is: `verdict` is one of `VERDICTS` (of the last, `detail` says why and
    `lost` what is lost), `file` such as "mlx_lm/utils.py". The symbol "" stands for a module that is gone."""

    target: str
    symbol: str
    verdict: str
    detail: str = ""
    lost: str = ""
    file: str = ""


@dataclass(frozen=True)
class Installed:
    """A host's files: `read` takes a path such as "mlx_lm/utils.py", and returns None where there is none."""

    package: str
    version: str
    read: Callable[[str], bytes | None] = field(repr=False)


@dataclass(frozen=True)
class _File:
    name: str
    data: bytes
    sha256: str


def distribution(target: str) -> str:
    """The distribution of an upstream module: "mlx_lm.generate" -> "mlx-lm"."""
    return target.partition(".")[0].replace("_", "-")


def version_of(host: str) -> str | None:
    """The version of an installed host, or None."""
    version = getattr(sys.modules.get(host), "__version__", None)
    return _version_by_metadata(host) if version is None else str(version)  # mlx_vlm sets it last


@cache
def _version_by_metadata(host: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(host.replace("_", "-"))
    except PackageNotFoundError:
        return None


def describe_host(target: str) -> str:
    """Distribution and version a module belongs to, as in "mlx-lm 0.32.2"."""
    return f"{distribution(target)} {version_of(target.partition('.')[0]) or ''}".rstrip()


def installed(host: str) -> Installed | None:
    """The files of a host that can be imported, without importing it."""
    spec = importlib.util.find_spec(host)
    if spec is None or not spec.submodule_search_locations:
        return None
    root = os.path.dirname(list(spec.submodule_search_locations)[0])
    loader: Any = spec.loader

    def read(name: str) -> bytes | None:
        try:
            return loader.get_data(os.path.join(root, *name.split("/")))  # also from a zip file
        except OSError:
            return None

    return Installed(host.replace("_", "-"), version_of(host) or "of no version", read)


# --- records ----------------------------------------------------------------------------------------------------------


@cache
def releases(package: str) -> list[str]:
    """The recorded versions of a package, oldest first."""
    from importlib.resources import files

    folder = files(__name__) / "upstream"  # which may lie in a zip file
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    found = [m[1] for name in names if (m := re.fullmatch(rf"{re.escape(package)}-(\d.*)\.json", name))]
    found = [version for version in found if is_version(version)]
    if found:
        from packaging.version import Version

        found.sort(key=Version)
    return found


def is_version(text: str) -> bool:
    """Whether releases can be ordered by it."""
    from packaging.version import InvalidVersion, Version

    try:
        return bool(Version(text))
    except InvalidVersion:
        return False


@cache
def record_of(package: str, version: str) -> dict[str, Any] | None:
    """The files of a recorded version, {name: {"sha256": ..., "symbols": {name: [hash, signature]}}}, or None."""
    loader: Any = sys.modules[__name__].__loader__
    try:
        data = loader.get_data(os.path.join(os.path.dirname(__file__), "upstream", f"{package}-{version}.json"))
    except OSError:
        return None
    return json.loads(data)["files"]


def make_record(host: Installed, leans: Leans) -> dict[str, Any]:
    """The record of a version, as it stands in a file of `upstream/`."""
    from .fingerprint import Source

    files: dict[str, Any] = {}
    for target, wanted in sorted(leans.items()):
        file = _find(host, target)
        if file is not None:
            source = Source(file.data)
            found = {lean.symbol: source.symbol(lean.symbol) for lean in wanted}
            symbols = {name: list(symbol) for name, symbol in sorted(found.items()) if symbol is not None}
            files[file.name] = {"sha256": file.sha256, "symbols": symbols}
    return {"package": host.package, "version": host.version, "files": files}


def _find(host: Installed, target: str) -> _File | None:
    path = target.replace(".", "/")
    for name in (f"{path}/__init__.py", f"{path}.py"):  # as Python looks
        data = host.read(name)
        if data is not None:
            return _File(name, data, hashlib.sha256(data).hexdigest())
    return None


# --- verdicts ---------------------------------------------------------------------------------------------------------


def judge(host: Installed, leans: Leans) -> list[Judgement]:
    """What every symbol of a host is; [] of one that has no records. Modules that releases of its age do not have are
    left out."""
    judgements: list[Judgement] = []
    records = [record_of(host.package, version) or {} for version in releases(host.package)]
    if not records:
        return []
    # Of the newest release that is not newer, or of the oldest.
    before = record_of(host.package, (releases_until(host) or releases(host.package)[:1])[-1]) or {}
    for target, wanted in leans.items():
        file = _find(host, target)
        path = target.replace(".", "/")
        if file is None:
            if any(name in before for name in (f"{path}.py", f"{path}/__init__.py")):
                judgements.append(Judgement(target, "", "incompatible", f"there is no {target}", _all_lost(wanted)))
            continue
        known = [record[file.name] for record in records if file.name in record]
        if file.sha256 in [entry["sha256"] for entry in known]:
            judgements += [Judgement(target, lean.symbol, "known", file=file.name) for lean in wanted]
        else:
            # A module that became a package is compared with what it was.
            known = known or [record[f"{path}.py"] for record in records if f"{path}.py" in record]
            judgements += _judge_symbols(target, file, wanted, known)
    return judgements


def _judge_symbols(target: str, file: _File, wanted: Sequence[Lean], known: list[Any]) -> list[Judgement]:
    from .fingerprint import Source, misfit

    try:
        source = Source(file.data)
    except (SyntaxError, ValueError) as error:
        why = f"{file.name} cannot be read ({error})"
        return [Judgement(target, "", "incompatible", why, _all_lost(wanted), file.name)]
    judgements = []
    for lean in wanted:
        symbol = source.symbol(lean.symbol)
        entries = [entry["symbols"][lean.symbol] for entry in known if lean.symbol in entry["symbols"]]
        if symbol is None:
            verdict, why = "incompatible", f"there is no {lean.symbol}"
        elif symbol.hash in [hashed for hashed, _ in entries]:
            verdict, why = "same", ""
        else:
            signatures = [signature for _, signature in entries]
            why = misfit(lean.symbol, signatures, symbol.signature, lean.parameters, lean.called)
            verdict = "incompatible" if why else "changed"
        judgements.append(Judgement(target, lean.symbol, verdict, why, lean.lost if why else "", file.name))
    return judgements


def _all_lost(wanted: Sequence[Lean]) -> str:
    return "; ".join(dict.fromkeys(lean.lost for lean in wanted if lean.lost))


def releases_until(host: Installed) -> list[str]:
    """The recorded versions that are not newer than a host; all where its own cannot be ordered."""
    from packaging.version import Version

    if not is_version(host.version):
        return releases(host.package)
    return [version for version in releases(host.package) if Version(version) <= Version(host.version)]


# --- the check when a host is imported --------------------------------------------------------------------------------

_judged: dict[str, list[Judgement]] = {}
_warned: set[str] = set()
_lock = threading.Lock()


def check(module: ModuleType, leans: Callable[[], Leans]) -> list[Judgement]:
    """
    What the symbols of an upstream module are that has just been imported; [] if its file is that of the installed
    release, or there is no source to look at, as in a frozen application.

    Args:
        leans: what is leaned on in the module's host; asked only if a file is not the recorded one.
    """
    record, data = _installed_record(module), _source(module)
    entry = record.get(_name_in(record, module.__name__))
    if data is None or (entry is not None and hashlib.sha256(data).hexdigest() == entry["sha256"]):
        return []
    return [j for j in _judge_installed(module, leans) if j.target == module.__name__]


def gone(module: ModuleType, leans: Callable[[], Leans]) -> list[Judgement]:
    """The modules of an upstream module's host that are leaned on and not there, as a new release may have it."""
    record = _installed_record(module)
    root = (getattr(module, "__file__", None) or "").removesuffix(
        os.path.join(*_name_in(record, module.__name__).split("/"))
    )
    # In a zip file nothing is gone that its release has.
    all_there = record and (not os.path.isdir(root) or all(os.path.exists(os.path.join(root, name)) for name in record))
    if all_there:
        return []
    return [j for j in _judge_installed(module, leans) if j.symbol == "" and not _can_be_imported(j.target)]


def _can_be_imported(target: str) -> bool:
    """Whether there is such a module, be it without source, as in frozen applications."""
    try:
        return importlib.util.find_spec(target) is not None
    except (ImportError, ValueError):
        return False


def _installed_record(module: ModuleType) -> Mapping[str, Any]:
    host = module.__name__.partition(".")[0]
    return record_of(distribution(host), version_of(host) or "") or {}


def _source(module: ModuleType) -> bytes | None:
    file = getattr(module, "__file__", None) or ""
    get_data = getattr(module.__loader__, "get_data", None)
    try:
        return get_data(file) if get_data and file.endswith(".py") else None
    except OSError:
        return None


def _name_in(record: Mapping[str, Any], target: str) -> str:
    path = target.replace(".", "/")
    return f"{path}/__init__.py" if f"{path}/__init__.py" in record else f"{path}.py"


def _judge_installed(module: ModuleType, leans: Callable[[], Leans]) -> list[Judgement]:
    host = module.__name__.partition(".")[0]
    with _lock:
        if host not in _judged:
            found = installed(host)
            _judged[host] = [] if found is None else judge_once(found, leans())
        return _judged[host]


def judge_once(host: Installed, leans: Leans) -> list[Judgement]:
    """As `judge`, with what is remembered of the same files."""
    from .fingerprint import __file__ as how

    loader: Any = sys.modules[__name__].__loader__
    judges = [hashlib.sha256(loader.get_data(file)).hexdigest() for file in (__file__, how)]
    files = [(file.name, file.sha256) for target in sorted(leans) if (file := _find(host, target)) is not None]
    known = [record_of(host.package, version) for version in releases(host.package)]
    told = [host, sorted(leans.items()), files, known, judges, sys.version_info[:2]]
    key = hashlib.sha256(repr(told).encode()).hexdigest()[:32]
    directory = _cache_directory()
    path = None if directory is None else directory / f"{host.package}-{key}.json"
    remembered = _remembered(path, leans)
    if remembered is not None:
        return remembered
    judgements = judge(host, leans)
    if path is not None:
        _remember(path, json.dumps([asdict(judgement) for judgement in judgements]))
    return judgements


def _cache_directory() -> Path | None:
    """The user's, or None where the user has no home."""
    try:
        if sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or "")
            base = base if base.is_absolute() else Path.home() / ".cache"  # a relative one is to be ignored
    except RuntimeError:
        return None
    return base / "mlx-dllm-plugin" / "compat"


def _remembered(path: Path | None, leans: Leans) -> list[Judgement] | None:
    """What a file remembers, or None: not judged yet, or not what `_remember` writes."""
    try:
        if path is None or not path.is_file() or path.stat().st_size > 1 << 20:
            return None
        judgements = [Judgement(**entry) for entry in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    possible = {(target, symbol) for target, wanted in leans.items() for symbol in ("", *(x.symbol for x in wanted))}
    for judgement in judgements:
        if not all(isinstance(value, str) for value in asdict(judgement).values()):
            return None
        if (judgement.target, judgement.symbol) not in possible or judgement.verdict not in VERDICTS:
            return None
    return judgements or None


def _remember(path: Path, text: str) -> None:
    """Best effort: a home that cannot be written to costs the next process the same time again."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in files[:-_REMEMBERED]:
            old.unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def warn_of_drift(host: str) -> None:
    """Warn of everything that changed in a host, if it was judged and anything did: once per process."""
    changed = [j for j in _judged.get(host, []) if j.verdict == "changed"]
    if not changed or host in _warned:
        return
    _warned.add(host)
    files: dict[str, list[str]] = {}
    for judgement in changed:
        symbols = files.setdefault(judgement.file, [])
        symbols += [judgement.symbol] if judgement.symbol != "*" else []
    what = "; ".join(f"{file}: {', '.join(symbols)}" if symbols else file for file, symbols in files.items())
    first, last = TESTED[distribution(host)]
    warnings.warn(
        f"{describe_host(host)} is not what mlx-dllm-plugin was written for ({first} to {last}). Changed are {what}. "
        f"The patches apply, since signatures fit; check results, or install {distribution(host)}=={last}.",
        UpstreamDriftWarning,
        stacklevel=2,
    )
