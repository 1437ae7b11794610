"""Unpack weights to slabs of BF16 tiles, and pack activations as right operands.

Activations are packed once for all matrices that multiply them. A slab is 32 rows of up to TILE_SLAB columns,
multiplied by their scales; each tile is contiguous, and each of its rows is one cache line:

    [2 times 16 rows][plane, high and low][32 columns][16 rows][32]

A group of weights has four vectors of codes, each with 8 weights ("an octet") of each of its 8 runs of 32. Two runs are
processed together: 16 codes of each vector become 16 floats. These 64 values, in BF16, are a row in each of two tiles.

A panel is 16 tokens. The activations for a slab's columns are contiguous:

    [columns / TILE_SLAB][panel][plane, high and low][32 columns][16 pairs of columns][16 tokens][2]

Missing tokens are copies of the last one, missing columns are zero. With experts, the rows of an expert may begin at
any row: the i-th expert that has rows begins at panel i + first row // 16, which leaves each expert enough panels.
"""

from llvmlite import ir
from numba import int64, types

from localllm.kernels import simd
from localllm.kernels.cpu import PANEL_BYTES, PANEL_TOKENS, PRECISE_TOKENS, TILE_SLAB
from localllm.kernels.cpu.amx.tiles import TILE, compute_rounding_errors, narrow_pair, store_high, store_planes
from localllm.kernels.cpu.matmul.matmul_float import PLAIN, make_blocks, make_plain
from localllm.kernels.cpu.signature import device, kernel, load_argument
from localllm.kernels.formats import load_group_format
from localllm.kernels.table import EXPERT, PACK, UNPACK
from localllm.quant.formats import BY_NAME

ROWS = 32
PLANE_BYTES = TILE_SLAB // 32 * TILE
HALF_BYTES = 2 * PLANE_BYTES  # bytes of 16 rows
SLAB_BYTES = 2 * HALF_BYTES


@device
def load_two(row, k, columns):
    """Load elements k to k + 31 of a float32 row as two f32x16, with zeros after its end."""
    if k + 32 <= columns:
        return simd.load_f32x16(row + k * 4), simd.load_f32x16(row + k * 4 + 64)
    return simd.load_lanes_f32x16(row + k * 4, columns - k), simd.load_lanes_f32x16(row + k * 4 + 64, columns - k - 16)


