"""Every road through the hosts once, with golden results: `python -m tests.matrix` runs it per pair of releases.

It needs no torch, and imports this package nowhere, so that nothing but the start-up line can have activated it. The
first words of a test's name are its column in the README's table (`tests.matrix.COLUMNS`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from tests.tools import ERROR, PROMPT, Runner, assert_one_sentence, make_ar_model, process, shown

QUESTION = "What is the capital of France?"
QUIET = ("--verbose", "False")
PLAIN = {"MLX_DISABLE_COMPILE": "1"}  # compiling takes the CPU seconds
PACKAGES = ("mlx-lm", "mlx-vlm", "mlx", "transformers")


@pytest.fixture(scope="session", autouse=True)
def installed(record_testsuite_property: Callable[[str, object], None]) -> None:
    """For the report: which releases these are, and where the plugin was found. Nothing is tried without it."""
    for package in PACKAGES:
        try:
            record_testsuite_property(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            pass
    record_testsuite_property("Python", ".".join(platform.python_version_tuple()[:2]))
    record_testsuite_property("machine", f"{platform.system()} ({mx.default_device().type.name})")
    plugin = sys.modules.get("mlx_dllm_plugin")
    assert plugin, "mlx_lm was imported and the start-up line has not activated the plugin"
    record_testsuite_property("plugin", plugin.__file__)


@pytest.fixture(scope="module")
def gpt2(data: Path) -> Path:
    """An a2d run."""
    return data / "a2d" / "gpt2-grow" / "run"


@pytest.fixture(scope="module")
def a2d(data: Path) -> list[dict[str, Any]]:
    """What a2d's own sampler makes of it: prompt text and ids, options, final ids."""
    golden = json.loads((data / "a2d" / "gpt2-grow" / "golden.json").read_text())
    found = [{**case, "prompt": golden["prompts"][case["prompt_index"]]} for case in golden["a2d_sample"]]
    found = [case for case in found if case["target"] == "tokens" and case["num_steps"] in (4, 8) and a2d_tokens(case)]
    assert len(found) >= 5
    return found


def a2d_options(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "canvas_length": case["canvas_len"],
        "max_denoising_steps": case["num_steps"],
        "confidence_temperature": case["temperature"],
        "stop_at_eos": False,
    }


def a2d_tokens(case: dict[str, Any]) -> list[int]:
    return case["final_ids"][len(case["prompt"]["ids"]) :]


def a2d_text(case: dict[str, Any]) -> str:
    return shown(case["a2d_sample_stdout"].removeprefix(case["prompt"]["text"]))


@pytest.fixture(scope="module")
def v22(goldens: Path) -> Path:
    """A tiny LLaDA2.2."""
    return goldens / "block" / "llada2_moe-v22"


@pytest.fixture(scope="module")
def llada22(v22: Path) -> list[dict[str, Any]]:
    """Its generations with default settings; the first is of QUESTION in the chat template."""
    found = json.loads((v22 / "golden.json").read_text())["generations"]
    found = [case for case in found if case["name"].startswith("default")]
    assert len(found) >= 4 and QUESTION in found[0]["prompt_text"]
    return found


def llada22_text(case: dict[str, Any]) -> str:
    return case["output_text"].removesuffix("<|endoftext|>")


@pytest.fixture(scope="module")
def mlx_vlm() -> Any:
    return pytest.importorskip("mlx_vlm")


