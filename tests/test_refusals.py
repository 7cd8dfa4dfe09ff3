"""Every host entry point that cannot decode a model with a spec refuses it in one sentence, and still takes others."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers
import mlx_lm
import pytest

from mlx_dllm_plugin import DiffusionError
from tests.tools import ERROR, PROMPT, Runner, assert_one_sentence, copy_run, make_ar_model

host = sys.modules["mlx_lm.generate"]
IDS = mx.array([[5, 6, 7, 8, 9, 10]])


@dataclass(frozen=True)
class Loaded:
    path: Path
    model: Any
    tokenizer: Any


def _load(path: Path) -> Loaded:
    return Loaded(path, *mlx_lm.load(str(path)))


@pytest.fixture(scope="module", params=["gpt2-grow", "qwen2-reuse"])
def diffusion(request: pytest.FixtureRequest, data: Path) -> Loaded:
    return _load(data / "a2d" / request.param / "run")


@pytest.fixture(scope="module")
def ar(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return _load(make_ar_model(tmp_path_factory.mktemp("ar") / "llama", data / "a2d" / "gpt2-grow" / "run" / "model"))


@pytest.fixture(scope="module")
def evaluate() -> Iterator[types.ModuleType]:
    """mlx_lm.evaluate, over a stand-in for lm_eval, which need not be installed."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    modules = {name: types.ModuleType(name) for name in names}
    modules["lm_eval.api.model"].LM = type("LM", (), {})  # type: ignore[attr-defined]
    modules["lm_eval.api.registry"].register_model = lambda *names: lambda kind: kind  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
        yield importlib.import_module("mlx_lm.evaluate")
        sys.modules.pop("mlx_lm.evaluate", None)


def _mlxlm(loaded: Loaded) -> Any:
    """An lm-eval adapter around a model that was loaded by a script."""
    module = sys.modules["mlx_lm.evaluate"]
    adapter = module.MLXLM.__new__(module.MLXLM)
    adapter._model, adapter.tokenizer = loaded.model, loaded.tokenizer
    adapter._max_tokens, adapter._batch_size, adapter._sampler = 4, 2, None
    adapter.use_chat_template = False
    return adapter


def _request(*args: Any) -> Any:
    return types.SimpleNamespace(args=args)


def _provider(model: str, draft: str | None = None) -> Any:
    from mlx_lm.server import ModelProvider

    return ModelProvider(
        argparse.Namespace(
            model=model,
            adapter_path=None,
            draft_model=draft,
            pipeline=False,
            trust_remote_code=False,
            chat_template="",
            use_default_chat_template=False,
        )
    )


def _serve(loaded: Loaded) -> Any:
    provider = _provider(str(loaded.path))
    provider.load_default()
    return provider.model


def _serve_named(loaded: Loaded) -> Any:
    """A request that names a model."""
    return _provider("unused").load(str(loaded.path))[0]


DATASET = [([5, 6, 7, 8, 9, 10], 0)] * 2


def _tune(loaded: Loaded) -> Any:
    from mlx_lm.tuner.trainer import TrainingArgs, train

    model = mlx_lm.load(str(loaded.path))[0]
    model.freeze()
    model.layers[-1].unfreeze()
    arguments = TrainingArgs(batch_size=1, iters=1, steps_per_save=100, max_seq_length=16)
    mx.disable_compile()  # compiling the step takes the CPU 20 seconds
    try:
        return train(model, mlx.optimizers.SGD(learning_rate=0.0), DATASET, None, arguments)
    finally:
        mx.enable_compile()


def _tuner_evaluate(loaded: Loaded) -> Any:
    from mlx_lm.tuner.trainer import evaluate as tuner_evaluate

    return tuner_evaluate(loaded.model, DATASET, batch_size=1, num_batches=1, max_seq_length=16)


def _default_loss(loaded: Loaded) -> Any:
    from mlx_lm.tuner.trainer import default_loss

    return default_loss(loaded.model, IDS, mx.array([[0, 6]]))


def _eval_ppl(loaded: Loaded) -> Any:
    from mlx_lm.perplexity import eval_ppl

    return eval_ppl(loaded.model, mx.concatenate([IDS, IDS + 1]))


def _speculate(loaded: Loaded, draft: Any = None) -> Any:
    steps = host.speculative_generate_step(IDS[0], loaded.model, draft or loaded.model, max_tokens=3)
    return list(steps)


