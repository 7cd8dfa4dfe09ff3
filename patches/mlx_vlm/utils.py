"""mlx-vlm knows gpt2 and qwen2 as autoregressive models and would decode an a2d conversion of them causally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import DiffusionError
from .. import Patch, Redirect


def load_model(original: Any, /, model_path: Any, *args: Any, **kwargs: Any) -> Any:
    from ...checkpoint import open_checkpoint, resolve_run_directory
    from ...families.refused import is_mlx_vlms
    from ...spec import detect

    path = resolve_run_directory(Path(model_path))
    checkpoint = open_checkpoint(path) if (path / "config.json").is_file() else None
    # Diffusion that mlx-vlm has itself is refused to mlx-lm alone.
    if checkpoint is None or is_mlx_vlms(checkpoint):
        return original(model_path, *args, **kwargs)
    family = detect(checkpoint)
    if family is not None:
        raise DiffusionError(
            f"{model_path} is a diffusion checkpoint of the family {family.name}, which mlx-vlm would decode "
            "autoregressively: use mlx_lm.generate."
        )
    return original(model_path, *args, **kwargs)


PATCH = Patch(
    target="mlx_vlm.utils",
    reason="mlx-vlm decodes a2d checkpoints autoregressively, without an error",
    changes=(Redirect("load_model", load_model, parameters=("model_path",)),),
)
