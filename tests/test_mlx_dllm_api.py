"""The mlx-dllm API as its callers use it: their code runs when only the import name changes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm import utils

import mlx_dllm_plugin
from mlx_dllm_plugin import (
    A2DConfig,
    DecodingOptions,
    DiffusionError,
    bidirectional_forward,
    denoise,
    diffusion,
    families,
    generate,
    load,
    runtime,
)
from mlx_dllm_plugin.families import FAMILIES, FamilyAdapter, get_adapter, register
from mlx_dllm_plugin.families import a2d as conversions
from tests.models import config_of, stock_model, write_json
from tests.tools import copy_run, process

NAMES = ("load", "bidirectional_forward", "denoise", "generate", "A2DConfig")
RUNS = {"gpt2": "gpt2-grow", "qwen2": "qwen2-reuse"}
SAMPLER = {"canvas_len": 32, "num_steps": 32, "temperature": 1.0}
MASKS = {"gpt2": 340, "qwen2": 327}
PROMPT = "The cat walks"

Loaded = tuple[Any, Any, A2DConfig]


@pytest.fixture(scope="module")
def runs(data: Path) -> dict[str, Path]:
    return {name: data / "a2d" / run / "run" for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def gpt2(runs: dict[str, Path]) -> Loaded:
    return load(runs["gpt2"])


@pytest.fixture(scope="module")
def qwen2(runs: dict[str, Path]) -> Loaded:
    return load(runs["qwen2"])


@pytest.fixture
def checkpoint(runs: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a run's checkpoint somewhere else, its config.json changed; None removes a key."""

    def make(family: str = "gpt2", where: str = "checkpoint", **changes: Any) -> Path:
        path = tmp_path / where
        shutil.copytree(runs[family] / "model", path)
        config = {**json.loads((path / "config.json").read_text()), **changes}
        write_json(path / "config.json", {key: value for key, value in config.items() if value is not None})
        return path

    return make


