"""Anthropic's API: /v1/messages and /v1/messages/count_tokens.

Sources: https://docs.anthropic.com/en/api/messages; for the tools that Anthropic's models know without a description,
https://docs.anthropic.com/en/docs/agents-and-tools/tool-use
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from json import dumps, loads
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.generation.options import GenerationOptions
from localllm.generation.reasoning import CALL, REASONING
from localllm.server import http, request_options
from localllm.server.attachments import IMAGE_TYPES, decode_text
from localllm.server.content_blocks import (
    CLOSE,
    OPEN,
    ContentBlock,
    ContentBlockChange,
    ContentBlockList,
    collect_blocks,
)
from localllm.server.fields import RequestBody, describe_type
from localllm.server.messages import (
    TEXT_TYPES,
    name_tool_results,
    normalize_arguments,
    parse_content,
    parse_result,
    parse_text,
)
from localllm.server.openai_chat import make_extension_headers
from localllm.server.service import GenerateRequest, ResponseStream, ServerContext, TokenUsage
from localllm.text.messages import Message

if TYPE_CHECKING:
    from localllm.generation.tools.tool_grammar import Tool, ToolUse

# Lines that clients put first in a system message and change with every request: they would make the prefix cache
# useless.
VOLATILE_PREFIXES = ("x-anthropic-billing-header:",)
IGNORED_FIELDS = ("metadata", "service_tier", "container", "inference_geo", "diagnostics", "cache_control", "speed",
               "user_profile_id", "workspace_id", "betas", "context_management")  # fmt: skip
PING = http.format_event({"type": "ping"}, "ping")  # keep-alive during prefill
REASONING_TYPES = ("thinking", "redacted_thinking")
TOOL_USE, TOOL_RESULT = "tool_use", "tool_result"  # suffixes of types: server_tool_use is a call, too
ROLES = ("user", "assistant", "system")
TEXT, LINE = {"type": "string"}, {"type": "integer", "minimum": 0}
RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
EDITOR_PROPERTIES = {"path": TEXT, "file_text": TEXT, "old_str": TEXT, "new_str": TEXT, "insert_line": LINE,
"insert_text": TEXT,
           "view_range": RANGE}  # fmt: skip
EDITOR_COMMANDS = ("view", "create", "str_replace", "insert")
# By the prefix of the type, which a date follows.
DESCRIPTIONS = {
    "bash_": "Run a command in a shell that keeps its state; restart begins a new one.",
    "text_editor_": "View and edit files: view (view_range), create (file_text), str_replace (old_str, new_str), "
    "insert (insert_line, insert_text).",
    "memory_": "Keep notes in files below /memories: view, create, str_replace, insert, delete, rename "
    "(old_path, new_path).",
}
SCHEMAS: dict[str, dict[str, object]] = {
    "bash_": {"properties": {"command": TEXT, "restart": {"type": "boolean"}}},
    "text_editor_": {"properties": {"command": {"enum": [*EDITOR_COMMANDS]}, **EDITOR_PROPERTIES},
    "required": ["command", "path"]},
    "memory_": {
        "properties": {
            "command": {"enum": [*EDITOR_COMMANDS, "delete", "rename"]}, **EDITOR_PROPERTIES, "old_path": TEXT,
            "new_path": TEXT,
        },
        "required": ["command"],
    },
}  # fmt: skip


async def create_message(service: ServerContext, request: Request) -> Response:
    body = RequestBody(await http.read_json(request, service.limits))
    is_streaming = body.get_bool("stream")
    generate_request = await asyncio.to_thread(parse_request, body, body.get_limit("max_tokens"))
    if body.get("max_tokens") is None:
        raise UsageError("max_tokens is missing: set the maximum number of tokens to generate")
    stream = await service.start(generate_request, request_options.parse_keep_alive(body))
    headers = {"request-id": http.generate_id("req_"), **make_extension_headers(body, stream)}
    if is_streaming:
        return http.EventStream(stream_events(stream, generate_request), service.limits, headers, stream.close, PING)
    return await http.respond_when_done(request, complete_response(stream, generate_request), headers, stream.close)


async def count_tokens(service: ServerContext, request: Request) -> Response:
    body = RequestBody(await http.read_json(request, service.limits))
    count = await service.count(await asyncio.to_thread(parse_request, body, None))
    return http.make_json_response({"input_tokens": count}, headers=make_extension_headers(body))


def parse_request(body: RequestBody, max_tokens: int | None) -> GenerateRequest:
    for name in IGNORED_FIELDS:
        body.get(name)
    stops = body.get_strings("stop_sequences")
    if len(stops) > request_options.MAX_STOPS:
        raise UsageError(f"stop_sequences must be at most {request_options.MAX_STOPS} strings, not {len(stops)}")
    think, budget = parse_thinking(body.get_object("thinking"))
    output = body.get_object("output_config")
    constraint = None
    if output:
        effort = output.get_choice("effort", tuple(request_options.EFFORTS))
        think = request_options.EFFORTS[effort] if effort and think == "auto" else think
        if format := output.get_object("format"):
            from localllm.generation.constraints.constraint import make_constraint

            constraint = make_constraint(format.get_mapping("schema"), **request_options.parse_json_options(body))
    options = GenerationOptions(
        max_tokens, stops, request_options.parse_sampling(body), constraint=constraint, tools=parse_tools(body),
        think=think, think_budget=budget, ban=request_options.parse_banned(body),
    )  # fmt: skip
    system = parse_system(body.get("system"))
    return GenerateRequest(body.get_string("model"), [system + parse_messages(body.require_list("messages"))], options)


def parse_thinking(thinking: RequestBody | None) -> tuple[str, int | None]:
    """Parse `thinking` into a mode and the maximum number of reasoning tokens. Raises UsageError."""
    if thinking is None:
        return "auto", None
    kind = thinking.get_choice("type", ("enabled", "disabled", "adaptive"))
    budget = thinking.get_int("budget_tokens", 0)
    return {"enabled": "on", "disabled": "off"}.get(kind or "", "auto"), budget if kind == "enabled" else None


def parse_system(value: object) -> list[Message]:
    """Parse the system message; drop its CHANGING lines. Raises UsageError."""
    text = parse_text(value, "system")
    if text is None:
        return []
    lines = [line for line in text.split("\n") if not line.startswith(VOLATILE_PREFIXES)]
    return [{"role": "system", "content": "\n".join(lines)}]


def parse_tools(body: RequestBody) -> "ToolUse | None":
    """Parse tools and tool_choice; ignore tools that run on Anthropic's servers. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import Tool, ToolUse

    tool_list, choice = body.get_list("tools") or (), body.get_object("tool_choice")
    tools = list[Tool]()
    for number, tool in enumerate(RequestBody.parse(value, "tools") for value in tool_list):
        if (kind := tool.get_string("type")) in (None, "custom"):
            tools.append(parse_tool(tool))
        elif client_tool := find_client_tool(kind, tool.require_string("name")):
            tools.append(client_tool)
        else:  # Anthropic's servers run it
            body.ignore(f"tools[{number}]:{kind}")
    if not tools:
        return None
    options = request_options.parse_call_options(body)
    if choice is None:
        return ToolUse(tools, **options)
    kind = choice.get_choice("type", ("auto", "any", "tool", "none")) or "auto"
    tool_choice = choice.require_string("name") if kind == "tool" else {"any": "required"}.get(kind, kind)
    return ToolUse(tools, tool_choice, not choice.get_bool("disable_parallel_tool_use"), **options)


