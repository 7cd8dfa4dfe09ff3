"""The torch side of ``mlx-dllm verify``: what computes a reference, that it is run part by part in little memory, and
that it computes what the whole model of the original does."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dllm_plugin.checkpoint import Checkpoint, open_checkpoint
from mlx_dllm_plugin.errors import CheckpointError, DiffusionError
from mlx_dllm_plugin.families import Family
from mlx_dllm_plugin.spec import DiffusionSpec, detect, resolve
from mlx_dllm_plugin.verify.trace import Trace
from tests.models import write_json
from tests.test_families_llada import LLAMA, MODERNBERT, MOE, bert, built, converted, illada, moe_names, olmo
from tests.test_families_qwen import IDS, TWINS, VOCAB, convert, read, rewrite, twin, vlm_layout
from tests.tools import copy_run, edit_json

torch = pytest.importorskip("torch", reason="the reference is torch")
transformers = pytest.importorskip("transformers")

from mlx_dllm_plugin.verify import find as looking  # noqa: E402
from mlx_dllm_plugin.verify import reference as side  # noqa: E402
from mlx_dllm_plugin.verify.find import Found, find  # noqa: E402
from mlx_dllm_plugin.verify.reference import Reference  # noqa: E402

TOLERANCE = 2e-4  # measured: up to 6.4e-5 against goldens of other versions of torch, at most 1e-5 against this one
ROUNDING = 1e-5  # of the states' spread, at most; measured: 1e-8 to 7e-6
LLADA2 = Path(__file__).parent / "references" / "llada2_moe.py"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than these sizes are worth."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers copies code to before it runs it."""
    from transformers import dynamic_module_utils

    folder = dynamic_module_utils.HF_MODULES_CACHE
    path = list(sys.path)
    known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "transformers_modules"}

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    forget()
    sys.path[:] = [entry for entry in path if entry != folder]
    dynamic_module_utils.HF_MODULES_CACHE = str(tmp_path_factory.mktemp("modules"))
    yield
    forget()
    dynamic_module_utils.HF_MODULES_CACHE = folder
    sys.path[:] = path
    sys.modules.update(known)


def opened(path: Path, block: int | None = 0) -> tuple[Checkpoint, Family, DiffusionSpec]:
    """A checkpoint, its family and its spec; with a block length or None, of that attention instead."""
    checkpoint = open_checkpoint(path)
    family = detect(checkpoint)
    assert family is not None
    spec = resolve(checkpoint, family)
    if block != 0:
        attention: Any = "block_causal" if block else "bidirectional"
        spec = dataclasses.replace(spec, attention=attention, defaults={**spec.defaults, "block_length": block})
    return checkpoint, family, spec


def found_in(path: Path, which: object = "hf", block: int | None = 0, **allowed: bool) -> Found:
    return find(*opened(path, block), str(which), **allowed)


def reference(path: Path, which: object = "hf", block: int | None = 0, **settings: Any) -> Reference:
    checkpoint, family, spec = opened(path, block)
    found = find(checkpoint, family, spec, str(which), trust_remote_code=which == "own")
    return Reference(found, checkpoint, spec, **settings)


def trace(path: Path, ids: Any, which: object = "hf", block: int | None = 0, **settings: Any) -> Trace:
    return reference(path, which, block, **settings).trace([int(i) for i in ids])


