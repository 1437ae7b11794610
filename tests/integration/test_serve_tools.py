"""Test localllm serve with tools: calls whole and streamed, results, and tool_choice."""

import json

import pytest
import tiny_model
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from tests.integration.test_serve import GUIDE
from tests.unit.generation.tools.test_tool_grammar import QWEN

CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SCRIPT = {
    "one": CALLED,
    "two": f"Let me see.\n{CALLED}{OTHER}",
    "prose": "One writes <tool_call> in front of a call.",
    "long": CALLED,
    "sun": "It is sunny.",
    "json": '{"name":"Rome","sunny":true}',
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9, "minimum": 0}},
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ROME = ("get_weather", {"city": "Rome", "days": 2})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", chat_template=QWEN)
    with serving({"scripted": lambda: scripted(str(path), SCRIPT)}) as served:
        yield served


@pytest.fixture(scope="module")
def guide():
    with serving({"guide": GUIDE}) as served:
        yield served


def calls_in(message: dict) -> list[tuple[str, dict]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def test_calls_are_returned_with_ids_and_text(server: Served):
    choice = server.chat("one", tools=TOOLS).json["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert calls_in(choice["message"]) == [ROME]
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9
    choice = server.chat("two", tools=TOOLS).json["choices"][0]
    assert choice["message"]["content"] == "Let me see."
    assert calls_in(choice["message"]) == [ROME, ("now", {})]


def test_streamed_calls_have_their_indices(server: Served):
    events = server.chat("two", tools=TOOLS, stream=True, n=2).events
    for index in (0, 1):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        deltas = [delta for choice in choices for delta in choice["delta"].get("tool_calls", ())]
        names = {delta["index"]: delta["function"]["name"] for delta in deltas if "id" in delta}
        assert names == {0: "get_weather", 1: "now"}
        pieces = {place: "".join(d["function"]["arguments"] for d in deltas if d["index"] == place) for place in names}
        assert [json.loads(pieces[place]) for place in (0, 1)] == [ROME[1], {}]
        assert sum(delta["index"] == 0 for delta in deltas) > 5  # piece by piece
        assert choices[-1]["finish_reason"] == "tool_calls"


def test_literal_markers_in_prose_are_text(server: Served):
    message = server.chat("prose", tools=TOOLS).json["choices"][0]
    assert (message["message"]["content"], message["finish_reason"]) == (SCRIPT["prose"], "stop")


def test_a_call_without_tools_is_text(server: Served):
    assert server.chat("one").json["choices"][0]["message"]["content"] == CALLED
    assert server.chat("one", tools=TOOLS, tool_choice="none").json["choices"][0]["message"]["content"] == CALLED


FORM = {
    "type": "json_schema",
    "json_schema": {
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 9}, "sunny": {"type": "boolean"}},
            "required": ["name", "sunny"],
            "additionalProperties": False,
        }
    },
}


def test_a_schema_beside_tools_allows_a_call_or_an_instance(server: Served):
    """Allow nothing else, whatever the model writes."""
    choice = server.chat("one", tools=TOOLS, response_format=FORM).json["choices"][0]
    assert (choice["finish_reason"], calls_in(choice["message"])) == ("tool_calls", [ROME])
    choice = server.chat("json", tools=TOOLS, response_format=FORM).json["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", SCRIPT["json"])
    events = server.chat("json", tools=TOOLS, response_format=FORM, stream=True).events
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == SCRIPT["json"]
    for question in ("prose", "two"):
        choice = server.chat(question, tools=TOOLS, response_format=FORM, max_tokens=400, seed=1).json["choices"][0]
        message = choice["message"]
        if choice["finish_reason"] == "stop":
            assert set(json.loads(message["content"])) == {"name", "sunny"}
        assert message["content"] is None or message["content"].startswith("{")


def test_an_untrained_model_keeps_a_schema_beside_tools(guide: Served):
    calls = texts = 0
    for seed in range(12):
        more = {"max_tokens": 300, "seed": seed, "temperature": 1.5}
        choice = guide.chat("Hi", tools=TOOLS, response_format=FORM, **more).json["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            calls += 1
            assert choice["message"]["content"] is None
            for name, arguments in calls_in(choice["message"]):
                assert name == "now" or set(arguments) == {"city", "days"}
        elif choice["finish_reason"] == "stop":
            texts += 1
            assert set(json.loads(choice["message"]["content"])) == {"name", "sunny"}
    assert calls + texts > 3


@pytest.mark.parametrize(
    "form", [{"regex": r'\{"name": "[a-z]{1,9}"\}'}, {"response_format": {"type": "json_object"}, "max_tokens": 40}]
)
def test_json_that_names_a_tool_is_a_call_beside_a_schema(guide: Served, form: dict):
    """Apply to formats that write calls as JSON."""
    for seed in range(6):
        choice = guide.chat("Hi", tools=TOOLS, seed=seed, temperature=1.5, **form).json["choices"][0]
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]).keys() != {"name", "arguments"}
        for name, _ in calls_in(choice["message"]) if choice["finish_reason"] == "tool_calls" else ():
            assert name in ("get_weather", "now")


def test_a_cut_call_ends_with_length(server: Served):
    choice = server.chat("long", tools=TOOLS, max_tokens=50).json["choices"][0]
    assert choice["finish_reason"] == "length"


