"""Test logits_processor and stopping_criteria: called once per token, in order, with and without drafts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.errors import UsageError

PROMPT = "hello world, hello world, hello world, hello"


@pytest.fixture(scope="module")
def model(tiny: str) -> Iterator[localllm.Model]:
    with localllm.open(tiny, threads=1, context=256, cache=False) as opened:
        yield opened


def biased(ids: list[int], logits: np.ndarray) -> np.ndarray:
    """Prefer the token eight positions back, so that the text repeats, and token 4 each seventh time."""
    logits[ids[-8]] += 100
    if len(ids) % 7 == 0:
        logits[40] += 200
    return logits


def expected(model: localllm.Model, count: int) -> list[int]:
    """Return the tokens by the logits of the whole text, one by one: the oracle."""
    ids = model.tokenize(PROMPT)
    for _ in range(count):
        ids.append(int(biased(ids, model.logits(ids)[-1].copy()).argmax()))
    return ids[-count:]


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_tokens_are_drawn_from_the_processed_logits(model: localllm.Model, speculate: str):
    seen = list[int]()

    def process(ids: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append(len(ids))
        return biased(ids, logits)

    answer = model.generate(PROMPT, 40, speculate=speculate, temperature=0, logits_processor=process, logprobs=True)
    list(answer)
    assert answer.tokens == expected(model, 40)
    begin = len(answer.prompt)
    assert seen == [*range(begin, begin + 40)]
    assert (answer.accepted > 0) is (speculate == "ngram")
    row = model.logits([*answer.prompt, *answer.tokens])[begin - 1].astype(np.float64)
    own = row[answer.tokens[0]] - row.max() - np.log(np.exp(row - row.max()).sum())
    assert answer.logprobs[0].chosen.logprob == pytest.approx(own, abs=1e-3)  # the model's, not the processor's


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_stopping_criteria_end_the_answer(model: localllm.Model, speculate: str):
    options: dict[str, Any] = {"speculate": speculate, "temperature": 0, "logits_processor": biased}
    whole = model.generate(PROMPT, 40, **options)
    list(whole)
    end = len(whole.prompt) + 11
    cut = model.generate(PROMPT, 40, stopping_criteria=lambda ids, logits: len(ids) == end, **options)
    text = "".join(cut)
    assert cut.tokens == whole.tokens[:11] and cut.finish_reason == "stop"
    assert text == model.tokenizer.decode(cut.tokens)


def test_a_grammar_masks_the_processed_logits(model: localllm.Model):
    answer = model.generate("?", grammar='root ::= "yes" | "no"', logits_processor=lambda ids, logits: logits * 0)
    assert "".join(answer) in ("yes", "no")


def test_callables_get_copies_of_ids_and_logits(model: localllm.Model):
    def spoil(ids: list[int], logits: np.ndarray) -> bool:
        ids.clear()
        logits[:] = np.nan
        return False

    plain, watched = (
        model.generate(PROMPT, 8, temperature=0, **callables) for callables in ({}, {"stopping_criteria": spoil})
    )
    assert "".join(plain) == "".join(watched)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.zeros(3, np.float32), r"must return logits of the shape \(268,\), not \(3,\)"),
        (None, "must return logits of the shape"),
        (np.full(268, -np.inf), "must return at least one finite logit"),
        (np.full(268, np.nan), "must return at least one finite logit"),
    ],
)
def test_invalid_processed_logits_are_refused(model: localllm.Model, returned: Any, message: str):
    with pytest.raises(UsageError, match=message):
        list(model.generate(PROMPT, 8, logits_processor=lambda ids, logits: returned))
    assert len("".join(model.generate("hello", 2, temperature=0))) > 0  # the model goes on


def test_errors_of_callables_are_raised(model: localllm.Model):
    with pytest.raises(ZeroDivisionError):
        list(model.generate(PROMPT, 8, stopping_criteria=lambda ids, logits: bool(1 / 0)))
    assert len("".join(model.generate("hello", 2, temperature=0))) > 0


@pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria"])
def test_logits_callables_must_be_functions_and_exclude_beams(model: localllm.Model, name: str):
    with pytest.raises(UsageError, match=f"{name} must be a function"):
        model.generate(PROMPT, **{name: 3})
    with pytest.raises(UsageError, match=f"{name} cannot be combined with beams"):
        model.candidates(PROMPT, beams=2, max_tokens=2, **{name: lambda ids, logits: logits})


def test_stopping_criteria_do_not_break_a_constraint(model: localllm.Model):
    with pytest.raises(UsageError, match="stopping_criteria cannot be combined with a constraint"):
        model.generate(PROMPT, regex="a+", stopping_criteria=lambda ids, logits: True)


def test_map_applies_stopping_criteria_to_each_prompt(model: localllm.Model):
    answers = model.map([PROMPT, "hello"], 6, temperature=0, stopping_criteria=lambda ids, logits: len(ids) >= 5)
    assert [answer.completion_tokens for answer in answers] == [0, 5 - len(model.tokenize("hello"))]
