"""The runs of a register tile on CPUs with AVX2 but no dot product of bytes, in assembly.

16 rows times TOKENS tokens, over 32 or 16 columns that share scales. There are three ways to multiply them:

- codes of few bits times bytes. VPMADDUBSW adds two products into 16 bits, and as many of its results as fit there are
  added (8 of 4-bit codes: 15 * 127 * 2 * 8 = 30480) before VPMADDWD widens the sums to 32 bits: 17 instructions for 256
  products of 4-bit codes, where widening each result takes 32.
- the same, and VPMADDWD multiplies by integer scales while it widens, so that a run of 32 columns is converted to
  floats once. 1.2 times as fast for Q6_K, whose sums are widened every 8 columns anyway and whose scales are for 16.
- codes of any size times words of 16 bits, which are both planes of the activations at once: 32 instructions for 256
  products, and 4 to make words of the codes, which all tokens share.

Compilers hoist the multiplications and have more to keep than 16 registers then (97 instead of 138 thousand million
products a second, a prototype in C), so the order of the instructions and the registers are fixed here. The totals do
not fit next to the sums: they lie in memory, and a token's take 11 or 12 instructions for a sub-block (21 to 38 where
LLVM moved them to and fro). The loop over runs is assembly, too: LLVM moved twelve addresses to and fro between
sub-blocks.

Names in braces stand for operands: addresses, the tokens' x0 to x3, c0 to c3 and n0 to n3, and constants.
"""

from llvmlite import binding, ir
from numba import types

from localllm.kernels.cpu.matmul.tiles import TOKENS
from localllm.kernels.machine import this_lane
from localllm.kernels.simd import F32, I8, I16, I64, operation

HAS_AVX2_DOTS = this_lane().has_avx2_only
MOST_IN_BYTES = 63  # the largest code that goes by bytes: two results of VPMADDUBSW fit into 16 bits
W0, W1, X, PRODUCT, ODD0, ODD1, LAST, LAST2 = (f"%ymm{i}" for i in range(8, 16))
int64, vector = types.int64, ir.VectorType(F32, 8)
if HAS_AVX2_DOTS:
    binding.initialize_native_asmparser()  # LLVM reads assembly only then


def byte_products(words, largest):
    """Return `emit(first token) -> (lines, sums)` for codes up to `largest` times bytes, and its number of tokens.

    words: byte offsets of 4 columns in x; w has the codes of 16 rows, 64 bytes a word. sums: registers [token][half].
    """
    at_once = 32767 // (2 * 127 * largest)
    groups = [words[i : i + at_once] for i in range(0, len(words), at_once)]
    tokens = TOKENS if len(groups) == 1 else 2  # more groups than one need registers for sums of 32 bits, too
    sums = halves(0, tokens)
    narrow = sums if len(groups) == 1 else halves(2 * tokens, tokens)

    def emit(first):
        lines = []
        for i, group in enumerate(groups):
            lines += add_bytes(group, narrow, first)
            for sum_16, total in zip(flat(narrow), flat(sums), strict=True):
                lines.append(f"vpmaddwd {{constant}}, {sum_16}, {PRODUCT if i else total}")
                lines += [f"vpaddd {PRODUCT}, {total}, {total}"] * (i > 0)
        return lines, sums

    return emit, tokens


def halves(first, tokens):
    """Return registers [token][half] from number `first` on."""
    return [[f"%ymm{first + 2 * t + half}" for half in (0, 1)] for t in range(tokens)]


def flat(rows):
    return [one for row in rows for one in row]


def add_bytes(words, sums, first):
    """Emit the sums of the products of these words, in 16 bits."""
    for i, word in enumerate(words):
        yield from load_codes(word, (W0, W1))
        for t, rows in enumerate(sums):
            yield f"vpbroadcastd {word}{{x{first + t}}}, {X}"
            yield from add_both("vpmaddubsw", "vpaddw", (W0, W1), rows, i == 0)


def add_both(multiply, add, weights, sums, is_first):
    """Emit the products of X and two registers of weights, added to two sums. The second product replaces X.

    Both are multiplied before one is added: 1.03 times as fast as in turn.
    """
    products = sums if is_first else (PRODUCT, X)
    yield from (f"{multiply} {X}, {each}, {to}" for each, to in zip(weights, products, strict=True))
    if not is_first:
        yield from (f"{add} {each}, {total}, {total}" for each, total in zip(products, sums, strict=True))


def load_codes(word, registers):
    """Emit the loads of a word's codes, 8 rows to a register."""
    return [f"vmovdqu {16 * word + 32 * half}({{w}}), {register}" for half, register in enumerate(registers)]


def word_products(words):
    """Make products for x in words of 16 bits, of every 4 columns the even ones first (see quantize.py)."""
    sums = halves(0, TOKENS)

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

    return emit, TOKENS


