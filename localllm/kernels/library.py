"""Machine code of the CPU kernels: compiled once per computer, then loaded without Numba.

Numba compiles a kernel to LLVM IR; LLVM makes an object file of it for this CPU, which goes to the user's cache folder
under a key of everything it depends on: kernel sources, compiler versions, CPU. Later starts load it with llvmlite
alone: 0.05 s, against 0.35 s and more for importing Numba. There is one object file per kernel, so that a model
compiles only what its formats need. They are compiled in processes of their own, one per core, and written atomically,
so any number of programs may do it at once.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import llvmlite.binding as llvm

import quant.formats
from localllm.errors import LocalllmError
from localllm.kernels.target import cpu_feature_string, cpu_name
from quant.cache import cache_folder

Progress = Callable[[int, int], None]  # (kernels compiled, kernels to compile)
LARGE = ("attend", "linear")  # kernels that take seconds to compile
NAME_BYTES = 64  # of a kernel's name in the pipe: all are read in one piece


@cache
def object_folder() -> Path:
    """The folder of this computer's object files, named by the key."""
    key = hashlib.sha256()
    kernels, formats = Path(__file__).parent, Path(quant.formats.__file__)
    for source in [*sorted(kernels.rglob("*.py")), formats]:
        key.update(source.read_bytes())
    for part in (version("numba"), version("llvmlite"), cpu_name(), cpu_feature_string()):
        key.update(part.encode() + b"\0")
    return cache_folder() / "kernels" / key.hexdigest()[:20]


def symbol(name: str) -> str:
    """The kernel's name in its object file."""
    return f"localllm_{name}"


class Library:
    """Loaded kernels. Keep it alive as long as their addresses are used."""

    def __init__(self, names: Iterable[str], progress: Progress | None = None):
        """Load the kernels `names`, compiling what this computer has not compiled yet.

        progress is called while compiling. Raises LocalllmError if a kernel cannot be compiled.
        """
        names = sorted(set(names))
        objects = {name: read_object(object_file(name)) for name in names}
        missing = [name for name in names if objects[name] is None]
        if missing:
            compile_in_processes(missing, progress or (lambda done, total: None))
            objects |= {name: read_object(object_file(name)) for name in missing}
        damaged = [name for name in names if objects[name] is None]
        if damaged:
            raise LocalllmError(f"cannot read the compiled kernels in {object_folder()}: {', '.join(damaged)}")
        self._engine = load_objects([code for code in objects.values() if code is not None])
        self.addresses = {name: self._engine.get_function_address(symbol(name)) for name in names}


def object_file(name: str) -> Path:
    return object_folder() / f"{name}.o"


def load_objects(objects: list[bytes]) -> llvm.ExecutionEngine:
    """Link machine code into this process."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    for code in objects:
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def compile_in_processes(names: list[str], progress: Progress) -> None:
    """Compile kernels in one process per core. Each takes the next name from a pipe, large kernels first."""
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(names))
    # They have to compile these sources, not those of another localllm that the current folder may hold.
    root = str(Path(quant.formats.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    large_first = sorted(names, key=lambda name: not name.startswith(LARGE))
    reading, writing = os.pipe()
    os.write(writing, b"".join(name.encode().ljust(NAME_BYTES) for name in large_first))
    os.close(writing)
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "localllm.kernels.compile", str(object_folder())],
            env=environment, stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(workers)
    ]  # fmt: skip
    os.close(reading)
    try:
        progress(0, len(names))
        watch(processes, names, progress)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def watch(processes: list[subprocess.Popen], names: list[str], progress: Progress) -> None:
    """Report progress until all have ended; raise if one failed."""
    while True:
        ended = all(process.poll() is not None for process in processes)
        progress(sum(object_file(name).exists() for name in names), len(names))
        if ended:
            break
        for process in processes:
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                break
    for process in processes:
        if process.returncode:
            reason = (process.stderr.read() if process.stderr else "").strip().splitlines() or ["no reason given"]
            raise LocalllmError(f"cannot compile the kernels for this computer: {reason[-1]}")


def write_object(path: Path, code: bytes) -> None:
    """Keep machine code behind its checksum. Readers see the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(hashlib.sha256(code).digest() + code)
    os.replace(temporary, path)


def read_object(path: Path) -> bytes | None:
    """Machine code that `write_object` wrote; None if there is none or it was damaged since."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None
