"""OpenAI's API /v1/responses, stateless: each request contains the whole conversation.

Besides messages and function calls, the input has calls of many other types, as Codex sends them. They become calls
of a tool named for the type, so that the model sees what was done. Tools are functions, also in namespaces, and
custom tools, whose only argument is a string. The model gets a flat list of functions; its calls are reported under
the client's names. Source: https://platform.openai.com/docs/api-reference/responses
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from json import dumps, loads
from time import time
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.options import GenerationOptions
from localllm.generation.reasoning import CALL, REASONING, TextPart
from localllm.server import http, request_options
from localllm.server.content_blocks import CLOSE, OPEN, ContentBlock, ContentBlockChange, ContentBlockList
from localllm.server.fields import RequestBody, describe_type
from localllm.server.messages import (
    IMAGE_ROLES,
    name_tool_results,
    normalize_arguments,
    parse_content,
    parse_result,
    parse_text,
)
from localllm.server.openai_chat import make_extension_headers
from localllm.server.service import GenerateRequest, ResponseStream, ServerContext, TokenUsage
from localllm.text.messages import ROLES, Message

if TYPE_CHECKING:
    from localllm.generation.tools.tool_grammar import Tool, ToolUse

IGNORED_FIELDS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "include",
               "truncation", "prompt_cache_retention", "client_metadata", "stream_options", "background")  # fmt: skip
CALL_SUFFIX, OUTPUT_SUFFIX = "_call", "_output"  # suffixes of item types
RESULT_FIELDS = ("output", "outputs", "results", "result", "error")  # fields of a call with its result
NON_ARGUMENT_FIELDS = (
    "type",
    "id",
    "status",
    "call_id",
    "name",
    "namespace",
    *RESULT_FIELDS,
)  # fields that are not arguments
INPUT = "input"  # the parameter of a custom tool
CUSTOM_SCHEMA = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
Event = dict[str, object]


@frozen
class ClientTool:
    """A tool's name and namespace as the client declared them; is_custom: whether it is a custom tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


ClientTools = Mapping[str, ClientTool]  # the client's tools, by the model's names for them


async def create_response(service: ServerContext, request: Request) -> Response:
    body = RequestBody(await http.read_json(request, service.limits))
    is_streaming, origins = body.get_bool("stream"), {tool.name: origin for tool, origin in parse_client_tools(body)}
    generate_request = await asyncio.to_thread(parse_request, body)
    settings, headers = echo_settings(body), make_extension_headers(body)
    if generate_request is None:  # a client that only checks the connection
        builder = ResponseBuilder(service.pool.resolve(body.get_string("model")).name, settings, origins)
        return respond_to_empty_input(builder, service, is_streaming, headers)
    stream = await service.start(generate_request, request_options.parse_keep_alive(body))
    builder, headers = ResponseBuilder(stream.name, settings, origins), make_extension_headers(body, stream)
    if is_streaming:
        events = stream_events(stream, builder)
        return http.EventStream(events, service.limits, headers, stream.close, stream.describe_progress)
    return await http.respond_when_done(request, complete_response(stream, builder), headers, stream.close)


async def count_input_tokens(service: ServerContext, request: Request) -> Response:
    """Count the tokens of a request without generating."""
    body = RequestBody(await http.read_json(request, service.limits))
    generate_request = await asyncio.to_thread(parse_request, body)
    count = await service.count(generate_request) if generate_request else 0
    counted = {"object": "response.input_tokens", "input_tokens": count}
    return http.make_json_response(counted, headers=make_extension_headers(body))


def parse_request(body: RequestBody) -> GenerateRequest | None:
    """Parse the request; return None if its input is empty. Raises UsageError."""
    for name in IGNORED_FIELDS:
        body.get(name)
    for name in ("previous_response_id", "conversation"):
        body.reject(name, "the server stores no conversations; send all messages as input")
    text, reasoning = body.get_object("text"), body.get_object("reasoning")
    schema = request_options.parse_schema(text.get_object("format")) if text else None
    effort = reasoning.get_choice("effort", tuple(request_options.EFFORTS)) if reasoning else None
    from localllm.generation.constraints.constraint import make_constraint

    constraint = make_constraint(schema, **request_options.parse_json_options(body))
    options = GenerationOptions(
        body.get_limit("max_output_tokens"), (), request_options.parse_sampling(body), constraint=constraint,
        tools=parse_tools(body), think=request_options.EFFORTS[effort] if effort else "auto",
        ban=request_options.parse_banned(body),
    )  # fmt: skip
    messages = parse_input(body)
    if not messages:
        return None
    if instructions := body.get_string("instructions"):
        messages = [{"role": "system", "content": instructions}, *messages]
    body.reject("top_logprobs", "use /v1/chat/completions")
    return GenerateRequest(body.get_string("model"), [messages], options)


