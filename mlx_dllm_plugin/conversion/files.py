"""The files of a copy: what is kept byte for byte, its config.json, and the proof that it is what the source is."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, open_checkpoint, read_json
from ..errors import CheckpointError
from ..families import Family
from ..spec import UNMASKING, DiffusionSpec, resolve
from ..tokenizers import PROBES

QUANTIZATION = ("quantization", "quantization_config")
_QUANTIZATION_FILE = "hf_quant_config.json"  # of NVIDIA's exports
_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.index.json", "*.h5", "*.msgpack", "*.onnx"),
    *("*.ckpt", "*.tflite", "*.ot"),
)
_TOKENIZER = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("*.tiktoken", "*.model", "tokenization*.py", "normalizer.json", "additional_chat_templates/*"),
)
_TURNS = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
]


def kept(source: Path) -> Iterator[str]:
    """
    The files of a checkpoint that are no weights and that a copy gets as they are: all but config.json and hidden ones,
    from folders too, also where these are links.

    Raises:
        CheckpointError: a link to nothing.
    """
    seen = {source.resolve()}
    for folder, folders, names in os.walk(source, followlinks=True):
        inside = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        folders[:] = [name for name in inside if Path(folder, name).resolve() not in seen]  # links may lead around
        seen |= {Path(folder, name).resolve() for name in folders}
        for name in sorted(names):
            path = Path(folder, name)
            inner = path.relative_to(source).as_posix()
            if name.startswith(".") or any(fnmatch(name, pattern) for pattern in _WEIGHTS) or inner == "config.json":
                continue
            if not path.exists():
                raise CheckpointError(f"{path} is a link to nothing; copy or download the checkpoint again.")
            if path.is_file():
                yield inner


def copy(source: Path, target: Path, *, tokenizer: Path | None = None, quantized: bool = True) -> None:
    """
    Copy what :func:`kept` names.

    Args:
        tokenizer: directory with the tokenizer files, instead of the source's.
        quantized: the copy's weights are, if the source's are.
    """
    names = [(source, name) for name in kept(source) if quantized or name != _QUANTIZATION_FILE]
    if tokenizer is not None:
        names = [(source, name) for _, name in names if not _is_tokenizers(name)]
        names += [(tokenizer, name) for name in kept(tokenizer) if _is_tokenizers(name)]
    for root, name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target / name)


def _is_tokenizers(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _TOKENIZER)


def quantization_of(checkpoint: Checkpoint) -> str | None:
    """How a checkpoint is quantized, for people, or None."""
    for key in QUANTIZATION:
        value = checkpoint.config.get(key)
        if isinstance(value, dict) and value:
            return f"{value['bits']} bits" if "bits" in value else str(value.get("quant_method", key))
    return _QUANTIZATION_FILE if (checkpoint.path / _QUANTIZATION_FILE).is_file() else None


def with_mask(checkpoint: Checkpoint, family: Family, mask: int | None) -> Checkpoint:
    """A checkpoint whose config.json says that this is the mask, where spec.py looks first; None: as it is."""
    if mask is None:
        return checkpoint
    block = checkpoint.a2d
    if family.a2d or (block or {}).get("mask_token_id") is not None:
        told: dict[str, Any] = {"a2d": {**(block or {"objective": "mdlm"}), "mask_token_id": mask}}
    else:
        told = {"mask_token_id": mask}
    return changed(checkpoint, config={**checkpoint.config, **told})


def changed(checkpoint: Checkpoint, *, path: Path | None = None, config: dict[str, Any] | None = None) -> Checkpoint:
    """A checkpoint with another config.json, or as if it lay elsewhere; its other files are the same."""
    parts = ("generation_config", "tokenizer_config", "added_tokens")
    known = {name: getattr(checkpoint, name) for name in parts}
    return Checkpoint(path or checkpoint.path, checkpoint.config if config is None else config, **known)


def write_config(target: Path, source: Mapping[str, Any], loaded: Mapping[str, Any], dtype: str | None = None) -> None:
    """
    config.json of a copy: every key of the source's, and those that loading has added.

    Args:
        source: the source's.
        loaded: what loading has made of it, and quantizing.
        dtype: the type that was asked for: else the next conversion would go back to what is named there.
    """
    values = {**loaded, **{name: value for name, value in source.items() if name not in QUANTIZATION}}
    if dtype is not None:
        values |= {name: dtype for name in ("torch_dtype", "dtype") if name in values}
    if "quantization" in values:
        values["quantization_config"] = values["quantization"]
    text = json.dumps(dict(sorted(values.items())), indent=4)
    (target / "config.json").write_text(text, encoding="utf-8")


def prove_finite(target: Path, destination: Path) -> None:
    """
    Have every weight of a copy be a number: float16 ends at 65504, where bfloat16 does not.

    Raises:
        CheckpointError: one is not.
    """
    import mlx.core as mx

    for file in sorted(target.glob("*.safetensors")):
        arrays: dict[str, Any] = {**mx.load(str(file))}  # type: ignore[dict-item]
        while arrays:  # one at a time: they are only read now
            name, value = arrays.popitem()
            if mx.issubdtype(value.dtype, mx.floating) and not mx.isfinite(value).all().item():
                kind = str(value.dtype).removeprefix("mlx.core.")
                raise CheckpointError(
                    f"{destination} is not kept, because its weight {name} has values that {kind} cannot hold: use "
                    "--dtype bfloat16 or float32, and if that is what was used, the source is broken."
                )


def prove_spec(target: Path, family: Family, spec: DiffusionSpec) -> None:
    """
    Have a copy decoded as its source. What the name of its directory would decide otherwise is written down.

    Raises:
        CheckpointError: it would be decoded otherwise.
    """
    found = resolve(open_checkpoint(target), family)
    own: dict[str, Any] = {}
    if found.unmasking != spec.unmasking:
        own[UNMASKING] = spec.unmasking
    if found.defaults.get("block_length") != spec.defaults.get("block_length"):
        own["block_length"] = spec.defaults.get("block_length")
    if own:
        config = {**read_json(target / "config.json"), **own}
        (target / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=4), encoding="utf-8")
        found = resolve(open_checkpoint(target), family)
    for field in dataclasses.fields(spec):
        before, after = getattr(spec, field.name), getattr(found, field.name)
        if field.name != "sources" and before != after:
            raise CheckpointError(
                f"The copy would not be decoded as its source, because its {field.name} is {after!r} instead of "
                f"{before!r}, so that it is not kept: give it the name of the source's directory."
            )


def prove_tokenizer(source: Any, copy: Any) -> int:
    """
    Have two tokenizers read and write the same: texts, every special token, and a conversation in the chat template.

    Returns:
        int: the probes there were.

    Raises:
        CheckpointError: they differ.
    """
    names = [token.content for token in (getattr(source, "added_tokens_decoder", None) or {}).values()]
    texts = [*PROBES, *dict.fromkeys([*names, *getattr(source, "all_special_tokens", ())])]
    count = 0
    for text in texts:
        for special in (False, True):
            before, after = ([*t.encode(text, add_special_tokens=special, verbose=False)] for t in (source, copy))
            if before != after or source.decode(before) != copy.decode(before):
                raise CheckpointError(
                    f"The copy's tokenizer reads {text!r} as {after[:8]}, not as {before[:8]} like its source, so that "
                    "it is not kept."
                )
        count += 1
    before, after = (_conversation(tokenizer) for tokenizer in (source, copy))
    if before != after:
        raise CheckpointError("The copy's chat template is not that of its source, so that it is not kept.")
    return count + (before is not None)


def _conversation(tokenizer: Any) -> Any:
    """Text and ids of two turns in the chat template, or what it raises; None without one."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        text = tokenizer.apply_chat_template(_TURNS, tokenize=False, add_generation_prompt=True)
        return text, [*tokenizer.encode(text, add_special_tokens=False)]
    except Exception as error:  # a template that wants other messages: of both alike
        return type(error).__name__, str(error)
