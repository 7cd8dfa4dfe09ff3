"""THE table of options: name, type, default, meaning. Command lines, the server and the documentation are made from it.

Each field's metadata holds what is known about it. A value of None means "the family's own".
"""

from __future__ import annotations

import argparse
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from .errors import DiffusionError

MODES = ("auto", "ar", "diffusion")
MOST_STEPS = 100_000
LARGEST = {"int": 10**18, "float": 1e30}  # what float32 and int64 compute with, whatever it means


def _option(
    kind: str,
    help: str,
    *,
    default: Any = None,
    expected: str = "",
    valid: Callable[[Any], bool] | None = None,
    choices: Sequence[str] = (),
    host: bool = False,
    common: bool = True,
    cli: bool = True,
    approximate: Callable[[Any], bool] = lambda value: False,
) -> Any:
    """
    Args:
        kind: int, float, bool, str, ints or object.
        expected: what a valid value is, for the error message.
        host: the hosts have this option already, under the same name.
        common: every rule takes it; otherwise only the rules that list it in ``uses``.
        cli: offered on command lines.
        approximate: whether a value trades exactness for speed: what the model computes is then not what its makers'
            own code computes.
    """
    metadata = dict(
        kind=kind,
        help=help,
        expected=expected,
        valid=valid,
        choices=tuple(choices),
        host=host,
        common=common,
        cli=cli,
        approximate=approximate,
    )
    return field(default=default, metadata=metadata)


def _positive(value: int) -> bool:
    return value >= 1


def _share(value: float) -> bool:
    return 0 <= value <= 1


def _not_negative(value: float) -> bool:
    return value >= 0


def _steps(value: int) -> bool:
    return 1 <= value <= MOST_STEPS


def _temperature(value: float) -> bool:
    return value == 0 or 1e-4 <= value <= 1e4


def _seed(value: int) -> bool:
    return 0 <= value < 2**64


