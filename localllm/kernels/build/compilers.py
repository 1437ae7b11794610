"""Processes that compile kernels: one per CPU core, or as many as memory allows."""

import os
import re
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread

from localllm.errors import LocalllmError, MemoryLimitError
from localllm.kernels.build.objects import Progress
from localllm.kernels.machine import Lane
from localllm.system.cpu import count_logical_cores
from localllm.system.memory import describe_limit, get_address_limit, get_available_memory
from localllm.system.processes import PipeReader, get_detached_options, lower_priority

# Numba settings for other programs, such as one that disables compilation; machine code must not depend on them.
FOREIGN_SETTINGS = re.compile("NUMBA_(?!CPU_(NAME|FEATURES)$)")
SLOW_KERNELS = ("attend", "linear")  # kernels that take seconds to compile
MAX_ERROR_BYTES = 1 << 16  # bytes of a compiler's stderr that are stored
COMPILER_BYTES = (
    1 << 29
)  # bytes per compiler: it takes 260 MB, 480 MB of address space, and 150 MB for threads of this process


class Compiler:
    """A process that compiles kernels one after another. It ends when this process ends, even if killed."""

    def __init__(self, *command: str, lane: Lane | None = None) -> None:
        """Start `command`, a module that calls `serve`, and its arguments."""
        # Compile these sources, not those of another localllm in the current folder.
        root = str(Path(__file__).parents[3])
        environment = {name: value for name, value in os.environ.items() if not FOREIGN_SETTINGS.match(name)}
        environment |= {"NUMBA_CPU_NAME": lane.cpu, "NUMBA_CPU_FEATURES": lane.feature_string} if lane else {}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.lane = lane
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            **get_detached_options(),  # Ctrl-C must not end the compiler: this process may continue after it
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._names, self._results = self.process.stdin, self.process.stdout
        self._errors = PipeReader(self.process.stderr, MAX_ERROR_BYTES, keeps_end=True)

    def compile(self, name: str) -> bytes:
        """Compile a kernel; return its object file. Raises LocalllmError."""
        try:
            self._names.write(f"{name}\n".encode())
            self._names.flush()
            size = int.from_bytes(self._results.read(8), "little")
            code = self._results.read(size)
        except OSError:  # the process has ended
            code = b""
        if not code or len(code) < size:
            raise self._describe_failure()
        return code

    def _describe_failure(self) -> LocalllmError:
        """Return an error that says why the process ended, with the last line of its stderr.

        With little memory that line varies, so the error is always a MemoryLimitError then.
        """
        code = self.process.wait()
        self._errors.thread.join()
        reason = self._errors.get_last_line() or f"exit code {code}"
        if get_address_limit() < COMPILER_BYTES:
            return MemoryLimitError(f"not enough memory to compile the kernels: {describe_limit()} ({reason})")
        return LocalllmError(f"cannot compile the kernels for this computer: {reason}")

    def lower_priority(self) -> None:
        lower_priority(self.process)

    def close(self) -> None:
        self.process.kill()
        self._errors.thread.join()
        with suppress(BrokenPipeError), self.process:
            pass


def serve(code_of: Callable[[str], bytes]) -> None:
    """Read kernel names from stdin; write each kernel's machine code to stdout.

    The code is preceded by its size (8 bytes, little-endian).
    """
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything that prints goes to stderr
    for name in iterate_names():
        code = code_of(name)
        results.write(len(code).to_bytes(8, "little") + code)
        results.flush()


def iterate_names() -> Iterator[str]:
    """Yield kernel names from stdin; exit at once when stdin ends, because the parent process is gone."""
    names = SimpleQueue[str]()

    def read_names() -> None:
        while name := os.read(0, 4096):  # not with sys.stdin, which cannot be closed while a thread reads it
            names.put(name.decode().strip())
        os._exit(0)

    Thread(target=read_names, daemon=True).start()
    while True:
        yield names.get()


