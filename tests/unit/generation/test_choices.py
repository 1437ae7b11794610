"""Test log probabilities: those of an answer's tokens, and exact ones of given texts."""

import json
import math
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.errors import ContextError, UsageError
from localllm.generation.choices import PARALLEL, Choice, TokenTrie, drop_prefixes, score_request
from localllm.generation.logprobs import TokenLogprob, compute_prompt_logprobs
from localllm.generation.request import Request
from localllm.generation.sampling.sampler import log_sum_exp

MESSAGES = [{"role": "user", "content": "Is it good?"}]


@pytest.fixture(scope="module")
def model():
    with localllm.open(localllm.builtin_model(), threads=1, cache=False) as opened:
        yield opened


def logprob(model: localllm.Model, prompt: list[int], ids: list[int]) -> float:
    """Read prompt and ids in one run."""
    rows = model.logits([*prompt, *ids])[len(prompt) - 1 :]
    return sum(float(row[token]) - log_sum_exp(row) for row, token in zip(rows, ids, strict=False))


def test_tokens_of_an_answer_have_log_probabilities(model: localllm.Model):
    answer = model.chat(MESSAGES, 6, temperature=0, top_logprobs=3)
    "".join(answer)
    assert [each.chosen.token for each in answer.logprobs] == answer.tokens and len(answer.tokens) > 2
    assert all(len(each.likeliest) == 3 and each.likeliest[0] == each.chosen for each in answer.logprobs)
    total = sum(each.chosen.logprob for each in answer.logprobs)
    assert total == pytest.approx(logprob(model, answer.prompt, answer.tokens), abs=2e-2)
    plain = model.chat(MESSAGES, 6, temperature=0, logprobs=True)
    "".join(plain)
    assert [each.chosen.token for each in plain.logprobs] == answer.tokens
    assert [each.chosen for each in plain.logprobs] == [each.chosen for each in answer.logprobs]  # now from the cache
    assert plain.logprobs[0].likeliest == () and model.chat(MESSAGES, 1).logprobs == []
    (mapped,) = model.map([MESSAGES], 6, temperature=0, logprobs=True)
    assert [each.chosen.token for each in mapped.logprobs] == mapped.tokens


def test_texts_are_scored_by_the_sum_of_their_tokens(model: localllm.Model):
    prompt, text = "The model", " is a file of weights"
    score = model.score(prompt, text)
    ids = model.tokenizer.encode_inside(text)
    assert [each.token for each in score.tokens] == ids
    expected = logprob(model, model.tokenize(prompt, special=True, bos=True), ids)
    assert score.logprob == pytest.approx(expected, abs=2e-2)
    assert score.logprob == pytest.approx(sum(t.logprob for t in score.tokens))
    assert model.score(model.tokenize(prompt, special=True, bos=True), text).logprob == pytest.approx(
        expected, abs=2e-2
    )


def test_measurements_use_16_bit_activations_for_any_prompt_length(model: localllm.Model):
    """Compare with runs short enough for 16 bits; 8 bits are used only on request."""
    ids = model.tokenize("Each model is a file of weights, and each prompt is read by it in runs. " * 20)[:330]
    with closing(model.sequence()) as sequence:
        rows = np.concatenate([sequence.append(ids[first : first + 33], "all") for first in range(0, 330, 33)])
    expected = [float(row[token]) - log_sum_exp(row) for row, token in zip(rows, ids[1:], strict=False)]
    echoed, _ = compute_prompt_logprobs(model.sequence(), ids, 0)
    assert [each.chosen.logprob for each in echoed] == pytest.approx(expected, abs=1e-4)
    for precise in (True, False):
        score = text_logprobs_of(model, ids, 250, precise)
        logits = model.logits(ids, precise)
        errors = [abs(a - b) for a, b in zip(score, expected[249:], strict=True)]
        assert (max(errors) < 1e-4) == precise and (np.abs(logits - rows).max() < 1e-3) == precise


