"""HTTP client for servers with OpenAI's API: requests, server-sent events, one-line errors."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from time import sleep
from typing import TypeVar
from urllib.parse import urlsplit

from localllm.errors import ContextError, LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.services.hub.proxies import select_http_proxy

CONNECT, READ = 20.0, 600.0  # timeouts in seconds: for a connection, and for the next byte of a response
MAX_BYTES = 64 << 20  # maximum bytes of a response, or of one line of a stream
MAX_ATTEMPTS, MAX_WAIT = 5, 30.0  # attempts while the server is busy; maximum seconds between two
T = TypeVar("T")
BUSY = (429, 500, 502, 503, 504)
TOO_LONG = ("context length", "context size", "maximum context", "context window")


class EndpointError(LocalllmError):
    """The server cannot be reached, rejects a request, or sends an invalid response."""


@frozen
class Endpoint:
    """A server's URL and key.

    Attributes:
        url: ends with /v1.  key: the API key, or None.  seconds: timeout for the next byte of a response.
    """

    url: str
    key: str | None = None
    seconds: float = READ

    @classmethod
    def parse(cls, url: str, key: str | None = None) -> "Endpoint":
        """Parse a URL. Raises UsageError if it is invalid."""
        try:
            parts = urlsplit(url)
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid or parts.query or parts.fragment or parts.username:
            raise UsageError(f"endpoint must be the URL of a server, such as http://127.0.0.1:8000/v1, not {url!r}")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UsageError(
                "the endpoint's API key must be printable ASCII: check the file or variable that contains it"
            )
        return cls(url.rstrip("/") + "/v1" * (parts.path in ("", "/")), key)

    def get(self, path: str) -> dict[str, object]:
        """Send a GET request and return the JSON response. Raises EndpointError."""
        with closing(self._connect()) as connection:
            return self._read_json(self._send(connection, "GET", path))

    def post(self, path: str, body: object) -> dict[str, object]:
        """Send JSON and return the JSON response. Raises EndpointError, ContextError."""
        with closing(self._connect()) as connection:
            return self._read_json(self._send(connection, "POST", path, body))

    def stream_events(self, path: str, body: object) -> Iterator[dict[str, object]]:
        """Send JSON and yield the server-sent events. Raises ContextError; EndpointError, also for a broken stream."""
        with closing(self._connect()) as connection:
            response = self._send(connection, "POST", path, body)
            if "text/event-stream" not in (response.getheader("Content-Type") or ""):
                raise EndpointError(
                    f"{self.url} does not stream: expected text/event-stream, "
                    f"found {response.getheader('Content-Type')}"
                )
            yield from self._iter_events(response)

    def _iter_events(self, response: HTTPResponse) -> Iterator[dict[str, object]]:
        while True:
            line = self._convert_errors(lambda: response.readline(MAX_BYTES))
            if not line:
                raise EndpointError(f"{self.url} closed the connection before the end of the answer")
            field, _, value = line.strip().partition(b":")
            if field != b"data":
                continue
            if value.strip() == b"[DONE]":
                return
            event = self._parse(value)
            if event.get("error"):
                raise self._make_error(0, event)
            yield event

    def _send(self, connection: HTTPConnection, method: str, path: str, body: object = None) -> HTTPResponse:
        """Send a request; retry while the server is busy or loads its model."""
        data, wait = None if body is None else json.dumps(body).encode(), 1.0
        for attempt in range(MAX_ATTEMPTS):
            response = self._request(connection, method, path, data)
            if response.status not in BUSY or attempt + 1 == MAX_ATTEMPTS or (response.status == 500 and attempt):
                break
            after = response.getheader("Retry-After") or ""
            wait = min(float(after) if after.isdecimal() else wait * 2, MAX_WAIT)
            connection.close()
            sleep(wait)
        if response.status >= 300:
            raise self._make_error(response.status, self._read_json(response, is_error=True))
        return response

    def _connect(self) -> HTTPConnection:
        """Connect to the server or its proxy. Raises LocalllmError for an unsupported proxy."""
        parts, proxy = urlsplit(self.url), select_http_proxy(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        if proxy is None:
            return kind(parts.hostname or "", parts.port, timeout=CONNECT)
        connection = kind(proxy.host, proxy.port, timeout=CONNECT)
        if kind is HTTPSConnection:
            connection.set_tunnel(parts.hostname or "", parts.port or 443, {"Host": parts.netloc, **proxy.headers})
        return connection

    def _request(self, connection: HTTPConnection, method: str, path: str, body: bytes | None) -> HTTPResponse:
        headers = {"Accept": "application/json, text/event-stream", "User-Agent": "localllm"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        address, proxy = urlsplit(self.url).path + path, select_http_proxy(self.url)
        if proxy and self.url.startswith("http:"):  # a proxy needs the whole address
            address, headers = self.url + path, headers | proxy.headers

        def send() -> HTTPResponse:
            connection.connect()
            connection.sock.settimeout(self.seconds)
            connection.request(method, address, body, headers)
            return connection.getresponse()

        return self._convert_errors(send)

    def _convert_errors(self, act: Callable[[], T]) -> T:
        """Call `act`; convert any connection failure to EndpointError."""
        try:
            return act()
        except TimeoutError:
            raise EndpointError(f"{self.url} does not respond: no data for {self.seconds:g} seconds") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            proxy = select_http_proxy(self.url)
            through = f" through {proxy.variable}, {proxy.url}" if proxy else ""
            raise EndpointError(f"{self.url} cannot be reached{through}: {reason}") from None

    def _read_json(self, response: HTTPResponse, is_error: bool = False) -> dict[str, object]:
        data = self._convert_errors(lambda: response.read(MAX_BYTES))
        return self._parse(data, {} if is_error else None)

    def _parse(self, data: bytes, usual: dict[str, object] | None = None) -> dict[str, object]:
        """Parse a JSON object; otherwise return `usual`, or raise EndpointError if that is None."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        if usual is not None:
            return usual
        raise EndpointError(f"{self.url} sent an invalid JSON object: {data.strip()[:60].decode(errors='replace')!r}")

    def _make_error(self, status: int, response: dict[str, object]) -> LocalllmError:
        """Convert a server's error response to an exception."""
        error = response.get("error", response)
        message = error.get("message") if isinstance(error, dict) else error
        reason = " ".join(str(message or "the server gave no reason").split())[:500]
        if any(words in reason.lower() for words in TOO_LONG) or "context_length" in str(error)[:2000]:
            return ContextError(f"{self.url}: {reason}")
        if status in (401, 403):
            complaint = (
                "rejected the API key" if self.key else "needs an API key: set LOCALLLM_API_KEY, or use --api-key-file"
            )
            return EndpointError(f"{self.url} {complaint} ({status}: {reason})")
        return EndpointError(f"{self.url} rejected the request{f' ({status})' if status else ''}: {reason}")


def as_object(value: object) -> dict[str, object]:
    """Return a JSON value that is an object, or {}."""
    return value if isinstance(value, dict) else {}


def as_objects(value: object) -> list[dict[str, object]]:
    """Return the objects in a JSON array, or []."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def as_count(value: object) -> int:
    """Return a JSON value that is an integer, or 0."""
    return value if isinstance(value, int) else 0
