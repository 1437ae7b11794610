"""Test threads and the kernel library: counts of cores, cost at rest, and that no order of events changes a result."""

import ctypes
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from project import ROOT, SUPPORT

from localllm.engine.cpu.program import KERNEL, TapeThreads
from localllm.engine.lower.tape import Buffer, KernelStep, Tape
from localllm.errors import LocalllmError, MemoryLimitError
from localllm.files.cache.checksummed_cache import read_checksummed, write_checksummed
from localllm.kernels.build import compilers, library, objects
from localllm.kernels.build.compilers import Compiler
from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.build.objects import DAY, get_object_file, get_object_folder, get_symbol
from localllm.kernels.cpu.shared_job import CACHE_LINE, JOB, STEP, JobField
from localllm.system import cpu as cores_module
from localllm.system.cpu import count_logical_cores, count_usable_cores
from localllm.system.locks import lock_file

# ---- how many cores -------------------------------------------------------------------------------------------------


def siblings(groups: list[str]) -> dict[str, str]:
    """Return the sysfs files that list which logical processors share a core."""
    paths = (f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list" for i in range(len(groups)))
    return dict(zip(paths, groups, strict=True))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs processor affinity")
@pytest.mark.parametrize(
    ("files", "allowed", "cores"),
    [
        (siblings(["0", "1", "2", "3"]), {0, 1, 2, 3}, 4),
        (siblings(["0,2", "1,3", "0,2", "1,3"]), {0, 1, 2, 3}, 2),  # two threads per core
        (siblings(["0-1", "0-1", "2-3", "2-3"]), {0, 1, 2}, 2),
        (siblings(["0,2", "1,3", "0,2", "1,3"]), {2}, 1),
        ({}, {0, 1, 2}, 3),
    ],
)
def test_usable_cores_are_counted_from_sysfs_and_affinity(monkeypatch, files, allowed, cores):
    monkeypatch.setattr(cores_module, "read_text", lambda path: files.get(path, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed)
    monkeypatch.setattr(cores_module, "read_cpu_quota", lambda: 1e6)
    assert count_usable_cores() == cores
    assert count_logical_cores() == len(allowed)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs processor affinity")
def test_usable_cores_of_a_process_bound_to_one_are_one():
    one = min(os.sched_getaffinity(0))
    imports = "import os; from localllm.system.cpu import count_usable_cores"
    program = f"{imports}; os.sched_setaffinity(0, {{{one}}}); print(count_usable_cores())"
    assert run_python(program).stdout.strip() == "1"


@pytest.mark.parametrize(
    ("known", "cores"),
    [({"hw.perflevel0.physicalcpu": 6, "hw.physicalcpu": 8}, 6), ({"hw.physicalcpu": 4}, 4), ({}, 1)],
)
def test_usable_cores_of_macos_are_its_performance_cores(monkeypatch, known, cores):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(cores_module, "read_text", lambda path: "")
    monkeypatch.setattr(cores_module, "read_sysctl", lambda name: known.get(name, 0))
    assert count_usable_cores() == cores


@pytest.mark.parametrize(
    ("available", "limit", "count"),
    [(8 << 30, sys.maxsize, 8), (2 << 30, sys.maxsize, 4), (8 << 30, 1_000_000 << 10, 1), (1 << 28, sys.maxsize, 1)],
)
def test_the_number_of_compilers_is_limited_by_memory(monkeypatch, available, limit, count):
    monkeypatch.setattr(compilers, "count_logical_cores", lambda: 8)
    monkeypatch.setattr(compilers, "get_available_memory", lambda: available)
    monkeypatch.setattr(compilers, "get_address_limit", lambda: limit)
    assert compilers.count_processes() == count


def run_python(program: str, *arguments, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = os.environ | environment
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert not check or result.returncode == 0, result.stderr
    return result


# ---- walking a tape -------------------------------------------------------------------------------------------------

TOKENS, STRIDE, STAGES = 61, 256, 40
NAMES = ["add", "run", "work"]


class Counting:
    """A tape of STAGES dependent steps, each of which adds one to an array, so that a wrong order shows."""

    def __init__(self, count: int, parts: int):
        self.tokens, self.one = np.array([TOKENS], np.int64), np.ones(STRIDE // 4, np.float32)
        x, y = self.arrays = [np.zeros((TOKENS, STRIDE // 4), np.float32) for _ in range(2)]
        buffers = [Buffer(0, 0), Buffer(0, 0)]
        tape = Tape()
        for stage in range(STAGES):
            arguments = {"count": self.tokens, "x": x, "z": self.one, "z_stride": 0, "y": y, "stride": STRIDE}
            arguments["columns"] = STRIDE // 4
            tape.append(KernelStep("add", arguments, parts, None, [buffers[stage % 2]], [buffers[1 - stage % 2]]))
            x, y = y, x
        self.result, self.library, self.tape = x, KernelLibrary(NAMES), tape
        self.threads = TapeThreads(count, self.library.addresses, tape.finish(self.library.addresses))

    def run(self) -> np.ndarray:
        """Return the array after a run: STAGES everywhere if every step ran in order."""
        self.arrays[0][:], self.arrays[1][:] = 0, -99
        self.threads.run()
        return self.result


@pytest.mark.parametrize("parts", [1, 7, 200])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_wait_for_each_other(count, parts):
    counting = Counting(count, parts)
    for _ in range(100):
        assert (counting.run() == STAGES).all()
    counting.threads.close()


def test_results_are_right_on_a_busy_machine():
    """Run each count of threads 300 times while other programs take the processors."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for count in (2, 3, 4, 5):
            counting = Counting(count, 9)
            for run in range(300):
                assert (counting.run() == STAGES).all()
                if run % 60 == 0:
                    time.sleep(0.005)  # let the threads fall asleep
            counting.threads.close()
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize("count", [1, 3])
def test_slices_of_a_tape_wait_for_each_other(count):
    """Check that a thread that is late for a slice does nothing in the next one."""
    counting = Counting(count, 9)
    for _ in range(300):
        counting.arrays[0][:], counting.arrays[1][:] = 0, -99
        for first, end in pairwise((0, 1, 7, 8, 39, STAGES)):
            counting.threads.run_steps(first, end)
        assert (counting.result == STAGES).all()
    counting.threads.close()


@pytest.mark.parametrize("pause", [0, 1e-4, 1e-3, 3e-3, 2e-2])
def test_sleeping_threads_wake_for_a_run(pause):
    """Start runs at all moments of a thread's way to sleep, which begins after about 1 ms."""
    counting = Counting(3, 9)
    for _ in range(20):
        time.sleep(pause)
        assert (counting.run() == STAGES).all()
    counting.threads.close()


def test_parts_are_limited_by_the_count_of_tokens():
    """Check also that a step for no tokens ends."""
    counting = Counting(2, 9)
    for step in counting.tape.steps:
        step.count = counting.tokens.ctypes.data
    counting.threads.close()
    for tokens in (0, 1, 3, TOKENS):
        counting.tokens[0] = tokens
        walker = TapeThreads(2, counting.library.addresses, counting.tape.finish(counting.library.addresses))
        counting.arrays[0][:], counting.arrays[1][:] = 0, 0
        walker.run()
        walker.close()
        assert (counting.result[:tokens] == STAGES).all()
        assert (counting.result[tokens:] == 0).all()


def test_no_two_writers_share_a_cache_line():
    lines = [
        place * 8 // CACHE_LINE
        for place in (JOB.run, JOB.done, JOB.sleepers, JOB.offer, JOB.run_mutex, JOB.sleep_mutex, JOB.wake_condition)
    ]
    assert len(set(lines)) == len(lines)
    assert len(set(JOB)) == len(JobField._fields)


def test_run_numbers_wrap_at_31_and_32_bits():
    """Claim cells hold 32 bits of them; at 500 runs per second that is 50 days."""
    counting = Counting(3, 9)
    for start in (2**31 - 20, 2**32 - 20):
        counting.threads._workers.job[JOB.run] = start
        for _ in range(20):
            assert (counting.run() == STAGES).all()
    counting.threads.close()


class Steps:
    """Steps of one stage each that call Python functions of (arguments, part, parts, thread)."""

    def __init__(self, threads: int, *steps: tuple[Callable[[int, int, int, int], None], int, int]):
        """Build the steps from tuples (function, parts, address of the count of parts)."""
        self.library, self.kernels = KernelLibrary(NAMES), [KERNEL(function) for function, _, _ in steps]
        tape = np.zeros((len(steps), len(STEP)), np.int64)
        for row, kernel, (_, parts, count) in zip(tape, self.kernels, steps, strict=True):
            row[:] = ctypes.cast(kernel, ctypes.c_void_p).value, 0, parts, count, 1
        self.threads = TapeThreads(threads, self.library.addresses, tape, keep=self.kernels)


def test_a_late_thread_sees_that_its_run_is_over():
    """Suspend a thread that waits for the others, and resume it after Python has changed what the tape reads."""
    count, late, go_on = np.array([1], np.int64), threading.Event(), threading.Event()

    def slow_for_the_caller(_, part, parts, thread):
        if thread == 0:
            assert late.wait(10)

    def put_aside_until_told():
        if threading.current_thread() is not threading.main_thread():
            late.set()
            assert go_on.wait(10)

    steps = Steps(2, (slow_for_the_caller, 2, 0), (lambda *_: None, 9, count.ctypes.data))
    offer = ctypes.CFUNCTYPE(None)(put_aside_until_told)
    steps.threads._workers.job[JOB.offer] = ctypes.cast(offer, ctypes.c_void_p).value
    steps.threads.run()
    count[0] = 9  # more parts than were ever done: nobody may wait for them
    go_on.set()
    ending = threading.Thread(target=steps.threads.close, daemon=True)
    ending.start()
    ending.join(5)
    assert not ending.is_alive()


@pytest.mark.slow
def test_no_thread_sleeps_through_a_run():
    """Let both parts of a step wait for each other, from all moments of falling asleep."""
    met = threading.Barrier(2)
    steps = Steps(2, (lambda *_: met.wait(10), 2, 0))
    for pause in np.linspace(0, 4e-3, 400):
        time.sleep(pause)
        steps.threads.run()
        assert not met.broken
    steps.threads.close()


def test_callers_of_one_group_run_one_at_a_time():
    inside, most, runs = 0, 0, 0

    def enter(*_):
        nonlocal inside, most, runs
        inside += 1
        time.sleep(1e-4)
        most, inside, runs = max(most, inside), inside - 1, runs + 1

    steps = Steps(2, (enter, 1, 0))
    callers = [threading.Thread(target=lambda: [steps.threads.run() for _ in range(50)]) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert (most, runs) == (1, 200)
    steps.threads.close()


def test_closing_waits_for_the_run_in_progress():
    begun, done = threading.Event(), []

    def slow(*_):
        begun.set()
        time.sleep(0.2)
        done.append(1)

    steps = Steps(2, (slow, 1, 0), (slow, 1, 0))
    caller = threading.Thread(target=steps.threads.run)
    caller.start()
    begun.wait()
    steps.threads.close()
    assert done == [1, 1]
    caller.join()


@pytest.mark.slow
def test_ctrl_c_leaves_threads_usable():
    """Interrupt 500 runs of several threads at random moments; the run after each is right."""
    counting, random = Counting(3, 9), np.random.default_rng(1)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    try:
        for _ in range(500):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 3e-3))
                while True:
                    counting.threads.run()
                    time.sleep(random.choice([0, 2e-3]))
            except KeyboardInterrupt:
                interrupted += 1
            assert (counting.run() == STAGES).all()
            assert counting.threads._workers.job[JOB.run] % 2 == 0
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 500
    start = time.perf_counter()
    counting.threads.close()
    assert time.perf_counter() - start < 30


def test_threads_at_rest_use_no_processor():
    counting = Counting(4, 9)
    counting.run()
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    used = time.process_time() - before
    counting.threads.close()
    assert used < 0.03


def test_closing_ends_threads_asleep_or_awake():
    for pause in (0, 0.02):
        counting = Counting(4, 9)
        counting.run()
        time.sleep(pause)
        start = time.perf_counter()
        counting.threads.close()
        counting.threads.close()
        assert time.perf_counter() - start < 30
        assert (counting.run() == STAGES).all(), "the thread that gives the orders can still do all by itself"


def test_an_engine_that_was_never_closed_does_not_delay_the_exit():
    program = (
        "from tests.unit.engine.cpu.test_threads import *; counting = Counting(3, 9); counting.run(); print('end')"
    )
    assert run_python(program, PYTHONPATH=python_path()).stdout.strip() == "end"


def python_path() -> str:
    folders = [str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, folders))


# ---- the library of kernels -----------------------------------------------------------------------------------------

LOAD = """
import sys
from localllm.kernels.build.library import KernelLibrary
library = KernelLibrary(sys.argv[1:])
assert all(library.addresses.values())
print(library.warning or "numba" in sys.modules)
"""


def test_cached_kernels_load_without_numba():
    KernelLibrary(NAMES)
    assert run_python(LOAD, *NAMES).stdout.strip() == "False"


@pytest.mark.slow
def test_two_processes_compile_into_the_same_empty_cache(tmp_path):
    environment = os.environ | {"LOCALLLM_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", LOAD, "add", "select"]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.wait(100) == 0, process.communicate()[1]
        process.communicate()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    processors = [path for path in files if path.parent.name == "processors"]
    names = sorted(path.name for path in files if path not in processors)
    assert names == ["add.o", "select.o"] and len(processors) <= 1, "temporary files stay behind"


def damaged(content: bytes) -> dict[str, bytes]:
    middle = len(content) // 2
    return {
        "empty": b"",
        "cut": content[:middle],
        "nearly whole": content[:-1],
        "zeros": bytes(len(content)),
        "text": b"hello " * 100,
        "one byte": content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :],
    }


@pytest.mark.sampled
@pytest.mark.parametrize("damage", ["empty", "cut", "nearly whole", "zeros", "text", "one byte"])
def test_a_damaged_object_file_is_compiled_again(tmp_path, damage):
    """Never run bytes that a full disk or a crash has left."""
    KernelLibrary(["add"])
    path = tmp_path / "kernels" / get_object_file("add").parent.name / "add.o"
    path.parent.mkdir(parents=True)
    content = damaged(get_object_file("add").read_bytes())[damage]
    path.write_bytes(content)
    run_python(LOAD, "add", LOCALLLM_CACHE=str(tmp_path))
    assert path.read_bytes() != content


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    warning = run_python(LOAD, "add", "select", LOCALLLM_CACHE=str(tmp_path / "file")).stdout
    folder = tmp_path / "file" / "kernels" / get_object_folder().name
    assert warning == f"compiled kernels cannot be kept in {folder}: Not a directory\n"


@pytest.mark.slow
def test_a_cache_that_cannot_be_opened_costs_only_time(tmp_path):
    """Check also the lookup of kernels to compile later."""
    program = (
        "from localllm.kernels.build.library import KernelLibrary;"
        " print(KernelLibrary(['add'], later=['select']).warning)"
    )
    warning = run_python(program, LOCALLLM_CACHE=str(tmp_path / ("x" * 300))).stdout
    assert warning.endswith("File name too long\n")


@pytest.mark.slow
def test_a_full_disk_costs_only_time(tmp_path):
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))"
    warning = run_python(full + LOAD, "add", "select", LOCALLLM_CACHE=str(tmp_path)).stdout
    assert warning.endswith(": File too large\n") and len(warning.splitlines()) == 1
    left = (path for path in tmp_path.rglob("*") if path.is_file())
    assert [path for path in left if path.parent.name != "processors"] == []  # what an ARM is: a few bytes


@pytest.mark.sampled
@pytest.mark.slow
def test_a_cache_that_vanishes_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "get_object_folder", lambda of=None: tmp_path / "kernels" / "key")
    for _ in range(2):
        assert KernelLibrary(["add"]).warning is None
        assert get_object_file("add").exists()
        shutil.rmtree(tmp_path / "kernels")


def test_cache_folders_are_private(tmp_path):
    path = tmp_path / "kernels" / "key" / "add.o"
    write_checksummed(path, b"code")
    assert [folder.stat().st_mode & 0o777 for folder in path.parents[:2]] == [0o700, 0o700]


def test_an_object_file_is_valid_only_at_its_own_path(tmp_path):
    """Refuse copies under another kernel's name or another computer's key."""
    path = tmp_path / "key" / "add.o"
    write_checksummed(path, b"code")
    for other in (tmp_path / "key" / "select.o", tmp_path / "yek" / "add.o"):
        other.parent.mkdir(exist_ok=True)
        shutil.copy(path, other)
        assert read_checksummed(other) is None
    assert read_checksummed(path) == b"code"


@pytest.mark.parametrize(("place", "mode"), [("folder", 0o777), ("folder", 0o770), ("file", 0o666), ("file", 0o620)])
def test_files_that_others_can_write_are_not_loaded(tmp_path, place: str, mode: int):
    """Refuse them even with the right checksum, which a stranger can compute too."""
    path = tmp_path / "key" / "add.o"
    write_checksummed(path, b"code")
    (path if place == "file" else path.parent).chmod(mode)
    assert read_checksummed(path) is None


def test_writing_new_kernels_removes_unused_folders(tmp_path, monkeypatch):
    used, old, recent, foreign = (tmp_path / name for name in ("a" * 20, "0" * 20, "1" * 20, "not ours"))
    for folder in (used, old, recent, foreign):
        write_checksummed(folder / "select.o", b"code")
        (folder / ".localllm-1-x.tmp").touch()
    in_use = used / ".localllm-1-y.tmp"
    for folder, days in ((used, 40), (old, 31), (recent, 29), (foreign, 40)):
        os.utime(folder, (0, time.time() - days * DAY))
    monkeypatch.setattr(objects, "get_object_folder", lambda of=None: used)
    with in_use.open("wb") as file:
        assert lock_file(file.fileno())
        KernelLibrary(["add"])
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    kept = [f"{folder.name}/select.o" for folder in (used, recent, foreign)]
    assert files == sorted([f"{used.name}/add.o", f"{used.name}/{in_use.name}", *kept])


@pytest.mark.parametrize(("days", "marked"), [(0.5, False), (2, True)])
def test_use_is_marked_once_a_day(tmp_path, monkeypatch, days, marked):
    write_checksummed(tmp_path / "key" / "add.o", read_checksummed(get_object_file("add")))
    os.utime(tmp_path / "key", (0, time.time() - days * DAY))
    for module in (objects, library):
        monkeypatch.setattr(module, "get_object_folder", lambda of=None: tmp_path / "key")
    KernelLibrary(["add"])
    assert (objects.compute_age(tmp_path / "key", time.time()) < 60) == marked


def test_the_cache_key_covers_all_sources_of_machine_code(tmp_path, monkeypatch):
    kernels = tmp_path / "kernels"
    shutil.copytree(Path(objects.__file__).parents[1], kernels)
    monkeypatch.setattr(objects, "__file__", str(kernels / "build" / "objects.py"))
    changes, others = {}, ["reference.py", "widen.py", "build/compilers.py"]
    for name in ("cpu/elementwise/rowwise.py", "simd/vectors.py", "simd/bytes.py", "build/objects.py", *others):
        before = get_object_folder.__wrapped__()
        with (kernels / name).open("a") as file:
            file.write("#")
        changes[name] = get_object_folder.__wrapped__() != before
    assert [name for name, changed in changes.items() if not changed] == others


def test_compilers_receive_no_numba_setting_but_the_cpu(monkeypatch):
    """Set NUMBA_DISABLE_JIT, which ended them, and NUMBA_OPT=0, whose slow code was cached."""
    environment = {}

    def start(command, env, **others):
        environment.update(env)
        raise BlockingIOError

    monkeypatch.setattr(subprocess, "Popen", start)
    settings = {
        "NUMBA_DISABLE_JIT": "1",
        "NUMBA_OPT": "0",
        "NUMBA_CPU_NAME": "znver4",
        "NUMBA_CPU_NAMES": "x",
        "OTHER": "y",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BlockingIOError):
        Compiler("nothing")
    assert {name: environment.get(name) for name in settings} == {
        "NUMBA_DISABLE_JIT": None, "NUMBA_OPT": None, "NUMBA_CPU_NAME": "znver4", "NUMBA_CPU_NAMES": None, "OTHER": "y",
    }  # fmt: skip


def test_a_failed_compilation_names_the_kernel():
    with pytest.raises(LocalllmError, match=r"cannot compile the kernels for this computer: .*'nonsense'$"):
        KernelLibrary(["add", "nonsense"])


def test_running_out_of_memory_while_compiling_is_a_memory_error(monkeypatch):
    """Simulate it by a kernel that does not exist, because LLVM reports it in many ways and may abort."""
    monkeypatch.setattr(compilers, "get_address_limit", lambda: 400 << 20)
    with pytest.raises(MemoryLimitError, match=r"not enough memory to compile the kernels: .*'nonsense'\)$"):
        KernelLibrary(["add", "nonsense"])


def processes_of(folder: Path) -> list[int]:
    """Return the ids of living processes with this cache folder, without zombies."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, status = (process / "environ").read_bytes(), (process / "status").read_text()
        except OSError:
            continue
        if f"LOCALLLM_CACHE={folder}".encode() in environment.split(b"\0") and "\nState:\tZ" not in status:
            pids.append(int(process.name))
    return pids


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("compiling", [False, True], ids=["starting", "compiling"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_compilers_end_with_the_program(tmp_path, name, compiling):
    environment = os.environ | {"LOCALLLM_CACHE": str(tmp_path)}
    names = ["attend-F16", "add", "select", "gelu", "rope"]  # small ones while the large one takes its time
    program = subprocess.Popen([sys.executable, "-c", LOAD, *names], env=environment, stderr=subprocess.PIPE)
    while len(processes_of(tmp_path)) < 2:
        time.sleep(0.01)
    while compiling and not list(tmp_path.rglob("*.o")):  # by the one, so that the other is at it, too
        time.sleep(0.01)
    assert program.poll() is None
    program.send_signal(getattr(signal, name))
    program.communicate(timeout=120)
    end = time.perf_counter() + 30  # those that still import take a while under emulation
    while processes_of(tmp_path) and time.perf_counter() < end:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []
    assert list(tmp_path.rglob("*.tmp")) == []


def test_progress_is_reported_while_compiling(tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "get_object_folder", lambda of=None: tmp_path / "key")
    calls = []
    KernelLibrary(["add", "select", "add"], lambda done, total: calls.append((done, total)))
    assert calls[0] == (0, 2)
    assert calls[-1] == (2, 2)
    assert calls == sorted(calls)
    calls.clear()
    KernelLibrary(["add", "select"], lambda done, total: calls.append((done, total)))
    assert calls == []


@pytest.mark.parametrize(
    "name", [*NAMES, "linear_quantized", "linear_precise-Q8_0", "linear_float-F32", "attend-F16", "angles"]
)
def test_an_object_file_defines_only_its_kernel_and_needs_only_libc(name):
    """Two that define the same symbol could not be linked into one process; what they need must exist without Numba."""
    KernelLibrary([name])
    content = read_checksummed(get_object_file(name))
    if not content.startswith(b"\x7fELF\x02\x01"):
        pytest.skip("reads 64-bit ELF files only")
    defined, undefined = global_symbols(content)
    assert defined == {get_symbol(name)}
    assert undefined <= {"logf", "sin", "cos", "sincos", "memset", "memcpy", "_GLOBAL_OFFSET_TABLE_"}


def global_symbols(content: bytes) -> tuple[set[str], set[str]]:
    """Return the global symbols that a little-endian ELF64 object file defines, and those that it needs."""
    (sections_at,), (count,) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<H", content, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, sections_at + 64 * i) for i in range(count)]
    defined, undefined = set(), set()
    for _, kind, _, _, start, size, link, _, _, _ in sections:
        if kind != 2:  # the symbol table
            continue
        names = content[sections[link][4] : sections[link][4] + sections[link][5]]
        for at in range(start, start + size, 24):
            name_at, info, _, section = struct.unpack_from("<IBBH", content, at)
            if info >> 4:  # not local
                name = names[name_at : names.index(b"\0", name_at)].decode()
                (defined if section else undefined).add(name)
    return defined, undefined
