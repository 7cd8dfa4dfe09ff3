"""`mlx-dllm doctor`: each of its lines with a planted fault, and without one."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import packaging
import pytest
from mlx_lm import utils
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto

import mlx_dllm_plugin
from mlx_dllm_plugin import compat, patches
from mlx_dllm_plugin.commands import main
from mlx_dllm_plugin.commands.checks import Check, checkpoint, environment, startup
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.patches import Record
from tests.tools import Outcome, assert_one_sentence, copy_run, edit_json

ROOT = Path(__file__).parent.parent
SECTIONS = ["Environment", "Start-up", "Patches", "Families and rules", "Checkpoint"]
COMMANDS = ["mlx_lm.generate", "mlx_lm", "mlx_vlm.generate"]
PIP = f"{sys.executable} -m pip"
LINE = re.compile(r"  (ok|warning|PROBLEM) {2,}(\S+(?: \S+)*) {2,}(.*?)(?: -> (.*))?")


@dataclass
class Report:
    """What doctor said."""

    status: int
    rows: list[dict[str, str]]
    last: str = ""

    def __post_init__(self) -> None:
        """Every complaint says what to do, here or on the line that it points to."""
        for row in self.rows:
            told = row["advice"] or re.search(r"see above|--[a-z]", row["value"])
            assert row["status"] == "ok" or told, row

    def named(self, name: str) -> dict[str, str]:
        (row,) = [row for row in self.rows if row["name"] == name]
        return row

    def bad(self) -> list[str]:
        return [row["name"] for row in self.rows if row["status"] != "ok"]


def parse(out: str) -> list[dict[str, str]]:
    """The lines of the text."""
    rows, section = [], ""
    for line in out.splitlines()[:-1]:
        if line and not line.startswith(" "):
            section = line
        elif line:
            found = LINE.fullmatch(line)
            assert found, line
            mark, name, value, advice = found.groups(default="")
            rows.append({"section": section, "name": name, "status": mark.lower(), "value": value, "advice": advice})
    return rows


Doctor = Callable[..., Report]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        status = main(["doctor", *map(str, arguments)])
        out, err = capfd.readouterr()
        return Outcome(status, out, err)

    return run


@pytest.fixture
def doctor(command: Callable[..., Outcome]) -> Doctor:
    def run(*arguments: object) -> Report:
        outcome = command(*arguments)
        assert outcome.err == ""
        return Report(outcome.status, parse(outcome.out), outcome.out.splitlines()[-1])

    return run


def only(found: Iterator[Check]) -> Check:
    (check,) = found
    return check


def assert_found(check: Check | dict[str, str], status: str, *words: str, advice: str = "") -> None:
    row = vars(check) if isinstance(check, Check) else check
    assert row["status"] == status, row
    for word in words:
        assert word in row["value"], row
    assert advice in row["advice"], row


def script(path: Path, first: str) -> None:
    path.write_text(f"{first}\nimport sys\n")
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def own_commands(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hosts' commands of this environment on PATH, whatever this machine has there."""
    folder = tmp_path_factory.mktemp("bin")
    for name in COMMANDS:
        script(folder / name, f"#!{sys.executable}")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return folder


