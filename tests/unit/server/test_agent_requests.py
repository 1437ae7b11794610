"""Test what agents and editors send: unusual numbers, and many types of calls, results and tools."""

import asyncio
import json
import time
from typing import Any

import pytest
from served import Served, prompt_of_latest, scripted, serving
from tiny_model import write_tiny_model

from localllm.errors import UsageError
from localllm.server import anthropic_messages
from localllm.server.fields import RequestBody
from localllm.server.openai_responses import parse_input
from localllm.server.request_options import parse_keep_alive, parse_sampling, parse_tool_choice
from tests.unit.generation.embedding.test_embedder import write_wordpiece_model
from tests.unit.generation.tools.test_tool_grammar import QWEN

HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI}, TEXT: {"prompt": "Hi"}, RESPONSE: {"input": "Hi"},
    MESSAGE: {"messages": HI, "max_tokens": 4},
}  # fmt: skip
FUNCTION = {"name": "now", "description": "The time"}


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


SCRIPT = {
    "read": call("mcp__files__read", {"path": "a"}), "patch": call("apply_patch", {"input": 'two\n"lines"'}),
    "dotted": call("a.b-c/d:e", {}), "now": call("now", {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", chat_template=QWEN))


@pytest.fixture(scope="module")
def server(path: str):
    with serving({"scripted": lambda: scripted(path, SCRIPT)}) as served:
        yield served


# ---- numbers


@pytest.mark.parametrize("address", REQUESTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1, "max_output_tokens": -1}, {"max_tokens": 0, "max_output_tokens": 0},
        {"max_tokens": 4.0, "max_output_tokens": 4.0}, {"seed": 7.0}, {"seed": -2}, {"top_p": 0}, {"top_p": 1.1},
        {"top_k": -1}, {"top_k": 2.0}, {"typical_p": 0}, {"min_p": -1}, {"dry_multiplier": -1},
        {"logit_bias": []}, {"logit_bias": [[5, -1.5], ["6", False]]}, {"logit_bias": {"99999999": -100, "5": 1}},
    ],
)  # fmt: skip
def test_unusual_numbers_are_accepted(server: Served, address: str, fields: dict):
    reply = server.post(address, {**REQUESTS[address], **fields})
    assert reply.status == 200, reply.json


@pytest.mark.parametrize(
    ("address", "fields"),
    [
        (CHAT, {"n": 1.0}), (CHAT, {"top_logprobs": 2.0}), (CHAT, {"stop": ""}), (CHAT, {"stop": ["", "x"]}),
        (CHAT, {"max_completion_tokens": -1}), (CHAT, {"stop": "x", "response_format": {"type": "text"}}),
        (TEXT, {"stop": [""]}), (TEXT, {"logprobs": True}), (TEXT, {"logprobs": False}), (TEXT, {"n": 2.0}),
        (TEXT, {"prompt": ""}), (TEXT, {"prompt": [""]}), (TEXT, {"prompt": None}), (TEXT, {"prompt": ["", "Hi"]}),
        (MESSAGE, {"stop_sequences": ["", "x"]}), (MESSAGE, {"max_tokens": 64.0}),
    ],
)  # fmt: skip
def test_unusual_numbers_of_one_api_are_accepted(server: Served, address: str, fields: dict):
    reply = server.post(address, {**REQUESTS[address], **fields})
    assert reply.status == 200, reply.json


def test_negative_limits_are_unlimited_and_0_generates_nothing(server: Served):
    def answered(**fields: Any) -> tuple[Any, ...]:
        reply = server.post(CHAT, {"messages": HI, **fields}).json
        choice = reply["choices"][0]
        return choice["message"]["content"], choice["finish_reason"], reply["usage"]["completion_tokens"]

    assert answered(max_tokens=-1)[:2] == ("HI", "stop")
    assert answered(max_tokens=0) == ("", "length", 0)
    assert answered(max_completion_tokens=1.0)[1:] == ("length", 1)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"top_p": 0}, "top_p", 5e-324), ({"top_p": 1.1}, "top_p", 1.0), ({"top_p": 1}, "top_p", 1.0),
        ({"top_k": -1}, "top_k", 0), ({"top_k": 7.0}, "top_k", 7), ({"typical_p": 0}, "typical", 5e-324),
        ({"typical_p": 1}, "typical", 1.0), ({"min_p": 2}, "min_p", 1.0), ({"seed": 7.0}, "seed", 7),
        ({"seed": -1}, "seed", None), ({"seed": -2}, "seed", 2**64 - 2), ({"dry_multiplier": -1}, "dry_multiplier", 0),
        ({"logit_bias": [[5, 1], ["6", False]]}, "logit_bias", {5: 1.0, 6: float("-inf")}),
        ({"logit_bias": []}, "logit_bias", {}),
    ],
)  # fmt: skip
def test_unusual_numbers_are_read_as_their_meaning(fields: dict, name: str, value: Any):
    assert getattr(parse_sampling(RequestBody(fields)), name) == value


