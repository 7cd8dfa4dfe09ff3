"""Every a2d family against transformers' own classes, made bidirectional.

The reference is eager float32 attention in torch without any mask. The checkpoints are tiny random ones written by
``save_pretrained``, with logits of a standard deviation above 1 so that a difference is a difference.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_dllm_plugin import DecodingOptions, DiffusionError, bidirectional_forward, decode
from mlx_dllm_plugin.caches import FullCanvas
from mlx_dllm_plugin.families import FAMILIES

torch = pytest.importorskip("torch", reason="the reference implementation is torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-4  # measured on CPU: 1e-6 to 1e-5; a missing repair gives 1e-3 to 1e-2, a causal mask 1e0 to 1e1
METAL_TOLERANCE = 2e-3  # not measured: allows for another order of summation; SIGNAL is far away
SIGNAL = 0.5  # what a causal mask must change at least

VOCAB, EOS, MASK = 50, 47, 48
LENGTH = 12
WINDOW = 3
IDS = np.random.default_rng(0).integers(0, EOS, (3, LENGTH))

COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=40,  # its square root is no bfloat16
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    bos_token_id=None,
    pad_token_id=None,
    eos_token_id=EOS,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},  # no class's default
)
GEMMA = {**COMMON, "head_dim": 10}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        dict(
            vocab_size=VOCAB,
            n_embd=32,
            n_head=4,
            n_layer=2,
            n_positions=64,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=EOS,
        ),
    ),
    "qwen2": ("Qwen2Config", COMMON),
    "gemma": ("GemmaConfig", GEMMA),
    "gemma2": ("Gemma2Config", {**GEMMA, "query_pre_attn_scalar": 12, "sliding_window": WINDOW}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**GEMMA, "query_pre_attn_scalar": 12, "sliding_window": WINDOW, "rope_parameters": GEMMA3_ROPE}
        | {"num_hidden_layers": 4, "sliding_window_pattern": 2},
    ),
    "llama": ("LlamaConfig", COMMON),
    "mistral": ("MistralConfig", {**COMMON, "sliding_window": WINDOW}),
}
FAMILY_NAMES = list(CONFIGS)
ROTARY = [name for name in FAMILY_NAMES if name != "gpt2"]


@dataclass(frozen=True)
class Case:
    """A configuration by its model_type and what is different."""

    model_type: str
    about: str = ""
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model_type} {self.about}".strip()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES = [
    *[Case(name) for name in FAMILY_NAMES],
    Case("gpt2", "padded vocabulary", {"vocab_size": 64}),
    Case("qwen2", "tied", {"tie_word_embeddings": True}),
    Case("qwen2", "all heads with keys of their own", {"num_key_value_heads": 4}),
    Case("qwen2", "window", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    Case("qwen2", "yarn", {"rope_parameters": YARN}),
    Case("qwen2", "padded vocabulary", {"vocab_size": 64, "tie_word_embeddings": True}),
    Case("gemma", "one key head", {"num_key_value_heads": 1}),
    Case("gemma", "all heads with keys of their own", {"num_key_value_heads": 4}),
    Case("gemma", "wide heads", {"head_dim": 16}),
    Case("gemma2", "one key head", {"num_key_value_heads": 1}),
    Case("gemma2", "all heads with keys of their own", {"num_key_value_heads": 4}),
    Case("gemma2", "tight caps", {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}),
    Case("gemma3_text", "fewer layers than the pattern", {"num_hidden_layers": 2, "sliding_window_pattern": 6}),
    Case("gemma3_text", "more layers than the pattern", {"num_hidden_layers": 7, "sliding_window_pattern": 3}),
    Case("gemma3_text", "one layer, all full", {"num_hidden_layers": 1, "sliding_window_pattern": 1}),
    Case("gemma3_text", "untied", {"tie_word_embeddings": False}),
    Case("gemma3_text", "exact embedding scale", {"hidden_size": 36, "head_dim": 8}),
    Case("gemma3_text", "scaled rope", {"rope_parameters": {**GEMMA3_ROPE, "full_attention": LINEAR}}),
    Case("gemma3_text", "all heads with keys of their own", {"num_key_value_heads": 4}),
    Case("llama", "tied", {"tie_word_embeddings": True}),
    Case("llama", "all heads with keys of their own", {"num_key_value_heads": 4}),
    Case("llama", "wide heads and biases", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    Case("llama", "llama3 rope", {"rope_parameters": LLAMA3}),
    Case("mistral", "no window", {"sliding_window": None}),
    Case("mistral", "wide heads, tied", {"head_dim": 16, "tie_word_embeddings": True}),
]


class Built:
    """A case on disk, in torch and in MLX, each made when first asked for."""

    def __init__(self, case: Case, path: Path):
        self.case, self.path = case, path
        kind, values = CONFIGS[case.model_type]
        config = getattr(transformers, kind)(**{**values, **case.changes})
        torch.manual_seed(0)
        self.torch = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():  # norms and biases start at 1 or 0, where mistakes in them do not show
            for weight in self.torch.parameters():
                if weight.ndim == 1:
                    weight += 0.3 * torch.randn(weight.shape)
        self.save(self.torch)

    def save(self, model: Any) -> None:
        model.save_pretrained(self.path)
        block = {"objective": "mdlm", "mask_token_id": MASK, "final_alpha": 1.0}
        block["sampler"] = {"canvas_len": 16, "num_steps": 8, "temperature": 1.0}
        edit_json(self.path / "config.json", lambda config: config.update(a2d=block))

    @cached_property
    def model(self) -> Any:
        return load_model(self.path)[0]

    @cached_property
    def causal(self) -> np.ndarray:
        return torch_logits(self.torch)

    @cached_property
    def reference(self) -> np.ndarray:
        """Logits [B, T, V] without a mask."""
        return bidirectional_torch(self.torch)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def torch_logits(model: Any, ids: np.ndarray = IDS) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids), use_cache=False).logits.float().numpy()


def bidirectional_torch(model: Any, ids: np.ndarray = IDS) -> np.ndarray:
    """Logits of transformers' model with every mask it makes replaced by none."""
    module = sys.modules[type(model).__module__]
    names = [n for n in ("create_causal_mask", "create_sliding_window_causal_mask") if hasattr(module, n)]
    assert names and model.config._attn_implementation == "eager"
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(module, name, lambda *args, **kwargs: None)
        return torch_logits(model, ids)


