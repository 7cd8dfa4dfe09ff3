"""The bound on a target's likelihood: against a model computed in numpy, brute force over subsets and orders, and
LLaDA's own numbers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dllm_plugin import DiffusionError, DiffusionSpec, bidirectional_forward, likelihood, score
from mlx_dllm_plugin.families import Family
from tests.models import CONTEXT, MASK, VOCAB, load, tiny_model

Logits = Callable[[np.ndarray], np.ndarray]  # ids [B, T] -> [B, T, V]

PROMPT, TARGET = [3, 1, 7, 0], [5, 2, 9, 2, 8]
FALSE_ALARM = 5.0  # standard errors: a right estimator misses them once in 1.7 million seeds


class Toy:
    """A model of a few numbers, bidirectional, whose logits numpy computes too. They depend on all tokens and
    positions, and strongly on how many are masked, so that a bias in the mask counts shows."""

    vocab, mask, width, context = 11, 10, 6, 64

    def __init__(self, logits: str = "in_place", dtype: mx.Dtype = mx.float32):
        random = np.random.default_rng(9)
        self.embedding = random.standard_normal((self.vocab, self.width)).astype(np.float32)
        self.embedding[self.mask] *= 3
        self.position = 0.3 * random.standard_normal((self.context, self.width)).astype(np.float32)
        self.gain = 1 + 0.3 * random.standard_normal((self.context, 1)).astype(np.float32)
        self.mix = 0.3 * random.standard_normal((self.width, self.width)).astype(np.float32)
        self.out = 2 * random.standard_normal((self.width, self.vocab)).astype(np.float32)
        self.dtype = dtype
        self.heads: list[int] = []
        self.spec = self.diffusion_spec = DiffusionSpec(
            family="toy",
            logits=logits,  # type: ignore[arg-type]
            attention="bidirectional",
            canvas="fixed",
            unmasking="low_confidence",
            mask_token_id=self.mask,
            eos_token_ids=(),
            vocab_size=self.vocab,
            context_length=self.context,
        )
        self.diffusion_family = Family(
            name="toy",
            model_types=("toy",),
            claims=lambda _: False,
            hidden=self.hidden,
            head=self.head,
            defaults=lambda _: {},
        )

    def hidden(self, model: Any, ids: mx.array, cache: list[Any]) -> mx.array:
        tokens = mx.array(self.embedding)[ids]
        mean = (tokens * mx.array(self.gain[: ids.shape[1]])).mean(axis=1, keepdims=True)
        return mx.tanh(tokens + mx.array(self.position[: ids.shape[1]]) + mean @ mx.array(self.mix))

    def head(self, model: Any, states: mx.array) -> mx.array:
        self.heads.append(states.shape[0] * states.shape[1])
        return states.astype(self.dtype) @ mx.array(self.out).astype(self.dtype)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """The same in float64."""
        tokens = self.embedding.astype(np.float64)[ids]
        mean = (tokens * self.gain[: ids.shape[1]]).mean(axis=1, keepdims=True)
        return np.tanh(tokens + self.position[: ids.shape[1]] + mean @ self.mix) @ self.out


def exactly(model: Any, prompt: list[int], target: list[int], **how: Any) -> Any:
    """The exact score, whose subsets are there."""
    return score(model, prompt, target, method="exact", **how)


def token_logprobs(
    logits: Logits,
    prompt: list[int],
    target: list[int],
    masked: tuple[int, ...],
    mask: int,
    cfg: float = 0.0,
    shifted: bool = False,
) -> dict[int, float]:
    """Of the masked target tokens, from the logits of whole canvases."""
    canvas = [mask if i in masked else token for i, token in enumerate(target)]
    values = logits(np.array([[*prompt, *canvas]]))[0].astype(np.float64)
    if cfg:
        without = logits(np.array([[mask] * len(prompt) + canvas]))[0].astype(np.float64)
        values = without + (cfg + 1) * (values - without)
    found = {}
    for i in masked:
        row = values[len(prompt) + i - (1 if shifted else 0)]
        found[i] = float(row[target[i]] - row.max() - math.log(np.exp(row - row.max()).sum()))
    return found


def table(logits: Logits, prompt: list[int], target: list[int], mask: int, **how: Any) -> dict[tuple[int, ...], dict]:
    sizes = range(1, len(target) + 1)
    return {
        masked: token_logprobs(logits, prompt, target, masked, mask, **how)
        for size in sizes
        for masked in combinations(range(len(target)), size)
    }


def by_count(known: dict[tuple[int, ...], dict], length: int) -> list[float]:
    return [
        float(np.mean([length / size * sum(own.values()) for masked, own in known.items() if len(masked) == size]))
        for size in range(1, length + 1)
    ]


def chain(known: dict[tuple[int, ...], dict], order: tuple[int, ...]) -> float:
    """Log-likelihood of the chain rule in this order."""
    return sum(known[tuple(sorted(order[i:]))][token] for i, token in enumerate(order))


# Exact.

HOW: list[dict[str, Any]] = [{}, {"cfg": 1.5}, {"shifted": True}, {"shifted": True, "cfg": 0.5}]


def agrees(found: Any, known: dict[tuple[int, ...], dict], length: int, tolerance: float) -> None:
    subsets = found.subsets
    assert (found.method, found.standard_error, found.target_tokens) == ("exact", 0.0, length)
    assert found.samples == len(known) == 2**length - 1
    for mask, row, (masked, own) in zip(subsets.masks, subsets.logprobs, known.items(), strict=True):
        assert tuple(np.flatnonzero(mask)) == masked
        assert np.isnan(row[~mask]).all()
        assert np.abs(row[mask] - list(own.values())).max() < tolerance
    orders = [chain(known, order) for order in permutations(range(length))]
    assert found.log_likelihood == pytest.approx(np.mean(orders), abs=tolerance * length)
    assert subsets.by_mask_count == pytest.approx(by_count(known, length), abs=tolerance * length)
    assert subsets.left_to_right == pytest.approx(orders[0], abs=tolerance * length)
    assert subsets.order_mixture == pytest.approx(np.log(np.mean(np.exp(orders))), abs=tolerance * length)
    assert min(orders) + 1 < found.log_likelihood < subsets.order_mixture < max(orders)


@pytest.mark.parametrize("how", HOW)
def test_exact_is_the_mean_over_all_orders(how: dict[str, Any]) -> None:
    toy = Toy("shifted" if how.get("shifted") else "in_place")
    found = score(toy, PROMPT, TARGET, method="exact", cfg_scale=how.get("cfg", 0.0))
    agrees(found, table(toy.logits, PROMPT, TARGET, toy.mask, **how), len(TARGET), 2e-5)  # measured: 3e-6


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("model_type", ["gpt2", "qwen2"])
def test_exact_with_a_transformer(model_type: str, how: dict[str, Any]) -> None:
    model = tiny_model(model_type)
    if how.get("shifted"):
        model.diffusion_spec = dataclasses.replace(model.diffusion_spec, logits="shifted")
    target = [11, 4, 30, 4]
    found = score(model, PROMPT, target, method="exact", cfg_scale=how.get("cfg", 0.0))
    known = table(lambda ids: np.array(bidirectional_forward(model, mx.array(ids))), PROMPT, target, MASK, **how)
    agrees(found, known, len(target), 1e-4)  # measured on CPU: 2e-6


def test_one_token_is_one_forward() -> None:
    toy = Toy()
    found = score(toy, PROMPT, [6])
    assert found.log_likelihood == pytest.approx(token_logprobs(toy.logits, PROMPT, [6], (0,), toy.mask)[0], abs=1e-5)
    assert (found.method, found.forwards, found.rows, found.samples) == ("exact", 1, 1, 1)


def test_an_estimate_with_all_subsets_is_exact() -> None:
    toy = Toy()
    exact = score(toy, PROMPT, TARGET, method="exact")
    assert score(toy, PROMPT, TARGET, samples=31).log_likelihood == exact.log_likelihood
    assert score(toy, PROMPT, TARGET, samples=30).method == "estimate"


def test_without_a_prompt() -> None:
    toy = Toy()
    found = score(toy, [], TARGET, method="exact")
    assert found.log_likelihood == pytest.approx(
        np.mean(by_count(table(toy.logits, [], TARGET, toy.mask), 5)), abs=1e-4
    )


def test_a_mask_token_in_the_prompt_or_target_is_text() -> None:
    toy = Toy()
    prompt, target = [3, toy.mask, 7], [5, toy.mask, 9]
    found = score(toy, prompt, target, method="exact")
    known = table(toy.logits, prompt, target, toy.mask)
    assert found.log_likelihood == pytest.approx(np.mean(by_count(known, 3)), abs=1e-4)


def test_a_given_mask_token_beats_the_checkpoints() -> None:
    toy = Toy()
    known = table(toy.logits, PROMPT, TARGET, 4)
    found = score(toy, PROMPT, TARGET, method="exact", mask_token_id=4)
    assert found.log_likelihood == pytest.approx(np.mean(by_count(known, 5)), abs=1e-4)
    toy.diffusion_spec = dataclasses.replace(toy.spec, mask_token_id=None)
    assert score(toy, PROMPT, TARGET, method="exact", mask_token_id=4).log_likelihood == found.log_likelihood


def test_16_bit_logits_are_normalised_in_float32() -> None:
    toy = Toy(dtype=mx.bfloat16)

    def logits(ids: np.ndarray) -> np.ndarray:
        return np.array(toy.head(toy, toy.hidden(toy, mx.array(ids), [])).astype(mx.float32))

    found = exactly(toy, PROMPT, TARGET)
    known = table(logits, PROMPT, TARGET, toy.mask)
    worst = max(
        np.abs(row[mask] - list(own.values())).max()
        for mask, row, own in zip(found.subsets.masks, found.subsets.logprobs, known.values(), strict=True)
    )
    assert worst < 1e-5  # bfloat16 keeps 8 bits: a log-softmax in it is wrong by 1e-2


# What is computed.


@pytest.mark.parametrize("cfg", [0.0, 1.0])
def test_the_head_sees_masked_positions_in_bounded_pieces(cfg: float, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy()
    whole = score(toy, PROMPT, TARGET, method="exact", cfg_scale=cfg, batch_size=31)
    assert toy.heads == [80] * (2 if cfg else 1)  # 5 * 2**4 masked tokens, not 31 * 9 positions
    toy.heads.clear()
    monkeypatch.setattr(likelihood, "HEAD_VALUES", 3 * toy.vocab + 1)
    pieces = score(toy, PROMPT, TARGET, method="exact", cfg_scale=cfg, batch_size=31)
    assert max(toy.heads) == 3 and sum(toy.heads) == 80 * (2 if cfg else 1)
    assert pieces.log_likelihood == pytest.approx(whole.log_likelihood, rel=1e-6)


@pytest.mark.parametrize("cfg", [0.0, 1.0])
def test_cost(cfg: float) -> None:
    toy, rows = Toy(), 2 if cfg else 1
    exact = score(toy, PROMPT, TARGET, method="exact", cfg_scale=cfg, batch_size=10)
    assert (exact.forwards, exact.rows, exact.samples) == (4, 31 * rows, 31)
    reference = score(toy, PROMPT, TARGET, method="reference", cfg_scale=cfg, samples=24, batch_size=8)
    assert (reference.forwards, reference.rows, reference.samples) == (3, 24 * rows, 24)
    estimate = score(toy, PROMPT, TARGET * 8, cfg_scale=cfg, samples=20, batch_size=8)
    assert (estimate.forwards, estimate.samples) == (3, 20) and estimate.rows <= 20 * rows
    repeats = score(toy, PROMPT, TARGET, cfg_scale=cfg, samples=30)
    assert repeats.rows < 30 * rows and repeats.samples == 30  # the only set of 5 is drawn 6 times


@pytest.mark.parametrize("method", ["estimate", "reference"])
def test_seeds(method: Any) -> None:
    toy, target = Toy(), TARGET * 3

    def value(**how: Any) -> float:
        return score(toy, PROMPT, target, method=method, samples=16, **how).log_likelihood

    generator: Any = mx.random.state
    state = [np.array(part) for part in generator]
    assert value() == value() == value(seed=0) == value(seed=np.random.default_rng(0))
    assert value(seed=1) != value(seed=0)
    assert all(np.array_equal(np.array(part), old) for part, old in zip(generator, state, strict=True))
    random = np.random.default_rng(0)
    assert value(seed=random) != value(seed=random)
    if method == "estimate":
        assert value(batch_size=3) == pytest.approx(value(batch_size=16), rel=1e-6)


# Estimates.


@pytest.fixture(scope="module")
def estimates() -> dict[str, Any]:
    """400 estimates of one value, and the value."""
    toy = Toy()
    known = table(toy.logits, PROMPT, TARGET, toy.mask)
    scores = [score(toy, PROMPT, TARGET, samples=24, seed=seed) for seed in range(400)]
    return {
        "known": known,
        "exact": np.mean(by_count(known, 5)),
        "values": np.array([own.log_likelihood for own in scores]),
        "errors": np.array([own.standard_error for own in scores]),
        "scores": scores,
    }


def deviation(values: np.ndarray, expected: float) -> float:
    """Of the mean, in its standard errors."""
    return float((values.mean() - expected) / (values.std(ddof=1) / math.sqrt(len(values))))


def test_the_estimate_is_unbiased(estimates: dict[str, Any]) -> None:
    """A bias of 10 standard errors of the mean of 400 is found almost surely; that of LLaDA's rounding is larger."""
    values, exact = estimates["values"], estimates["exact"]
    assert abs(deviation(values, exact)) < FALSE_ALARM
    error = values.std() / math.sqrt(len(values))
    assert abs(expectation(by_count(estimates["known"], 5), 2) - exact) > 10 * error  # measured: 15


