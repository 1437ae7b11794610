"""Access control: programs on this computer may use the server; web pages and other hosts may not.

A web page can make the browser send requests to 127.0.0.1. But it cannot choose the Host header, which names the
page's own site even if that name resolves to this computer (DNS rebinding). It cannot leave out Origin, and cannot
send a body of type application/json without a preflight request.
"""

import hmac
import re
from collections.abc import Callable, Sequence
from email.utils import formatdate

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.server.http import ClientDisconnectedError, RejectedRequestError, make_error_response, select_error_format

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = ("/", "/health")  # paths that need no key
# Not for pages of other sites, even allowed ones.
SAME_ORIGIN_PATHS = "/sessions", "/api/create", "/api/copy", "/api/delete", "/api/pull"
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,80}")
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[^/?#@:*\s]+)(?::(?P<port>\d{1,5}))?/?")
DEFAULT_PORTS = {"http": "80", "https": "443"}
STANDARD_HEADERS = ("authorization", "content-type", "x-api-key", "anthropic-version")
MAX_HEADERS = 64  # custom ones, per preflight request
EXPOSED_HEADERS = (
    "X-Localllm-Ignored", "X-Localllm-Dropped-Turns", "Request-Id", "X-Request-Id", "Retry-After", "Date",
)  # fmt: skip
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@frozen
class AccessRules:
    """Access rules of the server.

    Attributes:
        hosts: further Host headers to accept.  origins: other sites whose pages may send requests.
        keys: API keys, one of which each request needs. Empty: no key is needed.
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    keys: Sequence[str] = ()

    def require(self, method: str, path: str, headers: dict[str, str], address: str = "", scheme: str = "http") -> None:
        """Raise RejectedRequestError for a request that the rules do not allow.

        headers: by lower-case names.  address: local IP address of the connection; accepted as a Host because a page of
        another site cannot send it.  scheme: http or https.
        """
        host = _HOST.fullmatch(headers.get("host", ""))
        names = {name.lower() for name in (*LOCAL_HOSTS, *self.hosts, address, f"[{address}]")}
        if not host:
            raise RejectedRequestError(403, "the Host header is missing or is not a host name")
        if host["name"].lower() not in names:
            name = host["name"][:100]
            reason = f"the Host header names {name}, which this server does not allow"
            raise RejectedRequestError(403, f"{reason}; start it with --allow-host {name}")
        origin = headers.get("origin")
        server_origin = f"{scheme}://{headers['host']}"
        if origin is not None and origin != server_origin:
            if path.startswith(SAME_ORIGIN_PATHS):
                raise RejectedRequestError(403, f"{path} is not for pages of other sites")
            if origin not in self.origins:
                raise RejectedRequestError(403, describe_rejected_origin(origin))
        if self.keys and path not in OPEN_PATHS and method != "OPTIONS" and not self.has_key(headers):
            raise RejectedRequestError(
                401, "the API key is missing or wrong; send it as Authorization: Bearer KEY or x-api-key: KEY"
            )

    def has_key(self, headers: dict[str, str]) -> bool:
        """Return whether a request has a valid key, in OpenAI's or Anthropic's header."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        candidates = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        results = [
            hmac.compare_digest(candidate.encode(), key.encode()) for candidate in candidates for key in self.keys
        ]
        return any(results)


class AccessGuard:
    """ASGI middleware that applies the access rules, adds security headers, and handles disconnects."""

    def __init__(self, app: ASGIApp, rules: AccessRules, canonical: Callable[[str], str]):
        """Wrap an app.

        canonical: normalizes a path before the rules and the app see it.
        """
        self._app, self._rules, self._canonical = app, rules, canonical

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope = {**scope, "path": self._canonical(scope["path"])}
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        origin = headers.get("origin", "")
        requested = headers.get("access-control-request-headers", "")
        shared = self._make_cors_headers(origin, requested) if origin in self._rules.origins else {}
        own_headers = {"Date": formatdate(usegmt=True)} | HEADERS | shared

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in own_headers.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        try:
            if sum(name == b"host" for name, _ in scope["headers"]) > 1:  # programs differ in which one they use
                raise RejectedRequestError(400, "the request has more than one Host header; send one")
            address = (scope.get("server") or ("",))[0] or ""
            self._rules.require(
                scope["method"], scope["path"], headers, address.removeprefix("::ffff:"), scope.get("scheme", "http")
            )
        except RejectedRequestError as error:
            await make_error_response(error, select_error_format(scope["path"]))(scope, receive, send_with_headers)
            return
        if scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnectedError:
            return

    def _make_cors_headers(self, origin: str, requested: str) -> dict[str, str]:
        """Return the CORS headers for an allowed site.

        requested: the request headers of the page. The official JavaScript clients send many of their own
        (x-stainless-..., anthropic-...), which the server does not use.
        """
        names = [name.strip().lower() for name in requested.split(",")]
        allowed = [name for name in names if _HEADER.fullmatch(name) and name not in STANDARD_HEADERS]
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": ", ".join((*STANDARD_HEADERS, *allowed[:MAX_HEADERS])),
            "Access-Control-Allow-Private-Network": "true",
            "Access-Control-Expose-Headers": ", ".join(EXPOSED_HEADERS),
            "Access-Control-Max-Age": "600",
            "Cross-Origin-Resource-Policy": "cross-origin",
            "Vary": "Origin, Access-Control-Request-Headers",
        }


def describe_rejected_origin(origin: str) -> str:
    """Return the error message for a page of a disallowed site, with the option that allows it."""
    try:
        allowed = normalize_origin(origin[:100])
    except UsageError:
        return "the Origin header is not a scheme and a host like https://example.com"
    return f"this server does not allow requests from pages of {allowed}; start it with --allow-origin {allowed}"


def normalize_origin(text: str) -> str:
    """Return an origin in lower case, without a path or a default port. Raises UsageError."""
    match = _ORIGIN.fullmatch(text.strip().lower())
    if text == "null":
        return text
    if not match:
        raise UsageError(f"an origin must be a scheme and a host like https://example.com, not {text!r}")
    port = match["port"] if match["port"] != DEFAULT_PORTS.get(match["scheme"]) else None
    return f"{match['scheme']}://{match['host']}" + (f":{port}" if port else "")
