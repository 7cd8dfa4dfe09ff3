"""Golden checkpoints in a Hugging Face layout: logits, runs of the families' own samplers, likelihoods."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

import mlx_dllm_plugin
from mlx_dllm_plugin import DecodingOptions, DecodingResult, DiffusionError
from mlx_dllm_plugin.caches import FullCanvas
from mlx_dllm_plugin.decode import Commit
from mlx_dllm_plugin.layerwise import caches
from mlx_dllm_plugin.samplers import RULES, Candidates, Rule

from . import llada2
from .a2d import Row

LOGIT_TOLERANCE = 2e-3
GIVEN = "positions_given"  # a rule made here

Job = tuple[list[list[int]], list[DecodingOptions]]


def is_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "golden.json").is_file()


def replay(folder: Path, kinds: Sequence[str]) -> Iterator[Row]:
    """All cases of one folder that are targets."""
    golden = json.loads((folder / "golden.json").read_text())
    try:
        model, _ = load_model(folder)
    except DiffusionError as error:
        yield Row(folder.name, "-", "-", f"this version cannot express goldens of this family: {error}")
        return
    arrays = np.load(folder / "golden.npz")
    if "forward" in kinds:
        yield from _forward(folder, golden, arrays, model)
    for case in golden.get("cases", []):
        kind = "likelihood" if case["target"] == "likelihood" else "decode"
        if case["target"] == "none" or kind not in kinds:
            continue
        problem = _likelihood(case, arrays, model) if kind == "likelihood" else _case(case, model)
        yield Row(folder.name, kind, case["name"], problem)
    if "decode" in kinds:
        for case in golden.get("generations", []):
            if case["target"] == "tokens":
                yield Row(folder.name, "decode", case["name"], _generation(golden, case, model))


# Logits


def _forward(folder: Path, golden: dict[str, Any], arrays: Any, model: Any) -> Iterator[Row]:
    family = model.diffusion_family

    def compare(name: str, ids: np.ndarray, expected: np.ndarray, caches: list[Any], keep: Any = ...) -> Row:
        logits = np.array(family.head(model, family.hidden(model, mx.array(ids), caches)).astype(mx.float32))
        error = float(np.abs(logits - expected)[keep].max())
        problem = "" if error <= LOGIT_TOLERANCE else f"logits differ by {error:.1e}, {LOGIT_TOLERANCE:.0e} allowed"
        return Row(folder.name, "forward", name, problem)

    def whole(padding: Sequence[int] | None = None, width: int = 0) -> list[Any]:
        return [FullCanvas(padding, width)] * len(model.layers)

    if isinstance(golden["forward"], list):
        for entry in golden["forward"]:
            ids, expected = arrays[entry["ids"]], arrays[entry["logits"]]
            if ids.ndim == 1:
                ids, expected = ids[None], expected[None]
            padding, keep = None, np.ones(ids.shape, dtype=bool)
            if entry.get("attention_mask"):
                keep = arrays[entry["attention_mask"]].astype(bool)
                padding = (~keep).sum(axis=1).tolist()
            yield compare(entry["ids"], ids, expected, whole(padding, ids.shape[1]), keep)
        return
    length = golden["forward"]["block_length"]
    for name in sorted(name for name in arrays.files if name.startswith("logits")):
        number = name[-1]
        ids, expected = arrays[f"ids{number}"][None], arrays[name][None]
        ids = ids[:, : expected.shape[1]]
        bidirectional = name.startswith("logits_bidir")
        yield compare(name, ids, expected, caches(model, ids.shape[1], None if bidirectional else length))


# Cases of llada_dream


def dream_options(settings: dict[str, Any]) -> dict[str, Any]:
    """What Dream's diffusion_generate was told."""
    options = {
        "unmasking": settings["alg"],
        "max_tokens": settings["max_new_tokens"],
        "max_denoising_steps": settings["steps"],
        "top_p": settings["top_p"],
        "top_k": settings["top_k"],
        "eps": settings["eps"],
    }
    return options if settings["alg"] == "origin" else {**options, "alg_temp": settings["alg_temp"]}