@pytest.mark.parametrize(
    "fields",
    [{"repeat_penalty": 0}, {"top_p": "1"}, {"top_k": 1.5}, {"seed": 7.5}, {"logit_bias": [[5]]}, {"min_p": True},
     {"logit_bias": [[True, 1]]}, {"logit_bias": {"a": 1}}, {"logit_bias": [[5, "x"]]}],
)  # fmt: skip
def test_invalid_numbers_are_refused(fields: dict):
    with pytest.raises(UsageError):
        parse_sampling(RequestBody(fields))


# ---- history of Codex and of Anthropic's agents

CUSTOM = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x\ny"}


def history(*items: Any) -> list[dict[str, Any]]:
    return parse_input(RequestBody({"input": [{"role": "user", "content": "Hi"}, *items]}))[1:]


def test_custom_and_search_calls_become_function_calls():
    done = history(CUSTOM, {"type": "custom_tool_call_output", "call_id": "c", "output": "done"})
    function = {"name": "apply_patch", "arguments": '{"input": "x\\ny"}'}
    assert done == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "done", "name": "apply_patch"},
    ]
    search = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}}
    assistant, result = history(search)
    assert assistant["tool_calls"][0]["function"]["name"] == "web_search"
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"action": search["action"]}
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "ws", "completed")
    listed = {"type": "mcp_call", "id": "m", "name": "list", "arguments": "{}", "output": "a\nb", "server_label": "s"}
    assert [message["content"] for message in history(listed)] == ["", "a\nb"]
    shell = {"type": "local_shell_call", "call_id": "s", "action": {"type": "exec", "command": ["ls"]}}
    output = {"type": "local_shell_call_output", "call_id": "s", "output": [{"stdout": "a", "exit_code": 0}]}
    assert history(shell, output)[1]["content"] == '[{"stdout": "a", "exit_code": 0}]'
    spaced = {"type": "function_call", "call_id": "n", "namespace": "mcp__files__", "name": "read", "arguments": "{}"}
    assert history(spaced)[0]["tool_calls"][0]["function"]["name"] == "mcp__files__read"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": [None, {"type": "reasoning_text", "text": "a"}, "b", {"text": None}, 5]}, "a\nb"),
        ({"content": [], "summary": [{"type": "summary_text", "text": "c"}]}, "c"), ({"content": "d"}, "d"),
        ({"content": None, "summary": ["e"]}, "e"), ({"summary": [None], "encrypted_content": "x"}, None),
        ({"content": {"text": "f"}}, "f"), ({}, None),
    ],
)  # fmt: skip
def test_reasoning_items_are_read_in_any_form(fields: dict, text: str | None):
    expected = [{"role": "assistant", "content": "", "reasoning_content": text}] if text else []
    assert history({"type": "reasoning", **fields}) == expected


