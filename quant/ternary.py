"""Encode TQ1_0, TQ2_0 and Q1_0, for models that were trained with such weights.

In TQ1_0 and TQ2_0 weights are -d, 0 or d, with a d for 256 weights; in Q1_0 they are d or -d, with a d for 128. A byte
of TQ1_0 holds 5 base-3 digits, each weight / d + 1. Their number is stored as a fraction: number / 243 * 256, rounded
up. So 3 times the byte has the first digit above its lowest 8 bits, 3 times those 8 bits the second, and so on. TQ2_0
stores the digits as codes of 2 bits.

The search: weights larger than a border become d or -d, the others 0. Then the best d is Σw|x| / Σw over the larger
ones, which reduces the error Σwx² by (Σw|x|)² / Σw. The best of BORDERS is refined: border = d / 2, and the best d for
it, in turns. In Q1_0 the best signs are those of the weights, and the best d is Σw|x| / Σw over all.
"""

import numpy as np

from localllm.quant.blocks import build_packer, normalize, round_to_float16, store_half
from localllm.quant.formats import BY_NAME, LAYOUTS, TRITS
from localllm.quant.numba_cache import compile_cached, compile_inline

TQ1_BYTES, TQ2_BYTES, TQ1_D = BY_NAME["TQ1_0"].bytes, BY_NAME["TQ2_0"].bytes, LAYOUTS["TQ1_0"].d
TQ2_D = LAYOUTS["TQ2_0"].d
put_code = build_packer(LAYOUTS["TQ2_0"].codes, 32)

# Initial borders, in units of the root mean square: 0.6 is best for a normal distribution, more for heavy tails and
# for rare weights among zeros.
BORDERS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.25, 1.6, 2.2, 3.0, 5.0, 8.0, 12.0], np.float32)
MAX_TURNS = 16


@compile_cached
def sum_above(x, w, border):
    """Return (Σw|x|, Σw) over those of 256 weights whose magnitude exceeds the border."""
    product, square = np.float32(0), np.float32(0)
    for i in range(256):
        size = abs(x[i])
        weight = w[i] if size > border else np.float32(0)
        product += weight * size
        square += weight
    return product, square


@compile_cached
def search_border(x, w):
    """Return the best d for the codes of the best border; 0 if all weights are 0."""
    product, square = np.float32(0), np.float32(0)
    for i in range(256):
        product += w[i] * x[i] * x[i]
        square += w[i]
    unit = np.sqrt(product / square)
    d, gain = np.float32(0), np.float32(0)
    for border in BORDERS:
        product, square = sum_above(x, w, border * unit)
        if product * product > gain * square:
            d, gain = product / square, product * product / square
    return d


@compile_cached
def search_d(x, w, unit):
    """Return the float16 scale d with the least error. x: 256 weights, divided by `unit`; w: their importance."""
    best, least = np.float32(0), np.float32(0)  # the error minus Σwx²; with d = 0 all weights are 0
    d = search_border(x, w)
    for _ in range(MAX_TURNS):
        stored = round_to_float16(d * unit)
        d = stored / unit
        product, square = sum_above(x, w, d * np.float32(0.5))
        error = d * (d * square - np.float32(2) * product)
        if error >= least:
            break
        best, least = stored, error
        d = product / square
    return best


@compile_cached
def choose_codes(weights, importance, row, start, x, codes):
    """Choose d for 256 weights of a row from `start` on; write their codes, 0, 1 or 2, and return d."""
    unit = normalize(weights, row, start, 256, x)
    d = search_d(x, importance[start : start + 256], unit) if unit > 0 else np.float32(0)
    border = d / unit * np.float32(0.5) if d > 0 else np.float32(2)
    for i in range(256):
        codes[i] = 1 + (x[i] > border) - (x[i] < -border)
    return d


@compile_inline
def pack_digits(codes, bytes, digits, out):
    """Pack the digits in each column, [digits, bytes], into one byte."""
    for i in range(bytes):
        number = 0
        for n in range(digits):
            number = 3 * number + codes[bytes * n + i]
        for _ in range(digits, 5):
            number *= 3
        out[i] = (number * 256 + 242) // 243


@compile_inline
def pack_tq1_0(codes, out):
    for first, byte, bytes, digits in TRITS:
        pack_digits(codes[first:], bytes, digits, out[byte:])


@compile_inline
def pack_tq2_0(codes, out):
    for first in range(0, 256, 32):
        for i in range(32):
            put_code(out, first, i, codes[first + i])


@compile_inline
def encode_rows(weights, importance, out, block_bytes, d_at, pack):
    x, codes = np.empty(256, np.float32), np.empty(256, np.int32)
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // 256):
            d = choose_codes(weights, importance, row, 256 * block, x, codes)
            into = out[row, block_bytes * block : block_bytes * (block + 1)]
            into[:] = 0
            pack(codes, into)
            store_half(into, d_at, d)


@compile_cached
def encode_tq1_0(weights, importance, out):
    encode_rows(weights, importance, out, TQ1_BYTES, TQ1_D, pack_tq1_0)


@compile_cached
def encode_tq2_0(weights, importance, out):
    encode_rows(weights, importance, out, TQ2_BYTES, TQ2_D, pack_tq2_0)


Q1_BLOCK, Q1_BYTES, Q1_D = BY_NAME["Q1_0"].block, BY_NAME["Q1_0"].bytes, LAYOUTS["Q1_0"].d
put_sign = build_packer(LAYOUTS["Q1_0"].codes, Q1_BLOCK)


@compile_cached
def encode_q1_0(weights, importance, out):
    x = np.empty(Q1_BLOCK, np.float32)
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // Q1_BLOCK):
            into = out[row, block * Q1_BYTES : (block + 1) * Q1_BYTES]
            into[:] = 0
            unit = normalize(weights, row, block * Q1_BLOCK, Q1_BLOCK, x)
            total, weight = np.float32(0), np.float32(0)
            for i in range(Q1_BLOCK):
                total += importance[block * Q1_BLOCK + i] * abs(x[i])
                weight += importance[block * Q1_BLOCK + i]
                put_sign(into, 0, i, np.uint8(x[i] >= 0))
            store_half(into, Q1_D, round_to_float16(total / weight * unit))
