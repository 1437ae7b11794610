"""Map the tensors of a checkpoint to their GGUF names, and check that none is missing or left over."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from localllm.convert.family import NUMBERS, CheckpointFamily, DerivedTensor, Dimensions
from localllm.convert.hyperparameters import CheckpointHyperparameters
from localllm.convert.safetensors_files import StoredTensor
from localllm.convert.transforms import (
    Shape,
    Sizes,
    TensorSource,
    as_float32,
    deinterleave_rope_rows,
    from_array,
    interleave_rope_rows,
    map_values,
    scale_rows,
    stack,
    to_column,
    to_float32,
    to_vector,
    transpose,
)
from localllm.errors import ModelError
from localllm.files.gguf.header import printable
from localllm.frozen import frozen
from localllm.quant.formats import BY_NAME, Format

BARE = ("ssm_a", "ssm_d")  # tensors whose GGUF names do not end with .weight


@frozen
class TensorOrigin:
    """The stored tensors that a GGUF tensor is built of, and the function that builds it."""

    of: Mapping[str, Shape]  # shapes of the stored parts, by name: blk.0.attn_q.weight
    build: Callable[[Sequence[TensorSource]], TensorSource]
    dtypes: tuple[str, ...] = NUMBERS
    needed: bool = True


# Tensors without a counterpart in GGUF: constants of old checkpoints, and scales of an 8-bit KV cache.
LEFT_OUT = re.compile(
    r".*\.(inv_freq|cos_cached|sin_cached|masked_bias|attn\.[kv]_scale|self_attn\.[kv]_scale)"
    r"|(transformer\.)?h\.[0-9]+\.attn\.bias"
)
IMAGE_TENSORS = re.compile(r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector)\..*")
IN_LAYER = re.compile(r".*?\b(?:layers|h|blocks)\.([0-9]+)\.(.+)")
EXPERT_NUMBER = re.compile(r"\.experts\.([0-9]+)\.")
UNTIED = "if it is the embedding (lm_head is tied), set tie_word_embeddings to true in config.json"
# Matrices that are always F32.
FULL_NUMBERS = ("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "ssm_conv1d", "token_types", "attn_rel_b")
PARTS = {".gamma": ".weight", ".beta": ".bias"}  # suffixes of norms in TensorFlow

Found = dict[int, StoredTensor]  # tensors of one name, by expert; -1: one for all experts


@dataclass(frozen=True, eq=False)
class CheckpointTensor:
    """A tensor as the GGUF file will have it; any thread can read its rows on demand."""

    name: str
    format: Format  # F32, F16, BF16, MXFP4
    shape: Shape  # the row length last
    source: TensorSource

    def read_rows(self, first: int, last: int) -> np.ndarray:
        """Read rows first to last - 1: uint8 [last - first, row bytes]. A vector has one row. Raises ModelError."""
        return self.source.read_rows(first, last)

    def release_rows(self, first: int, last: int) -> None:
        """Do nothing, because no rows are cached."""


def convert_tensor(name: str, source: TensorSource) -> CheckpointTensor:
    """Convert a tensor to the type that GGUF's readers expect: F32 for vectors and some matrices, else its own.

    Vectors are loaded into memory.
    """
    if len(source.shape) == 1:
        source = from_array(as_float32(source.read_rows(0, 1), source.dtype).reshape(-1))
    base = name.removesuffix(".weight")
    last = base.rpartition(".")[2]
    if source.dtype == "F64" or base == name or last in FULL_NUMBERS or last.endswith("_norm"):
        source = to_float32(source)
    return CheckpointTensor(name, BY_NAME[source.dtype], source.shape, source)


def add_mtp_layers(h: CheckpointHyperparameters, stored: Mapping[str, StoredTensor]) -> CheckpointHyperparameters:
    """Count multi-token prediction layers among the layers, if the checkpoint stores them."""
    layers, mtp_layers = h.sizes["layers"], h.sizes.get("mtp_layers", 0)
    numbers = {int(layer[1]) for name in stored if (layer := IN_LAYER.fullmatch(name))}
    if max(numbers, default=0) < layers or not mtp_layers:
        return h.update({"mtp_layers": 0})
    total, recurrent = layers + mtp_layers, h.metadata.get("attention.recurrent_layers")
    if recurrent is not None:
        h = h.update(attention__recurrent_layers=[*recurrent, *[False] * mtp_layers])
    return h.update({"layers": total}, block_count=total, nextn_predict_layers=mtp_layers)


def arrange_tensors(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    family: CheckpointFamily,
    h: CheckpointHyperparameters,
    warnings: list[str],
) -> Iterator[CheckpointTensor]:
    """Yield all tensors under their GGUF names, in layer order.

    Raises ModelError for a missing tensor, and for one that the architecture does not use.
    """
    is_tied = h.tied and not has_own_output(stored, family, h, warnings)
    tensor_places = list_origins(family, h.sizes, is_tied)
    matches = match_tensors(stored, family, h, tensor_places, warnings)
    for name, place in tensor_places.items():
        if all(part in matches for part in place.of):
            sources = [load_tensor(folder, part, matches[part], shape, place) for part, shape in place.of.items()]
            factors = h.factors.get(re.sub(r"^blk\.\d+\.", "", name).removesuffix(".weight"), ())
            yield convert_tensor(name, scale_rows(place.build(sources), factors))
        elif place.needed:
            hint = f"; {UNTIED}" if name == "output.weight" else ""
            raise ModelError(f"{folder}: the tensor for {name} of the architecture {family.arch} is missing{hint}")


def has_own_output(
    stored: Mapping[str, StoredTensor], family: CheckpointFamily, h: CheckpointHyperparameters, warnings: list[str]
) -> bool:
    """Return whether a checkpoint with tied embeddings stores an output matrix that differs from the embedding."""
    names, outputs = TensorNameMap(family, h.sizes), ("token_embd.weight", "output.weight")
    names_here = {
        names.find_stored(names.strip_affixes(stored_name), set(outputs))[0]: stored_name for stored_name in stored
    }
    if not family.decodes or not all(name in names_here for name in outputs):
        return False
    embedding, output = (stored[names_here[name]] for name in outputs)
    return is_untied(embedding, output, find_arch_id(family), warnings, names_here["output.weight"])


def match_tensors(
    stored: Mapping[str, StoredTensor],
    family: CheckpointFamily,
    h: CheckpointHyperparameters,
    tensor_places: Mapping[str, TensorOrigin],
    warnings: list[str],
) -> dict[str, Found]:
    """Match the stored tensors to the names in TensorOrigin.of.

    Raises ModelError for a tensor that the architecture does not use.
    """
    names = TensorNameMap(family, h.sizes)
    parts = {part for place in tensor_places.values() for part in place.of}
    matches: dict[str, Found] = {}
    for stored_name, tensor in stored.items():
        plain = names.strip_affixes(stored_name)
        if LEFT_OUT.fullmatch(stored_name) or names.is_ignored(plain):
            continue
        name, expert = names.find_stored(plain, parts)
        if h.tied and name == "output.weight" and name not in parts:
            continue
        if name not in parts or expert in matches.setdefault(name, {}):
            raise ModelError(
                f"{tensor.path}: tensor {printable(stored_name)} is not part of the architecture {family.arch}"
            )
        matches[name][expert] = tensor
    if names.images:
        warning = f"{names.images} tensors of the vision encoder are omitted"
        warnings.append(f"{warning}; use quantize --mmproj to convert the projector")
    return matches


class TensorNameMap:
    """Translates the tensor names of a family's checkpoints to GGUF names."""

    def __init__(self, family: CheckpointFamily, sizes: Sizes):
        self._family, self._sizes = family, sizes
        self._map = gguf.get_tensor_name_map(find_arch_id(family), sizes["layers"])
        self.images = 0  # number of ignored vision tensors

    def strip_affixes(self, name: str) -> str:
        """Remove the prefixes and suffixes that only some checkpoints have."""
        for prefix in self._family.prefixes:
            name = name.removeprefix(prefix)
        for old, new in PARTS.items() if not self._family.decodes else ():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        return name

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor is for images or for another task, and count those for images."""
        if self._family.unread and self._family.unread.fullmatch(name):
            return True
        if self._family.sees and IMAGE_TENSORS.fullmatch(name):
            self.images += 1
            return True
        return False

    def find_stored(self, stored_name: str, parts: set[str]) -> tuple[str, int]:
        """Return the GGUF name of a stored tensor, "" if it has none, and the index of its expert, -1 if it is for all.

        parts: the GGUF names that the family expects.
        """
        plain = (
            stored_name.replace("language_model.", "")
            .replace("text_model.", "")
            .replace("e_score_correction_bias", "e_score_correction.bias")
        )
        expert = EXPERT_NUMBER.search(plain)
        plain = EXPERT_NUMBER.sub(".experts.", plain, count=1)
        if renamed := self._family.renamed.get(plain.rpartition(".")[0]):
            return f"{renamed}.{plain.rpartition('.')[2]}", -1
        if plain in parts:
            return plain, -1
        layer = IN_LAYER.fullmatch(plain)
        if layer and (key := f"blk.{int(layer[1])}.{layer[2]}") in parts:
            return key, int(expert[1]) if expert else -1
        name = self._map.get_name(plain, try_suffixes=(".weight", ".bias")) or ""
        name = name if name in parts or name.endswith(".weight") else f"{name}.weight"
        return name, int(expert[1]) if expert else -1


def load_tensor(folder: Path, name: str, match: Found, shape: Shape, place: TensorOrigin) -> TensorSource:
    """Return a tensor of the expected shape, stacked from its experts if each is stored alone. Raises ModelError."""
    if -1 in match and len(match) == 1:
        return check_tensor(match[-1], shape, place.dtypes)
    if len(shape) != 3 or set(match) != set(range(shape[0])):
        raise ModelError(f"{folder}: expected {shape[0]} tensors for the experts of {name}, found {len(match)}")
    return stack([check_tensor(match[expert], shape[1:], place.dtypes) for expert in range(shape[0])])


def check_tensor(tensor: StoredTensor, shape: Shape, dtypes: tuple[str, ...]) -> StoredTensor:
    """Return the tensor unchanged. Raises ModelError if its shape or type is not the expected one."""
    if tensor.dtype not in dtypes:
        accepted = f"must be {' or '.join(dtypes)} (found {printable(tensor.dtype)})"
        raise ModelError(f"{tensor.path}: tensor {tensor.name}: the type {accepted}")
    if tensor.shape != shape:
        sizes = f"{list(shape)} by config.json, found {list(tensor.shape)}"
        raise ModelError(f"{tensor.path}: tensor {tensor.name}: expected the shape {sizes}")
    return tensor


def find_arch_id(family: CheckpointFamily) -> gguf.MODEL_ARCH:
    """Return the gguf package's id of an architecture, or of the relative whose tensor names it shares."""
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    if (named_as := family.named_as or family.arch) not in known:
        raise ModelError(f'the gguf package has no tensor names of {named_as}: give a relative in "named_as"')
    return known[named_as]


