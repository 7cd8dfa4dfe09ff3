"""Tokenizers that are not what their tokenizer.json says: found when they are loaded, and put right in memory.

transformers 5 builds many tokenizer classes from the vocabulary in tokenizer.json and rules of their own. A class that
is code of the checkpoint loses the merges that way, so that every character is a token and spaces are gone; a class
that is not the file's brings the wrong rules.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .checkpoint import affixes, read_json
from .errors import CheckpointError, note

# Each begins with a word of its own: whether text gets a space in front is a setting (add_prefix_space, legacy).
PROBES = (
    "x the value of Fran's cap isn't THE END I'M",
    "x 12345 + 67.8 = $9 (a_b != c);",
    "x:\n\n  def f(a):\n\t\treturn [a, None]  # ok\r\n!!!\n",
    "x 北京欢迎你，東京 한국어 Привет Ünïcödé cafe\u0301",
    "x 👩‍💻🙂 ∀x∈ℝ",
)
_NORMALIZING = {"do_lower_case", "strip_accents", "tokenize_chinese_chars", "keep_accents", "remove_space"}
_FOR_AUTO_ALONE = {"trust_remote_code", "tokenizer_type", "config", "use_fast", "code_revision"}
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_COPY = "copy tokenizer.json and tokenizer_config.json from the original checkpoint"

_told: set[Path] = set()


def repaired(tokenizer: Any, path: Path, given: Mapping[str, Any] | None = None, *, quiet: bool = False) -> Any:
    """
    The tokenizer, reading and writing text as the tokenizer.json it was loaded from says. Settings of
    tokenizer_config.json and of the caller stay in force, and a class that is code is only relieved of an empty
    tokenizer, never of rules of its own.

    Args:
        tokenizer: transformers' tokenizer, a host's wrapper around it or a processor that has it; changed in place.
        path: the directory it was loaded from.
        given: the arguments that the caller gave for AutoTokenizer.
        quiet: say nothing of it.

    Raises:
        CheckpointError: it differs, and tokenizer.json does not help.
    """
    from tokenizers import Tokenizer

    file, inner, given = path / "tokenizer.json", _inner(tokenizer), given or {}
    if inner is None or not file.is_file():
        return tokenizer
    kind, loaded = type(inner), getattr(inner, "_tokenizer", None)
    chosen = not kind.__module__.startswith("transformers.") or "tokenizer_type" in given
    if not isinstance(loaded, Tokenizer):
        # mistral-common reads the same vocabulary with rules that Mistral's tokenizer.json had wrong.
        if not chosen and kind.__name__ != "MistralCommonBackend":
            _refuse_if_different(inner, path, given)
        return tokenizer
    skim = _skim(file)
    wrong = _emptied(loaded, skim, file)
    if wrong is None and (chosen or _looks_the_same(loaded, skim)):
        return tokenizer
    plain = _plain(path, given, loaded)
    for entry in skim.head.get("added_tokens") or ():
        if plain.token_to_id(entry["content"]) != entry["id"]:
            raise CheckpointError(
                f"{file} gives the token {entry['content']!r} the id {entry['id']}, and is read with "
                f"{plain.token_to_id(entry['content'])}, as tokens are missing before it: {_COPY}."
            )
    wrong = wrong or _difference(loaded, plain)
    if wrong is None:
        return tokenizer
    inner._tokenizer = plain
    if not chosen and (left := _difference(inner, plain)):
        raise CheckpointError(f"{path}: its tokenizer {kind.__name__} is not that of tokenizer.json, {left}; {_COPY}.")
    for name in ("vocab", "merges"):
        inner.init_kwargs.pop(name, None)  # else a copy has them in its tokenizer_config.json
    if path not in _told and not quiet:
        _told.add(path)
        note(f"{path}: tokenizer.json is used as it is, because what transformers made of it was broken: {wrong}.")
    return _again(tokenizer, inner)


def encode_prompt(tokenizer: Any, text: str, closing: Container[int] = ()) -> list[int]:
    """
    The ids of a prompt that is to be continued. One that begins with a special token was made by a chat template, which
    has written all that belong there; any other gets those that the tokenizer puts in front.

    Args:
        closing: ids that must not stand before a continuation (end of sequence): what the tokenizer puts after every
            text goes where it ends with one.
    """
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    known = getattr(tokenizer, "added_tokens_decoder", None) or {}
    bos = tokenizer.bos_token
    if (bos and text.startswith(bos)) or (ids and getattr(known.get(ids[0]), "special", False)):
        return ids
    ids = list(tokenizer.encode(text, add_special_tokens=True))
    if ids and ids[-1] in closing:
        ids = ids[: len(ids) - len(affixes(tokenizer)[1])]
    return ids


def _inner(holder: Any) -> Any:
    """transformers' tokenizer in what a host loaded, or None."""
    from transformers import PreTrainedTokenizerBase

    for found in (holder, getattr(holder, "_tokenizer", None), getattr(holder, "tokenizer", None)):
        if isinstance(found, PreTrainedTokenizerBase):
            return found
    return None


