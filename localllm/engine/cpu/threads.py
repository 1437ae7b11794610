"""The compute threads, which stay in native code between the steps of a run."""

import ctypes
import os
import threading
import weakref

import numpy as np

from localllm.kernels.cpu.shared_job import JOB, JOB_WORDS
from localllm.system.cpu import LINE
from localllm.system.processes import prepare_waiting, waiting_functions

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class WorkerGroup:
    """The state that threads share.

    It has no reference to `Threads`, which can therefore be garbage-collected while threads sleep.
    """

    def __init__(self, addresses: dict[str, int], tape: np.ndarray, keep: object):
        """Allocate the shared job; tape: int64 [steps, len(STEP)]; keep: objects that must outlive the tape."""
        self.keep = keep, tape
        self.run, self.work = KERNEL(addresses["run"]), KERNEL(addresses["work"])
        self.cells, self.job = aligned_zeros(len(tape) * LINE), aligned_zeros(JOB_WORDS * 8)
        for place, value in ((JOB.tape, tape.ctypes.data), (JOB.steps, len(tape)), (JOB.cells, self.cells.ctypes.data)):
            self.job[place] = value
        self.prepare_system_calls()
        self.threads: list[threading.Thread] = []
        self.process = os.getpid()

    def prepare_system_calls(self) -> None:
        """Write the addresses of the system's waiting functions, mutexes and condition to the job."""
        self.job[JOB.offer : JOB.wake + 1] = waiting_functions()
        run, sleep, wake = (
            self.job.ctypes.data + 8 * place for place in (JOB.run_mutex, JOB.sleep_mutex, JOB.wake_condition)
        )
        prepare_waiting((run, sleep), wake)

    def choose(self, first: int, end: int) -> None:
        """Set the steps of the next runs. A late thread sees that its run is over, and executes no step."""
        tape = self.keep[1]
        self.job[JOB.tape], self.job[JOB.steps] = tape[first:].ctypes.data, end - first

    def start(self, count: int) -> None:
        for i in range(1, count):
            thread = threading.Thread(target=self.live, args=(i,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def live(self, thread: int) -> None:
        self.work(self.job.ctypes.data, thread, 0, 0)

    def end(self) -> None:
        """Tell the threads to end after the current run, without waiting; does nothing in a forked process.

        A finalizer that waited could hold a lock of `threading` that they need to end.
        """
        if os.getpid() == self.process:
            self.run(self.job.ctypes.data, 1, 0, 0)

    def join(self) -> None:
        if os.getpid() == self.process:
            for thread in self.threads:
                thread.join()


class Threads:
    """Runs a tape on several threads (see localllm.kernels.cpu.tape_runner for the rules).

    The threads end with `close`, with the last reference, or when Python ends, whichever comes first.
    """

    def __init__(self, count: int, addresses: dict[str, int], tape: np.ndarray, keep: object = None):
        self._team = WorkerGroup(addresses, tape, keep)
        self._end = weakref.finalize(self, self._team.end)
        self._team.start(count)

    def close(self) -> None:
        self._end()
        self._team.join()

    def run(self) -> None:
        """Run the tape once; after `close`, on the caller's thread alone. Concurrent calls are serialized.

        Ctrl-C takes effect after the run. Memory that the tape reads may change only between runs.
        """
        self._team.run(self._team.job.ctypes.data, 0, 0, 0)

    def run_steps(self, first: int, end: int) -> None:
        """Run only steps [first, end), which must be whole stages; `run` then repeats these steps.

        Only a single caller may use it, and must run the other steps later.
        """
        self._team.choose(first, end)
        self.run()


def aligned_zeros(size: int) -> np.ndarray:
    """Allocate int64 zeros, `size` bytes, aligned to a cache line."""
    memory = np.zeros((size + LINE) // 8, np.int64)
    start = -memory.ctypes.data % LINE // 8
    return memory[start : start + size // 8]
