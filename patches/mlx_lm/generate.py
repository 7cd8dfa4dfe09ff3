"""Generation: models with a diffusion spec are denoised, token by token through the host's own response type."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import DiffusionError, note
from .. import Lean, Patch, Redirect, Replace, cli
from .sample_utils import is_greedy
from .utils import refuse_unnoticed

# Options that steer the autoregressive loop and say nothing about the output of another one.
_IGNORED = {"prefill_step_size", "kv_group_size", "quantized_kv_start", "num_draft_tokens"}


@dataclass
class _Request:
    """One call of `stream_generate` with a diffusion model, sorted out."""

    model: Any
    tokenizer: Any
    prompt: Any
    options: Any
    stream: Any
    progress: Any = None


def _module() -> Any:
    return sys.modules["mlx_lm.generate"]


@functools.cache
def _responder(base: type) -> Callable[..., Any]:
    """Makes GenerationResponses with the rule, the profile, what was set beside it, what of that is approximate, and
    the forwards and computed columns so far, since one forward commits several tokens. Values that the host's class has
    no field for are left out, fields we know nothing of are None."""

    @dataclass
    class DiffusionResponse(base):  # type: ignore[misc, valid-type]
        forwards: int = 0
        columns: int = 0
        unmasking: str = ""
        profile: str = "exact"
        settings: str = "exact"
        approximate: tuple[str, ...] = ()

    DiffusionResponse.__qualname__ = "DiffusionResponse"
    globals()["DiffusionResponse"] = DiffusionResponse  # where pickle looks for it
    fields = dataclasses.fields(DiffusionResponse)
    known = {field.name for field in fields}
    blank = {f.name: None for f in fields if f.default is f.default_factory is dataclasses.MISSING}

    def respond(**values: Any) -> Any:
        return DiffusionResponse(**{**blank, **{name: value for name, value in values.items() if name in known}})

    return respond


def _only_ours(*more: str) -> set[str]:
    """Names of the options that upstream does not know."""
    from ...options import table

    return {o.name for o in table() if not o.metadata["host"]} - {"sampler", "mode"} | set(more)


def _refuse_on_autoregressive(model: Any, tokenizer: Any, extra: dict[str, Any]) -> None:
    """Raises DiffusionError when diffusion, or an option of it, was asked for with a model that has no spec."""
    from ...options import split

    refuse_unnoticed(tokenizer)
    load, decoding, _ = split(extra)
    command = cli.running()
    mode = load.get("mode") or cli.load_options().mode
    ours = {**(command.decoding if command else {}), **load, **decoding}
    only = sorted(name for name, value in ours.items() if name in _only_ours() and value is not None)
    if mode == "diffusion" or only:
        asked = f"{only[0]} is an option of diffusion decoding" if only else "mode 'diffusion' was asked for"
        raise DiffusionError(
            f"{asked}, but this {type(model).__module__} model has no diffusion spec: leave it out to decode "
            "autoregressively, or load a diffusion checkpoint."
        )


def _sort_out(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Request | None:
    """What the call asks for; None when the model is autoregressive. Raises DiffusionError."""
    from ...options import LoadOptions, merge, split
    from ...tokenizers import encode_prompt

    call = inspect.signature(original).bind(*args, **kwargs)
    given = dict(call.arguments)
    extra = given.pop("kwargs", {})
    load, decoding, rest = split(extra)
    LoadOptions(**load)
    command = cli.running()
    mode = load.get("mode") or cli.load_options().mode
    model, spec = given["model"], getattr(given["model"], "diffusion_spec", None)
    if spec is None:
        _refuse_on_autoregressive(model, given["tokenizer"], extra)
        return None
    if mode == "ar":
        raise DiffusionError(
            f"This is a diffusion model of the family {spec.family}, which writes nonsense when decoded "
            "autoregressively: leave out mode 'ar'."
        )
    if load.get("family") not in (None, spec.family):
        raise DiffusionError(
            f"family {load['family']!r} was asked for, but the model was loaded as {spec.family!r}: a family is chosen "
            "when a checkpoint is loaded."
        )
    cli.refuse_meaningless({**rest, "draft_model": given.get("draft_model")})
    if rest.get("logits_processors"):
        raise DiffusionError(
            "logits_processors read the tokens to the left, which diffusion does not write first: leave them out."
        )
    unknown = sorted(set(rest) - _IGNORED - set(cli.NO_MEANING) - {"logits_processors", "prompt_progress_callback"})
    if unknown:
        raise TypeError(f"stream_generate() got an unexpected keyword argument {unknown[0]!r}")
    if is_greedy(decoding.get("sampler")):
        del decoding["sampler"]
    from_parser = command is not None and "max_tokens" not in command.given
    if "max_tokens" in given and not from_parser:
        decoding["max_tokens"] = given["max_tokens"]
    tokenizer = given["tokenizer"]
    if not isinstance(tokenizer, _module().TokenizerWrapper):
        tokenizer = _module().TokenizerWrapper(tokenizer)
    prompt = given["prompt"]
    if isinstance(prompt, str):
        prompt = encode_prompt(tokenizer, prompt, spec.eos_token_ids)
    prompt = _one_row(prompt)
    eos = {*tokenizer.eos_token_ids, *spec.stop_token_ids}
    options = merge({"eos_token_ids": tuple(sorted(eos))}, command.decoding if command else {}, decoding)
    stream = given.get("stream", _module().generation_stream)
    return _Request(model, tokenizer, prompt, options, stream, rest.get("prompt_progress_callback"))


def _one_row(prompt: Any) -> Any:
    """The token ids of one prompt. Raises DiffusionError for several."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, (list, tuple)) and ids and isinstance(ids[0], (list, tuple)):
        if len(ids) > 1:
            raise DiffusionError(
                f"stream_generate takes one prompt, got {len(ids)}: decode several with mlx_dllm_plugin.decode."
            )
        return ids[0]
    return ids


