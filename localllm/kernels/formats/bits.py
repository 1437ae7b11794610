"""Q1_0 and Q2_0: codes of one bit or two, weight by weight, the lowest bits of a byte first."""

from localllm.kernels.cpu.signature import device
from localllm.kernels.formats.group_format import ChunkFormat, GroupFormat
from localllm.kernels.formats.striped import four_by_16
from localllm.kernels.simd import (
    concatenate_u8x32,
    constant_u8,
    load_f16,
    load_u8x16,
    make_flags,
    make_gather_f16,
    make_shift,
    make_shuffle,
    pair_f32x2,
    planes_of,
    u8x16,
    u8x64,
)
from localllm.quant.formats import BY_NAME
from localllm.quant.layouts import LAYOUTS

RUNS, STRIPES = range(8), range(4)

# ---- Q2_0 -----------------------------------------------------------------------------------------------------------

Q2_BYTES, Q2_CODES = BY_NAME["Q2_0"].bytes, LAYOUTS["Q2_0"].codes[0].at
# A byte of a block has the codes of four weights. A shuffle copies it to the bytes of all four; then even weights take
# bits 0 and 1 or 4 and 5 of their copy, odd weights bits 2 and 3 or 6 and 7.
q2_stripes = [make_shuffle(u8x64, u8x64, [8 * r + 2 * q + i // 4 for r in RUNS for i in range(8)]) for q in STRIPES]
stripe_0, stripe_1, stripe_2, stripe_3 = q2_stripes
stripe_chunk = make_shuffle(u8x64, u8x16, [8 * r + 2 * q + i // 4 for q in STRIPES for r in (0, 1) for i in range(8)])
even_down, odd_down = make_shift(u8x64, False, 0, 4), make_shift(u8x64, False, 2, 6)
even_codes, odd_codes = constant_u8(u8x64, 3, 0), constant_u8(u8x64, 0, 3)


@device
def two_bits_of(bytes_):
    return even_down(bytes_) & even_codes() | odd_down(bytes_) & odd_codes()


@device
def q2_codes(address):
    v = four_by_16(address + Q2_CODES, Q2_BYTES)
    return two_bits_of(stripe_0(v)), two_bits_of(stripe_1(v)), two_bits_of(stripe_2(v)), two_bits_of(stripe_3(v))


@device
def q2_chunk(address):
    return two_bits_of(stripe_chunk(load_u8x16(address + Q2_CODES)))


@device
def q2_chunk_scales(address):
    return pair_f32x2(load_f16(address), load_f16(address))


q2_scales = make_gather_f16(Q2_BYTES, 2)

# ---- Q1_0 -----------------------------------------------------------------------------------------------------------

Q1_BYTES, Q1_CODES = BY_NAME["Q1_0"].bytes, LAYOUTS["Q1_0"].codes[0].at
flags = make_flags(LAYOUTS["Q1_0"].step)


@device
def q1_codes(address):
    """Read the codes of a group, 256 bits in two blocks, as four vectors of 64 bytes: 2 where a bit is set, else 0.

    The four bytes of each run of 32 weights go to one vector each, which makes the vectors striped.
    """
    bytes_ = concatenate_u8x32(load_u8x16(address + Q1_CODES), load_u8x16(address + Q1_BYTES + Q1_CODES))
    b0, b1, b2, b3 = planes_of(bytes_)
    return flags(b0), flags(b1), flags(b2), flags(b3)


q1_scales = make_gather_f16(Q1_BYTES, 4)
GROUPS = {
    "Q1_0": GroupFormat(
        "Q1_0", 32, 2 * Q1_BYTES, q1_codes, LAYOUTS["Q1_0"].centre, 2, device(lambda address: q1_scales(address))
    ),
    "Q2_0": GroupFormat(
        "Q2_0", 32, 4 * Q2_BYTES, q2_codes, LAYOUTS["Q2_0"].centre, 3, device(lambda address: q2_scales(address)),
        chunk=ChunkFormat(q2_chunk, q2_chunk_scales, None),
    ),
}  # fmt: skip
