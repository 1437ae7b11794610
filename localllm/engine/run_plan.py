"""The plan of the runs that process tokens of several sequences: each run's tokens, in order."""

from collections.abc import Iterator
from collections.abc import Sequence as Ids
from typing import NamedTuple

import numpy as np

from localllm.engine.image_tokens import passages
from localllm.engine.runs import BATCH, Runs
from localllm.engine.sequence import Sequence

REREAD = 16  # at most this many tokens are recomputed together with new ones; more get a run of their own
NOTHING = np.zeros(0, np.int64)


class Reading(NamedTuple):
    """Consecutive tokens of a request to be processed."""

    request: int  # its index
    begin: int  # position of the first token
    ids: np.ndarray  # int64
    wanted: int = 0  # logits are returned for this many tokens at the end
    kernel_tokens: int = 0  # see localllm.engine.runs; 0: the number of tokens
    kernel_wanted: int = 1

    def part(self, first: int, end: int) -> "Reading":
        wanted = max(0, end - max(first, len(self.ids) - self.wanted))
        return self._replace(begin=self.begin + first, ids=self.ids[first:end], wanted=wanted)


def missing_tokens(request: int, sequence: Sequence) -> Reading:
    """Return the tokens of a sequence that its state lacks; usually none."""
    begin, length = sequence.store.truncate(len(sequence.tokens)), len(sequence.tokens)
    return Reading(request, begin, NOTHING if begin == length else np.array(sequence.tokens[begin:], np.int64))


def plan_runs(
    missing: Ids[Reading], tokens: Ids[np.ndarray], logits: str, precise: bool, kernel_tokens: Ids[int], runs: Runs
) -> Iterator[list[Reading]]:
    """Yield the tokens of each run, at most BATCH: the requests' missing tokens, then the new ones.

    With 16-bit activations, a few tokens at both ends of a long prompt get runs of their own. logits, kernel_tokens:
    see Engine.run.
    """
    readings, tails = list[Reading](), list[Reading]()
    for reading, new, count in zip(missing, tokens, [*kernel_tokens] or [0] * len(tokens), strict=True):
        wanted = {"all": len(new), "last": 1, "none": 0}[logits]
        late = reading.part(len(reading.ids), len(reading.ids)) if len(reading.ids) > REREAD else reading
        ids = np.concatenate((late.ids, new)) if len(late.ids) else new
        whole = Reading(late.request, late.begin, ids, wanted, count, (count or len(new)) if logits == "all" else 1)
        tail = exact_tail(new, runs) if precise and logits == "last" and not count else 0
        readings.append(whole)
        tails.append(whole.part(len(ids) - (tail or len(new)), len(ids)))
    rounds = [[reading for reading in missing if len(reading.ids) > REREAD], readings]
    if any(len(tail.ids) < len(new) for tail, new in zip(tails, tokens, strict=True)):
        pairs = zip(readings, tails, strict=True)
        heads = [reading.part(0, len(reading.ids) - len(tail.ids)) for reading, tail in pairs]
        rounds[1:] = [head._replace(kernel_tokens=0, kernel_wanted=1) for head in heads], tails
    for each_round in rounds:
        starts = [exact_head(reading, runs) if precise else 0 for reading in each_round]
        if any(starts):
            yield from split_runs([reading.part(0, start) for reading, start in zip(each_round, starts, strict=True)])
        rest = zip(each_round, starts, strict=True)
        yield from split_runs([reading.part(start, len(reading.ids)) if start else reading for reading, start in rest])


def exact_tail(ids: np.ndarray, runs: Runs) -> int:
    """Return how many tokens at the end get a run of their own with 16-bit activations, for exact logits."""
    if len(ids) == 1:  # a decode step
        return 0
    *_, last = passages(ids)
    return 0 if last.key is not None else runs.exact_tokens((last.end - last.first - 1) % BATCH + 1)


def exact_head(reading: Reading, runs: Runs) -> int:
    """Return how many tokens at the beginning get a run of their own with 16-bit activations."""
    if reading.begin or reading.kernel_tokens:
        return 0
    first = next(passages(reading.ids))
    return 0 if first.key is not None else runs.exact_tokens(min(first.end, BATCH))


def split_runs(readings: Ids[Reading]) -> Iterator[list[Reading]]:
    """Divide slices into runs of at most BATCH tokens. Image rows and text never share a run."""
    run, room = list[Reading](), BATCH
    for reading in readings:
        for first, last, key in passages(reading.ids):
            while first < last:
                if key is not None and run:
                    yield run
                    run, room = [], BATCH
                end = min(last, first + room)
                run.append(reading.part(first, end))
                room -= end - first
                first = end
                if not room or key is not None:
                    yield run
                    run, room = [], BATCH
    if run:
        yield run
