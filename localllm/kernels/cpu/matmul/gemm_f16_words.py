"""Products of F16 weights and many tokens in integers (AVX512-VNNI).

Values are rounded to 14 bits and stored in 16-bit words, which the CPU multiplies in pairs. An instruction does twice
as many multiplications as in float32: 512 tokens of a 1.2 B model take 0.64 of the time. Activations have a scale for
every 32 columns of a token (a run), weights one for SLAB columns of a row. LARGEST is the largest integer for which the
sum of a run's products fits in 32 bits. The number of columns is a multiple of 16; if the last run has only 16 columns,
zeros follow. Rounding costs 3e-8 of a product's mean square for normally distributed values, as much as rounding only
the activations to F16, which other programs do.

Scratch memory, in order:

    weights        int16 [vector][pair of columns][16 rows][2]
    their scales   f32 [vector][16]
    16 rows        int16, before they are transposed
"""

from numba import float32

from localllm.kernels import simd
from localllm.kernels.cpu.matmul import tiles
from localllm.kernels.cpu.signature import device, kernel, load_argument
from localllm.kernels.table import LINEAR_FLOAT as LINEAR
from localllm.kernels.table import QUANTIZE_WORDS

LARGEST = float32(8191)  # 32 * LARGEST**2 < 2**31
SLAB = 384  # columns that are unpacked at a time: 24 KiB, which leaves space for some tokens in the L1 cache
MAX_SLAB_TOKENS = 600  # maximum tokens per slab; their columns then fit in the L2 cache (1024: 1.2 times as long)
WORDS_BYTES = SLAB * 32  # bytes of a vector of 16 rows
dots = tiles.make_dots(range(0, 64, 4), simd.dot_words_vnni_512)
add_run, times_rows = (
    tiles.make_times(tiles.load_token_scales, tiles.ints),
    tiles.make_times(tiles.load_row_scales, tiles.floats),
)


@device
def round_to_runs(columns):
    """Round the number of columns up to whole runs of 32."""
    return (columns + 31) // 32 * 32


def make_rounding(load_16, width):
    """Build a function (address, columns, target) -> scale that converts values to 16-bit integers.

    width: bytes of a value. The number of columns is a multiple of 16; target is padded to whole runs of 32. The scale
    is NaN if a value is not finite.
    """

    @device
    def to_words(x, columns, words):
        largest, is_finite = float32(0), True
        for i in range(0, columns, 32):
            other = min(i + 16, columns - 16)
            size = simd.max_magnitude_f32x16(load_16(x + i * width), load_16(x + other * width))
            largest, is_finite = max(largest, size), is_finite and size < simd.INFINITY
        step, inverse = largest / LARGEST, LARGEST / largest if largest > 0 else float32(0)
        for i in range(0, columns, 16):
            codes = simd.int_f32x16(simd.round_f32x16(load_16(x + i * width) * simd.splat_f32x16(inverse)))
            simd.store_words_i32x16(words + i * 2, codes)
        if columns % 32:
            simd.store_words_i32x16(words + columns * 2, simd.int_f32x16(simd.zero_f32x16()))
        return step if is_finite else simd.NAN

    return to_words


run_to_words = make_rounding(simd.load_f32x16, 4)


@kernel
def quantize_words(a, part, parts, thread):
    columns, tokens = load_argument(a, QUANTIZE_WORDS.columns), simd.load_i64(load_argument(a, QUANTIZE_WORDS.count))
    stride, y_stride = load_argument(a, QUANTIZE_WORDS.stride), load_argument(a, QUANTIZE_WORDS.y_stride)
    for token in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = (
            load_argument(a, QUANTIZE_WORDS.x) + token * stride,
            load_argument(a, QUANTIZE_WORDS.y) + token * y_stride,
        )
        for i in range(0, columns, 32):
            simd.store_f32(
                y + round_to_runs(columns) * 2 + i // 8, run_to_words(x + i * 4, min(32, columns - i), y + i * 2)
            )


def make_unpack_tile(load_16):
    row_to_words = make_rounding(load_16, 2)

    @device
    def unpack_tile(a, row, column, columns, scratch):
        scales, last = scratch + tiles.VECTORS * WORDS_BYTES, load_argument(a, LINEAR.rows) - 1
        as_rows, row_bytes = scales + tiles.ROWS * 4, round_to_runs(columns) * 2
        for v in range(tiles.VECTORS):
            for i in range(16):
                number = min(row + v * 16 + i, last)
                w = load_argument(a, LINEAR.weights) + number * load_argument(a, LINEAR.row_bytes) + column * 2
                simd.store_f32(scales + (v * 16 + i) * 4, row_to_words(w, columns, as_rows + i * row_bytes))
            tiles.transpose_words(as_rows, row_bytes // 4, scratch + v * WORDS_BYTES)

    return unpack_tile


@device
def multiply_slab(columns, w, x, c, stride):
    """Multiply ROWS rows by TOKENS tokens over a slab's columns, without the rows' scales."""
    totals = tiles.zero_floats()
    for run in range((columns + 31) // 32):
        sums = dots(tiles.zero_ints(), w + run * 1024, WORDS_BYTES, x + run * 64, stride)
        totals = add_run(totals, sums, c + run * 4, stride)
    return totals


def make_prefill_words(load_16):
    """Build a function (arguments, first tile, last tile + 1, token, end, scratch).

    It multiplies tiles by the tokens up to `end`.
    """
    unpack_tile, fetch_next = make_unpack_tile(load_16), tiles.make_fetch_next(512, SLAB)

    @device
    def multiply_tokens(a, first, last, begin, end, scratch):
        rows, columns = load_argument(a, LINEAR.rows), load_argument(a, LINEAR.columns)
        stride, y_stride = load_argument(a, LINEAR.halves_stride), load_argument(a, LINEAR.y_stride)
        for row in range(first * tiles.ROWS, last * tiles.ROWS, tiles.ROWS):
            whole = rows - row > tiles.ROWS - 16
            for column in range(0, columns, SLAB):
                width = min(SLAB, columns - column)
                unpack_tile(a, row, column, width, scratch)
                following = (
                    (row // tiles.ROWS, column + SLAB) if column + SLAB < columns else (row // tiles.ROWS + 1, 0)
                )
                for t in range(
                    begin, end, tiles.TOKENS
                ):  # includes up to TOKENS - 1 surplus tokens, whose results are not used
                    y, x = (
                        load_argument(a, LINEAR.y) + t * y_stride + row * 4,
                        load_argument(a, LINEAR.halves) + t * stride,
                    )
                    scales = x + round_to_runs(columns) * 2
                    tile = tiles.zero_floats()
                    if column:
                        tile = tiles.load_all(y, y_stride) if whole else tiles.load_first(y, y_stride)
                    fetch_next(a, following, t - begin, end - begin)
                    products = multiply_slab(width, scratch, x + column * 2, scales + column // 8, stride)
                    tile = times_rows(tile, products, scratch + tiles.VECTORS * WORDS_BYTES, 64)
                    if whole:
                        tiles.store_all(tile, y, y_stride)
                    else:
                        tiles.store_first(tile, y, y_stride)

    @device
    def prefill(a, first, last, token, end, scratch):
        tokens = end - token
        batches = (tokens + MAX_SLAB_TOKENS - 1) // MAX_SLAB_TOKENS
        size = (tokens + batches * tiles.TOKENS - 1) // (batches * tiles.TOKENS) * tiles.TOKENS
        for begin in range(token, end, size):
            multiply_tokens(a, first, last, begin, min(begin + size, end), scratch)

    return prefill
