"""The dot products of one row of block-quantized weights with 1 or 4 tokens: a decode step, and small batches.

The row is read once, in the file's layout, as a stream; memory speed is the limit. Four tokens share the unpacking.
With weight = s * (code - offset) or s * code + m, and activation = c * q, in both planes:
y = sum over sub-blocks of s * c * dot(code, q) + (m or -offset * s) * sum(activations).
"""

from llvmlite import ir
from numba import float32, types

from localllm.kernels.cpu.signature import argument, device, inlined
from localllm.kernels.half import constant_like
from localllm.kernels.simd import (
    I32,
    I64,
    as_tuple,
    concatenate_f32x16,
    dot_u8i8,
    dot_variant,
    elements,
    f32x8,
    f32x16,
    float_i32x16,
    fma_f32x16,
    i32x16,
    load_f32,
    load_i32,
    load_u8x64,
    load_value,
    make_shift_i32,
    multiply_add,
    operation,
    pairs_f32x16,
    prefetch_line,
    slice_of,
    splat_f32x8,
    splat_f32x16,
    store_value,
    u8x64,
    zero_f32x8,
    zero_f32x16,
    zero_i32x16,
)

# Bytes between the weights in use and those asked for: far ahead for the second cache, in the order of the file even if
# two rows are read side by side, then for the first. One core of two reads Q4_K at 22 GB/s in rows of 2048 columns or
# 8192; with nothing but 4096 ahead for the first cache that was 22 and 15, with 8192 ahead for the second 19 and 22.
AHEAD, NEAR = 8192, 1024
int64 = types.int64
up_8 = make_shift_i32(True, 8)


