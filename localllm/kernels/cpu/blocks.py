"""What a block of weights is: one function for every quantized format, from a block's bytes to its float32 weights.

GGUF stores each row of a quantized matrix as blocks, one after the other. A block is a fixed number of weights in a
fixed number of bytes and needs nothing outside itself: it holds one small integer code per weight, and scales that turn
the codes into weights. The families differ in what a code means:

- `blocks_simple`: weight = scale * code, or scale * code + minimum, with one scale for the whole block
- `blocks_k`: 256 weights share a scale for the scales of their groups ("k-quants")
- `blocks_table`: a 4-bit code picks one of 16 unevenly spaced values
- `blocks_iq`: a code picks 4 or 8 weights at once from a codebook ("i-quants")

Every function has the form `unpack_q4_0(block, out)`: it reads the bytes at address `block` and writes the weights, in
order, as float32 to address `out`. Both are int64 and may have any alignment; nothing is checked. All numbers are
little-endian, and "codes 0 .. 15 in the low halves" means: byte i holds code i in its bits 0 to 3.

This is the generic path: right for every format, and quick enough for those that have no kernel of their own. The
functions use no array, no exception and nothing else of Numba's runtime, so their machine code runs without Numba.

Sources: the block structs and `dequantize_row_*` functions of ggml (ggml-common.h, ggml-quants.c); the k-quants are
described in llama.cpp's pull request 1684. The `gguf` package computes the same weights, bit for bit.
"""

from localllm.kernels.cpu import blocks_iq, blocks_k, blocks_simple, blocks_table

UNPACK = {
    "Q1_0": blocks_simple.unpack_q1_0,
    "Q2_0": blocks_simple.unpack_q2_0,
    "Q4_0": blocks_simple.unpack_q4_0,
    "Q4_1": blocks_simple.unpack_q4_1,
    "Q5_0": blocks_simple.unpack_q5_0,
    "Q5_1": blocks_simple.unpack_q5_1,
    "Q8_0": blocks_simple.unpack_q8_0,
    "TQ1_0": blocks_simple.unpack_tq1_0,
    "TQ2_0": blocks_simple.unpack_tq2_0,
    "Q2_K": blocks_k.unpack_q2_k,
    "Q3_K": blocks_k.unpack_q3_k,
    "Q4_K": blocks_k.unpack_q4_k,
    "Q5_K": blocks_k.unpack_q5_k,
    "Q6_K": blocks_k.unpack_q6_k,
    "MXFP4": blocks_table.unpack_mxfp4,
    "NVFP4": blocks_table.unpack_nvfp4,
    "IQ4_NL": blocks_table.unpack_iq4_nl,
    "IQ4_XS": blocks_table.unpack_iq4_xs,
    "IQ1_S": blocks_iq.unpack_iq1_s,
    "IQ1_M": blocks_iq.unpack_iq1_m,
    "IQ2_XXS": blocks_iq.unpack_iq2_xxs,
    "IQ2_XS": blocks_iq.unpack_iq2_xs,
    "IQ2_S": blocks_iq.unpack_iq2_s,
    "IQ3_XXS": blocks_iq.unpack_iq3_xxs,
    "IQ3_S": blocks_iq.unpack_iq3_s,
}
"""Name of a format in quant/formats.py -> its function (int64 block, int64 out) -> None, compiled at its first call."""
