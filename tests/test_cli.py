"""The command line: `mlx_lm.generate` with a diffusion checkpoint, and with an autoregressive one as if we were not."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

import mlx_dllm_plugin
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.options import table
from mlx_dllm_plugin.samplers import RULES
from tests.tools import (
    ERROR,
    PROMPT,
    Outcome,
    Runner,
    assert_one_sentence,
    copy_run,
    edit_json,
    make_ar_model,
    process,
    shown,
)

host = sys.modules["mlx_lm.generate"]
GROUP = "diffusion options (mlx-dllm-plugin):"
QUIET = ("--verbose", "False")
LENGTH = ("--canvas-length", 33, "--max-denoising-steps", 8, "--stop-at-eos", "false")

Generate = Callable[..., Outcome]


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Generate:
    """`mlx_lm.generate` with these arguments, in this process."""
    run = Runner(monkeypatch, capfd)
    return lambda *arguments: run("mlx_lm.generate", *arguments)


@pytest.fixture(scope="module")
def path(data: Path) -> Path:
    return data / "a2d" / "gpt2-grow" / "run"


@pytest.fixture(scope="module")
def gpt2(path: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(path))


@pytest.fixture(scope="module")
def ar(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ar_model(tmp_path_factory.mktemp("ar") / "llama", path / "model")


@pytest.fixture
def copied(path: Path, tmp_path: Path) -> Path:
    """A copy of the run that the test may break."""
    return copy_run(path, tmp_path / "run")


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def chat(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with a chat template."""
    target = copy_run(path, tmp_path_factory.mktemp("chat") / "run")
    edit_json(target / "model" / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    return target


def cases(data: Path, name: str) -> list[tuple[str, dict[str, Any]]]:
    golden = json.loads((data / "a2d" / name / "golden.json").read_text())
    return [(golden["prompts"][case["prompt_index"]]["text"], case) for case in golden["a2d_sample"]]


def first_case(data: Path) -> tuple[list[object], str]:
    """The arguments of a golden of a2d's own sampler, and the text it printed."""
    for prompt, case in cases(data, "gpt2-grow"):
        if (case["prompt_index"], case["canvas_len"], case["num_steps"], case["temperature"]) == (0, 33, 8, 1.0):
            return [*LENGTH, *QUIET, "--prompt", prompt], shown(case["a2d_sample_stdout"].removeprefix(prompt))
    raise AssertionError("the golden is gone")


# --- goldens


@pytest.mark.parametrize(("name", "wanted"), [("gpt2-grow", 20), ("qwen2-reuse", 25)])
def test_prints_the_text_of_a2d(data: Path, generate: Generate, name: str, wanted: int) -> None:
    """Every golden of a2d's sampler whose ids are a target: stdout is its text and a newline."""
    compared = 0
    for prompt, case in cases(data, name):
        if case["target"] != "tokens" or case["canvas_len"] == len(case["final_ids"]) == 9 or not case["forwards"]:
            continue
        text = shown(case["a2d_sample_stdout"].removeprefix(prompt))
        if not text:
            continue  # no masks in it
        outcome = generate(
            *("--model", data / "a2d" / name / "run", "--prompt", prompt, *QUIET, "--stop-at-eos", "false"),
            *("--canvas-length", case["canvas_len"], "--max-denoising-steps", max(case["num_steps"], 1)),
            *("--confidence-temperature", case["temperature"]),
        )
        assert outcome == Outcome(0, text + "\n", ""), case
        compared += 1
    assert compared >= wanted


def console_script(tmp_path: Path) -> Path:
    """mlx-lm's console script, as pip writes it."""
    (point,) = importlib.metadata.entry_points(group="console_scripts", name="mlx_lm.generate")
    module, _, function = point.value.partition(":")
    script = tmp_path / "mlx_lm.generate"
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return script


@pytest.mark.parametrize(
    ("start", "before"),
    [
        ("console script", ""),
        ("-m mlx_lm generate", ""),
        ("-m mlx_lm.generate", "Calling `python -m mlx_lm.generate...` directly is deprecated."),
        ("-m mlx_dllm_plugin generate", ""),
    ],
)
def test_every_way_to_start_it_decodes(data: Path, path: Path, tmp_path: Path, start: str, before: str) -> None:
    arguments, text = first_case(data)
    command = [console_script(tmp_path)] if start == "console script" else start.split()
    outcome = process([*command, "--model", path, *arguments])
    assert outcome.status == 0 and "mlx-dllm-plugin" not in outcome.err and "Traceback" not in outcome.err
    assert outcome.out.endswith(text + "\n")
    rest = outcome.out.removesuffix(text + "\n")
    assert rest.startswith(before) and rest.count("\n") == bool(before)


def test_a_checkpoint_without_a_tokenizer_takes_one_from_elsewhere(goldens: Path, generate: Generate) -> None:
    folder = goldens / "a2d" / "gpt2-partial"
    golden = json.loads((folder / "golden.json").read_text())
    case = golden["a2d_sample"][2]
    prompt = golden["prompts"][case["prompt_index"]]
    assert case["target"] == "tokens" and case["prompt_index"] == 0
    tokenizer = folder / "source_tokenizer"
    arguments = (
        *("--model", folder / "run", "--prompt", prompt["text"], "--stop-at-eos", "false", *QUIET),
        *("--canvas-length", case["canvas_len"], "--max-denoising-steps", case["num_steps"]),
    )
    mask = ("--mask-token-id", golden["run"]["mask"]["id"])
    outcome = generate(*arguments, *mask, "--tokenizer", tokenizer)
    text = mlx_lm.utils.load_tokenizer(tokenizer).decode(case["final_ids"][len(prompt["ids"]) :])
    assert (outcome.status, outcome.out) == (0, shown(text) + "\n")
    (warning,) = outcome.err.splitlines()  # its manifest says so
    assert "warning" in warning and "'failed'" in warning and "checkpoint-500" in warning

    without_tokenizer = generate(*arguments, *mask)
    assert without_tokenizer.status == 1 and without_tokenizer.out == ""
    assert without_tokenizer.err.splitlines()[-1].startswith(ERROR) and "--tokenizer" in without_tokenizer.err
    without_mask = generate(*arguments, "--tokenizer", tokenizer)
    assert without_mask.status == 1 and without_mask.out == ""
    assert without_mask.err.splitlines()[-1].startswith(ERROR) and "--mask-token-id" in without_mask.err


def test_the_mask_token_id_can_be_given(copied: Path, generate: Generate, data: Path) -> None:
    """Without one in any file; and an explicit one is used rather than the checkpoint's."""
    arguments, text = first_case(data)
    assert generate("--model", copied, *arguments, "--mask-token-id", 5).out not in ("", text + "\n")
    forget_mask(copied)
    assert_one_sentence(generate("--model", copied, *arguments), "--mask-token-id")
    assert generate("--model", copied, *arguments, "--mask-token-id", 340).out == text + "\n"


def forget_mask(run: Path) -> None:
    """Take the mask token out of every file that names it."""
    model = run / "model"
    block = json.loads((model / "config.json").read_text())["a2d"]
    edit_json(model / "config.json", a2d={name: value for name, value in block.items() if name != "mask_token_id"})
    decoder = json.loads((model / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    decoder.pop("340")
    edit_json(model / "tokenizer_config.json", added_tokens_decoder=decoder, mask_token=...)
    edit_json(model / "special_tokens_map.json", mask_token=...)
    (model / "added_tokens.json").unlink()
    added = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    edit_json(model / "tokenizer.json", added_tokens=[token for token in added if token["id"] != 340])


# --- the hosts' own options


def expected(loaded: tuple[Any, Any], prompt: Any, **options: Any) -> str:
    return mlx_lm.generate(*loaded, prompt, **options) + "\n"


def test_max_tokens_sets_the_length_when_given(path: Path, gpt2: tuple[Any, Any], generate: Generate) -> None:
    arguments = ("--model", path, "--prompt", PROMPT, *QUIET, "--stop-at-eos", "false")
    own = generate(*arguments).out
    assert own == expected(gpt2, PROMPT, stop_at_eos=False)  # the checkpoint's canvas of 32
    assert own == expected(gpt2, PROMPT, canvas_length=32, stop_at_eos=False)
    for option in ("--max-tokens", "-m", "--max-t"):
        assert generate(*arguments, option, 12).out == expected(gpt2, PROMPT, max_tokens=12, stop_at_eos=False)
    # The host's own default counts when it is typed.
    assert generate(*arguments, "--max-tokens", 100).out == expected(gpt2, PROMPT, max_tokens=100, stop_at_eos=False)


def test_verbose_prints_the_text_once_and_statistics(path: Path, data: Path, generate: Generate) -> None:
    _, text = first_case(data)
    outcome = generate("--model", path, *LENGTH, "--prompt", PROMPT)
    assert outcome.status == 0 and outcome.err == ""
    assert outcome.out.startswith(f"==========\n{text}\n==========\nPrompt: 9 tokens, ")
    assert "Diffusion: a2d, 8 forwards, 3.00 tokens per forward" in outcome.out
    assert outcome.out.count(text) == 1


def test_the_prompt_can_come_from_stdin(
    path: Path, data: Path, generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = first_case(data)
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert generate("--model", path, *LENGTH, *QUIET, "--prompt", "-").out == text + "\n"


def test_escapes_in_the_prompt_are_the_hosts(path: Path, gpt2: tuple[Any, Any], generate: Generate) -> None:
    outcome = generate("--model", path, *QUIET, "--prompt", "a\\nb", "-m", 8)
    assert outcome.out == expected(gpt2, "a\nb", max_tokens=8)


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        ((), "user: Go home\nassistant:"),
        (("--system-prompt", "Be kind"), "system: Be kind\nuser: Go home\nassistant:"),
        (("--prefill-response", "The cat"), "user: Go home\nassistant: The cat"),
        (("--ignore-chat-template",), "Go home"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_chat_templates_are_the_hosts(
    chat: Path, gpt2: tuple[Any, Any], generate: Generate, arguments: tuple[str, ...], prompt: str
) -> None:
    outcome = generate("--model", chat, *QUIET, "-m", 24, "--prompt", "Go home", *arguments)
    assert outcome == Outcome(0, expected(gpt2, prompt, max_tokens=24), "")
    assert outcome.out != expected(gpt2, prompt + " ", max_tokens=24)  # the prompt shows in the text


def test_an_extra_eos_token_stops(path: Path, data: Path, generate: Generate) -> None:
    arguments, text = first_case(data)
    assert "old" in text and text.startswith("the")
    arguments[arguments.index("false")] = "true"
    assert generate("--model", path, *arguments).out == text + "\n"
    assert generate("--model", path, *arguments, "--extra-eos-token", "old", "wn").out == "the\n"


@pytest.mark.parametrize(
    "arguments",
    [("--temp", 0.9), ("--temp", 0.9, "--top-p", 0.9), ("--temp", 1.2, "--top-k", 9), ("--temp", 1.0, "--min-p", 0.05)],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_sampling_options_act_and_a_seed_repeats(
    path: Path, data: Path, generate: Generate, arguments: tuple[object, ...]
) -> None:
    base, greedy = first_case(data)
    texts = [generate("--model", path, *base, *arguments, "--seed", seed).out for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) > 2
    assert greedy + "\n" not in texts


@pytest.mark.parametrize("filtered", [("--top-k", 1), ("--top-p", 0.000001), ("--min-p", 1.0)], ids=str)
def test_filters_that_leave_one_token_are_greedy(
    path: Path, data: Path, generate: Generate, filtered: tuple[object, ...]
) -> None:
    base, greedy = first_case(data)
    assert generate("--model", path, *base, "--temp", 1.5, *filtered).out == greedy + "\n"


def test_host_defaults_are_not_taken_for_requests(path: Path, data: Path, generate: Generate) -> None:
    base, text = first_case(data)
    given = ("--top-p", 1.0, "--top-k", 0, "--min-p", 0.0, "--temp", 0.0, "--num-draft-tokens", 3)
    more = ("--kv-group-size", 64, "--quantized-kv-start", 5000, "--prefill-step-size", 2048)
    assert generate("--model", path, *base, *given, *more).out == text + "\n"


# --- options of ours


def test_options_do_what_they_do_in_python(path: Path, gpt2: tuple[Any, Any], generate: Generate) -> None:
    arguments = (
        "--model",
        path,
        "--prompt",
        PROMPT,
        *QUIET,
        "-m",
        24,
        "--stop-at-eos",
        "f",
        "--max-denoising-steps",
        9,
    )
    base = {"max_tokens": 24, "stop_at_eos": False, "max_denoising_steps": 9}
    plain = generate(*arguments).out
    assert plain == expected(gpt2, PROMPT, **base)
    for given, options in (
        (("--unmasking", "low_confidence"), {"unmasking": "low_confidence"}),
        (("--unmasking", "low_confidence", "--block-length", 4), {"unmasking": "low_confidence", "block_length": 4}),
        (("--unmasking=mlx_dllm", "--max-denoising-steps=5"), {"unmasking": "mlx_dllm", "max_denoising_steps": 5}),
        (("--confidence-temperature", 0.2), {"confidence_temperature": 0.2}),
        (("--suppress-tokens", "13,175"), {"suppress_tokens": [13, 175]}),
        (("--suppress-tokens", "13 175"), {"suppress_tokens": [13, 175]}),
        (("--mode", "diffusion"), {}),
        (("--mode", "auto"), {}),
        (("--family", "gpt2"), {}),
    ):
        outcome = generate(*arguments, *given)
        assert outcome == Outcome(0, expected(gpt2, PROMPT, **{**base, **options}), ""), given
        assert (given[0] in ("--mode", "--family")) == (outcome.out == plain), given


def test_options_of_one_command_do_not_reach_the_next(path: Path, gpt2: tuple[Any, Any], generate: Generate) -> None:
    generate("--model", path, "--prompt", PROMPT, *QUIET, "--unmasking", "random", "-m", 3)
    assert generate("--model", path, "--prompt", PROMPT, *QUIET).out == expected(gpt2, PROMPT)


def sections(text: str) -> tuple[str, str, str]:
    """Usage, the host's options, and our group."""
    usage, _, rest = text.partition("\noptions:\n")
    own, _, group = rest.partition(GROUP)
    return usage, own, group


def test_help_shows_our_options_in_a_group_and_leaves_the_hosts_alone(generate: Generate) -> None:
    outcome = generate("--help")
    assert outcome.status == 0 and outcome.err == ""
    usage, own, group = sections(outcome.out)
    options = [option for option in table() if option.metadata["cli"] and not option.metadata["host"]]
    assert len(options) > 8
    squeezed = " ".join(group.split())
    for option in options:
        flag = "--" + option.name.replace("_", "-")
        assert re.search(rf"^  {flag}( |$)", group, re.M), flag
        assert flag in usage
        assert " ".join(option.metadata["help"].split()) in squeezed, flag
    assert "{auto,ar,diffusion}" in group
    assert ", ".join(RULES.names()) in squeezed and ", ".join(FAMILIES.names()) in squeezed

    mlx_dllm_plugin.deactivate()
    try:
        upstream = sections(generate("--help").out)
    finally:
        mlx_dllm_plugin.activate()
    assert upstream[2] == "" and upstream[1].strip() == own.strip()
    assert not any(re.search(rf"--{option.name.replace('_', '-')}( |$)", upstream[1], re.M) for option in options)


def test_the_hosts_options_are_not_offered_twice(generate: Generate) -> None:
    group = sections(generate("--help").out)[2]
    for option in table():
        if option.metadata["host"] or not option.metadata["cli"]:
            assert not re.search(rf"^  --{option.name.replace('_', '-')}( |$)", group, re.M)


# --- autoregressive models

PAIR = """
import sys, mlx_lm
module = sys.modules["mlx_lm.generate"]
seen = []
inner = module.setup_arg_parser
def setup():
    parser = inner()
    parse = parser.parse_args
    parser.parse_args = lambda *args: seen.append(parse(*args)) or seen[-1]
    return parser
module.setup_arg_parser = setup
sys.argv[0] = "mlx_lm.generate"
module.main()
print([(name, type(value).__name__, value) for name, value in vars(seen[0]).items()])
"""


def test_an_autoregressive_model_gives_the_same_namespace_and_output_without_the_plugin(ar: Path) -> None:
    arguments = ["-c", PAIR, "--model", ar, "--prompt", PROMPT, *QUIET, "--max-tokens", 20, "--seed", 1]
    plain = {"MLX_DISABLE_COMPILE": "1"}  # compiling takes the CPU seconds
    ours, upstream = process(arguments, **plain), process(arguments, MLX_DLLM_PLUGIN="0", **plain)
    assert ours.status == upstream.status == 0
    assert ours == upstream
    assert "('max_tokens', 'int', 20)" in ours.out and "'mode'" not in ours.out and len(ours.out) > 500


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--prompt", "Hi", "--max-tokens", "100"),
        ("-m", "5", "-p", "x", "--temp", "0.5", "--top-p", "0.9", "--top-k", "3", "--min-p", "0.1", "--seed", "4"),
        ("--mod", "here", "--max-t", "7", "--max-k", "9", "--s", "sys"),
        ("--extra-eos-token", "a", "b", "--kv-bits", "4", "--max-kv-size", "8", "--draft-model", "d", "-qa"),
    ],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)
def test_the_parsed_namespace_is_the_hosts(arguments: tuple[str, ...]) -> None:
    ours = outcome_of(arguments)
    mlx_dllm_plugin.deactivate()
    try:
        upstream = outcome_of(arguments)
    finally:
        mlx_dllm_plugin.activate()
    assert ours == upstream


def outcome_of(arguments: tuple[str, ...]) -> Any:
    try:
        namespace = host.setup_arg_parser().parse_args(list(arguments))
    except SystemExit as end:
        return end.code
    return [(name, type(value), value) for name, value in vars(namespace).items()]


@pytest.mark.parametrize(("short", "name"), [("--mod", "model"), ("--mo", "model"), ("--max-k", "max_kv_size")])
def test_abbreviations_keep_their_meaning(short: str, name: str) -> None:
    assert getattr(host.setup_arg_parser().parse_args([short, "7"]), name) in ("7", 7)


def test_an_abbreviated_model_option_decodes(path: Path, data: Path, generate: Generate) -> None:
    arguments, text = first_case(data)
    assert generate("--mod", path, *arguments).out == text + "\n"


# --- modes


def test_mode_ar_on_a_diffusion_checkpoint_is_refused(path: Path, generate: Generate) -> None:
    outcome = generate("--model", path, "--prompt", PROMPT, "--mode", "ar")
    assert_one_sentence(outcome, "diffusion checkpoint", "family gpt2", "leave out --mode ar")


def test_mode_diffusion_on_an_autoregressive_checkpoint_is_refused(ar: Path, generate: Generate) -> None:
    outcome = generate("--model", ar, "--prompt", PROMPT, "--mode", "diffusion")
    assert_one_sentence(outcome, "no diffusion spec", "'llama'", "leave out --mode diffusion", "--family")


@pytest.mark.parametrize("mode", ["auto", "ar"])
def test_modes_that_leave_an_autoregressive_model_alone(ar: Path, generate: Generate, mode: str) -> None:
    arguments = ("--model", ar, "--prompt", PROMPT, *QUIET, "-m", 9)
    outcome = generate(*arguments, "--mode", mode)
    assert outcome.status == 0 and outcome == generate(*arguments) and outcome.out.strip()


def test_diffusion_options_on_an_autoregressive_model_are_refused(ar: Path, generate: Generate) -> None:
    outcome = generate("--model", ar, "--prompt", PROMPT, "--canvas-length", 33)
    assert_one_sentence(outcome, "canvas_length", "no diffusion spec", "leave it out")


def test_a_forced_family_of_another_model_type_is_refused(ar: Path, generate: Generate) -> None:
    outcome = generate("--model", ar, "--prompt", PROMPT, "--family", "gpt2")
    assert_one_sentence(outcome, "'gpt2'", "'llama'")


def test_an_unknown_family_is_refused_with_the_known_ones(path: Path, generate: Generate) -> None:
    assert_one_sentence(generate("--model", path, "--family", "oracle"), "'oracle'", "gpt2", "qwen2")


def test_mode_diffusion_without_a_model_uses_the_demo_and_says_so(
    path: Path, gpt2: tuple[Any, Any], generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the host's own default model, which is autoregressive and some gigabytes large."""
    monkeypatch.setattr("mlx_dllm_plugin.patches.cli.demo_path", lambda: path)
    outcome = generate("--mode", "diffusion", "--prompt", PROMPT, *QUIET)
    assert (outcome.status, outcome.out) == (0, expected(gpt2, PROMPT))
    (line,) = outcome.err.splitlines()
    assert line.startswith("[mlx-dllm-plugin] ") and "no --model" in line and "demo" in line


@pytest.mark.parametrize("mode", ["auto", "diffusion"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("--draft-model", "draft"), ("--prompt-cache-file", "c.safetensors"), ("--kv-bits", 4), ("--max-kv-size", 64)],
)
def test_autoregressive_options_are_refused(
    path: Path, ar: Path, generate: Generate, tmp_path: Path, option: str, value: object, mode: str
) -> None:
    if option == "--draft-model":
        value = ar
    if option == "--prompt-cache-file" and mode == "auto":
        value = tmp_path / "cache.safetensors"  # the host reads it before it loads the model: it must be a good one
        make_cache(ar, value, path)
    outcome = generate("--model", path, "--prompt", PROMPT, "--mode", mode, option, value)
    assert_one_sentence(outcome, option, "leave it out")


def make_cache(ar: Path, file: Path, named: Path) -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

    model, _ = mlx_lm.load(str(ar))
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    save_prompt_cache(str(file), cache, {"model": str(named), "tokenizer_config": "{}"})


def test_a_diffusion_draft_model_is_refused(path: Path, ar: Path, generate: Generate) -> None:
    assert_one_sentence(generate("--model", ar, "--draft-model", path, "--prompt", PROMPT), "--draft-model")


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", ""), ["prompt is empty"]),
        (("--prompt", "cat " * 40), ["121"]),
        (("--prompt", "cat " * 40, "--max-tokens", 8), ["129", "121", "128", "7"]),
        (("--prompt", "cat " * 50, "--max-tokens", 8), ["151", "128"]),
        (("--prompt", PROMPT, "--max-tokens", 120), ["129", "9", "120", "128", "119"]),
        (("--prompt", PROMPT, "--canvas-length", 129), ["129", "128"]),
        (("--prompt", "The cat walks to " * 5), ["32", "--max-tokens"]),
        (("--prompt", PROMPT, "--canvas-length", 4), ["4", "9"]),
        (("--prompt", PROMPT, "--max-tokens", 0), ["max_tokens", "got 0"]),
        (("--prompt", PROMPT, "--max-tokens", -5), ["max_tokens", "got -5"]),
        (("--prompt", PROMPT, "--max-tokens", -1), ["max_tokens -1", "number of tokens"]),
        (("--prompt", PROMPT, "--temp", -0.5), ["temp", "0 (greedy) or", "-0.5"]),
        (("--prompt", PROMPT, "--temp", 1e-50), ["temp", "0 (greedy) or", "1e-50"]),
        (("--prompt", PROMPT, "--temp", 0.8, "--top-k", 341), ["top_k", "vocabulary of 341", "341"]),
        (("--prompt", PROMPT, "--temp", "nan"), ["temp", "nan"]),
        (("--prompt", PROMPT, "--temp", 0.8, "--top-p", 1.5), ["top_p", "[0, 1]", "1.5"]),
        (("--prompt", PROMPT, "--top-p", -0.1), ["top_p", "[0, 1]", "-0.1"]),
        (("--prompt", PROMPT, "--min-p", 2), ["min_p", "[0, 1]", "2.0"]),
        (("--prompt", PROMPT, "--temp", 0.8, "--top-k", -3), ["top_k", "-3"]),
        (("--prompt", PROMPT, "--unmasking", "psychic"), ["'psychic'", ", ".join(RULES.names())]),
        (("--prompt", PROMPT, "--block-length", 4), ["block_length", "'a2d'", "low_confidence"]),
        (
            ("--prompt", PROMPT, "--unmasking", "random", "--confidence-temperature", 0.5),
            ["confidence_temperature", "'random'"],
        ),
        (("--prompt", PROMPT, "--mask-token-id", 341), ["mask_token_id", "341", "340"]),
        (("--prompt", PROMPT, "--suppress-tokens", "5000"), ["suppress_tokens", "5000", "341"]),
        (("--prompt", PROMPT, "--tokenizer", "."), ["tokenizer files"]),
        (("--prompt", PROMPT, "--tokenizer", "/nowhere/at/all"), ["/nowhere/at/all"]),
    ],
    ids=lambda value: " ".join(map(str, value[-2:]))[:50] if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("mode", ["auto", "diffusion"])
def test_a_bad_request_is_one_sentence(
    path: Path,
    generate: Generate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[object, ...],
    words: list[str],
    mode: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_sentence(generate("--model", path.resolve(), "--mode", mode, *arguments), *words)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((name, value) for name in ("--canvas-length", "--max-denoising-steps") for value in ("0", "-3", "x", "1.5")),
        ("--max-denoising-steps", "1000000000"),
        ("--unmasking", ""),
        ("--block-length", "0"),
        ("--confidence-temperature", "-1"),
        ("--confidence-temperature", "warm"),
        ("--mask-token-id", "-1"),
        ("--mask-token-id", "mask"),
        ("--suppress-tokens", "1,x"),
        ("--suppress-tokens", "-4"),
        ("--stop-at-eos", "perhaps"),
        ("--mode", "telepathic"),
        ("--max-tokens", "many"),
        ("--temp", "hot"),
    ],
)
def test_an_impossible_value_is_a_usage_error(path: Path, generate: Generate, option: str, value: str) -> None:
    outcome = generate("--model", path, "--prompt", PROMPT, f"{option}={value}")
    assert (outcome.status, outcome.out) == (2, "")
    last = outcome.err.splitlines()[-1]
    assert outcome.err.startswith("usage: ") and f"error: argument {option}" in last and value in last
    assert "Traceback" not in outcome.err


def _damage(file: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / "model" / file).write_text(text) and None


def _set(**changes: Any) -> Callable[[Path], None]:
    return lambda run: edit_json(run / "model" / "config.json", **changes)


def _mask(value: Any) -> Callable[[Path], None]:
    return _set(a2d={"objective": "mdlm", "mask_token_id": value})


def _truncate(run: Path) -> None:
    weights = run / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _truncate_header(run: Path) -> None:
    weights = run / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def _unfinished(run: Path) -> None:
    (run / "model" / "config.json").unlink()


def _empty_run(run: Path) -> None:
    for file in (run / "model").iterdir():
        file.unlink()
    (run / "model").rmdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_damage("config.json", '{"model_type": '), ["config.json", "JSON"]),
        (_damage("config.json", "[]"), ["config.json", "object"]),
        (_damage("generation_config.json", "{"), ["generation_config.json", "JSON"]),
        (_damage("model.safetensors", ""), ["model.safetensors", "truncated"]),
        (lambda run: (run / "model" / "model.safetensors").unlink(), ["no weights"]),
        (_truncate, ["model.safetensors", "truncated"]),
        (_truncate_header, ["model.safetensors", "truncated"]),
        (_damage("model.safetensors", "not a safetensors file at all, but long enough"), ["model.safetensors"]),
        (_mask(-1), ["mask_token_id", "-1", "341"]),
        (_mask(341), ["mask_token_id", "341", "340"]),
        (_mask("<mask>"), ["mask_token_id", "<mask>"]),
        (forget_mask, ["mask", "--mask-token-id"]),
        (_set(a2d="yes"), ["a2d"]),
        (_set(a2d={"objective": "bd3lm", "mask_token_id": 340}), ["objective", "bd3lm"]),
        (_set(vocab_size=...), ["vocab_size"]),
        (_set(n_embd=40), ["cannot be loaded as gpt2"]),
        (_set(n_embd=None), ["cannot be loaded as gpt2"]),
        (_set(n_head=0), ["n_head must be a positive integer"]),
        (_set(n_layer=3), ["cannot be loaded as gpt2"]),
        (_set(layer_norm_epsilon="small"), ["layer_norm_epsilon must be a number above 0"]),
        (_unfinished, ["was not saved whole", "config.json"]),
        (_damage("tokenizer.json", "{}"), [""]),
        (_damage("chat_template.jinja", "{{ raise_exception('no such role') }}"), ["no such role"]),
        (_damage("chat_template.jinja", "{% if %}"), [""]),
        (_set(model_type="mamba"), ["mamba", "gpt2", "qwen2"]),
        (_set(activation_function="relu"), ["activation_function", "relu"]),
        (_empty_run, ["nothing to load", "model/"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_broken_checkpoint_is_one_sentence(
    copied: Path, generate: Generate, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(copied)
    assert_one_sentence(generate("--model", copied, "--prompt", PROMPT, "--mode", "diffusion"), *words)


@pytest.mark.parametrize(
    "damage",
    [_damage("config.json", '{"model_type": '), _truncate, _mask(-1), _empty_run],
    ids=["JSON", "truncated", "mask", "nothing"],
)
def test_a_broken_checkpoint_is_one_sentence_without_a_mode(
    copied: Path, generate: Generate, damage: Callable[[Path], None]
) -> None:
    damage(copied)
    assert_one_sentence(generate("--model", copied, "--prompt", PROMPT))


def test_ids_beyond_the_embedding_are_one_sentence(data: Path, path: Path, generate: Generate) -> None:
    """The tokenizer of another checkpoint, which has more tokens."""
    model = data / "a2d" / "qwen2-reuse" / "run"
    outcome = generate("--model", model, "--tokenizer", path, "--prompt", "old", "--mode", "diffusion")
    assert_one_sentence(outcome, "333", "330", "tokenizer")


@pytest.mark.parametrize("name", ["missing", "./missing", "a/b/missing", "nobody/nothing-of-this-name"])
def test_a_missing_model_is_one_sentence(
    generate: Generate, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_sentence(generate("--model", name, "--prompt", PROMPT, "--mode", "diffusion"), name)


def test_a_directory_without_a_config_is_one_sentence(generate: Generate, tmp_path: Path) -> None:
    outcome = generate("--model", tmp_path, "--prompt", PROMPT, "--mode", "diffusion")
    assert_one_sentence(outcome, str(tmp_path), "config.json")


def test_a_file_instead_of_a_directory_is_one_sentence(generate: Generate, path: Path) -> None:
    outcome = generate("--model", path / "manifest.json", "--prompt", PROMPT, "--mode", "diffusion")
    assert_one_sentence(outcome, "manifest.json")


def test_a_root_config_vetoes_the_run_directory(copied: Path, ar: Path, generate: Generate) -> None:
    """A run directory with a config.json of its own is a checkpoint, whatever lies beside."""
    for file in ar.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    outcome = generate("--model", copied, "--prompt", PROMPT, *QUIET, "-m", 5)
    assert outcome == generate("--model", ar, "--prompt", PROMPT, *QUIET, "-m", 5) and outcome.status == 0


def test_a_real_process_ends_with_status_one_and_no_traceback(copied: Path) -> None:
    _truncate(copied)
    assert_one_sentence(process(["-m", "mlx_lm", "generate", "--model", copied, "--prompt", PROMPT]), "truncated")


# --- Ctrl-C

SLOW = """
import os, signal, sys, time
import mlx_lm
from mlx_lm.models import gpt2
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the parent ignores it
inner, count, at = gpt2.GPT2Model.__call__, 0, int(sys.argv.pop(1))
def slow(self, *args, **kwargs):
    global count
    count += 1
    if count == at:
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
    return inner(self, *args, **kwargs)
gpt2.GPT2Model.__call__ = slow
sys.argv[0] = "mlx_lm.generate"
sys.modules["mlx_lm.generate"].main()
"""
FROM_LEFT = ("--unmasking", "low_confidence", "--block-length", 1, "--stop-at-eos", "false", "-m", 60)


def released(gpt2: tuple[Any, Any], forwards: int) -> str:
    """The text released in so many forwards."""
    options = {"unmasking": "low_confidence", "block_length": 1, "stop_at_eos": False, "max_tokens": 60}
    responses = mlx_lm.stream_generate(*gpt2, PROMPT, max_denoising_steps=60, **options)
    return "".join(response.text for response in responses if response.forwards <= forwards)


def test_an_interrupt_prints_what_was_released(path: Path, gpt2: tuple[Any, Any]) -> None:
    arguments = ("--model", path, "--prompt", PROMPT, *FROM_LEFT, "--max-denoising-steps", 60, *QUIET)
    outcome = process(["-c", SLOW, 20, *arguments])
    assert outcome.status == 130
    assert outcome.err == "[mlx-dllm-plugin] interrupted\n"
    text = released(gpt2, 19)
    assert len(text) > 10 and outcome.out == text + "\n"


def test_ctrl_c_ends_a_running_command(path: Path, gpt2: tuple[Any, Any]) -> None:
    """From outside, once the first text is on the screen."""
    arguments = ["--model", path, "--prompt", PROMPT, *FROM_LEFT, "--max-denoising-steps", 60]
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, "0", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
    ) as command:
        assert command.stdout is not None and command.stderr is not None
        rule = command.stdout.readline()
        first = command.stdout.read(4)
        command.send_signal(signal.SIGINT)
        out = (rule + first + command.stdout.read()).decode()
        err = command.stderr.read().decode()
        status = command.wait(60)
    assert (status, err) == (130, "[mlx-dllm-plugin] interrupted\n")
    text = out.split("==========\n")[1].removesuffix("\n")
    whole = released(gpt2, 60)
    assert 0 < len(text) < len(whole) and whole.startswith(text)
    assert re.search(r"\nGeneration: [0-9]+ tokens, ", out)


def test_an_interrupt_in_a_script_stays_an_interrupt(gpt2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(gpt2[0].model)

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mlx_lm.generate(*gpt2, PROMPT, max_tokens=4)


def test_a_reader_that_has_gone_is_no_traceback(path: Path) -> None:
    command = f"{sys.executable} -m mlx_lm generate --model {path} --prompt '{PROMPT}' -m 60 | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("symbol", ["stream_generate", "load_model"])
def test_a_host_that_would_decode_autoregressively_is_refused(
    path: Path, generate: Generate, monkeypatch: pytest.MonkeyPatch, symbol: str
) -> None:
    """A change that is off must not turn a diffusion checkpoint into an autoregressive one."""
    from mlx_dllm_plugin.patches.mlx_lm import utils as patched

    monkeypatch.setattr(patched, "is_applied", lambda target, name: name != symbol)
    assert_one_sentence(generate("--model", path, "--prompt", PROMPT), f".{symbol} than the plugin knows")
