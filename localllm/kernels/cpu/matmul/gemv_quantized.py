"""Products of four rows of quantized weights and one token, for decode.

A row is read once, in the file's layout; memory bandwidth is the limit. The four rows lie a quarter of the rows of a
part apart (matmul_quantized.py), so that a core reads four contiguous streams. With weight = s * (code - offset)
or s * code + m, and activation = c * q (q in both planes, or the high one):

    y = the sum over sub-blocks of s * c * dot(code, q) + (m or -offset * s) * sum(activations)

The inner products are intrinsics on tuples of vectors: of two rows and one token, in both planes. Several tokens
have totals of their own (gemv_few.py), with two lanes for each run of 32 columns; these would suffice for one token,
too, but decode of a 1.2 B model in Q4_K is 4 % slower with them.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from llvmlite import ir
from numba import int64, types

from localllm.kernels import simd
from localllm.kernels.cpu.signature import device, inlined, load_argument
from localllm.kernels.formats.group_format import GroupFormat
from localllm.kernels.formats.row_pairs import READERS as ROW_PAIRS
from localllm.kernels.formats.row_pairs import has_row_pairs
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR

CHUNK_LANES = ir.VectorType(simd.F32, 4)  # a token's scales or sums of a chunk: those of two runs, each twice


# Distance, in bytes, of prefetches: into the L2 cache, then into the L1 cache. Each stream needs its own, because
# prefetchers of the CPU stop at the end of a page. Two cores of a Xeon (Emerald Rapids), which read 25 to 35 GB/s, read
# 0.84 to 0.98 of that in four streams (Q4_K, Q6_K, Q8_0, IQ4_XS), and 0.67 to 0.80 in one or two, with any distances.
FAR_PREFETCH, NEAR_PREFETCH = 4096, 1024
quarter = simd.constant(simd.f32x8, 0.25)


def make_prefetch(size, locality):
    @simd.operation(None, int64)
    def prefetch(builder, address):
        for line in range(0, size, 64):
            simd.prefetch_line(builder, builder.add(address, simd.I64(line)), locality)

    return prefetch


@inlined
def locate_activations(a, sums, token=0):
    """Return the addresses of a token's high plane, low plane, scales and sums (the argument `sums`)."""
    x, n = token * load_argument(a, LINEAR.columns), token * load_argument(a, LINEAR.columns) // 4
    high, low = load_argument(a, LINEAR.high) + x, load_argument(a, LINEAR.low) + x
    return high, low, load_argument(a, LINEAR.scales) + n, load_argument(a, sums) + n


def make_row_tuple(function, rows):
    return make_row_concat(inlined(lambda w, step: (function(w),)), rows)


