"""Batteries: questions with known answers that lie beside a checkpoint, and how its answers are judged.

``battery.jsonl`` holds one problem a line, a JSON object::

    {"prompt": "What is 47 + 38?", "answer": "47 + 38 = 85", "task": "add"}
    {"prompt": "Name a color.", "answers": ["red", "green", "blue"]}

``task`` is optional and only tells problems apart; other keys are left for other readers.
"""

from __future__ import annotations

import json
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint, exists, is_run_directory, resolve_run_directory
from .errors import CheckpointError, DiffusionError
from .options import DecodingOptions

if TYPE_CHECKING:
    from .spec import DiffusionSpec

NAME = "battery.jsonl"

_EXPECTED = 'an object with the texts "prompt" and "answer", or "answers" as a list of texts'
_MARK = "\ue000"  # stands for a combining mark, which \w does not know, though a word goes on over it
_LETTERS = rf"(?:[^\W_]{_MARK}*)+"
_WORD = re.compile(rf"\d+(?:[.,]\d+)+|{_LETTERS}(?:'{_LETTERS})*")
_GAP = re.compile(r"\S*\s+\S*")


@dataclass(frozen=True)
class Problem:
    """
    Args:
        prompt: the question, without a chat template.
        answers: the right answers, at least one.
        task: what kind of problem it is, or None.
    """

    prompt: str
    answers: tuple[str, ...]
    task: str | None = None


@dataclass(frozen=True)
class Battery:
    """
    Args:
        path: the file it was read from.
        problems: in the order of the file.
    """

    path: Path
    problems: tuple[Problem, ...]

    @cached_property
    def lexicon(self) -> frozenset[str]:
        """All words of all prompts and right answers."""
        return frozenset(word for text in self._texts for word in words(text))

    @cached_property
    def repeats(self) -> frozenset[str]:
        """The words that follow themselves in a prompt or a right answer, so that this is no fault."""
        return frozenset(word for text in self._texts for word in repeated(text))

    @property
    def _texts(self) -> Iterable[str]:
        return (text for problem in self.problems for text in (problem.prompt, *problem.answers))


@dataclass(frozen=True)
class Garbled:
    """
    Counts over some texts. They need no list of a language's words, and see less than a reader: a wrong word that the
    battery has elsewhere counts as known, an unusual but right one as unknown, and a script that writes no spaces
    between words has one word per run of letters.

    Args:
        words: all words and numbers.
        doubled: words that follow themselves, where no prompt or right answer of the battery has that word twice in
            a row; thrice in a row are two. A sign between the two ("7 + 7") is none, a comma or full stop is, so that
            a list with the same item twice counts too.
        unknown: words outside the battery's lexicon, a wrong number included.
    """

    words: int
    doubled: int
    unknown: int


@dataclass(frozen=True)
class Outcome:
    """
    What a model made of a battery.

    Args:
        exact: answers that are a right one, white space at their ends aside, and have an end of sequence.
        of: how many problems were asked.
        words, doubled, unknown: of all answers together, see :class:`Garbled`.
        unfinished: answers without an end of sequence.
        tokens: of all answers, up to and including the end of sequence.
        forwards: denoising forwards of all rows.
        texts: the answers, in the battery's order.
        right: which of them are exact.
        options: what was asked of the engine.
        profile: what the options come to with this checkpoint, in words.
    """

    exact: int
    of: int
    words: int
    doubled: int
    unknown: int
    unfinished: int
    tokens: int
    forwards: int
    texts: tuple[str, ...]
    right: tuple[bool, ...]
    options: DecodingOptions
    profile: str


def find(path: Path) -> Battery | None:
    """
    The battery of a checkpoint: beside its config.json, else in the run directory it belongs to.

    Args:
        path: the directory of a checkpoint, or a run directory.

    Returns:
        Battery: or None where there is none.

    Raises:
        CheckpointError: a run directory with nothing to load; a battery that cannot be read.
    """
    file = locate(path)
    return None if file is None else read(file)


def locate(path: Path) -> Path | None:
    """The file of :func:`find`."""
    if not exists(path):
        return None
    checkpoint = Checkpoint(resolve_run_directory(path), {})
    run = path if is_run_directory(path) else checkpoint.run
    folders = [folder for folder in (checkpoint.path, run) if folder is not None]
    return next((folder / NAME for folder in folders if (folder / NAME).is_file()), None)


