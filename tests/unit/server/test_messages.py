"""Test messages and tools in forms that clients of other servers send."""

import base64
from typing import Any

import pytest
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm.errors import UsageError
from localllm.server import anthropic_messages
from localllm.server.app import PATHS, normalize_path
from localllm.server.fields import RequestBody
from localllm.server.messages import parse_messages
from localllm.server.openai_responses import parse_input
from tests.unit.generation.tools.test_tool_grammar import QWEN
from tests.unit.server.test_agent_requests import call

TEXT_FILE = "data:text/plain;base64," + base64.b64encode("wörds".encode()).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", chat_template=QWEN))
    with serving({"scripted": lambda: scripted(path, {"go": call("w", {"a": "x", "n": 3})})}) as served:
        yield served


def content_of(content: Any, role: str = "user") -> Any:
    return parse_messages([{"role": role, "content": content}])[0]["content"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (["a", "b"], "a\nb"), ([{"text": "a"}], "a"), ([{"type": "text", "text": None}], ""),
        ([{"type": "text", "text": "a"}, "b"], "a\nb"), ([{"type": "input_text", "text": "a"}], "a"),
        ([{"type": "file", "file": {"filename": "n.txt", "file_data": TEXT_FILE}}], "n.txt\nwörds"),
        ([{"type": "input_file", "file_data": TEXT_FILE.rpartition(",")[2]}], "wörds"),
    ],
)  # fmt: skip
def test_content_parts_of_other_forms_become_text(content: Any, text: str):
    assert content_of(content) == text


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "file", "file": {"file_id": "f"}}, "files are not stored"),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBE"}}, "application/pdf is not supp"),
        ({"type": "input_file", "file_data": "data:text/plain;base64,/w=="}, "must be UTF-8 text"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "unsupported part type 'video_url'"),
        ({"type": "text", "text": 5}, "must have a string as its text"), (5, "a part must be an object"),
    ],
)  # fmt: skip
def test_unreadable_content_parts_are_refused(part: Any, reason: str):
    with pytest.raises(UsageError, match=reason):
        content_of([part])


@pytest.mark.parametrize(
    ("content", "text"),
    [({"a": 1}, '{"a": 1}'), ([{"a": 1}, {"b": "ä"}], '[{"a": 1}, {"b": "ä"}]'), (5, "5"), (False, "false"), ([], ""),
     (["a"], "a"), (None, "")],
)  # fmt: skip
def test_tool_results_of_any_form_become_text(content: Any, text: str):
    """Compare all APIs."""
    assert content_of(content, "tool") == text
    assert (
        parse_input(body_of({"type": "function_call_output", "call_id": "c", "output": content}))[0]["content"] == text
    )
    if not isinstance(content, dict):  # one block
        result = {"type": "tool_result", "tool_use_id": "t", "content": content}
        assert anthropic_messages.parse_messages([{"role": "user", "content": [result]}])[0]["content"] == text


def body_of(item: dict[str, Any]) -> RequestBody:
    return RequestBody({"input": [item]})


@pytest.mark.parametrize("kind", ["thinking", "reasoning"])
def test_reasoning_parts_are_joined(kind: str):
    parts = [{"type": kind, kind: "Hm"}, {"type": kind, "text": "so"}, {"type": "text", "text": "x"}]
    (message,) = parse_messages([{"role": "assistant", "content": parts}])
    assert message == {"role": "assistant", "content": "x", "reasoning_content": "Hm\nso"}


def test_calls_of_custom_tools_become_function_calls():
    called = {"id": "x", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
    (message,) = parse_messages([{"role": "assistant", "content": None, "tool_calls": [called]}])
    assert message["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "a\nb"}}


def test_summaries_of_anthropic_are_text():
    blocks = [{"type": "compaction", "content": "summary"}]
    assert anthropic_messages.parse_messages([{"role": "assistant", "content": blocks}])[0]["content"] == "summary"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "any"}, {"type": "str"}, {"pattern": "(?=x)y", "type": "string"}, {"$ref": "#/$defs/Missing"}, None,
        {"type": "string", "minLength": 1.0, "maxLength": 5.0}, {"not": {"type": "null"}},
    ],
)  # fmt: skip
def test_tool_parameters_beyond_the_grammar_are_unconstrained(server: Served, schema: Any):
    """Constrain the other parameters, and refuse a strict tool."""
    properties = {"a": schema, "n": {"type": "integer", "maximum": 5}}
    function = {"name": "w", "parameters": {"type": "object", "properties": properties, "required": ["a", "n"]}}
    reply = server.chat("go", tools=[{"type": "function", "function": function}])
    assert reply.status == 200, reply.json
    (called,) = reply.json["choices"][0]["message"]["tool_calls"]
    assert called["function"]["arguments"] == '{"a":"x","n":3}'
    function["parameters"]["properties"]["n"] = {"type": "integer", "maximum": 2}
    assert server.chat("go", tools=[{"type": "function", "function": function}]).body.count(b'"n":3') == 0


def test_strict_tools_with_unsupported_schemas_are_refused(server: Served):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    tools = [{"type": "function", "function": {"name": "w", "strict": True, "parameters": schema}}]
    assert "look-around" in server.chat("go", tools=tools).json["error"]["message"]


def test_an_unknown_tool_type_takes_any_object(server: Served):
    schema = {
        "type": "object",
        "if": {"properties": {"a": {"pattern": "(?=x)"}}},
        "allOf": [{"not": {"required": ["a"]}}],
    }
    tools = [{"type": "function", "function": {"name": "w", "parameters": schema}}]
    assert server.chat("go", tools=tools).status == 200


@pytest.mark.parametrize("effort", ["default", "max", "xhigh", None])
def test_reasoning_efforts_of_other_providers_are_accepted(server: Served, effort: str | None):
    assert server.chat("Hi", reasoning_effort=effort, stop=[None, ""]).status == 200


@pytest.mark.parametrize(
    ("path", "meant"),
    [("/api/v1/models", "/v1/models"), ("/openai/v1/chat/completions", "/v1/chat/completions"),
     ("/openai//v1/v1/models/", "/v1/models"), ("/api/tags", "/api/tags"), ("/other/v1/models", "/other/v1/models")],
)  # fmt: skip
def test_base_paths_of_other_providers_are_normalized(path: str, meant: str):
    assert normalize_path(path, PATHS) == meant
