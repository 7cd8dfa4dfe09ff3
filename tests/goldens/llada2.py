"""LLaDA2: runs of the 2.0, 2.1 and 2.2 samplers, scripted blocks of the 2.2 sampler, and published vectors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_dllm_plugin import DecodingOptions
from mlx_dllm_plugin.decode import BlockDone, Commit, Finished, Released, stream_decode
from mlx_dllm_plugin.families import Family
from mlx_dllm_plugin.models.llada2_moe import block_routing
from mlx_dllm_plugin.samplers import RULES
from mlx_dllm_plugin.samplers.editing import JOINT_THRESHOLD_INDEL, Draft, Edited, edit_scan, edit_with_moves, need
from mlx_dllm_plugin.spec import DiffusionSpec

from .a2d import Row

RECORDED = "joint_threshold_indel, recorded"
LARGE = 1e9


def is_scripted(folder: Path) -> bool:
    golden = folder / "golden.json"
    return golden.is_file() and json.loads(golden.read_text()).get("family") == "llada2_moe"


def replay(folder: Path, kinds: Sequence[str]) -> Iterator[Row]:
    """Scripted cases and vectors, which need no checkpoint."""
    golden = json.loads((folder / "golden.json").read_text())
    if "decode" in kinds:
        for case in golden.get("cases", []):
            if case["target"] == "tokens":
                yield Row(folder.name, "decode", case["name"], _scripted(golden, case))
    if "vector" in kinds:
        for vector in golden.get("vectors", []):
            if vector["target"] == "vector":
                yield Row(folder.name, "vector", f"{vector['kind']}: {vector['name']}", _vector(vector))


# Runs on checkpoints


def options_of(golden: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """The options that make a run what its version's own sampler does."""
    settings, version = case["settings"], golden["variant"]
    shared: dict[str, Any] = {
        "mask_token_id": golden["ids"]["mask"],
        "eos_token_ids": (golden["ids"]["eos"],),
        "max_tokens": settings["gen_length"],
        "block_length": settings["block_length"],
        "threshold": settings["threshold"],
    }
    if version == "2.0":
        steps = min(settings["steps"], settings["gen_length"] // settings.get("minimal_topk", 1))
        shared |= {"unmasking": "low_confidence_dynamic", "max_denoising_steps": steps}
    else:
        shared["editing_threshold"] = settings["editing_threshold"]
        if "max_post_steps" in settings:
            shared["max_post_steps"] = settings["max_post_steps"]
        if version == "2.1":
            shared |= {"unmasking": "joint_threshold", "num_to_transfer": settings.get("num_to_transfer")}
        else:
            # No step of a schedule and one step are the same: all masks in the first forward.
            shared |= {"unmasking": "joint_threshold_indel", "max_denoising_steps": max(settings["steps"], 1)}
    return shared


def generation(golden: dict[str, Any], case: dict[str, Any], model: Any) -> str:
    """A run of a version's own sampler: ids, what every forward saw, and the number of forwards."""
    settings, prompt, version = case["settings"], case["prompt_ids"], golden["variant"]
    shared = options_of(golden, case)
    run = Run(stream_decode(model, [prompt], DecodingOptions(**shared)), prompt, shared["mask_token_id"])
    if run.output != case["output_ids"]:
        wrong = sum(a != b for a, b in zip(run.output, case["output_ids"], strict=False))
        return f"{wrong} of {len(case['output_ids'])} ids differ, {len(run.output)} given"
    stopped = run.reason == "stop"
    if "finish" in case and run.reason != case["finish"]:
        return f"finished with {run.reason}, {case['finish']} expected"
    length = settings["block_length"]
    if "blocks" in case:
        states = [[block["start"], state] for block in case["blocks"] for state in block["states"][:-1]]
        ends = [(block["start"], block["stable"]) for block in case["blocks"] if block["forwards"]]
        found = [(done.start // length * length, done.reason == "stable") for done in run.blocks]
        if found != ends:
            return f"same ids, but blocks ended as {found}, {ends} expected"
    else:
        states = case["history"][:-1]
    for number, (start, state) in enumerate(states[: run.nfe]):
        if run.before[number][start : start + length] != state:
            return f"same ids, but forward {number} saw another block"
    # Where nothing changes any more, 2.0's sampler goes on to the end of the block, and 2.1's with the blocks after the
    # end of sequence.
    fewer = version == "2.0" or (version == "2.1" and stopped)
    if run.nfe != case["nfe"] and not (fewer and run.nfe < case["nfe"]):
        return f"{run.nfe} forwards, {case['nfe']} expected"
    return ""


class Run:
    """The events of one row: its output with the end of sequence, the canvas before every forward, and its blocks."""

    def __init__(self, events: Iterator[Any], prompt: Sequence[int], mask: int):
        self.output: list[int] = []
        self.before: list[list[int]] = []
        self.blocks: list[BlockDone] = []
        canvas = [*prompt, *[mask] * 4096]
        for event in events:
            if isinstance(event, Commit):
                self.before.append(list(canvas))
                for position in event.masked:
                    canvas[position] = mask
                for position, token in zip(event.positions, event.tokens, strict=True):
                    canvas[position] = token
            elif isinstance(event, Released):
                self.output += event.tokens
            elif isinstance(event, BlockDone):
                self.blocks.append(event)
            elif isinstance(event, Finished):
                self.reason, self.nfe, self.canvas = event.reason, event.nfe, list(event.canvas)
        self.after = [*self.before[1:], canvas]


# Scripts


class Script:
    """A model whose logits are given, one table [n, V] per denoising forward, for the last n columns that it is run on.
    It remembers what it saw of them."""

    def __init__(self, tables: Sequence[np.ndarray], vocab_size: int, ids: dict[str, int], length: int):
        self.layers: list[Any] = []
        self.tables = [mx.array(table.astype(np.float32)) for table in tables]
        self.saw: list[list[int]] = []
        self.length = length
        self.diffusion_family = Family(
            name="script",
            model_types=("script",),
            claims=lambda checkpoint: False,
            hidden=lambda model, inputs, cache: model.hidden(inputs),
            head=lambda model, states: model.head(states),
            defaults=lambda checkpoint: {},
            attention="block_causal",
            canvas="growing",
        )
        self.diffusion_spec = DiffusionSpec(
            family="script",
            logits="in_place",
            attention="block_causal",
            canvas="growing",
            unmasking="joint_threshold_indel",
            mask_token_id=ids["mask"],
            eos_token_ids=(ids["eos"],) if "eos" in ids else (),
            vocab_size=vocab_size,
            context_length=None,
            defaults={"block_length": length, "max_tokens": length},
            edit_token_ids=(ids["delete"], ids.get("insert", ids.get("split", -1))),
        )

    def hidden(self, inputs: mx.array) -> mx.array:
        self.inputs = np.array(inputs[0, -self.length :]).tolist()
        places = mx.arange(inputs.shape[1]) - (inputs.shape[1] - self.length)
        return mx.maximum(places, 0)[None, :, None]

    def head(self, states: mx.array) -> mx.array:
        table = self.tables[min(len(self.saw), len(self.tables) - 1)]
        self.saw.append(self.inputs)
        return table[states[0, :, 0]][None]


def _logits(rows: Any, vocab_size: int) -> np.ndarray:
    """[n, V] from a list of [token, probability] per position, or from a base and [token, logit]."""
    if isinstance(rows, dict) and "set" in rows:
        table = np.full((len(rows["set"]), vocab_size), rows["base"], dtype=np.float32)
        for row, pairs in zip(table, rows["set"], strict=True):
            for token, logit in pairs:
                row[token] = logit
        return table
    rows = rows["probs"] if isinstance(rows, dict) else rows
    table = np.zeros((len(rows), vocab_size))
    for row, pairs in zip(table, rows, strict=True):
        rest = 1 - sum(p for _, p in pairs)
        row[:] = max(rest, 1e-30) / (vocab_size - len(pairs))
        for token, p in pairs:
            row[token] = p
    return np.log(table).astype(np.float32)


def _options(options: dict[str, Any], **more: Any) -> DecodingOptions:
    names = {
        "steps": "max_denoising_steps",
        "threshold": "threshold",
        "editing_threshold": "editing_threshold",
        "max_post_steps": "max_post_steps",
        "max_steps_per_block": "max_steps_per_block",
    }
    own: dict[str, Any] = {names[name]: value for name, value in options.items() if name in names}
    own["max_denoising_steps"] = max(own.get("max_denoising_steps", 32), 1)
    return DecodingOptions(**{**own, **more})


class _Recorded:
    """The 2.2 rule under another name, with what it was given and what it made of that."""

    def __init__(self) -> None:
        self.steps: list[tuple[Draft, Edited, list[int]]] = []

    def __enter__(self) -> _Recorded:
        def edit(draft: Draft) -> Edited:
            seen = set(draft.seen[0])
            edited = edit_with_moves(draft)
            new = [np.frombuffer(state, dtype=np.int64).tolist() for state in draft.seen[0] - seen]
            self.steps.append((draft, edited, new[0] if new else []))
            return edited

        RULES.register(replace(JOINT_THRESHOLD_INDEL, name=RECORDED, edit=edit))
        return self

    def __exit__(self, *_: object) -> None:
        RULES.unregister(RECORDED)


def _block(
    block: Sequence[int], ids: dict[str, int], tables: Sequence[np.ndarray], options: dict[str, Any]
) -> tuple[Run, Script, _Recorded, int]:
    """One block decoded after a block of text, and the position where it begins."""
    mask, length = ids["mask"], len(block)
    frozen = [token for token in block if token != mask]
    assert list(block) == [*frozen, *[mask] * (length - len(frozen))]
    text = next(token for token in range(3, 10) if token not in ids.values())
    prompt = [*[text] * length, *frozen]
    script = Script(tables, tables[0].shape[1], ids, length)
    with _Recorded() as recorded:
        given = _options(options, unmasking=RECORDED, max_tokens=max(length - len(frozen), 1), stop_at_eos=False)
        run = Run(stream_decode(script, [prompt], given), prompt, mask)
    return run, script, recorded, length


def _scripted(golden: dict[str, Any], case: dict[str, Any]) -> str:
    ids = {**golden["ids"], **case.get("ids", {})}
    tables = [_logits(call["rows"], golden["vocab"]) for call in case["calls"]]
    if case["level"] != "block":
        return _scripted_run(golden, case, ids, tables)
    block, expected = case["block"], case["expected"]
    if ids["mask"] not in block:
        return _prompt_only(case, ids, golden["vocab"])
    run, script, recorded, at = _block(block, ids, tables, case["options"])
    frozen = sum(token != ids["mask"] for token in block)
    wanted: list[tuple[str, Any, Any]] = [
        ("tokens", run.canvas[at:], expected["tokens"]),
        ("forwards", run.nfe, expected["forwards"]),
        ("inputs", script.saw, [call["input"] for call in case["calls"]]),
        ("states", [canvas[at : at + len(block)] for canvas in run.after], expected["outputs_after_each_step"]),
        ("stable", run.blocks[0].reason == "stable", expected["ended_stable"]),
        (
            "original masks",
            [edited.original[0].tolist() for _, edited, _ in recorded.steps],
            [flags[frozen:] for flags in expected["original_mask_flags"]],
        ),
    ]
    # A state that was there before is not new to the history.
    for (_, _, written), state in zip(recorded.steps, expected["written_before_scan"], strict=True):
        if written:
            now = [ids["mask"] if token == -1 else token for token in written]
            wanted.append(("written", now, state[frozen:]))
    return next((f"{what}: {found}, {good} expected" for what, found, good in wanted if found != good), "")


def _prompt_only(case: dict[str, Any], ids: dict[str, int], vocab_size: int) -> str:
    """A block that the prompt fills is not decoded: the first forward is the next block's."""
    length = len(case["block"])
    script = Script([_logits([[[1, 0.9]]] * length, vocab_size)], vocab_size, ids, length)
    given = _options(case["options"], max_tokens=length, stop_at_eos=False)
    run = Run(stream_decode(script, [case["block"]], given), case["block"], ids["mask"])
    good = run.canvas[:length] == case["expected"]["tokens"] and [done.start for done in run.blocks] == [length]
    return "" if good and script.saw[0] == [ids["mask"]] * length else "the block of the prompt was decoded"


def _scripted_run(golden: dict[str, Any], case: dict[str, Any], ids: dict[str, int], tables: list[np.ndarray]) -> str:
    expected, prompt = case["expected"], case["prompt"]
    script = Script(tables, golden["vocab"], ids, case["block_size"])
    given = _options(case["options"], max_tokens=case["gen_length"])
    run = Run(stream_decode(script, [prompt], given), prompt, ids["mask"])
    length = case["block_size"]
    blocks = [
        {
            "start": done.start // length * length,
            "final": run.canvas[done.start // length * length :][:length],
            "ended_stable": done.reason == "stable",
        }
        for done in run.blocks
    ]
    wanted: list[tuple[str, Any, Any]] = [
        ("output", run.output, expected["output"]),
        ("finish", run.reason, expected["finish"]),
        ("forwards", run.nfe, expected["forwards"]),
        ("inputs", script.saw, [call["input"] for call in case["calls"]]),
        ("blocks", blocks, [{k: v for k, v in b.items() if k != "forwards"} for b in expected["blocks"]]),
    ]
    return next((f"{what}: {found}, {good} expected" for what, found, good in wanted if found != good), "")


# Vectors


def _vector(vector: dict[str, Any]) -> str:
    kinds: dict[str, Callable[[dict[str, Any]], str]] = {
        "edit_scan": _edit_scan,
        "m2t_floor_schedule": _schedule,
        "router": _router,
        "router_shape_case": _router_shape,
        "reserved_prompt_ids": _reserved,
    }
    if vector["kind"] in kinds:
        return kinds[vector["kind"]](vector)
    if "script" in vector:
        return _churn(vector)
    return _one_update(vector) if "block_after_one_update" in vector["expected"] else _whole_block(vector)


def _differs(found: Any, expected: Any) -> str:
    return "" if found == expected else f"{found}, {expected} expected"


def _edit_scan(vector: dict[str, Any]) -> str:
    ids, first = vector["ids"], vector.get("prompt_len", 0)
    new, old = (np.array([vector[name][first:]]) for name in ("written", "old"))
    original = np.array([vector["original_mask_flags"][first:]])
    tokens, masked, flags, _ = edit_scan(
        new,
        new == ids["mask"],
        old,
        old == ids["mask"],
        original,
        np.ones(new.shape, dtype=bool),
        (ids["delete"], ids["split"]),
    )
    found = np.where(masked, ids["mask"], tokens)[0].tolist()
    expected = vector["expected"]
    problem = _differs(found, expected["tokens"][first:])
    if problem or "original_mask_flags" not in expected:
        return problem
    return _differs(flags[0].tolist(), expected["original_mask_flags"][first:])


def _schedule(vector: dict[str, Any]) -> str:
    masks, steps, step = (np.array([[vector[name]]]) for name in ("masks_at_entry", "steps", "step"))
    return _differs(int(need(masks, steps, step)[0, 0]), vector["expected"]["need"])


def _router(vector: dict[str, Any]) -> str:
    logits = np.full(vector["logits"]["shape"], vector["logits"]["fill"], dtype=np.float32)
    for column, value in vector["logits"].get("columns", {}).items():
        logits[:, int(column)] = value
    bias = np.full(vector["bias"]["shape"], vector["bias"]["fill"], dtype=np.float32)
    for place, value in vector["bias"].get("set", {}).items():
        bias[int(place)] = value
    ids, weights = _routed(logits, bias, vector["block_size"], vector["expert_capacity"], vector["top_k"])
    expected = vector["expected"]
    if "ids_every_row" in expected and not (np.sort(ids) == np.sort(expected["ids_every_row"])).all():
        return f"experts {ids[0].tolist()}, {expected['ids_every_row']} expected"
    if "weights_every_entry" in expected and np.abs(weights - expected["weights_every_entry"]).max() > 1e-6:
        return f"weights {weights[0].tolist()}, {expected['weights_every_entry']} expected"
    if "weights_below" in expected and not (np.isfinite(weights) & (weights < expected["weights_below"])).all():
        return f"weights {weights[0].tolist()}, all below {expected['weights_below']} expected"
    return ""


def _routed(
    logits: np.ndarray, bias: np.ndarray, block: int, capacity: int, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    ids, weights = block_routing(mx.sigmoid(mx.array(logits[None])), mx.array(bias), block, capacity, top_k, 1.0, True)
    return np.array(ids[0]), np.array(weights[0])


def _router_shape(vector: dict[str, Any]) -> str:
    """Random scores with ties, against a stable sort."""
    shape, random = vector["shape"], np.random.default_rng(0)
    count, block, top_k = shape["experts"], shape["block_size"], shape["top_k"]
    logits = random.normal(size=(shape["tokens"], count)).round(1).astype(np.float32)
    bias = random.normal(size=count).round(1).astype(np.float32) / 4
    ids, weights = _routed(logits, bias, block, shape["expert_capacity"], top_k)
    scores = np.array(mx.sigmoid(mx.array(logits)))
    ranked = scores + bias
    for first in range(0, shape["tokens"], block):
        part = ranked[first : first + block]
        pool = np.argsort(-part.max(axis=0), kind="stable")[: shape["expert_capacity"]]
        inside = np.where(np.isin(np.arange(count), pool), part, -np.inf)
        wanted = np.argsort(-inside, axis=1, kind="stable")[:, :top_k]
        found = ids[first : first + block]
        if not (np.sort(found) == np.sort(wanted)).all():
            return f"other experts in the block at {first}"
        own = np.take_along_axis(scores[first : first + block], found, axis=1)
        if np.abs(weights[first : first + block] - own / (own.sum(axis=1, keepdims=True) + 1e-20)).max() > 2e-6:
            return f"other weights in the block at {first}"
    return ""


def _reserved(vector: dict[str, Any]) -> str:
    """The source rejects edit tokens in a prompt. Here they are text: they stay, and nothing acts on them."""
    ids, block = vector["ids"], vector["block"]
    tables = [_logits([[[2, 0.9]]] * len(block), 11)]
    run, _, _, at = _block(block, ids, tables, {})
    kept = sum(token != ids["mask"] for token in block)
    leaked = {ids[name] for name in ("mask", "delete", "split")} & set(run.output)
    return "" if run.canvas[at:][:kept] == block[:kept] and not leaked else f"{run.canvas[at:]} from {block}"


def _whole_block(vector: dict[str, Any]) -> str:
    ids, block, expected = vector["ids"], vector["block"], vector["expected"]
    if not vector["calls"]:
        return _prompt_only(vector, ids, vector["vocab"])
    tables = [_logits(call["rows"], vector["vocab"]) for call in vector["calls"]]
    run, script, _, at = _block(block, ids, tables, vector.get("options", {}))
    found = run.canvas[at:]
    special = {ids[name] for name in ("mask", "delete", "split")}
    if "error" in expected:
        # The source raises; here the block is completed, and its event says that it did not settle.
        return _differs((run.blocks[0].reason, bool(special & set(found))), ("cap", False))
    problems = [
        _differs(found, expected["tokens"]) if "tokens" in expected else "",
        _differs(run.nfe, expected["forwards"]) if "forwards" in expected else "",
        _differs(found[: len(expected["prefix"])], expected["prefix"]) if "prefix" in expected else "",
        _differs(special & set(found[len(expected.get("prefix", [])) :]), set()),
    ]
    if "our_result" in vector:
        problems.append(_differs(found, vector["our_result"]["tokens"]))
    for saw, call in zip(script.saw, vector["calls"], strict=False):
        problems.append(_differs(saw, call["input"]) if "input" in call else "")
    return next((problem for problem in problems if problem), "")


class _Churn(Script):
    """A model that answers by what it sees."""

    def __init__(self, vector: dict[str, Any]):
        super().__init__([], vector["vocab"], vector["ids"], len(vector["block"]))
        self.vector = vector

    def head(self, states: mx.array) -> mx.array:
        ids, script, block = self.vector["ids"], self.vector["script"], list(self.inputs)
        mask = ids["mask"]
        if mask in block:
            fill = [3] * len(block) if "masks -> 3" in script["if_any_mask"] else [1, 2, 3, 4]
            want = [fill[i] if token == mask else token for i, token in enumerate(block)]
        elif "INSERT" in script["else"]:
            want = [ids["split"], *block[1:]]
        else:
            want = [{3: 4, 4: 3}.get(token, token) for token in block]
        self.saw.append(block)
        table = mx.array(_logits([[[token, script["probability"]]] for token in want], self.vector["vocab"]))
        return table[states[0, :, 0]][None]


def _churn(vector: dict[str, Any]) -> str:
    """States for ever the same: decoding ends, the prompt stays, and no edit token is left."""
    ids, block, expected = vector["ids"], vector["block"], vector["expected"]
    frozen = [token for token in block if token != ids["mask"]]
    prompt = [*[5] * len(block), *frozen]
    script = _Churn(vector)
    given = _options(vector["options"], max_tokens=len(block) - len(frozen), stop_at_eos=False)
    run = Run(stream_decode(script, [prompt], given), prompt, ids["mask"])
    found = run.canvas[len(block) :]
    if run.nfe > vector["options"]["max_steps_per_block"]:
        return f"{run.nfe} forwards"
    kept = expected.get("prefix", [])
    return _differs((found[: len(kept)], set(expected["no_tokens"]) & set(found)), (kept, set()))


def _one_update(vector: dict[str, Any]) -> str:
    """One step of the rule on a block in a given state: what precedes its first mask is the prompt's."""
    ids, options, expected = vector["ids"], vector["options"], vector["expected"]
    mask, block = ids["mask"], np.array(vector["block"])
    table = _logits(vector["rows"], 12)
    first = int((block == mask).argmax())
    found, flags = _update(vector, block[first:], table[first:], ids, options, mask, first)
    problem = _differs([*block[:first].tolist(), *found], expected["block_after_one_update"])
    if problem or "original_mask_flags" not in expected:
        return problem
    return _differs([*[False] * first, *flags], expected["original_mask_flags"])


def _update(
    vector: dict[str, Any],
    block: np.ndarray,
    table: np.ndarray,
    ids: dict[str, int],
    options: dict[str, Any],
    mask: int,
    first: int,
) -> tuple[list[int], list[bool]]:
    table = table.copy()
    probabilities = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
    table[:, mask] = -LARGE
    text = table.copy()
    text[:, [ids["delete"], ids["split"]]] = -LARGE
    best = table.argmax(axis=1)
    masked = block == mask
    original = np.array(vector.get("original_mask_flags", masked if first == 0 else [False] * first + masked.tolist()))
    original = original[-len(block) :]
    values = {name: getattr(_options(options), name) for name in JOINT_THRESHOLD_INDEL.defaults}
    values = {**JOINT_THRESHOLD_INDEL.defaults, **{name: v for name, v in values.items() if v is not None}}
    step = 0
    if "hard limit" in vector["name"]:
        values["max_steps_per_block"] = 1  # the source's own limit, which is another number
    seen = set()
    for position, tokens in vector.get("state", {}).get("already_sampled", {}).items():
        for token in tokens:
            seen.add(np.where(np.arange(len(block)) == int(position) - first, token, block).astype(np.int64).tobytes())
    masks = int(masked.sum())
    if "need" in vector:
        masks = int((original & masked).sum())
        values["max_denoising_steps"] = masks // vector["need"]["schedule_part"]

    def redraw(row: int, position: int, banned: int, sampled: bool) -> int:
        return int(np.where(np.arange(table.shape[1]) == banned, -LARGE, table[position]).argmax())

    draft = Draft(
        tokens=block[None].astype(np.int64),
        masked=masked[None],
        original=original[None],
        there=np.ones((1, len(block)), dtype=bool),
        chosen=best[None],
        confidence=probabilities[np.arange(len(block)), best][None],
        best=best[None],
        certainty=probabilities[np.arange(len(block)), best][None],
        chosen_text=text.argmax(axis=1)[None],
        best_text=text.argmax(axis=1)[None],
        masks=np.array([[masks]]),
        step=np.array([[step]]),
        post=np.array([[0]]),
        values={name: np.array([[value]], dtype=np.float32) for name, value in values.items()},
        edit_token_ids=(ids["delete"], ids["split"]),
        seen=[seen],
        redraw=redraw,
        pick=lambda row, n: 0,
    )
    edited = edit_with_moves(draft)
    return np.where(edited.masked, mask, edited.tokens)[0].tolist(), edited.original[0].tolist()
