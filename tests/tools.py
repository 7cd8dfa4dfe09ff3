"""What several tests need: tiny models and run directories, and a host's command run in this process or another."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm  # noqa: F401  (its commands are looked up in sys.modules)
import pytest
from mlx.utils import tree_flatten

ERROR = "[mlx-dllm-plugin] error: "
PROMPT = "The cat walks to"


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    status: int
    out: str
    err: str


class Runner:
    """Runs `main()` of a host's module in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
        self.monkeypatch, self.capfd = monkeypatch, capfd

    def __call__(self, command: str, *arguments: object) -> Outcome:
        main = importlib.import_module(command).main if command not in sys.modules else sys.modules[command].main
        self.monkeypatch.setattr(sys, "argv", [command, *map(str, arguments)])
        self.capfd.readouterr()
        status: Any = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        sys.stdout.flush()
        captured = self.capfd.readouterr()
        return Outcome(status, captured.out, captured.err)


def process(arguments: Sequence[object], **env: str) -> Outcome:
    """Another Python with these arguments, offline, with nothing on its terminal."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8", **env},
        timeout=120,
        check=False,
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())  # bytes: a text may hold \r


def assert_one_sentence(outcome: Outcome, *words: str) -> None:
    """Exit status 1, nothing on stdout, and one line of ours on stderr that holds the words."""
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith(ERROR) and len(lines[0]) > len(ERROR) + 10
    assert outcome.status == 1
    for word in words:
        assert word in lines[0]


def shown(text: str) -> str:
    """The tokenizer's text as mlx-lm streams it: its detokenizer drops one space at the start, of any model."""
    return text.removeprefix(" ")


def copy_run(source: Path, target: Path) -> Path:
    """A copy that may be changed (the originals are read-only)."""
    shutil.copytree(source, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; the value `...` removes one."""
    values = json.loads(path.read_text())
    for name, value in changes.items():
        if value is ...:
            values.pop(name, None)
        else:
            values[name] = value
    path.write_text(json.dumps(values))


def make_ar_model(path: Path, tokenizer: Path, *, model_type: str = "llama") -> Path:
    """A tiny autoregressive checkpoint with random weights and the tokenizer files of another."""
    from mlx_lm.utils import _get_classes

    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 341,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "eos_token_id": 339,
    }
    path.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"):
        shutil.copyfile(tokenizer / name, path / name)
    (path / "config.json").write_text(json.dumps(config))
    model_class, args_class = _get_classes(config)
    keys = mx.random.split(mx.random.key(5), 100)
    names = tree_flatten(model_class(args_class.from_dict(config)).parameters())
    weights = {
        name: mx.random.normal(value.shape, key=key) * 0.5 for (name, value), key in zip(names, keys, strict=False)
    }
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path
