"""Pixtral (Agrawal et al. 2024, arXiv 2410.07073) and Mistral Small 3.1 and later.

Pictures have any size, with two-dimensional RoPE; the newer models merge squares of patches into one row. Each line of
the picture but the last one ends with the embedding of [IMG_BREAK].
"""

from typing import ClassVar

import numpy as np

from localllm.arch.family import Activation, Builder, HyperparameterReader, RopeParameters, Weights, frozen
from localllm.arch.vision.any_size import AnySizeVisionHyperparameters, read_any_size
from localllm.arch.vision.hyperparameters import PreparedImage, group_in_squares
from localllm.arch.vision.resizing import ResizableImage
from localllm.arch.vision.vit import apply_norm, apply_transformer, embed_patches, to_array
from localllm.errors import ModelError

MARKS = ("[IMG_END]",)
BREAK = "v.token_embd.img_break"


@frozen
class PixtralHyperparameters(AnySizeVisionHyperparameters):
    least: ClassVar[int] = 8
    square: ClassVar[int] = 32

    @property
    def uses_rms_norm(self) -> bool:
        return True

    @property
    def rope(self) -> RopeParameters:
        """The parameters of RoPE; rows rotate by the frequencies of even pairs, columns by those of odd pairs."""
        half = self.head_dim // 2
        pairs = (*range(0, half, 2), *range(1, half, 2))
        return RopeParameters(
            self.head_dim, self.head_dim, interleaved=True, frequency_pairs=pairs, pair_axes=self.pair_axes
        )

    def insert_breaks(self, rows: np.ndarray, grid: tuple[int, int], w: Weights) -> np.ndarray:
        lines = rows.reshape(grid[0] // self.merge, grid[1] // self.merge, -1)
        ends = np.broadcast_to(to_array(w.require_exact(BREAK)), (len(lines), 1, lines.shape[2]))
        return np.concatenate((lines, ends), axis=1).reshape(-1, lines.shape[2])[:-1]


def read(fields: HyperparameterReader) -> PixtralHyperparameters:
    return PixtralHyperparameters(**read_any_size(fields, merge=1))


def prepare(h: PixtralHyperparameters, picture: ResizableImage) -> PreparedImage:
    """Resize an image to one picture, followed by the end-of-image token."""
    return PreparedImage([h.fit(picture)], [0, *MARKS])


def encode(b: Builder, w: Weights, h: PixtralHyperparameters, x: Activation) -> Activation:
    v = w.get_submodel("v.")
    x = apply_norm(b, h, embed_patches(b, v, h, x), v.pre_ln)
    x = apply_transformer(b, v, h, x, h.layers, lambda y: b.rope(y, h.rope, b.positions))
    return apply_norm(b, h, x, w.require("mm.input_norm")) if h.merge > 1 else x


def merge_patches(h: PixtralHyperparameters, x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Concatenate each square of patches to one row, interleaved.

    The row has the first element of every patch, then the second, ...
    """
    squares = group_in_squares(x, grid, h.merge)
    return np.ascontiguousarray(squares.transpose(0, 2, 1)).reshape(len(squares), -1)


def project(b: Builder, w: Weights, h: PixtralHyperparameters, x: Activation) -> Activation:
    end = w.require_exact(BREAK)
    if end.shape != (h.out,):
        raise ModelError(f"tensor {end.name} must have {h.out} elements (found the shape {list(end.shape)})")
    b.ignore(end)
    x = b.linear(x, w.require("mm.patch_merger")) if h.merge > 1 else x
    return b.linear(b.gelu_erf(b.linear(x, w.require("mm.1"))), w.require("mm.2"))
