"""Score the demo checkpoint with this package's own engine on problems it has not seen.

    python benchmarks/demo_quality.py                      # 1,000 test problems, about 30 minutes on two CPU cores

Two rules: one token a step (every step commits the most confident position of the canvas) and threshold 0.9. Tokens
per forward are all tokens up to and including the first end of sequence, divided by all forwards. Writes
benchmarks/results/demo_quality.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from demo_problems import SPLITS, TASKS, Problem, check_disjoint, problems

import mlx_dllm_plugin
from mlx_dllm_plugin import DecodingOptions

ROOT = Path(__file__).resolve().parent.parent
RULES = {
    "one token a step": DecodingOptions(unmasking="a2d", max_denoising_steps=256),
    "threshold 0.9": DecodingOptions(unmasking="threshold", threshold=0.9),
}


def score(model: Any, tokenizer: Any, found: list[Problem], options: DecodingOptions, batch: int) -> dict[str, Any]:
    """Decode all problems with one rule; prompts of similar length share a batch."""
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p.prompt}], add_generation_prompt=True)
        for p in found
    ]
    order = sorted(range(len(found)), key=lambda i: len(prompts[i]))
    right = dict.fromkeys(TASKS, 0)
    tokens = forwards = unfinished = 0
    wrong: list[dict[str, str]] = []
    began = time.perf_counter()
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        for i, result in zip(rows, mlx_dllm_plugin.decode(model, [prompts[i] for i in rows], options), strict=True):
            text = tokenizer.decode(result.tokens)
            tokens += result.generated_tokens
            forwards += result.nfe
            unfinished += result.finish_reason != "stop"
            if result.finish_reason == "stop" and found[i].check(text):
                right[found[i].task] += 1
            else:
                wrong.append({"prompt": found[i].prompt, "expected": found[i].answer, "got": text})
        print(f"\r{start + len(rows)} of {len(order)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {
        "exact": sum(right.values()),
        "of": len(found),
        "tokens": tokens,
        "forwards": forwards,
        "without_end_of_sequence": unfinished,
        "seconds": round(time.perf_counter() - began, 1),
        "tasks": right,
        "wrong": wrong,
    }


def score_share(model: Path, split: str, count: int, seed: int, rule: str, batch: int, part: slice) -> dict[str, Any]:
    """What one process does: load the model and score its share of the problems."""
    import mlx_lm

    loaded, tokenizer = mlx_lm.load(str(model))[:2]
    return score(loaded, tokenizer, problems(split, count, seed)[part], RULES[rule], batch)


def merged(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of the shares: a row's result does not depend on the rows it is decoded with."""
    total = {key: sum(share[key] for share in shares) for key in ("exact", "of", "tokens", "forwards")}
    return {
        **total,
        "exact_percent": round(100 * total["exact"] / total["of"], 2),
        "tokens_per_forward": round(total["tokens"] / total["forwards"], 3),
        "without_end_of_sequence": sum(share["without_end_of_sequence"] for share in shares),
        "seconds": max(share["seconds"] for share in shares),
        "tasks": {task: sum(share["tasks"][task] for share in shares) for task in TASKS},
        "wrong": [entry for share in shares for entry in share["wrong"]],
    }


def table(report: dict[str, Any]) -> str:
    """The per-task table as Markdown."""
    rules = report["rules"]
    rows = [["task", "problems", *rules], ["---", *["--:"] * (1 + len(rules))]]
    for task, count in report["problems"].items():
        rows.append([task, count, *(rule["tasks"][task] for rule in rules.values())])
    rows.append(["exact", report["count"], *(f"{rule['exact_percent']} %" for rule in rules.values())])
    rows.append(["tokens per forward", "", *(rule["tokens_per_forward"] for rule in rules.values())])
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


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
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "demo_quality.json")
    args = parser.parse_args()

    import mlx.core as mx

    disjoint = check_disjoint()
    found = problems(args.split, args.count, args.seed)
    share = -(-len(found) // args.processes)
    parts = [slice(start, start + share) for start in range(0, len(found), share)]
    scored = {}
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for rule in RULES:
            common = (args.model, args.split, args.count, args.seed, rule, args.batch)
            jobs = [pool.submit(score_share, *common, part) for part in parts]
            scored[rule] = merged([job.result() for job in jobs])
    weights = args.model / "model" / "model.safetensors"
    report: dict[str, Any] = {
        "split": args.split,
        "seed": args.seed,
        "count": len(found),
        "problems": {task: sum(p.task == task for p in found) for task in TASKS},
        "disjoint_hashes": disjoint,
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("mlx-dllm-plugin", "mlx", "mlx-lm", "transformers", "tokenizers")},
        },
        "platform": f"{platform.system()} {platform.machine()}, {mx.default_device()}",
        "rules": scored,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
