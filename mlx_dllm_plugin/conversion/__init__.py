"""Conversion of diffusion checkpoints without damage: everything that is no weight is kept as it is, and proved.

The copy is made in a hidden directory beside its destination and moved there when it is whole and proved; whatever
happens before that, nothing is left. Reading and writing weights is mlx-lm's; the source is only read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import inspect
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from ..checkpoint import Checkpoint, check_weights, has_tokenizer, open_checkpoint, resolve_run_directory
from ..errors import CheckpointError, DiffusionError, note
from ..families import Family
from ..spec import ATTENTION, UNMASKING, DiffusionSpec, announce, check_mask_token_id, detect, resolve
from . import files, recipes
from .recipes import RECIPES, mixed

if TYPE_CHECKING:
    from .report import Report

__all__ = ["RECIPES", "Request", "convert", "mixed"]

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Request:
    """
    What ``mlx_lm.convert`` is asked for, under its names, and what is added to it.

    Args:
        family: treat the source as one of this family.
        tokenizer: directory whose tokenizer files the copy gets.
        mask_token_id: id of the mask, for the copy's config.json.
        unmasking, attention: what a checkpoint is that declares the same as another kind, for the copy's config.json.
        report: compare copy and source, and print it.
    """

    hf_path: str
    mlx_path: str | Path = "mlx_model"
    quantize: bool = False
    q_group_size: int | None = None
    q_bits: int | None = None
    q_mode: str = "affine"
    dtype: str | None = None
    upload_repo: str | None = None
    revision: str | None = None
    dequantize: bool = False
    quant_predicate: recipes.Predicate | str | None = None
    trust_remote_code: bool = False
    family: str | None = None
    tokenizer: str | Path | None = None
    mask_token_id: int | None = None
    unmasking: str | None = None
    attention: str | None = None
    report: bool = True

    @property
    def destination(self) -> Path:
        return Path(self.mlx_path)

    @property
    def group_size(self) -> int:
        """The one asked for, or the mode's own."""
        return self.q_group_size or recipes.MODES[self.q_mode][0][0]


@dataclass(frozen=True)
class _Source:
    """A checkpoint that is converted: ``spec`` is that of the copy too, and ``tokenizer`` where its files are."""

    checkpoint: Checkpoint
    family: Family
    spec: DiffusionSpec
    tokenizer: Path

    @property
    def path(self) -> Path:
        return self.checkpoint.path


def convert(request: Request, path: Path, fetch: Callable[[], Path] | None = None) -> Report | None:
    """
    Convert a diffusion checkpoint.

    Args:
        path: the checkpoint or run directory.
        fetch: gets the weights too, if only the other files are in ``path``. Returns the directory.

    Returns:
        Report: what it cost; None if that was not asked for.

    Raises:
        DiffusionError: the request is impossible, in one sentence; nothing was written.
        CheckpointError: the source is broken, or a copy would not be what it is.
    """
    source = _open(request, path)
    _check(request, source)
    if fetch is not None:
        source = _open(request, fetch())
    check_weights(source.path)
    announce(source.checkpoint, source.family)
    if source.spec.mask_token_id is None:
        last = source.spec.vocab_size - 1
        note(
            f"{source.path} does not say which token is its mask, so that the copy needs --mask-token-id too: give it "
            f"here, and it is written into the copy; of a vocabulary that was grown by a mask it is the last, {last}."
        )
    with _stopped_by_signals(), _workshop(request.destination) as work:
        tokenizers = _make(request, source, work)
        _move(work, request.destination)
    print(f"[INFO] Saved to {request.destination}", flush=True)
    found = _report(source, request.destination, tokenizers) if request.report else None
    if request.upload_repo is not None:
        from mlx_lm import utils

        try:
            utils.upload_to_hub(str(request.destination), request.upload_repo)
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise DiffusionError(
                f"{request.destination} is made, but could not be uploaded to {request.upload_repo} "
                f"({type(error).__name__}: {why}): upload it later, with `hf upload`."
            ) from error
    return found


