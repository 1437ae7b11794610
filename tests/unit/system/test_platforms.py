"""Test that differences between systems stay in localllm/system, one file per concern."""

import ast
import ctypes
import errno
import importlib.util
import mmap
import ntpath
import os
import re
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import pytest

from localllm.cli.interactive import slash_commands as chat_commands
from localllm.cli.options import shared as options
from localllm.errors import UsageError
from localllm.files import text_file
from localllm.kernels.build.machine_code import ELF, is_x86_64
from localllm.system import cpu, files, locks, memory, processes, terminal
from tests.test_layers import SOURCES

# Folders and locks of other systems are made up on one that has POSIX's names.
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX")
CONCERNS = {"control_groups", "cpu", "direct_reads", "files", "locks", "memory", "processes", "terminal"}
# Modules that a system lacks, and questions about which it is. `signal` and `mmap` are everywhere; some names are not.
MODULES = {"fcntl", "grp", "msvcrt", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty", "winreg", "_winapi"}
NAMES = re.compile(
    r"sys\.(platform|getwindowsversion)|os\.(name|uname)|platform\.(system|machine|uname|platform|release|processor)"
    r"|ctypes\.(windll|WinDLL|WinError|get_last_error|CDLL)|os\.(sched_\w+|p(read|write)v?|fork|get[e]?[ug]id|umask|link"
    r"|symlink|setpriority|nice|mkfifo|sysconf|statvfs|O_(CLOEXEC|NOFOLLOW|TMPFILE|BINARY|DIRECTORY|DIRECT)|startfile"
    r"|fsync|register_at_fork|W[A-Z]+|set_blocking)|mmap\.(MAP_|PROT_|MADV_)\w+|mmap\.PAGESIZE"
    r"|signal\.(SIG(BUS|XCPU|BREAK|WINCH|TSTP|CONT|HUP|PIPE|QUIT|USR[12])|pthread_kill|setitimer|alarm|siginterrupt)"
    r"|asyncio\.\w*Policy"
)
PLACES = re.compile(r"/proc/|/sys/|/dev/(fd|shm|tty)|XDG_|APPDATA|Library/")
# By the beginning of a module's name: what it may name, and why.
EXCEPTIONS: dict[str, tuple[str, str]] = {
    "localllm.services.hub.found_models": ("XDG_CACHE_HOME", "huggingface_hub reads it on every system"),
    "localllm.server.listener": (r"os\.umask", "a Unix socket is made with the permissions of its user alone"),
    "localllm.services.tools.built_in": ("APPDATA", "a variable that a command keeps"),
    "localllm.services.tools.confined": (".", "a script for Linux alone, which imports nothing"),
    "localllm.services.tools.confined_python": (".", "the same for Python; elsewhere it says why it cannot run"),
    "localllm.text.template_probe": (r"signal\.SIGKILL", "it ends the child that it has forked"),
}


def system_specific_lines(module: str, source: str) -> list[str]:
    """Return where a module asks which system it runs on, or uses what some systems lack."""
    lines, tree = [], ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "") in MODULES:
            names = [node.module or ""]
        elif isinstance(node, ast.Attribute) and NAMES.fullmatch(ast.unparse(node)):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if PLACES.search(node.value) and id(node) not in texts else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
            about = ast.unparse(node.args[0])
            names = [ast.unparse(node)] if about in ("os", "mmap", "signal", "sys", "fcntl") else []
        allowed, _ = EXCEPTIONS.get(module, ("(?!)", ""))
        lines += [f"{module} line {node.lineno}: {name}" for name in names if not re.search(allowed, name)]
    return lines


def test_only_the_system_package_asks_which_system_it_is():
    others = {module: source for module, source in SOURCES.items() if not module.startswith("localllm.system.")}
    assert [line for module, source in others.items() for line in system_specific_lines(module, source)] == []


def test_the_system_package_has_one_file_per_concern():
    rooms = {module.rpartition(".")[2] for module in SOURCES if module.startswith("localllm.system.")}
    assert rooms == CONCERNS


@pytest.mark.parametrize(
    "source",
    [
        "import fcntl",
        "def f():\n    from msvcrt import locking",
        "import sys\nif sys.platform == 'win32': pass",
        "import os\nfd = os.open('x', os.O_RDONLY | os.O_CLOEXEC)",
        "text = open('/proc/meminfo').read()",
        "import os\nif hasattr(os, 'fork'): pass",
        "import mmap\nflags = mmap.MAP_PRIVATE",
        "import ctypes\nlibc = ctypes.CDLL(None)",
    ],
)
def test_a_system_specific_line_is_detected(source: str):
    assert len(system_specific_lines("localllm.somewhere", source)) == 1


# ---- what can be seen of other systems from here; scripts/platform/test_windows runs the rest


