"""Lower operations for the GPU: its target, and the conversion of operations to GPU work.

A program is lowered for a maximum number of tokens, a power of two: grids are fixed, so that the whole program can be
recorded as one graph and replayed without Python between its kernels. For up to FEW_TOKENS, kernels multiply packed
weights, because memory bandwidth bounds decode; for more, weights are unpacked to float16 for tensor cores.

For one token, launching a kernel takes as long as the work of most steps, so steps are fused: a sum before a norm
becomes `add_rms_norm`, a norm of heads before RoPE `rms_norm_rope`, and the norm or activation function before a
quantization also quantizes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, SupportsInt

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.cuda.card import CublasProduct, KernelLaunch, Work
from localllm.engine.cuda.weights import GpuWeights
from localllm.engine.lower.activation import ALL, WANTED, Activation
from localllm.engine.lower.steps import StepBuilder, StepMemory
from localllm.engine.lower.tape import Buffer, KernelStep
from localllm.engine.operations.attention import Attend, AttentionArguments, get_bias_reach
from localllm.engine.operations.experts import ExpertLinear, Route
from localllm.engine.operations.key_selection import SelectKeys
from localllm.engine.operations.linear import Linear
from localllm.engine.operations.operation import (
    ActivationForm,
    Crossing,
    MatrixProduct,
    Operation,
    insert_activation_forms,
    lower_operations,
)
from localllm.errors import UnsupportedError
from localllm.frozen import frozen
from localllm.kernels.cuda import MAX_EXPERTS, MAX_SELECTION_BLOCKS, compute_grid, count_tokens_at_once, list_parameters
from localllm.kernels.cuda.matmul.planes import FLOAT_FORMATS


@frozen
class CudaTarget:
    """The GPU as a target of lowering, for at most `tokens` tokens and `wanted_rows` logits."""

    tokens: int
    wanted_rows: int
    weights: GpuWeights
    verbs: Mapping[str, Callable[..., None]]
    expert_rows: ClassVar[int] = 1
    threads: ClassVar[int] = 1

    @property
    def buffer_rows(self) -> int:
        return self.tokens

    @property
    def depth(self) -> int:
        """The depth of a tensor core product: 16, or 8 with compute capability 7.5."""
        return 16 if self.weights.capability >= (8, 0) else 8

    def matrix(self, weight: Weight) -> int:
        return self.weights.get_address(weight)

    def get_layout(self, weight: Weight) -> tuple[str, int]:
        return GpuWeights.get_format(weight), GpuWeights.row_bytes(weight)

    def build_scratch_arguments(self, size: int) -> dict[str, object]:
        """Return zeros, because CUDA kernels allocate their scratch memory themselves."""
        return {"scratch": 0, "scratch_bytes": 0}

    def divide_rows(self, rows: int, count: np.ndarray) -> tuple[int, np.ndarray | None]:
        """Return one part per row, because only the GPU knows the actual number of rows."""
        return rows, None

    def parts(self, wanted: int, rows: int) -> int:
        return rows


FEW_TOKENS = 8  # up to this many tokens are multiplied by packed weights
UNPACKED_BYTES = 64 << 20  # bytes of a matrix that are unpacked at a time
DENSE_ARGUMENTS: dict[str, object] = {
    "active": 0,
    "active_count": 0,
    "expert_bytes": 0,
    "experts": 1,
}  # arguments of a matrix that belongs to no mixture of experts


class BufferSlice(NamedTuple):
    """A buffer from an offset on."""

    buffer: Buffer
    offset: int  # bytes


class QuantizedPlanes(NamedTuple):
    """Activations as 2-byte integer codes, with a scale per 32 and a sum per 16 of them."""

    codes: Buffer
    scales: Buffer
    sums: Buffer


class HalfActivations(NamedTuple):
    """Activations as float16, with a float32 scale per row."""

    halves: Buffer
    scales: Buffer


class SplitBF16(NamedTuple):
    """Activations as sums of two BF16 values."""

    high: Buffer
    low: Buffer


class ProductFactor(NamedTuple):
    """A matrix of a tensor core product: its buffer or address, and its row stride in elements."""

    place: Buffer | int
    stride: int


def select_form(operation: MatrixProduct, rows: int) -> str | None:
    """Return the verb that converts a product's float32 input, or None.

    rows: maximum number of rows of the input.
    """
    kind = GpuWeights.get_format(operation.weight)
    if isinstance(operation, ExpertLinear) or rows <= FEW_TOKENS:
        return None if kind in FLOAT_FORMATS else "quantize_planes"
    return {"F32": None, "BF16": "split_bf16"}.get(kind, "halve")


def lower_linear(steps: StepBuilder, operation: Linear, target: CudaTarget) -> None:
    """Append the steps of a product with one matrix."""
    bias = operation.bias
    steps.allocate(operation.output)
    if steps.max_rows(operation.inputs[0].rows) <= FEW_TOKENS:
        append_packed_product(steps, operation, target, DENSE_ARGUMENTS, [])
    else:
        append_unpacked_product(steps, operation, target)
    if bias is not None:
        steps.add_vector(operation.output, bias)


def lower_expert_linear(steps: StepBuilder, operation: ExpertLinear, target: CudaTarget) -> None:
    """Append the steps that multiply each expert's rows by its matrix, some rows at a time."""
    weight, experts = operation.weight, steps.experts[operation.choice.routed]
    steps.allocate(operation.output)
    of_experts: dict[str, object] = {
        "active": experts.active,
        "active_count": experts.active_count,
        "experts": weight.shape[0],
    }
    of_experts["expert_bytes"] = weight.shape[1] * GpuWeights.row_bytes(weight)
    append_packed_product(steps, operation, target, of_experts, [experts.active])
    operation.add_bias(steps)


