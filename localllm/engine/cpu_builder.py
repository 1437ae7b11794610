"""The verbs for the CPU: each appends steps to a tape. What a verb means is written in localllm.kernels.reference."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.arch.config import Config
from localllm.arch.weights import Weight
from localllm.engine.kv_cache import KVCache, reserve
from localllm.engine.tape import Buffer, Step, Tape
from localllm.errors import ModelError
from localllm.kernels.cpu import FLOAT_SCRATCH, GENERIC, LINEAR_SCRATCH, PLAIN, SUB_BLOCK
from localllm.kernels.target import cpu_features

BATCH = 512  # tokens in one run at most
BUFFER_ROWS = BATCH + 8  # matrix products work on several tokens at a time and round up
PRECISE_TOKENS = 128  # up to so many, activations keep 16 bits
PART_BYTES = 1 << 16  # of weights: what is worth a thread's coming
HAS_BF16 = "avx512bf16" in cpu_features()  # instructions that multiply those numbers
SPLITS, FEW_TOKENS, ROWS, KEYS = 16, 8, 96, 64  # as in localllm.kernels.cpu.attention


@dataclass
class Header:
    """What changes from run to run, at fixed addresses."""

    counts: np.ndarray  # int64 [2]: tokens, selected tokens
    tokens: np.ndarray  # int64 [BATCH]
    positions: np.ndarray  # int64 [BATCH]
    outputs: np.ndarray  # int64 [BATCH]: which tokens are selected
    precise: np.ndarray  # int64 [2]: the most tokens whose activations keep 16 bits; for keys and values

    @classmethod
    def empty(cls) -> "Header":
        return cls(
            counts=np.zeros(2, np.int64),
            tokens=np.zeros(BATCH, np.int64),
            positions=np.zeros(BATCH, np.int64),
            outputs=np.zeros(BATCH, np.int64),
            precise=np.array([0, BATCH], np.int64),
        )


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


class CpuBuilder:
    """Records a model on a tape."""

    def __init__(
        self, config: Config, cache: KVCache, kv_type: str, interleaved_rope: bool, threads: int, collect: bool = False
    ):
        """collect: sum up in `squares` what the matrices meet, see localllm.kernels.cpu.collect."""
        self.config, self.cache, self.storage = config, cache, kv_type.upper()
        self.interleaved, self.threads = interleaved_rope, threads
        self.tape, self.header = Tape(), Header.empty()
        self.scratch_bytes = 0
        self._quantized: dict[Buffer, Quantized] = {}
        self._rounded: dict[Buffer, Buffer] = {}
        self._angles: dict[str, Buffer] = {}
        self._collect = collect
        self.squares: dict[str, np.ndarray] = {}  # by the matrix's name, float32 [columns]; some share memory
        self._squares: dict[Buffer, np.ndarray] = {}
        self._scratch = Buffer(0, 0)  # its address is filled in by `finish`
        self._sides = [
            (Buffer(0, 0), Buffer(0, 0)) for _ in range(config.layers)
        ]  # stand for a layer's keys and values

    def finish(self, addresses: dict[str, int]) -> np.ndarray:
        """The tape as an array."""
        self.scratch_bytes = -(-self.scratch_bytes // 4096) * 4096 + 4096
        self._scratch_memory = reserve(self.scratch_bytes * self.threads + 64)
        self._scratch.address = -(-self._scratch_memory.ctypes.data // 64) * 64
        for step in self.tape.steps:
            for name, value in step.arguments.items():
                step.arguments[name] = self.scratch_bytes if value is SCRATCH_BYTES else value
        return self.tape.finish(addresses)

    def read(self, buffer: Buffer, rows: int) -> np.ndarray:
        """The first rows of a finished tape's buffer: a float32 view."""
        floats = (ctypes.c_float * (rows * buffer.stride // 4)).from_address(buffer.address)
        return np.ctypeslib.as_array(floats).reshape(rows, buffer.stride // 4)

    # ---- the verbs ----

    def embed(self, weight: Weight) -> Buffer:
        columns = self._check_matrix(weight, self.config.width, self.config.vocab_size)
        x = self._buffer(columns)
        name = f"embed-{weight.tensor.format.name}"
        row_bytes = weight.tensor.format.row_bytes(columns)
        arguments = {"weights": weight.tensor.data, "row_bytes": row_bytes, "columns": columns, "x": x}
        self._by_token(name, arguments | {"ids": self.header.tokens, "stride": x.stride}, [], [x])
        return x

    def select(self, x: Buffer) -> Buffer:
        y = self._buffer(x.columns, outputs_only=True)
        arguments = {"x": x, "rows": self.header.outputs, "y": y, "stride": x.stride, "columns": x.columns}
        self._by_token("select", arguments, [x], [y], outputs_only=True)
        return y

    def rms_norm(self, x: Buffer, weight: Weight) -> Buffer:
        y = self._buffer(x.columns, x.outputs_only)
        arguments = {"x": x, "weight": self._vector(weight, x.columns), "y": y, "stride": x.stride}
        arguments |= {"columns": x.columns, "epsilon": self.config.epsilon}
        self._by_token("rms_norm", arguments, [x], [y], x.outputs_only)
        return y

    def linear(self, x: Buffer, weight: Weight, cached: bool = False) -> Buffer:
        columns = self._check_matrix(weight, x.columns)
        if self._collect:
            self.squares[weight.name] = self._add_squares(x)
        y = self._buffer(weight.shape[0], x.outputs_only)
        name, format = weight.tensor.format.name, weight.tensor.format
        row_bytes = format.row_bytes(columns)
        arguments = {"count": self._count(x.outputs_only), "weights": weight.tensor.data, "row_bytes": row_bytes}
        arguments |= {"rows": weight.shape[0], "columns": columns, "y": y, "y_stride": y.stride}
        arguments |= {"scratch": self._scratch, "scratch_bytes": SCRATCH_BYTES}
        if name in SUB_BLOCK and columns % 64 == 0:
            q = self._quantize(x)
            self._need_scratch(LINEAR_SCRATCH)
            arguments |= {"high": q.high, "low": q.low, "scales": q.scales, "excess": q.excess}
            arguments |= {"sums": q.sums[SUB_BLOCK[name]], "high_sums": q.high_sums[SUB_BLOCK[name]]}
            arguments["most_precise"] = self.header.precise[int(cached) :]
            kernel, reads = f"linear_quantized-{name}", q.buffers
        else:
            self._need_scratch(max(FLOAT_SCRATCH, 4 * columns))
            rounded = self._round(x) if name == "BF16" and columns % 2 == 0 and HAS_BF16 else None
            arguments |= {"x": x, "x_stride": x.stride, "bf16": rounded or 0}
            arguments |= {"bf16_stride": rounded.stride if rounded else 0}
            arguments["most_precise"] = BATCH if cached else PRECISE_TOKENS
            kernel, reads = f"linear_float-{name}", [x, *([rounded] if rounded else [])]
        parts = min(max(weight.tensor.nbytes // PART_BYTES, 1), 8 * self.threads)
        self._append(Step(kernel, arguments, parts, 0, reads, [y]))
        return self._add_bias(y, weight.bias) if weight.bias else y

    def rope(self, x: Buffer, factors: Weight | None = None) -> Buffer:
        config, pairs = self.config, self.config.rope.dims // 2
        heads, rest = divmod(x.columns, config.head_dim)
        if rest:
            raise ModelError(f"{x.columns} columns are no whole number of heads of {config.head_dim}")
        table = self._angle_table(factors)
        step, apart = (2, 1) if self.interleaved else (1, pairs)
        arguments = {"x": x, "y": x, "stride": x.stride, "heads": heads, "head_dim": config.head_dim, "table": table}
        arguments |= {"pairs": pairs, "step": step, "apart": apart}
        self._by_token("rope", arguments, [table], [x])
        return x

    def attend(self, q: Buffer, k: Buffer, v: Buffer, layer: int) -> Buffer:
        config, cache, runs = self.config, self.cache, self.cache.runs(layer)
        for name, buffer, heads in (("q", q, config.heads), ("k", k, config.kv_heads), ("v", v, config.kv_heads)):
            if buffer.columns != heads * config.head_dim:
                raise ModelError(f"layer {layer}: {name} should have {heads} heads of {config.head_dim}")
        for x, side in ((k, 0), (v, 8)):
            arguments = {"positions": self.header.positions, "x": x, "stride": x.stride, "runs": runs}
            arguments |= {"run_count": len(runs), "side": side, "head_stride": cache.head_bytes}
            arguments |= {"token_bytes": cache.token_bytes, "heads": config.kv_heads, "head_dim": config.head_dim}
            self._by_token(f"store-{self.storage}", arguments, [x], [self._sides[layer][side // 8]])
        y, padded = self._buffer(q.columns), -(-config.head_dim // 16) * 16
        partial = Buffer(FEW_TOKENS * config.heads * SPLITS, (padded + 32) * 4)
        self._need_scratch(4 * (ROWS * (2 * padded + KEYS + 32) + 2 * KEYS * padded))
        arguments = {"count": self._count(False), "positions": self.header.positions, "q": q, "q_stride": q.stride}
        arguments |= {"y": y, "y_stride": y.stride, "runs": runs, "run_count": len(runs)}
        arguments |= {"head_stride": cache.head_bytes, "token_bytes": cache.token_bytes, "heads": config.heads}
        arguments |= {"kv_heads": config.kv_heads, "head_dim": config.head_dim, "scale": config.head_dim**-0.5}
        arguments |= {"partial": partial, "scratch": self._scratch, "scratch_bytes": SCRATCH_BYTES}
        reads, parts = [q, *self._sides[layer]], 8 * self.threads
        self._append(Step(f"attend-{self.storage}", arguments, parts, 0, reads, [y, partial]))
        self._append(Step("merge", arguments, 2 * self.threads, 0, [partial], [y]))
        return y

    def add(self, x: Buffer, y: Buffer) -> Buffer:
        check_same_columns(x, y)
        z = self._buffer(x.columns, x.outputs_only)
        arguments = {"x": x, "z": y, "z_stride": y.stride, "y": z, "stride": z.stride, "columns": z.columns}
        self._by_token("add", arguments, [x, y], [z], x.outputs_only)
        return z

    def swiglu(self, gate: Buffer, up: Buffer) -> Buffer:
        check_same_columns(gate, up)
        y = self._buffer(up.columns, up.outputs_only)
        arguments = {"gate": gate, "up": up, "y": y, "stride": y.stride, "columns": y.columns}
        self._by_token("swiglu", arguments, [gate, up], [y], y.outputs_only)
        return y

    # ---- helpers ----

    def _count(self, outputs_only: bool) -> int:
        """Address of the number of tokens, or of selected tokens."""
        return self.header.counts.ctypes.data + 8 * outputs_only

    def _buffer(self, columns: int, outputs_only: bool = False) -> Buffer:
        """Float32 activations: [tokens, columns padded to 16].

        Tokens lie an odd number of cache lines apart. At powers of two all of them meet in a few places of every
        cache: matrix products of 512 tokens took 14 % longer.
        """
        lines = -(-columns // 16) | 1
        return Buffer(BUFFER_ROWS, lines * 64, columns, outputs_only)

    def _by_token(
        self,
        kernel: str,
        arguments: dict[str, Any],
        reads: list[Buffer],
        writes: list[Buffer],
        outputs_only: bool = False,
    ) -> None:
        """A step whose work is split by tokens."""
        count = self._count(outputs_only)
        self._append(Step(kernel, {"count": count, **arguments}, 4 * self.threads, count, reads, writes))

    def _append(self, step: Step) -> None:
        """Put a step on the tape; what it overwrites has to be quantized anew."""
        self.tape.append(step)
        for buffer in step.writes:
            self._quantized.pop(buffer, None)
            self._rounded.pop(buffer, None)
            self._squares.pop(buffer, None)

    def _need_scratch(self, size: int) -> None:
        self.scratch_bytes = max(self.scratch_bytes, size)

    def _check_matrix(self, weight: Weight, columns: int, rows: int | None = None) -> int:
        """Refuse a matrix of the wrong shape or format; return its columns."""
        shape, name = weight.shape, weight.tensor.format.name
        if len(shape) != 2 or shape[1] != columns or (rows and shape[0] != rows):
            expected = f"[{rows or 'any'}, {columns}]"
            raise ModelError(f"tensor {weight.name} should have the shape {expected}, has {list(shape)}")
        if name not in PLAIN and name not in GENERIC and name not in SUB_BLOCK:
            raise ModelError(f"tensor {weight.name}: format {name} is not supported")
        return columns

    def _vector(self, weight: Weight, columns: int) -> np.ndarray:
        """A norm's or bias's weights, padded to 16."""
        vector = weight.vector()
        if len(vector) != columns:
            raise ModelError(f"tensor {weight.name} should have {columns} weights, has {len(vector)}")
        return np.pad(vector, (0, -columns % 16))

    def _add_bias(self, y: Buffer, bias: Weight) -> Buffer:
        arguments = {"x": y, "z": self._vector(bias, y.columns), "z_stride": 0, "y": y, "stride": y.stride}
        arguments["columns"] = y.columns
        self._by_token("add", arguments, [], [y], y.outputs_only)
        return y

    def _quantize(self, x: Buffer) -> Quantized:
        """x as integers, made once for all the matrices that it meets."""
        if x not in self._quantized:
            scale = x.columns // 32 * 4  # bytes per token
            sizes = (x.columns, x.columns, scale, scale, 2 * scale, scale, 2 * scale, scale)
            high, low, scales, *sums, excess = (Buffer(BUFFER_ROWS, n) for n in sizes)
            q = Quantized(high, low, scales, {32: sums[0], 16: sums[1]}, {32: sums[2], 16: sums[3]}, excess)
            self._quantized[x] = q
            arguments = {"x": x, "stride": x.stride, "columns": x.columns, "high": high, "low": low, "scales": scales}
            arguments |= {"sums_32": sums[0], "sums_16": sums[1], "high_sums_32": sums[2], "high_sums_16": sums[3]}
            arguments["excess"] = excess
            self._by_token("quantize", arguments, [x], q.buffers, x.outputs_only)
        return self._quantized[x]

    def _round(self, x: Buffer) -> Buffer:
        """x in BF16, made once for all the matrices that it meets."""
        if x not in self._rounded:
            self._rounded[x] = y = Buffer(BUFFER_ROWS, x.stride // 2)
            arguments = {"x": x, "stride": x.stride, "y": y, "y_stride": y.stride, "columns": x.columns}
            self._by_token("round_bf16", arguments, [x], [y], x.outputs_only)
        return self._rounded[x]

    def _add_squares(self, x: Buffer) -> np.ndarray:
        """The sums of x's squares, made once for all the matrices that it meets."""
        if x not in self._squares:
            self._squares[x] = sums = np.zeros(-(-x.columns // 16) * 16, np.float32)
            arguments = {"count": self._count(x.outputs_only), "x": x, "stride": x.stride, "columns": x.columns}
            parts = min(-(-x.columns // 64), 4 * self.threads)  # of 64 columns at least: four vectors side by side
            self._append(Step("add_squares", arguments | {"sums": sums}, parts, 0, [x], []))
        return self._squares[x][: x.columns]

    def _angle_table(self, factors: Weight | None) -> Buffer:
        """Cosines and sines of the run's positions, made once for all layers."""
        key, rope = factors.name if factors else "", self.config.rope
        if key not in self._angles:
            pairs = rope.dims // 2
            divisors = self._vector(factors, pairs)[:pairs].astype(np.float64) if factors else None
            table = self._angles[key] = Buffer(BATCH, pairs * 8)
            arguments = {"positions": self.header.positions, "frequencies": rope.frequencies(divisors), "pairs": pairs}
            arguments |= {"table": table, "factor": rope.magnitude}
            self._by_token("angles", arguments, [], [table])
        return self._angles[key]


def check_same_columns(x: Buffer, y: Buffer) -> None:
    """Refuse to combine activations of different widths."""
    if x.columns != y.columns:
        raise ModelError(f"the model's tensors do not fit together: {x.columns} columns meet {y.columns}")


SCRATCH_BYTES = object()  # stands for the final size of the scratch memory of a thread