def test_unknown_items_are_reported_as_ignored(server: Served):
    items = [{"role": "user", "content": "Hi"}, {"type": "ghost_snapshot", "x": 1}, {"type": "compaction"}]
    reply = server.post(RESPONSE, {"input": items, "tools": [{"type": "web_search"}]})
    assert reply.status == 200 and reply.json["output"][0]["content"][0]["text"] == "HI"
    assert reply.headers["x-localllm-ignored"] == "tools[0]:web_search, input[1]:ghost_snapshot, input[2]:compaction"
    assert server.post(RESPONSE, {"input": [{"type": "item_reference", "id": "x"}]}).status == 400


def claude(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return anthropic_messages.parse_messages(list(messages))


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "title": "T", "source": source}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (document(type="text", media_type="text/plain", data="words"), "T\nwords"),
        (document(type="content", content="words"), "T\nwords"),
        (document(type="content", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "T\na\nb"),
        (document(type="base64", media_type="text/plain", data="d29yZHM="), "T\nwords"),
        ({**document(type="text", data="words"), "context": "C", "citations": {"enabled": True}}, "T\nC\nwords"),
        ({"type": "search_result", "source": "https://a.example", "title": "A",
          "content": [{"type": "text", "text": "x"}]}, "A\nhttps://a.example\nx"),
        ({"type": "tool_reference", "tool_name": "read"}, "read"),
    ],
)  # fmt: skip
def test_documents_become_their_texts(block: dict, text: str):
    """Read them in user messages and in tool results."""
    assert claude({"role": "user", "content": [block]}) == [{"role": "user", "content": text}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    assert claude({"role": "user", "content": [result]})[0]["content"] == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"type": "base64", "media_type": "application/pdf", "data": "JVBE"}, "application/pdf is not supported"),
        ({"type": "url", "url": "https://a.example/a.pdf"}, "url is not supported"),
        ({"type": "file", "file_id": "f"}, "file is not supported"), ({}, "is not supported"),
        ({"type": "base64", "media_type": "text/plain", "data": "a"}, "as base64"),
    ],
)  # fmt: skip
def test_documents_without_a_text_are_refused(server: Served, source: dict, reason: str):
    reply = server.post(MESSAGE, {"max_tokens": 4, "messages": [{"role": "user", "content": [document(**source)]}]})
    message = reply.json["error"]["message"]
    assert reply.status == 400 and reason in message and "\n" not in message