def _again(holder: Any, inner: Any) -> Any:
    """A host's wrapper, or the detokenizer on a processor, as the host made it: both keep a map of the tokens."""
    values = vars(holder)
    old: Any = values.get("_detokenizer") or values.get("detokenizer")
    kind: Callable[..., Any] = type(old)
    make = functools.partial(kind, **({"trim_space": old.trim_space} if hasattr(old, "trim_space") else {}))
    if values.get("_tokenizer") is inner:
        names = inspect.signature(type(holder)).parameters
        kept = {name: values[f"_{name}"] for name in names if name != "tokenizer" and f"_{name}" in values}
        holder.__init__(inner, **({"detokenizer_class": make} if old else {}), **kept)
    elif old:
        holder.detokenizer = make(inner)
    return holder


class _Skim(NamedTuple):
    """What can be read of a tokenizer.json without its vocabulary, which takes half a second to build."""

    head: dict[str, Any]
    model: dict[str, Any]
    vocab: dict[str, int]  # some of it
    merges: list[str]  # what the first ones make


def _skim(file: Path) -> _Skim:
    data = file.read_bytes()
    try:
        return _skim_text(data)
    except (ValueError, AttributeError, TypeError, KeyError, IndexError):  # in another order than tokenizers writes
        head = read_json(file)
    model = head.pop("model", None)
    try:
        vocab, merges = model.pop("vocab"), model.pop("merges", None) or []
        names = [*vocab][:16] + [*vocab][-16:] if isinstance(vocab, dict) else []
        return _Skim(head, model, {name: vocab[name] for name in names}, [_merged(m) for m in merges[:8]])
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not a tokenizer ({type(error).__name__}: {error}); {_COPY}.") from None


def _skim_text(data: bytes) -> _Skim:
    """Raises all kinds of errors for a file that is not laid out as the tokenizers library does it."""
    start = _find(rb',\s*"model"\s*:\s*{', data)
    body = _find(rb',\s*"vocab"\s*:\s*[{\[]', data, start.end())
    head = json.loads(data[: start.start()] + b"}")
    model = json.loads(b"{" + data[start.end() : body.start()] + b"}")
    for name in ("added_tokens", *_PARTS):
        head[name]
    if model["type"] != "BPE":
        return _Skim(head, model, {}, [])
    listed = _find(rb'"merges"\s*:\s*\[', data, data.rindex(b'"merges"'))
    entry = rb'("(?:[^"\\]|\\.)*")\s*:\s*(\d+)'
    first = re.findall(entry, data[body.end() : body.end() + 1000])[:16]
    last = re.findall(entry, data[max(listed.start() - 1000, body.end()) : listed.start()])[-16:]
    merges: list[str] = []
    text, place = data[listed.end() : listed.end() + 4000].decode(errors="ignore"), 0
    while len(merges) < 8 and (begin := re.compile(r"[\s,]*(?=[\[\"])").match(text, place)):
        merge, place = json.JSONDecoder().raw_decode(text, begin.end())
        merges.append(_merged(merge))
    return _Skim(head, model, {json.loads(name): int(number) for name, number in first + last}, merges)


def _find(pattern: bytes, data: bytes, start: int = 0) -> re.Match[bytes]:
    found = re.compile(pattern).search(data, start)
    if found is None:
        raise ValueError(pattern)
    return found


def _merged(merge: Any) -> str:
    return merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)


