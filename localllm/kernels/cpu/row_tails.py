"""The columns of a row behind its last group of 256, in chunks of 64: for rows_quantized.py."""

from numba import float32

from localllm.kernels.cpu.signature import device, inlined
from localllm.kernels.simd import (
    float_i32x16,
    fma_f32x16,
    load_f32,
    load_u8x64,
    make_dot,
    make_shift_i32,
    pairs_f32x16,
    zero_f32x16,
    zero_i32x16,
)

up_8 = make_shift_i32(True, 8)


def make_tail(format, planes):
    """(w, x, low, x_scales, x_sums, chunks) -> what the 64-column chunks behind the last group add up to: f32x16."""
    if format.chunk is None:
        return device(lambda w, x, low, x_scales, x_sums, chunks: zero_f32x16())
    block_bytes, codes, scale, minimum = format.chunk
    offset, both, dot = float32(-format.offset), planes == 2, make_dot(format.largest)

    @device
    def block(w, x_scale, x_sum):
        """A block's scale with its token's, and what its minimum adds."""
        s = scale(w)
        return s * load_f32(x_scale), (s * offset if minimum is None else minimum(w)) * load_f32(x_sum)

    @inlined
    def tail(w, x, low, x_scales, x_sums, chunks):
        total = zero_f32x16()
        for _ in range(chunks):
            s, m = block(w, x_scales, x_sums)
            t, n = block(w + block_bytes, x_scales + 8, x_sums + 8)
            packed = codes(w)
            dots = dot(zero_i32x16(), packed, load_u8x64(x))
            if both:
                dots = dot(up_8(dots), packed, load_u8x64(low))
            total = fma_f32x16(float_i32x16(dots), pairs_f32x16(s, t), total + pairs_f32x16(m / 8, n / 8))
            w, x, low, x_scales, x_sums = w + 2 * block_bytes, x + 64, low + 64, x_scales + 16, x_sums + 16
        return total

    return tail
