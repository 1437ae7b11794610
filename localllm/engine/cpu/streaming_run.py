"""Runs a tape in pieces, behind each of which the system may take back the weights that it has read.

An encoder of pictures reads each of its weights once for a picture, and pictures come seldom: a process that keeps all
of them mapped holds 950 MB for SigLIP-400M's shape in F16, and 235 so. To give 0.8 GB back takes 40 ms of one thread,
to map them again for another picture 80 ms of all, of 3.5 s.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from localllm.engine.cpu.threads import Threads
from localllm.engine.lower.tape import Step
from localllm.files.gguf.page_release import release_pages

AT_ONCE = 1 << 25  # bytes of weights in a piece at most, if a stage has no more


class TapeSlice(NamedTuple):
    """Whole stages of a tape."""

    end: int  # the number of the step behind it
    weights: list[np.ndarray]


class StreamingRunner:
    """As Threads.run, in pieces."""

    def __init__(self, threads: Threads, steps: Sequence[Step]):
        """steps: of the finished tape that the threads walk."""
        self._threads, self._pieces = threads, pieces_of(steps)

    def run(self) -> None:
        first = 0
        for end, weights in self._pieces:
            self._threads.run_steps(first, end)
            first = end
            for some in weights:
                release_pages(some)


def pieces_of(steps: Sequence[Step]) -> list[TapeSlice]:
    """A new one begins with a stage, where the last one has read as much as it may."""
    pieces, weights, size = list[TapeSlice](), list[np.ndarray](), 0
    for number, step in enumerate(steps):
        some = step.arguments.get("weights")
        more = some.nbytes if isinstance(some, np.ndarray) else 0
        if size + more > AT_ONCE and step.stage != steps[number - 1].stage:
            pieces.append(TapeSlice(number, weights))
            weights, size = [], 0
        if isinstance(some, np.ndarray):
            weights.append(some)
            size += more
    return [*pieces, TapeSlice(len(steps), weights)]
