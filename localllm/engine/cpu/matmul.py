"""Matrix products on the CPU: with integer activations, with float32 ones, and per expert.

On CPUs with AMX, products of many tokens run in BF16 tiles, which need further arguments; the other kernels serve a few
tokens, and their input buffers hold no more. In tiles, activations are one BF16 plane, with an error of 5.5e-6, or two
(precise runs, keys and values, float32 weights).
"""

from collections.abc import Sequence

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.cpu.target import CpuTarget
from localllm.engine.lower.steps import Steps
from localllm.engine.lower.tape import Address, Buffer, row_bytes
from localllm.engine.operations.activation import ALL, WANTED, Activation, Routed, Rows
from localllm.engine.operations.experts import ExpertLinear
from localllm.engine.operations.linear import Linear
from localllm.engine.operations.operation import ActivationForm, Operation, Product
from localllm.engine.run import PRECISE_TOKENS
from localllm.frozen import frozen
from localllm.kernels.cpu import (
    CALL_BYTES,
    FLOAT_SCRATCH,
    HALVES,
    LEAST_IN_TILES,
    PANEL_BYTES,
    PANEL_TOKENS,
    SOME_IN_TILES,
    SUB_BLOCK,
    TILE_SLAB,
    TILES_SCRATCH,
    linear_scratch,
)
from localllm.kernels.formats import supports_int8
from localllm.kernels.machine import this_lane
from localllm.kernels.table import LINEAR_FLOAT, LINEAR_QUANTIZED, LINEAR_TILES_FLOAT, LINEAR_TILES_QUANTIZED

# Bytes of weights in a part. A part costs a thread about a microsecond: to claim it, and to wait for its first weights,
# which were not prefetched. Threads with equally many parts finish together. Matrices of 0.2 to 0.6 MB (SmolLM2, 2
# threads) took 1.02 to 1.08 times as long in parts of 64 KB, whatever their number.
PART_BYTES, LEAST_BYTES = 1 << 17, 1 << 15
SLICE_BYTES = 1 << 16  # the same for experts
# Arguments of a matrix product that are addresses of rows, which an expert's call moves to its first row.
BY_ROW = {
    "linear_quantized": ("high", "low", "words", "scales", "sums", "high_sums", "excess", "y"),
    "linear_float": ("x", "halves", "y"),
}
LINEAR = {"linear_quantized": LINEAR_QUANTIZED, "linear_float": LINEAR_FLOAT}
# Products in tiles advance alike; their panels are located separately.
BY_ROW |= {name.replace("linear", "linear_tiles"): places for name, places in BY_ROW.items()}
LINEAR |= {"linear_tiles_quantized": LINEAR_TILES_QUANTIZED, "linear_tiles_float": LINEAR_TILES_FLOAT}


@frozen
class Quantized:
    """Integer activations, see localllm.kernels.cpu.matmul.quantize."""

    high: Buffer
    low: Buffer
    words: Buffer | None  # 16-bit codes, on CPUs with AVX2 only
    scales: Buffer
    sums: dict[int, Buffer]  # by sub-block: 32 and 16
    high_sums: dict[int, Buffer]
    excess: Buffer

    @property
    def buffers(self) -> list[Buffer]:
        words = [] if self.words is None else [self.words]
        return [self.high, self.low, *words, self.scales, *self.sums.values(), *self.high_sums.values(), self.excess]


@frozen
class Call:
    """A kernel call: its arguments, the buffers that it reads, its output y, and its scratch bytes per thread."""

    kernel: str
    arguments: dict[str, object]
    reads: list[Buffer]
    y: Buffer
    scratch: int


def has_integers(weight: Weight) -> bool:
    """Return whether a matrix is multiplied with integer activations."""
    return supports_int8(weight.tensor.format.name, weight.shape[-1])


def rounds_activations(operations: Sequence[Operation]) -> bool:
    """Return whether some matrices are multiplied with 8-bit activations in long runs."""
    return any(isinstance(operation, Product) and has_integers(operation.weight) for operation in operations)


def halves_of(weight: Weight) -> str | None:
    """Return the verb that converts activations to the 16-bit format of a float matrix; None without one."""
    kind = HALVES.get(weight.tensor.format.name)
    return None if kind is None or has_integers(weight) or weight.shape[-1] % kind.multiple else kind.kernel


def linear(steps: Steps, operation: Linear, target: CpuTarget) -> None:
    """Append the product with one matrix."""
    weight, bias = operation.weight, operation.bias
    product = product_of(steps, operation, target)
    parts = parts_of(weight.tensor.nbytes, target.threads)
    arguments = product.arguments | target.scratch(product.scratch)
    steps.append(product.kernel, arguments, parts, product.reads, [product.y])
    if bias is not None:
        steps.add_vector(operation.output, bias)


