"""Gemma 3 (Gemma Team 2025, arXiv 2503.19786): SigLIP, with the mean of each square of patches.

A picture of any shape is stretched to a square, 896 pixels wide; its 256 rows attend to each other in the language
model. With the option pan-and-scan, crops of a long picture follow, as in Hugging Face's transformers.
"""

from typing import ClassVar

import numpy as np

from localllm.arch.family import Activation, Builder, HyperparameterReader, Weights, frozen
from localllm.arch.vision.hyperparameters import PreparedImage, VisionHyperparameters, group_in_squares, read_vision
from localllm.arch.vision.resizing import BILINEAR, ResizableImage, Size, resize
from localllm.arch.vision.vit import apply_siglip, transpose

MARKS = "<start_of_image>", "<end_of_image>"
BEGIN, END = f"\n\n{MARKS[0]}", f"{MARKS[1]}\n\n"  # around a picture that has crops, and around each crop
MIN_CROP, MAX_CROPS = 256, 4  # pixels on a crop's side; crops of a picture
MIN_RATIO = 1.2  # of the longer side to the shorter one; pictures below it have no crops
encode = apply_siglip


@frozen
class Gemma3VisionHyperparameters(VisionHyperparameters):
    sees_ahead: ClassVar[bool] = True


def read(fields: HyperparameterReader) -> Gemma3VisionHyperparameters:
    return Gemma3VisionHyperparameters(**read_vision(fields, merge=4))


def prepare(h: VisionHyperparameters, picture: ResizableImage) -> PreparedImage:
    """Prepare one square picture, between control tokens."""
    square = resize(picture, (h.side, h.side), BILINEAR)
    return PreparedImage([square], [MARKS[0], 0, MARKS[1]])


def prepare_crops(h: VisionHyperparameters, picture: ResizableImage) -> PreparedImage:
    """Prepare a picture with pan-and-scan: its square and one of each crop, introduced by words.

    A picture that is too short to be cropped has only its square.
    """
    boxes = compute_crops(picture.size)
    if not boxes:
        return prepare(h, picture)
    squares = [resize(part, (h.side, h.side), BILINEAR) for part in (picture, *map(picture.crop, boxes))]
    parts: list[str | int] = [f"Here is the original image {BEGIN}", 0]
    for number in range(1, len(squares)):
        words = " and here are some crops to help you see better " if number == 1 else " "
        parts += [f"{END}{words}{BEGIN}", number]
    return PreparedImage(squares, [*parts, END])


def compute_crops(size: Size) -> list[tuple[int, int, int, int]]:
    """Return the crops of a picture along its longer side, as left, upper, right and lower borders.

    There are none if they would be too small, or if the picture is hardly longer than wide.
    """
    shorter, longer = sorted(size)
    count = min(max(min(longer // MIN_CROP, int(longer / shorter + 0.5)), 2), MAX_CROPS)
    length = -(-longer // count)
    if longer / shorter < MIN_RATIO or min(length, shorter) < MIN_CROP:
        return []
    sides = [(begin, min(begin + length, longer)) for begin in range(0, longer, length)]
    if size[0] > size[1]:
        return [(begin, 0, end, shorter) for begin, end in sides]
    return [(0, begin, shorter, end) for begin, end in sides]


def merge_patches(h: VisionHyperparameters, x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Compute the mean of each square of patches, without incomplete squares at the borders."""
    rows, columns = (side // h.merge * h.merge for side in grid)
    patches = x.reshape(*grid, -1)[:rows, :columns].reshape(rows * columns, -1)
    return group_in_squares(patches, (rows, columns), h.merge).mean(axis=1, dtype=np.float64).astype(np.float32)


def project(b: Builder, w: Weights, h: VisionHyperparameters, x: Activation) -> Activation:
    mm = w.get_submodel("mm.")
    return b.linear(b.rms_norm(x, mm.soft_emb_norm, h.epsilon), transpose(mm.input_projection))
