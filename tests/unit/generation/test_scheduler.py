"""Test continuous batching with known logits: each answer is what it would be alone."""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_sequences import FakeSequence, FakeSequences
from hypothesis import given, settings
from hypothesis import strategies as st
from step_costs import Free

from localllm.engine.image_tokens import ImageEmbedding
from localllm.engine.memory.sequence_state import StoredPrefix
from localllm.engine.prefix_store import CachedPrefix
from localllm.engine.runs import FIRST_RUN as CHUNK
from localllm.engine.runs import RunPlan
from localllm.errors import ContextError, MemoryLimitError, UsageError
from localllm.generation.beam_search import generate_answers
from localllm.generation.chunked_prefill import (
    PrefillSegment,
    PrefillSegments,
    compute_chunk_size,
    compute_max_prefill_tokens,
    count_reusable_tokens,
)
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.request import Completion, PromptTask, Request
from localllm.generation.sampling.sampler import Sampler, SamplingOptions
from localllm.generation.scheduler import Generation, Scheduler
from localllm.generation.speculation import speculator as leaps
from localllm.kernels.table import PAGE
from tests.unit.generation.test_beam_search import VOCAB, Letters, random_table

PRECISE = 128  # tokens of a run that keep 16 bits, as of the engine


class Paged(FakeSequences):
    """An engine with limited cache slots, in pages; full pages with the same prefix are shared.

    Attributes:
        ran: for each run, whether it was precise, and each sequence's position and token count.
        owners: for each run, the first token of each sequence.
        most: the peak number of used slots.
    """

    def __init__(self, row: Callable, context: int = 512, places: int = 10**6):
        super().__init__(VOCAB, row, context)
        self.count, self.ran, self.owners, self.most = places, [], [], 0
        self.runs = RunPlan()

    def get_cache_usage(self) -> tuple[int, int]:
        held = [sequence.tokens for sequence in self.made if not sequence.closed]
        shared = {tuple(tokens[:end]) for tokens in held for end in range(PAGE, len(tokens) + 1, PAGE)}
        return PAGE * (len(shared) + sum(len(tokens) % PAGE > 0 for tokens in held)), self.count

    def run(
        self,
        requests: Sequence[tuple[FakeSequence, list[int]]],
        logits: str,
        precise: bool,
        kernel_tokens: Sequence[int] = (),
    ) -> list[np.ndarray]:
        assert len({id(sequence) for sequence, _ in requests}) == len(requests) > 0
        places = [(len(sequence.tokens), len(ids)) for sequence, ids in requests]
        for sequence, ids in requests:
            sequence.add(ids)
        if self.get_cache_usage()[0] > self.count:
            for (sequence, _), (length, _) in zip(requests, places, strict=True):
                sequence.truncate(length)
            raise MemoryLimitError("full")
        self.ran.append((precise, places))
        self.owners.append([sequence.tokens[0] for sequence, _ in requests])
        self.most = max(self.most, self.get_cache_usage()[0])
        return self.give_logits(requests, logits)


def run_batch(engine: Paged, requests: list[Request], **choices) -> list[Request]:
    """Return all finished requests in the order of finishing."""
    with closing(Scheduler(engine, Letters(), requests, **choices)) as batch:
        finished = [request for some in batch for request in some]
        assert len({id(request) for request in finished}) == len(finished)
        assert all(request.finished for request in finished)
    assert engine.open() == 0
    return finished


def live_cache(engine: Paged, is_live: bool = True, store: Any = None) -> PrefixCache:
    return PrefixCache(engine, store, is_shared=True, is_live=is_live)


def request(prompt: list[int], n: int = 1, **options) -> Request:
    sampling = {name: options.pop(name) for name in list(options) if name in SamplingOptions.__dataclass_fields__}
    chosen = GenerationOptions(**options, sampling=SamplingOptions(**sampling))
    return Request(PromptTask(prompt, Letters().stream(), chosen), n)


def alone(asked: Request, row: Callable, seed: int, context: int) -> Generation:
    asked_for = asked.task.options
    options = GenerationOptions(asked_for.max_tokens, asked_for.stop, SamplingOptions(seed=seed), speculate="off")
    sequences = PrefixCache(FakeSequences(VOCAB, row, context))
    generation = Generation(sequences, Letters(), PromptTask(asked.prompt, Letters().stream(), options))
    for _ in generation:
        pass
    return generation