def mlx_logits(model: Any, ids: np.ndarray = IDS) -> np.ndarray:
    return np.array(bidirectional_forward(model, mx.array(ids)).astype(mx.float32))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Built]:
    known: dict[str, Built] = {}

    def get(case: Case | str) -> Built:
        case = Case(case) if isinstance(case, str) else case
        if case.name not in known:
            known[case.name] = Built(case, tmp_path_factory.mktemp("checkpoint"))
        return known[case.name]

    return get


@pytest.fixture(params=CASES, ids=lambda case: case.name.replace(" ", "-"))
def built(request: pytest.FixtureRequest, build: Callable[..., Built]) -> Built:
    return build(request.param)


@pytest.fixture
def copy(build: Callable[..., Built], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint whose config.json is changed."""

    def make(case: Case | str, change: Callable[[dict[str, Any]], Any] = lambda config: None) -> Path:
        path = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(build(case).path, path)
        edit_json(path / "config.json", change)
        return path

    return make


def add_weights(path: Path, more: dict[str, mx.array]) -> None:
    file = path / "model.safetensors"
    weights = dict(mx.load(str(file)))
    mx.eval(weights)
    mx.save_safetensors(str(file), {**weights, **more}, metadata={"format": "pt"})


# Logits.


def test_logits_equal_transformers_at_every_position(built: Built) -> None:
    assert built.reference.shape == (*IDS.shape, built.model.args.vocab_size)
    assert built.reference.std() > 1
    assert distance(mlx_logits(built.model), built.reference) < TOLERANCE


def test_the_reference_really_is_bidirectional(built: Built) -> None:
    """The last token reaches the first position, far outside any window, and the patch is undone afterwards."""
    other = IDS.copy()
    other[:, -1] = (other[:, -1] + 1) % EOS
    assert distance(bidirectional_torch(built.torch, other)[:, 0], built.reference[:, 0]) > 1e-2
    assert distance(torch_logits(built.torch, other)[:, 0], built.causal[:, 0]) == 0
    assert distance(built.causal, built.reference) > SIGNAL


def test_the_plain_model_stays_causal_which_is_something_else(built: Built) -> None:
    if built.case.about == "fewer layers than the pattern":
        pytest.skip("mlx-lm's own call fails on such a model: it indexes its caches by the pattern")
    ids = mx.array(IDS)
    before = np.array(built.model(ids))
    assert distance(before, built.reference) > SIGNAL
    mlx_logits(built.model)
    assert np.array_equal(np.array(built.model(ids)), before)
    other = IDS.copy()
    other[:, -1] = (other[:, -1] + 1) % EOS
    assert np.array_equal(np.array(built.model(mx.array(other)))[:, :-1], before[:, :-1])


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Metal device")
def test_logits_equal_transformers_on_metal(built: Built) -> None:
    mx.set_default_device(mx.gpu)
    try:
        logits = mlx_logits(built.model)
        plain = np.array(built.model(mx.array(IDS))) if "fewer" not in built.case.about else built.causal
    finally:
        mx.set_default_device(mx.cpu)
    assert distance(logits, built.reference) < METAL_TOLERANCE
    assert distance(plain, built.reference) > SIGNAL


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_class_is_found_in_mlx_lms_module(name: str, build: Callable[..., Built]) -> None:
    module = f"mlx_lm.models.{'llama' if name == 'mistral' else name}"
    model = build(name).model
    assert type(model).__module__ == module
    assert isinstance(model, sys.modules[module].Model)


def test_gpt2_with_stored_buffers_and_a_copied_head(build: Callable[..., Built], copy: Callable[..., Path]) -> None:
    """Older transformers stored each layer's causal mask, and some files have the tied head too."""
    path = copy("gpt2")
    stored = mx.load(str(path / "model.safetensors"))
    assert all(name.startswith("transformer.") for name in stored)
    more = {"lm_head.weight": stored["transformer.wte.weight"]}
    for layer in range(2):
        more[f"transformer.h.{layer}.attn.bias"] = mx.tril(mx.ones((1, 1, 64, 64)))
        more[f"transformer.h.{layer}.attn.masked_bias"] = mx.array(-10000.0)
    add_weights(path, more)
    assert distance(mlx_logits(load_model(path)[0]), build("gpt2").reference) < TOLERANCE


def test_gpt2_names_without_the_prefix(build: Callable[..., Built], copy: Callable[..., Path]) -> None:
    path = copy("gpt2")
    weights = dict(mx.load(str(path / "model.safetensors")))
    mx.eval(weights)
    plain = {name.removeprefix("transformer."): value for name, value in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), plain)
    assert distance(mlx_logits(load_model(path)[0]), build("gpt2").reference) < TOLERANCE


