"""mlx-vlm's road for diffusion models, which its server takes too: ours are decoded block by block, and each token is
passed on as soon as it can no longer change."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from ....errors import DiffusionError
from ... import Lean, Patch, Redirect
from .. import requests, served


def _module() -> Any:
    return sys.modules["mlx_vlm.generate.diffusion"]


def has_generator(original: Any, /, model: Any, *args: Any, **kwargs: Any) -> bool:
    """`_has_model_diffusion_generator`: by this mlx-vlm decides whether a model takes its diffusion road."""
    return served.is_ours(model) or original(model, *args, **kwargs)


def stream(original: Any, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """`stream_diffusion_generate_from_kwargs`: results for the caller or for its callback, which ends it with False."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    model, options = given["model"], given["kwargs"]
    served.say_who_decodes(model)
    if not requests.is_for_us(model, options):
        options.pop(requests.REPORT, None)
        yield from original(*args, **kwargs)
        return
    request = requests.sort_out(
        model, given["tokenizer"], given["input_ids"], given["pixel_values"], given["attention_mask"], options
    )
    results = _denoise(request, model, given["tokenizer"], given["skip_special_token_ids"])
    with contextlib.closing(results):
        if given["on_result"] is None:
            yield from results
            return
        for result in results:
            if not given["on_result"](result):
                return


@dataclass
class _Progress:
    """What is known of a row while it is decoded.

    Args:
        ids: the tokens of its output so far.
        canvas: tokens of the canvas by position, where one is committed.
        done: tokens of the canvas in finished blocks.
        blocks: finished blocks.
        steps: forwards of the block that is decoded.
    """

    prompt: int
    start: float
    ids: list[int] = field(default_factory=list)
    canvas: dict[int, int] = field(default_factory=dict)
    done: int = 0
    blocks: int = 0
    steps: int = 0
    forwards: int = 0
    columns: int = 0
    prompt_time: float = 0.0


class _Text:
    """The text of tokens that come one by one: together what the tokenizer makes of all of them. mlx-vlm's own
    streaming of byte-level tokenizers waits for a token that begins with a space, which Chinese never has, and knows no
    id beyond the tokenizer's last."""

    def __init__(self, tokenizer: Any, skip: Any):
        self.tokenizer, self.skip = tokenizer, set(skip or ())
        self.line: list[int] = []
        self.lines, self.whole, self.shown = "", "", 0

    def add(self, token: int) -> str:
        """What can be shown after this token, and could not before."""
        if token not in self.skip:
            self.line.append(token)
            self.whole = self.lines + self.tokenizer.decode(self.line)
            if self.whole.endswith("\n"):
                self.lines = self.whole
                self.line.clear()
        return "" if self.whole.endswith("\ufffd") else self.rest()  # bytes of a character whose others are to come

    def rest(self) -> str:
        segment, self.shown = self.whole[self.shown :], len(self.whole)
        return segment


