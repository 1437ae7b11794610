"""Test how requests of every API are parsed: fields, messages, options, images."""

import math
from functools import partial
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
from localllm.errors import UsageError
from localllm.generation.constraints.constraint import make_constraint
from localllm.generation.logprobs import TokenLogprob
from localllm.server import model_pool as model_pool
from localllm.server import page
from localllm.server.anthropic_messages import parse_messages as conversation_of_anthropic
from localllm.server.anthropic_messages import parse_request
from localllm.server.attachments import MAX_IMAGES, convert_image_part, resolve_file, resolve_images
from localllm.server.fields import RequestBody
from localllm.server.messages import parse_messages
from localllm.server.openai_chat import IGNORED_HEADER, clip_logprob, make_extension_headers
from localllm.server.openai_chat import parse_request as parse_chat_request
from localllm.server.openai_completions import MAX_PROMPTS, parse_prompts
from localllm.server.openai_responses import parse_input
from localllm.server.openai_responses import parse_request as question_of_responses
from localllm.server.openai_responses import parse_tools as tools_of_responses
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
from tests.unit.server.request_helpers import HI, completion_request, messages_request, responses_request


def test_fields_are_checked_for_their_types():
    body = RequestBody({"t": "x", "n": 1.5, "i": 3, "b": True, "l": [1], "o": {"a": 1}, "none": None})
    assert (body.get_string("t"), body.get_int("i"), body.get_bool("b")) == ("x", 3, True)
    assert body.get_list("l") == [1] and body.get_mapping("o") == {"a": 1} and body.get_object("o").get("a") == 1
    for read in (body.get_string, body.get_int, body.get_list, body.get_mapping, body.get_object):
        assert read("none") is None and read("missing") is None
    assert body.get_bool("none") is False and body.get_strings("none") == body.get_strings("missing") == ()
    assert body.get_strings("t") == ("x",) and RequestBody({"s": ["a", "b"]}).get_strings("s") == ("a", "b")
    for read, field, what in (
        (body.get_string, "i", "a string, not an integer"),
        (body.get_int, "b", "an integer, not a boolean"), (body.get_int, "n", "an integer, not a number"),
        (body.get_bool, "i", "a boolean, not an integer"), (body.get_list, "t", "an array, not a string"),
        (body.get_mapping, "l", "an object, not an array"), (body.get_strings, "l", "a string or an array of strings"),
        (body.get_strings, "i", "a string or an array of strings"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=f"^{field} must be {what}"):
            read(field)
    for read in (body.require_string, body.require_list):
        with pytest.raises(UsageError, match=r"^none is missing"):
            read("none")
    with pytest.raises(UsageError, match=r"^o.a must be a string"):
        body.get_object("o").get_string("a")
    with pytest.raises(UsageError, match=r"^tools must be an object, not an array"):
        RequestBody.parse([], "tools")


@pytest.mark.parametrize(("value", "least", "most", "fits"), [
    (0, 0, None, True), (-1, 0, None, False), (1, 1, 3, True), (3, 1, 3, True), (4, 1, 3, False), (0, 1, 3, False),
])  # fmt: skip
def test_integers_are_checked_for_their_bounds(value: int, least: int, most: int | None, fits: bool):
    if fits:
        assert RequestBody({"x": value}).get_int("x", least, most) == value
    else:
        with pytest.raises(UsageError, match=r"x must be (0 or greater|from 1 to 3), not"):
            RequestBody({"x": value}).get_int("x", least, most)


def test_unread_fields_are_reported_as_ignored():
    body = RequestBody({"a": 1, "b": 2, "c": "high", "d": [], "e": 0})
    body.get("a")
    assert body.get_choice("c", ("low", "high")) == "high" and body.ignored == ["b", "d", "e"]
    with pytest.raises(UsageError, match="c must be low or none, not 'high'"):
        body.get_choice("c", ("low", "none"))
    for nothing in ("d", "e", "missing"):
        body.reject(nothing, "why")
    with pytest.raises(UsageError, match="a is not supported: why"):
        body.reject("a", "why")


def test_sampling_fields_have_several_names():
    fields = {
        "temperature": 0.5,
        "repetition_penalty": 1.2,
        "typical_p": 0.9,
        "seed": -1,
        "logit_bias": {"7": 1},
        "top_k": None,
    }
    sampling = parse_sampling(RequestBody(fields))
    assert (sampling.temperature, sampling.repeat_penalty, sampling.typical, sampling.seed) == (0.5, 1.2, 0.9, None)
    assert (
        sampling.logit_bias == {7: 1} and sampling.top_k is None and parse_sampling(RequestBody({"seed": 0})).seed == 0
    )
    assert parse_biases({"0": 1.0, "999999999": -1.0}) == {0: 1.0, 999999999: -1.0}
    for odd in ("-1", "x", "1.0", "", "1" * 20):
        with pytest.raises(UsageError, match="logit_bias must be an object of numbers by token id"):
            parse_biases({"5": 1.0, odd: 1.0})


@pytest.mark.parametrize("name", ["a\nb: c", "a\rb", "a\x00", "\x7f", "ä", "a,b"])
def test_a_header_has_no_line_break_of_the_client(name: str):
    """Keep field names of the request from starting another header."""
    body = RequestBody({"fine": 1, name: 2, "x" * 50: 3})
    assert make_extension_headers(body) == {IGNORED_HEADER: f"fine, {'x' * 40}"}


def test_ignored_fields_are_reported():
    """Leave out those that clients always send."""
    fields = {"input": "Hi", "user": "me", "store": False, "include": [], "background": None, "odd": 1, "even": 2}
    body = RequestBody(fields)
    assert question_of_responses(body) and make_extension_headers(body) == {IGNORED_HEADER: "odd, even"}


FUNCTION = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}


