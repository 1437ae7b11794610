"""Test the sampler: each step against its definition, the chain against the distribution of its draws."""

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from localllm.errors import LocalllmError, UsageError
from localllm.generation.sampling.candidates import Candidates
from localllm.generation.sampling.options import LETTERS, SamplingOptions
from localllm.generation.sampling.sampler import Sampler
from localllm.generation.sampling.steps import (
    draw,
    hash_uniform,
    keep_likeliest,
    min_p,
    penalties,
    temperature,
    top_k,
    top_p,
    typical,
)

EVERYTHING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # every step off


def rank_candidates(probabilities: list[float]) -> Candidates:
    """Return candidates with these probabilities, most likely first; ids count from 10."""
    return Candidates(np.arange(10, 10 + len(probabilities)), np.log(np.array(probabilities, np.float32)), ranked=True)


def candidates_of(logits: np.ndarray) -> Candidates:
    return Candidates(np.arange(len(logits)), logits)


def random_logits(vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 7, 50, 640, 32003])
@pytest.mark.parametrize("k", [1, 3, 40, 1000, 0])
def test_top_k_keeps_the_largest_logits_in_order(vocab: int, k: int):
    logits = random_logits(vocab)
    kept = top_k(candidates_of(logits), k)
    expected = np.argsort(-logits, kind="stable")[: k or None]
    assert kept.ids.tolist() == expected.tolist()
    assert np.array_equal(kept.logits, logits[expected])
    assert kept.ranked
    assert top_k(kept, 2).ids.tolist() == expected[:2].tolist()


def test_top_k_keeps_the_lowest_ids_of_equal_logits():
    logits = np.zeros(1000, np.float32)
    logits[777] = 1
    assert top_k(candidates_of(logits), 4).ids.tolist() == [777, 0, 1, 2]


def test_top_k_drops_impossible_tokens():
    logits = np.full(1000, -np.inf, np.float32)
    logits[[5, 900]] = 1, 2
    kept = top_k(candidates_of(logits), 3)
    assert kept.ids[:2].tolist() == [900, 5]
    assert {draw(kept, key) for key in range(50)} == {900, 5}


@pytest.mark.parametrize(("p", "expected"), [(0.4, [10]), (0.5, [10]), (0.55, [10, 11]), (0.9, [10, 11, 12]), (1, 4)])
def test_top_p_keeps_tokens_until_the_probability_is_reached(p: float, expected):
    kept = top_p(rank_candidates([0.5001, 0.3, 0.15, 0.0499]), p)
    assert len(kept.ids) == len(kept.logits)
    assert kept.ids.tolist() == (list(range(10, 14)) if expected == 4 else expected)


