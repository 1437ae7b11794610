"""OpenAI's interface /v1/responses, stateless: a request has the whole conversation.

Source: https://platform.openai.com/docs/api-reference/responses
"""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from time import time

from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.generate import GenerationOptions
from localllm.generation.reasoning import REASONING
from localllm.generation.tools.tool_call_parser import CALL
from localllm.server.content_blocks import CLOSE, OPEN, Block, Blocks, Change, collect_blocks
from localllm.server.fields import Body
from localllm.server.http import (
    EventStream,
    error_fields,
    format_event,
    json_response,
    new_id,
    read_json,
    respond_when_done,
)
from localllm.server.openai_chat import extension_headers
from localllm.server.request_options import (
    EFFORTS,
    parse_banned,
    parse_json_options,
    parse_keep_alive,
    parse_sampling,
    parse_schema,
)
from localllm.server.response_items import parse_input
from localllm.server.response_tools import Origin, format_call, input_text, parse_tools, tool_origins
from localllm.server.service import GenerateRequest, ResponseStream, Service, Usage

IGNORED_FIELDS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "include",
               "truncation", "prompt_cache_retention", "client_metadata", "stream_options", "background")  # fmt: skip
Event = dict[str, object]
Origins = Mapping[str, Origin]  # the client's tools, by the names that the model calls


async def create_response(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    body = Body(await read_json(request, service.limits))
    is_streaming, generate_request, origins = body.get_bool("stream"), parse_request(body), tool_origins(body)
    headers = extension_headers(body)
    if generate_request is None:  # a client checks the connection
        return empty_response(service, body, is_streaming, headers)
    stream = await service.start(generate_request, parse_keep_alive(body))
    headers = extension_headers(body, stream)
    if is_streaming:
        return EventStream(stream_events(stream, origins), service.limits, headers, stream.close)
    return await respond_when_done(request, complete_response(stream, origins), headers, stream.close)


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
        body.get_limit("max_output_tokens"), (), parse_sampling(body), constraint=constraint, tools=parse_tools(body),
        think=EFFORTS[effort] if effort else "auto", ban=parse_banned(body),
    )  # fmt: skip
    messages = parse_input(body)
    if not messages:
        return None
    if instructions := body.get_text("instructions"):
        messages = [{"role": "system", "content": instructions}, *messages]
    body.reject("top_logprobs", "use /v1/chat/completions")
    return GenerateRequest(body.get_text("model"), [messages], options)


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


async def complete_response(stream: ResponseStream, origins: Origins) -> dict[str, object]:
    """Collect the complete response."""
    blocks, reason = await collect_blocks(stream)
    names = [new_id("item_") for _ in blocks.all]
    return final_response(stream, new_id("resp_"), blocks, names, origins, reason)


def final_response(
    stream: ResponseStream, id: str, blocks: Blocks, names: Sequence[str], origins: Origins, reason: str
) -> dict[str, object]:
    """Format a response that has ended."""
    status = "incomplete" if reason == "length" else "completed"
    statuses = ["completed" if block is not blocks.all[-1] else status for block in blocks.all]
    items = [format_item(*block, origins) for block in zip(blocks.all, names, statuses, strict=True)]
    return format_response(stream.name, id, status, items, format_usage(stream.usage))


def format_response(model: str, id: str, status: str, output: Sequence[object], usage: object) -> dict[str, object]:
    incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": id, "object": "response", "created_at": int(time()), "status": status, "model": model,
        "output": output, "usage": usage, "error": None, "incomplete_details": incomplete_details, "instructions": None,
        "metadata": {}, "parallel_tool_calls": True, "temperature": None, "top_p": None, "tool_choice": "auto",
        "tools": [], "store": False,
    }  # fmt: skip


