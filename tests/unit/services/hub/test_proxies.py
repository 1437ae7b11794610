"""Test proxies: which one is used for which address, and errors for unusable ones."""

import base64
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from localllm.errors import LocalllmError
from localllm.services.hub import proxies
from localllm.services.hub.proxies import require_supported_proxies, select_http_proxy
from localllm.services.remote.http import Endpoint, EndpointError

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("PYTHONPATH", "")

    def say(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return say


@contextmanager
def proxy(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Run a proxy that gives one reply; yield its address and the first bytes of each connection."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as place:

        def work() -> None:
            while True:
                try:
                    client, _ = place.accept()
                except OSError:
                    return
                with client:
                    asked.append(client.recv(65536))
                    client.sendall(answer)

        threading.Thread(target=work, daemon=True).start()
        yield f"127.0.0.1:{place.getsockname()[1]}", asked
        place.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("variables", "url", "host"),
    [
        ({}, "http://gpu:1/v1", None),
        ({"HTTP_PROXY": "http://p:1"}, "http://gpu/v1", "p"), ({"http_proxy": "p:1"}, "http://gpu/v1", "p"),
        ({"HTTP_PROXY": "http://p:1"}, "https://gpu/v1", None), ({"HTTPS_PROXY": "http://p:1"}, "https://gpu/v1", "p"),
        ({"HTTPS_PROXY": "http://p:1"}, "http://gpu/v1", None), ({"ALL_PROXY": "http://a"}, "https://gpu/v1", "a"),
        ({"ALL_PROXY": "http://a", "HTTPS_PROXY": "http://p"}, "https://gpu/v1", "p"),
        ({"ALL_PROXY": "http://a", "NO_PROXY": "other, .corp"}, "http://gpu.corp:80/v1", None),
        ({"ALL_PROXY": "http://a", "NO_PROXY": "gpu"}, "http://gpu:80/v1", None),
        ({"ALL_PROXY": "http://a", "NO_PROXY": "gpu:81"}, "http://gpu:80/v1", "a"),
        ({"ALL_PROXY": "http://a", "NO_PROXY": "10.0.0.0/8"}, "http://10.1.2.3:80/v1", None),
        ({"ALL_PROXY": "http://a", "NO_PROXY": "10.0.0.0/8"}, "http://11.1.2.3:80/v1", "a"),
        ({"ALL_PROXY": "http://a", "NO_PROXY": "*"}, "http://gpu/v1", None),
        *(({"ALL_PROXY": "http://a", "HTTP_PROXY": "http://a"}, f"http://{own}:1/v1", None)
          for own in ("localhost", "127.0.0.1", "127.9.9.9", "[::1]", "LOCALHOST", "x.localhost")),
    ],
)  # fmt: skip
def test_the_proxy_is_chosen_by_scheme_and_no_proxy(environment, variables: dict[str, str], url: str, host: str | None):
    environment(**variables)
    chosen_proxy = select_http_proxy(url)
    assert (chosen_proxy and chosen_proxy.host) == host


def test_an_http_server_is_reached_through_a_proxy(environment):
    """Send the whole address and the credentials; hide the password in errors."""
    user = base64.b64encode(b"me:s p").decode()
    with proxy(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"data": 1}') as (place, asked):
        environment(HTTP_PROXY=f"http://me:s%20p@{place}")
        assert Endpoint.parse("http://gpu.example:8000", "key").get("/models") == {"data": 1}
    [head] = [one.decode() for one in asked]
    assert head.startswith("GET http://gpu.example:8000/v1/models HTTP/1.1\r\nHost: gpu.example:8000\r\n")
    assert f"Proxy-Authorization: Basic {user}" in head and "Authorization: Bearer key" in head
    with pytest.raises(
        EndpointError, match=r"cannot be reached through HTTP_PROXY, http://127\.0\.0\.1:\d+: "
    ) as error:
        Endpoint.parse("http://gpu.example:8000").get("/models")
    assert "s p" not in str(error.value) and "s%20p" not in str(error.value)


def test_an_https_server_is_reached_through_a_tunnel(environment):
    with proxy(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n") as (place, asked):
        environment(HTTPS_PROXY=f"http://{place}")
        with pytest.raises(EndpointError, match=r"through HTTPS_PROXY, .*407 Proxy Authentication Required"):
            Endpoint.parse("https://gpu.example", "key").get("/models")
    assert asked[0].startswith(b"CONNECT gpu.example:443 HTTP/1.") and b"key" not in asked[0]


def test_run_with_an_endpoint_uses_the_proxy(environment, cli):
    with proxy(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n") as (place, asked):
        environment(ALL_PROXY=f"http://{place}")
        code, out, err = cli("run", "--endpoint", "http://gpu.example", "-p", "x")
    assert (code, out, err.count("\n")) == (1, "", 1) and asked[0].startswith(b"GET http://gpu.example/v1/models ")


@pytest.mark.parametrize("command", [["pull", "hf:a/b"], ["run", "--endpoint", "http://gpu", "-p", "x"]])
@pytest.mark.parametrize("value", ["socks5://127.0.0.1:1", "socks4://h:1", "foo://x", "http://[::1", "http://a:x"])
def test_unusable_proxies_are_refused(environment, cli, command: list[str], value: str, monkeypatch):
    monkeypatch.setattr(proxies, "find_spec", lambda name: None)
    environment(ALL_PROXY=value)
    code, out, err = cli(*command)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("localllm: error: ALL_PROXY ") and "internal" not in err
    if value.startswith("socks5") and command[0] == "pull":
        assert "localllm[socks]" in err


def test_usable_proxies_are_accepted(environment, monkeypatch):
    require_supported_proxies()
    environment(ALL_PROXY="socks5://h", HTTPS_PROXY="https://h", HTTP_PROXY="h")
    monkeypatch.setattr(proxies, "find_spec", lambda name: object())
    require_supported_proxies()
    environment(ALL_PROXY="socks4://h")
    with pytest.raises(LocalllmError, match="the scheme must be http"):
        require_supported_proxies()
