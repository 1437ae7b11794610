"""The parts of the server, without one: fields, errors by their numbers, who may ask, streams, what is counted."""

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")

import h11
from starlette.datastructures import Headers

from localllm.errors import ContextError, LocalllmError, MemoryLimitError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.constraints.constraint import constraint_of
from localllm.generation.logprobs import token_logprobs
from localllm.generation.reasoning import ANSWER, REASONING, TextPart
from localllm.generation.tools.tool_call_parser import ARGUMENTS, CALL
from localllm.server import http as wire
from localllm.server import model_pool as model_pool
from localllm.server import page, service, worker
from localllm.server.anthropic_messages import parse_messages as conversation_of_anthropic
from localllm.server.anthropic_messages import parse_request
from localllm.server.anthropic_messages import stream_events as streamed_message
from localllm.server.attachments import MAX_IMAGES, image_part, resolve_file, resolve_images
from localllm.server.content_blocks import CLOSE, DELTA, OPEN, Blocks
from localllm.server.embeddings import MAX_TEXTS, parse_texts, run_exclusively
from localllm.server.fields import Body
from localllm.server.guard import Guard, Rules
from localllm.server.http import (
    ClientDisconnectedError,
    EventStream,
    Limits,
    RejectedRequestError,
    RequestTimeoutError,
    anthropic_error,
    error_format_of,
    error_response,
    format_event,
    openai_error,
    parse_json,
    read_json,
    run_until_disconnect,
    status_of,
)
from localllm.server.listener import Ending, IdleTimeoutProtocol, bind_tcp, bind_unix, create_listener
from localllm.server.messages import parse_messages
from localllm.server.metrics import Histogram, Metrics
from localllm.server.model_pool import ModelEntry, ModelPool, UnknownModelError
from localllm.server.openai_chat import IGNORED_HEADER, extension_headers
from localllm.server.openai_chat import parse_request as parse_chat_request
from localllm.server.openai_chat import stream_chunks as streamed_chat
from localllm.server.openai_completions import MAX_PROMPTS, parse_prompts
from localllm.server.openai_completions import parse_request as parse_completion_request
from localllm.server.openai_completions import stream_chunks as streamed_texts
from localllm.server.openai_responses import ResponseBuilder, parse_input
from localllm.server.openai_responses import parse_request as question_of_responses
from localllm.server.openai_responses import parse_tools as tools_of_responses
from localllm.server.openai_responses import stream_events as streamed_response
from localllm.server.page import keep_stored_details
from localllm.server.request_options import (
    parse_biases,
    parse_function,
    parse_options,
    parse_sampling,
    parse_schema,
    parse_think,
    parse_tool_choice,
    parse_tools,
)
from localllm.server.service import merge, next_before
from localllm.server.worker import StoppedError, Worker

# ---- fields


def test_kinds_of_fields():
    body = Body({"t": "x", "n": 1.5, "i": 3, "b": True, "l": [1], "o": {"a": 1}, "none": None})
    assert (body.get_text("t"), body.get_int("i"), body.get_bool("b")) == ("x", 3, True)
    assert body.get_list("l") == [1] and body.get_mapping("o") == {"a": 1} and body.get_object("o").get("a") == 1
    for read in (body.get_text, body.get_int, body.get_list, body.get_mapping, body.get_object):
        assert read("none") is None and read("missing") is None
    assert body.get_bool("none") is False and body.get_texts("none") == body.get_texts("missing") == ()
    assert body.get_texts("t") == ("x",) and Body({"s": ["a", "b"]}).get_texts("s") == ("a", "b")
    for read, field, what in (
        (body.get_text, "i", "a string, not an integer"),
        (body.get_int, "b", "an integer, not a boolean"), (body.get_int, "n", "an integer, not a number"),
        (body.get_bool, "i", "a boolean, not an integer"), (body.get_list, "t", "an array, not a string"),
        (body.get_mapping, "l", "an object, not an array"), (body.get_texts, "l", "a string or an array of strings"),
        (body.get_texts, "i", "a string or an array of strings"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=f"^{field} must be {what}"):
            read(field)
    for read in (body.require_text, body.require_list):
        with pytest.raises(UsageError, match=r"^none is missing"):
            read("none")
    with pytest.raises(UsageError, match=r"^o.a must be a string"):
        body.get_object("o").get_text("a")
    with pytest.raises(UsageError, match=r"^tools must be an object, not an array"):
        Body.of([], "tools")


@pytest.mark.parametrize(("value", "least", "most", "fits"), [
    (0, 0, None, True), (-1, 0, None, False), (1, 1, 3, True), (3, 1, 3, True), (4, 1, 3, False), (0, 1, 3, False),
])  # fmt: skip
def test_borders_of_numbers(value: int, least: int, most: int | None, fits: bool):
    if fits:
        assert Body({"x": value}).get_int("x", least, most) == value
    else:
        with pytest.raises(UsageError, match=r"x must be (0 or greater|from 1 to 3), not"):
            Body({"x": value}).get_int("x", least, most)


def test_what_nobody_has_read():
    body = Body({"a": 1, "b": 2, "c": "high", "d": [], "e": 0})
    body.get("a")
    assert body.get_choice("c", ("low", "high")) == "high" and body.ignored == ["b", "d", "e"]
    with pytest.raises(UsageError, match="c must be low or none, not 'high'"):
        body.get_choice("c", ("low", "none"))
    for nothing in ("d", "e", "missing"):
        body.reject(nothing, "why")
    with pytest.raises(UsageError, match="a is not supported: why"):
        body.reject("a", "why")


# ---- what is asked


def test_sampling_by_every_name():
    given = {
        "temperature": 0.5,
        "repetition_penalty": 1.2,
        "typical_p": 0.9,
        "seed": -1,
        "logit_bias": {"7": 1},
        "top_k": None,
    }
    found = parse_sampling(Body(given))
    assert (found.temperature, found.repeat_penalty, found.typical, found.seed) == (0.5, 1.2, 0.9, None)
    assert found.logit_bias == {7: 1} and found.top_k is None and parse_sampling(Body({"seed": 0})).seed == 0
    assert parse_biases({"0": 1.0, "999999999": -1.0}) == {0: 1.0, 999999999: -1.0}
    for odd in ("-1", "x", "1.0", "", "1" * 20):
        with pytest.raises(UsageError, match="logit_bias must be an object of numbers by token id"):
            parse_biases({"5": 1.0, odd: 1.0})


@pytest.mark.parametrize("name", ["a\nb: c", "a\rb", "a\x00", "\x7f", "ä", "a,b"])
def test_what_a_header_tells_is_one_line(name: str):
    """Of names that a caller chose: a line's end would begin a header of his own."""
    body = Body({"fine": 1, name: 2, "x" * 50: 3})
    assert extension_headers(body) == {IGNORED_HEADER: f"fine, {'x' * 40}"}


def test_fields_that_mean_nothing_are_named():
    """But for those that others send always."""
    given = {"input": "Hi", "user": "me", "store": False, "include": [], "background": None, "odd": 1, "even": 2}
    body = Body(given)
    assert question_of_responses(body) and extension_headers(body) == {IGNORED_HEADER: "odd, even"}


FUNCTION = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}


def conversation_of_responses(items: Any) -> list[dict[str, Any]]:
    return parse_input(Body({"input": items}))


HI = [{"role": "user", "content": "Hi"}]


def test_what_a_response_is_asked_for():
    given = {"input": "Hi", "model": "m", "instructions": "Be short", "max_output_tokens": 1, "temperature": 0.5,
             "reasoning": {"effort": "minimal"}, "tools": [FUNCTION], "parallel_tool_calls": False}  # fmt: skip
    found = question_of_responses(Body(given))
    assert found and (found.model, found.n, found.top_logprobs) == ("m", 1, None)
    assert found.prompts == [[{"role": "system", "content": "Be short"}, *HI]]
    options = found.options
    assert (options.max_tokens, options.stop, options.think, options.sampling.temperature) == (1, (), "low", 0.5)
    assert options.tools and [tool.name for tool in options.tools.tools] == ["now"] and not options.tools.parallel
    bare = question_of_responses(Body({"input": "Hi"}))
    assert bare and (bare.model, bare.prompts) == (None, [HI])
    assert (bare.options.max_tokens, bare.options.tools, bare.options.think) == (None, None, "auto")
    assert question_of_responses(Body({"instructions": "Be short"})) is None


def chat(**fields: Any) -> Any:
    return parse_chat_request(Body({"messages": HI, **fields}))


def text(**fields: Any) -> Any:
    return parse_completion_request(Body({"prompt": "Hi"} | fields))


def response(**fields: Any) -> Any:
    return question_of_responses(Body({"input": "Hi", **fields}))


