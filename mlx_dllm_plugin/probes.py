"""Canvases to compare two models on: texts of many kinds, half masked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .errors import DiffusionError
from .layerwise import block_of
from .spec import DiffusionSpec

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it rests by the river until the evening comes.\n"
    "Question: what is the capital of France? Answer: the capital of France is Paris, a city on the Seine.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    '    return total / len(values) if values else float("nan")\n',
    '{"name": "Ada", "age": 36, "city": "London", "tags": ["maths", "engines"]}\n12 + 30 = 42, 7 * 8 = 56, 2^10 = 1024',
    "Die Würde des Menschen ist unantastbar. L'homme est né libre, et partout il est dans les fers. 北京欢迎你。",
)


def canvases(
    spec: DiffusionSpec,
    mask_token_id: int,
    tokenizer: Any = None,
    *,
    rows: int = 4,
    columns: int | None = None,
    seed: int = 0,
    texts: tuple[str, ...] = TEXTS,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Token ids [rows, columns] and which of them are masked: half of them, drawn.

    Args:
        spec: of the checkpoint: the canvas is shorter where its context is, and whole blocks where it has them. The
            mask and tokens that edit stand nowhere else.
        tokenizer: of the texts; None: tokens that are drawn.
        columns: at most; default: 64 or one block, within the context.
        texts: a row each, from the first on, repeated to its length.

    Raises:
        DiffusionError: a canvas that no block fits into or that is longer than the context, or a text without a token.
    """
    step = math.lcm(block_of(spec) or 1, spec.routing_block or 1)
    context = spec.context_length
    if columns is not None and context is not None and columns > context:
        raise DiffusionError(f"A canvas has at most the {context} columns of the context here, got {columns}.")
    columns = min(max(64, step), context or max(64, step)) if columns is None else columns
    if columns < max(step, 2):
        raise DiffusionError(f"A canvas needs {max(step, 2)} columns here or more, for one whole block: got {columns}.")
    columns -= columns % step
    random = np.random.default_rng(seed)
    unusable = {mask_token_id, *(spec.edit_token_ids or ())}
    usable = np.setdiff1d(np.arange(spec.vocab_size), list(unusable))
    ids = usable[random.integers(0, len(usable), (rows, columns))]
    for i in range(rows if tokenizer is not None else 0):
        text = texts[i % len(texts)]
        found = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        found = [token for token in found if 0 <= token < spec.vocab_size and token not in unusable]
        if not found:
            raise DiffusionError(f"The tokenizer makes no token of the text {text[:40]!r}: give another one.")
        ids[i] = np.resize(found, columns)
    masked = np.zeros((rows, columns), dtype=bool)
    for row in masked:
        row[random.permutation(columns - 1)[: columns // 2] + 1] = True  # shifted logits never predict the first
    ids[masked] = mask_token_id
    return ids, masked
