"""Products of quantized weights, in planes, with few tokens. Weights are read once for up to 8 tokens.

A block of threads computes ROWS rows of the result. Each thread takes units of 32 weights, a block's width apart,
unpacks them to bytes, and multiplies them with both planes of the activations, four bytes at a time. Activations are
loaded for both rows at once: they come from the L1 cache, which would otherwise be the bottleneck (68 bytes of
activations for 18 of Q4_0).
"""

from numba import cuda, int32

from localllm.kernels.cuda.device import (
    WARP,
    device,
    dot4,
    float32,
    lane,
    load_2f32,
    load_4i32,
    load_f32,
    load_i64,
    store_f32,
)
from localllm.kernels.cuda.matmul.planes import UNIT
from localllm.kernels.cuda.matmul.units import UNITS
from localllm.kernels.cuda.reductions import warp_sum

ROWS = 2  # rows of a block
WARPS = 4  # most warps of a block
NOTHING = float32(0)


@device
def work_of_block(count, active, active_count, expert_bytes):
    """Return the byte offset of this block's matrix, and the first and the end of its rows of activations."""
    if active_count == 0:
        return 0, 0, load_i64(count)
    if cuda.blockIdx.y >= load_i64(active_count):
        return 0, 0, 0
    expert = active + 24 * cuda.blockIdx.y
    first = load_i64(expert + 8)
    return load_i64(expert) * expert_bytes, first, first + load_i64(expert + 16)


def each_token(tokens, step):
    """Make a function that applies step(total, token, work) -> total to `tokens` tokens, unrolled.

    Unrolling keeps the totals in registers. They are nested pairs: (total of the first token, (total of the second,
    ...)).
    """
    if tokens == 1:
        return step
    others = each_token(tokens - 1, step)

    @device
    def apply_to_all(totals, token, work):
        return step(totals[0], token, work), others(totals[1], token + 1, work)

    return apply_to_all


def nested(tokens, total):
    """Return `tokens` copies of a total as nested pairs, see each_token."""
    return total if tokens == 1 else (total, nested(tokens - 1, total))


@device
def share_sums(total, token, work):
    """Store this warp's sums of a token's two rows to shared memory, float32 [warps, tokens, ROWS]."""
    shared, first, tokens = work
    upper, lower = warp_sum(total[0]), warp_sum(total[1])
    if lane() == 0:
        place = (cuda.threadIdx.x // WARP * tokens + token - first) * ROWS
        shared[place] = upper
        shared[place + 1] = lower
    return total


@device
def store_sums(shared, size, row, rows, first, end, y, y_stride):
    """Add up the sums of all warps, `size` numbers each, and store them to y. All threads of the block must call it."""
    cuda.syncthreads()
    i = cuda.threadIdx.x
    while i < size:
        token, result_row = first + i // ROWS, row + i % ROWS
        if token < end and result_row < rows:
            total = float32(0)
            for warp in range(cuda.blockDim.x // WARP):
                total += shared[warp * size + i]
            store_f32(y + token * y_stride + 4 * result_row, total)
        i += cuda.blockDim.x
    cuda.syncthreads()


@device
def dot_16(codes, half, high, low):
    """Multiply 16 codes with both planes of 16 activations; return the sum, an integer in units of the low plane.

    half: 0 for the unit's first 16 codes, 1 for the last.
    """
    upper, lower = 0, 0
    for i in range(4):
        upper = dot4(codes[4 * half + i], high[i], upper)
        lower = dot4(codes[4 * half + i], low[i], lower)
    return int32(256 * upper + lower)


def make_product(two_scales, minimums):
    """Make a function that multiplies a unit with a token's activations.

    two_scales: whether each 16 weights have a scale; minimums: whether there are minimums.
    """

    @device
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
    """Make a function (total, token, work) that multiplies two rows' units with a token and adds to its totals."""

    @device
    def step(total, token, work):
        upper, lower, columns, unit, codes, scales, sums, end = work
        if token >= end:
            return total
        units = columns // UNIT
        x, place = codes + token * 2 * columns + 16 * unit, token * units + unit
        high, last_high = load_4i32(x), load_4i32(x + 16 * units)
        low, last_low = load_4i32(x + 32 * units), load_4i32(x + 48 * units)
        scale = load_f32(scales + 4 * place)
        halves = load_2f32(sums + 8 * place) if minimums else (NOTHING, NOTHING)
        return (
            total[0] + product(upper, high, last_high, low, last_low, scale, halves),
            total[1] + product(lower, high, last_high, low, last_low, scale, halves),
        )

    return step


def make(name):
    """Make the kernel for a number of tokens at a time and a format, as in 8-Q4_K."""
    digits, _, format_name = name.partition("-")
    tokens = int(digits)
    read, two_scales, minimums = UNITS[format_name]
    add_unit = each_token(tokens, make_step(minimums, make_product(two_scales, minimums)))
    share = each_token(tokens, share_sums)
    nothing, shared_size = nested(tokens, (NOTHING, NOTHING)), tokens * ROWS * WARPS

    def linear_planes(
        count, weights, row_bytes, rows, columns, codes, scales, sums, y, y_stride, active, active_count, expert_bytes,
        experts,
    ):  # fmt: skip
        shared = cuda.shared.array(shared_size, float32)
        start, first, end = work_of_block(count, active, active_count, expert_bytes)
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
