"""Test localllm serve as a listener: quick connections, announced ends, and clients with other protocols."""

import errno
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest
from project import ROOT
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm import builtin_model
from localllm.errors import LocalllmError
from localllm.server import http as wire
from localllm.server import listener as listening
from localllm.server.listener import IdleTimeoutProtocol, bind_ipv6_loopback, bind_tcp


@pytest.fixture
def path(tmp_path) -> str:
    return str(write_tiny_model(tmp_path / "tiny.gguf"))


@pytest.fixture
def server(path: str):
    with serving({"scripted": lambda: scripted(path, {})}) as served:
        yield served


def test_chunks_are_sent_without_delay(server: Served, monkeypatch: pytest.MonkeyPatch):
    """Set TCP_NODELAY, or a second request waits for the client's delayed acknowledgement."""
    accepted = list[Any]()
    connection_made = IdleTimeoutProtocol.connection_made
    monkeypatch.setattr(
        IdleTimeoutProtocol,
        "connection_made",
        lambda self, place: accepted.append(place) or connection_made(self, place),
    )
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    for _ in range(3):
        connection.request("GET", "/health")
        assert connection.getresponse().read()
    [transport] = accepted
    assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    connection.close()


PORT = re.compile(r":(\d+); Ctrl-C")
BEGUN = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}
TOLD = {
    "/v1/chat/completions": '"code":"overloaded"', "/v1/messages": '"type":"overloaded_error"',
    "/v1/completions": '"code":"overloaded"', "/v1/responses": '"type":"response.failed"',
}  # fmt: skip


@contextmanager
def started(
    *options: str, code: str = "from localllm.cli.main import main; main()"
) -> Iterator[tuple[subprocess.Popen, int]]:
    """Start a server as users do; yield the process and its port."""
    command = [sys.executable, "-c", code, "serve", str(builtin_model()), "--port", "0", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        try:
            match = PORT.search(process.stderr.readline().decode())
            assert match
            yield process, int(match[1])
        finally:
            process.kill()


def request_endless_answer(port: int, path: str, stream: bool) -> HTTPConnection:
    """Return a connection on which an endless answer was requested."""
    size = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    body = {**BEGUN[path], size: 1000, "stream": stream, "ignore_eos": True}
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


@pytest.mark.slow
@pytest.mark.parametrize(("grace", "signals"), [("0.5", 1), ("60", 2)])
def test_answers_cut_by_a_shutdown_are_reported_as_errors(grace: str, signals: int):
    """After the grace period or a second signal: an error in every stream, 503 for the others, one line on stderr."""
    with started("--grace", grace) as (process, port):
        streams = {path: request_endless_answer(port, path, True) for path in BEGUN}
        replies = {path: connection.getresponse() for path, connection in streams.items()}
        begun = {path: reply.read(20) for path, reply in replies.items()}
        waiting = request_endless_answer(port, "/v1/messages", False)
        time.sleep(0.2)
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        end = time.monotonic() + 20
        for path, reply in replies.items():
            text = (begun[path] + reply.read()).decode()
            assert TOLD[path] in text and "the server is stopping" in text and "[DONE]" not in text
        reply = waiting.getresponse()
        assert reply.status == 503 and json.loads(reply.read())["error"]["type"] == "overloaded_error"
        assert process.wait(30) == 0 and time.monotonic() < end
        [line] = process.stderr.read().decode().splitlines()
        assert line.startswith("localllm: 5 responses were cut short: ") and ("--grace" in line) == (signals == 1)


def test_an_idle_server_does_not_wake_up(server: Served):
    server.get("/health")
    turns = []
    inner = server.loop._run_once
    server.loop._run_once = lambda: turns.append(inner())
    server.get("/health")
    time.sleep(0.3)
    begun = len(turns)
    assert begun
    time.sleep(1)
    assert len(turns) == begun


STUCK = """
import asyncio, time
from localllm.server import app
from localllm.cli.main import main
async def stuck(service, request):
    await asyncio.to_thread(time.sleep, 60)
app.ROUTES = (*app.ROUTES, ("GET", "/stuck", stuck))
main()
"""


@pytest.mark.slow
def test_the_second_signal_does_not_wait_for_threads():
    with started(code=STUCK) as (process, port):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/stuck")
        time.sleep(0.3)
        begin = time.monotonic()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        reply = connection.getresponse()
        assert reply.status == 503 and b"the server is stopping" in reply.read()
        assert process.wait(30) == 130 and time.monotonic() - begin < 20
        assert len(process.stderr.read().splitlines()) == 1


def raw(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(data)
        got = b""
        while piece := client.recv(65536):
            got += piece
    return got


@pytest.mark.slow
def test_clients_with_other_protocols_are_answered_or_refused_silently():
    """Answer offers of HTTP/2 and WebSockets in HTTP/1.1, and refuse TLS."""
    hello = bytes.fromhex("16030100c8010000c40303") + bytes(200)
    with started() as (process, port):
        for offer in (b"h2c", b"websocket"):
            head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: " + offer
            assert raw(port, head + b"\r\nHTTP2-Settings: AAMAAABk\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert raw(port, hello).startswith(b"HTTP/1.1 400")
        process.send_signal(signal.SIGTERM)
        assert (process.wait(30), process.stderr.read()) == (0, b"")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as place:
            place.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="this computer has no IPv6")
def test_localhost_listens_on_ipv4_and_ipv6():
    with started() as (process, port):
        for host in ("127.0.0.1", "::1"):
            connection = HTTPConnection(host, port, timeout=30)
            connection.request("GET", "/health", headers={"Host": f"localhost:{port}"})
            assert connection.getresponse().read().startswith(b'{"status":"ok"')
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EADDRINUSE])
def test_localhost_works_without_ipv6(number: int, monkeypatch: pytest.MonkeyPatch):
    def refuse(host: str, port: int) -> None:
        try:
            raise OSError(number, "no")
        except OSError:
            raise LocalllmError("no") from None

    with bind_tcp("127.0.0.1", 0) as place:
        monkeypatch.setattr(listening, "bind_tcp", refuse)
        if number == errno.EADDRINUSE:
            with pytest.raises(LocalllmError):
                bind_ipv6_loopback(place)
        else:
            assert bind_ipv6_loopback(place) is None


