"""Readers of the scales and minimums of two rows at once, for products of a few tokens (AVX512-VNNI).

The bits of a 6-bit scale are in two bytes of a block's first 16. One shuffle brings both bytes of each of 16 scales, 8
of each row, into a lane of a vector. A dot product with powers of two adds them up, times a power of two, by which a
constant divides. With one row at a time, and in integer registers, Q4_K takes 27 vector and 36 other instructions
instead of 18, of about 150 for 256 columns of two rows.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import int64, types

from localllm.kernels import simd
from localllm.kernels.machine import get_lane
from localllm.quant.formats import LAYOUTS

BLOCK = ir.VectorType(simd.I8, 16)
K_FACTORS = 4  # offset of the 12 bytes with the scales and minimums of Q4_K and Q5_K
IQ4 = LAYOUTS["IQ4_XS"]
IQ4_LOW, IQ4_HIGH = (fields.locate(0)[0] for fields in IQ4.scales)


class PackedScales(NamedTuple):
    """Where the bits of a format's eight scales, or minimums, are.

    Attributes:
        pieces: for each, the offset, mask and weight of two bytes; the weighted sum is times * (scale - centre).
        times: for each, a power of two.
        half: which of the block's first two float16 the result is multiplied by.
        factors: for each, what it is multiplied by, too.
    """

    pieces: list[tuple[tuple[int, int, int], tuple[int, int, int]]]
    times: list[int]
    half: int
    factors: list[float]
    centre: int = 0

    def emit(self, builder: Any, blocks: Any, halves: Any) -> Any:
        """Return f32x16, 8 of each row.

        blocks: the rows' first 16 bytes, twice each; halves: both float16 as f32x16, four times each.
        """
        order = [place for pair in self.pieces for place in (pair[0][0], pair[1][0], None, None)]
        masks = [number for pair in self.pieces for number in (pair[0][1], pair[1][1], 0, 0)]
        weights = [number for pair in self.pieces for number in (pair[0][2], pair[1][2], 0, 0)]
        start = [-self.centre * times for times in self.times]
        factors = [factor / times for factor, times in zip(self.factors, self.times, strict=True)]
        pieces = builder.and_(simd.select_bytes(builder, blocks, 2 * order), ir.Constant(simd.u8x64.llvm, 2 * masks))
        sums = simd.dot_vnni_512(
            builder, ir.Constant(simd.i32x16.llvm, 2 * start), pieces, ir.Constant(simd.u8x64.llvm, 2 * weights)
        )
        d = simd.shuffle_lanes(builder, halves, halves, [lane // 2 * 2 + self.half for lane in range(16)])
        d = builder.fmul(d, ir.Constant(simd.f32x16.llvm, 2 * factors))
        return builder.fmul(builder.sitofp(sums, simd.f32x16.llvm), d)


def make_pair_factors(*packed):
    """Return an intrinsic (w, step) -> the scales, and the minimums if there are any, of two rows, f32x16 each."""

    @simd.operation(types.UniTuple(simd.f32x16, len(packed)), int64, int64)
    def read(builder, w, step):
        rows = [simd.load_value(builder, address, BLOCK) for address in (w, builder.add(w, step))]
        blocks = simd.shuffle_lanes(builder, *rows, [*range(16)] * 2 + [*range(16, 32)] * 2)
        firsts = [builder.bitcast(row, ir.VectorType(simd.I32, 4)) for row in rows]
        firsts = simd.shuffle_lanes(builder, *firsts, [0] * 4 + [4] * 4)
        halves = simd.widen_half(builder, builder.bitcast(firsts, ir.VectorType(simd.I16, 16)))
        return simd.as_tuple(builder, [each.emit(builder, blocks, halves) for each in packed])

    return read


def locate_k_scale(i):
    low, high = K_FACTORS + i, K_FACTORS + i + 4
    return ((low, 63, 4), (low, 0, 0)) if i < 4 else ((high, 15, 4), (low - 4, 192, 1))


def locate_k_minimum(i):
    first, second = K_FACTORS + i, K_FACTORS + i + 4
    return ((second, 63, 16), (second, 0, 0)) if i < 4 else ((second, 240, 1), (first, 192, 4))


def locate_iq4_scale(i):
    low = (IQ4_LOW + i // 2, 240, 1) if i % 2 else (IQ4_LOW + i // 2, 15, 4)
    return low, (IQ4_HIGH + i // 4, 3 << 2 * (i % 4), 64 >> 4 * (i % 4 // 2))


def build_k_scales(factors):
    return PackedScales([locate_k_scale(i) for i in range(8)], [4] * 8, 0, factors)


k_minimums = PackedScales([locate_k_minimum(i) for i in range(8)], [16] * 8, 1, [-1.0] * 8)
READERS = {  # of codes as in k_quants.py: those from high nibbles of Q4_K are 16 * code
    "Q4_K": make_pair_factors(build_k_scales([1, 1 / 16] * 4), k_minimums),
    "Q5_K": make_pair_factors(build_k_scales([1] * 8), k_minimums),
    "IQ4_XS": make_pair_factors(
        PackedScales([locate_iq4_scale(i) for i in range(8)], [4, 16] * 4, 0, [1] * 8, IQ4.scale_centre)
    ),
}


def has_row_pairs(name: str) -> bool:
    """Return whether this CPU reads the factors of two rows of a format at once."""
    return name in READERS and get_lane().has_vnni