PROMPTS = st.lists(
    st.builds(
        lambda shared, own: ([2, 3, 4, 5, 6, 7, 2] * 60)[:shared] + own,
        st.sampled_from([0, 1, 63, 64, 130, 200, 300]),
        st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=90),
    ),
    max_size=7,
)


@settings(max_examples=30, deadline=None)
@given(
    prompts=PROMPTS,
    seed=st.integers(0, 10**6),
    n=st.sampled_from([1, 1, 3]),
    parallel=st.integers(1, 6),
    chunk=st.sampled_from([PAGE, 150, 512]),
    places=st.sampled_from([7 * PAGE, 10 * PAGE, 40 * PAGE, 10**6]),
    is_hard=st.booleans(),
    max_tokens=st.sampled_from([0, 1, 7, 70]),
    stop=st.sampled_from([(), ("ab",)]),
)
def test_each_answer_is_what_it_would_be_alone(
    prompts, seed: int, n: int, parallel: int, chunk: int, places: int, is_hard: bool, max_tokens: int, stop
):
    """Limit the slots softly, or in the engine itself (is_hard)."""
    engine = Paged(random_table(seed, ending=-1.0), places=places if is_hard else 10**6)
    asked = [request(prompt, n, max_tokens=max_tokens, stop=stop, seed=seed) for prompt in prompts]
    finished = run_batch(engine, asked, parallel=parallel, chunk=chunk, places=places)
    assert {id(one) for one in finished} == {id(one) for one in asked}
    assert engine.most <= places + n * PAGE
    for one in asked:
        if one.error:
            assert isinstance(one.error, MemoryLimitError)
            assert len(one.prompt) + max_tokens > places - PAGE
            continue
        for answer in one.answers:
            expected = alone(one, engine.row, answer.seed, 512)
            assert (answer.text, answer.tokens, answer.finish_reason) == (
                expected.text, expected.tokens, expected.finish_reason,
            )  # fmt: skip
        assert sorted(answer.seed for answer in one.answers) == [seed + number for number in range(n)]


def test_n_answers_of_a_request_equal_those_of_n_best():
    row, options = random_table(3), {"max_tokens": 9, "seed": 5}
    [one] = run_batch(Paged(row), [request([2, 3], 4, **options)])
    chosen = GenerationOptions(9, sampling=SamplingOptions(seed=5))
    sequences = PrefixCache(FakeSequences(VOCAB, row))
    expected = generate_answers(sequences, Letters(), PromptTask([2, 3], Letters().stream(), chosen), 4)
    assert [(a.text, a.tokens, a.logprob, a.seed) for a in one.answers] == [
        (a.text, a.tokens, a.logprob, a.seed) for a in expected
    ]


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 1400), min_size=1, max_size=6), chunk=st.sampled_from([PAGE, 150, 512]))
def test_prompts_keep_the_kernels_that_they_would_have_alone(lengths: list[int], chunk: int):
    engine = Paged(random_table(1, ending=-9.0), context=2048)
    asked = [request([2 + number] * length, max_tokens=2) for number, length in enumerate(lengths)]
    run_batch(engine, asked, chunk=chunk)
    read = {length: [] for length in range(len(lengths))}
    for (precise, work), owners in zip(engine.ran, engine.owners, strict=True):
        tokens = sum(count for _, count in work)
        assert tokens <= max(chunk, 2 * PAGE), "others wait for a piece only"
        assert not precise or tokens <= PRECISE, "or the engine takes 8 bits"
        for owner, (place, count) in zip(owners, work, strict=True):
            read[owner - 2] += [precise] * count
            assert precise or place % PAGE == 0
    for number, length in enumerate(lengths):
        sizes = [min(CHUNK, length - start) for start in range(0, length, CHUNK)]
        assert read[number] == [size <= PRECISE for size in sizes for _ in range(size)] + [True], "the last is written"


def test_a_request_without_n_gets_one_answer():
    asked = Request(PromptTask([2], Letters().stream(), GenerationOptions(3)))
    run_batch(Paged(random_table(1, ending=-9.0)), [asked])
    assert [len(answer.tokens) for answer in asked.answers] == [3]


