"""The server's command line: our options are the defaults of requests."""

from ... import Patch, Redirect, Replace, cli
from .. import commands

PATCH = Patch(
    target="mlx_vlm.server.cli",
    reason="mlx_vlm.server does not offer the diffusion options",
    changes=(
        Redirect("main", cli.guarded("mlx_vlm.server")),
        Replace("argparse", commands.with_server_options),
    ),
)
