"""mlx_lm.convert and mlx_vlm.convert of diffusion checkpoints: what is kept, what is refused, what is measured, and
that nothing half done is left. Every family: tests/test_convert_families.py."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.convert import configure_parser, convert

from mlx_dllm_plugin import DecodingOptions, DiffusionError, activate, battery, conversion, decode
from mlx_dllm_plugin.checkpoint import open_checkpoint
from mlx_dllm_plugin.conversion import files, recipes, report
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.layerwise import load_lazily
from mlx_dllm_plugin.probes import canvases
from mlx_dllm_plugin.runtime import load_tokenizer
from mlx_dllm_plugin.spec import detect, resolve
from tests.models import tiny_model
from tests.tools import Runner, assert_one_sentence, copy_run, edit_json, process

OFTEN = ("word_embeddings", "lm_head", "query_key_value", "dense", "shared_experts")
PROMPT = list(range(30, 50))
SMALL: dict[str, Any] = dict(quantize=True, q_group_size=32)
QUIET: dict[str, Any] = dict(report=False)


@pytest.fixture(autouse=True)
def active() -> None:
    activate()


@pytest.fixture(scope="module")
def run_of(data: Path) -> Path:
    """A small a2d run."""
    return data / "a2d" / "gpt2-grow" / "run"


@pytest.fixture
def untouched(run_of: Path) -> Iterator[Path]:
    """The same, whose files are compared at the end."""
    before = hashes(run_of)
    yield run_of
    assert hashes(run_of) == before


def hashes(folder: Path) -> dict[str, str]:
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.rglob("*")) if f.is_file()}


def weights_of(path: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for file in sorted(path.glob("model*.safetensors")):
        found |= dict(mx.load(str(file)))  # type: ignore[arg-type]
    return found


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(DiffusionError) as error:
        convert(*map(str, args), **kwargs)
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    return message


def spec_of(path: Path) -> Any:
    checkpoint = open_checkpoint(path)
    return resolve(checkpoint, detect(checkpoint))  # type: ignore[arg-type]


# --- recipes and routers


def converted(source: Path, target: Path, recipe: str | None, bits: int = 4) -> tuple[dict, dict]:
    """config.json's quantization and the weights of a converted copy, which decodes."""
    convert(str(source), str(target), quantize=True, q_bits=bits, q_group_size=32, quant_predicate=recipe, **QUIET)
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


@pytest.mark.parametrize("predicate", [lambda path, module: True, lambda path, module: {"bits": 8, "group_size": 32}])
def test_no_callable_quantizes_a_router(goldens: Path, tmp_path: Path, predicate: Any) -> None:
    source = goldens / "block" / "llada2_moe-v22"
    convert(str(source), str(tmp_path / "out"), **SMALL, **QUIET, quant_predicate=predicate)
    assert not [name for name in weights_of(tmp_path / "out") if "mlp.gate.scales" in name]
    assert "lm_head.scales" in weights_of(tmp_path / "out")


def test_a_recipe_of_diffusion_is_refused_for_other_models(ar: Path, tmp_path: Path) -> None:
    assert refused(ar, tmp_path / "out", quantize=True, quant_predicate="mixed_8") == (
        "--quant-predicate mixed_8 is for diffusion checkpoints, and this is a mlx_lm.models.llama model: leave it out."
    )
    assert not (tmp_path / "out").exists()


def test_mlx_lms_recipes(goldens: Path, untouched: Path, tmp_path: Path) -> None:
    message = refused(untouched, tmp_path / "out", **SMALL, quant_predicate="mixed_4_6")
    assert "which this gpt2 model does not have: use mixed_8 or mixed_full" in message
    assert "must be one of mixed_8, mixed_full, mixed_2_6" in refused(
        untouched, tmp_path / "out", **SMALL, quant_predicate="mixed_3_5"
    )
    assert list(tmp_path.iterdir()) == []
    quantization, weights = converted(goldens / "block" / "sdar-b4", tmp_path / "out", "mixed_3_6")
    assert {own["bits"] for own in quantization.values() if isinstance(own, dict)} == {3, 6}


