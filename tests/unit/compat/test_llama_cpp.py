"""Test localllm.compat.llama_cpp: programs for llama-cpp-python run, and get the answers of Model."""

import inspect
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import random_adapter, supported_names, write_adapter
from project import ROOT
from tiny_model import write_tiny_model

import localllm
from localllm.arch.rope_scaling import RopeScaling
from localllm.compat.llama_arguments import ChatArguments, CompletionArguments, OpenArguments
from localllm.compat.llama_cpp import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList
from localllm.errors import ContextError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile

PROMPT = "hello world"
HI = [{"role": "user", "content": "Hi"}]
WORDS = 'root ::= "yes" | "no"'


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[Llama]:
    with Llama(tiny, n_ctx=256, n_threads=1, logits_all=True, verbose=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tiny: str) -> Iterator[localllm.Model]:
    with localllm.open(tiny, context=256, threads=1, cache=False) as opened:
        yield opened


def greedy(model: localllm.Model, ids: list[int], count: int) -> list[int]:
    """Return the likeliest continuation by the logits of the whole text: the oracle."""
    ids = [*ids]
    for _ in range(count):
        ids.append(int(model.logits(ids)[-1].argmax()))
    return ids[-count:]


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64) - row.max()
    return row - np.log(np.exp(row).sum())


def test_a_completion_has_the_fields_of_llama_cpp_python(llm: Llama, model: localllm.Model, tiny: str):
    completion = llm(PROMPT, max_tokens=8, temperature=0)
    ids = model.tokenize(PROMPT)
    assert (
        completion["id"].startswith("cmpl-")
        and completion["object"] == "text_completion"
        and completion["model"] == tiny
    )
    assert isinstance(completion["created"], int)
    text = model.detokenize(greedy(model, ids, 8))
    assert completion["choices"] == [{"text": text, "index": 0, "logprobs": None, "finish_reason": "length"}]
    usage = {"prompt_tokens": len(ids), "completion_tokens": 8, "total_tokens": len(ids) + 8}
    assert completion["usage"] == usage


def test_max_tokens_defaults_to_16_and_may_be_unlimited(llm: Llama):
    assert llm(PROMPT, temperature=0)["usage"]["completion_tokens"] == 16
    for unlimited in (None, 0, -1):
        completion = llm.create_completion(PROMPT, max_tokens=unlimited, temperature=0)
        assert completion["usage"]["total_tokens"] == 256 and completion["choices"][0]["finish_reason"] == "length"


def test_streaming_gives_the_same_text_as_one_response(llm: Llama):
    whole = llm(PROMPT, max_tokens=12, temperature=0)["choices"][0]
    chunks = [*llm(PROMPT, max_tokens=12, temperature=0, stream=True)]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["object"] == "text_completion"


def test_an_abandoned_stream_frees_its_sequence(llm: Llama):
    stream = llm(PROMPT, max_tokens=100, temperature=0, stream=True)
    next(stream)
    stream.close()
    assert llm(PROMPT, max_tokens=2, temperature=0)["usage"]["completion_tokens"] == 2


def test_a_prompt_may_be_token_ids_and_is_echoed_on_request(llm: Llama):
    ids = llm.tokenize(PROMPT.encode())
    completion = llm.create_completion(ids, max_tokens=4, temperature=0, echo=True)
    assert completion["choices"][0]["text"] == PROMPT + llm(PROMPT, max_tokens=4, temperature=0)["choices"][0]["text"]


def test_stop_ends_the_text_before_the_stop_string(llm: Llama):
    text = llm(PROMPT, max_tokens=16, temperature=0)["choices"][0]["text"]
    stop = text[3:5]
    for stop_argument in (stop, [stop]):
        choice = llm(PROMPT, max_tokens=16, temperature=0, stop=stop_argument)["choices"][0]
        assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"