class Reader:
    """A reader of a stream's lines as they arrive."""

    def __init__(self, served: Served, path: str, body: dict):
        self._connect = HTTPConnection("127.0.0.1", served.port, timeout=30)
        self._connect.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        self._reply = self._connect.getresponse()

    def line(self) -> str:
        return self._reply.readline().decode().rstrip("\n")


def test_a_message_starts_before_its_prompt_is_prefilled(server: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "KEEP_ALIVE_SECONDS", 0.05)
    server.chat("x")
    engine = server.model().engine
    engine.gate.clear()
    reader = Reader(server, "/v1/messages", {**BEGUN["/v1/messages"], "max_tokens": 9, "stream": True})
    assert reader.line() == "event: message_start"
    assert json.loads(reader.line()[6:])["message"]["usage"]["input_tokens"] > 0
    for _ in range(3):
        assert [reader.line() for _ in range(3)] == ["", "event: ping", 'data: {"type":"ping"}']
    engine.gate.set()
    rest = [reader.line() for _ in range(200)]
    assert "event: content_block_start" in rest and "event: message_stop" in rest


@pytest.mark.parametrize("address", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_keep_alive_lines_are_no_events(server: Served, address: str, monkeypatch: pytest.MonkeyPatch):
    """Read them as a client that takes an empty line for the end of an event and knows no comments."""
    monkeypatch.setattr(wire, "KEEP_ALIVE_SECONDS", 0.05)
    server.chat("x")
    engine = server.model().engine
    engine.gate.clear()
    reader = Reader(server, address, {**BEGUN[address], "stream": True})
    time.sleep(0.5)
    engine.gate.set()
    lines = [reader.line() for _ in range(300)]
    assert sum(line == ": still here" or line.startswith(": read ") for line in lines) >= 5
    pieces, count = [], 0  # how many lines of data each empty line ends
    for line in lines:
        count += line.startswith("data: ")
        if not line and (count or not pieces):
            pieces.append(count)
            count = 0
    assert pieces and {*pieces} == {1}


def own_address() -> str | None:
    """Return an address of this computer other than loopback, if there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]


@pytest.mark.slow
@pytest.mark.skipif(own_address() is None, reason="this computer has no other address")
def test_other_computers_reach_the_server_by_address_or_name(tmp_path):
    (tmp_path / "keys").write_text("# the laptop\ncorrect horse\n")
    (tmp_path / "keys").chmod(0o600)
    options = ["--host", "0.0.0.0", "--api-key-file", str(tmp_path / "keys")]
    with started(*options) as (process, port):
        names = (own_address(), socket.gethostname(), "localhost", "evil.example", "192.168.99.99", "[::]")
        for host, status in zip(names, (200, 200, 200, 403, 403, 403), strict=True):
            connection = HTTPConnection(own_address(), port, timeout=30)
            connection.request("GET", "/v1/models", headers={"Host": host, "Authorization": "Bearer correct horse"})
            assert connection.getresponse().status == status, host
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
