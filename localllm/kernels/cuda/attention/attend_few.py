"""Attention of few tokens, reading the cache directly, in float32.

Contexts are split into sections (Flash-Decoding). A block of threads computes one token, one section of its context,
and a bundle of query heads that share a key-value head. Several lanes share a head, 8 values each, so a warp reads
several keys at once, which are adjacent in the cache. Each such group of lanes processes a different subset of the
keys, with a separate maximum and sum (online softmax, Milakov and Gimelshein 2018), in registers. The results of the
groups of lanes, then those of warps, are merged at the end of the section; `merge_few` merges the sections. A token's
result depends only on its sequence and the number of sections, bit for bit.

For 4 query heads of 128 dimensions a thread uses 168 registers (compute capability 7.5 to 10.0), so a multiprocessor
holds 3 blocks of 4 warps. Each of their lanes loads 8 vectors of 16 bytes at once: 48 KiB in flight, where 12 to 16
hide the memory's latency. With Q8_0 it holds 2 blocks.
"""

from numba import cuda, float32, int32, int64

from localllm.kernels.cuda import gpu
from localllm.kernels.cuda.attention.cache import LOADS
from localllm.kernels.cuda.attention.shared import (
    LOG2_E,
    LOWEST,
    MINUS_INFINITY,
    NAN,
    SEQUENCE_BYTES,
    WARPS,
    ZERO,
    find_first_visible,
    find_last_visible,
    make_lane_reduction,
    make_softmax,
    max_or_first,
)
from localllm.kernels.cuda.unrolled import add_outer, make_products, scale_rows, unroll, visit
from localllm.kernels.table import PAGE, SEQUENCE

SPAN = 128  # keys; the length of a section is a multiple of this, except that of the last one
STATE = 16  # bytes of a partial result before its values


@gpu.device
def split_keys(first, last, parts):
    """Split the keys from `first` to `last` into at most `parts` sections of equal length.

    Return the beginning of the first section and the length. The beginning is `first` rounded down to a multiple of
    PAGE.
    """
    lowest = first // PAGE * PAGE
    each = (last - lowest) // parts + 1
    return lowest, (each + SPAN - 1) // SPAN * SPAN


@gpu.device
def find_sequence(owners, sequences, token):
    return sequences + gpu.load_i64(owners + token * 8) * SEQUENCE_BYTES


def count_lanes(*dims):
    """Return the number of lanes that share a head.

    It is a power of two, with at least 8 of the head's values for each lane.
    """
    lanes = 2
    while lanes < gpu.WARP and 8 * lanes < max(dims):
        lanes *= 2
    return lanes


def make_load_segments(load, pieces, apart, dim):
    """Build a function (head, d) that loads `pieces` segments of 8 values of a head.

    The segments start at d, d + apart, d + 2 * apart, ...
    """
    last = (dim + 15) // 16 * 16 - 8

    @gpu.device
    def load_one(head, d):
        return load(head, min(d, last))

    if pieces == 1:
        return load_one
    more = make_load_segments(load, pieces - 1, apart, dim)

    @gpu.device
    def load_all(head, d):
        return load_one(head, d) + more(head, d + apart)

    return load_all


def make_load_rows(load, rows, apart):
    """Build a function (base, number, low, high, row_bytes, d) that loads segments of the heads of tokens.

    The `rows` tokens are `number`, number + apart, ..., each clamped to the range from `low` to `high` - 1. row_bytes:
    bytes per token; d: see make_load_segments.
    """

    @gpu.device
    def load_one(base, number, low, high, row_bytes, d):
        return load(base + min(max(number, low), high - 1) * row_bytes, d)

    if rows == 1:
        return load_one
    more = make_load_rows(load, rows - 1, apart)

    @gpu.device
    def load_all(base, number, low, high, row_bytes, d):
        return load_one(base, number, low, high, row_bytes, d) + more(base, number + apart, low, high, row_bytes, d)

    return load_all


