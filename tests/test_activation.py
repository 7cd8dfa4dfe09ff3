"""Activation: start-up line, import hooks, patches done and undone, faults.

Most tests run a small Python with a copy of the plugin that holds toy patches, in front of a toy `mlx_lm`; some run
the real one. They do not depend on what the real patches do.
"""

import asyncio
import functools
import hashlib
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
import types
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import mlx_dllm_plugin
from mlx_dllm_plugin import _active_boot, compat, patches
from mlx_dllm_plugin.patches import Patch, Redirect, Replace

PREFIX = "[mlx-dllm-plugin] "

TOY_HOST = {
    "mlx_lm/__init__.py": """
        from ._version import __version__
        from .generate import generate, stream_generate
        """,
    "mlx_lm/_version.py": "__version__ = '9.9'",
    "mlx_lm/__main__.py": "from . import cli; cli.main()",
    "mlx_lm/cli.py": """
        import importlib, sys
        def main():
            importlib.import_module("mlx_lm." + sys.argv.pop(1)).main()
        """,
    "mlx_lm/generate.py": """
        import argparse
        def generate(prompt, *, limit=3):
            return f"upstream {prompt}"
        def stream_generate(prompt):
            yield f"upstream {prompt}"
        def main():
            print(generate("main"), argparse.__name__)
        if __name__ == "__main__":
            print("deprecated")
            main()
        """,
    "mlx_lm/chat.py": """
        from .generate import generate
        def chat(run=generate):
            return run("chat")
        def main():
            print(chat())
        if __name__ == "__main__":
            main()
        """,
    "mlx_lm/models/__init__.py": "",
    "mlx_lm/models/llama.py": "ORIGIN = 'upstream'",
    "mlx_vlm/__init__.py": "from .utils import load",
    "mlx_vlm/utils.py": "import mlx_lm\ndef load(): return 'upstream load'",
}

TOY_PATCHES = {
    "mlx_lm/__init__.py": "MODULES = ('generate', 'chat')",
    "mlx_vlm/__init__.py": "MODULES = ('utils',)",
    "mlx_lm/generate.py": """
        from types import SimpleNamespace
        from mlx_dllm_plugin.patches import Patch, Redirect, Replace
        def generate(original, /, *args, **kwargs):
            return "patched " + original(*args, **kwargs)
        def stream_generate(original, /, *args, **kwargs):
            for text in original(*args, **kwargs):
                yield "patched " + text
        PATCH = Patch("mlx_lm.generate", "diffusion is lost", (
            Redirect("generate", generate, parameters=("prompt", "limit")),
            Redirect("stream_generate", stream_generate, parameters=("prompt",)),
            Replace("argparse", lambda old: SimpleNamespace(__name__="proxy of " + old.__name__)),
        ))
        """,
    "mlx_lm/chat.py": """
        from mlx_dllm_plugin.patches import Patch, Redirect
        PATCH = Patch("mlx_lm.chat", "chat is lost", (
            Redirect("chat", lambda original, /, *args, **kwargs: "chat: " + original(*args, **kwargs)),
        ))
        """,
    "mlx_vlm/utils.py": """
        from mlx_dllm_plugin.patches import Patch, Redirect
        PATCH = Patch("mlx_vlm.utils", "vlm is lost", (Redirect("load", lambda original: "patched " + original()),))
        """,
}

