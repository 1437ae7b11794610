"""Anthropic's interface: /v1/messages and /v1/messages/count_tokens.

Source: https://docs.anthropic.com/en/api/messages
"""

import asyncio
from collections.abc import AsyncGenerator
from json import loads
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.generation.generate import GenerationOptions
from localllm.generation.reasoning import REASONING
from localllm.generation.tools.tool_call_parser import CALL
from localllm.server.anthropic_blocks import parse_messages
from localllm.server.anthropic_tools import find_client_tool
from localllm.server.content_blocks import CLOSE, DELTA, OPEN, Block, Blocks, Change, collect_blocks
from localllm.server.fields import Body
from localllm.server.http import (
    EventStream,
    anthropic_error,
    format_event,
    json_response,
    new_id,
    read_json,
    respond_when_done,
)
from localllm.server.messages import parse_text
from localllm.server.openai_chat import extension_headers
from localllm.server.request_options import (
    EFFORTS,
    MAX_STOPS,
    parse_banned,
    parse_call_options,
    parse_json_options,
    parse_keep_alive,
    parse_sampling,
)
from localllm.server.service import GenerateRequest, ResponseStream, Service, Usage
from localllm.text.messages import Message

if TYPE_CHECKING:
    from localllm.generation.tools.tool_grammar import Tool, ToolUse

# Lines that clients put first in a system message and change with every request: they would make the prefix cache
# useless.
CHANGING = ("x-anthropic-billing-header:",)
IGNORED_FIELDS = ("metadata", "service_tier", "container", "inference_geo", "diagnostics", "cache_control", "speed",
               "user_profile_id", "workspace_id", "betas", "context_management")  # fmt: skip


PING = format_event({"type": "ping"}, "ping")  # keep-alive during prefill


