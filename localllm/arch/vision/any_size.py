"""Encoders of pictures of any size.

An image keeps its aspect ratio; each side is rounded to a multiple of patch * merge, and narrow black bars fill the
difference.
"""

from typing import Any, ClassVar

import numpy as np

from localllm.arch.family import Fields
from localllm.arch.vision.hyperparameters import Vision, read_vision
from localllm.arch.vision.resizing import BICUBIC, Picture, Pixels, Size, whole_size, with_bars

MOST_MERGED = 4  # patches on a side


class AnySize(Vision):
    """An encoder of pictures of any size, which become `least` to square * square rows of the language model."""

    least: ClassVar[int]
    square: ClassVar[int]

    @property
    def most_patches(self) -> int:
        return (self.square * self.merge) ** 2

    @property
    def most_grid(self) -> tuple[int, int]:
        return self.square * self.merge, self.square * self.merge

    @property
    def pair_axes(self) -> tuple[int, ...]:
        """The axis that rotates each pair: height for the first half of a head, width for the second one."""
        quarter = self.head_dim // 4
        return (1,) * quarter + (2,) * quarter

    def fit(self, picture: Picture) -> Picture:
        """Resize a picture to the encoder's limits."""
        return with_bars(picture, self.whole_size(picture.size), BICUBIC)

    def whole_size(self, size: Size) -> Size:
        """Return the nearest size whose sides are multiples of patch * merge, within the limits."""
        unit = self.patch * self.merge
        return whole_size(size, unit, Pixels(self.least * unit**2, self.square**2 * unit**2))

    def rotary_positions(self, grid: tuple[int, int]) -> np.ndarray:
        y, x = np.indices(grid).reshape(2, -1)
        return np.stack([np.zeros_like(y), y, x], axis=1)


def read_any_size(fields: Fields, merge: int) -> dict[str, Any]:
    """Read the fields that all of these encoders have. Raises ModelError. merge: the default merge factor."""
    values = read_vision(fields, merge=fields.count("vision.spatial_merge_size", merge))
    if values["merge"] > MOST_MERGED:
        raise fields.error(f"patches merged by {values['merge']} are not supported, {MOST_MERGED} is the most")
    if values["width"] // values["heads"] % 4:
        raise fields.error(
            f"heads of {values['width'] // values['heads']} numbers cannot be rotated by rows and columns"
        )
    return values
