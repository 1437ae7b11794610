"""The vector vocabulary: vectors as Numba types, operations as LLVM instructions.

A kernel written with these reads like scalar Python and compiles to vector instructions. Loads and stores take int64
addresses of any alignment, so kernels need no array types and no bounds logic; nothing here is checked, the callers
are. Vectors are as wide as AVX-512's registers; on a smaller CPU LLVM splits them, in four for an ARM's NEON. What LLVM
cannot express in plain operations (the int8 dot product), or would call a slow function for (float16, rounding), has
variants, chosen by the features of the target CPU; the last of them is plain and works anywhere.
"""

from localllm.kernels.simd.arithmetic import *
from localllm.kernels.simd.bytes import *
from localllm.kernels.simd.dots import *
from localllm.kernels.simd.functions import *
from localllm.kernels.simd.memory import *
from localllm.kernels.simd.threads import *
from localllm.kernels.simd.vectors import *