@pytest.fixture
def unknown(runs: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint of an architecture that mlx-lm has and this package has no family for."""

    def make(**changes: Any) -> Path:
        path = tmp_path / "unknown"
        shutil.copytree(runs["gpt2"] / "model", path)
        settings = {"vocab_size": 341, "tie_word_embeddings": True, "eos_token_id": 339}
        write_json(path / "config.json", {**config_of("qwen3", **settings), **changes})
        weights = dict(tree_flatten(stock_model("qwen3", **settings).parameters()))
        mx.save_safetensors(str(path / "model.safetensors"), weights)
        return path

    return make


# A model that is nothing but `args.vocab_size`, and the algorithm in plain numpy.

VOCAB, MASK = 12, 11
FAKE = SimpleNamespace(args=SimpleNamespace(vocab_size=VOCAB))
TABLE = np.random.default_rng(3).normal(size=(3, VOCAB, VOCAB)).astype(np.float32) * 2
PLACE = np.random.default_rng(4).normal(size=(64, VOCAB)).astype(np.float32)
PLACE[:, MASK] *= 6  # some places want the mask, which is never to be had


def fake_logits(ids: np.ndarray) -> np.ndarray:
    """[B, T] -> [B, T, V], float32. Each position depends on itself, on both neighbours and on where it is."""
    left, right = np.roll(ids, 1, axis=1), np.roll(ids, -1, axis=1)
    return TABLE[0][ids] + TABLE[1][left] + TABLE[2][right] + PLACE[None, : ids.shape[1]]


class Forward:
    """Stands in for ``bidirectional_forward`` and keeps the canvases it was called with."""

    def __init__(self, logits: Callable[[np.ndarray], np.ndarray] = fake_logits):
        self.logits, self.canvases = logits, []

    def __call__(self, model: Any, canvas: mx.array) -> mx.array:
        ids = np.array(canvas)
        self.canvases.append(ids)
        return mx.array(self.logits(ids))

    def masks(self) -> list[int]:
        return [int((ids == MASK).sum()) for ids in self.canvases]


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Forward:
    fake = Forward()
    monkeypatch.setattr(diffusion, "bidirectional_forward", fake)
    return fake


class Letters:
    """A tokenizer with nothing but encode and decode."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


def oracle(
    logits_of: Callable[[np.ndarray], np.ndarray],
    ids: Sequence[int],
    mask: int,
    steps: int,
    *,
    shift: bool = False,
    masked: Sequence[bool] | None = None,
) -> list[int]:
    """mlx-dllm's decoding of one row, step by step and position by position."""
    canvas = list(ids)
    open_ = {i for i, token in enumerate(canvas) if (token == mask if masked is None else masked[i])}
    count, revealed = len(open_), 0
    for step in range(steps):
        total = round((step + 1) * count / steps)
        if total == revealed:
            continue
        logits = logits_of(np.array([canvas]))[0].astype(np.float64)
        guesses = []
        for i in open_:
            row = logits[i - 1 if shift else i].copy()
            row[mask] = -np.inf
            odds = np.exp(row - row.max())
            guesses.append((-odds.max() / odds.sum(), i, int(row.argmax())))
        for _, i, token in sorted(guesses)[: total - revealed]:
            canvas[i] = token
            open_.remove(i)
        revealed = total
    return canvas


def real_logits(model: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda ids: np.array(bidirectional_forward(model, mx.array(ids)))


def fill(canvas: Any, **arguments: Any) -> list[list[int]]:
    """denoise of the stand-in model, as lists."""
    return denoise(FAKE, mx.array(canvas), **{"mask_token_id": MASK, **arguments}).tolist()


# Names.


def test_the_package_has_the_names() -> None:
    for name in NAMES:
        assert name in mlx_dllm_plugin.__all__ and callable(getattr(mlx_dllm_plugin, name))


@pytest.mark.parametrize("name", ["runtime", "diffusion", "families"])
def test_the_submodules_are_modules(name: str) -> None:
    module = importlib.import_module(f"mlx_dllm_plugin.{name}")
    assert isinstance(module, ModuleType) and module is sys.modules[f"mlx_dllm_plugin.{name}"]
    assert getattr(mlx_dllm_plugin, name) is module


def test_the_names_are_those_of_the_submodules() -> None:
    assert (runtime.load, runtime.A2DConfig) == (load, A2DConfig)
    assert (diffusion.denoise, diffusion.generate) == (denoise, generate)
    assert runtime.bidirectional_forward is diffusion.bidirectional_forward is bidirectional_forward


def test_the_signatures_are_mlx_dllms_with_optional_additions() -> None:
    expected: dict[Any, dict[str, Any]] = {
        denoise: {"mask_token_id": None, "steps": None, "logit_shift": False, "a2d": None},
        generate: {"max_new_tokens": None, "mask_token_id": None, "steps": None, "logit_shift": False, "a2d": None},
    }
    for function, keywords in expected.items():
        parameters = inspect.signature(function).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert keywords.items() <= own.items()
        assert all(default is None for name, default in own.items() if name not in keywords)
    assert [p.name for p in inspect.signature(denoise).parameters.values() if p.kind is not p.KEYWORD_ONLY] == [
        "model",
        "canvas",
    ]


# A2DConfig and what is read from disk.


def test_a2d_configs_are_equal_whatever_their_manifest() -> None:
    one = A2DConfig("mdlm", 5, 0.5, {"canvas_len": 4}, manifest={"status": "completed"})
    assert one == A2DConfig(objective="mdlm", mask_token_id=5, final_alpha=0.5, sampler={"canvas_len": 4})
    assert one != dataclasses.replace(one, mask_token_id=6)
    assert one != dataclasses.replace(one, sampler=None)


def test_a2d_configs_have_defaults_and_are_frozen() -> None:
    config = A2DConfig("mdlm", 5)
    assert (config.final_alpha, config.sampler, config.manifest) == (1.0, None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mask_token_id = 6  # type: ignore[misc]


def test_parse_a2d_reads_the_block_of_a_config() -> None:
    parse = runtime._parse_a2d
    assert parse({}) is None and parse({"a2d": None}) is None
    assert parse({"a2d": {"objective": "mdlm", "mask_token_id": 7}}) == A2DConfig("mdlm", 7)
    block = {"objective": "mdlm", "mask_token_id": 7, "final_alpha": 0.5, "sampler": SAMPLER, "of_a_later_version": 1}
    assert parse({"model_type": "gpt2", "a2d": block}) == A2DConfig("mdlm", 7, 0.5, SAMPLER)


def test_a_block_without_a_mask_says_no_more_than_none() -> None:
    """A converted copy of a raw checkpoint has one: it is diffusion, and the mask must be given."""
    assert runtime._parse_a2d({"a2d": {"objective": "mdlm"}}) is None


def test_a_converted_raw_checkpoint_stays_diffusion(goldens: Path, tmp_path: Path) -> None:
    run = copy_run(goldens / "a2d" / "gpt2-partial" / "run", tmp_path / "run")
    for file in (goldens / "a2d" / "gpt2-partial" / "source_tokenizer").iterdir():
        shutil.copyfile(file, run / "checkpoints" / "checkpoint-500" / file.name)
    mlx_lm.convert(str(run), str(tmp_path / "copy"))
    model, _ = mlx_lm.load(str(tmp_path / "copy"))
    original, _ = mlx_lm.load(str(run))
    options = DecodingOptions(max_tokens=6, mask_token_id=320)
    assert mlx_dllm_plugin.decode(model, [1, 2], options).canvas == (
        mlx_dllm_plugin.decode(original, [1, 2], options).canvas
    )


def test_parse_manifest_reads_a_file_or_nothing(tmp_path: Path) -> None:
    path = write_json(tmp_path / "manifest.json", {"status": "running"})
    assert runtime._parse_manifest(path) == {"status": "running"}
    assert runtime._parse_manifest(tmp_path / "elsewhere.json") is None


@pytest.mark.parametrize("with_manifest", [True, False])
def test_the_numerically_latest_checkpoint_is_resolved_even_when_empty(with_manifest: bool, tmp_path: Path) -> None:
    for number in (9, 10, 100, 11):
        (tmp_path / "checkpoints" / f"checkpoint-{number}").mkdir(parents=True)
    manifest = {"status": "failed"} if with_manifest else None
    if with_manifest:
        write_json(tmp_path / "manifest.json", manifest)
    latest = tmp_path / "checkpoints" / "checkpoint-100"
    assert runtime._resolve_run_dir(str(tmp_path)) == (latest, manifest)
    shutil.rmtree(latest)
    assert runtime._resolve_run_dir(str(tmp_path))[0] == tmp_path / "checkpoints" / "checkpoint-11"


def test_the_model_folder_is_resolved_before_any_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    assert runtime._resolve_run_dir(str(tmp_path)) == (tmp_path / "model", None)


def test_a_config_at_the_root_means_it_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "manifest.json", {})
    write_json(tmp_path / "config.json", {})
    assert runtime._resolve_run_dir(str(tmp_path)) == (None, None)


def test_anything_else_is_no_run(tmp_path: Path) -> None:
    assert runtime._resolve_run_dir(str(tmp_path)) == (None, None)
    assert runtime._resolve_run_dir("someone/a-model-on-the-hub") == (None, None)


@pytest.mark.parametrize("call", [load, runtime._resolve_run_dir], ids=["load", "_resolve_run_dir"])
def test_a_run_with_nothing_to_load_is_a_file_not_found(call: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", {"status": "running"})
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="nothing to load"):
        call(str(tmp_path))


def test_download_gives_the_directory_of_a_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub"
    (hub / "model").mkdir(parents=True)
    monkeypatch.setattr(utils, "snapshot_download", lambda *args, **kwargs: str(hub))
    assert runtime._download(str(tmp_path)) == tmp_path
    assert runtime._download("someone/a-run-on-the-hub") == hub / "model"


# load.


@pytest.mark.parametrize("family", list(RUNS))
@pytest.mark.parametrize("kind", [str, Path])
def test_load_gives_model_tokenizer_and_a2d(family: str, kind: Any, runs: dict[str, Path]) -> None:
    loaded = load(kind(runs[family]))
    assert type(loaded) is tuple and len(loaded) == 3
    model, tokenizer, a2d = loaded
    assert type(model).__module__ == f"mlx_lm.models.{family}"
    assert tokenizer.decode(tokenizer.encode(PROMPT)) == PROMPT
    assert a2d == A2DConfig(objective="mdlm", mask_token_id=MASKS[family], final_alpha=1.0, sampler=SAMPLER)
    assert a2d.manifest == json.loads((runs[family] / "manifest.json").read_text())


def test_a_block_outside_a_run_has_no_manifest(checkpoint: Callable[..., Path]) -> None:
    a2d = load(checkpoint())[2]
    assert a2d == A2DConfig("mdlm", MASKS["gpt2"], 1.0, SAMPLER) and a2d.manifest is None


def test_a_final_alpha_below_one_is_only_said(checkpoint: Callable[..., Path], gpt2: Loaded) -> None:
    block = {"objective": "mdlm", "mask_token_id": 340, "final_alpha": 0.5, "sampler": None}
    model, _, a2d = load(checkpoint(a2d=block))
    assert a2d == A2DConfig("mdlm", 340, 0.5, None)
    ids = mx.array([[1, 2, 3, 340]])
    assert mx.array_equal(bidirectional_forward(model, ids), bidirectional_forward(gpt2[0], ids))


def test_a_raw_checkpoint_has_no_a2d(goldens: Path) -> None:
    """A real trainer checkpoint: no block, and no tokenizer either."""
    golden = goldens / "a2d" / "gpt2-partial"
    assert runtime._resolve_run_dir(str(golden / "run"))[0] == golden / "run" / "checkpoints" / "checkpoint-500"
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        load(golden / "run")
    model, tokenizer, a2d = load(golden / "run", tokenizer=golden / "source_tokenizer")
    assert a2d is None
    assert tokenizer.decode(tokenizer.encode(PROMPT)) == PROMPT
    with pytest.raises(ValueError, match="mask_token_id"):
        generate(model, tokenizer, PROMPT, max_new_tokens=4)
    recorded = json.loads((golden / "golden.json").read_text())
    case, prompts = recorded["mlx_dllm"]["denoise"][1], recorded["prompts"]
    canvas = [*prompts[case["prompt_index"]]["ids"]]
    canvas += [320] * (case["canvas_len"] - len(canvas))
    assert denoise(model, mx.array([canvas]), mask_token_id=320, steps=case["steps"]).tolist() == [case["final_ids"]]


def test_the_latest_checkpoint_of_a_run_is_loaded(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    write_json(tmp_path / "run" / "manifest.json", {"a2d_version": "0.1.0", "status": "failed"})
    for number in (9, 10):
        path = checkpoint(where=f"run/checkpoints/checkpoint-{number}", a2d=None)
        weights = {name: value * (number - 9) for name, value in mx.load(str(path / "model.safetensors")).items()}
        mx.eval(weights)
        mx.save_safetensors(str(path / "model.safetensors"), weights)
    model, _, a2d = load(tmp_path / "run")
    assert a2d is None
    assert mx.abs(model.model.wte.weight).max().item() > 0  # those of checkpoint-9 are all zero


def test_a_stock_model_of_a_known_family(checkpoint: Callable[..., Path], gpt2: Loaded) -> None:
    model, tokenizer, a2d = load(checkpoint(a2d=None))
    assert a2d is None and type(model).__module__ == "mlx_lm.models.gpt2"
    canvas = mx.array([[1, 2, 340, 340, 340]])
    assert mx.array_equal(bidirectional_forward(model, canvas), bidirectional_forward(gpt2[0], canvas))
    expected = denoise(gpt2[0], canvas, mask_token_id=340, steps=3)
    assert mx.array_equal(denoise(model, canvas, mask_token_id=340, steps=3), expected)
    with pytest.raises(ValueError, match="mask_token_id"):
        denoise(model, canvas, steps=3)
    with pytest.raises(ValueError, match="mask_token_id"):
        generate(model, tokenizer, PROMPT, max_new_tokens=3)


@pytest.mark.parametrize("block", [None, {"objective": "mdlm", "mask_token_id": 340}])
def test_a_model_without_a_family_decodes_too(block: Any, unknown: Callable[..., Path]) -> None:
    model, tokenizer, a2d = load(unknown(a2d=block))
    assert type(model).__module__ == "mlx_lm.models.qwen3"
    assert a2d == (A2DConfig("mdlm", 340) if block else None)
    logits = bidirectional_forward(model, mx.array([[1, 2, 3, 4]]))
    other = bidirectional_forward(model, mx.array([[1, 2, 3, 5]]))
    assert mx.abs(logits - other)[0, 0].max().item() > 1e-2
    canvas = [1, 2, 340, 340, 340, 3, 340]
    filled = denoise(model, mx.array([canvas]), mask_token_id=340, steps=3).tolist()
    assert filled == [oracle(real_logits(model), canvas, 340, 3)]
    assert generate(model, tokenizer, PROMPT, max_new_tokens=4, mask_token_id=340)


def test_a_mask_outside_the_embedding_loads_but_is_not_decoded(checkpoint: Callable[..., Path]) -> None:
    block = {"objective": "mdlm", "mask_token_id": 9999, "sampler": SAMPLER}
    model, tokenizer, a2d = load(checkpoint(a2d=block))
    assert a2d is not None and a2d.mask_token_id == 9999
    assert bidirectional_forward(model, mx.array([[1, 2]])).shape == (1, 2, 341)
    with pytest.raises(ValueError, match="mask_token_id"):
        denoise(model, mx.array([[1, 9999]]), a2d=a2d)
    with pytest.raises(ValueError, match="mask_token_id"):
        generate(model, tokenizer, PROMPT, a2d=a2d)
    assert denoise(model, mx.array([[1, 340]]), mask_token_id=340, a2d=a2d).tolist()[0][1] != 340


def test_load_asks_download_for_what_is_no_directory(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(runtime, "_download", lambda repo: asked.append(repo) or runs["gpt2"] / "model")
    assert load("someone/a-run-on-the-hub")[2] == A2DConfig("mdlm", 340, 1.0, SAMPLER)
    assert asked == ["someone/a-run-on-the-hub"]


# bidirectional_forward.


@pytest.mark.parametrize("family", list(RUNS))
def test_the_forward_is_bidirectional_and_the_model_stays_causal(family: str, request: Any) -> None:
    model = request.getfixturevalue(family)[0]
    ids, other = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]]), mx.array([[1, 2, 3, 9], [5, 6, 7, 9]])
    plain = model(ids)
    logits = bidirectional_forward(model, ids)
    assert logits.shape == (2, 4, model.args.vocab_size)
    assert mx.abs(logits - bidirectional_forward(model, other))[:, 0].max().item() > 1e-2
    assert mx.array_equal(model(ids), plain)
    assert mx.array_equal(model(other)[:, :-1], plain[:, :-1])
    assert type(model).__module__ == f"mlx_lm.models.{family}"


# denoise.

row = st.lists(st.integers(0, VOCAB - 1) | st.just(MASK), min_size=2, max_size=20)


@given(ids=row, steps=st.integers(1, 24), shift=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_denoise_equals_the_plain_loop(ids: list[int], steps: int, shift: bool) -> None:
    if shift:
        ids = [0, *ids]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion, "bidirectional_forward", Forward())
        assert fill([ids], steps=steps, logit_shift=shift) == [oracle(fake_logits, ids, MASK, steps, shift=shift)]


@pytest.mark.parametrize("family", list(RUNS))
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("steps", [1, 4, 9, 20])
def test_denoise_of_a_real_model_equals_the_plain_loop(family: str, shift: bool, steps: int, request: Any) -> None:
    model, _, a2d = request.getfixturevalue(family)
    mask = a2d.mask_token_id
    canvas = [7, 8, *[mask] * 5, 9, *[mask] * 4]
    filled = denoise(model, mx.array([canvas]), mask_token_id=mask, steps=steps, logit_shift=shift).tolist()[0]
    assert filled == oracle(real_logits(model), canvas, mask, steps, shift=shift)
    assert mask not in filled and (filled[0], filled[1], filled[7]) == (7, 8, 9)


def test_shifted_logits_are_something_else() -> None:
    """The two oracles differ, so that a shift that does nothing would show."""
    canvas = [3, *[MASK] * 8]
    assert oracle(fake_logits, canvas, MASK, 4) != oracle(fake_logits, canvas, MASK, 4, shift=True)


def test_the_forward_is_looked_up_at_every_call_and_gets_model_and_canvas(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def first(model: Any, canvas: mx.array) -> mx.array:
        calls.append((model, canvas.tolist()))
        return mx.broadcast_to(mx.arange(VOCAB).astype(mx.float32), (*canvas.shape, VOCAB))

    monkeypatch.setattr(diffusion, "bidirectional_forward", first)
    canvas = mx.array([[4, MASK, MASK]])
    assert denoise(FAKE, canvas, mask_token_id=MASK, steps=1).tolist() == [[4, 10, 10]]
    assert calls == [(FAKE, [[4, MASK, MASK]])]
    monkeypatch.setattr(diffusion, "bidirectional_forward", lambda model, canvas: -first(model, canvas))
    assert denoise(FAKE, canvas, mask_token_id=MASK, steps=1).tolist() == [[4, 0, 0]]


@pytest.mark.parametrize(("masks", "steps"), [(45, 10), (45, 20), (7, 3), (5, 5), (3, 8), (1, 6), (10, 4)])
def test_each_step_reveals_what_the_schedule_says(masks: int, steps: int, forward: Forward) -> None:
    totals = [round((step + 1) * masks / steps) for step in range(steps)]
    fill([[1, *[MASK] * masks]], steps=steps)
    before = [0, *totals[:-1]]
    assert forward.masks() == [masks - b for b, total in zip(before, totals, strict=True) if total > b]


def test_the_schedule_is_not_a2ds() -> None:
    """The rounding that tells them apart is among the cases above."""
    mine = [round((step + 1) * 45 / 10) for step in range(10)]
    assert mine != [round((step + 1) / 10 * 45) for step in range(10)]


def test_steps_that_reveal_nothing_cost_no_forward(forward: Forward) -> None:
    fill([[1, MASK, MASK, MASK]], steps=50)
    assert forward.masks() == [3, 2, 1]


def test_revealed_tokens_are_never_touched_again(forward: Forward) -> None:
    fill([[1, MASK, MASK, 2, MASK, MASK, MASK]], steps=5)
    for earlier, later in zip(forward.canvases, forward.canvases[1:], strict=False):
        known = earlier != MASK
        assert (earlier[known] == later[known]).all()


def test_the_mask_is_removed_before_the_softmax_which_changes_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Position 1 half wants the mask and is sure of token 5 apart from that, so it comes first."""
    odds = np.full((3, VOCAB), 0.01)
    odds[1, [MASK, 5]] = 0.45, 0.4
    odds[2] = 0.04
    odds[2, 6] = 0.6
    whole = odds / odds.sum(1, keepdims=True)
    without = odds[:, :MASK] / odds[:, :MASK].sum(1, keepdims=True)
    assert without[1, 5] > without[2, 6]
    assert whole[2, 6] > max(whole[1, MASK], whole[1, 5])  # with the mask in, position 2 would
    fake = Forward(lambda ids: np.log(odds)[None].astype(np.float32))
    monkeypatch.setattr(diffusion, "bidirectional_forward", fake)
    assert fill([[1, MASK, MASK]], steps=2) == [[1, 5, 6]]
    assert fake.canvases[1].tolist() == [[1, 5, MASK]]


def test_the_mask_is_never_revealed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = 50 * np.eye(VOCAB, dtype=np.float32)[MASK]
    monkeypatch.setattr(diffusion, "bidirectional_forward", Forward(lambda ids: fake_logits(ids) + wanted))
    assert MASK not in fill([[1, *[MASK] * 9]], steps=4)[0]


def test_rows_of_a_batch_equal_the_rows_alone(forward: Forward) -> None:
    rows = [[1, 2, *[MASK] * 5], [MASK, 3, MASK, 4, 5, 6, MASK], [*range(7)], [MASK] * 7]
    alone = [fill([ids], steps=3)[0] for ids in rows]
    assert fill(rows, steps=3) == alone
    assert alone == [oracle(fake_logits, ids, MASK, 3) for ids in rows]


@pytest.mark.parametrize("family", list(RUNS))
def test_rows_of_a_batch_on_a_real_model_equal_the_rows_alone(family: str, request: Any) -> None:
    model, _, a2d = request.getfixturevalue(family)
    mask = a2d.mask_token_id
    rows = mx.array([[1, 2, *[mask] * 6], [3, mask, 4, mask, 5, 6, 7, mask]])
    together = denoise(model, rows, mask_token_id=mask, steps=4)
    for i in range(2):
        assert mx.array_equal(together[i : i + 1], denoise(model, rows[i : i + 1], mask_token_id=mask, steps=4))


@pytest.mark.parametrize("dtype", [mx.int32, mx.int64, mx.uint32])
def test_the_canvas_keeps_its_type_and_the_callers_is_not_written_to(dtype: Any, forward: Forward) -> None:
    canvas = mx.array([[1, MASK, MASK]], dtype=dtype)
    filled = denoise(FAKE, canvas, mask_token_id=MASK, steps=2)
    assert filled.dtype == dtype and filled.shape == (1, 3) and canvas.tolist() == [[1, MASK, MASK]]


def test_a_canvas_without_masks_comes_back_without_a_forward(forward: Forward) -> None:
    assert fill([[1, 2, 3]], steps=4) == [[1, 2, 3]]
    assert fill([[1, 2, 3], [4, 5, 6]], steps=4, logit_shift=True) == [[1, 2, 3], [4, 5, 6]]
    assert forward.canvases == []


def test_masks_are_found_by_id_or_said(forward: Forward) -> None:
    """mlx-dllm fills every mask id; with ``masked`` one of them is text, and another token may be a hole."""
    ids = [1, MASK, 2, MASK, 3]
    by_id = fill([ids], steps=2)
    assert MASK not in by_id[0]
    assert fill([ids], steps=2, masked=mx.array([[False, True, False, True, False]])) == by_id
    masked = [False, False, False, True, True]
    said = fill([ids], steps=2, masked=mx.array([masked]))
    assert said[0][:3] == [1, MASK, 2] and MASK not in said[0][3:]
    assert said == [oracle(fake_logits, ids, MASK, 2, masked=masked)]


def test_nothing_masked_means_nothing_to_do(forward: Forward) -> None:
    assert fill([[MASK, MASK]], steps=2, masked=mx.array([[False, False]])) == [[MASK, MASK]]
    assert forward.canvases == []


def test_the_a2d_block_gives_mask_and_steps(forward: Forward) -> None:
    a2d = A2DConfig("mdlm", MASK, 1.0, {"num_steps": 3})
    filled = denoise(FAKE, mx.array([[1, *[MASK] * 6]]), a2d=a2d).tolist()
    assert forward.masks() == [6, 4, 2]
    assert filled == fill([[1, *[MASK] * 6]], steps=3)


def test_explicit_arguments_beat_the_block(forward: Forward) -> None:
    a2d = A2DConfig("mdlm", 5, 1.0, {"num_steps": 3, "temperature": 0.1})
    canvas = [1, 5, *[MASK] * 6]
    assert fill([canvas], steps=2, a2d=a2d) == fill([canvas], steps=2)
    assert forward.masks() == [6, 3] * 2
    assert fill([canvas], a2d=a2d) == fill([canvas], steps=3)


def test_the_blocks_temperature_changes_nothing(forward: Forward) -> None:
    canvas = [1, *[MASK] * 9]
    cold, hot = (A2DConfig("mdlm", MASK, 1.0, {"num_steps": 4, "temperature": t}) for t in (0.01, 100.0))
    assert fill([canvas], a2d=cold) == fill([canvas], a2d=hot) == [oracle(fake_logits, canvas, MASK, 4)]


def test_without_steps_it_is_one_token_a_step(forward: Forward) -> None:
    fill([[1, MASK, MASK, MASK]], a2d=A2DConfig("mdlm", MASK))
    assert forward.masks() == [3, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": VOCAB}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"a2d": A2DConfig("mdlm", VOCAB + 5), "mask_token_id": None}, "mask_token_id"),
        ({"steps": 0}, "positive"),
        ({"steps": -3}, "positive"),
        ({"steps": None, "a2d": A2DConfig("mdlm", MASK, 1.0, {"num_steps": 0})}, "positive"),
        ({"canvas": [[MASK, 1]], "logit_shift": True}, "unmasked first"),
        ({"canvas": [[1, MASK], [MASK, 1]], "logit_shift": True}, "unmasked first"),
        ({"canvas": [[1, 2]], "masked": mx.array([[True, False]]), "logit_shift": True}, "unmasked first"),
        ({"canvas": [1, MASK]}, "canvas"),
        ({"masked": mx.array([[True]])}, "masked"),
    ],
)
def test_what_denoise_cannot_do_is_a_value_error(arguments: dict[str, Any], word: str, forward: Forward) -> None:
    with pytest.raises(ValueError, match=word):
        fill(**{"canvas": [[1, MASK]], "steps": 2, **arguments})
    assert forward.canvases == []


# generate.


def test_generate_needs_only_encode_and_decode_and_gives_the_continuation(forward: Forward) -> None:
    text = generate(FAKE, Letters(), "bad", max_new_tokens=5, mask_token_id=MASK, steps=2)
    canvas = [1, 0, 3, *[MASK] * 5]
    assert text == Letters().decode(oracle(fake_logits, canvas, MASK, 2)[3:]) and len(text) == 5
    assert forward.canvases[0].tolist() == [canvas]


@pytest.mark.parametrize("family", list(RUNS))
@pytest.mark.parametrize("shift", [False, True])
def test_generate_is_denoise_and_decode(family: str, shift: bool, request: Any) -> None:
    model, tokenizer, a2d = request.getfixturevalue(family)
    ids = list(tokenizer.encode(PROMPT))
    canvas = mx.array([[*ids, *[a2d.mask_token_id] * 9]])
    filled = denoise(model, canvas, mask_token_id=a2d.mask_token_id, steps=4, logit_shift=shift).tolist()[0]
    text = generate(model, tokenizer, PROMPT, max_new_tokens=9, steps=4, logit_shift=shift, a2d=a2d)
    assert isinstance(text, str) and text == tokenizer.decode(filled[len(ids) :])


def test_the_blocks_canvas_len_counts_new_tokens(forward: Forward) -> None:
    """a2d itself, and ``mlx_lm.generate`` with this package, count the prompt too."""
    a2d = A2DConfig("mdlm", MASK, 1.0, {"canvas_len": 6, "num_steps": 3})
    assert len(generate(FAKE, Letters(), "badge", a2d=a2d)) == 6
    assert forward.canvases[0].shape == (1, 11) and forward.masks() == [6, 4, 2]


def test_generates_explicit_arguments_beat_the_block(forward: Forward) -> None:
    a2d = A2DConfig("mdlm", 5, 1.0, {"canvas_len": 6, "num_steps": 3})
    text = generate(FAKE, Letters(), "bf", max_new_tokens=4, mask_token_id=MASK, steps=2, a2d=a2d)
    assert forward.masks() == [4, 2]
    assert text == generate(FAKE, Letters(), "bf", max_new_tokens=4, mask_token_id=MASK, steps=2)


def test_without_a_block_it_is_one_token_a_step(forward: Forward) -> None:
    generate(FAKE, Letters(), "bad", max_new_tokens=3, mask_token_id=MASK)
    assert forward.masks() == [3, 2, 1]


@pytest.mark.parametrize("family", list(RUNS))
def test_prompts_of_unequal_lengths_give_what_each_gives_alone(family: str, request: Any) -> None:
    model, tokenizer, a2d = request.getfixturevalue(family)
    prompts = [PROMPT, "A dog", "The cat", "A big dog runs to the house", PROMPT]
    assert len({len(tokenizer.encode(prompt)) for prompt in prompts}) > 2
    arguments: dict[str, Any] = {"max_new_tokens": 7, "steps": 3, "a2d": a2d}
    texts = generate(model, tokenizer, prompts, **arguments)
    assert texts == [generate(model, tokenizer, prompt, **arguments) for prompt in prompts]
    assert len(set(texts)) > 1


def test_a_list_gives_a_list(forward: Forward) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 3, "mask_token_id": MASK}
    assert generate(FAKE, Letters(), ["bad"], **arguments) == [generate(FAKE, Letters(), "bad", **arguments)]
    assert generate(FAKE, Letters(), [], **arguments) == []


@pytest.mark.parametrize("shift", [False, True])
def test_a_mask_in_the_prompt_is_text(shift: bool, forward: Forward) -> None:
    """With mask "reuse" it is the end of sequence, which prompts do hold. "l" is the mask here."""
    text = generate(FAKE, Letters(), "lalb", max_new_tokens=4, mask_token_id=MASK, steps=4, logit_shift=shift)
    prompt = [MASK, 0, MASK, 1]
    canvas, masked = [*prompt, *[MASK] * 4], [False] * 4 + [True] * 4
    assert text == Letters().decode(oracle(fake_logits, canvas, MASK, 4, shift=shift, masked=masked)[4:])
    assert [ids[0, :4].tolist() for ids in forward.canvases] == [prompt] * 4


def test_a_reused_mask_in_a_real_prompt_is_text(qwen2: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, a2d = qwen2
    prompt = f"{PROMPT}<|endoftext|>{PROMPT}"
    ids = list(tokenizer.encode(prompt))
    assert a2d.mask_token_id in ids
    fake = Forward(real_logits(model))
    monkeypatch.setattr(diffusion, "bidirectional_forward", fake)
    text = generate(model, tokenizer, prompt, max_new_tokens=6, steps=3, a2d=a2d)
    assert [canvas[0, : len(ids)].tolist() for canvas in fake.canvases] == [ids] * 3
    canvas = [*ids, *[a2d.mask_token_id] * 6]
    masked = [False] * len(ids) + [True] * 6
    mask = a2d.mask_token_id
    assert text == tokenizer.decode(oracle(real_logits(model), canvas, mask, 3, masked=masked)[len(ids) :])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": VOCAB}, "mask_token_id"),
        ({"max_new_tokens": 0}, "positive"),
        ({"max_new_tokens": -2}, "positive"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"max_new_tokens": None, "a2d": A2DConfig("mdlm", MASK)}, "max_new_tokens"),
        ({"steps": 0}, "positive"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["bad", ""]}, "prompt"),
    ],
)
def test_what_generate_cannot_do_is_a_value_error(arguments: dict[str, Any], word: str, forward: Forward) -> None:
    call = {"prompt": "bad", "max_new_tokens": 3, "mask_token_id": MASK, **arguments}
    with pytest.raises(ValueError, match=word):
        generate(FAKE, Letters(), call.pop("prompt"), **call)
    assert forward.canvases == []


# Without the patches.

SCRIPT = """
import inspect, sys
import mlx_dllm_plugin
from mlx_dllm_plugin import load, generate
from mlx_lm import utils
assert not mlx_dllm_plugin.is_active()
assert inspect.unwrap(utils.load_model) is utils.load_model
model, tokenizer, a2d = load(sys.argv[1])
assert type(model).__module__ == "mlx_lm.models.gpt2"
print(ascii(generate(model, tokenizer, sys.argv[2], a2d=a2d)))
"""


def test_the_library_works_with_the_plugin_turned_off(runs: dict[str, Path], gpt2: Loaded) -> None:
    model, tokenizer, a2d = gpt2
    done = process(["-c", SCRIPT, runs["gpt2"], PROMPT], MLX_DLLM_PLUGIN="0")
    assert done.status == 0, done.err
    assert done.out.splitlines()[-1] == ascii(generate(model, tokenizer, PROMPT, a2d=a2d))


def test_the_library_works_when_deactivated(runs: dict[str, Path], gpt2: Loaded) -> None:
    model, tokenizer, a2d = gpt2
    expected = generate(model, tokenizer, PROMPT, a2d=a2d)
    mlx_dllm_plugin.deactivate()
    try:
        assert not mlx_dllm_plugin.is_active()
        assert inspect.unwrap(utils.load_model) is utils.load_model
        assert generate(model, tokenizer, PROMPT, a2d=a2d) == expected
        model, tokenizer, a2d = load(runs["gpt2"])
        assert generate(model, tokenizer, PROMPT, a2d=a2d) == expected
    finally:
        mlx_dllm_plugin.activate()
    assert mlx_dllm_plugin.is_active()


# Families.


@pytest.fixture
def no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test end with it."""
    monkeypatch.setattr(families, "_ADAPTERS", {})


def renaming(prefix: str) -> Callable[[type], type]:
    """A wrapper whose class takes a prefix off the weights' names."""

    def wrap(model_class: type) -> type:
        class Model(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
                return super().sanitize({name.removeprefix(prefix): value for name, value in weights.items()})

        return Model

    return wrap


def rename_weights(path: Path, prefix: str) -> None:
    weights = {prefix + name: value for name, value in mx.load(str(path / "model.safetensors")).items()}
    mx.eval(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights)


def test_an_adapter_is_a_model_type_and_perhaps_a_wrapper() -> None:
    adapter = FamilyAdapter("phi3")
    assert adapter == FamilyAdapter(model_type="phi3", sanitize_wrapper=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        adapter.model_type = "phi"  # type: ignore[misc]


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2", "gemma", "gemma2", "gemma3_text", "llama", "mistral"])
def test_every_built_in_family_has_an_adapter(model_type: str) -> None:
    adapter = get_adapter(model_type)
    assert isinstance(adapter, FamilyAdapter) and adapter.model_type == model_type


def test_the_built_in_gpt2_adapter_strips_the_prefix() -> None:
    class Stock:
        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            return {**weights, "seen": sorted(weights)}

    wrapper = get_adapter("gpt2").sanitize_wrapper
    model = wrapper(Stock)()
    assert isinstance(model, Stock)
    weights = model.sanitize({"transformer.wte.weight": mx.ones(2), "transformer.h.0.attn.bias": mx.ones(2)})
    assert weights["seen"] == ["wte.weight"]
    assert get_adapter("qwen2").sanitize_wrapper is None


def test_an_unknown_model_type_has_no_adapter() -> None:
    assert get_adapter("made_up") is None
    assert get_adapter(None) is None


def test_the_last_registration_wins(no_adapters: None) -> None:
    first, second = FamilyAdapter("made_up", renaming("a.")), FamilyAdapter("made_up", renaming("b."))
    register(first)
    assert get_adapter("made_up") is first
    register(second)
    assert get_adapter("made_up") is second
    own = FamilyAdapter("qwen2", renaming("c."))
    register(own)
    assert get_adapter("qwen2") is own


def test_load_uses_the_wrapper_of_a_known_family(
    checkpoint: Callable[..., Path], qwen2: Loaded, no_adapters: None
) -> None:
    path = checkpoint("qwen2")
    rename_weights(path, "odd.")
    with pytest.raises(ValueError):
        load(path)
    register(FamilyAdapter("qwen2", renaming("wrong.")))
    register(FamilyAdapter("qwen2", renaming("odd.")))
    model, _, a2d = load(path)
    assert type(model).__module__ == "mlx_lm.models.qwen2"
    assert type(model) is not type(qwen2[0]) and isinstance(model, type(qwen2[0]))
    assert a2d == qwen2[2]
    ids = mx.array([[1, 2, 3]])
    assert mx.array_equal(bidirectional_forward(model, ids), bidirectional_forward(qwen2[0], ids))


def test_load_uses_the_wrapper_of_a_family_that_is_not_ours(unknown: Callable[..., Path], no_adapters: None) -> None:
    path = unknown(a2d={"objective": "mdlm", "mask_token_id": 340})
    ids = mx.array([[1, 2, 3]])
    expected = bidirectional_forward(load(path)[0], ids)
    rename_weights(path, "odd.")

    def wrap(model_class: type) -> type:
        class Model(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
                return {name.removeprefix("odd."): value for name, value in weights.items()}

        return Model

    register(FamilyAdapter("qwen3", wrap))
    model, tokenizer, a2d = load(path)
    assert type(model).__module__ == "mlx_lm.models.qwen3"
    assert mx.array_equal(bidirectional_forward(model, ids), expected)
    assert generate(model, tokenizer, PROMPT, max_new_tokens=3, a2d=a2d)


def test_a_registered_family_is_loaded_with_its_spec(unknown: Callable[..., Path]) -> None:
    """The worked example of ``families``: a conversion of one more mlx-lm model."""
    own = conversions.family("qwen3", hidden=conversions.decoder, head=conversions.either_head)
    path = unknown(a2d={"objective": "mdlm", "mask_token_id": 340})
    assert get_adapter("qwen3") is None
    register(own)
    try:
        assert get_adapter("qwen3") == FamilyAdapter("qwen3")
        model, _, a2d = load(path)
        assert model.diffusion_spec.family == "qwen3" and model.diffusion_spec.mask_token_id == a2d.mask_token_id
        whole = bidirectional_forward(model, mx.array([[1, 2, 3]]))
        assert len(mlx_dllm_plugin.decode(model, [1, 2], DecodingOptions(max_tokens=3, stop_at_eos=False)).tokens) == 3
    finally:
        FAMILIES.unregister("qwen3")
    assert mx.array_equal(bidirectional_forward(load(path)[0], mx.array([[1, 2, 3]])), whole)


def test_an_adapter_without_a_wrapper_changes_nothing(
    checkpoint: Callable[..., Path], gpt2: Loaded, no_adapters: None
) -> None:
    register(FamilyAdapter("gpt2"))
    assert type(load(checkpoint())[0]) is type(gpt2[0])


@pytest.mark.parametrize("registered", [False, True])
def test_a_made_up_model_type_is_mlx_lms_affair(
    registered: bool, checkpoint: Callable[..., Path], no_adapters: None
) -> None:
    if registered:
        register(FamilyAdapter("made_up"))
    path = checkpoint(model_type="made_up", a2d=None)
    with pytest.raises(ValueError, match="made_up not supported"):
        load(path)


# --- a model loaded here meets the host


def test_an_a2d_model_of_an_unknown_family_is_never_decoded_autoregressively(unknown: Callable[..., Path]) -> None:
    path = unknown(a2d={"objective": "mdlm", "mask_token_id": 340})
    with pytest.raises(DiffusionError, match="qwen3"):
        mlx_lm.load(str(path))
    model, tokenizer, _ = load(path)
    assert model.diffusion_spec.mask_token_id == 340
    (first, *_) = mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=3)
    assert first.unmasking == "a2d"
    with pytest.raises(DiffusionError, match="unequal length"):
        mlx_dllm_plugin.decode(model, [[1, 2], [3]], DecodingOptions(max_tokens=2))
    assert len(mlx_dllm_plugin.decode(model, [[1, 2], [3, 4]], DecodingOptions(max_tokens=2, stop_at_eos=False))) == 2


def test_a_registered_adapter_reaches_mlx_lm(unknown: Callable[..., Path], no_adapters: None) -> None:
    path = unknown(a2d={"objective": "mdlm", "mask_token_id": 340})
    register(FamilyAdapter("qwen3"))
    model, _ = mlx_lm.load(str(path))
    ids = mx.array([[1, 2, 3]])
    assert mx.array_equal(bidirectional_forward(model, ids), bidirectional_forward(load(path)[0], ids))


def test_load_says_that_a_conversion_failed(goldens: Path, capfd: pytest.CaptureFixture[str]) -> None:
    partial = goldens / "a2d" / "gpt2-partial"
    load(partial / "run", tokenizer=partial / "source_tokenizer")
    assert "its manifest says the conversion is 'failed'" in capfd.readouterr().err


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2]], mx.array([1, 2]), mx.array([[[1]]])])
def test_a_forward_of_ids_of_another_shape_is_refused(gpt2: Loaded, ids: Any) -> None:
    with pytest.raises(DiffusionError, match=r"\[batch, length\], such as mx.array\(\[ids\]\)"):
        bidirectional_forward(gpt2[0], ids)
