"""Checkpoints on disk: a2d run directories, configuration files, and what is broken about them.

Reads JSON and safetensors headers only; no weights, no tokenizer, no network.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import stat
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "tiktoken.model", "vocab.txt")

# Tokenizer classes that only are code beside the weights -> the type under which transformers has the same one.
_SAME_TOKENIZER = {"DreamTokenizer": "qwen2"}

_LARGEST_HEADER = 100_000_000  # bytes, as in safetensors
_LFS = "version https://git-lfs"
_OTHER_WEIGHTS = (".gguf", ".bin", ".pt", ".pth", ".npz")

_NO_THINKING = "{%- if enable_thinking is not defined %}{%- set enable_thinking = false %}{%- endif %}"


class Checkpoint:
    """
    A checkpoint's JSON files. Only config.json is read at once: what a host tolerates in the files beside it must not
    keep an autoregressive model from loading.

    Args:
        path: the directory with config.json and weights.
        config: config.json, with the caller's overrides.
        known: any of the properties below that need not be read.
    """

    def __init__(self, path: Path, config: dict[str, Any], **known: Any):
        self.path = path
        self.config = config
        vars(self).update(known)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or {}."""
        return read_json(self.path / "generation_config.json", required=False)

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json, or {}."""
        return read_json(self.path / "tokenizer_config.json", required=False)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Token text -> id of the tokens declared in the tokenizer's files."""
        return _added_tokens(self.path, self.tokenizer_config)

    @cached_property
    def run(self) -> Path | None:
        """The run directory it belongs to, if any."""
        return _run_of(self.path)

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """The run's manifest.json, if it is one: provenance only. Any file of that name may lie there."""
        try:
            return read_json(self.run / "manifest.json", required=False) or None if self.run else None
        except CheckpointError:
            return None

    @property
    def a2d(self) -> dict[str, Any] | None:
        """The ``a2d`` block of config.json, or None. Raises CheckpointError when it is not an object."""
        block = self.config.get("a2d")
        if block is not None and not isinstance(block, dict):
            raise CheckpointError(f'{self.path / "config.json"}: "a2d" must be an object, got {block!r}.')
        return block

    @property
    def provenance(self) -> str | None:
        """What the user should know of the run it comes from, or None."""
        status = (self.manifest or {}).get("status")
        if status in ("failed", "running"):
            return (
                f"{self.run}: its manifest says the conversion is {status!r}; "
                f"the checkpoint in use is {self.path.name}."
            )
        return None


def is_run_directory(path: Path) -> bool:
    """An a2d run directory: no config.json of its own, but a manifest, a model or checkpoints."""
    return (
        path.is_dir()
        and not (path / "config.json").exists()
        and ((path / "manifest.json").is_file() or (path / "model").is_dir() or bool(_checkpoints(path)))
    )


def resolve_run_directory(path: Path) -> Path:
    """
    The directory to load: ``path`` itself unless it is a run directory; of a run directory ``model/``, else the
    checkpoint with the highest number.

    Raises:
        CheckpointError: a run directory with nothing to load.
    """
    if not is_run_directory(path):
        return path
    if (path / "model").is_dir():
        return path / "model"
    checkpoints = _checkpoints(path)
    if not checkpoints:
        raise CheckpointError(
            f"{path} is a run directory with nothing to load: it has neither model/ nor checkpoints/checkpoint-<N>/; "
            "let the conversion save a checkpoint first."
        )
    return checkpoints[-1]


def open_checkpoint(path: Path, overrides: dict[str, Any] | None = None) -> Checkpoint:
    """
    Read the JSON files of a checkpoint or run directory.

    Raises:
        CheckpointError: no such directory, no config.json, broken JSON.
    """
    if not exists(path):
        raise CheckpointError(f"{path} does not exist; give the directory of a checkpoint or an a2d run.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the directory of a checkpoint or an a2d run.")
    try:
        path = resolve_run_directory(path)
        config = read_json(path / "config.json")
    except PermissionError as error:
        raise _unreadable(path, error) from None
    return Checkpoint(path, {**config, **(overrides or {})})


