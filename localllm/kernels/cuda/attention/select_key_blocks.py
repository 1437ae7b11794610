"""Selection of key blocks for each head, as in cpu/attention/select_key_blocks.py.

A block of threads processes one token.
"""

from numba import cuda, float32

from localllm.kernels.cuda.attention.cache_loads import LOADS
from localllm.kernels.cuda.attention.select_keys import least_chosen, write_all, write_bits
from localllm.kernels.cuda.attention.shared import MINUS_INFINITY, SEQUENCE_BYTES, ZERO
from localllm.kernels.cuda.device import device, load_f32, load_i64, store_f32
from localllm.kernels.cuda.reductions import block_sum
from localllm.kernels.table import PAGE, SEQUENCE

INFINITY = float32(float("inf"))


def make(format_name):
    """Make the kernel for one cache type."""
    load = LOADS[format_name]

    @device
    def product(q, key, key_dim):
        """Compute q k over `key_dim` numbers."""
        total = ZERO
        for d in range(0, key_dim, 8):
            numbers = load(key, d)
            for i in range(min(8, key_dim - d)):
                total += load_f32(q + (d + i) * 4) * numbers[i]
        return total

    @device
    def score_all(table, q, keys, key_bytes, key_dim, block, count, local, scores):
        """Store the largest product of a head with the keys of each key block; infinity for the last `local` blocks.

        Return 0, or NaN if a product is not finite.
        """
        flaws, blocks = ZERO, (count + block - 1) // block
        for i in range(cuda.threadIdx.x, blocks, cuda.blockDim.x):
            best = MINUS_INFINITY
            for key in range(i * block, min((i + 1) * block, count)):
                place = load_i64(table + key // PAGE * 8) * PAGE + key % PAGE
                x = product(q, keys + place * key_bytes, key_dim)
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
                    write_all(visible, -1, target)
                    continue
                of_head = q + token * q_stride + head * key_dim * 4
                if score_all(table, of_head, keys, key_bytes, key_dim, block, visible, local, scores) != ZERO:  # NaN
                    write_all(visible, 0, target)
                else:
                    least, last = least_chosen(scores, blocks, most)
                    write_bits(scores, blocks, block, visible, least, last, target)
                cuda.syncthreads()

    return select_key_blocks
