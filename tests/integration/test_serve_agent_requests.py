"""Test requests as coding agents send them within a task: no field is refused or ignored."""

import json
from typing import Any

import pytest
from served import Served, prompt_of_latest, scripted, serving
from tiny_model import write_tiny_model

from tests.unit.generation.tools.test_tool_grammar import QWEN
from tests.unit.server.test_agent_requests import call

PATH = {"type": "string", "description": "Absolute path"}
SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": False}
READ = {**SCHEMA, "required": ["path"], "properties": {
    "path": PATH, "offset": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
    "kinds": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "maxItems": 3},
    "meta": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    "when": {"anyOf": [{"const": "now"}, {"type": "string", "format": "date-time", "minLength": 1}], "default": "now"},
}}  # fmt: skip
SPOKEN = {"name": "read", "description": "Reads a file.", "parameters": READ}
CHAT_TOOLS = [{"type": "function", "function": SPOKEN}]
ASKED, SYSTEM, FILE = "fix it", "You are a coding agent.", "def add(a, b):\n    return a - b"
ARGUMENTS = '{"path":"/w/calc.py"}'
CALLED = {"id": "aB3dE6gH9", "type": "function", "function": {"name": "read", "arguments": ARGUMENTS}}


def chat(content: Any, parts: bool, **fields: Any) -> dict[str, Any]:
    """Return two turns of an agent with OpenAI's chat API."""
    wrapped = (lambda text: [{"type": "text", "text": text}]) if parts else str
    messages = [
        {"role": "system", "content": SYSTEM}, {"role": "user", "content": wrapped("<context>")},
        {"role": "assistant", "content": "Understood."}, {"role": "user", "content": wrapped(ASKED)},
        {"role": "assistant", "content": content, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": CALLED["id"], "content": wrapped(FILE)},
    ]  # fmt: skip
    return {"model": "m", "messages": messages, "tools": CHAT_TOOLS, **fields}


def without(request: dict[str, Any], *path: Any) -> dict[str, Any]:
    inner = request
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return request


def codex() -> dict[str, Any]:
    tool = {"type": "function", "strict": False, **SPOKEN, "output_schema": None}
    agents = {"type": "function", "name": "spawn", "description": "", "strict": False, "parameters": {"type": "object"}}
    parts = lambda text: [{"type": "input_text", "text": text}]  # noqa: E731
    items = [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [*parts(SYSTEM), *parts("<permissions>")]},
        {"type": "message", "id": "msg_2", "role": "developer", "content": parts("<skills>")},
        {"type": "message", "id": "msg_3", "role": "user", "content": parts("<environment_context>")},
        {"type": "message", "id": "msg_4", "role": "user", "content": parts(ASKED)},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "function_call", "id": "item_1", "status": "completed", "name": "read", "arguments": ARGUMENTS,
         "call_id": "call_1"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": FILE},
    ]  # fmt: skip
    return {
        "model": "m", "stream": True, "input": items, "tool_choice": "auto", "parallel_tool_calls": True,
        "tools": [tool, {"type": "namespace", "name": "agents_v1", "description": "", "tools": [agents]}],
        "reasoning": {"summary": "auto"}, "store": False, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2", "client_metadata": {"x-codex-window-id": "01a2:0"},
    }  # fmt: skip


def claude() -> dict[str, Any]:
    cache = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": SYSTEM, **cache}]
    use = {"type": "tool_use", "id": "toolu_aB3dE6gH9", "name": "read", "input": json.loads(ARGUMENTS)}
    result = {"tool_use_id": use["id"], "type": "tool_result", "content": FILE, "is_error": False, **cache}
    return {
        "model": "m", "max_tokens": 32000, "stream": True, "system": system, "thinking": {"type": "adaptive"},
        "metadata": {"user_id": '{"device_id":"0f"}'}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "tools": [{"name": "read", "description": "Reads a file.", "input_schema": READ}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": ASKED}]},
            {"role": "system", "content": "Plan first."},
            {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]},
        ],
    }  # fmt: skip


CHAT = "/v1/chat/completions"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
AGENTS = {
    "claude": ("/v1/messages", claude()), "codex": ("/v1/responses", codex()),
    "opencode": (CHAT, chat("", False, **STREAM, max_tokens=32000, tool_choice="auto")),
    "qwen": (CHAT, chat(None, True, **STREAM, max_tokens=8000)),
    "aider": (CHAT, without(chat("", False, temperature=0), "tools")),
    "mini": (CHAT, without(chat("", False), "messages", 4, "content")),
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", chat_template=QWEN))
    script = dict.fromkeys((ASKED, f"<reminder>\n{ASKED}"), call("read", json.loads(ARGUMENTS)))
    with serving({"scripted": lambda: scripted(path, script)}) as server:
        yield server


@pytest.mark.parametrize("name", AGENTS)
def test_requests_of_agents_are_answered_without_ignored_fields(served: Served, name: str):
    address, body = AGENTS[name]
    reply = served.post(address, body)
    assert reply.status == 200, reply.json
    assert "x-localllm-ignored" not in reply.headers, reply.headers["x-localllm-ignored"]
    read = prompt_of_latest(served, "scripted")
    assert all(text in read for text in (SYSTEM, ASKED, FILE, '{"path": "/w/calc.py"}'))
    assert read.index(SYSTEM) < read.index(ASKED) < read.index(FILE)
    if "tools" in body:
        assert b'"name":"read"' in reply.body
