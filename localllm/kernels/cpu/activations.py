"""Functions of single numbers, row by row; columns padded to 16."""

from localllm.kernels.arguments import GEGLU, SCALE, SOFTCAP
from localllm.kernels.cpu.signature import argument, argument_f32, kernel
from localllm.kernels.simd import fma_f32x16, load_f32x16, load_i64, splat_f32x16, store_f32x16, tanh_f32x16

SQRT_2_BY_PI = 0.7978845608028654


@kernel
def geglu(a, part, parts, thread):
    """y = gelu(gate) * up, with gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    stride, columns, tokens = argument(a, GEGLU.stride), argument(a, GEGLU.columns), load_i64(argument(a, GEGLU.count))
    half, one = splat_f32x16(0.5), splat_f32x16(1.0)
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        gate, up = argument(a, GEGLU.gate) + t * stride, argument(a, GEGLU.up) + t * stride
        y = argument(a, GEGLU.y) + t * stride
        for i in range(0, columns * 4, 64):
            x = load_f32x16(gate + i)
            inner = fma_f32x16(x * x * x, splat_f32x16(0.044715), x) * splat_f32x16(SQRT_2_BY_PI)
            store_f32x16(y + i, x * half * (one + tanh_f32x16(inner)) * load_f32x16(up + i))


@kernel
def scale(a, part, parts, thread):
    """y = x * factor."""
    stride, tokens, factor = (
        argument(a, SCALE.stride),
        load_i64(argument(a, SCALE.count)),
        argument_f32(a, SCALE.factor),
    )
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = argument(a, SCALE.x) + t * stride, argument(a, SCALE.y) + t * stride
        for i in range(0, argument(a, SCALE.columns) * 4, 64):
            store_f32x16(y + i, load_f32x16(x + i) * splat_f32x16(factor))


@kernel
def softcap(a, part, parts, thread):
    """y = cap * tanh(x / cap)."""
    stride, tokens, cap = (
        argument(a, SOFTCAP.stride),
        load_i64(argument(a, SOFTCAP.count)),
        argument_f32(a, SOFTCAP.cap),
    )
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = argument(a, SOFTCAP.x) + t * stride, argument(a, SOFTCAP.y) + t * stride
        for i in range(0, argument(a, SOFTCAP.columns) * 4, 64):
            inner = load_f32x16(x + i) * splat_f32x16(1 / cap)
            store_f32x16(y + i, tanh_f32x16(inner) * splat_f32x16(cap))
