"""Test speculative decoding: the same text in fewer steps."""

import itertools
import json
import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import write_tiny_model

import localllm
from localllm.errors import ModelError, UsageError
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.sampling.sampler import Sampler, SamplingOptions
from localllm.generation.speculation import acceptance as speculation
from localllm.generation.speculation import speculator as heads
from localllm.generation.speculation.acceptance import (
    GAIN,
    LOSS,
    MAX_DRAFT_TOKENS,
    START,
    SURE,
    TRIALS,
    DraftPlanner,
    DraftSelector,
    DraftToken,
    SpeculationBudget,
    StepCostModel,
)
from localllm.generation.speculation.ngram import NgramProposer, make_text_proposers
from localllm.generation.speculation.speculator import MAX_PADDING, ModelDrafter

# ---- from the text --------------------------------------------------------------------------------------------------


def first(proposer, count: int) -> list[int]:
    return [guess.token for guess in itertools.islice(proposer.propose() or (), count)]


def longest_repeated_end(tokens: list[int]) -> int:
    """Return the length of the longest suffix that also occurs earlier, by brute force."""
    ends = range(len(tokens) - 1, 0, -1)
    return next((n for n in ends if any(tokens[i : i + n] == tokens[-n:] for i in range(len(tokens) - n))), 0)


@given(st.lists(st.integers(0, 3), max_size=40))
def test_ngrams_find_the_longest_repeated_suffix(tokens):
    grams = NgramProposer()
    for count, token in enumerate(tokens, 1):
        grams.push([token])
        guesses = list(itertools.islice(grams.propose() or (), 3))
        longest = longest_repeated_end(tokens[:count])
        assert grams.agreed == longest
        assert bool(guesses) == (longest > 0)
        if guesses:
            places = [i for i in range(count - longest) if tokens[i : i + longest] == tokens[count - longest : count]]
            followed = [itertools.cycle(tokens[i + longest : count]) for i in places]
            assert [guess.token for guess in guesses] in [list(itertools.islice(cycle, 3)) for cycle in followed]
            assert [guess.trust for guess in guesses] == [min(longest + i, SURE) for i in range(3)]


def test_ngrams_prefer_the_latest_match():
    grams = NgramProposer()
    grams.push([1, 2, 8, 0, 1, 2])
    assert first(grams, 1) == [8]
    grams.push([9, 0, 0, 1, 2])
    assert first(grams, 1) == [9]


def test_a_text_without_repetition_gets_no_draft():
    assert first(NgramProposer(), 5) == []
    assert first(make_text_proposers([4, 5, 6])[0], 5) == []


ORIGINAL = list(range(100, 120))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ORIGINAL[:6], 106),  # it is being copied
        ([*ORIGINAL[:6], 7], 107),  # 106 was replaced
        ([*ORIGINAL[:6], 7, 106], 107),  # 7 was put in
        ([*ORIGINAL[:6], 107], 108),  # 106 was left out
        ([*ORIGINAL[:6], 7, 8, 9, 106], 107),
        ([*ORIGINAL[:6], 7, 8, 9, 107], 108),
    ],
    ids=str,
)
def test_a_copy_continues_after_a_change(answer, expected):
    grams, copies = make_text_proposers([*ORIGINAL, 1])
    for token in answer:
        for proposer in (grams, copies):
            proposer.push([token])
    assert first(copies, 2) == [expected, expected + 1]


def test_copies_draft_most_tokens_of_a_changed_text():
    """Copy a text three times with changes; count each proposer's drafts and hits."""
    random = np.random.default_rng(5)
    original = random.integers(0, 60, 80).tolist()
    grams, copies = make_text_proposers([*original, 99])
    right, trust, asked = [0, 0], [0, 0], 0
    for _ in range(3):
        at = 0
        while at < len(original):
            token = original[at] if random.random() > 0.15 else int(random.integers(60, 90))
            at += int(random.choice([0, 1, 1, 1, 1, 2]))
            for number, proposer in enumerate((grams, copies)):
                guess = next(proposer.propose() or iter(()), DraftToken(-1, 0))
                right[number] += guess.token == token
                trust[number] += guess.trust
            for proposer in (grams, copies):
                proposer.push([token])
            asked += 1
    assert (asked, right, trust) == (236, [74, 62], [486, 288])


