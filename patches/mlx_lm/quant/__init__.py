"""What is changed in mlx_lm.quant: each of these calibrates on the causal model, which is not the one that decodes."""

from ... import Patch, Redirect, cli


def refusal(name: str) -> Patch:
    """The patch that refuses diffusion checkpoints in one quantizer's command."""
    return Patch(
        target=f"mlx_lm.{name}",
        reason="a diffusion checkpoint is calibrated with causal attention",
        changes=(Redirect("main", cli.guarded(f"mlx_lm.{name}", refuses=f"mlx_lm.{name}")),),
    )
