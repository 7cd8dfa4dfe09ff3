"""Wheel, sdist -> wheel and editable install: each is built, installed in a new environment, tried and removed."""

import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import mlx_lm
import pytest

ROOT = Path(__file__).parent.parent
STARTUP = {"zz-mlx-dllm-plugin.pth", "zz-mlx-dllm-plugin.start", "_mlx_dllm_boot.py"}
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")


def run(*command: object, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_DLLM", "PYTHON"))}
    result = subprocess.run(
        [str(part) for part in command], env={**clean, **environment}, capture_output=True, text=True, cwd=ROOT.anchor
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """The wheel of the checkout and the one of its sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", out, ROOT)
    (sdist,) = out.glob("mlx_dllm_plugin-*.tar.gz")
    found = {}
    for name, source in (("wheel", ROOT), ("sdist", sdist)):
        run(*PIP, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", out / name, source)
        (found[name],) = (out / name).glob("mlx_dllm_plugin-*-py3-none-any.whl")
    return found


@pytest.fixture(scope="module")
def borrowed(tmp_path_factory) -> Path:
    """The packages of this environment without this one: as links, which no installer takes for its own."""
    folder = tmp_path_factory.mktemp("borrowed")
    for site in {Path(module.__file__).parents[1] for module in (mlx_lm, pytest)}:
        for entry in site.iterdir():
            if "mlx_dllm" not in entry.name and entry.suffix != ".pth" and entry.name != "__pycache__":
                (folder / entry.name).symlink_to(entry)
    return folder


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def checkout(*folders: str) -> dict[str, bytes]:
    return {
        (file.relative_to(ROOT)).as_posix(): file.read_bytes()
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_wheel_contents(wheels):
    wheel = contents(wheels["wheel"])
    metadata = {name for name in wheel if ".dist-info/" in name}
    expected = checkout("mlx_dllm_plugin")
    expected |= {f"mlx_dllm_plugin/{name}": data for name, data in checkout("patches", "compat").items()}
    expected |= {Path(name).name: data for name, data in checkout("startup").items()}
    expected["_mlx_dllm_boot.py"] = expected["mlx_dllm_plugin/_boot.py"]
    assert {name: data for name, data in wheel.items() if name not in metadata} == expected
    assert {"mlx_dllm_plugin/py.typed", "mlx_dllm_plugin/compat/upstream/mlx-lm-0.32.2.json", *STARTUP} <= set(expected)
    licences = {Path(name).name: wheel[name] for name in metadata if "/licenses/" in name}
    assert licences == {name: (ROOT / name).read_bytes() for name in ("LICENSE", "NOTICE")}


def test_wheel_of_the_sdist_is_the_same(wheels):
    def without_record(wheel: Path) -> dict[str, bytes]:
        return {name: data for name, data in contents(wheel).items() if not name.endswith("/RECORD")}

    assert without_record(wheels["sdist"]) == without_record(wheels["wheel"])


def test_start_up_line_is_readable_and_short():
    line = (ROOT / "startup/zz-mlx-dllm-plugin.pth").read_text()
    assert line.count("\n") == 1 and line.startswith("import ") and "exec" not in line and len(line) < 120
    assert (ROOT / "startup/zz-mlx-dllm-plugin.start").read_text() == "_mlx_dllm_boot:startup\n"


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_install_try_and_uninstall(kind, wheels, borrowed, tmp_path):
    environment, home = tmp_path / "venv", tmp_path / "home"
    home.mkdir()
    venv.create(environment, symlinks=True)
    python = environment / "bin/python"
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "aa-borrowed.pth").write_text(str(borrowed))

    def files() -> set[str]:
        return {str(file.relative_to(environment)) for file in environment.rglob("*") if not file.is_dir()}

    before = files()
    pip = (*PIP[:3], "--python", python, *PIP[3:])
    if kind == "editable":
        run(*pip, "install", "--no-build-isolation", "--no-deps", "--no-index", "--editable", ROOT)
    else:
        run(*pip, "install", "--no-deps", "--no-index", wheels[kind])

    top = {file.name for file in site.iterdir()} - {"__pycache__", "aa-borrowed.pth"}
    top = {name for name in top if not name.endswith(".dist-info")}
    assert top == STARTUP | {"_mlx_dllm_plugin.pth" if kind == "editable" else "mlx_dllm_plugin"}
    assert (environment / "bin/mlx-dllm").exists()

    code = """
import sys
assert "mlx_dllm_plugin" not in sys.modules and "_mlx_dllm_boot" in sys.modules
import mlx_lm
plugin = sys.modules["mlx_dllm_plugin"]
from mlx_dllm_plugin import compat, patches
recorded = {package: compat.releases(package)[-1] == last for package, (_, last) in compat.TESTED.items()}
print(plugin.is_active(), plugin.__version__, len(patches.status()) > 30, *recorded.values())
print(plugin.__file__, patches.__file__, compat.__file__, sep="\\n")
"""
    active, *places = run(python, "-c", code, HOME=str(home)).splitlines()
    assert active.split() == ["True", "0.1.0", "True", "True", "True"]
    root = ROOT if kind == "editable" else site / "mlx_dllm_plugin"
    package = ROOT / "mlx_dllm_plugin" if kind == "editable" else root
    assert places == [str(p / "__init__.py") for p in (package, root / "patches", root / "compat")]
    off = "import sys, mlx_lm; print([n for n in sys.modules if 'mlx_dllm' in n])"
    assert run(python, "-c", off, HOME=str(home), MLX_DLLM_PLUGIN="0") == "[]\n"

    run(*pip, "uninstall", "--yes", "mlx-dllm-plugin")
    assert files() == before
    assert run(python, "-c", off, HOME=str(home)) == "[]\n"


def test_entry_points_of_this_installation():
    declared = {group: {e.name: e for e in entry_points(group=f"mlx_dllm.{group}")} for group in ("hosts", "families")}
    assert {"mlx_lm", "mlx_vlm"} <= set(declared["hosts"])
    assert all("utils" in declared["hosts"][name].load().MODULES for name in ("mlx_lm", "mlx_vlm"))
    assert {"gpt2", "qwen2"} <= set(declared["families"])
