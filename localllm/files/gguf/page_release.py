"""Releases the pages of a mapped file after use, so that the process's memory stays small.

The system may keep the file's content in its cache, from which later reads map the pages again.
"""

import mmap

import numpy as np

from localllm.system import memory


def map_of(view: np.ndarray) -> tuple[mmap.mmap, int] | None:
    """Return the map that an array is a view of, and the view's offset in it; None for any other array."""
    content = view
    while isinstance(content.base, np.ndarray):
        content = content.base
    data = content.base.obj if isinstance(content.base, memoryview) else content.base
    return (data, view.ctypes.data - content.ctypes.data) if isinstance(data, mmap.mmap) else None


def release_pages(view: np.ndarray) -> None:
    """Release the whole pages within a view of a mapped file; other arrays stay as they are."""
    if mapping := map_of(view):
        data, start = mapping
        memory.release_pages(data, start, start + view.nbytes)
