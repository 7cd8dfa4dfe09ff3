"""mlx-dllm's ``denoise`` and ``generate``, over the engine's one loop.

They keep mlx-dllm's meaning: its schedule and suppression (the rule ``mlx_dllm``), greedy ids, masks found by id in
``denoise``, and the a2d block's ``canvas_len`` read as the number of new tokens. ``mlx_lm.generate`` and
``mlx_dllm_plugin.decode`` use a2d's own sampler, where ``canvas_len`` is the total.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .decode import Finished, bidirectional_forward, run
from .errors import DiffusionError
from .families import a2d as a2d_families
from .options import DecodingOptions
from .plan import plan_slots
from .runtime import A2DConfig
from .spec import DiffusionSpec, check_mask_token_id

__all__ = ["bidirectional_forward", "denoise", "generate"]


def denoise(
    model: Any,
    canvas: mx.array,
    *,
    mask_token_id: int | None = None,
    steps: int | None = None,
    logit_shift: bool = False,
    a2d: A2DConfig | None = None,
    masked: mx.array | None = None,
) -> mx.array:
    """
    Fill the masks of a canvas, the most confident first.

    Args:
        model: an mlx-lm model; only ``model.args.vocab_size`` and ``bidirectional_forward`` are used.
        canvas: token ids [B, T]; a position is masked when it holds ``mask_token_id``.
        mask_token_id: default: the a2d block's.
        steps: denoising steps; default: the a2d block's ``num_steps``, else one token a step.
        logit_shift: the logits of position i - 1 predict token i, as in Dream.
        masked: which positions are masked [B, T], instead of finding them by id: a mask id in a prompt is text then.

    Returns:
        mx.array: the filled canvas [B, T].

    Raises:
        DiffusionError: a ValueError about mask_token_id, steps, the shape, or a masked first token with logit_shift.
    """
    mask = _mask_of(mask_token_id, a2d)
    steps = _positive("steps", steps, (a2d.sampler or {}).get("num_steps") if a2d else None)
    if not isinstance(canvas, mx.array) or canvas.ndim != 2:
        shape = f"shape {canvas.shape}" if isinstance(canvas, mx.array) else type(canvas).__name__
        raise DiffusionError(f"canvas must be an array of token ids [batch, length], got {shape}.")
    vocab_size = model.args.vocab_size
    check_mask_token_id(mask, vocab_size, "the caller")
    if masked is None:
        masked = canvas == mask
    elif masked.shape != canvas.shape:
        raise DiffusionError(f"masked must have the canvas's shape {canvas.shape}, got {masked.shape}.")
    slots = [[i for i, is_masked in enumerate(row) if is_masked] for row in np.array(masked)]
    if logit_shift and any(row and row[0] == 0 for row in slots):
        raise DiffusionError("logit_shift needs an unmasked first token: nothing predicts position 0.")
    spec = DiffusionSpec(
        family="mlx_dllm",
        logits="shifted" if logit_shift else "in_place",
        attention="bidirectional",
        canvas="fixed",
        unmasking="mlx_dllm",
        mask_token_id=mask,
        eos_token_ids=(),
        vocab_size=vocab_size,
        context_length=None,
    )
    options = DecodingOptions(max_denoising_steps=steps, stop_at_eos=False)
    rows = [
        (plan_slots(spec, ids, at, options), options) for ids, at in zip(np.array(canvas).tolist(), slots, strict=True)
    ]
    filled = {event.row: event.canvas for event in run(model, _CALL, spec, rows) if isinstance(event, Finished)}
    return mx.array([filled[i] for i in range(len(rows))], dtype=canvas.dtype)


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[str],
    *,
    max_new_tokens: int | None = None,
    mask_token_id: int | None = None,
    steps: int | None = None,
    logit_shift: bool = False,
    a2d: A2DConfig | None = None,
) -> Any:
    """
    Continue a prompt, or each of several, by ``max_new_tokens`` tokens.

    Args:
        max_new_tokens: default: the a2d block's ``canvas_len``.
        others: as in :func:`denoise`. Prompt tokens are never changed, also where they equal the mask id.

    Returns:
        str: the continuation as the tokenizer decodes it; a list of them for a list of prompts.

    Raises:
        DiffusionError: as :func:`denoise`, and a ValueError about max_new_tokens or an empty prompt.
    """
    mask = _mask_of(mask_token_id, a2d)
    count = _positive("max_new_tokens", max_new_tokens, (a2d.sampler or {}).get("canvas_len") if a2d else None)
    if count is None:
        raise DiffusionError("max_new_tokens must be given: there is no a2d block to take it from.")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    encoded = [list(tokenizer.encode(text)) for text in prompts]
    if not all(encoded):
        raise DiffusionError("The prompt is empty: give at least one token.")
    texts: dict[int, str] = {}
    for length in {len(ids) for ids in encoded}:
        same = [i for i, ids in enumerate(encoded) if len(ids) == length]
        canvas = mx.array([[*encoded[i], *[mask] * count] for i in same])
        masked = mx.broadcast_to(mx.arange(length + count) >= length, canvas.shape)
        filled = denoise(
            model, canvas, mask_token_id=mask, steps=steps, logit_shift=logit_shift, a2d=a2d, masked=masked
        )
        texts |= {i: tokenizer.decode(row[length:]) for i, row in zip(same, np.array(filled).tolist(), strict=True)}
    return texts[0] if isinstance(prompt, str) else [texts[i] for i in range(len(prompts))]


# The name is looked up at every call, so that replacing `diffusion.bidirectional_forward` reaches the loop.
_CALL = a2d_families.family(
    "mlx_dllm", hidden=lambda model, ids, cache: bidirectional_forward(model, ids), head=lambda model, logits: logits
)


def _mask_of(mask_token_id: int | None, a2d: A2DConfig | None) -> int:
    mask = mask_token_id if mask_token_id is not None else a2d.mask_token_id if a2d is not None else None
    if mask is None:
        raise DiffusionError("mask_token_id must be given: there is no a2d block to take it from.")
    return mask


def _positive(name: str, value: int | None, default: int | None) -> int | None:
    chosen = value if value is not None else default
    if chosen is not None and (not isinstance(chosen, int) or isinstance(chosen, bool) or chosen < 1):
        raise DiffusionError(f"{name} must be a positive integer, got {chosen!r}.")
    return chosen
