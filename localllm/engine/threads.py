"""How many threads to use, and the threads themselves, which live in native code while there is work."""

import ctypes
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
LINE = 64


def usable_cores() -> int:
    """Physical cores that this process may use, by its affinity and its control group's quota; at least 1."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {
        read_text(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list") or str(i) for i in processors
    }
    return max(1, min(len(siblings), int(cgroup_quota())))


def cgroup_quota() -> float:
    """Processors' worth of time that the control group allows, infinite if it sets no limit."""
    words = read_text("/sys/fs/cgroup/cpu.max").split()
    if len(words) != 2:  # version 1
        words = [read_text(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        quota = int(words[0]) / int(words[1])
    except (ValueError, ZeroDivisionError):
        return 1e6
    return quota if quota > 0 else 1e6


def read_text(path: str) -> str:
    """A small system file, empty if there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def yield_address() -> int:
    """Address of the C function that lets other programs run."""
    if sys.platform == "win32":
        function = ctypes.windll.kernel32.SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class Team:
    """What the threads share. It knows nothing of `Threads`, so that one can be forgotten while they sleep."""

    def __init__(self, count: int, addresses: dict[str, int], tape: np.ndarray, keep: Any):
        """tape: int64 [steps, 5]; keep: what must live as long as the tape is walked."""
        self.keep = keep, tape
        self.run, self.work = KERNEL(addresses["run"]), KERNEL(addresses["work"])
        self.cells, self.job = aligned_zeros(len(tape) * LINE), aligned_zeros(256)
        self.job[1:4] = tape.ctypes.data, len(tape), self.cells.ctypes.data
        self.job[14] = yield_address()
        self.sleeping = [False] * count
        self.wake = [threading.Semaphore(0) for _ in range(count)]
        self.threads = [threading.Thread(target=self.live, args=(i,), daemon=True) for i in range(1, count)]

    def live(self, thread: int) -> None:
        """Work until there is nothing to do, then sleep without using the processor."""
        seen = aligned_zeros(LINE)
        while not self.job[13]:
            self.work(self.job.ctypes.data, thread, seen.ctypes.data, 0)
            self.sleeping[thread] = True
            if self.job[0] == seen[0] and not self.job[13]:
                self.wake[thread].acquire()

    def stop(self) -> None:
        """End the threads."""
        self.job[13] = 1
        for semaphore in self.wake:
            semaphore.release()
        for thread in self.threads:
            thread.join()


class Threads:
    """Runs a tape on several threads (see localllm.kernels.cpu.runner for the rules).

    The threads end with `close`, when the last reference is gone, or when Python ends, whichever comes first.
    """

    def __init__(self, count: int, addresses: dict[str, int], tape: np.ndarray, keep: Any = None):
        self._team = Team(count, addresses, tape, keep)
        self.close = weakref.finalize(self, self._team.stop)
        for thread in self._team.threads:
            thread.start()

    def run(self) -> None:
        """Run the tape once. Threads that sleep are woken, but nobody waits for them."""
        team = self._team
        for i, sleeping in enumerate(team.sleeping):
            if sleeping:
                team.sleeping[i] = False
                team.wake[i].release()
        team.run(team.job.ctypes.data, 0, 0, 0)


def aligned_zeros(size: int) -> np.ndarray:
    """int64 zeros of `size` bytes that begin at a cache line."""
    memory = np.zeros(size // 8 + 8, np.int64)
    start = -memory.ctypes.data % LINE // 8
    return memory[start : start + size // 8]
