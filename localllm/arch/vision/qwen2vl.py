"""Qwen2-VL (Wang et al. 2024, arXiv 2409.12191) and Qwen2.5-VL (Bai et al. 2025, 2502.13923).

Pictures have any size, with two-dimensional RoPE; in Qwen2.5-VL most layers attend within windows of the picture.
"""

from typing import ClassVar

import numpy as np

from localllm.arch.family import Activation, Builder, HyperparameterReader, RopeParameters, Weight, Weights, frozen
from localllm.arch.vision.any_size import AnySizeVisionHyperparameters, read_any_size
from localllm.arch.vision.hyperparameters import PreparedImage, cut_into_patches
from localllm.arch.vision.resizing import ResizableImage
from localllm.arch.vision.vit import apply_norm, apply_transformer, to_matrix

MARKS = "<|vision_start|>", "<|vision_end|>"
WINDOW = 112  # pixels, on each side


@frozen
class Qwen2VisionHyperparameters(AnySizeVisionHyperparameters):
    """The encoder's hyperparameters.

    Attributes:
        pattern: every `pattern`-th layer attends to the whole picture, the others within windows; 0: no windows.
    """

    pattern: int

    least: ClassVar[int] = 8
    square: ClassVar[int] = 64

    @property
    def uses_rms_norm(self) -> bool:
        return self.kind == "qwen2.5vl_merger"

    @property
    def rope(self) -> RopeParameters:
        """The parameters of RoPE; each half of the pairs has every second frequency."""
        pairs = tuple(range(0, self.head_dim // 2, 2)) * 2
        return RopeParameters(
            self.head_dim, self.head_dim, interleaved=False, frequency_pairs=pairs, pair_axes=self.pair_axes
        )

    def is_windowed(self, layer: int) -> bool:
        return bool(self.pattern) and (layer + 1) % self.pattern != 0

    def list_patches(self, grid: tuple[int, int]) -> np.ndarray:
        """List each patch's row and column, int64 [patches, 2], window by window.

        Inside a window, patches that become one row of the language model are adjacent.
        """
        y, x = np.indices(grid).reshape(2, -1)
        side = WINDOW // self.patch // self.merge * self.merge if self.pattern else max(grid)
        order = np.lexsort((x, y, x // self.merge, y // self.merge, x // side, y // side))
        return np.stack([y[order], x[order]], axis=1)

    def compute_rows(self, picture: ResizableImage, w: Weights) -> np.ndarray:
        grid = self.compute_grid(picture)
        y, x = self.list_patches(grid).T
        return cut_into_patches(self, picture)[y * grid[1] + x]

    def compute_rotary_positions(self, grid: tuple[int, int]) -> np.ndarray:
        return np.pad(self.list_patches(grid), ((0, 0), (1, 0)))

    def find_window_ends(self, grid: tuple[int, int]) -> np.ndarray | None:
        if not self.pattern:
            return None
        numbers = self.list_patches(grid) // (WINDOW // self.patch // self.merge * self.merge)
        changes = np.flatnonzero((np.diff(numbers, axis=0) != 0).any(axis=1)) + 1
        return np.append(changes, len(numbers))

    def compute_mrope_positions(self, picture: ResizableImage) -> np.ndarray:
        rows, columns = (length // self.merge for length in self.compute_grid(picture))
        y, x = np.indices((rows, columns)).reshape(2, -1)
        return np.stack([np.zeros_like(y), y, x], axis=1)


def read(fields: HyperparameterReader) -> Qwen2VisionHyperparameters:
    shared = read_any_size(fields, merge=2)
    is_windowed = shared["kind"] == "qwen2.5vl_merger"
    h = Qwen2VisionHyperparameters(
        **shared, pattern=fields.read_count("vision.n_wa_pattern", None if is_windowed else 0)
    )
    if is_windowed and h.patch * h.merge > WINDOW:
        raise fields.make_error(f"patch size times merge factor must be at most {WINDOW} (found {h.patch * h.merge})")
    return h


def prepare(h: Qwen2VisionHyperparameters, picture: ResizableImage) -> PreparedImage:
    """Prepare one picture, between control tokens."""
    return PreparedImage([h.fit(picture)], [MARKS[0], 0, MARKS[1]])


def encode(b: Builder, w: Weights, h: Qwen2VisionHyperparameters, x: Activation) -> Activation:
    v = w.get_submodel("v.")
    x = apply_transformer(b, v, h, embed_video_patches(b, v, h, x), h.layers, lambda y: b.rope(y, h.rope, b.positions))
    return apply_norm(b, h, x, v.post_ln)


def embed_video_patches(b: Builder, v: Weights, h: Qwen2VisionHyperparameters, x: Activation) -> Activation:
    """Embed patches as two equal frames of a video, with a convolution for each frame."""
    first, second = (to_matrix(weight, h.pixels) for weight in (v.patch_embd, v.require_exact("patch_embd.weight.1")))
    return b.add(b.linear(x, first), b.linear(x, second))


def merge_patches(h: Qwen2VisionHyperparameters, x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Concatenate each square of patches to one row, in the order of the picture, not of its windows."""
    together = h.merge**2
    places = h.list_patches(grid)[::together] // h.merge
    rows = np.empty((len(x) // together, together * x.shape[1]), np.float32)
    rows[places[:, 0] * (grid[1] // h.merge) + places[:, 1]] = x.reshape(rows.shape)
    return rows


def project(b: Builder, w: Weights, h: Qwen2VisionHyperparameters, x: Activation) -> Activation:
    return apply_two_matrices(b, x, w.require("mm.0"), w.require("mm.2"))


def apply_two_matrices(b: Builder, x: Activation, first: Weight, second: Weight) -> Activation:
    """Apply two matrices with GELU between them."""
    return b.linear(b.gelu_erf(b.linear(x, first)), second)
