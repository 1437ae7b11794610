"""Products of matrices on a CPU, y = W x, and the routing of experts.

The products are for one token (decode) to many (prefill). Files, for quantized weights:

- quantize.py: activations to int8 in two planes; matmul_quantized.py: the kernels, one variant for each range of token
  counts (kernel_variants.py)
- gemv_quantized.py: reads rows once, in the file's layout, for one token, in int8; gemv_few.py: for a few tokens;
  gemv_int16.py: for both with AVX2; gemv_k_sub_blocks.py: for one token in Q2_K and Q3_K with AVX512-VNNI
- gemm_int16.py, gemm_int8.py: unpack a tile of rows once for many tokens, in both planes or the high one; tiles.py:
  their shared functions

For F32, F16, BF16: matmul_float.py, tiles_f32.py, gemm_f16_words.py. For mixtures of experts: experts.py.

Local names have the same meaning in all these files:

    a             address of the kernel's arguments
    w             address of weights; s, m: of the rows' scales and minimums
    x, high, low  addresses of activations; in tuples of vectors, x are those of tokens
    c, n          addresses of the tokens' scales, and of the sums of their activations
    y             address of the results
    step          bytes from one row of weights to the next
    t, v          index of a token in a tile, and of a vector of 16 rows
    word          offset, in bytes, of 4 consecutive columns of a token

"Words" in a file's name or text are 16-bit integers unless they are called 4-byte words. For group, chunk, run of 32
columns, striped, plane, tile and slab see localllm/kernels/__init__.py.
"""
