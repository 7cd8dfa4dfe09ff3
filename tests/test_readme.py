"""The README's tables are made from the code, and what it shows is what happens."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_dllm_plugin.commands import main
from mlx_dllm_plugin.compat import TESTED
from mlx_dllm_plugin.demo import demo_path
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.families.profiles import COST
from mlx_dllm_plugin.options import table
from mlx_dllm_plugin.samplers import RULES, users
from tests import matrix

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bits  # noqa: E402
from demo_quality import paired  # noqa: E402

README = (ROOT / "README.md").read_text()


def between(marker: str) -> str:
    found = re.search(rf"<!-- {marker}:[^\n]*-->\n(.*?)<!-- end of {marker} -->", README, re.DOTALL)
    assert found, f"the README has no part {marker!r}"
    return found[1]


def families_table() -> str:
    rows = []
    for family in FAMILIES.builtin():
        mask = " ".join(filter(None, [family.mask_token and f"`{family.mask_token}`", str(family.mask_token_id or "")]))
        kind = f"{family.logits}, {family.attention}".replace("_", "-")
        cells = [f"`{family.name}`", family.about, mask, kind, f"`{family.unmasking}`", family.verified]
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n")
    head = "| family | repositories | mask | logits, attention | default rule | checked against |\n"
    return head + "|---|---|---|---|---|---|\n" + "".join(rows)


def test_the_options_are_those_of_the_table() -> None:
    rows = []
    for option in table():
        if not option.metadata["host"]:
            where = "" if option.metadata["cli"] else " (Python only)"
            only = "" if option.metadata["common"] else ", ".join(users(option.name))
            rows.append(f"| `{option.name}` | {option.metadata['help']}{where} | {only} |\n")
    assert between("options") == "| option | meaning | only for the rules |\n|---|---|---|\n" + "".join(rows)


def test_what_is_said_of_the_demo_is_what_was_measured() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "demo_quality.json").read_text())
    one, threshold = (result["rules"][rule] for rule in ("one token a step", "threshold 0.9"))
    assert between("demo") == (
        f"It has 2.5 million parameters and makes mistakes: of {result['count']} problems it had not seen it answers\n"
        f"{one['exact']} exactly with one token a step, as here, and {threshold['exact']} with\n"
        f"`--unmasking threshold`, which commits {threshold['tokens_per_forward']:.1f} tokens per forward.\n"
    )


def test_the_profiles_are_as_measured() -> None:
    """The table, what `mlx-dllm info` says of a profile, and what the profiles may lose at most."""
    report = json.loads((ROOT / "benchmarks" / "results" / "demo_quality.json").read_text())
    base = report["rules"]["one token a step"]
    rows = [
        f"| exact | {base['exact']} of {base['of']} | | {base['tokens_per_forward']} | {base['columns_per_token']} |\n"
    ]
    for name, most in (("balanced", 0.5), ("fast", 2.0)):
        run = report["rules"][f"profile {name}"]
        points = "{:+.1f} ({:+.1f} to {:+.1f})".format(*paired(run, base))
        assert run["of"] == 1000 and paired(run, base)[0] >= -most
        found = f"{run['exact']} of {run['of']} | {points}"
        rows.append(f"| {name} | {found} | {run['tokens_per_forward']} | {run['columns_per_token']} |\n")
        amount, interval = points.split(" ", 1)
        speed = f"{round(run['tokens_per_forward'], 2)} tokens per forward"
        assert COST[name] == f"on the demo checkpoint {amount} points {interval}, {speed}"
    head = "| profile | exact answers | points | tokens per forward | columns per token |\n|---|---|---|---|---|\n"
    assert between("profiles") == head + "".join(rows)


def test_every_rule_was_measured_with_every_cache() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "demo_quality.json").read_text())
    rules = [rule.name for rule in RULES.builtin() if rule.edit is None]  # the demo has no block-causal attention
    names = {f"{rule}/{cache}" for rule in rules for cache in ("none", "prefix", "dual")}
    assert names <= set(report["rules"])
    for name in names:
        run = report["rules"][name]
        assert run["of"] == 200 and run["exact"] == run["of"] - len(run["wrong"]) == sum(run["tasks"].values())
        assert run["tokens_per_forward"] == round(run["tokens"] / run["forwards"], 3)
        assert run["columns_per_token"] == round(run["columns"] / run["tokens"], 2)


def test_the_rules_are_the_registered_ones() -> None:
    rows = [f"| `{rule.name}` | {rule.about} |\n" for rule in RULES.builtin()]
    assert between("rules") == "| rule | what it commits |\n|---|---|\n" + "".join(rows)


def test_the_families_are_the_registered_ones() -> None:
    assert between("families") == families_table()


def test_info_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = re.search(r"\$ mlx-dllm (info [^\n]*)\n(.*?)```", README, re.DOTALL)
    assert shown
    assert main(shown[1].split()) == 0
    assert capsys.readouterr().out == shown[2]


def test_verify_prints_what_the_readme_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the rounding errors, which depend on the machine."""
    pytest.importorskip("torch", reason="the reference is torch")
    monkeypatch.chdir(ROOT)
    shown = re.search(r"\$ mlx-dllm (verify [^\n]*)\n(.*?)```", README, re.DOTALL)
    assert shown and main(shown[1].split()) == 0
    numbers = r"\d\.\de[+-]\d\d|[\d.]+ s$|5\.\d+\.\d+|[\d.]+ MB"
    found, wanted = (re.sub(numbers, "#", text, flags=re.MULTILINE) for text in (capsys.readouterr().out, shown[2]))
    assert found == wanted and "100.0 %" in wanted and wanted.endswith("No problems.\n")


