"""A checkpoint: its spec, tokenizer, weights and memory, and what the hosts will do with it. No weight is read."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import importlib
import inspect
import re
import shlex
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checkpoint import (
    Checkpoint,
    check_files,
    check_model_type,
    has_tokenizer,
    indexed_files,
    resolve_run_directory,
    tokenizer_arguments,
)
from ...errors import CheckpointError, DiffusionError
from ...families import Family
from ...spec import DiffusionSpec, detect, resolve
from ..info import spec_problems, tokenizer_problem
from . import Check, Checks, describe, listening, problem, size, some, warning
from .environment import fault_of, installed, memory_of, reinstall, tested
from .startup import has_run, opted_out

_TOKENS = 8192
_COPY_TOKENIZER = "copy tokenizer.json and tokenizer_config.json from the original checkpoint"
_COPY_WEIGHTS = "copy, download or convert the checkpoint again"
# How errors of this package end.
_STEP = re.compile(r"(.*)[;:,] ((?:copy|convert|give|let|use|choose|leave|pass|install|keep|read)\b.*?)\.?")
_LAYERS = 1000  # that a model may have, whatever its weights say
_SPEC = "see spec above"
_CORRECT = "correct config.json, or copy, download or convert the checkpoint again"


@dataclass
class Fit:
    """How the weights fit the model."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)

    def compare(self, expected: dict[str, Any], given: dict[str, Any]) -> None:
        self.missing = [name for name in expected if name not in given]
        self.unexpected = [name for name in given if name not in expected]
        both = [(name, given[name].shape, expected[name].shape) for name in expected if name in given]
        self.misshapen = [f"{name} is {tuple(a)}, expected {tuple(b)}" for name, a, b in both if a != b]
        types = [(name, given[name].dtype, expected[name].dtype) for name in expected if name in given]
        self.mistyped = [f"{name} is {a}" for name, a, b in types if _is_real(b) and not _is_real(a)]

    def __str__(self) -> str:
        parts = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.misshapen,
            "not of floating-point numbers": self.mistyped,
        }
        return "; ".join(f"{len(names)} {what}: {some(names)}" for what, names in parts.items() if names)


