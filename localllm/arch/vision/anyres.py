"""LLaVA 1.6's images (Liu et al. 2024, https://llava-vl.github.io/blog/2024-01-30-llava-next/).

An image becomes one square with the whole image, and tiles of the image at the allowed size that fits best.

As in training and in Hugging Face's transformers, the square comes first, then the rows of the tiles line by line,
without those of the black bars, each line followed by the newline embedding. llama.cpp puts the tiles first, one after
the other with their black bars, and does not cut an image that is no larger than a square.
"""

from typing import NamedTuple

import numpy as np

from localllm.arch.family import Fields, Weight, Weights
from localllm.arch.vision.resizing import BICUBIC, Picture, Size, resize, with_bars
from localllm.arch.vision.tiling import cut_tiles, most_used
from localllm.arch.vision.vit import numbers_of
from localllm.errors import ModelError

MOST_TILES = 36
NEWLINES = "v.image_newline", "model.image_newline"  # names of the newline embedding; the second one in old files
UNPADDED = "spatial_unpad"


class Anyres(NamedTuple):
    """The rules for cutting images.

    Attributes:
        sizes: allowed sizes in pixels, multiples of a tile; an image is resized to the best one; (): it is not cut.
        is_unpadded: order rows line by line across tiles, without the bars; otherwise tile by tile.
    """

    sizes: tuple[Size, ...] = ()
    is_unpadded: bool = False


def read_anyres(fields: Fields, side: int) -> Anyres:
    """Read how images are cut; side: side of a tile. Raises ModelError."""
    name = "vision.image_grid_pinpoints"
    if fields.raw(name) is None:
        return Anyres()
    numbers = fields.array(name, "iu", "an array of whole numbers").astype(np.int64)
    sizes = numbers.reshape(-1, 2) if len(numbers) % 2 == 0 else numbers[:0].reshape(0, 2)
    tiles = sizes // side
    if not len(sizes) or (tiles * side != sizes).any() or (sizes < side).any() or (tiles > MOST_TILES).any():
        raise fields.wrong(name, f"pairs of multiples of {side}")
    if (tiles.prod(axis=1) > MOST_TILES).any():
        raise fields.wrong(name, f"sizes of up to {MOST_TILES} tiles")
    merge = "vision.mm_patch_merge_type"
    is_unpadded = fields.text(merge, "flat") == UNPADDED
    return Anyres(tuple((int(columns), int(rows)) for columns, rows in sizes), is_unpadded)


def squares(picture: Picture, side: int, anyres: Anyres) -> list[Picture]:
    """Return the whole image as a square, and then its tiles, row by row."""
    overview = resize(picture, (side, side), BICUBIC)
    return [overview, *cut_tiles(with_bars(picture, most_used(picture.size, anyres.sizes), BICUBIC), side)]


def arrange_rows(rows: list[np.ndarray], size: Size, anyres: Anyres, side: int, newline: np.ndarray) -> np.ndarray:
    """Order the rows of an image's tiles, float32 [rows, width] each, as the language model reads them.

    size: size of the image.  newline: float32 [width], the embedding after a line.
    """
    if not anyres.is_unpadded:
        return np.concatenate(rows)
    overview, *tiles = rows
    columns, lines = (length // side for length in most_used(size, anyres.sizes))
    per_side = int(len(overview) ** 0.5)
    grid = np.stack(tiles).reshape(lines, columns, per_side, per_side, -1).transpose(0, 2, 1, 3, 4)
    grid = without_bars(grid.reshape(lines * per_side, columns * per_side, -1), size)
    ends = np.broadcast_to(newline, (len(grid), 1, len(newline)))
    return np.concatenate((overview, np.concatenate((grid, ends), axis=1).reshape(-1, len(newline))))


def without_bars(grid: np.ndarray, size: Size) -> np.ndarray:
    """Return a grid of rows [lines, columns, width] without those of the bars around an image of that size."""
    lines, columns = grid.shape[:2]
    if size[0] / size[1] > columns / lines:
        bar = (lines - int(round(size[1] * (columns / size[0]), 7))) // 2
        return grid[bar : lines - bar]
    bar = (columns - int(round(size[0] * (lines / size[1]), 7))) // 2
    return grid[:, bar : columns - bar]


def newline_of(w: Weights, anyres: Anyres, width: int) -> Weight | None:
    """Return the embedding after each line of patches, None if the file has none.

    Raises ModelError if the model needs one, or if the embedding does not have `width` numbers.
    """
    weight = next(filter(None, map(w.bare, NEWLINES)), None)
    if weight is None and anyres.is_unpadded:
        raise ModelError(f"the model has no tensor {NEWLINES[0]}")
    return weight and weight.shaped(width)


def newline_numbers(w: Weights, anyres: Anyres, width: int) -> np.ndarray:
    """Return the newline embedding, float32 [width]; zeros if the file has none."""
    weight = newline_of(w, anyres, width)
    return np.zeros(width, np.float32) if weight is None else numbers_of(weight)
