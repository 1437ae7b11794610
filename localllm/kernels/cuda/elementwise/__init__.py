"""CUDA kernels that process each token independently: norms, activation functions, rotations, copies.

The results and arguments of each kernel are defined in localllm/kernels/table.py.
"""
