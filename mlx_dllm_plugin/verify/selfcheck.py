"""This device against the goldens that come with the package: logits and decoded tokens of reference implementations.

One folder of ``goldens/`` is one tiny checkpoint: config.json, generation_config.json, model.safetensors, logits.npy
and golden.json, which says whose outputs these are (``produced_by``). ``tests/goldens/export.py`` writes them all.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .. import __version__
from ..checkpoint import open_checkpoint, read_json
from ..decode import DecodingResult, decode, family_on
from ..errors import CheckpointError, DiffusionError, printable
from ..layerwise import caches, load_lazily
from ..options import DecodingOptions
from ..spec import detect, resolve

GOLDENS = Path(__file__).parent / "goldens"

_LONGEST = 300  # characters of a problem
_AGAIN = "reinstall the package."
_FOLDERS = re.compile(r"(?<![\w.])(?:/[^\s/'\":]+)+/")  # of an absolute path


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


# What golden.json and its cases must have.
_KEYS: dict[str, Callable[[Any], bool]] = {
    "produced_by": lambda value: isinstance(value, dict),
    "tolerance": lambda value: _is_number(value) and value > 0,
    "forward": lambda value: isinstance(value, list),
    "decode": lambda value: isinstance(value, list),
}
_CASES: dict[str, dict[str, Callable[[Any], bool]]] = {
    "forward": {
        "name": lambda value: isinstance(value, str),
        "ids": _is_ids,
        "block_length": lambda value: value is None or (type(value) is int and value > 0),
        "positions": _is_ids,
    },
    "decode": {
        "name": lambda value: isinstance(value, str),
        "prompt_ids": _is_ids,
        "options": lambda value: isinstance(value, dict),
        "tokens": lambda value: isinstance(value, list),
        "nfe": lambda value: type(value) is int,
    },
}


@dataclass(frozen=True)
class Row:
    """
    One compared case.

    Args:
        kind: ``forward`` or ``decode``.
        problem: what does not match, or "".
        error: largest absolute difference of the logits of a forward; None: there are none to compare.
        allowed: the error that is no problem; None of a decode, whose tokens and forwards must be equal.
        outputs_of: what the reference is.
    """

    checkpoint: str
    kind: str
    case: str
    problem: str = ""
    error: float | None = None
    allowed: float | None = None
    outputs_of: str = ""


def run(
    on_row: Callable[[Row], None] = lambda row: None,
    device: mx.Device | mx.DeviceType | None = None,
    *,
    folder: Path = GOLDENS,
) -> list[Row]:
    """
    Compare every golden. What goes wrong in one is its row's problem, and the others are still compared.

    Args:
        on_row: called with each row when it is there.
        device: where to compute, such as ``mx.cpu``; default: MLX's default device.
        folder: the folder of the goldens; default: those of the package.

    Raises:
        DiffusionError: a device that MLX does not have here.
        CheckpointError: no goldens, or a golden.json that cannot be read.
    """
    found = sorted(file.parent for file in folder.glob("*/golden.json"))
    if not found:
        raise CheckpointError(f"{folder} holds no goldens: install mlx-dllm-plugin again.")
    rows = []
    with _on(device):
        for checkpoint in found:
            for row in _rows(checkpoint):
                rows.append(row)
                on_row(row)
    return rows


@contextlib.contextmanager
def _on(device: mx.Device | mx.DeviceType | None) -> Iterator[None]:
    """MLX's default device is another one inside."""
    before = mx.default_device()
    if device is not None:
        try:
            mx.set_default_device(device)
        except ValueError as error:
            raise DiffusionError(f"MLX has no {device} here: leave the device out, or give mx.cpu.") from error
    try:
        yield
    finally:
        mx.set_default_device(before)


