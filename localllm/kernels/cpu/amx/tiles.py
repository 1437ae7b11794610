"""AMX tile registers and their BF16 products.

There are eight registers of 16 rows of 64 bytes. One instruction multiplies two registers of BF16 values, and adds the
product to a third one, 16 x 16 floats:

    left operand   16 rows of 32 values
    right operand  32 rows of 16 values, stored as [16 pairs of rows][16][2]

Register i + 2 * j (0 to 3) holds the sums of left operand i, in register 4 + i, and right operand j, in register 6 + j.
So every operand that is loaded is used twice. Weights are left operands, with unchanged rows. Tokens are right
operands, packed once for all matrices that multiply them.

A BF16 value has 8 significant bits, so a product of weights and activations has an error of 5.6e-6 (normalized mean
square). Where more precision is needed, values have two planes, the second of which is the rounding error of the first,
and three of the four products of planes are added: an error of 1.4e-11 for three times the work.

Without AMX, the same functions emulate the instructions in `registers`, 8 KB of memory; the emulation keeps subnormal
numbers, which the instructions treat as zero. It is slow, and used for tests only. Source of instructions and numbers:
Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS, LDTILECFG.
"""

from itertools import product

from llvmlite import ir
from numba import int64

from localllm.kernels import simd
from localllm.kernels.cpu.matmul.tiles_f32 import BFloat
from localllm.kernels.cpu.signature import device, inlined
from localllm.kernels.machine import get_lane

HAS_TILES = get_lane().has_tiles
TILE = 1024  # bytes
LEFT, RIGHT = 4, 6  # the first registers of operands


def call_tile(builder, name, *arguments):
    """Emit an instruction on tile registers; arguments: constant register indices, and addresses."""
    simd.llvm_call(builder, f"llvm.x86.{name}", ir.VoidType(), list(arguments))


def pointer(builder, address):
    return builder.inttoptr(address, simd.I8.as_pointer())


@simd.operation(None, int64)
def load_configuration(builder, address):
    if HAS_TILES:
        call_tile(builder, "ldtilecfg", pointer(builder, address))


@device
def configure(registers):
    """Configure all tile registers as 16 rows of 64 bytes.

    The last 64 bytes of `registers` hold the configuration. The caller releases the registers within the same part of a
    step, because the operating system has to save registers in use when a thread waits.
    """
    at = registers + 8 * TILE
    for word in range(8):
        simd.store_i64(at + word * 8, 0)
    simd.store_i64(at, 1)  # the only palette
    for word in range(2):
        simd.store_i64(at + 16 + word * 8, 0x0040004000400040)
    simd.store_i64(at + 48, 0x1010101010101010)
    load_configuration(at)


@simd.operation(None)
def release(builder):
    if HAS_TILES:
        call_tile(builder, "tilerelease")


def make_zero(numbers):
    if HAS_TILES:

        @simd.operation(None, int64)
        def zero(builder, registers):
            for number in numbers:
                call_tile(builder, "tilezero", simd.I8(number))

        return zero

    @device
    def emulated(registers):
        for number in numbers:
            for row in range(16):
                simd.store_f32x16(registers + number * TILE + row * 64, simd.zero_f32x16())

    return emulated


def make_load(numbers):
    """Build a function (registers, address, tile stride, row stride) that loads the tile registers."""
    if HAS_TILES:
        return make_move("tileloadd64", numbers)

    @device
    def emulated(registers, address, apart, stride):
        for number in numbers:
            for row in range(16):
                simd.store_f32x16(registers + number * TILE + row * 64, simd.load_f32x16(address + row * stride))
            address += apart

    return emulated


def make_store(numbers):
    if HAS_TILES:
        return make_move("tilestored64", numbers)

    @device
    def emulated(registers, address, apart, stride):
        for number in numbers:
            for row in range(16):
                simd.store_f32x16(address + row * stride, simd.load_f32x16(registers + number * TILE + row * 64))
            address += apart

    return emulated


def make_move(name, numbers):
    @simd.operation(None, int64, int64, int64, int64)
    def move(builder, registers, address, apart, stride):
        for number in numbers:
            call_tile(builder, name, simd.I8(number), pointer(builder, address), stride)
            address = builder.add(address, apart)

    return move


def make_multiply(left, right):
    """Build a function (registers) that adds the products of 1 or 2 left and right operands to their sums."""
    if HAS_TILES:

        @simd.operation(None, int64)
        def multiply(builder, registers):
            for i, j in product(range(left), range(right)):
                call_tile(builder, "tdpbf16ps", simd.I8(i + 2 * j), simd.I8(LEFT + i), simd.I8(RIGHT + j))

        return multiply

    @device
    def emulated(registers):
        for j in range(right):
            for i in range(left):
                c, x, y = i + 2 * j, LEFT + i, RIGHT + j
                emulate_product(registers + c * TILE, registers + x * TILE, registers + y * TILE)

    return emulated


