"""Downloads in pieces: received bytes stay, and the file gets its name only when all of it is right."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from localllm.errors import LocalllmError, ModelError, UnsupportedError, UsageError
from localllm.files import download as partial
from localllm.files.download import Download, compute_sha256, find_partials

CONTENT = bytes(range(250))
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "folder" / "model.gguf"


@pytest.fixture(autouse=True)
def chunks(monkeypatch) -> None:
    monkeypatch.setattr(partial, "CHUNK", 100)


def begun(target: Path, told: list[int] | None = None) -> Download:
    return Download(target, len(CONTENT), SHA256, *([told.append] if told is not None else []))


def test_a_later_process_resumes_the_download(target):
    """Read the bytes that are there, and report them; name the file when all has come."""
    for first, last, read in ((0, 120, []), (120, 240, [100, 120]), (240, 250, [100, 200, 240])):
        told, checked = list[int](), list[str]()
        with begun(target, told) as file:
            assert file.path == target.with_name(f"model.gguf.{SHA256[:16]}.partial")
            assert (file.position, told, file.is_verified) == (first, read, False)
            file.write(CONTENT[first:last])
            assert (file.position, file.is_verified) == (last, last == 250)
            if last == 250:
                file.finish(checked.append)
        assert find_partials(target) == ([file.path] if last < 250 else [])
    assert checked == [str(file.path)]
    assert target.read_bytes() == CONTENT
    told.clear()
    assert compute_sha256(target, told.append) == SHA256 and told == [100, 200, 250]


def test_partial_files_that_do_not_fit_are_removed(target):
    """Remove other versions of the file, and longer ones; but no other file."""
    target.parent.mkdir(parents=True)
    kept = [target.with_name(name) for name in ("model.gguf", "model.gguf.txt", "other.gguf.0.partial", "a.partial")]
    gone = target.with_name(f"model.gguf.{'0' * 16}.partial")
    for path in (*kept, gone):
        path.write_bytes(b"x")
    begun(target).path.write_bytes(CONTENT + b"x")
    with begun(target) as file:
        assert (file.position, file.path.stat().st_size, gone.exists()) == (0, 0, False)
        assert all(path.read_bytes() == b"x" for path in kept)
    assert not file.path.exists(), "nothing has come"
    file.path.write_bytes(CONTENT)
    with begun(target) as file:
        assert (file.position, file.is_verified) == (250, True)
        file.restart()
        assert (file.position, file.path.stat().st_size, file.is_verified) == (0, 0, False)
        file.write(CONTENT)
        assert file.is_verified


def test_a_damaged_download_is_removed_with_an_error(target):
    for damaged in (CONTENT[:-1], CONTENT + b"\0", CONTENT[:-1] + b"\0"):
        with begun(target) as file:
            file.write(damaged)
            with pytest.raises(ModelError) as error:
                file.finish(lambda path: None)
            assert file.position == 0
        expected = f"{target}: the download is corrupt (wrong size or SHA-256); pull it again"
        assert (str(error.value), [*target.parent.iterdir()]) == (expected, [])


def test_an_unusable_file_is_refused_by_its_later_name(target):
    def check(path: str) -> None:
        raise UnsupportedError(f"{path}: of no use, this {path}")

    with begun(target) as file:
        file.write(CONTENT)
        with pytest.raises(UnsupportedError) as error:
            file.finish(check)
    assert (str(error.value), [*target.parent.iterdir()]) == (f"{target}: of no use, this {target}", [])
    with begun(target) as file:
        file.write(CONTENT)
        with pytest.raises(ZeroDivisionError):
            file.finish(lambda path: 1 // 0)
    assert [*target.parent.iterdir()] == [file.path]


def test_short_writes_are_continued(target, monkeypatch):
    write_at = partial.write_at
    monkeypatch.setattr(partial, "write_at", lambda descriptor, data, place: write_at(descriptor, data[:7], place))
    with begun(target) as file:
        file.write(CONTENT)
        assert file.is_verified
    assert file.path.read_bytes() == CONTENT


@pytest.mark.parametrize("function", ["write_at", "sync_file", "replace_file", "sync_folder"])
def test_a_disk_that_refuses_leaves_the_received_bytes(target, monkeypatch, function):

    def refuse(*given) -> None:
        raise OSError(errno.ENOSPC, "No space")

    with begun(target) as file:
        file.write(CONTENT[:9])
        monkeypatch.setattr(partial, function, refuse)
        with pytest.raises(LocalllmError) as error:
            file.write(CONTENT[9:])
            file.finish(lambda path: None)
        assert str(error.value) == f"{target}: cannot be written: No space"
    assert file.path.exists() or function == "sync_folder"


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LocalllmError, match=r"model\.gguf: cannot be written: "):
        begun(tmp_path / "file" / "model.gguf").__enter__()
    assert find_partials(tmp_path / "file" / "model.gguf") == []


def test_a_file_pulled_by_another_process_is_refused(target, monkeypatch):
    closed, close = [], os.close
    monkeypatch.setattr(partial, "lock_file", lambda descriptor: False)
    monkeypatch.setattr(os, "close", lambda descriptor: closed.append(descriptor) or close(descriptor))
    with pytest.raises(UsageError) as error:
        begun(target).__enter__()
    assert (str(error.value), len(closed)) == (
        f"{target}: another localllm is pulling this file; wait until it has finished",
        1,
    )
