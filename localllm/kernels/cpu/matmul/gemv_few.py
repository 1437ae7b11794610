"""Products of two or four rows of quantized weights and several tokens, for small batches.

Weights are unpacked once for all tokens, group by group, into registers. What the products read of the activations is
first copied, once for each part of the step, to blocks in the order in which it is read: for each group, one token's
block after the other's. `quantize` leaves the tokens of a group a row apart. Reading them there, and prefetching
weights into the L1 cache, took 1.07 of the time at 4 tokens and 1.02 at 8 (4096 columns, Q4_K and Q6_K, from memory).

What limits them, and what was tried: docs/decisions/few-tokens.md.
"""

from functools import partial

from numba import int64, types

from localllm.kernels import simd
from localllm.kernels.cpu import FEW_AT_ONCE, FEW_TOTAL_BYTES
from localllm.kernels.cpu.matmul.gemv_quantized import (
    Accumulator,
    get_chunk_shape,
    get_group_shape,
    locate_activations,
    make_chunk,
    make_fetch,
    make_group,
    store_rows,
)
from localllm.kernels.cpu.signature import device, inlined, load_argument
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR

BLOCKS = FEW_AT_ONCE * FEW_TOTAL_BYTES  # offset in scratch memory of the blocks of activations, after all totals


class BlockShape:
    """A token's block of a group or a chunk: the high plane, scales and sums, f32x16 each, and the low plane."""

    def __init__(self, shape, planes):
        self.shape, self.plane_bytes, self.planes = shape, 64 * shape.vectors, planes
        self.size = planes * self.plane_bytes + 128

    def locate_planes(self, builder, block):
        """Return the addresses of the planes."""
        return [builder.add(block, simd.I64(at)) for at in (0, self.plane_bytes + 128)[: self.planes]]

    def load_scales(self, builder, block):
        """Load the token's scales, and the terms of its sums (RowShape.scale_sums)."""
        places = (builder.add(block, simd.I64(self.plane_bytes + at)) for at in (0, 64))
        return [simd.load_value(builder, place, simd.f32x16.llvm) for place in places]

    def make_store(self):
        @simd.operation(None, *[int64] * 5)
        def store(builder, high, low, scales, sums, block):
            """Copy a token's activations to its block."""
            for source, target in zip((high, low), self.locate_planes(builder, block), strict=False):
                for at in range(0, self.plane_bytes, 64):
                    vector = simd.load_value(builder, builder.add(source, simd.I64(at)), simd.u8x64.llvm)
                    simd.store_value(builder, builder.add(target, simd.I64(at)), vector)
            c, n = (self.shape.load(builder, address) for address in (scales, sums))
            for at, value in ((0, c), (64, self.shape.scale_sums(builder, n))):
                simd.store_value(builder, builder.add(block, simd.I64(self.plane_bytes + at)), value)

        return store


