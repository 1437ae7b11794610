"""Allocate cache pages by number; their memory is in localllm.engine.memory.cache.

A page is PAGE consecutive token slots, the same in every layer and head. A sequence has a table of pages; forks share
pages until one of them writes. A page's reference count is the number of tables that it is in.
"""

from collections.abc import Iterable

import numpy as np

from localllm.errors import MemoryLimitError
from localllm.kernels.arguments import PAGE


class Pages:
    """A fixed number of pages, free or in use; references: int64 [pages]."""

    def __init__(self, count: int):
        self.references = np.zeros(count, np.int64)

    def __len__(self) -> int:
        return len(self.references)

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return int(np.count_nonzero(self.references))

    def take(self, after: int | None) -> int:
        """Allocate a page: the one after `after` if it is free, so that attention reads contiguous memory.

        Otherwise in the middle of the largest gap, so that all sequences have room to grow. Raises MemoryLimitError.
        """
        page = -1 if after is None else after + 1
        if not 0 < page < len(self) or self.references[page]:
            page = self._middle_of_largest_gap()
        self.references[page] = 1
        return page

    def _middle_of_largest_gap(self) -> int:
        used = np.flatnonzero(self.references)
        if not len(used):
            return 0
        starts, ends = np.concatenate(([0], used + 1)), np.concatenate((used, [len(self)]))
        largest = int(np.argmax(ends - starts))
        start, end = int(starts[largest]), int(ends[largest])
        if start == end:
            raise MemoryLimitError(f"the KV cache is full: all of its {len(self) * PAGE} positions are in use")
        return start + (end - start) // 2 if start else 0

    def share(self, table: Iterable[int]) -> None:
        """Add a reference to these pages."""
        self.references[list(table)] += 1

    def release(self, table: Iterable[int]) -> list[int]:
        """Drop a reference to these pages; return the pages that are free now."""
        table = list(table)
        self.references[table] -= 1
        return [page for page in table if not self.references[page]]