def _case(case: dict[str, Any], model: Any) -> str:
    settings, name = case["settings"], case["name"]
    masks = np.array(case.get("attention_mask") or np.ones_like(np.array(case["prompt_ids"])), dtype=bool)
    prompts = [np.array(ids)[mask].tolist() for ids, mask in zip(case["prompt_ids"], masks, strict=True)]
    left = [int(mask.argmax()) for mask in masks]
    function = settings.get("function")
    shared: dict[str, Any] = {"stop_at_eos": False, "mask_token_id": settings["mask_id"]}
    if function == "generate":
        flags = (settings["logits_eos_inf"], settings["confidence_eos_eot_inf"])
        shared |= {
            "unmasking": settings["remasking"],
            "max_tokens": settings["gen_length"],
            "block_length": settings["block_length"],
            "max_denoising_steps": settings["steps"],
            "cfg_scale": settings["cfg_scale"],
            "eos_flags": {(0, 0): "none", (1, 0): "logits", (0, 1): "confidence", (1, 1): "both"}[flags],
        }
    elif function == "diffusion_generate":
        shared |= dream_options(settings)
    elif function == "MDLMSampler.sample":
        shared |= {
            "unmasking": "mdlm",
            "max_tokens": settings["max_new_tokens"],
            "block_length": settings["block_size"],
            "max_denoising_steps": settings["steps"],
            "cfg_scale": settings["cfg_scale"],
            "suppress_tokens": tuple(settings.get("suppress_tokens") or ()) or None,
        }
    else:
        shared |= _accelerated(settings)
    if case["target"] == "positions_given":
        return _positions_given(case, model, prompts[0], shared)
    results = mlx_dllm_plugin.decode(model, prompts, DecodingOptions(**shared))
    wanted = case["output_ids"]
    for i, result in enumerate(results):
        expected = wanted[i][left[i] : left[i] + len(result.canvas)]
        if result.finish_reason == "stop":
            # The reference goes on to the end of the block, and then fills up or leaves masks.
            end = len(prompts[i]) + result.generated_tokens
            result = replace(result, canvas=result.canvas[:end])
            expected = expected[:end]
        if result.canvas != expected:
            wrong = sum(a != b for a, b in zip(result.canvas, expected, strict=True))
            return f"row {i}: {wrong} of {len(expected)} ids differ"
        steps = [[(at - left[i], token) for row, at, token, _ in step if row == i] for step in case["steps"]]
        if shared.get("unmasking") == "wino":
            masked = [tuple(at for at, token in step if token == settings["mask_id"]) for step in steps]
            if masked != [commit.masked for commit in result.commits]:
                return f"row {i}: same ids, but others were masked again"
            steps = [[pair for pair in step if pair[1] != settings["mask_id"]] for step in steps]
        if shared.get("after_eos") == "eos":
            # What the reference writes after the first end of sequence stands among its commits.
            steps = [[pair for pair in step if pair[0] < end] for step in steps]
            result = replace(result, commits=[_before(commit, end) for commit in result.commits])
        problem = _compare_steps(result, steps, int(case["nfe_forward_calls"]))
        if problem:
            return f"row {i}: {problem} ({name})"
    return ""


def _before(commit: Commit, end: int) -> Commit:
    """What was committed before a position."""
    count = sum(at < end for at in commit.positions)
    return replace(commit, positions=commit.positions[:count], tokens=commit.tokens[:count])


def _accelerated(settings: dict[str, Any]) -> dict[str, Any]:
    """The options of a sampler of Fast-dLLM v1, its Dream version, d2Cache or dInfer."""
    shared = {"max_tokens": settings.get("gen_length") or settings["max_new_tokens"]}
    if settings.get("block_length"):
        shared["block_length"] = settings["block_length"]
    if settings.get("cache") in ("prefix", "dual"):
        shared["cache"] = settings["cache"]
    if settings.get("stop_until_eos"):
        shared |= {"stop_at_eos": True, "after_eos": "skip"}
    elif "eos_id" in settings:
        shared["stop_at_eos"] = True
        if "decoder" not in settings and settings.get("early_stop"):
            shared["after_eos"] = "eos"
    if settings.get("eos_id") is not None:
        shared["eos_token_ids"] = (settings["eos_id"],)
    threshold, strategy, decoder = (settings.get(name) for name in ("threshold", "strategy", "decoder"))
    if "alg" in settings:
        return shared | _fast_dllm_dream(settings)
    if strategy == "klass":
        names = {"kl_threshold": "kl_threshold", "kl_history_length": "kl_history", "threshold": "threshold"}
        return shared | {"unmasking": "klass"} | {ours: settings[theirs] for theirs, ours in names.items()}
    if strategy == "wino":
        thresholds = settings["wide_in_thres"], settings["narrow_out_thres"]
        return shared | {"unmasking": "wino", "threshold": thresholds[0], "narrow_out_threshold": thresholds[1]}
    if "gamma" in settings:
        return shared | {"unmasking": "eb", "entropy_bound": settings["gamma"]}
    if decoder == "hierarchy":
        return shared | {"unmasking": "hierarchy", "threshold": threshold, "low_threshold": settings["low_threshold"]}
    if decoder == "credit":
        names = {"credit_alpha": "credit_weight", "boost_gamma": "credit_power", "decay_beta": "credit_decay"}
        return (
            shared
            | {"unmasking": "credit", "threshold": threshold}
            | {ours: settings[theirs] for theirs, ours in names.items()}
        )
    if "factor" in settings:
        rule = "factor" if strategy else "fast_dllm_factor"
        return shared | {"unmasking": rule, "factor": settings["factor"]}
    if threshold is not None:
        return shared | {"unmasking": "dinfer_threshold" if decoder else "threshold", "threshold": threshold}
    if strategy:
        return shared | {"unmasking": "threshold", "threshold": 2.0}
    return shared | {"unmasking": "low_confidence", "max_denoising_steps": settings["steps"]}


