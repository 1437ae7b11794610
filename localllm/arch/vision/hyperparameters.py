"""The common parts of vision encoders: hyperparameters, and the conversion of pictures to patches."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from localllm.arch.layer_state import PagedState
from localllm.arch.metadata import HyperparameterReader
from localllm.arch.verbs import FULL_ATTENTION
from localllm.arch.vision.resizing import ResizableImage, Size
from localllm.arch.weights import Weights
from localllm.frozen import frozen

MAX_SIDE = 1 << 14  # pixels on a side of an encoder's picture


class PreparedImage(NamedTuple):
    """An image that is ready to be encoded.

    Attributes:
        pictures: the encoder's inputs, each encoded on its own.
        parts: the image in the prompt: strings, which may name control tokens, and indices into the list of rows that
            `Vision.arrange` returns.
    """

    pictures: list[ResizableImage]
    parts: list[str | int]


@frozen
class VisionHyperparameters:
    """A vision transformer and its projector.

    Attributes:
        kind: the projector's type, as in the file.  path: the file.
        width: width of the residual stream.  hidden: hidden width of the feed-forward network.
        epsilon: epsilon of the norms.
        side: side of the pictures that it was trained on, in pixels.  patch: side of a patch, in pixels.
        merge: squares of merge * merge patches become one row of the language model.
        out: width of such a row, that of the language model's embeddings.
        activation: activation of the feed-forward network: gelu, silu or gelu_quick.
        mean, deviation: for red, green and blue, to normalize pixels from 0 to 1.
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
    exact: ClassVar[bool] = False  # compute GELU by erf, not by tanh
    lookahead: ClassVar[int] = FULL_ATTENTION  # how many later rows a row attends to
    sees_ahead: ClassVar[bool] = False  # in the language model, an image's tokens also attend to its later ones

    @property
    def uses_rms_norm(self) -> bool:
        """Return whether norms are RMS norms, not layer norms."""
        return False

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def pixels(self) -> int:
        """The number of RGB values of a patch."""
        return 3 * self.patch * self.patch

    @property
    def input_width(self) -> int:
        """The width of the encoder's input rows."""
        return self.pixels

    @property
    def row_width(self) -> int:
        """The width of the projector's output rows."""
        return self.out

    @property
    def max_patches(self) -> int:
        """The maximum number of patches of a picture."""
        return (self.side // self.patch) ** 2

    @property
    def max_grid(self) -> tuple[int, int]:
        """Rows and columns of patches of the largest picture."""
        return self.side // self.patch, self.side // self.patch

    def compute_rows(self, picture: ResizableImage, w: Weights) -> np.ndarray:
        """Compute the encoder's input for a picture, float32 [patches, input_width]."""
        return cut_into_patches(self, picture)

    def insert_breaks(self, rows: np.ndarray, grid: tuple[int, int], w: Weights) -> np.ndarray:
        """Return a picture's rows with the embeddings that the family inserts, such as line breaks."""
        return rows

    def arrange(self, rows: list[np.ndarray], size: Size, w: Weights) -> list[np.ndarray]:
        """Arrange the rows of an image's pictures; a family may merge those of several pictures."""
        return rows

    def compute_mrope_positions(self, picture: ResizableImage) -> np.ndarray | None:
        """Return the M-RoPE positions of a picture's rows in the language model, int64 [rows, 3].

        The columns are time, height and width. None means consecutive positions, as for text.
        """
        return None

    def compute_rotary_positions(self, grid: tuple[int, int]) -> np.ndarray | None:
        """Return the RoPE positions of the patches in the encoder, int64 [patches, 3].

        The columns are time, height and width. None means an encoder without RoPE.
        """
        return None

    def find_window_ends(self, grid: tuple[int, int]) -> np.ndarray | None:
        """Return the row index at which each attention window ends, int64; None without windows."""
        return None

    def is_windowed(self, layer: int) -> bool:
        """Return whether a layer's rows attend only to their own window."""
        return False

    def list_states(self) -> Sequence[PagedState]:
        """Return the state of every layer: keys and values."""
        return [PagedState(layer, self.heads, self.head_dim, self.head_dim) for layer in range(self.layers)]

    def compute_grid(self, picture: ResizableImage) -> tuple[int, int]:
        """Return the number of rows and columns of patches."""
        columns, rows = picture.size
        return rows // self.patch, columns // self.patch


def read_vision(fields: HyperparameterReader, merge: int = 1, kind: str = "") -> dict[str, Any]:
    """Read the fields that all encoders have. Raises ModelError.

    merge: the default of a file without vision.projector.scale_factor.  kind: if set, instead of the file's projector
    type.
    """
    heads, width = fields.read_count("vision.attention.head_count"), fields.read_count("vision.embedding_length")
    if width % heads:
        raise fields.make_error(
            f"vision.embedding_length {width} is not divisible by vision.attention.head_count {heads}"
        )
    side, patch = fields.read_count("vision.image_size"), fields.read_count("vision.patch_size")
    if side > MAX_SIDE or patch > side:
        raise fields.make_error(
            f"vision.image_size must be at most {MAX_SIDE}, and vision.patch_size at most that (found {side}, {patch})"
        )
    merge = fields.read_count("vision.projector.scale_factor", merge)
    if merge > side // patch:
        raise fields.make_error(f"the merge factor {merge} must be at most the {side // patch} patches per side")
    return {
        "kind": kind or read_projector_type(fields),
        "path": fields.path,
        "layers": fields.read_integer("vision.block_count", None, 1, 1024),
        "width": width,
        "hidden": fields.read_count("vision.feed_forward_length", 0),
        "heads": heads,
        "epsilon": fields.read_epsilon("vision.attention.layer_norm_epsilon"),
        "side": side,
        "patch": patch,
        "merge": merge,
        "out": fields.read_count("vision.projection_dim"),
        "activation": read_activation(fields),
        "mean": read_rgb(fields, "vision.image_mean", 0.0),
        "deviation": read_rgb(fields, "vision.image_std", 1e-3),
    }


def read_projector_type(fields: HyperparameterReader) -> str:
    """Return the projector's type. Raises ModelError."""
    return fields.read_text("projector_type" if fields.has("projector_type") else "vision.projector_type")


def read_activation(fields: HyperparameterReader) -> str:
    """Read the feed-forward network's activation. Raises ModelError.

    Without a flag it is x * sigmoid(1.702 x).
    """
    activations = [name for name in ("gelu", "silu") if fields.read_flag(f"use_{name}", False)]
    if len(activations) > 1:
        raise fields.make_error("clip.use_gelu and clip.use_silu must not both be true")
    return activations[0] if activations else "gelu_quick"


def read_rgb(fields: HyperparameterReader, name: str, least: float) -> tuple[float, ...]:
    """Read three values, for red, green and blue. Raises ModelError."""
    numbers = fields.read_array(name, "f", "three numbers")
    if len(numbers) != 3 or not (np.isfinite(numbers) & (numbers >= least) & (numbers <= 1000)).all():
        raise fields.make_value_error(name, f"three numbers from {least:g} up")
    return tuple(float(number) for number in numbers.astype(np.float32))


def cut_into_patches(h: VisionHyperparameters, picture: ResizableImage) -> np.ndarray:
    """Return a picture in RGB as normalized patches, row by row, float32 [patches, 3 * patch * patch].

    A patch has all its red values first, then green, then blue, as the weights of a convolution.
    """
    numbers: np.ndarray = np.asarray(picture, np.uint8).astype(np.float32)
    numbers /= np.float32(255)
    numbers -= np.array(h.mean, np.float32)
    numbers /= np.array(h.deviation, np.float32)
    rows, columns = h.compute_grid(picture)
    patches = numbers[: rows * h.patch, : columns * h.patch].reshape(rows, h.patch, columns, h.patch, 3)
    return np.ascontiguousarray(patches.transpose(0, 2, 4, 1, 3)).reshape(rows * columns, h.pixels)


def group_in_squares(x: np.ndarray, grid: tuple[int, int], side: int) -> np.ndarray:
    """Group a grid's rows by squares of `side` * `side` to [squares, side * side, width].

    The grid is padded with zeros to whole squares.
    """
    rows, columns = grid
    x = x.reshape(rows, columns, -1)
    x = np.pad(x, ((0, -rows % side), (0, -columns % side), (0, 0))) if rows % side or columns % side else x
    rows, columns, width = x.shape
    squares = x.reshape(rows // side, side, columns // side, side, width).transpose(0, 2, 1, 3, 4)
    return squares.reshape(-1, side * side, width)
