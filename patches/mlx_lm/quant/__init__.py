"""What is changed in mlx_lm.quant: each of these calibrates on the causal model, which is not the one that decodes."""

from typing import Any

from ... import Patch, Redirect, cli


def refusal(name: str, *functions: str) -> Patch:
    """The patch that refuses diffusion checkpoints in one quantizer: its command, and functions of a model."""
    target = f"mlx_lm.quant.{name}"

    def refused(function: str) -> Any:
        def refuse(original: Any, /, model: Any, *args: Any, **kwargs: Any) -> Any:
            cli.refuse_if_diffusion(model, f"{target}.{function}")
            return original(model, *args, **kwargs)

        return refuse

    return Patch(
        target=target,
        reason="a diffusion checkpoint is calibrated with causal attention",
        changes=(
            Redirect("main", cli.guarded(target, refuses=target)),
            *(Redirect(function, refused(function), parameters=("model",)) for function in functions),
        ),
    )
