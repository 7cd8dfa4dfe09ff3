"""A sampler apart from the maths of its model: the reference's own generate function runs with a stand-in for its
model, whose forward returns the logits of the model here. Its tokens then must be those of ``decode()``, written in the
same steps.

All that is chosen at random is taken greedily on both sides. Here nothing is kept between forwards (``cache none``), as
in the stand-in, so that both sides see the same logits.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decode import DecodingResult, decode
from ..errors import DiffusionError, printable
from ..options import DecodingOptions
from ..plan import Plan, plan
from ..samplers import RULES
from ..spec import DiffusionSpec
from .find import apart
from .stand_in import Answers, Reference, last_line, shown, stand_in
from .steps import StepDifference, Steps, compare_steps

if TYPE_CHECKING:
    import torch

# What a reference calls an option of decoding here. Names that are the same on both sides are in _SAME.
_OPTIONS = {
    "gen_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "block_length": "block_length",
    "block_size": "block_length",
    "small_block_size": "sub_block_length",
    "steps": "max_denoising_steps",
    "denoising_steps": "max_denoising_steps",
    "diffusion_steps": "max_denoising_steps",
    "mask_id": "mask_token_id",
    "mask_token_id": "mask_token_id",
    "mask_index": "mask_token_id",
    "eos_id": "eos_token_ids",
    "eos_token_id": "eos_token_ids",
    "stop_token": "eos_token_ids",
    "stopping_criteria_idx": "eos_token_ids",
    "confidence_threshold": "threshold",
    "eb_threshold": "entropy_bound",
    "remasking": "unmasking",
    "remasking_strategy": "unmasking",
    "alg": "unmasking",
}
_SAME = (
    *("threshold", "editing_threshold", "factor", "cfg_scale", "eps", "alg_temp", "top_p", "top_k"),
    *("max_post_steps", "num_to_transfer", "max_steps_per_block"),
)
_OPTIONS |= {name: name for name in _SAME}
_PROMPT = ("prompt", "input_ids", "inputs", "x", "prompt_ids")
# The rules that a reference means by these arguments.
_RULES = {
    "remasking": ("low_confidence", "random"),
    "remasking_strategy": ("sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded"),
    "alg": ("origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold"),
}
# What Dream's diffusion_generate reads from **kwargs. What it is not told comes from transformers' old defaults.
_DREAM = ("max_new_tokens", "steps", "temperature", "top_p", "top_k", "alg", "alg_temp", "eps", "mask_token_id")
_MISSING = object()


@dataclass(frozen=True)
class Comparison:
    """
    Args:
        prompt_ids: the prompt.
        reference_tokens: what the reference's sampler wrote after it, as far as ``our_tokens`` go.
        our_tokens: what ``decode()`` wrote, with the end of sequence.
        first_difference: index of the first token that differs, or None. It may be the number of reference tokens:
            the reference ended before.
        forwards: calls of the stand-in, those included that only fill a cache.
        our_forwards: forwards of ``decode()``, which leaves steps out that commit nothing.
        settings: arguments of the reference's function.
        function: its name.
        our_settings: options of ``decode()``.
        notes: what the reader should know of the run, and what it did not exercise, one sentence each.
        first_step_difference: where the tokens are the same, the first step after which another part of them is
            written, or None.
        steps_compared: how many steps are the same.
    """

    prompt_ids: list[int]
    reference_tokens: list[int]
    our_tokens: list[int]
    first_difference: int | None
    forwards: int
    our_forwards: int
    settings: dict[str, Any]
    function: str
    our_settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    first_step_difference: StepDifference | None = None
    steps_compared: int = 0

    @property
    def difference(self) -> str:
        """The first difference in words, or an empty text."""
        at = self.first_difference
        if at is None:
            return "" if self.first_step_difference is None else str(self.first_step_difference)
        theirs = f"{self.reference_tokens[at]} there" if at < len(self.reference_tokens) else "the output ends there"
        return f"token {at} of the output is the first that differs: {theirs}, {self.our_tokens[at]} here"


def compare(
    found: Reference,
    model: Any,
    spec: DiffusionSpec,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    settings: Mapping[str, str] | None = None,
    function: str | None = None,
) -> Comparison:
    """
    Decode a prompt with the reference's sampler and with ``decode()``, both greedily, and compare the tokens.

    Args:
        found: the reference.
        model: the loaded model, with its spec.
        spec: the model's spec.
        prompt_ids: token ids of one prompt.
        max_tokens: length of the output.
        settings: arguments of the reference's function, as texts; what they mean here is set here too.
        function: name of the function or method; default: the class's own ``generate`` or ``diffusion_generate``, else
            that of the module.

    Raises:
        DiffusionError: no such function; arguments it does not have or that nothing supplies; what a stand-in cannot
            answer; an exception in the reference's code.
    """
    prompt = [int(token) for token in prompt_ids]
    sampler = _sampler(found, function)
    values = {name: sampler.convert(name, text) for name, text in (settings or {}).items()}
    request = _request(sampler, spec, prompt, values, max_tokens)
    run = _run(found, sampler, request, model, spec, prompt)
    result = decode(model, prompt, request.options)
    ours = list(result.tokens)
    stopped = result.finish_reason == "stop"
    if stopped:
        ours.append(result.canvas[len(prompt) + len(ours)])
    theirs, notes = _after_prompt(run.tokens, prompt, request.length)
    theirs = theirs[: len(ours)]
    first, steps = _first_difference(theirs, ours, stopped), Steps()
    if first is None:
        steps = compare_steps(run.answers, request.planned, prompt, result.commits, theirs)
        notes += [steps.note] if steps.note else []
        if steps.difference is None:
            notes += _not_exercised(sampler, request.planned, result)
    return Comparison(
        prompt_ids=prompt,
        reference_tokens=theirs,
        our_tokens=ours,
        first_difference=first,
        forwards=run.answers.forwards,
        our_forwards=result.nfe + result.prefills,
        settings=run.settings,
        function=sampler.name,
        our_settings={
            name: value
            for name in DecodingOptions.__dataclass_fields__
            if (value := getattr(request.options, name)) is not None
        },
        notes=(*run.notes, *notes),
        first_step_difference=steps.difference,
        steps_compared=steps.compared,
    )


def _not_exercised(sampler: _Sampler, planned: Plan, result: DecodingResult) -> Iterator[str]:
    """What the same output says nothing about."""

    def way(option: str, value: float) -> str:
        name = next((name for name in sampler.names if _OPTIONS.get(name) == option), None)
        return f"; try --set {name}={value:g}." if name else "."

    counts = [count for stage in planned.stages for count in stage.counts]
    threshold = planned.values.get("threshold")
    if threshold is not None:
        steps = [[math.exp(one.token) > threshold for one in commit.logprobs] for commit in result.commits]
        lower, higher = (way("threshold", value) for value in (min(0.3, threshold / 2), max(0.95, (1 + threshold) / 2)))
        decided = sum(all(step) and len(step) > max(counts, default=1) for step in steps)
        if not any(map(any, steps)):
            yield f"no position was above the threshold {threshold:g}: this run says nothing about it{lower}"
        elif all(map(all, steps)):
            yield f"every position was above the threshold {threshold:g}: nothing below it was compared{higher}"
        elif decided < len(steps) / 4:
            yield (
                f"in {decided} of {len(steps)} steps the threshold {threshold:g} wrote more than the rule must: this "
                f"run says {'little' if decided else 'nothing'} about it{lower}"
            )
    size = planned.block_length or planned.stages[0].end - planned.stages[0].start
    if size > 2 and "max_denoising_steps" in planned.rule.uses and set(counts) == {1}:
        steps_of = (size - 1) * (1 if planned.block_length else len(planned.stages))
        yield (
            "the schedule has one token for every step: how it shares tokens among fewer steps was not compared"
            + way("max_denoising_steps", steps_of)
        )
    if planned.eos and result.finish_reason != "stop":
        yield "no end of sequence was written: how the reference stops was not compared."


def _after_prompt(tokens: list[int], prompt: list[int], length: int) -> tuple[list[int], list[str]]:
    """What a sampler wrote after its prompt, which it may return too."""
    if tokens[: len(prompt)] == prompt:
        return tokens[len(prompt) :], []
    if len(tokens) >= len(prompt) + length:  # so much only with the prompt
        at = next(i for i, token in enumerate(prompt) if tokens[i] != token)
        return tokens[len(prompt) :], [f"The reference's sampler overwrote the prompt's token {at}."]
    return tokens, []


def _first_difference(theirs: list[int], ours: list[int], stopped: bool) -> int | None:
    """The first index at which they differ. An end of sequence that the reference leaves out is none."""
    for at, (a, b) in enumerate(zip(theirs, ours, strict=False)):
        if a != b:
            return at
    return None if len(theirs) >= len(ours) - stopped else len(theirs)


# The reference's function


@dataclass(frozen=True)
class _Sampler:
    """
    Args:
        name: for the reader.
        bind: ``(stand-in) -> function`` without its model.
        parameters: what else it takes, by name.
        file: where its code is.
    """

    name: str
    bind: Callable[[Any], Callable[..., Any]]
    parameters: Mapping[str, inspect.Parameter]
    file: str

    @property
    def names(self) -> list[str]:
        """The arguments that can be given."""
        own = [name for name, one in self.parameters.items() if one.kind not in _VARIADIC]
        return [*own, *(name for name in _DREAM if name not in own and self.reads_kwargs)]

    @property
    def reads_kwargs(self) -> bool:
        """Whether it makes a configuration of its ``**kwargs``, as Dream's does."""
        kinds = {one.kind for one in self.parameters.values()}
        return inspect.Parameter.VAR_KEYWORD in kinds and "generation_config" in self.parameters

    @property
    def prompt(self) -> str:
        """The name of its prompt. Raises DiffusionError when it has none."""
        name = next((name for name in _PROMPT if name in self.parameters), None)
        if name is None:
            raise DiffusionError(
                f"{self.name} has no argument for the prompt ({', '.join(_PROMPT)}); it takes {self._list()}: give a "
                "function that has one, with --reference FILE.py:NAME."
            )
        return name

    def default(self, name: str) -> Any:
        """An argument's default, or _MISSING."""
        if name not in self.parameters:
            return None
        default = self.parameters[name].default
        return _MISSING if default is inspect.Parameter.empty else default

    def convert(self, name: str, text: str) -> Any:
        """A text as the value of an argument. Raises DiffusionError."""
        if name not in self.names or name == self.prompt:
            raise DiffusionError(f"{self.name} has no setting {name!r}; it takes {self._list()}.")
        return _converted(name, text, self.default(name))

    def refuse_missing(self, names: Sequence[str]) -> None:
        """Raises DiffusionError for arguments without a value."""
        if names:
            raise DiffusionError(
                f"{self.name} needs {', '.join(names)}, which nothing supplies; it takes {self._list()}: give "
                f"--set {names[0]}=VALUE."
            )

    def _list(self) -> str:
        return ", ".join(self.names) or "no arguments"


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _sampler(found: Reference, name: str | None) -> _Sampler:
    """The function that decodes. Raises DiffusionError when there is none, or more than one."""
    way = "give the authors' file with it, as --reference FILE.py:NAME"
    cls, module = found.model_class, found.module
    functions = _functions(module)
    if name is not None:
        if cls is not None and callable(getattr(cls, name, None)):
            return _method(cls, name)
        if name in functions:
            return _function(functions[name])
        raise DiffusionError(
            f"{printable(found.name)} has no function {name!r}; it has "
            f"{', '.join(sorted(functions)) or 'none'}: choose one of them."
        )
    for candidate in ("generate", "diffusion_generate"):
        if cls is not None and _is_own(getattr(cls, candidate, None)):
            return _method(cls, candidate)
    for candidate in ("generate", "block_diffusion_generate"):
        if candidate in functions:
            return _function(functions[candidate])
    others = [candidate for candidate in functions if "generate" in candidate and not candidate.startswith("_")]
    if len(others) == 1:
        return _function(functions[others[0]])
    if others:
        raise DiffusionError(
            f"{printable(found.name)} has the functions {', '.join(sorted(others))}: choose one, with "
            "--reference FILE.py:NAME."
        )
    if callable(getattr(cls, "generate", None)):
        raise DiffusionError(
            f"{printable(found.name)} has only transformers' own generate, which decodes from left to right: {way}."
        )
    raise DiffusionError(f"{printable(found.name)} has no generate function: {way}.")


