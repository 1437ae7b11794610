"""Kernels that measure the machine's peak memory reads and multiplications, for `localllm bench`.

`stream`, with which decode is compared, reads one contiguous range as four streams side by side, with 64-byte loads;
each stream prefetches its next four cache lines. Two cores of a Zen 4 reach 36.7 GB/s like this, one core 35.0; one
core with one stream and the prefetch distance of the decode kernels 32.4, without prefetch 31.4, NumPy's sum 33.6.

The products, with which prefill is compared, are of bytes, or of BF16 in AMX tiles. No operand is loaded or unpacked,
and no sum is scaled. The sums fill all registers, so that no multiplication waits for the previous one of its sum. On
CPUs without a dot product of bytes (AVX2), pairs of products are added in 16 bits, as in the kernels of prefill.
"""

from llvmlite import ir
from numba import int64, types

from localllm.kernels import simd
from localllm.kernels.cpu import PEAK_BYTES, PEAK_CHAINS
from localllm.kernels.cpu.amx.tiles import configure, make_multiply, make_store, make_zero, release
from localllm.kernels.cpu.signature import device, kernel, load_argument
from localllm.kernels.table import PEAK, STREAM

STREAMS = 4
STEP = 256  # bytes of a stream at a time
UNIT = STREAMS * STEP  # the size of the memory is a multiple of this

nothing = simd.constant(simd.u8x64, 0)


@device
def read_step(at):
    for line in range(0, STEP, 64):
        simd.prefetch(at + STEP + line)
    return (simd.load_u8x64(at) ^ simd.load_u8x64(at + 64)) ^ (simd.load_u8x64(at + 128) ^ simd.load_u8x64(at + 192))


@kernel
def stream(a, part, parts, thread):
    """Read a part of the memory; the stored result keeps the compiler from omitting the loads."""
    units = load_argument(a, STREAM.size) // UNIT
    first, last = units * part // parts, units * (part + 1) // parts
    at, length = load_argument(a, STREAM.memory) + first * UNIT, (last - first) * STEP
    x0 = x1 = x2 = x3 = nothing()
    for _ in range(last - first):
        x0 = x0 ^ read_step(at)
        x1 = x1 ^ read_step(at + length)
        x2 = x2 ^ read_step(at + 2 * length)
        x3 = x3 ^ read_step(at + 3 * length)
        at += STEP
    simd.store_u8x64(load_argument(a, STREAM.results) + part * 64, (x0 ^ x1) ^ (x2 ^ x3))


sums = types.UniTuple(simd.i32x16, PEAK_CHAINS)


def add_words(builder, accumulator, unsigned, signed):
    """Multiply bytes below 128 by signed bytes, and add pairs of products to sums of 16 bits."""
    _, parts, name = simd.select_widest(simd.MULTIPLY_BYTES)
    words = ir.VectorType(simd.I16, 32 // parts)

    def add_part(builder, accumulator, unsigned, signed):
        products = simd.llvm_call(builder, name, words, [unsigned, signed])
        return builder.bitcast(builder.add(builder.bitcast(accumulator, words), products), accumulator.type)

    return simd.map_slices(builder, add_part, parts, [accumulator, unsigned, signed])


@simd.operation(sums, sums, int64, simd.u8x64, simd.u8x64)
def add_to_all(builder, chains, address, unsigned, signed):
    """Add a product to each sum, with the instructions of prefill.

    Where sums have 16 bits, the compiler would compute the products only once, before the loop. To prevent that, each
    sum loads bytes of its own, in every round.
    """
    chains = simd.elements(builder, chains)
    if simd.select_dot() is not simd.dot_bytes:
        return simd.as_tuple(builder, [simd.select_dot(127)(builder, chain, unsigned, signed) for chain in chains])
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
    codes = [simd.load_value(builder, place, simd.u8x64.llvm) for place in compute_addresses(builder, address)]
    return simd.as_tuple(builder, [add_words(builder, *each, signed) for each in zip(chains, codes, strict=True)])


def compute_addresses(builder, address):
    return [builder.add(address, simd.I64(64 * chain)) for chain in range(PEAK_CHAINS)]


@simd.operation(sums, int64)
def load_sums(builder, address):
    return simd.as_tuple(
        builder, [simd.load_value(builder, place, simd.i32x16.llvm) for place in compute_addresses(builder, address)]
    )


@simd.operation(None, sums, int64)
def store_sums(builder, chains, address):
    for chain, place in zip(simd.elements(builder, chains), compute_addresses(builder, address), strict=True):
        simd.store_value(builder, place, chain)


@kernel
def multiply_peak(a, part, parts, thread):
    """Multiply bytes for some rounds. The sums are stored, so that the compiler cannot omit the work."""
    memory = load_argument(a, PEAK.memory) + part * PEAK_BYTES
    unsigned, signed, chains = simd.load_u8x64(memory), simd.load_u8x64(memory + 64), load_sums(memory + 128)
    for _ in range(load_argument(a, PEAK.rounds)):
        chains = add_to_all(chains, memory + 128, unsigned, signed)
    store_sums(chains, memory + 128)


zero_tiles, multiply_all, store_tile = make_zero(range(8)), make_multiply(2, 2), make_store((0,))


@kernel
def multiply_peak_tiles(a, part, parts, thread):
    registers = load_argument(a, PEAK.memory) + part * PEAK_BYTES
    configure(registers)
    zero_tiles(registers)
    for _ in range(load_argument(a, PEAK.rounds)):
        multiply_all(registers)
    store_tile(registers, registers, 1024, 64)
    release()
