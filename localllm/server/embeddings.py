"""Endpoints for embeddings (OpenAI's /v1/embeddings) and reranking (Jina's and Cohere's /v1/rerank)."""

import asyncio
import base64
import re
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import ContextError, UsageError
from localllm.server.fields import RequestBody
from localllm.server.http import generate_id, make_json_response, read_json, run_until_disconnect
from localllm.server.openai_chat import make_extension_headers
from localllm.server.request_options import IGNORED_FIELDS, parse_keep_alive
from localllm.server.service import ServerContext
from localllm.server.tokens import require_token_ids
from localllm.server.worker import Worker
from localllm.text.tokenizer import Tokenizer

MAX_TEXTS = 4096  # texts per request
T = TypeVar("T")
_COMPUTE_LOCK = threading.Lock()  # one request at a time: each uses all cores


async def create_embeddings(service: ServerContext, request: Request) -> Response:
    body = RequestBody(await read_json(request, service.limits))
    texts, dims, role = parse_inputs(body.get("input")), body.get_int("dimensions", 1), body.get_string("role")
    limit = body.get_int("truncate_prompt_tokens", -1)  # vLLM's; -1: as many as the model reads
    overflow, limit = ("cut" if body.get_bool("truncate") or limit else "refuse"), None if limit == -1 else limit
    is_base64 = body.get_choice("encoding_format", ("float", "base64")) == "base64"
    for name in IGNORED_FIELDS:
        body.get(name)
    model = body.get_string("model")
    use = service.pool.use(model, parse_keep_alive(body))
    vectors, count = await embed_texts(use, request, texts, overflow=overflow, dims=dims, role=role, token_limit=limit)
    shown = [
        base64.b64encode(each.astype("<f4").tobytes()).decode() if is_base64 else each.tolist() for each in vectors
    ]
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(shown)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    answer = {"object": "list", "data": data, "model": service.pool.resolve(model).name, "usage": usage}
    return make_json_response(answer, headers=make_extension_headers(body))


async def embed_texts(
    use: AbstractAsyncContextManager[Worker],
    request: Request,
    texts: list[str] | list[list[int]],
    *,
    overflow: str,
    dims: int | None = None,
    role: str | None = None,
    token_limit: int | None = None,
) -> tuple[np.ndarray, int]:
    """Return the embeddings of texts, float32 [texts, dims], and the number of tokens read.

    use: opens the model.  overflow: "cut" or "refuse" texts of more than `token_limit` tokens (None: the model's
    context).
    Raises LocalllmError.
    """
    async with use as worker:
        model = worker.model
        vectors = await run_until_disconnect(
            request.receive,
            run_exclusively(lambda: model.embed(texts, dims, True, role, overflow, max_tokens=token_limit), "input"),
        )
        bound = min(token_limit or model.context, model.context)
        count = await asyncio.to_thread(lambda: sum(min(count_tokens(text, model.tokenizer), bound) for text in texts))
        return vectors, count


async def rerank(service: ServerContext, request: Request) -> Response:
    """Sort documents by relevance to a query, best first."""
    body = RequestBody(await read_json(request, service.limits))
    query, documents = body.require_string("query"), body.get_list("texts") or body.require_list("documents")
    texts = parse_strings(
        [document.get("text") if isinstance(document, dict) else document for document in documents], "documents"
    )
    top = body.get_int("top_n", 1) or body.get_int("top_k", 1)
    returns_documents = body.get_bool("return_documents") or body.get_bool("return_text")
    truncate = body.get_bool("truncate")
    for name in IGNORED_FIELDS:
        body.get(name)
    async with service.pool.use(body.get_string("model"), parse_keep_alive(body)) as worker:
        model, name = worker.model, service.pool.resolve(body.get_string("model")).name
        scores = await run_until_disconnect(
            request.receive, run_exclusively(lambda: model.rerank(query, texts, truncate), "documents")
        )
        encode = model.tokenizer.encode
        count = await asyncio.to_thread(lambda: sum(len(encode(query)) + len(encode(text)) for text in texts))
    order = np.argsort(-scores, kind="stable")[:top].tolist()
    results = [
        {"index": index, "relevance_score": float(scores[index])}
        | ({"document": {"text": texts[index]}} if returns_documents else {})
        for index in order
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    answer = {"id": generate_id("rerank-"), "object": "list", "model": name, "results": results, "usage": usage}
    return make_json_response(answer, headers=make_extension_headers(body))


async def run_exclusively(work: Callable[[], T], field: str) -> T:
    """Call `work` in a thread, for one request at a time.

    The work is completed even if the client disconnects.  field: the request's field with the texts, for errors.
    """

    def locked_work() -> T:
        with _COMPUTE_LOCK:
            try:
                return work()
            except ContextError as error:
                reason = re.sub(r"^text (\d+)", lambda match: f"{field}[{int(match[1]) - 1}]", str(error))
                raise ContextError(f"{reason.rpartition(': ')[0]}: shorten it or set truncate to true") from None
            except UsageError as error:
                raise UsageError(re.sub("^dims ", "dimensions ", str(error))) from None

    return await asyncio.to_thread(locked_work)


def parse_strings(value: object, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and not texts:
        raise UsageError(f"{name} must not be empty; send at least one string")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{name} must be a string or an array of strings")
    if len(texts) > MAX_TEXTS:
        raise UsageError(f"{name} must be at most {MAX_TEXTS} strings, not {len(texts)}")
    return texts


def parse_inputs(value: object) -> list[str] | list[list[int]]:
    """Parse a string, an array of token ids, or an array of either. Raises UsageError."""
    if not isinstance(value, list) or not value or not all(isinstance(item, int | list) for item in value):
        return parse_strings(value, "input")
    lists = value if isinstance(value[0], list) else [value]
    if not all(isinstance(ids, list) and ids for ids in lists):
        raise UsageError("input must be a string, an array of token ids, or an array of these")
    if len(lists) > MAX_TEXTS:
        raise UsageError(f"input must be at most {MAX_TEXTS} arrays of token ids, not {len(lists)}")
    return [require_token_ids(ids, "input") for ids in lists]


def count_tokens(text: str | list[int], tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(text, bos=True, eos=True)) if isinstance(text, str) else len(text)