def test_an_interrupted_copy_is_resumed():
    """Resume the latest few; a single token is no copy."""
    original = list(range(100, 200))
    grams, copies = make_text_proposers([*original, 1])

    def say(*tokens: int) -> tuple[int, int]:
        for token in tokens:
            for proposer in (grams, copies):
                proposer.push([token])
        return next(copies.propose() or iter(()), DraftToken(-1, 0))

    left = [120, 140, 160, 180]
    for number, place in enumerate((105, *left)):
        assert say(2 + number, *range(place - 5, place)) == (place, 5)
    say(9)
    assert [original[place] for place in copies._ends] == [180, 160, 140, 120]
    assert say(160) == (161, 1), "as if 9 had been put in"
    assert say(10, 141) == (142, 1), "as if 9 had been put for 140"
    assert say(11) == (143, 0)
    assert say(12, 105) == (-1, 0), "too long ago"


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5)))
def test_copies_only_propose_tokens_of_the_text(prompt, pushes):
    grams, copies = make_text_proposers(prompt)
    for tokens in pushes:
        for proposer in (grams, copies):
            proposer.push(tokens)
        assert set(first(copies, 4)) <= set(grams.tokens)


# ---- pace -----------------------------------------------------------------------------------------------------------


def make_costs(*seconds: float) -> StepCostModel:
    """Return the costs of 1, 2, 4, 8 and 16 tokens."""
    costs = StepCostModel()
    for tokens, taken in zip((1, 2, 4, 8, 16), seconds, strict=True):
        costs.record(tokens, taken)
    return costs


class Script:
    """A proposer that repeats its guesses; each takes `seconds` of the test's clock."""

    account = None

    def __init__(self, guesses: list[DraftToken], seconds: float = 0.0):
        self.guesses, self.seconds, self.asked = guesses, seconds, 0

    def push(self, tokens):
        pass

    def propose(self):
        for guess in self.guesses:
            Script.clock += self.seconds
            self.asked += 1
            yield guess


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    Script.clock = 0.0
    monkeypatch.setattr(speculation, "perf_counter", lambda: Script.clock)


SURELY = [DraftToken(7, SURE)] * 30


def test_a_draft_is_as_long_as_it_pays():
    free, dear = make_costs(1, 1, 1, 1, 1), make_costs(1, 2.2, 4.4, 8.8, 17.6)
    assert len(DraftPlanner(Script(SURELY)).plan(MAX_DRAFT_TOKENS, free, GAIN).draft) == MAX_DRAFT_TOKENS
    assert len(DraftPlanner(Script(SURELY)).plan(5, free, GAIN).draft) == 5
    assert len(DraftPlanner(Script(SURELY)).plan(0, free, GAIN).draft) == 0
    assert len(DraftPlanner(Script(SURELY[:2])).plan(MAX_DRAFT_TOKENS, free, GAIN).draft) == 2, "there are no more"
    assert DraftPlanner(Script(SURELY)).plan(MAX_DRAFT_TOKENS, dear, GAIN).draft == []
    usual = make_costs(1, 1.3, 1.8, 3.2, 5.5)
    assert (
        1
        <= len(DraftPlanner(Script([DraftToken(7, 4)] * 30)).plan(MAX_DRAFT_TOKENS, usual, GAIN).draft)
        < MAX_DRAFT_TOKENS
    )
    assert DraftPlanner(Script(SURELY)).plan(MAX_DRAFT_TOKENS, usual, 99.0).draft == [], "something else promises more"