def exists(path: Path) -> bool:
    """Whether there is something. Raises CheckpointError when that cannot be told."""
    try:
        return path.exists()
    except OSError as error:  # a loop of links, a folder that may not be searched, a name that is too long
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{str(path)[:200]} cannot be looked at ({error.strerror}); give a directory that you may read."
    )


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError when it is broken, or missing though required."""
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path} is missing; give the directory of a complete checkpoint.")
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(_LFS):
            raise _pointer(path)
        value = json.loads(text)
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); copy or download it again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def check_weights(path: Path) -> None:
    """
    Compare the safetensors files' sizes with their headers, and the index with the files.

    Raises:
        CheckpointError: no weights, a file the index names is missing, a truncated or broken file.
    """
    indexed_files(path)
    check_files(path)


def indexed_files(path: Path) -> set[str]:
    """
    The files that the index of the weights names; none where there is no index.

    Raises:
        CheckpointError: an index that cannot be read, or names what is missing.
    """
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise CheckpointError(f"{index} must hold a weight_map of file names; copy or download it again.")
    files = set(named.values())
    missing = sorted(name for name in files if not (path / name).is_file())
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the weight files its index names ({missing[0]}, …); copy them again."
        )
    return files


def check_model_type(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError when config.json names none that is text, which mlx-lm cannot take."""
    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'}: model_type must be the name of an architecture, such as llama, got "
            f"{kind!r}; copy or download it again."
        )


def check_files(path: Path) -> dict[str, dict[str, Any]]:
    """
    The headers of the files that mlx-lm reads, the index or not: name of the file -> name of a tensor -> its entry.

    Raises:
        CheckpointError: no weights, a truncated or broken file.
    """
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise _unreadable(path, error) from None
    files = [path / name for name in fnmatch.filter(names, "model*.safetensors")]
    if not files:
        others = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
        if others:
            raise CheckpointError(
                f"{path} has no weights: no model*.safetensors, but {others[0]}; convert it to safetensors (PyTorch's "
                "with save_pretrained of transformers), or use another copy."
            )
        raise CheckpointError(f"{path} has no weights: no model*.safetensors; give the directory of a checkpoint.")
    headers = {}
    for file in files:
        try:
            headers[file.name] = _check_safetensors(file)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror}); copy or download it again.") from None
    return headers


def _pointer(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} is a Git LFS pointer, not the file itself; let git lfs pull in {file.parent} fetch it."
    )


