"""What is typed while the model answers: not shown, so that it is no part of the answer, and kept for the next prompt.

Only Ctrl-C is heard, and with it what was typed before is forgotten, as in a shell.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from localllm.cli.terminal import is_dumb, is_terminal

PASTES, NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"  # the terminal marks what is pasted (xterm's bracketed paste)


@contextmanager
def type_ahead() -> Iterator[None]:
    """In the block, keys wait; a text of several lines that is pasted will be one text."""
    try:
        import termios
    except ImportError:  # not a POSIX system
        yield
        return
    try:
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (termios.error, OSError, ValueError):  # no terminal, or it is gone
        yield
        return
    quiet = [*before]
    quiet[0] &= ~(termios.ICRNL | termios.INLCR)  # keys come as the editor would get them
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    screen = next((stream for stream in (sys.stderr, sys.stdout) if is_terminal(stream)), None)
    marks = screen is not None and not is_dumb()
    termios.tcsetattr(keyboard, termios.TCSANOW, quiet)
    try:
        if marks:
            print(PASTES, end="", file=screen, flush=True)
        yield
    finally:
        if marks:
            print(NO_PASTES, end="", file=screen, flush=True)
        termios.tcsetattr(keyboard, termios.TCSANOW, before)