def scaled_products(words, minimums_after):
    """Emit the sums of a run for all tokens, times integer scales, and the registers [token][half] that have them.

    s: int16 [2 sub-blocks][16 rows][2], each scale twice; `minimums_after` bytes later factors of the tokens' sums of
    both sub-blocks, int16 [16 rows][2].
    """
    sums, codes = halves(0, TOKENS), ((W0, W1), (X, PRODUCT))
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
    """Emit totals + scale of the row's 256 columns, `scales` bytes after s, * scale of the token * sum."""
    yield from (f"vmovups {scales}({{s}}), {W0}", f"vmovups {scales + 32}({{s}}), {W1}")
    for t, rows in enumerate(sums):
        yield f"vbroadcastss {{c{t}}}, {X}"
        for half, (total, scale) in enumerate(zip(rows, (W0, W1), strict=True)):
            place = f"{64 * t + 32 * half}({{totals}})"
            yield from (f"vcvtdq2ps {total}, {total}", f"vmulps {X}, {total}, {total}")
            yield from (f"vfmadd213ps {place}, {scale}, {total}", f"vmovups {total}, {place}")


def add_to_totals(sums, first, scales, minimums):
    """Emit totals + scale of the row * scale of the token * sum + the term for the sum of the token's columns.

    That term is minimum of the row * sum of the columns, or factor * scale of the row * sum of the columns.

    scales, minimums: bytes from s to them; no minimums: None.
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


def run_lines(format, words, is_exact, minimums_after):
    """Return the instructions of a run of 32 columns, see make_add_runs."""
    if format.has_integer_scales:
        lines, sums = scaled_products(words, minimums_after)
        return [*lines, *add_scaled_to_totals(sums, minimums_after + 64)]
    lines = []
    for i, part in enumerate([words] if format.sub_block == 32 else [words[:4], words[4:]]):
        emit, tokens = word_products(part) if is_exact else byte_products(part, format.largest)
        minimums = minimums_after + 64 * i if format.minimums else None
        for first in range(0, TOKENS, tokens):
            products, sums = emit(first)
            lines += [*products, *add_to_totals(sums, first, 64 * i, minimums)]
    return lines


class Step:
    """The distances of addresses: from run to run in bytes, from token to token in units of the argument `stride`."""

    def __init__(self, format, is_exact):
        self.x, self.c, self.n = 16 if is_exact else 8, 8, 4 if format.has_integer_scales else 8
        self.s = 64 * 32 // format.sub_block
        smallest = min(self.c, self.n)
        self.strides = {"x": 4 * self.x // smallest, "c": self.c // smallest, "n": self.n // smallest}


def make_add_runs(format, words, is_exact, minimums_after):
    """Return an intrinsic (totals, w, x, s, c, n, stride, runs).

    It adds `runs` runs of 32 columns to totals f32 [TOKENS][16] in memory.

    words: where the words of a run lie in its group of 64 or 256 columns (CHUNK_WORDS or GROUP_WORDS). is_exact: x is
    in words. s: scales of the rows, f32 [sub-blocks][16], and `minimums_after` bytes later their minimums, or both as a
    format with integer scales has them. c, n: the token's scale, f32, and the sum of its columns, f32, or of both
    halves of a run, int16. stride: bytes between tokens of c or n, whichever is smaller.
    """
    step = Step(format, is_exact)
    changed = ["w", "s", "near_x", "far_x", "near_c", "far_c", "near_n", "far_n", "runs"]
    inputs = ["totals", "stride", "factor", "constant"]
    names = {name: f"${i}" for i, name in enumerate(changed + inputs)}
    for name, scale in step.strides.items():
        for t, end in enumerate(("near", "near", "far", "far")):
            names[f"{name}{t}"] = f"({{{end}_{name}}}{f',{{stride}},{scale}' if t % 2 else ''})".format_map(names)
    lines = loop(run_lines(format, words, is_exact, minimums_after), words, step)
    text = "\n".join(line.format_map(names) for line in lines)
    constants = [ir.Constant(vector, [-float(format.offset)] * 8), byte_mask() if is_exact else ones()]
    if format.has_integer_scales:
        constants = []  # their registers hold products
    clobbered = [f"~{{xmm{i}}}" for i in range(16 - len(constants))]
    tied = [str(i) for i in range(len(changed))]
    asked = ["=&r"] * len(changed) + ["r"] * 2 + ["x"] * len(constants)
    constraints = ",".join([*asked, *tied, *clobbered, "~{memory}", "~{flags}"])

    @operation(None, *[int64] * 8)
    def add_runs(builder, totals, w, x, s, c, n, stride, runs):
        values = [totals, stride, *constants, w, s]
        for near, scale in zip((x, c, n), step.strides.values(), strict=True):
            values += [near, builder.add(near, builder.mul(stride, I64(2 * scale)))]
        values.append(runs)
        kind = ir.FunctionType(ir.LiteralStructType([I64] * len(changed)), [value.type for value in values])
        builder.asm(kind, text, constraints, values, True)

    return add_runs


def ones():
    """Return 16 words of 1: VPMADDWD with them adds neighbours."""
    return ir.Constant(ir.VectorType(I16, 16), [1] * 16)


def byte_mask():
    """Return a mask that keeps the even bytes."""
    return ir.Constant(ir.VectorType(I8, 32), [255, 0] * 16)


def loop(lines, words, step):
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
