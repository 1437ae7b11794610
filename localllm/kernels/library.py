"""Machine code of the CPU kernels: compiled once per computer, then loaded without Numba.

Numba compiles a kernel to LLVM IR; LLVM makes an object file of it for this CPU, which goes to the user's cache folder
(see objects.py). Later starts load it in 3 ms (see machine_code.py), against 0.35 s and more for importing Numba. There
is one object file per kernel, so that a model compiles only what its formats need.
"""

from collections.abc import Callable, Iterable

from localllm.kernels.kept import read_kept, write_kept
from localllm.kernels.machine_code import MachineCode
from localllm.kernels.objects import mark_used, object_file, prune, symbol

Progress = Callable[[int, int], None]  # (kernels compiled, kernels to compile)


class Library:
    """Loaded kernels. Keep it alive as long as their addresses are used.

    Attributes:
        addresses: of the kernels, by name.
        warning: why compiled kernels could not be kept, in one line: the next start will compile them again. Or None.
    """

    def __init__(self, names: Iterable[str], progress: Progress | None = None):
        """Load the kernels `names`, compiling what this computer has not compiled yet.

        progress is called while compiling. Raises LocalllmError if a kernel cannot be compiled.
        """
        names = sorted(set(names))
        self.warning: str | None = None
        objects = {name: code for name in names if (code := read_kept(object_file(name)))}
        mark_used()
        missing = [name for name in names if name not in objects]
        if missing:
            objects |= self._compile(missing, progress or (lambda done, total: None))
        self._code = MachineCode(objects.values(), map(symbol, names))
        self.addresses = {name: self._code.addresses[symbol(name)] for name in names}

    def _compile(self, names: list[str], progress: Progress) -> dict[str, bytes]:
        """Object files of the kernels, which are kept for the next start if that is possible."""
        from localllm.kernels.compilers import compile_kernels  # seldom needed, and slow to import

        objects: dict[str, bytes] = {}

        def finished(name: str, code: bytes) -> None:
            objects[name] = code
            self._keep(name, code)
            progress(len(objects), len(names))

        progress(0, len(names))
        compile_kernels(names, finished)
        prune()
        return objects

    def _keep(self, name: str, code: bytes) -> None:
        path = object_file(name)
        try:
            write_kept(path, code)
        except OSError as error:
            self.warning = f"compiled kernels cannot be kept in {path.parent}: {error.strerror}"
