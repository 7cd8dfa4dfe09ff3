"""`mlx-dllm verify CHECKPOINT`: this package's model of a checkpoint against a reference implementation, layer by
layer; its sampler against the reference's; or this device against the goldens that come with the package."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, check_files, check_model_type, has_tokenizer, open_checkpoint
from ..errors import DiffusionError, printable
from ..families import FAMILIES, Family
from ..spec import DiffusionSpec, detect, mask_token_id_of, resolve
from .info import locate

# Options that say something about one of the three ways only.
_OF_LAYERS = ("dtype", "yardstick", "tolerance", "length", "seed")
_OF_SAMPLER = ("max_tokens", "set")
_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "yardstick": "float64",
    "seed": 0,
    "max_tokens": 32,
    "set": [],
}


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="compare a checkpoint's model here with a reference implementation",
        description="Run a checkpoint here and in a PyTorch reference, layer by layer, with memory near one layer on "
        "both sides. The exit status is 1 when a part differs by more than the tolerance, or nothing can be compared.",
    )
    parser.add_argument("path", nargs="?", help="directory of a checkpoint or an a2d run, or a hub id in the cache")
    parser.add_argument("--json", action="store_true", help="print JSON")
    ways = parser.add_argument_group("instead of the layers")
    ways.add_argument("--sampler", action="store_true", help="compare the tokens of the reference's own generate")
    ways.add_argument("--self", action="store_true", help="check this device with the goldens of the package")
    what = parser.add_argument_group("the reference")
    what.add_argument(
        "--reference",
        metavar="{hf,PATH}",
        help="hf: transformers' own class of this computation (default); PATH: a Python file of yours with a model "
        "class, as FILE.py or FILE.py:Class, which is run",
    )
    what.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the modeling file that lies beside the weights: the default reference then",
    )
    layers = parser.add_argument_group("the layers")
    layers.add_argument("--dtype", choices=("float32", "checkpoint"), help="compute in (default: float32)")
    layers.add_argument(
        "--yardstick",
        choices=("float64", "mps", "none"),
        help="compare the reference with itself in float64, or on a Mac's GPU (default: float64)",
    )
    layers.add_argument(
        "--tolerance", type=float, metavar="N", help="allow N times the reference's own rounding (default: 30)"
    )
    layers.add_argument("--length", type=int, metavar="N", help="columns of the canvas (default: 64, or one block)")
    layers.add_argument("--seed", type=int, metavar="N", help="of what is masked (default: 0)")
    sampler = parser.add_argument_group("the sampler")
    sampler.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate (default: 32)")
    sampler.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="an argument of the reference's generate; may be repeated"
    )
    group = parser.add_argument_group("the checkpoint")
    group.add_argument("--prompt", metavar="TEXT", help="the text to compare on (default: a text of the package)")
    group.add_argument("--tokenizer", metavar="DIR", help="directory with the tokenizer files, where PATH has none")
    group.add_argument("--mask-token-id", type=int, metavar="N", help="id of the mask token, where PATH does not say")
    group.add_argument("--family", help="look at PATH as a checkpoint of this family")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when everything is as in the reference, else 1. Raises DiffusionError for what cannot be compared."""
    _check(args)
    if args.self:
        return _self(args)
    checkpoint = open_checkpoint(locate(args.path))
    check_model_type(checkpoint)
    family = detect(checkpoint, args.family)
    if family is None:
        raise DiffusionError(
            f"{checkpoint.path} is no diffusion checkpoint (model_type {checkpoint.config.get('model_type')!r}, no "
            f"family claims it): name one of {', '.join(FAMILIES.names())} with --family."
        )
    spec = resolve(checkpoint, family)
    mask_token_id = mask_token_id_of(spec, args.mask_token_id)
    return (_sampler if args.sampler else _layers)(args, checkpoint, family, spec, mask_token_id)


