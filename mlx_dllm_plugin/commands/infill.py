"""`mlx-dllm infill TEXT`: fill the holes of a text. `[MASK:n]` is a hole of n tokens, `[MASK]` one of one token."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from typing import Any

from ..demo import demo_path
from ..errors import PREFIX, DiffusionError, note
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
    from ..decode import infill
    from ..runtime import load

    options = DecodingOptions(**values)
    parts = split(sys.stdin.read() if args.text == "-" else args.text)
    if args.model is None:
        note("no --model given: using the demo checkpoint that comes with the plugin")
    model, tokenizer, _ = load(args.model or demo_path(), tokenizer=args.tokenizer)
    canvas, masked = encode(tokenizer, parts, model.diffusion_spec.mask_token_id or 0)
    start = time.perf_counter()
    result = infill(model, canvas, masked, options)
    seconds = time.perf_counter() - start
    holes = [tokenizer.decode(ids) for ids in _holes(result.canvas, masked)]
    filled = iter(holes)
    text = "".join(next(filled) if isinstance(part, int) else part for part in parts)
    if args.json:
        report = {"text": text, "holes": holes, "forwards": result.nfe, "canvas": result.canvas, "seconds": seconds}
        print(json.dumps(report, indent=2))
        return 0
    print(text)
    count = sum(masked)
    per_forward = f"{count / result.nfe:.2f} tokens per forward"
    print(f"{PREFIX} {count} tokens in {len(holes)} holes, {result.nfe} forwards, {per_forward}", file=sys.stderr)
    return 0


def split(text: str) -> list[str | int]:
    """The parts of a text: strings, and the lengths of its holes. Raises DiffusionError for a hole of no length."""
    parts: list[str | int] = []
    end = 0
    for match in HOLE.finditer(text):
        if match.start() > end:
            parts.append(text[end : match.start()])
        length = match[1] if match[1] is not None else "1"
        if not (length.isascii() and length.isdigit() and 1 <= int(length) <= LARGEST_HOLE):
            raise DiffusionError(
                f"{match[0]} is not a hole: write [MASK:n] with a number of tokens from 1 to {LARGEST_HOLE}."
            )
        parts.append(int(length))
        end = match.end()
    if end < len(text):
        parts.append(text[end:])
    if not any(isinstance(part, int) for part in parts):
        raise DiffusionError("The text has no hole: mark one with [MASK:n], where n is its number of tokens.")
    return parts


def encode(tokenizer: Any, parts: list[str | int], mask_token_id: int) -> tuple[list[int], list[bool]]:
    """Token ids and which of them are holes. Texts between holes are encoded one by one."""
    canvas: list[int] = []
    masked: list[bool] = []
    for number, part in enumerate(parts):
        is_hole = isinstance(part, int)
        ids = (
            [mask_token_id] * part if isinstance(part, int) else tokenizer.encode(part, add_special_tokens=number == 0)
        )
        canvas += ids
        masked += [is_hole] * len(ids)
    return canvas, masked


def _holes(canvas: list[int], masked: list[bool]) -> list[list[int]]:
    """The ids of each run of masked positions."""
    runs: list[list[int]] = []
    for i, (token, is_hole) in enumerate(zip(canvas, masked, strict=True)):
        if is_hole and (i == 0 or not masked[i - 1]):
            runs.append([])
        if is_hole:
            runs[-1].append(token)
    return runs
