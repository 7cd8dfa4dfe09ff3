"""`mlx-dllm verify` as a command: each family against its reference, faults found through it, and its refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_dllm_plugin import layerwise
from mlx_dllm_plugin.commands import main
from mlx_dllm_plugin.demo import demo_path
from tests import tools
from tests.test_families_qwen import TWINS, twin
from tests.tools import ERROR, copy_run, edit_json

pytest.importorskip("torch", reason="the reference is torch")

ROOT = Path(__file__).resolve().parent
OURS = str(ROOT / "references" / "llada2_moe.py")
GOLDENS = {
    "a2d/gpt2-grow/run": "GPT2LMHeadModel",
    "a2d/qwen2-reuse/run": "Qwen2ForCausalLM",
    "a2d/gemma-grow/run": "GemmaForCausalLM",
    "a2d/gemma3-grow/run": "Gemma3ForCausalLM",
    "a2d/llama-grow/run": "LlamaForCausalLM",
    "a2d/mistral-grow/run": "MistralForCausalLM",
    "llada_dream/dream-tiny": "Qwen2ForCausalLM",
    "llada_dream/llada-8b-tiny": "LlamaForCausalLM",
    "llada_dream/llada-gqa-tiny": "LlamaForCausalLM",
    "llada_dream/llada-moe-tiny": "Qwen3MoeForCausalLM",
    "llada_dream/modernbert-tiny": "ModernBertForMaskedLM",
    "block/a2d_qwen3-mdlm": "Qwen3ForCausalLM",
    "block/a2d_qwen3-bd3lm": "Qwen3ForCausalLM",
    "block/fast_dllm_v2-b32": "Qwen2ForCausalLM",
    "block/sdar-b4": "Qwen3ForCausalLM",
    "block/llada2_moe-v20": OURS,
    "block/llada2_moe-v21": OURS,
    "block/llada2_moe-v22": OURS,
    "block/llada2_moe-v22-b8": OURS,
}


class Outcome(tools.Outcome):
    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = main(["verify", *map(str, arguments)])
        return Outcome(status, *capsys.readouterr())

    return run


def refused(outcome: Outcome) -> str:
    assert outcome.status == 1 and outcome.out == ""
    assert outcome.err.startswith(ERROR) and outcome.err.count("\n") == 1, outcome.err
    return outcome.err.removeprefix(ERROR).strip()


def reference_of(name: str) -> list[str]:
    return ["--reference", GOLDENS[name]] if GOLDENS[name].endswith(".py") else []


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_equal_their_references(name: str, goldens: Path, verify: Callable[..., Outcome]) -> None:
    outcome = verify(goldens / name, "--json", *reference_of(name))
    report = outcome.report
    assert outcome.status == 0 and report["problems"] == []
    assert Path(GOLDENS[name]).name.removesuffix(".py") in report["reference"].replace("LLaDA2MoeModelLM of ", "")
    assert report["agreeing"] == report["masked"] == report["columns"] // 2 == 32
    for part in report["parts"]:
        largest, mean = part["error"]
        assert largest <= part["allowed"][0] and mean <= part["allowed"][1] and mean <= largest
        assert part["rounding"] is not None and part["rounding"][0] < part["allowed"][0]
    sparse = [part["experts"] for part in report["parts"] if part["experts"] is not None]
    assert sparse == [1.0] * (2 if "moe" in name else 0)
    assert 0 < report["peak_bytes"]["reference"] and 0 < report["peak_bytes"]["here"]


@pytest.mark.parametrize("name", TWINS)
def test_every_other_family_equals_its_class(name: str, tmp_path: Path, verify: Callable[..., Outcome]) -> None:
    twin(tmp_path, name)
    outcome = verify(tmp_path, "--json", "--length", 24)
    assert outcome.status == 0 and outcome.report["family"] == name, outcome.report["problems"]


def test_the_table(goldens: Path, verify: Callable[..., Outcome]) -> None:
    outcome = verify(goldens / "block/llada2_moe-v22", *reference_of("block/llada2_moe-v22"))
    lines = outcome.out.splitlines()
    assert outcome.status == 0 and outcome.err == ""
    assert lines[1] == "llada2_moe, float32, blocks of 32, 64 columns of which 32 are masked"
    assert lines[2] == "reference: LLaDA2MoeModelLM of llada2_moe.py"
    assert lines[4].split("  ")[0] == "part" and lines[4].endswith("mean error  rounding  allowed  same experts")
    names = [line.split("  ")[0].strip() for line in lines[5:11]]
    assert names == ["embedding", "layer 0", "layer 1", "layer 2", "norm", "head"]
    assert lines[6].split()[-1] == "-" and lines[7].endswith("100.0 %")
    assert lines[12].startswith("argmax on masked positions: 32 of 32 the same; logits end to end differ by up to ")
    assert lines[13].startswith("memory: up to ") and lines[-1] == "No problems."
    assert len({len(line) for line in lines[4:11]}) == 1


# Faults


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Makes the model that is loaded here a wrong one."""

    def spoil(change: Callable[[Any], None]) -> None:
        real = layerwise.load_lazily

        def load(*args: Any) -> Any:
            model = real(*args)
            change(model)
            return model

        monkeypatch.setattr(layerwise, "load_lazily", load)

    return spoil


