"""Test the run queue: concurrent callers share runs, get the texts of lone ones, and never block each other."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_sequences import FakeSequences

import localllm
from localllm import api
from localllm.errors import LocalllmError, MemoryLimitError
from localllm.generation.context_overflow import ShiftedSequence
from localllm.generation.run_queue import QueuedStep, RunQueue

QUESTIONS = [[{"role": "user", "content": f"What is question {number}?"}] for number in range(8)]
SECONDS = 30


@pytest.fixture(scope="module")
def model() -> Iterator[api.Model]:
    with localllm.open(localllm.builtin_model(), threads=2, cache=False) as opened:
        yield opened


def call_at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Call each function in a thread; return their results or exceptions."""
    results: list[Any] = [None] * len(calls)

    def work(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return results


class Counting:
    """A counter of an engine's runs."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch):
        self.sequences, run = list[int](), engine.run

        def counted(requests: Any, *how: Any) -> Any:
            self.sequences.append(len(requests))
            return run(requests, *how)

        monkeypatch.setattr(engine, "run", counted)


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_threads_share_runs_and_get_the_texts_of_lone_callers(model: api.Model, monkeypatch, speculate: str):
    how: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "speculate": speculate}

    def ask(number: int) -> str:
        return "".join(model.chat(QUESTIONS[number], seed=number, **how))

    alone = [ask(number) for number in range(8)]
    counting = Counting(model.engine, monkeypatch)
    assert call_at_once(*(lambda number=number: ask(number) for number in range(8))) == alone
    assert max(counting.sequences) > 4
    assert len(counting.sequences) < 8 * 24 / 2


def test_an_unread_answer_delays_no_other(model: api.Model):
    waiting = model.chat(QUESTIONS[0], max_tokens=30, seed=1, ignore_eos=True)
    begun, expected = next(waiting), "".join(model.chat(QUESTIONS[0], max_tokens=30, seed=1, ignore_eos=True))
    other = "".join(model.chat(QUESTIONS[1], max_tokens=9, seed=2))
    assert (
        call_at_once(*(lambda: "".join(model.chat(QUESTIONS[1], max_tokens=9, seed=2)) for _ in range(3)))
        == [other] * 3
    )
    assert begun + "".join(waiting) == expected


def test_abandoned_answers_do_not_disturb_the_others(model: api.Model):
    """Discard the steps submitted for them."""
    texts = ["".join(model.chat(question, max_tokens=12, temperature=0, ignore_eos=True)) for question in QUESTIONS[:4]]

    def leave(number: int) -> None:
        for count in range(1, 6):
            answer = model.chat(QUESTIONS[number], max_tokens=12, temperature=0, ignore_eos=True)
            for _ in range(count):
                next(answer)
            answer.close()

    def stay(number: int) -> list[str]:
        how: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return ["".join(model.chat(QUESTIONS[number], **how)) for _ in range(3)]

    results = call_at_once(*(
        lambda number=number, call=call: call(number) for number in range(4) for call in (leave, stay)
    ))  # fmt: skip
    assert results == [part for text in texts for part in (None, [text] * 3)]


def test_stop_from_another_thread_ends_one_answer_only(model: api.Model):
    answers = [model.chat(question, max_tokens=400, ignore_eos=True, seed=1) for question in QUESTIONS[:3]]
    started, begun = set[int](), threading.Event()

    def iterate(answer: Any) -> int:
        for _ in answer:
            started.add(id(answer))
            if len(started) == len(answers):
                begun.set()
        return len(answer.tokens)

    def stop() -> None:
        assert begun.wait(SECONDS)
        for answer in answers:
            answer.stop()

    *counts, _ = call_at_once(*(lambda answer=answer: iterate(answer) for answer in answers), stop)
    assert all(0 < count < 400 for count in counts)


# With an engine whose logits are known.


def row(tokens: tuple[int, ...]) -> np.ndarray:
    return np.full(9, len(tokens), np.float32)


class Lasting(FakeSequences):
    """An engine whose runs copy their logits, as threads need."""

    def give(self, rows: list[list[np.ndarray]]) -> list[np.ndarray]:
        return [one.copy() for one in super().give(rows)]


class Gated(Lasting):
    """An engine that blocks in its first run until released."""

    def __init__(self) -> None:
        super().__init__(9, row)
        self.layer_inputs, self.allowed_mask = threading.Event(), threading.Event()

    def moment(self) -> None:
        super().moment()
        if self.layer_inputs.is_set() or self.moments < 99:
            return
        self.layer_inputs.set()
        assert self.allowed_mask.wait(SECONDS)


def submit(queue: RunQueue, engine: FakeSequences, *sizes: int) -> list[QueuedStep]:
    """Submit a step of a new sequence for each token count, each from its own scheduler."""
    steps = [step_of(engine.sequence(), size) for size in sizes]
    for step in steps:
        queue.submit(step)
    return steps


def step_of(sequence: Any, size: int, logits: str = "last") -> QueuedStep:
    return QueuedStep(object(), [(sequence, [1] * size)], logits)


def test_submitted_steps_share_one_run():
    queue, engine = RunQueue(), Lasting(9, row)
    steps = submit(queue, engine, 1, 5, 1)
    assert [queue.run(step)[0][0, 0] for step in steps] == [1, 5, 1]
    assert (engine.steps, engine.read) == ([3], [])
    assert [queue.count_others(step.scheduler) for step in steps] == [2, 2, 2] and steps[0].tokens == 7


@pytest.mark.parametrize(("sizes", "runs"), [
    ((100, 28), [2]), ((100, 29), [1, 1]), ((129, 1), [1, 1]), ((100, 100, 28), [2, 1]),
])  # fmt: skip
def test_a_shared_run_has_at_most_128_tokens(sizes: tuple[int, ...], runs: list[int]):
    """Keep 16-bit activations; run a longer chunk alone."""
    queue, engine, counts = RunQueue(), Lasting(9, row), list[int]()
    steps = submit(queue, engine, *sizes)
    engine.run = lambda work, *how: counts.append(len(work)) or Lasting.run(engine, work, *how)
    assert [queue.run(step)[0][0, 0] for step in steps] == [*sizes]
    assert counts == runs


def test_shifted_and_drafted_steps_share_no_run():
    queue, engine = RunQueue(), Lasting(9, row)
    shifted = step_of(ShiftedSequence(engine.sequence(), 4), 1)
    unread, drafted = step_of(engine.sequence(), 2, "none"), step_of(engine.sequence(), 2, "all")
    steps = [shifted, step_of(engine.sequence(), 1), unread, drafted]
    for step in (shifted, unread, drafted, steps[1]):
        queue.submit(step)
    assert [len(queue.run(step)[0]) for step in steps] == [1, 1, 0, 2]
    assert (engine.steps, engine.read) == ([2], [1, 2])


def test_a_failing_step_fails_alone():
    queue, engine = RunQueue(), Lasting(9, row)
    steps = submit(queue, engine, 1, 1, 1)

    def refuse(work: Any, *how: Any) -> Any:
        if any(sequence is steps[1].spans[0][0] for sequence, _ in work):
            raise MemoryLimitError("full")
        return Lasting.run(engine, work, *how)

    engine.run = refuse
    assert queue.run(steps[0])[0][0, 0] == 1
    with pytest.raises(MemoryLimitError, match="full"):
        queue.run(steps[1])
    assert queue.run(steps[2])[0][0, 0] == 1
    assert lengths(steps) == [1, 0, 1]


def lengths(steps: list[QueuedStep]) -> list[int]:
    return [len(step.spans[0][0].tokens) for step in steps]


def test_a_step_that_fails_midway_drops_its_tokens():
    """Keep a scheduler that freed memory from prefilling them twice."""
    engine = Lasting(9, row)
    step = step_of(engine.sequence(), 5)

    def fail(work: Any, *how: Any) -> Any:
        Lasting.run(engine, [(sequence, ids[:2]) for sequence, ids in work], *how)
        raise MemoryLimitError("full")

    engine.run = fail
    with pytest.raises(MemoryLimitError, match="full"):
        step.run()
    assert lengths([step]) == [0]


def test_another_scheduler_repeats_an_interrupted_step():
    queue, engine = RunQueue(), Lasting(9, row)
    steps = submit(queue, engine, 2, 1)
    engine.interrupt_at = engine.moments + 2  # after the tokens were read
    with pytest.raises(KeyboardInterrupt):
        queue.run(steps[0])
    queue.unregister(steps[0].scheduler)
    assert queue.run(steps[1])[0][0, 0] == 1
    assert lengths(steps) == [0, 1]


def test_a_run_waits_only_briefly_for_an_absent_scheduler(monkeypatch):
    monkeypatch.setattr("localllm.generation.run_queue.PATIENCE", 0.01)
    queue, engine = RunQueue(), Lasting(9, row)
    queue.run(step_of(engine.sequence(), 1))
    assert queue.run(step_of(engine.sequence(), 2))[0][0, 0] == 2


def test_a_lone_scheduler_shares_no_runs():
    queue, first, second = RunQueue(), object(), object()
    assert [queue.register(first), queue.register(first), queue.register(second)] == [False, False, True]
    queue.unregister(second)
    assert not queue.register(first)


def test_withdrawn_steps_and_those_of_closed_schedulers_are_not_run():
    queue, engine = RunQueue(), Lasting(9, row)
    steps = submit(queue, engine, 1, 1, 1)
    queue.unregister(steps[0].scheduler)
    queue.withdraw(steps[1].spans[0][0])
    assert queue.run(steps[2])[0][0, 0] == 1 and queue.count_others(steps[2].scheduler) == 0
    assert lengths(steps) == [0, 0, 1]


def test_withdraw_waits_for_the_run_of_its_step():
    queue, engine = RunQueue(), Gated()
    sequence, order = engine.sequence(), list[str]()
    engine.moments = 98

    def read() -> None:
        queue.run(step_of(sequence, 1))
        order.append("read")

    def withdraw() -> None:
        assert engine.layer_inputs.wait(SECONDS)
        threading.Timer(0.05, engine.allowed_mask.set).start()
        queue.withdraw(sequence)
        order.append(f"withdrawn with {len(sequence.tokens)}")

    assert call_at_once(read, withdraw) == [None, None]
    assert sorted(order) == ["read", "withdrawn with 1"]


def test_a_forked_process_is_refused(monkeypatch):
    from localllm.engine.forks import ForkedLock

    queue, engine = RunQueue(), Lasting(9, row)
    monkeypatch.setattr(queue, "lock", ForkedLock())
    with pytest.raises(LocalllmError, match="forked"):
        queue.run(step_of(engine.sequence(), 1))
