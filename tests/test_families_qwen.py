"""Families that compute like mlx-lm's Qwen2, Qwen3, Qwen3-MoE and Llama: forwards, weights in every layout, what is
recognised as what, what is assumed, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlx_dllm_plugin.caches import AttentionPolicy, FullCanvas
from mlx_dllm_plugin.checkpoint import Checkpoint
from mlx_dllm_plugin.errors import CheckpointError, DiffusionError
from mlx_dllm_plugin.families import FAMILIES, get_adapter
from mlx_dllm_plugin.families.refused import is_mlx_vlms, refusal
from mlx_dllm_plugin.options import DecodingOptions, LoadOptions
from mlx_dllm_plugin.samplers import RULES
from mlx_dllm_plugin.spec import DiffusionSpec, detect, prepare, resolve
from tests.models import a2d_block, load, write_json
from tests.tools import copy_run, edit_json

TOLERANCE = 5e-4  # measured on CPU: at most 2.3e-4 with the goldens, 1.8e-5 with transformers
SIGNAL = 0.5  # what a wrong mask changes at least
MINE = (
    "a2d_llama",
    "a2d_qwen2",
    "a2d_qwen3",
    "dream",
    "fast_dllm_v2",
    "open_dcoder",
    "sdar",
    "sdar_moe",
    "stable_diffcoder",
)


class Blocks(AttentionPolicy):
    """A whole canvas in which a position sees all up to its block's end; blocks are counted from position 0."""

    def __init__(self, length: int, block: int):
        block_of = np.arange(length) // block
        self.mask = mx.array((block_of[None] <= block_of[:, None])[None, None])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self.mask


def logits(model: Any, ids: Any, policy: AttentionPolicy) -> np.ndarray:
    """Of the family's two parts, which must be the model's own call."""
    ids, cache, family = mx.array(ids), [policy] * len(model.layers), model.diffusion_family
    ours = family.head(model, family.hidden(model, ids, cache))
    assert mx.array_equal(ours, model(ids, cache=cache)).item()
    return np.array(ours)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


# --- forwards of the references


def test_dream_computes_what_the_reference_does(goldens: Path) -> None:
    folder = goldens / "llada_dream" / "dream-tiny"
    model, arrays = load(folder), np.load(folder / "golden.npz")
    assert type(model).__module__ == "mlx_lm.models.qwen2"
    for name in ("fwd0", "fwd1"):
        assert difference(logits(model, arrays[f"{name}_ids"], FullCanvas()), arrays[f"{name}_logits"]) < TOLERANCE
    ids, real = arrays["fwdb_ids"], arrays["fwdb_attention_mask"] == 1
    padding = [int(row) for row in (~real).sum(axis=1)]
    assert any(padding)
    found = logits(model, ids, FullCanvas(padding, ids.shape[1]))
    assert difference(found[real], arrays["fwdb_logits"][real]) < TOLERANCE
    assert difference(logits(model, ids, FullCanvas())[real], arrays["fwdb_logits"][real]) > SIGNAL


@pytest.mark.parametrize(("name", "block"), [("sdar-b4", 4), ("fast_dllm_v2-b32", 32)])
def test_block_causal_families_compute_what_the_references_do(goldens: Path, name: str, block: int) -> None:
    folder = goldens / "block" / name
    model, arrays = load(folder), np.load(folder / "golden.npz")
    for j in (0, 1):
        ids = arrays[f"ids{j}"][None]
        found = logits(model, ids, Blocks(ids.shape[1], block))[0]
        assert difference(found, arrays[f"logits{j}"]) < TOLERANCE
    assert difference(logits(model, arrays["ids0"][None], FullCanvas())[0], arrays["logits0"]) > SIGNAL


@pytest.mark.parametrize(("name", "block"), [("a2d_qwen3-mdlm", 16), ("a2d_qwen3-bd3lm", 8)])
def test_dllms_conversions_compute_what_the_reference_does_both_ways(goldens: Path, name: str, block: int) -> None:
    folder = goldens / "block" / name
    model, arrays = load(folder), np.load(folder / "golden.npz")
    for j in (0, 1):
        ids, wanted = arrays[f"ids{j}"][None], arrays[f"logits_block{j}"]
        assert difference(logits(model, ids, FullCanvas())[0], arrays[f"logits_bidir{j}"]) < TOLERANCE
        found = logits(model, ids[:, : len(wanted)], Blocks(len(wanted), block))[0]
        assert difference(found, wanted) < TOLERANCE


