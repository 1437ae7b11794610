"""NVFP4: blocks of 64 weights, 4-bit floats whose sub-blocks of 16 have an 8-bit float scale (UE4M3)."""

from llvmlite import ir
from numba import types

from localllm.kernels import simd
from localllm.kernels.cpu.signature import device
from localllm.kernels.formats.group_format import GroupFormat, split_nibbles
from localllm.quant.formats import BY_NAME, LAYOUTS

BYTES, LAYOUT = BY_NAME["NVFP4"].bytes, LAYOUTS["NVFP4"]
CODES, OFFSET = LAYOUT.codes[0].at, -min(LAYOUT.values)
value = simd.make_lookup(*(number + OFFSET for number in LAYOUT.values))


@device
def load_two_blocks(address):
    return simd.concatenate_u8x64(simd.load_u8x32(address + CODES), simd.load_u8x32(address + BYTES + CODES))


@device
def read_codes(address):
    """Read the codes of four blocks as four striped u8x64: entries of the value table plus OFFSET.

    In a block, the low nibbles of 8 bytes are the first 8 of 16 weights, the high nibbles the last 8.
    """
    c0, c2, c1, c3 = split_nibbles(load_two_blocks(address), load_two_blocks(address + 2 * BYTES))
    return value(c0), value(c1), value(c2), value(c3)


@simd.operation(simd.f32x16, types.int64)
def read_scales(builder, address):
    """Return half of the 16 scales of a group, UE4M3 in the first 4 bytes of each of four blocks: f32x16.

    The topmost bit is ignored, and 127 (not a number) counts as zero. Moved to a float16's position, the other bits
    give a value 2 ** 8 times too small, subnormal or not.
    """
    words = ir.Constant(ir.VectorType(simd.I32, 4), None)
    for block in range(4):
        word = simd.load_value(builder, builder.add(address, simd.I64(block * BYTES)), simd.I32)
        words = builder.insert_element(words, word, simd.I32(block))
    bytes_ = builder.bitcast(words, simd.u8x16.llvm)
    is_nan = builder.icmp_unsigned("==", bytes_, simd.constant_like(bytes_, 127))
    bytes_ = builder.select(is_nan, ir.Constant(ir.VectorType(simd.I8, 16), None), bytes_)
    bytes_ = builder.and_(bytes_, simd.constant_like(bytes_, 127))
    halves = builder.zext(bytes_, ir.VectorType(simd.I16, 16))
    numbers = simd.widen_half(builder, builder.shl(halves, simd.constant_like(halves, 7)))
    return builder.fmul(numbers, simd.constant_like(numbers, 128.0))


GROUPS = {
    "NVFP4": GroupFormat(
        "NVFP4",
        16,
        4 * BYTES,
        read_codes,
        OFFSET,
        OFFSET + max(LAYOUT.values),
        device(lambda address: read_scales(address)),
    )
}
