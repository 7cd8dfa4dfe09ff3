"""Golden run directories of a2d: logits, a2d's own sampler, and mlx-dllm's denoise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

import mlx_dllm_plugin
from mlx_dllm_plugin import DecodingOptions

LOGIT_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Row:
    """One compared case. `problem` is empty when it matched."""

    folder: str
    kind: str
    case: str
    problem: str = ""


def is_run(folder: Path) -> bool:
    return (folder / "run").is_dir() and (folder / "golden.json").is_file()


def replay(folder: Path) -> Iterator[Row]:
    """All cases of one folder."""
    golden = json.loads((folder / "golden.json").read_text())
    model, _ = load_model(folder / "run")
    prompts = [prompt["ids"] for prompt in golden["prompts"]]
    mask = golden["run"]["mask"]["id"]
    yield from _forward(folder, golden, model)
    for number, case in enumerate(golden["a2d_sample"]):
        name = f"a2d_sample[{number}] canvas {case['canvas_len']}, {case['num_steps']} steps"
        if case["target"] != "tokens":
            continue
        result = mlx_dllm_plugin.decode(
            model,
            prompts[case["prompt_index"]],
            DecodingOptions(
                unmasking="a2d",
                canvas_length=case["canvas_len"],
                max_denoising_steps=max(case["num_steps"], 1),  # the reference takes 0 as 1
                confidence_temperature=case["temperature"],
                mask_token_id=mask,
                stop_at_eos=False,
            ),
        )
        yield Row(folder.name, "decode", name, _compare(result, case, prompts[case["prompt_index"]], mask))
    yield from _mlx_dllm(folder, golden, model, prompts, mask)


def _mlx_dllm(folder: Path, golden: dict[str, Any], model: Any, prompts: list[list[int]], mask: int) -> Iterator[Row]:
    """mlx-dllm's own outputs: through its API, and commit by commit through the rule behind it."""
    outputs = golden["mlx_dllm"]
    cases = [(f"mlx_dllm.denoise[{i}]", case) for i, case in enumerate(outputs["denoise"])]
    for name, case in [*cases, ("mlx_dllm.denoise_45_masks", outputs["denoise_45_masks"])]:
        prompt = prompts[case["prompt_index"]]
        canvas = mx.array([[*prompt, *[mask] * (len(case["final_ids"]) - len(prompt))]])
        filled = mlx_dllm_plugin.denoise(model, canvas, mask_token_id=mask, steps=case["steps"])[0].tolist()
        problem = "" if filled == case["final_ids"] else "the ids differ"
        yield Row(folder.name, "decode", f"{name} {case['steps']} steps", problem)
        if case.get("prompt_changed"):
            continue  # masks found by id: there is no such prompt for `decode`, where it is text
        options = DecodingOptions(
            unmasking="mlx_dllm",
            canvas_length=len(case["final_ids"]),
            max_denoising_steps=case["steps"],
            mask_token_id=mask,
            stop_at_eos=False,
        )
        problem = _compare(mlx_dllm_plugin.decode(model, prompt, options), case, prompt, mask)
        yield Row(folder.name, "decode", f"{name} {case['steps']} steps, by the rule", problem)
    has_tokenizer = (folder / "run" / "model").is_dir()
    _, tokenizer, a2d = mlx_dllm_plugin.load(
        folder / "run", tokenizer=None if has_tokenizer else folder / "source_tokenizer"
    )
    for number, case in enumerate(outputs["generate"]):
        if mask in prompts[case["prompt_index"]]:
            continue  # the reference overwrites it in the prompt, which this package never does
        if not outputs["encode_matches_torch"][case["prompt_index"]]:
            continue  # a checkpoint without tokenizer: the reference made up an empty one and returned ''
        text = mlx_dllm_plugin.generate(
            model,
            tokenizer,
            golden["prompts"][case["prompt_index"]]["text"],
            max_new_tokens=case["max_new_tokens"],
            mask_token_id=mask,
            steps=case["steps"],
            a2d=a2d,
        )
        problem = "" if text == case["text"] else f"{text!r}, {case['text']!r} expected"
        yield Row(folder.name, "decode", f"mlx_dllm.generate[{number}] {case['steps']} steps", problem)


def _forward(folder: Path, golden: dict[str, Any], model: Any) -> Iterator[Row]:
    arrays = np.load(folder / "golden.npz")
    for case in golden["forward"]:
        ids, expected = arrays[f"{case['key']}_ids"], arrays[f"{case['key']}_logits"]
        logits = np.array(mlx_dllm_plugin.bidirectional_forward(model, mx.array(ids)[None])[0])
        error = float(np.abs(logits - expected).max())
        problem = "" if error <= LOGIT_TOLERANCE else f"logits differ by {error:.1e}, {LOGIT_TOLERANCE:.0e} allowed"
        yield Row(folder.name, "forward", case["key"], problem)


def _compare(result: Any, case: dict[str, Any], prompt: list[int], mask: int) -> str:
    if result.canvas != case["final_ids"]:
        wrong = sum(a != b for a, b in zip(result.canvas, case["final_ids"], strict=True))
        return f"{wrong} of {len(case['final_ids'])} ids differ"
    after = [ids for ids in case.get("ids_after_step") or () if ids]
    canvas, states = [*prompt, *[mask] * (len(result.canvas) - len(prompt))], []
    for commit in result.commits:
        for position, token in zip(commit.positions, commit.tokens, strict=True):
            canvas[position] = token
        states.append(list(canvas))
    # A reference step that reveals nothing still counts there and is left out here.
    distinct = [ids for i, ids in enumerate(after) if i == 0 or ids != after[i - 1]]
    if distinct and states and distinct != states:
        return f"same ids, but committed in another order ({len(states)} commits, {len(distinct)} expected)"
    if "forwards" in case and result.nfe > case["forwards"]:
        return f"{result.nfe} forwards, {case['forwards']} expected"
    return ""
