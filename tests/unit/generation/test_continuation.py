"""Test that a final assistant message is continued, in Python and over HTTP."""

from functools import partial
from typing import Any

import pytest
from served import Served, prompt_of_latest, scripted, serving
from tiny_model import write_tiny_model

from localllm import api
from localllm.errors import UsageError
from localllm.generation.conversation import PartialAnswer, find_partial_answer
from localllm.generation.reasoning import FORMATS, TagFormat
from tests.unit.generation.tools.test_tool_grammar import QWEN
from tests.unit.text.test_messages import CALLS, OPENAI_TOOLS, RESULT, answer, released_names, system, user

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ASKED = "<|im_start|>user\nUser1<|im_end|>\n<|im_start|>assistant\n"
TEMPLATES = {
    "chatml": CHATML,
    "strips": CHATML.replace("m.content", "(m.content | trim)"),
    "in the middle": CHATML.replace("m.content", "'[' + m.content + '] said ' + m.role"),
    "twice": CHATML.replace("'<|im_end|>", "' (' + m.role + ')<|im_end|>"),
    "loses answers": CHATML.replace("+ m.content", "+ (m.content if m.role == 'user' else '')"),
    "thinks": CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}") + "{# </think> #}",
    "shows thoughts": CHATML.replace(
        "m.content",
        "('<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content else '') + m.content",
    ),
    "takes turns": CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns') }}{% endif %}",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def open_with(path: str, template: str, script: dict[str, str] | None = None) -> api.Model:
    return scripted(path, script or {}, 100_000, template)


def prompt_of(model: api.Model, messages: Any, **options: Any) -> str:
    generation = model.chat(messages, max_tokens=1, **options)
    return model.tokenizer.decode(generation.prompt, special=True)


@pytest.mark.parametrize(
    ("template", "final", "prompt"),
    [
        ("chatml", answer("Answer1"), ASKED + "Answer1"),
        ("chatml", answer("Answer1 "), ASKED + "Answer1 "),
        ("chatml", answer("\n Answer1\n"), ASKED + "\n Answer1\n"),
        ("chatml", answer("Say <|im_end|> and"), ASKED + "Say <|im_end|> and"),
        ("chatml", answer([{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]), ASKED + "A\nB"),
        ("chatml", answer(""), ASKED),
        ("chatml", answer(None), ASKED),
        ("chatml", answer([]), ASKED),
        ("strips", answer(" Answer1 \n"), ASKED + "Answer1"),
        ("in the middle", answer("Answer1"), ASKED.replace("User1", "[User1] said user") + "[Answer1"),
        ("twice", answer("Answer1"), ASKED.replace("User1", "User1 (user)") + "Answer1"),
        ("loses answers", answer("Answer1"), ASKED + "Answer1"),
        ("thinks", answer("Answer1"), ASKED + "Answer1"),
        ("thinks", answer("Answer1", reasoning_content="Hm"), ASKED + "<think>\nHm\n</think>\n\nAnswer1"),
        ("thinks", answer("", reasoning_content="Hm"), ASKED + "<think>\nHm"),
        ("thinks", answer("<think>\nHm\n</think>\n\nAnswer1"), ASKED + "<think>\nHm\n</think>\n\nAnswer1"),
        ("thinks", answer("<think>Hm, so"), ASKED + "<think>\nHm, so"),
        ("thinks", answer(""), ASKED + "<think>\n"),
        ("shows thoughts", answer("Answer1", reasoning_content="Hm"), ASKED + "<think>\nHm\n</think>\n\nAnswer1"),
        ("shows thoughts", answer(None, reasoning_content="Hm"), ASKED + "<think>\nHm"),
        ("shows thoughts", answer("Answer1"), ASKED + "Answer1"),
    ],
)  # fmt: skip
def test_the_prompt_ends_within_the_final_assistant_message(tiny_path: str, template: str, final: dict, prompt: str):
    with open_with(tiny_path, TEMPLATES[template]) as model:
        assert prompt_of(model, [user("User1"), final]) == prompt
        assert prompt_of(model, [user("User1"), final], continue_final=bool(final) or None) == prompt


def test_two_final_assistant_messages_are_continued_as_one(tiny_path: str):
    with open_with(tiny_path, TEMPLATES["takes turns"]) as model:
        assert prompt_of(model, [user("User1"), answer("A"), answer("B")]) == ASKED + "A\n\nB"


def test_continue_final_false_or_a_user_message_starts_a_new_answer(tiny_path: str):
    closed = ASKED + "Answer1<|im_end|>\n<|im_start|>assistant\n"
    with open_with(tiny_path, CHATML) as model:
        assert prompt_of(model, [user("User1"), answer("Answer1")], continue_final=False) == closed
        messages = [user("User1"), answer("Answer1"), user("User2")]
        for choice in (None, False):
            assert prompt_of(model, messages, continue_final=choice).endswith(
                "User2<|im_end|>\n<|im_start|>assistant\n"
            )
        called = [user("User1"), answer("Answer1", tool_calls=CALLS)]
        assert prompt_of(model, called).endswith("<|im_start|>assistant\n")
        with pytest.raises(UsageError, match="continue_final: the last message is of the role 'user'"):
            model.chat(messages, continue_final=True)
        with pytest.raises(UsageError, match="continue_final: the last message has calls"):
            model.chat(called, continue_final=True)


def test_only_new_text_is_returned(tiny_path: str):
    with open_with(tiny_path, CHATML, {"User1": "One two three"}) as model:
        messages = [user("User1"), answer("One")]
        generation = model.chat(messages)
        assert "".join(generation) == " two three" == generation.text
        assert [one.text for one in model.map([messages])] == [" two three"]
        assert model.candidates(messages, n=2)[0].text == " two three"


def test_an_unfinished_reasoning_is_continued(tiny_path: str):
    script = {"User1": "<think>\nFirst this, then that.\n</think>\n\nYes."}
    with open_with(tiny_path, TEMPLATES["shows thoughts"] + "{# </think> #}", script) as model:
        generation = model.chat([user("User1"), answer(None, reasoning_content="First this,")])
        assert ("".join(generation), generation.thinking) == ("Yes.", " then that.")


@pytest.mark.parametrize(
    "form", [{"regex": "One (two|three) four"}, {"grammar": 'root ::= "One " ("two" | "three") " four"'}]
)
def test_a_grammar_constrains_the_continued_answer_as_a_whole(tiny_path: str, form: dict[str, str]):
    with open_with(tiny_path, CHATML, {"User1": "One three four"}) as model:
        assert "".join(model.chat([user("User1"), answer("One th")], **form)) == "ree four"


def test_a_schema_constrains_the_continued_answer_as_a_whole(tiny_path: str):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with open_with(tiny_path, CHATML, {"User1": '{"a":7}'}) as model:
        assert "".join(model.chat([user("User1"), answer('{"a":')], schema=schema)) == "7}"
        whole = "".join(model.chat([user("User1"), answer("It is ")], schema=schema, max_tokens=40))
        assert whole.startswith("{")


@pytest.fixture(scope="module")
def server(tiny_path: str):
    script = {"User1": "One two three"}
    templates = {"chatml": CHATML, "qwen": QWEN, "thinks": TEMPLATES["thinks"]}
    with serving({name: partial(open_with, tiny_path, text, script) for name, text in templates.items()}) as served:
        yield served


def test_chat_completions_continue_the_final_message(server: Served):
    def ask(*messages: Any, **more: Any) -> Any:
        return server.post("/v1/chat/completions", {"model": "chatml", "messages": messages, "max_tokens": 50, **more})

    begun = user("User1"), answer("One")
    for more in ({}, {"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False},
                 {"add_generation_prompt": False}, {"continue_final_message": None}):  # fmt: skip
        reply = ask(*begun, **more).json
        assert reply["choices"][0]["message"]["content"] == " two three", more
        assert prompt_of_latest(server, "chatml").startswith(ASKED + "One two")
    counted = len(server.model("chatml").tokenizer.encode(ASKED + "One", special=True))
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (counted, len(" two three"))
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in ask(*begun, stream=True).events]
    assert "".join(deltas) == " two three"
    for more in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert ask(*begun, **more).status == 200
        assert prompt_of_latest(server, "chatml").startswith(ASKED + "One<|im_end|>\n<|im_start|>assistant\n")
    ask(user("User1"), add_generation_prompt=False, max_tokens=1)
    assert prompt_of_latest(server, "chatml").startswith(ASKED.removesuffix("<|im_start|>assistant\n"))
    for messages, more, message in [
        (begun, {"continue_final_message": True, "add_generation_prompt": True}, "set only one to true"),
        ([user("User1")], {"continue_final_message": True}, "continue_final_message: the last message must be"),
        (begun, {"continue_final_message": "yes"}, "continue_final_message must be a boolean"),
        ([user("User1"), answer(None, tool_calls=CALLS)], {"continue_final_message": True}, "without tool calls"),
    ]:
        reply = ask(*messages, **more)
        assert reply.status == 400 and message in reply.json["error"]["message"]


def test_anthropic_messages_continue_the_final_message(server: Served):
    asked = {"model": "chatml", "messages": [user("User1"), answer("One")], "max_tokens": 50}
    reply = server.post("/v1/messages", asked).json
    assert reply["content"] == [{"type": "text", "text": " two three"}] and reply["stop_reason"] == "end_turn"
    counted = server.post("/v1/messages/count_tokens", asked).json["input_tokens"]
    usage = reply["usage"]
    assert counted == len(server.model("chatml").tokenizer.encode(ASKED + "One", special=True))
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    assert usage["output_tokens"] == len(" two three")
    blocks = {**asked, "messages": [user("User1"), answer([{"type": "text", "text": "One"}])]}
    assert server.post("/v1/messages", blocks).json["content"] == reply["content"]
    called = [user("User1"), answer([{"type": "tool_use", "id": "t", "name": "look", "input": {}}])]
    assert server.post("/v1/messages", {**asked, "model": "qwen", "messages": called}).status == 200


def test_a_final_message_after_tool_results_is_continued(server: Served):
    messages = [user("User1"), answer(None, tool_calls=CALLS), RESULT, answer("Answer1")]
    asked = {"model": "qwen", "messages": messages, "tools": OPENAI_TOOLS, "max_tokens": 1}
    assert server.post("/v1/chat/completions", asked).status == 200
    assert "assistant\nAnswer1" in prompt_of_latest(server, "qwen")
    assert "Answer1<|im_end|>" not in prompt_of_latest(server, "qwen")


def test_the_partial_answer_is_split_into_reasoning_and_content():
    think = next(format for format in FORMATS if isinstance(format, TagFormat))
    opens, closes = think.opens, think.closes
    for final, partial_answer in [
        (answer("a"), PartialAnswer("a")), (answer(None), PartialAnswer()), (answer(" \n"), PartialAnswer()),
        (answer("a", thinking="b"), PartialAnswer("a", "b")),
        (answer("", reasoning="b"), PartialAnswer("", "b")), (answer(f"{opens}b{closes}a"), PartialAnswer("a", "b")),
        (answer(f"{opens}\nb "), PartialAnswer("", "b ")), (answer(f"a{opens}b"), PartialAnswer(f"a{opens}b")),
    ]:  # fmt: skip
        assert find_partial_answer([final], None, think) == partial_answer
    assert find_partial_answer([answer("", thinking="b")], None, None) == PartialAnswer()
    assert find_partial_answer([], None, None) is None


@pytest.mark.parametrize("name", released_names())
def test_released_templates_continue_the_final_message(shared, tiny_path: str, name: str):
    """Render nothing twice, and the content last."""
    conversation = [system("Sys1"), user("User1"), answer("Answer1"), user("User2"), answer("Answer2 goes")]
    with open_with(tiny_path, (shared / "templates" / f"{name}.jinja").read_text()) as model:
        for messages in (conversation, conversation[1:], conversation[1:3]):
            prompt = model.tokenizer.decode(model.session.request(messages).prompt, special=True)
            assert prompt.endswith(messages[-1]["content"]) and prompt.count(messages[-1]["content"]) == 1
            assert prompt.count("User1") == 1
        thought = answer("", reasoning_content="Thought1 goes")
        request = model.session.request([user("User1"), thought])
        prompt = model.tokenizer.decode(request.prompt, special=True)
        assert prompt.endswith("Thought1 goes") == (request.task.thinking.format is not None)
        assert request.task.thinking.is_open or request.task.thinking.format is None
