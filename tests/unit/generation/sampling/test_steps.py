"""Test each sampler step against a plain definition, and all of them with random options, forks, drafts and files."""

import json
import math
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from tiny_model import write_tiny_model

import localllm
from localllm.errors import LocalllmError, UsageError
from localllm.generation.sampling import steps
from localllm.generation.sampling.candidates import (
    MAX_MU,
    Candidates,
    SamplerState,
    SequenceBreakers,
    TokenHistory,
    update_mu,
)
from localllm.generation.sampling.options import DEFAULTS, LETTERS, OPTIONS, SamplingOptions, parse_sampler_letters
from localllm.generation.sampling.sampler import Sampler, list_active_steps, read_recommended
from localllm.generation.sampling.steps import STEPS
from localllm.generation.speculation.acceptance import StepCostModel

PLENTY = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
PIECES = [b"a", b"b", b"ab", b"c", b"\n", b'x"', b"ba", b"d"]
SPEAKER = SimpleNamespace(
    token_bytes=lambda token, special: PIECES[token % len(PIECES)], end_ids=frozenset([3]), eos_id=3
)

# Steps that are on together, and those that learn from what they drew.
MANY = {
    "repeat_penalty": 1.1,
    "dry_multiplier": 0.5,
    "dry_penalty_last_n": -1,
    "top_n_sigma": 2.0,
    "typical": 0.95,
    "xtc_probability": 0.5,
    "dynatemp_range": 0.3,
    "adaptive_target": 0.4,
    "logit_bias": {5: 1.0, 7: -math.inf},
}
LEARNING = [{"mirostat": 1}, {"mirostat": 2, "temperature": 1.2}, MANY, {"adaptive_target": 0.3, "top_k": 5}]


def candidates_of(logits: np.ndarray) -> Candidates:
    return Candidates(np.arange(len(logits)), logits)


def random_logits(vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).normal(0, 3, vocab).astype(np.float32)


@some.composite
def rows(draw) -> np.ndarray:
    """Draw logits float32 [1 to 80]: equal, very different and impossible ones, but not all impossible."""
    count, spread = draw(some.integers(1, 80)), draw(some.sampled_from([0.0, 1e-3, 1.0, 10.0, 1e30]))
    random = np.random.RandomState(draw(some.integers(0, 999)))
    row = (random.randint(-40, 40, count) / 8 * spread).astype(np.float32)
    row[random.rand(count) < draw(some.sampled_from([0.0, 0.5]))] = -np.inf
    row[0] = 0
    return row


# Each step by itself.


def test_top_n_sigma_keeps_all_logits_whose_squares_overflow():
    kept = steps.top_n_sigma(candidates_of(np.array([1e300, 0.0, 1.0])), 1.0)
    assert len(kept.ids) == 3


@PLENTY
@given(rows(), some.floats(0.01, 5))
def test_top_n_sigma_keeps_logits_near_the_best(row: np.ndarray, n: float):
    possible = row[np.isfinite(row)].astype(float)
    kept = steps.top_n_sigma(candidates_of(row), n)
    assert kept.logits.tolist() == [x for x in row.tolist() if x >= possible.max() - n * possible.std()]


@PLENTY
@given(rows(), some.floats(0, 1))
def test_xtc_keeps_the_last_of_the_top_choices(row: np.ndarray, threshold: float):
    candidates = candidates_of(row)
    p = candidates.compute_probabilities()
    above = sorted(np.flatnonzero(p >= max(threshold, 1e-300)), key=lambda i: (-row[i], i))
    kept = set(range(len(row))) - set(above[:-1])
    assert set(steps.xtc(candidates, 1.0, threshold, chance=0.9).ids.tolist()) == kept
    assert steps.xtc(candidates, 0.5, threshold, chance=0.51) is candidates
    ranked = candidates.rank()
    assert len(steps.xtc(ranked, 1.0, threshold, chance=0.0).ids) == len(kept)


