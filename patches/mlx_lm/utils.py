"""Loading: run directories are resolved, diffusion checkpoints get their spec, broken ones one sentence."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, DiffusionError
from .. import Lean, Patch, Redirect, cli, is_applied

_WITHOUT_WEIGHTS = ["*.json", "*.py", "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]


def download(original: Any, /, path_or_hf_repo: Any, *args: Any, **kwargs: Any) -> Path:
    """`_download`, which also resolves a run directory to what is loaded from it."""
    from ...runtime import complete_run

    name = str(path_or_hf_repo)
    is_local = Path(name).exists()
    asked = cli.load_options().mode == "diffusion"
    if asked and not is_local and not _could_be_repo(name):
        raise CheckpointError(f"{name} does not exist; give the directory of a checkpoint or an a2d run, or a hub id.")
    try:
        path = original(path_or_hf_repo, *args, **kwargs)
    except Exception as error:
        if not asked or is_local:
            raise
        why = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{name} is neither a directory nor a checkpoint that can be had from the hub ({why})."
        ) from error
    if is_local:
        return _usable(path)
    given = inspect.signature(original).bind(path_or_hf_repo, *args, **kwargs).arguments
    more = {name: value for name, value in given.items() if name != "allow_patterns"}
    everything = given.get("allow_patterns") is None
    return complete_run(path, lambda patterns: original(**more, allow_patterns=patterns), weights=everything)


def _usable(path: Path) -> Path:
    """What is loaded from a directory. Raises CheckpointError for a run directory whose model was not saved whole."""
    from ...checkpoint import resolve_run_directory

    resolved = resolve_run_directory(path)
    if resolved != path and not (resolved / "config.json").is_file():
        raise CheckpointError(
            f"{resolved} is what is loaded from the run directory {path}, but it was not saved whole (no config.json): "
            "give a checkpoint's own directory instead."
        )
    return resolved


def require(target: str, symbol: str) -> None:
    """Raises DiffusionError when a change is off without which a diffusion checkpoint would decode autoregressively."""
    if not is_applied(target, symbol):
        raise DiffusionError(
            f"This mlx-lm has another {target}.{symbol} than the plugin knows and would decode the diffusion "
            "checkpoint autoregressively: install a supported mlx-lm, or use mlx_dllm_plugin.load and its decode."
        )


def refuse_unnoticed(tokenizer: Any) -> None:
    """Raises DiffusionError when a model without a spec came with the tokenizer of a diffusion checkpoint, because the
    changes are off that would have noticed it."""
    if not is_applied("mlx_lm.utils", "load_model"):
        source = cli.directory_of(tokenizer)
        if source is not None and _detected(source)[1] is not None:
            require("mlx_lm.utils", "load_model")


def _could_be_repo(name: str) -> bool:
    parts = name.split("/")
    return len(parts) <= 2 and all(part and not part.startswith((".", "~")) for part in parts)


def load_model(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`load_model`, which reads the spec first and hangs it on the loaded model."""
    from ...runtime import load_with_spec
    from ...spec import prepare

    call = inspect.signature(original).bind(*args, **kwargs)
    given = call.arguments
    path = given["model_path"] = _usable(Path(given["model_path"]))
    command = cli.running()
    decided = command.decoding if command is not None else ()
    found = prepare(path, given.get("model_config"), cli.load_options(), decided=decided)
    if found is None:
        return original(*call.args, **call.kwargs)
    if command is not None:
        command.diffusion = True
        if command.refuses:
            raise cli.refuse(command.refuses)
    require("mlx_lm.generate", "stream_generate")
    cli.check_host_options(vocab_size=found[1].vocab_size)
    return load_with_spec(original, path, *found, **{name: given[name] for name in given if name != "model_path"})


