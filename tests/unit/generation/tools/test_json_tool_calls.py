"""Test tool calls written as JSON: parsing, tool_choice, and calls that were cut."""

import json

import pytest
import tiny_model
from served import Served, scripted, serving

from localllm.generation.reasoning import ANSWER, ARGUMENTS, CALL, REASONING, TextPart
from localllm.generation.tools.json_tool_calls import JsonToolCallParser
from tests.integration.test_serve_tools import calls_in
from tests.unit.generation.tools.test_tool_grammar import QWEN

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ROME = {"city": "Rome", "days": 2}
CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
BARE = '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}'
INDENTED = json.dumps(json.loads(BARE), indent=2)
SCRIPT = {
    "thrice": CALLED * 3,
    "early": CALLED.removesuffix("}\n</tool_call>"),
    "bracket": CALLED.removesuffix("\n</tool_call>"),
    "bare": BARE,
    "fenced": f"I look it up:\n\n```json\n{INDENTED}\n```\nThen I tell you.",
    "two": f"```json\n{BARE}\n{BARE}\n```",
    "list": f"[{BARE}, {BARE}]",
    "again": f"{BARE}\n" * 20,
    "turned": '{"name": "get_weather", "arguments": {"days": 2, "city": "Rome"}}',
    "point": BARE.replace("2", "2.0"),
    "exponent": BARE.replace("2", "2e0"),
    "string": json.dumps({"name": "get_weather", "arguments": json.dumps(ROME)}),
    "parameters": BARE.replace("arguments", "parameters"),
    "api": json.dumps(
        {"type": "function", "id": "c", "function": {"arguments": json.dumps(ROME), "name": "get_weather"}}
    ),
    "line": f"{CALLED}\n",
    "thought": f"<think>I look.\n{CALLED}\n",
    "mentioned": "<think>Not `<tool_call>` now.</think>No.",
    "unknown": '{"name": "get_tides", "arguments": {"city": "Rome"}}',
    "unfit": '{"name": "get_weather", "arguments": {"city": 7}}',
    "less": '{"name": "get_weather", "arguments": {"days": 2}}',
    "inline": f"One writes {BARE} for it.",
    "behind": f"{BARE} is what one writes.",
    "other": '{"name": "get_weather"}',
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    path = tiny_model.write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", chat_template=QWEN)
    thinking = QWEN + "{# <think> </think> #}"
    models = {
        "scripted": lambda: scripted(str(path), SCRIPT),
        "thinking": lambda: scripted(str(path), SCRIPT, template=thinking),
    }
    with serving(models) as served:
        yield served


NAMED = {"type": "function", "function": {"name": "get_weather"}}


def chat_calls(server: Served, question: str, **fields) -> tuple[str, list[dict]]:
    choice = server.chat(question, tools=TOOLS, **fields).json["choices"][0]
    return choice["finish_reason"], [arguments for _, arguments in calls_in(choice["message"])]


def message_calls(server: Served, question: str, **fields) -> tuple[str, list[dict]]:
    tools = [{"name": each["function"]["name"], "input_schema": each["function"].get("parameters")} for each in TOOLS]
    choice = fields.pop("tool_choice", None)
    kind = "auto" if choice is None else "any" if choice == "required" else "tool"
    tool_choice = {"type": kind, "disable_parallel_tool_use": not fields.pop("parallel_tool_calls", True)}
    tool_choice |= {"name": "get_weather"} if kind == "tool" else {}
    body = {"messages": [{"role": "user", "content": question}], "tools": tools, "tool_choice": tool_choice}
    reply = server.post("/v1/messages", {"max_tokens": 300, **body, **fields}).json
    return reply["stop_reason"], [block["input"] for block in reply["content"] if block["type"] == "tool_use"]


def response_calls(server: Served, question: str, **fields) -> tuple[str, list[dict]]:
    if isinstance(fields.get("tool_choice"), dict):
        fields["tool_choice"] = {"type": "function", "name": "get_weather"}
    tools = [{"type": "function", **each["function"]} for each in TOOLS]
    reply = server.post("/v1/responses", {"input": question, "tools": tools, **fields}).json
    calls = [item for item in reply["output"] if item["type"] == "function_call"]
    return reply["status"], [json.loads(call["arguments"]) for call in calls]


ASKS = pytest.mark.parametrize("ask", [chat_calls, message_calls, response_calls])
ENDS = ("tool_calls", "tool_use", "completed")
FORMS = ("point", "exponent", "string", "parameters", "api")


@ASKS
@pytest.mark.parametrize(
    ("choice", "parallel", "count"),
    [(NAMED, True, 1), (NAMED, False, 1), ("required", False, 1), ("required", True, 3), (None, True, 3)],
)
def test_tool_choice_and_parallel_limit_the_number_of_calls(server: Served, ask, choice, parallel: bool, count: int):
    """Call a named tool once; call several only where the model writes several."""
    chosen = {"tool_choice": choice} if choice else {}
    reason, calls = ask(server, "thrice", parallel_tool_calls=parallel, **chosen)
    assert reason in ENDS and calls == [ROME] * count


@ASKS
@pytest.mark.parametrize("question", ["early", "bracket"])
@pytest.mark.parametrize("choice", [NAMED, "required", None])
def test_an_end_token_after_whole_arguments_closes_the_call(server: Served, ask, question: str, choice):
    """Let the end token replace the closing text of the format."""
    reason, calls = ask(server, question, **({"tool_choice": choice} if choice else {}))
    assert reason in ENDS and calls == [ROME]


@pytest.mark.parametrize("length", range(20, 66, 9))
def test_a_cut_call_is_reported_as_cut(server: Served, length: int):
    """Send its partial arguments where the API has them as a string, or no call."""
    choice = server.chat("thrice", tools=TOOLS, tool_choice="required", max_tokens=length).json["choices"][0]
    assert choice["finish_reason"] == "length"
    whole = '{"city":"Rome","days":2}'
    for call in choice["message"].get("tool_calls") or ():
        assert whole.startswith(call["function"]["arguments"].replace(" ", ""))
    tools = [{"name": "get_weather", "input_schema": WEATHER}]
    body = {"messages": [{"role": "user", "content": "thrice"}], "tools": tools, "max_tokens": length}
    reply = server.post("/v1/messages", body).json
    assert reply["stop_reason"] == "max_tokens" and all(block["input"] == ROME for block in reply["content"])
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    reply = server.post("/v1/responses", {"input": "thrice", "tools": flat, "max_output_tokens": length}).json
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    for item in reply["output"]:
        assert whole.startswith(item["arguments"].replace(" ", ""))
        assert item["status"] == ("completed" if item["arguments"].endswith("}") else "incomplete")


@ASKS
@pytest.mark.parametrize(
    ("question", "count"),
    [("bare", 1), ("fenced", 1), ("two", 2), ("list", 2), ("turned", 1), *((form, 1) for form in FORMS)],
)
def test_json_calls_are_parsed_unless_turned_off(server: Served, ask, question: str, count: int):
    assert ask(server, question) == (ENDS[[chat_calls, message_calls, response_calls].index(ask)], [ROME] * count)
    reason, calls = ask(server, question, parallel_tool_calls=False)
    assert reason in ENDS and calls == [ROME]
    reason, calls = ask(server, question, json_calls=False)
    assert reason in ("stop", "end_turn", "completed") and not calls


@ASKS
@pytest.mark.parametrize("choice", ["required", None])
def test_a_line_break_after_a_call_starts_no_other_call(server: Served, ask, choice):
    reason, calls = ask(server, "line", temperature=0, **({"tool_choice": choice} if choice else {}))
    assert reason in ENDS and calls == [ROME]


def test_a_ban_that_contradicts_a_required_call_is_a_bad_request(server: Served):
    """Send 400, which clients do not retry."""
    question, ban = {"messages": [{"role": "user", "content": "bare"}]}, {"banned_strings": ["city"]}
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    anthropic = {"tools": [{"name": "w", "input_schema": WEATHER}], "tool_choice": {"type": "any"}, "max_tokens": 99}
    replies = [
        server.chat("bare", tools=TOOLS[:1], tool_choice="required", **ban),
        server.post("/v1/responses", {"input": "bare", "tools": flat, "tool_choice": "required", **ban}),
        server.post("/v1/messages", {**question, **anthropic, **ban}),
        server.post("/v1/completions", {"prompt": "bare", "regex": " *city", **ban}),
        server.post("/v1/completions", {"prompt": "bare", "grammar": 'root ::= " "* "city"', **ban}),
        server.chat("bare", response_format={"type": "json_schema", "json_schema": {"schema": WEATHER}}, **ban),
    ]
    assert [reply.status for reply in replies] == [400] * len(replies)
    assert all("the constraint allows only banned strings" in reply.body.decode() for reply in replies)
    assert "written so far: '{" in replies[-1].body.decode()
    streamed = server.chat("bare", tools=TOOLS[:1], tool_choice="required", stream=True, **ban)
    assert streamed.status == 400 or streamed.events[-1]["error"]["type"] == "invalid_request_error"


def ollama_calls(server: Served, question: str, stream: bool) -> tuple[str, list[dict]]:
    body = {"model": "thinking", "messages": [{"role": "user", "content": question}], "tools": TOOLS, "stream": stream}
    body["options"] = {"temperature": 0}
    lines = [json.loads(line) for line in server.post("/api/chat", body).body.splitlines()]
    messages = [line["message"] for line in lines]
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ()]
    return "".join(message.get("thinking") or "" for message in messages), calls