# --- forwards of families without a golden, against transformers' class of the same shape

VOCAB = 50
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    initializer_range=0.3,
    bos_token_id=None,
    eos_token_id=VOCAB - 3,
    tie_word_embeddings=False,
)
MOE: dict[str, Any] = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, head_dim=16
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DCODER = {"auto_map": {"AutoModelForCausalLM": "modeling_open_dcoder.OpenDCoderForCausalLM"}}
SEED = {"auto_map": {"AutoModelForCausalLM": "modeling_seed_diffcoder.SeedDiffcoderForCausalLM"}}
TWINS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # transformers' class, its settings, ours
    "dream": ("Qwen2", {}, {"model_type": "Dream"}),
    "fast_dllm_v2": ("Qwen2", {"tie_word_embeddings": True}, {"model_type": "Fast_dLLM_Qwen", "bd_size": 4}),
    "open_dcoder": ("Qwen2", {}, DCODER),
    "a2d_qwen2": ("Qwen2", {}, {"model_type": "a2d-qwen2"}),
    "a2d_qwen3": ("Qwen3", {"head_dim": 16}, {"model_type": "a2d-qwen3"}),
    "a2d_llama": ("Llama", {"rope_parameters": LLAMA3, "attention_bias": True}, {"model_type": "a2d-llama"}),
    "stable_diffcoder": ("Llama", {"head_dim": 16}, SEED),
    "sdar": ("Qwen3", {"head_dim": 16}, {"model_type": "sdar"}),
    "sdar_moe": ("Qwen3Moe", MOE, {"model_type": "sdar_moe"}),
}
IDS = np.random.default_rng(0).integers(0, VOCAB - 3, (2, 14))