@pytest.mark.parametrize(
    ("ask", "fields", "reason"),
    [
        (response, {"previous_response_id": "x"},
         "previous_response_id is not supported: conversations are not stored"),
        (response, {"conversation": "x"}, "conversation is not supported: conversations are not stored"),
        (response, {"top_logprobs": 1}, "top_logprobs is not supported: use /v1/chat/completions"),
        (response, {"reasoning": {"effort": "hard"}}, "reasoning.effort must be none or minimal or low"),
        (chat, {"functions": [1]}, "functions is not supported: use tools"),
        (chat, {"audio": {"a": 1}}, "audio is not"),
        (chat, {"top_logprobs": 21}, "top_logprobs must be from 0 to 20"),
        (chat, {"n": 17}, "n must be from 1 to 16"),
        (chat, {"n": 0}, "n must be from 1 to 16"),
        (text, {"prompt": [1], "suffix": "x"}, "suffix: prompt must be a string, not token ids"),
        (text, {"suffix": 1}, "suffix must be a string, not an integer"),
        (text, {"echo": True, "suffix": "x"}, "echo cannot be combined with suffix"),
        (text, {"n": 2, "best_of": 3}, "best_of must be equal to n, 2, not 3"),
        (text, {"n": 17}, "n must be from 1"),
        (text, {"logprobs": 21}, "logprobs must be from 0"),
    ],
)  # fmt: skip
def test_questions_that_make_no_sense(ask: Any, fields: dict[str, Any], reason: str):
    with pytest.raises(UsageError) as failure:
        ask(**fields)
    assert str(failure.value).startswith(reason)


@pytest.mark.parametrize(
    ("fields", "top_logprobs"),
    [
        ({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"top_logprobs": 20}, 20), ({"top_logprobs": 0}, None),
    ],
)  # fmt: skip
def test_probabilities_that_are_asked_for(fields: dict[str, Any], top_logprobs: int | None):
    assert chat(**fields).top_logprobs == top_logprobs


def test_what_a_chat_is_asked_for():
    """A newer name of a length stands before the older one."""
    found = chat(model="m", n=16, max_tokens=5, seed=3, tools=[FUNCTION], stop="x")
    assert (found.model, found.n, found.prompts, found.options.max_tokens) == ("m", 16, [HI], 5)
    assert (found.options.sampling.seed, found.options.stop, found.options.tools.tools[0].name) == (3, ("x",), "now")
    assert chat(max_tokens=5, max_completion_tokens=1).options.max_tokens == 1 and chat().options.max_tokens is None
    assert (chat().n, chat().model) == (1, None)


TOKENS = [[1, 2], [3]]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("Hi", ["Hi"]), (None, [""]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), (TOKENS, TOKENS),
        (["a", [1]], ["a", [1]]), (["a"] * MAX_PROMPTS, ["a"] * MAX_PROMPTS), (["a"] * (MAX_PROMPTS + 1), None),
        ([], None), (5, None), ([[]], None), (["a", 1], None), ([[1, "a"]], None), ([True], None), ([1.5], None),
    ],
)  # fmt: skip
def test_prompts_of_texts(given: Any, prompts: Any):
    if prompts:
        assert parse_prompts(given) == prompts
    else:
        many = f"prompt must have at most {MAX_PROMPTS} items, not {MAX_PROMPTS + 1}"
        with pytest.raises(UsageError) as failure:
            parse_prompts(given)
        is_long = isinstance(given, list) and len(given) > MAX_PROMPTS
        assert str(failure.value) == (
            many if is_long else "prompt must be a string, an array of token ids, or an array of these"
        )


def test_what_a_text_is_asked_for():
    found = text(model="m", n=2, best_of=2, max_tokens=0, logprobs=20)
    assert (found.model, found.prompts, found.n, found.top_logprobs, found.options.max_tokens) == (
        "m",
        ["Hi"],
        2,
        20,
        0,
    )
    assert (text().n, text().top_logprobs, text().options.max_tokens, text(best_of=1).n) == (1, None, 16, 1)
    assert text(logprobs=0).top_logprobs == 0


def claude(**fields: Any) -> Any:
    return parse_request(Body({"messages": HI, **fields}), 9)


def test_what_a_message_is_asked_for():
    tools = [{"name": "now"}, {"type": "web_search_20250305", "name": "web"}, {"type": "custom", "name": "then"}]
    found = claude(model="m", stop_sequences=["x"] * 16, top_k=5, system=[{"type": "text", "text": "Be short"}],
                   tools=tools,
                   tool_choice={"type": "tool", "name": "now", "disable_parallel_tool_use": True},
                   thinking={"type": "enabled", "budget_tokens": 7}, metadata={"user_id": "me"})  # fmt: skip
    assert (found.model, found.prompts) == ("m", [[{"role": "system", "content": "Be short"}, *HI]])
    options = found.options
    assert (options.max_tokens, options.stop, options.sampling.top_k) == (9, ("x",) * 16, 5)
    assert (options.think, options.think_budget) == ("on", 7)
    assert [tool.name for tool in options.tools.tools] == ["now", "then"]
    assert (options.tools.choice, options.tools.parallel) == ("now", False)
    with pytest.raises(UsageError, match="stop_sequences must be at most 16 strings, not 17"):
        claude(stop_sequences=["x"] * 17)
    for choice, meant in (("auto", "auto"), ("any", "required"), ("none", "none"), (None, "auto")):
        use = claude(tools=tools, tool_choice={"type": choice}).options.tools
        assert (use.choice, use.parallel) == (meant, True)
    bare = claude(tools=tools).options.tools
    assert (bare.choice, bare.parallel) == ("auto", True) and claude(tools=tools[1:2]).options.tools is None
    idle = claude(thinking={"type": "disabled", "budget_tokens": 7}).options
    assert (idle.think, idle.think_budget) == ("off", None)
    for odd in ([], [{"role": "tool", "content": "x"}], [5], [{"role": "user", "content": 5}],
                [{"role": "user", "content": [5]}], [{"role": "user", "content": [{"text": "x"}]}]):  # fmt: skip
        with pytest.raises(UsageError, match="messages"):
            parse_request(Body({"messages": odd}), 9)


def test_options():
    body = Body({"stop": ["x"] * 16, "think_budget": 5, "chat_template_kwargs": {"a": 1}, "user": "me"})
    found = parse_options(body, 9, None)
    assert (found.max_tokens, found.stop, found.think_budget) == (9, ("x",) * 16, 5)
    assert found.template_variables == {"a": 1} and not body.ignored
    assert parse_options(Body({}), None, None).template_variables == {}
    with pytest.raises(UsageError, match="stop must be at most 16 strings, not 17"):
        parse_options(Body({"stop": ["x"] * 17}), None, None)


@pytest.mark.parametrize(("given", "think"), [
    ({}, "auto"), ({"think": "on"}, "on"), ({"reasoning_effort": "none"}, "off"),
    ({"reasoning_effort": "xhigh"}, "high"), ({"reasoning_effort": "minimal"}, "low"),
    ({"reasoning_effort": "medium", "think": "off"}, "off"),
])  # fmt: skip
def test_efforts(given: dict[str, str], think: str):
    assert parse_think(Body(given)) == think


def test_schemas_of_formats():
    assert (
        parse_schema(None) is None and parse_schema(Body({"type": "text"})) is None and parse_schema(Body({})) is None
    )
    assert parse_schema(Body({"type": "json_object"})) == {"type": "object"}
    assert parse_schema(Body({"type": "json_object", "schema": {"a": 1}})) == {"a": 1}
    assert parse_schema(Body({"type": "json_schema", "json_schema": {"schema": {"b": 1}}})) == {"b": 1}
    assert parse_schema(Body({"type": "json_schema", "schema": {"c": 1}})) == {"c": 1}
    with pytest.raises(UsageError, match=r"^json_schema.schema must be an object, not null"):
        parse_schema(Body({"type": "json_schema", "json_schema": {}}))


