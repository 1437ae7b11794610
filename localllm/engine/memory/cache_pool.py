"""Room for sequences: the pages of a cache, and the states of recurrent layers."""

from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.joint_cache import JointCache
from localllm.engine.memory.page_table import PageTable
from localllm.engine.memory.pages import Pages
from localllm.engine.memory.recurrent import RecurrentState, StateLayout
from localllm.engine.memory.sequence_state import HybridState, SequenceState
from localllm.kernels.arguments import PAGE


class CachePool:
    """Where the stores of sequences come from.

    Attributes:
        pages: of the cache.  layout: of what recurrent layers keep, if there are some.
        place_bytes: of memory for one token of a sequence.
    """

    def __init__(self, cache: KVCache | JointCache, layout: StateLayout | None):
        self._cache, self.layout, self.pages = cache, layout, Pages(cache.pages)
        self.place_bytes = cache.place_bytes

    def store(self) -> SequenceState:
        """For a new sequence."""
        pages = PageTable(self._cache, self.pages)
        return HybridState(pages, RecurrentState(self.layout)) if self.layout else pages

    def places(self) -> tuple[int, int]:
        """For how many tokens there are places in use, and at all; whole pages."""
        return PAGE * self.pages.used, PAGE * len(self.pages)
