"""Let parallel test workers compile each kernel once: the second waits for the first one's object file.

Each worker runs one compiler at a time: there is a worker per core, and starting another compiler takes 0.6 s.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from localllm.files.cache.checksummed_cache import read_checksummed, write_checksummed
from localllm.kernels.build import compilers
from localllm.kernels.build.compilers import Compiler
from localllm.kernels.build.objects import get_object_file

OF_THE_CPU = "localllm.kernels.build.compile"  # the module whose machine code lies in object files


def take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process wait for kernels that another one is compiling."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        monkeypatch.setattr(compilers, "count_logical_cores", lambda: 1)
    compile = Compiler.compile

    def compile_or_wait(self: Compiler, name: str) -> bytes:
        if sys.platform == "win32" or OF_THE_CPU not in self.process.args:
            return compile(self, name)
        path = get_object_file(name, self.lane)
        with alone(path):
            code = read_checksummed(path) or compile(self, name)
            with suppress(OSError):  # a folder that cannot be written: tests have such
                write_checksummed(path, code)
        return code

    monkeypatch.setattr(Compiler, "compile", compile_or_wait)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lock a path among processes, if the folder is writable."""
    import fcntl

    claim = path.with_suffix(".claim")
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        descriptor = os.open(claim, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        claim.unlink(missing_ok=True)
        os.close(descriptor)
