"""The terminal: raw keys, its features, and the encoding of standard streams."""

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from localllm.system.processes import around_stops

UTF_8 = 65001  # Windows' number of it
# The terminal's keys and screen, whatever the standard streams are.
KEYS, SCREEN = ("CONIN$", "CONOUT$") if sys.platform == "win32" else ("/dev/tty", "/dev/tty")
ECHO_AND_LINES, VT_OUTPUT = 0x2 | 0x4, 0x4  # Windows: bits of the modes of a console's input and output


def prepare(*streams: Any) -> None:
    """Set the standard streams (input first) to UTF-8 on Windows, and enable escape sequences."""
    if sys.platform != "win32":
        return
    import ctypes

    for stream in filter(None, streams):
        with suppress(OSError, ValueError, AttributeError):
            if (mode := console_mode(stream)) is None:
                stream.reconfigure(encoding="utf-8")
            elif stream is not streams[0]:
                set_console_mode(stream, mode | VT_OUTPUT)
    ctypes.WinDLL("kernel32").SetConsoleOutputCP(UTF_8)


def is_console(stream: Any) -> bool:
    """Return whether a stream that claims to be a terminal is one: on Windows, NUL claims it too."""
    if sys.platform != "win32":
        return True
    return console_mode(stream) is not None


@cache
def understands_escapes(*streams: Any) -> bool:
    """Return whether consoles interpret escape sequences: Windows' before 2016 do not."""
    if sys.platform != "win32":
        return True
    modes = [mode for stream in streams if (mode := console_mode(stream)) is not None]
    return all(mode & VT_OUTPUT for mode in modes)


def console_mode(stream: Any) -> int | None:
    """Return the mode of a Windows console; None if the stream is none."""
    import ctypes
    import msvcrt

    mode = ctypes.c_uint32()
    try:
        handle = ctypes.c_void_p(msvcrt.get_osfhandle(stream.fileno()))  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return None
    known = ctypes.WinDLL("kernel32").GetConsoleMode(handle, ctypes.byref(mode))  # type: ignore[attr-defined]
    return mode.value if known else None


def set_console_mode(stream: Any, mode: int) -> None:
    import ctypes
    import msvcrt

    handle = ctypes.c_void_p(msvcrt.get_osfhandle(stream.fileno()))  # type: ignore[attr-defined]
    ctypes.WinDLL("kernel32").SetConsoleMode(handle, mode)  # type: ignore[attr-defined]


def is_unread(error: OSError) -> bool:
    """Return whether an error means that the stream's reader is gone; Windows calls it a wrong argument."""
    is_windows = sys.platform == "win32" and error.errno == errno.EINVAL and error.filename is None
    return isinstance(error, BrokenPipeError) or is_windows


def is_silent(stream: Any, seconds: float) -> bool:
    """Return whether a stream stays open without data or end of file for `seconds`."""
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    if sys.platform == "win32":
        return is_pipe_silent(number, seconds)
    import select

    try:
        return not select.select([number], [], [], seconds)[0]
    except (OSError, ValueError):  # closed, or a number that is too large
        return False


def is_pipe_silent(number: int, seconds: float) -> bool:
    """Return whether a Windows pipe has no input yet; False for anything else."""
    import ctypes
    import msvcrt
    import time

    handle, size = ctypes.c_void_p(msvcrt.get_osfhandle(number)), ctypes.c_uint32()  # type: ignore[attr-defined]
    peek, end = ctypes.WinDLL("kernel32").PeekNamedPipe, time.monotonic() + seconds  # type: ignore[attr-defined]
    while peek(handle, None, 0, None, ctypes.byref(size), None) and not size.value:
        if time.monotonic() > end:
            return True
        time.sleep(0.01)
    return False


def discard_input(keys: Any) -> None:
    """Discard unread typed input."""
    if sys.platform == "win32":
        import msvcrt

        while msvcrt.kbhit():
            msvcrt.getwch()
        return
    import termios

    with suppress(OSError, ValueError, termios.error):
        termios.tcflush(keys, termios.TCIFLUSH)


def shows_keys(stream: Any) -> bool:
    """Return whether a terminal echoes typed keys: some programs that use one echo them themselves."""
    if sys.platform == "win32":
        return True
    import termios

    try:
        return bool(termios.tcgetattr(stream.fileno())[3] & termios.ECHO)
    except (termios.error, OSError, ValueError):
        return False


@contextmanager
def raw_keys(
    stream: Any, leave: Callable[[], None] = lambda: None, come_back: Callable[[], None] = lambda: None
) -> Iterator[bool]:
    """Turn off echo and line editing in the block; yield whether that worked.

    When Ctrl-Z stops the process, the terminal is as it was meanwhile; leave and come_back are called around that.
    """
    if sys.platform == "win32":
        with raw_console_keys(stream) as can:
            yield can
        return
    import termios

    try:
        keyboard = stream.fileno()
        before = termios.tcgetattr(keyboard)
    except (termios.error, OSError, ValueError):  # no terminal, or it is gone
        yield False
        return
    quiet = [*before]
    quiet[0] &= ~(termios.ICRNL | termios.INLCR)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)

    def left() -> None:
        leave()
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)

    def came_back() -> None:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, quiet)
        come_back()

    with around_stops(left, came_back):
        termios.tcsetattr(keyboard, termios.TCSANOW, quiet)
        try:
            yield True
        finally:
            termios.tcsetattr(keyboard, termios.TCSANOW, before)


@contextmanager
def raw_console_keys(stream: Any) -> Iterator[bool]:
    """Do what raw_keys does, for Windows' consoles."""
    if (mode := console_mode(stream)) is None:
        yield False
        return
    set_console_mode(stream, mode & ~ECHO_AND_LINES)
    try:
        yield True
    finally:
        set_console_mode(stream, mode)