def test_the_standard_error_is_the_spread(estimates: dict[str, Any]) -> None:
    """The mean of the squared errors is the variance of the values; both are known to 7 % from 400 values, so that a
    right one misses 30 % once in 30000 seeds."""
    assert np.mean(estimates["errors"] ** 2) / estimates["values"].var(ddof=1) == pytest.approx(1, abs=0.3)
    own = estimates["scores"][3]
    assert own.log_likelihood == pytest.approx(np.mean(own.estimates))
    assert own.standard_error == pytest.approx(np.std(own.estimates, ddof=1) / math.sqrt(8))
    assert len(own.estimates) == 8


def test_less_variance_than_other_estimators(estimates: dict[str, Any]) -> None:
    """The same number of samples of the same value: with a probability t per token and a weight 1/t, and with
    independent exact counts. Both are drawn from the numpy model's table."""
    known, random = estimates["known"], np.random.default_rng(1)
    sums = {masked: sum(own.values()) for masked, own in known.items()} | {(): 0.0}

    def bernoulli() -> float:
        t = 1 - random.random()
        return sums[tuple(np.flatnonzero(random.random(5) < t).tolist())] / t

    def counted() -> float:
        size = int(random.integers(1, 6))
        return 5 / size * sums[tuple(sorted(random.permutation(5)[:size].tolist()))]

    ours = estimates["values"].var()
    others = {
        one.__name__: np.array([np.mean([one() for _ in range(24)]) for _ in range(400)])
        for one in (bernoulli, counted)
    }
    for values in others.values():
        assert abs(deviation(values, estimates["exact"])) < FALSE_ALARM
    assert others["bernoulli"].var() > 10 * ours  # measured: 24
    assert others["counted"].var() > 1.5 * ours  # measured: 2.7


