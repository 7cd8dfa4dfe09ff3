"""Attention policy as cache objects: FullCanvas makes mlx-lm's own models bidirectional, and changes nothing else."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dllm_plugin import bidirectional_forward
from mlx_dllm_plugin.caches import AttentionPolicy, FullCanvas
from tests.models import CONFIGS, stock_model, tiny_model

MODELS = sorted(CONFIGS)
IDS = [3, 9, 1, 22, 40, 8, 17, 5]


def logits(model: Any, ids: list[int] | list[list[int]], cache: FullCanvas | None = None) -> np.ndarray:
    rows = ids if isinstance(ids[0], list) else [ids]
    out = model(mx.array(rows), None if cache is None else [cache] * len(model.layers))
    return np.array(out if isinstance(ids[0], list) else out[0])


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return stock_model(request.param)


def test_a_later_token_changes_earlier_logits(model: Any) -> None:
    for later in range(1, len(IDS)):
        changed = [*IDS[:later], 30, *IDS[later + 1 :]]
        before, after = logits(model, IDS, FullCanvas()), logits(model, changed, FullCanvas())
        assert (np.abs(after[:later] - before[:later]).max(axis=1) > 1e-4).all()


def test_the_plain_model_is_causal_before_and_after(model: Any) -> None:
    before = logits(model, IDS)
    both = logits(model, IDS, FullCanvas())
    assert not np.allclose(before[0], both[0], atol=1e-3)
    np.testing.assert_array_equal(logits(model, IDS), before)
    changed = logits(model, [*IDS[:-1], 30])
    np.testing.assert_array_equal(changed[:-1], before[:-1])
    assert not np.allclose(changed[-1], before[-1], atol=1e-3)


def test_attention_reaches_past_sliding_windows() -> None:
    """gemma3_text with a window of 3, and only sliding layers: the last token still changes the first logits."""
    model = stock_model("gemma3_text", num_hidden_layers=1, sliding_window_pattern=1)
    assert model.model.window_size < len(IDS)
    before, after = logits(model, IDS, FullCanvas()), logits(model, [*IDS[:-1], 30], FullCanvas())
    assert np.abs(after[0] - before[0]).max() > 1e-4


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_left_padded_batch_equals_each_row_alone(model_type: str, kv_heads: int) -> None:
    """Bit for bit, also when the batch has as many rows as the model has key-value heads, where a mask of the wrong
    rank would broadcast without an error."""
    if model_type == "gpt2":
        model = stock_model(model_type, n_head=kv_heads)
    else:
        model = stock_model(model_type, num_attention_heads=4, num_key_value_heads=kv_heads)
    rank = 5 if model_type == "gemma2" and kv_heads < 4 else 4
    random = np.random.default_rng(kv_heads)
    for batch in sorted({2, kv_heads, 4}):
        lengths = [1 + (3 * row) % 8 for row in range(batch)]
        rows = [random.integers(0, 48, length).tolist() for length in lengths]
        width = max(lengths)
        padding = [width - length for length in lengths]
        padded = [[7] * pad + row for pad, row in zip(padding, rows, strict=True)]
        together = logits(model, padded, FullCanvas(padding, width, rank))
        for row, pad, out in zip(rows, padding, together, strict=True):
            np.testing.assert_array_equal(out[pad:], logits(model, row, FullCanvas()))


def test_what_the_padding_holds_does_not_matter() -> None:
    model = stock_model("qwen2")
    cache = FullCanvas([0, 5], 8)
    first = logits(model, [IDS, [0] * 5 + IDS[:3]], cache)
    second = logits(model, [IDS, [47, 9, 1, 2, 3] + IDS[:3]], cache)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1, 5:], second[1, 5:])


def test_a_mask_of_the_wrong_rank_would_show() -> None:
    """The control of the tests above: gemma2 with a rank-4 mask at batch == key-value heads is silently wrong."""
    model = stock_model("gemma2")
    rows = [IDS, [0] * 5 + IDS[:3]]
    right, wrong = (logits(model, rows, FullCanvas([0, 5], 8, rank)) for rank in (5, 4))
    assert np.abs(right - wrong).max() > 1e-3


def test_no_padding_means_no_mask() -> None:
    for cache in (FullCanvas(), FullCanvas([0, 0], 8), FullCanvas(None, 8)):
        assert cache.make_mask(8) is None and cache.make_mask(8, return_array=True, window_size=2) is None
        assert isinstance(cache.offset, int) and cache.offset == 0
    cache = FullCanvas([0, 3], 5)
    mask = cache.make_mask(5)
    assert mask is not None and mask.dtype == mx.bool_ and mask.shape == (2, 1, 1, 5)
    assert mask[:, 0, 0].tolist() == [[True] * 5, [False] * 3 + [True] * 2]
    assert isinstance(cache.offset, mx.array) and cache.offset.tolist() == [0, -3]
    five = FullCanvas([0, 3], 5, rank=5).make_mask(5)
    assert five is not None and five.shape == (2, 1, 1, 1, 5)


def test_caches_are_truthy_and_keep_nothing() -> None:
    cache = FullCanvas([0, 2], 4)
    keys, values = mx.ones((2, 1, 4, 3)), mx.zeros((2, 1, 4, 3))
    assert bool(cache) and bool(AttentionPolicy())
    assert cache.update_and_fetch(keys, values)[0] is keys and cache.update_and_fetch(keys, values)[1] is values
    assert not hasattr(cache, "bits") and not hasattr(cache, "__len__")


def test_a_cache_that_would_change_the_attention_cannot_be_defined() -> None:
    with pytest.raises(TypeError, match="Quantized must define neither `bits` nor `__len__`"):
        type("Quantized", (AttentionPolicy,), {"bits": 4})
    with pytest.raises(TypeError, match="Sized must define neither"):
        type("Sized", (FullCanvas,), {"__len__": lambda self: 0})
    with pytest.raises(TypeError, match="Inherited must define neither"):
        type("Inherited", (FullCanvas, list), {})
    incomplete = type("Incomplete", (AttentionPolicy,), {})()
    with pytest.raises(TypeError, match="Incomplete must define make_mask"):
        incomplete.make_mask(3)
    with pytest.raises(TypeError, match="Incomplete must define update_and_fetch"):
        incomplete.update_and_fetch(mx.zeros(1), mx.zeros(1))


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2"])
def test_bidirectional_forward_leaves_the_model_causal(model_type: str) -> None:
    diffusion, plain = tiny_model(model_type), tiny_model(model_type, ar=True)
    before = logits(diffusion, IDS)
    both = np.array(bidirectional_forward(diffusion, mx.array([IDS]))[0])
    np.testing.assert_array_equal(both, logits(plain, IDS, FullCanvas()))
    np.testing.assert_array_equal(logits(diffusion, IDS), before)
    np.testing.assert_array_equal(before, logits(plain, IDS))
    assert np.abs(both[0] - before[0]).max() > 1e-2
