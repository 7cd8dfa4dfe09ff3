"""Expert offloading rewrites a checkpoint through mlx-vlm's own model of LLaDA2."""

from .. import Patch, Redirect, cli
from . import commands

PATCH = Patch(
    target="mlx_vlm.moe_offload",
    reason="LLaDA2.2 is rewritten into what cannot be decoded",
    changes=(
        Redirect("repack", commands.refusing_path("mlx_vlm.moe_offload", "build"), parameters=("build",)),
        Redirect("main", cli.guarded("mlx_vlm.moe_offload"), reason="errors end in a traceback"),
    ),
)