@pytest.mark.parametrize(("length", "samples"), [(2, 1), (3, 5), (12, 7), (12, 40), (100, 8), (7, 100)])
def test_masks_are_balanced(length: int, samples: int) -> None:
    """Sizes evenly spaced over 1..L; no token is masked again before all are masked; over many draws all sizes and all
    tokens alike."""
    random = np.random.default_rng(2)
    draws = np.array([likelihood._balanced(random, length, samples) for _ in range(200)])
    assert draws.shape == (200, samples, length)
    sizes = draws.sum(axis=2)
    assert sizes.min() >= 1 and (np.diff(sizes, axis=1) >= 0).all()
    per_size = np.array([np.bincount(row, minlength=length + 1)[1:] for row in sizes])
    assert np.ptp(per_size, axis=1).max() <= 1
    share = samples / length % 1
    assert (
        np.abs(per_size.mean(axis=0) - samples / length).max()
        < FALSE_ALARM * math.sqrt(share * (1 - share) / 200) + 1e-9
    )
    for masks, row in zip(draws, sizes, strict=True):
        assert masks[np.cumsum(row) <= length].sum(axis=0).max(initial=0) <= 1
    per_token = draws.sum(axis=1)
    for token in range(length):
        assert abs(deviation(per_token[:, token], samples * (length + 1) / 2 / length)) < FALSE_ALARM


