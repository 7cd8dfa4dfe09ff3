"""What computes the reference of a checkpoint: transformers' class, the checkpoint's own modeling file, or a file."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ..checkpoint import Checkpoint, read_json
from ..errors import DiffusionError
from ..families import Family
from ..layerwise import block_of
from ..spec import DiffusionSpec
from .hf import twin

_MODELS = ("ForCausalLM", "ModelLM", "ForMaskedLM", "LMHeadModel")  # how names of classes with a head end
_AUTO = ("AutoModelForCausalLM", "AutoModel", "AutoModelForMaskedLM")


@dataclass(frozen=True)
class Found:
    """
    What computes the reference, before any weight is read.

    Args:
        name: such as ``Qwen2ForCausalLM of transformers 5.24.0, without its causal mask``.
        model_class: of torch, with a head; None: a file that only decodes.
        config: what the class is made with.
        module: where the class is, or its authors' ``generate``.
        own: whether it is code from outside of transformers, which makes its own mask or takes one.
        function: of ``FILE.py:NAME``, the NAME of a function that decodes.
    """

    name: str
    model_class: type | None
    config: Any
    module: ModuleType
    own: bool
    function: str | None = None


def find(
    checkpoint: Checkpoint, family: Family, spec: DiffusionSpec, which: str, *, trust_remote_code: bool = False
) -> Found:
    """
    What computes the reference of a checkpoint.

    Args:
        which: ``hf``: transformers' class of the same computation. ``own``: the modeling file that config.json names,
            which runs its code. Else the path of a file, ``FILE.py`` or ``FILE.py:NAME`` with a class of a model or a
            function that decodes, or of a directory whose config.json names a modeling file: who writes the path wants
            it to be run.
        trust_remote_code: whether the checkpoint's own code may be run.

    Raises:
        DiffusionError: no PyTorch, no such class or file, several classes, code that cannot be imported or may not run.
    """
    _need_torch()
    if which == "hf":
        return _of_transformers(checkpoint, family, spec)
    if which == "own":
        return _named(checkpoint, checkpoint.path, trust_remote_code)
    file, colon, name = which.rpartition(":")
    if not (colon and file.endswith(".py") and name.isidentifier()):
        file, name = which, ""
    path = Path(file).expanduser()
    if path.is_dir():
        return _named(checkpoint, path, True)
    if path.suffix != ".py":
        raise DiffusionError(
            f"The reference must be hf, a modeling file (FILE.py or FILE.py:Class) or a directory with one, got "
            f"{which!r}."
        )
    if not path.is_file():
        raise DiffusionError(f"{path} does not exist: give the modeling file of the reference.")
    return _of_file(checkpoint, path, name)


def _need_torch() -> None:
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise DiffusionError(
                f"A reference needs {name}, which is not installed: pip install 'mlx-dllm-plugin[verify]'."
            )


def _of_transformers(checkpoint: Checkpoint, family: Family, spec: DiffusionSpec) -> Found:
    from transformers import __version__

    with quiet():
        model_class, config = twin(checkpoint, family)
    module = sys.modules[model_class.__module__]
    block = block_of(spec)
    how = f", made block-causal in blocks of {block}" if block else ", without its causal mask"
    how = how if mask_makers(module) else ""
    return Found(f"{model_class.__name__} of transformers {__version__}{how}", model_class, config, module, own=False)


def _named(checkpoint: Checkpoint, path: Path, allowed: bool) -> Found:
    """The class that the config.json of a directory names in its auto_map."""
    auto_map = read_json(path / "config.json").get("auto_map")
    auto_map = auto_map if isinstance(auto_map, dict) else {}
    named = next((auto_map[key] for key in _AUTO if isinstance(auto_map.get(key), str)), None)
    if named is None:
        raise DiffusionError(
            f"{path / 'config.json'} names no modeling file (auto_map): leave out --trust-remote-code, or give a file "
            "with --reference FILE."
        )
    if "--" in named:
        raise DiffusionError(
            f"{path / 'config.json'} names code of another repository ({named}), which is not fetched: download the "
            "file and give it with --reference FILE."
        )
    file = path / f"{named.partition('.')[0]}.py"
    if not file.is_file():
        raise DiffusionError(
            f"{path} lacks {file.name}, which its config.json names: download it, or give a file with --reference FILE."
        )
    if not allowed:
        raise DiffusionError(
            f"{file} is code of the checkpoint and would be run: read it, then allow it with --trust-remote-code."
        )
    model_class = _dynamic(named, path, file)
    config_name, config_class = auto_map.get("AutoConfig"), None
    if isinstance(config_name, str) and (path / f"{config_name.partition('.')[0]}.py").is_file():
        config_class = _dynamic(config_name, path, file)
    module = sys.modules[model_class.__module__]
    config = _config(checkpoint, model_class, file, config_class)
    return Found(f"{model_class.__name__} of {file.name}", model_class, config, module, own=True)


def _dynamic(name: str, path: Path, file: Path) -> type:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    with _importing(file):
        found: type = get_class_from_dynamic_module(name, str(path), local_files_only=True)
    return found


@contextlib.contextmanager
def _importing(file: Path) -> Iterator[None]:
    try:
        with silenced(str(file)):
            yield
    except DiffusionError:
        raise
    except Exception as error:
        raise DiffusionError(
            f"{file} cannot be imported ({said(error)}): install what it needs, or mend a copy of it and give that "
            "with --reference FILE."
        ) from error


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Code of a reference is imported or run in here: what it prints goes to stderr, since stdout may be read as JSON,
    and streams, working directory, torch's default type and random numbers are afterwards what they were."""
    import numpy as np
    import torch

    streams, folder = (sys.stdout, sys.stderr), None
    with contextlib.suppress(OSError):  # a directory that is no more
        folder = os.getcwd()
    seeds = random.getstate(), np.random.get_state(), torch.get_rng_state()
    dtype = torch.get_default_dtype()
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        if folder is not None:
            os.chdir(folder)
        random.setstate(seeds[0])
        np.random.set_state(seeds[1])
        torch.set_rng_state(seeds[2])
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def silenced(name: str = "The reference") -> Iterator[None]:
    """
    As :func:`apart`; and ending the program is an error.

    Args:
        name: of the code, for the sentence.

    Raises:
        DiffusionError: it calls ``sys.exit``.
    """
    try:
        with apart():
            yield
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else ""
        raise DiffusionError(
            f"{name} ended the program (sys.exit({code})): remove that from a copy of the file and give the copy with "
            "--reference FILE."
        ) from error


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(".")


