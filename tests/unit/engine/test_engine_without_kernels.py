"""Test the engine with a backend that computes nothing: its runs, their divisions, and its state after failures."""

from threading import Lock
from types import SimpleNamespace
from weakref import WeakValueDictionary

import numpy as np
import pytest

from localllm.engine import engine as engine_module
from localllm.engine.cpu.backend import CpuBackend
from localllm.engine.draft_head import DraftSequence
from localllm.engine.engine import Engine
from localllm.engine.forks import ForkedLock
from localllm.engine.image_tokens import ImageEmbedding
from localllm.engine.lower.activation import ALL, Activation
from localllm.engine.operations.operation import Operation
from localllm.engine.operations.tokens import ExportHidden
from localllm.engine.runs import RunPlan
from localllm.engine.sequence import Sequence
from localllm.errors import ContextError, LocalllmError, ModelError, UnsupportedError, UsageError
from localllm.kernels.table import PAGE
from tests.unit.generation.test_prefix_cache import TakenLock

KNOWN = 20  # a store truncates to multiples of it, or not at all


class Store:
    """A state that counts its tokens and records its calls."""

    def __init__(self):
        self.held, self.asked, self.is_closed, self.cached_logits = 0, list[tuple](), False, KNOWN

    def prepare(self, length: int, count: int) -> None:
        assert length == self.held
        self.held = length + count

    def truncate(self, length: int) -> int:
        self.asked.append(("truncate", length))
        self.held = self.held if length >= self.held else length // self.cached_logits * self.cached_logits
        return self.held

    def shift(self, keep: int, count: int) -> int:
        self.asked.append(("shift", keep, count))
        self.held -= count
        return self.held

    def close(self) -> None:
        self.is_closed = True


class Backend:
    """Return each token's id as its logits, and record (position, ids, wanted, encoded, ahead) of each span."""

    rotates_keys = True

    def __init__(self):
        self.ran, self.asked, self.error = list[list[tuple]](), list[tuple](), None

    def create_state(self) -> Store:
        return Store()

    def get_cache_usage(self) -> tuple[int, int]:
        return 3, 4

    def run(self, spans, precise: bool) -> np.ndarray:
        if self.error:
            raise self.error
        self.precise = precise
        self.ran.append([(one.position, one.ids.tolist(), one.wanted, one.encoded, one.ahead) for one in spans])
        wanted = [token for one in spans for token in one.ids[len(one.ids) - one.wanted :]]
        return np.array(wanted, np.float32)[:, None]

    def encode(self, spans, precise: bool) -> None:
        ((_, position, ids, wanted, *_),) = spans
        self.asked.append(("encode", position, ids.tolist(), wanted, precise))
        if self.error:
            raise self.error

    def prepare_shift(self, turns) -> None:
        self.asked.append(("prepare_shift", turns))

    def rotate_keys(self, store, first: int, end: int, distance: int) -> None:
        self.asked.append(("turn", first, end, distance))
        if self.error:
            raise self.error

    def prepare_all(self) -> None:
        self.asked.append(("prepare_all",))

    def close(self) -> None:
        self.asked.append(("close",))


TOO_LONG = "301 tokens do not fit the context of 300: open the model with a larger one"


class Bare(Engine):
    """An engine as if it had been opened."""

    def __init__(self, **known):
        self.context, self.vocab_size, self.runs, self.device = 300, 100, RunPlan(), "CPU"
        self.hyperparameters = SimpleNamespace(arch="llama", is_diffusion=False, row_width=2)
        self.lock, self.orphaned, self._images = Lock(), [], WeakValueDictionary()
        self._path, self._start, self._accepts_images, self._shifts = "m.gguf", None, True, False
        self._tap = self._head_source = self._head = None
        self.adapters, self.adapter_scales = (), ()
        self._backend, self._find_rotations = Backend(), lambda: "turns"
        self.__dict__.update(known)

    def ran(self) -> list[list[tuple]]:
        """Return (position, ids, wanted) by run and span."""
        ran, self._backend.ran = self._backend.ran, []
        return [[span[:3] for span in spans] for spans in ran]


@pytest.fixture
def engine() -> Bare:
    return Bare()


