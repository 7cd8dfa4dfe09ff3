"""mlx-vlm's generate, stream_generate and its command line: what a model of ours cannot follow is refused before
anything is computed, and `--mode` reaches the models that mlx-vlm decodes itself."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from ....errors import DiffusionError
from ....options import MODES
from ... import Patch, Redirect, Replace, cli
from .. import commands, requests, served
from ..utils import refuse_unnoticed


def _is_diffusion(model: Any) -> bool:
    return sys.modules["mlx_vlm.generate.diffusion"]._has_model_diffusion_generator(model)


def _check(given: dict[str, Any]) -> None:
    """Raises DiffusionError for what a call to a model of ours cannot ask for, TypeError for what nobody knows."""
    requests.refuse_meaningless(given)
    requests.check_early(served.spec_of(given["model"]), given.get("kwargs", {}))


def _for_theirs(model: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call to a model that mlx-vlm decodes. Raises DiffusionError for a mode that it does
    not have, and for options that only this plugin has."""
    mode = cli.load_options().mode
    if extra.get("mode") in MODES:
        mode = extra["mode"]
        extra = {name: value for name, value in extra.items() if name != "mode"}
    command = cli.running()
    asked = {name for name in ("unmasking", "profile") if extra.get(name) is not None}
    ours = sorted({*(command.decoding if command else ()), *asked})
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if ours:
        raise DiffusionError(
            f"{ours[0]} is an option of mlx-dllm-plugin, and mlx-vlm decodes {kind} itself: leave it out."
        )
    if mode == "auto":
        return extra
    able = _is_diffusion(model)
    if mode == "diffusion" and not able:
        raise DiffusionError(f"{kind} is no diffusion model: leave out mode 'diffusion' to decode it autoregressively.")
    if able and extra.get("generation_mode") is None:
        if mode == "ar" and getattr(model.config, "default_generation_mode", None) != "ar":
            raise DiffusionError(f"{kind} decodes by diffusion only: leave out mode 'ar'.")
        extra["generation_mode"] = mode
    return extra


def stream_generate(original: Any, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """`stream_generate`, which checks the call first."""
    call = inspect.signature(original).bind(*args, **kwargs)
    given = call.arguments
    extra = given.get("kwargs", {})
    if requests.is_for_us(given["model"], extra):
        _check({**extra, **given})
        if served.is_ours(given["model"]) and extra.get("input_ids") is None:
            ids = requests.encode(given["model"], given["processor"], given["prompt"])
            given["kwargs"] = {**extra, **({} if ids is None else {"input_ids": ids})}
    else:
        refuse_unnoticed(given["processor"])
        given["kwargs"] = _for_theirs(given["model"], extra)
    yield from original(*call.args, **call.kwargs)


def generate(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`generate`: as upstream, and verbose also with how it was decoded."""
    call = inspect.signature(original).bind(*args, **kwargs)
    given = call.arguments
    extra = given.get("kwargs", {})
    if not requests.is_for_us(given["model"], extra):
        return original(*args, **kwargs)
    _check({**extra, **given})  # before the host prints anything
    report: dict[str, Any] = {}
    given["kwargs"] = {**extra, requests.REPORT: report}
    result = original(*call.args, **call.kwargs)
    if given.get("verbose") and report.get("forwards"):
        how = report["unmasking"], report["forwards"], result.generation_tokens, report["columns"], report["settings"]
        cli.print_diffusion(*how)
    return result


PATCH = Patch(
    target="mlx_vlm.generate.dispatch",
    reason="options without a meaning are ignored without a word",
    changes=(
        Redirect("stream_generate", stream_generate, parameters=("model", "processor", "prompt", "image", "kwargs")),
        Redirect("generate", generate, parameters=("model", "processor", "prompt", "image", "verbose", "kwargs")),
        Redirect("main", cli.guarded("mlx_vlm.generate"), reason="errors end in a traceback"),
        Replace("argparse", commands.with_options, reason="mlx_vlm.generate does not offer the diffusion options"),
    ),
)
