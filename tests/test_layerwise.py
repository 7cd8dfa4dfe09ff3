"""A model's forward, layer by layer: the same logits, everything in its order, and memory near one layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dllm_plugin import bidirectional_forward
from mlx_dllm_plugin.checkpoint import open_checkpoint
from mlx_dllm_plugin.layerwise import Watch, block_of, forward, load_lazily
from mlx_dllm_plugin.spec import detect, resolve
from tests.models import tiny_run

FOLDERS = {
    "a2d/gpt2-grow/run": None,
    "a2d/gemma3-grow/run": None,
    "llada_dream/llada-moe-tiny": None,
    "llada_dream/modernbert-tiny": None,
    "block/sdar-b4": 4,
    "block/llada2_moe-v22": 32,
}


def lazy(path: Path) -> Any:
    checkpoint = open_checkpoint(path)
    family = detect(checkpoint)
    assert family is not None
    return load_lazily(checkpoint.path, family, resolve(checkpoint, family))


def canvas(model: Any, rows: int = 2, columns: int = 64) -> mx.array:
    return mx.array(np.random.default_rng(0).integers(0, model.diffusion_spec.vocab_size, (rows, columns)))


class Seen(Watch):
    def __init__(self) -> None:
        self.order: list[str] = []
        self.states: list[mx.array] = []

    def enters(self, number: int, states: mx.array) -> mx.array:
        self.order.append(f"in {number}")
        return states

    def leaves(self, number: int, states: mx.array) -> mx.array:
        self.order.append(f"out {number}")
        self.states.append(states)
        return states

    def chooses(self, number: int, experts: mx.array) -> None:
        self.order.append(f"experts {number} {experts.shape}")

    def ends(self, states: mx.array) -> mx.array:
        self.order.append("end")
        return states


@pytest.mark.parametrize("name", FOLDERS)
def test_released_layers_compute_what_the_whole_model_does(name: str, goldens: Path) -> None:
    model, whole = lazy(goldens / name), lazy(goldens / name)
    assert block_of(model.diffusion_spec) == FOLDERS[name]
    ids = canvas(model)
    wanted = forward(whole, ids)
    assert wanted.dtype == mx.float32 and wanted.shape == (*ids.shape, model.diffusion_spec.vocab_size)
    assert mx.array_equal(forward(model, ids, release=True), wanted)
    if FOLDERS[name] is None:
        assert mx.array_equal(bidirectional_forward(whole, ids), wanted)
    assert [type(layer).__name__ for layer in whole.layers] == [type(layer).__name__ for layer in model.layers]


def test_block_causal_attention_is_the_checkpoints(goldens: Path) -> None:
    """A token of the last block reaches no block before its own."""
    model = lazy(goldens / "block" / "sdar-b4")
    ids = np.array(canvas(model, 1, 12))
    before = np.array(forward(model, mx.array(ids)))
    ids[0, -1] = (ids[0, -1] + 1) % 300
    after = np.array(forward(model, mx.array(ids)))
    assert np.array_equal(before[:, :8], after[:, :8]) and np.abs(before - after)[0, 8].max() > 1e-2


def test_a_watch_sees_all_in_order_and_may_exchange_it(goldens: Path) -> None:
    model = lazy(goldens / "block" / "llada2_moe-v22")
    seen = Seen()
    forward(model, canvas(model, 1), seen)
    middle = ["in 1", "experts 1 (1, 64, 2)", "out 1", "in 2", "experts 2 (1, 64, 2)", "out 2"]
    assert seen.order == ["in 0", "out 0", *middle, "end"]

    class Other(Watch):
        def enters(self, number: int, states: mx.array) -> mx.array:
            return seen.states[1] if number == 2 else mx.zeros_like(states)

    assert mx.array_equal(forward(model, canvas(model, 1), Other()), forward(model, canvas(model, 1)))


def test_the_layers_are_as_before_also_after_an_error(goldens: Path) -> None:
    model = lazy(goldens / "block" / "llada2_moe-v22")
    kinds = [type(module) for _, module in model.named_modules()]

    class Breaks(Watch):
        def leaves(self, number: int, states: mx.array) -> mx.array:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        forward(model, canvas(model), Breaks())
    assert [type(module) for _, module in model.named_modules()] == kinds


@pytest.mark.parametrize("tied", [False, True])
def test_memory_is_that_of_one_layer(tied: bool, tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path, "llama", num_hidden_layers=24, hidden_size=256, intermediate_size=512, tie_word_embeddings=tied
    )
    layer = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 2 * 256)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = lazy(run)
    assert mx.get_active_memory() - before < layer / 10  # nothing has been read
    forward(model, mx.array([[1, 2, 3, 4] * 4]), release=True)
    assert mx.get_peak_memory() - before < 1.5 * layer
    assert mx.get_active_memory() - before < layer / 2
