"""Quantize activations to 16-bit integers in two planes of bytes: x = scale * (256 * high + low).

32 values share a scale. The layout of the bytes is the order in which the threads of linear.py read them:

    codes   int8 [tokens, 4, columns / 32, 16]; of 32 columns, the 4 are: the first 16 of the high plane, the last 16,
            and the same of the low plane
    scales  f32 [tokens, columns / 32]
    sums    f32 [tokens, columns / 16], of the rounded x

If one of 32 values is not finite, their scale is NaN, and so is every product. The operations that usually precede
products are fused with the quantization of their results, which saves a launch each.

For products on tensor cores activations become float16, or BF16 in two planes. Float16 has 11 significant bits but a
small range: each row is divided by a separate scale first, and the row of the product is multiplied by it. BF16, which
weights in BF16 need for their range, has 8 significant bits: the rounding error is a second plane, for a second
product.
"""

import math

from numba import cuda, float32

from localllm.kernels.cuda import gpu
from localllm.kernels.cuda.elementwise.formulas import compute_swiglu
from localllm.kernels.cuda.elementwise.rowwise import compute_inverse_root

LANES = 4  # threads that share 32 values, 8 each
LARGEST = float32(127 * 256)
TINY = float32(1e-30)  # 32 values that are all smaller become zeros
NAN, INFINITY = float32(math.nan), float32(math.inf)


@gpu.device
def max_or_nan(a, b):
    """Return the larger value, or NaN if one of them is NaN."""
    return b if b > a or b != b else a


@gpu.device
def find_largest_of_4(x):
    """Return the largest magnitude of four values, or NaN if one of them is NaN."""
    return max_or_nan(max_or_nan(abs(x[0]), abs(x[1])), max_or_nan(abs(x[2]), abs(x[3])))


@gpu.device
def store_4(x, inverse, high, low):
    """Quantize four values, and store them in both planes; return the sum of their integers."""
    upper, lower, total = 0, 0, 0
    for i in range(4):
        code = gpu.round_to_int(x[i] * inverse)
        above = code + 128 >> 8
        upper |= (above & 0xFF) << 8 * i
        lower |= (code & 0xFF) << 8 * i
        total += code
    gpu.store_i32(high, upper)
    gpu.store_i32(low, lower)
    return total


@gpu.device
def quantize_32(a, b, in_range, units, place, unit, codes, scales, sums):
    """Quantize 32 values together with three neighbouring lanes.

    a, b: the 8 values of this lane; in_range: whether this lane stores its results; units: units of a row; unit: the
    unit's index in its row; place: index of the unit's scale among all tokens; codes: address of the token's codes. All
    lanes of the warp must call it.
    """
    part = gpu.get_lane() & LANES - 1
    largest = max_or_nan(find_largest_of_4(a), find_largest_of_4(b))
    largest = max_or_nan(largest, gpu.load_from_lane(largest, 1))
    largest = max_or_nan(largest, gpu.load_from_lane(largest, 2))
    finite = largest < INFINITY
    inverse = LARGEST / largest if finite and largest > TINY else float32(0)
    step = largest / LARGEST if finite else NAN
    total = 0
    if in_range and finite:
        high = codes + 16 * (unit + (part >> 1) * units) + 8 * (part & 1)
        low = high + 32 * units
        total = store_4(a, inverse, high, low) + store_4(b, inverse, high + 4, low + 4)
    total = float32(total)
    total += gpu.load_from_lane(total, 1)
    if in_range and part & 1 == 0:
        gpu.store_f32(sums + 8 * place + 2 * part, total * step)
        if part == 0:
            gpu.store_f32(scales + 4 * place, step)


def quantize_planes(count, x, stride, columns, codes, scales, sums):
    units = columns // 32
    total = gpu.load_i64(count) * units
    number = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) // LANES
    place = min(number, total - 1)  # all threads of a warp continue, because quantize_32 needs them
    if total == 0:
        return
    token, unit = place // units, place % units
    source = x + token * stride + 128 * unit + 32 * (gpu.get_lane() & LANES - 1)
    quantize_32(
        gpu.load_4f32(source), gpu.load_4f32(source + 16), number < total, units, place, unit,
        codes + token * 2 * columns, scales, sums,
    )  # fmt: skip


@gpu.device
def store_8(y, a, b):
    gpu.store_4f32(y, a[0], a[1], a[2], a[3])
    gpu.store_4f32(y + 16, b[0], b[1], b[2], b[3])


