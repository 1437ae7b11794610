"""Recurrences with a matrix state for each head, [key_dim, value_dim], whose rows decay separately.

They work like head_scan.py, but every row of a state has a decay of its own, which depends on the token: linear
attention with such gates (Yang et al. 2023); RWKV-6 (Peng et al. 2024), in which a token's key and value have weights
of their own in its output; and RWKV-7 (Peng et al. 2025), whose state also gets b times its product with another
vector, a. The delta rule of Kimi (2025) is a case of RWKV-7's.
"""

from localllm.kernels.arguments import WKV
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


@device
def gated(source, target, of_token, v, seen, y, read_next):
    """Apply a token to a row of a block; return y plus the query's product with the new row, and read_next."""
    r, w, k, _, _ = of_token
    row = fma_f32x16(load_f32x16(source), splat_at(w), splat_at(k) * v)
    store_f32x16(target, row)
    return fma_f32x16(row, splat_at(r), y), read_next


@device
def first(source, target, of_token, v, seen, y, read_next):
    """Apply a token to a row of a block, but read the row before it changes; the token's own part has a weight."""
    r, w, k, weight, _ = of_token
    old, new = load_f32x16(source), splat_at(k) * v
    store_f32x16(target, fma_f32x16(old, splat_at(w), new))
    return fma_f32x16(fma_f32x16(splat_at(weight), new, old), splat_at(r), y), read_next


@device
def delta(source, target, of_token, v, seen, y, read_next):
    """Apply a token by the generalized delta rule; also add the next a's product with the new row to read_next.

    seen: the product of a with the old state; b * seen is added to the row.
    """
    r, w, k, b, next_a = of_token
    row = fma_f32x16(splat_at(b), seen, fma_f32x16(load_f32x16(source), splat_at(w), splat_at(k) * v))
    store_f32x16(target, row)
    return fma_f32x16(row, splat_at(r), y), fma_f32x16(row, splat_at(next_a), read_next)


@device
def moved(of_token, by):
    """Move the addresses to a later row."""
    r, w, k, b, next_a = of_token
    return r + by, w + by, k + by, b + by, next_a + by


def scan_by(rule):
    """Make a function that processes all tokens of a sequence for a block, by the rule for a row."""

    @device
    def advance(source, target, of_token, v, seen, key_dim):
        """Apply a token to a block of the state; return the query's and the next a's products with the new block."""
        even, odd, even_next, odd_next = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
        for i in range(0, key_dim - 1, 2):
            at = i * 64
            even, even_next = rule(source + at, target + at, moved(of_token, i * 4), v, seen, even, even_next)
            at, rows = at + 64, moved(of_token, i * 4 + 4)
            odd, odd_next = rule(source + at, target + at, rows, v, seen, odd, odd_next)
        if key_dim % 2 == 1:
            at, rows = (key_dim - 1) * 64, moved(of_token, (key_dim - 1) * 4)
            even, even_next = rule(source + at, target + at, rows, v, seen, even, even_next)
        return even + odd, even_next + odd_next

    @device
    def scan(a, start, count, source, target, key, value, lanes):
        """Process all tokens of a sequence, for a block; key, value: the offsets of its numbers in the tokens' rows."""
        key_dim, key_stride = argument(a, WKV.key_dim), argument(a, WKV.key_stride)
        seen = zero_f32x16()
        if rule is delta:
            seen = read(source, argument(a, WKV.a) + start * key_stride + key, key_dim)
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
            y, seen = advance(source, target, (r, w, k, other, next_a), v, seen, key_dim)
            store_lanes_f32x16(argument(a, WKV.y) + at, y, lanes)
            source = target

    return scan


def make(rule):
    """Make the kernel for "gated" sums, for "first" weights, or for the "delta" rule."""
    scan = scan_by({"gated": gated, "first": first, "delta": delta}[rule])

    @kernel
    def wkv(a, part, parts, thread):
        """Scan heads; the parts share the blocks of all heads."""
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
