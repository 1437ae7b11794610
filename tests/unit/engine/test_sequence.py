"""Test sequences of one engine: each has the logits that it has alone; pages are shared and returned."""

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
from engines import bound
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from selection import everything
from tiny_hybrid import write_tiny_hybrid
from tiny_model import write_tiny_model

from localllm.engine.engine import Engine
from localllm.engine.memory.page_table import PageAllocator
from localllm.engine.options import EngineOptions
from localllm.engine.reference import ReferenceBackend
from localllm.errors import ContextError, LocalllmError, MemoryLimitError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.table import PAGE

CONTEXT, MOST = 3 * PAGE + 7, 8
BACKENDS = ["cpu", "reference"]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", context=1024)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("model") / "hybrid.gguf", context=1024)


@pytest.fixture(params=[(backend, model) for backend in BACKENDS for model in ("path", "hybrid")], ids="-".join)
def engine(request):
    backend, model = request.param
    engine = Engine(GGUFFile.open(request.getfixturevalue(model)), EngineOptions(2, CONTEXT, "f32", backend))
    yield engine
    engine.close()


@pytest.fixture
def cpu(path):
    engine = Engine(GGUFFile.open(path), EngineOptions(2, 1024, "f32"))
    yield engine
    engine.close()


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 260, count).tolist()


def pages(engine: Engine) -> PageAllocator:
    return engine.backend.room.pages


# ---- any interleaving -----------------------------------------------------------------------------------------------


class Interleaving(RuleBasedStateMachine):
    """Append to, fork, truncate, close and step up to 8 sequences; compare each with a new one."""

    engine: Engine

    @initialize()
    def begin(self) -> None:
        self.sequences, self.expected = [self.engine.sequence()], [list[int]()]

    def check(self, number: int, ids: list[int], logits: np.ndarray) -> None:
        self.expected[number] += ids
        alone = self.engine.sequence()
        assert nmse(logits, alone.append(self.expected[number], "all")[-len(logits) :]) < 1e-8
        alone.close()

    def new_tokens(self, data: st.DataObject, number: int, most: int) -> list[int]:
        room = CONTEXT - len(self.expected[number])
        count = data.draw(st.integers(1, min(most, room)) | st.just(min(most, room)))
        return data.draw(st.lists(st.integers(0, 259), min_size=count, max_size=count)) if count < 9 else tokens(count)

    def choose(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.sequences) - 1))

    @rule(data=st.data(), logits=st.sampled_from(["last", "all"]))
    def append(self, data, logits) -> None:
        number = self.choose(data)
        if len(self.expected[number]) < CONTEXT:
            ids = self.new_tokens(data, number, CONTEXT)
            self.check(number, ids, self.sequences[number].append(ids, logits))

    @rule(data=st.data())
    def step(self, data) -> None:
        """Step some of them together, with different numbers of tokens."""
        able = [number for number, held in enumerate(self.expected) if len(held) < CONTEXT]
        if able:
            chosen = data.draw(st.lists(st.sampled_from(able), unique=True, min_size=1))
            ids = [self.new_tokens(data, number, 12) for number in chosen]
            rows = self.engine.step([(self.sequences[number], ids[i]) for i, number in enumerate(chosen)])
            for i, number in enumerate(chosen):
                self.check(number, ids[i], rows[i])

    @precondition(lambda self: len(self.sequences) < MOST)
    @rule(data=st.data())
    def fork(self, data) -> None:
        number = self.choose(data)
        self.sequences.append(self.sequences[number].fork())
        self.expected.append(list(self.expected[number]))

    @rule(data=st.data())
    def truncate(self, data) -> None:
        number = self.choose(data)
        length = data.draw(st.integers(0, CONTEXT))
        assert self.sequences[number].truncate(length) == min(length, len(self.expected[number]))
        del self.expected[number][length:]

    @precondition(lambda self: len(self.sequences) > 1)
    @rule(data=st.data(), forget=st.booleans())
    def close(self, data, forget) -> None:
        """Close a sequence, or drop its last reference."""
        number = self.choose(data)
        sequence = self.sequences.pop(number)
        del self.expected[number]
        if not forget:
            sequence.close()

    @invariant()
    def every_sequence_holds_its_tokens(self) -> None:
        if hasattr(self, "sequences"):
            assert [sequence.tokens for sequence in self.sequences] == self.expected

    def teardown(self) -> None:
        for sequence in self.sequences:
            sequence.close()


