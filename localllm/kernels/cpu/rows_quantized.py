"""The dot products of one row of block-quantized weights with 1 or 4 tokens: a decode step, and small batches.

The row is read once, in the file's layout, as a stream; memory speed is the limit. Four tokens share the unpacking.
With weight = s * (code - offset) or s * code + m, and activation = c * q, in both planes:
y = sum over sub-blocks of s * c * dot(code, q) + (m or -offset * s) * sum(activations).
"""

from llvmlite import ir
from numba import float32, types

from localllm.kernels.cpu.signature import device, inlined
from localllm.kernels.simd import (
    I32,
    I64,
    as_tuple,
    dot_u8i8,
    dot_variant,
    elements,
    f32x8,
    f32x16,
    float_i32x16,
    fma_f32x16,
    i32x16,
    llvm_call,
    load_f32,
    load_u8x64,
    load_value,
    make_shift_i32,
    operation,
    pairs_f32x16,
    prefetch,
    reduce_add,
    store_value,
    sum_f32x16,
    u8x64,
    zero_f32x16,
    zero_i32x16,
)

AHEAD = 4096  # bytes between the weights in use and those asked for
int64 = types.int64
up_8 = make_shift_i32(True, 8)


def spread(builder, value, order):
    """The lanes `order` of a vector."""
    return builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(order)), order))


