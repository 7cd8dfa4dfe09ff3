"""The goldens that ship with the package: where they come from, that they match, and that a fault is told."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dllm_plugin.caches import FullCanvas
from mlx_dllm_plugin.errors import CheckpointError, DiffusionError
from mlx_dllm_plugin.models import llada2_moe
from mlx_dllm_plugin.verify import selfcheck
from mlx_dllm_plugin.verify.selfcheck import GOLDENS, Row, block, run
from tests.goldens import export

Copy = Callable[[str], Path]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return run()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Copies a checkpoint to where it may be changed: its folder, alone in tmp_path."""
    return lambda name: Path(shutil.copytree(GOLDENS / name, tmp_path / name))


def change(folder: Path, kind: str, number: int, **values: Any) -> None:
    """Change a case of golden.json; a dict is merged."""
    golden = json.loads((folder / "golden.json").read_text())
    case = golden[kind][number]
    for name, value in values.items():
        case[name] = {**case[name], **value} if isinstance(value, dict) else value
    (folder / "golden.json").write_text(json.dumps(golden))


def change_weight(folder: Path, change: Callable[[mx.array], mx.array]) -> None:
    file = str(folder / "model.safetensors")
    weights = {name: mx.array(value) for name, value in mx.load(file).items()}
    name = next(name for name in sorted(weights) if name.endswith("mlp.c_fc.weight"))
    weights[name] = change(weights[name])
    mx.save_safetensors(file, weights, {"format": "pt"})


def problems(folder: Path) -> dict[str, str]:
    return {row.case: row.problem for row in run(folder=folder.parent) if row.problem}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# What ships


def test_they_are_what_the_exporter_writes(goldens: Path, tmp_path: Path) -> None:
    export.export(goldens, tmp_path / "exported")
    exported, shipped = contents(tmp_path / "exported"), contents(GOLDENS)
    assert sorted(exported) == sorted(shipped)
    assert [name for name in shipped if exported[name] != shipped[name]] == []


def test_each_says_whose_it_is_and_is_small() -> None:
    assert sum(len(data) for data in contents(GOLDENS).values()) < 2.6e6
    for name in export.SHIPPED:
        golden = json.loads((GOLDENS / Path(name).name / "golden.json").read_text())
        assert golden["source"] == name and golden["produced_by"]


def test_every_case_matches(rows: list[Row]) -> None:
    assert [(row.checkpoint, row.case, row.problem) for row in rows if row.problem] == []
    assert {row.checkpoint for row in rows} == {Path(name).name for name in export.SHIPPED}
    assert sum(row.kind == "decode" for row in rows) == sum(map(len, export.SHIPPED.values()))
    forwards = [row for row in rows if row.kind == "forward"]
    assert len(forwards) == 2 * len(export.SHIPPED)
    assert all(row.error is not None and row.allowed is not None and row.error < row.allowed for row in forwards)


