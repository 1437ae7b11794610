"""Measure memory bandwidth, which bounds decode, and peak operations per second, which bound prefill."""

from time import perf_counter

import numpy as np

from localllm.engine.cpu.program import TapeThreads
from localllm.engine.lower.tape import Buffer, KernelStep, Tape
from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.cpu import PEAK_BYTES, PEAK_PRODUCTS, PEAK_TILE_PRODUCTS
from localllm.kernels.machine import get_lane_name, has_tiles
from localllm.system.memory import get_available_memory

# Bytes to read, much more than a CPU cache holds. With a power of two the kernel's four streams would share memory
# banks: 24 GB/s on one core instead of 35.
BUFFER_BYTES = 500_000 * 1024
MIN_BUFFER_BYTES = 1 << 24  # bytes; a smaller buffer would measure a cache
PASSES = 10
PARTS = 8  # per thread, as in a matrix product


class MemoryReader:
    """A buffer, and threads that read it. The memory is freed with the last reference.

    Attributes:
        words: the data, int64.
        results: exclusive or of the 64-byte lines of each part, int64 [parts, 8].
    """

    def __init__(self, threads: int, size: int = BUFFER_BYTES):
        """Fill a buffer of `size` bytes, a multiple of 1024."""
        self.words = np.arange(size // 8)  # NumPy requests huge pages, which are 3 % faster
        self.results = np.zeros((PARTS * threads, 8), np.int64)
        library, tape = KernelLibrary({"stream", "run", "work"}), Tape()
        arguments = {"memory": self.words, "size": size, "results": self.results}
        tape.append(KernelStep("stream", arguments, len(self.results), None, [], [Buffer(0, 0)]))
        steps = tape.finish(library.addresses)
        self._threads = TapeThreads(threads, library.addresses, steps, keep=(library, tape))

    def run(self) -> float:
        start = perf_counter()
        self._threads.run()
        return self.words.nbytes / (perf_counter() - start)

    def close(self) -> None:
        self._threads.close()


def measure_read_bandwidth(threads: int) -> float:
    """Return the bytes read per second, the best of PASSES passes.

    The buffer takes at most a quarter of the available memory.
    """
    size = min(BUFFER_BYTES, max(get_available_memory() // 4, MIN_BUFFER_BYTES) // 1024 * 1024)
    reader = MemoryReader(threads, size)
    try:
        return max(reader.run() for _ in range(PASSES))
    finally:
        reader.close()


# Per part, about a millisecond. Threads that were just started take part up to 7 ms late on a virtual machine: when a
# part took 0.04 ms, two threads often seemed as slow as one, and tiles reached 0.7 of their peak.
PEAK_ROUNDS = 400_000
PEAK_PARTS = 4  # per thread


def measure_peak_operations(threads: int) -> float | None:
    """Return the multiplications plus additions per second, the best of PASSES passes.

    None if the CPU has no instruction that multiplies bytes.
    """
    if get_lane_name() == "portable":
        return None
    name, rounds = ("multiply_peak_tiles", PEAK_ROUNDS // 10) if has_tiles() else ("multiply_peak", PEAK_ROUNDS)
    library, tape, parts = KernelLibrary({name, "run", "work"}), Tape(), PEAK_PARTS * threads
    memory = np.ones(parts * PEAK_BYTES, np.uint8)
    tape.append(KernelStep(name, {"memory": memory, "rounds": rounds}, parts, None, [], [Buffer(0, 0)]))
    walkers = TapeThreads(threads, library.addresses, tape.finish(library.addresses), keep=(library, tape))
    try:
        seconds = min(time_run(walkers) for _ in range(PASSES))
    finally:
        walkers.close()
    return 2 * parts * rounds * (PEAK_TILE_PRODUCTS if has_tiles() else PEAK_PRODUCTS) / seconds


def time_run(walkers: TapeThreads) -> float:
    start = perf_counter()
    walkers.run()
    return perf_counter() - start