# What a user of the toy host sees, through every kind of reference.
SHOW = """
import functools, mlx_lm, mlx_lm.chat, sys
from mlx_lm import generate
module = sys.modules["mlx_lm.generate"]
print(mlx_lm.generate("a"), "|", generate("b"), "|", functools.partial(generate, limit=1)("c"), "|",
      *mlx_lm.stream_generate("d"), "|", mlx_lm.chat.chat(), "|", module.argparse.__name__)
"""
UPSTREAM = "upstream a | upstream b | upstream c | upstream d | upstream chat | argparse\n"
PATCHED = (
    "patched upstream a | patched upstream b | patched upstream c | patched upstream d | "
    "chat: patched upstream chat | proxy of argparse\n"
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


def copy_plugin(root: Path, toys: dict[str, str]) -> Path:
    """The plugin as it is installed, with other patch files, no records and no engine."""
    source, target = Path(mlx_dllm_plugin.__file__).parent, root / "mlx_dllm_plugin"
    target.mkdir(parents=True)
    for file in source.glob("*.py"):
        shutil.copy(file, target)
    write(target, {"models/__init__.py": ""})
    for package in (patches, compat):
        folder = target / package.__name__.rpartition(".")[2]
        folder.mkdir(exist_ok=True)
        for file in Path(package.__file__).parent.glob("*.py"):
            shutil.copy(file, folder)
    write(target / "patches", toys)
    return root


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder with the toy hosts and the plugin copy, for PYTHONPATH."""
    return write(copy_plugin(tmp_path, TOY_PATCHES), TOY_HOST)


def run(
    path: Path | None, *arguments: str, python: str | Path = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A new interpreter outside the checkout, with `path` in front of site-packages."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_DLLM", "PYTHON", "COV"))}
    if path is not None:
        clean["PYTHONPATH"] = str(path)
    return subprocess.run(
        [python, *arguments],
        env={**clean, **environment},
        cwd=path or Path(sys.executable).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


def shown(result: subprocess.CompletedProcess[str]) -> str:
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def the_line(result: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of an interpreter that did its work."""
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith(PREFIX), result.stderr
    return lines[0]


def upstream_files() -> dict[str, str]:
    roots = [Path(find_spec(host).origin).parent for host in ("mlx_lm", "mlx_vlm")]  # type: ignore[union-attr,arg-type]
    files = (file for root in roots for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module", autouse=True)
def upstream_is_untouched():
    before = upstream_files()
    assert len(before) > 200
    yield
    assert upstream_files() == before


# --- start-up ---------------------------------------------------------------------------------------------------------


def test_idle_python_has_one_finder_and_nothing_of_the_package():
    code = "import sys; print(type(sys.meta_path[0]).__name__, *sorted(sys.modules))"
    finder, *modules = shown(run(None, "-c", code)).split()
    _, *without = shown(run(None, "-c", code, MLX_DLLM_PLUGIN="0")).split()
    assert finder == "HostFinder"
    assert set(modules) - set(without) == {"_mlx_dllm_boot"}


def test_importing_the_package_imports_no_host_and_no_mlx():
    code = "import sys, mlx_dllm_plugin as p; print(p.is_active(), {'mlx', 'mlx_lm', 'mlx_vlm'} & set(sys.modules))"
    assert shown(run(None, "-c", code)) == "True set()\n"


def test_any_script_that_imports_the_host_is_patched(toy):
    assert shown(run(toy, "-c", SHOW)) == PATCHED


def test_the_hooks_take_the_place_of_the_first_finder(toy):
    code = """
import sys
class Later:
    def find_spec(*args): return None
names = lambda: [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path]
sys.meta_path.insert(0, Later())
before = names()
import mlx_lm
print(before[:2], names()[:2], names()[2:] == before[2:] + ["_ModelFinder"])
import mlx_dllm_plugin; mlx_dllm_plugin.deactivate()
print(names() == ["Later", *before[2:]])
"""
    assert shown(run(toy, "-c", code)) == "['Later', 'HostFinder'] ['Later', '_HookFinder'] True\nTrue\n"


@pytest.mark.parametrize("flags, environment", [((), {"MLX_DLLM_PLUGIN": "0"}), (("-X", "mlx_dllm=0"), {})])
def test_opt_out(toy, flags, environment):
    code = SHOW + "print('mlx_dllm_plugin' in sys.modules)"
    assert shown(run(toy, *flags, "-c", code, **environment)) == UPSTREAM + "False\n"
    code = "import mlx_dllm_plugin\n" + SHOW + "mlx_dllm_plugin.activate()\n" + SHOW
    assert shown(run(toy, *flags, "-c", code, **environment)) == UPSTREAM + PATCHED


def test_late_import_equals_early(toy):
    late = SHOW + "import mlx_dllm_plugin\n" + SHOW.replace("from mlx_lm import generate", "")
    assert shown(run(toy, "-S", "-c", late)) == UPSTREAM + PATCHED
    early = "import mlx_dllm_plugin\n" + SHOW
    assert shown(run(toy, "-S", "-c", early)) == PATCHED


def test_modules_imported_after_deactivate_are_not_patched(toy):
    code = "import mlx_dllm_plugin; mlx_dllm_plugin.deactivate()\n" + SHOW + "mlx_dllm_plugin.activate()\n" + SHOW
    assert shown(run(toy, "-c", code)) == UPSTREAM + PATCHED


def test_status(toy):
    code = """
import json, mlx_lm
from mlx_dllm_plugin import deactivate, patches
show = lambda: print(json.dumps([(r.target, r.symbol, r.state) for r in patches.status()]))
show(); deactivate(); show()
"""
    first, second = (json.loads(line) for line in shown(run(toy, "-c", code)).splitlines())
    symbols = ("argparse", "generate", "stream_generate")
    pending = [["mlx_lm.chat", "", "pending"], ["mlx_vlm.utils", "", "pending"]]
    assert first == sorted(pending + [["mlx_lm.generate", symbol, "applied"] for symbol in symbols])
    assert second == [[target, "", "disabled"] for target in ("mlx_lm.chat", "mlx_lm.generate", "mlx_vlm.utils")]


@pytest.mark.parametrize("off, expected", [("1", PATCHED), ("0", UPSTREAM)])
def test_start_file_names_a_callable_that_does_the_same(toy, off, expected):
    for file in startup_files():
        shutil.copy(file, toy)
    name = (toy / "zz-mlx-dllm-plugin.start").read_text().strip()
    code = f"import pkgutil; pkgutil.resolve_name({name!r})()\n"  # what site does on Python 3.15
    assert shown(run(toy, "-S", "-c", code + SHOW, MLX_DLLM_PLUGIN=off)) == expected


# --- python -m --------------------------------------------------------------------------------------------------------


def test_run_as_module_uses_the_patched_module(toy):
    patched = run(toy, "-W", "ignore", "-m", "mlx_lm.generate")
    assert shown(patched) == "deprecated\npatched upstream main proxy of argparse\n"
    plain = run(toy, "-W", "ignore", "-m", "mlx_lm.generate", MLX_DLLM_PLUGIN="0")
    assert shown(plain) == "deprecated\nupstream main argparse\n"
    assert shown(run(toy, "-m", "mlx_lm.chat")) == "chat: patched upstream chat\n"
    assert shown(run(toy, "-m", "mlx_lm", "chat")) == "chat: patched upstream chat\n"


def test_runpy_without_main_runs_nothing(toy):
    code = "import runpy; print(runpy.run_module('mlx_lm.chat')['generate']('x'))"
    assert shown(run(toy, "-c", code)) == "patched upstream x\n"


def test_runner_where_start_up_files_do_not_run(toy):
    assert shown(run(toy, "-S", "-m", "mlx_lm", "chat")) == "upstream chat\n"
    assert shown(run(toy, "-S", "-m", "mlx_dllm_plugin", "chat")) == "chat: patched upstream chat\n"


def test_runner_usage(toy):
    assert shown(run(toy, "-m", "mlx_dllm_plugin")) == shown(run(toy, "-m", "mlx_dllm_plugin", "--help"))
    assert "generate" in shown(run(toy, "-m", "mlx_dllm_plugin"))


def test_runner_refuses_unknown_commands_of_the_real_host():
    result = run(None, "-m", "mlx_dllm_plugin", "frobnicate")
    assert result.returncode == 2
    assert "no command 'frobnicate'" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_zip_application(toy):
    write(toy, {"__main__.py": "import mlx_dllm_plugin\n" + SHOW})
    with zipfile.ZipFile(toy / "app.pyz", "w") as archive:
        for file in [*toy.rglob("*.py"), *toy.rglob("*.json")]:
            archive.write(file, file.relative_to(toy))
    empty = toy / "empty"
    empty.mkdir()
    assert shown(run(empty, "-S", str(toy / "app.pyz"))) == PATCHED


# --- environments without the installed plugin ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A Python with nothing installed but our start-up files."""
    root = tmp_path_factory.mktemp("bare")
    venv.create(root, symlinks=True)
    for file in startup_files():
        shutil.copy(file, site_packages(root))
    return root


def startup_files() -> list[Path]:
    installed = [Path(str(f.locate())) for f in importlib.metadata.files("mlx-dllm-plugin") or [] if len(f.parts) == 1]
    names = {"zz-mlx-dllm-plugin.pth", "zz-mlx-dllm-plugin.start", "_mlx_dllm_boot.py"}
    found = [file for file in installed if file.name in names]
    assert {file.name for file in found} == names
    return found


def site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def test_package_missing(bare, tmp_path):
    write(tmp_path, TOY_HOST)
    python = bare / "bin/python"
    assert shown(run(tmp_path, "-c", "pass", python=python)) == ""
    code = SHOW + "import mlx_vlm"
    line = the_line(run(tmp_path, "-c", code, python=python))
    assert line.startswith(f"{PREFIX}not active, mlx_lm works without it: ModuleNotFoundError: No module named")


@pytest.mark.parametrize("damage", ["deleted", "corrupt"])
def test_boot_file_damaged(tmp_path, damage):
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    for file in startup_files():
        shutil.copy(file, site_packages(environment))
    boot = site_packages(environment) / "_mlx_dllm_boot.py"
    boot.unlink() if damage == "deleted" else boot.write_text("def startup(:\n")
    write(tmp_path, TOY_HOST)
    result = run(tmp_path, "-c", SHOW, python=environment / "bin/python")
    assert (result.returncode, result.stdout) == (0, UPSTREAM)  # site prints a traceback of its own and goes on
    assert "zz-mlx-dllm-plugin.pth" in result.stderr


def test_hosts_absent(bare, toy):
    python = bare / "bin/python"
    shutil.rmtree(toy / "mlx_vlm")
    assert shown(run(toy, "-c", SHOW, python=python)) == PATCHED
    shutil.rmtree(toy / "mlx_lm")
    code = "import mlx_dllm_plugin\ntry: import mlx_lm\nexcept ModuleNotFoundError as e: print(e.name)"
    assert shown(run(toy, "-c", code, python=python)) == "mlx_lm\n"


def test_target_directory(tmp_path, toy):
    for file in startup_files():
        shutil.copy(file, toy)
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    python = environment / "bin/python"
    assert shown(run(toy, "-c", SHOW, python=python)) == UPSTREAM
    assert shown(run(toy, "-m", "mlx_dllm_plugin", "chat", python=python)) == "chat: patched upstream chat\n"
    assert shown(run(toy, "-c", f"import site; site.addsitedir({str(toy)!r})\n" + SHOW, python=python)) == PATCHED


# --- faults -----------------------------------------------------------------------------------------------------------


def test_package_raises(toy):
    write(toy / "mlx_dllm_plugin", {"__init__.py": "raise RuntimeError('broken\\npackage')"})
    assert shown(run(toy, "-c", "pass")) == ""
    result = run(toy, "-c", SHOW + "import mlx_vlm")
    assert the_line(result) == f"{PREFIX}not active, mlx_lm works without it: RuntimeError: broken package"
    assert result.stdout == UPSTREAM


def test_patch_file_raises(toy):
    write(toy / "mlx_dllm_plugin/patches", {"mlx_lm/generate.py": "1 / 0"})
    result = run(toy, "-c", SHOW)
    assert "mlx-lm 9.9: the patch of mlx_lm.generate is off" in the_line(result)
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert "chat: upstream chat" in result.stdout  # the other file's patch holds
    assert "Traceback" in run(toy, "-c", SHOW, MLX_DLLM_DEBUG="1").stderr


def test_patch_file_without_patch_or_for_another_module(toy):
    write(toy / "mlx_dllm_plugin/patches", {"mlx_lm/chat.py": "PATH = 1"})
    assert "mlx_lm.chat is off" in the_line(run(toy, "-c", SHOW))
    shutil.copy(toy / "mlx_dllm_plugin/patches/mlx_lm/generate.py", toy / "mlx_dllm_plugin/patches/mlx_lm/chat.py")
    assert "its file patches 'mlx_lm.generate'" in the_line(run(toy, "-c", SHOW))


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("generate(prompt, *, limit=3)", "generate(text, *, limit=3)", "generate has no parameter 'prompt'"),
        ("generate(prompt, *, limit=3)", "generate(*, limit=3, prompt)", "generate has no parameter 'limit' where"),
        ("import argparse", "import argparse as parsing", "there is no argparse"),
        ("def stream_generate", "def stream", "there is no stream_generate"),
    ],
)
def test_upstream_changed(toy, old, new, problem):
    path = toy / "mlx_lm/generate.py"
    path.write_text(path.read_text().replace(old, new).replace("argparse.__name__", "parsing.__name__"))
    result = run(toy, "-c", "import mlx_lm.chat; print(mlx_lm.chat.chat.__wrapped__.__name__)")
    if "stream" in new:  # the toy's own __init__ copies that name
        assert result.returncode == 1 and f"{PREFIX}mlx-lm 9.9: the patch of mlx_lm.generate" in result.stderr
    else:
        assert problem in the_line(result) and "Without it: diffusion is lost." in result.stderr
        assert result.stdout == "chat\n"
    code = "from mlx_dllm_plugin import patches\ntry: import mlx_lm\nexcept ImportError: pass\n"
    code += "print(sorted(r.state for r in patches.status() if r.target == 'mlx_lm.generate'))"
    assert run(toy, "-c", code).stdout == "['applied', 'applied', 'disabled']\n"


