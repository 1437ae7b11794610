"""InternVL 2.5, 3 and 3.5 (Zhu et al. 2025, arXiv 2504.10479).

InternViT, whose patches are concatenated in squares, then a norm and two matrices.

A large image is cut into tiles of the encoder's side, followed by the whole image as one more tile. As in Hugging
Face's transformers the class token (`class_embd`) comes first; llama.cpp puts it after the patches, so that each patch
gets its neighbour's position.
"""

from typing import ClassVar

import numpy as np

from localllm.arch.family import Activation, Builder, HyperparameterReader, Weights, frozen
from localllm.arch.vision.hyperparameters import PreparedImage, VisionHyperparameters, group_in_squares, read_vision
from localllm.arch.vision.llava import add_class_position, prepend_class_token
from localllm.arch.vision.resizing import BICUBIC, ResizableImage, cut_into_tiles, list_grids, resize
from localllm.arch.vision.vit import apply_transformer, embed_patches

MARKS = "<img>", "</img>"
MAX_TILES = 64
LARGE = 3200, 45  # width and layers of the only encoder that has RMS norms
EPSILON = 1e-5  # of the projector's norm


@frozen
class InternVisionHyperparameters(VisionHyperparameters):
    """The encoder's hyperparameters.

    Attributes:
        tiles: minimum and maximum number of tiles of an image.
    """

    tiles: tuple[int, int]

    exact: ClassVar[bool] = True

    @property
    def uses_rms_norm(self) -> bool:
        return (self.width, self.layers) == LARGE

    @property
    def max_patches(self) -> int:
        """The number of patches, including the class token for the whole picture."""
        return super().max_patches + 1

    def compute_rows(self, picture: ResizableImage, w: Weights) -> np.ndarray:
        """Return the patches after zeros for the class token."""
        return prepend_class_token(self, picture)


def read(fields: HyperparameterReader) -> InternVisionHyperparameters:
    least_tiles = fields.read_integer("vision.preproc_min_tiles", 1, 1, MAX_TILES)
    most_tiles = fields.read_integer("vision.preproc_max_tiles", 12, least_tiles, MAX_TILES)
    h = InternVisionHyperparameters(**read_vision(fields), tiles=(least_tiles, most_tiles))
    if h.max_grid[0] % h.merge:
        raise fields.make_error(f"{h.max_grid[0]} patches per side are not divisible by the merge factor {h.merge}")
    return h


def prepare(h: InternVisionHyperparameters, picture: ResizableImage) -> PreparedImage:
    """Prepare the tiles row by row and then the whole image, between control tokens."""
    tiles = cut_into_tiles(picture, list_grids(*h.tiles, h.side), h.side)
    overview = resize(picture, (h.side, h.side), BICUBIC)
    return PreparedImage([*tiles, overview], [MARKS[0], *range(len(tiles) + 1), MARKS[1]])


def encode(b: Builder, w: Weights, h: InternVisionHyperparameters, x: Activation) -> Activation:
    """Compute a row for the class token and one for each patch."""
    v = w.get_submodel("v.")
    x = b.add(embed_patches(b, v, h, x), b.embed_positions(add_class_position(b, v), b.positions))
    return apply_transformer(b, v, h, x, h.layers)


def merge_patches(h: InternVisionHyperparameters, x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Concatenate each square of patches to one row."""
    squares = group_in_squares(x[1:], grid, h.merge)
    return squares.reshape(len(squares), -1)


def project(b: Builder, w: Weights, h: InternVisionHyperparameters, x: Activation) -> Activation:
    mlp = w.get_submodel("mm.model.mlp.")
    x = b.layer_norm(x, mlp.require("0"), EPSILON)
    return b.linear(b.gelu_erf(b.linear(x, mlp.require("1"))), mlp.require("3"))
