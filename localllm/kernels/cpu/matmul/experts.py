"""Products of the experts' matrices, and copies of rows between the tokens' order and the experts' order.

routing.py gives each pair of a token and an expert a row; the rows of an expert are contiguous. The kernel for one
matrix multiplies them. It gets a copy of the arguments, whose addresses are those of the expert's matrix and rows. So
an expert with few rows reads its matrix as decode does, and one with many unpacks each tile once.
"""

from localllm.kernels.cpu import CALL_BYTES, PRECISE_TOKENS
from localllm.kernels.cpu.elementwise.rowwise import copy
from localllm.kernels.cpu.matmul.routing import EXPERT_BYTES
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import (
    call_kernel,
    fma_f32x16,
    load_f32,
    load_f32x16,
    load_i64,
    splat_f32x16,
    store_f32x16,
    store_i64,
    zero_f32x16,
)
from localllm.kernels.table import (
    ADD_BY_EXPERT,
    EXPERT,
    EXPERTS_FLOAT,
    EXPERTS_QUANTIZED,
    FROM_HEADS,
    GATHER,
    LINEAR_FLOAT,
    LINEAR_QUANTIZED,
    SCATTER,
)

ANY_NUMBER = 1 << 40  # of tokens: no limit


@device
def put(arguments, place, value):
    """Set argument number `place` in an argument array."""
    store_i64(arguments + place * 8, value)


def make_experts(product, own, most_is_address, finish=None):
    """Make the kernel for all experts from the kernel for one matrix.

    product, own: the declarations of that kernel and of this one; most_is_address: whether the argument `most_precise`
    of `product` is an address; finish(arguments, call, expert, memory): sets further arguments in `call`, and may use
    `memory`, the scratch memory after them.
    """
    words = len(product)

    @device
    def prepare(a, call, expert):
        """Write the arguments of an expert's product to `call`, an array at the beginning of the scratch memory."""
        for i in range(words):
            put(call, i, argument(a, i))
        for i in range(argument(a, own.by_row_count)):
            place, row_bytes = argument(a, own.by_row) + i * 16, argument(a, own.by_row) + i * 16 + 8
            moved = argument(call, load_i64(place)) + argument(expert, EXPERT.first) * load_i64(row_bytes)
            put(call, load_i64(place), moved)
        distance = argument(expert, EXPERT.number) * argument(a, own.expert_bytes)
        put(call, product.weights, argument(a, own.weights) + distance)
        put(call, product.count, expert + 8 * EXPERT.count)
        put(call, product.scratch, argument(a, own.scratch) + CALL_BYTES)
        most = load_i64(argument(a, own.most_precise)) if most_is_address else argument(a, own.most_precise)
        kernel_tokens = load_i64(argument(a, own.kernel_tokens))
        most = ANY_NUMBER if kernel_tokens <= most else 0
        if most_is_address:
            put(call, words, most)
            most = call + words * 8
        put(call, product.most_precise, most)
        # In a short run the number of an expert's tokens does not select its kernel: each gets the bits it gets alone.
        put(call, words + 1, 1 if kernel_tokens <= PRECISE_TOKENS else argument(expert, EXPERT.count))
        put(call, product.kernel_tokens, call + (words + 1) * 8)
        if finish is not None:
            finish(a, call, expert, call + (words + 2) * 8)

    @kernel
    def experts(a, part, parts, thread):
        slices = argument(a, own.slices)
        units = load_i64(argument(a, own.active_count)) * slices
        call = argument(a, own.scratch) + thread * argument(a, own.scratch_bytes)
        for unit in range(units * part // parts, units * (part + 1) // parts):
            prepare(a, call, argument(a, own.active) + unit // slices * EXPERT_BYTES)
            call_kernel(argument(a, own.linear), call, unit % slices, slices, thread)

    return experts


experts_quantized = make_experts(LINEAR_QUANTIZED, EXPERTS_QUANTIZED, True)
experts_float = make_experts(LINEAR_FLOAT, EXPERTS_FLOAT, False)


@kernel
def gather(a, part, parts, thread):
    """Copy the rows of tokens to the order of the experts, times the pairs' weights if there are some."""
    rows, weights = load_i64(argument(a, GATHER.count)), argument(a, GATHER.weights)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        pair = load_i64(argument(a, GATHER.pairs) + row * 8)
        token, place = pair // argument(a, GATHER.used), pair % argument(a, GATHER.used)
        x = argument(a, GATHER.x) + token * argument(a, GATHER.x_stride) + place * argument(a, GATHER.part_bytes)
        y, weight = argument(a, GATHER.y) + row * argument(a, GATHER.stride), splat_f32x16(1.0)
        if weights != 0:
            weight = splat_f32x16(load_f32(weights + pair * 4))
        for i in range(0, argument(a, GATHER.columns) * 4, 64):
            store_f32x16(y + i, load_f32x16(x + i) * weight)


@kernel
def from_heads(a, part, parts, thread):
    """Copy the results of a token's experts to the token's row, one after the other."""
    used, columns = argument(a, FROM_HEADS.used), argument(a, FROM_HEADS.columns)
    pairs = load_i64(argument(a, FROM_HEADS.count)) * used
    for pair in range(pairs * part // parts, pairs * (part + 1) // parts):
        x = argument(a, FROM_HEADS.x) + load_i64(argument(a, FROM_HEADS.rows) + pair * 8) * argument(
            a, FROM_HEADS.x_stride
        )
        y = argument(a, FROM_HEADS.y) + pair // used * argument(a, FROM_HEADS.stride) + pair % used * columns * 4
        copy(x, y, columns)


@kernel
def scatter(a, part, parts, thread):
    """Add up the results of a token's experts, times their weights, in the order in which the experts were selected."""
    tokens, used, weights = (
        load_i64(argument(a, SCATTER.count)),
        argument(a, SCATTER.used),
        argument(a, SCATTER.weights),
    )
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        y = argument(a, SCATTER.y) + t * argument(a, SCATTER.stride)
        for i in range(0, argument(a, SCATTER.columns) * 4, 64):
            total = zero_f32x16()
            for pair in range(t * used, (t + 1) * used):
                x = argument(a, SCATTER.x) + load_i64(argument(a, SCATTER.rows) + pair * 8) * argument(
                    a, SCATTER.x_stride
                )
                weight = splat_f32x16(1.0)
                if weights != 0:
                    weight = splat_f32x16(load_f32(weights + pair * 4))
                total = fma_f32x16(weight, load_f32x16(x + i), total)
            store_f32x16(y + i, total)


@kernel
def add_by_expert(a, part, parts, thread):
    """Add to every row the vector (bias) of its expert."""
    rows, stride = load_i64(argument(a, ADD_BY_EXPERT.count)), argument(a, ADD_BY_EXPERT.stride)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        pair = load_i64(argument(a, ADD_BY_EXPERT.pairs) + row * 8)
        expert = load_i64(argument(a, ADD_BY_EXPERT.chosen) + pair * 8)
        x, y = argument(a, ADD_BY_EXPERT.x) + row * stride, argument(a, ADD_BY_EXPERT.y) + row * stride
        z = argument(a, ADD_BY_EXPERT.z) + expert * argument(a, ADD_BY_EXPERT.z_stride)
        for i in range(0, argument(a, ADD_BY_EXPERT.columns) * 4, 64):
            store_f32x16(y + i, load_f32x16(x + i) + load_f32x16(z + i))
