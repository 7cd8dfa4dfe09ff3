"""Fingerprints of the patched upstream files, and the one warning when they are others."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

import mlx_dllm_plugin
from mlx_dllm_plugin import compat, patches

NEW = {"mlx_vlm.train", "mlx_vlm.trainer.api"}  # that the first tested release does not have
PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def test_tested_range_is_what_pyproject_says():
    text = PYPROJECT.read_text()
    project = tomllib.loads(text)["project"]
    stated = re.search(r"# Tested with (mlx-lm) (\S+) to (\S+) and (mlx-vlm) (\S+) to (\S+) ", text)
    assert stated is not None
    assert compat.TESTED == {stated[1]: (stated[2], stated[3]), stated[4]: (stated[5], stated[6])}
    assert f"mlx-lm>={compat.TESTED['mlx-lm'][0]}" in project["dependencies"]
    for extra in ("vlm", "test"):
        assert f"mlx-vlm>={compat.TESTED['mlx-vlm'][0]}" in project["optional-dependencies"][extra]


def test_every_patched_module_is_known_for_the_tested_range():
    assert set(compat.known()) == set(patches._TARGETS)
    for target, releases in compat.known().items():
        first, last = compat.TESTED[target.partition(".")[0].replace("_", "-")]
        assert last in releases and (first in releases or target in NEW)
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in releases.values())


@pytest.mark.parametrize("target", sorted(compat.known()))
def test_fingerprints_are_those_of_the_installed_release(target):
    host = target.partition(".")[0]
    version = importlib.metadata.version(host.replace("_", "-"))
    file = Path(importlib.util.find_spec(host).origin).parents[1] / (target.replace(".", "/") + ".py")  # type: ignore
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if version in compat.known()[target]:
        assert compat.known()[target][version] == digest
    else:
        assert compat._is_known(target, compat, str(file)) is (digest in compat.known()[target].values())


def test_known_files_cost_under_5_ms(recwarn):
    targets = {name: importlib.util.find_spec(name.partition(".")[0]).origin for name in compat.known()}  # type: ignore
    modules = []
    for name, origin in targets.items():
        module = type(sys)(name)
        module.__file__ = str(Path(origin).parents[1] / (name.replace(".", "/") + ".py"))  # type: ignore[arg-type]
        module.__loader__ = compat.__loader__
        modules.append(module)
    best = float("inf")
    for _ in range(20):
        compat.known.cache_clear()
        start = time.perf_counter()
        for module in modules:
            compat.check(module)
        best = min(best, time.perf_counter() - start)
    assert best < 5e-3


# --- drift, with toy hosts --------------------------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Two toy hosts and a copy of the plugin that patches them and knows the sha256 of their files."""
    files = {
        "mlx_lm/__init__.py": "__version__ = '9.9'\nfrom .generate import generate",
        "mlx_lm/generate.py": "def generate(): return 'upstream'",
        "mlx_lm/tuner/__init__.py": "",
        "mlx_lm/tuner/trainer.py": "def train(): return 'upstream'",
        "mlx_vlm/__init__.py": "__version__ = '8.8'\nfrom .utils import load",
        "mlx_vlm/utils.py": "def load(): return 'upstream'",
    }
    plugin = tmp_path / "mlx_dllm_plugin"
    plugin.mkdir()
    for file in Path(mlx_dllm_plugin.__file__).parent.glob("*.py"):
        shutil.copy(file, plugin)
    for package in (patches, compat):
        folder = plugin / package.__name__.rpartition(".")[2]
        folder.mkdir()
        for file in Path(package.__file__).parent.glob("*.py"):
            shutil.copy(file, folder)
    patch = """
from mlx_dllm_plugin.patches import Patch, Redirect
PATCH = Patch({!r}, "x", (Redirect({!r}, lambda original, /: "patched"),))
"""
    targets = {"mlx_lm.generate": "generate", "mlx_lm.tuner.trainer": "train", "mlx_vlm.utils": "load"}
    for target, name in targets.items():
        files[f"mlx_dllm_plugin/patches/{target.replace('.', '/')}.py"] = patch.format(target, name)
    files["mlx_dllm_plugin/patches/mlx_lm/__init__.py"] = "MODULES = ('generate', 'tuner.trainer')"
    files["mlx_dllm_plugin/patches/mlx_vlm/__init__.py"] = "MODULES = ('utils',)"
    known = {
        target: {"9.9": hashlib.sha256(files[target.replace(".", "/") + ".py"].encode()).hexdigest()}
        for target in targets
    }
    files["mlx_dllm_plugin/compat/known.json"] = json.dumps(known)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


