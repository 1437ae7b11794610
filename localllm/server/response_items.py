"""Parse input items of /v1/responses, as OpenAI's clients and Codex send them, into messages for chat templates.

Besides messages and function calls, there are calls of many other types. They become calls of a tool with the type's
name, so that the model sees what was done.
"""

from collections.abc import Mapping
from json import dumps

from localllm.errors import UsageError
from localllm.server.fields import Body, type_name
from localllm.server.messages import (
    IMAGE_ROLES,
    name_tool_results,
    normalize_arguments,
    parse_content,
    parse_result,
    parse_text,
)
from localllm.server.request_options import flat_name
from localllm.text.messages import ROLES, Message

CALL, OUTPUT = "_call", "_output"  # suffixes of item types
RESULTS = ("output", "outputs", "results", "result", "error")  # fields of a call with its result
ABOUT = ("type", "id", "status", "call_id", "name", "namespace", *RESULTS)  # fields that are not arguments


def parse_input(body: Body) -> list[Message]:
    """Parse the input into messages. Raises UsageError."""
    items = body.get("input")
    if isinstance(items, str):
        return [{"role": "user", "content": items}] if items else []
    if items is not None and not isinstance(items, list):
        raise UsageError(f"input should be a string or an array of items, not {type_name(items)}")
    messages = list[Message]()
    for number, item in enumerate(items or ()):
        if not isinstance(item, dict):
            raise UsageError(f"input[{number}] should be an object, not {type_name(item)}")
        if not add_item(messages, item, f"input[{number}]"):
            body.ignore(f"input[{number}]:{item['type']}")
    return name_tool_results(messages)


def add_item(messages: list[Message], item: dict[str, object], name: str) -> bool:
    """Add one input item to the messages; return False if its type is unknown. Raises UsageError."""
    kind = str(item.get("type") or "message")
    if kind == "message":
        add_message(messages, item, name)
    elif kind == "reasoning":
        if texts := reasoning_texts(item.get("content")) or reasoning_texts(item.get("summary")):
            messages.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(texts)})
    elif kind.endswith(CALL):
        add_call(messages, item, kind)
    elif kind.endswith(OUTPUT):
        id = str(item.get("call_id") or item.get("id"))
        messages.append(
            {"role": "tool", "tool_call_id": id, "content": parse_result(item.get("output"), f"{name}.output")}
        )
    elif kind == "item_reference":
        raise UsageError(f"{name}: item_reference is not supported: items are not stored; send the item")
    else:
        return False
    return True


def add_message(messages: list[Message], item: dict[str, object], name: str) -> None:
    """Add a message; an assistant's text is merged with reasoning before it. Raises UsageError."""
    role = ROLES.get(str(item.get("role")))
    if role is None:
        raise UsageError(f"{name}.role should be one of {', '.join(ROLES)}")
    text = (parse_content if role in IMAGE_ROLES else parse_text)(item.get("content"), f"{name}.content") or ""
    if role == "assistant" and messages and messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
        messages[-1]["content"] = text
    else:
        messages.append({"role": role, "content": text})


def add_call(messages: list[Message], item: dict[str, object], kind: str) -> None:
    """Add a call of any type, and its result if a server ran it, so that it has no call_id."""
    if kind == "function_call":
        arguments = normalize_arguments(item.get("arguments"))
    elif isinstance(given_arguments := item.get("arguments"), str | dict):
        arguments = normalize_arguments(given_arguments)
    else:
        arguments = dumps({key: value for key, value in item.items() if key not in ABOUT}, ensure_ascii=False)
    namespace = item.get("namespace")
    called = flat_name(namespace if isinstance(namespace, str) else None, str(item.get("name") or kind[: -len(CALL)]))
    id = str(item.get("call_id") or item.get("id") or kind)
    call = {"id": id, "type": "function", "function": {"name": called, "arguments": arguments}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)
    if kind != "function_call" and item.get("call_id") is None:
        results = [parse_result(item[field], field) for field in RESULTS if item.get(field)]
        content = "\n".join(text for text in results if isinstance(text, str)) or str(item.get("status") or "completed")
        messages.append({"role": "tool", "tool_call_id": id, "content": content})


def reasoning_texts(value: object) -> list[str]:
    """Return the texts of reasoning: a string, or a list of strings and parts with a text."""
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in texts if isinstance(text, str) and text]
