"""Operations that precede most products, fused with the quantization of their results (quantize.py).

That saves a launch each.
"""

from numba import cuda

from localllm.kernels.cuda.device import device, f32_value, float32, lane, load_4f32, load_i64, store_4f32
from localllm.kernels.cuda.elementwise.formulas import swiglu_of
from localllm.kernels.cuda.elementwise.norms import inverse_root
from localllm.kernels.cuda.matmul.quantize import LANES, quantize_32
from localllm.kernels.cuda.reductions import block_sum


@device
def store_8(y, a, b):
    """Store eight numbers."""
    store_4f32(y, a[0], a[1], a[2], a[3])
    store_4f32(y + 16, b[0], b[1], b[2], b[3])


@device
def scaled(x, scale, weight):
    """Return four numbers of x times the scale and their weights."""
    a, w = load_4f32(x), load_4f32(weight)
    return a[0] * scale * w[0], a[1] * scale * w[1], a[2] * scale * w[2], a[3] * scale * w[3]


def norm_quantize(count, x, weight, y, stride, columns, group, epsilon, codes, scales, sums):
    """Apply rms_norm to whole rows (group = columns), and quantize them; a block of threads for each row."""
    row = cuda.blockIdx.x
    if row >= load_i64(count):
        return
    source, squares, column = x + row * stride, float32(0), 4 * cuda.threadIdx.x
    while column < columns:
        a = load_4f32(source + 4 * column)
        squares += a[0] * a[0] + a[1] * a[1] + a[2] * a[2] + a[3] * a[3]
        column += 4 * cuda.blockDim.x
    scale = inverse_root(block_sum(squares) / float32(columns), f32_value(epsilon))
    units, number, part = columns // 32, cuda.threadIdx.x // LANES, lane() & LANES - 1
    while number - lane() // LANES < units:  # all threads of a warp continue together
        unit = min(number, units - 1)
        at = 128 * unit + 32 * part
        a, b = scaled(source + at, scale, weight + at), scaled(source + at + 16, scale, weight + at + 16)
        in_range = number < units
        if in_range:
            store_8(y + row * stride + at, a, b)
        token = codes + row * 2 * columns
        quantize_32(a, b, in_range, units, row * units + unit, unit, token, scales, sums)
        number += cuda.blockDim.x // LANES


@device
def four_of_swiglu(gate, up):
    """Compute four numbers of SwiGLU."""
    g, u = load_4f32(gate), load_4f32(up)
    return swiglu_of(g[0], u[0]), swiglu_of(g[1], u[1]), swiglu_of(g[2], u[2]), swiglu_of(g[3], u[3])


def swiglu_quantize(count, gate, up, y, stride, columns, codes, scales, sums):
    """Apply SwiGLU, and quantize the result; four threads for every 32 columns."""
    units = columns // 32
    total = load_i64(count) * units
    if total == 0:
        return
    number = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) // LANES
    place = min(number, total - 1)  # all threads of a warp continue, because quantize_32 needs them
    row, unit = place // units, place % units
    at = row * stride + 128 * unit + 32 * (lane() & LANES - 1)
    a, b = four_of_swiglu(gate + at, up + at), four_of_swiglu(gate + at + 16, up + at + 16)
    if number < total:
        store_8(y + at, a, b)
    quantize_32(a, b, number < total, units, place, unit, codes + row * 2 * columns, scales, sums)
