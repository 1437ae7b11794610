"""Recurrences whose state is a matrix for each head, [key_dim, value_dim]: keys write to it, queries read from it.

Mamba 2 (Dao and Gu 2024) adds key times value; the gated delta rule (Yang et al. 2024) first subtracts what the key
would read. The columns of a state are independent of each other. 16 of them are a block, [key_dim][16], 8 KB for 128
dimensions, which stays in the L1 cache for all tokens of a run. A token reads and writes a block once, by the delta
rule, too: what the next key will read is summed up in the same pass.

This takes 3 or 4 multiplications for each number of the state and token. The chunked form of the same papers, matrix
products over 64 tokens, takes 2.5 or 4.5, so it would gain nothing on a processor without matrix units.
"""

from localllm.kernels.cpu.recurrent.sequences import SEQUENCE_BYTES, states_of, tokens_of
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import (
    exp_f32x16,
    fma_f32x16,
    load_f32,
    load_f32x16,
    load_i64,
    load_lanes_f32x16,
    splat_f32x16,
    store_f32x16,
    store_lanes_f32x16,
    zero_f32x16,
)
from localllm.kernels.table import HEAD_SCAN


@device
def splat_at(address):
    """Load the float32 at an address into all lanes."""
    return splat_f32x16(load_f32(address))


@device
def read(block, k, key_dim):
    """Multiply a key with a block of the state: f32x16, what the key reads of its 16 columns."""
    even, odd = zero_f32x16(), zero_f32x16()
    for i in range(0, key_dim - 1, 2):
        even = fma_f32x16(load_f32x16(block + i * 64), splat_at(k + i * 4), even)
        odd = fma_f32x16(load_f32x16(block + i * 64 + 64), splat_at(k + i * 4 + 4), odd)
    if key_dim % 2 == 1:
        even = fma_f32x16(load_f32x16(block + (key_dim - 1) * 64), splat_at(k + (key_dim - 1) * 4), even)
    return even + odd


@device
def write(source, target, i, decay, d, k):
    """Update row i of a block, from source to target: row * decay + k[i] * d. Return the new row."""
    row = fma_f32x16(splat_at(k + i * 4), d, load_f32x16(source + i * 64) * decay)
    store_f32x16(target + i * 64, row)
    return row


@device
def advance(source, target, decay, d, k, q, key_dim):
    """Update a block of the state for one token, from `source` to `target`; return the query times the new block."""
    even, odd = zero_f32x16(), zero_f32x16()
    for i in range(0, key_dim - 1, 2):
        even = fma_f32x16(write(source, target, i, decay, d, k), splat_at(q + i * 4), even)
        odd = fma_f32x16(write(source, target, i + 1, decay, d, k), splat_at(q + i * 4 + 4), odd)
    if key_dim % 2 == 1:
        i = key_dim - 1
        even = fma_f32x16(write(source, target, i, decay, d, k), splat_at(q + i * 4), even)
    return even + odd


@device
def advance_and_read(source, target, decay, d, k, q, next_k, key_dim):
    """Update a block of the state for one token, from `source` to `target`.

    Return the products of the query, and of the next token's key, with the new block.
    """
    even, odd, even_next, odd_next = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    for i in range(0, key_dim - 1, 2):
        row, other = write(source, target, i, decay, d, k), write(source, target, i + 1, decay, d, k)
        even, odd = fma_f32x16(row, splat_at(q + i * 4), even), fma_f32x16(other, splat_at(q + i * 4 + 4), odd)
        even_next = fma_f32x16(row, splat_at(next_k + i * 4), even_next)
        odd_next = fma_f32x16(other, splat_at(next_k + i * 4 + 4), odd_next)
    if key_dim % 2 == 1:
        i = key_dim - 1
        row = write(source, target, i, decay, d, k)
        even, even_next = (
            fma_f32x16(row, splat_at(q + i * 4), even),
            fma_f32x16(row, splat_at(next_k + i * 4), even_next),
        )
    return even + odd, even_next + odd_next


