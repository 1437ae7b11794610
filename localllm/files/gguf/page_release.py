"""Gives pages of a mapped file back behind their use, so that a process need not hold all that it reads once.

The system keeps the file in its cache as long as it likes: what is read again is mapped again.
"""

import mmap

import numpy as np

from localllm.system import memory


def map_of(view: np.ndarray) -> tuple[mmap.mmap, int] | None:
    """The map in which a view of a file lies, and where it begins there; None for an array that is no such view."""
    content = view
    while isinstance(content.base, np.ndarray):
        content = content.base
    held = content.base.obj if isinstance(content.base, memoryview) else None
    return (held, view.ctypes.data - content.ctypes.data) if isinstance(held, mmap.mmap) else None


def forget(view: np.ndarray) -> None:
    """The whole pages within a view of a mapped file; other arrays stay as they are."""
    if found := map_of(view):
        data, start = found
        memory.forget(data, start, start + view.nbytes)
