"""Records of upstream versions, the four verdicts, what is said when a host is imported, and the two commands."""

import ast
import dataclasses
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
from types import SimpleNamespace

import pytest

import mlx_dllm_plugin
from mlx_dllm_plugin import compat, patches
from mlx_dllm_plugin.compat import Installed, Judgement
from mlx_dllm_plugin.compat import __main__ as command
from mlx_dllm_plugin.families import FAMILIES
from tests.tools import make_ar_model

ROOT = Path(__file__).parent.parent
LEANS = {host: patches.leaned_on(host) for host in ("mlx_lm", "mlx_vlm")}
LEANED = [(target, lean.symbol) for leans in LEANS.values() for target, wanted in leans.items() for lean in wanted]
NEW = {"mlx_vlm.train", "mlx_vlm.trainer.api"}  # that the first tested release does not have


def upstream(host: str) -> Installed:
    found = compat.installed(host)
    if found is None:
        pytest.skip(f"{host} is not installed")
    return found


def files_of(host: str) -> Path:
    return Path(importlib.util.find_spec(host).origin).parents[1]  # type: ignore[union-attr, arg-type]


def file_of(target: str) -> str:
    return target.replace(".", "/") + ".py"


# --- records ----------------------------------------------------------------------------------------------------------


def test_tested_range_is_what_pyproject_says():
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    stated = re.search(r"# Tested with (mlx-lm) (\S+) to (\S+) and (mlx-vlm) (\S+) to (\S+) ", text)
    assert stated is not None
    assert compat.TESTED == {stated[1]: (stated[2], stated[3]), stated[4]: (stated[5], stated[6])}
    assert f"mlx-lm>={compat.TESTED['mlx-lm'][0]}" in project["dependencies"]
    for extra in ("vlm", "test"):
        assert f"mlx-vlm>={compat.TESTED['mlx-vlm'][0]}" in project["optional-dependencies"][extra]


@pytest.mark.parametrize("package", compat.TESTED)
def test_the_records_span_the_tested_range_and_hold_all_that_is_leaned_on(package):
    versions = compat.releases(package)
    assert (versions[0], versions[-1]) == compat.TESTED[package]
    leans = LEANS[package.replace("-", "_")]
    symbols = {file_of(target): {lean.symbol for lean in wanted} for target, wanted in leans.items()}
    for version in versions:
        record = compat.record_of(package, version)
        assert record is not None
        missing = set(symbols) - set(record)
        assert missing == {file_of(target) for target in NEW} & set(symbols) & missing
        for name, entry in record.items():
            assert re.fullmatch("[0-9a-f]{64}", entry["sha256"])
            assert set(entry["symbols"]) == symbols[name], (version, name)
            assert all(re.fullmatch("[0-9a-f]{16}", hashed) for hashed, _ in entry["symbols"].values())
    assert set(record) == set(symbols)


@pytest.mark.parametrize("host", LEANS)
def test_the_record_is_that_of_the_installed_release(host):
    found = upstream(host)
    if found.version not in compat.releases(found.package):
        pytest.skip(f"{found.package} {found.version} is not recorded")
    written = json.loads((Path(compat.__file__).parent / f"upstream/{found.package}-{found.version}.json").read_text())
    assert compat.make_record(found, LEANS[host]) == written
    assert {judgement.verdict for judgement in compat.judge(found, LEANS[host])} == {"known"}


def _used() -> set[tuple[str, str]]:
    """(upstream module, name) that the package imports, or takes from a module it imported."""
    used = set()
    for file in [*ROOT.glob("mlx_dllm_plugin/**/*.py"), *ROOT.glob("patches/**/*.py")]:
        tree = ast.parse(file.read_text())
        modules = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("mlx_"):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    if importlib.util.find_spec(full) if node.module in LEANS else False:
                        modules[alias.asname or alias.name] = full
                    elif node.module.partition(".")[0] in LEANS:
                        used.add((node.module, alias.name))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                used.add((modules[node.value.id], node.attr))
            # `_module()` is the module that a patch file patches
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "_module()":
                used.add((".".join(file.relative_to(ROOT / "patches").with_suffix("").parts), node.attr))
    return {(module, name) for module, name in used if name != "items"}


def test_everything_that_is_used_is_leaned_on():
    upstream("mlx_vlm")
    used = _used()
    assert {("mlx_lm.models.base", "create_attention_mask"), ("mlx_lm.utils", "load_model")} < used
    assert ("mlx_vlm.models.base", "LanguageModelOutput") in used
    assert used <= set(LEANED)


def test_the_models_of_all_families_are_leaned_on():
    stock = set()
    for family in FAMILIES.builtin():
        configs = [{"model_type": kind} for kind in family.model_types]
        for config in configs:
            try:
                stock.add(family.architecture(config) if family.architecture else f"mlx_lm.models.{family.name}")
            except Exception:  # needs more of the config: then the module is ours
                continue
    theirs = {name.replace("mistral", "llama") for name in stock if name.startswith("mlx_lm.")}
    assert {"mlx_lm.models.gpt2", "mlx_lm.models.qwen3_moe"} < theirs
    assert {(name, "*") for name in theirs} <= set(LEANED)


# --- the four verdicts ------------------------------------------------------------------------------------------------


def edited(found: Installed, edits: dict[str, tuple[str, str] | None], version: str = "99.0") -> list[Judgement]:
    """The judgements of a host where texts of files are replaced, or files are gone (None), that are not "known"."""

    def read(name: str) -> bytes | None:
        data = found.read(name)
        if name not in edits or data is None:
            return data
        edit = edits[name]
        if edit is None:
            return None
        old, new = (part.encode() for part in edit)
        assert old in data, (name, old)
        return data.replace(old, new)

    host = dataclasses.replace(found, version=version, read=read)
    judged = compat.judge(host, LEANS[host.package.replace("-", "_")])
    return [judgement for judgement in judged if judgement.verdict != "known"]


