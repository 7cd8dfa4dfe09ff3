"""The server batches with caches and serves prompt suffixes, neither of which a fixed canvas has."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from .. import Patch, Redirect, Replace, cli


def load(original: Any, /, self: Any, *args: Any, **kwargs: Any) -> None:
    """`ModelProvider._load`: a request that names a diffusion checkpoint gets the sentence as its error."""
    original(self, *args, **kwargs)
    try:
        for name in ("model", "draft_model"):
            cli.refuse_if_diffusion(getattr(self, name, None), "mlx_lm.server")
    except ValueError:
        for name in ("model_key", "model", "tokenizer", "draft_model"):  # else the next request finds it loaded
            setattr(self, name, None)
        raise


def with_check(old: ModuleType) -> ModuleType:
    """The argparse module, with a parser that refuses a local diffusion checkpoint before the server starts: later it
    would only end the generation thread."""

    class Parser(old.ArgumentParser):  # type: ignore[name-defined, misc]
        def parse_args(self, *args: Any, **kwargs: Any) -> Any:
            namespace = super().parse_args(*args, **kwargs)
            for name in ("model", "draft_model"):
                if getattr(namespace, name, None):
                    cli.refuse_checkpoint(Path(getattr(namespace, name)), "mlx_lm.server")
            return namespace

    return cli.with_parser(old, Parser)


PATCH = Patch(
    target="mlx_lm.server",
    reason="a diffusion checkpoint ends the server's generation thread",
    changes=(
        Redirect("ModelProvider._load", load, parameters=("self", "model_path")),
        Redirect("main", cli.guarded("mlx_lm.server")),
        Replace("argparse", with_check),
    ),
)