def core(kind: int, *masks: tuple[int, int]) -> bytes:
    """Return a core's GetLogicalProcessorInformationEx record: EfficiencyClass, processors and group."""
    groups = b"".join(struct.pack("<QH6x", mask, group) for mask, group in masks)
    return struct.pack("<IIBB20xH", 0, 32 + len(groups), 1, kind, len(masks)) + groups


CACHE = struct.pack("<II", 2, 80) + bytes(72)  # of another relation
HYBRID = core(1, (0b11, 0)) + CACHE + core(1, (0b1100, 0)) + core(0, (0b10000, 0)) + core(0, (0b100000, 0))


@pytest.mark.parametrize(
    ("content", "affinity", "cores"),
    [
        (HYBRID, 0b111111, 4),
        (HYBRID, 0b000011, 1),
        (HYBRID, 0b110000, 2),
        (HYBRID, 0b010100, 2),
        (HYBRID, 0b010001, 2),
        (HYBRID, 0, 4),  # of several groups: all are allowed
        (core(0, (1, 0)) + core(0, (1, 1)), 0, 2),
        (core(0, (1, 0)) + core(0, (1, 1)), 1, 1),
        (CACHE, 1, 0),
        (b"", 1, 0),
    ],
)
def test_cores_of_windows_are_counted_within_the_affinity(content: bytes, affinity: int, cores: int):
    assert cpu.count_cores(content, affinity) == cores


@pytest.mark.parametrize(
    ("name", "is_possible"),
    [
        *((name, True) for name in ("model.gguf", "console.gguf", "com10", "ü" * 255, ".hidden", "a b", "nul-1")),
        *((name, False) for name in ("CON", "con.gguf", "nul", "Com1.txt", "LPT¹", "a:b", "a?", "a.", "a ", "a\tb")),
        ("n" * 256, False),
        ("😀" * 128, False),  # two units each
    ],
)
def test_file_names_forbidden_by_windows_are_detected(monkeypatch, name: str, is_possible: bool):
    monkeypatch.setattr(sys, "platform", "win32")
    assert (files.find_name_problem(name) is None) == is_possible
    monkeypatch.setattr(sys, "platform", "linux")
    assert (files.find_name_problem(name) is None) == (len(name.encode()) <= 255)


@posix
@pytest.mark.parametrize(
    ("system", "environment", "folders"),
    [
        ("linux", {}, [".local/share/localllm", ".local/state/localllm", ".config/localllm", ".cache/localllm"]),
        ("darwin", {}, ["Library/Application Support/localllm"] * 2 + [".config/localllm", "Library/Caches/localllm"]),
        ("win32", {}, ["AppData/Local/localllm"] * 2 + ["AppData/Roaming/localllm", "AppData/Local/localllm/cache"]),
        ("win32", {"LOCALAPPDATA": "/l", "APPDATA": "/r"}, ["/l/localllm"] * 2 + ["/r/localllm", "/l/localllm/cache"]),
        (
            "win32",
            {"XDG_CACHE_HOME": "/c"},
            ["AppData/Local/localllm"] * 2 + ["AppData/Roaming/localllm", "/c/localllm"],
        ),
    ],
)
def test_folders_follow_the_conventions_of_each_system(
    monkeypatch, tmp_path, system: str, environment: dict[str, str], folders: list[str]
):
    for name in ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "APPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", system)
    assert [files.get_user_folder(kind) for kind in ("data", "state", "config", "cache")] == [
        tmp_path / f for f in folders
    ]


def test_only_one_process_holds_a_name(monkeypatch, tmp_path):
    """Also where a locked file represents it."""
    for system in {sys.platform} | ({"darwin"} if sys.platform != "win32" else set()):
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        first = locks.NameLock("a name of these tests")
        with pytest.raises(FileExistsError):
            locks.NameLock("a name of these tests")
        locks.NameLock("another name of these tests").close()
        first.close()
        locks.NameLock("a name of these tests").close()


def test_a_change_is_detected_even_if_times_are_restored(tmp_path):
    """Check a path and an open file on every system; Windows' structure follows its documentation."""
    path = tmp_path / "ä file"
    path.write_bytes(b"a")
    first, state = files.get_file_version(path), path.stat()
    assert files.get_file_version(path) == first and first[:2] == (1, state.st_mtime_ns)
    time.sleep(0.05)
    path.write_bytes(b"b")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    second = files.get_file_version(path)
    assert second[:2] == first[:2] and second[2] > first[2]
    with open(path, "rb") as file:
        assert files.get_file_version(file.fileno()) == second
    with pytest.raises(FileNotFoundError):
        files.get_file_version(tmp_path / "none")
    assert (ctypes.sizeof(files.BasicInfo), files.BasicInfo.changed.offset) == (40, 24)


