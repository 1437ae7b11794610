"""OpenAI's newer interface, /v1/responses, without a memory of its own: a request has the whole conversation
(https://platform.openai.com/docs/api-reference/responses).
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
from localllm.server.content_blocks import CLOSE, OPEN, Block, Blocks, Change, all_blocks
from localllm.server.fields import Body, kind
from localllm.server.http import EventStream, answered_whole, event, json_response, openai_error, read_json
from localllm.server.ids import new_id
from localllm.server.messages import ROLES, SHOWING, content_of, named_results, said_arguments, shown_of
from localllm.server.openai_chat import ignored
from localllm.server.request_options import (
    EFFORTS,
    call_options,
    choice_of,
    function_of,
    json_options,
    sampling_of,
    schema_of,
)
from localllm.server.service import GenerateRequest, ResponseStream, Service, Usage
from localllm.text.marker_escaping import Message

if TYPE_CHECKING:
    from localllm.generation.tools.tool_grammar import ToolUse

MEANINGLESS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "include",
               "truncation", "prompt_cache_retention", "client_metadata", "stream_options", "background")  # fmt: skip
Event = dict[str, Any]


async def responses(service: Service, request: Request) -> Response:
    """An answer to a conversation."""
    body = Body(await read_json(request, service.limits))
    stream, question = body.flag("stream"), question_of(body)
    headers = ignored(body)
    if question is None:  # a client looks whether there is somebody
        return nothing(service, body, stream, headers)
    exchange = await service.exchange(question)
    headers = ignored(body, exchange)
    if stream:
        return EventStream(streamed(exchange), service.limits, headers, exchange.close)
    return await answered_whole(request, whole(exchange), headers, exchange.close)


def question_of(body: Body) -> GenerateRequest | None:
    """None if nothing is asked. Raises UsageError."""
    for name in MEANINGLESS:
        body.get(name)
    for name in ("previous_response_id", "conversation"):
        body.refuse(name, "nothing is kept here, send the whole conversation")
    text, reasoning = body.object("text"), body.object("reasoning")
    schema = schema_of(text.object("format")) if text else None
    effort = reasoning.choice("effort", tuple(EFFORTS)) if reasoning else None
    from localllm.generation.constraints.constraint import constraint_of

    constraint = constraint_of(schema, **json_options(body))
    options = GenerationOptions(
        body.whole("max_output_tokens", 1), (), sampling_of(body), constraint=constraint, tools=tools_of(body),
        think=EFFORTS[effort] if effort else "auto",
    )  # fmt: skip
    told = conversation(body.get("input"))
    if not told:
        return None
    if instructions := body.text("instructions"):
        told = [{"role": "system", "content": instructions}, *told]
    body.refuse("top_logprobs", "ask /v1/chat/completions")
    return GenerateRequest(body.text("model"), [told], options)


def tools_of(body: Body) -> "ToolUse | None":
    """The functions; tools of other kinds, which others would run, are left out. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import ToolUse

    given, choice = body.items("tools") or (), body.get("tool_choice")
    parallel, more = body.get("parallel_tool_calls") is not False, call_options(body)
    named = [Body.of(tool, "tools") for tool in given]
    tools = [function_of(tool) for tool in named if tool.get("type") == "function"]
    if not tools:
        return None
    if isinstance(choice, dict) and choice.get("type") != "function":
        choice = None
    return ToolUse(tools, choice_of(choice), parallel, **more)


def conversation(given: Any) -> list[Message]:
    """Messages of the input's items. Raises UsageError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    if given is not None and not isinstance(given, list):
        raise UsageError(f"input should be a text or a list of items, not {kind(given)}")
    found = list[Message]()
    for number, item in enumerate(given or ()):
        if not isinstance(item, dict):
            raise UsageError(f"input[{number}] should be an object, not {kind(item)}")
        add(found, item, f"input[{number}]")
    return named_results(found)


def add(found: list[Message], item: dict[str, Any], name: str) -> None:
    """One item: calls and thoughts belong to the answer that they are next to."""
    what = item.get("type") or "message"
    if what == "message":
        role = ROLES.get(str(item.get("role")))
        if role is None:
            raise UsageError(f"{name}.role should be one of {', '.join(ROLES)}")
        text = (shown_of if role in SHOWING else content_of)(item.get("content"), f"{name}.content") or ""
        if role == "assistant" and found and found[-1]["role"] == "assistant" and not found[-1]["content"]:
            found[-1]["content"] = text
        else:
            found.append({"role": role, "content": text})
    elif what == "function_call":
        function = {"name": str(item.get("name")), "arguments": said_arguments(item.get("arguments"))}
        call = {"id": str(item.get("call_id")), "type": "function", "function": function}
        last_answer(found).setdefault("tool_calls", []).append(call)
    elif what == "function_call_output":
        text = shown_of(item.get("output"), f"{name}.output") or ""
        found.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text})
    elif what == "reasoning":
        texts = [part.get("text", "") for part in (item.get("content") or item.get("summary") or ())]
        if texts:
            found.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(map(str, texts))})
    else:
        raise UsageError(f"{name} is of type {str(what)[:40]!r}, which is not supported")


def last_answer(found: list[Message]) -> Message:
    """The answer that a call belongs to."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def nothing(service: Service, body: Body, stream: bool, headers: dict[str, str]) -> Response:
    """An answer to no question."""
    name = service.shelf.book(body.text("model")).name
    made = response(name, new_id("resp_"), "completed", [], usage_of(Usage()))
    if not stream:
        return json_response(made, headers=headers)

    async def events() -> AsyncGenerator[bytes]:
        for number, what in enumerate(("response.created", "response.completed")):
            yield event({"type": what, "sequence_number": number, "response": made}, what)

    return EventStream(events(), service.limits, headers)


