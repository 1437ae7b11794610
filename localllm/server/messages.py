"""Conversations as clients send them, and as chat templates know them."""

from collections.abc import Sequence
from json import dumps
from typing import Any

from localllm.errors import UsageError
from localllm.server.fields import kind
from localllm.server.images import TYPES, image_part
from localllm.text.marker_escaping import Message
from localllm.text.messages import ROLES, modernize

TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts that are text
SHOWING = ("user", "tool", "assistant")  # roles that show images


def conversation(messages: Sequence[Any]) -> list[Message]:
    """OpenAI's messages. Raises UsageError."""
    if not messages:
        raise UsageError("messages should not be empty")
    return named_results([_message(message, number) for number, message in enumerate(messages)])


def _message(message: Any, number: int) -> Message:
    """One of them: its role, its texts, what it thought, its calls of tools."""
    if not isinstance(message, dict):
        raise UsageError(f"messages[{number}] should be an object, not {kind(message)}")
    if str(message.get("role")) not in ROLES:
        raise UsageError(f"messages[{number}].role should be one of {', '.join(ROLES)}")
    message = modernize(message)
    role, content, name = message["role"], message.get("content"), f"messages[{number}].content"
    found: Message = {"role": role, "content": (shown_of if role in SHOWING else content_of)(content, name)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            found["tool_calls"] = calls_of(calls, f"messages[{number}].tool_calls")
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str):
            found["reasoning_content"] = thought
    elif found["content"] is None:
        found["content"] = ""
    if role == "tool":
        found |= {key: str(message[key]) for key in ("tool_call_id", "name") if message.get(key)}
    return found


def calls_of(calls: Any, name: str) -> list[dict[str, Any]]:
    """Calls that an answer has made. Raises UsageError."""
    if not isinstance(calls, list):
        raise UsageError(f"{name} should be a list, not {kind(calls)}")
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f"{name}: a call should have a function with a name")
        told = {"name": function["name"], "arguments": said_arguments(function.get("arguments"))}
        found.append({"id": str(call.get("id") or ""), "type": "function", "function": told})
    return found


def said_arguments(arguments: Any) -> str | dict[str, Any]:
    """Return the arguments of a call as an object or the text that they are; no arguments are an empty object.

    What is neither, or was cut, is shown to the model as it is.
    """
    if arguments is None or arguments == "":
        return "{}"
    return arguments if isinstance(arguments, str | dict) else dumps(arguments)


def named_results(messages: list[Message]) -> list[Message]:
    """With the name of the function that each result of a call is of, which some templates want."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def content_of(content: Any, name: str) -> str | None:
    """The text of a content, which may be in parts. Raises UsageError for anything but text."""
    parts = parts_of(content, name)
    if not isinstance(parts, list):
        return parts
    if other := next((part["type"] for part in parts if part["type"] != "text"), None):
        raise UsageError(f"{name}: a part is of type {other!r}: a system message has no images")
    return "\n".join(part["text"] for part in parts)


def shown_of(content: Any, name: str) -> Any:
    """The same with images: a text, or if there are some among it, parts as of localllm.images.parts."""
    parts = parts_of(content, name)
    if isinstance(parts, list) and all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def parts_of(content: Any, name: str) -> str | list[dict[str, Any]] | None:
    """A content's parts, {"type": "text", "text": ...} and images; a text is as it is. Raises UsageError."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"{name} should be a text or a list of parts, not {kind(content)}")
    return [_part(part, name) for part in content]


def _part(part: Any, name: str) -> dict[str, Any]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise UsageError(f"{name}: a part should be an object with a type")
    if part["type"] in TYPES:
        return image_part(part, name)
    if part["type"] not in TEXTS:
        raise UsageError(f"{name}: a part is of type {part['type'][:40]!r}: only text and images can be read")
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    if not isinstance(text, str):
        raise UsageError(f"{name}: a part of type {part['type']} should have a text")
    return {"type": "text", "text": text}
