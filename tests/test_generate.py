"""mlx-lm's Python functions with a diffusion model: stream_generate and generate."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.sample_utils import greedy_sampler, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_dllm_plugin
from mlx_dllm_plugin import DecodingOptions, DiffusionError
from tests.tools import PROMPT, make_ar_model, shown

host = sys.modules["mlx_lm.generate"]
LENGTH = {"canvas_length": 33, "max_denoising_steps": 8, "stop_at_eos": False}
FROM_LEFT = {"unmasking": "low_confidence", "block_length": 4, "stop_at_eos": False}
RUNS = ("gpt2-grow", "qwen2-reuse")


@pytest.fixture(scope="module")
def gpt2(data: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(data / "a2d" / "gpt2-grow" / "run"))


@pytest.fixture(scope="module", params=RUNS)
def loaded(request: pytest.FixtureRequest, data: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(data / "a2d" / request.param / "run"))


@pytest.fixture(scope="module")
def ar(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    path = tmp_path_factory.mktemp("ar") / "llama"
    return mlx_lm.load(str(make_ar_model(path, data / "a2d" / "gpt2-grow" / "run" / "model")))


@pytest.fixture
def forwards(gpt2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of forwards of the model since the test began."""
    kind = type(gpt2[0].model)
    original, count = kind.__call__, 0

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", counted)
    return lambda: count


def stream(loaded: tuple[Any, Any], prompt: Any = PROMPT, **options: Any) -> list[Any]:
    return list(mlx_lm.stream_generate(*loaded, prompt, **options))


def text_of(responses: list[Any]) -> str:
    return "".join(response.text for response in responses)


def with_eos(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, *ids: int) -> None:
    monkeypatch.setattr(loaded[1], "_eos_token_ids", set(ids))


# --- responses


