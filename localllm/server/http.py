"""HTTP: size-limited request bodies, errors in the client's format, and event streams."""

import asyncio
import json
import re
import secrets
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localllm.errors import ContextError, LocalllmError, MemoryLimitError, ModelError, UsageError
from localllm.frozen import frozen
from localllm.server.model_pool import UnknownModelError
from localllm.server.worker import StoppedError

T = TypeVar("T")
Lines = AsyncIterator[bytes]
CloseCallback = Callable[[], Awaitable[None]]
_FIELD = re.compile(r"([a-z_]+[\w.\[\]]*) (?:must|is missing|is not)")  # the beginning of a message about a field
KEEP_ALIVE_SECONDS = 10.0  # seconds without an event after which a keep-alive line is sent
COMMENT = b": still here\n"  # no empty line, which would end an event: simple clients would count one
JSON = "application/json"
MAX_CODINGS = 2  # codings of a body
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKETS = re.compile(rb"[^][{}]+")


@frozen
class ClientLimits:
    """Limits for each client.

    Attributes:
        body: maximum bytes of a request.  depth: maximum nesting of its JSON.
        seconds: time to receive a body, and to send one chunk.
        answer_seconds: for a whole response, or None.  connections: concurrent ones.
        drops_turns: drop the oldest turns of a conversation that exceeds the context.
        folders: whose images a request may name by file://.
        cache_reuse: minimum tokens of a chunk that is reused from the middle of another prompt; 0: no reuse; None:
            only in /infill.
        suffix_first: put the suffix before the prefix in prompts of /infill.
        allows_pull: whether a request may download a model from the hub.
    """

    body: int = 32 << 20
    depth: int = 100
    seconds: float = 30.0
    answer_seconds: float | None = None
    connections: int = 128
    drops_turns: bool = False
    folders: Sequence[str] = ()
    cache_reuse: int | None = None
    suffix_first: bool = False
    allows_pull: bool = False


class RequestTimeoutError(LocalllmError):
    """An answer that took longer than the server allows."""


class RejectedRequestError(LocalllmError):
    """A request rejected before it reaches a model; code: OpenAI's error code."""

    def __init__(self, status: int, message: str, code: str | None = None):
        self.status, self.code = status, code
        super().__init__(message)


class CodingError(LocalllmError):
    """A request body that cannot be decoded; status: the HTTP status of the response."""

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


class ClientDisconnectedError(Exception):
    """Raised when the client disconnects."""


def get_status(error: BaseException) -> int:
    if isinstance(error, RejectedRequestError | CodingError):
        return error.status
    kinds: tuple[tuple[type[BaseException], int], ...] = (
        (UnknownModelError, 404), (RequestTimeoutError, 504), (StoppedError, 503), (MemoryLimitError, 503),
        (UsageError, 400), (ContextError, 400), (ModelError, 400),
    )  # fmt: skip
    return next((status for kind, status in kinds if isinstance(error, kind)), 500)


def format_openai_error(error: BaseException) -> dict[str, object]:
    return {"error": format_error_fields(error)}


def format_error_fields(error: BaseException) -> dict[str, str | None]:
    """Return the fields of OpenAI's error object. Source: https://platform.openai.com/docs/guides/error-codes."""
    status = get_status(error)
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 503: "overloaded_error"}
    code = {401: "invalid_api_key", 404: "model_not_found", 503: "overloaded"}.get(status)
    if isinstance(error, RejectedRequestError) and error.code:
        code = error.code
    if isinstance(error, ContextError):
        code = "context_length_exceeded"
    usual = "invalid_request_error" if status < 500 else "server_error"
    match = _FIELD.match(str(error)) if isinstance(error, UsageError) else None
    param = match[1] if match else None
    return {"message": get_public_message(error), "type": kind.get(status, usual), "param": param, "code": code}


def format_anthropic_error(error: BaseException) -> dict[str, object]:
    """Format an error for Anthropic's clients. Source: https://docs.anthropic.com/en/api/errors."""
    status = get_status(error)
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
             503: "overloaded_error"}  # fmt: skip
    usual = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": kinds.get(status, usual), "message": get_public_message(error)}}


