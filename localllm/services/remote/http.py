"""HTTP client for servers with OpenAI's interface: requests, server-sent events, one-line errors."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from time import sleep
from typing import Any
from urllib.parse import urlsplit

from localllm.errors import ContextError, LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.services.proxies import http_proxy_for

CONNECT, READ = 20.0, 600.0  # seconds for a connection, and without a byte of an answer
MOST = 64 << 20  # bytes of a response, or of a line of one
TRIES, LONGEST_WAIT = 5, 30.0  # of a request that the server is too busy for; seconds
BUSY = (429, 500, 502, 503, 504)
TOO_LONG = ("context length", "context size", "maximum context", "context window")


class EndpointError(LocalllmError):
    """The server cannot be reached, refuses, or sends an invalid response."""


@frozen
class Endpoint:
    """A server's address and key.

    Attributes:
        url: up to /v1.  key: the key, or None.
    """

    url: str
    key: str | None = None
    seconds: float = READ

    @classmethod
    def of(cls, url: str, key: str | None = None) -> "Endpoint":
        """Parse an address. Raises UsageError if it is invalid."""
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            known = False
        if not known or parts.query or parts.fragment or parts.username:
            raise UsageError(f"endpoint should be the address of a server, as http://127.0.0.1:8000/v1, not {url!r}")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UsageError("the key of the endpoint should be printable ASCII")
        return cls(url.rstrip("/") + "/v1" * (parts.path in ("", "/")), key)

    def get(self, path: str) -> Any:
        """Get JSON. Raises EndpointError."""
        with closing(self._connection()) as connection:
            return self._json(self._ask(connection, "GET", path))

    def post(self, path: str, body: Any) -> Any:
        """Post JSON and return JSON. Raises EndpointError, ContextError."""
        with closing(self._connection()) as connection:
            return self._json(self._ask(connection, "POST", path, body))

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """Yield the events of a stream. Raises EndpointError, also if it breaks off, and ContextError."""
        with closing(self._connection()) as connection:
            response = self._ask(connection, "POST", path, body)
            if "text/event-stream" not in (response.getheader("Content-Type") or ""):
                raise EndpointError(
                    f"{self.url} does not stream: it responds with {response.getheader('Content-Type')}"
                )
            yield from self._data(response)

    def _data(self, response: HTTPResponse) -> Iterator[Any]:
        while True:
            line = self._sure(lambda: response.readline(MOST))
            if not line:
                raise EndpointError(f"{self.url} broke off in the middle of an answer")
            field, _, value = line.strip().partition(b":")
            if field != b"data":
                continue
            if value.strip() == b"[DONE]":
                return
            told = self._parse(value)
            if told.get("error"):
                raise self._refusal(0, told)
            yield told

    def _ask(self, connection: HTTPConnection, method: str, path: str, body: Any = None) -> HTTPResponse:
        """Send a request, and again while the server is busy or loading its model."""
        data, wait = None if body is None else json.dumps(body).encode(), 1.0
        for attempt in range(TRIES):
            response = self._response(connection, method, path, data)
            if response.status not in BUSY or attempt + 1 == TRIES or (response.status == 500 and attempt):
                break
            after = response.getheader("Retry-After") or ""
            wait = min(float(after) if after.isdecimal() else wait * 2, LONGEST_WAIT)
            connection.close()
            sleep(wait)
        if response.status >= 300:
            raise self._refusal(response.status, self._json(response, is_error=True))
        return response

    def _connection(self) -> HTTPConnection:
        """Connect to the server or its proxy. Raises LocalllmError for an unsupported proxy."""
        parts, proxy = urlsplit(self.url), http_proxy_for(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        if proxy is None:
            return kind(parts.hostname or "", parts.port, timeout=CONNECT)
        connection = kind(proxy.host, proxy.port, timeout=CONNECT)
        if kind is HTTPSConnection:
            connection.set_tunnel(parts.hostname or "", parts.port or 443, {"Host": parts.netloc, **proxy.headers})
        return connection

    def _response(self, connection: HTTPConnection, method: str, path: str, body: bytes | None) -> HTTPResponse:
        headers = {"Accept": "application/json, text/event-stream", "User-Agent": "localllm"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        address, proxy = urlsplit(self.url).path + path, http_proxy_for(self.url)
        if proxy and self.url.startswith("http:"):  # it is told the whole address
            address, headers = self.url + path, headers | proxy.headers

        def ask() -> HTTPResponse:
            connection.connect()
            connection.sock.settimeout(self.seconds)
            connection.request(method, address, body, headers)
            return connection.getresponse()

        result: HTTPResponse = self._sure(ask)
        return result

    def _sure(self, act: Callable[[], Any]) -> Any:
        """Call `act`. Raises EndpointError for any connection failure."""
        try:
            return act()
        except TimeoutError:
            raise EndpointError(f"{self.url} does not respond: no data for {self.seconds:g} seconds") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            proxy = http_proxy_for(self.url)
            through = f" through {proxy.variable}, {proxy.url}" if proxy else ""
            raise EndpointError(f"{self.url} cannot be reached{through}: {reason}") from None

    def _json(self, response: HTTPResponse, is_error: bool = False) -> Any:
        data = self._sure(lambda: response.read(MOST))
        return self._parse(data, {} if is_error else None)

    def _parse(self, data: bytes, usual: dict[str, Any] | None = None) -> dict[str, Any]:
        """Parse an object; `usual` replaces invalid JSON, else EndpointError is raised."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        if usual is not None:
            return usual
        raise EndpointError(f"{self.url} sent an invalid JSON object: {data.strip()[:60].decode(errors='replace')!r}")

    def _refusal(self, status: int, told: dict[str, Any]) -> LocalllmError:
        """Convert a server's error response to an exception."""
        error = told.get("error", told)
        message = error.get("message") if isinstance(error, dict) else error
        reason = " ".join(str(message or "no reason is given").split())[:500]
        if any(words in reason.lower() for words in TOO_LONG) or "context_length" in str(error)[:2000]:
            return ContextError(f"{self.url}: {reason}")
        if status == 401 or status == 403:
            how = (
                "refuses the key" if self.key else "wants a key: LOCALLLM_API_KEY in the environment, or --api-key-file"
            )
            return EndpointError(f"{self.url} {how} ({status}: {reason})")
        return EndpointError(f"{self.url} refuses{f' ({status})' if status else ''}: {reason}")
