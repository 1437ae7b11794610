"""Blocks whose 4-bit code picks one of 16 values that are not evenly spaced: close near zero, far apart at the ends.

Weights are distributed like a bell, so such values fit them better than even steps. MXFP4 and NVFP4 are small floats
that some hardware multiplies directly; the IQ4 formats use values fitted to the weights of real models. `blocks` says
what all of these functions have in common.
"""

import numpy as np

from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import load_f16, load_u8, load_u16, store_f32

# A float of 4 bits (sign, 2 bits exponent, 1 bit mantissa: E2M1), doubled so that all values are integers; the scales
# below are halved to match. Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.
DOUBLED_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)

# Half of the 8-bit exponent (E8M0) 2 ** (e - 127). Source: the same specification, section 5.4.1.
HALVED_E8M0 = np.ldexp(np.float32(1), np.arange(256) - 128)

# Values of IQ4_NL and IQ4_XS; source: kvalues_iq4nl in ggml-common.h.
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)


def halved_ue4m3() -> np.ndarray:
    """Half the value of each byte as an unsigned float with 4 bits exponent (bias 7), 3 bits mantissa: float32 [256].

    The topmost bit is ignored, and 0x7f (not a number) counts as zero, as in ggml.
    """
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    subnormal = exponent == 0
    value = np.ldexp(np.where(subnormal, mantissa, 8 + mantissa), np.where(subnormal, 1, exponent) - 10)
    value[0x7F] = 0
    return (value / 2).astype(np.float32)


HALVED_UE4M3 = halved_ue4m3()


@device
def unpack_mxfp4(block, out):
    """MXFP4: 32 weights in 17 bytes, a 4-bit float each, and a power of two as their scale.

    0         e, the exponent of the scale
    1 .. 16   codes 0 .. 15 in the low halves, 16 .. 31 in the high halves

    weight = 2 ** (e - 128) * DOUBLED_E2M1[code]
    """
    scale = HALVED_E8M0[load_u8(block)]
    for i in range(16):
        codes = load_u8(block + 1 + i)
        store_f32(out + 4 * i, scale * np.float32(DOUBLED_E2M1[codes & 15]))
        store_f32(out + 4 * (16 + i), scale * np.float32(DOUBLED_E2M1[codes >> 4]))


@device
def unpack_nvfp4(block, out):
    """NVFP4: 64 weights in 36 bytes, a 4-bit float each, and an 8-bit float as the scale of each group of 16.

    0 .. 3    scales of the 4 groups, see `halved_ue4m3`
    4 .. 35   8 bytes a group: its codes 0 .. 7 in the low halves, 8 .. 15 in the high halves

    weight = HALVED_UE4M3[scale] * DOUBLED_E2M1[code]
    """
    for group in range(4):
        scale = HALVED_UE4M3[load_u8(block + group)]
        for i in range(8):
            codes = load_u8(block + 4 + 8 * group + i)
            store_f32(out + 4 * (16 * group + i), scale * np.float32(DOUBLED_E2M1[codes & 15]))
            store_f32(out + 4 * (16 * group + 8 + i), scale * np.float32(DOUBLED_E2M1[codes >> 4]))


@device
def unpack_iq4_nl(block, out):
    """IQ4_NL ("non-linear"): 32 weights in 18 bytes, one of 16 values each. Laid out like Q4_0.

    0 .. 1    d, float16
    2 .. 17   codes 0 .. 15 in the low halves, 16 .. 31 in the high halves

    weight = d * IQ4_VALUES[code]
    """
    scale = load_f16(block)
    for i in range(16):
        codes = load_u8(block + 2 + i)
        store_f32(out + 4 * i, scale * np.float32(IQ4_VALUES[codes & 15]))
        store_f32(out + 4 * (16 + i), scale * np.float32(IQ4_VALUES[codes >> 4]))


@device
def unpack_iq4_xs(block, out):
    """IQ4_XS: 256 weights in 136 bytes: 8 groups of 32 like those of IQ4_NL, with 6-bit scales and one d.

    0 .. 1    d, float16
    2 .. 3    the high 2 bits of the scales, a 16-bit integer, group 0 in the lowest bits
    4 .. 7    the low 4 bits of the scales: even groups in the low halves, odd groups in the high halves
    8 .. 135  16 bytes a group: its codes 0 .. 15 in the low halves, 16 .. 31 in the high halves

    weight = d * (scale - 32) * IQ4_VALUES[code]
    """
    scale, high_bits = load_f16(block), load_u16(block + 2)
    for group in range(8):
        low = (load_u8(block + 4 + group // 2) >> (4 * (group % 2))) & 15
        high = (high_bits >> (2 * group)) & 3
        group_scale = scale * np.float32((low | high << 4) - 32)
        for i in range(16):
            codes = load_u8(block + 8 + 16 * group + i)
            store_f32(out + 4 * (32 * group + i), group_scale * np.float32(IQ4_VALUES[codes & 15]))
            store_f32(out + 4 * (32 * group + 16 + i), group_scale * np.float32(IQ4_VALUES[codes >> 4]))
