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

from localllm.arch.family import Activation, Builder, Fields, Weight, Weights, frozen
from localllm.arch.vision.hyperparameters import Prepared, Vision, pixels_of, read_vision
from localllm.arch.vision.resizing import BICUBIC, Picture, Size, choose_used_size, cut_tiles, resize, with_bars
from localllm.arch.vision.vit import as_matrix, numbers_of, table_of, transformer
from localllm.errors import ModelError

MARKS = ()
BARS = 122, 116, 104  # CLIP's mean colour


class Anyres(NamedTuple):
    """The rules for cutting images.

    Attributes:
        sizes: allowed sizes in pixels, multiples of a tile; an image is resized to the best one; (): it is not cut.
        is_unpadded: whether rows are ordered line by line across tiles, without the bars; otherwise tile by tile.
    """

    sizes: tuple[Size, ...] = ()
    is_unpadded: bool = False


@frozen
class Llava(Vision):
    """The encoder's hyperparameters.

    Attributes:
        seen: number of layers that are computed.  cuts: rules for cutting images.
    """

    seen: int
    cuts: Anyres

    @property
    def most_patches(self) -> int:
        """The number of patches, including the class token for the whole image."""
        return super().most_patches + 1

    def rows(self, picture: Picture, w: Weights) -> np.ndarray:
        """Return the patches after zeros for the class token."""
        return with_whole(self, picture)

    def arrange(self, rows: list[np.ndarray], size: Size, w: Weights) -> list[np.ndarray]:
        if not self.cuts.sizes:
            return rows
        return [arrange_rows(rows, size, self.cuts, self.side, newline_numbers(w, self.cuts, self.out))]


def with_whole(h: Vision, picture: Picture) -> np.ndarray:
    """Return the patches after a row of zeros for the class token, float32 [1 + patches, pixels]."""
    return np.pad(pixels_of(h, picture), ((1, 0), (0, 0)))


def read(fields: Fields) -> Llava:
    shared = read_vision(fields)
    cuts = read_anyres(fields, shared["side"])
    return Llava(**shared, seen=feature_layer(fields, shared["layers"]), cuts=cuts)


def feature_layer(fields: Fields, layers: int) -> int:
    """Return the layer whose output is used, counted from 1. Raises ModelError."""
    if fields.raw("vision.feature_layer") is None:
        return layers
    numbers = fields.array("vision.feature_layer", "iu", "an array of whole numbers").tolist()
    if len(numbers) != 1:
        raise fields.unsupported(f"vision.feature_layer must name one layer (found {len(numbers)})")
    if not 1 <= numbers[0] <= layers:
        raise fields.wrong("vision.feature_layer", f"from 1 to {layers}")
    return numbers[0]


def prepare(h: Llava, picture: Picture) -> Prepared:
    """Prepare one square picture, or several whose rows follow one another, without control tokens."""
    if h.cuts.sizes:
        return Prepared(squares(picture, h.side, h.cuts), [0])
    return Prepared([with_bars(picture, (h.side, h.side), BICUBIC, BARS)], [0])


def tower(b: Builder, w: Weights, h: Llava, x: Activation) -> Activation:
    """Compute a row for the class token and one for each patch."""
    v = w.part("v.")
    x = b.linear(x, as_matrix(v.patch_embd, h.pixels))
    x = b.add(x, b.embed_positions(positions(b, v), b.positions))
    x = b.layer_norm(x, norm, h.epsilon) if (norm := v.get("pre_ln")) else x
    for layer in range(h.seen, h.layers):
        b.ignore(*v.block(layer).all())
    x = transformer(b, v, h, x, h.seen)
    return b.layer_norm(x, norm, h.epsilon) if (norm := v.get("post_ln")) else x


def positions(b: Builder, v: Weights) -> Weight:
    """Return the table of positions, with the class token's embedding added to its first row."""
    table, kernel, bias = v.position_embd, v.exactly("class_embd"), v.patch_embd.bias
    b.ignore(table, kernel)
    if len(table.shape) != 2:
        raise ModelError(f"tensor {table.name} must be a matrix (found the shape {list(table.shape)})")
    for weight in [kernel] if bias is None else [kernel, bias]:
        if math.prod(weight.shape) != table.shape[1]:
            raise ModelError(
                f"tensor {weight.name} must have {table.shape[1]} elements (found the shape {list(weight.shape)})"
            )
    numbers = numbers_of(table).copy()
    numbers[0] += numbers_of(kernel).reshape(-1) - (0 if bias is None else numbers_of(bias))
    return table_of(table.name, numbers)


def gather(h: Vision, x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return the patches' rows, without the class token's."""
    return x[1:]


def project(b: Builder, w: Weights, h: Llava, x: Activation) -> Activation:
    mm = w.part("mm.")
    if newline := newline_of(w, h.cuts, h.out):
        b.ignore(newline)
    return b.linear(b.gelu_erf(b.linear(x, mm.require("0"))), mm.require("2"))


MOST_TILES = 36
NEWLINES = "v.image_newline", "model.image_newline"  # names of the newline embedding; the second one in old files
UNPADDED = "spatial_unpad"


def read_anyres(fields: Fields, side: int) -> Anyres:
    """Read how images are cut. Raises ModelError.

    side: side of a tile.
    """
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
    return [overview, *cut_tiles(with_bars(picture, choose_used_size(picture.size, anyres.sizes), BICUBIC), side)]


def arrange_rows(rows: list[np.ndarray], size: Size, anyres: Anyres, side: int, newline: np.ndarray) -> np.ndarray:
    """Order the rows of an image's tiles, float32 [rows, width] each, as the language model reads them.

    size: size of the image.  newline: float32 [width], the embedding after a line.
    """
    if not anyres.is_unpadded:
        return np.concatenate(rows)
    overview, *tiles = rows
    columns, lines = (length // side for length in choose_used_size(size, anyres.sizes))
    per_side = int(len(overview) ** 0.5)
    grid = np.stack(tiles).reshape(lines, columns, per_side, per_side, -1).transpose(0, 2, 1, 3, 4)
    grid = without_bars(grid.reshape(lines * per_side, columns * per_side, -1), size)
    ends = np.broadcast_to(newline, (len(grid), 1, len(newline)))
    return np.concatenate((overview, np.concatenate((grid, ends), axis=1).reshape(-1, len(newline))))


def without_bars(grid: np.ndarray, size: Size) -> np.ndarray:
    """Remove the bars around an image of that size from a grid of rows [lines, columns, width]."""
    lines, columns = grid.shape[:2]
    if size[0] / size[1] > columns / lines:
        bar = (lines - int(round(size[1] * (columns / size[0]), 7))) // 2
        return grid[bar : lines - bar]
    bar = (columns - int(round(size[0] * (lines / size[1]), 7))) // 2
    return grid[:, bar : columns - bar]


def newline_of(w: Weights, anyres: Anyres, width: int) -> Weight | None:
    """Return the embedding after each line of patches; None if the file has none.

    Raises ModelError if the model needs one, or if the embedding does not have `width` elements.
    """
    weight = next(filter(None, map(w.bare, NEWLINES)), None)
    if weight is None and anyres.is_unpadded:
        raise ModelError(f"the model has no tensor {NEWLINES[0]}")
    return weight and weight.shaped(width)


def newline_numbers(w: Weights, anyres: Anyres, width: int) -> np.ndarray:
    """Return the newline embedding, float32 [width]; zeros if the file has none."""
    weight = newline_of(w, anyres, width)
    return np.zeros(width, np.float32) if weight is None else numbers_of(weight)
