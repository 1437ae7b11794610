"""The integer products of a register tile, and the order of bytes that they need.

Most CPUs multiply a *word*, 4 columns of each of 16 rows in a vector, with 4 columns of a token in all lanes. An ARM
with i8mm multiplies small matrices: 8 columns of 2 rows with 8 columns of 2 tokens, twice as many products per
register. Their sums, [2 rows][2 tokens] in a register, become vectors of rows when a run of columns is finished.
"""

from llvmlite import ir
from numba import types

from localllm.kernels.cpu.matmul.tiles import TOKENS, VECTORS, addresses, in_turn, ints, transpose_words
from localllm.kernels.cpu.signature import device
from localllm.kernels.machine import this_lane
from localllm.kernels.simd import (
    I8,
    I32,
    I64,
    as_tuple,
    dot_bytes,
    dot_variant,
    elements,
    i32x16,
    llvm_call,
    load_value,
    operation,
    shuffled,
    signed_dot_variant,
    splat_value,
    transpose_quads,
    u8x64,
)

HAS_MATRICES = "i8mm" in this_lane().features
int64, u8x16, i32x4 = types.int64, ir.VectorType(I8, 16), ir.VectorType(I32, 4)


def make_code_dots(words, largest):
    """Make the product for unsigned codes up to `largest`; see make_dots for the result."""
    if HAS_MATRICES:
        return make_matrix_dots(words, "llvm.aarch64.neon.usmmla.v4i32.v16i8")
    dot = dot_variant(largest)

    def dot_below_128(builder, accumulator, codes, columns):
        """Add a dot product. The mask tells LLVM that the bytes are below 128, which saves instructions."""
        return dot_bytes(builder, accumulator, builder.and_(codes, ir.Constant(u8x64.llvm, [0x7F] * 64)), columns)

    return make_dots(words, dot_below_128 if dot is dot_bytes and largest < 128 else dot)


def make_rescaled_dots(words):
    """Make the product for the bytes that requantize_tile.py makes; see make_dots for the result."""
    if HAS_MATRICES:
        return make_matrix_dots(words, "llvm.aarch64.neon.smmla.v4i32.v16i8")
    return make_dots(words, signed_dot_variant() or dot_variant())


def make_dots(words, dot):
    """Return an intrinsic that adds products to a tile's sums.

    Its parameters: sums, w, bytes between vectors of w, x, bytes between tokens of x. words: the offsets in x of the
    words to multiply; w has 64 bytes for each word, [16 rows][4 columns]. dot: emits one product.
    """

    @operation(ints, ints, int64, int64, int64, int64)
    def dots(builder, sums, w, w_stride, x, x_stride):
        sums = elements(builder, sums)
        ws, xs = addresses(builder, w, w_stride, VECTORS), addresses(builder, x, x_stride, TOKENS)
        for word in words:
            weights = [load_value(builder, builder.add(address, I64(16 * word)), u8x64.llvm) for address in ws]
            for t, address in enumerate(xs):
                columns = columns_of(builder, address, word)
                for v, rows in enumerate(weights):
                    i = t * VECTORS + v
                    sums[i] = dot(builder, sums[i], rows, columns)
            sums = in_turn(builder, sums)
        return as_tuple(builder, sums)

    return dots


def columns_of(builder, address, word):
    """Load 4 columns of a token into all lanes.

    An ARM can multiply by a lane of a register, so there two words are loaded at once.
    """
    if "neon" in this_lane().features:
        two = load_value(builder, builder.add(address, I64(word // 8 * 8)), ir.VectorType(I32, 2))
        columns = shuffled(builder, two, two, [word % 8 // 4] * 16)
    else:
        columns = splat_value(builder, i32x16.llvm, load_value(builder, builder.add(address, I64(word)), I32))
    return builder.bitcast(columns, u8x64.llvm)


def make_matrix_dots(words, multiply):
    """Make the intrinsic of make_dots for an ARM with i8mm.

    multiply: LLVM's name of the instruction, which multiplies bytes [2 rows][8] with [2 tokens][8] and adds to int32
    [2][2]. Words come in pairs: w has their 8 columns row by row, 128 bytes.
    """

    @operation(ints, ints, int64, int64, int64, int64)
    def dots(builder, sums, w, w_stride, x, x_stride):
        ws, xs = addresses(builder, w, w_stride, VECTORS), addresses(builder, x, x_stride, TOKENS)
        squares = [[ir.Constant(i32x4, None)] * (8 * VECTORS) for _ in range(TOKENS // 2)]
        for word in words[::2]:
            tokens = [pair_of_tokens(builder, *pair, word) for pair in zip(xs[::2], xs[1::2], strict=True)]
            places = [builder.add(address, I64(16 * word + 16 * p)) for address in ws for p in range(8)]
            for p, place in enumerate(places):
                rows = load_value(builder, place, u8x16)
                for t, columns in enumerate(tokens):
                    squares[t][p] = llvm_call(builder, multiply, i32x4, [squares[t][p], rows, columns])
        products = [rows_of(builder, squares[t // 2][8 * v : 8 * v + 8], t % 2) for t, v in PLACES]
        return as_tuple(builder, [builder.add(*both) for both in zip(elements(builder, sums), products, strict=True)])

    return dots


PLACES = [(t, v) for t in range(TOKENS) for v in range(VECTORS)]


def pair_of_tokens(builder, first, second, word):
    """Load 8 columns of each of two tokens into one vector."""
    pair = ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
    for lane, address in enumerate((first, second)):
        columns = load_value(builder, builder.add(address, I64(word)), I64)
        pair = builder.insert_element(pair, columns, I32(lane))
    return builder.bitcast(pair, u8x16)


def rows_of(builder, squares, token):
    """Return the sums of 16 rows and one of two tokens as i32x16; squares: 8 registers with [2 rows][2 tokens]."""
    order = [token, token + 2, token + 4, token + 6]
    parts = [shuffled(builder, *pair, order) for pair in zip(squares[::2], squares[1::2], strict=True)]
    halves = [shuffled(builder, *pair, range(8)) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return shuffled(builder, *halves, range(16))


@device
def transpose_pairs(source, columns, target):
    """Transpose 4-byte words in pairs: [16 rows][columns] to [columns / 2][16 rows][2]."""
    stride = (columns + 15) // 16 * 64
    for i in range((columns + 15) // 16):
        transpose_quads(source + i * 64, stride, target + i * 1024)


transpose_codes = transpose_pairs if HAS_MATRICES else transpose_words
