"""Causal convolution over the tokens of a sequence, separately for each column (depthwise).

The state is a window: the x of the last taps - 1 tokens before the run.
"""

from localllm.kernels.cpu.recurrent.sequences import SEQUENCE_BYTES, states_of, tokens_of
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import fma_f32x16, load_f32x16, load_i64, sigmoid_f32x16, store_f32x16
from localllm.kernels.table import CONVOLVE


@device
def row_of(x, stride, window, row_bytes, taps, t):
    """Return the address of the x of token t, counted from the sequence's first token in the run.

    A negative t is a token before the run, which is in the window.
    """
    return x + t * stride if t >= 0 else window + (t + taps - 1) * row_bytes


@device
def convolve_token(a, x, window, t, y, first, last):
    """Compute y for token t; first, last: offsets in bytes of the columns to compute."""
    taps, weights, stride = argument(a, CONVOLVE.taps), argument(a, CONVOLVE.weights), argument(a, CONVOLVE.stride)
    row_bytes, silu = (argument(a, CONVOLVE.columns) + 15) // 16 * 64, argument(a, CONVOLVE.silu)
    for i in range(first, last, 64):
        total = load_f32x16(argument(a, CONVOLVE.bias) + i)
        for tap in range(taps):
            row = row_of(x, stride, window, row_bytes, taps, t - taps + 1 + tap)
            total = fma_f32x16(load_f32x16(weights + tap * row_bytes + i), load_f32x16(row + i), total)
        store_f32x16(y + i, total * sigmoid_f32x16(total) if silu == 1 else total)


@device
def slide(a, x, count, window, target, first, last):
    """Write the window after `count` more tokens to `target`.

    Rows are written in order, so `target` may be the old window. first, last: offsets in bytes of the columns.
    """
    taps, row_bytes = argument(a, CONVOLVE.taps), (argument(a, CONVOLVE.columns) + 15) // 16 * 64
    for row in range(taps - 1):
        source = row_of(x, argument(a, CONVOLVE.stride), window, row_bytes, taps, count - taps + 1 + row)
        for i in range(first, last, 64):
            store_f32x16(target + row * row_bytes + i, load_f32x16(source + i))


@kernel
def convolve(a, part, parts, thread):
    """Convolve all tokens. The parts share the columns."""
    width, stride = (argument(a, CONVOLVE.columns) + 15) // 16, argument(a, CONVOLVE.stride)
    first, last = width * part // parts * 64, width * (part + 1) // parts * 64
    for s in range(load_i64(argument(a, CONVOLVE.sequence_count))):
        sequence = argument(a, CONVOLVE.sequences) + s * SEQUENCE_BYTES
        token, count = tokens_of(sequence)
        window, target = states_of(sequence, argument(a, CONVOLVE.offset))
        x, y = argument(a, CONVOLVE.x) + token * stride, argument(a, CONVOLVE.y) + token * stride
        for t in range(count):
            convolve_token(a, x, window, t, y + t * stride, first, last)
        slide(a, x, count, window, target, first, last)
