"""Processes and threads: signals, subprocesses, waiting, and functions of system libraries."""

import _thread
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import IO, TYPE_CHECKING, NoReturn, TypedDict

if TYPE_CHECKING:
    from subprocess import Popen
    from types import FrameType


BACKGROUND = 10  # niceness of background processes
BELOW_NORMAL = 0x4000  # Windows: BELOW_NORMAL_PRIORITY_CLASS
TIME_LIMIT_EXIT_CODE = (
    1816  # Windows: exit code of a process that exceeded its job's time limit, ERROR_NOT_ENOUGH_QUOTA
)
PAGE_ERROR = 0xC0000006  # Windows: EXCEPTION_IN_PAGE_ERROR

# LLVM IR of the handler for `handle_bad_pages`, which writes @length bytes of @message to stderr and ends the process.
POSIX_HANDLER = """
declare i64 @write(i32, ptr, i64)
declare void @_exit(i32)
declare i32 @pause()

define void @handle(i32 %signal) {
  %length = atomicrmw xchg ptr @length, i64 0 seq_cst
  %is_first = icmp ne i64 %length, 0
  br i1 %is_first, label %tell, label %wait

tell:
  %written = call i64 @write(i32 2, ptr @message, i64 %length)
  call void @_exit(i32 %EXIT_CODE%)
  unreachable

wait:
  %never = call i32 @pause()
  br label %wait
}
"""
WINDOWS_HANDLER = f"""
declare ptr @GetStdHandle(i32)
declare i32 @WriteFile(ptr, ptr, i32, ptr, ptr)
declare i32 @TerminateProcess(ptr, i32)
declare void @Sleep(i32)

define i32 @handle(ptr %pointers) {{
  %record = load ptr, ptr %pointers
  %code = load i32, ptr %record
  %is_bad_page = icmp eq i32 %code, {PAGE_ERROR - (1 << 32)}
  br i1 %is_bad_page, label %first, label %other

other:
  ret i32 0

first:
  %length = atomicrmw xchg ptr @length, i64 0 seq_cst
  %is_first = icmp ne i64 %length, 0
  br i1 %is_first, label %tell, label %wait

tell:
  %written = alloca i32
  %size = trunc i64 %length to i32
  %stderr = call ptr @GetStdHandle(i32 -12)
  %done = call i32 @WriteFile(ptr %stderr, ptr @message, i32 %size, ptr %written, ptr null)
  %ended = call i32 @TerminateProcess(ptr inttoptr (i64 -1 to ptr), i32 %EXIT_CODE%)
  br label %wait

wait:
  call void @Sleep(i32 -1)
  br label %wait
}}
"""
BAD_PAGE_HANDLER = WINDOWS_HANDLER if sys.platform == "win32" else POSIX_HANDLER


# ---- threads


def get_waiting_functions() -> list[int]:
    """Return the addresses of five system functions.

    They yield the processor; lock a mutex; unlock it; wait(condition, mutex, -1, 0); wake all waiters of a condition.
    """
    if sys.platform == "win32":
        system = ctypes.WinDLL("kernel32")
        names = ("SwitchToThread", "AcquireSRWLockExclusive", "ReleaseSRWLockExclusive", "SleepConditionVariableSRW",
                 "WakeAllConditionVariable")  # fmt: skip
    else:
        system = ctypes.CDLL(None)
        names = ("sched_yield", "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait",
                 "pthread_cond_broadcast")  # fmt: skip
    return [ctypes.cast(getattr(system, name), ctypes.c_void_p).value or 0 for name in names]


def init_waiting(mutexes: Iterable[int], condition: int) -> None:
    """Initialize the mutexes and the condition variable at these addresses, in zeroed memory.

    Does nothing on Windows, where zeroed memory is already valid for them.
    """
    if sys.platform == "win32":
        return
    system = ctypes.CDLL(None)
    for mutex in mutexes:
        system.pthread_mutex_init(ctypes.c_void_p(mutex), None)
    system.pthread_cond_init(ctypes.c_void_p(condition), None)


@cache
def find_function_address(name: str) -> int | None:
    """Return the address of a C, math or compiler runtime function, or None."""
    libraries = ("ucrtbase", "ntdll", "kernel32", "vcruntime140") if sys.platform == "win32" else (None, "libm.so.6")
    for library in libraries:  # not every Python links libm
        with suppress(AttributeError, OSError):
            return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value
    return None


