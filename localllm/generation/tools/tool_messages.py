"""Convert conversations with tool calls to the forms that a model's chat template supports."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localllm.errors import UsageError
from localllm.generation.reasoning import ChannelFormat, Thinking
from localllm.generation.tools.tool_call_format import (
    GENERIC,
    HARMONY,
    IDS,
    KEYS,
    NAME,
    SAID,
    USER,
    ToolCallFormat,
    derive_call_format,
    make_calls_message,
    try_render,
)
from localllm.generation.tools.tool_grammar import Tool, ToolGrammar, ToolUse, build_tool_prompt
from localllm.text.messages import Message
from localllm.text.templates import ChatTemplate
from localllm.text.tokenizer import Tokenizer

ToolCallMessage = dict[str, Any]  # an entry of a message's tool_calls
PROBE = Tool(
    NAME, "W", {"type": "object", "properties": {key: {"type": "string"} for key in KEYS}, "required": [*KEYS]}
)


def derive_template_format(template: ChatTemplate, tokenizer: Tokenizer) -> ToolCallFormat:
    """Derive a template's format of tool calls by rendering probe messages."""
    tools = [PROBE.to_json_schema()]

    def render(messages: Sequence[Message], begins: bool) -> str:
        return template.render(messages, add_generation_prompt=begins, tools=tools)

    return derive_call_format(template.source, render, [tokenizer.pieces[token] for token in tokenizer.end_ids])


def convert_calls(messages: Sequence[Message], format: ToolCallFormat, use: ToolUse | None) -> list[Message]:
    """Convert calls and results to the format of the template, or to text if it has no such format.

    Raises UsageError for invalid calls.
    """
    converted = [convert_arguments(message, format.as_text) for message in show_cut_calls(messages)]
    if format.marks is None and format == GENERIC:
        converted = [write_as_text(message) for message in converted]
    if format.is_known or use is None or not use.callable:
        return converted
    text = build_tool_prompt(use)
    if format != replace(GENERIC, is_known=format.is_known):
        example = format.opening + "NAME" + format.between + "ARGUMENTS" + format.closing
        text = text.rpartition("\n")[0] + f"\nTo call one, answer with {example.lstrip()}"
    if converted and converted[0]["role"] == "system":
        return [{**converted[0], "content": f"{converted[0]['content']}\n\n{text}"}, *converted[1:]]
    return [{"role": "system", "content": text}, *converted]


_TAGS = re.compile(r"<[^<>\s]{2,40}>|\[[^][\s]{2,40}\]")


def find_result_marks(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the tags that a template writes after the result of a call, found by rendering one.

    Special tokens are left out, since their texts are always escaped in messages.
    """
    message: Message = {"role": "tool", "tool_call_id": IDS[0], "name": NAME, "content": SAID}

    def render(messages: Sequence[Message], begins: bool) -> str:
        return template.render(messages, add_generation_prompt=begins, tools=[PROBE.to_json_schema()])

    sample = dict.fromkeys(KEYS, "V")
    for arguments in (sample, json.dumps(sample)):
        if (place := (text := try_render(render, [USER, make_calls_message(1, arguments), message])).find(SAID)) >= 0:
            marks = _TAGS.findall(text[place + len(SAID) : place + 80])
            return tuple(mark for mark in marks if tokenizer.get_special_id(mark) is None)
    return ()


def escape_results(messages: Sequence[Message], marks: Sequence[str]) -> list[Message]:
    """Return the messages with the template's tags escaped in tool results.

    A result can then not pretend to end.
    """

    def escape(text: str) -> str:
        for mark in marks:
            text = text.replace(mark, f"{mark[0]} {mark[1:]}")
        return text

    return [
        {**message, "content": escape(message["content"])} if message["role"] == "tool" else message
        for message in messages
    ]


def show_cut_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with calls of incomplete JSON, and their results, as plain text.

    These results are moved after the results of the message's other calls. Raises UsageError for invalid calls.
    """
    messages_shown, late, cut_names = list[Message](), list[Message](), dict[str, str]()
    for message in messages:
        if message["role"] != "tool":
            messages_shown, late, cut_names = messages_shown + late, [], {}
        if message["role"] == "assistant":
            message, cut_names = drop_cut_calls(message)
        if (id := str(message.get("tool_call_id"))) in cut_names and message["role"] == "tool":
            late.append(write_as_text({"name": cut_names[id], **message}))
        else:
            messages_shown.append(message)
    return messages_shown + late


def drop_cut_calls(message: Message) -> tuple[Message, dict[str, str]]:
    """Move the incomplete calls of an answer into its text; return the answer, and their names by id.

    Raises UsageError for invalid calls.
    """
    whole_calls, cut_calls = list[ToolCallMessage](), list[ToolCallMessage]()
    for call in message.get("tool_calls") or ():
        require_call(call)
        (cut_calls if parse_arguments_object(call) is None else whole_calls).append(call)
    if not cut_calls:
        return message, {}
    pairs = [get_name_and_arguments(call) for call in cut_calls]
    texts = [f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {text}' for name, text in pairs]
    fields = {key: value for key, value in message.items() if key != "tool_calls"}
    fields["content"] = "\n".join(filter(None, [message.get("content"), *texts]))
    names = {str(call.get("id")): call["function"]["name"] for call in cut_calls}
    return {**fields, "tool_calls": whole_calls} if whole_calls else fields, names


def get_name_and_arguments(call: ToolCallMessage) -> tuple[str, str]:
    """Return the name and the arguments, as JSON, of a call in a message."""
    arguments = call["function"]["arguments"]
    return call["function"]["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)


def require_call(call: object) -> None:
    """Raise UsageError for an object that is not a tool call."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(
            'a call must be {"id": ..., "function": {"name": ..., "arguments": ...}}' + f", not {call!r}"[:100]
        )


def parse_arguments_object(call: ToolCallMessage) -> dict[str, object] | None:
    """Return the arguments of a call, {} if it has none; None if they are not a JSON object."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
        return arguments if isinstance(arguments, dict) else None
    return {} if arguments is None else arguments if isinstance(arguments, dict) else None


def convert_arguments(message: Message, as_text: bool) -> Message:
    """Return a message with the arguments of its complete calls as objects or as strings of JSON."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = parse_arguments_object(call)
        function = {**call["function"], "arguments": json.dumps(arguments) if as_text else arguments}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def write_as_text(message: Message) -> Message:
    """Return a message with calls or results as plain text, for templates that do not support them."""
    if message["role"] == "tool":
        # As JSON, in which the result cannot pretend to end.
        result = json.dumps(message["content"], ensure_ascii=False)
        return {"role": "user", "content": f"The function {message.get('name') or ''} returned:\n{result}"}
    if calls := message.get("tool_calls"):
        call_texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        fields = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**fields, "content": "\n".join(filter(None, [message.get("content"), *call_texts]))}
    return message


def prepare_calls(
    use: ToolUse, format: ToolCallFormat, tokenizer: Tokenizer, thinking: Thinking
) -> tuple[ToolGrammar, Thinking]:
    """Return the tool grammar of an answer, and reasoning marks that end where a call begins."""
    if format.opening == HARMONY.opening and isinstance(thinking.format, ChannelFormat):
        thinking = replace(thinking, format=replace(thinking.format, calls=HARMONY.trigger))
        if use.requires_call:  # a call has to follow the reasoning
            thinking = replace(thinking, closing=tuple(tokenizer.encode("<|end|><|start|>assistant", special=True)))
    return ToolGrammar(use, format, tokenizer), thinking
