"""Run a tape in slices and release the memory of each slice's weights afterwards.

A vision encoder reads each weight once per image, and images are rare: with all weights mapped a process holds 950 MB
for SigLIP-400M's shape in F16, with slices 235 MB. Releasing 0.8 GB takes one thread 40 ms, and mapping it again for
the next image takes all threads 80 ms, of 3.5 s per image.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from localllm.engine.cpu.threads import Threads
from localllm.engine.lower.tape import Step
from localllm.files.gguf.mapped_pages import release_pages

AT_ONCE = 1 << 25  # most bytes of weights in a slice, unless a stage has more


class TapeSlice(NamedTuple):
    """Whole stages of a tape."""

    end: int  # number of the first step after the slice
    weights: list[np.ndarray]


class StreamingRunner:
    """Runs a tape slice by slice, like Threads.run."""

    def __init__(self, threads: Threads, steps: Sequence[Step]):
        """Slice the steps of the finished tape that the threads execute."""
        self._threads, self._pieces = threads, pieces_of(steps)

    def run(self) -> None:
        first = 0
        for end, weights in self._pieces:
            self._threads.run_steps(first, end)
            first = end
            for some in weights:
                release_pages(some)


def pieces_of(steps: Sequence[Step]) -> list[TapeSlice]:
    """Slice steps at the ends of stages, so that a slice has at most AT_ONCE bytes of weights where possible."""
    pieces, weights, size = list[TapeSlice](), list[np.ndarray](), 0
    for number, step in enumerate(steps):
        some = step.arguments.get("weights")
        nbytes = some.nbytes if isinstance(some, np.ndarray) else 0
        if size + nbytes > AT_ONCE and step.stage != steps[number - 1].stage:
            pieces.append(TapeSlice(number, weights))
            weights, size = [], 0
        if isinstance(some, np.ndarray):
            weights.append(some)
            size += nbytes
    return [*pieces, TapeSlice(len(steps), weights)]
