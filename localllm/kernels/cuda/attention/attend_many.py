"""Attention of many tokens on tensor cores (FlashAttention-2).

Each row has a running maximum and a running sum. The query heads that share a key-value head are rows of one matrix, as
on the CPU: row = token * group + head in group. A block of threads computes ROWS rows of one sequence, 16 in each warp,
a "unit". It processes the keys in tiles of a page or half a page, which are copied to shared memory as float16: keys
unchanged, values transposed, two keys in a word. Scores, weights and results stay in registers; tensor_cores.py defines
their assignment to lanes.

Queries are divided by the largest magnitude of their row before they are converted to float16, and scores are
multiplied by it, so that none is too large. Weights are float16, too; they are summed before that rounding. Keys or
values of block formats that exceed float16 become infinite, and results NaN.

For heads of 128 dimensions a thread uses 255 registers and a block 35 KiB of shared memory: a multiprocessor holds 2
blocks of 4 warps for compute capabilities 8.0 to 10.0, and 1 for 7.5, which has less of that memory. Heads of 256
dimensions spill 170 bytes.
"""

from numba import cuda, float32, int32

from localllm.kernels.cuda import gpu
from localllm.kernels.cuda.attention.cache import LOADS
from localllm.kernels.cuda.attention.shared import (
    LOG2_E,
    LOWEST,
    MINUS_INFINITY,
    ONE,
    SEQUENCE_BYTES,
    THREADS,
    WARPS,
    ZERO,
    find_first_visible,
    find_last_visible,
    make_lane_reduction,
    make_softmax,
    max_or_first,
)
from localllm.kernels.cuda.tensor_cores import interleave, make_multiply, pack
from localllm.kernels.cuda.unrolled import fold, unroll, visit
from localllm.kernels.table import PAGE, SEQUENCE

ROWS = 16 * WARPS
SHARED = 48 << 10  # bytes of shared memory that a block has on every GPU
MIN_DIVISOR = float32(1e-30)  # minimum divisor of a row of queries
NOTHING = int32(0)


@gpu.device
def find_unit(sequences, sequence_count, group, unit):
    """Return the SEQUENCE to which a unit belongs, and the unit's first row in it.

    The result is 0, 0 if there is no such unit.
    """
    for i in range(gpu.load_i64(sequence_count)):
        sequence = sequences + i * SEQUENCE_BYTES
        units = (gpu.load_i64(sequence + 8 * SEQUENCE.count) * group + ROWS - 1) // ROWS
        if unit < units:
            return sequence, unit * ROWS
        unit -= units
    return 0, 0


def make_words(kind):
    """Build a function (head, d) that loads values d to d + 7 as four int32 with two float16 each."""
    if kind == "F16":
        return gpu.device(lambda head, d: gpu.load_4i32(head + d * 2))
    load = LOADS[kind]
    return gpu.device(lambda head, d: pack(load(head, d)))


def make_fill_keys(kind, keys, pieces, stride):
    """Build a function that copies keys, `pieces` times 8 values, to shared memory, [keys][stride words]."""
    words = make_words(kind)

    def store_word(i, word, place, at):
        place[at + i] = word

    put_all = visit(4, store_word)

    @gpu.device
    def fill_keys(place, base, row_bytes):
        for i in range(cuda.threadIdx.x, keys * pieces, THREADS):
            key, piece = i // pieces, i % pieces
            put_all(words(base + key * row_bytes, piece * 8), place, key * stride + piece * 4)

    return fill_keys