def transposed(model: Any) -> None:
    layer = model.layers[1].self_attn.o_proj
    layer.weight = layer.weight.T


def missing_norm(model: Any) -> None:
    model.layers[2].input_layernorm = lambda x: x


def wrong_rope(model: Any) -> None:
    model.layers[0].self_attn.rope.base = 20000.0


def off_by_one(model: Any) -> None:
    table = model.model.wpe.weight
    model.model.wpe.weight = mx.concatenate([table[1:], table[:1]])


def grouped_routing(model: Any) -> None:
    import dataclasses

    model.layers[1].mlp.gate.args = dataclasses.replace(model.args, expert_capacity=0)


@pytest.mark.parametrize(
    ("name", "change", "where"),
    [
        ("a2d/gpt2-grow/run", off_by_one, "embedding"),
        ("a2d/qwen2-reuse/run", transposed, "layer 1"),
        ("a2d/gemma3-grow/run", missing_norm, "layer 2"),
        ("block/sdar-b4", wrong_rope, "layer 0"),
        ("block/llada2_moe-v22", grouped_routing, "layer 1"),
    ],
)
def test_a_fault_is_located(
    name: str,
    change: Callable[[Any], None],
    where: str,
    goldens: Path,
    verify: Callable[..., Outcome],
    spoilt: Callable[..., None],
) -> None:
    spoilt(change)
    outcome = verify(goldens / name, *reference_of(name))
    lines = outcome.out.splitlines()
    assert outcome.status == 1 and lines[-1] == "1 problem."
    assert lines[-2].startswith(f"problem: {where}: ")
    assert [line for line in lines if line.endswith("OVER")] == [next(line for line in lines if line.startswith(where))]
    found = verify(goldens / name, "--json", *reference_of(name))
    assert found.status == 1
    assert [part["name"] for part in found.report["parts"] if part["problem"]] == [where]


def test_another_block_of_experts_is_noticed(goldens: Path, tmp_path: Path, verify: Callable[..., Outcome]) -> None:
    """The mask is made from the same spec on both sides; the experts are the reference's own affair."""
    path = copy_run(goldens / "block" / "llada2_moe-v22", tmp_path / "other")
    edit_json(path / "config.json", block_size=16)
    reference = tmp_path / "fixed.py"
    reference.write_text(Path(OURS).read_text().replace("self.config.block_size", "32"))
    outcome = verify(path, "--reference", reference, "--json")
    assert outcome.status == 1 and {part["name"] for part in outcome.report["parts"] if part["problem"]} <= {
        "layer 1",
        "layer 2",
    }


def test_dtype_of_the_checkpoint(goldens: Path, tmp_path: Path, verify: Callable[..., Outcome]) -> None:
    path = copy_run(goldens / "block" / "sdar-b4", tmp_path / "sdar-b4")
    weights = dict(mx.load(str(path / "model.safetensors")))
    mx.eval(weights)
    half = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), half, metadata={"format": "pt"})
    single, own = verify(path, "--json"), verify(path, "--json", "--dtype", "checkpoint")
    assert (single.status, own.status) == (0, 0)
    assert (single.report["dtype"], own.report["dtype"]) == ("float32", "bfloat16")
    assert single.report["parts"][2]["error"][0] < 1e-3 < own.report["parts"][2]["error"][0]


def test_options_decide(goldens: Path, verify: Callable[..., Outcome], spoilt: Callable[..., None]) -> None:
    path = goldens / "block/sdar-b4"
    report = verify(path, "--json", "--length", 18, "--seed", 3, "--yardstick", "none", "--prompt", "Hello").report
    assert report["columns"] == 16 and report["seed"] == 3  # whole blocks
    assert all(part["rounding"] is None for part in report["parts"])

    def little(model: Any) -> None:
        model.lm_head.weight = model.lm_head.weight * (1 + 1e-4)

    spoilt(little)
    assert verify(path).status == 1 and verify(path, "--tolerance", 10000).status == 0


