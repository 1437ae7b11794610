"""Files appear whole or not at all, and the file that was there before stays until then."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT
from system_calls import SAFE, SystemCalls

from localllm.errors import LocalllmError, UsageError
from localllm.files import safe_file
from localllm.files.safe_file import SafeFile, resolve_target

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX")


@pytest.fixture(params=["nameless", "named"])
def way(request, monkeypatch) -> str:
    """Try both ways to write: files without a name, where the system has them, and others."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("this system has no files without names")
    return request.param


def test_the_file_appears_when_it_is_closed(way: str, tmp_path: Path):
    target = tmp_path / "x"
    target.write_text("old")
    with SafeFile(target) as file:
        file.write(b"new ")
        assert len(list(tmp_path.iterdir())) == (1 if way == "nameless" else 2)
        file.write(memoryview(bytearray(b"bytes")))
        assert target.read_text() == "old" and file.position == 9
    assert target.read_text() == "new bytes" and list(tmp_path.iterdir()) == [target]


def test_all_is_on_the_disk_before_the_file_has_its_name(way: str, tmp_path: Path, monkeypatch):
    """A power failure at any moment leaves the old file or the new one."""
    calls = SystemCalls(monkeypatch)
    with SafeFile(tmp_path / "x") as file:
        file.write(b"new")
        file.write(b"bytes")
    assert calls.of(tmp_path / "x") == SAFE


def test_permissions_are_those_of_a_new_file(way: str, tmp_path: Path):
    before = os.umask(0o027)
    try:
        with SafeFile(tmp_path / "x"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_error_leaves_everything_as_it_was(way: str, error, tmp_path: Path):
    (tmp_path / "x").write_text("old")
    with pytest.raises(error), SafeFile(tmp_path / "x") as file:
        file.write(b"new")
        raise error
    assert (tmp_path / "x").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("function", ["write", "fsync", "link", "replace"])
def test_a_system_that_refuses_leaves_everything_as_it_was(way: str, function: str, tmp_path: Path, monkeypatch):
    def refuse(*arguments, **named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if function == "link" and way == "named":
        pytest.skip("this way has no links")
    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(os, function, refuse)
    with (
        pytest.raises(LocalllmError, match="x: cannot be written: No space left on device"),
        SafeFile(tmp_path / "x") as file,
    ):
        file.write(b"new")
    monkeypatch.undo()
    assert (tmp_path / "x").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_limit_of_the_file_size_leaves_nothing_behind(tmp_path: Path):
    """Let the system refuse in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(LocalllmError, match="File too large"), SafeFile(tmp_path / "x") as file:
            file.write(bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from localllm.files.safe_file import SafeFile
function, call = sys.argv[2], int(sys.argv[3])
real = getattr(os, function)
def deadly(*arguments, **named):
    global call
    call -= 1
    if call < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **named)
setattr(os, function, deadly)
with SafeFile(sys.argv[1]) as file:
    for i in range(3):
        file.write(b"new" * 1000)
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="elsewhere, a temporary file stays")
@pytest.mark.parametrize(("function", "call"), [("write", 0), ("write", 2), ("fsync", 0), ("link", 0)])
def test_a_kill_leaves_nothing_behind(function: str, call: int, tmp_path: Path):
    (tmp_path / "x").write_text("old")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "x"), function, str(call)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert (tmp_path / "x").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_writing_through_a_link_changes_its_target(way: str, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    with SafeFile(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "folder" / "file").read_text() == "new"


def test_targets_that_must_not_be_written_are_refused(tmp_path: Path):
    model = tmp_path / "model"
    model.write_text("weights")
    (tmp_path / "soft").symlink_to(model)
    os.link(model, tmp_path / "hard")
    for name in ("model", "soft", "hard", "./model"):
        with pytest.raises(UsageError, match="the output is also an input"):
            resolve_target(f"{tmp_path}/{name}", (str(model),))
        with pytest.raises(UsageError, match="the output is also an input"):
            resolve_target(tmp_path / name, (str(tmp_path / "soft"),))
    assert resolve_target(tmp_path / "new", (str(model), str(tmp_path / "missing"))) == str(tmp_path / "new")
    for name, problem in [
        ("none/x", "none does not exist; create it first"),
        (".", "the output must be a regular file"),
        ("fifo", "the output must be a regular file"),
    ]:
        if name == "fifo":
            os.mkfifo(tmp_path / "fifo")
        with pytest.raises(UsageError, match=problem):
            resolve_target(tmp_path / name)


@pytest.mark.parametrize(("denied", "problem"), [("file", "write-protected"), ("folder", "no permission to write in")])
def test_missing_permissions_are_refused_beforehand(denied: str, problem: str, tmp_path: Path, monkeypatch):
    """Make up the system's answers, since it grants root everything."""
    target = tmp_path / "x"
    target.write_text("old")
    refused = str(target if denied == "file" else tmp_path)
    monkeypatch.setattr(safe_file.os, "access", lambda path, mode: path != refused)
    with pytest.raises(UsageError, match=problem):
        resolve_target(target)
