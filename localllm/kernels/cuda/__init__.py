"""CUDA kernels, for Numba: one file per operation. This module finds a kernel by its name.

A kernel's parameters are the names of its declaration in localllm.kernels.table, in that order, all int64: numbers,
the bits of a float32, or addresses in GPU memory. A thread computes its part of the grid, and returns at once if there
is no work for it: a grid is made for the most rows that a program can have, and `count` says how many there are.

Words: a block is a block of threads unless it is "of weights", a warp is 32 threads, a lane is a thread of a warp; a
"unit" is 32 weights of a row (matmul/planes.py). For the others see localllm/kernels/__init__.py.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from localllm.kernels.table import FORMULAS, KERNELS

MOST_EXPERTS = 1024  # most experts of a router
CHOOSING = 64  # blocks of threads that select keys at the same time; each has memory for the scores of a context


class Grid(NamedTuple):
    """The grid of a launch: blocks in x and y, and threads of a block."""

    x: int
    y: int
    threads: int


def by_row(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a block for each row."""
    return Grid(rows, 1, block_threads())


def by_norm(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a block for each group of columns of a row, and a thread for every four columns of it."""
    warp, columns = warp_lanes(), arguments.get("columns") or arguments["heads"] * arguments["head_dim"]
    group = arguments.get("group") or arguments.get("head_dim") or columns
    return Grid(rows, columns // group, min(-(-group // (4 * warp)) * warp, 4 * block_threads()))


def by_four(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a thread for every four columns of a row."""
    return Grid(rows, -(-arguments["columns"] // (4 * block_threads())), block_threads())


def by_entry(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a thread for each column of a row."""
    return Grid(rows, -(-arguments["columns"] // block_threads()), block_threads())


def by_head(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a small block for each head of a row."""
    return Grid(rows, arguments["heads"], min(64, block_threads()))


def by_matrix(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a small block for every `block` columns of a row."""
    return Grid(rows, arguments["columns"] // arguments["block"], min(64, block_threads()))


def by_column(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a thread for each column, which processes all rows."""
    return Grid(-(-arguments["columns"] // block_threads()), 1, block_threads())


def by_pair(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a block for each pair of a token and one of its experts."""
    return Grid(rows, arguments["used"], block_threads())


def warp_by_row(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a warp for each row."""
    return Grid(rows, 1, warp_lanes())


def by_column_and_tokens(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with four threads for each column, which share the tokens."""
    return Grid(-(-arguments["columns"] // block_threads()), 4, block_threads())


def by_state(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a block for every ACROSS columns of recurrent states, rounded up to 16 columns per head."""
    from localllm.kernels.cuda.recurrent import ACROSS  # imports Numba

    heads, width = (
        (arguments[key] for key in ("heads", "value_dim")) if "heads" in arguments else (1, arguments["columns"])
    )
    return Grid(heads * -(-width // 16) * 16 // ACROSS, 1, block_threads())


def once(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a single block."""
    return Grid(1, 1, block_threads())


def attend_few(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a block for each token, bundle of query heads, and part of a context."""
    from localllm.kernels.cuda.attention.shared import THREADS

    return Grid(rows, arguments["kv_heads"] * arguments["bundles"] * arguments["parts"], THREADS)


def attend_many(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a block for every ROWS rows of a key-value head.

    The number of blocks is limited: with many short sequences, a block processes several units of rows.
    """
    from localllm.kernels.cuda.attention.attend_many import ROWS
    from localllm.kernels.cuda.attention.shared import THREADS

    heads, kv_heads = arguments["heads"], arguments["kv_heads"]
    return Grid(-(-rows * (heads // kv_heads) // ROWS) + min(rows, 16), kv_heads, THREADS)


def by_token(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a thread for each token."""
    return by_number(rows)


def some_tokens(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a block for each token, at most CHOOSING; with more tokens, each block processes several."""
    return Grid(min(rows, CHOOSING), 1, block_threads())


def words(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a thread for every few int64 words, at most 64 blocks."""
    return Grid(min(-(-arguments["words"] // block_threads()), 64), 1, block_threads())


def by_number(count: int) -> Grid:
    """Return a grid with a thread for each of `count` items."""
    return Grid(-(-count // block_threads()), 1, block_threads())


def by_unit(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a thread for every 32 weights of a range of a matrix."""
    return by_number((arguments["last"] - arguments["first"]) // 32)


def by_unpacked_unit(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with four threads for every 32 weights of some rows."""
    return by_number(arguments["rows"] * arguments["columns"] // 8)


def by_activations(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with four threads for every 32 activations."""
    return by_number(rows * arguments["columns"] // 8)


def busy_experts(arguments: Mapping[str, Any], rows: int) -> int:
    """Return the most experts that can have rows in a run."""
    return min(arguments["experts"], rows)


def by_two_rows(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a block for every two rows of the matrix and each expert that can have rows.

    A block has up to 4 warps, fewer for short rows.
    """
    warp, units = warp_lanes(), arguments["columns"] // 32
    return Grid(-(-arguments["rows"] // 2), busy_experts(arguments, rows), warp * min(4, -(-units // warp)))


def by_warp(arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return a grid with a warp for each row of the matrix and each expert that can have rows."""
    return Grid(-(-arguments["rows"] * warp_lanes() // block_threads()), busy_experts(arguments, rows), block_threads())


def block_threads() -> int:
    """Return the usual number of threads of a block."""
    from localllm.kernels.cuda.gpu import BLOCK  # imports Numba

    return BLOCK


def warp_lanes() -> int:
    """Return the number of threads of a warp."""
    from localllm.kernels.cuda.gpu import WARP  # imports Numba

    return WARP


def at_a_time(tokens: int) -> int:
    """Return how many tokens a product's kernel processes at a time: 1, 2, 4 or 8.

    It is part of the kernel's name, as the 4 in linear_planes-4-Q4_K.
    """
    return min(1 << (tokens - 1).bit_length(), 8)


def kernel(name: str) -> Callable[..., None]:
    """Return the Python function of a kernel, for Numba to compile.

    name: the kernel's, as "route"; one that is made per format has the format after a hyphen, as "embed-Q4_K".
    """
    kind, _, format_name = name.partition("-")
    module = import_module(f"localllm.kernels.cuda.{KERNELS[kind].cuda}")
    if kind in FORMULAS:
        return module.make(kind)
    if not format_name:
        return getattr(module, kind)
    return getattr(module, f"make_{kind}" if hasattr(module, f"make_{kind}") else "make")(format_name)


def grid(name: str, arguments: Mapping[str, Any], rows: int) -> Grid:
    """Return the launch grid of a kernel; arguments: by name; rows: the most rows."""
    grid_of: Callable[[Mapping[str, Any], int], Grid] = globals()[KERNELS[name.partition("-")[0]].grid]
    return grid_of(arguments, rows)


def parameters(name: str) -> tuple[str, ...]:
    """Return the names of a kernel's parameters."""
    names: tuple[str, ...] = KERNELS[name.partition("-")[0]].arguments._fields
    return names
