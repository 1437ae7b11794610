"""Quantization: encoders of GGUF's block formats, GPTQ, and llama.cpp's recipes.

- formats.py: the formats, the fields of their blocks, and the file types; recipes.py: the format of each tensor
- encode.py: the entry point. Encoders: affine.py, symmetric.py, codebook.py, value_tables.py, ternary.py; blocks.py has
their shared functions
- gptq.py, hessian.py: encoding with error feedback; block_codes.py: reads scales of blocks and replaces their codes
- numba_cache.py: machine code of the searches, cached on disk

Words:

- block: 32 to 256 consecutive weights of a row that are stored together; super-block: a block of 256 weights with
sub-blocks (or "groups") that share a scale
- code: the integer that represents a weight, of 1 to 8 bits; level: the value that a code represents, before scaling
- d: the float16 factor of a block; scale: the factor of a group, in super-blocks an integer times d; low, minimum: an
offset that is added
- importance: float32 [columns], the weights of squared errors: mean squares of the activations
- unit: a power of two that a block's weights are divided by during a search, so that no sum overflows
- gain: the reduction of the weighted error by a scale, compared with setting all weights to 0

In formulas x are weights, w their importance, l codes, v levels, and Σ sums over a block or group.
"""
