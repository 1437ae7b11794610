"""CPU kernels of recurrent layers: convolutions and the recurrences of Mamba, Mamba 2, delta rule and RWKV.

Each sequence of a run has a state, which the engine keeps between runs: SEQUENCE.state before the run, next_state after
it; both may be the same memory. A state of columns lies as [columns / 16][...][16], so that a vector holds one number
of 16 columns. Formulas and arguments are in localllm/kernels/table.py.
"""
