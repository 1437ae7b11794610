"""Steps of concurrent callers: joined in few runs, with the texts of lone ones; nobody waits for one that is gone."""

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
from localllm.generation.step_batcher import BatchMember, StepBatcher

QUESTIONS = [[{"role": "user", "content": f"What is question {number}?"}] for number in range(8)]
SECONDS = 30


@pytest.fixture(scope="module")
def model() -> Iterator[api.Model]:
    with localllm.open(localllm.builtin_model(), threads=2, cache=False) as opened:
        yield opened


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What calls return, or raise, each in a thread."""
    found: list[Any] = [None] * len(calls)

    def work(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return found


class Counting:
    """Counts an engine's runs."""

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
    assert at_once(*(lambda number=number: ask(number) for number in range(8))) == alone
    assert max(counting.sequences) > 4
    assert len(counting.sequences) < 8 * 24 / 2


def test_an_answer_that_waits_for_its_reader_delays_no_other(model: api.Model):
    waiting = model.chat(QUESTIONS[0], max_tokens=30, seed=1, ignore_eos=True)
    begun, expected = next(waiting), "".join(model.chat(QUESTIONS[0], max_tokens=30, seed=1, ignore_eos=True))
    other = "".join(model.chat(QUESTIONS[1], max_tokens=9, seed=2))
    assert at_once(*(lambda: "".join(model.chat(QUESTIONS[1], max_tokens=9, seed=2)) for _ in range(3))) == [other] * 3
    assert begun + "".join(waiting) == expected


def test_answers_that_are_left_while_others_go_on_spoil_nothing(model: api.Model):
    """What was handed in for them is read by nobody who goes on from what they had read."""
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

    found = at_once(*(
        lambda number=number, call=call: call(number) for number in range(4) for call in (leave, stay)
    ))  # fmt: skip
    assert found == [part for text in texts for part in (None, [text] * 3)]


def test_stop_from_another_thread_while_others_go_on(model: api.Model):
    answers = [model.chat(question, max_tokens=400, ignore_eos=True, seed=1) for question in QUESTIONS[:3]]
    pieces, begun = list[str](), threading.Event()

    def iterate(answer: Any) -> int:
        for piece in answer:
            pieces.append(piece)
            if len(pieces) > 20:
                begun.set()
        return len(answer.tokens)

    def stop() -> None:
        assert begun.wait(SECONDS)
        for answer in answers:
            answer.stop()

    *counts, _ = at_once(*(lambda answer=answer: iterate(answer) for answer in answers), stop)
    assert all(0 < count < 400 for count in counts)


# With an engine whose logits are known.


def row(tokens: tuple[int, ...]) -> np.ndarray:
    return np.full(9, len(tokens), np.float32)


class Lasting(FakeSequences):
    """Of which every run has logits of its own, as threads need."""

    def give(self, rows: list[list[np.ndarray]]) -> list[np.ndarray]:
        return [one.copy() for one in super().give(rows)]


class Gated(Lasting):
    """Waits in its first run until that is allowed."""

    def __init__(self) -> None:
        super().__init__(9, row)
        self.entered, self.allowed_mask = threading.Event(), threading.Event()

    def moment(self) -> None:
        super().moment()
        if self.entered.is_set() or self.moments < 99:
            return
        self.entered.set()
        assert self.allowed_mask.wait(SECONDS)


def members(batcher: StepBatcher, engine: FakeSequences, count: int) -> list[tuple[BatchMember, Any]]:
    return [(BatchMember(batcher), engine.sequence()) for _ in range(count)]


def hand_in(some: list[tuple[BatchMember, Any]], *sizes: int, logits: str = "last") -> None:
    for (member, sequence), size in zip(some, sizes, strict=True):
        member.submit([(sequence, [1] * size)], logits)


def test_one_run_for_all_that_was_handed_in():
    batcher, engine = StepBatcher(), Lasting(9, row)
    some = members(batcher, engine, 3)
    hand_in(some, 1, 5, 1)
    assert [member.result()[0][0, 0] for member, _ in some] == [1, 5, 1]
    assert (engine.steps, engine.read) == ([3], [])
    assert [member.others for member, _ in some] == [2, 2, 2] and some[0][0].tokens == 7


