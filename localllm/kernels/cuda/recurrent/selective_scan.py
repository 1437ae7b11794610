"""The recurrence of Mamba (Gu and Dao 2023): every column has its own state, [state_size], and decay rates."""

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


@device
def advance(source, target, rates, dt, x, b, c, state_size):
    """Update the state of a column at `source` for one token, and store it at `target`.

    Return this thread's share of the product of c with the new state.
    """
    read = float32(0)
    for n in range(part_of_column(), state_size, PARTS):
        state = exp(dt * load_f32(rates + 64 * n)) * load_f32(source + 64 * n) + dt * x * load_f32(b + 4 * n)
        store_f32(target + 64 * n, state)
        read += state * load_f32(c + 4 * n)
    return read


def selective_scan(
    sequences, sequence_count, offset, x, dt, b, c, state_stride, rates, skip, y, stride, columns, state_size
):
    """Process all tokens; a block of threads for ACROSS columns. The formula is at SELECTIVE_SCAN in table.py."""
    column = cuda.blockIdx.x * ACROSS + column_in_block()
    state, factor = (column // 16 * state_size * 16 + column % 16) * 4, load_f32(skip + 4 * column)
    for s in range(load_i64(sequence_count)):
        first, count = tokens_of(sequences, s)
        source, target = states_of(sequences, s, offset + state)
        for t in range(first, first + count):
            at, of_state = t * stride + 4 * column, t * state_stride
            number, step = load_f32(x + at), load_f32(dt + at)
            read = advance(source, target, rates + state, step, number, b + of_state, c + of_state, state_size)
            total = sum_of_column(read) + factor * number
            if part_of_column() == 0:
                store_f32(y + at, total)
            source = target
