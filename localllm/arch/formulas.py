"""Formulas of verbs that treat rows one by one, in NumPy, that take more than a line: see localllm.arch.verbs."""

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
