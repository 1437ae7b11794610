"""Products of weights in F32, F16 or BF16 with few tokens, in float32: a warp for each row of the matrix."""

from numba import cuda

from localllm.kernels.cuda.device import (
    WARP,
    bits,
    device,
    f16_value,
    f32_value,
    float32,
    lane,
    load_4f32,
    load_4i32,
    load_f32,
    load_u16,
    store_f32,
    stream_4i32,
)
from localllm.kernels.cuda.matmul.linear_planes import each_token, nested, work_of_block
from localllm.kernels.cuda.reductions import warp_sum


@device
def two_f16(word):
    """Convert two float16 in an int32 to float32."""
    return f16_value(word & 0xFFFF), f16_value(bits(word, 16, 0xFFFF))


@device
def two_bf16(word):
    """Convert two BF16 in an int32 to float32."""
    return f32_value(bits(word, -16, 0xFFFF0000)), f32_value(bits(word, 0, 0xFFFF0000))


@device
def eight_f32(place):
    """Load 8 float32 numbers."""
    a, b = load_4i32(place), load_4i32(place + 16)
    return (
        f32_value(a[0]), f32_value(a[1]), f32_value(a[2]), f32_value(a[3]),
        f32_value(b[0]), f32_value(b[1]), f32_value(b[2]), f32_value(b[3]),
    )  # fmt: skip


def make_eight(two):
    """Make a function that loads 8 numbers of 2 bytes each; two: converts two of them in an int32 to float32."""

    @device
    def eight(place):
        q = stream_4i32(place)
        a, b, c, d = two(q[0]), two(q[1]), two(q[2]), two(q[3])
        return a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]

    return eight


@device
def one_f16(place):
    """Load a float16 as float32."""
    return f16_value(load_u16(place))


@device
def one_bf16(place):
    """Load a BF16 as float32."""
    return f32_value(load_u16(place) << 16)


READ = {
    "F32": (eight_f32, load_f32, 4),
    "F16": (make_eight(two_f16), one_f16, 2),
    "BF16": (make_eight(two_bf16), one_bf16, 2),
}


@device
def dot_8(w, x):
    """Return the dot product of 8 weights and 8 activations at an address."""
    a, b = load_4f32(x), load_4f32(x + 16)
    total = w[0] * a[0] + w[1] * a[1] + w[2] * a[2] + w[3] * a[3]
    return total + w[4] * b[0] + w[5] * b[1] + w[6] * b[2] + w[7] * b[3]


@device
def add_8(total, token, work):
    """Add the products of 8 columns of a row and a token to the total.

    work: weights, address of x, stride, end of the tokens.
    """
    weights, x, stride, end = work
    return total + dot_8(weights, x + token * stride) if token < end else total


@device
def add_1(total, token, work):
    """Add the product of one column of a row and a token to the total.

    work: weight, address of x, stride, end of the tokens.
    """
    weight, x, stride, end = work
    return total + weight * load_f32(x + token * stride) if token < end else total


@device
def store_sum(total, token, work):
    """Store the sum of a total over the warp to y; work: address of y, stride, end of the tokens."""
    y, stride, end = work
    total = warp_sum(total)
    if lane() == 0 and token < end:
        store_f32(y + token * stride, total)
    return total


def make(name):
    """Make the kernel for a number of tokens at a time and a format, as in 8-F16."""
    digits, _, format_name = name.partition("-")
    tokens = int(digits)
    read, read_one, size = READ[format_name]
    add_eight, add_one, store = each_token(tokens, add_8), each_token(tokens, add_1), each_token(tokens, store_sum)
    nothing = nested(tokens, float32(0))

    def linear_plain(
        count, weights, row_bytes, rows, columns, x, x_stride, y, y_stride, active, active_count, expert_bytes, experts
    ):
        start, first, end = work_of_block(count, active, active_count, expert_bytes)
        row = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) // WARP
        if row >= rows:
            return
        weights += start + row * row_bytes
        while first < end:
            totals, column = nothing, 8 * lane()
            while column + 8 <= columns:
                w = read(weights + size * column)
                totals = add_eight(totals, first, (w, x + 4 * column, x_stride, end))
                column += 8 * WARP
            column = (columns & -8) + lane()
            while column < columns:
                w = read_one(weights + size * column)
                totals = add_one(totals, first, (w, x + 4 * column, x_stride, end))
                column += WARP
            store(totals, first, (y + 4 * row, y_stride, end))
            first += tokens

    return linear_plain
