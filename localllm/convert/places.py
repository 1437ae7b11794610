"""List the tensors of a GGUF architecture, and the checkpoint's tensors from which each is built."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from localllm.convert.family import NUMBERS, DerivedTensor, Dimensions, Family, Sizes
from localllm.convert.tensors import Shape, TensorSource, column, flat, map_values, to_halves, to_pairs, transpose
from localllm.frozen import frozen

BARE = ("ssm_a", "ssm_d")  # tensors whose GGUF names do not end with .weight


@frozen
class TensorPlace:
    """The origin of a tensor of the GGUF file."""

    of: Mapping[str, Shape]  # shapes of the stored parts, by name: blk.0.attn_q.weight
    build: Callable[[Sequence[TensorSource]], TensorSource]
    dtypes: tuple[str, ...] = NUMBERS
    needed: bool = True


def places(family: Family, sizes: Sizes, tied: bool) -> dict[str, TensorPlace]:
    """List all tensors of the architecture by their GGUF names, in file order."""
    model = CheckpointModel(family, sizes)
    result = dict(model.places_of("", "token_embd", ("vocab", "width")))
    tensors = family.whole(sizes) if callable(family.whole) else family.whole
    for name, dimensions in tensors.items():
        result |= model.places_of("", name, dimensions)
    for number in range(sizes["layers"]):
        for name, its in family.layer(sizes, number).items():
            result |= model.places_of(f"blk.{number}.", name, its)
    if not family.decodes:
        return result
    if family.last_norm and family.last_norm not in result:
        result |= model.places_of("", family.last_norm, ("width",))
    return result if tied else result | dict(model.places_of("", "output", ("vocab", "width")))


@frozen
class CheckpointModel:
    """A family with the sizes of one model."""

    family: Family
    sizes: Sizes

    def places_of(
        self, prefix: str, name: str, dimensions: Dimensions | DerivedTensor
    ) -> Iterator[tuple[str, TensorPlace]]:
        """Yield the places of a tensor and, if it may have one, of its bias; prefix: "blk.N." or ""."""
        whole_name = prefix + name if name in (*BARE, *self.family.bare) or "." in name else f"{prefix}{name}.weight"
        if isinstance(dimensions, DerivedTensor):
            yield whole_name, self._build(prefix, dimensions)
            return
        shape, bias = self._shape(dimensions), f"{prefix}{name}.bias"
        yield whole_name, self._usual(whole_name, name, shape[::-1] if name in self.family.transposed else shape)
        if (prefix and len(shape) == 2) or name in self.family.biased:
            yield bias, self._usual(bias, f"{name}.bias", shape[:1], name in self.family.biased)

    def _build(self, prefix: str, its: DerivedTensor) -> TensorPlace:
        """Return the place of a derived tensor."""
        shape, of = self._shape(its.dimensions), {prefix + name: self._shape(part) for name, part in its.of.items()}
        return TensorPlace(of, lambda sources: its.build(sources, shape, self.sizes), its.dtypes, its.needed)

    def _usual(self, whole_name: str, name: str, stored: Shape, needed: bool = True) -> TensorPlace:
        """Return the place of a tensor that is stored under a name that gguf knows."""
        return TensorPlace({whole_name: stored}, lambda sources: self._reorder(name, sources[0]), needed=needed)

    def _reorder(self, name: str, source: TensorSource) -> TensorSource:
        """Apply the family's row orders and offsets; name: with ".bias" for biases."""
        if name.removesuffix(".bias") in (*self.family.rotated, *self.family.parted):
            order = to_pairs if self.family.rotated else to_halves
            matrix = source if len(source.shape) > 1 else column(source)
            rotated = order(matrix, self.sizes["head_dim"], self.sizes.get("rotated_dims", 0))
            return rotated if len(source.shape) > 1 else flat(rotated)
        if name in self.family.transposed:
            return transpose(source)
        if self.family.offset_norms and name.endswith("norm"):
            return map_values(source, lambda numbers: numbers + 1)
        return source

    def _shape(self, dimensions: Dimensions) -> Shape:
        return tuple(self.sizes[dimension] for dimension in dimensions)