def test_a_raw_checkpoint_needs_its_mask_and_no_tokenizer(goldens: Path, verify: Callable[..., Outcome]) -> None:
    run = goldens / "a2d" / "gpt2-partial" / "run"
    assert "give mask_token_id" in refused(verify(run))
    outcome = verify(run, "--mask-token-id", 320, "--json")
    assert outcome.status == 0 and outcome.report["problems"] == []
    assert "no tokenizer files: give their directory with --tokenizer" in refused(
        verify(run, "--mask-token-id", 320, "--prompt", "x")
    )
    source = goldens / "a2d" / "gpt2-partial" / "source_tokenizer"
    assert verify(run, "--mask-token-id", 320, "--prompt", "x", "--tokenizer", source).status == 0


# Refusals


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Give the directory of a checkpoint to verify, or --self."),
        (["CHECKPOINT", "--self"], "leave out the checkpoint"),
        (["--self", "--sampler"], "--self and --sampler are two ways to verify: choose one."),
        (["--self", "--length", "8"], "--length says nothing about --self: leave it out."),
        (["--self", "--trust-remote-code"], "--trust-remote-code says nothing about --self: leave it out."),
        (["--self", "--prompt", "x"], "--prompt says nothing about --self: leave it out."),
        (["CHECKPOINT", "--max-tokens", "8"], "--max-tokens says nothing about the comparison of layers"),
        (["CHECKPOINT", "--sampler", "--yardstick", "none"], "--yardstick says nothing about --sampler"),
        (["CHECKPOINT", "--length", "1"], "--length must be 2 or more, got 1."),
        (["CHECKPOINT", "--tolerance", "nan"], "--tolerance must be a number above 0, got nan."),
        (["CHECKPOINT", "--seed", "-1"], "--seed must be 0 or more, got -1."),
        (["CHECKPOINT", "--reference", "/nowhere.py"], "/nowhere.py"),
        (["CHECKPOINT", "--mask-token-id", "4000"], "mask_token_id must be an id within the embedding"),
        (["CHECKPOINT", "--family", "gpt3"], "gpt3"),
        (["/nowhere"], "/nowhere does not exist"),
        (
            ["CHECKPOINT", "--sampler", "--set", "steps"],
            "--set must be NAME=VALUE, such as --set steps=16, got 'steps'.",
        ),
    ],
)
def test_refusals(arguments: list[str], sentence: str, path: Path, verify: Callable[..., Outcome]) -> None:
    assert sentence in refused(verify(*(path if word == "CHECKPOINT" else word for word in arguments)))


def test_an_autoregressive_checkpoint_is_none_of_ours(ar: Path, verify: Callable[..., Outcome]) -> None:
    assert "is no diffusion checkpoint (model_type 'llama'" in refused(verify(ar))


def test_a_quantized_copy_is_verified_by_its_original(tmp_path: Path, verify: Callable[..., Outcome]) -> None:
    from mlx_lm.convert import convert

    target = tmp_path / "copy"
    convert(str(demo_path()), str(target), quantize=True, q_bits=4, report=False)
    assert "quantized" in refused(verify(target))


