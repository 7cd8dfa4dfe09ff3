"""mlx_lm.convert: the recipes that keep what every token passes through more precise than the experts."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import configure_parser, convert

from mlx_dllm_plugin import DecodingOptions, DiffusionError, activate, decode

OFTEN = ("word_embeddings", "lm_head", "query_key_value", "dense", "shared_experts")
PROMPT = list(range(30, 50))


@pytest.fixture(autouse=True)
def active() -> None:
    activate()


def converted(source: Path, target: Path, recipe: str | None, bits: int = 4) -> tuple[dict, dict]:
    """config.json's quantization and the weights of a converted copy, which decodes."""
    convert(str(source), str(target), quantize=True, q_bits=bits, q_group_size=32, quant_predicate=recipe)
    model, _ = mlx_lm.load(str(target))
    assert len(decode(model, PROMPT, DecodingOptions(max_tokens=4, stop_at_eos=False)).tokens) == 4
    return json.loads((target / "config.json").read_text())["quantization"], dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("recipe", [None, "mixed_8", "mixed_full"])
def test_the_router_is_never_quantized_and_recipes_spare_what_every_token_passes(
    goldens: Path, tmp_path: Path, recipe: str | None
) -> None:
    quantization, weights = converted(goldens / "block" / "llada2_moe-v22", tmp_path / "out", recipe)
    for name, value in weights.items():
        if ".mlp.gate." in name:
            assert value.dtype == mx.float32 and f"{name.removesuffix('weight')}scales" not in weights
    assert "model.layers.2.mlp.switch_mlp.up_proj.scales" in weights
    own = {name for name in quantization if any(part in name for part in OFTEN)}
    if recipe == "mixed_8":
        assert {quantization[name]["bits"] for name in own} == {8}
        assert {name.rpartition(".")[2] for name in own} >= {"word_embeddings", "lm_head", "query_key_value", "dense"}
    else:
        assert not own
    quantized = "lm_head.scales" in weights, "model.layers.1.attention.dense.scales" in weights
    assert quantized == ((recipe != "mixed_full"),) * 2


def test_a_recipe_of_experts_is_refused_for_other_models(goldens: Path, tmp_path: Path) -> None:
    source = goldens / "a2d" / "gpt2-grow" / "run" / "model"
    with pytest.raises(DiffusionError) as error:
        convert(str(source), str(tmp_path / "out"), quantize=True, quant_predicate="mixed_8")
    assert str(error.value) == (
        "--quant-predicate mixed_8 is for the experts of LLaDA2, and this is a mlx_lm.models.gpt2 model: leave it out."
    )
    assert not (tmp_path / "out").exists()


def test_the_command_line_offers_the_recipes_beside_the_hosts() -> None:
    for recipe in ("mixed_full", "mixed_4_6"):
        given = configure_parser().parse_args(["--model", "x", "--quant-predicate", recipe])
        assert given.quant_predicate == recipe
