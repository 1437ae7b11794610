"""Ollama's API for answers: /api/chat and /api/generate.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.infill import Infill
from localllm.generation.logprobs import LikelyToken
from localllm.generation.tools.tool_call_parser import ToolCall
from localllm.server.fields import RequestBody, describe_type
from localllm.server.http import (
    JsonLines,
    encode_json,
    format_ollama_error,
    make_json_response,
    read_json,
    respond_when_done,
)
from localllm.server.messages import parse_messages
from localllm.server.openai_chat import ChatChoice, format_logprobs, make_extension_headers
from localllm.server.request_options import MAX_LOGPROBS, parse_keep_alive, parse_options, parse_tools
from localllm.server.service import GenerateRequest, Prompt, ResponseStream, ServerContext
from localllm.server.worker import TokenEvent

if TYPE_CHECKING:
    from localllm.generation.constraints.constraint import Constraint

# Options of Ollama's runner, ignored: the server's command line decides them.
RUNNER_OPTIONS = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "use_mmap", "use_mlock", "num_thread",
                  "numa", "vocab_only", "f16_kv", "logits_all", "embedding_only", "num_gqa", "num_keep",
                  "penalize_newline")  # fmt: skip
LATEST = ":latest"  # Ollama's tag of a name without a tag


@frozen
class ResponseFormat:
    """Format of the responses of one of the two endpoints.

    Attributes:
        part: returns a response's fields for some text, reasoning and calls.
        has_context: whether the last response has the token ids of prompt and answer.
    """

    part: Callable[[str, str, Sequence[ToolCall]], dict[str, object]]
    has_context: bool = False


async def chat(service: ServerContext, request: Request) -> Response:
    """Answer a conversation, one JSON object per line; without messages, load or unload the model."""
    body, started = RequestBody(await read_json(request, service.limits, any_type=True)), perf_counter()
    if not body.get_list("messages"):
        return await load_model(service, body, CHAT)
    messages = parse_messages([to_openai_message(message) for message in body.require_list("messages")])
    return await respond(service, request, body, [messages], CHAT, started)


async def generate(service: ServerContext, request: Request) -> Response:
    """Answer a prompt: in the chat template, raw, or as the text before `suffix`; without a prompt, as `chat`."""
    body, started = RequestBody(await read_json(request, service.limits, any_type=True)), perf_counter()
    prompt, suffix, images = body.get_string("prompt"), body.get_string("suffix"), body.get_list("images")
    system, is_raw = body.get_string("system"), body.get_bool("raw")
    body.reject("template", "the model's own template is used; set raw to true to send a finished prompt")
    if not prompt and not images and not suffix:
        return await load_model(service, body, GENERATE)
    if suffix:
        return await respond(service, request, body, [Infill(prompt or "", suffix)], GENERATE, started)
    if is_raw:
        if system or body.get_list("context"):
            raise UsageError("raw cannot be combined with system or context: the prompt must be complete")
        return await respond(service, request, body, [prompt or ""], GENERATE_RAW, started)
    turns: list[object] = [{"role": "system", "content": system}] if system else []
    turns.append(to_openai_message({"role": "user", "content": prompt or "", "images": images}))
    return await respond(service, request, body, [parse_messages(turns)], GENERATE, started)


def parse_model_name(body: RequestBody) -> str | None:
    """Return the model's name without ":latest", which Ollama adds to names without a tag."""
    name = body.get_string("model") or body.get_string("name")
    return name.removesuffix(LATEST) if name else None


def to_openai_message(message: object) -> object:
    """Convert a message from Ollama's format to OpenAI's.

    Ollama sends images as base64 next to the text, and arguments as objects.
    """
    if not isinstance(message, Mapping):
        return message
    converted = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
    if thinking := message.get("thinking"):
        converted["reasoning_content"] = thinking
    if name := message.get("tool_name"):
        converted["name"] = name
    if images := message.get("images"):
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            raise UsageError("images must be an array of base64 strings")
        urls = (image if image.startswith("data:") else f"data:image/png;base64,{image}" for image in images)
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        converted["content"] = [*parts, {"type": "text", "text": message.get("content") or ""}]
    return converted


def parse_request(body: RequestBody, prompts: Sequence[Prompt | Infill]) -> GenerateRequest:
    """Parse the fields that both endpoints share: options, format, tools, think. Raises UsageError."""
    options = RequestBody({**(body.get_mapping("options") or {}), "think": parse_think(body.get("think"))}, "options")
    for name in RUNNER_OPTIONS:
        if options.get(name) is not None:
            body.ignore(name)
    limit = options.get_limit("num_predict")
    parsed = parse_options(options, limit, parse_format(body), parse_tools(body))
    for name in options.ignored:
        body.ignore(name)
    top = body.get_int("top_logprobs", 0, MAX_LOGPROBS)
    has_logprobs = body.get_bool("logprobs") or bool(top)
    top_logprobs, context = (top or 0) if has_logprobs else None, body.get_list("context") or ()
    return GenerateRequest(parse_model_name(body), prompts, parsed, top_logprobs=top_logprobs, context=context)


def parse_think(value: object) -> str | None:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is not None and not isinstance(value, str):
        raise UsageError(f"think must be a boolean, low, medium or high, not {describe_type(value)}")
    return value or None


def parse_format(body: RequestBody) -> "Constraint | None":
    """Parse `format`: "json", or a JSON schema. Raises UsageError."""
    from localllm.generation.constraints.constraint import make_constraint

    value = body.get("format")
    if value in (None, ""):
        return None
    if value == "json":
        return make_constraint({"type": "object"}, None, None)
    if not isinstance(value, Mapping):
        raise UsageError('format must be "json" or a JSON schema')
    return make_constraint(dict(value), None, None)