class CompileQueue:
    """A queue of kernels to compile, shared by threads that each drive one compiler.

    Attributes:
        changed: the condition to hold while the queue is accessed.
        left: kernels that are still to be compiled, in order.  codes: object files by name.
        error: why a kernel could not be compiled, or None.
    """

    def __init__(self, names: Iterable[str], finished: Callable[[str, bytes], None]):
        self.left, self.codes = deque(names), dict[str, bytes]()
        self.error: Exception | None = None
        self.changed, self._finished = Condition(), finished

    def share(self, compiler: Compiler) -> None:
        try:
            while (name := self._take_next()) is not None:
                code = compiler.compile(name)
                self._finished(name, code)
                with self.changed:
                    self.codes[name] = code
                    self.changed.notify_all()
        except (LocalllmError, MemoryError) as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()
        compiler.close()

    def _take_next(self) -> str | None:
        with self.changed:
            return self.left.popleft() if self.left else None

    def prioritize(self, names: list[str]) -> None:
        """Move these kernels to the front of the queue, the slow ones (LARGE) first."""
        with self.changed:
            first = sorted(filter(self.left.__contains__, names), key=lambda name: not name.startswith(SLOW_KERNELS))
            self.left = deque([*first, *(name for name in self.left if name not in first)])


class CompilerPool:
    """A pool of Compiler processes that share a queue of kernels.

    They end when all kernels are compiled, on `close`, or with this process.
    """

    def __init__(
        self, names: list[str], finished: Callable[[str, bytes], None], *command: str, lane: Lane | None = None
    ):
        """Start the processes.

        finished(name, machine code): called for each kernel, by any thread; command: the module that compiles, and its
        arguments, by default localllm.kernels.build.compile; lane: the CPU to compile for, by default this computer's.
        """
        self.names, self._work = frozenset(names), CompileQueue(names, finished)
        command = command or ("localllm.kernels.build.compile",)
        self._compilers, threads = list[Compiler](), list[Thread]()
        self.close = weakref.finalize(self, stop_compilers, self._work, self._compilers, threads, os.getpid())
        for _ in range(min(count_processes(), len(names))):
            self._compilers.append(Compiler(*command, lane=lane))
            thread = Thread(target=self._work.share, args=(self._compilers[-1],), daemon=True)
            thread.start()
            threads.append(thread)

    def wait(self, names: list[str], progress: Progress) -> dict[str, bytes]:
        """Compile some of the kernels before all others; return their object files, by name.

        Raises LocalllmError.
        """
        work, done = self._work, -1
        work.prioritize(names)
        while done < len(names):
            with work.changed:
                while self._count_ready(names) == done:
                    if work.error:
                        raise work.error
                    work.changed.wait()
                done = self._count_ready(names)
            progress(done, len(names))
        return {name: work.codes.pop(name) for name in names}

    def lower_priority(self) -> None:
        for compiler in self._compilers:
            compiler.lower_priority()

    def _count_ready(self, names: list[str]) -> int:
        return sum(name in self._work.codes for name in names)


def count_processes() -> int:
    """Return how many compilers this computer can run at once, at least 1."""
    return max(1, min(count_logical_cores(), min(get_available_memory(), get_address_limit()) // COMPILER_BYTES))


def stop_compilers(work: CompileQueue, compilers: list[Compiler], threads: list[Thread], process: int) -> None:
    """Kill the compilers and wait for their threads, unless in a forked process: `process` started them."""
    if os.getpid() != process:
        return
    with work.changed:
        work.left.clear()
    for compiler in compilers:
        compiler.process.kill()
    for thread in threads:
        thread.join()


def compile_kernels(
    names: list[str], finished: Callable[[str, bytes], None], progress: Progress, *command: str
) -> dict[str, bytes]:
    """Compile kernels with a CompilerPool of the same parameters; return their object files, by name.

    Raises LocalllmError.
    """
    compilers = CompilerPool(names, finished, *command)
    try:
        return compilers.wait(names, progress)
    finally:
        compilers.close()
