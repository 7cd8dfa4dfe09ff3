"""The default loss is the next token's. It is a default argument of `train` and `evaluate`: redirected in place."""

from typing import Any

from ... import Patch, Redirect, cli


def default_loss(original: Any, /, model: Any, *args: Any, **kwargs: Any) -> Any:
    cli.refuse_if_diffusion(model, "Training with mlx_lm.tuner.trainer.default_loss")
    return original(model, *args, **kwargs)


PATCH = Patch(
    target="mlx_lm.tuner.trainer",
    reason="a diffusion checkpoint is trained with the wrong loss",
    changes=(Redirect("default_loss", default_loss, parameters=("model", "batch", "lengths")),),
)
