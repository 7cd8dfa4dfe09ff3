"""Other people's families and unmasking rules: installed, used, and named when something is wrong with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_dllm_plugin import DecodingOptions, DiffusionError, decode
from mlx_dllm_plugin.families import FAMILIES, Family
from mlx_dllm_plugin.families.a2d import family as a2d_family
from mlx_dllm_plugin.registry import Registry
from mlx_dllm_plugin.samplers import RULES, Rule
from tests.models import MASK, tiny_model, tiny_run, write_checkpoint

ROOT = Path(__file__).parent.parent
THIRD_PARTY = Path(__file__).parent / "data" / "thirdparty"

USE = """
import json, sys
import mlx_dllm_plugin
from mlx_dllm_plugin import DecodingOptions, DiffusionError, decode
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.samplers import RULES
from mlx_lm.utils import load_model

def run(path, **options):
    model = load_model(path)[0]
    result = decode(model, [4, 8, 15], DecodingOptions(max_tokens=6, stop_at_eos=False, **options))
    positions = [position for commit in result.commits for position in commit.positions]
    return {"family": model.diffusion_spec.family, "tokens": result.tokens, "positions": positions}

def refusal(registry, name):
    try:
        registry.get(name)
    except DiffusionError as error:
        return str(error)

from pathlib import Path
theirs, ours = map(Path, sys.argv[1:])
print(json.dumps({
    "ours": run(ours),
    "theirs": run(theirs),
    "our rule": run(theirs, unmasking="low_confidence"),
    "their rule": run(ours, unmasking="left_to_right"),
    "families": FAMILIES.names(),
    "rules": RULES.names(),
    "packages": [FAMILIES.package("stranger"), RULES.package("left_to_right"), FAMILIES.package("gpt2")],
    "refusals": {name: refusal(FAMILIES, name) for name in ("dictionary", "misnamed", "absent", "gone", "gpt2")}
    | {name: refusal(RULES, name) for name in ("family_as_rule", "raises", "a2d")},
    "gpt2": FAMILIES.get("gpt2") is sys.modules["mlx_dllm_plugin.families.gpt2"].FAMILY,
}))
"""


def run(*command: object) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_DLLM", "PYTHON"))}
    result = subprocess.run([str(part) for part in command], env=clean, capture_output=True, text=True, cwd=ROOT.anchor)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment that sees this one's packages, with both third-party packages installed by pip."""
    folder = tmp_path_factory.mktemp("thirdparty")
    shutil.copytree(THIRD_PARTY, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(folder / "env", with_pip=False, symlinks=os.name != "nt")
    bin_folder, executable = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    interpreter = folder / "env" / bin_folder / executable
    purelib = run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages") or path == str(ROOT)]
    (Path(purelib) / "outer.pth").write_text("\n".join(seen) + "\n")
    pip = (sys.executable, "-m", "pip", "--python", interpreter, "--quiet", "--disable-pip-version-check", "install")
    sources = (folder / "source" / "stranger", folder / "source" / "stranger_faults")
    run(*pip, "--no-index", "--no-deps", "--no-build-isolation", *sources)
    return interpreter


@pytest.fixture(scope="module")
def used(python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """What a script in that environment finds, and the lines on its stderr."""
    folder = tmp_path_factory.mktemp("checkpoints")
    theirs = write_checkpoint(folder / "theirs", "llama", mask_token_id=MASK, stranger=True)
    ours = tiny_run(folder / "ours")
    result = run(python, "-c", USE, theirs, ours / "model")
    return json.loads(result.stdout), result.stderr.splitlines()


def test_an_installed_family_and_rule_decode(used: Any) -> None:
    found, _ = used
    assert found["theirs"]["family"] == "stranger"
    assert found["theirs"]["positions"] == [3, 4, 5, 6, 7, 8]
    assert sorted(found["our rule"]["positions"]) == [3, 4, 5, 6, 7, 8] != found["our rule"]["positions"]
    assert len(found["theirs"]["tokens"]) == 6 and MASK not in found["theirs"]["tokens"]
    assert "stranger" in found["families"] and "left_to_right" in found["rules"]
    assert found["packages"] == ["stranger 1.0", "stranger 1.0", "mlx-dllm-plugin"]


def test_what_is_ours_decodes_as_without_them(used: Any, tmp_path: Path) -> None:
    found, _ = used
    model = tiny_model("gpt2")
    alone = decode(model, [4, 8, 15], DecodingOptions(max_tokens=6, stop_at_eos=False))
    assert found["ours"]["family"] == "gpt2" and found["ours"]["tokens"] == alone.tokens
    assert found["their rule"]["positions"] == [3, 4, 5, 6, 7, 8]
    assert found["gpt2"] is True


FAULTS = {
    "dictionary": "The family 'dictionary' is left out. stranger-faults 2.0: an entry of mlx_dllm.families must be a "
    "Family, got dict.",
    "misnamed": "The family 'misnamed' is left out. stranger-faults 2.0: the entry point is called 'misnamed' but its "
    "family 'another_name'; give both one name.",
    "absent": "The family 'absent' is left out. stranger-faults 2.0: stranger_faults:ABSENT cannot be loaded "
    "(AttributeError: module 'stranger_faults' has no attribute 'ABSENT').",
    "gone": "The family 'gone' is left out. stranger-faults 2.0: stranger_gone:FAMILY cannot be loaded "
    "(ModuleNotFoundError: No module named 'stranger_gone').",
    "gpt2": "The family 'gpt2' is left out. stranger-faults 2.0: the family 'gpt2' is taken by mlx-dllm-plugin; choose "
    "another name.",
    "family_as_rule": "The unmasking rule 'family_as_rule' is left out. stranger-faults 2.0: an entry of "
    "mlx_dllm.unmasking must be a Rule, got Family.",
    "raises": "The unmasking rule 'raises' is left out. stranger-faults 2.0: stranger_raises:RULE cannot be loaded "
    "(RuntimeError: no such luck).",
    "a2d": "The unmasking rule 'a2d' is left out. stranger-faults 2.0: the unmasking rule 'a2d' is taken by "
    "mlx-dllm-plugin; choose another name.",
}


def test_each_fault_is_named_in_one_line_once(used: Any) -> None:
    _, lines = used
    assert sorted(lines) == sorted(f"[mlx-dllm-plugin] {text}" for text in FAULTS.values())


def test_asking_for_a_faulty_name_gives_its_fault(used: Any) -> None:
    found, _ = used
    ours = {"gpt2": None, "a2d": None}
    assert found["refusals"] == {**FAULTS, **ours}
    assert not set(found["families"]) & (set(FAULTS) - set(ours))
    assert not set(found["rules"]) & (set(FAULTS) - set(ours))


def test_nothing_is_scanned_for_what_is_ours(python: Path, tmp_path: Path) -> None:
    """Decoding our own checkpoint with our own rule imports no stranger and prints nothing."""
    script = (
        "import sys, mlx_dllm_plugin\n"
        "from mlx_lm.utils import load_model\n"
        "from pathlib import Path\n"
        "model = load_model(Path(sys.argv[1]))[0]\n"
        "mlx_dllm_plugin.decode(model, [1, 2])\n"
        "assert not [name for name in sys.modules if name.startswith('stranger')], 'imported'\n"
    )
    assert run(python, "-c", script, tiny_run(tmp_path) / "model").stderr == ""


# By hand, in this process.


def some_family(name: str, **changes: Any) -> Family:
    family = a2d_family("no_such_model", hidden=lambda *_: None, head=lambda *_: None)
    return replace(family, name=name, **changes)


@pytest.fixture
def registry() -> Registry[Family]:
    return Registry("mlx_dllm.families", "family", Family, {"gpt2": "mlx_dllm_plugin.families.gpt2:FAMILY"})


def test_a_family_is_registered_and_unregistered_by_hand() -> None:
    family = some_family("by_hand")
    FAMILIES.register(family)
    try:
        assert FAMILIES.get("by_hand") is family
        assert "by_hand" in FAMILIES.names() and family in FAMILIES.others() and family not in FAMILIES.builtin()
        assert FAMILIES.package("by_hand") == "registered by hand"
    finally:
        FAMILIES.unregister("by_hand")
    assert "by_hand" not in FAMILIES.names() and family not in FAMILIES.others()
    with pytest.raises(DiffusionError, match="^Unknown family 'by_hand'; known are: .*gpt2.*qwen2"):
        FAMILIES.get("by_hand")


def test_a_rule_registered_by_hand_decodes_until_it_is_unregistered() -> None:
    model = tiny_model("qwen2")
    ours = RULES.get("low_confidence")
    RULES.register(replace(ours, name="backwards", confidence=lambda found: -found.noise))
    options = DecodingOptions(unmasking="backwards", max_tokens=4, max_denoising_steps=4, stop_at_eos=False)
    try:
        assert len(decode(model, [1, 2], options).tokens) == 4
    finally:
        RULES.unregister("backwards")
    with pytest.raises(DiffusionError, match="^Unknown unmasking rule 'backwards'; known are: "):
        decode(model, [1, 2], options)


def test_what_cannot_be_registered_is_refused(registry: Registry[Family]) -> None:
    with pytest.raises(DiffusionError) as error:
        registry.register(RULES.get("a2d"), package="pkg 3")  # type: ignore[arg-type]
    assert str(error.value) == "pkg 3: an entry of mlx_dllm.families must be a Family, got Rule."
    with pytest.raises(DiffusionError) as error:
        registry.register(some_family("gpt2"), package="pkg 3")
    assert str(error.value) == "pkg 3: the family 'gpt2' is taken by mlx-dllm-plugin; choose another name."
    registry.register(some_family("mine"), package="pkg 3")
    with pytest.raises(DiffusionError) as error:
        registry.register(some_family("mine"), package="pkg 4")
    assert str(error.value) == "pkg 4: the family 'mine' is taken by pkg 3; choose another name."


@pytest.mark.parametrize("name", ["gpt2", "never_registered"])
def test_what_was_not_registered_cannot_be_unregistered(registry: Registry[Family], name: str) -> None:
    for _ in range(2):
        with pytest.raises(DiffusionError) as error:
            registry.unregister(name)
        assert str(error.value) == f"The family {name!r} was not registered, so it cannot be unregistered."
        registry.get("gpt2")


def install(folder: Path, name: str, entry_points: str, module: str) -> None:
    """The metadata and module that pip would leave behind."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (folder / f"{name}.py").write_text(module)


def test_two_packages_with_one_name_keep_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    registry = Registry("mlx_dllm.tests", "family", Family, {"gpt2": "mlx_dllm_plugin.families.gpt2:FAMILY"})
    module = (
        "from dataclasses import replace\n"
        "from mlx_dllm_plugin.families.gpt2 import FAMILY as OURS\n"
        "FAMILY = replace(OURS, name='twin')\n"
    )
    for name in ("registry_twin_one", "registry_twin_two"):
        install(tmp_path, name, f"[mlx_dllm.tests]\ntwin = {name}:FAMILY\n", module)
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.names() == ["gpt2", "twin"]
    assert registry.names() == ["gpt2", "twin"]
    (line,) = capfd.readouterr().err.splitlines()
    assert list(registry.faults()) == ["twin"] and registry.faults()["twin"] in line
    owner = registry.package("twin")
    assert f"the family 'twin' is taken by {owner}; choose another name." in line
    registry.unregister("twin")
    with pytest.raises(DiffusionError, match="^The family 'twin' is left out"):
        registry.get("twin")
    registry.register(some_family("twin"))
    assert registry.package("twin") == "registered by hand"


def test_the_entry_points_of_this_package_are_what_the_code_has() -> None:
    """Ours are declared in the metadata too, for others to see; the code needs no scan to find them."""
    import tomllib

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for known, group in ((FAMILIES, "mlx_dllm.families"), (RULES, "mlx_dllm.unmasking")):
        assert known.group == group
        assert points[group] == known._builtin
        for name in known._builtin:
            entry: Any = known.get(name)
            assert isinstance(entry, (Family, Rule)) and entry.name == name


def test_an_entry_point_that_ends_python_is_its_own_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "stranger_exits-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger-exits\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tests.exits]\nleaves = stranger_exits:FAMILY\n")
    (tmp_path / "stranger_exits.py").write_text("raise SystemExit('bye')\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[Family] = Registry("tests.exits", "family", Family, {})
    assert registry.names() == []
    fault = "The family 'leaves' is left out. stranger-exits 1: stranger_exits:FAMILY cannot be loaded"
    assert registry.faults() == {"leaves": f"{fault} (SystemExit: bye)."} and fault in capsys.readouterr().err


def test_without_importlib_metadata_the_scan_is_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "importlib_metadata", None)
    registry: Registry[Family] = Registry("mlx_dllm.families", "family", Family, {})
    assert "sdar" in registry.names()
