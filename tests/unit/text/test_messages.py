"""Test conversations as programs send them: empty contents, system messages anywhere, roles in any order."""

import json
import re
from functools import partial
from typing import Any

import pytest
from project import GOLDENS
from served import Served, prompt_of_latest, scripted, serving
from tiny_model import write_tiny_model

from localllm import api
from localllm.errors import ModelError, UsageError
from localllm.generation.options import GenerationOptions
from localllm.generation.tools.tool_grammar import Tool, ToolUse
from localllm.text.messages import (
    alternate_roles,
    iter_arrangements,
    make_short_id,
    merge_neighbours,
    shorten_ids,
    split_calls,
    validate_messages,
)
from localllm.text.templates import ChatTemplate
from tests.unit.generation.tools.test_tool_grammar import QWEN

LOOP = "{% for m in messages %}"
SAY = "<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}"
END = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ONLY_FIRST = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only first') }}{% endif %}"
ALTERNATE = (
    "{% set s = namespace(want='user') %}" + LOOP + "{% if m.role in ['user', 'assistant'] and not m.tool_calls %}"
    "{% if m.role != s.want %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set s.want = 'assistant' if m.role == 'user' else 'user' %}{% endif %}"
)
# What templates do with messages, each kind in its smallest form.
KINDS = {
    "takes all": LOOP + SAY + END,
    "refuses a second system": LOOP + ONLY_FIRST + SAY + END,
    "loses a second system": LOOP + "{% if m.role != 'system' or loop.first %}" + SAY + "{% endif %}" + END,
    "loses all but the last system": (
        "{% set s = namespace(x='') %}" + LOOP + "{% if m.role == 'system' %}{% set s.x = m.content %}{% endif %}"
        "{% endfor %}<system>{{ s.x }}" + LOOP + "{% if m.role != 'system' %}" + SAY + "{% endif %}" + END
    ),
    "knows no system": LOOP + "{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}" + SAY + END,
    "loses all systems": LOOP + "{% if m.role != 'system' %}" + SAY + "{% endif %}" + END,
    "takes turns": ALTERNATE + ONLY_FIRST + SAY + END,
    "takes turns without systems": ALTERNATE + "{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    + SAY + END,
    "adds contents": LOOP + "{{ '<' + m.role + '>' + m.content }}" + END,
    "refuses empty answers": LOOP + "{% if m.role == 'assistant' and m.content == '' and not m.tool_calls %}"
    "{{ raise_exception('says nothing') }}{% endif %}" + "{{ '<' + m.role + '>' + m.content }}" + END,
    "tells the last user": (
        "{% set s = namespace(x='') %}" + LOOP + "{% if loop.first and m.role == 'system' %}{% set s.x = m.content %}"
        "{% elif loop.last and m.role == 'user' %}<user>{{ s.x }}{{ m.content }}{% else %}" + SAY + "{% endif %}" + END
    ),
    "wants an id of nine": LOOP + "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('nine') }}{% endif %}{% endfor %}" + SAY + END,
    "wants a call at a time": LOOP + "{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one') }}{% endif %}" + SAY + END,
}  # fmt: skip


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALLS = [{"id": "call_0123456789", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}]
TWO_CALLS = [CALLS[0], {**CALLS[0], "id": "call_9876543210"}]
RESULT = {"role": "tool", "tool_call_id": "call_0123456789", "content": "Result1"}
TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]})
OPENAI_TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": TOOL.parameters}}
]
SHAPES = {
    "two systems": [system("Sys1"), system("Sys2"), user("User1")],
    "a system later": [system("Sys1"), user("User1"), answer("Answer1"), system("Sys2"), user("User2")],
    "a system later only": [user("User1"), answer("Answer1"), system("Sys1"), user("User2")],
    "a system last": [system("Sys1"), user("User1"), system("Sys2")],
    "a system last only": [user("User1"), system("Sys1")],
    "a system behind an answer": [system("Sys1"), user("User1"), answer("Answer1"), system("Sys2")],
    "a system in front of an answer": [user("User1"), system("Sys1"), answer("Answer1"), user("User2")],
    "nothing but a system": [system("Sys1")],
    "nothing but systems": [system("Sys1"), system("Sys2")],
    "a system and a result": [system("Sys1"), user("User1"), answer(None, tool_calls=CALLS), RESULT],
    "a system and a begun answer": [system("Sys1"), user("User1"), answer("Answer1"), user("User2"), answer("Answer2")],
    "a system and an answer": [system("Sys1"), answer("Answer1"), user("User1")],
    "two users": [user("User1"), user("User2")],
    "three users": [system("Sys1"), user("User1"), user("User2"), user("User3"), answer("Answer1"), user("User4")],
    "two answers": [user("User1"), answer("Answer1"), answer("Answer2"), user("User2")],
    "an answer first": [answer("Answer1"), user("User1")],
    "a user behind a result": [user("User1"), answer(None, tool_calls=CALLS), RESULT, user("User2")],
    "a system behind a result": [user("User1"), answer(None, tool_calls=CALLS), RESULT, system("Sys1")],
    "no content": [user("User1"), {"role": "assistant"}, user("User2")],
    "null content": [user("User1"), answer(None), user("User2")],
    "empty content": [user("User1"), answer(""), user("User2")],
    "null content with calls": [user("User1"), answer(None, tool_calls=CALLS), RESULT],
    "empty content with calls": [user("User1"), answer("", tool_calls=CALLS), RESULT],
    "two calls": [user("User1"), answer(None, tool_calls=TWO_CALLS), {**RESULT, "tool_call_id": "call_9876543210"},
                  {**RESULT, "content": "Result2"}, answer("Answer2"), user("User2")],
    "a user says null": [user("User1"), answer("Answer1"), {"role": "user", "content": None}],
    "a system says nothing": [{"role": "system"}, user("User1")],
    "a result is nothing": [user("User1"), answer(None, tool_calls=CALLS), {**RESULT, "content": None}],
    "no parts": [{"role": "user", "content": []}, answer("Answer1"), user([{"type": "text", "text": "User1"}])],
    "a developer": [{"role": "developer", "content": "Sys1"}, user("User1"), {"role": "developer", "content": "Sys2"}],
    "a function": [user("User1"), answer(None, function_call={"name": "look", "arguments": "{}"}),
                   {"role": "function", "name": "look", "content": "Result1"}, user("User2")],
    "a refusal": [user("User1"), answer(None, refusal="Refusal1"), user("User2")],
    "a refusal among parts": [user("User1"), answer([{"type": "refusal", "refusal": "Refusal1"}]), user("User2")],
}  # fmt: skip


