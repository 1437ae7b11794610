"""Ask the system for the rows of tables that a run will read: embeddings of tokens, also those of each layer.

A run reads few rows of a table, which may be larger than all matrices (Gemma 3n). For each missing row a thread would
wait for the disk, and Linux would read its surroundings: 512 rows of a mapped file took 2.2 s and 2.5 GB of cache, and
0.01 s when they were asked for together.
"""

import mmap
from collections.abc import Sequence

import numpy as np

from localllm.engine.lower.tape import KernelStep
from localllm.files.gguf.file import get_map
from localllm.system.memory import PAGE, request_pages

MIN_BYTES = 1 << 20  # smaller tables are read as a whole anyway


class RowPrefetch:
    """The tables of a tape whose rows are token ids."""

    def __init__(self, steps: Sequence[KernelStep], ids: np.ndarray):
        """Find the tables. ids: the run's token ids, which the kernels read."""
        self._ids, self._tables = ids, list[tuple[mmap.mmap, int, int]]()
        self._used = np.zeros(0, np.bool_)  # rows that were asked for
        for step in steps:
            weights = step.arguments.get("weights")
            reads_ids = step.kernel.startswith("embed-") and step.arguments["ids"] is ids
            if not reads_ids or not isinstance(weights, np.ndarray) or weights.nbytes < MIN_BYTES:
                continue
            if mapping := get_map(weights):
                self._tables.append((*mapping, weights.strides[0]))
                self._used = np.zeros(max(len(weights), len(self._used)), np.bool_)

    @property
    def resident_bytes(self) -> int:
        """Size of the rows that were asked for so far, which take memory."""
        return int(np.count_nonzero(self._used)) * sum(row_bytes for *_, row_bytes in self._tables)

    def request(self, tokens: int) -> None:
        """Ask for the rows of the first `tokens` ids, without waiting."""
        if not self._tables:
            return
        ids = np.array(sorted({*self._ids[:tokens].tolist()}))  # np.unique imports numpy.ma, which takes 10 ms
        self._used[ids] = True
        for data, offset, row_bytes in self._tables:
            starts = offset + ids * row_bytes
            for first, end in zip((starts // PAGE * PAGE).tolist(), (starts + row_bytes).tolist(), strict=True):
                request_pages(data, first, end - first)
