"""The table of options: every wrong value gets its sentence, and layers merge as documented."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from mlx_dllm_plugin.errors import DiffusionError
from mlx_dllm_plugin.options import MODES, DecodingOptions, LoadOptions, merge, parse, split, table

BY_NAME = {option.name: option for option in table()}
POSITIVE = (
    "canvas_length",
    "max_denoising_steps",
    "block_length",
    "sub_block_length",
    "refresh_interval",
    "kl_history",
    "num_to_transfer",
    "max_steps_per_block",
)
STEPS = ("max_denoising_steps", "max_steps_per_block")
NOT_NEGATIVE_INT = ("top_k", "seed", "mask_token_id", "vicinity", "radius", "max_post_steps")
NOT_NEGATIVE_FLOAT = (
    *("temp", "confidence_temperature", "threshold", "entropy_bound", "cfg_scale", "alg_temp", "low_threshold"),
    *("relaxed_threshold", "factor", "kl_threshold", "credit_weight", "credit_power", "gap", "editing_threshold"),
)
SHARES = ("top_p", "min_p", "narrow_out_threshold", "credit_decay")
IDS = ("suppress_tokens", "begin_suppress_tokens", "cfg_keep_tokens", "eos_token_ids")
BOOLS = ("stop_at_eos", "full_logprobs")
CHOICES = {
    "attention": ("bidirectional", "block_causal"),
    "logits": ("in_place", "shifted"),
    "eos_flags": ("none", "logits", "confidence", "both"),
    "alpha_schedule": ("linear", "cosine"),
    "profile": ("exact", "balanced", "fast"),
    "cache": ("auto", "none", "prefix", "dual", "block"),
    "first_token": ("fresh", "stale"),
    "after_eos": ("fill", "skip", "eos"),
}


def refused(sentence: str, **values: Any) -> None:
    kind = LoadOptions if values.keys() <= {f.name for f in fields(LoadOptions)} else DecodingOptions
    with pytest.raises(DiffusionError) as error:
        kind(**values)
    assert str(error.value) == sentence


def test_every_option_is_covered_by_these_tests() -> None:
    covered = {*POSITIVE, *NOT_NEGATIVE_INT, *NOT_NEGATIVE_FLOAT, *SHARES, *IDS, *BOOLS, *CHOICES, "eps"}
    assert set(BY_NAME) == covered | {"max_tokens", "unmasking", "sampler", "mode", "family", "tokenizer"}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["", "other", 1, True, ("linear",)])
def test_choices_are_named_when_the_value_is_none_of_them(name: str, value: Any) -> None:
    refused(f"{name} must be one of {', '.join(CHOICES[name])}, got {value!r}.", **{name: value})
    assert [getattr(DecodingOptions(**{name: choice}), name) for choice in CHOICES[name]] == list(CHOICES[name])


@pytest.mark.parametrize("value", [-0.1, 1, 1.0, float("nan"), True, "0.1"])
def test_eps_lies_below_one(value: Any) -> None:
    refused(f"eps must be within [0, 1), got {value!r}.", eps=value)
    assert DecodingOptions(eps=0).eps == 0.0


@pytest.mark.parametrize("value", [0, -2, True, "5", 1.5, float("nan")])
def test_max_tokens_is_positive_or_minus_one(value: Any) -> None:
    sentence = "max_tokens must be a positive integer, or -1 for as many as the context holds, got "
    refused(f"{sentence}{value!r}.", max_tokens=value)
    assert DecodingOptions(max_tokens=-1).max_tokens == -1
    assert DecodingOptions(max_tokens=1).max_tokens == 1


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1, -7, True, "8", 2.0])
def test_lengths_and_steps_are_positive_integers(name: str, value: Any) -> None:
    expected = "an integer from 1 to 100000" if name in STEPS else "a positive integer"
    refused(f"{name} must be {expected}, got {value!r}.", **{name: value})
    assert getattr(DecodingOptions(**{name: 1}), name) == 1


@pytest.mark.parametrize("name", NOT_NEGATIVE_INT)
@pytest.mark.parametrize("value", [-1, False, "0", 0.0])
def test_counts_and_ids_are_integers_from_zero(name: str, value: Any) -> None:
    expected = {"top_k": "0 or a positive integer", "seed": "an integer from 0 to 2**64 - 1"}.get(name, "0 or more")
    refused(f"{name} must be {expected}, got {value!r}.", **{name: value})
    assert getattr(DecodingOptions(**{name: 0}), name) == 0


@pytest.mark.parametrize("name", NOT_NEGATIVE_FLOAT)
@pytest.mark.parametrize("value", [-0.1, -1, float("nan"), float("inf"), True, "1", [1]])
def test_temperatures_are_finite_and_not_negative(name: str, value: Any) -> None:
    words = {"temp": "0 (greedy) or from 0.0001 to 10000", "alg_temp": "0 (the most confident) or from 0.0001 to 10000"}
    expected = words.get(name, "0 or more")
    refused(f"{name} must be {expected}, got {value!r}.", **{name: value})
    assert getattr(DecodingOptions(**{name: 0}), name) == 0
    assert getattr(DecodingOptions(**{name: 1.5}), name) == 1.5


@pytest.mark.parametrize(
    ("name", "value"), [("temp", 1e-50), ("temp", 1e39), ("seed", 2**64), ("max_denoising_steps", 10**9)]
)
def test_numbers_that_no_computation_survives_are_refused(name: str, value: Any) -> None:
    """A temperature that float32 makes 0 or infinite gives NaN, and then token 0, whatever it is."""
    with pytest.raises(DiffusionError, match=f"^{name} must be "):
        DecodingOptions(**{name: value})


@pytest.mark.parametrize("name", ["radius", "kl_history", "block_length", "top_k"])
def test_integers_that_no_array_holds_are_refused(name: str) -> None:
    refused(f"{name} {10**30} is too large: give at most 1e+18.", **{name: 10**30})


@pytest.mark.parametrize("name", ["credit_weight", "cfg_scale", "factor"])
def test_numbers_that_float32_makes_infinite_are_refused(name: str) -> None:
    refused(f"{name} 1e+39 is too large: give at most 1e+30.", **{name: 1e39})


def test_ids_of_numpy_are_ids() -> None:
    for given in (np.array([3, 1]), [np.int64(1), np.int32(3)], np.int64(3)):
        ids = DecodingOptions(suppress_tokens=given).suppress_tokens
        assert ids in ((1, 3), (3,)) and {type(token) for token in ids} == {int}
    refused("suppress_tokens must be token ids, 0 or more, got [1.5].", suppress_tokens=np.array([1.5]))


def test_numbers_of_numpy_are_numbers() -> None:
    options = DecodingOptions(max_tokens=np.int64(3), temp=np.float32(0.5), seed=np.uint8(7))
    assert (options.max_tokens, options.temp, options.seed) == (3, 0.5, 7)
    assert [type(v) for v in (options.max_tokens, options.temp)] == [int, float]


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("value", [-0.01, 1.01, 2, float("nan"), float("-inf"), True, "0.9", [0.9]])
def test_shares_lie_within_zero_and_one(name: str, value: Any) -> None:
    refused(f"{name} must be within [0, 1], got {value!r}.", **{name: value})
    for good in (0, 0.5, 1, 1.0):
        assert getattr(DecodingOptions(**{name: good}), name) == good


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("value", [-1, (3, -1), [True], True, [1.0], "3", {"3": 1}])
def test_id_lists_hold_integers_from_zero(name: str, value: Any) -> None:
    shown = (value,) if isinstance(value, int) else value
    refused(f"{name} must be token ids, 0 or more, got {shown!r}.", **{name: value})


@pytest.mark.parametrize("value", [5, [5], (5,), {5}, frozenset({5})])
def test_id_lists_are_kept_as_sorted_tuples(value: Any) -> None:
    assert DecodingOptions(suppress_tokens=value).suppress_tokens == (5,)
    assert DecodingOptions(suppress_tokens=[9, 2, 4]).suppress_tokens == (2, 4, 9)
    assert DecodingOptions(eos_token_ids=()).eos_token_ids == ()


@pytest.mark.parametrize("name", BOOLS)
@pytest.mark.parametrize("value", [0, 1, "true", 0.0])
def test_switches_are_true_or_false(name: str, value: Any) -> None:
    refused(f"{name} must be true or false, got {value!r}.", **{name: value})


def test_texts_choices_and_callables() -> None:
    refused("unmasking must be text, got 3.", unmasking=3)
    refused("sampler must be a callable, got 'greedy'.", sampler="greedy")
    refused("family must be text, got 3.", family=3)
    refused("mode must be one of auto, ar, diffusion, got 'fast'.", mode="fast")
    assert [LoadOptions(mode=mode).mode for mode in MODES] == list(MODES)


def test_a_variant_is_checked_too() -> None:
    options = DecodingOptions(temp=0.5)
    assert replace(options, seed=3) == DecodingOptions(temp=0.5, seed=3)
    with pytest.raises(DiffusionError, match=r"^temp must be 0 .*, got -1\.$"):
        replace(options, temp=-1)


def test_nothing_given_means_the_familys_own() -> None:
    assert all(getattr(DecodingOptions(), f.name) is None for f in fields(DecodingOptions))
    assert LoadOptions() == LoadOptions(mode="auto", family=None, tokenizer=None)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_tokens", "-1", -1),
        ("max_tokens", "12", 12),
        ("temp", "0", 0.0),
        ("temp", "1e-1", 0.1),
        ("top_p", "1", 1.0),
        ("stop_at_eos", "False", False),
        ("stop_at_eos", "t", True),
        ("suppress_tokens", "9,2 4", (2, 4, 9)),
        ("unmasking", "a2d", "a2d"),
        ("mode", "diffusion", "diffusion"),
    ],
)
def test_text_of_a_command_line_is_read(name: str, text: str, value: Any) -> None:
    read = parse(BY_NAME[name], text)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("max_tokens", "0", "a positive integer, or -1 for as many as the context holds, got 0"),
        ("max_tokens", "ten", "a positive integer, or -1 for as many as the context holds, got 'ten'"),
        ("max_denoising_steps", "1e3", "an integer from 1 to 100000, got '1e3'"),
        ("block_length", "", "a positive integer, got ''"),
        ("seed", "-3", "an integer from 0 to 2**64 - 1, got -3"),
        ("temp", "hot", "0 (greedy) or from 0.0001 to 10000, got 'hot'"),
        ("temp", "nan", "0 (greedy) or from 0.0001 to 10000, got nan"),
        ("top_p", "1.5", "within [0, 1], got 1.5"),
        ("stop_at_eos", "maybe", "true or false, got 'maybe'"),
        ("suppress_tokens", "3;4", "token ids, 0 or more, got '3;4'"),
        ("suppress_tokens", "-3", "token ids, 0 or more, got (-3,)"),
        ("mode", "turbo", "one of auto, ar, diffusion, got 'turbo'"),
    ],
)
def test_wrong_text_of_a_command_line_is_refused(name: str, text: str, expected: str) -> None:
    with pytest.raises(DiffusionError) as error:
        parse(BY_NAME[name], text)
    assert str(error.value) == f"{name} must be {expected}."


def test_later_layers_win_and_none_counts_as_absent() -> None:
    merged = merge({"temp": 0.5, "seed": 1, "top_k": 5}, {"temp": None, "seed": 2, "top_k": 0}, {"stop_at_eos": False})
    assert merged == DecodingOptions(temp=0.5, seed=2, top_k=0, stop_at_eos=False)
    assert merge() == merge({}) == DecodingOptions()
    with pytest.raises(DiffusionError, match="^seed must be"):
        merge({"seed": 1}, {"seed": "x"})


def test_values_are_sorted_into_load_decoding_and_rest() -> None:
    load, decoding, rest = split(
        {"mode": "ar", "tokenizer": "t", "temp": 1, "sampler": None, "kv_bits": 8, "verbose": 1}
    )
    assert load == {"mode": "ar", "tokenizer": "t"}
    assert decoding == {"temp": 1, "sampler": None}
    assert rest == {"kv_bits": 8, "verbose": 1}


def test_every_option_explains_itself_and_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(table()) == len(fields(LoadOptions)) + len(fields(DecodingOptions))
    assert all(option.metadata["help"] for option in table())
    host = {option.name for option in table() if option.metadata["host"]}
    assert host == {"max_tokens", "temp", "top_p", "top_k", "min_p", "seed"}
