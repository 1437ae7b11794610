"""Processes that compile kernels, one per core."""

import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from localllm.errors import LocalllmError
from localllm.kernels.cores import logical_cores

# What a user may have told Numba for programs of their own, such as not to compile: machine code must not depend on it.
OTHERS = re.compile("NUMBA_(?!CPU_(NAME|FEATURES)$)")
LARGE = ("attend", "linear")  # kernels that take seconds to compile


class Compiler:
    """A process that compiles one kernel after the other. It ends with this one, however this one ends."""

    def __init__(self, *command: str) -> None:
        """command: a module that calls `serve`, and its arguments."""
        # It has to compile these sources, not those of another localllm that the current folder may hold.
        root = str(Path(__file__).parents[2])
        environment = {name: value for name, value in os.environ.items() if not OTHERS.match(name)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._names, self._results = self.process.stdin, self.process.stdout
        self._last_words = deque[bytes](maxlen=1)
        self._listener = Thread(target=self._last_words.extend, args=(self.process.stderr,), daemon=True)
        self._listener.start()

    def compile(self, name: str) -> bytes:
        """The kernel's machine code. Raises LocalllmError."""
        try:
            self._names.write(f"{name}\n".encode())
            self._names.flush()
            size = int.from_bytes(self._results.read(8), "little")
            code = self._results.read(size)
        except OSError:  # it has ended
            code = b""
        if not code or len(code) < size:
            raise LocalllmError(f"cannot compile the kernels for this computer: {self._reason()}")
        return code

    def _reason(self) -> str:
        """Why the process has ended: the last line that it wrote."""
        code = self.process.wait()
        self._listener.join()
        return b"".join(self._last_words).decode(errors="replace").strip() or f"exit code {code}"

    def close(self) -> None:
        """Forget a process that has been killed."""
        self._listener.join()
        with self.process:
            pass


def serve(code_of: Callable[[str], bytes]) -> None:
    """What such a process does: names come from stdin, machine code goes to stdout.

    The next name comes when the code of the one before has been read: its size (8 bytes, little-endian) and content.
    """
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # should anything print
    for name in wanted():
        code = code_of(name)
        results.write(len(code).to_bytes(8, "little") + code)
        results.flush()


def wanted() -> Iterator[str]:
    """Names from stdin. When it ends, so does this process, whatever it is doing: nobody is left to read a result."""
    names = SimpleQueue[str]()

    def listen() -> None:
        while name := os.read(0, 4096):  # not by sys.stdin, which cannot be closed while a thread reads it
            names.put(name.decode().strip())
        os._exit(0)

    Thread(target=listen, daemon=True).start()
    while True:
        yield names.get()


def compile_kernels(names: list[str], finished: Callable[[str, bytes], None], *command: str) -> None:
    """Compile kernels, large ones first; finished(name, machine code) is called for each. Raises LocalllmError.

    command: the module that does it and its arguments; localllm.kernels.compile if there is none.
    """
    count = min(logical_cores(), len(names))
    compilers = [Compiler(*command or ("localllm.kernels.compile",)) for _ in range(count)]
    idle = SimpleQueue[Compiler]()
    for compiler in compilers:
        idle.put(compiler)

    def compile_next(name: str) -> tuple[str, bytes]:
        compiler = idle.get()
        try:
            return name, compiler.compile(name)
        finally:
            idle.put(compiler)

    large_first = sorted(names, key=lambda name: not name.startswith(LARGE))
    pool = ThreadPoolExecutor(len(compilers))
    try:
        for result in as_completed([pool.submit(compile_next, name) for name in large_first]):
            finished(*result.result())
    finally:
        for compiler in compilers:
            compiler.process.kill()
        pool.shutdown(cancel_futures=True)
        for compiler in compilers:
            compiler.close()
