"""Loading as a library: works with and without the patches. The names that mlx-dllm's callers know are here too."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .checkpoint import (
    Checkpoint,
    check_weights,
    has_tokenizer,
    is_run_directory,
    open_checkpoint,
    read_json,
    stop_thinking,
    tokenizer_arguments,
)
from .checkpoint import resolve_run_directory as _resolve
from .decode import bidirectional_forward
from .errors import CheckpointError, DiffusionError, note
from .families import Family, a2d, family_of
from .spec import ATTENTION, FORCED, UNMASKING, DiffusionSpec, announce, detect, resolve
from .tokenizers import repaired

__all__ = ["A2DConfig", "bidirectional_forward", "complete_run", "load", "load_with_spec"]


@dataclass(frozen=True)
class A2DConfig:
    """The ``a2d`` block of a checkpoint's config.json.

    Args:
        objective: ``mdlm``.
        mask_token_id: id of the mask token.
        final_alpha: attention annealing at the end of training: provenance only, decoding is always at 1.
        sampler: the sampler's settings as written: canvas_len, num_steps, temperature.
        manifest: the run directory's manifest.json, or None.
    """

    objective: str
    mask_token_id: int
    final_alpha: float = 1.0
    sampler: dict[str, Any] | None = None
    manifest: dict[str, Any] | None = field(default=None, compare=False, repr=False)


def load(path_or_repo: str | Path, *, tokenizer: str | Path | None = None) -> tuple[Any, Any, A2DConfig | None]:
    """
    Load a checkpoint, a2d run directory or hub repository for bidirectional decoding.

    A stock checkpoint of a known family is loaded too: it has no a2d block, and decoding it needs ``mask_token_id``.

    Args:
        tokenizer: directory with the tokenizer files, for a checkpoint that has none.

    Returns:
        (model, tokenizer, a2d): the mlx-lm model, which stays causal when called; mlx-lm's tokenizer wrapper; the
        ``a2d`` block, or None for a checkpoint without one (a raw ``checkpoint-<N>``).

    Raises:
        CheckpointError: nothing to load, broken files, no tokenizer.
    """
    from mlx_lm import utils

    path = _resolve(Path(path_or_repo)) if Path(path_or_repo).exists() else _download(str(path_or_repo))
    checkpoint = open_checkpoint(path)
    source = Path(tokenizer) if tokenizer is not None else checkpoint.path
    if not has_tokenizer(source):
        raise CheckpointError(f"{source} has no tokenizer files: give their directory with tokenizer=.")
    kind = checkpoint.config.get("model_type")
    stock = family_of(kind)
    if stock is None and checkpoint.a2d is not None:
        family: Family | None = a2d.whole(str(kind))
    else:
        family = detect(checkpoint) or stock
    plain = inspect.unwrap(utils.load_model)
    announce(checkpoint, family)
    if family is None:
        model, config = plain(checkpoint.path)
    else:
        model, config = load_with_spec(plain, checkpoint.path, family, resolve(checkpoint, family))
    if family is None:
        wrapper = inspect.unwrap(utils.load_tokenizer)(source, None, eos_token_ids=config.get("eos_token_id"))
    else:
        wrapper = load_tokenizer(source, eos_token_ids=config.get("eos_token_id"))
        if not family.thinks:
            stop_thinking(wrapper)
    return model, wrapper, _a2d_of(checkpoint)


def load_tokenizer(source: Path, *, trusted: bool = False, quiet: bool = False, eos_token_ids: Any = None) -> Any:
    """
    mlx-lm's wrapper around the tokenizer of a diffusion checkpoint, reading text as its tokenizer.json says, whatever
    the running command says of tokenizers.

    Args:
        source: directory with the tokenizer files.
        trusted: its own code may run.
        quiet: say nothing of a repair.

    Raises:
        CheckpointError: a tokenizer that is broken, or exists only as code.
    """
    from mlx_lm import utils

    given = {"trust_remote_code": True} if trusted else {}
    try:
        arguments = tokenizer_arguments(source, given)
        wrapper = inspect.unwrap(utils.load_tokenizer)(source, arguments, eos_token_ids=eos_token_ids)
        return repaired(wrapper, source, given, quiet=quiet)
    except CheckpointError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"The tokenizer of {source} cannot be loaded ({type(error).__name__}: {why}); copy its files again."
        ) from error


def load_with_spec(
    load_model: Callable[..., Any],
    path: Path,
    family: Family,
    spec: DiffusionSpec,
    *args: Any,
    get_model_classes: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, dict[str, Any]]:
    """
    mlx-lm's ``load_model`` with the family's hand on configuration, weights and numbers. The spec and the family are
    on the model as ``diffusion_spec`` and ``diffusion_family``.

    Args:
        load_model: mlx-lm's own function; the remaining arguments are its.
    """
    if kwargs.get("strict", True):
        check_weights(path)
    default = inspect.signature(load_model).parameters["get_model_classes"].default
    classes = _classes(family, get_model_classes or default, default)
    try:
        model, config = load_model(path, *args, get_model_classes=classes, **kwargs)
        vars(model).pop("sanitize", None)
        family.repair(model, config)
        if family.float32_on_cpu:
            _cast_on_cpu(model, path)
    except DiffusionError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{path} cannot be loaded as {family.name}: its weights or config.json do not fit the model "
            f"({type(error).__name__}: {why})."
        ) from error
    # A converted copy must not pass for an autoregressive model.
    if family.a2d:
        config.setdefault("a2d", {"objective": "mdlm"})
    elif spec.forced:
        config[FORCED] = family.name
    # Nor must it depend on the name of its directory.
    if "attention" in family.variants:
        config[ATTENTION] = spec.attention
    if "'s name" in spec.sources.get("block_length", "") and spec.attention == "block_causal":
        config.setdefault("block_length", spec.defaults["block_length"])
    if "'s name" in spec.sources.get("unmasking", ""):
        config.setdefault(UNMASKING, spec.unmasking)
    model.diffusion_spec, model.diffusion_family = spec, family
    return model, config


def _cast_on_cpu(model: Any, path: Path) -> None:
    """MLX's CPU backend has no expert gather in 16 bits ("GatherMM only supports float32")."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    half = (mx.bfloat16, mx.float16)
    values: list[Any] = [leaf[1] for leaf in tree_flatten(model.parameters())]
    if mx.default_device() == mx.Device(mx.cpu) and any(value.dtype in half for value in values):
        model.set_dtype(mx.float32)
        note(f"{path.name}: weights are cast to float32: MLX's CPU backend cannot gather experts in 16 bits.")


