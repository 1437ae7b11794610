"""HTTP in both directions: bodies that are read within limits, errors in the shape that a client knows, streams."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localllm.errors import ContextError, LocalllmError, MemoryLimitError, ModelError, UsageError
from localllm.frozen import frozen
from localllm.server.model_pool import UnknownModelError
from localllm.server.worker import StoppedError

_FIELD = re.compile(r"([a-z_]+[\w.\[\]]*) (?:should|is missing|is not)")  # what a message about a field begins with
QUIET = 10.0  # seconds after which a client that waits for a stream hears something
COMMENT = b": still here\n"  # without the empty line that ends an event: simple readers would take it for one
JSON = "application/json"


@frozen
class Limits:
    """What one client may take.

    Attributes:
        body: bytes of a request.  depth: of its JSON.  seconds: for a body to arrive, and for a client to read a piece.
        answer_seconds: for all of an answer, or None.  connections: at once.
        drops_turns: whether the oldest turns of a conversation that is too long are left out.
        folders: below which a request may name images.
    """

    body: int = 32 << 20
    depth: int = 100
    seconds: float = 30.0
    answer_seconds: float | None = None
    connections: int = 128
    drops_turns: bool = False
    folders: Sequence[str] = ()


class RequestTimeoutError(LocalllmError):
    """An answer took longer than the server allows."""


class RejectedRequestError(LocalllmError):
    """A request that is refused before anything is asked of a model; code: OpenAI's name of the reason."""

    def __init__(self, status: int, message: str, code: str | None = None):
        self.status, self.code = status, code
        super().__init__(message)


def status_of(error: BaseException) -> int:
    """HTTP's number for an error."""
    if isinstance(error, RejectedRequestError):
        return error.status
    kinds: tuple[tuple[type[BaseException], int], ...] = (
        (UnknownModelError, 404),
        (RequestTimeoutError, 504),
        (StoppedError, 503),
        (MemoryLimitError, 503),
        (UsageError, 400),
        (ContextError, 400),
        (ModelError, 400),
    )
    return next((status for kind, status in kinds if isinstance(error, kind)), 500)


def openai_error(error: BaseException) -> dict[str, Any]:
    """As https://platform.openai.com/docs/guides/error-codes has it."""
    status = status_of(error)
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 503: "overloaded_error"}
    code = {401: "invalid_api_key", 404: "model_not_found", 503: "overloaded"}.get(status)
    if isinstance(error, RejectedRequestError) and error.code:
        code = error.code
    if isinstance(error, ContextError):
        code = "context_length_exceeded"
    usual = "invalid_request_error" if status < 500 else "server_error"
    found = _FIELD.match(str(error)) if isinstance(error, UsageError) else None
    param = found[1] if found else None
    return {"error": {"message": told(error), "type": kind.get(status, usual), "param": param, "code": code}}


def anthropic_error(error: BaseException) -> dict[str, Any]:
    """As https://docs.anthropic.com/en/api/errors has it."""
    status = status_of(error)
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
             503: "overloaded_error"}  # fmt: skip
    usual = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": kinds.get(status, usual), "message": told(error)}}


def told(error: BaseException) -> str:
    """What a client may know."""
    return str(error) if isinstance(error, LocalllmError) else f"internal error: {type(error).__name__}"


ErrorShape = Callable[[BaseException], dict[str, Any]]


def shape_of(path: str) -> ErrorShape:
    return anthropic_error if path.startswith("/v1/messages") else openai_error


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encoded(value), status, headers, JSON)


def encoded(value: Any) -> bytes:
    """JSON in UTF-8; half characters of models as U+FFFD."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def failed(error: BaseException, shape: ErrorShape) -> Response:
    """An error as a response."""
    headers = {"Retry-After": "5"} if status_of(error) == 503 else None
    return json_response(shape(error), status_of(error), headers)


async def read_json(request: Request, limits: Limits) -> dict[str, Any]:
    """The body, an object. Raises RefusedError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise RejectedRequestError(415, f"the Content-Type should be {JSON}, not {kind[:60] or 'none'!r}")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.body:
        raise RejectedRequestError(413, f"the body has {length} bytes, and may have {limits.body}")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.body:
                    raise RejectedRequestError(413, f"the body has more than {limits.body} bytes")
    except TimeoutError:
        raise RejectedRequestError(408, f"the body did not arrive within {limits.seconds:g} seconds") from None
    return parsed(bytes(body), limits.depth)


def parsed(body: bytes, depth: int) -> dict[str, Any]:
    """JSON that is an object, nested no deeper. Raises RefusedError."""
    if nesting(body) > depth:
        raise RejectedRequestError(400, f"the body is nested more than {depth} deep")
    try:
        value = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RejectedRequestError(400, f"the body is no JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise RejectedRequestError(400, "the body should be a JSON object")
    return value


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def nesting(body: bytes) -> int:
    """How deep brackets are nested, at most."""
    most = depth = 0
    for byte in _BRACKETS.sub(b"", _TEXT.sub(b"", body)):
        depth += 1 if byte in b"[{" else -1
        most = max(most, depth)
    return most


_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKETS = re.compile(rb"[^][{}]+")


def event(value: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encoded(value) + b"\n\n"


Lines = AsyncIterator[bytes]
Closing = Callable[[], Awaitable[None]]


class EventStream(Response):
    """Server-sent events as they come. When the client leaves, or reads nothing, what makes them is closed."""

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: Lines,
        limits: Limits,
        headers: dict[str, str],
        close: Closing | None = None,
        sign: bytes = COMMENT,
    ):
        """close: is called in the end, also if nothing was made.  sign: of life, for who waits."""
        self._pieces, self._limits, self._close, self._sign = pieces, limits, close, sign
        super().__init__(None, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        finally:
            if self._close:
                await self._close()

    async def _send(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._within(send(head))
        pieces = self._pieces
        try:
            pending = asyncio.ensure_future(anext(pieces, None))
            while True:
                done, _ = await asyncio.wait([pending], timeout=QUIET)
                piece = pending.result() if done else self._sign
                await self._within(send(body(piece or b"", piece is not None)))
                if piece is None:
                    return
                if done:
                    pending = asyncio.ensure_future(anext(pieces, None))
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            await pieces.aclose()  # type: ignore[attr-defined]

    async def _within(self, sending: Awaitable[None]) -> None:
        """Raises TimeoutError for a client that does not read."""
        async with asyncio.timeout(self._limits.seconds):
            await sending


def body(piece: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": piece, "more_body": more}


async def answered_whole(request: Request, work: Awaitable[Any], headers: dict[str, str], close: Closing) -> Response:
    """What `work` comes to, as JSON. Raises LeftError if the client goes away before."""
    try:
        return json_response(await unless_gone(request.receive, work), headers=headers)
    finally:
        await close()


class ClientDisconnectedError(Exception):
    """The client went away."""


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of something that ends when the client goes away. Raises LeftError then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def gone(receive: Receive) -> None:
    """Until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