async def load_model(service: ServerContext, body: RequestBody, form: ResponseFormat) -> Response:
    """Load a model, or unload it at once if `keep_alive` is 0."""
    name, keep = parse_model_name(body), parse_keep_alive(body)
    reason = "unload" if keep == 0 else "load"
    if keep == 0:
        await service.pool.unload(name)
    else:
        async with service.pool.use(name, keep):
            pass
    head = format_head(service.pool.resolve(name).name)
    return make_json_response({**head, **form.part("", "", ()), "done": True, "done_reason": reason})


async def respond(
    service: ServerContext,
    request: Request,
    body: RequestBody,
    prompts: Sequence[Prompt | Infill],
    form: ResponseFormat,
    started: float,
) -> Response:
    is_streaming = body.get_optional_bool("stream") is not False
    query = await asyncio.to_thread(parse_request, body, prompts)
    stream = await service.start(query, parse_keep_alive(body))
    answer = OllamaAnswer(stream, query, form, started, perf_counter() - started)
    headers = make_extension_headers(body, stream)
    if is_streaming:
        return JsonLines(stream_lines(answer), service.limits, headers, stream.close)
    return await respond_when_done(request, complete_answer(answer), headers, stream.close)


class OllamaAnswer:
    """An answer being generated, formatted for Ollama's clients."""

    def __init__(
        self, stream: ResponseStream, query: GenerateRequest, form: ResponseFormat, started: float, load_seconds: float
    ):
        self.stream = stream
        self._query, self._form, self._started, self._load_seconds = query, form, started, load_seconds
        self._choice = ChatChoice()

    async def stream_parts(self) -> AsyncGenerator[dict[str, object]]:
        """Yield a response for each chunk of text or reasoning, one with all calls, and a last one without text.

        Raises LocalllmError.
        """
        async with aclosing(self.stream.stream_events()) as events:
            async for _, event in events:
                lengths_before = len(self._choice.text), len(self._choice.thinking)
                self._choice.take(event)
                text, thinking = (
                    "".join(self._choice.text[lengths_before[0] :]),
                    "".join(self._choice.thinking[lengths_before[1] :]),
                )
                if text or thinking or event.logprob:
                    yield self._format_response(text, thinking, event=event)
        if calls := self._complete_calls():
            yield self._format_response("", "", calls)
        yield self._build_last("", "", ())

    def build_response(self) -> dict[str, object]:
        choice = self._choice
        last = self._build_last("".join(choice.text), "".join(choice.thinking), self._complete_calls())
        return last | self._format_logprobs(choice.logprobs)

    def _complete_calls(self) -> list[ToolCall]:
        return [call for call in self._choice.calls if call.arguments is not None]

    def _format_response(
        self, text: str, thinking: str, calls: Sequence[ToolCall] = (), event: TokenEvent | None = None
    ) -> dict[str, object]:
        tokens = [event.logprob] if event and event.logprob else []
        head = format_head(self.stream.name)
        return {**head, **self._form.part(text, thinking, calls), "done": False, **self._format_logprobs(tokens)}

    def _format_logprobs(self, tokens: list[LikelyToken]) -> dict[str, object]:
        formatted = format_logprobs(tokens, self.stream, self._query) if tokens else None
        return {"logprobs": formatted["content"]} if formatted else {}

    def _build_last(self, text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, object]:
        """Return the last response: finish reason, token counts, and durations in nanoseconds."""
        completion = self.stream.get_completion()
        return {
            **format_head(self.stream.name),
            **self._form.part(text, thinking, calls),
            "done": True,
            "done_reason": self._choice.finish_reason or "length",
            **({"context": [*completion.ids]} if self._form.has_context else {}),
            "total_duration": to_nanoseconds(perf_counter() - self._started),
            "load_duration": to_nanoseconds(self._load_seconds),
            "prompt_eval_count": completion.prompt_tokens,
            "prompt_eval_duration": to_nanoseconds(completion.prefill_s),
            "eval_count": completion.completion_tokens,
            "eval_duration": to_nanoseconds(completion.decode_s),
        }


def format_head(name: str) -> dict[str, object]:
    """Return the fields that begin each object of a response."""
    return {"model": name, "created_at": format_timestamp(datetime.now(UTC))}


def format_timestamp(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def to_nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def format_chat_part(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"index": index, "name": call.name, "arguments": call.arguments}}
            for index, call in enumerate(calls)
        ]
    return {"message": message}


def format_generate_part(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, object]:
    return {"response": text, **({"thinking": thinking} if thinking else {})}


CHAT, GENERATE, GENERATE_RAW = (
    ResponseFormat(format_chat_part),
    ResponseFormat(format_generate_part, has_context=True),
    ResponseFormat(format_generate_part),
)


async def complete_answer(answer: OllamaAnswer) -> dict[str, object]:
    try:
        async for _ in answer.stream_parts():
            pass
        return answer.build_response()
    finally:
        await answer.stream.close()


async def stream_lines(answer: OllamaAnswer) -> AsyncGenerator[bytes]:
    """Yield the responses as lines of JSON; an error becomes the last line."""
    try:
        async for part in answer.stream_parts():
            yield encode_json(part) + b"\n"
    except Exception as error:
        yield encode_json(format_ollama_error(error)) + b"\n"
    finally:
        await answer.stream.close()
