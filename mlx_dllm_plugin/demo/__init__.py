"""The demo checkpoint of the package: a small masked-diffusion model trained by `examples/train_demo.py`."""

from pathlib import Path


def demo_path() -> Path:
    """The a2d run directory of the demo checkpoint, for `mlx_lm.load` and `--model`."""
    return Path(__file__).parent / "run"
