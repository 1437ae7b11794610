"""Gemma 3 (Gemma Team 2025, arXiv 2503.19786): SigLIP, whose patches are averaged in squares.

A picture is made square, 896 pixels wide, whatever its shape; its 256 rows see each other in the language model.
"""

from typing import ClassVar

import numpy as np

from localllm.arch.fields import Fields
from localllm.arch.verbs import Activation, Builder
from localllm.arch.vision.hyperparameters import Prepared, Vision, in_squares, read_vision
from localllm.arch.vision.resizing import BILINEAR, Picture, resized
from localllm.arch.vision.vit import siglip, transposed
from localllm.arch.weights import Weights
from localllm.frozen import frozen

MARKS = "<start_of_image>", "<end_of_image>"
tower = siglip


@frozen
class Gemma3Vision(Vision):
    sees_ahead: ClassVar[bool] = True


def read(fields: Fields) -> Gemma3Vision:
    """The hyperparameters. Raises ModelError."""
    return Gemma3Vision(**read_vision(fields, merge=4))


def prepared(h: Vision, picture: Picture) -> Prepared:
    """One square, between marks."""
    square = resized(picture, (h.side, h.side), BILINEAR)
    return Prepared([square], [MARKS[0], 0, MARKS[1]])


def gathered(h: Vision, x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The mean of each square of patches; those that fill none are left out."""
    rows, columns = (side // h.merge * h.merge for side in grid)
    whole = x.reshape(*grid, -1)[:rows, :columns].reshape(rows * columns, -1)
    return in_squares(whole, (rows, columns), h.merge).mean(axis=1, dtype=np.float64).astype(np.float32)


def project(b: Builder, w: Weights, h: Vision, x: Activation) -> Activation:
    """Rows as wide as the language model's embeddings."""
    mm = w.part("mm.")
    return b.linear(b.rms_norm(x, mm.soft_emb_norm, h.epsilon), transposed(mm.input_projection))
