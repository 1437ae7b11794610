"""Measure products of one and a few tokens, by format.

    python scripts/measure few [FORMAT...]

Milliseconds of a matrix that comes from memory, by what one token takes, and nanoseconds per core for 4 rows of 256
columns of a matrix in the L2 cache, with activations in 16 bits: the arithmetic, without waiting for memory. The counts
take turns; medians. With what the activations need first, as a tape runs it.
"""

import statistics

import numpy as np
from common import make_parser, print_header, print_row
from lanes import Product
from synthetic_blocks import random_matrix

from localllm.kernels.machine import get_lane_name
from localllm.quant.formats import BY_NAME

COUNTS = (1, 2, 4, 8, 16)
LARGE, SMALL = (16384, 4096), (512, 2048)  # rows, columns


def take_turns(product: Product, rounds: int) -> dict[int, float]:
    """Return the median of the seconds of a product, by the number of tokens."""
    taken: dict[int, list[float]] = {count: [] for count in COUNTS}
    for _ in range(rounds):
        for count in COUNTS:
            taken[count].append(product.seconds(count, True, 1))
    return {count: statistics.median(times) for count, times in taken.items()}


def make_product(name: str, rows: int, columns: int, threads: int) -> Product:
    format = BY_NAME[name]
    data = np.concatenate([*random_matrix(format, rows, columns, np.random.default_rng(0))]).reshape(-1)
    return Product(data, format, rows, columns, threads, False)


def main() -> None:
    """Parse, measure, print."""
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument("formats", nargs="*", default=["Q4_K", "Q6_K", "Q8_0", "Q4_0"], metavar="FORMAT")
    options = parser.parse_args()
    print(f"{get_lane_name()}, {options.threads} threads\n")
    print_header(["tokens", *map(str, COUNTS)])
    for name in options.formats:
        product = make_product(name, *LARGE, options.threads)
        taken = take_turns(product, options.rounds)
        product.threads.close()
        print_row([f"{name}, ms (ratio)", *(f"{1e3 * t:.2f} ({t / taken[1]:.2f})" for t in taken.values())])
        product = make_product(name, *SMALL, 1)
        tiles = SMALL[0] * SMALL[1] / 1024
        cells = (f"{1e9 * t / tiles:.1f}" for t in take_turns(product, 10 * options.rounds).values())
        product.threads.close()
        print_row([f"{name} in L2, ns", *cells])


if __name__ == "__main__":
    main()