def stream_generate(original: Any, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """`stream_generate`: one response per token, as soon as the token can no longer change."""
    request = _sort_out(original, args, kwargs)
    if request is None:
        yield from original(*args, **{name: value for name, value in kwargs.items() if name not in _only_ours("mode")})
        return
    yield from _denoise(request)


def _denoise(request: _Request) -> Iterator[Any]:
    import mlx.core as mx

    from ...decode import Released, stream_decode
    from ...plan import in_force

    host, spec = _module(), request.model.diffusion_spec
    settled = in_force(spec, request.options)
    options = settled.options
    how = {
        "unmasking": options.unmasking or spec.unmasking,
        "profile": settled.profile,
        "settings": str(settled),
        "approximate": settled.approximate,
    }
    if options.full_logprobs is None and settled.by_block:
        options = dataclasses.replace(options, full_logprobs=True)  # few positions at a time: all of them are at hand
    respond = _responder(host.GenerationResponse)
    events = stream_decode(request.model, request.prompt, options, stream=request.stream)
    prompt_tokens = len(request.prompt)
    detokenizer = request.tokenizer.detokenizer
    progress = request.progress or (lambda done, total: None)
    progress(0, prompt_tokens)
    count, prompt_time = 0, 0.0
    with host.wired_limit(request.model, [request.stream]):
        start = time.perf_counter()
        for event in events:
            if not prompt_time:
                prompt_time = time.perf_counter() - start
                progress(prompt_tokens, prompt_tokens)
            if not isinstance(event, Released):
                continue
            for i, (token, logprobs) in enumerate(zip(event.tokens, event.logprobs, strict=True)):
                count += 1
                reason = event.reason if i == len(event.tokens) - 1 else None
                if reason != "stop":
                    detokenizer.add_token(token)
                if reason:
                    detokenizer.finalize()
                yield respond(
                    text=detokenizer.last_segment,
                    token=token,
                    logprobs=logprobs.vector(spec.vocab_size),
                    from_draft=False,
                    prompt_tokens=prompt_tokens,
                    prompt_tps=prompt_tokens / prompt_time,
                    generation_tokens=count,
                    generation_tps=count / (time.perf_counter() - start),
                    peak_memory=mx.get_peak_memory() / 1e9,
                    finish_reason=reason,
                    forwards=event.nfe,
                    columns=event.columns,
                    **how,
                )
    if not count:
        raise DiffusionError(
            f"The canvas of {prompt_tokens} tokens is full of prompt: say how many tokens to write with max_tokens "
            "(--max-tokens)."
        )


def generate(original: Any, /, *args: Any, **kwargs: Any) -> str:
    """`generate`: as upstream, and in the statistics what diffusion adds."""
    call = inspect.signature(original).bind(*args, **kwargs)
    given = call.arguments
    if getattr(given["model"], "diffusion_spec", None) is None:
        # before the host prints anything
        _refuse_on_autoregressive(given["model"], given["tokenizer"], given.get("kwargs", {}))
        return original(*args, **kwargs)
    verbose = given.get("verbose", False)
    text, response, first, interrupted = "", None, 0.0, False
    start = time.perf_counter()
    responses = _module().stream_generate(
        given["model"], given["tokenizer"], given["prompt"], **given.get("kwargs", {})
    )
    try:
        for response in responses:
            if not first:
                first = time.perf_counter() - start
                if verbose:
                    print("=" * 10)
            text += response.text
            if verbose:
                print(response.text, end="", flush=True)
    except KeyboardInterrupt:
        if cli.running() is None:
            raise
        interrupted = True
    if verbose:
        print()
        print("=" * 10)
        if not text and not interrupted:
            print("No text generated for this prompt")
        if response is not None:
            _print_statistics(response, first)
    if interrupted:
        if not verbose:
            print(text)
        note("interrupted")
        raise SystemExit(130)
    return text


def _print_statistics(response: Any, first: float) -> None:
    print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
    print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
    how = response.unmasking, response.forwards, response.generation_tokens, response.columns, response.settings
    cli.print_diffusion(*how, f", first token after {first:.3f} s")
    print(f"Peak memory: {response.peak_memory:.3f} GB")


def batch_generator(original: Any, /, *args: Any, **kwargs: Any) -> None:
    call = inspect.signature(original).bind(*args, **kwargs)
    # Its __del__ calls close(), which reads this; a refused constructor must not print an ignored exception.
    call.arguments["self"]._old_wired_limit = None
    cli.refuse_if_diffusion(call.arguments["model"], "mlx_lm.generate.BatchGenerator")
    original(*args, **kwargs)


_CAUSAL = "it decodes a diffusion model from left to right instead of refusing it"

PATCH = Patch(
    target="mlx_lm.generate",
    reason="diffusion checkpoints cannot be decoded",
    changes=(
        Redirect(
            "stream_generate",
            stream_generate,
            parameters=("model", "tokenizer", "prompt", "max_tokens", "draft_model", "kwargs"),
            needs=(
                *("GenerationResponse", "generation_stream"),
                Lean("TokenizerWrapper", ("tokenizer",)),
                Lean("wired_limit", ("model", "streams")),
            ),
        ),
        Redirect(
            "generate",
            generate,
            needs=("stream_generate",),
            parameters=("model", "tokenizer", "prompt", "verbose", "kwargs"),
        ),
        Redirect("generate_step", cli.refusing("mlx_lm.generate.generate_step"), ("model",), _CAUSAL),
        Redirect("speculative_generate_step", cli.refusing("Speculative decoding"), ("model", "draft_model"), _CAUSAL),
        Redirect("batch_generate", cli.refusing("mlx_lm.batch_generate"), ("model",), _CAUSAL),
        Redirect("BatchGenerator.__init__", batch_generator, ("self", "model"), _CAUSAL),
        Redirect("main", cli.guarded("mlx_lm.generate"), reason="errors end in a traceback"),
        Replace("argparse", cli.with_options, reason="mlx_lm.generate does not offer the diffusion options"),
    ),
)