@pytest.fixture
def runs_of_4(monkeypatch) -> None:
    for name in ("engine", "sequence"):
        monkeypatch.setattr(f"localllm.engine.{name}.BATCH", 4)
    monkeypatch.setattr("localllm.engine.engine.PRECISE_TOKENS", 4)


def test_requests_share_runs_and_each_gets_its_own_logits(engine, runs_of_4):
    first, second = engine.sequence(), engine.sequence()
    for logits, expected, wanted in (
        ("all", [[1, 2, 3, 4, 5, 6], [7, 8, 9]], [[4], [2, 2], [1]]),
        ("last", [[6], [9]], [[0], [1, 0], [1]]),
        ("none", [[], []], [[0], [0, 0], [0]]),
    ):
        place = len(first.tokens), len(second.tokens)
        rows = engine.run([(first, [1, 2, 3, 4, 5, 6]), (second, [7, 8, 9])], logits, True)
        assert [some.ravel().tolist() for some in rows] == expected
        assert all(some.shape[1] == 1 for some in rows)
        assert engine.ran() == [
            [(place[0], [1, 2, 3, 4], wanted[0][0])],
            [(place[0] + 4, [5, 6], wanted[1][0]), (place[1], [7, 8], wanted[1][1])],
            [(place[1] + 2, [9], wanted[2][0])],
        ]
    assert (len(first.tokens), second.tokens) == (18, [7, 8, 9] * 3)
    engine.step([(first, [1])], precise=False)
    assert engine._backend.precise is False
    engine.step([(first, [1])])
    assert engine._backend.precise is True


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (20, [[(20, [7, 8], 1)]]),
        (21, [[(20, [1, 7, 8], 1)]]),
        (36, [[(20, [1] * 16 + [7, 8], 1)]]),
        (37, [[(20, [1] * 17, 0)], [(37, [7, 8], 1)]]),
    ],
)
def test_tokens_that_a_store_has_dropped_run_again(engine, held, expected):
    """Few run together with the new ones, many before them, without logits."""
    sequence = engine.sequence()
    sequence.append([1] * 40, "none")
    engine.ran()
    assert sequence.truncate(held) == held
    assert sequence.append([7, 8]).tolist() == [[8]]
    assert engine.ran() == expected
    assert sequence.tokens == [1] * held + [7, 8]


@pytest.mark.parametrize(
    ("error", "message"), [(ModelError("not numbers"), "m.gguf: not numbers"), (MemoryError("none"), "none")]
)
def test_a_failed_run_truncates_all_of_its_sequences(engine, error, message):
    first, second = engine.sequence(), engine.sequence()
    first.append([1] * 20)
    engine._backend.error = error
    with pytest.raises(type(error)) as caught:
        engine.step([(first, [2]), (second, [3])])
    assert str(caught.value) == message
    assert [(len(some.tokens), some.store.held, some.store.asked[-1]) for some in (first, second)] == [
        (20, 20, ("truncate", 20)), (0, 0, ("truncate", 0)),
    ]  # fmt: skip


def test_invalid_requests_are_refused_before_anything_runs(engine):
    sequence, of_another = engine.sequence(), Bare().sequence()
    sequence.append([1] * 298)
    for requests, error, message in (
        ([(sequence, [1]), (sequence, [1])], UsageError, "a sequence can be in a run only once"),
        (
            [(of_another, [1])],
            UsageError,
            "this sequence was created by another model: create one with this model's sequence()",
        ),
        ([(sequence, [1] * 3)], ContextError, TOO_LONG),
        ([(sequence, [100])], UsageError, "token ids must be a list of integers from 0 to 99"),
        ([(sequence, [])], UsageError, "token ids must be a list of integers from 0 to 99"),
        ([(sequence, [1.5])], UsageError, "token ids must be a list of integers from 0 to 99"),
    ):
        with pytest.raises(error) as caught:
            engine.step(requests)
        assert str(caught.value) == message
    with pytest.raises(UsageError, match=r"^logits must be last, all or none \(found 'some'\)$"):
        engine.run([(sequence, [1])], "some", True)
    engine.ran()
    sequence.append([0, 99])
    assert engine.ran() == [[(298, [0, 99], 1)]]


