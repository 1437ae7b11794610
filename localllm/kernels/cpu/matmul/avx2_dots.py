"""The products of a register tile on CPUs with AVX2 but no dot product of bytes, in assembly.

There are two ways to multiply 16 rows by some tokens, over a sub-block of 32 or 16 columns:

- `make_byte_dots`: codes of few bits times bytes. VPMADDUBSW adds two products into 16 bits, and as many of its results
  as fit there are added (8 of 4-bit codes: 15 * 127 * 2 * 8 = 30480) before VPMADDWD widens the sums to 32 bits: 17
  instructions for 256 products of 4-bit codes, where widening each result takes 32.
- `make_word_dots`: codes of any size times words of 16 bits, which are both planes of the activations at once: 32
  instructions for 256 products, and 4 to make words of the codes, which all tokens share.

Compilers hoist the multiplications and have more to keep than 16 registers then (97 instead of 138 thousand million
products a second, a prototype in C), so the order of the instructions and the registers are fixed here.
"""

from llvmlite import binding, ir
from numba import types

from localllm.kernels.cpu.matmul.tiles import TOKENS, ints
from localllm.kernels.machine import this_lane
from localllm.kernels.simd import I8, I16, I32, I64, as_tuple, operation, shuffled

HAS_AVX2_DOTS = this_lane().has_avx2_only
MOST_IN_BYTES = 63  # the largest code that goes by bytes: two results of VPMADDUBSW fit into 16 bits
EIGHT = ir.VectorType(I32, 8)  # the sums of 8 rows, a register
W0, W1, X, PRODUCT, ODD0, ODD1 = FIXED = [f"%ymm{i}" for i in range(10, 16)]
int64 = types.int64
if HAS_AVX2_DOTS:
    binding.initialize_native_asmparser()  # LLVM reads assembly only then


def make_byte_dots(words, largest):
    """Return an intrinsic (sums, w, any, x, bytes between tokens of x) -> the dot products alone.

    words: byte offsets of 4 columns in x; w has codes up to `largest` for 16 rows, 64 bytes a word.
    """
    at_once = 32767 // (2 * 127 * largest)
    groups = [words[i : i + at_once] for i in range(0, len(words), at_once)]
    tokens = TOKENS if len(groups) == 1 else 2  # more groups than one need registers for sums of 32 bits, too

    def emit(sums, address):
        if len(groups) == 1:
            return [*add_bytes(groups[0], sums, address), *(f"vpmaddwd {{all}}, {one}, {one}" for one in flat(sums))]
        narrow = [[f"%ymm{6 + 2 * t + half}" for half in (0, 1)] for t in range(tokens)]
        lines = []
        for i, group in enumerate(groups):
            lines += add_bytes(group, narrow, address)
            for sum_16, total in zip(flat(narrow), flat(sums), strict=True):
                lines.append(f"vpmaddwd {{all}}, {sum_16}, {PRODUCT if i else total}")
                lines += [f"vpaddd {PRODUCT}, {total}, {total}"] * (i > 0)
        return lines

    return make_dots(emit, tokens, ir.Constant(ir.VectorType(I16, 16), [1] * 16))


def flat(rows):
    return [one for row in rows for one in row]


def add_bytes(words, sums, address):
    """Emit the sums of the products of these words, in 16 bits; sums: registers [token][half]."""
    for i, word in enumerate(words):
        yield from (f"vmovdqu {16 * word}({{w}}), {W0}", f"vmovdqu {16 * word + 32}({{w}}), {W1}")
        for t, halves in enumerate(sums):
            yield f"vpbroadcastd {address(t, word)}, {X}"
            for weights, total in zip((W0, W1), halves, strict=True):
                yield f"vpmaddubsw {X}, {weights}, {PRODUCT if i else total}"
                if i:
                    yield f"vpaddw {PRODUCT}, {total}, {total}"


def make_word_dots(words):
    """Return the same for x in words of 16 bits, of each 4 columns first the even ones (see quantize.py)."""

    def emit(sums, address):
        lines = []
        for i, word in enumerate(words):
            for half, (even, odd) in enumerate(((W0, ODD0), (W1, ODD1))):
                lines.append(f"vmovdqu {16 * word + 32 * half}({{w}}), {even}")
                lines += [f"vpsrlw $$8, {even}, {odd}", f"vpand {{all}}, {even}, {even}"]
            for part, both in enumerate(((W0, W1), (ODD0, ODD1))):
                for t, halves in enumerate(sums):
                    lines.append(f"vpbroadcastd {address(t, 2 * word + 4 * part)}, {X}")
                    for weights, total in zip(both, halves, strict=True):
                        lines.append(f"vpmaddwd {X}, {weights}, {PRODUCT if i or part else total}")
                        lines += [f"vpaddd {PRODUCT}, {total}, {total}"] * bool(i or part)
        return lines

    return make_dots(emit, TOKENS, ir.Constant(ir.VectorType(I8, 32), [255, 0] * 16))


def make_dots(emit, tokens, constant):
    """Return the intrinsic of `emit(registers [token][half], address of (token, byte)) -> lines`, for so many tokens.

    {w} stands in them for the address of the weights, {all} for a constant vector.
    """
    count = 2 * tokens
    w, x, third, stride, everywhere = (f"${count + i}" for i in range(5))
    bases = [f"({x})", f"({x},{stride})", f"({third})", f"({third},{stride})"]
    registers = [[f"${2 * t}", f"${2 * t + 1}"] for t in range(tokens)]
    lines = emit(registers, lambda token, byte: f"{byte}{bases[token]}")
    text = "\n".join(lines).replace("{w}", w).replace("{all}", everywhere)
    used = [f"~{{xmm{i}}}" for i in range(6, 16) if f"%ymm{i}" in text]
    constraints = ",".join(["=&x"] * count + ["r"] * 4 + ["x", *used, "~{memory}"])

    @operation(ints, ints, int64, int64, int64, int64)
    def dots(builder, sums, w, w_stride, x, x_stride):
        halves = []
        for _ in range(0, TOKENS, tokens):
            third = builder.add(x, builder.shl(x_stride, I64(1)))
            inputs = [w, x, third, x_stride, constant]
            results = ir.LiteralStructType([EIGHT] * count)
            kind = ir.FunctionType(results, [value.type for value in inputs])
            products = builder.asm(kind, text, constraints, inputs, side_effect=True)
            halves += [builder.extract_value(products, i) for i in range(count)]
            x = third
        pairs = zip(halves[::2], halves[1::2], strict=True)
        return as_tuple(builder, [shuffled(builder, *pair, range(16)) for pair in pairs])

    return dots
