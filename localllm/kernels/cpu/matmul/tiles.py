"""Register tiles of the integer products: VECTORS vectors of 16 rows times TOKENS tokens, unrolled.

The sums of a tile are one tuple of vectors, which LLVM keeps in registers: element t * VECTORS + v is for token t and
rows 16 v to 16 v + 15. With 32 registers, 2 x 6 needs 8 loads for 12 dot products; 1 x 8 needs 9 for 8 and is bound by
them.

Most CPUs multiply a *word*, 4 columns of each of 16 rows in a vector, by 4 columns of a token in all lanes. An ARM
with i8mm multiplies small matrices: 8 columns of 2 rows by 8 columns of 2 tokens, twice as many products per register.
Their sums, [2 rows][2 tokens] in a register, become vectors of rows when a run of columns is finished.

A slab is multiplied by all tokens while the next one is prefetched into the L2 cache. Its weights are segments of many
rows, which no hardware prefetcher predicts: unpacking without prefetches read 7 GB/s.
"""

from llvmlite import ir
from numba import float32, int64, types

from localllm.kernels.cpu import INTEGER_TILE, SLAB
from localllm.kernels.cpu.signature import device, load_argument
from localllm.kernels.machine import get_lane
from localllm.kernels.simd import (
    F32,
    I8,
    I32,
    I64,
    as_tuple,
    dot_bytes,
    elements,
    f32x16,
    i32x16,
    llvm_call,
    load_value,
    multiply_add,
    operation,
    prefetch_l2,
    select_dot,
    select_signed_dot,
    shuffle_lanes,
    splat_value,
    store_value,
    transpose_f32,
    transpose_quads,
    u8x64,
)
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR

VECTORS, TOKENS = INTEGER_TILE
ROWS = 16 * VECTORS
ints, floats = types.UniTuple(i32x16, VECTORS * TOKENS), types.UniTuple(f32x16, VECTORS * TOKENS)
GROUP_WORDS = [64 * q + 4 * word for q in range(4) for word in (0, 1)]  # offsets of a run's words in a striped group
CHUNK_WORDS = [16 * q + 4 * word for q in range(4) for word in (0, 1)]  # in a striped chunk
PLACES = [(t, v) for t in range(TOKENS) for v in range(VECTORS)]


def compute_addresses(builder, first, stride, count):
    return [builder.add(first, builder.mul(stride, I64(i))) for i in range(count)]


def emit_loads(builder, first, stride, count, llvm_type):
    return [load_value(builder, address, llvm_type) for address in compute_addresses(builder, first, stride, count)]


@operation(ints)
def zero_ints(builder):
    return as_tuple(builder, [ir.Constant(i32x16.llvm, None)] * len(PLACES))


@operation(floats)
def zero_floats(builder):
    return as_tuple(builder, [ir.Constant(f32x16.llvm, None)] * len(PLACES))


@operation(ints, ints)
def multiply_by_256(builder, sums):
    """Multiply sums of the high plane by 256, to units of the low plane."""
    eight = ir.Constant(i32x16.llvm, [8] * 16)
    return as_tuple(builder, [builder.shl(value, eight) for value in elements(builder, sums)])


def order_values(builder, values):
    """Return the values unchanged; LLVM must compute them before any later load.

    Otherwise LLVM interleaves the work of different words, and has more values than registers: tiles of IQ4_XS took
    1.05 times as long.
    """
    if not get_lane().has_512_bits:
        return values
    kinds = [value.type for value in values]
    constraints = ["=v"] * len(values) + [str(i) for i in range(len(values))] + ["~{memory}"]
    kind = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    ordered = builder.asm(kind, "", ",".join(constraints), values, side_effect=True)
    return [builder.extract_value(ordered, i) for i in range(len(values))]


@operation(floats, floats)
def force_totals(builder, totals):
    """Return the totals unchanged; LLVM must compute them before the code that follows.

    Otherwise LLVM delays the computation, and has more values than registers (52 spills, not 28).
    """
    return as_tuple(builder, order_values(builder, elements(builder, totals)))


def splat_sums(builder, values):
    values = [splat_value(builder, i32x16.llvm, value) for value in values]
    return as_tuple(builder, [values[t] for t, _ in PLACES])