@PLENTY
@given(
    some.lists(some.integers(0, 4), min_size=1, max_size=25),
    some.integers(0, 4),
    some.sampled_from([1.0, 1.1, 1.75, 1e300]),
    some.sampled_from([(), ("\n",), ("ab",), ("bc", "\n")]),
)
def test_dry_penalizes_the_longest_repetition(text: list[int], allowed: int, base: float, texts: tuple[str, ...]):
    breakers = SequenceBreakers(texts, SPEAKER)
    for token in text:
        breakers.push(token)
    # Whole tokens since the last place where a breaker ends.
    texts_so_far = [b"".join(PIECES[token] for token in text[:end]) for end in range(len(text) + 1)]
    ends = [
        end
        for end in range(1, len(text) + 1)
        for breaker in texts
        if texts_so_far[end].rfind(breaker.encode()) + len(breaker) > len(texts_so_far[end - 1])
        and breaker.encode() in texts_so_far[end]
    ]
    since = len(text) - max(ends, default=0)
    assert breakers.since == since
    candidates = candidates_of(np.zeros(8, np.float32))
    changed = steps.dry(candidates, np.array(text), breakers, 0.5, base, allowed).logits
    for token in range(8):
        lengths = [
            n
            for n in range(allowed, since + 1)
            for end in range(max(n, 1), len(text))
            if text[end] == token and text[end - n : end] == text[len(text) - n :]
        ]
        exempt = len(text) <= allowed or any(breaker.encode() in PIECES[token] for breaker in texts)
        most = math.log(np.finfo(np.float32).max) / math.log(base) if base > 1 else 0
        loss = 0.5 * base ** min(max(lengths) - allowed, int(most)) if lengths and not exempt else 0.0
        assert changed[token] == pytest.approx(-loss)


@pytest.mark.parametrize(
    ("texts", "tokens", "since"),
    [
        (("ab",), [3, 0, 1], 0),  # c, a, b: the breaker is in two tokens
        (("ab",), [0, 1, 3, 3], 2),
        (("ab",), [0, 3, 1], 3),  # a, c, b: it is not there
        (("bcb",), [6, 3, 6, 7], 4),  # ba, c, ba: not there
        (("bcb",), [1, 3, 1, 7], 1),  # in three
        (("abcba",), [2, 3, 6, 7, 7], 2),  # ab, c, ba: the longest
        (("abcba", "c"), [2, 3, 6, 7, 7], 2),  # two that overlap
        (("c", "abcba"), [0, 1, 3, 7], 1),
        (("aa",), [0, 0, 0], 0),  # the second begins where the first has not ended
        (("b",), [1], 0),
        ((), [4, 4], 2),
    ],
)
def test_dry_breakers_may_span_any_tokens(texts: tuple[str, ...], tokens: list[int], since: int):
    breakers = SequenceBreakers(texts, SPEAKER)
    for token in tokens:
        breakers.push(token)
    assert breakers.since == since


def test_a_breaker_in_two_tokens_ends_the_match_of_dry():
    """Match three tokens after "a b c a b c", or two if "ca" is a breaker."""
    for texts, expected in (((), {0: -0.5 * 2.0**2}), (("ca",), {0: -0.5 * 2.0**1})):
        breakers = SequenceBreakers(texts, SPEAKER)
        text = [0, 1, 3, 0, 1, 3]
        for token in text:
            breakers.push(token)
        changed = steps.dry(candidates_of(np.zeros(8, np.float32)), np.array(text), breakers, 0.5, 2.0, 1).logits
        assert {token: loss for token, loss in enumerate(changed.tolist()) if loss} == expected


def test_dry_bounds_its_comparisons_on_one_repeated_token():
    """Compare no further than the largest power worth computing."""
    breakers = SequenceBreakers((), None)
    breakers.since = 100_000
    changed = steps.dry(candidates_of(np.zeros(8, np.float32)), np.zeros(100_000, int), breakers, 1.0, 1.75, 2)
    assert -3.5e38 < float(changed.logits[0]) < -1e38
    assert not changed.logits[1:].any()


@PLENTY
@given(rows(), some.floats(0, 3), some.floats(0, 2), some.floats(0, 3))
def test_dynamic_temperature_follows_the_entropy(row: np.ndarray, t: float, range: float, exponent: float):
    candidates = candidates_of(row)
    p = candidates.compute_probabilities()
    entropy = -sum(x * math.log(x) for x in p if x > 0) / math.log(max(len(row), 2))
    wanted = max(0.0, t - range) + (t + range - max(0.0, t - range)) * min(max(entropy, 0), 1) ** exponent
    scaled = steps.dynamic_temperature(candidates, t, range, exponent)
    expected = steps.temperature(candidates, wanted) if len(row) > 1 else candidates
    if len(expected.ids) == len(scaled.ids):  # with a temperature of nearly 0, rounding decides
        np.testing.assert_allclose(
            scaled.compute_probabilities(), expected.compute_probabilities(), rtol=1e-5, atol=1e-9
        )
    else:
        assert wanted < 1e-6


