"""Map the pages of a model's file ahead of their first use, and release them after the last one.

The first use of each page of a mapped file costs 1.5 microseconds, even if it is in memory. Mapping many pages at once
costs a fifth of that, and happens on another core: the first run of a 0.7 GB model takes 155 ms instead of 176.

Releasing pages keeps the process's memory small; the system may keep the file's content in its cache, from which later
reads map the pages again.
"""

import mmap
from threading import Thread

import numpy as np

from localllm.files.gguf.file import GGUFFile
from localllm.system import memory

AT_ONCE = 1 << 22  # bytes mapped by one system call, during which other threads cannot allocate memory
LEAST = 1 << 28  # bytes; for smaller files contention between the threads costs as much as prefaulting saves


def prefault(file: GGUFFile) -> None:
    """Start mapping a model's large files in the background, if this system can."""
    if memory.can_prefault():
        contents = {path: content_of(file.tensors[names[0]].data) for path, names in file.parts.items() if names}
        large = {path: content for path, content in contents.items() if len(content) >= LEAST}
        if large:
            Thread(target=populate, args=(large,), daemon=True).start()


def populate(contents: dict[str, np.ndarray]) -> None:
    """Map the pages of files (path: content, uint8 [bytes]); runs in the background thread.

    The arrays keep the maps alive. Pages that are not mapped here are mapped on first use.
    """
    for path, content in contents.items():
        memory.prefault(path, content.ctypes.data, len(content), AT_ONCE)


def content_of(view: np.ndarray) -> np.ndarray:
    """Return the array that a view belongs to: for a tensor the whole file, uint8 [bytes]."""
    content = view
    while isinstance(content.base, np.ndarray):
        content = content.base
    return content


def map_of(view: np.ndarray) -> tuple[mmap.mmap, int] | None:
    """Return the map that an array is a view of, and the view's offset in it; None for any other array."""
    content = content_of(view)
    data = content.base.obj if isinstance(content.base, memoryview) else content.base
    return (data, view.ctypes.data - content.ctypes.data) if isinstance(data, mmap.mmap) else None


def release_pages(view: np.ndarray) -> None:
    """Release the whole pages within a view of a mapped file; other arrays stay as they are."""
    if mapping := map_of(view):
        data, start = mapping
        memory.release_pages(data, start, start + view.nbytes)