def test_calls_run_by_anthropics_servers_become_three_messages():
    """Split them into the call, its result and the answer."""
    blocks = [
        {"type": "text", "text": "Let me see."},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
            {"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "xyz"}]},
        {"type": "text", "text": "So.", "citations": []},
    ]  # fmt: skip
    first, result, last = claude({"role": "assistant", "content": blocks})
    assert (first["content"], first["tool_calls"][0]["function"]["name"]) == ("Let me see.", "web_search")
    assert result == {
        "role": "tool",
        "tool_call_id": "s",
        "content": '{"title": "T", "url": "u"}',
        "name": "web_search",
    }
    assert last == {"role": "assistant", "content": "So."}
    failed = {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {"type": "x", "error_code": "late"}}
    assert claude({"role": "assistant", "content": [failed]})[0]["content"] == '{"error_code": "late"}'


# ---- tools


def response_tools() -> list[dict[str, Any]]:
    inner = {"type": "function", "name": "read", "parameters": {"properties": {"path": {"type": "string"}}}}
    return [{"type": "namespace", "name": "mcp__files__", "description": "Files", "tools": [inner]},
            {"type": "custom", "name": "apply_patch", "format": {"type": "text"}}, {"type": "local_shell"}]  # fmt: skip


def test_tools_of_a_namespace_are_called_by_their_qualified_names(server: Served):
    reply = server.post(RESPONSE, {"input": "read", "tools": response_tools()})
    (item,) = reply.json["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__files__", "read")
    assert json.loads(item["arguments"]) == {"path": "a"}
    assert reply.headers["x-localllm-ignored"] == "tools[2]:local_shell"
    events = server.post(RESPONSE, {"input": "read", "tools": response_tools(), "stream": True}).events
    done = next(event["item"] for event in events if event["type"] == "response.output_item.done")
    assert (done["namespace"], done["name"]) == ("mcp__files__", "read")
    assert [event["name"] for event in events if event["type"].endswith("arguments.done")] == ["read"]


def test_custom_tools_take_a_string(server: Served):
    (item,) = server.post(RESPONSE, {"input": "patch", "tools": response_tools()}).json["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", 'two\n"lines"')
    events = server.post(RESPONSE, {"input": "patch", "tools": response_tools(), "stream": True}).events
    assert [event["delta"] for event in events if event["type"].endswith("input.delta")] == ['two\n"lines"']
    assert [event["input"] for event in events if event["type"].endswith("input.done")] == ['two\n"lines"']


def test_tool_names_with_dots_and_slashes_are_kept(server: Served):
    tools = [{"type": "function", "function": {"name": "a.b-c/d:e"}}]
    (called,) = server.chat("dotted", tools=tools).json["choices"][0]["message"]["tool_calls"]
    assert called["function"] == {"name": "a.b-c/d:e", "arguments": "{}"}


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"properties": {}}, {"type": "object", "properties": None, "required": None}, {"type": None},
     {"type": "object", "required": []}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}],
)  # fmt: skip
def test_tools_without_parameters_take_an_empty_object(server: Served, parameters: Any):
    tools = [{"type": "function", "function": {**FUNCTION, "parameters": parameters}}]
    for choice in ("auto", "required"):
        (called,) = server.chat("now", tools=tools, tool_choice=choice).json["choices"][0]["message"]["tool_calls"]
        assert called["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        (None, ("auto", None)), ("any", ("required", None)), ({"type": "required"}, ("required", None)),
        ({"type": "none"}, ("none", None)), ({"type": "custom", "custom": {"name": "x"}}, ("x", None)),
        ({"type": "function", "name": "x", "namespace": "n"}, ("n__x", None)),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "x"}, {"type": "mcp"}]},
         ("required", ("x",))),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "x"}}]}}, ("auto", ("x",))),
    ],
)  # fmt: skip
def test_tool_choices_are_parsed_in_every_form(choice: Any, meant: Any):
    assert parse_tool_choice(choice) == meant


def test_only_allowed_tools_are_called(server: Served):
    tools = [{"type": "function", "function": {"name": name}} for name in ("now", "then")]
    for name in ("now", "then"):
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
        reply = server.chat("x", tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        (called,) = reply.json["choices"][0]["message"]["tool_calls"]
        assert called["function"]["name"] == name
    none = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    assert server.chat("Hi", tools=tools, tool_choice=none).json["choices"][0]["message"]["content"] == "HI"
    other = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}
    assert "not one of the tools" in server.chat("Hi", tools=tools, tool_choice=other).json["error"]["message"]


def test_tools_that_the_server_cannot_run_are_reported_as_ignored(server: Served):
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    reply = server.post(MESSAGE, {**REQUESTS[MESSAGE], "tools": tools, "tool_choice": {"type": "any"}})
    assert (reply.status, reply.headers["x-localllm-ignored"]) == (200, "tools[0]:web_search_20250305")
    reply = server.chat("Hi", tools=[{"type": "custom", "custom": {"name": "x"}}], tool_choice="required")
    assert (reply.status, reply.headers["x-localllm-ignored"]) == (200, "tools[0]:custom")


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        ("bash_20250124", "bash", {"command": "ls"}), ("bash_20241022", "bash", {"restart": True}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command": "view", "path": "a", "view_range": [1, 9]}),
        ("memory_20250818", "memory", {"command": "rename", "old_path": "a", "new_path": "b"}),
    ],
)  # fmt: skip
def test_tools_that_anthropics_clients_run_are_called(path: str, kind: str, name: str, arguments: dict):
    with serving({"scripted": lambda: scripted(path, {"Hi": call(name, arguments)})}) as served:
        reply = served.post(MESSAGE, {"messages": HI, "max_tokens": 200, "tools": [{"type": kind, "name": name}]})
    (block,) = reply.json["content"]
    assert (block["name"], block["input"]) == (name, arguments) and "x-localllm-ignored" not in reply.headers


