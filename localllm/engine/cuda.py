"""The target CUDA: what an architecture has said becomes work for a graphics card.

A program is lowered for a number of tokens, a power of two (SIZES): grids are fixed, so that all of it can be recorded
as one graph and replayed without Python between its kernels. Up to FEW_TOKENS, weights are multiplied as they lie in
memory, which is what bounds decode; for more they are unpacked to float16 and multiplied on tensor cores.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.cache import KVCache
from localllm.engine.cuda_attention import AttentionLowering
from localllm.engine.cuda_card import Launch, Product, Work
from localllm.engine.cuda_weights import CardWeights
from localllm.engine.lowering import Crossing, Lowering
from localllm.engine.program import Header
from localllm.engine.recorder import WANTED, Activation, Choice, Operation, Rows
from localllm.engine.recurrent import Layout
from localllm.engine.tape import Buffer, Step, assign_stages, offsets, padded
from localllm.kernels.cuda import grid, parameters

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # tokens that there are programs for
FEW_TOKENS = 8  # up to so many are multiplied with the weights as they are


class CudaLowering(AttentionLowering, Lowering):
    """Steps for a card: matrix products, and what becomes of arguments."""

    def __init__(
        self, operations: list[Operation], cache: KVCache, layout: Layout | None, header: Header,
        weights: CardWeights, tokens: int, wanted: int, taken: Crossing,
    ):  # fmt: skip
        """tokens, wanted: the most of a run, and of those whose logits are wanted."""
        self.tokens = self.buffer_rows = tokens
        self._wanted, self._on_card = wanted, weights
        self._halves: dict[Activation, tuple[Buffer, Buffer]] = {}
        super().__init__(operations, cache, layout, 1, header, taken)

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
            return Product(**values | {"kind": step.arguments["kind"]})
        names = parameters(step.kernel)
        if missing := values.keys() ^ set(names):
            raise TypeError(f"{step.kernel}: {', '.join(sorted(missing))}")
        how = grid(step.kernel, step.arguments, step.parts)
        return Launch(step.kernel, how, tuple(values[name] for name in names))

    # ---- what a target says ----

    def _weights(self, weight: Weight) -> int:
        return self._on_card.address(weight)

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

    def _step(
        self, kernel: str, arguments: dict[str, Any], rows: int, reads: list[Buffer], writes: list[Buffer]
    ) -> None:
        """rows: the most that it will meet."""
        self.tape.append(Step(kernel, arguments, rows, None, reads, writes))

    # ---- matrix products ----

    def _linear(self, operation: Operation, x: Activation, weight: Weight, bias: np.ndarray | None) -> None:
        y, most = self._new(operation.output), self._most(x.rows)
        if most <= FEW_TOKENS:
            self._multiply_few(x, y, weight)
        else:
            self._multiply_many(x, y, weight)
        if bias is not None:
            arguments = {"x": y, "z": padded(bias), "z_stride": 0} | self._shape(operation.output, y)
            self._by_row("add", x.rows, arguments, [y], [y])

    def _multiply_few(self, x: Activation, y: Buffer, weight: Weight) -> None:
        """With the weights as they are."""
        source, format = self._buffers[x], weight.tensor.format
        arguments = {"count": self._count(x.rows), "weights": self._weights(weight), "rows": weight.shape[0]}
        arguments |= {"columns": x.columns, "row_bytes": format.row_bytes(x.columns), "x": source, "y": y}
        arguments |= {"x_stride": source.stride, "y_stride": y.stride, "bf16": 0, "bf16_stride": 0}
        arguments |= {"most_precise": 0} | self._scratch_for(0)
        self._step(f"linear_float-{format.name}", arguments, self._most(x.rows), [source], [y])

    def _multiply_many(self, x: Activation, y: Buffer, weight: Weight) -> None:
        """On tensor cores."""
        source = self._buffers[x]
        arguments = {"kind": "f32", "a": self._weights(weight), "b": source, "c": y, "m": weight.shape[0]}
        arguments |= {"n": self._most(x.rows), "k": x.columns, "a_stride": x.columns}
        arguments |= {"b_stride": source.stride // 4, "c_stride": y.stride // 4}
        self._step("product", arguments, 0, [source], [y])

    def _expert_linear(
        self, operation: Operation, x: Activation, choice: Choice, weight: Weight, bias: np.ndarray | None
    ) -> None:
        raise NotImplementedError


def pinned_address(array: np.ndarray) -> int:
    """Of memory of the host that the card reads at the same address."""
    return int(array.ctypes.data)


def encoded(value: Any, place: Callable[[Any], int], memory: int) -> int:
    """An argument as an int64: a number, the bits of a float32, or an address."""
    if isinstance(value, Buffer):
        return memory + value.address if value.rows else 0
    if isinstance(value, np.ndarray):
        return place(value)
    if isinstance(value, str):
        return 0
    return int(np.float32(value).view(np.int32)) if isinstance(value, float) else int(value)