def test_what_a_bit_width_costs_is_as_measured() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "bits.json").read_text())
    assert between("bits") == bits.table(report) + "\n"
    assert list(report["builds"]) == list(bits.BUILDS)
    for build in report["builds"].values():
        assert build["of"] == 100 and build["exact"] == 100 - len(build["wrong"])
    weights = hashlib.sha256((demo_path() / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert report["weights_sha256"] == weights
    doubled, unknown = ([n for n, build in report["builds"].items() if build[kind]] for kind in ("doubled", "unknown"))
    assert (doubled, unknown) == (["2 bits"], ["3 bits", "2 bits"])  # as the text below the table says


def test_the_versions_are_the_tested_ones() -> None:
    for package, (first, last) in TESTED.items():
        assert re.search(rf"\| {package}[^|]*\| {first} to {last} \|", README)


def test_the_matrix_is_what_was_run_with_every_release_it_must_cover() -> None:
    rows = json.loads(matrix.REPORT.read_text())
    assert between("matrix") == matrix.table(rows)
    found = [(row["mlx-lm"], row["mlx-vlm"]) for row in rows]
    assert found == matrix.pairs() and {found[0], found[-1]} == set(matrix.ends())
    assert {lm for lm, _ in found} >= {"0.31.3", "0.32.0", "0.32.1", "0.32.2"}
    assert {vlm for _, vlm in found} >= {"0.7.1", "0.7.6", "0.7.10"}
    for row in rows:
        assert row["columns"] == dict.fromkeys(matrix.COLUMNS, "yes")


def test_every_smoke_test_has_a_column() -> None:
    names = re.findall(r"^def test_(\w+)", (ROOT / "tests" / "smoke.py").read_text(), re.MULTILINE)
    columns = [[words for words in matrix.COLUMNS.values() if name.startswith(f"{words}_")] for name in names]
    assert [len(found) for found in columns] == [1] * len(names)
    assert {words for (words,) in columns} == set(matrix.COLUMNS.values())


def test_the_python_examples_run(tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tokens in 8 forwards" in done.stdout
