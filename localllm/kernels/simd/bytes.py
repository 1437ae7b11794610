"""Operations on bytes and bits: shuffles, gathers, transposes, lookups, and dot products.

Dot products use the best instructions that the target CPU has. An emitter adds 4 products of bytes to each lane of an
i32x16: accumulator[i] += the sum of x[4 i + k] * y[4 i + k]. `select_dot` chooses the emitter. "Words" are 16-bit
integers.
"""

from functools import reduce

from llvmlite import ir
from numba import types

from localllm.kernels.machine import get_lane
from localllm.kernels.simd.vectors import (
    I8,
    I16,
    I32,
    I64,
    MIXED_DOT,
    MULTIPLY_BYTES,
    MULTIPLY_WORDS,
    SHUFFLE_16_BYTES,
    SHUFFLE_BYTES,
    SIGN_BYTES,
    SIGNED_DOT,
    as_tuple,
    call_on_slices,
    constant_like,
    f32x2,
    f32x8,
    f32x16,
    i32x16,
    llvm_call,
    load_value,
    map_slices,
    operation,
    select_widest,
    shuffle_lanes,
    slice_lanes,
    splat_value,
    store_value,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
    widen_half,
)

WINDOW = ir.VectorType(I16, 32)
MAX_WINDOWS = 3  # maximum 64-byte loads to gather from; Q8_0 would need four, and took 1.04 times as long with them


def make_shuffle(result, source, order):
    def shuffle(builder, value):
        return builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(order)), list(order)))

    return operation(result, source)(shuffle)


