"""Attention over the KV cache, blocked: softmax(q k^T / sqrt(d)) v without ever holding more than a block of scores.

The query heads that share a key-value head are rows of one small matrix: row = token * group + head in group. A unit
of work is one key-value head and up to 96 such rows. It passes over the keys in blocks: scores, then the running
maximum and sum of each row (online softmax, Milakov and Gimelshein 2018), then the values. With few tokens there are
few units, so the context is split too, and `merge` puts the parts together (as Flash-Decoding does). Memory is linear
in the length.

Powers are of 2, for which the queries are scaled by log2(e). A row's sum stays in 16 lanes until the end.

The cache is int64 `runs`, each an address of keys, an address of values and a number of tokens, a multiple of 16; the
heads of a run are `head stride` bytes apart, tokens follow each other (see cache_formats.py).

Arguments of `attend`: 0 address of the token count, 1 positions int64, 2 q f32, 3 bytes between tokens of q,
4 output f32, 5 bytes between tokens of the output, 6 runs, 7 number of runs, 8 bytes between heads in a run,
9 bytes per token of a head, 10 query heads, 11 key-value heads, 12 head dimension, 13 scale f32, 14 partial results
f32 [8 tokens, query heads, 16 splits, 32 + head dimension padded to 16], 15 scratch memory, 16 bytes of it per thread:
f32 [96, 2 padded + 64 + 32] and [2, 64, padded].
"""

import math

from numba import float32

from localllm.kernels.cpu import attention_few, attention_many
from localllm.kernels.cpu.cache_formats import STORAGE
from localllm.kernels.cpu.signature import argument, argument_f32, device, kernel
from localllm.kernels.cpu.tiles_f32 import ROWS as TILE
from localllm.kernels.simd import (
    any_above_f32x16,
    exp2_f32x16,
    fma_f32x16,
    keep_lanes,
    largest_f32x16,
    load_f32,
    load_f32x16,
    load_i64,
    max_f32x16,
    splat_f32x16,
    store_f32,
    store_f32x16,
    sum_f32x16,
    zero_f32x16,
)

ROWS = 96  # of a unit at most, a multiple of TILE, to which all arrays of rows are padded
FEW_ROWS = 24  # up to so many, straight from the cache is faster
MOST_SPLITS, FEW_TOKENS = 16, 8  # the context is split up to so often, for so many tokens at most
LOWEST, MINUS_INFINITY = float32(-1e30), float32(-math.inf)
LOG2_E = float32(math.log2(math.e))