def conversation_of_responses(items: Any) -> list[dict[str, Any]]:
    return parse_input(RequestBody({"input": items}))


def test_a_response_request_is_parsed():
    fields = {"input": "Hi", "model": "m", "instructions": "Be short", "max_output_tokens": 1, "temperature": 0.5,
             "reasoning": {"effort": "minimal"}, "tools": [FUNCTION], "parallel_tool_calls": False}  # fmt: skip
    request = question_of_responses(RequestBody(fields))
    assert request and (request.model, request.n, request.top_logprobs) == ("m", 1, None)
    assert request.prompts == [[{"role": "system", "content": "Be short"}, *HI]]
    options = request.options
    assert (options.max_tokens, options.stop, options.think, options.sampling.temperature) == (1, (), "low", 0.5)
    assert options.tools and [tool.name for tool in options.tools.tools] == ["now"] and not options.tools.parallel
    bare = question_of_responses(RequestBody({"input": "Hi"}))
    assert bare and (bare.model, bare.prompts) == (None, [HI])
    assert (bare.options.max_tokens, bare.options.tools, bare.options.think) == (None, None, "auto")
    assert question_of_responses(RequestBody({"instructions": "Be short"})) is None


def chat(**fields: Any) -> Any:
    return parse_chat_request(RequestBody({"messages": HI, **fields}))


