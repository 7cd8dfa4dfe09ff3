"""Perplexity of the next token says nothing of a bidirectional model."""

from .. import Patch, Redirect, cli

PATCH = Patch(
    target="mlx_lm.perplexity",
    reason="the perplexity printed for a diffusion checkpoint has no meaning",
    changes=(
        Redirect("eval_ppl", cli.refusing("mlx_lm.perplexity.eval_ppl"), parameters=("model", "data")),
        Redirect("main", cli.guarded("mlx_lm.perplexity", refuses="mlx_lm.perplexity")),
    ),
)
