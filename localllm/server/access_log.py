"""Request ids, and an optional line of log for each request."""

import re
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "X-Request-Id"
_ID = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)
MAX_PATH = 200  # characters of an address in a line


class AccessLog:
    """ASGI middleware that adds X-Request-Id (the client's own if it sends one) and logs each response.

    A line has time, client, method, path without query, status, bytes, seconds and id, but no prompts or answers.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], None] | None = None):
        """Wrap an app; write: called with each line, None for no log."""
        self._app, self._write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header_id = dict(scope["headers"]).get(REQUEST_ID.lower().encode(), b"").decode("latin-1")
        request_id = header_id if _ID.fullmatch(header_id) else secrets.token_hex(8)
        # 499: nginx' status for a client that disconnects before the response.
        begin, status, size = perf_counter(), 499, 0

        async def send_with_id(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (REQUEST_ID.lower().encode(), request_id.encode())
                message = {**message, "headers": [*message.get("headers", []), header]}
            else:
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._write:
                client = (scope.get("client") or ("-",))[0] or "-"
                path = scope.get("raw_path", b"").decode("ascii", "replace").partition("?")[0][:MAX_PATH]
                timestamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                seconds = perf_counter() - begin
                self._write(
                    f"{timestamp} {client} {scope['method']} {path} {status} {size} bytes {seconds:.3f} s {request_id}"
                )