def test_gemma_with_the_exact_gelu_keeps_it(build: Callable[..., Built], copy: Callable[..., Path]) -> None:
    """``hidden_activation = gelu`` is the one way to ask for it; the older ``hidden_act`` never meant it."""
    built = Built(Case("gemma"), copy("gemma"))
    for layer in built.torch.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    exact = bidirectional_torch(built.torch)
    assert distance(exact, build("gemma").reference) > 5 * TOLERANCE
    ask = copy("gemma", lambda config: config.update(hidden_activation="gelu"))
    assert distance(mlx_logits(load_model(ask)[0]), exact) < TOLERANCE
    old = copy("gemma", lambda config: config.update(hidden_act="gelu"))
    assert distance(mlx_logits(load_model(old)[0]), build("gemma").reference) < TOLERANCE


@pytest.mark.parametrize("name", ["gemma", "gemma3_text"])
def test_without_the_repair_the_logits_would_be_off(name: str, build: Callable[..., Built]) -> None:
    """The tolerance is tight enough to see what mlx-lm's own model computes."""
    built = build(name)
    stock = load_stock(built)
    assert distance(mlx_logits(stock), built.reference) > 5 * TOLERANCE


def load_stock(built: Built) -> Any:
    """mlx-lm's own model with the same weights and configuration, and no repair."""
    module = sys.modules[type(built.model).__module__]
    model = module.Model(built.model.args)
    weights = dict(mx.load(str(built.path / "model.safetensors")))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    model.load_weights(list(weights.items()))
    return model


# Batches.


def row_of(result: Any) -> tuple[Any, ...]:
    commits = [(commit.step, commit.positions, commit.tokens, commit.logprobs) for commit in result.commits]
    return result.tokens, result.canvas, commits, result.logprobs, result.nfe, result.finish_reason


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_unequal_rows_of_a_batch_equal_each_row_alone(built: Built, rows: int) -> None:
    """To the last bit, whether or not there are as many rows as key-value heads (1, 2 or 4 of them)."""
    prompts = [IDS[i % 3, : (7, 2, 11, 5)[i]].tolist() for i in range(rows)]
    options = [DecodingOptions(max_tokens=5 - i, stop_at_eos=False) for i in range(rows)]
    results = decode(built.model, prompts, options)
    for prompt, own, result in zip(prompts, options, results, strict=True):
        assert row_of(result) == row_of(decode(built.model, prompt, own))
        assert MASK not in result.tokens and len(result.tokens) == own.max_tokens


