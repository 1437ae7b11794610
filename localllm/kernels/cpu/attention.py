"""Attention over the KV cache, blocked: softmax(q k^T / sqrt(d)) v without ever holding more than a block of scores.

The query heads that share a key-value head are rows of one small matrix: row = token * group + head in group. A unit
of work is one key-value head and up to 64 such rows. It passes over the keys in blocks of 64: transpose the keys,
multiply, update the running maximum and sum of each row (online softmax, Milakov and Gimelshein 2018), multiply with
the values. With few tokens there are few units, so the context is split too, and `merge` puts the parts together (as
Flash-Decoding does). Memory is linear in the length.

The cache is int64 `runs`, each an address of keys, an address of values and a number of tokens; the heads of a run are
`head stride` bytes apart, tokens follow each other (a head's dimensions padded to a multiple of 16, with zeros).

Arguments of `attend`: 0 address of the token count, 1 positions int64, 2 q f32, 3 bytes between tokens of q,
4 output f32, 5 bytes between tokens of the output, 6 runs, 7 number of runs, 8 bytes between heads in a run,
9 bytes per token of a head, 10 query heads, 11 key-value heads, 12 head dimension, 13 scale f32, 14 partial results
f32 [8 tokens, query heads, 16 splits, padded + 16], 15 scratch memory, 16 bytes of it per thread.
"""

import math

from numba import float32

from localllm.kernels.cpu.rows_f32 import rows_any
from localllm.kernels.cpu.signature import argument, argument_f32, device, kernel
from localllm.kernels.simd import (
    exp_f32x16,
    fma_f32x16,
    keep_lanes,
    largest_f32x16,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i64,
    max_f32x16,
    splat_f32x16,
    store_f32,
    store_f32x16,
    sum_f32x16,
    transpose_f16,
    transpose_f32,
    zero_f32x16,
)

ROWS, KEYS = 64, 64  # a tile of rows, a block of keys
MOST_SPLITS, FEW_TOKENS = 16, 8  # the context is split up to so often, for so many tokens at most
LOWEST, MINUS_INFINITY = float32(-1e30), float32(-math.inf)

STORAGE = {"F32": (4, load_f32x16, transpose_f32), "F16": (2, load_f16x16, transpose_f16)}


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
def load_queries(a, first, rows, group, kv_head, padded, q):
    """The unit's rows of q, scaled, with heads padded to `padded` floats by zeros."""
    head_dim, scale = argument(a, 12), splat_f32x16(argument_f32(a, 13))
    for r in range(rows):
        row = first + r
        source = argument(a, 2) + row // group * argument(a, 3) + (kv_head * group + row % group) * head_dim * 4
        for d in range(0, padded, 16):
            value = keep_lanes(load_f32x16(source + d * 4), head_dim - d, float32(0.0))
            store_f32x16(q + (r * padded + d) * 4, value * scale)


@device
def update_softmax(scores, visible, state, output, padded):
    """One row meets a block of scores: make them weights, and scale down what was summed before.

    state: f32 [2], the row's maximum and sum so far.
    """
    largest = splat_f32x16(load_f32(state))
    for i in range(0, KEYS, 16):
        masked = keep_lanes(load_f32x16(scores + i * 4), visible - i, MINUS_INFINITY)
        store_f32x16(scores + i * 4, masked)
        largest = max_f32x16(largest, masked)
    before, now = load_f32(state), largest_f32x16(largest)
    top, total = splat_f32x16(now), zero_f32x16()
    for i in range(0, KEYS, 16):
        weight = exp_f32x16(load_f32x16(scores + i * 4) - top)
        store_f32x16(scores + i * 4, weight)
        total = total + weight
    store_f32(state, now)
    fade = exp_f32x16(splat_f32x16(before - now))
    store_f32(state + 4, load_f32(state + 4) * (sum_f32x16(fade) / float32(16.0)) + sum_f32x16(total))
    if before != now:
        for i in range(0, padded, 16):
            store_f32x16(output + i * 4, load_f32x16(output + i * 4) * fade)


@device
def write_row(a, row, group, kv_head, output, state):
    """Normalize a finished row into the output."""
    head_dim, factor = argument(a, 12), float32(1.0) / load_f32(state + 4)
    target = argument(a, 4) + row // group * argument(a, 5) + (kv_head * group + row % group) * head_dim * 4
    for d in range(head_dim):
        store_f32(target + d * 4, load_f32(output + d * 4) * factor)


@device
def partial_at(a, row, kv_head, split, padded):
    """Where a row's partial result lies: maximum and sum (in 16 floats), then the padded head."""
    index = (row * argument(a, 11) + kv_head) * MOST_SPLITS + split
    return argument(a, 14) + index * (padded + 16) * 4


@device
def write_partial(a, row, kv_head, split, padded, output, state):
    """Keep a row's unnormalized result for `merge`."""
    target = partial_at(a, row, kv_head, split, padded)
    store_f32(target, load_f32(state))
    store_f32(target + 4, load_f32(state + 4))
    for d in range(0, padded, 16):
        store_f32x16(target + 64 + d * 4, load_f32x16(output + d * 4))


