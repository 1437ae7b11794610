"""Matrix products and attention in BF16 tiles, on CPUs with AMX: what the target CPU does in another way there.

The kernels of other CPUs stay for a few tokens, and what they take is made for so many at most. Precision is what it is
elsewhere: both planes where a run asks for it, and for keys and values; one, with an error of 5.5e-6, for all others,
but never for weights in float32.
"""

from typing import Any, ClassVar

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.cache import KVCache
from localllm.engine.cpu import Address, CpuLowering, Quantized
from localllm.engine.lowering import Crossing
from localllm.engine.program import Header
from localllm.engine.recorder import ALL, WANTED, Activation, Operation, Routed, Rows
from localllm.engine.recurrent import Layout
from localllm.engine.tape import Buffer
from localllm.kernels.cpu import (
    ATTEND_TILES,
    CALL_BYTES,
    LEAST_IN_TILES,
    PANEL_BYTES,
    PANEL_TOKENS,
    SOME_IN_TILES,
    TILE_SLAB,
    TILES_SCRATCH,
)

UNPACK = {"linear_quantized": "unpack_groups", "linear_float": "unpack_rows"}


class TileLowering(CpuLowering):
    """What tiles do."""

    halves: ClassVar[dict[str, tuple[str, int, int]]] = {}  # for the other kernels
    attention = "attend_tiles", ATTEND_TILES

    def __init__(
        self, operations: list[Operation], cache: KVCache, layout: Layout | None, threads: int, header: Header,
        given: Crossing | None = None,
    ):  # fmt: skip
        self._packed: dict[Activation, dict[str, Any]] = {}
        super().__init__(operations, cache, layout, threads, header, given)

    def _product(
        self, output: Activation, x: Activation, weight: Weight, is_stored: bool = False
    ) -> tuple[str, dict[str, Any], list[Buffer], Buffer]:
        kernel, arguments, reads, y = super()._product(output, x, weight, is_stored)
        kind, format = kernel.partition("-")[0], weight.tensor.format.name
        packed = self._pack(x)
        most_exact = self.header.most_precise
        if is_stored or format == "F32":
            most_exact = packed["most_exact"] = self.header.most_precise_stored
        arguments |= {"few": Address(kernel), "unpack": Address(f"{UNPACK[kind]}-{format}")}
        arguments |= {name: packed[name] for name in ("panels", "slab_bytes")}
        arguments |= {"most_exact": most_exact, "least": LEAST_IN_TILES[format]}
        arguments |= self._scratch_for(CALL_BYTES + TILES_SCRATCH)
        return kind.replace("linear", "linear_tiles"), arguments, [*reads, packed["panels"]], y

    def _most_in_rows(self, format: str) -> int:
        return LEAST_IN_TILES[format] - 1

    def _pack(self, x: Activation) -> dict[str, Any]:
        """x as panels of tokens, made once for all the matrices that it meets: the arguments of that step."""
        if x not in self._packed:
            source, rows = self._buffers[x], x.rows
            slabs, panels = -(-x.columns // TILE_SLAB), -(-self._most(rows) // PANEL_TOKENS)
            arguments: dict[str, Any] = {"active": 0, "active_count": 0}
            reads, tokens = [source], rows
            if isinstance(rows, Routed):  # experts begin with panels of their own
                experts, tokens = self._experts[rows], rows.of
                arguments, panels = (
                    {"active": experts.active, "active_count": experts.active_count},
                    panels + experts.active.rows,
                )
                reads.append(experts.active)
            y = Buffer(slabs * panels, PANEL_BYTES)
            arguments |= {"count": self._count(tokens), "x": source, "stride": source.stride, "columns": x.columns}
            arguments |= {"panels": y, "slab_bytes": panels * PANEL_BYTES, "least": SOME_IN_TILES}
            arguments |= {"most_exact": self.header.most_precise} | self._scratch_for(TILES_SCRATCH)
            self._by_row("pack", rows, arguments, reads, [y])
            self._packed[x] = self.tape.steps[-1].arguments
        return self._packed[x]

    def _as_integers(self, x: Activation) -> Quantized:
        """As elsewhere, for a few tokens; experts may have few of many."""
        is_new, quantized = x not in self._quantized, super()._as_integers(x)
        if is_new and not isinstance(x.rows, Routed):
            self.tape.steps[-1].arguments["count"] = self._few_count(x.rows)
        return quantized

    def _few_count(self, rows: Rows) -> np.ndarray:
        """Where the number of rows is if they are too few for tiles, and else 0."""
        place = {ALL: 0, WANTED: 1}[rows]
        return self.header.few_counts[place : place + 1]