@dataclass(frozen=True)
class LoadOptions:
    """Options that act when a checkpoint is loaded."""

    mode: str = _option(
        "str",
        "auto: checkpoints with a diffusion spec decode by diffusion, all others as before; ar: autoregressive; "
        "diffusion: refuse checkpoints without a diffusion spec",
        default="auto",
        choices=MODES,
    )
    family: str | None = _option("str", "treat the checkpoint as one of this diffusion family, whatever it declares")
    tokenizer: str | None = _option(
        "str", "directory with the tokenizer files, for a checkpoint that has none (an a2d checkpoint-<N>)"
    )

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class DecodingOptions:
    """
    How to decode one row. Frozen; ``dataclasses.replace`` makes a variant. None means "the family's own".

    Raises:
        DiffusionError: a value of the wrong type or out of range, named with what was expected.
    """

    max_tokens: int | None = _option(
        "int",
        "cap on the output in tokens",
        expected="a positive integer, or -1 for as many as the context holds",
        valid=lambda n: n >= 1 or n == -1,
        host=True,
    )
    canvas_length: int | None = _option(
        "int",
        "length of the canvas in tokens, prompt included; by default prompt + max tokens if that is given, else "
        "the family's own",
        expected="a positive integer",
        valid=_positive,
    )
    max_denoising_steps: int | None = _option(
        "int",
        "denoising steps: of a whole fixed canvas, or of each block of a growing one",
        expected=f"an integer from 1 to {MOST_STEPS}",
        valid=_steps,
        common=False,
    )
    block_length: int | None = _option(
        "int",
        "fill the canvas block by block, each of this many tokens, from left to right; with block-causal attention "
        "also the blocks of the attention",
        expected="a positive integer",
        valid=_positive,
        common=False,
    )
    sub_block_length: int | None = _option(
        "int",
        "fill each block of block-causal attention part by part, each of this many tokens (Fast-dLLM v2)",
        expected="a positive integer",
        valid=_positive,
        common=False,
    )
    attention: str | None = _option(
        "str",
        "what a position sees, for families whose checkpoints do not say: all positions, or all up to its block's end",
        choices=("bidirectional", "block_causal"),
    )
    logits: str | None = _option(
        "str",
        "which token the logits of a position predict, for families whose checkpoints do not say: its own or the next",
        choices=("in_place", "shifted"),
    )
    profile: str | None = _option(
        "str",
        "settings of the family in one word: exact (as its makers decode), balanced, or fast; single options win over "
        "it",
        choices=("exact", "balanced", "fast"),
    )
    unmasking: str | None = _option("str", "rule that picks the positions to commit")
    cache: str | None = _option(
        "str",
        "keys and values that are kept: auto keeps what changes no token (final blocks of block-causal attention); "
        "none recomputes all; prefix freezes what precedes the block until the next block, dual also what follows it "
        "(both approximate); block keeps final blocks",
        choices=("auto", "none", "prefix", "dual", "block"),
        approximate=lambda value: value in ("prefix", "dual"),
    )
    refresh_interval: int | None = _option(
        "int",
        "of the caches prefix and dual: recompute the whole canvas in every n-th forward of a block; default: in the "
        "first alone",
        expected="a positive integer",
        valid=_positive,
    )
    vicinity: int | None = _option(
        "int",
        "of the caches prefix and dual: recompute this many positions beside the block too",
        expected="0 or more",
        valid=_not_negative,
    )
    first_token: str | None = _option(
        "str",
        "where shifted logits leave the first token of a block: fresh, every forward computes the column before it; "
        "stale, the block's first forward commits it, however unsure (Fast-dLLM's Dream)",
        choices=("fresh", "stale"),
        approximate=lambda value: value == "stale",
    )
    temp: float | None = _option(
        "float",
        "sampling temperature; 0 is greedy",
        expected="0 (greedy) or from 0.0001 to 10000",
        valid=_temperature,
        host=True,
    )
    top_p: float | None = _option("float", "sampling top-p", expected="within [0, 1]", valid=_share, host=True)
    top_k: int | None = _option(
        "int", "sampling top-k; 0 is off", expected="0 or a positive integer", valid=_not_negative, host=True
    )
    min_p: float | None = _option("float", "sampling min-p", expected="within [0, 1]", valid=_share, host=True)
    seed: int | None = _option("int", "random seed", expected="an integer from 0 to 2**64 - 1", valid=_seed, host=True)
    confidence_temperature: float | None = _option(
        "float",
        "temperature of the confidences that rank positions; it does not change which token a position gets",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    threshold: float | None = _option(
        "float",
        "commit every position whose confidence exceeds this (default: 0.9; for low_confidence_dynamic 0.85; for wino "
        "0.6; for joint_threshold 0.95; for joint_threshold_indel 0.5); above 1 is one token a step",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    editing_threshold: float | None = _option(
        "float",
        "change a token where another one has more than this; 1 never does (default: 0.9; for joint_threshold_indel 0)",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    max_post_steps: int | None = _option(
        "int",
        "forwards that may edit a block after its last mask is filled (default: 16)",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    num_to_transfer: int | None = _option(
        "int",
        "masks that every forward fills at least, as long as there are (default: 1)",
        expected="a positive integer",
        valid=_positive,
        common=False,
    )
    max_steps_per_block: int | None = _option(
        "int",
        "forwards after which a block that does not settle is completed as it stands (default: 1000)",
        expected=f"an integer from 1 to {MOST_STEPS}",
        valid=_steps,
        common=False,
    )
    low_threshold: float | None = _option(
        "float",
        "what the best position of each run of masks must exceed to be committed (default: 0.4)",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    relaxed_threshold: float | None = _option(
        "float",
        "what positions near a sure one must reach to be committed (default: 0.75)",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    radius: int | None = _option(
        "int",
        "how near to a sure position that is (default: 4)",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    narrow_out_threshold: float | None = _option(
        "float",
        "mask a committed token again when a mask in its place would get it with less than this (default: 0.9)",
        expected="within [0, 1]",
        valid=_share,
        common=False,
    )
    factor: float | None = _option(
        "float",
        "commit the n surest positions as long as (n + 1) (1 - confidence of the n-th) is less than this (default: 1)",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    kl_threshold: float | None = _option(
        "float",
        "a position is stable while its distribution moves by less than this divergence (nats) per step "
        "(default: 0.01)",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    kl_history: int | None = _option(
        "int",
        "for how many steps it must have been stable (default: 2)",
        expected="a positive integer",
        valid=_positive,
        common=False,
    )
    credit_weight: float | None = _option(
        "float",
        "weight of a token's credit in its logit (default: 0.7)",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    credit_power: float | None = _option(
        "float",
        "power of a token's probability that is added to its credit (default: 0.2)",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    credit_decay: float | None = _option(
        "float",
        "share of the credit that is left after each step (default: 0.8)",
        expected="within [0, 1]",
        valid=_share,
        common=False,
    )
    gap: float | None = _option(
        "float",
        "commit all at once when the best token leads the second best by this on average, in logits; two thirds of it "
        "after a third of the positions, a third after two thirds (default: 7.5)",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    entropy_bound: float | None = _option(
        "float",
        "commit positions while their entropies (nats) sum to less than this; for eb, without the largest of them "
        "(default: 0.35; for eb 0.1)",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    cfg_scale: float | None = _option(
        "float",
        "classifier-free guidance: two rows per forward, the second with the prompt masked; 0 is off",
        expected="0 or more",
        valid=_not_negative,
        common=False,
    )
    cfg_keep_tokens: tuple[int, ...] | None = _option(
        "ints",
        "token ids of the prompt that guidance does not mask; separated by commas",
        expected="token ids, 0 or more",
        valid=_not_negative,
        common=False,
    )
    eos_flags: str | None = _option(
        "str",
        "LLaDA's two flags: logits never emits the end of sequence, confidence commits it and the end of turn last, "
        "both does both",
        choices=("none", "logits", "confidence", "both"),
        common=False,
    )
    alg_temp: float | None = _option(
        "float",
        "Dream: temperature of a random choice of positions by confidence; 0 takes the most confident",
        expected="0 (the most confident) or from 0.0001 to 10000",
        valid=_temperature,
        common=False,
    )
    eps: float | None = _option(
        "float",
        "Dream: the time at which its schedule ends (default: 0.001)",
        expected="within [0, 1)",
        valid=lambda value: 0 <= value < 1,
        common=False,
    )
    alpha_schedule: str | None = _option(
        "str", "MDLM: share of masks over time (default: linear)", choices=("linear", "cosine"), common=False
    )
    mask_token_id: int | None = _option(
        "int", "id of the mask token, for a checkpoint that does not say", expected="0 or more", valid=_not_negative
    )
    suppress_tokens: tuple[int, ...] | None = _option(
        "ints",
        "token ids never to emit, beside the mask; separated by commas",
        expected="token ids, 0 or more",
        valid=_not_negative,
    )
    begin_suppress_tokens: tuple[int, ...] | None = _option(
        "ints",
        "token ids whose positions are committed last (dllm's name; they may still be emitted); separated by commas",
        expected="token ids, 0 or more",
        valid=_not_negative,
        common=False,
    )
    stop_at_eos: bool | None = _option(
        "bool", "stop when everything up to the first end-of-sequence token is committed (default: true)"
    )
    after_eos: str | None = _option(
        "str",
        "positions after an end of sequence that is committed before what precedes it: fill them like others, skip "
        "them (d2Cache), or write eos over them (Fast-dLLM's early stop)",
        choices=("fill", "skip", "eos"),
        approximate=lambda value: value != "fill",
    )
    eos_token_ids: tuple[int, ...] | None = _option(
        "ints", "end-of-sequence ids", expected="token ids, 0 or more", valid=_not_negative, cli=False
    )
    full_logprobs: bool | None = _option(
        "bool", "keep the log-probabilities of the whole vocabulary for every token, not only the top 20", cli=False
    )
    sampler: Callable[..., Any] | None = _option(
        "object",
        "a host's sampler: called on rows [n, vocabulary] of log-probabilities, returns n token ids",
        cli=False,
    )

    def __post_init__(self) -> None:
        _check(self)


def table() -> tuple[Field[Any], ...]:
    """All options, in the order of the documentation."""
    return (*fields(LoadOptions), *fields(DecodingOptions))


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Sort keyword values into (load options, decoding options, everything else)."""
    load: dict[str, Any] = {}
    decoding: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    load_names = {f.name for f in fields(LoadOptions)}
    decoding_names = {f.name for f in fields(DecodingOptions)}
    for name, value in values.items():
        (load if name in load_names else decoding if name in decoding_names else rest)[name] = value
    return load, decoding, rest


def approximations(values: Mapping[str, Any]) -> list[str]:
    """Those of some option values that trade exactness for speed, as ``name value``. A cache that computes everything
    in every forward does not."""
    return [
        f"{option.name} {values[option.name]}"
        for option in fields(DecodingOptions)
        if values.get(option.name) is not None
        and option.metadata["approximate"](values[option.name])
        and not (option.name == "cache" and values.get("refresh_interval") == 1)
    ]


def merge(*layers: Mapping[str, Any]) -> DecodingOptions:
    """Options from layers of values, later layers first; None counts as absent."""
    values: dict[str, Any] = {}
    for layer in layers:
        values.update({name: value for name, value in layer.items() if value is not None})
    return DecodingOptions(**values)


def parse(option: Field[Any], text: str) -> Any:
    """A command line's text as the option's value. Raises DiffusionError."""
    kind = option.metadata["kind"]
    try:
        if kind == "int":
            value: Any = int(text)
        elif kind == "float":
            value = float(text)
        elif kind == "bool":
            value = {"true": True, "t": True, "false": False, "f": False}[text.lower()]
        elif kind == "ints":
            value = tuple(int(part) for part in text.replace(",", " ").split())
        else:
            value = text
    except (ValueError, KeyError):
        raise DiffusionError(_refusal(option, text)) from None
    return _checked(option, value)


def add_arguments(
    group: Any, prefix: str = "", wanted: Callable[[Field[Any]], bool] = lambda option: True
) -> dict[str, argparse.Action]:
    """
    Offer the options of the table that are for command lines on an argparse group, without defaults.

    Args:
        prefix: of their names in the namespace.
        wanted: which of them.

    Returns:
        dict: the actions by option name.
    """
    actions = {}
    for option in table():
        if option.metadata["cli"] and wanted(option):
            actions[option.name] = group.add_argument(
                "--" + option.name.replace("_", "-"),
                dest=prefix + option.name,
                default=None,
                type=_argument(option),
                choices=option.metadata["choices"] or None,
                metavar=None if option.metadata["choices"] else option.name.upper(),
                help=option.metadata["help"],
            )
    return actions


def _argument(option: Field[Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(option, text)
        except DiffusionError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _check(options: Any) -> None:
    for option in fields(options):
        value = getattr(options, option.name)
        if value is not None:
            object.__setattr__(options, option.name, _checked(option, value))


def _checked(option: Field[Any], value: Any) -> Any:
    kind, choices, valid = (option.metadata[key] for key in ("kind", "choices", "valid"))
    given = value
    if kind == "object":
        good = callable(value)
    elif kind == "int":
        good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        value = int(value) if good else value
    elif kind == "float":
        good = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        value = float(value) if good else value
    elif kind == "bool":
        good = isinstance(value, bool)
    elif kind == "ints":
        value = value.tolist() if hasattr(value, "tolist") else value
        value = (value,) if isinstance(value, int) else value
        good = isinstance(value, (list, tuple, set, frozenset)) and all(
            isinstance(v, numbers.Integral) and not isinstance(v, bool) and valid(v) for v in value
        )
        value = tuple(sorted(int(v) for v in value)) if good else value
    else:
        good = isinstance(value, str) and bool(value) and (not choices or value in choices)
    if not good or (valid is not None and kind in ("int", "float") and not valid(value)):
        raise DiffusionError(_refusal(option, value if kind == "ints" else given))
    if kind in ("int", "float") and option.name != "seed" and abs(value) > LARGEST[kind]:
        raise DiffusionError(f"{option.name} {given!r} is too large: give at most {LARGEST[kind]:g}.")
    return value


def _refusal(option: Field[Any], value: Any) -> str:
    words = {
        "int": "an integer",
        "float": "a number",
        "bool": "true or false",
        "ints": "token ids",
        "object": "a callable",
        "str": "text",
    }
    choices = option.metadata["choices"]
    expected = option.metadata["expected"] or (f"one of {', '.join(choices)}" if choices else "")
    return f"{option.name} must be {expected or words[option.metadata['kind']]}, got {value!r}."