@pytest.mark.parametrize(("p", "count"), [(0.0, 4), (0.09, 4), (0.25, 3), (0.61, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_most_likely_token(p: float, count: int):
    assert len(min_p(rank_candidates([0.5, 0.3, 0.15, 0.05]), p).ids) == count


def test_typical_keeps_tokens_of_expected_surprise():
    # Surprises 0.51, 2.30, 2.30, 2.30, 2.30; expected 1.23: the first is 0.72 away, the others 1.07.
    ids = typical(rank_candidates([0.6, 0.1, 0.1, 0.1, 0.1]), 0.5).ids
    assert ids.tolist() == [10]
    # Surprises 1.05, 1.2, ...; a flat rest has more probability and is more typical than the head.
    ids = typical(rank_candidates([0.4] + [0.01] * 60), 0.5).ids
    assert 10 not in ids.tolist()
    assert len(ids) == 50 or len(ids) == 51
    assert len(typical(rank_candidates([0.6, 0.4]), 1.0).ids) == 2


def test_temperature_sharpens_or_flattens_the_distribution():
    candidates = rank_candidates([0.8, 0.2])
    assert temperature(candidates, 0.5).compute_probabilities() == pytest.approx([0.64 / 0.68, 0.04 / 0.68], rel=1e-5)
    assert temperature(candidates, 2.0).compute_probabilities() == pytest.approx([2 / 3, 1 / 3], rel=1e-5)
    assert np.isfinite(temperature(candidates, 1e-30).compute_probabilities()).all()


def test_draws_follow_the_probabilities():
    """Use a chi-square test, whose statistic exceeds 27.9 once in a thousand runs with 9 degrees of freedom."""
    probabilities = np.array([0.4, 0.2, 0.1, 0.1, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01])
    candidates = Candidates(np.arange(10) * 4999, np.log(probabilities))
    keys = random.Random(1)
    counts = Counter(draw(candidates, keys.getrandbits(64)) // 4999 for _ in range(20000))
    expected = 20000 * probabilities
    assert sum((counts[token] - expected[token]) ** 2 / expected[token] for token in range(10)) < 27.9


def test_draws_of_similar_distributions_mostly_agree():
    """Expect at least (1 - d) / (1 + d) equal draws, d being the total variation (Daliri et al.)."""
    one, other = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.25, 0.35])
    pair = [Candidates(np.array([10, 11, 12]), np.log(p)) for p in (one, other)]
    agree = np.mean([draw(pair[0], key) == draw(pair[1], key) for key in range(4000)])
    distance = np.abs(one - other).sum() / 2
    assert agree > (1 - distance) / (1 + distance) - 0.02


def test_gumbel_noise_is_uniform_and_uncorrelated():
    for key in (0, 1, 2**64 - 1):
        numbers = hash_uniform(np.arange(100000), key)
        assert numbers.min() > 0 and numbers.max() < 1
        counts, _ = np.histogram(numbers, 20, (0, 1))
        assert np.abs(counts - 5000).max() < 350, "5 standard deviations"
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert (hash_uniform(np.arange(100), 5) != hash_uniform(np.arange(100), 6)).all()


def test_penalties_are_computed_as_in_llama_cpp():
    candidates = candidates_of(np.array([2.0, -2.0, 3.0, 4.0], np.float32))
    changed = penalties(candidates, np.array([0, 0, 0, 1]), repeat=2.0, presence=0.5, frequency=0.25)
    assert changed.logits.tolist() == [2 / 2 - 3 * 0.25 - 0.5, -2 * 2 - 0.25 - 0.5, 3.0, 4.0]
    assert candidates.logits.tolist() == [2.0, -2.0, 3.0, 4.0]
    assert penalties(candidates, np.array([], int), repeat=2.0) is candidates


@pytest.mark.parametrize(
    "candidates", [rank_candidates([0.4, 0.3, 0.2, 0.1]), candidates_of(random_logits(13))], ids=["few", "all"]
)
def test_penalties_are_the_same_anywhere_in_the_chain(candidates: Candidates):
    changed = penalties(candidates, np.array([10, 12, 5000]), presence=5.0)
    old = dict(zip(candidates.ids.tolist(), candidates.logits.tolist(), strict=True))
    expected = {token: logit - 5 * (token in (10, 12)) for token, logit in old.items()}
    assert dict(zip(changed.ids.tolist(), changed.logits.tolist(), strict=True)) == pytest.approx(expected)
    assert changed.ranked == candidates.ranked
    if changed.ranked:
        assert changed.ids.tolist() == [11, 13, 10, 12]


def test_filters_agree_on_ranked_and_unranked_candidates():
    unranked = candidates_of(random_logits(300))
    for step, value in ((typical, 0.7), (top_p, 0.7), (min_p, 0.1), (top_k, 7)):
        before, after = step(unranked, value), step(unranked.rank(), value)
        assert sorted(before.ids.tolist()) == sorted(after.ids.tolist())
    assert keep_likeliest(unranked).ids.tolist() == keep_likeliest(unranked.rank()).ids.tolist()


def test_the_order_of_the_chain_is_configurable():
    logits = random_logits(2000)
    first = Sampler(SamplingOptions(temperature=3.0), 2000).compute_distribution(logits)[0]
    hot_first = SamplingOptions(temperature=3.0, samplers="temperature;top_k;top_p;min_p")
    second = Sampler(hot_first, 2000).compute_distribution(logits)[0]
    assert len(second) > len(first), "a flatter distribution has a larger nucleus"
    assert set(first.tolist()) < set(second.tolist())


def test_penalties_forget_tokens_beyond_repeat_last_n():
    sampler = Sampler(SamplingOptions(temperature=0, repeat_penalty=10.0), 4)
    logits = np.array([1.0, 2.0, 0.0, 0.0], np.float32)
    sampler.accept(1)
    assert sampler.sample(logits) == 0
    for _ in range(64):
        sampler.accept(2)
    assert sampler.sample(logits) == 1


@pytest.mark.parametrize("t", [0.0, -1.0])
def test_greedy_sampling_takes_the_lowest_of_equal_ids(t: float):
    logits = random_logits(500)
    logits[[77, 33, 400]] = 50
    assert Sampler(SamplingOptions(temperature=t), 500).sample(logits) == 33


def test_padding_ids_are_never_sampled():
    logits = np.zeros(100, np.float32)
    logits[90:] = 100
    sampler = Sampler(SamplingOptions(seed=1), 90)
    assert all(sampler.sample(logits) < 90 for _ in range(50))
    assert Sampler(SamplingOptions(temperature=0), 90).sample(logits) == 0


def test_a_seed_reproduces_its_tokens():
    logits = random_logits(5000)

    def drawn(seed: int | None) -> tuple[int, list[int]]:
        sampler = Sampler(SamplingOptions(temperature=2.0, seed=seed), 5000)
        return sampler.seed, [sampler.sample(logits) for _ in range(50)]

    assert drawn(7) == drawn(7)
    assert drawn(7)[1] != drawn(8)[1]
    seed, tokens = drawn(None)
    assert drawn(seed) == (seed, tokens)
    assert drawn(None)[0] != seed


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [EVERYTHING, {**EVERYTHING, "temperature": 0.7}, {}, {"typical": 0.8, "top_k": 12}], ids=str
)
def test_the_chain_draws_from_its_distribution(options: dict):
    options = SamplingOptions(seed=3, **options)
    chosen = options.complete
    logits = random_logits(30, seed=5)
    kept = top_k(candidates_of(logits), chosen.top_k)
    for step, value in ((typical, chosen.typical), (top_p, chosen.top_p), (min_p, chosen.min_p)):
        kept = step(kept, value)
    weights = np.exp(kept.logits.astype(float) / chosen.temperature)
    expected = dict(zip(kept.ids.tolist(), weights / weights.sum(), strict=True))
    sampler, draws = Sampler(options, 30), 20000
    counts = Counter(sampler.sample(logits) for _ in range(draws))
    assert counts.keys() <= expected.keys()
    for token, probability in expected.items():
        deviation = (probability * (1 - probability) / draws) ** 0.5
        assert abs(counts[token] / draws - probability) < 5 * deviation + 1e-4


RECORDED = [  # when draws became those of Gumbel noise; greedy ones before the sampler became a chain
    ({}, [3447, 565, 3067, 3082, 2822, 3067, 4472, 3048, 168, 3577, 2395, 3067]),
    ({"temperature": 0}, [3118, 565, 3067, 3118, 565, 3067, 3118, 565, 3067, 3118, 565, 3067]),
    ({**EVERYTHING, "temperature": 1.5}, [3447, 1757, 3067, 843, 1631, 2098, 478, 2905, 3814, 3577, 1322, 41]),
    ({"top_k": 3}, [3447, 565, 3067, 3082, 565, 3067, 3118, 565, 168, 3118, 2395, 3067]),
    ({"typical": 0.5, "temperature": 1.2}, [1054, 2234, 168, 3082, 2822, 944, 4472, 3048, 168, 3577, 4113, 1040]),
    ({"top_p": 0.6, "temperature": 2.0}, [3447, 565, 3067, 3082, 2822, 3067, 4472, 3048, 168, 3118, 2395, 144]),
    ({"min_p": 0.3, "top_k": 0}, [3447, 565, 3067, 3082, 565, 3067, 3118, 565, 168, 3118, 2395, 3067]),
    (
        {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        [3447, 565, 3067, 3082, 2822, 3812, 4472, 3048, 168, 3577, 2395, 144],
    ),
    ({"temperature": 0, "repeat_penalty": 3.0}, [3118, 565, 3067, 3447, 2395, 168, 3082, 1633, 2724, 1054, 732, 2130]),
]


@pytest.mark.parametrize(("options", "tokens"), RECORDED, ids=str)
def test_a_seed_still_gives_the_recorded_tokens(options: dict, tokens: list[int]):
    sampler = Sampler(SamplingOptions(seed=42, **options), 5000)
    for number, token in enumerate(tokens):
        logits = np.random.RandomState(number % 3).standard_normal(5000).astype(np.float32) * 2
        assert sampler.sample(logits) == token
        sampler.accept(token)


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"typical": 0.8, "temperature": 1.7}], ids=str)
def test_samples_are_tokens_of_the_computed_distribution(options: dict):
    logits = random_logits(3000)
    sampler, twin = (Sampler(SamplingOptions(seed=5, **options), 2990) for _ in range(2))
    ids, probabilities = sampler.compute_distribution(logits)
    assert (ids.dtype, probabilities.dtype, probabilities.sum()) == (np.int64, np.float64, pytest.approx(1))
    assert sampler.sample(logits) == twin.sample(logits), "to look changes nothing"
    assert {sampler.sample(logits) for _ in range(50)} <= set(ids.tolist())
    if options.get("temperature") == 0:
        assert (ids.tolist(), probabilities.tolist()) == ([int(np.argmax(logits[:2990]))], [1.0])


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"temperature": 0}, {"repeat_penalty": 1.2}], ids=str)
def test_only_allowed_tokens_are_sampled(options: dict):
    logits, allowed = random_logits(1000), np.zeros(1000, bool)
    allowed[[3, 500, 800, 999]] = True
    sampler = Sampler(SamplingOptions(seed=1, **options), 990)
    sampler.accept(500)
    sampler.accept(4)
    drawn = {sampler.sample(logits, allowed) for _ in range(200)}
    assert drawn <= {3, 500, 800}
    assert len(drawn) > 1 or options != EVERYTHING
    with pytest.raises(LocalllmError, match="allows no token"):
        sampler.sample(logits, np.arange(1000) >= 990)


