"""The default loss is the next token's. It is a default argument of `train` and `evaluate`: redirected in place."""

from ... import Patch, Redirect, cli

PATCH = Patch(
    target="mlx_lm.tuner.trainer",
    reason="a diffusion checkpoint is trained with the wrong loss",
    changes=(
        Redirect(
            "default_loss",
            cli.refusing("Training with mlx_lm.tuner.trainer.default_loss"),
            parameters=("model", "batch", "lengths"),
        ),
    ),
)
