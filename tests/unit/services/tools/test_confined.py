"""What Linux is asked for to confine a command: by numbers of its headers (linux/landlock.h, linux/prctl.h)."""

import ctypes
import errno
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from localllm.services.tools import confined

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a script for Linux alone")

# Of the header: LANDLOCK_ACCESS_FS_*, by their bits.
RIGHTS = ["EXECUTE", "WRITE_FILE", "READ_FILE", "READ_DIR", "REMOVE_DIR", "REMOVE_FILE", "MAKE_CHAR", "MAKE_DIR",
          "MAKE_REG", "MAKE_SOCK", "MAKE_FIFO", "MAKE_BLOCK", "MAKE_SYM", "REFER", "TRUNCATE", "IOCTL_DEV"]  # fmt: skip
KNOWN = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16, 7: 16}  # how many of them, by version: REFER came with 2, ...
OF_FILES = {"EXECUTE", "WRITE_FILE", "READ_FILE", "TRUNCATE", "IOCTL_DEV"}  # the kernel refuses others for a file
SEEING = {"EXECUTE", "READ_FILE", "READ_DIR"}
CREATE, ADD, RESTRICT, NO_NEW_PRIVILEGES, VERSION_FLAG, PATH_BENEATH, RULESET = 444, 445, 446, 38, 1, 1, 77


def rights(bits: int) -> set[str]:
    assert bits >> len(RIGHTS) == 0
    return {name for bit, name in enumerate(RIGHTS) if bits >> bit & 1}


class Kernel:
    """Notes what it is asked for."""

    def __init__(self, version: int, fails: int = 0):
        self.version, self.fails, self.calls, self.keeps_errors = version, fails, list[Any](), False
        self.rules = dict[str, set[str]]()

    def syscall(self, number: int, *given: Any) -> int:
        if number == CREATE and given[0] is None:
            assert (given[1].value, given[2].value) == (0, VERSION_FLAG)
            return self.version
        self.calls.append(number)
        if number == self.fails:
            ctypes.set_errno(errno.EPERM)
            return -1
        if number == CREATE:
            ruleset, size, flags = given
            assert (size.value, flags) == (8, 0)
            (self.handled,) = struct.unpack("=Q", ctypes.string_at(ruleset, 8))
            return RULESET
        assert given[0] == RULESET
        if number == ADD:
            assert given[1] == PATH_BENEATH and given[3] == 0
            allowed, parent = struct.unpack("=Qi", ctypes.string_at(given[2], 12))
            self.rules[os.readlink(f"/proc/self/fd/{parent}")] = rights(allowed)
        else:
            assert given == (RULESET, 0)
        return 0

    def prctl(self, *given: int) -> int:
        assert given == (NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        self.calls.append("prctl")
        return 0


@pytest.fixture
def kernel(monkeypatch):
    def put(version: int, fails: int = 0) -> Kernel:
        made = Kernel(version, fails)

        def library(name: None, use_errno: bool = False) -> Kernel:
            made.keeps_errors |= use_errno
            return made

        monkeypatch.setattr(confined.ctypes, "CDLL", library)
        return made

    return put


@pytest.mark.parametrize("version", KNOWN)
def test_all_that_is_known_is_forbidden_but_for_these(kernel, tmp_path: Path, monkeypatch, version: int):
    home, tools = tmp_path / "home", tmp_path / "tools"
    home.mkdir()
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:relative:/none")
    made = kernel(version)
    before = len(os.listdir("/proc/self/fd"))
    confined.confine([str(home)])
    everything = set(RIGHTS[: KNOWN[version]])
    assert rights(made.handled) == everything
    assert made.rules[str(home)] == everything, "what is allowed may be changed"
    assert made.rules[str(tools)] == made.rules["/usr"] == made.rules["/etc"] == made.rules["/proc"] == SEEING
    assert made.rules[os.path.realpath(sys.prefix)] == SEEING
    for name in ("null", "zero", "random", "urandom"):
        assert made.rules[f"/dev/{name}"] == {"READ_FILE", "WRITE_FILE"}
    assert not {"/", "/home", "/root", "/tmp", "/dev", str(tmp_path), os.getcwd()} & made.rules.keys()
    assert made.calls == [CREATE, *[ADD] * (len(made.calls) - 3), "prctl", RESTRICT] and made.keeps_errors
    assert len(os.listdir("/proc/self/fd")) == before, "nothing stays open"


def test_a_file_that_is_allowed_has_the_rights_of_files(kernel, tmp_path: Path):
    (tmp_path / "x").touch()
    made = kernel(7)
    confined.confine([str(tmp_path / "x")])
    assert made.rules[str(tmp_path / "x")] == OF_FILES


@pytest.mark.parametrize("fails", [CREATE, ADD, RESTRICT])
def test_a_kernel_that_refuses_is_an_error(kernel, tmp_path: Path, fails: int):
    """And no command runs."""
    kernel(7, fails)
    with pytest.raises(PermissionError, match="Operation not permitted"):
        confined.confine([str(tmp_path)])


@pytest.mark.parametrize(("told", "version"), [(-1, 0), (0, 0), (1, 1), (9, 9)])
def test_versions(kernel, monkeypatch, told: int, version: int):
    kernel(told)
    assert confined.version() == version
    monkeypatch.setattr(confined.sys, "platform", "darwin")
    assert confined.version() == 0
