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


@contextmanager
def hold_keys() -> Iterator[None]:
    """Hold back keys within the block; pasted text of several lines stays one input. Nested blocks do nothing."""
    global _is_held
    if _is_held:
        yield
        return
    screen = next((stream for stream in (sys.stderr, sys.stdout) if is_terminal(stream)), None)

    def send_sequence(sign: str) -> None:
        if screen is not None and not is_dumb():
            with suppress(OSError):  # the terminal is gone
                print(sign, end="", file=screen, flush=True)

    with use_raw_keys(sys.stdin, lambda: send_sequence(NO_PASTES), lambda: send_sequence(PASTES)) as can:
        try:
            _is_held = True
            if can:
                send_sequence(PASTES)
            yield
        finally:
            _is_held = False
            if can:
                send_sequence(NO_PASTES)
