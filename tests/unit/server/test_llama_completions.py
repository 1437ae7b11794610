"""Test what programs for llama-server ask: /completion, /props, and OpenAI's count of input tokens."""

from typing import Any

import pytest
from served import Served, serving

import localllm
from localllm.errors import UsageError
from localllm.server.fields import RequestBody
from localllm.server.llama_completions import parse_prompt, parse_request

GREEDY = {"n_predict": 6, "temperature": 0}


@pytest.fixture(scope="module")
def served(tiny: str):
    with serving({"tiny": tiny}) as server:
        yield server


@pytest.fixture(scope="module")
def answer(tiny: str) -> Any:
    with localllm.open(tiny, threads=2, cache=False) as model:
        generation = model.generate("hello", 6, temperature=0)
        return {"text": generation.text, "tokens": generation.tokens, "prompt": generation.prompt}


def test_a_completion_continues_a_string_or_token_ids(served: Served, answer: Any):
    for prompt in ("hello", ["hello"], answer["prompt"]):
        reply = served.post("/completion", {"prompt": prompt, **GREEDY, "return_tokens": True}).json
        assert (reply["content"], reply["tokens"], reply["stop"]) == (answer["text"], answer["tokens"], True)
        assert reply["tokens_evaluated"] == len(answer["prompt"]) and reply["timings"]["predicted_n"] == 6
    assert served.post("/completion", {"prompt": "hello", **GREEDY}).json["tokens"] == []


def test_a_completion_is_streamed(served: Served, answer: Any):
    events = served.post("/completion", {"prompt": "hello", **GREEDY, "stream": True}).events
    assert "".join(event["content"] for event in events) == answer["text"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_a_completion_takes_a_schema(served: Served):
    body = {"prompt": "hello", "json_schema": {"enum": ["yes", "no"]}, "n_predict": 20}
    assert served.post("/completion", body).json["content"] in ('"yes"', '"no"')


@pytest.mark.parametrize("prompt", [None, 5, ["a", "b"], [{}], [["a"]], [1, "a"], [-1]])
def test_other_prompts_are_refused(prompt: object):
    with pytest.raises(UsageError, match=r"^prompt must be "):
        parse_prompt(prompt)


def test_the_count_of_tokens_is_unlimited_by_default():
    assert parse_request(RequestBody({"prompt": "a"})).options.max_tokens is None
    assert parse_request(RequestBody({"prompt": "a", "n_predict": -1})).options.max_tokens is None
    assert parse_request(RequestBody({"prompt": "a", "max_tokens": 3})).options.max_tokens == 3


def test_props_are_llama_servers(served: Served):
    served.post("/completion", {"prompt": "hello", "n_predict": 1})  # opens the model
    props = served.get("/props").json
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == props["n_ctx"] and settings["params"]["top_k"] == 40
    assert props["total_slots"] >= 1 and props["model_alias"] == "tiny" and props["modalities"]["vision"] is False
    assert props["model_path"].endswith(".gguf") and props["chat_template"] and props["build_info"]


def test_input_tokens_are_those_of_a_response(served: Served):
    body = {"input": "hello there", "instructions": "Be brief."}
    counted = served.post("/v1/responses/input_tokens", body).json
    usage = served.post("/v1/responses", {**body, "max_output_tokens": 1}).json["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert served.post("/v1/responses/input_tokens", {"input": []}).json["input_tokens"] == 0