@gpu.device
def scale_values(x, scale, weight):
    a, w = gpu.load_4f32(x), gpu.load_4f32(weight)
    return a[0] * scale * w[0], a[1] * scale * w[1], a[2] * scale * w[2], a[3] * scale * w[3]


def norm_quantize(count, x, weight, y, stride, columns, group, epsilon, codes, scales, sums):
    """Apply rms_norm to whole rows (group = columns), and quantize them.

    There is a block of threads for each row.
    """
    row = cuda.blockIdx.x
    if row >= gpu.load_i64(count):
        return
    source, squares, column = x + row * stride, float32(0), 4 * cuda.threadIdx.x
    while column < columns:
        a = gpu.load_4f32(source + 4 * column)
        squares += a[0] * a[0] + a[1] * a[1] + a[2] * a[2] + a[3] * a[3]
        column += 4 * cuda.blockDim.x
    scale = compute_inverse_root(gpu.block_sum(squares) / float32(columns), gpu.decode_f32(epsilon))
    units, number, part = columns // 32, cuda.threadIdx.x // LANES, gpu.get_lane() & LANES - 1
    while number - gpu.get_lane() // LANES < units:  # all threads of a warp continue together
        unit = min(number, units - 1)
        at = 128 * unit + 32 * part
        a, b = scale_values(source + at, scale, weight + at), scale_values(source + at + 16, scale, weight + at + 16)
        in_range = number < units
        if in_range:
            store_8(y + row * stride + at, a, b)
        token = codes + row * 2 * columns
        quantize_32(a, b, in_range, units, row * units + unit, unit, token, scales, sums)
        number += cuda.blockDim.x // LANES


@gpu.device
def compute_4_swiglu(gate, up):
    g, u = gpu.load_4f32(gate), gpu.load_4f32(up)
    return (
        compute_swiglu(g[0], u[0]),
        compute_swiglu(g[1], u[1]),
        compute_swiglu(g[2], u[2]),
        compute_swiglu(g[3], u[3]),
    )


def swiglu_quantize(count, gate, up, y, stride, columns, codes, scales, sums):
    units = columns // 32
    total = gpu.load_i64(count) * units
    if total == 0:
        return
    number = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) // LANES
    place = min(number, total - 1)  # all threads of a warp continue, because quantize_32 needs them
    row, unit = place // units, place % units
    at = row * stride + 128 * unit + 32 * (gpu.get_lane() & LANES - 1)
    a, b = compute_4_swiglu(gate + at, up + at), compute_4_swiglu(gate + at + 16, up + at + 16)
    if number < total:
        store_8(y + at, a, b)
    quantize_32(a, b, number < total, units, place, unit, codes + row * 2 * columns, scales, sums)


LARGEST_OF_ROW = float32(
    1024.0
)  # of a row: sums of 65536 products of it and weights up to 1 stay far below float32's limit


def halve(count, x, stride, columns, y, y_stride, scales):
    """Write x / scale to y in float16, with zeros up to a multiple of 8 columns.

    scales: float32 [tokens].
    """
    row = cuda.blockIdx.x
    if row >= gpu.load_i64(count):
        return
    source, target = x + row * stride, y + row * y_stride
    largest = float32(0)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        size = abs(gpu.load_f32(source + 4 * column))
        largest = size if size > largest or size != size else largest
    largest = gpu.block_max(largest)
    scale = largest / LARGEST_OF_ROW if largest != float32(0) else float32(1)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        gpu.store_u16(target + 2 * column, gpu.encode_f16(gpu.load_f32(source + 4 * column) / scale))
    if cuda.threadIdx.x == 0:
        gpu.store_f32(scales + 4 * row, scale)


def scale_rows(count, y, stride, columns, scales):
    row = cuda.blockIdx.x
    if row >= gpu.load_i64(count):
        return
    scale = gpu.load_f32(scales + 4 * row)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        place = y + row * stride + 4 * column
        gpu.store_f32(place, gpu.load_f32(place) * scale)


def split_bf16(count, x, stride, columns, high, low, y_stride):
    """Write two planes of x in BF16, with x = high + low: together they have 16 significant bits."""
    row = cuda.blockIdx.x
    if row >= gpu.load_i64(count):
        return
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        value = gpu.load_f32(x + row * stride + 4 * column)
        upper = (gpu.encode_f32(value) >> 16) & 0xFFFF  # cut, not rounded: the rest has the same sign
        gpu.store_u16(high + row * y_stride + 2 * column, upper)
        rest = value - gpu.decode_f32(upper << 16)
        gpu.store_u16(low + row * y_stride + 2 * column, (gpu.encode_f32(rest) >> 16) & 0xFFFF)
