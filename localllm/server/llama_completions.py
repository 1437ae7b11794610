"""llama-server's endpoint /completion: text completion, with its figures in the response.

Source: https://github.com/ggml-org/llama.cpp/tree/master/tools/server
"""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.server.fields import RequestBody
from localllm.server.http import EventStream, read_json, respond_when_done
from localllm.server.infill import InfillStream, complete_infill, parse_ending, stream_chunks
from localllm.server.openai_chat import make_extension_headers
from localllm.server.request_options import (
    parse_constraint,
    parse_json_options,
    parse_keep_alive,
    parse_options,
    parse_progress,
)
from localllm.server.service import GenerateRequest, Prompt, ServerContext
from localllm.server.tokens import require_token_ids

if TYPE_CHECKING:
    from localllm.generation.constraints.constraint import Constraint


async def complete(service: ServerContext, request: Request) -> Response:
    """Continue `prompt`, a string or token ids, by at most `n_predict` tokens."""
    body = RequestBody(await read_json(request, service.limits))
    is_streaming, ending = body.get_bool("stream"), parse_ending(body)
    query = await asyncio.to_thread(parse_request, body)
    query = replace(query, wants_progress=parse_progress(body, is_streaming))
    stream = await service.start(query, parse_keep_alive(body))
    headers, completion = make_extension_headers(body), InfillStream(stream, ending)
    if is_streaming:
        return EventStream(stream_chunks(completion), service.limits, headers, stream.close, stream.describe_progress)
    return await respond_when_done(request, complete_infill(completion), headers, stream.close)


def parse_request(body: RequestBody) -> GenerateRequest:
    """Parse the request. Raises UsageError."""
    name = next((name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None), "n_predict")
    options = parse_options(body, body.get_limit(name), parse_form(body))
    return GenerateRequest(body.get_string("model"), [parse_prompt(body.get("prompt"))], options)


def parse_prompt(prompt: object) -> Prompt:
    """Return a string or token ids, also of an array with one of them. Raises UsageError."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return require_token_ids(prompt, "prompt")
    raise UsageError("prompt must be a string or an array of token ids; /v1/completions takes several prompts")


def parse_form(body: RequestBody) -> "Constraint | None":
    """Parse llama-server's json_schema, or a constraint as in the other endpoints. Raises UsageError."""
    if (schema := body.get_mapping("json_schema")) is None:
        return parse_constraint(body)
    from localllm.generation.constraints.constraint import make_constraint

    return make_constraint(dict(schema), **parse_json_options(body))
