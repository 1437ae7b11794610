"""CPU kernels that treat tokens one by one: norms, activation functions, rotations, copies.

What each kernel computes, and its arguments, is in localllm/kernels/table.py. Rows
are float32, padded to a multiple of 16 columns. The parts of a step share the tokens unless a kernel says otherwise.
"""