def parts_of(nbytes: int, threads: int) -> int:
    """Return how many parts a matrix of `nbytes` is divided into: if it is large enough, equally many per thread."""
    if nbytes < LEAST_BYTES * threads:
        return max(nbytes // LEAST_BYTES, 1)
    return min(-(-nbytes // (PART_BYTES * threads)), 8) * threads


def expert_linear(steps: Steps, operation: ExpertLinear, target: CpuTarget) -> None:
    """Append the product with each expert's matrix, by the kernel for one matrix."""
    choice, weight = operation.choice, operation.weight
    experts, data, columns = steps.experts[choice.routed], weight.tensor.data, operation.inputs[0].columns
    product = product_of(steps, operation, target)
    arguments, name = product.arguments, product.kernel.partition("-")[0]
    buffers = {at: buffer for at in BY_ROW[name] if isinstance(buffer := arguments[at], Buffer)}
    strides = [(getattr(LINEAR[name], at), buffer.stride) for at, buffer in buffers.items()]
    of_one = linear_scratch(columns) if name.endswith("quantized") else float_scratch(columns)
    # A dense matrix of that size gets this number of slices, too: prefetched weights are lost at the end of a part.
    slices = min(max(data[0].nbytes // SLICE_BYTES, 1), max(8 * target.threads // choice.columns, 1))
    arguments |= {"linear": Address(product.kernel), "by_row": np.array(strides, np.int64)}
    arguments |= {"by_row_count": len(strides), "slices": slices}
    arguments |= {"active": experts.active, "active_count": experts.active_count, "expert_bytes": data.strides[0]}
    arguments |= target.scratch(max(product.scratch, CALL_BYTES + of_one))
    reads = [*product.reads, experts.active]
    steps.append(name.replace("linear", "experts"), arguments, 16 * target.threads, reads, [product.y])
    operation.add_bias(steps)


def product_of(steps: Steps, operation: Product, target: CpuTarget) -> Call:
    """Return the kernel call of a matrix product; the caller adds the scratch memory to its arguments."""
    x, weight, is_stored = operation.inputs[0], operation.weight, operation.is_stored
    y, format = steps.new(operation.output), weight.tensor.format
    arguments = {"count": steps.counts[x.rows], "weights": target.matrix(weight), "columns": x.columns}
    arguments |= {"row_bytes": format.row_bytes(x.columns), "rows": operation.output.columns}
    arguments |= {"y": y, "y_stride": y.stride, "kernel_tokens": kernel_tokens(steps, x.rows)}
    if has_integers(weight):
        quantized = steps.form_of(operation, Quantized)
        arguments |= with_integers(steps, x, format.name, quantized, is_stored)
        # the most kernel_tokens for which products are computed in rows
        most_tokens = LEAST_IN_TILES[format.name] - 1 if target.in_tiles else target.tokens
        arguments |= target.variants.arguments(format.name, x.columns, x.rows, most_tokens, is_stored)
        product = Call("linear_quantized", arguments, quantized.buffers, y, linear_scratch(x.columns))
    else:
        forms = (steps.forms.get(x) for x in operation.inputs if not target.in_tiles)
        halves = next((form for form in forms if isinstance(form, Buffer)), None)
        arguments |= with_floats(steps, x, halves, is_stored and target.keeps)
        reads = [steps.buffers[x], halves] if halves else [steps.buffers[x]]
        product = Call(f"linear_float-{format.name}", arguments, reads, y, float_scratch(x.columns))
    if not target.in_tiles:
        return product
    kernel, tile_arguments, panels = in_tiles(
        steps, product.kernel, format.name, steps.form_of(operation, Panels), is_stored
    )
    scratch = max(product.scratch, CALL_BYTES + TILES_SCRATCH)
    return Call(kernel, arguments | tile_arguments, [*product.reads, panels], y, scratch)


def with_integers(steps: Steps, x: Activation, format: str, q: Quantized, is_stored: bool) -> dict[str, object]:
    """Return the further arguments of a product of quantized weights with integer activations."""
    sub_block, header = SUB_BLOCK[format], steps.header
    arguments: dict[str, object] = {"high": q.high, "low": q.low, "words": q.words or 0}
    arguments |= {"scales": q.scales, "excess": q.excess}
    arguments |= {"sums": q.sums[sub_block], "high_sums": q.high_sums[sub_block]}
    return arguments | {"most_precise": header.most_precise_stored if is_stored else header.most_precise}


def with_floats(steps: Steps, x: Activation, halves: Buffer | None, is_stored: bool) -> dict[str, object]:
    """Return the further arguments of a product of float weights; halves: x in 16 bits, for many tokens."""
    source = steps.buffers[x]
    arguments = {"x": source, "x_stride": source.stride, "halves": halves or 0}
    arguments["halves_stride"] = halves.stride if halves else 0
    return arguments | {"most_precise": steps.target.tokens if is_stored else PRECISE_TOKENS}


def float_scratch(columns: int) -> int:
    """Return the scratch bytes of a thread for products of float weights."""
    return max(FLOAT_SCRATCH, 4 * columns)


def quantize(steps: Steps, operation: ActivationForm, target: CpuTarget) -> None:
    """Append the conversion of x to integers; on CPUs with tiles only if there are few tokens."""
    (x,) = operation.inputs
    source, scale = steps.buffers[x], x.columns // 16 * 4  # bytes per token
    sizes = (x.columns, x.columns, scale, scale, scale, scale, scale, scale // 2)
    high, low, scales, *sums, excess = (Buffer(steps.max_rows(x.rows), size) for size in sizes)
    words = Buffer(steps.max_rows(x.rows), 2 * x.columns) if this_lane().has_avx2_only else None
    q = Quantized(high, low, words, scales, {32: sums[0], 16: sums[1]}, {32: sums[2], 16: sums[3]}, excess)
    arguments = {"x": source, "stride": source.stride, "columns": x.columns, "high": high, "low": low}
    arguments |= {
        "words": words or 0,
        "scales": scales,
        "sums_32": sums[0],
        "sums_16": sums[1],
        "high_sums_32": sums[2],
    }
    arguments |= {"high_sums_16": sums[3], "excess": excess, "count": steps.counts[x.rows]}
    arguments |= {"most_precise": steps.header.most_precise, "kernel_tokens": kernel_tokens(steps, x.rows)}
    if target.in_tiles:
        arguments["count"] = few_count(steps, x.rows)
    parts, limit = target.share(steps.max_rows(x.rows), steps.counts[x.rows])
    steps.append("quantize", arguments, parts, [source], q.buffers, limit)
    steps.forms[operation.output] = q


def halves(steps: Steps, operation: ActivationForm, target: CpuTarget) -> None:
    """Append the conversion of x to 16 bits; the kernel is named like the verb."""
    (x,) = operation.inputs
    kind, source = next(kind for kind in HALVES.values() if kind.kernel == operation.verb), steps.buffers[x]
    y = Buffer(steps.max_rows(x.rows), row_bytes(-(-kind.bytes(x.columns) // 4)))
    arguments = {"x": source, "stride": source.stride, "y": y, "y_stride": y.stride, "columns": x.columns}
    steps.row_step(operation.verb, x.rows, arguments, [source], [y])
    steps.forms[operation.output] = y


UNPACK = {"linear_quantized": "unpack_groups", "linear_float": "unpack_rows"}


@frozen
class Panels:
    """Activations as panels of tokens, see localllm.kernels.cpu.amx.pack."""

    buffer: Buffer
    slab_bytes: int


def in_tiles(
    steps: Steps, kernel: str, format: str, panels: Panels, is_stored: bool
) -> tuple[str, dict[str, object], Buffer]:
    """Return the tile kernel that replaces `kernel`, its further arguments, and the panels that it reads."""
    kind, header = kernel.partition("-")[0], steps.header
    is_exact = needs_both_planes(format, is_stored)
    arguments: dict[str, object] = {"few": Address(kernel), "unpack": Address(f"{UNPACK[kind]}-{format}")}
    arguments |= {"panels": panels.buffer, "slab_bytes": panels.slab_bytes, "least": LEAST_IN_TILES[format]}
    arguments["most_exact"] = header.most_precise_stored if is_exact else header.most_precise
    return kind.replace("linear", "linear_tiles"), arguments, panels.buffer


def needs_both_planes(format: str, is_stored: bool) -> bool:
    """Return whether a product always uses both BF16 planes of its panels."""
    return is_stored or format == "F32"


def pack(steps: Steps, operation: ActivationForm, target: CpuTarget) -> None:
    """Append the conversion of x to BF16 panels of tokens."""
    (x,) = operation.inputs
    source, rows, header = steps.buffers[x], x.rows, steps.header
    slabs, panels = -(-x.columns // TILE_SLAB), -(-steps.max_rows(rows) // PANEL_TOKENS)
    arguments: dict[str, object] = {"active": 0, "active_count": 0}
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
    arguments["kernel_tokens"] = kernel_tokens(steps, rows)
    parts, limit = target.share(steps.max_rows(rows), steps.counts[rows])
    steps.append("pack", arguments | target.scratch(TILES_SCRATCH), parts, reads, [y], limit)
    steps.forms[operation.output] = Panels(y, panels * PANEL_BYTES)


def few_count(steps: Steps, rows: Rows) -> np.ndarray:
    """Return the number of rows, int64 [1]. Except for experts, it is 0 in runs whose products are in tiles."""
    return steps.counts[rows] if isinstance(rows, Routed) else of_rows(steps.header.few_counts, rows)


def kernel_tokens(steps: Steps, rows: Rows) -> np.ndarray:
    """Return the number of tokens that selects the kernels for some rows, int64 [1]; for experts that of the run."""
    return of_rows(steps.header.kernel_tokens, rows.of if isinstance(rows, Routed) else rows)


def of_rows(numbers: np.ndarray, rows: Rows) -> np.ndarray:
    """Return the number of two, int64 [2], that is for all tokens or for requested logits."""
    place = {ALL: 0, WANTED: 1}[rows]
    return numbers[place : place + 1]
