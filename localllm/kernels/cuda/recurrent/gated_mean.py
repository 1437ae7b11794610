"""A mean of the last few tokens of a sequence, weighted by the softmax of their gates, separately for each column.

The state is a window of the previous tokens' values and gates. GATED_MEAN in table.py explains taps, stretches and
places.
"""

from numba import cuda

from localllm.kernels.cuda.device import exp, float32, load_f32, load_i64, store_f32
from localllm.kernels.cuda.recurrent.convolution import TOKENS, row_of
from localllm.kernels.cuda.recurrent.sequences import SEQUENCE_BYTES, states_of, tokens_of
from localllm.kernels.table import SEQUENCE

LOWEST, ZERO = float32(-3e38), float32(0)


def gated_mean(sequences, sequence_count, offset, taps, stretches, places, x, x_stride, y, stride, columns):
    """Write y[t] = the sum of p[tap] * x[t - taps + 1 + tap] over the taps that have tokens, and the new window.

    A thread processes one column and some tokens. Only the thread with a sequence's first tokens reads the old window,
    and afterwards writes the new one, row by row in order.
    """
    column = 4 * (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    row_bytes, bytes_per_token = (2 * stretches * columns + 15) // 16 * 64, (columns + 15) // 16 * 64
    tokens, gates = max(TOKENS, taps), 4 * stretches * columns
    if column >= 4 * columns:
        return
    for s in range(load_i64(sequence_count)):
        token, count = tokens_of(sequences, s)
        window, target = states_of(sequences, s, offset + column)
        source, length = x + token * x_stride + column, load_i64(sequences + s * SEQUENCE_BYTES + 8 * SEQUENCE.length)
        for start in range(cuda.blockIdx.y * tokens, count, cuda.gridDim.y * tokens):
            for t in range(start, min(start + tokens, count)):
                top, total, mean, least = LOWEST, ZERO, ZERO, max(taps - 1 - (length - count + t), 0)
                for tap in range(least, taps):
                    row = row_of(source, x_stride, window, row_bytes, taps, t - taps + 1 + tap)
                    row += tap * stretches // taps * 4 * columns
                    top = max(top, load_f32(row + gates) + load_f32(places + tap * bytes_per_token + column))
                for tap in range(least, taps):
                    row = row_of(source, x_stride, window, row_bytes, taps, t - taps + 1 + tap)
                    row += tap * stretches // taps * 4 * columns
                    gate = load_f32(row + gates) + load_f32(places + tap * bytes_per_token + column)
                    weight = exp(gate - top) + (gate - gate)
                    total, mean = total + weight, mean + weight * load_f32(row)
                store_f32(y + (token + t) * stride + column, mean / total)
        if cuda.blockIdx.y == 0:
            for row in range(taps - 1):
                last_row = row_of(source, x_stride, window, row_bytes, taps, count - taps + 1 + row)
                for side in range(2 * stretches):
                    store_f32(target + row * row_bytes + 4 * side * columns, load_f32(last_row + 4 * side * columns))
