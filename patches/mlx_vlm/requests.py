"""What a call of mlx-vlm asks for, sorted out: its names of options, those of ours, and what has no meaning here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from ...errors import DiffusionError
from .. import cli
from . import served

# mlx-vlm's options that a model of ours cannot follow, and why.
_LEFT = "it reads the tokens to the left, which diffusion does not write first"
_KV = "its keys and values are neither quantized nor dropped"
_DRAFT = "speculative decoding drafts tokens from left to right"
_RULE = "it belongs to another sampler than those of this plugin"
_CANVAS = "blocks have the length that the model was trained on"
_MEDIA = "the model reads text alone"
_THINKING = "it would have to stop the model in the middle of a block"
NO_MEANING = {
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _LEFT),
    **dict.fromkeys(("logit_bias", "logits_processors"), _LEFT),
    **dict.fromkeys(("draft_model", "draft_kind", "draft_block_size", "linear_speculative"), _DRAFT),
    **dict.fromkeys(("kv_bits", "kv_key_bits", "kv_value_bits", "kv_key_scheme", "kv_value_scheme"), _KV),
    **dict.fromkeys(("kv_quant_scheme", "max_kv_size"), _KV),
    **dict.fromkeys(("prompt_cache", "prompt_cache_state"), "no keys and values are kept between requests"),
    **dict.fromkeys(("min_threshold", "max_transfer_per_step", "stability_steps", "diffusion_sampler"), _RULE),
    **dict.fromkeys(("top_n_sigma", "p_less", "typical_p"), _RULE),
    **dict.fromkeys(("diffusion_full_canvas", "diffusion_min_canvas_length", "diffusion_max_canvas_length"), _CANVAS),
    **dict.fromkeys(("image", "audio", "video", "pixel_values"), _MEDIA),
    **dict.fromkeys(("thinking_budget", "thinking_budget_criteria"), _THINKING),
    "inputs_embeds": "canvases are made of token ids",
    "decoder_input_ids": "the canvas begins as masks",
}
# Values with which the hosts mean "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (0, 1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_n_sigma": (0,),
    "typical_p": (1,),
    "kv_quant_scheme": ("uniform",),
    "diffusion_sampler": ("confidence-threshold",),
}
# What the hosts pass always, or what only saves work: it changes no token.
_IGNORED = {
    *("prefill_step_size", "kv_group_size", "quantized_kv_start", "verbose", "mm_token_type_ids"),
    *("repetition_context_size", "presence_context_size", "frequency_context_size"),
    *("fps", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels"),
    *("thinking_start_token", "thinking_end_token", "enable_thinking", "apc_manager", "apc_tenant", "vision_cache"),
    *("diffusion_unmasking_width", "skip_special_tokens"),
}
# What is not an option of the engine but read here.
_READ = {
    *("eos_tokens", "stopping_criteria", "diffusion_show_unmasking", "diffusion_unmasking_interval"),
    *("input_ids", "mask", "resize_shape", "mode", "generation_mode"),
}
# Options of the engine that mlx-vlm has too: they ask for nothing that mlx-vlm does not do.
_MLX_VLMS = {
    *("max_denoising_steps", "block_length", "threshold", "editing_threshold", "max_post_steps", "num_to_transfer"),
    "sampler",
}
REPORT = "_mlx_dllm_report"  # a dict in the keyword arguments, which gets what was in force


@dataclass
class Request:
    """
    A request that this plugin decodes.

    Args:
        model: what the engine decodes.
        prompt: its token ids.
        stops: called with each token, says whether the output ends with it; or None.
        drafts: a draft is shown after each of this many forwards; 0: never.
        report: gets what was in force.
    """

    model: Any
    spec: Any
    prompt: list[int]
    options: Any
    stops: Callable[[int], bool] | None
    drafts: int
    report: dict[str, Any]


def own_names() -> set[str]:
    """Options of decoding that mlx-vlm does not have."""
    from ...options import DecodingOptions

    return {o.name for o in fields(DecodingOptions) if not o.metadata["host"]} - _MLX_VLMS


def asked_of_us(given: Mapping[str, Any]) -> list[str]:
    """Options that only this plugin has, in a call or on the command line."""
    command = cli.running()
    merged = {**(command.decoding if command else {}), **{k: v for k, v in given.items() if v is not None}}
    return sorted(own_names() & {name for name, value in merged.items() if value is not None})


def mode_of(given: Mapping[str, Any]) -> str:
    """What was asked for of auto, ar and diffusion. Raises DiffusionError for another word."""
    from ...options import LoadOptions

    return LoadOptions(mode=given.get("mode") or cli.load_options().mode).mode


def is_for_us(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether this plugin decodes a request: the model is ours, or can be and the request asks for it."""
    return served.is_ours(model) or (served.can_be_ours(model) and bool(asked_of_us(given)))


