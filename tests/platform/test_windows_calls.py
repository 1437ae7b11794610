"""Calls of Windows' functions, recorded by a stand-in on any system: names, numbers and structures.

https://learn.microsoft.com/windows/win32/api has them. scripts/platform/test_windows runs the real ones.
"""

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.system import cpu, files, locks, memory, processes, terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a stand-in for Windows")
THIS_PROCESS = (1 << 64) - 1  # GetCurrentProcess's handle, -1


class Function:
    """Stand for one of Windows' functions: write down its arguments, and answer as a test wants."""

    def __init__(self, name: str, calls: list[Any], answer: Any):
        self.name, self._calls, self._answer, self.argtypes, self.restype = name, calls, answer, None, None

    def __call__(self, *arguments: Any) -> Any:
        plain = [getattr(each, "value", each) for each in arguments]
        self._calls.append((self.name, *(None if hasattr(each, "_obj") else each for each in plain)))
        return self._answer(*arguments) if callable(self._answer) else self._answer


class Windows:
    """Stand for Windows' libraries. Attributes: calls: of functions.  answers: by function, 1 where there is none."""

    def __init__(self) -> None:
        self.calls, self.answers, self.error, self.loaded = list[Any](), dict[str, Any](), 0, list[Any]()

    def __getattr__(self, name: str) -> Function:
        if name.startswith("_"):
            raise AttributeError(name)
        function = Function(name, self.calls, self.answers.get(name, 1))
        setattr(self, name, function)
        return function

    def load(self, name: str, **more: Any) -> "Windows":
        self.loaded.append((name, more))
        return self


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Windows:
    system = Windows()

    def failed(code: int) -> OSError:
        return OSError(code, "refused")

    console = SimpleNamespace(
        get_osfhandle=lambda descriptor: 1000 + descriptor,
        open_osfhandle=lambda handle, flags: system.calls.append(("open_osfhandle", handle, flags)) or 7,
        kbhit=lambda: system.calls.count("getwch") < 2, getwch=lambda: system.calls.append("getwch"),
    )  # fmt: skip
    for name, value in {
        "WinDLL": system.load, "windll": SimpleNamespace(kernel32=system), "WinError": failed,
        "get_last_error": lambda: system.error,
    }.items():  # fmt: skip
        monkeypatch.setattr(ctypes, name, value, raising=False)
    for name, value in {"O_BINARY": 0x8000, "O_NOINHERIT": 0x80}.items():
        monkeypatch.setattr(os, name, value, raising=False)
    monkeypatch.setitem(sys.modules, "msvcrt", console)
    monkeypatch.setattr(sys, "platform", "win32")
    return system


def test_libraries_keep_their_last_error(windows: Windows):
    """Without being told to, ctypes keeps no GetLastError."""
    files.load_kernel32(), memory.load_kernel32()
    assert windows.loaded == [("kernel32", {"use_last_error": True})] * 2


# ---- memory


