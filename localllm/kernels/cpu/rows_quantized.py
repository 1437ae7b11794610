"""The dot products of one row of block-quantized weights with 1 or 4 tokens: a decode step, and small batches.

The row is read once, in the file's layout, as a stream; memory speed is the limit. Four tokens share the unpacking.
With weight = s * (code - offset) or s * code + m, and activation = c * q, in both planes:
y = sum over sub-blocks of s * c * dot(code, q) + (m or -offset * s) * sum(activations).
"""

from llvmlite import ir
from numba import float32, types

from localllm.kernels.cpu.signature import argument, device, inlined
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
    load_f32,
    load_u8x64,
    load_value,
    make_shift_i32,
    multiply_add,
    operation,
    pairs_f32x16,
    prefetch,
    reduce_add,
    store_value,
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
                totals[t] = multiply_add(builder, builder.sitofp(sums[t], f32x16.llvm), scale, totals[t])
            return as_tuple(builder, totals)

        return weigh

    @operation(least_type, least_type, vector, int64, int64)
    def add_least(builder, least, factors, x_sums, stride):
        """least + factors * x_sums."""
        least = elements(builder, least)
        for t, address in enumerate(at(builder, x_sums, stride)):
            least[t] = multiply_add(builder, factors, load_value(builder, address, vector.llvm), least[t])
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


def make_tail(format):
    """(w, x, low, x_scales, x_sums, chunks) -> what the 64-column chunks behind the last group add, for one token."""
    if format.chunk is None:
        return device(lambda w, x, low, x_scales, x_sums, chunks: zero_f32x16())
    block_bytes, codes, scale, minimum = format.chunk
    offset = float32(-format.offset)

    @device
    def block(w, x_scale, x_sum):
        """A block's scale with its token's, and what its minimum adds."""
        s = scale(w)
        m = s * offset if minimum is None else minimum(w)
        return s * load_f32(x_scale), m * load_f32(x_sum)

    @inlined
    def tail(w, x, low, x_scales, x_sums, chunks):
        total = zero_f32x16()
        for _ in range(chunks):
            s, m = block(w, x_scales, x_sums)
            t, n = block(w + block_bytes, x_scales + 4, x_sums + 4)
            packed = codes(w)
            dots = up_8(dot_u8i8(zero_i32x16(), packed, load_u8x64(x)))
            dots = float_i32x16(dot_u8i8(dots, packed, load_u8x64(low)))
            total = fma_f32x16(dots, pairs_f32x16(s, t), total + pairs_f32x16(m / 8, n / 8))
            w, x, low, x_scales, x_sums = w + 2 * block_bytes, x + 64, low + 64, x_scales + 8, x_sums + 8
        return total

    return tail


@device
def ask_for(address, size):
    """Prefetch what decode will read soon."""
    for line in range(0, size, 64):
        prefetch(address + line)


@inlined
def token_strides(a, sub_block):
    """Bytes between tokens: of the planes, the scales and the sums."""
    columns = argument(a, 4)
    return columns, columns // 8, columns // sub_block * 4


@inlined
def token_at(a, token, sub_block):
    """Where a token's activations lie: high and low plane, scales, sums."""
    x_stride, c_stride, n_stride = token_strides(a, sub_block)
    return (
        argument(a, 5) + token * x_stride, argument(a, 6) + token * x_stride,
        argument(a, 7) + token * c_stride, argument(a, 8) + token * n_stride,
    )  # fmt: skip


