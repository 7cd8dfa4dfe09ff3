"""A prompt cache file holds causal keys and values, which are wrong for bidirectional attention."""

from .. import Patch, Redirect, cli

PATCH = Patch(
    target="mlx_lm.cache_prompt",
    reason="a diffusion checkpoint is refused with a traceback",
    changes=(Redirect("main", cli.guarded("mlx_lm.cache_prompt", refuses="mlx_lm.cache_prompt")),),
)
