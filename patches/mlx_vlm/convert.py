"""Conversion of diffusion checkpoints is mlx-lm's with the plugin: one road, whose copies both hosts read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import DiffusionError, note
from .. import Patch, Redirect, Replace, cli
from ..mlx_lm import convert as mlx_lm_convert
from . import served

# Arguments of mlx-vlm alone -> the value that asks for nothing, and what they ask for otherwise.
_THEIRS = {
    "quant_method": ("rtn", "awq calibrates mlx-vlm's own models"),
    "calibration": ("text", "nothing is calibrated"),
    "calibration_data": (None, "nothing is calibrated"),
    "mtp": (False, "there is no drafter in it"),
    "mtp_output": (None, "there is no drafter in it"),
}


def convert(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`convert`, which leaves the diffusion checkpoints of this plugin to mlx-lm's."""
    added = mlx_lm_convert.take_added(original, kwargs)
    try:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
    except TypeError:
        return original(*args, **kwargs)
    path = mlx_lm_convert.checkpoint_at(given["hf_path"], given.get("revision"))
    if path is None or _is_mlx_vlms(path) or not mlx_lm_convert.is_diffusion(path, added):
        mlx_lm_convert.refuse_added(given["hf_path"], added)
        if (recipe := given.get("quant_predicate")) in mlx_lm_convert.RECIPES:
            raise DiffusionError(
                f"--quant-predicate {recipe} is for diffusion checkpoints that mlx-dllm-plugin decodes, and "
                f"{given['hf_path']} is none: leave it out."
            )
        return original(*args, **kwargs)
    _refuse_theirs(given)
    rest = {name: value for name, value in given.items() if name not in _THEIRS}
    found = mlx_lm_convert.convert_diffusion(path, rest, added)
    _say_who_decodes(path)
    return found


def _is_mlx_vlms(path: Path) -> bool:
    from ...checkpoint import open_checkpoint
    from ...families.refused import is_mlx_vlms

    return (path / "config.json").is_file() and is_mlx_vlms(open_checkpoint(path))


def _refuse_theirs(given: Mapping[str, Any]) -> None:
    for name, (nothing, why) in _THEIRS.items():
        if given.get(name, nothing) not in (nothing, None):
            raise DiffusionError(
                f"--{name.replace('_', '-')} does not work with diffusion checkpoints ({why}): leave it out."
            )


def _say_who_decodes(path: Path) -> None:
    from ...checkpoint import read_json

    if read_json(path / "config.json").get("model_type") != served.FAMILY:
        note(f"{path} is converted by mlx-lm, which also decodes the copy: use mlx_lm.generate.")


PATCH = Patch(
    target="mlx_vlm.convert",
    reason="diffusion checkpoints are not converted",
    changes=(
        Redirect(
            "convert",
            convert,
            parameters=(
                *("hf_path", "mlx_path", "quantize", "q_group_size", "q_bits", "q_mode", "dtype", "upload_repo"),
                *("revision", "dequantize", "trust_remote_code", "quant_predicate"),
            ),
        ),
        Replace("QUANT_RECIPES", lambda old: [*old, *mlx_lm_convert.RECIPES], kind=list),
        Replace("argparse", mlx_lm_convert.with_options),
        Redirect("main", cli.guarded("mlx_vlm.convert")),
    ),
)