@operation(ints, int64, int64)
def load_excess(builder, excess, stride):
    """Return the initial sums of a tile: in each lane, the token's integer at `excess`.

    stride: bytes between tokens.
    """
    return splat_sums(builder, emit_loads(builder, excess, stride, TOKENS, I32))


@operation(ints, int64, int64)
def load_both_excesses(builder, excess, stride):
    """Return initial sums of a tile: in each lane the sum of the token's two integers at `excess`."""
    pairs = zip(*(emit_loads(builder, builder.add(excess, I64(at)), stride, TOKENS, I32) for at in (0, 4)), strict=True)
    return splat_sums(builder, [builder.add(*pair) for pair in pairs])


@operation(types.boolean, int64, int64)
def share_scales(builder, c, stride):
    """Return whether each token has the same scale, stored twice at c, for two consecutive runs."""
    different = I64(0)
    for both in emit_loads(builder, builder.add(c, I64(4)), stride, TOKENS, I64):
        swapped = builder.or_(builder.shl(both, I64(32)), builder.lshr(both, I64(32)))
        different = builder.or_(different, builder.xor(both, swapped))
    return builder.icmp_signed("==", different, I64(0))


def emit_scale_masks(builder, c, stride):
    """Return whether each token of a tile has the same scale for two consecutive runs, in all lanes."""
    pairs = zip(*(emit_loads(builder, builder.add(c, I64(at)), stride, TOKENS, I32) for at in (0, 8)), strict=True)
    splats = ([splat_value(builder, i32x16.llvm, scale) for scale in pair] for pair in pairs)
    equal = [builder.icmp_signed("==", *pair) for pair in splats]
    return [equal[t] for t, _ in PLACES]


def make_start_second(has_excess):
    """Return an intrinsic (sums, excess, stride, c, c_stride) -> initial sums of the second of two runs.

    sums: of the first run; tokens that have one scale for both runs continue with them. excess, stride: as in `start`,
    of the second run, if has_excess; c, c_stride: as in share_scales.
    """

    @operation(ints, ints, int64, int64, int64, int64)
    def start_second(builder, sums, excess, stride, c, c_stride):
        zero, are_one = ir.Constant(i32x16.llvm, None), emit_scale_masks(builder, c, c_stride)
        started_sums = [builder.select(*both, zero) for both in zip(are_one, elements(builder, sums), strict=True)]
        if has_excess:
            values = [splat_value(builder, i32x16.llvm, v) for v in emit_loads(builder, excess, stride, TOKENS, I32)]
            started_sums = [builder.add(v, values[t]) for v, (t, _) in zip(started_sums, PLACES, strict=True)]
        return as_tuple(builder, started_sums)

    return start_second


@operation(floats, floats, ints, int64, int64, int64, int64)
def add_scaled_alone(builder, totals, sums, s, s_stride, c, c_stride):
    """Return totals + scaled sums for tokens with two scales, and the totals of the others.

    See share_scales.
    """
    rows = load_row_scales(builder, s, s_stride)
    products = zip(elements(builder, sums), rows, strict=True)
    products = [builder.fmul(builder.sitofp(value, f32x16.llvm), row) for value, row in products]
    return as_tuple(builder, emit_alone(builder, elements(builder, totals), products, c, c_stride))


@operation(floats, floats, floats, int64, int64)
def add_alone(builder, totals, products, c, c_stride):
    """Return totals + products * scales for tokens with two scales, and the totals of the others."""
    return as_tuple(builder, emit_alone(builder, elements(builder, totals), elements(builder, products), c, c_stride))


def emit_alone(builder, totals, products, c, c_stride):
    columns, are_one = load_token_scales(builder, c, c_stride), emit_scale_masks(builder, c, c_stride)
    sums = [multiply_add(builder, *each) for each in zip(products, columns, totals, strict=True)]
    return [builder.select(*each) for each in zip(are_one, totals, sums, strict=True)]