class Examination:
    """
    The checks of one checkpoint. What one finds, the later ones use.

    Args:
        given: the command line: the path as the user gave it, and what was said beside it.
    """

    def __init__(self, checkpoint: Checkpoint, given: argparse.Namespace):
        self.checkpoint, self.given = checkpoint, given
        self.name = shlex.quote(given.path)
        self.family: Family | None = None
        self.spec: DiffusionSpec | None = None
        self.model: Any = None
        self.unclear = True  # what it is
        self.faults: list[str] = []  # why it will be refused
        self.broken = ""  # "model" or "config.json": without it nothing can be loaded
        self.is_suspect = False  # config.json: what cannot be loaded may be its fault
        self.unsupported = ""  # why mlx-lm has no model of its type
        self.has_code = False  # it cannot be loaded without
        self.has_template = True  # one that can be rendered, if any

    def checks(self) -> Checks:
        found: Checks = {
            "spec": self.look_at_spec,
            "model": self.look_at_architecture,
            "tokenizer": self.look_at_tokenizer,
            "weights": self.look_at_weights,
            "memory": self.look_at_memory,
            "mlx_lm.generate": self.in_mlx_lm,
            "mlx_vlm.generate": self.in_mlx_vlm,
        }
        return {name: functools.partial(self._noting, check) for name, check in found.items()}

    def _noting(self, check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
        try:
            yield from check()
        except Exception as error:
            self.faults.append(describe(error))
            raise

    def _fault(self, name: str, text: str, advice: str = "") -> Check:
        self.faults.append(text)
        return problem(name, *with_step(text, advice))

    def look_at_spec(self) -> Iterator[Check]:
        yield Check("path", str(self.checkpoint.path))
        try:
            check_model_type(self.checkpoint)
            self.family = detect(self.checkpoint, self.given.family)
            if self.family is not None:
                self.spec = self._with_mask(resolve(self.checkpoint, self.family))
        except DiffusionError as error:
            advice = _CORRECT if isinstance(error, CheckpointError) else "see the families above"
            check = self._fault("spec", str(error), advice)
            yield dataclasses.replace(check, status="warning") if self._is_mlx_vlms() else check
            return
        self.unclear = False
        if self.family is None or self.spec is None:
            kind = self.checkpoint.config.get("model_type")
            yield Check("spec", f"none: autoregressive, model_type {kind!r} and nothing that a family claims")
            return
        faults = spec_problems(self.checkpoint, self.family, self.spec)
        for text in faults:
            yield self._fault("spec", text, _CORRECT)
        if not faults:
            told = self.spec.sources["family"]
            yield Check("spec", f"{_decodes(self.spec)}; told by {told}; mlx-dllm info {self.name} shows all")
        if not self.spec.eos_token_ids:
            advice = "add eos_token_id to generation_config.json"
            yield warning("end of sequence", "nothing says its id: the output is never cut", advice)
        if self.checkpoint.provenance:
            yield warning("run", self.checkpoint.provenance, "let it end, or give the directory of another checkpoint")
        if assumed := self.family.hint(self.checkpoint):
            yield warning("assumed", assumed)

    def _with_mask(self, spec: DiffusionSpec) -> DiffusionSpec:
        number = self.given.mask_token_id
        if number is None:
            return spec
        sources = {**spec.sources, "mask_token_id": "--mask-token-id"}
        return dataclasses.replace(spec, mask_token_id=number, sources=sources)

    def look_at_architecture(self) -> Iterator[Check]:
        """What keeps the code of its model from being imported. It is not the checkpoint's fault."""
        from mlx_lm import utils

        config = copy.deepcopy(self.checkpoint.config)
        if self.unclear or config.get("model_file") is not None:
            return
        default = inspect.signature(inspect.unwrap(utils.load_model)).parameters["get_model_classes"].default
        again = tested("mlx_lm")
        try:
            if self.family is not None:
                self.family.prepare_config(config)
            if self.family is not None and self.family.architecture is not None:
                again = f"{reinstall()}; if that is not enough, {again}"
                importlib.import_module(self.family.architecture(config))
            else:
                default(config=config)
        except Exception as error:
            why = error.__cause__ or error
            if self.is_autoregressive and isinstance(error, ValueError) and isinstance(why, ModuleNotFoundError):
                self.unsupported = describe(error)
            elif self.faults:  # told above
                return
            elif not any("importlib" in frame.filename for frame in traceback.extract_tb(why.__traceback__)):
                self.broken = "config.json"
                yield self._fault("config.json", f"has values that mlx-lm cannot take ({describe(why)})", _CORRECT)
            else:
                self.broken = "model"
                yield self._fault("model", f"its code cannot be imported ({describe(why)})", again)

    def look_at_tokenizer(self) -> Iterator[Check]:
        path = self.checkpoint.path
        if self.broken:  # mlx-lm asks the model for the tokenizer's settings
            yield _not_looked_at("tokenizer", self.broken)
            return
        if self.given.tokenizer is not None:
            path = resolve_run_directory(Path(self.given.tokenizer))
            if not has_tokenizer(path):
                text = f"{self.given.tokenizer} has no tokenizer files (tokenizer.json, vocab.json, tokenizer.model)"
                yield self._fault("tokenizer", text, "give the source model's directory with --tokenizer")
                return
        elif text := tokenizer_problem(path):
            yield self._fault("tokenizer", text)
            return
        with listening() as heard:
            try:
                tokenizer = self._load_tokenizer(path)
            except DiffusionError as error:
                yield self._fault("tokenizer", str(error), _COPY_TOKENIZER)
                return
            except Exception as error:
                if self.family is None and "trust_remote_code" in str(error):
                    self.has_code = True
                    text = "not looked at: it is code beside the weights, which is not run here"
                    yield warning("tokenizer", text, "read it, and allow it with --trust-remote-code")
                elif self.unclear:
                    yield warning("tokenizer", f"not looked at, as it cannot be loaded ({describe(error)})", _SPEC)
                elif self._is_configs_fault(path):
                    self.is_suspect = True
                    text = f"has values that transformers cannot take ({describe(error)})"
                    yield self._fault("config.json", text, _CORRECT)
                else:
                    yield self._fault("tokenizer", f"cannot be loaded ({describe(error)})", _COPY_TOKENIZER)
                return
        if notes := heard.notes():
            yield warning("tokenizer", f"mended in memory: {' '.join(notes)}", _COPY_TOKENIZER)
        else:
            chat = "with" if getattr(tokenizer, "has_chat_template", False) else "without"
            yield Check("tokenizer", f"{len(tokenizer.get_vocab())} tokens, {chat} a chat template")
        yield from self._render(tokenizer)
        if self.spec is not None and self.spec.mask_token_id is not None:
            yield _mask(tokenizer, self.spec)
            highest = max(tokenizer.get_vocab().values())
            if highest >= self.spec.vocab_size:
                yield warning(
                    "vocabulary",
                    f"the tokenizer has ids up to {highest}, the embedding {self.spec.vocab_size} rows",
                    _COPY_TOKENIZER,
                )

    def _render(self, tokenizer: Any) -> Iterator[Check]:
        """What mlx_lm.generate does with every prompt."""
        if not getattr(tokenizer, "has_chat_template", False):
            return
        message = {"role": "user", "content": "Hello"}
        try:
            tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        except Exception as error:
            self.has_template = False
            text = f"one message of a user cannot be rendered ({describe(error)})"
            yield problem("chat template", text, f"{_COPY_TOKENIZER}, or --ignore-chat-template")

    def _is_configs_fault(self, path: Path) -> bool:
        """Whether a tokenizer that cannot be loaded can be without config.json."""
        from transformers import PretrainedConfig

        try:
            self._load_tokenizer(path, config=PretrainedConfig())
        except Exception:
            return False
        return True

    def _load_tokenizer(self, path: Path, **given: Any) -> Any:
        from mlx_lm import utils

        from ... import tokenizers

        own_code = {"trust_remote_code": False, **given}
        extra = own_code if self.family is None else tokenizer_arguments(path, given)
        load = inspect.unwrap(utils.load_tokenizer)
        tokenizer = load(path, extra, eos_token_ids=self.checkpoint.config.get("eos_token_id"))
        if self.family is None:
            return tokenizer
        tokenizers._told.discard(path)  # it is said again here
        return tokenizers.repaired(tokenizer, path)

    def look_at_weights(self) -> Iterator[Check]:
        path, named = self.checkpoint.path, set()
        try:
            named = indexed_files(path)
        except CheckpointError as error:
            if not self.is_autoregressive:
                yield self._fault("weights", str(error))
                return
            text, advice = with_step(str(error), _COPY_WEIGHTS)
            yield warning("weights", f"{text}; mlx-lm reads every model*.safetensors, whatever the index says", advice)
        try:
            headers = check_files(path)
        except CheckpointError as error:
            yield self._fault("weights", str(error))
            return
        yield from _left_over(headers, named)
        if text := _too_many_layers(self.checkpoint.config, headers):
            yield self._fault("weights", text, _CORRECT)
            return
        if self.unclear:
            yield warning("weights", "not compared with a model, as no spec says which", _SPEC)
            return
        if self.checkpoint.config.get("model_file") is not None:
            self.has_code = True
            text = "not looked at: its architecture is code beside them, which is not run here"
            allow = ", and allow it with --trust-remote-code" if self._asks() else ": this mlx-lm runs it unasked"
            yield warning("weights", text, f"read it{allow}")
            return
        if self.unsupported:
            yield warning("weights", self.unsupported, "nothing, if it is for another program than mlx-lm")
            return
        if self.broken:
            yield _not_looked_at("weights", self.broken)
            return
        fit = Fit()
        with listening() as heard:
            try:
                self.model = self._load_model(fit)
            except Exception as error:
                if self.is_suspect and not str(fit):
                    yield _not_looked_at("weights", "config.json")
                else:
                    yield self._fault("weights", str(fit) or f"cannot be loaded ({describe(error)})", _COPY_WEIGHTS)
                return
        if text := str(fit):  # what a model takes, and cannot compute with
            yield self._fault("weights", text, _COPY_WEIGHTS)
            return
        yield Check("weights", f"{len(_parameters(self.model))} arrays, as the model has them")
        for text in heard.notes():
            yield warning("weights", text, "quantize them, or use a GPU")

    def _load_model(self, fit: Fit) -> Any:
        from mlx_lm import utils

        from ...runtime import load_with_spec

        plain = inspect.unwrap(utils.load_model)
        path = self.checkpoint.path
        if self.family is None or self.spec is None:
            default = inspect.signature(plain).parameters["get_model_classes"].default

            def classes(config: dict[str, Any]) -> Any:
                model_class, args_class = default(config=config)
                return _comparing(model_class, fit), args_class

            return plain(path, lazy=True, get_model_classes=classes)[0]
        own = self.family.wrap_class or (lambda model_class: model_class)
        family = dataclasses.replace(self.family, wrap_class=lambda model_class: _comparing(own(model_class), fit))
        return load_with_spec(plain, path, family, self.spec, lazy=True)[0]

    def look_at_memory(self) -> Iterator[Check]:
        import mlx.core as mx

        if self.model is None:
            yield warning("memory", "cannot be told without a model that can be loaded", "see weights above")
            return
        arrays = _parameters(self.model)
        weights = sum(array.nbytes for array in arrays.values())
        length = min(_TOKENS, self.spec.context_length or _TOKENS) if self.spec else _TOKENS
        cache = cache_bytes(self.checkpoint.config, length, _width(mx, arrays))
        parts = f"weights {size(weights)}"
        if cache is not None:
            parts += f", keys and values of {length:,} tokens {size(cache)}"
        limit, whose = memory_of(mx)
        found = f"{parts}; {size(limit)} {whose}"
        if weights + (cache or 0) > limit:
            advice = f"mlx_lm.convert --hf-path {self.name} -q makes a smaller copy"
            yield warning("memory", f"{found}: too little", advice)
        else:
            yield Check("memory", found)

    @property
    def is_autoregressive(self) -> bool:
        return self.family is None and not self.unclear

    def _is_mlx_vlms(self) -> bool:
        from ...families.refused import is_mlx_vlms

        return installed("mlx_vlm") and is_mlx_vlms(self.checkpoint)

    def in_mlx_lm(self) -> Iterator[Check]:
        from ...patches import is_applied

        name, needed = "mlx_lm.generate", (("mlx_lm.utils", "load_model"), ("mlx_lm.generate", "stream_generate"))
        if self.is_autoregressive and self.faults:
            yield warning(name, "cannot load it, as without the plugin: see above")
        elif self.is_autoregressive and self.given.mask_token_id is not None:
            yield warning(name, "refuses it with --mask-token-id, as it has no diffusion spec", "--family forces one")
        elif not self.has_template and not self.faults:
            yield warning(name, "fails at the chat template: see above")
        elif self.has_code and not self.faults:
            how = "decodes it autoregressively" if self.is_autoregressive else "denoises it"
            when = "only with --trust-remote-code" if self._asks() else "and runs its code unasked"
            yield warning(name, f"{how} {when}: see above")
        elif self.is_autoregressive:
            how = "decodes it autoregressively" if self.model is not None else "does with it what it does"
            yield Check(name, f"{how}, as without the plugin")
        elif why := _inactive():
            yield warning(name, f"does not denoise it, as {why}: see above")
        elif self.faults or self.spec is None:
            yield warning(name, "refuses it: see above")
        elif off := [target for target, symbol in needed if not is_applied(target, symbol)]:
            yield warning(name, f"refuses it, as the patch of {', '.join(off)} is off: see above")
        else:
            yield Check(name, f"denoises it as {_decodes(self.spec)}{self._as_given()}")

    def _asks(self) -> bool:
        """Whether code beside the weights is run only where the user allows it: of models, from mlx-lm 0.32 on."""
        from mlx_lm import utils

        parameters = inspect.signature(inspect.unwrap(utils.load_model)).parameters
        return self.checkpoint.config.get("model_file") is None or "trust_remote_code" in parameters

    def _as_given(self) -> str:
        names = {"--family": "family", "--tokenizer": "tokenizer", "--mask-token-id": "mask_token_id"}
        values = [(option, getattr(self.given, name)) for option, name in names.items()]
        words = [f"{option} {shlex.quote(str(value))}" for option, value in values if value is not None]
        return f", with {' '.join(words)}" if words else ""

    def in_mlx_vlm(self) -> Iterator[Check]:
        if not installed("mlx_vlm"):
            return
        from ...patches.mlx_vlm import commands

        name = "mlx_vlm.generate"
        if fault_of("mlx_vlm"):
            yield warning(name, "does not run, as mlx-vlm cannot be imported: see above")
        elif self._is_mlx_vlms():
            yield Check(name, "decodes it by a diffusion of its own")
        elif self.is_autoregressive:
            yield Check(name, "does with it what it does, as without the plugin")
        elif why := _inactive():
            yield warning(name, f"decodes it wrong or not at all, as {why}: see above")
        else:
            try:
                ours = commands.ours_at(self.checkpoint.path)
            except DiffusionError as error:
                yield Check(name, f"does not take it: {error}")
                return
            decodes = "" if self.spec is None else _decodes(self.spec)
            if ours is not None and not commands.is_new(self.checkpoint.config):
                own = "decodes it with LLaDA2 of its own"
                yield Check(name, f"{own}; with --unmasking or --profile as {decodes}")
            elif self.faults:
                yield warning(name, "refuses it: see above")
            else:
                yield Check(name, f"denoises it as {decodes}")


def _decodes(spec: DiffusionSpec) -> str:
    length = "canvas_length" if spec.canvas == "fixed" else "block_length"
    parts = [f"rule {spec.unmasking}"]
    if length in spec.defaults:
        parts.append(f"{length.removesuffix('_length')} {spec.defaults[length]}")
    return f"{spec.family} ({', '.join([*parts, f'mask {spec.mask_token_id}'])})"


def _inactive() -> str:
    """Why commands of this environment run without the plugin, or ""."""
    if off := opted_out():
        return f"{off} turns the plugin off"
    return "" if has_run() else "the start-up hook is not active"


def _not_looked_at(name: str, broken: str) -> Check:
    why = "the code of the model cannot be imported" if broken == "model" else f"{broken} cannot be used"
    return warning(name, f"not looked at, as {why}", f"see {broken} above")


def with_step(text: str, advice: str) -> tuple[str, str]:
    """What is wrong and what to do, where a sentence says both."""
    found = _STEP.fullmatch(text)
    return (found[1], found[2]) if found else (text, advice)


def _left_over(headers: dict[str, dict[str, Any]], named: set[str]) -> Iterator[Check]:
    """Files that do not belong to the others: mlx-lm reads all of them."""
    if named and (files := [file for file in headers if file not in named]):
        text = f"the index does not name {some(files)}, and mlx-lm reads every model*.safetensors"
        yield warning("weights", text, "move elsewhere what is left over from another copy")
        return
    first: dict[str, str] = {}
    for file, entries in headers.items():
        if name := next((name for name in entries if name in first), None):
            text = f"{name} is in {first[name]} and in {file}, and mlx-lm takes either"
            yield warning("weights", text, "move elsewhere what is left over from another copy")
            return
        first |= dict.fromkeys(entries, file)


def _too_many_layers(config: dict[str, Any], headers: dict[str, dict[str, Any]]) -> str:
    """That a model of so many layers is not worth making, or ""."""
    count = _first_of(config, *_LAYER_COUNTS) or 0
    parts = {part for entries in headers.values() for name in entries for part in name.split(".")}
    most = max((int(part) for part in parts if part.isdecimal() and len(part) < 9), default=0) + 1
    return f"{count} layers by config.json, {most} at most by the weights" if count > max(most, _LAYERS) else ""


def _mask(tokenizer: Any, spec: DiffusionSpec) -> Check:
    """Whether the tokenizer and the spec mean the same token."""
    vocabulary = tokenizer.get_vocab()
    number = spec.mask_token_id
    text = next((text for text, of in vocabulary.items() if of == number), None)
    source = spec.sources["mask_token_id"]
    declared = getattr(tokenizer, "mask_token", None)
    other = vocabulary.get(declared) if declared else None
    if text is None:
        return warning("mask token", f"the tokenizer has no token {number}, from {source}", _COPY_TOKENIZER)
    if other is not None and other != number:
        return warning(
            "mask token",
            f"{number} from {source} is {text!r} in the tokenizer, which declares {declared!r}, {other}",
            f"--mask-token-id {other}, if the tokenizer is right; else {_COPY_TOKENIZER}",
        )
    return Check("mask token", f"{number} from {source}, {text!r} in the tokenizer")


def _comparing(model_class: Any, fit: Fit) -> Any:
    """A subclass that notes how weights fit before it takes them."""

    class Comparing(model_class):
        def load_weights(self, file_or_weights: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(file_or_weights, str):
                fit.compare(_parameters(self), dict(file_or_weights))
            return super().load_weights(file_or_weights, *args, **kwargs)

    Comparing.__module__ = model_class.__module__
    return Comparing


def _is_real(dtype: Any) -> bool:
    import mlx.core as mx

    return mx.issubdtype(dtype, mx.floating)


def _parameters(model: Any) -> dict[str, Any]:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.parameters()))


def _width(mx: Any, arrays: dict[str, Any]) -> int:
    """Bytes of a number that is computed with: quantized weights have scales in its type."""
    return next((array.dtype.size for array in arrays.values() if mx.issubdtype(array.dtype, mx.floating)), 2)


def cache_bytes(config: dict[str, Any], tokens: int, width: int) -> int | None:
    """Bytes of the keys and values of so many tokens in all layers, or None where config.json does not tell. More than
    needed where layers see a window only."""
    first = functools.partial(_first_of, config)
    layers = first(*_LAYER_COUNTS)
    heads = first("num_attention_heads", "n_head", "n_heads")
    hidden = first("hidden_size", "n_embd", "d_model")
    if not layers or not heads or not hidden:
        return None
    kept = first("num_key_value_heads", "n_kv_heads") or heads
    return 2 * layers * kept * (first("head_dim") or hidden // heads) * tokens * width


_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers")


def _first_of(config: dict[str, Any], *names: str) -> int | None:
    inner = config.get("text_config")
    config = {**inner, **config} if isinstance(inner, dict) else config
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def checks(checkpoint: Checkpoint, given: argparse.Namespace) -> Checks:
    return Examination(checkpoint, given).checks()
