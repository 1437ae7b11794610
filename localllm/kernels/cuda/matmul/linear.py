"""Products of weights with few tokens. Weights are read once for up to 8 tokens.

Weights in F32, F16 or BF16 are multiplied in float32, with a warp for each row. For quantized weights, in planes, a
block of threads computes ROWS rows of the result. Each thread processes units of 32 weights, a block's width apart: it
unpacks them to bytes and multiplies them by both planes of the activations, four bytes at a time. Activations are
loaded for both rows at once: they come from the L1 cache, which would otherwise be the bottleneck (68 bytes of
activations for 18 of Q4_0).
"""

from numba import cuda, float32, int32

from localllm.kernels.cuda import gpu
from localllm.kernels.cuda.matmul.planes import UNIT
from localllm.kernels.cuda.matmul.units import UNITS

ROWS = 2  # rows of a block
WARPS = 4  # maximum number of warps of a block
NOTHING = float32(0)


@gpu.device
def find_work(count, active, active_count, expert_bytes):
    """Return the byte offset of this block's matrix, and the range [first, end) of its rows of activations."""
    if active_count == 0:
        return 0, 0, gpu.load_i64(count)
    if cuda.blockIdx.y >= gpu.load_i64(active_count):
        return 0, 0, 0
    expert = active + 24 * cuda.blockIdx.y
    first = gpu.load_i64(expert + 8)
    return gpu.load_i64(expert) * expert_bytes, first, first + gpu.load_i64(expert + 16)


def unroll_tokens(tokens, step):
    """Build a function that applies step(total, token, work) -> total to `tokens` tokens, unrolled.

    Unrolling keeps the totals in registers: nested pairs (total of the first token, (total of the second, ...)).
    """
    if tokens == 1:
        return step
    others = unroll_tokens(tokens - 1, step)

    @gpu.device
    def apply_to_all(totals, token, work):
        return step(totals[0], token, work), others(totals[1], token + 1, work)

    return apply_to_all


def nest_totals(tokens, total):
    return total if tokens == 1 else (total, nest_totals(tokens - 1, total))


