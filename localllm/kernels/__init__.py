"""Kernels: native functions that compute one step of a forward pass.

This docstring defines their vocabulary. Execution:

- run: one call of the engine, a forward pass over the tokens of one or more sequences (not to be confused with a "run
  of columns", see Weights)
- tape, step: a run walks a tape, an array of steps; a step is a kernel and the address of its arguments (table.py)
- part: a share of a step's work. A kernel is called once for each part, by any thread, with the index of the part and
  the number of parts
- Lane: a CPU's name and instruction set, for which kernels are compiled (machine.py): AVX2, AVX-512 with VNNI, AMX,
  NEON. In lower case, a lane is one element of a vector register, or one thread of a CUDA warp
- variant: one of several kernels for the same operation. The number of tokens selects the variant
- scratch: memory that a thread may overwrite during a part

Weights:

- block: 32 to 256 weights of a row that a GGUF format stores together. A weight is a small integer, its code, times a
  scale that all weights of a sub-block (16 or 32) share. "Low" or "minimum": a value that is added; "offset" or
  "centre": the code that represents zero
- group, chunk: 256 or 64 consecutive weights of a row, in any format, as int8 kernels read them
  (formats/group_format.py)
- run of columns: 32 consecutive columns of a row, of weights or of activations
- striped: the order of bytes within a group in which one vector holds 8 weights of each of its 8 runs of 32

Activations:

- plane: one of two values whose sum represents each activation. In int8: x = scale * (256 * high + low), so the high
  plane alone is the usual 8-bit quantization, and both planes are practically exact. In BF16: high, and the rounding
  error of high. (On a GPU, planes of weights are fields of their blocks, stored separately: cuda/matmul/planes.py.)

Products of matrices:

- register tile: the results of some rows and some tokens, which stay in registers while columns are added up. AMX has
  tile registers for that, of 16 rows of 64 bytes
- slab: the rows of a tile times as many columns as are unpacked to scratch memory at a time, so few that they stay in
  the L1 or L2 cache while they are multiplied by all tokens

Attention:

- page: 64 consecutive positions of a sequence in the KV cache; slot: the memory of one token in a page
- split: a long context is divided into sections that are computed independently and merged (Flash-Decoding)
- state: the memory of a recurrent layer for a sequence, instead of keys and values

Array shapes are written with the slowest dimension first: f32 [tokens, heads]. A layout such as `[vector][word][16
rows][4]` lists nested dimensions from the slowest to the fastest. Addresses are int64, and strides are in bytes.
"""
