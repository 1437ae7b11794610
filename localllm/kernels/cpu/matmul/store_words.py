"""Activations as 16-bit words, in the order in which gemv_int16.py multiplies them.

Both planes become words, 256 * high + low. Where blocks have 256 weights, so do the words: a run's words are multiplied
by its scale relative to the block's largest and rounded again, so that products of a block need one scale of each token
and not eight. That costs 0.8 times 2^-16 of the largest activation of the block, and spares four tokens a fifth of
their time.
"""

from llvmlite import ir
from numba import types

from localllm.kernels.arguments import LINEAR_QUANTIZED as LINEAR
from localllm.kernels.cpu import WORD_BLOCK_BYTES
from localllm.kernels.cpu.signature import argument, device, inlined
from localllm.kernels.formats.words import READERS, WORDS
from localllm.kernels.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    f32x8,
    f32x16,
    llvm_call,
    load_value,
    multiply_pairs,
    operation,
    reduce_add,
    shuffled,
    slice_of,
    store_value,
)
from localllm.kernels.simd.half import constant_like

int64 = types.int64
RUN = 64  # bytes of 32 activations
BLOCK_SCALE = 8 * RUN  # where a block's scale stands, 8 times
BLOCK_SUMS = BLOCK_SCALE + 32  # and 16 sums, of 16 columns, or of 32 twice
NUMBERS = ir.VectorType(I32, 8)


def words_of_run(builder, high, low, distance):
    """Return the first 16 activations of a run and the last, whose stripes of 8 are `distance` bytes apart."""
    stripes = []
    for i in range(4):
        places = (builder.add(at, builder.mul(distance, I64(i))) for at in (high, low))
        planes = (load_value(builder, place, ir.VectorType(I8, 8)) for place in places)
        upper, lower = (builder.sext(plane, ir.VectorType(I16, 8)) for plane in planes)
        stripes.append(builder.add(builder.shl(upper, constant_like(upper, 8)), lower))
    return [shuffled(builder, *stripes[i : i + 2], range(16)) for i in (0, 2)]


def store_unit(builder, runs, words):
    """Store a run, even activations and odd ones, or two runs side by side."""
    parts = runs if len(runs) == 1 else zip(*runs, strict=True)
    stored = [shuffled(builder, *part, range(odd, 32, 2)) for part in parts for odd in (0, 1)]
    for i, value in enumerate(stored):
        store_value(builder, builder.add(words, I64(32 * i)), value)


def make_store_runs(in_pairs):
    """Return an intrinsic (high, low, bytes between stripes, words) that stores a unit of a chunk or of 8 runs."""

    @operation(None, *[int64] * 4)
    def store(builder, high, low, distance, words):
        runs = [words_of_run(builder, high, low, distance)]
        if in_pairs:
            apart = builder.lshr(distance, I64(1))
            runs.append(words_of_run(builder, builder.add(high, apart), builder.add(low, apart), distance))
        store_unit(builder, runs, words)

    return store


def as_lanes(builder, scalar):
    """Return a float in each of 8 lanes."""
    value = builder.insert_element(ir.Constant(f32x8.llvm, ir.Undefined), scalar, I32(0))
    return shuffled(builder, value, value, [0] * 8)


def block_scale(builder, scales):
    """Return the largest of 8 scales, no number if one of them is none, and each relative to it, or 0."""
    zero, largest = F32(0.0), llvm_call(builder, "llvm.vector.reduce.fmax.v8f32", F32, [scales])
    largest = builder.fadd(largest, builder.fmul(reduce_add(builder, scales), zero))
    is_some = builder.fcmp_ordered(">", largest, zero)
    inverse = builder.select(is_some, builder.fdiv(F32(1.0), builder.select(is_some, largest, F32(1.0))), zero)
    return largest, builder.fmul(scales, as_lanes(builder, inverse))