async def stream_events(stream: ResponseStream, origins: Origins) -> AsyncGenerator[bytes]:
    """Yield the response as server-sent events."""
    blocks, reason, id, names, number = Blocks(), "", new_id("resp_"), list[str](), 0

    def numbered(events: Iterator[Event]) -> Iterator[bytes]:
        nonlocal number
        for item_event in events:
            yield format_event({**item_event, "sequence_number": number}, str(item_event["type"]))
            number += 1

    started = format_response(stream.name, id, "in_progress", [], None)
    try:
        for event_type in ("response.created", "response.in_progress"):
            for line in numbered(iter([{"type": event_type, "response": started}])):
                yield line
        async for _, token_event in stream.events():
            changes = [change for part in token_event.parts for change in blocks.take(part)]
            reason = token_event.finish_reason or reason
            for line in numbered(event for change in changes for event in format_events(change, names, origins)):
                yield line
        for line in numbered(event for change in blocks.end() for event in format_events(change, names, origins)):
            yield line
        result = final_response(stream, id, blocks, names, origins, reason)
        for line in numbered(iter([{"type": f"response.{result['status']}", "response": result}])):
            yield line
    except Exception as error:
        fields = error_fields(error)
        failed = {**started, "status": "failed", "error": {**fields, "code": fields["code"] or "server_error"}}
        for line in numbered(iter([{"type": "response.failed", "response": failed}])):
            yield line
    finally:
        await stream.close()


def format_events(change: Change, names: list[str], origins: Origins) -> Iterator[Event]:
    """Yield the events of a change of a block; names: ids of the items, extended by new ones."""
    action, block, _ = change
    if action == OPEN:
        names.append(new_id("item_"))
        item = format_item(block, names[-1], "in_progress", origins, has_content=False)
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
    fields = {"item_id": names[block.index], "output_index": block.index}
    if block.kind == CALL:
        yield from format_call_events(change, fields, origins)
    else:
        yield from format_text_events(change, {**fields, "content_index": 0})
    if action == CLOSE:
        status = "incomplete" if block.is_truncated else "completed"
        item = format_item(block, names[block.index], status, origins)
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}


def format_call_events(change: Change, fields: Event, origins: Origins) -> Iterator[Event]:
    """Yield the events of a call's arguments; the text of a custom tool is sent when it is complete."""
    action, block, text = change
    if origin_of(block, origins).is_custom:
        if action == CLOSE:
            input_value = input_text(block.text)
            yield {"type": "response.custom_tool_call_input.delta", **fields, "delta": input_value}
            yield {"type": "response.custom_tool_call_input.done", **fields, "input": input_value}
    elif action == CLOSE:
        done_fields = {"arguments": block.text, "name": origin_of(block, origins).name}
        yield {"type": "response.function_call_arguments.done", **fields, **done_fields}
    elif action != OPEN:
        yield {"type": "response.function_call_arguments.delta", **fields, "delta": text}


def format_text_events(change: Change, fields: Event) -> Iterator[Event]:
    """Yield the events of a text's or reasoning's only part."""
    action, block, text = change
    prefix = "response.reasoning_text" if block.kind == REASONING else "response.output_text"
    extra: Event = {} if block.kind == REASONING else {"logprobs": []}
    if action == OPEN:
        yield {"type": "response.content_part.added", **fields, "part": format_part(block, "")}
    elif action == CLOSE:
        yield {"type": f"{prefix}.done", **fields, "text": block.text, **extra}
        yield {"type": "response.content_part.done", **fields, "part": format_part(block, block.text)}
    else:
        yield {"type": f"{prefix}.delta", **fields, "delta": text, **extra}


def format_part(block: Block, text: str) -> dict[str, object]:
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def origin_of(block: Block, origins: Origins) -> Origin:
    """Return a call's tool under the client's name."""
    return origins.get(block.name) or Origin(block.name)


def format_item(block: Block, id: str, status: str, origins: Origins, has_content: bool = True) -> dict[str, object]:
    """Format a block as an output item; has_content: False for an item that has just been opened."""
    if block.kind == CALL:
        arguments = block.text if has_content else ""
        return format_call(origin_of(block, origins), id, f"call_{block.id}", arguments, status)
    content = [format_part(block, block.text)] if has_content else []
    if block.kind == REASONING:
        return {"type": "reasoning", "id": id, "summary": [], "content": content, "status": status}
    return {"type": "message", "id": id, "role": "assistant", "content": content, "status": status}


def format_usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.written,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.written,
    }
