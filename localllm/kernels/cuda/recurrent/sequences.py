"""The sequences of a run, for kernels of recurrent layers: where each has its tokens, and its state.

States lie as on the CPU, so that they can move: 16 columns of a matrix together. A block of threads treats ACROSS of
those, each column by PARTS threads that share the rows and add up what they have found.
"""

from numba import cuda

from localllm.kernels.arguments import SEQUENCE
from localllm.kernels.cuda.device import BLOCK, device, float32, load_i64

ACROSS = min(16, BLOCK // 2)
PARTS = BLOCK // ACROSS
SEQUENCE_BYTES = 8 * len(SEQUENCE)


@device
def tokens_of(sequences, number):
    """Return the first token of a sequence in the run, and how many it has there."""
    sequence = sequences + number * SEQUENCE_BYTES
    return load_i64(sequence + 8 * SEQUENCE.first), load_i64(sequence + 8 * SEQUENCE.count)


@device
def states_of(sequences, number, offset):
    """Return the source and target addresses of a part of its state."""
    sequence = sequences + number * SEQUENCE_BYTES
    return load_i64(sequence + 8 * SEQUENCE.state) + offset, load_i64(sequence + 8 * SEQUENCE.next_state) + offset


@device
def column_in_block():
    """Return this thread's column within the block."""
    return cuda.threadIdx.x % ACROSS


@device
def part_of_column():
    """Return the first of this thread's rows; the others follow PARTS apart."""
    return cuda.threadIdx.x // ACROSS


@device
def sum_of_column(x):
    """Compute the sum of the float32 x of all threads of this one's column; all threads of the block must call it."""
    numbers = cuda.shared.array(BLOCK, float32)
    cuda.syncthreads()  # an earlier sum has been read
    numbers[cuda.threadIdx.x] = x
    cuda.syncthreads()
    total = float32(0)
    for part in range(PARTS):
        total += numbers[part * ACROSS + column_in_block()]
    return total