def test_what_a_group_does_not_divide_stays_and_nothing_at_all_is_refused(
    goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(goldens / "llada_dream" / "llada-moe-tiny", tmp_path / "out", **SMALL)
    assert message == (
        "Nothing of this llada_moe model can be quantized in groups of 32, which divides none of its widths (24, 48): "
        "no group size does, leave out -q or try --q-mode nvfp4."
    )
    source = goldens / "block" / "sdar-b4"
    assert "(64, 128): use --q-group-size" not in refused(source, tmp_path / "out", quantize=True, q_bits=7)
    model = tiny_model("gpt2")
    with pytest.raises(DiffusionError, match=r"in groups of 64, .*\(32\): use --q-group-size 32\.$"):
        recipes.plan(model, lambda path, module: "c_attn" in path, 64)
    with pytest.raises(DiffusionError, match=r"is quantized by this quant_predicate: leave out -q\.$"):
        recipes.plan(model, lambda path, module: False, 32)
    convert(str(goldens / "block" / "llada2_moe-v22"), str(tmp_path / "out"), **SMALL, **QUIET)
    assert "4 of 23 layers stay as they are: no groups of 32" in capsys.readouterr().out


# --- types and widths


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_other_widths(bits: int, untouched: Path, tmp_path: Path) -> None:
    cost = convert(str(untouched), str(tmp_path / "out"), **SMALL, q_bits=bits)
    assert bits + 2 < cost.copy.bits_per_weight < bits + 3 and cost.copy.size < cost.source.size / 2
    assert len(decode(mlx_lm.load(str(tmp_path / "out"))[0], PROMPT, DecodingOptions(max_tokens=4)).canvas) == 24


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_other_modes(mode: str, untouched: Path, tmp_path: Path) -> None:
    convert(str(untouched), str(tmp_path / "out"), quantize=True, q_mode=mode)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["mode"] == mode
    convert(str(tmp_path / "out"), str(tmp_path / "float"), dequantize=True)
    assert not [name for name in weights_of(tmp_path / "float") if name.endswith("scales")]


def test_dequantizing_brings_the_numbers_back(untouched: Path, tmp_path: Path) -> None:
    convert(str(untouched), str(tmp_path / "small"), **SMALL, q_bits=8, **QUIET)
    cost = convert(str(tmp_path / "small"), str(tmp_path / "large"), dequantize=True)
    assert not {"quantization", "quantization_config"} & json.loads((tmp_path / "large/config.json").read_text()).keys()
    before, after = weights_of(untouched / "model"), weights_of(tmp_path / "large")
    assert not [name for name in after if name.endswith(".scales")]
    far = before["transformer.wte.weight"] - after["model.wte.weight"]
    assert 0 < mx.abs(far).max().item() < 0.02
    assert cost.difference.largest < 1e-3 and cost.difference.changed == 0  # the same numbers
    assert cost.source.bits_per_weight < 12 and cost.copy.bits_per_weight == pytest.approx(32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_type_is_mlx_lms(dtype: str, untouched: Path, tmp_path: Path) -> None:
    cost = convert(str(untouched), str(tmp_path / "out"), dtype=dtype)
    assert {value.dtype for value in weights_of(tmp_path / "out").values()} == {getattr(mx, dtype)}
    assert (cost.difference.largest < 1e-4) == (dtype == "float32")
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == dtype
    convert(str(tmp_path / "out"), str(tmp_path / "again"), **QUIET)  # which does not go back to another type
    assert {value.dtype for value in weights_of(tmp_path / "again").values()} == {getattr(mx, dtype)}


@pytest.mark.parametrize("more", [{}, dict(SMALL, q_bits=8)])
@pytest.mark.parametrize("asked", [True, False])
def test_values_that_a_type_cannot_hold_are_refused(
    asked: bool, more: dict[str, Any], run_of: Path, tmp_path: Path
) -> None:
    """float16 ends at 65504; it may only be named in config.json."""
    source = copy_run(run_of, tmp_path / "run")
    weights = {name: value.astype(mx.bfloat16) for name, value in weights_of(source / "model").items()}
    name = next(name for name in weights if name.endswith("1.mlp.c_fc.weight"))
    weights[name][3, 4] = 1e5
    mx.save_safetensors(str(source / "model" / "model.safetensors"), weights, metadata={"format": "pt"})
    edit_json(source / "model" / "config.json", torch_dtype="bfloat16" if asked else "float16")
    message = refused(source, tmp_path / "out", **more, **({"dtype": "float16"} if asked else {}))
    assert "1.mlp.c_fc" in message and "has values that float16 cannot hold: use --dtype bfloat16" in message
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]
    convert(str(source), str(tmp_path / "out"), dtype="bfloat16", **more, **QUIET)


def test_16_bits_of_experts_stay_where_they_cannot_be_computed(goldens: Path, tmp_path: Path) -> None:
    source = copy_run(goldens / "llada_dream" / "llada-moe-tiny", tmp_path / "moe")
    weights = {name: value.astype(mx.bfloat16) for name, value in weights_of(source).items()}
    mx.save_safetensors(str(source / "model.safetensors"), weights, metadata={"format": "pt"})
    edit_json(source / "config.json", torch_dtype=...)
    cost = convert(str(source), str(tmp_path / "out"))
    assert {value.dtype for value in weights_of(tmp_path / "out").values()} == {mx.bfloat16}
    assert cost.difference.largest == 0


def test_a_router_in_float32_stays_so(tmp_path: Path) -> None:
    from mlx_lm.models import qwen3_moe

    shape: dict[str, Any] = dict(model_type="qwen3_moe", hidden_size=32, num_hidden_layers=2, intermediate_size=32)
    shape |= dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, vocab_size=48)
    shape |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1)
    shape |= dict(mlp_only_layers=[], rope_theta=1e4, tie_word_embeddings=False, max_position_embeddings=64)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs(**shape, norm_topk_prob=True))
    assert recipes.routers(model) == {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
    recipes.cast(model, "bfloat16")
    kinds = {name: value.dtype for name, value in tree_flatten(model.parameters())}
    assert {kinds.pop(f"model.layers.{i}.mlp.gate.weight") for i in (0, 1)} == {mx.float32}
    assert set(kinds.values()) == {mx.bfloat16}
    assert "model.layers.0.mlp.gate" not in recipes.plan(model, None, 32).chosen


# --- what is kept


def test_every_file_but_the_weights_is_kept(goldens: Path, tmp_path: Path) -> None:
    source = copy_run(goldens / "block" / "llada2_moe-v22", tmp_path / "source")
    for name, text in {
        "modeling_x.py": "raise SystemExit(7)",
        "code/inner/layer.py": "raise SystemExit(7)",
        "code/picture.png": "x",
        "additional_chat_templates/tools.jinja": "{{ 1 }}",
        "onnx/model.onnx": "x",
        "training_args.bin": "x",
        "pytorch_model.bin.index.json": "{}",
        ".hidden": "x",
        ".cache/x.json": "{}",
        "LICENSE": "mine",
        "README.md": "# Mine\n",
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    (tmp_path / "blob").write_text("elsewhere")
    (source / "notes.txt").symlink_to(tmp_path / "blob")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "vocab.bpe").write_text("elsewhere")
    (source / "more").symlink_to(tmp_path / "linked")
    (source / "code" / "round").symlink_to(source)
    before = hashes(source)
    convert(str(source), str(tmp_path / "out"), **SMALL, **QUIET)
    assert hashes(source) == before
    copied = {f.relative_to(tmp_path / "out").as_posix() for f in (tmp_path / "out").rglob("*") if f.is_file()}
    written = {"config.json", "model.safetensors", "model.safetensors.index.json"}
    theirs = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    mine = {"modeling_x.py", "code/inner/layer.py", "additional_chat_templates/tools.jinja", "LICENSE", "notes.txt"}
    mine |= {"README.md", "code/picture.png", "more/vocab.bpe"}
    assert copied == written | theirs | mine | {"generation_config.json", "golden.json"}
    for name in theirs | mine:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "out" / "notes.txt").is_symlink()


