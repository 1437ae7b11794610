"""Two caches for the same sequences: the first layers' in main memory, the others' on a GPU."""

from collections.abc import Iterable

import numpy as np

from localllm.engine.memory.cache import KVCache


class JointCache:
    """Two caches that page tables use as a single one (localllm.engine.memory.page_table)."""

    def __init__(self, first: KVCache, second: KVCache):
        """Combine caches of equally many pages."""
        assert first.pages == second.pages
        self.pages, self.window = first.pages, max(first.window, second.window)
        self._both = first, second

    @property
    def bytes_per_token(self) -> int:
        return sum(cache.bytes_per_token for cache in self._both)

    def copy(self, source: int, target: int, tokens: int) -> None:
        for cache in self._both:
            cache.copy(source, target, tokens)

    def copy_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        for cache in self._both:
            cache.copy_slots(source, target)

    def content(self, pages: np.ndarray, local: bool) -> np.ndarray:
        return np.concatenate([cache.content(pages, local) for cache in self._both])

    def fill(self, pages: np.ndarray, local: bool, content: np.ndarray) -> None:
        sizes = [len(pages) * cache.page_bytes(local) for cache in self._both]
        if sum(sizes) != len(content):
            raise ValueError(f"{len(content)} bytes for {sum(sizes)}")
        for cache, part in zip(self._both, np.split(content, sizes[:1]), strict=True):
            cache.fill(pages, local, part)

    def use(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        for cache in self._both:
            cache.use(pages)

    def give_back(self, pages: Iterable[int], local: bool = False) -> None:
        pages = list(pages)
        for cache in self._both:
            cache.give_back(pages, local)