def test_a_prompt_beside_longer_ones_keeps_its_precision():
    engine = Paged(random_table(1), context=1024)
    run_batch(
        engine, [request([2] * 300, max_tokens=1), request([3] * 100, max_tokens=1), request([4] * 600, max_tokens=1)]
    )
    assert engine.ran == [(False, [(0, 300)]), (True, [(0, 100)]), (False, [(0, 512)]), (True, [(512, 88)])]


def test_without_precision_all_prompts_share_a_run():
    engine = Paged(random_table(1))
    run_batch(engine, [request([2] * 100, max_tokens=1), request([3] * 100, max_tokens=1)], precise=False)
    assert engine.ran == [(False, [(0, 100), (0, 100)])]


def test_without_precision_prefill_and_decode_share_a_run():
    engine = Paged(random_table(1, ending=-9.0))
    asked = [request([2], max_tokens=3, speculate="off"), request([3] * 400, max_tokens=1)]
    run_batch(engine, asked, precise=False, chunk=150)
    assert engine.ran == [(False, [(0, 1), (0, 128)]), (False, [(128, 128), (1, 1)]), (False, [(256, 144), (2, 1)])]
    engine.ran.clear()
    asked = [request([2], max_tokens=3, speculate="off"), request([3] * 300, max_tokens=1)]
    run_batch(engine, asked, precise=False, chunk=128)  # who writes leaves no room for two pages
    assert engine.ran == [
        *[(False, [(0, 1), (0, 64)]), (False, [(64, 64), (1, 1)]), (False, [(128, 64), (2, 1)])],
        (False, [(192, 108)]),
    ]


def test_an_answer_without_speculation_gets_no_draft(monkeypatch):
    """Draft for another answer of the batch."""
    monkeypatch.setattr(leaps, "StepCostModel", Free)
    engine = Paged(lambda tokens: np.eye(VOCAB, dtype=np.float32)[2 + (tokens[-1] - 1) % 3])  # 2, 3, 4, 2, ...
    for how in (("off", "auto"), ("off", "off")):
        engine.ran.clear()
        engine.owners.clear()
        prompts = [[first, *[2, 3, 4] * 7] for first in (5, 6)]
        asked = [
            request(prompt, max_tokens=30, temperature=0, speculate=one)
            for prompt, one in zip(prompts, how, strict=True)
        ]
        run_batch(engine, asked)
        longest = dict.fromkeys((5, 6), 0)
        for owners, (_, places) in zip(engine.owners, engine.ran, strict=True):
            for owner, (place, count) in zip(owners, places, strict=True):
                longest[owner] = max(longest[owner], count if place else 0)
        assert longest[5] == 1
        assert (longest[6] > 1) == (how[1] == "auto")


def test_a_shared_prefix_is_prefilled_once():
    engine = Paged(random_table(1, ending=-9.0))
    prompts = [[2, 3] * 100 + [4 + number] * 70 for number in range(4)]
    run_batch(
        engine, [request(prompt, max_tokens=3, speculate="off") for prompt in prompts]
    )  # how much is guessed: time
    read = [item for _, work in engine.ran for item in work if item[1] > 1]
    assert read == [(0, 270)] + 3 * [(3 * PAGE, 270 - 3 * PAGE)]


def test_a_finished_request_still_shares_its_prefix():
    engine = Paged(random_table(1, ending=-9.0))
    run_batch(engine, [request([2, 3] * 40 + [4 + number], max_tokens=2) for number in range(3)], parallel=1)
    assert [work for _, work in engine.ran if work[0][1] > 1] == [[(0, 81)]], "of 81 tokens one is new"


def test_requests_join_and_leave_between_steps():
    engine = Paged(random_table(1, ending=-9.0))
    asked = [request([2 + number], max_tokens=length) for number, length in enumerate([2, 9, 4, 2])]
    finished = run_batch(engine, asked, parallel=2)
    assert [one.prompt for one in finished] == [[2], [4], [5], [3]]
    assert max(len(work) for _, work in engine.ran) == 2


@pytest.mark.parametrize(("places", "fits"), [(2 * PAGE, True), (2 * PAGE - 1, False)])
def test_all_slots_of_the_cache_may_be_used(places: int, fits: bool):
    one = request([2] * (PAGE + 1), max_tokens=PAGE - 1)
    run_batch(Paged(random_table(0, ending=-1.0)), [one], places=places)
    assert (one.error is None) == fits