def make_store_blocks(format, planes):
    """Build a function (arguments, scratch, first token, tokens) that copies tokens' activations to blocks."""
    group, chunk = BlockShape(get_group_shape(format), planes), BlockShape(get_chunk_shape(format), planes)
    store_group, store_chunk, group_bytes, chunk_bytes = group.make_store(), chunk.make_store(), group.size, chunk.size
    sums, has_chunks = LINEAR.sums if planes == 2 else LINEAR.high_sums, format.chunk is not None

    @device
    def store_blocks(a, scratch, first, tokens):
        columns, start = load_argument(a, LINEAR.columns), scratch + BLOCKS
        whole = columns // 256 * 256
        for t in range(tokens):
            (high, low, c, n), block = locate_activations(a, sums, first + t), start + t * group_bytes
            for at in range(0, whole, 256):
                store_group(high + at, low + at, c + at // 4, n + at // 4, block)
                block += tokens * group_bytes
            if has_chunks:
                block += t * (chunk_bytes - group_bytes)
                for at in range(whole, columns, 64):
                    store_chunk(high + at, low + at, c + at // 4, n + at // 4, block)
                    block += tokens * chunk_bytes

    return store_blocks


def make_accumulate(format, shape, read, rows, planes):
    """Build a function that adds the products of a group or a chunk of `rows` rows to all tokens' totals.

    Its parameters: w, step, block, tokens, scratch. It returns the address after the blocks. read: make_group or
    make_chunk.
    """
    steps, (codes, factors) = RowTotals(shape, rows, planes), read(format, rows)
    mix, spread, add, size, block_bytes = (
        steps.make_mix(), steps.make_spread(), steps.make_add(), steps.size, steps.block.size
    )  # fmt: skip
    load, store = steps.make_load(), steps.make_store()

    @inlined
    def accumulate(w, step, block, tokens, scratch):
        mixed, spread_factors = mix(codes(w, step)), spread(factors(w, step))
        for _ in range(tokens):
            store(scratch, add(load(scratch), mixed, spread_factors, block))
            block, scratch = block + block_bytes, scratch + size
        return block

    return accumulate


def make_row(format, rows, planes):
    """Build a function that multiplies `rows` rows by a few tokens.

    See make_streams (matmul_quantized.py) for its parameters. planes: 2, or 1 for the high plane. Scratch memory has
    the totals, then the blocks of activations.
    """
    steps, fetch = RowTotals(get_group_shape(format), rows, planes), make_fetch(format)
    take_group = make_accumulate(format, get_group_shape(format), make_group, rows, planes)
    take_chunk = make_accumulate(format, get_chunk_shape(format), make_chunk, rows, planes) if format.chunk else None
    zero, load, store, finish = steps.make_zero(), steps.make_load(), steps.make_store(), steps.make_finish()
    size = steps.size
    group_bytes, chunk_bytes = format.group_bytes, format.group_bytes // 4 if format.chunk else 0

    @inlined
    def multiply_rows(a, w, step, y, y_step, scratch, first, tokens):
        columns, block = load_argument(a, LINEAR.columns), scratch + BLOCKS
        for t in range(tokens):
            store(scratch + t * size, zero())
        for _ in range(columns // 256):
            for row in range(rows):
                fetch(w + row * step)
            block = take_group(w, step, block, tokens, scratch)
            w += group_bytes
        if take_chunk is not None:
            for _ in range(columns % 256 // 64):
                block = take_chunk(w, step, block, tokens, scratch)
                w += chunk_bytes
        for t in range(tokens):
            finish(load(scratch + t * size), y + t * load_argument(a, LINEAR.y_stride), y_step)

    return multiply_rows


# ---- the totals


EVEN_THEN_ODD = [lane + 16 * (lane % 2) for lane in range(16)]  # even lanes of one vector, odd ones of another
ODD_THEN_EVEN = [lane + 16 * (1 - lane % 2) for lane in range(16)]
NEIGHBOURS = [lane ^ 1 for lane in range(16)]


class RowTotals(Accumulator):
    """The totals of a token. Two rows share a vector, one in the even lanes, one in the odd lanes.

    A row has a lane for each run of 32 columns. With sub-blocks of 16 columns, one vector is for the first halves of
    the runs, another one for the second halves. Codes are interleaved once (`mix`), so that dot products are in these
    lanes.

    Dot products and multiplications of 64 bytes share two of Zen 4's four execution units, one result per cycle each,
    and these units are the bottleneck. A group of four rows and one token in both planes keeps them busy for 38 cycles
    in Q4_K, of which 32 are dot products, and for 41 in Q6_K; measured, with data in the caches: 39.5 and 44. The work
    that all tokens share takes 50 to 90 cycles.
    """

    def __init__(self, shape, rows, planes):
        self.shape, self.rows, self.planes = shape, rows, planes
        self.halves, self.vectors, self.block = shape.halves, shape.vectors, BlockShape(shape, planes)
        self.count = rows // 2 * self.halves
        self.size = 64 * self.count  # bytes
        self.totals, self.codes = (
            types.UniTuple(simd.f32x16, self.count),
            types.UniTuple(simd.u8x64, self.vectors * rows),
        )
        self.factors = types.UniTuple(simd.f32x16, shape.factors * self.count)

    def make_mix(self):
        @simd.operation(self.codes, self.codes)
        def mix(builder, codes):
            """Interleave the codes of two rows, 4 bytes at a time.

            Dot products of the first row are then in even lanes.
            """
            words, mixed = [builder.bitcast(vector, simd.i32x16.llvm) for vector in simd.elements(builder, codes)], []
            for first, other in iterate_pairs([*iterate_batches(words, self.vectors)]):
                both = [*zip(first, other, strict=True)]
                mixed += [
                    simd.shuffle_lanes(builder, *two, order) for order in (EVEN_THEN_ODD, ODD_THEN_EVEN) for two in both
                ]
            return simd.as_tuple(builder, [builder.bitcast(vector, simd.u8x64.llvm) for vector in mixed])

        return mix

    def make_spread(self):
        @simd.operation(self.factors, self.factors)
        def spread(builder, factors):
            """Rearrange the results of make_group_factors, to the lanes of the totals."""
            orders, factors = [[lane // 2 + 8 * (lane % 2) for lane in range(16)]], simd.elements(builder, factors)
            pairs = zip(factors, factors, strict=True)
            if self.halves == 2:
                halves = [[lane // 2 * 2 + half for lane in range(16)] for half in (0, 1)]
                orders = [[at + lane % 2 * 16 for lane, at in enumerate(half)] for half in halves]
                pairs = iterate_pairs(factors)
            return simd.as_tuple(
                builder, [simd.shuffle_lanes(builder, *pair, order) for pair in pairs for order in orders]
            )

        return spread

    def make_add(self):
        @simd.operation(self.totals, self.totals, self.codes, self.factors, int64)
        def add(builder, totals, codes, factors, block):
            """Return totals + scales of both * dots + minimums * sums, for one token's block of a group or a chunk."""
            totals, factors = simd.elements(builder, totals), simd.elements(builder, factors)
            c, n = self.block.load_scales(builder, block)
            planes = self.block.locate_planes(builder, block)
            for half, dots in enumerate(self.compute_dots(builder, simd.elements(builder, codes), planes)):
                lanes = [lane // 2 * 2 + half for lane in range(16)]
                n_half = n if self.halves == 1 else simd.shuffle_lanes(builder, n, n, lanes)
                for pair, dot in enumerate(dots):
                    i, dot = pair * self.halves + half, builder.sitofp(dot, simd.f32x16.llvm)
                    totals[i] = self.shape.add_scaled(builder, totals[i], dot, factors[i :: self.count], c, n_half)
            return simd.as_tuple(builder, totals)

        return add

    def compute_dots(self, builder, codes, planes):
        """Compute the dot products, 256 * high + low, in the lanes of the totals: [half][pair of rows]."""
        by_half, size = [], self.vectors // self.halves
        for first in range(0, self.vectors, size):
            add_dots = partial(self.add_dots, builder, codes, range(first, first + size))
            sums = self.join_planes(builder, self.rows, planes, add_dots)
            aligned_pairs = [
                (one, simd.shuffle_lanes(builder, other, other, NEIGHBOURS)) for one, other in iterate_pairs(sums)
            ]
            by_half.append([builder.add(*both) for both in aligned_pairs])
        return by_half

    def add_dots(self, builder, codes, part, sums, plane):
        """Add the dot products of all rows' codes and a plane's bytes. part: indices of vectors."""
        numbers = [simd.load_value(builder, builder.add(plane, simd.I64(64 * q)), simd.u8x64.llvm) for q in part]
        of_rows = [[codes[self.vectors * r + q] for q in part] for r in range(self.rows)]
        pairs = [[*zip(of_row, numbers, strict=True)] for of_row in of_rows]
        return simd.dots_of_rows(builder, sums, pairs, self.shape.largest)

    def make_load(self):
        @simd.operation(self.totals, int64)
        def load(builder, address):
            addresses = [builder.add(address, simd.I64(64 * i)) for i in range(self.count)]
            return simd.as_tuple(builder, [simd.load_value(builder, a, simd.f32x16.llvm) for a in addresses])

        return load

    def make_store(self):
        @simd.operation(None, int64, self.totals)
        def store(builder, address, totals):
            for i, value in enumerate(simd.elements(builder, totals)):
                simd.store_value(builder, builder.add(address, simd.I64(64 * i)), value)

        return store

    def make_finish(self):
        @simd.operation(None, self.totals, int64, int64)
        def finish(builder, totals, y, step):
            """Store the sum of each row's totals, `step` bytes apart.

            All rows are summed together: one by one, that took 4.5 ns a token, of 32 ns for four rows of 576 columns.
            """
            sums = sum_rows(builder, [*self.add_halves(builder, simd.elements(builder, totals))])
            if self.planes == 1:
                sums = builder.fmul(sums, simd.constant_like(sums, 256.0))
            store_rows(builder, sums, y, step)

        return finish

    def add_halves(self, builder, totals):
        """Return the totals of each pair of rows by run; with sub-blocks of 16, both halves are added."""
        if self.halves == 1:
            return totals
        totals = [builder.fadd(*(simd.slice_lanes(builder, value, at, at + 8) for at in (0, 8))) for value in totals]
        return [builder.fadd(*halves) for halves in iterate_pairs(totals)]


def sum_rows(builder, totals):
    """Compute the sums of 2 or 4 rows, whose lanes alternate, as lanes of one vector.

    Neighbouring runs are added first, as for one token, so that a token gets the same result alone and among others.
    """
    size, rows = totals[0].type.count, 2 * len(totals)
    starts = range(0, size * len(totals), size)
    runs = [[start + lane + odd for start in starts for odd in (0, 1)] for lane in range(0, size, 2)]
    first = [[lane for run in runs[odd::2] for lane in run] for odd in (0, 1)]
    value = builder.fadd(*(simd.shuffle_lanes(builder, totals[0], totals[-1], order) for order in first))
    while value.type.count > rows:
        lanes = [[i for i in range(value.type.count) if i // rows % 2 == odd] for odd in (0, 1)]
        value = builder.fadd(*(simd.shuffle_lanes(builder, value, value, order) for order in lanes))
    return value


def iterate_pairs(values):
    return zip(values[::2], values[1::2], strict=True)


def iterate_batches(values, size):
    return (values[i : i + size] for i in range(0, len(values), size))