def _open(request: Request, path: Path) -> _Source:
    checkpoint = open_checkpoint(path)
    family = detect(checkpoint, request.family)
    if family is None:
        raise DiffusionError(f"{path} has no diffusion spec: force a family with --family.")
    tokenizer = checkpoint.path
    if request.tokenizer is not None:
        tokenizer = resolve_run_directory(Path(request.tokenizer))
        if not has_tokenizer(tokenizer):
            raise CheckpointError(f"{tokenizer} has no tokenizer files (tokenizer.json, vocab.json, tokenizer.model).")
        of = Checkpoint(tokenizer, {})
        known = {"tokenizer_config": of.tokenizer_config, "added_tokens": of.added_tokens}
        checkpoint = Checkpoint(checkpoint.path, checkpoint.config, **known)
    elif not has_tokenizer(tokenizer):
        raise CheckpointError(
            f"{tokenizer} has no tokenizer files: give the directory of the source model's tokenizer with --tokenizer "
            "DIR, in Python tokenizer=DIR."
        )
    checkpoint, spec = _told(request, files.with_mask(checkpoint, family, request.mask_token_id), family)
    source = spec.sources["mask_token_id"] if request.mask_token_id is None else "the option"
    check_mask_token_id(spec.mask_token_id, spec.vocab_size, source)
    return _Source(checkpoint, family, spec, tokenizer)


def _told(request: Request, checkpoint: Checkpoint, family: Family) -> tuple[Checkpoint, DiffusionSpec]:
    """
    A checkpoint with what the request says of its kind in its config.json, or what the destination's name says where
    otherwise a kind would be assumed.

    Raises:
        DiffusionError: it has no two kinds.
    """
    spec = resolve(checkpoint, family)
    told = {key: value for key, value in ((UNMASKING, request.unmasking), (ATTENTION, request.attention)) if value}
    if not told and "assumed" in spec.sources["unmasking"]:
        named = resolve(files.changed(checkpoint, path=request.destination), family)
        if "assumed" not in named.sources["unmasking"]:
            told = {UNMASKING: named.unmasking}
            note(f"{checkpoint.path} is taken for {named.sources['unmasking']}, as the name of its copy says.")
    if not told:
        return checkpoint, spec
    checkpoint = files.changed(checkpoint, config={**checkpoint.config, **told})
    spec = resolve(checkpoint, family)
    for name, key in (("unmasking", UNMASKING), ("attention", ATTENTION)):
        if key in told and getattr(spec, name) != told[key]:
            raise DiffusionError(
                f"--{name} {told[key]} says what a checkpoint is that may be of two kinds, and {checkpoint.path} is "
                f"{getattr(spec, name)}: leave it out; when decoding, --{name} may choose otherwise."
            )
    return checkpoint, spec


def _check(request: Request, source: _Source) -> None:
    """Raises DiffusionError for what is impossible, before anything is written or any weight is read."""
    _check_types(request)
    to = request.destination
    if os.path.lexists(to):
        raise DiffusionError(f"{to} exists already: choose another --mlx-path, or remove it.")
    for root in {source.path, Path(request.hf_path)}:
        if root.exists() and to.resolve().is_relative_to(root.resolve()):
            raise DiffusionError(f"{to} is inside the source {root}, which is not written to: choose another place.")
    if request.quantize and request.dequantize:
        raise DiffusionError("-q and -d cannot be combined: quantize or dequantize.")
    if not request.quantize:
        for option, value in (
            ("--quant-predicate", request.quant_predicate),
            ("--q-bits", request.q_bits),
            ("--q-group-size", request.q_group_size),
            ("--q-mode", None if request.q_mode == "affine" else request.q_mode),
        ):
            if value is not None:
                raise DiffusionError(f"{option} says how to quantize, which is only done with -q: add it.")
    if request.dtype is not None and request.dtype not in DTYPES:
        raise DiffusionError(f"dtype must be one of {', '.join(DTYPES)}, got {request.dtype!r}.")
    is_quantized = files.quantization_of(source.checkpoint)
    if request.quantize:
        _check_mode(request)
        if is_quantized is not None:
            raise DiffusionError(
                f"{source.path} is quantized already ({is_quantized}), and more would be lost twice: convert the "
                "original, or first make a copy with --dequantize."
            )
    if request.dequantize and is_quantized is None:
        raise DiffusionError(f"{source.path} is not quantized: leave out --dequantize.")


