"""Estimates the remaining time of a long job."""

from time import perf_counter


class Remaining:
    """Estimate the remaining time of a job in equal steps; the clock starts now."""

    def __init__(self, total: int, done: int = 0):
        """Start the clock; done: steps finished by an earlier run."""
        self._total, self._before, self._start = total, done, perf_counter()

    def at_first(self) -> str:
        """Describe the first step, when there is no estimate yet."""
        return f"chunk {self._before + 1} of {self._total}"

    def after(self, done: int) -> str:
        """Describe the state after `done` steps: "chunk 3 of 40, 2 min 10 s left"."""
        per_step = (perf_counter() - self._start) / max(done - self._before, 1)
        return f"chunk {done} of {self._total}, {duration(per_step * (self._total - done))} left"


def duration(seconds: float) -> str:
    """Format a duration: "2 min 10 s"."""
    total = round(seconds)
    if total >= 3600:
        return f"{total // 3600} h {total % 3600 // 60} min"
    return f"{total // 60} min {total % 60} s" if total >= 60 else f"{total} s"
