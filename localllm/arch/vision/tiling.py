"""Choose one of the sizes that an encoder allows for an image, and cut the image into tiles.

Sizes are computed in float32, as in llama.cpp.
"""

from collections.abc import Sequence

import numpy as np

from localllm.arch.vision.resizing import BICUBIC, Picture, Size, with_bars


def most_used(size: Size, allowed: Sequence[Size]) -> Size:
    """Choose the size that keeps most of an image's pixels when the image is scaled to fit.

    Of several that keep equally many, choose the one with the least empty space.
    """

    def rank(candidate: Size) -> tuple[int, int]:
        scale = min(np.float32(target) / np.float32(length) for target, length in zip(candidate, size, strict=True))
        columns, rows = (int(np.float32(length) * scale) for length in size)
        pixels = min(columns * rows, size[0] * size[1])
        return pixels, pixels - candidate[0] * candidate[1]

    return max(allowed, key=rank)


def grids(minimum: int, maximum: int, side: int) -> list[Size]:
    """List the sizes of grids of `minimum` to `maximum` whole tiles."""
    return [
        (columns * side, rows * side)
        for columns in range(minimum, maximum + 1)
        for rows in range(max(-(-minimum // columns), minimum), min(maximum // columns, maximum) + 1)
    ]


def tiles_of(picture: Picture, allowed: Sequence[Size], side: int) -> list[Picture]:
    """Cut a picture with black bars into squares, row by row; none if it is no larger than one square."""
    if max(picture.size) <= side:
        return []
    return cut_tiles(with_bars(picture, most_used(picture.size, allowed), BICUBIC), side)


def cut_tiles(picture: Picture, side: int) -> list[Picture]:
    """Cut a picture into squares, row by row."""
    columns, rows = (length // side for length in picture.size)
    return [
        picture.crop((x * side, y * side, (x + 1) * side, (y + 1) * side)) for y in range(rows) for x in range(columns)
    ]
