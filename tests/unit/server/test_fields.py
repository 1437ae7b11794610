"""Test what each API's fields become, and which are refused."""

from typing import Any

import pytest
from invoked import flat

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")

from localllm.errors import UsageError
from localllm.generation.constraints.constraint import make_constraint
from localllm.generation.options import GenerationOptions
from localllm.server import anthropic_messages, openai_responses
from localllm.server.fields import RequestBody
from localllm.server.openai_chat import parse_request as parse_chat_request
from localllm.server.openai_completions import parse_request as parse_completion_request


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def message_question(body: RequestBody) -> Any:
    return anthropic_messages.parse_request(body, body.get_int("max_tokens", 1))


CHATS = {"messages": asked("x")}
INTERFACES = {
    "chat": (parse_chat_request, CHATS), "text": (parse_completion_request, {"prompt": "x"}),
    "response": (openai_responses.parse_request, {"input": "x"}), "message": (message_question, CHATS),
}  # fmt: skip
DRAWN = {"temperature": 0.3, "top_p": 0.4, "top_k": 5, "min_p": 0.06, "presence_penalty": 0.7,
         "frequency_penalty": 0.8, "seed": 9, "repeat_penalty": 1.1, "typical": 0.2, "ignore_eos": True}  # fmt: skip
OWN: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "chat": [
        ({"model": "m", "n": 3, "logprobs": True}, {"model": "m", "n": 3, "top_logprobs": 0}),
        ({"top_logprobs": 2, "n": None}, {"top_logprobs": 2}), ({"logprobs": False}, {}), ({"top_logprobs": 0}, {}),
        ({"max_tokens": 5}, {"max_tokens": 5}), ({"max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"stop": "a", "think_budget": 4, "reasoning_effort": "low", "chat_template_kwargs": {"v": 1}},
         {"stop": ["a"], "think_budget": 4, "think": "low", "template_variables": {"v": 1}}),
    ],
    "text": [
        ({"model": "m", "n": 3, "best_of": 3, "logprobs": 0}, {"model": "m", "n": 3, "top_logprobs": 0}),
        ({"max_tokens": 0}, {"max_tokens": 0}), ({"prompt": [1, 2]}, {"prompts": [[1, 2]]}),
        ({"prompt": ["a", [1]], "logprobs": 3}, {"prompts": ["a", [1]], "top_logprobs": 3}),
        ({"stop": ["b"]}, {"stop": ["b"]}), ({"banned_strings": "b"}, {"ban": ["b"]}),
    ],
    "response": [
        ({"model": "m", "max_output_tokens": 5, "reasoning": {"effort": "high"}},
         {"model": "m", "max_tokens": 5, "think": "high"}),
        ({"banned_strings": ["b"]}, {"ban": ["b"]}),
        ({"instructions": "i"}, {"prompts": [[{"role": "system", "content": "i"}, *asked("x")]]}),
    ],
    "message": [
        ({"model": "m", "max_tokens": 5, "stop_sequences": ["a"]}, {"model": "m", "max_tokens": 5, "stop": ["a"]}),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, {"think": "on", "think_budget": 7}),
        ({"thinking": {"type": "disabled", "budget_tokens": 7}}, {"think": "off"}),
        ({"banned_strings": ["a", "b"]}, {"ban": ["a", "b"]}),
        ({"system": "s"}, {"prompts": [[{"role": "system", "content": "s"}, *asked("x")]]}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", INTERFACES)
def test_each_field_becomes_its_option_only(name: str):
    """Change nothing else, and report no field as ignored."""
    question, asks = INTERFACES[name]
    usual = {"model": None, "prompts": ["x"] if name == "text" else [asked("x")], "n": 1, "top_logprobs": None}
    usual |= {"context": [], "wants_progress": False}
    usual |= flat(GenerationOptions()) | ({"max_tokens": 16} if name == "text" else {})
    usual |= usual.pop("sampling")
    for fields, expected in [({}, {}), (DRAWN, DRAWN), *OWN[name]]:
        body = RequestBody({**asks, **fields})
        parsed = flat(question(body))
        parsed |= {
            **parsed.pop("options"),
            "top_logprobs": parsed["top_logprobs"],
        }  # the request's, not the option of Python
        assert parsed | parsed.pop("sampling") == usual | expected, fields
        assert body.ignored == []


def test_max_completion_tokens_overrides_max_tokens():
    assert (
        parse_chat_request(RequestBody({**CHATS, "max_tokens": 5, "max_completion_tokens": 6})).options.max_tokens == 6
    )


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}}


