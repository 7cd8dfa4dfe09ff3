"""Training takes the next-token loss, which is wrong for masked diffusion."""

from .. import Patch, Redirect, cli

PATCH = Patch(
    target="mlx_vlm.train",
    reason="LLaDA2.2 is trained on a loss that is wrong for it",
    changes=(Redirect("main", cli.guarded("mlx_vlm.train", refuses="mlx_vlm.train")),),
)
