"""The terminal: raw keys, its features, and the encoding of standard streams."""

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Protocol, TextIO

from localllm.system.processes import handle_stops

UTF_8 = 65001  # Windows' code page
# Paths of the terminal's keyboard and screen, independent of redirected standard streams.
KEYBOARD_PATH, SCREEN_PATH = ("CONIN$", "CONOUT$") if sys.platform == "win32" else ("/dev/tty", "/dev/tty")
ECHO_AND_LINES, VT_OUTPUT = 0x2 | 0x4, 0x4  # Windows: bits of the modes of a console's input and output
# Functions that leave each entered block of use_raw_keys, and re-enter it.
_blocks: list[tuple[Callable[[], None], Callable[[], None]]] = []


class DescriptorStream(Protocol):
    """A stream with a file descriptor."""

    def fileno(self) -> int: ...


def set_up_streams(*streams: TextIO | None) -> None:
    """Set the standard streams (input first) to UTF-8 on Windows, and enable escape sequences."""
    if sys.platform != "win32":
        return
    import ctypes

    for stream in filter(None, streams):
        with suppress(OSError, ValueError, AttributeError):
            if (mode := get_console_mode(stream)) is None:
                stream.reconfigure(encoding="utf-8")
            elif stream is not streams[0]:
                set_console_mode(stream, mode | VT_OUTPUT)
    ctypes.WinDLL("kernel32").SetConsoleOutputCP(UTF_8)


def is_console(stream: DescriptorStream) -> bool:
    """Return whether a stream whose isatty is true is a terminal; on Windows, isatty is true for NUL, too."""
    if sys.platform != "win32":
        return True
    return get_console_mode(stream) is not None


@cache
def supports_escapes(*streams: DescriptorStream) -> bool:
    """Return whether all consoles among the streams interpret escape sequences, unlike Windows' before 2016."""
    if sys.platform != "win32":
        return True
    modes = [mode for stream in streams if (mode := get_console_mode(stream)) is not None]
    return all(mode & VT_OUTPUT for mode in modes)


def get_console_mode(stream: DescriptorStream) -> int | None:
    """Return the mode of a Windows console, or None for another stream."""
    import ctypes
    import msvcrt

    mode = ctypes.c_uint32()
    try:
        handle = ctypes.c_void_p(msvcrt.get_osfhandle(stream.fileno()))  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return None
    is_console = ctypes.WinDLL("kernel32").GetConsoleMode(handle, ctypes.byref(mode))  # type: ignore[attr-defined]
    return mode.value if is_console else None


def set_console_mode(stream: DescriptorStream, mode: int) -> None:
    """Set the mode of a Windows console."""
    import ctypes
    import msvcrt

    handle = ctypes.c_void_p(msvcrt.get_osfhandle(stream.fileno()))  # type: ignore[attr-defined]
    ctypes.WinDLL("kernel32").SetConsoleMode(handle, mode)  # type: ignore[attr-defined]


def is_reader_gone(error: OSError) -> bool:
    """Return whether an error means that the stream's reader has closed it, which Windows reports as EINVAL."""
    is_windows = sys.platform == "win32" and error.errno == errno.EINVAL and error.filename is None
    return isinstance(error, BrokenPipeError) or is_windows


def is_silent(stream: DescriptorStream | None, seconds: float) -> bool:
    """Return whether neither data nor the end of a stream arrives within `seconds`; False if unknown."""
    if stream is None:
        return False
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    if sys.platform == "win32":
        return is_pipe_silent(number, seconds)
    import select

    try:
        return not select.select([number], [], [], seconds)[0]
    except (OSError, ValueError):  # closed, or the descriptor is too large for select
        return False


def is_pipe_silent(number: int, seconds: float) -> bool:
    """Return whether a Windows pipe stays open without data for `seconds`; False for other files."""
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


def discard_input(keys: DescriptorStream) -> None:
    """Discard keys that were typed but not read."""
    if sys.platform == "win32":
        import msvcrt

        while msvcrt.kbhit():
            msvcrt.getwch()
        return
    import termios

    with suppress(OSError, ValueError, termios.error):
        termios.tcflush(keys, termios.TCIFLUSH)


def echoes_keys(stream: DescriptorStream) -> bool:
    """Return whether the terminal echoes typed keys; editors and shells that host programs may do so instead."""
    if sys.platform == "win32":
        return True
    import termios

    try:
        return bool(termios.tcgetattr(stream.fileno())[3] & termios.ECHO)
    except (termios.error, OSError, ValueError):
        return False


@contextmanager
def use_raw_keys(
    stream: DescriptorStream, leave: Callable[[], None] = lambda: None, come_back: Callable[[], None] = lambda: None
) -> Iterator[bool]:
    """Turn off echo and line editing in the block; yield whether that worked.

    While Ctrl-Z has stopped the process, the terminal's previous mode is restored; `leave` is called before that, and
    `come_back` afterwards.
    """
    if sys.platform == "win32":
        with use_raw_console_keys(stream) as can:
            yield can
        return
    import termios

    try:
        keyboard = stream.fileno()
        saved = termios.tcgetattr(keyboard)
    except (termios.error, OSError, ValueError):  # no terminal, or it is gone
        yield False
        return
    quiet = [*saved]
    quiet[0] &= ~(termios.ICRNL | termios.INLCR)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)

    def restore() -> None:
        with suppress(termios.error, OSError):  # the terminal is gone
            termios.tcsetattr(keyboard, termios.TCSANOW, saved)

    def leave_raw_mode() -> None:
        leave()
        termios.tcsetattr(keyboard, termios.TCSADRAIN, saved)

    def abandon_raw_mode() -> None:
        restore()
        leave()

    def enter_raw_mode() -> None:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, quiet)
        come_back()

    with handle_stops(leave_raw_mode, enter_raw_mode):
        _blocks.append((abandon_raw_mode, enter_raw_mode))
        try:
            termios.tcsetattr(keyboard, termios.TCSANOW, quiet)
            yield True
        finally:
            restore()
            _blocks.pop()


def restore_terminal() -> None:
    """Restore the terminal's mode within blocks of use_raw_keys, since the process is about to end."""
    for give_up, _ in reversed(_blocks):
        give_up()


@contextmanager
def use_normal_keys() -> Iterator[None]:
    """Restore the terminal's mode in the block, to ask a question within blocks of use_raw_keys."""
    restore_terminal()
    try:
        yield
    finally:
        for _, come_back in _blocks:
            come_back()


@contextmanager
def use_raw_console_keys(stream: DescriptorStream) -> Iterator[bool]:
    """Turn off echo and line editing of a Windows console in the block; yield whether that worked."""
    if (mode := get_console_mode(stream)) is None:
        yield False
        return
    quiet = mode & ~ECHO_AND_LINES
    _blocks.append((lambda: set_console_mode(stream, mode), lambda: set_console_mode(stream, quiet)))
    set_console_mode(stream, quiet)
    try:
        yield True
    finally:
        set_console_mode(stream, mode)
        _blocks.pop()
