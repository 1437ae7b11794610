"""Selection of the keys that a token sees (lightning indexer of DeepSeek-V3.2, 2025).

A token that has at most as many key blocks as are selected sees all of them, without scores. Otherwise its scores are
computed in float32, and the smallest selected score is found digit by digit, 8 bits each, by counting (radix select).

Scratch memory: a token's queries and one key, padded to 16 values; a count for each value of a digit, int64 [256];
scores, float32, with blocks for each head [heads][blocks].

The selection of key blocks for each head by their best keys is that of MiniMax M3, 2026.
"""

from numba import float32

from localllm.kernels import simd
from localllm.kernels.cpu.attention.cache import STORAGE
from localllm.kernels.cpu.attention.products import fill, pad_to_16
from localllm.kernels.cpu.signature import device, kernel, load_argument
from localllm.kernels.table import PAGE, SELECT_KEY_BLOCKS, SELECT_KEYS, SEQUENCE

DIGITS = 256
ONES, SIGN = 0xFFFFFFFF, 0x80000000


@device
def load_ordered(address):
    """Load a float32 as a 32-bit integer that sorts in the same order."""
    word = simd.load_u32(address)
    return word ^ (ONES if word >= SIGN else SIGN)


@device
def find_least_selected(scores, count, most, digits):
    """Return the smallest of the `most` largest scores, `ordered`, and how many of them equal it."""
    prefix, left = 0, most
    for shift in range(24, -8, -8):
        for digit in range(DIGITS):
            simd.store_i64(digits + digit * 8, 0)
        for i in range(count):
            number = load_ordered(scores + i * 4)
            if number >> shift >> 8 == prefix:
                place = digits + (number >> shift & 255) * 8
                simd.store_i64(place, simd.load_i64(place) + 1)
        digit = DIGITS - 1
        while left > simd.load_i64(digits + digit * 8):
            left -= simd.load_i64(digits + digit * 8)
            digit -= 1
        prefix = prefix << 8 | digit
    return prefix, left