def verdicts(judgements: list[Judgement]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for judgement in judgements:
        found.setdefault(judgement.verdict, set()).add(judgement.symbol)
    return found


def test_an_unknown_version_with_known_files_is_known():
    assert edited(upstream("mlx_lm"), {}) == []


def test_another_comment_is_the_same():
    found = edited(upstream("mlx_lm"), {"mlx_lm/generate.py": ("import argparse\n", "import argparse  # new\n")})
    assert set(verdicts(found)) == {"same"} and {judgement.target for judgement in found} == {"mlx_lm.generate"}
    assert verdicts(found)["same"] == {lean.symbol for lean in LEANS["mlx_lm"]["mlx_lm.generate"]}


def test_another_body_is_changed():
    old = "class GenerationResponse:\n"
    found = edited(upstream("mlx_lm"), {"mlx_lm/generate.py": (old, old + "    extra = 1\n")})
    assert verdicts(found)["changed"] == {"GenerationResponse"} and set(verdicts(found)) == {"same", "changed"}


def test_a_model_whose_layers_changed_is_changed():
    found = edited(upstream("mlx_lm"), {"mlx_lm/models/gpt2.py": ("nn.gelu_approx", "nn.gelu")})
    assert [(j.target, j.symbol, j.verdict) for j in found] == [
        ("mlx_lm.models.gpt2", "Model", "same"),
        ("mlx_lm.models.gpt2", "*", "changed"),
    ]


def test_a_parameter_that_is_gone_is_incompatible():
    edit = ("    draft_model: Optional[nn.Module] = None,\n", "    drafts: Optional[nn.Module] = None,\n")
    found = edited(upstream("mlx_lm"), {"mlx_lm/generate.py": edit})
    (wrong,) = [judgement for judgement in found if judgement.verdict == "incompatible"]
    assert wrong.symbol == "stream_generate" and "no parameter 'draft_model' where expected (model" in wrong.detail
    assert wrong.lost == "diffusion checkpoints cannot be decoded"


def test_a_parameter_that_is_new_and_needed():
    """Of a function that is called here that does not fit; of one that is redirected its callers give it."""
    edit = ("def swiglu(gate, x)", "def swiglu(gate, x, new)")
    found = edited(upstream("mlx_lm"), {"mlx_lm/models/activations.py": edit})
    assert [(j.symbol, j.verdict, j.detail) for j in found] == [
        ("swiglu", "incompatible", "swiglu needs another argument, 'new'")
    ]
    edit = ("def load_tokenizer(model_path", "def load_tokenizer(new, model_path")
    assert verdicts(edited(upstream("mlx_lm"), {"mlx_lm/utils.py": edit}))["changed"] == {"load_tokenizer"}


@pytest.mark.parametrize(("target", "symbol"), [(t, s) for t, s in LEANED if s != "*"])
def test_every_symbol_that_is_gone_is_incompatible_and_no_other(target, symbol):
    host = target.partition(".")[0]
    found = upstream(host)
    name = symbol.rpartition(".")[2]
    data = (found.read(file_of(target)) or b"").decode()
    if not data:
        pytest.skip(f"{found.package} {found.version} has no {target}")
    text = re.sub(rf"\b{name}\b", f"{name}_moved", data)
    assert text != data
    judged = edited(found, {file_of(target): (data, text)})
    gone = {j.symbol for j in judged if j.detail == f"there is no {j.symbol}"}
    same_name = {lean.symbol for lean in LEANS[host][target] if name in lean.symbol.split(".")}
    assert symbol in gone and gone <= same_name
    assert all(j.lost for j in judged if j.verdict == "incompatible")
    assert {j.target for j in judged} == {target}


@pytest.mark.parametrize("target", [*LEANS["mlx_lm"], *LEANS["mlx_vlm"]])
def test_every_file_that_is_gone_is_incompatible(target):
    found = upstream(target.partition(".")[0])
    if found.read(file_of(target)) is None:
        pytest.skip(f"{found.package} {found.version} has no {target}")
    (gone,) = edited(found, {file_of(target): None})
    assert (gone.target, gone.symbol, gone.verdict) == (target, "", "incompatible")
    assert gone.detail == f"there is no {target}" and gone.lost


def test_a_file_that_older_releases_do_not_have_is_not_missed():
    found = upstream("mlx_vlm")
    assert edited(found, {file_of(target): None for target in NEW}, version="0.7.1") == []
    assert len(edited(found, {file_of(target): None for target in NEW}, version="0.7.10")) == 2
    assert edited(found, {file_of(target): None for target in NEW}, version="0.6") == []
    assert edited(found, {file_of(target): None for target in NEW}, version="0.7.6.post1") == []
    assert len(edited(found, {file_of(target): None for target in NEW}, version="0.7.8")) == 2
    assert len(edited(found, {file_of(target): None for target in NEW}, version="not a version")) == 2


def test_a_module_that_became_a_package_is_judged_by_its_init():
    found = upstream("mlx_lm")

    def read(name: str) -> bytes | None:
        if name == "mlx_lm/generate/__init__.py":
            return (found.read("mlx_lm/generate.py") or b"") + b"\n# moved\n"
        return None if name == "mlx_lm/generate.py" else found.read(name)

    judged = compat.judge(dataclasses.replace(found, read=read), LEANS["mlx_lm"])
    moved = {j.verdict for j in judged if j.target == "mlx_lm.generate"}
    assert moved == {"same"} and {j.verdict for j in judged} == {"known", "same"}


def test_a_function_that_is_imported_from_elsewhere_is_changed():
    found = upstream("mlx_lm")
    text = (found.read("mlx_lm/sample_utils.py") or b"").decode()
    start = text.index("def make_sampler(")
    end = text.index("\ndef ", start)
    edit = (text[start:end], "from .elsewhere import make_sampler\n")
    assert verdicts(edited(found, {"mlx_lm/sample_utils.py": edit}))["changed"] == {"make_sampler"}


def test_a_file_that_cannot_be_read_is_incompatible():
    (judged,) = edited(upstream("mlx_lm"), {"mlx_lm/cli.py": ("def main", "def def main")})
    assert judged.verdict == "incompatible" and judged.detail.startswith("mlx_lm/cli.py cannot be read (invalid syntax")


# --- edited copies, imported ------------------------------------------------------------------------------------------

MODEL = str(mlx_dllm_plugin.demo_path())
SHOW = f"""
import sys, mlx_lm
model, tokenizer = mlx_lm.load({MODEL!r})
prompt = tokenizer.apply_chat_template([{{"role": "user", "content": "What is 47 + 38?"}}], add_generation_prompt=True)
print("|", mlx_lm.generate(model, tokenizer, prompt, unmasking="threshold"))
from mlx_dllm_plugin import patches
print([[r.target, r.symbol, r.detail] for r in patches.status() if r.state == "disabled"])
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the installed mlx_lm that may be edited, for PYTHONPATH."""
    upstream("mlx_lm")
    ignored = shutil.ignore_patterns("__pycache__", "examples")
    shutil.copytree(files_of("mlx_lm") / "mlx_lm", tmp_path / "mlx_lm", ignore=ignored)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def run(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_DLLM", "PYTHON"))}
    clean.update(
        {"PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(path / "c"), "HOME": str(path / "home")}
    )
    return subprocess.run(
        [sys.executable, *arguments], env={**clean, **environment}, cwd=path, capture_output=True, text=True
    )


def remembered(path: Path) -> list[Path]:
    return sorted(
        [*path.glob("c/mlx-dllm-plugin/compat/*"), *path.glob("home/Library/Caches/mlx-dllm-plugin/**/*.json")]
    )


def test_known_files_say_nothing(copy):
    result = run(copy, "-W", "always::UserWarning", "-c", SHOW)
    assert (result.returncode, result.stdout) == (0, "| 47 + 38 = 85\n[]\n")
    assert "mlx-dllm-plugin" not in result.stderr and remembered(copy) == []


def test_the_same_symbols_say_nothing_and_are_remembered(copy):
    for name in ("generate", "utils", "models/llama"):
        with open(copy / f"mlx_lm/{name}.py", "a") as file:
            file.write("\n\n# a comment\n")
    before = {path: path.stat().st_mtime_ns for path in copy.glob("mlx_lm/**/*.py")}
    result = run(copy, "-W", "always::UserWarning", "-c", SHOW)
    assert (result.returncode, result.stdout) == (0, "| 47 + 38 = 85\n[]\n")
    assert "mlx-dllm-plugin" not in result.stderr
    (file,) = remembered(copy)
    assert {entry["verdict"] for entry in json.loads(file.read_text())} == {"known", "same"}
    assert {path: path.stat().st_mtime_ns for path in copy.glob("mlx_lm/**/*.py")} == before

    # What is remembered is used, for these files and no others.
    entries = json.loads(file.read_text())
    wrong = {"target": "mlx_lm.generate", "symbol": "stream_generate", "verdict": "incompatible"}
    entries = [{**entry, **wrong} if entry["symbol"] == "stream_generate" else entry for entry in entries]
    file.write_text(json.dumps(entries))
    assert run(copy, "-c", "import mlx_lm").stderr.count("stream_generate is off") == 1
    for broken in ("", "{", "[" * 200_000, "null", "{}"):
        file.write_text(broken)
        assert run(copy, "-c", "import mlx_lm").stderr == "", broken[:9]
        assert len(json.loads(file.read_text())) == len(entries)
    edit(copy / "mlx_lm/utils.py", "# a comment", "# another")
    assert run(copy, "-c", "import mlx_lm").stderr == ""
    assert len(remembered(copy)) == 2


def test_a_change_is_one_warning_that_names_all(copy):
    edit(copy / "mlx_lm/generate.py", "class GenerationResponse:\n", "class GenerationResponse:\n    extra = 1\n")
    edit(copy / "mlx_lm/server.py", "def main():\n", "def main():\n    print()\n")
    edit(copy / "mlx_lm/models/gpt2.py", "nn.gelu_approx", "nn.gelu")
    (copy / "mlx_lm/_version.py").write_text('__version__ = "0.99.1"\n')
    result = run(
        copy, "-W", "always::UserWarning", "-c", SHOW + "import mlx_lm.server, mlx_lm.chat, mlx_lm.models.gpt2"
    )
    assert (result.returncode, result.stdout) == (0, "| 47 + 38 = 85\n[]\n")
    first, last = compat.TESTED["mlx-lm"]
    assert result.stderr.count("UpstreamDriftWarning") == 1
    assert (
        f"UpstreamDriftWarning: mlx-lm 0.99.1 is not what mlx-dllm-plugin was written for ({first} to {last}). Changed "
        "are mlx_lm/generate.py: GenerationResponse; mlx_lm/server.py: main; mlx_lm/models/gpt2.py. The patches apply, "
        f"since signatures fit; check results, or install mlx-lm=={last}."
    ) in result.stderr
    again = run(copy, "-W", "always::UserWarning", "-c", "import mlx_lm")
    assert again.stderr.count("UpstreamDriftWarning: mlx-lm 0.99.1") == 1  # remembered, not silenced


def test_a_warning_can_be_filtered_and_made_an_error(copy):
    edit(copy / "mlx_lm/generate.py", "class GenerationResponse:\n", "class GenerationResponse:\n    extra = 1\n")
    ignore = "import warnings, mlx_dllm_plugin as p; warnings.simplefilter('ignore', p.UpstreamDriftWarning)\n"
    result = run(copy, "-c", ignore + SHOW)
    assert (result.returncode, result.stdout, result.stderr) == (0, "| 47 + 38 = 85\n[]\n", "")
    error = ignore.replace("'ignore'", "'error'")
    result = run(copy, "-c", error + SHOW)
    assert (result.returncode, result.stdout) == (0, "| 47 + 38 = 85\n[]\n")  # a host never fails because of us
    assert result.stderr.startswith("[mlx-dllm-plugin] mlx-lm ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("way", ["closed", "raises"])
def test_a_warning_that_cannot_be_shown_does_not_matter(copy, way):
    edit(copy / "mlx_lm/generate.py", "class GenerationResponse:\n", "class GenerationResponse:\n    extra = 1\n")
    edit(copy / "mlx_lm/perplexity.py", "def eval_ppl(", "def perplexity(")
    code = {
        "closed": "import sys; sys.stderr.close()",
        "raises": "import warnings\ndef show(*a, **k): raise RuntimeError('x')\nwarnings.showwarning = show",
    }[way]
    result = run(copy, "-c", f"{code}\nimport mlx_lm, mlx_lm.perplexity; print('works')")
    assert (result.returncode, result.stdout) == (0, "works\n")


def test_a_line_is_said_once(copy):
    edit(copy / "mlx_lm/perplexity.py", "def eval_ppl(", "def perplexity(")
    code = "import mlx_dllm_plugin as p, mlx_lm.perplexity\nfor _ in range(3): p.deactivate(); p.activate()"
    assert run(copy, "-c", code).stderr.count("eval_ppl is off") == 1


def test_what_moved_and_is_imported_back_is_still_patched(copy):
    for name, private in (("utils", ["_download", "_get_classes"]), ("generate", [])):
        (copy / f"mlx_lm/{name}.py").rename(copy / f"mlx_lm/_{name}.py")
        lines = [f"from ._{name} import {what}\n" for what in ("*", *private)]
        (copy / f"mlx_lm/{name}.py").write_text("".join(lines))
    code = f"{SHOW}\nimport sys\ntry: sys.modules['mlx_lm.generate'].BatchGenerator(model)\n"
    result = run(copy, "-W", "ignore", "-c", code + "except ValueError as error: print(error)")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == ["| 47 + 38 = 85", "[]"]
    assert lines[2].startswith("mlx_lm.generate.BatchGenerator does not work with diffusion checkpoints")


def test_a_call_for_another_model_is_passed_on_as_it_came(tmp_path):
    from mlx_dllm_plugin.patches.mlx_lm import utils

    def load_model(*, model_path, lazy=False):
        return model_path, lazy

    def load_tokenizer(*, model_path, tokenizer_config_extra=None):
        return model_path, tokenizer_config_extra

    ar = make_ar_model(tmp_path / "ar", ROOT / "tests/data/a2d/gpt2-grow/run/model")
    assert utils.load_model(load_model, model_path=str(ar), lazy=True) == (ar, True)
    assert utils.load_tokenizer(load_tokenizer, model_path=str(ar)) == (ar, None)
    assert utils.load_tokenizer(load_tokenizer, model_path=ar, tokenizer_config_extra={"a": 1}) == (ar, {"a": 1})


def test_other_models_do_not_mind_what_a_host_calls_its_attributes():
    from mlx_dllm_plugin.patches.mlx_lm import evaluate, server

    nothing = SimpleNamespace(model=None)
    assert server.load(lambda self: None, SimpleNamespace()) is None
    assert evaluate.refused(lambda self: "scores", SimpleNamespace()) == "scores"
    upstream("mlx_vlm")
    pytest.importorskip("fastapi")
    from mlx_dllm_plugin.patches.mlx_vlm.server import generation

    assert generation.generate(lambda self, prompt: prompt, nothing, "text") == "text"
    assert generation.generate(lambda self, prompt: prompt, SimpleNamespace(), "text") == "text"
    assert generation.initialize_model(lambda self: "model", SimpleNamespace()) == "model"


def test_a_refused_model_does_not_stay_in_the_server():
    """Else the next request that names it finds it loaded."""
    from mlx_dllm_plugin.patches.mlx_lm import server

    def load(provider: SimpleNamespace) -> None:
        provider.model_key, provider.model = "key", SimpleNamespace(diffusion_spec=1)

    provider = SimpleNamespace(draft_model=None)
    with pytest.raises(ValueError, match="mlx_lm.server does not work with diffusion checkpoints"):
        server.load(load, provider)
    assert vars(provider) == dict.fromkeys(("model_key", "model", "tokenizer", "draft_model"))


def test_a_value_of_another_type_is_not_replaced():
    module = type(sys)("toyhost.toy")
    module.recipes = {"a": 1}
    with pytest.raises(patches.PatchError, match="recipes is not a list but dict"):
        patches.Replace("recipes", list, kind=list).prepare(module)


def test_an_incompatible_symbol_turns_its_patch_off_alone(copy):
    edit(copy / "mlx_lm/sample_utils.py", "def make_sampler(\n    temp: float", "def make_sampler(\n    heat: float")
    result = run(copy, "-c", SHOW)
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "| 47 + 38 = 85")
    ((target, symbol, detail),) = ast.literal_eval(result.stdout.splitlines()[1])
    assert (target, symbol) == ("mlx_lm.sample_utils", "make_sampler")
    assert detail.startswith("make_sampler has no parameter 'temp' where expected (heat, ")
    lines = [line for line in result.stderr.splitlines() if line.startswith("[mlx-dllm-plugin]")]
    version = importlib.metadata.version("mlx-lm")
    assert lines == [
        f"[mlx-dllm-plugin] mlx-lm {version}: the patch of mlx_lm.sample_utils.make_sampler is off, {detail}. Without "
        "it: greedy decoding may rank positions by another confidence."
    ]


def test_what_would_decode_wrong_is_refused(copy):
    """Without stream_generate the host would decode autoregressively: loading says so, and other models work."""
    edit(copy / "mlx_lm/generate.py", "    draft_model: Optional[nn.Module] = None,\n", "    drafts=None,\n")
    result = run(copy, "-c", SHOW)
    assert result.returncode == 1 and result.stdout == ""
    assert "mlx_lm.generate.stream_generate is off, stream_generate has no parameter 'draft_model'" in result.stderr
    assert result.stderr.splitlines()[-1].startswith(
        "mlx_dllm_plugin.errors.DiffusionError: This mlx-lm has another mlx_lm.generate.stream_generate than the "
    )


OTHER = """

before_{name} = {name}
def {name}(*args, **kwargs): return before_{name}(*args, **kwargs)
"""


def test_a_checkpoint_that_nothing_noticed_is_refused_when_it_is_decoded(copy, tmp_path):
    with open(copy / "mlx_lm/utils.py", "a") as file:
        file.write(OTHER.format(name="load_model") + OTHER.format(name="load_tokenizer"))
    result = run(copy, "-c", SHOW)
    assert result.returncode == 1 and result.stdout == ""
    for name in ("load_model", "load_tokenizer"):
        assert f"the patch of mlx_lm.utils.{name} is off, {name} has no parameter 'model_path'" in result.stderr
    assert result.stderr.splitlines()[-1].startswith(
        "mlx_dllm_plugin.errors.DiffusionError: This mlx-lm has another mlx_lm.utils.load_model than the plugin knows"
    )
    ar = make_ar_model(tmp_path / "ar", ROOT / "tests/data/a2d/gpt2-grow/run/model")
    code = "import mlx_lm; print(len(mlx_lm.generate(*mlx_lm.load({!r}), 'The cat', max_tokens=8)) > 0)"
    assert run(copy, "-c", code.format(str(ar))).stdout == "True\n"


def test_a_missing_symbol_and_a_missing_file(copy):
    edit(copy / "mlx_lm/perplexity.py", "def eval_ppl(", "def eval_perplexity(")
    (copy / "mlx_lm/lora.py").unlink()
    (copy / "mlx_lm/models/gemma2.py").unlink()
    result = run(copy, "-c", SHOW + "import mlx_lm.perplexity")
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "| 47 + 38 = 85")
    lines = [line for line in result.stderr.splitlines() if line.startswith("[mlx-dllm-plugin]")]
    version = importlib.metadata.version("mlx-lm")
    assert lines == [
        f"[mlx-dllm-plugin] mlx-lm {version}: the patch of mlx_lm.lora is off, there is no mlx_lm.lora. Without it: a "
        "diffusion checkpoint is refused with a traceback.",
        f"[mlx-dllm-plugin] mlx-lm {version}: mlx_lm.models.gemma2 is not as known, there is no mlx_lm.models.gemma2. "
        "Without it: diffusion checkpoints with this model cannot be decoded.",
        f"[mlx-dllm-plugin] mlx-lm {version}: the patch of mlx_lm.perplexity.eval_ppl is off, there is no eval_ppl. "
        f"Without it: {patches.patch_of('mlx_lm.perplexity').reason.rstrip('.')}.",
    ]


def test_the_readme_shows_what_is_said(copy):
    edit(copy / "mlx_lm/generate.py", "class GenerationResponse:\n", "class GenerationResponse:\n    extra = 1\n")
    edit(copy / "mlx_lm/perplexity.py", "def eval_ppl(", "def perplexity(")
    (copy / "mlx_lm/_version.py").write_text('__version__ = "0.33.0"\n')
    result = run(copy, "-c", "import mlx_lm, mlx_lm.perplexity")
    said = [line[line.index("UpstreamDrift") :] for line in result.stderr.splitlines() if "UpstreamDrift" in line]
    said += [line for line in result.stderr.splitlines() if line.startswith("[mlx-dllm-plugin]")]
    assert len(said) == 2 and "\n".join(said) in (ROOT / "README.md").read_text()


def test_a_module_that_is_gone_does_not_pass_for_patched(copy):
    (copy / "mlx_lm/chat.py").unlink()
    code = "import mlx_lm; from mlx_dllm_plugin import patches; print(patches.is_applied('mlx_lm.chat', 'main'))"
    assert run(copy, "-c", code).stdout == "False\n"


def test_a_host_without_source_is_not_judged(copy):
    """As in frozen applications: there is nothing to compare, and nothing is taken for gone."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-b", "mlx_lm"], cwd=copy, check=True)
    (copy / "mlx_lm/perplexity.py").unlink()  # one, in a version that is recorded and in one that is not
    for version in (importlib.metadata.version("mlx-lm"), "0.99"):
        (copy / "mlx_lm/_version.py").write_text(f'__version__ = "{version}"\n')
        result = run(copy, "-W", "error", "-c", SHOW + "import mlx_lm.perplexity")
        assert (result.returncode, result.stdout) == (0, "| 47 + 38 = 85\n[]\n")
        assert "mlx-dllm-plugin" not in result.stderr
    for file in copy.glob("mlx_lm/**/*.py"):  # all
        file.unlink()
    result = run(copy, "-c", SHOW)
    assert (result.returncode, result.stdout) == (0, "| 47 + 38 = 85\n[]\n")
    assert "mlx-dllm-plugin" not in result.stderr


def test_a_home_that_cannot_be_written_to_changes_nothing(copy):
    edit(copy / "mlx_lm/generate.py", "class GenerationResponse:\n", "class GenerationResponse:\n    extra = 1\n")
    (copy / "c").write_text("a file where a directory is wanted")
    (copy / "home").write_text("the same")
    result = run(copy, "-c", SHOW)
    assert (result.returncode, result.stdout) == (0, "| 47 + 38 = 85\n[]\n")
    assert result.stderr.count("UpstreamDriftWarning") == 1 and "could not" not in result.stderr


def test_the_other_host(tmp_path):
    upstream("mlx_vlm")
    ignored = shutil.ignore_patterns("__pycache__", "tests")
    shutil.copytree(files_of("mlx_vlm") / "mlx_vlm", tmp_path / "mlx_vlm", ignore=ignored)
    edit(tmp_path / "mlx_vlm/models/llada2_moe/language.py", "class LanguageModel", "x = 1\nclass LanguageModel")
    edit(tmp_path / "mlx_vlm/utils.py", "def get_model_and_args(config", "def get_model_and_args(settings")
    code = "import mlx_vlm; from mlx_dllm_plugin import patches\n"
    code += "print([[r.target, r.symbol] for r in patches.status() if r.state == 'disabled'])"
    result = run(tmp_path, "-W", "always::UserWarning", "-c", code)
    assert (result.returncode, result.stdout) == (0, "[['mlx_vlm.utils', 'get_model_and_args']]\n")
    assert result.stderr.count("UpstreamDriftWarning: mlx-vlm ") == 1
    assert "Changed are mlx_vlm/models/llada2_moe/language.py. The" in result.stderr
    assert result.stderr.count("the patch of mlx_vlm.utils.get_model_and_args is off, get_model_and_args has no") == 1


def test_what_mlx_vlm_would_decode_wrong_is_refused_when_it_is_decoded(tmp_path, goldens):
    upstream("mlx_vlm")
    shutil.copytree(files_of("mlx_vlm") / "mlx_vlm", tmp_path / "mlx_vlm", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "mlx_vlm/utils.py", "a") as file:
        file.write(OTHER.format(name="load_model") + OTHER.format(name="get_model_and_args"))
    model = str(goldens / "block" / "llada2_moe-v22")
    code = f"import mlx_vlm; print(mlx_vlm.generate(*mlx_vlm.load({model!r}), 'hello', max_tokens=8))"
    result = run(tmp_path, "-c", code)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(
        "mlx_dllm_plugin.errors.DiffusionError: This mlx-vlm has another mlx_vlm.utils.load_model than the plugin knows"
    )


WELL = {"target": "mlx_lm.utils", "symbol": "load", "verdict": "changed"}


@pytest.mark.parametrize(
    "content",
    [
        *([], {}, "", None, 1, [1], [[]], [{}], ["x"]),
        *([{**WELL, key: value}] for key in WELL for value in (5, ["x"], None, "other")),
        [{**WELL, "detail": 1}],
        [{**WELL, "more": ""}],
        [{"target": "mlx_lm.utils"}],
        [WELL, {**WELL, "verdict": 5}],
    ],
)
def test_what_was_not_written_here_is_not_remembered(tmp_path, content):
    (tmp_path / "x.json").write_text(json.dumps(content))
    assert compat._remembered(tmp_path / "x.json", LEANS["mlx_lm"]) is None


def test_what_is_no_file_or_too_large_is_not_remembered(tmp_path):
    assert compat._remembered(None, LEANS["mlx_lm"]) is None
    assert compat._remembered(tmp_path, LEANS["mlx_lm"]) is None
    os.mkfifo(tmp_path / "fifo")
    assert compat._remembered(tmp_path / "fifo", LEANS["mlx_lm"]) is None
    (tmp_path / "x.json").write_text(json.dumps([WELL]))
    assert compat._remembered(tmp_path / "x.json", LEANS["mlx_lm"]) == [Judgement(**WELL)]
    (tmp_path / "x.json").write_text(" " * (1 << 20) + json.dumps([WELL]))
    assert compat._remembered(tmp_path / "x.json", LEANS["mlx_lm"]) is None


@pytest.mark.parametrize("what", ["leans", "python", "plugin", "records", "files", "version"])
def test_what_a_verdict_depends_on_is_in_its_key(tmp_path, monkeypatch, what):
    found, leans = upstream("mlx_lm"), LEANS["mlx_lm"]
    monkeypatch.setattr(compat, "_cache_directory", lambda: tmp_path)
    compat.judge_once(found, leans)
    compat.judge_once(found, leans)
    assert len(list(tmp_path.iterdir())) == 1
    if what == "leans":
        leans = {**leans, "mlx_lm.cli": (compat.Lean("main", ("x",)),)}
    elif what == "python":
        monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    elif what == "plugin":
        monkeypatch.setattr(compat.fingerprint, "__file__", __file__)
    elif what == "records":
        monkeypatch.setattr(compat, "releases", lambda package: ["0.31.3"])
    elif what == "files":
        read = found.read
        found = dataclasses.replace(found, read=lambda name: read(name) and (read(name) or b"") + b"\n")
    else:
        found = dataclasses.replace(found, version="1.0")
    compat.judge_once(found, leans)
    assert len(list(tmp_path.iterdir())) == 2


def test_without_a_home_nothing_is_remembered(monkeypatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert compat._cache_directory() is None
    assert {j.verdict for j in compat.judge_once(upstream("mlx_lm"), LEANS["mlx_lm"])} <= set(compat.VERDICTS)


def test_nothing_half_written_stays(tmp_path):
    (tmp_path / "x.json").mkdir()
    compat._remember(tmp_path / "x.json", "[]")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_old_judgements_are_thrown_away(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "_cache_directory", lambda: tmp_path)
    for i in range(compat._REMEMBERED + 5):
        compat._remember(tmp_path / f"{i}.json", "[]")
        os.utime(tmp_path / f"{i}.json", (i, i))
    assert len(list(tmp_path.iterdir())) == compat._REMEMBERED
    assert not (tmp_path / "3.json").exists() and (tmp_path / f"{compat._REMEMBERED + 4}.json").exists()


def test_where_judgements_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert compat._cache_directory() == tmp_path / "Library/Caches/mlx-dllm-plugin/compat"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert compat._cache_directory() == tmp_path / ".cache/mlx-dllm-plugin/compat"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert compat._cache_directory() == tmp_path / ".cache/mlx-dllm-plugin/compat"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert compat._cache_directory() == tmp_path / "x/mlx-dllm-plugin/compat"


def test_known_files_cost_under_5_ms():
    modules = []
    for target in [target for leans in LEANS.values() for target in leans]:
        host = target.partition(".")[0]
        if importlib.util.find_spec(host) is None:
            continue
        module = type(sys)(target)
        module.__file__ = str(files_of(host) / file_of(target))
        module.__loader__ = compat.__loader__
        if Path(module.__file__).is_file() and compat.version_of(host) in compat.releases(compat.distribution(target)):
            modules.append(module)
    if not modules:
        pytest.skip("no recorded release is installed")
    best = float("inf")
    for _ in range(20):
        compat.record_of.cache_clear()
        start = time.perf_counter()
        for module in modules:
            assert compat.check(module, lambda: pytest.fail("not the fast way")) == []
        assert compat.gone(modules[0], lambda: pytest.fail("not the fast way")) == []
        best = min(best, time.perf_counter() - start)
    assert best < 5e-3


def test_a_broken_record_never_breaks_the_host(tmp_path):
    """In a copy of the plugin, whose records are not JSON."""
    plugin = Path(mlx_dllm_plugin.__file__).parent
    shutil.copytree(plugin, tmp_path / "mlx_dllm_plugin", ignore=shutil.ignore_patterns("__pycache__", "run"))
    for package in (patches, compat):
        folder = tmp_path / "mlx_dllm_plugin" / package.__name__.rpartition(".")[2]
        shutil.copytree(Path(package.__file__).parent, folder, dirs_exist_ok=True)
    for file in (tmp_path / "mlx_dllm_plugin/compat/upstream").iterdir():
        file.write_text("{broken")
    result = run(tmp_path, "-c", "import mlx_dllm_plugin, mlx_lm.utils, mlx_lm.generate; print('works')")
    assert (result.returncode, result.stdout) == (0, "works\n")
    assert result.stderr.startswith("[mlx-dllm-plugin] mlx-lm ") and result.stderr.count("\n") == 1
    assert "could not be compared with known versions: JSONDecodeError" in result.stderr


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def wheels(tmp_path: Path) -> dict[str, Path]:
    """Wheels of a made-up release, with the installed files as they are, changed and incompatible."""
    found = upstream("mlx_lm")
    contents = {file_of(target): found.read(file_of(target)) or b"" for target in LEANS["mlx_lm"]}
    edits = {
        "0.98": [],
        "0.98.1": [
            ("mlx_lm/generate.py", b"class GenerationResponse:\n", b"class GenerationResponse:\n    extra = 1\n")
        ],
        "0.98.2": [("mlx_lm/utils.py", b"def load_model(\n    model_path", b"def load_model(\n    where")],
    }
    made = {}
    for version, changes in edits.items():
        made[version] = tmp_path / f"mlx_lm-{version}-py3-none-any.whl"
        with zipfile.ZipFile(made[version], "w") as wheel:
            for name, data in contents.items():
                for file, old, new in changes:
                    assert file != name or old in data
                    data = data.replace(old, new) if file == name else data
                wheel.writestr(name, data)
    return made


def test_check_the_installation(capsys):
    upstream("mlx_vlm")
    status = command.main(["check"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0 and lines[0].startswith("mlx-lm ") and any(line.startswith("mlx-vlm ") for line in lines)
    assert command.main(["check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [host["package"] for host in found] == ["mlx-lm", "mlx-vlm"]
    assert {(j["target"], j["symbol"]) for host in found for j in host["judgements"]} >= {
        ("mlx_lm.utils", "load_model")
    }


def test_check_wheels(wheels, capsys):
    count = sum(map(len, LEANS["mlx_lm"].values()))
    first, last = compat.TESTED["mlx-lm"]
    assert command.main(["check", str(wheels["0.98"])]) == 0
    assert capsys.readouterr().out == f"mlx-lm 0.98 (written for {first} to {last}): {count} known\n"
    assert command.main(["check", str(wheels["0.98.1"])]) == 0
    lines = capsys.readouterr().out.splitlines()
    here = len(LEANS["mlx_lm"]["mlx_lm.generate"])
    assert lines[0].endswith(f": {count - here} known, {here - 1} same, 1 changed")
    assert lines[1:] == ["  changed       mlx_lm.generate.GenerationResponse"]
    assert command.main(["check", str(wheels["0.98.2"]), str(wheels["0.98"])]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(
        "  incompatible  mlx_lm.utils.load_model: load_model has no parameter 'model_path' where "
    )
    assert lines[1].endswith(". Without it: a2d run directories and diffusion checkpoints are not recognised")
    assert len(lines) == 3


def test_record_writes_a_version_and_says_what_differs(wheels, tmp_path, capsys):
    output = tmp_path / "records"
    last = compat.releases("mlx-lm")[-1]
    assert command.main(["record", "--output", str(output), str(wheels["0.98.1"]), str(wheels["0.98.2"])]) == 0
    lines = capsys.readouterr().out.splitlines()
    files, symbols = len(LEANS["mlx_lm"]), sum(map(len, LEANS["mlx_lm"].values()))
    assert lines[0] == f"mlx-lm 0.98.1: mlx-lm-0.98.1.json written, {files} files, {symbols} symbols."
    assert lines[1] == f"Against {last}:"
    assert any(line.startswith("  mlx_lm/generate.py: GenerationResponse changed") for line in lines)
    assert any("load_model changed from def (model_path, " in line and " to def (where, " in line for line in lines)
    assert sorted(path.name for path in output.iterdir()) == ["mlx-lm-0.98.1.json", "mlx-lm-0.98.2.json"]
    written = json.loads((output / "mlx-lm-0.98.1.json").read_text())
    assert (written["package"], written["version"], len(written["files"])) == ("mlx-lm", "0.98.1", files)
    data = zipfile.ZipFile(wheels["0.98.1"]).read("mlx_lm/generate.py")
    assert written["files"]["mlx_lm/generate.py"]["sha256"] == hashlib.sha256(data).hexdigest()


def test_record_of_the_installed_versions_is_what_is_kept(tmp_path, capsys):
    found = upstream("mlx_lm")
    if found.version not in compat.releases("mlx-lm"):
        pytest.skip(f"mlx-lm {found.version} is not recorded")
    assert command.main(["record", "--output", str(tmp_path)]) == 0
    name = f"mlx-lm-{found.version}.json"
    assert (tmp_path / name).read_text() == (ROOT / "compat/upstream" / name).read_text()


def test_a_record_is_not_replaced_by_another(wheels, tmp_path, capsys):
    output = tmp_path / "records"
    assert command.main(["record", "--output", str(output), str(wheels["0.98"])]) == 0
    assert command.main(["record", "--output", str(output), str(wheels["0.98"])]) == 0  # the same again
    before = (output / "mlx-lm-0.98.json").read_text()
    other = tmp_path / "mlx_lm-0.98-py3-none-any.whl"
    shutil.copy(wheels["0.98.1"], other)
    capsys.readouterr()
    assert command.main(["record", "--output", str(output), str(other)]) == 1
    assert capsys.readouterr().err == (
        "[mlx-dllm-plugin] error: mlx-lm-0.98.json is there with another mlx_lm/generate.py: the installed files were "
        "changed, or the record is wrong. Install that version anew, or replace the record with --force.\n"
    )
    assert (output / "mlx-lm-0.98.json").read_text() == before
    assert command.main(["record", "--force", "--output", str(output), str(other)]) == 0
    assert (output / "mlx-lm-0.98.json").read_text() != before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mlx_lm-1.0.zip", b"zip"),
        ("other-1.0-py3-none-any.whl", b"zip"),
        ("mlx_lm-1.0-py3-none-any.whl", b"x"),
        ("mlx_lm-1.0.whl", b"zip"),
        ("mlx_lm-0.32.2.whl", b"zip"),
        ("mlx_lm-.whl", b"zip"),
        ("mlx_lm-not.a.version-py3-none-any.whl", b"zip"),
        ("mlx_lm-1.0-py3-none-any.whl", None),
        ("gone.whl", None),
    ],
)
def test_what_is_no_wheel_of_a_host(tmp_path, capsys, name, content):
    if content == b"zip":
        zipfile.ZipFile(tmp_path / name, "w").close()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    for what in ("check", "record"):
        assert command.main([what, str(tmp_path / name)]) == 1
        assert capsys.readouterr().err == (
            f"[mlx-dllm-plugin] error: {tmp_path / name} is not a wheel of mlx-lm or mlx-vlm, as pip download names "
            "them.\n"
        )


def test_files_that_cannot_be_read_or_written_are_one_sentence(wheels, tmp_path, capsys):
    damaged = tmp_path / "mlx_lm-7.0-py3-none-any.whl"
    data = bytearray(wheels["0.98"].read_bytes())
    data[200:260] = bytes(60)
    damaged.write_bytes(data)
    (tmp_path / "file").write_text("")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/mlx-lm-0.98.json").write_text("{")
    for arguments in (
        ["check", damaged],
        ["record", "--output", tmp_path / "file", wheels["0.98"]],
        ["record", "--output", tmp_path / "old", wheels["0.98"]],
    ):
        assert command.main([str(argument) for argument in arguments]) == 1
        error = capsys.readouterr().err
        assert (
            error.startswith("[mlx-dllm-plugin] error: a file cannot be read or written (") and error.count("\n") == 1
        )


def test_a_record_is_not_replaced_by_one_with_fewer_files(wheels, tmp_path, capsys):
    assert command.main(["record", "--output", str(tmp_path / "r"), str(wheels["0.98"])]) == 0
    smaller = tmp_path / "smaller" / wheels["0.98"].name
    smaller.parent.mkdir()
    with zipfile.ZipFile(wheels["0.98"]) as old, zipfile.ZipFile(smaller, "w") as new:
        for name in old.namelist()[1:]:
            new.writestr(name, old.read(name))
    assert command.main(["record", "--output", str(tmp_path / "r"), str(smaller)]) == 1
    assert "is there with another mlx_lm/" in capsys.readouterr().err


def test_a_file_with_an_odd_name_among_the_records_is_no_release(tmp_path, monkeypatch):
    import importlib.resources

    (tmp_path / "upstream").mkdir()
    for version in ("0.31.3", "0.9.0", "0.32.2.whl", "x"):
        (tmp_path / f"upstream/mlx-lm-{version}.json").write_text("{}")
    monkeypatch.setattr(importlib.resources, "files", lambda name: tmp_path)
    assert compat.releases.__wrapped__("mlx-lm") == ["0.9.0", "0.31.3"]


def test_a_wheel_without_anything_known(tmp_path, capsys):
    wheel = tmp_path / "mlx_lm-9.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mlx_lm/new.py", "")
    assert command.main(["record", "--output", str(tmp_path / "r"), str(wheel)]) == 1
    assert "mlx-lm 9.0 has none of the files that the plugin leans on" in capsys.readouterr().err
    assert command.main(["check", str(wheel)]) == 1
    assert f"{len(LEANS['mlx_lm'])} incompatible" in capsys.readouterr().out


def test_records_are_not_written_into_an_installation(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "__file__", str(tmp_path / "site-packages/mlx_dllm_plugin/compat/__main__.py"))
    upstream("mlx_lm")
    assert command.main(["record"]) == 1
    assert "Records are kept in a checkout of mlx-dllm-plugin" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
