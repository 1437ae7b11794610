"""Element-wise functions of rows. A thread computes four columns of a row, so y may be an input."""

import math

from numba import cuda

from localllm.kernels.cuda.device import (
    device,
    exp,
    f32_value,
    float32,
    load_4f32,
    load_f32,
    load_i64,
    log,
    log1p,
    store_4f32,
    tanh,
)

ZERO, HALF, ONE = float32(0), float32(0.5), float32(1)
SQRT_2_BY_PI, CUBIC, SQRT_HALF = float32(0.7978845608028654), float32(0.044715), float32(0.7071067811865476)
# The constants of `erf_of`.
P, A, B = float32(0.3275911), float32(0.254829592), float32(-0.284496736)
C, D, E = float32(1.421413741), float32(-1.453152027), float32(1.061405429)


@device
def first_column():
    """Return the first of the four columns of this thread."""
    return 4 * (cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x)


def of_one(function):
    """Make a kernel that computes y = function(x)."""

    def kernel(count, x, y, stride, columns):
        row, column = cuda.blockIdx.x, first_column()
        if row < load_i64(count) and column < columns:
            at = row * stride + 4 * column
            a, b, c, d = load_4f32(x + at)
            store_4f32(y + at, function(a), function(b), function(c), function(d))

    return kernel


def of_one_and_number(function):
    """Make a kernel that computes y = function(x, number); number: an argument, the bits of a float32."""

    def kernel(count, x, number, y, stride, columns):
        row, column, n = cuda.blockIdx.x, first_column(), f32_value(number)
        if row < load_i64(count) and column < columns:
            at = row * stride + 4 * column
            a, b, c, d = load_4f32(x + at)
            store_4f32(y + at, function(a, n), function(b, n), function(c, n), function(d, n))

    return kernel


def of_two(function):
    """Make a kernel that computes y = function(x, z)."""

    def kernel(count, x, z, y, stride, columns):
        row, column = cuda.blockIdx.x, first_column()
        if row < load_i64(count) and column < columns:
            at = row * stride + 4 * column
            a, b, c, d = load_4f32(x + at)
            e, f, g, h = load_4f32(z + at)
            store_4f32(y + at, function(a, e), function(b, f), function(c, g), function(d, h))

    return kernel


@device
def if_finite(y, x):
    """Return y, but NaN where x is not finite.

    A bounded function, such as a sigmoid, would otherwise hide that broken weights have produced infinity or NaN.
    """
    return y + ZERO * x


@device
def sigmoid_of(x):
    """Compute 1 / (1 + e^-x); infinity gives NaN."""
    return if_finite(ONE / (ONE + exp(-x)), x)


