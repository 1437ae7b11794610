"""Opens the folder of a checkpoint: all its parts together, checked against each other."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf

from localllm.convert.description import description
from localllm.convert.families import FAMILIES, Family
from localllm.convert.hyperparameters import Hyperparameters, read_hyperparameters
from localllm.convert.tensors import CheckpointTensor, gguf_tensor, made_tensor
from localllm.convert.vocabulary import vocabulary_metadata
from localllm.convert.weights import BYTES, Stored, open_weights
from localllm.errors import ModelError
from localllm.files.gguf_header import shown

FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
}
# What old checkpoints store and nobody reads.
LEFT_OUT = re.compile(r".*\.(inv_freq|cos_cached|sin_cached|masked_bias)")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder, opened: a source for localllm.services.quantize."""

    path: str
    files: list[str]  # all that belongs to it
    metadata: dict[str, Any]
    tensors: list[CheckpointTensor]
    warnings: list[str]  # one line each, for the user

    @property
    def packed(self) -> dict[str, Any]:
        return self.metadata

    @property
    def parts(self) -> list[list[str]]:
        return [[tensor.name for tensor in self.tensors]]


def open_folder(path: str | os.PathLike[str]) -> Checkpoint:
    """The model in the folder of a Hugging Face checkpoint. Raises ModelError for whatever is missing, inconsistent or
    not supported."""
    folder = Path(path)
    sizes = read_hyperparameters(folder)
    family = FAMILIES.get(sizes.architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        name = shown(sizes.architecture)
        raise ModelError(f"{folder / 'config.json'}: architecture {name} is not supported (supported: {known})")
    stored = open_weights(folder)
    tensors = [gguf_tensor(name, tensor, family, sizes) for name, tensor in arranged(folder, stored, family, sizes)]
    if sizes.rope_factors is not None:
        tensors.append(made_tensor("rope_freqs.weight", sizes.rope_factors))
    vocabulary, warnings = vocabulary_metadata(folder, sizes.vocab)
    metadata = {"general.architecture": family.arch, **description(folder, sum(prod(t.shape) for t in tensors))}
    metadata |= sizes.metadata(family.arch) | vocabulary
    metadata |= {"general.file_type": file_type(tensors), "general.quantization_version": gguf.GGML_QUANT_VERSION}
    refuse_lone_surrogates(folder, metadata)
    files = sorted(str(file) for file in folder.iterdir() if file.suffix != ".gguf" and file.is_file())
    return Checkpoint(os.fspath(path), files, metadata, tensors, [*sizes.warnings, *warnings])


def arranged(
    folder: Path, stored: dict[str, Stored], family: Family, sizes: Hyperparameters
) -> list[tuple[str, Stored]]:
    """All tensors under their GGUF names, in the order of the layers. Raises ModelError for one too many or too few."""
    names = gguf.get_tensor_name_map(arch_id(family), sizes.layers)
    expected = expected_shapes(family, sizes)
    found: dict[str, Stored] = {}
    for theirs, tensor in stored.items():
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias")) or ""
        if LEFT_OUT.fullmatch(theirs) or (sizes.tied and name == "output.weight"):
            continue
        if name not in expected or name in found:
            raise ModelError(f"{tensor.path}: tensor {shown(theirs)} has no place in the architecture {family.arch}")
        check_tensor(tensor, expected[name])
        found[name] = tensor
    for name in expected:
        if name not in found and not name.endswith(".bias"):
            raise ModelError(f"{folder}: there is no tensor for {name} of the architecture {family.arch}")
    return [(name, found[name]) for name in expected if name in found]


def check_tensor(tensor: Stored, shape: tuple[int, ...]) -> None:
    """Raise ModelError if a tensor is not of this shape, or of no type that can be read."""
    if tensor.dtype not in BYTES:
        raise ModelError(f"{tensor.path}: tensor {tensor.name}: type {shown(tensor.dtype)} is not supported")
    if tensor.shape != shape:
        sizes = f"{list(tensor.shape)}; expected {list(shape)} by config.json"
        raise ModelError(f"{tensor.path}: tensor {tensor.name} has the shape {sizes}")


def expected_shapes(family: Family, sizes: Hyperparameters) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors that may be there, by GGUF name; matrices may have a bias."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (sizes.vocab, sizes.width)}
    for layer in range(sizes.layers):
        for name, dimensions in family.layer.items():
            shape = tuple(getattr(sizes, dimension) for dimension in dimensions)
            shapes[f"blk.{layer}.{name}.weight"] = shape
            if len(shape) > 1:
                shapes[f"blk.{layer}.{name}.bias"] = shape[:1]
    shapes["output_norm.weight"] = (sizes.width,)
    return shapes if sizes.tied else shapes | {"output.weight": (sizes.vocab, sizes.width)}


def arch_id(family: Family) -> gguf.MODEL_ARCH:
    """The gguf package's number for an architecture."""
    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)


def file_type(tensors: list[CheckpointTensor]) -> int:
    """general.file_type: the format of most matrices."""
    formats = [tensor.format.name for tensor in tensors if len(tensor.shape) > 1]
    return int(FILE_TYPES[max(sorted(set(formats)), key=formats.count)])


def refuse_lone_surrogates(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Raise ModelError for strings that JSON can spell and UTF-8 cannot."""
    for key, value in metadata.items():
        try:
            "".join(value if isinstance(value, list) else [value] if isinstance(value, str) else []).encode()
        except UnicodeEncodeError:
            raise ModelError(f"{folder}: {key}: half a character (a lone surrogate)") from None
