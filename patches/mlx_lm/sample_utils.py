"""Releases before 0.32 make a new greedy function for every temperature 0: it is marked, to be told from others."""

import sys
from typing import Any

from .. import Lean, Patch, Redirect


def is_greedy(sampler: Any) -> bool:
    """Whether `make_sampler` made it for temperature 0."""
    shared = vars(sys.modules["mlx_lm.sample_utils"]).get("greedy_sampler")
    return getattr(sampler, "mlx_dllm_greedy", False) or (sampler is not None and sampler is shared)


def make_sampler(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    sampler = original(*args, **kwargs)
    if not (args[0] if args else kwargs.get("temp", 0.0)) and not is_greedy(sampler):
        sampler.mlx_dllm_greedy = True
    return sampler


_FILTERS = "--top-p, --min-p and --top-k do not work with diffusion"

PATCH = Patch(
    target="mlx_lm.sample_utils",
    reason="greedy decoding may rank positions by another confidence",
    changes=(Redirect("make_sampler", make_sampler, parameters=("temp",)),),
    leans=tuple(Lean(name, called=True, lost=_FILTERS) for name in ("apply_top_p", "apply_min_p", "apply_top_k")),
)
