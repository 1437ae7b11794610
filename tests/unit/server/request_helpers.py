"""Build requests for tests of the server's parts."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
from starlette.datastructures import Headers

from localllm.server import model_pool as model_pool
from localllm.server.anthropic_messages import parse_request
from localllm.server.fields import RequestBody
from localllm.server.http import ClientLimits, read_json
from localllm.server.openai_completions import parse_request as parse_completion_request
from localllm.server.openai_responses import parse_request as question_of_responses

HI = [{"role": "user", "content": "Hi"}]


def completion_request(**fields: Any) -> Any:
    return parse_completion_request(RequestBody({"prompt": "Hi"} | fields))


def responses_request(**fields: Any) -> Any:
    return question_of_responses(RequestBody({"input": "Hi", **fields}))


def messages_request(**fields: Any) -> Any:
    return parse_request(RequestBody({"messages": HI, **fields}), 9)


class Asked:
    """A request whose body arrives in chunks."""

    def __init__(
        self, *pieces: bytes, kind: str = "application/json; charset=utf-8", length: str = "", wait: float = 0
    ):
        self.pieces, self.wait = pieces, wait
        self.headers = Headers({"content-type": kind, **({"content-length": length} if length else {})})

    async def stream(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            await asyncio.sleep(self.wait)
            yield piece


def read_body(*pieces: bytes, limits: ClientLimits = ClientLimits(body=8), **more: Any) -> Any:  # noqa: B008
    asked: Any = Asked(*pieces, **more)
    return asyncio.run(read_json(asked, limits))
