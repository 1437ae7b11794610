"""Anthropic's interface: /v1/messages and /v1/messages/count_tokens (https://docs.anthropic.com/en/api/messages)."""

from collections.abc import AsyncGenerator, Sequence
from json import loads
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.generation.generate import GenerationOptions
from localllm.generation.reasoning import THOUGHT
from localllm.generation.tools.tool_call_parser import CALL
from localllm.server.content_blocks import CLOSE, DELTA, OPEN, Block, Blocks, Change, all_blocks
from localllm.server.fields import Body, kind
from localllm.server.http import EventStream, answered_whole, anthropic_error, event, json_response, read_json
from localllm.server.ids import new_id
from localllm.server.messages import content_of, named_results, said_arguments, shown_of
from localllm.server.openai_chat import ignored
from localllm.server.request_options import EFFORTS, MOST_STOPS, call_options, json_options, sampling_of
from localllm.server.service import GenerateRequest, ResponseStream, Service, Usage
from localllm.text.marker_escaping import Message

if TYPE_CHECKING:
    from localllm.generation.tools.tool_grammar import Tool, ToolUse

# Lines that clients put at the head of a system message and change from request to request: with them nothing that was
# read before could be used again.
CHANGING = ("x-anthropic-billing-header:",)
MEANINGLESS = ("metadata", "service_tier", "container", "inference_geo", "diagnostics", "cache_control", "speed",
               "user_profile_id", "workspace_id", "betas", "context_management")  # fmt: skip


PING = event({"type": "ping"}, "ping")  # while a prompt is read


async def messages(service: Service, request: Request) -> Response:
    """An answer to a conversation."""
    body = Body(await read_json(request, service.limits))
    stream = body.flag("stream")
    question = question_of(body, body.whole("max_tokens", 1))
    if question.options.max_tokens is None:
        raise UsageError("max_tokens is missing")
    exchange = await service.exchange(question)
    headers = {"request-id": new_id("req_"), **ignored(body, exchange)}
    if stream:
        return EventStream(streamed(exchange, question), service.limits, headers, exchange.close, PING)
    return await answered_whole(request, whole(exchange, question), headers, exchange.close)


async def count_tokens(service: Service, request: Request) -> Response:
    """How long a conversation is."""
    body = Body(await read_json(request, service.limits))
    count = await service.count(question_of(body, None))
    return json_response({"input_tokens": count}, headers=ignored(body))


def question_of(body: Body, max_tokens: int | None) -> GenerateRequest:
    """Raises UsageError."""
    for name in MEANINGLESS:
        body.get(name)
    stops = body.texts("stop_sequences")
    if len(stops) > MOST_STOPS:
        raise UsageError(f"stop_sequences should be at most {MOST_STOPS} texts, not {len(stops)}")
    think, budget = thinking_of(body.object("thinking"))
    output = body.object("output_config")
    constraint = None
    if output:
        effort = output.choice("effort", (*EFFORTS, "max"))
        think = EFFORTS.get(effort, "high") if effort and think == "auto" else think
        if format := output.object("format"):
            from localllm.generation.constraints.constraint import constraint_of

            constraint = constraint_of(format.mapping("schema"), **json_options(body))
    options = GenerationOptions(
        max_tokens, stops, sampling_of(body), constraint=constraint, tools=tools_of(body), think=think,
        think_budget=budget,
    )  # fmt: skip
    system = system_of(body.get("system"))
    return GenerateRequest(body.text("model"), [system + conversation(body.needed_items("messages"))], options)


def thinking_of(given: Body | None) -> tuple[str, int | None]:
    """Whether to think, and the most tokens of that. Raises UsageError."""
    if given is None:
        return "auto", None
    kind = given.choice("type", ("enabled", "disabled", "adaptive"))
    budget = given.whole("budget_tokens", 0)
    return {"enabled": "on", "disabled": "off"}.get(kind or "", "auto"), budget if kind == "enabled" else None


def system_of(given: Any) -> list[Message]:
    """The system message, without lines that change. Raises UsageError."""
    text = content_of(given, "system")
    if text is None:
        return []
    lines = [line for line in text.split("\n") if not line.startswith(CHANGING)]
    return [{"role": "system", "content": "\n".join(lines)}]


def tools_of(body: Body) -> "ToolUse | None":
    """Raises UsageError."""
    from localllm.generation.tools.tool_grammar import ToolUse

    given, choice = body.items("tools") or (), body.object("tool_choice")
    tools = [tool_of(Body.of(tool, "tools")) for tool in given if not is_foreign(tool)]
    if not tools:
        return None
    more = call_options(body)
    if choice is None:
        return ToolUse(tools, **more)
    asked = choice.choice("type", ("auto", "any", "tool", "none")) or "auto"
    named = choice.needed_text("name") if asked == "tool" else {"any": "required"}.get(asked, asked)
    return ToolUse(tools, named, not choice.flag("disable_parallel_tool_use"), **more)


def is_foreign(tool: Any) -> bool:
    """Whether it is one of those that Anthropic's own computers run: nobody can here."""
    return isinstance(tool, dict) and tool.get("type") not in (None, "custom")


