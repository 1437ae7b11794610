"""CLIP (Radford et al. 2021, arXiv 2103.00020).

Two encoders embed images and text as vectors of the same space.
Files are those of clip.cpp (https://github.com/monatis/clip.cpp), which llama.cpp's legacy converter writes, too:
`general.architecture` "clip" with `clip.has_text_encoder`, hyperparameters below `clip.text.` and `clip.vision.`,
tensors below `t.` and `v.`, and a projection after each. llama.cpp itself reads no text encoder.

The text encoder is causal, and the last token's row becomes the vector; a picture's vector is the row of its class
token.
"""

from typing import ClassVar, NamedTuple

import numpy as np

from localllm.arch.family import Activation, Builder, HyperparameterReader, Weight, Weights, frozen
from localllm.arch.metadata import require_general
from localllm.arch.vision.hyperparameters import VisionHyperparameters, read_activation, read_vision
from localllm.arch.vision.llava import add_class_position, prepend_class_token
from localllm.arch.vision.resizing import BICUBIC, ResizableImage, resize
from localllm.arch.vision.vit import apply_transformer, to_matrix
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile

CLIP = "clip"
TEXT_ENCODER = "clip.has_text_encoder"


@frozen
class ClipVisionHyperparameters(VisionHyperparameters):
    exact: ClassVar[bool] = True

    @property
    def max_patches(self) -> int:
        """The number of patches, including the class token for the whole picture."""
        return super().max_patches + 1

    def compute_rows(self, picture: ResizableImage, w: Weights) -> np.ndarray:
        return prepend_class_token(self, picture)


@frozen
class ClipTextHyperparameters(VisionHyperparameters):
    """The hyperparameters of CLIP's text encoder.

    Attributes:
        context: maximum number of tokens of a text.
    """

    exact: ClassVar[bool] = True
    lookahead: ClassVar[int] = 0

    context: int

    @property
    def max_patches(self) -> int:
        return self.context

    @property
    def input_width(self) -> int:
        return self.width


class ClipEncoders(NamedTuple):
    """The hyperparameters of both encoders."""

    vision: ClipVisionHyperparameters
    text: ClipTextHyperparameters


def is_clip(file: GGUFFile) -> bool:
    """Return whether a file has a text encoder and an image encoder."""
    return file.metadata.get("general.architecture") == CLIP and file.metadata.get(TEXT_ENCODER) is True


def read_clip(file: GGUFFile) -> ClipEncoders:
    """Read the hyperparameters. Raises ModelError."""
    require_general(file, ("model", "mmproj"))
    fields = HyperparameterReader(file.metadata, file.path, 0)
    if not (fields.read_flag("has_text_encoder", False) and fields.read_flag("has_vision_encoder", False)):
        raise fields.make_error("the file must have a text encoder and an image encoder")
    vision = ClipVisionHyperparameters(**read_vision(fields, kind=CLIP))
    heads, width = fields.read_count("text.attention.head_count"), fields.read_count("text.embedding_length")
    if width % heads:
        raise fields.make_error(f"text.embedding_length {width} is not divisible by text.attention.head_count {heads}")
    out = fields.read_count("text.projection_dim")
    if out != vision.out:
        raise fields.make_error(f"text.projection_dim {out} and vision.projection_dim {vision.out} must be equal")
    text = ClipTextHyperparameters(
        kind=CLIP, path=fields.path, width=width, heads=heads, out=out, side=1, patch=1, merge=1, mean=(), deviation=(),
        layers=fields.read_integer("text.block_count", None, 1, 1024),
        hidden=fields.read_count("text.feed_forward_length", 0),
        epsilon=fields.read_epsilon("text.attention.layer_norm_epsilon"), activation=read_activation(fields),
        context=fields.read_integer("text.context_length", None, 3, 4096),
    )  # fmt: skip
    return ClipEncoders(vision, text)


def prepare(h: ClipVisionHyperparameters, picture: ResizableImage) -> ResizableImage:
    """Resize the shorter side to the encoder's and crop the square in the middle."""
    columns, rows = picture.size
    shorter = min(columns, rows)
    columns, rows = (int(h.side * length / shorter) for length in (columns, rows))
    resized, left, top = resize(picture, (columns, rows), BICUBIC), (columns - h.side) // 2, (rows - h.side) // 2
    return resized.crop((left, top, left + h.side, top + h.side))


def encode_image(b: Builder, w: Weights, h: ClipVisionHyperparameters, x: Activation) -> Activation:
    """Compute a row for the class token and one for each patch."""
    v = w.get_submodel("v.")
    x = b.add(b.linear(x, to_matrix(v.patch_embd, h.pixels)), b.embed_positions(add_class_position(b, v), b.positions))
    return apply_transformer(b, v, h, b.layer_norm(x, require_bias(v.pre_ln), h.epsilon), h.layers)


def project_image(b: Builder, w: Weights, h: ClipVisionHyperparameters, x: Activation) -> Activation:
    """Project the class token's row."""
    return b.linear(b.layer_norm(x, require_bias(w.get_submodel("v.").post_ln), h.epsilon), w.visual_projection)


def encode_text(b: Builder, w: Weights, h: ClipTextHyperparameters, x: Activation) -> Activation:
    """Compute a row for each token.

    x: the sum of token and position embeddings.
    """
    t = w.get_submodel("t.")
    b.ignore(t.token_embd, t.position_embd)
    for name, table in (("tokens", t.token_embd), ("positions", t.position_embd)):
        least = h.context if name == "positions" else 1
        if len(table.shape) != 2 or table.shape[1] != h.width or table.shape[0] < least:
            raise ModelError(
                f"tensor {table.name} must be a table of {name} with {h.width} columns (found {list(table.shape)})"
            )
    return apply_transformer(b, t, h, x, h.layers)


def project_text(b: Builder, w: Weights, h: ClipTextHyperparameters, x: Activation) -> Activation:
    """Project the last token's row."""
    return b.linear(b.layer_norm(x, require_bias(w.get_submodel("t.").post_ln), h.epsilon), w.text_projection)


def require_bias(norm: Weight) -> Weight:
    """Return a norm. Raises ModelError if it has no bias."""
    if norm.bias is None:
        raise ModelError(f"tensor {norm.name} must have a bias")
    return norm
