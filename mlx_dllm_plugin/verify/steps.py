"""The order in which two samplers write: the canvases that a reference asked its model about, against our commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..decode import Commit
from ..plan import Plan
from .stand_in import Answers

ROUNDING = 1e-5  # of a probability in float32: closer ones may be ranked either way

Written = dict[int, int]  # the tokens behind the prompt by column, without masks


@dataclass(frozen=True)
class StepDifference:
    """
    Args:
        step: after so many steps that write something.
        token: its index in the output.
        there, here: the ids, None of a mask.
    """

    step: int
    token: int
    there: int | None
    here: int | None

    def __str__(self) -> str:
        there, here = ("still masked" if id is None else str(id) for id in (self.there, self.here))
        return (
            f"the tokens are the same, and they are not written in the same steps: after step {self.step}, token "
            f"{self.token} of the output is {there} there and {here} here"
        )


@dataclass(frozen=True)
class Steps:
    """
    Args:
        compared: how many steps that write something are the same.
        difference: the first one that is not.
        note: why no more could be compared, or "".
    """

    compared: int = 0
    difference: StepDifference | None = None
    note: str = ""


def compare_steps(
    answers: Answers, planned: Plan, prompt: Sequence[int], commits: Sequence[Commit], output: Sequence[int]
) -> Steps:
    """
    Compare what is written after each step, as far as both sides go. Canvases without the prompt (those of guidance)
    and repeated ones say nothing.

    Args:
        answers: what the reference asked.
        planned: what it was asked for, as ``decode()`` was.
        commits: of ``decode()``.
        output: the tokens after the prompt, which are the same on both sides.
    """
    if planned.rule.edit is not None or planned.rule.revise is not None:
        return Steps(
            note=f"the unmasking rule {planned.rule.name} changes what it has written: only the output was compared, "
            "not its steps."
        )
    start, end = len(prompt), len(prompt) + len(output)
    theirs, canvases, revised = _there(answers, planned, list(prompt))
    if not any(len(canvas) > start for canvas in canvases):
        return Steps(
            note=f"{answers.name} shows its model no canvas that begins with the prompt: only the output was compared, "
            "not its steps."
        )
    last = None
    if not revised:
        final = theirs[-1] | _written(output, 0, start, planned)
        if final != theirs[-1]:
            last = len(theirs)  # a cut output does not show what else its last step wrote
            theirs.append(final)
    for step, (there, here) in enumerate(zip(theirs, _here(planned, commits), strict=False)):
        limit = end if step == last else max((*there, *here, start)) + 1
        columns = [c for c in sorted(there.keys() | here.keys()) if c < limit and there.get(c) != here.get(c)]
        if not columns:
            compared = step
            continue
        if all(there.get(c) in planned.eos and c not in here for c in columns):
            return Steps(
                step - 1, note=f"{answers.name} fills what follows an end of sequence: no later step was compared."
            )
        if _is_rounding(answers, planned, start, canvases[step - 1], there, here, columns):
            return Steps(
                step - 1,
                note=f"in step {step}, {answers.name} chooses among positions whose probabilities differ by rounding "
                "alone (or from the threshold): no later step was compared.",
            )
        at = columns[0]
        return Steps(step - 1, StepDifference(step, at - start, there.get(at), here.get(at)))
    note = f"{answers.name} changes what it has written: no later step than {compared} was compared."
    return Steps(compared, note=note if revised else "")


def _there(answers: Answers, planned: Plan, prompt: list[int]) -> tuple[list[Written], list[np.ndarray], bool]:
    """What the reference's canvases had written, each once, the last canvas of each, and whether it took tokens back,
    where the list ends."""
    states: list[Written] = [{}]
    canvases = [np.array(prompt[:1])]
    for rows in answers.canvases:
        canvas = next((row for row in rows if row[: len(prompt)].tolist() == prompt[: len(row)]), None)
        if canvas is None:
            continue
        before, width = states[-1], len(canvas)
        now = {c: t for c, t in before.items() if c >= width}
        now |= _written(canvas.tolist(), len(prompt), len(prompt), planned)
        if any(now.get(c) != token for c, token in before.items()):
            return states, canvases, True
        if now != before:
            states.append(now)
            canvases.append(canvas)
        elif width >= len(canvases[-1]):
            canvases[-1] = canvas  # the same with more masks, on which the next step is made
    return states, canvases, False


def _here(planned: Plan, commits: Sequence[Commit]) -> list[Written]:
    states: list[Written] = [{}]
    for commit in commits:
        pairs = zip(commit.positions, commit.tokens, strict=True)
        now = states[-1] | {c: token for c, token in pairs if token != planned.mask_token_id}
        if now != states[-1]:
            states.append(now)
    return states


def _written(ids: Sequence[int], first: int, column: int, planned: Plan) -> Written:
    """The ids from index ``first`` on, which stand from ``column`` on."""
    return {c: token for c, token in enumerate(ids[first:], column) if token != planned.mask_token_id}


def _is_rounding(
    answers: Answers,
    planned: Plan,
    start: int,
    canvas: np.ndarray,
    there: Written,
    here: Written,
    columns: list[int],
) -> bool:
    """Whether the columns that one side alone wrote on a canvas are equally probable, or as probable as the threshold:
    the sides round a softmax differently."""
    if columns[-1] >= len(canvas) or any(c in there and c in here for c in columns):
        return False
    p = _probabilities(answers, planned, start, canvas)[columns]
    threshold = planned.values.get("threshold")
    if threshold is not None and (np.abs(p - threshold) <= ROUNDING).all():
        return True
    return 2 * sum(c in there for c in columns) == len(columns) and float(np.ptp(p)) <= ROUNDING


def _probabilities(answers: Answers, planned: Plan, start: int, canvas: np.ndarray) -> np.ndarray:
    """Of the most probable token of every column [T]."""
    rows = [canvas]
    if planned.cfg_scale:
        hidden = (np.arange(len(canvas)) < start) & ~np.isin(canvas, list(planned.keep))
        rows.append(np.where(hidden, planned.mask_token_id, canvas))
    logits = answers.logits(np.stack(rows), 0).numpy()
    found = logits[0] if len(rows) == 1 else logits[1] + (planned.cfg_scale + 1) * (logits[0] - logits[1])
    found[:, [*planned.suppressed, *planned.late]] = -np.inf
    shares = np.exp(found - found.max(axis=-1, keepdims=True))
    p = 1 / shares.sum(axis=-1)
    return np.concatenate([p[:1], p[:-1]]) if planned.shifted else p
