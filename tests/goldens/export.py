"""Write the goldens that ship with the package, out of the golden folders: `python -m tests.goldens.export [GOLDENS]`.

Configurations and weights are copied byte by byte; ids, logits, tokens and the number of forwards are the reference's.
Nothing is computed here and nothing is edited afterwards. GOLDENS is the folder that holds a2d, block and llada_dream
(default: `MLX_DLLM_GOLDENS`, else ../shared/goldens beside the checkout).
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_dllm_plugin.verify.selfcheck import GOLDENS

from . import a2d, cases, llada2

POSITIONS = 6  # of each forward, evenly spread: all of the vocabulary at each
COPIED = ("config.json", "generation_config.json", "model.safetensors")

# Chosen for wide margins, so that float32 decodes the same on any device.
SHIPPED: dict[str, tuple[str, ...]] = {
    "a2d/gpt2-grow": ("a2d_sample[2]", "a2d_sample[18]", "a2d_sample[20]"),
    "a2d/gemma3-grow": ("a2d_sample[2]", "a2d_sample[18]", "a2d_sample[20]"),
    "llada_dream/dream-tiny": (
        "dream_maskgit_plus_new16_steps8",
        "dream_entropy_new16_steps8_topk5",
        "dream_topk_margin_new12_steps24",
        "fastdream_dual_thr0.6",
    ),
    "block/sdar-b4": ("dynamic_thr_0.5", "static_uneven_steps_aligned", "sequential_half_steps", "bigger_block"),
    "block/llada2_moe-v22": ("thr_0.3", "default_straddle", "steps_quarter", "edit_off"),
}

Case = dict[str, Any]


def export(source: Path, target: Path) -> None:
    """
    Write all of ``SHIPPED``.

    Args:
        source: the folder of the golden folders.
        target: the folder to make or to replace.
    """
    shutil.rmtree(target, ignore_errors=True)
    for name, wanted in SHIPPED.items():
        folder, out = source / name, target / Path(name).name
        out.mkdir(parents=True)
        golden = json.loads((folder / "golden.json").read_text())
        arrays = np.load(folder / "golden.npz")
        weights = folder / "run" / "model" if a2d.is_run(folder) else folder
        for file in COPIED:
            (out / file).write_bytes((weights / file).read_bytes())
        make = _OF[name.partition("/")[0]]
        produced_by, tolerance, forward, decode = make(golden, arrays, wanted)
        logits = [rows for _, rows in forward]
        np.save(out / "logits.npy", np.concatenate(logits).astype(np.float32), allow_pickle=False)
        head = {"source": name, "produced_by": produced_by, "tolerance": tolerance}
        (out / "golden.json").write_text(_text(head, {"forward": [case for case, _ in forward], "decode": decode}))


def _text(head: dict[str, Any], lists: dict[str, list[Case]]) -> str:
    """JSON with one case per line."""
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, found in lists.items():
        lines = ",\n".join(f"  {json.dumps(case, separators=(',', ':'))}" for case in found)
        fields.append(f"{json.dumps(name)}: [\n{lines}\n ]")
    return "{\n " + ",\n ".join(fields) + "\n}\n"


def _forward(name: str, ids: np.ndarray, logits: np.ndarray, block_length: int | None) -> tuple[Case, np.ndarray]:
    """A case and its logits [POSITIONS, V], of ids [T] and logits [T, V]."""
    last = len(logits) - 1
    positions = [i * last // (POSITIONS - 1) for i in range(POSITIONS)]
    case = {"name": name, "ids": ids[: last + 1].tolist(), "block_length": block_length, "positions": positions}
    return case, logits[positions]


def _decode(name: str, prompt: Sequence[int], options: Case, tokens: Sequence[int], nfe: int, **more: Any) -> Case:
    given = {key: value for key, value in options.items() if value is not None}
    return {"name": name, "prompt_ids": prompt, "options": given, "tokens": tokens, "nfe": nfe, **more}


def _chosen(found: list[Case], wanted: Sequence[str]) -> Iterator[Case]:
    named = {case["name"]: case for case in found}
    for name in wanted:
        case = named[name]
        if case["target"] != "tokens":
            raise ValueError(f"{name} is no target: {case.get('target_note')}")
        yield case


def _a2d(golden: Case, arrays: Any, wanted: Sequence[str]) -> tuple[Any, float, list[Any], list[Case]]:
    forward = [
        _forward(case["key"], arrays[f"{case['key']}_ids"], arrays[f"{case['key']}_logits"], None)
        for case in golden["forward"]
    ]
    samples = [{**case, "name": f"a2d_sample[{number}]"} for number, case in enumerate(golden["a2d_sample"])]
    decode = []
    for case in _chosen(samples, wanted):
        prompt = golden["prompts"][case["prompt_index"]]["ids"]
        options = {
            "unmasking": "a2d",
            "canvas_length": case["canvas_len"],
            "max_denoising_steps": case["num_steps"],
            "confidence_temperature": case["temperature"],
            "mask_token_id": golden["run"]["mask"]["id"],
            "stop_at_eos": False,
        }
        decode.append(_decode(case["name"], prompt, options, case["final_ids"][len(prompt) :], case["forwards"]))
    return golden["made_by"]["a2d"], a2d.LOGIT_TOLERANCE, forward, decode


def _dream(golden: Case, arrays: Any, wanted: Sequence[str]) -> tuple[Any, float, list[Any], list[Case]]:
    forward = [
        _forward(entry["ids"].removesuffix("_ids"), arrays[entry["ids"]][0], arrays[entry["logits"]][0], None)
        for entry in golden["forward"]
        if not entry["attention_mask"]
    ]
    decode = []
    for case in _chosen(golden["cases"], wanted):
        settings = case["settings"]
        options = {"stop_at_eos": False, "mask_token_id": settings["mask_id"]}
        if settings.get("function") == "diffusion_generate":
            options |= cases.dream_options(settings)
        else:
            options |= cases._accelerated(settings)
        (prompt,), (canvas,) = case["prompt_ids"], case["output_ids"]
        # A step that commits nothing is a forward of the reference, and none here.
        nfe = case["nfe_forward_calls"] - sum(not step for step in case["steps"])
        more = {"produced_by": case["reference"]}
        decode.append(_decode(case["name"], prompt, options, canvas[len(prompt) :], nfe, **more))
    produced_by = {**golden["modeling_reference"], **golden["environment"]}
    return produced_by, cases.LOGIT_TOLERANCE, forward, decode


def _block(golden: Case, arrays: Any, wanted: Sequence[str]) -> tuple[Any, float, list[Any], list[Case]]:
    length = golden["forward"]["block_length"]
    names = sorted(name for name in arrays.files if name.startswith("logits"))
    forward = [_forward(name, arrays[name.replace("logits", "ids")], arrays[name], length) for name in names]
    decode = []
    for case in _chosen(golden["generations"], wanted):
        if golden["family"] == "llada2_moe":
            options, nfe = llada2.options_of(golden, case), case["nfe"]
        else:
            options, nfe = _sdar(golden, case), case["nfe"]["denoise"]
        decode.append(_decode(case["name"], case["prompt_ids"], options, case["output_ids"], nfe))
    return golden["produced_by"], cases.LOGIT_TOLERANCE, forward, decode


def _sdar(golden: Case, case: Case) -> Case:
    settings = case["settings"]
    is_dynamic = settings["remasking_strategy"] == "low_confidence_dynamic"
    return {
        "mask_token_id": golden["ids"]["mask"],
        "eos_token_ids": golden["ids"]["stop_ids"],
        "max_tokens": settings["gen_length"],
        "block_length": settings["block_length"],
        "unmasking": settings["remasking_strategy"],
        "max_denoising_steps": settings["denoising_steps"],
        "threshold": settings["confidence_threshold"] if is_dynamic else None,
    }


_OF: dict[str, Callable[..., tuple[Any, float, list[Any], list[Case]]]] = {
    "a2d": _a2d,
    "llada_dream": _dream,
    "block": _block,
}


def main(argv: Sequence[str] | None = None) -> int:
    from tests.conftest import goldens_root

    parser = argparse.ArgumentParser(prog="python -m tests.goldens.export", description="Write the shipped goldens.")
    parser.add_argument("goldens", nargs="?", type=Path, default=goldens_root())
    args = parser.parse_args(argv)
    missing = [name for name in SHIPPED if not (args.goldens / name / "golden.json").is_file()]
    if missing:
        parser.error(f"{args.goldens} has no {missing[0]}: give the folder that holds a2d, block and llada_dream")
    export(args.goldens, GOLDENS)
    print(f"{GOLDENS}: {sum(file.stat().st_size for file in GOLDENS.rglob('*') if file.is_file()):,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
