"""OpenAI's API: /v1/chat/completions and /v1/models.

Source: https://platform.openai.com/docs/api-reference.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.generation.logprobs import LikelyToken, TokenLogprob
from localllm.generation.reasoning import ARGUMENTS, CALL, REASONING, TextPart
from localllm.generation.tools.tool_call_parser import ToolCall, append_part
from localllm.server import http, request_options
from localllm.server.fields import RequestBody
from localllm.server.messages import parse_messages
from localllm.server.model_pool import ModelEntry
from localllm.server.service import GenerateRequest, ResponseStream, ServerContext, TokenUsage
from localllm.server.worker import TokenEvent
from localllm.text.tokenizer import Tokenizer

CHAT_KIND = "chatcmpl", "chat.completion"
DONE = b"data: [DONE]\n\n"
DROPPED_HEADER = "X-Localllm-Dropped-Turns"
VERSION_HEADER = "anthropic-version"  # sent by all of Anthropic's clients
IGNORED_HEADER = "X-Localllm-Ignored"  # a header with the names of ignored fields


@dataclass
class ChatChoice:
    """One choice of a response, as far as it has been generated."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[LikelyToken] = field(default_factory=list)
    finish_reason: str = ""

    def take(self, token_event: TokenEvent) -> None:
        for part in token_event.parts:
            if not append_part(self.calls, part):
                (self.thinking if part.kind == REASONING else self.text).append(part.text)
        if token_event.logprob:
            self.logprobs.append(token_event.logprob)
        self.finish_reason = token_event.finish_reason or self.finish_reason

    def build_message(self) -> dict[str, object]:
        reasoning: dict[str, object] = {"reasoning_content": "".join(self.thinking)} if self.thinking else {}
        if self.calls:
            reasoning["tool_calls"] = [call.to_message() for call in self.calls]
        text = "".join(self.text)
        return {"role": "assistant", "content": text if text or not self.calls else None, **reasoning}

    @property
    def reason(self) -> str:
        """The finish_reason in OpenAI's terms."""
        return "tool_calls" if self.calls and self.finish_reason == "stop" else self.finish_reason or "length"


async def create_chat_completion(service: ServerContext, request: Request) -> Response:
    body = RequestBody(await http.read_json(request, service.limits))
    is_streaming, options = body.get_bool("stream"), body.get_object("stream_options")
    wants_usage = options is not None and options.get_bool("include_usage")
    query = await asyncio.to_thread(parse_request, body)
    query = replace(query, wants_progress=request_options.parse_progress(body, is_streaming))
    stream = await service.start(query, request_options.parse_keep_alive(body))
    headers = make_extension_headers(body, stream)

    def format_choice(index: int, choice: ChatChoice) -> dict[str, object]:
        logprobs = format_logprobs(choice.logprobs, stream, query)
        return {"index": index, "message": choice.build_message(), "logprobs": logprobs, "finish_reason": choice.reason}

    if is_streaming:
        chunks = stream_chunks(stream, query, wants_usage)
        return http.EventStream(chunks, service.limits, headers, stream.close, stream.describe_progress)
    return await http.respond_when_done(
        request, complete_response(stream, query, CHAT_KIND, format_choice), headers, stream.close
    )


def parse_request(body: RequestBody) -> GenerateRequest:
    for name, reason in (("functions", "use tools"), ("audio", "answers are text only; leave it out")):
        body.reject(name, reason)
    top_logprobs = body.get_int("top_logprobs", 0, request_options.MAX_LOGPROBS)
    has_logprobs = body.get_bool("logprobs") or bool(top_logprobs)
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    messages = parse_messages(body.require_list("messages"))
    options = request_options.apply_continuation(
        body,
        request_options.parse_options(
            body, body.get_limit(name), request_options.parse_constraint(body), request_options.parse_tools(body)
        ),
        messages,
    )
    n = body.get_int("n", 1, request_options.MAX_CHOICES) or 1
    return GenerateRequest(
        body.get_string("model"), [messages], options, n, (top_logprobs or 0) if has_logprobs else None
    )


def make_extension_headers(body: RequestBody, stream: ResponseStream | None = None) -> dict[str, str]:
    names = [name[:40] for name in body.ignored if name.isascii() and name.isprintable() and "," not in name]
    headers = {IGNORED_HEADER: ", ".join(names[:20])} if names else {}
    return {**headers, DROPPED_HEADER: str(stream.dropped)} if stream and stream.dropped else headers


async def complete_response(
    stream: ResponseStream,
    query: GenerateRequest,
    kind: tuple[str, str],
    format_choice: Callable[[int, ChatChoice], Mapping[str, object]],
) -> dict[str, object]:
    """Collect the complete response.

    kind: the prefix of its id, and its object type.  format_choice: returns an item of `choices`.
    """
    choices = [ChatChoice() for _ in range(query.n * len(query.prompts))]
    try:
        async for number, token_event in stream.stream_events():
            choices[number].take(token_event)
    finally:
        await stream.close()
    return {
        **format_head(stream, *kind),
        "choices": [format_choice(index, choice) for index, choice in enumerate(choices)],
        "usage": format_usage(stream.usage),
        "timings": stream.format_timings(),
    }


def stream_chunks(stream: ResponseStream, query: GenerateRequest, wants_usage: bool) -> AsyncGenerator[bytes]:
    return encode_chunks(stream, iter_chunks(stream, query, wants_usage))