@pytest.mark.slow
def test_any_interleaving_gives_each_sequence_its_own_logits(engine):
    machine = type("Machine", (Interleaving,), {"engine": engine})
    quick = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    case = machine.TestCase
    is_slow = engine.backend.__class__ is ReferenceBackend
    examples = (12 if is_slow else 40) if everything() else 8
    case.settings = settings(max_examples=examples, stateful_step_count=25, **quick)
    case("runTest").runTest()
    if hasattr(engine.backend, "_pages"):
        engine.sequence().append([1])  # the engine tidies up after forgotten ones
        gc.collect()
        engine.sequence().append([1])
        assert np.count_nonzero(pages(engine).references) <= 2


def test_a_step_changes_no_bit_by_where_its_pages_lie(cpu):
    first, second = cpu.sequence(), cpu.sequence()
    first.append(tokens(200), "none")
    noise = cpu.sequence()
    for start in range(0, 200, 50):  # pages of both in turn
        second.append(tokens(200)[start : start + 50], "none")
        noise.append(tokens(70, seed=start), "none")
    assert nmse(second.append([7]), first.append([7])) < 1e-12
    fork = first.fork()
    np.testing.assert_array_equal(fork.append([9]), first.append([9]))


# ---- pages ----------------------------------------------------------------------------------------------------------