def texts_in(messages: Any) -> list[str]:
    """Return the words with a number in a conversation."""
    return re.findall(r"\b(?:Sys|User|Answer|Result|Refusal)\d\b", json.dumps(messages))


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def open_with(path: str, template: str) -> api.Model:
    return scripted(path, {}, 100_000, template)


def prompt_of(model: api.Model, messages: Any) -> str:
    """Return the prompt of a conversation, with tools if it has calls."""
    has_calls = any(message.get("tool_calls") or message.get("function_call") for message in messages)
    use = ToolUse([TOOL]) if has_calls else None
    prompt = model.session.request(messages, GenerationOptions(tools=use)).prompt
    return model.tokenizer.decode(prompt, special=True)


def require_all_words(prompt: str, messages: Any) -> None:
    """Check that the prompt has each word once, and nothing of Python's None."""
    assert {text: prompt.count(text) for text in texts_in(messages)} == dict.fromkeys(texts_in(messages), 1), prompt
    assert "None" not in prompt and "Undefined" not in prompt, prompt


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_template_type_accepts_every_conversation(tiny_path: str, kind: str, shape: str):
    require_all_words(prompt_of(open_with(tiny_path, KINDS[kind]), SHAPES[shape]), SHAPES[shape])


def released_names() -> list[str]:
    recorded = json.loads((GOLDENS / "chat_renderings.json").read_text())
    return sorted(recorded["renderings"])


@pytest.mark.parametrize("name", released_names())
def test_released_templates_accept_every_conversation(shared, tiny_path: str, name: str):
    model = open_with(tiny_path, (shared / "templates" / f"{name}.jinja").read_text())
    for shape, messages in SHAPES.items():
        try:
            prompt = prompt_of(model, messages)
        except ModelError as error:
            pytest.fail(f"{shape}: {error}")
        missing = [text for text in texts_in(messages) if text not in prompt]
        assert not missing, f"{shape}: {missing} in {prompt}"


STRICT = KINDS["takes turns"]


@pytest.fixture(scope="module")
def strict(tiny_path: str):
    templates = {"strict": STRICT, "adding": KINDS["adds contents"], "qwen": QWEN}
    with serving({name: partial(open_with, tiny_path, text) for name, text in templates.items()}) as served:
        yield served