def _fast_dllm_dream(settings: dict[str, Any]) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    if "dual_cache" in settings:
        shared = {"cache": "dual" if settings["dual_cache"] else "prefix", "first_token": "stale"}
    if settings["alg"] != "confidence_threshold":
        return shared | {"unmasking": settings["alg"], "max_denoising_steps": settings["steps"]}
    shared["threshold"] = settings["threshold"]
    if shared.get("cache"):
        return shared | {"unmasking": "threshold"}
    return shared | {"unmasking": "confidence_threshold", "max_denoising_steps": settings["steps"]}


def _compare_steps(
    result: DecodingResult, steps: list[list[tuple[int, int]]], calls: int | None = None, empty: int | None = None
) -> str:
    """Commit by commit, and the number of forwards: the reference's, without those that commit nothing."""
    expected = [sorted(step) for step in steps if step]
    found = [sorted(zip(c.positions, c.tokens, strict=True)) for c in result.commits if c.positions]
    if result.finish_reason == "stop":
        expected = expected[: len(found)]
    if found != expected:
        first = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(expected))
        return f"same ids, but commit {first} differs ({len(found)} commits, {len(expected)} expected)"
    empty = sum(not step for step in steps) if empty is None else empty
    if calls is not None and result.finish_reason != "stop" and result.nfe != calls - empty:
        return f"{result.nfe} forwards, {calls - empty} expected"
    return ""


def _positions_given(case: dict[str, Any], model: Any, prompt: list[int], shared: dict[str, Any]) -> str:
    """A run whose positions are random: they are forced, the tokens are compared."""
    steps = [[at for _, at, _, _ in step] for step in case["steps"]]
    step = iter(steps)
    length = len(prompt) + shared["max_tokens"]

    def confidence(candidates: Candidates) -> mx.array:
        wanted = next(step)
        first = length - candidates.tokens.shape[1]
        return mx.array([[float(first + i in wanted) for i in range(candidates.tokens.shape[1])]])

    rule = Rule(
        name=GIVEN,
        about="positions of a recorded run",
        schedule=lambda masks, count, values: [len(at) or 0.5 for at in steps],
        confidence=confidence,
        select=lambda found, number, values: (found > 0.5).sum(axis=1, keepdims=True),
        uses=RULES.get("origin").uses,
        defaults=RULES.get("origin").defaults,
        filters=RULES.get("origin").filters,
    )
    RULES.register(rule)
    try:
        result = mlx_dllm_plugin.decode(model, prompt, DecodingOptions(**{**shared, "unmasking": GIVEN}))
    finally:
        RULES.unregister(GIVEN)
    if result.canvas != case["output_ids"][0]:
        return "the ids differ"
    wanted = [[(at, token) for _, at, token, _ in step] for step in case["steps"]]
    return _compare_steps(result, wanted, int(case["nfe_forward_calls"]), empty=0)


# Generations of block


