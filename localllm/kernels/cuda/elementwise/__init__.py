"""CUDA kernels that treat tokens one by one: norms, activation functions, rotations, copies.

What each kernel computes, and its arguments, is in localllm/kernels/table.py.
"""
