"""`mlx-dllm info PATH`: the spec of a checkpoint and where each value came from, or what is missing."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, check_model_type, check_weights, exists, has_tokenizer, open_checkpoint
from ..errors import CheckpointError, DiffusionError, printable
from ..families import FAMILIES, Family
from ..families.profiles import cost
from ..options import approximations
from ..spec import DiffusionSpec, check_mask_token_id, detect, resolve


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("info", help="show how a checkpoint is decoded, and why")
    parser.add_argument("path", help="directory of a checkpoint or an a2d run, or a hub id that is in the local cache")
    parser.add_argument("--family", help="look at it as one of this family")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the checkpoint can be decoded as it is; 1 otherwise."""
    checkpoint = open_checkpoint(locate(args.path))
    check_model_type(checkpoint)
    family = detect(checkpoint, args.family)
    problems = [text for text in (weights_problem(checkpoint.path), tokenizer_problem(checkpoint.path)) if text]
    if family is None:
        kind = checkpoint.config.get("model_type")
        known = ", ".join(FAMILIES.names())
        if args.json:
            print(json.dumps({"path": str(checkpoint.path), "spec": None, "problems": problems}, indent=2))
            return 1
        print(f"{checkpoint.path}\nNo diffusion spec: model_type {kind!r} and nothing that a family claims.")
        print(f"mlx-lm decodes it autoregressively, as before. Families: {known} (force one with --family).")
        return 1
    spec = resolve(checkpoint, family)
    problems += spec_problems(checkpoint, family, spec)
    if args.json:
        values = {**dataclasses.asdict(spec), "defaults": dict(spec.defaults), "sources": dict(spec.sources)}
        values["approximate"] = _inexact(spec)
        print(json.dumps({"path": str(checkpoint.path), "spec": values, "problems": problems}, indent=2))
    else:
        _print(checkpoint, spec, problems)
    return 1 if problems else 0


def locate(name: str) -> Path:
    """The directory of a path or of a hub id in the local cache."""
    path = Path(name)
    if exists(path) or name.count("/") > 1 or name.startswith((".", "/", "~")):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:
        raise CheckpointError(f"{name} is neither a directory nor a hub id in the local cache.") from error


def weights_problem(path: Path) -> str:
    """What is wrong with the files of the weights, or ""."""
    try:
        check_weights(path)
    except DiffusionError as error:
        return str(error)
    return ""


def tokenizer_problem(path: Path) -> str:
    """That there is no tokenizer, or ""."""
    missing = "No tokenizer files: give mlx_lm.generate the source model's directory with --tokenizer."
    return "" if has_tokenizer(path) else missing


def spec_problems(checkpoint: Checkpoint, family: Family, spec: DiffusionSpec) -> list[str]:
    """What keeps a checkpoint with a spec from being decoded, as far as config.json tells."""
    problems = []
    try:
        family.prepare_config(copy.deepcopy(checkpoint.config))
    except DiffusionError as error:
        problems.append(str(error))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problems.append(f"config.json has values that cannot be used ({type(error).__name__}: {error}).")
    try:
        check_mask_token_id(spec.mask_token_id, spec.vocab_size, spec.sources["mask_token_id"])
    except DiffusionError as error:
        problems.append(str(error))
    if spec.mask_token_id is None:
        problems.append(
            "The mask token is unknown: give mlx_lm.generate its id with --mask-token-id; of a vocabulary that was "
            f"grown by a mask, as a2d does it, that is the last, {spec.vocab_size - 1}."
        )
    return problems


def _print(checkpoint: Checkpoint, spec: DiffusionSpec, problems: list[str]) -> None:
    print(printable(str(checkpoint.path)))
    if checkpoint.provenance:
        print(printable(f"warning: {checkpoint.provenance}"))
    left_out = {"defaults", "sources", "profiles"} | {
        name for name in ("stop_token_ids", "variants", "routing_block", "edit_token_ids") if not getattr(spec, name)
    }
    if spec.attention == "bidirectional" and "attention" not in spec.variants:
        left_out.add("block_origin")
    rows = [(f.name, getattr(spec, f.name)) for f in dataclasses.fields(spec) if f.name not in left_out]
    rows += [(name, value) for name, value in spec.defaults.items()]
    shown = [(name, _shown(value), spec.sources.get(name, "")) for name, value in rows]
    first, second = (max(len(row[i]) for row in shown) for i in (0, 1))
    for name, value, source in shown:
        print(printable(f"  {name:<{first}}  {value:<{second}}  {source}".rstrip()))
    print(f"  {'approximate':<{first}}  {', '.join(_inexact(spec))}  options that trade exactness for speed")
    for name in ("exact", *spec.profiles):
        print(f"  {'profile ' + name:<{first}}  {'  '.join(_profile(name, spec.profiles.get(name, {})))}")
    for problem in problems:
        print(f"problem: {printable(problem)}")


def _inexact(spec: DiffusionSpec) -> list[str]:
    """The values of options that are approximate for a checkpoint."""
    caches = ("dual",) if "sub_block_length" in spec.defaults else ()
    values = {"cache": ("prefix", "dual") if spec.attention == "bidirectional" else caches}
    if (spec.attention, spec.logits) == ("bidirectional", "shifted"):
        values["first_token"] = ("stale",)
    values["after_eos"] = ("skip", "eos")
    return [text for name, ones in values.items() for one in ones for text in approximations({name: one})]


def _profile(name: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """What a profile sets and what that costs."""
    inexact = approximations(settings)
    notes = [f"approximate: {', '.join(inexact)}"] if inexact else []
    what = ", ".join(f"{option} {value}" for option, value in settings.items())
    return what or "-", "; ".join([*notes, cost(name, settings)])


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