def echo_settings(body: RequestBody) -> dict[str, object]:
    """Return the request's settings as the response repeats them, with OpenAI's defaults.

    Raises UsageError if metadata is not an object.
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
    """Builds a response and its events, so that complete and streamed responses have the same content.

    Attributes:
        model: the model's name.
    """

    def __init__(self, model: str, settings: Mapping[str, object], origins: ClientTools):
        """Begin a response.

        settings: repeated in the response.  origins: the client's tools, by the model's names for them.
        """
        self.model = model
        self._settings, self._origins = settings, origins
        self._id, self._created_at = http.generate_id("resp_"), int(time())
        self._blocks, self._names, self._items = ContentBlockList(), list[str](), list[object]()

    def begin(self) -> Iterator[Event]:
        for event_type in ("response.created", "response.in_progress"):
            yield {"type": event_type, "response": self._format("in_progress")}

    def take(self, part: TextPart) -> Iterator[Event]:
        """Yield the events of one segment of the answer."""
        for change in self._blocks.take(part):
            yield from self._format_change(change, "")

    def finish(self, reason: str, usage: TokenUsage) -> Iterator[Event]:
        """Yield the final events; reason: the finish reason."""
        for change in self._blocks.finish():
            yield from self._format_change(change, reason)
        status = "incomplete" if reason == "length" else "completed"
        yield {"type": f"response.{status}", "response": self._format(status, usage)}

    def fail(self, error: Exception) -> Event:
        fields = http.format_error_fields(error)
        failed = self._format("failed") | {"error": {**fields, "code": fields["code"] or "server_error"}}
        return {"type": "response.failed", "response": failed}

    def _format(self, status: str, usage: TokenUsage | None = None) -> dict[str, object]:
        incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id, "object": "response", "created_at": self._created_at, "status": status,
            "model": self.model, "output": [*self._items], "usage": usage and format_usage(usage), "error": None,
            "incomplete_details": incomplete_details, **self._settings,
        }  # fmt: skip

    def _format_change(self, change: ContentBlockChange, reason: str) -> Iterator[Event]:
        """Yield the events of a block's change; reason: the finish reason if the answer ends with it."""
        action, block, _ = change
        if action == OPEN:
            self._names.append(http.generate_id("item_"))
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


def respond_to_empty_input(
    builder: ResponseBuilder, service: ServerContext, is_streaming: bool, headers: dict[str, str]
) -> Response:
    """Respond to a request with empty input, which clients send to check the connection."""
    events = [*builder.begin(), *builder.finish("stop", TokenUsage())]
    if not is_streaming:
        return http.make_json_response(events[-1]["response"], headers=headers)

    async def format_lines() -> AsyncGenerator[bytes]:
        for number, event in enumerate(events):
            yield format_numbered(event, number)

    return http.EventStream(format_lines(), service.limits, headers)


def format_numbered(event: Event, number: int) -> bytes:
    return http.format_event({**event, "sequence_number": number}, str(event["type"]))


async def build_events(stream: ResponseStream, builder: ResponseBuilder) -> AsyncGenerator[Event]:
    """Yield the events of a response, the complete one last, and close the stream. Raises LocalllmError."""
    reason = ""
    try:
        for event in builder.begin():
            yield event
        async for _, token_event in stream.stream_events():
            reason = token_event.finish_reason or reason
            for part in token_event.parts:
                for event in builder.take(part):
                    yield event
        for event in builder.finish(reason or "length", stream.usage):
            yield event
    finally:
        await stream.close()


async def complete_response(stream: ResponseStream, builder: ResponseBuilder) -> object:
    return [event async for event in build_events(stream, builder)][-1]["response"]