def test_make_raises(toy):
    path = toy / "mlx_dllm_plugin/patches/mlx_lm/generate.py"
    path.write_text(path.read_text().replace('"proxy of " + old.__name__', '"proxy of " + old.nothing'))
    result = run(toy, "-c", SHOW)
    assert "mlx_lm.generate.argparse is off, AttributeError" in the_line(result)
    assert result.stdout == PATCHED.replace("proxy of ", "")


def test_no_stderr(toy):
    write(toy / "mlx_dllm_plugin/patches", {"mlx_lm/generate.py": "1 / 0"})
    result = run(toy, "-c", "import sys; sys.stderr = None\n" + SHOW)
    assert (result.returncode, result.stderr) == (0, "") and "patch of" not in result.stdout


# --- threads ----------------------------------------------------------------------------------------------------------


def test_two_threads_import_at_once(toy):
    for file in ("mlx_lm/generate.py", "mlx_vlm/__init__.py", "mlx_lm/chat.py"):
        path = toy / file
        path.write_text("import time; time.sleep(0.1)\n" + path.read_text())
    code = """
import importlib, threading
threads = [threading.Thread(target=importlib.import_module, args=(name,)) for name in ("mlx_vlm", "mlx_lm.chat")]
for thread in threads: thread.start()
for thread in threads: thread.join()
import mlx_vlm; print(mlx_vlm.load())
"""
    assert shown(run(toy, "-c", code + SHOW)) == "patched upstream load\n" + PATCHED