def test_rows_differ_so_that_a_mix_up_would_show(built: Built) -> None:
    results = decode(built.model, [row.tolist() for row in IDS], DecodingOptions(max_tokens=5, stop_at_eos=False))
    assert len({tuple(result.tokens) for result in results}) > 1
    assert len({result.logprobs[0].token for result in results}) == len(results)


@pytest.mark.parametrize("rank", [4, 5])
def test_gemma2_needs_a_mask_of_its_own_rank(rank: int, build: Callable[..., Built]) -> None:
    """With as many rows as key-value heads, a mask of rank 4 fits the scores of rank 5 and is silently wrong."""
    model = build("gemma2").model
    family = FAMILIES.get("gemma2")
    assert (model.args.num_key_value_heads, family.score_rank(model)) == (2, 5)
    short, full = IDS[0, :7], IDS[1]
    padded = np.stack([np.concatenate([np.zeros(5, int), short]), full])
    cache = FullCanvas([5, 0], LENGTH, rank)
    logits = np.array(family.head(model, family.hidden(model, mx.array(padded), [cache] * 2)))
    alone = mlx_logits(model, short[None])[0], mlx_logits(model, full[None])[0]
    errors = distance(logits[0, 5:], alone[0]), distance(logits[1], alone[1])
    assert max(errors) == 0 if rank == 5 else max(errors) > SIGNAL


def test_gemma2_with_as_many_key_heads_as_heads_has_scores_of_rank_4(build: Callable[..., Built]) -> None:
    model = build(next(case for case in CASES if case.name == "gemma2 all heads with keys of their own")).model
    assert FAMILIES.get("gemma2").score_rank(model) == 4


def test_the_engines_forward_is_the_one_that_was_compared(built: Built) -> None:
    """The first commit's log-probabilities are those of transformers on the same canvas."""
    prompt = IDS[0, :6].tolist()
    result = decode(built.model, prompt, DecodingOptions(max_tokens=4, stop_at_eos=False))
    logits = bidirectional_torch(built.torch, np.array([[*prompt, *[MASK] * 4]]))[0].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    first = result.commits[0]
    for position, entry in zip(first.positions, first.logprobs, strict=True):
        assert abs(entry.token - expected[position, entry.id]) < TOLERANCE


# bfloat16 and quantized weights.


@pytest.fixture
def rounded(build: Callable[..., Built], tmp_path: Path) -> Callable[[str], tuple[Any, Any]]:
    """A family's base case in bfloat16: (torch model, MLX model)."""

    def make(name: str) -> tuple[Any, Any]:
        built = Built(Case(name), tmp_path / "bfloat16")
        model = built.torch.to(torch.bfloat16)
        built.save(model)
        return model, built.model

    return make


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_bfloat16_weights_load_and_decode(name: str, rounded: Callable[..., Any]) -> None:
    reference, model = rounded(name)
    assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.bfloat16}
    assert bidirectional_forward(model, mx.array(IDS)).dtype == mx.bfloat16
    # Two implementations that round to 8 bits in different places: some 1e-2 on average, a causal mask 1e0.
    error = np.abs(mlx_logits(model) - bidirectional_torch(reference))
    signal = np.abs(torch_logits(reference) - bidirectional_torch(reference))
    assert error.mean() < 0.1 and signal.mean() > 10 * error.mean()
    result = decode(model, IDS[0, :5].tolist(), DecodingOptions(max_tokens=6, stop_at_eos=False))
    assert len(result.tokens) == 6 and MASK not in result.tokens
    assert all(np.isfinite(entry.token) for entry in result.logprobs)


