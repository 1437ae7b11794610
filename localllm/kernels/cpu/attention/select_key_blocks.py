"""Selection of key blocks for each head by their best keys (MiniMax M3, 2026).

Scratch memory is as in select_keys.py, with scores f32 [heads][blocks].
"""

from localllm.kernels.cpu.attention.attend import padded
from localllm.kernels.cpu.attention.cache_formats import STORAGE
from localllm.kernels.cpu.attention.select_keys import DIGITS, ONES, least_chosen, load_queries, write_all, write_bits
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import (
    INFINITY,
    fma_f32x16,
    load_f32,
    load_f32x16,
    load_i64,
    store_f32,
    store_f32x16,
    sum_f32x16,
    zero_f32x16,
)
from localllm.kernels.table import PAGE, SELECT_KEY_BLOCKS, SEQUENCE


@device
def product(q, row, columns):
    """Compute q k over `columns` columns, a multiple of 16."""
    products = zero_f32x16()
    for d in range(0, columns * 4, 64):
        products = fma_f32x16(load_f32x16(q + d), load_f32x16(row + d), products)
    return sum_f32x16(products)


def make_score_all(load_key):
    """Make a function that scores the key blocks of a context, for one cache type."""

    @device
    def score_all(a, table, q, columns, count, scores):
        """Store the largest product of each head with each block's keys; return whether all products are finite."""
        heads, block, finite = argument(a, SELECT_KEY_BLOCKS.heads), argument(a, SELECT_KEY_BLOCKS.block), True
        row, blocks, key_bytes = (
            q + heads * columns * 4,
            (count + block - 1) // block,
            argument(a, SELECT_KEY_BLOCKS.key_bytes),
        )
        for i in range(heads * blocks):
            store_f32(scores + i * 4, -INFINITY)
        for key in range(count):
            place = load_i64(table + key // PAGE * 8) * PAGE + key % PAGE
            for d in range(0, columns, 16):
                store_f32x16(row + d * 4, load_key(argument(a, SELECT_KEY_BLOCKS.keys) + place * key_bytes, d))
            for head in range(heads):
                x, best = product(q + head * columns * 4, row, columns), scores + (head * blocks + key // block) * 4
                finite = finite and abs(x) < INFINITY
                if x > load_f32(best):
                    store_f32(best, x)
        return finite

    return score_all


def make_choose_some(score_all):
    """Make a function that chooses key blocks for a token that does not see all of them."""

    @device
    def choose_some(a, token, count, q, columns, table, y):
        """Write the bits of the keys that are chosen for a token, for each head."""
        heads, block, most = (
            argument(a, SELECT_KEY_BLOCKS.heads),
            argument(a, SELECT_KEY_BLOCKS.block),
            argument(a, SELECT_KEY_BLOCKS.most),
        )
        source = argument(a, SELECT_KEY_BLOCKS.q) + token * argument(a, SELECT_KEY_BLOCKS.q_stride)
        load_queries(source, heads, argument(a, SELECT_KEY_BLOCKS.key_dim), columns, q)
        digits, blocks = q + (heads + 1) * columns * 4, (count + block - 1) // block
        finite = score_all(a, table, q, columns, count, digits + 8 * DIGITS)
        for head in range(heads):
            scores, bits = (
                digits + 8 * DIGITS + head * blocks * 4,
                y + head * argument(a, SELECT_KEY_BLOCKS.choice_stride),
            )
            if not finite:
                write_all(count, 0, bits)
                continue
            for i in range(max(blocks - argument(a, SELECT_KEY_BLOCKS.local), 0), blocks):
                store_f32(scores + i * 4, INFINITY)
            least, left = least_chosen(scores, blocks, most, digits)
            write_bits(scores, blocks, block, count, least, left, bits)

    return choose_some


def make(format_name):
    """Make the kernel for one cache type."""
    choose_some = make_choose_some(make_score_all(STORAGE[format_name][0]))

    @kernel
    def select_key_blocks(a, part, parts, thread):
        tokens, columns = load_i64(argument(a, SELECT_KEY_BLOCKS.count)), padded(argument(a, SELECT_KEY_BLOCKS.key_dim))
        q = argument(a, SELECT_KEY_BLOCKS.scratch) + thread * argument(a, SELECT_KEY_BLOCKS.scratch_bytes)
        for token in range(tokens * part // parts, tokens * (part + 1) // parts):
            count = load_i64(argument(a, SELECT_KEY_BLOCKS.positions) + token * 8) + 1
            y = argument(a, SELECT_KEY_BLOCKS.y) + token * argument(a, SELECT_KEY_BLOCKS.y_stride)
            if count <= argument(a, SELECT_KEY_BLOCKS.most) * argument(a, SELECT_KEY_BLOCKS.block):
                for head in range(argument(a, SELECT_KEY_BLOCKS.heads)):
                    write_all(count, ONES, y + head * argument(a, SELECT_KEY_BLOCKS.choice_stride))
                continue
            owner = load_i64(argument(a, SELECT_KEY_BLOCKS.owners) + token * 8)
            table = argument(argument(a, SELECT_KEY_BLOCKS.sequences) + owner * 8 * len(SEQUENCE), SEQUENCE.table)
            choose_some(a, token, count, q, columns, table, y)

    return select_key_blocks
