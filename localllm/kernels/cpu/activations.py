"""Functions of single numbers, row by row; columns padded to 16."""

from math import exp, log

from numba import float32

from localllm.kernels.arguments import (
    CLAMP,
    GEGLU,
    GELU,
    RELU_SQUARED,
    SCALE,
    SIGMOID_GATE,
    SOFTCAP,
    SWIGLU_LIMITED,
    TEMPER,
)
from localllm.kernels.cpu.signature import argument, argument_f32, device, kernel
from localllm.kernels.simd import (
    clamp_f32x16,
    exp_f32x16,
    fma_f32x16,
    if_finite_f32x16,
    load_f32,
    load_f32x16,
    load_i64,
    max_f32x16,
    min_f32x16,
    reciprocal_f32x16,
    splat_f32x16,
    store_f32x16,
    tanh_f32x16,
    zero_f32x16,
)

SQRT_2_BY_PI = 0.7978845608028654


@device
def gelu_f32x16(x):
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    inner = fma_f32x16(x * x * x, splat_f32x16(0.044715), x) * splat_f32x16(SQRT_2_BY_PI)
    return x * splat_f32x16(0.5) * (splat_f32x16(1.0) + tanh_f32x16(inner))


@kernel
def geglu(a, part, parts, thread):
    """y = gelu(gate) * up."""
    stride, columns, tokens = argument(a, GEGLU.stride), argument(a, GEGLU.columns), load_i64(argument(a, GEGLU.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        gate, up = argument(a, GEGLU.gate) + t * stride, argument(a, GEGLU.up) + t * stride
        y = argument(a, GEGLU.y) + t * stride
        for i in range(0, columns * 4, 64):
            store_f32x16(y + i, gelu_f32x16(load_f32x16(gate + i)) * load_f32x16(up + i))


@kernel
def gelu(a, part, parts, thread):
    """y = gelu(x)."""
    stride, columns, tokens = argument(a, GELU.stride), argument(a, GELU.columns), load_i64(argument(a, GELU.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = argument(a, GELU.x) + t * stride, argument(a, GELU.y) + t * stride
        for i in range(0, columns * 4, 64):
            store_f32x16(y + i, gelu_f32x16(load_f32x16(x + i)))


@kernel
def relu_squared(a, part, parts, thread):
    """y = max(x, 0)^2."""
    stride, tokens = argument(a, RELU_SQUARED.stride), load_i64(argument(a, RELU_SQUARED.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = argument(a, RELU_SQUARED.x) + t * stride, argument(a, RELU_SQUARED.y) + t * stride
        for i in range(0, argument(a, RELU_SQUARED.columns) * 4, 64):
            v = load_f32x16(x + i)
            above = if_finite_f32x16(max_f32x16(zero_f32x16(), v), v)
            store_f32x16(y + i, above * above)


@kernel
def temper(a, part, parts, thread):
    """y = x * (1 + slope * log(floor((position + offset) / length) + 1))."""
    stride, tokens, slope = (
        argument(a, TEMPER.stride),
        load_i64(argument(a, TEMPER.count)),
        argument_f32(a, TEMPER.slope),
    )
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = argument(a, TEMPER.x) + t * stride, argument(a, TEMPER.y) + t * stride
        position = load_i64(argument(a, TEMPER.positions) + t * 8) + argument(a, TEMPER.offset)
        factor = float32(1.0 + slope * log(float(position // argument(a, TEMPER.length) + 1)))
        for i in range(0, argument(a, TEMPER.columns) * 4, 64):
            store_f32x16(y + i, load_f32x16(x + i) * splat_f32x16(factor))


@kernel
def clamp(a, part, parts, thread):
    """y = x, but nothing beyond limit or -limit."""
    stride, tokens, limit = (
        argument(a, CLAMP.stride),
        load_i64(argument(a, CLAMP.count)),
        argument_f32(a, CLAMP.limit),
    )
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = argument(a, CLAMP.x) + t * stride, argument(a, CLAMP.y) + t * stride
        for i in range(0, argument(a, CLAMP.columns) * 4, 64):
            v = load_f32x16(x + i)
            store_f32x16(y + i, if_finite_f32x16(clamp_f32x16(v, -limit, limit), v))


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
            store_f32x16(y + i, if_finite_f32x16(tanh_f32x16(inner) * splat_f32x16(cap), inner))


@kernel
def sigmoid_gate(a, part, parts, thread):
    """y = x * sigmoid(gate)."""
    stride, tokens = argument(a, SIGMOID_GATE.stride), load_i64(argument(a, SIGMOID_GATE.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = argument(a, SIGMOID_GATE.x) + t * stride, argument(a, SIGMOID_GATE.y) + t * stride
        gate = load_f32(argument(a, SIGMOID_GATE.gate) + t * argument(a, SIGMOID_GATE.gate_stride))
        factor = float32(1.0 / (1.0 + exp(-float(gate)))) + float32(0.0) * gate  # not finite: NaN
        for i in range(0, argument(a, SIGMOID_GATE.columns) * 4, 64):
            store_f32x16(y + i, load_f32x16(x + i) * splat_f32x16(factor))


@kernel
def swiglu_limited(a, part, parts, thread):
    """y = gate * sigmoid(sharpness * gate) * (up + 1) of numbers that are not beyond the limit."""
    stride, tokens = argument(a, SWIGLU_LIMITED.stride), load_i64(argument(a, SWIGLU_LIMITED.count))
    limit, sharpness = argument_f32(a, SWIGLU_LIMITED.limit), argument_f32(a, SWIGLU_LIMITED.sharpness)
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        gates, ups = argument(a, SWIGLU_LIMITED.gate) + t * stride, argument(a, SWIGLU_LIMITED.up) + t * stride
        y = argument(a, SWIGLU_LIMITED.y) + t * stride
        for i in range(0, argument(a, SWIGLU_LIMITED.columns) * 4, 64):
            gate, up = load_f32x16(gates + i), load_f32x16(ups + i)
            gate = if_finite_f32x16(min_f32x16(splat_f32x16(limit), gate), gate)
            up = if_finite_f32x16(clamp_f32x16(up, -limit, limit), up)
            one = splat_f32x16(1.0)
            sigmoid = reciprocal_f32x16(one + exp_f32x16(gate * splat_f32x16(-sharpness)))
            store_f32x16(y + i, gate * sigmoid * (up + one))
