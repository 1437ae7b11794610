"""Measure matrix products in each lane of this CPU, by format.

    python scripts/measure lanes [FORMAT...]

For 9 to 512 tokens: milliseconds, billions of operations per second and the error (normalized, mean square) of one
product with what its activations need first, as a tape runs it. Lanes: the kernels for any CPU, with activations in 16
bits and in 8, and BF16 tiles where there is AMX, in two planes and in one. At the end, from how many tokens on tiles
win: the numbers for LEAST_IN_TILES in localllm/kernels/cpu/__init__.py. --emulated: anywhere, slowly.
"""

import ctypes
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import make_parser
from synthetic_blocks import PLAIN, random_matrix

from localllm.arch.layer_state import KVType
from localllm.engine.cpu import lowering
from localllm.engine.cpu.kernel_variants import VariantLoader
from localllm.engine.cpu.lowering import VERBS, CpuTarget, optimize_graph
from localllm.engine.cpu.program import TapeThreads
from localllm.engine.lower.activation import ALL, Activation
from localllm.engine.lower.header import RunHeader
from localllm.engine.lower.steps import StepBuilder, StepMemory
from localllm.engine.lower.tape import Tape
from localllm.engine.memory.cache import KVCache
from localllm.engine.operations.linear import Linear
from localllm.engine.operations.operation import lower
from localllm.engine.runs import BATCH, PRECISE_TOKENS
from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.machine import get_lane_name, has_tiles
from localllm.kernels.reference import dequantize
from localllm.quant.formats import BY_NAME

TOKENS = (9, 12, 16, 24, 32, 48, 64, 128, 512)
LANES = {"16 bits": (False, True), "8 bits": (False, False), "2 planes": (True, True), "1 plane": (True, False)}


class Product:
    """y = W x as the engine does it, in tiles or not."""

    def __init__(self, weights: np.ndarray, format: Any, rows: int, columns: int, threads: int, in_tiles: bool):
        tensor = SimpleNamespace(data=weights, format=format, nbytes=weights.nbytes)
        x, y = Activation(ALL, columns), Activation(ALL, rows)
        weight: Any = SimpleNamespace(tensor=tensor, name="weights", shape=(rows, columns))
        target, self.header = CpuTarget(threads, in_tiles, VERBS), RunHeader()
        steps = StepBuilder(target, StepMemory(KVCache([], 64, KVType.parse("f16")), None, self.header), {})
        steps.allocate(x)
        for operation in optimize_graph([Linear((x,), y, weight, None)], target):
            lower(steps, operation, target)
        self.tape = Tape(steps.all)
        self.library = KernelLibrary(self.tape.kernels | {"run", "work"}, None, target.variants.list_all_names())
        VariantLoader(self.library, target.variants, None).prepare_all()
        tape = self.tape.finish(self.library.addresses, threads)
        self.threads = TapeThreads(threads, self.library.addresses, tape, keep=self)
        self._x, self._y = (rows_of(steps.buffers[one], BATCH) for one in (x, y))
        self.x = np.random.default_rng(0).standard_normal((BATCH, columns), np.float32)
        self.y = self._y[:, :rows]

    def seconds(self, tokens: int, precise: bool, rounds: int) -> float:
        """Return the median."""
        header, taken = self.header, []
        header.numbers[:] = tokens, 0, 1, BATCH if precise else 1, 0, 0
        header.kernel_tokens[:], header.few_counts[:] = tokens, 0
        for _ in range(rounds + 1):
            self._x[:tokens, : self.x.shape[1]] = self.x[:tokens]  # y may lie where it was
            start = time.perf_counter()
            self.threads.run()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])


def rows_of(buffer: Any, rows: int) -> np.ndarray:
    """Return a buffer of a finished tape, float32 [rows, stride]."""
    numbers = (ctypes.c_float * (rows * buffer.stride // 4)).from_address(buffer.address)
    return np.frombuffer(numbers, np.float32).reshape(rows, -1)


def error(y: np.ndarray, x: np.ndarray, weights: np.ndarray) -> float:
    exact = x.astype(np.float64) @ weights.astype(np.float64).T
    return float(((y - exact) ** 2).sum() / (exact**2).sum())


def measure(name: str, rows: int, columns: int, threads: int, rounds: int, lanes: list[str]) -> int | None:
    """Print a table; the least tokens from which on tiles win, None if they do not or there are none."""
    format = BY_NAME[name]
    data = np.concatenate([*random_matrix(format, rows, columns, np.random.default_rng(0))]).reshape(-1)
    tensor = SimpleNamespace(data=data, format=format, shape=(rows, columns))
    exact = dequantize(tensor)
    kinds = {LANES[one][0] for one in lanes}
    products = {in_tiles: Product(data, format, rows, columns, threads, in_tiles) for in_tiles in kinds}
    print(f"\n{name}, {rows} x {columns}: ms, GOPS, error\ntokens" + "".join(f"{one:>26}" for one in lanes), flush=True)
    won: list[bool] = []
    for tokens in TOKENS:
        taken, cells = {}, []
        for one in lanes:
            in_tiles, precise = LANES[one]
            product = products[in_tiles]
            taken[one] = product.seconds(tokens, precise, rounds)
            wrong = error(product.y[:tokens], product.x[:tokens], exact)
            gops = 2 * tokens * rows * columns / taken[one] / 1e9
            cells.append(f"{1e3 * taken[one]:10.2f}{gops:7.0f}{wrong:9.1e}")
        print(f"{tokens:6}" + "".join(cells), flush=True)
        theirs, ours = ("16 bits", "2 planes") if tokens <= PRECISE_TOKENS else ("8 bits", "1 plane")
        won.append(ours in taken and taken[ours] < taken[theirs])
    least = next((tokens for i, tokens in enumerate(TOKENS) if all(won[i:])), None)
    for product in products.values():
        product.threads.close()
    return least


def main() -> None:
    """Parse, measure, suggest."""
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("formats", nargs="*", default=["Q4_0", "Q8_0", "Q4_K", "Q6_K", "F16", "BF16"], metavar="FORMAT")
    parser.add_argument("--all", action="store_true", help="all formats")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--emulated", action="store_true")
    options = parser.parse_args()
    lanes = [name for name, (in_tiles, _) in LANES.items() if not in_tiles or has_tiles() or options.emulated]
    print(f"{get_lane_name()}, {options.threads} threads")
    for name in lowering.MIN_TILE_TOKENS:  # so that tiles are tried with any number
        lowering.MIN_TILE_TOKENS[name] = 1
    lowering.MIN_SOME_TILES = 1
    sizes = options.rows, options.columns, options.threads, options.rounds
    least = {name: measure(name, *sizes, lanes) for name in (PLAIN if options.all else options.formats)}
    if len(lanes) == len(LANES):
        print("\nTiles win from so many tokens on:", ", ".join(f"{name}: {n}" for name, n in least.items()))