def test_without_torch_it_says_what_to_install(
    path: Path, verify: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    assert 'pip install "mlx-dllm-plugin[verify]"' in refused(verify(path))


def test_weights_that_the_reference_does_not_have_are_a_problem(copied: Path, verify: Callable[..., Outcome]) -> None:
    file = copied / "model" / "model.safetensors"
    weights = dict(mx.load(str(file)))
    mx.eval(weights)
    stored = {f"transformer.h.{i}.attn.bias": mx.ones((1, 1, 64, 64)) for i in range(2)}
    mx.save_safetensors(str(file), {**weights, **stored}, metadata={"format": "pt"})
    assert verify(copied).status == 0  # stored masks are no weights


def test_the_demo(verify: Callable[..., Outcome]) -> None:
    outcome = verify(demo_path(), "--prompt", "What is 27 + 48?", "--json")
    assert outcome.status == 0 and outcome.report["agreeing"] == outcome.report["masked"]


def test_bytes_of_the_checkpoint_stay(path: Path, tmp_path: Path, verify: Callable[..., Outcome]) -> None:
    target = tmp_path / "run"
    shutil.copytree(path, target)
    before = {file: file.read_bytes() for file in target.rglob("*") if file.is_file()}
    assert verify(target).status == 0
    assert {file: file.read_bytes() for file in target.rglob("*") if file.is_file()} == before


# The sampler, and this device


def test_the_sampler(goldens: Path, verify: Callable[..., Outcome]) -> None:
    arguments = [goldens / "block/sdar-b4", "--sampler", "--max-tokens", 12]
    reference = f"{ROOT / 'references' / 'generate_sdar.py'}:block_diffusion_generate"
    outcome = verify(*arguments, "--reference", reference, "--set", "remasking_strategy=sequential")
    lines = outcome.out.splitlines()
    assert outcome.status == 0 and outcome.err == ""
    assert lines[1] == "reference: block_diffusion_generate of generate_sdar.py, with the logits of the model here"
    assert "remasking_strategy sequential" in lines[2] and "unmasking sequential" in lines[3]
    assert lines[-1] == "All 12 tokens are the same."
    report = verify(*arguments, "--reference", reference, "--json").report
    assert report["our_tokens"] == report["reference_tokens"] and report["first_difference"] is None


def test_a_sampler_that_differs(goldens: Path, tmp_path: Path, verify: Callable[..., Outcome]) -> None:
    """It takes the second best token at the fifth position it writes."""
    file = tmp_path / "generate.py"
    file.write_text(
        "import torch\n"
        "def generate(model, prompt, gen_length=8, mask_id=0):\n"
        "    x = torch.cat([prompt, torch.full((1, gen_length), mask_id)], dim=1)\n"
        "    for i in range(prompt.shape[1], x.shape[1]):\n"
        "        order = model(x).logits[0, i].argsort(descending=True)\n"
        "        x[0, i] = order[1 if i == prompt.shape[1] + 4 else 0]\n"
        "    return x\n"
    )
    path = goldens / "block/sdar-b4"
    outcome = verify(path, "--sampler", "--reference", file, "--max-tokens", 8, "--json")
    at = outcome.report["first_difference"]
    assert outcome.status == 1 and at is not None and at <= 4
    text = verify(path, "--sampler", "--reference", file, "--max-tokens", 8)
    lines = text.out.splitlines()
    assert text.status == 1 and lines[-1].startswith(f"problem: token {at} of the output is the first that differs: ")
    assert lines[-3].startswith("there: ") and lines[-2].startswith("here:  ")


def test_a_class_without_a_sampler_of_its_own(path: Path, verify: Callable[..., Outcome]) -> None:
    assert "decodes from left to right: give the authors' file" in refused(verify(path, "--sampler"))


def test_a_file_that_only_decodes_has_no_layers(path: Path, verify: Callable[..., Outcome]) -> None:
    file = ROOT / "references" / "generate_sdar.py"
    assert "generate_sdar.py is no model" in refused(verify(path, "--reference", file))


def test_this_device(verify: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = verify("--self")
    lines = outcome.out.splitlines()
    assert outcome.status == 0 and lines[0] == "### mlx-dllm verify --self"
    found = lines[-1].split()
    assert found[0] == "matched" and found[1] == found[3] and int(found[1]) >= 20
    report = verify("--self", "--json").report
    assert report["matched"] == report["of"] == int(found[1]) == len(report["rows"])

    from mlx_dllm_plugin import caches

    monkeypatch.setattr(caches.BlockWindow, "_mask", lambda *args: None)  # block-causal models see everything
    outcome = verify("--self")
    assert outcome.status == 1 and "FAIL" in outcome.out and "sdar-b4" in outcome.out.split("FAIL", 1)[1]


def test_a_terminal_sees_a_bar_that_goes_away(
    path: Path, verify: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import sys

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert verify(path).status == 0
    shown = terminal.getvalue()
    assert "0/10" in shown and "1/10 reference, embedding" in shown
    assert shown.endswith("\r") and shown.rstrip("\r").split("\r")[-1].strip() == ""  # wiped
    terminal.truncate(0)
    assert verify(path, "--json").status == 0 and "layer" not in terminal.getvalue()


def test_an_interrupt_is_one_line(path: Path, verify: Callable[..., Outcome], spoilt: Callable[..., None]) -> None:
    def interrupt(model: Any) -> None:
        raise KeyboardInterrupt

    spoilt(interrupt)
    outcome = verify(path)
    assert (outcome.status, outcome.out, outcome.err) == (130, "", "[mlx-dllm-plugin] interrupted\n")
