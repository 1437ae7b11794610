"""A pytest plugin: memory as strict as Windows', where touching unreserved or released pages ends the process.

tests/platform/test_strict_memory.py starts it.
"""

import ctypes

from localllm.engine.memory import cache
from localllm.system.memory import PAGE, MemoryRegion

READ_WRITE = 1 | 2  # Linux: PROT_READ, PROT_WRITE
system = ctypes.CDLL(None, use_errno=True)


class StrictRegion(MemoryRegion):
    """A Region that protects unused pages."""

    def __init__(self, size: int, whole: bool = True):
        super().__init__(size)
        self.is_whole = whole
        self._allow_vocabulary_token(0, size, 0)

    def use(self, start: int, end: int) -> None:
        if start < end:
            self._allow_vocabulary_token(start, end, READ_WRITE)

    def give_back(self, start: int, end: int) -> None:
        super().give_back(start, end)
        self._allow_vocabulary_token(-(-start // PAGE) * PAGE, end // PAGE * PAGE, 0)

    def _allow_vocabulary_token(self, start: int, end: int, how: int) -> None:
        """Protect all pages that overlap the range."""
        first, last = start // PAGE * PAGE, -(-end // PAGE) * PAGE
        if not self.is_whole and first < last:
            assert system.mprotect(ctypes.c_void_p(self.address + first), ctypes.c_size_t(last - first), how) == 0


cache.MemoryRegion = StrictRegion
