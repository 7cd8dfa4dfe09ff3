"""What the caches save: the demo checkpoint fills a canvas of 256 tokens with each of them, in turn.

    python benchmarks/caches.py            # ratios to the cache `none` of the same round, median of 3 rounds

The canvas is filled to its end (stop_at_eos is off), in blocks of 32, one token a step, so that all caches do the same
number of forwards. Ratios of one machine say little about another: where weights are read from memory, a forward of a
few columns costs nearly as much as one of many.
"""

from __future__ import annotations

import argparse
import statistics
import time

import mlx_lm

from mlx_dllm_plugin import DecodingOptions, DecodingResult, decode, demo_path

PROMPT = "Sort the words: sun ant cup map"
CACHES = {
    "none": {},
    "prefix": {"cache": "prefix"},
    "dual": {"cache": "dual"},
    "dual, vicinity 16": {"cache": "dual", "vicinity": 16},
    "dual, refresh interval 4": {"cache": "dual", "refresh_interval": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threshold", type=float, default=1.1, help="above 1: one token a step")
    args = parser.parse_args()
    model, tokenizer = mlx_lm.load(str(demo_path()))[:2]
    message = {"role": "user", "content": PROMPT}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    common = {"unmasking": "threshold", "threshold": args.threshold, "block_length": 32, "canvas_length": 256}
    ratios: dict[str, list[float]] = {name: [] for name in CACHES}
    results: dict[str, DecodingResult] = {}
    for _ in range(args.rounds):
        seconds = {}
        for name, own in CACHES.items():
            began = time.perf_counter()
            results[name] = decode(model, prompt, DecodingOptions(**common, **own, stop_at_eos=False))
            seconds[name] = time.perf_counter() - began
        for name, value in seconds.items():
            ratios[name].append(seconds["none"] / value)
    print("| cache | times faster | forwards | columns computed |\n| --- | --: | --: | --: |")
    for name, result in results.items():
        print(f"| {name} | {statistics.median(ratios[name]):.2f} | {result.nfe} | {result.columns} |")


if __name__ == "__main__":
    main()
