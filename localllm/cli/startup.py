"""Optimizations of start and exit, with the time that each saves; LOCALLLM_PLAIN_START=1 disables them all.

Measured with a warm `localllm run -p Hi -n 1`, the fastest of 15 starts on two busy cores: 0.59 s, and 0.68 s without
them. Other savings need no tricks: modules that import what they need (`localllm.__getattr__`), commands made by name
(`cli.app.LazyCommands`).
"""

import atexit
import gc
import os
import sys
import threading
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

PLAIN = "LOCALLLM_PLAIN_START"


def is_plain() -> bool:
    """Return whether the user disabled these optimizations, for example to find out whether one is at fault."""
    return bool(os.environ.get(PLAIN))


def prepare_interpreter() -> None:
    """Apply the tricks of a start, before NumPy is imported."""
    if not is_plain():
        tune_gc()
        skip_numpy_docs()
        limit_blas_threads()


def tune_gc() -> None:
    """Raise the GC threshold: imports create 60,000 long-lived objects, and collecting them costs 26 ms."""
    gc.set_threshold(150_000)


def skip_numpy_docs() -> None:
    """Skip the module in which NumPy gives its functions thousands of docstrings, and nothing else: 9 ms."""
    sys.modules.setdefault("numpy._core._add_newdocs", ModuleType("nothing"))


def limit_blas_threads() -> None:
    """Let OpenBLAS, which NumPy loads, start no threads: 19 ms. The products left to it need only one.

    It would also allocate memory for each thread, and end the process if that failed.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def end_process(code: int) -> NoReturn:
    """End the process, without the teardown of Python's modules: 61 ms.

    The other steps of Python's shutdown are done here, in its order.
    """
    if is_plain():
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # the reader has closed the pipe
            stream.flush()
    os._exit(code)
