"""Ctrl-C for programs started by tests, on every system: on Windows it goes to all programs of a console."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# A program has one console: this one leaves its own, joins another program's, and presses there for each line it reads.
PRESS = """
import ctypes, sys
console = ctypes.WinDLL("kernel32")
console.FreeConsole()
joined = console.AttachConsole(int(sys.argv[1]))
console.SetConsoleCtrlHandler(None, 1)  # which does not mean this one
for _ in sys.stdin:
    print(int(joined and console.GenerateConsoleCtrlEvent(0, 0)), flush=True)
"""


def apart() -> dict[str, Any]:
    """Return arguments of subprocess.Popen for a program that alone gets its Ctrl-C.

    On Windows, it gets its own console.
    """
    return {"creationflags": 0x08000000} if sys.platform == "win32" else {}  # CREATE_NO_WINDOW


@contextmanager
def keyboard(process: subprocess.Popen[bytes]) -> Iterator[Callable[[], None]]:
    """Yield a function that presses Ctrl-C; process: started with `apart()`.

    On Windows a program has to start for that, which can take longer than what is interrupted.
    """
    if sys.platform != "win32":
        yield lambda: process.send_signal(signal.SIGINT)
        return
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PRESS, str(process.pid)], text=True, **pipes) as other:
        assert other.stdin is not None and other.stdout is not None

        def press() -> None:
            print(file=other.stdin, flush=True)
            assert other.stdout.readline() == "1\n"

        yield press


def ctrl_c(process: subprocess.Popen[bytes]) -> None:
    """Press Ctrl-C once."""
    with keyboard(process) as press:
        press()