def test_the_exporter_refuses_cases_that_are_no_target(goldens: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(export, "SHIPPED", {"a2d/gpt2-grow": ("a2d_sample[10]",)})
    with pytest.raises(ValueError, match=re.escape("a2d_sample[10] is no target: ids depend on ties")):
        export.export(goldens, tmp_path / "exported")


def test_the_exporter_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(GOLDENS)
    with pytest.raises(SystemExit):
        export.main([str(tmp_path)])
    wanted = f"{tmp_path} has no a2d/gpt2-grow: give the folder that holds a2d, block and llada_dream"
    assert wanted in capsys.readouterr().err and contents(GOLDENS) == before


# Faults


def test_a_changed_weight(copy: Copy) -> None:
    folder = copy("gpt2-grow")
    change_weight(folder, lambda weight: weight * 1.01)
    found = run(folder=folder.parent)
    for row in found[:2]:
        assert row.error is not None and row.error > 2e-4
        wanted = rf"logits differ by {row.error:.1e} \(position \d+, token \d+\), 2e-04 allowed"
        assert re.fullmatch(wanted, row.problem), row.problem
    assert [row.case for row in found] == ["seq0", "seq1", *export.SHIPPED["a2d/gpt2-grow"]]


def test_a_weight_that_is_no_number(copy: Copy) -> None:
    folder = copy("gpt2-grow")
    change_weight(folder, lambda weight: weight * float("nan"))
    found = problems(folder)
    assert found["seq0"].startswith("logits differ by nan (position 0")
    assert len(found) == 5 and "nan" in block(run(folder=folder.parent), 1.0)


def test_another_rule(copy: Copy) -> None:
    folder = copy("sdar-b4")
    change(folder, "decode", 2, options={"unmasking": "low_confidence_static"})
    ((case, problem),) = problems(folder).items()
    assert case == "sequential_half_steps"
    assert re.fullmatch(r"\d+ of 32 tokens differ, the first at \d+ \(\d+, \d+ expected\)", problem)


def test_one_token(copy: Copy) -> None:
    folder = copy("gpt2-grow")
    tokens = json.loads((folder / "golden.json").read_text())["decode"][0]["tokens"]
    changed = [*tokens[:5], tokens[5] + 1, *tokens[6:]]
    change(folder, "decode", 0, tokens=changed)
    wanted = f"1 of {len(tokens)} tokens differ, the first at 5 ({tokens[5]}, {changed[5]} expected)"
    assert problems(folder) == {"a2d_sample[2]": wanted}


def test_fewer_tokens_and_more_forwards(copy: Copy) -> None:
    folder = copy("sdar-b4")
    change(folder, "decode", 1, options={"max_tokens": 8})
    change(folder, "decode", 2, nfe=15)
    assert problems(folder) == {
        "static_uneven_steps_aligned": "8 tokens, 32 expected",
        "sequential_half_steps": "16 forwards, 15 expected",
    }


def test_logits_read_in_place_that_are_shifted(copy: Copy) -> None:
    folder = copy("dream-tiny")
    change(folder, "decode", 0, options={"logits": "in_place"})
    assert list(problems(folder)) == ["dream_maskgit_plus_new16_steps8"]


def test_attention_of_another_kind(copy: Copy, monkeypatch: Any) -> None:
    folder = copy("sdar-b4")
    monkeypatch.setattr(selfcheck, "caches", lambda model, length, block: [FullCanvas()] * len(model.layers))
    assert set(problems(folder)) == {"logits0", "logits1"}


def test_routing_without_blocks(copy: Copy, monkeypatch: Any) -> None:
    """Each token chooses among all experts, not among those of its block."""
    folder, real = copy("llada2_moe-v22"), llada2_moe.block_routing

    def route(scores: mx.array, bias: mx.array, block: int, capacity: int, *rest: Any) -> Any:
        return real(scores, bias, block, scores.shape[-1], *rest)

    monkeypatch.setattr(llada2_moe, "block_routing", route)
    found = problems(folder)
    assert {"logits0", "logits1", "thr_0.3", "default_straddle", "steps_quarter", "edit_off"} == set(found)


def test_edits_that_do_nothing(copy: Copy, monkeypatch: Any) -> None:
    """DELETE and INSERT are other tokens than the checkpoint says: no logits differ, but decoded tokens do."""
    folder = copy("llada2_moe-v22")
    config = json.loads((folder / "config.json").read_text())
    config |= {"delete_token_id": 5, "split_token_id": 6}
    (folder / "config.json").write_text(json.dumps(config))
    assert {"thr_0.3", "default_straddle", "steps_quarter"} == set(problems(folder))


def test_one_that_cannot_be_loaded_leaves_the_others(copy: Copy) -> None:
    broken, whole = copy("gpt2-grow"), copy("sdar-b4")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:1000])
    found = run(folder=broken.parent)
    of_broken = [row for row in found if row.checkpoint == "gpt2-grow"]
    assert len(of_broken) == 5 and len(found) == 11
    assert [row.problem for row in found if row.checkpoint == whole.name] == [""] * 6
    for row in of_broken:
        assert row.problem.startswith("gpt2-grow/model.safetensors") and str(broken.parent) not in row.problem
    assert "| gpt2-grow | 0 of 5 | not compared | 2e-04 | undeemed/a2d |" in block(found, 1.0)


def test_one_that_no_family_claims(copy: Copy) -> None:
    folder = copy("gpt2-grow")
    config = json.loads((folder / "config.json").read_text())
    del config["a2d"]
    (folder / "config.json").write_text(json.dumps(config))
    wanted = "no family claims gpt2-grow, which is a diffusion checkpoint: its config.json changed."
    assert set(problems(folder).values()) == {wanted}


@pytest.mark.parametrize("where", ["_forward", "_decode"])
def test_an_error_of_mlx_is_one_case_s_problem(where: str, copy: Copy, monkeypatch: Any) -> None:
    folder = copy("gpt2-grow")

    def fail(*_: Any) -> Any:
        raise RuntimeError(f"[metal::load]\n  failed in {folder}/x.metal and {Path.home()}/.cache/y and /a/b/c/z.cc:3")

    monkeypatch.setattr(selfcheck, where, fail)
    found = set(problems(folder).values())
    assert found == {"RuntimeError: [metal::load] failed in gpt2-grow/x.metal and .cache/y and z.cc:3"}