def _rows(folder: Path) -> Iterator[Row]:
    """All cases of one checkpoint."""
    golden = read_json(folder / "golden.json")
    wrong = _wrong(golden, _KEYS)
    if wrong:
        yield Row(folder.name, "golden", "golden.json", f"golden.json of {folder.name} {wrong}: {_AGAIN}")
        return
    allowed, whose = golden["tolerance"], _outputs_of(golden["produced_by"])
    try:
        model, logits = _load(folder), np.load(folder / "logits.npy")
        failed = None
    except Exception as raised:
        failed = _said(raised, folder)
    first = 0
    for kind in _CASES:
        if not golden[kind]:
            yield Row(folder.name, kind, "golden.json", f"golden.json of {folder.name} has no cases: {_AGAIN}")
        for number, case in enumerate(golden[kind]):
            wrong = _wrong(case, _CASES[kind])
            if wrong:
                problem = f"{kind} {number} of golden.json of {folder.name} {wrong}: {_AGAIN}"
                yield Row(folder.name, kind, str(number), problem, None, None, whose)
                continue
            error, problem = None, failed or ""
            try:
                if failed is None and kind == "forward":
                    count = len(case["positions"])
                    expected, first = logits[first : first + count], first + count
                    error, problem = _forward(model, case, expected, allowed)
                elif failed is None:
                    problem = _decode(model, case)
            except Exception as raised:
                problem = _said(raised, folder)
            limit = allowed if kind == "forward" else None
            yield Row(folder.name, kind, case["name"], problem, error, limit, whose)


def _wrong(given: Any, keys: Mapping[str, Callable[[Any], bool]]) -> str:
    """What is wrong with an object of golden.json, or ""."""
    if not isinstance(given, dict):
        return "is no object"
    missing = next((key for key in keys if key not in given), None)
    if missing is not None:
        return f"has no {missing}"
    bad = next((key for key, valid in keys.items() if not valid(given[key])), None)
    return "" if bad is None else f"has a {bad} that cannot be compared"


def _outputs_of(produced_by: Mapping[str, Any]) -> str:
    """What the reference is, in a few words: its kind, or the repository of its code."""
    found = next((produced_by[key] for key in ("kind", "repository", "repo") if produced_by.get(key)), "unknown")
    return printable(str(found)).replace("|", "/")[:_LONGEST]


def _load(folder: Path) -> Any:
    checkpoint = open_checkpoint(folder)
    family = detect(checkpoint)
    if family is None:
        raise CheckpointError(f"no family claims {folder}, which is a diffusion checkpoint: its config.json changed.")
    return load_lazily(folder, family, resolve(checkpoint, family))


def _forward(model: Any, case: dict[str, Any], expected: np.ndarray, allowed: float) -> tuple[float, str]:
    """The largest difference of the logits at some positions, and what is wrong with it."""
    wrong = _outside(case, model.diffusion_spec.vocab_size)
    if wrong:
        raise CheckpointError(f"{wrong}: {_AGAIN}")
    family, ids = family_on(model), mx.array([case["ids"]])
    states = family.hidden(model, ids, caches(model, ids.shape[1], case["block_length"]))
    found = np.array(family.head(model, states).astype(mx.float32))[0, case["positions"]]
    if expected.shape != found.shape:
        raise CheckpointError(f"logits.npy has {list(expected.shape)} for {list(found.shape)} logits: {_AGAIN}")
    if not np.isfinite(expected).all():
        raise CheckpointError(f"logits.npy has numbers that are not finite: {_AGAIN}")
    differences = np.abs(found - expected)
    error = float(differences.max())
    if error <= allowed:
        return error, ""
    row, token = np.unravel_index(np.argmax(differences), differences.shape)
    where = f"position {case['positions'][row]}, token {token}"
    return error, f"logits differ by {error:.1e} ({where}), {allowed:.0e} allowed"


def _outside(case: dict[str, Any], vocab_size: int) -> str:
    """Which id of a forward is none of the model, or which position none of its ids, or ""."""
    for what, values, limit in (("id", case["ids"], vocab_size), ("position", case["positions"], len(case["ids"]))):
        for value in values:
            if not 0 <= value < limit:
                return f"{what} {value} is not one of the {limit} that there are"
    return ""


