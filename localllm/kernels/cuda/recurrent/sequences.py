"""Functions that kernels of recurrent layers share: the fields of a SEQUENCE, and sums over the threads of a column.

The columns of a state lie in groups of 16. A block of threads processes ACROSS columns; PARTS threads share the rows of
a column, and add up their results.
"""

from numba import cuda

from localllm.kernels.cuda.device import BLOCK, device, float32, load_i64
from localllm.kernels.table import SEQUENCE

ACROSS = min(16, BLOCK // 2)
PARTS = BLOCK // ACROSS
SEQUENCE_BYTES = 8 * len(SEQUENCE)


@device
def tokens_of(sequences, number):
    """Return the number of a sequence's first token in the run, and the number of its tokens there."""
    sequence = sequences + number * SEQUENCE_BYTES
    return load_i64(sequence + 8 * SEQUENCE.first), load_i64(sequence + 8 * SEQUENCE.count)


@device
def states_of(sequences, number, offset):
    """Return the addresses of a part of the state, `offset` bytes from its beginning: before the run, and after it."""
    sequence = sequences + number * SEQUENCE_BYTES
    return load_i64(sequence + 8 * SEQUENCE.state) + offset, load_i64(sequence + 8 * SEQUENCE.next_state) + offset


@device
def column_in_block():
    """Return the number of this thread's column within the block."""
    return cuda.threadIdx.x % ACROSS


@device
def part_of_column():
    """Return the first row of this thread in its column. Its other rows follow, each PARTS further."""
    return cuda.threadIdx.x // ACROSS


@device
def sum_of_column(x):
    """Return the sum of x, a float32, over the threads of this thread's column.

    All threads of the block must call it.
    """
    numbers = cuda.shared.array(BLOCK, float32)
    cuda.syncthreads()  # the previous sums have been read
    numbers[cuda.threadIdx.x] = x
    cuda.syncthreads()
    total = float32(0)
    for part in range(PARTS):
        total += numbers[part * ACROSS + column_in_block()]
    return total
