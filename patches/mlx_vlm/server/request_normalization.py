"""A request's fields: those of this plugin are read, and what a model of ours cannot follow is an answer 400."""

from __future__ import annotations

import inspect
from typing import Any

from ....errors import DiffusionError
from ... import Patch, Redirect
from .. import requests, served
from .generation import OURS, answered

# Fields that end up in the arguments and have no meaning, with what mlx-vlm calls them there.
_MEANINGLESS = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logits_processors"),
    *("top_n_sigma", "p_less", "typical_p", "min_threshold", "max_transfer_per_step", "stability_steps"),
    *("diffusion_full_canvas", "diffusion_min_canvas_length", "diffusion_max_canvas_length", "diffusion_sampler"),
    "thinking_budget",
)


def build_gen_args(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`_build_gen_args`, which also reads and checks what is there for this plugin."""
    arguments = original(*args, **kwargs)
    with answered():
        _read(arguments, inspect.signature(original).bind(*args, **kwargs).arguments["request"])
    return arguments


def _read(arguments: Any, request: Any) -> None:
    from mlx_vlm.generate.common import DEFAULT_MAX_TOKENS
    from mlx_vlm.server.runtime import runtime

    model = getattr(getattr(runtime, "response_generator", None), "model", None)
    said: dict[str, Any] = getattr(request, "model_extra", None) or {}
    ours = {name: value for name, value in said.items() if name in requests.own_names() and value is not None}
    if not requests.is_for_us(model, ours):
        return
    asked: set[str] = getattr(request, "model_fields_set", set())
    if getattr(arguments, "logprobs", False):
        raise DiffusionError(
            "logprobs are not served for this model, whose answers come block by block: leave them out, or use "
            "mlx_vlm.stream_generate, which has them for each token."
        )
    fields = {name: getattr(arguments, name, None) for name in _MEANINGLESS}
    requests.refuse_meaningless(fields, lambda name: "response_format" if name == "logits_processors" else name)
    if said.get("mode") is not None:
        ours["mode"] = said["mode"]
    if said.get("generation_mode") is not None:
        ours["generation_mode"] = said["generation_mode"]
    if getattr(arguments, "min_p", 0.0):
        ours["min_p"] = arguments.min_p
    by_default = not {"max_tokens", "max_output_tokens", "max_completion_tokens"} & asked
    if by_default and arguments.max_tokens == DEFAULT_MAX_TOKENS:
        ours["max_tokens"] = None  # which nobody asked for: as much as fits
    setattr(arguments, OURS, ours)
    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k", "seed")}
    requests.check_early(served.spec_of(model), {**sampling, **arguments.diffusion_kwargs()})


PATCH = Patch(
    target="mlx_vlm.server.request_normalization",
    reason="requests to mlx_vlm.server cannot have the options of this plugin",
    changes=(Redirect("_build_gen_args", build_gen_args, parameters=("request", "processor")),),
)