def make_scores(bundle, rows, groups, has_chosen):
    """Build a function that converts products, a tuple [rows, bundle], to scores of keys.

    Scores are capped if there is a cap, reduced by distance if there are slopes, and minus infinity for keys that the
    token does not see. Element i is for head i % bundle and key i // bundle * groups, counted from the lane's first
    key. has_chosen: only keys whose bits, at address `row`, are set count. period: only the last of every `period` keys
    counts.
    """

    def cap_score(i, x, softcap):
        return gpu.tanh(x) * (softcap * LOG2_E)

    def add_slope(i, x, by, distance):
        return x - by[i % bundle] * abs(float32(int32(distance - i // bundle * groups)))

    def mask_range(i, x, low, high):
        key = int32(i // bundle * groups)
        return x if low <= key and key < high else MINUS_INFINITY

    def mask_unselected(i, x, row, key, last):
        at = min(key + i // bundle * groups, last)
        return x if int64(gpu.load_i32(row + at // 32 * 4)) >> at % 32 & 1 != 0 else MINUS_INFINITY

    def mask_within_periods(i, x, key, period):
        return x if (key + i // bundle * groups + 1) % period == 0 else MINUS_INFINITY

    cap_all, slope_all, hide = (unroll(rows * bundle, function) for function in (cap_score, add_slope, mask_range))
    hide_between = unroll(rows * bundle, mask_within_periods)
    hide_others = unroll(rows * bundle, mask_unselected) if has_chosen else gpu.device(lambda x, row, key, last: x)

    @gpu.device
    def compute_scores(x, cap, slopes, slope, position, key, low, high, period, row):
        if cap > ZERO:
            x = cap_all(x, cap)
        if slopes != 0:
            x = slope_all(x, slope, position - key)
        x = hide(x, low, high)
        if period > 1:
            x = hide_between(x, key, period)
        return hide_others(x, row, key, position)

    return compute_scores


def make_combine(bundle, value_columns, lanes, value_dim):
    """Build a function that merges results of a block's groups of lanes to partial results of its heads.

    bundle: heads of a block; value_columns: values of a head that a lane holds.
    """
    apart, padded = 8 * lanes, (value_dim + 7) // 8 * 8
    states, results = WARPS * bundle, bundle * padded
    largest_of_groups = make_lane_reduction(bundle, lanes, gpu.WARP, max_or_first)
    sum_of_groups = make_lane_reduction(bundle, lanes, gpu.WARP, gpu.add)
    values_of_groups = make_lane_reduction(bundle * value_columns, lanes, gpu.WARP, gpu.add)
    fading = unroll(bundle, lambda i, before, after: gpu.exp2(before - after))
    times = unroll(bundle, lambda i, x, y: x * y)

    def store_sum(i, x, place, warp):
        place[warp * bundle + i] = x

    @gpu.device
    def find_maximum(i, place):
        x = place[i]
        for warp in range(1, WARPS):
            x = max_or_first(x, place[warp * bundle + i])
        return x

    def add_value(i, x, place, d):
        at = d + i % value_columns // 8 * apart + i % 8
        if at < padded:
            place[i // value_columns * padded + at] += x

    keep_all, largest_of_warps = visit(bundle, store_sum), unroll(bundle, lambda i, place: find_maximum(i, place))
    add_values = visit(bundle * value_columns, add_value)

    @gpu.device
    def combine(tops, sums, values, group, d, target, target_stride, heads):
        kept_tops = cuda.shared.array(states, float32)
        kept_sums = cuda.shared.array(states, float32)
        kept_values = cuda.shared.array(results, float32)
        thread, threads = cuda.threadIdx.x, cuda.blockDim.x
        warp = thread // gpu.WARP
        keep_all(largest_of_groups(tops), kept_tops, warp)
        for i in range(thread, results, threads):
            kept_values[i] = ZERO
        cuda.syncthreads()
        top = largest_of_warps(kept_tops)
        fade = fading(tops, top)
        keep_all(sum_of_groups(times(sums, fade)), kept_sums, warp)
        values = values_of_groups(scale_rows(values, fade))
        for turn in range(WARPS):
            if turn == warp and group == 0:
                add_values(values, kept_values, d)
            cuda.syncthreads()
        for i in range(thread, heads * padded, threads):
            gpu.store_f32(target + i // padded * target_stride + STATE + i % padded * 4, kept_values[i])
        if thread < heads:
            weight = ZERO
            for turn in range(WARPS):
                weight += kept_sums[turn * bundle + thread]
            gpu.store_f32(target + thread * target_stride, find_maximum(thread, kept_tops))
            gpu.store_f32(target + thread * target_stride + 4, weight)

    return combine


def make_load_queries(bundle, columns, key_dim, apart):
    """Build a function (address, heads, d, scale) that loads a lane's values of queries, times scale.

    It loads the queries of `bundle` heads. Values are zero beyond a head's dimensions, and for heads with an index of
    `heads` or more.
    """

    def load_query(i, source, heads, d, scale):
        head, at = i // columns, d + i % columns // 8 * apart + i % 8
        return gpu.load_f32(source + (head * key_dim + at) * 4) * scale if head < heads and at < key_dim else ZERO

    return unroll(bundle * columns, load_query)


def load_slope(i, slopes, heads):
    """Return head i's slope times log2(e), or 0 if there are no slopes or no such head."""
    return gpu.load_f32(slopes + i * 4) * LOG2_E if slopes != 0 and i < heads else ZERO


def make_kernel(of_keys, of_values, bundle, key_dim, value_dim, has_chosen):
    lanes = count_lanes(key_dim, value_dim)
    apart, groups = 8 * lanes, gpu.WARP // lanes
    columns, value_columns = 8 * -(-key_dim // apart), 8 * -(-value_dim // apart)
    rows = 4 if bundle * (columns + value_columns) <= 64 else 2  # keys that a group of lanes processes at once
    tile = rows * groups
    load_keys = make_load_rows(make_load_segments(LOADS[of_keys], columns // 8, apart, key_dim), rows, groups)
    load_value = make_load_segments(LOADS[of_values], value_columns // 8, apart, value_dim)
    load_values = make_load_rows(load_value, rows, groups)
    sums_of_head = make_lane_reduction(rows * bundle, 1, lanes, gpu.add)
    scores = make_scores(bundle, rows, groups, has_chosen)
    combine = make_combine(bundle, value_columns, lanes, value_dim)
    queries = make_load_queries(bundle, columns, key_dim, apart)
    slopes_of, products = unroll(bundle, load_slope), make_products(columns)
    softmax = make_softmax(rows * bundle, bundle, lambda i: i % bundle, gpu.device(lambda largest: largest))
    lowest_of_all = unroll(bundle, lambda i, nothing: LOWEST)
    nothing_yet = unroll(bundle, lambda i, nothing: ZERO)
    no_values = unroll(bundle * value_columns, lambda i, nothing: ZERO)

    def attend_few(
        count, positions, owners, sequences, q, q_stride, keys, values, key_head_stride, value_head_stride, key_bytes,
        value_bytes, heads, kv_heads, scale, softcap, window, chunked, period, lookahead, slopes, chosen, chosen_stride,
        choice_stride, bundles, parts, partial, partial_bytes,
    ):  # fmt: skip
        token, part, kv_head = cuda.blockIdx.x, cuda.blockIdx.y % parts, cuda.blockIdx.y // parts // bundles
        if token >= gpu.load_i64(count):
            return
        position = gpu.load_i64(positions + token * 8)
        sequence = find_sequence(owners, sequences, token)
        first, last = find_first_visible(position, window, chunked), find_last_visible(position, lookahead, sequence)
        lowest, each = split_keys(first, last, parts)
        begin, end = max(lowest + part * each, first // tile * tile), min(lowest + (part + 1) * each, last + 1)
        if begin >= end:
            return
        group, in_group = heads // kv_heads, cuda.blockIdx.y // parts % bundles * bundle
        head, heads_here = kv_head * group + in_group, min(group - in_group, bundle)
        number, d = gpu.get_lane() // lanes, gpu.get_lane() % lanes * 8
        cap, by = gpu.decode_f32(softcap), gpu.decode_f32(scale)
        by = by / cap if cap > ZERO else by * LOG2_E
        rows_of_q = queries(q + token * q_stride + head * key_dim * 4, heads_here, d, by)
        slope = slopes_of(slopes + head * 4 if slopes != 0 else slopes, heads_here)
        keys, values = keys + kv_head * key_head_stride, values + kv_head * value_head_stride
        table = gpu.load_i64(sequence + 8 * SEQUENCE.table)
        bits = chosen + token * chosen_stride + kv_head * choice_stride
        tops, sums, output = lowest_of_all(0), nothing_yet(0), no_values(0)
        for key in range(begin + cuda.threadIdx.x // gpu.WARP * tile, end, WARPS * tile):
            if (key + tile) // period == key // period:  # none of these keys is the last of a period
                continue
            place = gpu.load_i64(table + key // PAGE * 8) * PAGE + key % PAGE
            low, high = max(first - key, 0), min(end - key, tile)
            k = load_keys(keys + place * key_bytes, number, low, high, key_bytes, d)
            v = load_values(values + place * value_bytes, number, low, high, value_bytes, d)
            x = sums_of_head(products(rows_of_q, k))
            low, high = int32(low - number), int32(high - number)
            x = scores(x, cap, slopes, slope, position, key + number, low, high, period, bits)
            tops, sums, fade, weights = softmax(x, tops, sums)
            output = add_outer(scale_rows(output, fade), weights, v)
        target = partial + ((token * heads + head) * parts + part) * partial_bytes
        combine(tops, sums, output, number, d, target, parts * partial_bytes, heads_here)

    return attend_few


def make(format_name):
    """Build the kernel for a combination of types and sizes, such as F16-F16-4-128-128.

    These are the cache types of keys and values, the query heads per bundle, and the dimensions of keys and values.
    With -chosen at the end, tokens attend only to keys whose bits are set.
    """
    format_name, has_chosen, _ = format_name.partition("-chosen")
    of_keys, of_values, *numbers = format_name.split("-")
    bundle, key_dim, value_dim = map(int, numbers)
    return make_kernel(of_keys, of_values, bundle, key_dim, value_dim, has_chosen)


@gpu.device
def has_no_selected_key(bits, position):
    """Return whether no key was selected for the token at a position.

    That happens if scores are NaN.
    """
    key = 0
    while key <= position and gpu.load_i32(bits + key // 8) == 0:
        key += 32
    return key > position


def merge_few(
    count, positions, owners, sequences, heads, value_dim, window, chunked, lookahead, sinks, logs, chosen,
    chosen_stride, choice_stride, kv_heads, parts, partial, partial_bytes, y, y_stride,
):  # fmt: skip
    """Merge the partial results of contexts, and apply sinks.

    There is a block for each head of a token.
    """
    token, head = cuda.blockIdx.x, cuda.blockIdx.y
    if token >= gpu.load_i64(count):
        return
    position = gpu.load_i64(positions + token * 8)
    last = find_last_visible(position, lookahead, find_sequence(owners, sequences, token))
    lowest, each = split_keys(find_first_visible(position, window, chunked), last, parts)
    source = partial + (token * heads + head) * parts * partial_bytes
    end = source + (last - lowest) // each * partial_bytes + partial_bytes
    sink = gpu.load_f32(sinks + head * 4) * LOG2_E if sinks != 0 else LOWEST
    top = sink
    for part in range(source, end, partial_bytes):
        top = max_or_first(top, gpu.load_f32(part))
    weight = gpu.exp2(sink - top) if sinks != 0 else ZERO
    for part in range(source, end, partial_bytes):
        weight += gpu.exp2(gpu.load_f32(part) - top) * gpu.load_f32(part + 4)
    if chosen != 0 and has_no_selected_key(
        chosen + token * chosen_stride + head // (heads // kv_heads) * choice_stride, position
    ):
        weight = NAN
    if logs == 1 and cuda.threadIdx.x == 0:
        gpu.store_f32(y + token * y_stride + (heads * value_dim + head) * 4, gpu.log(weight) + top / LOG2_E)
    for d in range(cuda.threadIdx.x, value_dim, cuda.blockDim.x):
        value = ZERO
        for part in range(source, end, partial_bytes):
            value += gpu.exp2(gpu.load_f32(part) - top) * gpu.load_f32(part + STATE + d * 4)
        gpu.store_f32(y + token * y_stride + (head * value_dim + d) * 4, value / weight)
