"""Training takes the next-token loss, which is wrong for masked diffusion."""

from ... import Patch, Redirect
from .. import commands

PATCH = Patch(
    target="mlx_vlm.trainer.api",
    reason="LLaDA2.2 is trained on a loss that is wrong for it",
    changes=(Redirect("Trainer.__init__", commands.refusing("mlx_vlm.trainer.Trainer"), parameters=("model",)),),
)
