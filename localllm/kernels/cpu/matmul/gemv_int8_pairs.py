"""Intrinsics on tuples of vectors that multiply pairs of rows with a token, used by gemv_quantized.py."""

from llvmlite import ir
from numba import types

from localllm.kernels.cpu.matmul.row_shape import Accumulator
from localllm.kernels.simd import (
    I64,
    as_tuple,
    dots_in_words,
    elements,
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
EVEN_THEN_ODD = [lane + 16 * (lane % 2) for lane in range(16)]  # even lanes of one vector, odd ones of another
ODD_THEN_EVEN = [lane + 16 * (1 - lane % 2) for lane in range(16)]
NEIGHBOURS = [lane ^ 1 for lane in range(16)]


class RowTotals(Accumulator):
    """The totals of a token. Two rows share a vector, one in the even lanes, one in the odd lanes.

    A row has a lane for each run of 32 columns. With sub-blocks of 16 columns, one vector is for the first halves of
    the runs, another one for the second halves. Codes are interleaved once (`mix`), so that dot products are in these
    lanes.

    Dot products and multiplications of 64 bytes share two of Zen 4's four execution units, one result per cycle each,
    and these units are the bottleneck. A group of four rows, with one token in both planes, keeps them busy for 38
    cycles in Q4_K, of which 32 are dot products, and for 41 in Q6_K; measured, with data in the caches: 39.5 and 44.
    The work that all tokens share takes 50 to 90 cycles.
    """

    def __init__(self, shape, rows, planes):
        self.shape, self.rows, self.planes = shape, rows, planes
        self.halves, self.vectors = shape.halves, shape.vectors
        self.count = rows // 2 * self.halves
        self.size = 64 * self.count  # bytes
        self.totals, self.codes = types.UniTuple(f32x16, self.count), types.UniTuple(u8x64, self.vectors * rows)
        self.of_rows = types.UniTuple(shape.of_row, shape.factors * rows)
        self.factors = types.UniTuple(f32x16, shape.factors * self.count)

    def make_mix(self):
        @operation(self.codes, self.codes)
        def mix(builder, codes):
            """Interleave the codes of each pair of rows, 4 bytes at a time.

            Then dot products of the first row are in even lanes, those of the second in odd lanes.
            """
            words, mixed = [builder.bitcast(vector, i32x16.llvm) for vector in elements(builder, codes)], []
            for first, other in pairs_of([*batched(words, self.vectors)]):
                both = [*zip(first, other, strict=True)]
                mixed += [shuffled(builder, *two, order) for order in (EVEN_THEN_ODD, ODD_THEN_EVEN) for two in both]
            return as_tuple(builder, [builder.bitcast(vector, u8x64.llvm) for vector in mixed])

        return mix

    def make_spread(self):
        @operation(self.factors, self.of_rows)
        def spread(builder, factors):
            """Copy the rows' scales and minimums to all lanes of the totals that they belong to."""
            lanes = [[lane // 2 * self.halves + half for lane in range(16)] for half in range(self.halves)]
            orders = [[at + lane % 2 * 8 * self.halves for lane, at in enumerate(order)] for order in lanes]
            pairs = pairs_of(elements(builder, factors))
            return as_tuple(builder, [shuffled(builder, *pair, order) for pair in pairs for order in orders])

        return spread

    def make_add(self):
        @operation(self.totals, self.totals, self.codes, self.factors, *[int64] * 4)
        def add(builder, totals, codes, factors, high, low, x_scales, x_sums):
            """Return totals + x_scales * scales * dots + minimums * x_sums, for one token and a group or a chunk."""
            totals, factors = elements(builder, totals), elements(builder, factors)
            c, n = (self.shape.load(builder, address) for address in (x_scales, x_sums))
            n = self.shape.from_offset(builder, n)
            for half, dots in enumerate(self.dots(builder, elements(builder, codes), high, low)):
                lanes = [lane // 2 * 2 + half for lane in range(16)]
                n_half = n if self.halves == 1 else shuffled(builder, n, n, lanes)
                for pair, dot in enumerate(dots):
                    i, dot = pair * self.halves + half, builder.sitofp(dot, f32x16.llvm)
                    totals[i] = self.shape.scaled(builder, totals[i], dot, factors[i :: self.count], c, n_half)
            return as_tuple(builder, totals)

        return add

    def dots(self, builder, codes, high, low):
        """Compute the dot products with the activations, 256 * high + low: [half][pair of rows].

        They are in the lanes of the totals.
        """
        by_half, size = [], self.vectors // self.halves
        for first in range(0, self.vectors, size):
            sums = [ir.Constant(i32x16.llvm, None)] * self.rows
            for plane in (high, low)[: self.planes]:
                if plane is low:
                    sums = [builder.shl(value, constant_like(value, 8)) for value in sums]
                part = range(first, first + size)
                numbers = [load_value(builder, builder.add(plane, I64(64 * q)), u8x64.llvm) for q in part]
                for r, value in enumerate(sums):
                    of_row = [codes[self.vectors * r + q] for q in part]
                    pairs = [*zip(of_row, numbers, strict=True)]
                    sums[r] = dots_in_words(builder, value, pairs, self.shape.largest)
            aligned_pairs = [(one, shuffled(builder, other, other, NEIGHBOURS)) for one, other in pairs_of(sums)]
            by_half.append([builder.add(*both) for both in aligned_pairs])
        return by_half

    def make_load(self):
        """Return an intrinsic (address) -> totals."""

        @operation(self.totals, int64)
        def load(builder, address):
            addresses = [builder.add(address, I64(64 * i)) for i in range(self.count)]
            return as_tuple(builder, [load_value(builder, a, f32x16.llvm) for a in addresses])

        return load

    def make_store(self):
        """Return an intrinsic (address, totals) that stores totals."""

        @operation(None, int64, self.totals)
        def store(builder, address, totals):
            for i, value in enumerate(elements(builder, totals)):
                store_value(builder, builder.add(address, I64(64 * i)), value)

        return store

    def make_finish(self):
        @operation(None, self.totals, int64)
        def finish(builder, totals, y):
            """Store the sum of each row's totals to y [rows].

            All rows are summed together: one by one, that took 4.5 ns a token, of 32 ns for four rows of 576 columns.
            """
            sums = sums_by_row(builder, [*self.by_run(builder, elements(builder, totals))])
            if self.planes == 1:
                sums = builder.fmul(sums, constant_like(sums, 256.0))
            store_value(builder, y, sums)

        return finish

    def by_run(self, builder, totals):
        """Return the totals of each pair of rows by run.

        With sub-blocks of 16, the two halves of runs are added, and lanes that are 8 apart.
        """
        if self.halves == 1:
            return totals
        totals = [builder.fadd(*(slice_of(builder, value, at, at + 8) for at in (0, 8))) for value in totals]
        return [builder.fadd(*halves) for halves in pairs_of(totals)]


def sums_by_row(builder, totals):
    """Compute the sums of 2 or 4 rows, as lanes of one vector.

    totals: of pairs of rows, whose lanes alternate. Neighbouring runs are added first, as in gemv_int8_1.py, so that a
    token gets the same result alone and among others.
    """
    size, rows = totals[0].type.count, 2 * len(totals)
    starts = range(0, size * len(totals), size)
    runs = [[start + lane + odd for start in starts for odd in (0, 1)] for lane in range(0, size, 2)]
    first = [[lane for run in runs[odd::2] for lane in run] for odd in (0, 1)]
    value = builder.fadd(*(shuffled(builder, totals[0], totals[-1], order) for order in first))
    while value.type.count > rows:
        lanes = [[i for i in range(value.type.count) if i // rows % 2 == odd] for odd in (0, 1)]
        value = builder.fadd(*(shuffled(builder, value, value, order) for order in lanes))
    return value


def pairs_of(values):
    """Pair neighbours: the first with the second, the third with the fourth, and so on."""
    return zip(values[::2], values[1::2], strict=True)


def batched(values, size):
    """Split into batches of `size`."""
    return (values[i : i + size] for i in range(0, len(values), size))