@PLENTY
@given(rows(), some.floats(-5, 30))
def test_mirostat_2_keeps_tokens_below_the_surprise(row: np.ndarray, mu: float):
    kept = steps.mirostat_2(candidates_of(row), mu)
    p = candidates_of(row).compute_probabilities()
    surprising = [i for i, x in enumerate(p) if x == 0 or -math.log2(x) > mu]
    assert set(kept.ids.tolist()) == set(range(len(row))) - set(surprising) | {int(np.argmax(row))}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_mirostat_holds_the_target_surprise(version: int, tau: float):
    """Draw from Zipf's distribution, which version 1 assumes."""
    row = (-1.1 * np.log(np.arange(1, 1001))).astype(np.float32)
    options = SamplingOptions(mirostat=version, mirostat_tau=tau, mirostat_eta=0.1, temperature=1.0, seed=1)
    sampler, surprises = Sampler(options, 1000), []
    for _ in range(1500):
        ids, p = sampler.compute_distribution(row)
        token = sampler.sample(row)
        surprises.append(-math.log2(p[ids == token][0]))
        sampler.accept(token)
    assert np.mean(surprises[200:]) == pytest.approx(tau, abs=0.1)


@pytest.mark.parametrize("target", [0.2, 0.5])
def test_adaptive_p_holds_the_target_probability(target: float):
    sampler = Sampler(SamplingOptions(adaptive_target=target, temperature=1.0, seed=1), 500)
    chosen = []
    for number in range(400):
        row = random_logits(500, number % 50)
        plain = steps.min_p(steps.top_p(steps.top_k(candidates_of(row), 40), 0.95), 0.05)
        token = sampler.sample(row)
        chosen.append(plain.compute_probability(token))
        sampler.accept(token)
    assert np.mean(chosen) == pytest.approx(target, abs=0.1)


def test_adaptive_p_prefers_tokens_near_the_target():
    row = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    for target, likeliest in ((0.6, 0), (0.3, 1), (0.0, 2)):
        assert np.argmax(steps.adaptive_p(candidates_of(row), target).logits) == likeliest


def test_adaptive_p_keeps_impossible_tokens_impossible():
    logits = steps.adaptive_p(candidates_of(np.array([-math.inf, 0, 1], np.float32)), 0.3).logits
    assert logits[0] == -math.inf and np.isfinite(logits[1:]).all()


def test_logit_bias_forces_or_bans_tokens():
    row = random_logits(50)
    sampler = Sampler(SamplingOptions(logit_bias={3: 50.0, 4: -math.inf}, temperature=0), 50)
    assert sampler.sample(row) == 3
    assert 4 not in Sampler(SamplingOptions(logit_bias={4: -math.inf}, **OFF), 50).compute_distribution(row)[0]
    assert Sampler(SamplingOptions(logit_bias={3: 1e300}, temperature=0), 50).sample(row) == 3
    with pytest.raises(UsageError, match="token 50 does not exist"):
        Sampler(SamplingOptions(logit_bias={50: 1.0}), 50)
    with pytest.raises(LocalllmError, match="allows no token"):
        Sampler(SamplingOptions(logit_bias=dict.fromkeys(range(50), -math.inf)), 50).sample(row)
    assert 3 not in Sampler(SamplingOptions(ignore_eos=True, **OFF), 50, SPEAKER).compute_distribution(row)[0]


OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


# All together.

