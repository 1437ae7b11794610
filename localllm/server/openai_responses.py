"""OpenAI's interface /v1/responses, stateless: a request has the whole conversation.

Source: https://platform.openai.com/docs/api-reference/responses
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from time import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.generation.generate import GenerationOptions
from localllm.generation.reasoning import THOUGHT
from localllm.generation.tools.tool_call_parser import CALL
from localllm.server.content_blocks import CLOSE, OPEN, Block, Blocks, Change, collect_blocks
from localllm.server.fields import Body, type_name
from localllm.server.http import EventStream, format_event, json_response, openai_error, read_json, respond_when_done
from localllm.server.ids import new_id
from localllm.server.messages import (
    IMAGE_ROLES,
    ROLES,
    name_tool_results,
    normalize_arguments,
    parse_content,
    parse_text,
)
from localllm.server.openai_chat import extension_headers
from localllm.server.request_options import (
    EFFORTS,
    parse_call_options,
    parse_function,
    parse_json_options,
    parse_sampling,
    parse_schema,
    parse_tool_choice,
)
from localllm.server.service import GenerateRequest, ResponseStream, Service, Usage
from localllm.text.marker_escaping import Message

if TYPE_CHECKING:
    from localllm.generation.tools.tool_grammar import ToolUse

IGNORED_FIELDS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "include",
               "truncation", "prompt_cache_retention", "client_metadata", "stream_options", "background")  # fmt: skip
Event = dict[str, Any]


async def create_response(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    body = Body(await read_json(request, service.limits))
    is_streaming, generate_request = body.get_bool("stream"), parse_request(body)
    headers = extension_headers(body)
    if generate_request is None:  # a client checks the connection
        return empty_response(service, body, is_streaming, headers)
    stream = await service.start(generate_request)
    headers = extension_headers(body, stream)
    if is_streaming:
        return EventStream(stream_events(stream), service.limits, headers, stream.close)
    return await respond_when_done(request, complete_response(stream), headers, stream.close)


def parse_request(body: Body) -> GenerateRequest | None:
    """Parse the request; None if its input is empty. Raises UsageError."""
    for name in IGNORED_FIELDS:
        body.get(name)
    for name in ("previous_response_id", "conversation"):
        body.reject(name, "conversations are not stored; send all messages as input")
    text, reasoning = body.get_object("text"), body.get_object("reasoning")
    schema = parse_schema(text.get_object("format")) if text else None
    effort = reasoning.get_choice("effort", tuple(EFFORTS)) if reasoning else None
    from localllm.generation.constraints.constraint import constraint_of

    constraint = constraint_of(schema, **parse_json_options(body))
    options = GenerationOptions(
        body.get_int("max_output_tokens", 1), (), parse_sampling(body), constraint=constraint, tools=parse_tools(body),
        think=EFFORTS[effort] if effort else "auto",
    )  # fmt: skip
    messages = parse_input(body.get("input"))
    if not messages:
        return None
    if instructions := body.get_text("instructions"):
        messages = [{"role": "system", "content": instructions}, *messages]
    body.reject("top_logprobs", "use /v1/chat/completions")
    return GenerateRequest(body.get_text("model"), [messages], options)


def parse_tools(body: Body) -> "ToolUse | None":
    """Parse the functions; built-in tools, which OpenAI's servers would run, are ignored.

    Raises UsageError.
    """
    from localllm.generation.tools.tool_grammar import ToolUse

    tool_list, choice = body.get_list("tools") or (), body.get("tool_choice")
    parallel, options = body.get("parallel_tool_calls") is not False, parse_call_options(body)
    bodies = [Body.of(tool, "tools") for tool in tool_list]
    tools = [parse_function(tool) for tool in bodies if tool.get("type") == "function"]
    if not tools:
        return None
    if isinstance(choice, dict) and choice.get("type") != "function":
        choice = None
    return ToolUse(tools, parse_tool_choice(choice), parallel, **options)


def parse_input(items: Any) -> list[Message]:
    """Parse the input items into messages. Raises UsageError."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}] if items else []
    if items is not None and not isinstance(items, list):
        raise UsageError(f"input should be a string or an array of items, not {type_name(items)}")
    messages = list[Message]()
    for number, format_item in enumerate(items or ()):
        if not isinstance(format_item, dict):
            raise UsageError(f"input[{number}] should be an object, not {type_name(format_item)}")
        add_item(messages, format_item, f"input[{number}]")
    return name_tool_results(messages)


def add_item(messages: list[Message], item: dict[str, Any], name: str) -> None:
    """Add one input item; calls and reasoning join the assistant message next to them."""
    item_type = item.get("type") or "message"
    if item_type == "message":
        role = ROLES.get(str(item.get("role")))
        if role is None:
            raise UsageError(f"{name}.role should be one of {', '.join(ROLES)}")
        text = (parse_content if role in IMAGE_ROLES else parse_text)(item.get("content"), f"{name}.content") or ""
        if role == "assistant" and messages and messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
            messages[-1]["content"] = text
        else:
            messages.append({"role": role, "content": text})
    elif item_type == "function_call":
        function = {
            "name": str(item.get("name")),
            "arguments": normalize_arguments(item.get("arguments")),
        }
        call = {"id": str(item.get("call_id")), "type": "function", "function": function}
        assistant_message(messages).setdefault("tool_calls", []).append(call)
    elif item_type == "function_call_output":
        text = parse_content(item.get("output"), f"{name}.output") or ""
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text})
    elif item_type == "reasoning":
        texts = [part.get("text", "") for part in (item.get("content") or item.get("summary") or ())]
        if texts:
            messages.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(map(str, texts))})
    else:
        raise UsageError(f"{name}: item type {str(item_type)[:40]!r} is not supported")