@device
def write_bits(scores, blocks, block, count, least, left, y):
    """Write a bit for each of `count` keys: set if its block is selected, or after the last block.

    A block is selected if its score is larger than `least`. Of the blocks whose score equals `least`, the first `left`
    are selected, too.
    """
    is_selected = True
    for first in range(0, count, 32):
        word = 0
        for i in range(first, min(first + 32, count)):
            if i % block == 0:
                number = load_ordered(scores + i // block * 4) if i // block < blocks else ONES
                is_selected = i // block >= blocks or number > least or (number == least and left > 0)
                left -= 1 if number == least else 0
            word |= 1 << (i - first) if is_selected else 0
        simd.store_i32(y + first // 8, word)


@device
def write_all(count, word, y):
    for first in range(0, count, 32):
        simd.store_i32(y + first // 8, word)


@device
def load_queries(source, heads, key_dim, columns, q):
    """Copy a token's heads, each padded with zeros to `columns` values."""
    fill(q, heads * columns, float32(0.0))
    for head in range(heads):
        for d in range(key_dim):
            simd.store_f32(q + (head * columns + d) * 4, simd.load_f32(source + (head * key_dim + d) * 4))


def make_select_keys(format_name):
    load_key, _ = STORAGE[format_name]

    @device
    def score(a, q, key, row, weights, columns):
        """Compute the score of a key: the sum over heads of weight * max(q k, 0)."""
        for d in range(0, columns, 16):
            simd.store_f32x16(row + d * 4, load_key(key, d))
        total = float32(0.0)
        for head in range(load_argument(a, SELECT_KEYS.heads)):
            products, x = simd.zero_f32x16(), q + head * columns * 4
            for d in range(0, columns * 4, 64):
                products = simd.fma_f32x16(simd.load_f32x16(x + d), simd.load_f32x16(row + d), products)
            product = simd.sum_f32x16(products)
            positive = float32(0.0) if product < 0 else product  # NaN stays
            total += simd.load_f32(weights + head * 4) * positive
        return total

    @device
    def score_all(a, table, q, weights, columns, blocks, scores):
        """Compute the scores of the first `blocks` blocks; return whether all of them are finite."""
        row, finite = q + load_argument(a, SELECT_KEYS.heads) * columns * 4, True
        key_bytes, block = load_argument(a, SELECT_KEYS.key_bytes), load_argument(a, SELECT_KEYS.block)
        for i in range(blocks):
            key = i * block + block - 1
            place = simd.load_i64(table + key // PAGE * 8) * PAGE + key % PAGE
            x = score(a, q, load_argument(a, SELECT_KEYS.keys) + place * key_bytes, row, weights, columns)
            finite = finite and abs(x) < simd.INFINITY
            simd.store_f32(scores + i * 4, x)
        return finite

    @kernel
    def select_keys(a, part, parts, thread):
        tokens, columns = (
            simd.load_i64(load_argument(a, SELECT_KEYS.count)),
            pad_to_16(load_argument(a, SELECT_KEYS.key_dim)),
        )
        q = load_argument(a, SELECT_KEYS.scratch) + thread * load_argument(a, SELECT_KEYS.scratch_bytes)
        digits = q + (load_argument(a, SELECT_KEYS.heads) + 1) * columns * 4
        scores = digits + 8 * DIGITS
        for token in range(tokens * part // parts, tokens * (part + 1) // parts):
            count = simd.load_i64(load_argument(a, SELECT_KEYS.positions) + token * 8) + 1
            y = load_argument(a, SELECT_KEYS.y) + token * load_argument(a, SELECT_KEYS.y_stride)
            blocks = count // load_argument(a, SELECT_KEYS.block)
            if blocks <= load_argument(a, SELECT_KEYS.most):
                write_all(count, ONES, y)
                continue
            source = load_argument(a, SELECT_KEYS.q) + token * load_argument(a, SELECT_KEYS.q_stride)
            load_queries(source, load_argument(a, SELECT_KEYS.heads), load_argument(a, SELECT_KEYS.key_dim), columns, q)
            owner = simd.load_i64(load_argument(a, SELECT_KEYS.owners) + token * 8)
            table = load_argument(load_argument(a, SELECT_KEYS.sequences) + owner * 8 * len(SEQUENCE), SEQUENCE.table)
            weights = load_argument(a, SELECT_KEYS.weights) + token * load_argument(a, SELECT_KEYS.weights_stride)
            if score_all(a, table, q, weights, columns, blocks, scores):
                least, left = find_least_selected(scores, blocks, load_argument(a, SELECT_KEYS.most), digits)
                write_bits(scores, blocks, load_argument(a, SELECT_KEYS.block), count, least, left, y)
            else:
                write_all(count, 0, y)

    return select_keys


@device
def multiply_row(q, row, columns):
    products = simd.zero_f32x16()
    for d in range(0, columns * 4, 64):
        products = simd.fma_f32x16(simd.load_f32x16(q + d), simd.load_f32x16(row + d), products)
    return simd.sum_f32x16(products)


def make_score_all(load_key):
    @device
    def score_all(a, table, q, columns, count, scores):
        """Store each head's largest product of each block's keys; return whether all products are finite."""
        heads, block, finite = (
            load_argument(a, SELECT_KEY_BLOCKS.heads),
            load_argument(a, SELECT_KEY_BLOCKS.block),
            True,
        )
        row, blocks = q + heads * columns * 4, (count + block - 1) // block
        key_bytes = load_argument(a, SELECT_KEY_BLOCKS.key_bytes)
        for i in range(heads * blocks):
            simd.store_f32(scores + i * 4, -simd.INFINITY)
        for key in range(count):
            place = simd.load_i64(table + key // PAGE * 8) * PAGE + key % PAGE
            for d in range(0, columns, 16):
                simd.store_f32x16(
                    row + d * 4, load_key(load_argument(a, SELECT_KEY_BLOCKS.keys) + place * key_bytes, d)
                )
            for head in range(heads):
                x, best = (
                    multiply_row(q + head * columns * 4, row, columns),
                    scores + (head * blocks + key // block) * 4,
                )
                finite = finite and abs(x) < simd.INFINITY
                if x > simd.load_f32(best):
                    simd.store_f32(best, x)
        return finite

    return score_all


def make_choose_some(score_all):
    @device
    def choose_some(a, token, count, q, columns, table, y):
        """Write, for each head, the bits of the keys of a token that does not see all blocks."""
        heads, block = load_argument(a, SELECT_KEY_BLOCKS.heads), load_argument(a, SELECT_KEY_BLOCKS.block)
        most = load_argument(a, SELECT_KEY_BLOCKS.most)
        source = load_argument(a, SELECT_KEY_BLOCKS.q) + token * load_argument(a, SELECT_KEY_BLOCKS.q_stride)
        load_queries(source, heads, load_argument(a, SELECT_KEY_BLOCKS.key_dim), columns, q)
        digits, blocks = q + (heads + 1) * columns * 4, (count + block - 1) // block
        finite = score_all(a, table, q, columns, count, digits + 8 * DIGITS)
        for head in range(heads):
            scores = digits + 8 * DIGITS + head * blocks * 4
            bits = y + head * load_argument(a, SELECT_KEY_BLOCKS.choice_stride)
            if not finite:
                write_all(count, 0, bits)
                continue
            for i in range(max(blocks - load_argument(a, SELECT_KEY_BLOCKS.local), 0), blocks):
                simd.store_f32(scores + i * 4, simd.INFINITY)
            least, left = find_least_selected(scores, blocks, most, digits)
            write_bits(scores, blocks, block, count, least, left, bits)

    return choose_some


def make_select_key_blocks(format_name):
    choose_some = make_choose_some(make_score_all(STORAGE[format_name][0]))

    @kernel
    def select_key_blocks(a, part, parts, thread):
        tokens = simd.load_i64(load_argument(a, SELECT_KEY_BLOCKS.count))
        columns = pad_to_16(load_argument(a, SELECT_KEY_BLOCKS.key_dim))
        q = load_argument(a, SELECT_KEY_BLOCKS.scratch) + thread * load_argument(a, SELECT_KEY_BLOCKS.scratch_bytes)
        for token in range(tokens * part // parts, tokens * (part + 1) // parts):
            count = simd.load_i64(load_argument(a, SELECT_KEY_BLOCKS.positions) + token * 8) + 1
            y = load_argument(a, SELECT_KEY_BLOCKS.y) + token * load_argument(a, SELECT_KEY_BLOCKS.y_stride)
            if count <= load_argument(a, SELECT_KEY_BLOCKS.most) * load_argument(a, SELECT_KEY_BLOCKS.block):
                for head in range(load_argument(a, SELECT_KEY_BLOCKS.heads)):
                    write_all(count, ONES, y + head * load_argument(a, SELECT_KEY_BLOCKS.choice_stride))
                continue
            owner = simd.load_i64(load_argument(a, SELECT_KEY_BLOCKS.owners) + token * 8)
            table = load_argument(
                load_argument(a, SELECT_KEY_BLOCKS.sequences) + owner * 8 * len(SEQUENCE), SEQUENCE.table
            )
            choose_some(a, token, count, q, columns, table, y)

    return select_key_blocks
