"""Sockets that a service manager such as systemd has opened: LISTEN_FDS and LISTEN_PID.

Source: https://www.freedesktop.org/software/systemd/man/latest/sd_listen_fds.html
"""

import os
import socket
from collections.abc import Sequence

from localllm.errors import UsageError

FIRST = 3  # the first descriptor after stdin, stdout and stderr
LOOPBACK = ("127.", "::1", "::ffff:127.")


def inherited_sockets() -> list[socket.socket]:
    """Return the sockets that this process was started with, [] if there are none; its children do not inherit them.

    Raises UsageError for descriptors that are not listening sockets.
    """
    count, owner = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    if not count.isdecimal() or owner != str(os.getpid()):
        return []
    sockets = []
    for descriptor in range(FIRST, FIRST + int(count)):
        try:
            listening = socket.socket(fileno=descriptor)
        except OSError as error:
            raise UsageError(f"LISTEN_FDS is {count}, but descriptor {descriptor} is not a socket: {error}") from None
        if listening.type != socket.SOCK_STREAM:
            raise UsageError(f"LISTEN_FDS: socket {descriptor} is not a stream socket; use ListenStream=")
        listening.set_inheritable(False)
        sockets.append(listening)
    return sockets


def require_keys(sockets: Sequence[socket.socket], keys: Sequence[str]) -> None:
    """Raise UsageError if other computers could use the server without a key."""
    for listening in sockets:
        is_open = isinstance(name := listening.getsockname(), tuple) and not str(name[0]).startswith(LOOPBACK)
        if is_open and not keys:
            raise UsageError(f"{address_of(listening)} lets other computers connect: give --api-key-file FILE")


def address_of(listening: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a TCP socket, or the path of a Unix socket."""
    name = listening.getsockname()
    if not isinstance(name, tuple):
        return name if isinstance(name, str) else name.decode(errors="replace")
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{scheme}://{host}:{name[1]}"