async def stream_events(stream: ResponseStream, builder: ResponseBuilder) -> AsyncGenerator[bytes]:
    number = 0
    async with aclosing(build_events(stream, builder)) as events:
        try:
            async for event in events:
                yield format_numbered(event, number)
                number += 1
        except Exception as error:
            yield format_numbered(builder.fail(error), number)


def format_call_events(change: ContentBlockChange, fields: Event, origins: ClientTools) -> Iterator[Event]:
    """Yield the events of a call's arguments; a custom tool's string is sent when it is complete."""
    action, block, text = change
    if find_client_tool(block, origins).is_custom:
        if action == CLOSE:
            input_value = parse_custom_input(block.text)
            yield {"type": "response.custom_tool_call_input.delta", **fields, "delta": input_value}
            yield {"type": "response.custom_tool_call_input.done", **fields, "input": input_value}
    elif action == CLOSE:
        done_fields = {"arguments": block.text, "name": find_client_tool(block, origins).name}
        yield {"type": "response.function_call_arguments.done", **fields, **done_fields}
    elif action != OPEN:
        yield {"type": "response.function_call_arguments.delta", **fields, "delta": text}


def format_text_events(change: ContentBlockChange, fields: Event) -> Iterator[Event]:
    """Yield the events of a text or reasoning block's single part."""
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


def format_part(block: ContentBlock, text: str) -> dict[str, object]:
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def find_client_tool(block: ContentBlock, origins: ClientTools) -> ClientTool:
    """Return the tool of a call under the client's name."""
    return origins.get(block.name) or ClientTool(block.name)


def format_item(
    block: ContentBlock, id: str, status: str, origins: ClientTools, has_content: bool = True
) -> dict[str, object]:
    """Format a block as an output item; has_content: False for an item that was just opened."""
    if block.kind == CALL:
        arguments = block.text if has_content else ""
        return format_call(find_client_tool(block, origins), id, f"call_{block.id}", arguments, status)
    content = [format_part(block, block.text)] if has_content else []
    if block.kind == REASONING:
        return {"type": "reasoning", "id": id, "summary": [], "content": content, "status": status}
    return {"type": "message", "id": id, "role": "assistant", "content": content, "status": status}


def format_usage(usage: TokenUsage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.written,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.written,
    }


# ---- input items: messages and calls of many types


def parse_input(body: RequestBody) -> list[Message]:
    items = body.get("input")
    if isinstance(items, str):
        return [{"role": "user", "content": items}] if items else []
    if items is not None and not isinstance(items, list):
        raise UsageError(f"input must be a string or an array of items, not {describe_type(items)}")
    messages = list[Message]()
    for number, item in enumerate(items or ()):
        if not isinstance(item, dict):
            raise UsageError(f"input[{number}] must be an object, not {describe_type(item)}")
        if not add_item(messages, item, f"input[{number}]"):
            body.ignore(f"input[{number}]:{item['type']}")
    return name_tool_results(messages)


def add_item(messages: list[Message], item: dict[str, object], name: str) -> bool:
    """Append one input item to the messages; return False if its type is unknown. Raises UsageError."""
    kind = str(item.get("type") or "message")
    if kind == "message":
        add_message(messages, item, name)
    elif kind == "reasoning":
        if texts := parse_reasoning(item.get("content")) or parse_reasoning(item.get("summary")):
            messages.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(texts)})
    elif kind.endswith(CALL_SUFFIX):
        add_call(messages, item, kind)
    elif kind.endswith(OUTPUT_SUFFIX):
        id = str(item.get("call_id") or item.get("id"))
        messages.append(
            {"role": "tool", "tool_call_id": id, "content": parse_result(item.get("output"), f"{name}.output")}
        )
    elif kind == "item_reference":
        raise UsageError(f"{name}: item_reference is not supported: the server stores no items; send the item itself")
    else:
        return False
    return True


def add_message(messages: list[Message], item: dict[str, object], name: str) -> None:
    role = ROLES.get(str(item.get("role")))
    if role is None:
        raise UsageError(f"{name}.role must be one of {', '.join(ROLES)}")
    text = (parse_content if role in IMAGE_ROLES else parse_text)(item.get("content"), f"{name}.content") or ""
    if role == "assistant" and messages and messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
        messages[-1]["content"] = text
    else:
        messages.append({"role": role, "content": text})