def test_the_youngest_answer_is_preempted_and_loses_nothing():
    row = random_table(4, ending=-9.0)
    asked = [request([2 + number] * 60, max_tokens=150, seed=1) for number in range(3)]
    engine = Paged(row)
    with closing(Scheduler(engine, Letters(), asked, places=6 * PAGE)) as batch:
        finished = [one for some in batch for one in some]
    assert batch.preempted > 0
    assert finished[0] is asked[0], "the oldest goes on"
    assert [one.answers[0].tokens for one in asked] == [alone(one, row, 1, 512).tokens for one in asked]


def test_a_request_too_large_for_the_cache_fails_alone():
    engine = Paged(random_table(1, ending=-9.0))
    asked = [request([2] * length, max_tokens=3) for length in (40, 300, 41)]
    run_batch(engine, asked, places=4 * PAGE)
    assert [type(one.error) for one in asked] == [type(None), MemoryLimitError, type(None)]


def test_a_request_beyond_the_context_fails_alone():
    asked = [request([2] * 512, max_tokens=3), request([2], max_tokens=3)]
    run_batch(Paged(random_table(1)), asked)
    assert [type(one.error) for one in asked] == [ContextError, type(None)]


def test_a_stopped_scheduler_continues_only_running_answers():
    asked = [request([2 + number], max_tokens=20) for number in range(5)]
    with closing(Scheduler(Paged(random_table(1, ending=-9.0)), Letters(), asked, parallel=2)) as batch:
        finished = []
        for some in batch:
            finished += some
            batch.stop()
    assert {id(one) for one in finished} == {id(asked[0]), id(asked[1])}


def test_a_stopped_scheduler_finishes_a_preempted_answer():
    """Press Ctrl-C while an answer waits for memory: it continues as it would have."""
    asked = [request([2 + number] * 60, max_tokens=150, seed=1) for number in range(5)]
    finished, row = [], random_table(4, ending=-9.0)
    with closing(Scheduler(Paged(row), Letters(), asked, parallel=3, places=6 * PAGE)) as batch:
        for some in batch:
            finished += some
            if any(one.request.begun for one in batch.waiting):
                batch.stop()
    begun = [one for one in asked if one.begun]
    assert batch.preempted and 1 < len(begun) < 5
    assert {id(one) for one in finished} == {id(one) for one in begun}
    assert [one.answers[0].tokens for one in begun] == [alone(one, row, 1, 512).tokens for one in begun]


def test_a_stopped_scheduler_begins_no_request():
    asked = [request([2 + number], max_tokens=1) for number in range(2)]
    with closing(Scheduler(Paged(random_table(1, ending=-9.0)), Letters(), asked, parallel=1)) as batch:
        finished_steps = [some for some in batch if batch.stop() is None]
        assert (finished_steps, asked[1].begun) == ([[asked[0]]], False)
    batch = Scheduler(Paged(random_table(1)), Letters(), [request([2])])
    batch.stop()
    assert [*batch] == []


@pytest.mark.parametrize(("length", "is_kept"), [(PAGE - 1, False), (PAGE, True)])
def test_a_dropped_answer_leaves_its_prefix_if_it_fills_a_page(length: int, is_kept: bool):
    engine, asked = Paged(random_table(1, ending=-9.0)), request([2] * length, max_tokens=99, speculate="off")
    with closing(Scheduler(engine, Letters(), [asked], cache=live_cache(engine))) as batch:
        turns = iter(batch)
        while not asked.begun:
            assert next(turns) == []
        assert asked.answers[0].computed_tokens == length + 1
        batch.cancel(asked)
        assert (batch.running, [len(one.tokens) for one in batch._cache.idle]) == ([], [length + 1] * is_kept)
        assert engine.open() == is_kept
        assert [*turns] == []
    assert engine.open() == 0


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("error", [KeyError(), UsageError("no")])
def test_a_failing_answer_ends_only_itself_in_a_live_batch(error: Exception, is_live: bool):
    def fail(*_: object) -> None:
        raise error

    engine, asked = Paged(random_table(1, ending=-9.0)), [request([2], n=2, max_tokens=5), request([3], max_tokens=5)]
    asked[0].listener = fail
    if not is_live and isinstance(error, KeyError):
        with pytest.raises(KeyError):
            run_batch(engine, asked)
        return
    assert run_batch(engine, asked, cache=live_cache(engine, is_live)) == asked
    assert str(asked[0].error) == ("no" if isinstance(error, UsageError) else "internal error: KeyError")
    assert asked[1].error is None and len(asked[1].answers[0].tokens) == 5


