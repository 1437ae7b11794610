"""Products of quantized weights and many tokens that keep the weights' own codes and scales.

Slabs are multiplied one at a time. These kernels are used while both planes of the activations are multiplied, that is
for moderate token counts. On CPUs with AVX2 only they are used for more tokens, too: with codes of few bits and the
high plane, or with 16-bit words.

Scratch memory, in order (a "word" is 4 columns):

    codes      u8 [vector][word][16 rows][4]
    scales     f32 [vector][sub-block][16 rows]
    minimums   f32 [vector][sub-block][16 rows]
    16 rows    codes, scales and minimums before they are transposed

On CPUs with AVX2 but no dot product of bytes the runs of a register tile are in assembly: 16 rows times TOKENS tokens,
over 32 or 16 columns that share scales. There are three ways to multiply them:

- codes of few bits times bytes. VPMADDUBSW adds two products into 16 bits, and as many of its results as fit there are
  added (8 of 4-bit codes: 15 * 127 * 2 * 8 = 30480) before VPMADDWD widens the sums to 32 bits: 17 instructions for 256
  products of 4-bit codes, where widening each result takes 32.
- the same, and VPMADDWD multiplies by integer scales while it widens, so that a run of 32 columns is converted to
  floats once. 1.2 times as fast for Q6_K, whose sums are widened every 8 columns anyway and whose scales are for 16.
- codes of any size times words of 16 bits, which are both planes of the activations at once: 32 instructions for 256
  products, and 4 to make words of the codes, which all tokens share.

Compilers hoist the multiplications and then need more than 16 registers (97 instead of 138 thousand million products
a second, a prototype in C), so the assembly fixes the order of the instructions and the registers. The totals do not
fit next to the sums: they lie in memory, and a token's take 11 or 12 instructions for a sub-block (21 to 38 where LLVM
moved them to and fro). The loop over runs is assembly, too: LLVM moved twelve addresses to and fro between sub-blocks.
Names in braces represent operands: addresses, the tokens' x0 to x3, c0 to c3 and n0 to n3, and constants.
"""

from llvmlite import binding, ir
from numba import float32, int64

from localllm.kernels import simd
from localllm.kernels.cpu import SLAB
from localllm.kernels.cpu.matmul import tiles
from localllm.kernels.cpu.signature import device, inlined, load_argument
from localllm.kernels.machine import get_lane
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR

HAS_AVX2_DOTS = get_lane().has_avx2_only
MAX_BYTE_CODE = 63  # the largest code for products of bytes: two results of VPMADDUBSW fit into 16 bits
W0, W1, X, PRODUCT, ODD0, ODD1, LAST, LAST2 = (f"%ymm{i}" for i in range(8, 16))
vector = ir.VectorType(simd.F32, 8)
if HAS_AVX2_DOTS:
    binding.initialize_native_asmparser()  # LLVM needs this to parse assembly


