"""Check conversations from programs and files before a template renders them."""

import hashlib
from collections.abc import Mapping, Sequence

from localllm.errors import UsageError
from localllm.text.marker_escaping import Message

# What other programs call a role, and what templates call it.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def validate_messages(messages: Sequence[Message]) -> list[Message]:
    """Validate messages, and convert each content to a string. Raises UsageError.

    A content may be a list of parts as in OpenAI's interface, [{"type": "text", "text": ...}]; their texts are joined
    by newlines, as in llama.cpp. A missing content becomes "", an assistant's None, because templates may treat None
    and "" differently. Roles and calls of OpenAI's older interfaces are converted to the current ones.
    """
    if isinstance(messages, str | bytes | Mapping):
        raise UsageError(f"messages should be a list of messages, not {type(messages).__name__}")
    return [_check(message) for message in messages]


def _check(message: object) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UsageError('a message should be {"role": ..., "content": ...}' + f", not {message!r}")
    modern: Message = modernize(message)
    role, content = modern["role"], modern.get("content")
    if content is None:
        return {**modern, "content": None if role == "assistant" else ""}
    if isinstance(content, str):
        return modern
    if isinstance(content, list):
        return {**modern, "content": "\n".join(map(_text_of_part, content))}
    raise UsageError(f"the content of a message should be a text, not {type(content).__name__}")


def modernize(message: Message) -> Message:
    """Convert roles and fields of OpenAI's older interfaces to the current ones.

    `function_call` becomes the only entry of tool_calls, and `refusal` the content if there is none. A function's
    result
    names its call: both get an id that is derived from the function's name.
    """
    role = message.get("role")
    fields = {key: value for key, value in message.items() if key not in ("function_call", "refusal")}
    fields["role"] = ROLES.get(role, role) if isinstance(role, str) else role
    call, refusal = message.get("function_call"), message.get("refusal")
    if isinstance(call, dict) and not message.get("tool_calls"):
        fields["tool_calls"] = [{"id": short_id(str(call.get("name"))), "type": "function", "function": call}]
    if isinstance(refusal, str) and not message.get("content"):
        fields["content"] = refusal
    if role == "function":
        fields["tool_call_id"] = short_id(str(message.get("name")))
    return fields


def short_id(text: str) -> str:
    """Derive a call id of nine letters and digits, which some templates demand, from a text."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]


def _text_of_part(part: object) -> str:
    """Return the text of one part of a content. Raises UsageError."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise UsageError('a part of a content should be {"type": "text", "text": ...}' + f", not {part!r}"[:100])
    if part["type"] not in ("text", "refusal"):
        raise UsageError(f"a part of a content is of type {part['type'][:40]!r}: only text is supported")
    text = part.get(part["type"])
    if not isinstance(text, str):
        raise UsageError(f"a part of type {part['type']!r} should have a text, not {text!r}"[:100])
    return text
