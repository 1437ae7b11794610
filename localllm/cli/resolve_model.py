"""Resolves the MODEL of a command: finds its file, or pulls it."""

import os
import sys
from time import monotonic
from typing import TYPE_CHECKING

from localllm.cli.terminal.output import ProgressLine, broken, dim, is_terminal
from localllm.cli.terminal.render import one_line, size
from localllm.system.terminal import usual_keys

if TYPE_CHECKING:
    from localllm.services.hub.catalogue import HubReference, MissingError

LEAST = 0.1  # seconds between two updates of the progress line


def resolve_model_path(model: str) -> str:
    """Return the file of a MODEL: an existing path, or the file of a known name.

    On a terminal, offers to pull a missing model. Raises the errors of catalogue.resolve and
    pull.pull.
    """
    if os.path.lexists(model):
        return model
    from localllm.services.hub.catalogue import MissingError, resolve

    try:
        return resolve(model)
    except MissingError as error:
        if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
            raise
        return offer_pull(error)


def offer_pull(missing: "MissingError") -> str:
    """Offer to pull a missing model and return its file. Raises MissingError if the user declines."""
    reference = missing.reference
    size_note = f" ({reference.size})" if reference.size else ""
    if not confirm(f"{reference.text} is not on this computer. Pull it{size_note}?"):
        raise missing
    return pull_shown(reference)


def confirm(question: str) -> bool:
    """Ask a yes-or-no question on the terminal; the end of input is a no."""
    with usual_keys():
        print(f"{broken(f'{one_line(question)} [y/N]', sys.stderr)} ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")


def pull_shown(reference: "HubReference") -> str:
    """Pull a model, with a progress line; return the path of its file."""
    from localllm.services.hub.pull import Watcher, pull

    class Shown(Watcher):
        """Shows the progress of a pull on one line."""

        def __init__(self) -> None:
            self.line, self.start, self.last, self.first = ProgressLine(), monotonic(), 0.0, -1

        def show(self, text: str, last: bool = False) -> None:
            if last or monotonic() - self.last >= LEAST:
                self.last = monotonic()
                self.line.show(one_line(text))

        def looking(self, subject: str) -> None:
            self.show(f"{reference.text}: looking at {subject}", last=True)

        def checking(self, file: str, done: int, total: int) -> None:
            self.show(f"checking {size(done)} of {size(total)}: {file}", last=done == total)

        def receiving(self, file: str, done: int, total: int) -> None:
            if self.first < 0:
                self.first, self.start = done, monotonic()
            speed = (done - self.first) / max(1e-3, monotonic() - self.start)
            rate = f", {size(int(speed))}/s, {duration((total - done) / speed)} to go" if speed else ""
            self.show(f"{size(done)} of {size(total)}{rate}: {file}", last=done == total)

        def interrupted(self, reason: str) -> None:
            self.show(f"trying again: {reason}", last=True)

    display = Shown()
    try:
        pulled = pull(reference, display)
    except KeyboardInterrupt:
        display.line.clear()
        dim("what was downloaded is kept; run the same command again to resume")
        raise
    finally:
        display.line.clear()
    dim(f"{reference.text}: {size(pulled.size)}" + ("" if pulled.received else ", already downloaded and verified"))
    return str(pulled.path)


def duration(seconds: float) -> str:
    """Format a duration: 3725 as "1:02:05"."""
    minutes, seconds_left = divmod(round(min(seconds, 359_999)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"
