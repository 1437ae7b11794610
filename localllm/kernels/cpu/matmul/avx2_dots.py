"""The runs of a register tile on CPUs with AVX2 but no dot product of bytes, in assembly.

16 rows times TOKENS tokens, over 32 or 16 columns that share scales. There are two ways to multiply them:

- codes of few bits times bytes. VPMADDUBSW adds two products into 16 bits, and as many of its results as fit there are
  added (8 of 4-bit codes: 15 * 127 * 2 * 8 = 30480) before VPMADDWD widens the sums to 32 bits: 17 instructions for 256
  products of 4-bit codes, where widening each result takes 32.
- codes of any size times words of 16 bits, which are both planes of the activations at once: 32 instructions for 256
  products, and 4 to make words of the codes, which all tokens share.

Compilers hoist the multiplications and have more to keep than 16 registers then (97 instead of 138 thousand million
products a second, a prototype in C), so the order of the instructions and the registers are fixed here. The totals do
not fit next to the sums: they lie in memory, and a token's take 11 or 12 instructions for a sub-block (21 to 38 where
LLVM moved them to and fro).
"""

from llvmlite import binding, ir
from numba import types

from localllm.kernels.cpu.matmul.tiles import TOKENS
from localllm.kernels.machine import this_lane
from localllm.kernels.simd import F32, I8, I16, I64, operation

HAS_AVX2_DOTS = this_lane().has_avx2_only
MOST_IN_BYTES = 63  # the largest code that goes by bytes: two results of VPMADDUBSW fit into 16 bits
W0, W1, X, PRODUCT, ODD0, ODD1 = (f"%ymm{i}" for i in range(8, 14))
FACTOR, ALL = "$12", "$13"  # constants; LLVM has registers 14 and 15 for them
int64 = types.int64
if HAS_AVX2_DOTS:
    binding.initialize_native_asmparser()  # LLVM reads assembly only then