def test_a_call_within_open_reasoning_ends_it(server: Served):
    """Compare all APIs, whole and streamed."""
    fields = {"model": "thinking", "temperature": 0}
    answer = server.chat("thought", tools=TOOLS, **fields).json["choices"][0]
    assert answer["message"]["reasoning_content"] == "I look." and not answer["message"]["content"]
    assert calls_in(answer["message"]) == [("get_weather", ROME)] and answer["finish_reason"] == "tool_calls"
    events = server.chat("thought", tools=TOOLS, stream=True, **fields).events
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "I look."
    assert not "".join(delta.get("content") or "" for delta in deltas)
    arguments = [call["function"].get("arguments", "") for delta in deltas for call in delta.get("tool_calls") or ()]
    assert json.loads("".join(arguments)) == ROME
    for ask in (message_calls, response_calls):
        reason, calls = ask(server, "thought", **fields)
        assert reason in ENDS and calls == [ROME]
    assert ollama_calls(server, "thought", True) == ollama_calls(server, "thought", False) == ("I look.", [ROME])


def test_a_marker_mentioned_in_reasoning_is_no_call(server: Served):
    message = server.chat("mentioned", model="thinking", tools=TOOLS).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Not `<tool_call>` now.", "No.")


def test_text_around_a_call_is_kept(server: Served):
    choice = server.chat("fenced", tools=TOOLS).json["choices"][0]
    assert choice["message"]["content"] == "I look it up:\nThen I tell you."
    assert calls_in(choice["message"]) == [("get_weather", ROME)]
    events = server.chat("fenced", tools=TOOLS, stream=True).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look it up:\nThen I tell you."
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call] == [
        "get_weather"
    ]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("question", ["unknown", "unfit", "less", "inline", "behind", "other"])
