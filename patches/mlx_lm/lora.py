"""LoRA trains the next-token loss, which is wrong for masked diffusion."""

from .. import Patch, Redirect, cli

PATCH = Patch(
    target="mlx_lm.lora",
    reason="a diffusion checkpoint is refused with a traceback",
    changes=(Redirect("main", cli.guarded("mlx_lm.lora", refuses="mlx_lm.lora")),),
)
