"""Test whole responses: every field of every API as documented; random names and times are masked."""

import re
from time import time
from typing import Any

import pytest
from served import Reply, Served, scripted, serving
from tiny_model import write_tiny_model

from tests.unit.generation.tools.test_tool_grammar import QWEN

THINKING = QWEN + "{# <think> </think> #}"
SCRIPT = {"all": '<think>Hm</think>So\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "short": "ab"}
CALLED = {"name": "f", "arguments": '{"a":1}'}
FORM = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": FORM}}]
FLAT_TOOLS, CLAUDE_TOOLS = (
    [{"type": "function", "name": "f", "parameters": FORM}],
    [{"name": "f", "input_schema": FORM}],
)
DELTAS = ("content", "reasoning_content", "delta", "text", "thinking", "partial_json", "arguments")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", chat_template=THINKING)
    with serving({"scripted": lambda: scripted(str(path), SCRIPT), "other": str(path)}) as server:
        yield server


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def mask(value: Any) -> Any:
    """Replace random ids by "*" and the current time by 0."""
    if isinstance(value, list):
        return [mask(each) for each in value]
    if not isinstance(value, dict):
        return value
    fields = {name: mask(each) for name, each in value.items()}
    for name in {"id", "call_id", "item_id"} & fields.keys():
        fields[name] = re.sub("([0-9a-f]{24}|[0-9A-Za-z]{9})$", "*", fields[name])
    for name in {"created", "created_at"} & fields.keys():
        assert abs(fields[name] - time()) < 300
        fields[name] = 0
    return fields


def masked_reply(reply: Reply) -> Any:
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json"), reply.body
    return mask(reply.json)


def join_events(events: list[Any]) -> list[Any]:
    """Join deltas of the same text; check and drop sequence numbers."""
    numbers = [event.pop("sequence_number") for event in events if "sequence_number" in event]
    assert numbers == [*range(len(numbers))]
    joined_events = list[Any]()
    for event in map(mask, events):
        if joined_events and (joined := join_pair(joined_events[-1], event)):
            joined_events[-1] = joined
        else:
            joined_events.append(event)
    return joined_events


def join_pair(one: Any, other: Any) -> Any:
    """Join two events that differ in one continued text; return None for others."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        different = [name for name in one if one[name] != other[name]]
        if len(different) == 1:
            [name] = different
            if name in DELTAS and isinstance(one[name], str) and isinstance(other[name], str) and one[name]:
                return {**one, name: one[name] + other[name]}
            return (inner := join_pair(one[name], other[name])) and {**one, name: inner}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other) == 1:
        return (inner := join_pair(one[0], other[0])) and [inner]
    return None


# ---- OpenAI's chats: https://platform.openai.com/docs/api-reference/chat


def usage(prompt: int, cached: int, written: int, thought: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }  # fmt: skip


CHAT = {"id": "chatcmpl-*", "object": "chat.completion", "created": 0, "model": "scripted", "system_fingerprint": None}
CHUNK = CHAT | {"object": "chat.completion.chunk"}
RATES = "n", "ms", "per_token_ms", "per_second"
TIMINGS = {"cache_n", *(f"{part}_{rate}" for part in ("prompt", "predicted") for rate in RATES)}
LONGEST = len(SCRIPT["all"])  # a letter is a token, and some marks are one, too


def test_a_chat_completion_has_all_documented_fields(served: Served):
    reply = masked_reply(served.post("/v1/chat/completions", {"messages": asked("all"), "tools": TOOLS}))
    call = {"id": "*", "type": "function", "function": CALLED}
    message = {"role": "assistant", "content": "So", "reasoning_content": "Hm", "tool_calls": [call]}
    used, timings = reply.pop("usage"), reply.pop("timings")
    assert {*timings} == TIMINGS
    assert reply == {**CHAT, "choices": [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}]}  # fmt: skip
    details = used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"], used["completion_tokens"]
    assert used == usage(*details, used["completion_tokens_details"]["reasoning_tokens"])
    assert 2 < used["completion_tokens_details"]["reasoning_tokens"] < details[2] <= LONGEST


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {**CHUNK, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}], **more}


def test_a_streamed_chat_has_all_documented_fields(served: Served):
    reply = served.post("/v1/chat/completions", {"messages": asked("all"), "tools": TOOLS, "stream": True})
    call = {"index": 0, "id": "*", "type": "function", "function": {"name": "f", "arguments": ""}}
    events = join_events(reply.events)
    assert {*events[-1].pop("timings")} == TIMINGS
    assert events == [
        chunk({"role": "assistant", "content": ""}), chunk({"reasoning_content": "Hm"}), chunk({"content": "So"}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": CALLED["arguments"]}}]}),
        chunk({}, "tool_calls"),
    ]  # fmt: skip
    assert {name: reply.headers[name] for name in ("content-type", "cache-control", "x-accel-buffering")} == {
        "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", "x-accel-buffering": "no",
    }  # fmt: skip


def test_a_streamed_chat_ends_with_its_usage(served: Served):
    body = {"messages": asked("short"), "stream": True, "stream_options": {"include_usage": True}}
    *events, last = join_events(served.post("/v1/chat/completions", body).events)
    assert events == [
        chunk({"role": "assistant", "content": ""}, usage=None), chunk({"content": "ab"}, usage=None),
        chunk({}, "stop", usage=None),
    ]  # fmt: skip
    cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert {*last.pop("timings")} == TIMINGS
    assert last == {**CHUNK, "choices": [], "usage": usage(24, cached, 2, 0)}


# ---- OpenAI's texts: https://platform.openai.com/docs/api-reference/completions


def test_a_completion_has_all_documented_fields(served: Served):
    """Continue a question in ChatML; each letter has its offset."""
    body = {"prompt": "<|im_start|>user\nshort<|im_end|>\n<|im_start|>assistant\n", "logprobs": 2}
    reply = masked_reply(served.post("/v1/completions", body))
    [choice], used, timings = (reply.pop(name) for name in ("choices", "usage", "timings"))
    assert {*timings} == TIMINGS
    assert reply == CHAT | {"id": "cmpl-*", "object": "text_completion"}
    assert used == usage(used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"], 2, 0)
    top = choice["logprobs"].pop("top_logprobs")
    assert choice == {
        "index": 0, "text": "ab", "finish_reason": "stop",
        "logprobs": {"tokens": ["a", "b"], "token_logprobs": [top[0]["a"], top[1]["b"]],
                     "text_offset": [0, 1]},
    }  # fmt: skip
    assert [len(each) for each in top] == [2, 2] and all(-9999 <= value <= 0 for each in top for value in each.values())
    choices = [event["choices"] for event in served.post("/v1/completions", {**body, "stream": True}).events]
    assert "".join(choice["text"] for [choice] in choices) == "ab"
    assert [choice["finish_reason"] for [choice] in choices] == [None, None, "stop"]
    assert [choice["logprobs"]["tokens"] for [choice] in choices] == [["a"], ["b"], []]


# ---- OpenAI's responses: https://platform.openai.com/docs/api-reference/responses

RESPONSE = {
    "id": "resp_*", "object": "response", "created_at": 0, "model": "scripted", "error": None,
    "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": None,
    "top_p": None, "tool_choice": "auto", "tools": [], "store": False, "background": False, "max_output_tokens": None,
    "max_tool_calls": None, "previous_response_id": None, "prompt_cache_key": None, "safety_identifier": None,
    "reasoning": {"effort": None, "summary": None}, "service_tier": "default", "text": {"format": {"type": "text"}},
    "top_logprobs": 0, "truncation": "disabled", "user": None,
}  # fmt: skip
SETTINGS = {
    "instructions": "Be short.", "metadata": {"a": "b"}, "parallel_tool_calls": False, "temperature": 0.5, "top_p": 0.9,
    "tool_choice": "required", "tools": [{"type": "custom", "name": "t"}], "max_output_tokens": 5, "truncation": "auto",
    "prompt_cache_key": "k", "safety_identifier": "s", "user": "u",
}  # fmt: skip
TEXT = {"type": "output_text", "text": "So", "annotations": [], "logprobs": []}
ITEMS = [
    {"type": "reasoning", "id": "item_*", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"type": "message", "id": "item_*", "role": "assistant", "content": [TEXT]},
    {"type": "function_call", "id": "item_*", "call_id": "call_*", **CALLED},
]


def test_a_response_has_all_documented_fields(served: Served):
    reply = masked_reply(served.post("/v1/responses", {"input": "all", "tools": FLAT_TOOLS}))
    used = reply.pop("usage")
    items = [{**item, "status": "completed"} for item in ITEMS]
    assert reply == {**RESPONSE, "tools": FLAT_TOOLS, "status": "completed", "output": items}
    cached, thought = used["input_tokens_details"]["cached_tokens"], used["output_tokens_details"]["reasoning_tokens"]
    assert used == {
        "input_tokens": used["input_tokens"], "output_tokens": used["output_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": used["input_tokens"] + used["output_tokens"],
    }  # fmt: skip
    assert 1 < thought < used["output_tokens"]
    cut = masked_reply(served.post("/v1/responses", {"input": "short", "max_output_tokens": 1}))
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["status"], item["content"][0]["text"]) for item in cut["output"]] == [("incomplete", "a")]


def test_a_streamed_response_has_all_documented_events(served: Served):
    reply = served.post("/v1/responses", {"input": "all", "tools": FLAT_TOOLS, "stream": True})
    names = re.findall(r"^event: (.*)$", reply.body.decode(), re.MULTILINE)
    assert names == [event["type"] for event in reply.events]
    begun, going, *events, done = join_events(reply.events)
    first = {**RESPONSE, "tools": FLAT_TOOLS, "status": "in_progress", "output": [], "usage": None}
    assert begun == {"type": "response.created", "response": first}
    assert going == {"type": "response.in_progress", "response": first}
    assert done["type"] == "response.completed" and done["response"]["usage"]["total_tokens"] > 50
    assert done["response"]["output"] == [{**item, "status": "completed"} for item in ITEMS]
    expected = list[Any]()
    for index, item in enumerate(ITEMS):
        where = {"item_id": "item_*", "output_index": index}
        parts = item.get("content")
        empty = {**item, "status": "in_progress"} | ({"content": []} if parts else {"arguments": ""})
        expected.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        if parts:
            [part], inside = parts, {**where, "content_index": 0}
            kind, more = f"response.{part['type']}", {"logprobs": []} if part is TEXT else {}
            expected += [
                {"type": "response.content_part.added", **inside, "part": {**part, "text": ""}},
                {"type": f"{kind}.delta", **inside, "delta": part["text"], **more},
                {"type": f"{kind}.done", **inside, "text": part["text"], **more},
                {"type": "response.content_part.done", **inside, "part": part},
            ]
        else:
            kind = "response.function_call_arguments"
            expected += [
                {"type": f"{kind}.delta", **where, "delta": CALLED["arguments"]},
                {"type": f"{kind}.done", **where, **CALLED},
            ]
        expected.append(
            {"type": "response.output_item.done", "output_index": index, "item": {**item, "status": "completed"}}
        )
    assert events == expected


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("asked", ["short", ""])
def test_a_response_repeats_its_settings(served: Served, asked: str, is_streaming: bool):
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    for more, expected in (
        (SETTINGS, SETTINGS),
        ({"text": {"format": form}, "reasoning": {"effort": "low"}},
         {"text": {"format": form}, "reasoning": {"effort": "low", "summary": None}}),
    ):  # fmt: skip
        reply = served.post("/v1/responses", {"input": asked, "stream": is_streaming, **more})
        responses = [e["response"] for e in reply.events if "response" in e] if is_streaming else [reply.json]
        for response in responses:
            assert {name: response[name] for name in expected} == expected
        assert len({(response["id"], response["created_at"]) for response in responses}) == 1


@pytest.mark.parametrize("limit", [1, 3, 12, 40])
def test_an_item_is_the_same_in_its_event_and_in_the_response(
    served: Served, limit: int, monkeypatch: pytest.MonkeyPatch
):
    """Cut in reasoning, text or a call, and keep the time of creation."""
    times = iter(range(1000))
    monkeypatch.setattr("localllm.server.openai_responses.time", lambda: next(times))
    body = {"input": "all", "tools": FLAT_TOOLS, "max_output_tokens": limit, "temperature": 0}
    *_, last = (events := served.post("/v1/responses", {**body, "stream": True}).events)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"] and last["type"] == f"response.{last['response']['status']}"
    assert len({event["response"]["created_at"] for event in events if "response" in event}) == 1
    whole = served.post("/v1/responses", body).json
    keys = ("type", "status", "content", "arguments")
    assert [[item.get(key) for key in keys] for item in whole["output"]] == [
        [item.get(key) for key in keys] for item in done
    ]
    assert (whole["status"], whole["incomplete_details"]) == tuple(
        last["response"][key] for key in ("status", "incomplete_details")
    )


# ---- Anthropic's messages: https://docs.anthropic.com/en/api/messages

MESSAGE = {"id": "msg_*", "type": "message", "role": "assistant", "model": "scripted"}
BLOCKS = [{"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "So"},
          {"type": "tool_use", "id": "toolu_*", "name": "f", "input": {"a": 1}}]  # fmt: skip


def test_a_message_has_all_documented_fields(served: Served):
    body = {"messages": asked("all"), "tools": CLAUDE_TOOLS, "max_tokens": 300}
    reply = served.post("/v1/messages", body)
    message = masked_reply(reply)
    used = message.pop("usage")
    assert message == {**MESSAGE, "content": BLOCKS, "stop_reason": "tool_use", "stop_sequence": None}
    count = masked_reply(served.post("/v1/messages/count_tokens", body))
    assert used.keys() == {
        "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens",
    }  # fmt: skip
    assert count == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    assert used["cache_creation_input_tokens"] == 0 and re.fullmatch("req_[0-9a-f]{24}", reply.headers["request-id"])


def test_a_streamed_message_has_all_documented_events(served: Served):
    body = {"messages": asked("all"), "tools": CLAUDE_TOOLS, "max_tokens": 300, "stream": True}
    reply = served.post("/v1/messages", body)
    names = re.findall(r"^event: (.*)$", reply.body.decode(), re.MULTILINE)
    assert names == [event["type"] for event in reply.events]
    begun, ping, *events, delta, stop = join_events(reply.events)
    assert ping == {"type": "ping"}
    used = begun["message"].pop("usage")
    assert begun == {"type": "message_start", "message": {
        **MESSAGE, "content": [], "stop_reason": None, "stop_sequence": None}}  # fmt: skip
    last = delta.pop("usage")
    assert used["output_tokens"] == 0 and 40 < last["output_tokens"] <= LONGEST
    read = [sum(each[f"{name}input_tokens"] for name in ("", "cache_read_")) for each in (used, last)]
    assert read[0] == read[1]  # how many of them were known is told in the end
    assert delta == {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}}
    assert stop == {"type": "message_stop"}
    empty = [{**BLOCKS[0], "thinking": ""}, {**BLOCKS[1], "text": ""}, {**BLOCKS[2], "input": {}}]
    deltas = [{"type": "thinking_delta", "thinking": "Hm"}, {"type": "text_delta", "text": "So"},
              {"type": "input_json_delta", "partial_json": CALLED["arguments"]}]  # fmt: skip
    assert events == [
        event
        for index in range(3)
        for event in (
            {"type": "content_block_start", "index": index, "content_block": empty[index]},
            {"type": "content_block_delta", "index": index, "delta": deltas[index]},
            {"type": "content_block_stop", "index": index},
        )
    ]


@pytest.mark.parametrize(("fields", "reason"), [
    ({"max_tokens": 1}, ("max_tokens", None)), ({"max_tokens": 9}, ("end_turn", None)),
    ({"max_tokens": 9, "stop_sequences": ["x", "b"]}, ("stop_sequence", "b")),
])  # fmt: skip
def test_the_stop_reason_of_a_message_is_set(served: Served, fields: dict, reason: tuple):
    body = {"messages": asked("short"), **fields}
    message = masked_reply(served.post("/v1/messages", body))
    assert (message["stop_reason"], message["stop_sequence"]) == reason
    delta = served.post("/v1/messages", {**body, "stream": True}).events[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == reason


# ---- what there is


def test_models_are_listed_as_documented(served: Served):
    """Follow https://platform.openai.com/docs/api-reference/models."""
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "localllm"} for name in ("scripted", "other")]
    assert masked_reply(served.get("/v1/models")) == {"object": "list", "data": models}
    assert masked_reply(served.get("/v1/models/other")) == models[1]


