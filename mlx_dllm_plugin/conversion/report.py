"""What a conversion cost: size, and how far the copy's logits are from those of the model it was made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import check_files, read_json
from ..errors import note
from ..families import Family
from ..spec import DiffusionSpec, mask_token_id_of

if TYPE_CHECKING:
    import numpy as np


MOST_PROBLEMS = 100  # of a battery: the first ones


@dataclass(frozen=True)
class Side:
    """
    One of the two models.

    Args:
        size: bytes of the files of its weights.
        bits_per_weight: bits of its tensors by the number of the model's weights; None where that is not known.
        battery: what it made of the checkpoint's battery, or None.
    """

    size: int
    bits_per_weight: float | None
    battery: Any = None


@dataclass(frozen=True)
class Difference:
    """
    Logits of the copy against those of the source, where masked positions are predicted.

    Args:
        largest, mean: of the absolute differences of all their logits.
        changed: share of the positions where another token has the highest logit.
        positions: how many were looked at.
    """

    largest: float
    mean: float
    changed: float
    positions: int


@dataclass(frozen=True)
class Report:
    """What a conversion cost; ``difference`` is None where it could not be measured."""

    source: Side
    copy: Side
    difference: Difference | None

    def table(self) -> str:
        """Aligned text: a line with names, one of the source and one of the copy."""
        far = self.difference
        head = ["", "size", "bits per weight"]
        rows = [[name, _size(s.size), _number(s.bits_per_weight)] for name, s in self._sides()]
        if far is not None:
            head += ["max logit difference", "mean difference", f"changed argmax of {far.positions}"]
            rows[0] += ["-", "-", "-"]
            rows[1] += [f"{far.largest:.4g}", f"{far.mean:.4g}", f"{far.changed:.1%}"]
        if any(side.battery is not None for _, side in self._sides()):
            head += ["exact", "doubled words", "unknown words"]
            for row, (_, side) in zip(rows, self._sides(), strict=True):
                row += _outcome(side.battery)
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join(lines)

    def _sides(self) -> list[tuple[str, Side]]:
        return [("source", self.source), ("copy", self.copy)]


def _size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _outcome(outcome: Any) -> list[str]:
    if outcome is None:
        return ["-", "-", "-"]
    words = outcome.words
    return [f"{outcome.exact} of {outcome.of}", *(f"{n} of {words}" for n in (outcome.doubled, outcome.unknown))]


def measure(
    source: Path,
    copy: Path,
    family: Family,
    spec: DiffusionSpec,
    tokenizers: tuple[Any, Any],
) -> Report:
    """
    Compare a copy with its source. What cannot be measured is said in a line and left out.

    Args:
        source, copy: directories with config.json and weights.
        spec: of both.
        tokenizers: of source and copy.
    """
    count = read_json(copy / "model.safetensors.index.json", required=False).get("metadata", {}).get("total_parameters")
    far = _attempt("The logits", lambda: difference(source, copy, family, spec, tokenizers[0]))
    outcomes = _attempt("The battery", lambda: _batteries(source, copy, family, spec, tokenizers)) or (None, None)
    first, second = (_side(path, count, outcome) for path, outcome in zip((source, copy), outcomes, strict=True))
    return Report(first, second, far)


def _attempt(what: str, do: Callable[[], Any]) -> Any:
    try:
        return do()
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        note(f"{what} of source and copy could not be compared ({type(error).__name__}: {why}); the copy stands.")
        return None


def _side(path: Path, count: int | None, outcome: Any) -> Side:
    """What is stored of a model with so many weights."""
    headers = check_files(path)
    places = {name: entry["data_offsets"] for file in headers.values() for name, entry in file.items()}
    bits = 8 * sum(end - start for start, end in places.values())
    return Side(sum((path / name).stat().st_size for name in headers), bits / count if count else None, outcome)


def difference(source: Path, copy: Path, family: Family, spec: DiffusionSpec, tokenizer: Any) -> Difference:
    """
    One forward of each model in float32 over the same canvases, layer by layer, so that the memory is near that of one
    layer.

    Raises:
        DiffusionError: the mask is not known, or the tokenizer makes nothing of the texts.
    """
    import numpy as np

    from ..probes import canvases

    ids, masked = canvases(spec, mask_token_id_of(spec, None), tokenizer)
    print(f"[INFO] Comparing the logits of both at {masked.sum()} masked positions", flush=True)
    before, after = (_logits(path, family, spec, ids, masked) for path in (source, copy))
    changed = float((before.argmax(-1) != after.argmax(-1)).mean())
    after -= before
    far = np.abs(after, out=after)
    return Difference(float(far.max()), float(far.mean(dtype=np.float64)), changed, len(far))


def _logits(path: Path, family: Family, spec: DiffusionSpec, ids: np.ndarray, masked: np.ndarray) -> np.ndarray:
    """Logits [N, V] where the N masked positions are predicted."""
    import mlx.core as mx
    import numpy as np

    from ..layerwise import forward

    rows, places = np.nonzero(masked)
    model = _quick(path, family, spec)
    model.set_dtype(mx.float32)  # what 16 bits round is no difference
    found = forward(model, mx.array(ids), release=True)
    chosen = np.array(found[mx.array(rows), mx.array(places - (spec.logits == "shifted"))])
    del found
    mx.clear_cache()
    return chosen


def _batteries(
    source: Path, copy: Path, family: Family, spec: DiffusionSpec, tokenizers: tuple[Any, Any]
) -> tuple[Any, Any] | None:
    """What both models make of the source's battery, or None without one."""
    from .. import battery

    found = battery.find(source)
    if found is None:
        return None
    count = min(len(found.problems), MOST_PROBLEMS)
    of = f" (of {len(found.problems)})" if count < len(found.problems) else ""
    print(f"[INFO] Asking both {count} problems{of} of {found.path.name}", flush=True)
    first, second = (
        battery.run(_quick(path, family, spec), tokenizer, found, limit=MOST_PROBLEMS)
        for path, tokenizer in zip((source, copy), tokenizers, strict=True)
    )
    return first, second


def _quick(path: Path, family: Family, spec: DiffusionSpec) -> Any:
    """A model that decodes. MLX's CPU backend takes twenty times as long for quantized weights as for their values."""
    import mlx.core as mx
    from mlx_lm import utils

    from ..layerwise import load_lazily

    model = load_lazily(path, family, spec)
    return utils.dequantize_model(model) if mx.default_device() == mx.Device(mx.cpu) else model
