"""Measure the memory read bandwidth, which bounds decode."""

from time import perf_counter

import numpy as np

from localllm.engine.cpu.threads import Threads
from localllm.engine.lower.tape import Buffer, Step, Tape
from localllm.kernels.build.library import Library
from localllm.system.memory import available_memory

# Bytes to read, much more than a CPU cache holds. With a power of two the kernel's four streams would share memory
# banks: 24 GB/s on one core instead of 35.
SIZE = 500_000 * 1024
LEAST = 1 << 24  # bytes: with less, a cache would be measured
PASSES = 10
PARTS = 8  # per thread, as for a matrix


class MemoryReader:
    """A buffer, and threads that read it. The memory is freed with the last reference.

    Attributes:
        words: the data, int64.  results: each part's exclusive or of its lines of 64 bytes, int64 [parts, 8].
    """

    def __init__(self, threads: int, size: int = SIZE):
        """Fill `size` bytes, a multiple of 1024."""
        self.words = np.arange(size // 8)  # NumPy requests huge pages, which are 3 % faster
        self.results = np.zeros((PARTS * threads, 8), np.int64)
        library, tape = Library({"stream", "run", "work"}), Tape()
        arguments = {"memory": self.words, "size": size, "results": self.results}
        tape.append(Step("stream", arguments, len(self.results), None, [], [Buffer(0, 0)]))
        steps = tape.finish(library.addresses)
        self._threads = Threads(threads, library.addresses, steps, keep=(library, tape))

    def run(self) -> float:
        """Read everything once; returns bytes per second."""
        start = perf_counter()
        self._threads.run()
        return self.words.nbytes / (perf_counter() - start)

    def close(self) -> None:
        self._threads.close()


def read_bandwidth(threads: int) -> float:
    """Measure bytes per second, the best of PASSES passes over at most a quarter of the available memory."""
    size = min(SIZE, max(available_memory() // 4, LEAST) // 1024 * 1024)
    reader = MemoryReader(threads, size)
    try:
        return max(reader.run() for _ in range(PASSES))
    finally:
        reader.close()