def test_activate_waits_for_a_module_another_thread_is_importing(toy):
    path = toy / "mlx_lm/generate.py"
    path.write_text("import time; time.sleep(0.3)\n" + path.read_text())
    code = """
import importlib, sys, threading, time
thread = threading.Thread(target=importlib.import_module, args=("mlx_lm",))
thread.start()
while "mlx_lm.generate" not in sys.modules: time.sleep(0.01)
import mlx_dllm_plugin
thread.join()
"""
    assert shown(run(toy, "-S", "-c", code + SHOW)) == PATCHED


def test_activate_and_deactivate_from_many_threads(toy):
    code = """
import sys, threading
sys.setswitchinterval(1e-6)
import mlx_lm.chat, mlx_dllm_plugin
module = sys.modules["mlx_lm.generate"]
def hammer():
    for _ in range(100):
        mlx_dllm_plugin.activate(); mlx_dllm_plugin.deactivate()
threads = [threading.Thread(target=hammer) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    end = "mlx_dllm_plugin.activate()\n" + SHOW + "mlx_dllm_plugin.deactivate()\n" + SHOW
    assert shown(run(toy, "-c", code + SHOW + end)) == UPSTREAM + PATCHED + UPSTREAM


@pytest.mark.parametrize("second, expected", [("activate", PATCHED), ("deactivate", UPSTREAM)])
def test_a_transition_waits_for_the_one_in_progress(toy, second, expected):
    path = toy / "mlx_dllm_plugin/patches/mlx_lm/generate.py"
    path.write_text("import time; time.sleep(0.3)\n" + path.read_text())
    code = f"""
