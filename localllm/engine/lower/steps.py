"""What lowering appends to: steps, the buffers of activations, where counts lie, and what a target is asked."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from localllm.arch.layer_state import State
from localllm.arch.routing import Routing
from localllm.arch.weights import Weight
from localllm.engine.lower.tape import Buffer, Step, padded, row_bytes
from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.recurrent import StateLayout
from localllm.engine.operations.activation import ALL, WANTED, Activation, Node, Routed, Rows
from localllm.engine.run import Header
from localllm.frozen import frozen


class StepPlaces(NamedTuple):
    """What steps read and write besides activations.

    layout: of what recurrent layers keep, if there are some.
    """

    cache: KVCache
    layout: StateLayout | None
    header: Header


@frozen
class Experts:
    """What a mixture of experts has to do in a run, see localllm.kernels.cpu.matmul.routing."""

    chosen: Buffer | np.ndarray
    weights: Buffer
    rows: Buffer
    pairs: Buffer
    active: Buffer
    active_count: np.ndarray  # int64 [1], as the next one: at an address that no other step changes
    row_count: np.ndarray


class Target(Protocol):
    """What steps are for, with the few choices that it has.

    Attributes:
        tokens: the most of a run.  buffer_rows: of an activation that has a row for every token.  wanted_rows: of one
            that has a row for every token whose logits are wanted.
        expert_rows: to a multiple of which the rows of an expert are rounded up.
        threads: that share a step.
        verbs: for each verb the function that appends its steps, (steps, operation, target).
    """

    @property
    def tokens(self) -> int: ...

    @property
    def buffer_rows(self) -> int: ...

    @property
    def wanted_rows(self) -> int: ...

    @property
    def expert_rows(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def verbs(self) -> Mapping[str, Callable[..., None]]: ...

    def matrix(self, weight: Weight) -> Any:
        """What stands for a matrix among a kernel's arguments. Raises UnsupportedError for a format it cannot read."""
        ...

    def layout_of(self, weight: Weight) -> tuple[str, int]:
        """The format of a matrix, for this target, and the bytes from row to row."""
        ...

    def scratch(self, size: int) -> dict[str, Any]:
        """The arguments of a kernel that needs so many bytes for each thread to work with."""
        ...

    def share(self, rows: int, count: np.ndarray) -> tuple[int, np.ndarray | None]:
        """Parts of a step that is split by rows, and the number that limits them; rows: the most that there are."""
        ...

    def parts(self, wanted: int, rows: int) -> int:
        """Parts of a step that is split otherwise, best in as many as wanted."""
        ...


class Steps:
    """Steps on virtual buffers, for one target. What was appended is not changed.

    Attributes:
        all: the steps.  buffers: of activations.  forms: what was made of them, as a target has it.
        counts: of rows, where their number is, int64 [1].
        experts: what each mixture has to do.  in_cache: by state, what stands for its keys and values.
        last_uses: the operation after which an activation is not needed any more.
    """

    def __init__(self, target: Target, places: StepPlaces, last_uses: Mapping[Activation, Node]):
        self.target, self.last_uses = target, last_uses
        self.cache, self.layout, self.header = places
        self.all: list[Step] = []
        self.buffers: dict[Activation, Buffer] = {}
        self.counts: dict[Rows, np.ndarray] = {ALL: self.header.token_count, WANTED: self.header.wanted_count}
        self.forms: dict[Activation, Any] = {}
        self.experts: dict[Rows, Experts] = {}
        self.in_cache: dict[State, list[Buffer]] = {}
        self._made: dict[Any, Any] = {}

    def memoize(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, which is called the first time only: for what is made once for all layers."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # ---- memory ----

    def max_rows(self, rows: Rows) -> int:
        """Rows of a buffer."""
        if isinstance(rows, Routed):
            return self.max_routed_rows(rows.routing)
        return self.target.wanted_rows if rows is WANTED else self.target.buffer_rows

    def max_routed_rows(self, routing: Routing) -> int:
        """Rows of all experts together, each rounded up."""
        pairs = self.target.tokens * routing.used
        return pairs + min(routing.matrices, pairs) * (self.target.expert_rows - 1)

    def new(self, x: Activation) -> Buffer:
        """Memory for an activation: float32 [rows, columns padded to 16]."""
        self.buffers[x] = Buffer(self.max_rows(x.rows), row_bytes(x.columns))
        return self.buffers[x]

    def alloc_or_reuse(self, operation: Node) -> Buffer:
        """Memory for what an operation makes: that of its first input if nobody needs it any more."""
        x = operation.inputs[0]
        is_last = self.last_uses[x] is operation
        y = self.buffers[operation.output] = self.buffers[x] if is_last else self.new(operation.output)
        return y

    # ---- steps ----

    def append(
        self, kernel: str, arguments: dict[str, Any], parts: int, reads: list[Buffer], writes: list[Buffer],
        count: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """count: what limits the parts."""
        self.all.append(Step(kernel, arguments, parts, count, reads, writes))

    def row_step(
        self, kernel: str, rows: Rows, arguments: dict[str, Any], reads: list[Buffer], writes: list[Buffer]
    ) -> None:
        """A step whose work is split by rows."""
        count = self.counts[rows]
        parts, limit = self.target.share(self.max_rows(rows), count)
        self.append(kernel, {"count": count, **arguments}, parts, reads, writes, limit)

    def split_step(self, kernel: str, x: Activation, arguments: dict[str, Any], parts: int) -> None:
        """A step whose work on x is split otherwise, and that writes no buffer."""
        source = self.buffers[x]
        arguments |= {"count": self.counts[x.rows], "x": source, "stride": source.stride, "columns": x.columns}
        self.append(kernel, arguments, self.target.parts(parts, self.max_rows(x.rows)), [source], [])

    def import_activation(self, x: Activation, rows: np.ndarray) -> None:
        """Begin with an activation that another target has made, float32 [tokens, numbers of a buffer's row]."""
        y = self.new(x)
        self.append("fetch", {"source": int(rows.ctypes.data), "target": y, "words": y.size // 8}, 0, [], [y])

    def export_activation(self, x: Activation, rows: np.ndarray) -> None:
        """Copy an activation to where another target, or whoever runs this, wants it."""
        source = self.buffers[x]
        arguments = {"x": source, "x_stride": source.stride, "first": 0, "groups": 1, "period": x.columns}
        arguments |= {"y": rows, "stride": rows.strides[0], "columns": x.columns}
        self.row_step("columns", x.rows, arguments, [source], [Buffer(0, 0)])

    def emit_logits(self, x: Activation) -> None:
        """Copy the logits to whoever wants them."""
        header = self.header
        self.split_step("logits", x, {"y": header.logits, "flaws": header.flaws}, 4 * self.target.threads)

    def add_vector(self, x: Activation, vector: np.ndarray) -> None:
        """To every row of an activation, where it is."""
        y = self.buffers[x]
        self.row_step("add", x.rows, {"x": y, "z": vector_of(vector), "z_stride": 0} | shape(x, y), [y], [y])


def shape(x: Activation, y: Buffer) -> dict[str, Any]:
    """What kernels are told of what they write: as wide as x."""
    return {"y": y, "stride": y.stride, "columns": x.columns}


def vector_of(numbers: np.ndarray) -> np.ndarray:
    """As kernels read it, see `padded`."""
    return padded(numbers)
