"""Hashes a token and its predecessors to a row of an embedding table."""

from numba import float32

from localllm.kernels.cpu.signature import argument, kernel
from localllm.kernels.simd import load_f32, load_i64, store_f32, store_i64
from localllm.kernels.table import AS_COLUMN, HASH


@kernel
def as_column(a, part, parts, thread):
    """Write ids[t] + 1 to y[t] as float32; 0 then stands for "no token"."""
    ids, tokens = argument(a, AS_COLUMN.ids), load_i64(argument(a, AS_COLUMN.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        store_f32(argument(a, AS_COLUMN.y) + t * argument(a, AS_COLUMN.stride), float32(load_i64(ids + t * 8) + 1))


@kernel
def hash(a, part, parts, thread):
    """Write first + (the exclusive or of a token's and its predecessors' ids, each times its factor) % size to y[t].

    From the first predecessor that is missing or `end` on, all count as `end`.
    """
    end, factors, tokens = argument(a, HASH.end), argument(a, HASH.factors), load_i64(argument(a, HASH.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        row, hashed, is_cut = argument(a, HASH.x) + t * argument(a, HASH.stride), 0, False
        for i in range(argument(a, HASH.length)):
            token = int(load_f32(row + i * 4)) - 1
            is_cut = is_cut or (i > 0 and (token < 0 or token == end))
            hashed ^= (end if is_cut else token) * load_i64(factors + i * 8)
        store_i64(argument(a, HASH.y) + t * 8, hashed % argument(a, HASH.size) + argument(a, HASH.first))
