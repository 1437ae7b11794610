"""Mathematical functions of vectors: exponential, hyperbolic tangent and others."""

from numba import njit

from localllm.kernels.build.pipeline import Pipeline
from localllm.kernels.simd.arithmetic import (
    abs_f32x16,
    fma_f32x16,
    max_f32x16,
    min_f32x16,
    reciprocal_f32x16,
    round_f32x16,
    splat_f32x16,
    two_to_the,
    zero_f32x16,
)
from localllm.kernels.simd.vectors import f32x16, llvm_call, operation


@njit(nogil=True, pipeline_class=Pipeline)
def clamp_f32x16(x, low, high):
    """Clamp x to [low, high]. NaN stays NaN, because max and min return their second argument for it."""
    return min_f32x16(splat_f32x16(high), max_f32x16(splat_f32x16(low), x))


@njit(nogil=True, pipeline_class=Pipeline)
def exp_f32x16(x):
    """Compute e ** x within 2 units in the last place for x from -87 to 88.

    Below -87.7 the result is 0, above 88.4 infinity; NaN gives NaN.

    x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts, so that r is exact); e ** r by its series to r ** 7 / 7!.
    """
    x = clamp_f32x16(x, -88.0, 89.0)
    n = round_f32x16(x * splat_f32x16(1.4426950408889634))
    r = fma_f32x16(n, splat_f32x16(-0.693359375), x)
    r = fma_f32x16(n, splat_f32x16(2.12194440e-4), r)
    p = splat_f32x16(1 / 5040)
    p = fma_f32x16(p, r, splat_f32x16(1 / 720))
    p = fma_f32x16(p, r, splat_f32x16(1 / 120))
    p = fma_f32x16(p, r, splat_f32x16(1 / 24))
    p = fma_f32x16(p, r, splat_f32x16(1 / 6))
    p = fma_f32x16(p, r, splat_f32x16(0.5))
    p = fma_f32x16(p, r, splat_f32x16(1.0))
    p = fma_f32x16(p, r, splat_f32x16(1.0))
    return p * two_to_the(n)


@njit(nogil=True, pipeline_class=Pipeline)
def exp2_f32x16(x):
    """Compute 2 ** x to a relative error of 2e-7 for x from -126 to 127.5.

    Below -126.5 the result is 0, above 127.5 infinity; NaN gives NaN.

    x = n + r with |r| <= 1/2; 2 ** r by the polynomial that interpolates it at the 6 Chebyshev nodes, with an error of
    at most 1e-7.
    """
    x = clamp_f32x16(x, -127.0, 128.0)
    n = round_f32x16(x)
    r = x - n
    p = splat_f32x16(0.001339086336353527)
    p = fma_f32x16(p, r, splat_f32x16(0.009676031918255982))
    p = fma_f32x16(p, r, splat_f32x16(0.05550357114222094))
    p = fma_f32x16(p, r, splat_f32x16(0.2402210748530968))
    p = fma_f32x16(p, r, splat_f32x16(0.6931471880262273))
    p = fma_f32x16(p, r, splat_f32x16(1.0000000754548972))
    return p * two_to_the(n)


@operation(f32x16, f32x16, f32x16)
def copy_sign(builder, value, sign):
    """Return `value`, which must not be negative, with the sign of `sign`."""
    return llvm_call(builder, "llvm.copysign.v16f32", f32x16.llvm, [value, sign])


@njit(nogil=True, pipeline_class=Pipeline)
def tanh_f32x16(x):
    """Compute tanh x = (1 - e ** -2|x|) / (1 + e ** -2|x|) with the sign of x; the error is at most 2e-7."""
    e = exp_f32x16(abs_f32x16(x) * splat_f32x16(-2.0))
    one = splat_f32x16(1.0)
    return copy_sign((one - e) * reciprocal_f32x16(one + e), x)


@njit(nogil=True, pipeline_class=Pipeline)
def erf_f32x16(x):
    """Compute erf x; the error is at most 3e-7.

    erf |x| = 1 - (a t + ... + e t^5) e ** -x^2 with t = 1 / (1 + p |x|). Source: Abramowitz and Stegun 1964, 7.1.26.
    """
    size, one = abs_f32x16(x), splat_f32x16(1.0)
    t = reciprocal_f32x16(fma_f32x16(size, splat_f32x16(0.3275911), one))
    p = splat_f32x16(1.061405429)
    p = fma_f32x16(p, t, splat_f32x16(-1.453152027))
    p = fma_f32x16(p, t, splat_f32x16(1.421413741))
    p = fma_f32x16(p, t, splat_f32x16(-0.284496736))
    p = fma_f32x16(p, t, splat_f32x16(0.254829592))
    return copy_sign(one - p * t * exp_f32x16(-(x * x)), x)


@njit(nogil=True, pipeline_class=Pipeline)
def if_finite_f32x16(y, x):
    """Return y, but NaN where x is not finite.

    A bounded function, such as a sigmoid, would otherwise hide that broken weights have produced infinity or NaN.
    """
    return fma_f32x16(x, zero_f32x16(), y)


@njit(nogil=True, pipeline_class=Pipeline)
def sigmoid_f32x16(x):
    """Compute 1 / (1 + e ** -x); infinity gives NaN."""
    return if_finite_f32x16(reciprocal_f32x16(splat_f32x16(1.0) + exp_f32x16(-x)), x)


@njit(nogil=True, pipeline_class=Pipeline)
def softplus_f32x16(x):
    """Compute log(1 + e ** x) = max(x, 0) + log(1 + u) with u = e ** -|x|.

    The relative error is at most 2e-7; infinity gives NaN.

    log(1 + u) = 2 artanh(s) with s = u / (2 + u) <= 1/3, by its series to s ** 15 / 15.
    """
    u = exp_f32x16(-abs_f32x16(x))
    s = u * reciprocal_f32x16(splat_f32x16(2.0) + u)
    square = s * s
    p = splat_f32x16(2 / 15)
    p = fma_f32x16(p, square, splat_f32x16(2 / 13))
    p = fma_f32x16(p, square, splat_f32x16(2 / 11))
    p = fma_f32x16(p, square, splat_f32x16(2 / 9))
    p = fma_f32x16(p, square, splat_f32x16(2 / 7))
    p = fma_f32x16(p, square, splat_f32x16(2 / 5))
    p = fma_f32x16(p, square, splat_f32x16(2 / 3))
    p = fma_f32x16(p, square, splat_f32x16(2.0))
    return if_finite_f32x16(fma_f32x16(p, s, max_f32x16(zero_f32x16(), x)), x)