@pytest.fixture(autouse=True)
def own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `pip install .` the tests of a checkout run its package, which is not the installed one."""
    if only(environment.plugin()).status != "ok":
        check = Check(environment.PLUGIN, "of the checkout")
        monkeypatch.setitem(environment.CHECKS, environment.PLUGIN, lambda: iter([check]))


# --- a healthy environment, and the two ways to print it --------------------------------------------------------------


def test_all_is_well(doctor: Doctor, path: Path) -> None:
    report = doctor(path)
    assert (report.status, report.last, report.bad()) == (0, "No problems.", [])
    assert list(dict.fromkeys(row["section"] for row in report.rows)) == SECTIONS
    assert sys.executable in report.named("Python")["value"]
    assert f"{mx.__version__}, " in report.named("MLX")["value"] and "GiB" in report.named("MLX")["value"]
    assert str(Path(startup.BOOT)) in sys.modules and "active, from " in report.named("start-up hook")["value"]
    assert report.named("families")["value"].startswith("21 from mlx-dllm-plugin: a2d_llama, ")
    assert report.named("unmasking rules")["value"].startswith("27 from mlx-dllm-plugin: a2d, ")
    patched = [row["value"] for row in report.rows if row["section"] == "Patches"]
    named = {name for value in patched for name in value.rpartition(": ")[2].split(", ")}
    assert named == {target.partition(".")[2] for host in ("mlx_lm", "mlx_vlm") for target in patches.leaned_on(host)}
    assert any(value.startswith("known, applied: utils, ") for value in patched)
    checked = {row["name"]: row["value"] for row in report.rows if row["section"] == "Checkpoint"}
    assert checked.pop("memory").startswith("weights 0.2 MiB, keys and values of 128 tokens 0.1 MiB; ")
    assert checked.pop("mlx_vlm.generate").startswith("does not take it: ")
    assert checked == {
        "path": str(path / "model"),
        "spec": f"gpt2 (rule a2d, canvas 32, mask 340); told by the a2d block; mlx-dllm info {path} shows all",
        "tokenizer": "341 tokens, without a chat template",
        "mask token": "340 from the a2d block, '<|mdlm_mask|>' in the tokenizer",
        "weights": "28 arrays, as the model has them",
        "mlx_lm.generate": "denoises it as gpt2 (rule a2d, canvas 32, mask 340)",
    }


def test_json_says_the_same(command: Callable[..., Outcome], doctor: Doctor, copied: Path) -> None:
    for damage, status in ((lambda: None, 0), (lambda: (copied / "model" / "model.safetensors").unlink(), 1)):
        damage()
        outcome = command(copied, "--json")
        answer = json.loads(outcome.out)
        report = doctor(copied)
        assert outcome.status == report.status == status and outcome.err == ""
        assert answer["checks"] == report.rows
        assert answer["problems"] == [row["status"] for row in report.rows].count("problem") == status
        assert report.last == ("1 problem." if status else "No problems.")


def test_without_a_path_there_is_no_checkpoint(doctor: Doctor) -> None:
    report = doctor()
    assert list(dict.fromkeys(row["section"] for row in report.rows)) == SECTIONS[:4] and report.status == 0


def test_a_bad_path_is_one_sentence(command: Callable[..., Outcome], tmp_path: Path, path: Path) -> None:
    paths = {
        str(tmp_path / "missing"): ["missing", "does not exist"],
        str(path / "manifest.json"): ["is a file"],
        str(tmp_path): ["config.json"],
        "nobody/nothing-of-this-name": ["nobody/nothing-of-this-name", "hub"],
        str(tmp_path / ("x" * 300)): ["cannot be looked at (File name too long)"],
        "x" * 300: ["cannot be looked at (File name too long)"],
    }
    for name, words in paths.items():
        assert_one_sentence(command(name), *words)
        outcome = command(name, "--json")
        answer = json.loads(outcome.out)
        last = Report(outcome.status, answer["checks"]).rows[-1]
        assert (last["section"], last["name"], outcome.status, answer["problems"]) == ("Checkpoint", "path", 1, 1)
        assert_found(last, "problem", *words)


def test_a_check_that_fails_is_a_problem(
    doctor: Doctor, command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Iterator[Check]:
        print("noise")
        yield Check("MLX", "never seen")
        raise RuntimeError("two\nlines")

    monkeypatch.setitem(environment.CHECKS, "MLX", broken)
    report = doctor()
    assert_found(report.named("MLX"), "problem", "failed (RuntimeError: two lines)", advice="MLX_DLLM_DEBUG=1")
    assert report.status == 1 and report.bad() == ["MLX"]
    monkeypatch.setenv("MLX_DLLM_DEBUG", "1")
    outcome = command("--json")
    assert json.loads(outcome.out)["problems"] == 1 and "Traceback" in outcome.err and "noise" in outcome.err


DOCTOR = [sys.executable, "-m", "mlx_dllm_plugin", "doctor"]


def shell(line: str, *arguments: str | Path, **env: str) -> Outcome:
    """A line of a shell with `$@`."""
    full = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run(["sh", "-c", line, "sh", *arguments], capture_output=True, env=full, timeout=120)
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_nobody_reads_the_output(path: Path) -> None:
    assert shell('"$@" >&-', *DOCTOR, path) == Outcome(0, "", "")
    assert shell('"$@" | head -1; exit 0', *DOCTOR, path) == Outcome(0, "Environment\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
def test_the_device_is_full(path: Path) -> None:
    outcome = shell('"$@" > /dev/full', *DOCTOR, path)
    assert_one_sentence(outcome, "standard output cannot be read or written (No space left on device)")


def test_a_terminal_that_lacks_letters(copied: Path) -> None:
    copied.rename(copied.parent / "läuft")
    outcome = shell('"$@"', *DOCTOR, copied.parent / "läuft", PYTHONIOENCODING="ascii")
    assert outcome.status == 0 and outcome.err == "" and "/l\\xe4uft/model" in outcome.out


def test_a_stranger_writes_to_the_output(tmp_path: Path, path: Path) -> None:
    """To the stream, to the descriptor, at the end: nothing of it is in the JSON."""
    (tmp_path / "mlx_vlm.py").write_text(
        "import atexit, os, sys\n"
        "print('one')\n"
        "sys.__stdout__.write('two')\n"
        "os.write(1, b'three')\n"
        "os.system('echo four')\n"
        "atexit.register(os.write, 1, b'five')\n"
        "atexit.register(print, 'six')\n"
        "__version__ = '0.7.10'\n"
    )
    outcome = run([tmp_path], "-m", "mlx_dllm_plugin", "doctor", str(path), "--json")
    answer = json.loads(outcome.out)
    assert outcome.err == "" and answer["checks"][0]["name"] == "Python"


def test_code_in_the_working_directory_is_not_run(copied: Path) -> None:
    """A checkpoint may bring files called like what is imported."""
    for name in ("mlx_lm", "transformers", "packaging", "numpy", "mlx_vlm", "importlib_metadata", "lm_eval"):
        (copied / "model" / f"{name}.py").write_text(f"open('ran {name}', 'w')")
    done = subprocess.run([*DOCTOR, "."], cwd=copied / "model", capture_output=True, text=True, timeout=120)
    assert not list((copied / "model").glob("ran *")) and "denoises it as gpt2" in done.stdout


def test_lines_are_as_wide_as_the_terminal(
    doctor: Doctor, command: Callable[..., Outcome], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = command(path).out
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    for columns, most in ((80, 80), (20, 90)):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = command(path).out
        words = re.sub(r"\n {10,}", " ", out)
        assert out != plain and words.split() == plain.split()
        assert [line for line in out.splitlines() if len(line) > most and len(line.split()) > 3] == []
    (line,) = [line for line in out.splitlines() if " families " in line]
    assert line.index("21 from") == next(
        len(row) - len(row.lstrip()) for row in out.splitlines()[out.splitlines().index(line) + 1 :]
    )


# --- environment ------------------------------------------------------------------------------------------------------


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.sys, "version_info", (3, 10, 4))
    check = only(environment.python())
    monkeypatch.undo()
    assert_found(check, "problem", "needs 3.11 or newer", advice="python3.11 -m venv")


def test_the_wrong_kind_of_python_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.sys, "platform", "darwin")
    monkeypatch.setattr(environment.platform, "machine", lambda: "arm64")
    good = only(environment.system())
    monkeypatch.setattr(environment.platform, "machine", lambda: "x86_64")
    bad = only(environment.system())
    monkeypatch.undo()
    assert_found(good, "ok", "macOS", "arm64")
    assert_found(bad, "problem", "MLX needs a Python for arm64", advice="make the environment anew")


def run(path: list[Path], *arguments: str, python: str | Path = sys.executable, **env: str) -> Outcome:
    """A new interpreter outside the checkout, with `path` in front of site-packages."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_DLLM", "PYTHON", "COV"))}
    env = {"PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run(
        [python, *arguments],
        env={**clean, **env},
        cwd=Path(sys.executable).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def report_of(outcome: Outcome) -> Report:
    assert outcome.err == ""
    return Report(outcome.status, parse(outcome.out), outcome.out.splitlines()[-1])


def test_mlx_cannot_be_imported(tmp_path: Path, path: Path) -> None:
    """One problem, however much hangs on it."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so:\\nno such file')")
    report = report_of(run([tmp_path], "-m", "mlx_dllm_plugin", "doctor", str(path)))
    assert report.status == 1
    advice = f"{PIP} install --force-reinstall " + ("'mlx[cpu]'" if sys.platform == "linux" else "mlx")
    assert_found(report.named("MLX"), "problem", "(ImportError: libmlx.so: no such file)", advice=advice)
    assert_found(report.named("mlx-lm"), "warning", "as MLX cannot be imported", advice="see MLX above")
    left_out = [row["section"] for row in report.rows if row["name"] == "all"]
    assert left_out == ["Patches", "Families and rules", "Checkpoint"]


@pytest.mark.parametrize(
    ("files", "blamed", "left_out"),
    [
        ({"mlx_lm/__init__.py": "def f(:"}, "mlx-lm", ["mlx-vlm"]),
        ({"mlx_lm/__init__.py": "from . import utils"}, "mlx-lm", ["mlx-vlm"]),
        ({"transformers/__init__.py": "raise SystemExit(3)"}, "transformers", ["mlx-lm", "mlx-vlm"]),
        ({"numpy/__init__.py": "raise ImportError('gone')"}, "numpy", ["transformers", "mlx-lm", "mlx-vlm"]),
        ({"packaging/__init__.py": "raise ImportError('gone')"}, "packaging", ["transformers", "mlx-lm", "mlx-vlm"]),
    ],
    ids=["syntax", "half", "transformers", "numpy", "packaging"],
)
def test_one_fault_of_what_is_needed_is_one_problem(
    files: dict[str, str], blamed: str, left_out: list[str], tmp_path: Path, path: Path
) -> None:
    """It is the fault neither of the checkpoint nor of what needs it."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    report = report_of(run([tmp_path], "-m", "mlx_dllm_plugin", "doctor", str(path)))
    assert [row["name"] for row in report.rows if row["status"] == "problem"] == [blamed]
    assert_found(report.named(blamed), "problem", "cannot be imported", advice=f"{PIP} install --force-reinstall ")
    for name in left_out:
        assert_found(report.named(name), "warning", f"not looked at, as {blamed} cannot", advice=f"see {blamed} above")
    last = [row for row in report.rows if row["section"] == "Checkpoint"]
    assert [row["name"] for row in last] == ["all"]
    assert_found(last[0], "warning", f"not looked at, as {blamed} cannot be imported", advice=f"see {blamed} above")
    patched = [row for row in report.rows if row["section"] == "Patches"]
    assert {row["status"] for row in patched} == {"warning"} and len(patched) <= 2
    if blamed != "numpy":
        assert report.named("families")["status"] == "ok"


def test_a_model_of_mlx_lm_that_is_broken(
    doctor: Doctor, ar: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm can be imported, but for the code of a model."""

    class Broken:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name.startswith("mlx_lm.models."):
                raise SyntaxError(f"in {name}")

    for name, kind in ((path, "gpt2"), (ar, "llama")):
        with monkeypatch.context() as patched:
            patched.delitem(sys.modules, f"mlx_lm.models.{kind}", raising=False)
            patched.setattr(sys, "meta_path", [Broken, *sys.meta_path])
            report = doctor(name)
        assert report.last == "1 problem.", [row for row in report.rows if row["status"] == "problem"]
        row = report.named("model")
        assert_found(row, "problem", f"its code cannot be imported (SyntaxError: in mlx_lm.models.{kind})")
        assert f"{PIP} install --force-reinstall --no-deps 'mlx-lm>=" in row["advice"]


def test_a_directory_that_was_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python imports it without an error."""
    (tmp_path / "left_behind").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert environment.fault_of("left_behind") == f"{tmp_path / 'left_behind'} is a directory without its code"
    assert environment.fault_of("json") == "" == environment.fault_of("mlx.core")


def test_a_dependency_is_not_there(monkeypatch: pytest.MonkeyPatch, doctor: Doctor, ar: Path) -> None:
    for name, module in (("packaging", "packaging.version"), ("importlib-metadata", "importlib_metadata")):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            check = only(environment.dependencies())
            assert_found(check, "problem", "cannot be imported", advice=f"{PIP} install --force-reinstall {name}")
            patched.setattr(FAMILIES, "_scanned", False)
            report = doctor(ar)
            assert [row["name"] for row in report.rows if row["status"] == "problem"] == [name]


@pytest.mark.parametrize(
    ("info", "cuda", "device", "expected"),
    [
        ({"device_name": "Apple M4", "max_recommended_working_set_size": 12 << 30, "memory_size": 16 << 30}, False, 1,
         "9.9, Metal (Apple M4), 12.0 GiB recommended for Metal"),
        ({"device_name": "L4", "total_memory": 24 << 30}, True, 1, "9.9, CUDA (L4), 24.0 GiB on the device"),
        ({}, False, 0, "9.9, CPU, 3.0 GiB of memory"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("old", [False, True])
def test_the_device_and_its_memory(
    info: dict[str, Any], cuda: bool, device: int, expected: str, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = SimpleNamespace(
        __version__="9.9",
        cpu=0,
        Device=lambda kind: kind,
        default_device=lambda: device,
        cuda=SimpleNamespace(is_available=lambda: cuda),
        metal=SimpleNamespace(is_available=lambda: True, device_info=lambda: info),
        device_info=lambda: info,
    )
    if old:
        del core.device_info
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    monkeypatch.setattr(environment.importlib, "import_module", sys.modules.__getitem__)
    monkeypatch.setattr(environment.os, "sysconf", {"SC_PAGE_SIZE": 1 << 10, "SC_PHYS_PAGES": 3 << 20}.__getitem__)
    monkeypatch.setattr(environment.importlib.metadata, "distributions", lambda: [])
    check = only(environment.mlx())
    monkeypatch.undo()
    assert_found(check, "ok")
    assert check.value == expected


def metadata(folder: Path, name: str, version: str, **files: str) -> importlib.metadata.Distribution:
    """What pip leaves behind."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    files["METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    for file, text in files.items():
        (info / file.replace("__", ".")).write_text(text)
    return importlib.metadata.PathDistribution(info)


def test_two_builds_of_mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [metadata(tmp_path, name, "0.32.4") for name in ("mlx", "mlx-cpu", "mlx_cuda_12")]
    monkeypatch.setattr(environment.importlib.metadata, "distributions", lambda: found[:2])
    assert [check.name for check in environment.mlx()] == ["MLX"]
    monkeypatch.setattr(environment.importlib.metadata, "distributions", lambda: found)
    _, check = environment.mlx()
    assert_found(check, "warning", "mlx-cpu, mlx-cuda-12", "same library files", advice="pip uninstall -y mlx-cpu && ")


@pytest.mark.parametrize(
    ("kind", "status", "words", "advice"),
    [
        ("good", "ok", [], ""),
        ("editable", "ok", [], ""),
        ("none", "warning", ["which is not installed"], "pip install"),
        ("left over", "problem", ["2 are installed: ", "0.0.9 in"], "until none is left"),
        ("elsewhere", "warning", ["but the installed one is", "/elsewhere"], "PYTHONPATH"),
        ("stale", "warning", ["it was installed as 0.0.1"], "pip install"),
    ],
)
def test_copies_of_the_plugin(
    kind: str, status: str, words: list[str], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere" / "mlx_dllm_plugin").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    package = Path(mlx_dllm_plugin.__file__).parent
    (tmp_path / "here" / "mlx_dllm_plugin").symlink_to(package)
    editable = json.dumps({"url": package.parent.as_uri(), "dir_info": {"editable": True}})
    version = mlx_dllm_plugin.__version__
    places: dict[str, list[tuple[str, str, dict[str, str]]]] = {
        "good": [("here", version, {})],
        "editable": [("elsewhere", version, {"direct_url__json": editable})],
        "none": [],
        "left over": [("here", version, {}), ("here", "0.0.9", {})],
        "elsewhere": [("elsewhere", version, {})],
        "stale": [("here", "0.0.1", {})],
    }
    found = [metadata(tmp_path / place, "mlx-dllm-plugin", of, **files) for place, of, files in places[kind]]
    monkeypatch.setattr(environment.importlib.metadata, "distributions", lambda: found)
    assert_found(only(environment.plugin()), status, version, str(package), *words, advice=advice)


def test_it_is_installed_again_from_where_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no registry."""
    again = f"{PIP} install --force-reinstall --no-deps"
    monkeypatch.setattr(environment, "PACKAGE", tmp_path / "a b" / "mlx_dllm_plugin")
    for text in (None, "[", "[]", '{"url": 3}', '{"url": "https://example.org/x.whl", "archive_info": {}}'):
        shutil.rmtree(tmp_path / "site", ignore_errors=True)
        files = {} if text is None else {"direct_url__json": text}
        found = [metadata(tmp_path / "site", "mlx-dllm-plugin", "1", **files)]
        monkeypatch.setattr(environment.importlib.metadata, "distributions", lambda found=found: found)
        assert environment.reinstall() == f"in the checkout {again} ."
    for info, flag in (({"dir_info": {}}, ""), ({"dir_info": {"editable": True}}, " -e"), ({"archive_info": {}}, "")):
        source = tmp_path / "its source"
        text = json.dumps({"url": source.as_uri(), **info})
        shutil.rmtree(tmp_path / "site")
        found = [metadata(tmp_path / "site", "mlx-dllm-plugin", "1", direct_url__json=text)]
        monkeypatch.setattr(environment.importlib.metadata, "distributions", lambda found=found: found)
        assert environment.reinstall() == f"in the checkout {again} ."  # it is there no more
        source.mkdir()
        assert environment.reinstall() == f"{again}{flag} '{source}'"
        assert environment.install(python="/other/python") == f"/other/python -m pip install{flag} '{source}'"
        source.rmdir()
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "pyproject.toml").touch()
    assert environment.reinstall() == f"{again} '{tmp_path}/a b'"


@pytest.mark.parametrize("host", ["mlx_lm", "mlx_vlm"])
def test_versions_of_the_hosts(host: str, monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    __import__(host)
    name = host.replace("_", "-")
    first, last = compat.TESTED[name]
    monkeypatch.setattr(sys.modules[host], "__version__", last)
    assert environment.tested(host) == f"{PIP} install --force-reinstall --no-deps '{name}>={first},<={last}'"
    assert_found(only(environment.host(host)), "ok", f"{last}, tested with {first} to {last}")
    monkeypatch.setattr(sys.modules[host], "__version__", "0.1.0")
    older = f"0.1.0 is older than what is tested ({first} to {last})"
    way = f"{PIP} install '{name}>={first},<={last}'"
    assert_found(only(environment.host(host)), "problem", older, advice=way)
    assert environment.tested(host) == way
    monkeypatch.setattr(sys.modules[host], "__version__", "99.0.dev1")
    newer = f"99.0.dev1 is newer than what is tested ({first} to {last})"
    assert_found(only(environment.host(host)), "warning", newer, advice=f"pip install '{name}<={last}'")
    monkeypatch.setattr(sys.modules[host], "__version__", "main")
    assert_found(only(environment.host(host)), "warning", "main, which cannot be compared", advice="pip install")


def test_hosts_that_are_not_there(monkeypatch: pytest.MonkeyPatch, doctor: Doctor, path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    report = doctor(path)
    assert_found(report.named("mlx-vlm"), "ok", "not installed")
    assert report.status == 0 and not [row for row in report.rows if row["name"].startswith("mlx_vlm")]
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    assert_found(only(environment.host("mlx_lm")), "problem", "not installed", advice="pip install 'mlx-lm>=")


@pytest.mark.parametrize("how", ["raise RuntimeError('no\\nluck')", "raise SystemExit('no\\nluck')"])
def test_hosts_that_cannot_be_imported(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mlx_vlm.py").write_text(how)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlx_vlm", raising=False)
    check = only(environment.host("mlx_vlm"))
    advice = f"{PIP} install --force-reinstall 'mlx-vlm>="
    assert_found(check, "problem", "cannot be imported", ": no luck)", advice=advice)


def test_transformers_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    advice = "pip install --force-reinstall transformers"
    assert_found(only(environment.transformers()), "problem", "cannot be imported", advice=advice)


def test_a_host_that_cannot_be_imported_promises_nothing(
    doctor: Doctor, goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlx_vlm").mkdir()
    (tmp_path / "mlx_vlm" / "__init__.py").write_text("raise RuntimeError('no luck')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_vlm"]:
        monkeypatch.delitem(sys.modules, name)
    report = doctor(goldens / "block" / "llada2_moe-v22")
    assert report.last == "1 problem." and report.named("mlx-vlm")["status"] == "problem"
    what = "does not run, as mlx-vlm cannot be imported: see above"
    assert_found(will(report)["mlx_vlm.generate"], "warning", what)
    patched = [row for row in report.rows if row["section"] == "Patches" and row["name"].startswith("mlx-vlm")]
    assert [row["value"] for row in patched] == ["not looked at, as mlx-vlm cannot be imported"]


# --- the start-up hook ------------------------------------------------------------------------------------------------

HOOK = """
import json, sys
{before}
from mlx_dllm_plugin.commands.checks import startup
(check,) = startup.hook()
print(json.dumps([check.status, check.value, check.advice]))
"""
FILE = "zz-mlx-dllm-plugin.pth"


def startup_files() -> list[Path]:
    files = [Path(str(f.locate())) for f in importlib.metadata.files("mlx-dllm-plugin") or [] if len(f.parts) == 1]
    return [file for file in files if file.stem in (startup.STEM, startup.BOOT)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An environment with nothing but our start-up files, and a directory with what doctor imports."""
    root = tmp_path_factory.mktemp("bare")
    venv.create(root, symlinks=True)
    for file in startup_files():
        shutil.copy(file, site_packages(root))
    needed = tmp_path_factory.mktemp("needed")
    (needed / "packaging").symlink_to(Path(packaging.__file__).parent)
    return root, needed


def site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def hook(place: tuple[Path, Path], *flags: str, before: str = "", more: Path | None = None, **env: str) -> Check:
    """What the check of the hook says in the bare environment."""
    path = [Path(mlx_dllm_plugin.__file__).parents[1], place[1], *([more] if more else [])]
    python = env.pop("python", place[0] / "bin" / "python")
    outcome = run(path, *flags, "-c", HOOK.format(before=before), python=python, **env)
    assert outcome.status == 0, outcome.err
    return Check("start-up hook", *[json.loads(outcome.out)[i] for i in (1, 0, 2)])


def test_the_hook_is_active(place: tuple[Path, Path]) -> None:
    assert_found(hook(place), "ok", f"active, from {site_packages(place[0])}")


@pytest.mark.parametrize(
    ("flags", "env", "value", "advice"),
    [
        ((), {"MLX_DLLM_PLUGIN": "0"}, "turned off by MLX_DLLM_PLUGIN=0", "unset MLX_DLLM_PLUGIN"),
        (("-X", "mlx_dllm=0"), {}, "turned off by python -X mlx_dllm=0", "leave out -X mlx_dllm=0"),
    ],
)
def test_the_user_turned_it_off(
    place: tuple[Path, Path], flags: tuple[str, ...], env: dict[str, str], value: str, advice: str
) -> None:
    assert_found(hook(place, *flags, **env), "warning", value, advice=advice)


@pytest.mark.parametrize("value", ["false", "OFF", "no"])
def test_the_user_thinks_that_it_is_turned_off(place: tuple[Path, Path], value: str) -> None:
    check = hook(place, MLX_DLLM_PLUGIN=value)
    assert_found(check, "warning", f"active, as MLX_DLLM_PLUGIN={value}", advice="set it to 0")


@pytest.mark.parametrize("file", [None, "__init__.py"])
@pytest.mark.skipif(sys.version_info >= (3, 15), reason="a .start takes the place of the .pth")
def test_a_directory_in_place_of_the_boot_file(place: tuple[Path, Path], file: str | None, tmp_path: Path) -> None:
    """What another version may leave: it is imported, and does nothing."""
    bare = tmp_path / "venv"
    venv.create(bare, symlinks=True)
    shutil.copy(site_packages(place[0]) / FILE, site_packages(bare))
    folder = site_packages(bare) / startup.BOOT
    folder.mkdir()
    if file:
        (folder / file).touch()
    check = hook((bare, place[1]))
    assert_found(check, "problem", f"not active: {folder}", "no file of this package", advice="delete it, then ")


def test_python_without_site(place: tuple[Path, Path]) -> None:
    assert_found(hook(place, "-S"), "problem", "python -S", advice="python -m mlx_dllm_plugin generate")


def damaged(place: tuple[Path, Path], name: str, text: str | None) -> Check:
    """The same with another start-up file; None removes it."""
    file = site_packages(place[0]) / name
    before = file.read_bytes()
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
    try:
        file.unlink()
        if text is not None:
            file.write_text(text)
        return hook(place)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        (FILE, None, f"no {FILE} in "),
        (FILE, "", "does not run _mlx_dllm_boot"),
        (FILE, "# import _mlx_dllm_boot\n", "does not run _mlx_dllm_boot"),
        (FILE, "import _mlx_dllm_boot )\n", "is damaged (SyntaxError: "),
        (FILE, " import _mlx_dllm_boot\n", "is damaged (IndentationError: "),
        (FILE, "__import__('_mlx_dllm_boot').startup()\n", "does not begin with import"),
        (f"{startup.BOOT}.py", None, "_mlx_dllm_boot.py is gone from beside "),
        (f"{startup.BOOT}.py", "def startup(:\n", "is damaged (SyntaxError: "),
    ],
)
@pytest.mark.skipif(sys.version_info >= (3, 15), reason="a .start takes the place of the .pth")
def test_the_start_up_files_are_damaged(place: tuple[Path, Path], name: str, text: str | None, value: str) -> None:
    check = damaged(place, name, text)
    assert_found(check, "problem", "not active", value, str(site_packages(place[0])), advice="pip install")


def test_the_boot_file_is_of_another_version(place: tuple[Path, Path]) -> None:
    old = (site_packages(place[0]) / f"{startup.BOOT}.py").read_text() + "# older\n"
    check = damaged(place, f"{startup.BOOT}.py", old)
    assert_found(check, "warning", "active, but", f"{startup.BOOT}.py is of another version", advice="pip install")


def test_nothing_is_wrong_but_it_did_not_run(place: tuple[Path, Path]) -> None:
    check = hook(place, before=f"del sys.modules[{startup.BOOT!r}]")
    assert_found(check, "problem", f"not active, though {site_packages(place[0]) / FILE}", advice="python -v -c pass")


def test_a_directory_whose_start_up_files_are_not_read(place: tuple[Path, Path], tmp_path: Path) -> None:
    for file in startup_files():
        shutil.copy(file, tmp_path)
    bare = tmp_path / "venv"
    venv.create(bare, symlinks=True)
    check = hook((bare, place[1]), more=tmp_path)
    advice = f"site.addsitedir('{tmp_path}')"
    assert_found(check, "problem", f"{tmp_path / FILE} is in a directory", "pip install --target", advice=advice)


@pytest.mark.parametrize("flags", [("-s",), ()])
def test_the_users_directory(place: tuple[Path, Path], tmp_path: Path, flags: tuple[str, ...]) -> None:
    python = str(getattr(sys, "_base_executable", sys.executable))
    env = {"PYTHONUSERBASE": str(tmp_path), "python": python}
    ask = run([], "-c", "import site; print(site.getusersitepackages())", python=python, PYTHONUSERBASE=str(tmp_path))
    folder = Path(ask.out.strip())
    folder.mkdir(parents=True)
    for file in startup_files():
        shutil.copy(file, folder)
    check = hook(place, *flags, **env)
    if flags:
        assert_found(check, "problem", f"{folder / FILE} is in the user's directory", advice="pip install")
    else:
        assert_found(check, "ok", f"active, from {folder}")


@pytest.fixture
def inactive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process as if the start-up file in that directory had not run."""
    for file in startup_files():
        shutil.copy(file, tmp_path)
    monkeypatch.delitem(sys.modules, startup.BOOT)
    monkeypatch.setattr(startup.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_start_up_file_is_hidden(inactive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = inactive / (f"{startup.STEM}.start" if sys.version_info >= (3, 15) else FILE)
    if hasattr(os, "chflags"):
        os.chflags(file, stat.UF_HIDDEN)
    else:
        plain = os.lstat
        flags = {str(file): stat.UF_HIDDEN}
        fake = lambda path: SimpleNamespace(st_mode=plain(path).st_mode, st_flags=flags.get(str(path), 0))  # noqa: E731
        monkeypatch.setattr(startup.os, "lstat", fake)
    check = only(startup.hook())
    monkeypatch.undo()
    assert_found(check, "problem", f"{file} is marked hidden", advice=f"chflags -R nohidden {sys.prefix}")


def test_the_start_up_file_cannot_be_read(inactive: Path) -> None:
    for suffix in (".pth", ".start"):
        file = inactive / (startup.STEM + suffix)
        file.unlink()
        file.mkdir()
    assert_found(only(startup.hook()), "problem", "cannot be read (IsADirectoryError", advice="pip install")


@pytest.mark.parametrize(
    ("version", "damage", "value"),
    [
        ((3, 15, 0), "start", f"{startup.STEM}.start does not run"),
        ((3, 17, 0), "no start", "though"),
        ((3, 18, 0), "no start", f"{startup.STEM}.start is gone"),
    ],
)
def test_the_start_up_file_of_later_pythons(
    inactive: Path, version: tuple[int, ...], damage: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = inactive / f"{startup.STEM}.start"
    file.write_text("something:else\n") if damage == "start" else file.unlink()
    monkeypatch.setattr(startup.sys, "version_info", version)
    check = only(startup.hook())
    monkeypatch.undo()
    assert_found(check, "problem", "not active", value)


# --- commands on PATH -------------------------------------------------------------------------------------------------


def test_commands_of_this_environment(own_commands: Path) -> None:
    assert [(check.name, check.status) for check in startup.commands()] == [(name, "ok") for name in COMMANDS]
    other = own_commands / "a path with spaces"
    other.mkdir()
    (other / "python3").symlink_to(sys.executable)  # another directory: it is asked
    script(own_commands / "mlx_lm.generate", f"#!/bin/sh\n'''exec' '{sys.executable}' \"$0\" \"$@\"\n' '''")
    script(own_commands / "mlx_lm", "#!/usr/bin/env python3")
    (own_commands / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (own_commands / "python3").chmod(0o755)
    found = {check.name: check for check in startup.commands()}
    assert_found(found["mlx_lm.generate"], "ok", str(own_commands / "mlx_lm.generate"))
    assert_found(found["mlx_lm"], "ok", str(own_commands / "mlx_lm"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_not_on_path(own_commands: Path, name: str) -> None:
    (own_commands / name).unlink()
    found = {check.name: check for check in startup.commands()}
    assert_found(found[name], "warning", "not on PATH", advice=f"activate {sys.prefix}, or run ")
    assert [check.status for check in found.values()].count("ok") == 2


def test_what_to_run_instead(own_commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_commands / "mlx_lm").unlink()
    monkeypatch.setattr(startup.sysconfig, "get_path", lambda name: str(tmp_path))
    name, here = "mlx_lm.generate", f"run {sys.executable} -m"
    (own_commands / name).unlink()
    (tmp_path / name).write_text("#!/nowhere/python\n")
    found = {check.name: check for check in startup.commands()}
    assert found["mlx_lm"].advice.endswith(f", or {here} mlx_lm generate")
    assert found[name].advice.endswith(f", or {here} mlx_lm.generate")
    script(tmp_path / name, f"#!{sys.executable}")
    found = {check.name: check for check in startup.commands()}
    assert found[name].advice.endswith(f", or run {tmp_path}/{name}")


def test_a_command_of_another_environment(place: tuple[Path, Path], own_commands: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "other", symlinks=True)
    script(own_commands / "mlx_lm.generate", f"#!{tmp_path}/other/bin/python")
    script(own_commands / "mlx_lm", f"#!{place[0]}/bin/python")
    script(own_commands / "mlx_vlm.generate", f"#!{tmp_path}/gone/bin/python")
    found = {check.name: check for check in startup.commands()}
    inactive, active, gone = (found[name] for name in COMMANDS)
    words = ["another environment", str(tmp_path / "other"), "the plugin is not active", 'called "diffusion"']
    advice = f"or {environment.install(python=f'{tmp_path}/other/bin/python')}"
    assert_found(inactive, "problem", str(own_commands / "mlx_lm.generate"), *words, advice=advice)
    advice = f"run {place[0]}/bin/mlx-dllm doctor"
    assert_found(active, "warning", str(place[0]), "which has the plugin too", advice=advice)
    assert_found(gone, "problem", f"{tmp_path}/gone/bin/python, which does not run", advice="run ")


def test_a_command_that_cannot_be_looked_into(own_commands: Path, tmp_path: Path) -> None:
    """No program is started that is not called a Python."""
    ran = tmp_path / "ran"
    (own_commands / "mine").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (own_commands / "mine").chmod(0o755)
    (own_commands / "mlx_lm").unlink()
    os.mkfifo(own_commands / "mlx_lm", 0o777)
    shutil.copy("/bin/true", own_commands / "mlx_vlm.generate")
    for first in ("#!/usr/bin/env bash", f"#!{own_commands}/mine", "#!/usr/bin/env mine", "#!/usr/bin/env", "#!"):
        script(own_commands / "mlx_lm.generate", first)
        for check in startup.commands():
            way = f"run {check.name.replace('lm', 'lm generate') if check.name == 'mlx_lm' else check.name} --help"
            assert_found(check, "warning", "cannot be looked into", advice=f"{way} and look for 'diffusion options'")
    assert not ran.exists()


def test_arguments_of_an_interpreter(own_commands: Path) -> None:
    (own_commands / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (own_commands / "python3").chmod(0o755)
    script(own_commands / "mlx_lm", f"#!{sys.executable} -s")
    for first in ("#!/usr/bin/env -S python3 -s", "#!/usr/bin/env -S A=b python3 -s", "#!/usr/bin/env python3"):
        script(own_commands / "mlx_lm.generate", first)
        assert [check.status for check in startup.commands()] == ["ok"] * 3, first


def test_a_python_that_does_not_answer(own_commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is waited for once, whatever it has started."""
    monkeypatch.setattr(startup, "_SECONDS", 1)
    (tmp_path / "python3").write_text("#!/bin/sh\nsleep 20\n")
    (tmp_path / "python3").chmod(0o755)
    for name in COMMANDS:
        script(own_commands / name, f"#!{tmp_path}/python3")
    start = time.monotonic()
    for check in startup.commands():
        assert_found(check, "warning", f"{tmp_path}/python3, which did not answer within 1 seconds", advice="run ")
    assert time.monotonic() - start < 10


def test_an_environment_that_was_moved(own_commands: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(startup.sysconfig, "get_path", lambda name: str(own_commands))
    for name in COMMANDS:
        script(own_commands / name, f"#!{tmp_path}/before/bin/python3")
    for check in startup.commands():
        words = (f"{tmp_path}/before/bin/python3, which is gone", "moved or renamed")
        assert_found(check, "problem", *words, advice=f"run {sys.executable} -m mlx_")
        assert f"run {own_commands}" not in check.advice and "anew" in check.advice


# --- patches, families and rules --------------------------------------------------------------------------------------


def installed_from(source: Path, folder: Path) -> None:
    """A package of somebody else, as pip installs it."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in points.items())])
        for group, points in project["entry-points"].items()
    ]
    metadata(folder, project["name"], project["version"], entry_points__txt="\n".join(groups))
    for file in source.glob("*.py"):
        shutil.copy(file, folder)


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Report:
    """Doctor with an mlx-lm that somebody has edited and with packages of strangers."""
    folder = tmp_path_factory.mktemp("strange")
    host = folder / "mlx_lm"
    shutil.copytree(Path(sys.modules["mlx_lm"].__file__ or "").parent, host)

    def edit(name: str, pattern: str, new: str) -> None:
        text, count = re.subn(pattern, new, (host / name).read_text(), count=1)
        assert count == 1
        (host / name).write_text(text)

    edit("perplexity.py", r"def eval_ppl\(", "# a comment\ndef eval_ppl(")
    edit("chat.py", r"def main\(\):\n", "def main():\n    pass\n")
    edit("utils.py", r"(def load_tokenizer\(\s*)model_path", r"\1path")
    (host / "cache_prompt.py").unlink()
    for name in ("stranger", "stranger_faults"):
        installed_from(data / "thirdparty" / name, folder)
    outcome = run(
        [folder], "-m", "mlx_dllm_plugin", "doctor", XDG_CACHE_HOME=str(folder), HOME=str(folder), PATH="/usr/bin:/bin"
    )
    return report_of(outcome)


def test_patches_that_no_longer_fit(strange: Report) -> None:
    version = sys.modules["mlx_lm"].__version__
    values = [row["value"] for row in strange.rows if row["name"] == f"mlx-lm {version}"]
    groups = {value.partition(":")[0]: value for value in values}
    assert "perplexity" in groups["same, applied"] and ", generate, " in groups["known, applied"]
    again = f"{PIP} install --force-reinstall --no-deps"
    changed = strange.named("mlx_lm.chat")
    assert_found(changed, "warning", "changed: main; signatures fit", advice=f"check results, or {again} 'mlx-lm>=")
    misfit = strange.named("mlx_lm.utils.load_tokenizer")
    assert_found(misfit, "problem", "incompatible, ", "model_path", "; without it ", advice=f"{again} 'mlx-lm>=")
    gone = strange.named("mlx_lm.cache_prompt")
    assert_found(gone, "problem", "incompatible, there is no mlx_lm.cache_prompt; without it ", advice="pip install")
    listed = " ".join(groups.values())
    assert not {"chat", "utils", "cache_prompt"} & set(re.split(r"[\s:,]+", listed))


def test_what_strangers_bring(strange: Report) -> None:
    for name, entry in (("families", "stranger"), ("unmasking rules", "left_to_right")):
        ours, theirs = [row for row in strange.rows if row["name"] == name]
        assert "from mlx-dllm-plugin: " in ours["value"] and entry not in ours["value"]
        assert_found(theirs, "ok", f"1 from stranger 1.0: {entry}")
    faults = {row["name"]: row for row in strange.rows if re.match("family |unmasking rule ", row["name"])}
    families = {f"family {name}" for name in ("dictionary", "misnamed", "absent", "gone", "gpt2")}
    assert set(faults) == families | {f"unmasking rule {name}" for name in ("family_as_rule", "a2d", "raises")}
    for row in faults.values():
        assert_found(row, "problem", "is left out", "stranger-faults 2.0", advice="pip uninstall")
    assert_found(faults["unmasking rule raises"], "problem", "RuntimeError: no such luck")


def test_the_strange_environment_is_summed_up(strange: Report) -> None:
    """Eight faults of strangers, a misfit, a module that is gone; and no command of the hosts is on that PATH."""
    assert strange.status == 1 and strange.last == "10 problems."
    assert [row["status"] for row in strange.rows].count("problem") == 10
    assert [row["value"] for row in strange.rows if row["name"] in COMMANDS] == ["not on PATH"] * 3


def test_one_of_our_own_families_is_gone(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: Path
) -> None:
    fault = f"The family 'sdar' is left out. {environment.PLUGIN} 0.1.0: mlx_dllm_plugin.families.sdar:FAMILY ..."
    monkeypatch.setattr(FAMILIES, "faults", lambda: {"sdar": fault, "x": "The family 'x' is left out. x 1: no."})
    report = doctor()
    assert_found(report.named("family sdar"), "problem", "left out", advice="--force-reinstall --no-deps")
    assert_found(report.named("family x"), "problem", "left out", advice=f"update that package, or {PIP} uninstall it")

    def broken() -> None:
        raise SyntaxError("in sdar.py")

    monkeypatch.setattr(FAMILIES, "builtin", broken)
    monkeypatch.setattr(FAMILIES, "faults", dict)
    row = doctor().rows[-2]
    assert_found(row, "problem", "cannot be imported (SyntaxError: in sdar.py)", advice="--force-reinstall --no-deps")


def test_a_patch_that_is_off_for_another_reason(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ("mlx_lm.chat", "main")
    monkeypatch.setitem(patches._RECORDS, key, Record(*key, "disabled", "main is asynchronous"))
    report = doctor()
    assert_found(report.named("mlx_lm.chat.main"), "problem", "off, main is asynchronous", advice="--no-deps 'mlx-lm")
    assert report.last == "1 problem." and report.status == 1


def test_a_patch_that_cannot_be_read(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    target = "mlx_vlm.evals.mmmu"
    for key in [key for key in patches._RECORDS if key[0] == target]:
        monkeypatch.delitem(patches._RECORDS, key)
    name = f"mlx_dllm_plugin.patches.{target}"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__name__=name))
    row = doctor().named(target)
    assert_found(row, "problem", "its patch cannot be read: AttributeError", advice="pip install")


def test_a_module_that_this_release_does_not_have(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    target, judge = "mlx_vlm.evals.mmmu", patches.judge
    monkeypatch.setattr(patches, "judge", lambda host: [j for j in judge(host) if j.target != target])
    values = [row["value"] for row in doctor().rows if row["section"] == "Patches"]
    assert [value for value in values if "mmmu" in value] == ["not in this release: evals.mmmu"]


def test_turned_off_all_of_it(path: Path) -> None:
    """Warnings, no problems: it was asked for."""
    outcome = run([], "-m", "mlx_dllm_plugin", "doctor", str(path), MLX_DLLM_PLUGIN="0")
    report = report_of(outcome)
    assert (report.status, report.last) == (0, "No problems.")
    version = sys.modules["mlx_lm"].__version__
    (off,) = [row for row in report.rows if row["name"] == f"mlx-lm {version}" and row["status"] == "warning"]
    assert_found(off, "warning", "known, off: utils, ", advice="unset MLX_DLLM_PLUGIN")
    last = {row["name"]: row for row in report.rows if row["section"] == "Checkpoint"}
    assert_found(last["mlx_lm.generate"], "warning", "does not denoise it, as MLX_DLLM_PLUGIN=0 turns the plugin off")
    assert_found(last["mlx_vlm.generate"], "warning", "wrong or not at all, as MLX_DLLM_PLUGIN=0")
    assert report.named("weights")["status"] == "ok"


# --- a checkpoint -----------------------------------------------------------------------------------------------------


def weights(change: Callable[[dict[str, mx.array]], object]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        file = run / "model" / "model.safetensors"
        values = dict(mx.load(str(file)))
        mx.eval(values)
        change(values)
        mx.save_safetensors(str(file), values, metadata={"format": "pt"})

    return damage


def rename(values: dict[str, mx.array], old: str, new: str) -> None:
    values[new] = values.pop(old)


def turn(values: dict[str, mx.array], *names: str) -> None:
    for name in names:
        values[name] = mx.contiguous(values[name].T)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda run: edit_json(run / "model" / "config.json", **changes)


def tokenizer(**changes: Any) -> Callable[[Path], None]:
    """Change a tokenizer_config.json, and the added tokens beside it."""
    return lambda run: edit_json(run / "model" / "tokenizer_config.json", **changes)


def write(file: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / "model" / file).write_text(text) and None


def forget(*names: str) -> Callable[[Path], None]:
    return lambda run: [(run / "model" / name).unlink() for name in names] and None


def added_tokens(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    """Change the added tokens of tokenizer.json, the only file of the tokenizer that is left with them."""

    def damage(run: Path) -> None:
        forget("added_tokens.json", "special_tokens_map.json")(run)
        edit_json(run / "model" / "tokenizer_config.json", added_tokens_decoder=..., mask_token=...)
        values = json.loads((run / "model" / "tokenizer.json").read_text())
        change(values["added_tokens"])
        (run / "model" / "tokenizer.json").write_text(json.dumps(values))

    return damage


def truncate(run: Path) -> None:
    file = run / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


WTE, PROJ = "transformer.wte.weight", "transformer.h.{}.attn.c_proj.bias"
LARGE = {"content": "<|more|>", "id": 341, "special": True, "single_word": False, "lstrip": False, "rstrip": False}


@pytest.mark.parametrize(
    ("damage", "name", "words", "advice"),
    [
        (weights(lambda w: w.pop(WTE)), "weights", ["1 missing: model.wte.weight"], "again"),
        (weights(lambda w: w.update(more=w[WTE])), "weights", ["1 unexpected: model.more"], "again"),
        (
            weights(lambda w: rename(w, PROJ.format(1), PROJ.format(7))),
            "weights",
            ["1 missing: model.h.1.attn.c_proj.bias; 1 unexpected: model.h.7.attn.c_proj.bias"],
            "again",
        ),
        (
            weights(lambda w: turn(w, WTE)),
            "weights",
            ["1 of another shape: model.wte.weight is (32, 341), expected (341, 32)"],
            "again",
        ),
        (
            weights(lambda w: [w.pop(name) for name in [*w] if "h.1." in name]),
            "weights",
            ["12 missing: model.h.1.", " and 9 more"],
            "again",
        ),
        (truncate, "weights", ["truncated or damaged"], "copy or download it again"),
        (forget("model.safetensors"), "weights", ["no weights"], "give the directory of a checkpoint"),
        (forget("tokenizer.json", "vocab.json"), "tokenizer", ["No tokenizer files"], "with --tokenizer"),
        (write("tokenizer.json", '{"added_tokens": []}'), "tokenizer", ["cannot be loaded"], "copy tokenizer.json"),
        (write("tokenizer.json", "{"), "spec", ["tokenizer.json", "JSON"], "copy or download it again"),
        (write("tokenizer_config.json", "{"), "spec", ["tokenizer_config.json", "JSON"], "copy or download it again"),
        (config(a2d={"objective": "mdlm", "mask_token_id": 341}), "spec", ["mask_token_id", "341"], "config.json"),
        (config(activation_function="relu"), "spec", ["activation_function", "relu"], "config.json"),
        (config(a2d="mdlm"), "spec", ["a2d", "object"], "config.json"),
        (config(model_type="mamba"), "spec", ["'mamba'", "cannot decode"], "see the families above"),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_is_broken_in_a_checkpoint(
    copied: Path, doctor: Doctor, damage: Callable[[Path], None], name: str, words: list[str], advice: str
) -> None:
    damage(copied)
    report = doctor(copied)
    assert report.status == 1
    problems = [row for row in report.rows if row["status"] == "problem"]
    assert_found(problems[0], "problem", *words, advice=advice)
    assert problems[0]["name"] == name and report.last.startswith(f"{len(problems)} problem")
    will = [row for row in report.rows if row["section"] == "Checkpoint" and row["name"] == "mlx_lm.generate"]
    assert_found(will[0], "warning", "refuses it: see above")


@pytest.mark.parametrize(
    ("damage", "name", "words", "advice"),
    [
        (added_tokens(lambda tokens: tokens.pop()), "mask token", ["no token 340, from the a2d block"], "copy token"),
        (
            tokenizer(mask_token="<|endoftext|>"),
            "mask token",
            ["340 from the a2d block is '<|mdlm_mask|>'", "declares '<|endoftext|>', 339"],
            "--mask-token-id 339",
        ),
        (added_tokens(lambda t: t.append({**LARGE, "normalized": False})), "vocabulary", ["341", "341 rows"], "copy"),
        (lambda run: edit_json(run / "manifest.json", status="failed"), "run", ["'failed'"], ""),
        (
            lambda run: [
                config(eos_token_id=...)(run),
                tokenizer(eos_token=...)(run),
                forget("generation_config.json")(run),
            ],
            "end of sequence",
            ["never cut"],
            "eos_token_id",
        ),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_is_doubtful_in_a_checkpoint(
    copied: Path, doctor: Doctor, damage: Callable[[Path], None], name: str, words: list[str], advice: str
) -> None:
    damage(copied)
    report = doctor(copied)
    assert (report.status, report.last, report.bad()) == (0, "No problems.", [name])
    assert_found(report.named(name), "warning", *words, advice=advice)


def test_values_of_the_configuration_are_not_the_tokenizers_fault(doctor: Doctor, ar: Path, tmp_path: Path) -> None:
    reads_architectures = "architectures" in inspect.getsource(utils._get_classes)  # from mlx-lm 0.32 on
    for number, (values, name, words) in enumerate(
        [
            ({"eos_token_id": "x"}, "config.json", ["transformers cannot take", "eos_token_id"]),
            ({"hidden_size": "32"}, "config.json", ["transformers cannot take", "hidden_size"]),
            *([({"architectures": 3}, "config.json", ["mlx-lm cannot take"])] if reads_architectures else []),
            ({"model_type": ["llama"]}, "spec", ["model_type must be the name of an architecture", "['llama']"]),
            ({"model_type": ...}, "spec", ["model_type must be the name of an architecture", "None"]),
        ]
    ):
        copy = copy_run(ar, tmp_path / str(number))
        edit_json(copy / "config.json", **values)
        report = doctor(copy)
        problems = [row for row in report.rows if row["status"] == "problem"]
        assert_found(problems[0], "problem", *words, advice="")
        assert [row["name"] for row in problems] == [name]


@pytest.mark.parametrize("template", ["{{ x", "{{ raise_exception('never') }}", "{% include 'x' %}"])
def test_a_chat_template_that_cannot_be_rendered(
    doctor: Doctor, copied: Path, ar: Path, tmp_path: Path, template: str
) -> None:
    other = copy_run(ar, tmp_path / "copy")
    for name, folder in ((copied, copied / "model"), (other, other)):
        edit_json(folder / "tokenizer_config.json", chat_template="{{ messages[0]['content'] }}")
        assert doctor(name).bad() == []
        edit_json(folder / "tokenizer_config.json", chat_template=template)
        report = doctor(name)
        row = report.named("chat template")
        assert_found(row, "problem", "cannot be rendered (", advice="--ignore-chat-template")
        assert_found(will(report)["mlx_lm.generate"], "warning", "fails at the chat template: see above")
        assert report.last == "1 problem."


def shards(folder: Path, *, index: bool = True) -> None:
    """The weights in two files."""
    values = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(values)
    (folder / "model.safetensors").unlink()
    names = list(values)
    half = len(names) // 2
    weight_map = {}
    for number, part in enumerate((names[:half], names[half:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        mx.save_safetensors(str(folder / file), {name: values[name] for name in part}, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_file_of_weights_that_was_left_over(doctor: Doctor, copied: Path, ar: Path, tmp_path: Path) -> None:
    other = copy_run(ar, tmp_path / "copy")
    for name, folder in ((copied, copied / "model"), (other, other)):
        shards(folder)
        assert doctor(name).bad() == []
        shutil.copy(folder / "model-00002-of-00002.safetensors", folder / "model-00003-of-00003.safetensors")
        found = [row for row in doctor(name).rows if row["name"] == "weights"]
        words = "the index does not name model-00003-of-00003.safetensors, and mlx-lm reads every"
        assert_found(found[0], "warning", words, advice="move elsewhere")
        (folder / "model.safetensors.index.json").unlink()
        found = [row for row in doctor(name).rows if row["name"] == "weights"]
        words = "is in model-00002-of-00002.safetensors and in model-00003-of-00003.safetensors"
        assert_found(found[0], "warning", words, advice="move elsewhere")
        assert found[1]["status"] == "ok"


def test_an_index_beside_complete_weights(doctor: Doctor, copied: Path, ar: Path, tmp_path: Path) -> None:
    """mlx-lm does not read it; this package refuses a diffusion checkpoint with it."""
    other = copy_run(ar, tmp_path / "copy")
    for text in ("{", '{"weight_map": {"w": "model-00001-of-00002.safetensors"}}'):
        for folder in (copied / "model", other):
            (folder / "model.safetensors.index.json").write_text(text)
        report = doctor(other)
        warned, fine = [row for row in report.rows if row["name"] == "weights"]
        assert_found(warned, "warning", "whatever the index says", advice="copy")
        assert report.status == 0 and fine["status"] == "ok"
        assert_found(will(report)["mlx_lm.generate"], "ok", "decodes it autoregressively")
        assert doctor(copied).named("weights")["status"] == "problem"
    (other / "model.safetensors").rename(other / "model-00002-of-00002.safetensors")
    assert doctor(other).status == 0


def test_damaged_weights_of_an_autoregressive_checkpoint(doctor: Doctor, ar: Path, tmp_path: Path) -> None:
    copy = copy_run(ar, tmp_path / "copy")
    file = copy / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    file.write_bytes(data[:8] + data[8 : 8 + length].replace(b'"F32"', b'"XYZ"') + data[8 + length :])
    report = doctor(copy)
    assert_found(report.named("weights"), "problem", "cannot be loaded", advice="copy, download or convert")
    assert report.last == "1 problem."


def test_so_many_layers_are_not_made(doctor: Doctor, copied: Path, ar: Path, tmp_path: Path) -> None:
    other = copy_run(ar, tmp_path / "copy")
    edit_json(copied / "model" / "config.json", n_layer=10**9)
    edit_json(other / "config.json", num_hidden_layers=10**9)
    for name, most in ((copied, 2), (other, 1)):
        text = f"1000000000 layers by config.json, {most} at most by the weights"
        assert_found(doctor(name).named("weights"), "problem", text, advice="correct config.json")


def test_weights_of_whole_numbers(doctor: Doctor, copied: Path) -> None:
    weights(lambda w: w.update({WTE: w[WTE].astype(mx.int32)}))(copied)
    row = doctor(copied).named("weights")
    words = "1 not of floating-point numbers: model.wte.weight is mlx.core.int32"
    assert_found(row, "problem", words, advice="again")


def test_names_cannot_move_the_cursor(command: Callable[..., Outcome], copied: Path) -> None:
    weights(lambda w: w.update({"more\x1b[2J\rx\n": w[WTE]}))(copied)
    out = command(copied).out
    assert r"model.more\x1b[2J\rx\n" in out and "\x1b" not in out and "\r" not in out
    outcome = command(copied / "model" / "a\x1b[2J")
    assert_one_sentence(outcome, r"a\x1b[2J")


def test_a_raw_checkpoint_with_what_it_needs(doctor: Doctor, command: Callable[..., Outcome], copied: Path) -> None:
    """As training leaves it: no a2d block, no tokenizer."""
    source = copy_run(copied / "model", copied.parent / "its tokenizer")
    raw = copied / "checkpoints" / "checkpoint-3"
    raw.parent.mkdir()
    (copied / "model").rename(raw)
    edit_json(raw / "config.json", a2d=...)
    for file in raw.glob("*"):
        if file.suffix not in (".safetensors",) and file.name != "config.json":
            file.unlink()
    report = doctor(raw)
    problems = {row["name"]: row for row in report.rows if row["status"] == "problem"}
    assert set(problems) == {"spec", "tokenizer"}
    assert_found(problems["spec"], "problem", "mask token is unknown", advice="that is the last, 340")
    assert_found(problems["tokenizer"], "problem", "No tokenizer files", advice="with --tokenizer")
    given = ["--tokenizer", source, "--mask-token-id", 340]
    report = doctor(raw, *given)
    assert report.status == 0
    assert_found(report.named("mask token"), "ok", "340 from --mask-token-id, '<|mdlm_mask|>' in the tokenizer")
    words = f"denoises it as gpt2 (rule a2d, canvas 64, mask 340), with --tokenizer '{source}' --mask-token-id 340"
    assert_found(will(report)["mlx_lm.generate"], "ok", words)
    for wrong, name, word in (
        (["--tokenizer", raw, "--mask-token-id", 340], "tokenizer", "no tokenizer files"),
        (["--tokenizer", raw / "no", "--mask-token-id", 340], "tokenizer", "no tokenizer files"),
        (["--tokenizer", source, "--mask-token-id", 341], "spec", "got 341 from --mask-token-id"),
        (["--tokenizer", source, "--mask-token-id", -1], "spec", "got -1 from --mask-token-id"),
        ([*given, "--family", "llama"], "spec", "'llama'"),
    ):
        report = doctor(raw, *wrong)
        problems = {row["name"]: row for row in report.rows if row["status"] == "problem"}
        assert [*problems] == [name] and word in problems[name]["value"], problems
    (copied / "manifest.json").unlink()
    assert_found(will(doctor(raw, *given, "--family", "gpt2"))["mlx_lm.generate"], "ok", "with --family gpt2")


def test_options_without_a_path(command: Callable[..., Outcome]) -> None:
    assert_one_sentence(command("--mask-token-id", 0), "--mask-token-id", "PATH")


def test_options_of_diffusion_for_an_autoregressive_checkpoint(doctor: Doctor, ar: Path) -> None:
    row = will(doctor(ar, "--mask-token-id", 3))["mlx_lm.generate"]
    assert_found(row, "warning", "refuses it with --mask-token-id", advice="--family")


def test_paths_in_commands_are_quoted(doctor: Doctor, copied: Path) -> None:
    copied.rename(copied.parent / "a run")
    report = doctor(copied.parent / "a run")
    assert f"mlx-dllm info '{copied.parent}/a run' shows all" in report.named("spec")["value"]


class OwnTokenizer(PreTrainedTokenizerFast):
    """Code beside the weights: transformers gives it the vocabulary without the merges."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


def test_a_tokenizer_that_is_mended_and_one_that_is_not(
    goldens: Path, tmp_path: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tokenization_auto.REGISTERED_TOKENIZER_CLASSES, "OwnTokenizer", OwnTokenizer)
    copy = copy_run(goldens / "block" / "sdar-b4", tmp_path / "SDAR-b4")
    assert doctor(copy).bad() == []
    edit_json(copy / "tokenizer_config.json", tokenizer_class="OwnTokenizer")
    for _ in range(2):
        row = doctor(copy).named("tokenizer")
        assert_found(row, "warning", "mended in memory", "tokenizer.json is used as it is", advice="copy tokenizer")
    values = json.loads((copy / "tokenizer.json").read_text())
    values["model"]["merges"] = []
    (copy / "tokenizer.json").write_text(json.dumps(values))
    assert_found(doctor(copy).named("tokenizer"), "problem", "no merges", advice="copy tokenizer")


def test_more_than_the_memory_holds(copied: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 GiB of zeros that are nowhere: no weight is read, or this test would not end."""
    file, rows = copied / "model" / "model.safetensors", 1 << 30
    with file.open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    header.pop("__metadata__", None)
    header[WTE]["shape"][0] = rows
    end = 0
    for entry in header.values():
        length = 4
        for n in entry["shape"]:
            length *= n
        entry["data_offsets"], end = [end, end + length], end + length
    data = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(data)) + data)
        stream.truncate(8 + len(data) + end)
    edit_json(copied / "model" / "config.json", vocab_size=rows)
    before = mx.get_active_memory()
    monkeypatch.setattr(checkpoint, "memory_of", lambda core: (64 << 30, "of memory"))
    report = doctor(copied)
    row = report.named("memory")
    assert_found(row, "warning", "weights 128.0 GiB, ", "64.0 GiB of memory: too little", advice="mlx_lm.convert")
    assert report.status == 0 and report.bad() == ["memory"] and mx.get_active_memory() - before < 1 << 20
    monkeypatch.setattr(checkpoint, "memory_of", lambda core: (129 << 30, "of memory"))
    assert_found(doctor(copied).named("memory"), "ok", "129.0 GiB of memory")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}, 2 * 2 * 4 * 8 * 10 * 2),
        ({"n_layer": 2, "n_head": 4, "n_embd": 32}, 2 * 2 * 4 * 8 * 10 * 2),
        (
            {"n_layers": 3, "n_heads": 4, "n_kv_heads": 1, "d_model": 64, "vocab_size": 9},
            2 * 3 * 1 * 16 * 10 * 2,
        ),
        (
            {
                "text_config": {
                    "num_hidden_layers": 1,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 2,
                    "hidden_size": 64,
                    "head_dim": 5,
                }
            },
            2 * 1 * 2 * 5 * 10 * 2,
        ),
        ({"num_hidden_layers": 2}, None),
    ],
)
def test_keys_and_values_are_computed_from_the_configuration(values: dict[str, Any], expected: int | None) -> None:
    assert checkpoint.cache_bytes(values, 10, 2) == expected


def test_keys_and_values_are_as_large_as_they_get(path: Path) -> None:
    """Against the cache of mlx-lm itself."""
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    model, _ = mlx_lm.load(str(path))
    cache = make_prompt_cache(model)
    model(mx.zeros((1, 100), mx.int32), cache=cache)
    keys = sum(array.nbytes * 100 // array.shape[2] for entry in cache for array in (entry.keys, entry.values))
    values = json.loads((path / "model" / "config.json").read_text())
    assert checkpoint.cache_bytes(values, 100, 4) == keys


def will(report: Report) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in report.rows if row["section"] == "Checkpoint"}


def test_an_autoregressive_checkpoint_is_no_problem(doctor: Doctor, ar: Path, tmp_path: Path) -> None:
    report = doctor(ar)
    assert (report.status, report.bad()) == (0, [])
    assert report.named("spec")["value"].startswith("none: autoregressive, model_type 'llama'")
    assert_found(will(report)["mlx_lm.generate"], "ok", "decodes it autoregressively, as without the plugin")
    assert_found(will(report)["mlx_vlm.generate"], "ok", "as without the plugin")
    copy = copy_run(ar, tmp_path / "copy")
    values = dict(mx.load(str(copy / "model.safetensors")))
    mx.eval(values)
    del values["lm_head.weight"]
    mx.save_safetensors(str(copy / "model.safetensors"), values)
    report = doctor(copy)
    assert report.status == 1 and report.named("weights")["value"] == "1 missing: lm_head.weight"
    assert_found(will(report)["mlx_lm.generate"], "warning", "cannot load it, as without the plugin")


def test_a_model_that_is_not_for_mlx_lm(doctor: Doctor, ar: Path, tmp_path: Path) -> None:
    copy = copy_run(ar, tmp_path / "copy")
    edit_json(copy / "config.json", model_type="vision_of_tomorrow")
    report = doctor(copy)
    assert (report.status, report.bad()) == (0, ["weights", "memory"])
    assert_found(report.named("weights"), "warning", "vision_of_tomorrow", advice="another program")
    assert_found(report.named("memory"), "warning", "cannot be told")
    assert_found(will(report)["mlx_lm.generate"], "ok", "does with it what it does, as without the plugin")


def test_code_beside_the_weights_is_not_run(doctor: Doctor, ar: Path, tmp_path: Path) -> None:
    copy = copy_run(ar, tmp_path / "copy")
    edit_json(copy / "config.json", model_file="own.py", auto_map={"AutoTokenizer": ["own.Own", None]})
    edit_json(copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own")
    (copy / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    report = doctor(copy)
    for name in ("tokenizer", "weights"):
        assert_found(report.named(name), "warning", "not looked at", "not run here", advice="read it")
    assert report.status == 0
    only_so = "decodes it autoregressively only with --trust-remote-code"
    if has_option():
        assert_found(will(report)["mlx_lm.generate"], "warning", only_so)
    edit_json(copy / "config.json", model_file=None)
    report = doctor(copy)
    assert report.named("weights")["status"] == "ok"
    assert_found(will(report)["mlx_lm.generate"], "warning", only_so)
    assert not (tmp_path / "ran").exists()


def has_option() -> bool:
    return "trust_remote_code" in inspect.signature(inspect.unwrap(utils.load_model)).parameters


def test_the_model_is_code_beside_the_weights(doctor: Doctor, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_json(copied / "model" / "config.json", model_file="own.py")
    report = doctor(copied)
    how = "only with" if has_option() else "and runs its code unasked"
    assert_found(will(report)["mlx_lm.generate"], "warning", f"denoises it {how}")
    with monkeypatch.context() as patched:
        patched.setattr(utils, "load_model", lambda model_path, get_model_classes=None: None)
        row = will(doctor(copied))["mlx_lm.generate"]
    assert_found(row, "warning", "denoises it and runs its code unasked")
    edit_json(copied / "model" / "config.json", model_file=None)
    assert doctor(copied).bad() == []


def test_a_patch_without_which_it_is_refused(doctor: Doctor, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ("mlx_lm.generate", "stream_generate")
    monkeypatch.setitem(patches._RECORDS, key, Record(*key, "disabled", "there is no stream_generate"))
    report = doctor(path)
    assert report.last == "1 problem."
    assert_found(will(report)["mlx_lm.generate"], "warning", "refuses it, as the patch of mlx_lm.generate is off")


def test_without_the_hook_it_is_not_denoised(doctor: Doctor, path: Path, inactive: Path) -> None:
    report = doctor(path)
    assert report.last == "1 problem." and report.status == 1
    assert report.named("start-up hook")["status"] == "problem"
    what = "does not denoise it, as the start-up hook is not active"
    assert_found(will(report)["mlx_lm.generate"], "warning", what)


@pytest.mark.parametrize("version", ["v20", "v22"])
def test_llada2(goldens: Path, doctor: Doctor, version: str) -> None:
    name = goldens / "block" / f"llada2_moe-{version}"
    report = doctor(name)
    assert report.status == 0
    checked = will(report)
    rule = "joint_threshold_indel" if version == "v22" else "low_confidence_dynamic"
    spec = f"llada2_moe (rule {rule}, block 32, mask 320)"
    assert_found(checked["spec"], "ok", spec, "told by config.json")
    assert_found(checked["tokenizer"], "ok", "with a chat template")
    assert_found(checked["mlx_lm.generate"], "ok", f"denoises it as {spec}")
    if version == "v22":
        assert_found(checked["mlx_vlm.generate"], "ok", f"denoises it as {spec}")
        assert report.bad() == []
    else:
        assert_found(checked["mlx_vlm.generate"], "ok", "with LLaDA2 of its own; with --unmasking or --profile as")
        assert_found(checked["assumed"], "warning", "LLaDA2.0 is assumed", "--unmasking joint_threshold")


def test_a_broken_llada2_is_refused_by_both_hosts(goldens: Path, tmp_path: Path, doctor: Doctor) -> None:
    copy = copy_run(goldens / "block" / "llada2_moe-v22", tmp_path / "llada22")
    (copy / "model.safetensors").unlink()
    report = doctor(copy)
    assert report.last == "1 problem."
    for host in ("mlx_lm", "mlx_vlm"):
        assert_found(will(report)[f"{host}.generate"], "warning", "refuses it: see above")


def test_experts_in_16_bits_on_the_cpu(goldens: Path, tmp_path: Path, doctor: Doctor) -> None:
    copy = copy_run(goldens / "block" / "llada2_moe-v22", tmp_path / "llada22")
    file = copy / "model.safetensors"
    values = {name: value.astype(mx.bfloat16) for name, value in dict(mx.load(str(file))).items()}
    mx.eval(values)
    mx.save_safetensors(str(file), values)
    rows = [row for row in doctor(copy).rows if row["name"] == "weights"]
    if mx.default_device() == mx.Device(mx.cpu):
        assert_found(rows[1], "warning", "weights are cast to float32", advice="quantize")
    assert len(rows) == 1 + (mx.default_device() == mx.Device(mx.cpu)) and rows[0]["status"] == "ok"


def test_what_mlx_vlm_decodes_itself(ar: Path, tmp_path: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_run(ar, tmp_path / "copy")
    edit_json(copy / "config.json", model_type="diffusion_gemma", architectures=["DiffusionGemma"])
    report = doctor(copy)
    assert_found(will(report)["spec"], "warning", "DiffusionGemma is recognised")
    assert_found(will(report)["mlx_lm.generate"], "warning", "refuses it")
    assert_found(will(report)["mlx_vlm.generate"], "ok", "a diffusion of its own")
    assert report.status == 0
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    report = doctor(copy)
    assert_found(will(report)["spec"], "problem", "DiffusionGemma is recognised")
    assert report.status == 1


# --- the README -------------------------------------------------------------------------------------------------------


def test_the_readme_shows_what_is_printed(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lines; versions, paths and the numbers of a machine are those of another one. There is no mlx-vlm."""
    monkeypatch.chdir(ROOT)
    shown = re.search(r"\$ mlx-dllm doctor ([^\n]*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    report = doctor(*shown[1].split())

    def same(rows: list[dict[str, str]]) -> list[tuple[str, ...]]:
        """Each once: what of the hosts cannot be imported is not the same everywhere."""
        found = [(row["section"], row["status"], re.sub(r" \d[\d.]*$", "", row["name"])) for row in rows]
        return list(dict.fromkeys(found))

    rows = parse(shown[2])
    assert same(rows) == same(report.rows)
    for section in ("Families and rules", "Checkpoint"):
        shown_rows, real = (
            [r for r in of if r["section"] == section and r["name"] != "memory"] for of in (rows, report.rows)
        )
        assert shown_rows == real and real
    assert shown[2].splitlines()[-1] == report.last == "No problems."