@pytest.mark.parametrize(
    ("ask", "fields", "reason"),
    [
        (responses_request, {"previous_response_id": "x"},
         "previous_response_id is not supported: the server stores no conversations"),
        (responses_request, {"conversation": "x"}, "conversation is not supported: the server stores no conversations"),
        (responses_request, {"top_logprobs": 1}, "top_logprobs is not supported: use /v1/chat/completions"),
        (responses_request, {"reasoning": {"effort": "hard"}}, "reasoning.effort must be none or minimal or low"),
        (chat, {"functions": [1]}, "functions is not supported: use tools"),
        (chat, {"audio": {"a": 1}}, "audio is not"),
        (chat, {"top_logprobs": 21}, "top_logprobs must be from 0 to 20"),
        (chat, {"n": 17}, "n must be from 1 to 16"),
        (chat, {"n": 0}, "n must be from 1 to 16"),
        (completion_request, {"prompt": [1], "suffix": "x"}, "suffix: the prompt must be a string, not token ids"),
        (completion_request, {"suffix": 1}, "suffix must be a string, not an integer"),
        (completion_request, {"echo": True, "suffix": "x"}, "echo cannot be combined with suffix"),
        (completion_request, {"n": 2, "best_of": 3}, "best_of must be equal to n, 2, not 3"),
        (completion_request, {"n": 17}, "n must be from 1"),
        (completion_request, {"logprobs": 21}, "logprobs must be from 0"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused(ask: Any, fields: dict[str, Any], reason: str):
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
def test_logprobs_fields_give_the_number_of_alternatives(fields: dict[str, Any], top_logprobs: int | None):
    assert chat(**fields).top_logprobs == top_logprobs


def test_a_chat_request_is_parsed():
    """Prefer the newer name of the token limit."""
    request = chat(model="m", n=16, max_tokens=5, seed=3, tools=[FUNCTION], stop="x")
    assert (request.model, request.n, request.prompts, request.options.max_tokens) == ("m", 16, [HI], 5)
    assert (request.options.sampling.seed, request.options.stop, request.options.tools.tools[0].name) == (
        3,
        ("x",),
        "now",
    )
    assert chat(max_tokens=5, max_completion_tokens=1).options.max_tokens == 1 and chat().options.max_tokens is None
    assert (chat().n, chat().model) == (1, None)


TOKENS = [[1, 2], [3]]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]), (None, [""]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), (TOKENS, TOKENS),
        (["a", [1]], ["a", [1]]), (["a"] * MAX_PROMPTS, ["a"] * MAX_PROMPTS), (["a"] * (MAX_PROMPTS + 1), None),
        ([], None), (5, None), ([[]], None), (["a", 1], None), ([[1, "a"]], None), ([True], None), ([1.5], None),
    ],
)  # fmt: skip
def test_completion_prompts_are_strings_or_token_ids(prompt: Any, prompts: Any):
    if prompts:
        assert parse_prompts(prompt) == prompts
    else:
        many = f"prompt must have at most {MAX_PROMPTS} items, not {MAX_PROMPTS + 1}"
        with pytest.raises(UsageError) as failure:
            parse_prompts(prompt)
        is_long = isinstance(prompt, list) and len(prompt) > MAX_PROMPTS
        assert str(failure.value) == (
            many if is_long else "prompt must be a string, an array of token ids, or an array of these"
        )


def test_a_completion_request_is_parsed():
    request = completion_request(model="m", n=2, best_of=2, max_tokens=0, logprobs=20)
    assert (request.model, request.prompts, request.n, request.top_logprobs, request.options.max_tokens) == (
        "m",
        ["Hi"],
        2,
        20,
        0,
    )
    assert (
        completion_request().n,
        completion_request().top_logprobs,
        completion_request().options.max_tokens,
        completion_request(best_of=1).n,
    ) == (1, None, 16, 1)
    assert completion_request(logprobs=0).top_logprobs == 0


def test_a_message_request_is_parsed():
    tools = [{"name": "now"}, {"type": "web_search_20250305", "name": "web"}, {"type": "custom", "name": "then"}]
    request = messages_request(model="m", stop_sequences=["x"] * 16, top_k=5,
                   system=[{"type": "text", "text": "Be short"}],
                   tools=tools,
                   tool_choice={"type": "tool", "name": "now", "disable_parallel_tool_use": True},
                   thinking={"type": "enabled", "budget_tokens": 7}, metadata={"user_id": "me"})  # fmt: skip
    assert (request.model, request.prompts) == ("m", [[{"role": "system", "content": "Be short"}, *HI]])
    options = request.options
    assert (options.max_tokens, options.stop, options.sampling.top_k) == (9, ("x",) * 16, 5)
    assert (options.think, options.think_budget) == ("on", 7)
    assert [tool.name for tool in options.tools.tools] == ["now", "then"]
    assert (options.tools.choice, options.tools.parallel) == ("now", False)
    with pytest.raises(UsageError, match="stop_sequences must be at most 16 strings, not 17"):
        messages_request(stop_sequences=["x"] * 17)
    for choice, meant in (("auto", "auto"), ("any", "required"), ("none", "none"), (None, "auto")):
        use = messages_request(tools=tools, tool_choice={"type": choice}).options.tools
        assert (use.choice, use.parallel) == (meant, True)
    bare = messages_request(tools=tools).options.tools
    assert (bare.choice, bare.parallel) == ("auto", True) and messages_request(tools=tools[1:2]).options.tools is None
    idle = messages_request(thinking={"type": "disabled", "budget_tokens": 7}).options
    assert (idle.think, idle.think_budget) == ("off", None)
    for odd in ([], [{"role": "tool", "content": "x"}], [5], [{"role": "user", "content": 5}],
                [{"role": "user", "content": [5]}], [{"role": "user", "content": [{"text": "x"}]}]):  # fmt: skip
        with pytest.raises(UsageError, match="messages"):
            parse_request(RequestBody({"messages": odd}), 9)


