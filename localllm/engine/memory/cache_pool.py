"""Memory for sequences: cache pages, and recurrent states."""

from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.joint_cache import JointCache
from localllm.engine.memory.page_table import Pages, PageTable
from localllm.engine.memory.recurrent import RecurrentState, StateLayout
from localllm.engine.memory.sequence_state import HybridState, SequenceState
from localllm.kernels.arguments import PAGE


class CachePool:
    """Creates the states of sequences.

    Attributes:
        pages: of the cache.  layout: of recurrent states, if there are any.
        bytes_per_token: memory of one token in all layers.
    """

    def __init__(self, cache: KVCache | JointCache, layout: StateLayout | None):
        self._cache, self.layout, self.pages = cache, layout, Pages(cache.pages)
        self.bytes_per_token = cache.bytes_per_token

    def store(self) -> SequenceState:
        """Create the state of a new sequence."""
        pages = PageTable(self._cache, self.pages)
        return HybridState(pages, RecurrentState(self.layout)) if self.layout else pages

    def cache_usage(self) -> tuple[int, int]:
        """Return how many token slots are in use and how many there are, in whole pages."""
        return PAGE * self.pages.used, PAGE * len(self.pages)
