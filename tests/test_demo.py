"""The demo checkpoint is what the README says: small, whole, and right on problems it has not seen."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

import mlx_dllm_plugin
from mlx_dllm_plugin import DecodingOptions, demo_path
from mlx_dllm_plugin.commands import main as mlx_dllm
from tests.conftest import ROOT
from tests.tools import Runner

sys.path.insert(0, str(ROOT / "examples"))

from demo_problems import TASKS, Problem, check_disjoint, problems  # noqa: E402

RESULT = json.loads((ROOT / "benchmarks" / "results" / "demo_quality.json").read_text())


def ids_of(tokenizer: Any, problem: Problem) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": problem.prompt}], add_generation_prompt=True)


def test_it_is_small_and_a_whole_run_directory(demo: tuple[Any, Any]) -> None:
    files = [path for path in demo_path().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6_000_000
    assert {"manifest.json", "model/config.json", "model/model.safetensors", "model/tokenizer.json"} <= {
        path.relative_to(demo_path()).as_posix() for path in files
    }
    assert json.loads((demo_path() / "manifest.json").read_text())["status"] == "completed"
    assert sum(value.size for _, value in tree_flatten(demo[0].parameters())) <= 2_600_000
    text = "".join(path.read_text() for path in files if path.suffix in (".json", ".jinja", ".jsonl"))
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)


def test_info_finds_nothing_wrong_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert mlx_dllm(["info", str(demo_path())]) == 0
    assert "qwen2" in capsys.readouterr().out


def test_transformers_and_mlx_lm_read_its_tokenizer_alike(demo: tuple[Any, Any]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(demo_path() / "model")
    for text in ("What is 47 + 38?", "Reverse the word: planet", 'Ünïcode {"a": 1}', "1234567890"):
        ids = theirs.encode(text)
        assert ids == demo[1].encode(text) and theirs.decode(ids) == text
    digits = [theirs.decode([i]) for i in theirs.encode("90817")]
    assert digits == list("90817")


def test_the_result_file_is_of_these_weights_and_adds_up() -> None:
    weights = demo_path() / "model" / "model.safetensors"
    assert RESULT["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert RESULT["split"] == "test" and set(RESULT["problems"]) == set(TASKS)
    for rule in ("one token a step", "threshold 0.9"):
        scored = RESULT["rules"][rule]
        assert scored["of"] == RESULT["count"] == sum(RESULT["problems"].values())
        assert scored["exact"] == sum(scored["tasks"].values()) == scored["of"] - len(scored["wrong"])
        assert scored["tokens_per_forward"] == round(scored["tokens"] / scored["forwards"], 3)
        assert scored["of"] == 1000 and scored["exact"] >= 970
    assert RESULT["rules"]["threshold 0.9"]["tokens_per_forward"] >= 6
    assert RESULT["rules"]["one token a step"]["tokens_per_forward"] <= 1


def test_the_splits_share_nothing() -> None:
    assert check_disjoint(count=3000)


@pytest.mark.parametrize(
    ("rule", "options", "count"),
    [
        ("threshold 0.9", DecodingOptions(unmasking="threshold", threshold=0.9), 60),
        ("one token a step", DecodingOptions(unmasking="a2d", max_denoising_steps=10_000), 8),
    ],
)
def test_it_answers_as_the_result_file_says(
    demo: tuple[Any, Any], rule: str, options: DecodingOptions, count: int
) -> None:
    """The first of the scored problems again: right where it was right then."""
    model, tokenizer = demo
    found = problems("test", RESULT["count"], RESULT["seed"])[:count]
    wrong = set(RESULT["rules"][rule]["wrong"])
    results = mlx_dllm_plugin.decode(model, [ids_of(tokenizer, problem) for problem in found], options)
    right = [
        result.finish_reason == "stop" and problem.check(tokenizer.decode(result.tokens))
        for problem, result in zip(found, results, strict=True)
    ]
    assert right == [number not in wrong for number in range(count)]
    assert sum(right) > 0.9 * count


def test_a_canvas_of_another_length_works_too(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    found = problems("test", 40, 5)
    for new_tokens in (32, 48):
        options = DecodingOptions(unmasking="threshold", threshold=0.9, max_tokens=new_tokens)
        results = mlx_dllm_plugin.decode(model, [ids_of(tokenizer, problem) for problem in found], options)
        right = [p.check(tokenizer.decode(r.tokens)) for p, r in zip(found, results, strict=True)]
        assert sum(right) >= 36


def test_without_a_model_the_command_uses_it_and_says_so(run: Runner) -> None:
    outcome = run("mlx_lm.generate", "--mode", "diffusion", "--prompt", "What is 47 + 38?")
    assert outcome.status == 0
    assert outcome.err.splitlines()[0] == (
        "[mlx-dllm-plugin] no --model given: using the demo checkpoint that comes with the plugin"
    )
    assert "85" in outcome.out
    assert re.search(r"Generation: \d+ tokens", outcome.out)
    assert re.search(r"Diffusion: a2d, \d+ forwards, [\d.]+ tokens per forward", outcome.out)


def test_the_training_script_never_overwrites(tmp_path: Path) -> None:
    from tests.tools import process

    (tmp_path / "run").mkdir()
    outcome = process([ROOT / "examples" / "train_demo.py", "--output", tmp_path / "run", "--minutes", "1"])
    assert outcome.status != 0 and "exists" in outcome.err + outcome.out
    assert list((tmp_path / "run").iterdir()) == []
