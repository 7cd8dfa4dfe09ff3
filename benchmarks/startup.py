"""What the start-up line costs a Python that never imports a host.

    python benchmarks/startup.py [RUNS]

Runs `python -c pass` in two bare environments that differ in our start-up files only, in pairs of random order, and
prints the median of the paired differences with a 95 % bootstrap interval. The budget is 1 ms.
"""

import compileall
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import venv
from importlib.metadata import files
from pathlib import Path

STARTUP = {"zz-mlx-dllm-plugin.pth", "zz-mlx-dllm-plugin.start", "_mlx_dllm_boot.py"}

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MLX_DLLM"))}


def make_environment(root: Path, with_plugin: bool) -> Path:
    """A bare environment, with or without the installed plugin's start-up files. Returns its interpreter."""
    venv.create(root, symlinks=os.name != "nt")
    (site,) = root.glob("lib/python*/site-packages")
    if with_plugin:
        for file in files("mlx-dllm-plugin") or []:
            if file.name in STARTUP and len(file.parts) == 1:
                shutil.copy(str(file.locate()), site)
        compileall.compile_dir(site, quiet=1)  # as pip does
    return root / "bin" / "python"


def start(python: Path) -> float:
    """Seconds from spawn to exit."""
    began = time.perf_counter()
    process = os.posix_spawn(python, [str(python), "-c", "pass"], ENVIRONMENT)
    os.waitpid(process, 0)
    return time.perf_counter() - began


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    with tempfile.TemporaryDirectory() as folder:
        pythons = [make_environment(Path(folder) / str(plugin), bool(plugin)) for plugin in (0, 1)]
        for python in pythons * 5:
            start(python)  # warms the file cache
        samples: list[tuple[float, float]] = []
        for _ in range(runs):
            order = random.sample((0, 1), 2)
            seconds = {index: start(pythons[index]) for index in order}
            samples.append((seconds[0], seconds[1]))
    differences = [(plugin - bare) * 1e3 for bare, plugin in samples]
    medians = sorted(statistics.median(random.choices(differences, k=runs)) for _ in range(1000))
    bare = statistics.median(bare for bare, _ in samples) * 1e3
    print(
        f"Python {sys.version.split()[0]}, {runs} pairs: bare {bare:.2f} ms, with the plugin "
        f"{statistics.median(differences):+.2f} ms [{medians[25]:.2f}, {medians[974]:.2f}]"
    )


if __name__ == "__main__":
    main()