@operation(floats, floats, ints, int64, int64, int64, int64)
def continue_products(builder, products, sums, s, s_stride, c, c_stride):
    """Return products + sums * row scales at s; for tokens with two scales, without the products."""
    rows, zero = load_row_scales(builder, s, s_stride), ir.Constant(f32x16.llvm, None)
    are_one = emit_scale_masks(builder, c, c_stride)
    begun = [builder.select(*both, zero) for both in zip(are_one, elements(builder, products), strict=True)]
    values = [builder.sitofp(value, f32x16.llvm) for value in elements(builder, sums)]
    return as_tuple(builder, [multiply_add(builder, *each) for each in zip(values, rows, begun, strict=True)])


@operation(floats, floats, ints, int64, int64, int64, int64)
def add_scaled(builder, totals, sums, s, s_stride, c, c_stride):
    """Return totals + sums * (scales of the rows at s) * (scales of the tokens at c)."""
    rows, columns = load_row_scales(builder, s, s_stride), load_token_scales(builder, c, c_stride)
    totals, sums = elements(builder, totals), elements(builder, sums)
    for i, value in enumerate(sums):
        product = builder.fmul(builder.sitofp(value, f32x16.llvm), rows[i])
        totals[i] = multiply_add(builder, product, columns[i], totals[i])
    return as_tuple(builder, totals)


def load_row_scales(builder, s, stride):
    """Load the scales of rows, `stride` bytes between vectors, as one vector for each vector of a tile."""
    scales = emit_loads(builder, s, stride, VECTORS, f32x16.llvm)
    return [scales[v] for _, v in PLACES]


def load_token_scales(builder, c, stride):
    """Load the scales of tokens, `stride` bytes between them, as one vector for each vector of a tile."""
    scales = [splat_value(builder, f32x16.llvm, value) for value in emit_loads(builder, c, stride, TOKENS, F32)]
    return [scales[t] for t, _ in PLACES]


def make_times(scales_at, kind, first=False):
    """Return an intrinsic (totals, values, address, stride) -> totals + values * scales.

    first: return values * scales. scales_at: rows_at or columns_at, which loads the scales; kind: the type of the
    values, `ints` or `floats`.
    """

    @operation(floats, floats, kind, int64, int64)
    def times(builder, totals, values, address, stride):
        scales, values = scales_at(builder, address, stride), elements(builder, values)
        if kind is ints:
            values = [builder.sitofp(value, f32x16.llvm) for value in values]
        products = zip(values, scales, elements(builder, totals), strict=True)
        if first:
            return as_tuple(
                builder, order_values(builder, [builder.fmul(value, scale) for value, scale, _ in products])
            )
        return as_tuple(builder, order_values(builder, [multiply_add(builder, *product) for product in products]))

    return times


@operation(floats, floats, float32, int64, int64, int64, int64)
def add_least(builder, totals, factor, m, m_stride, x_sums, sums_stride):
    """Return totals + factor * (minimums of the rows at m) * (sums of the tokens at x_sums)."""
    factor = splat_value(builder, f32x16.llvm, factor)
    lows = [builder.fmul(value, factor) for value in emit_loads(builder, m, m_stride, VECTORS, f32x16.llvm)]
    sums = [splat_value(builder, f32x16.llvm, value) for value in emit_loads(builder, x_sums, sums_stride, TOKENS, F32)]
    totals = elements(builder, totals)
    for i, (t, v) in enumerate(PLACES):
        totals[i] = multiply_add(builder, lows[v], sums[t], totals[i])
    return as_tuple(builder, totals)


def make_load_tile(vectors):
    """Return an intrinsic (y, bytes between tokens) that loads `vectors` vectors of rows.

    The other vectors are zero.
    """

    @operation(floats, int64, int64)
    def load_tile(builder, y, y_stride):
        rows, zero = compute_addresses(builder, y, y_stride, TOKENS), ir.Constant(f32x16.llvm, None)
        places = [builder.add(rows[t], I64(64 * v)) if v < vectors else None for t, v in PLACES]
        return as_tuple(builder, [zero if p is None else load_value(builder, p, f32x16.llvm) for p in places])

    return load_tile


def make_store_tile(vectors):
    """Return an intrinsic (totals, y, bytes between tokens) that stores `vectors` vectors of rows."""

    @operation(None, floats, int64, int64)
    def store_tile(builder, totals, y, y_stride):
        rows = compute_addresses(builder, y, y_stride, TOKENS)
        for value, (t, v) in zip(elements(builder, totals), PLACES, strict=True):
            if v < vectors:
                store_value(builder, builder.add(rows[t], I64(64 * v)), value)

    return store_tile