def tampered(folder: Path, change: Callable[[dict[str, Any]], Any]) -> list[str]:
    """The problems with another golden.json."""
    file = folder / "golden.json"
    golden = json.loads(file.read_text())
    change(golden)
    file.write_text(json.dumps(golden))
    return [row.problem for row in run(folder=folder.parent) if row.problem]


@pytest.mark.parametrize("kinds", [("forward",), ("decode",), ("forward", "decode")])
def test_a_golden_without_cases(kinds: tuple[str, ...], copy: Copy) -> None:
    found = tampered(copy("gpt2-grow"), lambda golden: golden.update({kind: [] for kind in kinds}))
    assert found == ["golden.json of gpt2-grow has no cases: reinstall the package."] * len(kinds)


@pytest.mark.parametrize("key", ["produced_by", "tolerance", "forward", "decode"])
def test_a_golden_without_a_key(key: str, copy: Copy) -> None:
    found = tampered(copy("gpt2-grow"), lambda golden: golden.pop(key))
    assert found == [f"golden.json of gpt2-grow has no {key}: reinstall the package."]


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), 0, True])
def test_a_tolerance_that_is_none(value: Any, copy: Copy) -> None:
    found = tampered(copy("gpt2-grow"), lambda golden: golden.update(tolerance=value))
    assert found == ["golden.json of gpt2-grow has a tolerance that cannot be compared: reinstall the package."]


@pytest.mark.parametrize("kind", ["forward", "decode"])
def test_a_case_without_a_key(kind: str, copy: Copy) -> None:
    key = {"forward": "positions", "decode": "nfe"}[kind]
    found = tampered(copy("gpt2-grow"), lambda golden: golden[kind][1].pop(key))
    assert f"{kind} 1 of golden.json of gpt2-grow has no {key}: reinstall the package." in found


@pytest.mark.parametrize(
    ("key", "values", "problem"),
    [
        ("ids", [-1], "id -1 is not one of the"),
        ("ids", [10**9, 1], "id 1000000000 is not one of the"),
        (
            "ids",
            [1.5],
            "forward 0 of golden.json of gpt2-grow has a ids that cannot be compared: reinstall the package.",
        ),
        ("positions", [0, 24], "position 24 is not one of the 24 that there are: reinstall the package."),
    ],
)
def test_ids_that_are_none_of_the_model(key: str, values: list[Any], problem: str, copy: Copy) -> None:
    """MLX would read outside its memory."""
    found = tampered(copy("gpt2-grow"), lambda golden: golden["forward"][0].update({key: values}))
    assert found[0].startswith(problem)


@pytest.mark.parametrize("kind", ["decode", "forward"])
def test_an_id_of_a_prompt(kind: str, copy: Copy) -> None:
    name = {"decode": "prompt_ids", "forward": "ids"}[kind]
    found = tampered(copy("gpt2-grow"), lambda golden: golden[kind][0][name].append(10**9))
    assert len(found) == 1 and "1000000000" in found[0]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda logits: logits * float("nan"), "logits.npy has numbers that are not finite: reinstall the package."),
        (lambda logits: logits[:6], "logits.npy has [0, 384] for [6, 384] logits: reinstall the package."),
        (lambda logits: logits[:, :1], "logits.npy has [6, 1] for [6, 384] logits: reinstall the package."),
    ],
)
def test_golden_logits_that_are_damaged(damage: Any, problem: str, copy: Copy) -> None:
    folder = copy("gpt2-grow")
    np.save(folder / "logits.npy", damage(np.load(folder / "logits.npy")))
    found = [row.problem for row in run(folder=folder.parent) if row.kind == "forward"]
    width = np.load(GOLDENS / "gpt2-grow" / "logits.npy").shape[1]
    assert found[-1] == problem.replace("384", str(width))


def test_whose_outputs_they_are(rows: list[Row]) -> None:
    assert {row.checkpoint: row.outputs_of for row in rows} == {
        "dream-tiny": "ZHZisZZ/dllm",
        "gemma3-grow": "undeemed/a2d",
        "gpt2-grow": "undeemed/a2d",
        "llada2_moe-v22": "independent reimplementation validated on published vectors",
        "sdar-b4": "original reference code",
    }
    assert "| independent reimplementation validated on published vectors |" in block(rows, 1.0)


def test_a_package_without_goldens(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=re.escape(f"{tmp_path} holds no goldens: install mlx-dllm-plugin again.")
    ):
        run(folder=tmp_path)


# Devices


