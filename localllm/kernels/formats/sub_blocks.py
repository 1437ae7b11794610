"""Readers of Q2_K and Q3_K for gemv_k_sub_blocks.py, with a 4-byte vector lane for each sub-block.

A block has 256 weights: 8 runs of 32, or 16 sub-blocks of 16. Its first 32 bytes of codes hold the low bits of runs 0
to 3 (part 0), the next 32 bytes those of runs 4 to 7 (part 1). A vector has 16 lanes, one for each sub-block:

    lane 8 * part + 4 * half + i:  half `half` of run 4 * part + runs[i]

Each of four vectors has 4 weights of every sub-block. Codes are not shifted down to the lowest bits: they are
multiplied by powers of two, and factors of the activations' scales divide by them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from localllm.kernels import simd
from localllm.quant.formats import BY_NAME, LAYOUTS

LANES = [(part, half, i) for part in (0, 1) for half in (0, 1) for i in range(4)]
BLOCK, RUN = ir.VectorType(simd.I8, 16), ir.VectorType(simd.I64, 4)
Q2, Q3 = LAYOUTS["Q2_K"], LAYOUTS["Q3_K"]
Q3_LOW, Q3_HIGH = (fields.locate(0)[0] for fields in Q3.scales)
Q3_LAST = BY_NAME["Q3_K"].bytes - 16  # offset of the last 16 bytes, which include all scales


class SubBlockReader(NamedTuple):
    """The functions and constants that read a format with one sub-block per lane.

    Attributes:
        runs: the run, within its part, of lanes 4 * n + 0 to 3, see the module's docstring.
        scale_factors: by lane, the factor of a token's scale.
        sum_factors: by lane, that of its sum. Both divide by the powers of two that codes are multiplied by.
    """

    runs: tuple[int, ...]
    rotation: int  # lane i of vector v has weights 4 n to 4 n + 3 of its sub-block, n = (v + rotation * i) % 4
    codes: Callable[[Any, Any], list[Any]]  # (builder, address) -> four u8x64
    factors: Callable[[Any, list[Any]], list[list[Any]]]  # (builder, addresses of rows) -> of each: f32x16
    scale_factors: list[float]
    sum_factors: list[float]

    def list_sub_blocks(self) -> list[int]:
        """Return the index of each lane's sub-block, 0 to 15, in the order of the weights."""
        return [8 * part + 2 * self.runs[i] + half for part, half, i in LANES]


def load_words(builder, address, at):
    return simd.load_value(builder, builder.add(address, simd.I64(at)), simd.i32x16.llvm)


def mask_bytes(builder, words, masks):
    return simd.as_bytes(
        builder, builder.and_(words, ir.Constant(simd.i32x16.llvm, [mask * 0x01010101 for mask in masks]))
    )


def spread_bytes(builder, address, order):
    block = simd.load_value(builder, address, BLOCK)
    return simd.select_bytes(builder, simd.shuffle_lanes(builder, block, block, [*range(16)] * 4), order)