def test_schemas_of_other_interfaces():
    """Anthropic's output_config, and the text of OpenAI's Responses."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    expected, format = constraint_of(schema), {"type": "json_schema", "schema": schema}
    asked = {"messages": [{"role": "user", "content": "x"}], "input": "x"}
    for read, key in ((partial(parse_request, max_tokens=9), "output_config"), (question_of_responses, "text")):
        for given, constraint in (({"format": format}, expected), ({}, None), (None, None)):
            question = read(Body({**asked, key: given}))
            assert question is not None and question.options.constraint == constraint
            assert (question.n, question.top_logprobs) == (1, None)
        with pytest.raises(UsageError, match="schema must be an object"):
            read(Body({**asked, key: {"format": {"type": "json_schema", "schema": 5}}}))


@pytest.mark.parametrize(("effort", "thinking", "think"), [
    ("low", None, "low"), ("max", None, "high"), (None, None, "auto"), ("low", {"type": "adaptive"}, "low"),
    ("low", {"type": "enabled"}, "on"), ("max", {"type": "disabled"}, "off"), (None, {"type": "disabled"}, "off"),
])  # fmt: skip
def test_efforts_of_anthropic(effort: str | None, thinking: dict | None, think: str):
    """An effort says how long to think where nothing else says whether."""
    given = {"output_config": effort and {"effort": effort}, "thinking": thinking}
    assert parse_request(Body({"messages": [{"role": "user", "content": "x"}], **given}), 9).options.think == think


def test_blocks_of_anthropic_as_messages():
    """Results of calls stand first and have the names of their functions; what was thought is not what was said."""
    call = {"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}}
    thoughts = [*({"type": "thinking", "thinking": text} for text in ("t", "u")), {"type": "redacted_thinking"}]
    results = [
        {"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": "no"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "j"},
    ]  # fmt: skip
    given = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "x"}, call]},
        {"role": "user", "content": [{"type": "text", "text": "and?"}, *results]},
        {"role": "assistant", "content": []}, {"role": "user", "content": "c"},
    ]  # fmt: skip
    called = {"id": "i", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert conversation_of_anthropic(given) == [
        {"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "x", "reasoning_content": "t\nu", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "i", "content": "Error: no", "name": "f"},
        {"role": "tool", "tool_call_id": "j", "content": ""}, {"role": "user", "content": "and?"},
        {"role": "assistant", "content": ""}, {"role": "user", "content": "c"},
    ]  # fmt: skip
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    seen, wrong = {"type": "image_url", "image_url": "data:image/png;base64,AA"}, {"type": "text", "text": "Error:"}
    failed_result = {**results[0], "content": [image]}
    told = conversation_of_anthropic([{"role": "user", "content": [image, failed_result]}])
    assert [message["content"] for message in told] == [[wrong, seen], [seen]]
    with pytest.raises(UsageError, match="a system message can only contain text"):
        conversation_of_anthropic([{"role": "system", "content": [image]}])
    for odd, text in (("x", "x"), ([1], "[1]"), (None, "{}")):
        said = conversation_of_anthropic([{"role": "assistant", "content": [{**call, "input": odd}]}])
        assert said[0]["tool_calls"][0]["function"]["arguments"] == text
    for spoilt in ({**call, "name": 5}, {**call, "name": None}):
        with pytest.raises(UsageError, match=r"messages\[0\]\.content: a tool_use block must have a name and an input"):
            conversation_of_anthropic([{"role": "assistant", "content": [spoilt]}])


def test_what_anthropic_tells_of_a_tool():
    schema = {"type": "object", "properties": {"a": {}}}
    [tool] = claude(
        tools=[{"name": "t", "description": "d", "input_schema": schema, "strict": True}]
    ).options.tools.tools
    assert (tool.name, tool.description, tool.parameters, tool.strict) == ("t", "d", schema, True)
    for odd in (5, "t", None):
        with pytest.raises(UsageError, match="tools must"):
            claude(tools=[odd])


def test_what_a_message_says_beside_its_words():
    """What means nothing here is read and not told of; a form asks for no thoughts; a thought may be empty."""
    nothing = {name: "x" for name in ("metadata", "service_tier", "container", "inference_geo", "diagnostics", "speed")}
    nothing |= {name: "x" for name in ("cache_control", "user_profile_id", "workspace_id", "betas")}
    body = Body({"messages": HI, "context_management": {}, "odd": 1, **nothing})
    parse_request(body, 9)
    assert body.ignored == ["odd"]
    formed = claude(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}).options
    assert formed.constraint and formed.think == "auto"
    empty = claude(thinking={"type": "enabled", "budget_tokens": 0}).options
    assert (empty.think, empty.think_budget) == ("on", 0)
    lines = "Be short.\nx-anthropic-billing-header: cc_version=1; cch=5\n x-anthropic-billing-header: stays"
    assert claude(system=lines).prompts[0][0]["content"] == "Be short.\n x-anthropic-billing-header: stays"


def test_tools_of_anthropic_that_take_nothing():
    for schema in ({}, {"input_schema": None}, {"input_schema": {}}):
        asked = {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "now", **schema}]}
        use = parse_request(Body(asked), 9).options.tools
        assert use and use.tools[0].parameters == {"type": "object", "properties": {}}
        assert (use.tools[0].name, use.tools[0].description, use.tools[0].strict) == ("now", "", False)


def test_tools_by_every_name():
    function = {"name": "now", "description": "d", "parameters": {"type": "object"}, "strict": True}
    inside, flat = {"type": "function", "function": function}, {"type": "function", **function}
    for tool in (inside, flat):
        found = parse_function(Body(tool))
        assert (found.name, found.description, found.strict) == ("now", "d", True)
        assert found.parameters == {"type": "object", "properties": {}}
    bare = parse_function(Body({"name": "now"}))
    assert (bare.description, bare.parameters, bare.strict) == ("", {"type": "object", "properties": {}}, False)
    others = Body({"tools": [{"type": "web"}, inside]})
    assert (use := parse_tools(others)) and len(use.tools) == 1 and others.ignored == ["tools[0]:web"]
    assert parse_tools(Body({"tools": [], "tool_choice": "auto"})) is None and parse_tools(Body({})) is None
    for parallel, several in ((None, True), (True, True), (False, False)):
        use = parse_tools(Body({"tools": [inside], "tool_choice": "required", "parallel_tool_calls": parallel}))
        assert use and (use.choice, use.parallel, len(use.tools)) == ("required", several, 1)
    assert parse_tool_choice(None) == ("auto", None) and parse_tool_choice("none") == ("none", None)
    for named in ({"function": {"name": "x"}}, {"type": "function", "name": "x"}):
        assert parse_tool_choice(named) == ("x", None)
    for odd in ("x", 5, {"function": {}}):
        with pytest.raises(UsageError):
            parse_tool_choice(odd)


def test_messages_of_all_roles():
    call = {"id": "c", "function": {"name": "now", "arguments": None}}
    given = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm"},
        {"role": "tool", "tool_call_id": "c", "content": "9"}, {"role": "tool", "tool_call_id": "x", "content": "8"},
        {"role": "tool", "tool_call_id": "c", "name": "own", "content": "7"},
        {"role": "assistant", "content": "No", "reasoning_content": 5},
    ]  # fmt: skip
    system, user, assistant, named, other, own, last = parse_messages(given)
    assert system == {"role": "system", "content": "Be short."} and user["content"] == "a\nb"
    told = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert assistant == {"role": "assistant", "content": None, "tool_calls": [told], "reasoning_content": "Hm"}
    assert (named["name"], own["name"], "name" in other) == ("now", "own", False) and "reasoning_content" not in last


@pytest.mark.parametrize(("message", "reason"), [
    ({"role": "assistant", "tool_calls": 5}, "tool_calls must be an array"),
    ({"role": "assistant", "tool_calls": [5]}, "a tool call must have a function"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, "a tool call must have a function with"),
    ({"role": "user", "content": 5}, "content must be a string or an array of parts"),
    ({"role": "user", "content": [{"url": "x"}]}, "an object with a type"),
    ({"role": "user", "content": [{"type": "audio"}]}, "only text and images are supported"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "must have a text"),
    ({"role": "system", "content": [{"type": "image_url", "image_url": "data:x"}]}, "system message can only contain"),
])  # fmt: skip
def test_messages_that_make_no_sense(message: dict[str, Any], reason: str):
    with pytest.raises(UsageError, match=rf"messages\[1\].*{reason}"):
        parse_messages([{"role": "user", "content": "x"}, message])


def test_no_messages():
    for given, reason in (
        ([], "messages must not be empty"),
        (["x"], r"messages\[0\] must be an object, not a string"),
    ):
        with pytest.raises(UsageError, match=reason):
            parse_messages(given)
    with pytest.raises(UsageError, match=r"messages\[0\].role must be one of system, developer, user, assistant, tool"):
        parse_messages([{"role": "robot", "content": "x"}])


CALLING = {"type": "function_call", "call_id": "c", "name": "now", "arguments": '{"a": 1}'}
CALLED = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
THINKING = {"type": "reasoning", "content": [{"text": "Hm"}, {"text": "so"}], "summary": [{"text": "no"}]}
SAYING = {"role": "assistant", "content": [{"type": "output_text", "text": "It is"}]}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("Hi", [{"role": "user", "content": "Hi"}]), ("", []), (None, []), ([], []),
        ([{"type": "message", "role": "developer", "content": "Be short"}, {"role": "user", "content": None}],
         [{"role": "system", "content": "Be short"}, {"role": "user", "content": ""}]),
        ([CALLING], [{"role": "assistant", "content": "", "tool_calls": [CALLED]}]),
        ([SAYING, CALLING, {**CALLING, "arguments": None}],
         [{"role": "assistant", "content": "It is", "tool_calls": [
             CALLED, {**CALLED, "function": {"name": "now", "arguments": "{}"}}]}]),
        ([THINKING, SAYING], [{"role": "assistant", "content": "It is", "reasoning_content": "Hm\nso"}]),
        ([THINKING, SAYING, SAYING], [{"role": "assistant", "content": "It is", "reasoning_content": "Hm\nso"},
                                      {"role": "assistant", "content": "It is"}]),
        ([{"role": "user", "content": ""}, SAYING],
         [{"role": "user", "content": ""}, {"role": "assistant", "content": "It is"}]),
        ([THINKING, {"role": "user", "content": "Hi"}],
         [{"role": "assistant", "content": "", "reasoning_content": "Hm\nso"}, {"role": "user", "content": "Hi"}]),
        ([{"role": "user", "content": "Hi"}, THINKING, SAYING],
         [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is", "reasoning_content": "Hm\nso"}]),
        ([{**THINKING, "content": None}], [{"role": "assistant", "content": "", "reasoning_content": "no"}]),
        ([{"type": "reasoning"}, SAYING], [{"role": "assistant", "content": "It is"}]),
        ([THINKING, CALLING, {"type": "function_call_output", "call_id": "c", "output": "9"}],
         [{"role": "assistant", "content": "", "reasoning_content": "Hm\nso", "tool_calls": [CALLED]},
          {"role": "tool", "tool_call_id": "c", "content": "9", "name": "now"}]),
    ],
)  # fmt: skip
def test_conversations_of_responses(items: Any, messages: list[dict[str, Any]]):
    """Thoughts and calls are parts of the answer that they are next to."""
    assert conversation_of_responses(items) == messages


def test_images_of_responses():
    """Users show them, as in chats, and who answers; a system message has none."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    given = [{"role": "user", "content": [image]}]
    assert conversation_of_responses(given) == parse_messages(given) and isinstance(
        parse_messages(given)[0]["content"], list
    )
    assert (
        conversation_of_responses([{"role": "assistant", "content": [image]}])[0]["content"]
        == parse_messages(given)[0]["content"]
    )
    with pytest.raises(UsageError, match="a system message can only contain text"):
        conversation_of_responses([{"role": "system", "content": [image]}])