def test_health_and_props_describe_the_server(served: Served):
    served.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert masked_reply(served.get("/health")) == {"status": "ok", "running": 0, "waiting": 0}
    props = masked_reply(served.get("/props"))
    template = props["models"][0].pop("chat_template")
    assert {name: props[name] for name in ("n_ctx", "models")} == {"n_ctx": 4096, "models": [
        {"name": "scripted", "open": True, "architecture": "llama", "format": "F32", "context": 4096,
         "trained_context": 512, "device": "CPU", "modalities": {"vision": False}},
        {"name": "other", "open": False},
    ]}  # fmt: skip
    assert template == THINKING


METRICS = {
    "http_requests_total": "counter", "answers_running": "gauge", "requests_waiting": "gauge",
    "requests_finished_total": "counter", "requests_left_total": "counter", "prompt_tokens_read_total": "counter",
    "prompt_tokens_cached_total": "counter", "tokens_written_total": "counter", "models_open": "gauge",
    "memory_held_bytes": "gauge", "first_token_seconds": "histogram", "between_tokens_seconds": "histogram",
}  # fmt: skip


def test_metrics_are_in_the_format_of_prometheus(served: Served):
    """Follow https://prometheus.io/docs/instrumenting/exposition_formats."""
    served.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    reply = served.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = reply.body.decode().splitlines()
    kinds = {line.split()[2].removeprefix("localllm_"): line.split()[3] for line in lines if line.startswith("# TYPE ")}
    helps = [line.split()[2].removeprefix("localllm_") for line in lines if line.startswith("# HELP ")]
    assert kinds == METRICS and helps == [*METRICS]
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert (values["localllm_models_open"], values["localllm_answers_running"]) == (1, 0)
    assert values["localllm_memory_held_bytes"] > 300_000_000 and values["localllm_requests_left_total"] == 0


@pytest.mark.parametrize(("method", "path", "status", "reason"), [
    ("GET", "/nothing", 404, "unknown path"), ("GET", "/health/x", 404, "unknown path"),
    ("GET", "/v1/chat/completions", 405, "method not allowed"),
    ("GET", "/v1/messages", 405, "method not allowed"), ("POST", "/health", 405, "method not allowed"),
])  # fmt: skip
def test_unknown_paths_and_methods_are_refused(served: Served, method: str, path: str, status: int, reason: str):
    reply = served.ask(method, path, None, {})
    assert reply.status == status and reason in reply.json["error"]["message"]
    assert ("param" in reply.json["error"]) == (path != "/v1/messages") == ("type" not in reply.json)
