"""Sums of squared activations per column, for importance matrices (localllm.services.imatrix)."""

from localllm.kernels.arguments import ADD_SQUARES
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import fma_f32x16, load_f32x16, load_i64, store_f32x16

BLOCK = 64  # columns: vectors side by side hide what a sum of one waits for


@device
def add_block(x, stride, tokens, sums):
    """The squares of BLOCK columns."""
    s0, s1 = load_f32x16(sums), load_f32x16(sums + 64)
    s2, s3 = load_f32x16(sums + 128), load_f32x16(sums + 192)
    for _ in range(tokens):
        v0, v1, v2, v3 = load_f32x16(x), load_f32x16(x + 64), load_f32x16(x + 128), load_f32x16(x + 192)
        s0, s1 = fma_f32x16(v0, v0, s0), fma_f32x16(v1, v1, s1)
        s2, s3 = fma_f32x16(v2, v2, s2), fma_f32x16(v3, v3, s3)
        x += stride
    store_f32x16(sums, s0)
    store_f32x16(sums + 64, s1)
    store_f32x16(sums + 128, s2)
    store_f32x16(sums + 192, s3)


@device
def add_vector(x, stride, tokens, sums):
    """The squares of 16 columns."""
    total = load_f32x16(sums)
    for _ in range(tokens):
        value = load_f32x16(x)
        total = fma_f32x16(value, value, total)
        x += stride
    store_f32x16(sums, total)


@kernel
def add_squares(a, part, parts, thread):
    """sums += x^2 over the tokens. The parts share the columns, so the result does not depend on their number."""
    tokens, stride = load_i64(argument(a, ADD_SQUARES.count)), argument(a, ADD_SQUARES.stride)
    columns = argument(a, ADD_SQUARES.columns)
    blocks = (columns + BLOCK - 1) // BLOCK
    for block in range(blocks * part // parts, blocks * (part + 1) // parts):
        x, sums = argument(a, ADD_SQUARES.x) + block * 4 * BLOCK, argument(a, ADD_SQUARES.sums) + block * 4 * BLOCK
        if columns - block * BLOCK >= BLOCK:
            add_block(x, stride, tokens, sums)
        else:
            for i in range(0, (columns - block * BLOCK) * 4, 64):
                add_vector(x + i, stride, tokens, sums + i)