@posix
def test_macos_flushes_the_disks_cache(monkeypatch, tmp_path):
    """Fall back to fsync where that fails, as on a network drive."""
    asked: list[object] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: asked.append("fsync"))
    for fails, expected in ((False, [51]), (True, [51, "fsync"])):

        def control(descriptor: int, command: int, fails: bool = fails) -> None:
            asked.append(command)
            if fails:
                raise OSError

        monkeypatch.setattr("fcntl.fcntl", control)
        asked.clear()
        files.sync_file(0)
        assert asked == expected


@posix
@pytest.mark.parametrize(("owner", "mode", "private"), [
    (7, 0o700, True), (7, 0o755, True), (7, 0o775, False), (7, 0o702, False), (0, 0o755, True), (0, 0o722, False),
    (8, 0o700, False), (8, 0o755, False),
])  # fmt: skip
def test_private_folders_are_recognized(monkeypatch, owner: int, mode: int, private: bool):
    """Accept those of user 7 or the system that nobody else can write."""
    there = SimpleNamespace(st_uid=owner, st_mode=mode)
    with monkeypatch.context() as patch:
        patch.setattr(files, "os", SimpleNamespace(stat=lambda place: there, geteuid=lambda: 7))
        assert files.is_private(3) == private


def test_paths_follow_the_conventions_of_windows(monkeypatch, tmp_path):
    """Complete them by tab in a chat, and find a template file without a suffix."""
    (tmp_path / "notes.txt").write_text("")
    asked = []
    scandir = lambda folder: asked.append(folder) or os.scandir(tmp_path)  # noqa: E731
    known = SimpleNamespace(path=ntpath, scandir=scandir, fsdecode=os.fsdecode)
    for module in (chat_commands, text_file):
        monkeypatch.setattr(module, "os", known)
    assert chat_commands.list_paths("C:\\texts\\no") == ["C:\\texts\\notes.txt"] and asked == ["C:\\texts\\"]
    with pytest.raises(UsageError, match="template"):
        options.read_template("C:\\texts\\template")
    assert options.read_template("chatml") == "chatml"


def test_a_closed_pipe_is_recognized(monkeypatch):
    invalid = OSError(errno.EINVAL, "Invalid argument")
    monkeypatch.setattr(sys, "platform", "linux")
    assert terminal.is_reader_gone(BrokenPipeError()) and not terminal.is_reader_gone(invalid)
    monkeypatch.setattr(sys, "platform", "win32")
    assert terminal.is_reader_gone(BrokenPipeError()) and terminal.is_reader_gone(invalid)
    assert not terminal.is_reader_gone(OSError(errno.EINVAL, "Invalid argument", "a:b"))  # a name that cannot be
    assert not terminal.is_reader_gone(OSError(errno.ENOSPC, "No space left on device"))


def test_ctrl_break_ends_a_server(monkeypatch):
    """Treat it like SIGTERM, and restore the handler afterwards."""
    pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
    from localllm.server.http import ClientLimits
    from localllm.server.listener import ShutdownOptions, create_listener

    number = signal.SIGBREAK if sys.platform == "win32" else signal.SIGUSR1
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(signal, "SIGBREAK", number, raising=False)
    before = signal.getsignal(number)

    async def app(scope: object, receive: object, send: object) -> None:
        """Answer nothing."""

    server = create_listener(app, ClientLimits(1), ShutdownOptions(0, lambda: None, print))
    with server.capture_signals():
        signal.raise_signal(number)
    assert server.should_exit and server.stopped_by == number and signal.getsignal(number) is before


BAD_PAGE = """
import ctypes
from localllm.kernels.build.faults import end_on_bus_error
end_on_bus_error("a model")
for code in (0xE0000001, 0xC0000006):  # another exception, and EXCEPTION_IN_PAGE_ERROR
    try:
        ctypes.windll.kernel32.RaiseException(code, 0, 0, None)
    except OSError:
        print("went on", flush=True)
"""


