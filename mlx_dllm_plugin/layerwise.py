"""One forward, layer by layer: what goes into each layer and comes out of it, and memory near that of one layer.

A model that was loaded lazily has read nothing yet. Each layer's weights are read when its output is computed, and
dropped right after, so that a model is run, and compared with another one, on a machine that cannot hold it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from .caches import BlockCache, BlockWindow, FullCanvas
from .decode import family_on, spec_of
from .families import Family
from .likelihood import HEAD_VALUES
from .runtime import load_with_spec
from .spec import DiffusionSpec


class Watch:
    """What is done with the states [B, T, D] on their way: a subclass looks at them, and may exchange them."""

    def enters(self, number: int, states: mx.array) -> mx.array:
        """What goes into layer ``number``. Returns what it is to get."""
        return states

    def leaves(self, number: int, states: mx.array) -> mx.array:
        """What comes out of layer ``number``. Returns what is to go on."""
        return states

    def chooses(self, number: int, experts: mx.array) -> None:
        """The experts [B, T, K] that the tokens of a layer of experts are given to."""

    def ends(self, states: mx.array) -> mx.array:
        """The last states, final norm included. Returns what the head is to get."""
        return states


def load_lazily(path: Path, family: Family, spec: DiffusionSpec) -> Any:
    """
    The model of a checkpoint, of which no layer has been read.

    Raises:
        CheckpointError: weights that are missing or do not fit.
    """
    from mlx_lm import utils

    return load_with_spec(inspect.unwrap(utils.load_model), path, family, spec, lazy=True)[0]


def block_of(spec: DiffusionSpec) -> int | None:
    """The block length of a checkpoint's attention; None where every position sees every position."""
    return spec.defaults["block_length"] if spec.attention == "block_causal" else None


def caches(model: Any, length: int, block: int | None) -> list[Any]:
    """
    The attention of a canvas that is computed whole.

    Args:
        length: columns of the canvas.
        block: length of the blocks of block-causal attention, counted from position 0; None: all see all.
    """
    if block is None:
        return [FullCanvas()] * len(model.layers)
    window = BlockWindow([0], [length], length, block, [0])
    found = [BlockCache() for _ in model.layers]
    for cache in found:
        cache.window = window
    return found


def forward(model: Any, ids: mx.array, watch: Watch | None = None, *, release: bool = False) -> mx.array:
    """
    Logits [B, T, V] float32 of canvases, with the checkpoint's own attention.

    Args:
        model: a model with a spec, perhaps loaded lazily.
        ids: token ids [B, T], without padding.
        watch: sees every layer's input and output.
        release: drop each layer's weights when its output is there. The model cannot be used afterwards.
    """
    family, block = family_on(model), block_of(spec_of(model))
    watch = watch or Watch()
    with _watched(model, watch, release):
        states = watch.ends(family.hidden(model, ids, caches(model, ids.shape[1], block)))
        mx.eval(states)
        return _logits(model, family, states, spec_of(model).vocab_size)


def _logits(model: Any, family: Family, states: mx.array, vocab_size: int) -> mx.array:
    """The head's logits in chunks: what it computes beside them stays small."""
    step = max(HEAD_VALUES // (vocab_size * states.shape[0]), 1)
    parts = []
    for start in range(0, states.shape[1], step):
        parts.append(family.head(model, states[:, start : start + step]).astype(mx.float32))
        mx.eval(parts[-1])
    return mx.concatenate(parts, axis=1)


@contextlib.contextmanager
def _watched(model: Any, watch: Watch, release: bool) -> Iterator[None]:
    """The model's layers with the watch before and behind them."""
    from mlx_lm.models.switch_layers import SwitchGLU

    kinds: list[tuple[nn.Module, type]] = []

    def exchange(module: nn.Module, make: Any, number: int) -> None:
        kind = type(module)
        kinds.append((module, kind))
        made = make(kind, watch, number)
        made.__module__, made.__qualname__ = kind.__module__, kind.__qualname__
        module.__class__ = made

    try:
        for number, layer in enumerate(model.layers):
            for _, module in layer.named_modules():
                if isinstance(module, SwitchGLU):
                    exchange(module, _choosing, number)
            exchange(layer, _released(model) if release else _passing, number)
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind


def _choosing(kind: type, watch: Watch, number: int) -> type:
    class Experts(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> Any:
            watch.chooses(number, indices)
            return super().__call__(x, indices, *args, **kwargs)

    return Experts


def _passing(kind: type, watch: Watch, number: int) -> type:
    class Layer(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            return watch.leaves(number, super().__call__(watch.enters(number, x), *args, **kwargs))

    return Layer


def _released(model: Any) -> Any:
    def make(kind: type, watch: Watch, number: int) -> type:
        passing = _passing(kind, watch, number)

        class Layer(passing):  # type: ignore[misc, valid-type]
            def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
                mx.eval(x)
                if number == 0 and "lm_head" in model:  # a tied head needs the embedding once more
                    for name, module in model.named_modules():
                        if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)) and ".layers." not in name:
                            _drop(module)
                out = super().__call__(x, *args, **kwargs)
                mx.eval(out)
                _drop(self)
                return out

        return Layer

    return make


def _drop(module: nn.Module) -> None:
    module.update(tree_map(lambda _: mx.array([]), module.parameters()))
    mx.clear_cache()
