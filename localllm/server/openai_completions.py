"""OpenAI's legacy API /v1/completions: text completion without a chat template.

`echo` repeats the prompt before the completion, with its log probabilities. Evaluation programs
(lm-evaluation-harness) score text with it.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.infill import Infill
from localllm.generation.logprobs import LikelyToken, TokenLogprob, compute_prompt_logprobs, compute_token_logprobs
from localllm.server import openai_chat
from localllm.server.fields import RequestBody
from localllm.server.http import EventStream, read_json, respond_when_done
from localllm.server.request_options import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    parse_constraint,
    parse_keep_alive,
    parse_options,
    parse_progress,
)
from localllm.server.service import GenerateRequest, Prompt, ResponseStream, ServerContext

if TYPE_CHECKING:
    from localllm.server.service import ResponseStream


COMPLETION_KIND = "cmpl", "text_completion"
DEFAULT_MAX_TOKENS = 16  # the default in OpenAI's documentation
MAX_PROMPTS = 64


async def create_completion(service: ServerContext, request: Request) -> Response:
    body = RequestBody(await read_json(request, service.limits))
    is_streaming, options = body.get_bool("stream"), body.get_object("stream_options")
    wants_usage = options is not None and options.get_bool("include_usage")
    query, has_echo = await asyncio.to_thread(parse_request, body), body.get_bool("echo")
    query = replace(query, wants_progress=parse_progress(body, is_streaming))
    stream = await service.start(query, parse_keep_alive(body))
    headers = openai_chat.make_extension_headers(body)
    if is_streaming:
        chunks = stream_chunks(stream, query, wants_usage, has_echo)
        return EventStream(chunks, service.limits, headers, stream.close, stream.describe_progress)
    return await respond_when_done(request, complete_choices(stream, query, has_echo), headers, stream.close)


@frozen
class EchoedPrompt:
    """A prompt that a response repeats.

    Attributes:
        text: the prompt; token ids are decoded, including control tokens.
        tokens: its tokens with log probabilities, without the BOS token that is added to a prompt given as a string.
        has_first: whether the first of them begins the sequence, so that it has no probability.
        end: the likeliest end token after the prompt; None if no log probabilities are requested.
    """

    text: str = ""
    tokens: tuple[LikelyToken, ...] = ()
    has_first: bool = False
    end: LikelyToken | None = None


async def echo_prompts(stream: ResponseStream, top_logprobs: int | None) -> list[EchoedPrompt]:
    """Return the prompts of a request.

    top_logprobs: count of alternatives for each token; None: no log probabilities. Log probabilities need a second
    prefill of each prompt, in short runs with 16-bit activations. Raises the errors of Sequence.append.
    """
    tokenizer, prompts = stream.model.tokenizer, list[EchoedPrompt]()
    for prompt, ids in stream.list_prompts():
        text = prompt if isinstance(prompt, str) else tokenizer.decode(ids, special=True)
        if top_logprobs is None:
            prompts.append(EchoedPrompt(text))
            continue
        tokens, row = await asyncio.to_thread(compute_prompt_logprobs, stream.model.sequence(), ids, top_logprobs)
        has_bos = isinstance(prompt, str) and ids[:1] == [tokenizer.bos_id]
        first = [] if has_bos or not ids else [LikelyToken(TokenLogprob(ids[0], 0.0), ())]
        end = max(tokenizer.end_ids, key=row.__getitem__, default=None) if len(row) else None
        likeliest_end = None if end is None else compute_token_logprobs(row, end, top_logprobs)
        prompts.append(EchoedPrompt(text, (*first, *tokens), bool(first), likeliest_end))
    return prompts


class Logprobs(TypedDict):
    """Log probabilities of a choice; each list has one item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None


