"""`mlx_lm.generate --model DIR --prompt hi` decodes a checkpoint of every family with no other option."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_dllm_plugin
from mlx_dllm_plugin import DecodingOptions
from tests.tools import ERROR, Runner

CHECKPOINTS = {
    "llada_dream/llada-8b-tiny": "low_confidence",
    "llada_dream/llada-gqa-tiny": "low_confidence",
    "llada_dream/llada-moe-tiny": "low_confidence",
    "llada_dream/dream-tiny": "entropy",
    "llada_dream/modernbert-tiny": "mdlm",
    "block/sdar-b4": "low_confidence_dynamic",
    "block/llada2_moe-v20": "low_confidence_dynamic",
    "block/llada2_moe-v22": "joint_threshold_indel",
    "block/fast_dllm_v2-b32": "threshold",
    "block/a2d_qwen3-mdlm": "mdlm",
    "block/a2d_qwen3-bd3lm": "mdlm",
}


@pytest.fixture
def mlx_cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capfd)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_decodes_with_no_option_but_the_model(name: str, goldens: Path, mlx_cli: Runner) -> None:
    # A random model may never end: max_tokens only bounds the time.
    bound = ["--max-tokens", "40"] if name.startswith("block") else []
    outcome = mlx_cli("mlx_lm.generate", "--model", goldens / name, "--prompt", "hi", *bound)
    assert outcome.status == 0, outcome.err
    said = re.search(r"Diffusion: (\w+), (\d+) forwards", outcome.out)
    assert said and said[1] == CHECKPOINTS[name] and int(said[2]) > 0
    hints = [line for line in outcome.err.splitlines() if "taken for" in line]
    assert len(hints) == ("a2d_qwen3" in name)
    if hints:
        assert ("BD3LM" if "bd3lm" in name else "MDLM (bidirectional)") in hints[0]
        assert "--attention block_causal|bidirectional" in hints[0]


def test_the_option_decides_between_mdlm_and_bd3lm(goldens: Path, mlx_cli: Runner) -> None:
    folder = goldens / "block" / "a2d_qwen3-mdlm"
    shared = ("mlx_lm.generate", "--model", folder, "--prompt", "hi", "--max-tokens", "20", "--block-length", "8")
    default, same = mlx_cli(*shared), mlx_cli(*shared, "--attention", "bidirectional")
    other = mlx_cli(*shared, "--attention", "block_causal")
    text = [outcome.out.split("==========")[1] for outcome in (default, same, other)]
    assert text[0] == text[1] != text[2]


def test_attention_is_no_choice_of_other_families(goldens: Path, mlx_cli: Runner) -> None:
    outcome = mlx_cli(
        "mlx_lm.generate", "--model", goldens / "block/sdar-b4", "--prompt", "hi", "--attention", "bidirectional"
    )
    assert outcome.status == 1
    assert outcome.err.splitlines()[-1] == (
        f"{ERROR}attention 'bidirectional' would give a wrong answer: checkpoints of the family sdar are "
        "'block_causal'; leave it out."
    )


def test_tokens_that_end_a_turn_end_the_output(goldens: Path) -> None:
    """Not the declared end of sequence alone: LLaDA's chat ends with another token."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(goldens / "llada_dream" / "llada-8b-tiny"))
    stop = model.diffusion_spec.stop_token_ids
    assert stop == (302,) and not set(stop) & set(tokenizer.eos_token_ids)
    prompt = tokenizer.encode("hi")
    free = mlx_dllm_plugin.decode(model, prompt, DecodingOptions(max_tokens=8, stop_at_eos=False)).tokens
    # Make the model say the stop token where it said the fourth one.
    head = model.head

    class Forced(type(model)):  # type: ignore[misc]
        def head(self, states: mx.array) -> mx.array:
            logits = head(states)
            swapped = mx.arange(logits.shape[-1])
            swapped[free[3]], swapped[302] = 302, free[3]
            return logits[..., swapped]

    model.__class__ = Forced
    responses = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=8))
    assert responses[-1].finish_reason == "stop" and responses[-1].token == 302


def test_what_closes_a_text_does_not_stand_before_its_continuation(goldens: Path) -> None:
    """ModernBERT's tokenizer ends every text with [SEP], which is its declared end of sequence."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(goldens / "llada_dream" / "modernbert-tiny"))
    ids = tokenizer.encode("hi")
    assert ids[-1] == 298 and 298 in model.diffusion_spec.eos_token_ids

    def tokens(prompt: str | list[int]) -> list[int]:
        options = {"max_tokens": 8, "stop_at_eos": False}
        return [response.token for response in mlx_lm.stream_generate(model, tokenizer, prompt, **options)]

    assert tokens("hi") == tokens(ids[:-1]) != tokens(ids)


def test_stream_generate_takes_one_prompt(goldens: Path) -> None:
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(goldens / "llada_dream" / "llada-gqa-tiny"))
    row = [5, 6, 7, 8, 9]
    single = [r.token for r in mlx_lm.stream_generate(model, tokenizer, row, max_tokens=4)]
    nested = list(mlx_lm.stream_generate(model, tokenizer, mx.array([row]), max_tokens=4))
    assert [r.token for r in nested] == single and nested[0].prompt_tokens == 5
    with pytest.raises(mlx_dllm_plugin.DiffusionError) as error:
        next(mlx_lm.stream_generate(model, tokenizer, [row, row], max_tokens=4))
    assert str(error.value) == ("stream_generate takes one prompt, got 2: decode several with mlx_dllm_plugin.decode.")


def test_a_copy_does_not_depend_on_its_name(goldens: Path, tmp_path: Path) -> None:
    """What only the name of a directory tells is in the config.json of a converted copy."""
    import shutil

    from mlx_lm.convert import convert

    for source, name in (("sdar-b4", "SDAR-x-b8"), ("a2d_qwen3-bd3lm", "a2d_qwen3-bd3lm")):
        shutil.copytree(goldens / "block" / source, tmp_path / name)
        convert(str(tmp_path / name), mlx_path=str(tmp_path / f"copy of {source}".replace("-b", "_")))
    sdar = mlx_dllm_plugin.load(tmp_path / "copy of sdar_4")[0].diffusion_spec
    assert sdar.defaults["block_length"] == 8
    assert sdar.sources["block_length"] == "config.json (block_length)"
    bd3lm = mlx_dllm_plugin.load(tmp_path / "copy of a2d_qwen3_d3lm")[0].diffusion_spec
    assert (bd3lm.attention, bd3lm.canvas) == ("block_causal", "growing")
    assert bd3lm.sources["attention"] == "config.json (diffusion_attention)"
