"""What a bit width costs: the demo checkpoint's battery on its conversions to 8 … 2 bits.

    python benchmarks/bits.py                      # all builds: a quarter of an hour on two CPU cores
    python benchmarks/bits.py --only "4 bits"
    python benchmarks/bits.py --table              # the table of the result file
    python benchmarks/bits.py --write-battery      # the battery itself: 100 test problems, ten of a task

Each build is made by mlx_lm.convert in groups of 64 and decodes with the profile balanced. Doubled words and words
outside the battery's lexicon are counted by mlx_dllm_plugin.battery; the wrong answers are in the result file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from demo_problems import ADJECTIVES, NOUNS, PLACES, VERBS, Problem, problems  # noqa: E402
from demo_quality import _version, _write, paired  # noqa: E402

from mlx_dllm_plugin import battery, demo_path  # noqa: E402

SEED, COUNT, GROUP = 2, 100, 64
FLOAT = "bfloat16"
BUILDS: dict[str, dict[str, Any]] = {
    FLOAT: {},
    **{f"{bits} bits": {"q_bits": bits} for bits in (8, 6, 5, 4, 3, 2)},
    "4 bits, mixed_8": {"q_bits": 4, "quant_predicate": "mixed_8"},
    "4 bits, mixed_full": {"q_bits": 4, "quant_predicate": "mixed_full"},
}


def right_answers(problem: Problem) -> list[str]:
    """All of them: of a sentence there are as many as the grammar has with the given words."""
    if problem.task != "sentence":
        return [problem.answer]
    every = (
        f"The {adjective} {noun} {verb}s {preposition} the {place}."
        for adjective, noun, verb, (place, preposition) in product(ADJECTIVES, NOUNS, VERBS, PLACES.items())
    )
    return [text for text in every if problem.check(text)]


def battery_text() -> str:
    """The file battery.jsonl of the demo checkpoint."""
    lines = []
    for problem in problems("test", COUNT, SEED):
        right = right_answers(problem)
        answers = {"answer": right[0]} if len(right) == 1 else {"answers": right}
        lines.append(json.dumps({"prompt": problem.prompt, **answers, "task": problem.task}) + "\n")
    return "".join(lines)


def score(build: str) -> dict[str, Any]:
    """What one process does: convert, load, ask. Nothing of it depends on the machine's speed."""
    import mlx_lm
    from mlx_lm.utils import compute_bits_per_weight

    asked = battery.find(demo_path())
    assert asked is not None
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        path = demo_path() / "model"
        if BUILDS[build]:
            path = Path(folder) / "build"
            mlx_lm.convert(
                str(demo_path()), str(path), quantize=True, q_group_size=GROUP, report=False, **BUILDS[build]
            )
        model, tokenizer = mlx_lm.load(str(path))[:2]
        outcome = battery.run(model, tokenizer, asked)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    wrong = [i for i, right in enumerate(outcome.right) if not right]
    return {
        "bytes": size,
        "bits_per_weight": round(compute_bits_per_weight(model), 2),
        "exact": outcome.exact,
        "of": outcome.of,
        "words": outcome.words,
        "doubled": outcome.doubled,
        "unknown": outcome.unknown,
        "without_end_of_sequence": outcome.unfinished,
        "tokens": outcome.tokens,
        "forwards": outcome.forwards,
        "profile": outcome.profile,
        "wrong": wrong,
        "answers": [outcome.texts[i] for i in wrong],
    }


def table(report: dict[str, Any]) -> str:
    """The builds as Markdown, each against the float weights on the same problems."""
    base = report["builds"].get(FLOAT)
    lines = [
        "| build | size | bits per weight | exact | points against bfloat16 (95 %) | words | doubled | unknown "
        "| without end | tokens per forward |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for name, build in report["builds"].items():
        points = "" if base is None or build is base else "{:+.0f} ({:+.0f} to {:+.0f})".format(*paired(build, base))
        cells = (
            name,
            f"{build['bytes'] / 1e6:.2f} MB",
            build["bits_per_weight"],
            f"{build['exact']} of {build['of']}",
            points,
            build["words"],
            build["doubled"],
            build["unknown"],
            build["without_end_of_sequence"],
            f"{build['tokens'] / build['forwards']:.2f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="MLX computes on one core a process (default: 2)")
    parser.add_argument("--only", action="append", choices=list(BUILDS), metavar="BUILD", help="make only this build")
    parser.add_argument("--table", action="store_true", help="print the table of the result file and make nothing")
    parser.add_argument("--write-battery", action="store_true", help="write the demo's battery and make nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "bits.json")
    args = parser.parse_args()
    file = demo_path() / battery.NAME
    if args.write_battery:
        _write(file, battery_text())
        return
    before = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    if args.table:
        print(table(before))
        return

    import mlx.core as mx

    same = {
        "weights_sha256": hashlib.sha256((demo_path() / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "battery_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "group_size": GROUP,
    }
    kept = before.get("builds", {}) if all(before.get(name) == value for name, value in same.items()) else {}
    report: dict[str, Any] = {
        **same,
        "platform": f"{platform.system()} {platform.machine()}, {mx.default_device()}",
        "builds": kept,
    }
    versions = {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mlx-dllm-plugin", "mlx", "mlx-lm", "transformers", "tokenizers")},
    }
    wanted, began = args.only or list(BUILDS), time.perf_counter()
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        jobs = {build: pool.submit(score, build) for build in wanted}
        for build, job in jobs.items():
            kept[build] = {**job.result(), "versions": versions}
            print(
                f"{build}: {kept[build]['exact']} of {kept[build]['of']}, after {time.perf_counter() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            report["builds"] = {name: kept[name] for name in BUILDS if name in kept}
            _write(args.output, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
