"""Chat keeps one prompt cache over its turns, which a fixed canvas does not have."""

from .. import Patch, Redirect, cli

PATCH = Patch(
    target="mlx_lm.chat",
    reason="a diffusion checkpoint is refused only after the first question",
    changes=(Redirect("main", cli.guarded("mlx_lm.chat", refuses="mlx_lm.chat")),),
)
