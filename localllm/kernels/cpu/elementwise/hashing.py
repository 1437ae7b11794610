"""Hash tokens and their predecessors to rows of a table."""

from numba import float32

from localllm.kernels.arguments import AS_COLUMN, HASH
from localllm.kernels.cpu.signature import argument, kernel
from localllm.kernels.simd import load_f32, load_i64, store_f32, store_i64


@kernel
def as_column(a, part, parts, thread):
    """Compute y[t] = ids[t] + 1."""
    ids, tokens = argument(a, AS_COLUMN.ids), load_i64(argument(a, AS_COLUMN.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        store_f32(argument(a, AS_COLUMN.y) + t * argument(a, AS_COLUMN.stride), float32(load_i64(ids + t * 8) + 1))


@kernel
def hash(a, part, parts, thread):
    """Compute y[t] = first + (the exclusive or of the ids, each times its factor) modulo size."""
    end, factors, tokens = argument(a, HASH.end), argument(a, HASH.factors), load_i64(argument(a, HASH.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        row, mixed, is_cut = argument(a, HASH.x) + t * argument(a, HASH.stride), 0, False
        for i in range(argument(a, HASH.length)):
            token = int(load_f32(row + i * 4)) - 1
            is_cut = is_cut or (i > 0 and (token < 0 or token == end))
            mixed ^= (end if is_cut else token) * load_i64(factors + i * 8)
        store_i64(argument(a, HASH.y) + t * 8, mixed % argument(a, HASH.size) + argument(a, HASH.first))