# ---- models that nobody uses


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), (0, 0), (-1, -1), (2.5, 2.5), ("5m", 300), ("1h30m", 5400), ("30s", 30), ("30", 30), ("-1m", -60),
     ("0", 0), ("1h0m1.5s", 3601.5)],
)  # fmt: skip
def test_keep_alive_is_parsed_as_a_duration(value: Any, seconds: float | None):
    assert parse_keep_alive(RequestBody({"keep_alive": value})) == seconds


@pytest.mark.parametrize("value", ["", "x", "5 m", True, [], "-", "m"])
def test_invalid_durations_are_refused(value: Any):
    with pytest.raises(UsageError, match="keep_alive must be"):
        parse_keep_alive(RequestBody({"keep_alive": value}))


def is_open(served: Served, wanted: bool) -> bool:
    end = time.monotonic() + 10
    while (served.model() is not None) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return (served.model() is not None) == wanted


def test_an_idle_model_is_unloaded(path: str):
    with serving({"scripted": lambda: scripted(path, SCRIPT)}, idle_seconds=0.05) as served:
        for _ in range(2):  # and opened again
            assert served.chat("Hi").status == 200 and is_open(served, False)
        assert served.chat("Hi", keep_alive=-1).status == 200
        time.sleep(0.2)
        assert is_open(served, True)
        assert served.chat("Hi", keep_alive="0s").status == 200 and is_open(served, False)
        assert served.chat("Hi", keep_alive=[]).status == 400


def test_a_model_in_use_stays_loaded(path: str):
    with serving({"scripted": lambda: scripted(path, SCRIPT)}) as served:
        pool = served.service.pool

        async def use() -> None:
            async with pool.use(None):
                async with pool.use(None, 0):
                    pass
                await asyncio.sleep(0.05)
                assert pool.resolve(None).model is not None
            await asyncio.sleep(0.05)
            assert pool.resolve(None).model is not None  # the latest request says nothing

        asyncio.run_coroutine_threadsafe(use(), served.loop).result(10)


def test_an_embedding_model_and_a_chat_model_share_the_memory(tmp_path, path: str):
    """Open them in either order."""
    bert = write_wordpiece_model("bert", tmp_path / "bert.gguf")
    with serving({"bert": str(bert), "tiny": path}, memory=4_000_000_000) as served:
        for _ in range(2):
            assert served.post("/v1/embeddings", {"model": "bert", "input": "the cat"}).status == 200
            assert served.chat("Hi", model="tiny", max_tokens=2).status == 200
            assert served.get("/metrics").status == 200 and b"localllm_models_open 2" in served.get("/metrics").body


def test_arguments_of_a_cut_call_are_rendered_as_text(server: Served):
    for text in ('{"cut', "{", "null", "[]", '"x"'):
        called = {"id": "c", "type": "function", "function": {"name": "now", "arguments": text}}
        messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [called]},
                    {"role": "tool", "tool_call_id": "c", "content": None}, *HI]  # fmt: skip
        assert server.post(CHAT, {"messages": messages}).status == 200
        assert text in prompt_of_latest(server, "scripted")


def test_two_names_of_a_file_open_it_once(path: str):
    with serving({"a": path, "b": path}) as served:
        for name, expected in (("a", "a"), ("b", "b"), ("", "a"), ("gpt-x", "a")):
            assert served.chat("Hi", model=name, max_tokens=1).json["model"] == expected
        assert served.model("a") is served.model("b")
        assert [model["open"] for model in served.get("/props").json["models"]] == [True, True]
        assert b"localllm_models_open 1" in served.get("/metrics").body
