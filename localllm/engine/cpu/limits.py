"""Measure memory bandwidth, which bounds decode, and peak operations per second, which bound prefill."""

from time import perf_counter

import numpy as np

from localllm.engine.cpu.program import Threads
from localllm.engine.lower.tape import Buffer, Step, Tape
from localllm.kernels.build.library import Library
from localllm.kernels.cpu import PEAK_BYTES, PEAK_PRODUCTS, PEAK_TILE_PRODUCTS
from localllm.kernels.machine import has_tiles, lane_name
from localllm.system.memory import available_memory

# Bytes to read, much more than a CPU cache holds. With a power of two the kernel's four streams would share memory
# banks: 24 GB/s on one core instead of 35.
SIZE = 500_000 * 1024
LEAST = 1 << 24  # bytes; a smaller buffer would measure a cache
PASSES = 10
PARTS = 8  # per thread, as in a matrix product


class MemoryReader:
    """A buffer, and threads that read it. The memory is freed with the last reference.

    Attributes:
        words: the data, int64.
        results: exclusive or of the 64-byte lines of each part, int64 [parts, 8].
    """

    def __init__(self, threads: int, size: int = SIZE):
        """Fill a buffer of `size` bytes, a multiple of 1024."""
        self.words = np.arange(size // 8)  # NumPy requests huge pages, which are 3 % faster
        self.results = np.zeros((PARTS * threads, 8), np.int64)
        library, tape = Library({"stream", "run", "work"}), Tape()
        arguments = {"memory": self.words, "size": size, "results": self.results}
        tape.append(Step("stream", arguments, len(self.results), None, [], [Buffer(0, 0)]))
        steps = tape.finish(library.addresses)
        self._threads = Threads(threads, library.addresses, steps, keep=(library, tape))

    def run(self) -> float:
        start = perf_counter()
        self._threads.run()
        return self.words.nbytes / (perf_counter() - start)

    def close(self) -> None:
        self._threads.close()


def read_bandwidth(threads: int) -> float:
    """Measure bytes per second, the best of PASSES passes.

    The buffer has at most a quarter of the available memory.
    """
    size = min(SIZE, max(available_memory() // 4, LEAST) // 1024 * 1024)
    reader = MemoryReader(threads, size)
    try:
        return max(reader.run() for _ in range(PASSES))
    finally:
        reader.close()


ROUNDS = 20_000  # per part, about a millisecond
PEAK_PARTS = 4  # per thread


def peak_operations(threads: int) -> float | None:
    """Measure multiplications plus additions per second, the best of PASSES passes.

    Return None if the CPU has no instruction that multiplies bytes.
    """
    if lane_name() == "portable":
        return None
    name, rounds = ("multiply_peak_tiles", ROUNDS // 100) if has_tiles() else ("multiply_peak", ROUNDS)
    library, tape, parts = Library({name, "run", "work"}), Tape(), PEAK_PARTS * threads
    memory = np.ones(parts * PEAK_BYTES, np.uint8)
    tape.append(Step(name, {"memory": memory, "rounds": rounds}, parts, None, [], [Buffer(0, 0)]))
    walkers = Threads(threads, library.addresses, tape.finish(library.addresses), keep=(library, tape))
    try:
        seconds = min(timed(walkers) for _ in range(PASSES))
    finally:
        walkers.close()
    return 2 * parts * rounds * (PEAK_TILE_PRODUCTS if has_tiles() else PEAK_PRODUCTS) / seconds


def timed(walkers: Threads) -> float:
    start = perf_counter()
    walkers.run()
    return perf_counter() - start
