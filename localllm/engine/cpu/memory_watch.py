"""Notice that memory is needed, so that a model larger than memory gives some of it back.

What a plan may use is measured once, when the model is opened. Later the system is asked again, at most each
CHECK_SECONDS (0.5 ms): if less is available than half of what was left after the first run, weights are given back;
when there is plenty again, they are taken back. The model's own KV cache is such a use of memory, too: weights may have
its memory until the context is long. Available memory is asked instead of the kernel's stall times
(/proc/pressure), since it tells how much is short, and before programs are delayed.
"""

from time import monotonic

from localllm.system.memory import get_available_memory, get_private_memory

CHECK_SECONDS = 0.1
MIN_LEFT, MAX_LEFT = 64 << 20, 1 << 29  # bytes: the least and the most that others are left without asking


class MemoryWatch:
    """Compares the available memory with what was left after the first measurement."""

    def __init__(self, limit: int | None = None):
        """Watch the memory of the system, and of this process if `limit` bytes are all it may use."""
        self._due, self._least, self._limit = 0.0, 0, limit

    def measure(self, taken: int) -> int:
        """Return how many bytes to give back; negative: to take back; 0: nothing to do, or too early to ask again.

        taken: bytes that were given back before.
        """
        if (now := monotonic()) < self._due:
            return 0
        self._due, available = now + CHECK_SECONDS, self._measure_available()
        if not self._least:
            self._least = min(max(available // 2, MIN_LEFT if self._limit is None else 1), MAX_LEFT)
        if available < self._least:
            return 2 * self._least - available
        return -min(taken, max(available - 3 * self._least, 0))

    def _measure_available(self) -> int:
        available = get_available_memory()
        if self._limit is not None and (used := get_private_memory()) is not None:
            available = min(available, max(self._limit - used, 0))
        return available
