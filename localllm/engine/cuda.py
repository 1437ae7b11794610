"""The target CUDA: what an architecture has said becomes work for a graphics card.

A program is lowered for a number of tokens, a power of two (SIZES): grids are fixed, so that all of it can be recorded
as one graph and replayed without Python between its kernels. Up to FEW_TOKENS, weights are multiplied as they lie in
memory, which is what bounds decode; for more they are unpacked to float16 and multiplied on tensor cores.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.cache import KVCache
from localllm.engine.cuda_attention import AttentionLowering
from localllm.engine.cuda_card import Launch, Product, Work
from localllm.engine.cuda_fusion import fused
from localllm.engine.cuda_weights import CardWeights
from localllm.engine.lowering import Crossing
from localllm.engine.program import Header
from localllm.engine.recorder import WANTED, Activation, Choice, Operation, Rows
from localllm.engine.recurrent import Layout
from localllm.engine.tape import Buffer, Step, assign_stages, offsets, padded
from localllm.kernels.cuda import at_a_time, grid, parameters
from localllm.kernels.cuda.planes import PLAIN

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # tokens that there are programs for
FEW_TOKENS = 8  # up to so many are multiplied with the weights as they are
WITH_INTEGERS = {"rms_norm": "norm_quantize", "swiglu": "swiglu_quantize"}  # kernels that make them on the way
UNPACKED = 64 << 20  # bytes of a matrix that are unpacked at a time
DENSE = {"active": 0, "active_count": 0, "expert_bytes": 0, "experts": 1}  # a matrix that belongs to no expert


class Within(NamedTuple):
    """A place in a buffer."""

    buffer: Buffer
    offset: int  # bytes


class CudaLowering(AttentionLowering):
    """Steps for a card: matrix products, and what becomes of arguments."""

    def __init__(
        self, operations: list[Operation], cache: KVCache, layout: Layout | None, header: Header,
        weights: CardWeights, tokens: int, wanted: int, taken: Crossing,
    ):  # fmt: skip
        """tokens, wanted: the most of a run, and of those whose logits are wanted."""
        self.tokens = self.buffer_rows = tokens
        self.depth = 16 if weights.capability >= (8, 0) else 8
        self._wanted, self._on_card = wanted, weights
        self._integers: dict[Activation, tuple[Buffer, Buffer, Buffer]] = {}
        self._halves: dict[Activation, tuple[Buffer, Buffer]] = {}
        self._bf16: dict[Activation, tuple[Buffer, Buffer]] = {}
        super().__init__(operations, cache, layout, 1, header, taken)
        self.tape.steps = fused(self.tape.steps)

    def work(self, place: Callable[[Any], int], memory: int) -> list[Work]:
        """What the card has to do; place: where an array is for it; memory: address of `size` bytes for the buffers."""
        return [self._work(step, place, memory) for step in self.tape.steps]

    @property
    def kernels(self) -> set[str]:
        """The names of all that are needed."""
        return {step.kernel for step in self.tape.steps if step.kernel != "product"}

    @property
    def size(self) -> int:
        """Bytes of all buffers, which get their places."""
        assign_stages(self.tape.steps)
        return offsets(self.tape.steps)

    def _work(self, step: Step, place: Callable[[Any], int], memory: int) -> Work:
        values = {name: encoded(value, place, memory) for name, value in step.arguments.items()}
        if step.kernel == "product":
            return Product(**values | {"kind": step.arguments["kind"], "adds": step.arguments["adds"]})
        names = parameters(step.kernel)
        if missing := values.keys() ^ set(names):
            raise TypeError(f"{step.kernel}: {', '.join(sorted(missing))}")
        how = grid(step.kernel, step.arguments, step.parts)
        return Launch(step.kernel, how, tuple(values[name] for name in names))

    # ---- what a target says ----

    def _weights(self, weight: Weight) -> int:
        return self._on_card.address(weight)

    def _layout_of(self, weight: Weight) -> tuple[str, int]:
        return CardWeights.format(weight), CardWeights.row_bytes(weight)

    def _scratch_for(self, size: int) -> dict[str, Any]:
        """Kernels have memory of their own."""
        return {"scratch": 0, "scratch_bytes": 0}

    def _take(self, x: Activation, rows: np.ndarray) -> None:
        y = self._new(x)
        arguments = {"source": pinned_address(rows), "target": y, "words": y.size // 8}
        self._step("fetch", arguments, 0, [], [y])

    def _most(self, rows: Rows) -> int:
        return self._wanted if rows is WANTED else super()._most(rows)

    def _by_row(
        self, kernel: str, rows: Rows, arguments: dict[str, Any], reads: list[Buffer], writes: list[Buffer]
    ) -> None:
        self._step(kernel, {"count": self._count(rows), **arguments}, self._most(rows), reads, writes)

    def _in_parts(self, kernel: str, rows: Rows, arguments: dict[str, Any], parts: int, reads: list[Buffer]) -> None:
        self._step(kernel, arguments, self._most(rows), reads, [])

    def _step(
        self, kernel: str, arguments: dict[str, Any], rows: int, reads: list[Buffer], writes: list[Buffer]
    ) -> None:
        """rows: the most that it will meet."""
        self.tape.append(Step(kernel, arguments, rows, None, reads, writes))

    # ---- matrix products ----

    def _linear(self, operation: Operation, x: Activation, weight: Weight, bias: np.ndarray | None) -> None:
        y = self._new(operation.output)
        if self._most(x.rows) <= FEW_TOKENS:
            self._multiply_few(x, y, weight, DENSE, [])
        else:
            self._multiply_many(x, y, weight)
        if bias is not None:
            arguments = {"x": y, "z": padded(bias), "z_stride": 0} | self._shape(operation.output, y)
            self._by_row("add", x.rows, arguments, [y], [y])

    def _expert_linear(
        self, operation: Operation, x: Activation, choice: Choice, weight: Weight, bias: np.ndarray | None
    ) -> None:
        """Every expert's product, for groups of its rows."""
        experts, y, count = self._experts[choice.routed], self._new(operation.output), weight.shape[0]
        of_experts = {"active": experts.active, "active_count": experts.active_count, "experts": count}
        of_experts["expert_bytes"] = weight.shape[1] * CardWeights.row_bytes(weight)
        self._multiply_few(x, y, weight, of_experts, [experts.active])
        if bias is not None:
            self._add_by_expert(operation.output, y, experts, padded(bias))

    def _multiply_few(
        self, x: Activation, y: Buffer, weight: Weight, of_experts: dict[str, Any], reads: list[Buffer]
    ) -> None:
        """With the weights as they lie on the card."""
        kind, most = CardWeights.format(weight), self._most(x.rows)
        kernel = f"{at_a_time(min(most, self.tokens))}-{kind}"  # no expert has more rows than there are tokens
        arguments = {"count": self._count(x.rows), "weights": self._weights(weight), "rows": weight.shape[-2]}
        arguments |= {"row_bytes": CardWeights.row_bytes(weight), "columns": x.columns, "y": y, "y_stride": y.stride}
        if kind in PLAIN:
            source = self._buffers[x]
            arguments |= {"x": source, "x_stride": source.stride}
            self._step(f"linear_plain-{kernel}", arguments | of_experts, most, [source, *reads], [y])
        else:
            codes, scales, sums = integers = self._as_integers(x)
            arguments |= {"codes": codes, "scales": scales, "sums": sums}
            self._step(f"linear_planes-{kernel}", arguments | of_experts, most, [*integers, *reads], [y])

    def _as_integers(self, x: Activation) -> tuple[Buffer, Buffer, Buffer]:
        """Codes, scales and sums, made once for all the matrices that x meets."""
        if x not in self._integers:
            most, source = self._most(x.rows), self._buffers[x]
            sizes = 2 * x.columns, x.columns // 32 * 4, x.columns // 16 * 4  # bytes per token
            codes, scales, sums = self._integers[x] = tuple(Buffer(most, size) for size in sizes)  # type: ignore
            integers, maker = {"codes": codes, "scales": scales, "sums": sums}, self._maker(source)
            if maker and maker.kernel in WITH_INTEGERS and maker.arguments.get("group", x.columns) == x.columns:
                maker.kernel, maker.arguments = WITH_INTEGERS[maker.kernel], maker.arguments | integers
                maker.writes = [*maker.writes, codes, scales, sums]
            else:
                arguments = {"x": source, "stride": source.stride, "columns": x.columns} | integers
                self._by_row("quantize_planes", x.rows, arguments, [source], [codes, scales, sums])
        return self._integers[x]

    def _maker(self, buffer: Buffer) -> Step | None:
        """The step that wrote last to a buffer."""
        return next((step for step in reversed(self.tape.steps) if buffer in step.writes), None)

    def _multiply_many(self, x: Activation, y: Buffer, weight: Weight) -> None:
        """On tensor cores."""
        kind, width = CardWeights.format(weight), CardWeights.row_bytes(weight)
        if kind == "F32":
            source, matrix = self._buffers[x], self._weights(weight)
            self._product("f32", matrix, width // 4, source, source.stride // 4, x, y, 0, weight.shape[0])
        elif kind == "BF16":
            high, low = self._parts(x)
            for part in (high, low):
                stride, adds = part.stride // 2, part is low
                self._product(
                    "bf16", self._weights(weight), width // 2, part, stride, x, y, 0, weight.shape[0], adds=adds
                )
        else:
            self._multiply_halves(x, y, weight, kind)

    def _multiply_halves(self, x: Activation, y: Buffer, weight: Weight, kind: str) -> None:
        """In float16, to which weights are unpacked, some rows at a time."""
        halves, scales = self._as_halves(x)
        rows, columns = weight.shape
        step = rows if kind == "F16" else max(UNPACKED // (2 * columns), 1)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            whole = self._weights(weight), CardWeights.row_bytes(weight) // 2
            matrix, stride = whole if kind == "F16" else (self._unpacked(weight, kind, first, count), columns)
            self._product("f16", matrix, stride, halves, halves.stride // 2, x, y, first, count)
        self._by_row(
            "rescale", x.rows, {"y": y, "stride": y.stride, "columns": rows, "scales": scales}, [y, scales], [y]
        )

    def _unpacked(self, weight: Weight, kind: str, first: int, count: int) -> Buffer:
        """Some rows of a matrix in float16."""
        columns = weight.shape[-1]
        y = Buffer(count, 2 * columns)
        arguments = {"weights": self._weights(weight), "row_bytes": CardWeights.row_bytes(weight), "columns": columns}
        self._step(f"unpack-{kind}", arguments | {"first": first, "rows": count, "y": y}, count, [], [y])
        return y

    def _product(
        self, kind: str, matrix: Buffer | int, matrix_stride: int, source: Buffer, stride: int, x: Activation,
        y: Buffer, first: int, rows: int, adds: bool = False,
    ) -> None:  # fmt: skip
        """y, from column `first` on, = source times a matrix; strides in numbers."""
        arguments: dict[str, Any] = {"kind": kind, "a": matrix, "b": source, "c": Within(y, 4 * first), "m": rows}
        arguments |= {"n": self._most(x.rows), "k": x.columns, "a_stride": matrix_stride, "b_stride": stride}
        arguments |= {"c_stride": y.stride // 4, "adds": adds}
        reads = [source, matrix] if isinstance(matrix, Buffer) else [source]
        self._step("product", arguments, 0, reads, [y])

    def _as_halves(self, x: Activation) -> tuple[Buffer, Buffer]:
        """x in float16, and the scale of each row, made once for all the matrices that x meets."""
        if x not in self._halves:
            most, source = self._most(x.rows), self._buffers[x]
            y, scales = self._halves[x] = Buffer(most, source.stride // 2), Buffer(most, 4)
            arguments = {"x": source, "stride": source.stride, "columns": x.columns, "y": y}
            arguments |= {"y_stride": y.stride, "scales": scales}
            self._by_row("halve", x.rows, arguments, [source], [y, scales])
        return self._halves[x]

    def _parts(self, x: Activation) -> tuple[Buffer, Buffer]:
        """x as the sum of two numbers in BF16, made once for all the matrices that x meets."""
        if x not in self._bf16:
            most, source = self._most(x.rows), self._buffers[x]
            high, low = self._bf16[x] = Buffer(most, source.stride // 2), Buffer(most, source.stride // 2)
            arguments = {"x": source, "stride": source.stride, "columns": x.columns}
            arguments |= {"high": high, "low": low, "y_stride": high.stride}
            self._by_row("split_bf16", x.rows, arguments, [source], [high, low])
        return self._bf16[x]


def pinned_address(array: np.ndarray) -> int:
    """Of memory of the host that the card reads at the same address."""
    return int(array.ctypes.data)


def encoded(value: Any, place: Callable[[Any], int], memory: int) -> int:
    """An argument as an int64: a number, the bits of a float32, or an address."""
    if isinstance(value, Within):
        return encoded(value.buffer, place, memory) + value.offset
    if isinstance(value, Buffer):
        return memory + value.address if value.rows else 0
    if isinstance(value, np.ndarray):
        return place(value)
    if isinstance(value, str):
        return 0
    return int(np.float32(value).view(np.int32)) if isinstance(value, float) else int(value)
