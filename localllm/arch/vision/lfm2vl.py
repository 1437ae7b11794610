"""LFM2-VL (Liquid AI 2025, arXiv 2511.23404): SigLIP 2 (Tschannen et al. 2025, 2502.14786), for any picture size.

Learned positions for a square picture are interpolated, and squares of patches are concatenated.

An image of up to 512 such squares is one picture, stretched to whole squares. A larger one, with black bars, is cut
into tiles of 512 * 512 pixels, followed by the whole image as one more picture.
"""

from typing import ClassVar

import numpy as np

from localllm.arch.family import Activation, Builder, HyperparameterReader, Weights, frozen
from localllm.arch.vision.any_size import (
    AnySizeVisionHyperparameters,
    compute_area_weights,
    interpolate_table,
    read_any_size,
    require_square_table,
)
from localllm.arch.vision.hyperparameters import PreparedImage, cut_into_patches, group_in_squares
from localllm.arch.vision.resizing import BILINEAR, ResizableImage, Size, cut_tiles, resize, resize_with_bars
from localllm.arch.vision.vit import apply_transformer, embed_patches

MARKS = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
TILE = 512  # pixels on each side
MIN_TILES, MAX_TILES = 2, 10
EPSILON = 1e-5  # of the projector's norm


@frozen
class Lfm2VisionHyperparameters(AnySizeVisionHyperparameters):
    least: ClassVar[int] = 64
    square: ClassVar[int] = 16

    @property
    def max_grid(self) -> tuple[int, int]:
        side = max(self.square * self.merge, TILE // self.patch)
        return side, side

    @property
    def max_patches(self) -> int:
        return self.max_grid[0] ** 2

    @property
    def input_width(self) -> int:
        """The width of a patch and its position embedding."""
        return self.pixels + self.width

    def compute_rows(self, picture: ResizableImage, w: Weights) -> np.ndarray:
        positions = interpolate_table(
            w.get_submodel("v.").position_embd, self.compute_grid(picture), compute_area_weights
        )
        return np.concatenate((cut_into_patches(self, picture), positions.reshape(-1, self.width)), axis=1)

    def fit(self, picture: ResizableImage) -> ResizableImage:
        return resize(picture, self.round_size(picture.size), BILINEAR)


def read(fields: HyperparameterReader) -> Lfm2VisionHyperparameters:
    h = Lfm2VisionHyperparameters(**read_any_size(fields, merge=2))
    if TILE % (h.patch * h.merge):
        raise fields.make_error(f"patch size times merge factor, {h.patch * h.merge}, must divide the tile size {TILE}")
    return h


def prepare(h: Lfm2VisionHyperparameters, picture: ResizableImage) -> PreparedImage:
    """Prepare one picture, or its tiles row by row and then the whole image, between control tokens."""
    begin, end, thumbnail = MARKS
    if not is_large(h, picture.size):
        return PreparedImage([h.fit(picture)], [begin, 0, end])
    columns, rows = choose_grid(picture.size)
    tiles = cut_tiles(resize_with_bars(picture, (columns * TILE, rows * TILE), BILINEAR), TILE)
    parts: list[str | int] = [begin]
    for number in range(len(tiles)):
        parts += [f"<|img_row_{number // columns + 1}_col_{number % columns + 1}|>", number]
    return PreparedImage([*tiles, h.fit(picture)], [*parts, thumbnail, len(tiles), end])


def is_large(h: Lfm2VisionHyperparameters, size: Size) -> bool:
    """Return whether an image has more than twice the pixels that one picture may have."""
    unit = h.patch * h.merge
    columns, rows = (max(h.patch, round(length / unit) * unit) for length in size)
    return columns * rows > 2 * (h.square * unit) ** 2


def choose_grid(size: Size) -> Size:
    """Return the columns and rows of tiles whose shape is nearest to the image's.

    Of several, choose the one with the most tiles that has less than twice the image's pixels.
    """
    shape, best, nearest = np.float32(size[0]) / np.float32(size[1]), (1, 1), np.inf
    sides = range(1, MAX_TILES + 1)
    grids = [(x, y) for x in sides for y in sides if MIN_TILES <= x * y <= MAX_TILES]
    for x, y in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = float(abs(shape - np.float32(x) / np.float32(y)))
        if distance < nearest or (distance == nearest and 2 * size[0] * size[1] > TILE * TILE * x * y):
            best, nearest = (x, y), distance
    return best


def encode(b: Builder, w: Weights, h: Lfm2VisionHyperparameters, x: Activation) -> Activation:
    v = w.get_submodel("v.")
    require_square_table(b, v.position_embd, h.width)
    x = b.add(embed_patches(b, v, h, b.slice_columns(x, 0, h.pixels)), b.slice_columns(x, h.pixels, h.input_width))
    return b.layer_norm(apply_transformer(b, v, h, x, h.layers), v.post_ln, h.epsilon)


def merge_patches(h: Lfm2VisionHyperparameters, x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Concatenate each square of patches to one row."""
    squares = group_in_squares(x, grid, h.merge)
    return squares.reshape(len(squares), -1)


def project(b: Builder, w: Weights, h: Lfm2VisionHyperparameters, x: Activation) -> Activation:
    norm = w.get("mm.input_norm")
    x = b.layer_norm(x, norm, EPSILON) if norm else x
    return b.linear(b.gelu_erf(b.linear(x, w.require("mm.1"))), w.require("mm.2"))