def _check_types(request: Request) -> None:
    """Raises DiffusionError for what Python takes and nobody can mean."""
    for name, kinds, expected in (
        ("mlx_path", (str, os.PathLike), "a path"),
        ("q_mode", (str,), "a name"),
        ("q_bits", (int, NoneType), "a whole number"),
        ("q_group_size", (int, NoneType), "a whole number"),
        ("mask_token_id", (int, NoneType), "a token id"),
        ("report", (bool,), "True or False"),
    ):
        value = getattr(request, name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise DiffusionError(f"{name} must be {expected}, got {value!r}.")
    recipe = request.quant_predicate
    if recipe is not None and not isinstance(recipe, str) and not callable(recipe):
        raise DiffusionError(f"quant_predicate must be the name of a recipe or a function, got {recipe!r}.")


def _check_mode(request: Request) -> None:
    mode, recipe = request.q_mode, request.quant_predicate
    if mode not in recipes.MODES:
        raise DiffusionError(f"q_mode must be one of {', '.join(recipes.MODES)}, got {mode!r}.")
    sizes, bits = recipes.MODES[mode]
    for option, value, allowed in (("q_bits", request.q_bits, bits), ("q_group_size", request.q_group_size, sizes)):
        if value is not None and (isinstance(value, bool) or value not in allowed):
            shown = ", ".join(map(str, sorted(allowed)))
            raise DiffusionError(f"{option} must be {'one of ' * (len(allowed) > 1)}{shown} for {mode}, got {value!r}.")
    if isinstance(recipe, str) and mode != "affine":
        raise DiffusionError(f"--quant-predicate {recipe} is made for --q-mode affine, got {mode}: leave one out.")


def _make(request: Request, source: _Source, work: Path) -> tuple[Any, Any]:
    """Write a whole copy and prove it. Returns the tokenizers of source and copy."""
    from mlx_lm import utils

    from .. import battery
    from ..runtime import load_tokenizer, load_with_spec

    print("[INFO] Loading", flush=True)
    plain = inspect.unwrap(utils.load_model)
    # The cast for MLX's CPU backend is for computing: a copy keeps the source's type.
    family = dataclasses.replace(source.family, float32_on_cpu=False)
    model, config = load_with_spec(plain, source.path, family, source.spec, lazy=True)
    model, config = _reduced(request, model, config)
    named = source.tokenizer if source.tokenizer != source.path else None
    with _writing(request.destination):
        utils.save_model(work, model, donate_model=True)
        del model
        files.write_config(work, source.checkpoint.config, config, request.dtype)
        files.copy(source.path, work, tokenizer=named, quantized=not request.dequantize)
        if not (Path(request.hf_path).exists() and (work / "README.md").is_file()):
            _write_card(request, work)
        asked = battery.locate(source.path)  # that of a run too
        if asked is not None and asked.parent != source.path:
            shutil.copyfile(asked, work / asked.name)
    files.prove_finite(work, request.destination)

    files.prove_spec(work, source.family, source.spec)
    load_with_spec(plain, work, family, source.spec, lazy=True)
    first = load_tokenizer(source.tokenizer, trusted=request.trust_remote_code)
    second = load_tokenizer(work, trusted=request.trust_remote_code, quiet=True)
    count = files.prove_tokenizer(first, second)
    print(f"[INFO] The copy's tokenizer reads and writes {count} of {count} probes as its source", flush=True)
    return first, second


def _reduced(request: Request, model: Any, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model and its configuration, cast, quantized or dequantized as asked."""
    from mlx_lm import utils

    if request.dequantize:
        print("[INFO] Dequantizing", flush=True)
        for key in files.QUANTIZATION:
            config.pop(key, None)
        model = utils.dequantize_model(model)
    dtype = request.dtype or config.get("torch_dtype")
    if dtype in DTYPES:
        print("[INFO] Using dtype:", dtype, flush=True)
        recipes.cast(model, dtype)
    if request.quantize:
        predicate = request.quant_predicate
        if isinstance(predicate, str):
            predicate = recipes.named(predicate, model, request.q_group_size)
        plan = recipes.plan(model, predicate, request.group_size)
        if plan.left:
            more = f"; --q-group-size {plan.fitting} takes more" if plan.fitting else ""
            of = len(plan.left) + len(plan.chosen)
            print(f"[INFO] {len(plan.left)} of {of} layers stay as they are: no groups of {request.group_size}{more}")
        print("[INFO] Quantizing", flush=True)
        model, config = utils.quantize_model(
            model,
            config,
            request.group_size,
            request.q_bits,
            mode=request.q_mode,
            quant_predicate=lambda name, module: plan.chosen.get(name, False),
        )
    return model, config


def _write_card(request: Request, work: Path) -> None:
    """mlx-lm's model card, which names the original of a hub id."""
    from mlx_lm import utils

    is_repository = not Path(request.hf_path).exists()
    try:
        utils.create_model_card(work, request.hf_path if is_repository else None)
    except Exception as error:
        if not is_repository:
            raise
        note(f"The model card of {request.hf_path} cannot be had ({type(error).__name__}): the copy gets an empty one.")
        utils.create_model_card(work, None)


def _report(source: _Source, copy: Path, tokenizers: tuple[Any, Any]) -> Report | None:
    """Compare and print. The conversion stands whatever happens here."""
    from . import report

    try:
        found = report.measure(source.path, copy, source.family, source.spec, tokenizers)
        print(found.table(), flush=True)
        return found
    except KeyboardInterrupt:
        note(f"{copy} is complete; only its comparison with the source was interrupted.")
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        note(f"{copy} stands, but could not be compared with its source ({type(error).__name__}: {why}).")
        return None


@contextlib.contextmanager
def _writing(destination: Path) -> Iterator[None]:
    """Raises DiffusionError where files cannot be written: the device may be full."""
    try:
        yield
    except DiffusionError:
        raise
    except (OSError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise DiffusionError(
            f"{destination} cannot be written ({why}): make room there, or choose another --mlx-path."
        ) from error


@contextlib.contextmanager
def _workshop(destination: Path) -> Iterator[Path]:
    """
    Where a copy is made: below a hidden directory beside its destination, under its final name, by which some
    checkpoints are told apart. Removed at the end, with the parents that were made for it, if they are empty.

    Raises:
        DiffusionError: nothing can be written there.
    """
    parents = [parent for parent in destination.absolute().parents if not parent.exists()]
    hidden = None
    try:
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            name = destination.name.encode()[:100].decode(errors="ignore")
            for left in destination.parent.glob(f".{glob.escape(name)}.*.partial"):
                note(f"{left} is left of a conversion that was killed, or one that is running: it may be removed then.")
            prefix = f".{name}."
            hidden = Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=destination.parent))
            work = hidden / destination.name
            work.mkdir()
        except OSError as error:
            raise DiffusionError(
                f"{destination} cannot be made ({error.filename or destination.parent}: {error.strerror or error}): "
                "choose another --mlx-path."
            ) from error
        yield work
    finally:
        with _undisturbed():
            if hidden is not None:
                shutil.rmtree(hidden, ignore_errors=True)
            for parent in parents:
                with contextlib.suppress(OSError):
                    parent.rmdir()


def _move(work: Path, destination: Path) -> None:
    """Put a copy in its place, unless there is one by now. Raises DiffusionError."""
    try:
        destination.mkdir()  # one of several that come at once makes it; a rename would replace an empty directory
    except FileExistsError:
        raise DiffusionError(
            f"{destination} was made by somebody else meanwhile and is left alone: choose another --mlx-path."
        ) from None
    try:
        os.rename(work, destination)
    except BaseException as error:
        with contextlib.suppress(OSError):
            destination.rmdir()
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise DiffusionError(
                f"{destination} is being written to by somebody else: choose another --mlx-path."
            ) from None
        raise


_ENDING = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Where nobody else handles them, signals that end the process end it by SystemExit, so that nothing is left."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, stop) for n in _ENDING if is_main and signal.getsignal(n) == signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that would interrupt are ignored for a moment."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, *_ENDING):
            if signal.getsignal(number) is not None:
                before[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