def make_row_concat(function, rows):
    if rows == 1:
        return inlined(lambda w, step: function(w, step))
    half, distance = make_row_concat(function, rows // 2), rows // 2
    return inlined(lambda w, step: half(w, step) + half(w + distance * step, step))


def make_codes(codes, rows):
    return make_row_concat(inlined(lambda w, step: codes(w)), rows)


def make_factors(scales, minimums, rows):
    scales = make_row_tuple(scales, rows)
    if minimums is None:
        return scales
    minimums = make_row_tuple(minimums, rows)
    return inlined(lambda w, step: scales(w, step) + minimums(w, step))


def make_joined(factors, count):
    """Build a function like `factors`, but with the factors of two rows in each vector; count: of vectors."""
    rows_of, joined = types.UniTuple(simd.f32x8, 2 * count), types.UniTuple(simd.f32x16, count)

    @simd.operation(joined, rows_of)
    def join(builder, factors):
        factors = simd.elements(builder, factors)
        pairs = zip(factors[::2], factors[1::2], strict=True)
        return simd.as_tuple(builder, [simd.shuffle_lanes(builder, *pair, range(16)) for pair in pairs])

    return inlined(lambda w, step: join(factors(w, step)))


def make_group_factors(format, rows):
    """Build a function (w, step) -> scales, then minimums: a vector for two rows, or for one with sub-blocks of 16."""
    if format.sub_block == 16:
        return make_factors(format.scales, format.minimums, rows)
    if not has_row_pairs(format.name):
        return make_joined(make_factors(format.scales, format.minimums, rows), rows if format.minimums else rows // 2)
    read_two = ROW_PAIRS[format.name]
    if rows == 2:
        return inlined(lambda w, step: read_two(w, step))
    if format.minimums is None:
        return inlined(lambda w, step: read_two(w, step) + read_two(w + 2 * step, step))

    @inlined
    def read_four(w, step):
        (a, b), (c, d) = read_two(w, step), read_two(w + 2 * step, step)
        return a, c, b, d

    return read_four


def make_group(format, rows):
    """Build two functions (w, step) for a group of `rows` rows: one reads codes, the other scales and minimums."""
    return make_codes(format.codes, rows), make_group_factors(format, rows)


def make_chunk_factors(format, rows):
    """Build a function (w, step) for a chunk; its two scales are repeated four times each, see RowShape."""
    _, scales_of, minimums_of = format.chunk
    scales = device(lambda w: simd.four_times_f32x2(scales_of(w)))
    minimums = device(lambda w: simd.four_times_f32x2(minimums_of(w)) * quarter()) if minimums_of else None
    return make_factors(scales, minimums, rows)


def make_chunk(format, rows):
    """Build the functions of make_group for a chunk."""
    count = rows if format.chunk.minimums else rows // 2
    return make_row_tuple(format.chunk.codes, rows), make_joined(make_chunk_factors(format, rows), count)


def make_fetch(format):
    """Build a function (w) that prefetches a group of a stream."""
    far, near = make_prefetch(format.group_bytes, 2), make_prefetch(format.group_bytes, 3)

    @inlined
    def fetch(w):
        far(w + FAR_PREFETCH)
        near(w + NEAR_PREFETCH)

    return fetch


def make_one(format):
    """Build a function that multiplies four rows by one token, in both planes: see make_streams for its parameters."""
    steps, fetch = OneTokenTotals(get_group_shape(format), 2), make_fetch(format)
    codes, factors = make_group(format, 2)
    zero, load, add, finish = steps.make_zero(), steps.make_load(), steps.make_add(), steps.make_finish()
    load_chunk, add_chunk, chunk_codes, chunk_factors = None, None, None, None
    if format.chunk:
        of_chunk, (chunk_codes, chunk_factors) = OneTokenTotals(get_chunk_shape(format), 2), make_chunk(format, 2)
        load_chunk, add_chunk = of_chunk.make_load(), of_chunk.make_add()
    group_bytes, chunk_bytes = format.group_bytes, format.group_bytes // 4 if format.chunk else 0

    @inlined
    def add_pair(totals, w, step, x, low, of_token):
        fetch(w)
        fetch(w + step)
        return add(totals, codes(w, step), factors(w, step), x, low, of_token)

    @inlined
    def multiply_rows(a, w, step, y, y_step, scratch, token, tokens):
        columns, first, second = load_argument(a, LINEAR.columns), zero(), zero()
        (x, low, c, n), v = locate_activations(a, LINEAR.sums), w + 2 * step
        for _ in range(columns // 256):
            of_token = load(c, n)
            first = add_pair(first, w, step, x, low, of_token)
            second = add_pair(second, v, step, x, low, of_token)
            w, v = w + group_bytes, v + group_bytes
            x, low, c, n = x + 256, low + 256, c + 64, n + 64
        if add_chunk is not None:
            for _ in range(columns % 256 // 64):
                of_token = load_chunk(c, n)
                first = add_chunk(first, chunk_codes(w, step), chunk_factors(w, step), x, low, of_token)
                second = add_chunk(second, chunk_codes(v, step), chunk_factors(v, step), x, low, of_token)
                w, v = w + chunk_bytes, v + chunk_bytes
                x, low, c, n = x + 64, low + 64, c + 16, n + 16
        finish(first, y, y_step)
        finish(second, y + 2 * y_step, y_step)

    return multiply_rows


# ---- shapes of groups and chunks, and the totals


class RowShape(NamedTuple):
    """A group of 256 columns, or a chunk of 64, of a format."""

    vectors: int  # of codes: 4 for a group, 1 for a chunk
    halves: int  # sub-blocks of a run of 32 columns: 1 or 2
    offset: int | None  # the code that represents zero; None: the format has minimums
    largest: int  # the largest code, see GroupFormat

    @property
    def row_vector(self) -> simd.Vector:
        """The vector type of a row's scales, or of its minimums; those of a chunk are repeated four times."""
        return simd.f32x8 if self.halves == 1 else simd.f32x16

    @property
    def factors(self) -> int:
        """The number of such vectors per row: 1 for scales, 2 with minimums."""
        return 1 if self.offset is not None else 2

    def load(self, builder, address):
        """Load a token's scales or sums, one for every 16 columns; those of a chunk are repeated four times."""
        if self.vectors == 4:
            return simd.load_value(builder, address, simd.f32x16.llvm)
        value = simd.load_value(builder, address, CHUNK_LANES)
        return simd.shuffle_lanes(builder, value, value, [*range(4)] * 4)

    def scale_sums(self, builder, sums):
        """Return the term of the sums: -offset * sums, for the row's scales, or sums, for its minimums."""
        if self.offset is None:
            return sums
        return builder.fmul(sums, simd.constant_like(sums, -self.offset * self.vectors / 4))

    def add_scaled(self, builder, total, dot, factors, c, n):
        """Add scaled dot products to a total; c: the token's scales; n: the result of `from_offset`."""
        if self.offset is None:
            scale, minimum = factors
            return simd.multiply_add(
                builder, dot, builder.fmul(scale, c), simd.multiply_add(builder, minimum, n, total)
            )
        return simd.multiply_add(builder, simd.multiply_add(builder, dot, c, n), factors[0], total)


class Accumulator(ABC):
    """The totals of some rows and tokens, in registers, to which decode adds products group by group."""

    totals: types.UniTuple
    halves: int  # see RowShape

    def make_zero(self):
        @simd.operation(self.totals)
        def zero(builder):
            return simd.as_tuple(builder, [ir.Constant(self.totals.dtype.llvm, None)] * self.totals.count)

        return zero

    def join_planes(self, builder, count, planes, add_dots):
        """Compute `count` vectors of dot products with all planes: 256 * high + low, or those with one plane.

        add_dots(sums, plane) adds those with a plane to sums. With few sums, each plane has sums of its own, so that
        products wait less for the previous addition: in the L2 cache, one token of Q4_K or Q4_0 took 1.03 times as
        long with the same sums on a Zen 4, 4 and 8 tokens 1.05 times on an Emerald Rapids.
        """
        nothing = [ir.Constant(simd.i32x16.llvm, None)] * count
        sums = nothing
        for plane in planes:
            upper = [builder.shl(value, simd.constant_like(value, 8)) for value in sums]
            if self.halves == 2:
                sums = add_dots(upper, plane)
            else:
                sums = [builder.add(*both) for both in zip(upper, add_dots(nothing, plane), strict=True)]
        return sums

    @abstractmethod
    def make_add(self):
        """Return an intrinsic (totals, operands) -> totals that adds the products of a group or a chunk."""

    @abstractmethod
    def make_finish(self):
        """Return an intrinsic (totals, y, step) that stores the sum of each row's totals, `step` bytes apart."""


def get_group_shape(format: GroupFormat) -> RowShape:
    return RowShape(4, 32 // format.sub_block, None if format.minimums else format.offset, format.largest)


def get_chunk_shape(format: GroupFormat) -> RowShape:
    return get_group_shape(format)._replace(vectors=1)


class OneTokenTotals(Accumulator):
    """The totals of one token: a vector with 8 lanes for each row, or 16 lanes with sub-blocks of 16."""

    def __init__(self, shape, rows):
        self.shape, self.rows, self.halves = shape, rows, shape.halves
        self.vector = simd.f32x16 if self.halves == 2 or rows == 2 else simd.f32x8
        self.count = rows if self.halves == 2 else 1
        self.together = rows * self.halves // self.count  # vectors of dot products per vector of totals
        self.totals = types.UniTuple(self.vector, self.count)
        self.factors = types.UniTuple(simd.f32x16, shape.factors * self.count)
        self.of_token = types.UniTuple(simd.f32x16, 2)

    def make_load(self):
        @simd.operation(self.of_token, int64, int64)
        def load(builder, x_scales, x_sums):
            """Load the token's scales, and the terms of its sums (RowShape.scale_sums), in the lanes of the totals."""
            c, n = (self.shape.load(builder, address) for address in (x_scales, x_sums))
            values = [self.arrange_lanes(builder, value) for value in (c, self.shape.scale_sums(builder, n))]
            return simd.as_tuple(builder, values)

        return load

    def make_add(self):
        codes = types.UniTuple(simd.u8x64, self.shape.vectors * self.rows)

        @simd.operation(self.totals, self.totals, codes, self.factors, int64, int64, self.of_token)
        def add(builder, totals, codes, factors, high, low, of_token):
            """Return totals + scales of both * dots + minimums * sums, for a group or a chunk; of_token: see `load`."""
            totals, dots = (
                simd.elements(builder, totals),
                self.compute_dots(builder, simd.elements(builder, codes), (high, low)),
            )
            factors, (c, n) = simd.elements(builder, factors), simd.elements(builder, of_token)
            for v in range(self.count):
                pair = v * self.together
                dot = self.add_neighbours(builder, dots[pair], dots[pair + self.together - 1])
                totals[v] = self.shape.add_scaled(builder, totals[v], dot, factors[v :: self.count], c, n)
            return simd.as_tuple(builder, totals)

        return add

    def compute_dots(self, builder, codes, planes):
        """Compute the dot products of all rows and the activations, i32x16, [row][half of the runs]."""
        return self.join_planes(
            builder, self.rows * self.halves, planes, lambda sums, plane: self.add_dots(builder, sums, codes, plane)
        )

    def add_dots(self, builder, sums, codes, plane):
        sums, vectors = [*sums], self.shape.vectors
        size = -(-vectors // self.halves)
        numbers = [
            simd.load_value(builder, builder.add(plane, simd.I64(64 * q)), simd.u8x64.llvm) for q in range(vectors)
        ]
        for row in range(self.rows):
            for first in range(0, vectors, size):
                i, part = row * self.halves + first // size, slice(first, first + size)
                pairs = [*zip(codes[vectors * row : vectors * (row + 1)][part], numbers[part], strict=True)]
                sums[i] = simd.dots_in_words(builder, sums[i], pairs, self.shape.largest)
        return sums

    def add_neighbours(self, builder, x, y):
        """Add neighbouring lanes of dot products, and convert to float.

        For two rows the result has the sums of x, then those of y; for two halves of runs, the sums of x and y
        alternately.
        """
        even = [lane // 2 * 2 + lane % 2 * 16 for lane in range(16)]
        if self.halves == 1:
            even = [2 * lane for lane in range(self.vector.lanes)]
        sums = (simd.shuffle_lanes(builder, x, y, [lane + odd for lane in even]) for odd in (0, 1))
        return builder.sitofp(builder.add(*sums), self.vector.llvm)

    def arrange_lanes(self, builder, values):
        if self.halves == 2:
            return values
        return simd.shuffle_lanes(builder, values, values, [lane % 8 * 2 for lane in range(self.vector.lanes)])

    def make_finish(self):
        @simd.operation(None, self.totals, int64, int64)
        def finish(builder, totals, y, step):
            totals = simd.elements(builder, totals)
            if self.vector is simd.f32x16:
                pairs = [split_halves(builder, value) for value in totals]
                totals = [builder.fadd(*pair) for pair in pairs] if self.halves == 2 else list(pairs[0])
            store_rows(builder, sum_lanes(builder, totals), y, step)

        return finish


def store_rows(builder, sums, y, step):
    """Store each row's sum, `step` bytes apart."""
    for row in range(sums.type.count):
        at = builder.add(y, builder.mul(step, simd.I64(row)))
        simd.store_value(builder, at, builder.extract_element(sums, simd.I32(row)))


def split_halves(builder, value):
    return simd.slice_lanes(builder, value, 0, 8), simd.slice_lanes(builder, value, 8, 16)


def sum_lanes(builder, vectors):
    """Compute the sum of the lanes of each of 1 or 2 vectors of 8 floats.

    Neighbouring lanes are added first.
    """
    count = len(vectors)
    if count == 2:
        vectors = [builder.fadd(*(simd.shuffle_lanes(builder, *vectors, range(odd, 16, 2)) for odd in (0, 1)))]
    sums = vectors[0]
    while sums.type.count > count:
        sums = builder.fadd(*(simd.slice_lanes(builder, sums, odd, sums.type.count, 2) for odd in (0, 1)))
    return sums
