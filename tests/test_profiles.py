"""Profiles: one word for the settings of a family, and what is approximate is said wherever one looks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlx_dllm_plugin import DecodingOptions, DiffusionError, decode, infill
from mlx_dllm_plugin.commands import main
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.families.profiles import BIDIRECTIONAL, BLOCK_CAUSAL, NOT_MEASURED, STANDARD, cost
from mlx_dllm_plugin.options import approximations
from mlx_dllm_plugin.plan import in_force, plan, profiled
from mlx_dllm_plugin.spec import DiffusionSpec
from tests.models import EOS, MASK, VOCAB
from tests.tools import Runner

PROMPT = [5, 7, 9, 11]


def spec_with(attention: Any = "bidirectional", **changes: Any) -> DiffusionSpec:
    values: dict[str, Any] = {
        "family": "test",
        "logits": "in_place",
        "attention": attention,
        "canvas": "fixed" if attention == "bidirectional" else "growing",
        "unmasking": "low_confidence",
        "mask_token_id": MASK,
        "eos_token_ids": (EOS,),
        "vocab_size": VOCAB,
        "context_length": None,
        "defaults": {"max_tokens": 16, "block_length": 8},
        "profiles": STANDARD[attention],
    }
    return DiffusionSpec(**{**values, **changes})


def test_exact_sets_nothing() -> None:
    options = DecodingOptions(profile="exact", seed=3)
    assert profiled(spec_with(), options) == options
    assert plan(spec_with(), PROMPT, options) == plan(spec_with(), PROMPT, DecodingOptions(seed=3))


@pytest.mark.parametrize("name", ["balanced", "fast"])
@pytest.mark.parametrize("attention", ["bidirectional", "block_causal"])
def test_a_profile_is_its_settings(name: str, attention: str) -> None:
    spec = spec_with(attention)
    settings = STANDARD[attention][name]
    by_profile, by_hand = (plan(spec, PROMPT, DecodingOptions(**given)) for given in ({"profile": name}, settings))
    assert by_profile == by_hand
    assert by_profile.rule.name == "threshold" and by_profile.values["threshold"] == settings["threshold"]


def test_single_options_win_over_the_profile() -> None:
    options = DecodingOptions(profile="fast", threshold=0.6, cache="none", block_length=4)
    settled = profiled(spec_with(), options)
    assert (settled.threshold, settled.cache, settled.block_length, settled.unmasking) == (0.6, "none", 4, "threshold")
    assert approximations({"cache": settled.cache}) == []


@pytest.mark.parametrize("cache", ["none", "auto"])
def test_without_a_frozen_cache_its_settings_go_too(cache: str) -> None:
    options = DecodingOptions(profile="balanced", cache=cache)
    assert profiled(spec_with(), options).vicinity is None and plan(spec_with(), PROMPT, options).cache == "none"
    assert profiled(spec_with(), replace(options, cache="prefix")).vicinity == 16


def test_what_the_rule_in_force_does_not_use_is_left_out() -> None:
    settled = profiled(spec_with(), DecodingOptions(profile="balanced", unmasking="a2d"))
    assert (settled.threshold, settled.block_length, settled.cache, settled.vicinity) == (None, None, "dual", 16)
    plan(spec_with(), PROMPT, DecodingOptions(profile="balanced", unmasking="a2d"))


def test_the_attention_that_an_option_chooses_brings_its_profiles() -> None:
    spec = spec_with(variants=("attention",))
    chosen = plan(spec, PROMPT, DecodingOptions(profile="fast", attention="block_causal"))
    assert chosen.cache == "block" and chosen.approximate == () and chosen.values["threshold"] == 0.8


def test_a_family_may_have_profiles_of_its_own() -> None:
    own = {family.name: family.profiles for family in FAMILIES.builtin() if family.profiles}
    assert set(own) == {"sdar", "sdar_moe", "fast_dllm_v2"}
    for name, profiles in own.items():
        family = FAMILIES.get(name)
        spec = spec_with("block_causal", unmasking=family.unmasking, profiles=profiles)
        spec = replace(spec, defaults={**spec.defaults, "block_length": 8, "sub_block_length": 4})
        for profile in ("balanced", "fast"):
            settled = in_force(spec, DecodingOptions(profile=profile)).options
            assert plan(spec, PROMPT, DecodingOptions(profile=profile)).rule.name == family.unmasking
            assert settled.threshold == profiles[profile].get("threshold")


def test_a_profile_keeps_in_parts_only_what_is_filled_in_parts() -> None:
    """Fast-dLLM v2's block cache comes from its profiles, and means nothing to a rule without sub-blocks."""
    family = FAMILIES.get("fast_dllm_v2")
    spec = spec_with("block_causal", unmasking="threshold", profiles=family.profiles)
    for rule, cache in (("klass", "block"), ("low_confidence", "block"), ("eb", "dual"), ("threshold", "dual")):
        options = DecodingOptions(profile="fast", unmasking=rule)
        spec = replace(spec, defaults={**spec.defaults, "sub_block_length": 4})
        assert plan(spec, PROMPT, options).cache == cache


