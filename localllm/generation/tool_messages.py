"""Conversations with calls of tools, as a model's chat template takes them."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localllm.errors import UsageError
from localllm.generation.call_format import (
    GENERIC,
    HARMONY,
    IDS,
    KEYS,
    NAME,
    SAID,
    USER,
    CallFormat,
    attempt,
    call_format,
    calling,
)
from localllm.generation.calls import Calls, Tool, ToolUse, told_generically
from localllm.generation.thinking import Channels, Thinking
from localllm.text.plain import Message
from localllm.text.templates import ChatTemplate
from localllm.text.tokenizer import Tokenizer

PROBE = Tool(
    NAME, "W", {"type": "object", "properties": {key: {"type": "string"} for key in KEYS}, "required": [*KEYS]}
)


def format_of_template(template: ChatTemplate, tokenizer: Tokenizer) -> CallFormat:
    """Read off what it renders."""
    tools = [PROBE.told()]

    def render(messages: Sequence[Message], begins: bool) -> str:
        return template.render(messages, add_generation_prompt=begins, tools=tools)

    return call_format(template.source, render, [tokenizer.pieces[token] for token in tokenizer.end_ids])


def in_format(messages: Sequence[Message], format: CallFormat, use: ToolUse | None) -> list[Message]:
    """Calls and their results as the template wants them; what it does not know of, as texts. Raises UsageError."""
    told = [with_arguments(message, format.as_text) for message in messages]
    if format.marks is None and format == GENERIC:
        told = [as_text(message) for message in told]
    if format.is_known or use is None or not use.callable:
        return told
    text = told_generically(use)
    if format != replace(GENERIC, is_known=format.is_known):
        example = format.opening + "NAME" + format.between + "ARGUMENTS" + format.closing
        text = text.rpartition("\n")[0] + f"\nTo call one, answer with {example.lstrip()}"
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


_TAGS = re.compile(r"<[^<>\s]{2,40}>|\[[^][\s]{2,40}\]")


def marks_of_results(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[str, ...]:
    """The tags that a template writes behind what a call came to, read off what it renders; those that are tokens can
    be in no message anyway.
    """
    message: Message = {"role": "tool", "tool_call_id": IDS[0], "name": NAME, "content": SAID}

    def render(messages: Sequence[Message], begins: bool) -> str:
        return template.render(messages, add_generation_prompt=begins, tools=[PROBE.told()])

    given = dict.fromkeys(KEYS, "V")
    for arguments in (given, json.dumps(given)):
        if (place := (text := attempt(render, [USER, calling(1, arguments), message])).find(SAID)) >= 0:
            marks = _TAGS.findall(text[place + len(SAID) : place + 80])
            return tuple(mark for mark in marks if tokenizer.special_id(mark) is None)
    return ()


def as_data(messages: Sequence[Message], marks: Sequence[str]) -> list[Message]:
    """With results of calls in which no tag of the template stands, so that none can end before its end."""

    def broken(text: str) -> str:
        for mark in marks:
            text = text.replace(mark, f"{mark[0]} {mark[1:]}")
        return text

    return [
        {**message, "content": broken(message["content"])} if message["role"] == "tool" else message
        for message in messages
    ]


def with_arguments(message: Message, as_text: bool) -> Message:
    """With the arguments of its calls as objects, or as JSON's text. Raises UsageError for what is no object."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments: Any = function["arguments"]
        try:
            given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise UsageError(f"messages: the arguments of a call of {function['name'][:60]} are no JSON object")
        calls.append({**call, "function": {**function, "arguments": json.dumps(given) if as_text else given}})
    return {**message, "tool_calls": calls}


def as_text(message: Message) -> Message:
    """A call, or a result, in words."""
    if message["role"] == "tool":
        came = json.dumps(message["content"], ensure_ascii=False)  # whose end it cannot feign
        return {"role": "user", "content": f"The function {message.get('name') or ''} returned:\n{came}"}
    if calls := message.get("tool_calls"):
        written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**others, "content": "\n".join(filter(None, [message.get("content"), *written]))}
    return message


def with_calls(use: ToolUse, format: CallFormat, tokenizer: Tokenizer, thinking: Thinking) -> tuple[Calls, Thinking]:
    """The calls of an answer, and thoughts that let heads of calls be."""
    if format.opening == HARMONY.opening and isinstance(thinking.format, Channels):
        thinking = replace(thinking, format=replace(thinking.format, calls=HARMONY.trigger))
        if use.must:  # nothing else may follow a thought
            thinking = replace(thinking, closing=tuple(tokenizer.encode("<|end|><|start|>assistant", special=True)))
    return Calls(use, format, tokenizer), thinking
