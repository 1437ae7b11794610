"""Give quantizing one view of its source: metadata, and tensors that are read a few rows at a time.

A GGUF file is such a source; the folder of a Hugging Face checkpoint is another (localllm.convert).
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Protocol

import numpy as np

from localllm.files.gguf.file import GGUFFile, Tensor, get_map
from localllm.files.gguf.writer import PackedValue
from localllm.quant.formats import Format
from localllm.system import memory


class SourceTensor(Protocol):
    """A read-only tensor, which several threads may read at once."""

    @property
    def name(self) -> str: ...  # as in a GGUF file: blk.0.attn_q.weight

    @property
    def format(self) -> Format: ...  # of the rows that `read_rows` returns

    @property
    def shape(self) -> tuple[int, ...]: ...  # in weights, the length of a row last

    def read_rows(self, first: int, last: int) -> np.ndarray:
        """Read rows first to last - 1, counted through all stacked matrices: uint8 [rows, bytes], C-contiguous."""

    def release_rows(self, first: int, last: int) -> None:
        """Release the memory of rows that will not be read again soon."""


class Source(Protocol):
    """A whole model to be read."""

    @property
    def path(self) -> str: ...  # as the user gave it

    @property
    def files(self) -> Sequence[str]: ...  # paths that are read, so no output may replace them

    @property
    def metadata(self) -> Mapping[str, object]: ...  # decoded values, as in GGUFFile.metadata

    @property
    def packed(self) -> Mapping[str, object]: ...  # the same keys, with values for writer.pack_value

    @property
    def tensors(self) -> Sequence[SourceTensor]: ...

    @property
    def parts(self) -> Sequence[Sequence[str]]: ...  # names of the tensors, by file of a split model

    @property
    def warnings(self) -> Sequence[str]: ...  # for the user, one line each

    @property
    def ignored(self) -> Collection[str]: ...  # metadata keys with invalid values, which a new file leaves out


class GGUFModelSource:
    """A GGUF file, or all files of a split model, as a source."""

    def __init__(self, file: GGUFFile):
        self.file, self.path, self.metadata = file, file.path, file.metadata
        self.packed = {key: PackedValue(value) for key, value in file.packed.items()}
        self.files, self.parts = list(file.parts), [list(names) for names in file.parts.values()]
        self.tensors = [GGUFTensor(tensor) for tensor in file.tensors.values()]

    @property
    def warnings(self) -> list[str]:
        return self.file.oddities.format_lines()

    @property
    def ignored(self) -> set[str]:
        return self.file.oddities.ignored


class GGUFTensor:
    """A tensor of a mapped file as a source."""

    def __init__(self, tensor: Tensor):
        self.name, self.format, self.shape = tensor.name, tensor.format, tensor.shape
        self._data = tensor.data.reshape(count_rows(tensor.shape), -1)
        self._mapping = get_map(tensor.data)

    def read_rows(self, first: int, last: int) -> np.ndarray:
        return self._data[first:last]

    def release_rows(self, first: int, last: int) -> None:
        """Release the pages of these rows; the system may keep the file's content in its cache."""
        if self._mapping:
            data, start = self._mapping
            width = self._data.shape[1]
            memory.release_pages(data, start + first * width, start + last * width)


def count_rows(shape: tuple[int, ...]) -> int:
    """Count the rows of all matrices of a stack; a vector has one row."""
    return prod(shape[:-1])
