"""Machine code of the CPU kernels: compiled once per computer, then loaded without Numba.

Numba compiles a kernel to LLVM IR, and LLVM writes an object file for this CPU to the cache folder (objects.py).
With a platform wheel, the object file is copied from the wheel instead (shipped.py). Later starts load it in 3 ms
(machine_code.py), where importing Numba alone takes 0.35 s and more. There is one object file per kernel, so a model
compiles only what its formats need.

A process that has compiled kernels continues, in the background, with others that it may need later. The compilers
end with this process. Finished kernels are cached, and a later process compiles those that are still missing.
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from localllm.errors import LocalllmError
from localllm.files.cache.checksummed_cache import read_checksummed, write_checksummed
from localllm.kernels.build.machine_code import MachineCode
from localllm.kernels.build.objects import Progress, get_object_file, get_object_folder, get_symbol, mark_used, prune
from localllm.kernels.machine import Lane

if TYPE_CHECKING:
    from localllm.kernels.build.compilers import CompilerPool


class KernelLibrary:
    """The kernels of a program, loaded as machine code. Keep the object alive while their addresses are used.

    Attributes:
        addresses: addresses of the kernels, by name.
        warning: one line that says why compiled kernels could not be cached (the next start compiles again), or None.
    """

    def __init__(
        self,
        names: Iterable[str],
        progress: Progress | None = None,
        later: Iterable[str] = (),
        lane: Lane | None = None,
    ):
        """Load the kernels `names`, compiling those that are not cached on this computer.

        progress: called while compiling; later: kernels that `load` may need later, which are compiled in the
        background, in this order, if anything has to be compiled; lane: the CPU to load for, by default this
        computer's. Raises LocalllmError if a kernel cannot be compiled.
        """
        self.addresses = dict[str, int]()
        self.warning: str | None = None
        self._codes: list[MachineCode] = []
        self._later, self._lane = list(later), lane
        self._compilers: CompilerPool | None = None
        mark_used(get_object_folder(lane))
        try:
            self.load(names, progress)
        except BaseException:
            self.close()
            raise

    def load(self, names: Iterable[str], progress: Progress | None = None) -> None:
        """Load further kernels, compiling those that are not cached, and add them to `addresses`."""
        names = sorted({name for name in names if name not in self.addresses})
        if not names:
            return
        objects = {name: code for name in names if (code := read_checksummed(get_object_file(name, self._lane)))}
        if missing := [name for name in names if name not in objects]:
            objects |= self._load_shipped(missing)
        if missing := [name for name in missing if name not in objects]:
            objects |= self._compile_missing(missing, progress or (lambda done, total: None))
        self._codes.append(MachineCode(objects.values(), map(get_symbol, names)))
        self.addresses |= {name: self._codes[-1].addresses[get_symbol(name)] for name in names}

    def _load_shipped(self, names: list[str]) -> dict[str, bytes]:
        from localllm.kernels.build.shipped import read_shipped_objects  # needed once per kernel

        objects = read_shipped_objects(names, self._lane)
        for name, code in objects.items():
            self._keep(name, code)
        return objects

    def _compile_missing(self, names: list[str], progress: Progress) -> dict[str, bytes]:
        if self._compilers is None or not self._compilers.names.issuperset(names):
            self.close()
            self._compilers = self._compile(names)
        try:
            objects = self._compilers.wait(names, progress)
        except LocalllmError:
            self.close()  # the next call starts new compilers
            raise
        prune()
        return objects

    def _compile(self, names: list[str]) -> "CompilerPool":
        """Start the Compilers for these kernels, followed by the `later` ones that are not cached."""
        from localllm.kernels.build.compilers import CompilerPool  # seldom needed, and slow to import
        from localllm.kernels.build.shipped import list_shipped_names

        present = {*names, *list_shipped_names(self._lane)}
        absent = [
            name
            for name in self._later
            if name not in present and not os.path.exists(get_object_file(name, self._lane))
        ]
        return CompilerPool([*names, *absent], self._keep, lane=self._lane)

    def _keep(self, name: str, code: bytes) -> None:
        path = get_object_file(name, self._lane)
        try:
            write_checksummed(path, code)
        except OSError as error:
            self.warning = f"compiled kernels cannot be kept in {path.parent}: {error.strerror}"

    def lower_priority(self) -> None:
        """Lower the priority of the compilers that are still running."""
        if self._compilers:
            self._compilers.lower_priority()

    def close(self) -> None:
        """Stop compiling. Loaded kernels stay usable."""
        if self._compilers:
            self._compilers.close()
            self._compilers = None