def lower_route(steps: StepBuilder, operation: Route, target: CudaTarget) -> None:
    """Append the steps of routing. Raises UnsupportedError for more than MAX_EXPERTS experts."""
    experts = operation.routing.experts
    if experts > MAX_EXPERTS:
        raise UnsupportedError(f"a GPU supports at most {MAX_EXPERTS} experts (found {experts}): use --device cpu")
    operation.lower(steps, target)


def append_packed_product(
    steps: StepBuilder, operation: MatrixProduct, target: CudaTarget, of_experts: dict[str, object], reads: list[Buffer]
) -> None:
    """Append the step that multiplies by packed weights."""
    x, weight, y = operation.inputs[0], operation.weight, steps.buffers[operation.output]
    kind, most_rows = GpuWeights.get_format(weight), steps.max_rows(x.rows)
    kernel = (
        f"{count_tokens_at_once(min(most_rows, target.tokens))}-{kind}"  # no expert has more rows than there are tokens
    )
    arguments = {"count": steps.counts[x.rows], "weights": target.matrix(weight), "rows": weight.shape[-2]}
    arguments |= {"row_bytes": GpuWeights.row_bytes(weight), "columns": x.columns, "y": y, "y_stride": y.stride}
    if kind in FLOAT_FORMATS:
        source = steps.buffers[x]
        arguments |= {"x": source, "x_stride": source.stride}
        steps.append(f"linear_plain-{kernel}", arguments | of_experts, most_rows, [source, *reads], [y])
    else:
        integers = steps.find_form(operation, QuantizedPlanes)
        arguments |= integers._asdict()
        steps.append(f"linear_planes-{kernel}", arguments | of_experts, most_rows, [*integers, *reads], [y])