def first_hidden(model: Any, monkeypatch: pytest.MonkeyPatch) -> mx.array:
    """What the first layer gets: the scaled embeddings of IDS."""
    seen = []
    kind = type(model.layers[0])
    original = kind.__call__

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        seen.append(x)
        return original(self, x, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__call__", call)
        bidirectional_forward(model, mx.array(IDS))
    return seen[0]


def test_gemma3_in_bfloat16_has_the_scale_that_transformers_rounds_to(
    rounded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, model = rounded("gemma3_text")
    expected = reference.model.embed_tokens(torch.tensor(IDS)).detach()
    hidden = first_hidden(model, monkeypatch)
    assert (expected.dtype, hidden.dtype) == (torch.bfloat16, mx.bfloat16)
    assert np.array_equal(np.array(hidden.astype(mx.float32)), expected.float().numpy())


def test_gemma3_in_float32_has_the_exact_scale(build: Callable[..., Built], monkeypatch: pytest.MonkeyPatch) -> None:
    built = build("gemma3_text")
    expected = built.torch.model.embed_tokens(torch.tensor(IDS)).detach().numpy()
    hidden = np.array(first_hidden(built.model, monkeypatch))
    assert np.allclose(hidden, expected, rtol=1e-6, atol=0)
    assert not np.allclose(hidden, expected * (float(mx.array(40**0.5, mx.bfloat16)) / 40**0.5), rtol=1e-4, atol=0)


QUANTIZABLE = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16}  # 96: no bfloat16 root either


@pytest.mark.parametrize("how", ["convert", "in memory"])
@pytest.mark.parametrize("name", ["gemma", "gemma3_text"])
def test_quantized_models_keep_their_repairs(
    name: str, how: str, build: Callable[..., Built], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quantized model equals transformers with the weights that its own stand for."""
    built = build(Case(name, "quantizable", QUANTIZABLE))
    if how == "convert":
        shutil.copytree(built.path, tmp_path / "source")
        write_tokenizer(tmp_path / "source")
        mlx_lm.convert(str(tmp_path / "source"), str(tmp_path / "quantized"), quantize=True, q_group_size=32, q_bits=8)
        model = load_model(tmp_path / "quantized")[0]
    else:
        model = load_model(built.path)[0]
        nn.quantize(model, group_size=32, bits=8)
    assert isinstance(model.model.embed_tokens, nn.QuantizedEmbedding)
    assert isinstance(model.layers[0].mlp.gate_proj, nn.QuantizedLinear)
    reference = transformers.AutoModelForCausalLM.from_config(built.torch.config, attn_implementation="eager").eval()
    state = built.torch.state_dict() | {key: torch.tensor(np.array(value)) for key, value in dequantized(model)}
    reference.load_state_dict(state)
    expected = bidirectional_torch(reference)
    assert distance(expected, built.reference) > TOLERANCE  # the weights did change
    assert distance(mlx_logits(model), expected) < TOLERANCE


def dequantized(model: Any) -> Iterator[tuple[str, mx.array]]:
    for path, module in model.named_modules():
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            weight = mx.dequantize(
                module.weight, module.scales, module.get("biases"), group_size=module.group_size, bits=module.bits
            )
            yield f"{path}.weight", weight
            if path == "model.embed_tokens":
                yield "lm_head.weight", weight


def write_tokenizer(path: Path) -> None:
    """The smallest tokenizer that mlx-lm can load and save."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"t{i}": i for i in range(VOCAB)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"t{EOS}").save_pretrained(path)


# Spellings of the configuration.


def old_spelling(config: dict[str, Any]) -> None:
    """What transformers 4.51, which a2d uses, writes for the same model."""
    config["torch_dtype"] = config.pop("dtype", "float32")
    rope = config.pop("rope_parameters", None)
    if config["model_type"] == "gemma":
        config["hidden_activation"] = config["hidden_act"]
    if config["model_type"] == "gemma3_text":
        full, sliding = rope["full_attention"], rope["sliding_attention"]
        config["rope_theta"], config["rope_local_base_freq"] = full.pop("rope_theta"), sliding["rope_theta"]
        config["rope_scaling"] = full if full["rope_type"] != "default" else None
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
    elif rope is not None:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config.pop("layer_types", None)


def test_old_and_new_spellings_of_the_configuration_are_one_model(built: Built, copy: Callable[..., Path]) -> None:
    new = json.loads((built.path / "config.json").read_text())
    assert built.case.model_type == "gpt2" or "rope_parameters" in new
    old = load_model(copy(built.case, old_spelling))[0]
    assert np.array_equal(mlx_logits(old), mlx_logits(built.model))


@pytest.mark.parametrize("name", ROTARY)
def test_a_rope_that_was_not_read_would_show(name: str, build: Callable[..., Built], copy: Callable[..., Path]) -> None:
    lost = load_model(copy(name, lambda config: config.pop("rope_parameters")))[0]
    assert distance(mlx_logits(lost), build(name).reference) > 100 * TOLERANCE


def test_gpt2_with_and_without_n_ctx(build: Callable[..., Built], copy: Callable[..., Path]) -> None:
    """transformers 4.51 and later do not write what mlx-lm requires."""
    assert "n_ctx" not in json.loads((build("gpt2").path / "config.json").read_text())
    model = load_model(copy("gpt2", lambda config: config.update(n_ctx=64)))[0]
    assert np.array_equal(mlx_logits(model), mlx_logits(build("gpt2").model))


@pytest.mark.parametrize("name", ["qwen2", "llama", "mistral"])
def test_an_unsaid_tie_is_none(name: str, build: Callable[..., Built], copy: Callable[..., Path]) -> None:
    """Absent ``tie_word_embeddings`` means false in transformers' classes and true in mlx-lm's."""
    model = load_model(copy(name, lambda config: config.pop("tie_word_embeddings")))[0]
    assert distance(mlx_logits(model), build(name).reference) < TOLERANCE


@pytest.mark.parametrize("pattern", [2, 6])
def test_gemma3_layer_types_win_over_a_pattern_beside_them(
    pattern: int, build: Callable[..., Built], copy: Callable[..., Path]
) -> None:
    """As in transformers, whose versions wrote both for a while."""
    model = load_model(copy("gemma3_text", lambda config: config.update(sliding_window_pattern=pattern)))[0]
    assert distance(mlx_logits(model), build("gemma3_text").reference) < TOLERANCE


# Settings that mlx-lm's models would silently ignore.

SCALED = {"rope_parameters": LINEAR}
OLD_SCALED = {"rope_scaling": {"type": "linear", "factor": 2.0}}
IGNORED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"activation_function": "gelu"}, "activation_function"),
    ("gpt2", {"activation_function": "relu"}, "activation_function"),
    ("gpt2", {"n_inner": 100}, "n_inner"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    ("qwen2", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("mistral", {"hidden_act": "gelu"}, "hidden_act"),
    ("gemma", {"hidden_activation": "relu"}, "hidden_activation"),
    ("gemma", {"hidden_act": "silu"}, "hidden_act"),
    ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    ("gemma", SCALED, "rope"),
    ("gemma", OLD_SCALED, "rope"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
    ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping"),
    ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping"),
    ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    ("gemma2", SCALED, "rope"),
    ("gemma2", OLD_SCALED, "rope"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
    ("gemma3_text", {"rope_parameters": {**GEMMA3_ROPE, "sliding_attention": LINEAR}}, "rope"),
]


def refusal(path: Path) -> str:
    with pytest.raises(DiffusionError) as error:
        load_model(path)
    text = str(error.value)
    assert text.endswith(".") and text.count(". ") == 0 and "\n" not in text and len(text) < 250
    return text


@pytest.mark.parametrize(
    ("name", "change", "word"), IGNORED, ids=[f"{name}-{'-'.join(change)}" for name, change, _ in IGNORED]
)
def test_a_setting_that_would_be_ignored_is_refused(
    name: str, change: dict[str, Any], word: str, copy: Callable[..., Path]
) -> None:
    text = refusal(copy(name, lambda config: config.update(change)))
    assert name in text and word in text


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}),
        ("gpt2", {"n_inner": 128}),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
        ("gemma", {"hidden_activation": None}),
        ("gemma2", {"hidden_activation": "gelu_new"}),
        ("gemma3_text", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ],
)
def test_other_words_for_what_is_computed_are_accepted(
    name: str, change: dict[str, Any], build: Callable[..., Built], copy: Callable[..., Path]
) -> None:
    model = load_model(copy(name, lambda config: config.update(change)))[0]
    assert distance(mlx_logits(model), build(name).reference) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        ("gpt2", "transformer.wte.weight"),
        ("gemma", "model.embed_tokens.weight"),
        ("gemma2", "model.embed_tokens.weight"),
    ],
)
def test_a_head_of_its_own_is_refused_and_a_copy_of_the_embedding_is_not(
    name: str, embedding: str, build: Callable[..., Built], copy: Callable[..., Path]
) -> None:
    head = mx.load(str(build(name).path / "model.safetensors"))[embedding]
    same, other = copy(name), copy(name)
    add_weights(same, {"lm_head.weight": head})
    assert distance(mlx_logits(load_model(same)[0]), build(name).reference) < TOLERANCE
    add_weights(other, {"lm_head.weight": head + 1e-3})
    assert "lm_head.weight" in refusal(other)
