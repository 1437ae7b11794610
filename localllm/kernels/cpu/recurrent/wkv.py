"""Recurrences like those of head_scan.py, but with a decay for each row of a head's state, which depends on the token.

Three rules: "gated", linear attention with such gates (Yang et al. 2023); "first", RWKV-6 (Peng et al. 2024), in which
a token's own key and value have extra weights in its output; "delta", RWKV-7 (Peng et al. 2025), whose state also gets
b times its product with another vector, a. The delta rule of Kimi (2025) is a special case of RWKV-7's. The formulas
are at WKV in table.py.
"""

from localllm.kernels.cpu.recurrent.head_scan import read, splat_at
from localllm.kernels.cpu.recurrent.sequences import SEQUENCE_BYTES, states_of, tokens_of
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import (
    fma_f32x16,
    load_f32x16,
    load_i64,
    load_lanes_f32x16,
    store_f32x16,
    store_lanes_f32x16,
    zero_f32x16,
)
from localllm.kernels.table import WKV


@device
def gated(source, target, of_token, v, state_product, y, read_next):
    """Update one row of a block for one token, by the rule "gated".

    of_token: addresses of the token's numbers for this row in r, w, k, and in two more vectors that other rules use.
    Return y plus r times the new row, and read_next unchanged.
    """
    r, w, k, _, _ = of_token
    row = fma_f32x16(load_f32x16(source), splat_at(w), splat_at(k) * v)
    store_f32x16(target, row)
    return fma_f32x16(row, splat_at(r), y), read_next


@device
def first(source, target, of_token, v, state_product, y, read_next):
    """Update one row of a block for one token, by the rule "first": y uses the old row, and k v with an extra weight.

    Parameters and results as in `gated`.
    """
    r, w, k, weight, _ = of_token
    old, new = load_f32x16(source), splat_at(k) * v
    store_f32x16(target, fma_f32x16(old, splat_at(w), new))
    return fma_f32x16(fma_f32x16(splat_at(weight), new, old), splat_at(r), y), read_next


@device
def delta(source, target, of_token, v, state_product, y, read_next):
    """Update one row of a block for one token, by the rule "delta".

    state_product: the product of a with the old state; b times it is added to the row. Return y plus r times the new
    row, and read_next plus the next token's a times the new row.
    """
    r, w, k, b, next_a = of_token
    row = fma_f32x16(splat_at(b), state_product, fma_f32x16(load_f32x16(source), splat_at(w), splat_at(k) * v))
    store_f32x16(target, row)
    return fma_f32x16(row, splat_at(r), y), fma_f32x16(row, splat_at(next_a), read_next)


@device
def moved(of_token, by):
    """Return the addresses `by` bytes further."""
    r, w, k, b, next_a = of_token
    return r + by, w + by, k + by, b + by, next_a + by


def scan_by(rule):
    """Make a function that processes all tokens of a sequence for a block; rule: `gated`, `first` or `delta`."""

    @device
    def advance(source, target, of_token, v, state_product, key_dim):
        """Apply a token to a block of the state, from source to target.

        Return the products of r, and of the next token's a, with the new block.
        """
        even, odd, even_next, odd_next = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
        for i in range(0, key_dim - 1, 2):
            at = i * 64
            even, even_next = rule(source + at, target + at, moved(of_token, i * 4), v, state_product, even, even_next)
            at, rows = at + 64, moved(of_token, i * 4 + 4)
            odd, odd_next = rule(source + at, target + at, rows, v, state_product, odd, odd_next)
        if key_dim % 2 == 1:
            at, rows = (key_dim - 1) * 64, moved(of_token, (key_dim - 1) * 4)
            even, even_next = rule(source + at, target + at, rows, v, state_product, even, even_next)
        return even + odd, even_next + odd_next

    @device
    def scan(a, start, count, source, target, key, value, lanes):
        """Process all tokens of a sequence for a block.

        key, value: offsets in bytes of the head's keys and of the block's values in the tokens' rows; lanes: columns of
        the block that exist.
        """
        key_dim, key_stride = argument(a, WKV.key_dim), argument(a, WKV.key_stride)
        state_product = zero_f32x16()
        if rule is delta:
            state_product = read(source, argument(a, WKV.a) + start * key_stride + key, key_dim)
        for t in range(start, start + count):
            of_key, at = t * key_stride + key, t * argument(a, WKV.stride) + value
            r, w, k = argument(a, WKV.r) + of_key, argument(a, WKV.w) + of_key, argument(a, WKV.k) + of_key
            other, next_a = k, k
            if rule is delta:
                of_next = of_key + key_stride if t + 1 < start + count else of_key
                other, next_a = argument(a, WKV.b) + of_key, argument(a, WKV.a) + of_next
            if rule is first:
                other = argument(a, WKV.first) + key
            v = load_lanes_f32x16(argument(a, WKV.v) + at, lanes)
            y, state_product = advance(source, target, (r, w, k, other, next_a), v, state_product, key_dim)
            store_lanes_f32x16(argument(a, WKV.y) + at, y, lanes)
            source = target

    return scan


def make(rule):
    """Make the kernel; rule: "gated", "first" or "delta"."""
    scan = scan_by({"gated": gated, "first": first, "delta": delta}[rule])

    @kernel
    def wkv(a, part, parts, thread):
        """Process all tokens. The parts share the blocks of all heads."""
        key_dim, value_dim = argument(a, WKV.key_dim), argument(a, WKV.value_dim)
        blocks = (value_dim + 15) // 16
        total = argument(a, WKV.heads) * blocks
        for i in range(total * part // parts, total * (part + 1) // parts):
            head, column = i // blocks, i % blocks * 16
            value, lanes = (head * value_dim + column) * 4, min(16, value_dim - column)
            for s in range(load_i64(argument(a, WKV.sequence_count))):
                sequence = argument(a, WKV.sequences) + s * SEQUENCE_BYTES
                start, count = tokens_of(sequence)
                source, target = states_of(sequence, argument(a, WKV.offset) + i * key_dim * 64)
                scan(a, start, count, source, target, head * key_dim * 4, value, lanes)

    return wkv