def make_fill_values(kind, keys, pieces, stride):
    """Build a function that copies values to shared memory, [dimensions][stride words], two keys per word.

    Keys with an index of `count` or more become zeros.
    """
    words, pairs = make_words(kind), keys // 2

    def store_word(i, word, place, at):
        place[at + i * stride] = word

    put_all, keep_if = visit(8, store_word), unroll(4, lambda i, word, inside: word if inside else NOTHING, "int32")

    @gpu.device
    def fill_values(place, base, row_bytes, count):
        for i in range(cuda.threadIdx.x, pairs * pieces, THREADS):
            key, piece = i % pairs * 2, i // pairs
            head = base + key * row_bytes
            first, second = words(head, piece * 8), words(head + row_bytes, piece * 8)
            both = interleave(keep_if(first, key < count), keep_if(second, key + 1 < count))
            put_all(both, place, piece * 8 * stride + key // 2)

    return fill_values


# A lane holds values of two rows of a matrix: value i belongs to the first row if i // 2 is even.


def get_row(i):
    """Return the index, 0 or 1, of the row to which a lane's value i belongs."""
    return i // 2 % 2


def group_by_row(count):
    return tuple(tuple(i for i in range(count) if get_row(i) == row) for row in (0, 1))


def make_scale_rows(count):
    return unroll(count, lambda i, x, by: x * by[i // 2 % 2])


LARGEST_OF_LANES = make_lane_reduction(2, 1, 4, max_or_first)
INVERSES = unroll(2, lambda i, x: ONE / x)


def make_load_queries(key_dim, steps):
    """Build a function (addresses of two rows, t, factor) that loads queries.

    It returns the queries as float16, and the factors of their scores. t: lane % 4; steps: number of segments of 16
    dimensions.
    """

    def load_query(i, sources, t):
        d = i // 8 * 16 + i % 8 // 4 * 8 + 2 * t + i % 2
        return gpu.load_f32(sources[i // 2 % 2] + d * 4) if d < key_dim else ZERO

    queries, scaled = unroll(8 * steps, load_query), make_scale_rows(8 * steps)
    sizes = unroll(8 * steps, lambda i, x: abs(x))
    largest = fold(group_by_row(8 * steps), lambda x, y: max_or_first(x, y))
    at_least, times = unroll(2, lambda i, x, least: max_or_first(least, x)), unroll(2, lambda i, x, y: x * y)

    @gpu.device
    def load_queries(sources, t, factor):
        rows = queries(sources, t)
        size = at_least(LARGEST_OF_LANES(largest(sizes(rows))), MIN_DIVISOR)
        return pack(scaled(rows, INVERSES(size))), times(size, (factor, factor))

    return load_queries


def make_finish_scores(tiles):
    """Build a function that converts the products of two rows and a tile's keys to scores.

    Scores are capped if there is a cap, reduced by distance if there are slopes, and minus infinity for keys that a row
    does not see. Element i is for key i // 4 * 8 + i % 2, counted from the lane's first key. `places`: the positions of
    the rows; `lows`, `highs`: the first and last keys that they see.
    """

    def cap_score(i, x, softcap):
        return gpu.tanh(x) * (softcap * LOG2_E)

    def add_slope(i, x, slopes, places):
        return x - slopes[i // 2 % 2] * abs(float32(int32(places[i // 2 % 2] - int32(i // 4 * 8 + i % 2))))

    def mask_range(i, x, lows, highs):
        row, key = i // 2 % 2, int32(i // 4 * 8 + i % 2)
        return x if lows[row] <= key and key <= highs[row] else MINUS_INFINITY

    cap_all, slope_all, hide = (unroll(4 * tiles, function) for function in (cap_score, add_slope, mask_range))
    by_row, minus = make_scale_rows(4 * tiles), unroll(2, lambda i, x, y: int32(x - y), "int32")

    @gpu.device
    def finish_scores(x, factors, softcap, slopes, slope, key, places, lows, highs):
        low, high = minus(lows, int32(key)), minus(highs, int32(key))
        x = by_row(x, factors)
        if softcap > ZERO:
            x = cap_all(x, softcap)
        if slopes != 0:
            x = slope_all(x, slope, minus(places, int32(key)))
        return hide(x, low, high)

    return finish_scores


def make_write(value_tiles, value_dim):
    """Build a function that divides two rows of results by their sums and writes them.

    Rows whose address is 0 are not written.
    """
    sum_of_lanes = make_lane_reduction(2, 1, 4, gpu.add)

    def store_value(i, x, by, targets, t):
        d = i // 4 * 8 + 2 * t + i % 2
        if d < value_dim and targets[i // 2 % 2] != 0:
            gpu.store_f32(targets[i // 2 % 2] + d * 4, x * by[i // 2 % 2])

    put_all = visit(4 * value_tiles, store_value)

    @gpu.device
    def write_rows(output, sums, targets, t):
        put_all(output, INVERSES(sum_of_lanes(sums)), targets, t)

    return write_rows


@gpu.device
def load_head_pair(numbers, first, second, nothing):
    """Load the values of two heads, times log2(e).

    The result is `nothing` twice if the address `numbers` is 0.
    """
    if numbers == 0:
        return nothing, nothing
    return gpu.load_f32(numbers + first * 4) * LOG2_E, gpu.load_f32(numbers + second * 4) * LOG2_E


def make_unit(of_keys, of_values, key_dim, value_dim, depth):
    steps, value_tiles = -(-key_dim // 16), -(-value_dim // 8)
    key_stride = 8 * steps + 4
    block = PAGE if 4 * PAGE * key_stride + 32 * value_tiles * (PAGE // 2 + 4) <= SHARED else PAGE // 2  # keys
    tiles, value_stride = block // 8, block // 2 + 4
    key_words, value_words = block * key_stride, 8 * value_tiles * value_stride
    fill_keys = make_fill_keys(of_keys, block, 2 * steps, key_stride)
    fill_values = make_fill_values(of_values, block, value_tiles, value_stride)
    multiply_keys = make_multiply(tiles, steps, key_stride, depth)
    multiply_values = make_multiply(value_tiles, block // 16, value_stride, depth)
    load_queries, finish_scores = make_load_queries(key_dim, steps), make_finish_scores(tiles)
    softmax = make_softmax(4 * tiles, 2, get_row, LARGEST_OF_LANES)
    faded, write = make_scale_rows(4 * value_tiles), make_write(value_tiles, value_dim)
    no_scores = unroll(4 * tiles, lambda i, nothing: ZERO)
    no_values = unroll(4 * value_tiles, lambda i, nothing: ZERO)

    @gpu.device
    def attend_unit(
        sequence, first_row, group, kv_head, q, q_stride, y, y_stride, keys, values, key_bytes, value_bytes, factor,
        softcap, window, chunked, lookahead, slopes, sinks,
    ):  # fmt: skip
        in_keys = cuda.shared.array(key_words, int32)
        in_values = cuda.shared.array(value_words, int32)
        g, t = gpu.get_lane() // 4, gpu.get_lane() % 4
        first, count = gpu.load_i64(sequence + 8 * SEQUENCE.first), gpu.load_i64(sequence + 8 * SEQUENCE.count)
        start = gpu.load_i64(sequence + 8 * SEQUENCE.length) - count
        table, last_row = gpu.load_i64(sequence + 8 * SEQUENCE.table), count * group - 1
        row = first_row + cuda.threadIdx.x // gpu.WARP * 16 + g
        above, below = min(row, last_row), min(row + 8, last_row)
        heads = kv_head * group + above % group, kv_head * group + below % group
        tokens = first + above // group, first + below // group
        positions = start + above // group, start + below // group
        lows = (int32(find_first_visible(positions[0], window, chunked) - 2 * t),
                int32(find_first_visible(positions[1], window, chunked) - 2 * t))  # fmt: skip
        places = int32(positions[0] - 2 * t), int32(positions[1] - 2 * t)
        highs = (int32(find_last_visible(positions[0], lookahead, sequence) - 2 * t),
                 int32(find_last_visible(positions[1], lookahead, sequence) - 2 * t))  # fmt: skip
        targets = (y + tokens[0] * y_stride + heads[0] * value_dim * 4 if row <= last_row else 0,
                   y + tokens[1] * y_stride + heads[1] * value_dim * 4 if row + 8 <= last_row else 0)  # fmt: skip
        a, factors = load_queries((q + tokens[0] * q_stride + heads[0] * key_dim * 4,
                                   q + tokens[1] * q_stride + heads[1] * key_dim * 4), t, factor)  # fmt: skip
        slope = load_head_pair(slopes, heads[0], heads[1], ZERO)
        tops = load_head_pair(sinks, heads[0], heads[1], LOWEST)
        sums = (ONE, ONE) if sinks != 0 and t == 0 else (ZERO, ZERO)
        output = no_values(0)
        begin = find_first_visible(start + first_row // group, window, chunked) // block * block
        end = find_last_visible(start + min(first_row + ROWS - 1, last_row) // group, lookahead, sequence) + 1
        for key in range(begin, end, block):
            place = gpu.load_i64(table + key // PAGE * 8) * PAGE + key % PAGE
            cuda.syncthreads()
            fill_keys(in_keys, keys + place * key_bytes, key_bytes)
            fill_values(in_values, values + place * value_bytes, value_bytes, end - key)
            cuda.syncthreads()
            x = multiply_keys(no_scores(0), a, in_keys, g * key_stride + t)
            x = finish_scores(x, factors, softcap, slopes, slope, key, places, lows, highs)
            tops, sums, fade, weights = softmax(x, tops, sums)
            output = multiply_values(faded(output, fade), pack(weights), in_values, g * value_stride + t)
        write(output, sums, targets, t)

    return attend_unit


def make(format_name):
    """Build the kernel of a name such as F16-F16-128-128-16.

    The name has the cache types of keys and values, their dimensions, and the depth of the tensor core instruction (16,
    or 8 for compute capability 7.5).
    """
    of_keys, of_values, *numbers = format_name.split("-")
    unit = make_unit(of_keys, of_values, *map(int, numbers))

    def attend_many(
        sequences, sequence_count, q, q_stride, y, y_stride, keys, values, key_head_stride, value_head_stride,
        key_bytes, value_bytes, heads, kv_heads, scale, softcap, window, chunked, lookahead, slopes, sinks,
    ):  # fmt: skip
        kv_head, group, number = cuda.blockIdx.y, heads // kv_heads, cuda.blockIdx.x
        cap, factor = gpu.decode_f32(softcap), gpu.decode_f32(scale)
        factor = factor / cap if cap > ZERO else factor * LOG2_E
        keys, values = keys + kv_head * key_head_stride, values + kv_head * value_head_stride
        sequence, first_row = find_unit(sequences, sequence_count, group, number)
        while sequence != 0:
            unit(
                sequence, first_row, group, kv_head, q, q_stride, y, y_stride, keys, values, key_bytes, value_bytes,
                factor, cap, window, chunked, lookahead, slopes, sinks,
            )  # fmt: skip
            number += cuda.gridDim.x
            sequence, first_row = find_unit(sequences, sequence_count, group, number)

    return attend_many
