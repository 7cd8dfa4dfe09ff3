"""What a conversion does with each weight: which type it gets, whether it is quantized, and with how many bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import DiffusionError

RECIPES = {"mixed_8": 8, "mixed_full": None}  # bits of what is kept; None: not quantized

Predicate = Callable[[str, Any], "bool | dict[str, Any]"]

# Mode -> (group sizes, bits) that MLX has, the default first.
MODES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "nvfp4": ((16,), (4,)),
    "mxfp8": ((32,), (8,)),
}


class Plan(NamedTuple):
    """
    Args:
        chosen: module -> True or parameters of its own.
        left: modules that stay as they are because the group size does not divide their width.
        fitting: a group size that divides more of their widths, or None.
    """

    chosen: dict[str, bool | dict[str, Any]]
    left: list[str]
    fitting: int | None = None


def mixed(bits: int | None = 8, group_size: int = 64) -> Predicate:
    """
    A recipe for ``mlx_lm.convert(quant_predicate=mixed(), ...)``: what every token passes through stays more precise
    than the MLPs and the experts that are chosen, which are most of the weights and take the conversion's bits.

    Args:
        bits: of embeddings, head, attention and shared experts; None: not quantized. A router never is.
    """
    kept: bool | dict[str, Any] = False if bits is None else {"bits": bits, "group_size": group_size, "mode": "affine"}

    def predicate(path: str, _: Any) -> bool | dict[str, Any]:
        parts = path.split(".")
        if path.endswith("mlp.gate"):
            return False
        inside = any(part.isdigit() for part in parts)  # of a layer: layers are numbered
        often = any("attn" in part or "attention" in part or part.startswith("shared_expert") for part in parts)
        return kept if often or not inside else True

    return predicate


def named(recipe: str, model: Any, group_size: int | None) -> Predicate:
    """The predicate of a recipe, one of ours or of mlx-lm's. Raises DiffusionError for one that is not known, or not
    made for this model."""
    import inspect

    from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder

    if recipe in RECIPES:
        return mixed(RECIPES[recipe], group_size or 64)
    if recipe not in QUANT_RECIPES:
        known = ", ".join(dict.fromkeys([*RECIPES, *QUANT_RECIPES]))
        raise DiffusionError(f"--quant-predicate must be one of {known}, got {recipe!r}.")
    if not any("down_proj" in name for name, _ in model.named_modules()):
        raise DiffusionError(
            f"--quant-predicate {recipe} is for models with a down_proj, which {_name(model)} does not have: use "
            "mixed_8 or mixed_full."
        )
    return inspect.unwrap(mixed_quant_predicate_builder)(recipe, model, group_size or 64)


def routers(model: Any) -> set[str]:
    """The modules that choose experts: a rounded score picks another expert."""
    from mlx_lm.models.switch_layers import SwitchGLU

    found = set()
    for name, module in model.named_modules():
        children = module.children()
        if any(isinstance(child, SwitchGLU) for child in children.values()):
            found |= {f"{name}.{key}" for key in children if "gate" in key or "router" in key}
    return found


def plan(model: Any, predicate: Predicate | None, group_size: int) -> Plan:
    """
    What is quantized of a model.

    Args:
        predicate: who decides; None: the model itself, else all.
        group_size: of what gets no parameters of its own.

    Raises:
        DiffusionError: nothing is.
    """
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    decide = predicate or getattr(model, "quant_predicate", None) or (lambda path, module: True)
    kept = routers(model)
    found, widths = Plan({}, []), set()
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    for path, module in leaves:
        if not hasattr(module, "to_quantized") or path in kept:
            continue
        answer = decide(path, module)
        _check_answer(path, answer)
        if not answer:
            continue
        width = module.weight.shape[-1]
        own = answer.get("group_size") if isinstance(answer, dict) else None
        # mlx-lm asks for the conversion's group size too, whatever the module's own is.
        if width % group_size or width % (own or group_size):
            found.left.append(path)
            widths.add(width)
        else:
            found.chosen[path] = answer
    if not found.chosen:
        _refuse_nothing(model, found.left, widths, group_size)
    return found._replace(fitting=next((size for size in (64, 32) if any(width % size == 0 for width in widths)), None))


def _check_answer(path: str, answer: Any) -> None:
    """Raises DiffusionError for what a predicate may not say."""
    sizes, bits = MODES["affine"]
    good = answer is None or isinstance(answer, bool)
    if isinstance(answer, dict) and answer.get("mode", "affine") in MODES:
        sizes, bits = MODES[answer.get("mode", "affine")]
        good = answer.get("bits", bits[0]) in bits and answer.get("group_size", sizes[0]) in sizes
    if not good:
        raise DiffusionError(
            f"quant_predicate must return True, False or a dict such as {{'bits': 4, 'group_size': 64}}, and of "
            f"{path!r} it returns {answer!r}."
        )


def _refuse_nothing(model: Any, left: list[str], widths: set[int], group_size: int) -> None:
    if not left:
        raise DiffusionError(f"Nothing of {_name(model)} is quantized by this quant_predicate: leave out -q.")
    fitting = [size for size in (32, 64, 128) if any(width % size == 0 for width in widths)]
    shown = ", ".join(map(str, sorted(widths)))
    sizes = " or ".join(map(str, fitting))
    way = f"use --q-group-size {sizes}" if fitting else "no group size does, leave out -q or try --q-mode nvfp4"
    raise DiffusionError(
        f"Nothing of {_name(model)} can be quantized in groups of {group_size}, which divides none of its widths "
        f"({shown}): {way}."
    )


def _name(model: Any) -> str:
    return f"this {getattr(getattr(model, 'diffusion_spec', None), 'family', type(model).__module__)} model"


def cast(model: Any, dtype: str) -> None:
    """Give a model's weights another type. Routers in float32, with the biases of their experts, stay in it."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    kind = getattr(mx, dtype)
    wanted = getattr(model, "cast_predicate", lambda path: True)
    kept = tuple(f"{name}." for name in routers(model))

    def one(path: str, value: mx.array) -> mx.array:
        stays = value.dtype == mx.float32 and path.startswith(kept)
        return value.astype(kind) if mx.issubdtype(value.dtype, mx.floating) and wanted(path) and not stays else value

    model.update(tree_map_with_path(one, model.parameters()))
