"""Moving bytes and bits: shuffles, gathers, transposes, lookups."""

from llvmlite import ir
from numba import types

from localllm.kernels.machine import this_lane
from localllm.kernels.simd.half import constant_like, widen_half
from localllm.kernels.simd.memory import load_value, store_value
from localllm.kernels.simd.vectors import (
    I8,
    I16,
    I32,
    I64,
    SHUFFLE_16_BYTES,
    SHUFFLE_BYTES,
    as_tuple,
    call_in_parts,
    f32x2,
    f32x8,
    f32x16,
    i32x16,
    llvm_call,
    operation,
    shuffled,
    splat_value,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
    widest,
)

WINDOW = ir.VectorType(I16, 32)
MOST_WINDOWS = 3  # to gather from: Q8_0 would have four, and took 1.04 times as long with them


def make_shuffle(result, source, order):
    """Return an intrinsic that takes lane order[i] of `source` to lane i."""

    def shuffle(builder, value):
        return builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(order)), list(order)))

    return operation(result, source)(shuffle)


def make_shift(vector, left, *amounts):
    """Return an intrinsic that shifts bytes: `amounts` are those of the first pairs of bytes, then repeat.

    It shifts words of 16 bits, for which there are instructions (shifting bytes takes seven): bits that leave a byte
    enter its neighbour, so mask them before or after.
    """

    def shift(builder, value):
        words = ir.VectorType(I16, vector.lanes // 2)
        counts = ir.Constant(words, list(amounts) * (words.count // len(amounts)))
        value = builder.bitcast(value, words)
        return builder.bitcast(builder.shl(value, counts) if left else builder.lshr(value, counts), vector.llvm)

    return operation(vector, vector)(shift)


def make_concatenate(result, part):
    """Return an intrinsic (low, high) -> one vector."""
    order = ir.Constant(ir.VectorType(I32, result.lanes), list(range(result.lanes)))
    return operation(result, part, part)(lambda builder, low, high: builder.shuffle_vector(low, high, order))


concatenate_u8x16 = make_concatenate(u8x16, u8x8)
concatenate_u8x32, concatenate_u8x64 = make_concatenate(u8x32, u8x16), make_concatenate(u8x64, u8x32)
concatenate_f32x16 = make_concatenate(f32x16, f32x8)
twice_u8x32 = make_shuffle(u8x64, u8x32, [*range(32)] * 2)


@operation(u8x8, types.int64)
def bytes_of(builder, value):
    """Return the 8 bytes of an integer, lowest first."""
    return builder.bitcast(value, u8x8.llvm)


def make_gather_f16(stride, times=1):
    """Return an intrinsic address -> f32x8.

    The float16 numbers at address, address + stride, ..., each repeated `times` times.
    """

    def gather(builder, address):
        halves = gathered(builder, address, stride, 1, 8 // times)
        return widen_half(builder, shuffled(builder, halves, halves, [lane // times for lane in range(8)]))

    return operation(f32x8, types.int64)(gather)


def make_gather_planes(stride):
    """Return an intrinsic address -> four integers.

    Integer q has byte q of the eight 4-byte numbers at address, address + stride, ...
    """

    def gather(builder, address):
        return planes(builder, builder.bitcast(gathered(builder, address, stride, 2, 8), u8x32.llvm))

    return operation(types.UniTuple(types.int64, 4), types.int64)(gather)


def gathered(builder, address, stride, size, count):
    """Gather words of 16 bits, `size` of them at address, at address + stride, ...: count * size lanes.

    Vectors of 64 bytes are loaded, and one shuffle takes the words from two of them. To insert words one by one takes
    two instructions for each: 32 of these were a third of the time of two rows of Q4_1.
    """
    end = (count - 1) * stride + 2 * size
    places = windows(stride, size, count, end)
    if this_lane().has_512_bits and 2 <= len(places) <= MOST_WINDOWS:
        return from_windows(builder, address, places)
    number = ir.IntType(16 * size)
    numbers = ir.Constant(ir.VectorType(number, count), None)  # not undefined: it would wait for what a register had
    for i in range(count):
        some = load_value(builder, builder.add(address, I64(i * stride)), number)
        numbers = builder.insert_element(numbers, some, I32(i))
    return builder.bitcast(numbers, ir.VectorType(I16, count * size))


def windows(stride, size, count, end):
    """Return the wanted words of 64-byte reads, by the offset of each read; reads stay before `end`."""
    found, at_once = {}, (64 - 2 * size) // stride + 1
    for first in range(0, count, at_once):
        start = min(first * stride, end - 64)
        places = [i * stride - start for i in range(first, min(first + at_once, count))]
        found[start] = [place // 2 + word for place in places for word in range(size)]
    return found


def from_windows(builder, address, windows):
    """Shuffle these words together; there are two windows at least."""
    (start, order), *others = windows.items()
    value = load_value(builder, builder.add(address, I64(start)), WINDOW)
    for start, words in others:
        other, order = load_value(builder, builder.add(address, I64(start)), WINDOW), [*order, *(32 + i for i in words)]
        value = shuffled(builder, value, other, order + [0] * (32 - len(order)))
        order = [*range(len(order))]
    return shuffled(builder, value, value, order)


def planes(builder, value):
    """Return four integers: number q has byte q of each of eight 4-byte numbers."""
    order = ir.Constant(ir.VectorType(I32, 32), [4 * lane + q for q in range(4) for lane in range(8)])
    quads = builder.bitcast(builder.shuffle_vector(value, value, order), ir.VectorType(I64, 4))
    return as_tuple(builder, [builder.extract_element(quads, I32(q)) for q in range(4)])


planes_of = operation(types.UniTuple(types.int64, 4), u8x32)(planes)


def make_gather_powers(stride, bias):
    """Return an intrinsic address -> f32x8: 2 ** (byte - bias) for the bytes at address, address + stride, ...

    Each is a product of two factors, since 2 ** -128 has no exponent of its own.
    """

    def gather(builder, address):
        codes = ir.Constant(ir.VectorType(I8, 8), None)
        for lane in range(8):
            code = load_value(builder, builder.add(address, I64(lane * stride)), I8)
            codes = builder.insert_element(codes, code, I32(lane))
        words = ir.VectorType(I32, 8)

        def constant(value):
            return ir.Constant(words, [value] * 8)

        codes = builder.zext(codes, words)
        half = builder.lshr(codes, constant(1))
        exponents = (half, builder.sub(builder.sub(codes, half), constant(bias - 128)))
        factors = (builder.shl(builder.add(exponent, constant(63)), constant(23)) for exponent in exponents)
        return builder.fmul(*(builder.bitcast(factor, f32x8.llvm) for factor in factors))

    return operation(f32x8, types.int64)(gather)


@operation(f32x2, types.float32, types.float32)
def pair_f32x2(builder, x, y):
    pair = builder.insert_element(ir.Constant(f32x2.llvm, ir.Undefined), x, I32(0))
    return builder.insert_element(pair, y, I32(1))


four_times_f32x2 = make_shuffle(f32x8, f32x2, [0, 1] * 4)


def make_quads(*order):
    """Return an intrinsic (x, y) -> vector of the 8 quads (of 8 bytes) with these indices; those of y are 8 to 15."""

    def permute(builder, x, y):
        quads = ir.VectorType(I64, 8)
        order_ = ir.Constant(ir.VectorType(I32, 8), list(order))
        x, y = builder.bitcast(x, quads), builder.bitcast(y, quads)
        return builder.bitcast(builder.shuffle_vector(x, y, order_), u8x64.llvm)

    return operation(u8x64, u8x64, u8x64)(permute)


def make_rotate(*amounts):
    """Return an intrinsic that rotates quads of bytes to the left by `amounts`, which repeat."""

    def rotate(builder, value):
        quads = ir.VectorType(I64, 8)
        value, counts = builder.bitcast(value, quads), ir.Constant(quads, list(amounts) * (8 // len(amounts)))
        return builder.bitcast(llvm_call(builder, "llvm.fshl.v8i64", quads, [value, value, counts]), u8x64.llvm)

    return operation(u8x64, u8x64)(rotate)


def make_where(masks, value):
    """Return an intrinsic (codes, bits) -> codes + value where `bits` has a bit of `masks`."""

    def add_where(builder, codes, bits):
        zero = ir.Constant(u8x64.llvm, None)
        chosen = builder.icmp_unsigned("!=", builder.and_(bits, ir.Constant(u8x64.llvm, list(masks))), zero)
        return builder.select(chosen, builder.add(codes, ir.Constant(u8x64.llvm, [value] * 64)), codes)

    return operation(u8x64, u8x64, u8x64)(add_where)


def make_reflect(masks, total):
    """Return an intrinsic (codes, bits) -> total - codes where `bits` has a bit of `masks`, else codes."""

    def reflect(builder, codes, bits):
        zero = ir.Constant(u8x64.llvm, None)
        chosen = builder.icmp_unsigned("!=", builder.and_(bits, ir.Constant(u8x64.llvm, list(masks))), zero)
        return builder.select(chosen, builder.sub(ir.Constant(u8x64.llvm, [total] * 64), codes), codes)

    return operation(u8x64, u8x64, u8x64)(reflect)


def make_fields(width):
    """Return an intrinsic that spreads the lowest four fields of `width` bits of 4-byte words over the bytes."""

    def fields(builder, value):
        words = ir.VectorType(I32, 8)
        value, result = builder.bitcast(value, words), ir.Constant(words, None)
        for field in range(4):
            moved = builder.shl(value, ir.Constant(words, [(8 - width) * field] * 8))
            mask = ir.Constant(words, [((1 << width) - 1) << (8 * field)] * 8)
            result = builder.or_(result, builder.and_(moved, mask))
        return builder.bitcast(result, u8x32.llvm)

    return operation(u8x32, u8x32)(fields)


def make_trits(*digits):
    """Return an intrinsic that reads bytes as base-three fractions of 256 and takes a digit, 0 the first.

    Multiplying by 3 moves a digit in front of the point, so the first digit of x is 1 from 86 on, and 2 from 171 on.
    """

    def trits(builder, value):
        def constant(values):
            return ir.Constant(u8x64.llvm, list(values))

        value = builder.mul(value, constant(3**digit for digit in digits))
        one, two = (builder.icmp_unsigned(">=", value, constant([least] * 64)) for least in (86, 171))
        return builder.add(builder.zext(one, u8x64.llvm), builder.zext(two, u8x64.llvm))

    return operation(u8x64, u8x64)(trits)


def u8x64_of(scalar, element):
    """Return an intrinsic that makes a vector of integers, lowest first."""
    lanes = 512 // element.width

    def of(builder, *values):
        vector = ir.Constant(ir.VectorType(element, lanes), ir.Undefined)
        for lane, value in enumerate(values):
            vector = builder.insert_element(vector, value, I32(lane))
        return builder.bitcast(vector, u8x64.llvm)

    return operation(u8x64, *[scalar] * lanes)(of)


u8x64_of_quads, u8x64_of_words = u8x64_of(types.int64, I64), u8x64_of(types.int32, I32)


def make_flags(value):
    """Return an intrinsic that turns the 64 bits of an integer into 64 bytes: `value` where the bit is set, else 0."""

    def flags(builder, bits):
        zero, values = (ir.Constant(u8x64.llvm, [number] * 64) for number in (0, value))
        if "neon" in this_lane().features:  # which has no masks of one bit a lane
            each = [lane // 8 for lane in range(64)]
            eight = builder.bitcast(bits, u8x8.llvm)
            place = ir.Constant(u8x64.llvm, [1 << lane % 8 for lane in range(64)])
            found = builder.and_(shuffled(builder, eight, eight, each), place)
            return builder.select(builder.icmp_unsigned("!=", found, zero), values, zero)
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), 64))
        return builder.select(mask, values, zero)

    return operation(u8x64, types.int64)(flags)


def make_transpose(row):
    """Return an intrinsic (source, stride, target) that transposes.

    16 rows of 64 bytes, `stride` bytes apart, become columns without gaps.

    row: LLVM's vector type of a row, with 16 elements or 8. Four rounds of pairwise interleaving (the butterfly of a
    matrix transpose), all in registers.
    """
    half = row.count // 2
    low = ir.Constant(ir.VectorType(I32, row.count), [lane // 2 + lane % 2 * row.count for lane in range(row.count)])
    high = ir.Constant(low.type, [half + lane // 2 + lane % 2 * row.count for lane in range(row.count)])

    @operation(None, types.int64, types.int64, types.int64)
    def transpose(builder, source, stride, target):
        rows = [load_value(builder, builder.add(source, builder.mul(stride, I64(i))), row) for i in range(16)]
        for _ in range(4):
            pairs = [(rows[i], rows[i + 8]) for i in range(8)]
            rows = [builder.shuffle_vector(*pair, order) for pair in pairs for order in (low, high)]
        for i, value in enumerate(rows):
            store_value(builder, builder.add(target, I64(i * 64)), value)

    return transpose


transpose_f32 = make_transpose(f32x16.llvm)  # 16 columns of 16 words of 4 bytes
transpose_quads = make_transpose(ir.VectorType(I64, 8))  # 8 columns of 16 words of 8 bytes


@operation(f32x16, f32x16, types.int64, types.float32)
def keep_lanes(builder, value, count, other):
    """Return the first `count` lanes of `value` (none if negative), `other` in the rest."""
    lanes = ir.Constant(i32x16.llvm, list(range(16)))
    kept = builder.icmp_signed("<", lanes, splat_value(builder, i32x16.llvm, builder.trunc(count, I32)))
    return builder.select(kept, value, splat_value(builder, f32x16.llvm, other))


@operation(f32x16, f32x16, types.int64, types.float32)
def skip_lanes(builder, value, count, other):
    """Return `other` in the first `count` lanes (none if negative), `value` in the rest."""
    lanes = ir.Constant(i32x16.llvm, list(range(16)))
    skipped = builder.icmp_signed("<", lanes, splat_value(builder, i32x16.llvm, builder.trunc(count, I32)))
    return builder.select(skipped, splat_value(builder, f32x16.llvm, other), value)


def lookup_bytes(builder, table, codes):
    """Look up table[code] for vectors of bytes, codes 0 to 15."""
    lanes = codes.type.count
    variant = widest(SHUFFLE_BYTES if lanes == 64 else SHUFFLE_16_BYTES)
    if variant:
        tables = ir.Constant(codes.type, table * (lanes // 16))
        return call_in_parts(builder, variant, codes.type, [tables, codes])
    result = ir.Constant(codes.type, [table[0]] * lanes)
    for code, value in enumerate(table[1:], 1):
        found = builder.icmp_unsigned("==", codes, constant_like(codes, code))
        result = builder.select(found, constant_like(codes, value), result)
    return result


def picked_bytes(builder, value, order):
    """Pick from each 16 bytes those with these 16 indices, 0 for None; `order` has 64 indices. For AVX-512."""
    indices = ir.Constant(u8x64.llvm, [128 if index is None else index for index in order])
    return llvm_call(builder, "llvm.x86.avx512.pshuf.b.512", u8x64.llvm, [value, indices])


def as_bytes(builder, value):
    """Reinterpret other lanes of 64 bytes as bytes."""
    return builder.bitcast(value, u8x64.llvm)


def make_lookup(*table):
    """Return an intrinsic that replaces codes 0 to 15 by the bytes in `table`."""
    return operation(u8x64, u8x64)(lambda builder, codes: lookup_bytes(builder, list(table), codes))


def make_nibble_values(values):
    """Return an intrinsic (codes, bit) -> the values, as floats, of the four-bit codes at bit `bit` of each byte."""

    def named(builder, codes, bit):
        codes = builder.lshr(codes, splat_value(builder, u8x16.llvm, builder.trunc(bit, I8)))
        codes = builder.and_(codes, constant_like(codes, 15))
        return builder.sitofp(lookup_bytes(builder, [*values], codes), f32x16.llvm)

    return operation(f32x16, u8x16, types.int64)(named)
