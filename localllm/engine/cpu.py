"""The target CPU: makes a tape of kernel calls of what an architecture has said.

Most verbs are steps as on any target (localllm.engine.lowering). Matrix products and attention have choices to make.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from localllm.arch.states import Latent, Paged
from localllm.arch.weights import Weight
from localllm.engine.cache import KVCache
from localllm.engine.lowering import Crossing, Lowering
from localllm.engine.memory import Reserved
from localllm.engine.pieces import Loader, Pieces
from localllm.engine.program import BATCH, PRECISE_TOKENS, Header, Program
from localllm.engine.recorder import ALL, Activation, Choice, Operation, stored
from localllm.engine.recurrent import Layout
from localllm.engine.tape import Buffer, Step, padded
from localllm.engine.threads import Threads
from localllm.errors import UnsupportedError
from localllm.kernels.arguments import (
    LINEAR_FLOAT,
    LINEAR_QUANTIZED,
    LINEAR_TILES_FLOAT,
    LINEAR_TILES_QUANTIZED,
    SPLIT,
    UNIT,
)
from localllm.kernels.cpu import (
    ATTEND_KEYS,
    ATTEND_ROWS,
    CALL_BYTES,
    EXPERT_ROWS,
    FEW_TOKENS,
    FLOAT_SCRATCH,
    GENERIC,
    HALVES,
    LINEAR_SCRATCH,
    MOST_SPLITS,
    PLAIN,
    SPLIT_TOKENS,
    SUB_BLOCK,
    TOKENS_AT_ONCE,
)
from localllm.kernels.library import Library, Progress
from localllm.kernels.target import cpu_features

PART_BYTES = 1 << 16  # of weights: what is worth a thread's coming
SCRATCH_BYTES = object()  # stands for the final size of the scratch memory of a thread
# Addresses of rows among the arguments of a product.
BY_ROW = {
    "linear_quantized": ("high", "low", "scales", "sums", "high_sums", "excess", "y"),
    "linear_float": ("x", "halves", "y"),
}
LINEAR = {"linear_quantized": LINEAR_QUANTIZED, "linear_float": LINEAR_FLOAT}
# The same for products in tiles, with panels that each expert finds in another way.
BY_ROW |= {name.replace("linear", "linear_tiles"): places for name, places in BY_ROW.items()}
LINEAR |= {"linear_tiles_quantized": LINEAR_TILES_QUANTIZED, "linear_tiles_float": LINEAR_TILES_FLOAT}


@dataclass(frozen=True)
class Address:
    """Stands for where a kernel is."""

    kernel: str


@dataclass
class Quantized:
    """Activations as integers, see localllm.kernels.cpu.quantize."""

    high: Buffer
    low: Buffer
    scales: Buffer
    sums: dict[int, Buffer]  # by sub-block: 32 and 16
    high_sums: dict[int, Buffer]
    excess: Buffer

    @property
    def buffers(self) -> list[Buffer]:
        return [self.high, self.low, self.scales, *self.sums.values(), *self.high_sums.values(), self.excess]


def compiled(
    operations: list[Operation], cache: KVCache, layout: Layout | None, threads: int, progress: Progress | None,
    given: Crossing | None = None,
) -> Program:  # fmt: skip
    """A program of what a Recorder has written down; the last operation makes the logits, unless others go on.

    layout: of what recurrent layers keep, if there are some; given: see Lowering; progress(done, total) is called while
    somebody waits for kernels, here or in the program's first run. Raises ModelError, LocalllmError.
    """
    lowering = lowering_for_this_cpu()(operations, cache, layout, threads, Header(), given)
    library = Library(lowering.kernels | {"run", "work"}, progress, lowering.pieces.all_names())
    tape = lowering.finish(library.addresses)
    memory = library, lowering.header, lowering.scratch, lowering.tape.memory, cache  # as long as the threads live
    walkers = Threads(threads, library.addresses, tape, keep=memory)
    loader = Loader(library, lowering.pieces, progress)
    return Program(lowering.header, walkers, operations[-1].output.columns, loader)


def lowering_for_this_cpu() -> "type[CpuLowering]":
    """With tiles, where there are any."""
    if "amx-bf16" in cpu_features():
        from localllm.engine.cpu_tiles import TileLowering
        from localllm.kernels.amx import has_tiles

        if has_tiles():
            return TileLowering
    return CpuLowering


class CpuLowering(Lowering):
    """What is the CPU's own: matrix products, attention, and memory to work with.

    Attributes:
        halves: see localllm.kernels.cpu.HALVES.
        attention: the kernel, and what it needs for each thread besides, in bytes.
        pieces: of products of quantized weights, which are loaded when they are needed.
    """

    buffer_rows = max(-(-BATCH // tokens) * tokens for tokens in TOKENS_AT_ONCE)  # kernels round tokens up
    expert_rows = EXPERT_ROWS
    halves: ClassVar[dict[str, tuple[str, int, int]]] = HALVES
    attention: ClassVar[tuple[str, int]] = "attend", 0

    def __init__(
        self, operations: list[Operation], cache: KVCache, layout: Layout | None, threads: int, header: Header,
        given: Crossing | None = None,
    ):  # fmt: skip
        self._stored, self.pieces = stored(operations), Pieces()
        self._quantized: dict[Activation, Quantized] = {}
        self._halves: dict[tuple[Activation, str], Buffer] = {}
        self._plans: dict[tuple[int, int, int, bool], dict[str, Any]] = {}
        self._scratch, self._scratch_bytes = Buffer(0, 0), 0  # its address is filled in by `finish`
        super().__init__(operations, cache, layout, threads, header, given=given)

    @property
    def kernels(self) -> set[str]:
        """The names of all that are needed."""
        called = {step.kernel for step in self.tape.steps}
        values = (value for step in self.tape.steps for value in step.arguments.values())
        return called | {value.kernel for value in values if isinstance(value, Address)}

    def finish(self, addresses: dict[str, int]) -> np.ndarray:
        """The tape as an array."""
        size = -(-self._scratch_bytes // 4096) * 4096
        self.scratch = Reserved(max(size * self._threads, 1))
        self._scratch.address = self.scratch.address
        for step in self.tape.steps:
            for name, value in step.arguments.items():
                if isinstance(value, Address):
                    step.arguments[name] = addresses[value.kernel]
                elif value is SCRATCH_BYTES:
                    step.arguments[name] = size
        return self.tape.finish(addresses)

    def _linear(self, operation: Operation, x: Activation, weight: Weight, bias: np.ndarray | None) -> None:
        is_stored = operation.output in self._stored
        kernel, arguments, reads, y = self._product(operation.output, x, weight, is_stored)
        parts = min(max(weight.tensor.nbytes // PART_BYTES, 1), 8 * self._threads)
        self.tape.append(Step(kernel, arguments, parts, None, reads, [y]))
        if bias is not None:
            arguments = {"x": y, "z": padded(bias), "z_stride": 0} | self._shape(operation.output, y)
            self._by_row("add", x.rows, arguments, [y], [y])

    def _product(
        self, output: Activation, x: Activation, weight: Weight, is_stored: bool = False
    ) -> tuple[str, dict[str, Any], list[Buffer], Buffer]:
        """The kernel for a matrix product, its arguments, the buffers that it reads, and the one that it writes."""
        y, format = self._new(output), weight.tensor.format
        arguments = {"count": self._count(x.rows), "weights": self._weights(weight), "columns": x.columns}
        arguments |= {"row_bytes": format.row_bytes(x.columns), "rows": output.columns}
        arguments |= {"y": y, "y_stride": y.stride}
        if format.name in SUB_BLOCK and x.columns % 64 == 0:
            kernel, reads = "linear_quantized", self._with_integers(arguments, x, format.name, is_stored)
        else:
            kernel = f"linear_float-{format.name}"
            reads = self._with_floats(arguments, x, format.name, is_stored)
        return kernel, arguments, reads, y

    def _expert_linear(
        self, operation: Operation, x: Activation, choice: Choice, weight: Weight, bias: np.ndarray | None
    ) -> None:
        """Every expert's product, by the kernel for one matrix."""
        experts, data = self._experts[choice.routed], weight.tensor.data
        kernel, arguments, reads, y = self._product(operation.output, x, weight)
        name = kernel.partition("-")[0]
        places, by_row = LINEAR[name], [(at, arguments[at]) for at in BY_ROW[name] if arguments[at]]
        strides = [(getattr(places, at), buffer.stride) for at, buffer in by_row]
        self._scratch_for(CALL_BYTES + (LINEAR_SCRATCH if name.endswith("quantized") else float_scratch(x.columns)))
        # As many as dense matrices of that size have parts: what is asked for ahead is lost where a slice ends.
        slices = min(max(data[0].nbytes // PART_BYTES, 1), max(8 * self._threads // choice.columns, 1))
        arguments |= {"linear": Address(kernel), "by_row": np.array(strides, np.int64), "by_row_count": len(strides)}
        arguments |= {"run_count": self._count(choice.rows), "expert_bytes": data.strides[0], "slices": slices}
        arguments |= {"active": experts.active, "active_count": experts.active_count}
        kernel = name.replace("linear", "experts")
        self.tape.append(Step(kernel, arguments, 16 * self._threads, None, [*reads, experts.active], [y]))
        if bias is not None:
            self._add_by_expert(operation.output, y, experts, padded(bias))

    def _with_integers(self, arguments: dict[str, Any], x: Activation, format: str, is_stored: bool) -> list[Buffer]:
        """What a product of blocks with integers takes besides; the buffers that it reads."""
        q, sub_block = self._as_integers(x), SUB_BLOCK[format]
        arguments |= {"high": q.high, "low": q.low, "scales": q.scales, "excess": q.excess}
        arguments |= {"sums": q.sums[sub_block], "high_sums": q.high_sums[sub_block]}
        arguments |= self._scratch_for(LINEAR_SCRATCH)
        arguments["most_precise"] = self.header.most_precise_stored if is_stored else self.header.most_precise
        arguments |= self.pieces.arguments(format, x.columns, x.rows, self._most_in_rows(format), is_stored)
        return q.buffers

    def _most_in_rows(self, format: str) -> int:
        """For how many tokens at most this CPU's own kernels multiply weights of a format."""
        return BATCH

    def _with_floats(self, arguments: dict[str, Any], x: Activation, format: str, is_stored: bool) -> list[Buffer]:
        """What a product in float32 takes besides; the buffers that it reads."""
        arguments |= self._scratch_for(float_scratch(x.columns))
        source = self._buffers[x]
        halves = self._as_halves(x, format)
        arguments |= {"x": source, "x_stride": source.stride, "halves": halves or 0}
        arguments["halves_stride"] = halves.stride if halves else 0
        arguments["most_precise"] = BATCH if is_stored else PRECISE_TOKENS
        return [source, halves] if halves else [source]

    def _attention(self, state: Paged | Latent, arguments: dict[str, Any], reads: list[Buffer], y: Buffer) -> None:
        sides, plan = self._cache.sides(state), self._plan(arguments["heads"], state)
        value_dim = -(-state.value_dim // 16) * 16
        partial = Buffer(SPLIT_TOKENS * arguments["heads"] * MOST_SPLITS, (value_dim + 32) * 4)
        arguments |= {name: plan[name] for name in ("units", "unit_count", "splits", "window", "chunked")}
        arguments |= {"count": self._count(ALL), "positions": self.header.positions, "partial": partial}
        arguments |= {"key_dim": state.key_dim, "value_dim": state.value_dim}
        kernel, more = self.attention
        arguments |= self._scratch_for(attention_scratch(-(-state.key_dim // 16) * 16, value_dim) + more)
        count, reads = plan["unit_count"], [*reads, plan["made"]]
        kinds = "-".join(dict.fromkeys(side.kind.upper() for side in sides))
        self.tape.append(Step(f"{kernel}-{kinds}", arguments, 8 * self._threads, count, reads, [y, partial]))
        self.tape.append(Step("merge", dict(arguments), 2 * self._threads, None, [partial, plan["made"]], [y]))

    def _plan(self, heads: int, state: Paged | Latent) -> dict[str, Any]:
        """What attention has to do in a run, made once for all layers that are alike."""
        key = heads, state.kv_heads, state.window or 0, state.chunked
        if key not in self._plans:
            units = np.empty((most_units(heads, state.kv_heads), len(UNIT)), np.int64)
            arguments: dict[str, Any] = {"heads": heads, "kv_heads": state.kv_heads, "window": state.window or 0}
            arguments |= {"chunked": state.chunked, "units": units, "unit_count": np.zeros(1, np.int64)}
            arguments["splits"] = np.empty((BATCH, len(SPLIT)), np.int64)
            made = Buffer(0, 0)
            self._plans[key] = {**arguments, "made": made}
            arguments |= {"sequences": self.header.sequences, "sequence_count": self.header.sequence_count}
            self.tape.append(Step("plan", arguments, 1, None, [], [made]))
        return self._plans[key]

    def _scratch_for(self, size: int) -> dict[str, Any]:
        self._scratch_bytes = max(self._scratch_bytes, size)
        return {"scratch": self._scratch, "scratch_bytes": SCRATCH_BYTES}

    def _weights(self, weight: Weight) -> np.ndarray:
        name = weight.tensor.format.name
        if name not in PLAIN and name not in GENERIC and name not in SUB_BLOCK:
            raise UnsupportedError(f"tensor {weight.name}: format {name} is not supported")
        return weight.tensor.data

    def _as_integers(self, x: Activation) -> Quantized:
        """x as integers, made once for all the matrices that it meets."""
        if x not in self._quantized:
            source, scale = self._buffers[x], x.columns // 16 * 4  # bytes per token
            sizes = (x.columns, x.columns, scale, scale, scale, scale, scale, scale // 2)
            high, low, scales, *sums, excess = (Buffer(self._most(x.rows), size) for size in sizes)
            self._quantized[x] = q = Quantized(
                high, low, scales, {32: sums[0], 16: sums[1]}, {32: sums[2], 16: sums[3]}, excess
            )
            arguments = {"x": source, "stride": source.stride, "columns": x.columns, "high": high, "low": low}
            arguments |= {"scales": scales, "sums_32": sums[0], "sums_16": sums[1], "high_sums_32": sums[2]}
            arguments |= {"high_sums_16": sums[3], "excess": excess}
            self._by_row("quantize", x.rows, arguments, [source], q.buffers)
        return self._quantized[x]

    def _as_halves(self, x: Activation, format: str) -> Buffer | None:
        """x in 16 bits, made once for all the matrices that it meets; None if these are not multiplied so."""
        kernel, together, shared = self.halves.get(format, ("", 1, 0))
        if not kernel or x.columns % together:
            return None
        if (x, kernel) not in self._halves:
            source = self._buffers[x]
            y = Buffer(self._most(x.rows), source.stride // 2 + x.columns // together * shared)
            self._halves[x, kernel] = y
            arguments = {"x": source, "stride": source.stride, "y": y, "y_stride": y.stride, "columns": x.columns}
            self._by_row(kernel, x.rows, arguments, [source], [y])
        return self._halves[x, kernel]


def float_scratch(columns: int) -> int:
    """Bytes that a thread needs for products in float32."""
    return max(FLOAT_SCRATCH, 4 * columns)


def attention_scratch(key_dim: int, value_dim: int) -> int:
    """Bytes that a thread needs, see localllm.kernels.cpu.attention; the dimensions are padded."""
    tiles = 2 * ATTEND_KEYS * max(key_dim, value_dim)
    return 4 * (ATTEND_ROWS * (key_dim + value_dim + ATTEND_KEYS + 32) + tiles)


def most_units(heads: int, kv_heads: int) -> int:
    """Of attention in a run: tiles of rows, and those of sequences with few tokens once for each part of a context."""
    group = heads // kv_heads
    whole, split = BATCH * group // ATTEND_ROWS + BATCH, FEW_TOKENS * group // ATTEND_ROWS + 1
    return kv_heads * (whole + split * SPLIT_TOKENS * MOST_SPLITS)
