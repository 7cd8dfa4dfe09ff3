"""What is changed in mlx_lm.quant: each of these calibrates on the causal model, which is not the one that decodes."""

from ... import Patch, Redirect, cli


def refusal(name: str, *functions: str) -> Patch:
    """The patch that refuses diffusion checkpoints in one quantizer: its command, and functions of a model."""
    target = f"mlx_lm.quant.{name}"

    return Patch(
        target=target,
        reason="a diffusion checkpoint is calibrated with causal attention",
        changes=(
            Redirect("main", cli.guarded(target, refuses=target)),
            *(
                Redirect(function, cli.refusing(f"{target}.{function}"), parameters=("model",))
                for function in functions
            ),
        ),
    )