def test_options_common_to_all_apis_are_parsed():
    body = RequestBody({"stop": ["x"] * 16, "think_budget": 5, "chat_template_kwargs": {"a": 1}, "user": "me"})
    options = parse_options(body, 9, None)
    assert (options.max_tokens, options.stop, options.think_budget) == (9, ("x",) * 16, 5)
    assert options.template_variables == {"a": 1} and not body.ignored
    assert parse_options(RequestBody({}), None, None).template_variables == {}
    with pytest.raises(UsageError, match="stop must be at most 16 strings, not 17"):
        parse_options(RequestBody({"stop": ["x"] * 17}), None, None)


@pytest.mark.parametrize(("lora", "scales"), [
    (None, None), ([], {}), ([{"id": 0, "scale": 0.5}, {"id": 2}], {"0": 0.5, "2": 1.0}),
    ([{"name": "poet", "scale": 2}], {"poet": 2}), ({"poet": 0.5, "1": 0}, {"poet": 0.5, "1": 0}),
])  # fmt: skip
def test_adapters_are_parsed_in_all_forms(lora: Any, scales: Any):
    assert parse_options(RequestBody({"lora": lora}), None, None).lora == scales


@pytest.mark.parametrize("lora", ["poet", 1, [1], [{"scale": 1}], [{"id": True}], {"poet": "x"}, {"poet": None}])
def test_adapters_in_other_forms_are_refused(lora: Any):
    with pytest.raises(UsageError, match="lora must be an array of objects with id"):
        parse_options(RequestBody({"lora": lora}), None, None)


@pytest.mark.parametrize(("fields", "think"), [
    ({}, "auto"), ({"think": "on"}, "on"), ({"reasoning_effort": "none"}, "off"),
    ({"reasoning_effort": "xhigh"}, "high"), ({"reasoning_effort": "minimal"}, "low"),
    ({"reasoning_effort": "medium", "think": "off"}, "off"),
])  # fmt: skip
def test_reasoning_efforts_become_think(fields: dict[str, str], think: str):
    assert parse_think(RequestBody(fields)) == think


def test_response_formats_give_a_schema():
    assert (
        parse_schema(None) is None
        and parse_schema(RequestBody({"type": "text"})) is None
        and parse_schema(RequestBody({})) is None
    )
    assert parse_schema(RequestBody({"type": "json_object"})) == {"type": "object"}
    assert parse_schema(RequestBody({"type": "json_object", "schema": {"a": 1}})) == {"a": 1}
    assert parse_schema(RequestBody({"type": "json_schema", "json_schema": {"schema": {"b": 1}}})) == {"b": 1}
    assert parse_schema(RequestBody({"type": "json_schema", "schema": {"c": 1}})) == {"c": 1}
    with pytest.raises(UsageError, match=r"^json_schema.schema must be an object, not null"):
        parse_schema(RequestBody({"type": "json_schema", "json_schema": {}}))


