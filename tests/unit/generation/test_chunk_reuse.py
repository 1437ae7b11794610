"""Test the reuse of chunks at other positions: which are found, and what is left to prefill."""

import random
from collections.abc import Iterator

import pytest

import localllm
from localllm.generation.chunk_reuse import READ_AGAIN, ReusedChunk, find_chunks
from localllm.generation.options import GenerationOptions
from localllm.generation.request import Request
from localllm.generation.sampling.options import SamplingOptions

TEXT = random.Random(3).choices(range(20, 200), k=300)
LEAST = 16


def test_one_inserted_token_leaves_the_rest_reusable():
    prompt = [*TEXT[:100], 7, *TEXT[100:]]
    assert find_chunks(TEXT, prompt, 100, LEAST) == [ReusedChunk(101 + READ_AGAIN, 100 + READ_AGAIN, 199 - READ_AGAIN)]


def test_several_chunks_are_found_in_any_order():
    prompt = [1, 2, *TEXT[200:260], 3, *TEXT[50:80], *TEXT[10:14]]
    chunks = find_chunks(TEXT, prompt, 0, LEAST)
    skip = READ_AGAIN
    assert chunks == [ReusedChunk(2 + skip, 200 + skip, 60 - skip), ReusedChunk(63 + skip, 50 + skip, 30 - skip)]


@pytest.mark.parametrize(("length", "is_found"), [(LEAST - 1, False), (LEAST, True)])
def test_a_chunk_below_the_minimum_length_is_not_reused(length: int, is_found: bool):
    for first in range(40, 40 + LEAST):
        prompt = [1, 2, *TEXT[first : first + length], 3]
        assert bool(find_chunks(TEXT, prompt, 0, LEAST)) == is_found


def test_a_repetitive_text_is_matched_except_its_last_token():
    held = [5] * 3000
    chunks = find_chunks(held, [6, *held], 0, LEAST)
    assert sum(one.length for one in chunks) >= 2900 and chunks[-1].place + chunks[-1].length <= 3000


class Queue:
    """The requests of a live batch, which arrive one by one."""

    def __init__(self) -> None:
        self.requests = list[Request]()

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        if not self.requests:
            raise StopIteration
        return self.requests.pop(0)


def answer(batch, queue: Queue, model: localllm.Model, prompt: list[int], reuse: int) -> Request:
    options = GenerationOptions(4, sampling=SamplingOptions(temperature=0), cache_reuse=reuse)
    queue.requests.append(request := model.session.request(prompt, options))
    while not request.finished:
        next(iter(batch))
    assert request.error is None
    return request


@pytest.mark.parametrize(("typed", "runs"), [(1, [[1 + READ_AGAIN, 1]]), (40, [[40 + READ_AGAIN], [1]])])
def test_a_short_edit_is_prefilled_in_one_run(tiny: str, typed: int, runs: list[list[int]]):
    """Compute a long edit before the copied chunk, because kernels for many tokens are faster."""
    with localllm.open(tiny, threads=2, context=512) as model:
        queue, sizes, run = Queue(), list[list[int]](), model.engine.backend.run
        batch = model.batch(queue, live=True)
        answer(batch, queue, model, TEXT, LEAST)
        model.engine.backend.run = lambda spans, precise: (
            sizes.append([len(span.ids) for span in spans]) or run(spans, precise)
        )
        request = answer(batch, queue, model, [*TEXT[:100], *range(2, 2 + typed), *TEXT[100:]], LEAST)
        assert sizes[: len(runs)] == runs and request.cached == 299 - READ_AGAIN
        batch.close()


def test_a_live_batch_reuses_chunks_only_on_request(tiny: str):
    """Prefill little with reuse, and everything without it."""
    with localllm.open(tiny, threads=2, context=512) as model:
        queue = Queue()
        batch = model.batch(queue, live=True)
        first = answer(batch, queue, model, TEXT, LEAST)
        prompt = [*TEXT[:100], 7, *TEXT[100:]]
        second = answer(batch, queue, model, prompt, LEAST)
        assert (first.cached, second.cached) == (0, len(prompt) - 1 - READ_AGAIN - 1)
        third = answer(batch, queue, model, [*prompt, 8], 0)
        assert third.cached <= 100
        batch.close()
        alone = model.generate([*prompt, 8], 4, temperature=0)
        assert third.answers[0].text == "".join(alone)
        assert [request.answers[0].completion_tokens for request in (first, second)] == [4, 4]