import sys, threading, time
import mlx_lm.chat, mlx_dllm_plugin
thread = threading.Thread(target=mlx_dllm_plugin.activate)
thread.start()
while not mlx_dllm_plugin.is_active(): time.sleep(0.01)
mlx_dllm_plugin.{second}()
{SHOW}
thread.join()
chat = sys.modules["mlx_lm.chat"]
print(mlx_dllm_plugin.is_active(), chat.__spec__.loader is chat.__loader__)
"""
    active = second == "activate"
    assert shown(run(toy, "-c", code, MLX_DLLM_PLUGIN="0")) == f"{expected}{active} {not active}\n"


# --- the real hosts ---------------------------------------------------------------------------------------------------

REAL_PATCHES = {
    "mlx_lm/__init__.py": "MODULES = ('utils', 'generate', 'chat', 'server', 'tuner.trainer')",
    "mlx_vlm/__init__.py": "MODULES = ('utils',)",
    "mlx_lm/utils.py": """
        from mlx_dllm_plugin.patches import Patch, Redirect, Replace
        PATCH = Patch("mlx_lm.utils", "x", (
            Redirect("load", lambda original, /, *a, **k: "patched load", parameters=("path_or_hf_repo",)),
            Replace("MODEL_REMAPPING", lambda old: {**old, "toy": "llama"}),
        ))
        """,
    "mlx_lm/generate.py": """
        from mlx_dllm_plugin.patches import Patch, Redirect, Replace
        def stream_generate(original, /, *args, **kwargs):
            yield from ("patched", "stream")
        PATCH = Patch("mlx_lm.generate", "x", (
            Redirect("stream_generate", stream_generate, parameters=("model", "tokenizer", "prompt", "max_tokens")),
            Redirect("wired_limit", lambda original, /, *a, **k: original(*a, **k)),
            Redirect("BatchGenerator.__init__", lambda original, /, *a, **k: original(*a, **k), parameters=("self",)),
            Replace("argparse", lambda old: type(old)("argparse")),
        ))
        """,
    "mlx_lm/chat.py": """
        from mlx_dllm_plugin.patches import Patch, Redirect
        PATCH = Patch("mlx_lm.chat", "x", (Redirect("main", lambda original, /: print("patched chat")),))
        """,
    "mlx_lm/server.py": """
        from mlx_dllm_plugin.patches import Patch, Redirect
        load = lambda original, /, *a, **k: original(*a, **k)
        PATCH = Patch("mlx_lm.server", "x", (Redirect("ModelProvider.load", load),))
        """,
    "mlx_lm/tuner/__init__.py": "",
    "mlx_lm/tuner/trainer.py": """
        from mlx_dllm_plugin.patches import Patch, Redirect
        PATCH = Patch("mlx_lm.tuner.trainer", "x", (
            Redirect("default_loss", lambda original, /, model, batch, lengths: "patched loss"),
        ))
        """,
    "mlx_vlm/utils.py": """
        from mlx_dllm_plugin.patches import Patch, Redirect
        PATCH = Patch("mlx_vlm.utils", "x", (Redirect("load_model", lambda original, /, *a, **k: original(*a, **k)),))
        """,
}

# Identities of everything a patch could touch; the objects are kept alive so that ids stay theirs.
SNAPSHOT = """
import importlib, sys, types
alive = []
def functions(value):
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType):
        alive.extend((value.__code__, value.__defaults__, value.__kwdefaults__, *vars(value).values()))
        kwdefaults = sorted((k, id(v)) for k, v in (value.__kwdefaults__ or {}).items())
        yield id(value.__code__), id(value.__defaults__), kwdefaults, [(k, id(v)) for k, v in vars(value).items()]
def snapshot(modules):
    state = [[(k, id(v)) for k, v in vars(m).items()] + [id(m.__spec__), id(m.__spec__.loader)] for m in modules]
    alive.extend(v for m in modules for v in vars(m).values())
    for m in modules:
        for name, value in vars(m).items():
            state += [(name, f) for f in functions(value)]
            if isinstance(value, type):
                alive.extend(vars(value).values())
                state.append([(k, id(v)) for k, v in vars(value).items()])
                state += [(name, k, f) for k, v in vars(value).items() for f in functions(v)]
    return state, [id(f) for f in sys.meta_path], sorted(k for k in sys.modules if k.startswith("mlx_lm.models"))