def test_every_token_is_one_generation_response(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    responses = stream(loaded, max_tokens=20, stop_at_eos=False)
    assert len(responses) == 20
    assert all(isinstance(response, host.GenerationResponse) for response in responses)
    assert [response.generation_tokens for response in responses] == list(range(1, 21))
    assert [response.finish_reason for response in responses] == [None] * 19 + ["length"]
    for response in responses:
        assert type(response.token) is int and 0 <= response.token < model.diffusion_spec.vocab_size
        assert response.prompt_tokens == len(tokenizer.encode(PROMPT))
        assert response.from_draft is False
        assert response.prompt_tps > 0 and response.generation_tps > 0 and response.peak_memory >= 0
    counts = [response.forwards for response in responses]
    assert counts == sorted(counts) and 1 <= counts[0] and counts[-1] <= 20
    assert {response.unmasking for response in responses} == {"a2d"}


def test_tokens_are_those_of_decode(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    result = mlx_dllm_plugin.decode(model, tokenizer.encode(PROMPT), DecodingOptions(**LENGTH))
    responses = stream(loaded, **LENGTH)
    assert [response.token for response in responses] == result.tokens
    assert responses[-1].forwards == result.nfe == 8


def test_texts_join_to_the_tokenizers_text(loaded: tuple[Any, Any]) -> None:
    responses = stream(loaded, max_tokens=100, max_denoising_steps=10, stop_at_eos=False)
    text = text_of(responses)
    assert text == shown(loaded[1].decode([response.token for response in responses]))
    assert sum(bool(response.text) for response in responses) > 10


def test_logprobs_are_a_vector_of_the_vocabulary(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    result = mlx_dllm_plugin.decode(model, tokenizer.encode(PROMPT), DecodingOptions(**LENGTH))
    for response, expected in zip(stream(loaded, **LENGTH), result.logprobs, strict=True):
        vector = np.array(response.logprobs)
        assert vector.shape == (model.diffusion_spec.vocab_size,)
        assert vector[response.token] == np.float32(expected.token) and vector[response.token] < 0
        assert np.isfinite(vector).sum() in (20, 21)
        assert vector.max() == np.float32(expected.top[0][1])


def test_full_logprobs_are_normalised(gpt2: tuple[Any, Any]) -> None:
    for response in stream(gpt2, full_logprobs=True, **LENGTH):
        assert np.exp(np.array(response.logprobs, dtype=np.float64)).sum() == pytest.approx(1, abs=1e-5)


def test_stops_at_the_end_of_sequence_without_its_text(gpt2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stream(gpt2, **LENGTH)
    cut = 5
    eos = whole[cut].token
    assert eos not in [response.token for response in whole[:cut]]
    with_eos(gpt2, monkeypatch, eos)
    options = {**LENGTH, "stop_at_eos": None}
    responses = stream(gpt2, **options)
    assert [response.token for response in responses] == [response.token for response in whole[: cut + 1]]
    assert responses[-1].finish_reason == "stop"
    assert text_of(responses) == shown(gpt2[1].decode([response.token for response in whole[:cut]]))


def test_an_added_end_of_sequence_token_stops(data: Path) -> None:
    loaded = mlx_lm.load(str(data / "a2d" / "gpt2-grow" / "run"))
    tokens = [response.token for response in stream(loaded, **LENGTH)]
    loaded[1].add_eos_token("old")
    assert len(loaded[1].eos_token_ids) == 2
    responses = stream(loaded, **{**LENGTH, "stop_at_eos": True})
    (old,) = loaded[1].encode("old")
    assert responses[-1].finish_reason == "stop"
    assert [response.token for response in responses] == tokens[: tokens.index(old) + 1]
    assert "old" not in text_of(responses)


def test_generate_returns_the_streamed_text(loaded: tuple[Any, Any]) -> None:
    assert mlx_lm.generate(*loaded, PROMPT, **LENGTH) == text_of(stream(loaded, **LENGTH))


def test_verbose_prints_the_text_and_statistics(gpt2: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    text = mlx_lm.generate(*gpt2, PROMPT, verbose=True, **LENGTH)
    rule = "=" * 10
    before, printed, statistics = capsys.readouterr().out.split(rule + "\n")
    assert (before, printed) == ("", text + "\n")
    assert re.fullmatch(
        r"Prompt: 9 tokens, [\d.]+ tokens-per-sec\n"
        r"Generation: 24 tokens, [\d.]+ tokens-per-sec\n"
        r"Diffusion: a2d, 8 forwards, 3\.00 tokens per forward, 264 columns computed, first token after [\d.]+ s\n"
        r"Profile: exact, but with max_denoising_steps 8\n"
        r"Peak memory: [\d.]+ GB\n",
        statistics,
    )


def test_not_verbose_prints_nothing(gpt2: tuple[Any, Any], capfd: pytest.CaptureFixture[str]) -> None:
    mlx_lm.generate(*gpt2, PROMPT, **LENGTH)
    assert capfd.readouterr() == ("", "")


# --- streaming


def test_tokens_arrive_while_decoding_goes_on(gpt2: tuple[Any, Any], forwards: Callable[[], int]) -> None:
    """Each token comes right after the forward that completed the prefix up to it: nothing is held back, and most
    tokens come before the last forward."""
    seen = []
    for response in mlx_lm.stream_generate(*gpt2, PROMPT, max_tokens=24, **FROM_LEFT):
        seen.append((forwards(), response.forwards))
    assert all(counted == reported for counted, reported in seen)
    total = forwards()
    assert total == 24
    assert sum(at < total for at, _ in seen) >= 20

    ids = gpt2[1].encode(PROMPT)
    result = mlx_dllm_plugin.decode(gpt2[0], ids, DecodingOptions(max_tokens=24, **FROM_LEFT))
    done = {position: commit.step + 1 for commit in result.commits for position in commit.positions}
    releasable = [max(done[len(ids) + j] for j in range(i + 1)) for i in range(24)]
    assert [at for at, _ in seen] == releasable


def test_whole_canvas_rules_release_the_finished_prefix(
    gpt2: tuple[Any, Any], forwards: Callable[[], int], golden: dict[str, Any]
) -> None:
    case = golden["a2d_sample"][3]
    revealed = case["revealed_positions_per_step"]
    done = {position: step + 1 for step, positions in enumerate(revealed) for position in positions}
    at = []
    for _ in mlx_lm.stream_generate(
        *gpt2, PROMPT, canvas_length=33, max_denoising_steps=case["num_steps"], stop_at_eos=False
    ):
        at.append(forwards())
    assert at == [max(done[9 + j] for j in range(i + 1)) for i in range(24)]
    assert at[0] < case["num_steps"]


@pytest.fixture
def golden(data: Path) -> dict[str, Any]:
    import json

    return json.loads((data / "a2d" / "gpt2-grow" / "golden.json").read_text())


def test_nothing_is_computed_before_the_first_next(gpt2: tuple[Any, Any], forwards: Callable[[], int]) -> None:
    responses = mlx_lm.stream_generate(*gpt2, PROMPT, max_tokens=8, **FROM_LEFT)
    assert inspect.isgenerator(responses) and forwards() == 0
    next(responses)
    responses.close()
    assert 1 <= forwards() <= 4


def test_after_the_last_needed_token_no_forward_is_made(
    gpt2: tuple[Any, Any], forwards: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stream(gpt2, max_tokens=24, **FROM_LEFT)
    before = forwards()
    with_eos(gpt2, monkeypatch, first[3].token)
    stopped = stream(gpt2, max_tokens=24, **{**FROM_LEFT, "stop_at_eos": True})
    assert stopped[-1].finish_reason == "stop"
    assert forwards() - before == stopped[-1].forwards <= 4


class Streams:
    """Stands in for the host's wired_limit and notes what it is given and when it is left."""

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.left = 0

    @contextlib.contextmanager
    def __call__(self, model: Any, streams: Any = None) -> Iterator[None]:
        self.entered.append(streams)
        try:
            yield
        finally:
            self.left += 1


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> Streams:
    stand_in = Streams()
    monkeypatch.setattr(host, "wired_limit", stand_in)
    return stand_in


def test_the_wired_limit_is_held_with_the_callers_stream(gpt2: tuple[Any, Any], wired: Streams) -> None:
    own = mx.new_stream(mx.default_device())
    seen = []
    for _ in mlx_lm.stream_generate(*gpt2, PROMPT, max_tokens=8, stream=own):
        seen.append(wired.left)
    assert wired.entered == [[own]] and set(seen) == {0} and wired.left == 1


def test_the_default_stream_is_the_hosts(gpt2: tuple[Any, Any], wired: Streams) -> None:
    stream(gpt2, max_tokens=4)
    assert wired.entered == [[host.generation_stream]]


def test_closing_early_leaves_the_wired_limit(gpt2: tuple[Any, Any], wired: Streams) -> None:
    responses = mlx_lm.stream_generate(*gpt2, PROMPT, max_tokens=16, **FROM_LEFT)
    next(responses)
    assert (len(wired.entered), wired.left) == (1, 0)
    responses.close()
    assert wired.left == 1


def test_an_error_while_decoding_leaves_the_wired_limit(gpt2: tuple[Any, Any], wired: Streams) -> None:
    with pytest.raises(DiffusionError, match="sampler"):
        stream(gpt2, max_tokens=4, sampler=lambda rows: rows[0])
    assert wired.left == len(wired.entered) == 1


def test_forwards_run_on_the_callers_stream(gpt2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    own = mx.new_stream(mx.default_device())
    kind = type(gpt2[0].model)
    original, seen = kind.__call__, []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(mx.default_stream(mx.default_device()))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", watched)
    before = mx.default_stream(mx.default_device())
    for _ in mlx_lm.stream_generate(*gpt2, PROMPT, max_tokens=4, stream=own):
        assert mx.default_stream(mx.default_device()) == before  # the caller's code is not on it
    assert seen and set(map(str, seen)) == {str(own)} and own != before


def test_two_threads_at_once_give_the_serial_text(loaded: tuple[Any, Any]) -> None:
    jobs = [(PROMPT, {"max_tokens": 40}), ("My sister", {"max_tokens": 30, "temp": 0.9, "seed": 3})]
    serial = [text_of(stream(loaded, prompt, **options)) for prompt, options in jobs]
    assert serial[0] != serial[1]
    results: list[list[str]] = [[], []]
    start = threading.Barrier(2)

    def work(number: int) -> None:
        prompt, options = jobs[number]
        start.wait(30)
        for _ in range(4):
            results[number].append(text_of(stream(loaded, prompt, **options)))

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [[serial[0]] * 4, [serial[1]] * 4]


def test_a_model_loaded_in_one_thread_decodes_in_another(data: Path) -> None:
    path = str(data / "a2d" / "qwen2-reuse" / "run")
    got: dict[str, Any] = {}

    def load() -> None:
        got["loaded"] = mlx_lm.load(path)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join(60)
    assert text_of(stream(got["loaded"], max_tokens=12)) == text_of(stream(mlx_lm.load(path), max_tokens=12))


# --- prompts, tokenizers, options


def test_prompts_are_text_ids_or_arrays(gpt2: tuple[Any, Any]) -> None:
    ids = gpt2[1].encode(PROMPT)
    texts = {text_of(stream(gpt2, prompt, **LENGTH)) for prompt in (PROMPT, ids, mx.array(ids), np.array(ids))}
    assert len(texts) == 1 and len(texts.pop()) > 10


def test_a_plain_transformers_tokenizer_is_wrapped(gpt2: tuple[Any, Any]) -> None:
    model, wrapper = gpt2
    plain = wrapper._tokenizer
    assert not isinstance(plain, TokenizerWrapper)
    # Its detokenizer is the host's general one, which keeps the space at the start.
    assert shown(text_of(stream((model, plain), **LENGTH))) == text_of(stream(gpt2, **LENGTH))


def test_beginning_of_sequence_is_not_doubled(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    kind, original = type(loaded[1]._tokenizer), type(loaded[1]._tokenizer).encode
    monkeypatch.setattr(
        kind, "encode", lambda self, text, **kw: seen.append(kw["add_special_tokens"]) or original(self, text, **kw)
    )
    monkeypatch.setattr(kind, "bos_token", "The", raising=False)
    stream(loaded, "The cat", max_tokens=2)
    assert seen == [False]
    stream(loaded, "A cat", max_tokens=2)
    assert seen[1:] == [False, True]  # looked at for what a chat template writes, and then with what belongs in front


def test_max_tokens_given_sets_the_length_else_the_checkpoint_does(gpt2: tuple[Any, Any]) -> None:
    assert len(stream(gpt2, max_tokens=50, stop_at_eos=False)) == 50
    assert len(stream(gpt2, stop_at_eos=False)) == 32 - 9  # a canvas of 32, of which 9 are prompt
    assert len(list(mlx_lm.stream_generate(*gpt2, PROMPT, 7, stop_at_eos=False))) == 7
    assert len(stream(gpt2, max_tokens=256 - 200, stop_at_eos=False)) == 56


def test_max_tokens_caps_a_longer_canvas(gpt2: tuple[Any, Any]) -> None:
    capped = stream(gpt2, max_tokens=5, **LENGTH)
    assert [response.token for response in capped] == [response.token for response in stream(gpt2, **LENGTH)[:5]]
    assert capped[-1].finish_reason == "length"


@pytest.mark.parametrize(
    "options",
    [
        {"canvas_length": 20},
        {"max_denoising_steps": 3},
        {"unmasking": "low_confidence"},
        {"unmasking": "low_confidence", "block_length": 4},
        {"unmasking": "random", "seed": 4},
        {"confidence_temperature": 0.2},
        {"suppress_tokens": [13]},
        {"temp": 0.9, "seed": 1},
    ],
    ids=lambda options: " ".join(options),
)
def test_options_are_keyword_arguments(gpt2: tuple[Any, Any], options: dict[str, Any]) -> None:
    """Each changes the text, and gives what decode gives with the same options."""
    base = {"canvas_length": 33, "max_denoising_steps": 16, "stop_at_eos": False}
    ids = gpt2[1].encode(PROMPT)
    expected = mlx_dllm_plugin.decode(gpt2[0], ids, DecodingOptions(**{**base, **options})).tokens
    assert [response.token for response in stream(gpt2, **{**base, **options})] == expected
    assert expected != [response.token for response in stream(gpt2, **base)]


def test_options_of_one_call_do_not_reach_the_next(gpt2: tuple[Any, Any]) -> None:
    before = text_of(stream(gpt2))
    stream(gpt2, temp=1.0, seed=1, unmasking="random", mask_token_id=5, suppress_tokens=[1, 2])
    assert text_of(stream(gpt2)) == before


def test_progress_is_reported(gpt2: tuple[Any, Any]) -> None:
    calls: list[tuple[int, int]] = []
    stream(gpt2, max_tokens=4, prompt_progress_callback=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 9), (9, 9)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draft_model", "the model"),
        ("prompt_cache", []),
        ("max_kv_size", 64),
        ("kv_bits", 4),
        ("input_embeddings", mx.zeros((1, 4, 32))),
        ("logits_processors", [lambda tokens, logits: logits]),
    ],
)
def test_autoregressive_arguments_are_refused_when_set(gpt2: tuple[Any, Any], name: str, value: Any) -> None:
    if name == "draft_model":
        value = gpt2[0]
    with pytest.raises(DiffusionError, match=name) as refusal:
        stream(gpt2, **{name: value})
    assert "leave" in str(refusal.value) and "\n" not in str(refusal.value)
    stream(gpt2, max_tokens=2, **{name: None})


def test_host_arguments_at_their_defaults_are_accepted(gpt2: tuple[Any, Any]) -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(host.generate_step).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert {"kv_group_size", "quantized_kv_start", "prefill_step_size"} <= set(defaults)
    defaults["max_tokens"] = 8
    plain = text_of(stream(gpt2, max_tokens=8))
    given = {**defaults, "num_draft_tokens": 3, "draft_model": None, "logits_processors": []}
    assert text_of(stream(gpt2, **given)) == plain
    assert mlx_lm.generate(*gpt2, PROMPT, **given) == plain


@pytest.mark.parametrize("function", [mlx_lm.stream_generate, mlx_lm.generate])
def test_an_unknown_keyword_is_a_type_error(gpt2: tuple[Any, Any], ar: tuple[Any, Any], function: Any) -> None:
    for loaded in (gpt2, ar):
        with pytest.raises(TypeError, match="wild_card"):
            list(function(*loaded, PROMPT, max_tokens=2, wild_card=1))


def test_a_missing_prompt_is_a_type_error(gpt2: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match="prompt"):
        list(mlx_lm.stream_generate(*gpt2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, ["max_tokens", "0"]),
        ({"max_tokens": -1}, ["max_tokens -1", "number"]),
        ({"max_tokens": -7}, ["max_tokens", "-7"]),
        ({"max_tokens": 2.5}, ["max_tokens", "2.5"]),
        ({"max_tokens": 1000}, ["1009", "128", "9", "119"]),
        ({"canvas_length": 5}, ["canvas_length 5", "9"]),
        ({"canvas_length": 9}, ["max_tokens"]),
        ({"max_denoising_steps": 0}, ["max_denoising_steps", "0"]),
        ({"unmasking": "psychic"}, ["psychic", "a2d", "low_confidence", "mlx_dllm", "random"]),
        ({"block_length": 4}, ["block_length", "a2d", "low_confidence"]),
        ({"top_p": 1.5}, ["top_p", "[0, 1]", "1.5"]),
        ({"top_p": "high"}, ["top_p", "high"]),
        ({"min_p": -0.1}, ["min_p", "-0.1"]),
        ({"top_k": -2}, ["top_k", "-2"]),
        ({"temp": -1.0}, ["temp", "-1.0"]),
        ({"temp": float("nan")}, ["temp", "nan"]),
        ({"mask_token_id": 341}, ["mask_token_id", "341", "340"]),
        ({"suppress_tokens": [4000]}, ["suppress_tokens", "4000"]),
        ({"temp": 0.5, "sampler": make_sampler(0.5)}, ["temp", "sampler"]),
        ({"sampler": 5}, ["sampler", "callable"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_bad_options_are_one_sentence(gpt2: tuple[Any, Any], options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DiffusionError) as refusal:
        stream(gpt2, **options)
    message = str(refusal.value)
    assert "\n" not in message and message.endswith(".")
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ["empty"]),
        ([], ["empty"]),
        ([3, 341], ["341", "tokenizer"]),
        ([3, -1], ["-1"]),
        ([5] * 200, ["200"]),
        ([5] * 32, ["32", "max_tokens"]),
        (["a", "b"], ["token ids"]),
    ],
    ids=["empty text", "no ids", "id too high", "id negative", "too long", "fills the canvas", "not ids"],
)
def test_bad_prompts_are_one_sentence(gpt2: tuple[Any, Any], prompt: Any, words: list[str]) -> None:
    with pytest.raises(DiffusionError) as refusal:
        stream(gpt2, prompt)
    assert "\n" not in str(refusal.value)
    assert [word for word in words if word not in str(refusal.value)] == []


def test_a_mask_token_in_the_prompt_is_text(gpt2: tuple[Any, Any]) -> None:
    prompt = [267, 340, 279]
    result = mlx_dllm_plugin.decode(gpt2[0], prompt, DecodingOptions(max_tokens=12, stop_at_eos=False))
    responses = stream(gpt2, prompt, max_tokens=12, stop_at_eos=False)
    assert result.canvas[:3] == prompt
    assert [response.token for response in responses] == result.tokens
    assert 340 not in result.tokens and responses[0].prompt_tokens == 3


# --- modes


def test_mode_ar_is_refused(gpt2: tuple[Any, Any]) -> None:
    with pytest.raises(DiffusionError, match="leave out mode 'ar'"):
        stream(gpt2, mode="ar")


@pytest.mark.parametrize("mode", ["auto", "diffusion"])
def test_modes_that_decode_by_diffusion(gpt2: tuple[Any, Any], mode: str) -> None:
    assert text_of(stream(gpt2, mode=mode, **LENGTH)) == text_of(stream(gpt2, **LENGTH))


def test_an_autoregressive_model_is_untouched(ar: tuple[Any, Any]) -> None:
    wanted = stream(ar, max_tokens=12)
    mlx_dllm_plugin.deactivate()
    try:
        upstream = stream(ar, max_tokens=12)
    finally:
        mlx_dllm_plugin.activate()
    assert {type(response) for response in wanted} == {type(response) for response in upstream}
    assert type(upstream[0]) is host.GenerationResponse
    assert [(r.token, r.text, r.finish_reason) for r in wanted] == [
        (r.token, r.text, r.finish_reason) for r in upstream
    ]
    assert all(mx.array_equal(a.logprobs, b.logprobs) for a, b in zip(wanted, upstream, strict=True))


@pytest.mark.parametrize("mode", ["auto", "ar"])
def test_modes_that_leave_an_autoregressive_model_alone(ar: tuple[Any, Any], mode: str) -> None:
    assert text_of(stream(ar, max_tokens=8, mode=mode)) == text_of(stream(ar, max_tokens=8))
    assert mlx_lm.generate(*ar, PROMPT, max_tokens=8, mode=mode) == mlx_lm.generate(*ar, PROMPT, max_tokens=8)


def test_mode_diffusion_on_an_autoregressive_model_is_refused(ar: tuple[Any, Any]) -> None:
    with pytest.raises(DiffusionError, match="no diffusion spec"):
        stream(ar, max_tokens=2, mode="diffusion")


@pytest.mark.parametrize("option", [{"canvas_length": 33}, {"unmasking": "a2d"}, {"stop_at_eos": False}])
def test_diffusion_options_on_an_autoregressive_model_are_refused(ar: tuple[Any, Any], option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(DiffusionError, match=f"{name}.*no diffusion spec"):
        stream(ar, max_tokens=2, **option)


def test_a_model_stays_causal_when_called(gpt2: tuple[Any, Any]) -> None:
    model = gpt2[0]
    ids = mx.array([[267, 279, 64, 83]])
    stream(gpt2, max_tokens=4)
    assert mx.allclose(model(ids)[:, :2], model(ids[:, :2]), atol=1e-4)
    both = mlx_dllm_plugin.bidirectional_forward(model, ids)
    assert not mx.allclose(both[:, :2], model(ids)[:, :2], atol=1e-2)


# --- samplers and seeds


def test_the_hosts_greedy_sampler_means_greedy(gpt2: tuple[Any, Any]) -> None:
    assert make_sampler(0.0) is greedy_sampler
    assert text_of(stream(gpt2, sampler=greedy_sampler, **LENGTH)) == text_of(stream(gpt2, **LENGTH))
    # It counts as no sampler at all, so a temperature beside it is no contradiction.
    assert stream(gpt2, sampler=greedy_sampler, temp=0.7, seed=2, **LENGTH)


@pytest.mark.parametrize(
    "arguments",
    [
        {"temp": 0.8},
        {"temp": 0.8, "top_p": 0.9},
        {"temp": 1.0, "top_k": 5},
        {"temp": 1.0, "min_p": 0.1},
        {"temp": 0.8, "top_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.1, "xtc_special_tokens": [198, 339]},
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_the_hosts_samplers_work_and_repeat(gpt2: tuple[Any, Any], arguments: dict[str, Any]) -> None:
    sampler = make_sampler(**arguments)

    def once(seed: int) -> str:
        mx.random.seed(seed)
        return text_of(stream(gpt2, sampler=sampler, **LENGTH))

    assert once(7) == once(7)
    assert len({once(7), once(8), once(9)}) > 1


def test_a_sampler_sees_normalised_rows_without_the_mask(gpt2: tuple[Any, Any]) -> None:
    seen = []

    def sampler(rows: mx.array) -> mx.array:
        seen.append(np.array(rows))
        return mx.argmax(rows, axis=-1)

    assert text_of(stream(gpt2, sampler=sampler, **LENGTH)) == text_of(stream(gpt2, **LENGTH))
    for rows in seen:
        assert rows.ndim == 2 and rows.shape[1] == 341
        assert np.isneginf(rows[:, 340]).all()
        assert np.allclose(np.exp(rows.astype(np.float64)).sum(axis=1), 1, atol=1e-5)


def test_top_k_of_one_is_greedy(gpt2: tuple[Any, Any]) -> None:
    """Filters act: only the best token is left."""
    greedy = text_of(stream(gpt2, **LENGTH))
    assert text_of(stream(gpt2, sampler=make_sampler(1.0, top_k=1), **LENGTH)) == greedy
    assert text_of(stream(gpt2, sampler=make_sampler(1.0, top_p=1e-6), **LENGTH)) == greedy
    assert text_of(stream(gpt2, temp=1.0, top_k=1, **LENGTH)) == greedy
    assert text_of(stream(gpt2, temp=1.0, top_p=1e-6, **LENGTH)) == greedy
    assert text_of(stream(gpt2, temp=1.0, min_p=1.0, **LENGTH)) == greedy


def test_seeds_repeat_and_leave_the_global_state_alone(gpt2: tuple[Any, Any]) -> None:
    texts = [text_of(stream(gpt2, temp=1.0, seed=seed, **LENGTH)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    mx.random.seed(0)
    before = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(0)
    stream(gpt2, temp=1.0, seed=5, **LENGTH)
    assert mx.random.uniform(shape=(3,)).tolist() == before


def test_without_a_seed_the_global_seed_decides(gpt2: tuple[Any, Any]) -> None:
    def once(seed: int) -> str:
        mx.random.seed(seed)
        return text_of(stream(gpt2, temp=1.0, **LENGTH))

    assert once(1) == once(1) != once(2)


# --- nothing grows


def test_a_hundred_generations_leave_everything_as_it_was(data: Path) -> None:
    loaded = mlx_lm.load(str(data / "a2d" / "gpt2-grow" / "run"))
    model, tokenizer = loaded
    options = {"max_tokens": 3, "max_denoising_steps": 2, "suppress_tokens": [7], "stop_at_eos": True}
    prompt = tokenizer.encode(PROMPT)

    def state() -> tuple[Any, ...]:
        weights = {name: np.array(value).tobytes() for name, value in tree_flatten(model.parameters())}
        return (
            weights,
            set(vars(model)),
            sorted(tokenizer.eos_token_ids),
            len(tokenizer),
            tokenizer.all_special_tokens,
            {name: value for name, value in vars(tokenizer).items() if isinstance(value, (str, int, set, list))},
            copy.deepcopy(model.diffusion_spec),
            list(prompt),
            dict(options),
        )

    before = copy.deepcopy(state())
    texts = {text_of(stream(loaded, prompt, **options)) for _ in range(100)}
    assert len(texts) == 1
    assert state() == before


# --- run directories of the host's own models


def test_a_run_directory_with_an_autoregressive_model_loads_as_its_model_folder(data: Path, tmp_path: Path) -> None:
    model = make_ar_model(tmp_path / "run" / "model", data / "a2d" / "gpt2-grow" / "run" / "model")
    (tmp_path / "run" / "manifest.json").write_text("{}")
    loaded, _ = mlx_lm.utils.load_model(tmp_path / "run")
    ids = mx.array([[1, 2, 3]])
    assert mx.array_equal(loaded(ids), mlx_lm.utils.load_model(model)[0](ids)).item()
    assert not hasattr(loaded, "diffusion_spec")
