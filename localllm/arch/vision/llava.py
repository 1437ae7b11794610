"""LLaVA 1.5 and 1.6 (Liu et al. 2023, arXiv 2310.03744).

CLIP (Radford et al. 2021, 2103.00020) up to its second to last layer, then two matrices.

An image is padded to a square with CLIP's mean colour; in 1.6 it is cut into tiles (localllm.arch.vision.anyres). As in
Hugging Face's transformers, all layers of the file are used, the class token (`class_embd`) comes first, and GELU is
exact. llama.cpp leaves out the file's last layer and puts the class token after the patches, so that each patch gets
its neighbour's position.
"""

import math

import numpy as np

from localllm.arch.family import Activation, Builder, Fields, Weight, Weights, frozen
from localllm.arch.vision.anyres import Anyres, arrange_rows, newline_numbers, newline_of, read_anyres, squares
from localllm.arch.vision.hyperparameters import Prepared, Vision, pixels_of, read_vision
from localllm.arch.vision.resizing import BICUBIC, Picture, Size, with_bars
from localllm.arch.vision.vit import as_matrix, numbers_of, table_of, transformer
from localllm.errors import ModelError

MARKS = ()
BARS = 122, 116, 104  # CLIP's mean colour


@frozen
class Llava(Vision):
    """The encoder's hyperparameters; seen: how many layers are computed.  cuts: how images are cut."""

    seen: int
    cuts: Anyres

    @property
    def most_patches(self) -> int:
        """Return the number of patches, including the class token for the whole image."""
        return super().most_patches + 1

    def rows(self, picture: Picture, w: Weights) -> np.ndarray:
        """Return the patches after zeros for the class token."""
        return with_whole(self, picture)

    def arrange(self, rows: list[np.ndarray], size: Size, w: Weights) -> list[np.ndarray]:
        if not self.cuts.sizes:
            return rows
        return [arrange_rows(rows, size, self.cuts, self.side, newline_numbers(w, self.cuts, self.out))]


def with_whole(h: Vision, picture: Picture) -> np.ndarray:
    """Return the patches after a row of zeros for the class token: float32 [1 + patches, pixels]."""
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
        raise fields.unsupported(f"rows of {len(numbers)} layers together are not supported")
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
        raise ModelError(f"tensor {table.name} should be a matrix, has the shape {list(table.shape)}")
    for weight in [kernel] if bias is None else [kernel, bias]:
        if math.prod(weight.shape) != table.shape[1]:
            raise ModelError(
                f"tensor {weight.name} should have {table.shape[1]} numbers, has the shape {list(weight.shape)}"
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