def read(path: Path) -> Battery:
    """
    Read a battery.

    Raises:
        CheckpointError: a file that cannot be read, a line that is not a problem, no problem at all.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as UTF-8 text ({error}); copy or download it again, or remove it."
        ) from None
    lines = enumerate(text.split("\n"), 1)  # not splitlines: JSON's texts may hold other ends of line
    problems = tuple(_problem(line, f"{path}, line {number}") for number, line in lines if line.strip())
    if not problems:
        raise CheckpointError(f"{path} holds no problem; a line must be {_EXPECTED}: add some, or remove the file.")
    return Battery(path, problems)


def words(text: str) -> list[str]:
    """The words and numbers of a text, case folded and composed (NFC): runs of letters, digits and their combining
    marks; an apostrophe within a word belongs to it, as does a point or comma within a number."""
    return [word for word, _, _ in _spans(_folded(text))]


def repeated(text: str) -> list[str]:
    """The words that directly follow themselves: between the two are white space and what punctuation touches them."""
    text = _folded(text)
    return [
        word
        for (before, _, end), (word, start, _) in pairwise(_spans(text))
        if word == before and _GAP.fullmatch(text[end:start])
    ]


def garbled(texts: Iterable[str], battery: Battery) -> Garbled:
    """Count the doubled words and those that are not of the battery."""
    texts = list(texts)
    found = [word for text in texts for word in words(text)]
    doubled = [word for text in texts for word in repeated(text) if word not in battery.repeats]
    return Garbled(len(found), len(doubled), sum(word not in battery.lexicon for word in found))


def run(
    model: Any,
    tokenizer: Any,
    battery: Battery,
    options: DecodingOptions | None = None,
    batch: int = 16,
    limit: int | None = None,
) -> Outcome:
    """
    Ask a model all problems, as one message of a user where the tokenizer has a chat template.

    Args:
        model: a loaded model with a ``diffusion_spec``.
        tokenizer: its tokenizer, as ``mlx_lm.load`` returns it.
        options: default: the profile balanced where the checkpoint has one, beside values of its own; exact, as its
            makers decode, takes the demo checkpoint 35 times as many forwards.
        batch: how many prompts are decoded together, those of similar length; no answer depends on it.
        limit: ask only this many, the first ones. What counts as garbled still is by the whole battery.

    Raises:
        DiffusionError: a model without a spec; a batch or limit that is not a positive integer; a prompt that does not
            fit, before anything is decoded; what :func:`mlx_dllm_plugin.decode` raises.
    """
    from .decode import decode, spec_of
    from .plan import in_force

    for name, value in (("batch", batch), ("limit", limit)):
        if not (value is None and name == "limit") and (type(value) is not int or value < 1):
            raise DiffusionError(f"{name} must be a positive integer, got {value!r}.")
    spec = spec_of(model)
    if options is None:
        options = DecodingOptions(profile="balanced" if spec.profiles.get("balanced") else None)
    if not isinstance(options, DecodingOptions):
        raise DiffusionError(f"Options must be DecodingOptions, got {options!r}.")
    problems = battery.problems[:limit]
    prompts = _prompts(tokenizer, battery, problems, spec, options)
    texts, right = [""] * len(problems), [False] * len(problems)
    tokens = forwards = unfinished = 0
    order = sorted(range(len(problems)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        for i, result in zip(rows, decode(model, [prompts[i] for i in rows], options), strict=True):
            texts[i] = tokenizer.decode(result.tokens)
            finished = result.finish_reason == "stop"
            right[i] = finished and texts[i].strip() in {answer.strip() for answer in problems[i].answers}
            tokens += result.generated_tokens
            forwards += result.nfe
            unfinished += not finished
    counts = garbled(texts, battery)
    return Outcome(
        exact=sum(right),
        of=len(problems),
        words=counts.words,
        doubled=counts.doubled,
        unknown=counts.unknown,
        unfinished=unfinished,
        tokens=tokens,
        forwards=forwards,
        texts=tuple(texts),
        right=tuple(right),
        options=options,
        profile=str(in_force(spec, options)),
    )


def _problem(line: str, where: str) -> Problem:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = getattr(error, "msg", "too deep or too large")
        raise CheckpointError(f"{where} is not JSON ({why}); expected {_EXPECTED}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is {reprlib.repr(value)}; expected {_EXPECTED}.")
    if ("answer" in value) == ("answers" in value):
        which = 'both "answer" and "answers"' if "answer" in value else "no answer"
        raise CheckpointError(f"{where} has {which}; expected {_EXPECTED}.")
    answers = value["answers"] if "answers" in value else [value["answer"]]
    if not isinstance(answers, list) or not answers:
        raise CheckpointError(f'{where}: "answers" is {reprlib.repr(answers)}; expected {_EXPECTED}.')
    named = [("prompt", value.get("prompt")), *(("answers" if "answers" in value else "answer", a) for a in answers)]
    if value.get("task") is not None:
        named.append(("task", value["task"]))
    for name, text in named:
        if not isinstance(text, str) or not text.strip() or not _is_unicode(text):
            raise CheckpointError(f'{where}: "{name}" has {reprlib.repr(text)}, no text; expected {_EXPECTED}.')
    return Problem(value["prompt"], tuple(answers), value.get("task"))


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which JSON can write and no tokenizer reads."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _prompts(
    tokenizer: Any, battery: Battery, problems: Sequence[Problem], spec: DiffusionSpec, options: DecodingOptions
) -> list[list[int]]:
    """The token ids of the prompts, which all can be decoded. Raises DiffusionError for one that cannot."""
    from .plan import plan
    from .tokenizers import encode_prompt

    chat = getattr(tokenizer, "has_chat_template", None)
    chat = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat
    prompts = []
    for number, problem in enumerate(problems, 1):
        text, where = problem.prompt, f"Problem {number} of {battery.path}"
        if chat:
            message = {"role": "user", "content": text}
            try:
                text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
            except Exception as error:  # whatever a template, which is code, may raise
                raise DiffusionError(
                    f"{where} cannot be written with the chat template ({type(error).__name__}: {error}); "
                    "use the original checkpoint's tokenizer_config.json or chat_template.jinja."
                ) from None
        prompts.append(encode_prompt(tokenizer, text, spec.eos_token_ids))
        try:
            plan(spec, prompts[-1], options)
        except DiffusionError as error:
            raise DiffusionError(f"{where} cannot be decoded: {error}") from None
    return prompts


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text.casefold()).replace("’", "'")


def _spans(text: str) -> list[tuple[str, int, int]]:
    """The words of a folded text, each with where it begins and ends."""
    shape = "".join(_MARK if unicodedata.category(char)[0] == "M" else char for char in text)
    return [(text[slice(*found.span())], *found.span()) for found in _WORD.finditer(shape)]