def twin(folder: Path, name: str) -> Callable[[int | None], np.ndarray]:
    """A checkpoint of a family with random weights under transformers' names. Returns the logits of IDS by
    transformers, as a function of the block length (None: bidirectional)."""
    torch = pytest.importorskip("torch", reason="the reference implementation is torch")
    import transformers

    torch.set_num_threads(1)  # threads cost more than these sizes are worth

    kind, settings, ours = TWINS[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SHAPE | settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():  # biases and norms start at 0 and 1, and would not be seen
        for value in model.parameters():
            if value.ndim == 1:
                value.add_(torch.randn_like(value) * 0.1)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {**config.to_dict(), "mask_token_id": VOCAB - 1, **ours})
    state = {key: mx.array(value.numpy()) for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    mx.save_safetensors(str(folder / "model.safetensors"), state, metadata={"format": "pt"})

    def reference(block: int | None) -> np.ndarray:
        length = IDS.shape[1]
        block_of = torch.arange(length) // (block or length)
        hidden = block_of[None] > block_of[:, None]
        mask = torch.zeros(1, 1, length, length).masked_fill(hidden, torch.finfo(torch.float32).min)
        with torch.no_grad():
            return model(torch.tensor(IDS), attention_mask=mask.expand(len(IDS), -1, -1, -1)).logits.numpy()

    return reference


@pytest.mark.parametrize("name", MINE)
def test_a_family_computes_what_transformers_class_of_its_shape_does(name: str, tmp_path: Path) -> None:
    reference = twin(tmp_path, name)
    model = load(tmp_path)
    assert model.diffusion_spec.family == name
    for block in (None, 4):
        policy = FullCanvas() if block is None else Blocks(IDS.shape[1], block)
        wanted = reference(block)
        assert wanted.std() > 0.5 and difference(logits(model, IDS, policy), wanted) < TOLERANCE
    assert difference(reference(None), reference(4)) > SIGNAL


# --- weights, as every tool writes them


def read(folder: Path) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= dict(mx.load(str(file)))  # type: ignore[arg-type]
    return weights


def rewrite(folder: Path, weights: dict[str, mx.array]) -> Path:
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def vlm_layout(folder: Path) -> Path:
    """Turn a copy into what mlx-vlm would have written: its prefix, on weights and in the quantization."""
    config = json.loads((folder / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        if key in config:
            config[key] = {
                f"language_model.{name}" if isinstance(value, dict) else name: value
                for name, value in config[key].items()
            }
    write_json(folder / "config.json", config)
    return rewrite(folder, {f"language_model.{name}": value for name, value in read(folder).items()})


def convert(source: Path, target: Path, **settings: Any) -> Path:
    """A copy by mlx_lm.convert; the twins have no tokenizer, and need none."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(source)
    if settings:
        model, config = quantize_model(model, config, **settings)
    save_model(target, model)
    save_config(config, target / "config.json")
    return target


@pytest.mark.parametrize("name", MINE)
def test_copies_of_every_tool_load_alike(name: str, tmp_path: Path) -> None:
    twin(tmp_path / "original", name)
    model = load(tmp_path / "original")
    wanted = logits(model, IDS, FullCanvas())
    copy = convert(tmp_path / "original", tmp_path / "mlx")
    assert np.array_equal(logits(load(copy), IDS, FullCanvas()), wanted)
    again = load(vlm_layout(copy))
    assert np.array_equal(logits(again, IDS, FullCanvas()), wanted)
    assert again.diffusion_spec.family == name


@pytest.mark.parametrize("name", ["sdar", "sdar_moe", "a2d_llama"])
def test_quantized_copies_load_in_both_layouts(name: str, tmp_path: Path) -> None:
    twin(tmp_path / "original", name)

    def more_bits(path: str, module: Any) -> Any:
        return {"group_size": 32, "bits": 8} if "embed_tokens" in path else hasattr(module, "to_quantized")

    copy = convert(
        tmp_path / "original", tmp_path / "mlx", group_size=32, bits=4, mode="affine", quant_predicate=more_bits
    )
    config = json.loads((copy / "config.json").read_text())
    assert config["quantization"]["model.embed_tokens"]["bits"] == 8
    quantized = load(copy)
    wanted = logits(quantized, IDS, FullCanvas())
    assert quantized.model.embed_tokens.bits == 8 and quantized.model.layers[0].self_attn.o_proj.bits == 4
    again = load(vlm_layout(copy))
    assert again.model.embed_tokens.bits == 8
    assert np.array_equal(logits(again, IDS, FullCanvas()), wanted)


def test_experts_load_stacked_one_by_one_and_converted(tmp_path: Path) -> None:
    reference = twin(tmp_path / "stacked", "sdar_moe")(None)
    stacked = read(tmp_path / "stacked")
    gates = [name for name in stacked if name.endswith("mlp.experts.gate_up_proj")]
    if not gates:
        pytest.skip("this transformers lists experts one by one")
    single: dict[str, mx.array] = {}
    for name, value in stacked.items():
        layer = name.rpartition(".")[0]
        for expert in range(MOE["num_experts"]):
            if name.endswith("experts.gate_up_proj"):
                gate, up = mx.split(value[expert], 2)
                single[f"{layer}.{expert}.gate_proj.weight"] = gate
                single[f"{layer}.{expert}.up_proj.weight"] = up
            elif name.endswith("experts.down_proj"):
                single[f"{layer}.{expert}.down_proj.weight"] = value[expert]
            else:
                single[name] = value
    rewrite(Path(shutil.copytree(tmp_path / "stacked", tmp_path / "single")), single)
    convert(tmp_path / "single", tmp_path / "converted")
    for folder in ("stacked", "single", "converted"):
        assert difference(logits(load(tmp_path / folder), IDS, FullCanvas()), reference) < TOLERANCE


def test_half_precision_experts_are_cast_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin(tmp_path, "sdar_moe")
    rewrite(tmp_path, {name: value.astype(mx.bfloat16) for name, value in read(tmp_path).items()})
    model = load(tmp_path)
    if mx.default_device() == mx.Device(mx.cpu):
        assert model.model.embed_tokens.weight.dtype == mx.float32
        assert "cast to float32" in capsys.readouterr().err
    assert np.isfinite(logits(model, IDS, FullCanvas())).all()


@pytest.mark.parametrize("name", MINE)
def test_sanitize_is_idempotent_and_knows_names_twice(name: str) -> None:
    sanitize = FAMILIES.get(name).sanitize
    norm = "model.norm.weight"
    weights = {
        norm: mx.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": mx.zeros(2),
        "model.layers.0.mlp.experts.gate_up_proj": mx.zeros((2, 6, 4)),
        "model.layers.0.mlp.experts.down_proj": mx.zeros((2, 4, 3)),
    }
    for prefix in ("", "language_model."):
        once = sanitize({f"{prefix}{key}": value for key, value in weights.items()})
        assert norm in once and not any("inv_freq" in key or key.startswith("language_model") for key in once)
        twice = sanitize(once)
        assert twice.keys() == once.keys() and all(mx.array_equal(twice[key], once[key]).item() for key in once)
    if name == "sdar_moe":
        shapes = {key.rpartition("switch_mlp.")[2]: value.shape for key, value in once.items() if "switch" in key}
        assert shapes == {"gate_proj.weight": (2, 3, 4), "up_proj.weight": (2, 3, 4), "down_proj.weight": (2, 4, 3)}
    with pytest.raises(DiffusionError, match="twice, with and without the prefix 'language_model.'"):
        sanitize({norm: mx.zeros(2), f"language_model.{norm}": mx.zeros(2)})


# --- what is recognised as what

HERE = Path("checkpoint")
QWEN: dict[str, Any] = {"vocab_size": 151936, "eos_token_id": 151643, "max_position_embeddings": 32768}
IM_END = {"<|im_end|>": 151645}


def checkpoint(config: dict[str, Any], path: Path = HERE, **parts: Any) -> Checkpoint:
    parts = {"added_tokens": {}, "tokenizer_config": {}, "generation_config": {}, **parts}
    return Checkpoint(path=path, config={**QWEN, **config}, **parts)


def spec(config: dict[str, Any], path: Path = HERE, **parts: Any) -> DiffusionSpec:
    found = checkpoint(config, path, **parts)
    family = detect(found)
    assert family is not None
    return resolve(found, family)


def sentence(call: Any, *args: Any, kind: type[Exception] = DiffusionError, **kwargs: Any) -> str:
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text and ". " not in text
    return text


DETECTED: list[tuple[dict[str, Any], str | None]] = [
    ({"model_type": "Dream", "architectures": ["DreamModel"]}, "dream"),
    ({"model_type": "sdar", "architectures": ["SDARForCausalLM"]}, "sdar"),
    ({"model_type": "sdar_moe", "architectures": ["SDARMoeForCausalLM"]}, "sdar_moe"),
    ({"model_type": "Fast_dLLM_Qwen", "architectures": ["Fast_dLLM_QwenForCausalLM"]}, "fast_dllm_v2"),
    ({"model_type": "a2d-qwen2", "architectures": ["A2DQwen2LMHeadModel"]}, "a2d_qwen2"),
    ({"model_type": "a2d-qwen3", "architectures": ["A2DQwen3LMHeadModel"]}, "a2d_qwen3"),
    ({"model_type": "a2d-llama", "architectures": ["A2DLlamaLMHeadModel"]}, "a2d_llama"),
    ({"model_type": "llama", **SEED}, "stable_diffcoder"),
    ({"model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"]}, "llada2_moe"),
    ({"model_type": "llama", "auto_map": {"AutoModel": ["modeling_x.SeedDiffCoderModel", None]}}, "stable_diffcoder"),
    ({"model_type": "qwen2", **DCODER}, "open_dcoder"),
    ({"model_type": "qwen2", "auto_map": {"AutoModel": "modeling_dcoder.DCoderModel"}}, "open_dcoder"),
    ({"model_type": "qwen2", "auto_map": {"AutoModel": "modeling_qwen2.Qwen2ForMaskedDiffusion"}}, "open_dcoder"),
    # Autoregressive models stay what they are.
    ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, None),
    ({"model_type": "qwen2", "auto_map": {"AutoModel": "modeling_wizardcoder.WizardCoder"}}, None),
    ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, None),
    ({"model_type": "qwen3", "auto_map": {"AutoConfig": "configuration_qwen3.Qwen3Config"}}, None),
    ({"model_type": "qwen3_moe"}, None),
    ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, None),
    ({"model_type": "llama", "architectures": "LlamaForCausalLM", "auto_map": {"AutoModel": 3}}, None),
    ({"model_type": "gemma3"}, None),
    ({"model_type": "nemotron"}, None),
]


@pytest.mark.parametrize(("config", "name"), DETECTED)
def test_what_a_config_is(config: dict[str, Any], name: str | None) -> None:
    family = detect(checkpoint(config))
    assert (family and family.name) == name


def test_model_types_shared_with_a2d_stay_a2ds() -> None:
    for name in ("qwen2", "llama"):
        assert detect(checkpoint({"model_type": name, "a2d": a2d_block()})) is FAMILIES.get(name)
        adapter = get_adapter(name)
        assert adapter is not None and adapter.model_type == name


@pytest.mark.parametrize(("config", "names"), [(DCODER, "open_dcoder, qwen2"), (SEED, "llama, stable_diffcoder")])
def test_two_claims_name_what_decides(config: dict[str, Any], names: str) -> None:
    kind = "qwen2" if config is DCODER else "llama"
    found = checkpoint({"model_type": kind, "a2d": a2d_block(), **config})
    text = sentence(detect, found)
    assert f"the families {names} all claim it" in text and "choose one with family" in text
    for name in names.split(", "):
        assert detect(found, name) is FAMILIES.get(name)


def test_open_dcoder_can_be_forced() -> None:
    found = checkpoint(
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        tokenizer_config={"mask_token": "<M>"},
        added_tokens={"<M>": 151665},
    )
    family = detect(found, "open_dcoder")
    assert family is FAMILIES.get("open_dcoder")
    resolved = resolve(found, family)
    assert (resolved.logits, resolved.attention, resolved.mask_token_id) == ("shifted", "bidirectional", 151665)
    assert resolved.sources["family"] == "forced by the family option"
    text = sentence(detect, checkpoint({"model_type": "qwen3"}), "open_dcoder")
    assert "model_type qwen2" in text and "'qwen3'" in text


def test_names_and_rules_fit_together() -> None:
    assert set(MINE) <= set(FAMILIES.names())
    for name in MINE:
        family = FAMILIES.get(name)
        assert family.name == name and family.about
        rule = RULES.get(family.unmasking)
        for option, (value, source) in family.defaults(checkpoint({"model_type": family.model_types[0]})).items():
            DecodingOptions(**{option: value})
            causal = option == "block_length" and family.attention == "block_causal"
            assert source and (option == "max_tokens" or causal or option in rule.uses), (name, option)


# --- what a spec says

DREAM = {"model_type": "Dream", "vocab_size": 152064, "mask_token_id": 151666}


def test_dream_and_diffucoder() -> None:
    found = spec(DREAM, added_tokens={**IM_END, "<|dlm_pad|>": 151667}, generation_config={"mask_token_id": None})
    assert (found.logits, found.attention, found.canvas) == ("shifted", "bidirectional", "fixed")
    assert (found.unmasking, found.mask_token_id) == ("entropy", 151666)
    assert found.eos_token_ids == (151643, 151645, 151667) and found.stop_token_ids == (151645, 151667)
    assert found.defaults["max_tokens"] == 256 and "README" in found.sources["max_tokens"]
    bare = spec({"model_type": "Dream", "vocab_size": 152064})
    assert (bare.mask_token_id, bare.sources["mask_token_id"]) == (151666, "the family dream")


def test_fast_dllm_v2() -> None:
    config = {"model_type": "Fast_dLLM_Qwen", "bd_size": 32, "eos_token_id": 151645}
    found = spec(config, added_tokens={**IM_END, "|<MASK>|": 151665})
    assert (found.logits, found.attention, found.canvas) == ("shifted", "block_causal", "growing")
    assert (found.unmasking, found.block_origin, found.mask_token_id) == ("threshold", "start", 151665)
    wanted = {"max_tokens": 512, "block_length": 32, "sub_block_length": 8, "threshold": 0.9}
    assert found.defaults == wanted and found.sources["block_length"] == "config.json (bd_size)"
    assert found.eos_token_ids == (151645,) and found.stop_token_ids == ()
    assert spec(config).mask_token_id == 151665 and spec(config).sources["mask_token_id"] == "the family fast_dllm_v2"
    assert spec({**config, "bd_size": None}).defaults["block_length"] == 32
    assert spec({**config, "bd_size": 12}).defaults["sub_block_length"] == 12
    text = sentence(spec, {**config, "bd_size": "32"}, kind=CheckpointError)
    assert "bd_size must be a positive integer, the block length, got '32'" in text


@pytest.mark.parametrize("kind", ["sdar", "sdar_moe"])
def test_sdar(kind: str) -> None:
    found = spec({"model_type": kind}, added_tokens={**IM_END, "<|MASK|>": 151669})
    assert (found.logits, found.attention, found.canvas) == ("in_place", "block_causal", "growing")
    assert (found.unmasking, found.block_origin) == ("low_confidence_dynamic", "start")
    assert (found.mask_token_id, found.sources["mask_token_id"]) == (151669, "the token '<|MASK|>' in the vocabulary")
    assert found.stop_token_ids == (151645,)
    wanted = {"max_tokens": 2048, "block_length": 4, "threshold": 0.85}
    assert found.defaults == wanted and found.sources["threshold"] == "SDAR's generate.py"


HUB = "models--JetLM--SDAR-8B-Chat-b32/snapshots/0123456789abcdef"


@pytest.mark.parametrize(
    ("path", "config", "length", "source"),
    [
        ("SDAR-8B-Chat", {}, 4, "SDAR's generate.py"),
        ("SDAR-8B-Chat-b16", {}, 16, "the directory's name SDAR-8B-Chat-b16"),
        ("SDAR-30B-A3B-Chat-b64-4bit", {}, 64, "the directory's name SDAR-30B-A3B-Chat-b64-4bit"),
        ("SDAR-8B-Chat-bf16", {}, 4, "SDAR's generate.py"),
        (HUB, {}, 32, "the repository's name SDAR-8B-Chat-b32"),
        ("SDAR-8B-Chat-b16", {"block_size": 8}, 8, "config.json (block_size)"),
        ("SDAR-8B-Chat-b16", {"block_length": 8}, 8, "config.json (block_length)"),
    ],
)
def test_the_block_length_of_sdar(path: str, config: dict[str, Any], length: int, source: str, tmp_path: Path) -> None:
    found = spec({"model_type": "sdar", **config}, tmp_path / path)
    assert (found.defaults["block_length"], found.sources["block_length"]) == (length, source)
    hint = FAMILIES.get("sdar").hint
    assert hint(checkpoint({"model_type": "sdar", **config}, tmp_path / path)) is None


def test_a_renamed_copy_of_sdar_says_what_it_assumes(tmp_path: Path) -> None:
    hint = FAMILIES.get("sdar").hint
    found = checkpoint({"model_type": "sdar"}, tmp_path / "mlx_model")
    text = hint(found)
    assert text is not None and "mlx_model: block length 4 is assumed" in text and "--block-length" in text
    # mlx-lm's card of a converted copy names what it was made from.
    write = "---\nlibrary_name: mlx\nbase_model: JetLM/SDAR-8B-Chat-b16\ntags:\n- mlx\n---\n"
    (tmp_path / "mlx_model").mkdir()
    (tmp_path / "mlx_model" / "README.md").write_text(write)
    assert hint(found) is None
    resolved = spec({"model_type": "sdar"}, tmp_path / "mlx_model")
    assert resolved.defaults["block_length"] == 16
    assert resolved.sources["block_length"] == "the base_model in README.md, SDAR-8B-Chat-b16"


@pytest.mark.parametrize("name", ["a2d_llama", "a2d_qwen2", "a2d_qwen3"])
def test_dllms_conversions_are_told_apart_by_name_only(name: str, tmp_path: Path) -> None:
    family = FAMILIES.get(name)
    config = {"model_type": family.model_types[0]}
    tokens = {**IM_END, "<|mask|>": 151669}
    mdlm = spec(config, tmp_path / "Qwen3-0.6B-diffusion-mdlm-v0.1", added_tokens=tokens)
    assert (mdlm.attention, mdlm.canvas, mdlm.logits) == ("bidirectional", "fixed", "in_place")
    assert (mdlm.unmasking, mdlm.block_origin, mdlm.mask_token_id) == ("mdlm", "prompt_end", 151669)
    assert set(mdlm.variants) == {"attention", "logits"} and mdlm.stop_token_ids == (151645,)
    assert mdlm.defaults == {"max_tokens": 128, "block_length": 32}
    repository = tmp_path / "models--dllm-hub--Qwen3-0.6B-diffusion-bd3lm-v0.1" / "snapshots" / "0123"
    for path, named in (
        (tmp_path / "my-BD3LM", "the directory's name my-BD3LM"),
        (repository, "the repository's name Qwen3-0.6B-diffusion-bd3lm-v0.1"),
    ):
        bd3lm = spec(config, path, added_tokens=tokens)
        assert (bd3lm.attention, bd3lm.canvas, bd3lm.unmasking) == ("block_causal", "growing", "mdlm")
        assert bd3lm.sources["attention"] == bd3lm.sources["canvas"] == named
        assert bd3lm.sources["logits"] == f"the family {name}"
    for path, words in (
        (tmp_path / "mine", ("MDLM (bidirectional)", "no name of it has 'bd3lm'")),
        (repository, ("BD3LM (block_causal)", "the repository's name Qwen3-0.6B-diffusion-bd3lm-v0.1")),
    ):
        text = family.hint(checkpoint(config, path))
        assert text is not None and "\n" not in text and "--attention block_causal|bidirectional" in text
        assert all(word in text for word in words)


def test_the_hint_is_said_when_a_checkpoint_is_loaded(goldens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(goldens / "block" / "a2d_qwen3-bd3lm", None, LoadOptions()) is not None
    assert capsys.readouterr().err.count("--attention block_causal|bidirectional decides") == 1
    assert prepare(goldens / "block" / "sdar-b4", None, LoadOptions()) is not None
    assert capsys.readouterr().err == ""


def test_stable_diffcoder_and_open_dcoder() -> None:
    stable = spec({"model_type": "llama", "vocab_size": 155136, "eos_token_id": 2, **SEED})
    assert (stable.logits, stable.attention, stable.canvas) == ("in_place", "block_causal", "growing")
    assert (stable.unmasking, stable.block_origin, stable.mask_token_id) == ("low_confidence_dynamic", "start", 5)
    assert (stable.defaults["block_length"], stable.defaults["threshold"]) == (4, 1.0)
    named = spec({"model_type": "llama", **SEED}, added_tokens={"<[MASK_TOKEN]>": 7})
    assert named.sources["mask_token_id"] == "the token '<[MASK_TOKEN]>' in the vocabulary"
    coder = spec({"model_type": "qwen2", **DCODER}, tokenizer_config={"mask_token": "<M>"}, added_tokens={"<M>": 9})
    assert (coder.logits, coder.attention, coder.canvas) == ("shifted", "bidirectional", "fixed")
    assert (coder.unmasking, coder.mask_token_id) == ("maskgit_plus", 9)
    assert spec({"model_type": "qwen2", **DCODER}).mask_token_id is None


# --- what is refused

BASE: dict[str, dict[str, Any]] = {
    name: {**SHAPE, "model_type": FAMILIES.get(name).model_types[0], **(MOE if name == "sdar_moe" else {})}
    for name in MINE
}


@pytest.mark.parametrize("name", MINE)
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"hidden_act": "gelu"}, ("hidden_act = 'gelu'", "'silu'")),
        ({"use_sliding_window": True}, ("use_sliding_window = True",)),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("'sliding_attention'", "'full_attention'")),
    ],
)
def test_settings_that_mlx_lms_model_would_ignore_are_refused(
    name: str, setting: dict[str, Any], words: tuple[str, ...]
) -> None:
    text = sentence(FAMILIES.get(name).prepare_config, {**BASE[name], **setting})
    assert all(word in text for word in (*words, BASE[name]["model_type"]))


@pytest.mark.parametrize("name", MINE)
def test_settings_of_one_shape_only_are_refused(name: str) -> None:
    family = FAMILIES.get(name)
    module = family.architecture({}) if family.architecture else ""
    if module.endswith("qwen2"):
        assert "head_dim = 16" in sentence(family.prepare_config, {**BASE[name], "head_dim": 16})
    elif module.endswith(("qwen3", "qwen3_moe")):
        assert "attention_bias" in sentence(family.prepare_config, {**BASE[name], "attention_bias": True})
    else:
        assert "pretraining_tp = 2" in sentence(family.prepare_config, {**BASE[name], "pretraining_tp": 2})


@pytest.mark.parametrize("name", MINE)
def test_what_a_configuration_leaves_out_has_transformers_value(name: str) -> None:
    config = {key: value for key, value in BASE[name].items() if key not in ("tie_word_embeddings", "head_dim")}
    FAMILIES.get(name).prepare_config(config)
    assert (config["tie_word_embeddings"], config["rope_theta"]) == (False, 10000.0)
    assert config.get("head_dim") == {"sdar": 128, "a2d_qwen3": 128, "sdar_moe": 8}.get(name)
    nested = {**BASE[name], "rope_parameters": {**LLAMA3, "rope_theta": 7e5}, "rope_theta": None}
    del nested["rope_theta"]
    FAMILIES.get(name).prepare_config(nested)
    assert nested["rope_theta"] == 7e5 and nested["rope_scaling"]["rope_type"] == "llama3"
    assert nested["model_type"] == BASE[name]["model_type"]  # a converted copy must stay what it is


def test_a_model_that_lacks_weights_is_one_sentence(tmp_path: Path) -> None:
    twin(tmp_path, "sdar_moe")
    weights = read(tmp_path)
    rewrite(tmp_path, {name: value for name, value in weights.items() if "down_proj" not in name})
    with pytest.raises(CheckpointError, match="cannot be loaded as sdar_moe") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model_type": "wedlm", "architectures": ["WeDLMForCausalLM"]}, "WeDLM", "package wedlm"),
    ({"model_type": "qwen3", "architectures": ["WeDLMForCausalLM"]}, "WeDLM", "package wedlm"),
    ({"model_type": "qwen3", "architectures": ["EfficientDLM"]}, "Efficient-DLM", "transformers"),
    ({"model_type": "qwen3", "auto_map": {"AutoModel": "modeling_edlm.EfficientDLM"}}, "Efficient-DLM", "transformers"),
    ({"model_type": "mdlm", "architectures": ["MDLM"]}, "MDLM", "transformers"),
    ({"model_type": "diffusion_gemma"}, "DiffusionGemma", "mlx_vlm.generate"),
    ({"model_type": "nemotron_labs_diffusion"}, "Nemotron-Labs-Diffusion", "mlx_vlm.generate"),
    ({"model_type": "llava_llada"}, "LLaDA-V", "authors' code"),
    ({"model_type": "llada", "architectures": ["LlavaLLaDAModelLM"]}, "LLaDA-V", "authors' code"),
    ({"model_type": "llava_dream"}, "LaViDa", "authors' code"),
    ({"model_type": "llada", "architectures": ["MMadaModelLM"]}, "MMaDA", "authors' code"),
    ({"model_type": "Dream", "architectures": ["DimpleModel"]}, "Dimple", "authors' code"),
]


@pytest.mark.parametrize(("config", "name", "way_out"), REFUSED)
def test_a_recognised_model_is_refused_with_a_way_out(config: dict[str, Any], name: str, way_out: str) -> None:
    text = sentence(detect, checkpoint(config))
    assert text.startswith("checkpoint cannot be decoded: ") and name in text and way_out in text


@pytest.mark.parametrize("config", [config for config, _ in DETECTED])
def test_nothing_else_is_refused(config: dict[str, Any]) -> None:
    assert refusal(checkpoint(config)) is None and not is_mlx_vlms(checkpoint(config))


def test_mlx_lm_refuses_what_mlx_vlm_decodes_and_mlx_vlm_does_not(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "diffusion_gemma"})
    assert "use mlx_vlm.generate" in sentence(mlx_lm.load, str(tmp_path))
    mlx_vlm = pytest.importorskip("mlx_vlm")
    with pytest.raises(FileNotFoundError, match="safetensors"):  # mlx-vlm's own: it went on to the weights
        mlx_vlm.utils.load_model(tmp_path)


def test_mlx_vlm_refuses_what_it_would_decode_autoregressively(goldens: Path, tmp_path: Path) -> None:
    mlx_vlm = pytest.importorskip("mlx_vlm")
    for name in ("sdar-b4", "a2d_qwen3-mdlm"):
        assert "use mlx_lm.generate" in sentence(mlx_vlm.utils.load_model, goldens / "block" / name)
    qwen3 = copy_run(goldens / "block" / "sdar-b4", tmp_path / "qwen3")
    edit_json(qwen3 / "config.json", model_type="qwen3", architectures=["EfficientDLM"], auto_map=...)
    assert "Efficient-DLM" in sentence(mlx_vlm.utils.load_model, qwen3)
    edit_json(qwen3 / "config.json", architectures=["Qwen3ForCausalLM"])
    assert type(mlx_vlm.utils.load_model(qwen3)).__module__.startswith("mlx_vlm.models.qwen3")
