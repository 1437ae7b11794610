"""Formulas of elementwise verbs (localllm.arch.rowwise_verbs) in NumPy; inputs and outputs are float32."""

from math import erf

import numpy as np


def gelu_erf(x: np.ndarray) -> np.ndarray:
    halves = x.astype(np.float64) / 2
    return (halves * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2)))).astype(np.float32)


def xielu(x: np.ndarray, alpha_p: float, alpha_n: float, beta: float, epsilon: float) -> np.ndarray:
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        below = alpha_n * (np.expm1(np.minimum(x, epsilon)) - x)
        return (np.where(x > 0, alpha_p * x * x, below) + beta * x).astype(np.float32)


def swiglu_limited(gate: np.ndarray, up: np.ndarray, sharpness: float, limit: float) -> np.ndarray:
    gate, up = if_finite(np.minimum(gate, np.float32(limit)), gate), if_finite(np.clip(up, -limit, limit), up)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-np.float32(sharpness) * gate)) * (up + 1)


def relu_squared(x: np.ndarray) -> np.ndarray:
    return if_finite(np.maximum(x, 0), x) ** 2


def relu(x: np.ndarray) -> np.ndarray:
    return if_finite(np.maximum(x, 0), x)


def exponential(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return if_finite(np.exp(x), x)


def add_scalar(x: np.ndarray, number: float) -> np.ndarray:
    return x + np.float32(number)


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return if_finite(1 / (1 + np.exp(-x)), x)


def clamp(x: np.ndarray, limit: float) -> np.ndarray:
    return if_finite(np.clip(x, np.float32(-limit), np.float32(limit)), x)


def signed_root(x: np.ndarray, least: float) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return if_finite(np.sign(x) * np.sqrt(np.maximum(np.abs(x), np.float32(least))), x)


def softcap(x: np.ndarray, cap: float) -> np.ndarray:
    return if_finite(np.float32(cap) * np.tanh(x / np.float32(cap)), x)


def if_finite(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return y, but NaN where x is not finite.

    Otherwise a bounded function would hide the effect of a broken weight.
    """
    return np.where(np.isfinite(x), y, np.float32(np.nan))