def test_a_draft_is_shorter_beside_other_answers():
    """Charge the draft's time to the other answers, which get one token each."""
    usual = make_costs(1, 1.3, 1.8, 3.2, 5.5)
    lengths = [
        len(DraftPlanner(Script(SURELY)).plan(MAX_DRAFT_TOKENS - n, usual.share_with_batch(n), GAIN).draft)
        for n in (0, 2, 4)
    ]
    assert lengths[0] > lengths[2]
    dear = make_costs(1, 1.1, 3.3, 6.6, 13.2)
    assert len(DraftPlanner(Script(SURELY)).plan(MAX_DRAFT_TOKENS, dear, GAIN).draft) == 1
    assert DraftPlanner(Script(SURELY)).plan(MAX_DRAFT_TOKENS - 2, dear.share_with_batch(2), GAIN).draft == []
    assert DraftSelector([Script(SURELY)], dear).draft(5, MAX_DRAFT_TOKENS) == []


def test_costs_between_measured_lengths_are_interpolated():
    costs = make_costs(1.0, 1.5, 2.0, 3.0, 5.0)
    assert [costs.estimate_cost(tokens) for tokens in (1, 2, 3, 4, 6, 12)] == pytest.approx([1, 1.5, 1.75, 2, 2.5, 4])
    costs.record(4, 9.0)
    assert costs.estimate_cost(4) < 9, "one slow step is not yet the truth"


def test_step_costs_are_computed_exactly():
    """Use typical costs until enough is measured; ignore steps longer than drafts."""
    costs = StepCostModel()
    costs.record(MAX_DRAFT_TOKENS + 2, 5.0)
    assert not costs.is_measured and [costs.estimate_cost(tokens) for tokens in (0, 1, 2, 3, 16)] == [
        0,
        1,
        1.3,
        1.55,
        5.5,
    ]
    costs.record(4, 3.6)
    assert costs.is_measured and [
        costs.estimate_cost(1),
        costs.estimate_cost(4),
        costs.relate_seconds(1.0),
    ] == pytest.approx([1, 1.8, 0.5])
    costs.record(16, 8.8)
    assert [
        costs.estimate_cost(1),
        costs.estimate_cost(4),
        costs.estimate_cost(16),
        costs.relate_seconds(1.0),
    ] == pytest.approx([1, 2.25, 5.5, 0.625])
    costs.record(1, 2.0)
    costs.record(1, 5.0)
    assert costs.estimate_cost(4) == pytest.approx(3.6 / 2.6), "a slower one counts little"
    assert costs.share_with_batch(0) is costs and costs.estimate_tokens(3.0) == 3.0
    beside = costs.share_with_batch(3)
    values = (
        beside.estimate_cost(1),
        beside.estimate_cost(13),
        beside.relate_seconds(2.0),
        beside.estimate_tokens(3.0),
        beside.estimate_tokens(1.0),
    )
    assert values == pytest.approx((1, 8.8 / 3.6, 2 / 3.6, 1.5, 1))
    assert speculation.interpolate({1: 1.0, 4: 6.0, 2: 2.0}) == [0, 1, 2, 4, 6]
    assert [speculation.smooth(*pair) for pair in ((None, 3.0), (2.0, 1.0), (2.0, 5.0))] == [3, 1, 2.6]


def test_acceptance_history_is_computed_exactly():
    experience = speculation.AcceptanceHistory()
    assert experience.chances[:3] == [0, 1 / 3, 1 / 2] and experience.chances[15:] == [15 / 17, 0.95]
    experience.record(4, True)
    assert (experience.chances[4], experience.usual) == pytest.approx(((1 + 4 / 3) / 3, 0.715))
    experience.record(4, False)
    assert (experience.chances[4], experience.usual) == pytest.approx(((0.95 + 4 / 3) / 3.95, 0.715 * 0.95))
    experience.raise_idle_rate()
    assert experience.usual == pytest.approx(0.715 * 0.95 * 0.995 + 0.005) and experience.chances[5] == 5 / 7
    account = SpeculationBudget()
    account.record(2.0)
    account.record(9.0)
    assert (account.seconds, account.trials) == (pytest.approx(3.4), TRIALS - 2)
    for steps, may in ((2.0, True), (0.01, False), (-9.0, True), (4.99, True), (0.04, False)):
        account.charge(steps)
        assert account.allows_loss == may
    account.steps += 1
    assert not account.allows_loss, "of a step, a fiftieth"
    account.steps += 1
    assert account.allows_loss