def _decode(model: Any, case: dict[str, Any]) -> str:
    """What is wrong with the tokens, or with the number of forwards."""
    result: DecodingResult = decode(model, case["prompt_ids"], DecodingOptions(**case["options"]))
    found, expected = list(result.tokens), case["tokens"]
    if result.finish_reason == "stop":
        found.append(result.canvas[len(case["prompt_ids"]) + len(found)])
    if found != expected:
        wrong = [i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]]
        if not wrong:
            return f"{len(found)} tokens, {len(expected)} expected"
        first = wrong[0]
        return (
            f"{len(wrong)} of {len(expected)} tokens differ, the first at {first} "
            f"({found[first]}, {expected[first]} expected)"
        )
    return "" if result.nfe == case["nfe"] else f"{result.nfe} forwards, {case['nfe']} expected"


def _said(error: Exception, folder: Path) -> str:
    """An error in one line, without the folders in it: they may say who the user is."""
    text = str(error) if isinstance(error, DiffusionError) else f"{type(error).__name__}: {error}"
    for place in (folder.parent, Path.home()):
        text = text.replace(f"{place}/", "")
    return _FOLDERS.sub("", printable(" ".join(text.split())))[:_LONGEST]


def block(rows: Sequence[Row], seconds: float, device: mx.Device | mx.DeviceType | None = None) -> str:
    """
    Markdown to paste into a report. Nothing in it says whose machine it is.

    Args:
        rows: what ``run`` returned.
        seconds: how long it took.
        device: as given to ``run``.
    """
    with _on(device):
        is_gpu, lines = _is_gpu(), ["### mlx-dllm verify --self", "", *_machine(seconds), ""]
    lines += ["| checkpoint | matched | largest logit difference | allowed | outputs of |", "|---|---|---|---|---|"]
    largest = {}
    for name in dict.fromkeys(row.checkpoint for row in rows):
        own = [row for row in rows if row.checkpoint == name]
        errors = [row.error for row in own if row.error is not None]
        largest[name] = f"{np.max(errors):.1e}" if errors else "not compared"
        allowed = max((row.allowed for row in own if row.allowed is not None), default=None)
        whose = next((row.outputs_of for row in own if row.outputs_of), "-")
        limit = "-" if allowed is None else f"{allowed:.0e}"
        cells = [name, f"{_matched(own)} of {len(own)}", largest[name], limit, whose]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Computed in float32. Tokens and the number of forwards must be equal to the reference's.", ""]
    failed = [row for row in rows if row.problem]
    for row in failed:
        beside = f" (largest logit difference of the checkpoint: {largest[row.checkpoint]})"
        lines.append(f"- FAIL {row.checkpoint}, {row.kind} {row.case}: {row.problem}{beside * (row.kind == 'decode')}")
    if failed and is_gpu:
        lines += ["", "Some GPUs multiply float32 matrices with fewer bits: the CPU's result says whether it is that."]
    if failed:
        lines.append("")
    return "\n".join([*lines, f"matched {_matched(rows)} of {len(rows)}"])


def _matched(rows: Sequence[Row]) -> int:
    return sum(not row.problem for row in rows)


def _is_gpu() -> bool:
    return mx.default_device().type != mx.cpu


def _machine(seconds: float) -> Iterator[str]:
    """Versions, the machine and MLX's default device."""
    from ..commands.checks.environment import memory_of, system

    versions = [f"mlx-dllm-plugin {__version__}"]
    for name in ("mlx", "mlx-lm", "mlx-vlm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    yield f"- {', '.join(versions)}, Python {platform.python_version()}"
    yield f"- {', '.join(part for part in (next(system()).value, _chip()) if part)}"
    memory, whose = memory_of(mx)
    yield f"- {mx.default_device()}, {memory / 2**30:.0f} GiB {whose}, {seconds:.1f} s"


def _chip() -> str:
    """The name of the chip, or ""."""
    if sys.platform != "darwin":
        info = mx.device_info() if hasattr(mx, "device_info") else {}
        return printable(str(info.get("device_name", "")))
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return printable(subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip())
    except (OSError, subprocess.SubprocessError):
        return ""