def has_tokenizer(path: Path) -> bool:
    """Whether any file is there that a tokenizer can be built from."""
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def tokenizer_arguments(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """
    Arguments with which transformers' AutoTokenizer neither runs code of the checkpoint nor asks on the terminal
    whether it may, unless the caller has allowed it with ``trust_remote_code``.

    Args:
        path: directory with the tokenizer files.
        given: the caller's arguments.

    Raises:
        CheckpointError: a tokenizer that nothing but the checkpoint's own code can build.
    """
    arguments = dict(given)
    if arguments.get("trust_remote_code"):
        return arguments
    arguments["trust_remote_code"] = False
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    model = read_json(path / "config.json", required=False)
    if model.get("model_type") not in CONFIG_MAPPING_NAMES:
        # transformers would warn of a type it does not know, and take nothing else from the configuration.
        arguments.setdefault("config", PretrainedConfig.from_dict({"tokenizer_class": model.get("tokenizer_class")}))
    config = read_json(path / "tokenizer_config.json", required=False)
    declared = config.get("tokenizer_class")
    if "tokenizer_type" in arguments or (isinstance(declared, str) and tokenizer_class_from_name(declared) is not None):
        return arguments
    kind = _SAME_TOKENIZER.get(str(declared).removesuffix("Fast"))
    auto_map = config.get("auto_map")
    own_code = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    if kind is None and not own_code:
        return arguments
    if kind is None and (path / "tokenizer.json").is_file():
        # That file says all by itself, so any type that adds nothing will do.
        kind = next((k for k, name in TOKENIZER_MAPPING_NAMES.items() if name == "TokenizersBackend"), None)
    if kind is None:
        raise CheckpointError(
            f"{path}: its tokenizer {declared or own_code!r} exists only as code beside the weights, which is not run "
            "unasked: read it, and allow it with --trust-remote-code, in Python tokenizer_config="
            "{'trust_remote_code': True}."
        )
    return {**arguments, "tokenizer_type": kind}


def stop_thinking(tokenizer: Any) -> None:
    """Make a tokenizer's chat template leave out thinking where a caller does not ask for it: mlx-lm asks for itself
    whenever the vocabulary has thinking tokens. In memory only."""
    template, line = getattr(tokenizer, "chat_template", None), _NO_THINKING
    if isinstance(template, str) and not template.startswith(line):
        tokenizer.chat_template = line + template
    kind = type(tokenizer)
    if getattr(tokenizer, "has_thinking", False):
        tokenizer.__class__ = type(kind.__name__, (kind,), {"has_thinking": False, "__module__": kind.__module__})


def affixes(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after every text it encodes."""
    plain = list(tokenizer.encode("x", add_special_tokens=False))
    whole = list(tokenizer.encode("x", add_special_tokens=True))
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


_COUNTS = (
    *("hidden_size", "d_model", "n_embd", "num_hidden_layers", "n_layers", "n_layer", "num_attention_heads", "n_heads"),
    *("n_head", "num_key_value_heads", "n_kv_heads", "head_dim", "intermediate_size", "mlp_hidden_size"),
    *("max_position_embeddings", "max_sequence_length", "n_positions", "num_experts", "num_experts_per_tok"),
    *("expert_intermediate_size", "dense_intermediate_size", "moe_intermediate_size", "global_attn_every_n_layers"),
)
_NUMBERS = (
    *("rope_theta", "global_rope_theta", "local_rope_theta", "partial_rotary_factor"),
    *("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon"),
)
_SWITCHES = ("tie_word_embeddings", "weight_tying", "qk_layernorm")


def check_config(config: Mapping[str, Any], where: Path) -> None:
    """Raises CheckpointError for settings of the wrong type, which models would take silently or stumble over later.
    Null counts as absent."""
    for key in _COUNTS:
        value = config.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise CheckpointError(f"{where}: {key} must be a positive integer, got {value!r}.")
    for key in _NUMBERS:
        value = config.get(key)
        if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0):
            raise CheckpointError(f"{where}: {key} must be a number above 0, got {value!r}.")
    for key in _SWITCHES:
        value = config.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{where}: {key} must be true or false, got {value!r}.")
    experts, chosen = config.get("num_experts"), config.get("num_experts_per_tok")
    if experts is not None and chosen is not None and chosen > experts:
        raise CheckpointError(f"{where}: num_experts_per_tok {chosen} is more than the {experts} experts there are.")


def _check_safetensors(file: Path) -> dict[str, Any]:
    """The entries of the header."""
    info = file.stat()
    size = info.st_size
    again = "copy or download it again"
    if not stat.S_ISREG(info.st_mode):  # a pipe would be waited for
        raise CheckpointError(f"{file} is no regular file; {again}.")
    with file.open("rb") as stream:
        head = stream.read(8)
        if head + stream.read(len(_LFS) - 8) == _LFS.encode():
            raise _pointer(file)
        stream.seek(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else None
        if length is None or length > size - 8:
            raise CheckpointError(f"{file} is truncated: {size} bytes do not hold its header; {again}.")
        if length > _LARGEST_HEADER:
            raise CheckpointError(
                f"{file} is not a safetensors file: its header would have {length} bytes, {_LARGEST_HEADER} are the "
                f"most; {again}."
            )
        try:
            header = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            expected = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError):
            raise CheckpointError(f"{file} is not a safetensors file: its header cannot be read; {again}.") from None
    if size != expected:
        raise CheckpointError(f"{file} is truncated or damaged: {size} bytes, {expected} expected; {again}.")
    return entries


def _checkpoints(path: Path) -> list[Path]:
    folder = path / "checkpoints"
    found = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r"checkpoint-(\d+)", entry.name)
        if match and entry.is_dir():
            found.append((int(match[1]), entry))
    return [entry for _, entry in sorted(found)]


def _run_of(path: Path) -> Path | None:
    resolved = path.resolve()
    if resolved.name == "model":
        run = resolved.parent
    elif resolved.parent.name == "checkpoints" and re.fullmatch(r"checkpoint-\d+", resolved.name):
        run = resolved.parent.parent
    else:
        return None
    return run if (run / "manifest.json").is_file() else None


def _added_tokens(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    file = path / "tokenizer.json"
    try:
        for entry in read_json(file, required=False).get("added_tokens") or ():
            tokens[entry["content"]] = entry["id"]
        file = path / "added_tokens.json"
        tokens.update(read_json(file, required=False))
        file = path / "tokenizer_config.json"
        for number, entry in (tokenizer_config.get("added_tokens_decoder") or {}).items():
            tokens[entry["content"]] = int(number)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} has added tokens that cannot be read; copy or download it again.") from None
    return tokens