def byte_products(words, largest):
    """Return `emit(first token) -> (lines, sums)` for codes up to `largest` times bytes; sums: registers [token][half].

    words: byte offsets of 4 columns in x; w has the codes of 16 rows, 64 bytes a word.
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
                lines.append(f"vpmaddwd {ALL}, {sum_16}, {PRODUCT if i else total}")
                lines += [f"vpaddd {PRODUCT}, {total}, {total}"] * (i > 0)
        return lines, sums

    return emit, tokens, ir.Constant(ir.VectorType(I16, 16), [1] * 16)


def halves(first, tokens):
    """Return registers [token][half] from number `first` on."""
    return [[f"%ymm{first + 2 * t + half}" for half in (0, 1)] for t in range(tokens)]


def flat(rows):
    return [one for row in rows for one in row]


def add_bytes(words, sums, first):
    """Emit the sums of the products of these words, in 16 bits."""
    for i, word in enumerate(words):
        yield from (f"vmovdqu {16 * word}({{w}}), {W0}", f"vmovdqu {16 * word + 32}({{w}}), {W1}")
        for t, rows in enumerate(sums):
            yield f"vpbroadcastd {word}{{x{first + t}}}, {X}"
            for weights, total in zip((W0, W1), rows, strict=True):
                yield f"vpmaddubsw {X}, {weights}, {PRODUCT if i else total}"
                if i:
                    yield f"vpaddw {PRODUCT}, {total}, {total}"


def word_products(words):
    """Make products for x in words of 16 bits, of each 4 columns first the even ones (see quantize.py)."""
    sums = halves(0, TOKENS)

    def emit(first):
        lines = []
        for i, word in enumerate(words):
            for half, (even, odd) in enumerate(((W0, ODD0), (W1, ODD1))):
                lines.append(f"vmovdqu {16 * word + 32 * half}({{w}}), {even}")
                lines += [f"vpsrlw $$8, {even}, {odd}", f"vpand {ALL}, {even}, {even}"]
            for part, both in enumerate(((W0, W1), (ODD0, ODD1))):
                for t, rows in enumerate(sums):
                    lines.append(f"vpbroadcastd {2 * word + 4 * part}{{x{first + t}}}, {X}")
                    for weights, total in zip(both, rows, strict=True):
                        lines.append(f"vpmaddwd {X}, {weights}, {PRODUCT if i or part else total}")
                        lines += [f"vpaddd {PRODUCT}, {total}, {total}"] * bool(i or part)
        return lines, sums

    return emit, TOKENS, ir.Constant(ir.VectorType(I8, 32), [255, 0] * 16)


def add_to_totals(sums, first, part, minimums_after):
    """Emit totals + scale of the row * scale of the token * sum + the term for the sum of the token's columns.

    That term is minimum of the row * sum of the columns, or factor * scale of the row * sum of the columns.

    part: of the run, 0 or 1. minimums_after: the bytes from scales to minimums; None without minimums.
    """
    has_minimum, scales = minimums_after is not None, 64 * part
    yield from (f"vmovups {scales}({{s}}), {W0}", f"vmovups {scales + 32}({{s}}), {W1}")
    if has_minimum:
        minimums = scales + minimums_after
        yield from (f"vmovups {minimums}({{s}}), {ODD0}", f"vmovups {minimums + 32}({{s}}), {ODD1}")
    for t, rows in enumerate(sums, first):
        yield from (f"vbroadcastss {{c{t}}}, {X}", f"vbroadcastss {4 * part}{{n{t}}}, {PRODUCT}")
        if not has_minimum:
            yield f"vmulps {FACTOR}, {PRODUCT}, {PRODUCT}"
        for half, (total, scale, minimum) in enumerate(zip(rows, (W0, W1), (ODD0, ODD1), strict=True)):
            place = f"{64 * t + 32 * half}({{totals}})"
            yield f"vcvtdq2ps {total}, {total}"
            if has_minimum:
                yield f"vmulps {X}, {total}, {total}"
            else:
                yield f"vfmadd213ps {PRODUCT}, {X}, {total}"
            yield f"vfmadd213ps {place}, {scale}, {total}"
            if has_minimum:
                yield f"vfmadd231ps {PRODUCT}, {minimum}, {total}"
            yield f"vmovups {total}, {place}"


def make_add_runs(sub_block, words, largest, factor, minimums_after):
    """Return an intrinsic (totals, w, x, bytes between tokens of x, s, c, n, bytes between tokens of c and n, runs).

    It adds so many runs of 32 columns to totals f32 [TOKENS][16] in memory, in a loop of its own: LLVM moved twelve
    addresses to and fro between blocks of assembly that added one sub-block each.

    sub_block: columns, 16 or 32, that share scales. words: where the words of a run lie in its group of 64 or 256
    columns (CHUNK_WORDS or GROUP_WORDS). largest: of the codes that go by bytes; None: by words. factor: by what scales
    times sums are added; None: minimums times sums are. s: scales of the rows, f32 [sub-blocks][16], and
    `minimums_after` bytes later their minimums. c, n: the token's scale and the sum of its columns, f32.
    """
    lines, tokens, constant = [], TOKENS, None
    halves_of_run = [words] if sub_block == 32 else [words[:4], words[4:]]
    for i, part in enumerate(halves_of_run):
        emit, tokens, constant = word_products(part) if largest is None else byte_products(part, largest)
        for first in range(0, TOKENS, tokens):
            products, sums = emit(first)
            lines += [*products, *add_to_totals(sums, first, i, minimums_after if factor is None else None)]
    inputs = ["totals", "x_stride", "stride"]
    changed = ["w", "s", "near_x", "far_x", "near_c", "far_c", "near_n", "far_n", "runs"]
    names = {name: f"${i}" for i, name in enumerate(changed)} | {name: f"${9 + i}" for i, name in enumerate(inputs)}
    for name, stride in (("x", "x_stride"), ("c", "stride"), ("n", "stride")):
        near, far, step = names[f"near_{name}"], names[f"far_{name}"], names[stride]
        places = f"({near})", f"({near},{step})", f"({far})", f"({far},{step})"
        names |= {f"{name}{t}": place for t, place in enumerate(places)}
    lines = "\n".join([*loop(lines, sub_block, words, 2 if largest is None else 1)]).format_map(names)
    clobbered = [f"~{{xmm{i}}}" for i in range(14)]
    tied = [str(i) for i in range(len(changed))]
    constraints = ",".join(["=&r"] * len(changed) + ["r"] * 3 + ["x", "x", *tied, *clobbered, "~{memory}", "~{flags}"])
    factors = ir.Constant(ir.VectorType(F32, 8), [factor or 0.0] * 8)

    @operation(None, *[int64] * 9)
    def add_runs(builder, totals, w, x, x_stride, s, c, n, stride, runs):
        values = [totals, x_stride, stride, factors, constant, w, s]
        for near, step in ((x, x_stride), (c, stride), (n, stride)):
            values += [near, builder.add(near, builder.shl(step, I64(1)))]
        values.append(runs)
        kind = ir.FunctionType(ir.LiteralStructType([I64] * len(changed)), [value.type for value in values])
        builder.asm(kind, lines, constraints, values, True)

    return add_runs


def loop(lines, sub_block, words, size):
    """Emit a loop over runs of 32 columns, which are striped: 8 columns apart within a group of 64 or 256.

    size: bytes of a column of x.
    """
    group = 64 * (words[2] // 16)  # columns: 256 or 64
    rest = group - group // 4
    yield from ("1:", *lines)
    yield from (f"addq $${32 * 64 // sub_block}, {{s}}", "addq $$128, {w}")
    yield from (f"addq $${8 * size}, {{{end}_x}}" for end in ("near", "far"))
    yield from (f"addq $$8, {{{end}_{name}}}" for name in "cn" for end in ("near", "far"))
    yield from ("decq {runs}", f"testq $${group // 32 - 1}, {{runs}}", "jne 1b", f"addq $${16 * rest}, {{w}}")
    yield from (f"addq $${size * rest}, {{{end}_x}}" for end in ("near", "far"))
    yield from ("testq {runs}, {runs}", "jne 1b")
