"""Fixtures of all tests: where the goldens are, and that nothing reaches the network."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.tools import Runner, copy_run, make_ar_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"


def goldens_root() -> Path:
    """`MLX_DLLM_GOLDENS`, else ../shared/goldens beside the checkout."""
    return Path(os.environ.get("MLX_DLLM_GOLDENS") or ROOT.parent / "shared" / "goldens")


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of goldens. Missing: a loud skip, and a failure in CI."""
    root = goldens_root()
    if not (root / "a2d").is_dir():
        message = f"no goldens at {root}: set MLX_DLLM_GOLDENS to the folder that holds a2d/"
        if os.environ.get("CI"):
            pytest.fail(message)
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    return root


@pytest.fixture(scope="session")
def data() -> Path:
    """tests/data: a few small goldens that come with the checkout."""
    return DATA


@pytest.fixture(scope="session")
def path(data: Path) -> Path:
    """A small a2d run."""
    return data / "a2d" / "gpt2-grow" / "run"


@pytest.fixture
def copied(path: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed."""
    return copy_run(path, tmp_path / "run")


@pytest.fixture(scope="session")
def ar(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny autoregressive checkpoint."""
    return make_ar_model(tmp_path_factory.mktemp("ar") / "llama", path / "model")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Runner:
    """Runs a host's command in this process."""
    return Runner(monkeypatch, capfd)


@pytest.fixture(scope="session")
def demo() -> tuple[Any, Any]:
    """The demo checkpoint: model and tokenizer."""
    import mlx_lm

    from mlx_dllm_plugin import demo_path

    return mlx_lm.load(str(demo_path()))