def test_json_that_is_no_call_stays_text(server: Served, question: str):
    message = server.chat(question, tools=TOOLS).json["choices"][0]
    assert (message["message"]["content"], message["finish_reason"]) == (SCRIPT[question], "stop")


def test_a_repeated_call_ends_the_answer(server: Served):
    """Stop small models that repeat a call after its result."""
    reply = server.chat("again", tools=TOOLS, max_tokens=900).json
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"].get("content") in (None, "")
    assert [arguments for _, arguments in calls_in(choice["message"])] == [ROME]
    bare = server.chat("bare", tools=TOOLS).json["usage"]["completion_tokens"]
    assert reply["usage"]["completion_tokens"] < 3 * bare


def test_json_without_tools_is_text(server: Served):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert server.chat("bare", **fields).json["choices"][0]["message"]["content"] == BARE


# ---- the reader


def parse(text: str, sizes: list[int], is_end: bool = True) -> list[tuple[str, str]]:
    """Return a chunked text's parts, adjacent ones of a type joined."""
    reader, parts, place = JsonToolCallParser(["f", "ff"], lambda name, text: "no" not in text), list[TextPart](), 0
    while place < len(text):
        size = sizes[place % len(sizes)]
        parts += reader.push(TextPart(ANSWER, text[place : place + size]))
        place += size
    parts += reader.flush(is_end)
    merged = list[tuple[str, str]]()
    for kind, piece in parts:
        if merged and kind == ANSWER == merged[-1][0]:
            merged[-1] = (kind, merged[-1][1] + piece)
        else:
            merged.append((kind, piece))
    return merged


