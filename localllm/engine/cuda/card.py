"""A graphics card as a program for it sees it: memory, work, and how it is done.

The real one is in localllm.engine.cuda.device. Tests have one that is Numba's simulator.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from localllm.kernels.build.library import Progress
from localllm.kernels.cuda import Grid

CHUNK = 32 << 20  # bytes that go to a card at a time, at most


class Launch(NamedTuple):
    """A kernel with its arguments."""

    kernel: str
    grid: Grid
    arguments: tuple[int, ...]


class LibraryProduct(NamedTuple):
    """c = b a^T, by the library that knows the card's tensor cores: c f32 [n, m], b [n, k], a [m, k], row by row.

    Numbers of a and b are of one kind, f16, bf16 or f32; sums are float32. Strides are of rows, in numbers.
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
    adds: bool  # to what c is


Work = Launch | LibraryProduct


class Card(Protocol):
    """Addresses are the card's, int64; whatever is said happens in that order.

    Attributes:
        name: as its maker calls it.  capability: to compute, major and minor number.
        warning: what the user should know of its kernels, in one line, or None.
        bandwidth: bytes per second that its memory can give.  peak: dense operations per second in float16; 0: unknown.
    """

    name: str
    warning: str | None
    bandwidth: float
    peak: float
    capability: tuple[int, int]

    def use(self) -> None:
        """This thread is going to work with the card."""
        ...

    def allocate(self, size: int) -> int:
        """Memory, at a multiple of 256 bytes. Raises MemoryLimitError."""
        ...

    def free(self, address: int) -> None:
        """Give memory back; nothing happens if the card was closed since."""
        ...

    def release(self, address: int) -> None:
        """Queue memory to be freed before the next allocation. Calls no driver: finalizers may call it anywhere."""
        ...

    def pinned(self, size: int) -> np.ndarray:
        """Memory of the host that the card reads and writes at the same address, uint8 [size].

        Raises MemoryLimitError.
        """
        ...

    def upload(self, address: int, data: np.ndarray) -> None:
        """Bytes of the host, contiguous, to the card's memory."""
        ...

    def feed(self, chunks: Iterable[np.ndarray], work: Callable[[int, np.ndarray], Work | None], place: int) -> None:
        """Bring chunks of at most CHUNK bytes, uint8, to the card.

        work(address, chunk) says what becomes of each; if nothing, they go to `place`, one behind the other.
        """
        ...

    def download(self, address: int, size: int) -> np.ndarray:
        """Bytes of the card's memory, uint8 [size]."""
        ...

    def copy(self, target: int, source: int, size: int) -> None:
        """From one place of the card's memory to another."""
        ...

    def prepare(self, kernels: set[str], progress: Progress | None) -> None:
        """Have these kernels, compiling what has never been compiled. Raises LocalllmError."""
        ...

    def record(self, works: Sequence[Work]) -> Callable[[], None]:
        """Some work as one thing that can be done again and again."""
        ...

    def do(self, works: Sequence[Work]) -> None:
        """Do it, once."""
        ...

    def synchronize(self) -> None:
        """Wait until all is done. Raises LocalllmError if something failed."""
        ...

    def free_bytes(self) -> int:
        """Memory that nobody uses."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