def test_acceptance_is_learned_even_from_guesses_not_drafted():
    """Give up bad guesses and resume good ones."""
    usual, source = make_costs(1, 1.3, 1.8, 3.2, 5.5), DraftPlanner(Script([DraftToken(7, 4)] * 30))
    for _ in range(30):
        source.plan(MAX_DRAFT_TOKENS, usual, GAIN)
        source.push([5])
    assert source.plan(MAX_DRAFT_TOKENS, usual, GAIN).draft == []
    source.push([5])
    for _ in range(30):
        source.plan(MAX_DRAFT_TOKENS, usual, 99.0)
        source.push([7] * 9)
    assert len(source.plan(MAX_DRAFT_TOKENS, usual, GAIN).draft) > 5


def test_each_match_length_has_its_own_acceptance_history():
    usual, script = make_costs(1, 1.3, 1.8, 3.2, 5.5), Script([DraftToken(7, 3)] * 30)
    source = DraftPlanner(script)
    for _ in range(30):
        source.plan(MAX_DRAFT_TOKENS, usual, GAIN)
        source.push([5])
    script.guesses = SURELY
    assert len(source.plan(MAX_DRAFT_TOKENS, usual, GAIN).draft) > 5


def test_guesses_that_cost_more_than_they_save_are_not_made():
    usual, dear = make_costs(1, 1.3, 1.8, 3.2, 5.5), Script(SURELY, seconds=0.9)
    source = DraftPlanner(dear)
    for _ in range(40):
        source.plan(MAX_DRAFT_TOKENS, usual, GAIN)
        source.push([7] * 3)
    assert TRIALS <= dear.asked <= TRIALS + 2
    cheap = Script(SURELY, seconds=0.1)
    source = DraftPlanner(cheap)
    for _ in range(40):
        assert len(source.plan(MAX_DRAFT_TOKENS, usual, GAIN).draft) > 1
        source.push([7] * 16)


def test_wrong_guesses_cost_little_time():
    """Bound the time lost by confident guesses that are always wrong."""
    usual = make_costs(1, 1.3, 1.8, 3.2, 5.5)
    for seconds in (0.0, 0.2):
        script = Script(SURELY, seconds)
        source, spent = DraftPlanner(script), 0.0
        for trust in range(400):
            script.guesses = [DraftToken(7, trust % (SURE + 1))] * 30  # so much as to be believed anew
            before = script.asked
            spent += (
                usual.estimate_cost(1 + len(source.plan(MAX_DRAFT_TOKENS, usual, GAIN).draft))
                - 1
                + seconds * (script.asked - before)
            )
            source.push([5])
        assert 1 < spent < START + LOSS * 400 + usual.estimate_cost(MAX_DRAFT_TOKENS + 1) + TRIALS * seconds


def test_time_saved_by_earlier_drafts_lets_later_ones_cost_more():
    usual, script = make_costs(1, 1.3, 1.8, 3.2, 5.5), Script(SURELY)
    source, wrong = DraftPlanner(script), []
    for came in ([7] * (MAX_DRAFT_TOKENS + 1), [5]):
        read = [bool(source.plan(MAX_DRAFT_TOKENS, usual, GAIN).draft) for _ in range(20) if source.push(came) is None]
        wrong.append(read)
    assert all(wrong[0])
    assert wrong[1][0]


def test_the_speculation_budget_carries_over_to_the_next_answer():
    usual, account = make_costs(1, 1.3, 1.8, 3.2, 5.5), SpeculationBudget()
    scripts = [Script(SURELY, 0.2) for _ in range(3)]
    for script in scripts:
        script.account = account
        source = DraftPlanner(script)
        for _ in range(30):
            source.plan(MAX_DRAFT_TOKENS, usual, GAIN)
            source.push([5])
    assert scripts[0].asked > TRIALS
    assert max(script.asked for script in scripts[1:]) <= 30 * LOSS / 0.2 + 1 < TRIALS + 1