def append_unpacked_product(steps: StepBuilder, operation: MatrixProduct, target: CudaTarget) -> None:
    x, weight, y = operation.inputs[0], operation.weight, steps.buffers[operation.output]
    kind, width, rows = GpuWeights.get_format(weight), GpuWeights.row_bytes(weight), weight.shape[0]
    if kind == "F32":
        matrix, source = ProductFactor(target.matrix(weight), width // 4), steps.buffers[x]
        append_product(steps, "f32", matrix, ProductFactor(source, source.stride // 4), x, y, rows)
    elif kind == "BF16":
        high, low = steps.find_form(operation, SplitBF16)
        for part in (high, low):
            matrix = ProductFactor(target.matrix(weight), width // 2)
            append_product(steps, "bf16", matrix, ProductFactor(part, part.stride // 2), x, y, rows, adds=part is low)
    else:
        append_half_product(steps, operation, target, kind)


def append_half_product(steps: StepBuilder, operation: MatrixProduct, target: CudaTarget, kind: str) -> None:
    """Append the steps that multiply in float16, unpacking some rows of the weights at a time."""
    x, weight, y = operation.inputs[0], operation.weight, steps.buffers[operation.output]
    halves, scales = steps.find_form(operation, HalfActivations)
    rows, columns = weight.shape
    step = rows if kind == "F16" else max(UNPACKED_BYTES // (2 * columns), 1)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        if kind == "F16":
            matrix = ProductFactor(target.matrix(weight), GpuWeights.row_bytes(weight) // 2)
        else:
            matrix = ProductFactor(append_unpacking(steps, weight, target, first, count), columns)
        target_rows = BufferSlice(y, 4 * first)
        append_product(steps, "f16", matrix, ProductFactor(halves, halves.stride // 2), x, target_rows, count)
    arguments = {"y": y, "stride": y.stride, "columns": rows, "scales": scales}
    steps.append_row_step("scale_rows", x.rows, arguments, [y, scales], [y])


def append_unpacking(steps: StepBuilder, weight: Weight, target: CudaTarget, first: int, count: int) -> Buffer:
    """Append the step that unpacks some rows of a matrix to float16, and return their buffer."""
    columns, (kind, row_bytes) = weight.shape[-1], target.get_layout(weight)
    y = Buffer(count, 2 * columns)
    arguments = {"weights": target.matrix(weight), "row_bytes": row_bytes, "columns": columns}
    steps.append(f"unpack-{kind}", arguments | {"first": first, "rows": count, "y": y}, count, [], [y])
    return y


def append_product(
    steps: StepBuilder, kind: str, matrix: ProductFactor, source: ProductFactor, x: Activation,
    y: Buffer | BufferSlice, rows: int,
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


# ---- conversions of activations


def lower_quantize_planes(steps: StepBuilder, operation: ActivationForm, target: CudaTarget) -> None:
    """Append the step that converts x to codes, scales and sums."""
    (x,) = operation.inputs
    most_rows, source = steps.max_rows(x.rows), steps.buffers[x]
    sizes = 2 * x.columns, x.columns // 32 * 4, x.columns // 16 * 4  # bytes per token
    integers = QuantizedPlanes(*(Buffer(most_rows, size) for size in sizes))
    arguments = {"x": source, "stride": source.stride, "columns": x.columns} | integers._asdict()
    steps.append_row_step("quantize_planes", x.rows, arguments, [source], [*integers])
    steps.forms[operation.output] = integers


def lower_halve(steps: StepBuilder, operation: ActivationForm, target: CudaTarget) -> None:
    """Append the step that converts x to float16 with a scale per row."""
    (x,) = operation.inputs
    most_rows, source = steps.max_rows(x.rows), steps.buffers[x]
    y, scales = steps.forms[operation.output] = HalfActivations(
        Buffer(most_rows, source.stride // 2), Buffer(most_rows, 4)
    )
    arguments = {"x": source, "stride": source.stride, "columns": x.columns, "y": y}
    arguments |= {"y_stride": y.stride, "scales": scales}
    steps.append_row_step("halve", x.rows, arguments, [source], [y, scales])


def lower_split_bf16(steps: StepBuilder, operation: ActivationForm, target: CudaTarget) -> None:
    """Append the step that converts x to sums of two BF16 values."""
    (x,) = operation.inputs
    most_rows, source = steps.max_rows(x.rows), steps.buffers[x]
    high, low = steps.forms[operation.output] = SplitBF16(*(Buffer(most_rows, source.stride // 2) for _ in range(2)))
    arguments = {"x": source, "stride": source.stride, "columns": x.columns}
    arguments |= {"high": high, "low": low, "y_stride": high.stride}
    steps.append_row_step("split_bf16", x.rows, arguments, [source], [high, low])


BLOCKS = 264  # blocks that fill a GPU of 132 multiprocessors, two each
MAX_DECODE_TOKENS = 8  # up to this many tokens, each one's context is divided as if it were alone, for the same bits
FEW_IN_FLOAT32 = 16  # runs of at most this many tokens do not use tensor cores
MAX_HEAD_DIM = 256  # largest head on tensor cores; larger ones need too many registers
LANES, VALUES_PER_LANE = 32, 8  # maximum lanes that share a head, and elements that each lane loads at once
MAX_HEADS, MAX_REGISTER_VALUES = 8, 128  # maximum query heads of a bundle, and query and result values in registers


@frozen
class FewTokenAttention:
    """The division of attend_few's work (localllm.kernels.cuda.attention) for heads of these dimensions."""

    key_dim: int
    value_dim: int
    group: int  # query heads that share a key-value head

    @property
    def bundle(self) -> int:
        """The number of query heads that a block computes together.

        Bundles are equal shares of the group that fit the registers.
        """
        numbers = VALUES_PER_LANE * sum(-(-dim // (VALUES_PER_LANE * LANES)) for dim in (self.key_dim, self.value_dim))
        most_heads = min(max(MAX_REGISTER_VALUES // numbers, 1), MAX_HEADS)
        return -(-self.group // -(-self.group // most_heads))

    @property
    def bundles(self) -> int:
        return -(-self.group // self.bundle)

    @property
    def partial_bytes(self) -> int:
        return 4 * (4 + -(-self.value_dim // 8) * 8)

    def parts(self, tokens: int, kv_heads: int) -> int:
        """Return the maximum number of parts that a context is divided into."""
        return -(-BLOCKS // (kv_heads * self.bundles * (tokens if tokens > MAX_DECODE_TOKENS else 1)))


def lower_attend(steps: StepBuilder, operation: Attend, target: CudaTarget) -> None:
    """Append the steps of attention: in float32 for few tokens, on tensor cores for many."""
    attention = operation.prepare(steps)
    if operation.cross_attention or get_bias_reach(operation.biases):
        raise UnsupportedError("encoder models run on the CPU only: use --device cpu")
    for name in ("cross_attention", "reach", "biases"):
        del attention.arguments[name]
    attention.arguments["sequences"] = steps.header.sequences
    needs_few = any(attention.arguments[name] for name in ("chosen", "logs")) or attention.state.period > 1
    append = append_attend_few if needs_few or uses_float32_attention(attention, target) else append_attend_many
    append(steps, attention, target)
    operation.finish(steps, attention)


def uses_float32_attention(attention: AttentionArguments, target: CudaTarget) -> bool:
    """Return whether attention uses float32 and not tensor cores.

    That is so for few tokens, a float32 cache, and very long heads.
    """
    state, is_exact = attention.state, any(side.kind == "f32" for side in attention.sides)
    return target.tokens <= FEW_IN_FLOAT32 or is_exact or max(state.key_dim, state.value_dim) > MAX_HEAD_DIM


def append_attend_few(steps: StepBuilder, attention: AttentionArguments, target: CudaTarget) -> None:
    """Append the steps of attention token by token, with each context divided into parts."""
    state, sides, heads, arguments, reads, y = attention
    header = steps.header
    few = FewTokenAttention(state.key_dim, state.value_dim, heads // state.kv_heads)
    parts = few.parts(target.tokens, state.kv_heads)
    partial = Buffer(target.tokens * heads * parts, few.partial_bytes)
    arguments = arguments | {"count": steps.counts[ALL], "positions": header.positions, "owners": header.owners}
    arguments |= {"parts": parts, "partial": partial, "partial_bytes": few.partial_bytes}
    merged = {name: arguments.pop(name) for name in ("sinks", "logs", "y", "y_stride")}
    shared = ("count", "positions", "owners", "sequences", "heads", "window", "chunked", "lookahead", "parts",
              "partial", "partial_bytes", "chosen", "chosen_stride", "choice_stride", "kv_heads")  # fmt: skip
    merged |= {name: arguments[name] for name in shared} | {"value_dim": state.value_dim}
    kinds = "-".join(side.kind.upper() for side in sides)
    kernel = f"attend_few-{kinds}-{few.bundle}-{few.key_dim}-{few.value_dim}"
    kernel += "-chosen" if arguments["chosen"] else ""
    steps.append(kernel, arguments | {"bundles": few.bundles}, target.tokens, reads, [partial])
    steps.append("merge_few", merged, target.tokens, [partial], [y])


def lower_select_keys(steps: StepBuilder, operation: SelectKeys, target: CudaTarget) -> None:
    arguments, reads, y, kernel = operation.prepare(steps)
    scores = Buffer(min(target.tokens, MAX_SELECTION_BLOCKS), 4 * 32 * operation.output.columns)
    arguments |= {"count": steps.counts[ALL], "scratch": scores, "scratch_bytes": scores.stride}
    steps.append(kernel, arguments, target.tokens, reads, [y, scores])


def append_attend_many(steps: StepBuilder, attention: AttentionArguments, target: CudaTarget) -> None:
    """Append the step of attention for all tokens of a sequence together, on tensor cores."""
    state, sides, _, arguments, reads, y = attention
    kinds = "-".join(side.kind.upper() for side in sides)
    kernel = f"attend_many-{kinds}-{state.key_dim}-{state.value_dim}-{target.depth}"
    excluded = ("chosen", "chosen_stride", "choice_stride", "logs", "period")
    arguments = {name: value for name, value in arguments.items() if name not in excluded}
    arguments |= {"sequence_count": steps.header.sequence_count}
    steps.append(kernel, arguments, target.tokens, reads, [y])


QUANTIZING_KERNELS = {"rms_norm": "norm_quantize", "swiglu": "swiglu_quantize"}  # kernels that also quantize


def merge_quantizations(steps: list[KernelStep]) -> list[KernelStep]:
    """Merge each quantization into the step that computes its input, if that step's kernel can quantize."""
    result: list[KernelStep] = []
    for step in steps:
        place = find_quantizing_step(result, step) if step.kernel == "quantize_planes" else None
        if place is None:
            result.append(step)
        else:
            step_before, integers = result[place], {name: step.arguments[name] for name in ("codes", "scales", "sums")}
            writes = [*step_before.writes, *step.writes]
            kernel = QUANTIZING_KERNELS[step_before.kernel]
            result[place] = KernelStep(
                kernel,
                step_before.arguments | integers,
                step_before.parts,
                step_before.count,
                step_before.reads,
                writes,
            )
    return result


def find_quantizing_step(earlier_steps: list[KernelStep], step: KernelStep) -> int | None:
    """Return the index of the earlier step that computes the input of `step` and can quantize it, or None."""
    x, columns = step.arguments["x"], step.arguments["columns"]
    place = next((place for place in reversed(range(len(earlier_steps))) if x in earlier_steps[place].writes), None)
    if place is None or earlier_steps[place].kernel not in QUANTIZING_KERNELS:
        return None
    return place if earlier_steps[place].arguments.get("group", columns) == columns else None


def fuse_norms(steps: list[KernelStep]) -> list[KernelStep]:
    """Fuse sums with the norms after them, and norms with the RoPE after them."""
    result: list[KernelStep] = []
    for step in steps:
        place = find_fusible_step(result, step)
        if place is not None:
            step = fuse_steps(result.pop(place), step)
        result.append(step)
    return result


def find_fusible_step(earlier_steps: list[KernelStep], step: KernelStep) -> int | None:
    """Return the index of the earlier step that can be fused into `step`, or None."""
    x = step.arguments.get("x")
    if not isinstance(x, Buffer):
        return None
    for place in reversed(range(len(earlier_steps))):
        if x in earlier_steps[place].reads + earlier_steps[place].writes:  # no step between touches x
            return place if can_fuse(earlier_steps[place], step, earlier_steps[place + 1 :]) else None
    return None


def can_fuse(first: KernelStep, step: KernelStep, between: list[KernelStep]) -> bool:
    """Return whether `first` can be fused into `step`, which reads its output.

    between: the steps between them.
    """
    a, b = first.arguments, step.arguments
    if a.get("count") is not b.get("count") or a.get("y") is not b["x"]:
        return False
    if (first.kernel, step.kernel) == ("add", "rms_norm"):
        return not between and a["z_stride"] == a["stride"] and b["group"] == b["columns"]
    if (first.kernel, step.kernel) == ("rms_norm", "rope"):
        is_by_head = a["group"] == b["head_dim"] and b["y"] is b["x"]
        return is_by_head and not any(a["x"] in between_step.writes for between_step in between)
    return False


def fuse_steps(first: KernelStep, step: KernelStep) -> KernelStep:
    """Return one step that does the work of both."""
    a, b = first.arguments, step.arguments
    if step.kernel == "rms_norm":
        arguments = {"count": a["count"], "x": a["x"], "z": a["z"], "total": a["y"]}
        arguments |= {name: b[name] for name in ("weight", "y", "stride", "columns", "epsilon")}
        return KernelStep("add_rms_norm", arguments, step.parts, step.count, first.reads, [*first.writes, *step.writes])
    reads: list[Buffer] = [*first.reads, *(buffer for buffer in step.reads if buffer is not b["x"])]
    arguments = b | {"x": a["x"], "weight": a["weight"], "epsilon": a["epsilon"]}
    return KernelStep("rms_norm_rope", arguments, step.parts, step.count, reads, step.writes)


VERBS: dict[str, Callable[..., None]] = {
    "linear": lower_linear, "expert_linear": lower_expert_linear, "route": lower_route, "attend": lower_attend,
    "select_keys": lower_select_keys,
    "select_key_blocks": lower_select_keys,
    "quantize_planes": lower_quantize_planes, "halve": lower_halve, "split_bf16": lower_split_bf16,
}  # fmt: skip


def lower_to_gpu(
    operations: Sequence[Operation], places: StepMemory, weights: GpuWeights, size: tuple[int, int], crossing: Crossing
) -> list[KernelStep]:
    """Lower operations to the steps of a program.

    size: maximum counts of tokens and of requested logits. crossing: `imported` of `lower_operations`.
    """
    target = CudaTarget(*size, weights, VERBS)

    def select_forms(operation: Operation) -> dict[str, bool]:
        if not isinstance(operation, MatrixProduct):
            return {}
        form = select_form(operation, size[1] if operation.inputs[0].rows is WANTED else size[0])
        return {form: False} if form else {}

    steps = lower_operations(insert_activation_forms(operations, select_forms), target, places, crossing)
    return fuse_norms(merge_quantizations(steps.all))


def list_kernels(steps: Sequence[KernelStep]) -> set[str]:
    return {step.kernel for step in steps if step.kernel != "product"}


def convert_step(step: KernelStep, place: Callable[[np.ndarray], int], memory: int) -> Work:
    """Convert a step to GPU work.

    place: returns the GPU address of an array. memory: address of the buffers.
    """
    values = {name: encode_argument(value, place, memory) for name, value in step.arguments.items()}
    if step.kernel == "product":
        del values["kind"], values["adds"]
        return CublasProduct(kind=str(step.arguments["kind"]), adds=bool(step.arguments["adds"]), **values)
    names = list_parameters(step.kernel)
    if missing := values.keys() ^ set(names):
        raise TypeError(f"{step.kernel}: {', '.join(sorted(missing))}")
    launch_grid = compute_grid(step.kernel, step.arguments, step.parts)
    return KernelLaunch(step.kernel, launch_grid, tuple(values[name] for name in names))


def encode_argument(value: object, place: Callable[[np.ndarray], int], memory: int) -> int:
    """Encode an argument as an int64: an integer, the bits of a float32, or an address."""
    if isinstance(value, BufferSlice):
        return encode_argument(value.buffer, place, memory) + value.offset
    if isinstance(value, Buffer):
        return memory + value.address if value.rows else 0
    if isinstance(value, np.ndarray):
        return place(value)
    if isinstance(value, str):
        return 0
    assert isinstance(value, SupportsInt)
    return int(np.float32(value).view(np.int32)) if isinstance(value, float) else int(value)
