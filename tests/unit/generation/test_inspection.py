"""Test what Python shows of a model: log probabilities, offsets, hidden states, attention, hooks and prompts."""

import hashlib
import json
import pickle
import re
from contextlib import closing
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import write_model

import localllm
from localllm import foreign_names
from localllm.api import open_model
from localllm.engine.operations import attention
from localllm.errors import ContextError, LocalllmError, UnsupportedError, UsageError
from localllm.generation.inspection import HookedModel
from localllm.generation.logprobs import compute_prompt_logprobs
from localllm.generation.model_methods import ChatArguments
from localllm.generation.scheduler import Generation
from localllm.kernels.table import PAGE
from localllm.services.receipts import read_receipt, regenerate, restore_options, write_receipt
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


def test_token_scores_are_rendered_as_tables(model: localllm.Model):
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
        (lambda model: model.hidden_states(TEXT, -1), r"^layers must be from 0 to 2, .* not -1$"),
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


# ---- what a notebook shows


def test_a_model_describes_itself(model: localllm.Model):
    rows = model._repr_markdown_().splitlines()
    assert f"context: 512 of {model.trained_context}" in repr(model) and rows[0] == "| model | |"
    assert all(row.count("|") == 3 for row in rows) and model.metadata["general.architecture"] == model.arch
    assert model.sha256 == hashlib.sha256(Path(model.path).read_bytes()).hexdigest()


def test_an_answer_is_described_without_being_generated(model: localllm.Model):
    answer = model.generate(TEXT, 3, temperature=0, ignore_eos=True)
    assert repr(answer) == "Generation(not begun: iterate over it, or read its text)"
    text = answer._repr_markdown_()
    assert text == answer.text and repr(answer) == f"Generation(text={text!r}, tokens=3, finish_reason='length')"
    assert "Answer" in repr(pickle.loads(pickle.dumps(answer))) and text in repr(pickle.loads(pickle.dumps(answer)))


def test_results_become_values_of_json(model: localllm.Model):
    answer = model.generate(TEXT, 3, temperature=0, ignore_eos=True, top_logprobs=2)
    values = json.loads(json.dumps(answer.to_dict()))
    assert values["tokens"] == answer.tokens and len(values["logprobs"][0]["likeliest"]) == 2
    (mapped,) = model.map([TEXT], 3, temperature=0, ignore_eos=True)
    assert mapped.to_dict()["text"] == values["text"] == pickle.loads(pickle.dumps(mapped)).to_dict()["text"]
    assert json.dumps([choice.to_dict() for choice in model.choose(TEXT, ["a", "b"])])
    assert json.loads(json.dumps(model.score(TEXT, "a").to_dict()))["tokens"][0]["token"] == model.tokenize("a")[-1]
    assert json.dumps(model.candidates(TEXT, beams=2, max_tokens=2)[0].to_dict())


def test_each_prompt_may_have_its_own_options(model: localllm.Model):
    options: Any = {"seed": 1, "ignore_eos": True}
    answers = [*model.map([TEXT] * 3, 6, per_prompt=[{"seed": 2}, {}, {"max_tokens": 2}], **options)]
    assert [len(answer.tokens) for answer in answers] == [6, 6, 2] and answers[2].seed == answers[1].seed == 1
    assert answers[0].tokens == next(model.map([TEXT], 6, seed=2, ignore_eos=True)).tokens
    assert answers[2].tokens == answers[1].tokens[:2]


@pytest.mark.parametrize(
    ("each", "message"),
    [
        ([{}], "the two lists have different lengths"), ([{}] * 3, "the two lists have different lengths"),
        ([1, 2], "a list of dicts, not of int"), ("ab", "per_prompt must be a list, not str"),
        ([{"do_sample": 1}, {}], "there is no option 'do_sample'; here it is temperature"),
    ],
)  # fmt: skip
def test_wrong_options_of_a_prompt_are_refused(model: localllm.Model, each: Any, message: str):
    with pytest.raises(UsageError, match=message):
        [*model.map([TEXT] * 2, 2, per_prompt=each)]


def test_errors_in_options_of_a_prompt_are_its_result(model: localllm.Model):
    results = [*model.map([TEXT] * 2, 2, errors="return", per_prompt=[{"nosuch": 1}, {}])]
    assert isinstance(results[0], UsageError) and not isinstance(results[1], LocalllmError)


@pytest.mark.parametrize("asked", [TEXT, ASKED])
def test_the_receipt_of_an_answer_can_be_replayed(model: localllm.Model, asked: Any, tmp_path: Path):
    options: Any = {"max_tokens": 4, "ignore_eos": True, "temperature": 1.5}
    answer = model.chat(asked, **options) if isinstance(asked, list) else model.generate(asked, **options)
    write_receipt(tmp_path / "r.json", answer.receipt())
    receipt = read_receipt(tmp_path / "r.json")
    again = regenerate(model, receipt, restore_options(receipt), lambda count: None)
    assert again["tokens"] == answer.tokens and receipt["model"]["files"][0]["sha256"] == model.sha256