def parse_tool(tool: RequestBody) -> "Tool":
    from localllm.generation.tools.tool_grammar import NOTHING, Tool

    schema, about = tool.get_mapping("input_schema"), tool.get_string("description") or ""
    return Tool(tool.require_string("name"), about, dict(schema or NOTHING), tool.get_bool("strict"))


def find_client_tool(kind: str, name: str) -> "Tool | None":
    """Return the tool of a type such as bash_20250124, or None for an unknown type."""
    from localllm.generation.tools.tool_grammar import Tool

    begin = next((begin for begin in SCHEMAS if kind.startswith(begin)), None)
    return None if begin is None else Tool(name, DESCRIPTIONS[begin], {"type": "object", **SCHEMAS[begin]})


async def complete_response(stream: ResponseStream, generate_request: GenerateRequest) -> dict[str, object]:
    blocks, reason = await collect_blocks(stream)
    stop, sequence = find_stop_reason(stream, generate_request, blocks, reason)
    return {
        **format_head(stream),
        "content": [
            format_block(block) for block in blocks.all if not block.is_truncated
        ],  # a truncated call has no valid input object
        "stop_reason": stop,
        "stop_sequence": sequence,
        "usage": format_usage(stream.usage),
    }


async def stream_events(stream: ResponseStream, generate_request: GenerateRequest) -> AsyncGenerator[bytes]:
    blocks, reason = ContentBlockList(), ""
    try:
        yield format_typed_event({"type": "message_start", "message": {
            **format_head(stream), "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {**format_usage(stream.count_usage()), "output_tokens": 0}}})  # fmt: skip
        yield PING
        async for _, token_event in stream.stream_events():
            for part in token_event.parts:
                for change in blocks.take(part):
                    yield format_typed_event(format_change(change))
            reason = token_event.finish_reason or reason
        for change in blocks.finish():
            yield format_typed_event(format_change(change))
        stop, sequence = find_stop_reason(stream, generate_request, blocks, reason)
        usage = format_usage(stream.usage)
        yield format_typed_event(
            {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": sequence}, "usage": usage}
        )
        yield format_typed_event({"type": "message_stop"})
    except Exception as error:
        yield format_typed_event(http.format_anthropic_error(error))
    finally:
        await stream.close()


def format_typed_event(value: dict[str, object]) -> bytes:
    return http.format_event(value, str(value["type"]))


def format_head(stream: ResponseStream) -> dict[str, object]:
    return {"id": http.generate_id("msg_"), "type": "message", "role": "assistant", "model": stream.name}


def format_change(change: ContentBlockChange) -> dict[str, object]:
    action, block, text = change
    if action == OPEN:
        return {"type": "content_block_start", "index": block.index, "content_block": format_block(block)}
    if action == CLOSE:
        return {"type": "content_block_stop", "index": block.index}
    deltas = {
        REASONING: {"type": "thinking_delta", "thinking": text},
        CALL: {"type": "input_json_delta", "partial_json": text},
    }
    delta = deltas.get(block.kind, {"type": "text_delta", "text": text})
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def format_block(block: ContentBlock) -> dict[str, object]:
    """Format a block as far as it has been generated."""
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == CALL:
        return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": loads(block.text or "{}")}
    return {"type": "text", "text": block.text}


def find_stop_reason(
    stream: ResponseStream, generate_request: GenerateRequest, blocks: ContentBlockList, reason: str
) -> tuple[str, str | None]:
    """Return the stop reason, and the stop string if there is one."""
    stop_string = stream.stop_string()
    if stop_string in generate_request.options.stop:
        return "stop_sequence", stop_string
    if reason in ("length", ""):  # "": nothing was asked for
        return "max_tokens", None
    return ("tool_use" if blocks.has_calls else "end_turn"), None


def format_usage(usage: TokenUsage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.written,
    }


# ---- messages: blocks of many types


def parse_messages(messages: Sequence[object]) -> list[Message]:
    """Parse the messages. Raises UsageError."""
    if not messages:
        raise UsageError("messages must not be empty; send at least one message")
    parsed = list[Message]()
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UsageError(f"{name}.role must be user, assistant or system")
        content = "" if message.get("content") is None else message["content"]
        if not isinstance(content, str | list):
            raise UsageError(f"{name}.content must be a string or an array of blocks, not {describe_type(content)}")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in blocks):
            raise UsageError(f"{name}.content: a block must be an object with a string as its type")
        name += ".content"
        parsed += (
            parse_assistant_blocks(blocks, name)
            if message["role"] == "assistant"
            else parse_user_blocks(blocks, name, message["role"])
        )
    return name_tool_results(parsed)


def parse_user_blocks(blocks: Sequence[Message], name: str, role: str) -> list[Message]:
    """Parse a user's blocks; each tool result becomes a message of its own, ahead of the other blocks."""
    results = [block for block in blocks if block["type"].endswith(TOOL_RESULT)]
    parsed = [parse_tool_result(block, name) for block in results]
    if (other_blocks := [block for block in blocks if not block["type"].endswith(TOOL_RESULT)]) or not results:
        parse = parse_content if role == "user" else parse_text
        parsed.append({"role": role, "content": parse(convert_blocks(other_blocks, name), name)})
    return parsed


def parse_assistant_blocks(blocks: Sequence[Message], name: str) -> list[Message]:
    """Parse an assistant's blocks into messages with text, reasoning and tool calls.

    The result of a tool that ran on Anthropic's servers ends the assistant's message and becomes a tool message.
    """
    parsed, part = list[Message](), list[Message]()
    for block in blocks:
        if block["type"].endswith(TOOL_RESULT):
            parsed += [parse_assistant_message(part, name)] if part else []
            parsed.append(parse_tool_result(block, name))
            part = []
        else:
            part.append(block)
    return [*parsed, parse_assistant_message(part, name)] if part or not parsed else parsed


def parse_assistant_message(blocks: Sequence[Message], name: str) -> Message:
    """Parse blocks without tool results into one message."""
    texts = [block for block in blocks if block["type"] not in REASONING_TYPES and not block["type"].endswith(TOOL_USE)]
    message: Message = {"role": "assistant", "content": parse_content(convert_blocks(texts, name), name) or ""}
    if reasoning := [str(block.get("thinking") or "") for block in blocks if block["type"] == "thinking"]:
        message["reasoning_content"] = "\n".join(reasoning)
    calls = []
    for block in blocks:
        if block["type"].endswith(TOOL_USE):
            if not isinstance(block.get("name"), str):
                raise UsageError(f"{name}: a {block['type']} block must have a name and an input")
            function = {"name": block["name"], "arguments": normalize_arguments(block.get("input"))}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


def parse_tool_result(block: Mapping[str, object], name: str) -> Message:
    """Parse a tool result: a string, an array of blocks, or the single object of a tool on Anthropic's servers."""
    content = block.get("content")
    parts = [content] if isinstance(content, dict) else content
    result = parse_result(convert_blocks(parts, name, is_result=True) if isinstance(parts, list) else parts, name)
    if block.get("is_error"):
        result = [make_text_part("Error:"), *result] if isinstance(result, list) else f"Error: {result}"
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": result}


def convert_blocks(blocks: Sequence[object], name: str, is_result: bool = False) -> list[object]:
    """Convert blocks to parts of type text and image.

    is_result: convert blocks of unknown types to JSON text. Otherwise such blocks are left for parse_parts to check.
    Raises UsageError for a document that cannot be converted to text.
    """
    parts = list[object]()
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(block, Mapping) or kind in TEXT_TYPES or kind in IMAGE_TYPES or not isinstance(kind, str):
            parts.append(block)
        elif kind == "document":
            parts += parse_document(RequestBody(block, f"{name}: document"))
        elif kind == "search_result":
            head = [str(block[field]) for field in ("title", "source") if block.get(field)]
            parts += [make_text_part("\n".join(head)), *convert_blocks(block.get("content") or (), name, is_result)]
        elif kind == "tool_reference":
            parts.append(make_text_part(str(block.get("tool_name"))))
        elif kind == "compaction":
            parts.append(make_text_part(str(block.get("content") or "")))
        elif is_result:
            fields = {key: value for key, value in block.items() if key != "type" and not key.startswith("encrypted_")}
            parts.append(make_text_part(dumps(fields, ensure_ascii=False)))
        else:
            parts.append(block)
    return parts


def parse_document(document: RequestBody) -> list[object]:
    """Convert a document to parts: its title, its context and its text. Raises UsageError."""
    source = document.get_object("source") or RequestBody({}, document.qualify("source"))
    kind, media = source.get_string("type"), source.get_string("media_type") or "text/plain"
    if kind == "content":
        content = source.get("content")
        parts: list[object] = (
            [make_text_part(content)] if isinstance(content, str) else [*(source.get_list("content") or ())]
        )
    elif kind == "text":
        parts = [make_text_part(source.require_string("data"))]
    elif kind == "base64":
        parts = [make_text_part(decode_text(source.require_string("data"), media, document.qualify("source")))]
    else:
        raise UsageError(f"{source.qualify('type')}: {kind} is not supported; send the document's text")
    head = [text for field in ("title", "context") if (text := document.get_string(field))]
    return [*map(make_text_part, head), *parts]


def make_text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
