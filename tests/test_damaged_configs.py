"""Settings of the wrong type are named before a weight is read, for checkpoints of every family."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from mlx_dllm_plugin import DecodingOptions, DiffusionError, decode
from tests.tools import edit_json

WRONG = [
    ("sdar-b4", "rope_theta", "x", "a number above 0"),
    ("sdar-b4", "rope_theta", 0, "a number above 0"),
    ("sdar-b4", "tie_word_embeddings", "false", "true or false"),
    ("sdar-b4", "max_position_embeddings", "4096", "a positive integer"),
    ("sdar-b4", "num_attention_heads", 4.0, "a positive integer"),
    ("llada-8b-tiny", "weight_tying", "false", "true or false"),
    ("llada-8b-tiny", "max_sequence_length", True, "a positive integer"),
    ("llada-8b-tiny", "n_heads", -4, "a positive integer"),
    ("llada-moe-tiny", "num_experts_per_tok", 0, "a positive integer"),
    ("llada-moe-tiny", "num_experts_per_tok", "2", "a positive integer"),
    ("llada-moe-tiny", "partial_rotary_factor", "1", "a number above 0"),
    ("llada-moe-tiny", "qk_layernorm", "x", "true or false"),
    ("llada2_moe-v20", "rope_theta", "x", "a number above 0"),
    ("llada2_moe-v22", "moe_intermediate_size", 0, "a positive integer"),
    ("llada2_moe-v22", "num_experts", True, "a positive integer"),
    ("llada2_moe-v22", "partial_rotary_factor", "0.5", "a number above 0"),
    ("llada2_moe-v22", "tie_word_embeddings", 1, "true or false"),
    ("modernbert-tiny", "global_rope_theta", "x", "a number above 0"),
    ("dream-tiny", "rms_norm_eps", [1], "a number above 0"),
]


def copied(goldens: Path, name: str, to: Path) -> Path:
    source = next(goldens.glob(f"*/{name}"))
    shutil.copytree(source, to / name)
    for file in (to / name).iterdir():
        file.chmod(0o644)
    return to / name


def sentence(path: Path) -> str:
    with pytest.raises(DiffusionError) as error:
        mlx_lm.load(str(path))
    return str(error.value)


@pytest.mark.parametrize(("name", "key", "value", "expected"), WRONG)
def test_a_setting_of_the_wrong_type_is_named(
    name: str, key: str, value: Any, expected: str, goldens: Path, tmp_path: Path
) -> None:
    path = copied(goldens, name, tmp_path)
    edit_json(path / "config.json", **{key: value})
    assert sentence(path) == f"{path / 'config.json'}: {key} must be {expected}, got {value!r}."


def test_more_experts_a_token_than_there_are(goldens: Path, tmp_path: Path) -> None:
    path = copied(goldens, "llada-moe-tiny", tmp_path)
    edit_json(path / "config.json", num_experts_per_tok=9)
    expected = f"{path / 'config.json'}: num_experts_per_tok 9 is more than the 8 experts there are."
    assert sentence(path) == expected


@pytest.mark.parametrize("value", [{"a": 1}, None, "SDARForCausalLM"])
def test_architectures_of_any_type_name_nothing(value: Any, goldens: Path, tmp_path: Path) -> None:
    path = copied(goldens, "sdar-b4", tmp_path)
    edit_json(path / "config.json", architectures=value)
    assert mlx_lm.load(str(path))[0].diffusion_spec.family == "sdar"


def test_a_forced_family_is_text(goldens: Path, tmp_path: Path) -> None:
    path = copied(goldens, "sdar-b4", tmp_path)
    edit_json(path / "config.json", diffusion_family=["sdar"])
    assert sentence(path) == f"{path / 'config.json'}: diffusion_family must be text, got ['sdar']."


def test_weights_under_two_names_are_refused(goldens: Path, tmp_path: Path) -> None:
    path = copied(goldens, "llada-8b-tiny", tmp_path)
    weights: Any = mx.load(str(path / "model.safetensors"))
    twice = {name.replace("model.transformer.", "model."): value * 0 for name, value in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), {**weights, **twice}, {"format": "mlx"})
    assert "weights are there twice" in sentence(path)


def test_an_end_of_sequence_outside_the_vocabulary_is_left_out_of_eos_flags(goldens: Path, tmp_path: Path) -> None:
    path = copied(goldens, "llada-gqa-tiny", tmp_path)
    prompt = [5, 6, 7, 8]
    options = DecodingOptions(max_tokens=8, eos_flags="both", stop_at_eos=False)
    expected = decode(mlx_lm.load(str(path))[0], prompt, options).tokens
    edit_json(path / "generation_config.json", eos_token_id=[297, 99999])
    assert decode(mlx_lm.load(str(path))[0], prompt, options).tokens == expected
