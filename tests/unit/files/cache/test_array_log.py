"""Files of arrays that come one by one: whole records stay, wherever the file was cut off or damaged."""

import errno
import hashlib
import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from localllm.errors import LocalllmError, UsageError
from localllm.files.cache import array_log as record_file
from localllm.files.cache.array_log import ArrayLog

RECORDS = {"a": np.arange(7, dtype=np.uint8), "bé": np.arange(6, dtype=np.float32), "c": np.zeros(0, np.uint8)}


def layout(records: dict[str, np.ndarray], key: str = "key") -> list[bytes]:
    """Return the file as its module's docstring has it: the head, then each record."""
    pieces = [b"localllm records 1\n" + hashlib.sha256(key.encode()).digest()]
    for name, array in records.items():
        record = struct.pack("<QQ", len(name.encode()), array.nbytes) + name.encode() + array.tobytes()
        pieces.append(record + hashlib.sha256(record).digest())
    return pieces


def contents(path: Path, key: str = "key") -> dict[str, bytes]:
    """Return all records that a file has."""
    with ArrayLog(path, key) as file:
        return {name: file.read(name, 0, array.nbytes).tobytes() for name, array in RECORDS.items() if name in file}


@pytest.fixture
def path(tmp_path) -> Path:
    with ArrayLog(tmp_path / "x", "key") as file:
        for name, array in RECORDS.items():
            file.add(name, array)
    return tmp_path / "x"


def test_an_array_log_has_the_documented_layout(path: Path):
    assert path.read_bytes() == b"".join(layout(RECORDS))
    assert contents(path) == {name: array.tobytes() for name, array in RECORDS.items()}
    assert contents(path, "another") == {} and path.read_bytes() == layout({}, "another")[0], "begun anew"


@pytest.mark.parametrize("harm", ["cut", "flip"])
def test_records_before_a_damage_stay(path: Path, harm: str, monkeypatch):
    """Cut a file off anywhere behind its head, or change any byte there."""
    monkeypatch.setattr(record_file, "sync_file", lambda descriptor: None)
    data, ends = path.read_bytes(), np.cumsum([len(piece) for piece in layout(RECORDS)])
    for place in range(ends[0], len(data)):
        path.write_bytes(data[:place] if harm == "cut" else data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        whole = int(np.searchsorted(ends, place, side="right")) - 1
        with ArrayLog(path, "key") as file:
            names = list(RECORDS)
            assert [name in file for name in names] == [number < whole for number in range(3)], place
            assert path.read_bytes() == data[: ends[whole]], "the rest is cut off"
            for name in names[whole:]:
                file.add(name, RECORDS[name])
            assert all(file.read(name, 0, RECORDS[name].nbytes).tobytes() == RECORDS[name].tobytes() for name in names)
        assert path.read_bytes() == data


def test_a_head_that_was_cut_is_begun_anew(tmp_path):
    path, (head,) = tmp_path / "x", layout({})
    for length in range(len(head)):
        path.write_bytes(head[:length])
        assert contents(path) == {} and path.read_bytes() == head


@pytest.mark.parametrize("data", [b"x", b"dear diary, today", b"localllm records 2\n" + bytes(32)])
def test_a_file_in_another_format_is_left_unchanged(tmp_path, data: bytes):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(UsageError, match="x: expected a file written by localllm; move or rename this one"):
        ArrayLog(tmp_path / "x", "key").__enter__()
    assert (tmp_path / "x").read_bytes() == data


def test_reading_a_record_refuses_ranges_outside_it(path: Path):
    with ArrayLog(path, "key") as file:
        for first, end in ((0, 0), (0, 7), (2, 5), (6, 7), (7, 7)):
            assert list(file.read("a", first, end)) == list(range(first, end))
        for first, end in ((-1, 3), (3, 2), (0, 8), (8, 8)):
            with pytest.raises(IndexError, match=f"a: bytes {first} to {end} of 7"):
                file.read("a", first, end)


def test_reads_hold_the_lock_for_seek_and_read(path: Path):
    """Share the place in the file among all; close the file at the end."""
    events = []

    class Turn:
        def __enter__(self) -> None:
            events.append("begin")

        def __exit__(self, *error: object) -> None:
            events.append("end")

    class Noted(io.BytesIO):
        def seek(self, *place: int) -> int:
            events.append("seek")
            return super().seek(*place)

        def read(self, size: int | None = -1, /) -> bytes:
            events.append("read")
            return super().read(size)

    with ArrayLog(path, "key") as file:
        real, file._file, file._lock = file._file, Noted(path.read_bytes()), Turn()
        assert list(file.read("a", 1, 3)) == [1, 2] and events == ["begin", "seek", "read", "end"]
        file._file = real
    assert real.closed
    with ArrayLog(path, "another"):
        assert path.read_bytes() == layout({}, "another")[0], "it is there at once"


def test_a_record_is_on_the_disk_once_it_was_added(tmp_path, monkeypatch):
    synced = list[bytes]()
    monkeypatch.setattr(record_file, "sync_file", lambda descriptor: synced.append((tmp_path / "x").read_bytes()))
    with ArrayLog(tmp_path / "x", "key") as file:
        for name, array in RECORDS.items():
            file.add(name, array)
            assert len(synced) == list(RECORDS).index(name) + 1
    pieces = layout(RECORDS)
    assert synced == [b"".join(pieces[:end]) for end in (2, 3, 4)]


def test_a_record_that_the_disk_refused_is_not_read_back(path: Path, monkeypatch):
    """Let a record that could not be written take no room from the next one."""
    before = path.read_bytes()

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ArrayLog(path, "key") as file:
        with monkeypatch.context() as context, pytest.raises(LocalllmError) as failure:
            context.setattr(record_file, "sync_file", refuse)
            file.add("d", np.ones(1000, np.uint8))
        assert str(failure.value) == f"{path}: cannot be written: No space left on device"
        assert "d" not in file and list(file.read("a", 0, 7)) == list(range(7))
        file.add("e", np.ones(1, np.uint8))
    with ArrayLog(path, "key") as file:
        assert "d" not in file and list(file.read("e", 0, 1)) == [1]
    assert path.read_bytes() == before + layout({"e": np.ones(1, np.uint8)})[1]
    path.unlink()
    path.mkdir()
    with pytest.raises(LocalllmError, match="x: cannot be written: "):
        ArrayLog(path, "key").__enter__()


def test_removing_a_log_twice_is_harmless(path: Path):
    with ArrayLog(path, "key") as file:
        pass
    for _ in range(2):
        file.remove()
        assert not path.exists()


def test_reading_from_a_failing_disk_is_an_error(path: Path, monkeypatch):
    with ArrayLog(path, "key") as file:
        for first, end in ((-1, 2), (2, 1), (0, 8)):
            with pytest.raises(IndexError, match=f"^a: bytes {first} to {end} of 7$"):
                file.read("a", first, end)
        whole, file._file = file._file, io.FileIO(os.open(path, os.O_WRONLY), "w")
        with file._file, pytest.raises(LocalllmError, match="x: cannot be written: "):
            file.read("a", 0, 7)
        file._file = whole
        assert list(file.read("a", 2, 4)) == [2, 3]
