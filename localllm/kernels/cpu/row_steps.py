"""What reading a group of 256 columns of one or two rows takes, for 1 or 4 tokens: the vectors of rows_quantized.py."""

from llvmlite import ir
from numba import types

from localllm.kernels.half import constant_like
from localllm.kernels.simd import (
    I32,
    I64,
    as_tuple,
    dot_variant,
    elements,
    f32x8,
    f32x16,
    i32x16,
    load_value,
    multiply_add,
    operation,
    shuffled,
    slice_of,
    store_value,
    u8x64,
)

int64 = types.int64


class Steps:
    """What a group of 256 columns needs, as intrinsics on tuples of vectors whose lanes are sub-blocks.

    Sub-blocks of 32: a vector for each token, with the 8 sub-blocks of the first row, then those of the second. Of 16:
    a vector of 16 sub-blocks for each row and token, all tokens of the first row first. With one plane, the high one, y
    lacks a factor 256 until `finish`, and the activations' sums are integers.

    Dot products, multiplications and shuffles of 64 bytes share a port of Zen 4, so they are what counts: 4 tokens in
    one plane take 38 cycles per row and group, of which 16 are dot products.
    """

    def __init__(self, sub_block, tokens, rows, planes):
        self.tokens, self.rows, self.planes = tokens, rows, planes
        self.halves = 32 // sub_block  # of a run of 32 columns that make a sub-block each
        self.of_row = f32x8 if self.halves == 1 else f32x16  # scales or minimums
        self.vector = f32x16 if self.halves == 2 or rows == 2 else f32x8
        self.vectors = rows if self.halves == 2 else 1  # for each token
        self.together = rows * self.halves // self.vectors  # vectors of dot products that make one
        self.totals = types.UniTuple(self.vector, self.vectors * tokens)
        self.factors = types.UniTuple(self.of_row, rows)
        self.dots = types.UniTuple(i32x16, rows * tokens * self.halves)

    def at(self, builder, first, stride):
        """The address of every token's part."""
        return [builder.add(first, builder.mul(stride, I64(t))) for t in range(self.tokens)]

    def make_no_tails(self):
        @operation(self.totals, *[int64] * 9)
        def zeros(builder, *arguments):
            """The totals to begin with in formats whose rows are whole groups."""
            return as_tuple(builder, [ir.Constant(self.vector.llvm, None)] * self.totals.count)

        return zeros

    def make_dots(self):
        @operation(self.dots, types.UniTuple(u8x64, 4 * self.rows), int64, int64, int64)
        def dots(builder, codes, high, low, stride):
            """Dot products with the activations, 256 * high + low: for each token, of all rows, by half of the runs.

            Two lanes belong to a run of 32 columns; the first two vectors of codes hold the first halves of the runs.
            """
            codes, dot = elements(builder, codes), dot_variant()

            def add_plane(sums, x):
                for q in range(4):
                    numbers = load_value(builder, builder.add(x, I64(64 * q)), u8x64.llvm)
                    for row in range(self.rows):
                        i = row * self.halves + q * self.halves // 4
                        sums[i] = dot(builder, sums[i], codes[4 * row + q], numbers)
                return sums

            results = []
            for upper, lower in zip(self.at(builder, high, stride), self.at(builder, low, stride), strict=True):
                sums = add_plane([ir.Constant(i32x16.llvm, None)] * (self.rows * self.halves), upper)
                if self.planes == 2:
                    sums = add_plane([builder.shl(total, constant_like(total, 8)) for total in sums], lower)
                results += sums
            return as_tuple(builder, results)

        return dots

    def make_add(self):
        @operation(self.totals, self.totals, self.dots, self.factors, self.factors, *[int64] * 4)
        def add(builder, totals, dots, scales, minimums, x_scales, c_stride, x_sums, n_stride):
            """totals + x_scales * scales * dots + minimums * x_sums."""
            totals, dots = elements(builder, totals), elements(builder, dots)
            scales, minimums = self.joined(builder, scales), self.joined(builder, minimums)
            x_scales, x_sums = self.at(builder, x_scales, c_stride), self.at(builder, x_sums, n_stride)
            for t in range(self.tokens):
                c, n = self.token_scales(builder, x_scales[t]), self.token_sums(builder, x_sums[t])
                for v, (s, m) in enumerate(zip(scales, minimums, strict=True)):
                    i, pair = v * self.tokens + t, (t * self.vectors + v) * self.together
                    dot = self.by_sub_block(builder, dots[pair], dots[pair + self.together - 1])
                    if self.planes == 2:
                        totals[i] = multiply_add(builder, m, n, totals[i])
                        totals[i] = multiply_add(builder, dot, builder.fmul(s, c), totals[i])
                    else:
                        dot = multiply_add(builder, m, n, builder.fmul(dot, s))
                        totals[i] = multiply_add(builder, dot, c, totals[i])
            return as_tuple(builder, totals)

        return add

    def joined(self, builder, factors):
        """The rows' scales or minimums, as many vectors as a token has."""
        factors = elements(builder, factors)
        return factors if len(factors) == self.vectors else [shuffled(builder, *factors, range(16))]

    def by_sub_block(self, builder, x, y):
        """Neighbouring lanes added: of x and then y if they are rows, of both in turn if they are halves."""
        even = [lane // 2 * 2 + lane % 2 * 16 for lane in range(16)]
        if self.halves == 1:
            even = [2 * lane for lane in range(self.vector.lanes)]
        sums = (shuffled(builder, x, y, [lane + odd for lane in even]) for odd in (0, 1))
        return builder.sitofp(builder.add(*sums), self.vector.llvm)

    def token_scales(self, builder, address):
        """A token's 8 scales, for both halves or both rows."""
        scales = load_value(builder, address, f32x8.llvm)
        if self.vector.lanes == 8:
            return scales
        return shuffled(builder, scales, scales, [lane // 2 if self.halves == 2 else lane % 8 for lane in range(16)])

    def token_sums(self, builder, address):
        """A token's sums in every sub-block."""
        integers = ir.VectorType(I32, self.of_row.lanes)
        sums = load_value(builder, address, self.of_row.llvm if self.planes == 2 else integers)
        if self.vector != self.of_row:
            sums = shuffled(builder, sums, sums, [*range(8)] * 2)
        return sums if self.planes == 2 else builder.sitofp(sums, self.vector.llvm)

    def make_finish(self):
        @operation(None, self.totals, int64, int64)
        def finish(builder, totals, y, stride):
            """The sum of each token and row goes to y [tokens, rows]."""
            sums = sums_of_lanes(builder, self.eights(builder, elements(builder, totals)))
            if self.planes == 1:
                sums = builder.fmul(sums, constant_like(sums, 256.0))
            for t, address in enumerate(self.at(builder, y, stride)):
                for row in range(self.rows):
                    value = builder.extract_element(sums, I32(row * self.tokens + t))
                    store_value(builder, builder.add(address, I64(4 * row)), value)

        return finish

    def eights(self, builder, totals):
        """8 lanes that add up to each token's total: all tokens of the first row, then of the second."""
        if self.vector.lanes == 8:
            return totals
        halves = [(slice_of(builder, x, 0, 8), slice_of(builder, x, 8, 16)) for x in totals]
        if self.halves == 2:
            return [builder.fadd(*pair) for pair in halves]
        return [pair[row] for row in range(2) for pair in halves]


def sums_of_lanes(builder, vectors):
    """The sum of each vector of 8 floats, as lanes of one vector; there are 1, 2, 4 or 8.

    Neighbouring lanes are added, in two vectors at a time.
    """
    count = len(vectors)
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.fadd(*(shuffled(builder, *pair, range(odd, 16, 2)) for odd in (0, 1))) for pair in pairs]
    sums = vectors[0]
    while sums.type.count > count:
        sums = builder.fadd(*(slice_of(builder, sums, odd, sums.type.count, 2) for odd in (0, 1)))
    return sums