# Each takes a loaded model; the autoregressive one must come through.
FUNCTIONS: dict[str, Callable[[Loaded], Any]] = {
    "generate_step": lambda m: list(host.generate_step(IDS[0], m.model, max_tokens=3)),
    "speculative_generate_step": _speculate,
    "batch_generate": lambda m: mlx_lm.batch_generate(m.model, m.tokenizer, [[5, 6, 7], [8, 9]], max_tokens=3),
    "BatchGenerator": lambda m: host.BatchGenerator(m.model, max_tokens=3),
    "server: --model": _serve,
    "server: model of a request": _serve_named,
    "eval_ppl": _eval_ppl,
    "tuner.trainer.default_loss": _default_loss,
    "tuner.trainer.train": _tune,
    "tuner.trainer.evaluate": _tuner_evaluate,
    "evaluate: loglikelihood": lambda m: _mlxlm(m).loglikelihood([_request(PROMPT, " the door")]),
    "evaluate: loglikelihood_rolling": lambda m: _mlxlm(m).loglikelihood_rolling([_request(PROMPT)]),
    "evaluate: generate_until": lambda m: _mlxlm(m).generate_until([_request(PROMPT, {"until": ["\n"]})]),
    "utils.sharded_load": lambda m: mlx_lm.utils.sharded_load(str(m.path)),
}


@pytest.mark.usefixtures("evaluate")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_refuses_in_one_sentence(diffusion: Loaded, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DiffusionError) as refusal:
        FUNCTIONS[name](diffusion)
    message = str(refusal.value)
    assert "does not work with diffusion checkpoints" in message and "mlx_lm.generate" in message
    assert "\n" not in message and message.count(". ") == 0
    assert name != "batch_generate" or message.startswith("mlx_lm.batch_generate ")  # not what it calls inside
    del refusal
    assert "Exception ignored" not in capfd.readouterr().err


@pytest.mark.usefixtures("evaluate")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_still_takes_an_autoregressive_model(
    ar: Loaded, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the trainer saves its adapter here
    FUNCTIONS[name](ar)


def test_generators_refuse_before_the_first_item_not_after(diffusion: Loaded) -> None:
    steps = host.generate_step(IDS[0], diffusion.model, max_tokens=3)
    with pytest.raises(DiffusionError):
        next(steps)
    with pytest.raises(StopIteration):
        next(steps)


def test_a_diffusion_draft_model_is_refused(ar: Loaded, data: Path) -> None:
    draft = mlx_lm.load(str(data / "a2d" / "gpt2-grow" / "run"))[0]
    with pytest.raises(DiffusionError, match="Speculative decoding does not work"):
        _speculate(ar, draft)
    with pytest.raises(DiffusionError, match="Speculative decoding does not work"):
        list(mlx_lm.stream_generate(ar.model, ar.tokenizer, PROMPT, draft_model=draft, max_tokens=3))


def test_the_server_refuses_a_diffusion_draft_model_when_it_is_loaded(ar: Loaded, data: Path) -> None:
    provider = _provider(str(ar.path), draft=str(data / "a2d" / "gpt2-grow" / "run"))
    with pytest.raises(DiffusionError, match="mlx_lm.server does not work"):
        provider.load_default()
    assert provider.model is None and provider.draft_model is None


def test_a_refused_server_model_can_be_followed_by_another(diffusion: Loaded, ar: Loaded) -> None:
    provider = _provider("unused")
    provider.load(str(ar.path))
    with pytest.raises(DiffusionError):
        provider.load(str(diffusion.path))
    assert provider.model is None and provider.model_key is None
    with pytest.raises(DiffusionError):  # not remembered as loaded
        provider.load(str(diffusion.path))
    model, _ = provider.load(str(ar.path))
    assert getattr(model, "diffusion_spec", None) is None and provider.model is model


# --- command lines

COMMANDS: dict[str, tuple[object, ...]] = {
    "chat": (),
    "cache_prompt": ("--prompt", "hello", "--prompt-cache-file", "cache.safetensors"),
    "benchmark": ("-p", 4, "-g", 4, "-n", 1),
    "perplexity": (),
    "lora": ("--train", "--data", "."),
    "server": ("--port", 0),
    "evaluate": ("--tasks", "none"),
    "quant.awq": (),
    "quant.dwq": (),
    "quant.dynamic_quant": (),
    "quant.gptq": (),
}


@pytest.mark.usefixtures("evaluate")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_in_one_sentence(
    diffusion: Loaded, command: str, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if command == "quant.dwq":  # it reads its data set, from the network, before it loads the model
        module = importlib.import_module("mlx_lm.quant.dwq")
        monkeypatch.setattr(module, "load_data", lambda *args: (DATASET, DATASET))
    if command == "server":
        monkeypatch.setattr(importlib.import_module("mlx_lm.server"), "run", lambda *args: pytest.fail("it started"))
    outcome = run(f"mlx_lm.{command}", "--model", diffusion.path, *COMMANDS[command])
    assert outcome.status == 1
    lines = [line for line in outcome.err.splitlines() if line]
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith(f"{ERROR}mlx_lm.{command} does not work with diffusion checkpoints")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("awq", "awq_quantize"),
        ("dwq", "dwq_quantize"),
        ("gptq", "gptq_quantize"),
        ("dynamic_quant", "eval_ppl"),
        ("dynamic_quant", "estimate_sensitivities"),
    ],
)
def test_a_quantizer_called_from_python_refuses(diffusion: Loaded, module: str, function: str) -> None:
    call = getattr(importlib.import_module(f"mlx_lm.quant.{module}"), function)
    with pytest.raises(DiffusionError, match=f"^mlx_lm.quant.{module}.{function} does not work with diffusion"):
        call(diffusion.model)


