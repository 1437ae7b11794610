"""Idefics 3 and SmolVLM (Laurençon et al. 2024, arXiv 2408.12637; Marafioti et al. 2025, 2504.05299).

The encoder is SigLIP, with squares of patches concatenated to one row. An image's longer side is first resized to the
length in the file (`preproc_image_size`); the image is cut into squares of the encoder's side, followed by the whole
image as one more square.
"""

import numpy as np

from localllm.arch.family import Activation, Builder, HyperparameterReader, Weights, frozen
from localllm.arch.vision.hyperparameters import PreparedImage, VisionHyperparameters, group_in_squares, read_vision
from localllm.arch.vision.resizing import LANCZOS, ResizableImage, resize
from localllm.arch.vision.vit import apply_siglip

MARKS = "<fake_token_around_image>", "<global-img>"
encode = apply_siglip


@frozen
class Idefics3Hyperparameters(VisionHyperparameters):
    """The encoder's hyperparameters.

    Attributes:
        longest: the longer side of an image before it is cut, in pixels; 0: not cut.
    """

    longest: int


def read(fields: HyperparameterReader) -> Idefics3Hyperparameters:
    shared, longest = read_vision(fields, merge=1), fields.read_count("vision.preproc_image_size", 0)
    if longest > 32 * shared["side"]:
        raise fields.make_value_error("vision.preproc_image_size", f"up to {32 * shared['side']}")
    return Idefics3Hyperparameters(**shared, longest=longest)


def prepare(h: Idefics3Hyperparameters, picture: ResizableImage) -> PreparedImage:
    """Prepare the tiles row by row, each after the token of its row and column, and then the whole image."""
    side, (columns, rows) = h.side, (0, 0)
    if h.longest:
        picture = resize(picture, fit_size(picture.size, h.longest), LANCZOS)
        columns, rows = (-(-length // side) for length in picture.size)
        picture = resize(picture, (columns * side, rows * side), LANCZOS)
    places = [(column, row) for row in range(rows) for column in range(columns)]
    tiles = [picture.crop((x * side, y * side, (x + 1) * side, (y + 1) * side)) for x, y in places]
    parts: list[str | int] = []
    for number, (x, y) in enumerate(places):
        end = "\n" if x + 1 == columns and y + 1 < rows else ""
        parts += [f"{MARKS[0]}<row_{y + 1}_col_{x + 1}>", number, *([end] if end else [])]
    overview = resize(picture, (side, side), LANCZOS)
    begin = ["\n\n"] if tiles else []
    return PreparedImage([*tiles, overview], [*parts, *begin, "".join(MARKS), len(tiles), MARKS[0]])


def fit_size(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Return the size with the longer side `longest` and the same proportions; the shorter side is made even."""
    columns, rows = size
    ratio = columns / rows
    if columns >= rows:
        return longest, max(round_up_to_even(int(longest / ratio)), 1)
    return max(round_up_to_even(int(longest * ratio)), 1), longest


def round_up_to_even(length: int) -> int:
    return length + length % 2


def merge_patches(h: VisionHyperparameters, x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Concatenate each square of patches to one row."""
    squares = group_in_squares(x, grid, h.merge)
    return squares.reshape(len(squares), -1)


def project(b: Builder, w: Weights, h: VisionHyperparameters, x: Activation) -> Activation:
    return b.linear(x, w.get_submodel("mm.").require("model.fc"))