EXTREMES: dict[str, list[Any]] = {
    "temperature": [0.8, 0, -1, 1e-300, 1e300, 1],
    "top_k": [40, 0, 1, 10**30],
    "top_p": [0.95, 1, 1e-300],
    "min_p": [0.05, 0, 1, 1e-300],
    "typical": [1, 0.5, 1e-300],
    "top_n_sigma": [-1, 1.0, 1e-300, 1e300],
    "xtc_probability": [0, 1.0, 0.5],
    "xtc_threshold": [0.1, 0.0, 0.5],
    "repeat_penalty": [1, 1.3, 1e-300, 1e300],
    "presence_penalty": [0, 1e300, -1e300],
    "frequency_penalty": [0, 1e300, -1e308, 0.3],
    "repeat_last_n": [64, -1, 1],
    "dry_multiplier": [0, 0.5, 1e300],
    "dry_base": [1.75, 1, 1e300, 1.0000001],
    "dry_allowed_length": [2, 0, 1],
    "dry_penalty_last_n": [64, -1, 3],
    "dynatemp_range": [0, 0.5, 1e300],
    "dynatemp_exponent": [1, 0, 1e300],
    "mirostat": [0, 0, 0, 1, 2],
    "mirostat_tau": [5, 0, 1e300],
    "mirostat_eta": [0.1, 0, 1e300],
    "adaptive_target": [-1, 0, 1, 0.4],
    "adaptive_decay": [0.9, 0, 0.99],
    "logit_bias": [{}, {0: -5.0}, {0: 1e300}, {0: -1e300}],
    "samplers": [tuple(LETTERS), tuple(LETTERS)[::-1], ("temperature", "penalties", "dry"), ()],
}


@PLENTY
@given(rows(), some.fixed_dictionaries({name: some.sampled_from(values) for name, values in EXTREMES.items()}))
def test_any_options_give_a_valid_distribution(row: np.ndarray, options: dict):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = Sampler(SamplingOptions(seed=5, **options), len(row), SPEAKER)
        sampler.read([0, 1, 0, 1, 0])
        twin = sampler.copy()
        for _ in range(4):
            ids, probabilities = sampler.compute_distribution(row)
            assert probabilities.sum() == pytest.approx(1)
            token = sampler.sample(row)
            assert twin.sample(row) == token
            assert probabilities[ids == token] > 0
            assert np.isfinite(row[token])
            sampler.accept(token)
            twin.accept(token)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0, "mirostat": 2}], ids=str)
def test_a_temperature_of_0_needs_no_other_steps(options: dict):
    names = Sampler(SamplingOptions(**options), 10)._chain
    assert len(names) == 1
    row = random_logits(10)
    assert Sampler(SamplingOptions(**options), 10).sample(row) == np.argmax(row)


def test_xtc_removes_top_choices_with_its_probability():
    row = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    sampler = Sampler(SamplingOptions(**OFF, temperature=1.0, xtc_probability=0.4, seed=1), 3)
    drawn = np.array([sampler.sample(row) for _ in range(5000)])
    assert np.mean(drawn == 2) == pytest.approx(0.4 + 0.6 * 0.2, abs=0.03), "the chance has nothing to do with the draw"
    assert np.mean(drawn == 0) == pytest.approx(0.6 * 0.5, abs=0.03)


# What is known of the text so far.


def test_history_keeps_only_as_many_tokens_as_needed():
    for most in (-1, 0, 1, 7, 300):
        history, whole = TokenHistory(most), []
        for token in range(1500):
            history.append(token)
            whole.append(token)
        expected = whole if most < 0 else whole[len(whole) - most :]
        assert history.get_last(most).tolist() == expected
        assert history.get_last(0).tolist() == []
        twin = history.copy()
        twin.append(-5)
        history.append(7)
        assert history.get_last(1).tolist() == [7] * (most != 0)


@pytest.mark.parametrize("options", LEARNING, ids=str)
def test_a_discarded_fork_does_not_change_the_sampler(options: dict):
    """Fork as for a rejected draft, and read the distribution."""

    def go_on(sampler: Sampler, disturbed: bool) -> list[int]:
        tokens = []
        for number in range(30):
            row = random_logits(300, number % 7)
            if disturbed:
                fork = sampler.copy(200)
                for guess in range(5):
                    fork.accept(fork.sample(random_logits(300, guess)))
                sampler.compute_distribution(row)
            tokens.append(sampler.sample(row))
            sampler.accept(tokens[-1])
        return tokens

    samplers = [Sampler(SamplingOptions(seed=2, **options), 300, SPEAKER) for _ in range(2)]
    for sampler in samplers:
        sampler.read([1, 2, 3] * 5)
    assert go_on(samplers[0], False) == go_on(samplers[1], True)


@pytest.mark.parametrize("options", [{"mirostat": 2}, {"adaptive_target": 0.5}], ids=str)
def test_a_token_that_was_not_drawn_does_not_train_the_sampler(options: dict):
    sampler, row = Sampler(SamplingOptions(seed=2, **options), 300), random_logits(300)
    before = sampler._state.mu, sampler._state.mean
    token = sampler.sample(row)
    sampler.accept(token + 1)
    assert (sampler._state.mu, sampler._state.mean) == before
    sampler.accept(sampler.sample(row))
    assert (sampler._state.mu, sampler._state.mean) != before