def text_logprobs_of(model: localllm.Model, ids: list[int], prompt: int, precise: bool) -> list[float]:
    """Return the log probabilities of the tokens after the first `prompt` ones."""
    request = Request(model.session.request(ids[:prompt]).task)
    cache, tree = model.session.cache, TokenTrie([ids[prompt:]])
    (tokens,) = score_request(cache, model.tokenizer, request, tree, precise)
    return [token.logprob for token in tokens]


def test_measuring_a_prompt_does_not_change_its_answer(model: localllm.Model):
    prompt = "Each model is a file of weights, and each prompt is read by it in runs. " * 12

    def answer() -> list[TokenLogprob]:
        generation = model.generate(prompt, 5, temperature=0, logprobs=True, ban=["no such text"])
        "".join(generation)
        return [each.chosen for each in generation.logprobs]

    before, score = answer(), model.score(prompt, " Yes.")
    assert answer() == before and model.score(prompt, " Yes.") == score


def test_choices_are_exact_with_the_end_of_an_answer(model: localllm.Model):
    texts = ["yes", "yes it is", "no", "not at all", "maybe"]
    prompt = model.chat(MESSAGES, 1, think="off").prompt
    choices = model.choose(MESSAGES, texts)
    assert sorted(choice.text for choice in choices) == sorted(texts)
    assert [choice.logprob for choice in choices] == sorted((choice.logprob for choice in choices), reverse=True)
    for choice in choices:
        ids = model.tokenize(choice.text)
        row = model.logits([*prompt, *ids])[-1].astype(np.float64)
        end = math.log(sum(math.exp(float(row[token]) - log_sum_exp(row)) for token in model.tokenizer.end_ids))
        assert choice.logprob == pytest.approx(logprob(model, prompt, ids) + end, abs=5e-2), choice
        assert choice.probability == pytest.approx(
            math.exp(choice.logprob) / sum(math.exp(each.logprob) for each in choices)
        )
    assert sum(choice.probability for choice in choices) == pytest.approx(1)
    again = model.choose(MESSAGES, texts[::-1])
    assert [choice.text for choice in again] == [choice.text for choice in choices]


def test_choose_does_not_change_the_next_answer(model: localllm.Model):
    before = "".join(model.chat(MESSAGES, 8, temperature=0))
    model.choose(MESSAGES, ["yes", "no"])
    assert "".join(model.chat(MESSAGES, 8, temperature=0)) == before


def compute_choices(model: localllm.Model, prompt: list[int], texts: list[str]) -> dict[str, float]:
    """Return each text's probability by prefilling prompt and text anew: the oracle."""
    return {text: logprob(model, prompt, model.tokenize(text)) for text in texts}


CHOICES = [
    ["A", "B", "C"],  # of a token each: nothing is read behind the prompt
    ["the model is good and small", "the model is bad", "it is neither good nor bad"],
    [
        f"the answer of the model to the first question of the user is {word}"
        for word in ("yes it is", "no it is", "unknown to it")
    ],  # a stem
]


@pytest.mark.parametrize("texts", CHOICES)
@pytest.mark.parametrize("precise", [True, False])
def test_choices_are_the_products_of_their_tokens_probabilities(model: localllm.Model, texts: list[str], precise: bool):
    """Omit the end of the answer, as no text is a prefix of another."""
    prompts = [[{"role": "user", "content": f"Is {word} good?"}] for word in ("it", "a cat " * 9, "rain", "snow") * 5]
    many = list(model.choose_many(prompts, texts, precise))
    for prompt, choices in zip(prompts[:4], many, strict=False):
        expected = compute_choices(model, model.chat(prompt, 1, think="off").prompt, texts)
        assert {one.text: one.logprob for one in choices} == pytest.approx(expected, abs=2e-2 if precise else 0.3)
        assert {one.text: one.logprob for one in model.choose(prompt, texts)} == pytest.approx(expected, abs=2e-2)
    assert len(many) == 20
    for number, choices in enumerate(many):
        first = {one.text: one.logprob for one in many[number % 4]}
        assert {one.text: one.logprob for one in choices} == pytest.approx(first, abs=1e-2 if precise else 0.3)


