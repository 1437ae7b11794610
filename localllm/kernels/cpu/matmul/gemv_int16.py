"""Products of one or two rows and one to four tokens in 16-bit words.

They are for CPUs with AVX2 but without VNNI. On these CPUs a dot product of bytes takes two instructions, each plane of
the activations needs its own, and striped codes are shuffled first. Instead, each part of the step first combines both
planes to 16-bit words, 256 * high + low, in the order in which formats/words.py unpacks codes. Decode of a 1.2 B model
on a Zen 4 limited to AVX2 reaches 31 tokens/s in Q4_K and 28 in Q6_K, against 22 and 13 with products of bytes.

A "unit" is one run of 32 columns, or a pair of runs, see formats/words.py.
"""

from functools import reduce

from llvmlite import ir
from numba import int64, types

from localllm.kernels import simd
from localllm.kernels.cpu.matmul.gemv_quantized import (
    Accumulator,
    get_chunk_shape,
    get_group_shape,
    locate_activations,
    make_chunk_factors,
    make_factors,
    make_fetch,
)
from localllm.kernels.cpu.signature import device, inlined, load_argument
from localllm.kernels.formats import load_group_format
from localllm.kernels.formats.words import READERS, WORDS, load_k_factors
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR

CHAINS = 2  # independent sums of a row, because an addition waits for the previous one of its sum
RUN = 64  # bytes of 32 activations as words


def has_words(name, tokens=1):
    """Return whether this CPU multiplies rows of a format as 16-bit words by `tokens` tokens.

    Q3_K with several tokens is an exception. Its codes, up to 7, times bytes are added in 16 bits so often that 8
    tokens take 0.83 of the time as bytes; Q2_K, which has minimums, takes 1.6.
    """
    return name in READERS and simd.has_fast_word_products() and (tokens == 1 or name != "Q3_K")


def combine_run(builder, high, low, distance):
    """Combine both planes of a run, with stripes of 8 `distance` bytes apart, to two vectors of 16 words."""
    stripes = []
    for i in range(4):
        places = (builder.add(at, builder.mul(distance, simd.I64(i))) for at in (high, low))
        planes = (simd.load_value(builder, place, ir.VectorType(simd.I8, 8)) for place in places)
        upper, lower = (builder.sext(plane, ir.VectorType(simd.I16, 8)) for plane in planes)
        stripes.append(builder.add(builder.shl(upper, simd.constant_like(upper, 8)), lower))
    return [simd.shuffle_lanes(builder, *stripes[i : i + 2], range(16)) for i in (0, 2)]


def make_store_unit(in_pairs):
    """Return an intrinsic that stores a unit's words.

    Its parameters: high, low, bytes between stripes, between runs, words. in_pairs: whether a unit is a pair of runs.
    """

    @simd.operation(None, *[int64] * 5)
    def store_unit(builder, high, low, distance, apart, words):
        parts = [combine_run(builder, high, low, distance)]
        if in_pairs:
            other = combine_run(builder, builder.add(high, apart), builder.add(low, apart), distance)
            parts = [*zip(*parts, other, strict=True)]
        stored = [simd.shuffle_lanes(builder, *part, range(odd, 32, 2)) for part in parts for odd in (0, 1)]
        for i, value in enumerate(stored):
            simd.store_value(builder, builder.add(words, simd.I64(32 * i)), value)

    return store_unit


