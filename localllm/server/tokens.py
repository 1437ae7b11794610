"""Tokenization and templates as in llama-server: /tokenize, /detokenize and /apply-template.

Source: https://github.com/ggml-org/llama.cpp/tree/master/tools/server
"""

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.server.fields import RequestBody
from localllm.server.http import make_json_response, read_json
from localllm.server.messages import parse_messages
from localllm.server.openai_chat import make_extension_headers
from localllm.server.request_options import apply_continuation, parse_options, parse_tools
from localllm.server.service import ServerContext, resolve_prompt_images
from localllm.text.tokenizer import Tokenizer


async def tokenize(service: ServerContext, request: Request) -> Response:
    """Encode `content`; return token ids, or objects with id and text if `with_pieces` is true."""
    body = RequestBody(await read_json(request, service.limits))
    text, with_bos = body.require_string("content"), body.get_bool("add_special")
    has_pieces = body.get_bool("with_pieces")
    special = body.get_optional_bool("parse_special") is not False
    async with service.pool.use(body.get_string("model")) as worker:
        tokenizer = worker.model.tokenizer
        ids = await asyncio.to_thread(tokenizer.encode, text, special, with_bos, with_bos)
    tokens = [{"id": token, "piece": get_piece(token, tokenizer)} for token in ids] if has_pieces else ids
    return make_json_response({"tokens": tokens}, headers=make_extension_headers(body))


async def detokenize(service: ServerContext, request: Request) -> Response:
    body = RequestBody(await read_json(request, service.limits))
    tokens = require_token_ids(body.require_list("tokens"), "tokens")
    async with service.pool.use(body.get_string("model")) as worker:
        text = await asyncio.to_thread(worker.model.tokenizer.decode, tokens, True)
    return make_json_response({"content": text}, headers=make_extension_headers(body))


async def apply_template(service: ServerContext, request: Request) -> Response:
    """Render `messages` with the chat template without generating; fields as in /v1/chat/completions."""
    body = RequestBody(await read_json(request, service.limits))
    messages = parse_messages(body.require_list("messages"))
    options = apply_continuation(body, parse_options(body, None, None, parse_tools(body)), messages)
    defaults = service.pool.resolve(body.get_string("model")).options.defaults
    async with service.pool.use(body.get_string("model")) as worker:
        model = worker.model
        (prompt,) = resolve_prompt_images([defaults.build_conversation(messages)], service.limits.folders)
        ids = (await asyncio.to_thread(model.session.request, prompt, defaults.complete(options))).prompt
    return make_json_response(
        {"prompt": model.tokenizer.decode(ids, special=True)}, headers=make_extension_headers(body)
    )


def get_piece(token: int, tokenizer: Tokenizer) -> str | list[int]:
    """Return a token's text, or its bytes if they are an incomplete character."""
    data = tokenizer.token_bytes(token, special=True)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return [*data]


def require_token_ids(value: Sequence[object], name: str) -> list[int]:
    """Return token ids. Raises UsageError for other values, and for ids beyond any vocabulary."""
    ids = [each for each in value if isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 31]
    if len(ids) < len(value):
        raise UsageError(f"{name} must be an array of token ids")
    return ids
