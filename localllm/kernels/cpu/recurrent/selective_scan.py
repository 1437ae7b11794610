"""The recurrence of Mamba (Gu and Dao 2023): every column has its own state, [state_size], and decay rates.

16 columns make a vector. Their states, 1 KB for a state_size of 16, stay in the L1 cache for all tokens.
"""

from localllm.kernels.cpu.recurrent.sequences import SEQUENCE_BYTES, states_of, tokens_of
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import (
    exp_f32x16,
    fma_f32x16,
    load_f32,
    load_f32x16,
    load_i64,
    splat_f32x16,
    store_f32x16,
)
from localllm.kernels.table import SELECTIVE_SCAN


@device
def advance(source, target, rates, dt, input, b, c, y, state_size):
    """Apply a token to the states of 16 columns, from source to target; return y plus their product with c.

    input: dt * x.
    """
    for n in range(state_size):
        decayed = exp_f32x16(dt * load_f32x16(rates + n * 64)) * load_f32x16(source + n * 64)
        state = fma_f32x16(input, splat_f32x16(load_f32(b + n * 4)), decayed)
        store_f32x16(target + n * 64, state)
        y = fma_f32x16(state, splat_f32x16(load_f32(c + n * 4)), y)
    return y


@device
def scan(a, sequence, column):
    """Process all tokens of a sequence for 16 columns from number `column` on."""
    first, count = tokens_of(sequence)
    stride, state_size = argument(a, SELECTIVE_SCAN.stride), argument(a, SELECTIVE_SCAN.state_size)
    state = column * state_size * 4
    source, target = states_of(sequence, argument(a, SELECTIVE_SCAN.offset) + state)
    skip = load_f32x16(argument(a, SELECTIVE_SCAN.skip) + column * 4)
    for t in range(first, first + count):
        at, of_state = t * stride + column * 4, t * argument(a, SELECTIVE_SCAN.state_stride)
        x, dt = load_f32x16(argument(a, SELECTIVE_SCAN.x) + at), load_f32x16(argument(a, SELECTIVE_SCAN.dt) + at)
        b, c = argument(a, SELECTIVE_SCAN.b) + of_state, argument(a, SELECTIVE_SCAN.c) + of_state
        rates = argument(a, SELECTIVE_SCAN.rates) + state
        y = advance(source, target, rates, dt, dt * x, b, c, skip * x, state_size)
        store_f32x16(argument(a, SELECTIVE_SCAN.y) + at, y)
        source = target


@kernel
def selective_scan(a, part, parts, thread):
    """Process all tokens. The parts share the columns."""
    width = (argument(a, SELECTIVE_SCAN.columns) + 15) // 16
    for i in range(width * part // parts, width * (part + 1) // parts):
        for s in range(load_i64(argument(a, SELECTIVE_SCAN.sequence_count))):
            scan(a, argument(a, SELECTIVE_SCAN.sequences) + s * SEQUENCE_BYTES, i * 16)
