"""The reference implementations' outputs, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.goldens.__main__ import main

A2D = ("gpt2-grow", "gpt2-partial", "qwen2-reuse", "llama-grow", "mistral-grow", "gemma-grow", "gemma3-grow")


LLADA_DREAM = ("llada-8b-tiny", "llada-gqa-tiny", "llada-moe-tiny", "dream-tiny", "modernbert-tiny")
BLOCK = ("sdar-b4", "fast_dllm_v2-b32", "a2d_qwen3-mdlm", "a2d_qwen3-bd3lm")


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(("name", "cases"), [("gpt2-grow", 52), ("qwen2-reuse", 64)])
def test_goldens_of_the_checkout(name: str, cases: int, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(data / "a2d" / name)]) == 0
    assert last_line(capsys) == f"matched {cases} of {cases}"


@pytest.mark.parametrize("name", A2D)
def test_a2d_goldens(name: str, goldens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(goldens / "a2d" / name)]) == 0
    matched = last_line(capsys).split()
    assert matched[1] == matched[3] and int(matched[1]) > 25


@pytest.mark.parametrize("name", [*(f"llada_dream/{n}" for n in LLADA_DREAM), *(f"block/{n}" for n in BLOCK)])
def test_goldens_of_checkpoints(name: str, goldens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logits, ids, what every forward commits, the number of forwards, and likelihoods: every target matches."""
    assert main([str(goldens / name)]) == 0
    matched = last_line(capsys).split()
    assert matched[1] == matched[3] and int(matched[1]) >= 10


def test_a_wrong_id_is_a_mismatch(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison can fail: one expected id changed, and one expected order changed."""
    import json
    import shutil

    folder = tmp_path / "gpt2-grow"
    shutil.copytree(data / "a2d" / "gpt2-grow", folder)
    golden = json.loads((folder / "golden.json").read_text())
    golden["a2d_sample"][1]["final_ids"][-1] += 1
    steps = golden["a2d_sample"][2]["ids_after_step"]
    steps[0], steps[1] = steps[1], steps[0]
    (folder / "golden.json").write_text(json.dumps(golden))
    assert main([str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("FAIL") for line in lines) == 2
    assert lines[-1] == "matched 50 of 52"


def test_a_folder_without_goldens_is_no_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert last_line(capsys) == "matched 0 of 1"
