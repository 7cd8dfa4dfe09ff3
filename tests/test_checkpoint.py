"""Checkpoints on disk: which directory of a run is loaded, and one sentence for everything broken."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from mlx_dllm_plugin.checkpoint import (
    check_weights,
    has_tokenizer,
    is_run_directory,
    open_checkpoint,
    resolve_run_directory,
)
from mlx_dllm_plugin.errors import CheckpointError, DiffusionError
from mlx_dllm_plugin.options import LoadOptions
from mlx_dllm_plugin.spec import prepare, resolve
from tests.models import MASK, a2d_block, config_of, load, tiny_run, write_checkpoint, write_json


def refused(call: Any, *args: Any) -> str:
    """The sentence of a CheckpointError: one line, ending in a full stop."""
    with pytest.raises(CheckpointError) as error:
        call(*args)
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text
    assert isinstance(error.value, (ValueError, FileNotFoundError))
    return text


def read_all(path: Path) -> None:
    """Open a checkpoint and read every file of it."""
    found = open_checkpoint(path)
    for name in ("generation_config", "tokenizer_config", "added_tokens", "run", "manifest"):
        getattr(found, name)


def checkpoint_dirs(run: Path, *numbers: int, config: Any = "{}") -> Path:
    for number in numbers:
        write_json(run / "checkpoints" / f"checkpoint-{number}" / "config.json", config)
    return run


def test_the_model_folder_comes_before_checkpoints(tmp_path: Path) -> None:
    run = checkpoint_dirs(tiny_run(tmp_path), 500, 1000)
    assert is_run_directory(run)
    assert resolve_run_directory(run) == run / "model"
    assert open_checkpoint(run).path == run / "model"


def test_the_numerically_latest_checkpoint_is_taken(tmp_path: Path) -> None:
    checkpoint_dirs(tmp_path, 500, 1000, 90)
    assert resolve_run_directory(tmp_path) == tmp_path / "checkpoints" / "checkpoint-1000"


def test_folders_that_are_not_checkpoints_do_not_count(tmp_path: Path) -> None:
    checkpoint_dirs(tmp_path, 500)
    for name in ("checkpoint-9999x", "checkpoint-", "checkpoint-best", "xcheckpoint-9999"):
        write_json(tmp_path / "checkpoints" / name / "config.json", {})
    (tmp_path / "checkpoints" / "checkpoint-7777").write_text("a file")
    assert resolve_run_directory(tmp_path).name == "checkpoint-500"


@pytest.mark.parametrize("name", ["model", "checkpoints/checkpoint-1000"])
def test_a_folder_that_was_not_finished_is_refused_not_passed_over(name: str, tmp_path: Path) -> None:
    """An older checkpoint in its place would decode something else than what the user sees in the folder."""
    checkpoint_dirs(tmp_path, 500)
    (tmp_path / name).mkdir()
    assert resolve_run_directory(tmp_path) == tmp_path / name
    assert refused(open_checkpoint, tmp_path).startswith(f"{tmp_path / name / 'config.json'} is missing; ")


def test_a_config_at_the_root_vetoes_the_run(tmp_path: Path) -> None:
    run = checkpoint_dirs(tiny_run(tmp_path), 500)
    write_json(run / "config.json", {"model_type": "gpt2", "vocab_size": 3})
    assert not is_run_directory(run)
    assert resolve_run_directory(run) == run
    assert open_checkpoint(run).config["vocab_size"] == 3
    assert open_checkpoint(run).manifest is None


def test_a_plain_directory_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    assert not is_run_directory(tmp_path)
    assert not is_run_directory(tmp_path / "missing")
    assert resolve_run_directory(tmp_path) == tmp_path
    assert refused(open_checkpoint, tmp_path).startswith(f"{tmp_path / 'config.json'} is missing; ")


def test_a_run_with_nothing_to_load_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", {"status": "running"})
    (tmp_path / "checkpoints").mkdir()
    text = refused(open_checkpoint, tmp_path)
    assert text.startswith(f"{tmp_path} is a run directory with nothing to load: ")
    assert "checkpoint-<N>" in text
    assert refused(load, tmp_path) == text


def test_a_missing_path_and_a_file_are_refused(tmp_path: Path) -> None:
    assert refused(open_checkpoint, tmp_path / "no").startswith(f"{tmp_path / 'no'} does not exist; ")
    file = write_json(tmp_path / "config.json", {})
    assert refused(open_checkpoint, file).startswith(f"{file} is a file; ")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["{", "", '{"a": }', "null,", "\x00\x01"])
def test_broken_json_is_named(name: str, text: str, tmp_path: Path) -> None:
    path = tiny_run(tmp_path) / "model"
    write_json(path / name, text)
    assert refused(read_all, path).startswith(f"{path / name} cannot be read as JSON (")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"])
def test_json_that_python_cannot_take_is_named(text: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", text)
    assert "cannot be read as JSON" in refused(open_checkpoint, tmp_path)


def test_an_autoregressive_model_loads_whatever_lies_beside_it(tmp_path: Path) -> None:
    """The host does not read these files, or reads them leniently: nor must we before a family claims the model."""
    path = write_checkpoint(tmp_path / "model", "qwen2")
    for name in ("generation_config.json", "added_tokens.json", "../manifest.json"):
        write_json(path / name, "[")
    model = load(path)
    assert not hasattr(model, "diffusion_spec")


def test_a_loop_of_links_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "loop", tmp_path / ("x" * 300)):
        assert refused(open_checkpoint, path)
    assert "model.safetensors cannot be read" in refused(check_weights, tmp_path)


def test_json_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "gpt\xff"}')
    assert "cannot be read as JSON" in refused(open_checkpoint, tmp_path)


@pytest.mark.parametrize(("text", "kind"), [("[]", "list"), ("3", "int"), ('"gpt2"', "str"), ("null", "NoneType")])
def test_json_that_is_no_object_is_named(text: str, kind: str, tmp_path: Path) -> None:
    file = write_json(tmp_path / "config.json", text)
    assert refused(open_checkpoint, tmp_path) == f"{file} must hold a JSON object, got {kind}."


@pytest.mark.parametrize("block", [[], "mdlm", 3, True])
def test_an_a2d_block_that_is_no_object_is_refused(block: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config_of("gpt2", a2d=block))
    text = refused(prepare, tmp_path, None, LoadOptions())
    assert text == f'{tmp_path / "config.json"}: "a2d" must be an object, got {block!r}.'


def test_overrides_win_over_the_config(tmp_path: Path) -> None:
    path = tiny_run(tmp_path)
    assert open_checkpoint(path, {"vocab_size": 7}).config["vocab_size"] == 7
    assert open_checkpoint(path).config["vocab_size"] == 48


def test_the_manifest_is_provenance_and_never_the_mask_id(tmp_path: Path) -> None:
    manifest = {"model_spec": {"mask_token_id": 5, "vocab_size": 47}, "mask_token_id": 6}
    run = tiny_run(tmp_path, manifest=manifest, a2d={"mask_token_id": None})
    checkpoint = open_checkpoint(run)
    assert checkpoint.run == run and checkpoint.manifest is not None and checkpoint.manifest["mask_token_id"] == 6
    found = prepare(run / "model", None, LoadOptions())
    assert found is not None and found[1].mask_token_id is None
    write_json(run / "model" / "config.json", config_of("gpt2", a2d=a2d_block()))
    found = prepare(run / "model", None, LoadOptions())
    assert found is not None and found[1].mask_token_id == MASK


@pytest.mark.parametrize("status", ["failed", "running"])
def test_a_run_that_did_not_complete_warns_once(status: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny_run(tmp_path, manifest={"status": status}))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("[mlx-dllm-plugin] warning: ")
    assert f"the conversion is {status!r}" in line and "the checkpoint in use is model" in line


@pytest.mark.parametrize("manifest", [{"status": "completed"}, {"status": None}, {"status": 3}])
def test_a_completed_run_is_silent(manifest: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny_run(tmp_path, manifest=manifest))
    assert capfd.readouterr().err == ""


def test_the_checkpoint_of_a_running_conversion_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "manifest.json", {"a2d_version": "0.1.0", "status": "running"})
    write_checkpoint(tmp_path / "checkpoints" / "checkpoint-500")
    model = load(tmp_path)
    assert "the checkpoint in use is checkpoint-500" in capfd.readouterr().err
    assert model.diffusion_spec.mask_token_id is None
    assert model.diffusion_spec.sources["family"] == "the run's manifest"
    monkeypatch.chdir(tmp_path / "checkpoints" / "checkpoint-500")
    assert open_checkpoint(Path(".")).run == tmp_path.resolve()


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_manifest_that_is_none_is_passed_over(text: str, tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    write_json(run / "manifest.json", text)
    assert open_checkpoint(run).manifest is None


def test_complete_weights_pass(tmp_path: Path) -> None:
    check_weights(tiny_run(tmp_path) / "model")


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    path = tiny_run(tmp_path) / "model"
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert f"{path} has no weights: no model*.safetensors, but pytorch_model.bin; convert it" in refused(load, path)
    (path / "pytorch_model.bin").unlink()
    assert refused(load, path) == (f"{path} has no weights: no model*.safetensors; give the directory of a checkpoint.")


def header_size(file: Path) -> int:
    return 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 200])
def test_weights_cut_within_the_header_are_refused(keep: int, tmp_path: Path) -> None:
    path = tiny_run(tmp_path) / "model"
    file = path / "model.safetensors"
    assert keep < header_size(file)
    file.write_bytes(file.read_bytes()[:keep])
    assert refused(load, path) == (
        f"{file} is truncated: {keep} bytes do not hold its header; copy or download it again."
    )


@pytest.mark.parametrize("lost", [1, 4096, None])
def test_weights_cut_within_the_data_are_refused(lost: int | None, tmp_path: Path) -> None:
    path = tiny_run(tmp_path) / "model"
    file = path / "model.safetensors"
    content = file.read_bytes()
    size = header_size(file) if lost is None else len(content) - lost
    file.write_bytes(content[:size])
    assert refused(load, path) == (
        f"{file} is truncated or damaged: {size} bytes, {len(content)} expected; copy or download it again."
    )


def test_weights_with_bytes_to_spare_are_refused(tmp_path: Path) -> None:
    file = tiny_run(tmp_path) / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    assert "is truncated or damaged" in refused(check_weights, file.parent)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


@pytest.mark.parametrize(
    "content",
    [
        safetensors(b"not json at all"),
        safetensors(b"\xff\xfe\xfd"),
        safetensors([1, 2]),
        safetensors({"w": 3}),
        safetensors({"w": {"dtype": "F32", "shape": [1]}}),
        safetensors({"w": {"data_offsets": []}}),
        safetensors({"w": {"data_offsets": [0, "4"]}}, b"\0" * 4),
        safetensors({"w": {"data_offsets": None}}),
    ],
)
def test_garbage_instead_of_a_header_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert refused(check_weights, tmp_path) == (
        f"{file} is not a safetensors file: its header cannot be read; copy or download it again."
    )


def test_text_instead_of_weights_is_refused(tmp_path: Path) -> None:
    """An error page: its first bytes read as an enormous header."""
    file = tmp_path / "model.safetensors"
    file.write_text("<html><body>404 Not Found</body></html>")
    assert "bytes do not hold its header" in refused(check_weights, tmp_path)


def test_a_git_lfs_pointer_is_refused(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for name, read in (("model.safetensors", check_weights), ("config.json", open_checkpoint)):
        (tmp_path / name).write_text(text)
        error = refused(read, tmp_path)
        assert f"{tmp_path / name} is a Git LFS pointer" in error and f"git lfs pull in {tmp_path}" in error


def test_a_header_is_not_read_however_long_it_says_it_is(tmp_path: Path) -> None:
    """A file of a terabyte, but for the zeros that are nowhere."""
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", (1 << 40) - 8))
        stream.truncate(1 << 40)
    assert "its header would have 1099511627768 bytes, 100000000 are the most" in refused(check_weights, tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "model.safetensors is no regular file" in refused(check_weights, tmp_path)


def test_a_directory_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read all."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    sentence = f"{tmp_path} cannot be looked at (Permission denied); give a directory that you may read."
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refuse)
        assert refused(check_weights, tmp_path) == sentence
    monkeypatch.setattr(Path, "is_file", refuse)
    assert refused(open_checkpoint, tmp_path) == sentence


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path: Path) -> None:
    path = tiny_run(tmp_path) / "model"
    (path / "model.safetensors").rename(path / "model-00001-of-00003.safetensors")
    names = {f"w{i}": f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    write_json(path / "model.safetensors.index.json", {"weight_map": names})
    assert refused(load, path) == (
        f"{path} lacks 2 of the weight files its index names (model-00002-of-00003.safetensors, …); copy them again."
    )


@pytest.mark.parametrize("index", [{"weight_map": []}, {"weight_map": {"w": 3}}, {"weight_map": None}])
def test_an_index_that_makes_no_sense_is_refused(index: Any, tmp_path: Path) -> None:
    path = tiny_run(tmp_path) / "model"
    file = write_json(path / "model.safetensors.index.json", index)
    assert refused(check_weights, path).startswith(str(file))


def test_every_shard_is_checked(tmp_path: Path) -> None:
    path = tiny_run(tmp_path) / "model"
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    second = path / "model-00002-of-00002.safetensors"
    second.write_bytes(b"\1")
    assert refused(check_weights, path).startswith(f"{second} is truncated")


def test_errors_of_checkpoints_are_value_and_file_errors(tmp_path: Path) -> None:
    for kind in (DiffusionError, ValueError, FileNotFoundError):
        with pytest.raises(kind):
            open_checkpoint(tmp_path / "missing")


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "tokenizer.model"])
def test_tokenizer_files_are_recognised(name: str, tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {})
    assert not has_tokenizer(tmp_path)
    write_json(tmp_path / name, {})
    assert has_tokenizer(tmp_path)


def test_added_tokens_come_from_all_three_files(tmp_path: Path) -> None:
    path = tiny_run(tmp_path) / "model"
    write_json(path / "tokenizer.json", {"added_tokens": [{"content": "a", "id": 1}, {"content": "b", "id": 2}]})
    write_json(path / "added_tokens.json", {"c": 3})
    write_json(path / "tokenizer_config.json", {"added_tokens_decoder": {"4": {"content": "d"}}})
    assert open_checkpoint(path).added_tokens == {"a": 1, "b": 2, "c": 3, "d": 4}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer.json", {"added_tokens": [{"content": "a"}]}),
        ("tokenizer.json", {"added_tokens": 3}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": "a"}}),
    ],
)
def test_added_tokens_that_make_no_sense_are_named(name: str, value: Any, tmp_path: Path) -> None:
    path = tiny_run(tmp_path) / "model"
    write_json(path / name, value)
    assert refused(read_all, path).startswith(str(path / name))


def test_golden_runs_resolve(data: Path) -> None:
    for name, mask in (("gpt2-grow", 340), ("qwen2-reuse", 327)):
        found = prepare(open_checkpoint(data / "a2d" / name / "run").path, None, LoadOptions())
        assert found is not None and found[1].mask_token_id == mask
        assert resolve(open_checkpoint(data / "a2d" / name / "run"), found[0]) == found[1]