def get_public_message(error: BaseException) -> str:
    """Return an error's message; for an unexpected error, only its type."""
    return str(error) if isinstance(error, LocalllmError) else f"internal error: {type(error).__name__}"


def format_ollama_error(error: BaseException) -> dict[str, object]:
    """Format an error for Ollama's clients. Source: https://github.com/ollama/ollama/blob/main/docs/api.md."""
    return {"error": get_public_message(error)}


ErrorFormat = Callable[[BaseException], dict[str, object]]


def select_error_format(path: str) -> ErrorFormat:
    if path.startswith("/v1/messages"):
        return format_anthropic_error
    return format_ollama_error if path.startswith("/api/") else format_openai_error


def make_json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(value), status, headers, JSON)


def encode_json(value: object) -> bytes:
    """Encode as JSON in UTF-8; replace lone surrogates by U+FFFD."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def make_error_response(error: BaseException, error_format: ErrorFormat) -> Response:
    headers = {"Retry-After": "5"} if get_status(error) == 503 else None
    return make_json_response(error_format(error), get_status(error), headers)


async def read_json(request: Request, limits: ClientLimits, any_type: bool = False) -> dict[str, object]:
    """Read the body, a JSON object, as read_value."""
    value = await read_value(request, limits, any_type)
    if not isinstance(value, dict):
        raise RejectedRequestError(400, "the body must be a JSON object")
    return value


async def read_list(request: Request, limits: ClientLimits) -> list[object]:
    """Read the body, a JSON array, as read_value."""
    value = await read_value(request, limits, any_type=True)
    if not isinstance(value, list):
        raise RejectedRequestError(400, "the body must be a JSON array")
    return value


async def read_value(request: Request, limits: ClientLimits, any_type: bool = False) -> object:
    """Read the body, JSON. Raises RejectedRequestError, CodingError.

    any_type: accept other Content-Types, such as curl's default, unless a web page sends the request.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_from_page = "origin" in request.headers or "sec-fetch-site" in request.headers
    if kind != JSON and (is_from_page or not any_type):
        raise RejectedRequestError(415, f"the Content-Type must be {JSON}, not {kind[:60] or 'none'!r}")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.body:
        raise RejectedRequestError(413, f"the body has {length} bytes, but the limit is {limits.body}")
    codings, body = parse_codings(",".join(request.headers.getlist("content-encoding"))), bytearray()
    try:
        async with asyncio.timeout(limits.seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body:
                    raise RejectedRequestError(413, f"the body is larger than the limit of {limits.body} bytes")
    except TimeoutError:
        raise RejectedRequestError(408, f"the body did not arrive within {limits.seconds:g} seconds") from None
    decoded = await asyncio.to_thread(decode_body, bytes(body), codings, limits.body) if codings else bytes(body)
    return parse_json(decoded, limits.depth)


def parse_json(body: bytes, depth: int) -> object:
    """Parse JSON of limited depth. Raises RejectedRequestError."""
    if measure_depth(body) > depth:
        raise RejectedRequestError(400, f"the body is nested deeper than {depth} levels")
    try:
        return json.loads(body, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise RejectedRequestError(400, f"the body is not valid JSON: {str(error)[:100]}") from None


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed in JSON")


def measure_depth(body: bytes) -> int:
    deepest = depth = 0
    for byte in _BRACKETS.sub(b"", _TEXT.sub(b"", body)):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def format_event(value: object, name: str | None = None) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode_json(value) + b"\n\n"


class EventStream(Response):
    """A response of server-sent events that closes its source when the client disconnects or stops reading."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: Lines,
        limits: ClientLimits,
        headers: dict[str, str],
        close: CloseCallback | None = None,
        keep_alive: bytes | Callable[[], bytes] = COMMENT,
    ):
        """Stream the chunks.

        close: called at the end, even if nothing was sent.  keep_alive: sent while there is no data, or what makes it.
        """
        self._chunks, self._limits, self._close, self._keep_alive = chunks, limits, close, keep_alive
        super().__init__(None, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send(send))
        finally:
            if self._close:
                await self._close()

    async def _send(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._send_in_time(send(head))
        chunks = self._chunks
        try:
            pending = asyncio.ensure_future(anext(chunks, None))
            while True:
                done, _ = await asyncio.wait([pending], timeout=KEEP_ALIVE_SECONDS)
                waiting = self._keep_alive() if callable(self._keep_alive) else self._keep_alive
                chunk = pending.result() if done else waiting
                await self._send_in_time(send(make_body_message(chunk or b"", chunk is not None)))
                if chunk is None:
                    return
                if done:
                    pending = asyncio.ensure_future(anext(chunks, None))
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            await chunks.aclose()  # type: ignore[attr-defined]

    async def _send_in_time(self, sending: Awaitable[None]) -> None:
        """Send within the time limit. Raises TimeoutError if the client does not read."""
        async with asyncio.timeout(self._limits.seconds):
            await sending


class JsonLines(EventStream):
    media_type = "application/x-ndjson"

    def __init__(
        self, chunks: Lines, limits: ClientLimits, headers: dict[str, str], close: CloseCallback | None = None
    ):
        super().__init__(chunks, limits, headers, close, keep_alive=b"")


def make_body_message(chunk: bytes, has_more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": chunk, "more_body": has_more}


async def respond_when_done(
    request: Request, work: Awaitable[object], headers: dict[str, str], close: CloseCallback
) -> Response:
    """Await `work` and return its result as a JSON response. Raises ClientDisconnectedError."""
    try:
        return make_json_response(await run_until_disconnect(request.receive, work), headers=headers)
    finally:
        await close()


async def run_until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it and raise ClientDisconnectedError when the client disconnects."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def generate_id(prefix: str) -> str:
    """Return the prefix followed by 24 random hexadecimal digits."""
    return f"{prefix}{secrets.token_hex(12)}"


# ---- bodies that clients compress: gzip and zstd, Python's own from 3.14 on, and before that its author's backport


class Decompressor(Protocol):
    """A decompressor object of zlib, bz2 or zstd."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


@cache
def load_decompressors() -> dict[str, tuple[Callable[[], Decompressor], type[Exception]]]:
    """Return, for each supported coding, the decompressor's factory and the exception it raises on bad data."""
    supported: dict[str, tuple[Callable[[], Decompressor], type[Exception]]] = {
        "gzip": (lambda: zlib.decompressobj(wbits=31), zlib.error)
    }
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:  # an installation without the extra, or a Python without the library
        return supported
    supported["zstd"] = zstd.ZstdDecompressor, zstd.ZstdError
    return supported


def parse_codings(value: str) -> list[str]:
    """Return the codings of a Content-Encoding header, in the order applied. Raises CodingError."""
    names = [name for part in value.split(",") if (name := part.strip().lower())]
    codings = [name.removeprefix("x-") for name in names if name != "identity"]
    supported = [*load_decompressors(), "identity"]
    for name in codings:
        if name not in supported:
            expected = f"{', '.join(supported[:-1])} or {supported[-1]}"
            raise CodingError(415, f"the Content-Encoding must be {expected}, found {name[:60]!r}")
    if len(codings) > MAX_CODINGS:
        raise CodingError(415, f"the Content-Encoding must name at most {MAX_CODINGS} codings, found {len(codings)}")
    return codings


def decode_body(body: bytes, codings: list[str], limit: int) -> bytes:
    """Decode a body; call it outside the event loop. Raises CodingError for more than `limit` bytes."""
    for name in reversed(codings):
        body = undo_coding(body, name, limit)
    return body


def undo_coding(data: bytes, name: str, limit: int) -> bytes:
    """Undo one coding; the data may consist of several concatenated streams."""
    begin, broken = load_decompressors()[name]
    decoded = bytearray()
    try:
        while data:
            stream = begin()
            while not stream.eof:
                chunk = stream.decompress(data, limit + 1 - len(decoded))
                decoded += chunk
                if len(decoded) > limit:
                    raise CodingError(413, f"the decoded body is larger than the limit of {limit} bytes")
                if not chunk and not stream.eof:
                    raise CodingError(400, f"the body ends before the end of its {name} stream (Content-Encoding)")
                data = b"" if not stream.eof else stream.unused_data
    except broken:
        raise CodingError(400, f"the body is not a valid {name} stream (Content-Encoding)") from None
    return bytes(decoded)