def _generation(golden: dict[str, Any], case: dict[str, Any], model: Any) -> str:
    family = golden["family"]
    if family == "a2d-qwen3":
        return _dllm(golden, case, model)
    if family == "llada2_moe":
        return llada2.generation(golden, case, model)
    settings = case["settings"]
    shared: dict[str, Any] = {
        "mask_token_id": golden["ids"]["mask"],
        "eos_token_ids": tuple(golden["ids"]["stop_ids"]),
        "max_tokens": len(case["output_ids"]),
        "block_length": settings.get("block_length") or settings.get("block_size"),
    }
    if family == "sdar":
        shared |= {"unmasking": settings["remasking_strategy"], "max_denoising_steps": settings["denoising_steps"]}
        if settings["remasking_strategy"] == "low_confidence_dynamic":
            shared["threshold"] = settings["confidence_threshold"]
    elif family == "fast_dllm_v2":
        shared |= {
            "cache": "dual" if settings["use_block_cache"] else "block",
            "unmasking": "threshold",
            "threshold": settings["threshold"],
            "sub_block_length": settings["small_block_size"],
        }
    else:
        return "this version cannot express goldens of this family"
    result = mlx_dllm_plugin.decode(model, case["prompt_ids"], DecodingOptions(**shared))
    tokens = list(result.tokens)
    if result.finish_reason == "stop":
        tokens.append(result.canvas[len(case["prompt_ids"]) + len(tokens)])
    if tokens != case["output_ids"]:
        wrong = sum(a != b for a, b in zip(tokens, case["output_ids"], strict=False))
        return f"{wrong} of {len(case['output_ids'])} ids differ, {len(tokens)} given"
    before = [state for state in _blocks_before(result, case["prompt_ids"], shared, golden)]
    wanted = [entry for entry in case["history"] if not (entry[2] if family == "sdar" else entry[0] == "store")]
    for number, (found, entry) in enumerate(zip(before, wanted, strict=False)):
        start = entry[1] if entry[0] == "sub" else 0  # of a part of the block, the part alone is recorded
        if found[start : start + len(entry[-1 if family != "sdar" else 1])] != entry[-1 if family != "sdar" else 1]:
            return f"same ids, but forward {number} saw another block"
    nfe = case["nfe"]
    allowed = nfe.get("denoise") or nfe["denoise_block"] + nfe["denoise_sub_block"] + nfe["store"]
    if len(case["prompt_ids"]) % shared["block_length"] == 0:
        allowed += nfe["prefill"]  # it hands over the first token of the output, which counts as denoising here
    return f"{result.nfe} forwards, {allowed} expected" if result.nfe > allowed else ""


def _blocks_before(
    result: DecodingResult, prompt: list[int], shared: dict[str, Any], golden: dict[str, Any]
) -> Iterator[list[int]]:
    """What each denoising forward saw of its block. A hand-over forward (one that commits the first token of a block
    out of the one before) sees no mask, and is left out as the reference's store forwards are."""
    length, mask = shared["block_length"], shared["mask_token_id"]
    canvas = [*prompt, *[mask] * (len(result.canvas) + length)]
    for commit in result.commits:
        start = commit.positions[0] // length * length
        is_hand_over = golden["family"] == "fast_dllm_v2" and commit.positions == (start,)
        if not is_hand_over:
            yield canvas[start : start + length]
        for position, token in zip(commit.positions, commit.tokens, strict=True):
            canvas[position] = token