def test_costs_are_relative_to_the_first_step():
    guesses = DraftSelector([Script(SURELY)])
    assert guesses.draft(9) == []
    guesses.record(1, 1.0)
    assert guesses.draft(9) == [7] * 9
    assert guesses.draft(0) == []


def test_the_promise_of_a_draft_is_computed_exactly():
    """Charge the draft and its guesses, and credit the accepted tokens."""
    costs, script = (
        make_costs(1, 1.5, 2, 3, 5),
        Script([DraftToken(7, 8), DraftToken(8, 8), DraftToken(9, 4)], seconds=0.01),
    )
    script.account = SpeculationBudget()
    source, lost = DraftPlanner(script), []
    script.account.charge = lost.append
    first, second = 0.8, 0.8 * 0.8
    plan = source.plan(2, costs, GAIN)
    assert plan.draft == [7, 8] and plan.rate == pytest.approx((1 + first + second) / (1.75 + 0.02))
    assert lost == pytest.approx([0.02, 0.75])
    source.push([7, 8, 9, 9])
    assert lost[2:] == pytest.approx([-2.0]) and script.account.experience.usual == pytest.approx(1 - 0.3 * 0.95**2)
    first = script.account.experience.chances[8]
    plan = source.plan(9, costs.share_with_batch(1), 0.0)
    expected = [1, 1 + first, 1 + first + first**2, 1 + first + first**2 * (1 + 4 / 6)]
    rates = [
        (tokens + 1) / 2 / (costs.estimate_cost(length + 2) / 1.5 + 0.02) for length, tokens in enumerate(expected)
    ]
    assert plan.rate == pytest.approx(max(rates)) and len(plan.draft) == rates.index(max(rates))
    assert lost[3] == pytest.approx(0.03 / 1.5)
    source.push([7, 5])
    assert lost[-1] == pytest.approx(-0.5 * min(1, len(plan.draft)))
    seconds, usual, charged = script.account.seconds, script.account.experience.usual, len(lost)
    for _ in range(2):
        source.push([7])  # without a guess
        seconds, usual = 0.995 * seconds, 0.995 * usual + 0.005
    assert (script.account.seconds, script.account.experience.usual) == pytest.approx((seconds, usual))
    assert len(lost) == charged and script.account.steps == 4


@pytest.mark.parametrize(("most", "others", "length"), [(9, 0, 9), (30, 0, 15), (30, 13, 2), (30, 14, 1), (30, 15, 0)])
def test_a_draft_leaves_room_for_other_answers(most: int, others: int, length: int):
    guesses = DraftSelector([Script(SURELY)], make_costs(1, 1, 1, 1, 1))
    assert guesses.draft(most, others) == [7] * length


def test_the_most_promising_proposer_drafts():
    better, worse = [DraftToken(1, 8)] * 30, [DraftToken(2, 4)] * 30
    for order in itertools.permutations((Script(better), Script(worse))):
        guesses = DraftSelector(order)
        guesses.record(1, 1.0)
        assert set(guesses.draft(9)) == {1}


# ---- with a model ---------------------------------------------------------------------------------------------------

REPEAT = "one two three four five six seven eight nine ten\n" * 4
PROMPTS = [REPEAT + "one two three", "Once upon a time there was a small computer that wanted"]


@pytest.fixture(scope="module")
def model():
    with localllm.open(localllm.builtin_model(), threads=2) as opened:
        yield opened


def answer(model, prompt: str, speculate: str, **sampling):
    options = GenerationOptions(60, (), SamplingOptions(**sampling), None, speculate)
    generation = model.session.complete(prompt, options)
    return "".join(generation), generation


@pytest.mark.parametrize("sampling", [{"temperature": 0}, *({"seed": seed} for seed in range(4))], ids=str)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_do_not_change_the_text(model, prompt, sampling):
    expected, off = answer(model, prompt, "off", **sampling)
    text, on = answer(model, prompt, "ngram", **sampling)
    assert (text, on.tokens, on.finish_reason) == (expected, off.tokens, off.finish_reason)
    assert off.steps == max(len(off.tokens) - (off.finish_reason == "length"), 0)
    assert (off.drafted, off.accepted) == (0, 0)
    assert 0 <= on.accepted <= on.drafted
    assert on.steps == off.steps - on.accepted