@pytest.mark.parametrize("whole", [True, False])
def test_memory_is_reserved_committed_and_given_back(windows: Windows, whole: bool):
    page = memory.PAGE
    room = ctypes.create_string_buffer(8 * page)
    start = ctypes.addressof(room)
    windows.answers["VirtualAlloc"] = lambda address, *rest: address or start
    region = memory.MemoryRegion(8 * page, whole)
    reserve, commit, decommit, release = 0x2000, 0x1000, 0x4000, 0x8000
    assert region.address == start and region.is_whole == whole
    assert windows.calls == [("VirtualAlloc", None, 8 * page, reserve | commit * whole, 4)]
    windows.calls.clear()
    region.use(page, 3 * page)
    region.use(page, page)
    used = ("VirtualAlloc", start + page, 2 * page, commit, 4)
    assert windows.calls == [used] * (not whole)
    windows.calls.clear()
    region.give_back(page // 2, 3 * page + 1)
    region.give_back(page + 1, 2 * page - 1)
    assert windows.calls == [("VirtualFree", start + page, 2 * page, decommit), *[used] * whole]
    windows.calls.clear()
    del region
    gc.collect()
    assert windows.calls == [("VirtualFree", start, 0, release)]


def test_a_refused_allocation_raises_the_systems_error(windows: Windows):
    windows.answers |= {"VirtualAlloc": 0, "VirtualProtect": 0}
    windows.error = 1455
    for ask in (lambda: memory.allocate_virtual(0, 5, 1), lambda: memory.make_executable(5, 6)):
        with pytest.raises(OSError, match="refused") as error:
            ask()
        assert error.value.errno == 1455


def test_code_is_made_executable_and_not_writable(windows: Windows):
    memory.make_executable(4096, 100)
    assert windows.calls == [
        ("VirtualProtect", 4096, 100, 0x20, None), ("FlushInstructionCache", THIS_PROCESS, 4096, 100),
    ]  # fmt: skip


def test_a_mapped_file_is_read_ahead(windows: Windows):
    asked = list[Any]()
    windows.answers["PrefetchVirtualMemory"] = lambda process, count, span, flags: asked.append(
        (span._obj.address, span._obj.size)
    )
    memory.prefault("m.gguf", 4096, 100, 10)
    assert windows.calls == [("PrefetchVirtualMemory", THIS_PROCESS, 1, None, 0)] and asked == [(4096, 100)]
    assert ctypes.sizeof(memory.AddressRange) == 16


def test_available_memory_is_the_least_of_both_numbers(windows: Windows):
    def tell(status: Any) -> None:
        assert status._obj.length == ctypes.sizeof(status._obj) == 64
        status._obj.available, status._obj.available_commit = amounts

    windows.answers["GlobalMemoryStatusEx"] = tell
    for amounts in ((5, 7), (9, 6)):
        assert memory.get_available_memory() == min(amounts)


# ---- files

READ, WRITE = 0x80000000, 0x40000000
OPENED = [
    (os.O_RDONLY, READ, 3, 0), (os.O_WRONLY, WRITE, 3, 0), (os.O_RDWR, READ | WRITE, 3, 0),
    (os.O_RDWR | os.O_CREAT, READ | WRITE, 4, 0), (os.O_RDWR | os.O_CREAT | os.O_EXCL, READ | WRITE, 1, 0),
    (os.O_WRONLY | os.O_APPEND | os.O_CREAT, WRITE, 4, os.O_APPEND),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "access", "how", "kept"), OPENED)
def test_opened_files_may_be_renamed_meanwhile(windows: Windows, flags: int, access: int, how: int, kept: int):
    """Share by FILE_SHARE_READ, _WRITE and _DELETE; OPEN_EXISTING, OPEN_ALWAYS, CREATE_NEW; FILE_ATTRIBUTE_NORMAL."""
    windows.answers["CreateFileW"] = 55
    assert files.open_file("/x/y", flags) == 7
    assert windows.calls == [("CreateFileW", "/x/y", access, 7, None, how, 0x80, None),
                             ("open_osfhandle", 55, kept | os.O_BINARY | os.O_NOINHERIT)]  # fmt: skip


@pytest.mark.parametrize("handle", [None, THIS_PROCESS])
def test_a_file_that_cannot_be_opened_is_named(windows: Windows, monkeypatch, handle: int | None):
    def failed(code: int) -> OSError:
        error = FileNotFoundError(code, "not there")
        error.winerror = 2
        return error

    monkeypatch.setattr(ctypes, "WinError", failed)
    windows.answers["CreateFileW"], windows.error = handle, 2
    with pytest.raises(FileNotFoundError, match="not there") as error:
        files.open_file("/x/y", os.O_RDONLY)
    assert (error.value.filename, error.value.errno) == ("/x/y", 2)


