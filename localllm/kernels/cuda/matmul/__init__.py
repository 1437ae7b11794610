"""Products of matrices on a GPU, y = W x, and the routing of experts.

- planes.py: the layout of quantized weights on a GPU; units.py reads it
- weights.py: converts a file's blocks to planes, planes to float16 for cuBLAS, and rows of the embedding matrix
- quantize.py: converts activations to int8 in two planes, and to 16-bit floats for cuBLAS
- linear.py: products with few tokens; experts.py: mixtures of experts

A unit is 32 weights of a row, or 32 columns of activations.
"""
