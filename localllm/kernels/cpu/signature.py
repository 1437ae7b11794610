"""The signature of all CPU kernels.

It is `void kernel(int64 arguments, int64 part, int64 parts, int64 thread)`:

- arguments: address of an int64 array, see localllm.kernels.table
- part, parts: the index of the share of the step's work, and the number of shares
- thread: index of the calling thread, whose scratch memory the kernel may use

A kernel raises nothing and allocates nothing, because its machine code runs in a process without Numba
(localllm.kernels.build.compile checks that).
"""

from numba import njit, types

from localllm.kernels.build.pipeline import KernelCompiler
from localllm.kernels.simd import load_f32, load_i64

SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)

# Decorates helper functions of kernels, which LLVM may inline. Division by zero gives infinity instead of an exception.
device = njit(nogil=True, error_model="numpy", pipeline_class=KernelCompiler)
# Decorates helpers that are always inlined, so that their arguments stay in registers.
inlined = njit(nogil=True, error_model="numpy", pipeline_class=KernelCompiler, forceinline=True)


# Decorates kernels. compile.py compiles a kernel with SIGNATURE when it is requested.
kernel = njit(nogil=True, error_model="numpy", pipeline_class=KernelCompiler)


@device
def load_argument(arguments, index):
    """Load an int64 argument; index: for example ADD.x."""
    return load_i64(arguments + index * 8)


@device
def load_argument_f32(arguments, index):
    return load_f32(arguments + index * 8)
