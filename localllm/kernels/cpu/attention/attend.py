"""Attention over the KV cache: softmax(q k^T * scale) v.

The scores of one block of keys are in memory at a time. A unit of work (plan.py) processes its keys block by block:
scores, then the running maximum and sum of each row (online softmax, Milakov and Gimelshein 2018), then the values.
`merge` combines the sections of split contexts (Flash-Decoding). Memory is linear in the length of the context.

Exponentials are powers of 2, for which scores are multiplied by log2(e). A row's sum stays in 16 lanes until the end.

Keys and values are stored in pages (cache.py has the bytes of a head). A block of keys is a page, so the result does
not depend on where the pages are; longer blocks where pages are adjacent were not faster.
"""

import math

from numba import float32

from localllm.kernels import simd
from localllm.kernels.cpu import ATTEND_KEYS, ATTEND_ROWS, MAX_SPLITS
from localllm.kernels.cpu.attention.cache import STORAGE
from localllm.kernels.cpu.attention.plan import SPLIT_BYTES, UNIT_BYTES, find_first_visible
from localllm.kernels.cpu.attention.products import (
    IN_FLOAT32,
    LOG2_E,
    fill,
    find_row,
    load_few_queries,
    make_few,
    pad_to_16,
)
from localllm.kernels.cpu.matmul.tiles_f32 import ROWS as TILE
from localllm.kernels.cpu.signature import device, kernel, load_argument, load_argument_f32
from localllm.kernels.table import ATTEND, PAGE, SPLIT, UNIT

MINUS_INFINITY = float32(-math.inf)
distances = simd.constant(simd.f32x16, *range(16))


LOWEST = float32(-1e30)


@device
def compute_buffers(scratch, key_dim, value_dim, extra_bytes):
    """Return a unit's buffers: q, a block of keys and values, scores, output, states of rows.

    The block is in the form that the products need. extra_bytes: bytes before it ("tiles"), for the products of many
    rows.
    """
    tiles = scratch + ATTEND_ROWS * key_dim * 4 + extra_bytes
    scores = tiles + 2 * ATTEND_KEYS * max(key_dim, value_dim) * 4
    output = scores + ATTEND_ROWS * ATTEND_KEYS * 4
    return scratch, tiles, scores, output, output + ATTEND_ROWS * value_dim * 4


