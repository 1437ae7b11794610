"""Speculative decoding: the same text in fewer steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import localllm
from localllm.generation.generate import GenerationOptions
from localllm.generation.sampling import SamplingOptions
from localllm.generation.speculation import LENGTHS, Guesses, NGrams, Pace

# ---- n-grams --------------------------------------------------------------------------------------------------------


def longest_repeated_end(tokens: list[int]) -> int:
    """The length of the longest end of the text that is also somewhere before, by trying."""
    ends = range(len(tokens) - 1, 0, -1)
    return next((n for n in ends if any(tokens[i : i + n] == tokens[-n:] for i in range(len(tokens) - n))), 0)


@given(st.lists(st.integers(0, 3), max_size=40))
def test_ngrams_find_the_longest_repeated_end(tokens):
    grams = NGrams()
    for count, token in enumerate(tokens, 1):
        grams.push(token)
        draft, support = grams.propose(3)
        longest = longest_repeated_end(tokens[:count])
        assert support == (longest if longest > 1 else 0)
        if support:
            begins = [i for i in range(count - support) if tokens[i : i + support] == tokens[count - support : count]]
            assert draft in [tokens[i + support : count][:3] for i in begins]
            assert draft


def test_ngrams_prefer_what_was_last():
    grams = NGrams([1, 2, 8, 0, 1, 2])
    assert grams.propose(1) == ([8], 2)
    for token in (9, 0, 0, 1, 2):
        grams.push(token)
    assert grams.propose(1)[0] == [9]


def test_a_new_text_has_no_guesses():
    assert NGrams().propose(5) == ([], 0)
    assert NGrams([4, 5, 6]).propose(5) == ([], 0)
    assert NGrams([4, 5, 4]).propose(5) == ([], 0), "one token says too little"


# ---- pace -----------------------------------------------------------------------------------------------------------


def measured(*costs: float) -> Pace:
    pace = Pace()
    for tokens, cost in zip((1, 2, 4, 8, 16), costs, strict=True):
        pace.took(tokens, cost)
    return pace


def test_a_draft_is_as_long_as_it_pays():
    free, dear = measured(1, 1, 1, 1, 1), measured(1, 2.2, 4.4, 8.8, 17.6)
    assert free.length(15, 16) == LENGTHS[-1]
    assert free.length(5, 16) == 3, "there are no more"
    assert free.length(0, 16) == 0
    assert dear.length(15, 16) == 0


def test_experience_counts():
    pace = measured(1, 1.3, 1.8, 3.2, 5.5)
    for _ in range(20):
        pace.was_right(4, 3, 0)
    assert pace.length(15, 4) == 0
    assert pace.length(15, 16) > 0, "other agreements are another experience"
    for _ in range(40):
        pace.was_right(4, 15, 15)
    assert pace.length(15, 4) == LENGTHS[-1]


def test_guesses_go_by_the_text():
    guesses = Guesses([5, 6, 7, 8, 9, 5, 6, 7])
    assert guesses.draft(1) == [8]
    assert guesses.draft(0) == []
    guesses.learn([8], 1, 1)
    assert guesses.draft(15)[:1] == [9]


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
def test_the_text_is_the_same(model, prompt, sampling):
    expected, off = answer(model, prompt, "off", **sampling)
    text, on = answer(model, prompt, "ngram", **sampling)
    assert (text, on.tokens, on.finish_reason) == (expected, off.tokens, off.finish_reason)
    assert off.steps == max(len(off.tokens) - (off.finish_reason == "length"), 0)
    assert (off.drafted, off.accepted) == (0, 0)
    assert 0 <= on.accepted <= on.drafted
    assert on.steps <= off.steps


def test_the_sequence_holds_what_was_said(model):
    """The next turn finds what this one has read, and nothing that was only guessed."""
    text, first = answer(model, PROMPTS[0], "ngram", temperature=0)
    held = model.session.sequences._kept.tokens
    assert held == (first.prompt + first.tokens)[: len(held)]
    assert len(held) >= len(first.prompt) + len(first.tokens) - 1
    second = model.session.complete(PROMPTS[0] + text, GenerationOptions(1, (), SamplingOptions(temperature=0)))
    list(second)
    assert second.cached_tokens >= len(first.prompt)
    np.testing.assert_array_equal(second.prompt[: second.cached_tokens], held[: second.cached_tokens])


def test_where_the_text_repeats_itself_there_are_fewer_steps(model):
    """The sampler draws what the text has had before: a bias that leaves it no choice."""
    ids = model.tokenize(REPEAT)
    options = GenerationOptions(40, (), SamplingOptions(temperature=0), None, "ngram")
    generation = model.session.complete(ids, options)
    place = iter([*ids[:40]])
    generation._sampler.sample = lambda row, allowed=None: next(place)
    list(generation)
    assert generation.tokens == ids[:40]
    assert generation.steps < 20
    assert generation.accepted > 20
