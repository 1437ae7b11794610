"""Run model-generated Python code in a sandbox, with limited time and memory.

This works only on Linux. The process can read the installed programs and write in an empty folder (Landlock, as in
localllm's tool `run`), cannot open sockets or send signals (a seccomp filter, which its children inherit), and has
limited memory, time and file sizes. If the kernel lacks Landlock or seccomp, nothing is run.

Callers use `run_confined`. As a script, `confined_python.py FOLDER SECONDS BYTES PROGRAM`, this is the child: it
confines itself and executes PROGRAM. It imports no other module of localllm, and runs under `python -I -S`.
"""

import ctypes
import os
import platform
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SECONDS, BYTES = 10.0, 1 << 30
MAX_FILE_BYTES = 1 << 24  # maximum bytes of a file
MAX_STDERR, MAX_REASON = 1 << 16, 1000  # maximum bytes kept of stderr, and characters of its last line

# From linux/seccomp.h, linux/filter.h, linux/audit.h and the tables of system calls.
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: with EPERM
# The architecture, and its socket, socketpair, kill, tkill, tgkill, ptrace, process_vm_writev.
ARCHITECTURES = {
    "x86_64": (0xC000003E, 41, 53, 62, 200, 234, 101, 311),
    "aarch64": (0xC00000B7, 198, 199, 129, 130, 131, 117, 271),
}
COMMON_SYSTEM_CALLS = 424, 425  # pidfd_send_signal, io_uring_setup
OTHER_CALLS = 0x40000000  # x32's numbers begin here


class ProgramOutcome(NamedTuple):
    """The outcome of a program.

    Attributes:
        passed: whether its exit code is 0.  reason: the last line of stderr, or why it was stopped.
    """

    passed: bool
    reason: str


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def describe_obstacle() -> str:
    """Return why programs cannot be confined on this computer, or ""."""
    from localllm.services.tools import confined

    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return "programs can be confined only on Linux, on x86-64 and 64-bit ARM"
    return (
        ""
        if confined.get_landlock_version()
        else "the Linux kernel does not support Landlock, which needs version 5.13 or later"
    )


def run_confined(program: str, seconds: float = SECONDS, memory: int = BYTES) -> ProgramOutcome:
    """Run a program in a temporary folder. Raises RuntimeError if it cannot be confined.

    seconds: time limit.  memory: limit in bytes.
    """
    from localllm.system.processes import PipeReader

    if reason := describe_obstacle():
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program, "utf-8", "surrogatepass")
        words = [sys.executable, "-I", "-S", __file__, folder, str(seconds), str(memory), str(path)]
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder}
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stderr
        end, errors = time.monotonic() + seconds, PipeReader(process.stderr, MAX_STDERR, keeps_end=True)
        try:
            process.wait(seconds)
            errors.thread.join(max(0.0, end - time.monotonic()))  # children of the program may still write
            if errors.thread.is_alive():
                return ProgramOutcome(False, f"stopped after {seconds:g} seconds")
        except subprocess.TimeoutExpired:
            return ProgramOutcome(False, f"stopped after {seconds:g} seconds")
        finally:
            kill_group(process)
            errors.thread.join(1)
    return ProgramOutcome(
        process.returncode == 0, errors.get_last_line()[-MAX_REASON:] or f"exit code {process.returncode}"
    )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.kill()
    process.wait()


def forbid_system_calls() -> None:
    """Forbid sockets, and signals to other processes, for this process and its children. Raises OSError."""
    architecture, *refused = ARCHITECTURES[platform.machine()]
    checks = [(IF_AT_LEAST, OTHER_CALLS), *((IF_EQUAL, number) for number in (*refused, *COMMON_SYSTEM_CALLS))]
    code = [(LOAD, 0, 0, 4), (IF_EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    code += [(kind, len(checks) - at, 0, number) for at, (kind, number) in enumerate(checks)]
    code += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    instructions = b"".join(struct.pack("=HBBI", *each) for each in code)
    library = ctypes.CDLL(None, use_errno=True)
    program = FilterProgram(len(code), instructions)
    for arguments in ((NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0)):
        if library.prctl(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def limit_resources(seconds: float, memory: int) -> None:
    """Limit this process's memory in bytes, CPU time and file sizes."""
    import resource  # not on Windows

    limits = {
        resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: int(seconds) + 1, resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
    }  # fmt: skip
    for kind, maximum in limits.items():
        resource.setrlimit(kind, (maximum, maximum))


def execute_confined(folder: str, seconds: float, memory: int, program: str) -> None:
    """Confine this process, then replace it by Python that runs the program."""
    import importlib.util

    source = Path(__file__).with_name("confined.py")
    spec = importlib.util.spec_from_file_location("confined", source)
    assert spec and spec.loader
    confined = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(confined)
    limit_resources(seconds, memory)
    confined.confine_process([folder])
    forbid_system_calls()
    os.execv(sys.executable, [sys.executable, "-I", "-S", program])


if __name__ == "__main__":
    execute_confined(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