@pytest.mark.parametrize(("fields", "constraint"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"schema": SCHEMA}),
    ({"regex": "[ab]"}, {"regex": "[ab]"}), ({"grammar": 'root ::= "x"'}, {"grammar": 'root ::= "x"'}),
])  # fmt: skip
def test_response_formats_become_constraints(fields: dict, constraint: dict):
    for name in ("chat", "text"):
        question, asks = INTERFACES[name]
        assert question(RequestBody({**asks, **fields})).options.constraint == make_constraint(**constraint)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"functions": [{}]}, "functions is not supported: use tools"),
    ("chat", {"audio": {"a": 1}}, "audio is not supported: answers are text only; leave it out"),
    ("chat", {"n": 17}, "n must be from 1 to 16"),
    ("chat", {"n": 0}, "n must be from 1 to 16"),
    ("chat", {"top_logprobs": 21}, "top_logprobs must be from 0 to 20"),
    ("text", {"echo": True, "suffix": "x"}, "echo cannot be combined with suffix"),
    ("text", {"n": 17}, "n must be from 1 to 16"),
    ("text", {"best_of": 2}, "best_of must be equal to n, 1, not 2"),
    ("text", {"logprobs": 21}, "logprobs must be from 0 to 20"),
    ("text", {"prompt": []}, "prompt must be a string"),
    ("text", {"prompt": [True]}, "prompt must be a string"),
    ("text", {"prompt": [[]]}, "prompt must be a string"),
    ("text", {"prompt": ["x"] * 65}, "prompt must have at most 64 items, not 65"),
    ("response", {"previous_response_id": "r"}, "previous_response_id is not supported"),
    ("response", {"conversation": "c"}, "conversation is not supported: the server stores no conversations"),
    ("response", {"top_logprobs": 1}, "top_logprobs is not supported: use /v1/chat/completions"),
    ("response", {"input": 5}, "input must be a string or an array of items, not an integer"),
    ("response", {"input": [5]}, r"input\[0\] must be an object, not an integer"),
    ("response", {"input": [{"role": "wizard"}]}, r"input\[0\].role must be one of system"),
    ("message", {"messages": []}, "messages must not be empty"),
    ("message", {"messages": [5]}, r"messages\[0\].role must be user, assistant or system"),
    (
        "message",
        {"messages": [{"role": "user", "content": 5}]},
        r"messages\[0\].content must be a string or an array of blocks, not an integer",
    ),
    ("message", {"messages": [{"role": "user", "content": [{}]}]}, r"messages\[0\].content: a block must be an object"),
    ("chat", {"banned_strings": ["x"] * 257}, "banned_strings must be at most 256 strings, not 257"),
    ("message", {"stop_sequences": ["x"] * 17}, "stop_sequences must be at most 16 strings, not 17"),
    ("message", {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens must be 0 or greater"),
]


@pytest.mark.parametrize(("name", "fields", "reason"), REFUSED)
def test_invalid_fields_are_refused(name: str, fields: dict, reason: str):
    question, asks = INTERFACES[name]
    with pytest.raises(UsageError, match=reason):
        question(RequestBody({**asks, **fields}))


def test_fields_accept_their_upper_limits():
    chat = parse_chat_request(RequestBody({**CHATS, "n": 16, "top_logprobs": 20}))
    assert (chat.n, chat.top_logprobs) == (16, 20)
    text = parse_completion_request(RequestBody({"prompt": ["x"] * 64, "n": 16, "logprobs": 20}))
    assert (text.n, len(text.prompts), text.top_logprobs) == (16, 64, 20)
    assert len(message_question(RequestBody({**CHATS, "stop_sequences": ["x"] * 16})).options.stop) == 16
