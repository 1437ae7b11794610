"""CUDA kernels, for Numba: one file per operation. This module finds a kernel by its name.

A kernel's parameters have the names of its declaration in localllm.kernels.table, in the same order. All are int64:
integers, the bits of a float32, or addresses in GPU memory. A thread computes its share of the grid, and returns at
once if there is no work for it: a grid is made for the maximum number of rows of a program, and `count` is the actual
number.

Vocabulary: a "block" is a block of threads unless it is called a block of weights, a "warp" is 32 threads, a "lane" is
a thread of a warp, a "unit" is 32 weights of a row (matmul/planes.py). Other terms are defined in
localllm/kernels/__init__.py.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from localllm.kernels.table import KERNELS, load_kernel

MAX_EXPERTS = 1024  # maximum number of experts of a router
MAX_SELECTION_BLOCKS = (
    64  # blocks of threads that select keys at the same time; each has memory for the scores of a context
)


class LaunchGrid(NamedTuple):
    """The grid of a launch: the number of blocks in x and in y, and of threads per block."""

    x: int
    y: int
    threads: int


Arguments = Mapping[str, Any]  # of a launch, by name


def get_block_threads() -> int:
    """Return the usual number of threads of a block."""
    from localllm.kernels.cuda.gpu import BLOCK  # imports Numba

    return BLOCK


def get_warp_lanes() -> int:
    """Return the number of threads of a warp."""
    from localllm.kernels.cuda.gpu import WARP  # imports Numba

    return WARP


def make_row_grid(size: int) -> Callable[[Arguments, int], LaunchGrid]:
    """Build a function that returns a grid with a thread for every `size` columns of a row."""
    return lambda a, rows: LaunchGrid(rows, -(-a["columns"] // (size * get_block_threads())), get_block_threads())


def create_item_grid(count: int) -> LaunchGrid:
    """Return a grid with a thread for each of `count` items."""
    return LaunchGrid(-(-count // get_block_threads()), 1, get_block_threads())


def create_norm_grid(a: Arguments, rows: int) -> LaunchGrid:
    """Return a grid for norms.

    It has a block for each group of columns of a row, and a thread for every four columns of the group.
    """
    warp, columns = get_warp_lanes(), a.get("columns") or a["heads"] * a["head_dim"]
    group = a.get("group") or a.get("head_dim") or columns
    return LaunchGrid(rows, columns // group, min(-(-group // (4 * warp)) * warp, 4 * get_block_threads()))


def create_state_grid(a: Arguments, rows: int) -> LaunchGrid:
    """Return a grid for recurrent states.

    It has a block for every ACROSS columns of the states, rounded up to 16 columns per head.
    """
    from localllm.kernels.cuda.recurrent import ACROSS  # imports Numba

    heads, width = (a["heads"], a["value_dim"]) if "heads" in a else (1, a["columns"])
    return LaunchGrid(heads * -(-width // 16) * 16 // ACROSS, 1, get_block_threads())


def create_few_grid(a: Arguments, rows: int) -> LaunchGrid:
    """Return a grid with a block for each token, bundle of query heads, and section of a context."""
    from localllm.kernels.cuda.attention.shared import THREADS

    return LaunchGrid(rows, a["kv_heads"] * a["bundles"] * a["parts"], THREADS)


def create_many_grid(a: Arguments, rows: int) -> LaunchGrid:
    """Return a grid with a block for every ROWS rows of a key-value head.

    The number of blocks is limited: with many short sequences, a block processes several units of rows.
    """
    from localllm.kernels.cuda.attention.attend_many import ROWS
    from localllm.kernels.cuda.attention.shared import THREADS

    heads, kv_heads = a["heads"], a["kv_heads"]
    return LaunchGrid(-(-rows * (heads // kv_heads) // ROWS) + min(rows, 16), kv_heads, THREADS)


def create_matrix_grid(a: Arguments, rows: int) -> LaunchGrid:
    """Return a grid for products with matrices that are stored as planes.

    Each pair of matrix rows gets a block of up to 4 warps, for each expert that has tokens.
    """
    warp, units = get_warp_lanes(), a["columns"] // 32
    return LaunchGrid(-(-a["rows"] // 2), min(a["experts"], rows), warp * min(4, -(-units // warp)))


GRIDS: dict[str, Callable[[Arguments, int], LaunchGrid]] = {
    "by_row": lambda a, rows: LaunchGrid(rows, 1, get_block_threads()),
    "by_norm": create_norm_grid,
    "by_four": make_row_grid(4),
    "by_entry": make_row_grid(1),
    # small blocks: for each head of a row, and for every `block` columns of it
    "by_head": lambda a, rows: LaunchGrid(rows, a["heads"], min(64, get_block_threads())),
    "by_matrix": lambda a, rows: LaunchGrid(rows, a["columns"] // a["block"], min(64, get_block_threads())),
    # a thread for each column, which processes all rows, or four threads, which share the tokens
    "by_column": lambda a, rows: create_item_grid(a["columns"]),
    "by_column_and_tokens": lambda a, rows: LaunchGrid(-(-a["columns"] // get_block_threads()), 4, get_block_threads()),
    # a block for each pair of a token and one of its experts
    "by_pair": lambda a, rows: LaunchGrid(rows, a["used"], get_block_threads()),
    "warp_by_row": lambda a, rows: LaunchGrid(rows, 1, get_warp_lanes()),
    "by_state": create_state_grid,
    "once": lambda a, rows: LaunchGrid(1, 1, get_block_threads()),
    "attend_few": create_few_grid,
    "attend_many": create_many_grid,
    "by_token": lambda a, rows: create_item_grid(rows),
    # a block for each token; with more than CHOOSING, each block processes several
    "some_tokens": lambda a, rows: LaunchGrid(min(rows, MAX_SELECTION_BLOCKS), 1, get_block_threads()),
    "words": lambda a, rows: LaunchGrid(min(-(-a["words"] // get_block_threads()), 64), 1, get_block_threads()),
    # a thread for every 32 weights of a range, four threads for every 32 weights, or for every 32 activations
    "by_unit": lambda a, rows: create_item_grid((a["last"] - a["first"]) // 32),
    "by_unpacked_unit": lambda a, rows: create_item_grid(a["rows"] * a["columns"] // 8),
    "by_activations": lambda a, rows: create_item_grid(rows * a["columns"] // 8),
    "by_two_rows": create_matrix_grid,
    # a warp for each row of the matrix and each expert that can have rows
    "by_warp": lambda a, rows: LaunchGrid(
        -(-a["rows"] * get_warp_lanes() // get_block_threads()), min(a["experts"], rows), get_block_threads()
    ),
}


def count_tokens_at_once(tokens: int) -> int:
    """Return the number of tokens that a product's kernel processes at once: 1, 2, 4 or 8.

    It is part of the kernel's name, such as the 4 in linear_planes-4-Q4_K.
    """
    return min(1 << (tokens - 1).bit_length(), 8)


def find_kernel(name: str) -> Callable[..., None]:
    """Return the Python function of a kernel, for Numba to compile."""
    return load_kernel("cuda", name)


def compute_grid(name: str, arguments: Arguments, rows: int) -> LaunchGrid:
    """Return the launch grid of a kernel.

    rows: the maximum number of rows.
    """
    return GRIDS[KERNELS[name.partition("-")[0]].grid](arguments, rows)


def list_parameters(name: str) -> tuple[str, ...]:
    """Return the names of a kernel's parameters, in order."""
    names: tuple[str, ...] = KERNELS[name.partition("-")[0]].arguments._fields
    return names