CALL_TOLD = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"role": "user", "content": "Hi", "name": "", "tool_call_id": None}, {"role": "user", "content": "Hi"}),
        ({"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [CALL_TOLD]},
         {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [CALL_TOLD]}),
        ({"role": "assistant", "content": "a", "reasoning_content": "", "tool_calls": []},
         {"role": "assistant", "content": "a"}),
        ({"role": "tool", "content": "9", "tool_call_id": "c", "name": "now", "odd": 1},
         {"role": "tool", "content": "9", "tool_call_id": "c", "name": "now"}),
        ({"role": "tool", "content": "9"}, None), ({"content": "Hi"}, None), ({"role": "robot", "content": "Hi"}, None),
        ({"role": "user"}, None), ({"role": "user", "content": 5}, None), (5, None),
        ({"role": "assistant", "content": "", "tool_calls": [5]}, None),
    ],
)  # fmt: skip
def test_messages_that_a_page_writes(given: Any, found: dict[str, Any] | None):
    if found:
        assert page.parse_message(given) == found
    else:
        with pytest.raises(UsageError):
            page.parse_message(given)


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (5, "input must be a string or an array of items, not an integer"),
        ([5], "input[0] must be an object, not an integer"),
        ([{"role": "robot"}], "input[0].role must be one of system, developer, user, assistant, tool, function"),
        ([SAYING, {"type": "item_reference"}],
         "input[1]: item_reference is not supported: items are not stored; send the item"),
    ],
)  # fmt: skip
def test_items_of_responses_that_make_no_sense(items: Any, reason: str):
    with pytest.raises(UsageError) as failure:
        conversation_of_responses(items)
    assert str(failure.value) == reason


def test_tools_of_responses():
    """Others run those of other kinds: such a choice means nothing here."""
    function = {"type": "function", "name": "now", "parameters": {"type": "object"}}
    for choice, meant in (
        (None, "auto"),
        ({"type": "web_search"}, "auto"),
        ({"type": "function", "name": "now"}, "now"),
    ):
        use = tools_of_responses(Body({"tools": [{"type": "web_search"}, function], "tool_choice": choice}))
        assert use and [tool.name for tool in use.tools] == ["now"] and (use.choice, use.parallel) == (meant, True)
    assert (
        tools_of_responses(Body({"tools": [{"type": "web_search"}]})) is None and tools_of_responses(Body({})) is None
    )


# ---- streams that break


class Broken:
    """An answer that breaks off, at once or behind a word."""

    name, usage, wants_logprobs = "m", service.Usage(), False

    def __init__(self, *words: str):
        self.words, self.closed = words, 0

    async def events(self) -> AsyncIterator[Any]:
        for word in self.words:
            yield 0, SimpleNamespace(parts=[TextPart(ANSWER, word)], logprob=None, finish_reason="")
        raise ModelError("it broke")

    def current_usage(self) -> Any:
        return self.usage

    async def close(self) -> None:
        self.closed += 1


def lines_of(stream: Any) -> list[Any]:
    async def read() -> list[bytes]:
        return [line async for line in stream]

    return [json.loads(line.decode().rpartition("data: ")[2]) for line in asyncio.run(read())]


@pytest.mark.parametrize("words", [(), ("a",)])
def test_streams_tell_what_broke(words: tuple[str, ...]):
    """As each interface does, behind what came; the answer is closed."""
    question: Any = SimpleNamespace(top_logprobs=None, n=1, prompts=[1])
    told = openai_error(ModelError("it broke"))
    for streamed, end in (
        (lambda one: streamed_chat(one, question, True), told), (lambda one: streamed_texts(one, question, True), told),
        (lambda one: streamed_message(one, question), anthropic_error(ModelError("it broke"))),
    ):  # fmt: skip
        broken: Any = Broken(*words)
        *before, last = lines_of(streamed(broken))
        said = [each for each in before if each.get("type") not in ("message_start", "ping")]  # at once
        assert last == end and bool(said) == bool(words) and broken.closed == 1
    broken = Broken(*words)
    found = lines_of(streamed_response(broken, ResponseBuilder("m", {}, {})))
    assert [each["sequence_number"] for each in found] == [*range(len(found))] and broken.closed == 1
    assert [each["type"] for each in found[:2]] == ["response.created", "response.in_progress"]
    assert (found[-1]["type"], found[-1]["response"]["status"]) == ("response.failed", "failed")
    assert found[-1]["response"]["error"] == {**told["error"], "code": "server_error"}


@pytest.mark.parametrize(
    ("path", "is_claude"),
    [("/v1/messages", True), ("/v1/messages/count_tokens", True), ("/v1/chat/completions", False)],
)
def test_which_errors_an_address_has(path: str, is_claude: bool):
    assert error_format_of(path) is (anthropic_error if is_claude else openai_error)


# ---- images


def test_images_of_every_interface(tmp_path):
    url = {"type": "image_url", "image_url": "data:image/jpeg;base64,AA=="}
    source = {"type": "base64", "media_type": "image/jpeg", "data": "AA=="}
    for part in (
        url, {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AA=="}},
        {"type": "input_image", "image_url": "data:image/jpeg;base64,AA=="}, {"type": "image", "source": source},
        {"type": "image", "source": {"type": "url", "url": "data:image/jpeg;base64,AA=="}},
    ):  # fmt: skip
        assert image_part(part, "x") == url
    del source["media_type"]
    assert image_part({"type": "image", "source": source}, "x")["image_url"].startswith("data:image/png;base64,AA")
    for odd in ({"file_id": "f"}, {"source": {"file_id": "f"}}, {"source": {"type": "base64"}}, {"image_url": {}}, {}):
        with pytest.raises(UsageError, match=r"^x"):
            image_part(odd, "x")
    message = {"role": "user", "content": [url] * MAX_IMAGES}
    assert resolve_images([message, {"role": "user", "content": "a"}], []) == [
        message,
        {"role": "user", "content": "a"},
    ]
    with pytest.raises(UsageError, match="too many images: 65, but at most 64 are allowed per request"):
        resolve_images([message, {"role": "user", "content": [url]}], [])


def test_files_of_several_folders(tmp_path):
    first, second, beside = (tmp_path / name for name in ("a", "b", "ab"))
    for folder in (first, second, beside):
        folder.mkdir()
        (folder / "x.png").write_bytes(b"")
    folders = [str(first), str(second)]
    assert resolve_file("x.png", folders) == str((first / "x.png").resolve())
    assert resolve_file(str(second / "x.png"), folders) == str((second / "x.png").resolve())
    for outside in (str(beside / "x.png"), "../ab/x.png"):
        with pytest.raises(UsageError, match="outside of the folders"):
            resolve_file(outside, folders)
    for missing in ("y.png", "."):
        with pytest.raises(UsageError, match="image not found"):
            resolve_file(missing, folders)


# ---- texts


def test_how_many_texts():
    assert parse_texts("a", "input") == ["a"] and len(parse_texts(["a"] * MAX_TEXTS, "input")) == MAX_TEXTS
    with pytest.raises(UsageError, match=f"input must be at most {MAX_TEXTS} strings, not {MAX_TEXTS + 1}"):
        parse_texts(["a"] * (MAX_TEXTS + 1), "input")
    for odd in ([1], ["a", 1], None, 5):
        with pytest.raises(UsageError, match="input must be a string or an array of strings"):
            parse_texts(odd, "input")


# ---- errors


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "claude"),
    [
        (RejectedRequestError(401, "x"), 401, "authentication_error", "invalid_api_key", "authentication_error"),
        (RejectedRequestError(403, "x"), 403, "permission_error", None, "permission_error"),
        (RejectedRequestError(413, "x"), 413, "invalid_request_error", None, "request_too_large"),
        (UnknownModelError("x"), 404, "not_found_error", "model_not_found", "not_found_error"),
        (RequestTimeoutError("x"), 504, "server_error", None, "api_error"),
        (StoppedError("x"), 503, "overloaded_error", "overloaded", "overloaded_error"),
        (MemoryLimitError("x"), 503, "overloaded_error", "overloaded", "overloaded_error"),
        (UsageError("x"), 400, "invalid_request_error", None, "invalid_request_error"),
        (ContextError("x"), 400, "invalid_request_error", "context_length_exceeded", "invalid_request_error"),
        (ModelError("x"), 400, "invalid_request_error", None, "invalid_request_error"),
        (LocalllmError("x"), 500, "server_error", None, "api_error"),
        (RejectedRequestError(500, "x"), 500, "server_error", None, "api_error"),
    ],
)
def test_numbers_of_errors(error: Exception, status: int, kind: str, code: str | None, claude: str):
    assert status_of(error) == status
    assert openai_error(error) == {"error": {"message": "x", "type": kind, "param": None, "code": code}}
    assert anthropic_error(error) == {"type": "error", "error": {"type": claude, "message": "x"}}
    response = error_response(error, openai_error)
    assert (response.status_code, response.headers.get("retry-after")) == (status, "5" if status == 503 else None)


