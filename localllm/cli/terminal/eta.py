"""How far a long job is and when it will be done."""

from time import perf_counter


class Remaining:
    """Of a job in equal steps, the clock of which runs from now on."""

    def __init__(self, total: int, done: int = 0):
        """done: steps that an earlier run has done."""
        self._total, self._before, self._start = total, done, perf_counter()

    def at_first(self) -> str:
        """As long as there is nothing to go by."""
        return f"chunk {self._before + 1} of {self._total}"

    def after(self, done: int) -> str:
        """With `done` steps behind us: "chunk 3 of 40, 2 min 10 s left"."""
        per_step = (perf_counter() - self._start) / max(done - self._before, 1)
        return f"chunk {done} of {self._total}, {duration(per_step * (self._total - done))} left"


def duration(seconds: float) -> str:
    """As people say it."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
