"""Samplers apart from the model: a reference's generate function on a stand-in, against decode()."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

import mlx_dllm_plugin  # noqa: F401  (activates the patches, so that load_model knows diffusion checkpoints)
from mlx_dllm_plugin import DecodingOptions, DiffusionError
from mlx_dllm_plugin.families import Family
from mlx_dllm_plugin.plan import plan
from mlx_dllm_plugin.spec import DiffusionSpec
from mlx_dllm_plugin.verify import sampler
from mlx_dllm_plugin.verify.sampler import Comparison, compare
from mlx_dllm_plugin.verify.stand_in import Answers, stand_in
from mlx_dllm_plugin.verify.steps import compare_steps

torch = pytest.importorskip("torch")

REFERENCES = Path(__file__).parent / "references"
VOCAB, EOS, MASK, CONTEXT = 32, 30, 31, 64
PROMPT = [3, 1, 4, 1, 5]


@dataclass(frozen=True)
class Found:
    name: str = "a reference"
    model_class: Any = None
    config: Any = None
    module: Any = None


def imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def of_source(tmp_path: Path) -> Callable[[str], Found]:
    """A reference of a text, as if its authors had given that file."""

    def make(text: str) -> Found:
        (tmp_path / "given.py").write_text("import torch\n" + text)
        return Found("given.py", module=imported(tmp_path / "given.py"))

    return make


@cache
def published(name: str) -> Found:
    return Found(f"generate_{name}.py", module=imported(REFERENCES / f"generate_{name}.py"))


class Words(SimpleNamespace):
    """A model without layers, whose tokens see as the spec says. It tells the canvases it was run on."""


def tiny(*, block: int | None = None, **changes: Any) -> Any:
    """A model in memory: bidirectional, or block-causal in blocks."""
    random = np.random.default_rng(7)
    words, places = (mx.array(random.standard_normal((n, 16)).astype(np.float32)) for n in (VOCAB, CONTEXT))
    head = mx.array(random.standard_normal((16, VOCAB)).astype(np.float32))

    def hidden(model: Any, ids: mx.array, caches: Any) -> mx.array:
        model.saw.append(np.array(ids).tolist())
        model.caches = caches
        number = mx.arange(ids.shape[1]) // (block or CONTEXT)
        visible = (number[None] <= number[:, None]).astype(mx.float32)
        seen = (visible / visible.sum(axis=1, keepdims=True)) @ words[ids]
        return words[ids] * 0.3 + places[: ids.shape[1]] + 2 * seen

    values: dict[str, Any] = dict(
        family="tiny",
        logits="in_place",
        attention="block_causal" if block else "bidirectional",
        canvas="growing" if block else "fixed",
        unmasking="low_confidence_dynamic" if block else "low_confidence",
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        context_length=CONTEXT,
        defaults={"max_tokens": 16, "block_length": block or 8},
    )
    family = Family(
        name="tiny",
        model_types=("tiny",),
        claims=lambda checkpoint: False,
        hidden=hidden,
        head=lambda model, states: states @ head,
        defaults=lambda checkpoint: {},
    )
    spec = DiffusionSpec(**{**values, **changes})
    return Words(layers=[], saw=[], diffusion_spec=spec, diffusion_family=family)


def run(found: Any, model: Any, prompt: list[int] = PROMPT, n: int = 16, **settings: str) -> Comparison:
    return compare(found, model, model.diffusion_spec, prompt, max_tokens=n, settings=settings)


def assert_same_steps(found: Comparison) -> None:
    """A right reference: every step here that writes something was seen there."""
    assert found.first_step_difference is None and found.difference == ""
    assert found.our_forwards - 3 <= found.steps_compared <= found.our_forwards + 3
    assert not any("no later step" in note or "only the output" in note for note in found.notes)


@cache
def golden(folder: Path) -> tuple[Any, dict[str, Any]]:
    model, _ = load_model(folder)
    content = json.loads((folder / "golden.json").read_text())
    return model, {case["name"]: case for case in content.get("generations") or content["cases"]}


# The goldens: the reference's sampler on our logits writes what it wrote on its own model's


SDAR = ("bigger_block", "dynamic_thr_0.5", "sequential_half_steps", "static_uneven_steps_aligned")


@pytest.mark.parametrize("name", [*SDAR, "gen_length_not_multiple"])
def test_sdar(name: str, goldens: Path) -> None:
    model, cases = golden(goldens / "block" / "sdar-b4")
    case = cases[name]
    settings = {key: str(value) for key, value in case["settings"].items() if key not in ("temperature", "gen_length")}
    if "dynamic" not in settings["remasking_strategy"]:
        del settings["confidence_threshold"]  # of which our rule, and the reference's, make nothing
    found = run(published("sdar"), model, case["prompt_ids"], case["settings"]["gen_length"], **settings)
    assert found.reference_tokens == found.our_tokens == case["output_ids"]
    assert found.first_difference is None and found.difference == ""
    assert found.forwards >= case["nfe"]["total"]  # it goes on after the end of sequence
    assert found.our_forwards <= case["nfe"]["denoise"]
    assert found.settings["temperature"] == 1.0 and found.settings["mask_id"] == 323
    assert "fails at temperature 0" in found.notes[0]
    # Its mask hides something where the prompt has several blocks.
    numbers = "numbers 0 and 1" in " ".join(found.notes)
    assert numbers == (len(case["prompt_ids"]) >= 2 * case["settings"]["block_length"])
    assert_same_steps(found)


def test_sdar_with_more_than_the_masks(goldens: Path) -> None:
    """The published code overwrites the prompt there; ours, and the golden with one line mended, do not."""
    model, cases = golden(goldens / "block" / "sdar-b4")
    case = cases["clamped_dynamic_straddle_one_step"]
    settings = {"denoising_steps": "1", "confidence_threshold": "0.9"}
    found = run(published("sdar"), model, case["prompt_ids"], 32, **settings)
    assert found.our_tokens == case["output_ids"] and found.first_difference == 1
    assert found.difference.startswith("token 1 of the output is the first that differs: ")
    assert found.difference.endswith(f" there, {found.our_tokens[1]} here")


LLADA = ("gen20_block10_steps6", "steps_gt_len_gen16_block16_steps32", "cfg1.5_logits_eos_inf_gen16_block8_steps16")


@pytest.mark.parametrize("name", [*LLADA, "confidence_eos_eot_inf_gen16_block8_steps16"])
def test_llada(name: str, goldens: Path) -> None:
    model, cases = golden(goldens / "llada_dream" / "llada-8b-tiny")
    case = cases[name]
    names = ("cfg_scale", "logits_eos_inf", "confidence_eos_eot_inf", "steps", "block_length", "eos_id", "eot_id")
    settings = {key: str(case["settings"][key]) for key in names}
    prompt = case["prompt_ids"][0]
    found = run(published("llada"), model, prompt, case["settings"]["gen_length"], **settings)
    wanted = case["output_ids"][0][len(prompt) :]
    assert found.first_difference is None
    assert found.reference_tokens == found.our_tokens == wanted[: len(found.our_tokens)]
    assert found.forwards == case["settings"]["steps"]
    assert_same_steps(found)


class LLaDA2(torch.nn.Module):
    """LLaDA2.0's generate in its published signature: whole blocks, an additive mask, nothing kept."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        raise AssertionError("the stand-in answers")

    @torch.no_grad()
    def generate(
        self,
        inputs=None,
        temperature=0.0,
        block_length=32,
        steps=32,
        gen_length=2048,
        top_p=None,
        top_k=None,
        eos_early_stop=False,
        minimal_topk=1,
        threshold=0.95,
        eos_id=156892,
        mask_id=156895,
    ):
        steps = min(steps, gen_length // minimal_topk)
        length = inputs.shape[1]
        blocks = -(-(length + gen_length) // block_length)
        number = torch.arange(blocks * block_length, device=self.device) // block_length
        hidden = torch.where(number[None] <= number[:, None], 0.0, -torch.inf).to(torch.bfloat16)[None, None]
        x = torch.full((1, blocks * block_length), mask_id)
        x[:, :length] = inputs.clone()
        counts = [block_length // steps + (i < block_length % steps) for i in range(steps)]
        for block in range(length // block_length, blocks):
            end = (block + 1) * block_length
            for step in range(steps):
                masked = x[0, end - block_length : end] == mask_id
                if not masked.any():
                    break
                positions = torch.arange(end)[None]
                logits = self.forward(
                    x[:, :end], attention_mask=hidden[:, :, :end, :end], position_ids=positions
                ).logits
                p, tokens = logits[0, -block_length:].softmax(-1).max(-1)
                p = p.masked_fill(~masked, -torch.inf)
                sure = p > threshold
                if sure.sum() < counts[step]:
                    sure = torch.zeros_like(masked)
                    sure[p.topk(min(counts[step], int(masked.sum()))).indices] = True
                x[0, end - block_length : end][sure] = tokens[sure]
            if eos_id in x[0, length:end]:
                break
        written = x[0, length : length + gen_length].tolist()
        if eos_id in written:
            written = written[: written.index(eos_id) + 1]
        return torch.tensor([[*inputs[0].tolist(), *written]])


@pytest.mark.parametrize("name", ["thr_0.3_two_block_prompt", "steps_uneven_schedule", "minimal_topk_4", "short_gen"])
def test_llada2(name: str, goldens: Path) -> None:
    model, cases = golden(goldens / "block" / "llada2_moe-v20")
    case = cases[name]
    settings = {key: str(value) for key, value in case["settings"].items() if key != "gen_length"}
    found = run(
        Found("LLaDA2MoeModelLM", model_class=LLaDA2),
        model,
        case["prompt_ids"],
        case["settings"]["gen_length"],
        **settings,
    )
    assert found.function == "LLaDA2.generate"
    assert_same_steps(found)
    assert found.reference_tokens == found.our_tokens == case["output_ids"]
    assert found.first_difference is None
    assert found.forwards == case["nfe"] >= found.our_forwards


class Dream(torch.nn.Module):
    """Dream's diffusion_generate, which makes a configuration of its keyword arguments, and shifts the logits."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, num_logits_to_keep=0):
        raise AssertionError("the stand-in answers")

    def diffusion_generate(self, inputs=None, generation_config=None, **kwargs):
        # What PretrainedConfig lets in where nothing is said.
        config = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "alg": "origin", "steps": 512, "max_new_tokens": None}
        config |= {"alg_temp": None, "eps": 1e-3, "mask_token_id": self.config.mask_token_id} | kwargs
        assert config["temperature"] == 0 and config["top_k"] is None and config["top_p"] is None
        assert not config["alg_temp"]
        x = torch.nn.functional.pad(inputs, (0, config["max_new_tokens"]), value=config["mask_token_id"])
        times = torch.linspace(1, config["eps"], config["steps"] + 1)
        for step in range(config["steps"]):
            masked = x == config["mask_token_id"]
            logits = self(x, "full", None).logits
            logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)[masked]
            p = logits.softmax(-1)
            confidence, tokens = p.max(-1)
            if config["alg"] == "entropy":
                confidence = (p * torch.log(p + 1e-10)).sum(-1)
            elif config["alg"] == "topk_margin":
                best = p.topk(2).values
                confidence = best[:, 0] - best[:, 1]
            else:
                assert config["alg"] == "maskgit_plus"
            left = int(masked.sum())
            last = step == config["steps"] - 1
            count = left if last else int(left * (1 - times[step + 1] / times[step]))
            chosen = confidence.topk(count).indices
            x[0, masked[0].nonzero()[chosen, 0]] = tokens[chosen]
        return SimpleNamespace(sequences=x, history=None)


@pytest.mark.parametrize(
    "name", ["dream_entropy_new16_steps16", "dream_topk_margin_new12_steps24", "dream_maskgit_plus_new20_steps7"]
)
def test_dream(name: str, goldens: Path) -> None:
    """Shifted logits go to the reference as they are; the steps that commit nothing are left out here alone."""
    model, cases = golden(goldens / "llada_dream" / "dream-tiny")
    case = cases[name]
    settings = {"steps": str(case["settings"]["steps"]), "alg": case["settings"]["alg"]}
    prompt = case["prompt_ids"][0]
    reference = Found("DreamModel", model_class=Dream, config=SimpleNamespace(mask_token_id=310))
    found = run(reference, model, prompt, case["settings"]["max_new_tokens"], **settings)
    wanted = case["output_ids"][0][len(prompt) :]
    assert found.first_difference is None and found.function == "Dream.diffusion_generate"
    assert found.reference_tokens == found.our_tokens == wanted[: len(found.our_tokens)]
    assert found.forwards == case["settings"]["steps"]
    assert_same_steps(found)


class FastDLLM(torch.nn.Module):
    """Fast-dLLM v2's generate: positions come from the cache alone, which the forward returns."""

    def forward(
        self, input_ids=None, past_key_values=None, use_cache=None, update_past_key_values=False, block_size=32
    ):
        raise AssertionError("the stand-in answers")

    @torch.no_grad()
    def generate(
        self,
        input_ids,
        max_new_tokens,
        mask_id=151665,
        threshold=1,
        small_block_size=8,
        block_size=32,
        stop_token=151645,
        stopping_criteria=None,
        top_p=0.95,
        temperature=0,
        use_block_cache=False,
        **kwargs,
    ):
        length, past = input_ids.shape[1], None
        x = input_ids
        if length >= block_size:
            done = length // block_size * block_size
            out = self.forward(
                input_ids=x[:, :done], use_cache=True, update_past_key_values=True, block_size=block_size
            )
            past = out.past_key_values
            if done == length:
                x = torch.cat([x, out.logits[:, -1:].argmax(-1)], dim=1)
        for _ in range(max_new_tokens // block_size):
            missing = block_size - x.shape[1] % block_size
            x = torch.cat([x, torch.full((1, missing), mask_id)], dim=1)
            for first in range(-block_size, 0, small_block_size):
                last = first + small_block_size or None
                while (masked := x[:, first:last] == mask_id).any():
                    logits = self.forward(input_ids=x[:, -block_size:], use_cache=True, past_key_values=past).logits
                    logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)[:, first:last]
                    p, tokens = logits.softmax(-1).max(-1)
                    p = p.masked_fill(~masked, -torch.inf)
                    sure = p > threshold
                    sure[0, p.argmax()] = True
                    x[:, first:last][sure] = tokens[sure]
            out = self.forward(
                input_ids=x[:, -block_size:], use_cache=True, past_key_values=past, update_past_key_values=True
            )
            past = out.past_key_values
            x = torch.cat([x, out.logits[:, -1:].argmax(-1)], dim=1)
            if stop_token in x[:, length:]:
                break
        return x


def test_fast_dllm_v2(goldens: Path) -> None:
    """What its length leaves out, it is asked for in whole blocks."""
    model, cases = golden(goldens / "block" / "fast_dllm_v2-b32")
    case = cases["thr_0.3_long_prompt"]
    found = run(Found(model_class=FastDLLM), model, case["prompt_ids"], 64, threshold="0.3")
    assert found.first_difference is None and found.settings["max_new_tokens"] == 96
    assert found.our_tokens[: len(case["output_ids"])] == case["output_ids"][: len(found.our_tokens)]
    assert_same_steps(found)


# Faults are found where they are


def test_a_reference_with_another_threshold(goldens: Path, of_source: Callable[[str], Found]) -> None:
    """Its tokens are those of that threshold, and the first that differs is named."""
    model, cases = golden(goldens / "block" / "sdar-b4")
    case = cases["dynamic_thr_0.5"]
    source = (REFERENCES / "generate_sdar.py").read_text()
    assert "p > confidence_threshold" in source
    wrong = of_source(source.replace("p > confidence_threshold", "p > 0.5"))
    found = run(wrong, model, case["prompt_ids"], 32)
    pairs = list(zip(found.our_tokens, case["output_ids"], strict=False))
    assert found.reference_tokens[: len(pairs)] == [b for _, b in pairs]
    assert found.first_difference == next(i for i, (a, b) in enumerate(pairs) if a != b)
    assert run(wrong, model, case["prompt_ids"], 32, confidence_threshold="0.5").first_difference is None


@pytest.mark.parametrize("at", [0, 3, 15])
def test_one_wrong_token(at: int, of_source: Callable[[str], Found]) -> None:
    source = (REFERENCES / "generate_llada.py").read_text()
    assert source.count("    return x\n") == 1
    wrong = source.replace(
        "    return x\n", f"    x[0, length + {at}] = (x[0, length + {at}] + 1) % 30\n    return x\n"
    )
    right, found = run(published("llada"), tiny()), run(of_source(wrong), tiny())
    assert right.first_difference is None and len(right.our_tokens) == 16
    assert found.first_difference == at
    assert found.difference == (
        f"token {at} of the output is the first that differs: {(right.our_tokens[at] + 1) % 30} there, "
        f"{right.our_tokens[at]} here"
    )


def test_an_off_by_one_in_the_schedule(of_source: Callable[[str], Found]) -> None:
    """One more in the last steps instead of the first."""
    source = (REFERENCES / "generate_llada.py").read_text()
    wrong = source.replace("torch.arange(steps)[None] < more", "torch.arange(steps).flip(0)[None] < more")
    assert wrong != source
    right, found = (run(one, tiny(), steps="6") for one in (published("llada"), of_source(wrong)))
    assert right.first_difference is None and found.first_difference is not None
    at = found.first_difference
    assert found.reference_tokens[:at] == found.our_tokens[:at] and found.reference_tokens[at] != found.our_tokens[at]


@pytest.mark.parametrize(
    "changes", [{"max_denoising_steps": 4}, {"block_length": 16}, {"unmasking": "random", "seed": 1}]
)
def test_other_options_of_ours(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    decode = sampler.decode
    assert run(published("llada"), tiny()).first_difference is None
    monkeypatch.setattr(sampler, "decode", lambda model, ids, options: decode(model, ids, replace(options, **changes)))
    assert run(published("llada"), tiny()).first_difference is not None


def test_a_reference_that_ends_before(of_source: Callable[[str], Found]) -> None:
    source = (REFERENCES / "generate_llada.py").read_text()
    for cut, words in (
        ("x[:, : length + 5]", "token 5"),
        ("x[:, length : length + 5]", "token 5"),
        ("x[:, length:]", ""),
    ):
        found = run(of_source(source.replace("    return x\n", f"    return {cut}\n")), tiny())
        assert found.difference.startswith(words) and bool(found.difference) == bool(words)
        assert not words or "the output ends there" in found.difference


def test_an_end_of_sequence_may_be_left_out(of_source: Callable[[str], Found]) -> None:
    tokens = run(published("llada"), tiny()).our_tokens
    end = max(tokens.index(token) for token in tokens)
    assert end > 1
    model = tiny(eos_token_ids=(tokens[end],))
    source = (REFERENCES / "generate_llada.py").read_text()
    assert run(published("llada"), model).our_tokens == tokens[: end + 1]  # with it
    for length, difference in ((end + 1, None), (end, None), (end - 1, end - 1)):
        found = run(of_source(source.replace("    return x\n", f"    return x[:, : length + {length}]\n")), model)
        assert found.first_difference == difference


# The steps


LADDER = """
def generate(model, prompt, gen_length, mask_id, steps=16, threshold=0.9):
    x = torch.cat([prompt, torch.full((1, gen_length), mask_id)], dim=1)
    while (masked := x == mask_id).any():
        p, tokens = model(x).logits.softmax(-1).max(-1)
        p = p.masked_fill(~masked, -1)
        CHOOSE
        x[0, at] = tokens[0, at]
    return x
"""
BEST = "at = p[0].topk(1).indices"


def confident() -> Any:
    """A model whose tokens depend on their places alone, so that any order writes the same ones."""
    model = tiny(defaults={"max_tokens": 16})
    head = model.diffusion_family.head
    places = model.diffusion_family.hidden

    def hidden(model: Any, ids: mx.array, caches: Any) -> mx.array:
        return places(model, mx.full(ids.shape, 3), caches)

    family = replace(model.diffusion_family, hidden=hidden, head=head)
    return Words(layers=[], saw=[], caches=None, diffusion_spec=model.diffusion_spec, diffusion_family=family)


@pytest.mark.parametrize(
    ("choose", "step"),
    [
        (BEST, None),
        ("at = p[0].topk(min(2, int(masked.sum()))).indices", 1),
        ("at = p[0].topk(1 + (int(masked.sum()) == 4)).indices", 13),
        ("at = masked[0].nonzero()[:1, 0]", 1),
        ("at = masked[0].nonzero()[:, 0]", 1),
    ],
)
def test_the_same_tokens_in_another_order(choose: str, step: int | None, of_source: Callable[[str], Found]) -> None:
    found = run(of_source(LADDER.replace("CHOOSE", choose)), confident())
    assert found.first_difference is None and found.reference_tokens == found.our_tokens
    if step is None:
        assert found.difference == "" and found.steps_compared == 16
        return
    wrong = found.first_step_difference
    assert wrong is not None and wrong.step == step == found.steps_compared + 1
    assert {wrong.there, wrong.here} - {None} == {found.our_tokens[wrong.token]}
    there, here = ("still masked" if id is None else id for id in (wrong.there, wrong.here))
    assert found.difference == (
        f"the tokens are the same, and they are not written in the same steps: after step {step}, token {wrong.token} "
        f"of the output is {there} there and {here} here"
    )


def test_an_off_by_one_that_no_token_tells(of_source: Callable[[str], Found]) -> None:
    """Of SDAR's schedule: one more in the first step."""
    source = (REFERENCES / "generate_sdar.py").read_text()
    wrong = source.replace("(i < block_length % denoising_steps)", "(i < (block_length + 1) % denoising_steps)")
    assert wrong != source
    model = confident()
    spec = replace(model.diffusion_spec, attention="block_causal", canvas="growing", unmasking="low_confidence_static")
    model.diffusion_spec = replace(spec, defaults={"max_tokens": 16, "block_length": 4})
    for text, step in ((source, None), (wrong, 1)):
        found = run(of_source(text), model, [3, 1, 4, 1])
        assert found.first_difference is None
        assert (found.first_step_difference and found.first_step_difference.step) == step


def test_canvases_that_say_nothing(of_source: Callable[[str], Found]) -> None:
    """Repeated ones, the prompt alone, and those of guidance, in which it is masked."""
    shown = LADDER.replace("CHOOSE", f"model(x); model(prompt); model(torch.full_like(x, mask_id)); {BEST}")
    found = run(of_source(shown), confident())
    assert found.difference == "" and found.steps_compared == 16 and found.forwards == 64


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        (
            "model(x).logits",
            "model(torch.cat([x[:, :1] * 0, x[:, 1:]], dim=1)).logits",
            "generate shows its model no canvas that begins with the prompt: only the output was compared, not its "
            "steps.",
        ),
        (
            "    while",
            "    p, tokens = model(x).logits.softmax(-1).max(-1)\n"
            "    at = p[0, 5:].argmax() + 5\n"
            "    y = x.clone()\n"
            "    y[0, at] = tokens[0, at]\n"
            "    model(y)\n"
            "    while",
            "generate changes what it has written: no later step than 1 was compared.",
        ),
    ],
)
def test_steps_that_cannot_be_compared(old: str, new: str, note: str, of_source: Callable[[str], Found]) -> None:
    found = run(of_source(LADDER.replace("CHOOSE", BEST).replace(old, new, 1)), confident())
    assert found.difference == "" and note in found.notes


def test_equal_probabilities_may_be_ranked_either_way(of_source: Callable[[str], Found]) -> None:
    model = confident()
    head = mx.zeros((16, VOCAB)) + (mx.arange(VOCAB) == 7) * 2.0
    model.diffusion_family = replace(
        model.diffusion_family, head=lambda model, states: mx.abs(states) @ head * 0 + head[0] * 2
    )
    last = "at = masked[0].nonzero()[-1:, 0]"
    found = run(of_source(LADDER.replace("CHOOSE", last)), model)
    assert found.difference == "" and found.steps_compared == 0
    assert found.notes[0].startswith("in step 1, generate chooses among positions whose probabilities differ by roundi")
    found = run(of_source(LADDER.replace("CHOOSE", "at = masked[0].nonzero()[-2:, 0]")), model)
    assert found.first_step_difference is not None  # how many is no matter of rounding


M = MASK


@pytest.mark.parametrize(
    ("canvases", "output", "compared", "note"),
    [
        ([[1, M, M, M, M]], [5, EOS], 1, ""),  # the output is cut, and its only step wrote more
        ([[1, M, M, M, M], [1, 5, EOS, EOS, EOS]], [5, EOS], 0, "generate fills what follows an end of sequence: no "),
        ([[1, M, M, M, M], [1, 5, EOS, 6, 8]], [5, EOS], 0, "in step 1, generate chooses among positions whose prob"),
    ],
)
def test_steps_that_differ_for_a_reason(canvases: Any, output: list[int], compared: int, note: str) -> None:
    half = torch.zeros(1, 5, VOCAB)
    half[..., 2:] = -torch.inf  # of two tokens each has a half, as the threshold
    answers: Any = SimpleNamespace(
        name="generate", canvases=[np.array([one]) for one in canvases], logits=lambda rows, start: half
    )
    planned: Any = SimpleNamespace(
        **{"mask_token_id": M, "eos": {EOS}, "values": {"threshold": 0.5}, "cfg_scale": 0, "shifted": False},
        **{"suppressed": (), "late": (), "rule": SimpleNamespace(edit=None, revise=None)},
    )
    tokens = (5, EOS, 6) if compared else (5, EOS)
    commits: Any = [SimpleNamespace(positions=range(1, 1 + len(tokens)), tokens=tokens)]
    found = compare_steps(answers, planned, [1], commits, output)
    assert found.difference is None and found.compared == compared and found.note.startswith(note)
    assert bool(found.note) == bool(note)


def test_a_rule_that_edits_has_no_steps_to_compare(of_source: Callable[[str], Found]) -> None:
    found = run(of_source(LLADA21), tiny(block=4), editing_threshold="1", threshold="0.7")
    assert found.steps_compared == 0
    assert (
        "the unmasking rule joint_threshold changes what it has written: only the output was compared, not its steps."
        in found.notes
    )


# What was not exercised


def test_a_threshold_that_decides_nothing(of_source: Callable[[str], Found]) -> None:
    """A wrong one of the reference is the same then: the note says so, and another one finds it."""
    rule = "at = (p[0] > threshold).nonzero()[:, 0]; at = at if len(at) else p[0].topk(1).indices"
    right, wrong = (of_source(LADDER.replace("CHOOSE", text)) for text in (rule, rule.replace("threshold)", "9)")))
    model = tiny()
    for reference in (right, wrong):
        found = run(reference, model, threshold="1.5")
        assert found.difference == ""
        assert found.notes[0] == (
            "no position was above the threshold 1.5: this run says nothing about it; try --set threshold=0.3."
        )
    assert run(right, model, threshold="0.3").difference == "" != run(wrong, model, threshold="0.3").difference
    found = run(right, model, threshold="0.01")
    assert found.notes[0] == (
        "every position was above the threshold 0.01: nothing below it was compared; try --set threshold=0.95."
    )


def test_a_threshold_that_decides_little() -> None:
    one, two = [SimpleNamespace(token=np.log(0.99))], [SimpleNamespace(token=np.log(0.5))]
    planned = SimpleNamespace(
        stages=[SimpleNamespace(counts=(), start=0, end=8)],
        **{"values": {"threshold": 0.9}, "block_length": None, "eos": frozenset()},
        rule=SimpleNamespace(uses=frozenset()),
    )
    asked: Any = SimpleNamespace(names=["confidence_threshold"])

    def notes(*steps: Any) -> list[str]:
        result: Any = SimpleNamespace(commits=[SimpleNamespace(logprobs=step) for step in steps], finish_reason="stop")
        return list(sampler._not_exercised(asked, planned, result))  # type: ignore[arg-type]

    words = "{} of 5 steps the threshold 0.9 wrote more than the rule must: this run says {} about it; try --set "
    assert notes(one, two, two, two, two) == [f"in {words.format(0, 'nothing')}confidence_threshold=0.3."]
    assert notes(one * 2, two, two, two, two) == [f"in {words.format(1, 'little')}confidence_threshold=0.3."]
    assert notes(one * 2, one * 3, two, two, two) == []


def test_a_schedule_of_single_tokens_and_no_end() -> None:
    notes = (
        "the schedule has one token for every step: how it shares tokens among fewer steps was not compared; try --set "
        "steps=14.",
        "no end of sequence was written: how the reference stops was not compared.",
    )
    assert run(published("llada"), tiny()).notes == notes
    assert run(published("llada"), tiny(), steps="14").notes == notes[1:]
    tokens = run(published("llada"), tiny()).our_tokens
    assert run(published("llada"), tiny(eos_token_ids=(tokens[-1],)), steps="14").notes == ()


def test_sdar_is_asked_to_stop(of_source: Callable[[str], Found], goldens: Path) -> None:
    """And one that finds an end in the prompt ends too soon."""
    model, cases = golden(goldens / "block" / "sdar-b4")
    prompt = [318, *cases["stop_ids"]["prompt_ids"][1:]]
    source = (REFERENCES / "generate_sdar.py").read_text()
    wrong = source.replace("stop in x[0, length:last]", "stop in x[0, :last]")
    assert wrong != source
    found = run(published("sdar"), model, prompt, 16)
    assert found.difference == "" and found.settings["stopping_criteria_idx"] == [316, 318]
    assert run(of_source(wrong), model, prompt, 16).difference


# Settings


def test_both_sides_get_the_same() -> None:
    found = run(published("llada"), tiny(), steps="4", block_length="4", eos_id="29", eot_id="28")
    assert found.first_difference is None and found.forwards == found.our_forwards == 4
    assert found.settings == {
        **{"steps": 4, "gen_length": 16, "block_length": 4, "temperature": 0.0, "remasking": "low_confidence"},
        **{"mask_id": MASK, "eos_id": 29, "eot_id": 28},
    }
    assert found.our_settings == {
        **{"max_tokens": 16, "max_denoising_steps": 4, "block_length": 4, "cache": "none", "eos_token_ids": (29,)},
    }
    assert found.prompt_ids == PROMPT and found.function == "generate"


@pytest.mark.parametrize(("n", "block"), [(16, 8), (12, 4), (7, 1)])
def test_a_block_that_divides_the_length(n: int, block: int) -> None:
    """LLaDA's must; a length that is not made of its blocks gets smaller ones."""
    found = run(published("llada"), tiny(), n=n)
    assert found.settings["block_length"] == found.our_settings["block_length"] == block
    assert found.first_difference is None


def test_the_length_may_be_set() -> None:
    found = run(published("llada"), tiny(), gen_length="24")
    assert found.settings["gen_length"] == len(found.our_tokens) == 24 and found.first_difference is None


FAST = """
@torch.no_grad()
def generate(model, prompt, steps=128, gen_length=128, block_length=128, temperature=0., remasking="low_confidence",
             mask_id=126336, threshold=None, factor=None):
    x, calls = torch.cat([prompt, torch.full((1, gen_length), mask_id)], dim=1), 0
    for first in range(prompt.shape[1], x.shape[1], block_length):
        while (masked := x[0, first : first + block_length] == mask_id).any():
            p, tokens = model(x).logits[0, first : first + block_length].softmax(-1).max(-1)
            p, calls = p.masked_fill(~masked, -1), calls + 1
            sure = p > (threshold or 2)
            sure[p.argmax()] = True
            x[0, first : first + block_length][sure] = tokens[sure]
    return x, calls
"""


@pytest.mark.parametrize("settings", [{}, {"threshold": "0.6"}])
def test_fast_dllms_version_of_lladas(settings: dict[str, str], of_source: Callable[[str], Found]) -> None:
    """A threshold chooses another rule here too. What it returns is a tuple."""
    found = run(of_source(FAST), tiny(), **settings)
    assert found.first_difference is None and found.forwards == found.our_forwards
    assert found.our_settings.get("unmasking") == ("threshold" if settings else None)
    assert ("threshold" in found.settings) == bool(settings)


LLADA21 = """
def generate(model, inputs, gen_length, mask_id, block_length=32, threshold=0.95, editing_threshold=0.9):
    assert editing_threshold == 1
    end = -(-(inputs.shape[1] + gen_length) // block_length) * block_length
    x = torch.cat([inputs, torch.full((1, end - inputs.shape[1]), mask_id)], dim=1)
    for last in range(inputs.shape[1] // block_length * block_length + block_length, end + 1, block_length):
        while (masked := x[0, last - block_length : last] == mask_id).any():
            p, tokens = model(x[:, :last], use_cache=False).logits[0, -block_length:].softmax(-1).max(-1)
            p = p.masked_fill(~masked, -1)
            sure = p > threshold
            sure[p.argmax()] = True
            x[0, last - block_length : last][sure] = tokens[sure]
    return x
"""


def test_a_sampler_that_edits(of_source: Callable[[str], Found]) -> None:
    """LLaDA2.1's: the checkpoint may not tell, the argument does."""
    found = run(of_source(LLADA21), tiny(block=4), editing_threshold="1", threshold="0.7")
    assert found.our_settings["unmasking"] == "joint_threshold" and found.our_settings["editing_threshold"] == 1
    assert found.first_difference is None and found.forwards > 4


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"stepz": "4"},
            "generate has no setting 'stepz'; it takes prompt, attention_mask, steps, gen_length, block_length, "
            "temperature, cfg_scale, remasking, mask_id, logits_eos_inf, confidence_eos_eot_inf, eos_id, eot_id.",
        ),
        ({"prompt": "4"}, "generate has no setting 'prompt'; it takes prompt, attention_mask, steps, "),
        ({"steps": "few"}, "steps must be a number, got 'few'."),
        ({"steps": "nan"}, "steps must be a number, got 'nan'."),
        ({"steps": "0.5"}, "max_denoising_steps must be an integer from 1 to 100000, got 0.5."),
        ({"logits_eos_inf": "maybe"}, "logits_eos_inf must be true or false, got 'maybe'."),
        ({"temperature": "0.7"}, "temperature 0.7 draws tokens at random, which cannot be compared: leave it out"),
        ({"remasking": "random"}, "The unmasking rule 'random' picks positions at random, which cannot be compared"),
        ({"remasking": "worst"}, "Unknown unmasking rule 'worst'; known are: "),
        ({"mask_id": "99"}, "mask_token_id must be an id within the embedding of 32 rows (0 to 31), got 99"),
        ({"steps": "0.25"}, "--set steps=0.25: max_denoising_steps must be an integer from 1"),
        ({"eos_id": "32"}, "--set eos_id=32: id 32 is outside the vocabulary of 32; give one of the checkpoint's ids."),
        ({"eos_id": "-1"}, "--set eos_id=-1: eos_token_ids must be token ids, 0 or more, got (-1,)."),
        ({"gen_length": "0"}, "max_tokens must be a positive integer"),
        ({"gen_length": "-1"}, "The output must have at least one token to compare samplers, got -1."),
    ],
)
def test_settings_that_are_refused(settings: dict[str, str], sentence: str) -> None:
    model = tiny()
    with pytest.raises(DiffusionError) as caught:
        compare(published("llada"), model, model.diffusion_spec, PROMPT, max_tokens=16, settings=settings)
    assert sentence in str(caught.value)