def _emptied(loaded: Any, skim: _Skim, file: Path) -> str | None:
    """What nobody can have wanted: the rules of a tokenizer.json are gone. Raises CheckpointError when the file itself
    was saved in that state."""
    is_bpe = type(loaded.model).__name__ == "BPE"
    if is_bpe and skim.model.get("type", "BPE") != "BPE":
        return f"a BPE instead of a {skim.model['type']}"
    if is_bpe and skim.merges:
        text = "".join(skim.merges)
        if len(loaded.model.tokenize(text)) >= len(text):
            return "a BPE without merges, every character a token"
    elif is_bpe:
        added = {entry["content"] for entry in skim.head.get("added_tokens") or ()}
        words = [w for w in skim.vocab if len(w) > 1 and w not in added and not re.fullmatch(r"<.*>|\[.*]", w)]
        if len(words) >= 8 and all(len(loaded.model.tokenize(word)) > 1 for word in words):
            raise CheckpointError(
                f"{file} has no merges, so that words like {words[-1]!r} of its vocabulary can never be read: a broken "
                f"tokenizer was saved; {_COPY}."
            )
    if any(skim.head.get(part) for part in _PARTS) and not any(getattr(loaded, part) for part in _PARTS):
        return "without its rules for splitting and joining text"
    return None


def _looks_the_same(loaded: Any, skim: _Skim) -> bool:
    """Whether nothing needs a closer look."""
    from tokenizers import Tokenizer

    empty: dict[str, Any] = {
        "added_tokens": [],
        "post_processor": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    try:
        file = Tokenizer.from_str(json.dumps({**skim.head, **empty}))
    except Exception:  # a file that the library cannot read: for _plain to say
        return False

    def state(of: Any, part: str) -> Any:
        found = getattr(of, part)
        return found and found.__getstate__()

    added = loaded.get_added_tokens_decoder()
    return (
        all(state(loaded, part) == state(file, part) for part in _PARTS)
        and all(
            e["id"] in added and added[e["id"]].content == e["content"] for e in skim.head.get("added_tokens") or ()
        )
        and all(loaded.token_to_id(name) == number for name, number in skim.vocab.items())
    )


def _plain(path: Path, given: Mapping[str, Any], loaded: Any = None) -> Any:
    """The tokenizer.json with the settings beside it, and no class's rules."""
    from transformers import PreTrainedTokenizerFast

    try:
        more = {name: value for name, value in given.items() if name not in _FOR_AUTO_ALONE}
        plain = PreTrainedTokenizerFast.from_pretrained(path, **more)._tokenizer
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path / 'tokenizer.json'} cannot be read ({why}); {_COPY}.") from error
    explicit = {**read_json(path / "tokenizer_config.json", required=False), **given}
    if loaded is not None and loaded.normalizer is not None and _NORMALIZING & explicit.keys():
        plain.normalizer = loaded.normalizer
    if isinstance(wish := explicit.get("add_prefix_space"), bool) and (rules := plain.pre_tokenizer) is not None:
        setting = rb'("add_prefix_space":)(?:true|false)'
        rules.__setstate__(re.sub(setting, rb"\1" + json.dumps(wish).encode(), rules.__getstate__()))
        plain.pre_tokenizer = rules
    return plain


def _refuse_if_different(inner: Any, path: Path, given: Mapping[str, Any]) -> None:
    wrong = _difference(inner, _plain(path, given))
    if wrong:
        raise CheckpointError(
            f"{path}: its tokenizer {type(inner).__name__}, which cannot be repaired, is not that of tokenizer.json, "
            f"{wrong}; {_COPY}."
        )


def _difference(loaded: Any, plain: Any) -> str | None:
    """What a tokenizer reads or writes otherwise than the plain one, or None."""
    for text in PROBES:
        wanted = _ids(plain, text)
        try:
            found = _ids(loaded, text)
        except Exception as error:  # rules that cannot go with this vocabulary
            return f"it cannot read {text!r} ({' '.join(str(error).split())[:100]})"
        if not _end_alike(found, wanted):
            return f"it reads {text!r} as {len(found)} tokens, not as the right {len(wanted)}"
        written = loaded.decode(wanted, skip_special_tokens=False) if type(loaded) is type(plain) else None
        if written is not None and written.strip() != plain.decode(wanted, skip_special_tokens=False).strip():
            return f"it writes {text!r} as {written!r}"
    for number, token in list(plain.get_added_tokens_decoder().items())[:300]:
        if number in _ids(plain, token.content) and number not in _ids(loaded, token.content):
            return f"it does not know the token {token.content!r}"
    return None


def _ids(tokenizer: Any, text: str) -> list[int]:
    found = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(found, "ids", found))


def _end_alike(found: list[int], wanted: list[int]) -> bool:
    """Whether two lists are the same but for the word they begin with."""
    same = 0
    for a, b in zip(reversed(found), reversed(wanted), strict=False):
        if a != b:
            break
        same += 1
    return same > 0 and max(len(found), len(wanted)) - same <= 2