def test_a_mask_that_allows_everything_changes_nothing():
    logits = random_logits(1000)
    plain, masked = (Sampler(SamplingOptions(seed=1, repeat_penalty=1.5), 1000) for _ in range(2))
    for _ in range(20):
        token = plain.sample(logits)
        assert masked.sample(logits, np.ones(1000, bool)) == token
        plain.accept(token)
        masked.accept(token)


def test_a_copied_sampler_draws_the_same_tokens_independently():
    logits, options = random_logits(1000), SamplingOptions(seed=1, temperature=2.0, frequency_penalty=1.0)

    def go_on(sampler: Sampler) -> list[int]:
        tokens = []
        for _ in range(20):
            tokens.append(sampler.sample(logits))
            sampler.accept(tokens[-1])
        return tokens

    sampler, alone = Sampler(options, 1000), Sampler(options, 1000)
    assert go_on(sampler) == go_on(alone)
    twin = sampler.copy()
    expected = go_on(alone)
    assert go_on(twin) == expected
    assert go_on(sampler) == expected
    assert twin.seed == sampler.seed


@pytest.mark.parametrize("t", [0.0, 0.8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_raise(t: float, bad: float):
    logits = random_logits(1000)
    logits[123] = bad
    with pytest.raises(LocalllmError, match="not finite"):
        Sampler(SamplingOptions(temperature=t), 1000).sample(logits)
    with pytest.raises(LocalllmError, match="not finite"):
        Sampler(SamplingOptions(temperature=t), 1000).sample(np.full(1000, -np.inf, np.float32))


ALL_ON = {
    "typical": 0.9,
    "presence_penalty": 1.0,
    "top_n_sigma": 2.0,
    "xtc_probability": 1.0,
    "dynatemp_range": 0.5,
    "adaptive_target": 0.5,
    "dry_multiplier": 1.0,
    "dry_allowed_length": 1,
    "dry_sequence_breakers": (),
}


@pytest.mark.parametrize(
    "options", [*({"samplers": (first,)} for first in LETTERS), {"mirostat": 1}, {"mirostat": 2}], ids=str
)
@pytest.mark.parametrize("count", [1, 100])
def test_no_step_hides_a_nan(options: dict, count: int):
    logits = random_logits(6500)
    logits[-count:] = np.nan
    speller = SimpleNamespace(token_bytes=lambda token, special: b"a", end_ids=frozenset([3]), eos_id=3)
    sampler = Sampler(SamplingOptions(**ALL_ON, **options), 6500, speller)
    sampler.read([5, 6, 5])
    with pytest.raises(LocalllmError, match="not finite"):
        sampler.sample(logits)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 2},
        {"typical": 0},
        {"repeat_penalty": 0},
        {"presence_penalty": float("inf")},
        {"seed": -1},
        {"seed": "x"},
        {"top_k": True},
        {"temperature": 10**400},
        {"temperature": 1j},
        {"mirostat": 3},
        {"mirostat": 0.5},
        {"repeat_last_n": -2},
        {"dry_base": 0.5},
        {"dry_multiplier": -1},
        {"dry_sequence_breakers": [""]},
        {"dry_sequence_breakers": 5},
        {"adaptive_target": 1.5},
        {"adaptive_decay": 1.0},
        {"logit_bias": {-1: 2.0}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": [1]},
        {"ignore_eos": 1},
        {"samplers": "top_k;best"},
        {"samplers": 5},
    ],
    ids=str,
)
def test_invalid_sampling_options_are_refused(wrong: dict):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingOptions(**wrong)
