"""A GPU in Numba's simulator: host memory, and kernels as Python threads.

Import this before anything that imports kernels: warps have 4 lanes in tests, and blocks two warps. Tensor cores need
whole warps: SIMULATED_WARP=32 in the environment.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet
from numba import cuda, types
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator.kernelapi import Dim3, FakeCUDAModule, FakeCUDAShared
from numba.np.numpy_support import as_dtype

from localllm.kernels.cuda import gpu

WARP = int(os.environ.get("SIMULATED_WARP", "4"))
BLOCK = 2 * WARP
gpu.WARP, gpu.BLOCK = WARP, BLOCK

from localllm.engine.cuda.card import MAX_CHUNK_BYTES, CublasProduct, KernelLaunch, Work  # noqa: E402
from localllm.errors import MemoryLimitError  # noqa: E402
from localllm.kernels.build.library import Progress  # noqa: E402
from localllm.kernels.cuda import LaunchGrid, compute_grid, find_kernel, list_parameters  # noqa: E402


def shared_array(self: FakeCUDAShared, shape: int, dtype) -> np.ndarray:
    """Allocate shared memory as the simulator does, but filled with NaN."""
    line = sys._getframe(1)
    array = np.empty(shape, as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
    array.view(np.uint8)[:] = 0xFF
    return self._allocations.setdefault((line.f_code.co_filename, line.f_lineno), array)


FakeCUDAShared.array = shared_array


class Lane(greenlet):
    """A thread of a block, which runs until it waits for others.

    Attributes:
        waits_for: "warp" or "block"; None if it can run.
        said: the values exchanged by all lanes of its warp.
    """

    def __init__(self, run: Callable[[], None], block: Sequence[int], place: Sequence[int], said: list[Any]):
        super().__init__(run)
        self.block, self.place, self.said = Dim3(*block), Dim3(*place), said
        self.waits_for: str | None = None

    def wait(self, waits_for: str) -> None:
        self.waits_for = waits_for
        self.parent.switch()

    def exchange(self, value: Any) -> list[Any]:
        """See localllm.kernels.cuda.gpu.warp_exchange."""
        self.said[self.place.x % WARP] = value
        self.wait("warp")
        said = self.said.copy()
        self.wait("warp")
        return said


class Block(simulator.BlockManager):
    """A block whose lanes run in a random order, so that missing barriers are noticed.

    Numba's are Python threads that are polled: a token of a small model took 2.5 s of a Zen 4 instead of 0.05, with
    weights in Q8_0 7.6 s instead of 0.14.
    """

    def run(self, block: Sequence[int], *arguments: int) -> None:
        x, y, z = (*self._block_dim, 1, 1)[:3]
        assert x % WARP == 0 and y == z == 1
        said: list[list[Any]] = [[None] * WARP for _ in range(x // WARP)]
        lanes = [Lane(lambda: self._f(*arguments), block, (i, 0, 0), said[i // WARP]) for i in range(x)]
        random = Random(0)
        while live := [lane for lane in lanes if not lane.dead]:
            for lane in random.sample(live, len(live)):
                if lane.waits_for is None:
                    lane.switch()
            release(lanes)


def release(lanes: list[Lane]) -> None:
    """Resume lanes whose warp has arrived; if there are none, those that wait for the block."""
    warps = [lanes[first : first + WARP] for first in range(0, len(lanes), WARP)]
    ready = [lane for warp in warps if all(lane.waits_for == "warp" for lane in warp) for lane in warp]
    if not ready:
        ready = [lane for lane in lanes if not lane.dead]
        assert all(lane.waits_for == "block" for lane in ready), "lanes wait for some of their warp that do not come"
    for lane in ready:
        lane.waits_for = None


simulator.BlockManager = Block  # type: ignore[misc]
FakeCUDAModule.threadIdx = property(lambda module: getcurrent().place)
FakeCUDAModule.blockIdx = property(lambda module: getcurrent().block)
FakeCUDAModule.syncthreads = lambda module: getcurrent().wait("block")
FakeCUDAModule.warp_exchange = lambda module, value: getcurrent().exchange(value)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def encoded(value) -> int:
    """Return an argument as kernels get it."""
    if isinstance(value, np.ndarray):
        return address(value)
    return int(np.float32(value).view(np.int32)) if isinstance(value, float) else int(value)


def launch(name: str, rows: int, /, **arguments) -> None:
    """Run a kernel with arguments by name, integers and arrays; rows: the maximum."""
    simulate(name, compute_grid(name, arguments, rows), [encoded(arguments[key]) for key in list_parameters(name)])


def simulate(name: str, how: LaunchGrid, arguments: list[int]) -> None:
    """Run a kernel on its grid."""
    cuda.jit(find_kernel(name))[(how.x, how.y), how.threads](*arguments)


class SimulatedCard:
    """A stand-in for localllm.engine.cuda.card.Card.

    Attributes:
        memory: allocations by address.
        capacity: in bytes.
    """

    name, capability, bandwidth, peak = "Numba's simulator", (8, 0), 1e9, 1e12

    warning = None

    def __init__(self, capacity: int = 1 << 30):
        self.memory: dict[int, np.ndarray] = {}
        self.capacity = capacity

    def use(self) -> None: ...

    def allocate(self, size: int) -> int:
        if size > self.get_free_bytes():
            raise MemoryLimitError(f"the card has {self.get_free_bytes()} bytes, {size} are needed")
        memory = np.full(size + 256, 0xFF, np.uint8)  # NaN, should anybody read it
        start = address(memory) + -address(memory) % 256
        self.memory[start] = memory
        return start

    def free(self, address: int) -> None:
        self.memory.pop(address, None)

    def release(self, address: int) -> None:
        self.free(address)

    def allocate_pinned(self, size: int) -> np.ndarray:
        return self._bytes(self.allocate(size), size)

    def _bytes(self, address: int, size: int) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def upload(self, address: int, data: np.ndarray) -> None:
        self._bytes(address, data.nbytes)[:] = data

    def upload_chunks(self, chunks, work, place: int) -> None:
        for chunk in chunks:
            assert len(chunk) <= MAX_CHUNK_BYTES
            raw = self.allocate(len(chunk))
            self.upload(raw, chunk)
            to_do = work(raw, chunk)
            if to_do:
                self.launch([to_do])
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
            find_kernel(name)

    def record(self, works: Sequence[Work]) -> Callable[[], None]:
        return lambda: self.launch(works)

    def launch(self, works: Sequence[Work]) -> None:
        for work in works:
            if isinstance(work, KernelLaunch):
                simulate(*work)
            else:
                self._multiply(work)

    def _multiply(self, work: CublasProduct) -> None:
        a, b = (
            self._matrix(*side, work) for side in ((work.a, work.m, work.a_stride), (work.b, work.n, work.b_stride))
        )
        rows = self._bytes(work.c, 4 * work.c_stride * (work.n - 1) + 4 * work.m).view(np.float32)
        c = np.lib.stride_tricks.as_strided(rows, (work.n, work.m), (4 * work.c_stride, 4))
        with np.errstate(all="ignore"):  # rows without a token hold anything
            c[:] = b @ a.T + (c if work.adds else 0)

    def _matrix(self, address: int, rows: int, stride: int, work: CublasProduct) -> np.ndarray:
        """Return a matrix in float32 [rows, k]."""
        kind = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32}[work.kind]
        numbers = self._bytes(address, np.dtype(kind).itemsize * (stride * (rows - 1) + work.k)).view(kind)
        matrix = np.lib.stride_tricks.as_strided(numbers, (rows, work.k), (numbers.itemsize * stride, numbers.itemsize))
        return (matrix.astype(np.uint32) << 16).view(np.float32) if work.kind == "bf16" else matrix.astype(np.float32)

    def synchronize(self) -> None: ...

    def get_free_bytes(self) -> int:
        return self.capacity - sum(len(memory) for memory in self.memory.values())

    def close(self) -> None:
        self.memory.clear()
