"""The lm-eval adapter scores shifted, causal log-likelihoods."""

from typing import Any

from .. import Patch, Redirect, cli


def refused(original: Any, /, self: Any, *args: Any, **kwargs: Any) -> Any:
    cli.refuse_if_diffusion(getattr(self, "_model", None), "mlx_lm.evaluate")
    return original(self, *args, **kwargs)


PATCH = Patch(
    target="mlx_lm.evaluate",
    reason="scores of a diffusion checkpoint have no meaning",
    changes=(
        Redirect("MLXLM.loglikelihood", refused, parameters=("self", "requests")),
        Redirect("MLXLM.loglikelihood_rolling", refused, parameters=("self", "requests")),
        Redirect("MLXLM.generate_until", refused, parameters=("self", "requests")),
        Redirect("main", cli.guarded("mlx_lm.evaluate", refuses="mlx_lm.evaluate")),
    ),
)
