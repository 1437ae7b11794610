"""Test localllm serve with the packages openai and anthropic."""

import json

import pytest
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from tests.integration.test_serve import GUIDE
from tests.integration.test_serve_tools import CALLED, OTHER, ROME, TOOLS
from tests.unit.generation.tools.test_tool_grammar import QWEN

PATCH = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "a\\nb"}}\n</tool_call>'
SCRIPT = {
    "hello": "Hello there.",
    "think": "<think>Hm, well.</think>It is four.",
    "call": f"Let me see.\n{CALLED}{OTHER}",
    "grouped": PATCH + OTHER.replace('"now"', '"mcp__files__now"'),
    "sun": "It is sunny.",
    "stop": "one END two",
}
THINKING = QWEN + "{# <think> </think> #}"
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
CLAUDE_TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", NONE)} for tool in TOOLS
]
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
USER = [{"role": "user", "content": "hello"}]


def asking(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", chat_template=THINKING)
    with serving({"scripted": lambda: scripted(str(path), SCRIPT), "guide": GUIDE}) as server:
        yield server


@pytest.fixture(scope="module")
def openai():  # it takes a second to import: only in the worker that has these tests
    return pytest.importorskip("openai", reason="needs the package openai, of the extra dev")


@pytest.fixture(scope="module")
def anthropic():
    return pytest.importorskip("anthropic", reason="needs the package anthropic, of the extra dev")


@pytest.fixture(scope="module")
def gpt(served: Served, openai):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served: Served, anthropic):
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


# ---- openai


def test_openai_lists_models_chats_and_completes(gpt):
    assert [model.id for model in gpt.models.list()] == ["scripted", "guide"]
    answer = gpt.chat.completions.create(model="scripted", messages=USER)
    assert answer.choices[0].message.content == "Hello there." and answer.usage.completion_tokens == 10
    with gpt.chat.completions.create(model="scripted", messages=USER, stream=True) as chunks:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there."
    assert gpt.completions.create(model="guide", prompt="GGUF is", max_tokens=4).choices[0].finish_reason == "length"


def test_openai_calls_tools_and_sends_results(gpt):
    messages = asking("call")
    message = gpt.chat.completions.create(model="scripted", messages=messages, tools=TOOLS).choices[0].message
    first, second = message.tool_calls
    assert (first.function.name, json.loads(first.function.arguments)) == ROME and second.function.name == "now"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls]
    messages += [message, *results, *asking("sun")]
    answer = gpt.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "It is sunny."
    with gpt.chat.completions.stream(model="scripted", messages=asking("call"), tools=TOOLS) as stream:
        stream.until_done()
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [ROME, ("now", {})]


