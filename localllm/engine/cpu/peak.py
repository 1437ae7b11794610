"""Measure the peak operations per second of the instructions that multiply matrices, which bounds prefill."""

from time import perf_counter

import numpy as np

from localllm.engine.cpu.threads import Threads
from localllm.engine.lower.tape import Buffer, Step, Tape
from localllm.kernels.build.library import Library
from localllm.kernels.cpu import PEAK_BYTES, PEAK_PRODUCTS, PEAK_TILE_PRODUCTS
from localllm.kernels.machine import has_tiles, lane_name

ROUNDS = 20_000  # of a part: about a millisecond
PASSES = 10
PARTS = 4  # per thread


def peak_operations(threads: int) -> float | None:
    """Measure multiplications plus additions per second, the best of PASSES passes.

    None if the CPU has no instruction that multiplies bytes.
    """
    if lane_name() == "portable":
        return None
    name, rounds = ("multiply_peak_tiles", ROUNDS // 100) if has_tiles() else ("multiply_peak", ROUNDS)
    library, tape, parts = Library({name, "run", "work"}), Tape(), PARTS * threads
    memory = np.ones(parts * PEAK_BYTES, np.uint8)
    tape.append(Step(name, {"memory": memory, "rounds": rounds}, parts, None, [], [Buffer(0, 0)]))
    walkers = Threads(threads, library.addresses, tape.finish(library.addresses), keep=(library, tape))
    try:
        seconds = min(timed(walkers) for _ in range(PASSES))
    finally:
        walkers.close()
    return 2 * parts * rounds * (PEAK_TILE_PRODUCTS if has_tiles() else PEAK_PRODUCTS) / seconds


def timed(walkers: Threads) -> float:
    """Run the tape once; returns seconds."""
    start = perf_counter()
    walkers.run()
    return perf_counter() - start
