"""The one signature of CPU kernels: `void kernel(int64 arguments, int64 part, int64 parts, int64 thread)`.

`arguments` is the address of an int64 array that localllm.kernels.arguments declares; the kernel does part `part` of
`parts` of its step; `thread` tells which scratch memory is free for it. A kernel raises nothing and allocates nothing:
its machine code has to run in a process without Numba (localllm.kernels.build.compile checks that).
"""

from numba import njit, types

from localllm.kernels.build.pipeline import Pipeline
from localllm.kernels.simd import load_f32, load_i64

SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)

# Helpers of kernels, which may be inlined; division by zero gives infinity instead of an exception.
device = njit(nogil=True, error_model="numpy", pipeline_class=Pipeline)
# Those that always are, whatever their size: what they take stays in registers.
inlined = njit(nogil=True, error_model="numpy", pipeline_class=Pipeline, forceinline=True)


# Kernels: compile.py compiles one with SIGNATURE when it is asked for.
kernel = njit(nogil=True, error_model="numpy", pipeline_class=Pipeline)


@device
def argument(arguments, index):
    """Return an int64 argument, such as ADD.x."""
    return load_i64(arguments + index * 8)


@device
def argument_f32(arguments, index):
    """Return a float32 argument, such as RMS_NORM.epsilon."""
    return load_f32(arguments + index * 8)
