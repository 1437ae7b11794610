"""LFM2-VL (Liquid AI 2025, arXiv 2511.23404): SigLIP 2 (Tschannen et al. 2025, 2502.14786), for any picture size.

Learned positions for a square picture are interpolated, and squares of patches are concatenated.

An image of up to 512 such squares is one picture, stretched to whole squares. A larger one, with black bars, is cut
into tiles of 512 * 512 pixels, followed by the whole image as one more picture.
"""

from typing import ClassVar

import numpy as np

from localllm.arch.family import Activation, Builder, Fields, Weights, frozen
from localllm.arch.vision.any_size import AnySize, align_areas, interpolate_table, read_any_size, use_square_table
from localllm.arch.vision.hyperparameters import Prepared, in_squares, pixels_of
from localllm.arch.vision.resizing import BILINEAR, Picture, Size, cut_tiles, resize, with_bars
from localllm.arch.vision.vit import embed_patches, transformer

MARKS = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
TILE = 512  # pixels on each side
LEAST_TILES, MOST_TILES = 2, 10
EPSILON = 1e-5  # of the projector's norm


@frozen
class Lfm2Vision(AnySize):
    least: ClassVar[int] = 64
    square: ClassVar[int] = 16

    @property
    def most_grid(self) -> tuple[int, int]:
        side = max(self.square * self.merge, TILE // self.patch)
        return side, side

    @property
    def most_patches(self) -> int:
        return self.most_grid[0] ** 2

    @property
    def input_width(self) -> int:
        """The width of a patch and its position embedding."""
        return self.pixels + self.width

    def rows(self, picture: Picture, w: Weights) -> np.ndarray:
        positions = interpolate_table(w.part("v.").position_embd, self.grid(picture), align_areas)
        return np.concatenate((pixels_of(self, picture), positions.reshape(-1, self.width)), axis=1)

    def fit(self, picture: Picture) -> Picture:
        return resize(picture, self.whole_size(picture.size), BILINEAR)


def read(fields: Fields) -> Lfm2Vision:
    h = Lfm2Vision(**read_any_size(fields, merge=2))
    if TILE % (h.patch * h.merge):
        raise fields.error(f"patch size times merge factor, {h.patch * h.merge}, must divide the tile size {TILE}")
    return h


def prepare(h: Lfm2Vision, picture: Picture) -> Prepared:
    """Prepare one picture, or its tiles row by row and then the whole image, between control tokens."""
    begin, end, thumbnail = MARKS
    if not is_large(h, picture.size):
        return Prepared([h.fit(picture)], [begin, 0, end])
    columns, rows = grid_for(picture.size)
    tiles = cut_tiles(with_bars(picture, (columns * TILE, rows * TILE), BILINEAR), TILE)
    parts: list[str | int] = [begin]
    for number in range(len(tiles)):
        parts += [f"<|img_row_{number // columns + 1}_col_{number % columns + 1}|>", number]
    return Prepared([*tiles, h.fit(picture)], [*parts, thumbnail, len(tiles), end])


def is_large(h: Lfm2Vision, size: Size) -> bool:
    """Return whether an image has more than twice the pixels that one picture may have."""
    unit = h.patch * h.merge
    columns, rows = (max(h.patch, round(length / unit) * unit) for length in size)
    return columns * rows > 2 * (h.square * unit) ** 2


def grid_for(size: Size) -> Size:
    """Return the columns and rows of tiles whose shape is nearest to the image's.

    Of several, choose the one with the most tiles that has less than twice the image's pixels.
    """
    shape, best, nearest = np.float32(size[0]) / np.float32(size[1]), (1, 1), np.inf
    sides = range(1, MOST_TILES + 1)
    grids = [(x, y) for x in sides for y in sides if LEAST_TILES <= x * y <= MOST_TILES]
    for x, y in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = float(abs(shape - np.float32(x) / np.float32(y)))
        if distance < nearest or (distance == nearest and 2 * size[0] * size[1] > TILE * TILE * x * y):
            best, nearest = (x, y), distance
    return best


def tower(b: Builder, w: Weights, h: Lfm2Vision, x: Activation) -> Activation:
    v = w.part("v.")
    use_square_table(b, v.position_embd, h.width)
    x = b.add(embed_patches(b, v, h, b.slice_columns(x, 0, h.pixels)), b.slice_columns(x, h.pixels, h.input_width))
    return b.layer_norm(transformer(b, v, h, x, h.layers), v.post_ln, h.epsilon)


def gather(h: Lfm2Vision, x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Concatenate each square of patches to one row."""
    squares = in_squares(x, grid, h.merge)
    return squares.reshape(len(squares), -1)


def project(b: Builder, w: Weights, h: Lfm2Vision, x: Activation) -> Activation:
    norm = w.get("mm.input_norm")
    x = b.layer_norm(x, norm, EPSILON) if norm else x
    return b.linear(b.gelu_erf(b.linear(x, w.require("mm.1"))), w.require("mm.2"))