def load_library(linux: str, windows: str) -> ctypes.CDLL:
    """Load a system library by its name on Linux or Windows. Raises OSError."""
    return ctypes.CDLL(windows if sys.platform == "win32" else linux)


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed; takes 0.1 ms if it is not."""
    try:
        load_library("libcuda.so.1", "nvcuda.dll")
    except OSError:
        return False
    return True


# ---- signals


def handle_termination(handler: "Callable[[int, FrameType | None], object]") -> None:
    """Install a handler for all signals that would end the process; it replaces earlier ones."""
    for number in list_fatal_signals():
        signal.signal(number, handler)


def restore_termination() -> None:
    """Undo `handle_termination`: its signals end the process immediately again."""
    for number in list_fatal_signals():
        signal.signal(number, signal.SIG_DFL)


@cache
def list_fatal_signals() -> list[int]:
    """Return the signals that end a process, except faults and ignored or handled signals."""
    if sys.platform == "win32":
        return list_ending_signals()
    harmless = ("CHLD", "CONT", "INFO", "URG", "WINCH", "STOP", "TSTP", "TTIN", "TTOU")
    others = (*harmless, "KILL", "SEGV", "BUS", "FPE", "ILL")  # a fault would recur after its handler
    left_out = {getattr(signal, f"SIG{name}", None) for name in others}
    return [
        number for number in sorted(signal.valid_signals() - left_out) if signal.getsignal(number) is signal.SIG_DFL
    ]


def list_ending_signals() -> list[int]:
    """Return the signals that ask a process to end: SIGTERM, and Ctrl-Break on Windows."""
    if sys.platform == "win32":
        return [signal.SIGTERM, signal.SIGBREAK]
    return [signal.SIGTERM]


@contextmanager
def handle_stops(leave: Callable[[], None], come_back: Callable[[], None]) -> Iterator[None]:
    """Call `leave` before Ctrl-Z stops the process in the block, and `come_back` when it continues."""
    is_main = threading.current_thread() is threading.main_thread()  # only the main thread may install handlers
    if sys.platform == "win32" or not is_main or signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN:
        yield
        return

    def stop(number: int, frame: object) -> None:
        leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # stops here; returns when the process continues
        signal.signal(signal.SIGTSTP, stop)
        come_back()

    previous = signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, previous)


def interrupt_main() -> None:
    """Interrupt the main thread from another thread as Ctrl-C does, even in a system call."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


def can_reuse_address() -> bool:
    """Return whether SO_REUSEADDR lets a server restart at once; on Windows it would share the port."""
    return sys.platform != "win32"


def can_handle_in_loop() -> bool:
    """Return whether asyncio's event loop can handle signals."""
    return sys.platform != "win32"


def handle_bad_pages(handler: int) -> None:
    """Install native code to handle unreadable pages of a mapped file: SIGBUS, or an exception on Windows.

    handler: the address of BAD_PAGE_HANDLER's machine code.
    """
    if sys.platform == "win32":
        add = ctypes.WinDLL("kernel32").AddVectoredExceptionHandler
        add.argtypes, add.restype = [ctypes.c_uint32, ctypes.c_void_p], ctypes.c_void_p
        add(1, handler)
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(int(signal.SIGBUS), handler)


# ---- other processes


class DetachedOptions(TypedDict, total=False):
    """Arguments of subprocess.Popen."""

    creationflags: int
    process_group: int


def get_detached_options() -> DetachedOptions:
    """Return subprocess.Popen's arguments for a process that does not receive this one's Ctrl-C."""
    if sys.platform == "win32":
        return {"creationflags": 0x200}  # CREATE_NEW_PROCESS_GROUP
    return {"process_group": 0}


def lower_priority(process: "Popen[bytes]") -> None:
    """Lower a subprocess's priority; do nothing if it has ended."""
    with suppress(OSError):
        if sys.platform == "win32":
            ctypes.WinDLL("kernel32").SetPriorityClass(ctypes.c_void_p(int(process._handle)), BELOW_NORMAL)
        else:
            os.setpriority(os.PRIO_PROCESS, process.pid, BACKGROUND)


def make_shell_arguments(command: str) -> list[str] | str:
    """Return subprocess.Popen's arguments to run a command in the system's shell.

    On Windows this is a single string, because cmd.exe parses quotes differently from other programs.
    """
    if sys.platform == "win32":
        return f'"{os.environ["SYSTEMROOT"]}\\System32\\cmd.exe" /d /s /c "{command}"'
    return ["/bin/sh", "-c", command]


