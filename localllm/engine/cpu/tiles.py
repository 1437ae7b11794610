"""Matrix products in BF16 tiles, on CPUs with AMX: the arguments that they need besides those of other products.

The other kernels are used for a few tokens, and their inputs are made for that many at most. Precision is the same:
both planes where a run asks for it, and for keys and values; one, with an error of 5.5e-6, for all others, but never
for weights in float32.
"""

from typing import Any

import numpy as np

from localllm.engine.cpu.target import CpuTarget
from localllm.engine.lower.steps import Steps
from localllm.engine.lower.tape import Address, Buffer
from localllm.engine.operations.activation import ALL, WANTED, Routed, Rows
from localllm.engine.operations.operation import ActivationForm
from localllm.frozen import frozen
from localllm.kernels.cpu import (
    CALL_BYTES,
    LEAST_IN_TILES,
    PANEL_BYTES,
    PANEL_TOKENS,
    SOME_IN_TILES,
    TILE_SLAB,
    TILES_SCRATCH,
)

UNPACK = {"linear_quantized": "unpack_groups", "linear_float": "unpack_rows"}


@frozen
class Panels:
    """Activations as panels of tokens, see localllm.kernels.cpu.amx.pack."""

    buffer: Buffer
    slab_bytes: int


def in_tiles(
    steps: Steps, kernel: str, format: str, panels: Panels, is_stored: bool
) -> tuple[str, dict[str, Any], Buffer]:
    """Return the tile kernel for another one, its further arguments, and the buffer that it reads."""
    kind, header = kernel.partition("-")[0], steps.header
    is_exact = needs_both_planes(format, is_stored)
    arguments: dict[str, Any] = {"few": Address(kernel), "unpack": Address(f"{UNPACK[kind]}-{format}")}
    arguments |= {"panels": panels.buffer, "slab_bytes": panels.slab_bytes, "least": LEAST_IN_TILES[format]}
    arguments["most_exact"] = header.most_precise_stored if is_exact else header.most_precise
    return kind.replace("linear", "linear_tiles"), arguments, panels.buffer


def needs_both_planes(format: str, is_stored: bool) -> bool:
    """Tell whether a product always uses both planes of panels."""
    return is_stored or format == "F32"


def tile_scratch() -> int:
    """Return the bytes that a thread needs for products in tiles."""
    return CALL_BYTES + TILES_SCRATCH


def pack(steps: Steps, operation: ActivationForm, target: CpuTarget) -> None:
    """Append the conversion of x to panels of tokens."""
    (x,) = operation.inputs
    source, rows, header = steps.buffers[x], x.rows, steps.header
    slabs, panels = -(-x.columns // TILE_SLAB), -(-steps.max_rows(rows) // PANEL_TOKENS)
    arguments: dict[str, Any] = {"active": 0, "active_count": 0}
    reads, tokens = [source], rows
    if isinstance(rows, Routed):  # each expert begins with a panel of its own
        experts, tokens = steps.experts[rows], rows.of
        arguments = {"active": experts.active, "active_count": experts.active_count}
        panels += experts.active.rows
        reads.append(experts.active)
    y = Buffer(slabs * panels, PANEL_BYTES)
    arguments |= {"count": steps.counts[tokens], "x": source, "stride": source.stride, "columns": x.columns}
    arguments |= {"panels": y, "slab_bytes": panels * PANEL_BYTES, "least": SOME_IN_TILES}
    arguments["most_exact"] = header.most_precise_stored if operation.exact else header.most_precise
    parts, limit = target.share(steps.max_rows(rows), steps.counts[rows])
    steps.append("pack", arguments | target.scratch(TILES_SCRATCH), parts, reads, [y], limit)
    steps.forms[operation.output] = Panels(y, panels * PANEL_BYTES)


def few_count(steps: Steps, rows: Rows) -> np.ndarray:
    """Return where the number of rows is, if they are too few for tiles, else 0; experts may have few of many."""
    if isinstance(rows, Routed):
        return steps.counts[rows]
    place = {ALL: 0, WANTED: 1}[rows]
    return steps.header.few_counts[place : place + 1]