def test_schemas_of_anthropic_and_responses_become_constraints():
    """Read output_config and text.format."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    expected, format = make_constraint(schema), {"type": "json_schema", "schema": schema}
    asked = {"messages": [{"role": "user", "content": "x"}], "input": "x"}
    for read, key in ((partial(parse_request, max_tokens=9), "output_config"), (question_of_responses, "text")):
        for config, constraint in (({"format": format}, expected), ({}, None), (None, None)):
            question = read(RequestBody({**asked, key: config}))
            assert question is not None and question.options.constraint == constraint
            assert (question.n, question.top_logprobs) == (1, None)
        with pytest.raises(UsageError, match="schema must be an object"):
            read(RequestBody({**asked, key: {"format": {"type": "json_schema", "schema": 5}}}))


@pytest.mark.parametrize(("effort", "thinking", "think"), [
    ("low", None, "low"), ("max", None, "high"), (None, None, "auto"), ("low", {"type": "adaptive"}, "low"),
    ("low", {"type": "enabled"}, "on"), ("max", {"type": "disabled"}, "off"), (None, {"type": "disabled"}, "off"),
])  # fmt: skip
def test_efforts_of_anthropic_become_think(effort: str | None, thinking: dict | None, think: str):
    """Use the effort only if thinking is not set."""
    fields = {"output_config": effort and {"effort": effort}, "thinking": thinking}
    assert (
        parse_request(RequestBody({"messages": [{"role": "user", "content": "x"}], **fields}), 9).options.think == think
    )


def test_anthropic_blocks_become_messages():
    """Put tool results with their function names first, and drop reasoning."""
    call = {"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}}
    thoughts = [*({"type": "thinking", "thinking": text} for text in ("t", "u")), {"type": "redacted_thinking"}]
    results = [
        {"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": "no"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "j"},
    ]  # fmt: skip
    blocks = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "x"}, call]},
        {"role": "user", "content": [{"type": "text", "text": "and?"}, *results]},
        {"role": "assistant", "content": []}, {"role": "user", "content": "c"},
    ]  # fmt: skip
    called = {"id": "i", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert conversation_of_anthropic(blocks) == [
        {"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "x", "reasoning_content": "t\nu", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "i", "content": "Error: no", "name": "f"},
        {"role": "tool", "tool_call_id": "j", "content": ""}, {"role": "user", "content": "and?"},
        {"role": "assistant", "content": ""}, {"role": "user", "content": "c"},
    ]  # fmt: skip
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    seen, wrong = {"type": "image_url", "image_url": "data:image/png;base64,AA"}, {"type": "text", "text": "Error:"}
    failed_result = {**results[0], "content": [image]}
    messages = conversation_of_anthropic([{"role": "user", "content": [image, failed_result]}])
    assert [message["content"] for message in messages] == [[wrong, seen], [seen]]
    with pytest.raises(UsageError, match="a system message can only contain text"):
        conversation_of_anthropic([{"role": "system", "content": [image]}])
    for odd, shown in (("x", "x"), ([1], "[1]"), (None, "{}")):
        assistant_messages = conversation_of_anthropic([{"role": "assistant", "content": [{**call, "input": odd}]}])
        assert assistant_messages[0]["tool_calls"][0]["function"]["arguments"] == shown
    for spoilt in ({**call, "name": 5}, {**call, "name": None}):
        with pytest.raises(UsageError, match=r"messages\[0\]\.content: a tool_use block must have a name and an input"):
            conversation_of_anthropic([{"role": "assistant", "content": [spoilt]}])


def test_a_tool_of_anthropic_is_parsed():
    schema = {"type": "object", "properties": {"a": {}}}
    [tool] = messages_request(
        tools=[{"name": "t", "description": "d", "input_schema": schema, "strict": True}]
    ).options.tools.tools
    assert (tool.name, tool.description, tool.parameters, tool.strict) == ("t", "d", schema, True)
    for odd in (5, "t", None):
        with pytest.raises(UsageError, match="tools must"):
            messages_request(tools=[odd])


def test_other_fields_of_a_message_request_are_read_or_ignored():
    """Ignore known fields silently, force no reasoning with a schema, and allow a budget of 0."""
    nothing = {name: "x" for name in ("metadata", "service_tier", "container", "inference_geo", "diagnostics", "speed")}
    nothing |= {name: "x" for name in ("cache_control", "user_profile_id", "workspace_id", "betas")}
    body = RequestBody({"messages": HI, "context_management": {}, "odd": 1, **nothing})
    parse_request(body, 9)
    assert body.ignored == ["odd"]
    formed = messages_request(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}).options
    assert formed.constraint and formed.think == "auto"
    empty = messages_request(thinking={"type": "enabled", "budget_tokens": 0}).options
    assert (empty.think, empty.think_budget) == ("on", 0)
    lines = "Be short.\nx-anthropic-billing-header: cc_version=1; cch=5\n x-anthropic-billing-header: stays"
    assert messages_request(system=lines).prompts[0][0]["content"] == "Be short.\n x-anthropic-billing-header: stays"


def test_anthropic_tools_without_parameters_take_an_empty_object():
    for schema in ({}, {"input_schema": None}, {"input_schema": {}}):
        asked = {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "now", **schema}]}
        use = parse_request(RequestBody(asked), 9).options.tools
        assert use and use.tools[0].parameters == {"type": "object", "properties": {}}
        assert (use.tools[0].name, use.tools[0].description, use.tools[0].strict) == ("now", "", False)


def test_function_tools_are_parsed_in_both_forms():
    function = {"name": "now", "description": "d", "parameters": {"type": "object"}, "strict": True}
    inside, flat = {"type": "function", "function": function}, {"type": "function", **function}
    for tool in (inside, flat):
        tool_of_function = parse_function(RequestBody(tool))
        assert (tool_of_function.name, tool_of_function.description, tool_of_function.strict) == ("now", "d", True)
        assert tool_of_function.parameters == {"type": "object", "properties": {}}
    bare = parse_function(RequestBody({"name": "now"}))
    assert (bare.description, bare.parameters, bare.strict) == ("", {"type": "object", "properties": {}}, False)
    others = RequestBody({"tools": [{"type": "web"}, inside]})
    assert (use := parse_tools(others)) and len(use.tools) == 1 and others.ignored == ["tools[0]:web"]
    assert (
        parse_tools(RequestBody({"tools": [], "tool_choice": "auto"})) is None and parse_tools(RequestBody({})) is None
    )
    for parallel, several in ((None, True), (True, True), (False, False)):
        use = parse_tools(RequestBody({"tools": [inside], "tool_choice": "required", "parallel_tool_calls": parallel}))
        assert use and (use.choice, use.parallel, len(use.tools)) == ("required", several, 1)
    assert parse_tool_choice(None) == ("auto", None) and parse_tool_choice("none") == ("none", None)
    for named in ({"function": {"name": "x"}}, {"type": "function", "name": "x"}):
        assert parse_tool_choice(named) == ("x", None)
    for odd in ("x", 5, {"function": {}}):
        with pytest.raises(UsageError):
            parse_tool_choice(odd)


def test_messages_of_all_roles_are_parsed():
    call = {"id": "c", "function": {"name": "now", "arguments": None}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm"},
        {"role": "tool", "tool_call_id": "c", "content": "9"}, {"role": "tool", "tool_call_id": "x", "content": "8"},
        {"role": "tool", "tool_call_id": "c", "name": "own", "content": "7"},
        {"role": "assistant", "content": "No", "reasoning_content": 5},
    ]  # fmt: skip
    system, user, assistant, named, other, own, last = parse_messages(messages)
    assert system == {"role": "system", "content": "Be short."} and user["content"] == "a\nb"
    call_sent = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert assistant == {"role": "assistant", "content": None, "tool_calls": [call_sent], "reasoning_content": "Hm"}
    assert (named["name"], own["name"], "name" in other) == ("now", "own", False) and "reasoning_content" not in last


@pytest.mark.parametrize(("message", "reason"), [
    ({"role": "assistant", "tool_calls": 5}, "tool_calls must be an array"),
    ({"role": "assistant", "tool_calls": [5]}, "a tool call must have a function"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, "a tool call must have a function with"),
    ({"role": "user", "content": 5}, "content must be a string or an array of parts"),
    ({"role": "user", "content": [{"url": "x"}]}, "an object with a string as its type"),
    ({"role": "user", "content": [{"type": "audio"}]}, "only text and images are supported"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "must have a string as its text"),
    ({"role": "system", "content": [{"type": "image_url", "image_url": "data:x"}]}, "system message can only contain"),
])  # fmt: skip
def test_invalid_messages_are_refused(message: dict[str, Any], reason: str):
    with pytest.raises(UsageError, match=rf"messages\[1\].*{reason}"):
        parse_messages([{"role": "user", "content": "x"}, message])


def test_missing_and_unknown_messages_are_refused():
    for messages, reason in (
        ([], "messages must not be empty"),
        (["x"], r"messages\[0\] must be an object, not a string"),
    ):
        with pytest.raises(UsageError, match=reason):
            parse_messages(messages)
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
def test_response_items_become_messages(items: Any, messages: list[dict[str, Any]]):
    """Merge reasoning and calls into the adjacent answer."""
    assert conversation_of_responses(items) == messages


def test_images_of_responses_are_allowed_for_users_and_assistants():
    """Refuse them in a system message."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    messages = [{"role": "user", "content": [image]}]
    assert conversation_of_responses(messages) == parse_messages(messages) and isinstance(
        parse_messages(messages)[0]["content"], list
    )
    assert (
        conversation_of_responses([{"role": "assistant", "content": [image]}])[0]["content"]
        == parse_messages(messages)[0]["content"]
    )
    with pytest.raises(UsageError, match="a system message can only contain text"):
        conversation_of_responses([{"role": "system", "content": [image]}])


