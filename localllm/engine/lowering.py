"""Operations become steps: what all targets have in common.

Most verbs are a row in SIMPLE. A target (localllm.engine.cpu, localllm.engine.cuda) adds what it has choices about:
matrix products and attention.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from localllm.arch.rope import Rope
from localllm.arch.states import Latent, Paged
from localllm.arch.weights import Weight
from localllm.engine.cache import KVCache, Streams
from localllm.engine.lowering_experts import ExpertLowering
from localllm.engine.lowering_recurrent import RecurrentLowering
from localllm.engine.program import Header
from localllm.engine.recorder import ALL, Activation, Operation
from localllm.engine.recurrent import Layout
from localllm.engine.tape import Buffer, padded

Crossing = Mapping[Activation, np.ndarray]  # what goes from one target to another, float32 [BATCH, numbers of a row]

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


class Lowering(ExpertLowering, RecurrentLowering):
    """Operations become steps, one after the other."""

    def __init__(
        self, operations: list[Operation], cache: KVCache, layout: Layout | None, threads: int, header: Header,
        taken: Crossing | None = None, given: Crossing | None = None,
    ):  # fmt: skip
        """layout: of what recurrent layers keep, if there are some; threads: how many will share a step.

        taken: activations that another target has made, and where they lie; given: those that another one goes on with,
        and where it wants them; without, the last operation makes the logits, which are handed out.
        """
        super().__init__(operations, cache, layout, threads, header)
        self._angles: dict[tuple[Rope, str], Buffer] = {}
        self._in_cache: dict[int, list[Buffer]] = {}  # by layer, what stands for its keys and values
        for x, rows in (taken or {}).items():
            self._take(x, rows)
        for operation in operations:
            if operation.verb in SIMPLE:
                self._simple(operation, *SIMPLE[operation.verb])
            else:
                getattr(self, f"_{operation.verb}")(operation, *operation.inputs, **operation.given)
        for x, rows in (given or {}).items():
            self._give(x, rows)
        if not given:
            self._hand_out(operations[-1].output)

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
        x, (kind, row_bytes) = self._new(operation.output), self._layout_of(weight)
        arguments = {"weights": self._weights(weight), "row_bytes": row_bytes, "columns": operation.output.columns}
        arguments |= {"ids": ids, "x": x, "stride": x.stride}
        self._by_row(f"embed-{kind}", operation.output.rows, arguments, [], [x])

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

    def _sigmoid_gate(self, operation: Operation, x: Activation, gate: Activation) -> None:
        source, by, y = self._buffers[x], self._buffers[gate], self._new(operation.output)
        arguments = {"x": source, "gate": by, "gate_stride": by.stride} | self._shape(x, y)
        self._by_row("sigmoid_gate", x.rows, arguments, [source, by], [y])

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
        table = Buffer(self.tokens, pairs * 8)
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
        """New keys and values go to the cache, turned as it wants them; queries are turned alike, and results back."""
        sides, (of_keys, of_values) = self._cache.sides(state), state.rotations(self._cache.kv_type)
        if new:
            turned = [self._turned(x, block) for x, block in zip(new, (of_keys, of_values), strict=False)]
            kept = zip(new, turned, sides, strict=False)
            self._in_cache[state.layer] = [self._store(x, buffer, side) for x, buffer, side in kept]
        source, y = self._turned(q, of_keys), self._new(operation.output)
        arguments = self._of_cache(sides) | given | {"heads": heads, "kv_heads": state.kv_heads}
        arguments |= {"q": source, "q_stride": source.stride, "y": y, "y_stride": y.stride}
        arguments["slopes"] = np.array(slopes, np.float32) if slopes else 0
        arguments["sinks"] = 0 if sinks is None else sinks
        self._attention(state, arguments, [source, *self._in_cache[state.layer]], y)
        self._turn(operation.output, y, y, of_values)

    def _attention(self, state: Paged | Latent, arguments: dict[str, Any], reads: list[Buffer], y: Buffer) -> None:
        """The target's own: from queries, and what is in the cache, to results."""
        raise NotImplementedError

    def _of_cache(self, sides: tuple[Streams, Streams]) -> dict[str, Any]:
        """Where keys and values are."""
        keys, values = sides
        where: dict[str, Any] = {"key_bytes": keys.token_bytes, "value_bytes": values.token_bytes}
        where |= {"keys": self._cache.address(keys), "key_head_stride": self._cache.head_stride(keys)}
        return where | {"values": self._cache.address(values), "value_head_stride": self._cache.head_stride(values)}

    def _store(self, x: Activation, buffer: Buffer, side: Streams) -> Buffer:
        """Keys or values go to the cache; what stands for them there."""
        in_cache = Buffer(0, 0)
        arguments = {"x": buffer, "stride": buffer.stride, "head_dim": x.columns // side.heads}
        arguments |= places(self._cache, side, self.header)
        self._by_row(f"store-{side.kind.upper()}", ALL, arguments, [buffer], [in_cache])
        return in_cache

    def _turned(self, x: Activation, block: int) -> Buffer:
        """Queries, keys or values times Hadamard matrices of that size; 1: as they are."""
        return self._turn(x, self._buffers[x], Buffer(self.buffer_rows, self._buffers[x].stride), block)

    def _turn(self, x: Activation, source: Buffer, y: Buffer, block: int) -> Buffer:
        """As `_turned`, of the rows `source`, which may be y."""
        if block == 1:
            return source
        arguments = {"x": source, "block": block} | self._shape(x, y)
        self._by_row("hadamard", x.rows, arguments, [source], [y])
        return y

    def _add_squares(self, operation: Operation, x: Activation, sums: np.ndarray) -> None:
        source = self._buffers[x]
        arguments = {"count": self._count(x.rows), "x": source, "stride": source.stride, "sums": sums}
        parts = min(-(-x.columns // 64), 4 * self._threads)
        self._in_parts("add_squares", x.rows, arguments | {"columns": x.columns}, parts, [source])

    def _give(self, x: Activation, rows: np.ndarray) -> None:
        """An activation to another target."""
        source = self._buffers[x]
        arguments = {"x": source, "x_stride": source.stride, "first": 0, "groups": 1, "period": x.columns}
        arguments |= {"y": rows, "stride": rows.strides[0], "columns": x.columns}
        self._by_row("columns", x.rows, arguments, [source], [Buffer(0, 0)])

    def _hand_out(self, x: Activation) -> None:
        """The logits to whoever wants them."""
        source, header = self._buffers[x], self.header
        arguments = {"count": self._count(x.rows), "x": source, "stride": source.stride, "columns": x.columns}
        arguments |= {"y": header.logits, "flaws": header.flaws}
        self._in_parts("logits", x.rows, arguments, 4 * self._threads, [source])


def places(cache: KVCache, side: Streams, header: Header) -> dict[str, Any]:
    """What kernels are told of where a run's tokens lie in a stream."""
    where = {"positions": header.positions, "owners": header.owners, "sequences": header.sequences}
    stream = {"base": cache.address(side), "head_stride": cache.head_stride(side)}
    return where | stream | {"token_bytes": side.token_bytes, "heads": side.heads}
