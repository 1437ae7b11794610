"""Declare how the checkpoints of an architecture become GGUF files."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.tensors import Shape, TensorSource
from localllm.convert.weights import Stored
from localllm.frozen import frozen

Dimensions = tuple[str, ...]  # a shape, by names of CheckpointFacts.sizes
Sizes = Mapping[str, int]
Build = Callable[[Sequence[TensorSource], Shape, Sizes], TensorSource]  # (stored tensors, shape, sizes) to the tensor
NUMBERS, BYTES = ("F64", "F32", "F16", "BF16"), ("U8",)  # safetensors types


@frozen
class DerivedTensor:
    """A GGUF tensor that a checkpoint stores in another shape, or as several tensors."""

    dimensions: Dimensions
    of: Mapping[str, Dimensions]  # stored names, after the layer's number, and their shapes
    build: "Build"
    dtypes: tuple[str, ...] = NUMBERS
    needed: bool = True


Layer = Mapping[str, Dimensions | DerivedTensor]  # by GGUF names without "blk.N." and ".weight"


@frozen
class Family:
    """The checkpoints of a GGUF architecture. Every matrix may have a bias."""

    arch: str  # general.architecture
    layer: Callable[[Sizes, int], Layer]  # a layer's tensors, by sizes and number
    read: Callable[[Config], CheckpointFacts]
    whole: Layer | Callable[[Sizes], Layer] = field(default_factory=dict)  # further tensors outside layers
    last_norm: str = "output_norm"  # "": the norm has no weights
    rotated: tuple[str, ...] = ()  # matrices that rotate halves of a head, where GGUF rotates pairs
    parted: tuple[str, ...] = ()  # matrices that rotate pairs, where GGUF rotates halves
    transposed: tuple[str, ...] = ()  # matrices that are stored transposed
    offset_norms: bool = False  # norms multiply by 1 + weight
    biased: tuple[str, ...] = ()  # tensors that must have a bias
    bare: tuple[str, ...] = ()  # tensors whose GGUF names do not end with .weight
    defaults: Mapping[str, object] = field(default_factory=dict)  # values that config.json may omit
    sees: bool = False  # has vision tensors, which are ignored
    decodes: bool = True  # makes logits: has an output norm, and an output matrix unless tied
    prefixes: tuple[str, ...] = ()  # prefixes of tensor names that are removed
    renamed: Mapping[str, str] = field(default_factory=dict)  # stored to GGUF names, both without suffix
    unread: re.Pattern[str] | None = None  # names, without prefixes, of tensors that are ignored
    projects: bool = False  # may have Dense modules after pooling
    named_as: str = ""  # architecture whose tensor names gguf's table has, if it lacks this one
    vocabulary: str = ""  # tokenizer.ggml.model of SentencePiece vocabularies, if not "llama"
    named: Callable[[str, int], str] | None = None  # maps a tensor's name and the number of layers to a name gguf knows
    more: Mapping[str, object] = field(default_factory=dict)  # metadata with full keys
    of_tensors: Callable[[Mapping[str, Stored], CheckpointFacts], Mapping[str, object]] | None = None  # more metadata
