"""The common parts of vision encoders: hyperparameters, and pictures as rows of numbers."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from localllm.arch.layer_state import Paged
from localllm.arch.metadata import Fields
from localllm.arch.verbs import FULL_ATTENTION
from localllm.arch.vision.resizing import Picture, Size
from localllm.arch.weights import Weights
from localllm.frozen import frozen

MOST_SIDE = 1 << 14  # pixels: of a picture that an encoder sees


class Prepared(NamedTuple):
    """An image, ready to be encoded.

    Attributes:
        pictures: that the encoder sees, each on its own.
        parts: the tokens that represent the image: texts, which may name control tokens, and numbers of pictures,
            as `Vision.arranged` has put them together.
    """

    pictures: list[Picture]
    parts: list[str | int]


@frozen
class Vision:
    """A vision transformer and its projector.

    Attributes:
        kind: of the projector, as the file calls it.  path: of the file.
        width: of the residual stream.  hidden: of the feed-forward network.  epsilon: of the norms.
        side: of the picture that it was trained for, pixels.  patch: of a patch.
        merge: patches on each side that become one row.
        out: numbers of a row, those of the language model's embeddings.
        activation: of the feed-forward network: gelu, silu or gelu_quick.
        mean, deviation: of red, green and blue, by which pixels from 0 to 1 are normalized.
    """

    kind: str
    path: str
    layers: int
    width: int
    hidden: int
    heads: int
    epsilon: float
    side: int
    patch: int
    merge: int
    out: int
    activation: str
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    vocab_size: ClassVar[int] = 0
    exact: ClassVar[bool] = False  # whether gelu is by erf
    lookahead: ClassVar[int] = FULL_ATTENTION  # how many rows behind it a row sees
    sees_ahead: ClassVar[bool] = False  # whether the language model lets tokens of an image see those behind them

    @property
    def rms(self) -> bool:
        """Return whether norms are without mean and bias."""
        return False

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def pixels(self) -> int:
        """Numbers of a patch."""
        return 3 * self.patch * self.patch

    @property
    def columns(self) -> int:
        """Numbers of what the encoder is given of a patch."""
        return self.pixels

    @property
    def row_width(self) -> int:
        """Numbers in a row of the encoder's output."""
        return self.out

    @property
    def most_patches(self) -> int:
        """The most patches of a picture."""
        return (self.side // self.patch) ** 2

    @property
    def most_grid(self) -> tuple[int, int]:
        """Rows and columns of patches of the largest picture."""
        return self.side // self.patch, self.side // self.patch

    def rows(self, picture: Picture, w: Weights) -> np.ndarray:
        """Compute the encoder's input for a picture, float32 [patches, columns]."""
        return pixels_of(self, picture)

    def with_breaks(self, rows: np.ndarray, grid: tuple[int, int], w: Weights) -> np.ndarray:
        """Return a picture's rows as the language model reads them, with others between that its family has."""
        return rows

    def arrange(self, rows: list[np.ndarray], size: Size, w: Weights) -> list[np.ndarray]:
        """Arrange the rows of an image's pictures, those of several together if the family has them so."""
        return rows

    def axes(self, picture: Picture) -> np.ndarray | None:
        """Return the positions of a picture's rows, int64 [rows, 3]: time, height and width.

        None means that they follow one another.
        """
        return None

    def turns(self, grid: tuple[int, int]) -> np.ndarray | None:
        """Return the rotary positions of an encoder's rows, int64 [rows, 3]: time, height and width.

        None means that they are not rotated.
        """
        return None

    def windows(self, grid: tuple[int, int]) -> np.ndarray | None:
        """Return the ends of the windows, int64, for layers that see only one; None: there are none."""
        return None

    def windowed(self, layer: int) -> bool:
        """Return whether a layer's rows see those of their window only."""
        return False

    def states(self) -> Sequence[Paged]:
        """Return keys and values of every layer."""
        return [Paged(layer, self.heads, self.head_dim, self.head_dim) for layer in range(self.layers)]

    def grid(self, picture: Picture) -> tuple[int, int]:
        """Return rows and columns of patches."""
        columns, rows = picture.size
        return rows // self.patch, columns // self.patch


def read_vision(fields: Fields, merge: int = 1, kind: str = "") -> dict[str, Any]:
    """Return the arguments that all encoders have.

    Raises ModelError. merge: if the file does not say it; kind: where the file has no projector.
    """
    heads, width = fields.count("vision.attention.head_count"), fields.count("vision.embedding_length")
    if width % heads:
        raise fields.error(f"{width} columns do not make {heads} attention heads")
    side, patch = fields.count("vision.image_size"), fields.count("vision.patch_size")
    if side > MOST_SIDE or patch > side:
        raise fields.error(f"pictures of {side} pixels in patches of {patch} are not supported")
    merge = fields.count("vision.projector.scale_factor", merge)
    if merge > side // patch:
        raise fields.error(f"{side // patch} patches on each side cannot be merged by {merge}")
    return {
        "kind": kind or projector_type(fields),
        "path": fields.path,
        "layers": fields.whole("vision.block_count", None, 1, 1024),
        "width": width,
        "hidden": fields.count("vision.feed_forward_length", 0),
        "heads": heads,
        "epsilon": fields.epsilon("vision.attention.layer_norm_epsilon"),
        "side": side,
        "patch": patch,
        "merge": merge,
        "out": fields.count("vision.projection_dim"),
        "activation": read_activation(fields),
        "mean": read_colours(fields, "vision.image_mean", 0.0),
        "deviation": read_colours(fields, "vision.image_std", 1e-3),
    }


def projector_type(fields: Fields) -> str:
    """Return the projector's type. Raises ModelError."""
    return fields.text("projector_type" if fields.has("projector_type") else "vision.projector_type")


def read_activation(fields: Fields) -> str:
    """Apply the feed-forward network's function: without a flag it is x * sigmoid(1.702 x). Raises ModelError."""
    found = [name for name in ("gelu", "silu") if fields.flag(f"use_{name}", False)]
    if len(found) > 1:
        raise fields.error("clip.use_gelu and clip.use_silu are both true")
    return found[0] if found else "gelu_quick"


def read_colours(fields: Fields, name: str, least: float) -> tuple[float, ...]:
    """Return three numbers, for red, green and blue. Raises ModelError."""
    numbers = fields.array(name, "f", "three numbers")
    if len(numbers) != 3 or not (np.isfinite(numbers) & (numbers >= least) & (numbers <= 1000)).all():
        raise fields.wrong(name, f"three numbers from {least:g} up")
    return tuple(float(number) for number in numbers.astype(np.float32))


def pixels_of(h: Vision, picture: Picture) -> np.ndarray:
    """Return a picture in RGB as normalized patches, row by row: float32 [patches, 3 * patch * patch].

    Pixels are ordered by colour channel, as the weights of a convolution are.
    """
    numbers: np.ndarray = np.asarray(picture, np.uint8).astype(np.float32)
    numbers /= np.float32(255)
    numbers -= np.array(h.mean, np.float32)
    numbers /= np.array(h.deviation, np.float32)
    rows, columns = h.grid(picture)
    cut = numbers[: rows * h.patch, : columns * h.patch].reshape(rows, h.patch, columns, h.patch, 3)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3)).reshape(rows * columns, h.pixels)


def in_squares(x: np.ndarray, grid: tuple[int, int], side: int) -> np.ndarray:
    """Group a grid's rows by squares of `side` * `side`: [squares, side * side, numbers of a row].

    Squares that a grid does not fill are filled with zeros.
    """
    rows, columns = grid
    x = x.reshape(rows, columns, -1)
    x = np.pad(x, ((0, -rows % side), (0, -columns % side), (0, 0))) if rows % side or columns % side else x
    rows, columns, width = x.shape
    squares = x.reshape(rows // side, side, columns // side, side, width).transpose(0, 2, 1, 3, 4)
    return squares.reshape(-1, side * side, width)
