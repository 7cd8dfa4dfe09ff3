"""Loading: LLaDA2.2 as this plugin loads it, since mlx-vlm's model drops its routing and edits without an error; 2.0
and 2.1 as mlx-vlm has them; and other diffusion families, which mlx-vlm would decode causally, not at all."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, DiffusionError
from .. import Lean, Patch, Redirect, cli, is_applied
from . import commands, requests, served

_ROAD = (
    ("mlx_vlm.generate.diffusion", "_has_model_diffusion_generator"),
    ("mlx_vlm.generate.diffusion", "stream_diffusion_generate_from_kwargs"),
)
# Of a call of load(), what is no argument of a tokenizer.
_NOT_TOKENIZERS = {"quantize_activations", "expert_cache_gb", "max_kv_size", "strict", "lazy"}


def load_model(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`load_model`, which looks at the checkpoint first."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    path = Path(call.arguments["model_path"])
    found = commands.ours_at(path)
    commands.check_mode(path, found, found is not None or _decodes(path))
    if found is None:
        return original(*args, **kwargs)
    checkpoint, family, spec = found
    _import_theirs()
    command = cli.running()
    if commands.is_new(checkpoint.config):
        if served.other_decodes():
            served.say_other()
            return original(*args, **kwargs)
        return _load(checkpoint.path, call.arguments["lazy"], call.arguments["kwargs"])
    model = original(*args, **kwargs)
    if spec is not None:
        served.remember(model, checkpoint.path, family, spec)
        # Where the files do not say which token is the mask, mlx-vlm takes that of the published checkpoints: outside
        # a smaller embedding it would read, and crash on, what is no memory of its own.
        if not 0 <= (getattr(model.config, "mask_token_id", None) or 0) < spec.vocab_size:
            model.config.mask_token_id = spec.mask_token_id
        if command is not None and command.decoding:
            command.diffusion = True
        edits = command is not None and getattr(command.host, "editing_threshold", None) is not None
        if spec.unmasking == "joint_threshold" and not edits and not requests.asked_of_us({}):
            served.say(
                f"{path.name}: mlx-vlm decodes it without edits unless editing_threshold is given; unmasking "
                "joint_threshold is its makers' sampler."
            )
    return model


def _decodes(path: Path) -> bool:
    """Whether mlx-vlm itself decodes a checkpoint by diffusion."""
    from ...checkpoint import open_checkpoint
    from ...families.refused import is_mlx_vlms

    return (path / "config.json").is_file() and is_mlx_vlms(open_checkpoint(path))


def _import_theirs() -> None:
    """Have mlx-vlm's own LLaDA2 compared with what this plugin knows: what it becomes matters for each of ours too."""
    with contextlib.suppress(ImportError):
        importlib.import_module("mlx_vlm.models.llada2_moe")


def _load(path: Path, lazy: bool, given: dict[str, Any]) -> served.Model:
    """A LLaDA2.2 with mlx-vlm's face. Raises DiffusionError."""
    from mlx_lm import utils as mlx_lm_utils
    from mlx_vlm import utils as host

    from ...runtime import load_with_spec
    from ...spec import prepare

    command = cli.running()
    if command is not None:
        command.diffusion = True
        if command.refuses:
            raise commands.refuse(command.refuses)
    for target, symbol in _ROAD:
        if not is_applied(target, symbol):
            raise DiffusionError(
                f"This mlx-vlm has another {target}.{symbol} than the plugin knows and would decode LLaDA2.2 wrong: "
                "install a supported mlx-vlm, or use mlx_lm.generate."
            )
    if (path / "offload_index.json").exists():
        raise DiffusionError(
            f"{path} was made by mlx_vlm.moe_offload, which LLaDA2.2 is not decoded from: load the original."
        )
    found = prepare(path, None, cli.load_options())
    assert found is not None
    family, spec = found
    commands.check_host_options(spec)
    served.say_who_loads(path)
    plain = inspect.unwrap(mlx_lm_utils.load_model)
    language_model, _ = load_with_spec(plain, path, family, spec, lazy=lazy, strict=given.get("strict", True))
    model = served.Model(language_model, host.load_config(path), path)
    if given.get("quantize_activations"):
        try:
            host.quantize_activations(model)
        except ValueError as error:
            raise DiffusionError(f"quantize_activations does not work with {path.name}: {error}.") from error
    model.eval()
    return model


