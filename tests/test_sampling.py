"""Sampling: each step against its definition, the chain against the distribution it should draw from."""

from collections import Counter, deque

import numpy as np
import pytest

from localllm.errors import LocalllmError, UsageError
from localllm.generation.sampling import (
    PENALTY_WINDOW,
    Sampler,
    SamplingOptions,
    draw,
    min_p,
    penalties,
    softmax,
    temperature,
    top_k,
    top_p,
    typical,
)

EVERYTHING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # every step off


def logits_of(probabilities: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Candidates with these probabilities, most likely first; ids count from 10."""
    return np.arange(10, 10 + len(probabilities)), np.log(np.array(probabilities, np.float32))


def random_logits(vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 7, 50, 640, 32003])
@pytest.mark.parametrize("k", [1, 3, 40, 1000, 0])
def test_top_k_keeps_the_largest_in_order(vocab: int, k: int):
    logits = random_logits(vocab)
    ids, kept = top_k(logits, k)
    expected = np.argsort(-logits, kind="stable")[: k or None]
    assert ids.tolist() == expected.tolist()
    assert np.array_equal(kept, logits[expected])


def test_top_k_of_equals_takes_the_lowest_ids():
    logits = np.zeros(1000, np.float32)
    logits[777] = 1
    assert top_k(logits, 4)[0].tolist() == [777, 0, 1, 2]


def test_top_k_with_impossible_tokens():
    logits = np.full(1000, -np.inf, np.float32)
    logits[[5, 900]] = 1, 2
    ids, kept = top_k(logits, 3)
    assert ids[:2].tolist() == [900, 5]
    assert draw(ids, kept, 0.999999) == 5


@pytest.mark.parametrize(("p", "expected"), [(0.4, [10]), (0.5, [10]), (0.55, [10, 11]), (0.9, [10, 11, 12]), (1, 4)])
def test_top_p_reaches_the_probability(p: float, expected):
    ids, logits = top_p(*logits_of([0.5001, 0.3, 0.15, 0.0499]), p)
    assert len(ids) == len(logits)
    assert ids.tolist() == (list(range(10, 14)) if expected == 4 else expected)


@pytest.mark.parametrize(("p", "count"), [(0.0, 4), (0.09, 4), (0.25, 3), (0.61, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_most_likely(p: float, count: int):
    assert len(min_p(*logits_of([0.5, 0.3, 0.15, 0.05]), p)[0]) == count


def test_typical_prefers_expected_surprise():
    # Surprises 0.51, 2.30, 2.30, 2.30, 2.30; expected 1.23: the first is 0.72 away, the others 1.07.
    ids, _ = typical(*logits_of([0.6, 0.1, 0.1, 0.1, 0.1]), 0.5)
    assert ids.tolist() == [10]
    # Surprises 1.05, 1.2, ...; a flat rest has more probability and is more typical than the head.
    ids, _ = typical(*logits_of([0.4] + [0.01] * 60), 0.5)
    assert 10 not in ids.tolist()
    assert len(ids) == 50 or len(ids) == 51
    assert len(typical(*logits_of([0.6, 0.4]), 1.0)[0]) == 2


def test_temperature_sharpens_and_flattens():
    ids, logits = logits_of([0.8, 0.2])
    assert softmax(temperature(ids, logits, 0.5)[1]) == pytest.approx([0.64 / 0.68, 0.04 / 0.68], rel=1e-5)
    assert softmax(temperature(ids, logits, 2.0)[1]) == pytest.approx([2 / 3, 1 / 3], rel=1e-5)
    assert np.isfinite(softmax(temperature(ids, logits, 1e-30)[1])).all()


def test_draw_covers_the_whole_interval():
    ids, logits = logits_of([0.5, 0.3, 0.2])
    assert [draw(ids, logits, u) for u in (0.0, 0.49, 0.51, 0.79, 0.81, np.nextafter(1.0, 0))] == [
        10,
        10,
        11,
        11,
        12,
        12,
    ]


def test_penalties_follow_llama_cpp():
    logits = np.array([2.0, -2.0, 3.0, 4.0], np.float32)
    options = SamplingOptions(repeat_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    changed = penalties(logits, deque([0, 0, 0, 1]), options)
    assert changed.tolist() == [2 / 2 - 3 * 0.25 - 0.5, -2 * 2 - 0.25 - 0.5, 3.0, 4.0]
    assert logits.tolist() == [2.0, -2.0, 3.0, 4.0]
    assert penalties(logits, deque([0]), SamplingOptions()) is logits


def test_penalties_forget():
    sampler = Sampler(SamplingOptions(temperature=0, repeat_penalty=10.0), 4)
    logits = np.array([1.0, 2.0, 0.0, 0.0], np.float32)
    sampler.accept(1)
    assert sampler.sample(logits) == 0
    for _ in range(PENALTY_WINDOW):
        sampler.accept(2)
    assert sampler.sample(logits) == 1


@pytest.mark.parametrize("t", [0.0, -1.0])
def test_greedy_takes_the_lowest_of_the_best(t: float):
    logits = random_logits(500)
    logits[[77, 33, 400]] = 50
    assert Sampler(SamplingOptions(temperature=t), 500).sample(logits) == 33


def test_padding_is_never_chosen():
    logits = np.zeros(100, np.float32)
    logits[90:] = 100
    sampler = Sampler(SamplingOptions(seed=1), 90)
    assert all(sampler.sample(logits) < 90 for _ in range(50))
    assert Sampler(SamplingOptions(temperature=0), 90).sample(logits) == 0


def test_a_seed_reproduces():
    logits = random_logits(5000)

    def drawn(seed: int | None) -> tuple[int, list[int]]:
        sampler = Sampler(SamplingOptions(temperature=2.0, seed=seed), 5000)
        return sampler.seed, [sampler.sample(logits) for _ in range(50)]

    assert drawn(7) == drawn(7)
    assert drawn(7)[1] != drawn(8)[1]
    seed, tokens = drawn(None)
    assert drawn(seed) == (seed, tokens)
    assert drawn(None)[0] != seed


@pytest.mark.parametrize(
    "options", [EVERYTHING, {**EVERYTHING, "temperature": 0.7}, {}, {"typical": 0.8, "top_k": 12}], ids=str
)
def test_the_chain_draws_from_its_distribution(options: dict):
    chosen = SamplingOptions(seed=3, **options)
    logits = random_logits(30, seed=5)
    ids, kept = top_k(logits, chosen.top_k)
    for step, value in ((typical, chosen.typical), (top_p, chosen.top_p), (min_p, chosen.min_p)):
        ids, kept = step(ids, kept, value)
    expected = dict(zip(ids.tolist(), softmax(kept.astype(float) / chosen.temperature), strict=True))
    sampler, draws = Sampler(chosen, 30), 20000
    counts = Counter(sampler.sample(logits) for _ in range(draws))
    assert counts.keys() <= expected.keys()
    for token, probability in expected.items():
        deviation = (probability * (1 - probability) / draws) ** 0.5
        assert abs(counts[token] / draws - probability) < 5 * deviation + 1e-4


@pytest.mark.parametrize("t", [0.0, 0.8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers(t: float, bad: float):
    logits = random_logits(1000)
    logits[123] = bad
    with pytest.raises(LocalllmError, match="not numbers"):
        Sampler(SamplingOptions(temperature=t), 1000).sample(logits)
    with pytest.raises(LocalllmError, match="not numbers"):
        Sampler(SamplingOptions(temperature=t), 1000).sample(np.full(1000, -np.inf, np.float32))


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
    ],
    ids=str,
)
def test_values_that_make_no_sense(wrong: dict):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingOptions(**wrong)
