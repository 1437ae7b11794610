"""Parse messages of Anthropic's interface, which are blocks of many types, into messages for chat templates."""

from collections.abc import Mapping, Sequence
from json import dumps

from localllm.errors import UsageError
from localllm.server.fields import Body, type_name
from localllm.server.images import TYPES as IMAGES
from localllm.server.messages import (
    TEXTS,
    name_tool_results,
    normalize_arguments,
    parse_content,
    parse_result,
    parse_text,
)
from localllm.server.text_files import decode_text
from localllm.text.messages import Message

THOUGHTS = ("thinking", "redacted_thinking")
CALL, RESULT = "tool_use", "tool_result"  # suffixes of types: server_tool_use is a call, too
ROLES = ("user", "assistant", "system")


def parse_messages(messages: Sequence[object]) -> list[Message]:
    """Parse the messages. Raises UsageError."""
    if not messages:
        raise UsageError("messages should not be empty; send at least one message")
    parsed = list[Message]()
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UsageError(f"{name}.role should be user, assistant or system")
        content = "" if message.get("content") is None else message["content"]
        if not isinstance(content, str | list):
            raise UsageError(f"{name}.content should be a string or an array of blocks, not {type_name(content)}")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in blocks):
            raise UsageError(f"{name}.content: a block should be an object with a type")
        name += ".content"
        parsed += (
            parse_assistant_blocks(blocks, name)
            if message["role"] == "assistant"
            else parse_user_blocks(blocks, name, message["role"])
        )
    return name_tool_results(parsed)


def parse_user_blocks(blocks: Sequence[Message], name: str, role: str) -> list[Message]:
    """Parse a user's blocks: each tool result becomes a message, before that of the other blocks."""
    results = [block for block in blocks if block["type"].endswith(RESULT)]
    parsed = [parse_tool_result(block, name) for block in results]
    if (other_blocks := [block for block in blocks if not block["type"].endswith(RESULT)]) or not results:
        parse = parse_content if role == "user" else parse_text
        parsed.append({"role": role, "content": parse(readable(other_blocks, name), name)})
    return parsed


def parse_assistant_blocks(blocks: Sequence[Message], name: str) -> list[Message]:
    """Parse an assistant's blocks into messages with text, reasoning and tool calls.

    Each result of a tool that Anthropic's servers have run ends the assistant's message and becomes a tool's message.
    """
    parsed, part = list[Message](), list[Message]()
    for block in blocks:
        if block["type"].endswith(RESULT):
            parsed += [assistant_message(part, name)] if part else []
            parsed.append(parse_tool_result(block, name))
            part = []
        else:
            part.append(block)
    return [*parsed, assistant_message(part, name)] if part or not parsed else parsed


def assistant_message(blocks: Sequence[Message], name: str) -> Message:
    """Parse blocks without results into one message."""
    texts = [block for block in blocks if block["type"] not in THOUGHTS and not block["type"].endswith(CALL)]
    message: Message = {"role": "assistant", "content": parse_content(readable(texts, name), name) or ""}
    if reasoning := [str(block.get("thinking") or "") for block in blocks if block["type"] == "thinking"]:
        message["reasoning_content"] = "\n".join(reasoning)
    calls = []
    for block in blocks:
        if block["type"].endswith(CALL):
            if not isinstance(block.get("name"), str):
                raise UsageError(f"{name}: a {block['type']} block should have a name and an input")
            function = {"name": block["name"], "arguments": normalize_arguments(block.get("input"))}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


def parse_tool_result(block: Mapping[str, object], name: str) -> Message:
    """Parse the result of a tool: a string, blocks, or one object, as tools of Anthropic's servers return."""
    content = block.get("content")
    parts = [content] if isinstance(content, dict) else content
    result = parse_result(readable(parts, name, is_result=True) if isinstance(parts, list) else parts, name)
    if block.get("is_error"):
        result = [text_part("Error:"), *result] if isinstance(result, list) else f"Error: {result}"
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": result}


def readable(blocks: Sequence[object], name: str, is_result: bool = False) -> list[object]:
    """Convert blocks to parts of type text and image; is_result: blocks of unknown types become JSON texts.

    Other blocks are left for parse_parts to check. Raises UsageError for a document that cannot become text.
    """
    parts = list[object]()
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(block, Mapping) or kind in TEXTS or kind in IMAGES or not isinstance(kind, str):
            parts.append(block)
        elif kind == "document":
            parts += parse_document(Body(block, f"{name}: document"))
        elif kind == "search_result":
            head = [str(block[field]) for field in ("title", "source") if block.get(field)]
            parts += [text_part("\n".join(head)), *readable(block.get("content") or (), name, is_result)]
        elif kind == "tool_reference":
            parts.append(text_part(str(block.get("tool_name"))))
        elif kind == "compaction":
            parts.append(text_part(str(block.get("content") or "")))
        elif is_result:
            fields = {key: value for key, value in block.items() if key != "type" and not key.startswith("encrypted_")}
            parts.append(text_part(dumps(fields, ensure_ascii=False)))
        else:
            parts.append(block)
    return parts


def parse_document(document: Body) -> list[object]:
    """Return a document as parts: its title, its context and its text. Raises UsageError."""
    source = document.get_object("source") or Body({}, document.qualify("source"))
    kind, media = source.get_text("type"), source.get_text("media_type") or "text/plain"
    if kind == "content":
        content = source.get("content")
        parts: list[object] = (
            [text_part(content)] if isinstance(content, str) else [*(source.get_list("content") or ())]
        )
    elif kind == "text":
        parts = [text_part(source.require_text("data"))]
    elif kind == "base64":
        parts = [text_part(decode_text(source.require_text("data"), media, document.qualify("source")))]
    else:
        raise UsageError(f"{source.qualify('type')}: {kind} is not supported; send its text")
    head = [text for field in ("title", "context") if (text := document.get_text(field))]
    return [*map(text_part, head), *parts]


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