# Options.


def test_numpy_numbers_are_accepted_as_options():
    options = SamplingOptions(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint8(7), ignore_eos=np.True_)
    assert {name: type(value) for name, value in options.explicit.items()} == {
        "temperature": float, "top_k": int, "seed": int, "ignore_eos": bool,
    }  # fmt: skip
    for wrong in (np.True_, np.float32("nan"), np.array(1.0), np.complex64(1), "1"):
        with pytest.raises(UsageError, match="temperature must be a number"):
            SamplingOptions(temperature=wrong)


def test_unset_options_take_the_recommended_value_or_the_default():
    chosen, advice = SamplingOptions(top_k=5, top_p=0.95), SamplingOptions(top_k=7, top_p=0.5, min_p=0.2)
    assert chosen.fill_unset(advice) == SamplingOptions(top_k=5, top_p=0.95, min_p=0.2)
    assert chosen.fill_unset(advice).complete.explicit == {
        **{name: value for name, value in DEFAULTS.items() if value is not None},
        "top_k": 5,
        "top_p": 0.95,
        "min_p": 0.2,
    }
    assert SamplingOptions(temperature=None) == SamplingOptions()


def test_samplers_have_the_names_of_llama_cpp():
    theirs = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
    steps_of_theirs = SamplingOptions(samplers=theirs).samplers
    assert steps_of_theirs == parse_sampler_letters("edskypmxt")
    assert steps_of_theirs == tuple(step for step in DEFAULTS["samplers"] if step in steps_of_theirs)
    assert SamplingOptions(samplers=["top-k", "temp", "typical-p"]).samplers == ("top_k", "temperature", "typical")
    assert SamplingOptions(samplers="").samplers == ()
    assert SamplingOptions(samplers="top_k;infill").samplers == parse_sampler_letters("ki")
    with pytest.raises(UsageError, match="unknown letter 'z'"):
        parse_sampler_letters("kz")


# What files recommend.

ADVICE = {
    "sequence": "top_k;temperature",
    "top_k": 20,
    "top_p": np.float32(0.8).item(),
    "min_p": 0.0,
    "xtc_probability": 0.1,
    "xtc_threshold": 0.2,
    "temp": np.float32(0.6).item(),
    "penalty_last_n": 32,
    "penalty_repeat": 1.05,
    "mirostat": 0,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
}


def test_sampling_recommended_by_a_file_is_read():
    options, ignored = read_recommended({f"general.sampling.{key}": value for key, value in ADVICE.items()})
    assert not ignored
    assert len(options.explicit) == len(ADVICE)
    assert (options.temperature, options.top_p, options.samplers) == (0.6, 0.8, ("top_k", "temperature"))
    assert read_recommended({"general.sampling.top_k": -1})[0].top_k == 0


MEANT = {("temp", -5.5)}


@pytest.mark.parametrize("key", ADVICE)
@pytest.mark.parametrize(
    "value", [True, math.nan, -5.5, math.inf, "x\x1b" * 99, b"", np.zeros(3), [1]], ids=lambda x: str(x)[:5]
)
def test_invalid_recommendations_of_a_file_are_ignored(key: str, value):
    options, ignored = read_recommended({f"general.sampling.{key}": value}, "a.gguf")
    if isinstance(value, float) and (key, value) in MEANT:
        assert options.explicit and not ignored
        return
    assert not options.explicit
    (line,) = ignored
    assert line.startswith(f"a.gguf: general.sampling.{key} must be ")
    assert len(line) < 500 and line.isprintable()


