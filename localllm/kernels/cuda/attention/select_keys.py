"""Selection of the keys that a token sees, as in cpu/attention/select_keys.py.

A token has a block of threads. The smallest selected score is found bit by bit, by counting the scores that are at
least as large. Of the scores equal to it, the last selected one is found by its position in the same way.
"""

from numba import cuda, float32, int64

from localllm.kernels.cuda.attention.cache import LOADS
from localllm.kernels.cuda.attention.shared import MINUS_INFINITY, ONE, SEQUENCE_BYTES, ZERO
from localllm.kernels.cuda.gpu import block_sum, device, encode_f32, load_f32, load_i64, store_f32, store_i32
from localllm.kernels.table import PAGE, SEQUENCE

BITS = 32


@device
def to_ordered_int(x):
    """Return a float32 as a 32-bit unsigned integer that sorts in the same order."""
    word = int64(encode_f32(x))
    return (word if word >= 0 else word ^ 0x7FFFFFFF) + 0x80000000


@device
def count_at_least(scores, count, least):
    """Count the scores that are at least `least`, as a float32.

    least: in the order of `ordered`.
    """
    total = ZERO
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        total += ONE if to_ordered_int(load_f32(scores + i * 4)) >= least else ZERO
    return block_sum(total)


@device
def count_equal(scores, count, number):
    """Count the scores, among the first `count`, that equal a given one, as a float32.

    number: that score, in the order of `ordered`.
    """
    total = ZERO
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        total += ONE if to_ordered_int(load_f32(scores + i * 4)) == number else ZERO
    return block_sum(total)


@device
def find_least_selected(scores, count, most):
    """Return the smallest of the `most` largest scores, `ordered`, and the index of the last equal one.

    The index is that of the last one that is among the `most` largest.
    """
    least, last = int64(0), int64(0)
    for bit in range(BITS):
        more = least + (int64(1) << (BITS - 1 - bit))
        if count_at_least(scores, count, more) >= most:
            least = more
    left = most - count_at_least(scores, count, least + 1)
    for bit in range(BITS - 1):
        more = last + (int64(1) << (BITS - 2 - bit))
        if more < count and count_equal(scores, more, least) < left:
            last = more
    return least, last


@device
def fill_bits(count, word, y):
    for i in range(cuda.threadIdx.x, (count + 31) // 32, cuda.blockDim.x):
        store_i32(y + i * 4, word)


@device
def write_bits(scores, blocks, block, count, least, last, y):
    """Write a bit for each of `count` keys.

    It is set if the score of the key's block is larger than `least`, or if the key is after the last block. Blocks
    whose score equals `least` are selected up to index `last`.
    """
    for first in range(32 * cuda.threadIdx.x, count, 32 * cuda.blockDim.x):
        word = int64(0)
        for i in range(first, min(first + 32, count)):
            at = i // block
            number = to_ordered_int(load_f32(scores + min(at, blocks - 1) * 4))
            if at >= blocks or number > least or (number == least and at <= last):
                word |= int64(1) << (i - first)
        store_i32(y + first // 8, word - 0x100000000 if word >= 0x80000000 else word)


def make_select_keys(format_name):
    load = LOADS[format_name]

    @device
    def compute_score(q, key, key_dim, heads, weights):
        """Compute the score of a key: the sum over heads of weight * max(q k, 0)."""
        total = ZERO
        for head in range(heads):
            product = ZERO
            for d in range(0, key_dim, 8):
                numbers = load(key, d)
                for i in range(min(8, key_dim - d)):
                    product += load_f32(q + (head * key_dim + d + i) * 4) * numbers[i]
            total += load_f32(weights + head * 4) * (ZERO if product < ZERO else product)
        return total

    def select_keys(
        count, positions, owners, sequences, q, q_stride, weights, weights_stride, keys, key_bytes, key_dim, heads,
        most, block, y, y_stride, scratch, scratch_bytes,
    ):  # fmt: skip
        scores = scratch + cuda.blockIdx.x * scratch_bytes
        for token in range(cuda.blockIdx.x, load_i64(count), cuda.gridDim.x):
            visible, target = load_i64(positions + token * 8) + 1, y + token * y_stride
            blocks = visible // block
            if blocks <= most:
                fill_bits(visible, -1, target)
                continue
            table = load_i64(sequences + load_i64(owners + token * 8) * SEQUENCE_BYTES + 8 * SEQUENCE.table)
            flaws = ZERO
            for i in range(cuda.threadIdx.x, blocks, cuda.blockDim.x):
                key = i * block + block - 1
                place = load_i64(table + key // PAGE * 8) * PAGE + key % PAGE
                x = compute_score(
                    q + token * q_stride, keys + place * key_bytes, key_dim, heads, weights + token * weights_stride
                )
                flaws += x * ZERO
                store_f32(scores + i * 4, x)
            if block_sum(flaws) != ZERO:  # NaN
                fill_bits(visible, 0, target)
                continue
            least, last = find_least_selected(scores, blocks, most)
            write_bits(scores, blocks, block, visible, least, last, target)
            cuda.syncthreads()

    return select_keys


INFINITY = float32(float("inf"))


def make_select_key_blocks(format_name):
    load = LOADS[format_name]

    @device
    def multiply_key(q, key, key_dim):
        total = ZERO
        for d in range(0, key_dim, 8):
            numbers = load(key, d)
            for i in range(min(8, key_dim - d)):
                total += load_f32(q + (d + i) * 4) * numbers[i]
        return total

    @device
    def score_all(table, q, keys, key_bytes, key_dim, block, count, local, scores):
        """Store the largest product of a head and the keys of each block.

        The scores of the last `local` blocks are infinity. Return 0, or NaN if a product is not finite.
        """
        flaws, blocks = ZERO, (count + block - 1) // block
        for i in range(cuda.threadIdx.x, blocks, cuda.blockDim.x):
            best = MINUS_INFINITY
            for key in range(i * block, min((i + 1) * block, count)):
                place = load_i64(table + key // PAGE * 8) * PAGE + key % PAGE
                x = multiply_key(q, keys + place * key_bytes, key_dim)
                flaws += x * ZERO
                best = max(best, x)
            store_f32(scores + i * 4, INFINITY if i >= blocks - local else best)
        return block_sum(flaws)

    def select_key_blocks(
        count, positions, owners, sequences, q, q_stride, keys, key_bytes, key_dim, heads, most, block, local, y,
        y_stride, choice_stride, scratch, scratch_bytes,
    ):  # fmt: skip
        scores = scratch + cuda.blockIdx.x * scratch_bytes
        for token in range(cuda.blockIdx.x, load_i64(count), cuda.gridDim.x):
            visible = load_i64(positions + token * 8) + 1
            owner = sequences + load_i64(owners + token * 8) * SEQUENCE_BYTES
            table, blocks = load_i64(owner + 8 * SEQUENCE.table), (visible + block - 1) // block
            for head in range(heads):
                target = y + token * y_stride + head * choice_stride
                if blocks <= most:
                    fill_bits(visible, -1, target)
                    continue
                of_head = q + token * q_stride + head * key_dim * 4
                if score_all(table, of_head, keys, key_bytes, key_dim, block, visible, local, scores) != ZERO:  # NaN
                    fill_bits(visible, 0, target)
                else:
                    least, last = find_least_selected(scores, blocks, most)
                    write_bits(scores, blocks, block, visible, least, last, target)
                cuda.syncthreads()

    return select_key_blocks
