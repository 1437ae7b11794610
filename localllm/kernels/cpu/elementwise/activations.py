"""Element-wise functions of rows, padded to 16 columns.

One loop applies any function of one argument, another of two.
"""

from math import exp, log

from numba import float32

from localllm.kernels.cpu.signature import argument, argument_f32, device, inlined, kernel
from localllm.kernels.simd import (
    abs_f32x16,
    clamp_f32x16,
    erf_f32x16,
    exp_f32x16,
    f32x16,
    fma_f32x16,
    if_finite_f32x16,
    load_f32,
    load_f32x16,
    load_i64,
    max_f32x16,
    min_f32x16,
    operation,
    reciprocal_f32x16,
    sigmoid_f32x16,
    softplus_f32x16,
    splat_f32x16,
    sqrt_f32x16,
    store_f32x16,
    tanh_f32x16,
    zero_f32x16,
)
from localllm.kernels.table import (
    ADD_SCALAR,
    CLAMP,
    EXPONENTIAL,
    GEGLU,
    GELU,
    GELU_ERF,
    MULTIPLY,
    REGLU,
    RELU,
    RELU_SQUARED,
    SCALE,
    SCALE_BY_POSITION,
    SCALE_COLUMNS,
    SIGMOID,
    SIGMOID_GATE,
    SIGNED_ROOT,
    SOFTCAP,
    SOFTPLUS,
    SWIGLU_LIMITED,
    XIELU,
)

SQRT_2_BY_PI = 0.7978845608028654
SQRT_HALF = 0.7071067811865476


@inlined
def nothing(a, token):
    """Return the extra argument of functions that need none."""
    return 0


def of_one(declaration, function, extra_of=nothing):
    """Make a kernel that computes y = function(x, extra) for vectors of 16 columns, with extra = extra_of(a, token).

    declaration: the declaration of the kernel's arguments; extra_of: computes the extra argument once per row.
    """

    @kernel
    def rows(a, part, parts, thread):
        stride, size, tokens = (
            argument(a, declaration.stride),
            argument(a, declaration.columns) * 4,
            load_i64(argument(a, declaration.count)),
        )
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            x, y = argument(a, declaration.x) + t * stride, argument(a, declaration.y) + t * stride
            extra = extra_of(a, t)
            for i in range(0, size, 64):
                store_f32x16(y + i, function(load_f32x16(x + i), extra))

    return rows


def of_two(declaration, first, second, function, extra_of=nothing, is_shared=False):
    """Make a kernel that computes y = function(x, z, extra) for vectors of 16 columns, with extra = extra_of(a, token).

    declaration: the declaration of the kernel's arguments; first, second: the arguments that are the addresses of x and
    z; extra_of: computes the extra argument once per row; is_shared: whether z is one row for all tokens.
    """

    @kernel
    def rows(a, part, parts, thread):
        stride, size, tokens = (
            argument(a, declaration.stride),
            argument(a, declaration.columns) * 4,
            load_i64(argument(a, declaration.count)),
        )
        z_stride = 0 if is_shared else stride
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            x, z, extra = argument(a, first) + t * stride, argument(a, second) + t * z_stride, extra_of(a, t)
            y = argument(a, declaration.y) + t * stride
            for i in range(0, size, 64):
                store_f32x16(y + i, function(load_f32x16(x + i), load_f32x16(z + i), extra))

    return rows


@device
def gelu_f32x16(x):
    """Compute x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    inner = fma_f32x16(x * x * x, splat_f32x16(0.044715), x) * splat_f32x16(SQRT_2_BY_PI)
    return x * splat_f32x16(0.5) * (splat_f32x16(1.0) + tanh_f32x16(inner))


@device
def gelu_erf_f32x16(x):
    """Compute x / 2 * (1 + erf(x / sqrt(2)))."""
    return x * splat_f32x16(0.5) * (splat_f32x16(1.0) + erf_f32x16(x * splat_f32x16(SQRT_HALF)))


@inlined
def squared_above_zero(x, _):
    """Compute max(x, 0)^2; NaN where x is not finite."""
    above = if_finite_f32x16(max_f32x16(zero_f32x16(), x), x)
    return above * above


@inlined
def above_zero_times(gate, up, _):
    """Compute max(gate, 0) * up; NaN where the gate is not finite."""
    return if_finite_f32x16(max_f32x16(zero_f32x16(), gate), gate) * up


@operation(f32x16, f32x16, f32x16, f32x16)
def where_above_zero(builder, x, y, z):
    """Return y where x is above 0, else z; z also where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, f32x16.llvm(None)), y, z)


@inlined
def xielu_of(x, constants):
    """Compute the function xielu of localllm/kernels/table.py."""
    alpha_p, alpha_n, beta, epsilon = constants
    below = exp_f32x16(min_f32x16(epsilon, x)) - splat_f32x16(1.0) - x
    return fma_f32x16(beta, x, where_above_zero(x, alpha_p * x * x, alpha_n * below))


@inlined
def xielu_constants(a, token):
    return (
        splat_f32x16(argument_f32(a, XIELU.alpha_p)), splat_f32x16(argument_f32(a, XIELU.alpha_n)),
        splat_f32x16(argument_f32(a, XIELU.beta)), splat_f32x16(argument_f32(a, XIELU.epsilon)),
    )  # fmt: skip