def test_choose_prefills_the_prompt_and_shared_prefixes_once(model: localllm.Model, monkeypatch: pytest.MonkeyPatch):
    """Run only the tokens that the first ones do not decide."""
    read = list[int]()
    run = model.engine._run_batch

    def counted(requests, readings, *rest):
        read.append(sum(len(reading.ids) for reading in readings))
        return run(requests, readings, *rest)

    monkeypatch.setattr(model.engine, "_run_batch", counted)
    tokens = []
    for number, texts in enumerate(CHOICES):
        prompt = [{"role": "user", "content": f"{number} good?"}]
        model.choose(prompt, texts)
        tokens.append([*read])
        read.clear()
    assert [len(runs) for runs in tokens] == [1, 2, 3]
    ids = [model.tokenize(text) for text in CHOICES[2]]
    stem = next(place for place, several in enumerate(zip(*ids, strict=False)) if len(set(several)) > 1)
    first, second, third = [len(model.tokenize(text)) - 1 for text in CHOICES[1]]
    assert tokens[1][1] == first + third > second  # all but the last token of the second is read with the first
    assert tokens[2][1:] == [stem, sum(len(each) - 1 - stem for each in ids)]


def test_texts_with_a_common_prefix_are_prefilled_once():
    assert drop_prefixes([(), (1,), (1, 2), (3,), (1, 2, 4), (1, 5)]) == [(1, 2, 4), (1, 5), (3,)]
    assert drop_prefixes([()]) == [] and Choice("a", -1.0, 1.0).text == "a"


@pytest.mark.parametrize("texts", ["ab", [], ["a", ""], ["a", "a"], [1], None])
def test_invalid_choices_are_refused(model: localllm.Model, texts):
    with pytest.raises(UsageError, match=r"^choices must be "):
        model.choose(MESSAGES, texts)


def test_choices_that_exceed_the_context_are_refused(tiny: str):
    with localllm.open(tiny, threads=1, context=64, cache=False) as small:
        with pytest.raises(ContextError, match="the longest text"):
            small.choose("Hi", ["a " * 100, "b"])
        with pytest.raises(ContextError):
            small.choose("Hi " * 100, ["a", "b"])
        with pytest.raises(UsageError, match="top_logprobs must be 0 or greater"):
            small.generate("Hi", top_logprobs=-1)


# ---- commands

GUIDE = str(localllm.builtin_model())


def test_run_prints_the_likeliest_choice_or_all(cli, model: localllm.Model):
    code, out, _ = cli("run", GUIDE, "Is it good?", "--choices", 'yes, no , "not, at all"')
    expected = model.choose(MESSAGES, ["yes", "no", "not, at all"])
    assert (code, out) == (0, expected[0].text + "\n")
    _, out, _ = cli("run", GUIDE, "Is it good?", "--choices", 'yes,no,"not, at all"', "--json")
    result = json.loads(out)
    assert result["text"] == expected[0].text and [each["text"] for each in result["choices"]] == [
        c.text for c in expected
    ]
    assert [each["probability"] for each in result["choices"]] == pytest.approx(
        [c.probability for c in expected], abs=0.02
    )


@pytest.mark.parametrize("fast", [[], ["--fast"]])
def test_map_classifies_lines_by_choices(cli, model: localllm.Model, fast: list[str]):
    options = ["-p", "Is this good? {line}", "--choices", "yes,no", *fast]
    code, out, _ = cli("map", GUIDE, *options, stdin=b"One\nTwo\n")
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [result["input"] for result in results] == ["One", "Two"]
    for result in results:
        question = [{"role": "user", "content": f"Is this good? {result['input']}"}]
        choices = model.choose(question, ["yes", "no"])
        assert result["output"] == choices[0].text
        close = pytest.approx(choices[0].probability, abs=0.1 if fast else 0.02)
        assert result["probabilities"][choices[0].text] == close


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", GUIDE, "x", "--choices", "a,a"], "choices must be different, non-empty strings"),
        (["run", GUIDE, "x", "--choices", ""], "choices must be different"),
        (["run", GUIDE, "x", "--choices", "a,b", "--n", "2"], "--choices cannot be combined with --n"),
        (["run", GUIDE, "x", "--choices", "a,b", "--regex", "a|b"], "combined with a schema"),
        (["map", GUIDE, "--choices", "a,b", "--n", "2"], "--choices cannot be combined with --n"),
    ],
)
def test_choices_refuse_conflicting_options(refused, arguments: list[str], message: str):
    refused(arguments, message, stdin=b"x\n")


