"""Build the steps of a target: their state, the Target protocol, and writes to the cache."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from localllm.arch.layer_state import LatentState, PagedState, State
from localllm.arch.verbs import Routing
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import ALL, WANTED, Activation, GraphNode, RoutedRows, RowSet
from localllm.engine.lower.header import RunHeader
from localllm.engine.lower.tape import Buffer, KernelStep, compute_row_bytes, pad_columns
from localllm.engine.memory.cache import HeadStreams, KVCache
from localllm.engine.memory.recurrent import StateLayout
from localllm.frozen import frozen

T = TypeVar("T")


class StepMemory(NamedTuple):
    """The memory that steps use besides activations.

    layout: of recurrent states, or None.
    """

    cache: KVCache
    layout: StateLayout | None
    header: RunHeader


@frozen
class RoutingBuffers:
    """The buffers of a mixture's routing in a run (localllm.kernels.cpu.matmul.experts)."""

    chosen: Buffer | np.ndarray
    weights: Buffer
    rows: Buffer
    pairs: Buffer
    active: Buffer
    active_count: np.ndarray  # int64 [1], at an address that no other step writes
    row_count: np.ndarray  # int64 [1], likewise


class Target(Protocol):
    """A CPU or GPU that operations are lowered for.

    Attributes:
        tokens: maximum number of tokens in a run.
        buffer_rows: rows to allocate for an activation with a row per token.
        wanted_rows: rows to allocate for one with a row per requested logit.
        expert_rows: each expert's rows are rounded up to a multiple of this.
        threads: number of threads that share a step.
        verbs: functions (steps, operation, target) that append the steps of verbs that this target lowers itself.
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

    def matrix(self, weight: Weight) -> np.ndarray | int:
        """Return the kernel argument that locates a matrix. Raises UnsupportedError for a format without kernels."""
        ...

    def get_layout(self, weight: Weight) -> tuple[str, int]:
        """Return the format of a matrix on this target, and its row stride in bytes."""
        ...

    def build_scratch_arguments(self, size: int) -> dict[str, object]:
        """Return the arguments of a kernel that needs `size` scratch bytes per thread."""
        ...

    def divide_rows(self, rows: int, count: np.ndarray) -> tuple[int, np.ndarray | None]:
        """Return the parts of a step that is divided by at most `rows` rows, and the count that limits them."""
        ...

    def parts(self, wanted: int, rows: int) -> int:
        """Return the number of parts of a step that is not divided by rows, `wanted` if possible."""
        ...


class StepBuilder:
    """Builds the steps of a target on virtual buffers; steps do not change once they are appended.

    Attributes:
        all: the steps.  buffers: by activation.
        forms: by activation, its converted forms, of types that the target defines.
        counts: int64 [1] with the number of rows, by RowSet.
        experts: routing buffers by RowSet.  in_cache: by state, buffers that represent its cached keys and values.
        last_uses: by activation, the last operation that reads it.
    """

    def __init__(self, target: Target, places: StepMemory, last_uses: Mapping[Activation, GraphNode]):
        self.target, self.last_uses = target, last_uses
        self.cache, self.layout, self.header = places
        self.all: list[KernelStep] = []
        self.buffers: dict[Activation, Buffer] = {}
        self.counts: dict[RowSet, np.ndarray] = {ALL: self.header.token_count, WANTED: self.header.wanted_count}
        self.forms: dict[Activation, object] = {}
        self.experts: dict[RowSet, RoutingBuffers] = {}
        self.in_cache: dict[State, list[Buffer]] = {}
        self._memo: dict[Hashable, Any] = {}

    def memoize(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of make(), which is called only once per key, for results that layers share."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def find_form(self, operation: GraphNode, kind: type[T]) -> T:
        """Return the converted form of this type among an operation's inputs."""
        return next(form for x in operation.inputs if isinstance(form := self.forms.get(x), kind))

    # ---- memory ----

    def max_rows(self, rows: RowSet) -> int:
        """Return how many rows to allocate."""
        if isinstance(rows, RoutedRows):
            return self.compute_max_routed_rows(rows.routing)
        return self.target.wanted_rows if rows is WANTED else self.target.buffer_rows

    def compute_max_routed_rows(self, routing: Routing) -> int:
        """Return the maximum number of rows of all experts together, each expert's rounded up."""
        pairs = self.target.tokens * routing.used
        return pairs + min(routing.matrices, pairs) * (self.target.expert_rows - 1)

    def allocate(self, x: Activation) -> Buffer:
        """Allocate the buffer of an activation, float32 [rows, columns padded to 16]."""
        self.buffers[x] = Buffer(self.max_rows(x.rows), compute_row_bytes(x.columns))
        return self.buffers[x]

    def allocate_or_reuse(self, operation: GraphNode) -> Buffer:
        """Return a buffer for an operation's output: that of its first input if this is its last use, or a new one."""
        x = operation.inputs[0]
        is_last = self.last_uses[x] is operation
        y = self.buffers[operation.output] = self.buffers[x] if is_last else self.allocate(operation.output)
        return y

    # ---- steps ----

    def append(
        self, kernel: str, arguments: dict[str, object], parts: int, reads: list[Buffer], writes: list[Buffer],
        count: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Append a step.

        parts: maximum number of parts of its work. count: int64 [1], limits the parts in a run.
        """
        self.all.append(KernelStep(kernel, arguments, parts, count, reads, writes))

    def append_row_step(
        self, kernel: str, rows: RowSet, arguments: dict[str, object], reads: list[Buffer], writes: list[Buffer]
    ) -> None:
        """Append a step whose work is divided by rows."""
        count = self.counts[rows]
        parts, limit = self.target.divide_rows(self.max_rows(rows), count)
        self.append(kernel, {"count": count, **arguments}, parts, reads, writes, limit)

    def append_split_step(self, kernel: str, x: Activation, arguments: dict[str, object], parts: int) -> None:
        """Append a step that reads x, writes no buffer, and is not divided by rows."""
        source = self.buffers[x]
        arguments |= {"count": self.counts[x.rows], "x": source, "stride": source.stride, "columns": x.columns}
        self.append(kernel, arguments, self.target.parts(parts, self.max_rows(x.rows)), [source], [])

    def import_activation(self, x: Activation, rows: np.ndarray) -> None:
        """Append a step that copies an activation of another target, float32 [tokens, row length of a buffer]."""
        y = self.allocate(x)
        self.append("fetch", {"source": int(rows.ctypes.data), "target": y, "words": y.size // 8}, 0, [], [y])

    def export_activation(self, x: Activation, rows: np.ndarray, exported: Buffer | None = None) -> None:
        """Append a step that copies an activation to memory of another target or of the caller.

        exported: represents that memory in later steps that read it.
        """
        source = self.buffers[x]
        arguments = {"x": source, "x_stride": source.stride, "first": 0, "groups": 1, "period": x.columns}
        arguments |= {"y": rows, "stride": rows.strides[0], "columns": x.columns}
        self.append_row_step("slice_columns", x.rows, arguments, [source], [exported or Buffer(0, 0)])

    def emit_logits(self, x: Activation) -> None:
        """Append the step that copies the logits to the address in the header."""
        header = self.header
        self.append_split_step("logits", x, {"y": header.logits, "flaws": header.flaws}, 4 * self.target.threads)

    def add_vector(self, x: Activation, vector: np.ndarray) -> None:
        """Append a step that adds a vector to every row of an activation, in place."""
        y = self.buffers[x]
        self.append_row_step(
            "add", x.rows, {"x": y, "z": pad_vector(vector), "z_stride": 0} | build_output_arguments(x, y), [y], [y]
        )


def build_output_arguments(x: Activation, y: Buffer) -> dict[str, object]:
    """Return the kernel arguments of an output y that is as wide as x."""
    return {"y": y, "stride": y.stride, "columns": x.columns}


def pad_vector(numbers: np.ndarray) -> np.ndarray:
    """Pad a vector to the length that kernels read (see pad_columns)."""
    return pad_columns(numbers)


def append_cache_writes(steps: StepBuilder, new: Sequence[Activation], state: PagedState | LatentState) -> None:
    """Append the steps that write new keys to the cache, and new values unless the state is latent."""
    ready = [
        append_hadamard(steps, x, block)
        for x, block in zip(new, state.find_rotation_sizes(steps.cache.kv_type), strict=False)
    ]
    triples = zip(new, ready, steps.cache.get_sides(state), strict=False)
    steps.in_cache[state] = [append_cache_write(steps, x, buffer, side) for x, buffer, side in triples]


def locate_cache(cache: KVCache, sides: tuple[HeadStreams, HeadStreams]) -> dict[str, object]:
    """Return the kernel arguments that locate keys and values in the cache."""
    keys, values = sides
    where: dict[str, object] = {"key_bytes": keys.token_bytes, "value_bytes": values.token_bytes}
    where |= {"keys": cache.get_address(keys), "key_head_stride": cache.get_head_stride(keys)}
    return where | {"values": cache.get_address(values), "value_head_stride": cache.get_head_stride(values)}


def append_cache_write(steps: StepBuilder, x: Activation, buffer: Buffer, side: HeadStreams) -> Buffer:
    """Append the step that writes keys or values; return a buffer that represents them in the cache."""
    in_cache = Buffer(0, 0)
    arguments = {"x": buffer, "stride": buffer.stride, "head_dim": x.columns // side.heads}
    arguments |= locate_stream(steps.cache, side, steps.header)
    steps.append_row_step(f"store-{side.kind.upper()}", ALL, arguments, [buffer], [in_cache])
    return in_cache


def append_hadamard(
    steps: StepBuilder, x: Activation, block: int, source: Buffer | None = None, target: Buffer | None = None
) -> Buffer:
    """Append the step that multiplies x by Hadamard matrices of size `block`; return its output.

    With a block of 1, returns x itself. source: the buffer of x, by default the one in `steps`. target: the output,
    which may be the source.
    """
    source = source or steps.buffers[x]
    if block == 1:
        return source
    y = target or Buffer(steps.target.buffer_rows, source.stride)
    steps.append_row_step(
        "hadamard", x.rows, {"x": source, "block": block} | build_output_arguments(x, y), [source], [y]
    )
    return y


def locate_stream(cache: KVCache, side: HeadStreams, header: RunHeader) -> dict[str, object]:
    """Return the kernel arguments that locate a run's tokens in a stream."""
    where: dict[str, object] = {"positions": header.positions, "owners": header.owners}
    where |= {
        "sequences": header.sequences,
        "base": cache.get_address(side),
        "head_stride": cache.get_head_stride(side),
    }
    return where | {"token_bytes": side.token_bytes, "heads": side.heads}
