"""One or two rows times one to four tokens on CPUs that multiply words of 16 bits, not bytes: AVX2 without VNNI.

On them a dot product of bytes is two instructions, both planes of the activations need their own, and striped codes are
shuffled to their places first. Instead both planes become words, 256 * high + low, once in each part of a product, in
the order of formats/words.py. Decode of a 1.2 B model on a Zen 4 whose AVX-512 is hidden: 22 tokens/s before and 31 now
in Q4_K, 13 and 28 in Q6_K.
"""

from functools import reduce

from llvmlite import ir
from numba import types

from localllm.kernels.arguments import LINEAR_QUANTIZED as LINEAR
from localllm.kernels.cpu.matmul.gemv_quantized import (
    AHEAD,
    activations,
    make_ask_for,
    make_chunk,
    make_factors,
    make_fetch,
)
from localllm.kernels.cpu.matmul.row_shape import chunk_shape, group_shape
from localllm.kernels.cpu.signature import argument, device, inlined
from localllm.kernels.formats import load_group_format
from localllm.kernels.formats.words import READERS, WORDS, k_factors
from localllm.kernels.simd import (
    I8,
    I16,
    I64,
    as_tuple,
    elements,
    f32x8,
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


def has_words(name, tokens=1):
    """Return whether rows of a format are multiplied as words on this CPU, by one token or a few.

    Products of codes up to 7 and bytes are added in 16 bits so often that 8 tokens of Q3_K take 0.83 of the time there;
    of Q2_K, which has minimums, 1.6.
    """
    return name in READERS and multiplies_words() and (tokens == 1 or name != "Q3_K")


def words_of_run(builder, high, low, distance):
    """Return the first 16 activations of a run and the last, whose stripes of 8 are `distance` bytes apart."""
    stripes = []
    for i in range(4):
        places = (builder.add(at, builder.mul(distance, I64(i))) for at in (high, low))
        planes = (load_value(builder, place, ir.VectorType(I8, 8)) for place in places)
        upper, lower = (builder.sext(plane, ir.VectorType(I16, 8)) for plane in planes)
        stripes.append(builder.add(builder.shl(upper, constant_like(upper, 8)), lower))
    return [shuffled(builder, *stripes[i : i + 2], range(16)) for i in (0, 2)]


def make_store_unit(in_pairs):
    """Return an intrinsic (high, low, bytes between stripes, bytes between runs, words) that stores a unit's words."""

    @operation(None, *[int64] * 5)
    def store_unit(builder, high, low, distance, apart, words):
        parts = [words_of_run(builder, high, low, distance)]
        if in_pairs:
            other = words_of_run(builder, builder.add(high, apart), builder.add(low, apart), distance)
            parts = [*zip(*parts, other, strict=True)]
        stored = [shuffled(builder, *part, range(odd, 32, 2)) for part in parts for odd in (0, 1)]
        for i, value in enumerate(stored):
            store_value(builder, builder.add(words, I64(32 * i)), value)

    return store_unit


def make_store_words(format):
    """Make a function (arguments, words, tokens) that stores all activations, unit by unit."""
    in_pairs = READERS[format.name].in_pairs
    store_unit, runs_at_once = make_store_unit(in_pairs), 2 if in_pairs else 1

    @inlined
    def store_runs(high, low, runs, words):
        for unit in range(runs // runs_at_once):
            at = 8 * unit
            store_unit(high + at, low + at, 8 * runs, 4 * runs, words + RUN * runs_at_once * unit)

    @device
    def store_words(a, words, tokens):
        columns = argument(a, LINEAR.columns)
        whole = columns // 256 * 256
        for token in range(tokens):
            high, low = argument(a, LINEAR.high) + token * columns, argument(a, LINEAR.low) + token * columns
            for column in range(0, whole, 256):
                store_runs(high + column, low + column, 8, words + 2 * column)
            for column in range(whole, columns, 64):
                store_runs(high + column, low + column, 2, words + 2 * column)
            words += 2 * columns

    return store_words


def keep_order(builder):
    """Keep loads that follow this point after it.

    Otherwise LLVM would load all tokens' activations first, for all rows, and have no registers left for the codes.
    """
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def as_it_is(builder, value):
    """Return a vector that LLVM keeps in a register: otherwise it merges two shuffles into a slower one."""
    return builder.asm(ir.FunctionType(value.type, [value.type]), "", "=x,0", [value], False)


class Totals:
    """The totals of `rows` rows and `tokens` tokens: for each, `chains` vectors all of whose lanes are its sum."""

    def __init__(self, format, rows, tokens, shape):
        self.reader, self.rows, self.tokens = READERS[format.name], rows, tokens
        self.is_halved, self.chains = format.sub_block == 16, CHAINS if tokens == 1 else 1
        self.shape = shape if format.minimums else shape._replace(offset=self.reader.offset)
        self.totals = types.UniTuple(f32x8, self.chains * rows * tokens)
        self.factors = types.UniTuple(shape.of_row, rows * shape.factors)

    def place(self, row, token, chain=0):
        """Return the place of a vector among the totals."""
        return (token * self.rows + row) * self.chains + chain % self.chains

    def make_zero(self):
        @operation(self.totals)
        def zero(builder):
            return as_tuple(builder, [ir.Constant(f32x8.llvm, None)] * self.totals.count)

        return zero

    def make_add(self):
        @operation(self.totals, self.totals, int64, int64, self.factors, *[int64] * 4)
        def add(builder, totals, w, step, factors, words, c, n, columns):
            """Add the dot products of a group of 256 columns, or of a chunk of 64.

            words, c, n: of the first token; columns: of a row, from which the distance to the next token follows.
            """
            totals, factors = elements(builder, totals), elements(builder, factors)
            scales = self.scales(builder, totals, factors, c, n, builder.lshr(columns, I64(2)))
            rows = [builder.add(w, builder.mul(step, I64(r))) for r in range(self.rows)]
            units = [self.reader.units(builder, row, 2 * self.shape.vectors) for row in rows]
            of_tokens = [builder.add(words, builder.mul(columns, I64(2 * token))) for token in range(self.tokens)]
            for unit, codes in enumerate(zip(*units, strict=True)):
                for row in range(self.rows):
                    for token, first in enumerate(of_tokens):
                        if self.tokens > 1:
                            keep_order(builder)
                        i, scale = self.place(row, token, unit), self.scale_of(builder, scales[token][row], unit)
                        dot = self.dot(builder, codes[row], builder.add(first, I64(RUN // 2 * len(codes[row]) * unit)))
                        totals[i] = multiply_add(builder, dot, scale, totals[i])
            return as_tuple(builder, totals)

        return add

    def dot(self, builder, codes, words):
        """Multiply a unit's codes by the activations at an address."""
        products = []
        for i, code in enumerate(codes):
            x = load_value(builder, builder.add(words, I64(RUN // 2 * i)), WORDS)
            products.append(multiply_pairs(builder, code, x))
        return builder.sitofp(reduce(builder.add, products), f32x8.llvm)

    def scales(self, builder, totals, factors, c, n, distance):
        """Return scales of rows times those of tokens [token][row]; add the terms of the codes' offsets or minimums."""
        scales = []
        for token in range(self.tokens):
            of_token, sums = (
                self.of_lanes(builder, builder.add(address, builder.mul(distance, I64(token)))) for address in (c, n)
            )
            if self.reader.factors:
                of_token = builder.fmul(of_token, ir.Constant(of_token.type, [1 / f for f in self.reader.factors]))
            scales.append([self.in_lanes(builder, builder.fmul(scale, of_token)) for scale in factors[: self.rows]])
            if self.shape.offset != 0:
                sums = self.shape.from_offset(builder, sums)
                for row in range(self.rows):
                    self.add_sums(builder, totals, row, token, factors[row - self.rows], sums)
        return scales

    def of_lanes(self, builder, address):
        """Return a token's scales or sums, one for every 16 columns, in the lanes of the rows' scales."""
        value = self.shape.load(builder, address)
        return value if self.is_halved else slice_of(builder, value, 0, 16, 2)

    def in_lanes(self, builder, scales):
        """Return scales where `scale_of` finds them: those of four units in each half of a register.

        Taking a scale from the other half costs three of Zen 3's instructions instead of one.
        """
        if self.reader.in_pairs:
            return [scales]
        quarter = [0, 2, 4, 6, 1, 3, 5, 7] if self.is_halved else [*range(4)] * 2
        distance = 8 if self.is_halved else 4
        parts = (shuffled(builder, scales, scales, [i + at for i in quarter]) for at in (0, distance))
        return [as_it_is(builder, part) for part in parts]

    def scale_of(self, builder, scales, unit):
        """Return a unit's scales in the lanes of its dot products."""
        distance = self.shape.vectors if self.reader.in_pairs else 4
        first = unit if self.reader.in_pairs else unit % 4
        return shuffled(builder, *[scales[unit // 4]] * 2, [first] * 4 + [first + distance] * 4)

    def add_sums(self, builder, totals, row, token, factor, sums):
        """Add the contribution of the codes' offset, or of the minimums."""
        for i in range(0, self.shape.of_row.lanes, 8):
            at = self.place(row, token, i // 8)
            parts = (slice_of(builder, value, i, i + 8) for value in (factor, sums))
            totals[at] = multiply_add(builder, *parts, totals[at])

    def make_finish(self):
        @operation(None, self.totals, int64, int64)
        def finish(builder, totals, y, y_stride):
            """Add up each row's sum to y [tokens, rows]."""
            totals = elements(builder, totals)
            for token in range(self.tokens):
                of_token = builder.add(y, builder.mul(y_stride, I64(token)))
                for row in range(self.rows):
                    at = self.place(row, token)
                    total = reduce(builder.fadd, totals[at : at + self.chains])
                    store_value(builder, builder.add(of_token, I64(4 * row)), reduce_add(builder, total))

        return finish


def make_factors_of(format, rows):
    """Make a function (w, bytes between rows) -> the rows' scales, and their minimums if there are some."""
    if format.name not in ("Q4_K", "Q5_K"):
        return make_factors(format.scales, format.minimums, rows)
    if rows == 1:
        return inlined(lambda w, step: k_factors(w))

    @inlined
    def both(w, step):
        first, second = k_factors(w), k_factors(w + step)
        return first[0], second[0], first[1], second[1]

    return both


def make_rows_in_words(format, rows, tokens=1):
    """Make a function (arguments, address of a row, bytes to the next, y, words, first token) for `tokens` tokens.

    y, words: of the first token.
    """
    format = load_group_format(format.name, small_codes=True)  # scales belong to codes as the readers give them
    totals = Totals(format, rows, tokens, group_shape(format))
    fetch, factors, group_bytes = make_fetch(format, rows), make_factors_of(format, rows), format.group_bytes
    zero, add, finish = totals.make_zero(), totals.make_add(), totals.make_finish()
    chunk_bytes, add_chunk, chunk_factors = group_bytes // 4, None, None
    if format.chunk:
        add_chunk = Totals(format, rows, tokens, chunk_shape(format)).make_add()
        _, chunk_factors = make_chunk(format, rows)
    fetch_chunk = make_ask_for(rows * chunk_bytes, 2)

    @inlined
    def product(a, w, step, y, words, token):
        columns, ahead, totals = argument(a, LINEAR.columns), w + (rows - 1) * step + AHEAD, zero()
        _, _, c, n = activations(a, LINEAR.sums)
        c, n = c + token * (columns // 4), n + token * (columns // 4)
        for _ in range(columns // 256):
            fetch(w, step, ahead)
            totals = add(totals, w, step, factors(w, step), words, c, n, columns)
            w, ahead, words = w + group_bytes, ahead + rows * group_bytes, words + 8 * RUN
            c, n = c + 64, n + 64
        if add_chunk is not None:
            for _ in range(columns % 256 // 64):
                fetch_chunk(ahead)
                totals = add_chunk(totals, w, step, chunk_factors(w, step), words, c, n, columns)
                w, ahead, words = w + chunk_bytes, ahead + rows * chunk_bytes, words + 2 * RUN
                c, n = c + 16, n + 16
        finish(totals, y, argument(a, LINEAR.y_stride))

    return product


def make_one_in_words(format, rows):
    """Return two functions for one token: one of (arguments, words), one of (arguments, w, bytes per row, y, words)."""
    store, product = make_store_words(format), make_rows_in_words(format, rows)
    prepare = device(lambda a, words: store(a, words, 1))
    return prepare, inlined(lambda a, w, step, y, words: product(a, w, step, y, words, 0))


def make_few_in_words(format, rows):
    """Make a function (arguments, w, bytes to the next row, y, tokens, words) for any number of tokens.

    Weights are unpacked once for every four tokens.
    """
    four, three, two, one = (make_rows_in_words(format, rows, tokens) for tokens in (4, 3, 2, 1))

    @inlined
    def few(a, w, step, y, tokens, words):
        distance, y_stride, token = 2 * argument(a, LINEAR.columns), argument(a, LINEAR.y_stride), 0
        while token + 4 <= tokens:
            four(a, w, step, y + token * y_stride, words + token * distance, token)
            token += 4
        y, words = y + token * y_stride, words + token * distance
        if tokens - token == 3:
            three(a, w, step, y, words, token)
        elif tokens - token == 2:
            two(a, w, step, y, words, token)
        elif tokens - token == 1:
            one(a, w, step, y, words, token)

    return few
