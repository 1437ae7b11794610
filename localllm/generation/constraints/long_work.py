"""Long work in Python that lets other threads go on."""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_PATIENCE = 0.0005  # seconds that other threads wait for the interpreter, each time; Python's default is ten times that
_count, _usual = 0, (True, 0.005)


@contextmanager
def yielding() -> Iterator[None]:
    """Let other threads of Python run often, and search no garbage: that stops them, up to a second for a grammar."""
    global _count, _usual
    with _LOCK:
        if not _count:
            _usual = gc.isenabled(), sys.getswitchinterval()
            gc.disable()
            sys.setswitchinterval(_PATIENCE)
        _count += 1
    try:
        yield
    finally:
        with _LOCK:
            _count -= 1
            if not _count:
                sys.setswitchinterval(_usual[1])
                if _usual[0]:
                    gc.enable()