def test_values_of_settings() -> None:
    convert = sampler._converted
    assert [convert("a", text, False) for text in ("true", "0")] == [True, False]
    assert convert("a", "2", 1) == 2 and convert("a", "0.5", 1) == 0.5 and convert("a", "2", 1.0) == 2.0
    assert isinstance(convert("a", "2", 1.0), float) and convert("a", "none", 1.0) is None
    assert [convert("a", text, None) for text in ("3", "0.5", "1, 2", "true", "entropy")] == [
        3,
        0.5,
        (1, 2),
        True,
        "entropy",
    ]
    assert convert("a", "3", "text") == "3"


# Which function


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "given.py has no generate function: give the authors' file with it, as --reference FILE.py:NAME."),
        (
            "def generate_a(model, x): ...\ndef generate_b(model, x): ...\ndef _generate(model, x): ...\n",
            "given.py has the functions generate_a, generate_b: choose one, with --reference FILE.py:NAME.",
        ),
        ("def generate(): ...\n", "generate has no argument for the model; it takes no arguments: "),
        ("def generate(prompt, steps): ...\n", "generate has no argument for the model; it takes prompt, steps: "),
        ("def generate(model, text): ...\n", "generate has no argument for the prompt (prompt, input_ids, inputs, x, "),
        (
            "def generate(model, tokenizer, prompt, steps, notes): ...\n",
            "generate needs tokenizer, notes, which nothing supplies; it takes tokenizer, prompt, steps, notes: give "
            "--set tokenizer=VALUE.",
        ),
    ],
)
def test_functions_that_are_refused(text: str, sentence: str, of_source: Callable[[str], Found]) -> None:
    with pytest.raises(DiffusionError) as caught:
        run(of_source(text), tiny())
    assert sentence in str(caught.value)


