"""Manage the pages of the cache: page tables of sequences, and the pool that creates sequence states.

A page is PAGE consecutive token slots, the same in every layer and head; its memory is in localllm.engine.memory.cache.
A page table lists the pages that hold a sequence's tokens, with copy on write among forks.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from localllm.arch.layer_state import SLACK
from localllm.engine.memory.cache import JointCache, KVCache
from localllm.engine.memory.recurrent import RecurrentState, StateLayout
from localllm.engine.memory.sequence_state import SequenceState
from localllm.errors import MemoryLimitError
from localllm.kernels.table import PAGE


class PageAllocator:
    """Allocates pages by index.

    Attributes:
        references: number of tables that use each page, int64 [pages].
    """

    def __init__(self, count: int):
        self.references = np.zeros(count, np.int64)

    def __len__(self) -> int:
        return len(self.references)

    @property
    def used(self) -> int:
        """The number of pages in use."""
        return int(np.count_nonzero(self.references))

    def take(self, after: int | None) -> int:
        """Allocate the page after `after` if it is free, so that attention reads contiguous memory.

        Otherwise, allocate one in the middle of the largest gap, so that all sequences have room to grow. Raises
        MemoryLimitError.
        """
        page = -1 if after is None else after + 1
        if not 0 < page < len(self) or self.references[page]:
            page = self._find_middle_of_gap()
        self.references[page] = 1
        return page

    def _find_middle_of_gap(self) -> int:
        used_pages = np.flatnonzero(self.references)
        if not len(used_pages):
            return 0
        starts, ends = np.concatenate(([0], used_pages + 1)), np.concatenate((used_pages, [len(self)]))
        largest = int(np.argmax(ends - starts))
        start, end = int(starts[largest]), int(ends[largest])
        if start == end:
            raise MemoryLimitError(
                f"the KV cache is full: all of its {len(self) * PAGE} positions are in use: close other sequences"
            )
        return start + (end - start) // 2 if start else 0

    def share(self, table: Iterable[int]) -> None:
        """Add a reference to these pages."""
        self.references[list(table)] += 1

    def release(self, table: Iterable[int]) -> list[int]:
        """Drop a reference to these pages; return those that are free now."""
        table = list(table)
        self.references[table] -= 1
        return [page for page in table if not self.references[page]]


class PageTable:
    """The pages of a sequence, in order.

    Attributes:
        table: page indices, int64; kernels find a token's page at its position / PAGE.
        addresses: addresses of the table, and of recurrent states before and after a run (0: none).
    """

    table: np.ndarray
    addresses: tuple[int, int, int]

    def __init__(
        self, cache: KVCache | JointCache, pages: PageAllocator, table: np.ndarray | None = None, length: int = 0,
        dropped: int = 0,
    ):  # fmt: skip
        """Wrap the pages of `length` tokens.

        dropped: number of leading pages that layers with a window have dropped.
        """
        self._cache, self._pages, self._length, self._dropped = cache, pages, length, dropped
        self._returned = dropped  # number of dropped pages whose memory was returned to the system
        self._set_table(np.zeros(0, np.int64) if table is None else table)

    def _set_table(self, table: np.ndarray) -> None:
        self.table, self.addresses = table, (table.ctypes.data, 0, 0)

    def prepare(self, length: int, count: int) -> None:
        """Allocate unshared slots for `count` tokens after the first `length`. Raises MemoryLimitError.

        Does nothing for a gap before copied tokens, whose slots exist. Forks may share a page with its first tokens,
        but none of its slots.
        """
        if length + count <= self._length:
            return
        last, used_rows = divmod(length, PAGE)
        if used_rows and self._pages.references[self.table[last]] > 1:
            self._copy_page(last, used_rows)
        if self._cache.window:
            self._release_windows(length)
        missing = -(-(length + count) // PAGE) - len(self.table)
        if missing > 0:
            last_page = int(self.table[-1]) if len(self.table) else None
            self._set_table(np.concatenate((self.table, self._take(missing, last_page))))
        self._length = length + count

    def _release_windows(self, length: int) -> None:
        """Free memory that layers with a window no longer read after `length` tokens, except in shared pages."""
        end, step = (length - self._cache.window - SLACK) // PAGE, SLACK // PAGE
        while self._dropped + step <= end:
            self._dropped += step
        if self._returned < self._dropped:
            pages = self.table[self._returned : self._dropped]
            self._cache.give_back(pages[self._pages.references[pages] == 1].tolist(), local=True)
            self._returned = self._dropped

    def _copy_page(self, number: int, tokens: int) -> None:
        """Replace a shared page by a copy of its first `tokens` tokens (copy on write)."""
        shared = int(self.table[number])
        (page,) = self._take(1, after=None)
        self._cache.copy(shared, page, tokens)
        self._set_table(self.table.copy())
        self.table[number] = page
        self._pages.release([shared])

    def _take(self, count: int, after: int | None) -> list[int]:
        pages: list[int] = []
        try:
            while len(pages) < count:
                pages.append(self._pages.take(after=pages[-1] if pages else after))
            self._cache.use(pages)
        except BaseException:
            self._pages.release(pages)
            raise
        return pages

    def list_sections(self, first: int, last: int) -> list[str]:
        has_windows = self._cache.window and first >= self._dropped * PAGE
        return ["pages", "windows"] if has_windows else ["pages"]

    def copy_section(self, name: str, first: int, last: int) -> np.ndarray:
        """Return tokens [first, last) of the layers without a window ("pages") or with one ("windows"), uint8."""
        return self._cache.copy_pages(self._select_pages(first, last), local=name == "windows")

    def put(self, first: int, last: int, parts: Mapping[str, np.ndarray]) -> None:
        """Insert tokens [first, last) from sections of another table.

        Without the section "windows", layers with a window lack all tokens before `last`. Raises MemoryLimitError, and
        ValueError for sections of another size.
        """
        self.prepare(first, last - first)
        self._cache.fill(self._select_pages(first, last), False, parts["pages"])
        if "windows" in parts:
            self._cache.fill(self._select_pages(first, last), True, parts["windows"])
        elif self._cache.window:
            self._dropped = last // PAGE

    def _select_pages(self, first: int, last: int) -> np.ndarray:
        """Return the pages of tokens [first, last); `first` begins a page."""
        return self.table[first // PAGE : -(-last // PAGE)]

    def fork(self, length: int) -> "PageTable":
        """Return a table that shares the pages of the first `length` tokens, or of all if there are fewer."""
        length = min(length, self._length)
        table = self.table[: -(-length // PAGE)].copy()
        self._pages.share(table)
        return PageTable(self._cache, self._pages, table, length, self._dropped)

    def truncate(self, length: int) -> int:
        """Drop all but the first `length` tokens; return how many remain.

        None remain if layers with a window have dropped tokens that they need.
        """
        length = self._length = min(length, self._length)
        if self._dropped and length - self._cache.window < self._dropped * PAGE:
            self._length = self._dropped = self._returned = length = 0
        page_count = -(-length // PAGE)
        if page_count >= len(self.table):
            return length
        unneeded = self.table[page_count:]
        self._set_table(self.table[:page_count].copy())
        self._cache.give_back(self._pages.release(unneeded))
        return length

    def shift(self, keep: int, count: int) -> int:
        """Drop `count` tokens, a multiple of PAGE, after the first `keep`; return the new length.

        Later pages move forward; pages that other sequences share are copied first. If the first `keep` tokens end
        within a page, they are copied over dropped tokens of the first page that stays. The new length may be shorter,
        as in `truncate`. Raises MemoryLimitError.
        """
        self._cache.use(self.table[: self._returned].tolist())
        self._returned = 0
        first, gone, within = keep // PAGE, count // PAGE, keep % PAGE
        for number in range(first + gone, len(self.table)):
            if self._pages.references[self.table[number]] > 1:
                self._copy_page(number, PAGE)
        if within:
            self._cache.copy(int(self.table[first]), int(self.table[first + gone]), within)
        unneeded = self.table[first : first + gone]
        self._set_table(np.concatenate((self.table[:first], self.table[first + gone :])))
        self._length -= count
        if self._dropped:
            self._dropped = max(self._dropped - gone, first + bool(within))
        self._cache.give_back(self._pages.release(unneeded))
        return self.truncate(self._length)

    def append_copies(self, source: "PageTable", first: int, length: int, count: int, skipped: int) -> bool:
        """Copy tokens of another table; return False if it lacks any of them, even only in a windowed layer.

        Layers with a window can have no gap: its tokens may need keys that later tokens do not.
        """
        if first < source._dropped * PAGE or first + count > source._length or (skipped and self._cache.window):
            return False
        self.prepare(length, skipped + count)
        self._cache.copy_slots(source._compute_slots(first, count), self._compute_slots(length + skipped, count))
        return True

    def _compute_slots(self, first: int, count: int) -> np.ndarray:
        """Return the slots in the cache of `count` tokens from position `first` on, int64."""
        positions = np.arange(first, first + count)
        return self.table[positions // PAGE] * PAGE + positions % PAGE

    def close(self) -> None:
        self.truncate(0)


class HybridState:
    """Cache pages and recurrent states of a sequence; it truncates to positions that both can restore."""

    def __init__(self, pages: PageTable, states: RecurrentState):
        self._pages, self._states = pages, states

    @property
    def addresses(self) -> tuple[int, int, int]:
        table, _, _ = self._pages.addresses
        return table, *self._states.addresses

    @property
    def table(self) -> np.ndarray:
        return self._pages.table

    def prepare(self, length: int, count: int) -> None:
        self._pages.prepare(length, count)
        self._states.prepare(length, count)

    def list_sections(self, first: int, last: int) -> list[str]:
        """List the sections of PageTable, and "states" if the recurrent states after `last` tokens are known."""
        return [*self._pages.list_sections(first, last), *(["states"] if self._states.has_states(last) else [])]

    def copy_section(self, name: str, first: int, last: int) -> np.ndarray:
        if name != "states":
            return self._pages.copy_section(name, first, last)
        states = self._states.find_states(last)
        assert states is not None
        return states

    def put(self, first: int, last: int, parts: Mapping[str, np.ndarray]) -> None:
        """Restore tokens as PageTable does; a sequence can continue only if the last sections include "states"."""
        self._pages.put(first, last, parts)
        if "states" in parts:
            self._states.put(last, parts["states"])

    def fork(self, length: int) -> "HybridState":
        return HybridState(self._pages.fork(length), self._states.fork())

    def truncate(self, length: int) -> int:
        return self._states.truncate(self._pages.truncate(self._states.truncate(length)))

    def shift(self, keep: int, count: int) -> int:
        """Fail, because recurrent states cannot drop tokens (localllm.engine.trace.rope_shift)."""
        raise AssertionError

    def append_copies(self, source: "HybridState", first: int, length: int, count: int, skipped: int) -> bool:
        """Fail, because recurrent states cannot be moved (localllm.engine.trace.rope_shift)."""
        raise AssertionError

    def close(self) -> None:
        self.truncate(0)


class CachePool:
    """Creates the states of sequences in one cache.

    Attributes:
        pages: pages of the cache.  layout: of recurrent states, None without any.
        bytes_per_token: memory of a token in all layers.
    """

    def __init__(self, cache: KVCache | JointCache, layout: StateLayout | None):
        self._cache, self.layout, self.pages = cache, layout, PageAllocator(cache.pages)
        self.bytes_per_token = cache.bytes_per_token

    def create_state(self) -> SequenceState:
        pages = PageTable(self._cache, self.pages)
        return HybridState(pages, RecurrentState(self.layout)) if self.layout else pages

    def get_cache_usage(self) -> tuple[int, int]:
        """Return the number of used token slots and of all, in whole pages."""
        return PAGE * self.pages.used, PAGE * len(self.pages)