def post_chat(served: Served, messages: Any, model: str = "strict", **more: Any) -> str:
    """Send a chat request that must succeed; return its prompt."""
    reply = served.post("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 1, **more})
    assert reply.status == 200, reply.body
    return prompt_of_latest(served, model)


@pytest.mark.parametrize("model", ["strict", "adding"])
@pytest.mark.parametrize("shape", SHAPES)
def test_chat_completions_accept_every_conversation(strict: Served, shape: str, model: str):
    messages = SHAPES[shape]
    has_calls = any(message.get("tool_calls") for message in messages)
    prompt = post_chat(strict, messages, model, **({"tools": OPENAI_TOOLS} if has_calls else {}))
    require_all_words(prompt, messages)


ANTHROPIC = {
    "two users": [user("User1"), user("User2")],
    "an assistant first": [answer("Answer1"), user("User1")],
    "a system later": [user("User1"), answer("Answer1"), system("Sys1"), user("User2")],
    "nothing": [user("User1"), answer("Answer1"), {"role": "user", "content": []}],
    "null": [user("User1"), {"role": "assistant", "content": None}, {"role": "user", "content": None}],
    "no content": [user("User1"), {"role": "assistant"}, user("User2")],
    "a result of nothing": [
        user("User1"), answer([{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "x"}}]),
        user([{"type": "tool_result", "tool_use_id": "toolu_1", "content": None}, {"type": "text", "text": "User2"}]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("shape", ANTHROPIC)
def test_the_anthropic_endpoint_accepts_every_conversation(strict: Served, shape: str):
    asked = {"model": "strict", "messages": ANTHROPIC[shape], "system": [], "max_tokens": 1}
    assert strict.post("/v1/messages/count_tokens", asked).status == 200
    reply = strict.post("/v1/messages", asked)
    assert reply.status == 200, reply.body
    require_all_words(prompt_of_latest(strict, "strict"), ANTHROPIC[shape])


RESPONSES = {
    "null": [{"role": "user", "content": None}, {"role": "user", "content": "User1"}],
    "a system later": [user("User1"), {"role": "developer", "content": "Sys1"}, user("User2"), system("Sys2")],
    "a refusal": [user("User1"), answer([{"type": "refusal", "refusal": "Refusal1"}]), user("User2")],
    "a user behind a result": [
        user("User1"), {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Result1"}, user("User2"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("shape", RESPONSES)
def test_responses_accept_every_conversation(strict: Served, shape: str):
    asked = {"model": "strict", "input": RESPONSES[shape], "instructions": "Sys9", "max_output_tokens": 1}
    reply = strict.post("/v1/responses", asked)
    assert reply.status == 200, reply.body
    require_all_words(prompt_of_latest(strict, "strict"), [RESPONSES[shape], "Sys9"])


def test_an_answer_with_calls_and_null_content_can_be_sent_back(strict: Served):
    assistant = answer(None, tool_calls=CALLS)
    assert "Result1" in post_chat(strict, [user("User1"), assistant, RESULT], "adding", tools=OPENAI_TOOLS)


def test_images_are_refused_in_system_messages_and_without_a_projector(strict: Served):
    """Refuse an assistant's image as a user's."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for role in ("user", "assistant", "system"):
        asked = {"model": "strict", "messages": [{"role": role, "content": [part]}, user("User1")]}
        reply = strict.post("/v1/chat/completions", asked)
        message = reply.json["error"]["message"]
        assert reply.status == 400
        assert ("a system message can only contain text" if role == "system" else "cannot read images") in message


def test_invalid_messages_are_refused(strict: Served):
    for messages, reason in [
        ([], "messages must not be empty"),
        ([{"role": "critic", "content": "x"}], "messages[0].role must be one of system, developer, user,"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string or an array of parts, not an integer"),
    ]:
        reply = strict.post("/v1/chat/completions", {"model": "strict", "messages": messages})
        assert (reply.status, reason in reply.json["error"]["message"]) == (400, True)


CUT = ['{"cut', "{", "null", "[]", '"x"', "[" * 5000, '{"at": "x"} and', "nothing"]


def called_with(*arguments: Any) -> list[dict[str, Any]]:
    """Return a conversation with a call for each of these arguments, and their results."""
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "look", "arguments": text}}
        for n, text in enumerate(arguments)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"Result{n}"} for n, call in enumerate(calls)]
    return [user("User1"), answer("Answer1", tool_calls=calls), *results, user("User2")]


@pytest.mark.parametrize("arguments", CUT, ids=lambda text: text[:12])
@pytest.mark.parametrize("model", ["strict", "adding", "qwen"])
def test_cut_calls_are_rendered_as_text(strict: Served, model: str, arguments: str):
    messages = called_with(arguments)
    prompt = post_chat(strict, messages, model, tools=OPENAI_TOOLS)
    require_all_words(prompt, messages)
    assert f'{{"name": "look", "arguments": {arguments}' in prompt.replace("\ufdd0", "")


@pytest.mark.parametrize("arguments", [*CUT, "", " ", None, {}, {"at": "x"}, [], 5], ids=lambda value: str(value)[:12])
def test_calls_with_any_arguments_are_accepted(strict: Served, arguments: Any):
    messages = called_with(arguments)
    for more in ({"tools": OPENAI_TOOLS}, {}):
        require_all_words(post_chat(strict, messages, "qwen", **more), messages)
    block = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": arguments}
    conversation = [
        user("User1"),
        answer([block]),
        user([{"type": "tool_result", "tool_use_id": "toolu_1", "content": "Result1"}]),
    ]
    assert strict.post("/v1/messages", {"model": "qwen", "messages": conversation, "max_tokens": 1}).status == 200
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    items = [user("User1"), call, {"type": "function_call_output", "call_id": "c", "output": "Result1"}]
    assert strict.post("/v1/responses", {"model": "qwen", "input": items, "max_output_tokens": 1}).status == 200


def test_a_cut_call_among_whole_ones_is_kept(strict: Served):
    messages = called_with('{"cut', '{"at": "x"}', "", '{"cut again')
    prompt = post_chat(strict, messages, "adding", tools=OPENAI_TOOLS)
    require_all_words(prompt, messages)
    order = ['"arguments": {"cut', '"arguments": {"cut again', "Result1", "Result2", "Result0", "Result3", "User2"]
    assert [prompt.index(text) for text in order] == sorted(prompt.index(text) for text in order)
    assert 'The function look returned:\n"Result0"' in prompt


def test_invalid_calls_are_refused(tiny_path: str):
    for calls in ([5], [{}], [{"function": "look"}], [{"function": {"name": 5}}]):
        with open_with(tiny_path, STRICT) as model, pytest.raises(UsageError, match="a call must be"):
            model.chat([user("User1"), answer(None, tool_calls=calls)])


def constant(kept: bool) -> Any:
    return lambda at_head, later: kept


def test_a_conversation_that_fits_the_template_is_unchanged():
    for messages in SHAPES.values():
        assert next(iter(iter_arrangements(messages, constant(True)))) is messages or messages[0]["role"] != "system"
        assert [*next(iter(iter_arrangements(messages, constant(True))))] == messages


def test_system_messages_move_to_where_the_template_expects_them(tiny_path: str):
    def render(kind: str, shape: str) -> str:
        return ChatTemplate(KINDS[kind]).render(validate_messages(SHAPES[shape]))

    taken, turns = "<user>User1<assistant>Answer1", "<user>User1\n\nSys2<assistant>"
    assert render("takes all", "a system later") == f"<system>Sys1{taken}<system>Sys2<user>User2<assistant>"
    for kind in ("refuses a second system", "loses a second system", "loses all but the last system"):
        assert render(kind, "two systems") == "<system>Sys1\n\nSys2<user>User1<assistant>"
        assert render(kind, "a system later") == f"<system>Sys1{taken}<user>Sys2\n\nUser2<assistant>"
        assert render(kind, "a system last") == f"<system>Sys1{turns}"
        assert render(kind, "a system behind an answer") == f"<system>Sys1{taken}<user>Sys2<assistant>"
    for kind in ("knows no system", "loses all systems"):
        assert render(kind, "two systems") == "<user>Sys1\n\nSys2\n\nUser1<assistant>"
        assert render(kind, "nothing but systems") == "<user>Sys1\n\nSys2<assistant>"
    assert render("takes turns", "a system last only") == "<user>User1\n\nSys1<assistant>"


def test_a_system_text_never_separates_a_call_from_its_result():
    called = [user("User1"), answer(None, tool_calls=CALLS), system("Sys1"), RESULT]
    text = ChatTemplate(KINDS["knows no system"]).render(called)
    assert text == "<user>User1\n\nSys1<assistant>(look)<tool>Result1<assistant>"


def test_the_probe_for_system_messages_runs_once(monkeypatch: pytest.MonkeyPatch):
    template, tried = ChatTemplate(KINDS["loses a second system"]), []
    render = template._render
    monkeypatch.setattr(template, "_render", lambda messages, variables: tried.append(1) or render(messages, variables))
    template.render(SHAPES["two users"])
    assert len(tried) == 1
    template.render(SHAPES["a system later"])
    before = len(tried)
    template.render(SHAPES["a system later"])
    assert len(tried) == before + 1


def test_neighbouring_messages_merge_and_turns_alternate():
    parts = [{"type": "text", "text": "User2"}]
    assert merge_neighbours([user("User1"), user(parts)]) == [user([{"type": "text", "text": "User1"}, *parts])]
    both = merge_neighbours([answer("A", reasoning_content="a"), answer("", tool_calls=CALLS, reasoning_content="b")])
    assert both == [answer("A", tool_calls=CALLS, reasoning_content="a\n\nb")]
    assert merge_neighbours([RESULT, RESULT]) == [RESULT, RESULT]
    assert alternate_roles([answer("A")]) == [user(""), answer("A")]
    assert alternate_roles([user("a"), answer(""), user("b")]) == [user("a\n\nb")]
    assert alternate_roles([user("a"), answer("")]) == [user("a"), answer("")]
    assert alternate_roles([user("a"), answer("", tool_calls=CALLS), RESULT, user("b")])[3] == answer(" ")


def test_firefunctions_template_gets_its_variables():
    """Pass tools as a string, which it needs even without tools."""
    template = ChatTemplate("{{ 'F: ' + functions + ' on ' + datetime }}" + LOOP + SAY + END)
    functions, _ = json.JSONDecoder().raw_decode(
        template.render([user("User1")], tools=[TOOL.to_json_schema()]).removeprefix("F: ")
    )
    assert [function["name"] for function in functions] == ["look"]
    assert re.fullmatch(r"F: \[\] on \w+ \d+ \d+<user>User1<assistant>", template.render([user("User1")]))


def test_parallel_calls_are_split_before_their_results():
    """Keep results without a call behind them."""
    other = {"role": "tool", "tool_call_id": "x", "content": "Result3"}
    results = [other, {**RESULT, "tool_call_id": "call_9876543210", "content": "Result2"}, RESULT]
    messages = [user("User1"), answer("Answer1", tool_calls=TWO_CALLS), *results, user("User2")]
    first, second = ({"role": "assistant", "content": text, "tool_calls": [call]}
                     for text, call in zip(("Answer1", ""), TWO_CALLS, strict=True))  # fmt: skip
    assert split_calls(messages) == [messages[0], first, results[2], second, results[1], other, messages[-1]]
    assert split_calls(messages[:1]) == messages[:1]


def test_a_system_text_kept_only_for_the_last_user_stays_there():
    """Keep the cached prefix valid."""
    template = ChatTemplate(KINDS["tells the last user"])
    asked = [system("Sys1"), user("User1"), answer("Answer1"), user("User2")]
    history = "<user>User1<assistant>Answer1<user>Sys1"
    assert template.render(asked) == f"{history}User2<assistant>"
    assert template.render([*asked, answer("", tool_calls=CALLS), RESULT]).startswith(
        f"{history}\n\nUser2<assistant>(look)"
    )


def test_call_ids_are_shortened_to_nine_characters():
    short = make_short_id("call_0123456789")
    assert len(short) == 9 and short.isalnum()
    called, result = shorten_ids([answer(None, tool_calls=[*CALLS, {"id": "abcdefgh9"}]), RESULT])
    assert [call["id"] for call in called["tool_calls"]] == [short, "abcdefgh9"] and result["tool_call_id"] == short
    assert shorten_ids([user("a")]) == [user("a")]


def test_a_session_with_empty_messages_continues(tiny_path: str):
    with open_with(tiny_path, KINDS["adds contents"]) as model:
        model.session.messages = [system("Sys1"), user("User1"), answer(None), user("User2"), {"role": "assistant"}]
        "".join(model.session.ask("User3", GenerationOptions(max_tokens=1)))
        read = model.tokenizer.decode(model.engine.sequences[-1].tokens, special=True)
    require_all_words(read, [system("Sys1"), user("User1"), user("User2"), user("User3")])


def test_an_empty_conversation_is_refused(tiny_path: str):
    with open_with(tiny_path, STRICT) as model, pytest.raises(UsageError, match=r"^messages must contain at least one"):
        model.chat([])
