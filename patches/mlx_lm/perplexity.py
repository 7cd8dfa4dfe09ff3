"""Perplexity of the next token says nothing of a bidirectional model."""

from typing import Any

from .. import Patch, Redirect, cli


def eval_ppl(original: Any, /, model: Any, *args: Any, **kwargs: Any) -> Any:
    cli.refuse_if_diffusion(model, "mlx_lm.perplexity.eval_ppl")
    return original(model, *args, **kwargs)


PATCH = Patch(
    target="mlx_lm.perplexity",
    reason="the perplexity printed for a diffusion checkpoint has no meaning",
    changes=(
        Redirect("eval_ppl", eval_ppl, parameters=("model", "data")),
        Redirect("main", cli.guarded("mlx_lm.perplexity", refuses="mlx_lm.perplexity")),
    ),
)