def rescaled(builder, words, ratio):
    """Return 16 words times a number from 0 to 1, rounded to the nearest."""
    halves = []
    for i in (0, 8):
        numbers = builder.fmul(builder.sitofp(slice_of(builder, words, i, i + 8), f32x8.llvm), ratio)
        rounded = llvm_call(builder, "llvm.x86.avx.cvt.ps2dq.256", NUMBERS, [numbers])
        halves.append(builder.trunc(rounded, ir.VectorType(I16, 8)))
    return shuffled(builder, *halves, range(16))


def make_store_block(format):
    """Return an intrinsic (high, low, scales, words) that stores 256 activations with one scale, and their sums."""
    in_pairs, is_halved = READERS[format.name].in_pairs, format.sub_block == 16

    def sums_of(builder, run):
        ones = ir.Constant(WORDS, [1] * 16)
        halves = [
            llvm_call(builder, "llvm.vector.reduce.add.v8i32", I32, [multiply_pairs(builder, half, ones)])
            for half in run
        ]
        return halves if is_halved else [builder.add(*halves)] * 2

    @operation(None, *[int64] * 4)
    def store_block(builder, high, low, scales, words):
        every = load_value(builder, scales, f32x16.llvm)  # twice each
        largest, ratios = block_scale(builder, slice_of(builder, every, 0, 16, 2))
        runs = []
        for run in range(8):
            planes = (builder.add(plane, I64(8 * run)) for plane in (high, low))
            ratio = shuffled(builder, ratios, ratios, [run] * 8)
            runs.append([rescaled(builder, half, ratio) for half in words_of_run(builder, *planes, I64(64))])
        units = [*zip(runs[:4], runs[4:], strict=True)] if in_pairs else [[run] for run in runs]
        for unit, parts in enumerate(units):
            store_unit(builder, parts, builder.add(words, I64(RUN * len(parts) * unit)))
        store_value(builder, builder.add(words, I64(BLOCK_SCALE)), as_lanes(builder, largest))
        for i, total in enumerate(total for run in runs for total in sums_of(builder, run)):
            scaled = builder.fmul(builder.sitofp(total, F32), largest)
            store_value(builder, builder.add(words, I64(BLOCK_SUMS + 4 * i)), scaled)

    return store_block


def token_bytes(format):
    """Return a function (columns) -> the bytes of a token's words."""
    if format.chunk:
        return inlined(lambda columns: 2 * columns)
    return inlined(lambda columns: columns // 256 * WORD_BLOCK_BYTES)


def make_store_words(format):
    """Make a function (arguments, words, tokens) that stores all activations, unit by unit."""
    store = make_store_in_chunks(format) if format.chunk else make_store_in_blocks(format)
    words_bytes = token_bytes(format)

    @device
    def store_words(a, words, tokens):
        columns = argument(a, LINEAR.columns)
        for token in range(tokens):
            high, low = argument(a, LINEAR.high) + token * columns, argument(a, LINEAR.low) + token * columns
            store(high, low, argument(a, LINEAR.scales) + token * (columns // 4), columns, words)
            words += words_bytes(columns)

    return store_words


def make_store_in_blocks(format):
    """Make a function (high, low, scales, columns, words) for a token, whose columns are a multiple of 256."""
    store_block = make_store_block(format)

    @inlined
    def store(high, low, scales, columns, words):
        for block in range(columns // 256):
            store_block(high + 256 * block, low + 256 * block, scales + 64 * block, words + WORD_BLOCK_BYTES * block)

    return store


def make_store_in_chunks(format):
    """Make the same function for any multiple of 64 columns: their scales stay as they are."""
    in_pairs = READERS[format.name].in_pairs
    store_runs, runs_at_once = make_store_runs(in_pairs), 2 if in_pairs else 1

    @inlined
    def store_units(high, low, runs, words):
        for unit in range(runs // runs_at_once):
            store_runs(high + 8 * unit, low + 8 * unit, 8 * runs, words + RUN * runs_at_once * unit)

    @inlined
    def store(high, low, scales, columns, words):
        whole = columns // 256 * 256
        for column in range(0, whole, 256):
            store_units(high + column, low + column, 8, words + 2 * column)
        for column in range(whole, columns, 64):
            store_units(high + column, low + column, 2, words + 2 * column)

    return store
