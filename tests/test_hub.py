"""Hub ids: `mlx_lm.load("org/name")` for model folders and run directories, with a stand-in for the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from mlx_dllm_plugin import DecodingOptions, decode
from tests.tools import ERROR, PROMPT, copy_run, make_ar_model, process

REVISION = "0123456789abcdef0123456789abcdef01234567"


def put(cache: Path, name: str, folder: Path) -> None:
    """Lay a repository out as huggingface_hub's cache does: blobs, and links to them in a snapshot."""
    home = cache / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(REVISION)
    (home / "blobs").mkdir()
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob = home / "blobs" / f"{number:040x}"
        shutil.copyfile(file, blob)
        link = home / "snapshots" / REVISION / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)


@pytest.fixture(scope="module")
def cache(data: Path, goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache with a plain model folder, a run with model/, a run of checkpoints only, and a plain model."""
    root = tmp_path_factory.mktemp("hub")
    run = data / "a2d" / "gpt2-grow" / "run"
    put(root, "org/folder", run / "model")
    put(root, "org/run", run)
    put(root, "org/partial", goldens / "a2d" / "gpt2-partial" / "run")
    put(root, "org/plain", make_ar_model(tmp_path_factory.mktemp("ar") / "llama", run / "model"))
    return root


SCRIPT = """
import json, sys
import mlx_lm
found = {}
for name, options in json.loads(sys.argv[1]).items():
    model, tokenizer = mlx_lm.load(name, tokenizer_config=options.pop("tokenizer_config", None))
    spec = getattr(model, "diffusion_spec", None)
    text = mlx_lm.generate(model, tokenizer, sys.argv[2], max_tokens=12, **options)
    found[name] = [spec and spec.family, spec and spec.sources["family"], text]
print(json.dumps(found))
"""


def local(path: Path, tokenizer: Path | None = None, **options: Any) -> str:
    config = {"tokenizer": str(tokenizer)} if tokenizer else None
    return mlx_lm.generate(*mlx_lm.load(str(path), tokenizer_config=config), PROMPT, max_tokens=12, **options)


def test_hub_ids_load_what_their_folders_hold(cache: Path, data: Path, goldens: Path) -> None:
    run, partial = data / "a2d" / "gpt2-grow" / "run", goldens / "a2d" / "gpt2-partial"
    tokenizer = partial / "source_tokenizer"
    wanted = {
        "org/folder": {},
        "org/run": {},
        "org/partial": {"tokenizer_config": {"tokenizer": str(tokenizer)}, "mask_token_id": 320},
        "org/plain": {},
    }
    outcome = process(["-c", SCRIPT, json.dumps(wanted), PROMPT], HF_HUB_CACHE=str(cache))
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["org/folder"] == ["gpt2", "the a2d block", local(run)]
    assert found["org/run"] == found["org/folder"]
    assert found["org/partial"] == ["gpt2", "the run's manifest", local(partial / "run", tokenizer, mask_token_id=320)]
    assert found["org/plain"][:2] == [None, None] and found["org/plain"][2]
    ours = [line for line in outcome.err.splitlines() if line.startswith("[mlx-dllm-plugin]")]
    assert len(ours) == 1 and "warning" in ours[0] and "checkpoint-500" in ours[0]


def test_the_command_line_takes_a_hub_id(cache: Path, data: Path) -> None:
    arguments = ["-m", "mlx_lm", "generate", "--model", "org/run", "--prompt", PROMPT, "-m", 12, "--verbose", "False"]
    outcome = process([*arguments, "--mode", "diffusion"], HF_HUB_CACHE=str(cache))
    assert (outcome.status, outcome.out) == (0, local(data / "a2d" / "gpt2-grow" / "run") + "\n"), outcome.err


def test_info_takes_a_hub_id_of_the_cache(cache: Path) -> None:
    outcome = process(["-m", "mlx_dllm_plugin", "info", "org/run"], HF_HUB_CACHE=str(cache))
    assert outcome.status == 0 and outcome.err == ""
    assert outcome.out.splitlines()[0].endswith(f"models--org--run/snapshots/{REVISION}/model")
    assert "340" in outcome.out


# --- downloads


class Hub:
    """Stands in for snapshot_download: what matches the patterns is copied, and the rest is not there."""

    def __init__(self, source: Path, target: Path):
        self.source, self.target = source, target
        self.calls: list[dict[str, Any]] = []

    def __call__(self, name: str, *, revision: Any = None, allow_patterns: Any = None, **more: Any) -> str:
        self.calls.append({"name": name, "revision": revision, "allow_patterns": allow_patterns, **more})
        for file in self.source.rglob("*"):
            relative = file.relative_to(self.source)
            if file.is_file() and any(fnmatch(relative.as_posix(), pattern) for pattern in allow_patterns or ["*"]):
                (self.target / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, self.target / relative)
        return str(self.target)

    @property
    def downloaded(self) -> set[str]:
        files = (path for path in self.target.rglob("*") if path.is_file())
        return {path.relative_to(self.target).as_posix() for path in files}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    stand_in = Hub(tmp_path / "source", tmp_path / "target")
    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", stand_in)
    yield stand_in


TRAINER_FILES = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}


def test_a_run_of_checkpoints_downloads_the_weights_of_the_latest_only(hub: Hub, goldens: Path) -> None:
    folder = goldens / "a2d" / "gpt2-partial"
    copy_run(folder / "run", hub.source / "run")
    hub.source = hub.source / "run"
    latest = hub.source / "checkpoints" / "checkpoint-500"
    for number in (60, 400):
        shutil.copytree(latest, hub.source / "checkpoints" / f"checkpoint-{number}")
    assert {file.name for file in latest.iterdir()} >= TRAINER_FILES  # there to be downloaded

    config = {"tokenizer": str(folder / "source_tokenizer")}
    model, tokenizer = mlx_lm.load("org/partial", tokenizer_config=config, revision="v2")
    golden = json.loads((folder / "golden.json").read_text())
    case = golden["a2d_sample"][2]
    result = decode(
        model,
        golden["prompts"][case["prompt_index"]]["ids"],
        DecodingOptions(
            canvas_length=case["canvas_len"],
            max_denoising_steps=case["num_steps"],
            mask_token_id=golden["run"]["mask"]["id"],
            stop_at_eos=False,
        ),
    )
    assert result.canvas == case["final_ids"] and len(tokenizer) > 300

    first, second = hub.calls
    assert first["allow_patterns"] == mlx_lm.utils.DEFAULT_ALLOW_PATTERNS
    assert second["name"] == "org/partial" and second["revision"] == first["revision"] == "v2"
    assert "checkpoints/checkpoint-500/model*.safetensors" in second["allow_patterns"]
    assert all(pattern.startswith("checkpoints/checkpoint-500/") for pattern in second["allow_patterns"])
    weights = {name for name in hub.downloaded if name.endswith(".safetensors")}
    assert weights == {"checkpoints/checkpoint-500/model.safetensors"}
    assert not {name for name in hub.downloaded if Path(name).name in TRAINER_FILES}


def test_sharded_weights_of_a_checkpoint_are_all_downloaded(hub: Hub, goldens: Path) -> None:
    import mlx.core as mx

    folder = goldens / "a2d" / "gpt2-partial"
    copy_run(folder / "run", hub.source / "run")
    hub.source = hub.source / "run"
    checkpoint = hub.source / "checkpoints" / "checkpoint-500"
    weights = dict(mx.load(str(checkpoint / "model.safetensors")))
    (checkpoint / "model.safetensors").unlink()
    names, index = sorted(weights), {}
    for number, half in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        mx.save_safetensors(str(checkpoint / file), {name: weights[name] for name in half})
        index.update(dict.fromkeys(half, file))
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    config = {"tokenizer": str(folder / "source_tokenizer")}
    model, _ = mlx_lm.load("org/partial", tokenizer_config=config)
    assert model.diffusion_spec.family == "gpt2"
    assert len({name for name in hub.downloaded if name.endswith(".safetensors")}) == 2


@pytest.mark.parametrize("what", ["run", "run/model"])
def test_what_the_host_downloads_is_enough_for_a_model(hub: Hub, data: Path, what: str) -> None:
    source = data / "a2d" / "gpt2-grow"
    copy_run(source / what, hub.source / "it")
    hub.source = hub.source / "it"
    loaded = mlx_lm.load("org/run")
    assert mlx_lm.generate(*loaded, PROMPT, max_tokens=12) == local(source / "run")
    assert [call["allow_patterns"] for call in hub.calls] == [mlx_lm.utils.DEFAULT_ALLOW_PATTERNS]


def test_an_autoregressive_model_is_downloaded_as_before(hub: Hub, data: Path, tmp_path: Path) -> None:
    hub.source = make_ar_model(tmp_path / "ar", data / "a2d" / "gpt2-grow" / "run" / "model")
    model, _ = mlx_lm.load("org/plain")
    assert getattr(model, "diffusion_spec", None) is None
    assert len(hub.calls) == 1 and hub.calls[0]["allow_patterns"] == mlx_lm.utils.DEFAULT_ALLOW_PATTERNS


def test_a_run_with_nothing_to_load_is_refused(hub: Hub) -> None:
    (hub.source / "manifest.json").write_text('{"a2d_version": "0.1.0", "status": "running"}')
    with pytest.raises(FileNotFoundError, match="nothing to load") as refusal:
        mlx_lm.load("org/empty")
    assert "\n" not in str(refusal.value) and len(hub.calls) == 1


def test_a_hub_id_that_cannot_be_had_is_one_sentence(tmp_path: Path) -> None:
    arguments = ["-m", "mlx_lm", "generate", "--model", "org/absent", "--mode", "diffusion", "--prompt", PROMPT]
    outcome = process(arguments, HF_HUB_CACHE=str(tmp_path))
    assert outcome.status == 1 and outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith(f"{ERROR}org/absent is neither a directory nor a checkpoint that can be had from the hub")
