"""Listen on sockets, run uvicorn with idle-connection timeouts, and shut down gracefully."""

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.errors import LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.server.http import ClientLimits
from localllm.system.processes import can_handle_in_loop, can_reuse_address, list_ending_signals

# Seconds to keep a connection open for the rest of a body, so that the client still receives the response.
LINGER_SECONDS = 1.0
HEAD_BYTES = 64 << 10  # maximum size of request line and headers
REPORT_SECONDS = 0.5  # seconds for telling clients that their responses are cut short
FIRST_DESCRIPTOR = 3  # the first descriptor after stdin, stdout and stderr
LOOPBACK = ("127.", "::1", "::ffff:127.")

logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())  # its tracebacks and warnings are not for users


@frozen
class ShutdownOptions:
    """Options of the server's shutdown.

    Attributes:
        grace: seconds that responses get to finish after the signal.
        stop_responses: aborts the remaining ones.  warn: prints a line for the user.
    """

    grace: float
    stop_responses: Callable[[], None]
    warn: Callable[[str], None]


@frozen
class TlsFiles:
    """A certificate chain and its private key, both PEM files."""

    certfile: str
    keyfile: str | None

    @classmethod
    def load(cls, certfile: str | None, keyfile: str | None) -> "TlsFiles | None":
        """Check that both files can be loaded; return None without a certificate. Raises UsageError."""
        if certfile is None:
            return None
        try:
            # An encrypted key is refused: a server cannot ask for its password.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: b"")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else str(error)
            raise UsageError(f"ssl_certfile or ssl_keyfile cannot be loaded: {reason}") from None
        return cls(certfile, keyfile)


