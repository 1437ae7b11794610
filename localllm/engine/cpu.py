"""The target CPU: makes a tape of kernel calls of what an architecture has said.

Most verbs are a row in SIMPLE. Matrix products, attention and rotation have choices to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.arch.experts import Routing
from localllm.arch.rope import Rope
from localllm.arch.states import Latent, Paged
from localllm.arch.weights import Weight
from localllm.engine.cache import KVCache, Streams
from localllm.engine.cpu_recurrent import RecurrentLowering
from localllm.engine.memory import Reserved
from localllm.engine.program import BATCH, PRECISE_TOKENS, Header, Program
from localllm.engine.recorder import ALL, WANTED, Activation, Choice, Operation, Routed, Rows, last_uses, stored
from localllm.engine.recurrent import Layout
from localllm.engine.tape import LINE, Buffer, Step, Tape, padded
from localllm.engine.threads import Threads
from localllm.errors import UnsupportedError
from localllm.kernels.arguments import EXPERT, LINEAR_FLOAT, LINEAR_QUANTIZED, PLAN_EXPERTS, SPLIT, UNIT
from localllm.kernels.cpu import (
    ATTEND_KEYS,
    ATTEND_ROWS,
    CALL_BYTES,
    EXPERT_ROWS,
    FEW_TOKENS,
    FLOAT_SCRATCH,
    GENERIC,
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
HAS_BF16 = "avx512bf16" in cpu_features()  # instructions that multiply those numbers
ROWS = max(-(-BATCH // tokens) * tokens for tokens in TOKENS_AT_ONCE)  # of a buffer: kernels round tokens up
SCRATCH_BYTES = object()  # stands for the final size of the scratch memory of a thread
# Addresses of rows among the arguments of a product.
BY_ROW = {
    "linear_quantized": ("high", "low", "scales", "sums", "high_sums", "excess", "y"),
    "linear_float": ("x", "bf16", "y"),
}

LINEAR = {"linear_quantized": LINEAR_QUANTIZED, "linear_float": LINEAR_FLOAT}

# Verbs that treat rows one by one: the names that the kernel has for the inputs, and for what else was given.
SIMPLE: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "rms_norm": (("x",), {"weight": "vector", "group": "group", "epsilon": "epsilon"}),
    "layer_norm": (("x",), {"weight": "vector", "bias": "bias", "group": "group", "epsilon": "epsilon"}),
    "add": (("x", "z"), {}),
    "swiglu": (("gate", "up"), {}),
    "geglu": (("gate", "up"), {}),
    "swiglu_limited": (("gate", "up"), {"sharpness": "sharpness", "limit": "limit"}),
    "gelu": (("x",), {}),
    "relu_squared": (("x",), {}),
    "scale": (("x",), {"factor": "factor"}),
    "clamp": (("x",), {"limit": "limit"}),
    "softcap": (("x",), {"cap": "cap"}),
    "multiply": (("x", "z"), {}),
    "sigmoid": (("x",), {}),
    "softplus": (("x",), {"bias": "bias"}),
}


@dataclass(frozen=True)
class Address:
    """Stands for where a kernel is."""

    kernel: str


@dataclass
class Experts:
    """What a mixture of experts has to do in a run, see localllm.kernels.cpu.routing."""

    chosen: Buffer | np.ndarray
    weights: Buffer
    rows: Buffer
    pairs: Buffer
    active: Buffer
    active_count: np.ndarray  # int64 [1], as the next one: at an address that no other step changes
    row_count: np.ndarray


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
    operations: list[Operation], cache: KVCache, layout: Layout | None, threads: int, progress: Progress | None
) -> Program:
    """A program of what a Recorder has written down; the last operation makes the logits.

    layout: of what recurrent layers keep, if there are some. progress(done, total) is called while kernels are
    compiled. Raises ModelError, LocalllmError.
    """
    lowering = Lowering(operations, cache, layout, threads)
    library = Library(lowering.kernels | {"run", "work"}, progress)
    tape = lowering.finish(library.addresses)
    memory = library, lowering.header, lowering.scratch, lowering.tape.memory, cache  # as long as the threads live
    walkers = Threads(threads, library.addresses, tape, keep=memory)
    return Program(lowering.header, walkers, operations[-1].output.columns, library.warning)


class Lowering(RecurrentLowering):
    """Operations become steps, one after the other."""

    def __init__(self, operations: list[Operation], cache: KVCache, layout: Layout | None, threads: int):
        self.tape, self.header, self._layout = Tape(), Header(), layout
        self._cache, self._threads = cache, threads
        self._stored, self._last_uses = stored(operations), last_uses(operations)
        self._buffers: dict[Activation, Buffer] = {}
        self._quantized: dict[Activation, Quantized] = {}
        self._rounded: dict[Activation, Buffer] = {}
        self._angles: dict[tuple[Rope, str], Buffer] = {}
        self._in_cache: dict[int, list[Buffer]] = {}  # by layer, what stands for its keys and values
        self._plans: dict[tuple[int, int, int, bool], dict[str, Any]] = {}
        self._experts: dict[Rows, Experts] = {}
        self._scratch, self._scratch_bytes = Buffer(0, 0), 0  # its address is filled in by `finish`
        for operation in operations:
            if operation.verb in SIMPLE:
                self._simple(operation, *SIMPLE[operation.verb])
            else:
                getattr(self, f"_{operation.verb}")(operation, *operation.inputs, **operation.given)
        self._hand_out(operations[-1].output)

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
                    value = addresses[value.kernel]
                step.arguments[name] = size if value is SCRATCH_BYTES else value
        return self.tape.finish(addresses)

    # ---- verbs ----

    def _simple(self, operation: Operation, names: tuple[str, ...], given: dict[str, str]) -> None:
        """A verb that treats rows one by one, and may write over what it reads."""
        x = operation.inputs[0]
        inputs = [self._buffers[x] for x in operation.inputs]
        y = inputs[0] if self._last_uses[x] is operation else self._new(operation.output)
        self._buffers[operation.output] = y
        arguments = dict(zip(names, inputs, strict=True)) | self._shape(x, y)
        for name, source in given.items():
            value = operation.given[source]
            arguments[name] = padded(value) if isinstance(value, np.ndarray) else value
        if operation.verb == "add":
            arguments["z_stride"] = inputs[1].stride
        self._by_row(operation.verb, x.rows, arguments, inputs, [y])

    def _embed(self, operation: Operation, weight: Weight) -> None:
        self._embed_rows(operation, weight, self.header.ids)

    def _embed_positions(self, operation: Operation, weight: Weight) -> None:
        self._embed_rows(operation, weight, self.header.positions)

    def _embed_rows(self, operation: Operation, weight: Weight, ids: np.ndarray) -> None:
        self._check_format(weight)
        x, format = self._new(operation.output), weight.tensor.format
        row_bytes = format.row_bytes(operation.output.columns)
        arguments = {"weights": weight.tensor.data, "row_bytes": row_bytes, "columns": operation.output.columns}
        arguments |= {"ids": ids, "x": x, "stride": x.stride}
        self._by_row(f"embed-{format.name}", operation.output.rows, arguments, [], [x])

    def _select(self, operation: Operation, x: Activation) -> None:
        source, y = self._buffers[x], self._new(operation.output)
        arguments = {"x": source, "rows": self.header.wanted} | self._shape(x, y)
        self._by_row("select", operation.output.rows, arguments, [source], [y])

    def _columns(self, operation: Operation, x: Activation, first: int, groups: int) -> None:
        source, y = self._buffers[x], self._new(operation.output)
        arguments = {"x": source, "x_stride": source.stride, "first": first, "groups": groups}
        arguments |= {"period": x.columns // groups} | self._shape(operation.output, y)
        self._by_row("columns", x.rows, arguments, [source], [y])

    def _join(self, operation: Operation, x: Activation, z: Activation, heads: int, shared: bool) -> None:
        first, second, y = self._buffers[x], self._buffers[z], self._new(operation.output)
        arguments: dict[str, Any] = {"x": first, "x_stride": first.stride, "x_columns": x.columns // heads}
        arguments |= {"z": second, "z_stride": second.stride, "z_columns": z.columns // (1 if shared else heads)}
        arguments |= {"heads": heads, "shared": shared, "y": y, "stride": y.stride}
        self._by_row("join", x.rows, arguments, [first, second], [y])

    def _temper(self, operation: Operation, x: Activation, **given: float) -> None:
        source, y = self._buffers[x], self._new(operation.output)
        arguments = {"x": source, "positions": self.header.positions, **given}
        self._by_row("temper", x.rows, arguments | self._shape(x, y), [source], [y])

    def _linear(self, operation: Operation, x: Activation, weight: Weight, bias: np.ndarray | None) -> None:
        is_stored = operation.output in self._stored
        kernel, arguments, reads, y = self._product(operation.output, x, weight, is_stored)
        parts = min(max(weight.tensor.nbytes // PART_BYTES, 1), 8 * self._threads)
        self.tape.append(Step(kernel, arguments, parts, 0, reads, [y]))
        if bias is not None:
            arguments = {"x": y, "z": padded(bias), "z_stride": 0} | self._shape(operation.output, y)
            self._by_row("add", x.rows, arguments, [y], [y])

    def _product(
        self, output: Activation, x: Activation, weight: Weight, is_stored: bool = False
    ) -> tuple[str, dict[str, Any], list[Buffer], Buffer]:
        """The kernel for a matrix product, its arguments, the buffers that it reads, and the one that it writes."""
        self._check_format(weight)
        y, format = self._new(output), weight.tensor.format
        arguments = {"count": self._count(x.rows), "weights": weight.tensor.data, "columns": x.columns}
        arguments |= {"row_bytes": format.row_bytes(x.columns), "rows": output.columns}
        arguments |= {"y": y, "y_stride": y.stride, "scratch": self._scratch, "scratch_bytes": SCRATCH_BYTES}
        if format.name in SUB_BLOCK and x.columns % 64 == 0:
            kernel, reads = "linear_quantized", self._with_integers(arguments, x, format.name, is_stored)
        else:
            kernel, reads = "linear_float", self._with_floats(arguments, x, format.name, is_stored)
        return f"{kernel}-{format.name}", arguments, reads, y

    def _route(self, operation: Operation, logits: Activation, routing: Routing, bias: np.ndarray | None) -> None:
        """Choose, and plan the experts' rows."""
        source = self._buffers[logits]
        self._need_scratch(4 * (2 * routing.experts + routing.groups))
        chosen, weights = Buffer(BATCH, 8 * routing.used), Buffer(BATCH, 4 * routing.used)
        arguments = {"logits": source, "stride": source.stride, "bias": 0 if bias is None else bias}
        arguments |= {name: getattr(routing, name) for name in ("experts", "used", "sigmoid", "normalized")}
        arguments |= {name: getattr(routing, name) for name in ("scale", "groups", "groups_used")}
        arguments |= {"chosen": chosen, "weights": weights}
        arguments |= {"scratch": self._scratch, "scratch_bytes": SCRATCH_BYTES}
        self._by_row("route", logits.rows, arguments, [source], [chosen, weights])
        self._plan_experts(operation, chosen, weights)

    def _every_head(self, operation: Operation) -> None:
        heads = operation.output.columns
        self._plan_experts(operation, np.tile(np.arange(heads), (BATCH, 1)), Buffer(0, 0))

    def _plan_experts(self, operation: Operation, chosen: Buffer | np.ndarray, weights: Buffer) -> None:
        """Give experts their rows."""
        choice = operation.output
        assert isinstance(choice, Choice)
        routing = choice.routed.routing
        most, rows = routing.used * BATCH, self._most_routed(routing)
        active = Buffer(min(routing.experts, most), 8 * len(EXPERT))
        row_count, active_count = np.zeros(1, np.int64), np.zeros(1, np.int64)
        experts = Experts(chosen, weights, Buffer(most, 8), Buffer(rows, 8), active, active_count, row_count)
        self._experts[choice.routed] = experts
        next_rows, count = Buffer(routing.experts, 8), self._count(choice.rows)
        plan = {name: getattr(experts, name) for name in PLAN_EXPERTS._fields if hasattr(experts, name)}
        plan |= {"count": count, "next_rows": next_rows, "used": routing.used, "experts": routing.experts}
        writes = [experts.rows, experts.pairs, active, next_rows]
        reads = [chosen] if isinstance(chosen, Buffer) else []
        self.tape.append(Step("plan_experts", plan, 1, 0, reads, writes))

    def _gather(self, operation: Operation, x: Activation, choice: Choice) -> None:
        experts, source, y = self._experts[choice.routed], self._buffers[x], self._new(operation.output)
        weights = experts.weights if choice.routed.routing.weighs_inputs else 0
        arguments = {"pairs": experts.pairs, "used": choice.columns, "x": source, "x_stride": source.stride}
        arguments |= {"weights": weights, "part_bytes": 0} | self._shape(x, y)
        reads = [source, experts.pairs, experts.weights]
        self._by_row("gather", operation.output.rows, arguments, reads, [y])

    def _deal(self, operation: Operation, x: Activation, every: Choice) -> None:
        """As _gather, but each expert gets other columns."""
        experts, source, y = self._experts[every.routed], self._buffers[x], self._new(operation.output)
        arguments = {"pairs": experts.pairs, "used": every.columns, "x": source, "x_stride": source.stride}
        arguments |= {"weights": 0, "part_bytes": 4 * operation.output.columns} | self._shape(operation.output, y)
        self._by_row("gather", operation.output.rows, arguments, [source, experts.pairs], [y])

    def _collect(self, operation: Operation, x: Activation, every: Choice) -> None:
        """And back, side by side."""
        experts, source, y = self._experts[every.routed], self._buffers[x], self._new(operation.output)
        arguments = {"rows": experts.rows, "used": every.columns, "x": source, "x_stride": source.stride}
        self._by_row("collect", every.rows, arguments | self._shape(x, y), [source, experts.rows], [y])

    def _scatter(self, operation: Operation, x: Activation, choice: Choice) -> None:
        experts, source, y = self._experts[choice.routed], self._buffers[x], self._new(operation.output)
        weights = 0 if choice.routed.routing.weighs_inputs else experts.weights
        arguments = {"rows": experts.rows, "used": choice.columns, "x": source, "x_stride": source.stride}
        arguments |= {"weights": weights} | self._shape(x, y)
        reads = [source, experts.rows, experts.weights]
        self._by_row("scatter", operation.output.rows, arguments, reads, [y])

    def _expert_linear(
        self, operation: Operation, x: Activation, choice: Choice, weight: Weight, bias: np.ndarray | None
    ) -> None:
        """Every expert's product, by the kernel for one matrix."""
        experts, data = self._experts[choice.routed], weight.tensor.data
        kernel, arguments, reads, y = self._product(operation.output, x, weight)
        name = kernel.partition("-")[0]
        places, by_row = LINEAR[name], [(at, arguments[at]) for at in BY_ROW[name] if arguments[at]]
        strides = [(getattr(places, at), buffer.stride) for at, buffer in by_row]
        self._need_scratch(CALL_BYTES + (LINEAR_SCRATCH if name == "linear_quantized" else float_scratch(x.columns)))
        # As many as dense matrices of that size have parts: what is asked for ahead is lost where a slice ends.
        slices = min(max(data[0].nbytes // PART_BYTES, 1), max(8 * self._threads // choice.columns, 1))
        arguments |= {"linear": Address(kernel), "by_row": np.array(strides, np.int64), "by_row_count": len(strides)}
        arguments |= {"run_count": self._count(choice.rows), "expert_bytes": data.strides[0], "slices": slices}
        arguments |= {"active": experts.active, "active_count": experts.active_count}
        kernel = name.replace("linear", "experts")
        self.tape.append(Step(kernel, arguments, 16 * self._threads, 0, [*reads, experts.active], [y]))
        if bias is not None:
            self._add_by_expert(operation.output, y, experts, padded(bias))

    def _add_by_expert(self, x: Activation, y: Buffer, experts: Experts, bias: np.ndarray) -> None:
        arguments = {"pairs": experts.pairs, "chosen": experts.chosen, "x": y, "z": bias, "z_stride": bias.strides[0]}
        reads = [y, experts.pairs, experts.chosen] if isinstance(experts.chosen, Buffer) else [y, experts.pairs]
        self._by_row("add_by_expert", x.rows, arguments | self._shape(x, y), reads, [y])

    def _sigmoid_gate(self, operation: Operation, x: Activation, gate: Activation) -> None:
        source, by, y = self._buffers[x], self._buffers[gate], self._new(operation.output)
        arguments = {"x": source, "gate": by, "gate_stride": by.stride} | self._shape(x, y)
        self._by_row("sigmoid_gate", x.rows, arguments, [source, by], [y])

    def _with_integers(self, arguments: dict[str, Any], x: Activation, format: str, is_stored: bool) -> list[Buffer]:
        """What a product of blocks with integers takes besides; the buffers that it reads."""
        self._need_scratch(LINEAR_SCRATCH)
        q, sub_block = self._as_integers(x), SUB_BLOCK[format]
        arguments |= {"high": q.high, "low": q.low, "scales": q.scales, "excess": q.excess}
        arguments |= {"sums": q.sums[sub_block], "high_sums": q.high_sums[sub_block]}
        arguments["most_precise"] = self.header.most_precise_stored if is_stored else self.header.most_precise
        return q.buffers

    def _with_floats(self, arguments: dict[str, Any], x: Activation, format: str, is_stored: bool) -> list[Buffer]:
        """What a product in float32 takes besides; the buffers that it reads."""
        self._need_scratch(float_scratch(x.columns))
        source = self._buffers[x]
        rounded = self._as_bf16(x) if format == "BF16" and x.columns % 2 == 0 and HAS_BF16 else None
        arguments |= {"x": source, "x_stride": source.stride, "bf16": rounded or 0}
        arguments["bf16_stride"] = rounded.stride if rounded else 0
        arguments["most_precise"] = BATCH if is_stored else PRECISE_TOKENS
        return [source, rounded] if rounded else [source]

    def _rope(
        self, operation: Operation, x: Activation, rope: Rope, factors: Weight | None, divisors: np.ndarray | None
    ) -> None:
        source, pairs = self._buffers[x], rope.dims // 2
        y = source if self._last_uses[x] is operation else self._new(operation.output)
        self._buffers[operation.output] = y
        key = rope, factors.name if factors else ""
        if key not in self._angles:
            self._angles[key] = self._angle_table(rope, divisors)
        arguments = {"x": source, "y": y, "stride": y.stride, "heads": x.columns // rope.head_dim}
        arguments |= {"head_dim": rope.head_dim, "table": self._angles[key], "pairs": pairs}
        step, apart = (2, 1) if rope.interleaved else (1, pairs)
        self._by_row("rope", x.rows, arguments | {"step": step, "apart": apart}, [source, self._angles[key]], [y])

    def _angle_table(self, rope: Rope, divisors: np.ndarray | None) -> Buffer:
        """Cosines and sines of the run's positions, made once for all layers."""
        pairs = rope.dims // 2
        frequencies = rope.frequencies(None if divisors is None else divisors.astype(np.float64))
        table = Buffer(BATCH, pairs * 8)
        arguments = {"positions": self.header.positions, "frequencies": frequencies, "pairs": pairs}
        self._by_row("angles", ALL, arguments | {"table": table, "factor": rope.magnitude}, [], [table])
        return table

    def _attend(
        self,
        operation: Operation,
        q: Activation,
        *new: Activation,
        state: Paged | Latent,
        heads: int,
        slopes: Sequence[float],
        sinks: np.ndarray | None,
        **given: float,
    ) -> None:
        keys, values = sides = self._cache.sides(state)
        of_keys, of_values = state.rotations(self._cache.kv_type)
        if new:
            turned = [self._turned(x, block) for x, block in zip(new, (of_keys, of_values), strict=False)]
            kept = zip(new, turned, sides, strict=False)
            self._in_cache[state.layer] = [self._store(x, buffer, side) for x, buffer, side in kept]
        in_cache = self._in_cache[state.layer]
        source, y, plan = self._turned(q, of_keys), self._new(operation.output), self._plan(heads, state)
        value_dim = -(-state.value_dim // 16) * 16
        partial = Buffer(SPLIT_TOKENS * heads * MOST_SPLITS, (value_dim + 32) * 4)
        self._need_scratch(attention_scratch(-(-state.key_dim // 16) * 16, value_dim))
        arguments: dict[str, Any] = {
            name: plan[name] for name in ("units", "unit_count", "splits", "window", "chunked")
        }
        arguments |= {"count": self._count(ALL), "positions": self.header.positions}
        arguments |= {"q": source, "q_stride": source.stride, "y": y, "y_stride": y.stride, "partial": partial}
        arguments |= {"keys": self._cache.address(keys), "key_head_stride": self._cache.head_stride(keys)}
        arguments |= {"values": self._cache.address(values), "value_head_stride": self._cache.head_stride(values)}
        arguments |= {"key_bytes": keys.token_bytes, "value_bytes": values.token_bytes}
        arguments |= {"heads": heads, "kv_heads": state.kv_heads, "key_dim": state.key_dim}
        arguments |= {"value_dim": state.value_dim, "slopes": np.array(slopes, np.float32) if slopes else 0}
        arguments["sinks"] = 0 if sinks is None else sinks
        arguments |= given
        arguments |= {"scratch": self._scratch, "scratch_bytes": SCRATCH_BYTES}
        count, reads = plan["unit_count"].ctypes.data, [source, *in_cache, plan["made"]]
        kinds = "-".join(dict.fromkeys(side.kind.upper() for side in sides))
        self.tape.append(Step(f"attend-{kinds}", arguments, 8 * self._threads, count, reads, [y, partial]))
        self.tape.append(Step("merge", dict(arguments), 2 * self._threads, 0, [partial, plan["made"]], [y]))
        self._turn(operation.output, y, y, of_values)

    def _turned(self, x: Activation, block: int) -> Buffer:
        """Queries, keys or values times Hadamard matrices of that size; 1: as they are."""
        return self._turn(x, self._buffers[x], Buffer(ROWS, self._buffers[x].stride), block)

    def _turn(self, x: Activation, source: Buffer, y: Buffer, block: int) -> Buffer:
        """As `_turned`, of the rows `source`, which may be y."""
        if block == 1:
            return source
        arguments = {"x": source, "block": block} | self._shape(x, y)
        self._by_row("hadamard", x.rows, arguments, [source], [y])
        return y

    def _store(self, x: Activation, buffer: Buffer, side: Streams) -> Buffer:
        """Keys or values go to the cache; what stands for them there."""
        in_cache = Buffer(0, 0)
        arguments = {"x": buffer, "stride": buffer.stride, "head_dim": x.columns // side.heads}
        arguments |= places(self._cache, side, self.header)
        self._by_row(f"store-{side.kind.upper()}", ALL, arguments, [buffer], [in_cache])
        return in_cache

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
            self.tape.append(Step("plan", arguments, 1, 0, [], [made]))
        return self._plans[key]

    def _add_squares(self, operation: Operation, x: Activation, sums: np.ndarray) -> None:
        source = self._buffers[x]
        arguments = {"count": self._count(x.rows), "x": source, "stride": source.stride, "sums": sums}
        parts = min(-(-x.columns // 64), 4 * self._threads)
        self.tape.append(Step("add_squares", arguments | {"columns": x.columns}, parts, 0, [source], []))

    def _hand_out(self, x: Activation) -> None:
        """The logits to whoever wants them."""
        source, header = self._buffers[x], self.header
        arguments = {"count": self._count(x.rows), "x": source, "stride": source.stride, "columns": x.columns}
        arguments |= {"y": header.logits, "flaws": header.flaws}
        self.tape.append(Step("logits", arguments, 4 * self._threads, 0, [source], []))

    # ---- helpers ----

    def _count(self, rows: Rows) -> int:
        """Address of the number of rows."""
        counts = {ALL: self.header.token_count, WANTED: self.header.wanted_count}
        return (self._experts[rows].row_count if isinstance(rows, Routed) else counts[rows]).ctypes.data

    def _most(self, rows: Rows) -> int:
        """Rows of a buffer."""
        return self._most_routed(rows.routing) if isinstance(rows, Routed) else ROWS

    def _most_routed(self, routing: Routing) -> int:
        """Rows of all experts together, each rounded up."""
        pairs = BATCH * routing.used
        return pairs + min(routing.experts, pairs) * (EXPERT_ROWS - 1)

    def _new(self, x: Activation) -> Buffer:
        """Memory for an activation: float32 [tokens, columns padded to 16].

        Tokens lie an odd number of cache lines apart. At powers of two all of them meet in a few places of every
        cache: matrix products of 512 tokens took 14 % longer.
        """
        self._buffers[x] = Buffer(self._most(x.rows), (-(-x.columns // 16) | 1) * LINE)
        return self._buffers[x]

    def _shape(self, x: Activation, y: Buffer) -> dict[str, Any]:
        return {"y": y, "stride": y.stride, "columns": x.columns}

    def _by_row(
        self, kernel: str, rows: Rows, arguments: dict[str, Any], reads: list[Buffer], writes: list[Buffer]
    ) -> None:
        """A step whose work is split by tokens."""
        count = self._count(rows)
        self.tape.append(Step(kernel, {"count": count, **arguments}, 4 * self._threads, count, reads, writes))

    def _need_scratch(self, size: int) -> None:
        self._scratch_bytes = max(self._scratch_bytes, size)

    def _check_format(self, weight: Weight) -> None:
        name = weight.tensor.format.name
        if name not in PLAIN and name not in GENERIC and name not in SUB_BLOCK:
            raise UnsupportedError(f"tensor {weight.name}: format {name} is not supported")

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

    def _as_bf16(self, x: Activation) -> Buffer:
        """x in BF16, made once for all the matrices that it meets."""
        if x not in self._rounded:
            source = self._buffers[x]
            self._rounded[x] = y = Buffer(self._most(x.rows), source.stride // 2)
            arguments = {"x": source, "stride": source.stride, "y": y, "y_stride": y.stride, "columns": x.columns}
            self._by_row("round_bf16", x.rows, arguments, [source], [y])
        return self._rounded[x]


def places(cache: KVCache, side: Streams, header: Header) -> dict[str, Any]:
    """What kernels are told of where a run's tokens lie in a stream."""
    where = {"positions": header.positions, "owners": header.owners, "sequences": header.sequences}
    stream = {"base": cache.address(side), "head_stride": cache.head_stride(side)}
    return where | stream | {"token_bytes": side.token_bytes, "heads": side.heads}


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
