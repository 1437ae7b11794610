"""The terminal: keys that wait, what it understands, and texts of the standard streams."""

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
    """On Windows: the standard streams (input first) are UTF-8, also in pipes; consoles understand escape sequences."""
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
    """Whether a stream that says it is a terminal is one: on Windows, NUL says so too."""
    if sys.platform != "win32":
        return True
    return console_mode(stream) is not None


@cache
def understands_escapes(*streams: Any) -> bool:
    """Whether consoles take escape sequences for what they are: Windows' before 2016 do not."""
    if sys.platform != "win32":
        return True
    modes = [mode for stream in streams if (mode := console_mode(stream)) is not None]
    return all(mode & VT_OUTPUT for mode in modes)


def console_mode(stream: Any) -> int | None:
    """Of a console of Windows; None if the stream is none."""
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
    """Whether a stream could not be written because nobody reads it any more. Windows calls that a wrong argument."""
    is_windows = sys.platform == "win32" and error.errno == errno.EINVAL and error.filename is None
    return isinstance(error, BrokenPipeError) or is_windows


def is_silent(stream: Any, seconds: float) -> bool:
    """Whether a stream is open and brings nothing, not even its end, for so long."""
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
    """The same of Windows' pipes; nothing else is silent."""
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


def forget_typed(keys: Any) -> None:
    """What was typed and not read yet."""
    if sys.platform == "win32":
        import msvcrt

        while msvcrt.kbhit():
            msvcrt.getwch()
        return
    import termios

    with suppress(OSError, ValueError, termios.error):
        termios.tcflush(keys, termios.TCIFLUSH)


def shows_keys(stream: Any) -> bool:
    """Whether a terminal shows what is typed: some programs that use one do that themselves."""
    if sys.platform == "win32":
        return True
    import termios

    try:
        return bool(termios.tcgetattr(stream.fileno())[3] & termios.ECHO)
    except (termios.error, OSError, ValueError):
        return False


@contextmanager
def keys_wait(
    stream: Any, leave: Callable[[], None] = lambda: None, come_back: Callable[[], None] = lambda: None
) -> Iterator[bool]:
    """In the block, keys are not shown, and come as an editor gets them; whether that can be had.

    When Ctrl-Z stops the process, the terminal is as it was meanwhile; leave and come_back are called around that.
    """
    if sys.platform == "win32":
        with console_keys_wait(stream) as can:
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
def console_keys_wait(stream: Any) -> Iterator[bool]:
    """The same of Windows' consoles."""
    if (mode := console_mode(stream)) is None:
        yield False
        return
    set_console_mode(stream, mode & ~ECHO_AND_LINES)
    try:
        yield True
    finally:
        set_console_mode(stream, mode)
