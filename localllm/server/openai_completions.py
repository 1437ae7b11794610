"""OpenAI's older interface, /v1/completions: texts that go on, without a chat template."""

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.server.fields import Body
from localllm.server.http import EventStream, answered_whole, event, openai_error, read_json
from localllm.server.openai_chat import DONE, Choice, bytes_of, head, ignored, told_logprob, usage_of, whole
from localllm.server.request_options import MOST_ANSWERS, MOST_LIKELY, constraint_of_format, options_of
from localllm.server.response_stream import LikelyToken
from localllm.server.service import Asked, GenerateRequest, ResponseStream, Service

TEXT = "cmpl", "text_completion"
USUAL_TOKENS = 16  # of an answer, as OpenAI's documentation says
MOST_PROMPTS = 64


async def completions(service: Service, request: Request) -> Response:
    """Texts that go on with others."""
    body = Body(await read_json(request, service.limits))
    stream, options = body.flag("stream"), body.object("stream_options")
    wants_usage = options is not None and options.flag("include_usage")
    question = completion_question(body)
    exchange = await service.exchange(question)
    headers = ignored(body)

    def told(choice: Choice) -> dict[str, Any]:
        logprobs = logprobs_of(choice.logprobs, exchange, question)
        return {"text": "".join(choice.text), "logprobs": logprobs, "finish_reason": choice.finish_reason or "length"}

    if stream:
        return EventStream(streamed(exchange, question, wants_usage), service.limits, headers, exchange.close)
    return await answered_whole(request, whole(exchange, question, TEXT, told), headers, exchange.close)


def completion_question(body: Body) -> GenerateRequest:
    """Raises UsageError."""
    body.refuse("suffix", "put the model's own marks for filling in into the prompt")
    body.refuse("echo", "the prompt is known")
    n = body.whole("n", 1, MOST_ANSWERS) or 1
    if (best := body.whole("best_of")) not in (None, n):
        raise UsageError(f"best_of should be n, which is {n}, not {best}")
    max_tokens = body.whole("max_tokens", 0)
    options = options_of(body, USUAL_TOKENS if max_tokens is None else max_tokens, constraint_of_format(body))
    prompts = prompts_of(body.get("prompt"))
    return GenerateRequest(body.text("model"), prompts, options, n, body.whole("logprobs", 0, MOST_LIKELY))


def prompts_of(given: Any) -> list[Asked]:
    """A text, token ids, or a list of either. Raises UsageError."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise UsageError("prompt should be a text, a list of token ids, or a list of these")
    if all(is_token(each) for each in given):
        return [given]
    if len(given) > MOST_PROMPTS:
        raise UsageError(f"prompt should have at most {MOST_PROMPTS} texts, not {len(given)}")
    for each in given:
        if not isinstance(each, str) and not (isinstance(each, list) and each and all(map(is_token, each))):
            raise UsageError("prompt should be a text, a list of token ids, or a list of these")
    return given


def is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


async def streamed(exchange: ResponseStream, question: GenerateRequest, wants_usage: bool) -> AsyncGenerator[bytes]:
    """Chunk by chunk."""
    same, usage = head(exchange, *TEXT), {"usage": None} if wants_usage else {}
    try:
        async for number, told in exchange.events():
            text = "".join(text for _, text in told.parts)
            if not (text or told.logprob or told.finish_reason):
                continue
            logprobs = logprobs_of([told.logprob] if told.logprob else [], exchange, question)
            choice = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": told.finish_reason or None}
            yield event({**same, "choices": [choice], **usage})
        if wants_usage:
            yield event({**same, "choices": [], "usage": usage_of(exchange.usage)})
        yield DONE
    except Exception as error:
        yield event(openai_error(error))
    finally:
        await exchange.close()


def logprobs_of(
    chosen: list[LikelyToken], exchange: ResponseStream, question: GenerateRequest
) -> dict[str, Any] | None:
    """As `logprobs` of a choice; None if nobody asked."""
    if question.most_likely is None:
        return None
    tokenizer, offset, offsets = exchange.model.tokenizer, 0, list[int]()
    texts = [bytes_of(one.chosen.token, tokenizer).decode(errors="replace") for one in chosen]
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [told_logprob(one.chosen) for one in chosen],
        "top_logprobs": [
            {bytes_of(other.token, tokenizer).decode(errors="replace"): told_logprob(other) for other in one.likeliest}
            for one in chosen
        ],
        "text_offset": offsets,
    }
