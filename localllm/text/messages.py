"""Conversations that programs and files bring, checked before a template reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.errors import UsageError
from localllm.text.plain import Message


def checked(messages: Sequence[Message]) -> list[Message]:
    """The same messages, each content a text. Raises UsageError for what is no conversation.

    A content may be a list of parts as in OpenAI's interface, [{"type": "text", "text": ...}]; their texts become one,
    a line each, as in llama.cpp. Only an answer, which may be nothing but calls of tools, may have no content.
    """
    if isinstance(messages, str | bytes | Mapping):
        raise UsageError(f"messages should be a list of them, not {type(messages).__name__}")
    return [_checked(message) for message in messages]


def _checked(message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        raise UsageError('a message should be {"role": ..., "content": ...}' + f", not {message!r}")
    content = message["content"]
    if isinstance(content, str) or (content is None and message["role"] == "assistant"):
        return message
    if isinstance(content, list):
        return {**message, "content": "\n".join(map(_part, content))}
    raise UsageError(f"the content of a message should be a text, not {type(content).__name__}")


def _part(part: Any) -> str:
    """The text of one part of a content."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise UsageError('a part of a content should be {"type": "text", "text": ...}' + f", not {part!r}"[:100])
    if part["type"] != "text":
        raise UsageError(f"a part of a content is of type {part['type'][:40]!r}: only text can be read")
    if not isinstance(part.get("text"), str):
        raise UsageError(f"a part of type 'text' should have a text, not {part.get('text')!r}"[:100])
    return part["text"]
