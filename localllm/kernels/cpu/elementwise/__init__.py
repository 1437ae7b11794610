"""CPU kernels that process each token independently: norms, activation functions, rotations, copies.

localllm/kernels/table.py defines the result and the arguments of each kernel. Rows are float32, padded to a multiple of
16 columns. The parts of a step share the tokens unless a kernel's docstring says otherwise.
"""
