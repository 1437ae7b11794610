"""What the CPU keeps for a sequence of a model with recurrent layers: their states, and the pages of other layers."""

from localllm.engine.page_table import PageTable
from localllm.engine.recurrent import RecurrentState


class HybridStore:
    """Both go back to where both can."""

    def __init__(self, pages: PageTable, states: RecurrentState):
        self._pages, self._states = pages, states

    @property
    def addresses(self) -> tuple[int, int, int]:
        """As of PageTable."""
        table, _, _ = self._pages.addresses
        return table, self._states.source.ctypes.data, self._states.target.ctypes.data

    def prepare(self, length: int, count: int) -> None:
        """There will be `count` tokens behind the first `length`. Raises MemoryLimitError."""
        self._pages.prepare(length, count)
        self._states.prepare(length, count)

    def fork(self, length: int) -> "HybridStore":
        """Another one that begins with the same `length` tokens."""
        return HybridStore(self._pages.fork(length), self._states.fork())

    def truncate(self, length: int) -> int:
        """Forget all but the first `length` tokens; how many are still there, which may be fewer."""
        return self._states.truncate(self._pages.truncate(self._states.truncate(length)))

    def shift(self, keep: int, count: int) -> int:
        """Not possible: the states have met what would be forgotten (localllm.engine.shift refuses it)."""
        raise AssertionError

    def close(self) -> None:
        """Forget everything."""
        self.truncate(0)