def make_store_words(format):
    """Build a function (arguments, words, first, tokens) that stores activations as words, unit by unit."""
    in_pairs = READERS[format.name].in_pairs
    store_unit, runs_at_once = make_store_unit(in_pairs), 2 if in_pairs else 1

    @inlined
    def store_runs(high, low, runs, words):
        for unit in range(runs // runs_at_once):
            at = 8 * unit
            store_unit(high + at, low + at, 8 * runs, 4 * runs, words + RUN * runs_at_once * unit)

    @device
    def store_words(a, words, first, tokens):
        columns = load_argument(a, LINEAR.columns)
        whole = columns // 256 * 256
        for token in range(first, first + tokens):
            high, low = load_argument(a, LINEAR.high) + token * columns, load_argument(a, LINEAR.low) + token * columns
            for column in range(0, whole, 256):
                store_runs(high + column, low + column, 8, words + 2 * column)
            for column in range(whole, columns, 64):
                store_runs(high + column, low + column, 2, words + 2 * column)
            words += 2 * columns

    return store_words


def keep_order(builder):
    """Emit a barrier: loads after this point stay after it.

    Otherwise LLVM would load the activations once for all rows, and have no registers left for the codes. As operands
    of the products they cost no instruction: one token of two rows takes 0.93 of the time in Q4_0 and Q2_K, 0.96 in
    Q4_K, Q5_K and IQ4_XS (Zen 4, AVX2, in the L2 cache).
    """
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def keep_in_register(builder, value):
    """Return the vector unchanged, but hide from LLVM how it was computed.

    LLVM would otherwise merge two shuffles into a slower one.
    """
    return builder.asm(ir.FunctionType(value.type, [value.type]), "", "=x,0", [value], False)


class Accumulators(Accumulator):
    """The totals of rows and tokens.

    For each pair of a row and a token there are `chains` vectors, the sum of whose lanes is the result.
    """

    def __init__(self, format, rows, tokens, shape):
        self.reader, self.rows, self.tokens = READERS[format.name], rows, tokens
        self.is_halved, self.chains = format.sub_block == 16, CHAINS if tokens == 1 else 1
        self.shape = shape if format.minimums else shape._replace(offset=self.reader.offset)
        self.totals = types.UniTuple(simd.f32x8, self.chains * rows * tokens)
        self.factors = types.UniTuple(shape.row_vector, rows * shape.factors)

    def place(self, row, token, chain=0):
        return (token * self.rows + row) * self.chains + chain % self.chains

    def make_add(self):
        @simd.operation(self.totals, self.totals, int64, int64, self.factors, *[int64] * 4)
        def add(builder, totals, w, step, factors, words, c, n, columns):
            """Add the products of a group of 256 columns, or of a chunk of 64.

            words, c, n: addresses for the first token; columns: of a row; the distances to the next token follow from
            it.
            """
            totals, factors = simd.elements(builder, totals), simd.elements(builder, factors)
            scales = self.scales(builder, totals, factors, c, n, builder.lshr(columns, simd.I64(2)))
            rows = [builder.add(w, builder.mul(step, simd.I64(r))) for r in range(self.rows)]
            units = [self.reader.units(builder, row, 2 * self.shape.vectors) for row in rows]
            of_tokens = [builder.add(words, builder.mul(columns, simd.I64(2 * token))) for token in range(self.tokens)]
            for unit, codes in enumerate(zip(*units, strict=True)):
                for row in range(self.rows):
                    for token, first in enumerate(of_tokens):
                        if self.tokens * self.rows > 1:
                            keep_order(builder)
                        i, scale = self.place(row, token, unit), self.select_scale(builder, scales[token][row], unit)
                        dot = self.dot(
                            builder, codes[row], builder.add(first, simd.I64(RUN // 2 * len(codes[row]) * unit))
                        )
                        totals[i] = simd.multiply_add(builder, dot, scale, totals[i])
            return simd.as_tuple(builder, totals)

        return add

    def dot(self, builder, codes, words):
        """Multiply a unit's codes by the activations at an address.

        The result is an f32x8 vector, whose lanes belong to the unit's scales.
        """
        products = []
        for i, code in enumerate(codes):
            x = simd.load_value(builder, builder.add(words, simd.I64(RUN // 2 * i)), WORDS)
            products.append(simd.multiply_pairs(builder, code, x))
        return builder.sitofp(reduce(builder.add, products), simd.f32x8.llvm)

    def scales(self, builder, totals, factors, c, n, distance):
        """Return the scales of rows times those of tokens, [token][row]; add the offsets' or minimums' terms."""
        scales = []
        for token in range(self.tokens):
            of_token, sums = (
                self.load_factors(builder, builder.add(address, builder.mul(distance, simd.I64(token))))
                for address in (c, n)
            )
            if self.reader.factors:
                of_token = builder.fmul(of_token, ir.Constant(of_token.type, [1 / f for f in self.reader.factors]))
            scales.append(
                [self.arrange_lanes(builder, builder.fmul(scale, of_token)) for scale in factors[: self.rows]]
            )
            if self.shape.offset != 0:
                sums = self.shape.scale_sums(builder, sums)
                for row in range(self.rows):
                    self.add_sums(builder, totals, row, token, factors[row - self.rows], sums)
        return scales

    def load_factors(self, builder, address):
        """Load a token's scales or sums, one for every 16 columns, in the order of the rows' scales."""
        value = self.shape.load(builder, address)
        return value if self.is_halved else simd.slice_lanes(builder, value, 0, 16, 2)

    def arrange_lanes(self, builder, scales):
        """Rearrange scales so that each half of a register gets those of four units.

        Taking a scale from the other half of a register takes three instructions of Zen 3 instead of one.
        """
        if self.reader.in_pairs:
            return [scales]
        quarter = [0, 2, 4, 6, 1, 3, 5, 7] if self.is_halved else [*range(4)] * 2
        distance = 8 if self.is_halved else 4
        parts = (simd.shuffle_lanes(builder, scales, scales, [i + at for i in quarter]) for at in (0, distance))
        return [keep_in_register(builder, part) for part in parts]

    def select_scale(self, builder, scales, unit):
        distance = self.shape.vectors if self.reader.in_pairs else 4
        first = unit if self.reader.in_pairs else unit % 4
        return simd.shuffle_lanes(builder, *[scales[unit // 4]] * 2, [first] * 4 + [first + distance] * 4)

    def add_sums(self, builder, totals, row, token, factor, sums):
        for i in range(0, self.shape.row_vector.lanes, 8):
            at = self.place(row, token, i // 8)
            parts = (simd.slice_lanes(builder, value, i, i + 8) for value in (factor, sums))
            totals[at] = simd.multiply_add(builder, *parts, totals[at])

    def make_finish(self):
        @simd.operation(None, self.totals, int64, int64, int64)
        def finish(builder, totals, y, step, y_stride):
            totals = simd.elements(builder, totals)
            for token in range(self.tokens):
                of_token = builder.add(y, builder.mul(y_stride, simd.I64(token)))
                for row in range(self.rows):
                    at = self.place(row, token)
                    total = reduce(builder.fadd, totals[at : at + self.chains])
                    at = builder.add(of_token, builder.mul(step, simd.I64(row)))
                    simd.store_value(builder, at, simd.reduce_add(builder, total))

        return finish


def make_row_factors(format, rows):
    if format.name not in ("Q4_K", "Q5_K"):
        return make_factors(format.scales, format.minimums, rows)
    if rows == 1:
        return inlined(lambda w, step: load_k_factors(w))

    @inlined
    def both(w, step):
        first, second = load_k_factors(w), load_k_factors(w + step)
        return first[0], second[0], first[1], second[1]

    @inlined
    def four(w, step):
        a, b, c, d = (
            load_k_factors(w),
            load_k_factors(w + step),
            load_k_factors(w + 2 * step),
            load_k_factors(w + 3 * step),
        )
        return a[0], b[0], c[0], d[0], a[1], b[1], c[1], d[1]

    return both if rows == 2 else four


def make_word_rows(format, rows, tokens=1):
    """Build a function (arguments, w, step, y, y_step, words, first token) that multiplies rows.

    y, words: addresses for the first token.
    """
    format = load_group_format(format.name, small_codes=True)  # the readers of words need plain scales
    totals = Accumulators(format, rows, tokens, get_group_shape(format))
    fetch, factors, group_bytes = make_fetch(format), make_row_factors(format, rows), format.group_bytes
    zero, add, finish = totals.make_zero(), totals.make_add(), totals.make_finish()
    chunk_bytes, add_chunk, chunk_factors = group_bytes // 4, None, None
    if format.chunk:
        add_chunk = Accumulators(format, rows, tokens, get_chunk_shape(format)).make_add()
        chunk_factors = make_chunk_factors(format, rows)

    @inlined
    def product(a, w, step, y, y_step, words, token):
        columns, totals = load_argument(a, LINEAR.columns), zero()
        _, _, c, n = locate_activations(a, LINEAR.sums)
        c, n = c + token * (columns // 4), n + token * (columns // 4)
        for _ in range(columns // 256):
            for row in range(rows):
                fetch(w + row * step)
            totals = add(totals, w, step, factors(w, step), words, c, n, columns)
            w, words = w + group_bytes, words + 8 * RUN
            c, n = c + 64, n + 64
        if add_chunk is not None:
            for _ in range(columns % 256 // 64):
                totals = add_chunk(totals, w, step, chunk_factors(w, step), words, c, n, columns)
                w, words = w + chunk_bytes, words + 2 * RUN
                c, n = c + 16, n + 16
        finish(totals, y, y_step, load_argument(a, LINEAR.y_stride))

    return product


def make_one_token_words(format, rows):
    """Build the two functions that multiply rows by one token in words.

    (arguments, words) stores the token's activations as words; the other multiplies by them: see make_streams
    (matmul_quantized.py) for its parameters.
    """
    store, product = make_store_words(format), make_word_rows(format, rows)
    prepare = device(lambda a, words: store(a, words, 0, 1))
    return prepare, inlined(
        lambda a, w, step, y, y_step, words, token, tokens: product(a, w, step, y, y_step, words, 0)
    )


def make_few_tokens_words(format, rows):
    """Build a function that multiplies rows by a few tokens.

    See make_streams (matmul_quantized.py) for its parameters. Weights are unpacked for four tokens at a time.
    """
    four, three, two, one = (make_word_rows(format, rows, tokens) for tokens in (4, 3, 2, 1))

    @inlined
    def few(a, w, step, y, y_step, words, first, tokens):
        distance, y_stride, token = 2 * load_argument(a, LINEAR.columns), load_argument(a, LINEAR.y_stride), 0
        while token + 4 <= tokens:
            four(a, w, step, y + token * y_stride, y_step, words + token * distance, first + token)
            token += 4
        y, words = y + token * y_stride, words + token * distance
        if tokens - token == 3:
            three(a, w, step, y, y_step, words, first + token)
        elif tokens - token == 2:
            two(a, w, step, y, y_step, words, first + token)
        elif tokens - token == 1:
            one(a, w, step, y, y_step, words, first + token)

    return few