def make_unpack_rows(format_name):
    """Build the kernel that unpacks a slab of float weights or, via float32, of blocks of any format."""
    load_row = make_plain(*PLAIN[format_name]) if format_name in PLAIN else make_blocks(format_name)
    block, block_bytes = BY_NAME[format_name].block, BY_NAME[format_name].bytes

    @kernel
    def unpack(a, part, parts, thread):
        columns, exact, row = (
            load_argument(a, UNPACK.columns),
            load_argument(a, UNPACK.exact),
            load_argument(a, UNPACK.row),
        )
        first = load_argument(a, UNPACK.weights) + load_argument(a, UNPACK.column) // block * block_bytes
        for i in range(ROWS):
            load_row(first + min(i, load_argument(a, UNPACK.last)) * load_argument(a, UNPACK.row_bytes), columns, row)
            place = load_argument(a, UNPACK.tiles) + i // 16 * HALF_BYTES + i % 16 * 64
            for k in range(0, columns, 32):
                x, y = load_two(row, k, columns)
                if exact == 1:
                    store_planes(place + k // 32 * TILE, PLANE_BYTES, x, y)
                else:
                    store_high(place + k // 32 * TILE, 0, x, y)

    return unpack


def spread_scales(builder, values, run, octet):
    """Spread the scales of octet `octet` of runs `run` and run + 1 over 16 lanes, 8 weights each."""
    each = values.type.count // 8 if values.type.count > 2 else 1  # scales per run
    return simd.shuffle_lanes(
        builder, values, values, [(run + i) * each + octet * each // 4 for i in (0, 1) for _ in range(8)]
    )


def convert_codes(builder, codes, run, octet):
    vector, first = (codes[octet], 8 * run) if len(codes) == 4 else (codes[0], 16 * octet)
    return builder.uitofp(simd.slice_lanes(builder, vector, first, first + 16), simd.f32x16.llvm)


def store_runs(builder, octets, place, low):
    """Store two runs in BF16, each as a row of a tile; low: store their rounding errors, too.

    octets: four vectors with 8 values of each run.
    """
    pairs = [narrow_pair(builder, *octets[i : i + 2]) for i in (0, 2)]
    parts = [(pairs, place)]
    if low:
        rests = [
            compute_rounding_errors(builder, pair, *octets[i : i + 2]) for i, pair in zip((0, 2), pairs, strict=True)
        ]
        parts.append((rests, builder.add(place, simd.I64(PLANE_BYTES))))
    for (x, y), address in parts:
        x, y = (builder.bitcast(value, ir.VectorType(simd.I64, 8)) for value in (x, y))
        for i in (0, 1):
            row = simd.shuffle_lanes(builder, x, y, [2 * i + half + 4 * part for part in range(4) for half in (0, 1)])
            simd.store_value(builder, builder.add(address, simd.I64(i * TILE)), row)


def make_store(format, vectors, scales_type, low):
    """Return an intrinsic (codes, scales, minimums, place) that stores a group (4 vectors) or a chunk (1).

    A format without minimums gets its scales twice.
    """
    runs = 8 if vectors == 4 else 2

    @simd.operation(None, types.UniTuple(simd.u8x64, vectors), scales_type, scales_type, int64)
    def store(builder, codes, scales, minimums, place):
        codes = simd.elements(builder, codes)
        if format.minimums is None:
            minimums = builder.fmul(scales, simd.constant_like(scales, -float(format.offset)))
        for run in range(0, runs, 2):
            octets = []
            for octet in range(4):
                factors = (spread_scales(builder, values, run, octet) for values in (scales, minimums))
                octets.append(simd.multiply_add(builder, convert_codes(builder, codes, run, octet), *factors))
            store_runs(builder, octets, builder.add(place, simd.I64(run * TILE)), low)

    return store


def make_group(format, low):
    codes, scales, minimums = format.codes, format.scales, format.minimums or format.scales
    store = make_store(format, 4, simd.f32x8 if format.sub_block == 32 else simd.f32x16, low)

    @device
    def group(w, place):
        store(codes(w), scales(w), minimums(w), place)

    return group


def make_chunk(format, low):
    codes, scales = format.chunk.codes, format.chunk.scales
    minimums, store = format.chunk.minimums or scales, make_store(format, 1, simd.f32x2, low)
    return device(lambda w, place: store((codes(w),), scales(w), minimums(w), place))


def make_row(format, low):
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


def make_unpack_groups(format_name):
    format = load_group_format(format_name)
    high, planes, group_bytes = make_row(format, False), make_row(format, True), format.group_bytes

    @kernel
    def unpack(a, part, parts, thread):
        columns, exact = load_argument(a, UNPACK.columns), load_argument(a, UNPACK.exact)
        first = load_argument(a, UNPACK.weights) + load_argument(a, UNPACK.column) // 256 * group_bytes
        for i in range(ROWS):
            w = first + min(i, load_argument(a, UNPACK.last)) * load_argument(a, UNPACK.row_bytes)
            place = load_argument(a, UNPACK.tiles) + i // 16 * HALF_BYTES + i % 16 * 64
            if exact == 1:
                planes(w, columns, place)
            else:
                high(w, columns, place)

    return unpack


EXPERT_BYTES = 8 * len(EXPERT)


@device
def pack_panel(a, first, count, panel, exact, scratch):
    """Pack 16 rows, of which the first `count` exist, as the panel of index `panel`."""
    columns, stride = load_argument(a, PACK.columns), load_argument(a, PACK.stride)
    for k in range(0, columns, 32):
        for i in range(PANEL_TOKENS):
            x, y = load_two(load_argument(a, PACK.x) + (first + min(i, count - 1)) * stride, k, columns)
            if exact:
                store_planes(scratch + i * 64, TILE, x, y)
            else:
                store_high(scratch + i * 64, 0, x, y)
        place = load_argument(a, PACK.panels) + k // TILE_SLAB * load_argument(a, PACK.slab_bytes) + panel * PANEL_BYTES
        place += k % TILE_SLAB // 32 * TILE
        simd.transpose_f32(scratch, 64, place)
        if exact:
            simd.transpose_f32(scratch + TILE, 64, place + PLANE_BYTES)


@device
def pack_rows(a, first, count, panel, part, parts, exact, scratch):
    panels = (count + PANEL_TOKENS - 1) // PANEL_TOKENS
    for i in range(panels * part // parts, panels * (part + 1) // parts):
        at = i * PANEL_TOKENS
        pack_panel(a, first + at, min(count - at, PANEL_TOKENS), panel + i, exact, scratch)


@kernel
def pack(a, part, parts, thread):
    """Pack all tokens, or the rows of all experts; the parts share the panels, or the experts."""
    tokens, active = simd.load_i64(load_argument(a, PACK.count)), load_argument(a, PACK.active)
    scratch = load_argument(a, PACK.scratch) + thread * load_argument(a, PACK.scratch_bytes)
    kernel_tokens = simd.load_i64(load_argument(a, PACK.kernel_tokens))
    exact = kernel_tokens <= simd.load_i64(load_argument(a, PACK.most_exact))
    if active == 0:
        if kernel_tokens >= load_argument(a, PACK.least):
            pack_rows(a, 0, tokens, 0, part, parts, exact, scratch)
        return
    if kernel_tokens <= PRECISE_TOKENS:  # experts read rows then, see matmul/experts.py
        return
    experts = simd.load_i64(load_argument(a, PACK.active_count))
    for i in range(experts * part // parts, experts * (part + 1) // parts):
        expert = active + i * EXPERT_BYTES
        first, count = load_argument(expert, EXPERT.first), load_argument(expert, EXPERT.count)
        if count >= load_argument(a, PACK.least):
            pack_rows(a, first, count, i + first // PANEL_TOKENS, 0, 1, exact, scratch)
