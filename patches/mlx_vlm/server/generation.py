"""The server's queue: what cannot be decoded is refused before a request enters it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ....errors import DiffusionError
from ... import Lean, Patch, Redirect
from .. import requests, served

OURS = "_mlx_dllm"  # options of this plugin, on a request's arguments


@functools.cache
def refusal() -> type[DiffusionError]:
    """The class of errors that every endpoint answers with status 400: the endpoints know two kinds, at different
    places."""
    from fastapi import HTTPException

    too_long = sys.modules["mlx_vlm.server.generation"].PromptTooLongError

    class Refusal(DiffusionError, too_long, HTTPException):  # type: ignore[misc, valid-type]
        def __init__(self, sentence: str):
            HTTPException.__init__(self, status_code=400, detail=sentence)
            self.args = (sentence,)

        def __str__(self) -> str:
            return str(self.args[0])

    return Refusal


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Errors of this plugin become answers with status 400."""
    try:
        yield
    except DiffusionError as error:
        raise refusal()(str(error)) from error


def diffusion_kwargs(original: Any, /, self: Any) -> dict[str, Any]:
    """`GenerationArguments.diffusion_kwargs`: with the options that only this plugin has."""
    from mlx_vlm.generate.common import DEFAULT_MAX_TOKENS

    ours = dict(getattr(self, OURS, None) or {})
    if "max_tokens" in ours and self.max_tokens != DEFAULT_MAX_TOKENS:
        del ours["max_tokens"]  # the server has made room for the prompt since
    return {**original(self), **ours}


def cpu_preprocess(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`ResponseGenerator._cpu_preprocess`, which every prompt goes through: the model reads text alone."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    model, processor = (getattr(given["self"], name, None) for name in ("model", "processor"))
    if not served.is_ours(model):
        return original(*args, **kwargs)
    with answered():
        requests.refuse_meaningless({n: given.get(f"{n}s", given.get(n)) for n in ("image", "audio", "video")})
    ids = requests.encode(model, processor, given["prompt"])
    if ids is None:
        return original(*args, **kwargs)
    return {"input_ids": ids, "attention_mask": mx.array([[1] * ids.size])}  # no graph: another thread reads it


def _check(self: Any, given: dict[str, Any]) -> None:
    """Raises what the server answers with status 400, for a request that cannot be decoded."""
    from ....plan import plan

    wait = getattr(self, "wait_until_ready", None)
    if wait is not None:
        wait()
    arguments = given.get("args")
    ours = getattr(arguments, OURS, None) or {}
    if not requests.is_for_us(getattr(self, "model", None), ours):
        return
    media = {name: given.get(name) for name in ("images", "audio", "videos")}
    with answered():
        with getattr(self, "_tokenizer_lock", None) or contextlib.nullcontext():
            ids = self._preprocess_request(given["prompt"], **media)["input_ids"]
        asked = {} if arguments is None else {"max_tokens": arguments.max_tokens, **arguments.diffusion_kwargs()}
        plan(served.spec_of(self.model), requests.one_row(ids), requests.options_of(asked))


def generate(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`ResponseGenerator.generate`, which checks the request."""
    given = dict(inspect.signature(original).bind(*args, **kwargs).arguments)
    _check(given["self"], given)
    return original(*args, **kwargs)


def validate_context_budget(original: Any, /, *args: Any, **kwargs: Any) -> None:
    """`ResponseGenerator.validate_context_budget`, called before a stream opens: later an error has no status."""
    given = dict(inspect.signature(original).bind(*args, **kwargs).arguments)
    _check(given["self"], given)
    original(*args, **kwargs)


def initialize_model(original: Any, /, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`ResponseGenerator._initialize_model`: a drafter is refused, which would only be loaded."""
    result = original(self, *args, **kwargs)
    drafter = getattr(self, "draft_model_path", None) or os.environ.get("MLX_VLM_DRAFT_MODEL")
    if served.is_ours(getattr(self, "model", None)):
        requests.refuse_meaningless({"draft_model": drafter})
    return result


PATCH = Patch(
    target="mlx_vlm.server.generation",
    reason="requests to mlx_vlm.server that cannot be decoded end in an error 500",
    changes=(
        Redirect("GenerationArguments.diffusion_kwargs", diffusion_kwargs, parameters=("self",)),
        Redirect("ResponseGenerator.generate", generate, parameters=("self", "prompt", "images", "audio", "args")),
        Redirect(
            "ResponseGenerator.validate_context_budget",
            validate_context_budget,
            parameters=("self", "prompt", "images", "audio", "args"),
            needs=("PromptTooLongError",),
        ),
        Redirect("ResponseGenerator._cpu_preprocess", cpu_preprocess, parameters=("self", "prompt")),
        Redirect("ResponseGenerator._initialize_model", initialize_model, parameters=("self",)),
    ),
    leans=tuple(
        Lean(f"ResponseGenerator.{name}") for name in ("_run_diffusion", "wait_until_ready", "_preprocess_request")
    ),
)
