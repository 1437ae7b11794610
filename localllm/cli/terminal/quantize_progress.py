"""Show the progress of quantizing: a bar on a terminal, a plain line every 30 s elsewhere."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from localllm.cli.terminal.output import ProgressLine, exit_on_signals, is_plain, is_terminal, say, write
from localllm.cli.terminal.render import format_duration, format_size, to_one_line

if TYPE_CHECKING:
    from rich.progress import Progress as Rich

    from localllm.files.gguf.file import GGUFFile
    from localllm.quantizing.plan import OnProgress, OnStage
    from localllm.quantizing.rewrite import OutputFile

EVERY = 30.0  # seconds between two plain lines
# Shares of the time, measured with EmbeddingGemma: with --calibrate, and with --size in addition.
ENCODING = "encoding"
BY_SENSITIVITY = ("measuring scales:", "measuring formats:", "checking formats:")
CALIBRATED = {"measuring scales:": 15.0, "calibrating": 70.0, "writing": 15.0}
SIZED = {"measuring scales:": 15.0, "measuring formats:": 60.0, "checking formats:": 60.0} | CALIBRATED
MIN_SHARE = 0.05  # share of a stage, or of all, after which the measured pace replaces the usual share
MIN_BAR_WIDTH = 60  # minimum columns for a bar


class StageEstimator:
    """Estimates the remaining time of a command's stages from their usual shares and the measured pace."""

    def __init__(self, shares: Mapping[str, float], clock: Callable[[], float] = monotonic):
        """Set the shares of the total time by stage, in order; their sum does not matter."""
        self._shares, self._clock = dict(shares), clock
        self._last, self._stage = 0.0, ""
        self._start, self._skipped = 0.0, 0.0  # of the stage: its start, and the share done before
        self._spent, self._worked = dict[str, float](), dict[str, float]()
        self._done = dict.fromkeys(shares, 0.0)

    def update(self, stage: str, done: int, total: int) -> None:
        """Record the progress of a stage; earlier stages then count as finished.

        The pace counts from the first call, since earlier work such as compiling does not recur.
        """
        now, share_done = self._clock(), done / total if total else 1.0
        if stage != self._stage:
            is_first, self._stage = not self._stage, stage
            self._start, self._skipped = (now, share_done) if is_first else (self._last, 0.0)
            for earlier in [*self._shares][: [*self._shares].index(stage)]:
                self._done[earlier] = 1.0
        self._spent[stage], self._worked[stage] = now - self._start, share_done - self._skipped
        self._done[stage], self._last = share_done, now

    @property
    def fraction(self) -> float:
        """The elapsed share of the total time, 0 to 1; the share of the work until the time is known."""
        left, spent = self.left, sum(self._spent.values())
        if left is None or spent + left <= 0:
            return self._compute_share(self._done)
        return spent / (spent + left)

    @property
    def left(self) -> float | None:
        """The estimated remaining seconds; None until enough work is done to estimate them."""
        worked = self._compute_share(self._worked)
        if min(self._done.values()) == 1.0:
            return 0.0
        if worked < MIN_SHARE:
            return None
        pace = sum(self._spent.values()) / worked / sum(self._shares.values())  # seconds for a share of 1
        done, in_stage = self._done[self._stage], self._worked[self._stage]
        later = sum(self._shares[stage] for stage in [*self._shares] if self._done[stage] == 0)
        stage_seconds = (
            self._spent[self._stage] / in_stage if in_stage > MIN_SHARE else pace * self._shares[self._stage]
        )
        return stage_seconds * (1 - done) + pace * (later - self._shares[self._stage] * (done == 0))

    def _compute_share(self, done: Mapping[str, float]) -> float:
        """Return the share of the total time that the work done so far usually takes. done: share of each stage."""
        return sum(self._shares[stage] * part for stage, part in done.items()) / sum(self._shares.values())