def test_forks_share_pages_until_they_write(cpu):
    sequence = cpu.sequence()
    sequence.append(tokens(600), "none")
    used = np.count_nonzero(pages(cpu).references)
    forks = [sequence.fork() for _ in range(5)]
    assert np.count_nonzero(pages(cpu).references) == used == -(-600 // PAGE)
    forks[0].append([1])
    assert np.count_nonzero(pages(cpu).references) == used + 1, "the last page, which is not full, is copied"
    sequence.close()
    for fork in forks:
        fork.close()
    assert not pages(cpu).references.any()


def test_a_sequence_alone_has_contiguous_pages(cpu):
    sequence = cpu.sequence()
    for length in (1, 100, 700):
        sequence.append(tokens(length), "none")
    table = sequence.store.table
    np.testing.assert_array_equal(np.diff(table), 1)
    other = cpu.sequence()
    other.append(tokens(300), "none")
    sequence.append(tokens(200), "none")
    np.testing.assert_array_equal(np.diff(sequence.store.table), 1), "there is room to grow"


def test_taking_a_page_of_a_full_pool_is_refused():
    pool = PageAllocator(5)
    taken_pages = [pool.take(None)]
    while len(taken_pages) < 5:
        taken_pages.append(pool.take(taken_pages[-1]))
    assert sorted(taken_pages) == [0, 1, 2, 3, 4]
    with pytest.raises(MemoryLimitError, match="full"):
        pool.take(taken_pages[-1])
    pool.share([3])
    assert pool.release([2, 3]) == [2]
    assert pool.take(3) == 2


def test_a_full_cache_is_an_error_that_keeps_all_sequences(path):
    engine = Engine(GGUFFile.open(path), EngineOptions(1, PAGE, "f32"))
    count = len(pages(engine))
    sequences = [engine.sequence() for _ in range(count + 1)]
    for sequence in sequences[:-1]:
        sequence.append([1, 2])
    with pytest.raises(MemoryLimitError):
        sequences[-1].append([1, 2])
    assert sequences[-1].tokens == []
    sequences[0].close()
    assert nmse(sequences[-1].append([1, 2]), fresh(path, [1, 2])) < 1e-12
    engine.close()


def test_a_run_that_fails_halfway_returns_its_pages(path):
    """Let the first of two sequences get its pages before the second finds none."""
    engine = Engine(GGUFFile.open(path), EngineOptions(1, 5 * PAGE, "f32"))
    room = engine.get_cache_usage()[1] // PAGE
    others = [engine.sequence() for _ in range(room // 5 - 1)]
    for other in others:
        other.append(tokens(5 * PAGE), "none")
    first, second = engine.sequence(), engine.sequence()
    for sequence in (first, second):
        sequence.append([1])
    used, left = engine.get_cache_usage()[0], room - engine.get_cache_usage()[0] // PAGE
    with pytest.raises(MemoryLimitError):
        engine.step([(first, tokens(3 * PAGE)), (second, tokens((left - 2) * PAGE))])
    assert (engine.get_cache_usage()[0], first.tokens, second.tokens) == (used, [1], [1])
    assert nmse(first.append(tokens(3 * PAGE)), fresh(path, [1, *tokens(3 * PAGE)])) < bound(1e-12, in_tiles=1e-9)
    for sequence in (first, second, *others):
        sequence.close()
    assert engine.get_cache_usage()[0] == 0
    engine.close()


def fresh(path: Path, ids: list[int]) -> np.ndarray:
    engine = Engine(GGUFFile.open(path), EngineOptions(1, 1024, "f32"))
    logits = engine.sequence().append(ids)
    engine.close()
    return logits


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    pages_now = int(Path("/proc/self/statm").read_text().split()[1])
    return pages_now * 4096


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_grows_and_shrinks_with_tokens(tmp_path):
    file = GGUFFile.open(write_tiny_model(tmp_path / "tiny.gguf", context=200_000))
    engine = Engine(file, EngineOptions(2, None, "f32"))
    warm = engine.sequence()
    warm.append(tokens(512), "none")
    warm.close()
    before, sequence = resident(), engine.sequence()
    for _ in range(40):
        sequence.append(tokens(512), "none")
    per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head dimension, bytes
    grown = resident() - before
    assert 0.8 * 40 * 512 * per_token < grown < 1.5 * 40 * 512 * per_token
    fork = sequence.fork()
    assert resident() - before < grown + 200_000, "a fork costs no memory"
    fork.close()
    sequence.truncate(512)
    assert resident() - before < 0.2 * grown
    sequence.close()
    engine.close()


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_refused_call_changes_no_sequence(engine):
    first, second = engine.sequence(), engine.sequence()
    first.append([1, 2, 3])
    with pytest.raises(UsageError, match="once"):
        engine.step([(first, [1]), (first, [2])])
    with pytest.raises(UsageError, match="token ids"):
        engine.step([(first, [1]), (second, [10**6])])
    with pytest.raises(ContextError):
        engine.step([(second, [1]), (first, [1] * CONTEXT)])
    with pytest.raises(UsageError):
        first.truncate(-1)
    assert (first.tokens, second.tokens) == ([1, 2, 3], [])
    second.close()
    second.close()
    for use in (lambda: second.append([1]), second.fork, lambda: second.truncate(0)):
        with pytest.raises(LocalllmError, match="closed"):
            use()


# ---- several threads ------------------------------------------------------------------------------------------------


def test_threads_that_share_a_model_get_the_logits_of_one(cpu):
    """Run eight, each with its own sequence."""
    prompts = [tokens(40, seed) for seed in range(8)]
    alone = []
    for prompt in prompts:
        sequence = cpu.sequence()
        alone.append([sequence.append(prompt), *(sequence.append([token]) for token in prompt)])
        sequence.close()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(15):
            sequence = cpu.sequence()
            rows = [sequence.append(prompts[number]), *(sequence.append([token]) for token in prompts[number])]
            if any((row != known).any() for row, known in zip(rows, alone[number], strict=True)):
                wrong.append(number)
            sequence.fork().close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert wrong == []