@device
def splits_of(tokens, length):
    """In how many parts the context is split: one per 256 keys, for few tokens."""
    return 1 if tokens > FEW_TOKENS else min((length + 255) // 256, MOST_SPLITS)


@device
def fill(address, count, value):
    """`count` floats, a multiple of 16."""
    for i in range(0, count, 16):
        store_f32x16(address + i * 4, splat_f32x16(value))


@device
def places(scratch, padded):
    """Where a unit keeps q, tiles of keys and values, scores, output, and the rows' sums and maximums."""
    tiles = scratch + ROWS * padded * 4
    scores = tiles + 2 * attention_many.KEYS * padded * 4
    output = scores + ROWS * attention_many.KEYS * 4
    return scratch, tiles, scores, output, output + ROWS * padded * 4


@device
def row_at(a, first_token, stride, row, group, kv_head):
    """Where a row lies in q or in the output: its head's numbers."""
    return first_token + row // group * stride + (kv_head * group + row % group) * argument(a, 12) * 4


@device
def start_rows(rows, padded, output, states):
    """Nothing has been summed yet."""
    fill(output, (rows + TILE - 1) // TILE * TILE * padded, float32(0.0))
    for r in range(rows):
        fill(states + r * 128, 16, float32(0.0))
        fill(states + r * 128 + 64, 16, LOWEST)


@device
def load_queries(a, first, rows, group, kv_head, padded, q):
    """The unit's rows of q, scaled, with zeros around, as the products take them."""
    head_dim, scale = argument(a, 12), argument_f32(a, 13) * LOG2_E
    tile, down, along = (1, 0, 4) if rows <= FEW_ROWS else (TILE, 4, TILE * 4)
    fill(q, (rows + TILE - 1) // TILE * TILE * padded, float32(0.0))
    for r in range(rows):
        source = row_at(a, argument(a, 2), argument(a, 3), first + r, group, kv_head)
        target = q + (r - r % tile) * padded * 4 + r % tile * down
        for d in range(head_dim):
            store_f32(target + d * along, load_f32(source + d * 4) * scale)


@device
def rescale(top, state, output, padded):
    """A row has a new maximum: scale down what was summed under the old one."""
    fade = exp2_f32x16(load_f32x16(state + 64) - top)
    store_f32x16(state, load_f32x16(state) * fade)
    store_f32x16(state + 64, top)
    for i in range(0, padded, 16):
        store_f32x16(output + i * 4, load_f32x16(output + i * 4) * fade)


@device
def update_softmax(scores, keys, visible, state, output, padded):
    """One row meets a block of `keys` scores, a multiple of 16: they become weights, 2 ** -125 beyond `visible`.

    state: f32 [32], the row's sum in 16 lanes and its maximum in every lane.
    """
    if visible < keys:
        for i in range(0, keys, 16):
            store_f32x16(scores + i * 4, keep_lanes(load_f32x16(scores + i * 4), visible - i, MINUS_INFINITY))
    largest = load_f32x16(state + 64)
    for i in range(0, keys, 16):
        largest = max_f32x16(largest, load_f32x16(scores + i * 4))
    if any_above_f32x16(largest, load_f32x16(state + 64)):  # seldom, after the first blocks
        rescale(splat_f32x16(largest_f32x16(largest)), state, output, padded)
    total, top = load_f32x16(state), load_f32x16(state + 64)
    for i in range(0, keys, 16):
        weight = exp2_f32x16(load_f32x16(scores + i * 4) - top)
        store_f32x16(scores + i * 4, weight)
        total = total + weight
    store_f32x16(state, total)


@device
def write_row(a, row, group, kv_head, output, total):
    """Normalize a finished row into the output."""
    factor = float32(1.0) / sum_f32x16(total)
    target = row_at(a, argument(a, 4), argument(a, 5), row, group, kv_head)
    for d in range(argument(a, 12)):
        store_f32(target + d * 4, load_f32(output + d * 4) * factor)


@device
def partial_at(a, row, kv_head, split, padded):
    """Where a row's partial result lies: its state, then the padded head."""
    return argument(a, 14) + ((row * argument(a, 11) + kv_head) * MOST_SPLITS + split) * (padded + 32) * 4


@device
def write_partial(a, row, kv_head, split, padded, output, state):
    """Keep a row's unnormalized result for `merge`."""
    target = partial_at(a, row, kv_head, split, padded)
    for i in range(0, 32, 16):
        store_f32x16(target + i * 4, load_f32x16(state + i * 4))
    for d in range(0, padded, 16):
        store_f32x16(target + 128 + d * 4, load_f32x16(output + d * 4))


@device
def update_rows(a, first, rows, group, start, count, scores, stride, states, output, padded):
    """All rows meet a block of `count` scores, the first of which is the key at position `start`."""
    for r in range(rows):
        visible = min(load_i64(argument(a, 1) + (first + r) // group * 8) + 1 - start, count)
        row, keys = scores + r * stride, (count + 15) // 16 * 16
        update_softmax(row, keys, visible, states + r * 128, output + r * padded * 4, padded)


def make_unit(load):
    """The device function for one unit of work."""
    few_scores, add_few_values = attention_few.make_few(load)
    many_scores, add_many_values = attention_many.make_many(load)

    @device
    def unit(a, kv_head, first, rows, begin, end, scratch, padded):
        """Rows `first` to first + rows against the keys at positions begin to end."""
        group, token_bytes, few, base = argument(a, 10) // argument(a, 11), argument(a, 9), rows <= FEW_ROWS, 0
        q, tiles, scores, output, states = places(scratch, padded)
        start_rows(rows, padded, output, states)
        load_queries(a, first, rows, group, kv_head, padded, q)
        block_keys = attention_few.KEYS if few else attention_many.KEYS
        for run in range(argument(a, 7)):
            at = argument(a, 6) + run * 24
            length = load_i64(at + 16)
            for block in range(max(begin - base, 0), min(end - base, length), block_keys):
                count = min(block_keys, min(end - base, length) - block)
                skip = kv_head * argument(a, 8) + block * token_bytes
                k, v = load_i64(at) + skip, load_i64(at + 8) + skip
                if few:
                    few_scores(q, rows, k, count, token_bytes, padded, scores, v)
                else:
                    many_scores(q, rows, k, count, token_bytes, padded, tiles, scores)
                start = base + block
                update_rows(a, first, rows, group, start, count, scores, block_keys * 4, states, output, padded)
                if few:
                    add_few_values(scores, rows, v, count, token_bytes, padded, output, k + block_keys * token_bytes)
                else:
                    add_many_values(scores, rows, v, count, token_bytes, padded, tiles, output)
            base += length

    return unit


def make(format_name):
    """The kernel for one storage type."""
    load, _ = STORAGE[format_name]
    unit = make_unit(load)

    @kernel
    def attend(a, part, parts, thread):
        tokens, kv_heads = load_i64(argument(a, 0)), argument(a, 11)
        if tokens == 0:
            return
        group, padded = argument(a, 10) // kv_heads, (argument(a, 12) + 15) // 16 * 16
        positions, scratch = argument(a, 1), argument(a, 15) + thread * argument(a, 16)
        _, _, _, output, states = places(scratch, padded)
        length = load_i64(positions + (tokens - 1) * 8) + 1
        splits, tiles = splits_of(tokens, length), (tokens * group + ROWS - 1) // ROWS
        span = ((length + splits - 1) // splits + 15) // 16 * 16
        units = kv_heads * tiles * splits
        for i in range(units * part // parts, units * (part + 1) // parts):
            split, first, kv_head = i % splits, i // splits % tiles * ROWS, i // splits // tiles
            rows = min(ROWS, tokens * group - first)
            last = load_i64(positions + (first + rows - 1) // group * 8)
            begin, end = split * span, min(last + 1, (split + 1) * span)
            unit(a, kv_head, first, rows, begin, end, scratch, padded)
            for r in range(rows):
                row, state = output + r * padded * 4, states + r * 128
                if splits > 1:
                    write_partial(a, first + r, kv_head, split, padded, row, state)
                else:
                    write_row(a, first + r, group, kv_head, row, load_f32x16(state))

    return attend


@kernel
def merge(a, part, parts, thread):
    """Put the parts of a split context together; same arguments as `attend`."""
    tokens, kv_heads, heads = load_i64(argument(a, 0)), argument(a, 11), argument(a, 10)
    if tokens == 0 or tokens > FEW_TOKENS:
        return
    group, padded = heads // kv_heads, (argument(a, 12) + 15) // 16 * 16
    splits = splits_of(tokens, load_i64(argument(a, 1) + (tokens - 1) * 8) + 1)
    if splits == 1:
        return
    output = argument(a, 15) + thread * argument(a, 16)
    for i in range(tokens * heads * part // parts, tokens * heads * (part + 1) // parts):
        row, kv_head = i // heads * group + i % heads % group, i % heads // group
        top, total = splat_f32x16(LOWEST), zero_f32x16()
        for split in range(splits):
            top = max_f32x16(top, load_f32x16(partial_at(a, row, kv_head, split, padded) + 64))
        fill(output, padded, float32(0.0))
        for split in range(splits):
            source = partial_at(a, row, kv_head, split, padded)
            weight = exp2_f32x16(load_f32x16(source + 64) - top)
            total = fma_f32x16(weight, load_f32x16(source), total)
            for d in range(0, padded * 4, 64):
                store_f32x16(output + d, fma_f32x16(weight, load_f32x16(source + 128 + d), load_f32x16(output + d)))
        write_row(a, row, group, kv_head, output, total)
