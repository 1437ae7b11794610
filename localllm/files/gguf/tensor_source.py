"""Sources that a model can be made from: metadata, and tensors read a few rows at a time.

A GGUF file is one source; a folder of a Hugging Face checkpoint is another (localllm.convert).
"""

import mmap
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np

from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.files.gguf.writer import Packed
from localllm.quant.formats import Format
from localllm.system.memory import release_pages


class SourceTensor(Protocol):
    """A tensor of a source. Read-only; several threads may read at once."""

    @property
    def name(self) -> str: ...  # as in a GGUF file: blk.0.attn_q.weight

    @property
    def format(self) -> Format: ...  # of what `rows` gives

    @property
    def shape(self) -> tuple[int, ...]: ...  # in weights, the length of a row last

    def rows(self, first: int, last: int) -> np.ndarray:
        """Read rows first to last - 1 of all stacked matrices, as uint8 [last - first, bytes of a row].

        The array is C-contiguous.
        """

    def release_rows(self, first: int, last: int) -> None:
        """Release these rows' memory: they will not be read again soon."""


class Source(Protocol):
    """A whole model to read from."""

    @property
    def path(self) -> str: ...  # as the user named it

    @property
    def files(self) -> Sequence[str]: ...  # what is read; must not be written

    @property
    def metadata(self) -> Mapping[str, Any]: ...  # plain values, as GGUFFile.metadata has them

    @property
    def packed(self) -> Mapping[str, Any]: ...  # the same keys, values for gguf_writer.packed

    @property
    def tensors(self) -> Sequence[SourceTensor]: ...

    @property
    def parts(self) -> Sequence[Sequence[str]]: ...  # names of tensors, by file of a split model; one list otherwise

    @property
    def warnings(self) -> Sequence[str]: ...  # what the user should know, one line each

    @property
    def ignored(self) -> Collection[str]: ...  # keys of metadata that make no sense: a new file has them not


class GGUFSource:
    """A GGUF file, or all files of a split model."""

    def __init__(self, file: GGUFFile):
        self.file, self.path, self.metadata = file, file.path, file.metadata
        self.packed = {key: Packed(value) for key, value in file.packed.items()}
        self.files, self.parts = list(file.parts), [list(names) for names in file.parts.values()]
        self.tensors = [GGUFTensor(tensor) for tensor in file.tensors.values()]

    @property
    def warnings(self) -> list[str]:
        return self.file.oddities.lines()

    @property
    def ignored(self) -> set[str]:
        return self.file.oddities.ignored


class GGUFTensor:
    """A tensor in a mapped file."""

    def __init__(self, tensor: Tensor):
        self.name, self.format, self.shape = tensor.name, tensor.format, tensor.shape
        self._data = tensor.data.reshape(row_count(tensor.shape), -1)
        self._map, self._start = find_map(tensor.data)

    def rows(self, first: int, last: int) -> np.ndarray:
        return self._data[first:last]

    def release_rows(self, first: int, last: int) -> None:
        """Release the pages, which the system caches as long as it has room."""
        if self._map is None:
            return
        width = self._data.shape[1]
        begin, end = self._start + first * width, self._start + last * width
        release_pages(self._map, begin, end)


def find_map(array: np.ndarray) -> tuple[mmap.mmap | None, int]:
    """Return the map that an array is a view of, and its offset there; None if there is no map."""
    start, owner = array.ctypes.data, array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    base: Any = owner.base
    base = base.obj if isinstance(base, memoryview) else base
    if isinstance(base, mmap.mmap):
        return base, start - owner.ctypes.data
    return None, 0


def row_count(shape: tuple[int, ...]) -> int:
    """Count the rows of all matrices of a stack; a vector has one."""
    return prod(shape[:-1])
