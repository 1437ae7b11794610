"""Keys typed while the model answers: hide them, and keep them for the next prompt.

Only Ctrl-C, which discards keys typed before it, as in a shell, and Ctrl-Z take effect.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from localllm.cli.terminal.output import is_dumb, is_terminal
from localllm.system.terminal import use_raw_keys

PASTES, NO_PASTES = (
    "\x1b[?2004h",
    "\x1b[?2004l",
)  # switch bracketed paste on and off (xterm): the terminal marks pasted text

_is_held = False  # whether keys are held back


def switch_pastes(is_on: bool) -> None:
    """Ask the terminal to mark pasted text, or to stop that; do nothing if it has no escape sequences."""
    screen = next((stream for stream in (sys.stderr, sys.stdout) if is_terminal(stream)), None)
    if screen is not None and not is_dumb():
        with suppress(OSError):  # the terminal is gone
            print(PASTES if is_on else NO_PASTES, end="", file=screen, flush=True)


@contextmanager
def hold_keys() -> Iterator[None]:
    """Hold back keys within the block; pasted text of several lines stays one input. Nested blocks do nothing."""
    global _is_held
    if _is_held:
        yield
        return
    with use_raw_keys(sys.stdin, lambda: switch_pastes(False), lambda: switch_pastes(True)) as can:
        try:
            _is_held = True
            if can:
                switch_pastes(True)
            yield
        finally:
            _is_held = False
            if can:
                switch_pastes(False)