# LLaDA's estimator.


def reference_counts(first: int, length: int, batch: int) -> list[int]:
    """In exact arithmetic; ``round`` is half to even."""
    return [(round(Fraction(first) + Fraction(j * length, batch)) - 1) % length + 1 for j in range(batch)]


def expectation(counts: list[float], batch: int) -> float:
    """Of LLaDA's estimator: the bound by mask count, averaged over the first count and the rows."""
    length = len(counts)
    rows = [reference_counts(first, length, batch) for first in range(1, length + 1)]
    return float(np.mean([counts[size - 1] for sizes in rows for size in sizes]))


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 8, 16, 32])
def test_reference_counts(batch: int) -> None:
    for length in range(1, 25):
        for first in range(1, length + 1):
            found = likelihood._reference_counts(first, length, batch).tolist()
            assert found == reference_counts(first, length, batch)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 6, 16])
def test_reference_counts_equal_torchs(batch: int) -> None:
    torch = pytest.importorskip("torch")
    for length in range(1, 25):
        for first in range(1, length + 1):
            end = first + (batch - 1) * (length / batch)
            sizes = torch.round(torch.linspace(float(first), end, steps=batch)).long()
            assert likelihood._reference_counts(first, length, batch).tolist() == ((sizes - 1) % length + 1).tolist()