@device
def transpose_words(source, columns, target):
    """Transpose 4-byte words: [16 rows][columns] to [columns][16 rows], columns rounded up to 16."""
    stride = (columns + 15) // 16 * 64
    for i in range((columns + 15) // 16):
        transpose_f32(source + i * 64, stride, target + i * 1024)


HAS_MATRICES = "i8mm" in get_lane().features
u8x16, i32x4 = ir.VectorType(I8, 16), ir.VectorType(I32, 4)


def make_code_dots(words, largest):
    """Build the product for unsigned codes up to `largest`."""
    if HAS_MATRICES:
        return make_matrix_dots(words, "llvm.aarch64.neon.usmmla.v4i32.v16i8")
    dot = select_dot(largest)

    def dot_below_128(builder, accumulator, codes, columns):
        """Add a dot product of bytes below 128; the mask tells LLVM so, which saves instructions."""
        return dot_bytes(builder, accumulator, builder.and_(codes, ir.Constant(u8x64.llvm, [0x7F] * 64)), columns)

    return make_dots(words, dot_below_128 if dot is dot_bytes and largest < 128 else dot)


def make_rescaled_dots(words):
    """Build the product for the bytes of gemm_int8.py."""
    if HAS_MATRICES:
        return make_matrix_dots(words, "llvm.aarch64.neon.smmla.v4i32.v16i8")
    return make_dots(words, select_signed_dot() or select_dot())


def make_dots(words, dot):
    """Return an intrinsic that adds products to sums.

    Its parameters: sums, w, bytes between vectors of w, x, bytes between tokens. words: the offsets in x of the words
    to multiply; w has 64 bytes for each word, [16 rows][4 columns]. dot: emits one product.
    """

    @operation(ints, ints, int64, int64, int64, int64)
    def dots(builder, sums, w, w_stride, x, x_stride):
        sums = elements(builder, sums)
        ws, xs = compute_addresses(builder, w, w_stride, VECTORS), compute_addresses(builder, x, x_stride, TOKENS)
        for word in words:
            weights = [load_value(builder, builder.add(address, I64(16 * word)), u8x64.llvm) for address in ws]
            for t, address in enumerate(xs):
                columns = load_columns(builder, address, word)
                for v, rows in enumerate(weights):
                    i = t * VECTORS + v
                    sums[i] = dot(builder, sums[i], rows, columns)
            sums = order_values(builder, sums)
        return as_tuple(builder, sums)

    return dots


def load_columns(builder, address, word):
    """Load 4 columns of a token into all lanes.

    An ARM can multiply by a lane, so two words are loaded at once.
    """
    if "neon" in get_lane().features:
        two = load_value(builder, builder.add(address, I64(word // 8 * 8)), ir.VectorType(I32, 2))
        columns = shuffle_lanes(builder, two, two, [word % 8 // 4] * 16)
    else:
        columns = splat_value(builder, i32x16.llvm, load_value(builder, builder.add(address, I64(word)), I32))
    return builder.bitcast(columns, u8x64.llvm)


def make_matrix_dots(words, multiply):
    """Build the intrinsic of make_dots for an ARM with i8mm.

    multiply: LLVM's name of the instruction, which multiplies bytes [2 rows][8] by [2 tokens][8] and adds to int32
    [2][2]. Words come in pairs: w has their 8 columns row by row, 128 bytes.
    """

    @operation(ints, ints, int64, int64, int64, int64)
    def dots(builder, sums, w, w_stride, x, x_stride):
        ws, xs = compute_addresses(builder, w, w_stride, VECTORS), compute_addresses(builder, x, x_stride, TOKENS)
        squares = [[ir.Constant(i32x4, None)] * (8 * VECTORS) for _ in range(TOKENS // 2)]
        for word in words[::2]:
            tokens = [load_token_pair(builder, *pair, word) for pair in zip(xs[::2], xs[1::2], strict=True)]
            places = [builder.add(address, I64(16 * word + 16 * p)) for address in ws for p in range(8)]
            for p, place in enumerate(places):
                rows = load_value(builder, place, u8x16)
                for t, columns in enumerate(tokens):
                    squares[t][p] = llvm_call(builder, multiply, i32x4, [squares[t][p], rows, columns])
        products = [combine_rows(builder, squares[t // 2][8 * v : 8 * v + 8], t % 2) for t, v in PLACES]
        return as_tuple(builder, [builder.add(*both) for both in zip(elements(builder, sums), products, strict=True)])

    return dots


def load_token_pair(builder, first, second, word):
    pair = ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
    for lane, address in enumerate((first, second)):
        columns = load_value(builder, builder.add(address, I64(word)), I64)
        pair = builder.insert_element(pair, columns, I32(lane))
    return builder.bitcast(pair, u8x16)


def combine_rows(builder, squares, token):
    """Return the sums of 16 rows and one of two tokens as i32x16.

    squares: 8 registers with [2 rows][2 tokens].
    """
    order = [token, token + 2, token + 4, token + 6]
    parts = [shuffle_lanes(builder, *pair, order) for pair in zip(squares[::2], squares[1::2], strict=True)]
    halves = [shuffle_lanes(builder, *pair, range(8)) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return shuffle_lanes(builder, *halves, range(16))


@device
def transpose_pairs(source, columns, target):
    """Transpose 4-byte words in pairs: [16 rows][columns] to [columns / 2][16 rows][2]."""
    stride = (columns + 15) // 16 * 64
    for i in range((columns + 15) // 16):
        transpose_quads(source + i * 64, stride, target + i * 1024)


transpose_codes = transpose_pairs if HAS_MATRICES else transpose_words


def make_fetch_next(group_bytes, slab_columns=SLAB):
    """Build a function that prefetches a token's share of the next slab's weights.

    The function is (arguments, (tile, column), token, tokens). The shares of all tokens add up to the slab.
    group_bytes: bytes of 256 columns. The arguments may also be those of LINEAR_FLOAT, the first of which are the same.
    """

    @device
    def fetch_next(a, slab, token, tokens):
        row_bytes, (tile, column) = load_argument(a, LINEAR.row_bytes), slab
        size = min(slab_columns, load_argument(a, LINEAR.columns) - column) // 64 * group_bytes // 4
        first = load_argument(a, LINEAR.weights) + column * group_bytes // 256
        share = (ROWS * TOKENS + tokens - 1) // tokens
        row = tile * ROWS + token // TOKENS * share
        for r in range(row, min(row + share, load_argument(a, LINEAR.rows), (tile + 1) * ROWS)):
            for line in range(0, size, 64):
                prefetch_l2(first + r * row_bytes + line)

    return fetch_next


load_all, load_first = make_load_tile(VECTORS), make_load_tile(1)
store_all, store_first = make_store_tile(VECTORS), make_store_tile(1)


def make_slab(format, unpack_tile, multiply):
    """Build a function that multiplies a slab by all tokens.

    Its parameters: arguments, tile, column, (tile, column) of the next slab, tokens, scratch. unpack_tile(arguments,
    tile, column, columns, scratch): unpacks it to scratch memory. multiply(arguments, totals, columns, first
    activation, tokens, scratch): adds the products of TOKENS tokens to their totals; only the first `tokens` of these
    tokens exist.
    """
    fetch_next = make_fetch_next(format.group_bytes)

    @device
    def slab(a, tile, column, next_slab, tokens, scratch):
        columns = min(SLAB, load_argument(a, LINEAR.columns) - column)
        unpack_tile(a, tile, column, columns, scratch)
        width, y_stride = load_argument(a, LINEAR.columns), load_argument(a, LINEAR.y_stride)
        whole = load_argument(a, LINEAR.rows) - tile * ROWS > ROWS - 16
        for t in range(0, tokens, TOKENS):  # includes up to TOKENS - 1 surplus tokens, whose results are not used
            y = load_argument(a, LINEAR.y) + tile * ROWS * 4 + t * y_stride
            fetch_next(a, next_slab, t, tokens)
            totals = zero_floats()
            if column:
                totals = load_all(y, y_stride) if whole else load_first(y, y_stride)
            totals = multiply(a, totals, columns, t * width + column, tokens - t, scratch)
            if whole:
                store_all(totals, y, y_stride)
            else:
                store_first(totals, y, y_stride)

    return slab