def _classes(family: Family, get_model_classes: Callable[..., Any], default: Callable[..., Any]) -> Callable[..., Any]:
    def classes(config: dict[str, Any]) -> Any:
        family.prepare_config(config)
        if family.architecture is not None and get_model_classes is default:
            module = importlib.import_module(family.architecture(config))
            model_class, args_class = module.Model, module.ModelArgs
        else:
            model_class, args_class = get_model_classes(config=config)
        if family.wrap_class is not None:
            wrapped = family.wrap_class(model_class)
            wrapped.__module__ = model_class.__module__
            model_class = wrapped

        def make(args: Any) -> Any:
            model = model_class(args)
            own = getattr(model, "sanitize", lambda weights: weights)
            model.sanitize = lambda weights: own(family.sanitize(weights))
            return model

        return make, args_class

    return classes


def _a2d_of(checkpoint: Checkpoint) -> A2DConfig | None:
    block = _parse_a2d(checkpoint.config)
    return replace(block, manifest=checkpoint.manifest) if block else None


def _parse_a2d(config: dict[str, Any]) -> A2DConfig | None:
    """The ``a2d`` block of a config.json as a dict, or None when it has none that names a mask; keys that are not known
    yet are left out."""
    block = config.get("a2d")
    if not isinstance(block, dict) or block.get("mask_token_id") is None:
        return None
    return A2DConfig(
        objective=block.get("objective", "mdlm"),
        mask_token_id=block["mask_token_id"],
        final_alpha=block.get("final_alpha", 1.0),
        sampler=block.get("sampler"),
    )


def _resolve_run_dir(path: str) -> tuple[Path | None, dict[str, Any] | None]:
    """(checkpoint, manifest) of a run directory; (None, None) for anything else."""
    if not is_run_directory(Path(path)):
        return None, None
    return _resolve(Path(path)), _parse_manifest(Path(path) / "manifest.json")


def _parse_manifest(path: Path) -> dict[str, Any] | None:
    """A manifest.json, or None when there is no such file."""
    return read_json(path) if path.is_file() else None


def _download(repo: str) -> Path:
    """The local directory of what is loaded from a hub repository."""
    from mlx_lm import utils

    download = inspect.unwrap(utils._download)
    return complete_run(download(repo), lambda patterns: download(repo, allow_patterns=patterns))


def complete_run(path: Path, download: Callable[[list[str]], Any], *, weights: bool = True) -> Path:
    """
    What is loaded from a downloaded repository, which may be a run directory. mlx-lm's patterns take JSON from every
    folder, but weights only from the root and ``model/``, and some tokenizer files only from the root.

    Args:
        download: fetches the files that match patterns into the same directory.
        weights: whether the weights are wanted.
    """
    resolved = _resolve(path)
    if resolved == path:
        return path
    folder = resolved.relative_to(path).as_posix()
    patterns = []
    if weights and not list(resolved.glob("model*.safetensors")):
        patterns += [f"{folder}/model*.safetensors"]
    if not has_tokenizer(resolved):
        patterns += [f"{folder}/tokenizer*", f"{folder}/*.tiktoken", f"{folder}/*.txt", f"{folder}/*.jinja"]
    if patterns:
        download(patterns)
    return resolved