def test_the_sequence_holds_only_accepted_tokens(model):
    """Let the next turn find what this one has prefilled."""
    text, first = answer(model, PROMPTS[0], "ngram", temperature=0)
    held = model.session.cache.idle[-1].tokens
    assert held == (first.prompt + first.tokens)[: len(held)]
    assert len(held) >= len(first.prompt) + len(first.tokens) - 1
    second = model.session.complete(PROMPTS[0] + text, GenerationOptions(1, (), SamplingOptions(temperature=0)))
    list(second)
    assert second.cached_tokens >= len(first.prompt)
    np.testing.assert_array_equal(second.prompt[: second.cached_tokens], held[: second.cached_tokens])


def test_a_repeating_text_takes_fewer_steps(model):
    """Force the repetition by a logit bias."""
    ids = model.tokenize(REPEAT)
    options = GenerationOptions(40, (), SamplingOptions(temperature=0), None, "ngram")
    generation = model.session.complete(ids, options)
    place = iter([*ids[:40]])
    generation._answer.sampler.sample = lambda row, allowed=None: next(place)
    list(generation)
    assert generation.tokens == ids[:40]
    assert generation.steps < 20
    assert generation.accepted > 20


# ---- with a draft model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "repeat_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("speculate", ["itself", "file"])
def test_a_draft_model_does_not_change_the_text(model, speculate, sampling, monkeypatch):
    took = StepCostModel.record
    monkeypatch.setattr(
        StepCostModel, "record", lambda costs, tokens, _: took(costs, tokens, 1.0)
    )  # whatever the machine does
    how = model if speculate == "itself" else f"draft:{localllm.builtin_model()}"
    expected = model.generate(PROMPTS[0], 40, speculate="off", **sampling)
    text = "".join(expected)
    generation = model.generate(PROMPTS[0], 40, speculate=how, **sampling)
    assert "".join(generation) == text
    assert generation.tokens == expected.tokens
    assert generation.steps == expected.steps - generation.accepted
    assert generation.accepted >= len(generation.tokens) // 2, "it says what it would say"


def test_a_draft_model_is_opened_once_and_closed_with_the_model():
    path = str(localllm.builtin_model())
    with localllm.open(path, threads=1) as model:
        for _ in range(2):
            "".join(model.generate("Hi", 3, speculate=f"draft:{path}"))
        (opened,) = model._draft_models.values()
    with pytest.raises(localllm.LocalllmError, match="closed"):
        opened.logits([1])


class Words:
    """A tokenizer with `count` tokens."""

    def __init__(self, count: int, **other: str):
        self.pieces = [other.get(f"w{i}", f"word {i}") for i in range(count)]


@pytest.mark.parametrize("count", [500, 500 + MAX_PADDING, 500 - MAX_PADDING])
def test_a_padded_vocabulary_is_accepted_for_drafts(count):
    ModelDrafter(PrefixCache(FakeEngine(500, lambda tokens: 0)), Words(count)).require_vocabulary(Words(500))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (Words(501 + MAX_PADDING), "629 tokens, but the model has 500"),
        (Words(500, w17="x"), "token 17 is 'x', but 'word 17' in the model"),
    ],
    ids=["longer", "other"],
)
def test_a_draft_model_with_another_vocabulary_is_refused(words, problem):
    with pytest.raises(UsageError, match=f"a different vocabulary.*{problem}"):
        ModelDrafter(PrefixCache(FakeEngine(500, lambda tokens: 0)), words).require_vocabulary(Words(500))


def counting(tokens: list[int]) -> int:
    """Follow a number by the next one."""
    return (tokens[-1] + 1) % 50


SAMPLER = Sampler(SamplingOptions(temperature=0), 50)