@pytest.mark.skipif(sys.platform != "win32", reason="Windows only")
def test_an_unreadable_page_ends_the_process_on_windows():
    done = subprocess.run([sys.executable, "-c", BAD_PAGE], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (3, ["went", "on"]), done.stderr
    assert done.stderr.startswith("localllm: error: a model: the file got shorter") and done.stderr.count("\n") == 1


def test_object_files_of_windows_are_elf(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert cpu.get_object_triple("x86_64-unknown-linux-gnu") == "x86_64-unknown-linux-gnu"
    monkeypatch.setattr(sys, "platform", "win32")
    assert cpu.get_object_triple("x86_64-pc-windows-msvc") == "x86_64-pc-windows-msvc-elf"
    assert cpu.get_object_triple("x86_64-pc-windows-msvc-elf") == "x86_64-pc-windows-msvc-elf"


def test_large_stack_frames_of_windows_are_probed():
    """Probe page by page, use Windows' calling convention, and write ELF."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "x86_64-pc-windows-msvc-elf"
    machine = llvm.Target.from_triple(triple).create_target_machine(reloc="pic", codemodel="small")
    source = "declare void @use(ptr, i64)\ndefine void @f(i64 %a, i64 %b) {\n  %x = alloca [9000 x i8]\n"
    module = llvm.parse_assembly(
        f'target triple = "{triple}"\n{source}  call void @use(ptr %x, i64 %b)\n  ret void\n}}'
    )
    assert machine.emit_object(module).startswith(ELF) and is_x86_64(machine.emit_object(module))
    text = machine.emit_assembly(module)
    assert "__chkstk" in text and "%rcx" in text and ".seh" not in text


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="the system is told nothing")
@pytest.mark.parametrize(
    ("start", "end", "released"),
    [(0, 2, (0, 2)), (3, 7, (3, 4)), (2.5, 7.5, (3, 4)), (2.1, 2.9, None), (2.5, 3.5, None), (5, 5, None)],
)
def test_only_whole_pages_are_released(start: float, end: float, released: tuple[int, int] | None):
    """Release from the first page boundary in the range to the last one."""
    calls = []
    data = SimpleNamespace(madvise=lambda *call: calls.append(call))
    memory.release_pages(data, int(start * memory.PAGE), int(end * memory.PAGE))
    expected = [(mmap.MADV_DONTNEED, *(memory.PAGE * number for number in released))] if released else []
    assert calls == expected


def test_a_windows_console_is_recognized_by_its_mode(monkeypatch: pytest.MonkeyPatch):
    """Tell it from NUL, which claims to be a terminal."""
    for mode in (None, 0, 7):
        monkeypatch.setattr(terminal, "get_console_mode", lambda stream, mode=mode: mode)
        with monkeypatch.context() as there:
            there.setattr(sys, "platform", "win32")
            is_console = terminal.is_console(sys.stdout)
        assert is_console == (mode is not None)


@pytest.mark.parametrize(("system", "name", "problem"), [
    ("win32", "a?", "a file name cannot contain '?' on Windows"),
    ("win32", "aux.txt", "this name is reserved for a device on Windows"),
    ("win32", "a ", "a file name cannot end in a dot or a space on Windows"),
    ("win32", "n" * 256, "a file name has at most 255 characters"), ("win32", "n" * 255, None),
    ("win32", "\U0001f600" * 127, None), ("linux", "n" * 255, None), ("linux", "ü" * 127, None),
    ("linux", "ü" * 128, "a file name has at most 255 bytes"),
    ("darwin", "n" * 256, "a file name has at most 255 bytes"), ("linux", "aux", None),
])  # fmt: skip
def test_the_problem_of_a_file_name_is_explained(
    monkeypatch: pytest.MonkeyPatch, system: str, name: str, problem: str | None
):
    monkeypatch.setattr(sys, "platform", system)
    assert files.find_name_problem(name) == problem


@pytest.mark.parametrize(("system", "fails", "there", "slept", "problem"), [
    ("linux", 0, True, 0, None), ("linux", 1, True, 0, "not permitted"), ("win32", 3, True, 3, None),
    ("win32", 99, True, 20, "the file is open in this or another program"),
    ("win32", 99, False, 20, "not permitted"),
])  # fmt: skip
def test_replacing_a_file_is_retried_on_windows(monkeypatch, system, fails, there, slept, problem):
    """Retry for a second, each twentieth of it."""
    now, refusals = [0.0], [PermissionError(errno.EACCES, "not permitted", "x")] * fails

    def replace(path: str, target: str) -> None:
        assert (path, target) == ("a", "b")
        if refusals:
            raise refusals.pop()

    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", system)
        path = SimpleNamespace(exists=lambda path: there and path == "b")
        patch.setattr(files, "os", SimpleNamespace(replace=replace, path=path, fspath=str))
        sleep = lambda seconds: now.append(now[-1] + seconds)  # noqa: E731
        patch.setattr(files, "time", SimpleNamespace(monotonic=lambda: round(now[-1], 6), sleep=sleep))
        if problem is None:
            files.replace_file("a", "b")
        else:
            with pytest.raises(PermissionError, match=problem) as caught:
                files.replace_file("a", "b")
            assert caught.value.filename == ("b" if problem.startswith("the file is open") else "x")
    assert len(now) - 1 == slept


@posix
def test_posix_opens_own_files_without_links_and_pipes(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Report the space that a user may still write."""
    (tmp_path / "file").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        files.open_without_links(tmp_path / "link", os.O_RDONLY)
    os.close(files.open_without_links(tmp_path / "pipe", os.O_RDONLY))  # at once, though nobody writes to it
    descriptor = files.open_file(tmp_path / "link", os.O_RDWR)
    try:
        assert not os.get_inheritable(descriptor)
        assert files.read_at(descriptor, 3, 4) == b"456" and files.write_at(descriptor, memoryview(b"ab"), 8) == 2
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0 and os.read(descriptor, 99) == b"01234567ab"
    finally:
        os.close(descriptor)
    room = SimpleNamespace(f_bsize=1000, f_frsize=7, f_blocks=99, f_bfree=50, f_bavail=30)
    monkeypatch.setattr(files.os, "statvfs", lambda folder: room)
    assert files.get_free_bytes(tmp_path) == 210


@posix
def test_new_files_have_the_usual_permissions(monkeypatch: pytest.MonkeyPatch, tmp_path):
    mask = os.umask(0o027)
    try:
        descriptor, path = files.create_temporary_file(str(tmp_path), ".part-")
        os.close(descriptor)
        assert os.stat(path).st_mode & 0o777 == 0o640 and os.umask(0o027) == 0o027
    finally:
        os.umask(mask)
    assert re.fullmatch(r"\.part-.+\.tmp", os.path.basename(path)) and os.path.dirname(path) == str(tmp_path)
    closed, nowhere = [], 1 << 30  # no process has so many open
    monkeypatch.setattr(files.os, "close", closed.append)
    monkeypatch.setattr(files.os, "open", lambda path, flags: nowhere)
    for call, arguments in ((files.sync_folder, ["/f"]), (files.link_nameless_file, [5, "/f/x"])):
        with pytest.raises(OSError):  # the number is of no folder
            call(*arguments)
    assert closed == [nowhere, nowhere]


@posix
def test_locks_are_ignored_where_unsupported(monkeypatch: pytest.MonkeyPatch):
    for error, locked in ((None, True), (BlockingIOError(), False), (OSError(), True)):

        def flock(descriptor: int, how: int, error: OSError | None = error) -> None:
            assert (descriptor, how) == (3, 2 | 4)  # LOCK_EX and LOCK_NB
            if error:
                raise error

        monkeypatch.setattr("fcntl.flock", flock)
        assert locks.lock_file(3) is locked


@posix
def test_a_name_in_an_unwritable_folder_is_granted(monkeypatch: pytest.MonkeyPatch, tmp_path):
    (tmp_path / "localllm").write_bytes(b"")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for claim in (locks.NameLock("a"), locks.NameLock("a")):
        claim.close()
        claim.close()


@posix
@pytest.mark.parametrize(("pages", "soft", "allowed"), [
    (b"10 5 1", -1, True), (b"10 5 1", 10 * 4096 + 300, True), (b"10 5 1", 10 * 4096 + 299, False), (b"", 5, True),
])  # fmt: skip
def test_limits_of_a_template_probe_are_set(monkeypatch: pytest.MonkeyPatch, pages: bytes, soft: int, allowed: bool):
    """Add a margin to the processor time and memory that the process has used."""
    import resource
    from io import BytesIO

    asked: list[Any] = []
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_utime=1.7, ru_stime=0.6))
    monkeypatch.setattr(resource, "getpagesize", lambda: 4096)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY if soft < 0 else soft, 1 << 40))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: asked.append(limit))
    monkeypatch.setattr(processes, "open", lambda path, mode: BytesIO(pages), raising=False)
    assert processes.limit_process(2, 300) is allowed
    usual = [(resource.RLIMIT_CORE, (0, 0)), (resource.RLIMIT_CPU, (5, 5))]
    memory_too = [(resource.RLIMIT_AS, (10 * 4096 + 300, 1 << 40))] if allowed and pages else []
    assert asked == usual + memory_too