F = '{"name": "f", "arguments": {"a": {"b": "}"}}}'
FF = '{ "name" : "ff",\n\t"arguments":{}}'
TAKEN_F, TAKEN_FF = [(CALL, "f"), (ARGUMENTS, '{"a": {"b": "}"}}')], [(CALL, "ff"), (ARGUMENTS, "{}")]


@pytest.mark.parametrize("sizes", [[1], [3], [2, 7, 1], [1000]])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (F, TAKEN_F), (f"  {F}\n", TAKEN_F), (f"{FF}\n\n{F}", TAKEN_FF + TAKEN_F),
        (f"Well.\n{FF}", [(ANSWER, "Well."), *TAKEN_FF]), (f"```\n{F}\n```", TAKEN_F),
        (f"```json\n{F}", TAKEN_F), (f"```json\n[{F},\n{FF}]\n```\n", TAKEN_F + TAKEN_FF),
        (f"```json\n{F}\n{FF}\n```\nSo.", [*TAKEN_F, *TAKEN_FF, (ANSWER, "So.")]),
        (f"a\n{F}\nb", [(ANSWER, "a"), *TAKEN_F, (ANSWER, "\nb")]),
        (f"{F}\n{FF}\n{F}\n{FF}\n", TAKEN_F + TAKEN_FF), (f"a\n{F}\n{F}\nb", [(ANSWER, "a"), *TAKEN_F]),
        (f"a {F}", [(ANSWER, f"a {F}")]), (f"{F} b", [(ANSWER, f"{F} b")]), ("", []), ("\n", [(ANSWER, "\n")]),
        ("`f` is\n[a](b) ``x`` and {", [(ANSWER, "`f` is\n[a](b) ``x`` and {")]),
        (F.replace('"b"', '"no"'), [(ANSWER, F.replace('"b"', '"no"'))]),
        (F[:-1], [(ANSWER, F[:-1])]), (F[:20], [(ANSWER, F[:20])]),
        ("```python\nf()\n```", [(ANSWER, "```python\nf()\n```")]),
        (f"```json\n{F}\n{{}}\n```", [(ANSWER, f"```json\n{F}\n{{}}\n```")]), (f"[{F}", [(ANSWER, f"[{F}")]),
        ('{"name": "fff", "arguments": {}}', [(ANSWER, '{"name": "fff", "arguments": {}}')]),
        ('{\n"name": "f",\n"more": 1}\n' + FF, [(ANSWER, '{\n"name": "f",\n"more": 1}'), *TAKEN_FF]),
    ],
)  # fmt: skip
def test_calls_are_found_in_text_whatever_the_chunks(text: str, expected: list, sizes: list[int]):
    assert parse(text, sizes) == expected


def test_an_incomplete_call_is_text():
    assert parse(F[:-1], [3], is_end=False) == [(ANSWER, F[:-1])]


def test_text_is_held_back_only_while_it_may_be_a_call():
    reader = JsonToolCallParser(["f"], lambda name, text: True)
    parts_by_chunk = [reader.push(TextPart(ANSWER, piece)) for piece in ("Hi", "\n", '{"na', "med", '": 1}', "\n", "x")]
    assert ["".join(part.text for part in parts) for parts in parts_by_chunk] == [
        "Hi",
        "",
        "",
        '\n{"named',
        '": 1}',
        "",
        "\nx",
    ]
    reader.push(TextPart(ANSWER, "\n{"))
    assert reader.push(TextPart(REASONING, "t")) == [(ANSWER, "\n{"), (REASONING, "t")]