class Steps:
    """What a group of 256 columns needs, as intrinsics on tuples of vectors whose lanes are sub-blocks.

    Sub-blocks of 32: a vector for each token, with the 8 sub-blocks of the first row, then those of the second. Of 16:
    a vector of 16 sub-blocks for each row and token, all tokens of the first row first. With one plane, the high one, y
    lacks a factor 256 until `finish`, and the activations' sums are integers.

    Dot products, multiplications and shuffles of 64 bytes share a port of Zen 4, so they are what counts: 4 tokens in
    one plane take 38 cycles per row and group, of which 16 are dot products.
    """

    def __init__(self, sub_block, tokens, rows, planes):
        self.tokens, self.rows, self.planes = tokens, rows, planes
        self.halves = 32 // sub_block  # of a run of 32 columns that make a sub-block each
        self.of_row = f32x8 if self.halves == 1 else f32x16  # scales or minimums
        self.vector = f32x16 if self.halves == 2 or rows == 2 else f32x8
        self.vectors = rows if self.halves == 2 else 1  # for each token
        self.together = rows * self.halves // self.vectors  # vectors of dot products that make one
        self.totals = types.UniTuple(self.vector, self.vectors * tokens)
        self.factors = types.UniTuple(self.of_row, rows)
        self.dots = types.UniTuple(i32x16, rows * tokens * self.halves)

    def at(self, builder, first, stride):
        """The address of every token's part."""
        return [builder.add(first, builder.mul(stride, I64(t))) for t in range(self.tokens)]

    def make_no_tails(self):
        @operation(self.totals, *[int64] * 9)
        def zeros(builder, *arguments):
            """The totals to begin with in formats whose rows are whole groups."""
            return as_tuple(builder, [ir.Constant(self.vector.llvm, None)] * self.totals.count)

        return zeros

    def make_dots(self):
        @operation(self.dots, types.UniTuple(u8x64, 4 * self.rows), int64, int64, int64)
        def dots(builder, codes, high, low, stride):
            """Dot products with the activations, 256 * high + low: for each token, of all rows, by half of the runs.

            Two lanes belong to a run of 32 columns; the first two vectors of codes hold the first halves of the runs.
            """
            codes, dot = elements(builder, codes), dot_variant()

            def add_plane(sums, x):
                for q in range(4):
                    numbers = load_value(builder, builder.add(x, I64(64 * q)), u8x64.llvm)
                    for row in range(self.rows):
                        i = row * self.halves + q * self.halves // 4
                        sums[i] = dot(builder, sums[i], codes[4 * row + q], numbers)
                return sums

            results = []
            for upper, lower in zip(self.at(builder, high, stride), self.at(builder, low, stride), strict=True):
                sums = add_plane([ir.Constant(i32x16.llvm, None)] * (self.rows * self.halves), upper)
                if self.planes == 2:
                    sums = add_plane([builder.shl(total, constant_like(total, 8)) for total in sums], lower)
                results += sums
            return as_tuple(builder, results)

        return dots

    def make_add(self):
        @operation(self.totals, self.totals, self.dots, self.factors, self.factors, *[int64] * 4)
        def add(builder, totals, dots, scales, minimums, x_scales, c_stride, x_sums, n_stride):
            """totals + x_scales * scales * dots + minimums * x_sums."""
            totals, dots = elements(builder, totals), elements(builder, dots)
            scales, minimums = self.joined(builder, scales), self.joined(builder, minimums)
            x_scales, x_sums = self.at(builder, x_scales, c_stride), self.at(builder, x_sums, n_stride)
            for t in range(self.tokens):
                c, n = self.token_scales(builder, x_scales[t]), self.token_sums(builder, x_sums[t])
                for v, (s, m) in enumerate(zip(scales, minimums, strict=True)):
                    i, pair = v * self.tokens + t, (t * self.vectors + v) * self.together
                    dot = self.by_sub_block(builder, dots[pair], dots[pair + self.together - 1])
                    if self.planes == 2:
                        totals[i] = multiply_add(builder, m, n, totals[i])
                        totals[i] = multiply_add(builder, dot, builder.fmul(s, c), totals[i])
                    else:
                        dot = multiply_add(builder, m, n, builder.fmul(dot, s))
                        totals[i] = multiply_add(builder, dot, c, totals[i])
            return as_tuple(builder, totals)

        return add

    def joined(self, builder, factors):
        """The rows' scales or minimums, as many vectors as a token has."""
        factors = elements(builder, factors)
        return factors if len(factors) == self.vectors else [shuffled(builder, *factors, range(16))]

    def by_sub_block(self, builder, x, y):
        """Neighbouring lanes added: of x and then y if they are rows, of both in turn if they are halves."""
        even = [lane // 2 * 2 + lane % 2 * 16 for lane in range(16)]
        if self.halves == 1:
            even = [2 * lane for lane in range(self.vector.lanes)]
        sums = (shuffled(builder, x, y, [lane + odd for lane in even]) for odd in (0, 1))
        return builder.sitofp(builder.add(*sums), self.vector.llvm)

    def token_scales(self, builder, address):
        """A token's 8 scales, for both halves or both rows."""
        scales = load_value(builder, address, f32x8.llvm)
        if self.vector.lanes == 8:
            return scales
        return shuffled(builder, scales, scales, [lane // 2 if self.halves == 2 else lane % 8 for lane in range(16)])

    def token_sums(self, builder, address):
        """A token's sums in every sub-block."""
        integers = ir.VectorType(I32, self.of_row.lanes)
        sums = load_value(builder, address, self.of_row.llvm if self.planes == 2 else integers)
        if self.vector != self.of_row:
            sums = shuffled(builder, sums, sums, [*range(8)] * 2)
        return sums if self.planes == 2 else builder.sitofp(sums, self.vector.llvm)

    def make_finish(self):
        @operation(None, self.totals, int64, int64)
        def finish(builder, totals, y, stride):
            """The sum of each token and row goes to y [tokens, rows]."""
            sums = sums_of_lanes(builder, self.eights(builder, elements(builder, totals)))
            if self.planes == 1:
                sums = builder.fmul(sums, constant_like(sums, 256.0))
            for t, address in enumerate(self.at(builder, y, stride)):
                for row in range(self.rows):
                    value = builder.extract_element(sums, I32(row * self.tokens + t))
                    store_value(builder, builder.add(address, I64(4 * row)), value)

        return finish

    def eights(self, builder, totals):
        """8 lanes that add up to each token's total: all tokens of the first row, then of the second."""
        if self.vector.lanes == 8:
            return totals
        halves = [(slice_of(builder, x, 0, 8), slice_of(builder, x, 8, 16)) for x in totals]
        if self.halves == 2:
            return [builder.fadd(*pair) for pair in halves]
        return [pair[row] for row in range(2) for pair in halves]


def shuffled(builder, x, y, order):
    """The lanes `order` of two vectors."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), [*order]))


def sums_of_lanes(builder, vectors):
    """The sum of each vector of 8 floats, as lanes of one vector; there are 1, 2, 4 or 8.

    Neighbouring lanes are added, in two vectors at a time.
    """
    count = len(vectors)
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.fadd(*(shuffled(builder, *pair, range(odd, 16, 2)) for odd in (0, 1))) for pair in pairs]
    sums = vectors[0]
    while sums.type.count > count:
        sums = builder.fadd(*(slice_of(builder, sums, odd, sums.type.count, 2) for odd in (0, 1)))
    return sums


def make_tail(format, planes):
    """(w, x, low, x_scales, x_sums, chunks) -> what the 64-column chunks behind the last group add, for one token."""
    if format.chunk is None:
        return device(lambda w, x, low, x_scales, x_sums, chunks: zero_f32x8())
    block_bytes, codes, scale, minimum = format.chunk
    offset, both = float32(-format.offset), planes == 2

    @device
    def block(w, x_scale, x_sum):
        """A block's scale with its token's, and what its minimum adds."""
        s, c = scale(w), load_f32(x_scale)
        m = s * offset if minimum is None else minimum(w)
        return s * c, m * (load_f32(x_sum) if both else c * float32(load_i32(x_sum)))

    @inlined
    def tail(w, x, low, x_scales, x_sums, chunks):
        total = zero_f32x16()
        for _ in range(chunks):
            s, m = block(w, x_scales, x_sums)
            t, n = block(w + block_bytes, x_scales + 4, x_sums + 4)
            packed = codes(w)
            dots = dot_u8i8(zero_i32x16(), packed, load_u8x64(x))
            if both:
                dots = dot_u8i8(up_8(dots), packed, load_u8x64(low))
            total = fma_f32x16(float_i32x16(dots), pairs_f32x16(s, t), total + pairs_f32x16(m / 8, n / 8))
            w, x, low, x_scales, x_sums = w + 2 * block_bytes, x + 64, low + 64, x_scales + 8, x_sums + 8
        return add_halves(total)

    return tail


@operation(f32x8, f32x16)
def add_halves(builder, value):
    return builder.fadd(slice_of(builder, value, 0, 8), slice_of(builder, value, 8, 16))


def make_tails(format, tokens, rows, planes):
    """(w, bytes between rows, x, low, c, n, their strides) -> the totals to begin with: `tail` for all tokens."""
    tail, group_bytes, sums_bytes = make_tail(format, planes), format.group_bytes, 1024 // format.sub_block
    vector = f32x16 if rows == 2 else f32x8
    totals_type = types.UniTuple(vector, tokens)

    @operation(totals_type)
    def zeros(builder):
        return as_tuple(builder, [ir.Constant(vector.llvm, None)] * tokens)

    @operation(totals_type, totals_type, vector, int64)
    def put(builder, totals, value, token):
        """The totals with one replaced."""
        chosen = [builder.icmp_signed("==", token, I64(t)) for t in range(tokens)]
        pairs = zip(elements(builder, totals), chosen, strict=True)
        return as_tuple(builder, [builder.select(here, value, total) for total, here in pairs])

    @inlined
    def tails(w, step, x, low, x_stride, c, c_stride, n, n_stride):
        groups, chunks, totals = x_stride // 256, x_stride % 256 // 64, zeros()
        w, x, low, c = w + groups * group_bytes, x + groups * 256, low + groups * 256, c + groups * 32
        n += groups * sums_bytes
        for t in range(tokens):
            value = tail(w, x, low, c, n, chunks)
            if rows == 2:
                value = concatenate_f32x16(value, tail(w + step, x, low, c, n, chunks))
            totals = put(totals, value, t)
            x, low, c, n = x + x_stride, low + x_stride, c + c_stride, n + n_stride
        return totals

    return tails


def make_ask_for(size, locality):
    """An intrinsic that prefetches `size` bytes."""

    @operation(None, int64)
    def ask_for(builder, address):
        for line in range(0, size, 64):
            prefetch_line(builder, builder.add(address, I64(line)), locality)

    return ask_for


@inlined
def token_strides(a, sub_block):
    """Bytes between tokens: of the planes, the scales and the sums."""
    columns = argument(a, 4)
    return columns, columns // 8, columns // sub_block * 4


@inlined
def token_at(a, token, sub_block, sums):
    """Where a token's activations lie: high and low plane, scales, sums (argument number `sums`)."""
    x_stride, c_stride, n_stride = token_strides(a, sub_block)
    return (
        argument(a, 5) + token * x_stride, argument(a, 6) + token * x_stride,
        argument(a, 7) + token * c_stride, argument(a, sums) + token * n_stride,
    )  # fmt: skip


def make_each(function, rows):
    """A function (w, bytes between rows) -> what `function` finds at each row: a tuple."""
    if rows == 1:
        return inlined(lambda w, step: (function(w),))
    return inlined(lambda w, step: (function(w), function(w + step)))


def make_codes(codes, rows):
    """The same for the four vectors of codes."""
    if rows == 1:
        return inlined(lambda w, step: codes(w))
    return inlined(lambda w, step: codes(w) + codes(w + step))


def make_from_offset(format):
    """What an offset of the codes comes to: a minimum of -offset * scale."""
    scales, splat, offset = (
        format.scales,
        splat_f32x8 if format.sub_block == 32 else splat_f32x16,
        -float(format.offset),
    )
    return device(lambda w: scales(w) * splat(offset))


def make_row(format, tokens, rows, planes):
    """A function (arguments of the kernel, address of a row, bytes to the next, first token, y) for one or two rows.

    Two rows share what is read of the activations, which is more than half of all loads.
    """
    steps = Steps(format.sub_block, tokens, rows, planes)
    dots, add, finish = steps.make_dots(), steps.make_add(), steps.make_finish()
    codes, scales = make_codes(format.codes, rows), make_each(format.scales, rows)
    minimums = make_each(format.minimums or make_from_offset(format), rows)
    sub_block, group_bytes, sums_bytes = format.sub_block, format.group_bytes, 1024 // format.sub_block
    chunk_bytes = 2 * format.chunk.block_bytes if format.chunk else 0
    fetch, fetch_chunks = make_ask_for(rows * group_bytes, 2), make_ask_for(rows * chunk_bytes, 2)
    fetch_near = make_ask_for(group_bytes, 3)
    start = make_tails(format, tokens, rows, planes) if format.chunk else steps.make_no_tails()
    sums = 8 if planes == 2 else 9

    @inlined
    def row(a, w, step, token, y):
        x, low, c, n = token_at(a, token, sub_block, sums)
        x_stride, c_stride, n_stride = token_strides(a, sub_block)
        totals, ahead = start(w, step, x, low, x_stride, c, c_stride, n, n_stride), w + step + AHEAD
        for _ in range(x_stride % 256 // 64):
            fetch_chunks(ahead)
            ahead += rows * chunk_bytes
        for _ in range(x_stride // 256):
            fetch(ahead)
            fetch_near(w + NEAR)
            if rows == 2:
                fetch_near(w + step + NEAR)
            products = dots(codes(w, step), x, low, x_stride)
            totals = add(totals, products, scales(w, step), minimums(w, step), c, c_stride, n, n_stride)
            w, ahead = w + group_bytes, ahead + rows * group_bytes
            x, low, c, n = x + 256, low + 256, c + 32, n + sums_bytes
        finish(totals, y, argument(a, 11))

    return row
