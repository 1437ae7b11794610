"""Opens the folder of a checkpoint: all its parts together, checked against each other."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from localllm.convert.arrangement import CheckpointTensor, arranged, gguf_tensor, with_guessing_layers
from localllm.convert.config import Config
from localllm.convert.description import description
from localllm.convert.families import family_of
from localllm.convert.families.bert import RANK
from localllm.convert.families.layers import PACKED, TURNED
from localllm.convert.files import read_json
from localllm.convert.modules import left_out, pooling_type, projections, prompts
from localllm.convert.sampling import sampling_metadata
from localllm.convert.tensors import kept
from localllm.convert.unused_keys import unused_of_config
from localllm.convert.vocabulary import vocabulary_metadata
from localllm.convert.weights import Stored, open_weights
from localllm.errors import ModelError
from localllm.quant.recipes import recipe_named


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
    def ignored(self) -> Sequence[str]:
        return ()

    @property
    def parts(self) -> list[list[str]]:
        return [[tensor.name for tensor in self.tensors]]


def open_folder(path: str | os.PathLike[str]) -> Checkpoint:
    """The model in the folder of a Hugging Face checkpoint. Raises ModelError for whatever is missing, inconsistent or
    not supported."""
    folder = Path(path)
    config = Config.of(folder)
    family = family_of(config)
    config = config.of_text(family.defaults)
    stored = open_weights(folder)
    h = family.read(config)
    if family.named:
        stored = {family.named(name, h.sizes["layers"]): tensor for name, tensor in stored.items()}
    h = with_guessing_layers(h, stored)
    h = h.plus({"packed": packed(stored, h.sizes["width"])})
    tensors = [*arranged(folder, stored, family, h, config.warnings)]
    tensors += [gguf_tensor(name, kept(values)) for name, values in h.tensors.items()]
    for name, matrix in projections(folder, family.projects).items():
        tensors.append(gguf_tensor(f"{name}.weight", matrix))
        sizes = zip(("out", "in"), matrix.shape, strict=True)
        h = h.plus({}, **{f"{name}_feat_{side}": size for side, size in sizes})
    vocabulary, warnings = vocabulary_metadata(folder, h.sizes["vocab"], family.vocabulary)
    sampling, more = sampling_metadata(read_json(folder / "generation_config.json") or {})
    metadata = {"general.architecture": family.arch, **sampling}
    metadata |= description(folder, {t.name: t.shape for t in tensors})
    if (pooling := pooling_type(folder)) is not None and h.metadata.get("pooling_type") != RANK:
        h = h.plus(pooling_type=pooling)
    metadata |= {f"{family.arch}.{name}": value for name, value in h.metadata.items()} | vocabulary | prompts(folder)
    if "types" in h.sizes:
        metadata["tokenizer.ggml.token_type_count"] = h.sizes["types"]
    metadata |= {**family.more, **(family.of_tensors(stored, h) if family.of_tensors else {})}
    metadata |= {"general.file_type": file_type(tensors), "general.quantization_version": gguf.GGML_QUANT_VERSION}
    refuse_lone_surrogates(folder, metadata)
    warnings = [*config.warnings, *unused_of_config(config), *more, *warnings, *left_out(folder)]
    return Checkpoint(os.fspath(path), own_files(folder), metadata, tensors, warnings)


def packed(stored: Mapping[str, Stored], width: int) -> int:
    """How experts are stored: 0 as a tensor each, PACKED as one whose rows are those of matrices, TURNED by columns."""
    found = [tensor.shape for name, tensor in stored.items() if name.endswith(".experts.down_proj")]
    return 0 if not found else TURNED if found[0][-1:] == (width,) else PACKED


def own_files(folder: Path) -> list[str]:
    """What belongs to a checkpoint."""
    return sorted(str(file) for file in folder.iterdir() if file.suffix != ".gguf" and file.is_file())


def file_type(tensors: list[CheckpointTensor]) -> int:
    """general.file_type: the format of most matrices, or the one that checkpoints are quantized in."""
    formats = [tensor.format.name for tensor in tensors if len(tensor.shape) > 1]
    return recipe_named("MXFP4" if "MXFP4" in formats else max(sorted(set(formats)), key=formats.count)).number


def refuse_lone_surrogates(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Raise ModelError for strings that JSON can spell and UTF-8 cannot."""
    for key, value in metadata.items():
        try:
            "".join(text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)).encode()
        except UnicodeEncodeError:
            raise ModelError(f"{folder}: {key}: half a character (a lone surrogate)") from None