@pytest.mark.parametrize(("taken", "error", "locked"), [(1, 0, True), (0, 33, False), (0, 5, True)])
def test_a_file_is_locked_behind_its_end(windows: Windows, taken: int, error: int, locked: bool):
    """Pass LOCKFILE_EXCLUSIVE_LOCK and _FAIL_IMMEDIATELY; ERROR_LOCK_VIOLATION means that another has it."""
    place = list[Any]()
    windows.answers["LockFileEx"] = lambda *given: place.append((given[5]._obj.low, given[5]._obj.high)) or taken
    windows.error = error
    assert locks.lock_file(3) is locked
    assert (ctypes.sizeof(locks.Overlapped), locks.Overlapped.low.offset) == (32, 16)
    assert windows.calls == [("LockFileEx", 1003, 3, 0, 1, 0, None)] and place == [(0, 0x7FFFFFFF)]


def test_the_change_time_of_a_file_is_read(windows: Windows):
    def tell(handle: int, kind: int, found: Any, size: int) -> int:
        found._obj.changed = 5
        return 1

    windows.answers |= {"GetFileInformationByHandleEx": tell, "CreateFileW": 55}
    assert files.get_change_time(3) == 500
    assert windows.calls == [("GetFileInformationByHandleEx", 1003, 0, None, 40)]
    windows.GetFileInformationByHandleEx._answer, windows.error = 0, 6
    with pytest.raises(OSError, match="refused"):
        files.get_change_time(3)


def test_a_claimed_name_is_a_mutex(windows: Windows):
    windows.answers["CreateMutexW"] = 9
    claim = locks.NameLock("n")
    assert windows.calls == [("CreateMutexW", None, 0, "Local\\n")]
    claim.close(), claim.close()
    assert windows.calls[1:] == [("CloseHandle", 9)]
    windows.error = 183  # ERROR_ALREADY_EXISTS
    with pytest.raises(FileExistsError):
        locks.NameLock("n")
    assert windows.calls[-1] == ("CloseHandle", 9)


@pytest.mark.parametrize("descriptor", [3, "/x/y"])
def test_the_version_of_a_file_includes_its_change(windows: Windows, monkeypatch, descriptor: object):
    """Take the change's time instead of st_ctime, which is not there."""
    state = SimpleNamespace(st_size=1, st_mtime_ns=2, st_ctime_ns=3)
    monkeypatch.setattr(files, "get_change_time", lambda place: (place == descriptor) * 4)
    monkeypatch.setattr(os, "stat", lambda place: state)
    assert files.get_file_version(descriptor) == (1, 2, 4)
    monkeypatch.setattr(sys, "platform", "linux")
    assert files.get_file_version(descriptor) == (1, 2, 3)


def test_bytes_are_read_and_written_at_a_place(windows: Windows, tmp_path):
    (tmp_path / "x").write_bytes(b"0123456789")
    descriptor = os.open(tmp_path / "x", os.O_RDWR)
    assert files.write_at(descriptor, memoryview(b"ab"), 3) == 2 and files.read_at(descriptor, 4, 2) == b"2ab5"
    os.close(descriptor)


def test_a_temporary_file_gets_a_name_of_its_own(windows: Windows, monkeypatch):
    names, asked = [b"a" * 6, b"b" * 6], list[Any]()

    def opened(path: str, flags: int) -> int:
        asked.append((path, flags))
        if len(asked) == 1:
            raise FileExistsError
        return 9

    monkeypatch.setattr(files, "open_file", opened)
    monkeypatch.setattr(os, "urandom", lambda count: names[len(asked)][:count])
    assert files.create_temporary_file("/f", "p-") == (9, "/f/p-626262626262.tmp")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    assert asked == [("/f/p-616161616161.tmp", flags), ("/f/p-626262626262.tmp", flags)]


@pytest.mark.parametrize(("version", "allowed"), [
    ((10, 0, 15063), True), ((10, 0, 26100), True), ((10, 0, 14393), False), ((6, 3, 9600), False),
])  # fmt: skip
def test_long_paths_are_allowed_since_2017(windows: Windows, monkeypatch, version: tuple[int, int, int], allowed: bool):
    """Set IsLongPathAwareProcess, the highest bit of the byte at 3."""
    block = ctypes.create_string_buffer(bytes([1, 2, 3, 4, 5]))
    windows.answers["RtlGetCurrentPeb"] = ctypes.addressof(block)
    monkeypatch.setattr(sys, "getwindowsversion", lambda: (*version, 2, ""), raising=False)
    files.allow_long_paths()
    assert block.raw[:5] == bytes([1, 2, 3, 4 | 0x80 * allowed, 5])