def load_tokenizer(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`load_tokenizer`, which takes the tokenizer from elsewhere on request, and of a diffusion checkpoint never makes
    up an empty one or leaves a broken one, and runs none of its code unasked."""
    from ...checkpoint import has_tokenizer, resolve_run_directory, stop_thinking, tokenizer_arguments
    from ...spec import detect_at
    from ...tokenizers import repaired

    call = inspect.signature(original).bind(*args, **kwargs)
    given = call.arguments
    model_path = given["model_path"]
    extra = dict(given.get("tokenizer_config_extra") or {})
    if not is_applied("mlx_lm.utils", "load_model") and detect_at(Path(model_path)) is not None:
        require("mlx_lm.utils", "load_model")
    source = extra.pop("tokenizer", None) or cli.load_options().tokenizer
    path = given["model_path"] = local(Path(model_path))
    diffusion, family = _detected(path)
    if source is not None:
        path = Path(source)
        if path.is_dir():
            path = resolve_run_directory(path)
        if not has_tokenizer(path):
            raise CheckpointError(f"{source} has no tokenizer files (tokenizer.json, vocab.json, tokenizer.model).")
        given["model_path"] = path
    elif diffusion and not has_tokenizer(path):
        raise CheckpointError(
            f"{path} has no tokenizer files: give the directory of the source model's tokenizer with "
            "--tokenizer DIR, in Python tokenizer_config={'tokenizer': DIR}."
        )
    if not diffusion:
        if "tokenizer_config_extra" in given:
            given["tokenizer_config_extra"] = None if given["tokenizer_config_extra"] is None else extra
        return original(*call.args, **call.kwargs)
    given["tokenizer_config_extra"] = tokenizer_arguments(path, extra)
    tokenizer = repaired(original(*call.args, **call.kwargs), path, extra)
    if family is not None and not family.thinks:
        stop_thinking(tokenizer)
    return tokenizer


def local(path: Path, revision: str | None = None) -> Path:
    """The directory that a local path or a hub id stands for, without weights: what is in it must be known before its
    code can run."""
    from mlx_lm import utils

    if path.exists():
        return _usable(path)
    return Path(utils._download(str(path), revision=revision, allow_patterns=_WITHOUT_WEIGHTS))


def _detected(path: Path) -> tuple[bool, Any]:
    """Whether a directory holds a diffusion checkpoint, or one that is refused; and its family, where it has one. A
    config.json that cannot be read is the host's affair."""
    from ...spec import detect_at

    options = cli.load_options()
    asked = options.mode == "diffusion" and (path / "config.json").is_file()
    try:
        family = detect_at(path, options.family)
    except CheckpointError:
        return asked, None
    except DiffusionError:
        return True, None
    return asked or family is not None, family


def sharded_load(original: Any, /, repo: Any, *args: Any, **kwargs: Any) -> Any:
    """`sharded_load`: distributed decoding is refused, before the host says that it cannot shard GPT-2 at all, and
    before it runs the code of a tokenizer, which it allows by itself."""
    what = "Distributed loading (mlx_lm.utils.sharded_load)"
    cli.refuse_checkpoint(local(Path(repo)), what)
    loaded = original(repo, *args, **kwargs)
    cli.refuse_if_diffusion(loaded[0], what)
    return loaded


PATCH = Patch(
    target="mlx_lm.utils",
    reason="a2d run directories and diffusion checkpoints are not recognised",
    changes=(
        Redirect("_download", download, parameters=("path_or_hf_repo", "revision", "allow_patterns")),
        Redirect(
            "load_model",
            load_model,
            parameters=("model_path", "lazy", "strict", "model_config", "get_model_classes"),
        ),
        Redirect("load_tokenizer", load_tokenizer, parameters=("model_path", "tokenizer_config_extra")),
        Redirect("sharded_load", sharded_load, parameters=("repo",)),
        Redirect("load", cli.looking_again(refuse_unnoticed)),
    ),
    leans=(
        Lean("_get_classes", ("config",)),
        Lean("quantize_model", ("model", "config", "group_size", "bits", "mode", "quant_predicate"), called=True),
        Lean("dequantize_model", ("model",), called=True),
        Lean("save_model", ("save_path", "model", "donate_model")),  # which is given by name
        Lean("create_model_card", ("path", "hf_path"), called=True),
        Lean("upload_to_hub", ("path", "upload_repo"), called=True),
    ),
)