def test_every_patched_command_is_walked() -> None:
    from mlx_dllm_plugin.patches import mlx_lm as patched

    others = ("utils", "sample_utils", "generate", "convert", "tuner.trainer")  # no commands, or they take diffusion
    commands = {name for name in patched.MODULES if name not in others}
    assert commands == set(COMMANDS)


def test_the_server_refuses_a_broken_diffusion_checkpoint_too(
    data: Path, tmp_path: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("mlx_lm.server"), "run", lambda *args: pytest.fail("it started"))
    broken = copy_run(data / "a2d" / "gpt2-grow" / "run", tmp_path / "run")
    (broken / "model" / "config.json").write_text("{")
    assert_one_sentence(run("mlx_lm.server", "--model", broken), "config.json", "JSON")


def test_the_server_starts_with_an_autoregressive_model(
    ar: Loaded, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(
        importlib.import_module("mlx_lm.server"),
        "run",
        lambda host, port, provider: started.append((host, port, provider.cli_args.model)),
    )
    level = logging.getLogger().level
    outcome = run("mlx_lm.server", "--model", ar.path, "--port", 8765)
    logging.getLogger().setLevel(level)
    assert outcome.status == 0
    assert started == [("127.0.0.1", 8765, str(ar.path))]


def test_the_benchmark_still_takes_an_autoregressive_model(ar: Loaded, run: Runner) -> None:
    outcome = run("mlx_lm.benchmark", "--model", ar.path, "-p", 8, "-g", 4, "-n", 1)
    assert outcome.status == 0 and "Averages: prompt_tps=" in outcome.out


def test_a_prompt_cache_of_an_autoregressive_model_still_works(ar: Loaded, run: Runner, tmp_path: Path) -> None:
    cache = tmp_path / "cache.safetensors"
    outcome = run("mlx_lm.cache_prompt", "--model", ar.path, "--prompt", "The cat", "--prompt-cache-file", cache)
    assert outcome.status == 0 and cache.is_file()


def test_chat_still_takes_an_autoregressive_model(ar: Loaded, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *args: "q")
    monkeypatch.setattr(importlib.import_module("mlx_lm.chat").ChatUI, "prompt", lambda self: "q", raising=True)
    assert run("mlx_lm.chat", "--model", ar.path).status == 0


# --- mlx-vlm


@pytest.fixture(scope="module")
def mlx_vlm() -> types.ModuleType:
    return importlib.import_module("mlx_vlm")


@pytest.mark.parametrize("where", ["run", "run/model"])
@pytest.mark.parametrize("name", ["gpt2-grow", "qwen2-reuse"])
def test_mlx_vlm_refuses_in_one_sentence(mlx_vlm: Any, data: Path, name: str, where: str) -> None:
    path = data / "a2d" / name / where
    for load in (lambda: mlx_vlm.utils.load_model(path), lambda: mlx_vlm.load(str(path))):
        with pytest.raises(DiffusionError) as refusal:
            load()
        message = str(refusal.value)
        assert f"family {name.split('-')[0]}" in message and "use mlx_lm.generate" in message and "\n" not in message


def test_mlx_vlm_still_takes_other_models(mlx_vlm: Any, ar: Loaded) -> None:
    """What it says of an autoregressive checkpoint is its own affair: the same with the plugin and without."""
    import mlx_dllm_plugin

    def outcome() -> str:
        try:
            return type(mlx_vlm.utils.load_model(ar.path)).__module__
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    ours = outcome()
    mlx_dllm_plugin.deactivate()
    try:
        assert outcome() == ours
    finally:
        mlx_dllm_plugin.activate()
