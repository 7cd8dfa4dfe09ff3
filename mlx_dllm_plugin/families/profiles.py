"""Profiles: what one word sets beside the family's own values, and what that was measured to cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]

# Of attention to both sides, in place or shifted; measured on the demo checkpoint (benchmarks/demo_quality.py).
BIDIRECTIONAL: Mapping[str, Settings] = {
    "balanced": {"unmasking": "threshold", "threshold": 0.9, "block_length": 32, "cache": "dual", "vicinity": 16},
    "fast": {"unmasking": "threshold", "threshold": 0.8, "block_length": 32, "cache": "dual"},
}
# Keys and values of final blocks are kept exactly, so only the rule trades anything.
BLOCK_CAUSAL: Mapping[str, Settings] = {
    "balanced": {"unmasking": "threshold", "threshold": 0.9},
    "fast": {"unmasking": "threshold", "threshold": 0.8},
}
STANDARD = {"bidirectional": BIDIRECTIONAL, "block_causal": BLOCK_CAUSAL}

# Points of exact answers against one token a step over the same 1,000 problems with the 95 % interval, and tokens per
# forward; from benchmarks/results/demo_quality.json, checked by a test.
COST: Mapping[str, str] = {
    "exact": "as its makers decode",
    "balanced": "on the demo checkpoint +0.2 points (-0.3 to +0.7), 9.55 tokens per forward",
    "fast": "on the demo checkpoint +0.0 points (-0.6 to +0.6), 9.7 tokens per forward",
}
NOT_MEASURED = "not measured"


def cost(profile: str, settings: Settings) -> str:
    """What a profile was measured to cost, of the settings that were measured."""
    if not settings and profile != "exact":
        return "the same as exact"
    measured = profile == "exact" or settings == BIDIRECTIONAL.get(profile)
    return COST[profile] if measured else NOT_MEASURED
