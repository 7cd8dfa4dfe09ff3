"""mlx-vlm with the plugin: LLaDA2.2 is decoded right on all of its roads, 2.0 and 2.1 as mlx-vlm decodes them unless a
request asks for this plugin, and what cannot be followed is one sentence."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_vlm
import numpy as np
import pytest
from fastapi.testclient import TestClient
from mlx.utils import tree_flatten
from mlx_vlm.prompt_utils import apply_chat_template

import mlx_dllm_plugin
from mlx_dllm_plugin import DecodingOptions, DiffusionError, compat, decode, patches
from mlx_dllm_plugin.errors import CheckpointError
from mlx_dllm_plugin.patches.mlx_vlm import requests, served
from tests.goldens import llada2
from tests.tools import Runner, assert_one_sentence, copy_run, edit_json, make_ar_model, process

QUESTION = "What is the capital of France?"
EOS = [317]  # the goldens were made with this one alone


@pytest.fixture(scope="module")
def block(goldens: Path) -> Path:
    return goldens / "block"


def cases(path: Path) -> list[dict[str, Any]]:
    return json.loads((path / "golden.json").read_text())["generations"]


@pytest.fixture(scope="module")
def v22(block: Path) -> tuple[Any, Any]:
    """The model card's first lines."""
    return mlx_vlm.load(str(block / "llada2_moe-v22"), trust_remote_code=True)


@pytest.fixture(scope="module")
def prompt(v22: tuple[Any, Any]) -> str:
    model, processor = v22
    return apply_chat_template(processor, model.config, QUESTION)


