"""Lower operations for the CPU: its target, its graph pass, and the operations that need their own steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import ClassVar

import numpy as np

from localllm.arch.layer_state import LatentState, PagedState
from localllm.arch.weights import Weight
from localllm.engine.cpu.kernel_variants import VariantTable
from localllm.engine.cpu.low_rank import AdaptedLinear, NarrowLinear, fuse_updates
from localllm.engine.lower.activation import ALL, WANTED, Activation, RoutedRows, RowSet
from localllm.engine.lower.steps import StepBuilder
from localllm.engine.lower.tape import (
    SCRATCH_BYTES,
    Buffer,
    KernelAddress,
    KernelCall,
    ScratchAddress,
    compute_row_bytes,
)
from localllm.engine.operations.attention import Attend, WriteKV
from localllm.engine.operations.experts import ExpertLinear
from localllm.engine.operations.key_selection import SelectKeys
from localllm.engine.operations.linear import Linear
from localllm.engine.operations.low_rank import MAX_ROWS
from localllm.engine.operations.operation import ActivationForm, MatrixProduct, Operation, insert_activation_forms
from localllm.engine.runs import BATCH, PRECISE_TOKENS
from localllm.errors import UnsupportedError
from localllm.frozen import frozen
from localllm.kernels.cpu import (
    ATTEND_KEYS,
    ATTEND_ROWS,
    ATTEND_TILES,
    CALL_BYTES,
    EXPERT_ROWS,
    FEW_TOKENS,
    FLOAT_FORMATS,
    FLOAT_SCRATCH,
    HALVES,
    MAX_SPLITS,
    MIN_SOME_TILES,
    MIN_TILE_TOKENS,
    PANEL_BYTES,
    PANEL_TOKENS,
    SLICE_UNIT,
    SPLIT_TOKENS,
    SUB_BLOCK,
    TILE_SLAB,
    TILE_SLABS,
    TILES_SCRATCH,
    TOKENS_AT_ONCE,
    UPDATE_SCRATCH,
    compute_linear_scratch,
)
from localllm.kernels.formats import supports_int8
from localllm.kernels.machine import get_lane, has_tiles
from localllm.kernels.table import (
    KERNELS,
    LINEAR_FLOAT,
    LINEAR_QUANTIZED,
    LINEAR_TILES_FLOAT,
    LINEAR_TILES_QUANTIZED,
    SPLIT,
    UNIT,
)
from localllm.quant.formats import LAYOUTS


@frozen
class CpuTarget:
    """The CPU as a target of lowering.

    Attributes:
        uses_tiles: attention, and products of more than a few tokens, use BF16 tiles.
        variants: kernel variants of quantized products, which are loaded on demand.
        keeps_cache: later runs read the keys and values of a run; float weights then compute them in float32.
            Quantized weights always use 16-bit activations for them: MiniLM in Q8_0 loses 2.6e-4 of its vectors'
            cosine with these, 4.3e-4 without.
    """

    threads: int
    uses_tiles: bool
    verbs: Mapping[str, Callable[..., None]]
    variants: VariantTable = field(default_factory=VariantTable)
    tokens: int = BATCH
    keeps_cache: bool = True
    expert_rows: ClassVar[int] = EXPERT_ROWS

    @property
    def buffer_rows(self) -> int:
        """Rows of an activation's buffer, rounded up to the tokens that kernels process at once."""
        return max(-(-self.tokens // at_once) * at_once for at_once in TOKENS_AT_ONCE)

    @property
    def wanted_rows(self) -> int:
        return self.buffer_rows

    def matrix(self, weight: Weight) -> np.ndarray:
        name = weight.tensor.format.name
        if name not in FLOAT_FORMATS and name not in LAYOUTS:
            raise UnsupportedError(f"tensor {weight.name}: format {name} is not supported")
        return weight.tensor.data

    def get_layout(self, weight: Weight) -> tuple[str, int]:
        """Return the layout in the file, because the CPU reads weights as they are."""
        return weight.tensor.format.name, weight.tensor.format.row_bytes(weight.shape[-1])

    def build_scratch_arguments(self, size: int) -> dict[str, object]:
        return {"scratch": ScratchAddress(size), "scratch_bytes": SCRATCH_BYTES}

    def divide_rows(self, rows: int, count: np.ndarray) -> tuple[int, np.ndarray | None]:
        return 4 * self.threads, count

    def parts(self, wanted: int, rows: int) -> int:
        return wanted


# Bytes of weights in a part. A part costs a thread about a microsecond, in which it claims the part and waits for the
# first weights, which were not prefetched. Threads with equally many parts finish together. Matrices of 0.2 to 0.6 MB
# (SmolLM2, 2 threads) took 1.02 to 1.08 times as long in parts of 64 KB, for any number of parts.
PART_BYTES, MIN_PART_BYTES = 1 << 17, 1 << 15
SLICE_BYTES = 1 << 16  # bytes of an expert's weights in a part
# Arguments of a matrix product that are addresses of rows; an expert's call advances them to its first row.
ROW_ARGUMENTS = {
    "linear_quantized": ("high", "low", "words", "scales", "sums", "high_sums", "excess", "y"),
    "linear_float": ("x", "halves", "y"),
}
LINEAR_SIGNATURES = {"linear_quantized": LINEAR_QUANTIZED, "linear_float": LINEAR_FLOAT}
# Products in tiles advance likewise; their panels are located separately.
ROW_ARGUMENTS |= {name.replace("linear", "linear_tiles"): places for name, places in ROW_ARGUMENTS.items()}
LINEAR_SIGNATURES |= {"linear_tiles_quantized": LINEAR_TILES_QUANTIZED, "linear_tiles_float": LINEAR_TILES_FLOAT}


@frozen
class QuantizedActivations:
    """The buffers of integer activations, see localllm.kernels.cpu.matmul.quantize."""

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
class ProductCall:
    """A call of a matrix product's kernel, with the buffers that it reads, and its output y.

    scratch: bytes per thread.
    """

    kernel: str
    arguments: dict[str, object]
    reads: list[Buffer]
    y: Buffer
    scratch: int


def uses_integers(weight: Weight) -> bool:
    return supports_int8(weight.tensor.format.name, weight.shape[-1])


def rounds_activations(operations: Sequence[Operation]) -> bool:
    """Return whether any matrix is multiplied by 8-bit activations in long runs."""
    return any(isinstance(operation, MatrixProduct) and uses_integers(operation.weight) for operation in operations)


def select_halves_verb(weight: Weight) -> str | None:
    """Return the verb that converts activations to the 16-bit format of a float matrix, or None."""
    kind = HALVES.get(weight.tensor.format.name)
    return None if kind is None or uses_integers(weight) or weight.shape[-1] % kind.multiple else kind.kernel


def lower_linear(steps: StepBuilder, operation: Linear, target: CpuTarget) -> None:
    weight, bias = operation.weight, operation.bias
    product = build_product_call(steps, operation, target)
    parts = count_parts(weight.tensor.nbytes, target.threads)
    arguments = product.arguments | target.build_scratch_arguments(product.scratch)
    steps.append(product.kernel, arguments, parts, product.reads, [product.y])
    if bias is not None:
        steps.add_vector(operation.output, bias)


def lower_narrow_linear(steps: StepBuilder, operation: NarrowLinear, target: CpuTarget) -> None:
    """Append the product with a matrix of few rows, divided into enough parts for all threads."""
    product = build_product_call(steps, operation, target)
    arguments, parts = product.arguments | target.build_scratch_arguments(product.scratch), max(2 * target.threads, 4)
    steps.append(product.kernel, arguments, parts, product.reads, [product.y])


def lower_adapted_linear(steps: StepBuilder, operation: AdaptedLinear, target: CpuTarget) -> None:
    """Append one step for a matrix product and its low-rank update."""
    weight, bias, update = operation.weight, operation.bias, operation.update
    assert update is not None
    product = build_product_call(steps, operation, target)
    rows, reads = update.list_rows(steps, product.y)
    addition = update.list_weights(target) | rows | {"scratch": 0, "scratch_bytes": SCRATCH_BYTES}
    offset = UPDATE_SCRATCH + MAX_ROWS * compute_row_bytes(update.weight.shape[0])
    indices, width = KERNELS[product.kernel.partition("-")[0]].arguments, update.weight.tensor.format.row_bytes(1)
    calls = {
        "product": KernelCall(product.kernel, product.arguments | {"scratch": 0, "scratch_bytes": SCRATCH_BYTES}),
        "update": KernelCall(update.find_kernel(target), addition),
    }
    arguments = {"count": product.arguments["count"], **calls, "product_words": len(indices), "y_at": indices.y}
    arguments |= {"scratch_at": indices.scratch, "rows": operation.output.columns, "b_bytes": width}
    arguments |= {"slice_rows": TILE_SLABS * SLICE_UNIT if target.uses_tiles else 4 * SLICE_UNIT}
    arguments |= {"product_scratch": offset} | target.build_scratch_arguments(offset + product.scratch)
    parts = count_parts(weight.tensor.nbytes, target.threads)
    steps.append("adapted_linear", arguments, parts, [*product.reads, *reads], [product.y])
    if bias is not None:
        steps.add_vector(operation.output, bias)


def count_parts(nbytes: int, threads: int) -> int:
    """Return how many parts a matrix of `nbytes` is divided into: equally many per thread if it is large enough."""
    if nbytes < MIN_PART_BYTES * threads:
        return max(nbytes // MIN_PART_BYTES, 1)
    return min(-(-nbytes // (PART_BYTES * threads)), 8) * threads


def lower_expert_linear(steps: StepBuilder, operation: ExpertLinear, target: CpuTarget) -> None:
    """Append the product with each expert's matrix, by the kernel for a single matrix."""
    choice, weight = operation.choice, operation.weight
    experts, data, columns = steps.experts[choice.routed], weight.tensor.data, operation.inputs[0].columns
    product = build_product_call(steps, operation, target)
    arguments, name = product.arguments, product.kernel.partition("-")[0]
    buffers = {at: buffer for at in ROW_ARGUMENTS[name] if isinstance(buffer := arguments[at], Buffer)}
    strides = [(getattr(LINEAR_SIGNATURES[name], at), buffer.stride) for at, buffer in buffers.items()]
    of_one = compute_linear_scratch(columns) if name.endswith("quantized") else count_float_scratch(columns)
    # A dense matrix of that size gets as many parts: prefetched weights are lost at the end of a part.
    slices = min(max(data[0].nbytes // SLICE_BYTES, 1), max(8 * target.threads // choice.columns, 1))
    arguments |= {"linear": KernelAddress(product.kernel), "by_row": np.array(strides, np.int64)}
    arguments |= {"by_row_count": len(strides), "slices": slices}
    arguments |= {"active": experts.active, "active_count": experts.active_count, "expert_bytes": data.strides[0]}
    arguments |= target.build_scratch_arguments(max(product.scratch, CALL_BYTES + of_one))
    reads = [*product.reads, experts.active]
    steps.append(name.replace("linear", "experts"), arguments, 16 * target.threads, reads, [product.y])
    operation.add_bias(steps)


def build_product_call(steps: StepBuilder, operation: MatrixProduct, target: CpuTarget) -> ProductCall:
    """Build the kernel call of a matrix product; the caller adds scratch memory to its arguments."""
    x, weight, is_stored = operation.inputs[0], operation.weight, operation.is_stored
    y, format = steps.allocate(operation.output), weight.tensor.format
    arguments = {"count": steps.counts[x.rows], "weights": target.matrix(weight), "columns": x.columns}
    arguments |= {"row_bytes": format.row_bytes(x.columns), "rows": operation.output.columns}
    arguments |= {"y": y, "y_stride": y.stride, "kernel_tokens": select_kernel_tokens(steps, x.rows)}
    if uses_integers(weight):
        quantized = steps.find_form(operation, QuantizedActivations)
        arguments |= list_integer_arguments(steps, x, format.name, quantized, is_stored)
        # products of more kernel_tokens than this are computed in tiles
        most_tokens = MIN_TILE_TOKENS[format.name] - 1 if target.uses_tiles else target.tokens
        arguments |= target.variants.register(format.name, x.columns, x.rows, most_tokens, is_stored)
        product = ProductCall("linear_quantized", arguments, quantized.buffers, y, compute_linear_scratch(x.columns))
    else:
        forms = (steps.forms.get(x) for x in operation.inputs if not target.uses_tiles)
        halves = next((form for form in forms if isinstance(form, Buffer)), None)
        arguments |= list_float_arguments(steps, x, halves, is_stored and target.keeps_cache)
        reads = [steps.buffers[x], halves] if halves else [steps.buffers[x]]
        product = ProductCall(f"linear_float-{format.name}", arguments, reads, y, count_float_scratch(x.columns))
    if not target.uses_tiles or isinstance(operation, NarrowLinear):
        return product
    kernel, tile_arguments, panels = select_tile_kernel(
        steps, product.kernel, format.name, steps.find_form(operation, ActivationPanels), is_stored
    )
    scratch = max(product.scratch, CALL_BYTES + TILES_SCRATCH)
    return ProductCall(kernel, arguments | tile_arguments, [*product.reads, panels], y, scratch)


def list_integer_arguments(
    steps: StepBuilder, x: Activation, format: str, q: QuantizedActivations, is_stored: bool
) -> dict[str, object]:
    """Return the further arguments of a product of quantized weights and integer activations."""
    sub_block, header = SUB_BLOCK[format], steps.header
    arguments: dict[str, object] = {"high": q.high, "low": q.low, "words": q.words or 0}
    arguments |= {"scales": q.scales, "excess": q.excess}
    arguments |= {"sums": q.sums[sub_block], "high_sums": q.high_sums[sub_block]}
    return arguments | {"most_precise": header.max_precise_stored if is_stored else header.most_precise}


def list_float_arguments(
    steps: StepBuilder, x: Activation, halves: Buffer | None, is_stored: bool
) -> dict[str, object]:
    """Return the further arguments of a product of float weights.

    halves: x in 16 bits, for many tokens.
    """
    source = steps.buffers[x]
    arguments = {"x": source, "x_stride": source.stride, "halves": halves or 0}
    arguments["halves_stride"] = halves.stride if halves else 0
    return arguments | {"most_precise": steps.target.tokens if is_stored else PRECISE_TOKENS}


def count_float_scratch(columns: int) -> int:
    return max(FLOAT_SCRATCH, 4 * columns)


def lower_quantize(steps: StepBuilder, operation: ActivationForm, target: CpuTarget) -> None:
    """Append the conversion of x to integers, on CPUs with tiles only for few tokens."""
    (x,) = operation.inputs
    source, scale = steps.buffers[x], x.columns // 16 * 4  # bytes per token
    sizes = (x.columns, x.columns, scale, scale, scale, scale, scale, scale // 2)
    high, low, scales, *sums, excess = (Buffer(steps.max_rows(x.rows), size) for size in sizes)
    words = Buffer(steps.max_rows(x.rows), 2 * x.columns) if get_lane().has_avx2_only else None
    q = QuantizedActivations(high, low, words, scales, {32: sums[0], 16: sums[1]}, {32: sums[2], 16: sums[3]}, excess)
    arguments = {"x": source, "stride": source.stride, "columns": x.columns, "high": high, "low": low}
    arguments |= {
        "words": words or 0,
        "scales": scales,
        "sums_32": sums[0],
        "sums_16": sums[1],
        "high_sums_32": sums[2],
    }
    arguments |= {"high_sums_16": sums[3], "excess": excess, "count": steps.counts[x.rows]}
    arguments |= {"most_precise": steps.header.most_precise, "kernel_tokens": select_kernel_tokens(steps, x.rows)}
    if target.uses_tiles:
        arguments["count"] = select_few_count(steps, x.rows)
    parts, limit = target.divide_rows(steps.max_rows(x.rows), steps.counts[x.rows])
    steps.append("quantize", arguments, parts, [source], q.buffers, limit)
    steps.forms[operation.output] = q


def lower_halves(steps: StepBuilder, operation: ActivationForm, target: CpuTarget) -> None:
    """Append the conversion of x to 16 bits, by the kernel with the verb's name."""
    (x,) = operation.inputs
    kind, source = next(kind for kind in HALVES.values() if kind.kernel == operation.verb), steps.buffers[x]
    y = Buffer(steps.max_rows(x.rows), compute_row_bytes(-(-kind.count_bytes(x.columns) // 4)))
    arguments = {"x": source, "stride": source.stride, "y": y, "y_stride": y.stride, "columns": x.columns}
    steps.append_row_step(operation.verb, x.rows, arguments, [source], [y])
    steps.forms[operation.output] = y


UNPACK = {"linear_quantized": "unpack_groups", "linear_float": "unpack_rows"}


@frozen
class ActivationPanels:
    """The buffer of activations as panels of tokens, see localllm.kernels.cpu.amx.pack."""

    buffer: Buffer
    slab_bytes: int


def select_tile_kernel(
    steps: StepBuilder, kernel: str, format: str, panels: ActivationPanels, is_stored: bool
) -> tuple[str, dict[str, object], Buffer]:
    """Return the tile kernel that replaces `kernel`, its further arguments, and its panels."""
    kind, header = kernel.partition("-")[0], steps.header
    is_exact = needs_both_planes(format, is_stored)
    arguments: dict[str, object] = {"few": KernelAddress(kernel), "unpack": KernelAddress(f"{UNPACK[kind]}-{format}")}
    arguments |= {"panels": panels.buffer, "slab_bytes": panels.slab_bytes, "least": MIN_TILE_TOKENS[format]}
    arguments["most_exact"] = header.max_precise_stored if is_exact else header.most_precise
    return kind.replace("linear", "linear_tiles"), arguments, panels.buffer


def needs_both_planes(format: str, is_stored: bool) -> bool:
    """Return whether a product always uses both BF16 planes of its panels."""
    return is_stored or format == "F32"


def lower_pack(steps: StepBuilder, operation: ActivationForm, target: CpuTarget) -> None:
    (x,) = operation.inputs
    source, rows, header = steps.buffers[x], x.rows, steps.header
    slabs, panels = -(-x.columns // TILE_SLAB), -(-steps.max_rows(rows) // PANEL_TOKENS)
    arguments: dict[str, object] = {"active": 0, "active_count": 0}
    reads, tokens = [source], rows
    if isinstance(rows, RoutedRows):  # each expert's rows begin a new panel
        experts, tokens = steps.experts[rows], rows.of
        arguments = {"active": experts.active, "active_count": experts.active_count}
        panels += experts.active.rows
        reads.append(experts.active)
    y = Buffer(slabs * panels, PANEL_BYTES)
    arguments |= {"count": steps.counts[tokens], "x": source, "stride": source.stride, "columns": x.columns}
    arguments |= {"panels": y, "slab_bytes": panels * PANEL_BYTES, "least": MIN_SOME_TILES}
    arguments["most_exact"] = header.max_precise_stored if operation.exact else header.most_precise
    arguments["kernel_tokens"] = select_kernel_tokens(steps, rows)
    parts, limit = target.divide_rows(steps.max_rows(rows), steps.counts[rows])
    steps.append("pack", arguments | target.build_scratch_arguments(TILES_SCRATCH), parts, reads, [y], limit)
    steps.forms[operation.output] = ActivationPanels(y, panels * PANEL_BYTES)


def select_few_count(steps: StepBuilder, rows: RowSet) -> np.ndarray:
    """Return the number of rows, int64 [1]; 0 in runs whose products use tiles, except those of experts."""
    return steps.counts[rows] if isinstance(rows, RoutedRows) else select_count(steps.header.few_counts, rows)


def select_kernel_tokens(steps: StepBuilder, rows: RowSet) -> np.ndarray:
    """Return the token count that selects the kernels for some rows, int64 [1]; for experts the run's."""
    return select_count(steps.header.kernel_tokens, rows.of if isinstance(rows, RoutedRows) else rows)


def select_count(numbers: np.ndarray, rows: RowSet) -> np.ndarray:
    """Return the first of two counts, int64 [2], for all tokens, the second for requested logits."""
    place = {ALL: 0, WANTED: 1}[rows]
    return numbers[place : place + 1]


@frozen
class AttentionPlan:
    """The work units of attention in a run, see localllm.kernels.cpu.attention.plan."""

    units: np.ndarray
    unit_count: np.ndarray
    splits: np.ndarray
    made: Buffer  # represents the plan in the reads and writes of steps


def lower_attend(steps: StepBuilder, operation: Attend, target: CpuTarget) -> None:
    """Append the steps that compute attention in units and merge the partial results of a context."""
    attention = operation.prepare(steps)
    state, sides, heads, arguments, reads, y = attention
    plan = plan_attention(steps, operation, state)
    key_dim, value_dim = -(-state.key_dim // 16) * 16, -(-state.value_dim // 16) * 16
    partial = Buffer(SPLIT_TOKENS * heads * MAX_SPLITS, (value_dim + 32) * 4)
    arguments |= {"units": plan.units, "unit_count": plan.unit_count, "splits": plan.splits, "partial": partial}
    arguments |= {"count": steps.counts[ALL], "positions": steps.header.positions}
    arguments |= {"key_dim": state.key_dim, "value_dim": state.value_dim}
    kernel, tile_bytes = ("attend_tiles", ATTEND_TILES) if target.uses_tiles else ("attend", 0)
    arguments |= target.build_scratch_arguments(count_attention_scratch(key_dim, value_dim) + tile_bytes)
    kinds = "-".join(dict.fromkeys(side.kind.upper() for side in sides))
    reads, count = [*reads, plan.made], plan.unit_count
    steps.append(f"{kernel}-{kinds}", arguments, 8 * target.threads, reads, [y, partial], count)
    steps.append("merge", arguments, 2 * target.threads, [partial, plan.made], [y])
    operation.finish(steps, attention)


def lower_select_keys(steps: StepBuilder, operation: SelectKeys, target: CpuTarget) -> None:
    arguments, reads, y, kernel = operation.prepare(steps)
    context = 32 * operation.output.columns  # bits, one per position for each head that selects
    arguments |= target.build_scratch_arguments(
        count_selection_scratch(operation.heads, operation.state.key_dim, context)
    )
    steps.append_row_step(kernel, operation.inputs[0].rows, arguments, reads, [y])


def count_selection_scratch(heads: int, key_dim: int, context: int) -> int:
    """Return the scratch bytes per thread of key selection (localllm.kernels.cpu.attention.select_keys)."""
    return 4 * (heads + 1) * -(-key_dim // 16) * 16 + 8 * 256 + 4 * context


def plan_attention(steps: StepBuilder, operation: Attend, state: PagedState | LatentState) -> AttentionPlan:
    """Append the step that plans attention, once for all layers of the same shape."""
    heads, windowed = operation.heads, operation.windowed
    alike = {"heads": heads, "kv_heads": state.kv_heads, "window": state.window or 0, "chunked": state.chunked}
    alike |= {"lookahead": operation.lookahead, "cross_attention": operation.cross_attention}
    sequences = steps.header.windows if windowed else steps.header.sequences
    count = steps.header.window_count if windowed else steps.header.sequence_count

    def append_plan() -> AttentionPlan:
        tokens = steps.target.tokens
        units = np.empty((count_max_units(tokens, heads, state.kv_heads), len(UNIT)), np.int64)
        plan = AttentionPlan(units, np.zeros(1, np.int64), np.empty((tokens, len(SPLIT)), np.int64), Buffer(0, 0))
        arguments: dict[str, object] = {"units": units, "unit_count": plan.unit_count, "splits": plan.splits}
        arguments |= {"sequences": sequences, "sequence_count": count}
        steps.append("plan", alike | arguments, 1, [], [plan.made])
        return plan

    return steps.memoize(("plan", windowed, *alike.values()), append_plan)


def count_attention_scratch(key_dim: int, value_dim: int) -> int:
    """Return the scratch bytes per thread of attention; dimensions are padded."""
    tiles = 2 * ATTEND_KEYS * max(key_dim, value_dim)
    return 4 * (ATTEND_ROWS * (key_dim + value_dim + ATTEND_KEYS + 32) + tiles)


def count_max_units(tokens: int, heads: int, kv_heads: int) -> int:
    """Return the maximum number of work units in a run of `tokens` tokens.

    There is one per tile of rows, and one per section of the context if there are few tokens.
    """
    group = heads // kv_heads
    unsplit, split = tokens * group // ATTEND_ROWS + tokens, FEW_TOKENS * group // ATTEND_ROWS + 1
    return kv_heads * (unsplit + split * SPLIT_TOKENS * MAX_SPLITS)


VERBS: dict[str, Callable[..., None]] = {
    "linear": lower_linear, "narrow_linear": lower_narrow_linear, "adapted_linear": lower_adapted_linear,
    "expert_linear": lower_expert_linear, "attend": lower_attend,
    "select_keys": lower_select_keys, "select_key_blocks": lower_select_keys,
    "quantize": lower_quantize, "pack": lower_pack,
    **dict.fromkeys((kind.kernel for kind in HALVES.values()), lower_halves),
}  # fmt: skip


def create_target(threads: int, tokens: int = BATCH, keeps: bool = True) -> CpuTarget:
    """Create the target of this CPU, with BF16 tiles if it has AMX.

    tokens: maximum number of tokens in a run. keeps: see CpuTarget.keeps_cache.
    """
    return CpuTarget(threads, has_tiles(), VERBS, tokens=tokens, keeps_cache=keeps)


def optimize_graph(operations: Sequence[Operation], target: CpuTarget) -> list[Operation]:
    """Insert the conversions of activations that matrix products need, once per activation and form.

    Forms are integers, halves (16 bits) and panels (BF16 tiles). Also set `is_stored` of the products whose outputs
    become keys and values.
    """
    producers = find_kv_producers(operations)
    marked = [
        replace(each, is_stored=isinstance(each, Linear) and each.output in producers)
        if isinstance(each, MatrixProduct)
        else each
        for each in operations
    ]
    marked = fuse_updates(marked)
    exact = {
        operation.inputs[0]
        for operation in marked
        if isinstance(operation, MatrixProduct)
        and not isinstance(operation, NarrowLinear)
        and needs_both_planes(operation.weight.tensor.format.name, operation.is_stored)
    }

    def select_forms(operation: Operation) -> dict[str, bool]:
        if not isinstance(operation, MatrixProduct) or isinstance(operation, NarrowLinear):
            return {}
        weight = operation.weight
        verb = "quantize" if uses_integers(weight) else None if target.uses_tiles else select_halves_verb(weight)
        forms = {verb: False} if verb else {}
        return forms | ({"pack": operation.inputs[0] in exact} if target.uses_tiles else {})

    return insert_activation_forms(marked, select_forms)


def find_kv_producers(operations: Sequence[Operation]) -> set[Activation]:
    """Return the activations that become keys and values, back to the last matrix product before them."""
    stored: set[Activation] = set()
    for operation in reversed(operations):
        if isinstance(operation, Attend | SelectKeys):
            stored |= set(operation.inputs[1:])
        elif isinstance(operation, WriteKV) or (
            operation.output in stored and not isinstance(operation, MatrixProduct)
        ):
            stored |= set(operation.inputs)
    return stored