def make_unpack(format):
    """Build a function that unpacks a row.

    It writes codes u8 [columns], scales and minimums f32 [columns / sub-block].
    """
    codes_of, scales, minimums = format.codes, format.scales, format.minimums
    store, skip = (simd.store_f32x8, 32) if format.sub_block == 32 else (simd.store_f32x16, 64)
    group_bytes, (chunk_codes, chunk_scales, chunk_minimums) = format.group_bytes, format.chunk or (None, None, None)

    @device
    def unpack(w, columns, codes, s_out, m_out):
        for _ in range(columns // 256):
            c0, c1, c2, c3 = codes_of(w)
            simd.store_u8x64(codes, c0)
            simd.store_u8x64(codes + 64, c1)
            simd.store_u8x64(codes + 128, c2)
            simd.store_u8x64(codes + 192, c3)
            store(s_out, scales(w))
            if minimums is not None:
                store(m_out, minimums(w))
            w, codes, s_out, m_out = w + group_bytes, codes + 256, s_out + skip, m_out + skip
        if chunk_codes is not None:
            for _ in range(columns % 256 // 64):
                simd.store_u8x64(codes, chunk_codes(w))
                simd.store_f32x2(s_out, chunk_scales(w))
                if chunk_minimums is not None:
                    simd.store_f32x2(m_out, chunk_minimums(w))
                w, codes, s_out, m_out = w + group_bytes // 4, codes + 64, s_out + 8, m_out + 8

    return unpack


def make_unpack_tile(format):
    unpack, sub_block, group_bytes = make_unpack(format), format.sub_block, format.group_bytes
    has_minimum, scale_bytes = format.minimums is not None, 64 * SLAB // sub_block

    @device
    def unpack_tile(a, tile, column, columns, scratch):
        s, m = scratch + tiles.VECTORS * 16 * SLAB, scratch + tiles.VECTORS * (16 * SLAB + scale_bytes)
        codes_rows = m + tiles.VECTORS * scale_bytes
        s_rows, m_rows = codes_rows + 16 * SLAB, codes_rows + 16 * SLAB + scale_bytes
        count, row_bytes, last = (
            columns // sub_block,
            load_argument(a, LINEAR.row_bytes),
            load_argument(a, LINEAR.rows) - 1,
        )
        first_row = load_argument(a, LINEAR.weights) + column // 256 * group_bytes
        stride = (count + 15) // 16 * 64
        for v in range(tiles.VECTORS):
            for i in range(16):
                row = first_row + min(tile * tiles.ROWS + v * 16 + i, last) * row_bytes
                unpack(row, columns, codes_rows + i * columns, s_rows + i * stride, m_rows + i * stride)
            tiles.transpose_codes(codes_rows, columns // 4, scratch + v * 16 * SLAB)
            tiles.transpose_words(s_rows, count, s + v * scale_bytes)
            if has_minimum:
                tiles.transpose_words(m_rows, count, m + v * scale_bytes)

    return unpack_tile


def make_sub_block(format, words):
    """Build a function that multiplies one sub-block of a tile in both planes.

    words: the offsets of its words in x.
    """
    has_minimum = bool(format.minimums)
    factor = float32(1.0 if has_minimum else -format.offset)
    dots = tiles.make_code_dots(words, format.largest)

    @inlined
    def sub_block(totals, w, x, low, x_stride, s, m, s_stride, c, n, stride):
        totals = tiles.force_totals(tiles.add_least(totals, factor, m if has_minimum else s, s_stride, n, stride))
        sums = dots(
            tiles.multiply_by_256(dots(tiles.zero_ints(), w, 16 * SLAB, x, x_stride)), w, 16 * SLAB, low, x_stride
        )
        return tiles.add_scaled(totals, sums, s, s_stride, c, stride)

    return sub_block


def make_tile(format):
    half, apart = format.sub_block == 16, format.sub_block // 4
    run = make_sub_block(format, tiles.GROUP_WORDS[:4] if half else tiles.GROUP_WORDS)
    second_half = make_sub_block(format, tiles.GROUP_WORDS[4:])
    chunk_run = make_sub_block(format, tiles.CHUNK_WORDS)
    has_chunks = format.chunk is not None

    @inlined
    def tile(totals, columns, w, s, m, s_stride, x, low, x_stride, c, n, stride):
        for i in range(columns // 256 * 8):
            k = i // 8 * 256 + i % 8 * 8
            v, high, rest = w + 16 * k, x + k, low + k
            totals = run(totals, v, high, rest, x_stride, s, m, s_stride, c, n, stride)
            s, m, n = s + 64, m + 64, n + apart
            if half:
                totals = second_half(totals, v, high, rest, x_stride, s, m, s_stride, c, n, stride)
                s, m, n = s + 64, m + 64, n + apart
            c += 8
        if has_chunks:
            for i in range(columns // 256 * 8, columns // 32):
                k = i // 2 * 64 + i % 2 * 8
                v, high, rest = w + 16 * k, x + k, low + k
                totals = chunk_run(totals, v, high, rest, x_stride, s, m, s_stride, c, n, stride)
                s, m, n, c = s + 64, m + 64, n + 8, c + 8
        return totals

    return tile


def make_precise_slab(format):
    """Build a function that unpacks a slab and multiplies it by all tokens in both planes; see make_slab."""
    if HAS_AVX2_DOTS:
        return make_assembly_slab(format, True)
    product, scale_bytes = make_tile(format), 64 * SLAB // format.sub_block

    @inlined
    def multiply(a, totals, columns, place, tokens, scratch):
        s, m = scratch + tiles.VECTORS * 16 * SLAB, scratch + tiles.VECTORS * (16 * SLAB + scale_bytes)
        x, low, width = (
            load_argument(a, LINEAR.high) + place,
            load_argument(a, LINEAR.low) + place,
            load_argument(a, LINEAR.columns),
        )
        c, n = load_argument(a, LINEAR.scales) + place // 4, load_argument(a, LINEAR.sums) + place // 4
        return product(totals, columns, scratch, s, m, scale_bytes, x, low, width, c, n, width // 4)

    return tiles.make_slab(format, make_unpack_tile(format), multiply)


def make_assembly_slab(format, is_exact):
    """Build the function of make_precise_slab for CPUs with AVX2 only.

    is_exact: whether both planes are multiplied, as 16-bit words. Two vectors of 16 rows are multiplied by the same
    tokens, one after the other, so activations, which come from the L2 or L3 cache, are read half as often (1.04 times
    as fast).
    """
    unpack_tile, fetch_next = make_unpack_tile(format), tiles.make_fetch_next(format.group_bytes)
    add_products = make_assembly_product(format, is_exact)

    @device
    def slab(a, tile, column, next_slab, tokens, scratch):
        columns = min(SLAB, load_argument(a, LINEAR.columns) - column)
        unpack_tile(a, tile, column, columns, scratch)
        width, y_stride = load_argument(a, LINEAR.columns), load_argument(a, LINEAR.y_stride)
        vectors = min(tiles.VECTORS, (load_argument(a, LINEAR.rows) - tile * tiles.ROWS + 15) // 16)
        for t in range(0, tokens, tiles.TOKENS):  # includes up to TOKENS - 1 surplus tokens, whose results are not used
            y = load_argument(a, LINEAR.y) + tile * tiles.ROWS * 4 + t * y_stride
            fetch_next(a, next_slab, t, tokens)
            for v in range(vectors):
                add_products(a, y + 64 * v, y_stride, v, columns, t * width + column, column == 0, scratch)

    return slab


def make_assembly_product(format, is_exact):
    """Build a function that adds the products of 16 rows and TOKENS tokens to y.

    is_first: whether it stores them instead.
    """
    scale_bytes, has_chunks = 64 * SLAB // format.sub_block, format.chunk is not None
    add_groups, add_chunks = (
        make_add_runs(format, words, is_exact, tiles.VECTORS * scale_bytes)
        for words in (tiles.GROUP_WORDS, tiles.CHUNK_WORDS)
    )
    activations, size = (LINEAR.words, 2) if is_exact else (LINEAR.high, 1)
    sums, unit = (LINEAR.sums, float32(1.0)) if is_exact else (LINEAR.high_sums, float32(256.0))
    sum_bytes = 8  # bytes of a run's sums
    if format.has_integer_scales:
        sums, sum_bytes = LINEAR.excess, 4

    @inlined
    def add_products(a, y, y_stride, v, columns, place, is_first, scratch):
        w, s = scratch + v * 16 * SLAB, scratch + tiles.VECTORS * 16 * SLAB + v * scale_bytes
        totals = scratch + tiles.VECTORS * (16 * SLAB + 2 * scale_bytes)  # overwrites the rows that were transposed
        x, run = load_argument(a, activations) + size * place, place // 32
        c, n, groups = (
            load_argument(a, LINEAR.scales) + 8 * run,
            load_argument(a, sums) + sum_bytes * run,
            columns // 256,
        )
        stride = load_argument(a, LINEAR.columns) // 32 * sum_bytes
        for i in range(tiles.TOKENS):
            simd.store_f32x16(totals + 64 * i, simd.splat_f32x16(float32(0.0)))
        if groups:
            add_groups(totals, w, x, s, c, n, stride, 8 * groups)
        if has_chunks and columns % 256:
            w, x, s, c = w + 4096 * groups, x + 256 * size * groups, s + 512 * groups, c + 64 * groups
            n = n + 64 * groups
            add_chunks(totals, w, x, s, c, n, stride, columns % 256 // 32)
        for i in range(tiles.TOKENS):
            products, place_in_y = simd.load_f32x16(totals + 64 * i) * simd.splat_f32x16(unit), y + i * y_stride
            simd.store_f32x16(place_in_y, products if is_first else products + simd.load_f32x16(place_in_y))

    return add_products


# ---- runs of a register tile in assembly, on CPUs with AVX2 but no dot product of bytes


def make_byte_products(words, largest):
    """Return the emitter of products of codes and bytes, and its number of tokens.

    emit(first token) -> (lines, sums). words: byte offsets of 4 columns in x; w has the codes of 16 rows, 64 bytes a
    word; largest: the largest code. sums: registers [token][half].
    """
    at_once = 32767 // (2 * 127 * largest)
    groups = [words[i : i + at_once] for i in range(0, len(words), at_once)]
    tokens = tiles.TOKENS if len(groups) == 1 else 2  # more groups than one need registers for sums of 32 bits, too
    sums = name_registers(0, tokens)
    narrow = sums if len(groups) == 1 else name_registers(2 * tokens, tokens)

    def emit(first):
        lines = []
        for i, group in enumerate(groups):
            lines += add_bytes(group, narrow, first)
            for sum_16, total in zip(flatten(narrow), flatten(sums), strict=True):
                lines.append(f"vpmaddwd {{constant}}, {sum_16}, {PRODUCT if i else total}")
                lines += [f"vpaddd {PRODUCT}, {total}, {total}"] * (i > 0)
        return lines, sums

    return emit, tokens


def name_registers(first, tokens):
    return [[f"%ymm{first + 2 * t + half}" for half in (0, 1)] for t in range(tokens)]


def flatten(rows):
    return [one for row in rows for one in row]


def add_bytes(words, sums, first):
    for i, word in enumerate(words):
        yield from load_codes(word, (W0, W1))
        for t, rows in enumerate(sums):
            yield f"vpbroadcastd {word}{{x{first + t}}}, {X}"
            yield from add_both("vpmaddubsw", "vpaddw", (W0, W1), rows, i == 0)


def add_both(multiply, add, weights, sums, is_first):
    """Emit the products of X and two registers of weights, added to two sums.

    The second product replaces X. Both are multiplied before one is added, which is 1.03 times as fast as in turn.
    """
    products = sums if is_first else (PRODUCT, X)
    yield from (f"{multiply} {X}, {each}, {to}" for each, to in zip(weights, products, strict=True))
    if not is_first:
        yield from (f"{add} {each}, {total}, {total}" for each, total in zip(products, sums, strict=True))


def load_codes(word, registers):
    return [f"vmovdqu {16 * word + 32 * half}({{w}}), {register}" for half, register in enumerate(registers)]


def make_word_products(words):
    """Return the emitter of products for x in words of 16 bits.

    Of every 4 columns the even ones come first (see quantize.py).
    """
    sums = name_registers(0, tiles.TOKENS)

    def emit(first):
        lines = []
        for i, word in enumerate(words):
            lines += load_codes(word, (W0, W1))
            for even, odd in ((W0, ODD0), (W1, ODD1)):
                lines += [f"vpsrlw $$8, {even}, {odd}", f"vpand {{constant}}, {even}, {even}"]
            for part, both in enumerate(((W0, W1), (ODD0, ODD1))):
                for t, rows in enumerate(sums):
                    lines.append(f"vpbroadcastd {2 * word + 4 * part}{{x{first + t}}}, {X}")
                    lines += add_both("vpmaddwd", "vpaddd", both, rows, i == part == 0)
        return lines, sums

    return emit, tiles.TOKENS


def emit_scaled_products(words, minimums_after):
    """Emit the sums of a run for all tokens, times integer scales.

    Also return their registers [token][half]. s: int16 [2 sub-blocks][16 rows][2], each scale twice; `minimums_after`
    bytes later factors of the tokens' sums of both sub-blocks, int16 [16 rows][2].
    """
    sums, codes = name_registers(0, tiles.TOKENS), ((W0, W1), (X, PRODUCT))
    products = ((ODD0, ODD1), (LAST, LAST2))  # [word][half]; the second half's begins as the token's columns
    lines = [f"vmovdqu {minimums_after + 32 * half}({{s}}), {codes[0][half]}" for half in (0, 1)]
    for t, rows in enumerate(sums):
        lines.append(f"vpbroadcastd {{n{t}}}, {X}")
        lines += [f"vpmaddwd {X}, {factors}, {total}" for factors, total in zip(codes[0], rows, strict=True)]
    for i in range(0, len(words), 2):
        two = words[i : i + 2]
        lines += load_codes(two[0], codes[0]) + load_codes(two[1], codes[1])
        for t, rows in enumerate(sums):
            for word, weights, (product, columns) in zip(two, codes, products, strict=True):
                lines.append(f"vpbroadcastd {word}{{x{t}}}, {columns}")
                lines += [f"vpmaddubsw {columns}, {weights[0]}, {product}"]
                lines += [f"vpmaddubsw {columns}, {weights[1]}, {columns}"]
            for half, (first, second, total) in enumerate(zip(*products, rows, strict=True)):
                lines.append(f"vpaddw {second}, {first}, {first}")
                lines.append(f"vpmaddwd {64 * (i // 4) + 32 * half}({{s}}), {first}, {first}")
                lines.append(f"vpaddd {first}, {total}, {total}")
    return lines, sums


def add_scaled_to_totals(sums, scales):
    """Emit totals + row scale * token scale * sum.

    scales: offset from s of the scale of the row's 256 columns.
    """
    yield from (f"vmovups {scales}({{s}}), {W0}", f"vmovups {scales + 32}({{s}}), {W1}")
    for t, rows in enumerate(sums):
        yield f"vbroadcastss {{c{t}}}, {X}"
        for half, (total, scale) in enumerate(zip(rows, (W0, W1), strict=True)):
            place = f"{64 * t + 32 * half}({{totals}})"
            yield from (f"vcvtdq2ps {total}, {total}", f"vmulps {X}, {total}, {total}")
            yield from (f"vfmadd213ps {place}, {scale}, {total}", f"vmovups {total}, {place}")


def add_to_totals(sums, first, scales, minimums):
    """Emit totals + row scale * token scale * sum + a term for the sum of the token's columns.

    That term is minimum of the row, or factor * scale of the row, * sum of the columns. scales, minimums: their offsets
    from s in bytes; None: no minimums.
    """
    columns_sum = scales // 16  # bytes from n
    yield from (f"vmovups {scales}({{s}}), {W0}", f"vmovups {scales + 32}({{s}}), {W1}")
    if minimums is not None:
        yield from (f"vmovups {minimums}({{s}}), {ODD0}", f"vmovups {minimums + 32}({{s}}), {ODD1}")
    for t, rows in enumerate(sums, first):
        yield from (f"vbroadcastss {{c{t}}}, {X}", f"vbroadcastss {columns_sum}{{n{t}}}, {PRODUCT}")
        if minimums is None:
            yield f"vmulps {{factor}}, {PRODUCT}, {PRODUCT}"
        for half, (total, scale, minimum) in enumerate(zip(rows, (W0, W1), (ODD0, ODD1), strict=True)):
            place = f"{64 * t + 32 * half}({{totals}})"
            yield f"vcvtdq2ps {total}, {total}"
            if minimums is None:
                yield f"vfmadd213ps {PRODUCT}, {X}, {total}"
            else:
                yield f"vmulps {X}, {total}, {total}"
            yield f"vfmadd213ps {place}, {scale}, {total}"
            if minimums is not None:
                yield f"vfmadd231ps {PRODUCT}, {minimum}, {total}"
            yield f"vmovups {total}, {place}"


def emit_run(format, words, is_exact, minimums_after):
    if format.has_integer_scales:
        lines, sums = emit_scaled_products(words, minimums_after)
        return [*lines, *add_scaled_to_totals(sums, minimums_after + 64)]
    lines = []
    for i, part in enumerate([words] if format.sub_block == 32 else [words[:4], words[4:]]):
        emit, tokens = make_word_products(part) if is_exact else make_byte_products(part, format.largest)
        minimums = minimums_after + 64 * i if format.minimums else None
        for first in range(0, tiles.TOKENS, tokens):
            products, sums = emit(first)
            lines += [*products, *add_to_totals(sums, first, 64 * i, minimums)]
    return lines


class AddressSteps:
    """The distances of addresses.

    From run to run they are in bytes, from token to token in units of the argument `stride`.
    """

    def __init__(self, format, is_exact):
        self.x, self.c, self.n = 16 if is_exact else 8, 8, 4 if format.has_integer_scales else 8
        self.s = 64 * 32 // format.sub_block
        smallest = min(self.c, self.n)
        self.strides = {"x": 4 * self.x // smallest, "c": self.c // smallest, "n": self.n // smallest}


def make_add_runs(format, words, is_exact, minimums_after):
    """Return an intrinsic (totals, w, x, s, c, n, stride, runs) that adds runs to totals f32 [TOKENS][16].

    words: offsets of a run's words in its group of 64 or 256 columns (CHUNK_WORDS or GROUP_WORDS). is_exact: x is in
    words. s: scales of the rows, f32 [sub-blocks][16], and `minimums_after` bytes later their minimums, or both in the
    form of a format with integer scales. c, n: the token's scale, f32, and the sum of its columns, f32, or of both
    halves of a run, int16. stride: bytes between tokens of c or n, whichever is smaller.
    """
    step = AddressSteps(format, is_exact)
    changed = ["w", "s", "near_x", "far_x", "near_c", "far_c", "near_n", "far_n", "runs"]
    inputs = ["totals", "stride", "factor", "constant"]
    names = {name: f"${i}" for i, name in enumerate(changed + inputs)}
    for name, scale in step.strides.items():
        for t, end in enumerate(("near", "near", "far", "far")):
            names[f"{name}{t}"] = f"({{{end}_{name}}}{f',{{stride}},{scale}' if t % 2 else ''})".format_map(names)
    lines = emit_loop(emit_run(format, words, is_exact, minimums_after), words, step)
    text = "\n".join(line.format_map(names) for line in lines)
    constants = [ir.Constant(vector, [-float(format.offset)] * 8), create_byte_mask() if is_exact else create_ones()]
    if format.has_integer_scales:
        constants = []  # their registers hold products
    clobbered = [f"~{{xmm{i}}}" for i in range(16 - len(constants))]
    tied = [str(i) for i in range(len(changed))]
    asked = ["=&r"] * len(changed) + ["r"] * 2 + ["x"] * len(constants)
    constraints = ",".join([*asked, *tied, *clobbered, "~{memory}", "~{flags}"])

    @simd.operation(None, *[int64] * 8)
    def add_runs(builder, totals, w, x, s, c, n, stride, runs):
        values = [totals, stride, *constants, w, s]
        for near, scale in zip((x, c, n), step.strides.values(), strict=True):
            values += [near, builder.add(near, builder.mul(stride, simd.I64(2 * scale)))]
        values.append(runs)
        kind = ir.FunctionType(ir.LiteralStructType([simd.I64] * len(changed)), [value.type for value in values])
        builder.asm(kind, text, constraints, values, True)

    return add_runs


def create_ones():
    """Return 16 words of 1, with which VPMADDWD adds neighbours."""
    return ir.Constant(ir.VectorType(simd.I16, 16), [1] * 16)


def create_byte_mask():
    return ir.Constant(ir.VectorType(simd.I8, 32), [255, 0] * 16)


def emit_loop(lines, words, step):
    """Emit a loop over runs of 32 columns, which are striped: 8 columns apart within a group of 64 or 256."""
    group = 64 * (words[2] // 16)  # columns: 256 or 64
    runs = group // 32
    rest = group // 8 - runs  # from the group's last run to the next group's first, in runs
    yield from ("1:", *lines, f"addq $${step.s}, {{s}}", "addq $$128, {w}")
    for name, size in (("x", step.x), ("c", step.c), ("n", step.n)):
        yield from (f"addq $${size}, {{{end}_{name}}}" for end in ("near", "far"))
    yield from ("decq {runs}", f"testq $${runs - 1}, {{runs}}", "jne 1b", f"addq $${128 * rest}, {{w}}")
    yield from (f"addq $${step.x * rest}, {{{end}_x}}" for end in ("near", "far"))
    yield from ("testq {runs}, {runs}", "jne 1b")