def test_an_answer_without_a_text_prompt_has_no_receipt(model: localllm.Model):
    with pytest.raises(UsageError, match="a prompt of token ids cannot be stored in a receipt"):
        model.generate([3, 4], 1).receipt()
    with pytest.raises(UsageError, match="only answers of generate and chat"):
        model.session.complete("a").receipt()
    model.session.clear()


@pytest.mark.parametrize(
    ("name", "message"),
    [("n_ctx", "; here it is context$"), ("use_mmap", "; leave it out: files are mapped$"),
     ("contxt", "; did you mean 'context'[?]$"), ("xyzzy", "^localllm.open has no argument 'xyzzy'$")],
)  # fmt: skip
def test_opening_explains_names_of_other_programs(name: str, message: str):
    with pytest.raises(TypeError, match=message) as caught:
        localllm.open("nosuch.gguf", **{name: 1})
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (foreign_names.ANSWER_NAMES, ChatArguments.__annotations__),
        (foreign_names.OPEN_NAMES, signature(open_model).parameters),
    ],
)
def test_no_hint_hides_an_option_that_exists(names: dict[str, str], known: Any):
    assert not names.keys() & known.keys()


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (foreign_names.MODEL_NAMES, localllm.Model),
        (foreign_names.TOKENIZER_NAMES, localllm.Tokenizer),
        (foreign_names.GENERATION_NAMES, Generation),
    ],
)
def test_hints_of_attributes_name_some_that_exist(names: dict[str, str], known: type, model: localllm.Model):
    """Each hint begins with an attribute of ours, or names localllm itself."""
    instance: Any = {localllm.Model: model, localllm.Tokenizer: model.tokenizer}.get(known, model.generate("a", 1))
    for name, hint in names.items():
        with pytest.raises(AttributeError, match=f"no attribute {name!r}; here it is {re.escape(hint)}$"):
            getattr(instance, name)
        ours = re.match(r"\w+", hint.removeprefix("Model."))
        assert hint.startswith(("localllm.", "`localllm")) or (ours and hasattr(instance, ours[0])) or "Model." in hint


def test_unknown_attributes_get_pythons_own_suggestion(model: localllm.Model):
    with pytest.raises(AttributeError, match=r"^'Model' object has no attribute 'contxt'$") as caught:
        _ = model.contxt
    assert caught.value.name == "contxt" and caught.value.obj is model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model("Hi"), r"use generate\(prompt\), chat"),
        (lambda model: model.tokenizer("Hi"), r"use encode\(text\)"),
        (lambda model: model.generate("a", 1)["choices"], "read answer.text"),
    ],
)
def test_calls_of_other_packages_name_ours(model: Any, call: Any, message: str):
    with pytest.raises(TypeError, match=message):
        call(model)


def test_a_model_tells_its_sizes(model: localllm.Model):
    assert (model.layers, model.width) == model.hidden_states("a")[1:, 0].shape
    assert model.vocab_size == model.logits([1]).shape[1]
    before = model.memory
    assert before >= model.file.nbytes
    with closing(model.sequence()) as sequence:
        sequence.append([1], "none")
        assert model.memory == before + PAGE * model.engine.bytes_per_token


def test_weight_dequantizes_a_tensor_by_name(model: localllm.Model):
    weight = model.weight("token_embd.weight")
    assert weight.dtype == np.float32 and weight.shape == (model.vocab_size, model.width)
    np.testing.assert_array_equal(weight[[5]] * 1.0, model.hidden_states([5], 0))
    with pytest.raises(UsageError, match=r"no tensor 'token_embd'; similar or first ones: token_embd.weight"):
        model.weight("token_embd")


@pytest.mark.parametrize("prompt", [("a", {"seed": 1}), ["a", {"seed": 1}], ([3, 4], {"max_tokens": 2})])
def test_a_prompt_with_options_beside_it_points_to_per_prompt(model: localllm.Model, prompt: Any):
    with pytest.raises(UsageError, match="per_prompt"):
        list(model.map([prompt], 1))


def test_messages_and_dicts_are_no_prompts_to_continue(model: localllm.Model):
    with pytest.raises(UsageError, match="`chat` takes messages"):
        model.generate([{"role": "user", "content": "a"}], 1)
    with pytest.raises(UsageError, match="prompt must be a str, not dict"):
        list(model.map([{"prompt": "a"}], 1))