def tool_of(tool: Body) -> "Tool":
    from localllm.generation.tools.tool_grammar import NOTHING, Tool

    schema, about = tool.mapping("input_schema"), tool.text("description") or ""
    return Tool(tool.needed_text("name"), about, dict(schema or NOTHING), tool.flag("strict"))


def conversation(given: Sequence[Any]) -> list[Message]:
    """Raises UsageError."""
    if not given:
        raise UsageError("messages should not be empty")
    found = list[Message]()
    for number, message in enumerate(given):
        name = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise UsageError(f"{name}.role should be user, assistant or system")
        content = "" if message.get("content") is None else message["content"]
        if not isinstance(content, str | list):
            raise UsageError(f"{name}.content should be a text or a list of blocks, not {kind(content)}")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in blocks):
            raise UsageError(f"{name}.content: a block should be an object with a type")
        found += answer_of(blocks, name) if message["role"] == "assistant" else asked_of(blocks, name, message["role"])
    return named_results(found)


def asked_of(blocks: list[dict[str, Any]], name: str, role: str) -> list[Message]:
    """What a user says: results of calls first, each a message of its own."""
    results = [block for block in blocks if block["type"] == "tool_result"]
    found: list[Message] = []
    for block in results:
        said = shown_of(block.get("content"), f"{name}.content") or ""
        if block.get("is_error"):
            said = f"Error: {said}" if isinstance(said, str) else [{"type": "text", "text": "Error:"}, *said]
        found.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": said})
    if (rest := [block for block in blocks if block["type"] != "tool_result"]) or not results:
        shown = shown_of if role == "user" else content_of
        found.append({"role": role, "content": shown(rest, f"{name}.content")})
    return found


def answer_of(blocks: list[dict[str, Any]], name: str) -> list[Message]:
    """What an assistant has said: thoughts, texts and calls in one message."""
    texts = [block for block in blocks if block["type"] not in ("thinking", "redacted_thinking", "tool_use")]
    message: Message = {"role": "assistant", "content": shown_of(texts, f"{name}.content") or ""}
    if thoughts := [str(block.get("thinking", "")) for block in blocks if block["type"] == "thinking"]:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = []
    for block in blocks:
        if block["type"] == "tool_use":
            if not isinstance(block.get("name"), str):
                raise UsageError(f"{name}.content: a tool_use should have a name and an input")
            function = {"name": block["name"], "arguments": said_arguments(block.get("input"))}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
    return [{**message, "tool_calls": calls}] if calls else [message]


async def whole(exchange: ResponseStream, question: GenerateRequest) -> dict[str, Any]:
    """All at once."""
    blocks, reason = await all_blocks(exchange)
    stop, sequence = stopped(exchange, question, blocks, reason)
    return {
        **head(exchange),
        "content": [content(block) for block in blocks.all if not block.is_cut],  # an input is an object
        "stop_reason": stop,
        "stop_sequence": sequence,
        "usage": usage_of(exchange.usage),
    }


async def streamed(exchange: ResponseStream, question: GenerateRequest) -> AsyncGenerator[bytes]:
    """Event by event."""
    blocks, reason = Blocks(), ""
    try:
        yield named({"type": "message_start", "message": {
            **head(exchange), "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": usage_of(exchange.known())}})  # fmt: skip
        yield PING
        async for _, told in exchange.events():
            for part in told.parts:
                for change in blocks.take(part):
                    yield named(change_of(change))
            reason = told.finish_reason or reason
        for change in blocks.end():
            yield named(change_of(change))
        stop, sequence = stopped(exchange, question, blocks, reason)
        usage = usage_of(exchange.usage)
        yield named(
            {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": sequence}, "usage": usage}
        )
        yield named({"type": "message_stop"})
    except Exception as error:
        yield named(anthropic_error(error))
    finally:
        await exchange.close()


def named(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


def head(exchange: ResponseStream) -> dict[str, Any]:
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": exchange.name}


def change_of(change: Change) -> dict[str, Any]:
    """As an event."""
    what, block, text = change
    if what == OPEN:
        return {"type": "content_block_start", "index": block.index, "content_block": content(block)}
    if what == CLOSE:
        return {"type": "content_block_stop", "index": block.index}
    assert what == DELTA
    deltas = {
        THOUGHT: {"type": "thinking_delta", "thinking": text},
        CALL: {"type": "input_json_delta", "partial_json": text},
    }
    delta = deltas.get(block.kind, {"type": "text_delta", "text": text})
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def content(block: Block) -> dict[str, Any]:
    """A block, as far as it is told."""
    if block.kind == THOUGHT:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == CALL:
        return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": loads(block.text or "{}")}
    return {"type": "text", "text": block.text}


def stopped(exchange: ResponseStream, question: GenerateRequest, blocks: Blocks, reason: str) -> tuple[str, str | None]:
    """Why it ended, and the stop string that ended it."""
    found = exchange.stop_string()
    if found in question.options.stop:
        return "stop_sequence", found
    if reason == "length":
        return "max_tokens", None
    return ("tool_use" if blocks.calls else "end_turn"), None


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.written,
    }