def test_what_errors_do_not_tell():
    assert openai_error(KeyError("secret"))["error"]["message"] == "internal error: KeyError"
    for message, param in (("top_k must be", "top_k"), ("a.b[3] is missing", "a.b[3]"), ("x is not supported", "x")):
        assert openai_error(UsageError(message))["error"]["param"] == param
    assert openai_error(ContextError("top_k must be"))["error"]["param"] is None


# ---- bodies


class Asked:
    """A request whose body comes in pieces."""

    def __init__(
        self, *pieces: bytes, kind: str = "application/json; charset=utf-8", length: str = "", wait: float = 0
    ):
        self.pieces, self.wait = pieces, wait
        self.headers = Headers({"content-type": kind, **({"content-length": length} if length else {})})

    async def stream(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            await asyncio.sleep(self.wait)
            yield piece


def read(*pieces: bytes, limits: Limits = Limits(body=8), **more: Any) -> Any:  # noqa: B008
    asked: Any = Asked(*pieces, **more)
    return asyncio.run(read_json(asked, limits))


def test_bodies_at_their_limits():
    assert read(b'{"a"', b":12}") == {"a": 12} == read(b'{"a":12}', length="8") == read(b'{"a":12}', length="x")
    assert read(b"{}", kind=" Application/JSON ") == {}
    for status, more in ((413, {"length": "9"}), (415, {"kind": "text/json"}), (415, {"kind": ""})):
        with pytest.raises(RejectedRequestError) as refused:
            read(b"{}", **more)
        assert refused.value.status == status
    with pytest.raises(RejectedRequestError, match="larger than the limit of 8 bytes") as refused:
        read(b'{"a":1', b"23}")
    assert refused.value.status == 413
    with pytest.raises(RejectedRequestError, match=r"did not arrive within 0\.01 seconds") as refused:
        read(b"{}", limits=Limits(seconds=0.01), wait=5)
    assert refused.value.status == 408


def test_json_that_is_none():
    assert parse_json(b'{"a":[[]]}', 3) == {"a": [[]]}
    with pytest.raises(RejectedRequestError, match="nested deeper than 2 levels"):
        parse_json(b'{"a":[[]]}', 2)
    for body in (b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":NaN}', b"{", b"\xff"):
        with pytest.raises(RejectedRequestError, match="is not valid JSON"):
            parse_json(body, 9)
    for body in (b"[]", b"5", b"null"):
        with pytest.raises(RejectedRequestError, match="must be a JSON object"):
            parse_json(body, 9)


# ---- who may ask


def may(path: str = "/v1/models", method: str = "GET", rules: Rules | None = None, **headers: str) -> int:
    """The status with which a request is refused, or 200."""
    try:
        (rules or Rules()).require(
            method, path, {"host": "localhost:80", **{k.replace("_", "-"): v for k, v in headers.items()}}
        )
    except RejectedRequestError as error:
        return error.status
    return 200


def test_pages_that_may_ask():
    friend = Rules(origins=["https://friend"])
    assert may(origin="http://localhost:80") == may(rules=friend, origin="https://friend") == 200
    assert may(origin="https://localhost:80") == may(origin="http://localhost") == may(origin="") == 403
    for path in ("/sessions", "/sessions/x"):  # conversations are not for other sites' pages
        assert may(path, rules=friend, origin="https://friend") == 403
        assert may(path, rules=friend) == may(path, rules=friend, origin="http://localhost:80") == 200


def test_what_needs_a_key():
    keyed = Rules(keys=["k", "l"])
    for path in ("/v1/models", "/props", "/metrics", "/sessions", "/health/"):
        assert may(path, rules=keyed) == 401 and may(path, rules=keyed, x_api_key="l") == 200
    assert may("/", rules=keyed) == may("/health", rules=keyed) == may("/props", "OPTIONS", keyed) == 200
    assert may(rules=keyed, authorization="bearer  k") == 200
    for wrong in ("Basic k", "k", "Bearer", "Bearer kl", ""):
        assert may(rules=keyed, authorization=wrong) == 401


def passed(rules: Rules, method: str = "GET", *headers: tuple[bytes, bytes]) -> tuple[list[int], dict[str, str], int]:
    """Through a guard: statuses, headers, and how often the app behind it was asked."""
    sent, asked = list[Any](), list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
        if scope["path"] == "/left":
            raise ClientDisconnectedError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/left", "headers": [*headers]}
    asyncio.run(Guard(app, rules, str)(scope, None, send))  # type: ignore[arg-type]
    starts = [message for message in sent if message["type"] == "http.response.start"]
    found = {name.decode(): value.decode() for name, value in starts[0]["headers"]}
    return [message["status"] for message in starts], found, len(asked)


def test_what_a_guard_adds():
    host, friend = (b"host", b"localhost"), (b"origin", b"https://friend")
    statuses, headers, asked = passed(Rules(), "GET", host)
    assert (statuses, asked, headers["x-own"], headers["cross-origin-resource-policy"]) == (
        [200],
        1,
        "1",
        "same-origin",
    )
    assert headers["referrer-policy"] == "no-referrer" and "vary" not in headers
    statuses, headers, asked = passed(Rules(origins=["https://friend"]), "OPTIONS", host, friend)
    assert (statuses, asked, headers["access-control-allow-origin"]) == ([204], 0, "https://friend")
    assert headers["vary"].startswith("Origin,") and headers["cross-origin-resource-policy"] == "cross-origin"
    assert (
        "DELETE" in headers["access-control-allow-methods"] and "x-api-key" in headers["access-control-allow-headers"]
    )
    assert passed(Rules(), "GET", host, friend)[::2] == ([403], 0) and passed(Rules(), "GET", host, host)[0] == [400]


# ---- streams


def sent_by(
    stream: EventStream, *, leaves: bool = False, slow: float = 0, heard: asyncio.Event | None = None
) -> list[Any]:
    """heard: is set when something was said that is no piece."""
    sent = list[Any]()

    async def receive() -> Any:
        if not leaves:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(slow)
        sent.append(message)
        if heard and message.get("body", b"").startswith(b":"):
            heard.set()

    asyncio.run(stream({}, receive, send))  # type: ignore[arg-type]
    return sent


class Pieces:
    """What makes events, and whether it was closed."""

    def __init__(self, *pieces: bytes, wait: float = 0):
        self.pieces, self.wait, self.ended, self.closed = pieces, wait, 0, 0

    async def lines(self) -> AsyncIterator[bytes]:
        try:
            for piece in self.pieces:
                await asyncio.sleep(self.wait)
                yield piece
        finally:
            self.ended += 1

    async def close(self) -> None:
        self.closed += 1

    def stream(self, seconds: float = 5) -> EventStream:
        return EventStream(self.lines(), Limits(seconds=seconds), {"X-More": "1"}, self.close)


def test_a_stream():
    made = Pieces(b"a", b"b")
    start, *bodies = sent_by(made.stream())
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    assert start["status"] == 200 and headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-more"], "content-length" in headers) == ("no-store", "1", False)
    assert [(each["body"], each["more_body"]) for each in bodies] == [(b"a", True), (b"b", True), (b"", False)]
    assert (made.ended, made.closed) == (1, 1)


def test_who_waits_hears_something(monkeypatch):
    """And a piece that comes then comes whole, and once."""
    monkeypatch.setattr(wire, "KEEP_ALIVE_SECONDS", 0.001)
    heard = asyncio.Event()

    async def late() -> AsyncIterator[bytes]:
        await heard.wait()
        yield b"a"

    bodies = [each["body"] for each in sent_by(EventStream(late(), Limits(), {}), heard=heard)[1:]]
    assert set(bodies[:-2]) == {b": still here\n"} and bodies[-2:] == [b"a", b""]


def test_streams_that_nobody_reads_are_closed():
    made = Pieces(b"a", b"b", wait=0.05)
    with pytest.raises(ClientDisconnectedError):
        sent_by(made.stream(), leaves=True)
    assert made.closed == 1
    slow = Pieces(b"a")
    with pytest.raises(TimeoutError):
        sent_by(slow.stream(0.01), slow=5)
    assert slow.closed == 1


def test_events():
    assert format_event({"a": "ö"}, "name") == 'event: name\ndata: {"a":"ö"}\n\n'.encode()
    assert format_event([1, 2]) == b"data: [1,2]\n\n" and format_event("\ud800") == b'data: "?"\n\n'


def test_work_ends_when_nobody_waits():
    async def asked(work: float, stays: float) -> tuple[Any, bool]:
        ended = []

        async def working() -> str:
            try:
                await asyncio.sleep(work)
                return "done"
            finally:
                ended.append(1)

        async def receive() -> Any:
            await asyncio.sleep(stays)
            return {"type": "http.disconnect"}

        try:
            return await run_until_disconnect(receive, working()), bool(ended)
        except ClientDisconnectedError:
            return None, bool(ended)

    assert asyncio.run(asked(0, 60)) == ("done", True) and asyncio.run(asked(60, 0.01)) == (None, True)


def test_what_several_tell():
    async def numbers(*values: int, fail: bool = False) -> AsyncIterator[int]:
        for value in values:
            await asyncio.sleep(0)
            yield value
        if fail:
            raise LocalllmError("broken")

    async def all_of(*sources: Any) -> list[Any]:
        return [each async for each in merge(sources)]

    assert asyncio.run(all_of(numbers(1, 2))) == [(0, 1), (0, 2)] and asyncio.run(all_of()) == []
    assert sorted(asyncio.run(all_of(numbers(1, 2), numbers(), numbers(3)))) == [(0, 1), (0, 2), (2, 3)]
    with pytest.raises(LocalllmError, match="broken"):
        asyncio.run(all_of(numbers(1), numbers(2, fail=True)))

    async def late(end: float | None) -> Any:
        return await next_before(numbers(5), end)

    assert asyncio.run(late(None)) == 5
    with pytest.raises(TimeoutError):
        asyncio.run(late(0))


def test_addresses_where_nobody_can_listen():
    taken = bind_tcp("127.0.0.1", 0)
    try:
        port = taken.getsockname()[1]
        is_reused = taken.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert bool(is_reused) == (sys.platform != "win32"), "a server that was ended may start again at once"
        taken.listen()
        with pytest.raises(LocalllmError, match=rf"cannot listen on 127\.0\.0\.1, port {port}: [A-Z]") as error:
            bind_tcp("127.0.0.1", port)
        assert "Errno" not in str(error.value)
    finally:
        taken.close()
    with pytest.raises(LocalllmError, match=r"port 99999: .*0-65535"):
        bind_tcp("127.0.0.1", 99999)


def test_how_much_a_server_takes_of_one_client():
    found = create_listener(None, Limits(connections=7), Ending(3.9, lambda: None, print))  # type: ignore[arg-type]
    told = {
        "http": IdleTimeoutProtocol, "ws": "none", "lifespan": "off", "log_config": None, "access_log": False,
        "server_header": False, "limit_concurrency": 7, "timeout_keep_alive": 10, "date_header": False,
        "h11_max_incomplete_event_size": 65536,
    }  # fmt: skip
    assert {name: getattr(found.config, name) for name in told} == told and found.stopped_by is None
    limits = Limits()
    assert (limits.body, limits.depth, limits.seconds, limits.connections) == (33554432, 100, 30.0, 128)
    assert (limits.answer_seconds, limits.drops_turns, limits.folders) == (None, False, ())


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets here")
def test_a_socket_at_a_path(tmp_path):
    """What a server that was killed has left goes; nothing else does."""
    path = str(tmp_path / "s")
    mask = os.umask(0o022)
    try:
        for _ in range(2):
            with bind_unix(path) as found:
                assert os.stat(path).st_mode & 0o777 == 0o600
                found.listen()
                with (
                    pytest.raises(LocalllmError, match=r"s: another server is listening on it; give another path$"),
                    bind_unix(path),
                ):
                    pass
            assert not os.path.exists(path)
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(path)
        os.unlink(path)
        (tmp_path / "s").write_bytes(b"notes")
        with pytest.raises(UsageError, match=r"s exists and is not a socket; give another path$"), bind_unix(path):
            pass
        assert (tmp_path / "s").read_bytes() == b"notes"
        with (
            pytest.raises(LocalllmError, match=r"cannot listen on .*x/s: No such file"),
            bind_unix(f"{tmp_path}/x/s"),
        ):
            pass
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(mask)


@pytest.mark.parametrize(("state", "idle"), [(None, True), (True, True), (False, False)])
def test_patience_with_a_connection(monkeypatch, state: bool | None, idle: bool):
    """Ten seconds for a request, one for the rest of a body that nobody wants; an answer in the making takes longer."""
    calls: list[Any] = []

    class Timer:
        def __init__(self, seconds: float, call: Any):
            calls.append(seconds)
            self.call, self.cancel = call, lambda: calls.append("cancel")

    connection: Any = IdleTimeoutProtocol.__new__(IdleTimeoutProtocol)
    connection._timer, connection.loop = None, SimpleNamespace(call_later=Timer)
    connection.conn, connection.transport = SimpleNamespace(), SimpleNamespace(abort=lambda: calls.append("abort"))
    connection.cycle = None if state is None else SimpleNamespace(response_complete=state)
    for name in ("connection_made", "connection_lost", "on_response_complete"):
        monkeypatch.setattr(IdleTimeoutProtocol.__base__, name, lambda *given, name=name: calls.append(name))
    connection.connection_made(None)
    for connection.conn.their_state in (h11.DONE, h11.SEND_BODY):
        connection.on_response_complete()
    connection._timer.call()
    connection.connection_lost(None)
    assert calls == [
        *["connection_made", 10.0, "on_response_complete", "cancel", 10.0, "on_response_complete", "cancel", 1.0],
        *(["abort"] if idle else []), "cancel", "connection_lost",
    ]  # fmt: skip


# ---- blocks and counts


def test_blocks():
    parts = [TextPart(REASONING, "a"), TextPart(REASONING, "b"), TextPart(ANSWER, "c"), TextPart(CALL, "f"),
             TextPart(ARGUMENTS, "{"),
             TextPart(ARGUMENTS, "}"), TextPart(CALL, "g"), TextPart(ANSWER, "d")]  # fmt: skip
    blocks = Blocks()
    assert not blocks.has_calls and not list(blocks.end())
    changes = [(each.action, each.block.index, each.text) for part in parts for each in blocks.take(part)]
    changes += [(each.action, each.block.index, each.text) for each in [*blocks.end(), *blocks.end()]]
    assert changes == [
        (OPEN, 0, ""), (DELTA, 0, "a"), (DELTA, 0, "b"), (CLOSE, 0, ""), (OPEN, 1, ""), (DELTA, 1, "c"), (CLOSE, 1, ""),
        (OPEN, 2, ""), (DELTA, 2, "{"), (DELTA, 2, "}"), (CLOSE, 2, ""), (OPEN, 3, ""), (CLOSE, 3, ""),
        (OPEN, 4, ""), (DELTA, 4, "d"), (CLOSE, 4, ""),
    ]  # fmt: skip
    told = [(block.kind, block.name, block.text) for block in blocks.all]
    assert told == [(REASONING, "", "ab"), (ANSWER, "", "c"), (CALL, "f", "{}"), (CALL, "g", ""), (ANSWER, "", "d")]
    assert blocks.has_calls


def test_histograms():
    counted = Histogram()
    for seconds in (0.001, 0.005, 0.0051, 60.0, 61.0):
        counted.add(seconds)
    lines = dict(line.rsplit(" ", 1) for line in counted.lines("x"))
    assert [lines[f'x_bucket{{le="{bound}"}}'] for bound in (0.005, 0.01, 30.0, 60.0, "+Inf")] == [
        "2",
        "3",
        "3",
        "4",
        "5",
    ]
    assert (lines["x_sum"], lines["x_count"]) == ("121.011100", "5")


def test_what_is_counted_of_requests():
    """Nothing of those that had not begun but that they ended."""
    metrics = Metrics()
    answers = [SimpleNamespace(tokens=[1, 2]), SimpleNamespace(tokens=[3])]
    for begun in (True, False):
        request: Any = SimpleNamespace(begun=begun, prompt=[0] * 9, cached=4, answers=answers)
        metrics.record_finished(request)
        metrics.record_cancelled(request)
        metrics.record_cancelled(request)
    metrics.responses.update({("/b", 200): 2, ("/a", 404): 1})
    lines = metrics.text(7, 8, {"memory_held_bytes": 5e9}).splitlines()
    told = dict(
        line.removeprefix("localllm_").rsplit(" ", 1) for line in lines if line[0] != "#" and "seconds" not in line
    )
    assert told == {
        'http_requests_total{path="/a",status="404"}': "1", 'http_requests_total{path="/b",status="200"}': "2",
        "answers_running": "7", "requests_waiting": "8", "requests_finished_total": "2", "requests_left_total": "4",
        "prompt_tokens_read_total": "15", "prompt_tokens_cached_total": "12", "tokens_written_total": "9",
        "memory_held_bytes": "5e+09",
    }  # fmt: skip
    kinds = {line.split()[2].removeprefix("localllm_"): line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert {name for name, kind in kinds.items() if kind == "gauge"} == {
        "answers_running", "requests_waiting", "memory_held_bytes",
    }  # fmt: skip
    assert {name for name, kind in kinds.items() if kind == "histogram"} == {
        "first_token_seconds", "between_tokens_seconds",
    }  # fmt: skip
    assert "# HELP localllm_memory_held_bytes Memory held bytes." in lines and len(kinds) == 11


def test_vectors_are_made_in_turn():
    """By whoever asks: a model's memory is that of one."""
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1

    async def all_at_once() -> None:
        await asyncio.gather(*(run_exclusively(work, "input") for _ in range(4)))

    asyncio.run(all_at_once())
    assert most == 1


# ---- conversations of the page


@pytest.mark.parametrize(("texts", "known"), [("abc", "abc"), ("axc", "a"), ("ab", "ab"), ("abcd", "abc"), ("x", "")])
def test_what_is_known_of_messages_that_stay(texts: str, known: str):
    """Up to the first that is another one: what stands behind it is an answer to something else."""
    old = [{"role": "user", "content": text, "tokens": 5} for text in "abc"]
    new = [{"role": "user", "content": text} for text in texts]
    found = keep_stored_details(old, new)
    assert [message["content"] for message in found] == [*texts]
    assert "".join(message["content"] for message in found if "tokens" in message) == known


# ---- models by name

TAKES = {"a": 1, "b": 2, "c": 3, "huge": 9}  # times WORKING, which is a part of it


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a shelf of models that take so much, and what happens to them."""
    happened: list[Any] = []

    def opened(path: str) -> Any:
        happened.append(f"open {path}")
        weights = (TAKES[path] - 1) * model_pool.OVERHEAD_BYTES
        return SimpleNamespace(
            file=SimpleNamespace(nbytes=weights - 5), vision=SimpleNamespace(nbytes=5), path=path,
            engine=SimpleNamespace(cache_usage=lambda: (0, 99), bytes_per_token=100),
            close=lambda: happened.append(f"close {path}"),
        )  # fmt: skip

    def working(model: Any, metrics: Metrics, parallel: int | None, room: int | None) -> Any:
        happened.append((model.path, parallel, room))
        end = lambda: happened.append(f"end {model.path}")  # noqa: E731
        return SimpleNamespace(model=model, close=end, running=2, waiting=3)

    def make(memory: int | None, parallel: int | None = None) -> tuple[ModelPool, list[Any]]:
        return ModelPool({name: name for name in TAKES}, opened, Metrics(), memory, parallel), happened

    monkeypatch.setattr(model_pool, "Worker", working)
    monkeypatch.setattr(ModelEntry, "needed_bytes", property(lambda book: TAKES[book.path] * model_pool.OVERHEAD_BYTES))
    return make


def test_models_that_were_used_longest_ago_are_put_away(library):
    made, happened = library(5 * model_pool.OVERHEAD_BYTES, 7)

    async def use() -> None:
        for name in ("a", "b", "a", "c"):  # the last needs all of what b has
            async with made.use(name) as it:
                assert it.model.path == name and made.resolve(name).active_requests == 1
            await asyncio.sleep(0.001)
        assert made.count_requests() == (4, 6) and made.resolve("b").model is None and made.resolve("b").held_bytes == 0
        held = 4.0 * model_pool.OVERHEAD_BYTES
        assert await made.measure_memory() == {
            "models_open": 2.0, "memory_held_bytes": held, "memory_allowed_bytes": 5.0 * model_pool.OVERHEAD_BYTES,
        }  # fmt: skip
        made.resolve("a").model.engine.cache_usage = lambda: (3, 99)
        assert (await made.measure_memory())["memory_held_bytes"] == held + 300
        with pytest.raises(MemoryLimitError, match=r"^huge needs 2\.7 GB, but the server's limit is 1\.5 GB$"):
            async with made.use("huge"):
                pass
        assert made.resolve("huge").active_requests == 0
        await made.close()

    asyncio.run(use())
    room = {name: (5 - TAKES[name]) * model_pool.OVERHEAD_BYTES for name in TAKES}
    assert happened == [
        *["open a", ("a", 7, room["a"]), "open b", ("b", 7, room["b"]), "end b", "close b"],
        *["open c", ("c", 7, room["c"]), "end a", "close a", "end c", "close c"],
    ]


def test_a_model_waits_until_nobody_reads_another_one(library):
    made, happened = library(3 * model_pool.OVERHEAD_BYTES)

    async def use() -> None:
        async def third() -> str:
            async with made.use("c") as it:
                return it.model.path

        async with made.use("b"):
            waiting = asyncio.ensure_future(third())
            while not made._waiting:
                await asyncio.sleep(0.001)
            assert made.resolve("c").worker is None
        assert await asyncio.wait_for(waiting, 60) == "c" and made._waiting == 0

    asyncio.run(use())
    assert [each for each in happened if isinstance(each, str)] == ["open b", "end b", "close b", "open c"]


def test_models_have_names_and_files(library):
    books = ModelPool({"small": "s.gguf", "large": "l.gguf"}, library, Metrics()).entries
    assert [(name, book.name, book.path) for name, book in books.items()] == [
        ("small", "small", "s.gguf"), ("large", "large", "l.gguf")
    ]  # fmt: skip
    assert all(
        book.worker is book.model is None and (book.active_requests, book.last_used) == (0, 0.0)
        for book in books.values()
    )


def test_what_a_model_needs_before_it_is_opened(monkeypatch: pytest.MonkeyPatch):
    """Its weights, its projector and what is computed; the file is closed again."""
    closed: list[str] = []

    @contextmanager
    def opened(path: str) -> Any:
        yield SimpleNamespace(nbytes=1000)
        closed.append(path)

    monkeypatch.setattr(GGUFFile, "open", opened)
    monkeypatch.setattr("localllm.files.models_folder.projector_bytes", lambda path: 20 if path == "m.gguf" else 0)
    assert ModelEntry("m", "m.gguf").needed_bytes == 300_001_020 and closed == ["m.gguf"]
    assert ModelEntry("n", "n.gguf").needed_bytes == 300_001_000


def test_a_shelf_without_a_limit(library, tmp_path):
    made, happened = library(None)

    async def use() -> None:
        async with made.use(None), made.use("huge"):
            assert await made.measure_memory() == {
                "models_open": 2.0,
                "memory_held_bytes": 10.0 * model_pool.OVERHEAD_BYTES,
            }

    asyncio.run(use())
    assert happened[1] == ("a", None, None) and made.resolve(None) is made.entries["a"]
    with pytest.raises(UnknownModelError, match=rf"^model '{'x' * 100}' not found; available models: a, b, c, huge$"):
        made.resolve("x" * 101)
    (tmp_path / "m").write_bytes(b"")
    os.utime(tmp_path / "m", (5, 77.9))
    assert (
        ModelEntry("m", str(tmp_path / "m")).created == 77
        and abs(ModelEntry("n", str(tmp_path / "n")).created - time.time()) < 99
    )


# ---- the thread that answers, without one


class Loop:
    """An event loop of somebody who listens; closed: nobody does any more."""

    def __init__(self, closed: bool = False):
        self.calls, self.closed = list[int](), closed

    def time(self) -> float:
        return 10.0

    def call_soon_threadsafe(self, call: Any, told: list[Any]) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(len(told))
        call(told)


def subscriber(loop: Loop, top_logprobs: int | None = None) -> Any:
    heard: list[Any] = []
    request = SimpleNamespace(listener=None, answers=[SimpleNamespace()], error=None)
    return SimpleNamespace(
        request=request, loop=loop, top_logprobs=top_logprobs, begin=7.5, heard=heard, publish=heard.append
    )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker whose thread does nothing, and all its batches."""
    batches: list[Any] = []

    def begin(source: Any, parallel: int | None, *, live: bool, memory: int | None) -> Any:
        assert (parallel, live, memory) == (4, True, 99)
        batch = SimpleNamespace(waiting=[1], running=[1, 2], dropped=[], closed=0)
        batch.drop = batch.dropped.append
        batch.close = lambda: setattr(batch, "closed", batch.closed + 1)
        batches.append(batch)
        return batch

    no_thread = SimpleNamespace(start=lambda: None, join=lambda: None)
    stand_in = SimpleNamespace(Condition=threading.Condition, Thread=lambda **_: no_thread)
    counted: list[Any] = []
    count = {
        name: lambda each, name=name: counted.append((name, each)) for name in ("record_finished", "record_cancelled")
    }
    histogram = {name: SimpleNamespace(add=lambda each, name=name: counted.append((name, each)))
                 for name in ("first_token", "between_tokens")}  # fmt: skip
    monkeypatch.setattr(worker, "threading", stand_in)
    model: Any = SimpleNamespace(batch=begin)
    metrics: Any = SimpleNamespace(**count, **histogram)
    return Worker(model, metrics, 4, 99), batches, counted


def test_who_asks_and_who_leaves(answers):
    it, batches, counted = answers
    here, there, closed = Loop(), Loop(), Loop(closed=True)
    first, second, third, gone, alone = (subscriber(loop) for loop in (here, here, there, here, closed))
    for each in (first, second, third, gone, alone):
        it.submit(each)
    it.cancel(gone)  # which the batch has not taken
    assert (it.waiting, it.running) == (5, 2) and iter(it) is it
    assert [next(it) for _ in range(4)] == [each.request for each in (first, second, third, alone)]
    assert next(it, None) is None and it.waiting == 1
    it.cancel(second)
    it.cancel(gone)
    it._token_times[id(second.request.answers[0])] = 1.0
    second.request.listener = first.request.listener = print
    third.request.error = "broken"
    it._after_step([first.request, third.request, alone.request, gone.request])
    assert (first.heard, third.heard, second.heard, alone.heard) == ([None], ["broken"], [], [])
    assert (here.calls, there.calls) == ([1], [1]) and batches[0].dropped == [second.request] and not it._token_times
    assert counted == [
        *(("record_finished", each.request) for each in (first, third, alone)),
        ("record_cancelled", second.request),
    ]
    assert first.request.listener is None and second.request.listener is None
    assert not it._subscribers and not it._cancelled
    it.cancel(first)
    assert not it._cancelled


def test_how_many_may_wait(answers, monkeypatch):
    it, batches, _ = answers
    monkeypatch.setattr(it, "_max_waiting", 2)
    it.submit(subscriber(Loop()))
    it.submit(subscriber(Loop()))
    with pytest.raises(StoppedError, match=r"^the request queue is full \(2\); try again later$"):
        it.submit(subscriber(Loop()))
    assert it._wait_for_work() and worker.MAX_WAITING == 256
    it.close()
    assert batches[0].closed == 1 and not it._wait_for_work()
    with pytest.raises(StoppedError, match=r"^the server is stopping$"):
        it.submit(subscriber(Loop()))


@pytest.mark.parametrize(("error", "told"), [
    (ModelError("the file"), "the file"), (KeyError("a secret"), "internal error: KeyError"),
    (MemoryError(), "not enough memory"),
])  # fmt: skip
def test_all_are_told_what_broke(answers, error: Exception, told: str):
    """And who asks then is answered by a new batch."""
    it, batches, _ = answers
    both = [subscriber(Loop()), subscriber(Loop())]
    for each in both:
        it.submit(each)
    assert next(it) and not it._token_times.update({1: 1.0})
    it._fail(error)
    assert (
        [str(each.heard[0]) for each in both] == [told, told]
        and not it._queue
        and not it._subscribers
        and not it._token_times
    )
    assert isinstance(both[0].heard[0], MemoryLimitError) == isinstance(error, MemoryError)
    assert [batch.closed for batch in batches] == [1, 0] and it._batch is batches[1]
    it._closing = True
    it._fail(error)
    assert [batch.closed for batch in batches] == [1, 1]


def test_what_is_heard_of_a_token(answers, monkeypatch):
    it, _, counted = answers
    now = [1.0]
    monkeypatch.setattr(worker, "monotonic", lambda: now[0])
    row, loop = np.log(np.array([0.5, 0.125, 0.375], np.float32)), Loop()
    guide = SimpleNamespace(transcript=SimpleNamespace(kind=ANSWER))
    answering: Any = SimpleNamespace(number=3, guide=guide, finish_reason=None)
    parts, told = [TextPart(ANSWER, "x")], []
    for likely, token, kind, reason in (
        (2, 1, ANSWER, None), (None, 1, ANSWER, None), (2, None, ANSWER, None), (2, 1, REASONING, "stop"),
    ):  # fmt: skip
        guide.transcript.kind, answering.finish_reason = kind, reason
        it._on_token(subscriber(loop, likely), answering, token, parts, row)
        now[0] += 0.25
        told.append(it._events[-1][1])
    assert [(each.number, each.parts, each.finish_reason) for each in told] == [(3, (*parts,), None)] * 3 + [
        (3, (*parts,), "stop")
    ]
    assert [each.logprob is None for each in told] == [False, True, True, True]
    assert counted == [("first_token", 2.5), *[("between_tokens", 0.25)] * 3] and not it._token_times


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_likeliest_tokens(count: int):
    """The likeliest first, and of logits that mean the same another row is the same."""
    for shift in (0.0, 5.0):
        found = token_logprobs(np.log(np.array([0.25, 0.125, 0.625], np.float32)) + np.float32(shift), 1, count)
        assert [each.token for each in found.likeliest] == [2, 0, 1][:count]
        told = [np.exp(each.logprob) for each in (found.chosen, *found.likeliest)]
        assert found.chosen.token == 1 and told == pytest.approx([0.125, 0.625, 0.25, 0.125][: count + 1], rel=1e-5)


# ---- a question and its answers


class Tokens:
    """A tokenizer of which it is known what fits."""

    vocab_size, bos_id, eos_id = 7, None, None

    def __init__(self, most: int):
        self.most_bytes = lambda context: most


def exchange(*prompts: Any, n: int = 1, context: int = 80, most: int = 1000, **limits: Any) -> Any:
    """Of a model whose texts have a token for each character, and no prompt of more than `most` bytes fits."""

    def request(prompt: Any, options: Any, count: int) -> Any:
        of_tokens = prompt and isinstance(prompt[0], int)
        parts = prompt if of_tokens or isinstance(prompt, str) else [message["content"] for message in prompt]
        text = "".join(map(str, parts))
        assert (options, count) == ("options", n)
        return SimpleNamespace(prompt=[*text], asked=prompt, cached=1, answers=[])

    model = SimpleNamespace(
        engine=SimpleNamespace(vocab_size=9), context=context, session=SimpleNamespace(request=request),
        tokenizer=Tokens(most),
    )  # fmt: skip
    left: list[Any] = []
    working: Any = SimpleNamespace(model=model, cancel=left.append, left=left)
    asked: Any = SimpleNamespace(prompts=[*prompts], options="options", n=n, top_logprobs=None, context=())
    return service.ResponseStream("m", working, asked, Limits(**limits), AsyncExitStack())


def say(*texts: str) -> list[dict[str, str]]:
    """A conversation: what begins with a capital letter is said by the model, with a dot by the system."""
    roles = ["system" if text[0] == "." else "assistant" if text[0].isupper() else "user" for text in texts]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def test_prompts_that_are_refused_at_once():
    it = exchange()
    assert it._build_request([0, 8]).asked == [0, 8] and it._vocab == 7
    for odd in ([9], [-1], [0, "x"], [1.5]):
        with pytest.raises(UsageError, match=r"^prompt: token ids must be from 0 to 8$"):
            it._build_request(odd)
    for text in ("é" * 500, say("é" * 499 + "x", "X")):
        assert exchange(most=1000)._build_request(text).asked == text
        problem = "the prompt has 1000 bytes, but at most 999 fit in a context of 80 tokens; shorten it"
        with pytest.raises(ContextError, match=f"^{problem}$"):
            exchange(most=999)._build_request(text)
        assert exchange(most=999, drops_turns=True)._build_request(text).asked == text
    assert service.count_bytes([{"content": None}, {}, {"content": "\ud800é"}]) == 3


@pytest.mark.parametrize(("texts", "dropped", "left"), [
    (["a" * 30, "A" * 30, "b" * 10], 0, 0), (["a" * 30, "A" * 30, "b" * 11], 1, 2), (["a" * 71], 0, 0),
    (["." * 9, "a" * 20, "A" * 20, "b" * 20, "B" * 20, "c" * 5], 1, 3),
    (["." * 9, "a" * 20, "A" * 20, "b" * 20, "B" * 20, "c" * 22], 2, 5), (["a", "A", "b" * 71], 1, 2),
    (["a", "A", "b", "B", "c", "C" * 69, "d"], 3, 6), ([".", "a" * 70, "b"], 1, 2),
])  # fmt: skip
def test_as_few_turns_go_as_leave_room(texts: list[str], dropped: int, left: int):
    """An eighth of the context is for the answer: of 80 tokens, 70 may be read. What the system says stays."""
    it, parse_messages = exchange(drops_turns=True), say(*texts)
    found = it._build_fitting(parse_messages)
    system = parse_messages[:1] if texts[0][0] == "." else []
    assert it.dropped == dropped and found.asked == (
        parse_messages if not dropped else [*system, *parse_messages[left:]]
    )


def test_texts_have_no_turns():
    it = exchange(drops_turns=True)
    for prompt in ("x" * 99, [5] * 99, []):
        assert it._build_fitting(prompt).asked == prompt and not it.dropped
    assert service.resolve_prompt_images(["x", [5]], []) == ["x", [5]]


def test_what_is_told_of_several_prompts():
    async def told(it: Any) -> list[Any]:
        found = []
        try:
            async for number, each in it.events():
                found.append((number, each.number))
        finally:
            await it.close()
        return found

    def of(*numbers: int, wait: float = 0) -> Any:
        async def events() -> AsyncIterator[Any]:
            for number in numbers:
                await asyncio.sleep(wait)
                yield SimpleNamespace(number=number)

        guide = SimpleNamespace(thoughts=2, transcript=SimpleNamespace(stopped_by="x"))
        answers = [SimpleNamespace(tokens=[1, 2, 3], guide=guide)] * 2
        return SimpleNamespace(events=events, request=SimpleNamespace(prompt=[1] * 5, cached=4, answers=answers))

    it = exchange(n=2)
    it._subscribers = [of(0, 1, 0), of(1)]
    assert sorted(asyncio.run(told(it))) == [(0, 0), (0, 0), (1, 1), (3, 1)] and it._worker.left == it._subscribers
    assert it.usage == it.current_usage() == service.Usage(10, 8, 12, 8) and it.stop_string() == "x"
    it._subscribers[0].request.answers = []
    assert it.stop_string() == ""
    late = exchange(answer_seconds=0.01)
    late._subscribers = [of(0, wait=60)]
    with pytest.raises(RequestTimeoutError, match=r"^the answer took more than 0\.01 seconds$"):
        asyncio.run(told(late))
    assert late.usage == service.Usage() and late._worker.left == late._subscribers
