"""Conversion: recipes that keep what every token passes through more precise than the experts; errors in one line."""

from __future__ import annotations

import sys
from typing import Any

from ...errors import DiffusionError
from .. import Patch, Redirect, Replace, cli

RECIPES = {"mixed_8": 8, "mixed_full": None}  # bits of what is kept; None: not quantized


def mixed_quant_predicate_builder(original: Any, /, recipe: str, model: Any, group_size: int | None = None) -> Any:
    """`mixed_quant_predicate_builder`, which knows the recipes of models here."""
    if recipe not in RECIPES:
        return original(recipe, model, *([] if group_size is None else [group_size]))
    mixed = getattr(sys.modules[type(model).__module__], "mixed", None)
    if mixed is None:
        raise DiffusionError(
            f"--quant-predicate {recipe} is for the experts of LLaDA2, and this is a {type(model).__module__} model: "
            "leave it out."
        )
    return mixed(RECIPES[recipe], group_size or 64)


PATCH = Patch(
    target="mlx_lm.convert",
    reason="errors end in a traceback, and the recipes mixed_8 and mixed_full are missing",
    changes=(
        Redirect(
            "mixed_quant_predicate_builder",
            mixed_quant_predicate_builder,
            parameters=("recipe", "model", "group_size"),
        ),
        Replace("QUANT_RECIPES", lambda old: [*old, *RECIPES], kind=list),
        Redirect("main", cli.guarded("mlx_lm.convert")),
    ),
)
