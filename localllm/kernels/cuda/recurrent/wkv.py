"""Recurrences whose state is a matrix for each head, with a decay for every row, as in kernels/cpu/recurrent/wkv.py."""

from numba import cuda

from localllm.kernels.cuda.device import device, float32, load_f32, load_i64, store_f32
from localllm.kernels.cuda.recurrent.head_scan import read
from localllm.kernels.cuda.recurrent.sequences import (
    ACROSS,
    PARTS,
    column_in_block,
    part_of_column,
    states_of,
    sum_of_column,
    tokens_of,
)

ZERO = float32(0)


@device
def gated(source, target, r, w, k, number, key_dim):
    """Apply a token to a column of the state; return this thread's part of the query's product with the new column."""
    found = ZERO
    for i in range(part_of_column(), key_dim, PARTS):
        new = load_f32(source + 64 * i) * load_f32(w + 4 * i) + load_f32(k + 4 * i) * number
        store_f32(target + 64 * i, new)
        found += new * load_f32(r + 4 * i)
    return found


@device
def first_of(source, target, r, w, k, weight, number, key_dim):
    """Apply a token to the rows, but read them before they change; the token's own part has weights."""
    found = ZERO
    for i in range(part_of_column(), key_dim, PARTS):
        old, new = load_f32(source + 64 * i), load_f32(k + 4 * i) * number
        store_f32(target + 64 * i, old * load_f32(w + 4 * i) + new)
        found += (old + load_f32(weight + 4 * i) * new) * load_f32(r + 4 * i)
    return found


@device
def delta(source, target, r, w, k, b, next_a, number, seen, key_dim):
    """Apply a token by the generalized delta rule; also return the next a's product with the new rows.

    seen: the product of a with the old state; b * seen is added to the rows.
    """
    of_query, of_next = ZERO, ZERO
    for i in range(part_of_column(), key_dim, PARTS):
        new = load_f32(source + 64 * i) * load_f32(w + 4 * i) + load_f32(k + 4 * i) * number
        new += load_f32(b + 4 * i) * seen
        store_f32(target + 64 * i, new)
        of_query += new * load_f32(r + 4 * i)
        of_next += new * load_f32(next_a + 4 * i)
    return of_query, of_next


def make(rule):
    """Make the kernel for "gated" sums, for "first" weights, or for the "delta" rule."""
    is_delta, is_first = rule == "delta", rule == "first"

    def wkv(
        sequences, sequence_count, offset, r, w, k, v, a, b, first, key_stride, y, stride, heads, key_dim, value_dim
    ):
        width = (value_dim + 15) // 16 * 16
        head, column = cuda.blockIdx.x * ACROSS // width, cuda.blockIdx.x * ACROSS % width + column_in_block()
        state = ((head * width + column - column % 16) * key_dim + column % 16) * 4
        key, value, seen = head * key_dim * 4, (head * value_dim + column) * 4, ZERO
        for s in range(load_i64(sequence_count)):
            start, count = tokens_of(sequences, s)
            source, target = states_of(sequences, s, offset + state)
            if is_delta:
                seen = sum_of_column(read(source, a + start * key_stride + key, key_dim))
            for t in range(start, start + count):
                at = t * key_stride + key
                number = load_f32(v + t * stride + value) if column < value_dim else ZERO
                if is_delta:
                    of_next = at + key_stride if t + 1 < start + count else at
                    found, of_next_a = delta(
                        source, target, r + at, w + at, k + at, b + at, a + of_next, number, seen, key_dim
                    )
                    seen = sum_of_column(of_next_a)
                elif is_first:
                    found = first_of(source, target, r + at, w + at, k + at, first + key, number, key_dim)
                else:
                    found = gated(source, target, r + at, w + at, k + at, number, key_dim)
                found = sum_of_column(found)
                if part_of_column() == 0 and column < value_dim:
                    store_f32(y + t * stride + value, found)
                source = target

    return wkv
