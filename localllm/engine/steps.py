"""What it takes to append a step: buffers for activations, where counts lie, and what a target says about itself."""

from typing import Any, ClassVar

import numpy as np

from localllm.arch.experts import Routing
from localllm.arch.weights import Weight
from localllm.engine.cache import KVCache
from localllm.engine.program import BATCH, Header
from localllm.engine.recorder import ALL, WANTED, Activation, Operation, Routed, Rows, last_uses
from localllm.engine.recurrent import Layout
from localllm.engine.tape import Buffer, Step, Tape, row_bytes


class Steps:
    """Steps on virtual buffers, for one target.

    Attributes:
        tape: the steps.  header: what they read of a run.  tokens: the most of a run.
        buffer_rows: of an activation that has a row for every token.
        expert_rows: to a multiple of which the rows of an expert are rounded up.
    """

    tokens: int = BATCH
    buffer_rows: int = BATCH
    expert_rows: ClassVar[int] = 1

    def __init__(
        self, operations: list[Operation], cache: KVCache, layout: Layout | None, threads: int, header: Header
    ):
        self.tape, self.header, self._layout = Tape(), header, layout
        self._cache, self._threads = cache, threads
        self._last_uses = last_uses(operations)
        self._buffers: dict[Activation, Buffer] = {}
        self._row_counts: dict[Rows, np.ndarray] = {ALL: self.header.token_count, WANTED: self.header.wanted_count}

    # ---- what a target says ----

    def _weights(self, weight: Weight) -> Any:
        """What stands for a matrix among a kernel's arguments. Raises UnsupportedError for a format it cannot read."""
        raise NotImplementedError

    def _layout_of(self, weight: Weight) -> tuple[str, int]:
        """The format of a matrix, for this target, and the bytes from row to row."""
        return weight.tensor.format.name, weight.tensor.format.row_bytes(weight.shape[-1])

    def _take(self, x: Activation, rows: np.ndarray) -> None:
        """Begin with an activation that another target has made, float32 [tokens, numbers of a buffer's row]."""
        raise NotImplementedError

    def _scratch_for(self, size: int) -> dict[str, Any]:
        """The arguments of a kernel that needs so many bytes for each thread to work with."""
        raise NotImplementedError

    # ---- what all have ----

    def _count(self, rows: Rows) -> np.ndarray:
        """Where the number of rows is, int64 [1]."""
        return self._row_counts[rows]

    def _most(self, rows: Rows) -> int:
        """Rows of a buffer."""
        return self._most_routed(rows.routing) if isinstance(rows, Routed) else self.buffer_rows

    def _most_routed(self, routing: Routing) -> int:
        """Rows of all experts together, each rounded up."""
        pairs = self.tokens * routing.used
        return pairs + min(routing.experts, pairs) * (self.expert_rows - 1)

    def _new(self, x: Activation) -> Buffer:
        """Memory for an activation: float32 [tokens, columns padded to 16]."""
        self._buffers[x] = Buffer(self._most(x.rows), row_bytes(x.columns))
        return self._buffers[x]

    def _shape(self, x: Activation, y: Buffer) -> dict[str, Any]:
        return {"y": y, "stride": y.stride, "columns": x.columns}

    def _in_parts(self, kernel: str, rows: Rows, arguments: dict[str, Any], parts: int, reads: list[Buffer]) -> None:
        """A step whose work is split otherwise, and that writes no buffer."""
        self.tape.append(Step(kernel, arguments, parts, None, reads, []))

    def _by_row(
        self, kernel: str, rows: Rows, arguments: dict[str, Any], reads: list[Buffer], writes: list[Buffer]
    ) -> None:
        """A step whose work is split by tokens."""
        count = self._count(rows)
        self.tape.append(Step(kernel, {"count": count, **arguments}, 4 * self._threads, count, reads, writes))
