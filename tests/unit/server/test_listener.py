"""localllm serve as a listener: connections that are quick, an end that is told, clients that speak something else."""

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
def told(path: str):
    with serving({"scripted": lambda: scripted(path, {})}) as served:
        yield served


def test_pieces_leave_at_once(told: Served, monkeypatch: pytest.MonkeyPatch):
    """Without TCP_NODELAY, a second request on a connection waits for the client's delayed acknowledgement."""
    accepted = list[Any]()
    made = IdleTimeoutProtocol.connection_made
    monkeypatch.setattr(
        IdleTimeoutProtocol, "connection_made", lambda self, place: accepted.append(place) or made(self, place)
    )
    connection = HTTPConnection("127.0.0.1", told.port, timeout=30)
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
    """A server as users start it, and its port."""
    command = [sys.executable, "-c", code, "serve", str(builtin_model()), "--port", "0", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        try:
            found = PORT.search(process.stderr.readline().decode())
            assert found
            yield process, int(found[1])
        finally:
            process.kill()


def asked(port: int, path: str, stream: bool) -> HTTPConnection:
    """A connection on which an answer without an end was asked for."""
    size = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    body = {**BEGUN[path], size: 1000, "stream": stream, "ignore_eos": True}
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


@pytest.mark.slow
@pytest.mark.parametrize(("grace", "signals"), [("0.5", 1), ("60", 2)])
def test_answers_that_are_cut_are_told_so(grace: str, signals: int):
    """When grace is over, or at the second signal: an error in every stream, 503 for the others, one line on stderr."""
    with started("--grace", grace) as (process, port):
        streams = {path: asked(port, path, True) for path in BEGUN}
        replies = {path: connection.getresponse() for path, connection in streams.items()}
        begun = {path: reply.read(20) for path, reply in replies.items()}
        waiting = asked(port, "/v1/messages", False)
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


def test_a_server_that_does_nothing_is_not_woken(told: Served):
    told.get("/health")
    turns = []
    inner = told.loop._run_once
    told.loop._run_once = lambda: turns.append(inner())
    told.get("/health")
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
app.ADDRESSES = (*app.ADDRESSES, ("GET", "/stuck", stuck))
main()
"""


@pytest.mark.slow
def test_the_second_signal_waits_for_no_thread():
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
def test_clients_that_speak_something_else():
    """Who offers HTTP/2 or WebSockets is answered in HTTP/1.1; who speaks TLS is refused; all without a word."""
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
def test_localhost_is_both_addresses():
    with started() as (process, port):
        for host in ("127.0.0.1", "::1"):
            connection = HTTPConnection(host, port, timeout=30)
            connection.request("GET", "/health", headers={"Host": f"localhost:{port}"})
            assert connection.getresponse().read().startswith(b'{"status":"ok"')
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EADDRINUSE])
def test_where_there_is_no_ipv6(number: int, monkeypatch: pytest.MonkeyPatch):
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
    """Events of a stream as they come."""

    def __init__(self, served: Served, path: str, body: dict):
        self._connection = HTTPConnection("127.0.0.1", served.port, timeout=30)
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        self._reply = self._connection.getresponse()

    def line(self) -> str:
        return self._reply.readline().decode().rstrip("\n")


def test_a_message_begins_before_its_prompt_is_read(told: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "KEEP_ALIVE_SECONDS", 0.05)
    told.chat("x")
    engine = told.model().engine
    engine.gate.clear()
    reader = Reader(told, "/v1/messages", {**BEGUN["/v1/messages"], "max_tokens": 9, "stream": True})
    assert reader.line() == "event: message_start"
    assert json.loads(reader.line()[6:])["message"]["usage"]["input_tokens"] > 0
    for _ in range(3):
        assert [reader.line() for _ in range(3)] == ["", "event: ping", 'data: {"type":"ping"}']
    engine.gate.set()
    rest = [reader.line() for _ in range(200)]
    assert "event: content_block_start" in rest and "event: message_stop" in rest


@pytest.mark.parametrize("address", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_signs_of_life_are_no_events(told: Served, address: str, monkeypatch: pytest.MonkeyPatch):
    """A reader that takes an empty line for the end of an event, and knows no comments."""
    monkeypatch.setattr(wire, "KEEP_ALIVE_SECONDS", 0.05)
    told.chat("x")
    engine = told.model().engine
    engine.gate.clear()
    reader = Reader(told, address, {**BEGUN[address], "stream": True})
    time.sleep(0.5)
    engine.gate.set()
    lines = [reader.line() for _ in range(300)]
    assert lines.count(": still here") >= 5
    pieces, count = [], 0  # how many lines of data each empty line ends
    for line in lines:
        count += line.startswith("data: ")
        if not line and (count or not pieces):
            pieces.append(count)
            count = 0
    assert pieces and {*pieces} == {1}


def own_address() -> str | None:
    """Of this computer, other than the loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]


@pytest.mark.slow
@pytest.mark.skipif(own_address() is None, reason="this computer has no other address")
def test_other_computers_use_its_address_or_name(tmp_path):
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
