"""Products of four rows of Q2_K or Q3_K and one token (AVX512-VNNI).

A vector has a lane of 4 bytes for each sub-block. A sub-block is 16 columns with one scale. Codes can be assigned to
the lanes of vectors in two ways:

- striped (gemv_quantized.py): a sub-block has two lanes of two vectors, so its sums have to be shuffled together
- one lane (this module): a sub-block has one lane of all four vectors, so its sum is in the lane of its scale. Codes
  move only within 16 bytes of the file's layout (formats/sub_blocks.py)

Each part of the step first reorders the activations in the same way. From the L2 cache, one core of a Zen 4 reads Q2_K
at 17.0 GB/s like this and Q3_K at 17.4 (rows of 2048 columns), against 12.6 and 13.3 striped.
"""

from llvmlite import ir
from numba import int64, types

from localllm.kernels import simd
from localllm.kernels.cpu import ONE_TOKEN_BYTES
from localllm.kernels.cpu.matmul.gemv_quantized import (
    Accumulator,
    get_group_shape,
    locate_activations,
    make_fetch,
    store_rows,
)
from localllm.kernels.cpu.signature import device, inlined, load_argument
from localllm.kernels.formats.sub_blocks import LANES, READERS
from localllm.kernels.machine import get_lane
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR

SCALES = 512  # offset of the scales, after both planes of 256 activations


def has_sub_blocks(name):
    return name in READERS and get_lane().has_vnni


def make_store(reader):
    """Return an intrinsic that stores 256 activations in a format's order.

    The intrinsic is (high, low, scales, sums, target). The result has the high plane, the low plane, then scales and
    sums, f32x16 each.
    """
    orders = []
    for v in range(4):
        quads = [((v + reader.rotation * i) % 4, reader.runs[i] + 4 * part) for part, _, i in LANES]
        orders.append([16 * (quad // 2) + 2 * run + quad % 2 for quad, run in quads])
    of_halves = [lane + 16 * half for lane, (_, half, _) in enumerate(LANES)]

    @simd.operation(None, *[int64] * 5)
    def store(builder, high, low, scales, sums, target):
        values = []
        for plane in (high, low):
            stripes = [
                simd.load_value(builder, builder.add(plane, simd.I64(64 * q)), simd.i32x16.llvm) for q in range(4)
            ]
            for order in orders:
                halves = (simd.shuffle_lanes(builder, *stripes[i : i + 2], order) for i in (0, 2))
                values.append(simd.shuffle_lanes(builder, *halves, of_halves))
        for source, factors in ((scales, reader.scale_factors), (sums, reader.sum_factors)):
            value = simd.load_value(builder, source, simd.f32x16.llvm)
            value = simd.shuffle_lanes(builder, value, value, reader.list_sub_blocks())
            values.append(builder.fmul(value, ir.Constant(simd.f32x16.llvm, factors)))
        for i, value in enumerate(values):
            simd.store_value(builder, builder.add(target, simd.I64(64 * i)), value)

    return store


def make_store_ordered(format):
    store = make_store(READERS[format.name])

    @device
    def store_ordered(a, memory):
        high, low, c, n = locate_activations(a, LINEAR.sums)
        for group in range(load_argument(a, LINEAR.columns) // 256):
            target = memory + ONE_TOKEN_BYTES * group
            store(high + 256 * group, low + 256 * group, c + 64 * group, n + 64 * group, target)

    return store_ordered


class SubBlockTotals(Accumulator):
    """The totals of one token: a vector for each of two rows, whose lanes are sub-blocks."""

    def __init__(self, format):
        self.reader, self.shape = READERS[format.name], get_group_shape(format)
        self.totals = types.UniTuple(simd.f32x16, 2)

    def make_add(self):
        @simd.operation(self.totals, self.totals, *[int64] * 3)
        def add(builder, totals, w, step, x):
            """Add the products of a group of 256 columns to the totals; x: address of the ordered activations."""
            rows = [w, builder.add(w, step)]
            codes, factors = [self.reader.codes(builder, row) for row in rows], self.reader.factors(builder, rows)
            high, low = (self.compute_dots(builder, codes, builder.add(x, simd.I64(at))) for at in (0, 256))
            c, n = (
                simd.load_value(builder, builder.add(x, simd.I64(at)), simd.f32x16.llvm) for at in (SCALES, SCALES + 64)
            )
            results = []
            for total, upper, lower, of_row in zip(simd.elements(builder, totals), high, low, factors, strict=True):
                dot = builder.add(builder.shl(upper, simd.constant_like(upper, 8)), lower)
                dot = builder.sitofp(dot, simd.f32x16.llvm)
                results.append(self.shape.add_scaled(builder, total, dot, of_row, c, n))
            return simd.as_tuple(builder, results)

        return add

    def compute_dots(self, builder, codes, plane):
        numbers = [simd.load_value(builder, builder.add(plane, simd.I64(64 * v)), simd.u8x64.llvm) for v in range(4)]
        nothing = ir.Constant(simd.i32x16.llvm, None)
        pairs = ([*zip(of_row, numbers, strict=True)] for of_row in codes)
        return [simd.dots_in_words(builder, nothing, of_row, self.shape.largest) for of_row in pairs]

    def make_finish(self):
        @simd.operation(None, self.totals, int64, int64)
        def finish(builder, totals, y, step):
            """Store the sum of each row's lanes, added in the order of gemv_quantized.py, for the same bits."""
            sums, runs = simd.elements(builder, totals), [self.reader.runs.index(run) for run in range(4)]
            for size in (8, 4):
                sums = [builder.fadd(*(simd.slice_lanes(builder, v, at, at + size) for at in (0, size))) for v in sums]
            both = simd.shuffle_lanes(builder, *sums, [lane + 4 * row for row in (0, 1) for lane in runs])
            while both.type.count > 2:
                both = builder.fadd(*(simd.slice_lanes(builder, both, odd, both.type.count, 2) for odd in (0, 1)))
            store_rows(builder, both, y, step)

        return finish


def make_one_by_sub_block(format):
    steps, fetch, group_bytes = SubBlockTotals(format), make_fetch(format), format.group_bytes
    zero, add, finish = steps.make_zero(), steps.make_add(), steps.make_finish()

    @inlined
    def add_pair(totals, w, step, x):
        fetch(w)
        fetch(w + step)
        return add(totals, w, step, x)

    @inlined
    def multiply_rows(a, w, step, y, y_step, x, token, tokens):
        v, first, second = w + 2 * step, zero(), zero()
        for _ in range(load_argument(a, LINEAR.columns) // 256):
            first, second = add_pair(first, w, step, x), add_pair(second, v, step, x)
            w, v, x = w + group_bytes, v + group_bytes, x + ONE_TOKEN_BYTES
        finish(first, y, y_step)
        finish(second, y + 2 * y_step, y_step)

    return multiply_rows