def test_logprobs_equal_those_of_the_logits(llm: Llama, model: localllm.Model):
    lists = llm(PROMPT, max_tokens=3, temperature=0, logprobs=2)["choices"][0]["logprobs"]
    ids = model.tokenize(PROMPT)
    written = greedy(model, ids, 3)
    rows = model.logits([*ids, *written])[len(ids) - 1 : -1]
    expected = [log_softmax(row)[token] for row, token in zip(rows, written, strict=True)]
    assert lists["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    assert len(lists["top_logprobs"]) == 3 and all(1 <= len(best) <= 3 for best in lists["top_logprobs"])
    assert lists["text_offset"][0] == len(PROMPT)
    chunks = [*llm(PROMPT, max_tokens=3, temperature=0, logprobs=2, stream=True)]
    logprobs_by_chunk = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [one for each in logprobs_by_chunk if each for one in each["token_logprobs"]] == lists["token_logprobs"]


def test_echo_scores_the_prompt(llm: Llama, model: localllm.Model):
    choice = llm(PROMPT, max_tokens=1, temperature=0, logprobs=1, echo=True)["choices"][0]
    lists, ids = choice["logprobs"], model.tokenize(PROMPT)
    rows = model.logits(ids)
    expected = [log_softmax(row)[token] for row, token in zip(rows, ids[1:], strict=False)]
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert lists["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-3)
    assert "".join(lists["tokens"][: len(ids)]) == PROMPT and lists["text_offset"][:2] == [0, len(lists["tokens"][0])]
    assert len(lists["tokens"]) == len(ids) + 1


def test_echo_scores_what_follows_the_bos_token(tmp_path: Path):
    path = write_tiny_model(tmp_path / "bos.gguf", metadata={})
    with Llama(str(path), n_threads=1) as llm:
        ids = [llm.token_bos(), *llm.tokenize(b"hello")]
        lists = llm(ids, max_tokens=1, temperature=0, logprobs=0, echo=True)["choices"][0]["logprobs"]
    assert len(lists["tokens"]) == len(ids) and lists["tokens"][0] == "hello"


def test_a_seed_reproduces_the_text(llm: Llama):
    def drawn(**seed: object) -> str:
        return llm(PROMPT, max_tokens=12, temperature=1.5, **seed)["choices"][0]["text"]

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    llm.set_seed(7)
    first = [drawn(), drawn()]
    llm.set_seed(7)
    assert [drawn(), drawn()] == first and first[0] != first[1]
    llm.set_seed(-1)


def test_sampling_options_are_applied(llm: Llama):
    best = llm(PROMPT, max_tokens=8, temperature=0)["choices"][0]["text"]
    for only in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        assert llm(PROMPT, max_tokens=8, temperature=2.0, seed=3, **only)["choices"][0]["text"] == best
    token = llm.tokenize(b"!")[0]
    biased = llm(PROMPT, max_tokens=4, temperature=0, logit_bias={str(token): 1000.0})
    assert biased["choices"][0]["text"] == "!!!!"
    assert len({*llm(PROMPT, max_tokens=4, temperature=0, logit_bias={token: 9.0}, repeat_penalty=1e6)["choices"][0]
                ["text"]}) > 1  # fmt: skip


def test_a_grammar_constrains_the_text(llm: Llama):
    for seed in range(4):
        choice = llm("?", grammar=LlamaGrammar.from_string(WORDS), seed=seed)["choices"][0]
        assert choice["text"] in ("yes", "no") and choice["finish_reason"] == "stop"


def test_a_json_schema_constrains_the_text(llm: Llama, tmp_path: Path):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    grammar = LlamaGrammar.from_json_schema(json.dumps(schema))
    assert json.loads(llm("?", grammar=grammar, max_tokens=50)["choices"][0]["text"])["a"] in (1, 2)
    (tmp_path / "words.gbnf").write_text(WORDS)
    assert LlamaGrammar.from_file(tmp_path / "words.gbnf").grammar == WORDS
    form = {"type": "json_object", "schema": schema}
    content = llm.create_chat_completion(HI, response_format=form)["choices"][0]["message"]["content"]
    assert json.loads(content)["a"] in (1, 2)


def test_a_chat_completion_equals_the_answer_of_the_model(llm: Llama, model: localllm.Model):
    completion = llm.create_chat_completion(messages=HI, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2)
    answer = model.chat(HI, max_tokens=8, temperature=0, top_logprobs=2)
    text = "".join(answer)
    assert completion["id"].startswith("chatcmpl-") and completion["object"] == "chat.completion"
    (choice,) = completion["choices"]
    assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "length"
    scored = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert scored == pytest.approx([token.chosen.logprob for token in answer.logprobs], abs=1e-3)
    assert completion["usage"]["prompt_tokens"] == answer.prompt_tokens


def test_logprobs_of_a_chat_may_be_the_number_of_alternatives(llm: Llama):
    choice = llm.create_chat_completion(messages=HI, max_tokens=2, temperature=0, logprobs=3)["choices"][0]
    assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [3, 3]
    for asked in (lambda: llm(PROMPT, logprobs="3"), lambda: llm.create_chat_completion(messages=HI, logprobs="3")):
        with pytest.raises(UsageError, match="logprobs must be an integer, not '3'"):
            asked()


def test_a_streamed_chat_gives_the_same_text(llm: Llama):
    whole = llm.create_chat_completion(HI, max_tokens=8, temperature=0)["choices"][0]["message"]["content"]
    chunks = [*llm.create_chat_completion(HI, max_tokens=8, temperature=0, stream=True)]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant"} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == whole
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_a_conversation_beyond_the_context_is_refused(llm: Llama):
    long = [{"role": role, "content": "x" * 90} for role in ("user", "assistant", "user")]
    with pytest.raises(ContextError, match="the context holds only 256"):
        llm.create_chat_completion(long)
    with pytest.raises(ContextError):
        llm("x" * 300)


TOOL = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]},
}


