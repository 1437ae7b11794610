"""Who may ask: programs of this computer, and nobody who reaches it through a browser or by another name.

A page from anywhere can make its reader's browser send requests to 127.0.0.1. It cannot choose the Host header, which
names the page's own site even if that name has been made to point here (DNS rebinding), nor leave out Origin, nor send
JSON under its own Content-Type without asking first.
"""

import hmac
import re
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.server.http import ClientDisconnectedError, RejectedRequestError, failed, shape_of

HERE = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = ("/", "/health")  # that need no key
OWN_PATHS = "/sessions"  # what begins so is for our own page, and for programs
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,80}")
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[^/?#@:*\s]+)(?::(?P<port>\d{1,5}))?/?")
USUAL_PORTS = {"http": "80", "https": "443"}
USUAL_HEADERS = ("authorization", "content-type", "x-api-key", "anthropic-version")
MOST_HEADERS = 64  # of a page's own
EXPOSED = ("X-Localllm-Ignored", "X-Localllm-Dropped-Turns", "Request-Id", "Retry-After", "Date")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@frozen
class Rules:
    """Who may ask.

    Attributes:
        hosts: what the Host header may name, beside this computer.  origins: pages of other sites that may ask.
        keys: of which a request has to have one; none if there are none.
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    keys: Sequence[str] = ()

    def require(self, method: str, path: str, headers: dict[str, str], address: str = "") -> None:
        """headers: by lower-case names.  address: of this computer, at which the request came; a page of another site
        has a name of its own, and cannot be there. Raises RefusedError.
        """
        host = _HOST.fullmatch(headers.get("host", ""))
        names = {name.lower() for name in (*HERE, *self.hosts, address, f"[{address}]")}
        if not host or host["name"].lower() not in names:
            raise RejectedRequestError(403, "the Host header names another computer; --allow-host NAME allows one")
        origin = headers.get("origin")
        own = f"http://{headers['host']}"
        if origin is not None and origin != own and (origin not in self.origins or path.startswith(OWN_PATHS)):
            raise RejectedRequestError(403, "pages of other sites may not ask; --allow-origin ORIGIN allows one")
        if self.keys and path not in OPEN_PATHS and method != "OPTIONS" and not self.has_key(headers):
            raise RejectedRequestError(401, "the API key is missing or wrong")

    def has_key(self, headers: dict[str, str]) -> bool:
        """Whether a request has one of the keys, as OpenAI's clients send it or as Anthropic's."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        right = [hmac.compare_digest(one.encode(), key.encode()) for one in given for key in self.keys]
        return any(right)


class Guard:
    """ASGI: lets through what the rules allow, gives every response its headers, and ends what nobody waits for."""

    def __init__(self, app: ASGIApp, rules: Rules, canonical: Callable[[str], str]):
        """canonical: what address is meant by a path, by which rules and the app judge."""
        self._app, self._rules, self._canonical = app, rules, canonical

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope = {**scope, "path": self._canonical(scope["path"])}
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        origin = headers.get("origin", "")
        asked = headers.get("access-control-request-headers", "")
        shared = self._shared(origin, asked) if origin in self._rules.origins else {}
        more = {"Date": formatdate(usegmt=True)} | HEADERS | shared

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in more.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        try:
            require_single_host(scope)
            address = (scope.get("server") or ("",))[0] or ""
            self._rules.require(scope["method"], scope["path"], headers, address.removeprefix("::ffff:"))
        except RejectedRequestError as error:
            await failed(error, shape_of(scope["path"]))(scope, receive, told)
            return
        if scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, told)
            return
        try:
            await self._app(scope, receive, told)
        except ClientDisconnectedError:
            return

    def _shared(self, origin: str, asked: str) -> dict[str, str]:
        """What lets the pages of a site read answers (CORS); asked: headers that they want to send.

        The official JavaScript clients have many of their own (x-stainless-..., anthropic-...), without meaning here.
        """
        names = [name.strip().lower() for name in asked.split(",")]
        allowed = [name for name in names if _HEADER.fullmatch(name) and name not in USUAL_HEADERS]
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": ", ".join((*USUAL_HEADERS, *allowed[:MOST_HEADERS])),
            "Access-Control-Allow-Private-Network": "true",
            "Access-Control-Expose-Headers": ", ".join(EXPOSED),
            "Access-Control-Max-Age": "600",
            "Cross-Origin-Resource-Policy": "cross-origin",
            "Vary": "Origin, Access-Control-Request-Headers",
        }


def origin_of(text: str) -> str:
    """A site as browsers name it in Origin: without a path, its usual port, and in lower case. Raises UsageError."""
    found = _ORIGIN.fullmatch(text.strip().lower())
    if text == "null":
        return text
    if not found:
        raise UsageError(f"an origin is a scheme and a host, as https://example.com, not {text!r}")
    port = found["port"] if found["port"] != USUAL_PORTS.get(found["scheme"]) else None
    return f"{found['scheme']}://{found['host']}" + (f":{port}" if port else "")


def require_single_host(scope: Any) -> None:
    """Raises RefusedError: of several Host headers nobody knows which counts."""
    if sum(name == b"host" for name, _ in scope["headers"]) > 1:
        raise RejectedRequestError(400, "there is more than one Host header")
