"""Where the tokens of one sequence lie in the cache: a table of pages, shared with forks until one of them writes."""

import numpy as np

from localllm.engine.cache import KVCache
from localllm.engine.pages import Pages
from localllm.kernels.arguments import PAGE


class PageTable:
    """The pages of one sequence, in order.

    Attributes:
        table: int64, their numbers; kernels find a token's page at its position / PAGE.
    """

    def __init__(self, cache: KVCache, pages: Pages, table: np.ndarray | None = None):
        self._cache, self._pages = cache, pages
        self.table = np.zeros(0, np.int64) if table is None else table

    def addresses(self) -> tuple[int, int, int]:
        """What kernels need: where the table is, and what recurrent layers keep before a run and after it (nothing)."""
        return self.table.ctypes.data, 0, 0

    def prepare(self, length: int, count: int) -> None:
        """Have places that nobody else reads for `count` tokens behind the first `length`. Raises MemoryLimitError."""
        last, used = divmod(length, PAGE)
        if used and self._pages.references[self.table[last]] > 1:
            self._copy_page(last, used)
        missing = -(-(length + count) // PAGE) - len(self.table)
        if missing > 0:
            self.table = np.concatenate((self.table, self._take(missing)))

    def _copy_page(self, number: int, tokens: int) -> None:
        """A page that is shared becomes one that is not, with the same tokens (copy on write)."""
        shared = int(self.table[number])
        page = self._pages.take(after=None)
        self._cache.copy(shared, page, tokens)
        self.table = self.table.copy()
        self.table[number] = page
        self._pages.release([shared])

    def _take(self, count: int) -> list[int]:
        """So many new pages, all or none."""
        taken: list[int] = []
        try:
            while len(taken) < count:
                before = taken[-1] if taken else self.table[-1] if len(self.table) else None
                taken.append(self._pages.take(after=before))
        except BaseException:
            self._pages.release(taken)
            raise
        return taken

    def fork(self, length: int) -> "PageTable":
        """Another table with the pages of the first `length` tokens."""
        table = self.table[: -(-length // PAGE)].copy()
        self._pages.share(table)
        return PageTable(self._cache, self._pages, table)

    def truncate(self, length: int) -> int:
        """Only the first `length` tokens are needed; how many of them are still there."""
        kept = -(-length // PAGE)
        if kept >= len(self.table):
            return length
        unneeded, self.table = self.table[kept:], self.table[:kept].copy()
        self._cache.give_back(self._pages.release(unneeded))
        return length

    def close(self) -> None:
        """No token is needed."""
        self.truncate(0)
