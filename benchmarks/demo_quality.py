"""Score the demo checkpoint with this package's own engine on problems it has not seen.

    python benchmarks/demo_quality.py                      # 1,000 test problems: hours on two CPU cores
    python benchmarks/demo_quality.py --only "profile fast" --only threshold/dual
    python benchmarks/demo_quality.py --table              # the tables of the result file

On the checkpoint's own canvas of 64 tokens: one token a step (every step commits the most confident position
of the canvas, as a2d does), threshold 0.9, and the profiles, on all problems. On the first 200 of them every rule with
every cache, in blocks of 16 where the rule has blocks; rules with a schedule take 12 steps. Tokens per forward are all
tokens up to and including the first end of sequence, divided by all forwards; columns per token are all columns of the
canvas that were computed, divided by the same tokens. Runs that are not scored again are kept when they are of the same
weights and problems. Writes benchmarks/results/demo_quality.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from demo_problems import SPLITS, TASKS, Problem, check_disjoint, problems

import mlx_dllm_plugin
from mlx_dllm_plugin import DecodingOptions
from mlx_dllm_plugin.samplers import RULES as RULE_TABLE

ROOT = Path(__file__).resolve().parent.parent
BASE = "one token a step"
RULES = ("a2d", "mlx_dllm", "low_confidence", "random", "origin", "maskgit_plus", "topk_margin", "entropy", "mdlm",
         "sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded", "threshold",
         "confidence_threshold", "dinfer_threshold", "factor", "fast_dllm_factor", "eb", "klass", "hierarchy", "credit",
         "wino", "prophet", "local_leap")  # fmt: skip
FIRST, BLOCK, STEPS = 200, 16, 12


def options_of(rule: str, cache: str) -> DecodingOptions:
    """The options of a rule with a cache."""
    uses = RULE_TABLE.get(rule).uses
    values: dict[str, Any] = {"unmasking": rule, "cache": cache, "seed": 0}
    if "block_length" in uses:
        values["block_length"] = BLOCK
    if "max_denoising_steps" in uses:
        values["max_denoising_steps"] = STEPS
    return DecodingOptions(**values)


def runs() -> dict[str, DecodingOptions]:
    """All runs by name."""
    own = {
        BASE: DecodingOptions(unmasking="a2d", max_denoising_steps=256),
        "threshold 0.9": DecodingOptions(unmasking="threshold", threshold=0.9),
        "profile balanced": DecodingOptions(profile="balanced"),
        "profile fast": DecodingOptions(profile="fast"),
    }
    every = {f"{rule}/{cache}": options_of(rule, cache) for rule in RULES for cache in ("none", "prefix", "dual")}
    dual = every["threshold/dual"]
    more = {
        "threshold/dual, vicinity 16": replace(dual, vicinity=16),
        "threshold/dual, refresh interval 2": replace(dual, refresh_interval=2),
    }
    return {**own, **every, **more}


def score(model: Any, tokenizer: Any, found: list[Problem], options: DecodingOptions, batch: int) -> dict[str, Any]:
    """Decode all problems with one rule; prompts of similar length share a batch."""
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p.prompt}], add_generation_prompt=True)
        for p in found
    ]
    order = sorted(range(len(found)), key=lambda i: len(prompts[i]))
    right = dict.fromkeys(TASKS, 0)
    tokens = forwards = columns = unfinished = 0
    wrong: list[int] = []
    began = time.perf_counter()
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        for i, result in zip(rows, mlx_dllm_plugin.decode(model, [prompts[i] for i in rows], options), strict=True):
            tokens += result.generated_tokens
            forwards += result.nfe
            columns += result.columns
            unfinished += result.finish_reason != "stop"
            if result.finish_reason == "stop" and found[i].check(tokenizer.decode(result.tokens)):
                right[found[i].task] += 1
            else:
                wrong.append(i)
    return {
        "exact": sum(right.values()),
        "of": len(found),
        "tokens": tokens,
        "forwards": forwards,
        "columns": columns,
        "without_end_of_sequence": unfinished,
        "seconds": round(time.perf_counter() - began, 1),
        "tasks": right,
        "wrong": sorted(wrong),
    }


def score_share(model: Path, split: str, count: int, seed: int, run: str, batch: int, part: slice) -> dict[str, Any]:
    """What one process does: load the model and score its share of the problems."""
    import mlx_lm

    loaded, tokenizer = mlx_lm.load(str(model))[:2]
    report = score(loaded, tokenizer, problems(split, count, seed)[part], runs()[run], batch)
    return {**report, "wrong": [part.start + i for i in report["wrong"]]}


def size_of(run: str, count: int) -> int:
    """How many of the problems a run gets: the first of them."""
    return min(FIRST, count) if "/" in run else count


def merged(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of the shares: a row's result does not depend on the rows it is decoded with."""
    total = {key: sum(share[key] for share in shares) for key in ("exact", "of", "tokens", "forwards", "columns")}
    return {
        **total,
        "exact_percent": round(100 * total["exact"] / total["of"], 2),
        "tokens_per_forward": round(total["tokens"] / total["forwards"], 3),
        "columns_per_token": round(total["columns"] / total["tokens"], 2),
        "without_end_of_sequence": sum(share["without_end_of_sequence"] for share in shares),
        "seconds": max(share["seconds"] for share in shares),
        "tasks": {task: sum(share["tasks"][task] for share in shares) for task in TASKS},
        "wrong": [number for share in shares for number in share["wrong"]],
    }


