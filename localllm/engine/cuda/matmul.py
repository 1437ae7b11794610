"""Matrix products on a GPU: with packed weights for a few tokens, on tensor cores for many."""

from typing import NamedTuple

from localllm.arch.weights import Weight
from localllm.engine.cuda.target import CudaTarget
from localllm.engine.cuda.weights import CardWeights
from localllm.engine.lower.steps import Steps
from localllm.engine.lower.tape import Buffer
from localllm.engine.operations.activation import Activation
from localllm.engine.operations.experts import ExpertLinear, Route
from localllm.engine.operations.linear import Linear
from localllm.engine.operations.operation import ActivationForm, Product
from localllm.errors import UnsupportedError
from localllm.kernels.cuda import MOST_EXPERTS, at_a_time
from localllm.kernels.cuda.matmul.planes import PLAIN

FEW_TOKENS = 8  # most tokens that are multiplied with packed weights
UNPACKED = 64 << 20  # bytes of a matrix that are unpacked at a time
DENSE: dict[str, object] = {
    "active": 0,
    "active_count": 0,
    "expert_bytes": 0,
    "experts": 1,
}  # a matrix outside mixtures


class BufferSlice(NamedTuple):
    """The rest of a buffer from an offset on."""

    buffer: Buffer
    offset: int  # bytes


class Planes(NamedTuple):
    """Activations as integer codes of 2 bytes, with a scale per 32 and a sum per 16 of them."""

    codes: Buffer
    scales: Buffer
    sums: Buffer


class Halved(NamedTuple):
    """Activations in float16, with a float32 scale per row."""

    halves: Buffer
    scales: Buffer


class SplitBF16(NamedTuple):
    """Activations as sums of two BF16 numbers."""

    high: Buffer
    low: Buffer


class Factor(NamedTuple):
    """A matrix of a tensor core product: its buffer or address, and the numbers from row to row."""

    place: Buffer | int
    stride: int


def form_of(operation: Product, rows: int) -> str | None:
    """Return the verb that converts a product's input from float32; None without one; rows: most rows of the input."""
    kind = CardWeights.format(operation.weight)
    if isinstance(operation, ExpertLinear) or rows <= FEW_TOKENS:
        return None if kind in PLAIN else "quantize_planes"
    return {"F32": None, "BF16": "split_bf16"}.get(kind, "halve")


def linear(steps: Steps, operation: Linear, target: CudaTarget) -> None:
    """Append the steps that multiply with one matrix."""
    bias = operation.bias
    steps.new(operation.output)
    if steps.max_rows(operation.inputs[0].rows) <= FEW_TOKENS:
        multiply_few(steps, operation, target, DENSE, [])
    else:
        multiply_many(steps, operation, target)
    if bias is not None:
        steps.add_vector(operation.output, bias)


def expert_linear(steps: Steps, operation: ExpertLinear, target: CudaTarget) -> None:
    """Append the steps that multiply each expert's rows with its matrix, some rows at a time."""
    weight, experts = operation.weight, steps.experts[operation.choice.routed]
    steps.new(operation.output)
    of_experts: dict[str, object] = {
        "active": experts.active,
        "active_count": experts.active_count,
        "experts": weight.shape[0],
    }
    of_experts["expert_bytes"] = weight.shape[1] * CardWeights.row_bytes(weight)
    multiply_few(steps, operation, target, of_experts, [experts.active])
    operation.add_bias(steps)


def route(steps: Steps, operation: Route, target: CudaTarget) -> None:
    """Append the steps of routing. Raises UnsupportedError for more than MOST_EXPERTS experts."""
    experts = operation.routing.experts
    if experts > MOST_EXPERTS:
        raise UnsupportedError(f"{experts} experts are too many for a GPU; the limit is {MOST_EXPERTS}")
    operation.lower(steps, target)


def multiply_few(
    steps: Steps, operation: Product, target: CudaTarget, of_experts: dict[str, object], reads: list[Buffer]
) -> None:
    """Append the step that multiplies with packed weights."""
    x, weight, y = operation.inputs[0], operation.weight, steps.buffers[operation.output]
    kind, most_rows = CardWeights.format(weight), steps.max_rows(x.rows)
    kernel = f"{at_a_time(min(most_rows, target.tokens))}-{kind}"  # no expert has more rows than there are tokens
    arguments = {"count": steps.counts[x.rows], "weights": target.matrix(weight), "rows": weight.shape[-2]}
    arguments |= {"row_bytes": CardWeights.row_bytes(weight), "columns": x.columns, "y": y, "y_stride": y.stride}
    if kind in PLAIN:
        source = steps.buffers[x]
        arguments |= {"x": source, "x_stride": source.stride}
        steps.append(f"linear_plain-{kernel}", arguments | of_experts, most_rows, [source, *reads], [y])
    else:
        integers = steps.form_of(operation, Planes)
        arguments |= integers._asdict()
        steps.append(f"linear_planes-{kernel}", arguments | of_experts, most_rows, [*integers, *reads], [y])


