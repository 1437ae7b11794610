"""The columns of a row behind its last group of 256, in chunks of 64: for rows_quantized.py."""

from llvmlite import ir
from numba import float32, types

from localllm.kernels.cpu.signature import device, inlined
from localllm.kernels.simd import (
    I64,
    as_tuple,
    concatenate_f32x16,
    dot_u8i8,
    elements,
    f32x8,
    f32x16,
    float_i32x16,
    fma_f32x16,
    load_f32,
    load_i32,
    load_u8x64,
    make_shift_i32,
    operation,
    pairs_f32x16,
    slice_of,
    zero_f32x8,
    zero_f32x16,
    zero_i32x16,
)

int64 = types.int64
up_8 = make_shift_i32(True, 8)


def make_tail(format, planes):
    """(w, x, low, x_scales, x_sums, chunks) -> what the 64-column chunks behind the last group add, for one token."""
    if format.chunk is None:
        return device(lambda w, x, low, x_scales, x_sums, chunks: zero_f32x8())
    block_bytes, codes, scale, minimum = format.chunk
    offset, both = float32(-format.offset), planes == 2

    @device
    def block(w, x_scale, x_sum):
        """A block's scale with its token's, and what its minimum adds."""
        s, c = scale(w), load_f32(x_scale)
        m = s * offset if minimum is None else minimum(w)
        return s * c, m * (load_f32(x_sum) if both else c * float32(load_i32(x_sum)))

    @inlined
    def tail(w, x, low, x_scales, x_sums, chunks):
        total = zero_f32x16()
        for _ in range(chunks):
            s, m = block(w, x_scales, x_sums)
            t, n = block(w + block_bytes, x_scales + 4, x_sums + 4)
            packed = codes(w)
            dots = dot_u8i8(zero_i32x16(), packed, load_u8x64(x))
            if both:
                dots = dot_u8i8(up_8(dots), packed, load_u8x64(low))
            total = fma_f32x16(float_i32x16(dots), pairs_f32x16(s, t), total + pairs_f32x16(m / 8, n / 8))
            w, x, low, x_scales, x_sums = w + 2 * block_bytes, x + 64, low + 64, x_scales + 8, x_sums + 8
        return add_halves(total)

    return tail


@operation(f32x8, f32x16)
def add_halves(builder, value):
    return builder.fadd(slice_of(builder, value, 0, 8), slice_of(builder, value, 8, 16))


def make_tails(format, tokens, rows, planes):
    """(w, bytes between rows, x, low, c, n, their strides) -> the totals to begin with: `tail` for all tokens."""
    tail, group_bytes, sums_bytes = make_tail(format, planes), format.group_bytes, 1024 // format.sub_block
    vector = f32x16 if rows == 2 else f32x8
    totals_type = types.UniTuple(vector, tokens)

    @operation(totals_type)
    def zeros(builder):
        return as_tuple(builder, [ir.Constant(vector.llvm, None)] * tokens)

    @operation(totals_type, totals_type, vector, int64)
    def put(builder, totals, value, token):
        """The totals with one replaced."""
        chosen = [builder.icmp_signed("==", token, I64(t)) for t in range(tokens)]
        pairs = zip(elements(builder, totals), chosen, strict=True)
        return as_tuple(builder, [builder.select(here, value, total) for total, here in pairs])

    @inlined
    def tails(w, step, x, low, x_stride, c, c_stride, n, n_stride):
        groups, chunks, totals = x_stride // 256, x_stride % 256 // 64, zeros()
        w, x, low, c = w + groups * group_bytes, x + groups * 256, low + groups * 256, c + groups * 32
        n += groups * sums_bytes
        for t in range(tokens):
            value = tail(w, x, low, c, n, chunks)
            if rows == 2:
                value = concatenate_f32x16(value, tail(w + step, x, low, c, n, chunks))
            totals = put(totals, value, t)
            x, low, c, n = x + x_stride, low + x_stride, c + c_stride, n + n_stride
        return totals

    return tails