def test_only_what_was_measured_has_a_cost() -> None:
    for name in ("balanced", "fast"):
        assert "on the demo checkpoint" in cost(name, BIDIRECTIONAL[name])
        assert cost(name, BLOCK_CAUSAL[name]) == NOT_MEASURED
    assert cost("exact", {}) == "as its makers decode"


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(DiffusionError) as error:
        DecodingOptions(profile="quick")
    assert str(error.value) == "profile must be one of exact, balanced, fast, got 'quick'."


def test_decoding_and_filling_holes_take_it(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 47 + 38?"}], add_generation_prompt=True
    )
    exact, fast = decode(model, prompt), decode(model, prompt, DecodingOptions(profile="fast"))
    assert tokenizer.decode(fast.tokens) == tokenizer.decode(exact.tokens) == "47 + 38 = 85"
    assert fast.nfe < exact.nfe / 3 and fast.columns < exact.columns / 3
    by_hand = decode(model, prompt, DecodingOptions(**BIDIRECTIONAL["fast"]))
    assert (fast.tokens, fast.commits) == (by_hand.tokens, by_hand.commits)
    canvas = [*prompt, *exact.tokens]
    holes = [False] * len(prompt) + [i in (1, 2) for i in range(len(exact.tokens))]
    filled = infill(model, canvas, holes, DecodingOptions(profile="balanced"))
    assert filled.canvas == canvas


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "Profile: exact"),
        (("--profile", "exact"), "Profile: exact"),
        (("--profile", "balanced"), "Profile: balanced (approximate: cache dual)"),
        (("--profile", "fast", "--cache", "none"), "Profile: fast, but with cache none"),
        (("--cache", "prefix"), "Profile: exact, but with cache prefix (approximate: cache prefix)"),
        (("--cache", "dual", "--refresh-interval", "1"), "Profile: exact, but with cache dual, refresh_interval 1"),
        (("--after-eos", "skip"), "Profile: exact, but with after_eos skip (approximate: after_eos skip)"),
        (("--unmasking", "eb", "--entropy-bound", "0.2"), "Profile: exact, but with unmasking eb, entropy_bound 0.2"),
    ],
)
def test_verbose_output_says_which_and_what_is_approximate(run: Runner, arguments: tuple[str, ...], line: str) -> None:
    outcome = run("mlx_lm.generate", "--mode", "diffusion", "--prompt", "12", "--max-tokens", 6, *arguments)
    assert outcome.status == 0
    assert line in outcome.out.splitlines()
    assert sum(text.startswith("Profile:") for text in outcome.out.splitlines()) == 1


def test_responses_say_it_too(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    for options, expected in (
        ({}, ("a2d", "exact", ())),
        ({"profile": "fast"}, ("threshold", "fast", ("cache dual",))),
    ):
        *_, last = mlx_lm.stream_generate(model, tokenizer, [5, 6, 7], max_tokens=12, **options)
        assert (last.unmasking, last.profile, last.approximate) == expected


def test_the_whole_vector_is_kept_where_a_canvas_is_filled_block_by_block(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    for options, whole in (({"profile": "fast"}, True), ({}, False), ({"full_logprobs": True}, True)):
        response = next(mlx_lm.stream_generate(model, tokenizer, [5, 6, 7], max_tokens=12, **options))
        finite = int(mx.isfinite(response.logprobs).sum())
        allowed = int(response.logprobs.size)
        assert (finite == allowed) if whole else (finite <= 21)
        if whole:
            assert np.isclose(float(mx.exp(response.logprobs).sum()), 1, atol=1e-3)
    response = next(
        mlx_lm.stream_generate(model, tokenizer, [5, 6, 7], max_tokens=12, profile="fast", full_logprobs=False)
    )
    assert int(mx.isfinite(response.logprobs).sum()) <= 21


def test_info_names_what_is_approximate(goldens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caches = "cache prefix, cache dual"
    for folder, inexact in (
        ("llada_dream/llada-8b-tiny", f"{caches}, after_eos skip, after_eos eos"),
        ("llada_dream/dream-tiny", f"{caches}, first_token stale, after_eos skip, after_eos eos"),
        ("block/sdar-b4", "after_eos skip, after_eos eos"),
        ("block/fast_dllm_v2-b32", "cache dual, after_eos skip, after_eos eos"),
    ):
        main(["info", str(goldens / folder)])
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  approximate"))
        assert row.split("  ")[-2].strip() == inexact and row.endswith("options that trade exactness for speed")