# ---- encoders -------------------------------------------------------------------------------------------------------


def test_an_encoder_runs_before_the_answers_first_token():
    engine = Bare(_start=0)
    sequence, backend = engine.sequence(), engine._backend
    assert sequence.append([5, 6, 0, 7], "all", False).ravel().tolist() == [0, 7]
    assert backend.asked == [("encode", 0, [5, 6], 0, False)]
    sequence.append([0, 8])
    assert backend.ran == [[(2, [0, 7], 2, 2, 0)], [(4, [0, 8], 1, 2, 0)]]
    assert (sequence.tokens, sequence.encoded, len(backend.asked)) == ([5, 6, 0, 7, 0, 8], 2, 1)
    fresh = engine.sequence()
    message = "llama models have an encoder: pass its text's tokens, the start token 0, and the answer's tokens"
    for ids in ([5, 6], [0, 5]):
        with pytest.raises(UsageError) as caught:
            fresh.append(ids)
        assert str(caught.value) == message
    backend.error = MemoryError()
    with pytest.raises(MemoryError):
        fresh.append([5, 0])
    assert (fresh.tokens, fresh.encoded, fresh.store.asked) == ([], 0, [("truncate", 0)])
    with pytest.raises(UsageError, match=r"^context shift is not supported for encoder models$"):
        sequence.shift(0, 0)


@pytest.mark.parametrize("most", [3, 4])
def test_bidirectional_models_run_a_whole_prompt_at_once(engine, runs_of_4, most):
    engine._backend.error = None if most == 4 else ModelError("not numbers")
    if most == 4:
        assert engine.forward_full([1, 2, 3, 4]).ravel().tolist() == [1, 2, 3, 4]
        assert engine.ran() == [[(0, [1, 2, 3, 4], 4)]]
        with pytest.raises(ContextError, match=r"^bidirectional attention is limited to 4 tokens \(found 5\)"):
            engine.forward_full([1] * 5)
    else:
        stores = []
        engine._backend.create_state = lambda: stores.append(Store()) or stores[-1]
        with pytest.raises(ModelError):
            engine.forward_full([1])
        assert [store.is_closed for store in stores] == [True]
    engine.hyperparameters.is_diffusion = True
    with pytest.raises(
        UnsupportedError, match=r"^m\.gguf: llama models fill masked tokens and cannot continue a sequence: use loc"
    ):
        engine.sequence()


# ---- forgetting the middle ------------------------------------------------------------------------------------------


def test_asking_whether_tokens_can_shift_compiles_nothing(engine):
    assert engine.can_shift and engine._backend.asked == []
    engine.prepare_shift()
    engine.prepare_shift()
    assert engine._backend.asked == [("prepare_shift", "turns")]
    engine._backend.rotates_keys = False
    assert not engine.can_shift
    with pytest.raises(UnsupportedError, match="context shift is not supported on a GPU"):
        engine.prepare_shift()


def test_a_shift_rotates_the_keys_behind_the_dropped_tokens(engine):
    sequence, asked = engine.sequence(), engine._backend.asked
    sequence.append([1] * 10 + [2] * PAGE + [3] * 6)
    sequence.shift(10, PAGE)
    assert sequence.tokens == [1] * 10 + [3] * 6
    assert sequence.store.asked[-2:] == [("truncate", 16 + PAGE), ("shift", 10, PAGE)]
    assert asked == [("prepare_shift", "turns"), ("turn", 10, 16, PAGE)]
    sequence.append([4] * PAGE)
    sequence.shift(0, PAGE)
    assert asked[2:] == [("turn", 0, 16, PAGE)]  # nothing is prepared again
    sequence.shift(16, 0)
    assert asked[3:] == []
    for keep, count in ((-1, 0), (0, -PAGE), (0, 1), (0, PAGE - 1), (0, PAGE), (17, 0)):
        with pytest.raises(UsageError, match=f"^cannot drop {count} of 16 tokens after the first {keep}$"):
            sequence.shift(keep, count)


