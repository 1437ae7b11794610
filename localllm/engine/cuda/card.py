"""The interface of a GPU: memory, kernels, graphs.

localllm.engine.cuda.device implements it with NVIDIA's packages; tests use Numba's simulator.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from localllm.kernels.build.objects import Progress
from localllm.kernels.cuda import Grid

CHUNK = 32 << 20  # most bytes of an upload


class Launch(NamedTuple):
    """A kernel with its arguments."""

    kernel: str
    grid: Grid
    arguments: tuple[int, ...]


class LibraryProduct(NamedTuple):
    """A matrix product by cuBLAS: c = b a^T, with c float32 [n, m], b [n, k], a [m, k], row-major.

    kind: the type of a and b, f16, bf16 or f32; sums are float32. a, b, c: addresses. Strides are between rows, in
    numbers.
    """

    kind: str
    a: int
    b: int
    c: int
    m: int
    n: int
    k: int
    a_stride: int
    b_stride: int
    c_stride: int
    adds: bool  # whether the product is added to c


Work = Launch | LibraryProduct


class Card(Protocol):
    """A GPU. Addresses are in its memory, int64; calls take effect in the order in which they are made.

    Attributes:
        name: the device's, for users.  capability: compute capability, major and minor number.
        warning: a line for the user about its kernels, or None.
        bandwidth: memory bytes per second.  peak: dense float16 operations per second.  0: unknown.
    """

    name: str
    warning: str | None
    bandwidth: float
    peak: float
    capability: tuple[int, int]

    def use(self) -> None:
        """Make the GPU current in this thread."""
        ...

    def allocate(self, size: int) -> int:
        """Allocate memory at a multiple of 256 bytes. Raises MemoryLimitError."""
        ...

    def free(self, address: int) -> None:
        """Free memory; does nothing if the GPU was closed since."""
        ...

    def release(self, address: int) -> None:
        """Queue memory to be freed before the next allocation. Calls no driver: finalizers may call it anywhere."""
        ...

    def allocate_pinned(self, size: int) -> np.ndarray:
        """Allocate pinned host memory, which the GPU accesses at the same address, uint8 [size].

        Raises MemoryLimitError.
        """
        ...

    def upload(self, address: int, data: np.ndarray) -> None:
        """Copy contiguous host bytes to GPU memory."""
        ...

    def feed(self, chunks: Iterable[np.ndarray], work: Callable[[int, np.ndarray], Work | None], place: int) -> None:
        """Upload chunks of at most CHUNK bytes, uint8.

        work(address, chunk) returns the work that processes an uploaded chunk; if None, it is stored at `place`, after
        the previous one.
        """
        ...

    def download(self, address: int, size: int) -> np.ndarray:
        """Copy GPU memory to the host, uint8 [size]."""
        ...

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within GPU memory."""
        ...

    def prepare(self, kernels: set[str], progress: Progress | None) -> None:
        """Load these kernels, compiling those that are not cached. Raises LocalllmError."""
        ...

    def record(self, works: Sequence[Work]) -> Callable[[], None]:
        """Record work as a graph that can be launched repeatedly."""
        ...

    def do(self, works: Sequence[Work]) -> None:
        """Do the work once."""
        ...

    def synchronize(self) -> None:
        """Wait until all work is done. Raises LocalllmError if something failed."""
        ...

    def free_bytes(self) -> int:
        """Return the free GPU memory."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