@device
def scan_plain(a, first, count, source, target, head, key, value, lanes):
    """Process all tokens of a sequence for a block, without the delta rule.

    key, value: offsets in bytes of the head's keys and of the block's values in the tokens' rows; lanes: columns of the
    block that exist.
    """
    key_dim = argument(a, HEAD_SCAN.key_dim)
    rate, skip = splat_at(argument(a, HEAD_SCAN.rates) + head * 4), splat_at(argument(a, HEAD_SCAN.skip) + head * 4)
    for t in range(first, first + count):
        at, of_head = t * argument(a, HEAD_SCAN.stride) + value, t * argument(a, HEAD_SCAN.head_stride) + head * 4
        of_key = t * argument(a, HEAD_SCAN.key_stride) + key
        q, k = argument(a, HEAD_SCAN.q) + of_key, argument(a, HEAD_SCAN.k) + of_key
        v = load_lanes_f32x16(argument(a, HEAD_SCAN.v) + at, lanes)
        decay = exp_f32x16(rate * splat_at(argument(a, HEAD_SCAN.dt) + of_head))
        d = v * splat_at(argument(a, HEAD_SCAN.strength) + of_head)
        y = advance(source, target, decay, d, k, q, key_dim)
        store_lanes_f32x16(argument(a, HEAD_SCAN.y) + at, fma_f32x16(skip, v, y), lanes)
        source = target


@device
def scan_delta(a, first, count, source, target, head, key, value, lanes):
    """Process all tokens of a sequence for a block by the delta rule. Parameters as in scan_plain."""
    key_dim, key_stride = argument(a, HEAD_SCAN.key_dim), argument(a, HEAD_SCAN.key_stride)
    rate = splat_at(argument(a, HEAD_SCAN.rates) + head * 4)
    key_reads = read(source, argument(a, HEAD_SCAN.k) + first * key_stride + key, key_dim)
    for t in range(first, first + count):
        at, of_head = t * argument(a, HEAD_SCAN.stride) + value, t * argument(a, HEAD_SCAN.head_stride) + head * 4
        q, k = argument(a, HEAD_SCAN.q) + t * key_stride + key, argument(a, HEAD_SCAN.k) + t * key_stride + key
        next_k = k + key_stride if t + 1 < first + count else k
        v = load_lanes_f32x16(argument(a, HEAD_SCAN.v) + at, lanes)
        decay = exp_f32x16(rate * splat_at(argument(a, HEAD_SCAN.dt) + of_head))
        d = (v - decay * key_reads) * splat_at(argument(a, HEAD_SCAN.strength) + of_head)
        y, key_reads = advance_and_read(source, target, decay, d, k, q, next_k, key_dim)
        store_lanes_f32x16(argument(a, HEAD_SCAN.y) + at, y, lanes)
        source = target


def make(rule):
    """Make the kernel; rule: "plain" (Mamba 2) or "delta"."""
    scan = {"plain": scan_plain, "delta": scan_delta}[rule]

    @kernel
    def head_scan(a, part, parts, thread):
        """Process all tokens. The parts share the blocks of all heads."""
        key_dim, value_dim = argument(a, HEAD_SCAN.key_dim), argument(a, HEAD_SCAN.value_dim)
        blocks = (value_dim + 15) // 16
        total = argument(a, HEAD_SCAN.heads) * blocks
        for i in range(total * part // parts, total * (part + 1) // parts):
            head, column = i // blocks, i % blocks * 16
            key = head // argument(a, HEAD_SCAN.repeat) % argument(a, HEAD_SCAN.key_heads) * key_dim * 4
            value, lanes = (head * value_dim + column) * 4, min(16, value_dim - column)
            for s in range(load_i64(argument(a, HEAD_SCAN.sequence_count))):
                sequence = argument(a, HEAD_SCAN.sequences) + s * SEQUENCE_BYTES
                first, count = tokens_of(sequence)
                source, target = states_of(sequence, argument(a, HEAD_SCAN.offset) + i * key_dim * 64)
                scan(a, first, count, source, target, head, key, value, lanes)

    return head_scan
