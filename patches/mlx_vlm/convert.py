"""The converter writes what mlx-vlm's own model of LLaDA2 reads."""

from .. import Patch, Redirect, cli

PATCH = Patch(
    target="mlx_vlm.convert",
    reason="LLaDA2.2 is refused with a traceback",
    changes=(Redirect("main", cli.guarded("mlx_vlm.convert", refuses="mlx_vlm.convert")),),
)
