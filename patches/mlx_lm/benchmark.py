"""The benchmark times prefill and decoding apart, which denoising has not."""

from .. import Patch, Redirect, cli

PATCH = Patch(
    target="mlx_lm.benchmark",
    reason="a diffusion checkpoint is measured with random prompts as if it had a prefill",
    changes=(Redirect("main", cli.guarded("mlx_lm.benchmark", refuses="mlx_lm.benchmark")),),
)
