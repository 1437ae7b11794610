"""Learned positions of a square picture, interpolated for pictures of other sizes."""

import math
from collections.abc import Callable

import numpy as np

from localllm.arch.family import Builder, Weight
from localllm.arch.vision.vit import numbers_of
from localllm.errors import ModelError

Blend = Callable[[int, int], np.ndarray]  # (wanted, there) -> weights of the table's positions, float64 [wanted, there]


def interpolate_table(table: Weight, grid: tuple[int, int], blend: Blend) -> np.ndarray:
    """Interpolate a square picture's table for a grid of patches: float32 [rows, columns, width]."""
    numbers, side = numbers_of(table), math.isqrt(table.shape[0])
    y, x = (blend(count, side) for count in grid)
    return np.einsum("ys,xt,stc->yxc", y, x, numbers.reshape(side, side, -1), optimize=True).astype(np.float32)


def by_corners(count: int, size: int) -> np.ndarray:
    """Compute weights that keep the first and the last position (align_corners=True)."""
    places = np.linspace(0, size - 1, count) if count > 1 else np.zeros(1)
    return np.maximum(1 - np.abs(places[:, None] - np.arange(size)), 0)


def by_areas(count: int, size: int) -> np.ndarray:
    """Compute weights for linear interpolation between patch centres (align_corners=False, antialias)."""
    scale = size / count
    distances = np.arange(size) + 0.5 - (np.arange(count)[:, None] + 0.5) * scale
    weights = np.maximum(1 - np.abs(distances) / max(scale, 1), 0)
    return weights / weights.sum(axis=1, keepdims=True)


def use_square_table(b: Builder, table: Weight, width: int) -> None:
    """Mark the table as used, though no verb reads it. Raises ModelError if it is not of a square picture."""
    b.ignore(table)
    if len(table.shape) != 2 or math.isqrt(table.shape[0]) ** 2 != table.shape[0] or table.shape[1] != width:
        raise ModelError(f"tensor {table.name} should have the shape [n * n, {width}], has {list(table.shape)}")
