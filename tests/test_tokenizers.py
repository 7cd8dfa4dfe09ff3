"""Tokenizers of diffusion checkpoints: the references' ids, and no code of a checkpoint is run unasked."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.utils import load_tokenizer

import mlx_dllm_plugin
from mlx_dllm_plugin.checkpoint import tokenizer_arguments
from mlx_dllm_plugin.errors import CheckpointError, DiffusionError
from tests.models import write_json
from tests.test_hub import put
from tests.tools import Runner, assert_one_sentence, copy_run, edit_json, make_ar_model, process

CHECKED = ["dream-tiny", "llada-8b-tiny", "llada-gqa-tiny", "llada-moe-tiny", "modernbert-tiny"]
BLOCK = ["sdar-b4", "fast_dllm_v2-b32", "a2d_qwen3-mdlm", "a2d_qwen3-bd3lm"]


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail(f"asked: {args}"))


@pytest.fixture
def dream(goldens: Path) -> Path:
    return goldens / "llada_dream" / "dream-tiny"


def golden(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "golden.json").read_text(encoding="utf-8"))


def check(folder: Path, tokenizer: Any) -> None:
    """Every listed text or conversation gives the listed text and ids."""
    for case in golden(folder)["tokenizer_checks"]:
        if not case["chat"]:
            # ModernBERT's own encode adds [CLS] and [SEP], which the list leaves out.
            assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
            continue
        messages = case.get("messages") or [{"role": "user", "content": case["text"]}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert rendered == case["rendered"]
        assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == case["ids"]
        assert tokenizer.encode(rendered, add_special_tokens=False) == case["ids"]


@pytest.mark.parametrize("name", CHECKED)
def test_the_tokenizer_that_mlx_lm_loads_has_the_references_ids(
    goldens: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = goldens / "llada_dream" / name
    tokenizer = mlx_lm.load(str(folder))[1]
    check(folder, tokenizer)
    if name != "modernbert-tiny":
        plain = [case for case in golden(folder)["tokenizer_checks"] if not case["chat"]]
        assert [tokenizer.encode(case["text"]) for case in plain] == [case["ids"] for case in plain]
    assert "transformers" not in capfd.readouterr().err  # it would warn of a model type that it does not know


@pytest.mark.parametrize("name", BLOCK)
def test_prompts_of_block_families_have_the_references_ids(goldens: Path, name: str) -> None:
    folder = goldens / "block" / name
    tokenizer = mlx_lm.load(str(folder))[1]
    pairs: list[tuple[str, list[int]]] = []
    for case in golden(folder)["generations"]:
        if "prompt_text" in case:
            pairs.append((case["prompt_text"], case["prompt_ids"]))
        pairs += zip(case.get("prompt_texts") or (), case["inputs"] if "prompt_texts" in case else (), strict=True)
    assert pairs
    for text, ids in pairs:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        chat = text.removeprefix("<|im_start|>user\n").partition("<|im_end|>")
        if not chat[1]:
            continue
        messages = [{"role": "user", "content": chat[0]}]
        found = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking="<think>" not in text
        )
        assert found == ids


def test_dream_has_its_special_tokens(dream: Path) -> None:
    tokenizer = mlx_lm.load(str(dream))[1]
    special = golden(dream)["special_ids"]
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        special["mask"],
        special["eos"],
        special["pad"],
    )
    assert tokenizer.bos_token == special["bos_token"]
    text = "a<|mask|>b<|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[1] == special["mask"] and ids[-1] == special["im_end"] and tokenizer.decode(ids) == text


# --- code of a checkpoint

RAN = "ran.txt"


def with_code(source: Path, target: Path, class_name: str = "DreamTokenizer") -> Path:
    """A copy whose tokenizer's code is there, and leaves a file behind when it is run."""
    copy = copy_run(source, target)
    (copy / "tokenization_dream.py").write_text(
        "from pathlib import Path\n"
        "from transformers import Qwen2Tokenizer\n"
        f"Path({str(target.parent / RAN)!r}).write_text('yes')\n"
        f"class {class_name}(Qwen2Tokenizer):\n    pass\n"
    )
    edit_json(
        copy / "tokenizer_config.json",
        tokenizer_class=class_name,
        auto_map={"AutoTokenizer": [f"tokenization_dream.{class_name}", None]},
    )
    return copy


@pytest.mark.parametrize("given", [None, {}, {"trust_remote_code": None}, {"trust_remote_code": False}])
def test_code_is_not_run_unasked(dream: Path, tmp_path: Path, given: Any) -> None:
    copy = with_code(dream, tmp_path / "dream")
    check(dream, mlx_lm.load(str(copy), tokenizer_config=given)[1])
    check(dream, load_tokenizer(copy, given))
    assert not (tmp_path / RAN).exists()
    assert given in (None, {}, {"trust_remote_code": None}, {"trust_remote_code": False})


SCRIPT = """
import sys, mlx_lm
tokenizer = mlx_lm.load(sys.argv[1], tokenizer_config={"trust_remote_code": True})[1]
print(type(tokenizer._tokenizer).__module__)
"""


