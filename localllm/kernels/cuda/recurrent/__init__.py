"""CUDA kernels of recurrent layers: convolutions and the recurrences of Mamba, Mamba 2, delta rule and RWKV.

States lie as on the CPU (kernels/cpu/recurrent), so that they can be copied between both. Formulas and arguments are in
localllm/kernels/table.py.
"""
