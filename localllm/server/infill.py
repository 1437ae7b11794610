"""The endpoint /infill, which fills in the middle of a text as llama-server does.

Source: https://github.com/ggml-org/llama.cpp/tree/master/tools/server
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from localllm.frozen import frozen
from localllm.generation.infill import Infill
from localllm.server.fields import RequestBody
from localllm.server.http import EventStream, format_event, format_openai_error, read_json, respond_when_done
from localllm.server.openai_chat import make_extension_headers
from localllm.server.request_options import parse_constraint, parse_keep_alive, parse_options, parse_progress
from localllm.server.service import GenerateRequest, ResponseStream, ServerContext
from localllm.server.worker import PromptProgress


@frozen
class InfillStops:
    """Stop conditions of the generated text, and the fields of the response.

    Attributes:
        indent: stop before a line, after the first, with less leading white space than this.
        seconds: stop at the first line break after this time, counted from the first token; None: no limit.
        fields: paths of fields to return, a/b for b within a; empty: all.
        with_tokens: whether to return the token ids.
    """

    indent: int = 0
    seconds: float | None = None
    fields: tuple[str, ...] = ()
    with_tokens: bool = False


async def infill(service: ServerContext, request: Request) -> Response:
    """Generate the text between `input_prefix` followed by `prompt`, and `input_suffix`."""
    body = RequestBody(await read_json(request, service.limits))
    is_streaming, ending = body.get_bool("stream"), parse_ending(body)
    query = await asyncio.to_thread(parse_request, body, service.limits.suffix_first)
    query = replace(query, wants_progress=parse_progress(body, is_streaming))
    stream = await service.start(query, parse_keep_alive(body))
    headers, middle = make_extension_headers(body), InfillStream(stream, ending)
    if is_streaming:
        return EventStream(stream_chunks(middle), service.limits, headers, stream.close, stream.describe_progress)
    return await respond_when_done(request, complete_infill(middle), headers, stream.close)


def parse_request(body: RequestBody, suffix_first: bool = False) -> GenerateRequest:
    name = next((name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None), "n_predict")
    chunks = [RequestBody.parse(chunk, "input_extra") for chunk in body.get_list("input_extra") or ()]
    files = [(chunk.get_string("filename") or "tmp", chunk.require_string("text")) for chunk in chunks]
    prefix, suffix = body.require_string("input_prefix"), body.require_string("input_suffix")
    prompt = Infill(prefix, suffix, files, body.get_string("prompt") or "", is_cut=True, suffix_first=suffix_first)
    options = parse_options(body, body.get_limit(name), parse_constraint(body))
    return GenerateRequest(body.get_string("model"), [prompt], options)


def parse_ending(body: RequestBody) -> InfillStops:
    milliseconds = body.get_int("t_max_predict_ms", -1)
    seconds = milliseconds / 1000 if milliseconds is not None and milliseconds > 0 else None
    fields, with_tokens = body.get_strings("response_fields"), body.get_bool("return_tokens")
    return InfillStops(body.get_int("n_indent") or 0, seconds, fields, with_tokens)


class InfillStream:
    """The stream of text generated between prefix and suffix.

    Attributes:
        text: the text so far.  stop_type: why it ended, as in llama-server: "eos", "word" or "limit".
        progress: of the prompt, while an empty part is yielded for it; None for other parts.
    """

    def __init__(self, stream: ResponseStream, ending: InfillStops):
        self.stream, self.text, self.stop_type = stream, "", "limit"
        self.progress: PromptProgress | None = None
        self._ending, self._line = ending, 0  # begin of the latest line; the first line (0) is not checked

    async def stream_parts(self) -> AsyncGenerator[str]:
        """Yield the text as it is generated. Raises LocalllmError."""
        clock, end = asyncio.get_running_loop().time, None
        async with aclosing(self.stream.stream_events()) as events:
            async for _, event in events:
                self.progress = event.progress
                if event.progress:
                    yield ""
                    continue
                if end is None and self._ending.seconds is not None:
                    end = clock() + self._ending.seconds
                part = "".join(text for _, text in event.parts)
                length_before, is_cut = len(self.text), self._append(part)
                if new := self.text[length_before:]:
                    yield new
                if is_cut or (end is not None and "\n" in part and clock() > end):
                    return
                if event.finish_reason == "stop":
                    self.stop_type = "word" if self.stream.stop_string() else "eos"

    def _append(self, part: str) -> bool:
        """Append to the text; cut it before a line with too little indentation, and return whether it was cut."""
        length_before = len(self.text)
        self.text += part
        while self._ending.indent:
            line = self.text[self._line :]
            white = len(line) - len(line.lstrip(" \t"))
            if self._line and white < min(self._ending.indent, len(line)):
                self.text = self.text[: max(length_before, self._line)]
                return True
            if "\n" not in line:
                break
            self._line += line.index("\n") + 1
        return False

    def build_response(self) -> dict[str, object]:
        completion, context = self.stream.get_completion(), self.stream.model.context
        read, predicted = completion.prompt_tokens, completion.completion_tokens
        response = {
            "index": 0,
            "content": self.text,
            "stop": True,
            "model": self.stream.name,
            "tokens_predicted": predicted,
            "tokens_evaluated": read,
            "tokens": completion.tokens if self._ending.with_tokens else [],
            "generation_settings": {"n_ctx": context, "n_predict": completion.options.max_tokens},
            "has_new_line": "\n" in self.text,
            "truncated": self.stop_type == "limit" and completion.is_full,
            "stop_type": self.stop_type,
            "stopping_word": self.stream.stop_string(),
            "tokens_cached": read + predicted,
            "timings": self.stream.format_timings(),
        }
        return select_fields(response, self._ending.fields)


def select_fields(response: dict[str, object], paths: tuple[str, ...]) -> dict[str, object]:
    """Return the fields with the given paths, such as timings/prompt_n; the whole response if there are none."""
    selected: dict[str, object] = {}
    for path in paths:
        value: object = response
        for key in path.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            selected[path] = value
    return selected if paths else response


async def complete_infill(middle: InfillStream) -> dict[str, object]:
    async for _ in middle.stream_parts():
        pass
    return middle.build_response()


async def stream_chunks(middle: InfillStream) -> AsyncGenerator[bytes]:
    """Yield the response as server-sent events; the last one has the statistics and no text."""
    try:
        async for part in middle.stream_parts():
            progress = {"prompt_progress": middle.progress._asdict()} if middle.progress else {}
            yield format_event({"index": 0, "content": part, "stop": False, **progress})
        response = middle.build_response()
        yield format_event({**response, "content": ""} if "content" in response else response)
    except Exception as error:
        yield format_event(format_openai_error(error))
    finally:
        await middle.stream.close()