def test_the_reference_is_as_biased_as_llada_s(estimates: dict[str, Any]) -> None:
    toy, counts = Toy(), by_count(estimates["known"], 5)
    values = [
        score(toy, PROMPT, TARGET, method="reference", samples=6, batch_size=2, seed=seed).log_likelihood
        for seed in range(300)
    ]
    assert abs(deviation(np.array(values), expectation(counts, 2))) < FALSE_ALARM
    assert abs(expectation(counts, 1) - estimates["exact"]) < 1e-9  # one row is unbiased


def test_recorded_batches() -> None:
    """The mean over batches of the mean over rows of L / x times the masked tokens' log-probabilities."""
    toy, mask = Toy(), Toy.mask
    sets: list[list[tuple[int, ...]]] = [[(0,), (1, 3)], [(0, 1, 2, 3, 4), (4,)], [(2,), (2,)]]
    canvases = [
        [PROMPT + [mask if i in masked else t for i, t in enumerate(TARGET)] for masked in batch] for batch in sets
    ]
    for cfg in (0.0, 2.0):
        known = table(toy.logits, PROMPT, TARGET, mask, cfg=cfg)
        expected = [np.mean([5 / len(masked) * sum(known[masked].values()) for masked in batch]) for batch in sets]
        for given in (canvases, np.array(canvases), mx.array(canvases)):
            found = score(toy, PROMPT, TARGET, method="batches", batches=given, cfg_scale=cfg)
            assert found.estimates == pytest.approx(expected, rel=1e-5)
            assert found.log_likelihood == pytest.approx(np.mean(expected), rel=1e-5)
            assert found.standard_error == pytest.approx(np.std(expected, ddof=1) / math.sqrt(3), rel=1e-4)
            assert (found.forwards, found.samples) == (3, 6)
    assert score(toy, PROMPT, TARGET, method="batches", batches=canvases[:1]).standard_error is None


# LLaDA's numbers.

CASES = [
    *(
        (f"llada-{kind}-tiny", f"loglik_L{length}_cfg{cfg}")
        for kind in ("8b", "gqa")
        for length in (5, 6)
        for cfg in (0.0, 1.5)
    ),
    ("llada-moe-tiny", "loglik_L5_cfg0.0"),
    ("modernbert-tiny", "loglik_L5_cfg0.0"),
]
MODELS: dict[str, Any] = {}


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, goldens: Path) -> dict[str, Any]:
    folder, name = goldens / "llada_dream" / request.param[0], request.param[1]
    golden = json.loads((folder / "golden.json").read_text())
    own = next(own for own in golden["cases"] if own["name"] == name)
    if folder.name not in MODELS:
        MODELS[folder.name] = load(folder)
    return {**own, "model": MODELS[folder.name], "arrays": np.load(folder / "golden.npz")}


def test_no_likelihood_golden_is_left_out(goldens: Path) -> None:
    found = {
        (path.parent.name, own["name"])
        for path in (goldens / "llada_dream").glob("*/golden.json")
        for own in json.loads(path.read_text())["cases"]
        if own["target"] == "likelihood"
    }
    assert found == set(CASES)


