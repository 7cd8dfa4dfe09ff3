"""mlx-vlm's autoregressive loop, which has no diffusion branch."""

from typing import Any

from ... import Patch, Redirect
from .. import commands

_refusing = commands.refusing("mlx_vlm.generate.BatchGenerator")


def batch_generator(original: Any, /, self: Any, *args: Any, **kwargs: Any) -> None:
    # Its __del__ calls close(), which reads this; a refused constructor must not print an ignored exception.
    self._wire_stack = None
    _refusing(original, self, *args, **kwargs)


PATCH = Patch(
    target="mlx_vlm.generate.ar",
    reason="LLaDA2.2 is decoded autoregressively by batch_generate, without an error",
    changes=(
        Redirect("generate_step", commands.refusing("mlx_vlm.generate.generate_step"), parameters=("model",)),
        Redirect("batch_generate", commands.refusing("mlx_vlm.batch_generate"), parameters=("model", "processor")),
        Redirect("BatchGenerator.__init__", batch_generator, parameters=("self", "model")),
    ),
)
