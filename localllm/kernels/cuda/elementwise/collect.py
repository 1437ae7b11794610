"""Sums of squared activations per column, for importance matrices (localllm.quantizing.imatrix)."""

from numba import cuda

from localllm.kernels.cuda.device import load_f32, load_i64, store_f32, store_i64
from localllm.kernels.table import EXPERT

EXPERT_BYTES = 8 * len(EXPERT)
NUMBER, FIRST, COUNT = 8 * EXPERT.number, 8 * EXPERT.first, 8 * EXPERT.count


def add_squares(count, x, stride, columns, sums):
    """Add x^2 over the tokens to the sums, in the order of the tokens; a thread for each column."""
    column = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if column >= columns:
        return
    total = load_f32(sums + 4 * column)
    for row in range(load_i64(count)):
        total += load_f32(x + row * stride + 4 * column) ** 2
    store_f32(sums + 4 * column, total)


def add_expert_squares(active, active_count, x, stride, columns, sums, sums_stride, counts):
    """Add x^2 over each expert's rows to the expert's sums; a thread for each column.

    The first thread also adds the numbers of rows to the experts' counts.
    """
    column = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if column >= columns:
        return
    for i in range(load_i64(active_count)):
        expert = active + i * EXPERT_BYTES
        number, first, rows = load_i64(expert + NUMBER), load_i64(expert + FIRST), load_i64(expert + COUNT)
        place = sums + number * sums_stride + 4 * column
        total = load_f32(place)
        for row in range(first, first + rows):
            total += load_f32(x + row * stride + 4 * column) ** 2
        store_f32(place, total)
        if column == 0:
            store_i64(counts + 8 * number, load_i64(counts + 8 * number) + rows)