def is_set(name: str, value: Any) -> bool:
    """Whether a value asks for something."""
    if value is None or value is False or (isinstance(value, (list, tuple, dict, str)) and not value):
        return False
    if name == "prompt_cache_state":
        return getattr(value, "cache", None) is not None
    return name not in _OFF or value not in _OFF[name]


def refuse_meaningless(
    given: Mapping[str, Any], spelled: Callable[[str], str] = str, but: Collection[str] = ()
) -> None:
    """Raises DiffusionError for an option that is set and has no meaning. ``but``: those that have."""
    cli.refuse_meaningless(given, spelled, {name: why for name, why in NO_MEANING.items() if name not in but}, is_set)


def refuse_mode(spec: Any, given: Mapping[str, Any]) -> None:
    """Raises DiffusionError when autoregressive decoding, or one that is not known, was asked for."""
    wanted = given.get("generation_mode")
    if wanted is None or wanted == "auto":
        wanted = mode_of(given)
    if wanted == "ar":
        raise DiffusionError(
            f"This is a diffusion model of the family {spec.family}, which writes nonsense when decoded "
            "autoregressively: leave out mode 'ar'."
        )
    if wanted not in ("auto", "diffusion"):
        raise DiffusionError(f"generation_mode {wanted!r} is not known here: give 'diffusion', or leave it out.")


def options_of(given: Mapping[str, Any], eos: tuple[int, ...] | None = None) -> Any:
    """
    The engine's options of a call: mlx-vlm's names and neutral values become ours, and what a running command was given
    stands behind them.

    Args:
        eos: ids that end the output, unless the call gives others.

    Raises:
        DiffusionError: values out of range, and options without a meaning.
        TypeError: a name that nobody knows.
    """
    from ...options import merge, split

    values = dict(given)
    refuse_meaningless(values)
    for name in (*NO_MEANING, *_IGNORED, *_READ):
        values.pop(name, None)
    temperature, steps, threshold = (values.pop(n, None) for n in ("temperature", "steps", "diffusion_threshold"))
    for name, value in (("temp", temperature), ("max_denoising_steps", steps), ("threshold", threshold)):
        if values.get(name) is None:
            values[name] = value
    for name, off in (("top_p", lambda p: p >= 1), ("top_k", lambda k: k <= 0), ("min_p", lambda p: p == 0)):
        if isinstance(values.get(name), (int, float)) and off(values[name]):
            del values[name]
    load, decoding, rest = split(values)
    rest |= load  # a model is loaded by now
    unknown = sorted(name for name, value in rest.items() if value is not None and not name.startswith("_"))
    if unknown:
        raise TypeError(f"stream_generate() got an unexpected keyword argument {unknown[0]!r}")
    command = cli.running()
    behind: dict[str, Any] = dict(command.decoding) if command else {}
    if command is not None and command.name in ("mlx_vlm.generate", "mlx_vlm.chat"):
        behind["seed"] = vars(command.host).get("seed")
        if "max_tokens" not in command.given:
            decoding.pop("max_tokens", None)  # the parser's default, which nobody asked for
    return merge({"eos_token_ids": eos}, behind, decoding)


