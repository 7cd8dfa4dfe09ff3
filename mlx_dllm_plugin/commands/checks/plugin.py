"""What the plugin changes in the hosts, and the families and rules it knows."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from ...registry import Registry
from . import Check, describe, problem, warning
from .environment import PLUGIN, cause, fault_of, installed, left_out, pip, reinstall, tested
from .startup import opted_out, way_back

_UPDATE = f"update that package, or {pip('uninstall')} it"


def host(name: str) -> Iterator[Check]:
    """A line for everything that is not as it should be, and one for each group of upstream modules that are alike."""
    from ... import patches
    from ...compat import describe_host, distribution

    if not installed(name):
        return
    if why := cause(distribution(name)) or (distribution(name) if fault_of(name) else ""):
        yield left_out(describe_host(name), why)
        return
    judgements = patches.judge(name)
    faults = _import_all(name) if patches.is_active() else {}
    records = [record for record in patches.status() if record.target.startswith(f"{name}.")]
    way_out = tested(name)
    found = [
        *_incompatible(judgements, way_out),
        *(_disabled(judgements, records, way_out) if patches.is_active() else ()),
        *_unreadable(records),
        *_changed(judgements, f"check results, or {way_out}"),
    ]
    yield from (check for _, check in found)
    as_they_should = [target for target in _targets(judgements, records) if target not in dict(found)]
    for group, targets in _groups(as_they_should, judgements, records, faults).items():
        line = f"{group}: {', '.join(targets)}"
        off = opted_out() if group.endswith(", off") else ""
        yield warning(describe_host(name), line, way_back(off)) if off else Check(describe_host(name), line)


def _incompatible(judgements: list[Any], advice: str) -> Iterator[tuple[str, Check]]:
    for judgement in judgements:
        if judgement.verdict == "incompatible":
            lost = f"; without it {judgement.lost}" if judgement.lost else ""
            text = f"incompatible, {judgement.detail or 'it does not fit'}{lost}"
            yield judgement.target, problem(_dotted(judgement), text, advice)


def _disabled(judgements: list[Any], records: list[Any], advice: str) -> Iterator[tuple[str, Check]]:
    """The changes that are off for another reason than those told already."""
    misfits = [j for j in judgements if j.verdict == "incompatible"]
    told = {(j.target, what) for j in misfits for what in (j.symbol, j.detail)}
    for record in records:
        reasons = {(record.target, what) for what in ("", record.symbol, record.detail)}
        if record.state == "disabled" and not reasons & told:
            yield record.target, problem(_dotted(record), f"off, {record.detail}", advice)


def _unreadable(records: list[Any]) -> Iterator[tuple[str, Check]]:
    """The modules that were not imported whose patch would fail then."""
    from ...patches import patch_of

    for target in [record.target for record in records if record.state == "pending"]:
        try:
            patch_of(target)
        except Exception as error:
            yield target, problem(target, f"its patch cannot be read: {describe(error)}", reinstall())


def _changed(judgements: list[Any], advice: str) -> Iterator[tuple[str, Check]]:
    symbols: dict[str, list[str]] = {}
    for judgement in judgements:
        if judgement.verdict == "changed":
            symbols.setdefault(judgement.target, []).append(judgement.symbol.replace("*", "the file"))
    for target, names in symbols.items():
        yield target, warning(target, f"changed: {', '.join(names)}; signatures fit", advice)


def _dotted(found: Any) -> str:
    return f"{found.target}.{found.symbol}" if found.symbol else found.target


def _targets(judgements: list[Any], records: list[Any]) -> list[str]:
    return list(dict.fromkeys([*(j.target for j in judgements), *(r.target for r in records)]))


def _groups(targets: list[str], judgements: list[Any], records: list[Any], faults: dict[str, str]) -> dict[str, Any]:
    """Verdict and state -> the modules that have them."""
    from ...compat import VERDICTS

    groups: dict[str, list[str]] = {}
    for target in targets:
        verdicts = [j.verdict for j in judgements if j.target == target]
        states = [r.state for r in records if r.target == target]
        verdict = max(verdicts, key=VERDICTS.index) if verdicts else ""
        group = f"{verdict}, {_state(states, faults.get(target, ''))}" if verdict else "not in this release"
        groups.setdefault(group, []).append(target.partition(".")[2])
    return groups


def _import_all(name: str) -> dict[str, str]:
    """Import the modules that are patched, so that it is done. Returns why some cannot be; the evaluations are left
    out, which import what takes seconds."""
    from ... import patches

    faults = {}
    for target in dict.fromkeys(record.target for record in patches.status() if record.state == "pending"):
        if target.startswith(f"{name}.") and ".evals." not in target:
            try:
                importlib.import_module(target)
            except (Exception, SystemExit) as error:
                faults[target] = describe(error)
    return faults


def _state(states: list[str], fault: str) -> str:
    if fault:
        return f"not imported here ({fault})"
    if not states:
        return "used as they are"
    return {"pending": "not imported yet", "disabled": "off"}.get(states[0], states[0])


def registered(registry: Registry[Any], several: str) -> Iterator[Check]:
    """What is registered, with the packages it comes from."""
    packages: dict[str, list[str]] = {}
    for name in registry.names():
        packages.setdefault(registry.package(name), []).append(name)
    try:
        registry.builtin()
    except Exception as error:
        yield problem(several, f"one of ours cannot be imported ({describe(error)})", reinstall())
        return
    for package, names in sorted(packages.items(), key=lambda item: item[0] != PLUGIN):
        yield Check(several, f"{len(names)} from {package}: {', '.join(names)}")
    for name, fault in registry.faults().items():
        is_ours = f" is left out. {PLUGIN} " in fault
        yield problem(f"{registry.what} {name}", fault, reinstall() if is_ours else _UPDATE)


def families() -> Iterator[Check]:
    from ...families import FAMILIES

    yield from registered(FAMILIES, "families")


def rules() -> Iterator[Check]:
    from ...samplers import RULES

    yield from registered(RULES, "unmasking rules")


PATCHES = {"patches of mlx-lm": lambda: host("mlx_lm"), "patches of mlx-vlm": lambda: host("mlx_vlm")}
REGISTERED = {"families": families, "unmasking rules": rules}
