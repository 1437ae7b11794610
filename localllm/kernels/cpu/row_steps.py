"""What a group of 256 columns of pairs of rows takes, as intrinsics on tuples of vectors: for rows_quantized.py."""

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
EVEN_THEN_ODD = [lane + 16 * (lane % 2) for lane in range(16)]  # even lanes of one vector, odd ones of another
ODD_THEN_EVEN = [lane + 16 * (1 - lane % 2) for lane in range(16)]
NEIGHBOURS = [lane ^ 1 for lane in range(16)]


def merged(builder, x, y, add):
    """Neighbouring lanes added up: those of x in the even lanes, those of y in the odd ones."""
    other = shuffled(builder, x, y, [NEIGHBOURS[lane] + 16 * (lane % 2) for lane in range(16)])
    return add(shuffled(builder, x, y, EVEN_THEN_ODD), other)


def sum_of_lanes(builder, value):
    """The sum of 8 or 16 floats, as one lane: added as row_one.py does, so that a token gets the same among others."""
    if value.type.count == 16:
        value = builder.fadd(*(slice_of(builder, value, at, at + 8) for at in (0, 8)))
    while value.type.count > 1:
        value = builder.fadd(*(slice_of(builder, value, odd, value.type.count, 2) for odd in (0, 1)))
    return value


class Steps:
    """The totals of a token: 16 lanes each, of which two belong to every run of 32 columns, as in dot products.

    Of sub-blocks of 32 columns two rows share a vector, the first in the even lanes, the second in the odd ones: their
    codes are mixed once so that dot products come in these lanes. Of sub-blocks of 16 each row has a vector, whose even
    lanes are the first halves of the runs.

    Dot products and multiplications of 64 bytes share two of Zen 4's four units, which finish one a cycle: they are
    what counts. A token in one plane takes 11 such cycles for a group of two rows of Q4_K, of which 8 are dot products.
    """

    def __init__(self, sub_block, rows, planes, largest):
        self.dot = dot_variant(largest)
        self.rows, self.planes, self.halves = rows, planes, 32 // sub_block
        self.count = rows * self.halves // 2
        self.totals = types.UniTuple(f32x16, self.count)
        self.codes = types.UniTuple(u8x64, 4 * rows)
        self.of_row = types.UniTuple(f32x8 if self.halves == 1 else f32x16, rows)

    def make_mix(self):
        @operation(self.codes, self.codes)
        def mix(builder, codes):
            """Pairs of rows' codes so that dot products have the first in the even lanes, and then in the odd ones."""
            codes = elements(builder, codes)
            if self.halves == 2:
                return as_tuple(builder, codes)
            words, mixed = [builder.bitcast(vector, i32x16.llvm) for vector in codes], []
            for pair in range(0, 4 * self.rows, 8):
                both = list(zip(words[pair : pair + 4], words[pair + 4 : pair + 8], strict=True))
                mixed += [shuffled(builder, *two, order) for order in (EVEN_THEN_ODD, ODD_THEN_EVEN) for two in both]
            return as_tuple(builder, [builder.bitcast(vector, u8x64.llvm) for vector in mixed])

        return mix

    def make_spread(self):
        @operation(self.totals, self.of_row)
        def spread(builder, factors):
            """Scales or minimums of the rows, for every lane of the totals."""
            factors = elements(builder, factors)
            if self.halves == 1:
                lanes = [lane // 2 + lane % 2 * 8 for lane in range(16)]
                factors = [shuffled(builder, *pair, lanes) for pair in zip(factors[::2], factors[1::2], strict=True)]
            return as_tuple(builder, factors)

        return spread

    def make_add(self):
        @operation(self.totals, self.totals, self.codes, self.totals, self.totals, *[int64] * 4)
        def add(builder, totals, codes, scales, minimums, high, low, x_scales, x_sums):
            """totals + x_scales * scales * dots + minimums * x_sums, for one token."""
            totals, scales, minimums = (elements(builder, values) for values in (totals, scales, minimums))
            c, n = (load_value(builder, address, f32x16.llvm) for address in (x_scales, x_sums))
            dots = self.dots(builder, elements(builder, codes), high, low)
            for i, (dot, s, m) in enumerate(zip(dots, scales, minimums, strict=True)):
                dot = builder.sitofp(dot, f32x16.llvm)
                totals[i] = multiply_add(builder, dot, builder.fmul(s, c), multiply_add(builder, m, n, totals[i]))
            return as_tuple(builder, totals)

        return add

    def dots(self, builder, codes, high, low):
        """Dot products with the activations, 256 * high + low, in the lanes of the totals."""
        sums = [ir.Constant(i32x16.llvm, None)] * (self.rows * self.halves)
        for plane in (high, low)[: self.planes]:
            if plane is low:
                sums = [builder.shl(value, constant_like(value, 8)) for value in sums]
            for q in range(4):
                numbers = load_value(builder, builder.add(plane, I64(64 * q)), u8x64.llvm)
                for row in range(self.rows):
                    i = row * self.halves + q * self.halves // 4
                    sums[i] = self.dot(builder, sums[i], codes[4 * row + q], numbers)
        pairs = zip(sums[::2], sums[1::2], strict=True)
        if self.halves == 1:
            return [builder.add(first, shuffled(builder, other, other, NEIGHBOURS)) for first, other in pairs]
        return [merged(builder, *pair, builder.add) for pair in pairs]

    def make_start(self):
        @operation(self.totals, types.UniTuple(f32x16, self.rows))
        def start(builder, tails):
            """The totals that begin with what each row's columns behind the last group have come to."""
            tails = elements(builder, tails)
            if self.halves == 1:
                tails = [merged(builder, *pair, builder.fadd) for pair in zip(tails[::2], tails[1::2], strict=True)]
            return as_tuple(builder, tails)

        return start

    def make_load(self):
        @operation(self.totals, int64)
        def load(builder, address):
            addresses = [builder.add(address, I64(64 * i)) for i in range(self.count)]
            return as_tuple(builder, [load_value(builder, a, f32x16.llvm) for a in addresses])

        return load

    def make_store(self):
        @operation(None, int64, self.totals)
        def store(builder, address, totals):
            for i, value in enumerate(elements(builder, totals)):
                store_value(builder, builder.add(address, I64(64 * i)), value)

        return store

    def make_finish(self):
        @operation(None, self.totals, int64)
        def finish(builder, totals, y):
            """The sum of each row goes to y [rows]."""
            totals = elements(builder, totals)
            for row in range(self.rows):
                value = totals[row] if self.halves == 2 else slice_of(builder, totals[row // 2], row % 2, 16, 2)
                total = builder.extract_element(sum_of_lanes(builder, value), I32(0))
                if self.planes == 1:
                    total = builder.fmul(total, constant_like(total, 256.0))
                store_value(builder, builder.add(y, I64(4 * row)), total)

        return finish