def importable(names):
    for name in names:
        try:
            yield importlib.import_module(name)
        except ImportError as error:
            assert error.name == "lm_eval", error  # only mlx_lm.evaluate needs more than its dependencies
"""


@pytest.mark.parametrize("which", ["toy patches", "installed patches"])
def test_deactivate_restores_a_snapshot(tmp_path, which):
    path = copy_plugin(tmp_path, REAL_PATCHES) if which == "toy patches" else None
    code = f"""
{SNAPSHOT}
import mlx_dllm_plugin
from mlx_dllm_plugin import patches
assert not mlx_dllm_plugin.is_active()
modules = list(importable(list(patches._TARGETS)))
before = snapshot(modules)
mlx_dllm_plugin.activate()
active = snapshot(modules)
mlx_dllm_plugin.activate()
assert snapshot(modules) == active
mlx_dllm_plugin.deactivate()
after = snapshot(modules)
mlx_dllm_plugin.deactivate()
assert after == before and snapshot(modules) == before
mlx_dllm_plugin.activate()
print(len(modules), before != active, sorted({{r.state for r in patches.status()}}))
mlx_dllm_plugin.deactivate()
assert snapshot(modules) == before
"""
    result = run(path, "-c", code, MLX_DLLM_PLUGIN="0")
    assert result.returncode == 0, result.stderr
    if which == "toy patches":
        assert result.stdout.splitlines()[-1] == "6 True ['applied']"


def test_real_host_early_equals_late(tmp_path):
    copy_plugin(tmp_path, REAL_PATCHES)
    write(tmp_path / "mlx_dllm_plugin", {"models/toy_dllm.py": "class Model: pass\nclass ModelArgs: pass"})
    code = """
import inspect, mlx_lm, mlx_lm.chat, mlx_lm.lora, mlx_lm.utils
import mlx_dllm_plugin
from mlx_lm import load, stream_generate
from mlx_lm.tuner import trainer
print(load("x"), *stream_generate(1, 2, 3), *mlx_lm.chat.stream_generate(1, 2, 3), trainer.default_loss(1, 2, 3))
print(inspect.signature(trainer.train).parameters["loss"].default(1, 2, 3))
print(list(inspect.signature(stream_generate).parameters)[:4], "load(" in inspect.getsource(load))
print(mlx_lm.utils.MODEL_REMAPPING["toy"], mlx_lm.utils._get_classes({"model_type": "toy_dllm"})[0].__module__)
"""
    early = shown(run(tmp_path, "-c", code))
    assert early == (
        "patched load patched stream patched stream patched loss\npatched loss\n"
        "['model', 'tokenizer', 'prompt', 'max_tokens'] True\nllama mlx_dllm_plugin.models.toy_dllm\n"
    )
    assert shown(run(tmp_path, "-S", "-c", f"import sys; sys.path += {sys.path!r}" + code)) == early


def test_real_host_run_as_module(tmp_path):
    copy_plugin(tmp_path, REAL_PATCHES)
    deprecated = "Calling `python -m mlx_lm.chat...` directly is deprecated."
    output = shown(run(tmp_path, "-m", "mlx_lm.chat"))
    assert output.startswith(deprecated) and output.endswith("\npatched chat\n")


# --- models -----------------------------------------------------------------------------------------------------------


def test_model_modules(toy):
    write(
        toy / "mlx_dllm_plugin/models",
        {"toy_dllm.py": "ORIGIN = 'ours'", "llama.py": "ORIGIN = 'ours'", "broken.py": "import nothing_here"},
    )
    code = """
import importlib, sys
load = lambda name: importlib.import_module("mlx_lm.models." + name)
import mlx_lm.models
alias = load("toy_dllm")
import mlx_dllm_plugin, mlx_dllm_plugin.models.toy_dllm as ours
print(alias is ours, alias.__name__, alias.__spec__.name, load("llama").ORIGIN, mlx_lm.models.toy_dllm is ours)
for name in ("broken", "unknown"):
    try: load(name)
    except Exception as error: print(type(error).__name__, error)
mlx_dllm_plugin.deactivate()
print("mlx_lm.models.toy_dllm" in sys.modules, hasattr(mlx_lm.models, "toy_dllm"), ours.ORIGIN)
try: load("toy_dllm")
except Exception as error: print(type(error).__name__)
mlx_dllm_plugin.activate()
print(load("toy_dllm") is ours)
"""
    assert shown(run(toy, "-c", code)).splitlines() == [
        "True mlx_dllm_plugin.models.toy_dllm mlx_dllm_plugin.models.toy_dllm upstream True",
        "RuntimeError mlx_dllm_plugin.models.broken cannot be imported: No module named 'nothing_here'",
        "ModuleNotFoundError No module named 'mlx_lm.models.unknown'",
        "False False ours",
        "ModuleNotFoundError",
        "True",
    ]


# --- redirects, in this process ---------------------------------------------------------------------------------------

SOURCE = """
import contextlib, functools
def plain(a, b=2, *, c=3):
    "Docstring."
    return (a, b, c)