def test_the_default_device_stays(copy: Copy, monkeypatch: Any) -> None:
    folder, before, given = copy("gpt2-grow"), mx.default_device(), []
    real = mx.set_default_device
    monkeypatch.setattr(mx, "set_default_device", lambda device: (given.append(device), real(device)))

    def stop(row: Row) -> None:
        given.append("row")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(stop, mx.Device(mx.cpu), folder=folder.parent)
    assert given == [mx.Device(mx.cpu), "row", before] and mx.default_device() == before
    block([], 1.0, mx.Device(mx.cpu))
    assert given[3:] == [mx.Device(mx.cpu), before]


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="MLX has a GPU here")
def test_a_device_that_is_not_there() -> None:
    before = mx.default_device()
    with pytest.raises(DiffusionError, match=re.escape("here: leave the device out, or give mx.cpu.")):
        run(device=mx.Device(mx.gpu))
    assert mx.default_device() == before


def test_rows_are_told_while_they_come(copy: Copy) -> None:
    folder, told = copy("gpt2-grow"), []
    assert run(told.append, folder=folder.parent) == told and len(told) == 5


def test_without_the_patches() -> None:
    code = (
        "import mlx_dllm_plugin; from mlx_dllm_plugin.verify.selfcheck import block, run\n"
        "print(block(run(), 1.0)); print(mlx_dllm_plugin.is_active())"
    )
    environment = {**os.environ, "MLX_DLLM_PLUGIN": "0"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.stderr == "" and result.stdout.splitlines()[-2:] == ["matched 28 of 28", "False"]


# The block


def test_block(rows: list[Row]) -> None:
    text = block(rows, 3.21)
    lines = text.splitlines()
    assert lines[0] == "### mlx-dllm verify --self" and lines[-1] == f"matched {len(rows)} of {len(rows)}"
    assert (
        f"Python {platform.python_version()}" in lines[2] and "mlx-lm " in lines[2] and "mlx-dllm-plugin " in lines[2]
    )
    assert re.fullmatch(r"- Device\((cpu|gpu), 0\), \d+ GiB [a-zA-Z ]+, 3\.2 s", lines[4])
    assert sum(line.startswith("| ") for line in lines) == 1 + len(export.SHIPPED)
    for row in lines[8:-4]:
        assert re.fullmatch(r"\| [\w-]+ \| (\d) of \1 \| \d\.\de-0\d \| 2e-0[34] \| [\w/ ]+ \|", row)
    names = (platform.node(), str(Path.home()), str(GOLDENS), sys.prefix)
    assert [name for name in names if name in text] == [] and "FAIL" not in text
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)


@pytest.mark.parametrize("is_gpu", [False, True])
def test_block_with_failures(is_gpu: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(selfcheck, "_is_gpu", lambda: is_gpu)
    found = [
        Row("one", "forward", "a", "", 0.00012, 0.0002),
        Row("one", "forward", "b", "", 0.00015, 0.0002),
        Row("one", "decode", "c", "3 of 8 tokens differ, the first at 2 (5, 6 expected)"),
        Row("two", "forward", "a", "logits differ by 1.0e-01 (position 3, token 4), 2e-03 allowed", 0.1, 0.002),
    ]
    lines = block(found, 1.0).splitlines()
    assert "| one | 2 of 3 | 1.5e-04 | 2e-04 | - |" in lines and "| two | 0 of 1 | 1.0e-01 | 2e-03 | - |" in lines
    wanted = [
        "- FAIL one, decode c: 3 of 8 tokens differ, the first at 2 (5, 6 expected) (largest logit difference of the "
        "checkpoint: 1.5e-04)",
        "- FAIL two, forward a: logits differ by 1.0e-01 (position 3, token 4), 2e-03 allowed",
    ]
    assert [line for line in lines if "FAIL" in line] == wanted
    assert any(line.startswith("Some GPUs multiply float32 matrices with fewer bits") for line in lines) == is_gpu
    assert lines[-1] == "matched 2 of 4"


@pytest.mark.parametrize("found", ["Apple M3 Max", OSError("no sysctl"), subprocess.TimeoutExpired("sysctl", 5)])
def test_the_chip_of_a_mac(found: str | Exception, monkeypatch: Any) -> None:
    def sysctl(command: list[str], **_: Any) -> Any:
        assert command == ["sysctl", "-n", "machdep.cpu.brand_string"]
        if isinstance(found, Exception):
            raise found
        return subprocess.CompletedProcess(command, 0, stdout=f"{found}\n")

    monkeypatch.setattr(selfcheck.sys, "platform", "darwin")
    monkeypatch.setattr(selfcheck.subprocess, "run", sysctl)
    assert selfcheck._chip() == (found if isinstance(found, str) else "")
