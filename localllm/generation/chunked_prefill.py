"""Split a prompt into chunks so that a batch computes the same logits as a single Generation.

A Generation prefills its prompt in runs (localllm.engine.runs). A run of up to PRECISE_TOKENS tokens has 16-bit
activations, a longer one 8-bit activations except for a few tokens at both ends of the prompt. In a batch, each chunk
is prefilled with the precision and the kernels that its tokens have in these runs. With 8 bits, chunks begin at a page.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.engine.image_tokens import has_images, skip_image_rows, split_images
from localllm.engine.runs import BATCH, PRECISE_TOKENS, RunPlan
from localllm.kernels.machine import has_tiles
from localllm.kernels.table import PAGE

if TYPE_CHECKING:
    from localllm.engine.sequence import Sequence
    from localllm.generation.context_overflow import ShiftedSequence

# Arithmetic operations between two decode steps: 0.55 s of two Zen 4 cores, which do 620e9 per second. More would be a
# little faster (weights are unpacked once per run: 80 ms of a 1.2 B model), but decoding answers would wait longer.
OPERATIONS = 3.4e11
# Prompt tokens, with activations in 16 bits, that are read within a decode step while answers are streamed. With 16
# answers of a 1.2 B model such a step takes 0.4 s, others 0.16 s: the 99th percentile of gaps between tokens is 2.8
# times the median. It was 3.4 times with pages that were read between steps, and 2.5 times with half a page between
# steps, at 0.94 of the tokens per second. With AMX tiles a step of 16 answers takes 0.13 s, with 48 tokens 0.30, with
# 80 0.37.
LIVE_CHUNK = 80 if has_tiles() else 48


class PrefillSegment(NamedTuple):
    """Tokens of a prompt that are computed with the same arithmetic.

    Attributes:
        begin, end: positions in the prompt.  precise: whether activations have 16 bits.
        is_image: whether the tokens are the rows of an image, which may attend to each other and form one chunk.
        kernel_tokens: token count that selects the kernels, see localllm.engine.runs; 0: that of the chunk.
    """

    begin: int
    end: int
    precise: bool
    is_image: bool = False
    kernel_tokens: int = 0


class PrefillSegments:
    """The segments of a prompt, derived from the runs in which a single Generation prefills it."""

    def __init__(self, prompt: Ids[int], runs: RunPlan):
        self._length, self.runs = len(prompt), runs
        self._listed = [*split_around_images(prompt, runs)] if has_images(prompt) else []

    def find_segment(self, place: int) -> PrefillSegment:
        """Return the segment that contains a position in the prompt or after it."""
        if place >= self._length:
            return PrefillSegment(place, place + PRECISE_TOKENS, True, kernel_tokens=1)  # of an answer
        if self._listed:
            return self._listed[bisect_right(self._listed, place, key=lambda segment: segment.begin) - 1]
        begin, end = self.runs.find_last_end(place), min(self.runs.find_next_end(place), self._length)
        return next(each for each in split_run(begin, end, self._length, self.runs) if place < each.end)

    def count_kernel_tokens(self, begin: int, end: int) -> int:
        """Return the token count that selects the kernels for a run of a prompt; 0 if the engine splits the run."""
        segment = self.find_segment(begin)
        return segment.kernel_tokens if segment.precise and segment.end >= end else 0


def split_run(begin: int, end: int, length: int, runs: RunPlan) -> list[PrefillSegment]:
    """Return the segments of one run of text in a prompt of `length` tokens.

    The first and last tokens of a long prompt are computed with 16-bit activations, the others with 8 bits.
    """
    if runs.is_measuring:
        return [PrefillSegment(begin, end, True, kernel_tokens=PRECISE_TOKENS)]
    exact = runs.count_exact_tokens(end - begin)
    first, last = begin + (exact if begin == 0 else 0), end - (exact if end == length else 0)
    parts = ((begin, first, True), (first, last, last - first <= PRECISE_TOKENS), (last, end, True))
    return [PrefillSegment(*part, kernel_tokens=part[1] - part[0]) for part in parts if part[0] < part[1]]


def split_around_images(prompt: Ids[int], runs: RunPlan) -> Iterator[PrefillSegment]:
    """Yield all segments of a prompt with images, as `prefill_prompt` and the engine split it."""
    start = 0
    while start < len(prompt):
        end = skip_image_rows(prompt, min(runs.find_next_end(start), len(prompt)))
        for first, last, key in split_images(np.array(prompt[start:end], np.int64)):
            for begin in range(start + first, start + last, BATCH):
                stop = min(begin + BATCH, start + last)
                if key is None:
                    yield from split_run(begin, stop, len(prompt), runs)
                else:
                    yield PrefillSegment(begin, stop, stop - begin <= PRECISE_TOKENS, True)
        start = end


def find_run_end(prompt: Ids[int], start: int, runs: RunPlan) -> int:
    """Return the end of the run that begins at `start` when a single Generation prefills the prompt."""
    return skip_image_rows(prompt, min(runs.find_next_end(start), len(prompt)))


def prefill_prompt(
    sequence: "Sequence | ShiftedSequence", prompt: list[int], on_progress: Callable[[int, int], None] | None
) -> np.ndarray:
    """Prefill the tokens of a prompt that a sequence does not hold yet.

    on_progress: called with the number of tokens prefilled so far and in all. Returns the logits after the prompt,
    float32 [1, vocab].
    """
    begin, progress = len(sequence.tokens), on_progress or (lambda done, total: None)
    start = begin
    while start < len(prompt):  # progress is reported, and Ctrl-C handled, between runs
        progress(start - begin, len(prompt) - begin)
        end = find_run_end(prompt, start, sequence.engine.runs)
        logits = sequence.append(prompt[start:end], "last" if end == len(prompt) else "none")
        start = end
    return logits


def compute_max_prefill_tokens(parameters: int) -> int:
    """Return the maximum number of prompt tokens to prefill between two decode steps.

    parameters: number of weights of the model. The result does not depend on measured times, so that the same input
    always gives the same runs and answers.
    """
    return max(PAGE, min(BATCH, int(OPERATIONS / (2 * parameters))))


def compute_chunk_size(place: int, segment: PrefillSegment, room: int) -> int:
    """Return how many tokens of a segment to prefill from a position on, in a run that has room for `room` tokens."""
    remaining = segment.end - place
    if remaining <= room:
        return remaining
    if segment.is_image:
        return 0
    limit, step = (room, 16) if segment.precise else (min(room, remaining - PAGE), PAGE)
    return max(0, (place + limit) // step * step - place)


def count_reusable_tokens(common: int, ours: PrefillSegments, cached: PrefillSegments) -> int:
    """Return how many of the first `common` tokens, equal in two prompts, are computed alike in both."""
    place, is_whole = 0, True
    while place < common:
        our, their = ours.find_segment(place), cached.find_segment(place)
        if our.precise != their.precise or not ours.runs.uses_same_kernels(our.kernel_tokens, their.kernel_tokens):
            break
        place, is_whole = min(our.end, their.end), our.end == their.end
    if is_whole and place <= common:
        return place
    place = min(place, common)
    last = ours.find_segment(place - 1)
    if last.is_image:
        return last.begin
    return place if last.precise else max(last.begin, min(place, last.end - PAGE) // PAGE * PAGE)
