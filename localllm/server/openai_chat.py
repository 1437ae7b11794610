"""OpenAI's interface: /v1/chat/completions and /v1/models (https://platform.openai.com/docs/api-reference)."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.reasoning import THOUGHT, TextPart
from localllm.generation.tools.tool_call import ToolCall, take
from localllm.generation.tools.tool_call_parser import ARGUMENTS, CALL
from localllm.server.fields import Body
from localllm.server.http import EventStream, answered_whole, event, json_response, openai_error, read_json
from localllm.server.ids import new_id
from localllm.server.messages import conversation
from localllm.server.request_options import (
    MOST_ANSWERS,
    MOST_LIKELY,
    constraint_of_format,
    continuing,
    options_of,
    tools_of,
)
from localllm.server.response_stream import LikelyToken, TokenEvent, TokenLogprob
from localllm.server.service import GenerateRequest, ResponseStream, Service, Usage
from localllm.text.tokenizer import Tokenizer

CHAT = "chatcmpl", "chat.completion"
DONE = b"data: [DONE]\n\n"
DROPPED = "X-Localllm-Dropped-Turns"
IGNORED = "X-Localllm-Ignored"  # a header with the names of fields that say nothing here


@dataclass
class Choice:
    """One answer, as it is told so far."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[LikelyToken] = field(default_factory=list)
    finish_reason: str = ""

    def take(self, told: TokenEvent) -> None:
        for part in told.parts:
            if not take(self.calls, part):
                (self.thinking if part.kind == THOUGHT else self.text).append(part.text)
        if told.logprob:
            self.logprobs.append(told.logprob)
        self.finish_reason = told.finish_reason or self.finish_reason

    def message(self) -> dict[str, Any]:
        """As a whole."""
        more: dict[str, Any] = {"reasoning_content": "".join(self.thinking)} if self.thinking else {}
        if self.calls:
            more["tool_calls"] = [call.told() for call in self.calls]
        text = "".join(self.text)
        return {"role": "assistant", "content": text if text or not self.calls else None, **more}

    @property
    def reason(self) -> str:
        """Why it ended, as OpenAI has it."""
        return "tool_calls" if self.calls and self.finish_reason == "stop" else self.finish_reason or "length"


async def chat_completions(service: Service, request: Request) -> Response:
    """Answers to a conversation."""
    body = Body(await read_json(request, service.limits))
    stream, options = body.flag("stream"), body.object("stream_options")
    wants_usage = options is not None and options.flag("include_usage")
    question = chat_question(body)
    exchange = await service.exchange(question)
    headers = ignored(body, exchange)

    def told(choice: Choice) -> dict[str, Any]:
        logprobs = logprobs_of(choice.logprobs, exchange, question)
        return {"message": choice.message(), "logprobs": logprobs, "finish_reason": choice.reason}

    if stream:
        return EventStream(streamed(exchange, question, wants_usage), service.limits, headers, exchange.close)
    return await answered_whole(request, whole(exchange, question, CHAT, told), headers, exchange.close)


def chat_question(body: Body) -> GenerateRequest:
    """Raises UsageError."""
    for name, reason in (("functions", "use tools"), ("audio", "there is text only")):
        body.refuse(name, reason)
    most_likely = body.whole("top_logprobs", 0, MOST_LIKELY)
    wants = body.flag("logprobs") or bool(most_likely)
    max_tokens = body.whole("max_completion_tokens", 1)
    if max_tokens is None:
        max_tokens = body.whole("max_tokens", 1)
    messages = conversation(body.needed_items("messages"))
    options = continuing(body, options_of(body, max_tokens, constraint_of_format(body), tools_of(body)), messages)
    n = body.whole("n", 1, MOST_ANSWERS) or 1
    return GenerateRequest(body.text("model"), [messages], options, n, (most_likely or 0) if wants else None)


def ignored(body: Body, exchange: ResponseStream | None = None) -> dict[str, str]:
    """Headers that tell which fields of a request mean nothing here, and how many turns were left out."""
    names = [name[:40] for name in body.ignored if name.isascii() and name.isprintable() and "," not in name]
    found = {IGNORED: ", ".join(names[:20])} if names else {}
    return {**found, DROPPED: str(exchange.dropped)} if exchange and exchange.dropped else found


