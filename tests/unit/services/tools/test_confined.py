"""Test the system calls that confine a command, by the numbers of linux/landlock.h and linux/prctl.h."""

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
    """A kernel that records its system calls."""

    def __init__(self, version: int, fails: int = 0):
        self.version, self.fails, self.calls, self.keeps_errors = version, fails, list[Any](), False
        self.rules = dict[str, set[str]]()

    def syscall(self, number: int, *arguments: Any) -> int:
        if number == CREATE and arguments[0] is None:
            assert (arguments[1].value, arguments[2].value) == (0, VERSION_FLAG)
            return self.version
        self.calls.append(number)
        if number == self.fails:
            ctypes.set_errno(errno.EPERM)
            return -1
        if number == CREATE:
            ruleset, size, flags = arguments
            assert (size.value, flags) == (8, 0)
            (self.handled,) = struct.unpack("=Q", ctypes.string_at(ruleset, 8))
            return RULESET
        assert arguments[0] == RULESET
        if number == ADD:
            assert arguments[1] == PATH_BENEATH and arguments[3] == 0
            allowed, parent = struct.unpack("=Qi", ctypes.string_at(arguments[2], 12))
            self.rules[os.readlink(f"/proc/self/fd/{parent}")] = rights(allowed)
        else:
            assert arguments == (RULESET, 0)
        return 0

    def prctl(self, *arguments: int) -> int:
        assert arguments == (NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        self.calls.append("prctl")
        return 0


@pytest.fixture
def kernel(monkeypatch):
    def install(version: int, fails: int = 0) -> Kernel:
        kernel_made = Kernel(version, fails)

        def library(name: None, use_errno: bool = False) -> Kernel:
            kernel_made.keeps_errors |= use_errno
            return kernel_made

        monkeypatch.setattr(confined.ctypes, "CDLL", library)
        return kernel_made

    return install


@pytest.mark.parametrize("version", KNOWN)
def test_all_known_rights_are_forbidden_except_the_allowed_paths(kernel, tmp_path: Path, monkeypatch, version: int):
    home, tools = tmp_path / "home", tmp_path / "tools"
    home.mkdir()
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:relative:/none")
    installed = kernel(version)
    before = len(os.listdir("/proc/self/fd"))
    confined.confine_process([str(home)])
    everything = set(RIGHTS[: KNOWN[version]])
    assert rights(installed.handled) == everything
    assert installed.rules[str(home)] == everything, "what is allowed may be changed"
    assert (
        installed.rules[str(tools)]
        == installed.rules["/usr"]
        == installed.rules["/etc"]
        == installed.rules["/proc"]
        == SEEING
    )
    assert installed.rules[os.path.realpath(sys.prefix)] == SEEING
    for name in ("null", "zero", "random", "urandom"):
        assert installed.rules[f"/dev/{name}"] == {"READ_FILE", "WRITE_FILE"}
    assert not {"/", "/home", "/root", "/tmp", "/dev", str(tmp_path), os.getcwd()} & installed.rules.keys()
    assert (
        installed.calls == [CREATE, *[ADD] * (len(installed.calls) - 3), "prctl", RESTRICT] and installed.keeps_errors
    )
    assert len(os.listdir("/proc/self/fd")) == before, "nothing stays open"


def test_an_allowed_file_gets_the_rights_of_files(kernel, tmp_path: Path):
    (tmp_path / "x").touch()
    installed = kernel(7)
    confined.confine_process([str(tmp_path / "x")])
    assert installed.rules[str(tmp_path / "x")] == OF_FILES


@pytest.mark.parametrize("fails", [CREATE, ADD, RESTRICT])
def test_a_kernel_that_refuses_raises(kernel, tmp_path: Path, fails: int):
    """Run no command then."""
    kernel(7, fails)
    with pytest.raises(PermissionError, match="Operation not permitted"):
        confined.confine_process([str(tmp_path)])


@pytest.mark.parametrize(("reported", "version"), [(-1, 0), (0, 0), (1, 1), (9, 9)])
def test_the_landlock_version_is_0_where_unsupported(kernel, monkeypatch, reported: int, version: int):
    kernel(reported)
    assert confined.get_landlock_version() == version
    monkeypatch.setattr(confined.sys, "platform", "darwin")
    assert confined.get_landlock_version() == 0
