"""What the checkpoints of an architecture have in common."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.tensors import Shape, TensorSource
from localllm.convert.weights import Stored
from localllm.frozen import frozen

Dimensions = tuple[str, ...]  # of a tensor, by their names in Hyperparameters.sizes
Sizes = Mapping[str, int]
NUMBERS, BYTES = ("F64", "F32", "F16", "BF16"), ("U8",)  # types that tensors may have


@frozen
class DerivedTensor:
    """A tensor that a checkpoint has in another shape, or as several."""

    dimensions: Dimensions
    of: Mapping[str, Dimensions]  # names there, behind the layer's number
    made: Callable[[Sequence[TensorSource], Shape, Sizes], TensorSource]
    dtypes: tuple[str, ...] = NUMBERS
    needed: bool = True


Layer = Mapping[str, Dimensions | DerivedTensor]  # by names without "blk.N." and ".weight"


@frozen
class Family:
    """The checkpoints of a GGUF architecture. A matrix may have a bias."""

    arch: str  # general.architecture
    layer: Layer | Callable[[Sizes, int], Layer]  # what a layer holds; where they differ, by sizes and the number
    read: Callable[[Config], CheckpointFacts]
    whole: Layer | Callable[[Sizes], Layer] = field(default_factory=dict)  # what the model holds besides the usual
    last_norm: str = "output_norm"  # "": none that has weights
    rotated: tuple[str, ...] = ()  # matrices whose rows are in the order of halves, where GGUF has pairs
    parted: tuple[str, ...] = ()  # matrices whose rows are in pairs, where GGUF has halves
    transposed: tuple[str, ...] = ()  # matrices whose rows are the columns of GGUF's
    offset_norms: bool = False  # norms multiply by 1 more than is stored
    biased: tuple[str, ...] = ()  # what must have a bias
    bare: tuple[str, ...] = ()  # whose names in GGUF do not end with .weight
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config.json, where it need not say
    sees: bool = False  # has tensors for images, which are left out
    decodes: bool = True  # makes logits: it has an output norm, and an output matrix unless that is the embedding
    prefixes: tuple[str, ...] = ()  # that names of tensors may begin with
    renamed: Mapping[str, str] = field(default_factory=dict)  # names, less ".weight" and ".bias", that are GGUF's here
    unread: re.Pattern[str] | None = None  # names, less prefixes, of tensors that are left out
    projects: bool = False  # may have matrices behind pooling
    named_as: str = ""  # the architecture whose tensors gguf's table calls alike, if it does not have this one
    vocabulary: str = ""  # tokenizer.ggml.model of those that SentencePiece made, if it is not "llama"
    named: Callable[[str, int], str] | None = None  # tensors as they are called elsewhere, by the number of layers
    more: Mapping[str, Any] = field(default_factory=dict)  # metadata with whole names
    of_tensors: Callable[[Mapping[str, Stored], CheckpointFacts], Mapping[str, Any]] | None = None  # more of it