def _denoise(request: requests.Request, model: Any, tokenizer: Any, skip: Any) -> Generator[Any, None, None]:
    import mlx.core as mx

    from ....decode import BlockDone, Commit, Released, stream_decode
    from ....plan import in_force

    host = _module()
    settled = in_force(request.spec, request.options)
    request.report.update(
        unmasking=settled.options.unmasking or request.spec.unmasking, settings=str(settled), forwards=0, columns=0
    )
    text = _Text(tokenizer, skip)
    block = settled.options.block_length or request.spec.defaults.get("block_length")
    events = stream_decode(request.model, request.prompt, settled.options, stream=host.generation_stream)
    with contextlib.closing(events), host.wired_limit(model, [host.generation_stream]):  # type: ignore[type-var]
        progress = _Progress(len(request.prompt), time.perf_counter())
        respond = _responder(host.GenerationResult, progress, mx)
        reason, complete = None, False
        for event in events:
            progress.prompt_time = progress.prompt_time or time.perf_counter() - progress.start
            if isinstance(event, Commit):
                progress.steps += 1
                progress.forwards = event.step + 1
                progress.canvas.update(zip(event.positions, event.tokens, strict=True))
                for position in event.masked:
                    progress.canvas.pop(position, None)
                if request.drafts and (progress.steps == 1 or progress.steps % request.drafts == 0):
                    draft = text.whole + _draft(progress, tokenizer, skip, block)
                    yield respond(is_draft=True, draft_text=draft, diffusion_step=progress.steps)
            elif isinstance(event, BlockDone):
                progress.done += event.end - event.start
                complete = True
            elif isinstance(event, Released):
                progress.forwards, progress.columns = event.nfe, event.columns
                request.report.update(forwards=event.nfe, columns=event.columns)
                for i, (token, logprobs) in enumerate(zip(event.tokens, event.logprobs, strict=True)):
                    progress.ids.append(token)
                    if i == len(event.tokens) - 1:
                        reason = event.reason
                    if request.stops is not None and request.stops(token):
                        reason = "stop"
                    vector = logprobs.vector(request.spec.vocab_size)
                    if reason == "stop":
                        break
                    yield respond(text=text.add(token), token=token, logprobs=vector)
                if complete and reason is None:
                    progress.blocks, progress.steps, complete = progress.blocks + 1, 0, False
                    yield respond(token=progress.ids[-1], diffusion_block_complete=True)
                if reason is not None:
                    yield respond(
                        text=text.rest(),
                        token=progress.ids[-1],
                        logprobs=vector,
                        token_ids=list(progress.ids),
                        diffusion_block_complete=complete,
                        finish_reason=reason,
                    )
                    break
    mx.clear_cache()
    if reason is None:
        raise DiffusionError(
            f"The prompt of {len(request.prompt)} tokens leaves no room for an output: give max_tokens."
        )


def _responder(kind: type, progress: _Progress, mx: Any) -> Callable[..., Any]:
    """Makes the host's results: with what is known so far, and without what this release's class has no field for."""
    known = {f.name for f in dataclasses.fields(kind)}

    def respond(**values: Any) -> Any:
        elapsed = max(time.perf_counter() - progress.start, 1e-9)
        count = len(progress.ids)
        values = {
            "prompt_tokens": progress.prompt,
            "generation_tokens": count,
            "total_tokens": progress.prompt + count,
            "prompt_tps": progress.prompt / max(progress.prompt_time, 1e-9),
            "generation_tps": count / elapsed,
            "peak_memory": mx.get_peak_memory() / 1e9,
            "diffusion_canvas_tokens": progress.done,
            "diffusion_denoising_steps": progress.forwards,
            "diffusion_work_tokens": progress.columns,
            "diffusion_canvas_tps": progress.done / elapsed,
            "diffusion_work_tps": progress.columns / elapsed,
            "diffusion_canvas_index": progress.blocks,
            **values,
        }
        return kind(**{name: value for name, value in values.items() if name in known})

    return respond


def _draft(progress: _Progress, tokenizer: Any, skip: Any, block: int | None) -> str:
    """The text of what is not final yet, up to the end of the block: with a mark for each mask."""
    start = progress.prompt + len(progress.ids)
    end = max(progress.canvas, default=start) + 1
    if block:
        end = (max(start, end - 1) // block + 1) * block
    there = range(start, end)
    return _module()._decode_diffusion_masked_draft(
        tokenizer, [progress.canvas.get(p, 0) for p in there], [p in progress.canvas for p in there], skip
    )


PATCH = Patch(
    target="mlx_vlm.generate.diffusion",
    reason="LLaDA2.2 cannot be decoded in mlx-vlm",
    changes=(
        Redirect("_has_model_diffusion_generator", has_generator, parameters=("model",)),
        Redirect(
            "stream_diffusion_generate_from_kwargs",
            stream,
            parameters=(
                *("model", "processor", "tokenizer", "input_ids", "pixel_values", "attention_mask"),
                *("skip_special_token_ids", "kwargs", "on_result"),
            ),
            needs=(
                *("GenerationResult", "generation_stream"),
                Lean("wired_limit", ("model", "streams")),
                Lean("_decode_diffusion_masked_draft", ("tokenizer", "token_ids", "reveal_mask")),
            ),
        ),
    ),
)