@pytest.mark.parametrize(("number", "winerror", "wanting"), [
    (12, 0, True), (22, 8, True), (22, 14, True), (22, 1455, True), (22, 5, False), (22, 0, False),
])  # fmt: skip
def test_windows_errors_about_memory_are_recognized(number: int, winerror: int, wanting: bool):
    """Recognize ENOMEM, ERROR_NOT_ENOUGH_MEMORY, ERROR_OUTOFMEMORY, ERROR_COMMITMENT_LIMIT."""
    error = OSError(number, "x")
    error.winerror = winerror
    assert memory.is_out_of_memory(error) == wanting
    assert not memory.is_out_of_memory(OSError(22, "x"))


def test_memory_for_code_is_committed_at_once(windows: Windows):
    room = ctypes.create_string_buffer(100)
    windows.answers["VirtualAlloc"] = ctypes.addressof(room)
    memory.allocate_code(100)
    assert windows.calls[0] == ("VirtualAlloc", None, 100, 0x3000, 4)


# ---- processes


def test_processes_are_slowed_started_and_killed(windows: Windows, monkeypatch):
    process = SimpleNamespace(_handle=5, pid=77, wait=lambda: windows.calls.append("wait"))
    processes.lower_priority(process)
    assert windows.calls == [("SetPriorityClass", 5, 0x4000)] and processes.get_detached_options() == {
        "creationflags": 0x200
    }
    monkeypatch.setenv("SYSTEMROOT", "C:\\W")
    assert processes.make_shell_arguments("a b") == '"C:\\W\\System32\\cmd.exe" /d /s /c "a b"'
    ran = list[Any]()
    monkeypatch.setattr(subprocess, "run", lambda words, **more: ran.append((words, more)))
    processes.kill_with_children(process)
    quietly = {"capture_output": True, "check": False}
    assert ran == [(["taskkill", "/F", "/T", "/PID", "77"], quietly)] and windows.calls[-1] == "wait"
    windows.calls.clear()
    processes.handle_bad_pages(99)
    assert windows.calls == [("AddVectoredExceptionHandler", 1, 99)]


class Process:
    """Stand for a subprocess.Popen that returns its input, or takes too long."""

    _handle = 5

    def __init__(self, returncode: int | None):
        self.returncode, self.killed = returncode, False

    def communicate(self, given: bytes = b"", patience: float | None = None) -> tuple[bytes, None]:
        if self.returncode is None and not self.killed:
            assert patience == 20.0
            raise subprocess.TimeoutExpired("x", 20.0)
        return b"got " + given, None

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("code", "came"), [(0, (b"got it", False)), (1, (b"got it", False)), (1816, (b"got it", True)), (None, (b"", True))]
)
def test_a_limited_process_runs_in_a_job(windows: Windows, monkeypatch, code: int | None, came: tuple):
    process, limits_set = Process(code), list[Any]()
    monkeypatch.setattr(subprocess, "Popen", lambda words, **more: process)

    def limits(job: Any, kind: int, given: Any, size: int) -> None:
        limits_set.append((given._obj.process_time, given._obj.flags, given._obj.process_memory, size))

    windows.answers |= {"CreateJobObjectW": 8, "SetInformationJobObject": limits}
    assert processes.run_limited(["x"], b"it", 3, 1000, 20.0) == came and process.killed == (code is None)
    flags = 0x2 | 0x100 | 0x400 | 0x2000  # PROCESS_TIME, PROCESS_MEMORY, DIE_ON_UNHANDLED_EXCEPTION, KILL_ON_JOB_CLOSE
    assert limits_set == [(30_000_000, flags, 1000, 144)]
    assert windows.calls == [("CreateJobObjectW", None, None), ("SetInformationJobObject", 8, 9, None, 144),
                             ("AssignProcessToJobObject", 8, 5), ("CloseHandle", 8)]  # fmt: skip