def test_openai_parses_an_answer_by_a_schema(gpt):
    from pydantic import BaseModel

    class Person(BaseModel):
        is_old: bool
        sex: bool

    answer = gpt.chat.completions.parse(model="guide", messages=USER, response_format=Person, max_tokens=60, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_openai_raises_the_right_errors(gpt, openai):
    with pytest.raises(openai.NotFoundError, match="model 'gpt-9' not found"):
        gpt.chat.completions.create(model="gpt-9", messages=USER)
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.chat.completions.create(model="scripted", messages=asking("x" * 5000))
    assert caught.value.code == "context_length_exceeded" and "4096" in str(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.chat.completions.create(model="scripted", messages=USER, temperature="hot")
    assert caught.value.param == "temperature"


def test_openai_responses_have_text_reasoning_and_status(gpt):
    answer = gpt.responses.create(model="scripted", input="hello", instructions="Be nice.")
    assert (answer.output_text, answer.status, answer.usage.output_tokens) == ("Hello there.", "completed", 10)
    answer = gpt.responses.create(model="scripted", input=asking("think"))
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "Hm, well." and answer.output_text == "It is four."
    answer = gpt.responses.create(model="scripted", input="hello", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_openai_responses_call_function_tools(gpt):
    """Send tools of other types and the whole conversation as items, as Codex does."""
    tools = [*FLAT_TOOLS, {"type": "web_search"}, {"type": "local_shell"}, {"type": "custom", "name": "apply_patch"}]
    answer = gpt.responses.create(model="scripted", input=asking("call"), tools=tools)
    message, first, second = answer.output
    assert message.content[0].text == "Let me see."
    assert (first.name, json.loads(first.arguments)) == ROME and second.name == "now"
    items = [*asking("call"), *answer.output]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in (first, second)]
    answer = gpt.responses.create(model="scripted", input=[*items, *asking("sun")], tools=tools, store=False)
    assert answer.output_text == "It is sunny."


def test_openai_responses_stream_numbered_events(gpt):
    with gpt.responses.stream(model="scripted", input=asking("call"), tools=FLAT_TOOLS) as stream:
        events = [*stream]
        answer = stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert answer.output_text == "Let me see." and [item.type for item in answer.output] == [
        "message", "function_call", "function_call",
    ]  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == answer.output[1].arguments + answer.output[2].arguments


def test_openai_responses_stream_custom_and_grouped_tools(gpt):
    """Send the items back without loss."""
    tools = [{"type": "custom", "name": "apply_patch"},
             {"type": "namespace", "name": "mcp__files", "description": "Files", "tools": [FLAT_TOOLS[1]]}]  # fmt: skip
    with gpt.responses.stream(model="scripted", input=asking("grouped"), tools=tools) as stream:
        kinds = {event.type for event in stream}
        patch, now = stream.get_final_response().output
    assert {"response.custom_tool_call_input.done", "response.function_call_arguments.done"} <= kinds
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", "a\nb")
    assert (now.type, now.name, now.namespace, now.arguments) == ("function_call", "now", "mcp__files", "{}")
    items = [*asking("grouped"), patch, {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
             now, {"type": "function_call_output", "call_id": now.call_id, "output": "9:00"}]  # fmt: skip
    answer = gpt.responses.create(model="scripted", input=[*items, *asking("sun")], tools=tools)
    assert answer.output_text == "It is sunny."


def test_openai_probes_and_unstored_responses_are_answered(gpt, served: Served, openai):
    assert served.post("/v1/responses", {"input": []}).json["status"] == "completed"
    assert served.post("/v1/responses", {"input": [], "stream": True}).events[-1]["type"] == "response.completed"
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
        gpt.responses.create(model="scripted", input="hello", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="only text and images are supported"):
        sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
        gpt.responses.create(model="scripted", input=[{"role": "user", "content": [sound]}])


# ---- anthropic


def test_anthropic_messages_are_answered_and_streamed(claude):
    answer = claude.messages.create(model="scripted", max_tokens=99, messages=USER, system="Be nice.")
    assert (answer.content[0].text, answer.stop_reason) == ("Hello there.", "end_turn")
    assert answer.usage.output_tokens == 10
    with claude.messages.stream(model="scripted", max_tokens=99, messages=USER) as stream:
        assert "".join(stream.text_stream) == "Hello there."
        assert stream.get_final_message().usage.output_tokens == 10
    answer = claude.messages.create(model="scripted", max_tokens=3, messages=USER)
    assert answer.stop_reason == "max_tokens"
    answer = claude.messages.create(model="scripted", max_tokens=99, messages=asking("stop"), stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "END", "one ")


def test_anthropic_thinking_blocks_are_returned_and_accepted(claude):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = claude.messages.create(model="scripted", max_tokens=2048, messages=asking("think"), thinking=thinking)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert (answer.content[0].thinking, answer.content[1].text) == ("Hm, well.", "It is four.")
    messages = [*asking("think"), {"role": "assistant", "content": answer.content}, *asking("hello")]
    assert claude.messages.create(model="scripted", max_tokens=99, messages=messages).content[0].text == "Hello there."


def test_anthropic_lists_and_retrieves_models(claude):
    listed = claude.models.list()
    assert all(model.type == "model" and model.display_name == model.id and model.created_at for model in listed.data)
    assert not listed.has_more and claude.models.retrieve(listed.data[0].id) == listed.data[0]


def test_anthropic_calls_tools_and_sends_results(claude):
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    asked = {"model": "scripted", "max_tokens": 200, "tools": [*CLAUDE_TOOLS, server_tool]}
    answer = claude.messages.create(messages=asking("call"), **asked)
    assert answer.stop_reason == "tool_use"
    text, first, second = answer.content
    assert (
        text.text == "Let me see." and (first.name, first.input) == ROME and (second.name, second.input) == ("now", {})
    )
    results = [
        {"type": "tool_result", "tool_use_id": first.id, "content": [{"type": "text", "text": "sun"}]},
        {"type": "tool_result", "tool_use_id": second.id, "content": "no clock", "is_error": True},
        {"type": "text", "text": "sun"},
    ]
    messages = [*asking("call"), {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    assert claude.messages.create(messages=messages, **asked).content[0].text == "It is sunny."
    with claude.messages.stream(messages=asking("call"), **asked) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert final.content[1].input == ROME[1] and events.count("content_block_start") == 3
    forced = claude.messages.create(
        model="guide",
        max_tokens=60,
        messages=USER,
        extra_body={"temperature": 0},  # or a random text might reach 60 tokens
        tools=CLAUDE_TOOLS,
        tool_choice={"type": "tool", "name": "now"},
    )
    assert [(block.name, block.input) for block in forced.content] == [("now", {})]


def test_anthropic_counts_tokens_and_raises_the_right_errors(claude, served: Served, anthropic):
    count = claude.messages.count_tokens(model="scripted", messages=USER, system="Be nice.", tools=CLAUDE_TOOLS)
    used = claude.messages.create(
        model="scripted", max_tokens=1, messages=USER, system="Be nice.", tools=CLAUDE_TOOLS
    ).usage
    assert count.input_tokens == used.input_tokens + used.cache_read_input_tokens > 50
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude-9", max_tokens=9, messages=USER)
    with pytest.raises(anthropic.BadRequestError, match="but the context holds only 4096"):
        claude.messages.create(model="scripted", max_tokens=9, messages=asking("x" * 5000))
    error = served.post("/v1/messages", {"messages": USER}).json
    assert error == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "max_tokens is missing: set the maximum number of tokens to generate",
        },
    }


def test_a_changing_system_line_is_dropped_to_keep_the_prefix(served: Served):
    def ask(line: str) -> dict:
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: {line}"},
            {"type": "text", "text": "Be nice. " * 30},
        ]
        return served.post(
            "/v1/messages", {"system": system, "messages": USER, "max_tokens": 2, "model": "scripted"}
        ).json

    ask("cch=1")
    assert ask("cch=23")["usage"]["cache_read_input_tokens"] > 150


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
        {"tools": [{"name": "a b", "input_schema": {"type": "object"}}]},
        {"tool_choice": "any"},
        {"thinking": {"type": "sometimes"}},
        {"max_tokens": None},
        {"stop_sequences": 5},
    ],
)
def test_invalid_fields_of_anthropic_are_refused(served: Served, fields: dict):
    reply = served.post("/v1/messages", {"messages": USER, "max_tokens": 5, **fields})
    assert reply.status == 400 and reply.json["error"]["type"] == "invalid_request_error", reply.json