def test_a_draft_model_proposes_its_next_tokens():
    engine = FakeEngine(50, counting)
    drafter = ModelDrafter(PrefixCache(engine), Words(50))
    with drafter.open_proposer([1, 2, 3], SAMPLER, frozenset([12])) as proposer:
        assert engine.calls == [(0, 2)], "what was there before is read before anybody waits for guesses"
        assert first(proposer, 3) == [4, 5, 6]
        assert engine.calls[1:] == [(2, 1), (3, 1), (4, 1)]
        proposer.push([4, 5, 9])
        assert first(proposer, 2) == [10, 11]
        assert engine.calls[4:] == [(5, 1), (6, 1)], "two guesses were right and are not read again"
        proposer.push([10])
        proposer.push([11])
        assert first(proposer, 5) == [12], "behind the end comes nothing"
        (sequence,) = engine.open_sequences
        assert sequence.tokens == [1, 2, 3, 4, 5, 9, 10, 11]
    with (
        drafter.open_proposer([1, 2, 3, 4, 5, 6, 7], SAMPLER, frozenset()),
        drafter.open_proposer([9], SAMPLER, frozenset()),
    ):
        assert engine.calls[-1] == (5, 1), "the next answer goes on with what the last one has read"
        assert len(engine.open_sequences) == 2
    drafter.collect()
    assert len(engine.open_sequences) == 1


def test_a_draft_model_skips_tokens_beyond_its_vocabulary():
    engine = FakeEngine(40, counting, context=8)
    drafter = ModelDrafter(PrefixCache(engine), Words(40))
    with drafter.open_proposer([1, 2, 3], SAMPLER, frozenset()) as proposer:
        assert first(proposer, 9) == [4, 5, 6, 7, 8, 9], "its context is full"
        proposer.push([40])
        assert first(proposer, 9) == []
    with drafter.open_proposer([1, 40, 3], SAMPLER, frozenset()) as proposer:
        assert first(proposer, 9) == []


def test_a_draft_model_without_allowed_tokens_proposes_nothing():
    """Forbid all tokens that the smaller vocabulary has."""
    drafter = ModelDrafter(PrefixCache(FakeEngine(40, counting)), Words(40))
    sampler = Sampler(SamplingOptions(logit_bias=dict.fromkeys(range(40), -math.inf)), 50)
    with drafter.open_proposer([1, 2, 3], sampler, frozenset()) as proposer:
        assert first(proposer, 9) == []


def test_a_draft_model_follows_a_copy_of_the_token_mask():
    """Leave the answer's own mask untouched."""

    class Guiding:
        def __init__(self, said: int = 0):
            self.said, self.asked = said, []

        def copy(self) -> "Guiding":
            return Guiding(self.said)

        def compute_allowed_mask(self, vocab: int) -> np.ndarray:
            return np.arange(vocab) % 3 == 0

        def accept(self, token: int) -> None:
            self.said += 1

        @property
        def has_ended(self) -> bool:
            return self.said == 2

    guide = Guiding()
    drafter = ModelDrafter(PrefixCache(FakeEngine(50, lambda tokens: 6 if tokens[-1] == 3 else 9)), Words(50))
    with drafter.open_proposer([1, 2, 3], SAMPLER, frozenset(), guide) as proposer:
        assert first(proposer, 9) == [6, 9] and guide.said == 0


class Opened:
    """A file that may hold a draft head."""

    def __init__(self, metadata: dict):
        self.path, self.metadata, self.closed = "head.gguf", metadata, 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(("path", "is_head", "tokens", "uses", "closed", "problem"), [
    ("known", True, None, [], 0, None), ("a", False, None, [], 1, None), ("a", True, None, [1], 0, None),
    ("a", True, 50, [1], 0, None),
    ("a", True, 500, [], 0, "a different vocabulary: 500 tokens, but the model has 50"),
    ("a", True, -1, [], 0, "^a: no vocabulary$"),
])  # fmt: skip
def test_a_draft_head_is_attached_and_any_other_file_closed(path, is_head, tokens, uses, closed, problem, monkeypatch):
    used, file = [], Opened({} if tokens is None else {heads.TOKENS: tokens})
    sequences: Any = PrefixCache(FakeEngine(50, counting))
    sequences.engine.draft_head_path, sequences.engine.load_draft_head = "known", lambda file: used.append(1)

    def words(metadata: dict) -> Words:
        if metadata[heads.TOKENS] < 0:
            raise ModelError("no vocabulary")
        return Words(metadata[heads.TOKENS])

    monkeypatch.setattr(heads, "GGUFFile", SimpleNamespace(open=lambda path: file))
    monkeypatch.setattr(heads, "is_draft_head", lambda file: is_head)
    monkeypatch.setattr(heads, "Tokenizer", SimpleNamespace(from_metadata=words))
    with pytest.raises((UsageError, ModelError), match=problem) if problem else nullcontext():
        assert heads.attach_draft_head(path, sequences, Words(50)) == is_head
    assert (used, file.closed) == (uses, closed)