# ---- the terminal


class Stream:
    """Stand for a standard stream: a console or a file."""

    def __init__(self, number: int):
        self.number, self.encoding = number, ""

    def fileno(self) -> int:
        return self.number

    def reconfigure(self, encoding: str) -> None:
        self.encoding = encoding


@pytest.fixture
def consoles(windows: Windows) -> Callable[..., None]:
    """Return a function that makes streams of these numbers consoles, with their modes."""

    def make(modes: dict[int, int]) -> None:
        def mode(handle: Any, found: Any) -> int:
            found._obj.value = modes.get(handle.value - 1000, 0)
            return handle.value - 1000 in modes

        windows.answers["GetConsoleMode"] = mode

    return make


def test_consoles_get_escapes_and_utf_8(windows: Windows, consoles):
    consoles({0: 0x1F7, 1: 0x3})
    keys, screen, pipe = Stream(0), Stream(1), Stream(2)
    terminal.set_up_streams(keys, screen, pipe, None)
    changed = [call for call in windows.calls if not call[0].startswith("Get")]
    assert changed == [("SetConsoleMode", 1001, 0x7), ("SetConsoleOutputCP", 65001)]
    assert [stream.encoding for stream in (keys, screen, pipe)] == ["", "", "utf-8"]
    assert terminal.is_console(screen) and not terminal.is_console(pipe) and not terminal.is_console(None)
    assert terminal.supports_escapes(pipe) and not terminal.supports_escapes(screen)


def test_keys_are_read_raw_at_a_console(windows: Windows, consoles):
    consoles({0: 0x1F7})
    with terminal.use_raw_keys(Stream(0)) as can:
        assert can
        windows.calls.append("in the block")
    echo_and_lines = 0x4 | 0x2
    changed = [call for call in windows.calls if call[0] != "GetConsoleMode"]
    assert changed == [
        ("SetConsoleMode", 1000, 0x1F7 & ~echo_and_lines), "in the block", ("SetConsoleMode", 1000, 0x1F7),
    ]  # fmt: skip
    with terminal.use_raw_keys(Stream(3)) as can:
        assert not can
    terminal.discard_input(None)
    assert windows.calls.count("getwch") == 2


# ---- the processor


def test_cores_are_read_from_windows(windows: Windows):
    def affinity(process: Any, own: Any, system: Any) -> int:
        assert process.value == THIS_PROCESS
        own._obj.value = 0b101
        return 1

    windows.answers["GetProcessAffinityMask"] = affinity
    assert cpu.read_windows_affinity() == 0b101
    windows.GetProcessAffinityMask._answer = 0  # it has some of several groups
    assert cpu.read_windows_affinity() == 0
    content = b"0123456789"

    def records(relation: int, room: Any, size: Any) -> int:
        assert relation == 0
        if room is not None and size._obj.value == len(content):
            room[: len(content)] = content
            return 1
        size._obj.value = len(content)
        return 0

    windows.answers["GetLogicalProcessorInformationEx"] = records
    assert cpu.read_windows_cores() == content
    windows.GetLogicalProcessorInformationEx._answer = 0
    assert cpu.read_windows_cores() == b""


def test_features_of_a_processor_are_read_from_windows(windows: Windows, monkeypatch):
    """Ask for PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE and PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE."""
    windows.answers["IsProcessorFeaturePresent"] = lambda number: number == 43
    assert cpu.read_arm_features() == ["neon", "dotprod"]
    assert [call[1] for call in windows.calls] == [43, 66]
    names = {"VendorIdentifier": "V", "Identifier": "I", "ProcessorNameString": " P "}
    monkeypatch.setattr(cpu, "read_registry", names.get)
    lines = cpu.get_processor_key().decode().splitlines()
    assert lines == ["V", "I", " P ", "0" * 43 + "1" + "0" * 52] and cpu.get_processor_name() == "P"
    monkeypatch.setattr(cpu, "is_arm", lambda: True)
    assert cpu.get_processor_key() is None