@pytest.mark.parametrize(("sizes", "runs"), [
    ((100, 28), [2]), ((100, 29), [1, 1]), ((129, 1), [1, 1]), ((100, 100, 28), [2, 1]),
])  # fmt: skip
def test_a_run_keeps_its_arithmetic(sizes: tuple[int, ...], runs: list[int]):
    """Of up to 128 tokens, which keep 16 bits; a longer piece has its own."""
    batcher, engine, made = StepBatcher(), Lasting(9, row), []
    some = members(batcher, engine, len(sizes))
    engine.run = lambda work, *how: made.append(len(work)) or Lasting.run(engine, work, *how)
    hand_in(some, *sizes)
    assert [member.result()[0][0, 0] for member, _ in some] == [*sizes]
    assert made == runs


def test_what_has_a_run_of_its_own():
    batcher, engine = StepBatcher(), Lasting(9, row)
    rolling, plain, middle, drafted = members(batcher, engine, 4)
    rolling[0].submit([(ShiftedSequence(rolling[1], 4), [1])])
    middle[0].submit([(middle[1], [1, 1])], "none")
    drafted[0].submit([(drafted[1], [1, 1])], "all")
    plain[0].submit([(plain[1], [1])])
    assert [len(member.result()[0]) for member, _ in (rolling, plain, middle, drafted)] == [1, 1, 0, 2]
    assert (engine.steps, engine.read) == ([2], [1, 2])


def test_who_fails_fails_alone():
    batcher, engine = StepBatcher(), Lasting(9, row)
    some = members(batcher, engine, 3)
    hand_in(some, 1, 1, 1)

    def refuse(work: Any, *how: Any) -> Any:
        if any(sequence is some[1][1] for sequence, _ in work):
            raise MemoryLimitError("full")
        return Lasting.run(engine, work, *how)

    engine.run = refuse
    assert some[0][0].result()[0][0, 0] == 1
    with pytest.raises(MemoryLimitError, match="full"):
        some[1][0].result()
    assert some[2][0].result()[0][0, 0] == 1
    assert [len(sequence.tokens) for _, sequence in some] == [1, 0, 1]


def test_an_interrupted_run_is_made_again():
    """By whoever else waits for its part of it."""
    batcher, engine = StepBatcher(), Lasting(9, row)
    some = members(batcher, engine, 2)
    hand_in(some, 2, 1)
    engine.interrupt_at = engine.moments + 2  # after the tokens were read
    with pytest.raises(KeyboardInterrupt):
        some[0][0].result()
    some[0][0].leave()
    assert some[1][0].result()[0][0, 0] == 1
    assert [len(sequence.tokens) for _, sequence in some] == [0, 1]


def test_nobody_waits_long_for_one_that_does_not_come_back(monkeypatch):
    monkeypatch.setattr("localllm.generation.step_batcher.PATIENCE", 0.01)
    batcher, engine = StepBatcher(), Lasting(9, row)
    (gone, first), (stays, second) = members(batcher, engine, 2)
    gone.read([(first, [1])], "last")
    assert stays.read([(second, [1, 1])], "last")[0][0, 0] == 2


def test_what_is_withdrawn_is_not_read():
    batcher, engine = StepBatcher(), Lasting(9, row)
    (left, first), (forgotten, second), (stays, third) = members(batcher, engine, 3)
    hand_in([(left, first), (forgotten, second), (stays, third)], 1, 1, 1)
    left.leave()
    batcher.withdraw(second)
    assert stays.result()[0][0, 0] == 1 and stays.others == 0
    assert [len(sequence.tokens) for sequence in (first, second, third)] == [0, 0, 1]


def test_what_is_being_read_is_waited_for():
    batcher, engine = StepBatcher(), Gated()
    (member, sequence), order = members(batcher, engine, 1)[0], list[str]()
    engine.moments = 98

    def read() -> None:
        member.read([(sequence, [1])], "last")
        order.append("read")

    def withdraw() -> None:
        assert engine.entered.wait(SECONDS)
        threading.Timer(0.05, engine.allowed_mask.set).start()
        batcher.withdraw(sequence)
        order.append(f"withdrawn with {len(sequence.tokens)}")

    assert at_once(read, withdraw) == [None, None]
    assert sorted(order) == ["read", "withdrawn with 1"]


def test_a_forked_process_is_refused(monkeypatch):
    from localllm.engine.forks import Refusal

    batcher, engine = StepBatcher(), Lasting(9, row)
    ((member, sequence),) = members(batcher, engine, 1)
    monkeypatch.setattr(batcher, "lock", Refusal())
    with pytest.raises(LocalllmError, match="forked"):
        member.read([(sequence, [1])], "last")