@pytest.mark.sampled
@pytest.mark.slow
def test_drafts_keep_the_sampling_distribution():
    """Use a chi-square test over all pairs of tokens, with a draft model that often errs."""
    random = np.random.default_rng(4)
    target, draft = (random.normal(0, 1, (3, 3)).astype(np.float32) for _ in range(2))
    options = dict(top_k=0, top_p=1.0, min_p=0.0, temperature=1.0)
    counts, agreed, runs = Counter[tuple[int, int]](), 0, 20000
    for seed in range(runs):
        sampler = Sampler(SamplingOptions(seed=seed, **options), 3)
        twin, guesses, text = sampler.copy(), [0], [0]
        for _ in range(2):
            guesses.append(twin.sample(draft[guesses[-1]]))
        while len(text) < 3:
            text.append(sampler.sample(target[text[-1]]))
        counts[text[1], text[2]] += 1
        agreed += text[1] == guesses[1]
    p, q = (np.exp(table) / np.exp(table).sum(axis=1, keepdims=True) for table in (target, draft))
    expected = {(i, j): runs * p[0, i] * p[i, j] for i in range(3) for j in range(3)}
    statistic = sum((counts[pair] - expected[pair]) ** 2 / expected[pair] for pair in expected)
    assert statistic < 26.1, "once in a thousand times, with 8 degrees of freedom"
    most = np.minimum(p[0], q[0]).sum()  # what the rule of Leviathan et al. keeps
    assert most / (2 - most) - 0.02 < agreed / runs < most + 0.02


def test_run_accepts_a_draft_model(cli, refused, tmp_path: Path):
    tiny, other = str(write_tiny_model(tmp_path / "tiny.gguf")), str(localllm.builtin_model())
    greedy = ("-n", "12", "--temp", "0", "-t", "1", "-c", "256")
    expected = json.loads(cli("run", tiny, "-p", "Hi", "--json", "--speculate", "off", *greedy)[1])
    code, out, err = cli("run", tiny, "-p", "Hi", "--json", "--speculate", f"draft:{tiny}", *greedy)
    answer = json.loads(out)
    assert (code, err, answer["tokens"]) == (0, "", expected["tokens"])
    guesses = answer["speculation"]
    assert guesses.keys() == {"drafted", "accepted", "steps_saved"}
    assert guesses["steps_saved"] == guesses["accepted"] <= guesses["drafted"]
    code, out, err = cli("chat", tiny, "--speculate", f"draft:{tiny}", *greedy, stdin=b"Hi")
    assert (code, out) == (0, expected["text"] + "\n")
    for arguments, wrong, message in (
        ((), "draft:", "must be auto, mtp, ngram, off or draft:MODEL, not 'draft:'"),
        ((), "x", "must be auto, mtp, ngram, off or draft:MODEL, not 'x'"),
        ((), f"draft:{other}", "a different vocabulary"),
        (("--n", "2"), f"draft:{tiny}", "for a single answer"),
    ):
        refused(["run", tiny, "-p", "Hi", "--speculate", wrong, *arguments, *greedy], message)
    code, out, err = cli("run", tiny, "-p", "Hi", "--speculate", "draft:nowhere.gguf", *greedy)
    assert code == 3 and "nowhere.gguf" in err
