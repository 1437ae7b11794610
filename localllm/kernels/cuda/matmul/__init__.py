"""Products of matrices on a GPU, y = W x, and the routing of experts.

- planes.py: the layout of quantized weights on a GPU; to_planes.py converts a file's blocks to it, units.py reads it
- quantize.py, quantize_fused.py: activations to int8 in two planes
- linear_planes.py: quantized weights with few tokens; linear_plain.py: F32, F16 and BF16 weights with few tokens
- unpack.py, halves.py: weights and activations as 16-bit floats, for many tokens, whose product cuBLAS computes
- embed.py: rows of the embedding matrix; routing.py, experts.py: mixtures of experts

A unit is 32 weights of a row, or 32 columns of activations.
"""