def assistant_message(messages: list[Message]) -> Message:
    """Return the last assistant message, or append an empty one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def empty_response(service: Service, body: Body, is_streaming: bool, headers: dict[str, str]) -> Response:
    """Respond to a request with empty input, by which clients check the connection."""
    name = service.pool.resolve(body.get_text("model")).name
    result = format_response(name, new_id("resp_"), "completed", [], format_usage(Usage()))
    if not is_streaming:
        return json_response(result, headers=headers)

    async def events() -> AsyncGenerator[bytes]:
        for number, event_type in enumerate(("response.created", "response.completed")):
            yield format_event({"type": event_type, "sequence_number": number, "response": result}, event_type)

    return EventStream(events(), service.limits, headers)


async def complete_response(stream: ResponseStream) -> dict[str, Any]:
    """Collect the complete response."""
    blocks, reason = await collect_blocks(stream)
    names = [new_id("item_") for _ in blocks.all]
    return final_response(stream, new_id("resp_"), blocks, names, reason)


def final_response(
    stream: ResponseStream, id: str, blocks: Blocks, names: Sequence[str], reason: str
) -> dict[str, Any]:
    """Format a response that has ended."""
    status = "incomplete" if reason == "length" else "completed"
    statuses = ["completed" if block is not blocks.all[-1] else status for block in blocks.all]
    items = [format_item(*block) for block in zip(blocks.all, names, statuses, strict=True)]
    return format_response(stream.name, id, status, items, format_usage(stream.usage))


def format_response(model: str, id: str, status: str, output: list[Any], usage: Any) -> dict[str, Any]:
    incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": id, "object": "response", "created_at": int(time()), "status": status, "model": model,
        "output": output, "usage": usage, "error": None, "incomplete_details": incomplete_details, "instructions": None,
        "metadata": {}, "parallel_tool_calls": True, "temperature": None, "top_p": None, "tool_choice": "auto",
        "tools": [], "store": False,
    }  # fmt: skip


async def stream_events(stream: ResponseStream) -> AsyncGenerator[bytes]:
    """Yield the response as server-sent events."""
    blocks, reason, id, names, number = Blocks(), "", new_id("resp_"), list[str](), 0

    def numbered(events: Iterator[Event]) -> Iterator[bytes]:
        nonlocal number
        for item_event in events:
            yield format_event({**item_event, "sequence_number": number}, item_event["type"])
            number += 1

    started = format_response(stream.name, id, "in_progress", [], None)
    try:
        for event_type in ("response.created", "response.in_progress"):
            for line in numbered(iter([{"type": event_type, "response": started}])):
                yield line
        async for _, token_event in stream.events():
            changes = [change for part in token_event.parts for change in blocks.take(part)]
            reason = token_event.finish_reason or reason
            for line in numbered(item_event for change in changes for item_event in format_events(change, names)):
                yield line
        for line in numbered(item_event for change in blocks.end() for item_event in format_events(change, names)):
            yield line
        result = final_response(stream, id, blocks, names, reason)
        for line in numbered(iter([{"type": f"response.{result['status']}", "response": result}])):
            yield line
    except Exception as error:
        error_fields = openai_error(error)["error"]
        failed = {
            **started,
            "status": "failed",
            "error": {**error_fields, "code": error_fields["code"] or "server_error"},
        }
        for line in numbered(iter([{"type": "response.failed", "response": failed}])):
            yield line
    finally:
        await stream.close()


def format_events(change: Change, names: list[str]) -> Iterator[Event]:
    """Yield the events of a change of a block; names: ids of the items, extended by new ones."""
    action, block, text = change
    if action == OPEN:
        names.append(new_id("item_"))
        yield {
            "type": "response.output_item.added",
            "output_index": block.index,
            "item": format_item(block, names[-1], "in_progress", has_content=False),
        }
    item_fields = {"item_id": names[block.index], "output_index": block.index}
    part_fields = item_fields if block.kind == CALL else {**item_fields, "content_index": 0}
    kinds = {THOUGHT: "response.reasoning_text", CALL: "response.function_call_arguments"}
    prefix = kinds.get(block.kind, "response.output_text")
    extra: Event = {"logprobs": []} if prefix == "response.output_text" else {}
    if action == OPEN:
        if block.kind != CALL:
            yield {"type": "response.content_part.added", **part_fields, "part": format_part(block, "")}
        return
    if action != CLOSE:
        yield {"type": f"{prefix}.delta", **part_fields, "delta": text, **extra}
        return
    final = {"arguments": block.text, "name": block.name} if block.kind == CALL else {"text": block.text}
    yield {"type": f"{prefix}.done", **part_fields, **final, **extra}
    if block.kind != CALL:
        yield {"type": "response.content_part.done", **part_fields, "part": format_part(block, block.text)}
    yield {
        "type": "response.output_item.done",
        "output_index": block.index,
        "item": format_item(block, names[block.index], "incomplete" if block.is_truncated else "completed"),
    }


def format_part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == THOUGHT:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def format_item(block: Block, id: str, status: str, has_content: bool = True) -> dict[str, Any]:
    """Format a block as an output item; not begun: without content."""
    if block.kind == CALL:
        arguments = block.text if has_content else ""
        return {
            "type": "function_call", "id": id, "call_id": f"call_{block.id}", "name": block.name,
            "arguments": arguments, "status": status,
        }  # fmt: skip
    content = [format_part(block, block.text)] if has_content else []
    if block.kind == THOUGHT:
        return {"type": "reasoning", "id": id, "summary": [], "content": content, "status": status}
    return {"type": "message", "id": id, "role": "assistant", "content": content, "status": status}


def format_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.written,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.written,
    }