def paired(run: dict[str, Any], base: dict[str, Any]) -> tuple[float, float, float]:
    """How many points a run is above the base on the same problems, and the 95 % interval of that (Agresti and Min
    2005: half a problem is added to each of the four cells)."""
    wrong, before = set(run["wrong"]), {number for number in base["wrong"] if number < run["of"]}
    gained, lost = len(before - wrong), len(wrong - before)
    n, up, down = run["of"] + 2, gained + 0.5, lost + 0.5
    middle = (up - down) / n
    half = 1.96 * math.sqrt((up + down) / n - middle**2) / math.sqrt(n)
    return tuple(round(100 * x, 2) for x in ((gained - lost) / run["of"], middle - half, middle + half))  # type: ignore[return-value]


def every_table(report: dict[str, Any]) -> str:
    """All runs as Markdown, each against one token a step."""
    base = report["rules"].get(BASE)
    lines = [
        "| run | problems | exact | points against one token a step (95 %) | tokens per forward | columns per token |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name, run in report["rules"].items():
        points = "" if base is None or run is base else "{:+.1f} ({:+.1f} to {:+.1f})".format(*paired(run, base))
        columns = run.get("columns_per_token", "")
        lines.append(
            f"| {name} | {run['of']} | {run['exact_percent']} % | {points} | {run['tokens_per_forward']} | {columns} |"
        )
    return "\n".join(lines)


def task_table(report: dict[str, Any]) -> str:
    """Exact answers per task as Markdown, of the runs on the checkpoint's own canvas."""
    rules = {name: run for name, run in report["rules"].items() if "/" not in name}
    rows = [["task", "problems", *rules], ["---", *["--:"] * (1 + len(rules))]]
    rows += [
        [task, count, *(run["tasks"][task] for run in rules.values())] for task, count in report["problems"].items()
    ]
    rows.append(["exact", report["count"], *(f"{run['exact_percent']} %" for run in rules.values())])
    rows.append(["tokens per forward", "", *(run["tokens_per_forward"] for run in rules.values())])
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "mlx_dllm_plugin" / "demo" / "run")
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2, help="MLX computes on one core a process (default: 2)")
    parser.add_argument(
        "--only", action="append", choices=list(runs()), metavar="RUN", help="score this run, such as klass/dual"
    )
    parser.add_argument("--table", action="store_true", help="print the tables of the result file and score nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "demo_quality.json")
    args = parser.parse_args()
    before = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    if args.table:
        print(task_table(before), every_table(before), sep="\n\n")
        return

    import mlx.core as mx

    found = problems(args.split, args.count, args.seed)
    weights = hashlib.sha256((args.model / "model" / "model.safetensors").read_bytes()).hexdigest()
    same = {"split": args.split, "seed": args.seed, "count": len(found), "weights_sha256": weights}
    kept = before.get("rules", {}) if all(before.get(name) == value for name, value in same.items()) else {}
    report: dict[str, Any] = {
        **same,
        "problems": {task: sum(p.task == task for p in found) for task in TASKS},
        "disjoint_hashes": check_disjoint(),
        "platform": f"{platform.system()} {platform.machine()}, {mx.default_device()}",
        "rules": {},
    }
    versions = {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mlx-dllm-plugin", "mlx", "mlx-lm", "transformers", "tokenizers")},
    }
    wanted = args.only or list(runs())
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        jobs = {
            run: [
                pool.submit(score_share, args.model, args.split, args.count, args.seed, run, args.batch, part)
                for part in _parts(size_of(run, len(found)), args.processes)
            ]
            for run in wanted
        }
        for run in wanted:
            kept[run] = {**merged([job.result() for job in jobs[run]]), "versions": versions}
            print(
                f"{run}: {kept[run]['exact']} of {kept[run]['of']}, {kept[run]['seconds']} s",
                file=sys.stderr,
                flush=True,
            )
            report["rules"] = {name: kept[name] for name in runs() if name in kept}
            _write(args.output, json.dumps(report, indent=1) + "\n")
    print(task_table(report), every_table(report), sep="\n\n")


def _parts(count: int, processes: int) -> list[slice]:
    share = -(-count // processes)
    return [slice(start, min(start + share, count)) for start in range(0, count, share)]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    main()
