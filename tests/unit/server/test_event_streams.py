"""Test server-sent events, disconnects and listening sockets."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
import h11

from localllm.errors import LocalllmError, UsageError
from localllm.server import http as wire
from localllm.server import model_pool as model_pool
from localllm.server.http import ClientDisconnectedError, ClientLimits, EventStream, format_event, run_until_disconnect
from localllm.server.listener import IdleTimeoutProtocol, ShutdownOptions, bind_tcp, bind_unix, create_listener
from localllm.server.service import get_next_before, merge_streams


def sent_by(
    stream: EventStream, *, leaves: bool = False, slow: float = 0, heard: asyncio.Event | None = None
) -> list[Any]:
    """Run a stream and return the messages sent; heard is set at the first keep-alive."""
    sent = list[Any]()

    async def receive() -> Any:
        if not leaves:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(slow)
        sent.append(message)
        if heard and message.get("body", b"").startswith(b":"):
            heard.set()

    asyncio.run(stream({}, receive, send))
    return sent


class Pieces:
    """A source of chunks that counts its end and its closing."""

    def __init__(self, *pieces: bytes, wait: float = 0):
        self.pieces, self.wait, self.ended, self.closed = pieces, wait, 0, 0

    async def lines(self) -> AsyncIterator[bytes]:
        try:
            for piece in self.pieces:
                await asyncio.sleep(self.wait)
                yield piece
        finally:
            self.ended += 1

    async def close(self) -> None:
        self.closed += 1

    def stream(self, seconds: float = 5) -> EventStream:
        return EventStream(self.lines(), ClientLimits(seconds=seconds), {"X-More": "1"}, self.close)


def test_a_stream_sends_headers_and_chunks():
    chunks = Pieces(b"a", b"b")
    start, *bodies = sent_by(chunks.stream())
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    assert start["status"] == 200 and headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-more"], "content-length" in headers) == ("no-store", "1", False)
    assert [(each["body"], each["more_body"]) for each in bodies] == [(b"a", True), (b"b", True), (b"", False)]
    assert (chunks.ended, chunks.closed) == (1, 1)


def test_a_slow_stream_sends_keep_alive_comments(monkeypatch):
    """Send a chunk whole and once, even if it arrives then."""
    monkeypatch.setattr(wire, "KEEP_ALIVE_SECONDS", 0.001)
    heard = asyncio.Event()

    async def late() -> AsyncIterator[bytes]:
        await heard.wait()
        yield b"a"

    bodies = [each["body"] for each in sent_by(EventStream(late(), ClientLimits(), {}), heard=heard)[1:]]
    assert set(bodies[:-2]) == {b": still here\n"} and bodies[-2:] == [b"a", b""]


def test_a_stream_without_a_reader_is_closed():
    chunks = Pieces(b"a", b"b", wait=0.05)
    with pytest.raises(ClientDisconnectedError):
        sent_by(chunks.stream(), leaves=True)
    assert chunks.closed == 1
    slow = Pieces(b"a")
    with pytest.raises(TimeoutError):
        sent_by(slow.stream(0.01), slow=5)
    assert slow.closed == 1


def test_events_are_json_lines_with_an_optional_name():
    assert format_event({"a": "ö"}, "name") == 'event: name\ndata: {"a":"ö"}\n\n'.encode()
    assert format_event([1, 2]) == b"data: [1,2]\n\n" and format_event("\ud800") == b'data: "?"\n\n'


def test_work_is_cancelled_when_the_client_disconnects():
    async def asked(work: float, stays: float) -> tuple[Any, bool]:
        ended = []

        async def working() -> str:
            try:
                await asyncio.sleep(work)
                return "done"
            finally:
                ended.append(1)

        async def receive() -> Any:
            await asyncio.sleep(stays)
            return {"type": "http.disconnect"}

        try:
            return await run_until_disconnect(receive, working()), bool(ended)
        except ClientDisconnectedError:
            return None, bool(ended)

    assert asyncio.run(asked(0, 60)) == ("done", True) and asyncio.run(asked(60, 0.01)) == (None, True)


def test_merged_streams_yield_all_items_and_raise_errors():
    async def numbers(*values: int, fail: bool = False) -> AsyncIterator[int]:
        for value in values:
            await asyncio.sleep(0)
            yield value
        if fail:
            raise LocalllmError("broken")

    async def all_of(*sources: Any) -> list[Any]:
        return [each async for each in merge_streams(sources)]

    assert asyncio.run(all_of(numbers(1, 2))) == [(0, 1), (0, 2)] and asyncio.run(all_of()) == []
    assert sorted(asyncio.run(all_of(numbers(1, 2), numbers(), numbers(3)))) == [(0, 1), (0, 2), (2, 3)]
    with pytest.raises(LocalllmError, match="broken"):
        asyncio.run(all_of(numbers(1), numbers(2, fail=True)))

    async def late(end: float | None) -> Any:
        return await get_next_before(numbers(5), end)

    assert asyncio.run(late(None)) == 5
    with pytest.raises(TimeoutError):
        asyncio.run(late(0))


def test_binding_an_unusable_address_is_refused():
    taken = bind_tcp("127.0.0.1", 0)
    try:
        port = taken.getsockname()[1]
        is_reused = taken.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert bool(is_reused) == (sys.platform != "win32"), "a server that was ended may start again at once"
        taken.listen()
        with pytest.raises(LocalllmError, match=rf"cannot listen on 127\.0\.0\.1, port {port}: [A-Z]") as error:
            bind_tcp("127.0.0.1", port)
        assert "Errno" not in str(error.value)
    finally:
        taken.close()
    with pytest.raises(LocalllmError, match=r"port 99999: .*0-65535"):
        bind_tcp("127.0.0.1", 99999)


def test_the_listener_limits_connections_and_grace():
    listener = create_listener(None, ClientLimits(connections=7), ShutdownOptions(3.9, lambda: None, print))
    expected = {
        "http": IdleTimeoutProtocol, "ws": "none", "lifespan": "off", "log_config": None, "access_log": False,
        "server_header": False, "limit_concurrency": 7, "timeout_keep_alive": 10, "date_header": False,
        "h11_max_incomplete_event_size": 65536,
    }  # fmt: skip
    assert {name: getattr(listener.config, name) for name in expected} == expected and listener.stopped_by is None
    limits = ClientLimits()
    assert (limits.body, limits.depth, limits.seconds, limits.connections) == (33554432, 100, 30.0, 128)
    assert (limits.answer_seconds, limits.drops_turns, limits.folders) == (None, False, ())


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets here")
def test_a_unix_socket_replaces_only_a_dead_one(tmp_path):
    """Remove what a killed server left, and nothing else."""
    path = str(tmp_path / "s")
    mask = os.umask(0o022)
    try:
        for _ in range(2):
            with bind_unix(path) as listening:
                assert os.stat(path).st_mode & 0o777 == 0o600
                listening.listen()
                with (
                    pytest.raises(
                        LocalllmError,
                        match=r"s: another server is listening on this socket; give "
                        r"another path$",
                    ),
                    bind_unix(path),
                ):
                    pass
            assert not os.path.exists(path)
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(path)
        os.unlink(path)
        (tmp_path / "s").write_bytes(b"notes")
        with pytest.raises(UsageError, match=r"s exists and is not a socket; give another path$"), bind_unix(path):
            pass
        assert (tmp_path / "s").read_bytes() == b"notes"
        with pytest.raises(LocalllmError, match=r"cannot listen on .*x/s: No such file"), bind_unix(f"{tmp_path}/x/s"):
            pass
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(mask)


@pytest.mark.parametrize(("state", "idle"), [(None, True), (True, True), (False, False)])
def test_an_idle_connection_times_out(monkeypatch, state: bool | None, idle: bool):
    """Allow ten seconds for a request and one for the rest of an unread body; a running answer has no limit."""
    calls: list[Any] = []

    class Timer:
        def __init__(self, seconds: float, call: Any):
            calls.append(seconds)
            self.call, self.cancel = call, lambda: calls.append("cancel")

    connection: Any = IdleTimeoutProtocol.__new__(IdleTimeoutProtocol)
    connection._timer, connection.loop = None, SimpleNamespace(call_later=Timer)
    connection.conn, connection.transport = SimpleNamespace(), SimpleNamespace(abort=lambda: calls.append("abort"))
    connection.cycle = None if state is None else SimpleNamespace(response_complete=state)
    for name in ("connection_made", "connection_lost", "on_response_complete"):
        monkeypatch.setattr(IdleTimeoutProtocol.__base__, name, lambda *given, name=name: calls.append(name))
    connection.connection_made(None)
    for connection.conn.their_state in (h11.DONE, h11.SEND_BODY):
        connection.on_response_complete()
    connection._timer.call()
    connection.connection_lost(None)
    assert calls == [
        *["connection_made", 10.0, "on_response_complete", "cancel", 10.0, "on_response_complete", "cancel", 1.0],
        *(["abort"] if idle else []), "cancel", "connection_lost",
    ]  # fmt: skip