@posix
def test_the_end_of_a_forked_process_is_reported():
    ends = [signal.SIGXCPU, signal.SIGKILL, signal.SIGSEGV, 0, int(signal.SIGKILL) << 8]  # the last two by themselves
    assert [processes.was_stopped(int(status)) for status in ends] == [True, True, False, False, False]


@posix
def test_ending_a_finished_process_is_no_error(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    process = SimpleNamespace(pid=12, wait=lambda: asked.append("wait"))
    for error in (None, ProcessLookupError()):

        def ask(*arguments: object, error: OSError | None = error) -> None:
            asked.append(arguments)
            if error:
                raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, "setpriority", ask)
            patch.setattr(os, "killpg", ask)
            processes.lower_priority(process)
            processes.kill_with_children(process)
        assert asked == [(os.PRIO_PROCESS, 12, 10), (12, signal.SIGKILL), "wait"]
        asked.clear()
    monkeypatch.setattr(signal, "pthread_kill", lambda *arguments: asked.append(arguments))
    processes.interrupt_main()
    monkeypatch.setattr(os, "register_at_fork", lambda **calls: asked.append(calls))
    processes.register_after_fork(print)
    assert asked == [(threading.main_thread().ident, signal.SIGINT), {"after_in_child": print}]
    assert processes.make_shell_arguments("a b") == ["/bin/sh", "-c", "a b"] and processes.get_detached_options() == {
        "process_group": 0
    }
    assert processes.can_fork() and processes.can_handle_in_loop() and processes.can_reuse_address()


