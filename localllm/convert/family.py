"""What the checkpoints of an architecture have in common, and the places that it has for their weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.convert.config import Config
from localllm.convert.hyperparameters import Hyperparameters
from localllm.convert.tensors import Shape, Source, column, computed, flat, in_pairs, transposed

Dimensions = tuple[str, ...]  # of a tensor, by their names in Hyperparameters.sizes
Sizes = Mapping[str, int]
NUMBERS, BYTES = ("F64", "F32", "F16", "BF16"), ("U8",)  # types that tensors may have

BARE = ("ssm_a", "ssm_d")  # whose names in GGUF do not end with .weight


@dataclass(frozen=True)
class MadeOf:
    """A tensor that a checkpoint has in another shape, or as several."""

    dimensions: Dimensions
    of: Mapping[str, Dimensions]  # names there, behind the layer's number
    made: Callable[[Sequence[Source], Shape, Sizes], Source]
    dtypes: tuple[str, ...] = NUMBERS


Layer = Mapping[str, Dimensions | MadeOf]  # by names without "blk.N." and ".weight"


@dataclass(frozen=True)
class Family:
    """The checkpoints of a GGUF architecture. A matrix may have a bias."""

    arch: str  # general.architecture
    layer: Layer | Callable[[Sizes, int], Layer]  # what a layer holds; where they differ, by sizes and the number
    read: Callable[[Config], Hyperparameters]
    whole: Mapping[str, Dimensions] = field(default_factory=dict)  # what the model holds besides the usual
    rotated: tuple[str, ...] = ()  # matrices whose rows are in the order of halves, where GGUF has pairs
    transposed: tuple[str, ...] = ()  # matrices whose rows are the columns of GGUF's
    offset_norms: bool = False  # norms multiply by 1 more than is stored
    biased: tuple[str, ...] = ()  # what must have a bias
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config.json, where it need not say
    sees: bool = False  # has tensors for images, which are left out


@dataclass(frozen=True)
class Place:
    """Where a tensor of the GGUF file comes from."""

    shape: Shape
    of: Mapping[str, Shape]  # names, of the GGUF file or in a layer of the checkpoint: blk.0.attn_q.weight
    made: Callable[[Sequence[Source]], Source]
    dtypes: tuple[str, ...] = NUMBERS
    needed: bool = True


def places(family: Family, sizes: Sizes, tied: bool) -> dict[str, Place]:
    """Of all tensors that the architecture has, by their names in the GGUF file, in its order."""
    found = dict(of_tensor(family, sizes, "", "token_embd", ("vocab", "width")))
    for name, dimensions in family.whole.items():
        found |= of_tensor(family, sizes, "", name, dimensions)
    for number in range(sizes["layers"]):
        layer = family.layer(sizes, number) if callable(family.layer) else family.layer
        for name, its in layer.items():
            found |= of_tensor(family, sizes, f"blk.{number}.", name, its)
    found |= of_tensor(family, sizes, "", "output_norm", ("width",))
    return found if tied else found | dict(of_tensor(family, sizes, "", "output", ("vocab", "width")))


def of_tensor(
    family: Family, sizes: Sizes, prefix: str, name: str, dimensions: Dimensions | MadeOf
) -> Iterator[tuple[str, Place]]:
    """The places of a tensor and of its bias, if it may have one."""

    def shape_of(dimensions: Dimensions) -> Shape:
        return tuple(sizes[dimension] for dimension in dimensions)

    whole_name = prefix + name if name in BARE or "." in name else f"{prefix}{name}.weight"
    if isinstance(dimensions, MadeOf):
        made, shape = dimensions.made, shape_of(dimensions.dimensions)
        of = {prefix + part: shape_of(its) for part, its in dimensions.of.items()}
        yield whole_name, Place(shape, of, lambda sources: made(sources, shape, sizes), dimensions.dtypes)
        return
    shape = shape_of(dimensions)
    stored = shape[::-1] if name in family.transposed else shape
    yield whole_name, Place(shape, {whole_name: stored}, lambda sources: usual(family, sizes, name, sources[0]))
    if (prefix and len(shape) == 2) or name in family.biased:
        bias = f"{prefix}{name}.bias"
        needed = name in family.biased
        yield (
            bias,
            Place(
                shape[:1],
                {bias: shape[:1]},
                lambda sources: usual(family, sizes, f"{name}.bias", sources[0]),
                needed=needed,
            ),
        )


def usual(family: Family, sizes: Sizes, name: str, source: Source) -> Source:
    """What most tensors are made by; name: with ".bias" for those."""
    if name.removesuffix(".bias") in family.rotated:
        matrix = column(source) if len(source.shape) == 1 else source
        paired = in_pairs(matrix, sizes["head_dim"])
        return paired if matrix is source else flat(paired)
    if name in family.transposed:
        return transposed(source)
    if family.offset_norms and name.endswith("norm"):
        return computed(source, lambda numbers: numbers + 1)
    return source