def test_exact_equals_the_references(case: dict[str, Any]) -> None:
    cfg = case["settings"]["cfg_scale"]
    found = exactly(case["model"], case["prompt_ids"], case["answer_ids"], cfg_scale=cfg)
    subsets = found.subsets
    # Measured on CPU, without and with guidance, which multiplies the logits' own error by 4: 8e-5 and 2e-4.
    tolerance = 6e-4 if cfg else 2e-4
    assert len(case["subset_logprobs"]) == len(subsets.masks)
    for (masked, values), mask, row in zip(case["subset_logprobs"], subsets.masks, subsets.logprobs, strict=True):
        assert np.flatnonzero(mask).tolist() == masked
        assert row[mask] == pytest.approx([value for value in values if value is not None], abs=tolerance)
    assert found.log_likelihood == pytest.approx(case["exact_elbo"], abs=tolerance)
    assert subsets.by_mask_count == pytest.approx(case["exact_by_mask_count"], abs=tolerance)
    assert subsets.order_mixture == pytest.approx(case["order_mixture_loglik"], abs=tolerance)
    assert subsets.left_to_right == pytest.approx(case["left_to_right_loglik"], abs=tolerance)


def test_recorded_batches_give_the_references_value(case: dict[str, Any]) -> None:
    runs = [run for run in case["mc_runs"] if "batches_in_npz" in run]
    assert runs
    for run in runs:
        batches = case["arrays"][run["batches_in_npz"]]
        found = score(
            case["model"],
            case["prompt_ids"],
            case["answer_ids"],
            method="batches",
            batches=batches,
            cfg_scale=case["settings"]["cfg_scale"],
        )
        assert found.log_likelihood == pytest.approx(run["value"], rel=3e-6)  # measured: 8.4e-7
        assert (found.forwards, found.samples) == (run["forwards"], run["mc_num"])