def test_code_is_run_on_request(dream: Path, tmp_path: Path) -> None:
    copy = with_code(dream, tmp_path / "dream")
    cache = {"HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = process(["-c", SCRIPT, copy], **cache)
    assert done.status == 0, done.err
    assert "tokenization_dream" in done.out and (tmp_path / RAN).exists()
    (tmp_path / RAN).unlink()
    command = ["-m", "mlx_lm.generate", "--model", copy, "--prompt", "hi", "--max-tokens", 1, "--trust-remote-code"]
    assert process(command, **cache).status == 0
    assert (tmp_path / RAN).exists()


def test_dreams_class_is_known_by_its_name(dream: Path, tmp_path: Path) -> None:
    """Also where a copy has lost the auto_map."""
    copy = copy_run(dream, tmp_path / "dream")
    edit_json(copy / "tokenizer_config.json", auto_map=...)
    check(dream, mlx_lm.load(str(copy))[1])
    edit_json(copy / "tokenizer_config.json", tokenizer_class="DreamTokenizerFast")
    check(dream, load_tokenizer(copy))


def test_an_unknown_class_is_built_from_tokenizer_json(goldens: Path, tmp_path: Path) -> None:
    source = goldens / "llada_dream" / "llada-8b-tiny"
    copy = with_code(source, tmp_path / "llada", "NobodysTokenizer")
    check(source, mlx_lm.load(str(copy))[1])
    assert not (tmp_path / RAN).exists()


@pytest.mark.parametrize("known", ["PreTrainedTokenizerFast", "Qwen2TokenizerFast"])
def test_a_class_that_transformers_has_is_taken_from_it(dream: Path, tmp_path: Path, known: str) -> None:
    copy = with_code(dream, tmp_path / "dream")
    edit_json(copy / "tokenizer_config.json", tokenizer_class=known)
    assert "tokenizer_type" not in tokenizer_arguments(copy, {})
    if known.startswith("Qwen2"):
        check(dream, load_tokenizer(copy))
    assert not (tmp_path / RAN).exists()


def test_a_tokenizer_of_code_alone_is_refused_in_one_sentence(
    dream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = with_code(dream, tmp_path / "dream", "NobodysTokenizer")
    for load in (mlx_lm.load, load_tokenizer):
        with pytest.raises(CheckpointError) as refusal:
            load(str(copy))
        text = str(refusal.value)
        assert "'NobodysTokenizer'" in text and "--trust-remote-code" in text and "'trust_remote_code': True" in text
        assert "\n" not in text and ". " not in text
    run = Runner(monkeypatch, capfd)
    outcome = run("mlx_lm.generate", "--model", copy, "--prompt", "hi")
    assert_one_sentence(outcome, "NobodysTokenizer", "--trust-remote-code")
    assert not (tmp_path / RAN).exists()


def test_a_tokenizer_from_elsewhere_is_treated_alike(dream: Path, tmp_path: Path) -> None:
    bare = copy_run(dream, tmp_path / "bare")
    for name in ("vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json"):
        (bare / name).unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer files"):
        mlx_lm.load(str(bare))
    elsewhere = with_code(dream, tmp_path / "elsewhere")
    (elsewhere / "config.json").unlink()
    (elsewhere / "model.safetensors").unlink()
    check(dream, mlx_lm.load(str(bare), tokenizer_config={"tokenizer": str(elsewhere)})[1])
    assert not (tmp_path / RAN).exists()


def test_the_tokenizer_of_a_refused_model_can_be_had(goldens: Path, tmp_path: Path) -> None:
    """Refused is loading the model; who has another use for the tokenizer may have it."""
    folder = copy_run(goldens / "block" / "llada2_moe-v21", tmp_path / "copy")
    edit_json(folder / "config.json", model_type="diffusion_gemma")
    with pytest.raises(DiffusionError, match="cannot be decoded"):
        mlx_lm.load(str(folder))
    case = next(case for case in golden(folder)["generations"] if "prompt_text" in case)
    assert load_tokenizer(folder).encode(case["prompt_text"], add_special_tokens=False) == case["prompt_ids"]


# --- nobody is asked, on a terminal either

ON_A_TERMINAL = """
import sys, mlx_lm
assert sys.stdin.isatty()
tokenizer = mlx_lm.load(sys.argv[1])[1]
print("LOADED", tokenizer.mask_token_id)
"""


def on_a_terminal(*arguments: object, seconds: float = 100) -> tuple[int | None, str]:
    """Another Python whose input and output are a terminal at which nobody sits: status (None: still waiting) and
    output."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    os.close(theirs)
    output, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                chunk = os.read(ours, 4096)
            except OSError:  # Linux says so when the other side is closed
                break
            if not chunk:
                break
            output += chunk
            if b"[y/N]" in output:
                child.kill()
        elif child.poll() is not None:
            break
    status = child.wait(timeout=10) if child.poll() is not None or time.monotonic() < end else None
    if status is None:
        child.kill()
        child.wait()
    os.close(ours)
    return status, output.decode(errors="replace")


@pytest.mark.parametrize("name", ["llada_dream/dream-tiny", "block/sdar-b4"])
def test_loading_does_not_ask_on_a_terminal(goldens: Path, name: str) -> None:
    status, output = on_a_terminal("-c", ON_A_TERMINAL, goldens / name)
    assert "[y/N]" not in output and "custom code" not in output
    assert status == 0 and "LOADED" in output, output


BY_ID = """
import builtins, json, sys
def asked(*args):
    raise SystemExit(f"asked: {args}")
builtins.input = asked
from mlx_lm.utils import load_tokenizer, sharded_load
print(json.dumps([load_tokenizer(name).encode(sys.argv[1]) for name in sys.argv[2:]]))
try:
    sharded_load(sys.argv[2])
except Exception as error:
    print(error)
"""


def test_tokenizers_of_hub_ids(dream: Path, data: Path, tmp_path: Path) -> None:
    """`load_tokenizer("org/name")` alone, of a diffusion and of an autoregressive repository."""
    plain = make_ar_model(tmp_path / "ar", data / "a2d" / "gpt2-grow" / "run" / "model")
    put(tmp_path / "hub", "org/dream", with_code(dream, tmp_path / "dream"))
    put(tmp_path / "hub", "org/plain", plain)
    done = process(["-c", BY_ID, "How many cats?", "org/dream", "org/plain"], HF_HUB_CACHE=str(tmp_path / "hub"))
    assert done.status == 0, done.err
    encoded, refusal = done.out.splitlines()
    ours, ar = json.loads(encoded)
    assert "Distributed loading" in refusal  # which allows a tokenizer's code by itself: not before it is refused
    case = next(case for case in golden(dream)["tokenizer_checks"] if case.get("text") == "How many cats?")
    assert ours == case["ids"] and ar == load_tokenizer(plain).encode("How many cats?")
    assert not (tmp_path / RAN).exists()


# --- copies, and what is left alone


@pytest.mark.parametrize("settings", [{}, {"quantize": True, "q_group_size": 32, "q_bits": 4}])
def test_a_converted_dream_loads_again_with_the_same_ids(dream: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    source = with_code(dream, tmp_path / "dream")
    mlx_lm.convert(str(source), str(tmp_path / "mlx"), **settings)
    assert {"vocab.json", "merges.txt"} <= {file.name for file in (tmp_path / "mlx").iterdir()}
    assert not (tmp_path / "mlx" / "tokenizer.json").exists()  # transformers makes one, and the original has none
    model, tokenizer = mlx_lm.load(str(tmp_path / "mlx"))[:2]
    check(dream, tokenizer)
    original = mlx_lm.load(str(dream))[0].diffusion_spec
    assert model.diffusion_spec.mask_token_id == original.mask_token_id == tokenizer.mask_token_id
    assert model.diffusion_spec.eos_token_ids == original.eos_token_ids
    assert not (tmp_path / RAN).exists()


@pytest.mark.parametrize("given", [None, {}, {"trust_remote_code": None}, {"trust_remote_code": True}])
def test_autoregressive_checkpoints_get_what_they_got(
    data: Path, tmp_path: Path, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_ar_model(tmp_path / "ar", data / "a2d" / "gpt2-grow" / "run" / "model")
    seen = []
    monkeypatch.setattr(mlx_lm.utils, "_load_tokenizer", lambda path, extra, **kwargs: seen.append(extra))
    load_tokenizer(path, given)
    edit_json(path / "config.json", model_type="no_such_model", auto_map={"AutoConfig": "configuration_x.XConfig"})
    load_tokenizer(path, given)
    write_json(path / "config.json", "{")  # for the host to say
    load_tokenizer(path, given)
    assert seen == [given] * 3


def test_arguments_of_the_caller_are_kept(dream: Path, goldens: Path) -> None:
    given = {"trust_remote_code": False, "padding_side": "left"}
    found = tokenizer_arguments(dream, given)
    assert found["padding_side"] == "left" and found["tokenizer_type"] == "qwen2"
    assert given == {"trust_remote_code": False, "padding_side": "left"}
    assert tokenizer_arguments(dream, {"trust_remote_code": True}) == {"trust_remote_code": True}
    assert tokenizer_arguments(dream, {"tokenizer_type": "gpt2"})["tokenizer_type"] == "gpt2"
    known = tokenizer_arguments(goldens / "llada_dream" / "modernbert-tiny", {})
    assert known == {"trust_remote_code": False}  # transformers knows the model: its own choice counts


@pytest.mark.parametrize("load", [mlx_lm.load, mlx_dllm_plugin.load])
def test_dllms_conversions_chat_without_thinking_unless_asked(goldens: Path, load: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]

    def rendered(name: str, **given: Any) -> str:
        tokenizer = load(goldens / "block" / name)[1]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **given)

    off = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert rendered("a2d_qwen3-mdlm").endswith(off)
    assert rendered("a2d_qwen3-mdlm", enable_thinking=False).endswith(off)
    assert not rendered("a2d_qwen3-mdlm", enable_thinking=True).endswith(off)
    assert not rendered("sdar-b4").endswith(off)
