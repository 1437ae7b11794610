"""Texts as vectors, /v1/embeddings as OpenAI has it, and sorted by relevance, /v1/rerank as Jina and Cohere do."""

import asyncio
import base64
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.server.fields import Body
from localllm.server.http import json_response, read_json, unless_gone
from localllm.server.ids import new_id
from localllm.server.openai_chat import ignored
from localllm.server.request_options import MEANINGLESS
from localllm.server.service import Service

MOST = 4096  # texts of a request
T = TypeVar("T")
_TURN = threading.Lock()  # one request reads at a time: each uses all cores


async def embeddings(service: Service, request: Request) -> Response:
    """A vector of each text."""
    body = Body(await read_json(request, service.limits))
    texts, dims, role = texts_of(body.get("input"), "input"), body.whole("dimensions", 1), body.text("role")
    packed = body.choice("encoding_format", ("float", "base64")) == "base64"
    for name in MEANINGLESS:
        body.get(name)
    async with service.shelf.use(body.text("model")) as worker:
        model, name = worker.model, service.shelf.book(body.text("model")).name
        vectors = await unless_gone(request.receive, in_turn(lambda: model.embed(texts, dims, role=role)))
        count = await asyncio.to_thread(lambda: sum(len(model.tokenizer.encode(t, bos=True, eos=True)) for t in texts))
    data = [
        {"object": "embedding", "index": index, "embedding": told(vector, packed)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "data": data, "model": name, "usage": usage}, headers=ignored(body))


async def rerank(service: Service, request: Request) -> Response:
    """Texts by how well they answer a query, the best first."""
    body = Body(await read_json(request, service.limits))
    query, documents = body.needed_text("query"), body.items("texts") or body.needed_items("documents")
    texts = texts_of([one.get("text") if isinstance(one, dict) else one for one in documents], "documents")
    top = body.whole("top_n", 1) or body.whole("top_k", 1)
    shows = body.flag("return_documents") or body.flag("return_text")
    for name in MEANINGLESS:
        body.get(name)
    async with service.shelf.use(body.text("model")) as worker:
        model, name = worker.model, service.shelf.book(body.text("model")).name
        scores = await unless_gone(request.receive, in_turn(lambda: model.rerank(query, texts)))
        encode = model.tokenizer.encode
        count = await asyncio.to_thread(lambda: sum(len(encode(query)) + len(encode(text)) for text in texts))
    order = np.argsort(-scores, kind="stable")[:top].tolist()
    results = [
        {"index": index, "relevance_score": float(scores[index])}
        | ({"document": {"text": texts[index]}} if shows else {})
        for index in order
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    answer = {"id": new_id("rerank-"), "object": "list", "model": name, "results": results, "usage": usage}
    return json_response(answer, headers=ignored(body))


async def in_turn(work: Callable[[], T]) -> T:
    """What it comes to, in a thread of its own; it ends there even if nobody waits any more."""

    def worked() -> T:
        with _TURN:
            return work()

    return await asyncio.to_thread(worked)


def texts_of(given: Any, name: str) -> list[str]:
    """A text or a list of them. Raises UsageError."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{name} should be a text or a list of texts; token ids mean something to one model only")
    if len(texts) > MOST:
        raise UsageError(f"{name} should be at most {MOST} texts, not {len(texts)}")
    return texts


def told(vector: np.ndarray, packed: bool) -> Any:
    """Numbers, or their bytes, float32, in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if packed else vector.tolist()