@gpu.device
def share_sums(total, token, work):
    """Store this warp's sums of a token's two rows to shared memory, float32 [warps, tokens, ROWS]."""
    shared, first, tokens = work
    upper, lower = gpu.warp_sum(total[0]), gpu.warp_sum(total[1])
    if gpu.get_lane() == 0:
        place = (cuda.threadIdx.x // gpu.WARP * tokens + token - first) * ROWS
        shared[place] = upper
        shared[place + 1] = lower
    return total


@gpu.device
def store_sums(shared, size, row, rows, first, end, y, y_stride):
    """Add up the sums of all warps and store them to y.

    size: sums per warp. All threads of the block must call it.
    """
    cuda.syncthreads()
    i = cuda.threadIdx.x
    while i < size:
        token, result_row = first + i // ROWS, row + i % ROWS
        if token < end and result_row < rows:
            total = float32(0)
            for warp in range(cuda.blockDim.x // gpu.WARP):
                total += shared[warp * size + i]
            gpu.store_f32(y + token * y_stride + 4 * result_row, total)
        i += cuda.blockDim.x
    cuda.syncthreads()


@gpu.device
def dot_16(codes, half, high, low):
    """Multiply 16 codes by both planes; return an integer in the low plane's units.

    half: 0 for the first 16 codes, 1 for the last 16.
    """
    upper, lower = 0, 0
    for i in range(4):
        upper = gpu.dot4(codes[4 * half + i], high[i], upper)
        lower = gpu.dot4(codes[4 * half + i], low[i], lower)
    return int32(256 * upper + lower)


def make_product(two_scales, minimums):
    @gpu.device
    def product(weights, high, last_high, low, last_low, scale, sums):
        codes, scales, lows = weights
        first, second = dot_16(codes, 0, high, low), dot_16(codes, 1, last_high, last_low)
        if two_scales:
            total = (scales[0] * float32(first) + scales[1] * float32(second)) * scale
        else:
            total = scales[0] * scale * float32(int32(first + second))
        if minimums and two_scales:
            total += lows[0] * sums[0] + lows[1] * sums[1]
        elif minimums:
            total += lows[0] * (sums[0] + sums[1])
        return total

    return product


def make_step(minimums, product):
    @gpu.device
    def step(total, token, work):
        upper, lower, columns, unit, codes, scales, sums, end = work
        if token >= end:
            return total
        units = columns // UNIT
        x, place = codes + token * 2 * columns + 16 * unit, token * units + unit
        high, last_high = gpu.load_4i32(x), gpu.load_4i32(x + 16 * units)
        low, last_low = gpu.load_4i32(x + 32 * units), gpu.load_4i32(x + 48 * units)
        scale = gpu.load_f32(scales + 4 * place)
        halves = gpu.load_2f32(sums + 8 * place) if minimums else (NOTHING, NOTHING)
        return (
            total[0] + product(upper, high, last_high, low, last_low, scale, halves),
            total[1] + product(lower, high, last_high, low, last_low, scale, halves),
        )

    return step


def make_linear_planes(name):
    """Build the kernel for a number of tokens at once and a format, as in 8-Q4_K."""
    digits, _, format_name = name.partition("-")
    tokens = int(digits)
    read, two_scales, minimums = UNITS[format_name]
    add_unit = unroll_tokens(tokens, make_step(minimums, make_product(two_scales, minimums)))
    share = unroll_tokens(tokens, share_sums)
    nothing, shared_size = nest_totals(tokens, (NOTHING, NOTHING)), tokens * ROWS * WARPS

    def linear_planes(
        count, weights, row_bytes, rows, columns, codes, scales, sums, y, y_stride, active, active_count, expert_bytes,
        experts,
    ):  # fmt: skip
        shared = cuda.shared.array(shared_size, float32)
        start, first, end = find_work(count, active, active_count, expert_bytes)
        units, row = columns // UNIT, cuda.blockIdx.x * ROWS
        upper_row = weights + start + row * row_bytes
        lower_row = upper_row + (row_bytes if row + 1 < rows else 0)
        while first < end:
            totals, unit = nothing, cuda.threadIdx.x
            while unit < units:
                upper, lower = read(upper_row, units, unit), read(lower_row, units, unit)
                totals = add_unit(totals, first, (upper, lower, columns, unit, codes, scales, sums, end))
                unit += cuda.blockDim.x
            share(totals, first, (shared, first, tokens))
            store_sums(shared, ROWS * tokens, row, rows, first, end, y, y_stride)
            first += tokens

    return linear_planes


@gpu.device
def convert_f16_pair(word):
    return gpu.decode_f16(word & 0xFFFF), gpu.decode_f16(gpu.shift_and_mask(word, 16, 0xFFFF))


@gpu.device
def convert_bf16_pair(word):
    return gpu.decode_f32(gpu.shift_and_mask(word, -16, 0xFFFF0000)), gpu.decode_f32(
        gpu.shift_and_mask(word, 0, 0xFFFF0000)
    )


@gpu.device
def load_eight_f32(place):
    a, b = gpu.load_4i32(place), gpu.load_4i32(place + 16)
    return (
        gpu.decode_f32(a[0]), gpu.decode_f32(a[1]), gpu.decode_f32(a[2]), gpu.decode_f32(a[3]),
        gpu.decode_f32(b[0]), gpu.decode_f32(b[1]), gpu.decode_f32(b[2]), gpu.decode_f32(b[3]),
    )  # fmt: skip


def make_load_eight(two):
    """Build a function that loads 8 values of 2 bytes each.

    two: converts the two values in an int32 to float32.
    """

    @gpu.device
    def load_eight(place):
        q = gpu.stream_4i32(place)
        a, b, c, d = two(q[0]), two(q[1]), two(q[2]), two(q[3])
        return a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]

    return load_eight


@gpu.device
def load_f16(place):
    return gpu.decode_f16(gpu.load_u16(place))


@gpu.device
def load_bf16(place):
    return gpu.decode_f32(gpu.load_u16(place) << 16)


READ = {
    "F32": (load_eight_f32, gpu.load_f32, 4),
    "F16": (make_load_eight(convert_f16_pair), load_f16, 2),
    "BF16": (make_load_eight(convert_bf16_pair), load_bf16, 2),
}


@gpu.device
def multiply_8(w, x):
    a, b = gpu.load_4f32(x), gpu.load_4f32(x + 16)
    total = w[0] * a[0] + w[1] * a[1] + w[2] * a[2] + w[3] * a[3]
    return total + w[4] * b[0] + w[5] * b[1] + w[6] * b[2] + w[7] * b[3]


@gpu.device
def add_8(total, token, work):
    """Add the products of 8 columns to the total.

    work: address of the weights, address of x, stride, end of the tokens.
    """
    weights, x, stride, end = work
    return total + multiply_8(weights, x + token * stride) if token < end else total


@gpu.device
def add_1(total, token, work):
    """Add the product of one column to the total.

    work: address of the weight, address of x, stride, end of the tokens.
    """
    weight, x, stride, end = work
    return total + weight * gpu.load_f32(x + token * stride) if token < end else total


@gpu.device
def store_sum(total, token, work):
    """Store the sum of a total over the warp to y.

    work: address of y, stride, end of the tokens.
    """
    y, stride, end = work
    total = gpu.warp_sum(total)
    if gpu.get_lane() == 0 and token < end:
        gpu.store_f32(y + token * stride, total)
    return total


def make_linear_plain(name):
    """Build the kernel for a number of tokens at once and a format, as in 8-F16."""
    digits, _, format_name = name.partition("-")
    tokens = int(digits)
    read, read_one, size = READ[format_name]
    add_eight, add_one, store = (
        unroll_tokens(tokens, add_8),
        unroll_tokens(tokens, add_1),
        unroll_tokens(tokens, store_sum),
    )
    nothing = nest_totals(tokens, float32(0))

    def linear_plain(
        count, weights, row_bytes, rows, columns, x, x_stride, y, y_stride, active, active_count, expert_bytes, experts
    ):
        start, first, end = find_work(count, active, active_count, expert_bytes)
        row = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) // gpu.WARP
        if row >= rows:
            return
        weights += start + row * row_bytes
        while first < end:
            totals, column = nothing, 8 * gpu.get_lane()
            while column + 8 <= columns:
                w = read(weights + size * column)
                totals = add_eight(totals, first, (w, x + 4 * column, x_stride, end))
                column += 8 * gpu.WARP
            column = (columns & -8) + gpu.get_lane()
            while column < columns:
                w = read_one(weights + size * column)
                totals = add_one(totals, first, (w, x + 4 * column, x_stride, end))
                column += gpu.WARP
            store(totals, first, (y + 4 * row, y_stride, end))
            first += tokens

    return linear_plain