async def encode_chunks(stream: ResponseStream, chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    """Yield chunks as server-sent events, an error instead of the rest; the last chunk gets the timings."""
    last: dict[str, Any] | None = None
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                if last:
                    yield http.format_event(last)
                is_end = not chunk["choices"] or bool(chunk["choices"][0]["finish_reason"])
                last = chunk if is_end else None
                if not is_end:
                    yield http.format_event(chunk)
        if last:
            yield http.format_event({**last, "timings": stream.format_timings()})
        yield DONE
    except Exception as error:
        if last:
            yield http.format_event(last)
        yield http.format_event(http.format_openai_error(error))
    finally:
        await stream.close()


def format_progress(event: TokenEvent) -> dict[str, object]:
    """Return the field with the progress of the prompt, if the event has any."""
    return {"prompt_progress": event.progress._asdict()} if event.progress else {}


async def iter_chunks(
    stream: ResponseStream, query: GenerateRequest, wants_usage: bool
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the chunks of a chat completion. Raises LocalllmError."""
    base = format_head(stream, "chatcmpl", "chat.completion.chunk")
    usage: dict[str, object] = {"usage": None} if wants_usage else {}

    def format_chunk(
        index: int, delta: dict[str, object], finish_reason: str | None = None, logprobs: object = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**base, "choices": [choice], **usage}

    choices = dict[int, ChatChoice]()
    async with aclosing(stream.stream_events()) as events:
        async for number, token_event in events:
            if token_event.progress:
                yield format_chunk(number, {}) | format_progress(token_event)
                continue
            if number not in choices:
                choices[number] = ChatChoice()
                yield format_chunk(number, {"role": "assistant", "content": ""})
            logprobs = format_logprobs([token_event.logprob], stream, query) if token_event.logprob else None
            for part in token_event.parts:
                yield format_chunk(number, format_delta(part, choices[number]), None, logprobs)
                logprobs = None
            if logprobs:
                yield format_chunk(number, {}, None, logprobs)
            if token_event.finish_reason:
                choices[number].finish_reason = token_event.finish_reason
                yield format_chunk(number, {}, choices[number].reason)
    for number in range(query.n * len(query.prompts)):
        if number not in choices:  # max_tokens is 0
            yield format_chunk(number, {"role": "assistant", "content": ""}, "length")
    if wants_usage:
        yield {**base, "choices": [], "usage": format_usage(stream.usage)}


def format_delta(part: TextPart, choice: ChatChoice) -> dict[str, object]:
    """Format a part as a delta; choice: accumulates the tool calls so far."""
    if part.kind == CALL:
        append_part(choice.calls, part)
        return {"tool_calls": [{"index": len(choice.calls) - 1, **choice.calls[-1].to_message(), "function": {
            "name": part.text, "arguments": ""}}]}  # fmt: skip
    if part.kind == ARGUMENTS:
        return {"tool_calls": [{"index": len(choice.calls) - 1, "function": {"arguments": part.text}}]}
    return {"reasoning_content" if part.kind == REASONING else "content": part.text}


def format_head(stream: ResponseStream, prefix: str, kind: str) -> dict[str, object]:
    return {
        "id": http.generate_id(f"{prefix}-"), "object": kind, "created": int(time()), "model": stream.name,
        "system_fingerprint": None,
    }  # fmt: skip


def format_usage(usage: TokenUsage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.written,
        "total_tokens": usage.prompt + usage.written,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.thought},
    }


def format_logprobs(
    tokens: list[LikelyToken], stream: ResponseStream, query: GenerateRequest
) -> dict[str, object] | None:
    """Format the log probabilities of a choice, or return None if they were not requested."""
    if query.top_logprobs is None:
        return None
    tokenizer = stream.model.tokenizer
    content = [
        {
            **format_logprob(token, tokenizer),
            "top_logprobs": [format_logprob(alternative, tokenizer) for alternative in likeliest],
        }
        for token, likeliest in tokens
    ]
    return {"content": content, "refusal": None}


def format_logprob(token: TokenLogprob, tokenizer: Tokenizer) -> dict[str, object]:
    """Format a token with its bytes, and their text, which may be an incomplete character."""
    data = get_token_bytes(token.token, tokenizer)
    return {"token": data.decode(errors="replace"), "logprob": clip_logprob(token), "bytes": [*data]}


def get_token_bytes(token: int, tokenizer: Tokenizer) -> bytes:
    return tokenizer.token_bytes(token, special=True) if token < tokenizer.vocab_size else b""


def clip_logprob(token: TokenLogprob) -> float:
    """Clip a log probability at -9999, as OpenAI does, since JSON has no infinity."""
    return max(token.logprob, -9999.0)


async def list_models(service: ServerContext, request: Request) -> Response:
    service.pool.refresh()
    entries = service.pool.entries.values()
    if VERSION_HEADER in request.headers:
        data = [format_anthropic_model(entry) for entry in entries]
        page = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False} if data else {}
        return http.make_json_response({"data": data, **page})
    return http.make_json_response({"object": "list", "data": [format_openai_model(entry) for entry in entries]})


async def retrieve_model(service: ServerContext, request: Request) -> Response:
    entry = service.pool.get(request.path_params["name"])
    return http.make_json_response(
        (format_anthropic_model if VERSION_HEADER in request.headers else format_openai_model)(entry)
    )


def format_openai_model(entry: ModelEntry) -> dict[str, object]:
    """Describe a model in the format of https://platform.openai.com/docs/api-reference/models."""
    return {"id": entry.name, "object": "model", "created": entry.created, "owned_by": "localllm"}


def format_anthropic_model(entry: ModelEntry) -> dict[str, object]:
    """Describe a model in the format of https://docs.anthropic.com/en/api/models-list."""
    created = datetime.fromtimestamp(entry.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": entry.name, "display_name": entry.name, "created_at": created}