@device
def start_rows(rows, value_dim, output, states):
    """Reset the output and the states of `rows` rows: sums of 0, maxima of LOWEST."""
    fill(output, (rows + TILE - 1) // TILE * TILE * value_dim, float32(0.0))
    for r in range(rows):
        fill(states + r * 128, 16, float32(0.0))
        fill(states + r * 128 + 64, 16, LOWEST)


@device
def find_selected_bits(a, token, kv_head):
    """Return the address of the bits of the keys that are selected for a token and a key-value head."""
    of_token = load_argument(a, ATTEND.chosen) + token * load_argument(a, ATTEND.chosen_stride)
    return of_token + kv_head * load_argument(a, ATTEND.choice_stride)


@device
def has_no_selected_key(a, token, kv_head):
    """Return whether key selection is on but selected no key for a token, because its scores are NaN."""
    if load_argument(a, ATTEND.chosen) == 0:
        return False
    bits, position = (
        find_selected_bits(a, token, kv_head),
        simd.load_i64(load_argument(a, ATTEND.positions) + token * 8),
    )
    key = 0
    while key <= position and simd.load_u16(bits + key // 8) == 0:
        key += 16
    return key > position


@device
def start_with_sinks(a, first, rows, group, kv_head, states):
    """Reset the states of rows to the heads' sinks, or a token's sum to NaN if no key was selected for it."""
    for r in range(rows):
        sink = simd.load_f32(load_argument(a, ATTEND.sinks) + (kv_head * group + (first + r) % group) * 4)
        simd.store_f32(
            states + r * 128, simd.NAN if has_no_selected_key(a, (first + r) // group, kv_head) else float32(1.0)
        )
        fill(states + r * 128 + 64, 16, sink * LOG2_E)


@device
def has_visible_key(a, first, rows, group, kv_head, key, count):
    """Return whether any of the rows sees any of `count` keys, by selection and `period`, not by windows."""
    period = load_argument(a, ATTEND.period)
    if (key + count) // period == key // period:
        return False
    if load_argument(a, ATTEND.chosen) == 0:
        return True
    for token in range(first // group, (first + rows - 1) // group + 1):
        bits = find_selected_bits(a, token, kv_head) + key // 8
        for i in range(0, count, 16):
            if simd.load_u16(bits + i // 8) != 0:
                return True
    return False


@device
def write_row(a, row, group, kv_head, output, total, top):
    """Divide a finished row by its sum of weights, in 16 lanes, and write it to y.

    top: its maximum, base 2.
    """
    weight, head_dim = simd.sum_f32x16(total), load_argument(a, ATTEND.value_dim)
    factor = float32(1.0) / weight
    if load_argument(a, ATTEND.logs) == 1:
        heads, head = load_argument(a, ATTEND.heads), kv_head * group + row % group
        place = (
            load_argument(a, ATTEND.y)
            + row // group * load_argument(a, ATTEND.y_stride)
            + (heads * head_dim + head) * 4
        )
        simd.store_f32(place, float32(math.log(weight)) + top / LOG2_E)
    target = find_row(load_argument(a, ATTEND.y), load_argument(a, ATTEND.y_stride), row, group, kv_head, head_dim)
    for d in range(head_dim):
        simd.store_f32(target + d * 4, simd.load_f32(output + d * 4) * factor)


@device
def find_partial(a, slot, head, split, value_dim):
    """Return the address of a partial result of a token's head: its state, f32 [32], then the padded head."""
    place = (slot * load_argument(a, ATTEND.heads) + head) * MAX_SPLITS + split
    return load_argument(a, ATTEND.partial) + place * (value_dim + 32) * 4


@device
def load_split(a, token, field):
    return load_argument(load_argument(a, ATTEND.splits) + token * SPLIT_BYTES, field)


@device
def write_partial(a, row, group, kv_head, split, value_dim, output, state):
    """Store a row's unnormalized result and its state for `merge`."""
    slot, head = load_split(a, row // group, SPLIT.slot), kv_head * group + row % group
    target = find_partial(a, slot, head, split, value_dim)
    for i in range(0, 32, 16):
        simd.store_f32x16(target + i * 4, simd.load_f32x16(state + i * 4))
    for d in range(0, value_dim, 16):
        simd.store_f32x16(target + 128 + d * 4, simd.load_f32x16(output + d * 4))


@device
def update_rows(a, first, rows, group, kv_head, lowest, start, count, scores, stride, states, output, value_dim):
    """Convert `count` scores of each row to weights, and update the row's state and output.

    start: position of the first key; keys before `lowest` are hidden; stride: bytes from row to row of scores.
    """
    softcap, window, keys = load_argument_f32(a, ATTEND.softcap), load_argument(a, ATTEND.window), pad_to_16(count)
    slopes, chunked, chosen = (
        load_argument(a, ATTEND.slopes),
        load_argument(a, ATTEND.chunked),
        load_argument(a, ATTEND.chosen),
    )
    ahead, biases, reach = (
        load_argument(a, ATTEND.lookahead),
        load_argument(a, ATTEND.biases),
        load_argument(a, ATTEND.reach),
    )
    period = load_argument(a, ATTEND.period)
    for r in range(rows):
        token, row = (first + r) // group, scores + r * stride
        position = simd.load_i64(load_argument(a, ATTEND.positions) + token * 8)
        if softcap > 0:
            cap_scores(row, keys, softcap)
        if slopes != 0:
            slope = simd.load_f32(slopes + (kv_head * group + (first + r) % group) * 4)
            subtract_distances(row, keys, slope, position - start)
        if biases != 0:
            of_head = biases + (kv_head * group + (first + r) % group) * (2 * reach + 33) * 4
            add_biases(row, keys, of_head, reach, start - position)
        hidden = max(find_first_visible(position, window, chunked), lowest) - start
        mask_outside(row, keys, hidden, min(position + 1 + ahead - start, count))
        if period > 1:
            mask_between(row, keys, start, period)
        if chosen != 0:
            mask_unselected(row, keys, find_selected_bits(a, token, kv_head) + start // 8)
        update_softmax(row, keys, states + r * 128, output + r * value_dim * 4, value_dim)


@device
def find_slot(table, key):
    return simd.load_i64(table + key // PAGE * 8) * PAGE + key % PAGE


def make_unit(load_key, load_value, many):
    """Build the function that computes one unit of work; load_key, load_value: see cache.py."""
    few_scores, add_few_values = make_few(load_key, load_value)
    many_scores, add_many_values = many.make(load_key, load_value)
    load_many, more = many.load_queries, many.more

    @device
    def attend_unit(a, group, table, kv_head, first, rows, lowest, begin, end, split, few, scratch, key_dim, value_dim):
        """Compute the attention of rows over the keys at positions begin to end.

        few: the rows read the cache directly.
        """
        key_bytes, value_bytes = load_argument(a, ATTEND.key_bytes), load_argument(a, ATTEND.value_bytes)
        q, tiles, scores, output, states = compute_buffers(scratch, key_dim, value_dim, more)
        start_rows(rows, value_dim, output, states)
        if load_argument(a, ATTEND.sinks) != 0 and split == 0:
            start_with_sinks(a, first, rows, group, kv_head, states)
        if few:
            load_few_queries(a, first, rows, group, kv_head, key_dim, q)
        else:
            load_many(a, first, rows, group, kv_head, key_dim, q)
        keys = load_argument(a, ATTEND.keys) + kv_head * load_argument(a, ATTEND.key_head_stride)
        values = load_argument(a, ATTEND.values) + kv_head * load_argument(a, ATTEND.value_head_stride)
        key, place = begin, find_slot(table, begin) if begin < end else 0
        most = PAGE if load_argument(a, ATTEND.period) == 1 else 16  # with a period, few keys count
        while key < end:
            count, k, v = min(most - key % most, end - key), keys + place * key_bytes, values + place * value_bytes
            place = find_slot(table, key + count) if key + count < end else place
            if not has_visible_key(a, first, rows, group, kv_head, key, count):
                key += count
                continue
            if few:
                few_scores(q, rows, k, count, key_bytes, key_dim, scores, v)
            else:
                many_scores(q, rows, k, count, key_bytes, key_dim, tiles, scores)
            stride = ATTEND_KEYS * 4
            update_rows(a, first, rows, group, kv_head, lowest, key, count, scores, stride, states, output, value_dim)
            if few:
                add_few_values(scores, rows, v, count, value_bytes, value_dim, output, keys + place * key_bytes)
            else:
                add_many_values(scores, rows, v, count, value_bytes, value_dim, tiles, output)
            key += count

    return attend_unit


def make(format_name, many=IN_FLOAT32):
    """Build the attention kernel.

    format_name: the type of keys and values, or both types, as in Q8_0-Q4_0.
    """
    of_keys, _, of_values = format_name.partition("-")
    (load_key, _), (load_value, _) = STORAGE[of_keys], STORAGE[of_values or of_keys]
    unit, start, finish, more = make_unit(load_key, load_value, many), many.start, many.finish, many.more

    @kernel
    def attend(a, part, parts, thread):
        group = load_argument(a, ATTEND.heads) // load_argument(a, ATTEND.kv_heads)
        key_dim, value_dim = pad_to_16(load_argument(a, ATTEND.key_dim)), pad_to_16(load_argument(a, ATTEND.value_dim))
        scratch = load_argument(a, ATTEND.scratch) + thread * load_argument(a, ATTEND.scratch_bytes)
        _, tiles, _, output, states = compute_buffers(scratch, key_dim, value_dim, more)
        start(tiles)
        units = simd.load_i64(load_argument(a, ATTEND.unit_count))
        for i in range(units * part // parts, units * (part + 1) // parts):
            u = load_argument(a, ATTEND.units) + i * UNIT_BYTES
            kv_head, first, rows = (
                load_argument(u, UNIT.kv_head),
                load_argument(u, UNIT.first_row),
                load_argument(u, UNIT.rows),
            )
            begin, end, split = load_argument(u, UNIT.begin), load_argument(u, UNIT.end), load_argument(u, UNIT.split)
            table, lowest, few = (
                load_argument(u, UNIT.table),
                load_argument(u, UNIT.lowest),
                load_argument(u, UNIT.few) == 1,
            )
            unit(a, group, table, kv_head, first, rows, lowest, begin, end, split, few, scratch, key_dim, value_dim)
            is_split = load_split(a, first // group, SPLIT.count) > 1
            for r in range(rows):
                row, state = output + r * value_dim * 4, states + r * 128
                if is_split:
                    write_partial(a, first + r, group, kv_head, split, value_dim, row, state)
                else:
                    write_row(a, first + r, group, kv_head, row, simd.load_f32x16(state), simd.load_f32(state + 64))
        finish()

    return attend


@device
def merge_head(a, token, head, group, value_dim, output):
    top, total = simd.splat_f32x16(LOWEST), simd.zero_f32x16()
    slot, splits = load_split(a, token, SPLIT.slot), load_split(a, token, SPLIT.count)
    for split in range(splits):
        top = simd.max_f32x16(top, simd.load_f32x16(find_partial(a, slot, head, split, value_dim) + 64))
    fill(output, value_dim, float32(0.0))
    for split in range(splits):
        source = find_partial(a, slot, head, split, value_dim)
        weight = simd.exp2_f32x16(simd.load_f32x16(source + 64) - top)
        total = simd.fma_f32x16(weight, simd.load_f32x16(source), total)
        for d in range(0, value_dim * 4, 64):
            simd.store_f32x16(
                output + d, simd.fma_f32x16(weight, simd.load_f32x16(source + 128 + d), simd.load_f32x16(output + d))
            )
    write_row(a, token * group + head % group, group, head // group, output, total, simd.largest_f32x16(top))


@kernel
def merge(a, part, parts, thread):
    tokens, heads = simd.load_i64(load_argument(a, ATTEND.count)), load_argument(a, ATTEND.heads)
    group, value_dim = heads // load_argument(a, ATTEND.kv_heads), pad_to_16(load_argument(a, ATTEND.value_dim))
    output = load_argument(a, ATTEND.scratch) + thread * load_argument(a, ATTEND.scratch_bytes)
    for i in range(tokens * heads * part // parts, tokens * heads * (part + 1) // parts):
        if load_split(a, i // heads, SPLIT.count) > 1:
            merge_head(a, i // heads, i % heads, group, value_dim, output)


# ---- from the scores of a block of keys to weights: caps, biases, masks, and the online softmax


@device
def cap_scores(scores, keys, softcap):
    """Replace scores, already divided by softcap, by softcap * tanh(score) * log2(e)."""
    factor = simd.splat_f32x16(softcap * LOG2_E)
    for i in range(0, keys, 16):
        simd.store_f32x16(scores + i * 4, simd.tanh_f32x16(simd.load_f32x16(scores + i * 4)) * factor)


@device
def subtract_distances(scores, keys, slope, distance):
    """Subtract slope * distance * log2(e) from each score (ALiBi).

    The distance to the query decreases by one from key to key.
    """
    lanes = distances()
    for i in range(0, keys, 16):
        away = simd.abs_f32x16(simd.splat_f32x16(float32(distance - i)) - lanes)
        simd.store_f32x16(
            scores + i * 4, simd.fma_f32x16(away, simd.splat_f32x16(-slope * LOG2_E), simd.load_f32x16(scores + i * 4))
        )


@device
def add_biases(scores, keys, biases, reach, relative):
    """Add a head's biases (ATTEND in table.py), times log2(e).

    relative: the first key's position minus the query's.
    """
    factor = simd.splat_f32x16(LOG2_E)
    for i in range(0, keys, 16):
        number = min(max(relative + i + reach, -16), 2 * reach + 1) + 16
        bias = simd.load_f32x16(biases + number * 4)
        simd.store_f32x16(scores + i * 4, simd.fma_f32x16(bias, factor, simd.load_f32x16(scores + i * 4)))


@device
def mask_outside(scores, keys, hidden, visible):
    """Set all scores to minus infinity except those from index `hidden` up to `visible`."""
    for i in range(0, min(hidden, keys), 16):
        simd.store_f32x16(scores + i * 4, simd.skip_lanes(simd.load_f32x16(scores + i * 4), hidden - i, MINUS_INFINITY))
    if visible < keys:
        for i in range(0, keys, 16):
            simd.store_f32x16(
                scores + i * 4, simd.keep_lanes(simd.load_f32x16(scores + i * 4), visible - i, MINUS_INFINITY)
            )


@device
def mask_unselected(scores, keys, bits):
    for i in range(0, keys, 16):
        flags = simd.load_u16(bits + i // 8)
        if flags == 0:
            simd.store_f32x16(scores + i * 4, simd.splat_f32x16(MINUS_INFINITY))
        elif flags != 65535:
            for lane in range(16):
                if flags >> lane & 1 == 0:
                    simd.store_f32(scores + (i + lane) * 4, MINUS_INFINITY)


@device
def mask_between(scores, keys, start, period):
    """Set all scores to minus infinity except that of the last key of every `period`.

    start: position of the first key.
    """
    for i in range(keys):
        if (start + i + 1) % period != 0:
            simd.store_f32(scores + i * 4, MINUS_INFINITY)


@device
def rescale(top, state, output, value_dim):
    """Multiply a row's sum and output by 2 ** (old maximum - new maximum), and store the new maximum.

    top: the new maximum.
    """
    fade = simd.exp2_f32x16(simd.load_f32x16(state + 64) - top)
    simd.store_f32x16(state, simd.load_f32x16(state) * fade)
    simd.store_f32x16(state + 64, top)
    for i in range(0, value_dim, 16):
        simd.store_f32x16(output + i * 4, simd.load_f32x16(output + i * 4) * fade)


@device
def update_softmax(scores, keys, state, output, value_dim):
    """Convert `keys` scores of a row, a multiple of 16, to weights, and update the row's state and output.

    A score of minus infinity gets the weight 0. state: f32 [32], the row's sum of weights in 16 lanes, then its maximum
    in every lane.
    """
    largest = simd.load_f32x16(state + 64)
    for i in range(0, keys, 16):
        largest = simd.max_f32x16(largest, simd.load_f32x16(scores + i * 4))
    if simd.any_above_f32x16(largest, simd.load_f32x16(state + 64)):  # rare after the first blocks
        rescale(simd.splat_f32x16(simd.largest_f32x16(largest)), state, output, value_dim)
    total, top = simd.load_f32x16(state), simd.load_f32x16(state + 64)
    for i in range(0, keys, 16):
        weight = simd.exp2_f32x16(simd.load_f32x16(scores + i * 4) - top)
        simd.store_f32x16(scores + i * 4, weight)
        total = total + weight
    simd.store_f32x16(state, total)