class StageProgress:
    """Shows the stages of a command; a context manager, which may be entered again for further stages."""

    def __init__(self, shares: Mapping[str, float], line: ProgressLine):
        """Set up the display; line: shows the progress of compiling."""
        self._stages, self._line = StageEstimator(shares), line
        self._display: _ProgressBar | _ProgressLog = (
            _ProgressBar(line) if is_terminal(sys.stderr) and not is_plain() else _ProgressLog()
        )

    def __enter__(self) -> "OnStage":
        return self.show

    def show(self, stage: str, done: int, total: int, name: str) -> None:
        self._stages.update(stage, done, total)
        seconds_left = self._stages.left
        time_left = "" if seconds_left is None else f"about {format_duration(seconds_left)} left"
        self._display.show(self._stages.fraction, time_left, to_one_line(f"{stage} {name}"))

    def __exit__(self, *error: object) -> None:
        self._display.stop()


@contextmanager
def show_weight_progress(total: int, line: ProgressLine) -> "Iterator[OnProgress]":
    """Show on stderr how many of `total` weights are done; line: shows the progress of compiling."""
    with StageProgress({ENCODING: 1.0}, line) as show:
        yield lambda done, name: show(ENCODING, done, total, name)


class _ProgressLog:
    """Lines for logs, at most one every EVERY seconds; none if the job takes less."""

    def __init__(self) -> None:
        self._last = monotonic()

    def show(self, fraction: float, time_left: str, doing: str) -> None:
        """Print the progress and the estimated remaining time, at most once every EVERY seconds."""
        if monotonic() - self._last >= EVERY:
            self._last = monotonic()
            say(f"localllm: {int(100 * fraction)} %{', ' * bool(time_left)}{time_left}: {doing}")

    def stop(self) -> None:
        """Do nothing, since each line is complete."""


class _ProgressBar:
    def __init__(self, line: ProgressLine):
        self._progress: Rich | None = None
        self._line = line

    def _start(self) -> "Rich":
        """Draw the bar for the first time; earlier output stays above it."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.table import Column

        self._line.clear()
        console, percentage = Console(stderr=True), TaskProgressColumn(table_column=Column(min_width=4, no_wrap=True))
        text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        columns = (BarColumn(), percentage, text) if console.width >= MIN_BAR_WIDTH else (percentage, text)
        progress = Progress(*columns, console=console, transient=True)
        self._task = progress.add_task("", total=1.0)
        progress.start()
        return progress

    def show(self, fraction: float, time_left: str, doing: str) -> None:
        from rich.markup import escape

        self._progress = self._progress or self._start()
        text = escape(f"{time_left}, {doing}" if time_left else doing)
        self._progress.update(self._task, completed=fraction, description=text)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


# ---- commands that copy tensors


def copy_files(source: "GGUFFile", files: "Sequence[OutputFile]", force: bool) -> None:
    """Write the files with a progress line, and print their names and sizes. Raises UsageError, LocalllmError."""
    from localllm.kernels.build.faults import end_on_bus_error
    from localllm.quantizing.rewrite import write_files
    from localllm.services.outputs import is_model, require_replaceable

    exit_on_signals()
    for file in files:
        require_replaceable(file.path, is_model, "a model", force)
    start, line, total = perf_counter(), ProgressLine(), sum(file.count_bytes(source) for file in files)
    end_on_bus_error(source.path)
    with line:
        write_files(
            source, files, lambda done, name: line.show(f"copying: {100 * done // total} %, {to_one_line(name)}")
        )
    more_files = f" and {len(files) - 1} more" if len(files) > 1 else ""
    write(f"{to_one_line(files[0].path)}{more_files}: {format_size(total)}, {perf_counter() - start:.1f} s\n")


def describe_plan(source: "GGUFFile", files: "Sequence[OutputFile]") -> str:
    return "".join(
        f"{to_one_line(os.fspath(file.path))}: {len(file.names)} tensors, {format_size(file.count_bytes(source))}\n"
        for file in files
    )
