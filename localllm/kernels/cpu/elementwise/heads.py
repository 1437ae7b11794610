"""Operations on equal segments of a row: heads, or parallel residual streams.

They are gates, sums and weighted sums. A segment need not have a multiple of 16 columns.
"""

from numba import float32

from localllm.kernels import simd
from localllm.kernels.cpu.signature import device, kernel, load_argument, load_argument_f32
from localllm.kernels.table import HEAD_DOTS, MIX_STREAMS, MULTIPLY_HEADS, SINKHORN, SOFTMAX


@kernel
def multiply_heads(a, part, parts, thread):
    heads, columns = load_argument(a, MULTIPLY_HEADS.heads), load_argument(a, MULTIPLY_HEADS.columns)
    head_dim, total = columns // heads, simd.load_i64(load_argument(a, MULTIPLY_HEADS.count)) * heads
    for i in range(total * part // parts, total * (part + 1) // parts):
        t, head = i // heads, i % heads
        at = t * load_argument(a, MULTIPLY_HEADS.stride) + head * head_dim * 4
        x, y = load_argument(a, MULTIPLY_HEADS.x) + at, load_argument(a, MULTIPLY_HEADS.y) + at
        gates = load_argument(a, MULTIPLY_HEADS.gates) + t * load_argument(a, MULTIPLY_HEADS.gates_stride)
        gate = simd.splat_f32x16(simd.load_f32(gates + head * 4))
        for k in range(0, head_dim, 16):
            lanes = min(16, head_dim - k)
            simd.store_lanes_f32x16(y + k * 4, simd.load_lanes_f32x16(x + k * 4, lanes) * gate, lanes)


@device
def compute_softmax(x, y, size, epsilon):
    """Write the softmax of `size` values, plus epsilon, to y; NaN if a value is not finite."""
    top, total = float32(-3e38), float32(0.0)
    for j in range(size):
        number = simd.load_f32(x + j * 4)
        top, total = max(top, number), total + (number - number)
    for j in range(0, size, 16):
        lanes = min(16, size - j)
        simd.store_lanes_f32x16(
            y + j * 4, simd.exp_f32x16(simd.load_lanes_f32x16(x + j * 4, lanes) - simd.splat_f32x16(top)), lanes
        )
    for j in range(size):
        total += simd.load_f32(y + j * 4)
    for j in range(size):
        simd.store_f32(y + j * 4, simd.load_f32(y + j * 4) / total + epsilon)


@kernel
def softmax(a, part, parts, thread):
    columns, count = load_argument(a, SOFTMAX.columns), simd.load_i64(load_argument(a, SOFTMAX.count))
    for t in range(count * part // parts, count * (part + 1) // parts):
        at = t * load_argument(a, SOFTMAX.stride)
        compute_softmax(load_argument(a, SOFTMAX.x) + at, load_argument(a, SOFTMAX.y) + at, columns, float32(0.0))


@device
def divide_by_sums(y, size, across, along, epsilon):
    """Divide the elements of each row of a [size, size] matrix by their sum plus epsilon.

    across, along: bytes from row to row, and from element to element; exchanged, they normalize columns.
    """
    for i in range(size):
        total = epsilon
        for j in range(size):
            total += simd.load_f32(y + i * across + j * along)
        for j in range(size):
            place = y + i * across + j * along
            simd.store_f32(place, simd.load_f32(place) / total)


@kernel
def sinkhorn(a, part, parts, thread):
    """Scale each row's matrix [size, size] until its rows and columns add up to 1, then transpose it."""
    size, count = load_argument(a, SINKHORN.size), simd.load_i64(load_argument(a, SINKHORN.count))
    epsilon, stride = load_argument_f32(a, SINKHORN.epsilon), load_argument(a, SINKHORN.stride)
    for t in range(count * part // parts, count * (part + 1) // parts):
        x, y = load_argument(a, SINKHORN.x) + t * stride, load_argument(a, SINKHORN.y) + t * stride
        for i in range(size):
            compute_softmax(x + i * size * 4, y + i * size * 4, size, epsilon)
        divide_by_sums(y, size, 4, size * 4, epsilon)
        for _ in range(load_argument(a, SINKHORN.iterations) - 1):
            divide_by_sums(y, size, size * 4, 4, epsilon)
            divide_by_sums(y, size, 4, size * 4, epsilon)
        for i in range(size):
            for j in range(i):
                upper, lower = y + (i * size + j) * 4, y + (j * size + i) * 4
                number = simd.load_f32(upper)
                simd.store_f32(upper, simd.load_f32(lower))
                simd.store_f32(lower, number)


@device
def dot(x, z, count):
    sums, whole = simd.zero_f32x16(), count // 16 * 16
    for i in range(0, whole, 16):
        sums = simd.fma_f32x16(simd.load_f32x16(x + i * 4), simd.load_f32x16(z + i * 4), sums)
    total = simd.sum_f32x16(sums)
    for i in range(whole, count):
        total += simd.load_f32(x + i * 4) * simd.load_f32(z + i * 4)
    return total


@kernel
def head_dots(a, part, parts, thread):
    heads, head_dim = load_argument(a, HEAD_DOTS.heads), load_argument(a, HEAD_DOTS.head_dim)
    total = simd.load_i64(load_argument(a, HEAD_DOTS.count)) * heads
    for i in range(total * part // parts, total * (part + 1) // parts):
        t, head = i // heads, i % heads
        at = t * load_argument(a, HEAD_DOTS.x_stride) + head * head_dim * 4
        y = load_argument(a, HEAD_DOTS.y) + t * load_argument(a, HEAD_DOTS.stride) + head * 4
        simd.store_f32(
            y, float32(dot(load_argument(a, HEAD_DOTS.x) + at, load_argument(a, HEAD_DOTS.z) + at, head_dim))
        )


@kernel
def mix_streams(a, part, parts, thread):
    streams, width = load_argument(a, MIX_STREAMS.streams), load_argument(a, MIX_STREAMS.width)
    outputs = load_argument(a, MIX_STREAMS.columns) // width
    total = simd.load_i64(load_argument(a, MIX_STREAMS.count)) * outputs
    for i in range(total * part // parts, total * (part + 1) // parts):
        t, stream = i // outputs, i % outputs
        x = load_argument(a, MIX_STREAMS.x) + t * load_argument(a, MIX_STREAMS.x_stride)
        y = load_argument(a, MIX_STREAMS.y) + t * load_argument(a, MIX_STREAMS.stride) + stream * width * 4
        weights = (
            load_argument(a, MIX_STREAMS.weights)
            + t * load_argument(a, MIX_STREAMS.weights_stride)
            + stream * streams * 4
        )
        for k in range(0, width, 16):
            lanes, sums = min(16, width - k), simd.zero_f32x16()
            for j in range(streams):
                number = simd.load_lanes_f32x16(x + (j * width + k) * 4, lanes)
                sums = simd.fma_f32x16(number, simd.splat_f32x16(simd.load_f32(weights + j * 4)), sums)
            simd.store_lanes_f32x16(y + k * 4, sums, lanes)