def test_a_shift_of_dropped_tokens_runs_them_again_later(engine):
    sequence = engine.sequence()
    sequence.append([1] * 200)
    sequence.truncate(90)  # of which 80 are there
    sequence.shift(10, PAGE)
    assert sequence.store.asked[-2:] == [("truncate", 90), ("shift", 10, PAGE)]
    assert engine._backend.asked[-1] == ("turn", 10, 16, PAGE)
    sequence.append([1] * 80)
    sequence.truncate(101)  # of which 100 are there
    engine._backend.asked.clear()
    sequence.shift(37, PAGE)
    assert sequence.store.asked[-2:] == [("truncate", 101), ("truncate", 37)]
    assert engine._backend.asked == [] and len(sequence.tokens) == 37


def test_a_shift_at_the_end_of_the_stored_tokens_rotates_nothing(engine):
    sequence = engine.sequence()
    sequence.append([1] * 200)
    sequence.truncate(101)  # of which 100 are there
    sequence.shift(100 - PAGE, PAGE)
    assert sequence.store.asked[-1] == ("shift", 100 - PAGE, PAGE)
    assert len(sequence.tokens) == 101 - PAGE and engine._backend.asked[1:] == []  # nothing is behind it
    sequence.append([1] * 60)
    sequence.truncate(90)
    sequence.shift(85, 0)
    assert sequence.store.asked[-1] == ("truncate", 80)