def distance(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def sentence(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DiffusionError) as error:
        call(*args, **kwargs)
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text
    return text


def check_roundings(found: Trace, *, exact_embedding: bool = True) -> None:
    """Every layer rounds, and none by more than rounding."""
    for stage in (*found.layers, found.norm, found.head):
        assert stage.rounding is not None
        most, mean = stage.rounding
        assert 0 < mean <= most < ROUNDING * max(1, float(stage.states.std()))
    assert found.embedding.rounding is not None and (found.embedding.rounding[0] == 0) == exact_embedding


# --- the goldens of the original implementations

GOLDENS: dict[str, tuple[str, str, int | None]] = {  # folder: names of the ids and logits, block (0: its own)
    **{f"a2d/{name}/run": ("seq{}_ids", "seq{}_logits", 0) for name in ("gpt2-grow", "gpt2-partial", "gemma-grow")},
    **{f"a2d/{name}/run": ("seq{}_ids", "seq{}_logits", 0) for name in ("gemma3-grow", "llama-grow", "mistral-grow")},
    "a2d/qwen2-reuse/run": ("seq{}_ids", "seq{}_logits", 0),
    **{f"llada_dream/{name}": ("fwd{}_ids", "fwd{}_logits", 0) for name in ("dream-tiny", "llada-8b-tiny")},
    **{f"llada_dream/{name}": ("fwd{}_ids", "fwd{}_logits", 0) for name in ("llada-gqa-tiny", "llada-moe-tiny")},
    "llada_dream/modernbert-tiny": ("fwd{}_ids", "fwd{}_logits", 0),
    **{f"block/{name}": ("ids{}", "logits{}", 0) for name in ("sdar-b4", "fast_dllm_v2-b32")},
    "block/a2d_qwen3-mdlm": ("ids{}", "logits_bidir{}", None),
    "block/a2d_qwen3-bd3lm": ("ids{}", "logits_block{}", 8),
}


def golden(folder: Path) -> Any:
    return np.load((folder if (folder / "golden.npz").is_file() else folder.parent) / "golden.npz")


@pytest.mark.parametrize("name", GOLDENS)
def test_transformers_class_computes_what_the_original_did(name: str, goldens: Path) -> None:
    ids_name, logits_name, block = GOLDENS[name]
    arrays, seen = golden(goldens / name), reference(goldens / name, block=block)
    assert seen.unused == []
    for j in (0, 1):
        ids, logits = np.ravel(arrays[ids_name.format(j)]), arrays[logits_name.format(j)]
        logits = logits.reshape(-1, logits.shape[-1])
        stages: list[str] = []
        found = seen.trace(ids[: len(logits)].tolist(), stages.append)
        assert distance(found.head.states, logits) < TOLERANCE < 1 < logits.std()
        check_roundings(found, exact_embedding=not any(kind in name for kind in ("gpt2", "gemma", "modernbert")))
        layers = [f"layer {i}" for i in range(len(found.layers))]
        assert stages == ["embedding", *layers, "norm", "head"]
        hidden = arrays.get(logits_name.format(j).replace("logits", "hidden"))
        if hidden is not None:
            parts = (found.embedding, *found.layers, found.norm)
            assert max(distance(part.states, wanted) for part, wanted in zip(parts, hidden, strict=True)) < TOLERANCE
        top_k = json.loads((open_checkpoint(goldens / name).path / "config.json").read_text()).get(
            "num_experts_per_tok"
        )
        for stage in found.layers:
            assert top_k is None if stage.experts is None else stage.experts.shape == (len(logits), top_k)


@pytest.mark.parametrize("name", ["llada2_moe-v20", "llada2_moe-v21", "llada2_moe-v22", "llada2_moe-v22-b8"])
def test_our_file_of_llada2_computes_what_the_original_did(name: str, goldens: Path) -> None:
    folder = goldens / "block" / name
    arrays, seen = golden(folder), reference(folder, LLADA2)
    for j in (0, 1):
        found = seen.trace(arrays[f"ids{j}"].tolist())
        assert found.reference == "LLaDA2MoeModelLM of llada2_moe.py"
        assert distance(found.head.states, arrays[f"logits{j}"]) < TOLERANCE
        parts = (found.embedding, *found.layers, found.norm)
        assert max(distance(part.states, h) for part, h in zip(parts, arrays[f"hidden{j}"], strict=True)) < TOLERANCE
        chosen = [stage.experts for stage in found.layers]
        assert chosen[0] is None
        for ids, wanted in zip(chosen[1:], arrays[f"expert_ids{j}"], strict=True):
            assert np.array_equal(np.sort(ids), np.sort(wanted))
        check_roundings(found)


def test_our_file_of_llada2_decodes_as_the_original_did(goldens: Path) -> None:
    from safetensors.torch import load_file

    from tests.references.llada2_moe import LLaDA2MoeModelLM

    folder = goldens / "block" / "llada2_moe-v20"
    model = LLaDA2MoeModelLM(SimpleNamespace(**json.loads((folder / "config.json").read_text())))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    cases = json.loads((folder / "golden.json").read_text())
    ids = {"mask_id": cases["ids"]["mask"], "eos_id": cases["ids"]["eos"]}
    assert len(cases["generations"]) == 15
    for case in cases["generations"]:
        answer = model.generate(torch.tensor([case["prompt_ids"]]), **ids, **case["settings"])
        assert answer[0].tolist() == case["output_ids"], case["name"]


# --- families without a golden, against transformers' class with the same weights


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_of_every_family(name: str, tmp_path: Path) -> None:
    whole = twin(tmp_path, name)
    for block in (None, 4):
        found = trace(tmp_path, IDS[0], block=block)
        assert distance(found.head.states, whole(block)[0]) < 1e-5
        assert f"{TWINS[name][0]}ForCausalLM of transformers {transformers.__version__}" in found.reference
        assert found.reference.endswith("without its causal mask" if block is None else "in blocks of 4")
        check_roundings(found)
        assert all((stage.experts is not None) == (name == "sdar_moe") for stage in found.layers)


def without_mask(model: Any, ids: Any) -> np.ndarray:
    module = sys.modules[type(model).__module__]
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        if hasattr(module, "create_causal_mask"):
            patch.setattr(module, "create_causal_mask", lambda *args, **kwargs: None)
        logits: np.ndarray = model(torch.tensor(ids)[None]).logits[0].numpy()
        return logits


CANVAS = np.random.default_rng(0).integers(0, 90, 18)
OLMO = {
    **{"self_attn.o_proj": "attn_out", "self_attn.": "", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj"},
    **{"mlp.down_proj": "ff_out", "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm"},
    **{"model.layers": "model.transformer.blocks", "model.norm": "model.transformer.ln_f"},
    **{"model.embed_tokens": "model.transformer.wte", "lm_head": "model.transformer.ff_out"},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_twins_of_llada_and_illada(tied: bool, tmp_path: Path) -> None:
    model = built("Llama", LLAMA, tie_word_embeddings=tied)
    wanted = without_mask(model, CANVAS)
    own = converted(model, tmp_path / "llada", olmo(weight_tying=tied), **OLMO)
    same = converted(model, tmp_path / "illada", illada(tie_word_embeddings=tied))
    for path in (own, same):
        assert distance(trace(path, CANVAS).head.states, wanted) < 1e-5


def test_twins_of_llada_moe_and_modernbert(tmp_path: Path) -> None:
    model = built("Qwen3Moe", MOE)
    found = trace(moe_names(model, tmp_path / "moe"), CANVAS)
    assert distance(found.head.states, without_mask(model, CANVAS)) < 1e-5
    assert [None if s.experts is None else s.experts.shape for s in found.layers] == [(18, 3), None, (18, 3)]
    model = built("ModernBertForMaskedLM", MODERNBERT | {"norm_bias": True, "mlp_bias": True, "classifier_bias": True})
    found = trace(bert(tmp_path / "bert", model), CANVAS)
    assert found.reference == f"ModernBertForMaskedLM of transformers {transformers.__version__}"
    assert distance(found.head.states, without_mask(model, CANVAS)) < 1e-5
    check_roundings(found, exact_embedding=False)


NO_CLASS: list[tuple[dict[str, Any], str]] = [
    ({"qk_layernorm": False}, "qk_layernorm = False"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
]


@pytest.mark.parametrize(("changes", "words"), NO_CLASS)
def test_what_no_class_of_transformers_computes(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = moe_names(built("Qwen3Moe", MOE), tmp_path, **changes)
    text = sentence(found_in, path)
    assert words in text and "--reference FILE" in text


# --- weights, as every tool writes them


def same_trace(a: Trace, b: Trace) -> bool:
    """But for the last bits: kernels take another way where weights lie otherwise in memory."""
    one, other = ((t.embedding, *t.layers, t.norm, t.head) for t in (a, b))
    return max(distance(x.states, y.states) for x, y in zip(one, other, strict=True)) < TOLERANCE / 2


@pytest.mark.parametrize(
    "name", ["a2d/gpt2-grow/run/model", "a2d/gemma3-grow/run/model", "block/sdar-b4", "block/llada2_moe-v20",
             "llada_dream/llada-8b-tiny", "llada_dream/llada-moe-tiny", "llada_dream/modernbert-tiny"],
)  # fmt: skip
def test_copies_of_mlx_lm_and_mlx_vlm_are_read(name: str, goldens: Path, tmp_path: Path) -> None:
    """The golden of gpt2 has square matrices, which only their names tell from transposed ones."""
    which = LLADA2 if "llada2" in name else "hf"
    ids = np.arange(40) * 7 % 290
    wanted = trace(goldens / name, ids, which, yardstick="none")
    copy = convert(goldens / name, tmp_path / "copy")
    if "modernbert" in name:  # which the tokenizer says, that is not copied
        edit_json(copy / "config.json", mask_token_id=300)
    seen = reference(copy, which, yardstick="none")
    assert same_trace(seen.trace(ids.tolist()), wanted) and seen.unused == []
    seen = reference(vlm_layout(copy), which, yardstick="none")
    assert same_trace(seen.trace(ids.tolist()), wanted) and seen.unused == []


def test_gpt2_without_its_prefix_with_old_masks_and_a_copied_head(goldens: Path, tmp_path: Path) -> None:
    source = goldens / "a2d" / "gpt2-grow" / "run" / "model"
    wanted, weights = trace(source, range(20)), read(source)
    assert all(name.startswith("transformer.") for name in weights)
    plain = {name.removeprefix("transformer."): value for name, value in weights.items()}
    plain["h.0.attn.bias"] = mx.ones((1, 1, 4, 4), mx.uint8)
    plain["h.0.attn.masked_bias"] = mx.array(-1e4)
    plain["other.weight"] = mx.ones(3)
    seen = reference(rewrite(copy_run(source, tmp_path / "plain"), plain))
    assert same_trace(seen.trace(range(20)), wanted) and seen.unused == ["other.weight"]
    head = {**weights, "lm_head.weight": weights["transformer.wte.weight"]}
    seen = reference(rewrite(copy_run(source, tmp_path / "head"), head))
    assert same_trace(seen.trace(range(20)), wanted) and seen.unused == []


def test_experts_are_read_stacked_apart_and_one_by_one(goldens: Path, tmp_path: Path) -> None:
    """Both ways: transformers' class wants them stacked, our file of LLaDA2 one by one."""
    twin(tmp_path / "stacked", "sdar_moe")
    stacked, single = read(tmp_path / "stacked"), {}
    for name, value in stacked.items():
        layer = name.rpartition(".")[0]
        for expert in range(len(value)):
            if name.endswith("experts.gate_up_proj"):
                for part, half in zip(("gate", "up"), mx.split(value[expert], 2), strict=True):
                    single[f"{layer}.{expert}.{part}_proj.weight"] = half
            elif name.endswith("experts.down_proj"):
                single[f"{layer}.{expert}.down_proj.weight"] = value[expert]
        if ".experts." not in name:
            single[name] = value
    assert len(single) > len(stacked)
    wanted = trace(tmp_path / "stacked", IDS[0], yardstick="none")
    seen = reference(rewrite(Path(shutil.copytree(tmp_path / "stacked", tmp_path / "one")), single), yardstick="none")
    assert same_trace(seen.trace(IDS[0].tolist()), wanted) and seen.unused == []
    apart = convert(tmp_path / "stacked", tmp_path / "apart")
    assert any("switch_mlp" in name for name in read(apart))
    assert same_trace(trace(apart, IDS[0], yardstick="none"), wanted)

    llada2 = copy_run(goldens / "block" / "llada2_moe-v20", tmp_path / "llada2")
    wanted, weights = trace(llada2, IDS[0], LLADA2, yardstick="none"), read(llada2)
    for layer in ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts"):
        gate, up, down = (
            mx.stack([weights.pop(f"{layer}.{e}.{part}_proj.weight") for e in range(16)])
            for part in ("gate", "up", "down")
        )
        weights |= {f"{layer}.gate_up_proj": mx.concatenate([gate, up], axis=1), f"{layer}.down_proj": down}
    seen = reference(rewrite(llada2, weights), LLADA2, yardstick="none")
    assert same_trace(seen.trace(IDS[0].tolist()), wanted) and seen.unused == []


def test_weights_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    twin(tmp_path, "a2d_qwen2")
    weights = read(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path, {key: value for key, value in weights.items() if key != name})
    assert f"no weight for {name} of Qwen2ForCausalLM" in sentence(reference, tmp_path)
    rewrite(tmp_path, {**weights, name: weights[name].T})
    text = sentence(reference, tmp_path)
    assert f"{name} has the shape [32, 48]" in text and "has [48, 32]" in text


@pytest.mark.parametrize("how", ["config", "weights"])
def test_quantized_copies_are_refused(how: str, tmp_path: Path) -> None:
    twin(tmp_path / "original", "a2d_qwen2")
    copy = convert(tmp_path / "original", tmp_path / "copy", group_size=32, bits=4, mode="affine")
    if how == "weights":
        edit_json(copy / "config.json", quantization=..., quantization_config=...)
    text = sentence(reference, copy)
    assert f"{copy} is quantized" in text and "verify the checkpoint it was made from" in text


# --- memory


def test_memory_stays_near_one_layer(tmp_path: Path) -> None:
    """Of 12 layers; the bound is one layer in float64 and the one matrix of it that is being cast."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", model_type="a2d-qwen2", mask_token_id=2)
    layer = sum(value.nbytes for value in model.model.layers[0].parameters())
    total = sum(value.nbytes for value in model.parameters())
    matrix = 64 * 160 * 4
    assert total > 11 * layer
    for yardstick, most in (("none", layer), ("float64", 2 * layer + matrix)):
        seen = reference(tmp_path, yardstick=yardstick)
        assert seen.peak_bytes == 0  # nothing is read before it runs
        seen.trace(range(20))
        assert layer <= seen.peak_bytes <= most < total / 4
        assert all(value.is_meta for value in seen._skeleton.model.parameters())
        assert seen._loader.live == 0


# --- the yardstick


def test_without_a_yardstick_nothing_is_computed_twice(tmp_path: Path) -> None:
    twin(tmp_path, "a2d_qwen3")
    found = trace(tmp_path, IDS[0], yardstick="none")
    assert {stage.rounding for stage in (found.embedding, *found.layers, found.norm, found.head)} == {None}
    assert same_trace(found, trace(tmp_path, IDS[0]))


def test_another_device_is_compared_part_by_part(tmp_path: Path) -> None:
    """The CPU stands for it: the same computation again differs by nothing."""
    twin(tmp_path, "sdar_moe")
    seen = reference(tmp_path)
    seen._precision = side._Precision("cpu", wide=False)
    found = seen.trace(IDS[0].tolist())
    assert {stage.rounding for stage in (found.embedding, *found.layers, found.norm, found.head)} == {(0.0, 0.0)}
    if not torch.backends.mps.is_available():
        assert "This machine has no mps device" in sentence(reference, tmp_path, yardstick="mps")


@pytest.mark.metal
@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs torch's mps device")
def test_mps_is_a_yardstick(tmp_path: Path) -> None:
    twin(tmp_path, "a2d_qwen3")
    found = trace(tmp_path, IDS[0], yardstick="mps")
    assert all(stage.rounding is not None and stage.rounding[0] < 1e-3 for stage in (*found.layers, found.head))


def test_norms_and_softmaxes_are_in_float64_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers casts to float32 inside of them: the yardstick must not, or it would not see what they round."""
    twin(tmp_path, "a2d_qwen3")
    module = sys.modules["transformers.models.qwen3.modeling_qwen3"]
    dtypes: dict[bool, set[Any]] = {False: set(), True: set()}
    forward = module.Qwen3RMSNorm.forward

    def norm(self: Any, states: Any) -> Any:
        wide = states.dtype == torch.float64
        dtypes[wide].add(states.to(torch.float32).pow(2).dtype)
        dtypes[wide].add(torch.nn.functional.softmax(states, dim=-1, dtype=torch.float32).dtype)
        dtypes[wide].add(states.float().dtype)
        dtypes[wide].add(torch.zeros(1).dtype)
        return forward(self, states)

    monkeypatch.setattr(module.Qwen3RMSNorm, "forward", norm)
    trace(tmp_path, IDS[0])
    assert dtypes == {False: {torch.float32}, True: {torch.float64}}
    assert torch.get_default_dtype() == torch.float32


def test_in_the_checkpoints_own_type(tmp_path: Path) -> None:
    twin(tmp_path, "a2d_qwen3")
    rewrite(tmp_path, {name: value.astype(mx.bfloat16) for name, value in read(tmp_path).items()})
    found = trace(tmp_path, IDS[0], dtype="checkpoint")
    config = transformers.Qwen3Config.from_dict(json.loads((tmp_path / "config.json").read_text()))
    whole = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    state = {name: torch.tensor(np.array(value.astype(mx.float32))) for name, value in read(tmp_path).items()}
    whole.load_state_dict(state)
    mask = torch.zeros(1, 1, IDS.shape[1], IDS.shape[1], dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = whole.eval()(torch.tensor(IDS[:1]), attention_mask=mask).logits[0].float().numpy()
    assert np.array_equal(found.head.states, wanted)
    for stage in (*found.layers, found.norm):
        assert np.array_equal(stage.states, torch.tensor(stage.states).bfloat16().float().numpy())
        assert stage.rounding is not None and 1e-4 < stage.rounding[1] < 0.1
    assert distance(trace(tmp_path, IDS[0]).head.states, wanted) > 1e-3


# --- files of one's own

TINY = '''
"""A model whose layers attend as WAY says."""
import torch
from torch import nn

WAY = {way!r}


class Output:
    def __init__(self, logits):
        self.logits = logits


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)

    def forward(self, x, attention_mask):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / 4
        length = x.shape[1]
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        if WAY == "causal" or (WAY == "causal unless told" and attention_mask is None):
            scores = scores.masked_fill(ahead, -torch.inf)
        elif WAY == "takes a mask" or WAY == "causal unless told":
            scores = scores if attention_mask is None else scores + attention_mask[:, 0]
        elif WAY == "adds 0 and 1":
            scores = scores if attention_mask is None else scores + (attention_mask[:, 0] == 0)
        elif WAY == "fails":
            raise KeyError("default")
        return scores.softmax(-1) @ v


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config)

    def forward(self, x, attention_mask):
        return (x + self.attention(x, attention_mask), None)


class TinyModelLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)[0]
        x = self.norm(x)
        return Output(nn.functional.linear(x.to(self.embed.weight.device), self.embed.weight))
'''


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint with TINY in ``modeling_tiny.py`` beside its weights, or another text."""

    def make(way: str = "takes a mask", model_type: str = "sdar", source: str | None = None, **config: Any) -> Path:
        folder = tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}"
        settings = {"hidden_size": 16, "num_hidden_layers": 3, "vocab_size": VOCAB, "mask_token_id": 48}
        auto_map = {"AutoModelForCausalLM": "modeling_tiny.TinyModelLM"}
        write_json(folder / "config.json", {"model_type": model_type, "auto_map": auto_map, **settings, **config})
        (folder / "modeling_tiny.py").write_text((source or TINY).replace("{way!r}", repr(way)))
        random = np.random.default_rng(0)
        weights = {"embed.weight": random.standard_normal((VOCAB, 16))}
        weights |= {f"layers.{i}.attention.qkv.weight": random.standard_normal((48, 16)) / 3 for i in range(3)}
        weights |= {"norm.weight": np.ones(16), "norm.bias": np.ones(16) / 4}
        arrays = {name: mx.array(value.astype(np.float32)) for name, value in weights.items()}
        mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "pt"})
        return folder

    return make


def test_a_file_with_layers_that_return_tuples_and_a_head_that_is_the_embedding(tiny: Callable[..., Path]) -> None:
    from safetensors.torch import load_file

    folder = tiny()
    seen = reference(folder, folder / "modeling_tiny.py")
    found = seen.trace(range(10))
    assert found.reference == "TinyModelLM of modeling_tiny.py"
    model = seen.found.module.TinyModelLM(SimpleNamespace(**json.loads((folder / "config.json").read_text())))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    block = torch.arange(10) // 4
    mask = torch.zeros(1, 1, 10, 10).masked_fill(block[None] > block[:, None], -torch.inf)
    with torch.no_grad():
        wanted = model(torch.arange(10)[None], mask).logits[0].numpy()
    assert distance(found.head.states, wanted) < 1e-5
    states = torch.tensor(found.norm.states) @ model.embed.weight.T
    assert distance(states.detach().numpy(), wanted) < 1e-4
    check_roundings(found)
    assert seen._loader.live == 0

    def rounding(part: Any, before: np.ndarray, after: np.ndarray) -> Any:
        with torch.no_grad():
            error = np.abs(part(torch.tensor(before).double()[None])[0].numpy() - after)
        return pytest.approx((error.max(), error.mean()), rel=1e-6)

    model, wide = model.double(), mask.double()
    assert found.norm.rounding == rounding(model.norm, found.layers[-1].states, found.norm.states)
    assert found.head.rounding == rounding(lambda x: x @ model.embed.weight.T, found.norm.states, found.head.states)
    stages = (found.embedding, *found.layers)
    for before, after, layer in zip(stages, stages[1:], model.layers, strict=False):
        assert after.rounding == rounding(lambda x, layer=layer: layer(x, wide)[0], before.states, after.states)


def test_layers_that_change_their_input_in_place(tiny: Callable[..., Path]) -> None:
    wanted = trace(tiny(), range(10), tiny())
    folder = tiny(
        source=TINY.replace("(x + self.attention(x, attention_mask)", "(x.add_(self.attention(x, attention_mask))")
    )
    found = trace(folder, range(10), folder)
    assert same_trace(found, wanted)
    check_roundings(found)


@pytest.mark.parametrize("way", ["takes a mask", "causal unless told", "open"])
def test_bidirectional_attention_is_found(way: str, tiny: Callable[..., Path]) -> None:
    folder = tiny(way, "a2d-qwen2")
    assert same_trace(
        trace(folder, range(10), folder / "modeling_tiny.py"), trace(tiny("open", "a2d-qwen2"), range(10), folder)
    )


@pytest.mark.parametrize(
    ("way", "model_type", "words"),
    [
        ("causal", "a2d-qwen2", "to both sides"),
        ("causal", "sdar", "from block to block, each of 4 tokens"),
        ("open", "sdar", "from block to block, each of 4 tokens"),
        ("adds 0 and 1", "sdar", "from block to block, each of 4 tokens"),
        ("fails", "sdar", "whatever mask it is given (KeyError: 'default')"),
    ],
)
def test_a_wrong_yardstick_is_refused(way: str, model_type: str, words: str, tiny: Callable[..., Path]) -> None:
    folder = tiny(way, model_type)
    seen = reference(folder, folder / "modeling_tiny.py")
    text = sentence(seen.trace, range(10))
    assert text.startswith("TinyModelLM of modeling_tiny.py does not attend as the checkpoint does") and words in text


def test_transformers_masks_are_replaced_only_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin(tmp_path, "a2d_qwen3")
    module = sys.modules["transformers.models.qwen3.modeling_qwen3"]
    made, register = module.create_causal_mask, torch.nn.Module.register_parameter
    seen = reference(tmp_path)
    with pytest.raises(DiffusionError, match="cannot be run on 2 tokens"):
        seen._settled = True
        seen.trace([1, VOCAB + 5])
    assert module.create_causal_mask is made and torch.nn.Module.register_parameter is register
    assert seen._loader.live == 0 and torch.get_default_dtype() == torch.float32
    assert distance(seen.trace(IDS[0].tolist()).head.states, trace(tmp_path, IDS[0]).head.states) == 0
    monkeypatch.setattr(side, "mask_makers", lambda module: [])
    assert "does not attend as the checkpoint does" in sentence(reference(tmp_path).trace, IDS[0].tolist())


def test_experts_of_a_layer_that_chooses_between_its_modules(tiny: Callable[..., Path]) -> None:
    """And tokens whose experts flip in float64, here the first one's, are no rounding."""
    body = """
        x = x + self.attention(x, attention_mask)
        scores = torch.zeros(*x.shape[:2], 4).to(x.dtype)
        scores[..., 1:3] += 1
        scores[:, 0, 2] += 1e-9  # nothing in float32
        ids = scores.topk(1, dim=-1).indices if WAY == "inline" else self.choose(scores)
        return (x * (1 + 100 * (ids == 2)), None)
"""
    source = TINY.replace("        return (x + self.attention(x, attention_mask), None)\n", body.lstrip("\n"))
    module = """

class Choose(nn.Module):
    def forward(self, scores):
        return scores.max(-1, keepdim=True).indices
"""
    source = source.replace("\n\nclass Layer", f"{module}\n\nclass Layer")
    made = "self.attention = Attention(config)\n"
    source = source.replace(made, f"{made}        self.choose = Choose()\n")
    for way in ("inline", "module"):
        folder = tiny(way, "a2d-qwen2", source, num_experts_per_tok=1)
        found = trace(folder, range(10), folder)
        check_roundings(found)
        for stage in found.layers:
            assert stage.experts is not None and stage.experts.tolist() == [[1]] * 10


def test_the_class_that_is_meant(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny()
    file = folder / "modeling_tiny.py"
    for which in (file, f"{file}:TinyModelLM", folder):
        assert found_in(folder, which).model_class.__name__ == "TinyModelLM"  # type: ignore[union-attr]
    text = sentence(found_in, folder, f"{file}:Other")
    assert "no torch.nn.Module named 'Other'" in text and "Attention, Layer, TinyModelLM" in text
    two = tmp_path / "two.py"
    two.write_text("from torch import nn\n\nclass AForCausalLM(nn.Module): pass\n\nclass BModelLM(nn.Module): pass\n")
    assert "several models (AForCausalLM, BModelLM)" in sentence(found_in, folder, two)
    edit_json(folder / "config.json", architectures=["BModelLM"])
    assert found_in(folder, two).model_class.__name__ == "BModelLM"  # type: ignore[union-attr]
    nothing = tmp_path / "nothing.py"
    nothing.write_text("from transformers import LlamaForCausalLM\n")
    assert "has no class of a model with a head" in sentence(found_in, folder, nothing)


def test_a_file_may_import_from_the_files_beside_it(tiny: Callable[..., Path]) -> None:
    folder = tiny()
    (folder / "configuration_tiny.py").write_text(
        "class TinyConfig:\n    def __init__(self, **settings):\n        vars(self).update(settings)\n"
    )
    file = folder / "modeling_tiny.py"
    text = file.read_text().replace("import torch\n", "import torch\nfrom .configuration_tiny import TinyConfig\n", 1)
    made = "class TinyModelLM(nn.Module):\n"
    file.write_text(text.replace(made, f"{made}    config_class = TinyConfig\n\n"))
    found = found_in(folder, file)
    assert type(found.config).__name__ == "TinyConfig" and found.config.num_hidden_layers == 3
    trace(folder, range(10), file)


def test_a_file_that_only_decodes(tiny: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text("def generate(model, prompt):\n    return prompt\n")
    folder = tiny()
    found = found_in(folder, file)
    assert found.model_class is None and found.module.generate(None, 3) == 3
    assert "sample.py is no model" in sentence(reference, folder, file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_package\n", "No module named 'no_such_package'"),
        ("def (:\n", "SyntaxError"),
        ("raise KeyError('default')\n", "KeyError: 'default'"),
    ],
)
def test_files_that_cannot_be_imported(text: str, words: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    said = sentence(found_in, tiny(), file)
    assert said.startswith(f"{file} cannot be imported") and words in said
    assert not any(name.endswith(".broken") for name in sys.modules)


def test_paths_that_are_none(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny()
    assert "does not exist" in sentence(found_in, folder, tmp_path / "no.py")
    assert "does not exist" in sentence(found_in, folder, f"{tmp_path / 'no.py'}:Model")
    assert "must be hf, a modeling file" in sentence(found_in, folder, "transformers")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json is missing" in sentence(found_in, folder, empty)


def test_a_model_that_cannot_be_built_or_compared(tiny: Callable[..., Path]) -> None:
    folder = tiny(source=TINY.replace("config.num_hidden_layers", "config.no_such_key"))
    assert "cannot be built (AttributeError" in sentence(reference, folder, folder)
    folder = tiny(
        source=TINY.replace("nn.ModuleList(", "nn.Sequential(*(").replace("config.num_hidden_layers))", "3)))")
    )
    assert "no torch.nn.ModuleList of the checkpoint's 3 layers" in sentence(reference, folder, folder)
    folder = tiny(source=TINY.replace("in self.layers:", "in self.layers[:2]:"))
    assert "did not run its 3 layers" in sentence(reference(folder, folder).trace, range(10))


# --- what code of others does beside computing

MADE = "        return Output("


@pytest.mark.parametrize(("code", "said"), [("0", "0"), ("3", "3"), ("", ""), ("'no GPU'", "")])
@pytest.mark.parametrize("when", ["import", "build", "run"])
def test_a_reference_that_ends_the_program(when: str, code: str, said: str, tiny: Callable[..., Path]) -> None:
    line = f"__import__('sys').exit({code})"
    built = "        self.layers = nn.ModuleList("
    source = {
        "import": f"{TINY}\n\n{line}\n",
        "build": TINY.replace(built, f"        {line}\n{built}"),
        "run": TINY.replace(MADE, f"        {line}\n{MADE}"),
    }[when]
    folder = tiny(source=source)
    file = folder / "modeling_tiny.py"
    name = str(file) if when == "import" else "TinyModelLM of modeling_tiny.py"
    assert sentence(trace, folder, range(10), file) == (
        f"{name} ended the program (sys.exit({said})): remove that from a copy of the file and give the copy with "
        "--reference FILE."
    )
    if when == "import":
        assert f"modeling_tiny.py ended the program (sys.exit({said}))" in sentence(found_in, folder, folder)


@pytest.mark.parametrize("when", ["import", "run"])
def test_the_user_may_interrupt(when: str, tiny: Callable[..., Path]) -> None:
    line = "raise KeyboardInterrupt"
    folder = tiny(source=f"{TINY}\n\n{line}\n" if when == "import" else TINY.replace(MADE, f"        {line}\n{MADE}"))
    before = sys.stdout, sys.stderr
    with pytest.raises(KeyboardInterrupt):
        trace(folder, range(10), folder / "modeling_tiny.py")
    assert (sys.stdout, sys.stderr) == before


def test_what_a_reference_prints_goes_to_stderr(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Before our JSON it would be no JSON. What is told of the progress goes where it went before."""
    source = TINY.replace(MADE, f"        print('\\x1b[31mrun')\n{MADE}") + "\n\nprint('import')\n"
    folder = tiny(source=source)
    reference(folder, folder / "modeling_tiny.py").trace(range(10), lambda stage: print("done", stage))
    seen = capsys.readouterr()
    assert seen.out.split("\n") == [
        f"done {s}" for s in ("embedding", *map("layer {}".format, range(3)), "norm", "head")
    ] + [""]
    assert seen.err.startswith("import\n") and "\x1b[31mrun\n" in seen.err


UNTIDY = """
import os, random, sys
import numpy


def untidy():
    sys.stdout = sys.stderr = None
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    for module in (random, numpy.random, torch.random):
        getattr(module, "manual_seed", getattr(module, "seed", None))(1)
"""


@pytest.mark.parametrize("when", ["import", "run"])
def test_the_process_is_left_as_it_was(
    when: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TINY + UNTIDY
    source = f"{source}\n\nuntidy()\n" if when == "import" else source.replace(MADE, f"        untidy()\n{MADE}")
    folder = tiny(source=source)
    monkeypatch.chdir(tmp_path)

    def state() -> tuple[Any, ...]:
        numbers = np.random.get_state()[1]
        seeds = random.getstate(), numbers.tobytes(), torch.get_rng_state().tolist()  # type: ignore[union-attr]
        return sys.stdout, sys.stderr, Path.cwd(), torch.get_default_dtype(), seeds

    before = state()
    trace(Path(folder.name), range(10), f"{folder.name}/modeling_tiny.py")  # relative paths
    assert state() == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (MADE, "        return None\n" + MADE, "head of the reference is NoneType, not numbers for each token"),
        (MADE, "        return Output(x.argmax(-1))\n" + MADE, "head of the reference is torch.int64 [1, 10]"),
        (MADE, "        return Output(x.sum())\n" + MADE, "head of the reference is torch.float32 []"),
        (
            MADE,
            "        return Output(x[:, 1:])\n" + MADE,
            "head of the reference is of 9 tokens, not of the canvas's 10",
        ),
        (MADE, "        x = x / 0\n" + MADE, "head of the reference has numbers that are not finite in float32"),
        (MADE, "        x[0, 3, 2] = torch.nan\n" + MADE, "head of the reference has numbers that are not finite"),
        ("x = self.norm(x)", "x = self.norm(x / (x.shape[1] < 10))", "norm of the reference has numbers that are not"),
        (
            "x = layer(x, attention_mask)[0]",
            "x = layer(x, attention_mask)[0] / (x.shape[1] < 10)",
            "layer 1 of the reference has numbers that are not finite",
        ),
        ("x = self.embed(input_ids)", "x = self.embed(input_ids) * torch.inf", "layer 0 of the reference has numbers"),
        (
            MADE,
            "        if x.dtype == torch.float64:\n            x = x * torch.nan\n" + MADE,
            "Once more in float64, the reference has numbers that are not finite: leave the yardstick out with",
        ),
        (
            MADE,
            "        if x.dtype == torch.float64:\n            return None\n" + MADE,
            "TinyModelLM of modeling_tiny.py cannot be run on 10 tokens",
        ),
    ],
)
def test_what_is_no_number(old: str, new: str, words: str, tiny: Callable[..., Path]) -> None:
    folder = tiny(source=TINY.replace(old, new))
    text = sentence(trace, folder, range(10), folder / "modeling_tiny.py")
    assert text.startswith(words)


# --- the yardstick of what is made outside of the layers


def angles_of(seen: Reference) -> list[tuple[Any, Any]]:
    """What free modules made, and what the yardstick's layer was given in its place."""
    made: list[Any] = []
    init = side._Recorder.__init__

    def remember(self: Any, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side._Recorder, "__init__", remember)
        seen.trace(list(range(48)))
    return list(made[0].exact.values())


def test_angles_are_made_in_float64_from_their_frequencies(goldens: Path) -> None:
    """transformers makes them once in float32 for all layers, and they round by more the further a position is."""
    for name in ("block/sdar-b4", "a2d/gemma3-grow/run", "llada_dream/modernbert-tiny"):
        seen = reference(goldens / name)
        pairs, config = angles_of(seen), seen._skeleton.model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kinds = config.rope_parameters
        ropes = [kinds] if "rope_theta" in kinds else list(kinds.values())
        tables = []
        for rope in ropes:
            frequencies = float(rope["rope_theta"]) ** (-np.arange(0, size, 2) / size) / rope.get("factor", 1)
            angles = np.arange(48)[:, None] * frequencies
            tables += [np.cos(angles), np.sin(angles)]
        pairs = [pair for pair in pairs if pair[0].shape[-1] == size]
        assert len(pairs) == len(tables) == (2 if "sdar" in name else 4)
        for narrow, wide in pairs:
            assert narrow.dtype == torch.float32 and wide.dtype == torch.float64
            exact = wide[0, :, : size // 2].numpy()
            assert min(np.abs(exact - table).max() for table in tables) < 1e-13
            assert 1e-8 < float((narrow - wide).abs().max()) < 1e-4


def test_far_positions_round_more(tmp_path: Path) -> None:
    """As they do in any float32: an error of the angles must not look like one of the model."""
    twin(tmp_path, "a2d_qwen3")
    edit_json(tmp_path / "config.json", max_position_embeddings=4096)
    ids = (np.arange(1024) % VOCAB).tolist()
    means = []
    for exact in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not exact:
                patch.setattr(side._Recorder, "_make_exactly", lambda *args: None)
            rounding = trace(tmp_path, ids).layers[0].rounding
        assert rounding is not None
        means.append(rounding[1])
    assert means[0] > 1.5 * means[1]


def test_buffers_that_are_random_or_cannot_be_made_in_float64_are_cast(tiny: Callable[..., Path]) -> None:
    made = "        self.embed = "
    source = TINY.replace(
        made,
        "        self.register_buffer('noise', torch.rand(4), persistent=False)\n"
        "        self.register_buffer('third', torch.ones(1) / 3, persistent=False)\n" + made,
    )
    folder = tiny(source=source)
    exact = reference(folder, folder / "modeling_tiny.py")._skeleton.exact
    assert {name: value.dtype for (_, name), value in exact.items()} == {"third": torch.float64}
    assert float(next(iter(exact.values()))) == 1 / 3
    failing = "        assert torch.get_default_dtype() == torch.float32\n"
    folder = tiny(source=source.replace(made, failing + made))
    seen = reference(folder, folder / "modeling_tiny.py")
    assert seen._skeleton.exact == {}
    check_roundings(seen.trace(range(10)))


# --- the checkpoint's own code


def test_own_code_runs_only_when_it_may(tiny: Callable[..., Path]) -> None:
    folder = tiny()
    file = folder / "modeling_tiny.py"
    ran = folder / "ran"
    file.write_text(f"{file.read_text()}\n\nopen({str(ran)!r}, 'w').close()\n")
    text = sentence(found_in, folder, "own")
    assert (
        text == f"{file} is code of the checkpoint and would be run: read it, then allow it with --trust-remote-code."
    )
    found_in(folder)  # nor is it run for transformers' class
    assert not ran.exists()
    found = trace(folder, range(10), "own")
    assert ran.exists() and found.reference == "TinyModelLM of modeling_tiny.py"
    assert same_trace(found, trace(folder, range(10), file))


def test_own_code_that_is_not_there(tiny: Callable[..., Path], goldens: Path) -> None:
    text = sentence(found_in, goldens / "block" / "sdar-b4", "own", trust_remote_code=True)
    assert "lacks modeling_sdar.py, which its config.json names" in text
    folder = tiny(auto_map={"AutoConfig": "configuration_tiny.TinyConfig"})
    assert "names no modeling file (auto_map)" in sentence(found_in, folder, "own", trust_remote_code=True)
    folder = tiny(auto_map={"AutoModel": "someone/model--modeling_tiny.TinyModelLM"})
    text = sentence(found_in, folder, "own", trust_remote_code=True)
    assert "code of another repository (someone/model--modeling_tiny.TinyModelLM), which is not fetched" in text


PRETRAINED = """
import torch
from torch import nn
from transformers import Qwen2ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_own import OwnConfig


class Rotary(nn.Module):
    def __init__(self, config):
        super().__init__()
        inv_freq, self.scale = ROPE_INIT_FUNCTIONS["default"](config, None)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids[:, :, None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype) * self.scale, angles.sin().to(x.dtype) * self.scale


class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.model.rotary_emb = Rotary(config)
"""


@pytest.mark.parametrize("name", ["dream", "fast_dllm_v2"])
@pytest.mark.parametrize("block", [None, 4])
def test_own_code_that_is_a_pretrained_model(block: int | None, name: str, tmp_path: Path) -> None:
    """Written for transformers 4. It attends to both sides only with a mask of zeros: without any it stays causal. The
    second has a tied head."""
    folder = tmp_path / "own"
    whole = twin(folder, name)
    (folder / "modeling_own.py").write_text(PRETRAINED)
    (folder / "configuration_own.py").write_text(
        "from transformers import Qwen2Config\n\n\nclass OwnConfig(Qwen2Config):\n    model_type = 'own'\n"
    )
    edit_json(
        folder / "config.json",
        auto_map={"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"},
    )
    seen = reference(folder, "own", block=block)
    assert distance(seen.trace(IDS[0].tolist()).head.states, whole(block)[0]) < 1e-5
    assert seen._way == ("sdpa", "given")
    assert distance(trace(folder, IDS[0], folder, block=block).head.states, whole(block)[0]) < 1e-5


# --- what needs torch


def test_without_torch_one_sentence_says_so(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking.importlib.util, "find_spec", lambda name: None)
    assert "needs torch, which is not installed: pip install 'mlx-dllm-plugin[verify]'" in sentence(found_in, tiny())


def test_llada2_has_no_class_in_transformers(goldens: Path) -> None:
    text = sentence(found_in, goldens / "block" / "llada2_moe-v20")
    assert "no class that computes what llada2_moe does" in text
    assert "--trust-remote-code" in text and "--reference FILE" in text


def test_settings_that_transformers_does_not_take(tmp_path: Path) -> None:
    twin(tmp_path, "a2d_qwen3")
    edit_json(tmp_path / "config.json", rope_parameters={"rope_type": "no such rope"})
    with pytest.raises((CheckpointError, DiffusionError)) as error:
        trace(tmp_path, IDS[0])
    assert "no such rope" in str(error.value)
