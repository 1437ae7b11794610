"""Test where a prompt continues: decided from tokens, turns and runs alone."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_sequences import FakeSequences
from pooled import acquire

from localllm.engine.memory.sequence_state import StoredPrefix
from localllm.engine.runs import FIRST_RUN, PRECISE_TOKENS, RunPlan
from localllm.generation.context_overflow import ShiftedSequence
from localllm.generation.prefix_cache import (
    NOTHING,
    PARKED,
    CachedSequence,
    PrefixCache,
    PrefixMatch,
    ReuseCandidate,
    TurnBoundary,
    find_longest_match,
)

RUNS = RunPlan()
LONG = list(range(2 * FIRST_RUN + 100))
SHORT = list(range(50))


def test_without_a_common_prefix_nothing_is_reused():
    assert find_longest_match([], LONG, RUNS) == NOTHING
    assert find_longest_match([ReuseCandidate("a", [9, 9], aligned=0)], LONG, RUNS) == NOTHING


def test_the_last_token_of_a_prompt_is_always_prefilled():
    """Prefill it for its logits."""
    assert find_longest_match([ReuseCandidate("rolling", SHORT)], SHORT, RUNS) == PrefixMatch("rolling", len(SHORT) - 1)


@pytest.mark.parametrize(("aligned", "expected"), [(0, None), (FIRST_RUN, FIRST_RUN), (2 * FIRST_RUN, 2 * FIRST_RUN)])
def test_another_prompt_continues_at_the_end_of_a_whole_run(aligned, expected):
    prefill = [*LONG[:-50], 7, 7, 7]
    match = find_longest_match([ReuseCandidate("a", prefill, aligned=aligned)], LONG, RUNS)
    assert match == (PrefixMatch("a", expected, is_run=True) if expected else NOTHING)


def test_a_conversation_continues_at_the_end_of_a_turn():
    turns = [TurnBoundary(600, 650), TurnBoundary(800, 900)]
    prefill = LONG[:900]
    assert find_longest_match([ReuseCandidate("a", prefill, turns, FIRST_RUN)], LONG, RUNS) == PrefixMatch("a", 900)
    assert find_longest_match(
        [ReuseCandidate("a", prefill, turns, FIRST_RUN)], [*LONG[:700], -1, -2], RUNS
    ) == PrefixMatch("a", 650)
    going_on = [TurnBoundary(600)]
    assert find_longest_match([ReuseCandidate("a", prefill, going_on, FIRST_RUN)], LONG, RUNS) == PrefixMatch("a", 900)


def test_a_short_prompt_continues_at_any_position():
    prefill = [*SHORT[:30], 99]
    assert find_longest_match([ReuseCandidate("a", prefill, [TurnBoundary(31)], 0)], SHORT, RUNS) == PrefixMatch(
        "a", 30
    )
    assert (
        find_longest_match([ReuseCandidate("a", prefill, [TurnBoundary(PRECISE_TOKENS + 1)], 0)], SHORT, RUNS)
        == NOTHING
    )


def test_a_turn_continues_anywhere_if_its_kernels_are_the_same():
    """Compare two prompts of 49 tokens with one for which other kernels are selected."""
    turns, prefill = [TurnBoundary(20, 25), TurnBoundary(49, 52)], LONG[:52]
    runs = RunPlan(kernel_limits=(50,))
    assert find_longest_match([ReuseCandidate("a", prefill, turns, 0)], LONG[:49], runs) == PrefixMatch("a", 48)
    assert find_longest_match([ReuseCandidate("a", prefill, turns, 0)], [*LONG[:40], *[-1] * 9], runs) == PrefixMatch(
        "a", 40
    )
    assert find_longest_match([ReuseCandidate("a", prefill, turns, 0)], [*LONG[:40], *[-1] * 30], runs) == PrefixMatch(
        "a", 25
    )


def test_the_longest_prefix_wins_and_the_first_of_equal_ones():
    some, more = (
        ReuseCandidate("some", LONG[:600], (), FIRST_RUN),
        ReuseCandidate("more", LONG[:1100], (), 2 * FIRST_RUN),
    )
    assert find_longest_match([some, more, more._replace(source="also")], LONG, RUNS) == PrefixMatch(
        "more", 2 * FIRST_RUN, is_run=True
    )


def test_the_same_prompt_is_not_prefilled_at_all():
    """Reuse its stored logits, also those of a sequence that has continued."""
    known = ReuseCandidate("end", LONG[:900], aligned=FIRST_RUN, has_logits=True)
    assert find_longest_match([ReuseCandidate("a", LONG, aligned=FIRST_RUN), known], LONG[:900], RUNS) == PrefixMatch(
        "end", 900
    )
    assert find_longest_match([known], LONG, RUNS) == find_longest_match([known._replace(has_logits=False)], LONG, RUNS)
    assert find_longest_match([known], [*LONG[:899], -1], RUNS) == PrefixMatch("end", FIRST_RUN, is_run=True)


def test_an_undone_turn_is_no_boundary_for_a_long_prompt():
    """Prefill a long prompt in other runs than the short one."""
    sequences = PrefixCache(FakeSequences(9, lambda tokens: np.zeros(9)))
    begun = []
    for ids in ([2] * 60, [2] * 50 + [3] * (PRECISE_TOKENS - 50), [2] * 50 + [3] * 50 + [4] * 100):
        with acquire(sequences, ids) as one:
            begun.append(len(one.sequence.tokens))
            one.sequence.append(ids[begun[-1] :])
    assert begun == [0, 50, 0]


class TakenLock:
    """A lock that another thread holds."""

    def __enter__(self) -> None:
        raise BlockingIOError

    def __exit__(self, *_: object) -> None: ...


def test_prefix_cache_methods_wait_for_its_lock():
    """Acquire, give back, park and write."""
    sequences, ids = PrefixCache(FakeSequences(9, lambda tokens: np.zeros(9), 2 * FIRST_RUN)), [2] * (FIRST_RUN + 1)
    waited = False
    with pytest.raises(BlockingIOError), acquire(sequences, ids) as one:  # as it is given back
        one.sequence.append(ids[:FIRST_RUN])
        one.sequence.append(ids[FIRST_RUN:])
        one.sequence.aligned = FIRST_RUN
        sequences.lock = TakenLock()
        try:
            sequences.record_prefill(one.sequence, FIRST_RUN, np.zeros((1, 9)))
        except BlockingIOError:
            waited = True
    assert waited
    for call in (sequences.park, sequences.write_conversation, lambda: acquire(sequences, ids).__enter__()):
        with pytest.raises(BlockingIOError):
            call()


@pytest.mark.parametrize(("length", "begin", "aligned", "is_known"), [
    (PRECISE_TOKENS + 1, 0, 0, True), (PRECISE_TOKENS, 0, 0, False), (PRECISE_TOKENS + 1, 5, 0, False),
    (FIRST_RUN + 9, 0, FIRST_RUN, True), (FIRST_RUN + 9, FIRST_RUN, FIRST_RUN, True), (FIRST_RUN + 9, 0, 0, False),
    (FIRST_RUN + 9, 9, FIRST_RUN, False),
])  # fmt: skip
def test_only_the_latest_prompt_in_whole_runs_keeps_its_logits(length: int, begin: int, aligned: int, is_known: bool):
    """Copy the logits."""
    engine = FakeSequences(9, lambda tokens: np.zeros(9), 2 * FIRST_RUN)
    sequences, sequence, logits = PrefixCache(engine), engine.sequence(), np.ones((1, 9))
    for place in range(0, length, FIRST_RUN):
        sequence.append([2] * min(FIRST_RUN, length - place))
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


def prefill(sequences: PrefixCache, ids: list[int], is_told: bool = False, **how: Any) -> tuple[int, Any]:
    """Prefill a prompt; return how many tokens were cached, and the logits if all were."""
    with acquire(sequences, ids, **how) as (sequence, logits):
        held = len(sequence.tokens)
        for place in range(held, len(ids), FIRST_RUN):
            sequence.append(ids[place : place + FIRST_RUN])
        if is_told:
            sequence.aligned = len(ids) // FIRST_RUN * FIRST_RUN
            sequences.record_prefill(sequence, held, np.ones((1, 9)))
    return held, logits


def engine_of(context: int = 2 * FIRST_RUN) -> FakeSequences:
    return FakeSequences(9, lambda tokens: np.zeros(9), context)


def test_parked_sequences_are_bounded_and_can_be_taken_back():
    """Leave room for one whole context."""
    engine: Any = engine_of(100)
    engine.get_cache_usage = lambda: (50, 150)
    sequences = PrefixCache(engine)
    sequences.park()
    assert not engine.made
    for number in range(PARKED + 2):
        prefill(sequences, [number] * 9)
        sequences.park()
    assert [one.tokens for one in sequences._parked] == [[number] * 9 for number in range(2, PARKED + 2)]
    assert engine.open() == PARKED + 1
    assert [prefill(sequences, [number] * 9 + [8])[0] for number in (1, 2, 2)] == [0, 9, 9]
    for places, held in (((51, 150), 3), ((50, 150), 4)):  # 2 was taken
        engine.get_cache_usage = lambda usage=places: usage
        sequences.park()
        assert len(sequences._parked) == held
    prefill(sequences, [1] * 9, keep=2)
    sequences.park()
    assert len(sequences._parked) == 4


def test_kept_logits_are_not_for_shifted_sequences():
    engine = engine_of()
    sequences, ids = PrefixCache(engine), [2] * (FIRST_RUN + 2)
    assert prefill(sequences, ids, is_told=True) == (0, None)
    assert prefill(sequences, ids, keep=5) == (FIRST_RUN + 1, None)
    held, logits = prefill(sequences, ids)
    assert (held, logits.tolist()) == (FIRST_RUN + 2, [[1] * 9])
    assert (
        not engine.rewound
        and prefill(sequences, [*ids[:-1], 3, 3]) == (FIRST_RUN, None)
        and engine.rewound == [FIRST_RUN]
    )
    assert prefill(sequences, ids, is_told=True)[0] == FIRST_RUN and sequences._end
    assert prefill(sequences, [3] * 9) == (0, None) and not sequences._end
    assert engine.open() == 1


class Files:
    """A prefix store: `found` by prompt length and type, and what `load` returns."""

    def __init__(self, found: dict[tuple[int, bool], StoredPrefix] | None = None, *loads: Any):
        self.found, self.loads, self.asked, self.kept = found or {}, list(loads), [], []

    def find_prefix(
        self, ids: list[int], most: int = sys.maxsize, is_conversation: bool = False, scales: object = None
    ) -> StoredPrefix | None:
        self.asked.append((len(ids), most, is_conversation))
        stored = self.found.get((len(ids), is_conversation))
        return stored if stored and len(stored.ids) <= most else None

    def load(self, stored: StoredPrefix) -> Any:
        return self.loads.pop(0)

    def keep(self, sequence: Any, logits: Any, is_conversation: bool = False) -> None:
        self.kept.append((len(sequence.tokens), logits is not None and logits.tolist(), is_conversation))
        sequence.close()


@pytest.mark.parametrize(
    ("earlier", "conversations"), [(None, [0, 0]), (0, [0, 0]), (5, [4, 5]), (20, [19]), (21, []), (22, [])]
)
def test_files_are_asked_for_the_prompt_and_then_the_conversation(earlier: int | None, conversations: list[int]):
    files, how = Files(), {} if earlier is None else {"earlier": earlier}
    prefill(PrefixCache(engine_of(), files), [2] * 20, **how)
    assert files.asked == [(20, sys.maxsize, False), *((length, sys.maxsize, True) for length in conversations)]
    prefill(PrefixCache(engine_of(), files), [2] * 20, keep=4, **how)
    assert len(files.asked) == 1 + len(conversations)


def test_a_prefix_from_files_is_continued():
    """Continue a prompt in whole runs and a conversation after its end; look again if the file is gone."""
    engine, ids = engine_of(), [2] * 20
    engine.runs = RunPlan(4, 4)
    prompt, talk = StoredPrefix(ids[:8], (), False, False), StoredPrefix(ids[:9], (), False, True)
    for stored_prefixes, there, turns in (
        ({(20, False): prompt}, 8, []),
        ({(11, True): talk}, 9, [TurnBoundary(9, 9)]),
    ):
        loaded = engine.sequence()
        loaded.append(ids[:there])
        files = Files(stored_prefixes, CachedSequence(loaded))
        sequences = PrefixCache(engine, files)
        with acquire(sequences, ids, earlier=11) as begun:
            assert begun == (loaded, None)
            assert sequences._turns[loaded] == [*turns, TurnBoundary(20)]
        sequences.write_conversation()
        assert [*sequences.idle] == [loaded] and not files.kept
    files = Files({(20, False): prompt, (11, True): talk}, None, None, CachedSequence(loaded))
    assert prefill(PrefixCache(engine, files), ids + [3], earlier=11) == (0, None) and len(files.loads) == 2
    loaded.truncate(8)
    assert prefill(PrefixCache(engine, files), ids, earlier=11) == (8, None)


def test_only_long_prompts_and_conversations_go_to_files():
    """Store a new prompt once, and a conversation on request."""
    engine, files, texts = engine_of(), Files(), []
    written = SimpleNamespace(add=lambda tokens, is_kept: texts.append((len(tokens), is_kept)), collect=lambda: None)
    sequences, ids = PrefixCache(engine, files, written), [2] * (FIRST_RUN + 1)
    sequences.write_conversation()
    assert (files.kept, texts) == ([], [])
    for _ in range(2):
        prefill(sequences, ids, is_told=not files.kept)
        assert files.kept == [(FIRST_RUN + 1, [[1] * 9], False)]
    sequences.write_conversation()
    assert (files.kept[1:], texts) == ([(FIRST_RUN + 1, False, True)], [(FIRST_RUN + 1, True)])
    for how in ({}, {"keep": 3}):
        prefill(sequences, [3] * FIRST_RUN, is_told=True, **how)
        sequences.write_conversation()
    assert (len(files.kept), texts[1:]) == (2, [(FIRST_RUN, True)] * 2)
    with acquire(sequences, [4] * (FIRST_RUN + 1)) as (sequence, _):
        sequence.append([4] * FIRST_RUN)
        sequence.append([4])
        sequence.aligned = FIRST_RUN
        sequences.record_prefill(sequence, 0, np.ones((1, 9)))
        prefill(sequences, [5] * 9)  # somebody else comes meanwhile
        assert files.kept[2:] == [(FIRST_RUN + 1, [[1] * 9], False)]
    assert len(files.kept) == 3 and engine.open() == 1


def test_a_closed_sequence_is_not_retained():
    sequences = PrefixCache(engine_of())
    prefill(sequences, [2] * 9)
    (kept,) = sequences.idle
    with acquire(sequences, [2] * 9) as one, acquire(sequences, [3] * 9) as other:
        assert one.sequence is kept
        other.sequence.close()
    assert [*sequences.idle] == [kept] and not kept.closed


def test_turn_boundaries_beyond_the_held_tokens_are_dropped():
    engine = engine_of()
    sequences, sequence = PrefixCache(engine), engine.sequence()
    assert sequences._list_boundaries(sequence) == []
    sequence.append([2] * 12)
    sequences._turns[sequence] = [TurnBoundary(3, 5), TurnBoundary(6, 20), TurnBoundary(9)]
    assert sequences._list_boundaries(sequence) == [TurnBoundary(3, 5), TurnBoundary(6, 12), TurnBoundary(9, 12)]
