"""What a checkpoint is, and where each value of its spec comes from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_dllm_plugin.checkpoint import Checkpoint, open_checkpoint
from mlx_dllm_plugin.errors import CheckpointError, DiffusionError
from mlx_dllm_plugin.families import FAMILIES
from mlx_dllm_plugin.families.a2d import MASK_TOKEN
from mlx_dllm_plugin.families.a2d import family as a2d_family
from mlx_dllm_plugin.options import DecodingOptions, LoadOptions
from mlx_dllm_plugin.plan import plan
from mlx_dllm_plugin.spec import DiffusionSpec, detect, prepare, resolve
from tests.models import CONTEXT, EOS, VOCAB, a2d_block, config_of, load, tiny_run, write_checkpoint, write_json

HERE = Path("checkpoint")


def checkpoint(model_type: str = "gpt2", *, block: dict[str, Any] | None = None, **parts: Any) -> Checkpoint:
    """A checkpoint in memory with an a2d block; ``config`` changes keys of config.json, None removes one."""
    config = {"a2d": a2d_block(**(block or {})), **parts.pop("config", {})}
    if model_type in ("gpt2", "qwen2"):
        return Checkpoint(path=HERE, config=config_of(model_type, **config), **parts)
    return Checkpoint(path=HERE, config={**config_of("gpt2", **config), "model_type": model_type}, **parts)


def spec(**parts: Any) -> DiffusionSpec:
    found = checkpoint(**parts)
    family = detect(found)
    assert family is not None
    return resolve(found, family)


def sentence(call: Any, *args: Any, kind: type[Exception] = DiffusionError, **kwargs: Any) -> str:
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text
    return text


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2"])
def test_an_a2d_block_is_claimed_by_its_family(model_type: str) -> None:
    family = detect(checkpoint(model_type))
    assert family is FAMILIES.get(model_type)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2"])
def test_no_block_is_no_claim(model_type: str, tmp_path: Path) -> None:
    assert detect(checkpoint(model_type, config={"a2d": None})) is None
    assert prepare(write_checkpoint(tmp_path, model_type), None, LoadOptions()) is None
    assert not hasattr(load(tmp_path), "diffusion_spec")


def test_an_empty_block_is_a_claim() -> None:
    """a2d wrote it, whatever it left out; the mask id must then come from elsewhere."""
    found = spec(config={"a2d": {}}, added_tokens={MASK_TOKEN: 44})
    assert found.mask_token_id == 44
    assert found.sources["family"] == "the a2d block"


def test_a_tokenizer_with_a_mask_token_claims_nothing() -> None:
    parts: dict[str, Any] = dict(
        config={"a2d": None},
        tokenizer_config={"mask_token": "[MASK]"},
        added_tokens={"[MASK]": 40, MASK_TOKEN: 41},
    )
    assert detect(checkpoint(**parts)) is None
    assert detect(checkpoint(**parts | {"config": {"a2d": None, "mask_token_id": 40}})) is None


@pytest.mark.parametrize("model_type", ["mamba", "no_such_model", None])
def test_a_block_of_another_model_type_is_refused(model_type: str | None) -> None:
    found = Checkpoint(path=HERE, config={**config_of("gpt2"), "model_type": model_type, "a2d": a2d_block()})
    assert sentence(detect, found) == (
        f"checkpoint is an a2d diffusion checkpoint of model_type {model_type!r}, which this version cannot decode; "
        f"it decodes {', '.join(FAMILIES.names())}."
    )


def test_a_checkpoint_inside_a_run_is_claimed_without_a_block() -> None:
    found = checkpoint(config={"a2d": None}, run=HERE, manifest={"a2d_version": "0.1.0"})
    family = detect(found)
    assert family is FAMILIES.get("gpt2")
    assert resolve(found, family).sources["family"] == "the run's manifest"
    assert detect(checkpoint(config={"a2d": None}, run=HERE, manifest={"version": "0.1.0"})) is None


def test_a_family_can_be_forced() -> None:
    found = checkpoint(config={"a2d": None, "mask_token_id": 9})
    family = detect(found, "gpt2")
    assert family is FAMILIES.get("gpt2")
    resolved = resolve(found, family)
    assert resolved.sources["family"] == "forced by the family option"
    assert (resolved.defaults["canvas_length"], resolved.defaults["max_denoising_steps"]) == (64, 32)
    assert resolved.sources["canvas_length"] == "a2d's command line"


def test_a_wrong_or_unknown_family_is_refused() -> None:
    assert sentence(detect, checkpoint(), "qwen2") == (
        "Family 'qwen2' decodes checkpoints of model_type qwen2, but checkpoint/config.json says 'gpt2'."
    )
    assert sentence(detect, checkpoint(), "bert") == f"Unknown family 'bert'; known are: {', '.join(FAMILIES.names())}."


def test_two_claims_are_refused_until_one_is_chosen() -> None:
    first = a2d_family("mamba", hidden=lambda *_: None, head=lambda *_: None)
    second = replace(first, name="mamba_two")
    found = checkpoint("mamba")
    FAMILIES.register(first)
    try:
        assert detect(found) is first
        FAMILIES.register(second)
        try:
            assert sentence(detect, found) == (
                "checkpoint: the families mamba, mamba_two all claim it; choose one with family."
            )
            assert detect(found, "mamba_two") is second
        finally:
            FAMILIES.unregister("mamba_two")
        assert detect(found) is first
    finally:
        FAMILIES.unregister("mamba")


# Resolution of the mask id: every source, each one beaten by all before it.
CHAIN: list[tuple[str, int]] = [
    ("the a2d block", 11),
    ("config.json", 12),
    ("generation_config.json", 13),
    ("the tokenizer's mask token '<m>'", 14),
    (f"the token '{MASK_TOKEN}' in the vocabulary", 15),
    ("the family mask-chain", 16),
]


def chain_checkpoint(first: int) -> tuple[Checkpoint, Any]:
    """A checkpoint and family that offer the sources of CHAIN from the given one on."""
    values = [value if i >= first else None for i, (_, value) in enumerate(CHAIN)]
    block, config, generation, declared, token, own = values
    added = {text: value for text, value in (("<m>", declared), (MASK_TOKEN, token)) if value is not None}
    found = checkpoint(
        block={"mask_token_id": block},
        config={"mask_token_id": config},
        generation_config={"mask_token_id": generation},
        tokenizer_config={"mask_token": "<m>"},
        added_tokens=added,
    )
    return found, replace(FAMILIES.get("gpt2"), name="mask-chain", mask_token_id=own)


@pytest.mark.parametrize("first", range(len(CHAIN)))
def test_each_source_of_the_mask_id_beats_those_after_it(first: int) -> None:
    resolved = resolve(*chain_checkpoint(first))
    assert (resolved.sources["mask_token_id"], resolved.mask_token_id) == CHAIN[first]


def test_a_mask_id_of_zero_counts() -> None:
    assert spec(block={"mask_token_id": 0}, config={"mask_token_id": 5}).mask_token_id == 0


def test_without_any_source_the_option_must_say_it() -> None:
    resolved = resolve(*chain_checkpoint(len(CHAIN)))
    assert resolved.mask_token_id is None
    assert resolved.sources["mask_token_id"] == "nothing says: give mask_token_id (--mask-token-id)"
    assert sentence(plan, resolved, [1, 2], DecodingOptions(max_tokens=4)) == (
        "The checkpoint does not say which token is its mask: give mask_token_id (--mask-token-id)."
    )
    assert plan(resolved, [1, 2], DecodingOptions(max_tokens=4, mask_token_id=9)).mask_token_id == 9


def test_the_option_beats_every_other_source() -> None:
    resolved = resolve(*chain_checkpoint(0))
    assert plan(resolved, [1, 2], DecodingOptions(max_tokens=4, mask_token_id=0)).mask_token_id == 0
    assert plan(resolved, [1, 2], DecodingOptions(max_tokens=4)).mask_token_id == 11


def test_a_declared_mask_token_may_be_an_object() -> None:
    found = spec(
        block={"mask_token_id": None}, tokenizer_config={"mask_token": {"content": "<m>"}}, added_tokens={"<m>": 8}
    )
    assert (found.mask_token_id, found.sources["mask_token_id"]) == (8, "the tokenizer's mask token '<m>'")


def test_a_declared_mask_token_outside_the_vocabulary_files_is_no_source() -> None:
    assert spec(block={"mask_token_id": None}, tokenizer_config={"mask_token": "<m>"}).mask_token_id is None


@pytest.mark.parametrize("value", [-1, VOCAB, 10**9, 3.0, "47", True, [47]])
@pytest.mark.parametrize("source", ["the a2d block", "config.json", "generation_config.json"])
def test_an_impossible_mask_id_is_refused_with_its_source(value: Any, source: str, tmp_path: Path) -> None:
    block = a2d_block(mask_token_id=value if source == "the a2d block" else None)
    write_json(tmp_path / "config.json", config_of("gpt2", a2d=block, **{"mask_token_id": None}))
    if source != "the a2d block":
        own = config_of("gpt2", a2d=block) if source == "config.json" else {}
        write_json(tmp_path / source, {**own, "mask_token_id": value})
    expected = f"mask_token_id must be an id within the embedding of 48 rows (0 to 47), got {value!r} from {source}."
    assert sentence(prepare, tmp_path, None, LoadOptions(), kind=CheckpointError) == expected
    resolved = resolve(open_checkpoint(tmp_path), FAMILIES.get("gpt2"))
    assert sentence(plan, resolved, [1], DecodingOptions(max_tokens=2)) == expected
    assert plan(resolved, [1], DecodingOptions(max_tokens=2, mask_token_id=9)).mask_token_id == 9


def test_the_last_row_of_the_embedding_may_be_the_mask() -> None:
    assert spec(block={"mask_token_id": VOCAB - 1}).mask_token_id == VOCAB - 1


def test_an_impossible_mask_id_in_the_tokenizer_or_the_option_is_refused() -> None:
    outside = spec(block={"mask_token_id": None}, added_tokens={MASK_TOKEN: VOCAB})
    text = sentence(plan, outside, [1], DecodingOptions(max_tokens=2))
    assert text.endswith(f"got 48 from the token '{MASK_TOKEN}' in the vocabulary.")
    text = sentence(plan, spec(), [1], DecodingOptions(max_tokens=2, mask_token_id=VOCAB))
    assert text.endswith("got 48 from the option.")


def test_end_of_sequence_ids_come_from_the_first_source_that_has_them() -> None:
    both = spec(generation_config={"eos_token_id": [3, 5]})
    assert (both.eos_token_ids, both.sources["eos_token_ids"]) == ((3, 5), "generation_config.json")
    config = spec(config={"eos_token_id": [EOS]})
    assert (config.eos_token_ids, config.sources["eos_token_ids"]) == ((EOS,), "config.json")
    zero = spec(generation_config={"eos_token_id": 0})
    assert zero.eos_token_ids == (0,)
    for declared in ("<e>", {"content": "<e>"}):
        parts: dict[str, Any] = {"tokenizer_config": {"eos_token": declared}, "added_tokens": {"<e>": 4}}
        found = spec(config={"eos_token_id": None}, **parts)
        assert (found.eos_token_ids, found.sources["eos_token_ids"]) == ((4,), "the tokenizer's eos token '<e>'")
    none = spec(config={"eos_token_id": None})
    assert (none.eos_token_ids, none.sources["eos_token_ids"]) == ((), "nothing says: the output is never cut")


@pytest.mark.parametrize("value", ["3", 1.5, [3, "4"], True, {"a": 1}, -1])
def test_end_of_sequence_ids_that_are_no_ids_are_refused(value: Any) -> None:
    text = sentence(spec, kind=CheckpointError, config={"eos_token_id": value})
    assert "eos_token_id" in text and repr(value) in text


@pytest.mark.parametrize("value", [None, 0, -3, "48", 48.0])
def test_a_vocabulary_without_a_size_is_refused(value: Any) -> None:
    found = checkpoint(config={"vocab_size": value})
    assert sentence(resolve, found, FAMILIES.get("gpt2"), kind=CheckpointError) == (
        f"{HERE / 'config.json'}: vocab_size must be a positive integer, got {value!r}."
    )


def test_the_context_comes_from_the_config() -> None:
    gpt2 = spec()
    assert (gpt2.context_length, gpt2.sources["context_length"]) == (CONTEXT, "config.json (n_positions)")
    qwen2 = spec(model_type="qwen2", config={"max_position_embeddings": 99})
    assert (qwen2.context_length, qwen2.sources["context_length"]) == (99, "config.json (max_position_embeddings)")
    unbounded = spec(config={"n_positions": None})
    assert (unbounded.context_length, unbounded.sources["context_length"]) == (None, "nothing says: unbounded")
    assert len(plan(unbounded, [1], DecodingOptions(max_tokens=5000)).canvas) == 5001


def test_the_rest_of_the_spec_is_the_familys() -> None:
    found = spec()
    assert (found.family, found.logits, found.attention, found.canvas) == ("gpt2", "in_place", "bidirectional", "fixed")
    assert (found.unmasking, found.vocab_size, found.sources["vocab_size"]) == ("a2d", VOCAB, "config.json")
    assert {found.sources[name] for name in ("logits", "attention", "canvas", "unmasking")} == {"the family gpt2"}
    assert found.sources["family"] == "the a2d block"


def test_every_value_of_the_spec_has_a_source() -> None:
    found = spec()
    values = set(DiffusionSpec.__dataclass_fields__) - {"defaults", "sources"} | set(found.defaults)
    assert set(found.sources) == values


def test_the_sampler_of_the_block_gives_the_defaults() -> None:
    found = spec(block={"sampler": {"canvas_len": 24, "num_steps": 6, "temperature": 0.5}})
    expected = {"canvas_length": 24, "max_denoising_steps": 6, "confidence_temperature": 0.5}
    assert found.defaults == expected
    assert {found.sources[name] for name in expected} == {"the a2d block"}
    row = plan(found, [1, 2, 3, 4], DecodingOptions())
    steps = sum(len(stage.counts) for stage in row.stages) + row.empty_steps
    assert (len(row.canvas), row.values["confidence_temperature"], steps) == (24, 0.5, 6)


def test_what_the_block_leaves_out_is_not_said_to_come_from_it() -> None:
    found = spec(block={"sampler": {"canvas_len": 24}})
    assert found.sources["canvas_length"] == "the a2d block"
    assert found.sources["max_denoising_steps"] == "a2d's command line"


@pytest.mark.parametrize("sampler", [None, {}])
def test_a_block_without_sampler_has_the_defaults_of_a2d(sampler: Any) -> None:
    found = spec(block={"sampler": sampler})
    assert found.defaults == {"canvas_length": 64, "max_denoising_steps": 32, "confidence_temperature": 1.0}


@pytest.mark.parametrize("key", ["canvas_len", "num_steps"])
@pytest.mark.parametrize("value", [0, -4, 1.5, "32", True, None])
def test_impossible_lengths_in_the_block_are_refused(key: str, value: Any) -> None:
    assert sentence(spec, kind=CheckpointError, block={"sampler": {key: value}}) == (
        f"{HERE / 'config.json'}: a2d.sampler.{key} must be a positive integer, got {value!r}."
    )


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "1", True, None])
def test_an_impossible_temperature_in_the_block_is_refused(value: Any) -> None:
    assert sentence(spec, kind=CheckpointError, block={"sampler": {"temperature": value}}) == (
        f"{HERE / 'config.json'}: a2d.sampler.temperature must be 0 or more, got {value!r}."
    )


def test_an_unknown_objective_or_sampler_is_refused() -> None:
    assert "a2d.objective must be 'mdlm', got 'sedd'" in sentence(spec, block={"objective": "sedd"})
    assert "a2d.sampler must be an object, got [1]" in sentence(spec, block={"sampler": [1]})


def test_the_loaded_model_carries_its_spec(tmp_path: Path) -> None:
    model = load(tiny_run(tmp_path, "qwen2"))
    assert model.diffusion_spec == resolve(open_checkpoint(tmp_path), FAMILIES.get("qwen2"))
    assert type(model).__module__ == "mlx_lm.models.qwen2"


def test_modes_and_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    ar = write_checkpoint(tmp_path / "ar")
    run = tiny_run(tmp_path / "run") / "model"
    text = sentence(prepare, ar, None, LoadOptions(mode="diffusion"))
    assert "has no diffusion spec (model_type 'gpt2'" in text and "--family" in text
    text = sentence(prepare, run, None, LoadOptions(mode="ar"))
    assert "diffusion checkpoint of the family gpt2" in text and "leave out --mode ar" in text
    assert prepare(ar, None, LoadOptions(mode="ar")) is None
    assert prepare(run, None, LoadOptions(mode="diffusion")) is not None


def test_overrides_reach_the_spec(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    found = prepare(path, {"a2d": a2d_block(mask_token_id=5)}, LoadOptions())
    assert found is not None and found[1].mask_token_id == 5


def test_a_folder_without_config_is_left_to_the_host(tmp_path: Path) -> None:
    assert prepare(tmp_path, None, LoadOptions()) is None
    write_json(tmp_path / "README.json", {})
    assert "config.json is missing" in sentence(prepare, tmp_path, None, LoadOptions(mode="diffusion"))