def replace_process(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by a program; on Windows run it, wait, and exit with its exit code.

    command: the program's path and its arguments. Unflushed output of this process is lost. Raises OSError.
    """
    if sys.platform == "win32":
        import subprocess  # rarely needed

        sys.exit(subprocess.call(command, env=environment))
    os.execve(command[0], command, environment)


def kill_with_children(process: "Popen[bytes]") -> None:
    """Kill a subprocess started with start_new_session, and all its children."""
    import subprocess

    with suppress(OSError):
        if sys.platform == "win32":
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def register_after_fork(call: Callable[[], None]) -> None:
    """Register a function to call in every forked process."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def can_fork() -> bool:
    """Return whether the operating system has `fork`, which Windows lacks."""
    return hasattr(os, "fork")


def fork() -> int:
    """Fork this process as os.fork does."""
    return os.fork()


def limit_process(seconds: int, size: int) -> bool:
    """Limit this forked process to `seconds` more of CPU time and `size` more bytes of memory.

    Returns False if the current memory limit is lower. Raises OSError, ValueError.
    """
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_seconds = int(usage.ru_utime + usage.ru_stime) + seconds + 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    with open("/proc/self/statm" if os.path.exists("/proc/self/statm") else os.devnull, "rb") as file:
        pages = file.read().split()
    if pages:
        limit = int(pages[0]) * resource.getpagesize() + size
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY and soft < limit:
            return False
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    return True


class JobLimits(ctypes.Structure):
    """Windows' JOBOBJECT_EXTENDED_LIMIT_INFORMATION; times in 100 nanoseconds."""

    _fields_ = (
        ("process_time", ctypes.c_int64),
        ("job_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("working_sets", ctypes.c_size_t * 2),
        ("processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("classes", ctypes.c_uint32 * 2),
        ("transfers", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("memory", ctypes.c_size_t * 3),
    )


def run_limited(command: list[str], stdin: bytes, seconds: int, size: int, timeout: float) -> tuple[bytes, bool]:
    """Run a command on Windows within limits; return its stdout, and whether it was killed for taking too long.

    seconds: of CPU time.  size: bytes of memory.  timeout: seconds to wait for its end. Raises OSError.
    """
    import subprocess

    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    system = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
    system.CreateJobObjectW.restype = ctypes.c_void_p
    # JOB_OBJECT_LIMIT_PROCESS_TIME, _PROCESS_MEMORY, _DIE_ON_UNHANDLED_EXCEPTION, _KILL_ON_JOB_CLOSE
    limits = JobLimits(process_time=seconds * 10**7, flags=0x2 | 0x100 | 0x400 | 0x2000, process_memory=size)
    job = ctypes.c_void_p(system.CreateJobObjectW(None, None))
    try:
        system.SetInformationJobObject(job, 9, ctypes.byref(limits), ctypes.sizeof(limits))
        system.AssignProcessToJobObject(job, ctypes.c_void_p(int(process._handle)))  # type: ignore[attr-defined]
        try:
            return process.communicate(stdin, timeout)[0], process.returncode == TIME_LIMIT_EXIT_CODE
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return b"", True
    finally:
        system.CloseHandle(job)


def was_stopped(status: int) -> bool:
    """Return whether a forked process exceeded its CPU time or was killed; status: from os.waitpid."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)


class PipeReader:
    """Reads a pipe to its end in a thread, so that its writer never waits, and keeps part of the data.

    Attributes:
        size: bytes read so far.  thread: ends with the pipe.
    """

    def __init__(self, pipe: IO[bytes], most: int, keeps_end: bool = False):
        """Start to read.

        most: maximum bytes to keep.  keeps_end: keep the last bytes instead of the first.
        """
        self._pipe, self._most, self._keeps_end, self._data, self.size = pipe, most, keeps_end, bytearray(), 0
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._pipe:
            while piece := os.read(self._pipe.fileno(), 65536):
                self.size += len(piece)
                if self._keeps_end:
                    self._data += piece
                    del self._data[: -self._most]
                else:
                    self._data += piece[: self._most - len(self._data)]

    def get_text(self) -> str:
        """Return the kept data, with a note if some was dropped."""
        note = f"\n[cut: of {self.size} bytes]" if self.size > len(self._data) and not self._keeps_end else ""
        return bytes(self._data).decode(errors="replace") + note

    def get_last_line(self) -> str:
        """Return the last line that is not empty, or ""."""
        return next((line.strip() for line in reversed(self.get_text().splitlines()) if line.strip()), "")
