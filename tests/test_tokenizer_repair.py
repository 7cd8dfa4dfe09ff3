"""Tokenizers that transformers builds otherwise than their tokenizer.json says: repaired, refused, or left alone where
a setting asks for it; and the chat templates of both hosts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm import tokenizer_utils
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto

import mlx_dllm_plugin
from mlx_dllm_plugin import tokenizers as plugin
from mlx_dllm_plugin.errors import CheckpointError
from mlx_dllm_plugin.tokenizers import encode_prompt, repaired
from tests.tools import Runner, assert_one_sentence, copy_run, edit_json, make_ar_model, process

TEXT = "def f(x):\n    return [12345, x]  # The capital of France, ï 中文 🙂"
NOTE = "[mlx-dllm-plugin] "
E_ALONE = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"String": "e"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


class OwnTokenizer(PreTrainedTokenizerFast):
    """What tokenizers of published checkpoints look like: code beside the weights with a constructor of its own."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


class OwnRulesTokenizer(PreTrainedTokenizerFast):
    """One that means what it does."""

    def __init__(self, vocab: Any = None, merges: Any = None, **kwargs: Any):
        own = Tokenizer(models.BPE(vocab=vocab, merges=merges or [("i", "n")]))
        own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
        super().__init__(tokenizer_object=own, **kwargs)


@pytest.fixture(autouse=True)
def own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (OwnTokenizer, OwnRulesTokenizer):
        monkeypatch.setitem(tokenization_auto.REGISTERED_TOKENIZER_CLASSES, kind.__name__, kind)
    monkeypatch.setattr(plugin, "_told", set())


@pytest.fixture
def sdar(goldens: Path) -> Path:
    return goldens / "block" / "sdar-b4"


def planted(source: Path, target: Path, kind: str | None, **settings: Any) -> Path:
    """A copy whose tokenizer has another class."""
    copy = copy_run(source, target)
    edit_json(copy / "tokenizer_config.json", tokenizer_class=kind or ..., **settings)
    return copy


