"""Qwen3-VL (Bai et al. 2025, arXiv 2511.21631) and the vision encoder of Qwen 3.5.

Unlike Qwen2-VL, it also has learned positions for a square picture, interpolated for other shapes, and it adds rows
from earlier layers of the encoder to the first layers of the language model (DeepStack).
"""

import numpy as np

from localllm.arch.family import Activation, Builder, HyperparameterReader, Weights, frozen
from localllm.arch.vision.any_size import compute_corner_weights, interpolate_table, read_any_size, require_square_table
from localllm.arch.vision.qwen2vl import (
    MARKS,
    Qwen2VisionHyperparameters,
    apply_two_matrices,
    embed_video_patches,
    merge_patches,
    prepare,
)
from localllm.arch.vision.resizing import ResizableImage
from localllm.arch.vision.vit import apply_norm, block

__all__ = ["MARKS", "encode", "merge_patches", "prepare", "project", "read"]


@frozen
class Qwen3VisionHyperparameters(Qwen2VisionHyperparameters):
    """The encoder's hyperparameters.

    Attributes:
        deep: the layers whose rows go to the first layers of the language model.
    """

    deep: tuple[int, ...]

    @property
    def input_width(self) -> int:
        """The width of a patch and its position embedding."""
        return self.pixels + self.width

    @property
    def row_width(self) -> int:
        return (1 + len(self.deep)) * self.out

    def compute_rows(self, picture: ResizableImage, w: Weights) -> np.ndarray:
        grid = self.compute_grid(picture)
        y, x = self.list_patches(grid).T
        positions = interpolate_table(w.get_submodel("v.").position_embd, grid, compute_corner_weights)
        return np.concatenate((super().compute_rows(picture, w), positions[y, x]), axis=1)


def read(fields: HyperparameterReader) -> Qwen3VisionHyperparameters:
    shared, name = read_any_size(fields, merge=2), "vision.is_deepstack_layers"
    flags = fields.read_array(name, "b", "an array of flags") if fields.has(name) else np.zeros(0)
    deep = tuple(np.flatnonzero(flags).tolist())
    if deep and deep[-1] >= shared["layers"]:
        raise fields.make_error(
            f"{fields.format_key(name)} names layer {deep[-1]}, but there are only {shared['layers']} layers"
        )
    return Qwen3VisionHyperparameters(**shared, pattern=0, deep=deep)


def encode(b: Builder, w: Weights, h: Qwen3VisionHyperparameters, x: Activation) -> Activation:
    """Compute a row for each patch: the output of the last layer, then those of the DeepStack layers."""
    v = w.get_submodel("v.")
    require_square_table(b, v.position_embd, h.width)
    positions = b.slice_columns(x, h.pixels, h.input_width)
    x, deep = b.add(embed_video_patches(b, v, h, b.slice_columns(x, 0, h.pixels)), positions), list[Activation]()
    for state in h.list_states():
        x = block(b, v.get_layer(state.layer), h, state, x, lambda y: b.rope(y, h.rope, b.positions))
        deep += [x] if state.layer in h.deep else []
    x = apply_norm(b, h, x, v.post_ln)
    for features in deep:
        x = b.concat_heads(x, features, 1)
    return x


def project(b: Builder, w: Weights, h: Qwen3VisionHyperparameters, x: Activation) -> Activation:
    """Project each output to the language model's width; concatenate the results, [rows, outputs * width]."""
    y = apply_two_matrices(b, slice_output(b, h, x, 0), w.require("mm.0"), w.require("mm.2"))
    for number, layer in enumerate(h.deep, 1):
        weights = w.get_submodel(f"v.deepstack.{layer}.")
        deep = b.layer_norm(slice_output(b, h, x, number), weights.norm, h.epsilon)
        y = b.concat_heads(y, apply_two_matrices(b, deep, weights.fc1, weights.fc2), 1)
    return y


def slice_output(b: Builder, h: Qwen3VisionHyperparameters, x: Activation, number: int) -> Activation:
    """Return the columns of merged patches with one output.

    number: 0 for the last layer's output, 1, ... for those of DeepStack layers.
    """
    return b.slice_columns(x, number * h.width, (number + 1) * h.width, (1 + len(h.deep)) * h.width)
