"""Test what Python shows of a model: log probabilities, offsets, hidden states, attention, hooks and prompts."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import write_model

import localllm
from localllm.engine.operations import attention
from localllm.errors import ContextError, LocalllmError, UnsupportedError, UsageError
from localllm.generation.inspection import HookedModel
from localllm.generation.logprobs import compute_prompt_logprobs
from localllm.text.offsets import locate_tokens

TEXT = "hello there, how are you"
ASKED = [{"role": "user", "content": "hi there"}]


@pytest.fixture(scope="module")
def model(tiny: str) -> Any:
    with localllm.open(tiny, threads=2, context=512, kv_type="f32", cache=False) as opened:
        yield opened


def test_log_probabilities_are_those_of_the_prompt(model: localllm.Model):
    scores, ids = model.logprobs(TEXT, top=3), model.tokenize(TEXT, special=True, bos=True)
    expected, _ = compute_prompt_logprobs(model.sequence(), ids, 3)
    assert [token.token for token in scores] == ids and scores[0].logprob is None
    assert [token.logprob for token in scores[1:]] == [each.chosen.logprob for each in expected]
    assert scores[1].likeliest == expected[0].likeliest and len(scores[1].likeliest) == 3
    assert scores.logprob == pytest.approx(sum(each.chosen.logprob for each in expected))
    assert scores.perplexity == pytest.approx(np.exp(-scores.logprob / len(expected)))


def test_scores_become_tables(model: localllm.Model):
    scores = model.logprobs("a|b", top=1)
    assert repr(scores).startswith(f"TextScores({len(scores)} tokens, logprob=")
    lines = scores._repr_markdown_().splitlines()
    assert len(lines) == len(scores) + 4 and all(line.count("|") == 4 for line in lines[2:-2])
    assert scores.to_dicts()[1]["likeliest"] == [tuple(scores[1].likeliest[0])]


@pytest.mark.parametrize("text", [TEXT, "naïve 日本語 €5", " two  spaces\n\n", "a"])
def test_offsets_cut_the_text_into_its_tokens(model: localllm.Model, text: str):
    scores = model.logprobs(text)
    spans = [(token.start, token.end) for token in scores if token.start is not None and token.end is not None]
    assert spans[0][0] == 0 and spans[-1][1] == len(text)
    for (_, end), (start, _) in pairwise(spans):
        assert start in (end, end - 1)  # bytes of one character are several tokens
    for token in scores:
        if "�" not in token.text and token.start is not None:
            assert token.text.strip() == text[token.start : token.end].strip()


def test_offsets_of_a_tokenizer_that_changes_texts_are_refused(model: localllm.Model):
    ids = model.tokenize("hello")
    with pytest.raises(UnsupportedError, match="offsets of tokens are unknown"):
        locate_tokens(model.tokenizer, ids, "HELLO")


def test_token_ids_have_no_offsets(model: localllm.Model):
    assert {(token.start, token.end) for token in model.logprobs(model.tokenize(TEXT))} == {(None, None)}


def test_many_scores_equal_single_ones(model: localllm.Model):
    pairs: list[Any] = [("hello", " you"), (ASKED, "hi"), ("a", "b c d")]
    many = [*model.score_many(pairs)]
    assert many == [model.score(prompt, text) for prompt, text in pairs]


def test_a_pair_that_cannot_be_scored_gives_its_error(model: localllm.Model):
    scores = [*model.score_many([("a", "b"), ("a " * 600, "b"), ("a", "b")])]
    assert isinstance(scores[1], ContextError) and scores[0] == scores[2]
    (wrong,) = model.score_many(["ab"])
    assert isinstance(wrong, LocalllmError) and "pairs of a prompt and a text" in str(wrong)


def test_a_rendered_conversation_has_the_tokens_of_the_prompt(model: localllm.Model):
    text = model.render(ASKED)
    assert "hi there" in text and model.tokenize(text, special=True) == model.chat(ASKED).prompt


def test_the_hidden_states_are_those_of_the_reference(model: localllm.Model):
    states = model.hidden_states(TEXT)
    with localllm.open(model.path, context=512, kv_type="f32", backend="reference") as reference:
        expected = reference.hidden_states(TEXT)
    assert states.shape == expected.shape and states.dtype == np.float32
    assert np.abs(states - expected).max() < 0.02 * np.abs(expected).max()
    np.testing.assert_array_equal(model.hidden_states(TEXT, [2, 0]), states[[2, 0]])
    np.testing.assert_array_equal(model.hidden_states(TEXT, 1), states[1])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss", "phi3", "mpt"])
def test_attention_weights_add_up_and_look_back_only(family: str, tmp_path: Path):
    with localllm.open(write_model(family, tmp_path / "m.gguf"), context=256, cache=False) as opened:
        ids = [(7 * number) % 50 for number in range(150)]
        weights = opened.attention(ids, 1)
    assert weights.shape[1:] == (150, 150) and (np.triu(weights, 1) == 0).all()
    sums = weights.sum(-1)
    assert (sums < 1.0001).all() and (family == "gpt_oss" or (sums > 0.999).all())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek2_v3"])
def test_attention_weights_equal_the_references(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, ids = write_model(family, tmp_path / "m.gguf"), [(7 * number) % 50 for number in range(90)]
    computed, compute = list[np.ndarray](), attention.compute_attention_weights

    def record(*arguments: Any) -> Any:
        result = compute(*arguments)
        computed.append(result[0])
        return result

    with localllm.open(path, context=256, kv_type="f32", cache=False) as opened:
        weights = opened.attention(ids, 1)
    monkeypatch.setattr(attention, "compute_attention_weights", record)
    with localllm.open(path, context=256, kv_type="f32", backend="reference") as reference:
        reference.logits(ids)
    expected = computed[1].reshape(len(ids), len(weights), len(ids)).transpose(1, 0, 2)
    assert np.abs(weights - expected).max() < 0.01


def test_a_hooked_model_answers_in_all_ways(model: localllm.Model):
    calls = list[int]()

    def zero(states: np.ndarray, layer: int, position: int) -> None:
        calls.append(len(states))
        states[:] = 0

    hooked = model.hooked(zero, 1)
    assert isinstance(hooked, HookedModel)
    options: Any = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    plain, steered = model.generate(TEXT, **options), hooked.generate(TEXT, **options)
    assert plain.tokens != steered.tokens and sum(calls) == len(steered.prompt) + len(steered.tokens) - 1
    (batched,) = hooked.map([TEXT], **options)
    assert batched.tokens == steered.tokens
    assert hooked.chat(ASKED, **options).tokens != model.chat(ASKED, **options).tokens
    assert hooked.score("a", " b").logprob != model.score("a", " b").logprob
    assert (hooked.hidden_states(TEXT, 1) == 0).all() and not (hooked.hidden_states(TEXT, 0) == 0).all()
    assert model.generate(TEXT, **options).tokens == plain.tokens


def test_a_repeated_prompt_calls_the_hook_again(model: localllm.Model):
    seen = list[int]()
    hooked = model.hooked(lambda states, layer, position: seen.append(position), 1)
    first = hooked.generate(TEXT, 3, temperature=0).tokens
    count = len(seen)
    assert hooked.generate(TEXT, 3, temperature=0).tokens == first and len(seen) == 2 * count


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.hidden_states(TEXT, [99]), r"^layers must be from 0 to 2, .* not 99$"),
        (lambda model: model.hidden_states(TEXT, []), "^layers must not be empty$"),
        (lambda model: model.hidden_states([]), "^the text is empty$"),
        (lambda model: model.hooked(3), "^function must be callable, not int$"),
        (lambda model: model.attention(TEXT, -1), "^layer must be 0 or greater, not -1$"),
        (lambda model: model.logprobs(TEXT, top=-1), "^top must be 0 or greater, not -1$"),
    ],
)
def test_wrong_arguments_are_refused(model: localllm.Model, call: Any, message: str):
    with pytest.raises(UsageError, match=message):
        call(model)