@pytest.fixture(scope="module")
def ar(gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ar_model(tmp_path_factory.mktemp("ar") / "llama", gpt2 / "model")


# --- the start-up line, and that every change fits

STATES = """
import importlib, json, sys, warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import mlx_lm
    plugin = sys.modules["mlx_dllm_plugin"]
    from mlx_dllm_plugin import compat, patches
    for target in sorted({record.target for record in patches.status()}):
        try:
            importlib.import_module(target)
        except ImportError:  # it needs a package that is not installed, or is not there in this release
            pass
drift = [str(w.message) for w in told if issubclass(w.category, plugin.UpstreamDriftWarning)]
states = [[record.target, record.symbol, record.state, record.detail] for record in patches.status()]
print(json.dumps({"active": plugin.is_active(), "drift": drift, "states": states, "tested": compat.TESTED}))
"""


def within(tested: dict[str, list[str]]) -> bool:
    """Whether the hosts are releases that the plugin was written for."""
    from packaging.version import Version

    found = {package: Version(importlib.metadata.version(package)) for package in tested}
    return all(Version(first) <= found[package] <= Version(last) for package, (first, last) in tested.items())


def test_startup_activates_without_an_import_and_every_change_applies(mlx_vlm: Any) -> None:
    outcome = process(["-c", STATES])
    assert outcome.status == 0, outcome.err
    assert "[mlx-dllm-plugin]" not in outcome.err
    found = json.loads(outcome.out.splitlines()[-1])
    assert found["active"]
    assert [state for state in found["states"] if state[2] == "disabled"] == []
    assert found["drift"] == [] or not within(found["tested"])
    applied = {target for target, _, state, _ in found["states"] if state == "applied"}
    assert {"mlx_lm.generate", "mlx_lm.utils", "mlx_lm.convert", "mlx_lm.server"} <= applied
    assert {"mlx_vlm.utils", "mlx_vlm.generate.dispatch"} <= applied


def test_startup_of_the_readmes_first_command() -> None:
    script = """
import sys
from importlib.metadata import entry_points
(script,) = entry_points(group="console_scripts", name="mlx_lm.generate")
sys.argv[0] = script.name
sys.exit(script.load()())
"""
    outcome = process(["-c", script, "--mode", "diffusion", "--prompt", "What is 47 + 38?", *QUIET])
    assert outcome.status == 0, outcome.err
    assert outcome.out == "47 + 38 = 85\n" and "using the demo checkpoint" in outcome.err


# --- generate and stream


def test_generate_the_command_writes_the_text_of_a2d(gpt2: Path, a2d: list[dict[str, Any]], run: Runner) -> None:
    for case in a2d:
        outcome = run(
            *("mlx_lm.generate", "--model", gpt2, "--prompt", case["prompt"]["text"], *QUIET),
            *("--canvas-length", case["canvas_len"], "--max-denoising-steps", case["num_steps"]),
            *("--confidence-temperature", case["temperature"], "--stop-at-eos", "false"),
        )
        assert (outcome.status, outcome.out) == (0, a2d_text(case) + "\n"), outcome.err


def test_generate_from_python(gpt2: Path, a2d: list[dict[str, Any]]) -> None:
    loaded = mlx_lm.load(str(gpt2))
    for case in a2d:
        assert mlx_lm.generate(*loaded, case["prompt"]["text"], **a2d_options(case)) == a2d_text(case)


def test_stream_gives_the_tokens_of_a2d_one_by_one(gpt2: Path, a2d: list[dict[str, Any]]) -> None:
    loaded = mlx_lm.load(str(gpt2))
    for case in a2d:
        responses = list(mlx_lm.stream_generate(*loaded, case["prompt"]["ids"], **a2d_options(case)))
        assert [response.token for response in responses] == a2d_tokens(case)
        assert [response.generation_tokens for response in responses] == list(range(1, len(responses) + 1))
        assert "".join(response.text for response in responses) == a2d_text(case)
        assert responses[-1].finish_reason == "length" and responses[-1].forwards == case["num_steps"]


def test_stream_shows_tokens_before_it_has_finished(gpt2: Path) -> None:
    options = {"unmasking": "low_confidence", "block_length": 4, "max_tokens": 16, "stop_at_eos": False}
    counts = [response.forwards for response in mlx_lm.stream_generate(*mlx_lm.load(str(gpt2)), PROMPT, **options)]
    assert counts == sorted(counts) and counts[0] < counts[-1]


# --- LLaDA2.2


def test_llada22_lm_the_command(v22: Path, llada22: list[dict[str, Any]], run: Runner) -> None:
    outcome = run("mlx_lm.generate", "--model", v22, "--prompt", QUESTION, "--max-tokens", 64, *QUIET)
    assert (outcome.status, outcome.out) == (0, llada22_text(llada22[0]) + "\n"), outcome.err


def test_llada22_lm_from_python(v22: Path, llada22: list[dict[str, Any]]) -> None:
    model, tokenizer = mlx_lm.load(str(v22))
    for case in llada22:
        limit = case["settings"]["gen_length"]
        responses = list(mlx_lm.stream_generate(model, tokenizer, case["prompt_ids"], max_tokens=limit))
        assert [response.token for response in responses] == case["output_ids"], case["name"]
        assert (responses[-1].forwards, responses[-1].finish_reason) == (case["nfe"], case["finish"])
    assert mlx_lm.generate(model, tokenizer, llada22[0]["prompt_text"], max_tokens=64) == llada22_text(llada22[0])


@pytest.mark.usefixtures("mlx_vlm")
def test_llada22_vlm_the_command(v22: Path, llada22: list[dict[str, Any]], run: Runner) -> None:
    outcome = run("mlx_vlm.generate", "--model", v22, "--prompt", QUESTION, "--max-tokens", 64, "--temperature", 0)
    assert (outcome.status, outcome.out) == (0, llada22_text(llada22[0]) + "\n"), outcome.err


def test_llada22_vlm_from_python(v22: Path, llada22: list[dict[str, Any]], mlx_vlm: Any) -> None:
    model, processor = mlx_vlm.load(str(v22))
    for case in llada22:
        given = {"input_ids": mx.array([case["prompt_ids"]]), "max_tokens": case["settings"]["gen_length"]}
        last = list(mlx_vlm.stream_generate(model, processor, "", **given))[-1]
        assert (last.token_ids, last.diffusion_denoising_steps) == (case["output_ids"], case["nfe"]), case["name"]
    from mlx_vlm.prompt_utils import apply_chat_template

    prompt = apply_chat_template(processor, model.config, QUESTION)
    result = mlx_vlm.generate(model, processor, prompt, max_tokens=512, temperature=0.0)
    assert (prompt, result.text) == (llada22[0]["prompt_text"], llada22_text(llada22[0]))


# --- the server


Post = Callable[..., tuple[int, str]]


@contextlib.contextmanager
def served(module: str, model: Path, folder: Path) -> Iterator[Post]:
    """A host's server in a process of its own: posts a chat request, returns status and body."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"

    def post(**more: Any) -> tuple[int, str]:
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": str(model), "messages": messages, "max_tokens": 64, "temperature": 0, **more}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    log = folder / "log"
    with log.open("wb") as told, subprocess.Popen(command, stdout=told, stderr=told) as serving:
        try:
            for _ in range(300):
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=60).close()
                    break
                except urllib.error.URLError:
                    assert serving.poll() is None, log.read_text()
                    time.sleep(0.2)
            yield post
        finally:
            serving.terminate()


@pytest.fixture(scope="module")
def server(v22: Path, mlx_vlm: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Post]:
    with served("mlx_vlm.server", v22, tmp_path_factory.mktemp("server")) as post:
        yield post


def test_server_answers_llada22(server: Post, llada22: list[dict[str, Any]]) -> None:
    status, body = server()
    assert status == 200, body
    answer = json.loads(body)
    assert answer["choices"][0]["message"]["content"] == llada22_text(llada22[0])
    assert answer["usage"]["completion_tokens"] == len(llada22[0]["output_ids"])
    status, body = server(stream=True)
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    parts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
    assert "".join(parts) == llada22_text(llada22[0]) and len([part for part in parts if part]) == 2  # its blocks


def test_server_refuses_what_it_cannot_do(server: Post) -> None:
    status, body = server(unmasking="nope")
    assert status == 400 and "Unknown unmasking rule" in body


# --- convert


def convert(run: Runner, source: Path, target: Path, *more: object) -> Path:
    outcome = run("mlx_lm.convert", "--hf-path", source, "--mlx-path", target, *more)
    assert outcome.status == 0, outcome.err
    return target


def test_convert_llada22(v22: Path, llada22: list[dict[str, Any]], run: Runner, tmp_path: Path, mlx_vlm: Any) -> None:
    """A copy writes the golden's text; a quantized one the same text through both hosts."""
    options = ("--prompt", QUESTION, "--max-tokens", 64)
    copy = convert(run, v22, tmp_path / "copy")
    assert run("mlx_lm.generate", "--model", copy, *options, *QUIET).out == llada22_text(llada22[0]) + "\n"
    small = convert(run, v22, tmp_path / "small", "-q", "--q-bits", 8, "--q-group-size", 32)
    assert json.loads((small / "config.json").read_text())["quantization"]["bits"] == 8
    text = run("mlx_lm.generate", "--model", small, *options, *QUIET).out
    assert len(text) > 10 and run("mlx_vlm.generate", "--model", small, *options, "--temperature", 0).out == text
    other = ("-q", "--q-bits", 8, "--q-group-size", 32)
    assert run("mlx_vlm.convert", "--hf-path", v22, "--mlx-path", tmp_path / "other", *other).status == 0
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == (small / "model.safetensors").read_bytes()


def test_convert_a2d(gpt2: Path, a2d: list[dict[str, Any]], run: Runner, tmp_path: Path) -> None:
    """A copy decodes to the golden's tokens, and the logits of a quantized one are near the original's."""
    loaded = {"original": mlx_lm.load(str(gpt2))}
    for name, more in (("copy", ()), ("small", ("-q", "--q-bits", 8, "--q-group-size", 32))):
        loaded[name] = mlx_lm.load(str(convert(run, gpt2, tmp_path / name, *more)))
    case, ids = a2d[0], mx.array([a2d[0]["prompt"]["ids"]])
    tokens = {
        name: [r.token for r in mlx_lm.stream_generate(*pair, case["prompt"]["text"], **a2d_options(case))]
        for name, pair in loaded.items()
    }
    assert tokens["copy"] == a2d_tokens(case) and len(tokens["small"]) == len(tokens["copy"])
    wanted, found = (np.array(loaded[name][0](ids)).ravel() for name in ("original", "small"))
    assert np.corrcoef(wanted, found)[0, 1] > 0.99 and not np.array_equal(wanted, found)


# --- refusals, and models that are no diffusion models

# Commands that cannot decode a diffusion checkpoint yet.
REFUSED: dict[str, tuple[object, ...]] = {
    "chat": (),
    "cache_prompt": ("--prompt", "hello", "--prompt-cache-file", "cache.safetensors"),
    "benchmark": ("-p", 4, "-g", 4, "-n", 1),
    "perplexity": (),
    "server": ("--port", 0),
}


@pytest.mark.parametrize("command", REFUSED)
def test_refusals_of_a_command(
    command: str, gpt2: Path, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if command == "server":
        module = importlib.import_module("mlx_lm.server")
        monkeypatch.setattr(module, "run", lambda *args: pytest.fail("it started"))
    outcome = run(f"mlx_lm.{command}", "--model", gpt2, *REFUSED[command])
    (line,) = outcome.err.splitlines()
    assert line.startswith(f"{ERROR}mlx_lm.{command} does not work with diffusion checkpoints")
    assert outcome.status == 1 and list(tmp_path.iterdir()) == []


def test_refusals_of_a_request_that_names_another_model(ar: Path, gpt2: Path, tmp_path: Path) -> None:
    with served("mlx_lm.server", ar, tmp_path) as post:
        assert post()[0] == 200
        for _ in range(2):  # the first must not leave it loaded
            status, body = post(model=str(gpt2))
            assert status >= 400 and "mlx_lm.server does not work with diffusion checkpoints" in body
        assert post()[0] == 200


def test_refusals_from_python(gpt2: Path) -> None:
    model, tokenizer = mlx_lm.load(str(gpt2))
    host = sys.modules["mlx_lm.generate"]
    for call in (
        lambda: mlx_lm.batch_generate(model, tokenizer, [[5, 6, 7]], max_tokens=3),
        lambda: list(host.generate_step(mx.array([5, 6, 7]), model, max_tokens=3)),
    ):
        with pytest.raises(ValueError, match="does not work with diffusion checkpoints") as refusal:
            call()
        assert type(refusal.value).__name__ == "DiffusionError" and "\n" not in str(refusal.value)


def test_refusals_of_mlx_vlm(gpt2: Path, v22: Path, run: Runner, mlx_vlm: Any) -> None:
    assert_one_sentence(run("mlx_vlm.generate", "--model", v22, "--prompt", "hi", "--mode", "ar"), "--mode ar")
    with pytest.raises(ValueError, match="use mlx_lm.generate"):
        mlx_vlm.load(str(gpt2))


def test_autoregressive_models_decode_as_without_the_plugin(ar: Path, run: Runner) -> None:
    generate = ("-m", "mlx_lm", "generate", "--model", ar, "--prompt", PROMPT, "--max-tokens", 20, "--seed", 1)
    ours, upstream = process([*generate, *QUIET], **PLAIN), process([*generate, *QUIET], MLX_DLLM_PLUGIN="0", **PLAIN)
    assert (ours.status, ours.out) == (0, upstream.out) and len(ours.out) > 10, ours.err
    refused = run("mlx_lm.generate", "--model", ar, "--prompt", PROMPT, "--mode", "diffusion")
    assert_one_sentence(refused, "no diffusion spec")
