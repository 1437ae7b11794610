"""Intrinsics on tuples of vectors that multiply one or two rows with one token, in both planes.

gemv_quantized.py uses them. A lane of the totals belongs to a sub-block. The totals of gemv_int8_pairs.py, with two
lanes for each run of 32 columns, would do, too, but decode of a 1.2 B model in Q4_K is 4 % slower with them.
"""

from llvmlite import ir
from numba import types

from localllm.kernels.cpu.matmul.row_shape import Accumulator
from localllm.kernels.simd import (
    I32,
    I64,
    as_tuple,
    dots_in_words,
    elements,
    f32x8,
    f32x16,
    i32x16,
    load_value,
    operation,
    shuffled,
    slice_of,
    store_value,
    u8x64,
)
from localllm.kernels.simd.half import constant_like

int64 = types.int64


class OneToken(Accumulator):
    """The totals of one token.

    With sub-blocks of 32 they are one vector, 8 lanes for each row; with sub-blocks of 16, a vector of 16 lanes per
    row.
    """

    def __init__(self, shape, rows):
        self.shape, self.rows, self.halves = shape, rows, shape.halves
        self.vector = f32x16 if self.halves == 2 or rows == 2 else f32x8
        self.count = rows if self.halves == 2 else 1
        self.together = rows * self.halves // self.count  # vectors of dot products per vector of totals
        self.totals = types.UniTuple(self.vector, self.count)
        self.factors = types.UniTuple(shape.of_row, shape.factors * rows)

    def make_add(self):
        codes = types.UniTuple(u8x64, self.shape.vectors * self.rows)

        @operation(self.totals, self.totals, codes, self.factors, *[int64] * 4)
        def add(builder, totals, codes, factors, high, low, x_scales, x_sums):
            """Return totals + x_scales * scales * dots + minimums * x_sums, for a group or a chunk."""
            totals, dots = elements(builder, totals), self.dots(builder, elements(builder, codes), high, low)
            factors = self.joined(builder, elements(builder, factors))
            c, n = (self.shape.load(builder, address) for address in (x_scales, x_sums))
            c, n = (self.in_lanes(builder, value) for value in (c, self.shape.from_offset(builder, n)))
            for v in range(self.count):
                pair = v * self.together
                dot = self.by_sub_block(builder, dots[pair], dots[pair + self.together - 1])
                totals[v] = self.shape.scaled(builder, totals[v], dot, factors[v :: self.count], c, n)
            return as_tuple(builder, totals)

        return add

    def dots(self, builder, codes, high, low):
        """Compute the dot products of all rows with the activations, 256 * high + low: i32x16, [row][half of the runs].

        With few sums, each plane has sums of its own: when both planes were added to the same sums, groups of Q4_K or
        Q4_0 in the L2 cache took 1.03 times as long, waiting for the previous addition.
        """
        nothing = [ir.Constant(i32x16.llvm, None)] * (self.rows * self.halves)
        upper = self.with_dots(builder, nothing, codes, high)
        upper = [builder.shl(value, constant_like(value, 8)) for value in upper]
        if self.halves == 2:
            return self.with_dots(builder, upper, codes, low)
        lower = self.with_dots(builder, nothing, codes, low)
        return [builder.add(*both) for both in zip(upper, lower, strict=True)]

    def with_dots(self, builder, sums, codes, plane):
        """Add one plane's dot products to the sums."""
        sums, vectors = [*sums], self.shape.vectors
        size = -(-vectors // self.halves)
        numbers = [load_value(builder, builder.add(plane, I64(64 * q)), u8x64.llvm) for q in range(vectors)]
        for row in range(self.rows):
            for first in range(0, vectors, size):
                i, part = row * self.halves + first // size, slice(first, first + size)
                pairs = [*zip(codes[vectors * row : vectors * (row + 1)][part], numbers[part], strict=True)]
                sums[i] = dots_in_words(builder, sums[i], pairs, self.shape.largest)
        return sums

    def joined(self, builder, factors):
        """Join two rows' vectors of scales, and of minimums, where one vector holds the totals of both rows."""
        if self.rows == self.count:
            return factors
        return [shuffled(builder, *pair, range(16)) for pair in zip(factors[::2], factors[1::2], strict=True)]

    def by_sub_block(self, builder, x, y):
        """Add neighbouring lanes of dot products, and convert to float.

        Result: for two rows, the sums of x, then those of y; for two halves of runs, the sums of x and y alternately.
        """
        even = [lane // 2 * 2 + lane % 2 * 16 for lane in range(16)]
        if self.halves == 1:
            even = [2 * lane for lane in range(self.vector.lanes)]
        sums = (shuffled(builder, x, y, [lane + odd for lane in even]) for odd in (0, 1))
        return builder.sitofp(builder.add(*sums), self.vector.llvm)

    def in_lanes(self, builder, values):
        """Rearrange a token's scales or sums to the lanes of the totals."""
        if self.halves == 2:
            return values
        return shuffled(builder, values, values, [lane % 8 * 2 for lane in range(self.vector.lanes)])

    def make_finish(self):
        @operation(None, self.totals, int64)
        def finish(builder, totals, y):
            """Store the sum of the lanes of each row's totals to y [rows]."""
            totals = elements(builder, totals)
            if self.vector is f32x16:
                pairs = [halves_of(builder, value) for value in totals]
                totals = [builder.fadd(*pair) for pair in pairs] if self.halves == 2 else list(pairs[0])
            sums = sums_of_lanes(builder, totals)
            for row in range(self.rows):
                store_value(builder, builder.add(y, I64(4 * row)), builder.extract_element(sums, I32(row)))

        return finish


def halves_of(builder, value):
    """Return the lower and the upper 8 of 16 lanes."""
    return slice_of(builder, value, 0, 8), slice_of(builder, value, 8, 16)


def sums_of_lanes(builder, vectors):
    """Compute the sum of the lanes of each of 1 or 2 vectors of 8 floats, as lanes of one vector.

    Neighbouring lanes are added first.
    """
    count = len(vectors)
    if count == 2:
        vectors = [builder.fadd(*(shuffled(builder, *vectors, range(odd, 16, 2)) for odd in (0, 1)))]
    sums = vectors[0]
    while sums.type.count > count:
        sums = builder.fadd(*(slice_of(builder, sums, odd, sums.type.count, 2) for odd in (0, 1)))
    return sums