def count(n):
    if n < 0:
        raise ValueError(n)
    yield from range(n)
@contextlib.contextmanager
def manager(value):
    yield value
def keyword(original, /, self=1):
    return original, self
async def wait(): return 1
class Base:
    def __init__(self): self.base = True
class Thing(Base):
    def __init__(self, x=1):
        super().__init__()
        self.x = x
    def method(self, y): return self.x + y
    @staticmethod
    def static(y): return y
    @classmethod
    def by_class(cls, y): return cls.__name__ + y
    @property
    def prop(self): return 1
    limit = 5
def user(call=plain): return call(0)
"""


@pytest.fixture
def module():
    mlx_dllm_plugin.activate()
    toy = types.ModuleType("toyhost.toy")
    exec(SOURCE, vars(toy))
    yield toy
    mlx_dllm_plugin.deactivate()
    mlx_dllm_plugin.activate()


def change(module: types.ModuleType, *changes: Redirect | Replace) -> list[patches.Record]:
    patches.apply(module, Patch(module.__name__, "the test is lost.", changes))
    return [record for record in patches.status() if record.target == module.__name__]


def tagged(original, /, *args, **kwargs):
    return ("patched", original(*args, **kwargs))


def test_redirect_keeps_the_function_object(module):
    plain, names, copy, bound = module.plain, set(vars(module)), module.plain, functools.partial(module.plain, 7)
    before = plain.__code__, plain.__defaults__, plain.__kwdefaults__, dict(vars(plain))
    assert change(module, Redirect("plain", tagged, ("a", "c")))[0].state == "applied"
    assert module.plain is plain and set(vars(module)) == names
    assert copy(1) == ("patched", (1, 2, 3)) and bound(c=0) == ("patched", (7, 2, 0))
    assert module.user() == ("patched", (0, 2, 3))
    assert str(inspect.signature(plain)) == "(a, b=2, *, c=3)"
    assert (plain.__name__, plain.__doc__, plain.__code__.co_name) == ("plain", "Docstring.", "plain")
    assert plain.__wrapped__(1) == (1, 2, 3) and plain.__wrapped__.__globals__ is vars(module)
    mlx_dllm_plugin.deactivate()
    assert (plain.__code__, plain.__defaults__, plain.__kwdefaults__, dict(vars(plain))) == before
    assert plain(1) == (1, 2, 3)


def test_redirect_generator_is_lazy(module):
    def twice(original, /, *args, **kwargs):
        for value in original(*args, **kwargs):
            yield from (value, value)

    change(module, Redirect("count", twice, ("n",)))
    assert inspect.isgeneratorfunction(module.count)
    assert list(module.count(2)) == [0, 0, 1, 1]
    stream = module.count(-1)
    with pytest.raises(ValueError):
        next(stream)


def test_redirect_functions_with_free_variables(module):
    change(
        module,
        Redirect("manager", tagged, ("value",)),
        Redirect("Thing.__init__", lambda original, /, self, *a, **k: original(self, *a, **k), ("self", "x")),
    )
    tag, manager = module.manager(5)
    with manager as value:
        assert (tag, value) == ("patched", 5)
    thing = module.Thing(4)
    assert (thing.base, thing.x) == (True, 4)
    assert list(inspect.signature(module.manager).parameters) == ["value"]
    mlx_dllm_plugin.deactivate()
    with module.manager(6) as value:
        assert value == 6
    assert list(inspect.signature(module.manager).parameters) == ["value"]
    assert (module.Thing(4).base, module.Thing(4).x) == (True, 4)


def test_redirect_of_a_decorator_without_wraps(module):
    def decorate(function):
        def inner(*args):
            return function(*args)

        return inner

    module.plain = decorate(module.plain)
    change(module, Redirect("plain", tagged))
    assert module.plain(1) == ("patched", (1, 2, 3))
    mlx_dllm_plugin.deactivate()
    assert module.plain(1) == (1, 2, 3)


def test_redirect_methods(module):
    before = dict(vars(module.Thing))
    change(module, *(Redirect(f"Thing.{name}", tagged) for name in ("method", "static", "by_class")))
    thing = module.Thing(1)
    assert thing.method(2) == ("patched", 3)
    assert thing.static(2) == module.Thing.static(2) == ("patched", 2)
    assert module.Thing.by_class("!") == ("patched", "Thing!")
    assert dict(vars(module.Thing)) == before


def test_redirect_passes_every_keyword(module):
    change(module, Redirect("keyword", tagged))
    assert module.keyword(1, self=2) == ("patched", (1, 2))


def test_replace(module):
    change(module, Replace("functools", lambda old: ("proxy", old)), Replace("Thing.limit", lambda old: old + 1))
    assert (module.functools, module.Thing.limit) == (("proxy", functools), 6)
    mlx_dllm_plugin.deactivate()
    assert (module.functools, module.Thing.limit) == (functools, 5)


@pytest.mark.parametrize(
    "symbol, parameters, problem",
    [
        ("gone", (), "there is no gone"),
        ("Thing.gone", (), "there is no Thing.gone"),
        ("Gone.method", (), "there is no Gone.method"),
        ("plain.deeper", (), "there is no plain.deeper"),
        ("Thing", (), "Thing is not a plain function but type"),
        ("Thing.prop", (), "Thing.prop is not a plain function but property"),
        ("wait", (), "wait is asynchronous"),
        ("plain", ("a", "z"), "plain has no parameter 'z' where expected (a, b, c)"),
        ("plain", ("b", "a"), "plain has no parameter 'a' where expected (a, b, c)"),
    ],
)
def test_a_change_that_does_not_fit_turns_itself_off(module, capsys, symbol, parameters, problem):
    before = dict(vars(module))
    records = change(module, Redirect(symbol, tagged, parameters), Redirect("user", tagged, reason="users"))
    assert {record.symbol: (record.state, record.detail) for record in records} == {
        symbol: ("disabled", problem),
        "user": ("applied", ""),
    }
    assert dict(vars(module)) == before
    assert capsys.readouterr().err == (
        f"{PREFIX}toyhost: the patch of toyhost.toy.{symbol} is off, {problem}. Without it: the test is lost.\n"
    )
    assert asyncio.run(module.wait()) == 1


def test_reason_of_one_change(module, capsys):
    change(module, Redirect("gone", tagged, reason="one thing is lost."))
    assert capsys.readouterr().err.endswith(" Without it: one thing is lost.\n")


def test_a_patch_names_each_symbol_once():
    with pytest.raises(ValueError, match="changes a symbol twice: a, a"):
        Patch("x.y", "", (Redirect("a", tagged), Replace("a", tagged)))


def test_apply_is_idempotent(module):
    changes = (Redirect("plain", tagged), Replace("functools", lambda old: ("proxy", old)))
    change(module, *changes)
    change(module, *changes)
    assert module.plain(1) == ("patched", (1, 2, 3)) and module.functools == ("proxy", functools)
    mlx_dllm_plugin.deactivate()
    change(module, *changes)
    assert module.plain(1) == (1, 2, 3) and module.functools is functools


def test_deactivate_leaves_what_others_changed_since(module):
    change(module, Redirect("plain", tagged), Replace("functools", lambda old: "proxy"))
    module.plain.__code__ = (lambda a: "theirs").__code__
    module.functools = "theirs"
    mlx_dllm_plugin.deactivate()
    assert (module.plain(1), module.functools) == ("theirs", "theirs")


def test_reload(tmp_path, monkeypatch):
    files = {
        "toyhost/__init__.py": "",
        "toyhost/toy.py": SOURCE,
        "toypatches/__init__.py": "",
        "toypatches/toyhost/__init__.py": "MODULES = ('toy',)",
        "toypatches/toyhost/toy.py": """
            from mlx_dllm_plugin.patches import Patch, Redirect
            PATCH = Patch("toyhost.toy", "x", (Redirect("plain", lambda original, /, a: ("patched", a)),))
            """,
    }
    monkeypatch.syspath_prepend(write(tmp_path, files))
    monkeypatch.setattr(patches, "_TARGETS", dict(patches._TARGETS))
    mlx_dllm_plugin.activate()
    patches.add_host(importlib.import_module("toypatches.toyhost"))
    module = importlib.import_module("toyhost.toy")
    first = module.plain
    importlib.reload(module)
    assert module.plain is not first
    assert (first(1), module.plain(1)) == (("patched", 1), ("patched", 1))
    mlx_dllm_plugin.deactivate()
    try:
        assert (first(1), module.plain(1)) == ((1, 2, 3), (1, 2, 3))
        assert module.__spec__.loader is module.__loader__
    finally:
        mlx_dllm_plugin.activate()


# --- the package's own names ------------------------------------------------------------------------------------------


def test_public_names():
    assert set(mlx_dllm_plugin.__all__) <= set(dir(mlx_dllm_plugin))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = mlx_dllm_plugin.nothing


def test_a_function_and_its_submodule_share_a_name(toy):
    write(toy / "mlx_dllm_plugin", {"decode.py": "def decode(): return 'decoded'\nstream_decode = DecodingResult = 1"})
    code = "import mlx_dllm_plugin as p; {}; print(p.decode()); from mlx_dllm_plugin.decode import stream_decode"
    for first in ("pass", "import mlx_dllm_plugin.decode", "p.stream_decode"):
        assert shown(run(toy, "-c", code.format(first))) == "decoded\n"


def test_boot_is_idempotent(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    finders = list(sys.meta_path)
    _active_boot.startup()
    assert sys.meta_path == finders  # the package is imported: it has decided
    monkeypatch.delitem(sys.modules, "mlx_dllm_plugin")
    _active_boot.startup()
    _active_boot.startup()
    assert sys.meta_path == [_active_boot.FINDER, *finders]
    assert _active_boot.FINDER.find_spec("json") is None
