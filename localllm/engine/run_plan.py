"""The plan of the runs that process tokens of several sequences: each run's tokens, in order."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from typing import NamedTuple

import numpy as np

from localllm.engine.image_tokens import passages
from localllm.engine.runs import BATCH, PRECISE_TOKENS, Runs
from localllm.engine.sequence import Sequence

REREAD = 16  # at most this many tokens are recomputed together with new ones; more get a separate run


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


def plan_runs(
    requests: Ids[tuple[Sequence, Ids[int]]], tokens: Ids[np.ndarray], logits: str, precise: bool,
    kernel_tokens: Ids[int], runs: Runs,
) -> Iterable[list[Reading]]:  # fmt: skip
    """Plan the runs of some requests.

    A request's tokens are those that its sequence's state lacks, usually none, then the new ones. A run has at most
    BATCH tokens. tokens: of each request, int64; logits, kernel_tokens: see Engine.run.
    """
    reread, readings, total, has_images = list[Reading](), list[Reading](), 0, False
    counts = kernel_tokens or [0] * len(tokens)
    for number, ((sequence, _), new, count) in enumerate(zip(requests, tokens, counts, strict=True)):
        length = len(sequence.tokens)
        begin, ids = sequence.store.truncate(length), new
        if begin < length:
            lacking = np.array(sequence.tokens[begin:], np.int64)
            if length - begin > REREAD:
                reread.append(Reading(number, begin, lacking))
                begin = length
            else:
                ids = np.concatenate((lacking, new))
        wanted = len(new) if logits == "all" else int(logits == "last")
        kernel_wanted = (count or len(new)) if logits == "all" else 1
        readings.append(Reading(number, begin, ids, wanted, count, kernel_wanted))
        total, has_images = total + len(ids), has_images or bool(ids.min() < 0)
    if total <= PRECISE_TOKENS and not reread and not has_images:  # as in decode
        return [readings]
    return divide_readings(reread, readings, tokens, precise, logits == "last", runs)


def divide_readings(
    reread: list[Reading], readings: list[Reading], tokens: Ids[np.ndarray], precise: bool, only_last: bool, runs: Runs
) -> Iterator[list[Reading]]:
    """Yield the readings of each run.

    With 16-bit activations, a few tokens at both ends of a long prompt get separate runs. reread: tokens that are
    recomputed before all others; only_last: whether logits are wanted after the last token only.
    """
    tails = list[Reading]()
    for reading, new in zip(readings, tokens, strict=True):
        tail = exact_tail(new, runs) if precise and only_last and not reading.kernel_tokens else 0
        tails.append(reading.part(len(reading.ids) - (tail or len(new)), len(reading.ids)))
    rounds = [reread, readings]
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
    """Return the number of tokens at the end that get a separate run with 16-bit activations."""
    if len(ids) == 1:  # a decode step
        return 0
    *_, last = passages(ids)
    return 0 if last.key is not None else runs.exact_tokens((last.end - last.first - 1) % BATCH + 1)


def exact_head(reading: Reading, runs: Runs) -> int:
    """Return the number of tokens at the beginning that get a separate run with 16-bit activations."""
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