def make_unit(format_name):
    """The device function for one unit of work."""
    width, load_16, transpose = STORAGE[format_name]

    @device
    def load_block(keys, values, count, token_bytes, padded, k_tile, v_tile):
        """Keys to [padded][KEYS] and values to [KEYS][padded]; reads up to 15 keys beyond `count`, within the run."""
        for i in range(0, count, 16):
            for d in range(0, padded, 16):
                transpose(keys + i * token_bytes + d * width, token_bytes, k_tile + i * padded * 4 + d * 64)
        for i in range(count):
            for d in range(0, padded, 16):
                store_f32x16(v_tile + (i * padded + d) * 4, load_16(values + i * token_bytes + d * width))
        fill(v_tile + count * padded * 4, -count % 16 * padded, float32(0.0))  # 0 * NaN would be NaN

    @device
    def unit(a, kv_head, first, rows, begin, end, scratch, padded, output, states):
        """Rows `first` to first + rows against the keys at positions begin to end."""
        group, token_bytes = argument(a, 10) // argument(a, 11), argument(a, 9)
        q, k_tile = scratch, scratch + ROWS * padded * 4
        v_tile, scores = k_tile + KEYS * padded * 4, k_tile + 2 * KEYS * padded * 4
        load_queries(a, first, rows, group, kv_head, padded, q)
        base = 0
        for run in range(argument(a, 7)):
            at = argument(a, 6) + run * 24
            skip, length = kv_head * argument(a, 8), load_i64(at + 16)
            for block in range(max(begin - base, 0), min(end - base, length), KEYS):
                count, offset = min(KEYS, min(end - base, length) - block), skip + block * token_bytes
                load_block(load_i64(at) + offset, load_i64(at + 8) + offset, count, token_bytes, padded, k_tile, v_tile)
                fill(scores, ROWS * KEYS, float32(0.0))
                keys = (count + 15) // 16 * 16
                for i in range(0, keys, 16):
                    rows_any(q, padded * 4, rows, k_tile + i * padded * 4, 64, padded, scores + i * 4, KEYS * 4)
                for r in range(rows):
                    position = load_i64(argument(a, 1) + (first + r) // group * 8)
                    visible = min(position + 1 - base - block, count)
                    update_softmax(scores + r * KEYS * 4, visible, states + r * 8, output + r * padded * 4, padded)
                for d in range(0, padded, 16):
                    rows_any(scores, KEYS * 4, rows, v_tile + d * 4, padded * 4, keys, output + d * 4, padded * 4)
            base += length

    return unit


def make(format_name):
    """The kernel for one storage type."""
    unit = make_unit(format_name)

    @kernel
    def attend(a, part, parts, thread):
        tokens, kv_heads = load_i64(argument(a, 0)), argument(a, 11)
        if tokens == 0:
            return
        group, padded = argument(a, 10) // kv_heads, (argument(a, 12) + 15) // 16 * 16
        positions, scratch = argument(a, 1), argument(a, 15) + thread * argument(a, 16)
        output = scratch + (ROWS + 2 * KEYS) * padded * 4 + ROWS * KEYS * 4
        states = output + ROWS * padded * 4
        length = load_i64(positions + (tokens - 1) * 8) + 1
        splits, tiles = splits_of(tokens, length), (tokens * group + ROWS - 1) // ROWS
        span = ((length + splits - 1) // splits + 15) // 16 * 16
        units = kv_heads * tiles * splits
        for i in range(units * part // parts, units * (part + 1) // parts):
            kv_head, first, split = i % kv_heads, i // kv_heads % tiles * ROWS, i // kv_heads // tiles
            rows = min(ROWS, tokens * group - first)
            last = load_i64(positions + (first + rows - 1) // group * 8)
            fill(output, ROWS * padded, float32(0.0))
            for r in range(rows):
                store_f32(states + r * 8, LOWEST)
                store_f32(states + r * 8 + 4, float32(0.0))
            end = min(last + 1, (split + 1) * span)
            unit(a, kv_head, first, rows, split * span, end, scratch, padded, output, states)
            for r in range(rows):
                if splits > 1:
                    write_partial(a, first + r, kv_head, split, padded, output + r * padded * 4, states + r * 8)
                else:
                    write_row(a, first + r, group, kv_head, output + r * padded * 4, states + r * 8)

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
    state = output + padded * 4
    for i in range(tokens * heads * part // parts, tokens * heads * (part + 1) // parts):
        row, kv_head = i // heads * group + i % heads % group, i % heads // group
        largest, total = LOWEST, float32(0.0)
        for split in range(splits):
            largest = max(largest, load_f32(partial_at(a, row, kv_head, split, padded)))
        fill(output, padded, float32(0.0))
        for split in range(splits):
            source = partial_at(a, row, kv_head, split, padded)
            weight = exp_f32x16(splat_f32x16(load_f32(source) - largest))
            total += load_f32(source + 4) * (sum_f32x16(weight) / float32(16.0))
            for d in range(0, padded * 4, 64):
                store_f32x16(output + d, fma_f32x16(weight, load_f32x16(source + 64 + d), load_f32x16(output + d)))
        store_f32(state + 4, total)
        write_row(a, row, group, kv_head, output, state)