def refuse_unnoticed(processor: Any) -> None:
    """Raises DiffusionError when a model came with the tokenizer of a checkpoint that mlx-vlm decodes wrong, because
    the changes are off that would have noticed it."""
    if not is_applied("mlx_vlm.utils", "load_model"):
        source = cli.directory_of(processor)
        found = None if source is None else commands.ours_at(source)
        if found is not None and commands.is_new(found[0].config):
            raise DiffusionError(
                "This mlx-vlm has another mlx_vlm.utils.load_model than the plugin knows and would decode LLaDA2.2 "
                "wrong: install a supported mlx-vlm, or use mlx_lm.generate."
            )


def get_model_and_args(original: Any, /, config: Any, *args: Any, **kwargs: Any) -> Any:
    """`get_model_and_args`, which never answers with a model that would drop what makes LLaDA2.2 another one."""
    found = original(config, *args, **kwargs)
    if isinstance(config, dict) and commands.is_new(config):
        kept = getattr(found[0], "ModelConfig", None)
        if kept is None or "expert_capacity" not in inspect.signature(kept).parameters:
            raise DiffusionError(
                "mlx-vlm's own model of LLaDA2 would drop expert_capacity of this config.json, and decode LLaDA2.2 "
                "wrong without an error: load it with mlx_vlm.load."
            )
    return found


def load_processor(
    original: Any, /, model_path: Any, add_detokenizer: bool = True, eos_token_ids: Any = None, **kwargs: Any
) -> Any:
    """`load_processor`: LLaDA2's tokenizer as its tokenizer.json says, of 2.2 with none of its code run unasked."""
    path = Path(model_path)
    config = commands.config_at(path)
    if str(config.get("model_type")).lower() != served.FAMILY:
        return original(model_path, add_detokenizer, eos_token_ids, **kwargs)
    from mlx_vlm import utils as host
    from transformers import AutoTokenizer

    from ...checkpoint import has_tokenizer, tokenizer_arguments
    from ...tokenizers import repaired

    if not has_tokenizer(path):
        raise CheckpointError(
            f"{path} has no tokenizer files (tokenizer.json, vocab.json, tokenizer.model): copy them from the original."
        )
    given = {name: value for name, value in kwargs.items() if name not in _NOT_TOKENIZERS}
    if not commands.is_new(config):
        kwargs = tokenizer_arguments(path, kwargs)  # else transformers asks whether code may run, and waits
        return repaired(original(model_path, add_detokenizer, eos_token_ids, **kwargs), path, given)
    processor = AutoTokenizer.from_pretrained(path, **tokenizer_arguments(path, given))
    if add_detokenizer:
        processor.detokenizer = host.load_tokenizer(path, return_tokenizer=False)(processor)
        processor.stopping_criteria = host.StoppingCriteria(eos_token_ids, processor)
    return repaired(processor, path, given)


PATCH = Patch(
    target="mlx_vlm.utils",
    reason="mlx-vlm decodes LLaDA2.2 wrong, and a2d checkpoints autoregressively, without an error",
    changes=(
        Redirect(
            "load_model",
            load_model,
            parameters=("model_path", "lazy", "kwargs"),
            needs=(Lean("load_config", ("model_path",)),),
        ),
        Redirect("load", cli.looking_again(refuse_unnoticed)),
        Redirect("get_model_and_args", get_model_and_args, parameters=("config",)),
        Redirect(
            "load_processor",
            load_processor,
            parameters=("model_path", "add_detokenizer", "eos_token_ids", "kwargs"),
            needs=("load_tokenizer", Lean("StoppingCriteria", ("eos_token_ids", "tokenizer"))),
            reason="the tokenizer of LLaDA2.2 may be built wrong",
        ),
        Redirect(
            "sharded_load",
            commands.refusing_path("Distributed loading (mlx_vlm.utils.sharded_load)", "repo", hub=True),
            parameters=("repo",),
        ),
        Redirect(
            "fetch_from_hub",
            commands.refusing_path("mlx_vlm.utils.fetch_from_hub", "model_path"),
            parameters=("model_path",),
        ),
    ),
    leans=(
        Lean("get_model_path", ("path_or_hf_repo",), called=True),
        Lean("quantize_activations", ("model",), called=True),
    ),
)