SHOW = "import mlx_lm, mlx_lm.tuner.trainer as t, mlx_vlm; print(mlx_lm.generate(), t.train(), mlx_vlm.load())"


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_DLLM", "PYTHON"))}
    environment = {**clean, "PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=path, capture_output=True, text=True)


def drift(path: Path, *files: str) -> None:
    for file in files:
        with open(path / file, "a") as stream:
            stream.write("\n# drift\n")


def test_known_files_are_silent(toy):
    result = run(toy, "-W", "always", "-c", SHOW)
    assert (result.returncode, result.stdout, result.stderr) == (0, "patched patched patched\n", "")


def test_drift_is_one_warning_that_names_every_file(toy):
    drift(toy, "mlx_lm/generate.py", "mlx_lm/tuner/trainer.py", "mlx_vlm/utils.py")
    result = run(toy, "-W", "always", "-c", SHOW)
    assert (result.returncode, result.stdout) == (0, "patched patched patched\n")
    assert result.stderr.count("UpstreamDriftWarning") == 1
    first, last = compat.TESTED["mlx-lm"]
    trainer = os.path.join("mlx_lm", "tuner", "trainer.py")
    assert f"mlx-lm 9.9 is not a release mlx-dllm-plugin was written for ({first} to {last}): " in result.stderr
    assert f": {os.path.join('mlx_lm', 'generate.py')}, {trainer} changed." in result.stderr


def test_drift_of_the_other_host_only(toy):
    drift(toy, "mlx_vlm/utils.py")
    result = run(toy, "-c", SHOW)
    assert (result.returncode, result.stdout) == (0, "patched patched patched\n")
    assert "UpstreamDriftWarning: mlx-vlm 8.8 " in result.stderr
    assert f": {os.path.join('mlx_vlm', 'utils.py')} changed." in result.stderr


def test_drift_never_breaks_the_host(toy):
    drift(toy, "mlx_lm/generate.py")
    result = run(toy, "-W", "error", "-c", SHOW)
    assert (result.returncode, result.stdout) == (0, "patched patched patched\n")
    assert result.stderr.startswith("[mlx-dllm-plugin] mlx_lm.generate could not be compared with known versions")
    assert result.stderr.count("\n") == 1
    (toy / "mlx_dllm_plugin/compat/known.json").write_text("{broken")
    result = run(toy, "-c", SHOW)
    assert (result.returncode, result.stdout) == (0, "patched patched patched\n")
    assert all(line.startswith("[mlx-dllm-plugin] ") for line in result.stderr.splitlines())


def test_warning_can_be_filtered(toy):
    drift(toy, "mlx_lm/generate.py")
    code = "import warnings, mlx_dllm_plugin as p; warnings.simplefilter('ignore', p.UpstreamDriftWarning)\n" + SHOW
    result = run(toy, "-c", code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "patched patched patched\n", "")


def test_record_adds_a_release(toy):
    with zipfile.ZipFile(toy / "mlx_lm-10.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mlx_lm/generate.py", "new")
        wheel.writestr("mlx_lm/other.py", "not patched")
    before = json.loads((toy / "mlx_dllm_plugin/compat/known.json").read_text())
    result = run(toy, "-m", "mlx_dllm_plugin.compat", "mlx_lm-10.0-py3-none-any.whl")
    assert (result.returncode, result.stderr) == (0, "")
    before["mlx_lm.generate"]["10.0"] = hashlib.sha256(b"new").hexdigest()
    assert json.loads((toy / "mlx_dllm_plugin/compat/known.json").read_text()) == before