def load_halves(builder, addresses, at, count):
    """Load `count` (1 or 2) float16 from offset `at` of every row, each in all lanes: [row][index]."""
    bits = ir.Constant(ir.VectorType(simd.I16 if count == 1 else simd.I32, 8 // count), None)
    for row, address in enumerate(addresses):
        number = simd.load_value(builder, builder.add(address, simd.I64(at)), bits.type.element)
        bits = builder.insert_element(bits, number, simd.I32(row))
    bits = builder.bitcast(bits, ir.VectorType(simd.I16, 8))
    numbers = simd.widen_half(builder, simd.shuffle_lanes(builder, bits, bits, range(4)))
    splats = [simd.shuffle_lanes(builder, numbers, numbers, [i] * 16) for i in range(count * len(addresses))]
    return [splats[i : i + count] for i in range(0, len(splats), count)]


# ---- Q2_K: codes of lane i of four are multiplied by 4 ** i


def emit_q2_k_codes(builder, address):
    words, masks = load_words(builder, address, Q2.codes[0].at), [3 << 2 * i for _, _, i in LANES]
    orders = ([lane // 4 * 4 + (v + lane) % 4 for lane in range(16)] for v in range(4))
    return [mask_bytes(builder, simd.shuffle_lanes(builder, words, words, order), masks) for order in orders]


def emit_q2_k_factors(builder, addresses):
    order, factors = [place for number in Q2_K.list_sub_blocks() for place in (number, None, None, None)], []
    for address, halves in zip(addresses, load_halves(builder, addresses, Q2.d, 2), strict=True):
        codes = builder.bitcast(spread_bytes(builder, address, order), simd.i32x16.llvm)
        both = builder.and_(codes, simd.constant_like(codes, 15)), builder.lshr(codes, simd.constant_like(codes, 4))
        floats = (builder.sitofp(value, simd.f32x16.llvm) for value in both)
        factors.append([builder.fmul(*pair) for pair in zip(floats, halves, strict=True)])
    return factors


Q2_K = SubBlockReader((0, 1, 2, 3), 1, emit_q2_k_codes, emit_q2_k_factors, [4.0**-i for _, _, i in LANES], [-1.0] * 16)

# ---- Q3_K: a byte has 3-bit codes of two runs, 0 and 2 or 1 and 3, in its low and high half


def emit_q3_k_codes(builder, address):
    low, high = load_words(builder, address, Q3.codes[0].at), simd.load_value(builder, address, RUN)
    high = simd.shuffle_lanes(builder, high, high, [*range(4)] * 2)
    high = builder.bitcast(builder.lshr(high, ir.Constant(high.type, [0] * 4 + [4] * 4)), simd.i32x16.llvm)
    high, pairs = mask_bytes(builder, high, [15] * 16), []
    for run, words in enumerate((low, builder.lshr(low, simd.constant_like(low, 2)))):
        bits = simd.lookup_bytes(builder, [4 * (n >> run & 1) + 64 * (n >> run + 2 & 1) for n in range(16)], high)
        pairs.append(builder.bitcast(builder.or_(mask_bytes(builder, words, [0x33] * 16), bits), simd.i32x16.llvm))
    masks = [0x70 if i % 2 else 0x07 for _, _, i in LANES]
    orders = ([lane // 4 * 4 + v + (16 if lane % 4 >= 2 else 0) for lane in range(16)] for v in range(4))
    return [mask_bytes(builder, simd.shuffle_lanes(builder, *pairs, order), masks) for order in orders]


def emit_q3_k_factors(builder, addresses):
    """Compute the rows' scales, (scale - 32) * d times Q3_TIMES: [row][one f32x16].

    A scale's low 4 bits and high 2 bits are in different bytes. A dot product with powers of two adds them, which
    multiplies the scale by Q3_TIMES.
    """
    order, masks, weights = [], [], []
    for (part, _, i), number in zip(LANES, Q3_K.list_sub_blocks(), strict=True):
        up = 4 * part + 2 * (Q3_K.runs[i] // 2)  # bit at which the high bits begin in their byte
        order += [Q3_LOW - Q3_LAST + number % 8, Q3_HIGH - Q3_LAST + number % 4, None, None]
        masks += [240 if part else 15, 3 << up, 0, 0]
        weights += [1 if part else 4, (256 if part else 64) >> up, 0, 0]
    start = ir.Constant(simd.i32x16.llvm, [-Q3.scale_centre * times for times in Q3_TIMES])
    factors = []
    for address, (d,) in zip(addresses, load_halves(builder, addresses, Q3.d, 1), strict=True):
        pieces = spread_bytes(builder, builder.add(address, simd.I64(Q3_LAST)), order)
        pieces = builder.and_(pieces, ir.Constant(simd.u8x64.llvm, masks))
        scales = simd.dot_vnni_512(builder, start, pieces, ir.Constant(simd.u8x64.llvm, weights))
        factors.append([builder.fmul(builder.sitofp(scales, simd.f32x16.llvm), d)])
    return factors


Q3_TIMES = [16 if part else 4 for part, _, _ in LANES]
Q3_K = SubBlockReader(
    (0, 2, 1, 3), 0, emit_q3_k_codes, emit_q3_k_factors,
    [1 / times / (16 if i % 2 else 1) for times, (_, _, i) in zip(Q3_TIMES, LANES, strict=True)],
    [-Q3.centre / times for times in Q3_TIMES],
)  # fmt: skip

READERS = {"Q2_K": Q2_K, "Q3_K": Q3_K}
