"""A card that is Numba's simulator: memory of the host, kernels as threads of Python.

Import this before anything that imports kernels: their warps are of 4 lanes here, and their blocks of two warps. Tensor
cores need whole warps: SIMULATED_WARP=32 in the environment.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np
from numba import cuda, types
from numba.cuda.simulator.kernelapi import FakeCUDAShared
from numba.np.numpy_support import as_dtype

from localllm.kernels.cuda import device

WARP = int(os.environ.get("SIMULATED_WARP", "4"))
BLOCK = 2 * WARP
# The simulator asks all the time whether its threads wait for each other. With Python's 5 ms for whoever has the
# interpreter, a token of a small model took 7.2 s instead of 2.7.
SECONDS_IN_TURN = 1e-4
device.WARP, device.BLOCK = WARP, BLOCK

from localllm.engine.cuda.card import CHUNK, Launch, LibraryProduct, Work  # noqa: E402
from localllm.errors import MemoryLimitError  # noqa: E402
from localllm.kernels.build.library import Progress  # noqa: E402
from localllm.kernels.cuda import Grid, grid, kernel, parameters  # noqa: E402


def shared_array(self: FakeCUDAShared, shape: int, dtype) -> np.ndarray:
    """As the simulator's own, under which two threads at a time make an array each of what they ought to share.

    What nobody has written is NaN.
    """
    line = sys._getframe(1)
    made = np.empty(shape, as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
    made.view(np.uint8)[:] = 0xFF
    return self._allocations.setdefault((line.f_code.co_filename, line.f_lineno), made)


FakeCUDAShared.array = shared_array


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def encoded(value) -> int:
    """An argument as kernels get it."""
    if isinstance(value, np.ndarray):
        return address(value)
    return int(np.float32(value).view(np.int32)) if isinstance(value, float) else int(value)


def launch(name: str, rows: int, /, **arguments) -> None:
    """Run a kernel whose arguments, by name, are numbers and arrays; rows: the most that there may be."""
    simulate(name, grid(name, arguments, rows), [encoded(arguments[key]) for key in parameters(name)])


def simulate(name: str, how: Grid, arguments: list[int]) -> None:
    """Run a kernel."""
    others = sys.getswitchinterval()  # of tests without a card
    sys.setswitchinterval(SECONDS_IN_TURN)
    try:
        cuda.jit(kernel(name))[(how.x, how.y), how.threads](*arguments)
    finally:
        sys.setswitchinterval(others)


class SimulatedCard:
    """As localllm.engine.cuda.card.Card.

    Attributes:
        memory: what was allocated, by address.  capacity: bytes that there are.
    """

    name, capability, bandwidth, peak = "Numba's simulator", (8, 0), 1e9, 1e12

    warning = None

    def __init__(self, capacity: int = 1 << 30):
        self.memory: dict[int, np.ndarray] = {}
        self.capacity = capacity

    def use(self) -> None: ...

    def allocate(self, size: int) -> int:
        if size > self.free_bytes():
            raise MemoryLimitError(f"the card has {self.free_bytes()} bytes, {size} are needed")
        memory = np.full(size + 256, 0xFF, np.uint8)  # NaN, should anybody read it
        start = address(memory) + -address(memory) % 256
        self.memory[start] = memory
        return start

    def free(self, address: int) -> None:
        self.memory.pop(address, None)

    def pinned(self, size: int) -> np.ndarray:
        return self._bytes(self.allocate(size), size)

    def _bytes(self, address: int, size: int) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def upload(self, address: int, data: np.ndarray) -> None:
        self._bytes(address, data.nbytes)[:] = data

    def feed(self, chunks, work, place: int) -> None:
        for chunk in chunks:
            assert len(chunk) <= CHUNK
            raw = self.allocate(len(chunk))
            self.upload(raw, chunk)
            to_do = work(raw, chunk)
            if to_do:
                self.do([to_do])
            else:
                self.copy(place, raw, len(chunk))
            place += len(chunk)
            self.free(raw)

    def download(self, address: int, size: int) -> np.ndarray:
        return self._bytes(address, size).copy()

    def copy(self, target: int, source: int, size: int) -> None:
        self._bytes(target, size)[:] = self.download(source, size)

    def prepare(self, kernels: set[str], progress: Progress | None) -> None:
        for name in kernels:
            kernel(name)

    def record(self, works: Sequence[Work]) -> Callable[[], None]:
        return lambda: self.do(works)

    def do(self, works: Sequence[Work]) -> None:
        for work in works:
            if isinstance(work, Launch):
                simulate(*work)
            else:
                self._multiply(work)

    def _multiply(self, work: LibraryProduct) -> None:
        a, b = (
            self._matrix(*side, work) for side in ((work.a, work.m, work.a_stride), (work.b, work.n, work.b_stride))
        )
        rows = self._bytes(work.c, 4 * work.c_stride * (work.n - 1) + 4 * work.m).view(np.float32)
        c = np.lib.stride_tricks.as_strided(rows, (work.n, work.m), (4 * work.c_stride, 4))
        with np.errstate(all="ignore"):  # rows without a token hold anything
            c[:] = b @ a.T + (c if work.adds else 0)

    def _matrix(self, address: int, rows: int, stride: int, work: LibraryProduct) -> np.ndarray:
        """Float32 [rows, k]."""
        kind = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32}[work.kind]
        numbers = self._bytes(address, np.dtype(kind).itemsize * (stride * (rows - 1) + work.k)).view(kind)
        matrix = np.lib.stride_tricks.as_strided(numbers, (rows, work.k), (numbers.itemsize * stride, numbers.itemsize))
        return (matrix.astype(np.uint32) << 16).view(np.float32) if work.kind == "bf16" else matrix.astype(np.float32)

    def synchronize(self) -> None: ...

    def free_bytes(self) -> int:
        return self.capacity - sum(len(memory) for memory in self.memory.values())

    def close(self) -> None:
        self.memory.clear()
