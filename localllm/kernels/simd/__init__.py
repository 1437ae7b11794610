"""Vector types and operations for kernels: vectors as Numba types, operations as LLVM instructions.

A kernel written with these reads like scalar Python and compiles to vector instructions. Loads and stores take int64
addresses of any alignment, so kernels need no array types; they check nothing, callers do. Vectors are up to 512 bits
wide, like the registers of AVX-512; for a smaller CPU LLVM splits them, in four for NEON.

Names: `u8x64` is a vector of 64 unsigned bytes, `f32x16` one of 16 floats; `splat_...` copies a scalar to all lanes; an
"intrinsic" is a function that a kernel can call, built from an emitter, a function (builder, *values) that emits LLVM
instructions.

Some operations have no plain LLVM instruction (the dot product of bytes), or one for which LLVM may call a slow
function (float16, rounding). Those have several implementations, chosen by the features of the target CPU; the last one
uses plain instructions only and works on any CPU.
"""

from localllm.kernels.simd.arithmetic import *
from localllm.kernels.simd.bytes import *
from localllm.kernels.simd.threads import *
from localllm.kernels.simd.vectors import *
