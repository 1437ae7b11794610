"""Everything between the matrix products that treats tokens one by one.

Rows of activations are padded to a multiple of 16 columns; what the padding holds means nothing.
"""

from math import cos, sin, sqrt

from numba import float32

from localllm.kernels.cpu.signature import argument, argument_f32, device, kernel
from localllm.kernels.simd import (
    exp_f32x16,
    fma_f32x16,
    keep_lanes,
    load_f32,
    load_f32x16,
    load_f64,
    load_i64,
    reciprocal_f32x16,
    splat_f32x16,
    store_bf16x16,
    store_f32,
    store_f32x16,
    sum_f32x16,
    zero_f32x16,
)


@kernel
def rms_norm(a, part, parts, thread):
    """y = x / sqrt(mean(x^2) + epsilon) * weight.

    Arguments: 0 address of the token count, 1 x, 2 weight (padded), 3 y, 4 bytes between tokens,
    5 columns, 6 epsilon.
    """
    weight, stride, columns = argument(a, 2), argument(a, 4), argument(a, 5)
    tokens = load_i64(argument(a, 0))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y, squares = argument(a, 1) + t * stride, argument(a, 3) + t * stride, zero_f32x16()
        for i in range(0, columns, 16):
            v = keep_lanes(load_f32x16(x + i * 4), columns - i, float32(0.0))
            squares = fma_f32x16(v, v, squares)
        mean = sum_f32x16(squares) / float32(columns)
        scale = splat_f32x16(float32(1.0) / float32(sqrt(mean + argument_f32(a, 6))))
        for i in range(0, stride, 64):
            store_f32x16(y + i, load_f32x16(x + i) * scale * load_f32x16(weight + i))


@kernel
def add(a, part, parts, thread):
    """y = x + z. Arguments: 0 address of the token count, 1 x, 2 z, 3 bytes between tokens of z (0: one row for all),
    4 y, 5 bytes between tokens."""
    stride, tokens = argument(a, 5), load_i64(argument(a, 0))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, z, y = argument(a, 1) + t * stride, argument(a, 2) + t * argument(a, 3), argument(a, 4) + t * stride
        for i in range(0, stride, 64):
            store_f32x16(y + i, load_f32x16(x + i) + load_f32x16(z + i))


@kernel
def swiglu(a, part, parts, thread):
    """y = gate * sigmoid(gate) * up.

    Arguments: 0 address of the token count, 1 gate, 2 up, 3 y, 4 bytes between tokens.
    """
    stride = argument(a, 4)
    vectors = load_i64(argument(a, 0)) * (stride // 64)
    for i in range(vectors * part // parts, vectors * (part + 1) // parts):
        gate = load_f32x16(argument(a, 1) + i * 64)
        one = splat_f32x16(1.0)
        sigmoid = reciprocal_f32x16(one + exp_f32x16(zero_f32x16() - gate))
        store_f32x16(argument(a, 3) + i * 64, gate * sigmoid * load_f32x16(argument(a, 2) + i * 64))


@kernel
def round_bf16(a, part, parts, thread):
    """y = x in BF16. Arguments: 0 address of the token count, 1 x f32, 2 bytes between tokens, 3 y, 4 bytes between its
    tokens."""
    tokens, stride = load_i64(argument(a, 0)), argument(a, 2)
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = argument(a, 1) + t * stride, argument(a, 3) + t * argument(a, 4)
        for i in range(0, stride, 64):
            store_bf16x16(y + i // 2, load_f32x16(x + i))


@kernel
def select(a, part, parts, thread):
    """y[i] = x[rows[i]]. Arguments: 0 address of the number of rows, 1 x, 2 rows int64, 3 y, 4 bytes between tokens."""
    stride, count = argument(a, 4), load_i64(argument(a, 0))
    for t in range(count * part // parts, count * (part + 1) // parts):
        x, y = argument(a, 1) + load_i64(argument(a, 2) + t * 8) * stride, argument(a, 3) + t * stride
        for i in range(0, stride, 64):
            store_f32x16(y + i, load_f32x16(x + i))


@kernel
def angles(a, part, parts, thread):
    """Cosine and sine of every position's rotation angles.

    Arguments: 0 address of the token count, 1 positions int64, 2 frequencies f64 [pairs], 3 pairs,
    4 table f32 [tokens, 2, pairs], 5 factor for both.
    """
    pairs, tokens, factor = argument(a, 3), load_i64(argument(a, 0)), argument_f32(a, 5)
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        position, table = float(load_i64(argument(a, 1) + t * 8)), argument(a, 4) + t * pairs * 8
        for i in range(pairs):
            angle = position * load_f64(argument(a, 2) + i * 8)
            store_f32(table + i * 4, float32(cos(angle)) * factor)
            store_f32(table + (pairs + i) * 4, float32(sin(angle)) * factor)


@device
def rotate(x, y, cosine, sine):
    """Turn the pair of numbers at two addresses."""
    u, v = load_f32(x), load_f32(y)
    store_f32(x, u * cosine - v * sine)
    store_f32(y, u * sine + v * cosine)


@kernel
def rope(a, part, parts, thread):
    """Rotate the heads of x in place.

    Arguments: 0 address of the token count, 1 x [tokens, heads, head dimension], 2 bytes between tokens, 3 heads,
    4 head dimension, 5 table of `angles`, 6 pairs, 7 floats from pair to pair, 8 floats between the two of a pair
    (2 and 1 for interleaved pairs, 1 and the number of pairs for split halves).
    """
    heads, head_dim, pairs = argument(a, 3), argument(a, 4), argument(a, 6)
    step, apart, total = argument(a, 7) * 4, argument(a, 8) * 4, load_i64(argument(a, 0)) * argument(a, 3)
    for i in range(total * part // parts, total * (part + 1) // parts):
        table = argument(a, 5) + i // heads * pairs * 8
        x = argument(a, 1) + i // heads * argument(a, 2) + i % heads * head_dim * 4
        for k in range(pairs):
            first = x + k * step
            rotate(first, first + apart, load_f32(table + k * 4), load_f32(table + (pairs + k) * 4))