@pytest.mark.parametrize(
    "arguments",
    [
        {"tools": [{"type": "function", "function": TOOL}], "tool_choice": {"function": {"name": "weather"}}},
        {"functions": [TOOL], "function_call": {"name": "weather"}},
    ],
)
def test_a_required_tool_is_called(tiny: str, arguments: dict):
    with Llama(tiny, n_ctx=600, n_threads=1) as llm:
        require_call(llm, arguments)


def require_call(llm: Llama, arguments: dict) -> None:
    choice = llm.create_chat_completion(HI, max_tokens=200, **arguments)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert choice["finish_reason"] == "tool_calls"
    assert ("function_call" in choice["message"]) is ("functions" in arguments)
    chunks = [*llm.create_chat_completion(HI, max_tokens=200, stream=True, **arguments)]
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "weather" and calls[0]["id"]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Rome"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_suffix_is_refused_without_infill_tokens(llm: Llama):
    with pytest.raises(UsageError, match="cannot fill in the middle"):
        llm("def f(", suffix="return 1")


def test_tokenize_and_detokenize_equal_those_of_the_model(llm: Llama, model: localllm.Model):
    text = "hello wörld<|im_end|>".encode()
    assert llm.tokenize(text) == model.tokenize(text.decode())
    assert llm.tokenize(text, special=True)[-1] == llm.token_eos() == 2
    assert llm.detokenize(llm.tokenize(text)) == text
    assert llm.detokenize(llm.tokenize("ö".encode())[:1]) == "ö".encode()[:1]
    assert llm.detokenize([2]) == b"" and llm.detokenize([2], special=True) == b"<|im_end|>"
    assert llm.token_bos() == 0 and llm.detokenize([llm.token_nl()]) == b"\n"
    assert llm.tokenizer().decode(llm.tokenizer().encode(PROMPT)) == PROMPT
    assert (llm.n_ctx(), llm.n_vocab(), llm.n_embd()) == (256, len(model.tokenizer.pieces), 64)
    assert llm.metadata["general.architecture"] == "llama"
    with pytest.raises(UsageError, match="text must be bytes of UTF-8 text"):
        llm.tokenize("hello")


def test_eval_gives_the_logits_of_the_model(llm: Llama, model: localllm.Model):
    ids = llm.tokenize(b"hello world, hello")
    llm.reset()
    llm.eval(ids[:2])
    llm.eval([])
    llm.eval(ids[2:])
    assert llm.n_tokens == len(ids) and llm.input_ids.tolist() == [*llm.eval_tokens] == ids
    assert llm.scores == pytest.approx(model.logits(ids), abs=1e-2)
    state = llm.save_state()
    llm.n_tokens = 1
    assert llm.scores.shape == (1, llm.n_vocab()) and llm.input_ids.tolist() == ids[:1]
    llm.load_state(state)
    llm.eval([5])
    assert llm.scores[-1] == pytest.approx(model.logits([*ids, 5])[-1], abs=1e-2)
    assert state.n_tokens == len(ids) and state.scores is not None and len(state.scores) == len(ids)
    llm.reset()
    assert llm.n_tokens == 0


def test_without_logits_all_only_the_last_logits_are_kept(tiny: str, model: localllm.Model):
    with Llama(tiny, n_ctx=64, n_threads=1) as llm:
        llm.eval(ids := llm.tokenize(PROMPT.encode()))
        assert np.array(llm.eval_logits[-1]) == pytest.approx(model.logits(ids)[-1], abs=1e-2)
        with pytest.raises(UsageError, match="logits_all must be True"):
            llm.scores  # noqa: B018


@pytest.mark.sampled
def test_embeddings_equal_those_of_the_model(model_path):
    path = str(model_path("bert"))
    with Llama(path, embedding=True, n_ctx=0, n_threads=1) as llm:
        texts = ["hello", "world"]
        rows = llm.model.embed(texts, normalize=False)
        assert llm.embed(texts) == rows.tolist() and llm.embed("hello") == rows[0].tolist()
        assert np.linalg.norm(llm.embed("hello", normalize=True)) == pytest.approx(1, abs=1e-5)
        embedding = llm.create_embedding(texts)
        assert [each["embedding"] for each in embedding["data"]] == rows.tolist() and embedding["object"] == "list"
        assert embedding["usage"]["prompt_tokens"] == embedding["usage"]["total_tokens"] >= 2