async def whole(exchange: ResponseStream) -> dict[str, Any]:
    """All at once."""
    blocks, reason = await all_blocks(exchange)
    names = [new_id("item_") for _ in blocks.all]
    return ended(exchange, new_id("resp_"), blocks, names, reason)


def ended(exchange: ResponseStream, id: str, blocks: Blocks, names: Sequence[str], reason: str) -> dict[str, Any]:
    """The whole of it."""
    status = "incomplete" if reason == "length" else "completed"
    statuses = ["completed" if block is not blocks.all[-1] else status for block in blocks.all]
    items = [item(*told) for told in zip(blocks.all, names, statuses, strict=True)]
    return response(exchange.name, id, status, items, usage_of(exchange.usage))


def response(model: str, id: str, status: str, output: list[Any], usage: Any) -> dict[str, Any]:
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": id, "object": "response", "created_at": int(time()), "status": status, "model": model,
        "output": output, "usage": usage, "error": None, "incomplete_details": cut, "instructions": None,
        "metadata": {}, "parallel_tool_calls": True, "temperature": None, "top_p": None, "tool_choice": "auto",
        "tools": [], "store": False,
    }  # fmt: skip


async def streamed(exchange: ResponseStream) -> AsyncGenerator[bytes]:
    """Event by event."""
    blocks, reason, id, names, number = Blocks(), "", new_id("resp_"), list[str](), 0

    def numbered(events: Iterator[Event]) -> Iterator[bytes]:
        nonlocal number
        for each in events:
            yield event({**each, "sequence_number": number}, each["type"])
            number += 1

    begun = response(exchange.name, id, "in_progress", [], None)
    try:
        for what in ("response.created", "response.in_progress"):
            for line in numbered(iter([{"type": what, "response": begun}])):
                yield line
        async for _, news in exchange.events():
            changes = [change for part in news.parts for change in blocks.take(part)]
            reason = news.finish_reason or reason
            for line in numbered(each for change in changes for each in events_of(change, names)):
                yield line
        for line in numbered(each for change in blocks.end() for each in events_of(change, names)):
            yield line
        made = ended(exchange, id, blocks, names, reason)
        for line in numbered(iter([{"type": f"response.{made['status']}", "response": made}])):
            yield line
    except Exception as error:
        told = openai_error(error)["error"]
        failed = {**begun, "status": "failed", "error": {**told, "code": told["code"] or "server_error"}}
        for line in numbered(iter([{"type": "response.failed", "response": failed}])):
            yield line
    finally:
        await exchange.close()


def events_of(change: Change, names: list[str]) -> Iterator[Event]:
    """What a change is in this interface; names: of the items, to which that of a new one is added."""
    what, block, text = change
    if what == OPEN:
        names.append(new_id("item_"))
        yield {
            "type": "response.output_item.added",
            "output_index": block.index,
            "item": item(block, names[-1], "in_progress", begun=False),
        }
    where = {"item_id": names[block.index], "output_index": block.index}
    inside = where if block.kind == CALL else {**where, "content_index": 0}
    kinds = {THOUGHT: "response.reasoning_text", CALL: "response.function_call_arguments"}
    prefix = kinds.get(block.kind, "response.output_text")
    more: Event = {"logprobs": []} if prefix == "response.output_text" else {}
    if what == OPEN:
        if block.kind != CALL:
            yield {"type": "response.content_part.added", **inside, "part": part_of(block, "")}
        return
    if what != CLOSE:
        yield {"type": f"{prefix}.delta", **inside, "delta": text, **more}
        return
    done = {"arguments": block.text, "name": block.name} if block.kind == CALL else {"text": block.text}
    yield {"type": f"{prefix}.done", **inside, **done, **more}
    if block.kind != CALL:
        yield {"type": "response.content_part.done", **inside, "part": part_of(block, block.text)}
    yield {
        "type": "response.output_item.done",
        "output_index": block.index,
        "item": item(block, names[block.index], "incomplete" if block.is_cut else "completed"),
    }


def part_of(block: Block, text: str) -> dict[str, Any]:
    if block.kind == THOUGHT:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def item(block: Block, id: str, status: str, begun: bool = True) -> dict[str, Any]:
    """A block; not begun: without its content."""
    if block.kind == CALL:
        arguments = block.text if begun else ""
        return {
            "type": "function_call", "id": id, "call_id": f"call_{block.id}", "name": block.name,
            "arguments": arguments, "status": status,
        }  # fmt: skip
    content = [part_of(block, block.text)] if begun else []
    if block.kind == THOUGHT:
        return {"type": "reasoning", "id": id, "summary": [], "content": content, "status": status}
    return {"type": "message", "id": id, "role": "assistant", "content": content, "status": status}


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.written,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.written,
    }
