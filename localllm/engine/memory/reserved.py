"""Reserved memory from the operating system, which is committed on use."""

import numpy as np

from localllm.errors import MemoryLimitError
from localllm.system.memory import Region


class Reserved:
    """A range of `size` zero bytes that cost memory only where they are touched.

    Attributes:
        bytes: uint8 [size].  address: of the first, at a page of the system.
        is_whole: whether `use` need not be called.
    """

    def __init__(self, size: int, whole: bool = True):
        """Reserve; whole: all of it may be touched, else only what `use` announced. Raises MemoryLimitError."""
        try:
            self._region = Region(size, whole)
        except (OSError, OverflowError, ValueError):
            raise MemoryLimitError(f"cannot reserve {size / 1e9:.1f} GB of memory; use a smaller context") from None
        self.bytes, self.is_whole = np.frombuffer(self._region.buffer, np.uint8), self._region.is_whole
        self.address = self._region.address

    def use(self, start: int, end: int) -> None:
        """Announce that bytes `start` to `end` will be touched. Raises MemoryLimitError."""
        try:
            self._region.use(start, end)
        except OSError:
            raise MemoryLimitError("not enough memory for the KV cache; use a smaller context") from None

    def give_back(self, start: int, end: int) -> None:
        """Return the whole system pages within bytes `start` to `end`, which read as zero then.

        Raises MemoryLimitError.
        """
        try:
            self._region.give_back(start, end)
        except OSError:
            raise MemoryLimitError(f"the system refused to take back {end - start} bytes of memory") from None
