"""Problems in plain English whose answers code can check: what the demo checkpoint learns and is scored on.

Three splits: ``train``, ``choose`` (to pick checkpoints by) and ``test``. They share no value (the numbers, words or
fields of a task) and no phrasing: :func:`check_disjoint` proves it by hash. The table of days and months is small, so
there every pair is in training and only phrasings are held out.

    python examples/demo_problems.py --split test --count 20
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SPLITS = ("train", "choose", "test")
TASKS = (
    "add", "subtract", "reverse", "reverse_words", "sort", "case", "count", "next", "json", "sentence",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOWELS, CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxyz"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
ADJECTIVES = ("small", "big", "happy", "tired", "brave", "quiet", "young", "clever")
NOUNS = ("dog", "cat", "bird", "horse", "fox", "bear", "child", "robot", "sailor", "farmer", "teacher", "baker")
VERBS = ("sleep", "sing", "run", "jump", "read", "wait", "work", "play", "dance", "walk")
PLACES = {
    "garden": "in", "park": "in", "forest": "in", "kitchen": "in", "hill": "on", "bridge": "on", "roof": "on",
    "beach": "on", "river": "by", "lake": "by", "road": "by", "tower": "by",
}  # fmt: skip
FIELDS = ("name", "age", "city", "color", "pet", "size")

FRAMES = ("{}", "Question: {}", "Task: {}", "Hello! {}", "Please help: {}", "Next one: {}")
WORDINGS: dict[str, tuple[str, ...]] = {
    "add": (
        "What is {a} + {b}?",
        "Add {a} and {b}.",
        "How much is {a} + {b}?",
        "{a} + {b} = ?",
        "What is the sum of {a} and {b}?",
        "Find {a} + {b}.",
    ),
    "subtract": (
        "What is {a} - {b}?",
        "Subtract {b} from {a}.",
        "How much is {a} - {b}?",
        "{a} - {b} = ?",
        "Take {b} away from {a}.",
        "Find {a} - {b}.",
    ),
    "reverse": (
        "Reverse the word: {w}",
        "Write the word {w} backwards.",
        "Spell {w} backwards.",
        "Reverse the letters of {w}",
        "Turn the word around: {w}",
        "What is {w} spelled backwards?",
    ),
    "reverse_words": (
        "Reverse the order of the words: {w}",
        "Write the words from last to first: {w}",
        "Put these words in reverse order: {w}",
        "Turn the order of the words around: {w}",
        "Swap the order of the words: {w}",
        "From last to first: {w}",
    ),
    "sort": (
        "Sort the words: {w}",
        "Put these words in alphabetical order: {w}",
        "Sort these words from a to z: {w}",
        "Sort alphabetically: {w}",
        "Write the words in alphabetical order: {w}",
        "Order the words from a to z: {w}",
    ),
    "case upper": (
        "Write in capital letters: {w}",
        "Change to upper case: {w}",
        "Make it upper case: {w}",
        "Use capital letters: {w}",
        "In upper case: {w}",
        "Put in capital letters: {w}",
    ),
    "case lower": (
        "Write in small letters: {w}",
        "Change to lower case: {w}",
        "Make it lower case: {w}",
        "Use small letters: {w}",
        "In lower case: {w}",
        "Put in small letters: {w}",
    ),
    "case title": (
        "Capitalize each word: {w}",
        "Make the first letter of each word a capital: {w}",
        "Write each word with a capital: {w}",
        "Change to title case: {w}",
        "In title case: {w}",
        "Make it title case: {w}",
    ),
    "count letters": (
        "How many letters are in the word {w}?",
        "Count the letters in {w}",
        "How many letters does {w} have?",
        "How long is the word {w}?",
        "What is the number of letters in {w}?",
        "Find the number of letters in {w}",
    ),
    "count words": (
        "How many words are in the list: {w}",
        "Count the words: {w}",
        "How many words are there: {w}",
        "Find the number of words: {w}",
        "How long is the list: {w}",
        "What is the number of words in: {w}",
    ),
    "next after": (
        "Which {unit} comes after {x}?",
        "What {unit} follows {x}?",
        "What is the {unit} after {x}?",
        "Name the {unit} after {x}.",
        "Tell me which {unit} comes after {x}.",
        "Which {unit} follows {x}?",
    ),
    "next before": (
        "Which {unit} comes before {x}?",
        "What {unit} precedes {x}?",
        "What is the {unit} before {x}?",
        "Name the {unit} before {x}.",
        "Tell me which {unit} comes before {x}.",
        "Which {unit} precedes {x}?",
    ),
    "json": (
        "Make JSON: {f}",
        "Write as JSON: {f}",
        "Turn this into JSON: {f}",
        "Give me JSON with {f}",
        "Change this to JSON: {f}",
        "As JSON: {f}",
    ),
    "sentence place": (
        "Write a sentence with the words {noun}, {verb} and {place}.",
        "Use these words in a sentence: {noun}, {verb}, {place}",
        "Make a sentence from {noun}, {verb} and {place}.",
        "Write a sentence: {noun}, {verb}, {place}",
        "Tell me something with {noun}, {verb} and {place}.",
        "Put {noun}, {verb} and {place} in a sentence.",
    ),
    "sentence adjective": (
        "Write a sentence about a {adjective} {noun} that can {verb}.",
        "Tell me about a {adjective} {noun} that can {verb}.",
        "Make a sentence about a {adjective} {noun} that can {verb}.",
        "Use a {adjective} {noun} and {verb} in a sentence.",
        "Say something about a {adjective} {noun} that can {verb}.",
        "Write about a {adjective} {noun} that can {verb}.",
    ),
}


@dataclass(frozen=True)
class Problem:
    """
    Args:
        task: one of ``TASKS``.
        phrasing: frame and wording, without the values.
        value: what the splits are disjoint by; for ``next`` the phrasing decides instead.
        prompt: the question.
        answer: a right answer; the only one except for ``sentence``.
        words: words that a sentence must use.
    """

    task: str
    phrasing: str
    value: str
    prompt: str
    answer: str
    words: tuple[str, ...] = ()

    def check(self, text: str) -> bool:
        """Whether a text answers the problem exactly."""
        if self.task == "sentence":
            return is_sentence(text, self.words)
        return text == self.answer


def is_sentence(text: str, words: tuple[str, ...]) -> bool:
    """Whether a text is a sentence of the grammar that uses all the given words."""
    match = re.fullmatch(r"The (\w+) (\w+) (\w+)s (\w+) the (\w+)\.", text)
    if match is None:
        return False
    adjective, noun, verb, preposition, place = match.groups()
    known = adjective in ADJECTIVES and noun in NOUNS and verb in VERBS and PLACES.get(place) == preposition
    return known and set(words) <= {adjective, noun, verb, place}


def vocabulary() -> list[str]:
    """The texts that the tokenizer takes its whole words from: everything but the operands."""
    texts = [frame.format("") for frame in FRAMES]
    for wordings in WORDINGS.values():
        texts += [re.sub(r"\{\w+\}", "7", wording) for wording in wordings]
    texts += [f" {word}" for group in (DAYS, MONTHS, ADJECTIVES, NOUNS, VERBS, PLACES, FIELDS) for word in group]
    texts += [f" {verb}s" for verb in VERBS] + [*DAYS, *MONTHS, *FIELDS, " day", " month", " in", " on", " by"]
    texts += ["1 + 2 = 3", "1 - 2 = 3", "There are 7 letters in 7.", "There are 7 words in 7."]
    texts += ["7 comes after 7.", "7 comes before 7.", "The 7 the 7.", "name is 7, age = 7"]
    texts += ['{"name": "7", "age": 7, "city": "7"}', "You are a helpful assistant. Be brief. Answer the question."]
    return texts


KNOWN_WORDS = sorted({word for text in vocabulary() for word in re.findall(r"(?<= )[a-z]{2,}", text)})
_KNOWN = frozenset(KNOWN_WORDS)


def fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of_value(task: str, value: str) -> str:
    """The split a value belongs to: 80 % train, 8 % choose, 12 % test. Words that are one token to the tokenizer are a
    table to the model, so they are always in training."""
    if task != "sentence" and any(word in _KNOWN for word in re.findall(r"[a-z]+", value.lower())):
        return "train"
    share = fingerprint(f"{task}|{value}") % 100
    return "train" if share < 80 else "choose" if share < 88 else "test"


def phrasings(kind: str, split: str) -> list[tuple[str, str]]:
    """(frame, wording) pairs of a split: of the six frames of a wording one is held out for each other split."""
    found = []
    for i, wording in enumerate(WORDINGS[kind]):
        for j, frame in enumerate(FRAMES):
            owner = {5: "test", 4: "choose"}.get((i + j) % 6, "train")
            if owner == split:
                found.append((frame, wording))
    return found


_PHRASINGS = {(kind, split): phrasings(kind, split) for kind in WORDINGS for split in SPLITS}
_BARE = {key: [pair for pair in pairs if pair[0] == "{}"] for key, pairs in _PHRASINGS.items()}


def generate(split: str, rng: random.Random, task: str) -> Problem:
    """A problem of a split and task."""
    while True:
        kind, value, fields, answer, words = _MAKERS[task](split, rng)
        if task == "next" or split_of_value(task, value) == split:
            break
    # People mostly ask without a greeting, so training does too.
    bare = split == "train" and rng.random() < 0.4
    frame, wording = rng.choice((_BARE if bare else _PHRASINGS)[kind, split])
    prompt = frame.format(wording.format(**fields))
    return Problem(task, frame.format(wording), value, prompt, answer, words)


def problems(split: str, count: int, seed: int) -> list[Problem]:
    """``count`` different problems, the same number of each task. Raises ValueError when a task has too few."""
    rng = random.Random(f"{split}|{seed}")
    found: dict[str, Problem] = {}
    for i in range(count):
        for _ in range(1000):
            problem = generate(split, rng, TASKS[i % len(TASKS)])
            if problem.prompt not in found:
                break
        else:
            raise ValueError(f"{split} has not so many different problems of the task {TASKS[i % len(TASKS)]}")
        found[problem.prompt] = problem
    return list(found.values())


def check_disjoint(count: int = 20_000, seed: int = 0) -> dict[str, int]:
    """
    Prove by hash that the splits share no value (except the table of ``next``), no phrasing and no prompt.

    Returns:
        dict: how many different hashes of each kind were compared.

    Raises:
        AssertionError: an overlap.
    """
    sizes: dict[str, int] = {}
    seen: dict[str, dict[str, set[int]]] = {kind: {} for kind in ("value", "phrasing", "prompt")}
    for split in SPLITS:
        rng = random.Random(f"disjoint|{split}|{seed}")
        sample = [generate(split, rng, TASKS[i % len(TASKS)]) for i in range(count)]
        for kind, sets in seen.items():
            sets[split] = {
                fingerprint(f"{p.task}|{getattr(p, kind)}") for p in sample if kind != "value" or p.task != "next"
            }
            sizes[f"{split} {kind}s"] = len(sets[split])
    for kind, sets in seen.items():
        for i, one in enumerate(SPLITS):
            for other in SPLITS[i + 1 :]:
                assert not sets[one] & sets[other], f"{one} and {other} share a {kind}"
    return sizes


def _word(rng: random.Random, shortest: int, longest: int) -> str:
    """A lower-case word: two thirds can be pronounced, the rest is any letters."""
    length = rng.randint(shortest, longest)
    if rng.random() < 0.33:
        return "".join(rng.choices(LETTERS, k=length))
    word = ""
    while len(word) < length:
        word += rng.choice(CONSONANTS) + rng.choice(VOWELS) + rng.choice(("", "", rng.choice(CONSONANTS)))
    start = rng.randint(0, 1)
    return (word[start:] + word[:start])[:length]


def _operand(split: str, rng: random.Random, shortest: int, longest: int) -> str:
    """A word to work on. In training it is sometimes one the tokenizer knows whole, to teach its spelling."""
    if split == "train" and rng.random() < 0.06:
        return rng.choice([word for word in KNOWN_WORDS if shortest <= len(word) <= longest])
    return _word(rng, shortest, longest)


def _number(rng: random.Random) -> int:
    digits = rng.choices((1, 2, 3), weights=(2, 5, 4))[0]
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


Made = tuple[str, str, dict[str, object], str, tuple[str, ...]]


def _add(split: str, rng: random.Random) -> Made:
    a, b = _number(rng), _number(rng)
    return "add", f"{min(a, b)} {max(a, b)}", {"a": a, "b": b}, f"{a} + {b} = {a + b}", ()


def _subtract(split: str, rng: random.Random) -> Made:
    b, a = sorted((_number(rng), _number(rng)))
    return "subtract", f"{a} {b}", {"a": a, "b": b}, f"{a} - {b} = {a - b}", ()


def _reverse(split: str, rng: random.Random) -> Made:
    word = _operand(split, rng, 3, 9)
    return "reverse", word, {"w": word}, word[::-1], ()


def _words(split: str, rng: random.Random, fewest: int, most: int, shortest: int, longest: int) -> list[str]:
    words: list[str] = []
    count = rng.randint(fewest, most)
    longest -= count == 4
    while len(words) < count:
        word = _operand(split, rng, shortest, longest)
        if word not in words:
            words.append(word)
    return words


def _reverse_words(split: str, rng: random.Random) -> Made:
    words = _words(split, rng, 2, 4, 2, 5)
    text = " ".join(words)
    return "reverse_words", text, {"w": text}, " ".join(reversed(words)), ()


def _sort(split: str, rng: random.Random) -> Made:
    words = _words(split, rng, 2, 4, 2, 5)
    if rng.random() < 0.15:
        words[1] = words[0][0] + words[1][1:]
    if len(set(words)) < len(words):
        return _sort(split, rng)
    answer = " ".join(sorted(words))
    return "sort", answer, {"w": " ".join(words)}, answer, ()


def _case(split: str, rng: random.Random) -> Made:
    text = " ".join(_words(split, rng, 1, 3, 2, 6))
    kind = rng.choice(("upper", "lower", "title"))
    answer = {"upper": text.upper, "lower": text.lower, "title": text.title}[kind]()
    if kind == "upper":
        shown = rng.choice((text, text, text.title()))
    elif kind == "lower":
        shown = rng.choice((text.upper(), text.upper(), text.title()))
    else:
        shown = rng.choice((text, text, text.upper()))
    return f"case {kind}", text, {"w": shown}, answer, ()


def _count(split: str, rng: random.Random) -> Made:
    if rng.random() < 0.5:
        word = _operand(split, rng, 2, 9)
        return "count letters", word, {"w": word}, f"There are {len(word)} letters in {word}.", ()
    words = _words(split, rng, 2, 5, 2, 3)
    text = " ".join(words)
    return "count words", text, {"w": text}, f"There are {len(words)} words in {text}.", ()


def _next(split: str, rng: random.Random) -> Made:
    unit, names = rng.choice((("day", DAYS), ("month", MONTHS)))
    at, kind = rng.randrange(len(names)), rng.choice(("after", "before"))
    other = names[(at + (1 if kind == "after" else -1)) % len(names)]
    answer = f"{other} comes {kind} {names[at]}."
    return f"next {kind}", f"{kind} {names[at]}", {"unit": unit, "x": names[at]}, answer, ()


def _json(split: str, rng: random.Random) -> Made:
    record: dict[str, object] = {}
    names = rng.sample(FIELDS, rng.choice((1, 2, 2, 3)))
    # Question and answer together must fit in a canvas of 64 tokens.
    longest = 4 if len(names) == 3 else 6
    for name in names:
        if name in ("age", "size"):
            record[name] = rng.randint(1, 99)
        elif name in ("name", "city"):
            record[name] = _word(rng, 3, longest).capitalize()
        else:
            record[name] = _operand(split, rng, 3, min(longest, 5))
    form = rng.choice(("{} {}", "{} is {}", "{} = {}") if len(names) < 3 else ("{} {}",))
    text = ", ".join(form.format(name, value) for name, value in record.items())
    return "json", " ".join(map(str, record.values())), {"f": text}, json.dumps(record), ()


def _sentence(split: str, rng: random.Random) -> Made:
    adjective, noun, verb = rng.choice(ADJECTIVES), rng.choice(NOUNS), rng.choice(VERBS)
    place = rng.choice(tuple(PLACES))
    answer = f"The {adjective} {noun} {verb}s {PLACES[place]} the {place}."
    kind = rng.choice(("place", "adjective"))
    words = (noun, verb, place) if kind == "place" else (adjective, noun, verb)
    fields: dict[str, object] = {"adjective": adjective, "noun": noun, "verb": verb, "place": place}
    return f"sentence {kind}", " ".join(words), fields, answer, words


_MAKERS: dict[str, Callable[[str, random.Random], Made]] = {
    "add": _add,
    "subtract": _subtract,
    "reverse": _reverse,
    "reverse_words": _reverse_words,
    "sort": _sort,
    "case": _case,
    "count": _count,
    "next": _next,
    "json": _json,
    "sentence": _sentence,
}


def stream(split: str, seed: object, weights: dict[str, float]) -> Iterator[Problem]:
    """Endless problems, tasks drawn by weight."""
    rng = random.Random(f"{split}|{seed}")
    names, shares = list(weights), list(weights.values())
    while True:
        yield generate(split, rng, rng.choices(names, shares)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="prove that the splits are disjoint and say how many")
    args = parser.parse_args()
    if args.check:
        print(json.dumps(check_disjoint(seed=args.seed), indent=2))
        return
    for problem in problems(args.split, args.count, args.seed):
        print(f"{problem.task:14} {problem.prompt}  ->  {problem.answer}")


if __name__ == "__main__":
    main()
