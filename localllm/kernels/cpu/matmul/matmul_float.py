"""y = W x in float32, for float weights and (not optimized) for block formats without integer kernels.

- one token: four rows are read side by side
- up to 8 kernel_tokens: each row is read once, as a stream (a row of blocks is converted to float32 first), and 4
  tokens share each load
- more: a slab of rows is transposed, so that a vector holds one column of 16 rows, and multiplied by all tokens in
  register tiles
- large batches: BF16 weights are multiplied by activations rounded to BF16, if the CPU can (error 3e-6, twice the
  speed), and F16 weights as in gemm_f16_words.py
"""

from localllm.kernels import simd
from localllm.kernels.cpu import FLOAT_SLAB, HALVES, MAX_FLOAT_ROW_TOKENS
from localllm.kernels.cpu.matmul.gemm_f16_words import make_prefill_words
from localllm.kernels.cpu.matmul.tiles_f32 import (
    COLUMNS,
    ROWS,
    make_load,
    make_load_some,
    make_outer,
    make_outer_bf16,
    make_splats_apart,
    make_store_some,
    make_store_sums,
    make_zeros,
)
from localllm.kernels.cpu.signature import device, inlined, kernel, load_argument
from localllm.kernels.table import EMBED
from localllm.kernels.table import LINEAR_FLOAT as LINEAR
from localllm.quant.formats import BY_NAME

# Distance, in bytes, of prefetches into the L2 cache. One core of a Zen 4 reads F16 at 27 GB/s with them, at 21
# without, and at 12 with prefetches into the L1 cache, which cannot have as many loads in flight.
PREFETCH_BYTES = 2048
# Rows that are read side by side for one token, and share each load of its activations. 8192 activations fill the L1
# cache, so row by row they would come from the L2 cache. One core of a Zen 4 reads F16 in rows of 8192 columns at
# 22 GB/s like this, at 13 row by row; two rows are 5 % slower than four. They lie a quarter of a part's rows apart, as
# in make_streams (matmul_quantized.py): two cores of a Xeon (Emerald Rapids) read at 0.94 to 1.06 of their bandwidth,
# instead of 0.79 to 0.90.
ROWS_TOGETHER = 4

PLAIN = {
    "F32": (4, simd.load_f32, simd.load_f32x16),
    "F16": (2, simd.load_f16, simd.load_f16x16),
    "BF16": (2, simd.load_bf16, simd.load_bf16x16),
}

splats = make_splats_apart(ROWS)


