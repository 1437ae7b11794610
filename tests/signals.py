"""Ctrl-C for programs that tests start, on every system: on Windows it goes to all programs of a console."""

import signal
import subprocess
import sys
from typing import Any

# A program has one console: this one leaves its own, and joins another program's.
PRESS = """
import ctypes, sys
console = ctypes.WinDLL("kernel32")
console.FreeConsole()
joined = console.AttachConsole(int(sys.argv[1]))
console.SetConsoleCtrlHandler(None, 1)  # which does not mean this one
sys.exit(not (joined and console.GenerateConsoleCtrlEvent(0, 0)))
"""


def apart() -> dict[str, Any]:
    """What subprocess.Popen is told for a program that alone gets its Ctrl-C: on Windows, a console of its own."""
    return {"creationflags": 0x08000000} if sys.platform == "win32" else {}  # CREATE_NO_WINDOW


def ctrl_c(process: subprocess.Popen[bytes]) -> None:
    """Press it. process: started with `apart()`."""
    if sys.platform == "win32":
        subprocess.run([sys.executable, "-c", PRESS, str(process.pid)], check=True)
    else:
        process.send_signal(signal.SIGINT)