async def whole(
    exchange: ResponseStream, question: GenerateRequest, kind: tuple[str, str], tell: Callable[[Choice], dict[str, Any]]
) -> dict[str, Any]:
    """All at once.  kind: of the object, behind the beginning of its id.  tell: what it has of each choice."""
    choices = [Choice() for _ in range(question.n * len(question.prompts))]
    try:
        async for number, told in exchange.events():
            choices[number].take(told)
    finally:
        await exchange.close()
    return {
        **head(exchange, *kind),
        "choices": [{"index": index, **tell(choice)} for index, choice in enumerate(choices)],
        "usage": usage_of(exchange.usage),
    }


async def streamed(exchange: ResponseStream, question: GenerateRequest, wants_usage: bool) -> AsyncGenerator[bytes]:
    """Chunk by chunk."""
    same = head(exchange, "chatcmpl", "chat.completion.chunk")
    usage: dict[str, Any] = {"usage": None} if wants_usage else {}

    def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**same, "choices": [choice], **usage})

    choices = dict[int, Choice]()
    try:
        async for number, told in exchange.events():
            if number not in choices:
                choices[number] = Choice()
                yield chunk(number, {"role": "assistant", "content": ""})
            logprobs = logprobs_of([told.logprob], exchange, question) if told.logprob else None
            for part in told.parts:
                yield chunk(number, delta_of(part, choices[number]), None, logprobs)
                logprobs = None
            if logprobs:
                yield chunk(number, {}, None, logprobs)
            if told.finish_reason:
                choices[number].finish_reason = told.finish_reason
                yield chunk(number, {}, choices[number].reason)
        if wants_usage:
            yield event({**same, "choices": [], "usage": usage_of(exchange.usage)})
        yield DONE
    except Exception as error:
        yield event(openai_error(error))
    finally:
        await exchange.close()


def delta_of(part: TextPart, choice: Choice) -> dict[str, Any]:
    """What a part adds to an answer, of which the calls so far are known."""
    if part.kind == CALL:
        take(choice.calls, part)
        return {"tool_calls": [{"index": len(choice.calls) - 1, **choice.calls[-1].told(), "function": {
            "name": part.text, "arguments": ""}}]}  # fmt: skip
    if part.kind == ARGUMENTS:
        return {"tool_calls": [{"index": len(choice.calls) - 1, "function": {"arguments": part.text}}]}
    return {"reasoning_content" if part.kind == THOUGHT else "content": part.text}


def head(exchange: ResponseStream, prefix: str, kind: str) -> dict[str, Any]:
    """What all objects of an answer begin with."""
    return {
        "id": new_id(f"{prefix}-"),
        "object": kind,
        "created": int(time()),
        "model": exchange.name,
        "system_fingerprint": None,
    }


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.written,
        "total_tokens": usage.prompt + usage.written,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.thought},
    }


def logprobs_of(
    chosen: list[LikelyToken], exchange: ResponseStream, question: GenerateRequest
) -> dict[str, Any] | None:
    """As `logprobs` of a choice; None if nobody asked."""
    if question.most_likely is None:
        return None
    tokenizer = exchange.model.tokenizer
    content = [
        {**entry(one, tokenizer), "top_logprobs": [entry(other, tokenizer) for other in likeliest]}
        for one, likeliest in chosen
    ]
    return {"content": content, "refusal": None}


def entry(one: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token with its text, which may be part of a character, and its bytes."""
    data = bytes_of(one.token, tokenizer)
    return {"token": data.decode(errors="replace"), "logprob": told_logprob(one), "bytes": [*data]}


def bytes_of(token: int, tokenizer: Tokenizer) -> bytes:
    return tokenizer.token_bytes(token, special=True) if token < tokenizer.vocab_size else b""


def told_logprob(one: TokenLogprob) -> float:
    """JSON has no infinity: OpenAI tells -9999 for what cannot be."""
    return max(one.logprob, -9999.0)


async def models(service: Service, request: Request) -> Response:
    """All that can be asked for."""
    data = [
        {"id": book.name, "object": "model", "created": book.created, "owned_by": "localllm"}
        for book in service.shelf.books.values()
    ]
    return json_response({"object": "list", "data": data})


async def one_model(service: Service, request: Request) -> Response:
    """One of them."""
    book = service.shelf.named(request.path_params["name"])
    return json_response({"id": book.name, "object": "model", "created": book.created, "owned_by": "localllm"})
