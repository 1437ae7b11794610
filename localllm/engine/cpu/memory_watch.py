"""Notice that other programs need memory, so that a model larger than memory gives some back.

What a plan may use is measured once, when the model is opened. Later the system is asked again, at most each
CHECK_SECONDS (0.5 ms): if less is available than half of what was left after the first run, weights are given back;
when there is plenty again, they are taken back. Available memory is asked instead of the kernel's stall times
(/proc/pressure), since it tells how much is short, and before programs are delayed.
"""

from time import monotonic

from localllm.system.memory import get_available_memory

CHECK_SECONDS = 0.1
MIN_LEFT, MAX_LEFT = 64 << 20, 1 << 29  # bytes: the least and the most that others are left without asking


class MemoryWatch:
    """Compares the available memory with what was left after the first measurement."""

    def __init__(self) -> None:
        self._due, self._least = 0.0, 0

    def measure(self, taken: int) -> int:
        """Return how many bytes to give back; negative: to take back; 0: nothing to do, or too early to ask again.

        taken: bytes that were given back before.
        """
        if (now := monotonic()) < self._due:
            return 0
        self._due, available = now + CHECK_SECONDS, get_available_memory()
        if not self._least:
            self._least = min(max(available // 2, MIN_LEFT), MAX_LEFT)
        if available < self._least:
            return 2 * self._least - available
        return -min(taken, max(available - 3 * self._least, 0))
