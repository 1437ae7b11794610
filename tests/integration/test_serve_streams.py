"""Test that a streamed answer equals the whole one in each API, wherever it is cut."""

import json
from typing import Any

import pytest
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from tests.integration.test_serve_shapes import CLAUDE_TOOLS, SCRIPT, THINKING, TOOLS, asked

PROMPT = "<|im_start|>user\nshort<|im_end|>\n<|im_start|>assistant\n"
# In nothing, in a mark of reasoning, in reasoning, in the text, in a call, and not at all.
CUTS = [0, 1, 6, 12, 20, 60, 300]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    path = str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", chat_template=THINKING))
    with serving({"scripted": lambda: scripted(path, SCRIPT)}) as server:
        yield server


def whole_and_streamed(served: Served, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the whole answer and the events of the streamed one; both find the prompt cached."""
    served.post(path, {**body, "stream": False})
    whole = served.post(path, {**body, "stream": False}).json
    more = {} if path.startswith("/api/") or path == "/v1/messages" else {"stream_options": {"include_usage": True}}
    reply = served.post(path, {**body, "stream": True, **more})
    lines = [json.loads(line) for line in reply.body.splitlines()] if path.startswith("/api/") else reply.events
    return whole, lines


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"n": 2}, {"echo": True, "n": 2}, {"stop": ["b"]}])
@pytest.mark.parametrize("limit", [0, 1, 9])
@pytest.mark.parametrize("prompt", [PROMPT, "short", [5, 6, 7]])
def test_a_streamed_completion_equals_the_whole_one(served: Served, prompt: Any, limit: int, more: dict[str, Any]):
    body = {"prompt": prompt, "max_tokens": limit, "temperature": 0, "logprobs": 1, **more}
    whole, events = whole_and_streamed(served, "/v1/completions", body)
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            streamed = [value for part in parts for value in part["logprobs"][name]]
            if "logprobs" in name:
                assert len(streamed) == len(choice["logprobs"][name])
            else:
                assert streamed == choice["logprobs"][name]
    assert [event["usage"] for event in events if event["usage"]] == [whole["usage"]]


@pytest.mark.parametrize("limit", CUTS)
def test_a_streamed_chat_equals_the_whole_one(served: Served, limit: int):
    body = {"messages": asked("all"), "tools": TOOLS, "max_tokens": limit, "temperature": 0, "logprobs": True, "n": 2}
    whole, events = whole_and_streamed(served, "/v1/chat/completions", body)
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        deltas, message = [part["delta"] for part in parts], choice["message"]
        for name in ("content", "reasoning_content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        names, arguments = ["".join(call.get(name, "") for call in calls) for name in ("name", "arguments")]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        assert [names, arguments] == ["".join(each[name] for each in functions) for name in ("name", "arguments")]
        tokens = [token["token"] for part in parts if part["logprobs"] for token in part["logprobs"]["content"]]
        assert tokens == [token["token"] for token in choice["logprobs"]["content"]]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert deltas[0]["role"] == "assistant"
    assert [event["usage"] for event in events if event["usage"]] == [whole["usage"]]


@pytest.mark.parametrize("limit", CUTS)
def test_a_streamed_message_equals_the_whole_one(served: Served, limit: int):
    """Ignore a cut call, which a whole message omits because its input would be no object."""
    body = {"messages": asked("all"), "tools": CLAUDE_TOOLS, "max_tokens": limit, "temperature": 0}
    whole, events = whole_and_streamed(served, "/v1/messages", body)
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    texts = [""] * len(blocks)
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
    is_cut = bool(blocks) and blocks[-1]["type"] == "tool_use" and whole["stop_reason"] == "max_tokens"
    block_texts = [
        block.get("text") or block.get("thinking") or json.dumps(block["input"]) for block in whole["content"]
    ]
    assert [text.replace(":", ": ") if text[:1] == "{" else text for text in texts][
        : len(texts) - is_cut
    ] == block_texts
    [last] = [event for event in events if event["type"] == "message_delta"]
    assert last["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert last["usage"] == whole["usage"] and (limit or whole["stop_reason"] == "max_tokens")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("limit", CUTS)
def test_a_streamed_answer_of_ollama_equals_the_whole_one(served: Served, path: str, limit: int):
    question: dict[str, Any] = (
        {"prompt": "all"} if path == "/api/generate" else {"messages": asked("all"), "tools": TOOLS}
    )
    options = {"num_predict": limit, "temperature": 0}
    body = {"model": "scripted", "options": options, "logprobs": True, **question}
    whole, lines = whole_and_streamed(served, path, body)
    parts, answer = [line.get("message", line) for line in lines], whole.get("message", whole)
    for name in ("content", "response", "thinking"):
        assert "".join(part.get(name, "") for part in parts) == answer.get(name, "")
    calls = [call["function"] for part in parts for call in part.get("tool_calls", ())]
    assert calls == [call["function"] for call in answer.get("tool_calls", ())]
    assert [token for line in lines for token in line.get("logprobs", ())] == whole.get("logprobs", [])
    last = lines[-1]
    assert last.keys() == whole.keys() - {"thinking", "logprobs"}
    same = {"done", "done_reason", "context", "prompt_eval_count", "eval_count"} & whole.keys()
    assert {name: last[name] for name in same} == {name: whole[name] for name in same}
