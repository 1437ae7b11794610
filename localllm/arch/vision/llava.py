"""LLaVA 1.5 and 1.6 (Liu et al. 2023, arXiv 2310.03744).

CLIP (Radford et al. 2021, 2103.00020) up to its second to last layer, then two matrices.

An image is padded to a square with CLIP's mean colour; in 1.6 it becomes a square with the whole image, and tiles of
the image at the allowed size that fits best. As in Hugging Face's transformers, all layers of the file are used, the
class token (`class_embd`) comes first, and GELU is exact. llama.cpp leaves out the file's last layer and puts the class
token after the patches, so that each patch gets its neighbour's position.

In 1.6 (https://llava-vl.github.io/blog/2024-01-30-llava-next/), as in transformers, the square comes first, then the
rows of the tiles line by line, without those of the black bars, each line followed by the newline embedding. llama.cpp
puts the tiles first, one after the other with their black bars, and does not cut an image that is no larger than a
square.
"""

import math
from typing import NamedTuple

import numpy as np

from localllm.arch.family import Activation, Builder, HyperparameterReader, Weight, Weights, frozen
from localllm.arch.vision.hyperparameters import PreparedImage, VisionHyperparameters, cut_into_patches, read_vision
from localllm.arch.vision.resizing import (
    BICUBIC,
    ResizableImage,
    Size,
    choose_size,
    cut_tiles,
    resize,
    resize_with_bars,
)
from localllm.arch.vision.vit import apply_transformer, make_table, to_array, to_matrix
from localllm.errors import ModelError

MARKS = ()
BARS = 122, 116, 104  # CLIP's mean colour


class TilingRules(NamedTuple):
    """The sizes at which images are cut into tiles, and the order of the tiles' rows.

    Attributes:
        sizes: allowed sizes in pixels, multiples of a tile; an image is resized to the best one; (): it is not cut.
        is_unpadded: whether rows are ordered line by line across tiles, without the bars; otherwise tile by tile.
    """

    sizes: tuple[Size, ...] = ()
    is_unpadded: bool = False


@frozen
class LlavaHyperparameters(VisionHyperparameters):
    """The encoder's hyperparameters.

    Attributes:
        seen: number of layers that are computed.  cuts: rules for cutting images.
    """

    seen: int
    cuts: TilingRules

    @property
    def max_patches(self) -> int:
        """The number of patches, including the class token for the whole image."""
        return super().max_patches + 1

    def compute_rows(self, picture: ResizableImage, w: Weights) -> np.ndarray:
        """Return the patches after zeros for the class token."""
        return prepend_class_token(self, picture)

    def arrange(self, rows: list[np.ndarray], size: Size, w: Weights) -> list[np.ndarray]:
        if not self.cuts.sizes:
            return rows
        return [arrange_rows(rows, size, self.cuts, self.side, get_newline_values(w, self.cuts, self.out))]


def prepend_class_token(h: VisionHyperparameters, picture: ResizableImage) -> np.ndarray:
    """Return the patches after a row of zeros for the class token, float32 [1 + patches, pixels]."""
    return np.pad(cut_into_patches(h, picture), ((1, 0), (0, 0)))


def read(fields: HyperparameterReader) -> LlavaHyperparameters:
    shared = read_vision(fields)
    cuts = read_anyres(fields, shared["side"])
    return LlavaHyperparameters(**shared, seen=read_feature_layer(fields, shared["layers"]), cuts=cuts)


def read_feature_layer(fields: HyperparameterReader, layers: int) -> int:
    """Return the layer whose output is used, counted from 1. Raises ModelError."""
    if fields.read_raw("vision.feature_layer") is None:
        return layers
    numbers = fields.read_array("vision.feature_layer", "iu", "an array of whole numbers").tolist()
    if len(numbers) != 1:
        raise fields.make_unsupported_error(f"vision.feature_layer must name one layer (found {len(numbers)})")
    if not 1 <= numbers[0] <= layers:
        raise fields.make_value_error("vision.feature_layer", f"from 1 to {layers}")
    return numbers[0]


def prepare(h: LlavaHyperparameters, picture: ResizableImage) -> PreparedImage:
    """Prepare one square picture, or several whose rows follow one another, without control tokens."""
    if h.cuts.sizes:
        return PreparedImage(cut_squares(picture, h.side, h.cuts), [0])
    return PreparedImage([resize_with_bars(picture, (h.side, h.side), BICUBIC, BARS)], [0])


def encode(b: Builder, w: Weights, h: LlavaHyperparameters, x: Activation) -> Activation:
    """Compute a row for the class token and one for each patch."""
    v = w.get_submodel("v.")
    x = b.linear(x, to_matrix(v.patch_embd, h.pixels))
    x = b.add(x, b.embed_positions(add_class_position(b, v), b.positions))
    x = b.layer_norm(x, norm, h.epsilon) if (norm := v.get("pre_ln")) else x
    for layer in range(h.seen, h.layers):
        b.ignore(*v.get_layer(layer).list_weights())
    x = apply_transformer(b, v, h, x, h.seen)
    return b.layer_norm(x, norm, h.epsilon) if (norm := v.get("post_ln")) else x