def make_shift(vector, left, *amounts):
    """Return an intrinsic that shifts 16-bit words left or right by `amounts`, which repeat.

    Bits that leave a byte enter its neighbour: mask them before or after. Shifting single bytes takes seven
    instructions.
    """

    def shift(builder, value):
        words = ir.VectorType(I16, vector.lanes // 2)
        counts = ir.Constant(words, list(amounts) * (words.count // len(amounts)))
        value = builder.bitcast(value, words)
        return builder.bitcast(builder.shl(value, counts) if left else builder.lshr(value, counts), vector.llvm)

    return operation(vector, vector)(shift)


def make_concatenate(result, part):
    order = ir.Constant(ir.VectorType(I32, result.lanes), list(range(result.lanes)))
    return operation(result, part, part)(lambda builder, low, high: builder.shuffle_vector(low, high, order))


concatenate_u8x16 = make_concatenate(u8x16, u8x8)
concatenate_u8x32, concatenate_u8x64 = make_concatenate(u8x32, u8x16), make_concatenate(u8x64, u8x32)
twice_u8x32 = make_shuffle(u8x64, u8x32, [*range(32)] * 2)


@operation(u8x8, types.int64)
def split_int64(builder, value):
    return builder.bitcast(value, u8x8.llvm)


def make_gather_f16(stride, times=1):
    """Return an intrinsic (address) -> f32x8: float16 values, `stride` bytes apart, each in `times` lanes."""

    def gather(builder, address):
        halves = emit_gather(builder, address, stride, 1, 8 // times)
        return widen_half(builder, shuffle_lanes(builder, halves, halves, [lane // times for lane in range(8)]))

    return operation(f32x8, types.int64)(gather)


def make_gather_planes(stride):
    """Return an intrinsic (address) -> four int64: integer q has byte q of each of eight 4-byte integers."""

    def gather(builder, address):
        return planes(builder, builder.bitcast(emit_gather(builder, address, stride, 2, 8), u8x32.llvm))

    return operation(types.UniTuple(types.int64, 4), types.int64)(gather)


def emit_gather(builder, address, stride, size, count):
    """Gather `count` times `size` 16-bit words, at address, address + stride, ...: count * size lanes.

    With AVX-512, one shuffle takes words from two 64-byte loads. Inserting words one by one takes two instructions for
    each: 32 of these were a third of the time of two rows of Q4_1.
    """
    end = (count - 1) * stride + 2 * size
    places = windows(stride, size, count, end)
    if get_lane().has_512_bits and 2 <= len(places) <= MAX_WINDOWS:
        return gather_from_windows(builder, address, places)
    number = ir.IntType(16 * size)
    numbers = ir.Constant(ir.VectorType(number, count), None)  # undefined would depend on the old content
    for i in range(count):
        some = load_value(builder, builder.add(address, I64(i * stride)), number)
        numbers = builder.insert_element(numbers, some, I32(i))
    return builder.bitcast(numbers, ir.VectorType(I16, count * size))


def windows(stride, size, count, end):
    """Choose 64-byte loads, none beyond offset `end`: {offset of a load: indices of its wanted words}."""
    by_start, at_once = {}, (64 - 2 * size) // stride + 1
    for first in range(0, count, at_once):
        start = min(first * stride, end - 64)
        places = [i * stride - start for i in range(first, min(first + at_once, count))]
        by_start[start] = [place // 2 + word for place in places for word in range(size)]
    return by_start


def gather_from_windows(builder, address, windows):
    """Load at least two windows of 64 bytes, and shuffle the wanted words together."""
    (start, order), *others = windows.items()
    value = load_value(builder, builder.add(address, I64(start)), WINDOW)
    for start, words in others:
        other, order = load_value(builder, builder.add(address, I64(start)), WINDOW), [*order, *(32 + i for i in words)]
        value = shuffle_lanes(builder, value, other, order + [0] * (32 - len(order)))
        order = [*range(len(order))]
    return shuffle_lanes(builder, value, value, order)


def planes(builder, value):
    """Transpose eight 4-byte integers to four int64: integer q has byte q of each of them."""
    order = ir.Constant(ir.VectorType(I32, 32), [4 * lane + q for q in range(4) for lane in range(8)])
    quads = builder.bitcast(builder.shuffle_vector(value, value, order), ir.VectorType(I64, 4))
    return as_tuple(builder, [builder.extract_element(quads, I32(q)) for q in range(4)])


planes_of = operation(types.UniTuple(types.int64, 4), u8x32)(planes)


def make_gather_powers(stride, bias):
    """Return an intrinsic (address) -> f32x8 that computes 2 ** (byte - bias).

    The result is a product of two powers, because 2 ** -128 is subnormal.
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
    """Return an intrinsic (x, y) -> u8x64 with the 8-byte lanes `order`, 0 to 7 of x and 8 to 15 of y."""

    def permute(builder, x, y):
        quads = ir.VectorType(I64, 8)
        order_ = ir.Constant(ir.VectorType(I32, 8), list(order))
        x, y = builder.bitcast(x, quads), builder.bitcast(y, quads)
        return builder.bitcast(builder.shuffle_vector(x, y, order_), u8x64.llvm)

    return operation(u8x64, u8x64, u8x64)(permute)


def make_rotate(*amounts):
    """Return an intrinsic that rotates 8-byte lanes to the left by `amounts` bits, which repeat."""

    def rotate(builder, value):
        quads = ir.VectorType(I64, 8)
        value, counts = builder.bitcast(value, quads), ir.Constant(quads, list(amounts) * (8 // len(amounts)))
        return builder.bitcast(llvm_call(builder, "llvm.fshl.v8i64", quads, [value, value, counts]), u8x64.llvm)

    return operation(u8x64, u8x64)(rotate)


def make_where(masks, value):
    """Return an intrinsic (codes, bits) that adds `value` to codes[i] if bits[i] has a bit of masks[i]."""

    def add_where(builder, codes, bits):
        zero = ir.Constant(u8x64.llvm, None)
        is_set = builder.icmp_unsigned("!=", builder.and_(bits, ir.Constant(u8x64.llvm, list(masks))), zero)
        return builder.select(is_set, builder.add(codes, ir.Constant(u8x64.llvm, [value] * 64)), codes)

    return operation(u8x64, u8x64, u8x64)(add_where)


def make_reflect(masks, total):
    """Return an intrinsic (codes, bits) that replaces some codes by total - code.

    It replaces codes[i] if bits[i] has a bit of masks[i].
    """

    def reflect(builder, codes, bits):
        zero = ir.Constant(u8x64.llvm, None)
        is_set = builder.icmp_unsigned("!=", builder.and_(bits, ir.Constant(u8x64.llvm, list(masks))), zero)
        return builder.select(is_set, builder.sub(ir.Constant(u8x64.llvm, [total] * 64), codes), codes)

    return operation(u8x64, u8x64, u8x64)(reflect)


def make_fields(width):
    """Return an intrinsic (u8x32) that moves the fields of each word to its bytes.

    These are the four lowest fields, of `width` bits.
    """

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
    """Return an intrinsic (u8x64) that extracts one base-3 digit, given by its index, of each byte.

    A byte is a fraction in base three, byte / 256. Multiplying it by 3 moves a digit in front of the point and drops
    it, so 3 ** n leaves digit n in front: 1 from 86 on, 2 from 171 on.
    """

    def trits(builder, value):
        def constant(values):
            return ir.Constant(u8x64.llvm, list(values))

        value = builder.mul(value, constant(3**digit for digit in digits))
        one, two = (builder.icmp_unsigned(">=", value, constant([least] * 64)) for least in (86, 171))
        return builder.add(builder.zext(one, u8x64.llvm), builder.zext(two, u8x64.llvm))

    return operation(u8x64, u8x64)(trits)


def make_u8x64(scalar, element):
    """Return an intrinsic (integers) -> u8x64 with their bytes.

    scalar, element: types of Numba and of LLVM.
    """
    lanes = 512 // element.width

    def combine(builder, *values):
        vector = ir.Constant(ir.VectorType(element, lanes), ir.Undefined)
        for lane, value in enumerate(values):
            vector = builder.insert_element(vector, value, I32(lane))
        return builder.bitcast(vector, u8x64.llvm)

    return operation(u8x64, *[scalar] * lanes)(combine)


u8x64_of_quads, u8x64_of_words = make_u8x64(types.int64, I64), make_u8x64(types.int32, I32)


def make_flags(value):
    """Return an intrinsic (int64) -> u8x64: byte i is `value` if bit i is set, else 0."""

    def flags(builder, bits):
        zero, values = (ir.Constant(u8x64.llvm, [number] * 64) for number in (0, value))
        if "neon" in get_lane().features:  # NEON has no masks with one bit per lane
            each = [lane // 8 for lane in range(64)]
            eight = builder.bitcast(bits, u8x8.llvm)
            place = ir.Constant(u8x64.llvm, [1 << lane % 8 for lane in range(64)])
            matches = builder.and_(shuffle_lanes(builder, eight, eight, each), place)
            return builder.select(builder.icmp_unsigned("!=", matches, zero), values, zero)
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), 64))
        return builder.select(mask, values, zero)

    return operation(u8x64, types.int64)(flags)


def make_transpose(row):
    """Return an intrinsic (source, stride, target) that transposes 16 rows of 64 bytes.

    A row has 16 elements, or 8. The columns at `target` have no gaps. row: LLVM's vector type of a row. Four rounds of
    pairwise interleaving (the butterfly of a matrix transpose), all in registers.
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
    """Return `value` in the first `count` lanes (none if negative), `other` in the rest."""
    lanes = ir.Constant(i32x16.llvm, list(range(16)))
    is_kept = builder.icmp_signed("<", lanes, splat_value(builder, i32x16.llvm, builder.trunc(count, I32)))
    return builder.select(is_kept, value, splat_value(builder, f32x16.llvm, other))


@operation(f32x16, f32x16, types.int64, types.float32)
def skip_lanes(builder, value, count, other):
    """Return `other` in the first `count` lanes (none if negative), `value` in the rest."""
    lanes = ir.Constant(i32x16.llvm, list(range(16)))
    skipped = builder.icmp_signed("<", lanes, splat_value(builder, i32x16.llvm, builder.trunc(count, I32)))
    return builder.select(skipped, splat_value(builder, f32x16.llvm, other), value)


def lookup_bytes(builder, table, codes):
    """Look up table[code] for each byte of `codes`, 0 to 15; table: a list of 16 bytes."""
    lanes = codes.type.count
    variant = select_widest(SHUFFLE_BYTES if lanes == 64 else SHUFFLE_16_BYTES)
    if variant:
        tables = ir.Constant(codes.type, table * (lanes // 16))
        return call_on_slices(builder, variant, codes.type, [tables, codes])
    result = ir.Constant(codes.type, [table[0]] * lanes)
    for code, value in enumerate(table[1:], 1):
        matches = builder.icmp_unsigned("==", codes, constant_like(codes, code))
        result = builder.select(matches, constant_like(codes, value), result)
    return result


def select_bytes(builder, value, order):
    """Select bytes of each 16-byte quarter, with AVX-512.

    order: 64 indices within quarters, None for a zero byte.
    """
    indices = ir.Constant(u8x64.llvm, [128 if index is None else index for index in order])
    return llvm_call(builder, "llvm.x86.avx512.pshuf.b.512", u8x64.llvm, [value, indices])


def as_bytes(builder, value):
    return builder.bitcast(value, u8x64.llvm)


def make_lookup(*table):
    return operation(u8x64, u8x64)(lambda builder, codes: lookup_bytes(builder, list(table), codes))


def make_nibble_values(values):
    """Return an intrinsic (codes, bit) -> f32x16 that looks up `values` by 4-bit codes.

    bit: the first bit of a code in its byte.
    """

    def named(builder, codes, bit):
        codes = builder.lshr(codes, splat_value(builder, u8x16.llvm, builder.trunc(bit, I8)))
        codes = builder.and_(codes, constant_like(codes, 15))
        return builder.sitofp(lookup_bytes(builder, [*values], codes), f32x16.llvm)

    return operation(f32x16, u8x16, types.int64)(named)


def dot_vnni_512(builder, accumulator, unsigned, signed):
    return llvm_call(builder, "llvm.x86.avx512.vpdpbusd.512", i32x16.llvm, [accumulator, unsigned, signed])


def dot_words_vnni_512(builder, accumulator, x, y):
    """Add 2 products of signed 16-bit words to each lane, by AVX512-VNNI. x and y have the type u8x64."""
    x, y = (builder.bitcast(value, ir.VectorType(I16, 32)) for value in (x, y))
    return llvm_call(builder, "llvm.x86.avx512.vpdpwssd.512", i32x16.llvm, [accumulator, x, y])


def dot_vnni_256(builder, accumulator, unsigned, signed):
    variant = "avxvnni", 2, "llvm.x86.avx512.vpdpbusd.256"  # LLVM's name for AVX-VNNI's instruction, too
    return call_on_slices(builder, variant, i32x16.llvm, [accumulator, unsigned, signed])


def dot_bytes(builder, accumulator, unsigned, signed):
    """Add 4 products of an unsigned and a signed byte to each lane, without a dot product instruction.

    For AVX2 and SSSE3. One instruction adds pairs of products into words, another adds pairs of words into 32 bits.
    Words would saturate, so the top bits of the unsigned bytes are multiplied separately (-128 * 128 * 2 just fits).
    LLVM omits one of the two multiplications if it knows that the masked bytes are zero: see `needs_two_step_dot`.
    """
    for mask in (0x7F, 0x80):
        masked = builder.and_(unsigned, ir.Constant(u8x64.llvm, [mask] * 64))
        words = call_on_slices(builder, select_widest(MULTIPLY_BYTES), ir.VectorType(I16, 32), [masked, signed])
        accumulator = builder.add(accumulator, multiply_words(builder, words, constant_like(words, 1)))
    return accumulator


def dots_in_words(builder, accumulator, pairs, largest):
    """Add the dot products of several pairs (unsigned, signed) of vectors; largest: of the unsigned bytes.

    If 16-bit words can hold the sums over all pairs, the products are added there and widened to 32 bits only once.
    """
    dot = select_dot(largest)
    if dot is not dot_bytes or 2 * 128 * largest * len(pairs) > 0x7FFF:
        for unsigned, signed in pairs:
            accumulator = dot(builder, accumulator, unsigned, signed)
        return accumulator
    products = [
        call_on_slices(builder, select_widest(MULTIPLY_BYTES), ir.VectorType(I16, 32), [*pair]) for pair in pairs
    ]
    words = reduce(builder.add, products)
    return builder.add(accumulator, multiply_words(builder, words, constant_like(words, 1)))


def dots_of_rows(builder, sums, pairs, largest):
    """Add the dot products of several rows, each of several pairs; see dots_in_words.

    Rows take turns, so that a product does not wait for the previous one of its sum.
    """
    if select_dot(largest) is dot_bytes:
        return [dots_in_words(builder, total, of_row, largest) for total, of_row in zip(sums, pairs, strict=True)]
    for turn in zip(*pairs, strict=True):
        sums = [dots_in_words(builder, total, [pair], largest) for total, pair in zip(sums, turn, strict=True)]
    return sums


def dot_signed_bytes(builder, accumulator, x, y):
    """Add 4 products of signed bytes to each lane.

    It takes half the instructions of `dot_bytes`; y must be above -128. |x| is multiplied by y with the sign of x.
    """
    sizes = llvm_call(builder, "llvm.abs.v64i8", u8x64.llvm, [x, ir.IntType(1)(0)])
    y = call_on_slices(builder, select_widest(SIGN_BYTES), u8x64.llvm, [y, x])
    pairs = call_on_slices(builder, select_widest(MULTIPLY_BYTES), ir.VectorType(I16, 32), [sizes, y])
    return builder.add(accumulator, multiply_words(builder, pairs, constant_like(pairs, 1)))


def dot_generic(builder, accumulator, unsigned, signed):
    """Add 4 products of an unsigned and a signed byte to each lane with basic instructions.

    Even bytes are multiplied first, then odd ones.
    """
    words = ir.VectorType(I16, 32)
    x, y, eight = builder.bitcast(unsigned, words), builder.bitcast(signed, words), ir.Constant(words, [8] * 32)
    even = builder.and_(x, constant_like(x, 255)), builder.ashr(builder.shl(y, eight), eight)
    odd = builder.lshr(x, eight), builder.ashr(y, eight)
    sums = builder.add(multiply_words(builder, *even), multiply_words(builder, *odd))
    return builder.add(accumulator, sums)


def dot_neon_mixed(builder, accumulator, unsigned, signed):
    return call_on_slices(builder, MIXED_DOT, i32x16.llvm, [accumulator, unsigned, signed])


def dot_neon_signed(builder, accumulator, x, y):
    if "dotprod" in get_lane().features:
        return call_on_slices(builder, SIGNED_DOT, i32x16.llvm, [accumulator, x, y])
    return map_slices(builder, dot_neon_16, 4, [accumulator, x, y])


def dot_neon_16(builder, accumulator, x, y):
    """Add the products of 16 pairs of signed bytes to 4 lanes, for ARM CPUs without dot-product instructions."""
    sums = []
    for start in (0, 8):
        halves = [slice_lanes(builder, value, start, start + 8) for value in (x, y)]
        products = llvm_call(builder, "llvm.aarch64.neon.smull.v8i16", ir.VectorType(I16, 8), halves)
        sums.append(llvm_call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", accumulator.type, [products]))
    return builder.add(accumulator, llvm_call(builder, "llvm.aarch64.neon.addp.v4i32", accumulator.type, sums))


def dot_neon_unsigned(builder, accumulator, unsigned, signed):
    """Compute the dot product on an ARM that multiplies signed bytes only.

    128 is subtracted from the unsigned bytes, and 128 times the sum of the signed ones is added. Many rows share that
    sum.
    """
    centred = builder.xor(unsigned, constant_like(unsigned, 128))
    sums = dot_neon_signed(builder, constant_like(accumulator, 0), constant_like(signed, 1), signed)
    bias = builder.shl(sums, constant_like(sums, 7))
    return builder.add(dot_neon_signed(builder, accumulator, centred, signed), bias)


def multiply_words(builder, x, y):
    """Compute x[2 i] * y[2 i] + x[2 i + 1] * y[2 i + 1] of 32 signed 16-bit words each, as i32x16."""
    if select_widest(MULTIPLY_WORDS):
        return call_on_slices(builder, select_widest(MULTIPLY_WORDS), i32x16.llvm, [x, y])

    def select_alternate(value, first):
        return builder.sext(slice_lanes(builder, value, first, 32, 2), i32x16.llvm)

    return builder.add(*(builder.mul(select_alternate(x, first), select_alternate(y, first)) for first in (0, 1)))


def multiply_pairs(builder, x, y):
    """Multiply two vectors of 16 signed 16-bit words, and add neighbouring products.

    The result has 8 sums of 32 bits. It is for AVX2.
    """
    return llvm_call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), [x, y])


def has_fast_word_products():
    """Return whether this CPU multiplies 16-bit words fastest: AVX2 without a dot product of bytes."""
    return select_dot() is dot_bytes and {"avx2", "f16c"} <= get_lane().features


def select_dot(largest=255):
    """Choose the emitter of the dot product for this CPU and unsigned bytes up to `largest`."""
    features = get_lane().features
    if "neon" in features:
        return dot_neon_mixed if "i8mm" in features else dot_neon_signed if largest < 128 else dot_neon_unsigned
    if {"avx512vnni", "avx512bw"} <= features:
        return dot_vnni_512
    if "avxvnni" in features:
        return dot_vnni_256
    return dot_bytes if select_widest(MULTIPLY_BYTES) else dot_generic


def needs_two_step_dot():
    """Return whether the dot product takes two steps, of which bytes below 128, or signed ones, need one."""
    return select_dot() in (dot_bytes, dot_neon_unsigned)


def needs_signed_codes():
    """Return whether codes should be unpacked to signed bytes, because this CPU multiplies only those."""
    return select_dot() is dot_neon_unsigned


def select_signed_dot():
    """Choose the emitter of the dot product of signed bytes, the second above -128.

    Return None if that of `select_dot` is as fast.
    """
    if "neon" in get_lane().features:
        return dot_neon_signed
    return dot_signed_bytes if needs_two_step_dot() else None


def make_dot(largest):
    """Return an intrinsic (accumulator, x, y); x: unsigned bytes, at most `largest`; y: signed."""
    return operation(i32x16, i32x16, u8x64, u8x64)(select_dot(largest))
