"""Entry point of the command line: every failure becomes one line on stderr and an exit code.

    0 success (also if the reader of a pipe exits)        3 the model is unreadable, invalid or not supported
    1 other errors                                       4 the prompt does not fit the context
    2 usage error                                        5 not enough memory
    6 some of many records failed                        7 an answer was cut off before it began or matched its grammar
                                                       130 interrupted

LOCALLLM_DEBUG=1 in the environment also prints Python's traceback. LOCALLLM_PLAIN_START=1 disables the optimizations of
start and exit. A warm `localllm run -p Hi -n 1` takes 0.59 s with them and 0.68 s without (fastest of 15 starts, on two
busy cores). Lazy imports (`localllm.__getattr__`) and lazy commands (`cli.app.LazyCommands`) are always on.
"""

import _thread
import atexit
import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from time import sleep
from types import ModuleType
from typing import NoReturn

from localllm.system.files import allow_long_paths
from localllm.system.processes import interrupt_main
from localllm.system.terminal import is_reader_gone, set_up_streams

MIN_MEMORY = 1 << 28  # minimum bytes of address space
PLAIN = "LOCALLLM_PLAIN_START"


def run_program() -> NoReturn:
    """Run `main` as the console script `localllm`, and end the process."""
    reraise_ctrl_c()
    allow_long_paths()
    os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"  # its colorama ends a program by ESC[0m on stdout
    set_up_streams(sys.stdin, sys.stdout, sys.stderr)
    try:
        main()
    except SystemExit as end:
        end_process(end.code if isinstance(end.code, int) else 1)


def main() -> NoReturn:
    """Run the command line, then exit."""
    prepare_interpreter()
    try:
        check_environment()
        code = run_command(sys.argv[1:])
        sys.stdout.flush()
    except BaseException as error:
        ignore_ctrl_c()
        code = report_error(error)
        if is_interruption(error):
            os._exit(code)  # Python may crash in its shutdown if an import of NumPy was interrupted
    ignore_ctrl_c()
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Run the command line, or complete it for a shell, and return the exit code.

    Imports stand inside so that Ctrl-C during them is an interruption like any other.
    """
    from localllm.cli.app import execute
    from localllm.cli.registry import COMPLETE

    if not os.environ.get(COMPLETE):
        return execute(arguments)
    from localllm.cli.commands.completion import print_completions

    print_completions(arguments)
    return 0


def check_environment() -> None:
    """Open closed standard streams, and check that there is enough memory to import NumPy. Raises LocalllmError.

    OpenBLAS, which NumPy loads, ends the process if it gets no memory. Running the smallest model takes more than
    LEAST_MEMORY.
    """
    from localllm.errors import LocalllmError, MemoryLimitError
    from localllm.system.memory import describe_limit, get_address_limit

    open_closed_streams()
    if sys.stdout is None:
        raise LocalllmError("stdout is closed: open it or redirect it to a file")
    if get_address_limit() < MIN_MEMORY:
        raise MemoryLimitError(f"not enough memory: {describe_limit()}; raise this limit")


def open_closed_streams() -> None:
    """Open the null device in place of closed standard streams, for this process and its children.

    An opened file gets the lowest free descriptor: if that were stdout's or stderr's, libraries would write to it. And
    `print(file=sys.stderr)` writes to stdout while sys.stderr is None.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def reraise_ctrl_c() -> None:
    """Raise KeyboardInterrupt again after a callback, such as an import's, where Python would only print it."""

    def interrupt_later() -> None:
        sleep(0.01)  # until the callback has ended
        interrupt_main()

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(interrupt_later, ())
        else:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


def ignore_ctrl_c() -> None:
    """Ignore Ctrl-C from now on, since the exit code is decided."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_interruption(error: BaseException) -> bool:
    """Return whether an error is Ctrl-C.

    Python 3.11 converts it to RuntimeError while a class is created.
    """
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)


def report_error(error: BaseException) -> int:
    """Print an error, unless it is no failure; return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if is_interruption(error):
        return 130
    if isinstance(error, OSError):
        from localllm.cli.terminal.output import discard_output

        discard_output()
        if is_reader_gone(error):
            return 0
    if os.environ.get("LOCALLLM_DEBUG"):
        import traceback

        traceback.print_exception(error)
    message, code = explain_error(error)
    from localllm.cli.terminal.output import say

    say(f"localllm: error: {message}")
    return code


def explain_error(error: BaseException) -> tuple[str, int]:
    """Return the message for the user, and the exit code."""
    from localllm.errors import LocalllmError, MemoryLimitError
    from localllm.system.memory import describe_limit

    if isinstance(error, LocalllmError):
        return str(error), error.exit_code
    if hasattr(error, "format_message"):  # Typer's errors about arguments
        return error.format_message(), 2
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        is_thread = "new thread" in str(error)
        limit = describe_limit()
        reason = ", or too many threads" * is_thread + f": {limit}; raise this limit" * bool(limit)
        return f"not enough memory{reason}", MemoryLimitError.exit_code
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return (reason if error.filename is None else f"{error.filename}: {reason}"), 1
    return f"internal error, please report it: {type(error).__name__}: {error} (set LOCALLLM_DEBUG=1 for details)", 1


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory: a thread cannot start, or a library cannot be mapped."""
    signs = "can't start new thread", "failed to map segment", "Cannot allocate memory", "Could not find/load shared"
    return isinstance(error, OSError | ImportError | RuntimeError) and any(sign in str(error) for sign in signs)


# ---- optimizations of start and exit, with the time that each saves


def is_plain() -> bool:
    """Return whether the user disabled these optimizations, for example to find the cause of a failure."""
    return bool(os.environ.get(PLAIN))


def prepare_interpreter() -> None:
    """Apply the optimizations of a start, before NumPy is imported."""
    if is_plain():
        return
    gc.set_threshold(150_000)  # imports create 60,000 long-lived objects, and collecting them costs 26 ms
    # Skip the NumPy module that only adds thousands of docstrings: 9 ms.
    sys.modules.setdefault("numpy._core._add_newdocs", ModuleType("nothing"))
    # Keep OpenBLAS from starting threads: 19 ms. Its few products need only one. It would also allocate memory for
    # each thread, and end the process if that failed.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def end_process(code: int) -> NoReturn:
    """End the process without the teardown of Python's modules: 61 ms.

    The other steps of Python's shutdown are performed in its order.
    """
    if is_plain():
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # the reader has closed the pipe
            stream.flush()
    os._exit(code)
