"""Kernels for CPUs with AMX, which multiplies BF16 matrices in tile registers (tiles.py).

A tile register has 16 rows of 64 bytes.

- pack.py: unpacks weights to slabs of 32 rows of up to 256 columns, and activations to panels of 16 tokens
- linear.py: the products of both; attention.py: the products of attention

"Left operand": the matrix whose rows are the rows of the result. "Right operand": the one whose columns are the columns
of the result. "Exact": in both planes of BF16, the value and its rounding error.
"""
