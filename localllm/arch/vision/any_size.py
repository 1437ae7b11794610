"""Encoders of pictures of any size.

An image keeps its aspect ratio; each side is rounded to a multiple of patch * merge, and narrow black bars fill the
difference. Learned positions of a square picture are interpolated for pictures of other sizes.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from localllm.arch.family import Builder, HyperparameterReader, Weight
from localllm.arch.vision.hyperparameters import VisionHyperparameters, read_vision
from localllm.arch.vision.resizing import BICUBIC, PixelLimits, ResizableImage, Size, resize_with_bars, round_size
from localllm.arch.vision.vit import to_array
from localllm.errors import ModelError

MAX_MERGE = 4  # patches on a side


class AnySizeVisionHyperparameters(VisionHyperparameters):
    """An encoder of pictures of any size.

    Pictures become `least` to square * square rows of the language model.
    """

    least: ClassVar[int]
    square: ClassVar[int]

    @property
    def max_patches(self) -> int:
        return (self.square * self.merge) ** 2

    @property
    def max_grid(self) -> tuple[int, int]:
        return self.square * self.merge, self.square * self.merge

    @property
    def pair_axes(self) -> tuple[int, ...]:
        """The axis that rotates each pair: height for the first half of a head, width for the second."""
        quarter = self.head_dim // 4
        return (1,) * quarter + (2,) * quarter

    def fit(self, picture: ResizableImage) -> ResizableImage:
        """Resize a picture to the encoder's limits."""
        return resize_with_bars(picture, self.round_size(picture.size), BICUBIC)

    def round_size(self, size: Size) -> Size:
        """Return the nearest size whose sides are multiples of patch * merge, within the limits."""
        unit = self.patch * self.merge
        return round_size(size, unit, PixelLimits(self.least * unit**2, self.square**2 * unit**2))

    def compute_rotary_positions(self, grid: tuple[int, int]) -> np.ndarray:
        y, x = np.indices(grid).reshape(2, -1)
        return np.stack([np.zeros_like(y), y, x], axis=1)


def read_any_size(fields: HyperparameterReader, merge: int) -> dict[str, Any]:
    """Read the fields that all of these encoders have. Raises ModelError.

    merge: the default merge factor.
    """
    values = read_vision(fields, merge=fields.read_count("vision.spatial_merge_size", merge))
    if values["merge"] > MAX_MERGE:
        raise fields.make_error(f"the merge factor must be at most {MAX_MERGE} (found {values['merge']})")
    if values["width"] // values["heads"] % 4:
        raise fields.make_error(
            f"the head dimension must be a multiple of 4 (found {values['width'] // values['heads']})"
        )
    return values


Blend = Callable[[int, int], np.ndarray]  # (wanted, there) -> weights of the table's positions, float64 [wanted, there]


def interpolate_table(table: Weight, grid: tuple[int, int], blend: Blend) -> np.ndarray:
    """Interpolate a square picture's table for a grid of patches, float32 [rows, columns, width]."""
    numbers, side = to_array(table), math.isqrt(table.shape[0])
    y, x = (blend(count, side) for count in grid)
    return np.einsum("ys,xt,stc->yxc", y, x, numbers.reshape(side, side, -1), optimize=True).astype(np.float32)


def compute_corner_weights(count: int, size: int) -> np.ndarray:
    """Compute weights that keep the first and the last position (align_corners=True)."""
    places = np.linspace(0, size - 1, count) if count > 1 else np.zeros(1)
    return np.maximum(1 - np.abs(places[:, None] - np.arange(size)), 0)


def compute_area_weights(count: int, size: int) -> np.ndarray:
    """Compute weights for linear interpolation between patch centres (align_corners=False, antialias)."""
    scale = size / count
    distances = np.arange(size) + 0.5 - (np.arange(count)[:, None] + 0.5) * scale
    weights = np.maximum(1 - np.abs(distances) / max(scale, 1), 0)
    return weights / weights.sum(axis=1, keepdims=True)


def require_square_table(b: Builder, table: Weight, width: int) -> None:
    """Mark the table as used, which no verb reads. Raises ModelError unless it is of a square picture."""
    b.ignore(table)
    if len(table.shape) != 2 or math.isqrt(table.shape[0]) ** 2 != table.shape[0] or table.shape[1] != width:
        raise ModelError(f"tensor {table.name} must have the shape [n * n, {width}] (found {list(table.shape)})")
