"""One or two rows times one token where words of 16 bits are multiplied, not bytes.

AVX2 without VNNI.

There a dot product of bytes is two instructions, both planes of the activations need their own, and striped codes are
shuffled to their places first. Instead both planes become words, 256 * high + low, once in each part of a product, in
the order of formats/words.py. Decode of a 1.2 B model on a Zen 4 whose AVX-512 is hidden: 22 tokens/s before and 31 now
in Q4_K, 13 and 28 in Q6_K.
"""

from llvmlite import ir
from numba import types

from localllm.kernels.arguments import LINEAR_QUANTIZED as LINEAR
from localllm.kernels.cpu.matmul.gemv_quantized import AHEAD, activations, make_factors, make_fetch
from localllm.kernels.cpu.signature import argument, device, inlined
from localllm.kernels.formats.words import READERS, WORDS, k_factors
from localllm.kernels.simd import (
    I8,
    I16,
    I64,
    as_tuple,
    elements,
    f32x8,
    f32x16,
    load_value,
    multiplies_words,
    multiply_add,
    multiply_pairs,
    operation,
    reduce_add,
    shuffled,
    slice_of,
    store_value,
)
from localllm.kernels.simd.half import constant_like

int64 = types.int64
CHAINS = 2  # sums of a row, each of which waits for itself
RUN = 64  # bytes of 32 activations


def has_words(name):
    """Return whether rows of a format are multiplied so on this CPU."""
    return name in READERS and multiplies_words()


@operation(None, int64, int64, int64)
def store_run(builder, high, low, words):
    """Store the 32 activations of a run as words, the even ones first; stripes are 64 bytes apart."""
    stripes = []
    for stripe in range(4):
        planes = (load_value(builder, builder.add(at, I64(64 * stripe)), ir.VectorType(I8, 8)) for at in (high, low))
        upper, lower = (builder.sext(plane, ir.VectorType(I16, 8)) for plane in planes)
        stripes.append(builder.add(builder.shl(upper, constant_like(upper, 8)), lower))
    halves = [shuffled(builder, *stripes[i : i + 2], range(16)) for i in (0, 2)]
    for odd in (0, 1):
        some = shuffled(builder, *halves, range(odd, 32, 2))
        store_value(builder, builder.add(words, I64(32 * odd)), some)


@device
def store_words(a, words):
    """Store all activations of the token."""
    high, low = argument(a, LINEAR.high), argument(a, LINEAR.low)
    for column in range(0, argument(a, LINEAR.columns), 256):
        for run in range(0, 64, 8):
            store_run(high + column + run, low + column + run, words + 2 * column + 8 * run)


class OneTokenInWords:
    """The totals: CHAINS vectors of each row, all of whose lanes are its sum."""

    def __init__(self, format, rows):
        self.read, self.rows, self.is_halved = READERS[format.name], rows, format.sub_block == 16
        self.offset, self.of_row = format.offset, f32x16 if self.is_halved else f32x8
        self.totals = types.UniTuple(f32x8, CHAINS * rows)
        self.factors = types.UniTuple(self.of_row, rows * (1 if format.minimums is None else 2))

    def make_zero(self):
        @operation(self.totals)
        def zero(builder):
            return as_tuple(builder, [ir.Constant(f32x8.llvm, None)] * (CHAINS * self.rows))

        return zero

    def make_add(self):
        @operation(self.totals, self.totals, int64, int64, self.factors, *[int64] * 3)
        def add(builder, totals, w, step, factors, words, x_scales, x_sums):
            """Add the dot products of a group of 256 columns."""
            totals, factors = elements(builder, totals), elements(builder, factors)
            c, n = (self.of_lanes(builder, address) for address in (x_scales, x_sums))
            scales = [builder.fmul(scale, c) for scale in factors[: self.rows]]
            for row in range(self.rows):
                self.add_sums(builder, totals, row, factors, n)
            readers = [self.read(builder, builder.add(w, builder.mul(step, I64(r)))) for r in range(self.rows)]
            for run, pairs in enumerate(zip(*readers, strict=True)):
                places = (builder.add(words, I64(RUN * run + at)) for at in (0, 32))
                even, odd = (load_value(builder, place, WORDS) for place in places)
                for row, codes in enumerate(pairs):
                    dot = builder.add(multiply_pairs(builder, codes[0], even), multiply_pairs(builder, codes[1], odd))
                    i, scale = row * CHAINS + run % CHAINS, self.scale_of(builder, scales[row], run)
                    totals[i] = multiply_add(builder, builder.sitofp(dot, f32x8.llvm), scale, totals[i])
            return as_tuple(builder, totals)

        return add

    def of_lanes(self, builder, address):
        """Return the token's scales or sums, one for every 16 columns, in the lanes of the rows' scales."""
        value = load_value(builder, address, f32x16.llvm)
        return value if self.is_halved else slice_of(builder, value, 0, 16, 2)

    def scale_of(self, builder, scales, run):
        """Return a run's scale, or the two of its halves, in the lanes of its dot products."""
        places = [2 * run] * 4 + [2 * run + 1] * 4 if self.is_halved else [run] * 8
        return shuffled(builder, scales, scales, places)

    def add_sums(self, builder, totals, row, factors, n):
        """Add the contribution of the codes' offset, or of the minimums."""
        factor = factors[row] if len(factors) == self.rows else factors[self.rows + row]
        if len(factors) == self.rows:
            n = builder.fmul(n, constant_like(n, -self.offset))
        for i in range(0, self.of_row.lanes, 8):
            at = row * CHAINS + i // 8
            parts = (slice_of(builder, value, i, i + 8) for value in (factor, n))
            totals[at] = multiply_add(builder, *parts, totals[at])

    def make_finish(self):
        @operation(None, self.totals, int64)
        def finish(builder, totals, y):
            """Add up each row's sum to y [rows]."""
            totals = elements(builder, totals)
            for row in range(self.rows):
                total = builder.fadd(*totals[row * CHAINS : (row + 1) * CHAINS])
                store_value(builder, builder.add(y, I64(4 * row)), reduce_add(builder, total))

        return finish


def make_factors_of(format, rows):
    """Make a function (w, bytes between rows) -> the rows' scales, and their minimums if there are some."""
    if format.minimums is None:
        return make_factors(format.scales, None, rows)
    if rows == 1:
        return inlined(lambda w, step: k_factors(w))

    @inlined
    def both(w, step):
        first, second = k_factors(w), k_factors(w + step)
        return first[0], second[0], first[1], second[1]

    return both


def make_one_in_words(format, rows):
    """Make a function (arguments, address of a row, bytes to the next, y, words) for one token."""
    steps, fetch, group_bytes = OneTokenInWords(format, rows), make_fetch(format, rows), format.group_bytes
    factors = make_factors_of(format, rows)
    zero, add, finish = steps.make_zero(), steps.make_add(), steps.make_finish()

    @inlined
    def one(a, w, step, y, words):
        ahead, totals = w + (rows - 1) * step + AHEAD, zero()
        _, _, c, n = activations(a, LINEAR.sums)
        for _ in range(argument(a, LINEAR.columns) // 256):
            fetch(w, step, ahead)
            totals = add(totals, w, step, factors(w, step), words, c, n)
            w, ahead, words = w + group_bytes, ahead + rows * group_bytes, words + 8 * RUN
            c, n = c + 64, n + 64
        finish(totals, y)

    return one
