"""localllm serve as a listener: connections that are quick, an end that is told, clients that speak something else."""

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
from conftest import ROOT
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm import builtin_model
from localllm.server.listening import Patient


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
    made = Patient.connection_made
    monkeypatch.setattr(Patient, "connection_made", lambda self, place: accepted.append(place) or made(self, place))
    connection = HTTPConnection("127.0.0.1", told.port, timeout=30)
    for _ in range(3):
        connection.request("GET", "/health")
        assert connection.getresponse().read()
    [transport] = accepted
    assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    connection.close()


PORT = re.compile(r"127\.0\.0\.1:(\d+)")
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
        assert line.startswith("localllm: 5 answers were cut short: ") and ("--grace" in line) == (signals == 1)


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
