"""Declare projectors: their configuration, sizes and tensors."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from localllm.arch.vision.hyperparameters import MAX_SIDE
from localllm.convert.config import CheckpointConfig
from localllm.convert.transforms import DerivedSource, Shape, TensorSource, as_float32, from_array, pick_rows
from localllm.frozen import frozen


@frozen
class VisionConfig:
    """The configuration files of a vision model's checkpoint.

    Attributes:
        whole: config.json.  vision: its vision_config.
        pictures: image preprocessing, from preprocessor_config.json and processor_config.json.
        out: embedding length of the language model.
    """

    whole: CheckpointConfig
    vision: CheckpointConfig
    pictures: CheckpointConfig
    out: int


def add_defaults(c: VisionConfig, defaults: Mapping[str, object]) -> VisionConfig:
    """Return the configuration with values that vision_config may omit."""
    values = {name: value for name, value in c.vision.content.items() if value is not None}
    return replace(c, vision=CheckpointConfig({**defaults, **values}, c.vision.path))


@frozen
class EncoderSizes:
    """The sizes of a vision transformer; side and patch in pixels, out: embedding length of the language model."""

    layers: int
    width: int
    hidden: int
    heads: int
    side: int
    patch: int
    out: int

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.side // self.patch) ** 2

    @property
    def convolution(self) -> Shape:
        return (self.width, 3, self.patch, self.patch)

    @property
    def metadata(self) -> dict[str, object]:
        """The GGUF keys of these sizes, without "clip.vision."."""
        return {
            "projection_dim": self.out,
            "image_size": self.side,
            "patch_size": self.patch,
            "embedding_length": self.width,
            "feed_forward_length": self.hidden,
            "block_count": self.layers,
            "attention.head_count": self.heads,
        }


@frozen
class ProjectorTensor:
    """The form in which a checkpoint stores a tensor of the projector.

    Attributes:
        theirs: stored name without the prefix of the encoder or the projector.
        shape: stored shape.  convert: transformation of the tensor.
    """

    theirs: str
    shape: Shape
    convert: Callable[[TensorSource], TensorSource] = lambda source: source


Parts = Mapping[str, ProjectorTensor]  # by GGUF's names


@frozen
class ProjectorDeclaration:
    """The metadata and tensors of a projector, declared before any weight is read.

    Attributes:
        metadata: keys without "clip."; None omits a key.
        unread: prefixes of stored tensors to ignore.
    """

    encoder: EncoderSizes
    metadata: Mapping[str, object]
    parts: Parts
    unread: tuple[str, ...] = ()


def read_encoder_sizes(c: VisionConfig, names: Mapping[str, str] = {}, **sizes: int) -> EncoderSizes:
    """Read the sizes of an encoder. Raises ModelError.

    names: keys of config.json that differ from the usual ones. sizes: values that are not read.
    """
    usual = {
        "layers": "num_hidden_layers", "width": "hidden_size", "hidden": "intermediate_size",
        "heads": "num_attention_heads", "side": "image_size", "patch": "patch_size", **names,
    }  # fmt: skip
    read = {size: c.vision.read_count(name, maximum=MAX_SIDE * 4) for size, name in usual.items() if size not in sizes}
    result = EncoderSizes(**read, **sizes, out=c.out)
    if result.width % result.heads or not result.patch <= result.side <= MAX_SIDE:
        raise c.vision.make_error(
            "vision_config: hidden_size must be divisible by num_attention_heads, and image_size must be from "
            f"patch_size to {MAX_SIDE}"
        )
    return result


def declare_with_bias(ours: str, source: str, *shape: int) -> dict[str, ProjectorTensor]:
    """Declare the weight and the bias of a matrix or a norm.

    ours, source: names in GGUF and in the checkpoint.
    """
    return {
        f"{ours}.weight": ProjectorTensor(f"{source}.weight", shape),
        f"{ours}.bias": ProjectorTensor(f"{source}.bias", shape[:1]),
    }


def declare_tensor(ours: str, source: str, *shape: int) -> dict[str, ProjectorTensor]:
    """Declare the weight of a matrix or a norm without a bias.

    ours, source: names in GGUF and in the checkpoint.
    """
    return {f"{ours}.weight": ProjectorTensor(f"{source}.weight", shape)}


def repeat_in_layers(count: int, source: str, layer: Parts) -> dict[str, ProjectorTensor]:
    """Repeat a layer's tensors for each of `count` layers.

    source: stored name of the list of layers.
    """
    return {
        f"v.blk.{number}.{name}": ProjectorTensor(f"{source}.{number}.{part.theirs}", part.shape, part.convert)
        for number in range(count)
        for name, part in layer.items()
    }


def take_slice(source: TensorSource, first: int, count: int) -> DerivedSource:
    """Take `count` rows of a matrix from `first` on, or elements of a vector."""
    if len(source.shape) == 1:
        return from_array(as_float32(source.read_rows(0, 1), source.dtype).reshape(-1)[first : first + count])
    times = prod(source.shape[1:-1])
    return pick_rows(source, (count, *source.shape[1:]), lambda rows: rows + first * times)
