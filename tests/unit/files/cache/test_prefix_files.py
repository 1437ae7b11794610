"""Prompts kept piece by piece, without a model: which pieces are written, found, enough, and read again."""

import os
import time
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
from pooled import restored

from localllm.arch.layer_state import PagedState, RecurrentLayerState
from localllm.engine import prefix_store as prefixes
from localllm.engine.adapter_scales import AdapterScales
from localllm.engine.memory.sequence_state import PagedStore
from localllm.engine.prefix_store import PendingWrite, PrefixStore, require_paged_store
from localllm.engine.runs import RunPlan
from localllm.errors import LocalllmError, MemoryLimitError
from localllm.files.cache import prefix_files
from localllm.files.cache.prefix_files import TIME_STEP, PrefixChunkInfo
from tests.unit.generation.test_prefix_cache import TakenLock


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return an empty folder for kept prompts."""
    monkeypatch.delenv(prefix_files.SIZE_VARIABLE)
    monkeypatch.setattr(prefix_files, "get_folder", lambda: tmp_path / "kept")
    for name in ("sync_file", "sync_folder"):  # a busy disk takes its time
        monkeypatch.setattr(f"localllm.files.safe_file.{name}", lambda place: None)
    return tmp_path / "kept"


# ---- pieces of prompts ----------------------------------------------------------------------------------------------


class Store:
    """Have parts of all tokens, which say their range."""

    table, addresses = np.zeros(0, np.int64), (0, 0, 0)

    def __init__(self, names=("pages",)):
        self.names, self.had, self.error, self.room = names, [], None, 99

    def list_sections(self, first: int, last: int) -> list[str]:
        return [name for name in self.names if name != "states" or last % 8 == 0]

    def copy_section(self, name: str, first: int, last: int) -> np.ndarray:
        return np.frombuffer(f"{name} {first} {last}".encode(), np.uint8)

    def put(self, first: int, last: int, parts) -> None:
        if self.error or last > self.room:
            raise self.error or MemoryLimitError("full")
        self.had.append((first, last, {name: bytes(data).decode() for name, data in parts.items()}))

    def prepare(self, length: int, count: int) -> None: ...
    def fork(self, length: int) -> None: ...
    def truncate(self, length: int) -> None: ...
    def shift(self, keep: int, count: int) -> None: ...
    def append_copies(self, source: "Store", first: int, length: int, count: int, skipped: int) -> None: ...
    def close(self) -> None: ...


class World:
    """Have prefixes of an engine with runs of 4 tokens."""

    def __init__(self, monkeypatch, states=(), names=("pages",)):
        self.sequences, self.names = [], names
        engine = SimpleNamespace(
            hyperparameters=SimpleNamespace(list_states=lambda: states), runs=RunPlan(4, 4), operations=(),
            kv_type="f16", adapters=(),
            vocab_size=2, sequence=self.sequence, find_images=lambda ids: [f"images of {len(ids)}"],
            lock=Lock(),
        )  # fmt: skip
        monkeypatch.setattr(prefixes, "compute_fingerprint", lambda *given: b"root" * 8)
        monkeypatch.setattr(prefixes, "is_worth_caching", lambda ids: True)
        self.state = "as it was"
        self.prefixes = PrefixStore(engine, SimpleNamespace(path="folder\\m.gguf", stat_files=lambda: self.state))

    def sequence(self, count: int = 0, aligned: int = 0) -> SimpleNamespace:
        self.sequences.append(SimpleNamespace(
            tokens=[*range(count)], aligned=aligned, store=Store(self.names), images=[], closed=0,
            adapter_scales=AdapterScales(),
        ))  # fmt: skip
        sequence = self.sequences[-1]
        sequence.close = lambda: setattr(sequence, "closed", sequence.closed + 1)
        return sequence

    def write(self, count: int, aligned: int, logits=True, is_conversation=False) -> None:
        rows = np.array([[1.5, 2.5]], np.float32) if logits else None
        self.prefixes._write_chunks(PendingWrite(self.sequence(count, aligned), rows, is_conversation))

    def found(self, ids, *given) -> tuple[list[tuple[int, int]], int, bool] | None:
        stored = self.prefixes.find_prefix(ids, *given)
        if stored is None:
            return None
        return [(piece.first, piece.last) for piece in stored.pieces], len(stored.ids), stored.has_logits


def test_the_store_of_these_tests_is_a_paged_store():
    assert isinstance(Store(), PagedStore)
    assert require_paged_store(SimpleNamespace(store=(store := Store()))) is store


def test_a_prompt_is_found_as_far_as_another_begins_alike(folder, monkeypatch):
    world = World(monkeypatch)
    world.write(10, 8)
    ids = [*range(10)]
    assert world.found(ids) == ([(0, 4), (4, 8), (8, 10)], 10, True)
    assert world.found([*ids, 10]) == ([(0, 4), (4, 8)], 8, False)
    assert world.found([*ids[:9], 99]) == ([(0, 4), (4, 8)], 8, False)
    assert world.found(ids[:8]) == ([(0, 4)], 4, False)  # logits behind all of it are nowhere
    assert world.found(ids[:7]) == ([(0, 4)], 4, False)
    assert world.found(ids, 9) == ([(0, 4), (4, 8)], 8, False)
    assert world.found(ids, 8) == ([(0, 4), (4, 8)], 8, False)
    assert world.found(ids, 7) == ([(0, 4)], 4, False) and world.found(ids, 3) is None
    assert world.found([99, *ids]) is None and world.found(ids, 99, True) is None
    read = restored(world.prefixes, ids)
    assert read.sequence.store.had == [
        (first, last, {"pages": f"pages {first} {last}"}) for first, last in ((0, 4), (4, 8), (8, 10))
    ]  # fmt: skip
    assert (read.sequence.tokens, read.sequence.aligned, read.sequence.images) == (ids, 8, ["images of 10"])
    assert read.logits.tolist() == [[1.5, 2.5]] and read.logits.dtype == np.float32
    read = restored(world.prefixes, [*ids, 10])
    assert (len(read.sequence.tokens), read.sequence.aligned, read.logits) == (8, 8, None)
    abouts = {(one.about.model, one.about.end) for one in prefix_files.list_entries()}
    assert abouts == {("m.gguf", 4), ("m.gguf", 8), ("m.gguf", 10)}
    before = {one.about.end: one.about.before for one in prefix_files.list_entries()}
    keys = {one.about.end: one.key for one in prefix_files.list_entries()}
    assert before == {4: "", 8: keys[4], 10: keys[8]}
    world.state = "changed"
    assert world.found(ids) is None


@pytest.mark.parametrize(
    ("aligned", "logits", "ends"), [(8, False, [4, 8]), (4, True, [4]), (8, True, [4, 8, 10]), (0, True, [])]
)
def test_whole_runs_and_the_rest_with_logits_are_written(folder, monkeypatch, aligned, logits, ends):
    world = World(monkeypatch)
    world.write(10, aligned, logits)
    assert sorted(one.about.end for one in prefix_files.list_entries()) == ends
    monkeypatch.setenv(prefix_files.SIZE_VARIABLE, "5e-9")  # bytes, of which the first piece has more
    prefix_files.remove_all()
    world.write(10, aligned, logits)
    assert len(prefix_files.list_entries()) == min(len(ends), 1)


@pytest.mark.parametrize(("room", "length"), [(99, 10), (9, 8), (7, 4), (3, None)])
def test_a_stored_prefix_is_cut_to_what_fits_into_memory(folder, monkeypatch, room, length):
    world, ids = World(monkeypatch), [*range(10)]
    world.write(10, 8)
    sequence = world.prefixes._engine.sequence

    def limited():
        limited_sequence = sequence()
        limited_sequence.store.room = room
        return limited_sequence

    world.prefixes._engine.sequence = limited
    read = restored(world.prefixes, ids)
    assert (read and len(read.sequence.tokens)) == length and restored(world.prefixes, [99]) is None
    monkeypatch.setattr(prefixes, "is_worth_caching", lambda ids: False)
    assert world.found(ids) is None
    monkeypatch.setattr(prefixes, "is_worth_caching", lambda ids: True)
    assert world.found(ids)
    world.prefixes.close()
    assert world.found(ids) is None


def test_keeping_and_writing_wait_for_the_lock(folder, monkeypatch):
    world = World(monkeypatch)
    world.prefixes.lock = TakenLock()
    for call in (lambda: world.prefixes.keep(world.sequence(10), None), world.prefixes._write):
        with pytest.raises(BlockingIOError):
            call()
    assert not world.prefixes.is_writing and not folder.exists()
    world.write(10, 8)
    world.prefixes._engine.lock = MagicMock(__enter__=Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        restored(world.prefixes, [*range(10)])
    assert world.sequences[-1].closed == 1


def test_a_conversation_is_kept_whole_under_its_own_keys(folder, monkeypatch):
    """Keep all of it; read none of it in whole runs when going on."""
    world = World(monkeypatch)
    world.write(10, 0, False, True)
    ids = [*range(10)]
    assert world.found(ids) is None
    assert world.found(ids, 99, True) == ([(0, 4), (4, 8), (8, 10)], 10, False)
    read = world.prefixes.load(world.prefixes.find_prefix(ids, is_conversation=True))
    assert (read.sequence.tokens, read.sequence.aligned, read.logits) == (ids, 0, None)


@pytest.mark.parametrize(
    ("states", "names", "needed"),
    [
        ([PagedState(0, 1, 4, 4)], ("pages",), [{"pages"}] * 3),
        ([PagedState(0, 1, 4, 4, window=2)], ("pages", "windows"), [{"pages"}, {"pages"}, {"pages", "windows"}]),
        ([PagedState(0, 1, 4, 4, window=3), PagedState(1, 1, 4, 4, window=1)], ("pages", "windows"),
         [{"pages"}, {"pages", "windows"}, {"pages", "windows"}]),
        ([PagedState(0, 1, 4, 4, window=6)], ("pages", "windows"), [{"pages"}, {"pages", "windows"}, {"pages",
        "windows"}]),
        ([RecurrentLayerState(0, ((1,),))], ("pages", "states"), [{"pages"}, {"pages"}, {"pages", "states"}]),
    ],
)  # fmt: skip
def test_only_needed_parts_are_read(folder, monkeypatch, states, names, needed):
    """Read windows of the last tokens only, and states at the end."""
    world = World(monkeypatch, states, names)
    pieces = world.prefixes._split_chunks([*range(10)], AdapterScales())
    assert [world.prefixes._list_required_sections(piece, 10) for piece in pieces] == needed
    world.write(10, 8)
    if "states" in names:  # which are known after 8 tokens only
        assert world.found([*range(10)]) == ([(0, 4), (4, 8)], 8, False)
        assert world.found([*range(7)]) is None
        needed = [{"pages"}, {"pages", "states"}]
    read = restored(world.prefixes, [*range(10)])
    assert [{*parts} for _, _, parts in read.sequence.store.had] == needed


def test_a_damaged_file_is_removed_and_the_rest_is_read(folder, monkeypatch):
    """Close what was read so far; then take as much as is whole."""
    world, ids = World(monkeypatch), [*range(10)]
    world.write(10, 8)
    path = folder / world.prefixes._split_chunks(ids, AdapterScales())[1].key
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    read = restored(world.prefixes, ids)
    assert not path.exists() and [some.closed for some in world.sequences[1:]] == [1, 0]
    assert (len(read.sequence.tokens), read.logits) == (4, None)
    world.write(10, 8)
    stored = world.prefixes.find_prefix(ids)
    (folder / stored.pieces[2].key).unlink()
    assert world.prefixes.load(stored) is None and world.sequences[-1].closed == 1
    for error, is_told in ((MemoryLimitError("full"), False), (ZeroDivisionError(), True)):
        store = Store()
        store.error = error
        monkeypatch.setattr(prefixes, "require_paged_store", lambda sequence, store=store: store)
        stored = world.prefixes.find_prefix(ids)
        if is_told:
            with pytest.raises(ZeroDivisionError):
                world.prefixes.load(stored)
        else:
            assert world.prefixes.load(stored) is None
        assert world.sequences[-1].closed == 1
    assert all((folder / piece.key).exists() for piece in stored.pieces)


def test_a_written_file_is_written_again_only_with_more_parts(folder, monkeypatch):
    world = World(monkeypatch, [PagedState(0, 1, 4, 4, window=2)])
    world.write(10, 8)
    files = {path: path.stat().st_ino for path in folder.iterdir()}
    sizes = {path: path.stat().st_size for path in folder.iterdir()}
    world.write(10, 8)
    assert {path: path.stat().st_ino for path in folder.iterdir()} == files
    world.names = "pages", "windows"
    world.write(10, 8)
    assert all(path.stat().st_size > size for path, size in sizes.items())


# ---- the files ------------------------------------------------------------------------------------------------------


def test_the_size_limit_follows_environment_user_and_disk(folder, monkeypatch):
    """Take the environment's, or the user's, or the usual one; 0 keeps nothing, and no disk is filled."""
    monkeypatch.setattr(prefix_files, "load_settings", lambda: SimpleNamespace(cache_gb=user_gb))
    for variable, of_user, expected in (
        (None, None, 4_000_000_000), (None, 0.5, 500_000_000), ("2", 0.5, 2_000_000_000), ("0", 0.5, 0),
        ("-1", 1, 0),
        ("many", 0.5, 500_000_000), ("inf", None, 4_000_000_000), ("", 0.5, 500_000_000),
    ):  # fmt: skip
        user_gb = of_user
        if variable is None:
            monkeypatch.delenv(prefix_files.SIZE_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(prefix_files.SIZE_VARIABLE, variable)
        assert prefix_files.get_size_limit() == expected
    user_gb = 1e-8  # 10 bytes
    monkeypatch.delenv(prefix_files.SIZE_VARIABLE)
    for free, total, expected in ((100, 0, 10), (30, 9, 9), (31, 9, 10)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert prefix_files.limit_by_disk(total) == expected

    def missing(path):
        raise FileNotFoundError

    monkeypatch.setattr("shutil.disk_usage", missing)
    assert prefix_files.limit_by_disk(0) == 10


@pytest.mark.parametrize(("most", "left"), [(100, "abcd"), (40, "abcd"), (39, "bcd"), (30, "bcd"), (20, "cd"), (9, "")])
def test_the_least_recently_used_chunk_is_evicted_first(folder, monkeypatch, most, left):
    folder.mkdir()
    for age, name in enumerate("dcba"):
        (folder / (name * 32)).write_bytes(b"x" * 10)
        os.utime(folder / (name * 32), (1000 - age, 1000 - age))
    (folder / "other").write_bytes(b"x" * 99)
    monkeypatch.setattr(prefix_files, "limit_by_disk", lambda total: most if total == 40 else 1 // 0)
    prefix_files.prune()
    assert sorted(path.name[0] for path in folder.iterdir() if path.name != "other") == [*left]
    assert (folder / "other").exists()
    assert prefix_files.remove_all() == 10 * len(left) and [path.name for path in folder.iterdir()] == ["other"]


def test_pieces_are_marked_as_used_one_behind_the_other(folder, monkeypatch):
    folder.mkdir()
    for name in "ab":
        (folder / name).write_bytes(b"")
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    prefix_files.mark_used(["a", "none", "b"])
    times = [(folder / name).stat().st_mtime_ns for name in "ab"]
    assert [10**18 - each for each in times] == [0, 2 * TIME_STEP]


def test_leftovers_of_killed_programs_are_removed(folder, monkeypatch):
    folder.mkdir()
    for name, age in ((".old.tmp", 3601), (".new.tmp", 3599), ("old.tmp", 9999)):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (10**9 - age, 10**9 - age))
    monkeypatch.setattr(time, "time", lambda: 10**9)
    prefix_files.remove_temporary(3600)
    assert sorted(path.name for path in folder.iterdir()) == [".new.tmp", "old.tmp"]
    prefix_files.remove_all()
    assert [path.name for path in folder.iterdir()] == ["old.tmp"]


def test_a_file_that_cannot_be_removed_is_named(folder, monkeypatch):
    prefix_files.write_prefix("a" * 32, PrefixChunkInfo("m", 1, ""), {})

    def refuse(path, missing_ok=False):
        raise PermissionError(13, "Not allowed")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(LocalllmError) as error:
        prefix_files.remove_all()
    assert str(error.value) == f"{folder / ('a' * 32)}: cannot be removed: Not allowed"
    prefix_files.remove_prefix("a" * 32)