def test_choose_many_equals_choose_for_each_prompt(model: localllm.Model):
    """Return an error in place of its prompt."""
    prompts = [[{"role": "user", "content": f"Is {word} good?"}] for word in ("it", "a cat " * 9, "rain", "x")]
    mixed = [*prompts, "It is", [{"role": "user", "content": "y " * 5000}], prompts[0]]
    together = list(model.choose_many(mixed, ["yes", "no it is not"]))
    assert [isinstance(each, ContextError) for each in together] == [False] * 5 + [True, False]
    for prompt, choices in zip(mixed, together, strict=True):
        if not isinstance(choices, ContextError):
            alone = {choice.text: choice.logprob for choice in model.choose(prompt, ["yes", "no it is not"])}
            assert {choice.text: choice.logprob for choice in choices} == pytest.approx(alone, abs=5e-2)
    same = list(model.choose_many(prompts, ["yes", "no"]))
    for prompt, choices in zip(prompts, same, strict=True):
        assert choices[0].logprob == pytest.approx(model.choose(prompt, ["yes", "no"])[0].logprob, abs=5e-2)


def test_choose_many_yields_results_before_it_has_read_all_prompts(model: localllm.Model):
    prompts = iter(["It is"] * 4 * PARALLEL)
    chosen: Any = model.choose_many(prompts, ["yes", "no"])
    with closing(chosen) as results:
        assert len([next(results), next(results)]) == 2 and next(prompts)


@pytest.mark.parametrize(("asked", "count"), [
    ({"logprobs": 5}, 5), ({"logprobs": np.int64(5)}, 5), ({"logprobs": True}, 0), ({"logprobs": 0}, 0),
    ({"logprobs": True, "top_logprobs": 2}, 2), ({"logprobs": 2, "top_logprobs": 2}, 2), ({"top_logprobs": 0}, 0),
    ({"logprobs": False}, None), ({"logprobs": None}, None), ({}, None),
])  # fmt: skip
def test_logprobs_may_be_the_number_of_alternatives(model: localllm.Model, asked: dict[str, Any], count: int | None):
    answer = model.generate("Hello", 2, temperature=0, **asked)
    assert answer.text is not None
    assert [len(token.likeliest) for token in answer.logprobs] == ([] if count is None else [count] * 2)


@pytest.mark.parametrize(("asked", "reason"), [
    ({"logprobs": "5"}, "logprobs must be an integer, not '5'"),
    ({"logprobs": 5.5}, "logprobs must be an integer, not 5.5"),
    ({"logprobs": -1}, "logprobs must be 0 or greater, not -1"),
    (
        {"logprobs": 5, "top_logprobs": 3},
        "logprobs and top_logprobs must not differ (found 5 and 3): give only one of them",
    ),
    ({"top_logprobs": True}, "top_logprobs must be an integer, not True"),
    ({"json_whitespace": "no", "schema": {}}, "json_whitespace must be True or False, not 'no'"),
    ({"additional_properties": 1, "schema": {}}, "additional_properties must be True or False, not 1"),
    ({"continue_final": "yes"}, "continue_final must be True or False, not 'yes'"),
    ({"json_calls": 0, "tools": []}, "json_calls must be True or False, not 0"),
])  # fmt: skip
def test_logprobs_of_another_type_are_refused(model: localllm.Model, asked: dict[str, Any], reason: str):
    with pytest.raises(UsageError) as failure:
        model.chat(MESSAGES, 2, **asked)
    assert str(failure.value) == reason