def test_replayed_batches_give_the_references_value(case: dict[str, Any]) -> None:
    """The other runs recorded no batches, but torch's seed; where both are known, they agree."""
    torch = pytest.importorskip("torch")
    prompt, answer, mask = case["prompt_ids"], case["answer_ids"], case["settings"]["mask_id"]
    for run in case["mc_runs"]:
        torch.manual_seed(run["torch_seed"])
        batches = []
        for _ in range(run["mc_num"] // run["batch_size"]):
            first = int(torch.randint(1, len(answer) + 1, ()))
            sizes = reference_counts(first, len(answer), run["batch_size"])
            orders = [torch.randperm(len(answer)).tolist() for _ in sizes]
            rows = [
                [mask if place < size else token for place, token in zip(order, answer, strict=True)]
                for size, order in zip(sizes, orders, strict=True)
            ]
            batches.append([prompt + row for row in rows])
        if "batches_in_npz" in run:
            assert np.array_equal(batches, case["arrays"][run["batches_in_npz"]])
        cfg = case["settings"]["cfg_scale"]
        found = score(case["model"], prompt, answer, method="batches", batches=batches, cfg_scale=cfg)
        # Measured: 2.6e-6, of a single sample; 5e-7 of 128.
        assert found.log_likelihood == pytest.approx(run["value"], rel=1e-5 if run["mc_num"] == 1 else 3e-6)
        assert found.forwards == run["forwards"]


def test_expectation_of_the_references_estimator(case: dict[str, Any]) -> None:
    for run in case["mc_runs"]:
        found = expectation(case["exact_by_mask_count"], run["batch_size"])
        assert found == pytest.approx(run["expectation_of_estimator"], rel=1e-12)


def test_our_estimate_of_the_references_bound(case: dict[str, Any]) -> None:
    """Within 6 standard errors of the exact value, which are measured with 7 degrees of freedom: once in 1800 seeds
    not."""
    cfg = case["settings"]["cfg_scale"]
    found = score(case["model"], case["prompt_ids"], case["answer_ids"], samples=24, cfg_scale=cfg)
    assert found.method == "estimate" and found.standard_error
    assert abs(found.log_likelihood - case["exact_elbo"]) < 6 * found.standard_error


# Refusals.


def refused(match: str, model: Any = None, prompt: Any = PROMPT, target: Any = TARGET, **how: Any) -> None:
    with pytest.raises(DiffusionError, match=match) as error:
        score(Toy() if model is None else model, prompt, target, **how)
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text


def with_spec(**changes: Any) -> Toy:
    toy = Toy()
    toy.diffusion_spec = dataclasses.replace(toy.spec, **changes)
    return toy


def test_models_that_cannot_be_scored() -> None:
    refused("no diffusion spec", tiny_model("gpt2", ar=True))
    refused("family toy is block-causal and cannot be scored: its bound", with_spec(attention="block_causal"))
    refused("does not say which token is its mask: give mask_token_id", with_spec(mask_token_id=None))
    refused("within the embedding of 11 rows .* got 11 from the caller", mask_token_id=11)
    refused("got True from the caller", mask_token_id=True)


def test_targets_that_cannot_be_scored() -> None:
    refused("target is empty", target=[])
    refused("target has token id 11, outside the vocabulary of 11", target=[1, 11])
    refused("target has token id -1, outside", target=[-1])
    refused("prompt has token id 48, outside the vocabulary of 48", tiny_model("gpt2"), [VOCAB], [1])
    refused("target must be a list of token ids, got 'text'", target="text")
    refused("target must be a list of token ids, got \\[1.5\\]", target=[1.5])
    refused("prompt must be a list of token ids, got \\[\\[1\\], \\[2, 3\\]\\]", prompt=[[1], [2, 3]])
    refused("prompt must be a list of token ids, got None", prompt=None)
    refused("shifted logits needs a prompt: nothing predicts position 0", Toy("shifted"), [])
    refused("prompt of 4 and a target of 61 tokens exceed the model's context of 64", target=[1] * (CONTEXT - 3))
    assert score(Toy(), PROMPT, [1] * (CONTEXT - 4), samples=2).target_tokens == 60  # which fits


def test_arguments_out_of_range() -> None:
    refused("method must be estimate, exact, batches or reference, got 'mc'", method="mc")
    refused("'exact' .* at most 12 tokens, got 13: use method 'estimate'", target=[1] * 13, method="exact")
    for value in (0, -1, 1.5, True, None):
        refused(f"samples must be a positive integer, got {value}", samples=value)
    refused("batch_size must be a positive integer, got 0", batch_size=0)
    for scale in (-0.5, math.inf, math.nan, "1", True):
        refused("cfg_scale must be a number of 0 or more, got", cfg_scale=scale)
    for seed in (-1, 1.0, None, True):
        refused("seed must be an integer of 0 or more or a numpy Generator, got", target=[1] * 9, seed=seed)
    refused("multiple of batch_size in method 'reference', got 10 and 4", method="reference", samples=10, batch_size=4)
    refused("multiple of batch_size in method 'reference', got 4 and 8", method="reference", samples=4, batch_size=8)


def test_batches_that_are_none_of_the_target() -> None:
    refused("method 'batches' needs batches", method="batches")
    refused("batches are for method 'batches'; method 'estimate' makes its own", batches=[[PROMPT + TARGET]])
    masked = PROMPT + [10] + TARGET[1:]

    def batches(match: str, given: Any, **how: Any) -> None:
        refused(match, method="batches", batches=given, **how)

    batches("batches must be token ids \\[n, b, 9\\] of prompt and target, got shape \\[1, 9\\]", [masked])
    batches("got shape \\[1, 1, 8\\]", [[masked[:-1]]])
    batches("got shape \\[0, 2, 9\\]", np.zeros((0, 2, 9), dtype=int))
    batches("batches must be token ids .* got 'text'", "text")
    batches("batches must be token ids", [[[0.5] * 9]])
    batches("position 2 of \\[0\\]\\[1\\] is 10 instead of 7", [[masked, [3, 1, 10, 0, 10, 2, 9, 2, 8]]])
    batches("position 8 of \\[1\\]\\[0\\] is 1 instead of 8", [[masked], [masked[:-1] + [1]]])
    batches("at least one target token per canvas; \\[0\\]\\[1\\] masks none", [[masked, PROMPT + TARGET]])
    batches("target holds the mask token 10", [[masked]], target=[10] + TARGET[1:])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite(value: float) -> None:
    toy = Toy()
    toy.out[:, 0] = value
    refused("logits that are not finite", toy)


def test_an_impossible_token_has_no_likelihood() -> None:
    """A head may rule tokens out, as MDLM does with the mask token."""
    toy = Toy()
    head = toy.head
    ruled_out = mx.where(mx.arange(toy.vocab) == 9, -mx.inf, 0.0)
    toy.diffusion_family = dataclasses.replace(
        toy.diffusion_family, head=lambda model, states: head(model, states) + ruled_out
    )
    assert score(toy, PROMPT, TARGET, method="exact").log_likelihood == -math.inf
    found = score(toy, PROMPT, TARGET, samples=16)
    assert (found.log_likelihood, found.standard_error) == (-math.inf, None)
    assert score(toy, PROMPT, [5, 2], method="exact").log_likelihood > -math.inf