@simd.operation(simd.f32x16, int64)
def load_first(builder, address):
    return simd.splat_value(
        builder, simd.f32x16.llvm, simd.widen_bf16(builder, simd.load_value(builder, address, simd.I16))
    )


@simd.operation(simd.f32x16, simd.f32x16)
def select_firsts(builder, pairs):
    """Return the first BF16 value of each of 16 pairs, as float32."""
    bits = builder.bitcast(pairs, ir.VectorType(simd.I32, 16))
    return builder.bitcast(builder.shl(bits, simd.constant_like(bits, 16)), simd.f32x16.llvm)


@simd.operation(simd.f32x16, simd.f32x16)
def select_seconds(builder, pairs):
    bits = builder.bitcast(pairs, ir.VectorType(simd.I32, 16))
    return builder.bitcast(builder.and_(bits, simd.constant_like(bits, 0xFFFF0000)), simd.f32x16.llvm)


@device
def emulate_product(c, x, y):
    """Emulate the product of two tiles.

    c f32 [16][16] += x bf16 [16][16 pairs][2] times y bf16 [16 pairs][16][2]. The first and second values of pairs have
    separate sums, which are added in the end.
    """
    for row in range(16):
        even, odd = simd.zero_f32x16(), simd.zero_f32x16()
        for pair in range(16):
            at, right = x + row * 64 + pair * 4, simd.load_f32x16(y + pair * 64)
            even = simd.fma_f32x16(load_first(at), select_firsts(right), even)
            odd = simd.fma_f32x16(load_first(at + 2), select_seconds(right), odd)
        simd.store_f32x16(c + row * 64, simd.load_f32x16(c + row * 64) + (even + odd))


def make_products(left, right, exact):
    """Build a function that adds the products over `steps` times 32 columns to the sums.

    Its parameters, for left operands at x: x_apart bytes from one operand to the next, x_stride from row to row, x_step
    from 32 columns to the next 32, x_low from the high plane to the low one. For right operands at y likewise, but
    their tiles are contiguous. exact: whether both planes are multiplied.
    """
    load_left, load_right = make_load((LEFT, LEFT + 1)[:left]), make_load((RIGHT, RIGHT + 1)[:right])
    multiply = make_multiply(left, right)

    @inlined
    def products(registers, steps, x, x_apart, x_stride, x_step, x_low, y, y_apart, y_step, y_low):
        for _ in range(steps):
            load_left(registers, x, x_apart, x_stride)
            load_right(registers, y, y_apart, 64)
            multiply(registers)
            if exact:
                load_right(registers, y + y_low, y_apart, 64)
                multiply(registers)
                load_left(registers, x + x_low, x_apart, x_stride)
                load_right(registers, y, y_apart, 64)
                multiply(registers)
            x, y = x + x_step, y + y_step

    return products


# ---- rounding

PAIR = ir.VectorType(simd.I16, 32)


def narrow_pair(builder, x, y):
    """Convert the values of x, then those of y, to BF16: i16x32."""
    if "avx512bf16" in get_lane().features:
        name, result = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(BFloat(), 32)
        return builder.bitcast(simd.llvm_call(builder, name, result, [y, x]), PAIR)
    return simd.shuffle_lanes(builder, simd.narrow_bf16(builder, x), simd.narrow_bf16(builder, y), [*range(32)])


def compute_rounding_errors(builder, rounded_pair, x, y):
    halves = (simd.widen_bf16(builder, simd.slice_lanes(builder, rounded_pair, 16 * i, 16 * i + 16)) for i in (0, 1))
    return narrow_pair(builder, *(builder.fsub(value, half) for value, half in zip((x, y), halves, strict=True)))


def make_store_pair(has_low, order):
    """Return an intrinsic (address, bytes to the low plane, x, y) that stores two vectors in BF16.

    has_low: whether the low plane is stored, too; order: the order of the 32 values.
    """

    @simd.operation(None, int64, int64, simd.f32x16, simd.f32x16)
    def store_pair(builder, address, low, x, y):
        high = narrow_pair(builder, x, y)
        simd.store_value(builder, address, simd.shuffle_lanes(builder, high, high, order))
        if has_low:
            rest = compute_rounding_errors(builder, high, x, y)
            simd.store_value(builder, builder.add(address, low), simd.shuffle_lanes(builder, rest, rest, order))

    return store_pair


store_high, store_planes = make_store_pair(False, range(32)), make_store_pair(True, range(32))
store_alternating = make_store_pair(True, [i // 2 + 16 * (i % 2) for i in range(32)])
