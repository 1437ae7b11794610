"""A sequence's page table: where its tokens are in the cache, copy on write among forks."""

from collections.abc import Mapping

import numpy as np

from localllm.arch.layer_state import SLACK
from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.joint_cache import JointCache
from localllm.engine.memory.pages import Pages
from localllm.kernels.arguments import PAGE


class PageTable:
    """The pages of one sequence, in order.

    Attributes:
        table: page numbers, int64; kernels find a token's page at its position / PAGE.
        addresses: of the table, and of recurrent states before a run and after it (none).
    """

    table: np.ndarray
    addresses: tuple[int, int, int]

    def __init__(
        self, cache: KVCache | JointCache, pages: Pages, table: np.ndarray | None = None, length: int = 0, lost: int = 0
    ):
        """Wrap pages; length: tokens that they hold; lost: first pages that layers with a window no longer have."""
        self._cache, self._pages, self._length, self._lost = cache, pages, length, lost
        self._given = lost  # lost pages whose memory was returned
        self._use(np.zeros(0, np.int64) if table is None else table)

    def _use(self, table: np.ndarray) -> None:
        self.table, self.addresses = table, (table.ctypes.data, 0, 0)

    def prepare(self, length: int, count: int) -> None:
        """Reserve unshared places for `count` tokens after the first `length`. Raises MemoryLimitError."""
        last, used = divmod(length, PAGE)
        if used and self._pages.references[self.table[last]] > 1:
            self._copy_page(last, used)
        self._lose(length)
        missing = -(-(length + count) // PAGE) - len(self.table)
        if missing > 0:
            last_page = int(self.table[-1]) if len(self.table) else None
            self._use(np.concatenate((self.table, self._take(missing, last_page))))
        self._length = length + count

    def _lose(self, length: int) -> None:
        """Free what layers with a window will not read after `length` tokens, except shared pages."""
        end, step = (length - self._cache.window - SLACK) // PAGE, SLACK // PAGE
        while self._cache.window and self._lost + step <= end:
            self._lost += step
        if self._given < self._lost:
            pages = self.table[self._given : self._lost]
            self._cache.give_back(pages[self._pages.references[pages] == 1].tolist(), local=True)
            self._given = self._lost

    def _copy_page(self, number: int, tokens: int) -> None:
        """Replace a shared page by a copy with the same tokens (copy on write)."""
        shared = int(self.table[number])
        (page,) = self._take(1, after=None)
        self._cache.copy(shared, page, tokens)
        self._use(self.table.copy())
        self.table[number] = page
        self._pages.release([shared])

    def _take(self, count: int, after: int | None) -> list[int]:
        """Take `count` new pages, all or none."""
        taken: list[int] = []
        try:
            while len(taken) < count:
                taken.append(self._pages.take(after=taken[-1] if taken else after))
            self._cache.use(taken)
        except BaseException:
            self._pages.release(taken)
            raise
        return taken

    def parts(self, first: int, last: int) -> list[str]:
        """List the names, for `part`, of what is stored for tokens `first` to `last`; `first` begins a page."""
        has_windows = self._cache.window and first >= self._lost * PAGE
        return ["pages", "windows"] if has_windows else ["pages"]

    def part(self, name: str, first: int, last: int) -> np.ndarray:
        """Copy what these pages hold in the layers without a window or in those with one; uint8."""
        return self._cache.content(self._between(first, last), local=name == "windows")

    def put(self, first: int, last: int, parts: Mapping[str, np.ndarray]) -> None:
        """Insert the tokens `first` to `last` of another table; without windows, none before `last` has them.

        Raises MemoryLimitError, and ValueError for parts of another size.
        """
        self.prepare(first, last - first)
        self._cache.fill(self._between(first, last), False, parts["pages"])
        if "windows" in parts:
            self._cache.fill(self._between(first, last), True, parts["windows"])
        elif self._cache.window:
            self._lost = last // PAGE

    def _between(self, first: int, last: int) -> np.ndarray:
        """Return the pages of tokens, the first of which begins one."""
        return self.table[first // PAGE : -(-last // PAGE)]

    def fork(self, length: int) -> "PageTable":
        """Share the pages of the first `length` tokens, or of those that are still there, with another table."""
        length = min(length, self._length)
        table = self.table[: -(-length // PAGE)].copy()
        self._pages.share(table)
        return PageTable(self._cache, self._pages, table, length, self._lost)

    def truncate(self, length: int) -> int:
        """Drop all but the first `length` tokens; returns how many remain: none, if a window is lost."""
        length = self._length = min(length, self._length)
        if self._lost and length - self._cache.window < self._lost * PAGE:
            self._length = self._lost = self._given = length = 0
        kept = -(-length // PAGE)
        if kept >= len(self.table):
            return length
        unneeded = self.table[kept:]
        self._use(self.table[:kept].copy())
        self._cache.give_back(self._pages.release(unneeded))
        return length

    def shift(self, keep: int, count: int) -> int:
        """Drop `count` tokens, whole pages, after the first `keep`; return the new length, as `truncate` does.

        The later pages, which no other sequence shares, follow the kept ones. If the kept tokens do not fill a page,
        they replace as many dropped ones in the next page. Pages that windows no longer see are moved with the rest,
        and are released later. Raises MemoryLimitError.
        """
        self._cache.use(self.table[: self._given].tolist())
        self._given = 0
        first, gone, within = keep // PAGE, count // PAGE, keep % PAGE
        for number in range(first + gone, len(self.table)):
            if self._pages.references[self.table[number]] > 1:
                self._copy_page(number, PAGE)
        if within:
            self._cache.copy(int(self.table[first]), int(self.table[first + gone]), within)
        unneeded = self.table[first : first + gone]
        self._use(np.concatenate((self.table[:first], self.table[first + gone :])))
        self._length -= count
        if self._lost:
            self._lost = max(self._lost - gone, first + bool(within))
        self._cache.give_back(self._pages.release(unneeded))
        return self.truncate(self._length)

    def append_from(self, source: "PageTable", first: int, length: int, count: int) -> bool:
        """Copy `count` tokens of another table, from position `first` on, after the first `length`.

        Keys are unchanged: the backend rotates them. False, and nothing is changed, if the other one lacks some of
        them, of layers with a window, too. Raises MemoryLimitError.
        """
        if first < source._lost * PAGE or first + count > source._length:
            return False
        self.prepare(length, count)
        self._cache.copy_places(source._places(first, count), self._places(length, count))
        return True

    def _places(self, first: int, count: int) -> np.ndarray:
        """Return the places in the cache of `count` tokens from position `first` on, int64."""
        positions = np.arange(first, first + count)
        return self.table[positions // PAGE] * PAGE + positions % PAGE

    def close(self) -> None:
        """Release all pages."""
        self.truncate(0)
