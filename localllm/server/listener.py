"""Where the server listens, and how it ends: uvicorn, with patience for nobody who does not speak."""

import asyncio
import errno
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.errors import LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.server.http import Limits
from localllm.system.processes import can_handle_in_loop, ending_signals, may_reuse_address

AFTER = 1.0  # seconds in which the rest of a body may come when the answer is there: who sends it should see that
HEAD_BYTES = 64 << 10  # of a request's first line and headers
TO_BE_TOLD = 0.5  # seconds in which clients are told that the server ends before their answers do
logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())  # its tracebacks and warnings are not for users


@frozen
class Ending:
    """How a server ends.

    Attributes:
        grace: seconds that answers in the making are given when the server is told to stop.
        stop_answers: ends them: who waits for one is told so.  warn: says a line to the user.
    """

    grace: float
    stop_answers: Callable[[], None]
    warn: Callable[[str], None]


class IdleTimeoutProtocol(H11Protocol):
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
        cycle = self.cycle
        try:
            await self._inner(scope, receive, send)
        except (TimeoutError, asyncio.CancelledError):  # who does not read, or was not told of the end in time
            cycle.disconnected = True  # uvicorn has nothing to add
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a client that offers HTTP/2 or WebSockets is answered in HTTP/1.1."""


class Listener(uvicorn.Server):
    """uvicorn's server, whose end is ours: SIGTERM, Ctrl-C and Windows' Ctrl-Break end it, and nothing is raised again.

    The first signal gives answers their grace, the second one ends at once. Until then nothing wakes the event loop:
    uvicorn's own loop looks ten times a second, which takes 0.3 % of a core.

    Attributes:
        stopped_by: the signal that ended it, or None.  is_hurried: whether a second one came.
    """

    stopped_by: int | None = None
    is_hurried = False

    def __init__(self, config: uvicorn.Config, ending: Ending):
        super().__init__(config)
        self._ending, self._signal = ending, asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ending_signals())}
        loop = self._loop if can_handle_in_loop() else None
        for number in before:
            if loop:  # which wakes up whichever thread the signal reaches
                loop.add_signal_handler(number, self.handle_exit, number, None)
            else:
                signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                if loop:
                    loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.is_hurried = self.stopped_by is not None
        self.stopped_by = sig
        self.stop()

    def stop(self) -> None:
        """End, from any thread or a handler of signals."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._signal.set)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def main_loop(self) -> None:
        while not self.should_exit:
            await self._signal.wait()
            self._signal.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for place in sockets or ():
            place.close()
        for connection in [*self.server_state.connections]:
            connection.shutdown()
        if await self._is_done(self._ending.grace, is_urgent=False):
            return
        number = len(self.server_state.tasks)
        reason = "a second signal came" if self.is_hurried else f"the {self._ending.grace:g} s of --grace are over"
        self._ending.warn(f"{number} {'answer was' if number == 1 else 'answers were'} cut short: {reason}")
        self._ending.stop_answers()
        if not await self._is_done(TO_BE_TOLD, is_urgent=True):
            for task in [*self.server_state.tasks]:
                task.cancel()
            await self._is_done(TO_BE_TOLD, is_urgent=True)

    async def _is_done(self, seconds: float, is_urgent: bool) -> bool:
        """Whether all connections end within that time; a second signal ends the wait unless it is urgent already."""
        state, clock = self.server_state, asyncio.get_running_loop().time
        end = clock() + seconds
        while state.connections or state.tasks:
            left = end - clock()
            if left <= 0 or (self.is_hurried and not is_urgent):
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, 0.05)):
                    await self._signal.wait()
            self._signal.clear()
        return True


def listener(app: ASGIApp, limits: Limits, ending: Ending) -> Listener:
    config = uvicorn.Config(
        app,
        http=IdleTimeoutProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,  # which is told once a second; Guard has it
        limit_concurrency=limits.connections,
        timeout_keep_alive=int(IdleTimeoutProtocol.seconds),
        h11_max_incomplete_event_size=HEAD_BYTES,
    )
    return Listener(config, ending)


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


def twin(found: socket.socket) -> socket.socket | None:
    """Listens at [::1] for one that listens at 127.0.0.1: localhost means either. None where there is no IPv6."""
    try:
        return tcp_socket("::1", found.getsockname()[1])
    except LocalllmError as error:
        if isinstance(error.__context__, OSError) and error.__context__.errno == errno.EADDRINUSE:
            raise
        return None


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