@posix
def test_raw_keys_are_read_unseen_and_the_terminal_restored():
    """Discard earlier keys on request."""
    import pty
    import termios

    master, slave = pty.openpty()
    with os.fdopen(slave, "rb", buffering=0) as keyboard:
        before = termios.tcgetattr(slave)
        with pytest.raises(ZeroDivisionError), terminal.use_raw_keys(keyboard) as can:
            now = termios.tcgetattr(slave)
            expected = [*before]
            expected[0] &= ~(termios.ICRNL | termios.INLCR)
            expected[3] &= ~(termios.ECHO | termios.ICANON)
            assert can and now[:6] == expected[:6] and expected[0] != before[0] and expected[3] != before[3]
            os.write(master, b"\r")
            assert os.read(slave, 9) == b"\r"
            os.write(master, b"t")
            select.select([slave], [], [])
            terminal.discard_input(keyboard)
            os.write(master, b"x")
            assert os.read(slave, 9) == b"x"
            raise ZeroDivisionError
        assert termios.tcgetattr(slave) == before
    os.close(master)
    with open(os.devnull, "rb") as nothing, terminal.use_raw_keys(nothing) as can:
        assert not can
        terminal.discard_input(nothing)


# ---- memory ---------------------------------------------------------------------------------------------------------


def set_memory_files(monkeypatch: pytest.MonkeyPatch, known: dict[str, str]) -> None:
    def read(path: str) -> str:
        if path not in known:
            raise FileNotFoundError
        return known[path]

    monkeypatch.setattr(memory, "Path", lambda path: SimpleNamespace(read_text=lambda encoding: read(path)))