def check_early(spec: Any, given: Mapping[str, Any]) -> None:
    """
    Find out what of a request cannot be decoded, whatever its prompt is.

    Raises:
        DiffusionError: that, in one sentence.
    """
    from ...plan import plan

    refuse_mode(spec, given)
    plan(spec, (0,), options_of(given))


def sort_out(
    model: Any, tokenizer: Any, input_ids: Any, pixel_values: Any, attention_mask: Any, given: dict[str, Any]
) -> Request:
    """What a call of mlx-vlm's diffusion road asks for. Raises DiffusionError, and TypeError for unknown names."""
    report = given.pop(REPORT, None)
    spec = served.spec_of(model)
    refuse_mode(spec, given)
    refuse_meaningless({"pixel_values": pixel_values})
    eos, stops = _stops(spec, tokenizer, given.get("eos_tokens"))
    options = options_of(given, eos)
    if options.unmasking is None:
        served.hint(model)
    drafts = given.get("diffusion_unmasking_interval") or 1
    if not isinstance(drafts, Integral) or drafts < 1:
        raise DiffusionError(f"diffusion_unmasking_interval must be a positive integer, got {drafts!r}.")
    drafts = int(drafts) if given.get("diffusion_show_unmasking") else 0
    prompt = one_row(input_ids, attention_mask)
    return Request(served.decoder_of(model), spec, prompt, options, stops, drafts, {} if report is None else report)


def encode(model: Any, processor: Any, prompt: Any) -> Any:
    """The ids [1, T] of a text that is to be continued; None for what is no text. mlx-vlm would put what the tokenizer
    puts in front of every text also before what a chat template has written."""
    import mlx.core as mx

    from ...tokenizers import encode_prompt

    if not isinstance(prompt, str):
        return None
    tokenizer = getattr(processor, "tokenizer", processor)
    return mx.array([encode_prompt(tokenizer, prompt, served.spec_of(model).eos_token_ids)])


def _stops(spec: Any, tokenizer: Any, more: Any) -> tuple[tuple[int, ...], Callable[[int], bool] | None]:
    """The ids that end the output, and the caller's own criterion if it is more than a list of ids."""
    from mlx_vlm.utils import StoppingCriteria

    criteria = getattr(tokenizer, "stopping_criteria", None)
    listed = getattr(criteria, "eos_token_ids", None)
    ids = set(spec.eos_token_ids if listed is None else listed) | set(spec.stop_token_ids)
    for token in [more] if isinstance(more, (str, int)) else more or ():
        # As mlx-vlm reads them: the last token of the text after a space.
        if isinstance(token, str):
            token = tokenizer.encode(f" {token}", add_special_tokens=False)[-1]
        elif not isinstance(token, Integral):
            raise DiffusionError(f"eos_tokens must be texts or token ids, got {token!r}.")
        ids.add(int(token))
    custom = callable(criteria) and type(criteria) is not StoppingCriteria
    return tuple(sorted(i for i in ids if i < spec.vocab_size)), criteria if custom else None


def one_row(input_ids: Any, attention_mask: Any = None) -> list[int]:
    """The token ids of one prompt, without padding. Raises DiffusionError for several, and for holes."""
    rows = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids if input_ids is not None else ())
    if not rows or not isinstance(rows[0], (list, tuple)):
        rows = [rows]
    if len(rows) > 1:
        raise DiffusionError(
            f"One prompt at a time is decoded, got {len(rows)}: use mlx_dllm_plugin.decode for several."
        )
    row = list(rows[0])
    mask = attention_mask.tolist() if hasattr(attention_mask, "tolist") else attention_mask
    if mask is None:
        return row
    if mask and isinstance(mask[0], (list, tuple)):
        mask = mask[0]
    if len(mask) != len(row) or not all(isinstance(seen, (int, float)) for seen in mask):
        raise DiffusionError(f"attention_mask must say of each of the {len(row)} tokens whether it is padding.")
    there = [place for place, seen in enumerate(mask) if seen]
    if there and len(there) != there[-1] - there[0] + 1:
        raise DiffusionError("attention_mask hides tokens in the middle of the prompt: only padding can be left out.")
    return [row[place] for place in there]