# ---- adapters


def test_lora_path_and_scale_open_an_adapter(tiny: str, tmp_path):
    with GGUFFile.open(tiny) as file:
        adapter = random_adapter(file, supported_names(file))
    path = str(write_adapter(adapter, tmp_path / "poet.gguf", 4.0))

    def answer(**arguments: Any) -> tuple[str, np.ndarray]:
        with Llama(tiny, n_threads=1, logits_all=True, **arguments) as llm:
            llm.eval([5, 6, 7])
            return llm("Once", max_tokens=8, temperature=0)["choices"][0]["text"], llm.scores[2].copy()

    with localllm.open(tiny, threads=1, lora={path: 0.5}) as model:
        expected = str(model.generate("Once", max_tokens=8, temperature=0).text)
        row = model.logits([5, 6, 7])
    text, scores = answer(lora_path=path, lora_scale=0.5)
    _, plain_scores = answer()
    assert text == expected and np.allclose(scores, row[-1], atol=5e-4)
    assert not np.allclose(scores, plain_scores, atol=1e-2)
    assert np.array_equal(answer(lora_path=path, lora_scale=0.0)[1], plain_scores)
    with pytest.warns(UserWarning, match="lora_scale"):
        Llama(tiny, lora_scale=0.5).close()
    with pytest.raises(ModelError, match=r"no\.gguf: the file does not exist"):
        Llama(tiny, lora_path="no.gguf")


# ---- what is refused, and what is told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_overrides": {"a": 1}}, "kv_overrides is not supported"),
        ({"yarn_beta_fast": 16.0}, "yarn_beta_fast is not supported: YaRN's factors"),
        ({"rope_scaling_type": 9}, "rope_scaling_type must be -1, 0"),
        ({"rope_freq_base": 0.5}, "rope_freq_base must be above 1"),
        ({"type_k": 5}, "type_k must be 0"),
        ({"pooling_type": 9}, "pooling_type must be"),
        ({"n_ctx": -3}, "context must be"),
    ],
)
def test_arguments_that_would_change_answers_are_refused(tiny: str, arguments: dict, message: str):
    with pytest.raises(UsageError, match=message):
        Llama(tiny, **arguments)