@pytest.mark.parametrize(
    ("known", "size"),
    [
        ({}, sys.maxsize),
        ({"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   7 kB\n"}, 7168),
        ({"/proc/meminfo": "MemFree: 7 kB\nxMemAvailable: 7 kB"}, sys.maxsize),
    ],
)
def test_available_memory_of_linux_is_read(monkeypatch: pytest.MonkeyPatch, known: dict[str, str], size: int):
    """Take the least of the free memory and the groups' limits."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(memory, "read_memory_left", lambda: sys.maxsize)
    set_memory_files(monkeypatch, known)
    assert memory.get_available_memory() == size
    monkeypatch.setattr(memory, "read_memory_left", lambda: 100)
    assert memory.get_available_memory() == 100


def test_used_memory_is_subtracted_from_a_limit(monkeypatch: pytest.MonkeyPatch):
    set_memory_files(monkeypatch, {"/proc/self/status": "VmData:\t       3 kB\n"})
    assert memory.get_room_below(10_000, "VmData") == 10_000 - 3 * 1024
    assert memory.get_room_below(10_000, "VmSize") == 10_000 and memory.get_room_below(sys.maxsize, "") == sys.maxsize


@pytest.mark.parametrize(("known", "size"), [
    ({"hw.memsize": 1000, "kern.memorystatus_level": 37}, 370), ({"hw.memsize": 1000}, sys.maxsize), ({}, sys.maxsize),
])  # fmt: skip
def test_available_memory_of_macos_is_read(monkeypatch: pytest.MonkeyPatch, known: dict[str, int], size: int):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(memory, "read_sysctl", lambda name: known.get(name, 0))
    assert memory.get_available_memory() == size


@posix
def test_the_remaining_address_space_is_read(monkeypatch: pytest.MonkeyPatch):
    import resource

    set_memory_files(monkeypatch, {"/proc/self/status": "VmPeak:\t 9 kB\nVmSize:\t       3 kB\n"})
    for soft, limit, room in ((10_000, 10_000, 10_000 - 3072), (resource.RLIM_INFINITY, sys.maxsize, sys.maxsize)):
        monkeypatch.setattr(resource, "getrlimit", lambda what, soft=soft: ({resource.RLIMIT_AS: soft}[what], 99_999))
        assert (memory.get_address_limit(), memory.get_address_room()) == (limit, room)
    set_memory_files(monkeypatch, {})
    monkeypatch.setattr(memory, "get_address_limit", lambda: 10_000)
    assert memory.get_address_room() == 10_000


@pytest.mark.parametrize(("system", "can"), [("linux", True), ("win32", True), ("darwin", False)])
def test_prefault_and_trim_exist_on_each_system(monkeypatch: pytest.MonkeyPatch, system: str, can: bool):
    asked: list[Any] = []
    library = SimpleNamespace(mallopt=lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(memory, "ctypes", SimpleNamespace(CDLL=lambda name: library))
    assert memory.can_prefault() == can
    memory.lower_mmap_threshold(12345)
    assert asked == ([(-3, 12345)] if system == "linux" else [])
    del library.mallopt  # of another C library
    memory.lower_mmap_threshold(12345)


@pytest.mark.parametrize(
    ("there", "fails", "mapped"),
    [(True, None, [(100, 4), (104, 4), (108, 2)]), (True, 104, [(100, 4), (104, 4)]), (False, None, [])],
)
def test_pages_are_prefaulted_in_steps(monkeypatch: pytest.MonkeyPatch, there: bool, fails: Any, mapped: list[Any]):
    asked: list[Any] = []

    def advise(*arguments: int) -> int:
        asked.append(arguments)
        return -1 if arguments[0] == fails else 0

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(memory, "is_cached", lambda path, size: {("m.gguf", 10): there}[path, size])
    known = SimpleNamespace(CDLL=lambda name: SimpleNamespace(madvise=advise), c_void_p=1, c_size_t=2, c_int=3)
    monkeypatch.setattr(memory, "ctypes", known)
    memory.prefault("m.gguf", 100, 10, 4)
    assert asked == [(*piece, 22) for piece in mapped] and advise.argtypes == [1, 2, 3]


@pytest.mark.parametrize("missing", [None, 6300])
def test_samples_tell_whether_a_file_is_cached(monkeypatch: pytest.MonkeyPatch, missing: int | None):
    asked: list[Any] = []

    def read(file: int, buffers: list[bytearray], position: int, how: str) -> None:
        asked.append((file, [len(buffer) for buffer in buffers], position, how))
        if position == missing:
            raise BlockingIOError

    monkeypatch.setattr(memory, "os", SimpleNamespace(
        open=lambda *arguments: {("m.gguf", 0): 7}[arguments], O_RDONLY=0, preadv=read, RWF_NOWAIT="at once",
        close=asked.append,
    ))  # fmt: skip
    assert memory.is_cached("m.gguf", 6400) == (missing is None)
    assert asked == [*((7, [1], 100 * number, "at once") for number in range(64)), 7]


@posix
def test_returned_pages_are_zero(monkeypatch: pytest.MonkeyPatch):
    """Return whole pages on every system; only Windows must commit others before their use."""
    page = memory.PAGE
    for system in (sys.platform, "darwin"):
        region = memory.MemoryRegion(4 * page, whole=False)
        region.buffer[:] = b"x" * 4 * page
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", system)
            region.give_back(page - 1, 3 * page)
            region.give_back(3 * page + 1, 4 * page)
            region.give_back(0, page - 1)
            region.use(0, 4 * page)
        assert region.is_whole and len(region.buffer) == 4 * page
        assert region.buffer[:] == b"x" * page + bytes(2 * page) + b"x" * page
    monkeypatch.setattr(memory.ctypes, "get_errno", lambda: errno.ENOMEM)

    def refuse(*arguments: int) -> int:
        return -1

    library = SimpleNamespace(mmap=refuse, mprotect=refuse)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name, use_errno: library)
    for change in (memory.replace_pages, memory.make_executable):
        with pytest.raises(OSError) as error:
            change(page, page)
        assert error.value.errno == errno.ENOMEM and error.value.strerror == os.strerror(errno.ENOMEM)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_huge_pages_are_optional():
    asked: list[int] = []
    memory.prefer_huge_pages(SimpleNamespace(madvise=asked.append))
    assert asked == [mmap.MADV_HUGEPAGE]

    def refuse(advice: int) -> None:
        raise OSError

    memory.prefer_huge_pages(SimpleNamespace(madvise=refuse))


@pytest.mark.parametrize(
    ("system", "machine", "line"),
    [("darwin", "arm64", 128), ("darwin", "x86_64", 64), ("linux", "aarch64", 64), ("win32", "ARM64", 64)],
)
def test_the_cache_line_size_is_known(monkeypatch: pytest.MonkeyPatch, system: str, machine: str, line: int):
    spec = importlib.util.spec_from_file_location("another_cpu", cpu.__file__)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    spec.loader.exec_module(module)
    assert machine and line == module.CACHE_LINE


# ---- functions of the system ----------------------------------------------------------------------------------------


class Library:
    """A library whose functions record their calls; those a system lacks are None or missing."""

    def __init__(self, called: list[Any], lacks: tuple[str, ...] = ()):
        self.called, self.lacks = called, lacks

    def __getattr__(self, name: str) -> Any:
        if name in self.lacks:
            raise AttributeError(name)

        def call(*arguments: Any) -> None:
            self.called.append((name, *arguments))

        call.name = name
        setattr(self, name, call)
        return call


def fake_ctypes(libraries: dict[Any, Any]) -> SimpleNamespace:
    """Return a stand-in for ctypes; an address is a name."""

    def opened(name: Any) -> Any:
        if name not in libraries:
            raise OSError
        return libraries[name]

    return SimpleNamespace(CDLL=opened, WinDLL=opened, c_void_p=lambda address: ("at", address), c_int=3, c_uint32=4,
                           cast=lambda function, kind: SimpleNamespace(value=function.name))  # fmt: skip


@pytest.mark.parametrize(
    ("system", "library", "names"),
    [
        ("linux", None, "sched_yield pthread_mutex_lock pthread_mutex_unlock pthread_cond_wait pthread_cond_broadcast"),
        ("win32", "kernel32", "SwitchToThread AcquireSRWLockExclusive ReleaseSRWLockExclusive "
                              "SleepConditionVariableSRW WakeAllConditionVariable"),
    ],
)  # fmt: skip
def test_wait_functions_of_each_system_are_found(
    monkeypatch: pytest.MonkeyPatch, system: str, library: str | None, names: str
):
    """Initialize Windows' locks by zeros."""
    called: list[Any] = []
    monkeypatch.setattr(processes, "ctypes", fake_ctypes({library: Library(called)}))
    monkeypatch.setattr(sys, "platform", system)
    assert processes.get_waiting_functions() == names.split()
    processes.init_waiting((5, 6), 7)
    initialized = [
        (f"pthread_{kind}_init", ("at", place), None) for kind, place in (("mutex", 5), ("mutex", 6), ("cond", 7))
    ]
    assert called == ([] if system == "win32" else initialized)
    monkeypatch.setattr(processes.ctypes, "cast", lambda function, kind: SimpleNamespace(value=None))
    assert processes.get_waiting_functions() == [0] * 5


