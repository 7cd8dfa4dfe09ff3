"""mlx-vlm's command lines and entry points: our options in their parsers, and one sentence where LLaDA2.2 cannot go."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import CheckpointError, DiffusionError
from .. import Patch, Redirect, Replace, cli
from . import requests, served

# How a checkpoint is read is not chosen here.
_NOT_OFFERED = ("family", "tokenizer", "attention", "logits")
# The server's own settings, which say nothing of a request.
_SERVERS = {"max_kv_size", "kv_quant_scheme"}


def refuse(what: str) -> DiffusionError:
    """The refusal of an entry point that cannot take LLaDA2.2."""
    way = "mlx_vlm.generate, mlx_vlm.stream_generate or mlx_dllm_plugin.decode"
    if what == "mlx_vlm.utils.fetch_from_hub":
        way = "mlx_vlm.load, or mlx_lm.convert for a copy that it reads"
    return DiffusionError(f"{what} does not work with LLaDA2.2 in this version: use {way}.")


def refusing(what: str) -> Callable[..., Any]:
    """A replacement of a function of a `model` (and perhaps a `draft_model`) that cannot take ours."""
    return cli.refusing(what, refuse)


def ours_at(path: Path) -> Any:
    """(checkpoint, family, spec) of a local checkpoint of the family that mlx-vlm has too; spec is None where the
    checkpoint is one that mlx-vlm decodes and this plugin cannot read. None for everything else.

    Raises:
        DiffusionError: a checkpoint of another diffusion family, and a broken one that mlx-vlm cannot decode.
    """
    from ...checkpoint import open_checkpoint, resolve_run_directory
    from ...families.refused import is_mlx_vlms
    from ...spec import detect, resolve

    path = resolve_run_directory(path)
    checkpoint = open_checkpoint(path) if (path / "config.json").is_file() else None
    if checkpoint is None or is_mlx_vlms(checkpoint):
        return None
    family = detect(checkpoint)
    if family is None:
        return None
    if family.name != served.FAMILY:
        raise DiffusionError(
            f"{path} is a diffusion checkpoint of the family {family.name}, which mlx-vlm would decode "
            "autoregressively: use mlx_lm.generate."
        )
    try:
        return checkpoint, family, resolve(checkpoint, family)
    except DiffusionError:
        if is_new(checkpoint.config):
            raise
        return checkpoint, family, None


def is_new(config: dict[str, Any]) -> bool:
    """Whether a config.json is one of LLaDA2.2, whose routing and edits mlx-vlm's model does not have."""
    kind = str(config.get("model_type")).lower()
    own = ("expert_capacity", "delete_token_id", "split_token_id")
    return kind == served.FAMILY and any(config.get(name) not in (None, 0, False) for name in own)


def refuse_checkpoint(path: Any, what: str) -> None:
    """Raises DiffusionError when a local directory holds a LLaDA2.2. Nothing is loaded."""
    if path is not None and is_new(config_at(Path(path))):
        raise refuse(what)


def refusing_path(what: str, name: str, *, hub: bool = False) -> Callable[..., Any]:
    """A replacement of a function that reads a checkpoint, whose path (or with `hub` id) is its argument `name`, and
    cannot take LLaDA2.2."""

    def replacement(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments[name]
        path = Path(given)
        if hub and not path.exists():
            from mlx_vlm import utils as host

            path = Path(host.get_model_path(str(given)))
        refuse_checkpoint(path, what)
        return original(*args, **kwargs)

    return replacement


def config_at(path: Path) -> dict[str, Any]:
    from ...checkpoint import read_json

    try:
        return read_json(path / "config.json", required=False) if path.is_dir() else {}
    except CheckpointError:
        return {}  # the host says it


def with_options(old: ModuleType) -> ModuleType:
    """A copy of the argparse module whose parsers offer the option table, but for what mlx-vlm has itself."""
    return cli.with_parser(old, _Parser)


def with_server_options(old: ModuleType) -> ModuleType:
    """The same for the server, which checks before it starts: later a refusal is a line in its log."""
    return cli.with_parser(old, _ServerParser)


def with_check(what: str) -> Callable[[ModuleType], ModuleType]:
    """Makes a copy of the argparse module whose parsers refuse a local LLaDA2.2, for commands that first fetch data."""

    def replaced(old: ModuleType) -> ModuleType:
        class Parser(old.ArgumentParser):  # type: ignore[name-defined, misc]
            def parse_args(self, *args: Any, **kwargs: Any) -> Any:
                namespace = super().parse_args(*args, **kwargs)
                refuse_checkpoint(getattr(namespace, "model", None), what)
                return namespace

        return cli.with_parser(old, Parser)

    return replaced


class _Parser(cli.Parser):
    """A parser of mlx-vlm with our options."""

    not_offered = _NOT_OFFERED

    def asked(self, namespace: Any) -> None:
        """Nothing is known yet: the checkpoint decides what `--mode diffusion` means."""


class _ServerParser(_Parser):
    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        namespace = super().parse_args(*args, **kwargs)
        path = getattr(namespace, "model", None)
        if path and Path(path).is_dir() and is_new(config_at(Path(path))):
            found = ours_at(Path(path))
            check_host_options(found[2])
        return namespace


def evaluation(name: str) -> Patch:
    """The patch of one of mlx-vlm's evaluations."""
    what = f"mlx_vlm.evals.{name}"
    return Patch(
        target=what,
        reason="LLaDA2.2, which reads text alone, is refused with a traceback",
        changes=(
            Redirect("main", cli.guarded(what, refuses=what)),
            Replace("argparse", with_check(what)),
        ),
    )


def check_host_options(spec: Any) -> None:
    """Raises DiffusionError when the running command was given options that a model of ours cannot follow, before any
    weight is read."""
    command = cli.running()
    if command is None:
        return
    host = vars(command.host)
    server = command.name == "mlx_vlm.server"
    requests.refuse_meaningless(host, lambda name: "--" + name.replace("_", "-"), _SERVERS if server else ())
    known = requests.own_names() | {
        *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "max_denoising_steps", "block_length"),
        *("threshold", "editing_threshold", "max_post_steps", "num_to_transfer"),
    }
    given = {name: value for name, value in host.items() if name in known}
    if server:
        given.pop("max_tokens", None)  # a cap for requests that say none
    requests.check_early(spec, given)


def check_mode(path: Path, found: Any, decodes: bool) -> None:
    """
    Raises DiffusionError when the running command was asked for a mode that the checkpoint does not have.

    Args:
        found: what :func:`ours_at` says.
        decodes: mlx-vlm decodes it by diffusion.
    """
    mode = cli.load_options().mode
    if mode == "diffusion" and found is None and not decodes:
        raise DiffusionError(f"{path} has no diffusion spec: leave out --mode diffusion to decode it autoregressively.")
    if mode == "ar" and found is not None:
        raise DiffusionError(
            f"{path} is a diffusion checkpoint of the family {served.FAMILY}, which writes nonsense when decoded "
            "autoregressively: leave out --mode ar."
        )