@pytest.mark.parametrize("held", [CHUNK + 20, CHUNK, 0])
def test_a_prompt_stored_in_files_is_not_prefilled(held: int):
    """Load all of it with its logits, or whole runs at its beginning."""
    row, prompt, heard = random_table(1, ending=-9.0), [2, 3] * (CHUNK // 2 + 10), []
    length, context = len(prompt), 2 * CHUNK
    engine, asked = Paged(row, context), request(prompt, max_tokens=4, seed=1, speculate="off")

    def find_prefix(ids: list[int], most: int, scales: object = None) -> StoredPrefix | None:
        heard.append(([*ids], most))
        return StoredPrefix(ids[:held], (), held == length, False) if held else None

    def load(stored: StoredPrefix) -> CachedPrefix:
        sequence = engine.sequence()
        for place in range(0, held, CHUNK):
            sequence.add(stored.ids[place : place + CHUNK])
        return CachedPrefix(sequence, np.array([row(tuple(prompt))]) if stored.has_logits else None)

    store: Any = SimpleNamespace(find_prefix=find_prefix, load=load)
    with closing(Scheduler(engine, Letters(), [asked], cache=live_cache(engine, store=store))) as batch:
        assert [some for some in batch if some] == [[asked]]
    assert (heard, asked.cached) == ([(prompt, sys.maxsize)], held)
    ran = [one for _, work in engine.ran for one in work]
    assert sum(count for _, count in ran[:-3]) == length - held
    assert ran[-3:] == [(length, 1), (length + 1, 1), (length + 2, 1)]
    assert asked.answers[0].tokens == alone(asked, row, 1, context).tokens


@pytest.mark.parametrize(("places", "width", "may", "left"), [
    (514, 1, True, 2), (513, 1, True, 1), (386, 1, True, 1), (385, 1, False, 1), (450, 2, True, 1), (449, 2, False, 1),
    (9999, 2, True, 2), (9999, 3, False, 2),
])  # fmt: skip
def test_a_request_begins_only_with_room_to_grow(places: int, width: int, may: bool, left: int):
    """Count its unread tokens and a page per answer; all retained sequences but the latest may go."""
    engine = Paged(random_table(1))
    batch = Scheduler(engine, Letters(), [], parallel=3, places=places, cache=live_cache(engine))
    joining = request([5] * 100, n=width).create_answers(engine, Letters())[0]
    for token in (2, 3):
        sequence = engine.sequence()
        sequence.add([token] * 100)
        batch._cache._segments[sequence] = PrefillSegments(sequence.tokens, engine.runs)
        batch._cache.idle.append(sequence)
    assert batch._may_join(joining) and len(batch._cache.idle) == 2, "nobody else is there"
    batch.running = [
        SimpleNamespace(sequence=None, ids=[4] * 40, pending_tokens=30, width=1, segments=None, release=lambda: None)
    ]
    assert (batch._may_join(joining), len(batch._cache.idle)) == (may, left)
    assert batch._cache.idle[-1].tokens[0] == 3
    batch.close()
    assert engine.open() == 0


def test_a_waiting_request_searches_the_cache_again_only_after_the_cache_changed(monkeypatch):
    """Skip the lookup while others only decode."""
    searches = list[int]()
    search = PrefixCache.find_match
    monkeypatch.setattr(
        PrefixCache, "find_match", lambda cache, answer: searches.append(answer.ids[0]) or search(cache, answer)
    )
    writing = [request([2 + number] * 60, max_tokens=20) for number in range(2)]
    waiting = request([5] * 3 * PAGE, max_tokens=2, seed=1)
    engine = Paged(random_table(1, ending=-9.0))
    run_batch(engine, [*writing, waiting], places=4 * PAGE)
    assert len(engine.ran) > 20 and searches.count(5) <= 4
    assert waiting.answers[0].tokens == alone(waiting, random_table(1, ending=-9.0), 1, 512).tokens


@pytest.mark.parametrize(
    ("same", "prompt", "other", "expected"),
    [
        (50, 100, 120, 50),  # both precise: anywhere
        (100, 200, 300, 64),  # both in 8 bits: whole pages
        (150, 200, 300, 128),
        (199, 200, 300, 128),  # and more than a few tokens are left
        (90, 100, 200, 0),  # not the same arithmetic
        (560, 600, 700, 512),  # precise after 512, the other not
        (560, 600, 610, 560),
    ],
)
def test_the_reusable_prefix_ends_at_a_whole_run(same: int, prompt: int, other: int, expected: int):
    ours, theirs = (PrefillSegments([5] * length, RunPlan()) for length in (prompt, other))
    assert count_reusable_tokens(same, ours, theirs) == expected


@pytest.mark.parametrize(
    ("same", "prompt", "other", "expected"),
    [
        (200, 300, 900, 192),  # what both have read in 8 bits: whole pages
        (292, 300, 900, 192),  # theirs goes on, so that the last page has other bits
        (299, 300, 300, 299),  # within the end
        (292, 300, 300, 292),
        (293, 300, 301, 192),  # the ends begin elsewhere
        (512, 600, 700, 512),  # whole runs of both
        (512, 512, 700, 384),  # of theirs: ours has an end there
        (700, 700, 1300, 576),
    ],
)
def test_the_reusable_prefix_respects_exact_ends(same: int, prompt: int, other: int, expected: int):
    ours, theirs = (PrefillSegments([5] * length, RunPlan(exact=8)) for length in (prompt, other))
    assert count_reusable_tokens(same, ours, theirs) == expected


def test_both_ends_of_a_prompt_are_exact():
    """Give the first and last tokens of long runs segments of their own; short runs are exact anyway."""

    def stretches(prompt: list[int]) -> list[tuple[int, int, bool]]:
        segments, place, cut = [], 0, PrefillSegments(prompt, RunPlan(exact=8))
        while place < len(prompt):
            begin, place, precise, *_ = cut.find_segment(place)
            segments.append((begin, place, precise))
            assert all(cut.find_segment(each)[:2] == (begin, place) for each in (begin, place - 1))
        return segments

    assert stretches([5] * 128) == [(0, 128, True)]
    assert stretches([5] * 130) == [(0, 8, True), (8, 122, True), (122, 130, True)]
    assert stretches([5] * 512) == [(0, 8, True), (8, 504, False), (504, 512, True)]
    assert stretches([5] * 640) == [(0, 8, True), (8, 512, False), (512, 640, True)]
    assert stretches([5] * 700) == [(0, 8, True), (8, 512, False), (512, 692, False), (692, 700, True)]
    image = ImageEmbedding(b"1", np.zeros((100, 1), np.float32)).ids
    assert stretches(image + [5] * 200) == [(0, 100, True), (100, 292, False), (292, 300, True)]
    assert stretches([5] * 200 + image) == [(0, 8, True), (8, 200, False), (200, 300, True)]


def test_prefill_segments_do_not_cut_images():
    """Make the segments the runs that such a prompt has alone."""
    one, two = (ImageEmbedding(name, np.zeros((rows, 1), np.float32)) for name, rows in ((b"1", 100), (b"2", 600)))
    prompt = [5] * 10 + one.ids + [5] * 300 + two.ids + [5] * 200
    stretches, place, segments = PrefillSegments(prompt, RunPlan()), 0, []
    while place < len(prompt):
        segments.append(stretches.find_segment(place))
        place = segments[-1].end
    assert [each[:4] for each in segments] == [
        (0, 10, True, False), (10, 110, True, True), (110, 410, False, False), (410, 922, False, True),
        (922, 1010, True, True), (1010, 1024, True, False), (1024, 1210, False, False),
    ]  # fmt: skip
    assert [stretches.find_segment(place).begin for place in (9, 10, 109, 110, 1009, 1209)] == [
        0,
        10,
        10,
        110,
        922,
        1024,
    ]
    assert [each.kernel_tokens for each in segments] == [10, 0, 300, 0, 0, 14, 186]
    assert stretches.find_segment(1300) == (1300, 1428, True, False, 1)
    assert [
        compute_chunk_size(place, stretches.find_segment(place), 64) for place in (0, 10, 110, 410, 1010, 1024)
    ] == [
        10,
        0,
        18,
        0,
        14,
        64,
    ]
    assert compute_chunk_size(410, stretches.find_segment(410), 512) == 512
    other = PrefillSegments(prompt[:410], RunPlan())
    assert [count_reusable_tokens(same, stretches, other) for same in (5, 60, 110, 200, 409)] == [5, 10, 110, 192, 320]


@pytest.mark.parametrize("precise", [True, False])
def test_a_segment_is_prefilled_whole_or_in_equivalent_chunks(precise: bool):
    """Cut where the next chunk gives the same bits."""
    for place, end, room in product((0, 16, 70, 128), (200, 300, 512), range(0, 520, 3)):
        left, step = end - place, 16 if precise else PAGE
        count = compute_chunk_size(place, PrefillSegment(0, end, precise), room)
        assert 0 <= count <= min(room, left) and (count == left) == (left <= room)
        if 0 < count < left:
            assert (place + count) % step == 0 and (precise or left - count >= PAGE)
            more = place + count + step
            assert more > place + room or (not precise and more > end - PAGE), "as much as there is room for"
    assert (
        compute_chunk_size(0, PrefillSegment(0, 200, precise), 64) == 64
        and compute_chunk_size(0, PrefillSegment(0, 200, precise), 200) == 200
    )
    assert compute_chunk_size(0, PrefillSegment(0, 200, precise), 199) == (192 if precise else 128)
    assert (
        compute_chunk_size(70, PrefillSegment(0, 200, precise), 9) == 0
        and compute_chunk_size(71, PrefillSegment(0, 200, precise), 9) == 9 * precise
    )


def test_larger_models_prefill_less_between_steps():
    assert [compute_max_prefill_tokens(int(size)) for size in (1e6, 135e6, 1.2e9, 8e9, 400e9)] == [
        512,
        512,
        141,
        64,
        64,
    ]


def test_a_pending_answer_reports_its_progress():
    """Count computed, unread and remaining tokens."""
    asked = request([2] * 5, n=2, max_tokens=3)
    sampler, guide = Sampler(SamplingOptions(seed=7, temperature=0), VOCAB), asked.task.create_state(Letters(), VOCAB)
    one = Completion(asked, sampler, guide, 100, None, 1)
    assert (one.remaining_tokens, one.has_begun, one.computed_tokens, one.pending_tokens) == (3, False, 0, 5)
    assert (one.score, one.width, one.seed, one.number) == (0, 2, 7, 1)
    asked.begun, one.sequence = True, Paged(random_table(1)).sequence()
    one.sequence.add([2] * 5)
    row, drawn = np.array([0, 0, 1, 0, 0, 0, 0, 0], np.float32), list[int]()
    sampler.accept = drawn.append
    for number in (1, 2, 3):
        assert one.accept_logits(row)[0][1:3] == (2, [("answer", "a")])
        assert (one.tokens, one.remaining_tokens, one.has_begun, one.is_complete) == (
            [2] * number,
            3 - number,
            True,
            number == 3,
        )
        assert (one.computed_tokens, one.pending_tokens, one.width) == (5, number - 1, 1)
        assert one.score == pytest.approx(1 - np.log(np.e + 7)) and one.logprob == pytest.approx(number * one.score)
    assert drawn == [2] * 3 and one.text == "a" * 3 and (one.finish(), one.finish_reason) == ([], "length")
    other = Completion(asked, sampler, guide.copy(), 7, None)
    other.end_ids = frozenset([0])
    assert (other.remaining_tokens, other.number, other.finish_reason) == (2, 0, "")
    assert other.accept_logits(np.roll(row, -2))[0][1:3] == (None, []) and other.is_complete
    assert (other.tokens, other.finish(), other.finish_reason) == ([], [], "stop")
    only = Completion(request([2] * 5), sampler, guide.copy(), 99, None)
    only.accept_logits(row)
    assert (only.tokens, only.logprob) == ([2], 0)
    none = Completion(request([2] * 5, max_tokens=0), sampler, guide.copy(), 9, None)
    assert none.is_complete and none.finish() == []
    assert (none.remaining_tokens, none.finish_reason, none.request.finished) == (0, "length", False)
