"""Read the proxy settings HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, in upper or lower case."""

import base64
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment

from localllm.errors import LocalllmError
from localllm.frozen import frozen

SOCKS = ("socks5", "socks5h")  # need the optional dependency socksio


@frozen
class Proxy:
    """A proxy server.

    Attributes:
        variable: the environment variable.  url: without credentials.  headers: including the credentials.
    """

    variable: str
    scheme: str
    host: str
    port: int
    headers: dict[str, str]

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @classmethod
    def parse(cls, variable: str, text: str) -> "Proxy":
        """Parse a proxy's URL. Raises LocalllmError if it is invalid."""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme, 1080)
        except ValueError:
            host = None
        if not host:
            raise LocalllmError(f"{variable} must be the URL of a proxy, such as http://10.0.0.1:3128")
        headers = {}
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Proxy-Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        return cls(variable, parts.scheme, host, port, headers)


def read_proxies() -> dict[str, Proxy]:
    """Return the proxies for "http", "https" and "all". Raises LocalllmError."""
    environment = getproxies_environment()
    return {
        kind: Proxy.parse(f"{kind.upper()}_PROXY", environment[kind])
        for kind in ("http", "https", "all")
        if environment.get(kind)
    }


def select_http_proxy(url: str) -> Proxy | None:
    """Return the proxy for a URL, or None for a direct connection.

    Raises LocalllmError for a proxy that is not an http:// one.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host) or is_excluded(host, parts.port):
        return None
    configured = read_proxies()
    proxy = configured.get(parts.scheme) or configured.get("all")
    if proxy and proxy.scheme != "http":
        raise LocalllmError(
            f"{proxy.variable} is {proxy.url}: --endpoint supports http:// proxies only; "
            f"set NO_PROXY={host} to connect directly"
        )
    return proxy


def require_supported_proxies() -> None:
    """Raise LocalllmError for a proxy that the HTTP client does not support."""
    for proxy in read_proxies().values():
        if proxy.scheme in SOCKS and find_spec("socksio") is None:
            raise LocalllmError(
                f"{proxy.variable} is {proxy.url}, which needs socksio: pip install 'localllm[socks]', or unset it"
            )
        if proxy.scheme not in ("http", "https", *SOCKS):
            raise LocalllmError(f"{proxy.variable} is {proxy.url}: the scheme must be http, https, socks5 or socks5h")


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this computer's loopback."""
    name = host.lower().rstrip(".")
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def is_excluded(host: str, port: int | None) -> bool:
    """Return whether NO_PROXY matches: names, suffixes, addresses, networks like 10.0.0.0/8, or * for all."""
    for text in getproxies_environment().get("no", "").split(","):
        name = text.strip().lower().lstrip(".")
        try:
            if "/" in name and ip_address(host) in ip_network(name, strict=False):
                return True
        except ValueError:  # a name
            continue
        if name and (name == "*" or name in (host, f"{host}:{port}") or host.endswith(f".{name}")):
            return True
    return False
