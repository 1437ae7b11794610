"""What a prompt goes on from: decided from tokens, turns and runs alone."""

import numpy as np
import pytest
from fake_sequences import FakeSequences

from localllm.engine.run import PRECISE_TOKENS
from localllm.engine.runs import FIRST, Runs
from localllm.generation.overflow import Rolling
from localllm.generation.reuse import Candidate, Reuse, TurnEnds, best_reuse
from localllm.generation.sequences import Sequences

RUNS = Runs()
LONG = list(range(2 * FIRST + 100))
SHORT = list(range(50))


def test_nobody_has_read_anything():
    assert best_reuse([], LONG, RUNS) is None
    assert best_reuse([Candidate("a", [9, 9], aligned=0)], LONG, RUNS) is None


def test_the_last_token_of_a_prompt_is_always_read():
    """Its logits are wanted."""
    assert best_reuse([Candidate("rolling", SHORT)], SHORT, RUNS) == Reuse("rolling", len(SHORT) - 1)


@pytest.mark.parametrize(("aligned", "expected"), [(0, None), (FIRST, FIRST), (2 * FIRST, 2 * FIRST)])
def test_other_prompts_go_on_where_a_whole_run_ended(aligned, expected):
    read = [*LONG[:-50], 7, 7, 7]
    found = best_reuse([Candidate("a", read, aligned=aligned)], LONG, RUNS)
    assert found == (Reuse("a", expected, is_run=True) if expected else None)


def test_a_conversation_goes_on_where_a_turn_ended():
    turns = [TurnEnds(600, 650), TurnEnds(800, 900)]
    read = LONG[:900]
    assert best_reuse([Candidate("a", read, turns, FIRST)], LONG, RUNS) == Reuse("a", 900)
    assert best_reuse([Candidate("a", read, turns, FIRST)], [*LONG[:700], -1, -2], RUNS) == Reuse("a", 650)
    going_on = [TurnEnds(600)]
    assert best_reuse([Candidate("a", read, going_on, FIRST)], LONG, RUNS) == Reuse("a", 900)


def test_behind_short_prompts_one_goes_on_anywhere():
    read = [*SHORT[:30], 99]
    assert best_reuse([Candidate("a", read, [TurnEnds(31)], 0)], SHORT, RUNS) == Reuse("a", 30)
    assert best_reuse([Candidate("a", read, [TurnEnds(PRECISE_TOKENS + 1)], 0)], SHORT, RUNS) is None


def test_who_has_read_most_and_of_equal_ones_the_first():
    some, more = Candidate("some", LONG[:600], (), FIRST), Candidate("more", LONG[:1100], (), 2 * FIRST)
    assert best_reuse([some, more, more._replace(source="also")], LONG, RUNS) == Reuse("more", 2 * FIRST, is_run=True)


def test_the_same_prompt_is_not_read_at_all():
    """Where what comes after it is known; of another that goes on, as of anybody who has read it."""
    known = Candidate("end", LONG[:900], aligned=FIRST, has_logits=True)
    assert best_reuse([Candidate("a", LONG, aligned=FIRST), known], LONG[:900], RUNS) == Reuse("end", 900)
    assert best_reuse([known], LONG, RUNS) == best_reuse([known._replace(has_logits=False)], LONG, RUNS)
    assert best_reuse([known], [*LONG[:899], -1], RUNS) == Reuse("end", FIRST, is_run=True)


def test_a_turn_that_was_taken_back_is_no_place_to_go_on():
    """Where a sequence went back to behind a short prompt is none for a long one, which is read in other runs."""
    sequences = Sequences(FakeSequences(9, lambda tokens: np.zeros(9)))
    begun = []
    for ids in ([2] * 60, [2] * 50 + [3] * (PRECISE_TOKENS - 50), [2] * 50 + [3] * 50 + [4] * 100):
        with sequences.beginning_with(ids) as one:
            begun.append(len(one.sequence.tokens))
            one.sequence.append(ids[begun[-1] :])
    assert begun == [0, 50, 0]


class TakenLock:
    """Somebody else has it."""

    def __enter__(self) -> None:
        raise BlockingIOError

    def __exit__(self, *_: object) -> None: ...


def test_threads_wait_for_each_other():
    """Whoever begins, ends, puts aside or writes."""
    sequences, ids = Sequences(FakeSequences(9, lambda tokens: np.zeros(9), 2 * FIRST)), [2] * (FIRST + 1)
    with pytest.raises(BlockingIOError), sequences.beginning_with(ids) as one:  # as it is given back
        one.sequence.append(ids[:FIRST])
        one.sequence.append(ids[FIRST:])
        one.sequence.aligned = FIRST
        sequences.lock = TakenLock()
        with pytest.raises(BlockingIOError):
            sequences.was_read(one.sequence, FIRST, np.zeros((1, 9)))
    for call in (sequences.hold, sequences.write_conversation, lambda: sequences.beginning_with(ids).__enter__()):
        with pytest.raises(BlockingIOError):
            call()


@pytest.mark.parametrize(("length", "begin", "aligned", "is_known"), [
    (PRECISE_TOKENS + 1, 0, 0, True), (PRECISE_TOKENS, 0, 0, False), (PRECISE_TOKENS + 1, 5, 0, False),
    (FIRST + 9, 0, FIRST, True), (FIRST + 9, FIRST, FIRST, True), (FIRST + 9, 0, 0, False),
    (FIRST + 9, 9, FIRST, False),
])  # fmt: skip
def test_which_prompts_ends_are_known(length: int, begin: int, aligned: int, is_known: bool):
    """Of the latest that was read in whole runs; its logits are its own."""
    engine = FakeSequences(9, lambda tokens: np.zeros(9), 2 * FIRST)
    sequences, sequence, logits = Sequences(engine), engine.sequence(), np.ones((1, 9))
    for place in range(0, length, FIRST):
        sequence.append([2] * min(FIRST, length - place))
    sequence.aligned = aligned
    for number in (1, 2):
        sequences.was_read(sequence, begin, logits)
        assert (sequences._end is not None, engine.open()) == (is_known, 1 + is_known)
        assert len(engine.made) == 1 + number * is_known
    logits[:] = 5
    if sequences._end:
        assert sequences._end.logits.tolist() == [[1] * 9] and sequences._end.sequence.tokens == [2] * length
    sequences.was_read(Rolling(sequence, 5), begin, logits)
    assert len(engine.made) == 1 + 2 * is_known