@pytest.mark.sampled
def test_default_arguments_of_libraries_are_accepted(tiny: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Llama(tiny, rope_freq_scale=1.0, rope_freq_base=10000.0, use_mmap=True, n_gpu_layers=0, type_k=8).close()


def test_rope_scaling_arguments_reach_the_engine(tiny: str):
    rope = {"rope_scaling_type": 2, "rope_freq_scale": 0.25, "yarn_orig_ctx": 64, "rope_freq_base": 5000.0}
    with Llama(tiny, n_ctx=0, logits_all=True, **rope) as scaled:
        assert scaled.n_ctx() == 256
        scaled.eval([*range(3, 120)])
        with localllm.open(tiny, cache=False, rope=RopeScaling("yarn", 4.0, 5000.0, 64)) as model:
            np.testing.assert_array_equal(scaled.scores, model.logits([*range(3, 120)]))


def test_the_rope_default_of_langchain_is_ignored(tmp_path: Path):
    path = write_tiny_model(tmp_path / "other.gguf", metadata={"llama.rope.freq_base": 5e5})
    with pytest.warns(UserWarning, match="the file's base 500000 is used"):
        Llama(path, rope_freq_scale=1.0, rope_freq_base=10000.0).close()


def test_arguments_without_effect_are_reported_together(tiny: str):
    with pytest.warns(UserWarning, match=r"\(no effect in localllm\): use_mlock, n_batch, nonsense$") as warning_list:
        Llama(tiny, use_mlock=True, n_batch=8, nonsense=1).close()
    assert len(warning_list) == 1 and warning_list[0].filename == __file__


def test_chat_formats_choose_a_template_or_warn(tiny: str):
    with pytest.warns(UserWarning, match="chat_format 'saiga' is ignored"), Llama(tiny, chat_format="saiga"):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Llama(tiny, chat_format="llama-3", n_threads=1) as llm:
            completion = llm.create_chat_completion(HI, max_tokens=1)
            assert completion["usage"]["prompt_tokens"] > 40  # its markers are plain text for this vocabulary


def test_chat_completions_return_objects_of_the_openai_package(llm: Llama):
    types = pytest.importorskip("openai.types.chat")
    whole = llm.create_chat_completion_openai_v1(HI, max_tokens=4, temperature=0)
    assert isinstance(whole, types.ChatCompletion)
    chunks = [*llm.create_chat_completion_openai_v1(HI, max_tokens=4, temperature=0, stream=True)]
    assert all(isinstance(chunk, types.ChatCompletionChunk) for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_gpu_layers_run_without_a_gpu(tiny: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for layers in (-1, 1, 99):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Llama(tiny, n_gpu_layers=layers, n_threads=1) as llm:
                assert llm.model.device == "CPU" and llm(PROMPT, max_tokens=1)["choices"]


def test_logits_processors_and_stopping_criteria_are_applied(llm: Llama):
    seen = list[tuple[list[int], int]]()
    (mark,) = llm.tokenize(b"!")

    def only_mark(input_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        seen.append((input_ids.tolist(), len(scores)))
        scores[:] = -np.inf
        scores[mark] = 0
        return scores

    ids = llm.tokenize(PROMPT.encode())
    assert llm(PROMPT, max_tokens=3, logits_processor=[only_mark])["choices"][0]["text"] == "!!!"
    assert seen == [([*ids, *[mark] * count], llm.n_vocab()) for count in range(3)]
    processors = LogitsProcessorList([lambda ids, scores: scores * 0, only_mark])
    chat = llm.create_chat_completion(HI, max_tokens=2, logits_processor=processors)
    assert chat["choices"][0]["message"]["content"] == "!!"
    criteria = StoppingCriteriaList(
        [lambda ids, logits: False, lambda input_ids, logits: len(input_ids) >= len(ids) + 5]
    )
    whole = llm(PROMPT, max_tokens=9, temperature=0)["choices"][0]["text"]
    cut = llm(PROMPT, max_tokens=9, temperature=0, stopping_criteria=criteria)
    assert cut["usage"]["completion_tokens"] == 5 and cut["choices"][0]["finish_reason"] == "stop"
    assert whole.startswith(cut["choices"][0]["text"])
    with pytest.raises(UsageError, match="stopping_criteria cannot be combined with a constraint"):
        llm(PROMPT, stopping_criteria=criteria, grammar=LlamaGrammar.from_string(WORDS))


def test_invalid_arguments_are_refused(llm: Llama):
    with pytest.raises(TypeError, match="temprature"):
        llm(PROMPT, temprature=1)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="grammar must be a LlamaGrammar"):
        llm(PROMPT, grammar=WORDS)
    with pytest.raises(UsageError):
        LlamaGrammar.from_string("root ::= nosuch")
    with pytest.raises(UsageError, match="response_format must be"):
        llm.create_chat_completion(HI, response_format={"type": "xml"})
    with pytest.raises(ModelError):
        Llama("nosuch.gguf")
    with pytest.raises(UsageError, match="localllm pull hf:a/b"):
        Llama.from_pretrained("a/b", "*q8_0.gguf")
    with pytest.warns(UserWarning, match="stop is ignored: grammar determines"):
        llm(PROMPT, stop=["x"], grammar=LlamaGrammar.from_string(WORDS))


def test_signatures_of_methods_can_be_inspected():
    parameters = [*inspect.signature(Llama.create_completion).parameters.values()]
    assert [each.name for each in parameters][:4] == ["self", "prompt", "suffix", "max_tokens"]
    assert parameters[3].default == 16 and inspect.signature(Llama.__call__).parameters["top_k"].default == 40
    assert inspect.signature(Llama.create_chat_completion).parameters["temperature"].default == 0.2


@pytest.mark.sampled
def test_the_package_does_not_import_the_compatibility_layer():
    code = "import localllm, localllm.api, localllm.cli.main, sys; print('localllm.compat' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_examples_of_the_docs_page_run(tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs" / "llama-cpp-python.md").read_text(encoding="utf-8")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    names = dict[str, object]()
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(block.replace("model.gguf", str(localllm.builtin_model())), names)
    assert sys.modules["llama_cpp"].Llama is Llama
    assert names["verdict"]["choices"][0]["text"] in ("yes", "no")
    assert capsys.readouterr().out


def test_the_docs_page_names_every_argument():
    page = (ROOT / "docs" / "llama-cpp-python.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)`", page)) | {
        "mirostat_tau",
        "mirostat_eta",
        "embedding",
    }
    for kind in (OpenArguments, CompletionArguments, ChatArguments):
        names = {each for each in inspect.signature(kind).parameters if not each.startswith("yarn_")}
        assert names <= documented, names - documented