CALL_TOLD = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "expected"),
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
def test_messages_saved_by_the_page_are_checked(message: Any, expected: dict[str, Any] | None):
    if expected:
        assert page.parse_message(message) == expected
    else:
        with pytest.raises(UsageError):
            page.parse_message(message)


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (5, "input must be a string or an array of items, not an integer"),
        ([5], "input[0] must be an object, not an integer"),
        ([{"role": "robot"}], "input[0].role must be one of system, developer, user, assistant, tool, function"),
        ([SAYING, {"type": "item_reference"}],
         "input[1]: item_reference is not supported: the server stores no items; send the item itself"),
    ],
)  # fmt: skip
def test_invalid_response_items_are_refused(items: Any, reason: str):
    with pytest.raises(UsageError) as failure:
        conversation_of_responses(items)
    assert str(failure.value) == reason


def test_tools_and_choice_of_a_response_are_parsed():
    """Ignore the choice of a tool that the server cannot run."""
    function = {"type": "function", "name": "now", "parameters": {"type": "object"}}
    for choice, meant in (
        (None, "auto"),
        ({"type": "web_search"}, "auto"),
        ({"type": "function", "name": "now"}, "now"),
    ):
        use = tools_of_responses(RequestBody({"tools": [{"type": "web_search"}, function], "tool_choice": choice}))
        assert use and [tool.name for tool in use.tools] == ["now"] and (use.choice, use.parallel) == (meant, True)
    assert (
        tools_of_responses(RequestBody({"tools": [{"type": "web_search"}]})) is None
        and tools_of_responses(RequestBody({})) is None
    )


