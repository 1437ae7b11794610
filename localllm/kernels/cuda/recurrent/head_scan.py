"""Recurrences whose state is a matrix for each head, [key_dim, value_dim], as in kernels/cpu/recurrent/head_scan.py.

A block of threads processes ACROSS columns of a head's state; several threads share the rows of a column. By the delta
rule a token needs what its key reads of the state before it: that is summed up while the previous token changes the
state.
"""

from numba import cuda

from localllm.kernels.cuda.device import device, exp, float32, load_f32, load_i64, store_f32
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
def read(state, k, key_dim):
    """Return this thread's share of the product of a key with a column of the state."""
    total = ZERO
    for i in range(part_of_column(), key_dim, PARTS):
        total += load_f32(state + 64 * i) * load_f32(k + 4 * i)
    return total


@device
def advance(source, target, decay, d, k, q, next_k, key_dim):
    """Update a column of the state at `source` for one token, and store it at `target`.

    Return this thread's shares of the products of the query, and of the next token's key, with the new column.
    """
    of_query, of_key = ZERO, ZERO
    for i in range(part_of_column(), key_dim, PARTS):
        number = load_f32(source + 64 * i) * decay + load_f32(k + 4 * i) * d
        store_f32(target + 64 * i, number)
        of_query += number * load_f32(q + 4 * i)
        of_key += number * load_f32(next_k + 4 * i)
    return of_query, of_key


def make(rule):
    """Make the kernel; rule: "plain" (Mamba 2) or "delta"."""
    is_delta = rule == "delta"

    def head_scan(
        sequences, sequence_count, offset, q, k, key_stride, v, y, stride, dt, strength, head_stride, rates, skip,
        heads, key_heads, repeat, key_dim, value_dim,
    ):  # fmt: skip
        width = (value_dim + 15) // 16 * 16
        head, column = cuda.blockIdx.x * ACROSS // width, cuda.blockIdx.x * ACROSS % width + column_in_block()
        state = ((head * width + column - column % 16) * key_dim + column % 16) * 4
        key, value = head // repeat % key_heads * key_dim * 4, (head * value_dim + column) * 4
        rate, factor, key_reads = load_f32(rates + 4 * head), ZERO if is_delta else load_f32(skip + 4 * head), ZERO
        for s in range(load_i64(sequence_count)):
            first, count = tokens_of(sequences, s)
            source, target = states_of(sequences, s, offset + state)
            if is_delta:
                key_reads = sum_of_column(read(source, k + first * key_stride + key, key_dim))
            for t in range(first, first + count):
                of_head, of_key = t * head_stride + 4 * head, t * key_stride + key
                of_next = of_key + key_stride if t + 1 < first + count else of_key
                decay, by = exp(rate * load_f32(dt + of_head)), load_f32(strength + of_head)
                number = load_f32(v + t * stride + value) if column < value_dim else ZERO
                d = (number - decay * key_reads) * by
                query_reads, next_key_reads = advance(
                    source, target, decay, d, k + of_key, q + of_key, k + of_next, key_dim
                )
                query_reads = sum_of_column(query_reads)
                if is_delta:
                    key_reads = sum_of_column(next_key_reads)
                if part_of_column() == 0 and column < value_dim:
                    store_f32(y + t * stride + value, query_reads + factor * number)
                source = target

    return head_scan
