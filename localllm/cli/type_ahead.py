"""What is typed while the model answers: not shown, so that it is no part of the answer, and kept for the next prompt.

Only Ctrl-C is heard, and with it what was typed before is forgotten, as in a shell.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from localllm.cli.terminal import is_dumb, is_terminal
from localllm.system.terminal import keys_wait

PASTES, NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"  # the terminal marks what is pasted (xterm's bracketed paste)


@contextmanager
def type_ahead() -> Iterator[None]:
    """In the block, keys wait; a text of several lines that is pasted will be one text."""
    with keys_wait(sys.stdin) as can:
        screen = next((stream for stream in (sys.stderr, sys.stdout) if is_terminal(stream)), None)
        marks = can and screen is not None and not is_dumb()
        try:
            if marks:
                print(PASTES, end="", file=screen, flush=True)
            yield
        finally:
            if marks:
                print(NO_PASTES, end="", file=screen, flush=True)