@inlined
def temperature(a, token):
    """Compute a token's attention temperature, 1 + slope * log(floor((position + offset) / length) + 1)."""
    position = load_i64(argument(a, SCALE_BY_POSITION.positions) + token * 8) + argument(a, SCALE_BY_POSITION.offset)
    return float32(
        1.0
        + argument_f32(a, SCALE_BY_POSITION.slope) * log(float(position // argument(a, SCALE_BY_POSITION.length) + 1))
    )


@inlined
def sigmoid_of_gate(a, token):
    """Compute the sigmoid of a row's gate; NaN if the gate is not finite."""
    gate = load_f32(argument(a, SIGMOID_GATE.gate) + token * argument(a, SIGMOID_GATE.gate_stride))
    return float32(1.0 / (1.0 + exp(-float(gate)))) + float32(0.0) * gate


@inlined
def scaled(x, factor):
    return x * splat_f32x16(factor)


@inlined
def shifted(x, number):
    return x + splat_f32x16(number)


@inlined
def clamped(x, limit):
    """Clamp x to [-limit, limit]; NaN where x is not finite."""
    return if_finite_f32x16(clamp_f32x16(x, -limit, limit), x)


@inlined
def rooted(x, least):
    """Compute sqrt(max(|x|, least)) with the sign of x: 0 for 0, NaN where x is not finite."""
    root, nothing = sqrt_f32x16(max_f32x16(abs_f32x16(x), splat_f32x16(least))), zero_f32x16()
    below = where_above_zero(nothing - x, nothing - root, nothing * x)
    return if_finite_f32x16(where_above_zero(x, root, below), x)


@inlined
def capped(x, cap):
    """Compute cap * tanh(x / cap); NaN where x is not finite."""
    inner = x * splat_f32x16(1 / cap)
    return if_finite_f32x16(tanh_f32x16(inner) * splat_f32x16(cap), inner)


@inlined
def limited(gate, up, constants):
    """Compute the function swiglu_limited of localllm/kernels/table.py."""
    limit, sharpness = constants
    gate = if_finite_f32x16(min_f32x16(splat_f32x16(limit), gate), gate)
    up = if_finite_f32x16(clamp_f32x16(up, -limit, limit), up)
    one = splat_f32x16(1.0)
    return gate * reciprocal_f32x16(one + exp_f32x16(gate * splat_f32x16(-sharpness))) * (up + one)


@inlined
def limit_and_sharpness(a, token):
    return argument_f32(a, SWIGLU_LIMITED.limit), argument_f32(a, SWIGLU_LIMITED.sharpness)


# The formulas are in localllm/kernels/table.py.
gelu = of_one(GELU, inlined(lambda x, _: gelu_f32x16(x)))
gelu_erf = of_one(GELU_ERF, inlined(lambda x, _: gelu_erf_f32x16(x)))
relu_squared = of_one(RELU_SQUARED, squared_above_zero)
relu = of_one(RELU, inlined(lambda x, _: if_finite_f32x16(max_f32x16(zero_f32x16(), x), x)))
exponential = of_one(EXPONENTIAL, inlined(lambda x, _: if_finite_f32x16(exp_f32x16(x), x)))
add_scalar = of_one(ADD_SCALAR, shifted, inlined(lambda a, token: argument_f32(a, ADD_SCALAR.number)))
sigmoid = of_one(SIGMOID, inlined(lambda x, _: sigmoid_f32x16(x)))
xielu = of_one(XIELU, xielu_of, xielu_constants)  # error at most alpha_n * 2e-7
scale_by_position = of_one(SCALE_BY_POSITION, scaled, temperature)
sigmoid_gate = of_one(SIGMOID_GATE, scaled, sigmoid_of_gate)
scale = of_one(SCALE, scaled, inlined(lambda a, token: argument_f32(a, SCALE.factor)))
clamp = of_one(CLAMP, clamped, inlined(lambda a, token: argument_f32(a, CLAMP.limit)))
signed_root = of_one(SIGNED_ROOT, rooted, inlined(lambda a, token: argument_f32(a, SIGNED_ROOT.least)))
softcap = of_one(SOFTCAP, capped, inlined(lambda a, token: argument_f32(a, SOFTCAP.cap)))
geglu = of_two(GEGLU, GEGLU.gate, GEGLU.up, inlined(lambda gate, up, _: gelu_f32x16(gate) * up))
reglu = of_two(REGLU, REGLU.gate, REGLU.up, above_zero_times)
multiply = of_two(MULTIPLY, MULTIPLY.x, MULTIPLY.z, inlined(lambda x, z, _: x * z))
scale_columns = of_two(
    SCALE_COLUMNS, SCALE_COLUMNS.x, SCALE_COLUMNS.weight, inlined(lambda x, z, _: x * z), is_shared=True
)
softplus = of_two(
    SOFTPLUS, SOFTPLUS.x, SOFTPLUS.bias, inlined(lambda x, bias, _: softplus_f32x16(x + bias)), is_shared=True
)
swiglu_limited = of_two(SWIGLU_LIMITED, SWIGLU_LIMITED.gate, SWIGLU_LIMITED.up, limited, limit_and_sharpness)