def edit_tokenizer(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change parts of a tokenizer.json; `model__merges` is a key of its model."""
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    for name, value in changes.items():
        part, _, key = name.partition("__")
        if key:
            values[part][key] = value
        else:
            values[part] = value
    file.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    return values


def save(rules: Tokenizer, folder: Path, **config: Any) -> Path:
    """A folder with nothing but this tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    rules.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def reference(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def ids_of(tokenizer: Any, text: str = TEXT) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def check(tokenizer: Any, folder: Path) -> None:
    """It reads and writes as the tokenizer.json of the folder says, whole and token by token."""
    plain = reference(folder)
    specials = "".join(token.content + "a" for token in plain.get_added_tokens_decoder().values())
    for text in (TEXT, specials, "<|im_start|>user\nhi<|im_end|>"):
        wanted = plain.encode(text, add_special_tokens=False).ids
        assert ids_of(tokenizer, text) == wanted
        assert tokenizer.decode(wanted) == plain.decode(wanted, skip_special_tokens=False)
        detokenizer = tokenizer.detokenizer
        for token in wanted:
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text == text.removeprefix(" ")


def notes(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith(NOTE)]


# --- what transformers does, and the repair


def test_a_class_of_its_own_loses_the_merges_and_gets_them_back(
    sdar: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = planted(sdar, tmp_path / "sdar", "OwnTokenizer")
    broken = AutoTokenizer.from_pretrained(copy, trust_remote_code=False)
    if ids_of(broken) == ids_of(load_tokenizer(sdar)):
        pytest.skip("this transformers does not rebuild the tokenizers of classes it does not know")
    assert broken.decode(ids_of(broken, "hi you")) == "h i y o u"
    capfd.readouterr()
    tokenizer = mlx_lm.load(str(copy))[1]
    said = notes(capfd)
    assert len(said) == 1 and str(copy) in said[0] and "BPE without merges" in said[0] and "tokenizer.json" in said[0]
    check(tokenizer, copy)
    original = mlx_lm.load(str(sdar))[1]
    for name in ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id", "chat_template", "eos_token_ids"):
        assert getattr(tokenizer, name) == getattr(original, name)
    for name in ("has_tool_calling", "tool_call_start_tokens", "has_thinking", "think_start_tokens", "think_end_id"):
        assert getattr(tokenizer, name) == getattr(original, name)
    assert isinstance(tokenizer._tokenizer, OwnTokenizer) and len(tokenizer) == len(original)
    messages = [{"role": "user", "content": "hi there"}]
    assert tokenizer.apply_chat_template(messages) == original.apply_chat_template(messages)
    mlx_lm.load(str(copy))
    assert notes(capfd) == []  # said once


@pytest.mark.parametrize("load", [mlx_lm.load, mlx_dllm_plugin.load])
def test_a_repaired_tokenizer_writes_the_same_text(
    sdar: Path, tmp_path: Path, load: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = planted(sdar, tmp_path / "sdar", "OwnTokenizer")
    texts = []
    for folder in (sdar, copy):
        model, tokenizer = load(str(folder))[:2]
        texts.append(mlx_lm.generate(model, tokenizer, "The value of x is", max_tokens=16))
    assert texts[0] == texts[1] != ""
    assert len(notes(capfd)) == 1


TRUSTED = """
import sys, mlx_lm
from mlx_lm.utils import load_tokenizer
trusted = load_tokenizer(sys.argv[1], {"trust_remote_code": True})
print(type(trusted._tokenizer).__module__, *trusted.encode(sys.argv[2], add_special_tokens=False))
print(*load_tokenizer(sys.argv[1]).encode(sys.argv[2], add_special_tokens=False))
"""


def test_code_that_was_allowed_to_run_loses_its_merges_too(sdar: Path, tmp_path: Path) -> None:
    """The published case: saving drops "trust_remote_code" from tokenizer_config.json, without which transformers
    rebuilds the tokenizer of the code it was allowed to run."""
    auto_map = {"AutoTokenizer": [None, "tokenization_own.TheirTokenizer"]}
    copy = planted(sdar, tmp_path / "sdar", "TheirTokenizer", auto_map=auto_map)
    (copy / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class TheirTokenizer(PreTrainedTokenizerFast):\n"
        "    def __init__(self, *args, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n"
    )
    done = process(["-c", TRUSTED, copy, TEXT], HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert done.status == 0, done.err
    wanted = " ".join(map(str, reference(copy).encode(TEXT, add_special_tokens=False).ids))
    trusted, without = done.out.splitlines()
    assert trusted.startswith("transformers_modules") and trusted.endswith(f" {wanted}") and without == wanted
    assert done.err.count(NOTE) == 1 and "BPE without merges" in done.err


def test_the_rules_of_another_class_give_way(sdar: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers' GPT2Tokenizer splits as GPT-2 does, whatever tokenizer.json says."""
    copy = planted(sdar, tmp_path / "sdar", "GPT2Tokenizer")
    check(load_tokenizer(copy), copy)
    assert notes(capfd) == []  # the file's rules are those
    edit_tokenizer(copy, pre_tokenizer=E_ALONE)
    broken = AutoTokenizer.from_pretrained(copy, trust_remote_code=False)
    assert ids_of(broken) != reference(copy).encode(TEXT, add_special_tokens=False).ids
    tokenizer = load_tokenizer(copy)
    check(tokenizer, copy)
    (said,) = notes(capfd)
    assert "tokens, not as the right" in said


def test_lost_tokens_come_back(sdar: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = planted(sdar, tmp_path / "sdar", "Qwen2Tokenizer", added_tokens_decoder={})
    (copy / "special_tokens_map.json").unlink()
    edit_tokenizer(copy, normalizer={"type": "NFC"})  # as the class has it
    broken = AutoTokenizer.from_pretrained(copy, trust_remote_code=False)
    wanted = reference(copy).token_to_id("<tool_call>")
    assert wanted not in ids_of(broken, "a<tool_call>b")
    tokenizer = load_tokenizer(copy)
    check(tokenizer, copy)
    (said,) = notes(capfd)
    assert "does not know the token" in said
    assert tokenizer.convert_tokens_to_ids("<tool_call>") == wanted


@pytest.mark.parametrize("part, said", [("decoder", "it writes "), ("pre_tokenizer", "it reads ")])
def test_a_single_part_that_is_lost(
    sdar: Path, part: str, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = load_tokenizer(sdar)
    setattr(broken._tokenizer._tokenizer, part, decoders.Fuse() if part == "decoder" else pre_tokenizers.Whitespace())
    assert repaired(broken, sdar) is broken
    check(broken, sdar)
    assert said in notes(capfd)[0]


def test_files_of_another_vocabulary(sdar: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the same rules; a name at an end of the vocabulary has another id, or the added tokens are gone."""
    swapped = copy_run(sdar, tmp_path / "swapped")
    vocab = json.loads((sdar / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    edit_tokenizer(swapped, model__vocab={**vocab, "!": vocab["0"], "0": vocab["!"]})
    check(repaired(load_tokenizer(sdar), swapped), swapped)
    assert "it reads " in notes(capfd)[0]
    bare = planted(sdar, tmp_path / "bare", "PreTrainedTokenizerFast", added_tokens_decoder={})
    edit_tokenizer(bare, added_tokens=[])
    tokenizer = load_tokenizer(bare)
    assert ids_of(tokenizer, "<tool_call>") != ids_of(load_tokenizer(sdar), "<tool_call>")
    check(repaired(tokenizer, sdar), sdar)
    assert "does not know the token" in notes(capfd)[0]


@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel", "Unigram"])
def test_other_models_than_bpe(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = {"[UNK]": 0, "the": 1, "value": 2, "of": 3, "x": 4, ",": 5}
    made = {
        "WordPiece": lambda: models.WordPiece(vocab=words, unk_token="[UNK]"),
        "WordLevel": lambda: models.WordLevel(vocab=words, unk_token="[UNK]"),
        "Unigram": lambda: models.Unigram(vocab=[(word, -float(i)) for word, i in words.items()], unk_id=0),
    }
    rules = Tokenizer(made[kind]())
    rules.pre_tokenizer, rules.normalizer = pre_tokenizers.Whitespace(), normalizers.Lowercase()
    rules.decoder = decoders.WordPiece()
    folder = save(rules, tmp_path / kind, tokenizer_class="OwnTokenizer")
    broken = OwnTokenizer.from_pretrained(folder)
    wanted = rules.encode("The value, of x", add_special_tokens=False).ids
    assert broken.backend_tokenizer.pre_tokenizer is None
    assert ids_of(repaired(broken, folder), "The value, of x") == wanted
    (said,) = notes(capfd)
    assert ("a BPE instead of a" if kind != "Unigram" else "without its rules") in said
    plain = PreTrainedTokenizerFast.from_pretrained(folder)
    assert ids_of(repaired(plain, folder), "The value, of x") == wanted and notes(capfd) == []


def test_a_converted_copy_has_the_files_of_the_original(
    sdar: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not what transformers made of them; what is broken about them is repaired in memory, and said once."""
    copy = planted(sdar, tmp_path / "sdar", "OwnTokenizer")
    mlx_lm.convert(str(copy), str(tmp_path / "mlx"))
    assert len(notes(capfd)) == 1
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "mlx" / name).read_bytes() == (copy / name).read_bytes()
    check(load_tokenizer(tmp_path / "mlx"), sdar)
    assert len(notes(capfd)) == 1


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("merges", ["pairs", "strings", "a token of that name"])
def test_any_layout_of_tokenizer_json(
    sdar: Path, tmp_path: Path, indent: Any, sort: bool, merges: str, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = planted(sdar, tmp_path / "sdar", "OwnTokenizer")
    values = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    if merges == "a token of that name":
        model = values["model"]
        (a, b), (c, d) = model["merges"][-2:]
        model["merges"][-2:] = [["Ġ", "merges"]]
        model["vocab"] = {{a + b: "merges", c + d: "Ġmerges"}.get(t, t): i for t, i in model["vocab"].items()}
    if merges == "strings":
        values["model"]["merges"] = [" ".join(m) if isinstance(m, list) else m for m in values["model"]["merges"]]
    (copy / "tokenizer.json").write_text(json.dumps(values, indent=indent, sort_keys=sort, ensure_ascii=sort))
    check(load_tokenizer(copy), copy)
    assert len(notes(capfd)) == 1
    edit_json(copy / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (copy / "tokenizer.json").write_text(json.dumps(values, indent=indent, sort_keys=sort, ensure_ascii=sort))
    check(load_tokenizer(copy), copy)
    assert notes(capfd) == []


def test_autoregressive_checkpoints_keep_theirs(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_ar_model(tmp_path / "ar", data / "a2d" / "gpt2-grow" / "run" / "model")
    edit_json(path / "tokenizer_config.json", tokenizer_class="OwnTokenizer")
    monkeypatch.setattr(plugin, "_skim", lambda file: pytest.fail(f"looked at {file}"))
    tokenizer = load_tokenizer(path)
    assert ids_of(tokenizer) == ids_of(AutoTokenizer.from_pretrained(path)) and notes(capfd) == []


# --- refused


def test_a_file_without_merges_is_refused(
    sdar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a conversion saves that has not noticed: nothing there to repair it with."""
    copy = copy_run(sdar, tmp_path / "sdar")
    edit_tokenizer(copy, model__merges=[], pre_tokenizer=None, decoder=None)
    for load in (mlx_lm.load, load_tokenizer, mlx_dllm_plugin.load):
        with pytest.raises(CheckpointError) as refusal:
            load(str(copy))
        text = str(refusal.value)
        assert "tokenizer.json has no merges" in text and "copy tokenizer.json" in text and "original" in text
        assert "\n" not in text and ". " not in text
    outcome = Runner(monkeypatch, capfd)("mlx_lm.generate", "--model", copy, "--prompt", "hi")
    assert_one_sentence(outcome, "tokenizer.json has no merges", "copy tokenizer.json")
    # Words are looked up whole: merges are not needed.
    edit_tokenizer(copy, model__ignore_merges=True)
    load_tokenizer(copy)


def test_a_tokenizer_without_the_library_is_refused(sdar: Path, tmp_path: Path) -> None:
    copy = planted(sdar, tmp_path / "sdar", "ByT5Tokenizer")
    with pytest.raises(CheckpointError) as refusal:
        load_tokenizer(copy)
    text = str(refusal.value)
    assert (
        "ByT5Tokenizer" in text and "it reads " in text and "x the value of" in text and "copy tokenizer.json" in text
    )
    assert "\n" not in text and ". " not in text


def test_mistrals_own_library_is_taken_at_its_word(sdar: Path, tmp_path: Path) -> None:
    """It and tokenizer.json differ by a known mistake of the latter."""
    copy = planted(sdar, tmp_path / "sdar", "ByT5Tokenizer")
    other = AutoTokenizer.from_pretrained(copy, trust_remote_code=False)
    other.__class__ = type("MistralCommonBackend", (type(other),), {"__module__": "transformers.tokenization"})
    assert repaired(other, copy) is other


def test_a_tokenizer_that_stays_different_is_refused(
    sdar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = load_tokenizer(sdar)
    broken._tokenizer._tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    monkeypatch.setattr(type(broken._tokenizer), "encode", lambda self, text, **kwargs: [1, 2, 3])
    with pytest.raises(CheckpointError, match=r"is not that of tokenizer.json, it reads .* copy tokenizer.json"):
        repaired(broken, sdar)


def test_ids_with_a_gap_are_refused(sdar: Path, tmp_path: Path) -> None:
    """The library numbers what follows a missing token anew."""
    folder = planted(sdar, tmp_path / "gap", None)
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    missing, after = tokens[-2], tokens[-1]
    edit_tokenizer(folder, added_tokens=[token for token in tokens if token is not missing])
    with pytest.raises(CheckpointError) as error:
        load_tokenizer(folder)
    assert f"gives the token {after['content']!r} the id {after['id']}" in str(error.value)


def test_rules_that_do_not_go_with_the_vocabulary_give_way(
    sdar: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = planted(sdar, tmp_path / "bert", "BertTokenizer")
    check(load_tokenizer(folder), folder)
    assert len(notes(capfd)) == 1


def test_a_file_that_is_no_tokenizer(sdar: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sdar)
    copy = copy_run(sdar, tmp_path / "sdar")
    for text in (
        "[]",
        "{}",
        '{"model": 3}',
        '{"model": {"vocab": {}}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}}}',
    ):
        (copy / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            repaired(tokenizer, copy)


# --- left alone


@pytest.mark.parametrize("name", ["dream-tiny", "llada-8b-tiny", "llada-moe-tiny", "modernbert-tiny"])
def test_whole_tokenizers_cost_no_second_one(
    goldens: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugin, "_plain", lambda *args: pytest.fail("built the tokenizer a second time"))
    load_tokenizer(goldens / "llada_dream" / name)
    assert notes(capfd) == []


def test_a_large_vocabulary_is_looked_at_in_milliseconds(sdar: Path, tmp_path: Path) -> None:
    rules = json.loads((sdar / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, merges = rules["model"]["vocab"], rules["model"]["merges"]
    letters = [token for token in vocab if len(token) == 1 and token.isalpha()][:60]
    first = len(vocab)
    for a in letters:
        for b in letters:
            for c in letters[:40]:
                if a + b not in vocab:
                    vocab[a + b] = len(vocab)
                    merges.append([a, b])
                if a + b + c not in vocab:
                    vocab[a + b + c] = len(vocab)
                    merges.append([a + b, c])
    for token in rules["added_tokens"]:
        token["id"] += len(vocab) - first
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules, ensure_ascii=False), encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert len(tokenizer) > 140_000
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        repaired(tokenizer, tmp_path)
        best = min(best, time.perf_counter() - start)
    assert best < 0.05


def test_without_a_tokenizer_json_nothing_is_compared(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dream = goldens / "llada_dream" / "dream-tiny"
    assert not (dream / "tokenizer.json").exists()
    tokenizer = load_tokenizer(dream)
    monkeypatch.setattr(plugin, "_skim", lambda file: pytest.fail("looked"))
    assert repaired(tokenizer, dream) is tokenizer
    assert repaired(None, dream) is None and repaired("x", dream) == "x"


def sentencepiece_like(folder: Path, **config: Any) -> Path:
    """A Llama tokenizer.json as transformers 4 wrote it: a space in front comes from the normalizer."""
    words = ["▁the", "▁value", "▁of", "value", "the", "of"]
    letters = sorted({*"▁abcdefghijklmnopqrstuvwxyzTHENDIFM'0123456789", *"".join(words)})
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))])}
    merges = []
    for token in letters:
        vocab.setdefault(token, len(vocab))
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    rules = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    rules.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rules.decoder = decoders.Sequence(steps)
    rules.add_special_tokens(["<unk>", "<s>", "</s>"])
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        **config,
    }
    return save(rules, folder, **config)


@pytest.mark.parametrize(
    "settings",
    [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}, {"add_bos_token": True}],
    ids=str,
)
def test_llamas_space_in_front_is_transformers_affair(
    tmp_path: Path, settings: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = sentencepiece_like(tmp_path / "llama", **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    rules, before = tokenizer.backend_tokenizer.to_str(), ids_of(tokenizer)
    assert type(tokenizer).__name__ == "LlamaTokenizer"
    repaired(tokenizer, folder)
    assert tokenizer.backend_tokenizer.to_str() == rules and ids_of(tokenizer) == before and notes(capfd) == []


def test_explicit_settings_stay_in_force(sdar: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = planted(sdar, tmp_path / "prefix", "GPT2Tokenizer", add_prefix_space=True)
    plain, spaced = load_tokenizer(sdar), load_tokenizer(copy)
    assert notes(capfd) == []
    assert ids_of(spaced, "The value") == ids_of(plain, " The value") != ids_of(plain, "The value")
    # Broken otherwise, it is repaired and keeps the setting.
    spaced._tokenizer._tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    repaired(spaced, copy)
    assert len(notes(capfd)) == 1 and ids_of(spaced, "The value") == ids_of(plain, " The value")
    # Given by the caller.
    given = load_tokenizer(planted(sdar, tmp_path / "given", "GPT2Tokenizer"), {"add_prefix_space": True})
    assert notes(capfd) == [] and ids_of(given, "The value") == ids_of(plain, " The value")


def test_tokens_of_the_caller(sdar: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = planted(sdar, tmp_path / "sdar", "OwnTokenizer")
    tokenizer = load_tokenizer(copy, {"extra_special_tokens": ["<given>"]})
    assert len(notes(capfd)) == 1 and len(tokenizer) == len(load_tokenizer(sdar)) + 1
    assert ids_of(tokenizer, "a<given>b")[1] == len(tokenizer) - 1


@pytest.mark.parametrize("strip", [True, False])
def test_the_space_in_front_of_an_answer(tmp_path: Path, strip: bool) -> None:
    folder = sentencepiece_like(tmp_path / "llama", tokenizer_class="OwnTokenizer")
    if not strip:
        steps = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["decoder"]["decoders"][:3]
        edit_tokenizer(folder, decoder={"type": "Sequence", "decoders": steps})
    tokenizer = repaired(tokenizer_utils.load(folder), folder)
    detokenizer = tokenizer.detokenizer
    for token in ids_of(tokenizer, "the value"):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == " " * (not strip) + "the value"


@pytest.mark.parametrize("kind", ["OwnTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_tokens_that_only_tokenizer_config_has(
    sdar: Path, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = planted(sdar, tmp_path / "sdar", kind)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    size = reference(copy).get_vocab_size()
    more = {**config["added_tokens_decoder"], str(size): {**config["added_tokens_decoder"]["316"], "content": "<more>"}}
    edit_json(copy / "tokenizer_config.json", added_tokens_decoder=more)
    tokenizer = load_tokenizer(copy)
    assert ids_of(tokenizer, "a<more>b")[1] == size and len(tokenizer) == size + 1
    assert len(notes(capfd)) == (kind == "OwnTokenizer")
    detokenizer = tokenizer.detokenizer
    for token in ids_of(tokenizer, "a<more>b"):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == "a<more>b"


def test_split_special_tokens(sdar: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for kind in ("GPT2Tokenizer", "OwnTokenizer"):
        copy = planted(sdar, tmp_path / kind, kind, split_special_tokens=True)
        tokenizer = load_tokenizer(copy)
        assert tokenizer.mask_token_id not in ids_of(tokenizer, "a<|MASK|>b")
    assert len(notes(capfd)) == 1
    tokenizer = load_tokenizer(tmp_path / "GPT2Tokenizer")
    tokenizer._tokenizer._tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert tokenizer.mask_token_id not in ids_of(repaired(tokenizer, tmp_path / "GPT2Tokenizer"), "a<|MASK|>b")
    assert len(notes(capfd)) == 1


def test_lower_case_by_setting(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "[MASK]": 4, "the": 5, "end": 6, "x": 7, "THE": 8}
    rules = Tokenizer(models.WordPiece(vocab=words, unk_token="[UNK]"))
    rules.pre_tokenizer, rules.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    rules.normalizer = normalizers.BertNormalizer(lowercase=False)
    folder = save(rules, tmp_path / "bert", tokenizer_class="BertTokenizer", do_lower_case=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert ids_of(repaired(tokenizer, folder), "x THE end") == [7, 5, 6] and notes(capfd) == []
    folder = save(rules, tmp_path / "cased", tokenizer_class="BertTokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert ids_of(repaired(tokenizer, folder), "x THE end") == [7, 8, 6]


def test_letters_need_no_merges(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = [*"abcdefghijklmnopqrstuvwxyz ", *"<>012345678", *(f"<s{i}>" for i in range(9))]
    names += [f"extra{i}" for i in range(7)]
    rules = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    rules.pre_tokenizer, rules.decoder = pre_tokenizers.Split(" ", "isolated"), decoders.Fuse()
    rules.add_tokens(names[-7:])
    folder = save(rules, tmp_path / "letters")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert ids_of(repaired(tokenizer, folder), "ab extra6") == [0, 1, 26, len(names) - 1] and notes(capfd) == []


def test_rules_of_own_code_and_a_type_that_was_asked_for(
    sdar: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = planted(sdar, tmp_path / "own", "OwnRulesTokenizer")
    tokenizer = load_tokenizer(copy)
    assert ids_of(tokenizer) != reference(copy).encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids_of(tokenizer)) == TEXT and notes(capfd) == []
    other = copy_run(sdar, tmp_path / "other")
    edit_tokenizer(other, pre_tokenizer=E_ALONE)
    check(load_tokenizer(other), other)
    asked = load_tokenizer(other, {"tokenizer_type": "gpt2"})
    assert ids_of(asked) == ids_of(load_tokenizer(sdar)) and notes(capfd) == []


# --- mlx-vlm's processors


def test_the_processor_of_mlx_vlm_is_repaired_with_its_detokenizer(
    sdar: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    vlm = pytest.importorskip("mlx_vlm.utils")
    copy = planted(sdar, tmp_path / "sdar", "OwnTokenizer")
    processor = vlm.load_processor(copy, eos_token_ids=[1], trust_remote_code=False)
    old = processor.detokenizer
    assert repaired(processor, copy) is processor
    assert len(notes(capfd)) == 1 and type(processor.detokenizer) is type(old) is not None
    original = vlm.load_processor(sdar, eos_token_ids=[1], trust_remote_code=False)
    assert processor.stopping_criteria.eos_token_ids == original.stopping_criteria.eos_token_ids

    class Processor:
        """One that has a tokenizer, as those of image models do."""

    settings: tuple[tuple[str, Any], ...] = (("OwnTokenizer", {}), ("Qwen2Tokenizer", {"added_tokens_decoder": {}}))
    for kind, more in settings:
        edit_json(copy / "tokenizer_config.json", tokenizer_class=kind, **more)
        whole: Any = Processor()
        whole.tokenizer = AutoTokenizer.from_pretrained(copy, trust_remote_code=False)
        whole.detokenizer = type(old)(whole.tokenizer)
        for found in (processor, repaired(whole, copy)):
            ids = ids_of(getattr(found, "tokenizer", found))
            assert ids == reference(copy).encode(TEXT, add_special_tokens=False).ids
            assert found.detokenizer.tokenmap == original.detokenizer.tokenmap


# --- chat templates, tools and special tokens of LLaDA2

# In the manner of LLaDA2.2's: a file of its own, tools as JSON or as rendered by the checkpoint's code, a switch.
TEMPLATE = """
{%- set names = {'system': 'SYSTEM', 'user': 'HUMAN', 'assistant': 'ASSISTANT', 'tool': 'OBSERVATION'} %}
{%- if tools_ts_str %}{{- '<role>SYSTEM</role>' + tools_ts_str + '<|role_end|>' }}
{%- elif tools %}{{- '<role>SYSTEM</role>' + (tools | tojson) + '<|role_end|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<role>' + names[message.role] + '</role>' + message.content }}
    {%- for call in message.tool_calls or () %}
        {{- '<|tool_calls_section_begin|><|tool_call_begin|>functions.' + call.function.name + ':0' }}
        {{- '<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>' }}
    {%- endfor %}
    {{- '<|role_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<role>ASSISTANT</role>' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '(no thinking)' }}{%- endif %}
{%- endif %}"""
TOOLS = [{"function": {"name": "now", "parameters": {"type": "object"}}, "type": "function"}]
CALL = {"id": "functions.now:0", "type": "function", "function": {"name": "now", "arguments": {}}}
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "noon", "tool_call_id": "functions.now:0"},
]
RENDERED = (
    "<role>SYSTEM</role>Be short.<|role_end|><role>HUMAN</role>hi<|role_end|><role>ASSISTANT</role>"
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|><|role_end|><role>OBSERVATION</role>noon<|role_end|><role>ASSISTANT</role>"
)


@pytest.fixture
def llada2(goldens: Path, tmp_path: Path) -> Path:
    copy = planted(
        goldens / "block" / "llada2_moe-v22", tmp_path / "llada2", "OwnTokenizer", chat_template="{{ 1 / 0 }}"
    )
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


def with_mlx_lm(folder: Path, **given: Any) -> str:
    return load_tokenizer(folder).apply_chat_template(TALK, tokenize=False, add_generation_prompt=True, **given)


def with_mlx_vlm(folder: Path, **given: Any) -> str:
    utils, prompts = pytest.importorskip("mlx_vlm.utils"), pytest.importorskip("mlx_vlm.prompt_utils")
    processor = repaired(utils.load_processor(folder, trust_remote_code=False), folder)
    config = json.loads((folder / "config.json").read_text())
    return prompts.apply_chat_template(processor, config, TALK, **given)


@pytest.mark.parametrize("render", [with_mlx_lm, with_mlx_vlm])
def test_the_template_roles_tools_and_switch_are_the_published_ones(llada2: Path, render: Any) -> None:
    assert render(llada2, enable_thinking=True) == RENDERED
    assert render(llada2, enable_thinking=False) == RENDERED + "(no thinking)"
    declared = "<role>SYSTEM</role>" + json.dumps(TOOLS) + "<|role_end|>"
    assert render(llada2, tools=TOOLS, enable_thinking=True) == declared + RENDERED
    rendered = render(llada2, tools=TOOLS, tools_ts_str="type now = () => any", enable_thinking=True)
    assert rendered == "<role>SYSTEM</role>type now = () => any<|role_end|>" + RENDERED


def test_tool_calls_are_read_by_the_hosts_parser(llada2: Path) -> None:
    tokenizer = load_tokenizer(llada2)
    assert tokenizer.has_tool_calling and tokenizer.tool_call_start == "<|tool_calls_section_begin|>"
    marker = reference(llada2).encode(tokenizer.tool_call_start, add_special_tokens=False).ids
    assert list(tokenizer.tool_call_start_tokens) == marker  # made before the repair, made again after it
    (call,) = tokenizer.tool_parser(
        '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    )
    assert call["name"] == "now" and call["arguments"] == {"a": 1}


def test_a_template_without_a_switch_is_not_given_one(goldens: Path) -> None:
    tokenizer = load_tokenizer(goldens / "block" / "llada2_moe-v22")
    text = "<role>HUMAN</role>hi<|role_end|><role>ASSISTANT</role>"
    for given in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        messages = [{"role": "user", "content": "hi"}]
        assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given) == text
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **given)
        assert ids == ids_of(tokenizer, text) == encode_prompt(tokenizer, text)


def test_special_tokens_are_not_doubled(llada2: Path) -> None:
    """A tokenizer that puts <|startoftext|> in front of every text, and a template that begins with <role>."""
    bos, eos = reference(llada2).encode("<|startoftext|><|endoftext|>").ids
    single = [{"SpecialToken": {"id": "<|startoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    specials = {"<|startoftext|>": {"id": "<|startoftext|>", "ids": [bos], "tokens": ["<|startoftext|>"]}}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}
    edit_tokenizer(llada2, post_processor=processor)
    tokenizer = load_tokenizer(llada2)
    assert tokenizer.encode(RENDERED)[0] == bos
    for text in (RENDERED, "<|startoftext|>hi", "<|startoftext|>" + RENDERED):
        assert encode_prompt(tokenizer, text) == ids_of(tokenizer, text)
    for text in ("hi", "", "def f(x):", "a <role>"):
        assert encode_prompt(tokenizer, text) == [bos, *ids_of(tokenizer, text)]
    # What closes every text does not stand before its continuation.
    single.append({"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}})
    specials["<|endoftext|>"] = {"id": "<|endoftext|>", "ids": [eos], "tokens": ["<|endoftext|>"]}
    edit_tokenizer(llada2, post_processor=processor)
    tokenizer = load_tokenizer(llada2)
    assert encode_prompt(tokenizer, "hi") == [bos, *ids_of(tokenizer, "hi"), eos]
    assert encode_prompt(tokenizer, "hi", {eos}) == [bos, *ids_of(tokenizer, "hi")]
    assert encode_prompt(tokenizer, RENDERED, {eos}) == ids_of(tokenizer, RENDERED)


def test_prompts_of_tokenizers_that_know_no_added_tokens() -> None:
    class Bare:
        bos_token: str | None = None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [7] * add_special_tokens + [ord(c) for c in text]

    assert encode_prompt(Bare(), "a") == [7, 97] and encode_prompt(Bare(), "") == [7]
    Bare.bos_token = "a"
    assert encode_prompt(Bare(), "ab") == [97, 98] and encode_prompt(Bare(), "b") == [7, 98]


@pytest.mark.parametrize("name", ["block/llada2_moe-v20", "block/llada2_moe-v21", "block/llada2_moe-v22"])
def test_llada2s_prompts_have_the_references_ids(goldens: Path, tmp_path: Path, name: str) -> None:
    folder = goldens / name
    broken = planted(folder, tmp_path / "broken", "OwnTokenizer")
    cases = [c for c in json.loads((folder / "golden.json").read_text())["generations"] if "prompt_text" in c]
    for tokenizer in (load_tokenizer(folder), load_tokenizer(broken)):
        assert cases and all(encode_prompt(tokenizer, c["prompt_text"]) == c["prompt_ids"] for c in cases)