def test_results_reach_the_prompt(server: Served):
    first = server.chat("one", tools=TOOLS).json["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "sun"}
    messages = [{"role": "user", "content": "one"}, first, result, {"role": "user", "content": "sun"}]
    reply = server.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS}).json
    assert reply["choices"][0]["message"]["content"] == "It is sunny."
    engine = server.model().engine
    text = server.model().detokenize(engine.sequences[-1].tokens, special=True)
    assert '"city": "Rome"' in text and "<|im_start|>tool\nsun" in text and '"name": "now"' in text


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize("parallel", [True, False])
def test_an_untrained_model_makes_required_calls(guide: Served, choice, parallel: bool):
    """Describe the tools to the built-in model, which has never seen any."""
    reply = guide.chat(
        "Hi", tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel, max_tokens=400, seed=3, temperature=0.5
    )
    choice_made = reply.json["choices"][0]
    assert choice_made["finish_reason"] in ("tool_calls", "length"), reply.json
    if choice_made["finish_reason"] == "tool_calls":
        [(name, arguments)] = calls_in(choice_made["message"])
        assert name == ("now" if isinstance(choice, dict) else name)
        assert name == "now" or set(arguments) == {"city", "days"}


def test_tools_are_described_in_the_prompt(guide: Served):
    before = guide.chat("Hi", max_tokens=1).json["usage"]["prompt_tokens"]
    assert guide.chat("Hi", max_tokens=1, tools=TOOLS).json["usage"]["prompt_tokens"] > before + 20


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": "all"},
        {"tools": ["x"]},
        {"tools": [{"type": "function", "function": {}}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        {"tools": TOOLS, "tool_choice": "sometimes"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": 5}]},
    ],
)
def test_invalid_tool_fields_are_refused(server: Served, fields: dict):
    reply = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}
    )
    assert reply.status == 400 and reply.json["error"]["message"], reply.json


# gpt-oss writes thoughts, calls and answers as messages, each with a head.
HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    " to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}"
    "<|call|>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{# <|start|>assistant<|channel|>analysis<|message|><|end|> #}"
)
ARGUMENTS = '{"city": "Rome", "days": 2}'
HEADS = {
    "after a thought": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "after words": "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "at once": f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
    "no call": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is sunny.",
}


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    marks = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "SPECIAL_TOKENS", [*tiny_model.SPECIAL_TOKENS, *marks])
        path = write_tiny_model(tmp_path_factory.mktemp("models") / "harmony.gguf", chat_template=HARMONY)
    with serving({"scripted": lambda: scripted(str(path), HEADS)}) as served:
        yield served


@pytest.mark.parametrize("question", HEADS)
def test_calls_reasoning_and_text_of_harmony_are_separated(harmony: Served, question: str):
    choice = harmony.chat(question, tools=TOOLS).json["choices"][0]
    message = choice["message"]
    thinks = question in ("after a thought", "no call")
    assert message.get("reasoning_content", "") == ("Hm." if thinks else "")
    words = {"after words": "Let me see.", "no call": "It is sunny."}
    assert (message["content"] or "") == words.get(question, "")
    assert calls_in(message) == ([] if question == "no call" else [ROME])
    assert choice["finish_reason"] == ("stop" if question == "no call" else "tool_calls")


@pytest.mark.slow
@pytest.mark.parametrize("question", HEADS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_harmony_makes_required_calls_after_reasoning(harmony: Served, question: str, choice):
    """Allow nothing but calls after it."""
    choice_made = harmony.chat(question, tools=TOOLS, tool_choice=choice, max_tokens=400).json["choices"][0]
    message = choice_made["message"]
    assert not message["content"]
    if question in ("after a thought", "at once"):
        assert calls_in(message) == [ROME] and choice_made["finish_reason"] == "tool_calls"
    if question in ("after a thought", "no call"):
        assert message["reasoning_content"].startswith("Hm.")
    if choice_made["finish_reason"] == "tool_calls":
        [(name, arguments)] = calls_in(message)
        assert name == "now" or set(arguments) >= {"city", "days"}
        assert choice == "required" or name == "get_weather"


def test_harmony_calls_a_named_tool(harmony: Served):
    now = {"type": "function", "function": {"name": "now"}}
    choice_made = harmony.chat("after a thought", tools=TOOLS, tool_choice=now, max_tokens=400).json["choices"][0]
    assert [name for name, _ in calls_in(choice_made["message"])] == ["now"] and choice_made["message"][
        "reasoning_content"
    ] == "Hm."
    choice_made = harmony.chat("after a thought", tools=TOOLS, tool_choice=now, think_budget=1).json["choices"][0]
    assert [name for name, _ in calls_in(choice_made["message"])] == ["now"]


def test_harmony_keeps_a_schema_beside_tools(harmony: Served):
    choice_made = harmony.chat("after a thought", tools=TOOLS, response_format=FORM).json["choices"][0]
    assert calls_in(choice_made["message"]) == [ROME]
    choice_made = harmony.chat("no call", tools=TOOLS, response_format=FORM, max_tokens=300).json["choices"][0]
    content = choice_made["message"]["content"]
    assert not content or content.startswith("{")
