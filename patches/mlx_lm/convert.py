"""Conversion: diffusion checkpoints take a road of their own, and errors are one line."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import DiffusionError
from ...options import table
from .. import Patch, Redirect, Replace, cli

RECIPES = ("mixed_8", "mixed_full")
OFFERED = ("family", "tokenizer", "mask_token_id", "unmasking", "attention")
ADDED = (*OFFERED, "report")


class _Parser(cli.Parser):
    """A converter's parser with what is added here."""

    not_offered = tuple(option.name for option in table() if option.name not in OFFERED)

    def _extend(self) -> dict[str, argparse.Action]:
        if self._ours is None:
            ours = super()._extend()
            self._action_groups[-1].add_argument(
                "--no-report",
                dest="report",
                action="store_false",
                default=argparse.SUPPRESS,
                help="do not compare the copy with its source",
            )
            return ours
        return super()._extend()


def with_options(old: ModuleType) -> ModuleType:
    """A copy of the argparse module whose parsers offer what a conversion can be given."""
    return cli.with_parser(old, _Parser)


def take_added(original: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What was given for a conversion beside the host's own arguments, taken out of them, or on the command line."""
    names = inspect.signature(original).parameters
    given = {name: kwargs.pop(name) for name in ADDED if name in kwargs and name not in names}
    command = cli.running()
    if command is not None:
        told = {**command.load, **command.decoding}
        given = {**{name: told[name] for name in OFFERED if name in told}, **given}
    return {name: value for name, value in given.items() if value is not None}


def checkpoint_at(hf_path: Any, revision: str | None) -> Path | None:
    """The directory of what is converted, without weights if it is on the hub; None when the host is to say that there
    is nothing."""
    from .utils import local

    try:
        path = Path(hf_path)
        return local(path, revision)
    except DiffusionError:
        raise
    except Exception:
        return None


def convert(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`convert`, which keeps what makes a diffusion checkpoint one, and returns what that cost."""
    added = take_added(original, kwargs)
    try:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
    except TypeError:
        return original(*args, **kwargs)
    path = checkpoint_at(given["hf_path"], given.get("revision"))
    if path is not None and is_diffusion(path, added):
        return convert_diffusion(path, given, added)
    refuse_added(given["hf_path"], added)
    return original(*args, **kwargs)


def is_diffusion(path: Path, added: Mapping[str, Any]) -> bool:
    """Whether a directory holds a checkpoint of a family. Raises DiffusionError for one that is recognised and cannot
    be decoded."""
    from ...spec import detect_at

    return detect_at(path, added.get("family")) is not None


def refuse_added(name: Any, added: Mapping[str, Any]) -> None:
    """Raises DiffusionError for what has no meaning in the conversion of an autoregressive model."""
    wrong = [name for name in OFFERED if name != "family" and name in added]
    if wrong:
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise DiffusionError(f"{name} is no diffusion checkpoint: leave out {shown}, or force a family with --family.")


def convert_diffusion(path: Path, given: Mapping[str, Any], added: Mapping[str, Any]) -> Any:
    """
    Convert a diffusion checkpoint.

    Args:
        path: its directory, perhaps without weights.
        given: arguments of mlx-lm's convert.
        added: those of :data:`ADDED`.
    """
    from mlx_lm import utils

    from ...conversion import Request
    from ...conversion import convert as run

    command = cli.running()
    if command is not None:
        command.diffusion = True
    names = inspect.signature(Request).parameters
    unknown = [name for name in given if name not in names]
    if unknown:
        raise DiffusionError(f"{unknown[0]} does not work with the conversion of diffusion checkpoints: leave it out.")
    request = Request(**given, **added)
    is_local = Path(request.hf_path).exists()

    def fetch() -> Path:
        return Path(utils._download(request.hf_path, revision=request.revision))

    return run(request, path, None if is_local else fetch)


def mixed_quant_predicate_builder(original: Any, /, recipe: str, model: Any, group_size: int | None = None) -> Any:
    """`mixed_quant_predicate_builder`, which knows the recipes of diffusion models."""
    from ...conversion.recipes import named

    if getattr(model, "diffusion_spec", None) is not None:
        return named(recipe, model, group_size)
    if recipe in RECIPES:
        raise DiffusionError(
            f"--quant-predicate {recipe} is for diffusion checkpoints, and this is a {type(model).__module__} model: "
            "leave it out."
        )
    return original(recipe, model, *([] if group_size is None else [group_size]))


PATCH = Patch(
    target="mlx_lm.convert",
    reason="copies of diffusion checkpoints may lose what makes them one, and errors end in a traceback",
    changes=(
        Redirect(
            "convert",
            convert,
            parameters=(
                *("hf_path", "mlx_path", "quantize", "q_group_size", "q_bits", "q_mode", "dtype", "upload_repo"),
                *("revision", "dequantize", "quant_predicate", "trust_remote_code"),
            ),
        ),
        Redirect(
            "mixed_quant_predicate_builder",
            mixed_quant_predicate_builder,
            parameters=("recipe", "model", "group_size"),
        ),
        Replace("QUANT_RECIPES", lambda old: [*old, *RECIPES], kind=list),
        Replace("argparse", with_options),
        Redirect("main", cli.guarded("mlx_lm.convert")),
    ),
)
