"""Resize images to the sizes that encoders need, and cut them into tiles.

Sizes are (columns, rows) in pixels. They are rounded as in llama.cpp, in float32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

Size = tuple[int, int]
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's filter numbers


class ResizableImage(Protocol):
    """The part of Pillow's Image that resizing uses; images are RGB."""

    @property
    def size(self) -> Size: ...

    def resize(self, size: Size, resample: int) -> "ResizableImage": ...

    def crop(self, box: tuple[int, int, int, int]) -> "ResizableImage": ...


class PixelLimits(NamedTuple):
    """The minimum and maximum number of pixels of a picture."""

    least: int
    most: int


def resize(picture: ResizableImage, size: Size, resample: int) -> Any:
    """Resize a picture: first its columns, then its rows, as in llama.cpp.

    The order matters, because values are rounded in between; Pillow 13 by itself takes the cheaper one.
    """
    return picture.resize((size[0], picture.size[1]), resample).resize(size, resample)


def resize_with_bars(
    picture: ResizableImage, size: Size, resample: int, colour: tuple[int, int, int] = (0, 0, 0)
) -> ResizableImage:
    """Scale a picture to fit a size, with bars above and below or on both sides."""
    from PIL import Image  # whoever has a picture has Pillow installed

    if picture.size == size:
        return picture
    scale = min(np.float32(target) / np.float32(length) for target, length in zip(size, picture.size, strict=True))
    columns, rows = (
        min(int(np.ceil(np.float32(length) * scale)), target) for target, length in zip(size, picture.size, strict=True)
    )
    canvas = Image.new("RGB", size, colour)
    canvas.paste(resize(picture, (columns, rows), resample), ((size[0] - columns) // 2, (size[1] - rows) // 2))
    return canvas


def round_size(size: Size, unit: int, pixels: PixelLimits) -> Size:
    """Round both sides of a picture to multiples of `unit`, scaled so that the pixels are within the limits."""
    columns, rows = (max(unit, int(np.floor(np.float32(length) / np.float32(unit) + 0.5)) * unit) for length in size)
    area = np.float32(size[1]) * np.float32(size[0])
    if columns * rows > pixels.most:
        by = np.sqrt(area / np.float32(pixels.most))
        columns, rows = (max(unit, int(np.float32(length) / by / np.float32(unit)) * unit) for length in size)
    elif columns * rows < pixels.least:
        by = np.sqrt(np.float32(pixels.least) / area)
        columns, rows = (int(np.ceil(np.float32(length) * by / np.float32(unit))) * unit for length in size)
    return columns, rows


def choose_size(size: Size, allowed: Sequence[Size]) -> Size:
    """Choose the size that keeps most of an image's pixels when the image is scaled to fit.

    Of several that keep equally many, choose the one with the least empty space.
    """

    def rank(candidate: Size) -> tuple[int, int]:
        scale = min(np.float32(target) / np.float32(length) for target, length in zip(candidate, size, strict=True))
        columns, rows = (int(np.float32(length) * scale) for length in size)
        pixels = min(columns * rows, size[0] * size[1])
        return pixels, pixels - candidate[0] * candidate[1]

    return max(allowed, key=rank)


def list_grids(minimum: int, maximum: int, side: int) -> list[Size]:
    """List the sizes of grids of `minimum` to `maximum` whole tiles."""
    return [
        (columns * side, rows * side)
        for columns in range(minimum, maximum + 1)
        for rows in range(max(-(-minimum // columns), minimum), min(maximum // columns, maximum) + 1)
    ]


def cut_into_tiles(picture: ResizableImage, allowed: Sequence[Size], side: int) -> list[ResizableImage]:
    """Cut a picture with black bars into squares, row by row; none if it is no larger than one square."""
    if max(picture.size) <= side:
        return []
    return cut_tiles(resize_with_bars(picture, choose_size(picture.size, allowed), BICUBIC), side)


def cut_tiles(picture: ResizableImage, side: int) -> list[ResizableImage]:
    """Cut a picture into squares, row by row."""
    columns, rows = (length // side for length in picture.size)
    return [
        picture.crop((x * side, y * side, (x + 1) * side, (y + 1) * side)) for y in range(rows) for x in range(columns)
    ]