def _check(args: argparse.Namespace) -> None:
    """Raises DiffusionError for options that say nothing about what is asked for, and fills in defaults."""
    if args.self == (args.path is not None):
        raise DiffusionError(
            "--self checks this device with the package's own goldens: leave out the checkpoint."
            if args.self
            else "Give the directory of a checkpoint to verify, or --self."
        )
    if args.self and args.sampler:
        raise DiffusionError("--self and --sampler are two ways to verify: choose one.")
    of_checkpoint = ("reference", "prompt", "tokenizer", "mask_token_id", "family")
    without = {*_OF_LAYERS} if args.sampler else {*_OF_SAMPLER}
    if args.self:
        without = {*_OF_LAYERS, *_OF_SAMPLER, *of_checkpoint}
    given = [name for name in vars(args) if name in without and getattr(args, name) is not None]
    given += ["trust_remote_code"] * (args.self and args.trust_remote_code)
    if given:
        way = "--self" if args.self else "--sampler" if args.sampler else "the comparison of layers"
        raise DiffusionError(f"--{given[0].replace('_', '-')} says nothing about {way}: leave it out.")
    for name, value in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name, least in (("length", 2), ("max_tokens", 1), ("seed", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise DiffusionError(f"--{name.replace('_', '-')} must be {least} or more, got {getattr(args, name)}.")
    if args.tolerance is not None and not 0 < args.tolerance < math.inf:
        raise DiffusionError(f"--tolerance must be a number above 0, got {args.tolerance}.")


def _found(args: argparse.Namespace, checkpoint: Checkpoint, family: Family, spec: DiffusionSpec) -> Any:
    """The reference. Raises DiffusionError where there is none, or no torch."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise DiffusionError(
            f'The reference is computed by PyTorch, which cannot be imported ({error}): pip install "mlx-dllm-plugin'
            '[verify]".'
        ) from None
    from ..verify.find import find

    which = args.reference or ("own" if args.trust_remote_code else "hf")
    return find(checkpoint, family, spec, which, trust_remote_code=args.trust_remote_code)


def _tokenizer(args: argparse.Namespace, checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer, or None where it has none and none is needed."""
    source = Path(args.tokenizer) if args.tokenizer else checkpoint.path
    if not has_tokenizer(source):
        if args.tokenizer or args.prompt is not None or args.sampler:
            raise DiffusionError(f"{source} has no tokenizer files: give their directory with --tokenizer.")
        return None
    from ..runtime import load_tokenizer

    return load_tokenizer(source, trusted=args.trust_remote_code)


# Layers


def _layers(
    args: argparse.Namespace, checkpoint: Checkpoint, family: Family, spec: DiffusionSpec, mask_token_id: int
) -> int:
    import mlx.core as mx

    from ..layerwise import block_of, load_lazily
    from ..probes import TEXTS, canvases
    from ..verify.compare import TOLERANCE, compare
    from ..verify.hf import Files

    Files(checkpoint)  # refuses broken and quantized weights, before anything has to be installed for them
    found = _found(args, checkpoint, family, spec)
    from ..verify.reference import Reference

    reference = Reference(found, checkpoint, spec, dtype=args.dtype, yardstick=args.yardstick)
    texts = TEXTS if args.prompt is None else (args.prompt,)
    rows, marks = canvases(
        spec,
        mask_token_id,
        _tokenizer(args, checkpoint),
        rows=1,
        columns=args.length,
        seed=args.seed,
        texts=texts,
    )
    ids, masked = rows[0].tolist(), marks[0].tolist()
    began = time.perf_counter()
    model = load_lazily(checkpoint.path, family, spec)
    if args.dtype == "float32":
        model.set_dtype(mx.float32)
    dtype = "float32" if args.dtype == "float32" else _stored_dtype(checkpoint.path)
    parts = len(model.layers) + 3
    with _progress(2 * parts, quiet=args.json) as advance:
        trace = reference.trace(ids, lambda name: advance(f"reference, {name}"))
        mx.reset_peak_memory()
        result = compare(
            model,
            ids,
            masked,
            trace,
            tolerance=TOLERANCE if args.tolerance is None else args.tolerance,
            dtype=dtype,
            on_part=lambda name: advance(f"here, {name}"),
        )
    problems = list(result.problems)
    if reference.unused:
        problems.append(
            f"weights: {len(reference.unused)} of the checkpoint are in no part of the reference "
            f"({', '.join(reference.unused[:3])}, …)"
        )
    block = block_of(spec)
    report = {
        "path": str(checkpoint.path),
        "family": family.name,
        "reference": trace.reference,
        "dtype": dtype,
        "columns": len(ids),
        "block_length": block,
        "seed": args.seed,
        "parts": [_numbers(dataclasses.asdict(part)) for part in result.parts],
        "masked": result.masked,
        "agreeing": result.agreeing,
        "drift": _number(result.drift),
        "peak_bytes": {"reference": reference.peak_bytes, "here": mx.get_peak_memory()},
        "seconds": round(time.perf_counter() - began, 1),
        "problems": problems,
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_table(report, result, block)))
    return 1 if problems else 0


def _stored_dtype(path: Path) -> str:
    """What most of the tensors are stored in."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    headers = check_files(path).values()
    found = [names[entry["dtype"]] for header in headers for entry in header.values() if entry.get("dtype") in names]
    return statistics.mode(found or ["float32"])


def _numbers(part: dict[str, Any]) -> dict[str, Any]:
    return {name: [_number(v) for v in value] if isinstance(value, tuple) else value for name, value in part.items()}


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _table(report: dict[str, Any], result: Any, block: int | None) -> Iterator[str]:
    attention = "bidirectional" if block is None else f"blocks of {block}"
    yield printable(report["path"])
    yield (
        f"{report['family']}, {report['dtype']}, {attention}, {report['columns']} columns of which {report['masked']} "
        "are masked"
    )
    yield printable(f"reference: {report['reference']}")
    yield ""
    with_experts = any(part.experts is not None for part in result.parts)
    head = ("max error", "rounding", "allowed", "mean error", "rounding", "allowed")
    rows = [("part", *head, *(["same experts"] * with_experts), "")]
    for part in result.parts:
        columns = zip(part.error, part.rounding or (None, None), part.allowed, strict=True)
        numbers = ("-" if value is None else f"{value:.1e}" for column in columns for value in column)
        experts = ["-" if part.experts is None else f"{100 * part.experts:.1f} %"] * with_experts
        rows.append((part.name, *numbers, *experts, "OVER" if part.problem else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join((first, *others)).rstrip()
    yield ""
    yield (
        f"argmax on masked positions: {report['agreeing']} of {report['masked']} the same; logits end to end differ by "
        f"up to {result.drift:.1e}"
    )
    if report["dtype"] != "float32":
        yield f"{report['dtype']} rounds in every layer, and end to end these errors add up: float32 tells faults apart"
    peak = report["peak_bytes"]
    yield (
        f"memory: up to {_size(peak['reference'])} of weights in the reference, {_size(peak['here'])} here; "
        f"{report['seconds']} s"
    )
    for problem in report["problems"]:
        yield printable(f"problem: {problem}")
    count = len(report["problems"])
    yield f"{count or 'No'} problem{'s' * (count != 1)}."


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextlib.contextmanager
def _progress(total: int | None, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal's stderr, or a count where the total is not known; nothing elsewhere."""
    from tqdm import tqdm

    silent = quiet or not sys.stderr.isatty()
    shape = "{n_fmt} {desc}" if total is None else "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} {desc}"
    with tqdm(total=total, disable=silent, leave=False, bar_format=shape, mininterval=0) as bar:

        def advance(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        yield advance


# The sampler


def _sampler(
    args: argparse.Namespace, checkpoint: Checkpoint, family: Family, spec: DiffusionSpec, mask_token_id: int
) -> int:
    from ..layerwise import load_lazily
    from ..probes import TEXTS
    from ..tokenizers import encode_prompt
    from ..verify.sampler import compare

    settings = dict(_assignment(text) for text in args.set)
    found = _found(args, checkpoint, family, spec)
    tokenizer = _tokenizer(args, checkpoint)
    prompt = encode_prompt(tokenizer, TEXTS[0] if args.prompt is None else args.prompt, spec.eos_token_ids)
    spec = dataclasses.replace(spec, mask_token_id=mask_token_id)
    model = load_lazily(checkpoint.path, family, spec)
    result = compare(found, model, spec, prompt, max_tokens=args.max_tokens, settings=settings, function=found.function)
    file = Path(found.module.__file__ or found.name).name
    if args.json:
        print(json.dumps({"path": str(checkpoint.path), **dataclasses.asdict(result)}, indent=2, default=str))
        return 1 if result.difference else 0
    for line in (
        str(checkpoint.path),
        f"reference: {result.function} of {file}, with the logits of the model here",
        f"its settings: {_listed(result.settings)}",
        f"the same here: {_listed({'unmasking': spec.unmasking, **result.our_settings})}",
        f"forwards: {result.forwards} there, {result.our_forwards} here",
        *(f"note: {text}" for text in result.notes),
    ):
        print(printable(line))
    if not result.difference:
        print(f"All {len(result.our_tokens)} tokens are the same.")
        return 0
    print(printable(f"there: {tokenizer.decode(result.reference_tokens)!r}"))
    print(printable(f"here:  {tokenizer.decode(result.our_tokens)!r}"))
    print(f"problem: {result.difference}")
    return 1


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "-"


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise DiffusionError(f"--set must be NAME=VALUE, such as --set steps=16, got {text!r}.")
    return name, value


# This device


def _self(args: argparse.Namespace) -> int:
    from ..verify.selfcheck import block, run

    began = time.perf_counter()
    with _progress(None, quiet=args.json) as advance:
        rows = run(lambda row: advance(f"{row.checkpoint} {row.case}"))
    failed = sum(bool(row.problem) for row in rows)
    if args.json:
        report = {"rows": [dataclasses.asdict(row) for row in rows], "matched": len(rows) - failed, "of": len(rows)}
        print(json.dumps(report, indent=2))
    else:
        print(block(rows, time.perf_counter() - began))
    return 1 if failed else 0
