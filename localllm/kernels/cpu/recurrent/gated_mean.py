"""A mean of the last few tokens of a sequence, weighted by the softmax of their gates, separately for each column.

The state is a window as in convolution.py, of the previous tokens' values and gates. GATED_MEAN in table.py
explains taps, stretches and places.
"""

from numba import float32

from localllm.kernels.cpu.recurrent.convolution import row_of
from localllm.kernels.cpu.recurrent.sequences import SEQUENCE_BYTES, states_of, tokens_of
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import (
    exp_f32x16,
    fma_f32x16,
    load_i64,
    load_lanes_f32x16,
    max_f32x16,
    reciprocal_f32x16,
    splat_f32x16,
    store_lanes_f32x16,
    zero_f32x16,
)
from localllm.kernels.table import GATED_MEAN, SEQUENCE

LOWEST = float32(-3e38)


@device
def gate_of(a, row, tap, i, lanes):
    """Return the gates of `lanes` columns from number i on, for a tap: those of the token plus the tap's own.

    row: address of the token's row in x, from the columns of the tap's stretch on.
    """
    columns, places = argument(a, GATED_MEAN.columns), argument(a, GATED_MEAN.places)
    of_place = places + tap * ((columns + 15) // 16 * 64) + i * 4
    gates = row + argument(a, GATED_MEAN.stretches) * columns * 4
    return load_lanes_f32x16(gates + i * 4, lanes) + load_lanes_f32x16(of_place, lanes)


@device
def row_of_tap(a, x, window, row_bytes, t, tap):
    """Return the address of the columns that a tap averages for token t."""
    taps, stride = argument(a, GATED_MEAN.taps), argument(a, GATED_MEAN.x_stride)
    row = row_of(x, stride, window, row_bytes, taps, t - taps + 1 + tap)
    return row + tap * argument(a, GATED_MEAN.stretches) // taps * argument(a, GATED_MEAN.columns) * 4


@device
def mean_of_token(a, x, window, row_bytes, t, position, y, first, last):
    """Compute y for token t, columns `first` to `last`. Taps before the beginning of the sequence do not count.

    position: of the token in its sequence.
    """
    taps = argument(a, GATED_MEAN.taps)
    for i in range(first, last, 16):
        lanes, top = min(16, last - i), splat_f32x16(LOWEST)
        for tap in range(max(taps - 1 - position, 0), taps):
            top = max_f32x16(top, gate_of(a, row_of_tap(a, x, window, row_bytes, t, tap), tap, i, lanes))
        total, mean = zero_f32x16(), zero_f32x16()
        for tap in range(max(taps - 1 - position, 0), taps):
            row = row_of_tap(a, x, window, row_bytes, t, tap)
            gate = gate_of(a, row, tap, i, lanes)
            weight = exp_f32x16(gate - top) + (gate - gate)  # NaN if the gate is not finite
            total, mean = total + weight, fma_f32x16(weight, load_lanes_f32x16(row + i * 4, lanes), mean)
        store_lanes_f32x16(y + i * 4, mean * reciprocal_f32x16(total), lanes)


@device
def slide(a, x, count, window, target, row_bytes, first, last):
    """Write the window after `count` more tokens to `target`: columns `first` to `last`, their values and gates."""
    taps, stride, columns, sides = (
        argument(a, GATED_MEAN.taps),
        argument(a, GATED_MEAN.x_stride),
        argument(a, GATED_MEAN.columns),
        2 * argument(a, GATED_MEAN.stretches),
    )
    for row in range(taps - 1):
        source = row_of(x, stride, window, row_bytes, taps, count - taps + 1 + row)
        for i in range(first, last, 16):
            lanes = min(16, last - i)
            for side in range(sides):
                at = (side * columns + i) * 4
                store_lanes_f32x16(target + row * row_bytes + at, load_lanes_f32x16(source + at, lanes), lanes)


@kernel
def gated_mean(a, part, parts, thread):
    """Average all tokens. The parts share the columns."""
    columns, stride = argument(a, GATED_MEAN.columns), argument(a, GATED_MEAN.stride)
    blocks, row_bytes = (columns + 15) // 16, (2 * argument(a, GATED_MEAN.stretches) * columns + 15) // 16 * 64
    first, last = blocks * part // parts * 16, min(blocks * (part + 1) // parts * 16, columns)
    for s in range(load_i64(argument(a, GATED_MEAN.sequence_count))):
        sequence = argument(a, GATED_MEAN.sequences) + s * SEQUENCE_BYTES
        token, count = tokens_of(sequence)
        window, target = states_of(sequence, argument(a, GATED_MEAN.offset))
        x = argument(a, GATED_MEAN.x) + token * argument(a, GATED_MEAN.x_stride)
        start = argument(sequence, SEQUENCE.length) - count
        for t in range(count):
            y = argument(a, GATED_MEAN.y) + (token + t) * stride
            mean_of_token(a, x, window, row_bytes, t, start + t, y, first, last)
        slide(a, x, count, window, target, row_bytes, first, last)
