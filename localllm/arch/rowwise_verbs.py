"""Elementwise verbs, with their formulas in NumPy. Each has a row in localllm.kernels.table, and kernels."""

from collections.abc import Callable
from math import erf
from typing import Any, Protocol

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
    gate, up = propagate_nan(np.minimum(gate, np.float32(limit)), gate), propagate_nan(np.clip(up, -limit, limit), up)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-np.float32(sharpness) * gate)) * (up + 1)


def relu_squared(x: np.ndarray) -> np.ndarray:
    return propagate_nan(np.maximum(x, 0), x) ** 2


def relu(x: np.ndarray) -> np.ndarray:
    return propagate_nan(np.maximum(x, 0), x)


def exponential(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return propagate_nan(np.exp(x), x)


def add_scalar(x: np.ndarray, number: float) -> np.ndarray:
    return x + np.float32(number)


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return propagate_nan(1 / (1 + np.exp(-x)), x)


def clamp(x: np.ndarray, limit: float) -> np.ndarray:
    return propagate_nan(np.clip(x, np.float32(-limit), np.float32(limit)), x)


def signed_root(x: np.ndarray, least: float) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return propagate_nan(np.sign(x) * np.sqrt(np.maximum(np.abs(x), np.float32(least))), x)


def softcap(x: np.ndarray, cap: float) -> np.ndarray:
    return propagate_nan(np.float32(cap) * np.tanh(x / np.float32(cap)), x)


def propagate_nan(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return y, but NaN where x is not finite.

    Otherwise a bounded function would hide the effect of a broken weight.
    """
    return np.where(np.isfinite(x), y, np.float32(np.nan))


Activation = Any


class RowwiseVerbs(Protocol):
    """Elementwise verbs: y has the shape of x."""

    def rowwise(
        self, verb: str, formula: Callable[..., np.ndarray], *inputs: Activation, **numbers: float
    ) -> Activation:
        """Apply an elementwise verb.

        formula: the function of NumPy arrays and numbers that it computes.
        """

    def add(self, x: Activation, y: Activation) -> Activation:
        """Compute x + y."""
        return self.rowwise("add", np.add, x, y)

    def multiply(self, x: Activation, y: Activation) -> Activation:
        """Compute x * y."""
        return self.rowwise("multiply", np.multiply, x, y)

    def swiglu(self, gate: Activation, up: Activation) -> Activation:
        """Compute silu(gate) * up (Shazeer 2020)."""
        return self.rowwise("swiglu", swiglu, gate, up)

    def swiglu_limited(self, gate: Activation, up: Activation, sharpness: float, limit: float) -> Activation:
        """Compute gate * sigmoid(sharpness * gate) * (up + 1) of inputs clamped to the limit (gpt-oss, 2025)."""
        return self.rowwise("swiglu_limited", swiglu_limited, gate, up, sharpness=sharpness, limit=limit)

    def geglu(self, gate: Activation, up: Activation) -> Activation:
        """Compute gelu(gate) * up (Shazeer 2020)."""
        return self.rowwise("geglu", geglu, gate, up)

    def reglu(self, gate: Activation, up: Activation) -> Activation:
        """Compute max(gate, 0) * up (Shazeer 2020), NaN where the gate is infinite."""
        return self.rowwise("reglu", reglu, gate, up)

    def gelu(self, x: Activation) -> Activation:
        """Compute x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
        return self.rowwise("gelu", gelu, x)

    def gelu_erf(self, x: Activation) -> Activation:
        """Compute x / 2 * (1 + erf(x / sqrt(2))), which `gelu` approximates to 5e-4.

        Hendrycks and Gimpel 2016.
        """
        return self.rowwise("gelu_erf", gelu_erf, x)

    def relu_squared(self, x: Activation) -> Activation:
        """Compute max(x, 0)^2 (So et al. 2021), NaN for infinity."""
        return self.rowwise("relu_squared", relu_squared, x)

    def relu(self, x: Activation) -> Activation:
        """Compute max(x, 0), NaN for infinity."""
        return self.rowwise("relu", relu, x)

    def exponential(self, x: Activation) -> Activation:
        """Compute e^x, NaN for infinity."""
        return self.rowwise("exponential", exponential, x)

    def add_scalar(self, x: Activation, number: float) -> Activation:
        """Compute x + number."""
        return self.rowwise("add_scalar", add_scalar, x, number=number)

    def xielu(self, x: Activation, alpha_p: float, alpha_n: float, beta: float, epsilon: float) -> Activation:
        """Compute xIELU (Huang and Schlag 2024, arXiv 2411.13010).

        alpha_p x^2 + beta x where x is above 0, else alpha_n (e^min(x, epsilon) - 1 - x) + beta x. alpha_p and
        alpha_n are the values to apply, not the learned parameters: softplus is already applied to both, and beta is
        already added to alpha_n. epsilon is slightly below 0.
        """
        return self.rowwise("xielu", xielu, x, alpha_p=alpha_p, alpha_n=alpha_n, beta=beta, epsilon=epsilon)

    def sigmoid(self, x: Activation) -> Activation:
        """Compute 1 / (1 + e^-x), NaN for infinity."""
        return self.rowwise("sigmoid", sigmoid, x)

    def clamp(self, x: Activation, limit: float) -> Activation:
        """Limit x to -limit..limit, NaN for infinity."""
        return self.rowwise("clamp", clamp, x, limit=limit)

    def signed_root(self, x: Activation, least: float) -> Activation:
        """Compute sign(x) * sqrt(max(|x|, least)); 0 for 0 and NaN for infinity."""
        return self.rowwise("signed_root", signed_root, x, least=least)

    def softcap(self, x: Activation, cap: float) -> Activation:
        """Compute cap * tanh(x / cap), NaN for infinity."""
        return self.rowwise("softcap", softcap, x, cap=cap)


# ---- formulas of rowwise verbs, float32 as their inputs ----


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def geglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gelu(gate) * up


def reglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return propagate_nan(np.maximum(gate, 0), gate) * up


def gelu(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    cube = x * x * x  # x**3 would call pow, and take as long as all the rest
    return (x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * cube)))).astype(np.float32)