def test_dropping_an_image_shifts_by_its_positions(engine):
    """Shift by fewer positions than the image has rows."""
    seen = ImageEmbedding(b"grid", np.zeros((6, 2), np.float32), np.array([[0, row // 3, row % 3] for row in range(6)]))
    engine.register_image(seen)
    for keep, distance in ((0, PAGE - 3), (10, PAGE)):
        sequence = engine.sequence()
        sequence.append([*[1] * 4, *seen.ids, *[2] * 100])
        sequence.shift(keep, PAGE)
        assert engine._backend.asked[-1] == ("turn", keep, 110 - PAGE, distance)
        assert sequence.images == ([] if keep == 0 else [(4, seen)])


def test_a_failed_shift_truncates_the_store(engine):
    sequence = engine.sequence()
    sequence.append([1] * 100)
    engine._backend.error = MemoryError()
    with pytest.raises(MemoryError):
        sequence.shift(10, PAGE)
    assert (len(sequence.tokens), sequence.store.asked[-1]) == (100, ("truncate", 10))


# ---- images ---------------------------------------------------------------------------------------------------------


def test_images_that_a_model_cannot_run_are_refused(engine, runs_of_4):
    rows = np.zeros((5, 2), np.float32)
    for known, seen, error, message in (
        (
            {"_accepts_images": False},
            ImageEmbedding(b"", rows),
            UnsupportedError,
            "m.gguf: images are not supported by llama models",
        ),
        (
            {"_start": 0},
            ImageEmbedding(b"", rows),
            UnsupportedError,
            "m.gguf: images are not supported by llama models",
        ),
        (
            {"device": "a card"},
            ImageEmbedding(b"", rows),
            UnsupportedError,
            "m.gguf: images are not supported by models on a card",
        ),
        (
            {},
            ImageEmbedding(b"", rows[:, :1]),
            UsageError,
            "an image's rows must have 2 columns, like the model's embeddings (found 1)",
        ),
        (
            {},
            ImageEmbedding(b"", rows, is_whole=True),
            UsageError,
            "an image of 5 rows exceeds the limit of 4 for bidirectional attention",
        ),
    ):
        with pytest.raises(error) as caught:
            Bare(**known).register_image(seen)
        assert str(caught.value) == message
    for seen in (ImageEmbedding(b"long", rows), ImageEmbedding(b"whole", rows[:4], is_whole=True)):
        engine.register_image(seen)
        sequence = engine.sequence()
        ids = [1, *seen.ids, 2]
        sequence.append(ids)
        assert engine.find_images(ids) == sequence.images == [(1, seen)]
        with pytest.raises(UsageError):
            sequence.append([seen.ids[-1] - 1])


def test_positions_behind_an_image_count_its_grid(engine, runs_of_4):
    """Check also that an image runs alone."""
    seen = ImageEmbedding(b"grid", np.zeros((6, 2), np.float32), np.array([[0, row // 3, row % 3] for row in range(6)]))
    engine.register_image(seen)
    engine.sequence().append([1, *seen.ids, 2])
    assert engine._backend.ran == [
        [(0, [1], 0, 0, 0)], [(1, seen.ids[:4], 0, 0, 0)], [(5, seen.ids[4:], 0, 0, 0)], [(7, [2], 1, 0, 3)],
    ]  # fmt: skip


# ---- what a sequence holds ------------------------------------------------------------------------------------------


def read_in(*pieces: int, known: int = 1) -> Sequence:
    """Return a sequence that ran these numbers of tokens, 4 at most at a time.


    Its store truncates to multiples of `known`.
    """
    engine = Bare(runs=RunPlan(4, 4))
    sequence = engine.sequence()
    sequence.engine_of = engine  # which must not be forgotten
    sequence.store.cached_logits = known
    for count in pieces:
        sequence.append([1] * count)
    return sequence


@pytest.mark.parametrize(
    ("pieces", "aligned"),
    [
        ((4,), 4),
        ((3,), 0),
        ((5,), 0),
        ((3, 1), 0),
        ((4, 4), 8),
        ((4, 5), 4),
        ((4, 3, 1), 4),
        ((4, 4, 4, 2), 12),
        ((8,), 0),
    ],
)
def test_a_sequence_is_aligned_while_its_runs_are_whole(pieces, aligned):
    assert read_in(*pieces).aligned == aligned


@pytest.mark.parametrize(
    ("length", "held", "aligned"), [(9, 9, 8), (8, 8, 8), (7, 7, 4), (4, 4, 4), (3, 3, 0), (0, 0, 0), (99, 10, 8)]
)
def test_truncating_a_sequence_rewinds_its_follower_and_alignment(length, held, aligned):
    sequence = read_in(4, 4, 2)
    sequence.listener = SimpleNamespace(follow_rewind=lambda place: rewound.append(place), engine=None)
    rewound = list[int]()
    assert sequence.truncate(length) == held
    assert (len(sequence.tokens), sequence.aligned, sequence.store.held, rewound) == (held, aligned, held, [held])
    with pytest.raises(UsageError, match=r"^a length must be 0 or greater \(found -1\)$"):
        sequence.truncate(-1)


@pytest.mark.parametrize(
    ("known", "length", "held"),
    [(1, 99, 24), (1, 24, 24), (1, 23, 20), (1, 3, 0), (10, 23, 20), (10, 19, 0), (6, 13, 12)],
)
def test_rewinding_returns_to_the_end_of_a_run_in_the_store(known, length, held):
    sequence = read_in(4, 4, 4, 4, 4, 4, 3, known=known)
    assert sequence.rewind(length) == held
    assert (len(sequence.tokens), sequence.aligned, sequence.store.held) == (held, held, held)
    sequence.append([1] * 4)
    assert sequence.aligned == held + 4


def test_tokens_of_other_runs_stay_unaligned():
    sequence = read_in(4, 5, 3)
    assert (sequence.aligned, sequence.truncate(9), sequence.aligned) == (4, 9, 4)
    assert (sequence.rewind(9), sequence.aligned) == (4, 4)


def test_truncating_into_the_encoders_text_drops_it_whole():
    engine = Bare(_start=0)
    for length, held in ((4, 4), (3, 3), (2, 0), (1, 0)):
        sequence = engine.sequence()
        sequence.store.cached_logits = 1
        sequence.append([5, 6, 0, 7])
        assert sequence.truncate(length) == held
        assert (sequence.encoded, sequence.tokens) == (2 if held else 0, [5, 6, 0, 7][:held])


def test_a_fork_copies_the_state_and_then_diverges(engine):
    seen = ImageEmbedding(b"x", np.zeros((2, 2), np.float32))
    engine.register_image(seen)
    sequence = engine.sequence()
    sequence.append([1, *seen.ids])
    sequence.aligned, sequence.encoded, sequence._pending_aligned = 1, 2, 3
    sequence.store.fork = lambda length: SimpleNamespace(held=length, truncate=lambda kept: kept)
    twin = sequence.fork()
    assert (twin.tokens, twin.aligned, twin.encoded, twin._pending_aligned) == (sequence.tokens, 1, 2, 3)
    assert (twin.images, twin.store.held, twin.listener) == ([(1, seen)], 3, None)
    twin.encoded = 0
    for length, images in ((2, [(1, seen)]), (1, [])):
        assert twin.truncate(length) == length
        assert (twin.images, sequence.images, len(sequence.tokens)) == (images, [(1, seen)], 3)


def test_whole_runs_of_an_image_are_aligned(engine, runs_of_4, monkeypatch):
    """Tokens behind a part of an image are not."""
    engine.runs = RunPlan(4, 4)
    seen = ImageEmbedding(b"x", np.zeros((6, 2), np.float32))
    engine.register_image(seen)
    for pieces, aligned in (
        ([[1] * 4, seen.ids], 10), ([[1] * 4, seen.ids[:4], seen.ids[4:]], 10),
        ([[1] * 4, seen.ids[:3], seen.ids[3:]], 4),
        ([[1] * 3, seen.ids], 9), ([[1] * 2, [1], seen.ids], 0), ([[1] * 4, [1], seen.ids], 11),
        ([seen.ids, [1] * 2], 8),
        ([seen.ids, [1]], 6),
    ):  # fmt: skip
        sequence = engine.sequence()
        for piece in pieces:
            sequence.append(piece)
        assert sequence.aligned == aligned, pieces


def test_a_closed_sequence_releases_its_store_once(engine):
    """Check also that closing it again does not wait for the lock."""
    sequence, closed = engine.sequence(), list[int]()
    sequence.append([1, 2])
    sequence.listener = SimpleNamespace(follow_rewind=lambda place: None, close=lambda: closed.append(1), engine=None)
    sequence.detach_listener()
    sequence.detach_listener()
    assert closed == [1] and sequence.listener is None
    sequence.listener = SimpleNamespace(follow_rewind=lambda place: None, close=lambda: closed.append(2), engine=None)
    store = sequence.store
    assert not sequence.closed
    sequence.close()
    assert (sequence.closed, store.is_closed, sequence.tokens, closed) == (True, True, [], [1, 2])
    engine.lock = TakenLock()
    sequence.close()
    with pytest.raises(LocalllmError, match=r"^this sequence is closed: create another one$"):
        sequence.store  # noqa: B018
    assert (sequence.context, sequence.vocab_size) == (300, 100)


# ---- who guesses ----------------------------------------------------------------------------------------------------


class Head:
    """A draft head that makes followers."""

    def __init__(self, *given):
        self.records_input, self.orphaned, self.closed = given, [], 0

    def create_draft_sequence(self, place: int) -> DraftSequence:
        follower = DraftSequence.__new__(DraftSequence)
        follower.engine, follower.begin, follower.told = self, place, []
        follower.on_hidden_states = lambda *given: follower.told.append(
            (given[0], given[1].tolist(), given[2].tolist())
        )
        return follower

    def close(self) -> None:
        self.closed += 1


def test_followers_receive_the_hidden_states_of_their_sequence(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "DraftHead", Head)
    with pytest.raises(UsageError, match=r"^m\.gguf has no MTP layer, or CPU does not support it$"):
        engine.attach_draft_head(engine.sequence())
    memory = np.arange(40, dtype=np.float32).reshape(10, 4)
    engine._head_source, engine._options = SimpleNamespace(columns=3), "options"
    engine._tap = SimpleNamespace(memory=memory)
    first, second = engine.sequence(), engine.sequence()
    first.append([1, 2])
    follower = engine.attach_draft_head(first)
    assert engine.attach_draft_head(first) is follower and follower.begin == 2
    assert engine._head.records_input == (engine._head_source, 300, "options")
    engine.step([(second, [5, 6, 7]), (first, [3, 4])])
    assert follower.told == [(2, [3, 4], memory[3:5, :3].tolist())]
    other, head = engine.attach_draft_head(second), engine._head
    engine._head = Head()
    engine.step([(second, [8]), (first, [5])])
    assert len(follower.told) == 1 and other.told == []  # they listened to another one
    assert engine.attach_draft_head(first) is not follower and first.listener.engine is not head


class Cpu(CpuBackend):
    """A CPU backend without programs."""

    def __init__(self):
        self.became = []

    def replace_operations(self, operations) -> None:
        self.became.append(operations)


def test_loading_a_draft_head_replaces_the_old_one_only_if_it_fits(monkeypatch):
    calls = []
    monkeypatch.setattr(engine_module, "DraftHead", Head)
    monkeypatch.setattr(engine_module, "parse_draft_head", lambda *files: calls.append(files) or "head_source")
    monkeypatch.setattr(engine_module, "create_hidden_state_tap", lambda head_source: f"shown to {head_source}")
    operations, before = [Operation((), Activation(ALL, 4))], Head()
    known = {"_file": "file", "_options": "options", "_head": before, "_head_source": "own", "_tap": "what is shown"}
    engine, file = Bare(**known, device="a card"), SimpleNamespace(path="head.gguf")
    with pytest.raises(UsageError, match=r"^head\.gguf: draft heads run on the CPU only, not on a card$"):
        engine.load_draft_head(file)
    engine._backend = Cpu()
    engine._record = lambda shown: calls.append(shown) or SimpleNamespace(operations=operations)
    with pytest.raises(UnsupportedError) as caught:
        engine.load_draft_head(file)
    assert str(caught.value) == "m.gguf: llama models do not expose the hidden states that a draft head needs"
    assert (engine._head, engine._head_source, engine._tap, engine._backend.became) == (
        before,
        "own",
        known["_tap"],
        [],
    )
    operations.append(ExportHidden((), Activation(ALL, 4), np.zeros(0)))
    calls.clear()
    engine.load_draft_head(file)
    assert calls == [(file, "file", engine.hyperparameters), "shown to head_source"]
    assert engine._head.records_input == ("head_source", 300, "options")
    assert (engine._head_source, engine._tap, engine._backend.became) == (
        "head_source",
        "shown to head_source",
        [operations],
    )
    assert before.closed == 1
    monkeypatch.setattr(engine_module, "DraftHead", lambda *calls: 1 // 0)
    head = engine._head
    with pytest.raises(ZeroDivisionError):
        engine.load_draft_head(file)
    assert (engine._head, head.closed, len(engine._backend.became)) == (head, 0, 1)
    engine._head = None
    monkeypatch.setattr(engine_module, "DraftHead", Head)
    engine.load_draft_head(file)


# ---- what goes back -------------------------------------------------------------------------------------------------


def test_stores_of_collected_sequences_are_closed(engine):
    stores = [Store(), Store()]
    engine.orphaned += stores
    assert engine.get_cache_usage() == (3, 4)
    assert all(store.is_closed for store in stores) and engine.orphaned == []
    sequence = engine.sequence()
    engine.orphaned.append(Store())
    sequence.append([1])
    assert engine.orphaned == []


def test_an_engine_closes_its_backend_once(engine):
    backend, head = engine._backend, Head()
    engine._head = head
    engine.prepare_all()
    engine.close()
    engine.close()
    assert (backend.asked, head.closed) == ([("prepare_all",), ("close",)], 1)
    with pytest.raises(LocalllmError, match=r"^the model is closed: open it again$"):
        engine.sequence()
    forked = Bare(lock=ForkedLock())
    forked.close()
    assert forked._backend is not None


def test_every_change_of_a_sequence_takes_the_lock(engine):
    sequence = engine.sequence()
    sequence.append([1, 2])
    engine.lock = TakenLock()
    for call in (
        lambda: sequence.append([1]), sequence.fork, lambda: sequence.truncate(1), lambda: sequence.rewind(1),
        lambda: sequence.shift(0, 0), sequence.close, engine.get_cache_usage,
        lambda: engine.attach_draft_head(sequence),
        engine.prepare_all, lambda: engine.load_draft_head(None), engine.close,
    ):  # fmt: skip
        with pytest.raises(BlockingIOError):
            call()
    assert sequence.tokens == [1, 2] and not engine._backend.asked