@pytest.fixture(scope="module")
def ar(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ar_model(tmp_path_factory.mktemp("ar") / "llama", data / "a2d" / "gpt2-grow" / "run" / "model")


def text_of(case: dict[str, Any]) -> str:
    return case["output_text"].removesuffix("<|endoftext|>")


def ids_of(case: dict[str, Any]) -> mx.array:
    return mx.array([case["prompt_ids"]])


def results(model: Any, processor: Any, prompt: Any, **options: Any) -> list[Any]:
    return list(mlx_vlm.stream_generate(model, processor, prompt, **options))


def tokens(model: Any, processor: Any, ids: mx.array, **options: Any) -> list[int]:
    return results(model, processor, "", input_ids=ids, **options)[-1].token_ids


def notes(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("[mlx-dllm-plugin]")]


# --- LLaDA2.2 from Python


def test_the_model_cards_example(v22: tuple[Any, Any], prompt: str, block: Path) -> None:
    model, processor = v22
    case = cases(block / "llada2_moe-v22")[0]
    assert prompt == case["prompt_text"]
    result = mlx_vlm.generate(model, processor, prompt, max_tokens=512, temperature=0.0)
    assert result.text == text_of(case) and result.finish_reason == "stop"
    assert result.token_ids == case["output_ids"] and result.generation_tokens == len(case["output_ids"])
    assert (result.prompt_tokens, result.total_tokens) == (33, 33 + result.generation_tokens)
    assert result.diffusion_denoising_steps == case["nfe"]
    assert result.diffusion_work_tokens >= 32 * case["nfe"] and result.diffusion_canvas_tokens == 96 - 33


@pytest.mark.parametrize("version", ["v20", "v21", "v22", "v22-b8"])
def test_every_golden_through_mlx_vlm(version: str, block: Path) -> None:
    """Ids and forwards as the host reports them; and on the model that it has loaded, what every forward saw."""
    path = block / f"llada2_moe-{version}"
    golden = json.loads((path / "golden.json").read_text())
    model, processor = mlx_vlm.load(str(path))
    assert len(golden["generations"]) >= 15
    for case in golden["generations"]:
        assert case["target"] == "tokens"
        assert llada2.generation(golden, case, served.decoder_of(model)) == "", case["name"]
        given = llada2.options_of(golden, case)
        last = results(model, processor, "", input_ids=ids_of(case), **given)[-1]
        assert last.token_ids == case["output_ids"], case["name"]
        # 2.0 and 2.1 go on where nothing changes any more.
        assert last.diffusion_denoising_steps == case["nfe"] or version in ("v20", "v21")
        assert 0 < last.diffusion_denoising_steps <= case["nfe"]


def test_the_model_has_the_face_that_mlx_vlm_expects(v22: tuple[Any, Any], block: Path) -> None:
    model, processor = v22
    config = model.config.to_dict()
    assert config["eos_token_id"] == [317, 325] and config["mask_token_id"] == 320 and config["pad_token_id"] == 317
    assert (config["expert_capacity"], config["delete_token_id"], config["split_token_id"]) == (6, 314, 315)
    assert model.config.model_type == "llada2_moe" and model.config.vocab_size == 352
    assert model.layers is model.language_model.layers and model.model_path == block / "llada2_moe-v22"
    names = {name for name, _ in tree_flatten(model.parameters())}
    assert all(name.startswith("language_model.") for name in names) and "language_model.lm_head.weight" in names
    ids = mx.array([cases(block / "llada2_moe-v22")[0]["prompt_ids"]])
    assert model(ids).logits.shape == (1, 33, 352)
    assert model.get_input_embeddings(ids).inputs_embeds.shape == (1, 33, 64)
    for call in (model, model.get_input_embeddings):
        with pytest.raises(DiffusionError, match="text alone"):
            call(ids, pixel_values=ids)
    with pytest.raises(DiffusionError, match="input_ids"):
        model.get_input_embeddings()
    embeds = model.get_input_embeddings(ids).inputs_embeds
    ones = mx.ones(ids.shape, dtype=mx.int32)
    assert mx.array_equal(model(ids, inputs_embeds=embeds, mask=ones).logits, model(ids).logits)
    with pytest.raises(DiffusionError, match="one length"):
        model(ids, mask=ones - (mx.arange(33) < 2))
    model.train()
    with pytest.raises(DiffusionError, match="Training of llada2_moe does not work"):
        model(ids)
    model.eval()
    assert processor.stopping_criteria(325) and not processor.stopping_criteria(5)
    # The engine takes it as it is.
    case = cases(block / "llada2_moe-v22")[0]
    options = DecodingOptions(max_tokens=64, eos_token_ids=tuple(EOS))
    assert decode(model, case["prompt_ids"], options).tokens == case["output_ids"][:-1]


def test_tokens_arrive_while_it_decodes(v22: tuple[Any, Any], prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = v22
    kind = type(model.language_model.model)
    call, forwards = kind.__call__, []
    monkeypatch.setattr(kind, "__call__", lambda *args, **kwargs: forwards.append(1) or call(*args, **kwargs))
    seen = [
        (len(forwards), r) for r in mlx_vlm.stream_generate(model, processor, prompt, max_tokens=64, temperature=0.0)
    ]
    first, last = seen[0], seen[-1]
    assert first[0] < last[0] and 0 < first[1].diffusion_denoising_steps < last[1].diffusion_denoising_steps
    marks = [n for n, (_, r) in enumerate(seen) if r.diffusion_block_complete]
    assert len(marks) == 2 and marks[-1] == len(seen) - 1
    assert [r.finish_reason for _, r in seen[:-1]] == [None] * (len(seen) - 1) and last[1].finish_reason == "stop"
    counts = [r.generation_tokens for _, r in seen]
    assert counts == sorted(counts) and all(r.logprobs is not None for _, r in seen if r.text)
    # A rule that does not edit shows tokens inside a block.
    steps = [
        r.diffusion_denoising_steps
        for r in mlx_vlm.stream_generate(model, processor, prompt, max_tokens=32, unmasking="sequential")
        if r.token is not None and not r.diffusion_block_complete
    ]
    assert len(set(steps)) > 5


def test_logprobs_are_those_of_the_engine(v22: tuple[Any, Any], block: Path) -> None:
    case = cases(block / "llada2_moe-v22")[1]
    found = results(*v22, "", input_ids=ids_of(case), max_tokens=32, eos_token_ids=EOS)
    alone = decode(v22[0], case["prompt_ids"], DecodingOptions(max_tokens=32, eos_token_ids=tuple(EOS)))
    vectors = [r for r in found if not r.diffusion_block_complete and r.finish_reason is None]
    assert len(vectors) == len(alone.tokens)
    for result, token, entry in zip(vectors, alone.tokens, alone.logprobs, strict=False):
        assert result.token == token
        assert float(np.array(result.logprobs[token])) == pytest.approx(entry.token, abs=1e-5)


def test_a_callback_gets_the_results_and_ends_them(v22: tuple[Any, Any], block: Path) -> None:
    model, processor = v22
    diffusion = sys.modules["mlx_vlm.generate.diffusion"]
    case = cases(block / "llada2_moe-v22")[0]

    def run(keep: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
        got: list[Any] = []
        out = diffusion.stream_diffusion_generate_from_kwargs(
            *(model, processor, processor, ids_of(case), None, None, set(), {"max_tokens": 64}),
            on_result=lambda result: got.append(result) or keep(result),
        )
        return list(out), got

    yielded, got = run(lambda result: True)
    assert yielded == [] and "".join(r.text for r in got) == text_of(case) and got[-1].finish_reason == "stop"
    yielded, got = run(lambda result: not result.diffusion_block_complete)
    assert yielded == [] and got[-1].diffusion_block_complete and len(got) == 32 and got[-1].finish_reason is None


def test_drafts_show_what_is_not_final(v22: tuple[Any, Any], prompt: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = results(*v22, prompt, max_tokens=64, diffusion_show_unmasking=True)
    drafts = [r for r in found if r.is_draft]
    assert len(drafts) == 40 and "[Mask]" in drafts[0].draft_text and not any(r.text for r in drafts)
    first_block = "".join(r.text for r in found[: next(i for i, r in enumerate(found) if r.diffusion_block_complete)])
    assert first_block and drafts[-1].draft_text.startswith(first_block)
    every = [
        r for r in results(*v22, prompt, diffusion_show_unmasking=True, diffusion_unmasking_interval=5) if r.is_draft
    ]
    assert [r.diffusion_step for r in every] == [1, 5, 10, 15, 20] * 2
    assert not any(r.is_draft for r in results(*v22, prompt, max_tokens=64))
    handler = sys.modules["mlx_vlm.generate.diffusion"].DiffusionOutputHandler
    assert handler(v22[0], {"diffusion_show_unmasking": True}, True).live_mode
    assert mlx_vlm.generate(*v22, prompt, max_tokens=64, diffusion_show_unmasking=True, verbose=True).text
    out = capfd.readouterr().out
    assert "Diffusion: joint_threshold_indel, 40 forwards" in out and "Profile: exact\n" in out


def test_seeds_belong_to_the_request(v22: tuple[Any, Any], prompt: str) -> None:
    def sample(**given: Any) -> list[int]:
        return results(*v22, prompt, max_tokens=32, temperature=1.0, **given)[-1].token_ids

    state = mx.array(mx.random.state[0])
    first, again, other = sample(seed=3), sample(seed=3), sample(seed=4)
    assert first == again != other
    assert mx.array_equal(state, mx.random.state[0])
    mx.random.seed(7)
    free = sample()
    mx.random.seed(7)
    assert sample() == free  # without one, the host's own state decides


@pytest.mark.skipif(
    not hasattr(sys.modules["mlx_vlm.generate.common"], "resolve_sampling_defaults"), reason="a host that has none"
)
def test_the_checkpoints_sampling_defaults_are_in_force(block: Path, tmp_path: Path) -> None:
    copy = copy_run(block / "llada2_moe-v22", tmp_path / "llada2_moe-v22")
    edit_json(copy / "generation_config.json", temperature=0.9, top_k=5, top_p=0.8)
    model, processor = mlx_vlm.load(str(copy))
    assert (model.config.temperature, model.config.top_k, model.config.top_p) == (0.9, 5, 0.8)
    ids = ids_of(cases(copy)[1])
    sampled = tokens(model, processor, ids, max_tokens=32, seed=2)
    given = {"temperature": 0.9, "top_k": 5, "top_p": 0.8}
    assert sampled == tokens(model, processor, ids, max_tokens=32, seed=2, **given)
    alone = decode(model, ids.tolist()[0], DecodingOptions(max_tokens=32, seed=2, temp=0.9, top_k=5, top_p=0.8))
    assert sampled[: len(alone.tokens)] == alone.tokens
    greedy = tokens(model, processor, ids, max_tokens=32, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    assert greedy == tokens(model, processor, ids, max_tokens=32, temp=0.0) != sampled


def test_what_ends_the_output(v22: tuple[Any, Any], block: Path) -> None:
    model, processor = v22
    case = cases(block / "llada2_moe-v22")[0]
    ids, out = ids_of(case), case["output_ids"]
    ended = mlx_vlm.generate(model, processor, "", input_ids=ids, max_tokens=64, eos_tokens=[out[5]])
    assert ended.token_ids == out[: out.index(out[5]) + 1] and ended.finish_reason == "stop"
    word = processor.decode([46])
    assert 46 in out and processor.encode(" " + word, add_special_tokens=False)[-1] == 46
    processor.stopping_criteria.reset([317, 325])  # as each call without eos_tokens does
    worded = results(model, processor, "", input_ids=ids, max_tokens=64, eos_tokens=[word])[-1]
    assert worded.token_ids == out[: out.index(46) + 1]
    asked, own = [], processor.stopping_criteria
    mine = mlx_vlm.generate(
        model,
        processor,
        "",
        input_ids=ids,
        max_tokens=64,
        stopping_criteria=lambda t: asked.append(t) or len(asked) == 7,
    )
    assert (
        mine.token_ids == asked == out[:7] and mine.finish_reason == "stop" and mine.text == processor.decode(out[:6])
    )
    processor.stopping_criteria = own  # where mlx-vlm leaves the caller's
    again = mlx_vlm.generate(model, processor, "", input_ids=ids, max_tokens=64)
    assert again.token_ids == out  # neither stays in force
    short = mlx_vlm.generate(model, processor, "", input_ids=ids, max_tokens=9)
    assert short.token_ids == out[:9] and short.finish_reason == "length" and short.text == processor.decode(out[:9])


def test_special_tokens_are_skipped_on_request(v22: tuple[Any, Any], block: Path) -> None:
    model, processor = v22
    given = {"input_ids": ids_of(cases(block / "llada2_moe-v22")[0]), "max_tokens": 64, "stop_at_eos": False}
    whole, skipped = (
        mlx_vlm.generate(model, processor, "", skip_special_tokens=skip, **given).text for skip in (False, True)
    )
    special = processor.all_special_tokens
    assert any(t in whole for t in special) and not any(t in skipped for t in special) and skipped


def test_padding_is_left_out_and_holes_are_refused(v22: tuple[Any, Any], block: Path) -> None:
    case = cases(block / "llada2_moe-v22")[1]
    ids = case["prompt_ids"]
    alone = tokens(*v22, mx.array([ids]), max_tokens=32)
    padded = mx.array([[317] * 3 + ids])
    mask = mx.array([[0] * 3 + [1] * len(ids)])
    assert tokens(*v22, padded, mask=mask, max_tokens=32) == alone
    hole = mx.array([[1, 0, *[1] * (len(ids) + 1)]])
    for given, words in (
        ({"input_ids": padded, "mask": hole}, "middle of the prompt"),
        ({"input_ids": padded, "mask": mask[:, :4]}, "attention_mask must say"),
        ({"input_ids": mx.array([ids, ids])}, "One prompt at a time"),
    ):
        with pytest.raises(DiffusionError, match=words):
            results(*v22, "", **given)


def test_texts_are_tokenized_once(v22: tuple[Any, Any], prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that puts a token in front of every text does not put it before a chat template's."""
    model, processor = v22
    expected = results(model, processor, prompt, max_tokens=32)[-1].token_ids
    encode = processor.encode
    monkeypatch.setattr(
        processor,
        "encode",
        lambda text, add_special_tokens=True, **given: (
            [316] * add_special_tokens + encode(text, add_special_tokens=False)
        ),
    )
    assert results(model, processor, prompt, max_tokens=32)[-1].token_ids == expected


def test_text_comes_whole_whatever_the_bytes(v22: tuple[Any, Any]) -> None:
    """Block by block also where no token begins with a space, as in Chinese."""
    from mlx_dllm_plugin.patches.mlx_vlm.generate.diffusion import _Text

    processor = v22[1]
    for said in ("北京欢迎你。\n你好", "a b\n\nc  d", "naïve 👩‍💻!"):
        ids = processor.encode(said, add_special_tokens=False)
        text = _Text(processor, ())
        parts = [text.add(token) for token in ids]
        assert "".join(parts) == said and text.rest() == "" and "\ufffd" not in "".join(parts)
    half = _Text(processor, ())
    cut = processor.encode("a北", add_special_tokens=False)[:-1]
    assert [half.add(token) for token in cut][0] == "a" and half.rest() == "\ufffd"


# --- what it cannot follow

REFUSED: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "logits_processors": {"logits_processors": [lambda tokens, logits: logits]},
    "draft_model": {"draft_model": object()},
    "kv_bits": {"kv_bits": 4},
    "kv_quant_scheme": {"kv_quant_scheme": "turboquant"},
    "max_kv_size": {"max_kv_size": 64},
    "prompt_cache": {"prompt_cache": [1]},
    "prompt_cache_state": {"prompt_cache_state": types.SimpleNamespace(cache=[1])},
    "min_threshold": {"min_threshold": 0.3},
    "max_transfer_per_step": {"max_transfer_per_step": 2},
    "stability_steps": {"stability_steps": 0, "max_tokens": 8},
    "diffusion_sampler": {"diffusion_sampler": "entropy-bound"},
    "diffusion_full_canvas": {"diffusion_full_canvas": True},
    "diffusion_min_canvas_length": {"diffusion_min_canvas_length": 64},
    "diffusion_max_canvas_length": {"diffusion_max_canvas_length": 64},
    "thinking_budget": {"thinking_budget": 5},
    "image": {"image": "x.png"},
    "audio": {"audio": ["x.wav"]},
    "video": {"video": "x.mp4"},
    "inputs_embeds": {"inputs_embeds": mx.zeros((1, 1, 64))},
    "decoder_input_ids": {"decoder_input_ids": mx.zeros((1, 1))},
    "typical_p": {"typical_p": 0.5},
    "autoregressively": {"generation_mode": "ar"},
    "mode 'ar'": {"mode": "ar"},
    "linear_speculative": {"generation_mode": "linear_speculative"},
    "does not use factor": {"factor": 1.0},
    "whole blocks of 32": {"block_length": 16},
    "max_tokens must be": {"max_tokens": 0},
    "threshold must be": {"threshold": -1},
    "Unknown unmasking rule 'nope'": {"unmasking": "nope"},
    "context of 4096": {"max_tokens": 10_000},
    "would give a wrong answer": {"attention": "bidirectional"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_request_is_refused_in_one_sentence(
    v22: tuple[Any, Any], prompt: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = REFUSED[words]
    for call in (lambda: mlx_vlm.generate(*v22, prompt, verbose=True, **given), lambda: results(*v22, prompt, **given)):
        with pytest.raises(DiffusionError) as refusal:
            call()
        message = str(refusal.value)
        assert words in message and "\n" not in message and message.endswith(".")
    assert capfd.readouterr().out == ""


def test_values_that_mean_nothing_are_refused(v22: tuple[Any, Any], prompt: str, ar: Path) -> None:
    for given, sentence in (
        ({"eos_tokens": [None]}, "eos_tokens must be texts or token ids, got None."),
        (
            {"diffusion_show_unmasking": True, "diffusion_unmasking_interval": "x"},
            "diffusion_unmasking_interval must be a positive integer, got 'x'.",
        ),
    ):
        with pytest.raises(DiffusionError) as error:
            results(*v22, prompt, max_tokens=4, **given)
        assert str(error.value) == sentence


def test_a_tokenizer_that_is_missing_is_said(block: Path, tmp_path: Path) -> None:
    for version in ("v20", "v22"):
        path = copy_run(block / f"llada2_moe-{version}", tmp_path / version)
        (path / "tokenizer.json").unlink()
        with pytest.raises(CheckpointError, match="has no tokenizer files"):
            mlx_vlm.load(str(path))


@pytest.mark.parametrize("lost", [{"expert_capacity": ...}, {"expert_capacity": {}}])
def test_a_config_that_lost_what_makes_it_22_is_refused(block: Path, tmp_path: Path, lost: dict[str, Any]) -> None:
    path = copy_run(block / "llada2_moe-v22", tmp_path / "copy")
    edit_json(path / "config.json", **lost)
    with pytest.raises(CheckpointError, match="expert_capacity"):
        mlx_vlm.load(str(path))


def test_none_asks_for_nothing(block: Path) -> None:
    model, processor = mlx_vlm.load(str(block / "llada2_moe-v20"))
    ids = ids_of(cases(block / "llada2_moe-v20")[0])
    assert tokens(model, processor, ids, unmasking=None, profile=None) == tokens(model, processor, ids)


def test_names_that_nobody_knows_are_not_swallowed(v22: tuple[Any, Any], prompt: str) -> None:
    for name in ("treshold", "family", "tokenizer"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            mlx_vlm.generate(*v22, prompt, **{name: "x"})


def test_what_the_hosts_pass_always_asks_for_nothing(v22: tuple[Any, Any], prompt: str) -> None:
    from mlx_vlm import PromptCacheState, VisionFeatureCache

    expected = results(*v22, prompt, max_tokens=32)[-1].token_ids
    state = PromptCacheState()
    given = {
        **dict.fromkeys(("image", "audio", "video", "repetition_penalty", "kv_bits", "max_kv_size", "min_threshold")),
        **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_context_size": 20, "kv_group_size": 64, "fps": 2.0},
        **{"kv_quant_scheme": "uniform", "quantized_kv_start": 5000, "prefill_step_size": 2048},
        **{"prompt_cache_state": state, "vision_cache": VisionFeatureCache(), "enable_thinking": False},
        **{
            "generation_mode": "diffusion",
            "mode": "auto",
            "eos_tokens": None,
            "diffusion_sampler": "confidence-threshold",
        },
        **{"threshold": 0.5, "diffusion_threshold": 0.5, "repetition_penalty": 1.0, "seed": None, "apc_manager": None},
    }
    assert results(*v22, prompt, max_tokens=32, **given)[-1].token_ids == expected
    assert state.cache is None
    assert results(*v22, prompt, max_tokens=32, steps=32, **given)[-1].token_ids == expected


def _batch(model: Any, processor: Any) -> Any:
    return mlx_vlm.batch_generate(model, processor, prompts=["a", "b"], max_tokens=3)


def _step(model: Any, processor: Any) -> Any:
    ar = sys.modules["mlx_vlm.generate.ar"]
    return list(ar.generate_step(mx.array([[5, 6]]), model, None, None, max_tokens=3))


def _batches(model: Any, processor: Any) -> Any:
    return sys.modules["mlx_vlm.generate.ar"].BatchGenerator(model, processor)


def _train(model: Any, processor: Any) -> Any:
    trainer = pytest.importorskip("mlx_vlm.trainer.api").Trainer
    return trainer(model, None, train_dataset=[], processing_class=processor)


def _shard(model: Any, processor: Any) -> Any:
    return mlx_vlm.utils.sharded_load(str(model.model_path))


def _fetch(model: Any, processor: Any) -> Any:
    return mlx_vlm.utils.fetch_from_hub(model.model_path)


def _offload(model: Any, processor: Any) -> Any:
    return importlib.import_module("mlx_vlm.moe_offload").repack(str(model.model_path), "nowhere")


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "mlx_vlm.batch_generate": _batch,
    "mlx_vlm.generate.generate_step": _step,
    "mlx_vlm.generate.BatchGenerator": _batches,
    "mlx_vlm.trainer.Trainer": _train,
    "Distributed loading": _shard,
    "mlx_vlm.utils.fetch_from_hub": _fetch,
    "mlx_vlm.moe_offload": _offload,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_refuses_llada22(
    v22: tuple[Any, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DiffusionError) as refusal:
        FUNCTIONS[name](*v22)
    message = str(refusal.value)
    assert message.startswith(f"{name} ") and "does not work with LLaDA2.2" in message
    assert ("use mlx_vlm.load, or mlx_lm.convert" if name.endswith("fetch_from_hub") else "use mlx_vlm.gen") in message
    assert "\n" not in message and message.count(". ") == 0 and list(tmp_path.iterdir()) == []


COMMANDS: dict[str, tuple[object, ...]] = {
    "moe_offload": ("--out", "nowhere", "--build"),
    "train": ("--data", "."),
    "evals.math_vista": (),
    "evals.mmmu": (),
    "evals.mmstar": (),
    "evals.ocrbench": (),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_llada22(
    block: Path, command: str, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip(f"mlx_vlm.{command}", exc_type=ImportError)
    del module
    monkeypatch.chdir(tmp_path)
    path, given = block / "llada2_moe-v22", COMMANDS[command]
    outcome = run(f"mlx_vlm.{command}", *(given if "--build" in given else (*given, "--model")), path)
    lines = [line for line in outcome.err.splitlines() if line.startswith("[mlx-dllm-plugin]")]
    assert outcome.status == 1 and len(lines) == 1, outcome.err
    assert f"mlx_vlm.{command} does not work with LLaDA2.2" in lines[0]


def test_every_patched_command_is_walked() -> None:
    from mlx_dllm_plugin.patches import mlx_vlm as patched

    others = ("utils", "generate.", "server.", "models.", "trainer.", "chat", "convert")
    assert {name for name in patched.MODULES if not name.startswith(others)} == set(COMMANDS)


# --- 2.0 and 2.1


@pytest.fixture(scope="module", params=["v20", "v21"])
def old(request: pytest.FixtureRequest, block: Path) -> tuple[Path, Any, Any]:
    path = block / f"llada2_moe-{request.param}"
    model, processor = mlx_vlm.load(str(path), trust_remote_code=False)
    return path, model, processor


def without_plugin(call: Callable[[], Any]) -> Any:
    mlx_dllm_plugin.deactivate()
    try:
        return call()
    finally:
        mlx_dllm_plugin.activate()


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"threshold": 0.7, "editing_threshold": 0.5, "max_post_steps": 4},
    {"threshold": 0.9, "min_threshold": 0.3, "stability_steps": 1, "max_transfer_per_step": 3, "num_to_transfer": 2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3, "block_length": 16, "max_denoising_steps": 9},
    {"generation_mode": "diffusion", "repetition_penalty": 1.5},
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_older_checkpoints_are_decoded_as_mlx_vlm_does(old: tuple[Path, Any, Any], settings: dict[str, Any]) -> None:
    path, model, processor = old
    assert type(model).__module__ == "mlx_vlm.models.llada2_moe.llada2_moe" and not served.is_ours(model)
    prompts = [case["prompt_ids"] for case in cases(path)[:3]]

    def texts(model: Any, processor: Any) -> list[str]:
        return [
            mlx_vlm.generate(model, processor, "", input_ids=mx.array([ids]), max_tokens=48, **settings).text
            for ids in prompts
        ]

    def bare() -> list[str]:
        plain, own = mlx_vlm.load(str(path), trust_remote_code=False)
        plain.config.mask_token_id = 320  # mlx-vlm takes 156895, outside this embedding, and crashes
        return texts(plain, own)

    assert texts(model, processor) == without_plugin(bare)


def test_older_checkpoints_are_decoded_by_this_plugin_on_request(
    old: tuple[Path, Any, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    path, model, processor = old
    ours, _ = mlx_lm.load(str(path))
    for case in cases(path)[:4]:
        settings = dict(case["settings"])
        given = {
            "max_tokens": settings.pop("gen_length"),
            "max_denoising_steps": settings.pop("steps", None),
            **settings,
        }
        rule = "joint_threshold" if "editing_threshold" in settings else "low_confidence_dynamic"
        options = {name: value for name, value in given.items() if value is not None}
        alone = decode(ours, case["prompt_ids"], DecodingOptions(unmasking=rule, eos_token_ids=tuple(EOS), **options))
        found = tokens(model, processor, ids_of(case), unmasking=rule, eos_token_ids=EOS, **given)
        assert found[: len(alone.tokens)] == alone.tokens == [t for t in case["output_ids"] if t not in EOS]
    profiled = results(model, processor, "", input_ids=ids_of(case), max_tokens=32, profile="fast")[-1].token_ids
    alone = decode(ours, case["prompt_ids"], DecodingOptions(max_tokens=32, profile="fast"))
    assert profiled[: len(alone.tokens)] == alone.tokens
    for wrong, words in (
        ({"min_threshold": 0.2}, "min_threshold does not work"),
        ({"stability_steps": 1}, "stability_steps does not work"),
        ({"repetition_penalty": 1.5}, "repetition_penalty does not work"),
        ({"generation_mode": "ar"}, "autoregressively"),
    ):
        with pytest.raises(DiffusionError, match=words):
            results(model, processor, "x", unmasking="joint_threshold", **wrong)


def test_older_checkpoints_ask_for_nothing_and_say_what_is_left_out(
    block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers would ask on the terminal whether the checkpoint's code may run."""

    def ask(*_: Any) -> str:
        raise AssertionError("asked")

    monkeypatch.setattr("builtins.input", ask)
    path = copy_run(block / "llada2_moe-v21", tmp_path / "LLaDA2.1-mini")
    _, processor = mlx_vlm.load(str(path))
    assert processor.encode("a word") == mlx_lm.load(str(path))[1].encode("a word")
    assert notes(capfd) == [
        "[mlx-dllm-plugin] LLaDA2.1-mini: mlx-vlm decodes it without edits unless editing_threshold is given; "
        "unmasking joint_threshold is its makers' sampler."
    ]


def test_no_array_is_there_twice(block: Path) -> None:
    model, processor = mlx_vlm.load(str(block / "llada2_moe-v20"))
    ids = ids_of(cases(block / "llada2_moe-v20")[0])
    before = tokens(model, processor, ids, max_tokens=32, unmasking="joint_threshold")
    ours = served.decoder_of(model)
    assert ours is served.decoder_of(model)  # made once
    theirs = dict(tree_flatten(model.language_model.parameters()))
    mine = dict(tree_flatten(ours.parameters()))
    assert mine.keys() == theirs.keys() and all(mine[name] is theirs[name] for name in mine)
    plain = mx.array([cases(block / "llada2_moe-v20")[0]["prompt_ids"][:32]])
    assert mx.allclose(ours(plain), model.language_model(plain).logits, atol=1e-4)

    def wide(name: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    # What is changed in mlx-vlm's model since is seen.
    nn.quantize(model.language_model, group_size=32, bits=8, class_predicate=wide)
    again = served.decoder_of(model)
    assert again is not ours and isinstance(again.lm_head, nn.QuantizedLinear)
    assert mx.allclose(again(plain), model.language_model(plain).logits, atol=1e-4)
    assert len(tokens(model, processor, ids, max_tokens=32, unmasking="joint_threshold")) == len(before)
    del model.language_model.model["norm"]
    with pytest.raises(DiffusionError, match="has no model.norm"):
        served.decoder_of(model)


def test_a_config_without_its_mask_does_not_crash(block: Path) -> None:
    """mlx-vlm's default is the mask of the published checkpoints, which lies outside a smaller embedding."""
    model, _ = mlx_vlm.load(str(block / "llada2_moe-v20"))
    assert model.config.mask_token_id == 320


# --- loading


def test_nothing_builds_mlx_vlms_class_of_llada22(block: Path) -> None:
    utils = mlx_vlm.utils
    config = utils.load_config(block / "llada2_moe-v22")
    with pytest.raises(DiffusionError, match="would drop expert_capacity"):
        utils.get_model_and_args(config)
    older = utils.load_config(block / "llada2_moe-v20")
    assert utils.get_model_and_args(older)[1] == "llada2_moe"
    assert utils.load_image_processor(block / "llada2_moe-v22") is None


def test_layouts_and_quantizations_load_as_in_mlx_lm(block: Path, tmp_path: Path) -> None:
    source = block / "llada2_moe-v22"
    ids = cases(source)[0]["prompt_ids"]
    copy = copy_run(source, tmp_path / "llada2_moe-v22")
    weights = mx.load(str(copy / "model.safetensors"))
    prefixed = {f"language_model.{name}": value for name, value in weights.items()}
    mx.save_safetensors(str(copy / "model.safetensors"), prefixed, metadata={"format": "mlx"})
    mlx_lm.convert(str(source), mlx_path=str(tmp_path / "q"), quantize=True, q_group_size=32, q_bits=4)
    for path in (copy, tmp_path / "q"):
        model, processor = mlx_vlm.load(str(path), lazy=True)
        alone = decode(mlx_lm.load(str(path))[0], ids, DecodingOptions(max_tokens=32))
        found = tokens(model, processor, mx.array([ids]), max_tokens=32)
        assert found[: len(alone.tokens)] == alone.tokens
    assert isinstance(model.language_model.lm_head, nn.QuantizedLinear)
    with pytest.raises(DiffusionError, match="quantize_activations does not work"):
        mlx_vlm.load(str(path), quantize_activations=True)


def test_broken_checkpoints_are_one_sentence(block: Path, tmp_path: Path) -> None:
    copy = copy_run(block / "llada2_moe-v22", tmp_path / "llada2_moe-v22")
    (copy / "offload_index.json").write_text("{}")
    with pytest.raises(DiffusionError, match="moe_offload"):
        mlx_vlm.load(str(copy))
    (copy / "offload_index.json").unlink()
    edit_json(copy / "config.json", expert_capacity=99)
    with pytest.raises(DiffusionError, match="expert_capacity must be"):
        mlx_vlm.load(str(copy))
    edit_json(copy / "config.json", expert_capacity=6)
    (copy / "model.safetensors").unlink()
    with pytest.raises(DiffusionError, match="no weights"):
        mlx_vlm.load(str(copy))


def test_other_families_and_models_are_as_before(data: Path, ar: Path) -> None:
    with pytest.raises(DiffusionError, match="use mlx_lm.generate"):
        mlx_vlm.load(str(data / "a2d" / "gpt2-grow" / "run"))
    model, processor = mlx_vlm.load(str(ar))

    def text(**given: Any) -> str:
        return mlx_vlm.generate(model, processor, "The cat", max_tokens=8, temperature=0.0, **given).text

    plain = text()
    assert plain == without_plugin(text) == text(mode="ar") == text(mode="auto")
    for given, words in (
        ({"unmasking": "wino"}, "unmasking is an option of mlx-dllm-plugin"),
        ({"mode": "diffusion"}, "llama is no diffusion model"),
    ):
        with pytest.raises(DiffusionError, match=words):
            text(**given)


class Theirs(nn.Module):
    """A diffusion model of mlx-vlm's own, as far as a call reaches it."""

    def __init__(self, default: str | None) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(
            model_type="toy", mask_token_id=5, eos_token_id=1, default_generation_mode=default
        )
        self.language_model = nn.Module()
        self.language_model.generate = self.generate
        self.asked: list[Any] = []

    def generate(self, inputs: mx.array, on_result: Any, gen_length: int, **given: Any) -> mx.array:
        self.asked.append((given.get("generation_mode"), "mode" in given))
        result = sys.modules["mlx_vlm.generate.common"].GenerationResult
        on_result(result(text="x", token=1, generation_tokens=1, finish_reason="stop"))
        return inputs


def test_the_mode_reaches_the_models_that_mlx_vlm_decodes(v22: tuple[Any, Any]) -> None:
    processor = v22[1]
    one = mx.array([[5]])
    model = Theirs("ar")
    assert results(model, processor, "", input_ids=one, mode="diffusion")[0].text == "x"
    assert results(model, processor, "", input_ids=one, generation_mode="diffusion")[0].text == "x"
    assert model.asked == [("diffusion", False)] * 2
    only = Theirs(None)
    assert results(only, processor, "", input_ids=one)[0].text == "x" and only.asked == [(None, False)]
    for given, words in (({"mode": "ar"}, "decodes by diffusion only"), ({"profile": "fast"}, "mlx-vlm decodes toy")):
        with pytest.raises(DiffusionError, match=words):
            results(only, processor, "", input_ids=one, **given)


def test_it_can_be_taken_back(v22: tuple[Any, Any], block: Path) -> None:
    def bare() -> Any:
        return mlx_vlm.utils.load_model(block / "llada2_moe-v22"), mlx_vlm.stream_generate.__code__.co_filename

    model, file = without_plugin(bare)
    assert type(model).__module__ == "mlx_vlm.models.llada2_moe.llada2_moe" and file.endswith("dispatch.py")
    assert type(mlx_vlm.utils.load_model(block / "llada2_moe-v22")) is served.Model


# --- beside others


def test_llada22_mlx_is_told_who_is_in_force(
    block: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = block / "llada2_moe-v22"
    monkeypatch.setattr(served, "_said", set())
    other = types.ModuleType("llada22_mlx")
    monkeypatch.setitem(sys.modules, "llada22_mlx", other)
    for _ in range(2):
        assert type(mlx_vlm.utils.load_model(path)) is served.Model
    (line,) = notes(capfd)
    assert "llada22_mlx is imported too: mlx-dllm-plugin loads and decodes llada2_moe-v22" in line

    class ModelConfig:
        """One that keeps what mlx-vlm's drops."""

        def __init__(self, expert_capacity: int) -> None: ...

    theirs = types.ModuleType("mlx_vlm.models.llada2_moe")
    theirs.ModelConfig = ModelConfig  # type: ignore[attr-defined]
    config = mlx_vlm.utils.load_config(path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mlx_vlm.models.llada2_moe", theirs)
        assert mlx_vlm.utils.get_model_and_args(config)[0] is theirs

    def generate(*args: Any, **kwargs: Any) -> None: ...

    generate.__module__ = "llada22_mlx.patch"
    with monkeypatch.context() as patch:
        patch.setattr(mlx_vlm, "generate", generate)
        # Then it is mlx-vlm's loader, and whatever module that package has put there, that builds the model.
        with pytest.raises(DiffusionError, match="would drop expert_capacity"):
            mlx_vlm.utils.load_model(path)
    (line,) = notes(capfd)
    assert "it decodes LLaDA2.2, not mlx-dllm-plugin" in line

    monkeypatch.setattr(served, "_said", set())
    built = type("Model", (Theirs,), {"__module__": "llada22_mlx.language"})(None)
    for _ in range(2):
        results(built, mlx_vlm.utils.load_processor(path), "", input_ids=mx.array([[5]]))
    assert len(notes(capfd)) == 1


def test_drift_of_mlx_vlms_llada2_is_one_warning(block: Path, tmp_path: Path) -> None:
    installed = Path(mlx_vlm.__file__).parent

    def mirror(source: Path, target: Path, *into: str) -> None:
        """Links to what is in a folder; the folders named are made anew."""
        target.mkdir()
        for entry in source.iterdir():
            if into and entry.name == into[0]:
                mirror(entry, target / entry.name, *into[1:])
            elif entry.suffix == ".py" and not into:
                shutil.copy(entry, target / entry.name)
            else:
                (target / entry.name).symlink_to(entry)

    mirror(installed, tmp_path / "mlx_vlm", "models", "llada2_moe")
    with open(tmp_path / "mlx_vlm" / "models" / "llada2_moe" / "language.py", "a") as file:
        file.write("\nEDITED = True\n")
    code = f"""
import warnings
from pathlib import Path
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from mlx_vlm.utils import load_model
    before = len([w for w in told if w.category.__name__ == "UpstreamDriftWarning"])
    for version in ("v20", "v22", "v21"):
        model = load_model(Path({str(block)!r}) / f"llada2_moe-{{version}}")
        print(type(model).__module__)
drift = [str(w.message) for w in told if w.category.__name__ == "UpstreamDriftWarning"]
print(before, len(drift), *drift, sep="|")
"""
    done = process(["-c", code], PYTHONPATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert done.status == 0, done.err
    *kinds, last = done.out.splitlines()
    assert kinds[0] == kinds[2] == "mlx_vlm.models.llada2_moe.llada2_moe" and kinds[1].endswith("mlx_vlm.served")
    before, count, message = last.split("|")
    assert (before, count) == ("0", "1")
    first, newest = compat.TESTED["mlx-vlm"]
    assert f"mlx-vlm {mlx_vlm.__version__} is not what" in message and f"({first} to {newest})" in message
    assert "Changed are mlx_vlm/models/llada2_moe/language.py. The patches apply" in message


def test_all_changes_apply() -> None:
    for name in ("chat", "convert", "server.cli"):
        importlib.import_module(f"mlx_vlm.{name}")
    found = [record for record in patches.status() if record.target.startswith("mlx_vlm")]
    assert not [record for record in found if record.state == "disabled"]
    assert {r.state for r in found if r.target == "mlx_vlm.server.cli"} == {"applied"}


# --- command lines


def test_the_command_line(block: Path, run: Runner, v22: tuple[Any, Any]) -> None:
    path = block / "llada2_moe-v22"
    case = cases(path)[0]
    given = ("--model", path, "--prompt", QUESTION, "--temperature", 0)
    outcome = run("mlx_vlm.generate", *given, "--max-tokens", 64, "--mode", "diffusion")
    assert outcome.status == 0 and outcome.out == text_of(case) + "\n", outcome.err
    outcome = run("mlx_vlm.generate", *given, "--verbose", "--profile", "fast", "--threshold", 0.5)
    assert outcome.status == 0 and text_of(case) in outcome.out
    assert "Diffusion: joint_threshold_indel, 40 forwards" in outcome.out and "Profile: fast" in outcome.out
    edited = run("mlx_vlm.generate", *given, "--max-tokens", 64, "--editing-threshold", 0.5, "--max-post-steps", 4).out
    model, processor = v22
    options = {"max_tokens": 64, "editing_threshold": 0.5, "max_post_steps": 4}
    assert edited == mlx_vlm.generate(model, processor, case["prompt_text"], **options).text + "\n" != outcome.out
    one, two, other = (
        run("mlx_vlm.generate", *given[:4], "--temperature", 1, "--max-tokens", 32, "--seed", seed).out
        for seed in (3, 3, 4)
    )
    assert one == two != other


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--mode", "ar"), ("--mode ar",)),
        (("--kv-bits", 4), ("--kv-bits",)),
        (("--image", "x.png"), ("--image", "text alone")),
        (("--draft-model", "x"), ("--draft-model",)),
        (("--repetition-penalty", 1.2), ("--repetition-penalty",)),
        (("--diffusion-sampler", "entropy-bound"), ("--diffusion-sampler",)),
        (("--min-threshold", 0.2), ("--min-threshold",)),
        (("--unmasking", "nope"), ("Unknown unmasking rule 'nope'",)),
        (("--factor", 1), ("does not use factor",)),
        (("--max-tokens", 100_000), ("context of 4096",)),
        (("--gen-kwargs", '{"treshold": 1}'), ("treshold",)),
        (("--gen-kwargs", '{"generation_mode": "ar"}'), ("autoregressively",)),
    ],
)
def test_the_command_line_refuses_in_one_sentence(
    block: Path, run: Runner, given: tuple[object, ...], words: tuple[str, ...]
) -> None:
    assert_one_sentence(run("mlx_vlm.generate", "--model", block / "llada2_moe-v22", "--prompt", "hi", *given), *words)


def test_the_command_line_with_other_models(block: Path, ar: Path, run: Runner) -> None:
    older = ("--model", block / "llada2_moe-v20", "--prompt", "hi", "--max-tokens", 32)
    plain = run("mlx_vlm.generate", *older)
    ours = run("mlx_vlm.generate", *older, "--unmasking", "joint_threshold")
    assert plain.status == ours.status == 0 and plain.out != ours.out
    assert run("mlx_vlm.generate", *older, "--mode", "diffusion").out == plain.out
    assert_one_sentence(run("mlx_vlm.generate", *older, "--mode", "ar"), "--mode ar")
    llama = ("--model", ar, "--prompt", "The cat", "--max-tokens", 4)
    assert run("mlx_vlm.generate", *llama, "--mode", "ar").status == 0
    assert_one_sentence(run("mlx_vlm.generate", *llama, "--mode", "diffusion"), "no diffusion spec")
    refused = run("mlx_vlm.generate", *llama, "--profile", "fast")
    assert refused.status == 1 and "profile is an option of mlx-dllm-plugin" in refused.err


def test_chat_decodes_every_turn_anew(
    block: Path, run: Runner, monkeypatch: pytest.MonkeyPatch, v22: tuple[Any, Any]
) -> None:
    from rich.prompt import Prompt

    said = iter([QUESTION, "And of Spain?", "/exit"])
    monkeypatch.setattr(Prompt, "ask", lambda *args, **kwargs: next(said))
    path = block / "llada2_moe-v22"
    outcome = run("mlx_vlm.chat", "--model", path, "--max-tokens", 64, "--temperature", 0, "--no-verbose")
    assert outcome.status == 0 and "Error" not in outcome.out
    answer = text_of(cases(path)[0])
    model, processor = v22
    turns = [("user", QUESTION), ("assistant", answer), ("user", "And of Spain?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    second = mlx_vlm.generate(
        model, processor, apply_chat_template(processor, model.config, messages), max_tokens=64, temperature=0.0
    ).text
    shown = "".join(outcome.out.split())
    assert "".join(answer.split())[:12] in shown and "".join(second.split())[:5] in shown
    wrong = iter(["hi", "/exit"])
    monkeypatch.setattr(Prompt, "ask", lambda *args, **kwargs: next(wrong))
    outcome = run("mlx_vlm.chat", "--model", path, "--kv-bits", 4)
    assert outcome.status == 1 and "--kv-bits does not work with diffusion" in outcome.out


def test_a_new_process_needs_no_import(block: Path) -> None:
    """The start-up line activates the plugin, and the real program ends with status 1 and one line."""
    wrong = process(["-m", "mlx_vlm", "generate", "--model", block / "llada2_moe-v22", "--mode", "ar"])
    assert_one_sentence(wrong, "--mode ar")


# --- the server


@pytest.fixture(scope="module")
def server(block: Path) -> Iterator[Callable[..., Any]]:
    """Posts a chat request to the server's application, in this process."""
    from mlx_vlm.server import app
    from mlx_vlm.server.runtime import runtime

    with TestClient(app) as client:

        def post(path: str = "/v1/chat/completions", version: str = "v22", **more: Any) -> Any:
            messages = [{"role": "user", "content": QUESTION}]
            body = {"model": str(block / f"llada2_moe-{version}"), "messages": messages, "max_tokens": 64, **more}
            return client.post(path, json=body)

        yield post
        runtime.response_generator.stop_and_join()


def content(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_the_server_answers(server: Callable[..., Any], block: Path) -> None:
    case = cases(block / "llada2_moe-v22")[0]
    answer = server(temperature=0)
    assert content(answer) == text_of(case)
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (33, len(case["output_ids"]))
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert text_of(case).startswith(content(server(max_tokens=9, temperature=0)).rstrip("\ufffd"))
    streamed = server(stream=True, temperature=0)
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    parts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(part or "" for part in parts) == text_of(case) and len([part for part in parts if part]) == 2
    sampled = [content(server(temperature=1.0, seed=seed, max_tokens=32)) for seed in (5, 5, 6)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_every_road_writes_the_goldens_text(
    server: Callable[..., Any], v22: tuple[Any, Any], prompt: str, block: Path, run: Runner
) -> None:
    """Both hosts' command lines, their Python interfaces and the server."""
    path = block / "llada2_moe-v22"
    loaded = mlx_lm.load(str(path))
    given = ("--model", path, "--prompt", QUESTION, "--max-tokens", 64)
    texts = {
        "mlx_lm.generate, the command": run("mlx_lm.generate", *given, "--verbose", "F").out.removesuffix("\n"),
        "mlx_lm.generate": mlx_lm.generate(*loaded, prompt, max_tokens=64),
        "mlx_lm.stream_generate": "".join(r.text for r in mlx_lm.stream_generate(*loaded, prompt, max_tokens=64)),
        "mlx_vlm.generate, the command": run("mlx_vlm.generate", *given).out.removesuffix("\n"),
        "mlx_vlm.generate": mlx_vlm.generate(*v22, prompt, max_tokens=64).text,
        "mlx_vlm.stream_generate": "".join(r.text for r in mlx_vlm.stream_generate(*v22, prompt, max_tokens=64)),
        "mlx_vlm.server": content(server(temperature=0)),
    }
    assert texts == dict.fromkeys(texts, text_of(cases(path)[0]))


def test_the_server_takes_our_options(
    server: Callable[..., Any], v22: tuple[Any, Any], prompt: str, block: Path
) -> None:
    given = {"unmasking": "low_confidence_dynamic", "threshold": 0.9}
    expected = mlx_vlm.generate(*v22, prompt, max_tokens=64, temperature=0.0, **given).text
    assert content(server(temperature=0, **given)) == expected
    assert content(server(temperature=0, min_p=0.1)) == text_of(cases(block / "llada2_moe-v22")[0])
    older = [content(server(version="v20", temperature=0, **more)) for more in ({}, {"unmasking": "joint_threshold"})]
    path = block / "llada2_moe-v20"
    model, processor = mlx_vlm.load(str(path))
    alone = [
        mlx_vlm.generate(model, processor, prompt, max_tokens=64, skip_special_tokens=True, **more).text
        for more in ({}, {"unmasking": "joint_threshold"})
    ]
    assert [text.strip() for text in older] == [text.strip() for text in alone] and older[0] != older[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"unmasking": "nope"}, "Unknown unmasking rule"),
        ({"threshold": -1.0}, "threshold must be"),
        ({"repetition_penalty": 1.3}, "repetition_penalty does not work"),
        ({"min_threshold": 0.3, "stream": True}, "min_threshold does not work"),
        ({"logprobs": True}, "logprobs are not served"),
        ({"response_format": {"type": "json_object"}}, "response_format does not work"),
        ({"generation_mode": "ar"}, "autoregressively"),
        ({"block_length": 16}, "whole blocks of 32"),
        ({"thinking_budget": 10}, "thinking_budget does not work"),
        ({"max_steps_per_block": "many"}, "max_steps_per_block must be"),
    ],
)
def test_the_server_refuses_with_status_400(server: Callable[..., Any], given: dict[str, Any], words: str) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        if path == "/v1/messages" and not given.keys() <= {"unmasking", "threshold", "block_length"}:
            continue
        answer = server(path, **given)
        assert answer.status_code == 400 and words in answer.text, answer.text


def test_the_server_survives_what_it_refused(server: Callable[..., Any], block: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "/nope.png"}}
    parts = [{"type": "text", "text": "hi"}, image]
    answer = server(messages=[{"role": "user", "content": parts}])
    assert answer.status_code == 400 and "text alone" in answer.text
    many = server("/v1/responses", messages=None, input=QUESTION, max_output_tokens=64, unmasking="nope")
    assert many.status_code == 400 and "Unknown unmasking rule" in many.text
    assert content(server(temperature=0)) == text_of(cases(block / "llada2_moe-v22")[0])


def test_a_prompt_without_room_is_refused_before_the_stream(server: Callable[..., Any], monkeypatch: Any) -> None:
    compaction = pytest.importorskip("mlx_vlm.server.compaction", exc_type=ImportError)
    monkeypatch.setattr(compaction, "_context_limit", lambda *args, **kwargs: None)  # it would shorten the request
    for stream in (False, True):
        answer = server(max_tokens=5000, stream=stream)
        assert answer.status_code == 400 and "context of 4096" in answer.text, answer.text


def test_the_servers_command_line(block: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("mlx_vlm.server.cli")
    started: list[Any] = []
    monkeypatch.setattr(module.uvicorn, "run", lambda *args, **kwargs: started.append(requests.asked_of_us({})))
    if hasattr(module, "runtime"):
        monkeypatch.setattr(module.runtime, "config", module.runtime.config)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the command writes its settings there
    serve = ("mlx_vlm.server", "--model", block / "llada2_moe-v22", "--log-level", "ERROR")
    assert run(*serve, "--unmasking", "low_confidence_dynamic").status == 0
    assert started == [["unmasking"]]
    for given, words in (
        (("--draft-model", "x"), "--draft-model"),
        (("--kv-bits", 4), "--kv-bits"),
        (("--factor", 1), "factor"),
    ):
        assert_one_sentence(run(*serve, *given), words)
    assert len(started) == 1
