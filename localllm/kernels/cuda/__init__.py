"""CUDA kernels, for Numba: one file per kind, one function per verb. This file finds a kernel by its name.

A kernel's parameters are the names of its declaration in localllm.kernels.arguments, in that order, all int64: numbers,
the bits of a float32, or addresses on the card. It treats its piece of the grid and returns at once where there is no
work for it: grids have room for the most rows of a program, `count` says how many there are.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from localllm.kernels.arguments import KERNELS


class Grid(NamedTuple):
    """Blocks of a launch, in x and y, and threads of a block."""

    x: int
    y: int
    threads: int


def by_row(arguments: Mapping[str, Any], rows: int) -> Grid:
    """A block for each row."""
    return Grid(rows, 1, block_threads())


def once(arguments: Mapping[str, Any], rows: int) -> Grid:
    """A single block."""
    return Grid(1, 1, block_threads())


def attend_few(arguments: Mapping[str, Any], rows: int) -> Grid:
    """A block for each token, bundle of heads, and part of a context."""
    from localllm.kernels.cuda.attend_few import THREADS

    return Grid(rows, arguments["kv_heads"] * arguments["bundles"] * arguments["parts"], THREADS)


def by_head(arguments: Mapping[str, Any], rows: int) -> Grid:
    """A block for each head of a row."""
    return Grid(rows, arguments["heads"], block_threads())


def block_threads() -> int:
    from localllm.kernels.cuda.device import BLOCK  # imports Numba

    return BLOCK


# Of each kernel its file and its grid, from its arguments by name and the most rows that it will meet.
MODULES: dict[str, tuple[str, Callable[[Mapping[str, Any], int], Grid]]] = {
    "rms_norm": ("norms", by_row),
    "attend_few": ("attend_few", attend_few),
    "merge_few": ("attend_few", by_head),
}


def kernel(name: str) -> Callable[..., None]:
    """The function of that name, for Numba to compile; behind a hyphen stands the format that it is made for."""
    kind, _, format_name = name.partition("-")
    module = import_module(f"localllm.kernels.cuda.{MODULES[kind][0]}")
    return module.make(format_name) if format_name else getattr(module, kind)


def grid(name: str, arguments: Mapping[str, Any], rows: int) -> Grid:
    """How to launch it."""
    return MODULES[name.partition("-")[0]][1](arguments, rows)


def parameters(name: str) -> tuple[str, ...]:
    """The names of its arguments."""
    return KERNELS[name.partition("-")[0]]._fields