def list_origins(family: CheckpointFamily, sizes: Sizes, tied: bool) -> dict[str, TensorOrigin]:
    """Return the origins of all GGUF tensors of the architecture, in file order."""
    model = SizedFamily(family, sizes)
    result = dict(model.list_origins("", "token_embd", ("vocab", "width")))
    tensors = family.whole(sizes) if callable(family.whole) else family.whole
    for name, dimensions in tensors.items():
        result |= model.list_origins("", name, dimensions)
    for number in range(sizes["layers"]):
        for name, its in family.layer(sizes, number).items():
            result |= model.list_origins(f"blk.{number}.", name, its)
    if not family.decodes:
        return result
    if family.last_norm and family.last_norm not in result:
        result |= model.list_origins("", family.last_norm, ("width",))
    return result if tied else result | dict(model.list_origins("", "output", ("vocab", "width")))


@frozen
class SizedFamily:
    """A family with the sizes of one model, which resolve its shapes."""

    family: CheckpointFamily
    sizes: Sizes

    def list_origins(
        self, prefix: str, name: str, dimensions: Dimensions | DerivedTensor
    ) -> Iterator[tuple[str, TensorOrigin]]:
        """Yield the origin of a tensor, and of its bias unless it cannot have one.

        prefix: "blk.N." or "".
        """
        whole_name = prefix + name if name in (*BARE, *self.family.bare) or "." in name else f"{prefix}{name}.weight"
        if isinstance(dimensions, DerivedTensor):
            yield whole_name, self._make_derived_origin(prefix, dimensions)
            return
        shape, bias = self._resolve_shape(dimensions), f"{prefix}{name}.bias"
        yield (
            whole_name,
            self._make_usual_origin(whole_name, name, shape[::-1] if name in self.family.transposed else shape),
        )
        if (prefix and len(shape) == 2) or name in self.family.biased:
            yield bias, self._make_usual_origin(bias, f"{name}.bias", shape[:1], name in self.family.biased)

    def _make_derived_origin(self, prefix: str, its: DerivedTensor) -> TensorOrigin:
        """Build the origin of a tensor that is computed from stored ones."""
        shape, of = (
            self._resolve_shape(its.dimensions),
            {prefix + name: self._resolve_shape(part) for name, part in its.of.items()},
        )
        return TensorOrigin(of, lambda sources: its.build(sources, shape, self.sizes), its.dtypes, its.needed)

    def _make_usual_origin(self, whole_name: str, name: str, stored: Shape, needed: bool = True) -> TensorOrigin:
        """Build the origin of a tensor that is stored under a name that the gguf package translates."""
        return TensorOrigin({whole_name: stored}, lambda sources: self._reorder(name, sources[0]), needed=needed)

    def _reorder(self, name: str, source: TensorSource) -> TensorSource:
        """Reorder the rows of a tensor, and offset norms, as the family declares.

        name: GGUF name in the layer, with ".bias" for biases.
        """
        if name.removesuffix(".bias") in (*self.family.rotated, *self.family.parted):
            order = interleave_rope_rows if self.family.rotated else deinterleave_rope_rows
            matrix = source if len(source.shape) > 1 else to_column(source)
            rotated = order(matrix, self.sizes["head_dim"], self.sizes.get("rotated_dims", 0))
            return rotated if len(source.shape) > 1 else to_vector(rotated)
        if name in self.family.transposed:
            return transpose(source)
        if self.family.offset_norms and name.endswith("norm"):
            return map_values(source, lambda numbers: numbers + 1)
        return source

    def _resolve_shape(self, dimensions: Dimensions) -> Shape:
        return tuple(self.sizes[dimension] for dimension in dimensions)


def is_untied(
    embedding: TensorSource, output: TensorSource, arch: gguf.MODEL_ARCH, warnings: list[str], name: str
) -> bool:
    """Return whether the stored output matrix differs from the embedding.

    Tools that merge adapters or train heads store such a matrix without changing `tie_word_embeddings`; transformers 5
    and llama.cpp's converter then use both. name: the output matrix's name for warnings.
    """
    rows, step = embedding.shape[0], 4096  # rows compared at once

    def numbers(matrix: TensorSource, first: int) -> np.ndarray:
        return as_float32(matrix.read_rows(first, min(first + step, rows)), matrix.dtype)

    if embedding.shape == output.shape and all(
        np.array_equal(numbers(embedding, first), numbers(output, first), equal_nan=True)
        for first in range(0, rows, step)
    ):
        return False
    differs = f"{name} differs from the embedding, though config.json ties them"
    if gguf.MODEL_TENSOR.OUTPUT not in gguf.MODEL_TENSORS[arch]:
        warnings.append(f"{differs}: it is omitted, because {gguf.MODEL_ARCH_NAMES[arch]} has no output matrix")
        return False
    warnings.append(f"{differs}: both are written")
    return True
