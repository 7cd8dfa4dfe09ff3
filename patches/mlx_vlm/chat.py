"""Chat decodes each turn through stream_generate: its command line gets our options."""

from .. import Patch, Redirect, Replace, cli
from . import commands

PATCH = Patch(
    target="mlx_vlm.chat",
    reason="mlx_vlm.chat does not offer the diffusion options",
    changes=(
        Redirect("main", cli.guarded("mlx_vlm.chat")),
        Replace("argparse", commands.with_options),
    ),
)