async def complete_choices(stream: ResponseStream, query: GenerateRequest, has_echo: bool) -> dict[str, object]:
    prompts = await echo_prompts(stream, query.top_logprobs) if has_echo else []

    def format_choice(index: int, choice: openai_chat.ChatChoice) -> TextChoice:
        formatted: TextChoice = {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": format_logprobs(choice.logprobs, stream, query),
            "finish_reason": choice.finish_reason or "length",
        }
        if has_echo:
            add_prompt(formatted, prompts[index // query.n], stream, query)
        return formatted

    return await openai_chat.complete_response(stream, query, COMPLETION_KIND, format_choice)


def add_prompt(choice: TextChoice, prompt: EchoedPrompt, stream: ResponseStream, query: GenerateRequest) -> None:
    """Prepend a prompt and its log probabilities to a choice, in place."""
    tokens = [*prompt.tokens]
    if choice["finish_reason"] == "stop" and not choice["text"] and prompt.end:  # the end token counts as generated
        tokens.append(prompt.end)
    choice["text"] = prompt.text + choice["text"]
    logprobs, generated = format_logprobs(tokens, stream, query), choice["logprobs"]
    if logprobs is None or generated is None:
        return
    if prompt.has_first:
        logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
    length = sum(map(len, logprobs["tokens"]))
    choice["logprobs"] = {
        "tokens": logprobs["tokens"] + generated["tokens"],
        "token_logprobs": logprobs["token_logprobs"] + generated["token_logprobs"],
        "top_logprobs": logprobs["top_logprobs"] + generated["top_logprobs"],
        "text_offset": logprobs["text_offset"] + [length + offset for offset in generated["text_offset"]],
    }


def parse_request(body: RequestBody) -> GenerateRequest:
    n = body.get_int("n", 1, MAX_CHOICES) or 1
    if (best := body.get_int("best_of")) not in (None, n):
        raise UsageError(f"best_of must be equal to n, {n}, not {best}")
    max_tokens = DEFAULT_MAX_TOKENS if body.get("max_tokens") is None else body.get_limit("max_tokens")
    options = parse_options(body, max_tokens, parse_constraint(body))
    suffix = body.get_string("suffix")
    if suffix and body.get_bool("echo"):
        raise UsageError("echo cannot be combined with suffix")
    prompts = add_suffix(parse_prompts(body.get("prompt")), suffix)
    return GenerateRequest(body.get_string("model"), prompts, options, n, parse_logprobs(body))


def parse_logprobs(body: RequestBody) -> int | None:
    """Parse the count of alternatives per token; true, which chat clients send, means 0. Raises UsageError."""
    if isinstance(value := body.get("logprobs"), bool):
        return 0 if value else None
    return body.get_int("logprobs", 0, MAX_LOGPROBS)


def parse_prompts(value: object) -> list[Prompt]:
    """Parse a string, token ids, or an array of either; a missing prompt is "". Raises UsageError."""
    if value is None or isinstance(value, str):
        return [value or ""]
    if not isinstance(value, list) or not value:
        raise UsageError("prompt must be a string, an array of token ids, or an array of these")
    if all(is_token(item) for item in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise UsageError(f"prompt must have at most {MAX_PROMPTS} items, not {len(value)}")
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, list) and item and all(map(is_token, item))):
            raise UsageError("prompt must be a string, an array of token ids, or an array of these")
    return value


def add_suffix(prompts: list[Prompt], suffix: str | None) -> Sequence[Prompt | Infill]:
    """Convert the prompts to fill-in-the-middle prompts if there is a suffix.

    Raises UsageError for token ids with a suffix.
    """
    if not suffix:
        return prompts
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise UsageError("suffix: the prompt must be a string, not token ids")
    return [Infill(prompt, suffix) for prompt in prompts if isinstance(prompt, str)]


def is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def stream_chunks(
    stream: ResponseStream, query: GenerateRequest, wants_usage: bool, has_echo: bool = False
) -> AsyncGenerator[bytes]:
    return openai_chat.encode_chunks(stream, iter_chunks(stream, query, wants_usage, has_echo))


async def iter_chunks(
    stream: ResponseStream, query: GenerateRequest, wants_usage: bool, has_echo: bool = False
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the chunks of a text completion. Raises LocalllmError."""
    base, usage = openai_chat.format_head(stream, *COMPLETION_KIND), {"usage": None} if wants_usage else {}
    unfinished = dict.fromkeys(range(query.n * len(query.prompts)))
    lengths, has_text = Counter[int](), set[int]()

    def format_chunk(index: int, text: str, tokens: list[LikelyToken], reason: str | None) -> dict[str, Any]:
        logprobs = format_logprobs(tokens, stream, query, lengths[index])
        lengths[index] += sum(map(len, logprobs["tokens"])) if logprobs else 0
        choice: TextChoice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**base, "choices": [choice], **usage}

    prompts = await echo_prompts(stream, query.top_logprobs) if has_echo else []
    for index in unfinished if has_echo else ():
        logprobs = format_logprobs([], stream, query)
        empty: TextChoice = {"index": index, "text": "", "logprobs": logprobs, "finish_reason": None}
        add_prompt(empty, prompts[index // query.n], stream, query)
        lengths[index] = sum(map(len, empty["logprobs"]["tokens"])) if empty["logprobs"] else 0
        yield {**base, "choices": [empty], **usage}
    async with aclosing(stream.stream_events()) as events:
        async for index, token_event in events:
            if token_event.progress:
                yield format_chunk(index, "", [], None) | openai_chat.format_progress(token_event)
                continue
            text, reason = "".join(text for _, text in token_event.parts), token_event.finish_reason or None
            tokens = [token_event.logprob] if token_event.logprob else []
            if text:
                has_text.add(index)
            if reason:
                del unfinished[index]
            if reason == "stop" and has_echo and index not in has_text and (end := prompts[index // query.n].end):
                tokens.append(end)  # as in `add_prompt`
            if text or tokens or reason:
                yield format_chunk(index, text, tokens, reason)
    for index in unfinished:  # max_tokens is 0
        yield format_chunk(index, "", [], "length")
    if wants_usage:
        yield {**base, "choices": [], "usage": openai_chat.format_usage(stream.usage)}


def format_logprobs(
    tokens: list[LikelyToken], stream: ResponseStream, query: GenerateRequest, offset: int = 0
) -> Logprobs | None:
    """Format the log probabilities of a choice, or return None if they were not requested.

    offset: count of characters before the tokens.
    """
    if query.top_logprobs is None:
        return None
    tokenizer, offsets = stream.model.tokenizer, list[int]()
    texts = [openai_chat.get_token_bytes(token.chosen.token, tokenizer).decode(errors="replace") for token in tokens]
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [openai_chat.clip_logprob(token.chosen) for token in tokens],
        "top_logprobs": [
            {
                openai_chat.get_token_bytes(alternative.token, tokenizer).decode(
                    errors="replace"
                ): openai_chat.clip_logprob(alternative)
                for alternative in token.likeliest
            }
            for token in tokens
        ],
        "text_offset": offsets,
    }