class IdleTimeoutProtocol(H11Protocol):
    """A connection that closes itself when it is idle, or when the client does not read its response."""

    seconds = 10.0  # to receive a request's headers

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._inner: ASGIApp = self.app
        self.app = self._run_app
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait(self.seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        is_sending = self.conn.their_state is h11.SEND_BODY  # the rest of the body is not read
        super().on_response_complete()
        self._wait(LINGER_SECONDS if is_sending else self.seconds)

    def _wait(self, seconds: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self.cycle
        try:
            await self._inner(scope, receive, send)
        except (TimeoutError, asyncio.CancelledError):  # not read by the client, or cancelled at the end
            cycle.disconnected = True  # so that uvicorn sends nothing more
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing: a client that offers HTTP/2 or WebSockets is answered in HTTP/1.1."""


class Listener(uvicorn.Server):
    """uvicorn's server with its own shutdown on SIGTERM, Ctrl-C and Windows' Ctrl-Break.

    The first signal gives responses the grace period to finish, the second one ends them immediately; signals are not
    raised again. Without requests the event loop sleeps: uvicorn's own loop wakes ten times a second, which takes 0.3 %
    of a core.

    Attributes:
        stopped_by: the signal that ended it, or None.  is_hurried: whether a second one came.
    """

    stopped_by: int | None = None
    is_hurried = False

    def __init__(self, config: uvicorn.Config, ending: ShutdownOptions):
        super().__init__(config)
        self._ending, self._signal = ending, asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *list_ending_signals())}
        loop = self._loop if can_handle_in_loop() else None
        for number in handlers:
            if loop:  # this wakes the loop even if another thread receives the signal
                loop.add_signal_handler(number, self.handle_exit, number, None)
            else:
                signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                if loop:
                    loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.is_hurried = self.stopped_by is not None
        self.stopped_by = sig
        self.stop()

    def stop(self) -> None:
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
        for listening in sockets or ():
            listening.close()
        for connection in [*self.server_state.connections]:
            connection.shutdown()
        if await self._wait_until_idle(self._ending.grace, is_urgent=False):
            return
        number = len(self.server_state.tasks)
        reason = "a second signal arrived" if self.is_hurried else f"--grace {self._ending.grace:g} s is over"
        self._ending.warn(f"{number} {'response was' if number == 1 else 'responses were'} cut short: {reason}")
        self._ending.stop_responses()
        if not await self._wait_until_idle(REPORT_SECONDS, is_urgent=True):
            for task in [*self.server_state.tasks]:
                task.cancel()
            await self._wait_until_idle(REPORT_SECONDS, is_urgent=True)

    async def _wait_until_idle(self, seconds: float, is_urgent: bool) -> bool:
        """Wait until all connections have ended; return False on timeout.

        A second signal also ends the wait, unless `is_urgent`.
        """
        state, clock = self.server_state, asyncio.get_running_loop().time
        end = clock() + seconds
        while state.connections or state.tasks:
            seconds_left = end - clock()
            if seconds_left <= 0 or (self.is_hurried and not is_urgent):
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(min(seconds_left, 0.05)):
                    await self._signal.wait()
            self._signal.clear()
        return True


def create_listener(
    app: ASGIApp, limits: ClientLimits, ending: ShutdownOptions, tls: TlsFiles | None = None
) -> Listener:
    """Create a server for an app."""
    config = uvicorn.Config(
        app,
        http=IdleTimeoutProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,  # updated once a second only; Guard adds it
        limit_concurrency=limits.connections,
        timeout_keep_alive=int(IdleTimeoutProtocol.seconds),
        h11_max_incomplete_event_size=HEAD_BYTES,
        ssl_certfile=tls.certfile if tls else None,
        ssl_keyfile=tls.keyfile if tls else None,
    )
    return Listener(config, ending)


def bind_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if IPPROTO_TCP is given; without it a kept-alive request waits 44 ms for an ACK.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if can_reuse_address():
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise LocalllmError(f"cannot listen on {host}, port {port}: {reason}") from None
    return listening


def bind_ipv6_loopback(first: socket.socket) -> socket.socket | None:
    """Bind the same port on [::1], since localhost may resolve to either address; return None without IPv6."""
    try:
        return bind_tcp("::1", first.getsockname()[1])
    except LocalllmError as error:
        if isinstance(error.__context__, OSError) and error.__context__.errno == errno.EADDRINUSE:
            raise
        return None


@contextmanager
def bind_unix(path: str) -> Iterator[socket.socket]:
    """Bind a Unix socket that only the user can open, and remove it at the end. Raises UsageError."""
    if not hasattr(socket, "AF_UNIX"):
        raise UsageError("this system has no Unix sockets; use --port")
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(f"{path} exists and is not a socket; give another path")
        require_unused(path)
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)
    try:
        listening.bind(path)
    except OSError as error:
        listening.close()
        raise LocalllmError(f"cannot listen on {path}: {error.strerror or error}") from None
    finally:
        os.umask(umask)
    try:
        yield listening
    finally:
        listening.close()
        with suppress(OSError):
            os.unlink(path)


def require_unused(path: str) -> None:
    """Raise LocalllmError if a server already listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise LocalllmError(f"{path}: another server is listening on this socket; give another path")


# ---- socket activation by systemd and others (freedesktop.org, sd_listen_fds): LISTEN_FDS and LISTEN_PID


def take_inherited_sockets() -> list[socket.socket]:
    """Return the sockets that this process inherited; its own children will not inherit them.

    Raises UsageError for descriptors that are not listening sockets.
    """
    count, owner = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    if not count.isdecimal() or owner != str(os.getpid()):
        return []
    sockets = []
    for descriptor in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)):
        try:
            listening = socket.socket(fileno=descriptor)
        except OSError as error:
            raise UsageError(f"LISTEN_FDS is {count}, but descriptor {descriptor} is not a socket: {error}") from None
        if listening.type != socket.SOCK_STREAM:
            raise UsageError(f"LISTEN_FDS: descriptor {descriptor} must be a stream socket; use ListenStream=")
        listening.set_inheritable(False)
        sockets.append(listening)
    return sockets


def require_keys(sockets: Sequence[socket.socket], keys: Sequence[str]) -> None:
    """Raise UsageError if other computers could use the server without an API key."""
    for listening in sockets:
        is_open = isinstance(name := listening.getsockname(), tuple) and not str(name[0]).startswith(LOOPBACK)
        if is_open and not keys:
            raise UsageError(f"{format_address(listening)} lets other computers connect: add --api-key-file FILE")


def format_address(listening: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a TCP socket, or the path of a Unix socket."""
    name = listening.getsockname()
    if not isinstance(name, tuple):
        return name if isinstance(name, str) else name.decode(errors="replace")
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{scheme}://{host}:{name[1]}"
