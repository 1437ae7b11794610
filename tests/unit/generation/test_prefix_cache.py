"""What a prompt goes on from: decided from tokens, turns and runs alone."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_sequences import FakeSequences
from pooled import acquire

from localllm.engine.memory.sequence_state import StoredPrefix
from localllm.engine.runs import FIRST, PRECISE_TOKENS, Runs
from localllm.generation.context_overflow import ShiftedSequence
from localllm.generation.prefix_cache import (
    NOTHING,
    PARKED,
    CachedSequence,
    PrefixCache,
    PrefixMatch,
    ReuseCandidate,
    TurnBoundary,
    longest_match,
)

RUNS = Runs()
LONG = list(range(2 * FIRST + 100))
SHORT = list(range(50))


def test_nobody_has_read_anything():
    assert longest_match([], LONG, RUNS) == NOTHING
    assert longest_match([ReuseCandidate("a", [9, 9], aligned=0)], LONG, RUNS) == NOTHING


def test_the_last_token_of_a_prompt_is_always_read():
    """Its logits are wanted."""
    assert longest_match([ReuseCandidate("rolling", SHORT)], SHORT, RUNS) == PrefixMatch("rolling", len(SHORT) - 1)


@pytest.mark.parametrize(("aligned", "expected"), [(0, None), (FIRST, FIRST), (2 * FIRST, 2 * FIRST)])
def test_other_prompts_go_on_where_a_whole_run_ended(aligned, expected):
    read = [*LONG[:-50], 7, 7, 7]
    found = longest_match([ReuseCandidate("a", read, aligned=aligned)], LONG, RUNS)
    assert found == (PrefixMatch("a", expected, is_run=True) if expected else NOTHING)


def test_a_conversation_goes_on_where_a_turn_ended():
    turns = [TurnBoundary(600, 650), TurnBoundary(800, 900)]
    read = LONG[:900]
    assert longest_match([ReuseCandidate("a", read, turns, FIRST)], LONG, RUNS) == PrefixMatch("a", 900)
    assert longest_match([ReuseCandidate("a", read, turns, FIRST)], [*LONG[:700], -1, -2], RUNS) == PrefixMatch(
        "a", 650
    )
    going_on = [TurnBoundary(600)]
    assert longest_match([ReuseCandidate("a", read, going_on, FIRST)], LONG, RUNS) == PrefixMatch("a", 900)


def test_behind_short_prompts_one_goes_on_anywhere():
    read = [*SHORT[:30], 99]
    assert longest_match([ReuseCandidate("a", read, [TurnBoundary(31)], 0)], SHORT, RUNS) == PrefixMatch("a", 30)
    assert longest_match([ReuseCandidate("a", read, [TurnBoundary(PRECISE_TOKENS + 1)], 0)], SHORT, RUNS) == NOTHING


def test_a_turn_is_continued_anywhere_by_a_prompt_with_the_same_kernels():
    """The tokens before were read by them: here two prompts of 49 tokens, then one for which others are selected."""
    turns, read = [TurnBoundary(20, 25), TurnBoundary(49, 52)], LONG[:52]
    runs = Runs(kernel_limits=(50,))
    assert longest_match([ReuseCandidate("a", read, turns, 0)], LONG[:49], runs) == PrefixMatch("a", 48)
    assert longest_match([ReuseCandidate("a", read, turns, 0)], [*LONG[:40], *[-1] * 9], runs) == PrefixMatch("a", 40)
    assert longest_match([ReuseCandidate("a", read, turns, 0)], [*LONG[:40], *[-1] * 30], runs) == PrefixMatch("a", 25)


def test_who_has_read_most_and_of_equal_ones_the_first():
    some, more = ReuseCandidate("some", LONG[:600], (), FIRST), ReuseCandidate("more", LONG[:1100], (), 2 * FIRST)
    assert longest_match([some, more, more._replace(source="also")], LONG, RUNS) == PrefixMatch(
        "more", 2 * FIRST, is_run=True
    )


def test_the_same_prompt_is_not_read_at_all():
    """Where what comes after it is known; of another that goes on, as of anybody who has read it."""
    known = ReuseCandidate("end", LONG[:900], aligned=FIRST, has_logits=True)
    assert longest_match([ReuseCandidate("a", LONG, aligned=FIRST), known], LONG[:900], RUNS) == PrefixMatch("end", 900)
    assert longest_match([known], LONG, RUNS) == longest_match([known._replace(has_logits=False)], LONG, RUNS)
    assert longest_match([known], [*LONG[:899], -1], RUNS) == PrefixMatch("end", FIRST, is_run=True)


def test_a_turn_that_was_taken_back_is_no_place_to_go_on():
    """Where a sequence went back to behind a short prompt is none for a long one, which is read in other runs."""
    sequences = PrefixCache(FakeSequences(9, lambda tokens: np.zeros(9)))
    begun = []
    for ids in ([2] * 60, [2] * 50 + [3] * (PRECISE_TOKENS - 50), [2] * 50 + [3] * 50 + [4] * 100):
        with acquire(sequences, ids) as one:
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
    sequences, ids = PrefixCache(FakeSequences(9, lambda tokens: np.zeros(9), 2 * FIRST)), [2] * (FIRST + 1)
    waited = False
    with pytest.raises(BlockingIOError), acquire(sequences, ids) as one:  # as it is given back
        one.sequence.append(ids[:FIRST])
        one.sequence.append(ids[FIRST:])
        one.sequence.aligned = FIRST
        sequences.lock = TakenLock()
        try:
            sequences.record_prefill(one.sequence, FIRST, np.zeros((1, 9)))
        except BlockingIOError:
            waited = True
    assert waited
    for call in (sequences.park, sequences.write_conversation, lambda: acquire(sequences, ids).__enter__()):
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
    sequences, sequence, logits = PrefixCache(engine), engine.sequence(), np.ones((1, 9))
    for place in range(0, length, FIRST):
        sequence.append([2] * min(FIRST, length - place))
    sequence.aligned = aligned
    for number in (1, 2):
        sequences.record_prefill(sequence, begin, logits)
        assert (sequences._end is not None, engine.open()) == (is_known, 1 + is_known)
        assert len(engine.made) == 1 + number * is_known
    logits[:] = 5
    if sequences._end:
        assert sequences._end.logits.tolist() == [[1] * 9] and sequences._end.sequence.tokens == [2] * length
    sequences.record_prefill(ShiftedSequence(sequence, 5), begin, logits)
    assert len(engine.made) == 1 + 2 * is_known


def read(sequences: PrefixCache, ids: list[int], is_told: bool = False, **how: Any) -> tuple[int, Any]:
    """Read a prompt: how much of it was there, and the logits if all was."""
    with acquire(sequences, ids, **how) as (sequence, logits):
        held = len(sequence.tokens)
        for place in range(held, len(ids), FIRST):
            sequence.append(ids[place : place + FIRST])
        if is_told:
            sequence.aligned = len(ids) // FIRST * FIRST
            sequences.record_prefill(sequence, held, np.ones((1, 9)))
    return held, logits


def engine_of(context: int = 2 * FIRST) -> FakeSequences:
    return FakeSequences(9, lambda tokens: np.zeros(9), context)


def test_who_was_left_may_come_back():
    """As many as are held, as long as a whole one more has room."""
    engine = engine_of(100)
    engine.cache_usage = lambda: (50, 150)
    sequences = PrefixCache(engine)
    sequences.park()
    assert not engine.made
    for number in range(PARKED + 2):
        read(sequences, [number] * 9)
        sequences.park()
    assert [one.tokens for one in sequences._parked] == [[number] * 9 for number in range(2, PARKED + 2)]
    assert engine.open() == PARKED + 1
    assert [read(sequences, [number] * 9 + [8])[0] for number in (1, 2, 2)] == [0, 9, 9]
    for places, held in (((51, 150), 3), ((50, 150), 4)):  # 2 was taken
        engine.cache_usage = lambda found=places: found
        sequences.park()
        assert len(sequences._parked) == held
    read(sequences, [1] * 9, keep=2)
    sequences.park()
    assert len(sequences._parked) == 4


def test_an_end_is_for_those_that_do_not_roll():
    engine = engine_of()
    sequences, ids = PrefixCache(engine), [2] * (FIRST + 2)
    assert read(sequences, ids, is_told=True) == (0, None)
    assert read(sequences, ids, keep=5) == (FIRST + 1, None)
    held, logits = read(sequences, ids)
    assert (held, logits.tolist()) == (FIRST + 2, [[1] * 9])
    assert not engine.rewound and read(sequences, [*ids[:-1], 3, 3]) == (FIRST, None) and engine.rewound == [FIRST]
    assert read(sequences, ids, is_told=True)[0] == FIRST and sequences._end
    assert read(sequences, [3] * 9) == (0, None) and not sequences._end
    assert engine.open() == 1


class Files:
    """What is kept of prompts: `found` by length of what is asked, whether as a conversation, and what `load` gives."""

    def __init__(self, found: dict[tuple[int, bool], StoredPrefix] | None = None, *loads: Any):
        self.found, self.loads, self.asked, self.kept = found or {}, list(loads), [], []

    def find_prefix(
        self, ids: list[int], most: int = sys.maxsize, is_conversation: bool = False
    ) -> StoredPrefix | None:
        self.asked.append((len(ids), most, is_conversation))
        found = self.found.get((len(ids), is_conversation))
        return found if found and len(found.ids) <= most else None

    def load(self, stored: StoredPrefix) -> Any:
        return self.loads.pop(0)

    def keep(self, sequence: Any, logits: Any, is_conversation: bool = False) -> None:
        self.kept.append((len(sequence.tokens), logits is not None and logits.tolist(), is_conversation))
        sequence.close()


@pytest.mark.parametrize(
    ("earlier", "conversations"), [(None, [0, 0]), (0, [0, 0]), (5, [4, 5]), (20, [19]), (21, []), (22, [])]
)
def test_what_files_are_asked_for(earlier: int | None, conversations: list[int]):
    files, how = Files(), {} if earlier is None else {"earlier": earlier}
    read(PrefixCache(engine_of(), files), [2] * 20, **how)
    assert files.asked == [(20, sys.maxsize, False), *((length, sys.maxsize, True) for length in conversations)]
    read(PrefixCache(engine_of(), files), [2] * 20, keep=4, **how)
    assert len(files.asked) == 1 + len(conversations)


def test_what_files_have_goes_on():
    """A prompt in whole runs, a conversation behind its end; what is gone by then is looked for again, in fewer."""
    engine, ids = engine_of(), [2] * 20
    engine.runs = Runs(4, 4)
    prompt, talk = StoredPrefix(ids[:8], (), False, False), StoredPrefix(ids[:9], (), False, True)
    for found, there, turns in (({(20, False): prompt}, 8, []), ({(11, True): talk}, 9, [TurnBoundary(9, 9)])):
        loaded = engine.sequence()
        loaded.append(ids[:there])
        files = Files(found, CachedSequence(loaded))
        sequences = PrefixCache(engine, files)
        with acquire(sequences, ids, earlier=11) as begun:
            assert begun == (loaded, None)
            assert sequences._turns[loaded] == [*turns, TurnBoundary(20)]
        sequences.write_conversation()
        assert [*sequences.idle] == [loaded] and not files.kept
    files = Files({(20, False): prompt, (11, True): talk}, None, None, CachedSequence(loaded))
    assert read(PrefixCache(engine, files), ids + [3], earlier=11) == (0, None) and len(files.loads) == 2
    loaded.truncate(8)
    assert read(PrefixCache(engine, files), ids, earlier=11) == (8, None)


def test_what_goes_to_files():
    """Prompts that were read anew, once; conversations when that is asked. Only what takes long to read again."""
    engine, files, texts = engine_of(), Files(), []
    written = SimpleNamespace(add=lambda tokens, is_kept: texts.append((len(tokens), is_kept)), collect=lambda: None)
    sequences, ids = PrefixCache(engine, files, written), [2] * (FIRST + 1)
    sequences.write_conversation()
    assert (files.kept, texts) == ([], [])
    for _ in range(2):
        read(sequences, ids, is_told=not files.kept)
        assert files.kept == [(FIRST + 1, [[1] * 9], False)]
    sequences.write_conversation()
    assert (files.kept[1:], texts) == ([(FIRST + 1, False, True)], [(FIRST + 1, True)])
    for how in ({}, {"keep": 3}):
        read(sequences, [3] * FIRST, is_told=True, **how)
        sequences.write_conversation()
    assert (len(files.kept), texts[1:]) == (2, [(FIRST, True)] * 2)
    with acquire(sequences, [4] * (FIRST + 1)) as (sequence, _):
        sequence.append([4] * FIRST)
        sequence.append([4])
        sequence.aligned = FIRST
        sequences.record_prefill(sequence, 0, np.ones((1, 9)))
        read(sequences, [5] * 9)  # somebody else comes meanwhile
        assert files.kept[2:] == [(FIRST + 1, [[1] * 9], False)]
    assert len(files.kept) == 3 and engine.open() == 1


def test_a_closed_sequence_is_not_kept():
    sequences = PrefixCache(engine_of())
    read(sequences, [2] * 9)
    (kept,) = sequences.idle
    with acquire(sequences, [2] * 9) as one, acquire(sequences, [3] * 9) as other:
        assert one.sequence is kept
        other.sequence.close()
    assert [*sequences.idle] == [kept] and not kept.closed


def test_no_turn_ends_behind_what_is_held():
    engine = engine_of()
    sequences, sequence = PrefixCache(engine), engine.sequence()
    assert sequences._turn_ends(sequence) == []
    sequence.append([2] * 12)
    sequences._turns[sequence] = [TurnBoundary(3, 5), TurnBoundary(6, 20), TurnBoundary(9)]
    assert sequences._turn_ends(sequence) == [TurnBoundary(3, 5), TurnBoundary(6, 12), TurnBoundary(9, 12)]