def _dllm(golden: dict[str, Any], case: dict[str, Any], model: Any) -> str:
    settings, sampler = case["settings"], case["sampler"]
    shared: dict[str, Any] = {
        "unmasking": "mdlm",
        "stop_at_eos": False,
        "mask_token_id": golden["ids"]["mask"],
        "alpha_schedule": settings["alpha_scheduler"],
        "cfg_scale": settings.get("cfg_scale"),
        "cfg_keep_tokens": tuple(settings.get("cfg_keep_tokens") or ()) or None,
        "suppress_tokens": tuple(settings.get("suppress_tokens") or ()) or None,
        "begin_suppress_tokens": tuple(settings.get("begin_suppress_tokens") or ()) or None,
        "block_length": settings["block_size"],
        "max_denoising_steps": settings.get("steps"),
        "logits": "shifted" if settings.get("right_shift_logits") else None,
    }
    rows = case["inputs"]
    if sampler == "infill":
        return _infill(golden, case, model, shared)
    new = settings["max_new_tokens"]
    shared["max_tokens"] = new
    if sampler == "bd3lm":
        blocks = -(-new // settings["block_size"])
        per_block = settings.get("steps_per_block") or -(-settings["steps"] // blocks)
        shared |= {"attention": "block_causal", "max_denoising_steps": per_block}
    else:
        shared["attention"] = "bidirectional"
    results = mlx_dllm_plugin.decode(model, rows, DecodingOptions(**shared))
    for i, result in enumerate(results):
        # BD3LM stops after the block in which the last row ends.
        if result.tokens[: len(case["outputs"][i])] != case["outputs"][i]:
            return f"row {i}: the ids differ"
        pad = _padding(case, rows, i) if sampler == "bd3lm" else 0
        problem = _compare_steps(_cut(result, len(case["outputs"][i])), _history(case, i, pad))
        if problem:
            return f"row {i}: {problem}"
        allowed = case["nfe"].get("denoise", case["nfe"]["forwards"])
        if len(case["outputs"][i]) == new and result.nfe > allowed:
            return f"row {i}: {result.nfe} forwards, {allowed} expected"
    return ""


def _padding(case: dict[str, Any], rows: list[list[int]], i: int) -> int:
    return len(case["final_canvas"][i]) - len(rows[i]) - len(case["outputs"][i])


def _history(case: dict[str, Any], row: int, padding: int = 0) -> list[list[tuple[int, int]]]:
    return [[(at - padding, token) for at, token in step[row]] for step in case["history"]]


def _cut(result: DecodingResult, tokens: int) -> DecodingResult:
    """The result with the commits of its first tokens only."""
    end = result.prompt_tokens + tokens
    return replace(result, commits=[c for c in result.commits if c.positions and c.positions[-1] < end])


def _infill(golden: dict[str, Any], case: dict[str, Any], model: Any, shared: dict[str, Any]) -> str:
    rows, mask = case["inputs"], golden["ids"]["mask"]
    longest = max(len(row) for row in rows)
    length = shared.pop("block_length")
    results = []
    for row in rows:
        own = dict(shared)
        if length:
            # The reference shares the steps among the blocks of its longest row.
            per_block = -(-own["max_denoising_steps"] // -(-longest // length))
            own |= {"block_length": length, "max_denoising_steps": per_block * -(-len(row) // length)}
        masked = [token == mask for token in row]
        results.append(mlx_dllm_plugin.infill(model, row, masked, DecodingOptions(**own)))
    for i, result in enumerate(results):
        if result.canvas != case["outputs"][i][: len(result.canvas)]:
            return f"row {i}: the ids differ"
        problem = _compare_steps(result, _history(case, i), case["nfe"]["forwards"])
        if problem:
            return f"row {i}: {problem}"
    return ""


# Likelihoods


# Of log-probabilities; guidance multiplies the error of the logits.
LIKELIHOOD_TOLERANCE = {False: 2e-4, True: 6e-4}


def _likelihood(case: dict[str, Any], arrays: Any, model: Any) -> str:
    """The exact bound and what it is made of, and the estimates of recorded batches."""
    settings = case["settings"]
    tolerance = LIKELIHOOD_TOLERANCE[bool(settings["cfg_scale"])]
    shared = {"cfg_scale": settings["cfg_scale"], "mask_token_id": settings["mask_id"]}
    prompt, target = case["prompt_ids"], case["answer_ids"]
    exact = mlx_dllm_plugin.score(model, prompt, target, method="exact", **shared)
    subsets = exact.subsets
    pairs = [
        ("exact_elbo", exact.log_likelihood, case["exact_elbo"]),
        ("order_mixture_loglik", subsets.order_mixture, case["order_mixture_loglik"]),
        ("left_to_right_loglik", subsets.left_to_right, case["left_to_right_loglik"]),
        *zip(["exact_by_mask_count"] * len(target), subsets.by_mask_count, case["exact_by_mask_count"], strict=True),
    ]
    place = {tuple(np.flatnonzero(mask).tolist()): i for i, mask in enumerate(subsets.masks)}
    for masked, wanted in case["subset_logprobs"]:
        found = subsets.logprobs[place[tuple(masked)]]
        pairs += [("subset_logprobs", float(found[i]), wanted[i]) for i in masked]
    for what, value, wanted in pairs:
        if abs(value - wanted) > tolerance:
            return f"{what} is {value:.6f}, {wanted:.6f} expected"
    for run in case["mc_runs"]:
        name = run.get("batches_in_npz")
        if name is None:
            continue
        value = mlx_dllm_plugin.score(model, prompt, target, method="batches", batches=arrays[name], **shared)
        if abs(value.log_likelihood / run["value"] - 1) > 3e-6:
            return f"the recorded batches give {value.log_likelihood:.6f}, {run['value']:.6f} expected"
    return ""