def multiply_many(steps: Steps, operation: Product, target: CudaTarget) -> None:
    """Append the steps that multiply on tensor cores."""
    x, weight, y = operation.inputs[0], operation.weight, steps.buffers[operation.output]
    kind, width, rows = CardWeights.format(weight), CardWeights.row_bytes(weight), weight.shape[0]
    if kind == "F32":
        matrix, source = Factor(target.matrix(weight), width // 4), steps.buffers[x]
        multiply(steps, "f32", matrix, Factor(source, source.stride // 4), x, y, rows)
    elif kind == "BF16":
        high, low = steps.form_of(operation, SplitBF16)
        for part in (high, low):
            matrix = Factor(target.matrix(weight), width // 2)
            multiply(steps, "bf16", matrix, Factor(part, part.stride // 2), x, y, rows, adds=part is low)
    else:
        multiply_halves(steps, operation, target, kind)


def multiply_halves(steps: Steps, operation: Product, target: CudaTarget, kind: str) -> None:
    """Append the steps that multiply in float16; weights are unpacked some rows at a time."""
    x, weight, y = operation.inputs[0], operation.weight, steps.buffers[operation.output]
    halves, scales = steps.form_of(operation, Halved)
    rows, columns = weight.shape
    step = rows if kind == "F16" else max(UNPACKED // (2 * columns), 1)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        if kind == "F16":
            matrix = Factor(target.matrix(weight), CardWeights.row_bytes(weight) // 2)
        else:
            matrix = Factor(append_unpacking(steps, weight, target, first, count), columns)
        target_rows = BufferSlice(y, 4 * first)
        multiply(steps, "f16", matrix, Factor(halves, halves.stride // 2), x, target_rows, count)
    arguments = {"y": y, "stride": y.stride, "columns": rows, "scales": scales}
    steps.row_step("scale_rows", x.rows, arguments, [y, scales], [y])


def append_unpacking(steps: Steps, weight: Weight, target: CudaTarget, first: int, count: int) -> Buffer:
    """Append the step that unpacks some rows of a matrix to float16; return their buffer."""
    columns, (kind, row_bytes) = weight.shape[-1], target.layout_of(weight)
    y = Buffer(count, 2 * columns)
    arguments = {"weights": target.matrix(weight), "row_bytes": row_bytes, "columns": columns}
    steps.append(f"unpack-{kind}", arguments | {"first": first, "rows": count, "y": y}, count, [], [y])
    return y


def multiply(
    steps: Steps, kind: str, matrix: Factor, source: Factor, x: Activation, y: Buffer | BufferSlice, rows: int,
    adds: bool = False,
) -> None:  # fmt: skip
    """Append the step that computes y = source matrix^T, or y += source matrix^T if `adds`.

    y: a buffer, or its columns from an offset on.
    """
    place = y if isinstance(y, BufferSlice) else BufferSlice(y, 0)
    arguments: dict[str, object] = {"kind": kind, "a": matrix.place, "b": source.place, "c": place, "m": rows}
    arguments |= {"n": steps.max_rows(x.rows), "k": x.columns, "a_stride": matrix.stride, "b_stride": source.stride}
    arguments |= {"c_stride": place.buffer.stride // 4, "adds": adds}
    reads = [factor.place for factor in (source, matrix) if isinstance(factor.place, Buffer)]
    steps.append("product", arguments, 0, reads, [place.buffer])


# ---- forms of activations ----


def quantize_planes(steps: Steps, operation: ActivationForm, target: CudaTarget) -> None:
    """Append the step that converts x to codes, scales and sums."""
    (x,) = operation.inputs
    most_rows, source = steps.max_rows(x.rows), steps.buffers[x]
    sizes = 2 * x.columns, x.columns // 32 * 4, x.columns // 16 * 4  # bytes per token
    integers = Planes(*(Buffer(most_rows, size) for size in sizes))
    arguments = {"x": source, "stride": source.stride, "columns": x.columns} | integers._asdict()
    steps.row_step("quantize_planes", x.rows, arguments, [source], [*integers])
    steps.forms[operation.output] = integers


def halve(steps: Steps, operation: ActivationForm, target: CudaTarget) -> None:
    """Append the step that converts x to float16 with a scale per row."""
    (x,) = operation.inputs
    most_rows, source = steps.max_rows(x.rows), steps.buffers[x]
    y, scales = steps.forms[operation.output] = Halved(Buffer(most_rows, source.stride // 2), Buffer(most_rows, 4))
    arguments = {"x": source, "stride": source.stride, "columns": x.columns, "y": y}
    arguments |= {"y_stride": y.stride, "scales": scales}
    steps.row_step("halve", x.rows, arguments, [source], [y, scales])


def split_bf16(steps: Steps, operation: ActivationForm, target: CudaTarget) -> None:
    """Append the step that converts x to the sum of two BF16 numbers."""
    (x,) = operation.inputs
    most_rows, source = steps.max_rows(x.rows), steps.buffers[x]
    high, low = steps.forms[operation.output] = SplitBF16(*(Buffer(most_rows, source.stride // 2) for _ in range(2)))
    arguments = {"x": source, "stride": source.stride, "columns": x.columns}
    arguments |= {"high": high, "low": low, "y_stride": high.stride}
    steps.row_step("split_bf16", x.rows, arguments, [source], [high, low])
