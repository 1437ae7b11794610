"""Unpacks weights of the formats in group_format.py to a slab of BF16 tiles, multiplied with their scales.

A group has four vectors of codes, each with 8 weights ("an octet") of each of its 8 runs of 32. Two runs are processed
together: 16 codes of each vector become 16 floats. These 64 numbers, in BF16, are a row in each of two tiles.
"""

from llvmlite import ir
from numba import types

from localllm.kernels.cpu import TILE_SLAB
from localllm.kernels.cpu.amx.slab import HALF_BYTES, PLANE_BYTES, ROWS
from localllm.kernels.cpu.amx.tiles import TILE, left_over, narrow_pair
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.formats import load_group_format
from localllm.kernels.simd import (
    I64,
    elements,
    f32x2,
    f32x8,
    f32x16,
    multiply_add,
    operation,
    shuffled,
    slice_of,
    store_value,
    u8x64,
)
from localllm.kernels.simd.half import constant_like
from localllm.kernels.table import UNPACK

int64 = types.int64


def spread(builder, values, run, octet):
    """Spread the scales of octet `octet` of runs `run` and run + 1 over 16 lanes, 8 weights each."""
    each = values.type.count // 8 if values.type.count > 2 else 1  # scales per run
    return shuffled(builder, values, values, [(run + i) * each + octet * each // 4 for i in (0, 1) for _ in range(8)])


def sixteen(builder, codes, run, octet):
    """Convert the codes of octet `octet` of runs `run` and run + 1 to 16 floats."""
    vector, first = (codes[octet], 8 * run) if len(codes) == 4 else (codes[0], 16 * octet)
    return builder.uitofp(slice_of(builder, vector, first, first + 16), f32x16.llvm)


def store_runs(builder, octets, place, low):
    """Store two runs in BF16 at `place`, each as a row of a tile.

    low: whether to store their rounding errors in the low plane, too.

    octets: four vectors with 8 numbers of each run.
    """
    pairs = [narrow_pair(builder, *octets[i : i + 2]) for i in (0, 2)]
    parts = [(pairs, place)]
    if low:
        rests = [left_over(builder, pair, *octets[i : i + 2]) for i, pair in zip((0, 2), pairs, strict=True)]
        parts.append((rests, builder.add(place, I64(PLANE_BYTES))))
    for (x, y), address in parts:
        x, y = (builder.bitcast(value, ir.VectorType(I64, 8)) for value in (x, y))
        for i in (0, 1):
            row = shuffled(builder, x, y, [2 * i + half + 4 * part for part in range(4) for half in (0, 1)])
            store_value(builder, builder.add(address, I64(i * TILE)), row)


def make_store(format, vectors, scales_type, low):
    """Return an intrinsic (codes, scales, minimums, place) that stores a group or a chunk as rows of tiles.

    vectors: 4 for a group, 1 for a chunk. A format without minimums gets its scales twice.
    """
    runs = 8 if vectors == 4 else 2

    @operation(None, types.UniTuple(u8x64, vectors), scales_type, scales_type, int64)
    def store(builder, codes, scales, minimums, place):
        codes = elements(builder, codes)
        if format.minimums is None:
            minimums = builder.fmul(scales, constant_like(scales, -float(format.offset)))
        for run in range(0, runs, 2):
            octets = []
            for octet in range(4):
                factors = (spread(builder, values, run, octet) for values in (scales, minimums))
                octets.append(multiply_add(builder, sixteen(builder, codes, run, octet), *factors))
            store_runs(builder, octets, builder.add(place, I64(run * TILE)), low)

    return store


def make_group(format, low):
    """Make a function (address of a group, place) that stores its 256 weights as rows of tiles."""
    codes, scales, minimums = format.codes, format.scales, format.minimums or format.scales
    store = make_store(format, 4, f32x8 if format.sub_block == 32 else f32x16, low)

    @device
    def group(w, place):
        store(codes(w), scales(w), minimums(w), place)

    return group


def make_chunk(format, low):
    """Make a function (address of a chunk, place) that stores its 64 weights as rows of tiles."""
    codes, scales = format.chunk.codes, format.chunk.scales
    minimums, store = format.chunk.minimums or scales, make_store(format, 1, f32x2, low)
    return device(lambda w, place: store((codes(w),), scales(w), minimums(w), place))


def make_row(format, low):
    """Make a function (address, columns, place) that stores a row's columns of a slab."""
    group, has_chunks, chunk_bytes = make_group(format, low), format.chunk is not None, format.group_bytes // 4
    chunk = make_chunk(format, low) if has_chunks else None

    @device
    def row(w, columns, place):
        if columns == TILE_SLAB:
            group(w, place)
        elif has_chunks:
            for i in range(columns // 64):
                chunk(w + i * chunk_bytes, place + i * 2 * TILE)

    return row


def make(format_name):
    """Make the kernel that unpacks a slab of one format."""
    format = load_group_format(format_name)
    high, planes, group_bytes = make_row(format, False), make_row(format, True), format.group_bytes

    @kernel
    def unpack(a, part, parts, thread):
        columns, exact = argument(a, UNPACK.columns), argument(a, UNPACK.exact)
        first = argument(a, UNPACK.weights) + argument(a, UNPACK.column) // 256 * group_bytes
        for i in range(ROWS):
            w = first + min(i, argument(a, UNPACK.last)) * argument(a, UNPACK.row_bytes)
            place = argument(a, UNPACK.tiles) + i // 16 * HALF_BYTES + i % 16 * 64
            if exact == 1:
                planes(w, columns, place)
            else:
                high(w, columns, place)

    return unpack
