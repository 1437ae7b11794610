"""y = W x for quantized weights and activations in two planes of int8 (quantize.py).

There are several variants:

- one token, or a few: each row of W is read once, in the file's layout (gemv_quantized.py)
- more tokens (prefill): a tile of rows is unpacked once, to bytes, and multiplied by all tokens in registers
  (tiles.py); arithmetic is the limit

Up to `most_precise` kernel_tokens, both planes of the activations are multiplied, which is practically exact
(gemm_int16.py). Larger batches use the high plane alone, as other programs do, and weights requantized to bytes
(gemm_int8.py). One token always uses both planes. kernel_variants.py selects the variant.

A tile is unpacked slab by slab, at most SLAB columns, which stay in the L1 or L2 cache while they are multiplied by all
tokens. Sums are stored in y from one slab to the next.
"""

from localllm.kernels.cpu import FEW_AT_ONCE, SLAB
from localllm.kernels.cpu.matmul.gemm_int8 import make_fast_slab
from localllm.kernels.cpu.matmul.gemm_int16 import HAS_AVX2_DOTS, MAX_BYTE_CODE, make_assembly_slab, make_precise_slab
from localllm.kernels.cpu.matmul.gemv_few import make_row, make_store_blocks
from localllm.kernels.cpu.matmul.gemv_int16 import (
    has_words,
    make_few_tokens_words,
    make_one_token_words,
    make_store_words,
)
from localllm.kernels.cpu.matmul.gemv_k_sub_blocks import has_sub_blocks, make_one_by_sub_block, make_store_ordered
from localllm.kernels.cpu.matmul.gemv_quantized import make_one
from localllm.kernels.cpu.matmul.kernel_variants import ROWS_TOGETHER, select_variant
from localllm.kernels.cpu.matmul.tiles import ROWS
from localllm.kernels.cpu.signature import device, inlined, kernel, load_argument
from localllm.kernels.formats import load_group_format
from localllm.kernels.simd import call_kernel, load_i64
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR

# If rows are longer than WIDE, TILES tiles take turns slab by slab, so that the tokens' columns of a slab stay in the
# L2 cache for all of them: 512 tokens of 8192 columns came from the L3 cache for every tile, and took 1.08 to 1.12
# times as long. With 2048 columns, taking turns takes 1.01 times as long, because sums are written and read more often.
TILES, WIDE = 4, 2 * SLAB


def make_streams(row, together):
    """Build a function that multiplies rows first to last, `together` at a time.

    It divides the rows between as many streams, which a core reads side by side. row: the function (arguments, w, step,
    y, y_step, scratch, first token, tokens) for one row of each stream; step and y_step are the streams' distance.
    """

    @inlined
    def streams(a, first, last, scratch, token, tokens):
        row_bytes, length = load_argument(a, LINEAR.row_bytes), (last - first) // together
        w, y = load_argument(a, LINEAR.weights) + first * row_bytes, load_argument(a, LINEAR.y) + first * 4
        y += token * load_argument(a, LINEAR.y_stride)
        for r in range(length):
            row(a, w + r * row_bytes, length * row_bytes, y + r * 4, length * 4, scratch, token, tokens)
        for r in range(length * together, last - first):  # one row repeatedly
            row(a, w + r * row_bytes, 0, y + r * 4, 0, scratch, token, tokens)

    return streams


def make_one_token(format):
    """Build a function that multiplies rows first to last by one token, in both planes."""
    if has_words(format.name):
        (prepare, one), together = make_one_token_words(format, 2), 2
    elif has_sub_blocks(format.name):
        prepare, one, together = make_store_ordered(format), make_one_by_sub_block(format), 4
    else:
        prepare, one, together = device(lambda a, scratch: None), make_one(format), 4
    streams = make_streams(one, together)

    @device
    def one_token(a, first, last, tokens, scratch):
        prepare(a, scratch)
        streams(a, first, last, scratch, 0, 1)

    return one_token


