"""`mlx-dllm infill TEXT`: fill the holes of a text. `[MASK:n]` is a hole of n tokens, `[MASK]` one of one token."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from ..checkpoint import affixes
from ..demo import demo_path
from ..errors import PREFIX, CheckpointError, DiffusionError, note
from ..options import DecodingOptions, add_arguments

HOLE = re.compile(r"\[MASK(?::([^\]]*))?\]")
LARGEST_HOLE = 100_000
_WITHOUT_MEANING = ("max_tokens", "canvas_length")


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "infill",
        help="fill holes in a text",
        description="Fill the holes of a text: [MASK:n] is a hole of n tokens, [MASK] one of a single token. "
        "The filled text goes to standard output.",
    )
    parser.add_argument("text", help="the text with its holes, or - to read it from standard input")
    parser.add_argument("--model", help="checkpoint, a2d run or hub id; default: the demo checkpoint")
    parser.add_argument("--tokenizer", help="directory with the tokenizer files, for a checkpoint that has none")
    parser.add_argument("--json", action="store_true", help="print JSON: text, holes, forwards, canvas")
    names = {f.name for f in dataclasses.fields(DecodingOptions)}
    group = parser.add_argument_group("decoding options")
    ours = add_arguments(group, wanted=lambda o: o.name in names and o.name not in _WITHOUT_MEANING)
    parser.set_defaults(run=lambda args: run(args, {name: getattr(args, name) for name in ours}))


def run(args: argparse.Namespace, values: dict[str, Any]) -> int:
    """Returns 0. Raises DiffusionError when there is nothing to fill, or it cannot be filled."""
    from ..decode import infill, spec_of
    from ..plan import in_force

    options = DecodingOptions(**values)
    parts = split(_read(args.text))
    if args.model is None:
        note("no --model given: using the demo checkpoint that comes with the plugin")
    model, tokenizer = _load(args.model or str(demo_path()), args.tokenizer)
    spec = spec_of(model)
    if spec.forced and options.mask_token_id is None:
        raise DiffusionError(
            f"{args.model} has no diffusion spec, and an autoregressive model cannot fill holes: if this one can, say "
            "which token is its mask with --mask-token-id."
        )
    canvas, masked = encode(tokenizer, parts, spec.mask_token_id or 0)
    start = time.perf_counter()
    result = infill(model, canvas, masked, options)
    seconds = time.perf_counter() - start
    tokens = iter([token for token, is_hole in zip(result.canvas, masked, strict=True) if is_hole])
    holes = [tokenizer.decode(list(islice(tokens, part))) for part in parts if isinstance(part, int)]
    filled = iter(holes)
    text = "".join(next(filled) if isinstance(part, int) else part for part in parts)
    settled = in_force(spec, options)
    if args.json:
        report = {
            "text": text,
            "holes": holes,
            "unmasking": settled.options.unmasking or spec.unmasking,
            "profile": settled.profile,
            "approximate": settled.approximate,
            "forwards": result.nfe,
            "columns": result.columns,
            "canvas": result.canvas,
            "seconds": seconds,
        }
        print(json.dumps(report, indent=2))
        return 0
    print(text)
    count = sum(masked)
    per_forward = f"{count / result.nfe:.2f} tokens per forward"
    parts_of_it = f"{_counted(count, 'token')} in {_counted(len(holes), 'hole')}, {_counted(result.nfe, 'forward')}"
    print(f"{PREFIX} {parts_of_it}, {per_forward}; profile {settled}", file=sys.stderr)
    return 0


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _read(text: str) -> str:
    try:
        text = sys.stdin.read() if text == "-" else text
        text.encode()
    except UnicodeError:
        raise DiffusionError("The text is not valid UTF-8.") from None
    return text


def _load(name: str, tokenizer: str | None) -> tuple[Any, Any]:
    from ..runtime import load

    try:
        model, wrapper, _ = load(name, tokenizer=tokenizer)
        return model, wrapper
    except DiffusionError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if Path(name).exists():
            raise CheckpointError(f"{name} cannot be loaded ({why}).") from error
        raise CheckpointError(
            f"{name} is neither a directory nor a checkpoint that can be had from the hub ({why})."
        ) from error


def split(text: str) -> list[str | int]:
    """The parts of a text: strings, and the lengths of its holes. Raises DiffusionError for a hole of no length."""
    parts: list[str | int] = []
    end = 0
    for match in HOLE.finditer(text):
        if match.start() > end:
            parts.append(text[end : match.start()])
        length = match[1] if match[1] is not None else "1"
        digits = length.lstrip("0") if length.isascii() and length.isdigit() else ""
        if not 1 <= len(digits) <= len(str(LARGEST_HOLE)) or int(digits) > LARGEST_HOLE:
            raise DiffusionError(
                f"{match[0]} is not a hole: write [MASK:n] with a number of tokens from 1 to {LARGEST_HOLE}."
            )
        parts.append(int(digits))
        end = match.end()
    if end < len(text):
        parts.append(text[end:])
    if not any(isinstance(part, int) for part in parts):
        raise DiffusionError("The text has no hole: mark one with [MASK:n], where n is its number of tokens.")
    return parts


def encode(tokenizer: Any, parts: list[str | int], mask_token_id: int) -> tuple[list[int], list[bool]]:
    """Token ids and which of them are holes. Texts between holes are encoded one by one; what the tokenizer puts around
    a text stands around all of them."""
    before, after = affixes(tokenizer)
    canvas, masked = [*before], [False] * len(before)
    for part in parts:
        is_hole = isinstance(part, int)
        ids = [mask_token_id] * part if isinstance(part, int) else tokenizer.encode(part, add_special_tokens=False)
        canvas += ids
        masked += [is_hole] * len(ids)
    return canvas + after, masked + [False] * len(after)