def add_call(messages: list[Message], item: dict[str, object], kind: str) -> None:
    """Append a call of any type, and its result if OpenAI's server ran it (it then has no call_id)."""
    if kind == "function_call":
        arguments = normalize_arguments(item.get("arguments"))
    elif isinstance(given_arguments := item.get("arguments"), str | dict):
        arguments = normalize_arguments(given_arguments)
    else:
        arguments = dumps(
            {key: value for key, value in item.items() if key not in NON_ARGUMENT_FIELDS}, ensure_ascii=False
        )
    namespace = item.get("namespace")
    called = request_options.flatten_name(
        namespace if isinstance(namespace, str) else None, str(item.get("name") or kind[: -len(CALL_SUFFIX)])
    )
    id = str(item.get("call_id") or item.get("id") or kind)
    call = {"id": id, "type": "function", "function": {"name": called, "arguments": arguments}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)
    if kind != "function_call" and item.get("call_id") is None:
        results = [parse_result(item[field], field) for field in RESULT_FIELDS if item.get(field)]
        content = "\n".join(text for text in results if isinstance(text, str)) or str(item.get("status") or "completed")
        messages.append({"role": "tool", "tool_call_id": id, "content": content})


def parse_reasoning(value: object) -> list[str]:
    """Return the strings of reasoning: a string, or a list of strings and parts with a text."""
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in texts if isinstance(text, str) and text]


# ---- tools


def parse_tools(body: RequestBody) -> "ToolUse | None":
    """Parse the tools; ignore those that OpenAI's servers would run. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import ToolUse

    choice, parallel = body.get("tool_choice"), body.get("parallel_tool_calls") is not False
    options, tools = request_options.parse_call_options(body), [tool for tool, _ in parse_client_tools(body)]
    if not tools:
        return None
    if isinstance(choice, dict) and choice.get("type") not in ("function", "custom", "allowed_tools"):
        choice = None
    mode, allowed = request_options.parse_tool_choice(choice)
    return ToolUse(tools, mode, parallel, allowed=allowed, **options)


def parse_client_tools(body: RequestBody) -> Iterator[tuple["Tool", ClientTool]]:
    """Yield the tools that the client runs. Raises UsageError."""
    for number, value in enumerate(body.get_list("tools") or ()):
        tool = RequestBody.parse(value, "tools")
        kind = tool.get_string("type") or "function"
        if kind == "function":
            yield parse_function_tool(tool)
        elif kind == "custom":
            yield parse_custom_tool(tool)
        elif kind == "namespace":
            space = tool.require_string("name")
            for inner in tool.require_list("tools"):
                function = RequestBody.parse(inner, "tools.tools")
                yield (parse_custom_tool if function.get("type") == "custom" else parse_function_tool)(function, space)
        else:
            body.ignore(f"tools[{number}]:{kind}")


def parse_function_tool(tool: RequestBody, namespace: str | None = None) -> tuple["Tool", ClientTool]:
    parsed = request_options.parse_function(tool, namespace)
    return parsed, ClientTool(tool.require_string("name"), namespace)


def parse_custom_tool(tool: RequestBody, namespace: str | None = None) -> tuple["Tool", ClientTool]:
    """Parse a custom tool as a function with one parameter. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import Tool

    name, about = tool.require_string("name"), tool.get_string("description") or ""
    format = tool.get_object("format")
    if format and (grammar := format.get_string("definition")):
        about += f"\n\nThe input must match this grammar ({format.get_string('syntax') or 'lark'}):\n{grammar}"
    return Tool(request_options.flatten_name(namespace, name), about, CUSTOM_SCHEMA), ClientTool(
        name, namespace, is_custom=True
    )


def parse_custom_input(arguments: str) -> str:
    """Return the string argument of a custom tool's call; incomplete arguments are returned unchanged."""
    try:
        return str(loads(arguments)[INPUT])
    except (ValueError, TypeError, KeyError):
        return arguments


def format_call(origin: ClientTool, id: str, call_id: str, arguments: str, status: str) -> dict[str, object]:
    namespace = {"namespace": origin.namespace} if origin.namespace else {}
    call_input = {"input": parse_custom_input(arguments)} if origin.is_custom else {"arguments": arguments}
    kind = "custom_tool_call" if origin.is_custom else "function_call"
    return {
        "type": kind, "id": id, "call_id": call_id, "name": origin.name, **namespace, **call_input, "status": status,
    }  # fmt: skip