def test_transformers_own_generate() -> None:
    from transformers import Qwen2ForCausalLM

    with pytest.raises(DiffusionError) as caught:
        run(Found("Qwen2ForCausalLM", model_class=Qwen2ForCausalLM), tiny())
    assert str(caught.value) == (
        "Qwen2ForCausalLM has only transformers' own generate, which decodes from left to right: give the authors' "
        "file with it, as --reference FILE.py:NAME."
    )


def test_a_class_of_transformers_with_its_own_generate() -> None:
    """A model of the hub: its device, type and configuration are there without a weight."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    seen: dict[str, Any] = {}

    class Own(Qwen2ForCausalLM):
        def generate(self, inputs, gen_length=8, mask_id=0):
            seen.update(device=self.device, dtype=self.dtype, vocab=self.config.vocab_size, training=self.training)
            seen.update(eos=self.generation_config.eos_token_id, weights=list(self.parameters()))
            x = torch.cat([inputs, torch.full((1, gen_length), mask_id)], dim=1)
            while (masked := x == mask_id).any():
                p, tokens = self(x, None).logits.softmax(-1).max(-1)
                at = p.masked_fill(~masked, -1).argmax()
                x[0, at] = tokens[0, at]
            return x

    config = Qwen2Config(vocab_size=VOCAB, eos_token_id=EOS)
    found = run(Found("Own", model_class=Own, config=config), tiny())
    assert found.first_difference is None and found.forwards == 16
    assert seen == {
        **{"device": torch.device("cpu"), "dtype": torch.float32, "vocab": VOCAB, "training": False},
        **{"eos": EOS, "weights": []},
    }


def test_a_function_by_name(of_source: Callable[[str], Found]) -> None:
    text = FAST + FAST.replace("def generate", "def other").replace("return x, calls", "return x + 1")
    model = tiny()
    arguments: Any = (model, model.diffusion_spec, PROMPT)
    assert compare(of_source(text), *arguments, max_tokens=16).first_difference is None
    found = compare(of_source(text), *arguments, max_tokens=16, function="other")
    assert found.function == "other" and found.first_difference == 0
    with pytest.raises(DiffusionError, match="given.py has no function 'third'; it has generate, other: choose one"):
        compare(of_source(text), *arguments, max_tokens=16, function="third")


# What goes wrong inside


HEAD = "def generate(model, prompt, mask_id):\n"


def test_an_exception_in_the_references_code(
    of_source: Callable[[str], Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = of_source(HEAD + "    model(prompt)\n    raise LookupError('a\\x1b')\n")
    with pytest.raises(DiffusionError) as caught:
        run(found, tiny())
    assert str(caught.value) == (
        f"generate of given.py failed in its own code: LookupError: a\\x1b ({found.module.__file__} line 4); "
        "MLX_DLLM_DEBUG=1 shows all."
    )
    monkeypatch.setenv("MLX_DLLM_DEBUG", "1")
    with pytest.raises(LookupError):
        run(found, tiny())


def test_what_a_reference_leaves_behind(
    of_source: Callable[[str], Found], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    text = (
        "import os, random, sys\nimport numpy\n"
        + HEAD
        + "    print('from there')\n    os.chdir('below')\n    sys.stdout = None\n"
        + "    random.seed(1); numpy.random.seed(1); torch.manual_seed(1); torch.set_default_dtype(torch.float64)\n"
    )

    def state() -> list[Any]:
        return [Path.cwd(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    before = state(), sys.stdout, torch.get_default_dtype()
    for end in ("    return prompt\n", "    raise SystemExit(3)\n"):
        with contextlib.suppress(DiffusionError):
            run(of_source(text + end), tiny())
        assert (state(), sys.stdout, torch.get_default_dtype()) == before
    out, err = capsys.readouterr()
    assert out == "" and err == "from there\n" * 2


def test_torchs_errors_name_the_references_line(of_source: Callable[[str], Found]) -> None:
    with pytest.raises(DiffusionError, match=r"failed in its own code: RuntimeError: .* \(.*given.py line 3\); MLX"):
        run(of_source(HEAD + "    return torch.cat([prompt, prompt[0]], dim=1)\n"), tiny())
    assert torch.multinomial.__module__ != sampler.__name__


def test_a_refusal_is_not_caught_by_the_reference(of_source: Callable[[str], Found]) -> None:
    text = HEAD + "    try:\n        model(prompt, None, None, None, 1)\n    except Exception:\n        return prompt\n"
    with pytest.raises(
        DiffusionError, match="generate calls its model with 5 arguments without a name, which the stand"
    ):
        run(of_source(text), tiny())


def test_a_sampler_without_an_end(of_source: Callable[[str], Found]) -> None:
    with pytest.raises(DiffusionError, match="called its model more than 800 times and does not end: it may wait for"):
        run(of_source(HEAD + "    while True:\n        model(prompt)\n"), tiny())


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("None", "generate returned a NoneType, and token ids are expected: a tensor [1, length], a list"),
        ("'text'", "generate returned 'text', and token ids are expected"),
        ("['a']", "generate returned a list, and token ids are expected"),
        ("prompt * 10**12", "generate returned token id 3000000000000, outside the vocabulary of 32: give the sampler"),
        ("prompt - 9", "generate returned token id -6, outside the vocabulary of 32: give the sampler that belongs to"),
        ("torch.rand(1, 4)", "generate returned a Tensor of shape [1, 4], and token ids are expected"),
    ],
)
def test_what_is_no_token_ids(value: str, sentence: str, of_source: Callable[[str], Found]) -> None:
    with pytest.raises(DiffusionError) as caught:
        run(of_source(f"{HEAD}    return {value}\n"), tiny())
    assert sentence in str(caught.value)


@pytest.mark.parametrize("value", ["x", "x[0]", "x.tolist()", "x[0].tolist()", "(x, 3)", "{'sequences': x}", "[x]"])
def test_what_is_token_ids(value: str, of_source: Callable[[str], Found]) -> None:
    found = run(
        of_source(f"{HEAD}    x = torch.cat([prompt, torch.full((1, 16), 7)], dim=1)\n    return {value}\n"), tiny()
    )
    assert found.reference_tokens == [7] * 16


# The stand-in


def answering(model: Any, found: Found | None = None, n: int = 16) -> tuple[Any, Answers]:
    spec = model.diffusion_spec
    answers = Answers(
        found or Found(), "generate", model, spec, plan(spec, PROMPT, DecodingOptions(max_tokens=n, cache="none"))
    )
    return stand_in(found or Found(), answers), answers


def ids_of(*ids: int) -> Any:
    return torch.tensor([ids])


def whole_logits(model: Any, ids: list[int]) -> np.ndarray:
    family = model.diffusion_family
    return np.array(family.head(model, family.hidden(model, mx.array([ids]), [])))


def test_logits_of_the_whole_canvas() -> None:
    model = tiny()
    model_there, answers = answering(model)
    out = model_there(ids_of(1, 2, 3))
    assert answers.forwards == 1 and not model.saw  # computed when they are asked for
    assert out.logits.dtype == torch.float32 and out[0] is out.logits and out["logits"] is out.logits
    assert list(out) == [out.logits, None] and out.past_key_values is None
    assert np.array_equal(out.logits.numpy(), whole_logits(model, [1, 2, 3]))
    assert model_there(torch.tensor([[1, 2], [3, 4]])).logits.shape == (2, 2, VOCAB)
    assert model_there.eval() is model_there and not model_there.training and model_there.device.type == "cpu"


def test_a_cache_of_ours() -> None:
    """Prefill, a block that is not stored, the block, the next one."""
    model = tiny(block=4)
    there, answers = answering(model)
    past = there(ids_of(1, 2, 3, 4), use_cache=True).past_key_values
    assert past.get_seq_length() == 4 and bool(past)
    out = there(ids_of(5, MASK, 7, 8), past_key_values=past, position_ids=torch.arange(4, 8)[None], store_kv=False)
    assert past.get_seq_length() == 4
    assert np.array_equal(out.logits.numpy(), whole_logits(model, [1, 2, 3, 4, 5, MASK, 7, 8])[:, 4:])
    there(ids_of(5, 6, 7, 8), past_key_values=past, cache_position=torch.arange(4, 8), store_kv=True)
    out = there(ids_of(9), past_key_values=past)
    assert np.array_equal(out.logits.numpy(), whole_logits(model, [1, 2, 3, 4, 5, 6, 7, 8, 9])[:, 8:])
    past.crop(4)
    assert past.get_seq_length() == 4 and answers.forwards == 4


def test_a_cache_of_transformers() -> None:
    from transformers import DynamicCache

    there, _ = answering(tiny(block=4))
    past = DynamicCache()
    there(ids_of(1, 2, 3, 4), past_key_values=past)
    assert past.get_seq_length() == 4
    there(ids_of(5, 6), past_key_values=past, store_kv=False)
    assert past.get_seq_length() == 4


def test_a_class_that_stores_only_when_it_is_told_to() -> None:
    there, _ = answering(tiny(block=4), Found(model_class=FastDLLM))
    past = there(input_ids=ids_of(1, 2, 3, 4), use_cache=True, update_past_key_values=True).past_key_values
    there(input_ids=ids_of(5), use_cache=True, past_key_values=past)
    assert past.get_seq_length() == 4


def test_blocks_from_the_prompts_end() -> None:
    """Of a prompt of 5 tokens and blocks of 4: the first block has one token."""
    model = tiny(block=4, block_origin="prompt_end")
    model.layers = [None]
    there, _ = answering(model)
    visible = torch.tensor([[True, False, False], [True, True, True], [True, True, True]])
    assert there(ids_of(1, 2, 3), attention_mask=visible[None, None]).logits.shape == (1, 3, VOCAB)
    assert np.array_equal(np.array(model.caches[0].make_mask(3))[0, 0], visible.numpy())
    with pytest.raises(DiffusionError, match="position 0 sees position 1"):
        there(ids_of(1, 2, 3), attention_mask=torch.ones(1, 1, 3, 3))


def block_mask(length: int, block: int) -> Any:
    number = torch.arange(length) // block
    return (number[None] <= number[:, None])[None, None]


@pytest.mark.parametrize("kind", ["bool", "0/1", "0/-inf", "0/min", "three", "int", "heads"])
def test_masks_that_are_the_models(kind: str) -> None:
    there, answers = answering(tiny(block=4))
    mask = block_mask(8, 4)
    there(
        ids_of(*range(1, 9)),
        attention_mask={
            "bool": mask,
            "0/1": mask.to(torch.bfloat16),
            "0/-inf": torch.where(mask, 0.0, -torch.inf).to(torch.bfloat16),
            "0/min": torch.where(mask, 0.0, torch.finfo(torch.float16).min).to(torch.float16),
            "three": mask[0],
            "int": mask.long(),
            "heads": mask.expand(1, 3, 8, 8),
        }[kind],
    )
    assert answers.notes == (
        [
            "generate gives its model attention_mask of the numbers 0 and 1, which some code adds to the scores, so "
            "that nothing is hidden; it is read as what may be seen."
        ]
        if kind == "0/1"
        else []
    )


def test_masks_that_hide_nothing() -> None:
    there, answers = answering(tiny())
    for mask in (torch.ones(1, 4), torch.ones(1, 1, 4, 4), torch.zeros(1, 1, 4, 4), "full", torch.ones(1, 4, 4).bool()):
        there(ids_of(1, 2, 3, 4), attention_mask=mask)
    there, answers = answering(tiny(block=4))
    there(ids_of(1, 2, 3, 4), torch.ones(1, 4))  # by its place
    past = there(ids_of(1, 2, 3, 4), use_cache=True).past_key_values
    there(ids_of(5, 6, 7, 8), attention_mask=torch.ones(1, 1, 4, 8), past_key_values=past)  # the block sees all of it
    assert not answers.notes


ANOTHER = (
    "and the checkpoint's attention (block_causal, blocks of 4) is another: give the block length with --set, or the "
    "sampler that belongs to the checkpoint."
)
ODD = torch.where(block_mask(8, 4), 0.0, -3.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"attention_mask": "full"},
            f"generate calls its model with attention_mask in which position 0 sees position 4, {ANOTHER}",
        ),
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, f"position 0 sees position 4, {ANOTHER}"),
        ({"attention_mask": block_mask(8, 2)}, f"position 0 does not see position 2, {ANOTHER}"),
        ({"attention_bias": torch.where(block_mask(8, 2), 0.0, -torch.inf)}, "attention_bias in which position 0 does"),
        (
            {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])},
            "attention_mask that hides columns of the canvas",
        ),
        (
            {"attention_mask": ODD},
            "attention_mask of other numbers than 0 and a large negative one, which the stand-in",
        ),
        ({"attention_mask": torch.ones(1, 1, 8, 9)}, "attention_mask of shape [1, 1, 8, 9] for [8, 8] columns"),
        ({"attention_mask": "causal"}, "with attention_mask, 'causal', which the stand-in cannot answer"),
        ({"attention_mask": [1]}, "with attention_mask, a list, which the stand-in cannot answer"),
        ({"inputs_embeds": torch.ones(1, 8, 4)}, "with inputs_embeds, a Tensor of shape [1, 8, 4], which the stand-in"),
        ({"output_attentions": True}, "with output_attentions, True, which the stand-in cannot answer: give a sampler"),
        (
            {"block_size": 8},
            "with block_size 8, and its attention here has blocks of 4: give the block length with --set",
        ),
        ({"position_ids": torch.arange(1, 9)[None]}, "on tokens from position 1 on, with 0 tokens in past_key_values"),
        ({"position_ids": torch.zeros(1, 8)}, "with position_ids that do not count up, which the stand-in cannot"),
        (
            {"past_key_values": ((1, 2),)},
            "gives its model past_key_values (a tuple) that the stand-in cannot keep tokens in",
        ),
        ({"input_ids": torch.rand(1, 8)}, "on a Tensor of shape [1, 8], where token ids of shape [batch, length] are"),
        ({"input_ids": torch.tensor([1, 2])}, "on a Tensor of shape [2], where token ids of shape"),
        ({"input_ids": ids_of(1, VOCAB)}, f"on token id {VOCAB}, outside the vocabulary of {VOCAB}."),
        ({"input_ids": ids_of(1, -1)}, f"on token id -1, outside the vocabulary of {VOCAB}."),
        ({"input_ids": torch.ones(1, 65).long()}, "on 65 tokens, and the model's context is 64, which the stand-in"),
    ],
)
def test_calls_that_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    there, answers = answering(tiny(block=4))
    with pytest.raises(DiffusionError) as caught:
        there(**{"input_ids": ids_of(*range(1, 9)), **arguments})
    assert sentence in str(caught.value) and answers.refusal is caught.value


def test_arguments_that_ask_for_nothing() -> None:
    there, _ = answering(tiny(block=4))
    there(ids_of(1, 2), inputs_embeds=None, output_attentions=False, logits_to_keep=0, block_size=4, return_dict=True)


def test_keys_and_values_are_not_there() -> None:
    """Fast-dLLM's caches cut them."""
    there, _ = answering(tiny())
    past = there(ids_of(1, 2), use_cache=True).past_key_values
    for read in (lambda: past[0], lambda: len(past), lambda: list(past)):
        with pytest.raises(
            DiffusionError, match="generate reads the keys and values in past_key_values, and the stand-in"
        ):
            read()