def make_row(format, tokens):
    """Functions (arguments of the kernel, address of a row, first token, y) for `tokens` tokens: one row, and two.

    Two rows share what is read of the activations, which is more than half of all loads. Prefetching goes on as if they
    came one after the other: in the order of use, two streams side by side, a core reads half as fast.
    """
    zero_totals, zero_least, pairs, add_least, finish = make_steps(format.sub_block, tokens)
    (dots, weigh), (other_dots, other_weigh), halves = pairs[0], pairs[-1], len(pairs) == 2
    codes, scales, minimums = format.codes, format.scales, format.minimums or format.scales
    factor = float32(1.0 if format.minimums else -format.offset)
    sub_block, group_bytes, sums_bytes = format.sub_block, format.group_bytes, 1024 // format.sub_block
    chunk_bytes, tail = 2 * format.chunk.block_bytes if format.chunk else 0, make_tail(format)
    put, take_tails = make_put(tokens), format.chunk is not None

    @inlined
    def group(totals, least, w, x, low, x_stride, c, c_stride, n, n_stride):
        s, packed = scales(w), codes(w)
        least = add_least(least, minimums(w), n, n_stride)
        totals = weigh(totals, dots(packed, x, low, x_stride), s, c, c_stride)
        if halves:
            totals = other_weigh(totals, other_dots(packed, x, low, x_stride), s, c, c_stride)
        return totals, least

    @inlined
    def tails(totals, w, x, low, x_stride, c, c_stride, n, n_stride, columns):
        """The totals to begin with: those of the columns behind the last group."""
        done, chunks = columns // 256 * 256, columns % 256 // 64
        w, x, low, c, n = w + done // 256 * group_bytes, x + done, low + done, c + done // 8, n + done // 8
        for t in range(tokens):
            totals = put(totals, tail(w, x, low, c, n, chunks), t)
            x, low, c, n = x + x_stride, low + x_stride, c + c_stride, n + n_stride
        return totals

    @inlined
    def row(a, w, token, y):
        x, low, c, n = token_at(a, token, sub_block)
        x_stride, c_stride, n_stride = token_strides(a, sub_block)
        totals, least = zero_totals(), zero_least()
        if take_tails:
            totals = tails(totals, w, x, low, x_stride, c, c_stride, n, n_stride, x_stride)
        for _ in range(x_stride // 256):
            ask_for(w + AHEAD, group_bytes)
            totals, least = group(totals, least, w, x, low, x_stride, c, c_stride, n, n_stride)
            w, x, low, c, n = w + group_bytes, x + 256, low + 256, c + 32, n + sums_bytes
        finish(totals, least, factor, y, argument(a, 11))

    @inlined
    def row_pair(a, w, token, y):
        x, low, c, n = token_at(a, token, sub_block)
        x_stride, c_stride, n_stride = token_strides(a, sub_block)
        totals, least, other_totals, other_least = zero_totals(), zero_least(), zero_totals(), zero_least()
        other, ahead = w + argument(a, 2), w + AHEAD
        if take_tails:
            ask_for(ahead, x_stride % 256 // 64 * 2 * chunk_bytes)
            ahead += x_stride % 256 // 64 * 2 * chunk_bytes
            totals = tails(totals, w, x, low, x_stride, c, c_stride, n, n_stride, x_stride)
            other_totals = tails(other_totals, other, x, low, x_stride, c, c_stride, n, n_stride, x_stride)
        for _ in range(x_stride // 256):
            ask_for(ahead, 2 * group_bytes)
            totals, least = group(totals, least, w, x, low, x_stride, c, c_stride, n, n_stride)
            other_totals, other_least = group(
                other_totals, other_least, other, x, low, x_stride, c, c_stride, n, n_stride
            )
            w, other, ahead = w + group_bytes, other + group_bytes, ahead + 2 * group_bytes
            x, low, c, n = x + 256, low + 256, c + 32, n + sums_bytes
        finish(totals, least, factor, y, argument(a, 11))
        finish(other_totals, other_least, factor, y + 4, argument(a, 11))

    return row, row_pair


def make_put(count):
    """An intrinsic (tuple of vectors, vector, index) -> the tuple with one replaced."""

    @operation(types.UniTuple(f32x16, count), types.UniTuple(f32x16, count), f32x16, int64)
    def put(builder, totals, value, index):
        chosen = [builder.icmp_signed("==", index, I64(t)) for t in range(count)]
        pairs = zip(elements(builder, totals), chosen, strict=True)
        return as_tuple(builder, [builder.select(here, value, total) for total, here in pairs])

    return put