def test_a_template_inside_the_configuration_stays_there(goldens: Path, tmp_path: Path) -> None:
    source = goldens / "block" / "a2d_qwen3-mdlm"
    convert(str(source), str(tmp_path / "out"), **QUIET)
    assert {f.name for f in source.glob("chat_template*")} == {f.name for f in tmp_path.glob("out/chat_template*")}
    assert (source / "tokenizer_config.json").read_bytes() == (tmp_path / "out/tokenizer_config.json").read_bytes()


def test_a_run_directory_and_its_block(untouched: Path, tmp_path: Path) -> None:
    convert(str(untouched), str(tmp_path / "deep" / "out"), **QUIET)
    before = json.loads((untouched / "model" / "config.json").read_text())
    after = json.loads((tmp_path / "deep" / "out" / "config.json").read_text())
    assert {key: after.get(key) for key in before} == before and after["a2d"] == before["a2d"]
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["out"]
    prompt = DecodingOptions(seed=1)
    first, second = (decode(mlx_lm.load(str(p))[0], PROMPT[:4], prompt) for p in (untouched, tmp_path / "deep" / "out"))
    assert first.canvas == second.canvas


def test_a_raw_checkpoint_needs_no_option_once_it_is_converted(
    goldens: Path, tmp_path: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = goldens / "a2d" / "gpt2-partial"
    before = hashes(folder)
    given = ("mlx_lm.convert", "--hf-path", folder / "run", "--mlx-path", tmp_path / "out", "--tokenizer")
    assert_one_sentence(run(*given[:-1]), "has no tokenizer files", "--tokenizer DIR")
    outcome = run(*given, folder / "source_tokenizer", "--mask-token-id", 320)
    assert outcome.status == 0 and "changed argmax" in outcome.out, outcome.err
    assert json.loads((tmp_path / "out/config.json").read_text())["a2d"] == {"objective": "mdlm", "mask_token_id": 320}
    for file in (folder / "source_tokenizer").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert spec_of(tmp_path / "out").mask_token_id == 320 and hashes(folder) == before
    assert run("mlx_lm.generate", "--model", tmp_path / "out", "--prompt", "The", "--max-tokens", 4).status == 0
    outcome = run(*given[:4], tmp_path / "bare", "--tokenizer", folder / "source_tokenizer")
    assert outcome.status == 0 and "so that the copy needs --mask-token-id too" in outcome.err
    assert "could not be compared" in outcome.err and (tmp_path / "bare").is_dir()
    assert_one_sentence(
        run(*given[:4], tmp_path / "x", *given[5:], folder / "source_tokenizer", "--mask-token-id", 900),
        "within the embedding of 321 rows",
    )


def test_another_tokenizer_takes_the_place_of_the_sources(untouched: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_bytes((untouched / "model" / name).read_bytes())
    (tmp_path / "other" / "notes.txt").touch()
    convert(str(untouched), str(tmp_path / "out"), tokenizer=str(tmp_path / "other"), **QUIET)
    assert (untouched / "model" / "vocab.json").exists()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *("config.json", "README.md", "model.safetensors", "model.safetensors.index.json", "generation_config.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


def test_what_would_be_assumed_is_told_by_the_copys_name_or_an_option(
    goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = goldens / "block" / "llada2_moe-v21"  # whose name says nothing, so that 2.0 is assumed
    convert(str(source), str(tmp_path / "LLaDA2.1-mini"), **QUIET)
    said = capsys.readouterr().err
    assert "LLaDA2.1, as the name of its copy says." in said and "assumed" not in said
    (tmp_path / "LLaDA2.1-mini").rename(tmp_path / "other")
    assert spec_of(tmp_path / "other").unmasking == "joint_threshold"
    convert(str(source), str(tmp_path / "plain"), **QUIET)
    assert "LLaDA2.0 is assumed" in capsys.readouterr().err
    assert "diffusion_unmasking" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    convert(str(source), str(tmp_path / "told"), unmasking="joint_threshold", **QUIET)
    assert spec_of(tmp_path / "told").unmasking == "joint_threshold" and "assumed" not in capsys.readouterr().err
    refusal = refused(goldens / "block" / "llada2_moe-v22", tmp_path / "x", unmasking="joint_threshold")
    assert "--unmasking joint_threshold says what a checkpoint is that may be of two kinds" in refusal


def test_the_name_of_a_copy_decides_nothing_that_is_known(goldens: Path, tmp_path: Path) -> None:
    source = copy_run(goldens / "block" / "llada2_moe-v20", tmp_path / "LLaDA2.0-mini")
    convert(str(source), str(tmp_path / "LLaDA2.1-mini"), **QUIET)
    assert spec_of(tmp_path / "LLaDA2.1-mini").unmasking == spec_of(source).unmasking == "low_confidence_dynamic"


def test_dllms_kinds_may_be_told(goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copy_run(goldens / "block" / "a2d_qwen3-bd3lm", tmp_path / "plain")
    convert(str(source), str(tmp_path / "out"), attention="block_causal", **QUIET)
    assert spec_of(tmp_path / "out").attention == "block_causal" != spec_of(source).attention
    assert "taken for MDLM" not in capsys.readouterr().err
    refusal = refused(goldens / "block" / "sdar-b4", tmp_path / "x", attention="bidirectional")
    assert "--attention bidirectional says what a checkpoint is" in refusal


def test_a_mask_that_is_given_is_in_the_copy(goldens: Path, untouched: Path, tmp_path: Path) -> None:
    convert(str(untouched), str(tmp_path / "a"), mask_token_id=7, **QUIET)
    block = json.loads((untouched / "model" / "config.json").read_text())["a2d"]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["a2d"] == {**block, "mask_token_id": 7}
    convert(str(goldens / "block" / "sdar-b4"), str(tmp_path / "b"), mask_token_id=7, **QUIET)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["mask_token_id"] == 7
    assert spec_of(tmp_path / "a").mask_token_id == spec_of(tmp_path / "b").mask_token_id == 7


def test_a_forced_family_is_in_the_copy(ar: Path, goldens: Path, tmp_path: Path) -> None:
    before = hashes(ar)
    convert(str(ar), str(tmp_path / "out"), family="llama", mask_token_id=340)
    assert spec_of(tmp_path / "out").family == "llama" and hashes(ar) == before


# --- what is refused


def test_a_destination_that_exists_is_left_alone(untouched: Path, tmp_path: Path, run: Runner) -> None:
    for number, make in enumerate((Path.mkdir, Path.touch, lambda path: path.symlink_to(tmp_path / "nowhere"))):
        target = tmp_path / f"out{number}"
        make(target)
        before = sorted(tmp_path.iterdir())
        assert refused(untouched, target) == f"{target} exists already: choose another --mlx-path, or remove it."
        assert sorted(tmp_path.iterdir()) == before
    assert_one_sentence(
        run("mlx_lm.convert", "--hf-path", untouched, "--mlx-path", tmp_path / "out0"), "exists already"
    )


def test_a_destination_inside_the_source_or_where_nothing_can_be_made(copied: Path, tmp_path: Path) -> None:
    before = hashes(copied)
    for target in (copied / "out", copied / "model" / "out", copied / "model" / "deep" / "out"):
        assert "is inside the source" in refused(copied, target)
    (tmp_path / "file").touch()
    assert "cannot be made (" in refused(copied, tmp_path / "file" / "out")
    assert "cannot be made (" in refused(copied, tmp_path / ("x" * 300))
    assert hashes(copied) == before and sorted(p.name for p in tmp_path.iterdir()) == ["file", "run"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_destination_that_may_not_be_written_to(untouched: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(0o500)
    assert "cannot be made (Permission denied)" in refused(untouched, tmp_path / "locked" / "out")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(quantize=True, dequantize=True), "-q and -d cannot be combined"),
        (dict(q_bits=4), "--q-bits says how to quantize, which is only done with -q"),
        (dict(q_group_size=32), "--q-group-size says how"),
        (dict(q_mode="mxfp4"), "--q-mode says how"),
        (dict(quant_predicate="mixed_8"), "--quant-predicate says how"),
        (dict(dtype="float64"), "dtype must be one of float16, bfloat16, float32, got 'float64'"),
        (dict(quantize=True, q_bits=7), "q_bits must be one of 2, 3, 4, 5, 6, 8 for affine, got 7"),
        (dict(quantize=True, q_bits="4"), "q_bits must be a whole number, got '4'"),
        (dict(quantize=True, q_group_size=32.0), "q_group_size must be a whole number, got 32.0"),
        (dict(quantize=True, q_mode=["a"]), "q_mode must be a name, got ['a']"),
        (dict(quantize=True, quant_predicate=17), "quant_predicate must be the name of a recipe or a function, got 17"),
        (dict(report="no"), "report must be True or False, got 'no'"),
        (dict(quantize=True, q_group_size=48), "q_group_size must be one of 32, 64, 128 for affine, got 48"),
        (dict(quantize=True, q_mode="mxfp4", q_bits=8), "q_bits must be 4 for mxfp4, got 8"),
        (dict(quantize=True, q_mode="nvfp4", q_group_size=32), "q_group_size must be 16 for nvfp4, got 32"),
        (dict(quantize=True, q_mode="int4"), "q_mode must be one of affine, mxfp4, nvfp4, mxfp8, got 'int4'"),
        (dict(quantize=True, q_mode="mxfp8", quant_predicate="mixed_8"), "is made for --q-mode affine, got mxfp8"),
        (dict(dequantize=True), "is not quantized: leave out --dequantize"),
        (dict(tokenizer="nowhere"), "nowhere has no tokenizer files"),
        (dict(family="nope"), "nope"),
    ],
)
def test_what_is_impossible_is_said_before_anything_is_read(
    given: dict[str, Any], words: str, untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils, "load_model", lambda *args, **kwargs: pytest.fail("it was loaded"))
    assert words in refused(untouched, tmp_path / "out", **given)
    assert list(tmp_path.iterdir()) == []


def test_what_is_quantized_is_not_quantized_again(untouched: Path, tmp_path: Path) -> None:
    convert(str(untouched), str(tmp_path / "small"), **SMALL, q_bits=6, **QUIET)
    assert "is quantized already (6 bits)" in refused(tmp_path / "small", tmp_path / "out", **SMALL)
    convert(str(tmp_path / "small"), str(tmp_path / "same"), **QUIET)
    assert (tmp_path / "small/model.safetensors").stat().st_size == (tmp_path / "same/model.safetensors").stat().st_size


def test_broken_sources_are_one_sentence(copied: Path, tmp_path: Path, run: Runner) -> None:
    (copied / "model" / "broken.txt").symlink_to(tmp_path / "nothing")
    assert "is a link to nothing" in refused(copied, tmp_path / "out")
    (copied / "model" / "broken.txt").unlink()
    whole = (copied / "model" / "model.safetensors").read_bytes()
    (copied / "model" / "model.safetensors").write_bytes(whole[:-8])
    assert_one_sentence(run("mlx_lm.convert", "--hf-path", copied, "--mlx-path", tmp_path / "out"), "is truncated")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_autoregressive_checkpoints_go_to_the_host_as_they_came(ar: Path, tmp_path: Path) -> None:
    assert convert(str(ar), mlx_path=str(tmp_path / "out"), **SMALL, report=False) is None
    assert (tmp_path / "out" / "README.md").is_file()
    with pytest.raises(ValueError, match="already exists"):
        convert(str(ar), str(tmp_path / "out"))
    assert "is no diffusion checkpoint: leave out --mask-token-id" in refused(ar, tmp_path / "x", mask_token_id=3)
    with pytest.raises(TypeError):
        convert()


# --- the proof


def test_a_copy_that_would_be_decoded_otherwise_is_not_kept(
    untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = files.write_config

    def lossy(target: Path, source: Any, loaded: Any, dtype: Any) -> None:
        original(target, {**source, "a2d": {"objective": "mdlm", "mask_token_id": 5}}, loaded, dtype)

    monkeypatch.setattr(files, "write_config", lossy)
    message = refused(untouched, tmp_path / "out")
    assert "would not be decoded as its source, because its mask_token_id is 5 instead of 340" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["merges", "template"])
def test_a_copy_with_another_tokenizer_is_not_kept(
    what: str, goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = files.copy

    def lossy(source: Path, target: Path, **how: Any) -> None:
        original(source, target, **how)
        if what == "template":
            (target / "chat_template.jinja").write_text("{{ 'other' }}")
        else:
            values = json.loads((target / "tokenizer.json").read_text())
            values["model"]["merges"] = values["model"]["merges"][:2]
            (target / "tokenizer.json").write_text(json.dumps(values))

    monkeypatch.setattr(files, "copy", lossy)
    message = refused(goldens / "block" / "llada2_moe-v22", tmp_path / "out")
    assert ("chat template is not that" if what == "template" else "tokenizer reads") in message
    assert list(tmp_path.iterdir()) == []


# --- nothing half done is left


@pytest.mark.parametrize("error", [RuntimeError("no room"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize(
    "stage", ["save_model", "quantize_model", "create_model_card", "files.copy", "files.prove_spec"]
)
def test_whatever_fails_leaves_nothing(
    stage: str, error: BaseException, untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = files if "." in stage else utils

    def fail(*args: Any, **kwargs: Any) -> Any:
        (hidden,) = (tmp_path / "deep").iterdir()
        assert hidden.name.startswith(".out.") and [entry.name for entry in hidden.iterdir()] == ["out"]
        raise error

    monkeypatch.setattr(owner, stage.rpartition(".")[2], fail)
    writes = stage not in ("quantize_model", "files.prove_spec") and isinstance(error, RuntimeError)
    with pytest.raises(DiffusionError if writes else type(error)) as caught:
        convert(str(untouched), str(tmp_path / "deep" / "out"), **SMALL)
    assert not writes or "out cannot be written (no room): make room there, or choose another" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_report_that_fails_leaves_the_copy(
    untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "check_files", lambda path: 1 / 0)
    assert convert(str(untouched), str(tmp_path / "out")) is None
    assert "stands, but could not be compared with its source (ZeroDivisionError" in capsys.readouterr().err
    mlx_lm.load(str(tmp_path / "out"))


STALLED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from mlx_lm import utils
import mlx_lm.convert as module
save = utils.save_model
def stall(*args, **kwargs):
    save(*args, **kwargs)
    print("stalled", flush=True)
    time.sleep(60)
utils.save_model = stall
sys.argv[0] = "mlx_lm.convert"
sys.modules["mlx_lm.convert"].main()
"""


def test_an_interrupted_command_leaves_nothing(untouched: Path, tmp_path: Path) -> None:
    arguments = ["--hf-path", str(untouched), "--mlx-path", str(tmp_path / "out")]
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        while child.stdout.readline() not in ("stalled\n", ""):
            pass
        (hidden,) = tmp_path.iterdir()
        assert list(hidden.rglob("model.safetensors"))
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
        assert child.stderr.read() == "[mlx-dllm-plugin] interrupted\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_nothing(
    number: int, status: int, untouched: Path, tmp_path: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = utils.save_model

    def ended(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        os.kill(os.getpid(), number)
        time.sleep(1)

    monkeypatch.setattr(utils, "save_model", ended)
    for handler, expected in ((signal.SIG_DFL, status), (signal.SIG_IGN, 0)):  # nohup ignores one
        before = signal.signal(number, handler)
        try:
            outcome = run("mlx_lm.convert", "--hf-path", untouched, "--mlx-path", tmp_path / "out", "--no-report")
            assert outcome.status == expected and signal.getsignal(number) == handler
        finally:
            signal.signal(number, before)
        assert [entry.name for entry in tmp_path.iterdir()] == ["out"] * (expected == 0)


def test_of_two_conversions_to_one_place_one_wins(untouched: Path, tmp_path: Path) -> None:
    arguments = ["-m", "mlx_lm", "convert", "--hf-path", untouched, "--mlx-path", tmp_path / "out", "--no-report"]
    outcomes: list[Any] = []
    other = threading.Thread(target=lambda: outcomes.append(process(arguments)))
    other.start()
    while other.is_alive() and not list(tmp_path.iterdir()):
        time.sleep(0.002)
    mine = None
    try:
        convert(str(untouched), str(tmp_path / "out"), **QUIET)
    except DiffusionError as error:
        mine = str(error)
    other.join()
    (outcome,) = outcomes
    lines = [line for line in outcome.err.splitlines() if line.startswith("[mlx-dllm-plugin]")]
    (lost,) = [mine] if mine else lines
    assert outcome.status == (mine is None) and len(lines) == (mine is None)
    assert "exists already" in lost or "by somebody else" in lost
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    mlx_lm.load(str(tmp_path / "out"))


def test_a_destination_that_appears_meanwhile_is_left_alone(
    untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = files.prove_tokenizer

    def slow(*args: Any) -> int:
        (tmp_path / "out").mkdir()
        return original(*args)

    monkeypatch.setattr(files, "prove_tokenizer", slow)
    assert "was made by somebody else meanwhile and is left alone" in refused(untouched, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"] and list((tmp_path / "out").iterdir()) == []


def test_moving_is_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "file").touch()
    monkeypatch.setattr(os, "rename", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        conversion._move(work, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the table


@pytest.mark.parametrize(
    "name", ["a2d/gpt2-grow/run/model", "llada_dream/dream-tiny", "block/fast_dllm_v2-b32", "block/llada2_moe-v22"]
)
def test_the_numbers_are_those_of_a_direct_computation(name: str, goldens: Path, tmp_path: Path) -> None:
    source, target = goldens / name, tmp_path / "out"
    cost = convert(str(source), str(target), **SMALL, q_bits=4)
    spec, tokenizer = spec_of(source), load_tokenizer(source)
    ids, masked = canvases(spec, spec.mask_token_id, tokenizer)
    assert ids.shape == (4, 64) and (masked.sum(axis=1) == 32).all() and (ids[masked] == spec.mask_token_id).all()
    assert 0 <= ids.min() and ids.max() < spec.vocab_size
    assert (ids == canvases(spec, spec.mask_token_id, tokenizer)[0]).all() and len(set(map(bytes, ids))) == 4
    rows, places = np.nonzero(masked)
    assert places.min() > 0
    if spec.logits == "shifted":
        places = places - 1
    from mlx_dllm_plugin.layerwise import block_of, caches

    logits = []
    for path in (source, target):
        model, _ = mlx_lm.load(str(path))
        found = model(mx.array(ids), cache=caches(model, 64, block_of(spec)))
        logits.append(np.array(found.astype(mx.float32))[rows, places])
    far = np.abs(logits[0] - logits[1])
    assert cost.difference.largest == pytest.approx(far.max(), rel=1e-3)
    assert cost.difference.mean == pytest.approx(far.mean(), rel=1e-3)
    changed = (logits[0].argmax(-1) != logits[1].argmax(-1)).mean()
    assert cost.difference.changed == pytest.approx(changed, abs=0.02) and cost.difference.positions == 128
    assert cost.copy.size == (target / "model.safetensors").stat().st_size
    tensors = sum(value.nbytes for value in weights_of(target).values())
    count = sum(v.size for _, v in tree_flatten(load_lazily(source, FAMILIES.get(spec.family), spec).parameters()))
    assert cost.copy.bits_per_weight == pytest.approx(8 * tensors / count)


def test_the_table(run: Runner, untouched: Path, tmp_path: Path) -> None:
    given = ("mlx_lm.convert", "--hf-path", untouched, "--mlx-path")
    outcome = run(*given, tmp_path / "out", "-q", "--q-bits", 8, "--q-group-size", 32)
    head, source, copy = outcome.out.splitlines()[-3:]
    assert head.split()[:4] == ["size", "bits", "per", "weight"] and head.endswith("changed argmax of 128")
    assert source.split()[:4] == ["source", "151.12", "KiB", "32.00"] or source.startswith("source")
    assert copy.startswith("copy") and copy.endswith("%") and len(copy) == len(head)
    outcome = run(*given, tmp_path / "quiet", "--no-report")
    assert outcome.status == 0 and "argmax" not in outcome.out


def test_a_battery_is_asked_of_both(
    run_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may lie in the run, and the copy gets it too."""
    source = copy_run(run_of, tmp_path / "run")
    (source / battery.NAME).write_text('{"prompt": "a b", "answer": "c"}\n{"prompt": "d", "answer": "e"}\n')
    models, real = [], battery.run

    def run(model: Any, tokenizer: Any, asked: battery.Battery, limit: int) -> battery.Outcome:
        models.append(model)
        outcome = real(model, tokenizer, asked, limit=limit)
        return dataclasses.replace(outcome, exact=2 - len(models), doubled=1, unknown=2, words=30)

    monkeypatch.setattr(battery, "run", run)
    cost = convert(str(source), str(tmp_path / "out"), **SMALL)
    assert (cost.source.battery.exact, cost.copy.battery.exact) == (1, 0)
    assert len(cost.copy.battery.texts) == cost.copy.battery.of == 2
    said, head, *rows = capsys.readouterr().out.splitlines()[-4:]
    assert said == "[INFO] Asking both 2 problems of battery.jsonl"
    assert head.endswith("exact  doubled words  unknown words")
    assert rows[0].split()[-9:] == "1 of 2 1 of 30 2 of 30".split() and "0 of 2" in rows[1]
    assert (tmp_path / "out" / battery.NAME).read_bytes() == (source / battery.NAME).read_bytes()
    # On the CPU the values of quantized weights are multiplied, which are the same numbers.
    quantized, plain = load_lazily(tmp_path / "out", *found_at(tmp_path / "out")), models[1]
    assert hasattr(quantized.layers[0].attn.c_attn, "scales")
    assert not hasattr(plain.layers[0].attn.c_attn, "scales") or mx.default_device() != mx.Device(mx.cpu)
    ids = mx.array([PROMPT])
    assert np.allclose(np.array(quantized(ids)), np.array(plain(ids)), atol=1e-3)


def found_at(path: Path) -> tuple[Any, Any]:
    checkpoint = open_checkpoint(path)
    family = detect(checkpoint)
    assert family is not None
    return family, resolve(checkpoint, family)


# --- command lines, hub, mlx-vlm


def test_the_command_line_offers_the_recipes_beside_the_hosts() -> None:
    assert set(conversion.RECIPES) <= set(importlib.import_module("mlx_lm.convert").QUANT_RECIPES)
    for recipe in ("mixed_full", "mixed_4_6"):
        given = configure_parser().parse_args(["--model", "x", "--quant-predicate", recipe])
        assert given.quant_predicate == recipe
        assert set(vars(given)) == {
            *("hf_path", "mlx_path", "quantize", "q_group_size", "q_bits", "q_mode", "quant_predicate", "dtype"),
            *("upload_repo", "dequantize", "trust_remote_code"),
        }
    text = configure_parser().format_help()
    for option in ("--family", "--tokenizer", "--mask-token-id", "--no-report"):
        assert option in text
    assert "--unmasking" in text and "--threshold" not in text and "--mode {" not in text


def test_a_copy_is_uploaded_from_its_place(untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(utils, "upload_to_hub", lambda path, repo: seen.append((path, repo, os.listdir(path))))
    convert(str(untouched), str(tmp_path / "out"), upload_repo="me/x", **QUIET)
    (path, repo, names), *rest = seen
    assert (path, repo, rest) == (str(tmp_path / "out"), "me/x", []) and "model.safetensors" in names


def test_a_hub_id(untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, cards = [], []

    def fetched(name: str, revision: str | None = None, allow_patterns: Any = None) -> str:
        asked.append((name, revision, any("safetensors" in pattern for pattern in allow_patterns)))
        return str(untouched / "model")

    monkeypatch.setattr(utils, "snapshot_download", fetched)
    card = utils.create_model_card

    def carded(path: Any, name: Any) -> None:
        cards.append(name)
        if name is not None:
            raise OSError("offline")
        card(path, None)

    monkeypatch.setattr(utils, "create_model_card", carded)
    convert("org/name", str(tmp_path / "out"), revision="v2", **QUIET)
    assert asked == [("org/name", "v2", False), ("org/name", "v2", True)] and cards == ["org/name", None]
    assert spec_of(tmp_path / "out").mask_token_id == 340
    asked.clear()
    assert "exists already" in refused("org/name", tmp_path / "out")
    assert asked == [("org/name", None, False)]


@pytest.fixture
def mlx_vlm() -> Any:
    pytest.importorskip("mlx_vlm")
    return importlib.import_module("mlx_vlm.convert")


def test_mlx_vlms_command_takes_the_same_road(
    mlx_vlm: Any, untouched: Path, goldens: Path, tmp_path: Path, run: Runner
) -> None:
    options = ("-q", "--q-bits", 8, "--q-group-size", 32, "--quant-predicate", "mixed_full")
    copies = []
    for host in ("mlx_lm", "mlx_vlm"):
        outcome = run(f"{host}.convert", "--hf-path", untouched, "--mlx-path", tmp_path / host, *options)
        assert outcome.status == 0, outcome.err
        copies.append({Path(name).name: value for name, value in hashes(tmp_path / host).items()})
    assert copies[0] == copies[1] and "also decodes the copy: use mlx_lm.generate" in outcome.err
    for more in (("--quant-method", "awq"), ("--mtp",), ("--calibration-data", tmp_path), ("--mtp-output", "x")):
        outcome = run("mlx_vlm.convert", "--hf-path", untouched, "--mlx-path", tmp_path / "out", *more)
        assert_one_sentence(outcome, f"{more[0]} does not work with diffusion checkpoints")
    outcome = run("mlx_vlm.convert", "--hf-path", untouched, "--mlx-path", tmp_path / "mlx_vlm")
    assert_one_sentence(outcome, "exists already")
    source = goldens / "block" / "llada2_moe-v22"
    outcome = run("mlx_vlm.convert", "--hf-path", source, "--mlx-path", tmp_path / "v22", "-q", "--q-group-size", 32)
    assert outcome.status == 0 and "use mlx_lm.generate" not in outcome.err
    outcome = run("mlx_vlm.generate", "--model", tmp_path / "v22", "--prompt", "hi", "--max-tokens", 32)
    assert outcome.status == 0, outcome.err


def test_mlx_vlms_function_leaves_others_to_mlx_vlm(
    mlx_vlm: Any, ar: Path, untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(mlx_vlm, "get_model_path", lambda *args, **kwargs: seen.append(args) or 1 / 0)
    theirs = tmp_path / "gemma"
    theirs.mkdir()
    (theirs / "config.json").write_text('{"model_type": "diffusion_gemma"}')
    for path in (ar, theirs):
        with pytest.raises(ZeroDivisionError):
            mlx_vlm.convert(str(path), mlx_path=str(tmp_path / "out"))
        with pytest.raises(DiffusionError, match="checkpoints that mlx-dllm-plugin decodes, and .* is none"):
            mlx_vlm.convert(str(path), str(tmp_path / "out"), quantize=True, quant_predicate="mixed_8")
    assert len(seen) == 2
    mlx_vlm.convert(str(untouched), str(tmp_path / "out"), **QUIET)
    assert spec_of(tmp_path / "out").family == "gpt2" and len(seen) == 2


@pytest.mark.parametrize("answer", [5, {"bits": 7}, {"bits": 4, "group_size": 48}, "yes"])
def test_what_a_predicate_may_not_say(answer: Any, untouched: Path, tmp_path: Path) -> None:
    message = refused(untouched, tmp_path / "out", quantize=True, quant_predicate=lambda path, module: answer)
    assert "quant_predicate must return True, False or a dict" in message and message.endswith(f"returns {answer!r}.")


def test_weights_that_lie_there_twice_count_once(run_of: Path, tmp_path: Path) -> None:
    source = copy_run(run_of, tmp_path / "run") / "model"
    (source / "model-00001-of-00002.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    cost = convert(str(source), str(tmp_path / "out"))
    assert cost.source.bits_per_weight == cost.copy.bits_per_weight == 32


def test_a_type_of_more_bits_loses_nothing(run_of: Path, tmp_path: Path) -> None:
    """Both sides are computed in float32, so that 16 bits of the source's activations are no difference."""
    source = copy_run(run_of, tmp_path / "run") / "model"
    weights = {name: value.astype(mx.bfloat16) for name, value in weights_of(source).items()}
    mx.save_safetensors(str(source / "model.safetensors"), weights, metadata={"format": "pt"})
    edit_json(source / "config.json", torch_dtype="bfloat16")
    cost = convert(str(source), str(tmp_path / "out"), dtype="float32")
    assert cost.difference.largest < 1e-4 and cost.difference.changed == 0


def test_what_a_killed_conversion_left_is_named(
    untouched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".out.k3x.partial").mkdir()
    convert(str(untouched), str(tmp_path / "out"), **QUIET)
    assert ".out.k3x.partial is left of a conversion that was killed" in capsys.readouterr().err


def test_an_interrupt_while_comparing_leaves_the_copy(
    untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "measure", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(str(untouched), str(tmp_path / "out"))
    said = capsys.readouterr()
    assert "out is complete; only its comparison with the source was interrupted." in said.err
    assert said.out.splitlines()[-1] == f"[INFO] Saved to {tmp_path / 'out'}"
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_names_and_places(untouched: Path, tmp_path: Path) -> None:
    long = tmp_path / ("漢" * 80)
    convert(str(untouched), str(long), **QUIET)
    assert (long / "model.safetensors").is_file()
    (tmp_path / "file").write_text("x")
    message = refused(untouched, tmp_path / "file" / "out")
    assert f"cannot be made ({tmp_path / 'file'}: " in message and "choose another --mlx-path" in message


def test_an_upload_that_fails_names_the_copy(untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, repo: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr(utils, "upload_to_hub", fail)
    with pytest.raises(DiffusionError, match="out is made, but could not be uploaded to me/x .OSError: no network"):
        convert(str(untouched), str(tmp_path / "out"), upload_repo="me/x", **QUIET)
    assert (tmp_path / "out" / "model.safetensors").is_file()