def test_images_of_every_api_become_the_same_part(tmp_path):
    url = {"type": "image_url", "image_url": "data:image/jpeg;base64,AA=="}
    source = {"type": "base64", "media_type": "image/jpeg", "data": "AA=="}
    for part in (
        url, {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AA=="}},
        {"type": "input_image", "image_url": "data:image/jpeg;base64,AA=="}, {"type": "image", "source": source},
        {"type": "image", "source": {"type": "url", "url": "data:image/jpeg;base64,AA=="}},
    ):  # fmt: skip
        assert convert_image_part(part, "x") == url
    del source["media_type"]
    assert convert_image_part({"type": "image", "source": source}, "x")["image_url"].startswith(
        "data:image/png;base64,AA"
    )
    for odd in ({"file_id": "f"}, {"source": {"file_id": "f"}}, {"source": {"type": "base64"}}, {"image_url": {}}, {}):
        with pytest.raises(UsageError, match=r"^x"):
            convert_image_part(odd, "x")
    message = {"role": "user", "content": [url] * MAX_IMAGES}
    assert resolve_images([message, {"role": "user", "content": "a"}], []) == [
        message,
        {"role": "user", "content": "a"},
    ]
    with pytest.raises(UsageError, match="too many images: 65, but at most 64 are allowed per request"):
        resolve_images([message, {"role": "user", "content": [url]}], [])


def test_files_are_resolved_only_within_the_served_folders(tmp_path):
    first, second, beside = (tmp_path / name for name in ("a", "b", "ab"))
    for folder in (first, second, beside):
        folder.mkdir()
        (folder / "x.png").write_bytes(b"")
    folders = [str(first), str(second)]
    assert resolve_file("x.png", folders) == str((first / "x.png").resolve())
    assert resolve_file(str(second / "x.png"), folders) == str((second / "x.png").resolve())
    for outside in (str(beside / "x.png"), "../ab/x.png"):
        with pytest.raises(UsageError, match="outside the folders"):
            resolve_file(outside, folders)
    for missing in ("y.png", "."):
        with pytest.raises(UsageError, match="image not found"):
            resolve_file(missing, folders)


@pytest.mark.parametrize(("logprob", "sent"), [(-math.inf, -9999.0), (-10000.0, -9999.0), (-0.5, -0.5)])
def test_logprobs_are_finite_in_responses(logprob: float, sent: float):
    assert clip_logprob(TokenLogprob(1, logprob)) == sent