async def create_message(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    body = Body(await read_json(request, service.limits))
    is_streaming = body.get_bool("stream")
    generate_request = await asyncio.to_thread(parse_request, body, body.get_limit("max_tokens"))
    if body.get("max_tokens") is None:
        raise UsageError("max_tokens is missing")
    stream = await service.start(generate_request, parse_keep_alive(body))
    headers = {"request-id": new_id("req_"), **extension_headers(body, stream)}
    if is_streaming:
        return EventStream(stream_events(stream, generate_request), service.limits, headers, stream.close, PING)
    return await respond_when_done(request, complete_response(stream, generate_request), headers, stream.close)


async def count_tokens(service: Service, request: Request) -> Response:
    """Count the tokens of a conversation."""
    body = Body(await read_json(request, service.limits))
    count = await service.count(await asyncio.to_thread(parse_request, body, None))
    return json_response({"input_tokens": count}, headers=extension_headers(body))


def parse_request(body: Body, max_tokens: int | None) -> GenerateRequest:
    """Parse the request. Raises UsageError."""
    for name in IGNORED_FIELDS:
        body.get(name)
    stops = body.get_texts("stop_sequences")
    if len(stops) > MAX_STOPS:
        raise UsageError(f"stop_sequences should be at most {MAX_STOPS} strings, not {len(stops)}")
    think, budget = parse_thinking(body.get_object("thinking"))
    output = body.get_object("output_config")
    constraint = None
    if output:
        effort = output.get_choice("effort", tuple(EFFORTS))
        think = EFFORTS[effort] if effort and think == "auto" else think
        if format := output.get_object("format"):
            from localllm.generation.constraints.constraint import constraint_of

            constraint = constraint_of(format.get_mapping("schema"), **parse_json_options(body))
    options = GenerationOptions(
        max_tokens, stops, parse_sampling(body), constraint=constraint, tools=parse_tools(body), think=think,
        think_budget=budget, ban=parse_banned(body),
    )  # fmt: skip
    system = parse_system(body.get("system"))
    return GenerateRequest(body.get_text("model"), [system + parse_messages(body.require_list("messages"))], options)


def parse_thinking(thinking: Body | None) -> tuple[str, int | None]:
    """Parse `thinking` into a mode and the most tokens of reasoning. Raises UsageError."""
    if thinking is None:
        return "auto", None
    kind = thinking.get_choice("type", ("enabled", "disabled", "adaptive"))
    budget = thinking.get_int("budget_tokens", 0)
    return {"enabled": "on", "disabled": "off"}.get(kind or "", "auto"), budget if kind == "enabled" else None


def parse_system(value: object) -> list[Message]:
    """Parse the system message, without its CHANGING lines. Raises UsageError."""
    text = parse_text(value, "system")
    if text is None:
        return []
    lines = [line for line in text.split("\n") if not line.startswith(CHANGING)]
    return [{"role": "system", "content": "\n".join(lines)}]


def parse_tools(body: Body) -> "ToolUse | None":
    """Parse tools and tool_choice; those that Anthropic's servers run are ignored. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import Tool, ToolUse

    tool_list, choice = body.get_list("tools") or (), body.get_object("tool_choice")
    tools = list[Tool]()
    for number, tool in enumerate(Body.of(value, "tools") for value in tool_list):
        if (kind := tool.get_text("type")) in (None, "custom"):
            tools.append(parse_tool(tool))
        elif client_tool := find_client_tool(kind, tool.require_text("name")):
            tools.append(client_tool)
        else:  # Anthropic's servers run it
            body.ignore(f"tools[{number}]:{kind}")
    if not tools:
        return None
    options = parse_call_options(body)
    if choice is None:
        return ToolUse(tools, **options)
    kind = choice.get_choice("type", ("auto", "any", "tool", "none")) or "auto"
    tool_choice = choice.require_text("name") if kind == "tool" else {"any": "required"}.get(kind, kind)
    return ToolUse(tools, tool_choice, not choice.get_bool("disable_parallel_tool_use"), **options)


def parse_tool(tool: Body) -> "Tool":
    """Parse one tool. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import NOTHING, Tool

    schema, about = tool.get_mapping("input_schema"), tool.get_text("description") or ""
    return Tool(tool.require_text("name"), about, dict(schema or NOTHING), tool.get_bool("strict"))


async def complete_response(stream: ResponseStream, generate_request: GenerateRequest) -> dict[str, object]:
    """Collect the complete response."""
    blocks, reason = await collect_blocks(stream)
    stop, sequence = find_stop_reason(stream, generate_request, blocks, reason)
    return {
        **response_head(stream),
        "content": [
            format_block(block) for block in blocks.all if not block.is_truncated
        ],  # a truncated call has no valid input object
        "stop_reason": stop,
        "stop_sequence": sequence,
        "usage": format_usage(stream.usage),
    }


async def stream_events(stream: ResponseStream, generate_request: GenerateRequest) -> AsyncGenerator[bytes]:
    """Yield the response as server-sent events."""
    blocks, reason = Blocks(), ""
    try:
        yield typed_event({"type": "message_start", "message": {
            **response_head(stream), "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {**format_usage(stream.current_usage()), "output_tokens": 0}}})  # fmt: skip
        yield PING
        async for _, token_event in stream.events():
            for part in token_event.parts:
                for change in blocks.take(part):
                    yield typed_event(format_change(change))
            reason = token_event.finish_reason or reason
        for change in blocks.end():
            yield typed_event(format_change(change))
        stop, sequence = find_stop_reason(stream, generate_request, blocks, reason)
        usage = format_usage(stream.usage)
        yield typed_event(
            {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": sequence}, "usage": usage}
        )
        yield typed_event({"type": "message_stop"})
    except Exception as error:
        yield typed_event(anthropic_error(error))
    finally:
        await stream.close()


def typed_event(value: dict[str, object]) -> bytes:
    return format_event(value, str(value["type"]))


def response_head(stream: ResponseStream) -> dict[str, object]:
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": stream.name}


def format_change(change: Change) -> dict[str, object]:
    """Format a change of a block as an event."""
    action, block, text = change
    if action == OPEN:
        return {"type": "content_block_start", "index": block.index, "content_block": format_block(block)}
    if action == CLOSE:
        return {"type": "content_block_stop", "index": block.index}
    assert action == DELTA
    deltas = {
        REASONING: {"type": "thinking_delta", "thinking": text},
        CALL: {"type": "input_json_delta", "partial_json": text},
    }
    delta = deltas.get(block.kind, {"type": "text_delta", "text": text})
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def format_block(block: Block) -> dict[str, object]:
    """Format a block, as far as it is generated."""
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == CALL:
        return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": loads(block.text or "{}")}
    return {"type": "text", "text": block.text}


def find_stop_reason(
    stream: ResponseStream, generate_request: GenerateRequest, blocks: Blocks, reason: str
) -> tuple[str, str | None]:
    """Return the stop reason, and the stop string if there is one."""
    stop_string = stream.stop_string()
    if stop_string in generate_request.options.stop:
        return "stop_sequence", stop_string
    if reason in ("length", ""):  # "": nothing was asked for
        return "max_tokens", None
    return ("tool_use" if blocks.has_calls else "end_turn"), None


def format_usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.written,
    }
