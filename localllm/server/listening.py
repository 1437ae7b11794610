"""Where the server listens, and how it ends: uvicorn, with patience for nobody who does not speak."""

import asyncio
import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.errors import LocalllmError, UsageError
from localllm.server.wire import Limits
from localllm.system.processes import ending_signals, may_reuse_address

AFTER = 1.0  # seconds in which the rest of a body may come when the answer is there: who sends it should see that
HEAD_BYTES = 64 << 10  # of a request's first line and headers


class Patient(H11Protocol):
    """A connection that is ended when no request comes, or when an answer is not read."""

    seconds = 10.0  # for a request's headers

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._inner: ASGIApp = self.app
        self.app = self._answered
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait(self.seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        is_sending = self.conn.their_state is h11.SEND_BODY  # a body that nobody wants to read to its end
        super().on_response_complete()
        self._wait(AFTER if is_sending else self.seconds)

    def _wait(self, seconds: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._inner(scope, receive, send)
        except TimeoutError:  # the client does not read: what waits to be sent to it is given up
            self.transport.abort()


class Listener(uvicorn.Server):
    """uvicorn's server, whose end is ours: SIGTERM, Ctrl-C and Windows' Ctrl-Break end it, and nothing is raised again.

    Attributes:
        stopped_by: the signal that ended it, or None.
    """

    stopped_by: int | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ending = (signal.SIGINT, *ending_signals())
        before = {number: signal.signal(number, self.handle_exit) for number in ending}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.stopped_by = sig
        super().handle_exit(sig, frame)


def listener(app: ASGIApp, limits: Limits, grace: float) -> Listener:
    """grace: seconds that answers in the making are given when the server is told to stop."""
    config = uvicorn.Config(
        app,
        http=Patient,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=limits.connections,
        timeout_keep_alive=int(Patient.seconds),
        timeout_graceful_shutdown=int(grace),
        h11_max_incomplete_event_size=HEAD_BYTES,
    )
    return Listener(config)


def tcp_socket(host: str, port: int) -> socket.socket:
    """Listens at an address. Raises LocalllmError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY where the protocol is named; without it a kept-alive request waits 44 ms for an ACK.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if may_reuse_address():
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise LocalllmError(f"cannot listen at {host}, port {port}: {reason}") from None
    return found


@contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """Listens at a path that nobody but the user may open, and removes it in the end. Raises UsageError."""
    if not hasattr(socket, "AF_UNIX"):
        raise UsageError("this system has no Unix sockets: use --port")
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(f"{path} is there, and is no socket")
        require_dead(path)
        os.unlink(path)
    found = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        found.bind(path)
    except OSError as error:
        found.close()
        raise LocalllmError(f"cannot listen at {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    try:
        yield found
    finally:
        found.close()
        with suppress(OSError):
            os.unlink(path)


def require_dead(path: str) -> None:
    """Raises LocalllmError if somebody listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise LocalllmError(f"{path}: another server listens there")
