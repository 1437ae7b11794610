"""Processes that compile kernels: one per core, or as many as memory allows."""

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
from localllm.system.cpu import logical_cores
from localllm.system.memory import address_limit, available_memory
from localllm.system.processes import detached_options, lower_priority

# What a user may have told Numba for programs of their own, such as not to compile: machine code must not depend on it.
OTHERS = re.compile("NUMBA_(?!CPU_(NAME|FEATURES)$)")
LARGE = ("attend", "linear")  # kernels that take seconds to compile
SHARE = 1 << 29  # bytes that one compiler should find: it takes 260 MB, and 480 of addresses; its threads here 150


class Compiler:
    """A process that compiles one kernel after the other. It ends when this process ends, even if that is killed."""

    def __init__(self, *command: str, lane: Lane | None = None) -> None:
        """Start a process; command: a module that calls `serve`, and its arguments; lane: the one to compile for."""
        # It has to compile these sources, not those of another localllm that the current folder may hold.
        root = str(Path(__file__).parents[3])
        environment = {name: value for name, value in os.environ.items() if not OTHERS.match(name)}
        environment |= {"NUMBA_CPU_NAME": lane.cpu, "NUMBA_CPU_FEATURES": lane.feature_string} if lane else {}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.lane = lane
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            **detached_options(),  # Ctrl-C is meant for this process, which may go on: it may end an answer of a chat
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._names, self._results = self.process.stdin, self.process.stdout
        self._last_words = deque[bytes](maxlen=1)
        self._listener = Thread(target=self._last_words.extend, args=(self.process.stderr,), daemon=True)
        self._listener.start()

    def compile(self, name: str) -> bytes:
        """Make the kernel's machine code. Raises LocalllmError."""
        try:
            self._names.write(f"{name}\n".encode())
            self._names.flush()
            size = int.from_bytes(self._results.read(8), "little")
            code = self._results.read(size)
        except OSError:  # it has ended
            code = b""
        if not code or len(code) < size:
            raise self._failure()
        return code

    def _failure(self) -> LocalllmError:
        """Return why the process ended: the last line that it wrote.

        If memory is short, its message varies, so the error is MemoryLimitError whatever LLVM says.
        """
        code = self.process.wait()
        self._listener.join()
        reason = b"".join(self._last_words).decode(errors="replace").strip() or f"exit code {code}"
        if address_limit() < SHARE:
            return MemoryLimitError(f"not enough memory to compile the kernels: {reason}")
        return LocalllmError(f"cannot compile the kernels for this computer: {reason}")

    def give_way(self) -> None:
        """Lower the priority of the compiler's process."""
        lower_priority(self.process)

    def close(self) -> None:
        """Kill the compiler."""
        self.process.kill()
        self._listener.join()
        with suppress(BrokenPipeError), self.process:
            pass


def serve(code_of: Callable[[str], bytes]) -> None:
    """Serve a compiling process: names come from stdin, machine code goes to stdout.

    For each name the size of its code (8 bytes, little-endian) and the code are written; the next name follows after.
    """
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # should anything print
    for name in wanted():
        code = code_of(name)
        results.write(len(code).to_bytes(8, "little") + code)
        results.flush()


def wanted() -> Iterator[str]:
    """Yield names from stdin.

    When stdin ends, this process ends at once: nobody would read a result.
    """
    names = SimpleQueue[str]()

    def listen() -> None:
        while name := os.read(0, 4096):  # not by sys.stdin, which cannot be closed while a thread reads it
            names.put(name.decode().strip())
        os._exit(0)

    Thread(target=listen, daemon=True).start()
    while True:
        yield names.get()


class Work:
    """A queue of kernels to compile, shared by threads that each talk to one compiler.

    Attributes:
        left: kernels that no thread has taken yet, in order.
        codes: machine code of those that are ready.
        error: why one of them is not, or None.
        changed: held to look at the others; notified of changes.
    """

    def __init__(self, names: Iterable[str], finished: Callable[[str, bytes], None]):
        self.left, self.codes = deque(names), dict[str, bytes]()
        self.error: Exception | None = None
        self.changed, self._finished = Condition(), finished

    def share(self, compiler: Compiler) -> None:
        """Compile kernels of the queue with one compiler until none is left."""
        try:
            while (name := self._next()) is not None:
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

    def _next(self) -> str | None:
        with self.changed:
            return self.left.popleft() if self.left else None

    def prefer(self, names: list[str]) -> None:
        """Move these kernels to the front of the queue, large ones first."""
        with self.changed:
            first = sorted(filter(self.left.__contains__, names), key=lambda name: not name.startswith(LARGE))
            self.left = deque([*first, *(name for name in self.left if name not in first)])


class Compilers:
    """Several Compiler processes. They end when all kernels are compiled, with `close`, or with this process."""

    def __init__(
        self, names: list[str], finished: Callable[[str, bytes], None], *command: str, lane: Lane | None = None
    ):
        """Prepare the processes; finished(name, machine code) is called for each kernel, by some thread.

        command: the module that compiles, and its arguments; localllm.kernels.build.compile if there is none. lane: the
        one to compile for, if it is not this computer's.
        """
        self.names, self._work = frozenset(names), Work(names, finished)
        command = command or ("localllm.kernels.build.compile",)
        self._compilers, threads = list[Compiler](), list[Thread]()
        self.close = weakref.finalize(self, stop, self._work, self._compilers, threads, os.getpid())
        for _ in range(min(processes(), len(names))):
            self._compilers.append(Compiler(*command, lane=lane))
            thread = Thread(target=self._work.share, args=(self._compilers[-1],), daemon=True)
            thread.start()
            threads.append(thread)

    def wait(self, names: list[str], progress: Progress) -> dict[str, bytes]:
        """Wait for some of the kernels, which are compiled before all others. Raises LocalllmError."""
        work, done = self._work, -1
        work.prefer(names)
        while done < len(names):
            with work.changed:
                while self._ready(names) == done:
                    if work.error:
                        raise work.error
                    work.changed.wait()
                done = self._ready(names)
            progress(done, len(names))
        return {name: work.codes.pop(name) for name in names}

    def give_way(self) -> None:
        """Lower the priority of all processes."""
        for compiler in self._compilers:
            compiler.give_way()

    def _ready(self, names: list[str]) -> int:
        return sum(name in self._work.codes for name in names)


def processes() -> int:
    """Return how many compilers this computer can run at once, at least 1."""
    return max(1, min(logical_cores(), min(available_memory(), address_limit()) // SHARE))


def stop(work: Work, compilers: list[Compiler], threads: list[Thread], process: int) -> None:
    """Kill the compilers, unless this is a forked process, to which they do not belong."""
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
    """Compile kernels now; see Compilers. Raises LocalllmError."""
    compilers = Compilers(names, finished, *command)
    try:
        return compilers.wait(names, progress)
    finally:
        compilers.close()