@pytest.fixture(scope="module")
def opinionated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a model whose author recommends greedy sampling."""
    keys = {"temp": 0.0, "top_k": "many", "sequence": "top_k;temperature"}
    advice = {f"general.sampling.{key}": value for key, value in keys.items()}
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "advice.gguf", metadata=advice))


def test_inspect_shows_the_recommended_sampling(opinionated: str, cli):
    assert "\nsampling      temperature 0.0, samplers top_k;temperature\n" in cli("inspect", opinionated)[1]
    advice = json.loads(cli("inspect", opinionated, "--json")[1])["sampling"]
    assert advice == {"temperature": 0.0, "samplers": ["top_k", "temperature"]}


def test_options_of_the_user_override_those_of_the_file(opinionated: str):
    with localllm.open(opinionated, threads=1) as model:
        (warning,) = model.warnings
        assert "general.sampling.top_k must be an integer, 0 or greater (found many)" in warning

        def said(**options) -> list[int]:
            answer = model.generate("hello", 8, **options)
            list(answer)
            return answer.tokens

        assert said() == said(temperature=0) == said(temperature=None) != said(temperature=5.0, top_k=0, seed=1)
        several = model.candidates("hello", n=2, max_tokens=8)
        assert several[0].tokens == several[1].tokens == said()
        (mapped,) = model.map(["hello"], max_tokens=8)
        assert mapped.tokens == said()


# With guesses, forks and others beside: always the same text.

PROMPT = "one two three four five six seven eight nine ten\n" * 3 + "one two three"


@pytest.fixture(scope="module")
def model():
    with localllm.open(localllm.builtin_model(), threads=2) as opened:
        yield opened


@pytest.mark.parametrize("options", LEARNING, ids=str)
@pytest.mark.parametrize("how", ["ngram", "itself"])
def test_drafts_do_not_change_the_text_of_any_sampler(model, how: str, options: dict, monkeypatch: pytest.MonkeyPatch):
    record = StepCostModel.record
    monkeypatch.setattr(
        StepCostModel, "record", lambda costs, tokens, _: record(costs, tokens, 1.0)
    )  # whatever the machine does
    expected = model.generate(PROMPT, 40, speculate="off", seed=3, **options)
    text = "".join(expected)
    answer = model.generate(PROMPT, 40, speculate=model if how == "itself" else how, seed=3, **options)
    assert ("".join(answer), answer.tokens) == (text, expected.tokens)
    assert answer.drafted > 0 or (how == "ngram" and options is MANY), "only penalties leave nothing to guess from"
    if how == "itself":
        assert answer.accepted >= len(answer.tokens) // 2, "the copy knows what the sampler has learnt"


@pytest.mark.parametrize("options", LEARNING[1:3], ids=str)
def test_answers_are_the_same_alone_and_in_a_batch(model, options: dict):
    alone = {}
    for seed in (3, 4):
        answer = model.generate(PROMPT, 10, seed=seed, **options)
        "".join(answer)
        alone[seed] = answer.tokens
    together = model.candidates(PROMPT, n=2, max_tokens=10, seed=3, **options)
    assert {answer.seed: answer.tokens for answer in together} == alone
    (mapped,) = model.map([PROMPT], max_tokens=10, seed=3, **options)
    assert mapped.tokens == alone[3]


def test_an_answer_without_an_end_stops_at_max_tokens(model):
    ends = model.generate("Hi", 300, temperature=0)
    list(ends)
    answer = model.generate("Hi", len(ends.tokens) + 5, temperature=0, ignore_eos=True)
    list(answer)
    assert len(answer.tokens) == len(ends.tokens) + 5
    with pytest.raises(UsageError, match="ignore_eos cannot be combined"):
        model.candidates("Hi", beams=2, ignore_eos=True)


@pytest.mark.parametrize(("target", "rate", "most"), [(1e300, 1e300, 1), (-1e300, 1e300, -1)])
def test_mu_of_mirostat_is_bounded(target: float, rate: float, most: int):
    mu = update_mu(1.0, 0.5, target, rate)
    assert mu == most * MAX_MU
    assert update_mu(3.0, 0.25, 2.0, 0.1) == 3.0 and update_mu(3.0, 0.25, 1.0, 0.1) == pytest.approx(2.9)


def test_recommended_options_have_llama_cpps_keys():
    assert {option.key for option in OPTIONS.values() if option.key} == {
        "top_k", "temp", "mirostat_tau", "top_p", "xtc_threshold", "xtc_probability", "mirostat_eta", "mirostat",
        "min_p", "sequence", "penalty_last_n", "penalty_repeat",
    }  # fmt: skip


@pytest.mark.parametrize(("options", "temperatures"), [
    ({"temperature": 0.5}, [0.5]), ({"temperature": 0.5, "dynatemp_range": 0.3, "dynatemp_exponent": 2}, [0.5, 0.3, 2]),
    ({"temperature": 0.5, "dynatemp_range": 0.3, "mirostat": 1}, [0.5]),
    ({"temperature": 0.5, "dynatemp_range": 0.3, "mirostat": 2}, [0.5]),
])  # fmt: skip
def test_mirostat_applies_only_one_temperature_step(options: dict, temperatures: list[float]):
    row, step = (
        candidates_of(random_logits(30)),
        steps.temperature if len(temperatures) == 1 else steps.dynamic_temperature,
    )
    scaled = STEPS["temperature"].apply(row, SamplingOptions(**options).complete, SimpleNamespace())
    assert scaled.logits.tolist() == step(row, *temperatures).logits.tolist()


USUAL = "top_k top_p min_p temperature"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, USUAL),
        ({"repeat_penalty": 1.1}, f"penalties {USUAL}"),
        ({"presence_penalty": -0.1}, f"penalties {USUAL}"),
        ({"frequency_penalty": 0.1}, f"penalties {USUAL}"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, USUAL),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, f"penalties {USUAL}"),
        ({"dry_multiplier": 0.1}, f"dry {USUAL}"),
        ({"dry_multiplier": 0.1, "dry_penalty_last_n": 0}, USUAL),
        ({"top_n_sigma": 0.1}, f"top_n_sigma {USUAL}"),
        ({"top_n_sigma": 0}, USUAL),
        ({"top_k": 0}, "top_p min_p temperature"),
        ({"top_k": 1}, USUAL),
        ({"typical": 0.99}, "top_k typical top_p min_p temperature"),
        ({"top_p": 1}, "top_k min_p temperature"),
        ({"min_p": 0}, "top_k top_p temperature"),
        ({"min_p": 1e-9}, USUAL),
        ({"xtc_probability": 1}, "top_k top_p min_p xtc temperature"),
        ({"xtc_probability": 0.1, "xtc_threshold": 0.5}, "top_k top_p min_p xtc temperature"),
        ({"xtc_probability": 0.1, "xtc_threshold": 0.51}, USUAL),
        ({"temperature": 1}, "top_k top_p min_p"),
        ({"temperature": 1, "dynatemp_range": 0.1}, USUAL),
        ({"adaptive_target": 0}, f"{USUAL} adaptive_p"),
        ({"adaptive_target": -0.1}, USUAL),
        ({"adaptive_target": 0.5, "samplers": "adaptive_p;top_k"}, "top_k adaptive_p"),
        ({"adaptive_target": 0.5, "samplers": "top_k"}, "top_k"),
        ({"samplers": "temperature;top_k"}, "temperature top_k"),
        ({"mirostat": 1, "typical": 0.5}, "temperature mirostat"),
        ({"mirostat": 2, "temperature": 1}, "mirostat"),
        ({"mirostat": 2, "temperature": 1, "dynatemp_range": 0.1}, "temperature mirostat"),
        ({"temperature": 0}, "likeliest"),
        ({"temperature": -1, "typical": 0.5, "xtc_probability": 0.1}, "typical xtc likeliest"),
        ({"temperature": 1e-9}, USUAL),
        ({"temperature": 0, "dynatemp_range": 0.1}, USUAL),
        ({"temperature": 0, "mirostat": 1}, "likeliest"),
        ({"temperature": 0, "mirostat": 2, "dynatemp_range": 0.1}, "likeliest"),
        ({"temperature": 0, "typical": 0.5, "samplers": "temperature;typical"}, "likeliest"),
        ({"temperature": 0, "adaptive_target": 0.5, "top_n_sigma": 1}, "likeliest"),
        ({"temperature": 0, "samplers": ""}, ""),
    ],
)
def test_options_turn_their_steps_on(options: dict, names: str):
    assert list_active_steps(SamplingOptions(**options).complete) == names.split()


@pytest.mark.parametrize(("options", "names", "most", "breakers"), [
    ({}, "", 0, []), ({"repeat_last_n": 5}, "penalties", 5, []), ({"repeat_last_n": 5}, "top_k", 0, []),
    ({"repeat_last_n": 5, "dry_penalty_last_n": 7}, "penalties dry", 7, [b"\n", b":", b'"', b"*"]),
    ({"repeat_last_n": 9, "dry_penalty_last_n": 7, "dry_sequence_breakers": "x"}, "penalties dry", 9, [b"x"]),
    ({"repeat_last_n": -1, "dry_penalty_last_n": 7, "dry_sequence_breakers": "x"}, "penalties dry", -1, [b"x"]),
    ({"repeat_last_n": 9, "dry_penalty_last_n": -1, "dry_sequence_breakers": "x"}, "dry", -1, [b"x"]),
])  # fmt: skip
def test_the_initial_state_has_every_field_that_steps_read(options: dict, names: str, most: int, breakers: list[bytes]):
    chosen = SamplingOptions(**options, mirostat_tau=3, adaptive_target=0.25).complete
    state = SamplerState.create(chosen, names.split(), None, 300, SPEAKER)
    assert (state.history.most, state.breakers._texts) == (most, breakers)
    assert (state.mu, state.mean, state.vocab, state.drawn, state.watched) == (6, 0.25, 300, None, None)


@pytest.mark.parametrize(
    ("target", "mean", "aim"), [(0.3, 0.2, 0.4), (0.3, 0.7, 0.0), (0.9, 0.5, 1.0), (0.5, 0.5, 0.5)]
)
def test_adaptive_p_compensates_for_earlier_draws(target: float, mean: float, aim: float):
    row = candidates_of(random_logits(30))
    state = SimpleNamespace(mean=mean, watched=None)
    adapted = STEPS["adaptive_p"].apply(row, SamplingOptions(adaptive_target=target).complete, state)
    np.testing.assert_allclose(adapted.logits, steps.adaptive_p(row, aim).logits, rtol=1e-12)
    assert state.watched is row


def test_mirostat_and_adaptive_p_learn_from_drawn_tokens_exactly():
    row = Candidates(np.arange(2), np.log([0.25, 0.75]))
    for options, mu, mean in (
        ({"mirostat": 2}, 10 - 0.1 * (2 - 5), 0.5),
        ({"adaptive_decay": 0.8}, 10, 0.5 - 0.2 * 0.25),
    ):
        state = SamplerState.create(SamplingOptions(adaptive_target=0.5).complete, [], None, 2, None)
        for drawn in (1, 0):  # not what comes, and what comes
            state.watched, state.drawn = row, drawn
            state.accept(SamplingOptions(**options).complete, 0)
            assert state.watched is None and (state.mu, state.mean) == (
                pytest.approx((mu, mean)) if drawn == 0 else (10, 0.5)
            )


def test_mirostat_works_with_a_single_token():
    for logits, expected in (([-math.inf, 1.0], [1]), ([2.0], [0]), ([-math.inf, 3.0, -math.inf], [1])):
        row = np.array(logits, np.float32)
        assert steps.mirostat_1(Candidates(np.arange(len(row)), row), 5.0, 10).ids.tolist() == expected


@pytest.mark.parametrize(("names", "least", "most", "text"), [
    (["repeat_penalty"], 5e-324, 1e308, "above 0"), (["typical", "top_p"], 5e-324, 1, "above 0 and at most 1"),
    (["min_p", "xtc_probability", "xtc_threshold"], 0, 1, "from 0 to 1"), (["dry_base"], 1, 1e308, "1 or greater"),
    (["dynatemp_range", "dynatemp_exponent", "dry_multiplier", "mirostat_tau", "mirostat_eta"], 0, 1e308,
     "0 or greater"),
    (["adaptive_target"], -1e308, 1, "at most 1"), (["adaptive_decay"], 0, 0.99, "from 0 to 0.99"),
    (["top_k", "dry_allowed_length", "seed"], 0, 1e15, "an integer, 0 or greater"),
    (["repeat_last_n", "dry_penalty_last_n"], -1, 1e15, "an integer, -1 or greater"),
    (["mirostat"], 0, 2, "0, 1 or 2"),
    (["temperature", "top_n_sigma", "presence_penalty", "frequency_penalty"], -1e308, 1e308, "a number"),
])  # fmt: skip
def test_options_accept_their_bounds_and_refuse_values_beyond(names: list[str], least: float, most: float, text: str):
    for name in names:
        for sensible in (least, most):
            assert getattr(SamplingOptions(**{name: sensible}), name) == sensible
        below, above = math.nextafter(least, -math.inf), math.nextafter(most, math.inf)
        for wrong in (below if abs(least) < 1e308 else -math.inf, above if most <= 2 else math.inf):
            problem = text if abs(wrong) < math.inf else "a number"
            with pytest.raises(UsageError, match=f"^{name} must be {problem}, not {wrong}$"):
                SamplingOptions(**{name: wrong})