def _is_own(method: Any) -> bool:
    """Whether a method is there and not one of transformers' mixins."""
    return callable(method) and not str(getattr(method, "__module__", "")).startswith("transformers.generation")


def _functions(module: ModuleType | None) -> dict[str, Any]:
    """The functions that a module defines."""
    if module is None:
        return {}
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    }


def _method(cls: type, name: str) -> _Sampler:
    method = getattr(cls, name)
    parameters = dict(list(inspect.signature(method).parameters.items())[1:])
    return _Sampler(f"{cls.__name__}.{name}", lambda stand_in: getattr(stand_in, name), parameters, _file(method))


def _function(function: Any) -> _Sampler:
    parameters = dict(inspect.signature(function).parameters)
    first = "model" if "model" in parameters else next(iter(parameters), None)
    if first is None or first in _OPTIONS or first in _PROMPT:
        raise DiffusionError(
            f"{function.__name__} has no argument for the model; it takes {', '.join(parameters) or 'no arguments'}: "
            "give a function that has one, with --reference FILE.py:NAME."
        )
    del parameters[first]
    return _Sampler(
        function.__name__, lambda stand_in: partial(function, **{first: stand_in}), parameters, _file(function)
    )


def _file(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code is not None else ""


def _converted(name: str, text: str, default: Any) -> Any:
    """A text by the type of a default: bool, number or text; where there is none, whatever it looks like."""
    lower = text.strip().lower()
    if lower == "none":
        return None
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if lower not in ("true", "false", "1", "0"):
            raise DiffusionError(f"{name} must be true or false, got {text!r}.")
        return lower in ("true", "1")
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(lower, text.strip()))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    if isinstance(default, (int, float)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise DiffusionError(f"{name} must be a number, got {text!r}.")
        return float(value) if isinstance(default, float) else value
    return value


# What is asked of both sides


@dataclass(frozen=True)
class _Request:
    """
    Args:
        arguments: of the reference's function, without prompt and model.
        options: of ``decode()``, which mean the same.
        planned: what they come to.
        length: tokens of the output.
        may_warm: the temperature was left to us.
    """

    arguments: dict[str, Any]
    options: DecodingOptions
    planned: Plan
    length: int
    may_warm: bool


def _request(
    sampler: _Sampler, spec: DiffusionSpec, prompt: list[int], values: dict[str, Any], max_tokens: int
) -> _Request:
    """What both sides are asked for. Raises DiffusionError for what does not go together."""
    ours = _ours(values, len(prompt), spec.vocab_size)
    length = ours.pop("max_tokens", max_tokens)
    if length < 1:
        raise DiffusionError(f"The output must have at least one token to compare samplers, got {length}.")
    names = set(sampler.names)
    rule = RULES.get(ours.get("unmasking") or spec.unmasking)
    if "unmasking" not in ours:
        # Fast-dLLM's versions of LLaDA's sampler, and LLaDA2.1's, whose checkpoints do not tell that they are no 2.0.
        for option, asked, other in (
            ("threshold", ours, "threshold"),
            ("factor", ours, "fast_dllm_factor"),
            ("editing_threshold", names, "joint_threshold_indel" if spec.edit_token_ids else "joint_threshold"),
        ):
            if option in asked and option not in rule.uses:
                ours["unmasking"], rule = other, RULES.get(other)
    causal = spec.attention == "block_causal"
    own_block = spec.defaults.get("block_length")
    if not causal and "block_length" in rule.uses and "block_length" not in ours:
        takes = bool(names & {"block_length", "block_size"})
        ours["block_length"] = math.gcd(own_block, length) if takes and own_block else length
    block = ours.get("block_length") or own_block or length
    steps = ours.get("max_denoising_steps") or spec.defaults.get("max_denoising_steps") or (block if causal else length)
    if "max_denoising_steps" in rule.uses and names & {"steps", "denoising_steps", "diffusion_steps"}:
        ours["max_denoising_steps"] = steps
        if "minimal_topk" in names:  # LLaDA2.0's steps are at most so many, and their schedule is that of a whole block
            least = values.get("minimal_topk", sampler.default("minimal_topk"))
            if isinstance(least, int) and least > 0:
                ours["max_denoising_steps"] = max(min(steps, length // least), 1)
    options = DecodingOptions(max_tokens=length, cache="none", **ours)
    planned = plan(spec, prompt, options)
    if planned.rule.draws(planned.values):
        raise DiffusionError(
            f"The unmasking rule {planned.rule.name!r} picks positions at random, which cannot be compared: choose "
            "another one with --set, or leave it out."
        )
    ids = [token for token in spec.eos_token_ids if token not in spec.stop_token_ids]
    known: dict[str, Any] = {
        "max_length": len(prompt) + length,
        "temperature": 0.0,
        "attention_mask": np.ones((1, len(prompt)), dtype=np.int64),
    }
    of_option: dict[str, Any] = {
        **planned.values,
        "max_tokens": length,
        "block_length": planned.block_length or block,
        "max_denoising_steps": steps,
        "mask_token_id": planned.mask_token_id,
        "eos_token_ids": ids[0] if ids else _MISSING,
        "unmasking": planned.rule.name,
        "top_p": None,
        "top_k": None,
        "sub_block_length": ours.get("sub_block_length") or planned.values.get("sub_block_length", _MISSING),
    }
    known |= {name: of_option[option] for name, option in _OPTIONS.items() if option in of_option}
    known["stopping_criteria_idx"] = sorted(planned.eos) or _MISSING  # a list
    if "small_block_size" in names:  # Fast-dLLM v2 counts whole blocks, the prompt's last one too
        known["max_new_tokens"] = (-(-length // block) + 1) * block
    arguments, missing = {}, []
    for name in sampler.names:
        if name == sampler.prompt:
            continue
        value = values[name] if name in values else _known(name, sampler, known, values)
        if value is not _MISSING:
            arguments[name] = value
        elif sampler.default(name) is _MISSING:
            missing.append(name)
    sampler.refuse_missing(missing)
    return _Request(arguments, options, planned, length, "temperature" in arguments and "temperature" not in values)


def _known(name: str, sampler: _Sampler, known: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """What we say of an argument that nobody set, or _MISSING: its default is right."""
    value, default = known.get(name, _MISSING), sampler.default(name)
    if name == "attention_mask" and default is not _MISSING and not values.get("cfg_scale"):
        return _MISSING  # LLaDA's guidance alone needs it
    if name == "max_length" and {"gen_length", "max_new_tokens", "max_tokens"} & set(sampler.names):
        return _MISSING
    if name in ("top_p", "top_k") and name in sampler.parameters and default is not _MISSING:
        return _MISSING
    if name in _RULES and value not in _RULES[name]:
        return _MISSING
    if _OPTIONS.get(name) == "threshold" and default is None and value is not _MISSING and value >= 1:
        return _MISSING  # no confidence exceeds it: a reference says None
    return value


def _ours(values: Mapping[str, Any], prompt: int, vocab_size: int) -> dict[str, Any]:
    """The decoding options that settings of a reference mean here. Raises DiffusionError."""
    ours: dict[str, Any] = {}
    for name, value in values.items():
        option = _OPTIONS.get(name)
        if name == "temperature" and value:
            raise DiffusionError(
                f"temperature {value} draws tokens at random, which cannot be compared: leave it out, for 0."
            )
        if name == "max_length":
            option, value = "max_tokens", value - prompt if isinstance(value, int) else value
        if option is None or value is None:
            continue
        _check_setting(name, option, value, vocab_size)
        ours[option] = value
    flags = bool(values.get("logits_eos_inf")), bool(values.get("confidence_eos_eot_inf"))
    if any(flags):
        ours["eos_flags"] = {(True, False): "logits", (False, True): "confidence", (True, True): "both"}[flags]
    return ours


def _check_setting(name: str, option: str, value: Any, vocab_size: int) -> None:
    """Raises DiffusionError for what is no value of an option here, which names the setting."""
    try:
        ids = DecodingOptions(**{option: value}).eos_token_ids or ()
    except DiffusionError as error:
        said = "" if name == option else f"--set {name}={value}: "
        raise DiffusionError(f"{said}{error}") from None
    outside = next((token for token in ids if token >= vocab_size), None)
    if outside is not None:
        raise DiffusionError(
            f"--set {name}={value}: id {outside} is outside the vocabulary of {vocab_size}; give one of the "
            "checkpoint's ids."
        )


# The run of the reference


@dataclass(frozen=True)
class _Ran:
    tokens: list[int]
    answers: Answers
    settings: dict[str, Any]
    notes: tuple[str, ...]


def _run(
    found: Reference, sampler: _Sampler, request: _Request, model: Any, spec: DiffusionSpec, prompt: list[int]
) -> _Ran:
    """Run the reference's function. Raises DiffusionError for what it does wrong."""
    import torch

    def attempt(arguments: dict[str, Any]) -> tuple[Any, Answers]:
        answers = Answers(found, sampler.name, model, spec, request.planned)
        function = sampler.bind(stand_in(found, answers))
        given = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
        with torch.no_grad(), _greedily(), apart():
            returned = function(**{sampler.prompt: _as_prompt(prompt)}, **given)
        if answers.refusal is not None:  # the reference's code caught it
            raise answers.refusal
        return returned, answers

    arguments, notes = request.arguments, []
    try:
        try:
            returned, answers = attempt(arguments)
        except (RuntimeError, ArithmeticError) as error:
            # SDAR divides by the temperature.
            if not request.may_warm:
                raise
            arguments = {**arguments, "temperature": 1.0}
            try:
                returned, answers = attempt(arguments)
            except (RuntimeError, ArithmeticError):
                raise error from None
            notes.append(
                f"{sampler.name} fails at temperature 0 ({last_line(error)}): it ran at temperature 1, and what it "
                "draws is the most probable token."
            )
    except DiffusionError:
        raise
    except (Exception, SystemExit) as error:
        if os.environ.get("MLX_DLLM_DEBUG") == "1":
            raise
        raise DiffusionError(
            f"{sampler.name} of {printable(found.name)} failed in its own code: {last_line(error)} "
            f"({_place(error, sampler.file)}); MLX_DLLM_DEBUG=1 shows all."
        ) from error
    tokens = _ids_of(sampler, returned, spec.vocab_size)
    settings = {name: value for name, value in arguments.items() if not isinstance(value, np.ndarray)}
    return _Ran(tokens, answers, settings, (*notes, *answers.notes))


def _place(error: BaseException, file: str) -> str:
    """The last line of the reference's own file that an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return printable(f"{frame.filename} line {frame.lineno}")


@contextlib.contextmanager
def _greedily() -> Iterator[None]:
    """torch draws the most probable."""
    import torch

    def most_probable(input: torch.Tensor, num_samples: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not bool(torch.isfinite(input).all()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return input.argmax(-1, keepdim=True) if num_samples == 1 else input.topk(num_samples, dim=-1).indices

    before = torch.multinomial, torch.Tensor.multinomial
    torch.multinomial = torch.Tensor.multinomial = most_probable  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.multinomial, torch.Tensor.multinomial = before  # type: ignore[method-assign]


def _as_prompt(ids: list[int]) -> torch.Tensor:
    """A prompt [1, P]: the tensor of its ids, and as SDAR's takes it what a tokenizer returns, ``["input_ids"]``."""
    import torch

    class Prompt(torch.Tensor):
        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, str):
                return {"input_ids": self, "attention_mask": torch.ones_like(self)}[key]
            return super().__getitem__(key)

        @property
        def input_ids(self) -> torch.Tensor:
            return self

    return torch.tensor([ids], dtype=torch.int64).as_subclass(Prompt)


def _ids_of(sampler: _Sampler, returned: Any, vocab_size: int) -> list[int]:
    """The token ids of the first row. Raises DiffusionError."""
    import torch

    value = returned
    if isinstance(value, Mapping) and "sequences" in value:
        value = value["sequences"]
    value = getattr(value, "sequences", value)
    if isinstance(value, tuple) and value:
        value = value[0]
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    while isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple, torch.Tensor)):
        value = value[0].tolist() if isinstance(value[0], torch.Tensor) else value[0]
    if not isinstance(value, (list, tuple)) or not all(type(token) is int for token in value):
        raise DiffusionError(
            f"{sampler.name} returned {shown(returned)}, and token ids are expected: a tensor [1, length], a list, or "
            "an object with .sequences."
        )
    outside = next((token for token in value if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise DiffusionError(
            f"{sampler.name} returned token id {outside}, outside the vocabulary of {vocab_size}: give the sampler "
            "that belongs to the checkpoint."
        )
    return list(value)