def add_class_position(b: Builder, v: Weights) -> Weight:
    """Return the table of positions, with the class token's embedding added to its first row."""
    table, kernel, bias = v.position_embd, v.require_exact("class_embd"), v.patch_embd.bias
    b.ignore(table, kernel)
    if len(table.shape) != 2:
        raise ModelError(f"tensor {table.name} must be a matrix (found the shape {list(table.shape)})")
    for weight in [kernel] if bias is None else [kernel, bias]:
        if math.prod(weight.shape) != table.shape[1]:
            raise ModelError(
                f"tensor {weight.name} must have {table.shape[1]} elements (found the shape {list(weight.shape)})"
            )
    numbers = to_array(table).copy()
    numbers[0] += to_array(kernel).reshape(-1) - (0 if bias is None else to_array(bias))
    return make_table(table.name, numbers)


def merge_patches(h: VisionHyperparameters, x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return the patches' rows, without the class token's."""
    return x[1:]


def project(b: Builder, w: Weights, h: LlavaHyperparameters, x: Activation) -> Activation:
    mm = w.get_submodel("mm.")
    if newline := find_newline(w, h.cuts, h.out):
        b.ignore(newline)
    return b.linear(b.gelu_erf(b.linear(x, mm.require("0"))), mm.require("2"))


MAX_TILES = 36
NEWLINES = "v.image_newline", "model.image_newline"  # names of the newline embedding; the second one in old files
UNPADDED = "spatial_unpad"


def read_anyres(fields: HyperparameterReader, side: int) -> TilingRules:
    """Read how images are cut. Raises ModelError.

    side: side of a tile.
    """
    name = "vision.image_grid_pinpoints"
    if fields.read_raw(name) is None:
        return TilingRules()
    numbers = fields.read_array(name, "iu", "an array of whole numbers").astype(np.int64)
    sizes = numbers.reshape(-1, 2) if len(numbers) % 2 == 0 else numbers[:0].reshape(0, 2)
    tiles = sizes // side
    if not len(sizes) or (tiles * side != sizes).any() or (sizes < side).any() or (tiles > MAX_TILES).any():
        raise fields.make_value_error(name, f"pairs of multiples of {side}")
    if (tiles.prod(axis=1) > MAX_TILES).any():
        raise fields.make_value_error(name, f"sizes of up to {MAX_TILES} tiles")
    merge = "vision.mm_patch_merge_type"
    is_unpadded = fields.read_text(merge, "flat") == UNPADDED
    return TilingRules(tuple((int(columns), int(rows)) for columns, rows in sizes), is_unpadded)


def cut_squares(picture: ResizableImage, side: int, anyres: TilingRules) -> list[ResizableImage]:
    """Return the whole image as a square, and then its tiles, row by row."""
    overview = resize(picture, (side, side), BICUBIC)
    return [overview, *cut_tiles(resize_with_bars(picture, choose_size(picture.size, anyres.sizes), BICUBIC), side)]


def arrange_rows(rows: list[np.ndarray], size: Size, anyres: TilingRules, side: int, newline: np.ndarray) -> np.ndarray:
    """Order the rows of an image's tiles, float32 [rows, width] each, as the language model reads them.

    size: size of the image.  newline: float32 [width], the embedding after a line.
    """
    if not anyres.is_unpadded:
        return np.concatenate(rows)
    overview, *tiles = rows
    columns, lines = (length // side for length in choose_size(size, anyres.sizes))
    per_side = int(len(overview) ** 0.5)
    grid = np.stack(tiles).reshape(lines, columns, per_side, per_side, -1).transpose(0, 2, 1, 3, 4)
    grid = remove_bars(grid.reshape(lines * per_side, columns * per_side, -1), size)
    ends = np.broadcast_to(newline, (len(grid), 1, len(newline)))
    return np.concatenate((overview, np.concatenate((grid, ends), axis=1).reshape(-1, len(newline))))


def remove_bars(grid: np.ndarray, size: Size) -> np.ndarray:
    """Remove the bars around an image of that size from a grid of rows [lines, columns, width]."""
    lines, columns = grid.shape[:2]
    if size[0] / size[1] > columns / lines:
        bar = (lines - int(round(size[1] * (columns / size[0]), 7))) // 2
        return grid[bar : lines - bar]
    bar = (columns - int(round(size[0] * (lines / size[1]), 7))) // 2
    return grid[:, bar : columns - bar]


def find_newline(w: Weights, anyres: TilingRules, width: int) -> Weight | None:
    """Return the embedding after each line of patches; None if the file has none.

    Raises ModelError if the model needs one, or if the embedding does not have `width` elements.
    """
    weight = next(filter(None, map(w.get_exact, NEWLINES)), None)
    if weight is None and anyres.is_unpadded:
        raise ModelError(f"the model has no tensor {NEWLINES[0]}")
    return weight and weight.require_shape(width)


def get_newline_values(w: Weights, anyres: TilingRules, width: int) -> np.ndarray:
    """Return the newline embedding, float32 [width]; zeros if the file has none."""
    weight = find_newline(w, anyres, width)
    return np.zeros(width, np.float32) if weight is None else to_array(weight)
