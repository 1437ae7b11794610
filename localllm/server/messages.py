"""Convert messages of OpenAI's API into messages for chat templates."""

from collections.abc import Mapping, Sequence
from json import dumps

from localllm.errors import UsageError
from localllm.server.attachments import FILE_TYPES, IMAGE_TYPES, convert_file_part, convert_image_part
from localllm.server.fields import describe_type
from localllm.text.messages import ROLES, Message, convert_legacy_fields

REASONING_TYPES = ("thinking", "reasoning", "redacted_thinking")  # types of parts that are reasoning
TEXT_TYPES = ("text", "input_text", "output_text", "refusal")  # types of parts that are text
IMAGE_ROLES = ("user", "tool", "assistant")  # roles whose messages may have images
Content = str | list[dict[str, str]] | None  # a message's content: a string, or parts of type text and image_url


def parse_messages(messages: Sequence[object]) -> list[Message]:
    if not messages:
        raise UsageError("messages must not be empty; send at least one message")
    return name_tool_results([_parse_message(message, number) for number, message in enumerate(messages)])


def _parse_message(message: object, number: int) -> Message:
    if not isinstance(message, dict):
        raise UsageError(f"messages[{number}] must be an object, not {describe_type(message)}")
    if str(message.get("role")) not in ROLES:
        raise UsageError(f"messages[{number}].role must be one of {', '.join(ROLES)}")
    message = convert_legacy_fields(message)
    role, content, name = message["role"], message.get("content"), f"messages[{number}].content"
    thoughts = find_reasoning_parts(content) if role == "assistant" else []
    if isinstance(content, list) and thoughts:
        content = [part for part in content if part not in thoughts]
    parse = parse_result if role == "tool" else parse_content if role in IMAGE_ROLES else parse_text
    parsed: Message = {"role": role, "content": parse(content, name)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            parsed["tool_calls"] = parse_tool_calls(calls, f"messages[{number}].tool_calls")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or join_reasoning(thoughts)
        if isinstance(reasoning, str):
            parsed["reasoning_content"] = reasoning
    elif parsed["content"] is None:
        parsed["content"] = ""
    if role == "tool":
        parsed |= {key: str(message[key]) for key in ("tool_call_id", "name") if message.get(key)}
    return parsed


def find_reasoning_parts(content: object) -> list[dict[str, object]]:
    """Return the parts of a content that are reasoning, as clients of other servers send them."""
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, dict) and part.get("type") in REASONING_TYPES]


def join_reasoning(thoughts: Sequence[Mapping[str, object]]) -> str | None:
    texts = [part.get("thinking") or part.get("text") or part.get("reasoning") for part in thoughts]
    return "\n".join(text for text in texts if isinstance(text, str)) or None


def parse_tool_calls(calls: object, name: str) -> list[dict[str, object]]:
    if not isinstance(calls, list):
        raise UsageError(f"{name} must be an array, not {describe_type(calls)}")
    parsed = list[dict[str, object]]()
    for call in calls:
        function = extract_function(call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f"{name}: a tool call must have a function with a string as its name, and arguments")
        parsed_function = {"name": function["name"], "arguments": normalize_arguments(function.get("arguments"))}
        parsed.append({"id": str(call.get("id") or ""), "type": "function", "function": parsed_function})
    return parsed


def extract_function(call: Mapping[str, object]) -> object:
    """Return a call's function; a custom tool's string becomes the argument `input`."""
    custom = call.get("custom")
    if isinstance(custom, dict):
        return {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    return call.get("function")


def normalize_arguments(arguments: object) -> str | dict[str, object]:
    """Return a call's arguments, an object or its JSON text; "{}" if there are none.

    Other values become JSON. The text is not checked, so that the model sees truncated JSON unchanged.
    """
    if arguments is None or arguments == "":
        return "{}"
    return arguments if isinstance(arguments, str | dict) else dumps(arguments)


def name_tool_results(messages: list[Message]) -> list[Message]:
    """Add the function's name to each tool result, which some templates need."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def parse_text(content: object, name: str) -> str | None:
    """Return a content as a string, its parts joined. Raises UsageError for an image."""
    parts = parse_parts(content, name)
    if not isinstance(parts, list):
        return parts
    if unsupported := next((part["type"] for part in parts if part["type"] != "text"), None):
        raise UsageError(f"{name}: unsupported part type {unsupported!r}; a system message can only contain text")
    return "\n".join(part["text"] for part in parts)


def parse_content(content: object, name: str) -> Content:
    """Return a content as a string, or as parts if it has images (see localllm.images.parts)."""
    parts = parse_parts(content, name)
    if isinstance(parts, list) and all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def parse_result(content: object, name: str) -> Content:
    """Parse a tool result: a string, parts, or another JSON value, which becomes JSON text."""
    kinds = *TEXT_TYPES, *IMAGE_TYPES, *FILE_TYPES
    is_parts = isinstance(content, list) and all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") in kinds) for part in content
    )
    if content is None or isinstance(content, str) or is_parts:
        return parse_content(content, name) or ""
    return dumps(content, ensure_ascii=False)


def parse_parts(content: object, name: str) -> Content:
    """Parse a content into text and image parts; keep a string as it is. Raises UsageError."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"{name} must be a string or an array of parts, not {describe_type(content)}")
    return [_parse_part(part, name) for part in content]


def _parse_part(part: object, name: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and part.get("type") is None and "text" in part:
        part = {**part, "type": "text"}
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise UsageError(f"{name}: a part must be an object with a string as its type")
    kind = part["type"]
    if kind in IMAGE_TYPES:
        return convert_image_part(part, name)
    if kind in FILE_TYPES:
        return convert_file_part(part, name)
    if kind not in TEXT_TYPES:
        raise UsageError(f"{name}: unsupported part type {kind[:40]!r}; only text and images are supported")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str | None):
        raise UsageError(f"{name}: a part of type {kind} must have a string as its text")
    return {"type": "text", "text": text or ""}