def make_few(format, together, planes):
    """Build a function that multiplies rows first to last by a few tokens, in 2 planes or the high one."""
    prepare, row = make_store_blocks(format, planes), make_row(format, together, planes)
    if planes == 2 and has_words(format.name, tokens=2):
        prepare, row = make_store_words(format), make_few_tokens_words(format, together)
    streams = make_streams(row, together)

    @device
    def few(a, first, last, tokens, scratch):
        most = min(load_argument(a, LINEAR.few_tokens), FEW_AT_ONCE)  # tokens that the scratch memory has space for
        times = (tokens + most - 1) // most
        for i in range(times):  # the part's weights come from the L2 cache from the second time on
            token = tokens * i // times
            some = tokens * (i + 1) // times - token
            prepare(a, scratch, token, some)
            streams(a, first, last, scratch, token, some)

    return few


@device
def find_next_slab(tile, group, end, column, columns):
    """Return the tile and first column of the next slab: all tiles from `group` to `end`, then the next columns."""
    if tile + 1 < end:
        return tile + 1, column
    if column + SLAB < columns:
        return group, column + SLAB
    return end, 0


def make_rows(multiply):
    """Build a kernel that divides the rows between parts and multiplies each part's rows.

    multiply: the function (arguments, first row, last row + 1, tokens, scratch) that does so for a range of rows.
    """

    @kernel
    def rows(a, part, parts, thread):
        scratch = load_argument(a, LINEAR.scratch) + thread * load_argument(a, LINEAR.scratch_bytes)
        rows = load_argument(a, LINEAR.rows)
        fours = (rows + 3) // 4
        first, last = fours * part // parts * 4, min(fours * (part + 1) // parts * 4, rows)
        multiply(a, first, last, load_i64(load_argument(a, LINEAR.count)), scratch)

    return rows


def make_tiles(slab):
    @kernel
    def tiles(a, part, parts, thread):
        scratch = load_argument(a, LINEAR.scratch) + thread * load_argument(a, LINEAR.scratch_bytes)
        tokens, columns = load_i64(load_argument(a, LINEAR.count)), load_argument(a, LINEAR.columns)
        tiles = (load_argument(a, LINEAR.rows) + ROWS - 1) // ROWS
        first, last = tiles * part // parts, tiles * (part + 1) // parts
        at_once = TILES if columns > WIDE else 1
        for group in range(first, last, at_once):
            end = min(group + at_once, last)
            for column in range(0, columns, SLAB):
                for tile in range(group, end):
                    slab(a, tile, column, find_next_slab(tile, group, end, column, columns), tokens, scratch)

    return tiles


def make_linear_one(format_name):
    return make_rows(make_one_token(load_group_format(format_name)))


def make_linear_few(format_name):
    return make_rows(make_few(load_group_format(format_name), ROWS_TOGETHER, 2))


def make_linear_few_fast(format_name):
    return make_rows(make_few(load_group_format(format_name), ROWS_TOGETHER, 1))


def make_linear_precise(format_name):
    return make_tiles(make_precise_slab(load_group_format(format_name, small_codes=True)))


def make_linear_fast(format_name):
    """Build the kernel for many tokens.

    With AVX2 only, formats with large codes use both planes, as 16-bit words, because that takes no longer.
    """
    format = load_group_format(format_name, small_codes=True, integer_scales=HAS_AVX2_DOTS)
    if HAS_AVX2_DOTS:
        return make_tiles(make_assembly_slab(format, format.largest > MAX_BYTE_CODE))
    return make_tiles(make_fast_slab(format))


choose = device(select_variant)


@kernel
def linear_quantized(a, part, parts, thread):
    tokens, kernel_tokens = load_i64(load_argument(a, LINEAR.count)), load_i64(load_argument(a, LINEAR.kernel_tokens))
    if tokens > 0:
        few, fast = load_argument(a, LINEAR.few_tokens), load_argument(a, LINEAR.few_fast)
        variant = choose(tokens, kernel_tokens, few, fast, load_i64(load_argument(a, LINEAR.most_precise)))
        call_kernel(load_i64(load_argument(a, LINEAR.variants) + variant * 8), a, part, parts, thread)