def _of_file(checkpoint: Checkpoint, file: Path, name: str) -> Found:
    """A class of a file, which may import from the files beside it as if they were a package."""
    from torch import nn

    package = f"mlx_dllm_reference_{abs(hash(str(file.resolve().parent)))}"
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(file.resolve().parent)]
    full = f"{package}.{file.stem}"
    spec = importlib.util.spec_from_file_location(full, file)
    if spec is None or spec.loader is None:
        raise DiffusionError(f"{file} cannot be imported: give a file of Python code.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    try:
        with _importing(file):
            spec.loader.exec_module(module)
    except DiffusionError:
        del sys.modules[full]
        raise
    classes = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, nn.Module) and (value.__module__ == full or key == name)
    }
    function = name if inspect.isfunction(getattr(module, name, None)) else None
    model_class = _chosen(checkpoint, file, "" if function else name, classes)
    if model_class is None:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and "generate" in key]
        if not (function or functions):
            raise DiffusionError(
                f"{file} has no class of a model with a head (its name must end with {', '.join(_MODELS)}): name one "
                f"with {file.name}:Class."
            )
        return Found(file.name, None, None, module, own=True, function=function)
    config = _config(checkpoint, model_class, file)
    name = f"{model_class.__name__} of {file.name}"
    return Found(name, model_class, config, module, own=True, function=function)


def _chosen(checkpoint: Checkpoint, file: Path, name: str, classes: Mapping[str, type]) -> type | None:
    if name:
        if name not in classes:
            raise DiffusionError(
                f"{file} has no torch.nn.Module named {name!r}: it has {', '.join(classes) or 'none at all'}."
            )
        return classes[name]
    config = checkpoint.config
    architectures, auto_map = config.get("architectures"), config.get("auto_map")
    named = list(architectures) if isinstance(architectures, list) else []
    named += [str(auto_map.get(key)).rpartition(".")[2] for key in _AUTO] if isinstance(auto_map, dict) else []
    for candidate in named:
        if candidate in classes:
            return classes[candidate]
    ending = [candidate for candidate in classes if candidate.endswith(_MODELS)]
    if len(ending) > 1:
        raise DiffusionError(
            f"{file} has several models ({', '.join(ending)}): name one with {file.name}:{ending[0]}, for example."
        )
    return classes[ending[0]] if ending else None


def _config(checkpoint: Checkpoint, model_class: type, file: Path, config_class: Any = None) -> Any:
    config_class = config_class or getattr(model_class, "config_class", None)
    values = {key: value for key, value in checkpoint.config.items() if key != "quantization"}
    try:
        if config_class is None:
            return SimpleNamespace(**values)
        with silenced(file.name), quiet():
            return config_class.from_dict(values) if hasattr(config_class, "from_dict") else config_class(**values)
    except DiffusionError:
        raise
    except Exception as error:
        raise DiffusionError(
            f"{config_class.__name__} of {file.name} does not take the settings of "
            f"{checkpoint.path / 'config.json'} ({said(error)}): give the modeling file of this checkpoint."
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' advice, which is for those who train or generate."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def mask_makers(module: ModuleType) -> list[str]:
    """The functions in a module of transformers that make causal masks."""
    return [
        name
        for name, value in vars(module).items()
        if name.startswith("create_") and "mask" in name and "bidirectional" not in name and callable(value)
    ]
