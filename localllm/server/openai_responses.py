"""OpenAI's interface /v1/responses, stateless: a request has the whole conversation.

Source: https://platform.openai.com/docs/api-reference/responses
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from time import time

from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.generate import GenerationOptions
from localllm.generation.reasoning import REASONING, TextPart
from localllm.generation.tools.tool_call_parser import CALL
from localllm.server.content_blocks import CLOSE, OPEN, Block, Blocks, Change
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
    is_streaming, origins = body.get_bool("stream"), tool_origins(body)
    generate_request = await asyncio.to_thread(parse_request, body)
    settings, headers = echo_settings(body), extension_headers(body)
    if generate_request is None:  # a client checks the connection
        builder = ResponseBuilder(service.pool.resolve(body.get_text("model")).name, settings, origins)
        return empty_response(builder, service, is_streaming, headers)
    stream = await service.start(generate_request, parse_keep_alive(body))
    builder, headers = ResponseBuilder(stream.name, settings, origins), extension_headers(body, stream)
    if is_streaming:
        return EventStream(stream_events(stream, builder), service.limits, headers, stream.close)
    return await respond_when_done(request, complete_response(stream, builder), headers, stream.close)


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


def echo_settings(body: Body) -> dict[str, object]:
    """Return the settings of a request as a response repeats them, with OpenAI's defaults; nothing is stored.

    Raises UsageError for metadata that are no object.
    """
    text, reasoning = body.get_mapping("text") or {}, body.get_mapping("reasoning") or {}
    parallel = body.get_optional_bool("parallel_tool_calls")
    return {
        "background": False, "instructions": body.get("instructions"),
        "max_output_tokens": body.get_limit("max_output_tokens"), "max_tool_calls": None,
        "metadata": body.get_mapping("metadata") or {}, "parallel_tool_calls": parallel is not False,
        "previous_response_id": None, "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None, **reasoning}, "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default", "store": False, "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}, **{name: value for name, value in text.items() if value is not None}},
        "tool_choice": body.get("tool_choice") or "auto", "tools": body.get_list("tools") or [], "top_logprobs": 0,
        "top_p": body.get("top_p"), "truncation": body.get("truncation") or "disabled", "user": body.get("user"),
    }  # fmt: skip


class ResponseBuilder:
    """Builds a response and all its events, so that whole and streamed responses say the same.

    Attributes:
        model: its name.
    """

    def __init__(self, model: str, settings: Mapping[str, object], origins: Origins):
        """Begin a response.

        settings: as a response repeats them.  origins: the client's tools, by the names that the model calls.
        """
        self.model = model
        self._settings, self._origins = settings, origins
        self._id, self._created_at = new_id("resp_"), int(time())
        self._blocks, self._names, self._items = Blocks(), list[str](), list[object]()

    def begin(self) -> Iterator[Event]:
        """Yield the events of a response that begins."""
        for event_type in ("response.created", "response.in_progress"):
            yield {"type": event_type, "response": self._format("in_progress")}

    def take(self, part: TextPart) -> Iterator[Event]:
        """Yield the events of a part of the answer."""
        for change in self._blocks.take(part):
            yield from self._events_of(change, "")

    def end(self, reason: str, usage: Usage) -> Iterator[Event]:
        """Yield the events of the end; reason: the finish reason."""
        for change in self._blocks.end():
            yield from self._events_of(change, reason)
        status = "incomplete" if reason == "length" else "completed"
        yield {"type": f"response.{status}", "response": self._format(status, usage)}

    def fail(self, error: Exception) -> Event:
        """Return the event of a failure."""
        fields = error_fields(error)
        failed = self._format("failed") | {"error": {**fields, "code": fields["code"] or "server_error"}}
        return {"type": "response.failed", "response": failed}

    def _format(self, status: str, usage: Usage | None = None) -> dict[str, object]:
        incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id, "object": "response", "created_at": self._created_at, "status": status,
            "model": self.model, "output": [*self._items], "usage": usage and format_usage(usage), "error": None,
            "incomplete_details": incomplete_details, **self._settings,
        }  # fmt: skip

    def _events_of(self, change: Change, reason: str) -> Iterator[Event]:
        """Yield the events of a change of a block; reason: the finish reason if the answer ends here."""
        action, block, _ = change
        if action == OPEN:
            self._names.append(new_id("item_"))
            item = format_item(block, self._names[-1], "in_progress", self._origins, has_content=False)
            yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        fields = {"item_id": self._names[block.index], "output_index": block.index}
        if block.kind == CALL:
            yield from format_call_events(change, fields, self._origins)
        else:
            yield from format_text_events(change, {**fields, "content_index": 0})
        if action == CLOSE:
            status = "incomplete" if reason == "length" or block.is_truncated else "completed"
            self._items.append(format_item(block, self._names[block.index], status, self._origins))
            yield {"type": "response.output_item.done", "output_index": block.index, "item": self._items[-1]}


def empty_response(builder: ResponseBuilder, service: Service, is_streaming: bool, headers: dict[str, str]) -> Response:
    """Respond to a request with empty input, by which clients check the connection."""
    events = [*builder.begin(), *builder.end("stop", Usage())]
    if not is_streaming:
        return json_response(events[-1]["response"], headers=headers)

    async def lines() -> AsyncGenerator[bytes]:
        for number, event in enumerate(events):
            yield format_numbered(event, number)

    return EventStream(lines(), service.limits, headers)


def format_numbered(event: Event, number: int) -> bytes:
    return format_event({**event, "sequence_number": number}, str(event["type"]))


async def response_events(stream: ResponseStream, builder: ResponseBuilder) -> AsyncGenerator[Event]:
    """Yield the events of a response, the whole one last, and close the stream. Raises LocalllmError."""
    reason = ""
    try:
        for event in builder.begin():
            yield event
        async for _, token_event in stream.events():
            reason = token_event.finish_reason or reason
            for part in token_event.parts:
                for event in builder.take(part):
                    yield event
        for event in builder.end(reason or "length", stream.usage):
            yield event
    finally:
        await stream.close()


async def complete_response(stream: ResponseStream, builder: ResponseBuilder) -> object:
    """Return the complete response."""
    return [event async for event in response_events(stream, builder)][-1]["response"]


async def stream_events(stream: ResponseStream, builder: ResponseBuilder) -> AsyncGenerator[bytes]:
    """Yield the response as server-sent events."""
    number = 0
    async with aclosing(response_events(stream, builder)) as events:
        try:
            async for event in events:
                yield format_numbered(event, number)
                number += 1
        except Exception as error:
            yield format_numbered(builder.fail(error), number)


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
