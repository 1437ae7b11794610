"""A card that is Numba's simulator: memory of the host, kernels as threads of Python.

Import this before anything that imports kernels: their warps are of 4 lanes here, and their blocks of 8.
"""

import numpy as np
from numba import cuda

from localllm.kernels.cuda import device

WARP, BLOCK = 4, 8
device.WARP, device.BLOCK = WARP, BLOCK

from localllm.kernels.cuda import Grid, grid, kernel, parameters  # noqa: E402


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def encoded(value) -> int:
    """An argument as kernels get it."""
    if isinstance(value, np.ndarray):
        return address(value)
    return int(np.float32(value).view(np.int32)) if isinstance(value, float) else int(value)


def launch(name: str, rows: int, /, **arguments) -> None:
    """Run a kernel whose arguments, by name, are numbers and arrays; rows: the most that there may be."""
    simulate(name, grid(name, arguments, rows), [encoded(arguments[key]) for key in parameters(name)])


def simulate(name: str, how: Grid, arguments: list[int]) -> None:
    """Run a kernel."""
    cuda.jit(kernel(name))[(how.x, how.y), how.threads](*arguments)