@pytest.mark.parametrize(
    ("system", "libraries", "address"),
    [
        ("linux", {None: Library([]), "libm.so.6": Library([], ("expf",))}, "expf"),
        ("linux", {None: Library([], ("expf",)), "libm.so.6": Library([])}, "expf"),
        ("linux", {None: Library([], ("expf",))}, None),
        ("linux", {"ucrtbase": Library([])}, None),
        ("win32", {None: Library([])}, None),
        *(("win32", {name: Library([])}, "expf") for name in ("ucrtbase", "ntdll", "kernel32", "vcruntime140")),
    ],
)
def test_a_function_is_taken_from_the_first_library_that_has_it(
    monkeypatch: pytest.MonkeyPatch, system: str, libraries: Any, address: str | None
):
    """Skip missing libraries."""
    monkeypatch.setattr(processes, "ctypes", fake_ctypes(libraries))
    monkeypatch.setattr(sys, "platform", system)
    assert processes.find_function_address.__wrapped__("expf") == address


def test_a_library_is_opened_by_its_name_on_each_system(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "ctypes", fake_ctypes({"libcuda.so.1": "of Linux", "nvcuda": "of Windows"}))
    for system, library in (("linux", "of Linux"), ("win32", "of Windows")):
        monkeypatch.setattr(sys, "platform", system)
        assert processes.load_library("libcuda.so.1", "nvcuda") == library


@posix
def test_termination_signals_are_handled_and_restored(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(processes, "list_fatal_signals", lambda: [signal.SIGTERM, signal.SIGHUP])
    processes.handle_termination(print)
    assert asked == [(signal.SIGTERM, print), (signal.SIGHUP, print)]
    processes.restore_termination()
    assert asked[2:] == [(signal.SIGTERM, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)]
    asked.clear()
    monkeypatch.setattr(processes, "ctypes", fake_ctypes({None: Library(asked)}))
    processes.handle_bad_pages(99)
    assert asked == [("signal", int(signal.SIGBUS), 99)]
    monkeypatch.delattr(signal, "pthread_kill")
    monkeypatch.setattr(processes._thread, "interrupt_main", lambda: asked.append("interrupted"))
    processes.interrupt_main()
    assert asked[1:] == ["interrupted"]


def test_the_bad_page_handler_fits_the_system():
    windows = sys.platform == "win32"
    assert (processes.WINDOWS_HANDLER if windows else processes.POSIX_HANDLER) == processes.BAD_PAGE_HANDLER
    assert "icmp eq i32 %code, -1073741818\n" in processes.WINDOWS_HANDLER  # EXCEPTION_IN_PAGE_ERROR
