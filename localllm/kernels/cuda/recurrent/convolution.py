"""Causal convolution over the tokens of a sequence, separately for each column (depthwise).

The state is a window: the x of the last taps - 1 tokens before the run.
"""

from numba import cuda

from localllm.kernels.cuda.device import device, load_f32, load_i64, store_f32
from localllm.kernels.cuda.elementwise.formulas import sigmoid_of
from localllm.kernels.cuda.recurrent.sequences import states_of, tokens_of

TOKENS = 32  # consecutive tokens of a thread; at least as many as there are taps


@device
def row_of(x, stride, window, row_bytes, taps, t):
    """Return the address of the x of token t, counted from the sequence's first token in the run.

    A negative t is a token before the run, which is in the window.
    """
    return x + t * stride if t >= 0 else window + (t + taps - 1) * row_bytes


def convolve(sequences, sequence_count, offset, taps, weights, bias, silu, x, y, stride, columns):
    """Write y[t] = bias + the sum over taps of weights[tap] * x[t - taps + 1 + tap], and the new window.

    A thread processes one column and some tokens. Only the thread with a sequence's first tokens reads the old window,
    and afterwards writes the new one, row by row in order, so that both may be the same memory.
    """
    column = 4 * (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    row_bytes, tokens = (columns + 15) // 16 * 64, max(TOKENS, taps)
    if column >= 4 * columns:
        return
    for s in range(load_i64(sequence_count)):
        token, count = tokens_of(sequences, s)
        window, target = states_of(sequences, s, offset + column)
        source = x + token * stride + column
        for start in range(cuda.blockIdx.y * tokens, count, cuda.gridDim.y * tokens):
            for t in range(start, min(start + tokens, count)):
                total = load_f32(bias + column)
                for tap in range(taps):
                    row = row_of(source, stride, window, row_bytes, taps, t - taps + 1 + tap)
                    total += load_f32(weights + tap * row_bytes + column) * load_f32(row)
                store_f32(y + (token + t) * stride + column, total * sigmoid_of(total) if silu == 1 else total)
        if cuda.blockIdx.y == 0:
            for row in range(taps - 1):
                last_x = load_f32(row_of(source, stride, window, row_bytes, taps, count - taps + 1 + row))
                store_f32(target + row * row_bytes, last_x)