@device
def gelu_of(x):
    """Compute x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    return x * HALF * (ONE + tanh((CUBIC * x * x * x + x) * SQRT_2_BY_PI))


@device
def erf_of(x):
    """Compute erf x with an error of at most 3e-7 (Abramowitz and Stegun 1964, 7.1.26)."""
    size = abs(x)
    t = ONE / (ONE + P * size)
    y = ONE - ((((E * t + D) * t + C) * t + B) * t + A) * t * exp(-x * x)
    return -y if x < ZERO else y


@device
def gelu_erf_of(x):
    """Compute x / 2 * (1 + erf(x / sqrt(2)))."""
    return x * HALF * (ONE + erf_of(x * SQRT_HALF))


@device
def relu_squared_of(x):
    """Compute max(x, 0)^2; NaN if x is not finite."""
    above = if_finite(ZERO if x < ZERO else x, x)
    return above * above


@device
def softplus_of(x):
    """Compute log(1 + e^x) = max(x, 0) + log(1 + e^-|x|); infinity gives NaN."""
    return if_finite((x if x > ZERO else ZERO) + log1p(exp(-abs(x))), x)


@device
def between(x, limit):
    """Clamp x to [-limit, limit]; NaN if x is not finite."""
    below = limit if x > limit else x
    return if_finite(-limit if below < -limit else below, x)


@device
def relu_of(x):
    """Compute max(x, 0); NaN if x is not finite."""
    return if_finite(ZERO if x < ZERO else x, x)


@device
def exponential_of(x):
    """Compute e^x; NaN if x is not finite."""
    return if_finite(exp(x), x)


@device
def scaled(x, factor):
    return x * factor


@device
def shifted(x, number):
    return x + number


@device
def signed_root_of(x, least):
    """Compute sqrt(max(|x|, least)) with the sign of x: 0 for 0, NaN if x is not finite."""
    root = math.sqrt(max(abs(x), least))
    return if_finite(root if x > ZERO else -root if x < ZERO else ZERO, x)


@device
def capped(x, cap):
    """Compute cap * tanh(x / cap); infinity gives NaN."""
    return if_finite(tanh(x * (ONE / cap)) * cap, x)


@device
def product(x, z):
    return x * z


@device
def swiglu_of(gate, up):
    return gate * sigmoid_of(gate) * up


@device
def geglu_of(gate, up):
    return gelu_of(gate) * up


@device
def reglu_of(gate, up):
    return if_finite(gate if gate > ZERO else ZERO, gate) * up


@device
def limited_of(gate, up, sharpness, limit):
    """Compute the function swiglu_limited of localllm/kernels/table.py."""
    gate = if_finite(limit if gate > limit else gate, gate)
    return gate * sigmoid_of(sharpness * gate) * (between(up, limit) + ONE)


gelu, relu_squared, sigmoid = of_one(gelu_of), of_one(relu_squared_of), of_one(sigmoid_of)
gelu_erf = of_one(gelu_erf_of)
relu, exponential, add_scalar = of_one(relu_of), of_one(exponential_of), of_one_and_number(shifted)
clamp, scale, softcap = of_one_and_number(between), of_one_and_number(scaled), of_one_and_number(capped)
signed_root = of_one_and_number(signed_root_of)
multiply, swiglu, geglu, reglu = of_two(product), of_two(swiglu_of), of_two(geglu_of), of_two(reglu_of)


def add(count, x, z, z_stride, y, stride, columns):
    """Write x + z to y; z_stride 0: z is one row for all tokens."""
    row, column = cuda.blockIdx.x, first_column()
    if row < load_i64(count) and column < columns:
        at = row * stride + 4 * column
        a, b, c, d = load_4f32(x + at)
        e, f, g, h = load_4f32(z + row * z_stride + 4 * column)
        store_4f32(y + at, a + e, b + f, c + g, d + h)


def scale_columns(count, x, weight, y, stride, columns):
    """Write x * weight to y; weight: one row for all tokens."""
    row, column = cuda.blockIdx.x, first_column()
    if row < load_i64(count) and column < columns:
        at = row * stride + 4 * column
        a, b, c, d = load_4f32(x + at)
        e, f, g, h = load_4f32(weight + 4 * column)
        store_4f32(y + at, a * e, b * f, c * g, d * h)


def lerp(count, x, z, weight, y, stride, columns):
    """Write x + (z - x) * weight to y; weight: one row for all tokens."""
    row, column = cuda.blockIdx.x, first_column()
    if row < load_i64(count) and column < columns:
        at = row * stride + 4 * column
        a, b, c, d = load_4f32(x + at)
        i, j, k, l = load_4f32(z + at)
        e, f, g, h = load_4f32(weight + 4 * column)
        store_4f32(y + at, a + (i - a) * e, b + (j - b) * f, c + (k - c) * g, d + (l - d) * h)


def softplus(count, x, bias, y, stride, columns):
    """Write log(1 + e^(x + bias)) to y; bias: one row for all tokens."""
    row, column = cuda.blockIdx.x, first_column()
    if row < load_i64(count) and column < columns:
        at = row * stride + 4 * column
        a, b, c, d = load_4f32(x + at)
        e, f, g, h = load_4f32(bias + 4 * column)
        store_4f32(y + at, softplus_of(a + e), softplus_of(b + f), softplus_of(c + g), softplus_of(d + h))


def swiglu_limited(count, gate, up, sharpness, limit, y, stride, columns):
    """Write gate * sigmoid(sharpness * gate) * (up + 1) to y, after clamping gate and up to the limit."""
    row, column, s, most = cuda.blockIdx.x, first_column(), f32_value(sharpness), f32_value(limit)
    if row < load_i64(count) and column < columns:
        at = row * stride + 4 * column
        a, b, c, d = load_4f32(gate + at)
        e, f, g, h = load_4f32(up + at)
        a, b = limited_of(a, e, s, most), limited_of(b, f, s, most)
        store_4f32(y + at, a, b, limited_of(c, g, s, most), limited_of(d, h, s, most))


@device
def xielu_of(x, alpha_p, alpha_n, beta, epsilon):
    """Compute alpha_p x^2 + beta x for x above 0, else alpha_n (e^min(x, epsilon) - 1 - x) + beta x."""
    nonlinear = alpha_p * x * x if x > ZERO else alpha_n * (exp(epsilon if x > epsilon else x) - ONE - x)
    return nonlinear + beta * x


def xielu(count, x, alpha_p, alpha_n, beta, epsilon, y, stride, columns):
    """Write xielu_of(x) to y."""
    row, column = cuda.blockIdx.x, first_column()
    p, n, by, e = f32_value(alpha_p), f32_value(alpha_n), f32_value(beta), f32_value(epsilon)
    if row < load_i64(count) and column < columns:
        at = row * stride + 4 * column
        a, b, c, d = load_4f32(x + at)
        a, b = xielu_of(a, p, n, by, e), xielu_of(b, p, n, by, e)
        store_4f32(y + at, a, b, xielu_of(c, p, n, by, e), xielu_of(d, p, n, by, e))


def scale_by_position(count, x, positions, slope, length, offset, y, stride, columns):
    """Write x * (1 + slope * log(floor((position + offset) / length) + 1)) to y."""
    row, column = cuda.blockIdx.x, first_column()
    if row < load_i64(count) and column < columns:
        at, position = row * stride + 4 * column, load_i64(positions + 8 * row) + offset
        factor = ONE + f32_value(slope) * log(float32(position // length + 1))
        a, b, c, d = load_4f32(x + at)
        store_4f32(y + at, a * factor, b * factor, c * factor, d * factor)


def sigmoid_gate(count, x, gate, gate_stride, y, stride, columns):
    """Write x * sigmoid(gate) to y, with one gate per row."""
    row, column = cuda.blockIdx.x, first_column()
    if row < load_i64(count) and column < columns:
        at, factor = row * stride + 4 * column, sigmoid_of(load_f32(gate + row * gate_stride))
        a, b, c, d = load_4f32(x + at)
        store_4f32(y + at, a * factor, b * factor, c * factor, d * factor)
