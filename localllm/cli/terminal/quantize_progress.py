"""Show the progress of quantizing: a bar on a terminal, elsewhere a plain line every 30 s."""

import sys
from contextlib import AbstractContextManager
from time import monotonic
from typing import TYPE_CHECKING

from localllm.cli.terminal.output import ProgressLine, is_dumb, is_terminal, say
from localllm.cli.terminal.render import one_line

if TYPE_CHECKING:
    from localllm.quantizing.plan import OnProgress

EVERY = 30.0  # seconds between two plain lines


def progress_of(total: int, line: ProgressLine) -> AbstractContextManager["OnProgress"]:
    """Show progress on stderr, of `total` weights; line: where compiling shows its progress."""
    return _Bar(total, line) if is_terminal(sys.stderr) and not is_dumb() else _Lines(total)


class PlainLines:
    """Lines that are printed at most every EVERY seconds, for logs; none for what takes less."""

    def __init__(self) -> None:
        self._last = monotonic()
        self._start = self._last

    def show(self, done: int, total: int, doing: str) -> None:
        """Print how much is done, and how long the rest may take, if it is time for a line."""
        now = monotonic()
        if now - self._last < EVERY:
            return
        self._last = now
        left = (now - self._start) / done * (total - done) if done else 0
        rest = f", about {left:.0f} s left" if done else ""
        say(f"localllm: {100 * done // max(total, 1)} %{rest}: {one_line(doing)}")


class _Lines:
    def __init__(self, total: int):
        self._total, self._lines = total, PlainLines()

    def __enter__(self) -> "OnProgress":
        return self.show

    def show(self, done: int, name: str) -> None:
        self._lines.show(done, self._total, name)

    def __exit__(self, *error: object) -> None:
        pass


class _Bar:
    def __init__(self, total: int, line: ProgressLine):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task, self._line = self._progress.add_task("", total=total), line

    def __enter__(self) -> "OnProgress":
        return self.show

    def show(self, done: int, name: str) -> None:
        from rich.markup import escape

        if not self._progress.live.is_started:
            self._line.clear()
            self._progress.start()
        self._progress.update(self._task, completed=done, description=escape(one_line(name)))

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