def make_plain(width, load_one, load_16):
    """Build a function (w, columns, out) that converts a row of values of `width` bytes to float32."""

    @device
    def load_row(w, columns, out):
        for i in range(0, columns - 15, 16):
            simd.store_f32x16(out + i * 4, load_16(w + i * width))
        for i in range(columns // 16 * 16, columns):
            simd.store_f32(out + i * 4, load_one(w + i * width))

    return load_row


def make_blocks(format_name):
    """Build a function (w, columns, out) that dequantizes a row of a block format to float32."""
    from localllm.kernels.formats.scalar import build_unpacker

    unpack, block, block_bytes = build_unpacker(format_name), BY_NAME[format_name].block, BY_NAME[format_name].bytes

    @device
    def load_row(w, columns, out):
        for i in range(columns // block):
            unpack(w + i * block_bytes, out + i * block * 4)

    return load_row


def make_dot(tokens, width, load_one, load_16):
    """Build a function that writes the dot products of a row and `tokens` tokens to y.

    Parameters: see make_plain.
    """
    multiply, load_x, zeros = make_outer(tokens, 1), make_load(tokens, 1), make_zeros(tokens)
    store_sums = make_store_sums(tokens)

    @inlined
    def dot(w, columns, x, x_stride, y, y_stride):
        even, odd = zeros(), zeros()
        for i in range(0, columns - 31, 32):
            v, k = w + i * width, x + i * 4
            for line in range(0, 32 * width, 64):
                simd.prefetch_l2(v + PREFETCH_BYTES + line)
            even = multiply(even, load_x(k, x_stride, 0), (load_16(v),))
            odd = multiply(odd, load_x(k + 64, x_stride, 0), (load_16(v + 16 * width),))
        store_sums(even, odd, y, y_stride)
        for t in range(tokens):
            rest = simd.load_f32(y + t * y_stride)
            for i in range(columns // 32 * 32, columns):
                rest += load_one(w + i * width) * simd.load_f32(x + t * x_stride + i * 4)
            simd.store_f32(y + t * y_stride, rest)

    return dot


def make_side_by_side(width, load_one, load_16):
    """Build a function that writes the dot products of ROWS_TOGETHER rows and one token to y.

    The rows are row_step bytes apart, the results y_step. The order of additions is that of make_dot.
    """
    multiply, load_x, zeros = make_outer(1, ROWS_TOGETHER), make_load(1, 1), make_zeros(ROWS_TOGETHER)
    store_sums, load_rows = make_store_sums(ROWS_TOGETHER), make_load_rows(ROWS_TOGETHER, load_16)

    @inlined
    def multiply_rows(w, row_step, columns, x, y, y_step):
        even, odd = zeros(), zeros()
        for i in range(0, columns - 31, 32):
            v, k = w + i * width, x + i * 4
            for r in range(ROWS_TOGETHER):
                for line in range(0, 32 * width, 64):
                    simd.prefetch_l2(v + r * row_step + PREFETCH_BYTES + line)
            even = multiply(even, load_x(k, 0, 0), load_rows(v, row_step))
            odd = multiply(odd, load_x(k + 64, 0, 0), load_rows(v + 16 * width, row_step))
        store_sums(even, odd, y, y_step)
        for r in range(ROWS_TOGETHER):
            rest = simd.load_f32(y + r * y_step)
            for i in range(columns // 32 * 32, columns):
                rest += load_one(w + r * row_step + i * width) * simd.load_f32(x + i * 4)
            simd.store_f32(y + r * y_step, rest)

    return multiply_rows


def make_load_rows(count, load_16):
    """Build a function (address, row stride) that loads 16 values of each of `count` rows, a power of two."""
    if count == 1:
        return inlined(lambda w, step: (load_16(w),))
    half, distance = make_load_rows(count // 2, load_16), count // 2
    return inlined(lambda w, step: half(w, step) + half(w + distance * step, step))


def make_one_token(format_name):
    """Build a function (arguments, first, last) that multiplies rows by one token.

    It returns the first remaining row.
    """
    side_by_side = make_side_by_side(*PLAIN[format_name])

    @device
    def multiply_rows(a, first, last):
        row_bytes, columns = load_argument(a, LINEAR.row_bytes), load_argument(a, LINEAR.columns)
        length = (last - first) // ROWS_TOGETHER
        for r in range(first, first + length):
            w, y = load_argument(a, LINEAR.weights) + r * row_bytes, load_argument(a, LINEAR.y) + r * 4
            side_by_side(w, length * row_bytes, columns, load_argument(a, LINEAR.x), y, length * 4)
        return first + length * ROWS_TOGETHER

    return multiply_rows


def make_few(format_name, load_row):
    plain = format_name in PLAIN
    one_token = make_one_token(format_name) if plain else None
    dot_1, dot_4 = (make_dot(tokens, *PLAIN[format_name if plain else "F32"]) for tokens in (1, 4))

    @device
    def multiply_rows(a, first, last, tokens, scratch):
        columns = load_argument(a, LINEAR.columns)
        x_stride, y_stride = load_argument(a, LINEAR.x_stride), load_argument(a, LINEAR.y_stride)
        if plain and tokens == 1:
            first = one_token(a, first, last)
        for r in range(first, last):
            w = load_argument(a, LINEAR.weights) + r * load_argument(a, LINEAR.row_bytes)
            if not plain:
                load_row(w, columns, scratch)
                w = scratch
            for t in range(0, tokens, 4):
                x, y = load_argument(a, LINEAR.x) + t * x_stride, load_argument(a, LINEAR.y) + t * y_stride + r * 4
                if tokens - t == 1:
                    dot_1(w, columns, x, x_stride, y, y_stride)
                else:  # includes up to 3 surplus tokens, whose results are not used
                    dot_4(w, columns, x, x_stride, y, y_stride)

    return multiply_rows


def make_slab(width, load_row, vectors):
    """Build a function that unpacks a slab of 16 * `vectors` rows to 4-byte words.

    The layout is [vectors][words of a row][16 rows]. width: 2 if a word is a pair of BF16 as in the file, 0 if it is a
    float32; load_row(w, words, out): unpacks one row.
    """

    @device
    def unpack_slab(a, row, column, columns, column_bytes, scratch):
        last, row_bytes = load_argument(a, LINEAR.rows) - 1, load_argument(a, LINEAR.row_bytes)
        words, as_rows = columns // 2 if width else columns, scratch + vectors * 64 * FLOAT_SLAB
        for v in range(vectors):
            for i in range(16):
                w = load_argument(a, LINEAR.weights) + min(row + 16 * v + i, last) * row_bytes + column_bytes
                load_row(w, words, as_rows + i * 4 * FLOAT_SLAB)
            for k in range(0, words, 16):
                simd.transpose_f32(as_rows + k * 4, 4 * FLOAT_SLAB, scratch + v * 64 * FLOAT_SLAB + k * 64)

    return unpack_slab


def make_prefill(format_name, load_row, x_at, stride_at, make_product, vectors=COLUMNS):
    """Build a function (arguments, first, last, token, end, scratch) that multiplies slabs by the tokens up to `end`.

    x_at, stride_at: the arguments that are the tokens' address and stride; make_product: make_outer, or make_outer_bf16
    for pairs of BF16; vectors: vectors of 16 rows in a slab.
    """
    is_paired = make_product is make_outer_bf16
    unpack_slab, per_word = make_slab(2 if is_paired else 0, load_row, vectors), 2 if is_paired else 1
    block, block_bytes = BY_NAME[format_name].block, BY_NAME[format_name].bytes
    product, load_tile, zero_tile = make_product(ROWS, vectors), make_load(ROWS, vectors), make_zeros(ROWS * vectors)
    load_first, load_columns = make_load_some(ROWS, vectors, 1), make_load(1, vectors)
    store_tile, store_first = make_store_some(ROWS, vectors, vectors), make_store_some(ROWS, vectors, 1)

    @device
    def prefill(a, first, last, token, end, scratch):
        rows, columns = load_argument(a, LINEAR.rows), load_argument(a, LINEAR.columns)
        x_stride, y_stride = load_argument(a, stride_at), load_argument(a, LINEAR.y_stride)
        for row in range(first * 16 * vectors, last * 16 * vectors, 16 * vectors):
            whole = rows - row > 16 * vectors - 16
            for column in range(0, columns, FLOAT_SLAB * per_word):
                width = min(FLOAT_SLAB * per_word, columns - column)
                unpack_slab(a, row, column, width, column // block * block_bytes, scratch)
                for t in range(token, end, ROWS):  # includes up to ROWS - 1 surplus tokens, whose results are not used
                    y = load_argument(a, LINEAR.y) + t * y_stride + row * 4
                    x = load_argument(a, x_at) + t * x_stride + column * 4 // per_word
                    tile = zero_tile()
                    if column:
                        tile = load_tile(y, y_stride, 64) if whole else load_first(y, y_stride, 64)
                    for k in range(width // per_word):
                        w = load_columns(scratch + k * 64, 0, 64 * FLOAT_SLAB)
                        tile = product(tile, splats(x + k * 4, x_stride), w)
                    if whole:
                        store_tile(tile, y, y_stride, 64)
                    else:
                        store_first(tile, y, y_stride, 64)

    return prefill


def make_linear_float(format_name):
    load_row = make_plain(*PLAIN[format_name]) if format_name in PLAIN else make_blocks(format_name)
    few = make_few(format_name, load_row)
    prefill, prefill_narrow = (
        make_prefill(format_name, load_row, LINEAR.x, LINEAR.x_stride, make_outer, vectors) for vectors in (COLUMNS, 1)
    )
    has_bf16, has_words = (format_name == name and name in HALVES for name in ("BF16", "F16"))
    as_words = make_plain(*PLAIN["F32"])
    bf16 = format_name, as_words, LINEAR.halves, LINEAR.halves_stride, make_outer_bf16
    prefill_halves = make_prefill(*bf16) if has_bf16 else make_prefill_words(simd.load_f16x16) if has_words else prefill
    has_halves = has_bf16 or has_words

    @kernel
    def linear(a, part, parts, thread):
        tokens, rows = simd.load_i64(load_argument(a, LINEAR.count)), load_argument(a, LINEAR.rows)
        kernel_tokens = simd.load_i64(load_argument(a, LINEAR.kernel_tokens))
        scratch = load_argument(a, LINEAR.scratch) + thread * load_argument(a, LINEAR.scratch_bytes)
        if kernel_tokens <= MAX_FLOAT_ROW_TOKENS:
            if tokens > 0:
                few(a, rows * part // parts, rows * (part + 1) // parts, tokens, scratch)
            return
        slabs = (rows + 16 * COLUMNS - 1) // (16 * COLUMNS)
        first, last = slabs * part // parts, slabs * (part + 1) // parts
        token, end = 0, tokens
        if slabs == 1:  # too few rows for all threads: the tokens are divided
            tiles = (tokens + ROWS - 1) // ROWS
            first, last, token, end = (
                0,
                1,
                tiles * part // parts * ROWS,
                min(tiles * (part + 1) // parts * ROWS, tokens),
            )
        if token >= end:
            return
        if (
            has_halves
            and load_argument(a, LINEAR.halves) != 0
            and kernel_tokens > load_argument(a, LINEAR.most_precise)
        ):
            prefill_halves(a, first, last, token, end, scratch)
        elif rows <= 16:
            prefill_narrow(a, first, last, token, end, scratch)
        else:
            prefill(a, first, last, token, end, scratch)

    return linear


def make_embed(format_name):
    load_row = make_plain(*PLAIN[format_name]) if format_name in PLAIN else make_blocks(format_name)

    @kernel
    def embed(a, part, parts, thread):
        tokens = simd.load_i64(load_argument(a, EMBED.count))
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            row = load_argument(a, EMBED.weights) + simd.load_i64(load_argument(a, EMBED.ids) + t * 8) * load_argument(
                a, EMBED.row_bytes
            )
            load_row(
                row, load_argument(a, EMBED.columns), load_argument(a, EMBED.x) + t * load_argument(a, EMBED.stride)
            )

    return embed
