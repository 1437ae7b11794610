"""Recurrences with a decay for each row of a head's state, as in kernels/cpu/recurrent/wkv.py."""

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
    """Update a column of the state at `source` by the rule "gated" for one token, and store it at `target`.

    Return this thread's share of the product of r with the new column. number: an element of the token's v.
    """
    total = ZERO
    for i in range(part_of_column(), key_dim, PARTS):
        new = load_f32(source + 64 * i) * load_f32(w + 4 * i) + load_f32(k + 4 * i) * number
        store_f32(target + 64 * i, new)
        total += new * load_f32(r + 4 * i)
    return total


@device
def first_of(source, target, r, w, k, weight, number, key_dim):
    """Update a column of the state at `source` by the rule "first" for one token, and store it at `target`.

    The result uses the old column, and k v with a weight.

    Parameters and result as in `gated`.
    """
    total = ZERO
    for i in range(part_of_column(), key_dim, PARTS):
        old, new = load_f32(source + 64 * i), load_f32(k + 4 * i) * number
        store_f32(target + 64 * i, old * load_f32(w + 4 * i) + new)
        total += (old + load_f32(weight + 4 * i) * new) * load_f32(r + 4 * i)
    return total


@device
def delta(source, target, r, w, k, b, next_a, number, state_product, key_dim):
    """Update a column of the state at `source` by the rule "delta" for one token, and store it at `target`.

    state_product: the product of a with the old column; b times it is added. Return this thread's shares of the
    products of r, and of the next token's a, with the new column.
    """
    of_query, of_next = ZERO, ZERO
    for i in range(part_of_column(), key_dim, PARTS):
        new = load_f32(source + 64 * i) * load_f32(w + 4 * i) + load_f32(k + 4 * i) * number
        new += load_f32(b + 4 * i) * state_product
        store_f32(target + 64 * i, new)
        of_query += new * load_f32(r + 4 * i)
        of_next += new * load_f32(next_a + 4 * i)
    return of_query, of_next


def make(rule):
    """Make the kernel; rule: "gated", "first" or "delta"."""
    is_delta, is_first = rule == "delta", rule == "first"

    def wkv(
        sequences, sequence_count, offset, r, w, k, v, a, b, first, key_stride, y, stride, heads, key_dim, value_dim
    ):
        width = (value_dim + 15) // 16 * 16
        head, column = cuda.blockIdx.x * ACROSS // width, cuda.blockIdx.x * ACROSS % width + column_in_block()
        state = ((head * width + column - column % 16) * key_dim + column % 16) * 4
        key, value, state_product = head * key_dim * 4, (head * value_dim + column) * 4, ZERO
        for s in range(load_i64(sequence_count)):
            start, count = tokens_of(sequences, s)
            source, target = states_of(sequences, s, offset + state)
            if is_delta:
                state_product = sum_of_column(read(source, a + start * key_stride + key, key_dim))
            for t in range(start, start + count):
                at = t * key_stride + key
                number = load_f32(v + t * stride + value) if column < value_dim else ZERO
                if is_delta:
                    of_next = at + key_stride if t + 1 < start + count else at
                    query_reads, of_next_a = delta(
                        source, target, r + at, w + at, k + at, b + at, a + of_next, number, state_product, key_dim
                    )
                    state_product = sum_of_column(of_next_a)
                elif is_first:
                    query_reads = first_of(source, target, r + at, w + at, k + at, first + key, number, key_dim)
                else:
                    query_reads = gated(source, target, r + at, w + at, k + at, number, key_dim)
                query_reads = sum_of_column(query_reads)
                if part_of_column() == 0 and column < value_dim:
                    store_f32(y + t * stride + value, query_reads)
                source = target

    return wkv