def token_scales(builder, address, lanes):
    """A token's 8 scales, each for two lanes if there are 16."""
    scales = load_value(builder, address, f32x8.llvm)
    return scales if lanes == 8 else spread(builder, scales, [lane // 2 for lane in range(16)])


def make_steps(sub_block, tokens):
    """What a group needs, as intrinsics on one vector per token: `start`, `dots`, `weigh`, `add_least`, `finish`."""
    lanes = 256 // sub_block
    vector = f32x8 if lanes == 8 else f32x16
    totals_type, ints = types.UniTuple(f32x16, tokens), types.UniTuple(i32x16, tokens)
    least_type = types.UniTuple(vector, tokens)

    def at(builder, first, stride):
        return [builder.add(first, builder.mul(stride, I64(t))) for t in range(tokens)]

    @operation(totals_type)
    def zero_totals(builder):
        return as_tuple(builder, [ir.Constant(f32x16.llvm, None)] * tokens)

    @operation(least_type)
    def zero_least(builder):
        return as_tuple(builder, [ir.Constant(vector.llvm, None)] * tokens)

    def make_dots(stripes):
        @operation(ints, types.UniTuple(u8x64, 4), int64, int64, int64)
        def dots(builder, codes, high, low, stride):
            """Dot products with the activations, 256 * high + low, over some of the four vectors of codes."""
            codes, dot = elements(builder, codes), dot_variant()
            eight = ir.Constant(i32x16.llvm, [8] * 16)

            def plane(x):
                total = ir.Constant(i32x16.llvm, None)
                for q in stripes:
                    numbers = load_value(builder, builder.add(x, I64(64 * q)), u8x64.llvm)
                    total = dot(builder, total, codes[q], numbers)
                return total

            planes = zip(at(builder, high, stride), at(builder, low, stride), strict=True)
            sums = [builder.add(builder.shl(plane(upper), eight), plane(lower)) for upper, lower in planes]
            return as_tuple(builder, sums)

        return dots

    def make_weigh(order):
        @operation(totals_type, totals_type, ints, vector, int64, int64)
        def weigh(builder, totals, sums, scales, x_scales, stride):
            """totals + sums * scales * x_scales, with the scales in `order` over the lanes."""
            totals, sums = elements(builder, totals), elements(builder, sums)
            for t, address in enumerate(at(builder, x_scales, stride)):
                scale = spread(builder, builder.fmul(scales, token_scales(builder, address, lanes)), order)
                arguments = [builder.sitofp(sums[t], f32x16.llvm), scale, totals[t]]
                totals[t] = llvm_call(builder, "llvm.fma.v16f32", f32x16.llvm, arguments)
            return as_tuple(builder, totals)

        return weigh

    @operation(least_type, least_type, vector, int64, int64)
    def add_least(builder, least, factors, x_sums, stride):
        """least + factors * x_sums."""
        least = elements(builder, least)
        for t, address in enumerate(at(builder, x_sums, stride)):
            arguments = [factors, load_value(builder, address, vector.llvm), least[t]]
            least[t] = llvm_call(builder, f"llvm.fma.v{lanes}f32", vector.llvm, arguments)
        return as_tuple(builder, least)

    @operation(None, totals_type, least_type, float32, int64, int64)
    def finish(builder, totals, least, factor, y, stride):
        """Each token's sum of totals + factor * least goes to y."""
        places = zip(elements(builder, totals), elements(builder, least), at(builder, y, stride), strict=True)
        for total, rest, address in places:
            rest = builder.fmul(reduce_add(builder, rest), factor)
            store_value(builder, address, builder.fadd(reduce_add(builder, total), rest))

    if sub_block == 32:
        pairs = [(make_dots([0, 1, 2, 3]), make_weigh([lane // 2 for lane in range(16)]))]
    else:
        pairs = [
            (make_dots([2 * half, 2 * half + 1]), make_weigh([lane // 2 * 2 + half for lane in range(16)]))
            for half in (0, 1)
        ]
    return zero_totals, zero_least, pairs, add_least, finish


def make_row(format, tokens):
    """The function for `tokens` tokens, whose results go to y; each array has its bytes between tokens behind it."""
    zero_totals, zero_least, pairs, add_least, finish = make_steps(format.sub_block, tokens)
    (dots, weigh), (other_dots, other_weigh), halves = pairs[0], pairs[-1], len(pairs) == 2
    codes, scales, minimums = format.codes, format.scales, format.minimums or format.scales
    factor = float32(1.0 if format.minimums else -format.offset)
    group_bytes, sums_bytes = format.group_bytes, 1024 // format.sub_block

    @inlined
    def row(w, x, low, x_stride, x_scales, scales_stride, x_sums, sums_stride, groups, y, stride):
        totals, least = zero_totals(), zero_least()
        for _ in range(groups):
            for line in range(0, group_bytes, 64):
                prefetch(w + AHEAD + line)
            s, packed = scales(w), codes(w)
            least = add_least(least, minimums(w), x_sums, sums_stride)
            totals = weigh(totals, dots(packed, x, low, x_stride), s, x_scales, scales_stride)
            if halves:
                totals = other_weigh(totals, other_dots(packed, x, low, x_stride), s, x_scales, scales_stride)
            w, x, low, x_scales, x_sums = w + group_bytes, x + 256, low + 256, x_scales + 32, x_sums + sums_bytes
        finish(totals, least, factor, y, stride)

    return row


def make_tail(format):
    """(w, x, low, x_scales, x_sums, chunks) -> float32: the 64-column chunks behind the last group, for one token."""
    if format.chunk is None:
        return device(lambda w, x, low, x_scales, x_sums, chunks: float32(0.0))
    block_bytes, codes, scale, minimum, offset = *format.chunk, float32(-format.offset)

    @device
    def block(w, x_scale, x_sum):
        """A block's scale with its token's, and what its minimum adds."""
        s = scale(w)
        m = s * offset if minimum is None else minimum(w)
        return s * load_f32(x_scale), m * load_f32(x_sum)

    @device
    def tail(w, x, low, x_scales, x_sums, chunks):
        total, least = zero_f32x16(), float32(0.0)
        for _ in range(chunks):
            s, m = block(w, x_scales, x_sums)
            t, n = block(w + block_bytes, x_scales + 4, x_sums + 4)
            packed = codes(w)
            dots = up_8(dot_u8i8(zero_i32x16(), packed, load_u8x64(x)))
            dots = float_i32x16(dot_u8i8(dots, packed, load_u8x64(low)))
            total, least = fma_f32x16(dots, pairs_f32x16(s, t), total), least + (m + n)
            w, x, low, x_scales, x_sums = w + 2 * block_bytes, x + 64, low + 64, x_scales + 8, x_sums + 8
        return sum_f32x16(total) + least

    return tail
